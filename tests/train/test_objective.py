"""How the loop uses a score, whatever the objective; and the batch of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from train_kit import RowStream, Trainer, make_batch, make_model

from streamtune.train import MicroBatch, Score, TreeBatch, World, read_records
from streamtune.train.objective import call_model


class SquaredNorm:
    """An objective unlike a language model's loss: the squared norm of the head, with a metric of the batch."""

    def step_totals(self, micro_batches: Sequence[MicroBatch], world: World) -> float:
        return float(len(micro_batches))

    def score(self, model: Any, batch: MicroBatch, totals: float | None) -> Score:
        square = model.lm_head.weight.square().sum()
        metrics = {"length": (float(batch.num_tokens), 1.0), "never/counted": (0.0, 0.0)}
        if totals is None:
            return Score(square, metrics=metrics, held_out=[(2.0 * square.item(), 2.0), (3.0, 1.0)])
        return Score(square / totals, router_loss=0.5 * square / totals, metrics=metrics)


def test_any_objective_is_trained_recorded_and_evaluated(trainer: Trainer) -> None:
    model = make_model()
    before = model.lm_head.weight.detach().square().sum().item()
    trainer(
        model,
        objective=SquaredNorm(),
        stream=RowStream(rows={1: make_batch(1, length=24)}),
        steps=1,
        validation=lambda: iter([make_batch(100), make_batch(101, length=18)]),
        max_grad_norm=0.0,
    )
    step, held_out = read_records(trainer.folder / "metrics.jsonl")
    assert step["loss"] == pytest.approx(before), "the routers' share is minimised and not shown"
    assert step["grad_norm"] == pytest.approx(1.5 * 2 * before**0.5)
    assert step["length"] == pytest.approx((12 + 24 + 12) / 3)
    assert "never/counted" not in step
    after = model.lm_head.weight.detach().square().sum().item()
    assert held_out == {"step": 1, "eval_loss": pytest.approx(after + 3.0), "eval_length": 15.0}


def test_an_objective_that_holds_nothing_out_by_its_loss(trainer: Trainer) -> None:
    class Unscored(SquaredNorm):
        def score(self, model: Any, batch: MicroBatch, totals: float | None) -> Score:
            scored = super().score(model, batch, totals)
            return Score(scored.loss, metrics=scored.metrics)

    result = trainer(make_model(), objective=Unscored(), steps=1, validation=lambda: iter([make_batch(100)]))
    assert result.eval_loss is None
    assert read_records(trainer.folder / "metrics.jsonl")[-1] == {"step": 1, "eval_length": 12.0}


def test_the_model_is_called_with_what_is_added(trainer: Trainer) -> None:
    batch = make_batch(3)
    output = call_model(make_model(), batch, num_targets=batch.num_targets, output_hidden_states=True)
    assert output.hidden_states is not None


def test_completions_are_read_in_their_order_whatever_the_layout() -> None:
    """Three completions with 2, 2 and 3 targets: in one sequence with a common target, and as padded rows."""
    shared = TreeBatch(
        input_ids=torch.zeros(1, 9, dtype=torch.long),
        attention_mask=torch.ones(1, 9, dtype=torch.long),
        shift_labels=torch.zeros(1, 9, dtype=torch.long),
        origins=("rows.jsonl:1",),
        flat_index_K=torch.tensor([1, 2, 1, 8, 3, 4, 6]),
        row_K=torch.tensor([0, 0, 1, 1, 2, 2, 2]),
        num_rows=3,
    )
    assert shared.num_targets == 7
    values = torch.arange(9.0)[None].requires_grad_()
    picked = shared.gather_targets(values)
    assert picked.tolist() == [1, 2, 1, 8, 3, 4, 6]
    (picked * torch.arange(1.0, 8.0)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 1 + 3, 2, 5, 6, 0, 7, 0, 4]]
    separate = TreeBatch(
        input_ids=torch.zeros(3, 4, dtype=torch.long),
        attention_mask=torch.ones(3, 4, dtype=torch.long),
        shift_labels=torch.zeros(3, 4, dtype=torch.long),
        origins=("rows.jsonl:1",),
        flat_index_K=torch.tensor([1, 2, 4, 8, 9, 10]),
        row_K=torch.tensor([0, 0, 1, 2, 2, 2]),
        num_rows=3,
    )
    moved = separate.to(torch.device("cpu"))
    assert isinstance(moved, TreeBatch)
    assert moved.gather_targets(torch.arange(12).reshape(3, 4)).tolist() == [1, 2, 4, 8, 9, 10]
