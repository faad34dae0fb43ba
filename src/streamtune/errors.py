"""Every error a user can meet, one tree.

    StreamTuneError               what went wrong, where, how to fix it
    ├── UserError                 exit 2: the input is wrong, nothing was trained
    │   ├── RecipeError           a recipe key, value or file
    │   ├── DataError             a dataset file or row
    │   ├── ArgumentError         a command-line or Python argument
    │   ├── UnsupportedModelError a model the engine cannot stream exactly
    │   └── VersionError          a library of a version that has not what the engine computes with
    └── RunError                  exit 1: it ran and failed
        ├── OutOfMemoryError      device or host memory ran out
        ├── StorageError          a file of layer inputs or prepared rows cannot be written or read
        ├── CheckpointError       a checkpoint cannot be written or read
        ├── DistributedError      a rank is gone, hangs, cannot be reached or is not like the others
        └── NonFiniteError        a loss or gradient is NaN or Inf

Nothing of the project and nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "DataError",
    "DistributedError",
    "NonFiniteError",
    "OutOfMemoryError",
    "RecipeError",
    "RunError",
    "StorageError",
    "StreamTuneError",
    "UnsupportedModelError",
    "UserError",
    "VersionError",
    "did_you_mean",
]


class StreamTuneError(Exception):
    """An error with what happened, where it happened and how to fix it.

    Args:
        what: One sentence that says what is wrong.
        where: ``file:line``, a row, a key or a module; may be empty.
        fix: Advice that solves it; empty where nothing helps. JSON documents call it ``mend``.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"at {self.where}")
        if self.fix:
            parts.append(self.fix)
        return "\n".join(parts)


class UserError(StreamTuneError):
    """The input is wrong: nothing was trained, nothing was lost."""

    exit_code = 2


class RecipeError(UserError):
    """A recipe file, key or value is wrong."""


class DataError(UserError):
    """A dataset file or one of its rows is wrong."""


class ArgumentError(UserError):
    """A command-line or Python argument is wrong."""


class UnsupportedModelError(UserError):
    """The engine cannot stream this model exactly, so it does not train it."""


class VersionError(UserError):
    """An installed library is of a version that does not have what the engine computes with."""


class RunError(StreamTuneError):
    """The run started and failed."""


class OutOfMemoryError(RunError):
    """Device or host memory ran out during a step."""


class StorageError(RunError):
    """The file that holds layer inputs, prepared rows or likeliest tokens cannot be written or read."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or the one found cannot be trusted."""


class DistributedError(RunError):
    """A rank is gone, hangs, cannot be reached or is not like the others."""


class NonFiniteError(RunError):
    """A loss or a gradient is NaN or infinite."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the nearest known name, or an empty string.

    Among equally near names a name with the same first letter is preferred.
    """
    names = list(known)
    nearest = get_close_matches(name, names, n=len(names), cutoff=0.6) if names else []
    alike = [each for each in nearest if _likeness(each, name) == _likeness(nearest[0], name)]
    found = next((each for each in alike if each[:1] == name[:1]), nearest[0] if nearest else None)
    return f"did you mean '{found}'?" if found else ""


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
