"""Choose dtype and place of the trained weights and of the optimizer, where a recipe leaves them open.

A step of a fine-tuning changes a weight by about its learning rate. bfloat16 has 8 bits: of weights near 0.02 two
numbers lie 1.2e-4 apart, and a step of 1e-5 that is rounded to the nearest number is lost. So weights of a narrow
checkpoint are trained in float32 and computed in bfloat16 (``dtype: mixed``). Where these do not fit, weights stay
bfloat16 and each step is rounded stochastically, which is right on average.

A step is fastest with everything on the device, so the host is asked only where no schedule fits otherwise. The states
of the optimizer go there first, which pass once a step; then weights, which pass with every layer, twice or more. Each
place is tried in every precision that the recipe leaves open, the best first.
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
from streamtune.plan.choices import excess_of
from streamtune.plan.estimate import Simulate
from streamtune.plan.refusal import exceeds_host, smallest_step
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.simulate import Simulation, holdings_of, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.device import make_schedule

Settings = TypeVar("Settings", bound=TrainingSettings)

KEYS = ("dtype", "bf16", "weight_rounding", "optim_states")
"""Keys of a recipe that are chosen here."""


def precisions(recipe: Settings) -> list[Settings]:
    """Return the recipe with each precision that it leaves open, the best first; the recipe alone where it says one.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    if recipe.dtype != "auto" or recipe.model_name_or_path is None:
        return [recipe]
    own = models.checkpoint_dtype(recipe.model_name_or_path, recipe.trust_remote_code)
    if own not in (torch.bfloat16, torch.float16):
        return [recipe]
    half = {"dtype": "bfloat16"} if own == torch.float16 else {}
    if recipe.finetuning_type != "full":  # adapters are float32; modules that are trained whole are not
        whole = recipe.modules_to_save or recipe.adapter_name_or_path  # which may have such modules
        rounding = {"weight_rounding": "stochastic"} if whole and _may_round(recipe) else {}
        return [_with(recipe, **half, **rounding)]
    if recipe.deepspeed is not None:  # which keeps float32 weights beside these
        return [_with(recipe, **half)]
    casts = recipe.bf16 is None and recipe.engine.fetch_dtype != "bfloat16"
    wide = _with(recipe, dtype="mixed", **({"bf16": True} if casts else {}))
    if recipe.fsdp:
        return [wide]
    narrow: dict[str, Any] = {"dtype": "bfloat16"}
    if _may_round(recipe):
        narrow["weight_rounding"] = "stochastic"
    if recipe.optim == "adamw" and recipe.optim_states == "param":  # the nearest number loses steps of moments too
        narrow["optim_states"] = "bfloat16"
    return [wide, _with(recipe, **narrow)]


def precise(recipe: Settings) -> Settings:
    """Return the recipe with the best precision that it leaves open, whatever fits; as it is where that is unknown.

    Loading the checkpoint reports what is wrong with it.
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


def as_before(recipe: Settings, before: Mapping[str, Any]) -> Settings:
    """Return the recipe with the precision of the resumed run, where the recipe leaves it open.

    Args:
        before: The compared settings of that run. Without a precision it trains in the checkpoint's dtype.
    """
    fields = type(recipe).model_fields
    given = {key: before.get(key, fields[key].default) for key in KEYS}
    open_keys = [key for key in KEYS if getattr(recipe, key) == fields[key].default]
    return _with(recipe, **{key: given[key] for key in open_keys})


def choices_made(recipe: TrainingSettings, chosen: TrainingSettings) -> dict[str, Any]:
    """Return the keys of precision that differ, with the values of ``chosen``."""
    return {key: getattr(chosen, key) for key in KEYS if getattr(recipe, key) != getattr(chosen, key)}


def describe_precision(recipe: TrainingSettings, chosen: TrainingSettings, model: Any) -> str | None:
    """Return the chosen precision, its reason and its cost in one line; None if nothing was chosen.

    Args:
        recipe: The recipe as it was read.
        model: A model of the recipe, on ``meta`` or loaded: its trained weights are counted.
    """
    made = choices_made(recipe, chosen)
    if not made:
        return None
    more = show_size(_more_bytes(recipe, model))
    if chosen.dtype == "mixed":
        computed = " and computed in bfloat16" if chosen.bf16 else ""
        return (
            f"weights of fewer bits are trained in float32{computed} (dtype: mixed): {more} more than in the "
            "checkpoint's dtype, which would round small steps away"
        )
    if chosen.finetuning_type != "full" or chosen.deepspeed is not None:
        texts = []
        if "dtype" in made:
            texts.append(
                "the checkpoint is float16, whose gradients underflow without a scaled loss: it is loaded in bfloat16"
            )
        if "weight_rounding" in made and any(p.dtype != torch.float32 for p in model.parameters() if p.requires_grad):
            texts.append(
                "modules_to_save are bfloat16: each step of theirs is rounded stochastically (weight_rounding)"
            )
        return "; ".join(texts) or None
    if chosen.weight_rounding == "stochastic":
        how = "each step is rounded stochastically (weight_rounding: stochastic): right on average, with more noise"
    else:
        how = f"'optim: {chosen.optim}' rounds each step to the nearest number, which loses small ones"
    if chosen.step_kind.gradients == "block":
        how = f"'optim: {chosen.optim}' keeps the block that it trains in float32"
    return f"float32 weights do not fit, which take {more} more: weights are bfloat16, and {how}"


def loses_steps(recipe: TrainingSettings, model: Any) -> str | None:
    """Return a warning if trained weights are bfloat16 and steps are rounded to the nearest number; None if not."""
    keeps_float32 = recipe.deepspeed is not None or recipe.step_kind.gradients == "block"
    if keeps_float32 or recipe.weight_rounding == "stochastic":
        return None
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not trained:
        return None
    dtype = str(trained[0].dtype).removeprefix("torch.")
    rounded = "" if not _may_round(recipe) else ", or write weight_rounding: stochastic"
    return (
        f"{dtype} weights are trained and each step is rounded to the nearest number: at a learning rate of "
        f"{recipe.learning_rate:g} most small steps are lost; delete 'dtype' to train float32 weights{rounded}"
    )


def _may_round(recipe: TrainingSettings) -> bool:
    return not (recipe.step_kind.gradients in ("block", "none") or recipe.fsdp or recipe.deepspeed is not None)


def _more_bytes(recipe: TrainingSettings, model: Any) -> int:
    """Return how many bytes float32 weights, gradients and states take beyond bfloat16 ones."""
    trained = [p for p in model.parameters() if p.requires_grad]
    more = sum(4 * models.count_weights(p) for p in trained)
    if recipe.optim == "adamw" and recipe.optim_states == "param":
        shapes = [tuple(p.shape) for p in trained]
        more += sum(state_bytes("adamw", shape, 4, {}) - state_bytes("adamw", shape, 2, {}) for shape in shapes)
    return more


def _with(recipe: Settings, **values: Any) -> Settings:
    return recipe.model_copy(update=values) if values else recipe


def placements(recipe: Settings, limits: Limits, cluster: Cluster, *, begun: bool = False) -> list[Settings]:
    """Return the recipe as it is, then with the optimizer and then with the weights on the host, in each precision.

    Only what the recipe leaves to the planner and does not contradict is returned. Nothing goes to the host where the
    device's memory is the machine's, or ranks or DeepSpeed divide the work.

    Args:
        begun: The recipe has the precision of a resumed run: no other is asked for.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    chosen = [recipe] if begun else precisions(recipe)
    moved = [_moved(each, limits, cluster) for each in chosen]
    return [*chosen, *(each for found in moved for each in found)]


def _moved(recipe: Settings, limits: Limits, cluster: Cluster) -> list[Settings]:
    """Return the recipe with the optimizer and with the weights on the host, as far as it leaves that open."""
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
        with suppress(ValidationError):  # the recipe contradicts it
            engine = type(spec).model_validate({**dict(spec), **tier})
            type(recipe).model_validate({**dict(recipe), "engine": engine})
            found.append(recipe.model_copy(update={"engine": engine}))
    return found


def placed_before(recipe: Settings, tiers: Mapping[str, str] | None) -> Settings | None:
    """Return the recipe with what a resumed run had on the host; None where that is unknown or contradicted.

    Args:
        tiers: ``weights`` and ``optimizer`` of the run; None if it left both where they were.
    """
    spec = recipe.engine
    if tiers is None or spec.schedule == "fixed":
        return None
    if any(getattr(spec, key) not in ("auto", value) for key, value in tiers.items()):
        return None
    return recipe.model_copy(update={"engine": spec.model_copy(update=dict(tiers))})


def first_that_fits(
    choices: Sequence[Settings],
    workload_of: Callable[[Settings], Workload],
    limits: Limits,
    *,
    simulate: Simulate = simulate,
) -> Settings:
    """Return the first of some :func:`placements` whose step fits by some schedule.

    Where none does, the last that the host has room for: its longest row is the longest of all.

    Args:
        workload_of: Makes the step of one of them.
        simulate: Simulates a step of each choice, by the schedule of least memory.
    """
    if len(choices) == 1:
        return choices[0]
    chosen = choices[0]
    for choice in choices:
        workload = workload_of(choice)
        if choice is not choices[-1] and is_hopeless(workload, choice.engine.written(), limits):
            continue
        found: Simulation | None = None
        with suppress(ArgumentError):  # what is written contradicts it
            if choice.engine.schedule == "fixed":
                found = simulate(workload, make_schedule(choice.engine))
            else:
                _, found = smallest_step(workload, limits, choice.engine.written(), simulate)
        if found is None:
            continue
        if excess_of(found, limits) <= 0:
            return choice
        if not exceeds_host(found, limits):
            chosen = choice
    return chosen


def is_hopeless(workload: Workload, written: Mapping[str, Any], limits: Limits) -> bool:
    """Return True if what the device holds of a step, whatever the rows, exceeds its memory; nothing is simulated.

    Args:
        written: Fields of its schedule that are given.
    """
    return holdings_of(workload, written.get("weights", "device")).on_device > limits.device


def describe_tiers(recipe: TrainingSettings, chosen: TrainingSettings) -> str | None:
    """Return a sentence on what was moved to the host, with its key; None if nothing was."""
    before, now = recipe.engine, chosen.engine
    if now.weights != before.weights:
        key, what = "weights", "weights, and the optimizer of those that are trained,"
    elif now.optimizer != before.optimizer:
        key, what = "optimizer", "the states of the optimizer"
    else:
        return None
    return (
        f"no schedule fits with everything on the device: {what} wait in the machine's memory, as "
        f"engine: {{{key}: host}} says"
    )
