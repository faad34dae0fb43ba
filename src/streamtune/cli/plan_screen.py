"""Print the output of ``streamtune plan``; other commands also use its texts about memory, ranks and time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.text import show_size
from streamtune.recipe.keys.preset import describe_preset

from .console import make_table, out, print_labelled, print_rows, print_table
from .options import recipe_name
from .schedule_text import describe_schedule, describe_schedule_difference, short_dtype

if TYPE_CHECKING:
    from streamtune.plan import Plan
    from streamtune.plan.simulate.scored import Scored
    from streamtune.recipe.settings import OptimizerSettings, TrainingSettings
    from streamtune.run.plan import RecipePlan

EIGHTHS = " ▏▎▍▌▋▊▉█"
FIXED_TERMS = ("weights", "gathered weights", "fp32 weights", "reference", "gradients", "optimizer")
"""Parts of the memory that do not grow with the row length; their bars are blue."""
ACCURACY = "+-25%"
"""Error of predicted step times (docs/guide/limits.md)."""


def plan_screen_texts(recipe_plan: RecipePlan) -> dict[str, Any]:
    """Return the texts and numbers that the screen shows and the JSON document lacks."""
    chosen = recipe_plan.plan
    return {
        "verdict": _describe_verdict(recipe_plan),
        "fix": "" if chosen.fits else _describe_fix(recipe_plan),
        "rows": [
            ("model", _describe_model(recipe_plan)),
            *([("preset", preset)] if (preset := describe_preset(recipe_plan.loaded.recipe)) is not None else []),
            ("step", _describe_step(recipe_plan)),
            *([("positions", recipe_plan.position_advice)] if recipe_plan.position_advice is not None else []),
            ("device", _describe_device(recipe_plan)),
            *([("", recipe_plan.device_advice)] if recipe_plan.device_advice is not None else []),
            ("schedule", describe_schedule(chosen.schedule, recipe_plan.layers)),
            ("time", _describe_time(recipe_plan)),
            ("flop", _describe_flops(recipe_plan)),
            ("rates", chosen.rates.source),
            ("limit", _describe_binding_limit(chosen)),
            *cluster_rows(recipe_plan),
        ],
        "ranks": recipe_plan.cluster.ranks,
        "ranks_per_node": recipe_plan.cluster.ranks_per_node,
        "layers": recipe_plan.layers,
        "host_terms": dict(chosen.simulation.host_terms),
    }


def print_plan_page(page: dict[str, Any], path: Path) -> None:
    """Print a plan: whether it fits, its properties, the parts of its memory, and alternative schedules.

    Args:
        page: ``document``, as ``plan --json`` prints it, and ``screen``, from :func:`plan_screen_texts`.
    """
    document, screen = page["document"], page["screen"]
    fits = document["fits"]
    verdict = Text("FITS", style="bold green") if fits else Text("DOES NOT FIT", style="bold red")
    print_labelled(verdict.append("  "), Text(screen["verdict"], style="bold"))
    if screen["fix"]:
        print_labelled(Text("fix: ", style="dim"), Text(screen["fix"]))
    print_rows([("recipe", recipe_name(path)), *((name, text) for name, text in screen["rows"])])
    of_rank = " of each rank" if screen["ranks"] > 1 else ""
    title = f"predicted memory{of_rank} at the peak of the step, in the {document['phase']}"
    print_table(title, _memory_table(document, screen))
    if document["traffic"]["flows"]:
        print_table("what one device sends in a step", traffic_table(document["traffic"]))
    if document["alternatives"]:
        print_table("other schedules (estimated)", _alternatives_table(document, screen))


def _describe_verdict(recipe_plan: RecipePlan) -> str:
    """Return a summary such as ``131,072 tokens on H100: 70.6 of 79.1 GiB, 60 s/step (predicted, +-25%)``."""
    chosen, ranks = recipe_plan.plan, recipe_plan.cluster.ranks
    name = recipe_plan.device_name.removeprefix("NVIDIA ")
    devices = f"{ranks} x {name}" if ranks > 1 else name
    each = " each" if ranks > 1 else ""
    sizes = _describe_used_bytes(chosen.simulation.peak_bytes, chosen.limits.device_bytes)
    seconds = show_seconds(chosen.step_seconds + recipe_plan.row_selection_seconds)
    return f"{recipe_plan.length:,} tokens on {devices}: {sizes}{each}, {seconds}/step (predicted, {ACCURACY})"


def _describe_used_bytes(used_bytes: int, total_bytes: int) -> str:
    """Return used and total size, such as ``70.6 of 79.1 GiB``."""
    (number, _, unit), total = show_size(used_bytes).partition(" "), show_size(total_bytes)
    return f"{number} of {total}" if total.endswith(f" {unit}") else f"{show_size(used_bytes)} of {total}"


def _describe_fix(recipe_plan: RecipePlan) -> str:
    if recipe_plan.loaded.recipe.engine.schedule == "fixed":
        return "write engine.schedule: auto, and the planner looks for a schedule that fits; or lower max_length"
    return "raise the memory limits, or lower max_length"


def _describe_model(recipe_plan: RecipePlan) -> str:
    total, trainable = recipe_plan.parameters.total, recipe_plan.parameters.trainable
    trained = "all trained" if trainable == total else f"{trainable / 1e6:,.1f}M trained"
    if recipe_plan.loaded.recipe.step_kind.gradients == "block":
        trained += " at a time"
    rounded = ", rounded stochastically" if recipe_plan.loaded.recipe.weight_rounding == "stochastic" else ""
    computed = recipe_plan.loaded.recipe.autocast_dtype
    autocast = f", computed in {short_dtype(computed)}" if computed and computed != recipe_plan.dtype else ""
    size = f"{total / 1e9:.2f}B" if total >= 1e9 else f"{total / 1e6:.1f}M"
    return (
        f"{recipe_plan.model_name}, {size} parameters, {trained}; {short_dtype(recipe_plan.dtype)}{rounded}{autocast}"
    )


def _describe_step(recipe_plan: RecipePlan) -> str:
    recipe = recipe_plan.loaded.recipe
    rows, micro = recipe.per_device_train_batch_size, recipe_plan.micro_batches * recipe_plan.cluster.data_size
    optimizer = describe_optimizer(recipe)
    count = recipe_plan.images
    images = f" with {count:,} image{'s' if count > 1 else ''} each" if count else ""
    if recipe_plan.scored is not None:
        text = _describe_completion_batch(recipe_plan.scored, recipe) + images
        return f"{text}, {micro} times; {optimizer}" if micro > 1 else f"{text}; {optimizer}"
    text = f"{rows * micro} row{'s' if rows * micro > 1 else ''} of {recipe_plan.length:,} tokens"
    text += images
    if recipe.tokens_per_batch is not None:
        text = f"{recipe.tokens_per_batch:,} tokens at most, planned as {text}"
    return (
        f"{text}, {rows * recipe_plan.cluster.data_size} at a time; {optimizer}"
        if recipe_plan.micro_batches > 1
        else f"{text}; {optimizer}"
    )


def _describe_completion_batch(scored: Scored, recipe: TrainingSettings) -> str:
    """Return the size of a batch, such as ``1 pair of 2 x 65,536 tokens, prompt shared: 98,304 tokens``."""
    from streamtune.tasks import task_of

    longest = max(trunk + max(branches) for trunk, branches in scored.trees)
    unit, count = task_of(recipe).unit_noun, recipe.per_device_train_batch_size
    units = f"{count} {unit}{'s' if count > 1 else ''} of {'2 x ' if unit == 'pair' else ''}{longest:,} tokens"
    total = f"{scored.num_rows * scored.length:,} tokens"
    if not scored.has_hidden_tokens:
        return f"{units}: {total}"
    prompts = len(scored.trees)
    return f"{units}, {'prompts' if prompts > 1 else 'prompt'} shared: {total}"


def _describe_device(recipe_plan: RecipePlan) -> str:
    limits = recipe_plan.plan.limits
    text = f"{recipe_plan.device_name}, {show_size(limits.device_bytes)}"
    ranks = recipe_plan.cluster.ranks_per_node
    of_node = " of a node" if ranks > 1 else ""
    if not limits.shared:
        text += f"; host {show_size(ranks * limits.host_bytes)}{of_node}"
    if limits.disk_bytes:
        text += f"; disk {show_size(ranks * limits.disk_bytes)}{of_node}"
    return f"{text}; {limits.margin:.0%} of each stays free"


def _describe_time(recipe_plan: RecipePlan) -> str:
    choosing = recipe_plan.row_selection_seconds
    seconds = recipe_plan.plan.step_seconds + choosing
    text = f"{show_seconds(seconds)}/step, {recipe_plan.tokens / seconds:,.0f} tokens/s (predicted)"
    if choosing:
        text += (
            f"; {show_seconds(choosing)} of it for selecting 1 of {recipe_plan.loaded.recipe.draws_per_row} drawn rows"
        )
    if recipe_plan.scored is not None and recipe_plan.scored.forwards:
        text += "; includes forward passes without gradient"
    return f"{text}; excludes the rollout" if recipe_plan.loaded.recipe.objective == "grpo" else text


def _describe_flops(recipe_plan: RecipePlan) -> str:
    """Return FLOPs and MFU, such as ``9.6 PFLOP/step, and 3.1 PFLOP recomputed; MFU 38% of 989 TFLOP/s``.

    Forwards of a reference or a teacher are not recomputed: a step that has them says ``or without gradient``.
    """
    text = f"{_show_flops(recipe_plan.flops)}/step"
    if (more := recipe_plan.computed_flops - recipe_plan.flops) > 0:
        recipe, scored = recipe_plan.loaded.recipe, recipe_plan.scored
        has_teacher = recipe.teacher is not None and recipe.teacher_file is None
        others = " or without gradient" if has_teacher or (scored is not None and scored.forwards) else ""
        text += f", and {_show_flops(more)} recomputed{others}"
    if recipe_plan.mfu is None:
        return text
    assert recipe_plan.peak_flops is not None
    return f"{text}; MFU {recipe_plan.mfu:.0%} of {_show_flops(recipe_plan.peak_flops)}/s"


def _show_flops(flops: float) -> str:
    for size, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops / 1e6:.3g} MFLOP"


def _describe_binding_limit(chosen: Plan) -> str:
    """Return the limit that decides the schedule, and the fraction of usable device memory that the step takes."""
    limits, simulation = chosen.limits, chosen.simulation
    used = simulation.peak_bytes + (simulation.host_bytes if limits.shared else 0)
    share = used / limits.device_limit if limits.device_limit else 0.0
    return f"{chosen.binds}; the step takes {share:.0%} of the usable device memory"


MIN_TERM_BYTES = 1 << 10
"""Minimum size of a part of the memory to be shown, in bytes."""


def _memory_table(document: dict[str, Any], screen: dict[str, Any]) -> Table:
    """Return a table of the parts of the memory, with bars relative to the device's memory.

    Device memory is per rank. Host memory and disk are per node.
    """
    limits, peak = document["limits"], document["peak_bytes"]
    table = make_table(Column(), "", Column(no_wrap=True), header=None)
    width = max(10, min(60, out.width - 38))
    whole = max(limits["device_bytes"], peak, 1)
    for name, size in sorted(document["terms"].items(), key=lambda item: -item[1]):
        if size >= MIN_TERM_BYTES:
            style = "blue" if name in FIXED_TERMS else "cyan"
            table.add_row(f"  {name}", show_size(size), Text(draw_bar(size / whole, width), style=style))
    total = f"of {show_size(limits['device_bytes'])}, {show_size(limits['device_bytes'] - peak)} free"
    table.add_row("  device, total", show_size(peak), total, style="bold")
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
    change = Column("  change from chosen", overflow="fold", ratio=1)
    table = make_table(change, "step", "device", "host+disk", header="dim")
    for other in document["alternatives"]:
        away = other["host_bytes"] + other["disk_bytes"]
        text = Text(describe_schedule_difference(document["schedule"], other["schedule"], screen["layers"]))
        if not other["fits"]:
            text.append(f" ({other['why_not']})", style="red")
        table.add_row(
            Padding(text, (0, 0, 0, 2)),
            show_seconds(other["step_seconds"]),
            show_size(other["peak_bytes"]),
            show_size(away) if away else "-",
        )
    return table


def describe_memory(plan: Plan, baseline_bytes: Mapping[str, int]) -> str:
    """Return the predicted memory of a run's longest step, and of the same step without streaming, in one line.

    Args:
        baseline_bytes: Peak bytes of the same step with gradient checkpointing (key ``checkpoint``) and with plain
            autograd (key ``plain``); empty if unknown.
    """
    limits, simulation = plan.limits, plan.simulation
    text = _describe_used_bytes(simulation.peak_bytes, limits.device_bytes)
    if simulation.host_bytes and not limits.shared:
        text += f", {show_size(simulation.host_bytes)} on host"
    if simulation.disk_bytes:
        text += f", {show_size(simulation.disk_bytes)} on disk"
    sizes = [f"{'checkpointing' if name == 'checkpoint' else name} {show_size(baseline_bytes[name])}"
             for name in ("checkpoint", "plain") if name in baseline_bytes]  # fmt: skip
    return f"{text} ({', '.join([*sizes, 'simulated']) if len(sizes) < 2 else f'{sizes[0]}, {sizes[1]}; simulated'})"


def describe_optimizer(recipe: OptimizerSettings) -> str:
    """Return the optimizer's name, and state dtype, state placement and clipping if they are not the default."""
    text: str = recipe.optim
    if recipe.optim_states != "param":
        rounded = ", rounded stochastically" if recipe.optim_states == "bfloat16" else ""
        text += f", states in {short_dtype(recipe.optim_states)}{rounded}"
    if recipe.engine.optimizer == "host":
        text += ", on the host"
    return text + (", clipped by the previous step's gradient norm" if recipe.clip_norm == "lagged" else "")


def show_seconds(seconds: float) -> str:
    """Return a duration as text, such as ``0.12 s``, ``45 s``, ``12 min`` or ``3.4 h``."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def draw_bar(fraction: float, width: int) -> str:
    """Return a bar of block characters for a fraction from 0 to 1; ``width`` characters stand for 1."""
    eighths = max(1, round(max(0.0, min(1.0, fraction)) * width * 8))
    return EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


# --- several devices --------------------------------------------------------------------------------------------------


def cluster_rows(recipe_plan: RecipePlan) -> list[tuple[str, str]]:
    """Return (name, text) lines about ranks and their communication; empty for one device."""
    cluster, chosen = recipe_plan.cluster, recipe_plan.plan
    if cluster.ranks == 1:
        return []
    sending = chosen.traffic.seconds
    share = sending / chosen.step_seconds if chosen.step_seconds else 0.0
    return [
        ("ranks", cluster.describe()),
        ("sending", f"{share:.1%} of the step, assuming no overlap with computing"),
        ("", f"one device sends {_describe_sent_bytes(chosen.traffic.to_json())} per step"),
        *(
            (
                "longer",
                f"sequence_parallel_size: {each.sequence_size} ({each.form}) fits rows of {each.max_length:,} tokens",
            )
            for each in recipe_plan.longest_rows
        ),
    ]


def _describe_sent_bytes(traffic: dict[str, Any]) -> str:
    parts = [f"{show_size(traffic['node_bytes'])} over {traffic['node_link']}"]
    if traffic["network_bytes"]:
        parts.append(f"{show_size(traffic['network_bytes'])} over the {traffic['network_link']}")
    return ", ".join(parts)


def traffic_table(traffic: dict[str, Any]) -> Table:
    """Return a table of the bytes that one device sends in a step, with a row for each kind of message.

    Args:
        traffic: Object ``traffic`` of ``plan --json``.
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
