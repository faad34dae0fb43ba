"""Open data files as bytes or lines of text: decompress, decode, and reject files that are not text.

Only regular files are opened, because a pipe or a device could block or never end. The first bytes reveal files whose
name is misleading: archives, HTML pages, Git LFS pointers.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from streamtune.base.paths import open_nonblocking, raise_if_too_many_open_files
from streamtune.data.bad_rows import BadRows
from streamtune.errors import DataError

MAX_LINE_BYTES = 256 << 20
"""Maximum number of bytes of a line; this is enough for tens of millions of tokens."""
MAX_DOCUMENT = 1 << 30
"""Maximum number of characters of a file that is read as a whole: .json, .txt, .md."""


def _open_zstd(file: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa  # type: ignore[import-untyped]

    return cast(IO[bytes], io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")))


COMPRESSED: dict[str, tuple[str, Callable[[IO[bytes]], Any]]] = {
    ".gz": ("gzip", lambda file: gzip.GzipFile(fileobj=file)),
    ".zst": ("zstd", _open_zstd),
    ".bz2": ("bzip2", bz2.BZ2File),
    ".xz": ("xz", lzma.LZMAFile),
}
"""Extension -> name of the compression, and the function that decompresses."""

_MAGIC: dict[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("gzip", "rename it to {name}.gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "rename it to {name}.zst"),
    b"BZh": ("bzip2", "rename it to {name}.bz2"),
    b"\xfd7zXZ\x00": ("xz", "rename it to {name}.xz"),
    b"PK\x03\x04": ("a zip archive or an Excel workbook", "unpack it, or save the sheet as .csv"),
    b"PAR1": ("Parquet", "rename it to .parquet"),
    b"ARROW1": ("Arrow", "rename it to .arrow"),
    b"%PDF-": ("a PDF document", "extract its text to .txt"),
    b"\x89PNG": ("a PNG image", "give a text file"),
    b"\xff\xd8\xff": ("a JPEG image", "give a text file"),
    b"SQLite format 3\x00": ("an SQLite database", "export its table as .csv"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an old Office document", "save it as .csv or .txt"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"Rar!\x1a\x07": ("a RAR archive", "unpack it"),
    b"\x7fELF": ("a program", "give a text file"),
    b"\x93NUMPY": ("a NumPy array", "write its rows as .jsonl"),
    b"\x80\x04\x95": ("a Python pickle", "write its rows as .jsonl"),
    b"\x80\x05\x95": ("a Python pickle", "write its rows as .jsonl"),
}
"""First bytes of a file that is not text -> kind of file, and fix for the error."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html", b"<?xml")


@dataclass(frozen=True)
class DataFile:
    """A local or remote file that holds rows."""

    name: str
    """file name without folders; its extension selects the format"""
    shown: str
    """name of the file in messages, usually as the user wrote it"""
    open: Callable[[], IO[bytes]]
    """function that opens a regular file for reading, with the method ``peek``; raises ``DataError`` for other files"""
    path: Path | None = None
    """path of a local file; None for a remote file"""
    version: str | None = None
    """version of a remote file, which changes when its bytes change; None if the storage reports none"""


def file_format(name: str) -> str:
    """Return the lower-case file extension without compression, such as ``.jsonl`` for ``data.JSONL.gz``."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def make_local_file(path: Path, shown_path: str) -> DataFile:
    return DataFile(path.name, shown_path, lambda: _open_local(path, shown_path), path)


def _open_local(path: Path, shown_path: str) -> IO[bytes]:
    try:
        _check_regular_file(path.stat().st_mode, shown_path)  # before opening: opening a device may have an effect
        file = open(path, "rb", opener=open_nonblocking)  # noqa: SIM115 - the reader closes it
    except OSError as error:
        raise_if_too_many_open_files(error)
        if path.is_symlink() and isinstance(error, FileNotFoundError):
            raise DataError(
                f"broken symbolic link: '{path.readlink()}' does not exist",
                where=shown_path,
                fix="download that file, or correct the link",
            ) from error
        fix = f"give yourself read permission: chmod u+r {path.name}" if isinstance(error, PermissionError) else ""
        raise DataError(
            f"cannot read the file: {error.strerror or error}", where=shown_path, fix=fix or _DOWNLOAD_AGAIN
        ) from error
    try:
        _check_regular_file(os.fstat(file.fileno()).st_mode, shown_path)
    except DataError:
        file.close()
        raise
    return file


def _check_regular_file(mode: int, shown_path: str) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise DataError(f"expected a regular file, found {kind}", where=shown_path, fix="write the rows to a file")


@contextmanager
def open_bytes(file: DataFile, *, text: bool = True) -> Iterator[IO[bytes]]:
    """Open a file as a context manager, and decompress it if the extension names a compression.

    Args:
        text: True rejects binary files by their first bytes; False rejects only LFS pointers and HTML.

    Raises:
        DataError: The file cannot be read, is damaged, or is of a rejected kind.
    """
    with file.open() as raw:
        suffix = PurePosixPath(file.name).suffix.lower()
        try:
            if suffix not in COMPRESSED:
                _refuse_other_formats(_peek(raw, 512), file, text=text)
                yield raw
                return
            _refuse_other_formats(_peek(raw, 64), file, text=False)
            with COMPRESSED[suffix][1](raw) as unpacked:
                yield unpacked
        except OSError as error:
            raise_if_too_many_open_files(error)
            if not text:  # the reader of a binary format handles its own errors
                raise
            is_damaged = suffix in COMPRESSED and error.errno is None  # errors of the system have an errno
            what = f"the {COMPRESSED[suffix][0]} file is damaged" if is_damaged else "cannot read the file"
            raise DataError(f"{what}: {error.strerror or error}", where=file.shown, fix=_DOWNLOAD_AGAIN) from error
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise DataError(
                f"the {COMPRESSED[suffix][0]} file is damaged: {error}", where=file.shown, fix=_DOWNLOAD_AGAIN
            ) from error


_DOWNLOAD_AGAIN = "download or write the file again"


def _peek(raw: Any, size: int) -> bytes:
    """Return the first bytes of a buffer without consuming them, because some files cannot be rewound."""
    found: bytes = raw.peek(size)[:size]
    return found


def _refuse_other_formats(first_bytes: bytes, file: DataFile, *, text: bool) -> None:
    if first_bytes.startswith(_POINTER):
        raise DataError(
            "the file is a Git LFS pointer: its content was not downloaded",
            where=f"{file.shown}:1",
            fix="run git lfs pull in the repository of the file",
        )
    bare = first_bytes.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    is_document = file_format(file.name) in (".txt", ".md")
    if bare.startswith(_HTML) and not is_document:
        raise DataError(
            "the file is an HTML or XML page; a server may have sent it instead of the data",
            where=f"{file.shown}:1",
            fix="download the file itself",
        )
    if not text:
        return
    for magic, (kind, fix) in _MAGIC.items():
        if first_bytes.startswith(magic):
            packed = kind in {name for name, _ in COMPRESSED.values()}
            what = (
                f"the file is compressed ({kind}), but its extension names no compression"
                if packed
                else f"the file is {kind}"
            )
            raise DataError(what, where=file.shown, fix=fix.format(name=file.name))
    if first_bytes[257:262] == b"ustar":
        raise DataError("the file is a tar archive", where=file.shown, fix="unpack it")


_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order mark -> encoding. UTF-32 is tried first, because its mark begins with the mark of UTF-16."""


Line = tuple[int, str, DataError | None]
"""Line number from 1, the decoded line with its line break, and the error of a line that cannot be read.

Such a line has U+FFFD in place of bytes that cannot be decoded, or no text if it is too long."""


def iter_lines(file: DataFile, bad: BadRows) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, decoded line with its line break), without the byte order mark.

    UTF-16 and UTF-32 files need a byte order mark. A line that cannot be decoded is reported to ``bad`` and skipped.

    Raises:
        DataError: The file cannot be read, or its encoding is not recognised.
    """
    for line in iter_checked_lines(file):
        number, text, error = line
        del line
        if error is not None:
            bad.report(error)
            continue
        held = [text]
        del text
        yield number, held.pop()  # keep no reference to a long line


def iter_checked_lines(file: DataFile) -> Iterator[Line]:
    """Yield every :data:`Line` of a file, as :func:`iter_lines`, also lines that cannot be read.

    Raises:
        DataError: The file cannot be read, or its encoding is not recognised.
    """
    with open_bytes(file) as raw:
        buffered = raw if hasattr(raw, "peek") else io.BufferedReader(cast(Any, raw))
        start = _peek(buffered, 64)
        if len(start) > 3 and not (any(start[1::2]) and any(start[::2])) and any(start):
            order = "BE" if not any(start[::2]) else "LE"
            raise DataError(
                "the file looks like UTF-16 without a byte order mark; UTF-8 is expected",
                where=f"{file.shown}:1",
                fix=f"convert it: iconv -f UTF-16{order} -t UTF-8",
            )
        encoding = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
        yield from (
            _utf8_lines(buffered, file) if encoding is None else _lines_after_byte_order_mark(buffered, encoding, file)
        )


_LINE_BREAK_BYTES = len("\r\n")


def _utf8_lines(raw: IO[bytes], file: DataFile) -> Iterator[Line]:
    number = 0
    while line := raw.readline(MAX_LINE_BYTES + _LINE_BREAK_BYTES):
        number += 1
        where = f"{file.shown}:{number}"
        if len(line) - (2 if line.endswith(b"\r\n") else line.endswith(b"\n")) > MAX_LINE_BYTES:
            is_whole = line.endswith(b"\n")
            del line
            yield number, "", _long_line_error(where)
            while not is_whole and (rest := raw.readline(1 << 20)):  # only if the error does not end the reading
                is_whole = rest.endswith(b"\n")
            continue
        encoding = "utf-8-sig" if number == 1 else "utf-8"
        found: DataError | None = None
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError as error:
            found, text = _encoding_error(line, error, where), line.decode(encoding, "replace")
        if b"\0" in line:
            found, text = _nul_byte_error(where), text.replace("\0", "\ufffd")
        del line
        held = [text]
        del text
        yield number, held.pop(), found  # keep no reference to a long line


def _lines_after_byte_order_mark(raw: IO[bytes], encoding: str, file: DataFile) -> Iterator[Line]:
    number = 0
    wrapped = io.TextIOWrapper(cast(Any, raw), encoding=encoding, newline="\n")
    try:
        while line := wrapped.readline(MAX_LINE_BYTES + _LINE_BREAK_BYTES):
            number += 1
            where = f"{file.shown}:{number}"
            if len(line) - (2 if line.endswith("\r\n") else line.endswith("\n")) > MAX_LINE_BYTES:
                raise _long_line_error(where)
            if "\0" in line:
                yield number, line.replace("\0", "\ufffd"), _nul_byte_error(where)
                continue
            yield number, line, None
    except UnicodeError as error:
        raise DataError(
            f"the file begins as {encoding.upper()}, but this line is not valid {encoding.upper()}: {error}",
            where=f"{file.shown}:{number + 1}",
            fix="save the file as UTF-8",
        ) from error
    finally:
        wrapped.detach()  # open_bytes closes the file


def _long_line_error(where: str) -> DataError:
    return DataError(
        f"the line is longer than {MAX_LINE_BYTES >> 20:,} MiB",
        where=where,
        fix="write one row per line, or split the row",
    )


def _nul_byte_error(where: str) -> DataError:
    return DataError(
        "the line contains a NUL byte: the file is damaged or binary",
        where=where,
        fix=_DOWNLOAD_AGAIN,
    )


def _encoding_error(line: bytes, error: UnicodeDecodeError, where: str) -> DataError:
    what = f"not valid UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
    high = [byte for byte in line[:4096] if byte >= 0x80] or [line[error.start]]
    if any(byte in (0x81, 0x8D, 0x8F, 0x90, 0x9D) for byte in high) or line[error.start] == 0xFF:
        return DataError(what, where=where, fix="save the file as UTF-8, or correct the line")
    name = "Windows-1252" if any(byte < 0xA0 for byte in high) else "Latin-1 (or Windows-1252)"
    return DataError(f"{what}; it looks like {name}", where=where, fix="convert the file: iconv -f CP1252 -t UTF-8")


def read_whole_text(file: DataFile) -> str:
    """Return the whole text of a file.

    Raises:
        DataError: The file cannot be read or decoded, or has more than 2**30 characters.
    """
    parts, size = [], 0
    for number, line in iter_lines(file, BadRows()):
        size += len(line)
        if size > MAX_DOCUMENT:
            raise DataError(
                f"the file has more than {MAX_DOCUMENT >> 20:,} million characters",
                where=f"{file.shown}:{number}",
                fix="write .jsonl, which is read line by line",
            )
        parts.append(line)
    return "".join(parts)
