"""The optimizer steps of a grpo run: prompts are drawn, completed and scored, and become micro-batches.

    next_step()   a supervised step, for the first sft_steps steps;
                  then the next part of the current rollout, or the first part of a new rollout

    a rollout     prompts -> completions -> rewards -> rules, in order -> old and reference log-probs
                  split into steps_per_rollout parts, which are trained on num_iterations times

If no completion of a rollout has a gradient, the rollout is skipped and another one is drawn. A checkpoint has the
current rollout with its log-probs, so that a run can resume in the middle of a rollout.

Supervised steps train on answers in the rows of the training prompts, because a model that never solves a task cannot
learn it from rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamtune import data, train
from streamtune.data.inspect_rows import shorten_repeats
from streamtune.data.reading.image_cells import ImageCell
from streamtune.data.reading.readers import Row
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import Conversation, detect_type, normalise_row
from streamtune.errors import CheckpointError, DataError, RunError
from streamtune.recipe.settings import RolloutSettings
from streamtune.tasks import rewards, rollout
from streamtune.tasks.grpo.groups import Group, group_metrics, has_gradient, has_logprobs, make_micro_batches
from streamtune.tasks.grpo.objective import MetricsBatch, PolicyBatch, completion_loss
from streamtune.tasks.grpo.rollout_rules import (
    RolloutTools,
    ScoredRollout,
    groups_of_step,
    rewards_tensor,
    rollout_rules_for,
)
from streamtune.tasks.steps import divide_among_ranks
from streamtune.tasks.task import chat_options
from streamtune.train.records import append_records, delete_rotated_records_after_step, rotate_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP_METRICS = ("reward_std", "frac_reward_zero_std")
"""Metrics that need several completions of a prompt."""


@dataclass
class _Rollout:
    """Groups of completions, divided as the recipe said when they were written: a resumed run may have another one."""

    groups: list[Group]
    parts: int
    """Number of parts. A part has the groups of one optimizer step."""
    iterations: int
    """Number of times that all parts are trained on."""
    temperature: float
    """Divisor of the logits in the stored log-probs."""
    next_part: int = 0
    """Number of parts used so far, over all iterations."""
    skipped: int = 0
    """Number of rollouts without a gradient that were skipped just before this rollout, and are not yet reported."""

    @property
    def is_used_up(self) -> bool:
        return self.next_part >= self.parts * self.iterations


class GrpoSteps:
    """Makes the optimizer steps of a grpo run: samples and scores completions, and makes micro-batches of them.

    Args:
        tools: Objects that generate and score completions and compute log-probs.
        supervised: Stream of the supervised steps before the first rollout; None without any.
        log: Object that records some completions in a file.
    """

    def __init__(self, tools: RolloutTools, *, supervised: train.StepStream | None, log: CompletionLog) -> None:
        self.tools, self.recipe, self.prompts = tools, tools.recipe, tools.prompts
        self.supervised, self.log = supervised, log
        self.loss = completion_loss(self.recipe)
        self.rules = [rule(tools) for rule in rollout_rules_for(self.recipe)]
        self.picker = rollout.PromptPicker(
            len(self.prompts.training),
            choice=self.recipe.prompts,
            seed=self.recipe.seed,
            shuffle=self.recipe.shuffle,
            record_rates=any(rule.reads_pass_rates for rule in self.rules),
        )
        self.steps_taken = 0
        self.on_first_rollout: Callable[[], None] = lambda: None
        """Function called when the supervised steps are over."""
        self.current: _Rollout | None = None

    # --- steps -------------------------------------------------------------------------------------------------

    def next_step(self) -> Sequence[train.MicroBatch]:
        """Return this rank's micro-batches of the next step; an empty list if a stop was requested during a rollout.

        Raises:
            RunError: ``skip_limit`` rollouts in a row had no gradient.
        """
        try:
            return list(divide_among_ranks(self._next_step(), self.tools.world))
        except rollout.GenerationStopped:
            return []

    def _next_step(self) -> Sequence[train.MicroBatch]:
        if self.supervised is not None and self.steps_taken < self.recipe.sft_steps:
            self.steps_taken += 1
            return self.supervised.next_step()
        if self.supervised is not None and self.steps_taken == self.recipe.sft_steps:
            self.on_first_rollout()
        while True:
            current = self.current
            if current is None or current.is_used_up:
                current = self.current = self._next_rollout()
            groups = groups_of_step(current.groups, current.next_part % current.parts, current.parts)
            current.next_part += 1
            batches = make_micro_batches(groups, self.prompts.training, self.tools.layout)
            if batches:  # else no completion of this part has a gradient
                self.steps_taken += 1
                if current.skipped:
                    more = {**batches[0].metrics, "skipped_batches": (float(current.skipped), 1.0)}
                    batches[0] = replace(batches[0], metrics=more)
                    current.skipped = 0
                return batches

    def held_out_batches(self, eval_set: data.EvalSet | None = None) -> Iterator[train.MicroBatch]:
        """Generate greedy completions of held-out prompts, score them, and yield batches with their metrics.

        With a teacher the batches also have the completions. Their divergence from the teacher is the held-out loss.
        """
        prompts, size = self.prompts.validation, self.recipe.prompts_per_generation * self.recipe.num_generations
        first, stop = (0, len(prompts)) if eval_set is None else (eval_set.start, eval_set.stop)
        empty = torch.zeros(1, 1, dtype=torch.int64)
        for start in range(first, stop, size):
            asked_prompts = [prompts[index] for index in range(start, min(start + size, stop))]
            try:
                written = self.tools.write_greedy(asked_prompts)
            except rollout.GenerationStopped:  # the evaluation ends at the next batch, whatever it contains
                yield MetricsBatch(empty, empty, empty, (), metrics={})
                return
            self.tools.show_activity("scoring held-out completions")
            scores = self.tools.score(asked_prompts, [completion.token_ids for completion in written])
            self.tools.show_activity("evaluating")
            if self.loss.scores_held_out:
                yield from self._make_held_out_batches(range(start, start + len(asked_prompts)), written, scores)
                continue
            group = Group(
                prompt=-1,
                completions=[completion.token_ids for completion in written],
                truncated=[completion.truncated for completion in written],
                rewards=scores.total,
                scores=scores.by_function,
            )
            metrics = {name: value for name, value in group_metrics([group]).items() if name not in GROUP_METRICS}
            yield MetricsBatch(empty, empty, empty, tuple(prompt.origin for prompt in asked_prompts), metrics=metrics)

    def _make_held_out_batches(
        self, prompt_indices: range, written: Sequence[rollout.Completion], scores: rewards.RewardScores
    ) -> Iterator[PolicyBatch]:
        groups = [
            Group(
                prompt=number,
                completions=[completion.token_ids],
                truncated=[completion.truncated],
                rewards=[scores.total[place]],
                scores={name: [values[place]] for name, values in scores.by_function.items()},
                advantages=[0.0],
            )
            for place, (number, completion) in enumerate(zip(prompt_indices, written, strict=True))
        ]
        layout = replace(self.tools.layout, mask_truncated=False)
        for batch in make_micro_batches(groups, self.prompts.validation, layout):
            metrics = {name: value for name, value in batch.metrics.items() if name not in GROUP_METRICS}
            yield replace(batch, metrics=metrics)

    # --- a rollout ---------------------------------------------------------------------------------------------

    def _next_rollout(self) -> _Rollout:
        reason, fix = self.loss.no_gradient
        for skipped in range(self.recipe.skip_limit):
            groups = self._write_and_score()
            if any(has_gradient(part, self.tools.layout) for part in self.tools.groups_by_step(groups)):
                self.tools.store_logprobs(groups, needs_old=self.recipe.needs_old_logprobs)
                return _Rollout(
                    groups,
                    parts=self.recipe.steps_per_rollout,
                    iterations=self.recipe.num_iterations,
                    temperature=self.recipe.temperature,
                    skipped=skipped,
                )
            self.log.record_skip(self.steps_taken + 1, reason)
        raise RunError(f"{self.recipe.skip_limit} rollouts in a row had no gradient: in each of them {reason}", fix=fix)

    def _write_and_score(self) -> list[Group]:
        tools, prompt_indices = self.tools, self.picker.next_prompts(self.recipe.prompts_per_generation)
        prompts = [self.prompts.training[number] for number in prompt_indices]
        counts = self._allocate_counts(prompt_indices)
        tools.show_activity(f"generating {sum(counts)} completions")
        written = tools.write(prompts, counts[0] if len(set(counts)) == 1 else counts, tools.sampling_settings)
        tools.show_activity("scoring completions")
        prompt_of_completion = [prompt for prompt, own in zip(prompts, written, strict=True) for _ in own]
        scores = tools.score(prompt_of_completion, [completion.token_ids for group in written for completion in group])
        tools.show_activity("advantages")
        groups = self._make_groups(prompt_indices, written, scores)
        scored_rollout = ScoredRollout(prompts, groups, rewards_tensor(scores.total))
        for rule in self.rules:
            rule.apply(scored_rollout)
        self.log.record_rollout(self.steps_taken + 1, groups, prompts)
        return groups

    def _allocate_counts(self, prompt_indices: Sequence[int]) -> list[int]:
        found = []
        for part in self.tools.groups_by_step(prompt_indices):
            counts = [self.recipe.num_generations] * len(part)
            for rule in self.rules:
                counts = rule.allocate_counts(part, counts, self.picker.rates)
            found += counts
        return found

    def _make_groups(
        self,
        prompt_indices: Sequence[int],
        written: Sequence[Sequence[rollout.Completion]],
        scores: rewards.RewardScores,
    ) -> list[Group]:
        """Return a group of scored completions for each prompt, and record how many completions passed."""
        groups = []
        stops = accumulate(map(len, written))
        for number, completions, stop in zip(prompt_indices, written, stops, strict=True):
            own = slice(stop - len(completions), stop)
            groups.append(
                Group(
                    prompt=number,
                    completions=[completion.token_ids for completion in completions],
                    truncated=[completion.truncated for completion in completions],
                    rewards=scores.total[own],
                    scores={name: values[own] for name, values in scores.by_function.items()},
                )
            )
            passed = sum(reward is not None and reward >= self.recipe.pass_reward for reward in scores.total[own])
            self.picker.record_completions(number, passed=passed, tried=len(completions))
        return groups

    # --- position ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        current = self.current
        rollout_state = None
        if current is not None:
            rollout_state = {**vars(current), "groups": [group.to_json() for group in current.groups]}
        return {
            "taken": self.steps_taken,
            "picker": self.picker.state_dict(),
            **{key: value for rule in self.rules for key, value in rule.state_dict().items()},
            "rollout": rollout_state,
            "warm": None if self.supervised is None else self.supervised.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if type(state["taken"]) is not int or state["taken"] < 0:
            what = f"the number of steps in the checkpoint must be a whole number from 0, found {state['taken']}"
            raise CheckpointError(what, fix="use another checkpoint")
        self.steps_taken = state["taken"]
        if "picker" not in state:  # the data changed
            return
        self.picker.load_state_dict(state["picker"])
        for rule in self.rules:
            rule.load_state_dict(state)
        current = state["rollout"]
        self.current = None
        if current is not None:
            self.current = _Rollout(
                groups=[Group(**group) for group in current["groups"]],
                parts=int(current.get("parts", self.recipe.steps_per_rollout)),  # older checkpoints have neither
                iterations=int(current.get("iterations", self.recipe.num_iterations)),
                temperature=float(current.get("temperature", self.recipe.temperature)),
                next_part=int(current["next_part"]),
                # older checkpoints keep the number after its report by the first part
                skipped=int(current["skipped"]) if "parts" in current or not current["next_part"] else 0,
            )
            if min(self.current.parts, self.current.iterations) < 1 or self.current.next_part < 0:
                what = "the rollout in the checkpoint must have at least one part and one iteration"
                raise CheckpointError(what, fix="use another checkpoint")
            if not self._may_continue(self.current):
                self.log.record_skip(self.steps_taken + 1, "the loss changed and needs other log-probs than are saved")
                self.current = None
        if self.supervised is not None:
            self.supervised.load_state_dict(state["warm"])

    def _may_continue(self, current: _Rollout) -> bool:
        """Return False if stored log-probs are needed that are missing, or were computed at another temperature."""
        if current.is_used_up:
            return True
        needs_old = not self.recipe.is_distillation and current.parts * current.iterations > 1
        needs_ref = self.tools.reference is not None
        if (needs_old or needs_ref) and current.temperature != self.recipe.temperature:
            return False
        return has_logprobs(current.groups, self.tools.layout, needs_old=needs_old, needs_ref=needs_ref)


@dataclass(frozen=True)
class CompletionLog:
    """Records a few completions of each rollout, with their rewards, in ``completions.jsonl``."""

    run: train.RunDirectory
    tokenizer: PreTrainedTokenizerBase
    num_completions: int
    """Number of completions to record per rollout."""
    writes: bool = True
    """True if this rank writes files."""

    @property
    def path(self) -> Path:
        return self.run.path / "completions.jsonl"

    def record_rollout(self, step: int, groups: Sequence[Group], prompts: Sequence[data.Prompt]) -> None:
        """Record completions of the rollout that begins at ``step``: one per prompt, then a second one, and so on."""
        if not self.writes:
            return
        max_completions = max(len(group.completions) for group in groups)
        indices = [(place, index) for index in range(max_completions) for place in range(len(groups))]
        existing_indices = [(place, index) for place, index in indices if index < len(groups[place].completions)]
        rotate_file(self.path)
        chosen = existing_indices[: self.num_completions]
        append_records(
            self.path, [self._make_record(step, groups[place], prompts[place], index) for place, index in chosen]
        )

    def record_skip(self, step: int, reason: str) -> None:
        if self.writes:
            train.append_event(self.run.events, "skip", step=step, reason=reason)

    def delete_records_after_step(self, step: int) -> None:
        if self.writes:
            delete_rotated_records_after_step(self.path, step)

    def _make_record(self, step: int, group: Group, prompt: data.Prompt, index: int) -> dict[str, Any]:
        shown = self.tokenizer.decode(prompt.input_ids)
        return {
            "step": step,
            "prompt": shorten_repeats(shown) if prompt.images else shown,
            "completion": self.tokenizer.decode(group.completions[index]),
            "reward": group.rewards[index],
            "rewards": {name: values[index] for name, values in group.scores.items()},
            "advantage": group.advantages[index],
            "truncated": group.truncated[index],
            "origin": prompt.origin,
            **({"images": [data.ImageFile.parse(each).path for each in prompt.images]} if prompt.images else {}),
        }


class SupervisedSteps:
    """Makes supervised optimizer steps on prompts with their answers, ``sft_batch_size`` rows per step.

    Args:
        images: Processor of the images of prompts; None for prompts without images.

    Raises:
        DataError: A row has no answer, or has more than ``max_prompt_length + max_completion_length`` tokens.
    """

    def __init__(
        self,
        recipe: RolloutSettings,
        prompts: Sequence[data.Prompt],
        tokenizer: PreTrainedTokenizerBase,
        images: data.ImageProcessor | None = None,
    ) -> None:
        render = RowRenderer(
            tokenizer,
            train_on="completion",
            notify=lambda text: None,
            chat=chat_options(recipe),
            images=None if images is None else images.options,
        )
        self.images = images
        self.examples = [_make_demonstration(prompt, render, recipe.max_length) for prompt in prompts]
        render.log.notify_or_raise()
        self.pad_token_id = tokenizer.pad_token_id
        self.step_size, self.batch_size = recipe.sft_batch_size, recipe.per_device_train_batch_size
        self.sampler = data.ResumableSampler(len(self.examples), seed=recipe.seed, shuffle=recipe.shuffle)

    def next_step(self) -> Sequence[train.MicroBatch]:
        """Return micro-batches of the next ``sft_batch_size`` rows; of fewer rows at the end of an epoch."""
        while not (step := list(islice(self.sampler.batches(self.step_size), 1))):
            pass  # The epoch is over, and this call has moved the sampler to the next one.
        rows = [self.examples[row] for row in step[0]]
        parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        return [self._make_batch(part) for part in parts]

    def _make_batch(self, examples: Sequence[data.Example]) -> train.MicroBatch:
        origins = tuple(example.origin for example in examples)
        batch = train.MicroBatch(**data.collate(examples, pad_token_id=self.pad_token_id), origins=origins)
        if not any(example.images for example in examples):
            return batch
        assert self.images is not None, "prompts with images have a processor"
        files = [list(map(data.ImageFile.parse, example.images)) for example in examples]
        return replace(batch, images=self.images.model_inputs(files, batch.input_ids))

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def _make_demonstration(prompt: data.Prompt, render: RowRenderer, max_length: int) -> data.Example:
    row = Row(prompt.origin, {"prompt": prompt.prompt, **prompt.columns})
    if "completion" not in row.columns and "messages" not in row.columns:
        raise DataError(
            "'sft_steps' trains on the answers in the rows, but this row has none",
            where=prompt.origin,
            fix="give the rows a column 'completion', or delete sft_steps",
        )
    row_type = "prompt_completion" if "completion" in row.columns else detect_type(row)
    content = normalise_row(row, row_type)
    if isinstance(content, Conversation):
        paths = [Path(data.ImageFile.parse(image).path) for image in prompt.images]
        content = replace(content, images=tuple(ImageCell(str(path), path) for path in paths))
    if render.drops_empty_row(content, row.origin):
        raise DataError("'sft_steps' trains on answers, but the answer in this row is empty", where=row.origin)
    rendered = render(content, row.origin)
    if len(rendered.input_ids) > max_length:
        raise DataError(
            f"the row has {len(rendered.input_ids):,} tokens with its answer, more than max_prompt_length + "
            f"max_completion_length = {max_length:,}",
            where=prompt.origin,
            fix="raise max_completion_length",
        )
    ids, labels = np.array(rendered.input_ids, dtype=np.int32), np.array(rendered.labels, dtype=np.int32)
    return data.Example(ids, labels, prompt.origin, images=prompt.images)
