"""Rooms stand in a line, and each imports only from rooms to its left; the command line starts without heavy libraries.

Read from the source with ``ast``, so imports inside functions and under ``TYPE_CHECKING`` count too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import streamtune
from streamtune.cli.programs import COMMANDS

PACKAGE = Path(streamtune.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

ORDER = (
    "__version__ errors base schedule ops | recipe | engine | data models | optim train | plan | distributed | tasks | "
    "run | integrations | cli | programs | __init__ __main__"
)
"""The rooms from left to right; no two are equal. ``__init__`` may import any room, and no room imports it."""
PROGRAMS = "imports probe verify bench export generate evaluate trackers report"
"""The programs from left to right, by the same rule."""
PLACE = {room: place for place, room in enumerate(ORDER.replace("|", "").split())}
PLACE |= {f"programs.{program}": PLACE["programs"] + place / 100 for place, program in enumerate(PROGRAMS.split(), 1)}
HEAVY = {"torch", "transformers", "datasets", "peft", "deepspeed", "matplotlib", "safetensors", "tokenizers", "numpy"}


def room_of(parts: tuple[str, ...]) -> str:
    """The room a module belongs to: ``("engine", "vjp")`` is in ``engine``; the package itself is ``__init__``."""
    if parts[:1] == ("programs",) and parts[1:] not in ((), ("__init__",)):
        return f"programs.{parts[1]}"
    return parts[0] if parts else "__init__"


@cache
def imported_modules(file: Path) -> list[tuple[int, str]]:
    """Line and absolute name of every module a file imports, relative imports resolved."""
    return list(_imported_modules(file))


def _imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    parent = ("streamtune", *file.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # "from streamtune import engine" imports the room engine
                inside = PACKAGE.parent / Path(*module.split("."), alias.name)
                is_module = module.startswith("streamtune") and (inside.is_dir() or inside.with_suffix(".py").exists())
                in_full = is_module or alias.name == "__version__"
                yield node.lineno, f"{module}.{alias.name}" if in_full else module


def rooms_imported(file: Path) -> Iterator[tuple[int, str]]:
    for line, module in imported_modules(file):
        package, *parts = module.split(".")
        if package == "streamtune":
            yield line, room_of(tuple(parts))


def test_a_room_imports_only_rooms_to_its_left() -> None:
    rooms = {file: room_of(file.relative_to(PACKAGE).with_suffix("").parts) for file in FILES}
    new = set(rooms.values()) - set(PLACE)
    assert new == set(), "give a new room a place in ORDER here and in docs/architecture.md"
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports {target}"
        for file, room in rooms.items()
        for line, target in rooms_imported(file)
        if target != room and PLACE.get(target, len(PLACE)) >= PLACE[room]
    ]
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    """Under ``TYPE_CHECKING`` neither. The packages' own files, which gather names, are left out."""
    modules = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in FILES}
    imports = {
        name: {target for _, target in imported_files(file, modules)} - {name}
        for name, file in modules.items()
        if not name.endswith("__init__")
    }
    knots = set()
    for start in imports:
        seen = reached(imports, start)
        if start in seen:
            knots.add(frozenset(name for name in seen if start in reached(imports, name)))
    assert knots == set()


def imported_files(file: Path, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    for line, module in imported_modules(file):
        name = module.removeprefix("streamtune.")
        if name in modules:
            yield line, name


def reached(imports: dict[str, set[str]], start: str) -> set[str]:
    seen, waiting = set[str](), list(imports.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += imports.get(name, ())
    return seen


def test_reading_recipes_and_schedules_needs_no_torch() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports {module}"
        for file in [*(PACKAGE / "recipe").rglob("*.py"), PACKAGE / "schedule.py"]
        for line, module in imported_modules(file)
        if module.partition(".")[0] in HEAVY
    ]
    assert wrong == []


READERS = [
    "cli/options.py",
    "cli/plan.py",
    "cli/recipes.py",
    "cli/training.py",
    "programs/bench/bench_command.py",
    "programs/bench/bench_recipe.py",
    "programs/evaluate/evaluate.py",
    "programs/evaluate/teach.py",
    "programs/export/source.py",
    "programs/imports/conversion.py",
    "programs/imports/importing.py",
    "programs/probe/probe_recipe.py",
    "programs/verify/verify_recipe.py",
    "run/build.py",
    "run/data.py",
    "run/plan.py",
    "run/plan_cache.py",
    "run/ranks.py",
    "run/start.py",
    "run/train.py",
    "tasks/dpo.py",
    "tasks/grpo/task.py",
    "tasks/sft.py",
    "tasks/task.py",
]
"""Files that read a whole recipe: commands, and the run and the tasks that they start."""


@pytest.mark.full
def test_other_files_read_the_settings_of_their_part() -> None:
    names = {"Recipe", "DpoRecipe", "GrpoRecipe", "LoadedRecipe"}
    found = []
    for file in FILES:
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        if imported & names and file.relative_to(PACKAGE).parts[0] != "recipe":
            found.append(file.relative_to(PACKAGE).as_posix())
    assert found == READERS, "take the settings of recipe/settings.py; a list that got shorter is written down here"


def test_only_runs_tasks_and_programs_see_a_recipe() -> None:
    """Everything else takes explicit arguments; and tasks are asked, not told apart."""
    wrong = []
    for file in FILES:
        room = room_of(file.relative_to(PACKAGE).with_suffix("").parts)
        if PLACE[room] < PLACE["tasks"] and room != "recipe":
            imported = [f"{line} imports {target}" for line, target in rooms_imported(file) if target == "recipe"]
            wrong += [f"{file.relative_to(PACKAGE)}:{where}" for where in imported]
        elif room in ("tasks", "run", "programs.probe", "programs.verify", "programs.bench"):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if re.search(r"isinstance\((\w+\.)*recipe\b|getattr\((\w+\.)*recipe\b(?!, key)", line):
                    wrong.append(f"{file.relative_to(PACKAGE)}:{number} asks for the kind of a recipe: {line.strip()}")
    assert wrong == []


LIGHT = ("--help", "--version", "validate --help", "sft --help", "verify --help", "recipes ls", "schema")
"""Commands that are there at once."""


def test_the_command_line_starts_without_heavy_libraries(tmp_path: Path) -> None:
    """One process for all of them: a library that one command loads is told with it and with those that follow."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: a/b\ndatasets: [{path: rows.jsonl}]\n")
    program = f"""
import json, sys
from streamtune.cli import main
for command in {(*LIGHT, f"validate {recipe}")!r}:
    try:
        main(command.split())
        code = 0
    except SystemExit as left:
        code = left.code or 0
    sys.stdout.flush()
    print("\\f", end="", flush=True)
    print(json.dumps([command, code, sorted({HEAVY!r} & set(sys.modules))]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *shown, _ = done.stdout.split("\f")
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(shown) == len(told) == len(LIGHT) + 1
    assert [text for text in shown if not text.strip()] == []
    assert [(code, heavy) for _, code, heavy in told] == [(0, [])] * len(told), told


def test_importing_the_package_loads_no_heavy_library() -> None:
    program = f"import sys, streamtune; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def names_of(module: Path) -> set[str]:
    """The names that a module has at its top level, as far as its text says."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found = {path.stem for path in module.parent.iterdir()} if module.name == "__init__.py" else set()
    for node in ast.walk(tree):  # also below `if TYPE_CHECKING` and `try`
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # names that a module gives on demand
    return found


@pytest.mark.full
def test_imports_of_tests_and_tools_resolve() -> None:
    """Types are checked in ``src/`` alone: a name that moved would be found by the one test that reads it."""
    roots = {"streamtune": PACKAGE, **{name: PACKAGE.parents[1] / name for name in ("tests", "tools", "benchmarks")}}
    wrong, names = [], cache(names_of)
    for file in [path for name, root in roots.items() if name != "streamtune" for path in root.rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level or str(node.module).partition(".")[0] not in roots:
                continue
            root, *parts = str(node.module).split(".")
            place = roots[root].joinpath(*parts)
            module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            missing = [alias.name for alias in node.names if not module.is_file() or alias.name not in names(module)]
            if missing and (module.is_file() or not place.is_dir()):
                wrong.append(f"{file.relative_to(PACKAGE.parents[1])}:{node.lineno}: {node.module} has no {missing}")
    assert wrong == []


IMPORT_FIRST = """
import os, sys
for module in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        __import__(module)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(module)
"""


@pytest.mark.full
def test_any_command_may_be_imported_first() -> None:
    """`streamtune` loads all commands, and they load parts of `streamtune.cli`: none may load the others."""
    modules = sorted({entry.partition(":")[0] for _, _, entry in COMMANDS})
    done = subprocess.run([sys.executable, "-c", IMPORT_FIRST, *modules], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
