"""Recipe keys of generated completions and their rewards. Keys that also exist in TRL have the same names there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamtune.base.policy_losses import KL_IN_REWARD
from streamtune.recipe.keys.batching import StepKeys
from streamtune.recipe.keys.optimizer import ONE_BLOCK
from streamtune.recipe.keys.policy import UNREAD_WITH_GKD
from streamtune.recipe.keys.preferences import ROW_RULES
from streamtune.recipe.keys.run import RunKeys
from streamtune.recipe.rules import (
    DELETE,
    GIVEN,
    KEEP_ONE,
    ONE_OF_TWO,
    Clash,
    Count,
    Custom,
    Not,
    NotNegative,
    OneOf,
    Positive,
    Refusal,
    Rows,
    Rules,
    Steps,
    Text,
    UpToOne,
    Where,
)

LENGTHS = ("max_prompt_length", "max_completion_length")


class RewardKeys(RunKeys):
    """Recipe keys of the reward functions and their weights."""

    reward_funcs: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Functions that score a completion: names of built-in rewards; with `allow_code` also `module:function` or
    `path.py:function`. At least one is required, except with `loss_type: gkd`, where rewards are only reported."""

    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """List of the weights of `reward_funcs`, in the same order. The reward of a completion is the weighted sum of its
    scores. Default: 1 for each."""

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _accept_one_reward(cls, reward_funcs: Any) -> Any:
        return [reward_funcs] if isinstance(reward_funcs, str) else reward_funcs


class RolloutKeys(StepKeys):
    """Recipe keys of generated completions: how many per prompt, which prompts, sampling, and how many at a time."""

    num_generations: Rows = 8
    """Number of completions that are written for each prompt. They form a group: the advantage of a completion is
    computed from the rewards in its group."""

    max_prompt_length: Count = 512
    """Maximum number of tokens of a prompt. With a longer prompt, `overlength: error` ends the run before training, and
    `drop` leaves the row out. `truncate` keeps the end of the prompt, or with `truncate_side: middle` its beginning and
    end."""

    max_completion_length: Count = 512
    """Maximum number of tokens of a completion. A completion that reaches this length without EOS is cut off."""

    temperature: Positive = 1.0
    """Temperature by which logits are divided, both for sampling and for the trained log-probs. With `loss_type: gkd`
    the divergence uses `kd_temperature` instead."""

    top_p: UpToOne = 1.0
    """Nucleus sampling: tokens are drawn from the smallest set with this total probability. 1 draws from all tokens."""

    top_k: Steps = 0
    """Top-k sampling: tokens are drawn from this number of most probable tokens. 0 draws from all tokens."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Min-p sampling: tokens are not drawn if their probability is below this fraction of the highest probability. 0
    draws from all tokens."""

    repetition_penalty: Positive = 1.0
    """Penalty on the logits of tokens that already occur in prompt or completion. Above 1 they become less probable; 1
    has no effect."""

    per_device_train_batch_size: Rows = 8
    """Number of completions in one forward and backward of each rank. Completions of the same prompt share the
    computation of the prompt. More completions take more memory."""

    steps_per_generation: Rows | None = None
    """Number of micro-batches into which each rank divides the completions of one generation. Default:
    `gradient_accumulation_steps`, so that each optimizer step has new completions. Set either this key or
    `generation_batch_size`."""

    generation_batch_size: Rows | None = None
    """Number of completions that all ranks together write before they train on them. Default: `steps_per_generation`
    times `per_device_train_batch_size` times the number of ranks. Set either this key or `steps_per_generation`."""

    per_device_generation_batch_size: Rows | None = None
    """Number of completions whose KV cache is in memory at once during generation. Default:
    `per_device_train_batch_size`, which fits in memory if training on as many completions fits."""

    use_vllm: bool = False
    """Generate completions with vLLM, which must be installed, instead of transformers. vLLM keeps a copy of the model
    on the device."""

    vllm_gpu_memory_utilization: UpToOne = 0.3
    """With `use_vllm`: fraction of the device memory that vLLM uses, for its copy of the model and its KV cache."""

    prompts: Literal["uniform", "pass_rate", "middle"] = "uniform"
    """Rule that chooses the next prompts. `uniform`: each prompt once per epoch. `pass_rate`: prompts that the model
    solves only sometimes are drawn more often. `middle`: mostly prompts of which 25% to 75% of the completions passed
    (arXiv 2504.03380). A completion passes, or solves its prompt, if its reward is at least `pass_reward`."""

    allocation: Literal["equal", "gvm", "neyman"] = "equal"
    """Number of completions of each prompt. `equal`: `num_generations`. `gvm` and `neyman`: `num_generations` on
    average, and more for prompts whose gradient varies more, as measured on their earlier completions. `gvm` (arXiv
    2505.02391) gives more to prompts with large gradients and low pass rates, `neyman` to prompts with large gradients
    and pass rates near one half. Prompts that no completion has solved get two. Advantages are scaled so that every
    prompt counts the same."""

    pass_reward: float = 1.0
    """Smallest reward with which a completion passes, that is, solves its prompt. It is read by `prompts: pass_rate`,
    `prompts: middle` and `allocation`."""

    skip_limit: Count = 20
    """Number of consecutive batches without a gradient after which the run ends with an error. A batch has no gradient
    if, for each prompt, all completions have the same reward. A new batch replaces it."""

    sft_steps: Steps = 0
    """Number of optimizer steps of supervised fine-tuning before the first completions are written. They train on the
    completions in the rows. 0: none."""

    sft_batch_size: Rows = 32
    """With `sft_steps`: number of rows in each of these steps, packed into one sequence."""

    sft_learning_rate: NotNegative | None = None
    """With `sft_steps`: peak learning rate of these steps. Default: `learning_rate`."""

    @model_validator(mode="before")
    @classmethod
    def _add_max_length(cls, values: Any) -> Any:
        """Set ``max_length`` to the longest prompt plus the longest completion, unless the recipe sets it."""
        if not isinstance(values, dict) or "max_length" in values:
            return values
        parts = [values.get(key, cls.model_fields[key].default) for key in LENGTHS]
        return {**values, "max_length": sum(parts)} if all(isinstance(part, int) for part in parts) else values

    @property
    def completions_per_step(self) -> int:
        """Number of completions that one rank alone trains on in one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def completions_per_generation(self) -> int:
        """Number of completions that one rank alone writes before it trains on them."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        if self.steps_per_generation is not None:
            return self.per_device_train_batch_size * self.steps_per_generation
        return self.completions_per_step

    @property
    def prompts_per_generation(self) -> int:
        """Number of prompts that one rank alone completes before it trains on the completions."""
        return self.completions_per_generation // self.num_generations

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps in which one rank alone trains once on all completions of one generation."""
        return self.completions_per_generation // self.completions_per_step


def _refuse_weighted_datasets(recipe: Any) -> Iterator[Refusal]:
    if any(dataset.weight is not None for dataset in recipe.datasets):
        yield Refusal(
            "datasets.0.weight",
            "'weight' is not read by grpo; 'prompts' decides how prompts are chosen",
            "delete the line; max_rows limits a dataset, and repeat visits its rows more often",
        )


def _refuse_mismatched_weights(recipe: Any) -> Iterator[Refusal]:
    weights, rewards = recipe.reward_weights, recipe.reward_funcs
    if weights is not None and len(weights) != len(rewards):
        what = f"'reward_weights' must have {len(rewards)} weights, as many as 'reward_funcs'; found {len(weights)}"
        yield Refusal("reward_weights", what, "add or delete weights")


REWARD_RULES: Rules = (
    Custom(_refuse_weighted_datasets),
    Clash(
        {"reward_funcs": (), "loss_type": Not("gkd")},
        "'reward_funcs' is missing: '{loss_type}' trains on rewards",
        "name at least one, such as reward_funcs: [exact_match]; or write loss_type: gkd and a teacher",
    ),
    Clash(
        {"loss_type": "gkd", "teacher": None},
        "'loss_type: gkd' learns from a teacher, and 'teacher' is missing",
        "add teacher: NAME, or write loss_type: dapo",
    ),
    *(Clash({key: GIVEN, "loss_type": "gkd"}, f"'{key}' {why}", DELETE) for key, why in UNREAD_WITH_GKD.items()),
    *(
        Clash(
            {key: GIVEN, "reward_funcs": ()},
            f"'{key}' needs rewards, and 'reward_funcs' is missing",
            "add reward_funcs, or delete the line",
        )
        for key in ("reward_weights", "prompts", "pass_reward")
    ),
    Custom(_refuse_mismatched_weights),
    Clash(
        {"shuffle": False, "prompts": Not("uniform"), "sft_steps": 0},
        "'shuffle: false' keeps the order of the rows, and 'prompts: {prompts}' draws prompts by their pass rates",
        ONE_OF_TWO,
    ),
    Clash(
        {"num_generations": 1, "loss_type": Not("remax", "gkd")},
        "'num_generations: 1' gives no advantage: a completion is compared with the mean of its group",
        "write 2 or more, or loss_type: remax, which compares with the greedy completion",
    ),
)


def _refuse_short_max_length(recipe: Any) -> Iterator[Refusal]:
    together = recipe.max_prompt_length + recipe.max_completion_length
    if recipe.max_length < together:
        yield Refusal(
            "max_length",
            f"'max_length' must be at least {together:,}, the longest prompt plus completion; found "
            f"{recipe.max_length:,}",
            "delete the line, or lower max_prompt_length or max_completion_length",
        )


def _refuse_partial_groups_or_steps(recipe: Any) -> Iterator[Refusal]:
    """Refuse completions that one rank cannot divide. ``single_rank_recipe`` checks all ranks together."""
    if recipe.train_batch_size is not None:  # over all ranks, whose number is unknown here
        return
    written, a_step, group = recipe.completions_per_generation, recipe.completions_per_step, recipe.num_generations
    if written % group:
        yield Refusal(
            "num_generations",
            f"the completions of one generation must be a multiple of 'num_generations', {group}; found {written}",
            "change per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation",
        )
    if written % a_step or written // group < written // a_step:
        yield Refusal(
            "generation_batch_size" if recipe.generation_batch_size is not None else "steps_per_generation",
            f"{written} completions of {written // group} prompts cannot be divided into optimizer steps of {a_step}",
            "an optimizer step has per_device_train_batch_size x gradient_accumulation_steps completions, of at least "
            "one prompt",
        )


ALLOCATION_RULES: Rules = (
    Where(
        {"allocation": Not("equal")},
        Clash(
            {"num_generations": OneOf(1, 2)},
            "gives each prompt at least two completions, and 'num_generations: {num_generations}' leaves none to "
            "distribute",
            "write num_generations: 8",
        ),
        Clash(
            {"beta": GIVEN, "loss_type": Not(*KL_IN_REWARD)},
            "makes prompts count the same by scaling advantages, and 'beta' adds a divergence that has no advantage",
            "delete the line, or write loss_type: rloo, which has the divergence in its rewards",
        ),
        *(
            Clash(
                {"sharding_key": key},
                "computes the gradient of each completion, which needs unsharded weights, but '{sharding_key}' shards "
                "them",
                f"delete '{key}'",
                key,
            )
            for key in ("fsdp", "deepspeed")
        ),
        Clash(
            {"fp16": True},
            "compares gradients of single completions, whose float16 parts become zero without a scaled loss",
            "write allocation: equal, or bf16: true in place of fp16",
        ),
        Clash(
            {"sequence_parallel_size": GIVEN},
            "computes the gradient of each completion, but here each rank has a part of a completion",
            "write sequence_parallel_size: 1",
        ),
        Clash(
            {"optim": ONE_BLOCK},
            "computes one weight's gradients in every step, and the optimizer trains it only while its block is active",
            "write optim: adamw",
        ),
        text="'allocation: {allocation}' {}",
    ),
)


ROLLOUT_LENGTH_RULES: Rules = (Custom(_refuse_short_max_length), *ROW_RULES)

ROLLOUT_BATCH_RULES: Rules = (
    Clash(
        {"generation_batch_size": GIVEN, "steps_per_generation": GIVEN},
        "'generation_batch_size' and 'steps_per_generation' exclude each other",
        KEEP_ONE,
    ),
    Custom(_refuse_partial_groups_or_steps),
)
