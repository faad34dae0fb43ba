"""Objects that are told how a run goes on: experiment trackers, and callbacks of the user's own.

    started -> (step | evaluated | sampled | saved | event)* -> finished

Rank 0 alone calls them, in its training thread. Whatever they get is a copy: nothing that they do to it reaches the
run. A listener that raises ends the run cleanly: the loop saves a checkpoint at the next boundary between steps and
leaves, and the error is raised then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFacts:
    """Everything about a run that is known before its first step; secrets are removed from its texts."""

    run: str
    """An id, the same for a run and its resumptions."""
    name: str
    """The name of its directory."""
    directory: Path
    step: int
    """Steps taken before: 0, or those of the checkpoint that it goes on from."""
    total_steps: int
    recipe: Mapping[str, Any]
    """Every key of the recipe."""
    versions: Mapping[str, str]
    plan: Mapping[str, Any]
    """The schedule; where it was planned also ``peak_bytes``, ``step_seconds`` and ``terms``, bytes by name."""


class Listener:
    """The contract of a listener; each method does nothing unless it is overridden."""

    def started(self, facts: RunFacts) -> None:
        """Take what is known before the first step, of a resumed run too."""

    def step(self, record: dict[str, Any]) -> None:
        """Take the line of ``metrics.jsonl`` of a step that is done."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """Take the line of ``metrics.jsonl`` of an evaluation: ``step``, ``eval_loss`` and other metrics."""

    def sampled(self, samples: list[dict[str, Any]]) -> None:
        """Take lines of ``samples.jsonl``: ``step``, ``prompt``, ``completion``."""

    def saved(self, step: int, path: Path) -> None:
        """Take the step and folder of a checkpoint that is whole and on disk."""

    def event(self, name: str, details: dict[str, Any]) -> None:
        """Take ``resume``, ``finish``, ``stop`` or ``failure``, as ``events.jsonl`` has them."""

    def finished(self, outcome: dict[str, Any]) -> None:
        """Take the outcome at the end, however it came.

        Args:
            outcome: ``status`` (``finished``, ``stopped`` or ``failed``), ``step``, ``error`` of a run that failed.
        """


@dataclass
class Listeners(Listener):
    """Passes everything on to several listeners, with a copy for each, until one of them raises.

    Args:
        each: The listeners; those of rank 0, and none on other ranks.
    """

    each: Sequence[Listener] = ()
    error: Exception | None = field(default=None, init=False)
    """What a listener raised; that listener is not called any more."""
    _failed: Listener | None = field(default=None, init=False)

    def started(self, facts: RunFacts) -> None:
        """See :class:`Listener`."""
        self._tell(lambda one: one.started(copy.deepcopy(facts)))

    def step(self, record: dict[str, Any]) -> None:
        """See :class:`Listener`."""
        self._tell(lambda one: one.step(copy.deepcopy(record)))

    def evaluated(self, record: dict[str, Any]) -> None:
        """See :class:`Listener`."""
        self._tell(lambda one: one.evaluated(copy.deepcopy(record)))

    def sampled(self, samples: list[dict[str, Any]]) -> None:
        """See :class:`Listener`."""
        self._tell(lambda one: one.sampled(copy.deepcopy(samples)))

    def saved(self, step: int, path: Path) -> None:
        """See :class:`Listener`."""
        self._tell(lambda one: one.saved(step, path))

    def event(self, name: str, details: dict[str, Any]) -> None:
        """See :class:`Listener`."""
        self._tell(lambda one: one.event(name, copy.deepcopy(details)))

    def finished(self, outcome: dict[str, Any]) -> None:
        """See :class:`Listener`. All of them are called, whichever raises."""
        self._tell(lambda one: one.finished(copy.deepcopy(outcome)))

    def raise_error(self) -> None:
        """Raise what a listener raised, if one did."""
        if self.error is not None:
            raise self.error

    def _tell(self, call: Callable[[Listener], None]) -> None:
        for one in self.each:
            if one is self._failed:
                continue
            if self.error is not None:  # the first error is the one that is shown
                with suppress(Exception):
                    call(one)
                continue
            try:
                call(one)
            except Exception as error:
                self.error, self._failed = error, one
