"""Choose the fastest schedule (chunk sizes, offloading, recomputation) of a training step that fits in memory."""

from streamtune.plan.budget import Limits
from streamtune.plan.planner import Plan, as_fixed_fields, choose, evaluate_schedule, plan_step
from streamtune.plan.rates import Rates

__all__ = ["Limits", "Plan", "Rates", "as_fixed_fields", "choose", "evaluate_schedule", "plan_step"]
