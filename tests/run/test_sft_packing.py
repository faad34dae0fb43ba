"""``packing: true`` from a recipe to a step: the same gradient as of unpacked rows, and resumed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune.data import collate
from streamtune.errors import UnsupportedModelError
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.train import Run
from streamtune.tasks.sft import Batches
from streamtune.tasks.steps import Steps
from streamtune.train import MicroBatch
from streamtune.train.objective import supervised_loss
from tests.precision_kit import reference_of
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows

PACKED: dict[str, Any] = {
    **RECIPE,
    "max_length": 160,
    "packing": True,
    "val_size": 5,
    "engine": FIXED,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "num_train_epochs": 2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 40)
    return tmp_path


def recipe(folder: Path, **more: Any) -> Path:
    return write_recipe(folder, {**PACKED, **more})


def built(folder: Path, **more: Any) -> Run:
    return build_run(load_recipe(recipe(folder, **more), []))


def gradient(model: Any, batches: list[MicroBatch], num_targets: int) -> tuple[float, dict[str, Tensor]]:
    """Return the gradients as ``train.step.accumulate_gradients`` sums them."""
    model.zero_grad(set_to_none=True)
    losses = [supervised_loss(model, batch, num_targets=num_targets) for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("overlength", ["error", "split"])
def test_a_step_has_the_gradient_of_its_rows_unpacked(folder: Path, overlength: str) -> None:
    more = {"overlength": "split", "max_length": 90} if overlength == "split" else {}
    run = built(folder, **more)
    steps = Steps(Batches(run.prepared, run.tokenizer), run.recipe)
    step = steps.next_step()
    assert [batch.input_ids.shape[0] for batch in step] == [2, 2]
    packs = run.prepared.packs
    assert packs is not None
    units = [int(pack) for pack in steps.sampler.epoch_order(0)[:4]]
    examples = [run.prepared.training[row] for pack in units for row in packs[pack]]
    assert len(examples) > 4
    assert sorted(e.origin for e in examples) == sorted(origin for batch in step for origin in batch.origins)
    apart = MicroBatch(**collate(examples, pad_token_id=run.tokenizer.pad_token_id), origins=())
    num_targets = sum(batch.num_targets for batch in step)
    assert num_targets == apart.num_targets
    assert sum(batch.num_tokens for batch in step) == apart.num_tokens

    found = gradient(run.model, step, num_targets)
    run.handle.remove()
    reference_of(run.model, lambda model: gradient(model, [apart], num_targets)).check(found)


def test_held_out_rows_have_the_loss_they_have_unpacked(folder: Path) -> None:
    run = built(folder)
    batches = Batches(run.prepared, run.tokenizer)
    held_out = list(batches.held_out_batches(2))
    assert sorted(o for batch in held_out for o in batch.origins) == sorted(e.origin for e in run.prepared.validation)
    apart = MicroBatch(**collate(list(run.prepared.validation), pad_token_id=0), origins=())
    with torch.no_grad():
        total = sum(float(supervised_loss(run.model, batch, num_targets=1)) for batch in held_out)
        run.handle.remove()
        want = reference_of(run.model, lambda model: (supervised_loss(model, apart, num_targets=1), {}))
        want.check((total, {}))


def test_every_epoch_visits_every_row_once(folder: Path) -> None:
    run = built(folder)
    steps = Steps(Batches(run.prepared, run.tokenizer), run.recipe)
    epochs = []
    for _ in range(2):
        taken = [steps.next_step() for _ in range(run.plan.steps_per_epoch)]
        epochs.append([origin for step in taken for batch in step for origin in batch.origins])
        assert sorted(epochs[-1]) == sorted(example.origin for example in run.prepared.training)
    assert epochs[0] != epochs[1]


@pytest.mark.full
def test_trains_and_resumes_to_the_same_curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(folder)
    assert run("--output-dir", "whole") == 0
    shown = capsys.readouterr().out
    assert "  packing " in shown
    assert " x 4 packed sequences" in shown
    settings = ("--set", "save_steps=1", "--set", "save_total_limit=9", "--output-dir", "split")
    assert run(*settings) == 0
    assert run(*settings, "--resume", "split/checkpoints/step-000002") == 0

    def curve(folder: str) -> list[tuple[Any, ...]]:
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        return [tuple(line.get(key) for key in ("step", "loss", "eval_loss", "tokens", "grad_norm")) for line in lines]

    assert curve("split") == curve("whole")
    assert curve("whole")[-1][2] < 0.8 * curve("whole")[0][1]


def test_a_model_that_does_not_keep_rows_apart_is_refused_before_training(folder: Path) -> None:
    init = {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}
    with pytest.raises(UnsupportedModelError, match="MptForCausalLM does not keep packed rows apart") as caught:
        built(folder, model={"init": init})
    assert caught.value.fix == "set packing: false"
    assert built(folder, model={"init": init}, packing=False).prepared.packs is None


def test_a_model_whose_mask_ignores_positions_trains_packed(folder: Path) -> None:
    init = {**QWEN3, "model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}
    assert built(folder, model={"init": init}).prepared.packs is not None


def test_another_packing_is_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(folder)
    assert run("--set", "max_steps=1") == 0
    assert run("--set", "max_steps=1", "--set", "packing=false") != 0
    assert "packing" in capsys.readouterr().err
