"""A rollout on several ranks: every rank has all of it, in order, and what ends it on one ends it on all.

Ranks that divide the weights write what ranks write that have them whole.
"""

from __future__ import annotations

import json

import pytest

from .rank_group import run_ranks


def test_ranks_share_a_rollout_and_how_it_ends() -> None:
    found = run_ranks(2, "tests.distributed.rollout_cases", ["", "stop", "judge"])
    assert found[""] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    assert found["stop"] == ["GenerationStopped: "] * 2
    assert found["judge"] == ["RunError: rank 1 failed: _BrokenError: no", "_BrokenError: no"]


@pytest.mark.full
def test_ranks_that_divide_the_weights_stop_after_the_same_batch() -> None:
    """One rank is asked to stop; without it the others could not write the next batch."""
    found = run_ranks(2, "tests.distributed.rollout_cases", ["fsdp", "zero3"])
    assert found == {engine: ["GenerationStopped"] * 2 for engine in ("fsdp", "zero3")}


@pytest.mark.full
@pytest.mark.parametrize(
    "finetuning", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "qlora"))]
)
def test_ranks_that_divide_the_weights_write_the_same(finetuning: str) -> None:
    pytest.importorskip("bitsandbytes")
    base = {"finetuning_type": finetuning, **({"quantization": "nf4"} if finetuning == "qlora" else {})}
    cases = [base, {**base, "fsdp": True}, {**base, "deepspeed": "zero3"}]
    found = run_ranks(2, "tests.distributed.writing_cases", cases)
    whole, *divided = (found[json.dumps(case)] for case in cases)
    assert [len(ids) for ids in whole] == [6, 6, 6]
    assert divided == [whole, whole]
