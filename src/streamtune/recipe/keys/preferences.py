"""Keys of preferences between completions; the names are TRL's where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from streamtune.recipe.keys.loss import LossKeys
from streamtune.recipe.rules import (
    DELETE,
    GIVEN,
    ONE_OF_TWO,
    Clash,
    Count,
    Custom,
    Not,
    OneOf,
    Refusal,
    Rules,
    Text,
    Where,
    at_most,
)

PairedLoss = Literal[
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "exo_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "dpop",
    "copg",
    "orpo",
    "simpo",
    "cpo",
]
UnpairedLoss = Literal["kto", "apo_zero_unpaired"]

WITHOUT_REFERENCE = ("orpo", "simpo", "cpo")
UNPAIRED = ("kto", "apo_zero_unpaired")
OF_PAIRS = ("label_smoothing", "rpo_alpha", "simpo_gamma", "cpo_alpha", "dpop_lambda", "reference_free")
OF_SINGLE_COMPLETIONS = ("desirable_weight", "undesirable_weight")


ROW_RULES: Rules = (
    Clash(
        {"overlength": "split"},
        "'overlength: split' makes several rows of one, which {objective} cannot compare",
        "write truncate, drop or error",
    ),
    Clash(
        {"truncate_side": "right", "objective": "grpo"},
        "'truncate_side: right' would cut off where a prompt asks for its answer",
        "write left or middle",
    ),
    Clash(
        {"truncate_side": GIVEN, "objective": "dpo"},
        "'truncate_side' has no meaning in dpo: a prompt loses its beginning, a completion its end",
        DELETE,
    ),
    Clash(
        {"packing": True},
        "'packing' has no meaning in {objective}",
        "delete the line; where prompts are shared the rows of a batch lie end to end anyway",
    ),
)
"""Rules where a row is a prompt with completions."""


def _no_room_for_a_completion(recipe: Any) -> Iterator[Refusal]:
    if recipe.max_prompt_length is not None and recipe.max_prompt_length >= recipe.max_length:
        what = f"'max_prompt_length' leaves no token of 'max_length' ({recipe.max_length:,}) to a completion"
        yield Refusal("max_prompt_length", what, "lower it, or raise max_length")


DPO_RULES: Rules = (
    Custom(_no_room_for_a_completion),
    *(
        Where(
            setting,
            Clash({"ref_model_name_or_path": GIVEN}, f"'ref_model_name_or_path' {why}", ONE_OF_TWO),
            Clash({"precompute_ref_log_probs": GIVEN}, f"'precompute_ref_log_probs' {why}", ONE_OF_TWO),
        )
        for setting, why in (
            ({"reference_free": True}, "names a reference, and 'reference_free' is true"),
            ({"loss_type": OneOf(*WITHOUT_REFERENCE)}, "names a reference, and '{loss_type}' needs none"),
        )
    ),
    Clash(
        {"reference_free": True, "loss_type": OneOf(*WITHOUT_REFERENCE)},
        "'reference_free' leaves a reference out, and '{loss_type}' has none",
        ONE_OF_TWO,
    ),
    *(
        Clash({key: GIVEN, "loss_type": losses}, f"'{key}' is not read by the loss '{{loss_type}}'", ONE_OF_TWO)
        for losses, keys in ((OneOf(*UNPAIRED), OF_PAIRS), (Not(*UNPAIRED), OF_SINGLE_COMPLETIONS))
        for key in keys
    ),
)
"""Keys that change nothing; those that only some losses of pairs read are refused where the loss is made."""


class PreferenceKeys(LossKeys):
    """The loss of preferences, its reference and its rows."""

    # --- the loss ----------------------------------------------------------------------------------------------

    loss_type: PairedLoss | UnpairedLoss = "sigmoid"  # type: ignore[assignment]
    """Loss of a pair (`sigmoid` is DPO's), or of single completions that are labelled desirable or not (`kto`,
    `apo_zero_unpaired`). `orpo`, `simpo` and `cpo` need no reference."""

    beta: Annotated[float, Field(gt=0), at_most(10**9)] = 0.1
    """Factor of the log-ratios: the larger it is, the closer the model stays to the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs taken to be the wrong way round: `sigmoid`, `robust`, `exo_pair`, `simpo`, `cpo`."""

    rpo_alpha: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Weight of the chosen completion's negative log-likelihood per token, added to the loss; none without it."""

    simpo_gamma: Annotated[float, Field(ge=0), at_most(10**9)] = 0.5
    """Target margin of `simpo`."""

    cpo_alpha: Annotated[float, Field(ge=0), at_most(10**9)] = 1.0
    """Weight of the negative log-likelihood in `cpo`."""

    dpop_lambda: Annotated[float, Field(ge=0), at_most(10**9)] = 50.0
    """Weight of the penalty of `dpop` (DPO-positive)."""

    desirable_weight: Annotated[float, Field(gt=0), at_most(10**9)] = 1.0
    """Weight of desirable completions in `kto` and `apo_zero_unpaired`."""

    undesirable_weight: Annotated[float, Field(gt=0), at_most(10**9)] = 1.0
    """Weight of undesirable completions in `kto` and `apo_zero_unpaired`."""

    length_normalization: bool = False
    """Mean log-probs per token in place of sums; `ipo`, `simpo` and `orpo` always take means."""

    # --- the reference -----------------------------------------------------------------------------------------

    reference_free: bool = False
    """Take a uniform reference: log-probs in place of log-ratios."""

    ref_model_name_or_path: Text | None = None
    """Hub name or local folder of the reference; without it, the model as it is when training starts: the frozen
    weights under adapters, or a copy."""

    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probs once before training and keep them on disk, where the next run of the same
    model and rows finds them. Training then holds no reference."""

    # --- data --------------------------------------------------------------------------------------------------

    max_prompt_length: Count | None = None
    """Tokens a prompt may have, as part of `max_length`; without it, no limit of its own."""

    identical_pairs: Literal["error", "drop"] = "error"
    """A pair whose chosen and rejected completion are equal: refuse it, or leave it out and count it."""

    share_prefix: Literal["auto", "always", "never"] = "auto"
    """Stream a prompt, and what completions behind it begin with, once for all of them: the same gradient in less time
    and memory. `auto` does where the model can, `never` gives each completion its own copy."""

    @property
    def unpaired(self) -> bool:
        """True if completions are labelled one by one, not compared in pairs."""
        return self.loss_type in UNPAIRED
