"""The keys of preference training, in addition to those every recipe has; the names are TRL's where it has one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from streamtune.recipe.schema import Recipe
from streamtune.recipe.spec import Count, Text, at_most, mistake

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
OF_A_REFERENCE = ("ref_model_name_or_path", "precompute_ref_log_probs")
OF_PAIRS = ("label_smoothing", "rpo_alpha", "simpo_gamma", "cpo_alpha", "dpop_lambda", "reference_free")
OF_SINGLE_COMPLETIONS = ("desirable_weight", "undesirable_weight")


class DpoRecipe(Recipe):
    """Everything a run of preference training depends on."""

    objective: Literal["dpo"] = "dpo"
    """Objective of the training: preferences between completions of a prompt."""

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
        return self.loss_type in ("kto", "apo_zero_unpaired")

    @model_validator(mode="after")
    def _preferences_agree(self) -> DpoRecipe:
        refuse_sequences_of_rows(self)
        if self.max_prompt_length is not None and self.max_prompt_length >= self.max_length:
            raise mistake(
                f"'max_prompt_length' leaves no token of 'max_length' ({self.max_length:,}) to a completion",
                key="max_prompt_length",
                mend="lower it, or raise max_length",
            )
        self._refuse_what_is_not_read()
        return self

    def _refuse_what_is_not_read(self) -> None:
        """Refuse keys that change nothing; keys that only some losses of pairs read are refused where the loss is made.

        Raises:
            PydanticCustomError: A mistake in the recipe.
        """
        unread: dict[str, str] = {}
        if self.reference_free or self.loss_type in WITHOUT_REFERENCE:
            why = "'reference_free' is true" if self.reference_free else f"'{self.loss_type}' needs none"
            unread = dict.fromkeys(OF_A_REFERENCE, f"names a reference, and {why}")
        if self.loss_type in WITHOUT_REFERENCE:
            unread["reference_free"] = f"leaves a reference out, and '{self.loss_type}' has none"
        others = OF_PAIRS if self.unpaired else OF_SINGLE_COMPLETIONS
        unread |= dict.fromkeys(others, f"is not read by the loss '{self.loss_type}'")
        for key, why in unread.items():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise mistake(f"'{key}' {why}", key=key, mend="delete one of the two")


def refuse_sequences_of_rows(recipe: Recipe) -> None:
    """Refuse keys that make no sense where a row is a prompt with completions.

    Raises:
        PydanticCustomError: A mistake in the recipe.
    """
    if recipe.overlength == "split":
        raise mistake(
            f"'overlength: split' makes several rows of one, which {recipe.objective} cannot compare",
            key="overlength",
            mend="write truncate, drop or error",
        )
    sides = ("auto", "left", "middle") if recipe.objective == "grpo" else ("auto",)
    if recipe.truncate_side not in sides:
        raise mistake(
            "'truncate_side: right' would cut off where a prompt asks for its answer"
            if recipe.objective == "grpo"
            else "'truncate_side' has no meaning in dpo: a prompt loses its beginning, a completion its end",
            key="truncate_side",
            mend="write left or middle" if recipe.objective == "grpo" else "delete the line",
        )
    if recipe.packing:
        raise mistake(
            f"'packing' has no meaning in {recipe.objective}",
            key="packing",
            mend="delete the line; where prompts are shared the rows of a batch lie end to end anyway",
        )
