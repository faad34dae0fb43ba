"""The exceptions that StreamTune raises, as one class tree.

    StreamTuneError               what went wrong, where, and how to fix it
    ├── UserError                 exit code 2: the input is wrong
    │   ├── RecipeError           a recipe key, value or file
    │   ├── DataError             a dataset file or row
    │   ├── ArgumentError         a command-line or Python argument
    │   ├── UnsupportedModelError a model that cannot be streamed exactly, or lacks what a setting needs
    │   └── VersionError          a library version that lacks a name that StreamTune needs
    └── RunError                  exit code 1: the run started and failed
        ├── OutOfMemoryError      device or host memory ran out
        ├── StorageError          a file of layer inputs, prepared rows or teacher tokens is unusable
        ├── CheckpointError       a checkpoint cannot be written or read
        ├── DistributedError      a rank (process) exited, hangs, or cannot be reached
        └── NonFiniteError        a loss or gradient is NaN or infinite

This module imports only the standard library.
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
    """Base class of all exceptions of StreamTune: what happened, where, and how to fix it.

    Args:
        what: Sentence about what is wrong.
        where: ``file:line``, row, key or module; may be empty.
        fix: Advice to the user; may be empty. In JSON output its key is ``mend``.

    Example:
        >>> error = RecipeError("unknown key 'chunksize'", where="recipe.yaml:7", fix="did you mean 'chunk_size'?")
        >>> error.exit_code, error.fix
        (2, "did you mean 'chunk_size'?")
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
    """Base class of errors in the user's input. The command exits with code 2."""

    exit_code = 2


class RecipeError(UserError):
    """A recipe file, key or value is wrong."""


class DataError(UserError):
    """A dataset file or one of its rows is wrong."""


class ArgumentError(UserError):
    """A command-line or Python argument is wrong."""


class UnsupportedModelError(UserError):
    """The model cannot be streamed with an exact gradient, or does not work with a setting of the run."""


class VersionError(UserError):
    """The installed version of a library lacks a function or class that StreamTune needs."""


class RunError(StreamTuneError):
    """Base class of errors that end a run after its start. The command exits with code 1."""


class OutOfMemoryError(RunError):
    """Device or host memory ran out during a step."""


class StorageError(RunError):
    """A file of offloaded layer inputs, tokenized rows, their images or a teacher's top-k tokens is not usable."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or an existing checkpoint is damaged or does not belong to the run."""


class DistributedError(RunError):
    """A rank (one process of the run) exited, hangs, cannot be reached, or sent an invalid message."""


class NonFiniteError(RunError):
    """A loss or a gradient is NaN or infinite."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the most similar known name, or an empty string.

    Case is ignored. If several names are equally similar, a name with the same first letter is preferred.

    Example:
        >>> did_you_mean("chunksize", ["chunk_size", "head_chunk_size"])
        "did you mean 'chunk_size'?"
    """
    names = {each.casefold(): each for each in known}
    folded = name.casefold()
    nearest = get_close_matches(folded, names, n=len(names), cutoff=0.6) if names else []
    tied = [each for each in nearest if _similarity(each, folded) == _similarity(nearest[0], folded)]
    found = next((each for each in tied if each[:1] == folded[:1]), nearest[0] if nearest else None)
    return f"did you mean '{names[found]}'?" if found else ""


def _similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
