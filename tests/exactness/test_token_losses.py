"""Losses of sft other than the cross entropy, and weights of rows: streamed as each row alone in plain torch.

Padded, packed and as turns that share their beginnings; however a step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamtune import RouterLoss, Schedule, data, stream
from streamtune.engine import LossRequest
from streamtune.ops import (
    Divergence,
    TokenLoss,
    TopKTeacher,
    linear_token_loss,
    token_loss_reference,
    top_k_classes,
)
from streamtune.tasks.sft import collate_prefix_batch
from streamtune.train import MicroBatch, ModelReference, SupervisedObjective
from streamtune.train.objective import call_model, unstreamed_token_loss
from tests.precision_kit import in_float64, reference_of

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
    return [collate_prefix_batch(rows[:3]), collate_prefix_batch(rows[3:])]


def gradients(model: nn.Module, objective: SupervisedObjective, step: Sequence[MicroBatch]) -> Any:
    model.zero_grad(set_to_none=True)
    totals, value = objective.step_totals(step), 0.0
    for batch in step:
        score = objective.score(model, batch, totals)
        score.total_loss.backward()
        value += score.total_loss.item()
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
        assert handle.head.loss_request is None


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
        want = call_model(model, batch, num_targets=1).loss.item()
        with stream(model, chunk_size=6) as handle:
            score = SupervisedObjective(handle, TokenLoss("dft", z_loss=0.1)).score(model, batch, None)
    assert score.held_out == [(pytest.approx(want, rel=1e-6), batch.num_targets)]


def test_the_cross_entropy_is_measured_beside_the_loss() -> None:
    model, rows = build("llama"), examples()
    batch = batches("one", rows)[0]
    want = call_model(model, batch, num_targets=batch.num_targets).loss.item()
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
        balance = model(**{**batch.inputs, "attention_mask": batch.attention_mask}, output_router_logits=True)
        value = unstreamed_token_loss(model, batch, loss) / batch.target_weight + 0.1 * balance.aux_loss
        value.backward()
        return value, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = reference_of(model, plain)
    with stream(model, schedule=Schedule(chunk_size=6, head_chunk_size=5), router_loss=RouterLoss(0.1)) as handle:
        model.zero_grad(set_to_none=True)
        given = MicroBatch(batch.input_ids, batch.attention_mask, batch.shift_labels, batch.origins,
                           weights=batch.weights)  # fmt: skip
        with handle.with_loss(LossRequest(loss, given.weights)):
            value = call_model(model, given, num_targets=given.target_weight, attention_mask=given.attention_mask).loss
        value.backward()
        grads: dict[str, Tensor] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        want.check((value, {name: grads[name] for name in want.truth[1]}))


# --- a teacher --------------------------------------------------------------------------------------------------------

DIVERGENCES = {
    "forward": Divergence("forward"),
    "reverse": Divergence("reverse", temperature=2.0),
    "jsd": Divergence("jsd", beta=0.3, target_loss_weight=0.4),
}


def taught(layout: str, divergence: Divergence, schedule: Schedule, student: str = "llama") -> None:
    """A teacher of another family and width. In fp64 it is widened too."""
    model, teacher = build(student), build("qwen3", hidden_size=48).eval().requires_grad_(False)
    loss, rows = TokenLoss("dft" if divergence.target_loss_weight else "nll", divergence=divergence), examples()
    alone = [batch for row in rows for batch in batches("one", [row])]

    def plain(model: Any) -> Any:
        wide = in_float64(teacher) if model.lm_head.weight.dtype == torch.float64 else teacher
        reference: Any = ModelReference(wide, None)  # type: ignore[arg-type]
        return gradients(model, SupervisedObjective(None, loss, reference), alone)

    want = reference_of(model, plain)
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    with stream(model, schedule=schedule) as handle, stream(teacher, schedule=schedule) as other:
        objective = SupervisedObjective(handle, loss, ModelReference(teacher, other))
        found = gradients(model, objective, batches(layout, rows))
        score = objective.score(model, batches("one", rows)[0], 1.0)
    want.check(found)
    assert score.metrics["kl"][0] > 0
    assert all(torch.equal(p, before[name]) for name, p in teacher.named_parameters())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.quick("forward-packed", "jsd-turns", "reverse-left")
@pytest.mark.parametrize("layout", ["one", "left", "split", "packed", "turns"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_equals_that_of_each_row_alone(name: str, layout: str) -> None:
    taught(layout, DIVERGENCES[name], Schedule(chunk_size=6, head_chunk_size=5))


@pytest.mark.full
@pytest.mark.parametrize("choices", [{"weights": "host"}, {"levels": 2, "offload": "host"}], ids=str)
def test_a_teacher_in_other_schedules(choices: dict[str, Any]) -> None:
    taught("packed", DIVERGENCES["jsd"], Schedule(chunk_size=6, head_chunk_size=5, **choices))


@pytest.mark.full
def test_softcaps_of_student_and_teacher_are_theirs() -> None:
    taught("one", DIVERGENCES["forward"], Schedule(chunk_size=6, head_chunk_size=5), student="gemma2")


def test_no_logits_of_a_whole_row_are_made() -> None:
    """Of neither model more than a head chunk of logits is there at a time."""
    model, teacher = build("llama"), build("qwen3", hidden_size=48).eval().requires_grad_(False)
    largest = LargestOfVocabulary()
    with stream(model, schedule=Schedule(chunk_size=6, head_chunk_size=5)) as handle, stream(teacher, 6) as other:
        objective = SupervisedObjective(handle, TokenLoss(divergence=Divergence()), ModelReference(teacher, other))
        with largest:
            gradients(model, objective, batches("packed", examples()))
    assert largest.rows == 5


WIDTHS = (32, 48)
"""Of the student and of the teacher: their weights are no logits."""


class LargestOfVocabulary(TorchDispatchMode):
    """Records the most rows of any tensor ``[..., V]`` that is no weight."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() > 1 and found.shape[-1] == VOCAB and found.shape[0] not in WIDTHS:
            self.rows = max(self.rows, found.numel() // VOCAB)
        return found


# --- what a file has of a teacher ------------------------------------------------------------------------------------


def with_top_k(step: Sequence[MicroBatch], tables: dict[str, tuple[Tensor, Tensor]]) -> list[MicroBatch]:
    """The batches, with the likeliest tokens of each row at its targets."""
    found = []
    for batch in step:
        parts = [tables[origin] for origin in batch.origins]
        ids, logprobs = (torch.cat([part[place] for part in parts]) for place in (0, 1))
        found.append(replace(batch, top_k=TopKTeacher.of_targets(batch.shift_labels, ids, logprobs)))
    return found


def class_divergence(logits: Tensor, ids: Tensor, logprobs: Tensor, asked: Divergence) -> Tensor:
    """The divergence of k + 1 classes, written out: those of the ids, and one of all other tokens."""
    p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / asked.temperature).softmax(-1)
    outside = torch.ones_like(p).scatter(-1, ids, 0.0)
    q = torch.cat([p.gather(-1, ids), (p * outside).sum(-1, keepdim=True)], -1)
    t = logprobs.to(q.dtype).exp()
    t = t / t.sum(-1, keepdim=True)
    if asked.kind == "forward":
        return (t * (t / q).log()).sum(-1)
    if asked.kind == "reverse":
        return (q * (q / t).log()).sum(-1)
    m = asked.beta * t + (1 - asked.beta) * q
    return asked.beta * (t * (t / m).log()).sum(-1) + (1 - asked.beta) * (q * (q / m).log()).sum(-1)


def taught_by_file(layout: str, asked: Divergence, k: int, schedule: Schedule | None = None) -> None:
    model, loss, rows = build("llama"), TokenLoss(divergence=asked), examples()
    draw = torch.Generator().manual_seed(5)
    tables = {}
    for row in rows:
        targets = int((np.asarray(row.labels)[1:] != -100).sum())
        ids, logprobs = top_k_classes(3 * torch.randn(targets, VOCAB, generator=draw), k)
        tables[row.origin] = (ids.int(), logprobs)
    alone = [batch for row in rows for batch in batches("one", [row])]

    def dense(model: Any) -> Any:
        model.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for batch in alone:
            kept = batch.shift_labels != -100
            assert batch.weights is None or batch.weights[kept].unique().numel() == 1
            logits = model(**batch.inputs).logits[kept]
            ids, logprobs = tables[batch.origins[0]]
            weight = 1.0 if batch.weights is None else batch.weights[kept][0]
            own = torch.nn.functional.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.shift_labels[kept], reduction="none"
            )
            of_teacher = class_divergence(logits, ids.long(), logprobs, asked)
            values = asked.target_loss_weight * own + (1 - asked.target_loss_weight) * of_teacher
            total = total + weight * values.sum() / sum(each.target_weight for each in alone)
        total.backward()
        return total.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    want = reference_of(model, dense)
    step = with_top_k(batches(layout, rows), tables)
    with stream(model, schedule=schedule or Schedule(chunk_size=6, head_chunk_size=5)) as handle:
        want.check(gradients(model, SupervisedObjective(handle, loss), step))
    want.check(gradients(model, SupervisedObjective(None, loss), with_top_k(alone, tables)))


@pytest.mark.quick("forward-packed", "jsd-one", "reverse-left")
@pytest.mark.parametrize("layout", ["one", "left", "split", "packed"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_of_likeliest_tokens_is_that_of_their_classes(name: str, layout: str) -> None:
    asked = DIVERGENCES[name]
    taught_by_file(layout, asked, 7)


@pytest.mark.full
@pytest.mark.parametrize("k", [1, VOCAB - 1])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_few_or_nearly_all_of_the_tokens(name: str, k: int) -> None:
    taught_by_file("packed", DIVERGENCES[name], k)


@pytest.mark.full
@pytest.mark.parametrize("choices", [{"weights": "host"}, {"levels": 2, "offload": "host"}], ids=str)
def test_likeliest_tokens_in_other_schedules(choices: dict[str, Any]) -> None:
    taught_by_file("packed", DIVERGENCES["jsd"], 7, Schedule(chunk_size=6, head_chunk_size=5, **choices))


def test_classes_of_all_but_one_token_are_the_distribution() -> None:
    """Then the divergence is that of the teacher's own logits."""
    draw = torch.Generator().manual_seed(3)
    logits, taught = (torch.randn(6, 11, generator=draw, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(0, 11, (6,), generator=draw)
    ids, logprobs = top_k_classes(taught / 2.0, 10)
    teacher = TopKTeacher.of_targets(targets, ids.int(), logprobs)
    for kind in ("forward", "reverse", "jsd"):
        loss = TokenLoss(divergence=Divergence(kind, 0.3, 2.0))  # type: ignore[arg-type]
        of_classes = token_loss_reference(logits, targets, loss, top_k=teacher)
        of_all = token_loss_reference(logits, targets, loss, teacher_BTV=taught)
        assert of_classes.item() == pytest.approx(of_all.item(), rel=1e-9)


def test_a_model_that_is_sure_has_a_gradient_without_nan() -> None:
    """Of the tokens that are left out the probability may be below what 1 - p can tell in fp32."""
    hidden = torch.tensor([[[60.0, 0.0]]], requires_grad=True)
    weight = torch.eye(4, 2, requires_grad=True)
    targets, ids = torch.tensor([[0]]), torch.tensor([[0]], dtype=torch.int32)
    for kind in ("forward", "reverse", "jsd"):
        loss = TokenLoss(divergence=Divergence(kind))  # type: ignore[arg-type]
        teacher = TopKTeacher.of_targets(targets, ids, torch.tensor([[-1e-3, -6.9]]))
        value, _ = linear_token_loss(hidden, weight, targets, loss=loss, teacher=teacher)
        (grad,) = torch.autograd.grad(value, weight)
        assert bool(grad.isfinite().all()), kind
        assert value.item() > 0
