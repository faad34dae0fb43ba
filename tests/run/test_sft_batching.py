"""``batching`` from a recipe to a step: the same gradient as of single rows, resumed runs, several ranks."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamtune.data import Example, StepSampler, collate
from streamtune.errors import DataError
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.train import Run
from streamtune.tasks.sft import Batches
from streamtune.tasks.steps import RowCost, Steps
from streamtune.train import MicroBatch, World
from streamtune.train.objective import supervised_loss
from tests.distributed.running import command
from tests.precision_kit import reference_of
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

COMMON: dict[str, Any] = {
    **RECIPE,
    "max_length": 160,
    "val_size": 5,
    "engine": FIXED,
    "tokens_per_batch": 320,
    "num_train_epochs": 2,
}
BUCKETS = {"batching": "buckets", "buckets": {"min_length": 16, "cycles": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "tokens": {"batching": "tokens", "per_device_train_batch_size": 2},
    "tokens of packs": {"batching": "tokens", "packing": True, "per_device_train_batch_size": 2},
    "buckets": {**BUCKETS, "per_device_train_batch_size": 3},
    "buckets of packs": {**BUCKETS, "packing": True},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 40)
    return tmp_path


def built(folder: Path, kind: str, **more: Any) -> Run:
    path = write_recipe(folder, {**COMMON, **KINDS[kind], **more})
    return build_run(load_recipe(path, []))


def rows_of(run: Run, units: list[int]) -> list[Example]:
    """Return the rows of some training units, each separately."""
    prepared = run.prepared
    if prepared.pieces is not None:
        return [prepared.pieces.cut_piece(prepared.training, unit) for unit in units]
    packs = prepared.packs
    return [prepared.training[row] for unit in units for row in ([unit] if packs is None else packs[unit])]


def gradient(model: Any, batches: list[MicroBatch], num_targets: int) -> tuple[float, dict[str, Tensor]]:
    """Return the gradients as ``train.step.accumulate_gradients`` sums them."""
    model.zero_grad(set_to_none=True)
    losses = [supervised_loss(model, batch, num_targets=num_targets) for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_gradient_of_its_rows_alone(folder: Path, kind: str) -> None:
    run = built(folder, kind)
    steps = Steps(run.batches, run.recipe)
    assert isinstance(steps.sampler, StepSampler)
    first = steps.sampler.epoch_steps(0)
    sizes = np.diff(first.stops, prepend=0)
    number = int(sizes.argmax())
    for _ in range(number):
        steps.next_step()
    units = first.units[first.stops[number] - sizes[number] : first.stops[number]].tolist()
    step = steps.next_step()
    rows = rows_of(run, units)
    assert len(rows) > 2
    assert sorted(row.origin for row in rows) == sorted(origin for batch in step for origin in batch.origins)
    alone = [MicroBatch(**collate([row], pad_token_id=0), origins=()) for row in rows]
    num_targets = sum(batch.num_targets for batch in step)
    assert num_targets == sum(batch.num_targets for batch in alone)
    assert sum(batch.num_tokens for batch in step) == sum(batch.num_tokens for batch in alone) <= 320
    found = gradient(run.model, step, num_targets)
    run.handle.remove()
    reference_of(run.model, lambda model: gradient(model, alone, num_targets)).check(found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_has_every_unit_once_on_any_number_of_ranks(folder: Path, kind: str) -> None:
    run = built(folder, kind)
    cost = RowCost.from_model(run.model)
    assert cost.per_square == 2 * 2 * 4 * 8
    batch_size = run.recipe.per_device_train_batch_size
    for size in (1, 2, 3):
        streams = [Steps(run.batches, run.recipe, World(rank, size), cost) for rank in range(size)]
        sampler = streams[0].sampler
        assert isinstance(sampler, StepSampler)
        seen: list[str] = []
        for _ in range(len(sampler.epoch_steps(0))):
            shares = [stream.next_step() for stream in streams]
            assert len({len(share) for share in shares}) == 1
            batches = [batch for share in shares for batch in share]
            assert all(len(batch.input_ids) <= batch_size for batch in batches)
            assert all(batch.input_ids.shape[1] <= 160 for batch in batches)
            seen += [origin for batch in batches if not batch.filler for origin in batch.origins]
        units = list(range(run.batches.num_training_units))
        assert sorted(seen) == sorted(row.origin for row in rows_of(run, units))
    assert run.plan.total_steps == sum(len(Steps(run.batches, run.recipe).sampler.epoch_steps(e)) for e in (0, 1))


def test_pieces_of_a_bucket_share_sequences(folder: Path) -> None:
    run = built(folder, "buckets of packs")
    pieces = run.prepared.pieces
    assert pieces is not None
    short = [unit for unit in range(len(pieces)) if pieces.buckets[unit] == 16]
    batch = run.batches.training_batch(short[:10])
    assert batch.input_ids.shape[0] == 1
    assert batch.position_ids is not None
    assert int((batch.position_ids == 0).sum()) >= 10
    alone = built(folder, "buckets", output_dir="other").batches.training_batch(short[:3])
    assert alone.input_ids.shape == (3, 16)
    assert alone.position_ids is None


def test_held_out_rows_stay_whole_and_facts_are_those_of_the_batches(folder: Path) -> None:
    run = built(folder, "buckets of packs")
    held_out = list(run.batches.held_out_batches(2))
    assert sorted(o for batch in held_out for o in batch.origins) == sorted(e.origin for e in run.prepared.validation)
    facts, report = run.batch_facts, run.prepared.report
    assert facts is not None
    positions = squares = 0
    steps = Steps(run.batches, run.recipe)
    for _ in range(facts.steps):
        for batch in steps.next_step():
            positions += batch.input_ids.numel()
            assert batch.position_ids is not None
            for row in batch.position_ids:
                starts = [*torch.nonzero(row == 0).flatten().tolist(), len(row)]
                squares += sum((b - a) ** 2 for a, b in pairwise(starts))
    tokens = int(run.batches.lengths().sum())
    assert facts.squared_lengths == squares
    assert facts.padding == round(1 - tokens / positions, 4)
    assert report.pieces == sum(facts.pieces.values()) == run.batches.num_training_units
    assert tokens + report.piece_tokens_lost == run.prepared.training.lengths().sum()
    assert facts.attention_ratio > 1.5


def curve(folder: str) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in ("step", "loss", "eval_loss", "tokens", "grad_norm")) for line in lines]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_resumes_to_the_same_curve(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**COMMON, **KINDS[kind], "max_steps": 12})
    assert run("--output-dir", "whole") == 0
    shown = capsys.readouterr().out
    assert " x at most 320 tokens of " in shown
    settings = ("--set", "save_steps=1", "--set", "save_total_limit=99", "--output-dir", "split")
    assert run(*settings) == 0
    for step in (3, 8):  # in the middle of an epoch, and of a cycle
        assert run(*settings, "--resume", f"split/checkpoints/step-{step:06}") == 0
        assert curve("split") == curve("whole")
    document = json.loads(Path("whole/data.json").read_text())
    assert document["batches"]["batching"] == KINDS[kind]["batching"]


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param("tokens", marks=pytest.mark.slow), "buckets of packs"])
def test_two_ranks_train_as_one(folder: Path, kind: str) -> None:
    write_recipe(folder, {**COMMON, **KINDS[kind], "max_steps": 5, "val_size": 0})
    assert run("--output-dir", "ranks1") == 0
    call = command("sft", "tiny.yaml", "--nproc", "2", "--output-dir", "ranks2")
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, two = curve("ranks1"), curve("ranks2")
    assert [(line[0], line[3]) for line in one] == [(line[0], line[3]) for line in two], "the same tokens in each step"
    for want, got in zip(one, two, strict=True):
        assert got[1] == pytest.approx(want[1], rel=1e-5)
        assert got[4] == pytest.approx(want[4], rel=1e-3)
    # the number of ranks may change: tokens_per_batch says what a step holds
    call = command("sft", "tiny.yaml", "--nproc", "2", "--output-dir", "ranks1", "--set", "max_steps=5")
    assert subprocess.run(call, capture_output=True, text=True, check=False).returncode == 0


@pytest.mark.full
def test_another_batching_is_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**COMMON, **KINDS["tokens"], "max_steps": 1})
    assert run() == 0
    assert run("--set", "tokens_per_batch=640") != 0
    assert "tokens_per_batch" in capsys.readouterr().err


def test_rows_without_a_token_that_a_piece_predicts(folder: Path) -> None:
    """The row has three tokens, and only the last is trained: it would be a piece alone."""
    rows = [{"prompt": chr(97 + number) + chr(48 + number), "completion": ""} for number in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="no piece of a row has a trained token after its first token") as caught:
        built(folder, "buckets", val_size=0, on_empty="train", buckets={"min_length": 2})
    assert "tiny.yaml" in str(caught.value.where)


def test_batches_without_a_tokenizer_are_counted() -> None:
    with pytest.raises(AssertionError, match="padding needs a tokenizer"):
        Batches(None, None).collate([], packed=False)  # type: ignore[arg-type]
