"""Choose precision and placement (device or host) of trained weights and optimizer, if the recipe leaves them open.

A fine-tuning step changes a weight by about the learning rate. bfloat16 has 8 significant bits: near 0.02, neighbouring
numbers are 1.2e-4 apart, so rounding to nearest loses a step of 1e-5. Therefore weights of a bfloat16 checkpoint are
trained in float32 and computed in bfloat16 (``dtype: mixed``). If float32 does not fit, weights stay bfloat16 and each
step is rounded stochastically, which is right on average.

A step is fastest with everything on the device, so host memory is used only if no schedule fits otherwise. Optimizer
states go to the host first, because they are copied once per step; then weights, which are copied at least twice per
step. Each placement is tried in every precision that the recipe leaves open, the best first.
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
from streamtune.plan.budget import Limits
from streamtune.plan.choices import excess_bytes
from streamtune.plan.estimate import Simulate
from streamtune.plan.refusal import fixed_terms_exceed_host, smallest_step
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.simulate import Simulation, resident_memory, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.device import make_schedule

Settings = TypeVar("Settings", bound=TrainingSettings)

KEYS = ("dtype", "bf16", "weight_rounding", "optim_states")
"""Recipe keys that this module chooses."""


def precisions(recipe: Settings) -> list[Settings]:
    """Return the recipe in each precision that it leaves open, the best first; only itself if it gives one.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    if recipe.dtype != "auto" or recipe.model_name_or_path is None:
        return [recipe]
    own = models.checkpoint_dtype(recipe.model_name_or_path, recipe.trust_remote_code)
    if own not in (torch.bfloat16, torch.float16):
        return [recipe]
    half = {"dtype": "bfloat16"} if own == torch.float16 else {}
    if recipe.finetuning_type != "full":  # adapters are float32, but modules_to_save are not
        whole = recipe.modules_to_save or recipe.adapter_name_or_path  # these adapters may include modules_to_save
        rounding = {"weight_rounding": "stochastic"} if whole and _may_round(recipe) else {}
        return [_with_values(recipe, **half, **rounding)]
    if recipe.deepspeed is not None:  # DeepSpeed keeps a float32 copy of the weights
        return [_with_values(recipe, **half)]
    casts = recipe.bf16 is None and recipe.engine.fetch_dtype != "bfloat16"
    wide = _with_values(recipe, dtype="mixed", **({"bf16": True} if casts else {}))
    if recipe.fsdp:
        return [wide]
    narrow: dict[str, Any] = {"dtype": "bfloat16"}
    if _may_round(recipe):
        narrow["weight_rounding"] = "stochastic"
    if (
        recipe.optim == "adamw" and recipe.optim_states == "param"
    ):  # rounding to nearest would lose steps of the moments too
        narrow["optim_states"] = "bfloat16"
    return [wide, _with_values(recipe, **narrow)]


def with_best_precision(recipe: Settings) -> Settings:
    """Return the recipe in the best precision that it leaves open, whether it fits or not.

    If the checkpoint cannot be read, the recipe is returned as it is, and loading the checkpoint raises the error.
    """
    try:
        return precisions(recipe)[0]
    except UserError:
        return recipe


def has_choice(recipe: TrainingSettings) -> bool:
    """Return True if the precision of a recipe depends on what fits."""
    try:
        return len(precisions(recipe)) > 1
    except UserError:
        return False


def with_saved_precision(recipe: Settings, before: Mapping[str, Any]) -> Settings:
    """Return the recipe with the precision of the resumed run, if the recipe leaves the precision open.

    Args:
        recipe: Recipe of the run.
        before: Compared settings of the resumed run. If they have no precision, it trained in the checkpoint's dtype.
    """
    fields = type(recipe).model_fields
    given = {key: before.get(key, fields[key].default) for key in KEYS}
    open_keys = [key for key in KEYS if getattr(recipe, key) == fields[key].default]
    return _with_values(recipe, **{key: given[key] for key in open_keys})


def chosen_values(recipe: TrainingSettings, chosen: TrainingSettings) -> dict[str, Any]:
    """Return the precision keys (:data:`KEYS`) that differ, with the values of ``chosen``."""
    return {key: getattr(chosen, key) for key in KEYS if getattr(recipe, key) != getattr(chosen, key)}


def describe_precision(recipe: TrainingSettings, chosen: TrainingSettings, model: Any) -> str | None:
    """Return the chosen precision, its reason and its cost in one line; None if nothing was chosen.

    Args:
        recipe: Recipe as it was read.
        chosen: Recipe with the chosen precision.
        model: Model of the recipe, on ``meta`` or loaded; its trained weights are counted.
    """
    made = chosen_values(recipe, chosen)
    if not made:
        return None
    more = show_size(_extra_float32_bytes(recipe, model))
    if chosen.dtype == "mixed":
        computed = " and computed in bfloat16" if chosen.bf16 else ""
        return (
            f"weights of a 16-bit checkpoint are trained in float32{computed} (dtype: mixed); this takes {more} more, "
            "but 16-bit weights would lose small steps to rounding"
        )
    if chosen.finetuning_type != "full" or chosen.deepspeed is not None:
        texts = []
        if "dtype" in made:
            texts.append("the checkpoint is loaded in bfloat16: float16 gradients underflow without loss scaling")
        if "weight_rounding" in made and any(p.dtype != torch.float32 for p in model.parameters() if p.requires_grad):
            texts.append("modules_to_save are bfloat16: their steps are rounded stochastically (weight_rounding)")
        return "; ".join(texts) or None
    if chosen.weight_rounding == "stochastic":
        how = "each step is rounded stochastically (weight_rounding: stochastic): right on average, but noisier"
    else:
        how = f"'optim: {chosen.optim}' rounds to nearest, which loses small steps"
    if chosen.step_kind.gradients == "block":
        how = f"'optim: {chosen.optim}' keeps its current block in float32"
    return f"float32 weights do not fit (they take {more} more): weights are bfloat16, and {how}"


def rounding_warning(recipe: TrainingSettings, model: Any) -> str | None:
    """Return a warning if steps of 16-bit trained weights are rounded to nearest; None if they are not."""
    keeps_float32 = recipe.deepspeed is not None or recipe.step_kind.gradients == "block"
    if keeps_float32 or recipe.weight_rounding == "stochastic":
        return None
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not trained:
        return None
    dtype = str(trained[0].dtype).removeprefix("torch.")
    rounded = "" if not _may_round(recipe) else ", or write weight_rounding: stochastic"
    return (
        f"{dtype} weights are trained with rounding to nearest, which loses most small steps at a learning rate of "
        f"{recipe.learning_rate:g}; delete 'dtype' to train float32 weights{rounded}"
    )


def _may_round(recipe: TrainingSettings) -> bool:
    return not (recipe.step_kind.gradients in ("block", "none") or recipe.fsdp or recipe.deepspeed is not None)


def _extra_float32_bytes(recipe: TrainingSettings, model: Any) -> int:
    """Return how many bytes more float32 weights, gradients and states take than bfloat16."""
    trained = [p for p in model.parameters() if p.requires_grad]
    more = sum(4 * models.count_weights(p) for p in trained)
    if recipe.optim == "adamw" and recipe.optim_states == "param":
        shapes = [tuple(p.shape) for p in trained]
        more += sum(state_bytes("adamw", shape, 4, {}) - state_bytes("adamw", shape, 2, {}) for shape in shapes)
    return more


def _with_values(recipe: Settings, **values: Any) -> Settings:
    return recipe.model_copy(update=values) if values else recipe


def placements(recipe: Settings, limits: Limits, cluster: Cluster, *, resumed: bool = False) -> list[Settings]:
    """Return the recipe as it is, then with the optimizer on the host, then with the weights on the host.

    Each placement comes in every precision that the recipe leaves open. Variants that the recipe excludes are left out.
    Nothing goes to the host if the device is the CPU, or if several ranks or DeepSpeed share the work.

    Args:
        recipe: Recipe of the run.
        limits: Memory to plan with.
        cluster: Ranks of the run.
        resumed: True for a resumed run, whose precision the recipe already has.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    chosen = [recipe] if resumed else precisions(recipe)
    moved = [_moved_to_host(each, limits, cluster) for each in chosen]
    return [*chosen, *(each for found in moved for each in found)]


def _moved_to_host(recipe: Settings, limits: Limits, cluster: Cluster) -> list[Settings]:
    """Return the recipe with the optimizer and with the weights on the host, if it leaves these choices open."""
    spec, full = recipe.engine, recipe.finetuning_type == "full"
    alone = cluster.ranks == 1 and cluster.engine == "none"
    if spec.schedule == "fixed" or limits.shared or not limits.host_bytes or not alone:
        return []
    tiers: list[dict[str, str]] = []
    if full and spec.optimizer == "auto" and spec.weights != "host":
        tiers.append({"optimizer": "host"})
    if spec.weights == "auto":
        tiers.append({"weights": "host"})
    found: list[Settings] = []
    for tier in tiers:
        with suppress(ValidationError):  # the recipe contradicts this choice
            engine = type(spec).model_validate({**dict(spec), **tier})
            type(recipe).model_validate({**dict(recipe), "engine": engine})
            found.append(recipe.model_copy(update={"engine": engine}))
    return found


def with_saved_placement(recipe: Settings, tiers: Mapping[str, str] | None) -> Settings | None:
    """Return the recipe with the host placement of a resumed run; None if it is unknown or the recipe contradicts it.

    Args:
        recipe: Recipe of the run.
        tiers: Values of ``engine.weights`` and ``engine.optimizer`` in the resumed run; None if it moved neither.
    """
    spec = recipe.engine
    if tiers is None or spec.schedule == "fixed":
        return None
    if any(getattr(spec, key) not in ("auto", value) for key, value in tiers.items()):
        return None
    return recipe.model_copy(update={"engine": spec.model_copy(update=dict(tiers))})


def first_fitting(
    choices: Sequence[Settings],
    workload_of: Callable[[Settings], Workload],
    limits: Limits,
    *,
    simulate: Simulate = simulate,
) -> Settings:
    """Return the first of the :func:`placements` whose step fits with some schedule.

    If no step fits, return the last choice that fits the host, which allows the longest rows.

    Args:
        choices: Placements to try, in order.
        workload_of: Returns the workload of a choice.
        limits: Memory to plan with.
        simulate: Simulates a step; called with the schedule of least memory.
    """
    if len(choices) == 1:
        return choices[0]
    chosen = choices[0]
    for choice in choices:
        workload = workload_of(choice)
        if choice is not choices[-1] and is_hopeless(workload, choice.engine.written(), limits):
            continue
        found: Simulation | None = None
        with suppress(ArgumentError):  # the recipe contradicts this choice
            if choice.engine.schedule == "fixed":
                found = simulate(workload, make_schedule(choice.engine))
            else:
                _, found = smallest_step(workload, limits, choice.engine.written(), simulate)
        if found is None:
            continue
        if excess_bytes(found, limits) <= 0:
            return choice
        if not fixed_terms_exceed_host(found, limits):
            chosen = choice
    return chosen


def is_hopeless(workload: Workload, written: Mapping[str, Any], limits: Limits) -> bool:
    """Return True if weights, gradients and optimizer exceed the device at any row length; nothing is simulated.

    Args:
        workload: Workload of the step.
        written: Fields of the schedule that the recipe gives.
        limits: Memory to plan with.
    """
    return resident_memory(workload, written.get("weights", "device")).on_device > limits.device


def describe_placement(recipe: TrainingSettings, chosen: TrainingSettings) -> str | None:
    """Return a note on what was moved to the host, with its recipe key; None if nothing was moved."""
    before, now = recipe.engine, chosen.engine
    if now.weights != before.weights:
        key, what = "weights", "the weights and their optimizer"
    elif now.optimizer != before.optimizer:
        key, what = "optimizer", "the optimizer states"
    else:
        return None
    return f"no schedule fits with everything on the device: {what} are kept in host memory (engine: {{{key}: host}})"
