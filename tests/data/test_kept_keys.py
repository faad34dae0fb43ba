"""The keys of prepared rows depend on the same facts of a recipe as before: rows of an earlier version are found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fixed_tokenizer import fixed_tokenizer

from streamtune.base.paths import cache_folder
from streamtune.data import Source, row_cache
from streamtune.recipe.schema import DpoRecipe, GrpoRecipe, Recipe
from streamtune.tasks import task_of

COMMON: dict[str, Any] = {"model_name_or_path": "none", "datasets": [{"path": "none"}]}
CHAT = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "3"}]
PAIR = {"prompt": "Add 1 and 2.", "chosen": " It is 3.", "rejected": " It is 4."}
OTHER_KEYS: dict[str, Any] = {
    "on_bad_row": "skip",
    "max_bad_rows": 7,
    "default_system": "Be brief.",
    "chat_template_kwargs": {"enable_thinking": False},
    "val_size": 0.0,
    "seed": 3,
}
ROW_KEYS: dict[str, Any] = {
    "max_length": 512,
    "overlength": "split",
    "split_at": "line",
    "split_overlap": 8,
    "train_on": "last",
    "packing": True,
    "on_empty": "drop",
}

PAIR_KEYS: dict[str, Any] = {"max_prompt_length": 64, "identical_pairs": "drop", "overlength": "truncate"}
PROMPT_KEYS: dict[str, Any] = {
    "reward_funcs": "none",
    "overlength": "truncate",
    "truncate_side": "middle",
    "max_prompt_length": 48,
}
PROMPT = {"prompt": "Add 1 and 2."}

RECIPES: dict[str, tuple[Recipe, Mapping[str, Any]]] = {
    "0a01b8dd06a11024e727d9264242ec6aabe03801": (Recipe(**COMMON), {"messages": CHAT}),
    "3a271be825e302ffa471953fe09df6c6f26111e5": (Recipe(**COMMON, **OTHER_KEYS, **ROW_KEYS), {"messages": CHAT}),
    "6580bc2ad543ce834f87c5fc5824168a226716d0": (Recipe(**COMMON, reasoning="per_turn"), {"messages": CHAT}),
    "71ffc863f3796d5e113b66e2f33a52bd131753e1": (DpoRecipe(**COMMON, objective="dpo"), PAIR),
    "74a104d6ae8725880519ff4971eeb0073a6b9543": (DpoRecipe(**COMMON, **OTHER_KEYS, **PAIR_KEYS, objective="dpo"), PAIR),
    "426813e27c502aa49ae8f8dec15d3011c9e2ca7d": (DpoRecipe(**COMMON, objective="dpo", loss_type="kto"), PAIR),
    "0b0301fc2ec77d2336d2a13e3c85907166851f71": (GrpoRecipe(**COMMON, objective="grpo", reward_funcs="none"), PROMPT),
    "099e72082fab6658e11f5321863a76feccb86dc0": (
        GrpoRecipe(**COMMON, **OTHER_KEYS, **PROMPT_KEYS, objective="grpo"),
        PROMPT,
    ),
}
"""The key of the rows of a recipe, with the recipe and its row."""


@pytest.mark.parametrize("key", RECIPES)
def test_the_key_of_kept_rows_is_that_of_earlier_versions(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Constants in place of all that changes with a version of the code or of a library.
    monkeypatch.setattr(row_cache, "_code_hash", lambda: "code")
    monkeypatch.setattr(row_cache, "__version__", "1")
    monkeypatch.setattr(row_cache, "_identify_tokenizer", lambda tokenizer: ["tokenizer"])
    monkeypatch.setattr(row_cache.metadata, "version", lambda package: "1")
    recipe, row = RECIPES[key]
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    task_of(recipe).prepare([Source("rows.jsonl")], fixed_tokenizer("qwen3"), lambda message: None)
    assert [entry.name for entry in (cache_folder() / "rows").iterdir() if entry.is_dir()] == [key]
