"""The file of ``streamtune teach``: the likeliest next tokens of a teacher at each target of rows.

It is in the format of safetensors, with four tensors for R rows of N targets together:

    keys       uint8 [R, 16]      hash of a row's tokens and of which of them are trained on
    starts     int64 [R + 1]      where its targets begin among all
    ids        int32 [N, k]       the likeliest tokens, the likeliest first
    logprobs   fp32 [N, k + 1]    their log-probabilities, and last that of all other tokens together

and what it is of in its metadata: k, the size of the vocabulary, the number that logits were divided by, the name of
the teacher, a hash of the tokenizer and one of everything. Rows are written one after the other, and read as they are
needed: neither holds the file in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from streamtune import data
from streamtune.errors import ArgumentError, StorageError
from streamtune.labels import IGNORE_INDEX
from streamtune.ops import TopKTeacher
from streamtune.sizes import show_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TaughtRows", "TaughtWriter", "distinct_rows", "taught_digest", "tokenizer_hash"]

FORMAT = "streamtune teacher 1"
AGAIN = "run `streamtune teach` with this recipe again"


def row_key(row: data.Example) -> bytes:
    """Return 16 bytes that tell a row's tokens, and which of them are trained on, from others."""
    ids, labels = (np.ascontiguousarray(each, dtype=np.int32) for each in (row.input_ids, row.labels))
    return hashlib.sha256(ids.tobytes() + np.packbits(labels != IGNORE_INDEX).tobytes()).digest()[:16]


def num_targets(row: data.Example) -> int:
    """Return the tokens of a row that are predicted and trained on: not its first."""
    return int((np.asarray(row.labels)[1:] != IGNORE_INDEX).sum())


def distinct_rows(rows: Iterable[data.Example]) -> Iterator[int]:
    """Iterate over the numbers of rows, of equal ones the first."""
    seen = set()
    for number, row in enumerate(rows):
        if (key := row_key(row)) not in seen:
            seen.add(key)
            yield number


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


@dataclass(frozen=True)
class TaughtRows:
    """A file with the likeliest tokens of a teacher, open for reading.

    Attributes:
        path: The file.
        facts: Its metadata.
    """

    path: Path
    facts: dict[str, str]

    @classmethod
    def open(cls, path: Path, temperature: float) -> TaughtRows:
        """Open a file.

        Args:
            path: The file.
            temperature: The number that logits are to have been divided by.

        Raises:
            ArgumentError: It is not there, is no such file, or was written with another temperature.
        """
        facts = _facts(path)
        if float(facts["temperature"]) != temperature:
            raise ArgumentError(
                f"{path} was written with kd_temperature {float(facts['temperature']):g}, and the recipe has "
                f"{temperature:g}: log-probs of a few tokens cannot be made those of another",
                where="kd_temperature",
                mend=AGAIN,
            )
        return cls(path, facts)

    @property
    def k(self) -> int:
        """Tokens of each target."""
        return int(self.facts["k"])

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
        """Check that the file is of these rows.

        Args:
            rows: All that are trained on.
            tokenizer: Made their tokens.

        Raises:
            ArgumentError: It was written with another tokenizer, or lacks a row.
        """
        if self.facts["tokenizer"] != tokenizer_hash(tokenizer):
            raise ArgumentError(f"{self.path} was written with another tokenizer", where="teacher", mend=AGAIN)
        for row in rows:
            if row_key(row) not in self._rows:
                raise ArgumentError(
                    f"{self.path} has nothing of the row {row.origin}: it was written of other rows, or with other "
                    "keys that decide what of them is trained on, or held out",
                    where="teacher",
                    mend=AGAIN,
                )

    def of(self, rows: Sequence[data.Example], targets_BT: torch.Tensor) -> TopKTeacher:
        """Return the likeliest tokens at the targets ``[B, T]`` of rows, which lie in this order."""
        found: dict[str, list[torch.Tensor]] = {"ids": [], "logprobs": []}
        for row in rows:
            number = self._rows[row_key(row)]
            for name, parts in found.items():
                parts.append(self._file.get_slice(name)[int(self._starts[number]) : int(self._starts[number + 1])])
        return TopKTeacher.of_targets(targets_BT, torch.cat(found["ids"]), torch.cat(found["logprobs"]))


def _facts(path: Path) -> dict[str, str]:
    """Return the metadata of a file.

    Raises:
        ArgumentError: It is not there, or no such file.
    """
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}", where="teacher", mend="write it with `streamtune teach`")
    try:
        with safe_open(path, "pt") as file:
            facts: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where="teacher", mend=AGAIN) from error
    if facts.get("format") != FORMAT:
        raise ArgumentError(
            f"{path} is not a file of `streamtune teach`",
            where="teacher",
            mend="write one, or name a folder with a model",
        )
    return facts


def taught_digest(path: Path) -> str:
    """Return the hash of everything in a file, which is in its metadata.

    Raises:
        ArgumentError: It is not there, or no such file.
    """
    return _facts(path)["digest"]


def _reserve(path: Path, header: bytes, size: int) -> None:
    """Make a file of ``size`` bytes that begins with ``header``, all of them on disk: a mapping of others would end the
    process where the disk is full.

    Raises:
        StorageError: There is no room for it, or it cannot be written.
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
            f"{path.parent} has no room for {show_size(size)}: {error.strerror}",
            where="OUT",
            mend="free some space, name another folder, or ask for fewer tokens (--top-k)",
        ) from error


class TaughtWriter:
    """Writes the rows of a file, one after the other.

    Args:
        path: Not there yet, under a name of its own until everything is written.
        counts: Targets of each row ``[R]``.
        facts: Metadata: ``k`` among it.
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
        self.digest, self.row = hashlib.sha256(json.dumps(self.facts).encode()), 0
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        header = self._header()
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (_, dtype, shape) in self.shapes.items()}
        _reserve(self.partial, header, len(header) + sum(sizes.values()))
        self.parts: dict[str, Any] = {}
        offset = len(header)
        for name in self.order:
            _, dtype, shape = self.shapes[name]
            if sizes[name]:
                self.parts[name] = np.memmap(self.partial, dtype, "r+", offset, shape)
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
        self.digest.update(key)
        for name, values in (("ids", ids.int()), ("logprobs", logprobs.float())):
            if stop > start:
                self.parts[name][start:stop] = values.cpu().numpy()
                self.digest.update(self.parts[name][start:stop].tobytes())
        self.row += 1

    @contextmanager
    def finished(self) -> Iterator[TaughtWriter]:
        """Give the file its name when the context is left, with the hash of all of it; remove it after an error."""
        try:
            yield self
        except BaseException:
            self.parts.clear()
            self.partial.unlink(missing_ok=True)
            raise
        assert self.row == len(self.starts) - 1, "all rows that were counted"
        for part in self.parts.values():
            part.flush()
        self.parts.clear()
        self.facts["digest"] = self.digest.hexdigest()
        with self.partial.open("r+b") as file:
            file.write(self._header())
            file.flush()
            os.fsync(file.fileno())
        self.partial.replace(self.path)
