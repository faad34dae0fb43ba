"""The recipe of ``streamtune grpo``: what reinforcement learning adds to the keys of fine-tuning. Names are TRL's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamtune.recipe.dpo import ROW_RULES
from streamtune.recipe.keys.optimizer import ONE_BLOCK
from streamtune.recipe.rules import DELETE, GIVEN, KEEP_ONE, Clash, Custom, Not, OneOf, Refusal, Rules, Where
from streamtune.recipe.schema import Recipe
from streamtune.recipe.spec import Count, Rows, Steps, Text, at_most

Positive = Annotated[float, Field(gt=0), at_most(10**9)]
NotNegative = Annotated[float, Field(ge=0), at_most(10**9)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
LENGTHS = ("max_prompt_length", "max_completion_length")


UNREAD_WITH_GKD = {
    "beta": "weighs the divergence from a reference, and gkd has that from its teacher alone",
    "ref_model_name_or_path": "names a reference, and gkd is compared with its teacher alone",
    "epsilon": "clips ratios of probabilities, which gkd does not have",
    "epsilon_high": "clips ratios of probabilities, which gkd does not have",
    "delta": "clips ratios of probabilities, which gkd does not have",
    "importance_sampling_level": "is of ratios of probabilities, which gkd does not have",
    "scale_rewards": "is of advantages, and gkd makes none of its rewards: they are reported",
    "allocation": "is of the variance of a policy gradient, and gkd has none: it learns from its teacher",
}
"""Keys of a policy-gradient loss that ``loss_type: gkd`` does not read, and why."""


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


LENGTH_RULES: Rules = (Custom(_too_short), *ROW_RULES)

BATCH_RULES: Rules = (
    Clash(
        {"generation_batch_size": GIVEN, "steps_per_generation": GIVEN},
        "'generation_batch_size' and 'steps_per_generation' exclude each other",
        KEEP_ONE,
    ),
    Custom(_whole_groups_and_steps),
)


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


class GrpoRecipe(Recipe):
    """Everything a run of group-relative policy optimisation depends on."""

    objective: Literal["grpo"] = "grpo"
    """Objective of the training: a loss on completions that the model writes itself, by their rewards or by the
    distribution of a teacher."""

    # --- rewards -----------------------------------------------------------------------------------------------

    reward_funcs: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Functions that score a completion: names of built-in rewards; with `allow_code`, `module:function` or
    `path.py:function`. At least one; with `loss_type: gkd` none is needed, and rewards are reported only."""

    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """A weight for each of `reward_funcs`; without it, all weigh 1. The reward is the weighted sum."""

    # --- completions -------------------------------------------------------------------------------------------

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

    # --- prompts -----------------------------------------------------------------------------------------------

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

    # --- the loss ----------------------------------------------------------------------------------------------

    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "rloo", "remax", "gkd"] = "dapo"  # type: ignore[assignment]
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

    ref_model_name_or_path: Text | None = None
    """The reference; without it, the model as it was at the start, which under adapters costs no memory."""

    mask_truncated_completions: bool = False
    """Do not train on completions that were cut off."""

    share_prefix: Literal["auto", "always", "never"] = "auto"
    """Stream a prompt, and what completions behind it begin with, once for all of them in a micro-batch: the same
    gradient in less time and memory. `auto` does where the model can, `never` gives each completion its own copy."""

    # --- what is shown -----------------------------------------------------------------------------------------

    num_completions_to_print: Steps = 4
    """Completions of each batch to keep, with their rewards, in `completions.jsonl`."""

    # --- rules about several keys -----------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _longest(cls, values: Any) -> Any:
        """Set ``max_length`` to the sum of a prompt's and a completion's longest length, if nothing else is written."""
        if not isinstance(values, dict) or "max_length" in values:
            return values
        parts = [values.get(key, cls.model_fields[key].default) for key in LENGTHS]
        return {**values, "max_length": sum(parts)} if all(isinstance(part, int) for part in parts) else values

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _one_reward(cls, reward_funcs: Any) -> Any:
        return [reward_funcs] if isinstance(reward_funcs, str) else reward_funcs

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _switch(cls, scale_rewards: Any) -> Any:
        """Accept TRL's older form: true is ``group``, false is ``none``."""
        return {True: "group", False: "none"}[scale_rewards] if isinstance(scale_rewards, bool) else scale_rewards

    rules = (
        *Recipe.rules,
        *REWARD_RULES,
        *ALLOCATION_RULES,
        *LENGTH_RULES,
        *BATCH_RULES,
        *POLICY_RULES,
    )
    whole_weights = (*Recipe.whole_weights, *NEEDS_WHOLE_WEIGHTS)

    # --- what follows ------------------------------------------------------------------------------------------

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

    @property
    def distils(self) -> bool:
        """True if the loss is the divergence from a teacher."""
        return self.loss_type == "gkd"

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the policy may have changed between writing completions and training on them, and the loss asks."""
        return not self.distils and self.num_iterations * self.steps_per_rollout > 1
