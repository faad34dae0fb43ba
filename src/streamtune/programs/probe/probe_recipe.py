"""Find the longest sequence, or the largest batch, that a recipe can train; give advice if nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from streamtune import models
from streamtune.base.adapters import base_of
from streamtune.base.text import parse_size, show_size
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.errors import ArgumentError, RunError, did_you_mean
from streamtune.optim import check_optimizer
from streamtune.plan.budget import Budget, Range, free_disk_bytes
from streamtune.plan.rates import Device, data_sheet_rates
from streamtune.plan.simulate.workload import Mode
from streamtune.programs.probe.probe import LENGTHS, ProbeReport, ProbeTask, RunTrial, Trial, measured_trials, run_probe
from streamtune.programs.probe.recipe_trials import SimulatedTrials, make_simulated_trials, prepare_step
from streamtune.programs.probe.trial import Outcome
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe
from streamtune.run.cluster import RequestedRanks
from streamtune.run.data import locate_errors
from streamtune.run.device import choose_device, make_schedule, prepare_libraries
from streamtune.run.model import choose_quantization, make_meta_model
from streamtune.run.plan import device_memory_bytes, device_to_simulate, local_rates
from streamtune.run.weight_choices import with_best_precision
from streamtune.tasks import task_of

BASELINES: tuple[Mode, ...] = ("checkpoint", "plain")
FUSED_BASELINES: tuple[Mode, ...] = ("liger-loss-offload", "liger-loss")
"""Further baselines if the search is simulated and the loss is cross-entropy: Liger's fused loss."""


@dataclass(frozen=True)
class ProbeOptions:
    """Command-line options of ``streamtune probe-max-len``. Sizes are in bytes; None: the option is not given."""

    method: str = "measure"
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    device: str | None = None
    baseline: bool = False
    batch_size: bool = False
    """True to search the largest batch of rows of one length, not the longest sequence."""
    length: int | None = None
    """Row length of a batch-size search; None is the recipe's ``max_length``."""
    least: int | None = None
    most: int | None = None
    trial_seconds: float = 1800.0
    margin: float | None = None
    """Fraction of each budget to leave free; None is the recipe's ``engine.margin``."""
    ranks: int | None = None
    nodes: int | None = None


def probe_recipe(
    loaded: LoadedRecipe,
    options: ProbeOptions,
    *,
    notify: Callable[[str], None] = lambda message: None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> tuple[ProbeReport, bool]:
    """Find the longest sequence, or the largest batch, that the recipe can train.

    Args:
        options: Quantity to search, its range, and the memory budgets.
        notify: Callback for text about the current trial and its progress.
        on_trial: Callback for each finished trial.

    Returns:
        The report, and True if Ctrl-C ended the search.

    Raises:
        ArgumentError: The options contradict each other, or no trial fits the budget.
        RunError: The smallest trial failed for a reason other than memory.
    """
    recipe = loaded.recipe
    _check_options(options, task_of(recipe).min_row_tokens)
    with locate_errors(loaded):
        here = torch.device("cpu") if options.device else choose_device(recipe.device)
        simulates = options.method == "simulate"
        target = device_to_simulate(recipe, options.device, options.device_bytes, here) if simulates else None
        prepare_libraries(here)
        task = _make_task(recipe, options, target, here)
        run: RunTrial
        unlimited: RunTrial
        budget = Budget(task.device_bytes, task.host_bytes, task.disk_bytes, task.margin)
        if task.method == "measure":
            choose_quantization(recipe, here)  # refuse before the first process
            check_optimizer(recipe.optim, here.type)
            prepare = partial(prepare_step, recipe, str(here), budget)
            run = measured_trials(prepare, budget, timeout_seconds=options.trial_seconds)
            unlimited = measured_trials(
                prepare, replace(budget, device_bytes=None), timeout_seconds=options.trial_seconds
            )
        else:
            best = with_best_precision(recipe)
            rates = data_sheet_rates(target) if target else local_rates(best, make_meta_model(best, here), here, notify)
            run = unlimited = make_simulated_trials(
                recipe, task, target, here, rates, RequestedRanks(options.ranks, options.nodes)
            )
        report, interrupted = run_probe(task, run, notify=notify, on_trial=on_trial)
        if task.method == "measure":
            keys = {"deepspeed": recipe.deepspeed, "fsdp": recipe.fsdp}
            keys["sequence_parallel_size"] = recipe.sequence_parallel_size > 1
            report.not_measured = tuple(key for key, value in keys.items() if value)
        limit = report.limits.get("stream")
        if isinstance(run, SimulatedTrials) and limit is not None and limit.trial is not None and not interrupted:
            notify(f"planning {limit.fits:,}")
            planned = run.plan_trial(limit.trial, lambda message: notify(f"{message}, for {limit.fits:,}"))
            report.trials = [planned if trial is limit.trial else trial for trial in report.trials]
            report.limits["stream"] = replace(limit, trial=planned)
        if limit is not None and limit.complete and not limit.fits and limit.failed is not None:
            notify("measuring the memory of the smallest trial")
            raise _no_fit_error(recipe, task, limit.failed, _find_smallest_need(unlimited, task, limit.failed))
        if limit is not None and limit.fits:
            length = limit.fits if task.scaled == "length" else task.fixed
            report.positions = models.position_warning(base_of(make_meta_model(recipe, here)), length)
    return report, interrupted


# --- options ---------------------------------------------------------------------------------------------------------


def _check_options(options: ProbeOptions, shortest: int) -> None:
    """Raise an ArgumentError if options contradict each other, or a length is below ``shortest``."""
    if options.method not in ("measure", "simulate"):
        raise ArgumentError(
            f"--method must be measure or simulate, found {options.method!r}",
            fix=did_you_mean(options.method, ("measure", "simulate")),
        )
    if options.device is not None and options.method == "measure":
        raise ArgumentError(
            "--device names a device to simulate, but --method measure runs on this machine",
            fix="add --method simulate, or choose where to measure: --set device=cpu",
        )
    if options.method == "measure" and (options.ranks is not None or options.nodes is not None):
        raise ArgumentError(
            "--ranks and --nodes need --method simulate: measured trials run on one device",
            where="--ranks",
            fix="add --method simulate",
        )
    for name, number in (("--from", options.least), ("--to", options.most)):
        if number is not None and number < 1:
            raise ArgumentError(f"{name} must be at least 1, found {number}")
    least, most = options.least or 1, options.most or LENGTHS.most
    if least > most:
        raise ArgumentError(f"--from {least:,} is above --to {most:,}", fix="give a --from that is at most --to")
    if not options.batch_size and options.least is not None and options.least < shortest:
        raise ArgumentError(_length_message(options.least, shortest), where="--from")
    if not options.batch_size and options.length is not None:
        raise ArgumentError(
            "--length needs --batch-size: otherwise, the search varies the length",
            fix=f"add --batch-size, or end the search at this length: --to {options.length}",
        )
    if options.length is not None and options.length < shortest:
        raise ArgumentError(_length_message(options.length, shortest), where="--length")
    sizes = {"--device-memory": options.device_bytes, "--disk-memory": options.disk_bytes}
    for name, size in sizes.items():
        if size == 0:
            raise ArgumentError(f"{name} must be above 0", where=name)
    if options.trial_seconds <= 0:
        raise ArgumentError("--trial-timeout must be above 0", where="--trial-timeout")
    if options.margin is not None and not 0 <= options.margin < 1:
        raise ArgumentError(f"--margin must be at least 0 and below 1, found {options.margin:g}")


def _length_message(length: int, shortest: int) -> str:
    what = "a sequence needs" if shortest == 2 else "a prompt with its completion needs"
    return f"{what} at least {shortest} tokens, found {length}"


def _make_task(recipe: Recipe, options: ProbeOptions, target: Device | None, here: torch.device) -> ProbeTask:
    spec = recipe.engine
    margin = spec.margin if options.margin is None else options.margin
    sizes = {"device": options.device_bytes, "host": options.host_bytes, "disk": options.disk_bytes}
    for name, key in (("device", spec.device_memory), ("host", spec.host_memory), ("disk", spec.disk_memory)):
        if sizes[name] is None and key != "auto":
            sizes[name] = parse_size(key, where=f"engine.{name}_memory")
    if options.method == "measure":
        sizes["device"] = _choose_local_device_budget(sizes["device"], sizes["host"], here, margin)
    else:
        sizes["device"] = sizes["device"] or device_memory_bytes(target, here)
        sizes["host"] = usable_host_bytes() if sizes["host"] is None else sizes["host"]
        sizes["disk"] = sizes["disk"] or (free_disk_bytes(spec.offload_dir) if spec.offload_dir else 0)
    return ProbeTask(
        method="measure" if options.method == "measure" else "simulate",
        objective=recipe.objective,
        scaled="batch" if options.batch_size else "length",
        fixed=(options.length or recipe.max_length) if options.batch_size else recipe.per_device_train_batch_size,
        within=_search_range(options),
        modes=("stream", *(_baseline_modes(recipe, options.method) if options.baseline else ())),
        device_bytes=sizes["device"],
        host_bytes=sizes["host"],
        disk_bytes=sizes["disk"],
        schedule=make_schedule(spec) if spec.schedule == "fixed" else None,
        margin=margin,
        unit=task_of(recipe).unit_noun,
    )


def _baseline_modes(recipe: Recipe, method: str) -> tuple[Mode, ...]:
    task = task_of(recipe)
    ordinary = recipe.objective == "sft" and task.token_loss.is_plain
    return (*(FUSED_BASELINES if ordinary and method == "simulate" else ()), *BASELINES)


def _search_range(options: ProbeOptions) -> Range:
    most = options.most or LENGTHS.most
    if options.batch_size:
        least = options.least or 1
        return Range(first=least, least=least, most=most, step=1)
    least = options.least or min(LENGTHS.least, most)
    return replace(LENGTHS, first=options.least or min(LENGTHS.first, most), least=least, most=most)


def _choose_local_device_budget(
    device_bytes: int | None, host_bytes: int | None, here: torch.device, margin: float
) -> int | None:
    """Return the device budget in bytes: by default the free memory of a CPU, or None (all memory) on a GPU.

    Raises:
        ArgumentError: The budgets exceed the machine's free memory.
    """
    free = usable_host_bytes()
    budgets = {"--device-memory": device_bytes if here.type == "cpu" else None, "--host-memory": host_bytes}
    wanted = sum(size for size in budgets.values() if size)
    if wanted > free:
        raise ArgumentError(
            f"the budgets take {show_size(wanted)} of this machine's memory, but only {show_size(free)} is free: "
            "the machine would swap",
            where=" and ".join(name for name, size in budgets.items() if size),
            fix="give smaller budgets, close other programs, or use --method simulate, which needs almost no memory",
        )
    if here.type == "cpu" and device_bytes is None:
        return int((1 - margin) * (free - (host_bytes or 0)))
    return device_bytes


# --- nothing fits -----------------------------------------------------------------------------------------------------


def _find_smallest_need(run_trial: RunTrial, task: ProbeTask, failed_trial: Trial) -> Outcome | None:
    """Run the smallest trial again without a device budget, to find out how much device memory it needs.

    Return None if the trial did not fail for lack of device memory, or if it fails again. A simulated trial is not
    repeated.
    """
    if failed_trial.outcome.cause != "device memory" or task.device_bytes is None:
        return None
    if task.method == "simulate":
        return failed_trial.outcome
    free = run_trial(failed_trial.shape, lambda phase: None)
    return free if free.fits else None


def _no_fit_error(
    recipe: Recipe, task: ProbeTask, failed_trial: Trial, smallest_need: Outcome | None
) -> ArgumentError | RunError:
    """Return the error for a search in which no trial fits, with advice on what to change."""
    shape, outcome = failed_trial.shape, failed_trial.outcome
    rows = f"{shape.batch_size:,} {task.unit}s of " if shape.batch_size > 1 else ""
    tried = f"{rows}{shape.length:,} tokens"
    if outcome.cause not in ("device memory", "host memory", "disk memory"):
        return RunError(
            f"the smallest trial, {tried}, failed: {outcome.reason}",
            fix=outcome.detail or "raise --trial-timeout, or find out what ended the process",
        )
    what = f"the smallest trial, {tried}, does not fit: {outcome.reason}"
    known = smallest_need or outcome
    terms = {name: size for name, size in known.terms.items() if size}
    if terms and outcome.cause == "device memory":  # terms are bytes of the device
        largest = max(terms, key=lambda name: terms[name])
        parts = ", ".join(f"{name} {show_size(size)}" for name, size in terms.items())
        what += f"; the largest term is {largest} ({parts})"
    fixes = []
    if smallest_need is not None and smallest_need.peak_bytes is not None:
        fixes.append(f"{tried} fit in {show_size(smallest_need.peak_bytes)} of device memory")
    if task.scaled == "length" and task.within.least > LENGTHS.least:
        fixes.append(f"without --from {task.within.least}, shorter rows are tried too")
    if outcome.cause == "host memory":
        fixes += _offload_advice(recipe)
    else:
        fixes += _smaller_step_advice(recipe, known.terms, task)
        fixes.append("larger chunks do not help")
    return ArgumentError(what, fix="; ".join(fixes))


def _offload_advice(recipe: Recipe) -> list[str]:
    fixes = ["allow more host memory (--host-memory, engine.host_memory)"]
    if recipe.engine.order == "chunk":
        fixes.append("engine.order: auto lets the planner choose the order that needs less memory")
    if recipe.engine.offload_dir is None:
        fixes.append("engine.offload_dir allows offloading to disk")
    return fixes


def _smaller_step_advice(recipe: Recipe, terms: dict[str, int], task: ProbeTask) -> list[str]:
    fixed = sum(terms.get(name, 0) for name in ("weights", "reference", "gradients", "optimizer"))
    fixes = []
    if terms.get("reference"):
        fixes.append(
            "with adapters (finetuning_type: lora), the base model is the reference, so no second model is loaded"
        )
    if fixed > (task.device_bytes or 0) / 2:
        if recipe.finetuning_type == "full":
            fixes.append("finetuning_type: lora needs gradients and optimizer state for the adapters only")
        elif recipe.finetuning_type == "lora":
            fixes.append("finetuning_type: qlora quantises the weights")
        if recipe.dtype not in ("bfloat16", "auto"):  # auto already falls back to bfloat16
            fixes.append("dtype: bfloat16 halves the memory of float32 weights")
    else:
        fixes.append("smaller engine.chunk_size and engine.head_chunk_size need less memory for activations")
    return fixes
