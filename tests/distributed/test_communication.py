"""Streaming sends the same bytes as training without it, for any number of chunks (``benchmarks.communication``)."""

from __future__ import annotations

import pytest
from benchmarks.communication.tables import ENGINES, Row, broken, count, main_cases, why_no_nodes


def rows_of(rows: list[Row], engine: str, mode: str) -> list[Row]:
    return [row for row in rows if (row.case["engine"], row.case["mode"]) == (engine, mode)]


@pytest.mark.parametrize(
    "engines",
    [["ddp"], pytest.param([engine for engine in ENGINES if engine != "ddp"], marks=pytest.mark.full)],
    ids=" ".join,
)
def test_streaming_sends_what_ordinary_training_sends(engines: list[str]) -> None:
    cases = [case for case in main_cases(engines, size="test") if case["mode"] != "ordinary"]
    cases = [case for case in cases if case["mode"] != "naive" or case["engine"] in ("zero2", "zero3")]
    rows = count(cases)
    assert len(rows) == len(cases)
    assert broken(rows) == []
    for engine in engines:
        (plain,), streaming = rows_of(rows, engine, "plain"), rows_of(rows, engine, "streaming")
        assert len(streaming) == 3
        assert all(0 < row.calls <= plain.calls for row in streaming)
    for row in rows_of(rows, "zero3", "streaming"):  # embedding, two layers, norm and head, each at once
        assert [row.traffic[phase]["all_gather"][0] for phase in ("forward", "backward")] == [5, 5]
    for engine in {"zero2", "zero3"}.intersection(
        engines
    ):  # the counting would see it if chunks were reduced one by one
        (naive,), (plain,) = rows_of(rows, engine, "naive"), rows_of(rows, engine, "plain")
        assert naive.bytes > 4 * plain.bytes


@pytest.mark.slow
def test_two_nodes_send_the_same_over_their_cable() -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)
    cases = main_cases(["zero1", "zero2", "zero3", "fsdp"], size="test", wire=True)
    rows = count([case for case in cases if case["chunks"] in (1, 8)])
    assert broken(rows) == []
    for row in rows:
        assert row.sent is not None
        assert row.sent > row.weight_bytes  # whole weights or gradients went there at least once
