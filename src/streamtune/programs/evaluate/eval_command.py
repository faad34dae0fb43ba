"""``streamtune eval``: a run or a model on the rows of a recipe: losses, preferences, rewards, needles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from streamtune.cli.console import err, loading_libraries, out, print_json, print_note
from streamtune.cli.options import JsonOption, SetOption, option, read_recipe
from streamtune.cli.training import AllowCodeOption
from streamtune.errors import ArgumentError
from streamtune.programs.evaluate.eval_tables import print_evaluation

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
        raise ArgumentError("there is no needle probe", where="--needle-lengths", mend="add --needle")
    if not model.is_dir():
        raise ArgumentError(f"there is no folder {model}", mend="name a run, or a folder with a model or adapters")
    path = recipe or _own_recipe(model)
    if path is None:
        raise ArgumentError(f"{model} is no run with a recipe.yaml", mend="name a recipe as second argument")
    tasks = tuple(_parts(lm_eval))
    loaded = read_recipe(path, [*(set_ or []), *(["allow_code=true"] if allow_code else [])], connects=bool(tasks))
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(f"{output} exists and is not empty", where="--output", mend="give a new folder")
    with loading_libraries():
        from streamtune.programs.evaluate.evaluate import EvalOptions, Feedback, evaluate_model
        from streamtune.programs.evaluate.needle import NeedleOptions
        from streamtune.programs.evaluate.results import check_folder, write_results
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
    """Return the recipe of a run, also of one whose model or checkpoint is named; None where there is none."""
    here = model.resolve()
    for folder in (here, *list(here.parents)[:3]):
        if (folder / "run.json").is_file() and (folder / "recipe.yaml").is_file():
            return model / "recipe.yaml" if folder == here else folder / "recipe.yaml"
    return None


def _parts(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _whole(text: str) -> int:
    """Return a number of tokens.

    Raises:
        ArgumentError: It is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"'{text}' is no number of tokens", where="--needle-lengths", mend="write 1024,4096")
    return int(text)


def _percent(text: str) -> float:
    """Return a depth from 0 to 100.

    Raises:
        ArgumentError: It is none.
    """
    try:
        value: Any = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ArgumentError(f"'{text}' is no depth", where="--needle-depths", mend="write percents: 0,50,100")
    return float(value)
