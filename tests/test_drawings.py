"""The drawings of the explanation are those that their script writes, and each is shown by a page."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.drawings import FOLDER, HEADS, LAYERS, C, attention_share, drawings

PAGES = Path(__file__).parents[1] / "docs" / "explanation"


def test_the_committed_files_are_the_scripts_output() -> None:
    made = drawings()
    assert {path.name for path in FOLDER.glob("explain-*.svg")} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: python -m tools.drawings"


def test_each_is_well_formed_named_and_shown_once() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES.glob("*.md"))
    for name, text in drawings().items():
        root = ElementTree.fromstring(text)
        assert root.find("{http://www.w3.org/2000/svg}title") is not None, name
        assert pages.count(f"../images/{name}") == 1, name


def test_figures_are_those_of_the_shape() -> None:
    memory = drawings()["explain-memory.svg"]
    assert f">{2 * C * LAYERS:,}<" in memory
    assert ">28,672<" in memory  # decision 011
    # The row at which attention takes half of the operations: 4.5 * 2 H D L T = 8 N + 6 N_head, by hand 44,500 tokens.
    assert attention_share(44_500) == pytest.approx(0.5, abs=0.01)
    assert HEADS == 32
