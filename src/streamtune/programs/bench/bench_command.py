"""Command ``streamtune bench``: compare the memory and speed of training methods, or measure a named table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Column, Table
from rich.text import Text

from streamtune.base import interrupts
from streamtune.base.text import parse_size
from streamtune.cli.console import err, make_table, out, print_json, print_labelled, print_note
from streamtune.cli.options import JsonOption, RecipeArgument, SetOption, option, read_recipe
from streamtune.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from streamtune.plan.simulate import Mode
    from streamtune.programs.bench.bench import BenchReport, BenchRow
    from streamtune.programs.bench.table_rows import TableReport
    from streamtune.recipe import LoadedRecipe


MAX_LENGTH = "max-length"

DEFAULT_MODES = "plain,checkpoint,stream"

LENGTHS = {
    "": "2048,8192,16384",
    "bp-time": "1024,2048,4096,8192",
    "max-length": "",
    "memory": "2048,4096,8192",
    "ablation": "2048",
    "prefix-sharing": "1024,4096",
}
"""Default of ``--lengths`` for each value of ``--table``; the empty name means no table."""


def bench(
    recipe: RecipeArgument,
    table: Annotated[
        str,
        option(
            "NAME",
            "Measure this table instead of step time and peak memory. `bp-time`: forward and backward time. "
            "`max-length`: longest row that fits in memory. `memory`: bytes at the peak, by purpose. `ablation`: "
            "schedules that differ in one choice. `prefix-sharing`: prompts that are computed once for several "
            "completions. If the command is stopped, running it again measures only the missing rows of the table.",
        ),
    ] = "",
    lengths: Annotated[
        str,
        option(
            "N,N,...",
            "Row lengths to measure, in tokens; with --table prefix-sharing, prompt lengths. "
            f"[default: {LENGTHS['']}; tables have their own]",
        ),
    ] = "",
    modes: Annotated[
        str,
        option(
            "MODE,...",
            "Training methods to compare: plain (autograd), checkpoint (gradient checkpointing), checkpoint-offload, "
            "stream, stream-keep-attention. With other libraries: deepspeed-tiled, liger-loss, liger-loss-offload, "
            "liger, trl, unsloth. "
            f"[default: {DEFAULT_MODES}; with --table, all that can run here]",
        ),
    ] = "",
    packed_rows: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Also split each length into N rows, measured packed into one sequence and one by one. 0: no split.",
        ),
    ] = 0,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Number of timed steps of each mode; the modes take turns.")
    ] = 3,
    method: Annotated[
        str,
        option(
            "measure|simulate",
            "With --table max-length: measure runs training steps on this device; simulate predicts the memory of "
            "steps, for a device with --device-memory. [default: simulate if --device-memory is set, else measure]",
        ),
    ] = "",
    device_memory: Annotated[
        str,
        option(
            "80GiB",
            "With --table max-length: device memory that a step may use, such as 80GiB. Required on a CPU and"
            " with --method simulate.",
        ),
    ] = "",
    host_memory: Annotated[
        str,
        option(
            "128GiB",
            "With --table max-length: host memory that offloaded tensors may use, such as 128GiB. [default: no limit]",
        ),
    ] = "",
    disk_memory: Annotated[
        str,
        option(
            "2TiB",
            "With --table max-length: disk space that offloaded tensors may use, such as 2TiB. [default: no limit]",
        ),
    ] = "",
    output_dir: Annotated[
        Path | None, option("DIR", "Folder for tables and plots. [default: the recipe's output_dir]")
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure peak memory and step time of the recipe's model, streamed and with other methods.

    The steps run on random tokens. With --table, a named table is measured instead.
    """
    if table not in LENGTHS:
        nearest = did_you_mean(table, LENGTHS)
        raise ArgumentError(
            f"unknown table {table!r}", fix=nearest or f"choose from {', '.join(filter(None, LENGTHS))}"
        )
    loaded = read_recipe(recipe, set_)
    for note in loaded.notes:
        print_note(note)
    folder = output_dir or Path(loaded.recipe.output_dir)
    if not table:
        compared = _parse_modes(modes or DEFAULT_MODES)
        comparison = _run_bench(loaded, _parse_lengths(lengths or LENGTHS[""]), compared, repeats, packed_rows, folder)
        if as_json:
            print_json(comparison.to_json())
            return
        print_bench(comparison)
        _print_written(f"{folder / 'bench.json'}, {folder / 'bench.png'}", recipe, set_)
        return
    if packed_rows:
        raise ArgumentError("--packed-rows and --table exclude each other", fix="give one of them")
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
        from streamtune.programs.bench.bench_recipe import measure_recipe_table
        from streamtune.programs.bench.measure_table import TableOptions
        from streamtune.programs.bench.named_tables import draw_table, table_markdown
        from streamtune.train.staging import check_output_files, write_output

        check_output_files(folder, [])  # file names are known once the device is

        options = TableOptions(
            lengths=_parse_lengths(lengths or LENGTHS[table]),
            modes=_parse_modes(modes) or ALL_MODES,
            repeats=repeats,
            folder=folder,
            command=shlex.join(["streamtune", "bench", str(recipe), *words]),
            method=method or ("simulate" if device_memory else "measure"),
            sizes=[parse_size(size, where=name) if size else None for name, size in sizes.items()],
        )
        with interrupts.print_on_signal("Stopped. Finished rows are saved; the same command resumes."):
            notify = status.update if err.is_terminal else err.print
            report = measure_recipe_table(loaded, cast(Any, table), options, notify=notify)
    write_output(folder / f"{report.stem}.md", table_markdown(report).encode("utf-8"))
    write_output(folder / f"{report.stem}.png", draw_table(report))
    if as_json:
        print_json(report.to_json())
        return
    print_table_screen(report)
    written = ", ".join(str(folder / f"{report.stem}.{ending}") for ending in ("md", "json", "png"))
    _print_written(written, recipe, set_)


def _run_bench(
    loaded: LoadedRecipe,
    lengths: Sequence[int],
    modes: Sequence[Mode],
    repeats: int,
    packed_rows: int,
    folder: Path,
) -> BenchReport:
    with err.status("loading libraries") as status:
        from streamtune.programs.bench.bench_recipe import bench_recipe
        from streamtune.programs.bench.plots import draw_bench
        from streamtune.train.staging import check_output_files, write_output

        check_output_files(folder, ["bench.json", "bench.png"])
        notify = status.update if err.is_terminal else err.print
        report = bench_recipe(
            loaded, lengths=lengths, modes=modes, repeats=repeats, packed_rows=packed_rows, notify=notify
        )
    document = report.to_json()
    write_output(folder / "bench.json", f"{json.dumps(document, indent=2)}\n".encode())
    write_output(folder / "bench.png", draw_bench(report, title=describe_bench(report)))
    return report


def _print_written(written: str, recipe: Path, settings: list[str] | None) -> None:
    out.print(f"written: {written}", style="dim", soft_wrap=True)
    options = [part for setting in settings or [] for part in ("--set", setting)]
    print_labelled(
        Text("Next: ", style="bold"), Text(shlex.join(["streamtune", "probe-max-len", str(recipe), *options]))
    )


def _parse_modes(text: str) -> list[Mode]:
    return [cast(Any, name.strip()) for name in text.split(",") if name.strip()]


def _parse_lengths(text: str) -> list[int]:
    try:
        return [int(item) for item in text.replace("_", "").split(",") if text]
    except ValueError:
        raise ArgumentError(
            f"--lengths must be whole numbers, found {text!r}", fix="write --lengths 2048,8192"
        ) from None


# --- the screens ------------------------------------------------------------------------------------------------------


ONE_BLANK = (0, 1, 0, 0)
FIGURE_NAMES = ("peak", "activations", "layers only", "fwd s", "bwd s", "tok/s", "time")
LABEL_WIDTH = 30
"""Maximum width of a row name in the ablation table, in characters."""


def print_table_screen(report: TableReport) -> None:
    """Print the table of ``bench --table``; in a narrow terminal, split its columns over several tables."""
    from streamtune.programs.bench.named_tables import row_cells, table_columns, table_notes  # imports torch

    shown = [column for column in table_columns(report) if not column.page]
    rows = [row_cells(shown, row) for row in report.rows]
    names = sum(1 for column in shown if column.name in ("tokens", "prompt", "mode", "schedule", "rows"))
    if report.table == "max-length":
        names = 1
    wraps = report.table == "ablation"
    widths = [max(len(each.name), *(len(row[i]) for row in rows), 0) for i, each in enumerate(shown)]
    widths = [
        min(width, LABEL_WIDTH) if wraps and not each.right else width
        for width, each in zip(widths, shown, strict=True)
    ]
    label = next(i for i, column in enumerate(shown) if not column.right)
    widths[label] = max(widths[label], *(len(row.section) for row in report.rows), 0)
    out.print(Text(report.describe(), style="bold"), soft_wrap=not out.is_terminal)
    for group in _split_columns_by_width(widths, names):
        out.print()
        out.print(_render_columns(report, shown, rows, group, widths if wraps else None))
    out.print()
    for note in table_notes(report):
        out.print(Text(note, style="dim"), soft_wrap=not out.is_terminal)


def _split_columns_by_width(widths: Sequence[int], num_names: int) -> list[list[int]]:
    """Split columns into groups that fit the terminal; each group starts with the first ``num_names`` columns."""
    first = list(range(num_names))
    room = out.width - sum(widths[:num_names]) - num_names
    groups: list[list[int]] = []
    used = room + 1
    for index in range(num_names, len(widths)):
        if used + widths[index] + 1 > room:
            groups.append([*first])
            used = 0
        groups[-1].append(index)
        used += widths[index] + 1
    return groups or [first]


def _render_columns(
    report: TableReport,
    shown: Sequence[Any],
    rows: Sequence[Sequence[str]],
    group: Sequence[int],
    widths: Sequence[int] | None,
) -> Table:
    table = make_table(
        *(
            Column(
                shown[i].name,
                justify="right" if shown[i].right else "left",
                no_wrap=shown[i].right or widths is None,
                max_width=None if widths is None or shown[i].right else widths[i],
            )
            for i in group
        ),
        padding=ONE_BLANK,
    )
    label = next(i for i, column in enumerate(shown) if not column.right)
    before: Any = None
    for row, texts in zip(report.rows, rows, strict=True):
        place = (row.length, row.section)
        if before is not None and before != place:
            table.add_section()
        if row.section and before != place:
            table.add_row(*(row.section if i == label else "" for i in group), style="dim")
        before = place
        table.add_row(*(texts[i] for i in group), style="bold" if row.to_default == 1 else None)
    return table


def print_bench(report: BenchReport) -> None:
    """Print the results of a benchmark: a summary in one line, the tables, and the meaning of their columns."""
    if answer := _describe_bench_result(report):
        out.print(Text(answer, style="bold"), soft_wrap=not out.is_terminal)
    out.print(Text(describe_bench(report)), soft_wrap=not out.is_terminal)
    for table in bench_tables(report):
        out.print()
        out.print(table)
    out.print()
    said = [
        "All figures are measured. Peak and activations are in MiB; activations are memory beyond weights, gradients "
        "and layer inputs, and `layers only` leaves out the LM head. Ratios are relative to checkpointing."
    ]
    if report.objective != "sft":
        said.append(
            "The column tokens counts a prompt plus its longest completion. Streaming computes a prompt once for all "
            "its completions; tok/s counts it with each. The loss is the mean log-probability; no reference model runs."
        )
    for text in said:
        out.print(Text(text, style="dim"), soft_wrap=not out.is_terminal)


def _describe_bench_result(report: BenchReport) -> str:
    """Compare streaming with gradient checkpointing at the longest length that has both results; empty if none has."""
    for length in sorted({row.length for row in report.rows}, reverse=True):
        found = {row.mode: row for row in report.rows if row.length == length and row.layout == "row"}
        ours, base = found.get("stream"), found.get("checkpoint")
        if ours is None or base is None or not ours.peak_bytes or not base.peak_bytes or ours.ratio is None:
            continue
        peaks = f"{_show_mib(ours.peak_bytes)} MiB peak instead of {_show_mib(base.peak_bytes)}"
        return f"Streaming at {length:,} tokens: {peaks} with checkpointing, in {ours.ratio:.2f}x its time (measured)"
    return ""


def describe_bench(report: BenchReport) -> str:
    env = report.env
    if not env:
        return "nothing could be measured"
    size = f"{env['parameters'] / 1e6:,.1f}M parameters, {env['dtype']}, batch {env['batch_size']}"
    machine = f"{env['device']}, {env['threads']} threads, torch {env['torch']}"
    return f"{size}; chunks of {report.schedule.chunk_size:,}; {machine}"


def bench_tables(report: BenchReport) -> list[Table]:
    """Return the results as one table, or in a narrow terminal as several tables with a part of the columns each.

    The column ``time`` is relative to gradient checkpointing, ``to 1 row`` to the same tokens as one sequence.
    """
    packed = report.packed_rows > 0
    headers = ["tokens", "mode", *(["rows"] if packed else []), *FIGURE_NAMES, *(["to 1 row"] if packed else [])]
    names = 3 if packed else 2
    lines: list[tuple[list[str], bool, bool]] = []
    before = None
    for row in report.rows:
        begins = before not in (None, row.length)
        length = f"{row.length:,}" if row.length != before else ""
        before = row.length
        same = [r for r in report.rows if r.length == row.length and r.layout == row.layout]
        base = next((r for r in same if r.mode == "checkpoint"), None)
        cells = [length, row.mode]
        if packed:
            count = report.packed_rows
            cells.append({"row": "1", "packed": f"{count} packed", "separate": f"{count} apart"}[row.layout])
        cells += _bench_cells(row, base)
        if packed:
            cells.append(f"{row.row_ratio:.3f}x" if row.row_ratio is not None else "")
        lines.append((cells, begins, row.mode == "stream"))
    widths = [max(len(header), *(len(cells[i]) for cells, *_ in lines), 0) for i, header in enumerate(headers)]
    tables = []
    for group in _split_columns_by_width(widths, names):
        table = make_table(
            *(Column(headers[i], justify="left" if 0 < i < names else "right", no_wrap=True) for i in group),
            padding=ONE_BLANK,
        )
        for cells, begins, is_streamed in lines:
            if begins:
                table.add_section()
            table.add_row(*(cells[i] for i in group), style="bold" if is_streamed else None)
        tables.append(table)
    return tables


def _bench_cells(row: BenchRow, base: BenchRow | None) -> list[str]:
    if row.error:
        return [row.error] + [""] * 6
    return [
        _show_mib(row.peak_bytes),
        _show_mib_and_ratio(row, base, "activation_bytes"),
        _show_mib_and_ratio(row, base, "layer_activation_bytes"),
        f"{row.forward_s:.2f}" if row.forward_s is not None else "",
        f"{row.backward_s:.2f}" if row.backward_s is not None else "",
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else "",
        f"{row.ratio:.2f}x" if row.ratio is not None else "",
    ]


def _show_mib_and_ratio(row: BenchRow, baseline: BenchRow | None, field_name: str) -> str:
    value: Any = getattr(row, field_name)
    reference: Any = getattr(baseline, field_name) if baseline is not None else None
    if value is None:
        return ""
    return _show_mib(value) if not reference else f"{_show_mib(value)} {value / reference:.2f}x"


def _show_mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:,.0f}"
