"""Encode values for other ranks as JSON, and decode them exactly: no byte from another rank is ever run.

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
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from streamtune import errors
from streamtune.errors import DistributedError, StreamTuneError

__all__ = ["MOST_BYTES", "decode_value", "describe_error", "encode_value", "remake_error"]

MOST_BYTES = 1 << 30
"""Of one rank's value. More than any rollout has, and less than would take a machine's memory."""
SHORT_INT = 1 << 63


def encode_value(value: Any) -> bytes:
    """Write a value as bytes that :func:`decode_value` reads back the same.

    Args:
        value: Of None, bool, int, float, str, bytes, paths, lists, tuples, sets and dicts. Of their subclasses the
            plain value is kept.

    Raises:
        TypeError: Something else is in it.
    """
    return json.dumps(_pack(value), separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_value(data: bytes, rank: int) -> Any:
    """Read the value that :func:`encode_value` wrote on ``rank``.

    Raises:
        DistributedError: The bytes are something else.
    """
    try:
        return _unpack(json.loads(data.decode("ascii"), parse_constant=_refuse))
    except (ValueError, TypeError, KeyError, RecursionError, struct.error):
        raise DistributedError(
            f"rank {rank} sent {len(data)} bytes that are no value of StreamTune's",
            mend="see that every rank runs the same version, and that no other program uses the ports of this run",
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
        described |= {"what": error.what, "where": error.where, "mend": error.mend, "exit_code": error.exit_code}
    return described


def remake_error(described: Any, rank: int, *, named: bool) -> StreamTuneError:
    """Return the error of ``rank``, of the nearest class in ``errors``; errors not of StreamTune's as a RunError.

    Args:
        described: From :func:`describe_error`.
        rank: Whose it is.
        named: Put the rank before a message of StreamTune's own errors, as it always is before those of others.
    """
    try:
        kinds, text = list(described["kinds"]), str(described["text"])
        if "what" not in described:
            return errors.RunError(f"rank {rank} failed: {kinds[0]}: {text}")
        kind = next((name for name in kinds if name in errors.__all__ and name[0].isupper()), "RunError")
        what, where, mend = (str(described[name]) for name in ("what", "where", "mend"))
        made: StreamTuneError = getattr(errors, kind)(f"rank {rank}: {what}" if named else what, where=where, mend=mend)
        if (code := int(described["exit_code"])) != made.exit_code:
            made.exit_code = code
    except (KeyError, TypeError, ValueError, IndexError):
        return DistributedError(f"rank {rank} failed, and how it did cannot be read")
    return made
