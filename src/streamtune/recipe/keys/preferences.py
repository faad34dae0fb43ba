"""Keys of preference training. Keys that TRL has too have its names."""

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
        "'overlength: split' cuts a row into several, which {objective} cannot compare",
        "write overlength: truncate, drop or error",
    ),
    Clash(
        {"truncate_side": "right", "objective": "grpo"},
        "'truncate_side: right' would cut off the end of a prompt, which asks for the answer",
        "write truncate_side: left or middle",
    ),
    Clash(
        {"truncate_side": GIVEN, "objective": "dpo"},
        "'truncate_side' is not read by dpo: a prompt loses its beginning, a completion its end",
        DELETE,
    ),
    Clash(
        {"packing": True},
        "'packing' is not read by {objective}",
        "delete the line; with shared prompts, the rows of a batch are in one sequence anyway",
    ),
)
"""Rules of objectives whose rows are prompts with completions."""


def _prompt_too_long(recipe: Any) -> Iterator[Refusal]:
    if recipe.max_prompt_length is not None and recipe.max_prompt_length >= recipe.max_length:
        what = (
            f"'max_prompt_length' must be below 'max_length' ({recipe.max_length:,}): no token is left for a completion"
        )
        yield Refusal("max_prompt_length", what, "lower it, or raise max_length")


DPO_RULES: Rules = (
    Custom(_prompt_too_long),
    *(
        Where(
            setting,
            Clash({"ref_model_name_or_path": GIVEN}, f"'ref_model_name_or_path' {why}", ONE_OF_TWO),
            Clash({"precompute_ref_log_probs": GIVEN}, f"'precompute_ref_log_probs' {why}", ONE_OF_TWO),
        )
        for setting, why in (
            ({"reference_free": True}, "needs a reference, and 'reference_free' is true"),
            ({"loss_type": OneOf(*WITHOUT_REFERENCE)}, "needs a reference, and '{loss_type}' uses none"),
        )
    ),
    Clash(
        {"reference_free": True, "loss_type": OneOf(*WITHOUT_REFERENCE)},
        "'reference_free' has no effect: '{loss_type}' uses no reference",
        ONE_OF_TWO,
    ),
    *(
        Clash({key: GIVEN, "loss_type": losses}, f"'{key}' is not read by the loss '{{loss_type}}'", ONE_OF_TWO)
        for losses, keys in ((OneOf(*UNPAIRED), OF_PAIRS), (Not(*UNPAIRED), OF_SINGLE_COMPLETIONS))
        for key in keys
    ),
)
"""Refusals of keys without effect. Keys that only some pair losses read are refused where the loss is made."""


class PreferenceKeys(LossKeys):
    """Keys of the preference loss, its reference and its rows."""

    # --- the loss ----------------------------------------------------------------------------------------------

    loss_type: PairedLoss | UnpairedLoss = "sigmoid"  # type: ignore[assignment]
    """Loss of a pair (`sigmoid` is DPO's), or of single completions labelled desirable or undesirable (`kto`,
    `apo_zero_unpaired`). `orpo`, `simpo` and `cpo` need no reference."""

    beta: Annotated[float, Field(gt=0), at_most(10**9)] = 0.1
    """Factor of the log-ratios. The larger it is, the closer the model stays to the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels, for `sigmoid`, `robust`, `exo_pair`, `simpo` and `cpo`."""

    rpo_alpha: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Weight of the chosen completion's negative log-likelihood per token, which is added to the loss. Default: not
    added."""

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
    """Use mean log-probs per token instead of sums. `ipo`, `simpo` and `orpo` always use means."""

    # --- the reference -----------------------------------------------------------------------------------------

    reference_free: bool = False
    """Use a uniform reference: log-probs in place of log-ratios."""

    ref_model_name_or_path: Text | None = None
    """Hub name or local folder of the reference. Default: the model as it is when training starts (the frozen weights
    under adapters, or a copy)."""

    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probs once before training and cache them on disk, for later runs with the same model
    and rows too. The reference is not in memory during training."""

    # --- data --------------------------------------------------------------------------------------------------

    max_prompt_length: Count | None = None
    """Maximum number of tokens of a prompt, as part of `max_length`. Default: no separate limit."""

    identical_pairs: Literal["error", "drop"] = "error"
    """Action on a pair with equal chosen and rejected completions. `error` refuses it, `drop` leaves it out and counts
    it."""

    share_prefix: Literal["auto", "always", "never"] = "auto"
    """Compute a prompt, and the prefix that its completions share, once for all of them: the same gradient in less time
    and memory. `auto` does so if the model allows it; `never` gives each completion its own copy."""

    @property
    def unpaired(self) -> bool:
        """True if completions are labelled one by one instead of compared in pairs."""
        return self.loss_type in UNPAIRED
