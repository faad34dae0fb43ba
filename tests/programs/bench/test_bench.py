"""The benchmark on a model small enough to measure in seconds: real processes, real steps."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from streamtune import Schedule
from streamtune.base.libraries import LOGGERS, quiet_imports
from streamtune.cli.app import app
from streamtune.errors import ArgumentError, RunError
from streamtune.programs.bench.bench import BenchReport, run_bench
from streamtune.programs.bench.plots import draw_bench
from streamtune.programs.bench.subject import Job, _layout_batches
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
    report = BenchReport({}, Schedule(chunk_size=32, head_chunk_size=16))
    return run_bench(report, Job(make_model), lengths=[64, 256], repeats=1, notify=print)


@pytest.mark.full
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
    assert report.find_row("checkpoint", 64).ratio == 1.0


@pytest.mark.full
def test_streaming_holds_less_than_checkpointing_and_that_less_than_plain(report: BenchReport) -> None:
    plain, checkpoint, stream = (report.find_row(mode, 256) for mode in ("plain", "checkpoint", "stream"))
    assert stream.activation_bytes < checkpoint.activation_bytes < plain.activation_bytes  # type: ignore[operator]
    assert stream.layer_activation_bytes < checkpoint.layer_activation_bytes  # type: ignore[operator]


@pytest.fixture(scope="module")
def packed() -> BenchReport:
    make_model = partial(build, "llama", max_position_embeddings=512)
    schedule = Schedule(chunk_size=64, head_chunk_size=16)
    report = BenchReport({}, schedule, packed_rows=8)
    return run_bench(report, Job(make_model), lengths=[256], modes=["stream"], repeats=1)


@pytest.mark.full
def test_packed_rows_are_measured_beside_one_row_and_beside_the_rows_alone(packed: BenchReport) -> None:
    assert [(row.mode, row.layout) for row in packed.rows] == [
        ("stream", layout) for layout in ("row", "packed", "separate")
    ]
    for row in packed.rows:
        assert row.error is None
        assert row.row_ratio is not None
        assert row.row_ratio > 0
        assert row.ratio is None, "gradient checkpointing was not measured"
    assert packed.find_row("stream", 256).row_ratio == 1.0
    assert packed.to_json()["packed_rows"] == 8


def test_layouts_hold_the_same_tokens() -> None:
    ids = torch.arange(22).reshape(2, 11)
    [row], [together], apart = (_layout_batches(ids, layout, 3) for layout in ("row", "packed", "separate"))
    assert torch.equal(row["input_ids"], ids)
    assert torch.equal(together["input_ids"], ids)
    assert torch.equal(torch.cat([batch["input_ids"] for batch in apart], dim=1), ids)
    assert together["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]] * 2
    assert [batch["input_ids"].shape[1] for batch in apart] == [4, 4, 3]


@pytest.mark.full
def test_the_picture_is_drawn(report: BenchReport) -> None:
    with Image.open(BytesIO(draw_bench(report, title="a title"))) as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10


@pytest.mark.full
def test_the_picture_shows_every_layout(report: BenchReport) -> None:
    (row,) = [row for row in report.rows if row.mode == "stream"][:1]
    layouts = [row, replace(row, layout="packed"), replace(row, layout="separate")]
    parts = [replace(report, rows=layouts[:shown], packed_rows=16) for shown in (1, 2, 3)]
    assert len({draw_bench(part, title="a title") for part in parts}) == 3


@pytest.mark.full
def test_a_fault_of_the_subject_is_not_taken_for_out_of_memory() -> None:
    with pytest.raises(RunError, match="benchmark failed") as caught:
        run_bench(BenchReport({}, Schedule()), Job(partial(build, "no_such_family")), lengths=[8], modes=["plain"])
    assert "no_such_family" in caught.value.fix


@pytest.mark.full
def test_the_command_with_adapters(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + "finetuning_type: lora\n")
    options = ["--lengths", "64", "--repeats", "1", "--modes", "stream", "--output-dir", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    (row,) = json.loads(result.stdout)["rows"]
    assert row["layer_activation_bytes"] > 0


@pytest.mark.parametrize("modes", [["stream"], pytest.param(["plain", "checkpoint", "stream"], marks=pytest.mark.full)])
def test_the_command(tmp_path: Path, modes: list[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = ["--lengths", "64", "--repeats", "1", "--output-dir", str(tmp_path / "out"), "--json"]
    options += ["--modes", ",".join(modes)] if len(modes) == 1 else []
    result = CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    document: dict[str, Any] = json.loads(result.stdout)
    assert [row["mode"] for row in document["rows"]] == modes
    assert {"length", "peak_bytes", "activation_bytes", "forward_s", "backward_s", "tokens_per_s"} <= set(
        document["rows"][0]
    )
    assert document == json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (tmp_path / "out" / "bench.png").is_file()


@pytest.mark.slow
def test_the_command_with_packed_rows(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = ["--lengths", "64", "--modes", "stream", "--repeats", "1", "--output-dir", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["bench", str(recipe), *options, "--packed-rows", "4"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "4 packed" in result.stdout
    assert "4 apart" in result.stdout
    with pytest.raises(ArgumentError, match="must be from 2 to half of the smallest length"):
        CliRunner().invoke(app, ["bench", str(recipe), *options, "--packed-rows", "33"], catch_exceptions=False)


@pytest.mark.full
def test_its_processes_are_as_quiet_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        quiet_imports()
        report = BenchReport({}, Schedule(chunk_size=8))
        run_bench(report, Job(partial(build, "llama")), lengths=[16], modes=["stream"], repeats=1)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert capfd.readouterr().err == ""
