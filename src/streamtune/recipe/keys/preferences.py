"""Recipe keys of preference training. Keys that also exist in TRL have the same names there."""

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
"""Rules for objectives whose rows are prompts with completions: dpo and grpo."""


def _refuse_long_prompt_limit(recipe: Any) -> Iterator[Refusal]:
    if recipe.max_prompt_length is not None and recipe.max_prompt_length >= recipe.max_length:
        what = (
            f"'max_prompt_length' must be below 'max_length' ({recipe.max_length:,}): no token is left for a completion"
        )
        yield Refusal("max_prompt_length", what, "lower max_prompt_length, or raise max_length")


DPO_RULES: Rules = (
    Custom(_refuse_long_prompt_limit),
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
"""Rules that refuse keys without effect. Keys that only some pair losses read are refused when the loss is built."""


class PreferenceKeys(LossKeys):
    """Recipe keys of the preference loss, its reference model and its rows."""

    # --- the loss ----------------------------------------------------------------------------------------------

    loss_type: PairedLoss | UnpairedLoss = "sigmoid"  # type: ignore[assignment]
    """Preference loss. For pairs with a reference: `sigmoid` (DPO), `robust`, `hinge`, `ipo`, `exo_pair`, `sppo_hard`,
    `apo_zero`, `apo_down`, `dpop`, `copg`. For pairs without a reference: `orpo`, `simpo`, `cpo`. For single
    completions labelled desirable or undesirable: `kto`, `apo_zero_unpaired`."""

    beta: Annotated[float, Field(gt=0), at_most(10**9)] = 0.1
    """Factor of the log-ratios between model and reference. A larger factor keeps the model closer to the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With `loss_type` `sigmoid`, `robust`, `exo_pair`, `simpo` or `cpo`: assumed fraction of pairs whose chosen and
    rejected completions are swapped."""

    rpo_alpha: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Weight of the chosen completion's negative log-likelihood per token, which is added to the loss. Only for losses
    of pairs. Default: not added."""

    simpo_gamma: Annotated[float, Field(ge=0), at_most(10**9)] = 0.5
    """With `loss_type: simpo`: target margin between the rewards of the chosen and the rejected completion."""

    cpo_alpha: Annotated[float, Field(ge=0), at_most(10**9)] = 1.0
    """With `loss_type: cpo`: weight of the chosen completion's negative log-likelihood."""

    dpop_lambda: Annotated[float, Field(ge=0), at_most(10**9)] = 50.0
    """With `loss_type: dpop` (DPO-positive): weight of the penalty on a chosen completion that is less likely than
    under the reference."""

    desirable_weight: Annotated[float, Field(gt=0), at_most(10**9)] = 1.0
    """With `loss_type` `kto` or `apo_zero_unpaired`: weight of desirable completions in the loss."""

    undesirable_weight: Annotated[float, Field(gt=0), at_most(10**9)] = 1.0
    """With `loss_type` `kto` or `apo_zero_unpaired`: weight of undesirable completions in the loss."""

    length_normalization: bool = False
    """Use the mean log-prob of a completion's tokens instead of the sum, so that length has less influence. `ipo`,
    `simpo` and `orpo` always use the mean."""

    # --- the reference -----------------------------------------------------------------------------------------

    reference_free: bool = False
    """Compute the loss without a reference model: log-probs take the place of log-ratios, as if the reference were
    uniform. Only with `loss_type` `sigmoid`, `robust`, `hinge`, `ipo` or `exo_pair`."""

    ref_model_name_or_path: Text | None = None
    """Hub name or local folder of the reference model. Default: the model as it is before training; in full fine-tuning
    this is a copy in memory, with adapters it is the frozen weights."""

    precompute_ref_log_probs: bool = False
    """Compute the log-probs under the reference once before training, so that the reference is not in memory during
    training. They are cached on disk for later runs with the same model and rows."""

    # --- data --------------------------------------------------------------------------------------------------

    max_prompt_length: Count | None = None
    """Maximum number of tokens of a prompt; `overlength` sets what happens to longer prompts. `max_length` limits
    prompt and completion together. Default: no separate limit."""

    identical_pairs: Literal["error", "drop"] = "error"
    """Action on a pair whose chosen and rejected completions are equal. `error` ends the run before training. `drop`
    leaves the pair out and counts such pairs."""

    share_prefix: Literal["auto", "always", "never"] = "auto"
    """Sharing of the tokens that the completions of a pair have in common (the prompt, or more). Shared tokens
    are computed once instead of once for each completion. The gradient is the same, in less time and memory. `auto`:
    shared, if the model allows it. `always`: end with an error if it does not. `never`: not shared."""

    @property
    def is_unpaired(self) -> bool:
        """True if completions are labelled one by one instead of compared in pairs."""
        return self.loss_type in UNPAIRED
