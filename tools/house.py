"""Measure the code: rooms, lines, files, readers of recipes, long lists of parameters; one line a figure.

python -m tools.house

A line of code is one that is left without docstrings, comments, blank lines, imports and ``__all__``. The core is all
but ``programs/``.
"""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main"]

SOURCE = Path(__file__).parents[1] / "src" / "streamtune"
MANY = 6
"""Parameters of a function beyond which it has many."""


def main() -> None:
    """Print the figures."""
    files = sorted(SOURCE.rglob("*.py"))
    core = [path for path in files if path.relative_to(SOURCE).parts[0] != "programs"]
    rooms = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms = {name for name in rooms if not name.startswith("_") and name not in ("programs", "py.typed")}
    names = Counter(path.name for path in files if path.name != "__init__.py")
    figures = {
        "rooms of the core": len(rooms),
        "lines of code": sum(map(code_lines, files)),
        "lines of code in the core": sum(map(code_lines, core)),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        "files": len(files),
        "files outside recipe/ that read a recipe": len([path for path in files if reads_a_recipe(path)]),
        f"functions with more than {MANY} parameters": sum(len(list(long_functions(path))) for path in files),
        "file names that stand more than twice": len([name for name, count in names.items() if count > 2]),
    }
    for name, figure in figures.items():
        print(f"{name:<45} {figure:>7,}")
    print("\n" + ", ".join(f"{name} {count}" for name, count in names.most_common() if count > 2))


def code_lines(path: Path) -> int:
    """Return the number of lines that hold code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    with tokenize.open(path) as file:
        skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        held: set[int] = set()
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in (*skipped, tokenize.ENDMARKER):
                held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - {line for node in _not_code(tree) for line in range(node.lineno, (node.end_lineno or 0) + 1)})


def _not_code(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield imports, ``__all__`` and strings that stand by themselves: docstrings, also of names."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Import | ast.ImportFrom)
            or (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            )
            or (
                isinstance(node, ast.Assign)
                and any(isinstance(x, ast.Name) and x.id == "__all__" for x in node.targets)
            )
        ):
            yield node


def reads_a_recipe(path: Path) -> bool:
    """Return True if a file outside ``recipe/`` imports a class of recipes."""
    if path.relative_to(SOURCE).parts[0] == "recipe":
        return False
    wanted = {"Recipe", "DpoRecipe", "GrpoRecipe", "LoadedRecipe"}
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & wanted for node in nodes)


def long_functions(path: Path) -> Iterator[str]:
    """Yield the names of functions with more than :data:`MANY` parameters, without ``self`` and ``cls``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len([each for each in every if each.arg not in ("self", "cls")]) > MANY:
                yield node.name


if __name__ == "__main__":
    main()
