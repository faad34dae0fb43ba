"""What a disk may hold after the power went: only what was synced is kept for sure; replayed from the shim's log.

    synced    nothing survives but what an fsync of it, and of the directory it is named in, had returned for
    names     every name survives; of the bytes only those that were synced
    journal   names up to some moment after the last fsync, as journals keep them; of the bytes some more than synced

Files are only ever appended to or written once here, so what a file held at a moment is the beginning of what it held
at the end, or when it was deleted (the shim keeps a link to each).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.kit import lines_of

__all__ = ["Crash", "replay"]

TEMPORARY = re.compile(r"\.tmp[A-Za-z0-9]{6}")


@dataclass(eq=False)
class Node:
    """A file or a directory."""

    entries: dict[str, Node] | None = None
    """None: a file."""
    synced_entries: dict[str, Node] = field(default_factory=dict)
    size: int = 0
    synced: int = 0
    content: bytes = b""
    """What it held in the end."""


@dataclass(frozen=True)
class Crash:
    """A moment, and what is left of it."""

    after: int
    """Calls that were made before it."""
    kind: str
    files: dict[str, bytes | None]
    """Path -> content, None for a directory."""


class Disk:
    """The files below one directory that is there whatever happens."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Node(entries={})
        self.names: list[dict[str, Node]] = []
        """Every path, after each call."""
        self.last_sync = 0

    def find(self, path: str) -> tuple[Node, str]:
        """The directory a path is in, and its name there."""
        parts = Path(path).relative_to(self.root).parts
        node = self.top
        for part in parts[:-1]:
            assert node.entries is not None
            node = node.entries[part]
        return node, parts[-1]

    def apply(self, call: list[str], graves: dict[int, bytes]) -> None:
        """One line of the log."""
        what, result, size, path, other = call
        if Path(path) == self.root:
            if what == "syncdir":
                assert self.top.entries is not None
                self.top.synced_entries = dict(self.top.entries)
            return
        folder, name = self.find(path)
        entries = folder.entries
        assert entries is not None
        if what in ("sync", "truncate", "write") and name not in entries:
            # safetensors writes under a name of its own and renames past the C library: the shim does not see it.
            staged = next(n for n, node in entries.items() if TEMPORARY.fullmatch(n) and node.size == int(size))
            entries[name] = entries.pop(staged)
        match what:
            case "create":
                entries[name] = Node()
            case "mkdir":
                entries[name] = Node(entries={})
            case "truncate":
                entries[name].size = entries[name].synced = 0
            case "write":
                entries[name].size += int(size)
            case "sync":
                entries[name].synced = entries[name].size = int(size)
            case "syncdir":
                node = entries[name]
                node.synced_entries = dict(node.entries or {})
            case "bury":
                entries[name].content = graves[int(result)]
            case "unlink" | "rmdir":
                del entries[name]
            case "rename":
                target, new = self.find(other)
                assert target.entries is not None
                target.entries[new] = entries.pop(name)

    def all_names(self) -> dict[str, Node]:
        """Path -> node."""
        return dict(_walk(self.top, "", synced=False))


def _walk(node: Node, path: str, *, synced: bool) -> Iterator[tuple[str, Node]]:
    for name, child in ((node.synced_entries if synced else node.entries) or {}).items():
        yield f"{path}{name}", child
        if child.entries is not None:
            yield from _walk(child, f"{path}{name}/", synced=synced)


def replay(log: Path, root: Path, graves: Path, seed: int = 0) -> Iterator[Crash]:
    """Every state the disk may be in after a crash at any moment of a run.

    Args:
        log: Of the shim.
        root: The directory that was watched, as the run left it.
        graves: Where the shim kept what was deleted.
        seed: Of what is drawn for ``journal``.
    """
    calls = [call for call in lines_of(log) if Path(call[3]) == root or root in Path(call[3]).parents]
    buried = {int(path.name): path.read_bytes() for path in graves.iterdir()}
    disk = Disk(root)
    states: list[tuple[dict[str, Node], dict[str, Node], dict[int, tuple[int, int]], int]] = []
    for index, call in enumerate(calls):
        disk.apply(call, buried)
        names = disk.all_names()
        if call[0] in ("sync", "syncdir"):
            disk.last_sync = index
        sizes = {id(node): (node.size, node.synced) for node in names.values()}
        strict = dict(_walk(disk.top, "", synced=True))
        sizes |= {id(node): (node.size, node.synced) for node in strict.values()}
        states.append((names, strict, sizes, disk.last_sync))
    for path, node in disk.all_names().items():
        if node.entries is None:
            node.content = (root / path).read_bytes()
    draw = random.Random(seed)
    for index, (names, strict, sizes, last_sync) in enumerate(states):
        yield Crash(index + 1, "synced", {p: _content(n, sizes, 0.0) for p, n in strict.items()})
        yield Crash(index + 1, "names", {p: _content(n, sizes, 0.0) for p, n in names.items()})
        earlier = states[draw.randint(last_sync, index)][0]
        yield Crash(index + 1, "journal", {p: _content(n, sizes, draw.random()) for p, n in earlier.items()})


def _content(node: Node, sizes: dict[int, tuple[int, int]], more: float) -> bytes | None:
    if node.entries is not None:
        return None
    size, synced = sizes.get(id(node), (0, 0))
    return node.content[: synced + int(more * max(size - synced, 0))]
