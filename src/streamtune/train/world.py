"""The ranks that train one model together, and the few values they exchange besides gradients.

W ranks are laid out as DP x SP: ``sequence_size`` consecutive ranks share a sequence; each such group is one *data
rank* and has rows of its own. Data ranks count targets and losses, so a sum over ranks is divided by ``sequence_size``.

Values are a few numbers sent through the CPU; one rank sends nothing. They are sent as JSON and decoded exactly, and no
byte from another rank is ever run:

    None, true, 3, 0.1, "text", [...]     as they are
    {"d": {"key": value}}                 a dict whose keys are strings
    {"m": [[key, value], ...]}            any other dict
    {"t": [...]}  {"s": [...]}            a tuple, a set
    {"b": "base64"}  {"p": "path"}        bytes, a path
    {"f": "7ff0000000000000"}             a float that is not finite, by its bits
    {"i": "0x..."}                        an int of more than 64 bits

An error is sent as its class's name and its text, and is made anew from those (:func:`describe_error`).
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from streamtune import errors
from streamtune.errors import DistributedError, RunError, StreamTuneError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Rank of this process and size of its run; ``World()`` is a run of one.

    With several ranks the default process group must exist; it, or ``group``, carries CPU tensors.
    """

    rank: int = 0
    size: int = 1
    sequence_size: int = 1
    """Ranks that share each sequence."""
    group: distributed.ProcessGroup | None = None
    """Process group of the exchanges; None is the default group."""

    def apart(self) -> World:
        """Return the same ranks over a group of their own, for use in another thread. Called by all ranks."""
        return replace(self, group=distributed.new_group(backend="gloo")) if self.size > 1 else self

    @property
    def is_main(self) -> bool:
        """True on the rank that writes the files and talks to the user."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The data-parallel rank. Ranks that share a sequence have the same one."""
        return self.rank // self.sequence_size

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.size // self.sequence_size

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over the data ranks."""
        if self.size == 1:
            return list(values)
        found = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(found, group=self.group)
        return [value / self.sequence_size for value in found.tolist()]

    def count(self, value: int) -> int:
        """Return a count summed over the data ranks."""
        return round(self.sums([value])[0])

    def any(self, flag: bool) -> bool:
        """Return True on all ranks if the flag is set on any of them."""
        return flag if self.size == 1 else self.sums([float(flag)])[0] > 0

    def gather(self, value: T) -> list[T]:
        """Return the value of each data rank, in their order; small plain values."""
        return [value] if self.size == 1 else self.collect(value)[:: self.sequence_size]

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, also of those that share a sequence; small plain values."""
        if self.size == 1:
            return [value]
        data, unsent = _encoded({"value": value})
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        size = torch.tensor([len(mine)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        distributed.all_gather(sizes, size, group=self.group)
        lengths = [_checked(int(length), rank) for rank, length in enumerate(sizes)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(found, padded, group=self.group)
        if unsent is not None:
            raise unsent
        return [_decoded(part[:length], rank) for rank, (part, length) in enumerate(zip(found, lengths, strict=True))]

    def together(self, work: Callable[[], T]) -> T:
        """Call ``work()`` on every rank; if it fails on one it fails on all of them.

        If one rank can fail alone within ``work``, no rank may wait for another there. A rank raises its own error; the
        others raise the error of the first rank that failed, which is named.
        """
        if self.size == 1:
            return work()
        result: T
        error: Exception | None = None
        try:
            result = work()
        except Exception as failed:
            error = failed
        outcomes = self.collect(None if error is None else describe_error(error))
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise remake_error(outcome, rank, named=True)
        return result

    def largest(self, value: int) -> int:
        return max(self.gather(value))

    def main(self, work: Callable[[], T]) -> T:
        """Call ``work()`` on rank 0 alone, and return its result on every rank: a plain value.

        A StreamTuneError of ``work`` is raised on every rank; other errors of rank 0 reach the others as a RunError.
        """
        if self.size == 1:
            return work()
        data, result = b"", None
        error: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as failed:
                error = failed
                data = encode_value({"error": describe_error(failed)})
            else:
                data, error = _encoded({"value": result})
        size = torch.tensor([len(data)])
        distributed.broadcast(size, src=0, group=self.group)
        sent = torch.empty(_checked(int(size), 0), dtype=torch.uint8)
        if self.is_main:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        distributed.broadcast(sent, src=0, group=self.group)
        if error is not None:
            raise error
        found: T = cast("T", result) if self.is_main else _decoded(sent, 0)
        return found

    def barrier(self) -> None:
        if self.size > 1:
            distributed.all_reduce(torch.zeros(1), group=self.group)


WORLD = World()
"""A run of one rank."""


def _encoded(document: dict[str, Any]) -> tuple[bytes, Exception | None]:
    """Encode a document for other ranks; if it cannot be sent, encode the error for them and return it as well."""
    try:
        data = encode_value(document)
        if len(data) <= MOST_BYTES:
            return data, None
        error: Exception = RunError(f"{len(data):,} bytes are more than the {MOST_BYTES:,} that ranks send at a time")
    except (TypeError, RecursionError) as failed:
        error = failed
    return encode_value({"error": describe_error(error)}), error


def _decoded(sent: Tensor, rank: int) -> Any:
    """Return the value that ``rank`` sent, or raise the error that it sent."""
    document = decode_value(sent.numpy().tobytes(), rank)
    if isinstance(document, dict) and "error" in document:
        raise remake_error(document["error"], rank, named=False)
    if not isinstance(document, dict) or "value" not in document:
        raise DistributedError(f"rank {rank} sent what is neither a value nor an error")
    return document["value"]


def _checked(size: int, rank: int) -> int:
    """Return the size that ``rank`` announced; DistributedError if no value has that size."""
    if not 0 < size <= MOST_BYTES:
        raise DistributedError(
            f"rank {rank} announced a value of {size} bytes",
            fix="see that every rank runs the same version, and that no other program uses the ports of this run",
        )
    return size


MOST_BYTES = 1 << 30
"""Largest size of one rank's value: more than any rollout, and less than would exhaust a machine's memory."""
SHORT_INT = 1 << 63


def encode_value(value: Any) -> bytes:
    """Write a value as bytes that :func:`decode_value` reads back the same.

    It may be None, bool, int, float, str, bytes, a path, and a list, tuple, set or dict of them; anything else is a
    TypeError. Subclasses are sent as the plain value.
    """
    return json.dumps(_pack(value), separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_value(data: bytes, rank: int) -> Any:
    """Read the value that :func:`encode_value` wrote on ``rank``; DistributedError for other bytes."""
    try:
        return _unpack(json.loads(data.decode("ascii"), parse_constant=_refuse))
    except (ValueError, TypeError, KeyError, RecursionError, struct.error):
        raise DistributedError(
            f"rank {rank} sent {len(data)} bytes that are no value of StreamTune's",
            fix="see that every rank runs the same version, and that no other program uses the ports of this run",
        ) from None


def _pack(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if -SHORT_INT <= number < SHORT_INT else {"i": hex(number)}
    if isinstance(value, float):
        number_f = float(value)
        return number_f if math.isfinite(number_f) else {"f": struct.pack(">d", number_f).hex()}
    if isinstance(value, list):
        return [_pack(each) for each in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"t": [_pack(each) for each in value]}
    if isinstance(value, set):
        return {"s": [_pack(each) for each in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {"d": {key: _pack(each) for key, each in value.items()}}
        return {"m": [[_pack(key), _pack(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode("ascii")}
    if isinstance(value, PurePath):
        return {"p": str(value)}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks")


def _unpack(packed: Any) -> Any:
    if isinstance(packed, list):
        return [_unpack(each) for each in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, content),) = packed.items()
    kind, read = READERS[tag]
    if type(content) is not kind:
        raise TypeError
    return read(content)


READERS: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
    "t": (list, lambda content: tuple(_unpack(each) for each in content)),
    "s": (list, lambda content: {_unpack(each) for each in content}),
    "d": (dict, lambda content: {key: _unpack(each) for key, each in content.items()}),
    "m": (list, lambda content: {_unpack(key): _unpack(each) for key, each in content}),
    "b": (str, lambda content: base64.b64decode(content, validate=True)),
    "p": (str, Path),
    "f": (str, lambda content: struct.unpack(">d", bytes.fromhex(content))[0]),
    "i": (str, lambda content: int(content, 16)),
}
"""The type behind each tag, and the function that reads it."""


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as a value for :func:`remake_error` on another rank: names and text, no object."""
    described: dict[str, Any] = {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
    if isinstance(error, StreamTuneError):
        described |= {"what": error.what, "where": error.where, "mend": error.fix, "exit_code": error.exit_code}
    return described


def remake_error(described: Any, rank: int, *, named: bool) -> StreamTuneError:
    """Return the error of ``rank``, of the nearest class in ``errors``; errors that are not StreamTune's as a RunError.

    ``named`` puts the rank before a message of StreamTune's own errors; other errors always have it.
    """
    try:
        kinds, text = list(described["kinds"]), str(described["text"])
        if "what" not in described:
            return errors.RunError(f"rank {rank} failed: {kinds[0]}: {text}")
        kind = next((name for name in kinds if name in errors.__all__ and name[0].isupper()), "RunError")
        what, where, fix = (str(described[name]) for name in ("what", "where", "mend"))
        made: StreamTuneError = getattr(errors, kind)(f"rank {rank}: {what}" if named else what, where=where, fix=fix)
        if (code := int(described["exit_code"])) != made.exit_code:
            made.exit_code = code
    except (KeyError, TypeError, ValueError, IndexError):
        return DistributedError(f"rank {rank} failed, and how it did cannot be read")
    return made
