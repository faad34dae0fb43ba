"""Keys of row selection by gradients: each impossible combination is one error, at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamtune.errors import RecipeError
from streamtune.recipe import load_recipe
from streamtune.recipe.loader import LoadedRecipe

BASE = """\
objective: {objective}
model_name_or_path: some/model
datasets: [rows.jsonl]
max_length: 1024
"""
CHOSEN = "select_rows: colm\n"


def load(folder: Path, text: str, objective: str = "sft") -> LoadedRecipe:
    path = folder / "tiny.yaml"
    more = "reward_funcs: [exact_match]\nmax_prompt_length: 256\nmax_completion_length: 256\n"
    path.write_text(BASE.format(objective=objective) + (more if objective == "grpo" else "") + text)
    return load_recipe(path, [])


def test_what_is_right(tmp_path: Path) -> None:
    assert load(tmp_path, "").recipe.draws_per_row == 1
    assert load(tmp_path, CHOSEN).recipe.draws_per_row == 2
    text = "select_rows: colm\nselect_from: 4\nfinetuning_type: lora\noptim_in_backward: true\ntrain_batch_size: 32\n"
    assert load(tmp_path, text).recipe.draws_per_row == 4


@pytest.mark.parametrize(
    ("objective", "text", "line", "said", "fix"),
    [
        ("sft", "select_rows: craig\n", 5, "select_rows", "colm"),
        ("sft", "select_from: 4\n", 5, "needs 'select_rows', which chooses", "add select_rows: colm"),
        ("sft", CHOSEN + "select_from: 1\n", 6, "select_from", ""),
        ("sft", CHOSEN + "packing: true\n", 6, "packed sequences are made before", "delete the line, or select_rows"),
        (
            "sft",
            CHOSEN + "batching: tokens\ntokens_per_batch: 4096\n",
            6,
            "a fixed number of whole rows",
            "batching: rows",
        ),
        ("sft", CHOSEN + "streaming: true\nmax_steps: 9\n", 6, "rows of each dataset is unknown", "select_rows"),
        ("sft", CHOSEN + "reasoning: per_turn\n", 6, "turns share a sequence", "reasoning: keep"),
        ("sft", CHOSEN + "dataloader_num_workers: 2\n", 6, "with the current weights", "dataloader_num_workers: 0"),
        (
            "sft",
            CHOSEN + "fsdp: true\n",
            6,
            "ranks shard the weight whose gradients are compared",
            "select_rows works with DDP",
        ),
        (
            "sft",
            CHOSEN + "deepspeed: zero1\n",
            6,
            "ranks shard the weight whose gradients are compared",
            "select_rows works with DDP",
        ),
        ("sft", CHOSEN + "sequence_parallel_size: 2\n", 6, "a part of a row", "sequence_parallel_size: 1"),
        ("sft", CHOSEN + "optim: mezo\n", 6, "this optimizer computes none", "optim: adamw"),
        ("sft", CHOSEN + "optim: badam\n", 6, "computed only while its block is active", "optim: adamw"),
        ("dpo", CHOSEN, 5, "a pair has two completions", "delete the line"),
        ("grpo", CHOSEN, 8, "the model writes the rows it trains on", "delete the line"),
    ],
)
def test_what_is_wrong(tmp_path: Path, objective: str, text: str, line: int, said: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, objective)
    shown = str(caught.value)
    assert said in shown
    assert fix in shown
    assert f"tiny.yaml:{line}" in shown
