"""The optimizer steps of a grpo run: prompts are drawn, completed and scored, and become micro-batches.

    next_step()   supervised, while sft_steps last;
                  else the next part of the current rollout, and a new rollout where that is used up

    a rollout     prompts -> completions -> rewards -> advantages -> old and reference log-probs
                  in steps_per_rollout parts, gone through num_iterations times

A rollout from which nothing is to be learnt is counted and drawn anew. Everything is in :meth:`GrpoSteps.state_dict`,
the completions of the current rollout with their log-probs included, so that a run can be resumed in the middle of its
inner epochs.

The supervised steps before the first rollout: on the rows of the training prompts, with their own answers.

A policy learns from completions that are better than others, so some of them must be good: a model that never solves a
task cannot learn it from rewards. Held-out prompts are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from streamtune import data, train
from streamtune.errors import CheckpointError, OutOfMemoryError, RunError
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.tasks import rewards, rollout
from streamtune.tasks.grpo.groups import (
    BatchLayout,
    Group,
    ScoreCompletions,
    any_gradient,
    group_metrics,
    micro_batches,
    passing_completion,
    remember_logprobs,
)
from streamtune.tasks.grpo.objective import MeasuredBatch, PolicyBatch
from streamtune.tasks.grpo.ranks import SharedLogprobs
from streamtune.tasks.objectives import POLICY_LOSSES, group_advantages, reward_with_kl
from streamtune.tasks.steps import share_out
from streamtune.tasks.task import chat_options
from streamtune.train.objective import autocast
from streamtune.train.records import append_records, cut_rotated, rotate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from itertools import accumulate, islice
from typing import TYPE_CHECKING

import numpy as np

from streamtune.data.reading.readers import Row
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import detect_type, normalise
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNSEEN = 0.5
"""Pass rate of a prompt that was not asked yet."""

T = TypeVar("T")

OF_GROUPS = ("reward_std", "frac_reward_zero_std")
"""Metrics of several completions of a prompt, which one completion does not have."""


@dataclass
class _Rollout:
    """The groups of completions that the next steps train on."""

    groups: list[Group]
    next_part: int = 0
    """Parts handed out so far, those without a gradient included; over all iterations."""
    skipped: int = 0
    """Rollouts that were drawn before it and taught nothing."""


class GrpoSteps:
    """The :class:`streamtune.train.StepStream` of a grpo run; see the module.

    Args:
        recipe: The recipe, with the micro-batches of all ranks together.
        prompts: The prompts to train on, and the held-out ones.
        writer: Completes prompts.
        score: Scores completions.
        policy: The current policy.
        reference: The reference; None where the loss has no KL.
        layout: The layout of micro-batches.
        gradient: Computes the gradient norm of a completion; None where all prompts have as many completions.
        warm: The supervised steps before; None where there are none.
        log: Writes samples of the completions.
        device: The device of the policy and the reference.
        world: The ranks; each calls this with the same arguments and gets its share of every step.
        activity: Called with what is being done.
    """

    def __init__(
        self,
        recipe: GrpoRecipe,
        prompts: data.PreparedPrompts,
        *,
        writer: rollout.Writer,
        score: ScoreCompletions,
        policy: train.Reference,
        reference: train.Reference | None,
        layout: BatchLayout,
        warm: train.StepStream | None,
        log: CompletionLog,
        device: torch.device,
        gradient: Callable[[train.TreeBatch], float] | None = None,
        world: train.World = train.World(),  # noqa: B008 (frozen)
        activity: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.prompts = recipe, prompts
        self.writer, self.score, self.policy, self.reference = writer, score, policy, reference
        self.world, self.shared = world, SharedLogprobs(world)
        self.layout, self.warm, self.log, self.activity, self.device = layout, warm, log, activity, device
        self.gradient, self.norms = gradient, rollout.GradientNorms()
        self.picker = rollout.PromptPicker(
            len(prompts.train), choice=recipe.prompts, seed=recipe.seed, counts=gradient is not None
        )
        self.kl_in_reward = recipe.beta > 0 and POLICY_LOSSES[recipe.loss_type].kl_in_reward
        self.why_flat = (
            "all completions were cut off, and mask_truncated_completions leaves them out"
            if recipe.distils
            else "all completions of a prompt have the same reward"
        )
        self.taken = 0
        """Steps handed out."""
        self.on_first_rollout: Callable[[], None] = lambda: None
        """Called when supervised steps are over."""
        self.current: _Rollout | None = None
        self.sampling = rollout.Sampling(
            max_completion_length=recipe.max_completion_length,
            temperature=recipe.temperature,
            top_p=recipe.top_p,
            top_k=recipe.top_k,
            min_p=recipe.min_p,
            repetition_penalty=recipe.repetition_penalty,
        )

    # --- steps -------------------------------------------------------------------------------------------------

    def next_step(self) -> Sequence[train.MicroBatch]:
        """See :class:`streamtune.train.StepStream`. The step is empty if writing was stopped early: the run is to stop.

        Raises:
            RunError: Nothing could be learnt from ``skip_limit`` rollouts in a row.
        """
        try:
            return list(share_out(self._next_step(), self.world))
        except rollout.WritingStopped:
            return []

    def _next_step(self) -> Sequence[train.MicroBatch]:
        if self.warm is not None and self.taken < self.recipe.sft_steps:
            self.taken += 1
            return self.warm.next_step()
        if self.warm is not None and self.taken == self.recipe.sft_steps:
            self.on_first_rollout()
        parts, iterations = self.recipe.steps_per_rollout, self.recipe.num_iterations
        while True:
            if self.current is None or self.current.next_part == parts * iterations:
                self.current = self._next_rollout()
            part, first = self.current.next_part % parts, self.current.next_part == 0
            self.current.next_part += 1
            batches = micro_batches(self._part(self.current.groups, part), self.prompts.train, self.layout)
            if batches:  # else no completion of this part has a gradient
                self.taken += 1
                if first and self.current.skipped:
                    more = {**batches[0].metrics, "skipped_batches": (float(self.current.skipped), 1.0)}
                    batches[0] = replace(batches[0], metrics=more)
                return batches

    def held_out(self, part: data.EvalSet | None = None) -> Iterator[train.MicroBatch]:
        """Measure the likeliest completion of each held-out prompt, or of those of a set, a batch at a time.

        With a teacher they are micro-batches, whose divergence is the held-out loss.
        """
        prompts, size = self.prompts.validation, self.recipe.prompts_per_generation * self.recipe.num_generations
        first, stop = (0, len(prompts)) if part is None else (part.start, part.stop)
        for start in range(first, stop, size):
            asked = [prompts[index] for index in range(start, min(start + size, stop))]
            written = self._greedy(asked)
            self.activity("scoring held-out completions")
            scores = self.score(asked, [completion.token_ids for completion in written])
            self.activity("evaluating")
            if self.recipe.distils:
                yield from self._held_out_completions(range(start, start + len(asked)), written, scores)
                continue
            whole = Group(
                prompt=-1,
                completions=[completion.token_ids for completion in written],
                truncated=[completion.truncated for completion in written],
                rewards=scores.total,
                scores=scores.by_function,
            )
            metrics = {name: value for name, value in group_metrics([whole]).items() if name not in OF_GROUPS}
            nothing = torch.zeros(1, 1, dtype=torch.int64)
            yield MeasuredBatch(nothing, nothing, nothing, tuple(prompt.origin for prompt in asked), metrics=metrics)

    def _held_out_completions(
        self, numbers: range, written: Sequence[rollout.Completion], scores: rewards.RewardScores
    ) -> Iterator[PolicyBatch]:
        """Return the micro-batches of a completion of each of some held-out prompts, with their metrics."""
        groups = [
            Group(
                prompt=number,
                completions=[completion.token_ids],
                truncated=[completion.truncated],
                rewards=[scores.total[place]],
                scores={name: [values[place]] for name, values in scores.by_function.items()},
                advantages=[0.0],
            )
            for place, (number, completion) in enumerate(zip(numbers, written, strict=True))
        ]
        layout = replace(self.layout, mask_truncated=False)
        for batch in micro_batches(groups, self.prompts.validation, layout):
            metrics = {name: value for name, value in batch.metrics.items() if name not in OF_GROUPS}
            yield replace(batch, metrics=metrics)

    def _part(self, groups: list[T], part: int) -> list[T]:
        """Return the groups, or what is of each, of one of the optimizer steps that go through a rollout."""
        parts = self.recipe.steps_per_rollout
        return groups[len(groups) * part // parts : len(groups) * (part + 1) // parts]

    # --- a rollout ---------------------------------------------------------------------------------------------

    def _next_rollout(self) -> _Rollout:
        for skipped in range(self.recipe.skip_limit):
            groups = self._write_and_score()
            if any(any_gradient(part, self.layout) for part in self._parts(groups)):
                self._remember_logprobs(groups)
                return _Rollout(groups, skipped=skipped)
            self.log.skipped(self.taken + 1, self.why_flat)
        raise RunError(
            f"{self.recipe.skip_limit} batches in a row taught nothing: in every one of them {self.why_flat}",
            mend="raise max_completion_length, or delete mask_truncated_completions"
            if self.recipe.distils
            else "look at completions.jsonl: is the task far too hard or too easy, or does a reward say the same of "
            "everything? More num_generations, another temperature, easier prompts or sft_steps help; skip_limit says "
            "how long to try",
        )

    def _parts(self, groups: list[T]) -> list[list[T]]:
        return [self._part(groups, part) for part in range(self.recipe.steps_per_rollout)]

    def _write_and_score(self) -> list[Group]:
        """Write and score completions of the next prompts; return their groups, with advantages."""
        recipe = self.recipe
        numbers = self.picker.next(recipe.prompts_per_generation)
        prompts = [self.prompts.train[number] for number in numbers]
        counts = self._counts(numbers)
        self.activity(f"writing {sum(counts)} completions")
        written = self._write(prompts, counts[0] if len(set(counts)) == 1 else counts, self.sampling)
        self.activity("scoring completions")
        asked = [prompt for prompt, own in zip(prompts, written, strict=True) for _ in own]
        scores = self.score(asked, [completion.token_ids for group in written for completion in group])
        self.activity("advantages")
        groups = []
        for number, completions, own in zip(numbers, written, _slices(counts), strict=True):
            groups.append(
                Group(
                    prompt=number,
                    completions=[completion.token_ids for completion in completions],
                    truncated=[completion.truncated for completion in completions],
                    rewards=scores.total[own],
                    scores={name: values[own] for name, values in scores.by_function.items()},
                )
            )
            passed = sum(reward is not None and reward >= recipe.pass_reward for reward in scores.total[own])
            self.picker.observe(number, passed=passed, tried=len(completions))
        self._set_advantages(groups, prompts)
        self._observe_gradients(groups)
        self.log.wrote(self.taken + 1, groups, prompts)
        return groups

    def _counts(self, numbers: Sequence[int]) -> list[int]:
        """Return the completions of each prompt. Those of an optimizer step are as many together as if all were equal.

        Args:
            numbers: Of the prompts.
        """
        equal = self.recipe.num_generations
        if self.gradient is None:
            return [equal] * len(numbers)
        counts = []
        for part in self._parts(list(numbers)):
            rates = [self.picker.rates.passed(number) for number in part]
            scores = [
                rollout.variance_score(
                    UNSEEN if rate is None else rate, self.norms.norm(number), self.recipe.allocation
                )
                for rate, number in zip(rates, part, strict=True)
            ]
            counts += rollout.allocate(scores, equal * len(part))
        return counts

    def _observe_gradients(self, groups: list[Group]) -> None:
        """Measure the gradient norm of a completion of each prompt that has one which passed, for later rollouts."""
        if self.gradient is None:
            return
        found = [passing_completion(g, self.recipe.pass_reward, self.prompts.train, self.layout) for g in groups]
        passed = [(group, batch) for group, batch in zip(groups, found, strict=True) if batch is not None]
        if not passed:
            return
        self.activity("gradient norms")
        norm = self.gradient
        norms = self.shared(lambda batch: [norm(batch)], len(passed), lambda number: passed[number][1])
        for (group, _), (value,) in zip(passed, norms, strict=True):
            self.norms.observe(group.prompt, value)

    def _set_advantages(self, groups: list[Group], prompts: Sequence[data.Prompt]) -> None:
        recipe, counts = self.recipe, [len(group.completions) for group in groups]
        rewards_N = _numbers([reward for group in groups for reward in group.rewards])
        group_N = torch.arange(len(groups)).repeat_interleave(torch.tensor(counts))
        if recipe.distils:  # nothing is made of the rewards: their spread is shown
            found = group_advantages("dr_grpo", rewards_N, group_N)
            for group, own in zip(groups, _slices(counts), strict=True):
                group.advantages = [0.0] * len(group.completions)
                group.flat, group.std = bool(found.flat_N[own][0]), float(found.std_N[own][0])
            return
        if self.kl_in_reward:
            rewards_N = self._less_kl(groups, rewards_N)
        greedy_N = None
        if recipe.loss_type == "remax":
            written = self._greedy(prompts)
            scores = self.score(prompts, [completion.token_ids for completion in written])
            greedy_N = _numbers(scores.total).repeat_interleave(torch.tensor(counts))
        found = group_advantages(
            recipe.loss_type, rewards_N, group_N, scale_rewards=recipe.scale_rewards, greedy_N=greedy_N
        )
        for group, own in zip(groups, _slices(counts), strict=True):
            values_n = found.values_N[own]
            if self.gradient is not None:  # every prompt counts the same, however many completions it has
                values_n = values_n * (recipe.num_generations / len(group.completions))
            group.advantages = values_n.tolist()
            group.flat = bool(found.flat_N[own].all())
            group.std = float(found.std_N[own][0])

    def _less_kl(self, groups: list[Group], rewards_N: Tensor) -> Tensor:
        """Return the rewards less the KL of the whole completion, for losses that have it there."""
        for group in groups:
            group.advantages = [1.0] * len(group.completions)  # none is left out: its KL counts
        self._remember_logprobs(groups)
        old_K, ref_K = (
            torch.tensor([value for group in groups for row in rows(group) for value in row])
            for rows in (lambda group: group.old, lambda group: group.ref)
        )
        lengths = torch.tensor([len(row) for group in groups for row in group.old or []])
        row_K = torch.arange(len(lengths)).repeat_interleave(lengths)
        return reward_with_kl(rewards_N, old_K, ref_K, row_K, beta=self.recipe.beta)[0]

    def _remember_logprobs(self, groups: list[Group]) -> None:
        """Put the log-probs that the loss reads into the groups: those of the current policy, and the reference's."""
        wanted: dict[str, train.Reference | None] = {
            "old": self.policy if self.recipe.needs_old_logprobs or self.kl_in_reward else None,
            "ref": self.reference,
        }
        for name, model in wanted.items():
            if model is None or all(getattr(group, name) is not None for group in groups):
                continue
            self.activity(f"{'reference' if name == 'ref' else 'old'} log-probs")
            for part in self._parts(groups):
                asked = partial(self.shared, partial(self._logprobs, model))
                remember_logprobs(name, asked, part, self.prompts.train, self.layout)

    def _logprobs(self, model: train.Reference, batch: train.TreeBatch) -> list[float]:
        with autocast(self.device, bool(self.recipe.bf16)):
            found: list[float] = model.logprobs(batch.to(self.device)).tolist()
        return found

    def _greedy(self, prompts: Sequence[data.Prompt]) -> list[rollout.Completion]:
        """Return the likeliest completion of each prompt."""
        likeliest = replace(self.sampling, temperature=0.0)
        return [group[0] for group in self._write(prompts, 1, likeliest)]

    def _write(
        self, prompts: Sequence[data.Prompt], count: int | Sequence[int], sampling: rollout.Sampling
    ) -> list[list[rollout.Completion]]:
        """Return ``count`` completions of each prompt, or as many as it says of each.

        Raises:
            OutOfMemoryError: Their keys and values do not fit.
        """
        try:
            return self.writer.write([prompt.input_ids for prompt in prompts], count, sampling)
        except (RuntimeError, MemoryError) as error:
            if not train.is_out_of_memory(error):
                raise
            longest = max(len(prompt.input_ids) for prompt in prompts) + sampling.max_completion_length
            recipe = self.recipe
            at_once = recipe.per_device_generation_batch_size or recipe.per_device_train_batch_size
            raise OutOfMemoryError(
                f"out of memory while writing completions, {at_once} at a time of up to {longest:,} tokens",
                where="per_device_generation_batch_size",
                mend="lower per_device_generation_batch_size, or max_completion_length",
            ) from error

    # --- where it stands ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, as plain JSON values: the current rollout is among them."""
        current = self.current
        rollout_state = None
        if current is not None:
            groups = [group.to_json() for group in current.groups]
            rollout_state = {"groups": groups, "next_part": current.next_part, "skipped": current.skipped}
        return {
            "taken": self.taken,
            "picker": self.picker.state_dict(),
            **({} if self.gradient is None else {"norms": self.norms.state_dict()}),
            "rollout": rollout_state,
            "warm": None if self.warm is None else self.warm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of another stream over the same prompts.

        Raises:
            CheckpointError: The number of steps is no count.
        """
        if type(state["taken"]) is not int or state["taken"] < 0:
            raise CheckpointError(f"the checkpoint has taken {state['taken']} steps", mend="use another checkpoint")
        self.taken = state["taken"]
        self.picker.load_state_dict(state["picker"])
        self.norms.load_state_dict(state.get("norms", {}))
        current = state["rollout"]
        self.current = None
        if current is not None:
            groups = [Group(**group) for group in current["groups"]]
            self.current = _Rollout(groups, int(current["next_part"]), int(current["skipped"]))
        if self.warm is not None:
            self.warm.load_state_dict(state["warm"])


def _slices(counts: Sequence[int]) -> list[slice]:
    """Return the places of each group's completions among those of all."""
    stops = list(accumulate(counts))
    return [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _numbers(values: Sequence[float | None]) -> Tensor:
    """Return the values in fp32, NaN where there is none."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)


@dataclass(frozen=True)
class CompletionLog:
    """Writes a few completions of each rollout, with what they were given for."""

    run: train.RunDirectory
    tokenizer: PreTrainedTokenizerBase
    count: int
    """Completions of a rollout to keep."""
    writes: bool = True
    """Whether this rank writes files."""

    @property
    def path(self) -> Path:
        """One JSON object a line."""
        return self.run.path / "completions.jsonl"

    def wrote(self, step: int, groups: Sequence[Group], prompts: Sequence[data.Prompt]) -> None:
        """Keep some completions of a rollout that is for ``step``: one of each prompt before a second of any."""
        if not self.writes:
            return
        most = max(len(group.completions) for group in groups)
        rows = [(place, index) for index in range(most) for place in range(len(groups))]
        there = [(place, index) for place, index in rows if index < len(groups[place].completions)]
        rotate(self.path)
        kept = there[: self.count]
        append_records(self.path, [self._record(step, groups[place], prompts[place], index) for place, index in kept])

    def skipped(self, step: int, why: str) -> None:
        """Note that a rollout taught nothing and is drawn anew."""
        if self.writes:
            train.append_event(self.run.events, "skip", step=step, why=why)

    def cut(self, step: int) -> None:
        """Forget what was kept after ``step``: those steps are taken again."""
        if self.writes:
            cut_rotated(self.path, step)

    def _record(self, step: int, group: Group, prompt: data.Prompt, index: int) -> dict[str, Any]:
        return {
            "step": step,
            "prompt": self.tokenizer.decode(prompt.input_ids),
            "completion": self.tokenizer.decode(group.completions[index]),
            "reward": group.rewards[index],
            "rewards": {name: values[index] for name, values in group.scores.items()},
            "advantage": group.advantages[index],
            "truncated": group.truncated[index],
            "origin": prompt.origin,
        }


class WarmSteps:
    """Shuffled demonstrations, ``sft_batch_size`` to a step, in micro-batches. A :class:`streamtune.train.StepStream`.

    Raises:
        DataError: A row has no answer, or is longer than a prompt and its completion may be.
    """

    def __init__(self, recipe: GrpoRecipe, prompts: Sequence[data.Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
        render = RowRenderer(tokenizer, train_on="completion", notify=lambda text: None, chat=chat_options(recipe))
        self.examples = [_demonstration(prompt, render, recipe.max_length) for prompt in prompts]
        render.log.finish()
        self.pad_token_id = tokenizer.pad_token_id
        self.step_size, self.batch_size = recipe.sft_batch_size, recipe.per_device_train_batch_size
        self.sampler = data.ResumableSampler(len(self.examples), seed=recipe.seed, shuffle=recipe.shuffle)

    def next_step(self) -> Sequence[train.MicroBatch]:
        """Return the micro-batches of the next demonstrations; fewer at the end of an epoch."""
        while not (step := list(islice(self.sampler.batches(self.step_size), 1))):
            pass  # The epoch was over; asking has moved the sampler on to the next one.
        rows = [self.examples[row] for row in step[0]]
        parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        return [self._batch(part) for part in parts]

    def _batch(self, examples: Sequence[data.Example]) -> train.MicroBatch:
        batch = data.collate(examples, pad_token_id=self.pad_token_id)
        return train.MicroBatch(**batch, origins=tuple(example.origin for example in examples))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of another stream over the same prompts."""
        self.sampler.load_state_dict(state)


def _demonstration(prompt: data.Prompt, render: RowRenderer, max_length: int) -> data.Example:
    """Return the row of a prompt as an example of supervised training."""
    row = Row(prompt.origin, {"prompt": prompt.prompt, **prompt.columns})
    if "completion" not in row.columns and "messages" not in row.columns:
        raise DataError(
            "'sft_steps' trains on the rows' own answers, and this row has none",
            where=prompt.origin,
            mend="give the rows a column 'completion', or delete sft_steps",
        )
    row_type = "prompt_completion" if "completion" in row.columns else detect_type(row)
    content = normalise(row, row_type)
    if render.leaves_out(content, row.origin):
        raise DataError("'sft_steps' trains on the rows' own answers, and this one is empty", where=row.origin)
    rendered = render(content, row.origin)
    if len(rendered.input_ids) > max_length:
        raise DataError(
            f"the row has {len(rendered.input_ids):,} tokens with its answer, more than max_prompt_length and "
            f"max_completion_length together: {max_length:,}",
            where=prompt.origin,
            mend="raise max_completion_length",
        )
    ids, labels = np.array(rendered.input_ids, dtype=np.int32), np.array(rendered.labels, dtype=np.int32)
    return data.Example(ids, labels, prompt.origin)
