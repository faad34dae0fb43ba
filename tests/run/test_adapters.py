"""Kinds of adapters by the real command line: trained, resumed bit-identically, exported, used as reference."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from streamtune.cli import main
from streamtune.recipe import load_recipe
from tests.run.test_dpo_cli import LORA, add
from tests.run.test_dpo_cli import RECIPE as PAIRS
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows

KINDS = ("dora", "pissa", "lora_ga", "vera", "oft", "paca")
"""A norm, a constant part, one of gradients, shared buffers, a rotation, and columns of the weight."""
TINY: dict[str, Any] = {
    **RECIPE,
    "model": {"init": {**QWEN3, "tie_word_embeddings": True}},
    "max_length": 256,
    "engine": FIXED,
    "finetuning_type": "lora",
    "lora_r": 4,
    "oft_block_size": 8,
    "max_steps": 4,
    "save_steps": 2,
    "learning_rate": 1.0e-2,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with rows and its own cache, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_rows(tmp_path, 12)
    for number in range(6):
        add("pairs.jsonl", prompt=f"Add {number}.", chosen=f"It is {number + 1}.", rejected="No idea.")
    return tmp_path


def streamtune(*arguments: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


def losses(folder: str) -> list[float]:
    """Return the loss of each step of a run."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def saved(folder: str) -> bytes:
    """Return the final adapters of a run."""
    return Path(folder, "final/adapter_model.safetensors").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_trained_resumed_and_exported(folder: Path, kind: str) -> None:
    write_recipe(folder, {**TINY, "adapter_type": kind})
    assert run("--output-dir", "run") == 0
    before, kept = losses("run"), saved("run")
    for gone in ("run/checkpoints/step-000004", "run/final"):
        shutil.rmtree(gone)
    assert run("--output-dir", "run") == 0
    assert losses("run") == before
    assert saved("run") == kept
    assert streamtune("export", "run", "merged") == 0  # which compares logits with those of the model that trained
    assert run("--output-dir", "run", "--set", "adapter_type=lora") == 2


@pytest.mark.full
def test_lora_ga_moves_faster_at_first(folder: Path) -> None:
    """Started from the gradient of all rows, SGD lowers the loss more than LoRA at the same rate and scale."""
    more = {
        "optim": "sgd",
        "learning_rate": 1.0e-3,
        "max_grad_norm": 0.0,
        "save_steps": 0,
        "lr_scheduler_type": "constant",
    }
    write_recipe(folder, {**TINY, **more, "adapter_type": "lora_ga", "lora_ga_rows": 12})
    assert run("--output-dir", "ga") == 0
    assert run("--output-dir", "rs", "--set", "adapter_type=rslora", "--set", "lora_ga_rows=8") == 0
    ours, theirs = losses("ga"), losses("rs")
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)  # the same model
    assert ours[-1] < theirs[-1]


@pytest.mark.full
def test_two_ranks_start_lora_ga_alike(folder: Path) -> None:
    write_recipe(folder, {**TINY, "adapter_type": "lora_ga", "train_batch_size": 2})
    for ranks in (1, 2):
        assert run("--output-dir", f"run{ranks}", "--nproc", str(ranks)) == 0
    assert losses("run2") == pytest.approx(losses("run1"), abs=1e-5)
    with (
        safe_open("run1/final/adapter_model.safetensors", "pt") as one,
        safe_open("run2/final/adapter_model.safetensors", "pt") as two,
    ):
        for name in one.keys():  # noqa: SIM118
            torch.testing.assert_close(one.get_tensor(name), two.get_tensor(name), rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_two_ranks_train_on_eight_bits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each rank quantises the base: DDP does not send it. DeepSpeed cannot move it, and is refused."""
    eight = {"finetuning_type": "qlora", "quantization": "int8", "adapter_type": "lora", "train_batch_size": 2}
    write_recipe(folder, {**TINY, **eight, "per_device_train_batch_size": 1})
    for ranks in (1, 2):
        assert run("--output-dir", f"run{ranks}", "--nproc", str(ranks)) == 0
    assert losses("run2") == pytest.approx(losses("run1"), abs=1e-5)
    assert run("--output-dir", "other", "--set", "deepspeed=zero2") == 2
    assert "int8 weights (torchao) cannot be moved by DeepSpeed" in capfd.readouterr().err


@pytest.mark.full
def test_whole_modules_and_ranks_by_pattern_are_resumed_and_exported(folder: Path) -> None:
    more = {"modules_to_save": ["embed_tokens"], "lora_rank_pattern": {"o_proj": 2}, "lora_exclude": ["down_proj"]}
    write_recipe(folder, {**TINY, **more})
    assert run("--output-dir", "run") == 0
    kept = saved("run")
    with safe_open("run/final/adapter_model.safetensors", framework="pt") as file:
        names = list(file.keys())
        assert file.get_slice(next(name for name in names if "o_proj.lora_A" in name)).get_shape()[0] == 2
    assert any("embed_tokens" in name for name in names)
    assert not any("down_proj" in name for name in names)
    for gone in ("run/checkpoints/step-000004", "run/final"):
        shutil.rmtree(gone)
    assert run("--output-dir", "run") == 0
    assert saved("run") == kept
    assert streamtune("export", "run", "merged") == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pissa"])
def test_a_run_starts_from_the_adapters_of_another(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**TINY, "adapter_type": kind})
    assert run("--output-dir", "first") == 0
    more = {key: value for key, value in TINY.items() if not key.startswith(("lora_", "oft_"))}
    write_recipe(folder, {**more, "adapter_name_or_path": "first/final"})
    assert run("--output-dir", "second") == 0
    assert losses("second")[0] < losses("first")[0]
    before, kept = losses("second"), saved("second")
    for gone in ("second/checkpoints/step-000004", "second/final"):
        shutil.rmtree(gone)
    assert run("--output-dir", "second") == 0
    assert losses("second") == before
    assert saved("second") == kept
    assert load_recipe(Path("second/recipe.yaml")).notes == ()
    capsys.readouterr()
    assert streamtune("export", "second", "merged") == 0
    assert "cannot read" not in " ".join(capsys.readouterr().err.split())
    assert run("--output-dir", "third", "--set", "lora_r=2") == 2
    assert "'lora_r' has no effect: the adapters in" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pissa", "ia3", "paca"])
def test_the_reference_of_preferences_is_the_model_that_training_starts_from(kind: str) -> None:
    keys = {**PAIRS, **LORA, "adapter_type": kind, "val_size": None, "eval_steps": None, "lora_dropout": None}
    recipe = {key: value for key, value in keys.items() if value is not None}
    Path("pairs.yaml").write_text(yaml.safe_dump({**recipe, "model": {"init": {**QWEN3, "attention_dropout": 0.0}}}))
    assert streamtune("dpo", "pairs.yaml", "--output-dir", "run") == 0
    found = losses("run")
    assert found[0] == pytest.approx(math.log(2), abs=1e-5)
    assert found[-1] < found[0]


def test_a_reference_without_the_adapters_that_training_starts_from_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {**PAIRS, "finetuning_type": "lora", "adapter_name_or_path": "first/final"}
    Path("pairs.yaml").write_text(yaml.safe_dump(keys))
    assert streamtune("dpo", "pairs.yaml", "--output-dir", "run") == 2
    assert "the reference would be the model without them" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"adapter_type": "dorra"}, "did you mean 'dora'?"),
        ({"adapter_type": "hra", "finetuning_type": "qlora"}, "needs unquantised weights"),
        ({"adapter_type": "loftq"}, "does not quantise the weights"),
        ({"adapter_type": "dora", "fsdp": True}, "does not work with sharded weights"),
        ({"adapter_type": "lora_ga", "sequence_parallel_size": 2}, "here each rank has a part of a row"),
        (
            {"adapter_type": "lora_ga", "streaming": True, "overlength": "drop", "tokenizer": {"path": "."}},
            "draws from all rows",
        ),
        ({"adapter_type": "lora_ga", "teacher": "run/final"}, "before the teacher is loaded"),
        ({"modules_to_save": ["lm_head"], "deepspeed": "zero3"}, "copies modules before"),
    ],
)
def test_what_is_refused_before_anything_is_read(
    folder: Path, keys: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(folder, {**TINY, **keys})
    assert run("--output-dir", "run") == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_keys_without_effect_are_named(folder: Path) -> None:
    path = write_recipe(folder, {**TINY, "adapter_type": "ia3"})
    notes = " ".join(load_recipe(str(path)).notes)
    assert "'lora_r' has no effect with adapter_type: ia3" in notes
    assert "'oft_block_size' has no effect with adapter_type: ia3" in notes


@pytest.mark.full
@pytest.mark.parametrize("iterations", [1, 3])
def test_loftq_is_trained_resumed_evaluated_and_exported(
    folder: Path, iterations: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    keys = {"finetuning_type": "qlora", "quantization": "nf4", "loftq_iter": iterations, "val_size": 3}
    write_recipe(folder, {**TINY, **keys, "adapter_type": "loftq"})
    assert run("--output-dir", "run") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("(loftq_iter)" in printed) == (iterations > 1)
    assert ("merge the adapters first: the base was made from a configuration" in printed) == (iterations == 1)
    before, kept = losses("run"), saved("run")
    for gone in ("run/checkpoints/step-000004", "run/final"):
        shutil.rmtree(gone)
    assert run("--output-dir", "run") == 0
    assert losses("run") == before
    assert saved("run") == kept
    assert run("--output-dir", "run", "--set", f"loftq_iter={iterations + 1}") == 2
    assert streamtune("verify", "tiny.yaml", "--length", "64") == 0
    assert streamtune("plan", "tiny.yaml") == 0
    assert streamtune("export", "run", "merged") == 0  # which compares logits with those of the model that trained
    assert streamtune("export", "run", "apart", "--onto", "original") == 2
    assert "do not fit the original base" in " ".join(capsys.readouterr().err.split())
    found = []
    for model in ("run", "merged"):
        assert streamtune("eval", model, "tiny.yaml", "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["splits"])
    ours, theirs = ([split["loss"] for split in each.values()] for each in found)
    assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.slow
def test_two_ranks_start_loftq_alike(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    keys = {"finetuning_type": "qlora", "quantization": "nf4", "adapter_type": "loftq", "loftq_iter": 2}
    write_recipe(folder, {**TINY, **keys, "train_batch_size": 2})
    for ranks in (1, 2):
        assert run("--output-dir", f"run{ranks}", "--nproc", str(ranks)) == 0
    assert losses("run2") == pytest.approx(losses("run1"), abs=1e-5)
    first, second = (Path(f"run{ranks}/final/loftq.safetensors").read_bytes() for ranks in (1, 2))
    assert first == second


def test_preferences_from_loftq_need_a_reference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao")
    keys = {"finetuning_type": "qlora", "quantization": "int8", "adapter_type": "loftq"}
    path = write_recipe(folder, {**PAIRS, **LORA, **keys})
    assert streamtune("dpo", str(path), "--output-dir", "run") == 2
    assert "correct the quantisation" in " ".join(capsys.readouterr().err.split())
