"""The file of ``streamtune teach``: the likeliest next tokens of a teacher at each target of rows.

It is in the format of safetensors, with four tensors for R rows of N targets together:

    keys       uint8 [R, 16]      hash of a row's tokens and of which of them are trained on
    starts     int64 [R + 1]      where its targets begin among all
    ids        int32 [N, k]       the likeliest tokens, the likeliest first
    logprobs   fp32 [N, k + 1]    their log-probabilities, and last that of all other tokens together

The metadata has k, the size of the vocabulary, the temperature of the logits, the name of the teacher, a hash of the
tokenizer and a hash of everything. Rows are written one after the other, and read as they are needed: neither holds the
file in memory.

While it is written it is ``.NAME.writing/rows``, under a lock; it gets its name when it is whole. A start reads all of
it once and compares the hash. From then on an error names the file where it changes.
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
AGAIN = "run `streamtune teach` with this recipe again"
ATTEMPTS = 100
"""Another process may remove the folder of its lock just when this one opens it."""


def row_key(row: data.Example) -> bytes:
    """Return 16 bytes that tell a row's tokens, and which of them are trained on, from others."""
    ids, labels = (np.ascontiguousarray(each, dtype=np.int32) for each in (row.input_ids, row.labels))
    return hashlib.sha256(ids.tobytes() + np.packbits(labels != IGNORE_INDEX).tobytes()).digest()[:16]


def num_targets(row: data.Example) -> int:
    """Return how many tokens of a row are predicted and trained on: not its first."""
    return int((np.asarray(row.labels)[1:] != IGNORE_INDEX).sum())


def distinct_rows(rows: Iterable[data.Example]) -> Iterator[int]:
    """Iterate over the numbers of rows, of equal rows the first."""
    seen = set()
    for number, row in enumerate(rows):
        if (key := row_key(row)) not in seen:
            seen.add(key)
            yield number


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


@dataclass(frozen=True)
class TaughtRows:
    """A file with the likeliest tokens of a teacher, open for reading."""

    path: Path
    facts: dict[str, str]

    @classmethod
    def open(cls, path: Path, temperature: float) -> TaughtRows:
        """Open a file.

        Args:
            temperature: The temperature that its log-probs must have.

        Raises:
            ArgumentError: It is not there, is no such file, or was written with another temperature.
        """
        facts = _facts(path)
        if float(facts["temperature"]) != temperature:
            raise ArgumentError(
                f"{path} was written with kd_temperature {float(facts['temperature']):g}, and the recipe has "
                f"{temperature:g}: log-probs of a few tokens cannot be made those of another",
                where="kd_temperature",
                fix=AGAIN,
            )
        return cls(path, facts)

    @property
    def k(self) -> int:
        """Number of tokens of each target."""
        return int(self.facts["k"])

    @cached_property
    def _watched(self) -> WatchedFile:
        fix = "put the file that the run began with back, and start again: the run goes on from its checkpoint"
        with self.path.open("rb") as file:
            return WatchedFile(self.path, file, checksum_of(file), fix)

    @cached_property
    def _file(self) -> Any:
        return safe_open(self.path, "pt").__enter__()

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        keys = self._file.get_tensor("keys").numpy()
        return {key.tobytes(): number for number, key in enumerate(keys)}

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        starts: npt.NDArray[np.int64] = self._file.get_tensor("starts").numpy()
        return starts

    def check(self, rows: Iterable[data.Example], tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the file is whole, and of these rows.

        Args:
            rows: All rows that are trained on.
            tokenizer: The tokenizer that made their tokens.

        Raises:
            ArgumentError: It does not fit its hash, was written with another tokenizer, or lacks a row.
            StorageError: It changed while it was read.
        """
        self._check_hash()
        if self.facts["tokenizer"] != tokenizer_hash(tokenizer):
            raise ArgumentError(f"{self.path} was written with another tokenizer", where="teacher", fix=AGAIN)
        for row in rows:
            if row_key(row) not in self._rows:
                raise ArgumentError(
                    f"{self.path} has nothing of the row {row.origin}: it was written of other rows, or with other "
                    "keys that decide what of them is trained on, or held out",
                    where="teacher",
                    fix=AGAIN,
                )

    def of(self, rows: Sequence[data.Example], targets_BT: torch.Tensor) -> TopKTeacher:
        """Return the likeliest tokens at the targets ``[B, T]`` of rows, which lie in this order."""
        found: dict[str, list[torch.Tensor]] = {"ids": [], "logprobs": []}
        self._watched.check()
        for row in rows:
            number = self._rows[row_key(row)]
            for name, parts in found.items():
                parts.append(self._file.get_slice(name)[int(self._starts[number]) : int(self._starts[number + 1])])
        ids, logprobs = (torch.cat(parts) for parts in found.values())
        self._watched.check()
        return TopKTeacher.of_targets(targets_BT, ids, logprobs)

    def _check_hash(self) -> None:
        self._watched.check()
        try:
            digest = _new_digest(self.facts)
            tensors = {name: self._file.get_tensor(name).numpy() for name in ("keys", "starts", "ids", "logprobs")}
            for number, key in enumerate(tensors["keys"]):
                start, stop = (int(each) for each in tensors["starts"][number : number + 2])
                _add_row(digest, key.tobytes(), tensors["ids"][start:stop], tensors["logprobs"][start:stop])
            whole = digest.hexdigest() == self.facts["digest"]
        except (SafetensorError, ValueError, LookupError):
            whole = False
        self._watched.check()
        if not whole:
            raise ArgumentError(
                f"{self.path} does not fit its hash: it was changed or damaged after it was written",
                where="teacher",
                fix=f"use a whole copy of it, or {AGAIN}",
            )


def _new_digest(facts: dict[str, str]) -> Any:
    """Return a hash of the metadata without the hash in it, to be fed with the rows."""
    return hashlib.sha256(json.dumps({**facts, "digest": "0" * 64}).encode())


def _add_row(digest: Any, key: bytes, ids: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> None:
    digest.update(key)
    if len(ids):
        digest.update(ids.tobytes())
        digest.update(logprobs.tobytes())


def _facts(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}", where="teacher", fix="write it with `streamtune teach`")
    try:
        with safe_open(path, "pt"):
            pass
        with path.open("rb") as file:  # the library gives the metadata in no order, and the hash is of one
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        facts: dict[str, str] = header.get("__metadata__") or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where="teacher", fix=AGAIN) from error
    if facts.get("format") != FORMAT:
        raise ArgumentError(
            f"{path} is not a file of `streamtune teach`",
            where="teacher",
            fix="write one, or name a folder with a model",
        )
    if missing := sorted({"k", "vocabulary", "temperature", "teacher", "tokenizer", "rows", "digest"} - facts.keys()):
        raise ArgumentError(f"{path} is damaged: its metadata has no '{missing[0]}'", where="teacher", fix=AGAIN)
    try:
        int(facts["k"]), float(facts["temperature"])
    except ValueError as error:
        raise ArgumentError(f"{path} is damaged: in its metadata {error}", where="teacher", fix=AGAIN) from error
    return facts


def taught_digest(path: Path) -> str:
    """Return the hash of everything in a file, from its metadata.

    Raises:
        ArgumentError: It is not there, or no such file.
    """
    return _facts(path)["digest"]


@contextmanager
def reserved(path: Path) -> Iterator[Path]:
    """Keep other processes from writing a file; yield the path to write to until it is whole.

    Both are on one file system. What was written is removed when the context is left, or a signal ends the process.

    Raises:
        ArgumentError: Another process writes it, or it is there by now.
        StorageError: The folder cannot be written to.
    """
    folder = path.with_name(f".{path.name}.writing")
    descriptor = _locked_folder(folder, path)
    interrupts.remove_on_signal(str(folder))
    try:
        if os.path.lexists(path):
            raise ArgumentError(f"{path} is there already", where="OUT", fix="give another name, or remove it")
        yield folder / "rows"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(folder: Path, path: Path) -> int:
    for _ in range(ATTEMPTS):
        descriptor = -1
        try:
            folder.mkdir(exist_ok=True)
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try_lock(descriptor)
            if is_open_at(descriptor, folder / "lock"):
                return descriptor
        except FileNotFoundError:
            pass  # removed by the process that had it
        except BlockingIOError:
            os.close(descriptor)
            raise ArgumentError(
                f"another process is writing {path}", where="OUT", fix="wait for it, or give another name"
            ) from None
        except OSError as error:
            what = f"{folder.parent} cannot be written to: {error.strerror}"
            raise StorageError(what, where="OUT", fix="name another folder") from error
        with suppress(OSError):
            os.close(descriptor)
    raise StorageError(f"{folder} is made and removed again and again", where="OUT", fix="give another name")


def _reserve(path: Path, header: bytes, size: int) -> None:
    """Allocate a file of ``size`` bytes that begins with ``header``: a sparse mapping would end the process on a full
    disk.
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
            f"there is no room for {show_size(size)} in {path.parent}: {error.strerror}",
            where="OUT",
            fix="free some space, name another folder, or ask for fewer tokens (--top-k)",
        ) from error


class TaughtWriter:
    """Writes the rows of a file, one after the other.

    Args:
        path: The file while it is written, see :func:`reserved`.
        counts: Number of targets of each row ``[R]``.
        facts: Metadata, with ``k``.
    """

    def __init__(self, path: Path, counts: Sequence[int], facts: dict[str, str]) -> None:
        self.facts = {"format": FORMAT, **facts, "rows": str(len(counts)), "digest": "0" * 64}
        self.starts, k = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), int(facts["k"])
        total = int(self.starts[-1])
        self.shapes: dict[str, tuple[str, np.dtype[Any], tuple[int, ...]]] = {
            "keys": ("U8", np.dtype(np.uint8), (len(counts), 16)),
            "starts": ("I64", np.dtype(np.int64), (len(counts) + 1,)),
            "ids": ("I32", np.dtype(np.int32), (total, k)),
            "logprobs": ("F32", np.dtype(np.float32), (total, k + 1)),
        }
        self.order = ("starts", "logprobs", "ids", "keys")  # the widest first: each begins at a multiple of its width
        self.digest, self.row = _new_digest(self.facts), 0
        self.path = path
        header = self._header()
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (_, dtype, shape) in self.shapes.items()}
        _reserve(self.path, header, len(header) + sum(sizes.values()))
        self.parts: dict[str, Any] = {}
        offset = len(header)
        for name in self.order:
            _, dtype, shape = self.shapes[name]
            if sizes[name]:
                self.parts[name] = np.memmap(self.path, dtype, "r+", offset, shape)
            offset += sizes[name]
        self.parts["starts"][:] = self.starts

    def _header(self) -> bytes:
        """Return the header of safetensors: its length, and names, dtypes, shapes and places as JSON."""
        entries: dict[str, Any] = {"__metadata__": self.facts}
        offset = 0
        for name in self.order:
            code, dtype, shape = self.shapes[name]
            stop = offset + int(np.prod(shape)) * dtype.itemsize
            entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def add(self, row: data.Example, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Write the next row: its likeliest tokens ``[n, k]`` and their log-probabilities ``[n, k + 1]``."""
        start, stop = (int(each) for each in self.starts[self.row : self.row + 2])
        assert len(ids) == stop - start, "as many as were counted"
        key = row_key(row)
        self.parts["keys"][self.row] = np.frombuffer(key, dtype=np.uint8)
        values = [ids.int().cpu().numpy(), logprobs.float().cpu().numpy()]
        if stop > start:
            self.parts["ids"][start:stop], self.parts["logprobs"][start:stop] = values
        _add_row(self.digest, key, *values)
        self.row += 1

    @contextmanager
    def finished(self, path: Path) -> Iterator[TaughtWriter]:
        """Context manager: on success write the content hash and rename the partial file.

        Raises:
            ArgumentError: Something else has that name by then; it is left alone.
        """
        try:
            yield self
        except BaseException:
            self.parts.clear()
            raise
        assert self.row == len(self.starts) - 1, "all rows that were counted"
        for part in self.parts.values():
            part.flush()
        self.parts.clear()
        self.facts["digest"] = self.digest.hexdigest()
        with self.path.open("r+b") as file:
            file.write(self._header())
            file.flush()
            os.fsync(file.fileno())
        if os.path.lexists(path):
            raise ArgumentError(
                f"{path} was made by another program meanwhile", where="OUT", fix="give another name, or remove it"
            )
        self.path.replace(path)
