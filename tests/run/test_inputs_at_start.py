"""Files of a model that change between hashing and reading at the start of a run are an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from streamtune.errors import ArgumentError
from streamtune.models import train_tokenizer
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from tests.sft_kit import FIXED, QWEN3, RECIPE, write_recipe, write_rows


@pytest.mark.parametrize("back", [False, True], ids=["edited", "edited and edited back"])
def test_weights_that_are_edited_while_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """The file is restored after it was read, so both hashes are equal although other weights were loaded."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 4)
    tokenizer = train_tokenizer([(tmp_path / "rows.jsonl").read_text()], vocab_size=300)
    tokenizer.save_pretrained("base")
    config = AutoConfig.for_model(**QWEN3, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained("base")
    named = {"model": None, "tokenizer": None, "model_name_or_path": "base", "engine": FIXED, "max_length": 128}
    recipe = {key: value for key, value in {**RECIPE, **named}.items() if value is not None}
    loaded = load_recipe(write_recipe(tmp_path, recipe), [])
    build_run(loaded).start.release()

    weights = tmp_path / "base/model.safetensors"
    content = weights.read_bytes()

    @contextmanager
    def doing(what: str) -> Iterator[None]:
        if what == "loading the model":
            changed = bytearray(content)
            changed[-2] ^= 1
            weights.write_bytes(changed)
        yield
        if what == "loading the model" and back:
            weights.write_bytes(content)
            os.utime(weights, (1, 1))

    with pytest.raises(ArgumentError, match=r"model\.safetensors was written to while the run was starting"):
        build_run(loaded, doing=doing)
