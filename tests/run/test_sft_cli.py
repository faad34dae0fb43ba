"""``streamtune sft`` by the real command line on a tiny new model: inputs, outputs, errors."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamtune.cli import main
from streamtune.models import ModelOptions, load_model
from streamtune.models.quantize import quantize
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows

TINY: dict[str, Any] = {
    **RECIPE,
    "model": {"init": {**QWEN3, "attention_dropout": 0.1}},
    "max_length": 256,
    "val_size": 4,
    "engine": FIXED,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "eval_steps": 4,
    "sample": {"prompt": "Add 3 and 4.", "max_new_tokens": 8},
}
TIMINGS = ("tokens_per_s", "peak_mem_gib")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a recipe and its rows into the working directory."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 20)
    return write_recipe(tmp_path, TINY)


@pytest.fixture
def sft(recipe: Path) -> Callable[..., int]:
    """Run ``streamtune sft tiny.yaml ...`` in this process, in the folder of the recipe; return the exit code."""
    return run


def records(folder: str, *, timings: bool = False) -> list[dict[str, Any]]:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if timings or k not in TIMINGS} for line in lines]


def same_model(first: str, second: str) -> bool:
    ours, theirs = (load_model(f"{folder}/final").state_dict() for folder in (first, second))
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_trains_from_a_recipe_to_a_model_that_transformers_loads(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft() == 0
    run = Path("runs/tiny")
    train = [record for record in records(str(run), timings=True) if "loss" in record]
    # 16 rows by 3: six steps an epoch, the last of them with one row.
    assert [record["step"] for record in train] == list(range(1, 13))
    assert train[5]["epoch"] == 1.0
    assert train[-1]["loss"] < 0.75 * train[0]["loss"]
    assert [record["step"] for record in records(str(run)) if "eval_loss" in record] == [4, 8, 12]
    assert {"lr", "grad_norm", "tokens", "tokens_per_s", "peak_mem_gib"} <= train[0].keys()

    model = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert "streamtune" not in (run / "final/config.json").read_text()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run.rglob(".tmp-*"))
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events == ["start", "checkpoint", "finish"]

    shown = capsys.readouterr().out
    held_out = records(str(run))[-1]["eval_loss"]
    assert f"{train[0]['loss']:.3f} -> {train[-1]['loss']:.3f}; held out {held_out:.3f}" in shown
    assert 'AutoModelForCausalLM.from_pretrained("runs/tiny/final")' in shown
    assert "step=12/12 loss=" in shown
    assert "  prompt\n    Add 3 and 4.\n  completion\n" in shown
    assert "\x1b" not in shown


@pytest.mark.full
def test_the_resolved_recipe_replays_the_run(sft: Callable[..., int], recipe: Path) -> None:
    assert sft("--set", "max_steps=2", "--output-dir", "first") == 0
    shutil.copy("first/recipe.yaml", "tiny.yaml")
    assert sft("--output-dir", "second") == 0
    assert records("first") == records("second")
    assert same_model("first", "second")


def test_a_dry_run_says_what_would_run_and_writes_nothing(
    sft: Callable[..., int], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(recipe.parent.iterdir())
    assert sft("--dry-run") == 0
    assert sorted(recipe.parent.iterdir()) == before
    shown = capsys.readouterr().out
    assert "Qwen3, " in shown
    assert "16-token chunks" in shown
    assert "16 train, 4 held out; " in shown
    assert "12 (2 epochs) x 3 rows" in shown
    assert shown.splitlines()[0].endswith("DRY RUN")
    assert shown.splitlines()[-1] == "Nothing was trained. Start: streamtune sft tiny.yaml"


@pytest.mark.full
def test_ctrl_c_saves_and_the_same_command_goes_on_to_the_same_curve(sft: Callable[..., int]) -> None:
    """Real processes: a run is interrupted after a few steps, resumed, and compared with an uninterrupted run."""
    assert sft("--output-dir", "whole") == 0
    command = [sys.executable, "-m", "streamtune", "sft", "tiny.yaml", "--output-dir", "split"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        metrics = Path("split/metrics.jsonl")
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Stopping after this micro-batch" in said
    [checkpoint] = Path("split/checkpoints").iterdir()
    assert f"  saved    {checkpoint}" in shown
    assert not Path("split/final").exists()

    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f"resumed from {checkpoint.name}" in result.stdout
    assert records("split") == records("whole")
    assert same_model("split", "whole")


@pytest.mark.full
def test_a_finished_run_is_not_trained_again(sft: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert sft("--set", "max_steps=2") == 0
    before = records("runs/tiny", timings=True)
    capsys.readouterr()
    assert sft("--set", "max_steps=2") == 0
    assert records("runs/tiny", timings=True) == before
    assert "Already finished: no step is left to train" in capsys.readouterr().out


def test_resume_goes_on_from_a_checkpoint_of_full_and_of_adapter_training(sft: Callable[..., int]) -> None:
    assert sft("--set", "max_steps=2", "--output-dir", "base") == 0
    recipe = {**TINY, "model_name_or_path": "base/final", "finetuning_type": "lora", "lora_r": 4, "lora_dropout": 0.2}
    for key in ("model", "tokenizer", "sample"):
        del recipe[key]
    Path("tiny.yaml").write_text(yaml.safe_dump({**recipe, "max_steps": 4, "save_steps": 2}))
    assert sft("--output-dir", "lora") == 0
    whole = records("lora")
    shutil.copytree("lora/final", "kept/final")
    shutil.rmtree("lora/checkpoints/step-000004")
    shutil.rmtree("lora/final")
    assert sft("--output-dir", "lora") == 0
    assert records("lora") == whole
    ours, theirs = (Path(folder, "final/adapter_model.safetensors").read_bytes() for folder in ("lora", "kept"))
    assert ours == theirs

    from peft import AutoPeftModelForCausalLM

    assert AutoPeftModelForCausalLM.from_pretrained("lora/final").peft_config["default"].r == 4


@pytest.mark.full
@pytest.mark.parametrize(("kind", "package"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_adapters_on_a_quantised_base(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str], kind: str, package: str
) -> None:
    """Adapters are trained, resumed bit-identically, and loaded by PEFT on the base that transformers quantises."""
    pytest.importorskip(package)
    assert sft("--set", "max_steps=2", "--output-dir", "base") == 0
    recipe = {**TINY, "model_name_or_path": "base/final", "finetuning_type": "qlora", "quantization": kind}
    for key in ("model", "tokenizer", "sample"):
        del recipe[key]
    Path("tiny.yaml").write_text(
        yaml.safe_dump({**recipe, "lora_r": 4, "max_steps": 4, "save_steps": 2, "eval_steps": 2})
    )
    capsys.readouterr()
    assert sft("--output-dir", "run") == 0
    printed = capsys.readouterr().out
    assert f"fp32, linear layers in {kind}; CPU" in printed
    assert "quantization_config=" in printed
    whole = records("run")
    first, last = (record["eval_loss"] for record in whole if "eval_loss" in record)
    assert last < first
    kept = Path("run/final/adapter_model.safetensors").read_bytes()
    for gone in ("run/checkpoints/step-000004", "run/final"):
        shutil.rmtree(gone)
    assert sft("--output-dir", "run") == 0
    assert records("run") == whole
    assert Path("run/final/adapter_model.safetensors").read_bytes() == kept
    assert sft("--output-dir", "run", "--set", f"quantization={'nf4' if kind == 'int8' else 'int8'}") == 2
    assert f'quantization was "{kind}", is now' in " ".join(capsys.readouterr().err.split())

    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import BitsAndBytesConfig, TorchAoConfig

    namespace: dict[str, Any] = {"BitsAndBytesConfig": BitsAndBytesConfig, "TorchAoConfig": TorchAoConfig}
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        namespace["Int8WeightOnlyConfig"] = Int8WeightOnlyConfig
    asked = " ".join(printed.split()).partition("quantization_config=")[2].partition(") export ")[0]
    theirs = AutoPeftModelForCausalLM.from_pretrained("run/final", quantization_config=eval(asked, namespace))
    quantize(
        theirs.get_base_model(), kind, torch.device("cpu")
    )  # bitsandbytes' kernel for evaluation takes no 32 columns
    ours = PeftModel.from_pretrained(load_model("base/final", ModelOptions(quantization=kind)), "run/final").eval()
    ids = torch.arange(3, 40)[None]
    assert torch.equal(theirs.eval()(ids).logits, ours(ids).logits)


def test_a_quantiser_that_is_missing_is_said_before_anything_is_read(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find_spec(name, *rest)
    )
    assert (
        sft("--set", "finetuning_type=qlora", "--set", "quantization=int8", "--set", "datasets.0.path=nowhere.jsonl")
        == 2
    )
    assert "int8 needs torchao, which is not installed" in capsys.readouterr().err


@pytest.mark.full
def test_going_back_to_an_older_checkpoint_gives_the_same_curve_again(sft: Callable[..., int]) -> None:
    settings = ("--set", "save_steps=2", "--set", "max_steps=4")
    assert sft(*settings) == 0
    whole = records("runs/tiny")
    assert sft(*settings, "--resume", "runs/tiny/checkpoints/step-000002") == 0
    assert records("runs/tiny") == whole
    assert sft(*settings, "--resume", "runs/tiny/checkpoints/step-000002", "--output-dir", "elsewhere") == 0
    assert records("elsewhere") == [record for record in whole if record["step"] > 2]
    assert same_model("elsewhere", "runs/tiny")


def test_another_run_in_the_same_place_is_refused_or_moved_aside(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("--set", "max_steps=1") == 0
    first = records("runs/tiny")
    assert sft("--set", "max_steps=1", "--set", "learning_rate=2e-2") == 2
    said = capsys.readouterr().err
    assert "learning_rate was 0.01, is now 0.02" in said
    assert "--resume never" in said
    assert records("runs/tiny") == first
    assert sft("--set", "max_steps=1", "--set", "learning_rate=2e-2", "--resume", "never") == 0
    assert records("runs/tiny.old-1") == first
    assert records("runs/tiny")[0]["lr"] == 0.02


@pytest.mark.full
def test_a_change_that_is_allowed_has_an_effect_or_is_said_to_have_none(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def resume(key: str, value: str) -> tuple[int, str]:
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree("kept", "runs")
        done = sft(
            "--set", f"{key}={value}", "--allow-change", key, "--set", "max_steps=4", "--allow-change", "max_steps"
        )
        return done, " ".join(capsys.readouterr().err.split())

    assert sft("--set", "max_steps=2", "--set", "val_size=0", "--set", "eval_steps=0") == 0
    Path("runs").rename("kept")
    for key, value in (("added_tokens", "[<x>]"), ("special_tokens", "{bos_token: <x>}")):
        assert f"'{key}' cannot change: the checkpoint has the tokens of the old value" in resume(key, value)[1]
    recipe = yaml.safe_load(Path("tiny.yaml").read_text())
    Path("tiny.yaml").write_text(yaml.safe_dump({**recipe, "val_size": 0, "eval_steps": 0}))
    done, said = resume("chat_template", "zephyr")
    assert (done, "the change of chat_template has no effect: the run keeps the tokenizer" in said) == (0, True)
    for key, value in (("seed", "7"), ("shuffle", "false")):
        done, said = resume(key, value)
        assert (done, f"the order of the rows changed ({key}): the data is read" in said) == (0, True)


@pytest.mark.full
def test_a_run_resumes_from_another_working_directory(
    recipe: Path, sft: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run_folder = recipe.absolute().parent, str(recipe.absolute().parent / "runs/tiny")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    for name in ("a.jinja", "b.jinja"):
        Path(name).write_text(template)
    Path("tiny.yaml").write_text(yaml.safe_dump({**TINY, "chat_template": "a.jinja", "output_dir": run_folder}))
    assert sft("--set", "max_steps=2", "--set", "train_on=all") == 0
    monkeypatch.chdir(folder.parent)
    change = ("--set", "max_steps=3", "--set", "train_on=all", "--allow-change", "max_steps")
    arguments = ["sft", f"{folder.name}/tiny.yaml", *change]
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--set", "chat_template=b.jinja"])
    assert left.value.code == 2
    assert "chat_template was" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert not left.value.code
    assert "chat_template" not in capsys.readouterr().err


@pytest.mark.full
def test_chunks_may_change_on_resume_for_they_change_no_gradient(sft: Callable[..., int]) -> None:
    """The run has no dropout, whose random numbers depend on the chunks."""
    settings = ("--set", "save_steps=2", "--set", "max_steps=4", "--set", "model.init.attention_dropout=0.0")
    assert sft(*settings) == 0
    whole = records("runs/tiny")
    shutil.rmtree("runs/tiny/checkpoints/step-000004")
    assert sft(*settings, "--set", "chunk_size=64") == 0
    assert records("runs/tiny")[-1]["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=1e-5)


def test_a_loss_that_explodes_ends_the_run_with_the_rows_to_look_at(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("--set", "learning_rate=1e30", "--set", "max_grad_norm=0", "--set", "save_steps=1") == 1
    said = capsys.readouterr().err
    assert "the weights were not changed" in said
    assert "rows.jsonl:" in said
    assert json.loads(Path("runs/tiny/events.jsonl").read_text().splitlines()[-1])["event"] == "failure"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.init.hiden_size=8", ["has no key 'hiden_size'", "--set model.init.hiden_size=8", "'hidden_size'"]),
        ("max_length=8", ["more than max_length = 8 tokens"]),
        ("val_size=100", ["would hold out all", "--set val_size=100"]),
        ("output_dir=.", ["not empty", "--set output_dir=."]),
    ],
)
def test_wrong_input_ends_with_2_before_anything_is_written(
    sft: Callable[..., int], recipe: Path, capsys: pytest.CaptureFixture[str], setting: str, expected: list[str]
) -> None:
    before = sorted(recipe.parent.iterdir())
    assert sft("--set", setting) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in expected), said
    assert sorted(recipe.parent.iterdir()) == before


def test_a_mistake_below_the_recipe_is_blamed_on_its_line(
    sft: Callable[..., int], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text().replace("hidden_size: 32", "hiden_size: 32"))
    line = next(n for n, text in enumerate(recipe.read_text().splitlines(), 1) if "hiden_size" in text)
    assert sft() == 2
    assert f"tiny.yaml:{line}" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_second_signal_leaves_at_once() -> None:
    code = """
import os, signal, time
from streamtune.train.process import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 143
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == -signal.SIGINT
    assert "Repeat to quit at once" in result.stderr
