"""Losses of sft other than the cross entropy, and weights of rows: streamed as each row alone in plain torch.

Padded, packed and as turns that share their beginnings; however a step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from streamtune import RouterLoss, Schedule, data, stream
from streamtune.engine import LossRequest
from streamtune.ops import TokenLoss
from streamtune.tasks.sft import prefix_batch
from streamtune.train import MicroBatch, SupervisedObjective
from streamtune.train.objective import output_of, plain_token_loss
from tests.precision_kit import reference_of

from .families import VOCAB, build
from .test_routers import routed

LOSSES = {
    "weights": TokenLoss(),
    "dft": TokenLoss("dft"),
    "focal": TokenLoss("focal"),
    "smoothed": TokenLoss(label_smoothing=0.1, z_loss=1e-3),
}


def examples(weighed: bool = True) -> list[data.Example]:
    """Rows of which the first two begin alike, and train different tokens of it."""
    draw = np.random.RandomState(2)
    ids = [draw.randint(3, VOCAB, size).astype(np.int32) for size in (17, 23, 9, 12)]
    ids[1][:11] = ids[0][:11]
    rows = []
    for number, each in enumerate(ids):
        labels = each.copy()
        labels[: 5 + 7 * (number == 1)] = -100
        rows.append(data.Example(each, labels, f"rows:{number}", (0.5, 3.0, 1.0, 0.25)[number] if weighed else 1.0))
    return rows


def batches(layout: str, rows: Sequence[data.Example]) -> list[MicroBatch]:
    def made(collated: Any, part: Sequence[data.Example]) -> MicroBatch:
        return MicroBatch(**collated, origins=tuple(row.origin for row in part))

    if layout == "one":
        return [made(data.collate(rows, pad_token_id=0), rows)]
    if layout == "left":
        return [made(data.collate(rows, pad_token_id=0, padding_side="left"), rows)]
    if layout == "split":
        return [made(data.collate(part, pad_token_id=0), part) for part in (rows[:1], rows[1:])]
    if layout == "packed":
        return [made(data.collate_packed([rows[:2], rows[2:]], pad_token_id=0), rows)]
    return [prefix_batch(rows[:3]), prefix_batch(rows[3:])]


def gradients(model: nn.Module, objective: SupervisedObjective, step: Sequence[MicroBatch]) -> Any:
    model.zero_grad(set_to_none=True)
    totals, value = objective.totals(step), 0.0
    for batch in step:
        score = objective.score(model, batch, totals)
        score.minimised.backward()
        value += score.minimised.item()
    return torch.tensor(value), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.quick("dft-packed", "smoothed-turns", "weights-split")
@pytest.mark.parametrize("layout", ["one", "left", "split", "packed", "turns"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_each_row_alone(name: str, layout: str) -> None:
    model, loss, rows = build("llama"), LOSSES[name], examples()
    alone = [batch for row in rows for batch in batches("one", [row])]
    want = reference_of(model, lambda m: gradients(m, SupervisedObjective(None, loss), alone))
    with stream(model, schedule=Schedule(chunk_size=6, head_chunk_size=5)) as handle:
        found = gradients(model, SupervisedObjective(handle, loss), batches(layout, rows))
        want.check(found)
        assert handle.head is not None
        assert handle.head.asked is None


def test_weight_two_is_the_row_twice() -> None:
    model, rows = build("llama"), examples(weighed=False)
    twice = [data.Example(rows[0].input_ids, rows[0].labels, "rows:0", 2.0), rows[2]]
    with stream(model, chunk_size=6) as handle:
        objective = SupervisedObjective(handle)
        loss, grads = gradients(model, objective, batches("one", twice))
        want, truth = gradients(model, objective, batches("one", [rows[0], rows[0], rows[2]]))
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, truth[name], rtol=1e-4, atol=1e-7)


def test_what_is_held_out_is_compared_by_the_cross_entropy() -> None:
    model, rows = build("llama").eval(), examples()
    batch = batches("one", rows)[0]
    with torch.no_grad():
        want = output_of(model, batch, num_targets=1).loss.item()
        with stream(model, chunk_size=6) as handle:
            score = SupervisedObjective(handle, TokenLoss("dft", z_loss=0.1)).score(model, batch, None)
    assert score.held_out == [(pytest.approx(want, rel=1e-6), batch.num_targets)]


def test_the_cross_entropy_is_measured_beside_the_loss() -> None:
    model, rows = build("llama"), examples()
    batch = batches("one", rows)[0]
    want = output_of(model, batch, num_targets=batch.num_targets).loss.item()
    with stream(model, chunk_size=6) as handle:
        score = SupervisedObjective(handle, TokenLoss("dft")).score(model, batch, batch.target_weight)
    total, count = score.metrics["nll"]
    assert total / count == pytest.approx(want, rel=1e-6)
    assert "nll" not in SupervisedObjective(None).score(model, batches("one", examples(False))[0], 3.0).metrics


@pytest.mark.full
def test_with_losses_on_routers() -> None:
    """The balance loss is added as to the cross entropy, and is not in what is shown."""
    model, rows, loss = routed("qwen3_moe"), examples(), TokenLoss("focal", z_loss=1e-3)
    batch = batches("one", rows)[0]

    def plain(model: Any) -> Any:
        model.zero_grad(set_to_none=True)
        balance = model(**{**batch.arguments, "attention_mask": batch.attention_mask}, output_router_logits=True)
        value = plain_token_loss(model, batch, loss) / batch.target_weight + 0.1 * balance.aux_loss
        value.backward()
        return value, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = reference_of(model, plain)
    with stream(model, schedule=Schedule(chunk_size=6, head_chunk_size=5), router_loss=RouterLoss(0.1)) as handle:
        model.zero_grad(set_to_none=True)
        given = MicroBatch(batch.input_ids, batch.attention_mask, batch.shift_labels, batch.origins,
                           weights=batch.weights)  # fmt: skip
        with handle.losing(LossRequest(loss, given.weights)):
            value = output_of(model, given, num_targets=given.target_weight, attention_mask=given.attention_mask).loss
        value.backward()
        grads: dict[str, Tensor] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        want.check((value, {name: grads[name] for name in want.truth[1]}))
