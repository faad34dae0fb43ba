"""The screen of ``streamtune plan``, and the parts of it that other screens show: memory, ranks, traffic, time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from streamtune.base.text import show_size
from streamtune.recipe.keys.preset import describe_preset

from .console import make_table, out, print_rows, print_table, print_title

if TYPE_CHECKING:
    from streamtune.plan import Plan
    from streamtune.plan.simulate.scored import Scored
    from streamtune.recipe.settings import OptimizerSettings, TrainingSettings
    from streamtune.run.plan import RecipePlan

EIGHTHS = " ▏▎▍▌▋▊▉█"
FIXED = ("weights", "gathered weights", "fp32 weights", "reference", "gradients", "optimizer")
"""Terms that do not grow with the length."""


def screen_texts(planned: RecipePlan) -> dict[str, Any]:
    """Return what the screen has besides the document: texts, and what they need of sizes."""
    chosen = planned.plan
    return {
        "rows": [
            ("model", _describe_model(planned)),
            *([("preset", preset)] if (preset := describe_preset(planned.loaded.recipe)) is not None else []),
            ("step", _describe_step(planned)),
            *([("positions", planned.positions)] if planned.positions is not None else []),
            ("device", _describe_device(planned)),
            ("schedule", chosen.schedule.describe(planned.layers)),
            ("time", _describe_time(planned)),
            ("flop", _describe_flops(planned)),
            ("rates", chosen.rates.source),
            ("binds", _describe_binding(chosen)),
            *cluster_rows(planned),
        ],
        "ranks": planned.cluster.ranks,
        "ranks_per_node": planned.cluster.ranks_per_node,
        "host_terms": dict(chosen.simulation.host_terms),
        "alternatives": [other.schedule.describe(planned.layers) for other in chosen.alternatives],
    }


def print_page(page: dict[str, Any], path: Path) -> None:
    document, screen = page["document"], page["screen"]
    print_title(f"plan {path}")
    print_rows([(name, text) for name, text in screen["rows"]])
    of = " of each rank" if screen["ranks"] > 1 else ""
    print_table(f"memory{of} at the peak of the step, in the {document['phase']}", _memory_table(document, screen))
    if document["traffic"]["flows"]:
        print_table("what one device sends in a step", traffic_table(document["traffic"]))
    if document["alternatives"]:
        print_table("alternatives, estimated", _alternatives_table(document, screen))


def _describe_model(planned: RecipePlan) -> str:
    total, trainable = planned.parameters.total, planned.parameters.trainable
    trained = "all trained" if trainable == total else f"{trainable / 1e6:,.1f}M trained"
    if planned.loaded.recipe.step_kind.gradients == "block":
        trained += " at a time"
    rounded = ", rounded stochastically" if planned.loaded.recipe.weight_rounding == "stochastic" else ""
    autocast = ", computed in bfloat16" if planned.loaded.recipe.bf16 and planned.dtype != "bfloat16" else ""
    size = f"{total / 1e9:.2f}B" if total >= 1e9 else f"{total / 1e6:.1f}M"
    return f"{planned.model_name}, {size} parameters, {trained}; {planned.dtype}{rounded}{autocast}"


def _describe_step(planned: RecipePlan) -> str:
    recipe = planned.loaded.recipe
    rows, micro = recipe.per_device_train_batch_size, planned.micro_batches * planned.cluster.data_size
    optimizer = describe_optimizer(recipe)
    if planned.scored is not None:
        text = _describe_scored(planned.scored, recipe)
        return f"{text}, {micro} times; {optimizer}" if micro > 1 else f"{text}; {optimizer}"
    text = f"{rows * micro} row{'s' if rows * micro > 1 else ''} of {planned.length:,} tokens"
    if recipe.tokens_per_batch is not None:
        text = f"{recipe.tokens_per_batch:,} tokens at most, planned as {text}"
    return (
        f"{text}, {rows * planned.cluster.data_size} at a time; {optimizer}"
        if planned.micro_batches > 1
        else f"{text}; {optimizer}"
    )


def _describe_scored(scored: Scored, recipe: TrainingSettings) -> str:
    """Describe a batch: ``1 pair of 2 x 65,536 tokens, prompt shared: 98,304 tokens``."""
    from streamtune.tasks import task_of

    longest = max(trunk + max(branches) for trunk, branches in scored.trees)
    unit, count = task_of(recipe).unit, recipe.per_device_train_batch_size
    units = f"{count} {unit}{'s' if count > 1 else ''} of {'2 x ' if unit == 'pair' else ''}{longest:,} tokens"
    total = f"{scored.rows * scored.length:,} tokens"
    if not scored.shares:
        return f"{units}: {total}"
    prompts = len(scored.trees)
    return f"{units}, {'prompts' if prompts > 1 else 'prompt'} shared: {total}"


def _describe_device(planned: RecipePlan) -> str:
    limits = planned.plan.limits
    text = f"{planned.device_name}, {show_size(limits.device_bytes)}"
    ranks = planned.cluster.ranks_per_node
    of_node = " of a node" if ranks > 1 else ""
    if not limits.shared:
        text += f"; host {show_size(ranks * limits.host_bytes)}{of_node}"
    if limits.disk_bytes:
        text += f"; disk {show_size(ranks * limits.disk_bytes)}{of_node}"
    return f"{text}; {limits.margin:.0%} of each is left free"


def _describe_time(planned: RecipePlan) -> str:
    choosing = planned.select_seconds
    seconds = planned.plan.step_seconds + choosing
    text = f"about {show_seconds(seconds)} a step, {planned.tokens / seconds:,.0f} tokens/s"
    if choosing:
        text += f"; {show_seconds(choosing)} of it to choose one of {planned.loaded.recipe.draws} rows that are drawn"
    if planned.scored is not None and planned.scored.forwards:
        text += ", forward passes without gradient included"
    return f"{text}, without the rollout" if planned.loaded.recipe.objective == "grpo" else text


def _describe_flops(planned: RecipePlan) -> str:
    """Describe the operations of a step: ``9.6 PFLOP a step, 3.1 PFLOP more computed; MFU 38% of 989 TFLOP/s``."""
    text = f"{_operations(planned.flops)} a step"
    if (more := planned.computed_flops - planned.flops) > 0:
        text += f", {_operations(more)} more computed"
    if planned.mfu is None:
        return text
    assert planned.peak_flops is not None
    return f"{text}; MFU {planned.mfu:.0%} of {_operations(planned.peak_flops)}/s"


def _operations(count: float) -> str:
    for size, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.3g} MFLOP"


def _describe_binding(chosen: Plan) -> str:
    limits, simulation = chosen.limits, chosen.simulation
    used = simulation.peak_bytes + (simulation.host_bytes if limits.shared else 0)
    share = used / limits.device if limits.device else 0.0
    return f"{chosen.binds}; the step takes {share:.0%} of the usable device memory"


SHOWN = 1 << 10
"""Bytes of the smallest term that is shown: a loss is a number."""


def _memory_table(document: dict[str, Any], screen: dict[str, Any]) -> Table:
    """Return a table with a bar for each term, relative to the device's memory. Host and disk are a node's."""
    limits, peak = document["limits"], document["peak_bytes"]
    table = make_table(Column(), "", Column(no_wrap=True), header=None)
    width = max(10, min(60, out.width - 38))
    whole = max(limits["device_bytes"], peak, 1)
    for name, size in sorted(document["terms"].items(), key=lambda item: -item[1]):
        if size >= SHOWN:
            style = "blue" if name in FIXED else "cyan"
            table.add_row(f"  {name}", show_size(size), Text(bar(size / whole, width), style=style))
    total = f"of {show_size(limits['device_bytes'])}, {show_size(limits['device_bytes'] - peak)} free"
    table.add_row("  device in all", show_size(peak), total, style="bold")
    ranks = screen["ranks_per_node"]
    of_node = f" of a node, {ranks} ranks" if ranks > 1 else ""
    for name in ("host", "disk"):
        if size := document[f"{name}_bytes"]:
            text = f"of {show_size(ranks * limits[f'{name}_bytes'])}{of_node}"
            table.add_row(f"  {name}", show_size(ranks * size), text, style="bold")
    if len(screen["host_terms"]) > 1:
        for name, size in screen["host_terms"].items():
            table.add_row(f"    {name}", show_size(ranks * size), "on the host")
    return table


def _alternatives_table(document: dict[str, Any], screen: dict[str, Any]) -> Table:
    why = Column("schedule, and why not", overflow="fold", ratio=1)
    table = make_table("  step", "device", "elsewhere", why, header="dim")
    for other, schedule in zip(document["alternatives"], screen["alternatives"], strict=True):
        away = other["host_bytes"] + other["disk_bytes"]
        table.add_row(
            f"  {show_seconds(other['step_seconds'])}",
            show_size(other["peak_bytes"]),
            show_size(away) if away else "-",
            Text.assemble(schedule, ": ", (other["why_not"], "yellow" if other["fits"] else "red")),
        )
    return table


def describe_plan(chosen: Plan) -> str:
    """Return one line for a run's banner: the predicted memory and time of a step."""
    limits, simulation = chosen.limits, chosen.simulation
    text = f"{show_size(simulation.peak_bytes)} of {show_size(limits.device_bytes)} predicted"
    if simulation.host_bytes and not limits.shared:
        text += f", {show_size(simulation.host_bytes)} on the host"
    if simulation.disk_bytes:
        text += f", {show_size(simulation.disk_bytes)} on disk"
    return f"{text}; about {show_seconds(chosen.step_seconds)} a step of the longest rows"


def describe_optimizer(recipe: OptimizerSettings) -> str:
    """Return the optimizer, and what it does in another way than usual."""
    text: str = recipe.optim
    if recipe.optim_states != "param":
        rounded = ", rounded stochastically" if recipe.optim_states == "bfloat16" else ""
        text += f", its states in {recipe.optim_states}{rounded}"
    if recipe.engine.optimizer == "host":
        text += ", on the host"
    return text + (", clipped by the norm of the step before" if recipe.clip_norm == "lagged" else "")


def show_seconds(seconds: float) -> str:
    """Format seconds: ``0.12 s``, ``45 s``, ``12 min``, ``3.4 h``."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def bar(share: float, width: int) -> str:
    """Return a bar of at most ``width`` characters, in steps of an eighth; it is never shorter than one step."""
    eighths = max(1, round(max(0.0, min(1.0, share)) * width * 8))
    return EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


# --- several devices --------------------------------------------------------------------------------------------------


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
        traffic: The object ``traffic`` of ``--json``.
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
