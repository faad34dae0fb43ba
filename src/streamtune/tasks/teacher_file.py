"""Teacher files, written by ``streamtune teach``: a teacher model's top-k next tokens at each target of the rows.

A teacher file is a safetensors file with four tensors, for R rows that have N targets together:

    keys       uint8 [R, 16]      hash of a row's tokens, and of which of them are trained
    starts     int64 [R + 1]      index of the row's first target
    ids        int32 [N, k]       top-k tokens, the most probable first
    logprobs   fp32 [N, k + 1]    log-probs of these tokens, then the log-prob of all other tokens together

The metadata has k, the vocabulary size, the temperature, the teacher's name, the date that chat templates printed, and
hashes of the tokenizer and of the whole file. Rows are written one by one and read when they are needed, so the file is
never in memory as a whole.

The file is written as ``.NAME.writing/rows``, under a lock, and renamed to ``NAME`` when it is complete. When a run
starts, it reads the whole file once and compares the hash. If the file changes after that, an error names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from streamtune import data
from streamtune.base import interrupts
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.base.result_cache import WatchedFile, checksum_of, is_open_at, try_lock
from streamtune.base.text import show_size
from streamtune.errors import ArgumentError, StorageError
from streamtune.ops import TopKTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "streamtune teacher 1"
RUN_TEACH_AGAIN = "run `streamtune teach` with this recipe again"
ATTEMPTS = 100
"""Maximum number of attempts to lock a file. An attempt fails if another process removes the lock file meanwhile."""


def row_hash(row: data.Example) -> bytes:
    """Return a 16-byte hash of a row's tokens and of which tokens are trained."""
    ids, labels = (np.ascontiguousarray(each, dtype=np.int32) for each in (row.input_ids, row.labels))
    return hashlib.sha256(ids.tobytes() + np.packbits(labels != IGNORE_INDEX).tobytes()).digest()[:16]


def num_targets(row: data.Example) -> int:
    """Return the number of a row's targets: its trained tokens, except for the first token of the row."""
    return int((np.asarray(row.labels)[1:] != IGNORE_INDEX).sum())


def distinct_row_indices(rows: Iterable[data.Example]) -> Iterator[int]:
    """Yield the index of each row that differs from all earlier rows in its tokens or its trained tokens."""
    seen = set()
    for number, row in enumerate(rows):
        if (key := row_hash(row)) not in seen:
            seen.add(key)
            yield number


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


@dataclass(frozen=True)
class TeacherFile:
    """A teacher's top-k tokens for each row, in a file that is open for reading."""

    path: Path
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: Path, temperature: float) -> TeacherFile:
        """Open a teacher file for reading.

        Args:
            temperature: Temperature with which the file's log-probs must have been computed.

        Raises:
            ArgumentError: The file does not exist, has another format, or was written with another temperature.
        """
        metadata = _read_metadata(path)
        if float(metadata["temperature"]) != temperature:
            raise ArgumentError(
                f"{path} was written with kd_temperature {float(metadata['temperature']):g}, but the recipe has "
                f"{temperature:g}: top-k log-probs cannot be converted to another temperature",
                where="kd_temperature",
                fix=RUN_TEACH_AGAIN,
            )
        return cls(path, metadata)

    @property
    def top_k_size(self) -> int:
        return int(self.metadata["k"])

    @cached_property
    def _watched_file(self) -> WatchedFile:
        fix = "restore the file that the run started with, and start again: the run resumes from its checkpoint"
        with self.path.open("rb") as file:
            return WatchedFile(self.path, file, checksum_of(file), fix)

    @cached_property
    def _tensors(self) -> Any:
        return safe_open(self.path, "pt").__enter__()

    @cached_property
    def _row_numbers(self) -> dict[bytes, int]:
        keys = self._tensors.get_tensor("keys").numpy()
        return {key.tobytes(): number for number, key in enumerate(keys)}

    @cached_property
    def _row_starts(self) -> npt.NDArray[np.int64]:
        starts: npt.NDArray[np.int64] = self._tensors.get_tensor("starts").numpy()
        return starts

    def check_rows(self, rows: Iterable[data.Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the file is intact and has an entry for each row.

        Raises:
            ArgumentError: The file does not match its hash, was written with another tokenizer, or lacks a row.
            StorageError: The file changed while it was read.
        """
        self._check_hash()
        if self.metadata["tokenizer"] != tokenizer_hash(tokenizer):
            raise ArgumentError(f"{self.path} was written with another tokenizer", where="teacher", fix=RUN_TEACH_AGAIN)
        for row in rows:
            if row_hash(row) not in self._row_numbers:
                raise ArgumentError(
                    f"{self.path} has no entry for the row {row.origin}: it was written for other rows, or with other "
                    "recipe keys for trained tokens or held-out rows",
                    where="teacher",
                    fix=RUN_TEACH_AGAIN,
                )

    def top_k(self, rows: Sequence[data.Example], targets_BT: torch.Tensor) -> TopKTeacher:
        """Return the teacher's top-k tokens and their log-probs at the targets of a batch.

        Args:
            targets_BT: Target token ids ``[B, T]``; -100 where there is no target.
        """
        slices: dict[str, list[torch.Tensor]] = {"ids": [], "logprobs": []}
        self._watched_file.check()
        for row in rows:
            number = self._row_numbers[row_hash(row)]
            for name, parts in slices.items():
                parts.append(
                    self._tensors.get_slice(name)[int(self._row_starts[number]) : int(self._row_starts[number + 1])]
                )
        ids, logprobs = (torch.cat(parts) for parts in slices.values())
        self._watched_file.check()
        return TopKTeacher.of_targets(targets_BT, ids, logprobs)

    def _check_hash(self) -> None:
        self._watched_file.check()
        try:
            digest = _start_digest(self.metadata)
            tensors = {name: self._tensors.get_tensor(name).numpy() for name in ("keys", "starts", "ids", "logprobs")}
            for number, key in enumerate(tensors["keys"]):
                start, stop = (int(each) for each in tensors["starts"][number : number + 2])
                _hash_row(digest, key.tobytes(), tensors["ids"][start:stop], tensors["logprobs"][start:stop])
            is_intact = digest.hexdigest() == self.metadata["digest"]
        except (SafetensorError, ValueError, LookupError):
            is_intact = False
        self._watched_file.check()
        if not is_intact:
            raise ArgumentError(
                f"{self.path} does not match its hash: it was changed or damaged after it was written",
                where="teacher",
                fix=f"use an intact copy of the file, or {RUN_TEACH_AGAIN}",
            )


def _start_digest(metadata: dict[str, str]) -> Any:
    """Return a SHA-256 object that has hashed the metadata, with zeros in place of the metadata's own ``digest``."""
    return hashlib.sha256(json.dumps({**metadata, "digest": "0" * 64}).encode())


def _hash_row(digest: Any, key: bytes, ids: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> None:
    digest.update(key)
    if len(ids):
        digest.update(ids.tobytes())
        digest.update(logprobs.tobytes())


def _read_metadata(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}", where="teacher", fix="write it with `streamtune teach`")
    try:
        with safe_open(path, "pt"):
            pass
        with path.open("rb") as file:  # safetensors returns metadata in any order; the hash needs the order
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        facts: dict[str, str] = header.get("__metadata__") or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where="teacher", fix=RUN_TEACH_AGAIN) from error
    if facts.get("format") != FORMAT:
        raise ArgumentError(
            f"{path} was not written by `streamtune teach`",
            where="teacher",
            fix="write a file with `streamtune teach`, or give the folder of a model",
        )
    if missing := sorted({"k", "vocabulary", "temperature", "teacher", "tokenizer", "rows", "digest"} - facts.keys()):
        what = f"{path} is damaged: its metadata has no '{missing[0]}'"
        raise ArgumentError(what, where="teacher", fix=RUN_TEACH_AGAIN)
    try:
        int(facts["k"]), float(facts["temperature"])
    except ValueError as error:
        what = f"{path} is damaged: its metadata is invalid: {error}"
        raise ArgumentError(what, where="teacher", fix=RUN_TEACH_AGAIN) from error
    return facts


def teacher_file_digest(path: Path) -> str:
    """Return the content hash that is stored in a teacher file's metadata.

    Raises:
        ArgumentError: The file does not exist, or has another format.
    """
    return _read_metadata(path)["digest"]


def teacher_file_date(path: Path) -> str | None:
    """Return the date that chat templates printed into the rows of a teacher file, in ISO 8601.

    None for a file of an earlier version, which has no date, and for a file that cannot be read.
    """
    try:
        return _read_metadata(path).get("date")
    except ArgumentError:
        return None  # reported when the run opens the file


@contextmanager
def lock_output(path: Path) -> Iterator[Path]:
    """Lock ``path`` against other processes inside the ``with`` block, and yield the path of a partial file to write.

    Both paths are on the same file system. The partial file is removed at the end, or if a signal ends the process.

    Raises:
        ArgumentError: Another process is writing the file, or the file already exists.
        StorageError: The folder cannot be written to.
    """
    folder = path.with_name(f".{path.name}.writing")
    descriptor = _lock_folder(folder, path)
    interrupts.remove_on_signal(str(folder))
    try:
        if os.path.lexists(path):
            raise ArgumentError(f"{path} already exists", where="OUT", fix="give another name, or remove the file")
        yield folder / "rows"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock_folder(folder: Path, path: Path) -> int:
    for _ in range(ATTEMPTS):
        descriptor = -1
        try:
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try_lock(descriptor)
            if is_open_at(descriptor, folder / "lock"):
                return descriptor
        except FileNotFoundError:
            pass  # removed by the process that had the lock
        except BlockingIOError:
            os.close(descriptor)
            raise ArgumentError(
                f"another process is writing {path}", where="OUT", fix="wait for the process, or give another name"
            ) from None
        except OSError as error:
            what = f"{folder.parent} cannot be written to: {error.strerror}"
            raise StorageError(what, where="OUT", fix="name another folder") from error
        with suppress(OSError):
            os.close(descriptor)
    raise StorageError(f"other processes keep creating and removing {folder}", where="OUT", fix="give another name")


def _allocate_file(path: Path, header: bytes, size: int) -> None:
    """Create a file that begins with ``header``, and reserve ``size`` bytes on the disk for it.

    If the file were sparse, writing to its memory map on a full disk would end the process.
    """
    try:
        with path.open("wb") as file:
            file.write(header)
            file.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(
            f"no room for a file of {show_size(size)} in {path.parent}: {error.strerror}",
            where="OUT",
            fix="free some space, name another folder, or lower --top-k",
        ) from error


class TeacherFileWriter:
    """Writes a teacher file row by row.

    Args:
        path: Path of the partial file, from :func:`lock_output`.
        counts: Number of targets of each row.
        metadata: Metadata of the file, including the number ``k`` of top-k tokens.
    """

    def __init__(self, path: Path, counts: Sequence[int], metadata: dict[str, str]) -> None:
        self.metadata = {"format": FORMAT, **metadata, "rows": str(len(counts)), "digest": "0" * 64}
        self.starts, k = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), int(metadata["k"])
        total = int(self.starts[-1])
        self.shapes: dict[str, tuple[str, np.dtype[Any], tuple[int, ...]]] = {
            "keys": ("U8", np.dtype(np.uint8), (len(counts), 16)),
            "starts": ("I64", np.dtype(np.int64), (len(counts) + 1,)),
            "ids": ("I32", np.dtype(np.int32), (total, k)),
            "logprobs": ("F32", np.dtype(np.float32), (total, k + 1)),
        }
        self.order = ("starts", "logprobs", "ids", "keys")  # the widest first: each begins at a multiple of its width
        self.digest, self.row = _start_digest(self.metadata), 0
        self.path = path
        header = self._make_header()
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (_, dtype, shape) in self.shapes.items()}
        _allocate_file(self.path, header, len(header) + sum(sizes.values()))
        self.parts: dict[str, Any] = {}
        offset = len(header)
        for name in self.order:
            _, dtype, shape = self.shapes[name]
            if sizes[name]:
                self.parts[name] = np.memmap(self.path, dtype, "r+", offset, shape)
            offset += sizes[name]
        self.parts["starts"][:] = self.starts

    def _make_header(self) -> bytes:
        """Return the header of the safetensors file: its length, then names, dtypes, shapes and offsets as JSON."""
        entries: dict[str, Any] = {"__metadata__": self.metadata}
        offset = 0
        for name in self.order:
            code, dtype, shape = self.shapes[name]
            stop = offset + int(np.prod(shape)) * dtype.itemsize
            entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def add_row(self, row: data.Example, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Write the next row.

        Args:
            row: Row with n targets.
            ids: Top-k tokens at each target, ``[n, k]``.
            logprobs: Log-probs of these tokens, then of all other tokens together, ``[n, k + 1]``.
        """
        start, stop = (int(each) for each in self.starts[self.row : self.row + 2])
        assert len(ids) == stop - start, "a row must have as many targets as its entry in counts"
        key = row_hash(row)
        self.parts["keys"][self.row] = np.frombuffer(key, dtype=np.uint8)
        values = [ids.int().cpu().numpy(), logprobs.float().cpu().numpy()]
        if stop > start:
            self.parts["ids"][start:stop], self.parts["logprobs"][start:stop] = values
        _hash_row(self.digest, key, *values)
        self.row += 1

    @contextmanager
    def renamed_on_success(self, path: Path) -> Iterator[TeacherFileWriter]:
        """Write the file's hash and rename the partial file to ``path``, if the ``with`` block ends without an error.

        Raises:
            ArgumentError: Another program has created ``path`` meanwhile; it is not overwritten.
        """
        try:
            yield self
        except BaseException:
            self.parts.clear()
            raise
        assert self.row == len(self.starts) - 1, "every row in counts must have been written"
        for part in self.parts.values():
            part.flush()
        self.parts.clear()
        self.metadata["digest"] = self.digest.hexdigest()
        with self.path.open("r+b") as file:
            file.write(self._make_header())
            file.flush()
            os.fsync(file.fileno())
        if os.path.lexists(path):
            raise ArgumentError(
                f"another program has created {path} meanwhile",
                where="OUT",
                fix="give another name, or remove the file",
            )
        self.path.replace(path)
