"""Listeners of a run: each has copies, and the first that raises is not called again."""

from __future__ import annotations

from typing import Any

import pytest

from streamtune.train.progress import Listener, Listeners


class Changing(Listener):
    def __init__(self, raises: bool = False) -> None:
        self.raises, self.steps, self.ended = raises, list[Any](), False

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record["loss"])
        record["loss"] = None
        if self.raises:
            raise ValueError("enough")

    def finished(self, outcome: dict[str, Any]) -> None:
        self.ended = True


def test_each_listener_has_a_copy_and_the_first_error_is_kept() -> None:
    record, failing, other = {"step": 1, "loss": 2.0}, Changing(raises=True), Changing()
    listeners = Listeners([failing, other])
    listeners.raise_error()
    listeners.step(record)
    listeners.step(record)
    listeners.finished({"status": "failed", "step": 1})
    assert record == {"step": 1, "loss": 2.0}
    assert (failing.steps, other.steps) == ([2.0], [2.0, 2.0])
    assert (failing.ended, other.ended) == (False, True)
    with pytest.raises(ValueError, match="enough"):
        listeners.raise_error()
