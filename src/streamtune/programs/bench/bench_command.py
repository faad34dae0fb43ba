"""``streamtune bench``: plain autograd, gradient checkpointing and streaming side by side, and named tables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Column, Table

from streamtune.base import interrupts
from streamtune.base.text import parse_size
from streamtune.cli.console import err, make_table, out, print_json
from streamtune.cli.options import JsonOption, RecipeArgument, SetOption, option, read_recipe
from streamtune.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from streamtune.plan.simulate import Mode
    from streamtune.programs.bench.bench import BenchReport, BenchRow
    from streamtune.programs.bench.table_rows import TableReport
    from streamtune.recipe import LoadedRecipe


MAX_LENGTH = "max-length"

THREE = "plain,checkpoint,stream"

LENGTHS = {
    "": "2048,8192,16384",
    "bp-time": "1024,2048,4096,8192",
    "max-length": "",
    "memory": "2048,4096,8192",
    "ablation": "2048",
    "prefix-sharing": "1024,4096",
}
"""Default of ``--lengths``, by table."""


def bench(
    recipe: RecipeArgument,
    table: Annotated[
        str,
        option(
            "NAME",
            "Measure a table: bp-time, max-length, memory, ablation or prefix-sharing. "
            "One that was stopped is gone on with.",
        ),
    ] = "",
    lengths: Annotated[
        str, option("N,N,...", f"Tokens of a row, one measurement each.  [default: {LENGTHS['']}]")
    ] = "",
    modes: Annotated[
        str, option("MODE,...", f"What to compare.  [default: {THREE}; for a table the peers as well]")
    ] = "",
    packed_rows: Annotated[
        int, typer.Option(metavar="N", help="Also as N rows packed in one sequence, and as N rows one after another.")
    ] = 0,
    repeats: Annotated[int, typer.Option(metavar="N", help="Timed steps of each, taken in turns.")] = 3,
    method: Annotated[
        str,
        option("measure|simulate", "max-length: train on the device, or simulate one of --device-memory."),
    ] = "",
    device_memory: Annotated[str, option("80GiB", "max-length: the budget on the device.")] = "",
    host_memory: Annotated[str, option("128GiB", "max-length: for what is kept on the host.")] = "",
    disk_memory: Annotated[str, option("2TiB", "max-length: for what is kept on disk.")] = "",
    output_dir: Annotated[Path | None, option("DIR", "Where the figures, the picture and the page go.")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure peak memory, step time and tokens/s of the recipe's model, or one of the paper's tables."""
    if table not in LENGTHS:
        nearest = did_you_mean(table, LENGTHS)
        raise ArgumentError(
            f"there is no table {table!r}", fix=nearest or f"choose from {', '.join(filter(None, LENGTHS))}"
        )
    loaded = read_recipe(recipe, set_)
    folder = output_dir or Path(loaded.recipe.output_dir)
    if not table:
        compared = _names(modes or THREE)
        _bench(loaded, _numbers(lengths or LENGTHS[""]), compared, repeats, packed_rows, folder, as_json)
        return
    if packed_rows:
        raise ArgumentError("--packed-rows is no part of a table", fix="leave out --table, or --packed-rows")
    sizes = {"--device-memory": device_memory, "--host-memory": host_memory, "--disk-memory": disk_memory}
    given = {
        "--table": table,
        "--lengths": lengths,
        "--modes": modes,
        "--repeats": f"{repeats if table != MAX_LENGTH else ''}",
        "--method": method,
        **sizes,
    }
    words = [word for name, value in given.items() if value for word in (name, value)]
    words += [word for setting in set_ or [] for word in ("--set", setting)]
    with err.status("loading libraries") as status:
        from streamtune.plan.simulate import ALL_MODES
        from streamtune.programs.bench.bench_recipe import table_recipe
        from streamtune.programs.bench.measure_table import TableOptions
        from streamtune.programs.bench.named_tables import draw_table, markdown
        from streamtune.train.staging import check_outputs, write_output

        check_outputs(folder, [])  # file names are known once the device is

        options = TableOptions(
            lengths=_numbers(lengths or LENGTHS[table]),
            modes=_names(modes) or ALL_MODES,
            repeats=repeats,
            folder=folder,
            command=shlex.join(["streamtune", "bench", str(recipe), *words]),
            method=method or ("simulate" if device_memory else "measure"),
            sizes=[parse_size(size, where=name) if size else None for name, size in sizes.items()],
        )
        with interrupts.saying("Stopped. Finished rows are kept; the same command goes on from there."):
            notify = status.update if err.is_terminal else err.print
            report = table_recipe(loaded, cast(Any, table), options, notify=notify)
    write_output(folder / f"{report.stem}.md", markdown(report).encode("utf-8"))
    write_output(folder / f"{report.stem}.png", draw_table(report))
    if as_json:
        print_json(report.to_json())
        return
    table_screen(report)
    written = ", ".join(str(folder / f"{report.stem}.{ending}") for ending in ("md", "json", "png"))
    out.print(f"Written to {written}", style="dim", soft_wrap=True)


def _bench(
    loaded: LoadedRecipe,
    lengths: Sequence[int],
    modes: Sequence[Mode],
    repeats: int,
    packed_rows: int,
    folder: Path,
    as_json: bool,
) -> None:
    with err.status("loading libraries") as status:
        from streamtune.programs.bench.bench_recipe import bench_recipe
        from streamtune.programs.bench.plots import draw_bench
        from streamtune.train.staging import check_outputs, write_output

        check_outputs(folder, ["bench.json", "bench.png"])
        notify = status.update if err.is_terminal else err.print
        report = bench_recipe(
            loaded, lengths=lengths, modes=modes, repeats=repeats, packed_rows=packed_rows, notify=notify
        )
    document = report.to_json()
    write_output(folder / "bench.json", f"{json.dumps(document, indent=2)}\n".encode())
    write_output(folder / "bench.png", draw_bench(report, title=describe_bench(report)))
    if as_json:
        print_json(document)
        return
    out.print(describe_bench(report), style="bold")
    out.print(bench_screen(report))
    out.print(
        "Peak and activations in MiB (beyond weights, gradients and layer inputs); x: to checkpointing", style="dim"
    )
    if report.objective != "sft":
        out.print(
            "tokens: of a prompt with its longest completion, prompts shared where they are streamed; tok/s counts "
            "each completion with its prompt. The loss is their mean log-probability; no reference is asked",
            style="dim",
        )
    out.print(f"Written to {folder / 'bench.json'} and {folder / 'bench.png'}", style="dim", soft_wrap=True)


def _names(text: str) -> list[Mode]:
    return [cast(Any, name.strip()) for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(item) for item in text.replace("_", "").split(",") if text]
    except ValueError:
        raise ArgumentError(f"--lengths takes whole numbers, not {text!r}", fix="write --lengths 2048,8192") from None


# --- the screens ------------------------------------------------------------------------------------------------------


ONE_BLANK = (0, 1, 0, 0)


def table_screen(report: TableReport) -> None:
    from streamtune.programs.bench.named_tables import cells, columns, notes  # imports torch

    shown = [column for column in columns(report) if not column.page]
    wraps = report.table == "ablation"
    columns_shown = [
        Column(each.name, justify="right" if each.right else "left", no_wrap=each.right or not wraps) for each in shown
    ]
    table = make_table(*columns_shown, padding=ONE_BLANK)
    before: Any = None
    for row in report.rows:
        if before is not None and before != (row.length, row.section):
            table.add_section()
        if row.section and before != (row.length, row.section):
            table.add_row(row.section, style="dim")
        before = (row.length, row.section)
        table.add_row(*cells(shown, row), style="bold" if row.to_default == 1 else None)
    out.print(report.describe(), style="bold")
    out.print(table)
    out.print("\n".join(notes(report)), style="dim")


def describe_bench(report: BenchReport) -> str:
    env = report.env
    if not env:
        return "nothing could be measured"
    size = f"{env['parameters'] / 1e6:,.1f}M parameters, {env['dtype']}, batch {env['batch_size']}"
    machine = f"{env['device']}, {env['threads']} threads, torch {env['torch']}"
    return f"{size}; chunks of {report.schedule.chunk_size:,}; {machine}"


def bench_screen(report: BenchReport) -> Table:
    """Return a table with a row for each length, layout and mode.

    Ratios are relative to gradient checkpointing in the same run; in ``to 1 row``, to the same tokens as one row.
    """
    packed = report.packed_rows > 0
    figures = ("peak", "activations", "layers only", "fwd s", "bwd s", "tok/s", "time")
    before_figures, after = ([Column("rows")], ["to 1 row"]) if packed else ([], [])
    table = make_table("tokens", Column("mode"), *before_figures, *figures, *after, padding=ONE_BLANK)
    before = None
    for row in report.rows:
        if before not in (None, row.length):
            table.add_section()
        length = f"{row.length:,}" if row.length != before else ""
        before = row.length
        same = [r for r in report.rows if r.length == row.length and r.layout == row.layout]
        base = next((r for r in same if r.mode == "checkpoint"), None)
        cells = _cells(row, base)
        if packed:
            count = report.packed_rows
            rows = {"row": "1", "packed": f"{count} packed", "separate": f"{count} apart"}
            cells = [rows[row.layout], *cells, f"{row.row_ratio:.3f}x" if row.row_ratio is not None else ""]
        table.add_row(length, row.mode, *cells, style="bold" if row.mode == "stream" else None)
    return table


def _cells(row: BenchRow, base: BenchRow | None) -> list[str]:
    if row.error:
        return [row.error] + [""] * 6
    return [
        _mib(row.peak_bytes),
        _with_ratio(row, base, "activation_bytes"),
        _with_ratio(row, base, "layer_activation_bytes"),
        f"{row.forward_s:.2f}" if row.forward_s is not None else "",
        f"{row.backward_s:.2f}" if row.backward_s is not None else "",
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else "",
        f"{row.ratio:.2f}x" if row.ratio is not None else "",
    ]


def _with_ratio(row: BenchRow, base: BenchRow | None, name: str) -> str:
    value: Any = getattr(row, name)
    reference: Any = getattr(base, name) if base is not None else None
    if value is None:
        return ""
    return _mib(value) if not reference else f"{_mib(value)} {value / reference:.2f}x"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:,.0f}"
