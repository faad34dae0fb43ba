"""Put the engine into a model, with the schedule and the router loss of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamtune.adapters import base_of
from streamtune.engine import RouterLoss, SequenceParallel, StreamHandle, balance_coefficient, balances_itself, stream
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.recipe.schema import EngineSpec, Recipe
from streamtune.schedule import Schedule

if TYPE_CHECKING:
    pass

__all__ = ["make_router_loss", "make_schedule", "stream_model"]


def make_schedule(spec: EngineSpec) -> Schedule:
    """Return the engine's schedule without a planner: the fields that the recipe gives, and defaults for the others.

    With ``schedule: auto`` the recipe may leave out a field that another one needs. ``device_layers`` needs
    ``offload``: it is then ``disk`` if there is an ``offload_dir``, else ``host``.
    """
    chosen = spec.written()
    if chosen.get("device_layers") and "offload" not in chosen:
        chosen["offload"] = "disk" if "offload_dir" in chosen else "host"
    if chosen.get("offload", "device") != "disk":
        chosen.pop("offload_dir", None)
    return Schedule(**chosen)


def make_router_loss(recipe: Recipe, model: Any) -> RouterLoss | None:
    """Return the loss on the routers that a recipe or its model asks for; None if neither asks for one.

    Raises:
        ArgumentError: ``moe_balance`` is chosen, and there is nothing to balance.
        UnsupportedModelError: The model asks for a balance loss and has no coefficient for it.
    """
    base = base_of(model)
    balance, z = recipe.router_aux_loss_coef, recipe.router_z_loss_coef
    own = balances_itself(base)
    if balance is None:
        balance = balance_coefficient(base) if own else 0.0
    if balance or z or own:  # 0 switches off what the model's configuration asks for
        return RouterLoss(balance, z, recipe.moe_balance)
    if recipe.moe_balance != "micro":
        raise ArgumentError(
            f"'moe_balance: {recipe.moe_balance}' needs a loss on the routers, and nothing asks for one",
            where="moe_balance",
            mend="set router_aux_loss_coef, such as 0.001, or delete the line",
        )
    return None


def stream_model(
    recipe: Recipe, model: Any, schedule: Schedule | None = None, ranks: SequenceParallel | None = None
) -> StreamHandle:
    """Put the engine into a model, with the router loss that the recipe adds.

    Args:
        recipe: The recipe.
        model: Changed in place.
        schedule: The planner's choice; None is the recipe's schedule, with defaults.
        ranks: Those that share each sequence, if any do.

    Raises:
        UnsupportedModelError: The model cannot be streamed, or has no routers such as the recipe asks to balance.
    """
    schedule, router_loss = schedule or make_schedule(recipe.engine), make_router_loss(recipe, model)
    handle = stream(model, schedule=schedule, sequence_parallel=ranks)
    if router_loss is None:
        return handle
    handle.remove()
    try:
        return stream(model, schedule=schedule, router_loss=router_loss, sequence_parallel=ranks)
    except UnsupportedModelError as error:  # the model streams; it is its routers
        keys = [key for key in ("router_aux_loss_coef", "router_z_loss_coef") if getattr(recipe, key)]
        if keys:
            error.where, error.mend = keys[0], f"delete {' and '.join(keys)}; the model trains without"
        raise
