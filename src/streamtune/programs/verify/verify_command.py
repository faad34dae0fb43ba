"""Command ``streamtune verify``: compare streamed gradients with plain autograd's gradients, for a recipe."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.adapters import base_of
from streamtune.cli.console import (
    err,
    loading_libraries,
    make_table,
    out,
    print_json,
    print_labelled,
    print_note,
    print_rows,
    print_title,
)
from streamtune.cli.options import JsonOption, RecipeArgument, SetOption, option, read_recipe

if TYPE_CHECKING:
    from streamtune.engine import RouterLoss
    from streamtune.programs.verify.compared_rows import Window
    from streamtune.programs.verify.report import VerifyReport
    from streamtune.programs.verify.verify_recipe import VerifySubject

COARSE_BOUND = 1e-3
"""Allowed error above which a mistake could stay hidden; the verdict then states the allowed error."""


def verify(
    recipe: RecipeArgument,
    length: Annotated[
        int | None,
        option(
            "N",
            "Maximum number of tokens in the compared batch. [default: as memory allows, at most 2,048 on a CPU and "
            "8,192 on a GPU]",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        option(
            "float32|bfloat16|float64",
            "Dtype of the compared computation; float64 shows errors that rounding hides. [default: as the recipe's "
            "dtype and bf16 set]",
        ),
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that streaming gives the same loss and gradients as plain autograd, on the recipe's model and first rows.

    Exits with 0 if they are equal up to rounding. If not, exits with 1 and names the parameter with the largest error.
    """
    loaded = read_recipe(recipe, set_)
    for note in loaded.notes:
        print_note(note)
    with loading_libraries():
        from streamtune.programs.verify.verify_recipe import build_verify, verify_recipe
    subject = build_verify(loaded, length=length, dtype=dtype, notify=print_note, doing=err.status)
    if not as_json:
        _print_banner(subject)
    with err.status("comparing") as status:
        report = verify_recipe(subject, notify=status.update if err.is_terminal else err.print)
    if as_json:
        print_json({**report.to_json(), **_subject_document(subject)})
    else:
        _print_report(report)
        if report.exact:
            print_labelled(Text("Next: ", style="bold"), Text(_train_command(loaded.recipe.objective, recipe, set_)))
    raise typer.Exit(0 if report.exact else 1)


def _train_command(objective: str, recipe: Path, settings: list[str] | None) -> str:
    options = [part for setting in settings or [] for part in ("--set", setting)]
    return shlex.join(["streamtune", objective, str(recipe), *options])


def _subject_document(subject: VerifySubject) -> dict[str, object]:
    batch = subject.batch
    return {
        "model": type(base_of(subject.model)).__name__,
        "device": str(subject.device),
        "objective": subject.loaded.recipe.objective,
        "rows": list(batch.origins),
        "shared_prompts": getattr(batch, "branches", None) is not None,
        "packed": batch.position_ids is not None,
        "length": subject.length,
        "tokens": batch.num_tokens,
        "trained_tokens": batch.num_targets,
        "router_aux_loss_coef": loss.balance if (loss := subject.router_loss) else None,
    }


# --- the screen -------------------------------------------------------------------------------------------------------


def _print_banner(subject: VerifySubject) -> None:
    sizes = ", ".join(f"{schedule.chunk_size:,}" for schedule in subject.schedules)
    heads = ", ".join(f"{schedule.head_chunk_size:,}" for schedule in subject.schedules)
    print_title(f"verify {subject.loaded.path}")
    print_rows(
        [
            ("model", _describe_model(subject)),
            ("rows", _describe_rows(subject)),
            *([("loss", _describe_loss(subject))] if subject.tree_losses is not None else []),
            ("chunks", f"of {sizes} tokens; in the LM head of {heads}"),
            *([("routers", _describe_routers(loss))] if (loss := subject.router_loss) else []),
        ]
    )


def _describe_model(subject: VerifySubject) -> str:
    total, trainable = subject.parameters.total, subject.parameters.trainable
    trained = "all trained" if trainable == total else f"{trainable:,} trained"
    base = base_of(subject.model)
    dtypes = dict.fromkeys(p.dtype for frozen in (False, True) for p in base.parameters() if p.requires_grad != frozen)
    dtype = " and ".join(str(each).removeprefix("torch.") for each in dtypes if each.is_floating_point)
    computed = ", computed in bfloat16" if subject.bf16 else ""
    computed = f", computed in {str(subject.dtype).removeprefix('torch.')}" if subject.dtype else computed
    return f"{type(base).__name__}, {total:,} parameters, {trained}; {dtype}{computed} on {subject.device}"


def _describe_routers(loss: RouterLoss) -> str:
    balance = f"{loss.balance:g} times transformers' load-balancing loss"
    return f"{balance}; the z-loss is left out, because transformers has none" if loss.z else balance


def _describe_rows(subject: VerifySubject) -> str:
    batch, windows = subject.batch, subject.windows
    if subject.tree_losses is not None:
        return _describe_completions(subject)
    tokens = f"{batch.num_tokens:,} tokens, {batch.num_targets:,} of them trained"
    if getattr(batch, "branches", None) is not None:
        return f"the first {len(windows)} in one sequence that shares prefixes, compared with each row alone: {tokens}"
    if batch.position_ids is not None:
        return f"the first {len(windows)} packed into one sequence, compared with each row alone: {tokens}"
    if len(windows) > 1:
        return f"the first {len(windows)}, padded to {subject.length:,} tokens: {tokens}"
    return f"{windows[0].example.origin}{_describe_cut(windows[0], subject.length_limit)}: {tokens}"


def _describe_completions(subject: VerifySubject) -> str:
    from streamtune.train import TreeBatch

    batch, alone = subject.batch, subject.alone
    assert isinstance(batch, TreeBatch)
    whose = "random completions" if subject.loaded.recipe.objective == "grpo" else "completions"
    prompts = len(batch.origins)
    text = f"{batch.num_rows} {whose} of {'the first prompt' if prompts == 1 else f'the first {prompts} prompts'}"
    if subject.length_limit:
        text += f", cut to {alone.input_ids.shape[1]:,} tokens ({subject.length_limit})"
    how = "prompts shared" if batch.branches is not None else "each with its own prompt"
    apart = f" ({alone.num_tokens:,} unshared)" if batch.branches is not None else ""
    return f"{text}, {how}: {batch.num_tokens:,} tokens{apart}, {batch.num_targets:,} of them trained"


def _describe_loss(subject: VerifySubject) -> str:
    losses = subject.tree_losses
    assert losses is not None
    name: str = losses.task.recipe.loss_type
    if not losses.task.uses_reference:
        return f"{name}, no reference"
    reference = "a second model" if losses.own_reference is not None else "the model without its adapters"
    return f"{name}; reference: {reference}"


def _describe_cut(window: Window, why: str) -> str:
    if window.length == window.row_length:
        return ""
    part = f"{window.start + 1:,} to {window.start + window.length:,} of {window.row_length:,}"
    return f", tokens {part} ({why})"


def _print_report(report: VerifyReport) -> None:
    out.print()
    out.print(_describe_verdict(report), soft_wrap=not out.is_terminal)
    out.print()
    out.print(_error_table(report))
    out.print()
    loss = report.loss
    wide = f"; {report.truth} {loss.truth:.7g}" if report.truth else ""
    rows = [
        ("reference", _describe_reference(report)),
        ("loss", f"plain {loss.plain:.7g}, streamed {loss.streamed:.7g}, difference {loss.difference:.1e}{wide}"),
    ]
    if report.exact:  # else the verdict names it
        rows.append(("worst", report.worst.describe()))
    if report.filled:
        rows.append(("filled", f"{report.filled} all-zero tensors (fresh adapters) held random values for this test"))
    if report.routed and not report.exact and report.worst.run.dtype.itemsize == 4:
        rows.append(
            ("experts", "rounding may send a token to another expert; rule that out with a shorter --length or float64")
        )
    if report.refusal:
        rows.append(("training", f"would refuse this model: {report.refusal}"))
    print_rows(rows)


def _describe_reference(report: VerifyReport) -> str:
    dtype = report.truth or f"{report.dtype}, the training dtype"
    why = f" (no wider dtype: {report.why_no_truth})" if report.why_no_truth else ""
    largest = f"each error is the largest over {len(report.schedules)} chunk sizes"
    return f"plain autograd in {dtype}{why}, {report.attention} attention; {largest}"


def _error_table(report: VerifyReport) -> Table:
    """Return a table of gradient errors by kind of module, with a column for each dtype, streamed and plain."""
    dtype = report.dtype.split()[0]
    table = make_table(
        Column("largest relative\nerror of a gradient", overflow="fold"),
        Column("parameters", justify="right", vertical="bottom"),
        *([f"{report.truth}\nstreamed"] if report.truth else []),
        f"{dtype}\nstreamed",
        *([f"{dtype}\nplain"] if report.truth else []),
    )
    for row in report.modules:
        cells = (
            [_show_number(row.exact_error), _show_number(row.error), _show_number(row.torch_error)]
            if report.truth
            else []
        )
        style = "bold red" if not report.exact and row.module == report.worst.module else None
        table.add_row(row.module, f"{row.parameters:,}", *(cells or [_show_number(row.error)]), style=style)
    return table


def _describe_verdict(report: VerifyReport) -> Text:
    worst, loss = report.worst, report.loss.worst
    if report.exact:
        where = f" in {report.truth}, and are as precise in {report.dtype}" if report.truth else f" in {report.dtype}"
        if not report.truth and worst.allowed > COARSE_BOUND:
            where += f", to within {worst.allowed:.0e}: no wider dtype was compared"
        return Text.assemble(("exact", "bold green"), f": streamed loss and gradients equal plain autograd's{where}")
    wrong = [worst.describe()] if worst.error_over_bound > 1 else []
    wrong += [loss.describe()] if loss.error_over_bound > 1 else []
    return Text.assemble(("NOT exact", "bold red"), ": ", "; ".join(wrong))


def _show_number(value: float) -> str:
    return f"{value:.1e}" if value else "0"
