"""Replacements of ``sys.stdout`` and ``sys.stderr`` whose writes never raise; the first error is recorded.

Writing fails if the descriptor is closed (``>&-``), the device is full (``>/dev/full``), or the reader of a pipe has
exited (``| head``). The last of these also stops a training run, like SIGTERM.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class _Descriptor(io.FileIO):
    """A file descriptor whose writes never raise; ``error`` is the first error."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                written = super().write(left)
            except OSError as error:
                self.error = self.error or error
                return size
            if written is None:  # non-blocking, as when another program shares the pipe
                import select

                select.select([], [self], [])
                continue
            left = left[written:]
        return size


_output: _Descriptor | None = None


def replace_standard_streams() -> Callable[[], None]:
    """Replace ``sys.stdout`` and ``sys.stderr``, unless other code has; return a function that restores them.

    Closed standard descriptors are opened as ``/dev/null`` first, so that no file opened later gets their number.
    """
    global _output
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    out = _replace_stream("stdout", 1)
    if out is not None:
        _output = out
    _replace_stream("stderr", 2)

    def undo() -> None:
        global _output
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        sys.stdout, sys.stderr = before
        if out is not None:
            _output = None

    return undo


def lost_output_error() -> OSError | None:
    """Return the first error in writing to standard output; None if there was none."""
    return None if _output is None else _output.error


def reader_is_gone() -> bool:
    """Return True if a write to standard output failed because the reader has closed the pipe."""
    error = lost_output_error()
    return error is not None and error.errno == errno.EPIPE


def _open_closed_descriptors() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def _replace_stream(name: str, descriptor: int) -> _Descriptor | None:
    """Replace ``sys.NAME`` by a stream that never raises; return its file, or None if other code has replaced it."""
    stream: TextIO | None = getattr(sys, name)
    if stream is not getattr(sys, f"__{name}__"):
        return None
    if stream is not None:
        with suppress(OSError, ValueError):
            stream.flush()
            if stream.fileno() != descriptor:
                return None
    raw = _Descriptor(descriptor, "wb", closefd=False)
    unbuffered = bool(getattr(stream, "write_through", False))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    errors = getattr(stream, "errors", None)
    if errors in (None, "strict") or (errors == "surrogateescape" and not encoding.lower().startswith("utf")):
        errors = "backslashreplace"  # a character that it cannot encode is not an error
    wrapped = io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=encoding,
        errors=errors,
        line_buffering=bool(getattr(stream, "line_buffering", name == "stderr")),
        write_through=unbuffered,
    )
    setattr(sys, name, wrapped)
    return raw
