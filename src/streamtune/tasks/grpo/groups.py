"""Groups of completions, their micro-batches, and the division of a rollout among ranks.

Each rank generates and scores completions for a part of the prompts, with its own random numbers, and sends the results
to all ranks. So all ranks compute the same advantages and leave out the same completions. The micro-batches of a step
are then divided among the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from streamtune import data, train
from streamtune.data.reading.image_cells import unmark_messages
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.rollouts import RewardKeys
from streamtune.recipe.loader import user_reward_functions
from streamtune.recipe.settings import RolloutSettings
from streamtune.tasks import rewards, rollout
from streamtune.tasks.grpo.objective import Metrics, PolicyBatch
from streamtune.tasks.preference import batch_trees
from streamtune.tasks.rewards import RewardScores
from streamtune.tasks.steps import count_micro_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Settings = TypeVar("Settings", bound=RolloutSettings)

CompletionIndex = tuple[int, int]
"""Index of a completion: of its group, then within its group."""


@dataclass
class Group:
    """The completions of one prompt, with their rewards and advantages. All fields are plain JSON values."""

    prompt: int
    """Index of the prompt among the training prompts."""
    completions: list[list[int]]
    """Token ids of each completion."""
    truncated: list[bool]
    """True for each completion that reached the maximum length without an end token."""
    rewards: list[float | None]
    """Weighted sum of the scores of each completion; None if no reward function scored it."""
    scores: dict[str, list[float | None]]
    """Name of a reward function -> its score of each completion, without weights."""
    advantages: list[float] = field(default_factory=list)
    flat: bool = False
    """True if all advantages are 0."""
    std: float = 0.0
    """Standard deviation of the group's rewards."""
    old: list[list[float]] | None = None
    """Log-probs of each completion's tokens under the policy that sampled it; [] for a completion in no micro-batch."""
    ref: list[list[float]] | None = None
    """Log-probs of each completion's tokens under the reference; [] for a completion in no micro-batch."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class BatchLayout:
    """Settings for dividing completions into micro-batches."""

    batch_size: int
    """Maximum number of completions in a micro-batch."""
    pad_token_id: int
    share: bool
    """True if the common prefix of a prompt's completions is computed once."""
    leave_out: bool
    """True to leave out completions without a gradient; False if the loss is a mean over a micro-batch (bnpo)."""
    mask_truncated: bool
    """True to exclude truncated completions from the loss."""
    zero_advantage_has_gradient: bool
    """True if a completion whose advantage is 0 still has a gradient, from a KL in the loss or from a teacher."""
    max_prompts: int | None = None
    """Maximum number of prompts in a micro-batch; None: no limit. More prompts would exceed the planned memory."""
    images: data.ImageProcessor | None = None
    """Processor of the images of prompts; None for prompts without images."""

    def is_trained(self, group: Group, index: int) -> bool:
        return not (self.mask_truncated and group.truncated[index])

    def has_no_gradient(self, group: Group, index: int) -> bool:
        """Return True if the completion is not trained on, or has advantage 0 and no other source of a gradient."""
        return not self.is_trained(group, index) or (
            group.advantages[index] == 0 and not self.zero_advantage_has_gradient
        )


def has_gradient(groups: Sequence[Group], layout: BatchLayout) -> bool:
    return not all(layout.has_no_gradient(group, index) for group in groups for index in range(len(group.completions)))


def passing_completion_batch(
    group: Group, pass_reward: float, prompts: Sequence[data.Prompt], layout: BatchLayout
) -> PolicyBatch | None:
    """Return a batch with the first completion that is trained on and has ``pass_reward`` or more; None without one.

    The group's advantages must be set. ``prompts`` are all training prompts.
    """
    for index, reward in enumerate(group.rewards):
        if reward is not None and reward >= pass_reward and layout.is_trained(group, index):
            return _make_batch([group], prompts, [(0, index)], layout)
    return None


def make_micro_batches(
    groups: Sequence[Group], prompts: Sequence[data.Prompt], layout: BatchLayout
) -> list[PolicyBatch]:
    """Return the micro-batches of one optimizer step; an empty list if no completion has a gradient.

    The advantages of all groups must be set. ``prompts`` are all training prompts.
    """
    if not has_gradient(groups, layout):
        return []
    rows, candidate_rows = _completion_indices(groups, layout)
    parts = _split_into_batches(groups, candidate_rows, layout)
    computed = {row for part in parts for row in part}
    left_out = [row for row in rows if row not in computed]
    tokens = sum(len(groups[g].completions[i]) for g, i in left_out if layout.is_trained(groups[g], i))
    batches = [_make_batch(groups, prompts, part, layout) for part in parts]
    batches[0] = replace(batches[0], left_out_rows=len(left_out), left_out_tokens=tokens, metrics=group_metrics(groups))
    return batches


def store_logprobs(
    field_name: str,
    compute_logprobs: Callable[[int, Callable[[int], PolicyBatch]], list[list[float]]],
    groups: Sequence[Group],
    prompts: Sequence[data.Prompt],
    layout: BatchLayout,
) -> None:
    """Compute log-probs of all completions in micro-batches, and store them in ``group.old`` or ``group.ref``.

    Args:
        field_name: Field of :class:`Group` to set, ``old`` or ``ref``.
        compute_logprobs: Function (number of micro-batches, function that makes micro-batch i) -> log-probs of each
            micro-batch.
        prompts: All training prompts.
    """
    values_by_group: list[list[list[float]]] = [[[] for _ in group.completions] for group in groups]
    parts = _split_into_batches(groups, _completion_indices(groups, layout)[1], layout)
    scored = compute_logprobs(len(parts), lambda number: _make_batch(groups, prompts, parts[number], layout))
    for part, rest in zip(parts, scored, strict=True):
        for group_index, index in part:
            if layout.is_trained(groups[group_index], index):
                size = len(groups[group_index].completions[index])
                values_by_group[group_index][index], rest = rest[:size], rest[size:]
    for group, values in zip(groups, values_by_group, strict=True):
        setattr(group, field_name, values)


def has_logprobs(groups: Sequence[Group], layout: BatchLayout, *, needs_old: bool, needs_ref: bool) -> bool:
    """Return True if every completion that micro-batches will contain has the log-probs that the loss needs."""
    trained = [(groups[g], i) for g, i in _completion_indices(groups, layout)[1] if layout.is_trained(groups[g], i)]
    return all(
        len(rows[index]) == len(group.completions[index]) if rows is not None else not needed
        for group, index in trained
        for rows, needed in ((group.old, needs_old), (group.ref, needs_ref))
    )


def _completion_indices(
    groups: Sequence[Group], layout: BatchLayout
) -> tuple[list[CompletionIndex], list[CompletionIndex]]:
    rows = [(place, index) for place, group in enumerate(groups) for index in range(len(group.completions))]
    return rows, [row for row in rows if not (layout.leave_out and layout.has_no_gradient(groups[row[0]], row[1]))]


def _split_into_batches(
    groups: Sequence[Group], rows: Sequence[CompletionIndex], layout: BatchLayout
) -> list[list[CompletionIndex]]:
    parts: list[list[CompletionIndex]] = []
    for row in rows:
        part = parts[-1] if parts else []
        prompts = {place for place, _ in part} | {row[0]}
        if not part or len(part) == layout.batch_size or len(prompts) > (layout.max_prompts or len(prompts)):
            parts.append([])
        parts[-1].append(row)
    return [part for part in parts if any(layout.is_trained(groups[place], index) for place, index in part)]


def _make_batch(
    groups: Sequence[Group], prompts: Sequence[data.Prompt], rows: Sequence[CompletionIndex], layout: BatchLayout
) -> PolicyBatch:
    trees = list(_make_trees(groups, prompts, rows, layout))
    trained = [(groups[g], i) for g, i in rows if layout.is_trained(groups[g], i)]
    return PolicyBatch(
        **batch_trees(trees, pad_token_id=layout.pad_token_id, share=layout.share, images=layout.images),
        advantages_N=torch.tensor([groups[g].advantages[i] for g, i in rows], dtype=torch.float32),
        old_K=_join_token_values([group.old[i] if group.old else None for group, i in trained]),
        ref_K=_join_token_values([group.ref[i] if group.ref else None for group, i in trained]),
    )


def _join_token_values(values: Sequence[list[float] | None]) -> torch.Tensor | None:
    """Concatenate per-token values of all completions, fp32 ``[K]``; return None if any completion has none."""
    if any(row is None for row in values):
        return None
    return torch.tensor([value for row in values if row is not None for value in row], dtype=torch.float32)


def _make_trees(
    groups: Sequence[Group], prompts: Sequence[data.Prompt], rows: Sequence[CompletionIndex], layout: BatchLayout
) -> Iterator[data.Tree]:
    """Yield a tree (a prompt with completions) for each group of adjacent completions in ``rows``."""
    start = 0
    while start < len(rows):
        place = rows[start][0]
        stop = start
        while stop < len(rows) and rows[stop][0] == place:
            stop += 1
        group, prompt = groups[place], prompts[groups[place].prompt]
        indices = [index for _, index in rows[start:stop]]
        completions = [group.completions[index] for index in indices]
        counts = [layout.is_trained(group, index) for index in indices]
        masks = None if all(counts) else [[counted] * len(c) for counted, c in zip(counts, completions, strict=True)]
        yield data.Tree(prompt.input_ids, completions, masks, prompt.origin, images=prompt.images)
        start = stop


def group_metrics(groups: Sequence[Group]) -> Metrics:
    """Return metrics of a step's completions: TRL's name -> (sum, count). Reward metrics exist only with scores."""
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    lengths = [len(completion) for group in groups for completion in group.completions]
    truncated = [cut for group in groups for cut in group.truncated]
    metrics: dict[str, tuple[float, float]] = {}
    if groups[0].scores:
        metrics = {
            "reward": (math.fsum(rewards), len(rewards)),
            "reward_std": (math.fsum(group.std for group in groups), len(groups)),
            "frac_reward_zero_std": (sum(group.flat for group in groups), len(groups)),
        }
    sizes = {len(group.completions) for group in groups}
    if len(sizes) > 1:
        metrics["completions/fewest"], metrics["completions/most"] = (min(sizes), 1), (max(sizes), 1)
    metrics["completions/mean_length"] = (sum(lengths), len(lengths))
    metrics["completions/clipped_ratio"] = (sum(truncated), len(truncated))
    for name in groups[0].scores:
        scores = [score for group in groups for score in group.scores[name] if score is not None]
        metrics[f"rewards/{name}/mean"] = (math.fsum(scores), len(scores))
    return metrics


ScoreCompletions = Callable[[Sequence[data.Prompt], Sequence[list[int]]], rewards.RewardScores]
"""Function (prompts, token ids of completions) -> scores. Each completion belongs to the prompt of the same index."""


class RewardScorer:
    """Decodes completions and passes them to reward functions: as messages if the prompt has messages, else as text.

    Functions get the images of each prompt, in RGB: as a list in the column ``images``, and in the prompt's messages.

    Args:
        has_images: True if any prompt of the run has images.
    """

    def __init__(
        self, functions: rewards.Rewards, tokenizer: PreTrainedTokenizerBase, *, has_images: bool = False
    ) -> None:
        self.functions, self.tokenizer, self.has_images = functions, tokenizer, has_images

    def __call__(self, prompts: Sequence[data.Prompt], completions: Sequence[list[int]]) -> rewards.RewardScores:
        """Return the scores of completions (token ids); ``completions[i]`` belongs to ``prompts[i]``."""
        if self.has_images and not all(function.built_in for function in self.functions.functions.values()):
            shown = {key: _with_pictures(prompt) for key, prompt in {id(each): each for each in prompts}.items()}
            prompts = [shown[id(each)] for each in prompts]
        texts = self.tokenizer.batch_decode(list(completions), skip_special_tokens=True)
        decoded: list[Any] = [
            text if isinstance(prompt.prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {**data.gather_columns(prompts), "completion_ids": list(completions)}
        origins = [prompt.origin for prompt in prompts]
        return self.functions([prompt.prompt for prompt in prompts], decoded, columns, origins=origins)

    def check_columns(self, prompts: Sequence[data.Prompt]) -> None:
        images = ["images"] if self.has_images else []
        self.functions.check_columns([*data.gather_columns(prompts), *images, "completion_ids"])


def _with_pictures(prompt: data.Prompt) -> data.Prompt:
    """Return a prompt whose messages show its images, and with the images as a column."""
    files = map(data.ImageFile.parse, prompt.images)
    pictures = [data.decode_image(file.read(), file.path, prompt.origin) for file in files]
    columns, messages = {**prompt.columns, "images": pictures}, prompt.prompt
    if pictures:
        assert isinstance(messages, list), "only messages have images"
        messages = unmark_messages(messages, pictures)
        if "messages" in columns:
            columns["messages"] = unmark_messages(columns["messages"], pictures)
    return replace(prompt, prompt=messages, columns=columns)


def load_reward_functions(
    recipe: RewardKeys, folder: Path, notify: Callable[[str], None] = lambda message: None
) -> rewards.Rewards:
    """Return the reward functions that a recipe names in ``reward_funcs``.

    Args:
        recipe: Recipe with ``reward_funcs``, ``reward_weights`` and ``allow_code``.
        folder: Folder of the user's own modules, to which file paths are relative.
        notify: Function called once with the names of the user's own functions, before their code runs.

    Raises:
        ArgumentError: A function does not exist, or is Python code and ``allow_code`` is not set.
    """
    if not recipe.reward_funcs:
        return rewards.Rewards({}, ())
    user_specs = user_reward_functions(recipe)
    if user_specs and not recipe.allow_code:
        raise ArgumentError(
            f"the recipe names the reward '{user_specs[0]}', which is Python code that would run on this machine",
            where="reward_funcs",
            fix="read the code; if you trust it, run with --allow-code or set allow_code: true",
        )
    if user_specs:
        notify(f"running the code of {', '.join(user_specs)}")
    return rewards.load_rewards(
        recipe.reward_funcs, weights=recipe.reward_weights, allow_code=recipe.allow_code, directory=folder
    )


def single_rank_recipe(recipe: Settings, world: train.World) -> Settings:
    """Return a recipe with which one rank alone would make the same optimizer steps as all ranks together.

    Raises:
        ArgumentError: The completions of a rollout do not fill whole optimizer steps of all ranks, or the completions
            of a step do not fill whole groups.
    """
    joint = recipe
    if world.size > 1 or recipe.train_batch_size is not None:
        steps, changes = count_micro_batches(recipe, world) * world.data_size, {}
        if recipe.steps_per_generation is not None:
            changes["steps_per_generation"] = recipe.steps_per_generation * world.data_size
        joint = recipe.model_copy(update={"gradient_accumulation_steps": steps, "train_batch_size": None, **changes})
    per_rollout, per_step = joint.completions_per_generation, joint.completions_per_step
    if per_rollout % per_step or per_step % joint.num_generations:
        raise ArgumentError(
            f"completions per rollout must be a multiple of completions per step ({per_step} on {world.data_size} "
            f"rank{'s' * (world.data_size > 1)}), found {per_rollout}, and completions per step of num_generations, "
            f"found {joint.num_generations}",
            where="generation_batch_size" if recipe.generation_batch_size is not None else "num_generations",
            fix="change the completions per step: per_device_train_batch_size x gradient_accumulation_steps x ranks",
        )
    return joint


def _compute_over_ranks(world: train.World, count: int, work: Callable[[list[int]], list[T]]) -> list[T]:
    """Divide the indices 0 to ``count - 1`` among the ranks, call ``work`` on each part, and return all results.

    A rank with one index less computes index 0 again, because ranks with sharded weights must compute together.
    """
    size = world.data_size
    numbers = list(range(world.data_rank, count, size))
    numbers += [0] * (-(-count // size) - len(numbers))
    results = world.gather_data_ranks(world.run_on_all_ranks(lambda: work(numbers)))
    return [results[number % size][number // size] for number in range(count)]


class DistributedWriter:
    """Generates completions on several ranks: each rank for a part of the prompts. All ranks get all completions."""

    def __init__(self, writer: rollout.Writer, world: train.World) -> None:
        self.writer, self.world = writer, world

    def write(
        self,
        prompts: Sequence[list[int]],
        count: int | Sequence[int],
        sampling: rollout.Sampling,
        images: Sequence[rollout.Images] | None = None,
    ) -> list[list[rollout.Completion]]:
        if self.world.size == 1:
            return self.writer.write(prompts, count, sampling, images)

        def complete(prompt_indices: list[int]) -> list[list[tuple[list[int], bool]] | None]:
            try:
                counts = count if isinstance(count, int) else [count[i] for i in prompt_indices]
                shown = None if images is None else [images[i] for i in prompt_indices]
                written = self.writer.write([prompts[i] for i in prompt_indices], counts, sampling, shown)
            except rollout.GenerationStopped:  # not a failure: every rank raises it below
                return [None] * len(prompt_indices)
            return [[(each.token_ids, each.truncated) for each in completions] for completions in written]

        found = _compute_over_ranks(self.world, len(prompts), complete)
        written = [
            [rollout.Completion(token_ids, truncated) for token_ids, truncated in completions]
            for completions in found
            if completions is not None
        ]
        if len(written) < len(found):
            raise rollout.GenerationStopped
        return written


class DistributedRewards:
    """Scores each completion on one rank and sends the score to all ranks, which then agree even on random rewards."""

    def __init__(self, score: ScoreCompletions, world: train.World) -> None:
        self.score, self.world = score, world

    def __call__(self, prompts: Sequence[data.Prompt], completions: Sequence[list[int]]) -> RewardScores:
        if self.world.size == 1:
            return self.score(prompts, completions)

        def score(indices: list[int]) -> list[tuple[float | None, dict[str, float | None]]]:
            scores = self.score([prompts[i] for i in indices], [completions[i] for i in indices])
            return [
                (total, {name: values[place] for name, values in scores.by_function.items()})
                for place, total in enumerate(scores.total)
            ]

        found = _compute_over_ranks(self.world, len(completions), score)
        names = found[0][1] if found else {}
        return RewardScores(
            total=[total for total, _ in found],
            by_function={name: [scores[name] for _, scores in found] for name in names},
        )


class DistributedLogprobs:
    """Computes the log-probs of each micro-batch on one rank, and sends them to all ranks."""

    def __init__(self, world: train.World) -> None:
        self.world = world

    def __call__(
        self, compute: Callable[[PolicyBatch], list[float]], count: int, make_batch: Callable[[int], PolicyBatch]
    ) -> list[list[float]]:
        """Return ``compute(make_batch(i))``, the log-probs of micro-batch i, for every i below ``count``."""
        return _compute_over_ranks(self.world, count, lambda mine: [compute(make_batch(index)) for index in mine])
