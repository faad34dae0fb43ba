"""The examples of docstrings run: a model, a batch and a tokenizer are there under the names that the examples use."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import streamtune
from streamtune.models.tokenizer import train_tokenizer

SOURCE = Path(streamtune.__file__).parent
WITH_EXAMPLES = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
FEWEST = 45
"""Docstrings with an example, at least."""


def examples(path: Path) -> Iterator[doctest.DocTest]:
    """Yield the examples of a file, with what they may use."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    yield from doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__, extraglobs=names())


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = train_tokenizer(["a b c"], vocab_size=300)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=len(tokenizer)))
    ids = torch.randint(0, len(tokenizer), (1, 32))
    return {
        "model": model,
        "ids": ids,
        "labels": ids,
        "tokenizer": tokenizer,
        "torch": torch,
        "streamtune": streamtune,
    }


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_examples_run(path: Path) -> None:
    found = [each for each in examples(path) if each.examples]
    assert found
    for example in found:
        said: list[str] = []
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
        assert not failed, "".join(said)


def test_what_people_meet_first_has_an_example() -> None:
    assert sum(path.read_text(encoding="utf-8").count("Example:\n") for path in WITH_EXAMPLES) >= FEWEST
