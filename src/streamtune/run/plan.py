"""Plan the schedule of a recipe's steps from model, row lengths, available memory, and speeds of the device.

plan_recipe        for ``streamtune plan``: reads only the model's configuration; for this machine or another device
choose_placement   for a run, before its model is loaded: decides whether weights or optimizer states are offloaded
plan_model         for a run, after its model is loaded: within the remaining memory
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamtune import data, models
from streamtune.base.adapters import base_of
from streamtune.base.text import parse_size
from streamtune.engine import decoder_layers
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.engine.offloaded_weights import offloaded_parameters
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.devices import device_name, free_device_bytes, shares_host_memory, simulated_device_type
from streamtune.plan.budget import Limits, free_disk_bytes
from streamtune.plan.calibrate import load_rates, measure_disk
from streamtune.plan.estimate import Simulate
from streamtune.plan.planner import Plan, add_offloaded_weights, as_fixed_fields, choose, evaluate_schedule
from streamtune.plan.rates import Device, Rates, data_sheet_rates, find_device, nearest_device
from streamtune.plan.refusal import NothingFitsError
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.image_inputs import measure_images
from streamtune.plan.simulate.memory import device_model_bytes, model_bytes, storage_bytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.scored import Completions, Scored
from streamtune.plan.simulate.simulate import Simulation, resident_memory, simulate
from streamtune.plan.simulate.workload import TeacherShape, Workload, sketch_flops
from streamtune.recipe.keys.batching import BatchKeys
from streamtune.recipe.keys.engine import EngineKeys, EngineSpec
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.settings import ModelSettings, TrainingSettings
from streamtune.run.cluster import (
    RequestedRanks,
    SharedLimit,
    cluster_of,
    link_bandwidths,
    longest_rows_if_shared,
    micro_batches_per_step,
)
from streamtune.run.data import locate_errors, make_tokenizer
from streamtune.run.device import choose_device, compute_dtype, known_peak_flops, make_schedule, prepare_libraries
from streamtune.run.model import make_meta_model, make_optimizer, make_reference_blueprint, train_largest_block
from streamtune.run.plan_cache import PlanOptions
from streamtune.run.weight_choices import Settings, first_fitting_choice, placement_choices, with_best_precision
from streamtune.schedule import GIVEN, Schedule
from streamtune.tasks import Task, task_of
from streamtune.tasks.task import image_options

MEMORY_FRACTIONS = (0.75, 0.9, 0.97)
"""Fractions of the failed schedule's memory that a smaller schedule may use, tried in order.

Memory of weights, gradients and optimizer is not counted.
"""


SMALL_FRACTION = 0.5
"""Fraction of device memory. If weights, gradients and optimizer need less, some schedule usually fits."""

USUAL_STEPS = 6
"""Typical number of simulated steps in a plan, shown in progress messages."""


@dataclass(frozen=True)
class RecipePlan:
    """Result of ``streamtune plan``.

    Attributes:
        loaded: Recipe, with weights or optimizer states in host memory if nothing fits otherwise.
        model_name: Class of the model.
        parameters: Number of parameters.
        length: Tokens of a row, or of a prompt with its longest completion.
        images: Number of images of a row.
        is_local_device: True if the plan is for the local device.
        scored: Completions of a micro-batch, for preference and reinforcement learning; else None.
        cluster: Ranks of the step. The bytes of the plan are per rank.
        micro_batches: Number of micro-batches per rank in an optimizer step.
        longest_rows: Longest rows if more ranks share each sequence; empty if the recipe sets
            ``sequence_parallel_size``.
        flops: Model FLOPs of a step on all ranks, without recomputation.
        peak_flops: Peak FLOP/s of one device, from the recipe or its data sheet; None if unknown.
        row_selection_flops: FLOPs per rank of selecting the rows of a step (``select_rows``).
        position_advice: Advice if rows are longer than the model's positions; None if they are not.
        device_advice: What is missing or unknown of a device that is not the local one; None if nothing is.
    """

    loaded: LoadedRecipe
    model_name: str
    parameters: models.ParameterCount
    dtype: str
    layers: int
    length: int
    device_name: str
    is_local_device: bool
    plan: Plan
    scored: Scored | None
    cluster: Cluster = field(default_factory=Cluster)
    micro_batches: int = 1
    longest_rows: tuple[SharedLimit, ...] = ()
    flops: int = 0
    peak_flops: float | None = None
    row_selection_flops: int = 0
    images: int = 0
    position_advice: str | None = None
    device_advice: str | None = None

    @property
    def row_selection_seconds(self) -> float:
        """Predicted seconds of selecting the rows of a step (``select_rows``)."""
        work = self.plan.simulation.work
        return self.plan.step_seconds * self.row_selection_flops / max(1, work.matmul_flops + work.attention_flops)

    @property
    def computed_flops(self) -> int:
        """FLOPs of matrix products and attention in a step on all ranks, with recomputation and reference models."""
        work = self.plan.simulation.work
        return self.cluster.ranks * (work.matmul_flops + work.attention_flops)

    @property
    def mfu(self) -> float | None:
        """Predicted model FLOPs utilisation; None if ``peak_flops`` is unknown."""
        if self.peak_flops is None or not self.plan.step_seconds:
            return None
        return self.flops / self.plan.step_seconds / self.peak_flops / self.cluster.ranks

    @property
    def tokens(self) -> int:
        """Number of tokens in an optimizer step on all ranks."""
        times = self.micro_batches * self.cluster.data_size
        if self.scored is not None:
            return self.scored.num_rows * self.scored.length * times
        return self.length * self.loaded.recipe.per_device_train_batch_size * times


@dataclass(frozen=True)
class LongestStep:
    """The longest micro-batch of a run.

    Attributes:
        length: Tokens of the longest row, or of the longest prompt with its completion.
        completions: Completions of a micro-batch, for preference and reinforcement learning; else None.
        reference_bytes: Bytes of a reference model on the device.
        images: Inputs of the model for the images of a micro-batch; None for rows of text.
    """

    length: int
    completions: Completions | None = None
    reference_bytes: int = 0
    images: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class PlanInputs:
    """Additional inputs of :func:`plan_model`.

    Attributes:
        cluster: Ranks of the run.
        resumed_schedule: Schedule of the resumed run, which is used again if it fits and the recipe allows it.
        failed_schedule: Schedule that ran out of memory. The new schedule uses less, even if the recipe fixes one.
        fixed: Schedule fields that the planner must not choose, in addition to the fields that the recipe sets.
    """

    cluster: Cluster = field(default_factory=Cluster)
    resumed_schedule: Schedule | None = None
    failed_schedule: Schedule | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)


def plan_recipe(
    loaded: LoadedRecipe, options: PlanOptions, *, notify: Callable[[str], None] = lambda message: None
) -> RecipePlan:
    """Return the plan of a recipe; neither weights nor data are read.

    Args:
        loaded: Recipe with the lines of its keys.
        options: Options of the command line.
        notify: Function called with a message before each slow activity.

    Raises:
        UserError: A name is unknown, or no schedule fits in memory; ``where`` is the line of the recipe.
    """
    recipe = loaded.recipe
    with locate_errors(loaded):
        target, here = _planned_device(recipe, options)
        prepare_libraries(here)
        device = here if target is None else torch.device("mps" if target.is_unified else "cuda")
        model_of = blueprint_cache(device)
        model = model_of(with_best_precision(recipe))
        length = options.length or recipe.max_length
        if length < task_of(recipe).min_row_tokens:
            raise ArgumentError(
                f"a prompt with its completion must have at least {task_of(recipe).min_row_tokens} tokens, found "
                f"{length}",
                where="max_length" if options.length is None else "--length",
            )
        images = None
        if options.images is not None or options.image_size is not None:
            options = replace(options, images=options.images or 1)
            images = _planned_images(loaded, options, length)
        cluster = cluster_of(recipe, model, RequestedRanks(options.ranks, options.nodes), link_bandwidths(target, here))
        limits = _memory_limits(recipe.engine, options, target, here, cluster)
        rates = data_sheet_rates(target) if target else local_rates(with_best_precision(recipe), model, here, notify)
        rates = replace(rates, host_bandwidth=rates.host_bandwidth / cluster.ranks_per_node)
        notify("planning")
        recipe, workload, chosen = _plan_first_that_fits(
            placement_choices(recipe, limits, cluster),
            lambda choice: recipe_workload(choice, model_of(choice), length, device, cluster=cluster, images=images),
            limits,
            rates,
            announce_simulations(notify),
        )
        model = model_of(recipe)
        longest_rows = (
            tuple(longest_rows_if_shared(recipe, workload, limits, notify)) if cluster.sequence_size == 1 else ()
        )
    base = base_of(model)
    return RecipePlan(
        loaded=replace(loaded, recipe=recipe),
        model_name=type(base).__name__,
        parameters=models.count_parameters(model),
        dtype=str(models.trained_dtype(model)).removeprefix("torch."),
        layers=len(decoder_layers(model)),
        length=length,
        device_name=target.title if target else device_name(here),
        is_local_device=target is None,
        plan=chosen,
        scored=workload.scored,
        cluster=cluster,
        micro_batches=workload.micro_batches,
        longest_rows=longest_rows,
        flops=cluster.data_size * chosen.flops,
        peak_flops=recipe.peak_flops or (target.matmul_flops if target else known_peak_flops(recipe, here)),
        row_selection_flops=_row_selection_flops(recipe, workload),
        images=options.images or 0,
        position_advice=models.position_warning(base, length),
        device_advice=None if target is None else _device_advice(recipe, target, base.dtype),
    )


def _planned_images(loaded: LoadedRecipe, options: PlanOptions, length: int) -> Mapping[str, torch.Tensor]:
    """Return the model's inputs for the images of a micro-batch whose rows have images of one size."""
    recipe = loaded.recipe
    text = options.image_size or "1024x1024"
    size = re.fullmatch(r"([1-9]\d{0,5})[xX]([1-9]\d{0,5})", text)
    if size is None or int(size[1]) * int(size[2]) > data.MOST_PIXELS:
        raise ArgumentError(
            f"'{text}' is not a size: WIDTHxHEIGHT, at most {data.MOST_PIXELS / 1e6:.0f} million pixels",
            where="--image-size",
            fix="write 1024x1024",
        )
    spec = image_options(recipe)
    if spec is None:
        raise ArgumentError("rows of this recipe have no images", where="--images", fix="use a vision-language model")
    processor = data.ImageProcessor(spec, make_tokenizer(recipe, (), None, lambda text: None))
    rows = recipe.per_device_train_batch_size * (2 if recipe.objective == "dpo" else 1)
    inputs, tokens = processor.shapes_of((options.images or 0) * rows, int(size[1]), int(size[2]))
    if tokens * (options.images or 0) >= length:
        raise ArgumentError(
            f"{options.images:,} images of {size[0]} pixels have {tokens * (options.images or 0):,} tokens, and a row "
            f"has {length:,}",
            where="--images",
            fix="raise --length, or set max_pixels",
        )
    return inputs


def _device_advice(recipe: EngineKeys, device: Device, dtype: torch.dtype) -> str | None:
    """Return what is known of a device from the table: that nobody has tried it, or that it has no bfloat16."""
    texts = [] if device.is_tested else ["untested: nobody has run StreamTune on this device"]
    if not device.has_bfloat16:
        needs = recipe.autocast_dtype == "bfloat16" or dtype == torch.bfloat16
        texts.append("it has no bfloat16" + (": write fp16: true, and delete bf16 and dtype" if needs else ""))
    return "; ".join(texts) or None


def _row_selection_flops(recipe: BatchKeys, workload: Workload) -> int:
    if recipe.select_rows is None:
        return 0
    return recipe.draws_per_row * workload.batch_size * workload.micro_batches * sketch_flops(workload)


def _plan_first_that_fits(
    choices: Sequence[Settings],
    workload_of: Callable[[Settings], Workload],
    limits: Limits,
    rates: Rates,
    simulate: Simulate,
) -> tuple[Settings, Workload, Plan]:
    """Return the first choice for which a schedule fits in memory, with its workload and its plan."""
    first, workload = choices[0], workload_of(choices[0])
    if first.engine.schedule == "fixed":
        choice = first_fitting_choice(choices, workload_of, limits, simulate=simulate)
        workload = workload_of(choice)
        return choice, workload, evaluate_schedule(workload, make_schedule(choice.engine), limits, rates)
    if len(choices) > 1 and resident_memory(workload).device_bytes <= SMALL_FRACTION * limits.device_limit:
        with suppress(NothingFitsError):  # usually something fits
            plan = choose(
                workload, limits, rates, fixed=first.engine.schedule_fields(), simulate=simulate, explain=False
            )
            return first, workload, plan
    choice = first_fitting_choice(choices, workload_of, limits, simulate=simulate)
    workload = workload_of(choice)
    return choice, workload, choose(workload, limits, rates, fixed=choice.engine.schedule_fields(), simulate=simulate)


def choose_placement(
    recipe: Settings,
    length: int,
    device: torch.device,
    completions: Callable[[Any], Completions | None] = lambda model: None,
    *,
    memory_spec: EngineSpec | None = None,
    batch_size: int | None = None,
    resumed: bool = False,
    cluster_of: Callable[[Any], Cluster] | None = None,
) -> Settings:
    """Return the recipe with a precision, and with weights or optimizer in host memory if they do not fit on the
    device.

    Called before the model is loaded, while all memory is free.

    Args:
        recipe: Recipe of the run.
        length: Tokens of the longest row, or of the longest prompt with its completion.
        device: Device of this rank.
        completions: Function from the model on ``meta`` to the completions of a micro-batch.
        memory_spec: Memory sizes to plan with; None: the recipe's.
        batch_size: Number of rows in a micro-batch; None: the recipe's.
        resumed: True for a resumed run, whose precision is already in the recipe.
        cluster_of: Function from the model on ``meta`` to the ranks of the run; None for one rank.
    """
    model_of = blueprint_cache(device)
    first = recipe if resumed else with_best_precision(recipe)
    cluster = Cluster() if cluster_of is None else cluster_of(model_of(first))
    limits = _memory_limits(memory_spec or recipe.engine, PlanOptions(), None, device, cluster)
    choices = placement_choices(recipe, limits, cluster, resumed=resumed)
    if len(choices) == 1:
        return choices[0]
    scored = completions(model_of(first))

    def workload_of(choice: Settings) -> Workload:
        second_model_bytes = reference_bytes(task_of(choice), device)
        model = model_of(choice)
        workload = make_workload(choice, model, LongestStep(length, scored, second_model_bytes), device, cluster)
        return workload if batch_size is None else replace(workload, batch_size=batch_size)

    return first_fitting_choice(choices, workload_of, limits)


def blueprint_cache(device: torch.device) -> Callable[[ModelSettings], Any]:
    """Return a function that creates the model of a recipe on ``meta``, and caches one model per dtype."""
    models_by_dtype: dict[str, Any] = {}

    def model_of(recipe: ModelSettings) -> Any:
        if recipe.dtype not in models_by_dtype:
            models_by_dtype[recipe.dtype] = make_meta_model(recipe, device)
        return models_by_dtype[recipe.dtype]

    return model_of


def plan_model(
    recipe: TrainingSettings,
    model: Any,
    longest_step: LongestStep,
    device: torch.device,
    inputs: PlanInputs | None = None,
    *,
    notify: Callable[[str], None] = lambda message: None,
) -> Plan:
    """Return the plan of a run after its model is loaded, within the remaining memory.

    Args:
        recipe: Recipe of the run.
        model: Model on its device, with its adapters, before ``streamtune.stream``.
        longest_step: Longest micro-batch, with whole rows even if ranks share them.
        device: Device of this rank.
        inputs: Ranks of the run and an earlier schedule; None for one rank and no schedule.
        notify: Function called with a message before each slow activity.

    Raises:
        ArgumentError: No schedule fits in memory.
    """
    meta_model = meta_copy(model)
    inputs = inputs or PlanInputs()
    limits = _memory_limits(recipe.engine, PlanOptions(), None, device, inputs.cluster)
    # Loaded weights belong to the memory of the step, so their bytes are added to the free memory.
    if recipe.engine.device_memory == "auto" and models.find_deferred_weights(model) is None:
        limits = replace(
            limits, device_bytes=limits.device_bytes + device_model_bytes(model) + longest_step.reference_bytes
        )
    spec = recipe.engine
    limits = add_offloaded_weights(
        limits, model, device_given=spec.device_memory != "auto", host_given=spec.host_memory != "auto"
    )
    rates = local_rates(recipe, model, device, notify)
    workload = make_workload(recipe, meta_model, longest_step, device, inputs.cluster)
    fixed_fields = {**recipe.engine.schedule_fields(), **inputs.fixed}
    if inputs.failed_schedule is not None:
        return _plan_smaller_schedule(workload, inputs.failed_schedule, limits, rates, fixed_fields)
    if recipe.engine.schedule == "fixed":
        return evaluate_schedule(workload, make_schedule(recipe.engine), limits, rates)
    resumed_schedule = inputs.resumed_schedule
    if resumed_schedule is not None and {**as_fixed_fields(resumed_schedule), **fixed_fields} == as_fixed_fields(
        resumed_schedule
    ):
        earlier = evaluate_schedule(workload, resumed_schedule, limits, rates)
        if earlier.fits:
            return earlier
        notify(
            "the schedule of the resumed run no longer fits; another schedule gives the same gradient, up to rounding"
        )
    return choose(workload, limits, rates, fixed=fixed_fields)


def _plan_smaller_schedule(
    workload: Workload, failed_schedule: Schedule, limits: Limits, rates: Rates, written_fields: dict[str, Any]
) -> Plan:
    simulation = evaluate_schedule(workload, failed_schedule, limits, rates).simulation
    fixed_bytes = sum(simulation.terms.get(name, 0) for name in ("weights", "gradients", "optimizer"))
    fixed_fields = {name: value for name, value in written_fields.items() if name in ("offload_dir", *GIVEN)}
    for fraction in MEMORY_FRACTIONS:
        device_bytes = int((fixed_bytes + fraction * (simulation.peak_bytes - fixed_bytes)) / (1 - limits.margin))
        smaller = replace(limits, device_bytes=min(limits.device_bytes, device_bytes))
        try:
            return choose(workload, smaller, rates, fixed=fixed_fields)
        except ArgumentError:
            if fraction == MEMORY_FRACTIONS[-1]:
                raise
    raise AssertionError("unreachable: the last memory fraction gives a plan or raises an error")


def announce_simulations(notify: Callable[[str], None]) -> Simulate:
    """Return a function that simulates a step, after calling ``notify`` with the number of the simulation."""
    count = 0

    def notify_and_simulate(workload: Workload, schedule: Schedule) -> Simulation:
        nonlocal count
        count += 1
        suffix = f" (most plans simulate {USUAL_STEPS})" if count <= USUAL_STEPS else ""
        notify(f"planning: simulating step {count}{suffix}")
        return simulate(workload, schedule)

    return notify_and_simulate


def make_workload(
    recipe: TrainingSettings,
    model: nn.Module,
    longest_step: LongestStep,
    device: torch.device,
    cluster: Cluster | None = None,
) -> Workload:
    """Return the description of a training step that the planner simulates.

    Args:
        recipe: Recipe of the step.
        model: Model on ``meta``, with its adapters.
        longest_step: Longest micro-batch.
        device: Device whose kernels are simulated.
        cluster: Ranks that share the step; None for one rank.
    """
    train_largest_block(recipe, model)
    images = longest_step.images
    return Workload(
        make_model=lambda: model,
        length=longest_step.length,
        batch_size=recipe.per_device_train_batch_size,
        micro_batches=micro_batches_per_step(recipe, cluster or Cluster()),
        cluster=cluster or Cluster(),
        make_optimizer=partial(make_optimizer, recipe),
        autocast=recipe.autocast_dtype,
        device_type=simulated_device_type(device),
        completions=longest_step.completions,
        token_loss=None if (loss := task_of(recipe).token_loss).is_plain else loss,
        teacher=_teacher_shape(recipe, device),
        teacher_top_k=task_of(recipe).teacher_top_k,
        reference_bytes=longest_step.reference_bytes,
        images=None
        if images is None
        else measure_images(model, images, autocast=recipe.autocast_dtype, device=simulated_device_type(device)),
        step=recipe.step_kind,
        keep=recipe.cache,
    )


def _teacher_shape(recipe: ModelSettings, device: torch.device) -> TeacherShape | None:
    """Return the sizes of the recipe's teacher model; None if no teacher model is loaded."""
    if recipe.teacher is None or recipe.teacher_file is not None:
        return None
    model: Any = make_reference_blueprint(recipe, device, recipe.teacher).requires_grad_(True)
    weight = model.get_output_embeddings().weight
    matrices = sum(p.numel() for layer in decoder_layers(model) for p in layer.parameters() if p.ndim > 1)
    return TeacherShape(
        hidden=weight.shape[1],
        vocabulary=weight.shape[0],
        dtype=weight.dtype,
        flops=2 * matrices,
        make_model=lambda: model,
        structure=model.config.to_json_string(use_diff=False),
    )


def recipe_workload(
    recipe: TrainingSettings,
    model: nn.Module,
    length: int,
    device: torch.device,
    *,
    cluster: Cluster | None = None,
    images: Mapping[str, torch.Tensor] | None = None,
) -> Workload:
    """Return the description of a training step with rows of ``length`` tokens, as in :func:`make_workload`."""
    task = task_of(recipe)
    completions = task.make_shape_function(share=images is None and shares_prompts(task, model, device))
    longest_step = LongestStep(length, completions, reference_bytes(task, device), images)
    return make_workload(recipe, model, longest_step, device, cluster)


def shares_prompts(task: Task[Any], model: nn.Module, device: torch.device) -> bool:
    """Return True if several completions of a prompt can be computed with the prompt only once in this model.

    Raises:
        UnsupportedModelError: The model does not support this, but the recipe has ``share_prefix: always``.
    """
    if not task.may_share_prompts:
        return False
    tree = Scored(((5, (6, 6)),))
    workload = Workload(
        lambda: model, tree.length, device_type=simulated_device_type(device), completions=lambda length, size: tree
    )
    try:
        simulate(workload, Schedule(chunk_size=4))
    except UnsupportedModelError as error:
        if task.share_prefix == "always":
            error.where = "share_prefix"
            raise
        return False
    return True


def reference_bytes(task: Task[Any], device: torch.device) -> int:
    """Return the bytes of the reference model's weights on the device; 0 without a second model."""
    if not task.has_second_model:
        return 0
    model = make_reference_blueprint(task.recipe, device, task.reference_name)
    if task.recipe.engine.weights == "host":
        return model_bytes(model) - storage_bytes(offloaded_parameters(model, decoder_layers(model)))
    return model_bytes(model)


def device_to_simulate(
    recipe: EngineKeys, device_name_option: str | None, device_bytes: int | None, local_device: torch.device
) -> Device | None:
    """Return the device to plan for, from the table of devices; None for the local device.

    Args:
        recipe: Recipe with the key ``device``.
        device_name_option: Name of the device on the command line; None if not set.
        device_bytes: Bytes of device memory on the command line; None if not set. Without a name and a local
            accelerator, the device in the table with the nearest memory size is returned.
        local_device: Local device.
    """
    if device_name_option is not None:
        return find_device(device_name_option)
    if device_bytes is not None and local_device.type == "cpu" and recipe.device != "cpu":
        return nearest_device(device_bytes)
    return None


def device_memory_bytes(device: Device | None, local_device: torch.device) -> int:
    """Return the device memory to plan with, in bytes: all memory of ``device``, or the free memory of the local
    device."""
    if device is not None:
        return device.memory_bytes
    return usable_host_bytes() if shares_host_memory(local_device) else free_device_bytes(local_device)


# --- available memory -------------------------------------------------------------------------------------------------


def _planned_device(recipe: EngineKeys, options: PlanOptions) -> tuple[Device | None, torch.device]:
    """Return the device from the table of devices to plan for (None: the local device), and the local device."""
    local_device = torch.device("cpu") if options.device else choose_device(recipe.device)
    size = options.device_memory
    device_bytes = parse_size(size, where="--device-memory") if size is not None else None
    return device_to_simulate(recipe, options.device, device_bytes, local_device), local_device


def _memory_limits(
    spec: EngineSpec, options: PlanOptions, target: Device | None, local_device: torch.device, cluster: Cluster
) -> Limits:
    """Return the memory to plan with, per rank: from the command line, else the recipe, else the device."""
    is_shared = shares_host_memory(local_device) if target is None else target.is_unified
    device_bytes = _parse_size(options.device_memory, spec.device_memory, "device_memory")
    if device_bytes is None:
        device_bytes = device_memory_bytes(target, local_device)
    host_bytes = _parse_size(options.host_memory, spec.host_memory, "host_memory")
    disk_bytes = _parse_size(options.disk_memory, spec.disk_memory, "disk_memory")
    if disk_bytes is None:
        disk_bytes = free_disk_bytes(spec.offload_dir) if spec.offload_dir else 0
    if host_bytes is None:
        host_bytes = usable_host_bytes()
    return Limits(
        device_bytes=device_bytes // (cluster.ranks_per_node if is_shared else 1),
        host_bytes=host_bytes // cluster.ranks_per_node,
        disk_bytes=disk_bytes // cluster.ranks_per_node,
        margin=spec.margin,
        shared=is_shared,
    )


def _parse_size(option: str | None, key: str, name: str) -> int | None:
    if option is not None:
        return parse_size(option, where=f"--{name.replace('_', '-')}")
    return None if key == "auto" else parse_size(key, where=f"engine.{name}")


def local_rates(recipe: EngineKeys, model: Any, device: torch.device, notify: Callable[[str], None]) -> Rates:
    """Return measured speeds of the local device in the recipe's compute dtype, and of the disk of
    ``engine.offload_dir``."""
    rates = load_rates(device, compute_dtype(recipe, model), notify=notify)
    directory = recipe.engine.offload_dir
    if directory is not None and Path(directory).is_dir():
        try:
            rates = replace(rates, disk_bandwidth=measure_disk(Path(directory)))
        except OSError as error:
            raise ArgumentError(
                f"{directory} cannot be written: {error.strerror}", where="engine.offload_dir"
            ) from error
    return rates
