"""``streamtune probe-max-len`` by the real command line; its trials are real processes, so there are few."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.cli import main

RECIPE: dict[str, Any] = {
    "model": {
        "init": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
        }
    },
    "tokenizer": {"train": {"vocab_size": 300}},
    "datasets": [{"path": "rows.jsonl"}],
    "max_length": 512,
    "engine": {"schedule": "fixed", "chunk_size": 64, "head_chunk_size": 64},
    "gradient_accumulation_steps": 8,
}


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``streamtune probe-max-len tiny.yaml ...`` in this process; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(["probe-max-len", "tiny.yaml", *arguments])
        return int(left.value.code or 0)

    return run


def test_a_length_beyond_the_positions_of_the_model_is_told(
    probe: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = ("--method", "simulate", "--device-memory", "1GiB", "--from", "1024", "--to", "1024")
    init = {**RECIPE["model"]["init"], "max_position_embeddings": 512}
    Path("tiny.yaml").write_text(yaml.safe_dump({**RECIPE, "model": {"init": init}}))
    assert probe(*simulated, "--output-dir", "out", "--json") == 0
    assert "rope_scaling: {rope_type: yarn, factor: 2}" in json.loads(capsys.readouterr().out)["positions"]


def test_the_next_command_plans_for_the_machine_of_the_search(
    probe: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ("--device-memory", "1GiB", "--host-memory", "2GiB", "--disk-memory", "3GiB")
    search = ("--method", "simulate", "--margin", "0.02", "--from", "256", "--to", "256")
    assert probe(*machine, *search, "--output-dir", "out") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    settings = "--set engine.margin=0.02 --set max_length=256"
    assert last == f"Next: streamtune plan tiny.yaml {settings} {' '.join(machine)}"


@pytest.mark.full
def test_a_measured_search_says_which_keys_it_leaves_out(
    probe: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device-memory", "1GiB", "--from", "64", "--to", "64", "--output-dir", "out")
    assert probe(*options, "--set", "deepspeed=zero2") == 0
    assert "on one device, without deepspeed: --method simulate" in capsys.readouterr().out
    assert json.loads(Path("out/probe.json").read_text())["not_measured"] == ["deepspeed"]


@pytest.mark.slow
def test_the_longest_of_each_mode(probe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """The range has one length, which fits the budget with streaming and not with the other modes."""
    assert probe("--device-memory", "4MiB", "--from", "1024", "--to", "1024", "--baseline", "--output-dir", "out") == 0
    shown, said = capsys.readouterr()
    lines = shown.splitlines()
    assert lines[0] == "Longest sequence: 1,024 tokens in 4.00 MiB of device memory (sft, measured)"
    table = {line.split("  ")[0]: line.split() for line in lines[4:7]}
    assert table["StreamTune"][1] == "1,024"
    assert table["plain autograd"][2] == "none"
    assert "StreamTune: no trial failed up to the end of the search" in shown
    assert "plain autograd fails at 1,024: device memory: the step needs more than 4.00 MiB" in shown
    assert lines[-1] == "Next: streamtune sft tiny.yaml --set max_length=1024"
    assert "mode=stream length=1024 batch_size=1 fits=true peak_bytes=" in said
    assert "mode=plain length=1024 batch_size=1 fits=false" in said
    assert "\x1b" not in shown + said
    document = json.loads(Path("out/probe.json").read_text())
    assert document["max_length"] == 1024
    assert document["baseline"]["plain"] == 0
    assert document["complete"] is True
    assert document["trials"][0]["terms"]["gradients"] > 0
    assert Path("out/probe.png").stat().st_size > 10_000


@pytest.mark.full
def test_the_largest_batch_of_adapters_as_json(probe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch-size", "--length", "128", "--from", "2", "--to", "2", "--set", "packing=true", "--json"]
    assert probe("--device-memory", "1GiB", "--set", "finetuning_type=lora", *options) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["max_batch_size"], document["length"]) == (2, 128)
    assert [trial["batch_size"] for trial in document["trials"]] == [2]
    assert Path("runs/tiny/probe.png").is_file()


@pytest.mark.slow
def test_a_budget_that_nothing_fits(probe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--device-memory", "300KiB", "--from", "64", "--to", "64") == 2
    said = capsys.readouterr().err
    assert "error: the smallest trial, 64 tokens, does not fit: device memory: the step needs more than 300 KiB" in said
    assert "the largest term is optimizer (weights" in said
    assert re.search(r"64 tokens fit in [\d.]+ KiB of device memory", said)
    assert "finetuning_type: lora" in said
    assert "larger chunks do not help" in said


@pytest.mark.full
def test_a_model_that_cannot_be_trained_is_no_lack_of_memory(
    probe: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--set", "model_name_or_path=./nowhere", "--set", "model=null"]
    assert probe(*changes, "--device-memory", "1GiB", "--from", "64", "--to", "64") == 1
    said = capsys.readouterr().err
    assert "the smallest trial, 64 tokens, failed: ArgumentError: the folder nowhere does not exist" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "100", "--to", "50"], "--from 100 is above --to 50"),
        (["--from", "1"], "a sequence needs at least 2 tokens, found 1"),
        (["--batch-size", "--from", "0"], "--from must be at least 1, found 0"),
        (["--to", "0"], "--to must be at least 1, found 0"),
        (["--length", "100"], "--length needs --batch-size"),
        (["--batch-size", "--length", "1"], "a sequence needs at least 2 tokens, found 1"),
        (["--device-memory", "much"], "expected a size; found 'much'"),
        (["--device-memory", "0GiB"], "--device-memory must be above 0"),
        (["--device-memory", "100TiB"], "the machine would swap"),
        (["--host-memory", "100TiB"], "the machine would swap"),
        (["--method", "guess"], "--method must be measure or simulate, found 'guess'"),
        (["--margin", "1.5"], "--margin"),
        (["--trial-timeout", "0"], "--trial-timeout must be above 0"),
        (["--device", "h100-80gb"], "--method simulate"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_makes_no_sense_is_refused(
    probe: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert probe(*arguments) == 2
    assert words in capsys.readouterr().err


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a command says that is stopped as a terminal does it: the trial is sent the signal as well.

    Python loses an interrupt that falls into a destructor; a user presses again.
    """
    for _ in range(4):
        os.killpg(process.pid, signal.SIGINT)
        try:
            return process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("four interrupts did not end it")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of a terminal")
def test_ctrl_c_ends_with_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    command = [sys.executable, "-m", "streamtune", "probe-max-len", "tiny.yaml", "--device-memory", "1GiB", "--json"]
    with subprocess.Popen(
        [*command, "--from", "64"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert "mode=stream length=64" in process.stderr.readline()
            shown, said = interrupted(process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    document = json.loads(shown)
    assert document["complete"] is False
    assert document["max_length"] >= 64
    assert "stopped before the end of the search" in said
    assert "Traceback" not in said


@pytest.mark.full
def test_a_device_that_is_not_there(probe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is trained: the range has one length, so each mode is simulated once."""
    size = ["--device", "l4-24gb", "--host-memory", "64GiB", "--from", "4096", "--to", "4096"]
    assert probe("--method", "simulate", *size, "--baseline", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["method"], document["max_length"]) == ("simulate", 4096)
    modes = ("liger-loss-offload", "liger-loss", "checkpoint", "plain")
    assert document["baseline"] == dict.fromkeys(modes, 4096)
    stream, on_host, fused, checkpoint, plain = (trial["peak_bytes"] for trial in document["trials"])
    assert stream < on_host < fused < checkpoint < plain
    assert document["trials"][0]["terms"]["weights"] > 0
    assert document["env"]["device"] == "NVIDIA L4"


@pytest.mark.parametrize("name", ["probe.json", "probe.png"])
@pytest.mark.parametrize("command", ["probe-max-len", "bench"])
def test_files_of_the_user_are_not_written_through_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    """The error comes before a step is tried: the model of this recipe could not be built."""
    monkeypatch.chdir(tmp_path)
    init = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 5}
    Path("tiny.yaml").write_text(yaml.safe_dump({**RECIPE, "model": {"init": init}}))
    Path("mine").write_text("mine")
    Path("out").mkdir()
    place = Path("out", name.replace("probe", command.removesuffix("-max-len")))
    for _ in range(2):
        place.symlink_to("../mine") if not place.is_symlink() else (place.unlink(), place.mkdir())
        with pytest.raises(SystemExit) as left:
            main([command, "tiny.yaml", "--output-dir", "out"])
        assert left.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        kind = "folder" if place.is_dir() else "symbolic link"
        assert f"{place} is a {kind}, but a result file is written to this path" in said
        assert Path("mine").read_text() == "mine"


def test_an_unknown_device_lists_the_known(probe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--method", "simulate", "--device", "h300-80gb") == 2
    said = capsys.readouterr().err
    assert "no device is called 'h300-80gb'" in said
    assert "h100-80gb, h200-141gb" in said


@pytest.mark.full
def test_a_simulated_budget_that_nothing_fits(probe: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--set", "device=cpu", "--device-memory", "200KiB", "--from", "64", "--to", "64"]
    assert probe("--method", "simulate", *size) == 2
    said = capsys.readouterr().err
    assert "the smallest trial, 64 tokens, does not fit: device memory: the step needs" in said
    assert re.search(r"64 tokens fit in [\d.]+ KiB of device memory", said)
