"""The names users rely on: adding one is a decision, losing one is a break."""

from __future__ import annotations

import importlib

import pytest

import streamtune

PUBLIC = {
    "streamtune": {
        "RouterLoss",
        "Schedule",
        "SequenceParallel",
        "StreamHandle",
        "__version__",
        "chunkwise",
        "linear_cross_entropy",
        "stream",
        "token_logprobs",
    },
    "streamtune.engine": {
        "Branches",
        "LazyLogits",
        "LossRequest",
        "RouterLoss",
        "Schedule",
        "SequenceParallel",
        "StreamHandle",
        "TokenScores",
        "balance_coefficient",
        "adds_balance_loss",
        "check_branches",
        "check_packing",
        "chunkwise",
        "decoder_layers",
        "keep_on_host",
        "stream",
    },
    "streamtune.integrations": {"StreamTuneCallback"},
    "streamtune.errors": {
        "ArgumentError",
        "CheckpointError",
        "DataError",
        "DistributedError",
        "NonFiniteError",
        "OutOfMemoryError",
        "RecipeError",
        "RunError",
        "StorageError",
        "StreamTuneError",
        "UnsupportedModelError",
        "UserError",
        "VersionError",
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
