"""Preference and policy-gradient losses, as pure functions of per-token log-probs.

advantages  sums over the tokens of a completion; advantages from the rewards of a group
pairs       losses of preference pairs
unpaired    losses of single labelled completions (KTO)
policy      policy-gradient losses
"""

from __future__ import annotations

from streamtune.tasks.objectives.advantages import (
    ADVANTAGES,
    Advantages,
    group_advantages,
    mean_by_row,
    reward_with_kl,
    sum_by_row,
    tokens_per_row,
)
from streamtune.tasks.objectives.pairs import (
    DEFAULT_REWARD_GAP,
    PREFERENCE_LOSSES,
    PairLogps,
    PairOptions,
    PreferenceLoss,
    PreferenceTerms,
    check_preference_loss,
    preference_loss,
)
from streamtune.tasks.objectives.policy import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyOptions,
    PolicyTerms,
    StepTotals,
    TokenLogps,
    check_policy_loss,
    kl_estimate,
    policy_loss,
)
from streamtune.tasks.objectives.unpaired import (
    UNPAIRED_LOSSES,
    RowLogps,
    UnpairedLoss,
    UnpairedOptions,
    UnpairedTerms,
    check_unpaired_loss,
    kto_baseline,
    unpaired_loss,
)

__all__ = [
    "ADVANTAGES",
    "DEFAULT_REWARD_GAP",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "UNPAIRED_LOSSES",
    "Advantages",
    "PairLogps",
    "PairOptions",
    "PolicyLoss",
    "PolicyOptions",
    "PolicyTerms",
    "PreferenceLoss",
    "PreferenceTerms",
    "RowLogps",
    "StepTotals",
    "TokenLogps",
    "UnpairedLoss",
    "UnpairedOptions",
    "UnpairedTerms",
    "check_policy_loss",
    "check_preference_loss",
    "check_unpaired_loss",
    "group_advantages",
    "kl_estimate",
    "kto_baseline",
    "mean_by_row",
    "policy_loss",
    "preference_loss",
    "reward_with_kl",
    "sum_by_row",
    "tokens_per_row",
    "unpaired_loss",
]
