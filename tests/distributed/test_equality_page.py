"""The page of `make test-distributed`: which runs are in which column."""

from __future__ import annotations

from typing import Any

from tests.distributed.equality_page import _of


def test_runs_of_another_model_stand_in_no_column() -> None:
    ours: dict[str, Any] = {"objective": "sft", "settings": {"deepspeed": "zero3", "finetuning_type": "full"}}
    other: dict[str, Any] = {"objective": "sft", "settings": {"deepspeed": "zero3", "model.init": {}}}
    noted = [{"ranks": 2, "case": ours, "curve": 1e-7}, {"ranks": 2, "case": other, "curve": 1.0}]
    assert _of(noted, 2, "zero3", "sft", "full") == noted[:1]
    assert _of(noted, 2, "zero3", "sft", "lora") == []
