"""The built-in corpus: the standard library of the interpreter that runs, as instructions and answers.

Short rows ask for one function, class or method, given its module, signature and docstring; long rows ask for a whole
module. Files are parsed, never executed. The same interpreter gives the same rows in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import math
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from streamtune.data.readers import Row

__all__ = ["STDLIB_PATH", "stdlib_rows"]

STDLIB_PATH = "python-stdlib"
"""The dataset path that names this corpus."""

SKIPPED_FOLDERS = frozenset(
    {
        *("test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"),
        *("site-packages", "dist-packages"),
        *("encodings", "pydoc_data"),
    }
)
"""Tests, bundled tools, what pip installed, and tables of data are not what we want a model to learn."""

SHORTEST = 120
"""Characters of source below which a definition teaches nothing."""

LONGEST = 20_000
"""Characters of source in a row at most: about 6,000 to 7,000 tokens of a vocabulary of 4,096."""

LONG_FROM = 6_000
"""Characters from which a whole module makes a long row."""

LONG_EVERY = 12
"""One row in so many is a whole module, so that a capped corpus still has long rows."""

SPARE = 3
"""A capped corpus is drawn from so many times the short rows it needs: parsing the whole library takes seconds."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class _Module:
    """A parsed module of the standard library."""

    name: str
    """``json.decoder``"""
    file: str
    """``json/decoder.py``"""
    source: str
    tree: ast.Module


def stdlib_rows(*, max_rows: int | None = None, root: Path | None = None) -> Iterator[Row]:
    """Yield the corpus as rows of type ``messages``.

    Args:
        max_rows: Yield so many rows at most; one in twelve is a whole module with any cap.
        root: The library's folder; that of the running interpreter unless given.
    """
    short: list[Row] = []
    long: list[Row] = []
    wanted = math.inf if max_rows is None else max_rows
    for module in _modules(root or Path(sysconfig.get_path("stdlib"))):
        short.extend(_definition_rows(module))
        if LONG_FROM <= len(module.source) <= LONGEST:
            long.append(_module_row(module))
        if len(short) >= SPARE * wanted and len(long) * LONG_EVERY >= wanted:
            break
    short.sort(key=lambda row: _spread(row.origin))
    long.sort(key=lambda row: _spread(row.origin))
    return islice(_interleave(short, long), max_rows)


def _spread(name: str) -> bytes:
    """Return a sort key that mixes the library: in alphabetical order a capped corpus would end at c."""
    return hashlib.sha256(name.encode()).digest()


def _interleave(short: list[Row], long: list[Row]) -> Iterator[Row]:
    """Yield one long row in every twelve for as long as there are both kinds; then the rest."""
    rest_short, rest_long = iter(short), iter(long)
    while True:
        group = [*islice(rest_long, 1), *islice(rest_short, LONG_EVERY - 1)]
        if not group:
            return
        yield from group


def _modules(root: Path) -> Iterator[_Module]:
    """Yield every module below ``root`` that can be read and parsed, in a mixed order that is always the same."""
    for path in sorted(_files(root), key=lambda path: _spread(path.relative_to(root).as_posix())):
        relative = path.relative_to(root)
        try:
            with tokenize.open(path) as file:
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # old escape sequences in docstrings
                tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
            continue
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield _Module(name, relative.as_posix(), source, tree)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below ``folder``, without those in skipped folders."""
    for child in folder.iterdir():
        if child.is_dir():
            if child.name not in SKIPPED_FOLDERS:
                yield from _files(child)
        elif child.suffix == ".py":
            yield child


def _module_row(module: _Module) -> Row:
    summary = _first_paragraph(ast.get_docstring(module.tree))
    instruction = f"Write the module `{module.name}`."
    return _row(f"stdlib:{module.file}:1", f"{instruction}\n\n{summary}" if summary else instruction, module.source)


def _definition_rows(module: _Module) -> Iterator[Row]:
    """Yield one row for each documented function, class and method of a module."""
    lines = [f"{line}\n" for line in module.source.split("\n")]  # splitlines() would count form feeds as line breaks
    for qualified, node in _definitions(module.tree.body, ""):
        docstring = ast.get_docstring(node)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = _dedent(lines[first - 1 : node.end_lineno])
        if not docstring or not SHORTEST <= len(source) <= LONGEST:
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if "." in qualified else "function"
        header = _header(node)
        instruction = f"Write the {kind} `{qualified}` of the module `{module.name}`.\n\n{header}\n\n{docstring}"
        yield _row(f"stdlib:{module.file}:{first}", instruction, source)


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    """Yield the functions and classes of a module body, and the methods of its classes, with their qualified names."""
    for node in body:
        if isinstance(node, Definition):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{prefix}{node.name}.")


def _header(node: Definition) -> str:
    """Return the signature: ``def decode(self, s)`` or ``class Decoder(Base)``."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def _dedent(lines: list[str]) -> str:
    """Remove the first line's indentation from every line that has it."""
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "".join(line.removeprefix(indent) for line in lines).rstrip() + "\n"


def _first_paragraph(docstring: str | None) -> str:
    return (docstring or "").split("\n\n", maxsplit=1)[0].strip()


def _row(origin: str, instruction: str, response: str) -> Row:
    messages = [{"role": "user", "content": instruction}, {"role": "assistant", "content": response}]
    return Row(origin, {"messages": messages})
