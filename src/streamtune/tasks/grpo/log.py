"""Samples of what a policy wrote, for the eyes: ``completions.jsonl`` beside the metrics of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtune import data, train
from streamtune.tasks.grpo.groups import Group
from streamtune.train.records import append_record, cut_after_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CompletionLog"]


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
        rows = [(place, index) for index in range(len(groups[0].completions)) for place in range(len(groups))]
        for place, index in rows[: self.count]:
            append_record(self.path, self._record(step, groups[place], prompts[place], index))

    def skipped(self, step: int) -> None:
        """Note that a rollout taught nothing and is drawn anew."""
        if self.writes:
            train.append_event(
                self.run.events, "skip", step=step, why="all completions of a prompt have the same reward"
            )

    def cut(self, step: int) -> None:
        """Forget what was kept after ``step``: those steps are taken again."""
        if self.writes:
            cut_after_step(self.path, step)

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
