"""``reasoning: per_turn`` from a recipe to a trained model: the gradient of separate turns, resume, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune.data import collate
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.train import MicroBatch, PrefixBatch
from streamtune.train.objective import supervised_loss
from tests.precision_kit import reference_of
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe

TEMPLATE = Path(__file__).parents[1] / "data/templates/qwen3.jinja"
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(8):
            messages: list[dict[str, str]] = []
            for turn in range(1 + number % 4):
                messages.append({"role": "user", "content": f"Add {number} to {turn}."})
                thought = f"{number} and {turn} make {number + turn}"
                messages.append({"role": "assistant", "content": f"{number + turn}", "reasoning_content": thought})
            file.write(json.dumps({"messages": messages}) + "\n")
    return tmp_path


def recipe(folder: Path, **more: Any) -> Path:
    common = {**RECIPE, "max_length": 512, "engine": FIXED, "reasoning": "per_turn", "output_dir": "out"}
    return write_recipe(folder, {**common, "chat_template": str(TEMPLATE), **more})


@pytest.mark.quick("full")
@pytest.mark.parametrize("kind", MODELS)
def test_a_conversation_has_the_gradient_of_its_turns_apart(folder: Path, kind: str) -> None:
    built = build_run(load_recipe(recipe(folder, model={"init": {**QWEN3, **MODELS[kind]}}), []))
    units = [unit for unit in range(built.batches.num_training_units) if len(built.prepared.packs[unit]) == 4]
    batch = built.batches.training_batch(units[:1])
    assert isinstance(batch, PrefixBatch)
    rows = [built.prepared.training[row] for row in built.prepared.packs[units[0]]]
    assert batch.num_targets == sum(sum(label != -100 for label in row.labels[1:]) for row in rows)
    assert batch.num_tokens < 0.8 * sum(row.num_tokens for row in rows)
    alone = [MicroBatch(**collate([row], pad_token_id=0), origins=("",)) for row in rows]

    def gradient(model: Any, batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        losses = [supervised_loss(model, each, num_targets=batch.num_targets) for each in batches]
        torch.stack(losses).sum().backward()
        return sum(loss.item() for loss in losses), {name: p.grad.clone() for name, p in model.named_parameters()}

    got = gradient(built.model, [batch])
    built.handle.remove()
    reference_of(built.model, lambda model: gradient(model, alone)).check(got)


@pytest.mark.full
def test_runs_resume_and_evaluate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(folder, max_steps=4, save_steps=2, val_size=2, eval_steps=2, lr_scheduler_type="constant")
    assert run() == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "turns in" in shown
    assert "turns share beginnings" not in shown.split("reasoning: per_turn:")[0]
    whole = (folder / "out/final/model.safetensors").read_bytes()
    assert run("--output-dir", "two", "--set", "max_steps=2") == 0
    assert run("--output-dir", "two", "--allow-change", "max_steps") == 0
    assert (folder / "two/final/model.safetensors").read_bytes() == whole
    losses = [json.loads(line).get("eval_loss") for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    assert any(loss is not None for loss in losses)


@pytest.mark.full
def test_it_is_verified_and_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(folder)
    assert run(command="verify") == 0
    assert "sequence that shares prefixes, compared with each row alone" in " ".join(capsys.readouterr().out.split())
    assert run("--dry-run", "--set", "engine.schedule=auto") == 0


@pytest.mark.quick("packing")
@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"packing": True}, "needs 'packing: false'"),
        ({"train_on": "last"}, "needs 'train_on: assistant'"),
        ({"per_device_train_batch_size": 2}, "needs 'per_device_train_batch_size: 1'"),
        ({"batching": "buckets", "tokens_per_batch": 1024}, "needs 'batching: rows'"),
        ({"streaming": True, "max_steps": 3}, "needs 'streaming: false'"),
        ({"rope_scaling": {"rope_type": "dynamic", "original_max_position_embeddings": 64}}, "change above 64 tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_excludes_it(folder: Path, keys: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(folder, **keys)
    assert run("--dry-run") != 0
    said = " ".join(capsys.readouterr().err.split())
    assert what in said
    assert "tiny.yaml:" in said
