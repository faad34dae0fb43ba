"""Choose precision and placement (device or host) of trained weights and optimizer states, if the recipe does not.

A fine-tuning step changes a weight by about the learning rate. bfloat16 has 8 significant bits: near 0.02, neighbouring
numbers are 1.2e-4 apart, so rounding to nearest loses a step of 1e-5. Therefore weights of a bfloat16 checkpoint are
trained in float32, with computation in bfloat16 (``dtype: mixed``). If float32 does not fit in memory, weights stay
bfloat16, and updates are rounded stochastically, which is unbiased.

With ``fp16`` trained weights are always float32: the updates of float16 weights would be lost in the same way.

Host memory is used only if nothing fits on the device, because copies make a step slower. Optimizer states are moved
first: they are copied once per step, but weights at least twice. Each placement is tried in every precision that the
recipe allows, the best first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from streamtune import models
from streamtune.base.optimizer_table import state_bytes
from streamtune.base.text import show_size
from streamtune.errors import ArgumentError, UserError
from streamtune.ops.devices import device_name, has_bfloat16
from streamtune.plan.budget import Limits
from streamtune.plan.choices import excess_bytes
from streamtune.plan.estimate import Simulate
from streamtune.plan.least_memory import least_excess_bound, simulate_least_memory_step, simulate_one_level_step
from streamtune.plan.lower_bound import LeastBytes
from streamtune.plan.refusal import fixed_terms_exceed_host
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.simulate import Simulation, resident_memory, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.device import compute_dtype, make_schedule

Settings = TypeVar("Settings", bound=TrainingSettings)

PRECISION_KEYS = ("dtype", "bf16", "weight_rounding", "optim_states")
"""Recipe keys that this module chooses."""


def recipes_by_precision(recipe: Settings) -> list[Settings]:
    """Return a copy of the recipe for each precision to try, the best first; one copy if the recipe sets the precision.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    if recipe.dtype != "auto" or recipe.model_name_or_path is None:
        return [recipe]
    checkpoint_dtype = models.checkpoint_dtype(recipe.model_name_or_path, recipe.trust_remote_code)
    if checkpoint_dtype not in (torch.bfloat16, torch.float16):
        return [recipe]
    if recipe.fp16:  # trained weights are float32, and modules_to_save have the dtype of the base
        dtype = "mixed" if recipe.finetuning_type == "full" else "float32" if recipe.modules_to_save else "float16"
        return [_copy_with(recipe, dtype=dtype)]
    dtype_change = {"dtype": "bfloat16"} if checkpoint_dtype == torch.float16 else {}
    if recipe.finetuning_type != "full":  # adapters are float32, but modules_to_save are not
        modules = recipe.modules_to_save or recipe.adapter_name_or_path  # these adapters may include modules_to_save
        rounding = {"weight_rounding": "stochastic"} if modules and _can_round_stochastically(recipe) else {}
        return [_copy_with(recipe, **dtype_change, **rounding)]
    if recipe.deepspeed is not None:  # DeepSpeed keeps a float32 copy of the weights
        return [_copy_with(recipe, **dtype_change)]
    casts_to_bfloat16 = recipe.bf16 is None and recipe.engine.fetch_dtype != "bfloat16"
    mixed_recipe = _copy_with(recipe, dtype="mixed", **({"bf16": True} if casts_to_bfloat16 else {}))
    if recipe.fsdp:
        return [mixed_recipe]
    bfloat16_values: dict[str, Any] = {"dtype": "bfloat16"}
    if _can_round_stochastically(recipe):
        bfloat16_values["weight_rounding"] = "stochastic"
    if (
        recipe.optim == "adamw" and recipe.optim_states == "param"
    ):  # rounding to nearest would lose steps of the moments too
        bfloat16_values["optim_states"] = "bfloat16"
    return [mixed_recipe, _copy_with(recipe, **bfloat16_values)]


def with_best_precision(recipe: Settings) -> Settings:
    """Return the recipe with the best precision that it allows, whether it fits in memory or not.

    If the checkpoint's configuration cannot be read, the recipe is returned unchanged; loading the model raises the
    error.
    """
    try:
        return recipes_by_precision(recipe)[0]
    except UserError:
        return recipe


def has_precision_choice(recipe: TrainingSettings) -> bool:
    """Return True if the recipe allows several precisions."""
    try:
        return len(recipes_by_precision(recipe)) > 1
    except UserError:
        return False


def with_saved_precision(recipe: Settings, saved_settings: Mapping[str, Any]) -> Settings:
    """Return the recipe with the precision of the resumed run, unless the recipe sets a precision.

    Args:
        recipe: Recipe of the run.
        saved_settings: Recipe keys saved by the resumed run; missing keys have their defaults.
    """
    fields = type(recipe).model_fields
    saved_values = {key: saved_settings.get(key, fields[key].default) for key in PRECISION_KEYS}
    open_keys = [key for key in PRECISION_KEYS if getattr(recipe, key) == fields[key].default]
    return _copy_with(recipe, **{key: saved_values[key] for key in open_keys})


def changed_precision_keys(recipe: TrainingSettings, chosen: TrainingSettings) -> dict[str, Any]:
    """Return the keys of :data:`PRECISION_KEYS` that differ, with the values of ``chosen``."""
    return {key: getattr(chosen, key) for key in PRECISION_KEYS if getattr(recipe, key) != getattr(chosen, key)}


def describe_precision(recipe: TrainingSettings, chosen: TrainingSettings, model: Any) -> str | None:
    """Return a note on the chosen precision, its reason and its memory; None if there is nothing to say.

    Args:
        recipe: Recipe as it was read.
        chosen: Recipe with the chosen precision.
        model: Model of the recipe, loaded or on ``meta``, for the number of trained weights.
    """
    changed = changed_precision_keys(recipe, chosen)
    if not changed:
        return None
    extra_bytes = show_size(_extra_float32_bytes(recipe, model))
    if chosen.dtype == "mixed" or (chosen.fp16 and chosen.dtype == "float32"):
        computed = f" and computed in {chosen.autocast_dtype}" if chosen.autocast_dtype else ""
        return (
            f"weights of a 16-bit checkpoint are trained in float32{computed} (dtype: {chosen.dtype}); this takes "
            f"{extra_bytes} more, but 16-bit weights would lose small steps to rounding"
        )
    if chosen.dtype == "float16":
        return "the frozen weights are loaded in float16, in which they are computed (fp16); adapters are float32"
    if chosen.finetuning_type != "full" or chosen.deepspeed is not None:
        texts = []
        if "dtype" in changed:
            texts.append("the checkpoint is loaded in bfloat16: float16 gradients underflow without loss scaling")
        if "weight_rounding" in changed and any(
            p.dtype != torch.float32 for p in model.parameters() if p.requires_grad
        ):
            texts.append("modules_to_save are bfloat16: their steps are rounded stochastically (weight_rounding)")
        return "; ".join(texts) or None
    if chosen.weight_rounding == "stochastic":
        reason = "each step is rounded stochastically (weight_rounding: stochastic): unbiased, but noisier"
    else:
        reason = f"'optim: {chosen.optim}' rounds to nearest, which loses small steps"
    if chosen.step_kind.gradients == "block":
        reason = f"'optim: {chosen.optim}' keeps its current block in float32"
    return f"float32 weights do not fit (they take {extra_bytes} more): weights are bfloat16, and {reason}"


def emulation_warning(recipe: TrainingSettings, model: Any, device: torch.device) -> str | None:
    """Return a warning if the run computes in bfloat16 on a device that only emulates it; None if it does not."""
    if compute_dtype(recipe, model) != torch.bfloat16 or has_bfloat16(device):
        return None
    return (
        f"{device_name(device)} has no bfloat16 and emulates it slowly: start a new run with fp16: true, without bf16 "
        "and dtype"
    )


def rounding_warning(recipe: TrainingSettings, model: Any) -> str | None:
    """Return a warning if updates of 16-bit weights are rounded to nearest; None if they are not."""
    keeps_float32 = recipe.deepspeed is not None or recipe.step_kind.gradients == "block"
    if keeps_float32 or recipe.weight_rounding == "stochastic":
        return None
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not trained:
        return None
    dtype = str(trained[0].dtype).removeprefix("torch.")
    rounded = "" if not _can_round_stochastically(recipe) else ", or write weight_rounding: stochastic"
    return (
        f"{dtype} weights are trained with rounding to nearest, which loses most small steps at a learning rate of "
        f"{recipe.learning_rate:g}; delete 'dtype' to train float32 weights{rounded}"
    )


def _can_round_stochastically(recipe: TrainingSettings) -> bool:
    return not (recipe.step_kind.gradients in ("block", "none") or recipe.fsdp or recipe.deepspeed is not None)


def _extra_float32_bytes(recipe: TrainingSettings, model: Any) -> int:
    trained = [p for p in model.parameters() if p.requires_grad]
    extra_bytes = sum(4 * models.full_parameter_size(p) for p in trained)
    if recipe.optim == "adamw" and recipe.optim_states == "param":
        shapes = [tuple(p.shape) for p in trained]
        extra_bytes += sum(state_bytes("adamw", shape, 4, {}) - state_bytes("adamw", shape, 2, {}) for shape in shapes)
    return extra_bytes


def _copy_with(recipe: Settings, **values: Any) -> Settings:
    return recipe.model_copy(update=values) if values else recipe


def placement_choices(recipe: Settings, limits: Limits, cluster: Cluster, *, resumed: bool = False) -> list[Settings]:
    """Return copies of the recipe: unchanged, then with optimizer states in host memory, then with weights in host
    memory.

    Each placement comes in every precision that the recipe allows. Placements that the recipe excludes are left out.
    There are no host placements if the device is the CPU, or with several ranks or DeepSpeed.

    Args:
        recipe: Recipe of the run.
        limits: Memory to plan with.
        cluster: Ranks of the run.
        resumed: True for a resumed run, whose precision is already in the recipe.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    precision_choices = [recipe] if resumed else recipes_by_precision(recipe)
    host_choices = [_host_placements(each, limits, cluster) for each in precision_choices]
    return [*precision_choices, *(each for choices_of_precision in host_choices for each in choices_of_precision)]


def _host_placements(recipe: Settings, limits: Limits, cluster: Cluster) -> list[Settings]:
    """Return copies of the recipe with optimizer states or weights in host memory; empty if the recipe excludes
    this."""
    spec, is_full_fine_tuning = recipe.engine, recipe.finetuning_type == "full"
    is_single_rank = cluster.ranks == 1 and cluster.engine == "none"
    if spec.schedule == "fixed" or limits.shared or not limits.host_bytes or not is_single_rank:
        return []
    tiers: list[dict[str, str]] = []
    if is_full_fine_tuning and spec.optimizer == "auto" and spec.weights != "host":
        tiers.append({"optimizer": "host"})
    if spec.weights == "auto":
        tiers.append({"weights": "host"})
    choices: list[Settings] = []
    for tier in tiers:
        with suppress(ValidationError):  # the recipe contradicts this choice
            engine = type(spec).model_validate({**dict(spec), **tier})
            type(recipe).model_validate({**dict(recipe), "engine": engine})
            choices.append(recipe.model_copy(update={"engine": engine}))
    return choices


def with_saved_placement(recipe: Settings, tiers: Mapping[str, str] | None) -> Settings | None:
    """Return the recipe with the placement of the resumed run; None if there is none or the recipe contradicts it.

    Args:
        recipe: Recipe of the run.
        tiers: ``engine.weights`` and ``engine.optimizer`` of the resumed run; None if neither was in host memory.
    """
    spec = recipe.engine
    if tiers is None or spec.schedule == "fixed":
        return None
    if any(getattr(spec, key) not in ("auto", value) for key, value in tiers.items()):
        return None
    return recipe.model_copy(update={"engine": spec.model_copy(update=dict(tiers))})


def first_fitting_choice(
    choices: Sequence[Settings],
    workload_of: Callable[[Settings], Workload],
    limits: Limits,
    *,
    simulate: Simulate = simulate,
) -> Settings:
    """Return the first of the :func:`placement_choices` for which a schedule fits in memory.

    If none fits, return the last choice whose weights and optimizer states fit in host memory.

    Args:
        choices: Placements to try, in order.
        workload_of: Function from a choice to its training step.
        limits: Memory to plan with.
        simulate: Function that simulates a step.
    """
    if len(choices) == 1:
        return choices[0]
    chosen = choices[0]
    for choice in choices:
        workload = workload_of(choice)
        if choice is not choices[-1] and exceeds_device_at_any_length(
            workload, choice.engine.schedule_fields(), limits
        ):
            continue
        simulation: Simulation | LeastBytes | None = None
        with suppress(ArgumentError):  # the recipe contradicts this choice
            if choice.engine.schedule == "fixed":
                simulation = simulate(workload, make_schedule(choice.engine))
            else:
                fixed = choice.engine.schedule_fields()
                simulation = least_excess_bound(workload, limits, fixed)
                if simulation.excess_bytes(limits) <= 0:
                    simulation = simulate_one_level_step(workload, limits, fixed, simulate)
                if simulation is None:
                    _, simulation = simulate_least_memory_step(workload, limits, fixed, simulate)
        if simulation is None:
            continue
        if excess_bytes(simulation, limits) <= 0:
            return choice
        if not fixed_terms_exceed_host(simulation, limits):
            chosen = choice
    return chosen


def exceeds_device_at_any_length(workload: Workload, written_fields: Mapping[str, Any], limits: Limits) -> bool:
    """Return True if weights, gradients and optimizer states alone exceed the device memory.

    Args:
        workload: Training step.
        written_fields: Fields of the schedule that the recipe sets.
        limits: Memory to plan with.
    """
    return resident_memory(workload, written_fields.get("weights", "device")).device_bytes > limits.device_limit


def describe_placement(recipe: TrainingSettings, chosen: TrainingSettings) -> str | None:
    """Return a note on what was moved to host memory; None if nothing was moved."""
    before, now = recipe.engine, chosen.engine
    if now.weights != before.weights:
        key, noun = "weights", "the weights and their optimizer"
    elif now.optimizer != before.optimizer:
        key, noun = "optimizer", "the optimizer states"
    else:
        return None
    return f"no schedule fits with everything on the device: {noun} are kept in host memory (engine: {{{key}: host}})"
