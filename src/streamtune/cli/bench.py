"""``streamtune bench``: plain autograd, gradient checkpointing and streaming side by side."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from streamtune.errors import ArgumentError
from streamtune.recipe import load_recipe

from .console import err, out, print_json
from .options import JsonOption, RecipeArgument, SetOption

if TYPE_CHECKING:
    from streamtune.plan import BenchReport, BenchRow

__all__ = ["bench"]


def bench(
    recipe: RecipeArgument,
    lengths: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens of a row, one measurement each.")
    ] = "2048,8192,16384",
    modes: Annotated[str, typer.Option(metavar="MODE,...", help="What to compare.")] = "plain,checkpoint,stream",
    packed_rows: Annotated[
        int, typer.Option(metavar="N", help="Also as N rows packed in one sequence, and as N rows one after another.")
    ] = 0,
    repeats: Annotated[int, typer.Option(metavar="N", help="Timed steps of each, taken in turns.")] = 3,
    output_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where bench.json and bench.png go.", show_default=False)
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure peak memory, step time and tokens/s of the recipe's model, each mode in a process of its own."""
    loaded = load_recipe(recipe, set_ or [])
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported, here and in the processes
    with err.status("loading libraries") as status:
        from streamtune.plan import draw_bench
        from streamtune.recipe.build_bench import bench_recipe

        report = bench_recipe(
            loaded,
            lengths=_numbers(lengths),
            modes=[mode.strip() for mode in modes.split(",")],  # type: ignore[misc]
            repeats=repeats,
            packed_rows=packed_rows,
            notify=status.update if err.is_terminal else err.print,
        )
    folder = output_dir or Path(loaded.recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    document = report.to_json()
    (folder / "bench.json").write_text(json.dumps(document, indent=2) + "\n")
    draw_bench(report, folder / "bench.png", title=_describe(report))
    if as_json:
        print_json(document)
        return
    out.print(_describe(report), style="bold")
    out.print(_table(report))
    out.print(
        "Peak and activations in MiB (beyond weights, gradients and layer inputs); x: to checkpointing", style="dim"
    )
    out.print(f"Written to {folder / 'bench.json'} and {folder / 'bench.png'}", style="dim", soft_wrap=True)


def _numbers(text: str) -> list[int]:
    try:
        return [int(item) for item in text.replace("_", "").split(",")]
    except ValueError:
        raise ArgumentError(f"--lengths takes whole numbers, not {text!r}", mend="write --lengths 2048,8192") from None


def _describe(report: BenchReport) -> str:
    env = report.env
    if not env:
        return "nothing could be measured"
    size = f"{env['parameters'] / 1e6:,.1f}M parameters, {env['dtype']}, batch {env['batch_size']}"
    machine = f"{env['device']}, {env['threads']} threads, torch {env['torch']}"
    return f"{size}; chunks of {report.schedule.chunk_size:,}; {machine}"


def _table(report: BenchReport) -> Table:
    """One row a mode and length. Ratios are to gradient checkpointing in the same run."""
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    packed = report.packed_rows > 0
    for name in ("tokens", "mode", *(["rows"] if packed else [])):
        table.add_column(name, justify="right" if name == "tokens" else "left")
    more = ["to 1 row"] if packed else []
    for name in ("peak", "activations", "layers only", "fwd s", "bwd s", "tok/s", "time", *more):
        table.add_column(name, justify="right")
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
            rows = {"row": "1", "packed": f"{report.packed_rows} packed", "separate": f"{report.packed_rows} apart"}[
                row.layout
            ]
            cells = [rows, *cells, f"{row.row_ratio:.3f}x" if row.row_ratio is not None else ""]
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
