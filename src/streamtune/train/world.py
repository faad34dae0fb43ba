"""The ranks of a run, and the exchange of small values between them.

W ranks are laid out as DP x SP: ``sequence_size`` consecutive ranks share a sequence (sequence parallelism), and have
the same data-parallel rank. They have the same targets and losses, so sums over all ranks are divided by
``sequence_size``.

Values are sent as JSON and decoded exactly. Received bytes are never executed. The encoding is:

    null, true, 3, 0.1, "text", [...]     None, bool, int, finite float, str, list
    {"d": {"key": value}}                 a dict whose keys are strings
    {"m": [[key, value], ...]}            any other dict
    {"t": [...]}  {"s": [...]}            a tuple, a set
    {"b": "base64"}  {"p": "path"}        bytes, a path
    {"f": "7ff0000000000000"}             a float that is not finite, by its bits
    {"i": "0x..."}                        an int of more than 64 bits
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
    """Rank of this process and number of ranks of the run. ``World()`` is a run with one rank.

    With several ranks the process group must exist.
    """

    rank: int = 0
    size: int = 1
    sequence_size: int = 1
    """Number of ranks that share each sequence."""
    group: distributed.ProcessGroup | None = None
    """Process group for exchanges; None is the default group."""

    def with_new_group(self) -> World:
        """Return the same ranks with a new process group, for use in another thread. Called by all ranks."""
        return replace(self, group=distributed.new_group(backend="gloo")) if self.size > 1 else self

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Data-parallel rank; ranks that share a sequence have the same."""
        return self.rank // self.sequence_size

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.size // self.sequence_size

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over the data-parallel ranks."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(sums, group=self.group)
        return [value / self.sequence_size for value in sums.tolist()]

    def sum_count_over_ranks(self, value: int) -> int:
        """Return an integer summed over the data-parallel ranks."""
        return round(self.sum_over_ranks([value])[0])

    def any_rank(self, flag: bool) -> bool:
        """Return True on all ranks if ``flag`` is True on any rank."""
        return flag if self.size == 1 else self.sum_over_ranks([float(flag)])[0] > 0

    def gather_data_ranks(self, value: T) -> list[T]:
        """Return the values of all data-parallel ranks, in order; each of a type that :func:`encode_value` accepts."""
        return [value] if self.size == 1 else self.gather_all_ranks(value)[:: self.sequence_size]

    def gather_all_ranks(self, value: T) -> list[T]:
        """Return the values of all ranks, in order; each of a type that :func:`encode_value` accepts."""
        if self.size == 1:
            return [value]
        data, encode_error = _encode_or_error({"value": value})
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        size = torch.tensor([len(mine)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        distributed.all_gather(sizes, size, group=self.group)
        lengths = [_check_message_size(int(length), rank) for rank, length in enumerate(sizes)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        received = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(received, padded, group=self.group)
        if encode_error is not None:
            raise encode_error
        return [
            _decode_or_raise(part[:length], rank)
            for rank, (part, length) in enumerate(zip(received, lengths, strict=True))
        ]

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Call ``work()`` on every rank and return its result; if it fails on one rank, all ranks raise an error.

        A rank that failed raises its own error. The other ranks raise the error of the first failed rank, with its
        number. ``work`` must not wait for other ranks if it can fail on a single rank.
        """
        if self.size == 1:
            return work()
        result: T
        error: Exception | None = None
        try:
            result = work()
        except Exception as failed:
            error = failed
        outcomes = self.gather_all_ranks(None if error is None else describe_error(error))
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise rebuild_error(outcome, rank, has_rank_prefix=True)
        return result

    def max_over_ranks(self, value: int) -> int:
        return max(self.gather_data_ranks(value))

    def run_on_rank_0(self, work: Callable[[], T]) -> T:
        """Call ``work()`` on rank 0 only, and return its result on every rank.

        A StreamTuneError is raised on every rank; any other error becomes a RunError on the other ranks. The result
        must have a type that :func:`encode_value` accepts.
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
                data, error = _encode_or_error({"value": result})
        size = torch.tensor([len(data)])
        distributed.broadcast(size, src=0, group=self.group)
        sent = torch.empty(_check_message_size(int(size), 0), dtype=torch.uint8)
        if self.is_main:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        distributed.broadcast(sent, src=0, group=self.group)
        if error is not None:
            raise error
        found: T = cast("T", result) if self.is_main else _decode_or_raise(sent, 0)
        return found

    def barrier(self) -> None:
        if self.size > 1:
            distributed.all_reduce(torch.zeros(1), group=self.group)


WORLD = World()
"""A run of one rank."""


def _encode_or_error(document: dict[str, Any]) -> tuple[bytes, Exception | None]:
    """Return (encoded document, None), or (encoded error, error) if the document cannot be encoded."""
    try:
        data = encode_value(document)
        if len(data) <= MAX_MESSAGE_BYTES:
            return data, None
        error: Exception = RunError(
            f"a message between ranks has {len(data):,} bytes; at most {MAX_MESSAGE_BYTES:,} are sent"
        )
    except (TypeError, RecursionError) as failed:
        error = failed
    return encode_value({"error": describe_error(error)}), error


def _decode_or_raise(sent: Tensor, rank: int) -> Any:
    document = decode_value(sent.numpy().tobytes(), rank)
    if isinstance(document, dict) and "error" in document:
        raise rebuild_error(document["error"], rank, has_rank_prefix=False)
    if not isinstance(document, dict) or "value" not in document:
        raise DistributedError(f"rank {rank} sent a message that is neither a value nor an error")
    return document["value"]


def _check_message_size(size: int, rank: int) -> int:
    if not 0 < size <= MAX_MESSAGE_BYTES:
        raise DistributedError(
            f"rank {rank} announced a message with an impossible size ({size} bytes)",
            fix="run the same version on every rank, and make sure that no other program uses the ports of this run",
        )
    return size


MAX_MESSAGE_BYTES = 1 << 30
"""Maximum size in bytes of one rank's encoded value: larger than any rollout, too small to exhaust host memory."""
INT64_LIMIT = 1 << 63


def encode_value(value: Any) -> bytes:
    """Return a value as bytes, which :func:`decode_value` decodes exactly.

    Args:
        value: None, bool, int, float, str, bytes, a path, or a list, tuple, set or dict of them. Subclasses are sent as
            the base type.

    Raises:
        TypeError: The value has another type.
    """
    return json.dumps(_to_json_value(value), separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_value(data: bytes, rank: int) -> Any:
    """Return the value that :func:`encode_value` encoded on ``rank``.

    Raises:
        DistributedError: The bytes cannot be decoded.
    """
    try:
        return _from_json_value(json.loads(data.decode("ascii"), parse_constant=_refuse_constant))
    except (ValueError, TypeError, KeyError, RecursionError, struct.error):
        raise DistributedError(
            f"rank {rank} sent {len(data)} bytes that StreamTune cannot decode",
            fix="run the same version on every rank, and make sure that no other program uses the ports of this run",
        ) from None


def _to_json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if -INT64_LIMIT <= number < INT64_LIMIT else {"i": hex(number)}
    if isinstance(value, float):
        number_f = float(value)
        return number_f if math.isfinite(number_f) else {"f": struct.pack(">d", number_f).hex()}
    if isinstance(value, list):
        return [_to_json_value(each) for each in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"t": [_to_json_value(each) for each in value]}
    if isinstance(value, set):
        return {"s": [_to_json_value(each) for each in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {"d": {key: _to_json_value(each) for key, each in value.items()}}
        return {"m": [[_to_json_value(key), _to_json_value(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode("ascii")}
    if isinstance(value, PurePath):
        return {"p": str(value)}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks")


def _from_json_value(packed: Any) -> Any:
    if isinstance(packed, list):
        return [_from_json_value(each) for each in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, content),) = packed.items()
    kind, read = READERS[tag]
    if type(content) is not kind:
        raise TypeError
    return read(content)


READERS: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
    "t": (list, lambda content: tuple(_from_json_value(each) for each in content)),
    "s": (list, lambda content: {_from_json_value(each) for each in content}),
    "d": (dict, lambda content: {key: _from_json_value(each) for key, each in content.items()}),
    "m": (list, lambda content: {_from_json_value(key): _from_json_value(each) for key, each in content}),
    "b": (str, lambda content: base64.b64decode(content, validate=True)),
    "p": (str, Path),
    "f": (str, lambda content: struct.unpack(">d", bytes.fromhex(content))[0]),
    "i": (str, lambda content: int(content, 16)),
}
"""For each tag, the JSON type of its content and the function that decodes it."""


def _refuse_constant(constant: str) -> Any:
    raise ValueError(constant)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return class names and text of an error as a dict, from which :func:`rebuild_error` creates it on another
    rank."""
    described: dict[str, Any] = {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
    if isinstance(error, StreamTuneError):
        described |= {"what": error.what, "where": error.where, "fix": error.fix, "exit_code": error.exit_code}
    return described


def rebuild_error(described: Any, rank: int, *, has_rank_prefix: bool) -> StreamTuneError:
    """Return the error that :func:`describe_error` described on ``rank``, in the nearest class of
    ``streamtune.errors``.

    An error that is not StreamTune's becomes a RunError, which names the rank.

    Args:
        described: Result of :func:`describe_error`.
        rank: Rank on which the error was raised.
        has_rank_prefix: True to put the rank before the message of a StreamTune error.
    """
    try:
        kinds, text = list(described["kinds"]), str(described["text"])
        if "what" not in described:
            return errors.RunError(f"rank {rank} failed: {kinds[0]}: {text}")
        kind = next((name for name in kinds if name in errors.__all__ and name[0].isupper()), "RunError")
        what, where, fix = (str(described[name]) for name in ("what", "where", "fix"))
        made: StreamTuneError = getattr(errors, kind)(
            f"rank {rank}: {what}" if has_rank_prefix else what, where=where, fix=fix
        )
        if (code := int(described["exit_code"])) != made.exit_code:
            made.exit_code = code
    except (KeyError, TypeError, ValueError, IndexError):
        return DistributedError(f"rank {rank} failed, and its error cannot be decoded")
    return made
