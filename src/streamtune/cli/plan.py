"""``streamtune plan``: the schedule a run would use, its memory by term, and the time of its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Column, Table
from rich.text import Text

from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.base.quiet import leave_out_quantisers, process_is_own
from streamtune.base.result_cache import read_cached, versions, write_cached
from streamtune.base.sizes import show_size
from streamtune.cli.options import read_recipe
from streamtune.cli.screens import NodesOption, RanksOption, cluster_document, cluster_rows, traffic_table
from streamtune.recipe.presets import describe_preset

from .console import err, make_table, out, print_json, print_note, print_rows, print_table, print_title
from .options import JsonOption, RecipeArgument, SetOption, option

if TYPE_CHECKING:
    from streamtune.plan import Plan
    from streamtune.plan.simulate.scored import Scored
    from streamtune.recipe import LoadedRecipe, Recipe
    from streamtune.run.kept_plan import PlanOptions
    from streamtune.run.plan import RecipePlan

EIGHTHS = " ▏▎▍▌▋▊▉█"
FIXED = ("weights", "gathered weights", "fp32 weights", "reference", "gradients", "optimizer")
"""Terms that do not grow with the length."""


def plan(
    recipe: RecipeArgument,
    device: Annotated[str | None, option("NAME", "Plan for a device that is not here, such as h100-80gb.")] = None,
    device_memory: Annotated[str | None, option("SIZE", "Its memory, such as 80GiB.")] = None,
    host_memory: Annotated[str | None, option("SIZE", "Memory of the machine to plan with.")] = None,
    disk_memory: Annotated[str | None, option("SIZE", "Space in engine.offload_dir.")] = None,
    length: Annotated[int | None, option("N", "Tokens of a row; by default max_length.", least=2)] = None,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the fastest exact schedule that fits, its memory by term and its step time. Reads no weights and no data.

    The model's configuration is enough. To see another model, change it:

        streamtune recipes copy qwen3-8b-long my.yaml

        streamtune plan my.yaml --device h100-80gb --host-memory 256GiB

        streamtune plan my.yaml --device h100-80gb --ranks 16 --nodes 2 --set deepspeed=zero3

        streamtune plan my.yaml --set hidden_size=5120 --set num_hidden_layers=40 --set num_attention_heads=40
    """
    loaded = read_recipe(recipe, set_)
    from streamtune.run.kept_plan import PLANS, PlanOptions, plan_key

    options = PlanOptions(device, device_memory, host_memory, disk_memory, length, ranks, nodes)
    key = plan_key(loaded, options)
    page = read_cached(PLANS, key, print_note) if key is not None else None
    if page is None:
        page = _plan(loaded, options)
        if key is not None and plan_key(loaded, options) == key:  # else a file changed meanwhile
            write_cached(PLANS, key, page)
    if as_json:
        print_json(page["document"])
        return
    for note in loaded.notes:
        print_note(note)
    _print_page(page, loaded)


def _plan(loaded: LoadedRecipe, options: PlanOptions) -> dict[str, Any]:
    """Plan, and return the JSON document and the texts of the screen."""
    recipe = loaded.recipe
    quantises = recipe.finetuning_type == "qlora" or OPTIMIZERS[recipe.optim].extra == "quant"
    if process_is_own() and not quantises and not recipe.trust_remote_code:
        versions()  # they name the packages that are there, and are remembered
        leave_out_quantisers()
    with err.status("loading libraries") as status, _uncollected():
        from streamtune.run.plan import plan_recipe

        planned = plan_recipe(loaded, options, notify=status.update if err.is_terminal else Paced())
    return {"document": _document(planned), "screen": _screen(planned)}


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave out the search for cycles of garbage inside: libraries and models are kept, and it looks at all of them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Paced:
    """Prints what takes a while next, where no status line is shown: a new activity at once, its progress now and then.

    A message is an activity, or an activity, a colon and its progress.
    """

    SECONDS = 2.0

    def __init__(self) -> None:
        self._activity, self._printed = "", 0.0

    def __call__(self, message: str) -> None:
        activity, now = message.partition(":")[0], time.monotonic()
        if activity == self._activity and now < self._printed + self.SECONDS:
            return
        self._activity, self._printed = activity, now
        err.print(message, soft_wrap=True, markup=False)


def _document(planned: RecipePlan) -> dict[str, Any]:
    return {
        **planned.plan.to_json(),
        **cluster_document(planned),
        "model": planned.model_name,
        "parameters": planned.parameters.total,
        "trainable_parameters": planned.parameters.trainable,
        "flops": {"model": planned.flops, "computed": planned.computed_flops},
        "peak_flops": planned.peak_flops,
        "mfu": planned.mfu,
        "length": planned.length,
        "positions": planned.positions,
        "tokens": planned.tokens,
        "objective": planned.loaded.recipe.objective,
        **({} if planned.loaded.recipe.select_rows is None else {"select_seconds": planned.select_seconds}),
        "completions": None if planned.scored is None else asdict(planned.scored),
        "device": planned.device_name,
        "here": planned.here,
    }


# --- the screen -------------------------------------------------------------------------------------------------------


def _screen(planned: RecipePlan) -> dict[str, Any]:
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


def _print_page(page: dict[str, Any], loaded: LoadedRecipe) -> None:
    document, screen = page["document"], page["screen"]
    print_title(f"plan {loaded.path}")
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
    if OPTIMIZERS[planned.loaded.recipe.optim].one_block:
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


def _describe_scored(scored: Scored, recipe: Recipe) -> str:
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
    """Return a table with a bar for each term, relative to the device's memory; host and disk are those of a node."""
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


def describe_optimizer(recipe: Recipe) -> str:
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
