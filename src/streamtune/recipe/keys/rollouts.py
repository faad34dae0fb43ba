"""Keys of completions that the model writes itself, and of their rewards; the names are TRL's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamtune.recipe.keys.batching import StepKeys
from streamtune.recipe.keys.optimizer import ONE_BLOCK
from streamtune.recipe.keys.policy import UNREAD_WITH_GKD
from streamtune.recipe.keys.preferences import ROW_RULES
from streamtune.recipe.keys.run import RunKeys
from streamtune.recipe.rules import (
    DELETE,
    GIVEN,
    KEEP_ONE,
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
    """Reward functions."""

    reward_funcs: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Functions that score a completion: names of built-in rewards; with `allow_code`, `module:function` or
    `path.py:function`. At least one; with `loss_type: gkd` none is needed, and rewards are reported only."""

    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """A weight for each of `reward_funcs`; without it, all weigh 1. The reward is the weighted sum."""

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _one_reward(cls, reward_funcs: Any) -> Any:
        return [reward_funcs] if isinstance(reward_funcs, str) else reward_funcs


class RolloutKeys(StepKeys):
    """Completions: how many of which prompts, how they are drawn, and how many are written at once."""

    num_generations: Rows = 8
    """Completions of a prompt: the group its advantages are taken over."""

    max_prompt_length: Count = 512
    """Tokens a prompt may have; `overlength` says what becomes of a longer one: `truncate` keeps its end, or its
    beginning and its end with `truncate_side: middle`."""

    max_completion_length: Count = 512
    """Tokens a completion may have; one without an end token by then is cut off."""

    temperature: Positive = 1.0
    """Logits are divided by it, when completions are drawn and in the log-probs that are trained. With `loss_type: gkd`
    those of the divergence are divided by `kd_temperature`."""

    top_p: UpToOne = 1.0
    """Draw from the likeliest tokens that have this probability together."""

    top_k: Steps = 0
    """Draw from this many of the likeliest tokens; 0 is all of them."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one."""

    repetition_penalty: Positive = 1.0
    """Divides the logits of tokens that stand in prompt or completion already; 1 is none."""

    per_device_train_batch_size: Rows = 8
    """Completions in one forward and backward; those of one prompt share it."""

    steps_per_generation: Rows | None = None
    """Micro-batches that are made of one batch of completions; without it, `gradient_accumulation_steps`, so that each
    optimizer step has completions of its own."""

    generation_batch_size: Rows | None = None
    """Completions written at once, in place of `steps_per_generation`: that times `per_device_train_batch_size`."""

    per_device_generation_batch_size: Rows | None = None
    """Completions whose keys and values are in memory together while they are written; without it,
    `per_device_train_batch_size`, for which there is room when they are trained."""

    use_vllm: bool = False
    """Let vLLM write the completions; it has to be installed, and keeps a copy of the model on the device."""

    vllm_gpu_memory_utilization: UpToOne = 0.3
    """Part of the device's memory vLLM takes."""

    prompts: Literal["uniform", "pass_rate", "middle"] = "uniform"
    """Choice of the next prompts: each once an epoch; `pass_rate` those more often that the model solves now and then;
    `middle` mostly those that a quarter to three quarters of the completions solve (arXiv 2504.03380)."""

    allocation: Literal["equal", "gvm", "neyman"] = "equal"
    """Completions of each prompt: `num_generations`, or that many on average, divided so that a gradient varies least:
    that of completions that pass (`gvm`, arXiv 2505.02391), with more of prompts that are hard; or that of advantages
    (`neyman`), with more of those that half of the completions solve. More also where gradients are large; two of
    prompts that none solves. Advantages are scaled so that every prompt counts the same."""

    pass_reward: float = 1.0
    """A completion passes where its reward is at least this; read with `prompts: pass_rate` and `middle`, and with
    `allocation`."""

    skip_limit: Count = 20
    """Batches in a row in which all rewards of every group are equal, so that there is nothing to learn: each is
    counted and drawn anew, and after so many the run ends with an error."""

    sft_steps: Steps = 0
    """Optimizer steps of supervised fine-tuning on the rows' own completions before the first completion is drawn."""

    sft_batch_size: Rows = 32
    """Rows in each of the `sft_steps`, laid end to end."""

    sft_learning_rate: NotNegative | None = None
    """Peak learning rate of the `sft_steps`; without it, `learning_rate`."""

    @model_validator(mode="before")
    @classmethod
    def _longest(cls, values: Any) -> Any:
        """Set ``max_length`` to the sum of a prompt's and a completion's longest length, if nothing else is written."""
        if not isinstance(values, dict) or "max_length" in values:
            return values
        parts = [values.get(key, cls.model_fields[key].default) for key in LENGTHS]
        return {**values, "max_length": sum(parts)} if all(isinstance(part, int) for part in parts) else values

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def completions_per_generation(self) -> int:
        """Completions written at once."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        return self.per_device_train_batch_size * (self.steps_per_generation or self.gradient_accumulation_steps)

    @property
    def prompts_per_generation(self) -> int:
        """Prompts whose completions are written at once."""
        return self.completions_per_generation // self.num_generations

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that go once through a batch of completions."""
        return self.completions_per_generation // self.completions_per_step


def _weighted_datasets(recipe: Any) -> Iterator[Refusal]:
    if any(dataset.weight is not None for dataset in recipe.datasets):
        yield Refusal(
            "datasets.0.weight",
            "'weight' has no meaning in grpo, where 'prompts' says how prompts are chosen",
            "delete it; max_rows takes a part of a dataset, and repeat visits one more often",
        )


def _weights_of_rewards(recipe: Any) -> Iterator[Refusal]:
    weights, rewards = recipe.reward_weights, recipe.reward_funcs
    if weights is not None and len(weights) != len(rewards):
        what = f"{len(weights)} weights for {len(rewards)} reward functions"
        yield Refusal("reward_weights", what, "give one weight for each of reward_funcs")


REWARD_RULES: Rules = (
    Custom(_weighted_datasets),
    Clash(
        {"reward_funcs": (), "loss_type": Not("gkd")},
        "'reward_funcs' is missing: '{loss_type}' is trained on rewards",
        "name at least one, such as reward_funcs: [exact_match]; or write loss_type: gkd and a teacher",
    ),
    Clash(
        {"loss_type": "gkd", "teacher": None},
        "'loss_type: gkd' learns from a teacher, and the recipe names none",
        "add teacher: NAME, or write loss_type: dapo",
    ),
    *(Clash({key: GIVEN, "loss_type": "gkd"}, f"'{key}' {why}", DELETE) for key, why in UNREAD_WITH_GKD.items()),
    *(
        Clash(
            {key: GIVEN, "reward_funcs": ()},
            f"'{key}' is about rewards, and the recipe has no 'reward_funcs'",
            "add reward_funcs, or delete the line",
        )
        for key in ("reward_weights", "prompts", "pass_reward")
    ),
    Custom(_weights_of_rewards),
    Clash(
        {"num_generations": 1, "loss_type": Not("remax", "gkd")},
        "a group of one completion has no mean to be better than",
        "write 2 or more, or loss_type: remax, which compares with the likeliest completion",
    ),
)


def _too_short(recipe: Any) -> Iterator[Refusal]:
    together = recipe.max_prompt_length + recipe.max_completion_length
    if recipe.max_length < together:
        yield Refusal(
            "max_length",
            f"'max_length' is {recipe.max_length:,}, and a prompt and its completion may have {together:,} tokens",
            "delete the line, or lower max_prompt_length or max_completion_length",
        )


def _whole_groups_and_steps(recipe: Any) -> Iterator[Refusal]:
    written, a_step, group = recipe.completions_per_generation, recipe.completions_per_step, recipe.num_generations
    if written % group:
        yield Refusal(
            "num_generations",
            f"{written} completions are written at once, which is no multiple of 'num_generations': {group}",
            "change per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation",
        )
    if written % a_step or written // group < written // a_step:
        yield Refusal(
            "generation_batch_size" if recipe.generation_batch_size is not None else "steps_per_generation",
            f"{written} completions of {written // group} prompts do not make whole optimizer steps of {a_step}",
            "an optimizer step takes per_device_train_batch_size x gradient_accumulation_steps completions, and at "
            "least one prompt",
        )


ALLOCATION_RULES: Rules = (
    Where(
        {"allocation": Not("equal")},
        Clash(
            {"num_generations": OneOf(1, 2)},
            "gives each prompt two completions or more, so there is nothing to divide",
            "write num_generations: 8",
        ),
        Clash(
            {"beta": GIVEN, "loss_type": Not("rloo", "remax")},
            "makes prompts count the same by their advantages, and 'beta' adds a divergence that has none",
            "delete the line, or write loss_type: rloo, which has it in its rewards",
        ),
        *(
            Clash(
                {"divides": key}, "computes gradients of single completions, of whole weights", f"delete '{key}'", key
            )
            for key in ("fsdp", "deepspeed")
        ),
        Clash(
            {"sequence_parallel_size": GIVEN},
            "computes gradients of single completions, of which each rank has a part",
            "write sequence_parallel_size: 1",
        ),
        Clash(
            {"optim": ONE_BLOCK},
            "computes gradients of one weight at any time, and the optimizer trains it in one block of many",
            "write optim: adamw",
        ),
        text="'allocation: {allocation}' {}",
    ),
)


ROLLOUT_LENGTH_RULES: Rules = (Custom(_too_short), *ROW_RULES)

ROLLOUT_BATCH_RULES: Rules = (
    Clash(
        {"generation_batch_size": GIVEN, "steps_per_generation": GIVEN},
        "'generation_batch_size' and 'steps_per_generation' exclude each other",
        KEEP_ONE,
    ),
    Custom(_whole_groups_and_steps),
)
