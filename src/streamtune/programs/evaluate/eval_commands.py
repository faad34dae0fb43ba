"""``streamtune eval`` and ``streamtune teach``: a run or a model on the rows of a recipe; a teacher's word on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.privacy import plain
from streamtune.base.text import show_size
from streamtune.cli.console import err, loading_libraries, make_table, out, print_json, print_note
from streamtune.cli.options import AllowCodeOption, JsonOption, RecipeArgument, SetOption, option, read_recipe
from streamtune.cli.plan_screen import bar
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.loss import TEACHER_FILE

DEPTHS = "0,25,50,75,100"


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run, or a folder with a model or adapters.")],
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Whose rows; by default the run's own recipe.")
    ] = None,
    checkpoint: Annotated[str | None, option("NAME|STEP", "A checkpoint of the run, such as step-000100.")] = None,
    split: Annotated[str, option("held-out|train|all", "The rows to score.")] = "held-out",
    max_rows: Annotated[int | None, option("N", "Score the first so many rows of a split.", least=1)] = None,
    needle: Annotated[
        bool, option(None, "Probe retrieval: hide a code in texts of the rows and ask for it.", "--needle")
    ] = False,
    needle_lengths: Annotated[
        str | None, option("N,N,...", "Tokens of its prompts; by default powers of two up to max_length.")
    ] = None,
    needle_depths: Annotated[str, option("X,X,...", f"Percent of the text before the code; {DEPTHS}.")] = DEPTHS,
    needle_trials: Annotated[int, option("N", "Trials of each length and depth; 3 by default.", least=1)] = 3,
    lm_eval: Annotated[
        str | None, option("TASK,...", "Run tasks of lm-evaluation-harness, by name or YAML file, where installed.")
    ] = None,
    output: Annotated[
        Path | None, option("DIR", "Write eval.json and pictures there, and not to RUN/eval; it must be new or empty.")
    ] = None,
    set_: SetOption = None,
    allow_code: AllowCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a trained model, streamed and without gradients.

    Loss by dataset and by position (sft), preference accuracy and margins (dpo), rewards (grpo), on held-out rows.
    """
    lengths = tuple(_whole(part) for part in _parts(needle_lengths))
    depths = tuple(_percent(part) for part in _parts(needle_depths))
    if (needle_lengths is not None or needle_depths != DEPTHS) and not needle:
        raise ArgumentError("there is no needle probe", where="--needle-lengths", fix="add --needle")
    if not model.is_dir():
        raise ArgumentError(f"there is no folder {model}", fix="name a run, or a folder with a model or adapters")
    path = recipe or _own_recipe(model)
    if path is None:
        raise ArgumentError(f"{model} is no run with a recipe.yaml", fix="name a recipe as second argument")
    tasks = tuple(_parts(lm_eval))
    loaded = read_recipe(path, [*(set_ or []), *(["allow_code=true"] if allow_code else [])], connects=bool(tasks))
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(f"{output} exists and is not empty", where="--output", fix="give a new folder")
    with loading_libraries():
        from streamtune.programs.evaluate.eval_files import check_folder, write_results
        from streamtune.programs.evaluate.evaluate import EvalOptions, Feedback, evaluate_model
        from streamtune.programs.evaluate.needle import NeedleOptions
        from streamtune.programs.export.source import find_trained
    for note in loaded.notes if recipe is not None else ():  # a run's own recipe has all defaults written out
        print_note(note)
    trained = find_trained(str(model), checkpoint=checkpoint, notify=print_note)
    folder = output
    if folder is None and (model / "run.json").is_file():
        folder = model / "eval" if checkpoint is None else model / "eval" / f"step-{trained.step:06d}"
    if folder is not None:
        check_folder(folder)
    options = EvalOptions(
        split=split,
        max_rows=max_rows,
        needle=NeedleOptions(lengths=lengths, depths=depths, trials=needle_trials) if needle else None,
        lm_eval=tasks,
    )
    with err.status("evaluating") as status:

        def progress(name: str, done: int, total: int) -> None:
            status.update(f"evaluating: {done:,} of {total:,} {name}")

        found = evaluate_model(loaded, trained, options, Feedback(notify=print_note, progress=progress))
    written = write_results(folder, found, title=str(model)) if folder is not None else []
    if as_json:
        print_json(found)
        return
    print_evaluation(found)
    if written:
        others = "".join(f", {path.name}" for path in written[1:])
        out.print(f"{written[0]}{others}", soft_wrap=True, markup=False)


def _own_recipe(model: Path) -> Path | None:
    """Return the recipe of a run, given the run, its model or a checkpoint; else None."""
    here = model.resolve()
    for folder in (here, *list(here.parents)[:3]):
        if (folder / "run.json").is_file() and (folder / "recipe.yaml").is_file():
            return model / "recipe.yaml" if folder == here else folder / "recipe.yaml"
    return None


def _parts(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"'{text}' is no number of tokens", where="--needle-lengths", fix="write 1024,4096")
    return int(text)


def _percent(text: str) -> float:
    try:
        value: Any = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ArgumentError(f"'{text}' is no depth", where="--needle-depths", fix="write percents: 0,50,100")
    return float(value)


# --- the screen -------------------------------------------------------------------------------------------------------


BAR = 16
"""Columns of the longest bar"""


def print_evaluation(found: Mapping[str, Any]) -> None:
    for split, part in found["splits"].items():
        if "positions" in part:
            _print_losses(split, part)
        else:
            _print_metrics(split, part)
    if found.get("needle"):
        _print_needles(found["needle"])
    if found.get("lm_eval"):
        _print_harness(found["lm_eval"])


def _print_losses(split: str, part: Mapping[str, Any]) -> None:
    from streamtune.programs.evaluate.eval_scores import context_sentence

    columns = ("tokens", "loss", "+-", "perplexity")
    table = _table(f"{split}, by set", *columns)
    for row in [*part["sets"], {"name": "all", **part}]:
        table.add_row(plain(row["name"]), f"{row['tokens']:,}", *map(_number, _figures(row)))
    _show(table)
    table = _table(f"{split}, by position", *columns, Column("lowest to highest", no_wrap=True))
    losses = [row["loss"] for row in part["positions"]]
    for row in part["positions"]:
        name = f"{row['from']:,} to {row['to'] - 1:,}"
        table.add_row(name, f"{row['tokens']:,}", *map(_number, _figures(row)), _bar(row["loss"], losses))
    _show(table)
    out.print(Text(context_sentence(part["context"])))
    out.print()


def _print_metrics(split: str, part: Mapping[str, Any]) -> None:
    """Print each metric with its standard error, and a column for each of several sets."""
    sets = part["sets"] if len(part["sets"]) > 1 else []
    table = _table(f"{split}, {part['rows']:,} rows", "mean", "+-", *(plain(each["name"]) for each in sets))
    for name, figure in part["metrics"].items():
        own = [_number(each["metrics"].get(name, {}).get("mean")) for each in sets]
        table.add_row(plain(name), _number(figure["mean"]), _number(figure["standard_error"]), *own)
    _show(table)


def _print_needles(found: Mapping[str, Any]) -> None:
    cells = {(cell["length"], cell["depth"]): cell for cell in found["cells"]}
    table = _table("needle, by depth and length", *(f"{length:,}" for length in found["lengths"]))
    for depth in found["depths"]:
        row = [cells[length, depth] for length in found["lengths"]]
        shown = [f"{each['matched']}/{each['trials']} {round(each['gain'], 2) + 0.0:+.2f}" for each in row]
        table.add_row(f"{depth:g}%", *shown)
    _show(table)
    out.print(Text("Answers that match, and nats that the needle adds to the log-prob of an answer's token."))
    out.print()


def _print_harness(found: Mapping[str, Any]) -> None:
    table = _table("lm-evaluation-harness", "figure", "value")
    for task, figures in found.items():
        for name, value in figures.items():
            table.add_row(plain(task), plain(name), _number(value) if isinstance(value, float) else json.dumps(value))
    _show(table)


def _table(title: str, *columns: Column | str) -> Table:
    return make_table(Column(title, overflow="fold"), *columns)


def _show(table: Table) -> None:
    out.print(table)
    out.print()


def _bar(value: float, values: Sequence[float]) -> str:
    """Return a bar between 1 column for the lowest of ``values`` and :data:`BAR` columns for the highest."""
    low, high = min(values), max(values)
    part = (1 + (BAR - 1) * (value - low) / ((high - low) or 1.0)) / BAR
    if not out.encoding.lower().startswith("utf"):
        return "#" * round(part * BAR)
    return bar(part, BAR)


def _figures(row: Mapping[str, Any]) -> Sequence[float | None]:
    return [row["loss"], row["standard_error"], row["perplexity"]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def teach(
    recipe: RecipeArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT", help=f"The file to write, NAME{TEACHER_FILE}.")],
    top_k: Annotated[int, option("K", "Tokens of each target; 64 by default.", least=1)] = 64,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the likeliest next tokens of a recipe's teacher at each token that is trained on.

    A run with this file as its teacher learns from them without the model: --set teacher=OUT.
    """
    if not output.name.endswith(TEACHER_FILE):
        raise ArgumentError(
            f"the name {output.name} does not end in {TEACHER_FILE}", where="OUT", fix=f"write {output}{TEACHER_FILE}"
        )
    if output.exists():
        raise ArgumentError(f"{output} is there already", where="OUT", fix="give another name, or remove it")
    if not output.absolute().parent.is_dir():
        raise ArgumentError(f"there is no folder {output.parent}", where="OUT", fix="make it first")
    loaded = read_recipe(recipe, set_)
    with loading_libraries():
        from streamtune.programs.evaluate.evaluate import Feedback
        from streamtune.programs.evaluate.teach import teach as ask
    for note in loaded.notes:
        print_note(note)
    with err.status("asking the teacher") as status:

        def progress(name: str, done: int, total: int) -> None:
            status.update(f"asking the teacher: {done:,} of {total:,} {name}")

        found = ask(loaded, output, top_k=top_k, feedback=Feedback(notify=print_note, progress=progress))
    if as_json:
        print_json(found)
        return
    out.print(
        f"{output}: {found['k']} likeliest tokens of {found['teacher']} at {found['targets']:,} targets of "
        f"{int(found['rows']):,} rows, {show_size(found['bytes'])}",
        soft_wrap=True,
        markup=False,
    )
    out.print(f"learn from it: --set teacher={output}", soft_wrap=True, markup=False)
