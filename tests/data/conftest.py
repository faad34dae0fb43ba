"""Real tokenizers trained on the spot, real chat templates, real files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from trained_tokenizers import read_template, train_bpe, wrap
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return train_bpe()


@pytest.fixture(scope="session")
def make_tokenizer(bpe: Tokenizer) -> Callable[..., PreTrainedTokenizerFast]:
    """``make_tokenizer("chatml")``: a trained byte-level BPE with one of the templates of this folder."""
    trained = {(False, False): bpe}

    def make(
        template: str | None = "chatml", *, trim_offsets: bool = False, normalise: bool = False, **options: Any
    ) -> PreTrainedTokenizerFast:
        key = (trim_offsets, normalise)
        if key not in trained:
            trained[key] = train_bpe(trim_offsets=trim_offsets, normalise=normalise)
        return wrap(trained[key], read_template(template) if template else None, **options)

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer("chatml")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows (JSON lines), text or bytes to a file in a fresh folder; returns its path."""

    def write_file(name: str, content: list[Any] | str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file
