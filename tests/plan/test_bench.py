"""The benchmark on a model small enough to measure in seconds: real processes, real steps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from streamtune import Schedule
from streamtune.cli.app import app
from streamtune.errors import RunError
from streamtune.plan import BenchReport, draw_bench, run_bench
from tests.exactness.families import build

RECIPE = """
model: {init: {model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,
               num_key_value_heads: 2, intermediate_size: 48, vocab_size: 300, max_position_embeddings: 512}}
tokenizer: {train: {vocab_size: 300}}
datasets: [{path: python-stdlib}]
engine: {chunk_size: 32, head_chunk_size: 16}
"""


@pytest.fixture(scope="module")
def report() -> BenchReport:
    make_model = partial(build, "llama", max_position_embeddings=512)
    return run_bench(
        make_model, lengths=[64, 256], schedule=Schedule(chunk_size=32, head_chunk_size=16), repeats=1, notify=print
    )


def test_every_mode_is_measured_at_every_length(report: BenchReport) -> None:
    assert [(row.length, row.mode) for row in report.rows] == [
        (length, mode) for length in (64, 256) for mode in ("plain", "checkpoint", "stream")
    ]
    for row in report.rows:
        assert row.error is None
        for name in ("peak_bytes", "activation_bytes", "layer_activation_bytes", "rss_bytes"):
            assert getattr(row, name) > 0
        for name in ("forward_s", "backward_s", "tokens_per_s", "ratio"):
            assert getattr(row, name) > 0
    assert report.row("checkpoint", 64).ratio == 1.0


def test_streaming_holds_less_than_checkpointing_and_that_less_than_plain(report: BenchReport) -> None:
    plain, checkpoint, stream = (report.row(mode, 256) for mode in ("plain", "checkpoint", "stream"))
    assert stream.activation_bytes < checkpoint.activation_bytes < plain.activation_bytes  # type: ignore[operator]
    assert stream.layer_activation_bytes < checkpoint.layer_activation_bytes  # type: ignore[operator]


def test_the_picture_is_drawn(report: BenchReport, tmp_path: Path) -> None:
    draw_bench(report, tmp_path / "bench.png", title="a title")
    with Image.open(tmp_path / "bench.png") as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10


def test_a_fault_of_the_subject_is_not_taken_for_out_of_memory() -> None:
    with pytest.raises(RunError, match="benchmark failed") as caught:
        run_bench(partial(build, "no_such_family"), lengths=[8], modes=["plain"], schedule=Schedule())
    assert "no_such_family" in caught.value.mend


def test_the_command_with_adapters(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + "finetuning_type: lora\n")
    options = ["--lengths", "64", "--repeats", "1", "--modes", "stream", "--output-dir", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    (row,) = json.loads(result.stdout)["rows"]
    assert row["layer_activation_bytes"] > 0


def test_the_command(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = ["--lengths", "64", "--repeats", "1", "--output-dir", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    document: dict[str, Any] = json.loads(result.stdout)
    assert [row["mode"] for row in document["rows"]] == ["plain", "checkpoint", "stream"]
    assert {"length", "peak_bytes", "activation_bytes", "forward_s", "backward_s", "tokens_per_s"} <= set(
        document["rows"][0]
    )
    assert document == json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (tmp_path / "out" / "bench.png").is_file()
