"""Output of ``plan`` and ``probe-max-len`` on several devices: ranks, memory of nodes, bytes of links."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from streamtune.base.sizes import show_size

if TYPE_CHECKING:
    from streamtune.run.plan import RecipePlan
from typing import TYPE_CHECKING

from .console import out

if TYPE_CHECKING:
    from streamtune.bench import BenchReport, BenchRow, TableReport

__all__ = [
    "NodesOption",
    "RanksOption",
    "bench_screen",
    "cluster_document",
    "cluster_rows",
    "describe_bench",
    "table_screen",
    "traffic_table",
]

RanksOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Devices in all, of every node; simulated.", show_default=False),
]
NodesOption = Annotated[
    int | None,
    typer.Option(metavar="M", help="Machines they are on; else one for every 8.", show_default=False),
]


def cluster_document(planned: RecipePlan) -> dict[str, Any]:
    """Return the key ``cluster`` of ``plan --json`` with its value; an empty dictionary for one device."""
    cluster, chosen = planned.cluster, planned.plan
    if cluster.ranks == 1:
        return {}
    node, simulation = cluster.ranks_per_node, chosen.simulation
    sending = chosen.traffic.seconds
    return {
        "cluster": {
            "ranks": cluster.ranks,
            "nodes": cluster.nodes,
            "ranks_per_node": node,
            "engine": cluster.engine,
            "zero_stage": cluster.zero_stage,
            "sequence_parallel_size": cluster.sequence_size,
            "sequence_parallel": cluster.form if cluster.sequence_size > 1 else None,
            "data_parallel_size": cluster.data_size,
            "micro_batches": planned.micro_batches,
            "links": asdict(cluster.links),
            "host_bytes_per_node": node * simulation.host_bytes,
            "host_terms_per_node": {name: node * size for name, size in simulation.host_terms.items()},
            "host_memory_bytes_per_node": node * chosen.limits.host_bytes,
            "disk_bytes_per_node": node * simulation.disk_bytes,
            "compute_seconds": chosen.step_seconds - sending,
            "communication_seconds": sending,
            "tokens_per_step": planned.tokens,
            "tokens_per_second": planned.tokens / chosen.step_seconds,
            "longer": [asdict(each) for each in planned.wider],
        }
    }


def cluster_rows(planned: RecipePlan) -> list[tuple[str, str]]:
    """Return the lines of the screen as (name, text); none for one device."""
    cluster, chosen = planned.cluster, planned.plan
    if cluster.ranks == 1:
        return []
    sending = chosen.traffic.seconds
    share = sending / chosen.step_seconds if chosen.step_seconds else 0.0
    rows = [("ranks", cluster.describe()), ("sending", f"{share:.1%} of the step, taken to overlap with nothing")]
    rows += [("", f"a step leaves a device with {_describe_links(chosen.traffic.to_json())}")]
    for each in planned.wider:
        text = f"{each.sequence_size} ranks to a sequence ({each.form}) hold rows of {each.max_length:,} tokens"
        rows.append(("longer", f"sequence_parallel_size: {each.sequence_size}; {text}"))
    return rows


def _describe_links(traffic: dict[str, Any]) -> str:
    parts = [f"{show_size(traffic['node_bytes'])} by {traffic['node_link']}"]
    if traffic["network_bytes"]:
        parts.append(f"{show_size(traffic['network_bytes'])} by the {traffic['network_link']}")
    return ", ".join(parts)


def traffic_table(traffic: dict[str, Any]) -> Table:
    """Return a table of the bytes one device sends in a step, with one row for each kind of message.

    Args:
        traffic: As ``--json`` has it.
    """
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("collectives", traffic["node_link"], traffic["network_link"], "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for flow in traffic["flows"]:
        table.add_row(
            f"  {flow['what']}",
            f"{flow['count']:,}",
            show_size(flow["node_bytes"]) if flow["node_bytes"] else "-",
            show_size(flow["network_bytes"]) if flow["network_bytes"] else "-",
            f"{flow['seconds']:.2f}",
        )
    return table


def table_screen(report: TableReport) -> None:
    """Print a named table with a description and notes on its columns."""
    from streamtune.bench.named_tables import cells, columns, notes

    shown = [column for column in columns(report) if not column.page]
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for column in shown:
        whole = column.right or report.table != "ablation"
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=whole)
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
    """Return one line on the model, its dtype, the chunk size and the machine."""
    env = report.env
    if not env:
        return "nothing could be measured"
    size = f"{env['parameters'] / 1e6:,.1f}M parameters, {env['dtype']}, batch {env['batch_size']}"
    machine = f"{env['device']}, {env['threads']} threads, torch {env['torch']}"
    return f"{size}; chunks of {report.schedule.chunk_size:,}; {machine}"


def bench_screen(report: BenchReport) -> Table:
    """Return a table with one row for each length, layout and mode.

    Ratios are to gradient checkpointing in the same run; those in ``to 1 row`` are to the same tokens as one row.
    """
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
