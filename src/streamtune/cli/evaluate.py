"""``streamtune eval``: loss of a run or a model on the rows of a recipe, by named set and by position."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from streamtune.cli.options import read_recipe
from streamtune.errors import ArgumentError

from .console import err, out, print_json, print_note
from .options import JsonOption, SetOption, option

__all__ = ["evaluate"]


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run, or a folder with a model or adapters.")],
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Whose rows; by default the run's own recipe.")
    ] = None,
    checkpoint: Annotated[str | None, option("NAME", "A checkpoint of the run, such as step-000100.")] = None,
    split: Annotated[str, option("held-out|train|all", "The rows to score.")] = "held-out",
    max_rows: Annotated[int | None, option("N", "Score the first so many rows of a split.", least=1)] = None,
    output: Annotated[Path | None, option("DIR", "Write eval.json there; it must be new or empty.")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute loss and perplexity of a trained model, by dataset and by position in the row. Streamed, no gradients."""
    folder, run = _find_model(model, checkpoint)
    path = recipe or (run / "recipe.yaml" if run is not None else None)
    if path is None:
        raise ArgumentError(f"{model} is no run with a recipe.yaml", mend="name a recipe as second argument")
    loaded = read_recipe(path, set_ or [])
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(f"{output} exists and is not empty", where="--output", mend="give a new folder")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    with err.status("loading libraries"):
        from streamtune.evaluate.evaluate import evaluate_model
        from streamtune.train.staging import write_durably
    with err.status("evaluating") as status:

        def rows_done(done: int, rows: int) -> None:
            status.update(f"evaluating: {done:,} of {rows:,} rows")

        found = evaluate_model(loaded, folder, split=split, max_rows=max_rows, notify=print_note, rows_done=rows_done)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_durably(output / "eval.json", json.dumps(found, indent=2) + "\n")
    if as_json:
        print_json(found)
    else:
        _print(found)


def _find_model(model: Path, checkpoint: str | None) -> tuple[Path, Path | None]:
    """Return the folder of the model, and the run it is of, if it is a run's."""
    if not model.is_dir():
        raise ArgumentError(f"there is no folder {model}", mend="name a run, or a folder with a model or adapters")
    run = model if (model / "recipe.yaml").is_file() else None
    if run is None:
        if checkpoint is not None:
            raise ArgumentError(f"{model} is no run", where="--checkpoint", mend="name a run's output_dir")
        return model, None
    folder = run / "final" if checkpoint is None else run / "checkpoints" / checkpoint / "model"
    if not folder.is_dir():
        raise ArgumentError(f"there is no {folder}", mend="name a checkpoint with --checkpoint step-000100")
    return folder, run


def _print(found: dict[str, Any]) -> None:
    for split, part in found["splits"].items():
        for title, rows in (("set", part["sets"]), ("position", part["positions"])):
            table = Table(box=None, header_style="bold", pad_edge=False)
            table.add_column(f"{split}, by {title}", overflow="fold")
            for name in ("tokens", "loss", "+-", "perplexity"):
                table.add_column(name, justify="right")
            for row in [*rows, {"name": "all", **part}] if title == "set" else rows:
                name = row["name"] if "name" in row else f"{row['from']:,} to {row['to'] - 1:,}"
                table.add_row(name, f"{row['tokens']:,}", *map(_number, _figures(row)))
            out.print(table)
            out.print()


def _figures(row: dict[str, Any]) -> list[float | None]:
    return [row["loss"], row["standard_error"], row["perplexity"]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
