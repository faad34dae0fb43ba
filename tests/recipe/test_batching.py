"""Keys of steps that are counted in tokens: each wrong value is one error, at its line."""

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


def load(folder: Path, text: str, objective: str = "sft") -> LoadedRecipe:
    path = folder / "tiny.yaml"
    more = "reward_funcs: [exact_match]\nmax_prompt_length: 256\nmax_completion_length: 256\n"
    path.write_text(BASE.format(objective=objective) + (more if objective == "grpo" else "") + text)
    return load_recipe(path, [])


def test_what_is_right(tmp_path: Path) -> None:
    assert load(tmp_path, "").recipe.batching == "rows"
    assert load(tmp_path, "batching: tokens\ntokens_per_batch: 1024\n").recipe.tokens_per_batch == 1024
    text = "batching: buckets\ntokens_per_batch: 4096\nbuckets: {curriculum: grow-linear, cycles: 4, min_length: 32}\n"
    buckets = load(tmp_path, text).recipe.buckets
    assert buckets is not None
    assert (buckets.curriculum, buckets.cycles, buckets.min_length) == ("grow-linear", 4, 32)
    assert load(tmp_path, "batching: buckets\npacking: true\ntokens_per_batch: 4096\n").recipe.packing
    assert load(tmp_path, "batching: tokens\ntokens_per_batch: 2048\n", "dpo").recipe.batching == "tokens"


@pytest.mark.parametrize(
    ("objective", "text", "line", "said", "fix"),
    [
        ("sft", "batching: token\n", 5, "batching", "tokens"),
        (
            "sft",
            "batching: tokens\n",
            5,
            "needs 'tokens_per_batch', the tokens of an optimizer step",
            "add tokens_per_batch: 8192",
        ),
        ("sft", "tokens_per_batch: 9000\n", 5, "and 'batching' is rows", "add batching: tokens"),
        ("sft", "batching: tokens\ntokens_per_batch: 1000\n", 6, "allows a row of 1,024 tokens", "at least 1024"),
        ("sft", "batching: tokens\ntokens_per_batch: many\n", 6, "tokens_per_batch", ""),
        (
            "sft",
            "batching: tokens\ntokens_per_batch: 4096\ngradient_accumulation_steps: 4\n",
            7,
            "'gradient_accumulation_steps' sets the rows of an optimizer step",
            "delete the line",
        ),
        (
            "sft",
            "batching: buckets\ntokens_per_batch: 4096\ntrain_batch_size: 8\n",
            7,
            "'train_batch_size' sets the rows",
            "",
        ),
        ("sft", "buckets: {cycles: 4}\n", 5, "'buckets' needs 'batching: buckets'", "write batching: buckets"),
        (
            "sft",
            "batching: buckets\ntokens_per_batch: 4096\nbuckets:\n  min_length: 100\n",
            8,
            "must be a power of two; found 100",
            "write 64 or 128",
        ),
        (
            "sft",
            "batching: buckets\ntokens_per_batch: 4096\nbuckets:\n  min_length: 2048\n",
            8,
            "the smallest bucket has 2,048 tokens, and 'max_length' is 1,024",
            "smaller power of two",
        ),
        ("sft", "batching: buckets\ntokens_per_batch: 4096\nbuckets:\n  cycles: 0\n", 8, "cycles", ""),
        ("sft", "batching: buckets\ntokens_per_batch: 4096\nbuckets:\n  curriculum: grow\n", 8, "curriculum", ""),
        (
            "sft",
            "batching: buckets\ntokens_per_batch: 4096\nshuffle: false\n",
            7,
            "orders pieces by length",
            "delete one of the two",
        ),
        ("dpo", "batching: buckets\ntokens_per_batch: 4096\n", 5, "dpo compares whole completions", "tokens or rows"),
        ("dpo", "batching: tokens\ntokens_per_batch: 1024\n", 6, "allows a pair of completions of 2,048", "2048"),
        (
            "grpo",
            "batching: tokens\ntokens_per_batch: 4096\n",
            8,
            "the completions of grpo are not written yet",
            "delete",
        ),
        ("grpo", "batching: buckets\ntokens_per_batch: 4096\n", 8, "completions that the model writes", "delete"),
        ("grpo", "tokens_per_batch: 4096\n", 8, "the completions of grpo are not written yet", "\ndelete the line"),
        ("dpo", "buckets: {cycles: 4}\n", 5, "which is not for dpo", "\ndelete the line"),
        ("dpo", "select_from: 4\n", 5, "'select_from' is not read by dpo", "\ndelete the line"),
        ("dpo", "shuffle_buffer: 5\n", 5, "which is not for dpo", "\ndelete the line"),
        ("dpo", "truncate_side: left\n", 5, "'truncate_side' is not read by dpo", "\ndelete the line"),
        ("grpo", "split_at: line\n", 8, "which is not for grpo", "\ndelete the line"),
    ],
)
def test_what_is_wrong(tmp_path: Path, objective: str, text: str, line: int, said: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, objective)
    shown = str(caught.value)
    assert said in shown
    assert fix in shown
    assert f"tiny.yaml:{line}" in shown
