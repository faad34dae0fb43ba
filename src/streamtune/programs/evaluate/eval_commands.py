"""Commands ``streamtune eval`` (score a model) and ``streamtune teach`` (save a teacher's top-k log-probabilities)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.privacy import safe_text
from streamtune.base.text import show_size
from streamtune.cli.console import err, loading_libraries, make_table, out, print_json, print_labelled, print_note
from streamtune.cli.options import AllowCodeOption, JsonOption, RecipeArgument, SetOption, option, read_recipe
from streamtune.cli.plan_screen import draw_bar
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.loss import TEACHER_FILE

DEPTHS = "0,25,50,75,100"


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run, or a folder with a model or adapters.")],
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe whose rows are scored. [default: the run's]")
    ] = None,
    checkpoint: Annotated[
        str | None,
        option(
            "NAME|STEP", "Checkpoint of the run to evaluate, such as step-000100 or 100. [default: the final model]"
        ),
    ] = None,
    split: Annotated[
        str,
        option(
            "held-out|train|all",
            "Rows to score: held-out (val_size and eval_datasets), train, or all for both. [default: held-out]",
        ),
    ] = "held-out",
    max_rows: Annotated[
        int | None,
        option(
            "N",
            "Maximum number of rows to score, from the start of each split, of each set of eval_datasets, and of each "
            "task of --lm-eval. [default: all rows]",
            min_value=1,
        ),
    ] = None,
    needle: Annotated[
        bool,
        option(
            None,
            "Also test retrieval (needle in a haystack): hide a random code in text from the rows, and ask the model "
            "for it.",
            "--needle",
        ),
    ] = False,
    needle_lengths: Annotated[
        str | None,
        option(
            "N,N,...",
            "With --needle: lengths of prompt plus answer to test, in tokens. [default: powers of two up to "
            "max_length]",
        ),
    ] = None,
    needle_depths: Annotated[
        str,
        option(
            "X,X,...",
            f"With --needle: positions of the code, as the percentage of the text before it. [default: {DEPTHS}]",
        ),
    ] = DEPTHS,
    needle_trials: Annotated[
        int,
        option("N", "With --needle: number of prompts to test for each length and depth. [default: 3]", min_value=1),
    ] = 3,
    lm_eval: Annotated[
        str | None,
        option(
            "TASK,...",
            "Also run these tasks of lm-evaluation-harness: names or YAML files, separated by commas. It must be "
            "installed (pip install lm-eval).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "DIR",
            "Folder for eval.json and plots, which must be new or empty. [default: RUN/eval, if the model is "
            "given as a run directory; otherwise no files]",
        ),
    ] = None,
    set_: SetOption = None,
    allow_code: AllowCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a trained model on the held-out rows of a recipe.

    Reports loss by dataset and by position in the row (sft), accuracy and margins of preferences (dpo), or rewards
    (grpo). The model is streamed and computes no gradients.
    """
    lengths = tuple(_parse_length(part) for part in _split_commas(needle_lengths))
    depths = tuple(_parse_percent(part) for part in _split_commas(needle_depths))
    if (needle_lengths is not None or needle_depths != DEPTHS) and not needle:
        raise ArgumentError(
            "--needle-lengths and --needle-depths need --needle", where="--needle-lengths", fix="add --needle"
        )
    if not model.is_dir():
        raise ArgumentError(f"there is no folder {model}", fix="give a run, or a folder with a model or adapters")
    path = recipe or _run_recipe_path(model)
    if path is None:
        raise ArgumentError(f"{model} is not a run with a recipe.yaml", fix="give a recipe as second argument")
    tasks = tuple(_split_commas(lm_eval))
    loaded = read_recipe(path, [*(set_ or []), *(["allow_code=true"] if allow_code else [])], uses_hub=bool(tasks))
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArgumentError(f"{output} exists and is not empty", where="--output", fix="give a new folder")
    with loading_libraries():
        from streamtune.programs.evaluate.eval_files import check_output_folder, write_results
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
        check_output_folder(folder)
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
        out.print(f"written: {written[0]}{others}", soft_wrap=True, markup=False)
    following = shlex.join(
        ["streamtune", "generate", str(model), *(["--checkpoint", checkpoint] if checkpoint else [])]
    )
    print_labelled(Text("Next: ", style="bold"), Text(following))


def _run_recipe_path(model: Path) -> Path | None:
    """Return ``recipe.yaml`` of the run in the folder ``model`` or one of its three parents; None without a run."""
    here = model.resolve()
    for folder in (here, *list(here.parents)[:3]):
        if (folder / "run.json").is_file() and (folder / "recipe.yaml").is_file():
            return model / "recipe.yaml" if folder == here else folder / "recipe.yaml"
    return None


def _split_commas(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _parse_length(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(
            f"lengths must be numbers of tokens, found '{text}'", where="--needle-lengths", fix="write 1024,4096"
        )
    return int(text)


def _parse_percent(text: str) -> float:
    try:
        value: Any = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ArgumentError(
            f"depths must be percentages from 0 to 100, found '{text}'", where="--needle-depths", fix="write 0,50,100"
        )
    return float(value)


# --- the screen -------------------------------------------------------------------------------------------------------


NEEDLE_TITLE = "needle, by depth and length"
BAR = 16
"""Width of the longest bar, in characters."""


def print_evaluation(results: Mapping[str, Any]) -> None:
    """Print one line of results for each split and test, then tables.

    Args:
        results: Return value of :func:`streamtune.programs.evaluate.evaluate.evaluate_model`.
    """
    for split, part in results["splits"].items():
        print_labelled(Text(f"{split}: ", style="bold"), Text(_describe_split(part)))
    if results.get("needle"):
        print_labelled(Text("needle: ", style="bold"), Text(_describe_needles(results["needle"])))
    out.print()
    for split, part in results["splits"].items():
        if "positions" in part:
            _print_losses(split, part)
        else:
            _print_metrics(split, part)
    if results.get("needle"):
        _print_needles(results["needle"])
    if results.get("lm_eval"):
        _print_harness(results["lm_eval"])


def _describe_split(split_results: Mapping[str, Any]) -> str:
    if "positions" in split_results:
        error = (
            ""
            if split_results["standard_error"] is None
            else f" +- {_show_number(split_results['standard_error'])} (standard error)"
        )
        tokens = f"{split_results['tokens']:,} trained tokens of {split_results['rows']:,} rows"
        loss = f"loss {_show_number(split_results['loss'])}{error} nats per token"
        return f"{loss}, perplexity {_show_number(split_results['perplexity'])}; {tokens}"
    means = [
        f"{name} {_show_number(split_results['metrics'][name]['mean'])}"
        for name in ("loss", "rewards/accuracies", "reward")
        if name in split_results["metrics"]
    ]
    return f"{', '.join(means)}; {split_results['rows']:,} rows"


def _describe_needles(needle_results: Mapping[str, Any]) -> str:
    cells = needle_results["cells"]
    matched, trials = sum(cell["matched"] for cell in cells), sum(cell["trials"] for cell in cells)
    lengths = f"{min(needle_results['lengths']):,} to {max(needle_results['lengths']):,} tokens"
    return f"hidden code found in {matched:,} of {trials:,} prompts by greedy decoding; lengths {lengths}"


def _print_losses(split: str, split_results: Mapping[str, Any]) -> None:
    from streamtune.programs.evaluate.eval_scores import describe_context_gain

    columns = ("tokens", "loss", "+-", "perplexity")
    table = _make_table(f"{split}, by set", *columns)
    for row in [*split_results["sets"], {"name": "all", **split_results}]:
        table.add_row(safe_text(row["name"]), f"{row['tokens']:,}", *map(_show_number, _loss_cells(row)))
    _print_indented_table(table)
    table = _make_table(f"{split}, by position", *columns, Column("lowest to highest", no_wrap=True))
    losses = [row["loss"] for row in split_results["positions"]]
    for row in split_results["positions"]:
        name = f"{row['from']:,} to {row['to'] - 1:,}"
        table.add_row(
            name, f"{row['tokens']:,}", *map(_show_number, _loss_cells(row)), _draw_value_bar(row["loss"], losses)
        )
    _print_indented_table(table)
    out.print(Text(describe_context_gain(split_results["context"])))
    out.print()


def _print_metrics(split: str, split_results: Mapping[str, Any]) -> None:
    sets = split_results["sets"] if len(split_results["sets"]) > 1 else []
    first = (
        max([len(safe_text(name)) for name in split_results["metrics"]] + [20]) + 24
    )  # also the columns of mean and error
    for number, group in enumerate(
        _group_fitting_columns([safe_text(each["name"]) for each in sets], first) or [range(0)]
    ):
        shown = [sets[index] for index in group]
        totals = ("mean", "+-") if number == 0 else ()
        table = _make_table(
            f"{split}, {split_results['rows']:,} rows", *totals, *(safe_text(each["name"]) for each in shown)
        )
        for name, figure in split_results["metrics"].items():
            own = [_show_number(each["metrics"].get(name, {}).get("mean")) for each in shown]
            total = [_show_number(figure["mean"]), _show_number(figure["standard_error"])] if number == 0 else []
            table.add_row(safe_text(name), *total, *own)
        _print_indented_table(table)


def _print_needles(needle_results: Mapping[str, Any]) -> None:
    cells = {(cell["length"], cell["depth"]): cell for cell in needle_results["cells"]}
    names = [f"{length:,} tokens" for length in needle_results["lengths"]]
    for group in _group_fitting_columns(names, len(NEEDLE_TITLE)):
        lengths = [needle_results["lengths"][index] for index in group]
        table = _make_table(NEEDLE_TITLE, *(names[index] for index in group))
        for depth in needle_results["depths"]:
            row = [cells[length, depth] for length in lengths]
            shown = [f"{each['matched']}/{each['trials']} {round(each['gain'], 2) + 0.0:+.2f}" for each in row]
            table.add_row(f"{depth:g}%", *shown)
        _print_indented_table(table)
    out.print(
        Text(
            "Each cell: greedy answers that begin with the code / all answers, then the gain in log-probability per "
            "answer token (nats) from the needle in the prompt."
        )
    )
    out.print()


def _group_fitting_columns(column_names: Sequence[str], first_width: int) -> list[range]:
    """Return consecutive ranges of column indices, each as many columns as fit on the screen.

    Every range leaves room for a first column of ``first_width`` characters.
    """
    groups: list[range] = []
    start, used = 0, first_width
    for index, name in enumerate(column_names):
        width = max(len(name), 10) + 2
        if index > start and used + width > out.width:
            groups.append(range(start, index))
            start, used = index, first_width
        used += width
    return [*groups, range(start, len(column_names))] if column_names else groups


def _print_harness(harness_results: Mapping[str, Any]) -> None:
    table = _make_table("lm-evaluation-harness", "figure", "value")
    for task, figures in harness_results.items():
        for name, value in figures.items():
            table.add_row(
                safe_text(task), safe_text(name), _show_number(value) if isinstance(value, float) else json.dumps(value)
            )
    _print_indented_table(table)


def _make_table(title: str, *columns: Column | str) -> Table:
    return make_table(Column(title, overflow="fold"), *columns)


def _print_indented_table(table: Table) -> None:
    out.print(table)
    out.print()


def _draw_value_bar(value: float, values: Sequence[float]) -> str:
    """Return a bar: 1 character for the lowest of ``values``, :data:`BAR` characters for the highest."""
    low, high = min(values), max(values)
    part = (1 + (BAR - 1) * (value - low) / ((high - low) or 1.0)) / BAR
    if not out.encoding.lower().startswith("utf"):
        return "#" * round(part * BAR)
    return draw_bar(part, BAR)


def _loss_cells(row: Mapping[str, Any]) -> Sequence[float | None]:
    return [row["loss"], row["standard_error"], row["perplexity"]]


def _show_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def teach(
    recipe: RecipeArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT", help=f"File to write; its name must end in {TEACHER_FILE}.")],
    top_k: Annotated[
        int,
        option(
            "K",
            "Number of most probable tokens of the teacher that are saved at each trained token. [default: 64]",
            min_value=1,
        ),
    ] = 64,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Save the teacher's top-k log-probabilities at each trained token of the recipe's rows, for offline distillation.

    A run with `--set teacher=OUT` distils from this file without loading the teacher model.
    """
    if not output.name.endswith(TEACHER_FILE):
        raise ArgumentError(
            f"the file name must end in {TEACHER_FILE}, found {output.name}",
            where="OUT",
            fix=f"write {output}{TEACHER_FILE}",
        )
    if output.exists():
        raise ArgumentError(f"{output} already exists", where="OUT", fix="give another name, or remove it")
    if not output.absolute().parent.is_dir():
        raise ArgumentError(f"there is no folder {output.parent}", where="OUT", fix="create it first")
    loaded = read_recipe(recipe, set_)
    with loading_libraries():
        from streamtune.programs.evaluate.evaluate import Feedback
        from streamtune.programs.evaluate.teach import teach as ask
    for note in loaded.notes:
        print_note(note)
    with err.status("running the teacher model") as status:

        def progress(name: str, done: int, total: int) -> None:
            status.update(f"running the teacher model: {done:,} of {total:,} {name}")

        found = ask(loaded, output, top_k=top_k, feedback=Feedback(notify=print_note, progress=progress))
    if as_json:
        print_json(found)
        return
    out.print(
        f"written: {output}, {show_size(found['bytes'])}; top {found['k']} tokens of {found['teacher']} for each of "
        f"{found['targets']:,} trained tokens in {int(found['rows']):,} rows",
        soft_wrap=True,
        markup=False,
    )
    options = [part for setting in [*(set_ or []), f"teacher={output}"] for part in ("--set", setting)]
    print_labelled(Text("Next: ", style="bold"), Text(shlex.join(["streamtune", "sft", str(recipe), *options])))
