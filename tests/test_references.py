"""Files and names that pages, docstrings and comments refer to exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import FENCE, PAGES, ROOT, SOURCE, name_of

FOLDERS = ("src", "docs", "tests", "benchmarks", "tools", "recipes", "deploy")
SHORT = ("", "src/streamtune/", "docs/", "tests/")
"""Folders that a path may leave out."""
ROOMS = {path.name for path in SOURCE.iterdir() if path.is_dir()}
PATH = re.compile(r"(?<![\w./:<{$-])((?:[A-Za-z_][\w-]*/)+[\w-]+(?:\.\w+)+)(?![\w/])")
ELSEWHERE = {
    "docs/comparison.md": "files of other projects",
    "docs/reference/suites.md": "files of other projects",
    "docs/log.md": "files as they were on that day",
}
OF_A_USER = {"rewards/brevity.py", "tasks/mine.yaml"}
"""Files of a user in examples, in folders that are called as ours."""

Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.cache
def names_in(source: Path) -> frozenset[str]:
    """Return the names that a module makes: of functions and classes, their members, and what is assigned."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, Named):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
    return frozenset(found)


def modules(path: str) -> list[Path]:
    """Return the source files of a module, or of the package of that name, below one of the short folders."""
    for folder in (ROOT / short for short in SHORT):
        if (file := folder / f"{path}.py").is_file():
            return [file]
        if (folder / path / "__init__.py").is_file():
            return sorted((folder / path).glob("*.py"))
    return []


def exists(path: str) -> bool:
    """Return True if ``path`` is a file, or a name behind its module: ``run/build.build_run``."""
    if any((ROOT / short / path).exists() for short in SHORT):
        return True
    module, _, name = path.partition(".")
    return name != "py" and any(name.partition(".")[0] in names_in(source) for source in modules(module))


def is_ours(path: str) -> bool:
    """Return True if a path begins with a folder of the repository, or with a room and is of Python."""
    first, python = path.partition("/")[0], path.endswith(".py") or Path(path).suffix not in KINDS_OF_FILES
    return path not in OF_A_USER and (first in FOLDERS or (first in ROOMS and python))


KINDS_OF_FILES = {".jsonl", ".json", ".csv", ".txt", ".parquet", ".yaml", ".md", ".html", ".png"}


def third_party_code_of(page: Path) -> Iterator[str]:
    """Yield code spans and code blocks of a page."""
    text = page.read_text(encoding="utf-8")
    yield from (block for _, block in FENCE.findall(text))
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in ELSEWHERE], ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    paths = {path for text in third_party_code_of(page) for path in PATH.findall(text) if is_ours(path)}
    assert {path for path in paths if not exists(path)} == set()


def test_files_that_the_code_names_exist() -> None:
    wrong = {}
    for top in ("src", "tests", "benchmarks", "tools"):
        for file in sorted((ROOT / top).rglob("*.py")):
            pages = re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
            if missing := {page for page in pages if not (ROOT / page).is_file()} - MADE:
                wrong[name_of(file)] = missing
    assert wrong == {}


MADE = {"docs/benchmarks/gpu.md"}
"""Written by a run on a device, which has not been made yet."""

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?\.?([^`<]+)`")
OF_OTHERS = ("torch.", "transformers.", "datasets.", "dataclasses.", "peft.")


@pytest.mark.full
def test_names_that_docstrings_refer_to_exist() -> None:
    every = {source: names_in(source) for source in SOURCE.rglob("*.py")}
    modules_and_packages = {name for source in every for name in (source.stem, source.parent.name)}
    known = frozenset().union(*every.values(), ROOMS, modules_and_packages)
    wrong = []
    for source, own in every.items():
        for name in ROLE.findall(source.read_text(encoding="utf-8")):
            parts = name.removesuffix("()").removeprefix("streamtune.").split(".")
            elsewhere = len(parts) == 1 and parts[0].islower() and parts[0] not in own | beside(source)
            if not name.startswith(OF_OTHERS) and (elsewhere or not known.issuperset(parts)):
                wrong.append(f"{name_of(source)}: {name}")
    assert wrong == []


def beside(source: Path) -> set[str]:
    """Return the names of modules that a docstring may name alone: rooms, and the modules beside it."""
    return ROOMS | {file.stem for file in (*SOURCE.glob("*.py"), *source.parent.glob("*.py"))} | {source.parent.name}


def test_what_is_missing_is_found() -> None:
    assert not exists("engine/no_such_file.py")
    assert not exists("run/build.no_such_name")
    assert exists("run/build.build_run")
    assert PATH.findall("as `engine/no_such_file.py` and data/x.jsonl") == ["engine/no_such_file.py", "data/x.jsonl"]
    assert [is_ours(path) for path in ("engine/x.py", "data/x.jsonl", "recipes/x.yaml", "mine/x.py")] == [1, 0, 1, 0]
