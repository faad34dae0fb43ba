"""A plugin of pytest: each causal language model is streamed when it is called first, if ``STREAMED`` is set.

It also stands in for the hub: names of tiny models become models of the same family, made from their configuration.
Where ``stream()`` refuses a model, its error is the test's outcome, as it would be a user's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import streamtune
from streamtune.errors import ArgumentError, StreamTuneError
from tests.suites.models import local_model

__all__ = ["CHUNK", "pytest_configure"]

CHUNK = 4
"""Tokens of a chunk: the tests' rows have 7 and more, so each is cut."""
_running: list[nn.Module] = []


def pytest_configure(config: pytest.Config) -> None:
    """Put the two stand-ins in place, for the whole process."""
    _use_local_models()
    if os.environ.get("STREAMED") == "1":
        _stream_when_called()


def _stream_when_called() -> None:
    plain = nn.Module.__call__

    def called(model: Any, *args: Any, **kwargs: Any) -> Any:
        if _running:
            return plain(model, *args, **kwargs)
        _running.append(model)
        try:
            if model.get_output_embeddings() is not None and not _is_streamed(model):
                streamtune.stream(model, chunk_size=CHUNK)
            return plain(model, *args, **kwargs)
        finally:
            _running.pop()

    PreTrainedModel.__call__ = called


def _is_streamed(model: Any) -> bool:
    try:
        streamtune.StreamHandle.of(model)
    except ArgumentError:
        return False
    return True


def _use_local_models() -> None:
    own = AutoModelForCausalLM.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        known = not Path(str(name)).exists() and "tiny" in str(name)
        return own(cls, str(local_model(str(name))) if known else name, *args, **kwargs)

    AutoModelForCausalLM.from_pretrained = classmethod(from_pretrained)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Append the outcome of each test to the file that ``OUTCOMES`` names."""
    done: Any = yield
    report = done.get_result()
    if report.when != "call" and report.outcome == "passed":
        return
    error = call.excinfo.value if call.excinfo is not None and report.outcome == "failed" else None
    outcome = "refused" if isinstance(error, StreamTuneError) else report.outcome
    why = "" if error is None else f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]
    line = {"test": item.name, "outcome": outcome, "why": why}
    with Path(os.environ["OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
