"""The names users rely on: adding one is a decision, losing one is a break."""

from __future__ import annotations

import importlib

import pytest

import streamtune

PUBLIC = {
    "streamtune": {
        "RouterLoss",
        "Schedule",
        "StreamHandle",
        "__version__",
        "linear_cross_entropy",
        "stream",
        "token_logprobs",
    },
    "streamtune.engine": {
        "RouterLoss",
        "Schedule",
        "StreamHandle",
        "balance_coefficient",
        "balances_itself",
        "check_packing",
        "decoder_layers",
        "stream",
    },
    "streamtune.objectives": {
        "ADVANTAGES",
        "POLICY_LOSSES",
        "PREFERENCE_LOSSES",
        "UNPAIRED_LOSSES",
        "Advantages",
        "PairLogps",
        "PolicyLoss",
        "PolicyTerms",
        "PreferenceLoss",
        "PreferenceTerms",
        "RowLogps",
        "StepTotals",
        "UnpairedLoss",
        "UnpairedTerms",
        "check_policy",
        "check_preference",
        "check_unpaired",
        "counts",
        "group_advantages",
        "kl_estimate",
        "kto_baseline",
        "mean_by_row",
        "policy_loss",
        "preference_loss",
        "reward_with_kl",
        "sum_by_row",
        "unpaired_loss",
    },
    "streamtune.ops": {
        "LazyMask",
        "MaskView",
        "Segment",
        "linear_cross_entropy",
        "prefix_attention",
        "prefix_attention_reference",
        "project_cross_entropy",
        "row_starts",
        "token_logprobs",
    },
    "streamtune.plan": {
        "ALL_MODES",
        "MODES",
        "Alternative",
        "BenchReport",
        "BenchRow",
        "Job",
        "Limit",
        "Limits",
        "LiveBytes",
        "Mode",
        "Plan",
        "ProbeReport",
        "ProbeTask",
        "Rates",
        "Simulation",
        "TableName",
        "TableReport",
        "Trial",
        "VerifyReport",
        "Work",
        "Workload",
        "as_fixed",
        "choose",
        "draw_bench",
        "draw_probe",
        "draw_table",
        "judge",
        "markdown",
        "measured",
        "run_bench",
        "run_probe",
        "run_table",
        "run_verify",
        "simulate",
        "verify_schedules",
    },
    "streamtune.rewards": {
        "BUILTINS",
        "RewardFunction",
        "RewardScores",
        "Rewards",
        "load_reward",
        "load_rewards",
    },
    "streamtune.errors": {
        "ArgumentError",
        "CheckpointError",
        "DataError",
        "NonFiniteError",
        "OutOfMemoryError",
        "RecipeError",
        "RunError",
        "StorageError",
        "StreamTuneError",
        "UnsupportedModelError",
        "UserError",
        "did_you_mean",
    },
}


@pytest.mark.parametrize("module", PUBLIC)
def test_exports_are_these_and_exist(module: str) -> None:
    found = importlib.import_module(module)
    assert set(found.__all__) == PUBLIC[module]
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = streamtune.no_such_name
