"""The tables of the benchmark, measured on a model of a few kilobytes: real processes, real steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from streamtune import Schedule
from streamtune.cli.app import app
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Budget, Range
from streamtune.plan.simulate import ALL_MODES
from streamtune.programs.bench import measure_table
from streamtune.programs.bench.bench_recipe import fingerprints
from streamtune.programs.bench.measure_table import (
    TableOptions,
    measure_missing_rows,
    measure_table_steps,
    search_longest,
)
from streamtune.programs.bench.modes import MODE_SETUPS
from streamtune.programs.bench.named_tables import draw_table, table_markdown, table_notes
from streamtune.programs.bench.subject import SHARING, Case, Job, MeasuredModel
from streamtune.programs.bench.table_rows import (
    DEFAULT,
    Entry,
    TableReport,
    TableRow,
    ablation_entries,
    maxlen_entries,
)
from streamtune.programs.probe.trial import Outcome
from streamtune.recipe import load_recipe
from tests.exactness.families import build

ENV = {
    "device": "x86_64",
    "device_type": "cpu",
    "threads": 2,
    "python": "3.11",
    "torch": "2",
    "transformers": "5",
    "dtype": "float32",
    "parameters": 1000,
    "layers": 2,
    "batch_size": 1,
}

SCHEDULE = Schedule(chunk_size=16, head_chunk_size=8)
HERE = [mode for mode in ALL_MODES if not MODE_SETUPS[mode].why_unavailable("cpu")]


# --- modes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject() -> MeasuredModel:
    return MeasuredModel(Job(partial(build, "llama", max_position_embeddings=512)))


@pytest.fixture(scope="module")
def steps(subject: MeasuredModel) -> dict[str, dict[str, Any]]:
    """A step of every mode that runs here, one after the other on one model."""
    return {mode: subject.measure_time(Case(mode, 64, SCHEDULE)) for mode in [*HERE, *HERE]}


@pytest.mark.parametrize("mode", HERE)
def test_every_mode_computes_the_same_loss_and_gradient(mode: str, steps: dict[str, dict[str, Any]]) -> None:
    for name in ("loss", "grad_norm"):
        assert steps[mode][name] == pytest.approx(steps["plain"][name], rel=1e-5)


def test_a_model_is_put_back_as_it_was_built(subject: MeasuredModel) -> None:
    def found() -> dict[str, set[str]]:
        theirs = {"_gradient_checkpointing_func", "gradient_checkpointing"}  # transformers leaves them
        return {name: set(vars(module)) - theirs for name, module in subject.model.named_modules()}

    subject.undo_preparation()
    before = found()
    for mode in HERE:
        subject.measure_time(Case(mode, 16, SCHEDULE))
        subject.undo_preparation()
        assert found() == before
        assert not any(getattr(module, "gradient_checkpointing", False) for module in subject.model.modules())
    assert all(parameter.grad is None for parameter in subject.model.parameters())


@pytest.mark.full
def test_what_peers_save_is_seen(subject: MeasuredModel) -> None:
    memory = {mode: subject.measure_memory(Case(mode, 256, SCHEDULE)) for mode in HERE}
    inputs = 2 * 256 * subject.model.config.hidden_size * 4
    assert memory["checkpoint-offload"]["host_bytes"] == inputs
    assert memory["checkpoint-offload"]["terms"]["layer inputs"] < memory["checkpoint"]["terms"]["layer inputs"]
    assert memory["stream"]["activation_bytes"] < memory["checkpoint"]["activation_bytes"]
    if "deepspeed-tiled" in HERE:
        assert memory["deepspeed-tiled"]["activation_bytes"] < memory["checkpoint"]["activation_bytes"]
    for measured in memory.values():
        assert sum(measured["terms"].values()) == measured["peak_bytes"]


def test_what_cannot_run_says_why() -> None:
    assert "accelerator" in MODE_SETUPS["liger-loss"].why_unavailable("cpu")
    assert replace(MODE_SETUPS["plain"], package="no_such_package").why_unavailable("cpu") == (
        "not run here: no_such_package is not installed"
    )


# --- the ablation ----------------------------------------------------------------------------------------------------


def test_an_ablation_changes_one_choice_at_a_time_and_repeats_none(tmp_path: Path) -> None:
    entries = ablation_entries(Schedule(), 4096, 4, str(tmp_path))
    assert [entry.label for entry in entries[:3]] == ["plain autograd", "gradient checkpointing", DEFAULT]
    schedules = [entry.case.schedule for entry in entries[2:]]
    assert len(set(schedules)) == len(schedules)
    assert len({entry.label for entry in entries}) == len(entries)
    for name, values in {
        "offload": {"device", "host", "disk"},
        "levels": {1, 2},
        "keep_kv": {"no", "device", "host"},
        "keep_attention": {"no", "device", "host"},
        "stream_grads": {False, True},
        "chunk_size": {512, 1024, 2048, 4096},
    }.items():
        assert {getattr(schedule, name) for schedule in schedules} == values
    assert {0, 1, 2, 4} == {schedule.keep_layers for schedule in schedules}


# --- a shared prompt ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_every_layout_of_a_prompt_has_the_same_loss_and_gradient(tmp_path: Path) -> None:
    report = measure_table_steps(
        "prefix-sharing",
        Job(partial(build, "llama", max_position_embeddings=512)),
        SCHEDULE,
        TableOptions([32], [], 1, tmp_path, "streamtune bench"),
        {"schedule_in_words": "chunks"},
    )
    assert [(row.mode, row.label) for row in report.rows] == [
        ("stream", SHARING["batch"]),
        ("stream", SHARING["turns"]),
        ("stream", SHARING["shared"]),
        ("checkpoint", SHARING["turns"]),
    ]
    batch, turns, shared, checkpointed = report.rows
    for row in (batch, turns, shared):
        assert row.loss == pytest.approx(checkpointed.loss, rel=1e-6)
        assert row.grad_norm == pytest.approx(checkpointed.grad_norm, rel=1e-5)
    assert batch.to_default == 1
    assert shared.peak_bytes is not None
    assert batch.peak_bytes is not None
    assert shared.peak_bytes < batch.peak_bytes
    page = table_markdown(report)
    assert "| prompt | rows |" in page
    assert f"{shared.peak_bytes / batch.peak_bytes:.2f}x" in page
    with Image.open(BytesIO(draw_table(report))) as picture:
        assert picture.size[0] > 1000


# --- resuming --------------------------------------------------------------------------------------------------------


def entry(label: str, length: int = 8) -> Entry:
    return Entry(Case("stream", length), label)


class Recorder:
    """Measures by writing down what it was asked for, and breaks off where it is told to."""

    def __init__(self, stop_at: str = "") -> None:
        self.asked: list[str] = []
        self.stop_at = stop_at

    def __call__(self, todo: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        for item in todo:
            if item.label == self.stop_at:
                raise KeyboardInterrupt
            self.asked.append(item.label)
            yield TableRow(item.case.mode, item.case.length, item.label, forward_s=1.0, backward_s=1.0)


def empty(**asked: Any) -> TableReport:
    return TableReport("bp-time", "streamtune bench", {"schedule_in_words": "chunks", **asked}, dict(ENV))


def test_finished_rows_survive_a_stop_and_are_not_measured_again(tmp_path: Path) -> None:
    groups = [[entry("a"), entry("b")], [entry("c", 16), entry("d", 16)]]
    with pytest.raises(KeyboardInterrupt):
        measure_missing_rows(empty(), groups, Recorder(stop_at="d"), folder=tmp_path)
    kept = json.loads((tmp_path / "bp-time-cpu.json").read_text())
    assert [row["label"] for row in kept["rows"]] == ["a", "b", "c"]
    report, again = empty(), Recorder()
    measure_missing_rows(report, groups, again, folder=tmp_path)
    assert again.asked == ["d"]
    assert [row.label for row in report.rows] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("change", ["recipe", "versions", "nonsense"])
def test_rows_of_another_recipe_or_machine_are_measured_again(change: str, tmp_path: Path) -> None:
    measure_missing_rows(empty(), [[entry("a")]], Recorder(), folder=tmp_path)
    report, again = empty(), Recorder()
    if change == "recipe":
        report.asked["recipe"] = "another"
    elif change == "versions":
        report.env["torch"] = "3"
    else:
        (tmp_path / "bp-time-cpu.json").write_text('{"rows": ')
    measure_missing_rows(report, [[entry("a")]], again, folder=tmp_path)
    assert again.asked == ["a"]


@pytest.mark.parametrize("ending", ["json", "md", "png"])
@pytest.mark.parametrize("kind", ["link", "dangling", "folder"])
def test_a_name_that_cannot_be_written_is_refused_before_anything_is_measured(
    kind: str, ending: str, tmp_path: Path
) -> None:
    place, mine = tmp_path / "out" / f"bp-time-cpu.{ending}", tmp_path / "mine"
    place.parent.mkdir()
    if kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(mine)
    if kind == "link":
        mine.write_text("mine")
    nothing = Recorder()
    with pytest.raises(ArgumentError, match=f"bp-time-cpu.{ending} is a"):
        measure_missing_rows(empty(), [[entry("a")]], nothing, folder=tmp_path / "out")
    assert nothing.asked == []
    assert not mine.exists() or mine.read_text() == "mine"


def test_a_link_at_the_name_of_the_staged_table_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in (".tmp-bp-time-cpu.json", "bp-time-cpu.json.part"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    measure_missing_rows(empty(), [[entry("a")]], Recorder(), folder=tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    assert json.loads((tmp_path / "bp-time-cpu.json").read_text())["rows"][0]["label"] == "a"


def test_a_row_that_is_not_asked_for_is_not_in_the_table(tmp_path: Path) -> None:
    measure_missing_rows(empty(), [[entry("a"), entry("b")]], Recorder(), folder=tmp_path)
    report, again = empty(), Recorder()
    measure_missing_rows(report, [[entry("b")]], again, folder=tmp_path)
    assert [row.label for row in report.rows] == ["b"]
    assert again.asked == []


# --- measured --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> TableReport:
    return measure_table_steps(
        "ablation",
        Job(partial(build, "llama", max_position_embeddings=512)),
        SCHEDULE,
        TableOptions([64], (), 1, tmp_path_factory.mktemp("ablation"), "streamtune bench"),
        {"schedule_in_words": SCHEDULE.describe()},
    )


@pytest.mark.full
def test_an_ablation_measures_every_schedule_and_each_is_exact(ablation: TableReport) -> None:
    for row in ablation.rows:
        assert row.error == ""
        assert row.peak_bytes
        assert row.to_checkpoint
        assert row.to_default
        assert ablation.relative_errors(row)["loss"] < 1e-6
        assert ablation.relative_errors(row)["gradient norm"] < 1e-5


@pytest.mark.full
def test_an_ablation_shows_where_bytes_went(ablation: TableReport) -> None:
    rows = {row.label: row for row in ablation.rows}
    assert rows["on host"].host_bytes
    assert rows["on disk"].disk_bytes
    assert not rows[DEFAULT].host_bytes
    assert rows["on host"].terms["layer inputs"] < rows[DEFAULT].terms["layer inputs"]
    assert rows["the last 2 layers whole"].activation_bytes > rows[DEFAULT].activation_bytes  # type: ignore[operator]
    assert all(row.schedule is None or row.schedule["offload_dir"] is None for row in ablation.rows)


@pytest.mark.full
def test_a_page_and_a_picture_show_all_rows(ablation: TableReport) -> None:
    page = table_markdown(ablation)
    assert page.count("| on disk |") == 1
    assert "| **two levels** |" in page
    assert "![" in page
    rows = [*ablation.rows[:-1], replace(ablation.rows[-1], error="out of memory", to_checkpoint=None, loss=None)]
    for table in ("ablation", "bp-time", "memory"):
        report = replace(ablation, table=table, rows=rows)  # type: ignore[arg-type]
        assert "out of memory" in table_markdown(report)
        with Image.open(BytesIO(draw_table(report))) as image:
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10


@pytest.mark.parametrize(("mode", "label"), [("plain", "plain autograd"), ("checkpoint", "gradient checkpointing")])
def test_a_table_says_against_what_its_errors_are(mode: Any, label: str) -> None:
    found = {dropout: MeasuredModel(Job(partial(build, "llama", attention_dropout=dropout))) for dropout in (0.0, 0.1)}
    for dropout, measured in found.items():
        rows = [TableRow(name, 8, name, loss=2.0, grad_norm=1.0) for name in (mode, "stream")]
        said = table_notes(TableReport("bp-time", "", {}, measured.environment(), rows))
        errors = f"Loss and grad are the relative errors of loss and gradient norm against {label}."
        assert (errors + " With dropout, each method draws other numbers." if dropout else errors) in said


RECIPE = """
model: {init: {model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,
               num_key_value_heads: 2, intermediate_size: 48, vocab_size: 300, max_position_embeddings: 512}}
tokenizer: {train: {vocab_size: 300}}
datasets: [{path: python-stdlib}]
engine: {chunk_size: 32, head_chunk_size: 16}
"""


@pytest.mark.full
def test_the_command_writes_a_page_figures_and_a_picture(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = ["--table", "bp-time", "--lengths", "32", "--repeats", "1", "--output-dir", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    assert result.exit_code == 0
    assert "liger-loss: not run here" in result.stdout
    document = json.loads((tmp_path / "out" / "bp-time-cpu.json").read_text())
    assert [row["mode"] for row in document["rows"]] == HERE
    assert document["command"].startswith("streamtune bench ")
    assert "--table bp-time --lengths 32" in document["command"]
    assert document["env"]["torch"] == torch.__version__
    assert document["asked"]["recipe"]["model"]["init"]["hidden_size"] == 32
    assert document["rows"][1]["to_checkpoint"] == 1.0
    assert (tmp_path / "out" / "bp-time-cpu.png").is_file()
    assert document["command"] in (tmp_path / "out" / "bp-time-cpu.md").read_text()
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".md", ".png"]
    written = (tmp_path / "out" / "bp-time-cpu.json").read_bytes()
    again = CliRunner().invoke(app, ["bench", str(recipe), *options, "--json"], catch_exceptions=False)
    assert json.loads(again.stdout) == document
    assert (tmp_path / "out" / "bp-time-cpu.json").read_bytes() == written


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--table", "bptime"], "unknown table 'bptime'"),
        (["--table", "memory", "--packed-rows", "4"], "--packed-rows and --table exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], match: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(ArgumentError, match=match):
        CliRunner().invoke(app, ["bench", str(recipe), *options, "--output-dir", str(tmp_path)], catch_exceptions=False)


# --- the longest sequence --------------------------------------------------------------------------------------------


def test_the_longest_sequence_is_searched_for_every_schedule_that_reaches_further(tmp_path: Path) -> None:
    entries = maxlen_entries(SCHEDULE, str(tmp_path))
    assert [item.case.mode for item in entries[:3]] == ["plain", "checkpoint", "stream"]
    assert len({item.label for item in entries}) == len(entries)
    per_token = dict(zip((item.label for item in entries), range(100, 0, -9), strict=False))
    budget = Budget(1_000_000)

    def attempt(item: Entry, length: int) -> Outcome:
        peak = per_token[item.label] * length
        return Outcome(peak <= 1_000_000, reason="" if peak <= 1_000_000 else "too much", peak_bytes=peak)

    report = TableReport("max-length", "streamtune bench", {"schedule_in_words": "", "budget": str(budget)}, dict(ENV))
    measure_missing_rows(report, [[item] for item in entries], search_longest(attempt, budget, print), folder=tmp_path)
    assert report.stem == "max-length-1-000-000-b-cpu"
    for row in report.rows:
        limit = 1_000_000 / per_token[row.label]
        assert row.max_length is not None
        assert limit - 320 <= row.max_length <= limit
        assert row.peak_bytes == per_token[row.label] * row.max_length
    page = table_markdown(report)
    assert f"| gradient checkpointing | {report.rows[1].max_length:,} | 1.0x |" in page
    assert draw_table(report).startswith(b"\x89PNG")


def test_a_budget_that_nothing_fits_says_so(tmp_path: Path) -> None:
    report = TableReport("max-length", "streamtune bench", {"schedule_in_words": "", "budget": "1 B"}, dict(ENV))
    never = search_longest(lambda item, length: Outcome(False, reason="far too much"), Budget(1), print)
    measure_missing_rows(report, [[item] for item in maxlen_entries(SCHEDULE, str(tmp_path))], never, folder=tmp_path)
    assert {row.error for row in report.rows} == {"256 tokens do not fit: far too much"}
    assert draw_table(report).startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_tries_whole_training_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_table, "LENGTHS", Range(first=64, least=64, most=64, step=64))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = ["--table", "max-length", "--modes", "checkpoint", "--output-dir", str(tmp_path / "out"), "--json"]
    with pytest.raises(ArgumentError, match="needs a device memory budget"):
        CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    options += ["--device-memory", "2MiB", "--method", "measure"]
    result = CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    (row,) = json.loads(result.stdout)["rows"]
    assert row["max_length"] == 64
    assert 0 < row["terms"]["optimizer"] < row["peak_bytes"] <= 2 << 20


def test_the_command_simulates_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_table, "LENGTHS", Range(first=256, least=256, most=512, step=256))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = ["--table", "max-length", "--device-memory", "4MiB", "--modes", "plain,checkpoint"]
    options += ["--output-dir", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, ["bench", str(recipe), *options], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["env"]["device"] == "simulated"
    plain, checkpoint = document["rows"]
    assert 0 < plain["max_length"] <= checkpoint["max_length"] <= 512
    assert 0 < checkpoint["peak_bytes"] <= 0.96 * (4 << 20)
    assert (tmp_path / "max-length-4-mib-simulated.md").is_file()


@pytest.mark.full
def test_a_budget_of_no_host_memory_is_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_table, "LENGTHS", Range(first=256, least=256, most=256, step=256))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    options = ["--table", "max-length", "--device-memory", "4MiB", "--host-memory", "0GiB", "--modes", "stream"]
    options += ["--output-dir", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, ["bench", str(tmp_path / "recipe.yaml"), *options], catch_exceptions=False)
    rows = {row["label"]: row for row in json.loads(result.stdout)["rows"]}
    for label, row in rows.items():
        offloads = "on host" in label or "on disk" in label  # the disk has buffers in host memory
        assert row["max_length"] == (0 if offloads else 256), label
    assert " of host memory" in rows["layer inputs on host"]["error"]
    assert "device" not in rows["layer inputs on host"]["error"]


CONFIG = {"model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 512,
          "architectures": ["MistralForCausalLM"]}  # fmt: skip


def simulated_table(folder: Path, *settings: str) -> dict[str, Any]:
    options = ["--table", "max-length", "--device-memory", "4MiB", "--modes", "checkpoint", "--output-dir", str(folder)]
    options += [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["bench", str(folder / "recipe.yaml"), *options, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.full
@pytest.mark.parametrize("change", ["model", "adapters", "optimizer", "positions", "accumulation", "nothing", "rows"])
def test_rows_of_another_model_at_the_same_path_are_simulated_again(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_table, "LENGTHS", Range(first=256, least=256, most=256, step=256))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    adapters = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "ad").mkdir()
    (tmp_path / "ad/adapter_config.json").write_text(json.dumps(adapters))
    save_file({}, tmp_path / "ad/adapter_model.safetensors")  # a simulation reads no weights
    (tmp_path / "recipe.yaml").write_text(f"model_name_or_path: {tmp_path / 'model'}\ndatasets: [rows.jsonl]\n")
    settings = ("finetuning_type=lora", f"adapter_name_or_path={tmp_path / 'ad'}") if change == "adapters" else ()
    kept = simulated_table(tmp_path, *settings)
    (path,) = tmp_path.glob("max-length*.json")
    path.write_text(json.dumps({**kept, "rows": [{**kept["rows"][0], "max_length": 7}]}))  # known when it is read again
    if change == "model":
        (tmp_path / "model/config.json").write_text(json.dumps({**CONFIG, "sliding_window": 64}))
    elif change == "adapters":
        (tmp_path / "ad/adapter_config.json").write_text(json.dumps({**adapters, "r": 8}))
    more = {"optimizer": "optim=adafactor", "positions": "rope_scaling.rope_type=default", "rows": "val_size=0.1"}
    more["accumulation"] = "gradient_accumulation_steps=2"
    again = simulated_table(tmp_path, *settings, *([more[change]] if change in more else ()))
    assert again["rows"][0]["max_length"] == (7 if change in ("nothing", "rows") else 256)


def test_weights_of_a_measured_table_are_compared(tmp_path: Path) -> None:
    """Loss and gradient norm are theirs; a table that is simulated reads none."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "recipe.yaml").write_text(f"model_name_or_path: {tmp_path / 'model'}\ndatasets: [rows.jsonl]\n")
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    seen = []
    for content in (b"1", b"2"):
        (tmp_path / "model/model.safetensors").write_bytes(content)
        seen.append([fingerprints(recipe, weights=weights) for weights in (True, False)])
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] == seen[1][1]
