"""A folder with rows and a tiny recipe, and the command run in it: what tests of ``streamtune sft`` begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.cli import main

__all__ = ["FIXED", "QWEN3", "RECIPE", "run", "write_recipe", "write_rows"]

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
"""The configuration of a model that is made in no time."""

RECIPE: dict[str, Any] = {
    "model": {"init": QWEN3},
    "tokenizer": {"train": {"vocab_size": 320}},
    "datasets": [{"path": "rows.jsonl"}],
    "learning_rate": 1.0e-2,
}
"""What the recipes of all tests begin with; :func:`write_rows` makes the rows."""

FIXED: dict[str, Any] = {"schedule": "fixed", "chunk_size": 16, "head_chunk_size": 8}
"""An engine without the planner, whose chunks are shorter than the rows."""


def write_rows(folder: Path, count: int) -> None:
    """``rows.jsonl``: short conversations of four lengths."""
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(count):
            answer = f"return a + b + {number}\n" * (1 + number % 4)
            messages = [{"role": "user", "content": f"Add {number}."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_recipe(folder: Path, recipe: dict[str, Any]) -> Path:
    """``tiny.yaml``."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def run(*arguments: str, command: str = "sft") -> int:
    """Exit code of ``streamtune sft tiny.yaml``, or another command, in the current folder."""
    with pytest.raises(SystemExit) as left:
        main([command, "tiny.yaml", *arguments])
    return int(left.value.code or 0)
