"""Output of ``plan`` and ``probe-max-len`` on several devices: ranks, memory of nodes, bytes of links."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from streamtune.base.sizes import show_size

from .console import make_table

if TYPE_CHECKING:
    from streamtune.run.plan import RecipePlan

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
    names = ("collectives", traffic["node_link"], traffic["network_link"], "seconds")
    table = make_table(Column(no_wrap=True), *names, header="dim")
    for flow in traffic["flows"]:
        table.add_row(
            f"  {flow['what']}",
            f"{flow['count']:,}",
            show_size(flow["node_bytes"]) if flow["node_bytes"] else "-",
            show_size(flow["network_bytes"]) if flow["network_bytes"] else "-",
            f"{flow['seconds']:.2f}",
        )
    return table
