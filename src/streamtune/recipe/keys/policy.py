"""Keys of the loss on completions that the model writes itself, by rewards or by a teacher; the names are TRL's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import field_validator

from streamtune.recipe.keys.loss import LossKeys
from streamtune.recipe.rules import GIVEN, Clash, Custom, NotNegative, OneOf, Positive, Refusal, Rows, Rules, Text

PolicyLossName = Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "rloo", "remax", "gkd"]

UNREAD_WITH_GKD = {
    "beta": "weighs the divergence from a reference, and gkd has that from its teacher alone",
    "ref_model_name_or_path": "names a reference, and gkd is compared with its teacher alone",
    "epsilon": "clips ratios of probabilities, which gkd does not have",
    "epsilon_high": "clips ratios of probabilities, which gkd does not have",
    "delta": "clips ratios of probabilities, which gkd does not have",
    "use_bias_correction_kl": "is of ratios of probabilities, which gkd does not have",
    "importance_sampling_level": "is of ratios of probabilities, which gkd does not have",
    "scale_rewards": "is of advantages, and gkd makes none of its rewards: they are reported",
    "allocation": "is of the variance of a policy gradient, and gkd has none: it learns from its teacher",
}
"""Keys of a policy-gradient loss that ``loss_type: gkd`` does not read, and why."""


class PolicyKeys(LossKeys):
    """A policy gradient with its reference, or the divergence from a teacher."""

    loss_type: PolicyLossName = "dapo"  # type: ignore[assignment]
    """Loss of a token, and the set that it is averaged over. `gkd` is on-policy distillation (arXiv 2306.13649): the
    divergence `kd_divergence` from the `teacher` at each token of a completion, averaged in the completion."""

    importance_sampling_level: Literal["token", "sequence"] | None = None
    """Ratios of new to old probability by token or by completion; without it, what `loss_type` says: only gspo takes
    them by completion."""

    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the standard deviation of the rewards of the group, of the batch, or not at all; without
    it, as `loss_type` was published: dr_grpo, rloo and remax not at all, the others by that of the group."""

    epsilon: Positive = 0.2
    """Ratios are clipped at 1 - epsilon, and at 1 + epsilon where `epsilon_high` is not given."""

    epsilon_high: Positive | None = None
    """Ratios are clipped at 1 + epsilon_high."""

    delta: Positive | None = None
    """Ratios are clipped at delta where the advantage is negative as well (two-sided clipping); above 1 + epsilon."""

    num_iterations: Rows = 1
    """Times to go through a batch of completions."""

    beta: NotNegative = 0.0
    """Weight of the KL divergence from the reference; 0 needs no reference."""

    use_bias_correction_kl: bool = False
    """Multiply the KL divergence by the ratio of new to old probability, for the unbiased gradient of the reverse KL
    (arXiv 2512.02556, eq. 7); on by default in TRL 1.16."""

    ref_model_name_or_path: Text | None = None
    """The reference; without it, the model as it was at the start, which under adapters costs no memory."""

    mask_truncated_completions: bool = False
    """Do not train on completions that were cut off."""

    share_prefix: Literal["auto", "always", "never"] = "auto"
    """Stream a prompt, and what completions behind it begin with, once for all of them in a micro-batch: the same
    gradient in less time and memory. `auto` does where the model can, `never` gives each completion its own copy."""

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _switch(cls, scale_rewards: Any) -> Any:
        """Accept TRL's older form: true is ``group``, false is ``none``."""
        return {True: "group", False: "none"}[scale_rewards] if isinstance(scale_rewards, bool) else scale_rewards

    @property
    def distils(self) -> bool:
        """True if the loss is the divergence from a teacher."""
        return self.loss_type == "gkd"


def _clips_too_early(recipe: Any) -> Iterator[Refusal]:
    high = recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high
    if recipe.delta is not None and recipe.delta <= 1 + high:
        yield Refusal(
            "delta",
            f"'delta' is {recipe.delta:g}: at or below 1 + epsilon_high, {1 + high:g}, it would clip what is not "
            "clipped yet",
            "write a larger one, such as 4.0",
        )


POLICY_RULES: Rules = (
    Custom(_clips_too_early),
    Clash(
        {"sft_steps": GIVEN, "beta": GIVEN, "ref_model_name_or_path": None},
        "'sft_steps' trains the model first, and 'beta' holds it to what it was before that",
        "run `streamtune sft` first and start from its final/, or name a ref_model_name_or_path",
    ),
    Clash(
        {"ref_model_name_or_path": GIVEN, "beta": 0},
        "'ref_model_name_or_path' names a reference, and with 'beta: 0' nothing is compared with one",
        "delete the line, or write a beta above 0",
    ),
    Clash(
        {"use_bias_correction_kl": True, "beta": 0},
        "'use_bias_correction_kl' is of the divergence from a reference, and with 'beta: 0' there is none",
        "delete the line, or write a beta above 0",
    ),
    Clash(
        {"use_bias_correction_kl": True, "loss_type": OneOf("rloo", "remax")},
        "'use_bias_correction_kl' is of a divergence in the loss, and '{loss_type}' has it in its rewards",
        "delete the line",
    ),
    Clash(
        {"use_vllm": True, "finetuning_type": "qlora"},
        "'use_vllm' cannot be handed the frozen weights of a quantised model",
        "write finetuning_type: lora, or delete the line",
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"use_vllm": True},
        "vLLM needs the whole weights on each rank, and the recipe shares them",
        "write deepspeed: zero2, or let transformers write the completions",
    ),
    Clash(
        {"repetition_penalty": GIVEN},
        "ranks that share their weights write in step, with padding, and repetition_penalty would count that",
        "write deepspeed: zero2, or repetition_penalty: 1.0",
    ),
)
