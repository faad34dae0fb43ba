"""Recipe keys of the loss on completions that the model writes: a policy gradient or a divergence from a teacher.

Keys that also exist in TRL have the same names there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import field_validator

from streamtune.base.policy_losses import KL_IN_REWARD
from streamtune.recipe.keys.loss import LossKeys
from streamtune.recipe.rules import GIVEN, Clash, Custom, NotNegative, OneOf, Positive, Refusal, Rows, Rules, Text

PolicyLossName = Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "rloo", "remax", "gkd"]

UNREAD_WITH_GKD = {
    "beta": "weighs the divergence from a reference, and gkd uses only its teacher",
    "ref_model_name_or_path": "names a reference, and gkd uses only its teacher",
    "epsilon": "clips ratios of probabilities, which gkd does not have",
    "epsilon_high": "clips ratios of probabilities, which gkd does not have",
    "delta": "clips ratios of probabilities, which gkd does not have",
    "use_bias_correction_kl": "uses ratios of probabilities, which gkd does not have",
    "importance_sampling_level": "needs ratios of probabilities, which gkd does not have",
    "scale_rewards": "scales advantages, and gkd has none: its rewards are only reported",
    "allocation": "reduces the variance of a policy gradient, and gkd has none: it learns from its teacher",
}
"""Keys of a policy-gradient loss that ``loss_type: gkd`` does not read -> the reason."""


class PolicyKeys(LossKeys):
    """Recipe keys of the policy-gradient loss and its reference, or of the divergence from a teacher."""

    loss_type: PolicyLossName = "dapo"  # type: ignore[assignment]
    """Loss on the completions that the model writes. `grpo`: mean over the tokens of a completion, then over
    completions. `dapo`: mean over all tokens of the step. `bnpo`: mean over all tokens of a micro-batch. `dr_grpo`: sum
    divided by `max_completion_length`. `gspo`: one probability ratio per completion instead of one per token. `rloo`
    and `remax`: a completion is one action, whose advantage is its reward minus a baseline. The baseline of `rloo` is
    the mean reward of the prompt's other completions. The baseline of `remax` is the reward of the prompt's greedy
    completion. `gkd`: on-policy distillation (arXiv 2306.13649), with the `kd_divergence` from the `teacher` at each
    token, averaged over the completion."""

    importance_sampling_level: Literal["token", "sequence"] | None = None
    """Level at which the ratio of new to old probability is computed. `token`: for each token. `sequence`: for the
    whole completion. Default: `sequence` for `loss_type` `gspo`, `rloo` and `remax`, else `token`."""

    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Standard deviation by which advantages are divided. `group`: standard deviation of the rewards of the prompt's
    completions. `batch`: standard deviation of the rewards in the batch. `none`: advantages are not divided. Default:
    `none` for `loss_type` `dr_grpo`, `rloo` and `remax`, else `group`."""

    epsilon: Positive = 0.2
    """Clipping range of the ratio of new to old probability: from 1 - `epsilon` to 1 + `epsilon_high`."""

    epsilon_high: Positive | None = None
    """Upper clipping range of the ratio of new to old probability, which is clipped at 1 + `epsilon_high`. Default:
    `epsilon`."""

    delta: Positive | None = None
    """Upper bound of the ratio of new to old probability for completions with a negative advantage (two-sided
    clipping). It must be above 1 + `epsilon_high`. Default: no bound."""

    num_iterations: Rows = 1
    """Number of times that training passes through each batch of completions before new completions are written."""

    beta: NotNegative = 0.0
    """Weight of the KL divergence from the reference model. 0: no divergence is computed, and no reference is in
    memory."""

    use_bias_correction_kl: bool = False
    """Multiply the KL divergence by the ratio of new to old probability, which makes the gradient of the reverse KL
    unbiased (arXiv 2512.02556, eq. 7). It needs `beta` above 0. TRL 1.16 has it on by default."""

    ref_model_name_or_path: Text | None = None
    """Hub name or local folder of the reference model for `beta`. Default: the model at the start of training, which
    takes no extra memory with adapters."""

    mask_truncated_completions: bool = False
    """Exclude from training the completions that were cut off at `max_completion_length`."""

    share_prefix: Literal["auto", "always", "never"] = "auto"
    """Sharing of the tokens that several completions in a micro-batch have in common (the prompt, or more). Shared
    tokens are computed once instead of once for each completion. The gradient is the same, in less time and memory.
    `auto`: shared, if the model allows it. `always`: end with an error if it does not. `never`: not shared."""

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _accept_bool(cls, scale_rewards: Any) -> Any:
        """Accept TRL's older booleans: true is ``group``, false is ``none``."""
        return {True: "group", False: "none"}[scale_rewards] if isinstance(scale_rewards, bool) else scale_rewards

    @property
    def is_distillation(self) -> bool:
        """True if the loss is the divergence from a teacher."""
        return self.loss_type == "gkd"


def _refuse_small_delta(recipe: Any) -> Iterator[Refusal]:
    high = recipe.epsilon if recipe.epsilon_high is None else recipe.epsilon_high
    if recipe.delta is not None and recipe.delta <= 1 + high:
        yield Refusal(
            "delta",
            f"'delta' must be above 1 + epsilon_high = {1 + high:g}; found {recipe.delta:g}",
            "write a larger value, such as delta: 4.0",
        )


POLICY_RULES: Rules = (
    Custom(_refuse_small_delta),
    Clash(
        {"sft_steps": GIVEN, "beta": GIVEN, "ref_model_name_or_path": None},
        "'sft_steps' changes the model first, and 'beta' compares it with the model before these steps",
        "run `streamtune sft` first and start from its final/, or name a ref_model_name_or_path",
    ),
    Clash(
        {"ref_model_name_or_path": GIVEN, "beta": 0},
        "'ref_model_name_or_path' has no effect with 'beta: 0', which uses no reference",
        "delete the line, or write a beta above 0",
    ),
    Clash(
        {"use_bias_correction_kl": True, "beta": 0},
        "'use_bias_correction_kl' has no effect with 'beta: 0', which uses no reference",
        "delete the line, or write a beta above 0",
    ),
    Clash(
        {"use_bias_correction_kl": True, "loss_type": OneOf(*KL_IN_REWARD)},
        "'use_bias_correction_kl' corrects a divergence in the loss, and '{loss_type}' has it in its rewards",
        "delete the line",
    ),
    Clash(
        {"use_vllm": True, "finetuning_type": "qlora"},
        "'use_vllm' does not work with 'finetuning_type: qlora': vLLM cannot take quantised weights",
        "write finetuning_type: lora, or delete the line",
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"use_vllm": True},
        "'use_vllm' needs whole weights on each rank, and here ranks shard them",
        "write deepspeed: zero2, or use_vllm: false",
    ),
    Clash(
        {"repetition_penalty": GIVEN},
        "'repetition_penalty' would count padding, which ranks with sharded weights add to run equally many forwards",
        "write deepspeed: zero2, or repetition_penalty: 1.0",
    ),
)
