"""Inputs that nobody should give and somebody does: each ends in one clear error, and changes no file that was there.

Each fault is given to the real command, in a process forked from one that has imported everything. A fault is a change
to a folder with a finished run (``runs``), a model (``m``), rows and recipe.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from streamtune.models import add_lora, load_model
from tests.faults.kit import ROOT, Zygotes, write_sft

SHORT = {"num_train_epochs": 1, "max_steps": 2, "save_steps": 1, "val_size": 0, "eval_steps": 0}
GO_ON = ("--set", "max_steps=3", "--allow-change", "max_steps")
Fault = tuple[Callable[[Path], object], tuple[str, ...], int, tuple[str, ...]]
"""The change, arguments, exit code, and what the error must say."""


@pytest.fixture(scope="module")
def finished(zygotes: Zygotes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and its model as a folder of its own that another recipe starts from."""
    folder = tmp_path_factory.mktemp("finished")
    write_sft(folder, **SHORT)
    done = zygotes.run(folder)
    assert done.status == 0, done.output
    shutil.copytree(folder / "runs/tiny/final", folder / "m")
    recipe = yaml.safe_load((folder / "tiny.yaml").read_text())
    del recipe["model"], recipe["tokenizer"]
    (folder / "model.yaml").write_text(yaml.safe_dump({"model_name_or_path": "m", **recipe, "output_dir": "new"}))
    return folder


def recipe(**changes: Any) -> Callable[[Path], object]:
    """Other values in the recipe that makes its model."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder / "runs")
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))

    return change


def init(**changes: Any) -> Callable[[Path], object]:
    """Other numbers in the recipe's configuration of a model."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder / "runs")
        path = folder / "tiny.yaml"
        found = yaml.safe_load(path.read_text())
        found["model"]["init"].update(changes)
        path.write_text(yaml.safe_dump(found))

    return change


def config(**changes: Any) -> Callable[[Path], object]:
    """Other values in the model's config.json."""

    def change(folder: Path) -> None:
        path = folder / "m/config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))

    return change


def weights(change_tensors: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Other tensors in the model's safetensors."""

    def change(folder: Path) -> None:
        path = folder / "m/model.safetensors"
        tensors = load_file(path)
        change_tensors(tensors)
        save_file(tensors, path, {"format": "pt"})

    return change


def sharded(folder: Path) -> Path:
    """Write the model in shards; return one of them."""
    model = AutoModelForCausalLM.from_pretrained(folder / "m")
    (folder / "m/model.safetensors").unlink()
    model.save_pretrained(folder / "m", max_shard_size="20KB")
    shards = sorted((folder / "m").glob("model-*.safetensors"))
    assert len(shards) > 1
    return shards[-1]


def adapters(folder: Path) -> None:
    """Put adapters in the place of the model; their base is moved."""
    (folder / "m").rename(folder / "base")
    tokenizer = [path for path in (folder / "base").iterdir() if "token" in path.name or "template" in path.name]
    add_lora(load_model(str(folder / "base")), r=2).save_pretrained(folder / "m")
    for path in tokenizer:
        shutil.copy(path, folder / "m")


def written(name: str, data: bytes) -> Callable[[Path], object]:
    """Another content of a file."""
    return lambda folder: (folder / name).write_bytes(data)


def nothing(folder: Path) -> None:
    """The fault is in the arguments."""


def quantised(method: str, **more: Any) -> Callable[[Path], object]:
    return config(quantization_config={"quant_method": method, **more})


LONG = "x" * 300
NOT_WHOLE = "is not a whole number of at least 1"

MODELS: dict[str, Fault] = {
    "vocab_size": (config(vocab_size=300), (), 2, ("is 261 x 16 in the files", "'vocab_size: 300'", "config.json:")),
    "intermediate_size": (config(intermediate_size=31), (), 2, ("do not fit", "'intermediate_size: 31'", "(and 5")),
    "hidden_size 0": (config(hidden_size=0), (), 2, (NOT_WHOLE, "'hidden_size: 0'", "config.json:")),
    "hidden_size text": (config(hidden_size="x"), (), 2, ("its config.json is not valid", "'hidden_size'",
                                                         "config.json:")),
    "vocab_size 0": (config(vocab_size=0), (), 2, (NOT_WHOLE,)),
    "heads 0": (config(num_attention_heads=0), (), 2, (NOT_WHOLE, "'num_attention_heads: 0'")),
    "kv heads": (config(num_attention_heads=3, num_key_value_heads=2), (), 2, ("does not divide the 3",)),
    "head_dim 0": (config(head_dim=0), (), 2, (NOT_WHOLE,)),
    "dropout": (config(attention_dropout=1.5), (), 2, ("is not a dropout probability",)),
    "eps nan": (config(rms_norm_eps=float("nan")), (), 2, ("'rms_norm_eps: nan' is not a number",)),
    "theta 0": (config(rope_parameters={"rope_type": "default", "rope_theta": 0.0}), (), 2,
                ("without streaming", "rope_theta")),
    "an activation": (config(hidden_act="zzz"), (), 2, ("there is no entry 'zzz'", "this folder")),
    "bitsandbytes": (quantised("bitsandbytes", load_in_4bit=True), (), 2,
                     ("already quantised (bitsandbytes)", "finetuning_type: qlora")),
    "gptq": (quantised("gptq", bits=4), (), 2, ("already quantised (gptq)", "use the unquantised checkpoint")),
    "awq": (quantised("awq", bits=4), (), 2, ("already quantised (awq)",)),
    "fp8": (quantised("fp8"), (), 2, ("already quantised (fp8)",)),
    "no method": (config(quantization_config={}), (), 2, ("without a quant_method",)),
    "nan in the head": (weights(lambda found: found["model.embed_tokens.weight"][3].fill_(float("nan"))), (), 2,
                        ("not finite", "model.embed_tokens.weight contains 16 NaN", "model.safetensors")),
    "inf in a layer": (weights(lambda found: found["model.layers.1.mlp.up_proj.weight"][0, 0].fill_(float("inf"))), (),
                       2, ("layers.1.mlp.up_proj.weight contains 1 infinite", "model.safetensors")),
    "a layer more": (weights(lambda found: found.update({
        name.replace("layers.1", "layers.2"): x.clone() for name, x in found.items() if "layers.1" in name})),
        (), 2, ("weights of 3 layers", "num_hidden_layers: 2", "config.json:")),
    "a bias more": (weights(lambda found: found.update({
        "model.layers.0.mlp.up_proj.bias": torch.zeros(found["model.layers.0.mlp.up_proj.weight"].shape[0])})), (), 2,
        ("has model.layers.0.mlp.up_proj.bias", "with this configuration would not load")),
    "adapters not merged": (weights(lambda found: found.update({
        f"model.layers.0.mlp.up_proj.lora_{part}.default.weight": torch.zeros(2, 2) for part in "AB"})), (), 2,
        ("lora_A.default.weight and 1 more", "merge_and_unload()")),
    "whole numbers": (weights(lambda found: found.update({
        "model.layers.0.mlp.up_proj.weight": found["model.layers.0.mlp.up_proj.weight"].int()})), (), 2,
        ("up_proj.weight has dtype I32", "model.safetensors")),
    "a shard missing": (lambda folder: sharded(folder).unlink(), (), 2,
                        ("model.safetensors.index.json names files that do not exist in its folder: model-0000",)),
    "no weights": (lambda folder: (folder / "m/model.safetensors").unlink(), (), 2, ("the folder has no weights",)),
    "a run": (nothing, ("--set", "model_name_or_path=runs/tiny"), 2,
              ("runs/tiny is the directory of a run", "use its model, runs/tiny/final")),
    "a checkpoint": (nothing, ("--set", "model_name_or_path=runs/tiny/checkpoints/step-000002"), 2,
                     ("is the directory of a checkpoint of a run",
                      "use its model, runs/tiny/checkpoints/step-000002/model")),
    "adapters": (lambda folder: adapters(folder), (), 2,
                 ("holds adapters on a frozen base", "streamtune export", "model.yaml:1")),
    "adapters on adapters": (lambda folder: adapters(folder), ("--set", "finetuning_type=lora"), 2,
                             ("holds adapters, and new adapters would replace them", "streamtune export")),
    "its own run moved aside": (nothing, ("--set", "model_name_or_path=runs/tiny/final", "--output-dir", "runs/tiny",
                                          "--resume", "never"), 2,
                                ("runs/tiny/final is in runs/tiny, which `--resume never` would move aside",)),
    "cut off": (lambda folder: os.truncate(folder / "m/model.safetensors", 5000), (), 2, ("cannot load the model",)),
    "a tokenizer cut off": (lambda folder: os.truncate(folder / "m/tokenizer.json", 500), (), 2,
                            ("cannot load the tokenizer", "damaged")),
}  # fmt: skip
INITS: dict[str, Fault] = {
    "hidden_size 0": (init(hidden_size=0), (), 2, (NOT_WHOLE, "tiny.yaml:")),
    "intermediate_size 0": (init(intermediate_size=0), (), 2, (NOT_WHOLE,)),
    "layers 0": (init(num_hidden_layers=0), (), 2, (NOT_WHOLE,)),
    "layers 10^9": (init(num_hidden_layers=10**9), (), 2, ("is too large: at most 10,000",)),
    "heads 0": (init(num_attention_heads=0), (), 2, (NOT_WHOLE,)),
    "heads -2": (init(num_attention_heads=-2), (), 2, (NOT_WHOLE,)),
    "kv heads 0": (init(num_key_value_heads=0), (), 2, (NOT_WHOLE,)),
    "kv heads": (init(num_attention_heads=3, num_key_value_heads=2), (), 2, ("does not divide the 3",)),
    "vocab_size text": (init(vocab_size="abc"), (), 2, ("'vocab_size: abc' is not a whole number", "tiny.yaml:")),
    "vocab_size 10^23": (init(vocab_size=10**23), (), 2, ("is too large: at most 2,147,483,647",)),
}  # fmt: skip
NUMBERS: dict[str, Fault] = {
    "max_steps": (recipe(max_steps=10**23), (), 2, ("'max_steps' must be at most 1,000,000,000,000", "tiny.yaml:")),
    "epochs": (recipe(num_train_epochs=1e300, max_steps=-1), (), 2, ("'num_train_epochs' must be at most 1,000,000",)),
    "max_length": (recipe(max_length=10**23), (), 2, ("'max_length' must be at most",)),
    "rows": (recipe(per_device_train_batch_size=10**9), (), 2, ("'per_device_train_batch_size' must be at most",)),
    "max_rows": (recipe(datasets=[{"path": "rows.jsonl", "max_rows": 10**23}]), (), 2, ("must be at most",)),
    "vocabulary": (recipe(tokenizer={"train": {"vocab_size": 10**10}}), (), 2, ("must be at most 2,000,000",)),
    "rate": (recipe(learning_rate=1e300), (), 2, ("a learning rate of 1e+300 is too large for float32", "tiny.yaml:")),
    "nproc": (nothing, ("--nproc", "1" + "0" * 23), 2, ("--nproc must be at most 1,024",)),
    "slots 10^23": (written("hosts", b"a slots=1" + b"0" * 23), ("--hostfile", "hosts"), 2,
                    ("at most 1,024 are allowed", "hosts:1")),
    "slots -3": (written("hosts", b"\na slots=-3\n"), ("--hostfile", "hosts"), 2, ("-3 slots", "hosts:2")),
    "slots 5000 digits": (written("hosts", b"a slots=" + b"9" * 5000), ("--hostfile", "hosts"), 2,
                          ("not a valid hostfile line", "hosts:1")),
    "a hostfile without end": (nothing, ("--hostfile", "/dev/zero"), 2, ("is a pipe or a device",)),
}  # fmt: skip
RECORDS: dict[str, Fault] = {
    "metrics not UTF-8": (written("runs/tiny/metrics.jsonl", b'{"step": 1}\n\xff\xfe\n{"step": 2}\n'), GO_ON, 2,
                          ("line 2 of metrics.jsonl is not UTF-8", "metrics.jsonl:2")),
    "metrics without step": (written("runs/tiny/metrics.jsonl", b'{"loss": 1}\n'), GO_ON, 2,
                             ("has no integer 'step'", "metrics.jsonl:1")),
    "metrics with a text": (written("runs/tiny/metrics.jsonl", b'{"step": "a"}\n'), GO_ON, 2, ("no integer 'step'",)),
    "metrics not JSON": (written("runs/tiny/metrics.jsonl", b'{"step": 1}\nx\n{"step": 2}\n'), GO_ON, 2,
                         ("line 2 of metrics.jsonl is not JSON",)),
    "events not UTF-8": (written("runs/tiny/events.jsonl", b"\xff\n"), GO_ON, 2, ("events.jsonl is not UTF-8",)),
    "events a list": (written("runs/tiny/events.jsonl", b"[1]\n"), GO_ON, 2, ("not a JSON object", "events.jsonl:1")),
    "events not JSON": (written("runs/tiny/events.jsonl", b"x\n"), GO_ON, 2, ("is not JSON",)),
    "run.json a list": (written("runs/tiny/run.json", b"[]"), GO_ON, 2, ("expected a JSON object, found list",)),
    "run.json a text": (written("runs/tiny/run.json", b'"x"'), GO_ON, 2, ("expected a JSON object, found str",)),
    "run.json empty": (written("runs/tiny/run.json", b""), GO_ON, 2, ("run.json cannot be read",)),
    "run.json binary": (written("runs/tiny/run.json", b"\xff\x00"), GO_ON, 2, ("run.json cannot be read",)),
    "run.json in parts": (written("runs/tiny/run.json", b'{"recipe": 5}'), GO_ON, 2,
                          ("'recipe' must be an object, found int",)),
}  # fmt: skip
NAMES: dict[str, Fault] = {
    "output_dir": (nothing, ("--output-dir", LONG), 2, ("file name is too long",)),
    "dataset": (recipe(datasets=[{"path": LONG + ".jsonl"}]), (), 2, ("File name too long", "tiny.yaml:")),
    "resume": (nothing, ("--resume", LONG), 2, ("too long",)),
    "output_dir a file": (nothing, ("--output-dir", "rows.jsonl"), 2, ("is not empty and has no run of streamtune",)),
}
SLOW = ("models", "inits")
"""Those whose faults are found after libraries and rows were looked at; ``FEW`` of them are tried each time."""
FEW = {name: MODELS[name] for name in ("vocab_size", "gptq", "nan in the head")} | {
    name: RECORDS[name] for name in ("metrics without step", "events not UTF-8", "run.json a list")
}
TABLES = {"few": FEW, "models": MODELS, "inits": INITS, "numbers": NUMBERS, "records": RECORDS, "names": NAMES}


@pytest.mark.quick("few")
@pytest.mark.parametrize(
    "table", [pytest.param(table, marks=[pytest.mark.slow] if table in SLOW else []) for table in TABLES]
)
def test_it_is_one_clear_error(zygotes: Zygotes, finished: Path, tmp_path: Path, table: str) -> None:
    def trial(case: tuple[str, Fault]) -> list[str]:
        name, (change, arguments, code, sentences) = case
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(finished, folder)
        change(folder)
        before = contents(folder)
        started_from = "model.yaml" if name in MODELS and table in ("models", "few") else "tiny.yaml"
        done = zygotes.run(folder, argv=["sft", started_from, *arguments])
        found = unclear(done.output) + [f"does not say {text!r}" for text in sentences if text not in joined(done)]
        if done.status != code:
            found.append(f"exit code {done.status}")
        found += [f"changed: {path}" for path, data in before.items() if contents(folder).get(path) != data]
        return [f"{name}: {text}\n{done.output[-900:]}" for text in found]

    found = zygotes.each(trial, TABLES[table].items())
    assert [text for texts in found for text in texts] == []


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file, but the one that the output goes to, and the lock, which says who had it last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("output.txt", ".lock")]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def unclear(output: str) -> list[str]:
    """What no error may have."""
    return re.findall(r"Traceback|this is a bug|^error: \w+Error:", output, flags=re.MULTILINE)


def joined(done: Any) -> str:
    """The output in one line: a terminal's width breaks sentences."""
    return " ".join(done.output.split())


# --- limits of the process --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["-v 400000", "-v 900000", "-f 8"])
def test_a_limit_of_the_shell_is_named(tmp_path: Path, limit: str) -> None:
    write_sft(tmp_path, **SHORT)
    command = f"ulimit {limit}; exec {sys.executable} -m streamtune sft tiny.yaml"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert unclear(output) == [], output
    assert ("memory ran out" if "-v" in limit else "exceeds the limit on file size") in " ".join(output.split()), output


FULL = """
set -e
mount -t tmpfs -o size=64k none /dev/shm  # the new working directory: python looks there last
cp tiny.yaml rows.jsonl /dev/shm; mkdir /dev/shm/source; mount --bind "$2" /dev/shm/source; cd /dev/shm
for place in /tmp /var/tmp /usr/tmp; do [ ! -d $place ] || mount -t tmpfs -o size=64k none $place; done
for place in . /tmp /var/tmp /usr/tmp; do [ ! -d $place ] || cat /dev/zero > $place/fill 2> /dev/null || true; done
export PYTHONPATH=/dev/shm/source
"$1" -m streamtune sft tiny.yaml
"""


@pytest.mark.slow
@pytest.mark.parametrize("tmpdir", [None, "/nowhere"])
def test_no_room_for_temporary_files_anywhere(tmp_path: Path, tmpdir: str | None) -> None:
    write_sft(tmp_path, **SHORT)
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if tmpdir is None else {"TMPDIR": tmpdir})}
    command = [unshare, "-rm", "bash", "-c", FULL, "full", sys.executable, str(ROOT / "src")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert unclear(output) == [], output
    assert "no directory for temporary files is writable" in output
    assert f"where: {f'TMPDIR={tmpdir}' if tmpdir else '/tmp'}\nfix: set TMPDIR to a writable directory" in output
