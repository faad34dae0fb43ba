"""``streamtune plan``: find the fastest schedule that fits in memory, and predict its memory and step time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from streamtune.base.libraries import hide_quantisers, is_command_process
from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.base.result_cache import code_versions, read_cached, write_cached
from streamtune.cli.options import read_recipe
from streamtune.cli.plan_screen import plan_screen_texts, print_plan_page

from .console import err, print_json, print_note
from .options import JsonOption, NodesOption, RanksOption, RecipeArgument, SetOption, option

if TYPE_CHECKING:
    from streamtune.recipe import LoadedRecipe
    from streamtune.run.plan import RecipePlan
    from streamtune.run.plan_cache import PlanOptions


def plan(
    recipe: RecipeArgument,
    device: Annotated[
        str | None,
        option(
            "NAME",
            "Name of the device to plan for, such as h100-80gb. [default: this machine's device; without a GPU, the "
            "known device whose memory is nearest to --device-memory]",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Device memory that the schedule may use, such as 80GiB. [default: engine.device_memory; if that "
            "is auto, all memory of --device, or the free memory of this machine's device]",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Host memory that the schedule may use, such as 256GiB. [default: engine.host_memory; if that is "
            "auto, this machine's free memory]",
        ),
    ] = None,
    disk_memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Disk space that the schedule may use, such as 2TiB. [default: engine.disk_memory; if that is "
            "auto, the free space in engine.offload_dir]",
        ),
    ] = None,
    length: Annotated[
        int | None, option("N", "Row length to plan for, in tokens. [default: the recipe's max_length]", min_value=2)
    ] = None,
    images: Annotated[
        int | None,
        option(
            "N",
            "Number of images of a row, for a vision-language model. [default: rows of text; 1 with --image-size]",
            min_value=1,
        ),
    ] = None,
    image_size: Annotated[
        str | None, option("WIDTHxHEIGHT", "Size of these images in pixels. [default: 1024x1024]")
    ] = None,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the fastest schedule that fits in memory, its step time, and its memory by purpose.

    A schedule is how a step is streamed: chunk size, what is stored where, what is recomputed. Reads the model's
    configuration, but neither weights nor data. `--set` also changes keys of the configuration, to plan another model:

        streamtune recipes copy qwen3-8b-long my.yaml

        streamtune plan my.yaml --device h100-80gb --host-memory 256GiB

        streamtune plan my.yaml --device h100-80gb --ranks 16 --nodes 2 --set deepspeed=zero3

        streamtune plan my.yaml --images 200 --image-size 1024x1448

        streamtune plan my.yaml --set hidden_size=5120 --set num_hidden_layers=40 --set num_attention_heads=40
    """
    loaded = read_recipe(recipe, set_)
    from streamtune.run.plan_cache import PLANS, PlanOptions, plan_key

    options = PlanOptions(device, device_memory, host_memory, disk_memory, length, ranks, nodes, images, image_size)
    key = plan_key(loaded, options)
    page = read_cached(PLANS, key, print_note) if key is not None else None
    if page is None:
        page = _make_plan_page(loaded, options)
        if key is not None and plan_key(loaded, options) == key:  # a changed file would change the key
            write_cached(PLANS, key, page)
    if as_json:
        print_json(page["document"])
        return
    print_plan_page(page, loaded.path)
    for note in loaded.notes:
        print_note(note)


def _make_plan_page(loaded: LoadedRecipe, options: PlanOptions) -> dict[str, Any]:
    """Return a new plan as a JSON document (``document``) and as texts of its screen (``screen``)."""
    recipe = loaded.recipe
    quantises = recipe.finetuning_type == "qlora" or OPTIMIZERS[recipe.optim].extra == "quant"
    if is_command_process() and not quantises and not recipe.trust_remote_code:
        code_versions()  # remembers the installed packages, before quantisers are hidden
        hide_quantisers()
    with err.status("loading libraries") as status, _without_garbage_collection():
        from streamtune.run.plan import plan_recipe

        recipe_plan = plan_recipe(loaded, options, notify=status.update if err.is_terminal else ProgressPrinter())
    return {"document": _plan_document(recipe_plan), "screen": plan_screen_texts(recipe_plan)}


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class ProgressPrinter:
    """Prints progress messages as lines, for output that cannot show a status line.

    A message is ``activity`` or ``activity: progress``. A new activity is printed at once, and progress at most every
    ``SECONDS`` seconds.
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


def _plan_document(recipe_plan: RecipePlan) -> dict[str, Any]:
    return {
        **recipe_plan.plan.to_json(),
        **_cluster_document(recipe_plan),
        "model": recipe_plan.model_name,
        "parameters": recipe_plan.parameters.total,
        "trainable_parameters": recipe_plan.parameters.trainable,
        "flops": {"model": recipe_plan.flops, "computed": recipe_plan.computed_flops},
        "peak_flops": recipe_plan.peak_flops,
        "mfu": recipe_plan.mfu,
        "length": recipe_plan.length,
        **({"images": recipe_plan.images} if recipe_plan.images else {}),
        "positions": recipe_plan.position_advice,
        "device_advice": recipe_plan.device_advice,
        "tokens": recipe_plan.tokens,
        "objective": recipe_plan.loaded.recipe.objective,
        **(
            {}
            if recipe_plan.loaded.recipe.select_rows is None
            else {"select_seconds": recipe_plan.row_selection_seconds}
        ),
        "completions": None if recipe_plan.scored is None else asdict(recipe_plan.scored),
        "device": recipe_plan.device_name,
        "here": recipe_plan.is_local_device,
    }


def _cluster_document(recipe_plan: RecipePlan) -> dict[str, Any]:
    """Return the entry ``cluster`` of ``plan --json``; an empty dictionary for one device."""
    cluster, chosen = recipe_plan.cluster, recipe_plan.plan
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
            "micro_batches": recipe_plan.micro_batches,
            "links": asdict(cluster.links),
            "host_bytes_per_node": node * simulation.host_bytes,
            "host_terms_per_node": {name: node * size for name, size in simulation.host_terms.items()},
            "host_memory_bytes_per_node": node * chosen.limits.host_bytes,
            "disk_bytes_per_node": node * simulation.disk_bytes,
            "compute_seconds": chosen.step_seconds - sending,
            "communication_seconds": sending,
            "tokens_per_step": recipe_plan.tokens,
            "tokens_per_second": recipe_plan.tokens / chosen.step_seconds,
            "longer": [asdict(each) for each in recipe_plan.longest_rows],
        }
    }
