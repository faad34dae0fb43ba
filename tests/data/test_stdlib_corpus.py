"""The corpus built from the interpreter's own library."""

from __future__ import annotations

import sys
from pathlib import Path

from streamtune.data.reading.builtin import LONG_EVERY, LONG_FROM, LONGEST, stdlib_rows

MODULE = '''"""A module.

More about it.
"""
raise RuntimeError("a module must not be executed")
\x0c
class Box(list):
    """A box
    with things."""

    @property
    def size(self) -> int:
        """How many things there are."""
        # a comment that makes the method long enough to be worth a row of its own
        return len(self)

def undocumented():
    return 1

async def open_box(box, *, key=None):
    """Open the box.

    With its key.
    """
    if key is None:
        raise ValueError("a box is opened with a key, there is none")
    return box
'''


def build(root: Path) -> dict[str, tuple[str, str]]:
    rows = stdlib_rows(root=root)
    return {row.origin: tuple(message["content"] for message in row.columns["messages"]) for row in rows}


def test_rows_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/boxes.py").write_text(MODULE)
    rows = build(tmp_path)
    assert sorted(rows) == ["stdlib:pack/boxes.py:11", "stdlib:pack/boxes.py:20", "stdlib:pack/boxes.py:7"]
    instruction, source = rows["stdlib:pack/boxes.py:11"]
    assert instruction == (
        "Write the method `Box.size` of the module `pack.boxes`.\n\ndef size(self) -> int\n\nHow many things there are."
    )
    assert source.startswith("@property\ndef size(self) -> int:\n    ")
    assert source.endswith("    return len(self)\n")
    instruction, _ = rows["stdlib:pack/boxes.py:20"]
    assert "function `open_box`" in instruction
    assert "async def open_box(box, *, key=None)\n\nOpen the box.\n\nWith its key." in instruction
    assert "class Box(list)\n\nA box\nwith things." in rows["stdlib:pack/boxes.py:7"][0]


def test_long_rows_are_whole_modules(tmp_path: Path) -> None:
    long = MODULE + "# padding\n" * (LONG_FROM // 10)
    (tmp_path / "long.py").write_text(long)
    (tmp_path / "longer.py").write_text(long + "# padding\n" * (LONGEST // 10))
    rows = build(tmp_path)
    assert rows["stdlib:long.py:1"] == ("Write the module `long`.\n\nA module.", long)
    assert "stdlib:longer.py:1" not in rows


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "coded.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    (tmp_path / "wrong.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/boxes.py").write_text(MODULE)
    assert build(tmp_path) == {}


def test_the_real_library() -> None:
    rows = list(stdlib_rows(max_rows=120))
    assert rows == list(stdlib_rows(max_rows=120))
    assert len(rows) == 120
    contents = [row.columns["messages"][1]["content"] for row in rows]
    instructions = [row.columns["messages"][0]["content"] for row in rows]
    assert sum(text.startswith("Write the module") for text in instructions) == 120 // LONG_EVERY
    assert all(len(text) <= LONGEST for text in contents)
    assert len({row.origin.split(":")[1] for row in rows}) > 20, "a capped corpus is a mix of modules"
    assert not any("/test/" in row.origin or "site-packages" in row.origin for row in rows)
    assert all(message["role"] in ("user", "assistant") for row in rows for message in row.columns["messages"])


def test_nothing_is_imported() -> None:
    before = set(sys.modules)
    list(stdlib_rows(max_rows=10))
    assert not {name for name in set(sys.modules) - before if name in ("antigravity", "this", "turtle")}
