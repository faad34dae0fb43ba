"""Hashes of rows and records, in little memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Digests:
    """Hashes of 16 bytes, one behind the other: a million take 16 MB, as objects of Python five times that."""

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self._bytes = bytearray(data)

    def __len__(self) -> int:
        return len(self._bytes) // 16

    def append(self, digest: bytes) -> None:
        """Add one."""
        assert len(digest) == 16, "all of them have the same size"
        self._bytes += digest

    def first(self, count: int) -> Digests:
        """Return so many of them from the start."""
        return Digests(self._bytes[: 16 * count])

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Return all of them, [digests, 16]."""
        return np.frombuffer(bytes(self._bytes), dtype=np.uint8).reshape(-1, 16)

    def ranks(self) -> npt.NDArray[np.int64]:
        """Return the place of each among the different ones in the order of their bytes, [digests]."""
        words = np.frombuffer(bytes(self._bytes), dtype=">u8").astype(np.uint64).reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))
        words = words[order]
        is_new = np.concatenate([[False], (words[1:] != words[:-1]).any(axis=1)])[: len(order)]
        ranks: npt.NDArray[np.int64] = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.cumsum(is_new)
        return ranks
