"""The contract of a tracker, and the names under which values reach all of them.

    start -> (log | text | note)* -> picture* -> close

Every method is called in one thread, in order. Any error that one raises drops the tracker for the rest of the run.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from streamtune.train.progress import RunFacts

PROJECT = "streamtune"


@dataclass
class Tracker(ABC):
    """One run at one tracker.

    Args:
        facts: The run.
        ids: What :meth:`start` returned when the run was started; empty the first time.
        offline: Write local files only.
    """

    facts: RunFacts
    ids: Mapping[str, Any]
    offline: bool

    name: ClassVar[str] = ""
    """As in ``report_to``."""

    @property
    def resumed(self) -> bool:
        """True if the tracker has this run already."""
        return bool(self.ids)

    @property
    def folder(self) -> Path:
        """The folder of local files in the run directory."""
        return self.facts.directory / self.name

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """Open the run, or go on with it, and log recipe, versions and plan; return the ids to keep."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step or of an evaluation."""

    @abstractmethod
    def text(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Log what the model wrote."""

    @abstractmethod
    def picture(self, step: int, path: Path) -> None:
        """Log a PNG."""

    def note(self, name: str, details: Mapping[str, Any]) -> None:  # noqa: B027 (not every tracker has a place for it)
        """Log an event."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Write everything and end the run as ``finished``, ``stopped`` or ``failed``."""


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl`` by the same names, without its step."""
    return {name: float(value) for name, value in record.items() if name != "step" and isinstance(value, (int, float))}


def facts_of(facts: RunFacts) -> dict[str, Any]:
    """Return what a tracker logs once: recipe, versions, plan."""
    more = {"run": facts.run, "total_steps": facts.total_steps}
    return {"recipe": dict(facts.recipe), "versions": dict(facts.versions), "plan": dict(facts.plan), **more}


def flatten(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted names; a list is one leaf."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def project_name(*variables: str) -> str:
    """Return the project that runs are filed under: that of the first variable that is set, or ``streamtune``."""
    return next((os.environ[name] for name in variables if os.environ.get(name)), PROJECT)
