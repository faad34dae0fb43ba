"""The memory that a run's longest step would hold without streaming, by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from streamtune.errors import UserError
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.scored import Completions
from streamtune.plan.simulate.simulate import simulate
from streamtune.plan.simulate.workload import Mode
from streamtune.recipe.schema import Recipe
from streamtune.run.plan import make_workload
from streamtune.schedule import Schedule

BASELINES: tuple[Mode, ...] = ("plain", "checkpoint")


def baseline_bytes(
    recipe: Recipe,
    model: Any,
    length: int,
    device: torch.device,
    *,
    cluster: Cluster,
    completions: Completions | None,
    reference_bytes: int,
) -> Mapping[str, int]:
    """Return the peak bytes of a step by plain autograd (``plain``) and by gradient checkpointing (``checkpoint``).

    Empty where they cannot be simulated.

    Args:
        recipe: The recipe.
        model: On its device, with its adapters, not yet streamed.
        length: Tokens of the longest row, or of the longest completion with its prompt.
        device: The device of the model.
        cluster: The ranks of the run.
        completions: The completions of a micro-batch, where the objective scores completions.
        reference_bytes: Of a second model that is held and not trained.
    """
    shape = meta_copy(model)
    workload = make_workload(
        recipe, shape, length, device, cluster=cluster, completions=completions, reference_bytes=reference_bytes
    )
    try:
        return {mode: simulate(replace(workload, mode=mode), Schedule()).peak_bytes for mode in BASELINES}
    except (UserError, NotImplementedError):
        return {}
