"""A run that goes on from any of its steps ends as it did: in either epoch, with threads that read ahead or without."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.kit import SFT, Zygotes, differences, report, size, state_of, write_sft

STEPS = size(40, 8)
EPOCH = size(10, 2)
"""Twelve rows so many times over are an epoch of sft, in four to a step."""
EVERY = {
    "save_steps": 1,
    "save_total_limit": 1000,
    "max_steps": STEPS,
    "eval_steps": 7,
    "gradient_accumulation_steps": 4,
}


def write_long_sft(folder: Path, **changes: Any) -> None:
    """118 rows by four to a step: 30 steps an epoch, the last of them short; in the second when the run ends."""
    write_sft(folder, **{**EVERY, **changes})
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text(
        "".join(line.replace("Add", f"Add {n}") + "\n" for n in range(EPOCH) for line in lines)
    )


def write_dpo(folder: Path, **changes: Any) -> None:
    """Pairs with shared prompts, adapters that are their own reference, dropout in them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"Add {n}.", "chosen": f"{n}+1" * (1 + n % 3), "rejected": f"{n}-1" * (1 + n % 2)}
        for n in range(size(104, 22))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        **SFT,
        **EVERY,
        "objective": "dpo",
        "finetuning_type": "lora",
        "lora_r": 4,
        "lora_dropout": 0.1,
        **changes,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def write_grpo(folder: Path, **changes: Any) -> None:
    """Rollouts that last four steps, gone through twice; rewards that tell random completions apart."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(
        "def low(completions, completion_ids, **columns):\n"
        "    return [1.0 - sum(ids) / (300 * len(ids)) for ids in completion_ids]\n"
    )
    kept = {key: SFT[key] for key in ("model", "learning_rate")}
    recipe = {
        "objective": "grpo",
        **kept,
        **{**EVERY, "eval_steps": 0},
        "tokenizer": {"train": {"vocab_size": 300}},
        "datasets": [{"path": "demo-arithmetic", "name": "copy", "max_rows": 40}],
        "engine": {"schedule": "fixed", "chunk_size": 64, "head_chunk_size": 32},
        "max_prompt_length": 40,
        "max_completion_length": 4,
        "reward_funcs": ["rewards.py:low"],
        "allow_code": True,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "num_iterations": 2,
        "epsilon": 0.05,
        **changes,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


GVM = {"allocation": "gvm", "num_generations": 4, "per_device_train_batch_size": 8, "pass_reward": 0.6}
"""Groups of unequal size."""

CASES = {
    "sft-0": ("sft", write_long_sft, 0),
    "sft-2": ("sft", write_long_sft, 2),
    "dpo-0": ("dpo", write_dpo, 0),
    "dpo-2": ("dpo", write_dpo, 2),
    "grpo": ("grpo", write_grpo, 0),
    "grpo-gvm": ("grpo", partial(write_grpo, **GVM), 0),
}
FAST = {"sft-2": (5,), "dpo-2": (7,), "grpo": (6,), "grpo-gvm": (7,)}


@pytest.mark.quick("sft-2")
@pytest.mark.parametrize("case", CASES)
def test_resumed_at_every_step(zygotes: Zygotes, tmp_path: Path, case: str) -> None:
    every = bool(size(1, 0))
    if not every and case not in FAST:
        pytest.skip("one number of workers is enough for a few steps; make faults tries both")
    command, write, workers = CASES[case]
    # The file with the reward is another in every folder, and is known by its path.
    more = ("--allow-change", "reward_funcs") if command == "grpo" else ()
    whole = tmp_path / "whole"
    write(whole, dataloader_num_workers=workers)
    done = zygotes.run(whole, "--output-dir", "run", command=command)
    assert done.status == 0, done.output
    theirs = state_of(whole / "run")
    assert theirs["state"]["step"] == STEPS

    def trial(step: int) -> list[str]:
        folder = tmp_path / f"from-{step}"
        write(folder, dataloader_num_workers=workers, save_steps=0)
        checkpoint = whole / f"run/checkpoints/step-{step:06d}"
        resumed = zygotes.run(folder, "--resume", str(checkpoint), "--output-dir", "run", *more, command=command)
        assert resumed.status == 0, resumed.output
        ours, expected = state_of(folder / "run"), dict(theirs)
        for part in ("metrics", "completions"):
            if part in expected:
                expected[part] = [record for record in theirs[part] if record["step"] > step]
        if not expected.get("completions", True):
            ours["completions"] = []  # the file is made with its first line
        found = differences(ours, expected)
        shutil.rmtree(folder)
        return [f"from {step}: {text}" for text in found]

    found = zygotes.each(trial, range(1, STEPS) if every else FAST[case])
    # From the last step there is nothing to train: what it holds was compared with itself, and is counted as read.
    report(f"resume_{case}", trials=len(found) + 1, identical=sum(not texts for texts in found) + 1)
    assert [text for texts in found for text in texts] == []


@pytest.mark.slow
def test_threads_that_read_ahead_change_nothing(zygotes: Zygotes, tmp_path: Path) -> None:
    for workers in (0, 2):
        write_dpo(tmp_path / str(workers), dataloader_num_workers=workers, save_steps=0)
        done = zygotes.run(tmp_path / str(workers), command="dpo")
        assert done.status == 0, done.output
    assert differences(*(state_of(tmp_path / workers / "runs/tiny") for workers in ("0", "2"))) == []


def test_a_change_is_refused_by_name_and_goes_on_where_it_is_allowed(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path, max_steps=4, save_steps=2)
    assert zygotes.run(tmp_path).status == 0
    shutil.rmtree(tmp_path / "runs/tiny/checkpoints/step-000004")
    shutil.rmtree(tmp_path / "runs/tiny/final")
    kept = shutil.copytree(tmp_path / "runs", tmp_path / "kept")
    change = ("--set", "learning_rate=0.02", "--set", "save_steps=1")
    done = zygotes.run(tmp_path, *change)
    assert done.status == 2
    said = " ".join(done.output.split())
    assert "learning_rate was 0.01, is now 0.02" in said
    assert "--allow-change learning_rate" in said
    done = zygotes.run(tmp_path, *change, "--allow-change", "learning_rate")
    assert done.status == 0, done.output
    said = " ".join(done.output.split())
    assert "resumed with a change: learning_rate was 0.01, is now 0.02" in said
    assert "resumed with a change: save_steps was 2, is now 1" in said
    rates = [json.loads(line).get("lr") for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert rates[2] == pytest.approx(2 * rates_of(kept)[2])

    done = zygotes.run(tmp_path, "--set", "lora_r=4", "--allow-change", "lora_r")
    assert done.status == 2, done.output
    assert "'lora_r' cannot change: the checkpoint has the weights of the old value" in " ".join(done.output.split())
    done = zygotes.run(tmp_path, "--allow-change", "learing_rate")
    assert done.status == 2
    assert "did you mean 'learning_rate'?" in done.output


def rates_of(runs: Path) -> list[Any]:
    return [json.loads(line).get("lr") for line in (runs / "tiny/metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_other_data_is_refused_and_goes_on_where_it_is_allowed(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path, max_steps=4, save_steps=2)
    assert zygotes.run(tmp_path).status == 0
    shutil.rmtree(tmp_path / "runs/tiny/checkpoints/step-000004")
    shutil.rmtree(tmp_path / "runs/tiny/final")
    rows = tmp_path / "rows.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text(
        "".join(line.replace("Add", "Sum") + "\n" for line in lines + lines[: random.Random(0).randint(1, 5)])
    )
    done = zygotes.run(tmp_path)
    assert done.status == 2
    assert "the data changed" in " ".join(done.output.split())
    done = zygotes.run(tmp_path, "--allow-change", "data")
    assert done.status == 0, done.output
    assert "it is read again from its beginning" in " ".join(done.output.split())
