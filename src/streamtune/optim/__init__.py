"""Build optimizers and learning-rate schedules by name."""

from __future__ import annotations

from streamtune.optim.badam import BlockAdamW, train_largest_block
from streamtune.optim.libraries import RULES
from streamtune.optim.narrow_states import NarrowStatesAdamW, Rounding, StatesDtype
from streamtune.optim.optimizers import (
    LayerPositions,
    NameGroups,
    OptimChoice,
    build_optimizer,
    check_optimizer,
    set_learning_rate,
)
from streamtune.optim.schedules import SCHEDULES, LearningRateSchedule, build_schedule
from streamtune.optim.weightwise import (
    WeightwiseOptimizer,
    averaged_weights,
    pack_number,
    pack_state,
    state_tensors,
    unpack_number,
    uses_averaged_weights,
)
from streamtune.optim.zeroth_order import ZerothOrderSGD, perturb_weights

__all__ = [
    "RULES",
    "SCHEDULES",
    "BlockAdamW",
    "LayerPositions",
    "LearningRateSchedule",
    "NameGroups",
    "NarrowStatesAdamW",
    "OptimChoice",
    "Rounding",
    "StatesDtype",
    "WeightwiseOptimizer",
    "ZerothOrderSGD",
    "averaged_weights",
    "build_optimizer",
    "build_schedule",
    "check_optimizer",
    "pack_number",
    "pack_state",
    "perturb_weights",
    "set_learning_rate",
    "state_tensors",
    "train_largest_block",
    "unpack_number",
    "uses_averaged_weights",
]
