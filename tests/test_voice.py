"""Docstrings say what is there: a verb or a noun first, never a question word (``ruff`` D401 holds the verbs).

A class name stands for one class.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "streamtune"
QUESTION = re.compile(r"(What|Whether|Where|Who|How|Which|When|Why)\b")


def question_words(path: Path) -> list[str]:
    """The docstrings of a file that begin with a question word, with the lines where their owners are."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if QUESTION.match(text):
                found.append(f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found


@pytest.mark.full
def test_no_docstring_begins_with_a_question_word() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 200
    assert [line for path in files for line in question_words(path)] == []


@pytest.mark.parametrize(("text", "found"), [("What it is.", 1), ("Whether it is.", 1), ("Return what it is.", 0)])
def test_what_is_found(text: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_voice.SOURCE", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(f'def f():\n    """{text}"""\n')
    assert len(question_words(path)) == found


def classes(folder: Path) -> dict[str, list[str]]:
    """The names of the classes below a folder, nested ones included, with the files and lines where each stands."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(folder)}:{node.lineno}")
    return found


@pytest.mark.full
def test_a_class_name_occurs_once() -> None:
    found = classes(SOURCE)
    assert len(found) > 200
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_name_of_two_classes_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class A:\n    class B: ...\n")
    (tmp_path / "two.py").write_text("class B: ...\n")
    assert classes(tmp_path) == {"A": ["one.py:1"], "B": ["one.py:2", "two.py:1"]}
