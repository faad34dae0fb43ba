"""Properties of the policy-gradient losses, against which recipes are checked. torch is not imported.

``streamtune.tasks.objectives.policy`` has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyLossFacts:
    """Properties of a policy-gradient loss."""

    kl_in_reward: bool = False
    """True if the KL divergence from the reference model is subtracted from the reward; False if it is added to the
    loss."""


POLICY_LOSS_FACTS: Mapping[str, PolicyLossFacts] = {
    "grpo": PolicyLossFacts(),
    "dr_grpo": PolicyLossFacts(),
    "dapo": PolicyLossFacts(),
    "bnpo": PolicyLossFacts(),
    "gspo": PolicyLossFacts(),
    "rloo": PolicyLossFacts(kl_in_reward=True),
    "remax": PolicyLossFacts(kl_in_reward=True),
}
"""Name of a loss (``loss_type``) -> its facts."""

KL_IN_REWARD = tuple(name for name, facts in POLICY_LOSS_FACTS.items() if facts.kl_in_reward)
"""Names of the losses whose KL divergence is subtracted from the reward."""
