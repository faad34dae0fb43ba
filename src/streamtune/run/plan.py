"""Plan the schedule of a recipe's steps, from what is trained, the memory there is, and the rates of the device.

plan_recipe   for ``streamtune plan``: from the configuration alone, for this machine or for a device that is not there
place_recipe  for a run, before its model is loaded: whether weights or optimizer wait on the host
plan_model    for a run: of the model that is loaded, within the memory that is free besides it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamtune import models
from streamtune.base.adapters import base_of
from streamtune.base.text import parse_size
from streamtune.engine import decoder_layers
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.engine.waiting import waiting_parameters
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.plan.budget import Limits, device_name, free_device_bytes, free_disk_bytes
from streamtune.plan.calibrate import load_rates, measure_disk
from streamtune.plan.estimate import Simulate
from streamtune.plan.planner import Plan, as_fixed, choose, evaluate_schedule, with_waiting_weights
from streamtune.plan.rates import Device, Rates, find_device, nearest_device, sheet_rates
from streamtune.plan.refusal import NothingFitsError
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.memory import device_held_bytes, distinct_bytes, held_bytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.scored import Completions, Scored
from streamtune.plan.simulate.simulate import Simulation, holdings_of, simulate
from streamtune.plan.simulate.workload import TeacherShape, Workload, sketch_flops
from streamtune.recipe.keys.batching import BatchKeys
from streamtune.recipe.keys.engine import EngineKeys, EngineSpec
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.settings import ModelSettings, TrainingSettings
from streamtune.run.cluster import RanksAsked, Wider, accumulation_of, cluster_of, links_for, wider_of
from streamtune.run.data import blame_recipe
from streamtune.run.device import choose_device, make_schedule, peak_of, prepare_libraries
from streamtune.run.kept_plan import PlanOptions
from streamtune.run.model import make_blueprint, make_optimizer, make_reference_blueprint, train_largest
from streamtune.run.weight_choices import Settings, first_that_fits, placements, precise
from streamtune.schedule import GIVEN, Schedule
from streamtune.tasks import Task, task_of

LESS = (0.75, 0.9, 0.97)
"""Parts of what a schedule held besides weights, gradients and optimizer that the next may hold, where it ran out of
memory: the first that anything fits."""


LITTLE = 0.5
"""Part of the device that weights, gradients and optimizer leave to rows, so that some schedule mostly fits."""

USUAL = 6
"""Steps that most plans simulate."""


@dataclass(frozen=True)
class RecipePlan:
    """A plan, with the recipe, the model and the devices that it is for.

    Attributes:
        loaded: The recipe, with weights or optimizer on the host where nothing fits otherwise.
        model_name: Class of the model.
        parameters: Number of parameters.
        length: Tokens of a row, or of a prompt with its longest completion.
        here: True if the device is at hand.
        scored: The completions of a micro-batch, where the objective scores completions.
        cluster: The ranks. The bytes of the plan are those of one rank.
        micro_batches: Micro-batches of a rank in an optimizer step.
        wider: The rows that more ranks to a sequence would allow, where the recipe leaves that open.
        flops: Operations of a step that the model asks for, of all ranks (``simulate.workload``).
        peak_flops: FLOP/s of one device by its data sheet, or by the recipe; None where unknown.
        select_flops: Operations of a rank by which the rows of a step are chosen; 0 without a choice.
        positions: What to write where rows exceed the positions of the model; None where they do not.
    """

    loaded: LoadedRecipe
    model_name: str
    parameters: models.ParameterCount
    dtype: str
    layers: int
    length: int
    device_name: str
    here: bool
    plan: Plan
    scored: Scored | None
    cluster: Cluster = field(default_factory=Cluster)
    micro_batches: int = 1
    wider: tuple[Wider, ...] = ()
    flops: int = 0
    peak_flops: float | None = None
    select_flops: int = 0
    positions: str | None = None

    @property
    def select_seconds(self) -> float:
        """Seconds in which the rows of a step are chosen, at the rate of the step's own operations."""
        work = self.plan.simulation.work
        return self.plan.step_seconds * self.select_flops / max(1, work.matmul_flops + work.attention_flops)

    @property
    def computed_flops(self) -> int:
        """Operations of products and attention that a step computes, of all ranks: the model's, what is computed again,
        and forward passes of a reference.
        """
        work = self.plan.simulation.work
        return self.cluster.ranks * (work.matmul_flops + work.attention_flops)

    @property
    def mfu(self) -> float | None:
        """Share of the devices' FLOP/s that the model's operations take in the predicted time; None if unknown."""
        if self.peak_flops is None or not self.plan.step_seconds:
            return None
        return self.flops / self.plan.step_seconds / self.peak_flops / self.cluster.ranks

    @property
    def tokens(self) -> int:
        """Number of tokens of an optimizer step, of all ranks."""
        times = self.micro_batches * self.cluster.data_size
        if self.scored is not None:
            return self.scored.rows * self.scored.length * times
        return self.length * self.loaded.recipe.per_device_train_batch_size * times


@dataclass(frozen=True)
class LongestStep:
    """The longest micro-batch of a run, and a second model that is held beside the trained one.

    Attributes:
        length: Tokens of the longest row, or of the longest completion with its prompt.
        completions: The completions of a micro-batch, where the objective scores completions.
        reference_bytes: Bytes of the second model.
    """

    length: int
    completions: Completions | None = None
    reference_bytes: int = 0


@dataclass(frozen=True)
class PlanInputs:
    """Facts that a plan of a run is given besides its recipe and model.

    Attributes:
        keep: The schedule of the resumed run. It is taken again if it fits and the recipe allows it, so that the losses
            are bit-equal.
        below: A schedule that ran out of memory. The chosen one holds less, even where the recipe fixes the schedule.
        fixed: Fields of the schedule that the planner may not choose, besides those that the recipe writes.
    """

    cluster: Cluster = field(default_factory=Cluster)
    keep: Schedule | None = None
    below: Schedule | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)


def plan_recipe(
    loaded: LoadedRecipe, options: PlanOptions, *, notify: Callable[[str], None] = lambda message: None
) -> RecipePlan:
    """Plan a recipe from its model's configuration; neither weights nor data are read.

    Args:
        notify: Called with its name before what takes a while.

    Raises:
        UserError: A name is unknown, or nothing fits a budget; it has the line of the recipe.
    """
    recipe = loaded.recipe
    with blame_recipe(loaded):
        target, here = _target(recipe, options)
        prepare_libraries(here)
        device = here if target is None else torch.device("cuda")
        model_of = blueprints(device)
        model = model_of(precise(recipe))
        length = options.length or recipe.max_length
        if length < task_of(recipe).shortest:
            raise ArgumentError(
                f"a prompt and its completion have {task_of(recipe).shortest} tokens or more, not {length}",
                where="max_length" if options.length is None else "--length",
            )
        cluster = cluster_of(recipe, model, RanksAsked(options.ranks, options.nodes), links_for(target, here))
        limits = _limits(recipe.engine, options, target, here, cluster)
        rates = sheet_rates(target) if target else rates_here(precise(recipe), model, here, notify)
        rates = replace(rates, host_bandwidth=rates.host_bandwidth / cluster.ranks_per_node)
        notify("planning")
        recipe, workload, chosen = _fastest(
            placements(recipe, limits, cluster),
            lambda choice: recipe_workload(choice, model_of(choice), length, device, cluster=cluster),
            limits,
            rates,
            announced(notify),
        )
        model = model_of(recipe)
        wider = tuple(wider_of(recipe, workload, limits, notify)) if cluster.sequence_size == 1 else ()
    base = base_of(model)
    return RecipePlan(
        loaded=replace(loaded, recipe=recipe),
        model_name=type(base).__name__,
        parameters=models.count_parameters(model),
        dtype=str(base.dtype).removeprefix("torch."),
        layers=len(decoder_layers(model)),
        length=length,
        device_name=target.title if target else device_name(here),
        here=target is None,
        plan=chosen,
        scored=workload.scored,
        cluster=cluster,
        micro_batches=workload.micro_batches,
        wider=wider,
        flops=cluster.data_size * chosen.flops,
        peak_flops=recipe.peak_flops or (target.matmul_flops if target else peak_of(recipe, here)),
        select_flops=_select_flops(recipe, workload),
        positions=models.describe_positions(base, length),
    )


def _select_flops(recipe: BatchKeys, workload: Workload) -> int:
    """Return the operations by which a rank compares its share of the rows drawn for a step."""
    if recipe.select_rows is None:
        return 0
    return recipe.draws * workload.batch_size * workload.micro_batches * sketch_flops(workload)


def _fastest(
    choices: Sequence[Settings],
    workload_of: Callable[[Settings], Workload],
    limits: Limits,
    rates: Rates,
    simulate: Simulate,
) -> tuple[Settings, Workload, Plan]:
    """Return the first of the choices that some schedule fits, its step, and the fastest of these schedules."""
    first, workload = choices[0], workload_of(choices[0])
    if first.engine.schedule == "fixed":
        choice = first_that_fits(choices, workload_of, limits, simulate=simulate)
        workload = workload_of(choice)
        return choice, workload, evaluate_schedule(workload, make_schedule(choice.engine), limits, rates)
    if len(choices) > 1 and holdings_of(workload).on_device <= LITTLE * limits.device:
        with suppress(NothingFitsError):  # it mostly does
            found = choose(workload, limits, rates, fixed=first.engine.written(), simulate=simulate, explain=False)
            return first, workload, found
    choice = first_that_fits(choices, workload_of, limits, simulate=simulate)
    workload = workload_of(choice)
    return choice, workload, choose(workload, limits, rates, fixed=choice.engine.written(), simulate=simulate)


def place_recipe(
    recipe: Settings,
    length: int,
    device: torch.device,
    completions: Callable[[Any], Completions | None] = lambda model: None,
    *,
    sizes: EngineSpec | None = None,
    rows: int | None = None,
    begun: bool = False,
    cluster_of: Callable[[Any], Cluster] | None = None,
) -> Settings:
    """Return the recipe of a run with its precision, and with weights or optimizer on the host where it must be.

    Called before the model is loaded, with all of the memory still free.

    Args:
        length: Tokens of the longest row, or of the longest completion with its prompt.
        completions: Returns the completions of a micro-batch, given the model on ``meta``.
        sizes: Sizes of memory to plan with, if they are not the recipe's.
        rows: Rows of a micro-batch, if they are not the recipe's.
        begun: The run is resumed, with the precision that the recipe has.
        cluster_of: Returns the ranks of the run, given the model on ``meta``; None for one rank.
    """
    model_of = blueprints(device)
    first = recipe if begun else precise(recipe)
    cluster = Cluster() if cluster_of is None else cluster_of(model_of(first))
    limits = _limits(sizes or recipe.engine, PlanOptions(), None, device, cluster)
    choices = placements(recipe, limits, cluster, begun=begun)
    if len(choices) == 1:
        return choices[0]
    scored = completions(model_of(first))

    def workload_of(choice: Settings) -> Workload:
        held = reference_bytes(task_of(choice), device)
        model = model_of(choice)
        found = make_workload(choice, model, LongestStep(length, scored, held), device, cluster)
        return found if rows is None else replace(found, batch_size=rows)

    return first_that_fits(choices, workload_of, limits)


def blueprints(device: torch.device) -> Callable[[ModelSettings], Any]:
    """Return a function that makes the model of a recipe on ``meta``, once in each dtype."""
    made: dict[str, Any] = {}

    def model_of(recipe: ModelSettings) -> Any:
        if recipe.dtype not in made:
            made[recipe.dtype] = make_blueprint(recipe, device)
        return made[recipe.dtype]

    return model_of


def plan_model(
    recipe: TrainingSettings,
    model: Any,
    longest: LongestStep,
    device: torch.device,
    given: PlanInputs | None = None,
    *,
    notify: Callable[[str], None] = lambda message: None,
) -> Plan:
    """Plan a run with the model that is loaded, within the memory that is free besides it.

    Args:
        model: The model on its device, with its adapters, not yet streamed.
        longest: The longest micro-batch, of whole rows however many ranks share them. Its second model is loaded.
        given: The ranks of the run and an earlier schedule; None is one rank and no schedule.
        notify: Called with its name before what takes a while.

    Raises:
        ArgumentError: Nothing fits.
    """
    shape = meta_copy(model)
    given = given or PlanInputs()
    limits = _limits(recipe.engine, PlanOptions(), None, device, given.cluster)
    # The weights are part of what a step holds, and there already, unless they are still to come.
    if recipe.engine.device_memory == "auto" and models.deferred_of(model) is None:
        limits = replace(limits, device_bytes=limits.device_bytes + device_held_bytes(model) + longest.reference_bytes)
    sizes = recipe.engine
    limits = with_waiting_weights(
        limits, model, device_given=sizes.device_memory != "auto", host_given=sizes.host_memory != "auto"
    )
    rates = rates_here(recipe, model, device, notify)
    workload = make_workload(recipe, shape, longest, device, given.cluster)
    written = {**recipe.engine.written(), **given.fixed}
    if given.below is not None:
        return _smaller(workload, given.below, limits, rates, written)
    if recipe.engine.schedule == "fixed":
        return evaluate_schedule(workload, make_schedule(recipe.engine), limits, rates)
    keep = given.keep
    if keep is not None and {**as_fixed(keep), **written} == as_fixed(keep):
        kept = evaluate_schedule(workload, keep, limits, rates)
        if kept.fits:
            return kept
        notify("the schedule this run was started with does not fit any more; another gives the same gradient")
    return choose(workload, limits, rates, fixed=written)


def _smaller(workload: Workload, failed: Schedule, limits: Limits, rates: Rates, written: dict[str, Any]) -> Plan:
    """Return the fastest schedule that holds less than one that ran out of memory: much less if there is one."""
    simulation = evaluate_schedule(workload, failed, limits, rates).simulation
    stays = sum(simulation.terms.get(name, 0) for name in ("weights", "gradients", "optimizer"))
    given = {name: value for name, value in written.items() if name in ("offload_dir", *GIVEN)}
    for part in LESS:
        room = int((stays + part * (simulation.peak_bytes - stays)) / (1 - limits.margin))
        smaller = replace(limits, device_bytes=min(limits.device_bytes, room))
        try:
            return choose(workload, smaller, rates, fixed=given)
        except ArgumentError:
            if part == LESS[-1]:
                raise
    raise AssertionError("the last one returns or raises")


def announced(notify: Callable[[str], None]) -> Simulate:
    """Return a function that simulates steps for a plan and says before each which one it is."""
    count = 0

    def run(workload: Workload, schedule: Schedule) -> Simulation:
        nonlocal count
        count += 1
        usual = f" (most plans simulate {USUAL})" if count <= USUAL else ""
        notify(f"planning: simulating step {count}{usual}")
        return simulate(workload, schedule)

    return run


def make_workload(
    recipe: TrainingSettings,
    model: nn.Module,
    longest: LongestStep,
    device: torch.device,
    cluster: Cluster | None = None,
) -> Workload:
    """Return the workload of a step of the recipe, for a simulation.

    Args:
        model: The model on ``meta``, with its adapters.
        device: The device whose kernels are simulated.
        cluster: The ranks that share the step; None is one rank.
    """
    train_largest(recipe, model)
    return Workload(
        make_model=lambda: model,
        length=longest.length,
        batch_size=recipe.per_device_train_batch_size,
        micro_batches=accumulation_of(recipe, cluster or Cluster()),
        cluster=cluster or Cluster(),
        make_optimizer=partial(make_optimizer, recipe),
        autocast=bool(recipe.bf16),
        device_type=device.type,
        completions=longest.completions,
        token_loss=None if (loss := task_of(recipe).token_loss).is_plain else loss,
        teacher=_teacher_of(recipe, device),
        teacher_top_k=task_of(recipe).teacher_top_k,
        reference_bytes=longest.reference_bytes,
        step=recipe.step_kind,
        keep=recipe.cache,
    )


def _teacher_of(recipe: ModelSettings, device: torch.device) -> TeacherShape | None:
    """Return the head of the recipe's teacher, from its configuration; None without a teacher."""
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
    recipe: TrainingSettings, model: nn.Module, length: int, device: torch.device, *, cluster: Cluster | None = None
) -> Workload:
    """Return the workload of a step in the shape that the recipe's keys give it; arguments as :func:`make_workload`."""
    task = task_of(recipe)
    completions = task.completions(share=shares_prompts(task, model, device))
    longest = LongestStep(length, completions, reference_bytes(task, device))
    return make_workload(recipe, model, longest, device, cluster)


def shares_prompts(task: Task[Any], model: nn.Module, device: torch.device) -> bool:
    """Return True if completions can share their prompts in this model, by a simulation of a few tokens on ``meta``.

    Raises:
        UnsupportedModelError: They cannot, and the recipe asks for it.
    """
    if not task.may_share:
        return False
    tree = Scored(((5, (6, 6)),))
    workload = Workload(lambda: model, tree.length, device_type=device.type, completions=lambda length, size: tree)
    try:
        simulate(workload, Schedule(chunk_size=4))
    except UnsupportedModelError as error:
        if task.share_prefix == "always":
            error.where = "share_prefix"
            raise
        return False
    return True


def reference_bytes(task: Task[Any], device: torch.device) -> int:
    """Return the bytes of a reference model's weights on the device, from its configuration; 0 if none is held."""
    if not task.holds_reference:
        return 0
    model = make_reference_blueprint(task.recipe, device, task.reference_name)
    if task.recipe.engine.weights == "host":
        return held_bytes(model) - distinct_bytes(waiting_parameters(model, decoder_layers(model)))
    return held_bytes(model)


def device_elsewhere(
    recipe: EngineKeys, name: str | None, device_bytes: int | None, here: torch.device
) -> Device | None:
    """Return the device that is simulated without being there; None for the device at hand.

    Args:
        device_bytes: The memory that is asked for. Without a name and an accelerator, it selects the accelerator
            nearest to it in the table.
    """
    if name is not None:
        return find_device(name)
    if device_bytes is not None and here.type == "cpu" and recipe.device != "cpu":
        return nearest_device(device_bytes)
    return None


def memory_of(device: Device | None, here: torch.device) -> int:
    """Device memory to plan with: the data-sheet size of ``device``, or what is free on the local device."""
    if device is not None:
        return device.memory_bytes
    return usable_host_bytes() if here.type == "cpu" else free_device_bytes(here)


# --- what there is ----------------------------------------------------------------------------------------------------


def _target(recipe: EngineKeys, options: PlanOptions) -> tuple[Device | None, torch.device]:
    """Return the device that is planned for if it is not there, else None; and the device at hand."""
    here = torch.device("cpu") if options.device else choose_device(recipe.device)
    size = options.device_memory
    asked = parse_size(size, where="--device-memory") if size is not None else None
    return device_elsewhere(recipe, options.device, asked, here), here


def _limits(
    spec: EngineSpec, options: PlanOptions, target: Device | None, here: torch.device, cluster: Cluster
) -> Limits:
    """Return the memory to plan with: the command line's, else the recipe's, else the device's own or what is free.

    Memory and disk of a machine are shared by its ranks.
    """
    on_cpu = target is None and here.type == "cpu"
    device_bytes = _size(options.device_memory, spec.device_memory, "device_memory")
    if device_bytes is None:
        device_bytes = memory_of(target, here)
    host_bytes = _size(options.host_memory, spec.host_memory, "host_memory")
    disk_bytes = _size(options.disk_memory, spec.disk_memory, "disk_memory")
    if disk_bytes is None:
        disk_bytes = free_disk_bytes(spec.offload_dir) if spec.offload_dir else 0
    if host_bytes is None:
        host_bytes = usable_host_bytes()
    return Limits(
        device_bytes=device_bytes // (cluster.ranks_per_node if on_cpu else 1),
        host_bytes=host_bytes // cluster.ranks_per_node,
        disk_bytes=disk_bytes // cluster.ranks_per_node,
        margin=spec.margin,
        shared=on_cpu,
    )


def _size(option: str | None, key: str, name: str) -> int | None:
    if option is not None:
        return parse_size(option, where=f"--{name.replace('_', '-')}")
    return None if key == "auto" else parse_size(key, where=f"engine.{name}")


def rates_here(recipe: EngineKeys, model: Any, device: torch.device, notify: Callable[[str], None]) -> Rates:
    """Return the rates of the local device in the dtype that the recipe computes in, and of its offload directory."""
    base = base_of(model)
    rates = load_rates(device, torch.bfloat16 if recipe.bf16 else base.dtype, notify=notify)
    directory = recipe.engine.offload_dir
    if directory is not None and Path(directory).is_dir():
        try:
            rates = replace(rates, disk_bandwidth=measure_disk(Path(directory)))
        except OSError as error:
            raise ArgumentError(
                f"nothing can be written to {directory}: {error.strerror}", where="engine.offload_dir"
            ) from error
    return rates
