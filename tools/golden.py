"""Write down all that users see of a commit, to compare it with another: what a change of the house may not change.

python -m tools.golden FOLDER                 # everything, half an hour
python -m tools.golden FOLDER help refusals   # some of it, a minute or two
diff -r FOLDER OTHER_FOLDER                   # of another commit, made on the same machine

  help       `--help` of every command, 80 columns
  documents  schema, lists of recipes and optimizers, a recipe validated, all shipped recipes as they are read
  refusals   what is said of every key with a wrong value, and of every pair of options of the support matrix
  runs       every file of short runs of sft, dpo and grpo, by SHA-256; times in records are left out
  plans      what the shipped recipes of a device are planned to take, and the schedules
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamtune.errors import UserError
from streamtune.recipe import RECIPES, json_schema, load_recipe, shipped_recipes
from streamtune.recipe.mistakes import mistakes_from_validation
from streamtune.recipe.yaml import show_path

from .recipe_headers import command_of, planned_recipes
from .support_matrix import recipe_of
from .support_options import GROUPS, Option

__all__ = ["PARTS", "main"]

WRONG: tuple[Any, ...] = ("no-such-value", -1, 2.5, True, [], {}, {"no_such_key": 1}, "")
"""Values that most keys refuse."""
MEASURED = {"seconds", "tokens_per_s", "mfu", "peak_mem_gib", "time"}
"""Keys of records whose values differ from run to run."""


def main() -> None:
    """Write the parts that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tools.golden", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; without one, all")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(PARTS)}")
    folder = options.folder.resolve()
    for name in options.parts or PARTS:
        for file, text in PARTS[name]():
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text(text, encoding="utf-8")
        print(f"{name}: {sum(1 for _ in (folder / name).rglob('*'))} files")


def _help() -> Iterator[tuple[str, str]]:
    import typer.main

    from streamtune.cli.app import app

    def commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, command in sorted(getattr(group, "commands", {}).items()):
            yield from commands(command, (*path, name))

    for path in commands(typer.main.get_command(app), ()):
        yield f"{'-'.join(path) or 'streamtune'}.txt", _command(*path, "--help")


def _documents() -> Iterator[tuple[str, str]]:
    yield "schema.json", json.dumps(json_schema(), indent=1)
    for words in (["recipes", "ls", "--json"], ["optim", "--json"], ["validate", "quickstart", "--json"]):
        yield f"{'-'.join(words)}.txt", _command(*words)
    for shipped in shipped_recipes():
        yield f"recipes/{shipped.name}.json", load_recipe(shipped.name).recipe.model_dump_json(indent=1)


def _refusals() -> Iterator[tuple[str, str]]:
    for objective, kind in RECIPES.items():
        keys = {f"{key}: {json.dumps(value)}": {key: value} for key in kind.model_fields for value in WRONG}
        yield (
            f"keys-{objective}.txt",
            "".join(f"{name}\n{_told(objective, (Option(name, given),))}" for name, given in keys.items()),
        )
        options = [option for name, group in GROUPS.items() if name != "objectives" for option in group]
        pairs = [(option,) for option in options] + list(combinations(options, 2))
        yield (
            f"pairs-{objective}.txt",
            "".join(f"{' + '.join(option.name for option in pair)}\n{_told(objective, pair)}" for pair in pairs),
        )


def _told(objective: str, options: tuple[Option, ...]) -> str:
    """Return everything that is wrong with a recipe, a line each; nothing where it is accepted."""
    tree, kind = recipe_of(objective, options), RECIPES[objective]
    try:
        kind.model_validate(tree)
    except ValidationError as error:
        return "".join(
            f"    {show_path(each.path)}: {each.what} | {each.fix}\n"
            for each in mistakes_from_validation(error, tree, kind)
        )
    except UserError as error:
        return f"    {error.where}: {error.what} | {error.fix}\n"
    return ""


SHORT = ("max_length=1024", "overlength=drop", "max_steps=3")
RUNS: dict[str, list[str]] = {
    "sft": ["quickstart", *SHORT, "save_steps=2"],
    "lora": ["quickstart", *SHORT, "save_steps=2", "finetuning_type=lora"],
    "dora": ["quickstart", *SHORT, "finetuning_type=lora", "adapter_type=dora"],
    "muon": ["quickstart", *SHORT, "optim=muon", "optim_in_backward=true"],
    "host": ["quickstart", *SHORT, "weights=host"],
    "packed": ["quickstart", *SHORT, "packing=true"],
    "dpo": ["quickstart_dpo", "max_steps=3", "save_steps=2"],
    "grpo": ["quickstart_grpo", "max_steps=3", "save_steps=2"],
}
"""Name -> the recipe and what is set in it."""


def _runs() -> Iterator[tuple[str, str]]:
    for name, (recipe, *settings) in RUNS.items():
        with tempfile.TemporaryDirectory() as place:
            objective = load_recipe(recipe).recipe.objective
            changes = [word for setting in [*settings, "output_dir=run", "sample=null"] for word in ("--set", setting)]
            shown = _command(objective, recipe, *changes, cwd=Path(place))
            files = sorted(path for path in Path(place).rglob("*") if path.is_file())
            lines = [f"{path.relative_to(place)} {_digest(path, place)}\n" for path in files if path.name != ".lock"]
        yield f"{name}.txt", "".join(lines) or shown


def _digest(path: Path, place: str) -> str:
    """Return the SHA-256 of a file; of records, without what is measured; of files that hold times, nothing."""
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{key: value for key, value in record.items() if not _is_measured(key)} for record in records]
        return " ".join(sorted({key for record in kept for key in record})) + " " + _sha(json.dumps(kept).encode())
    if path.name in {"manifest.json", "run.json", "environment.json", "report.html", "plan.json", "loss.png"}:
        return "not compared"
    if path.suffix == ".json" and "checkpoints" in path.parts and path.parent.name != "model":
        return " ".join(sorted(json.loads(path.read_text())))
    content = path.read_bytes().replace(place.encode(), b"")
    return _sha(content.replace(str(Path(__file__).parents[1]).encode(), b""))


def _is_measured(key: str) -> bool:
    return key in MEASURED or key.endswith("_seconds")


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _plans() -> Iterator[tuple[str, str]]:
    from streamtune.run.plan import PlanOptions, plan_recipe

    from .model_shapes import write_shape

    for shipped in planned_recipes():
        with tempfile.TemporaryDirectory() as place:
            shape = write_shape(str(load_recipe(shipped.path).recipe.model_name_or_path), Path(place))
            with contextlib.redirect_stderr(io.StringIO()):
                found = plan_recipe(
                    load_recipe(shipped.path, [f"model_name_or_path={shape}"]), PlanOptions(**command_of(shipped))
                )
            figures = {
                "schedule": found.plan.schedule,
                "seconds": found.plan.step_seconds,
                **vars(found.plan.simulation),
            }
            text = "".join(f"{key}: {value!r}\n" for key, value in figures.items())
        yield f"{shipped.name}.txt", text.replace(place, "")


def _command(*words: str, cwd: Path | None = None) -> str:
    """Return what a command prints, 80 columns wide, in a process of its own."""
    command = [sys.executable, "-m", "streamtune", *words]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "COLUMNS": "80", "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + (done.stderr if done.returncode else "")


PARTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "help": _help,
    "documents": _documents,
    "refusals": _refusals,
    "runs": _runs,
    "plans": _plans,
}

if __name__ == "__main__":
    main()
