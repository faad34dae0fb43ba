"""The loop on a tiny model: exact steps, exact resume, and refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.precision_kit import Float64
from torch import nn
from train_kit import RowStream, Trainer, make_batch, make_model
from transformers import LlamaForCausalLM

from streamtune.errors import CheckpointError, NonFiniteError, OutOfMemoryError
from streamtune.models import load_model
from streamtune.optim import OptimChoice, build_optimizer
from streamtune.train import (
    HostOptimizer,
    InBackwardBackend,
    LocalBackend,
    MicroBatch,
    RunDirectory,
    StopRequest,
    World,
    find_checkpoint,
    read_records,
)
from streamtune.train.checkpoint import read_manifest
from streamtune.train.guard import (
    MAX_COMPARED_VALUES,
    MAX_FULLY_COMPARED_VALUES,
    ChangedWeights,
    describe_unchanged_weights,
)
from streamtune.train.slices import SliceReader, write_slices


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_records(folder / "metrics.jsonl") if "loss" in record]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def newest(folder: Path):
    return find_checkpoint(RunDirectory(folder), "auto", print)


def held_out() -> Iterator[MicroBatch]:
    return (make_batch(row) for row in range(100, 104))


def test_loss_falls_and_is_recorded(trainer: Trainer) -> None:
    result = trainer(make_model(), steps=30, validation=held_out)
    records = read_records(trainer.folder / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 31))
    assert result.last_loss < 0.7 * result.first_loss
    assert result.tokens == sum(record["tokens"] for record in records if "loss" in record)
    assert records[-1] == {"step": 30, "eval_loss": result.eval_loss}
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "peak_mem_gib", "epoch"} <= records[0].keys()


def test_a_step_is_the_gradient_of_one_mean_over_all_its_tokens(trainer: Trainer) -> None:
    """Also if the epoch's last step has fewer micro-batches: 10 rows, 3 per step."""
    model, reference = make_model().double(), make_model().double()
    with Float64():
        trainer(model, stream=RowStream(position=6), steps=2, max_grad_norm=0.0)
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
        for rows, factor in (((6, 7, 8), 1 / 3), ((9,), 2 / 3)):  # The factors are the warm-up's.
            summed, count = torch.zeros((), dtype=torch.float64), 0
            for batch in map(make_batch, rows):
                logits = reference(input_ids=batch.input_ids).logits
                summed = summed + torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch.shift_labels.flatten(), reduction="sum"
                )
                count += int((batch.shift_labels != -100).sum())
            optimizer.param_groups[0]["lr"] = 1e-2 * factor
            optimizer.zero_grad()
            (summed / count).backward()
            optimizer.step()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    assert losses(trainer.folder)[1] == pytest.approx((summed / count).item(), rel=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, dropout: float) -> None:
    whole, first, second = (Trainer(tmp_path / name) for name in ("whole", "split", "split"))
    model = make_model(dropout)
    whole(model, steps=8, validation=held_out, eval_steps=3)

    def stop_at_fifth_step(position: int, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(position)
        if len(seen) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with StopRequest() as stop:
        first(
            make_model(dropout),
            stream=RowStream(on_step=stop_at_fifth_step),
            stop=stop,
            validation=held_out,
            eval_steps=3,
        )
    assert stop.exit_code == 130
    checkpoint = newest(first.folder)
    # The signal came before a micro-batch of step 5, which is left out: the position is that of step 4.
    assert checkpoint.step == 4
    resumed = LlamaForCausalLM.from_pretrained(checkpoint.model_dir)
    torch.manual_seed(999)
    second(load_model(str(checkpoint.model_dir)), resume_from=checkpoint, validation=held_out, eval_steps=3)
    assert resumed.config.attention_dropout == dropout

    def comparable(folder: Path) -> list[dict[str, float]]:
        skip = ("tokens_per_s", "peak_mem_gib")
        return [{k: v for k, v in record.items() if k not in skip} for record in read_records(folder / "metrics.jsonl")]

    assert comparable(tmp_path / "split") == comparable(tmp_path / "whole")
    final = newest(tmp_path / "split"), newest(tmp_path / "whole")
    ours, theirs = (load_model(str(checkpoint.model_dir)).state_dict() for checkpoint in final)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(a, b) for a, b in zip(*(c.optimizer_tensors().values() for c in final), strict=True))


def test_metrics_after_the_checkpoint_are_cut_on_resume(trainer: Trainer) -> None:
    trainer(make_model(), steps=6, save_steps=4, save_total_limit=0)
    metrics = trainer.folder / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 7, "lo')  # torn by a crash
    checkpoint = find_checkpoint(RunDirectory(trainer.folder), str(trainer.folder / "checkpoints/step-000004"), print)
    trainer(load_model(str(checkpoint.model_dir)), steps=6, resume_from=checkpoint)
    assert [record["step"] for record in read_records(metrics)] == [1, 2, 3, 4, 5, 6]


def test_evaluation_leaves_training_as_it_is(tmp_path: Path) -> None:
    plain, evaluated = Trainer(tmp_path / "a"), Trainer(tmp_path / "b")
    plain(make_model(dropout=0.3))
    evaluated(make_model(dropout=0.3), validation=held_out, eval_steps=1)
    assert losses(plain.folder) == losses(evaluated.folder)


def test_evaluation_is_the_mean_over_all_tokens(trainer: Trainer) -> None:
    model = make_model().double()
    with Float64():
        result = trainer(model, steps=1, validation=held_out)
    with Float64(), torch.no_grad():
        parts = [
            torch.nn.functional.cross_entropy(
                model(input_ids=batch.input_ids).logits.flatten(0, 1), batch.shift_labels.flatten(), reduction="none"
            )[batch.shift_labels.flatten() != -100]
            for batch in held_out()
        ]
    assert result.eval_loss == pytest.approx(torch.cat(parts).mean().item(), rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("steps", [4, 2], ids=["in the run", "of the last step"])
def test_an_interrupted_evaluation_is_made_up_for(tmp_path: Path, steps: int) -> None:
    whole, split = Trainer(tmp_path / "whole"), Trainer(tmp_path / "split")
    whole(make_model(), steps=steps, validation=held_out, eval_steps=2)

    def interrupted() -> Iterator[MicroBatch]:
        for batch in held_out():
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with StopRequest() as stop:
        split(make_model(), steps=steps, validation=interrupted, eval_steps=2, stop=stop)
    assert stop.exit_code == 143
    checkpoint = newest(split.folder)
    assert checkpoint.step == 2
    assert checkpoint.state["progressed"]["eval_due"] is True
    split(load_model(str(checkpoint.model_dir)), steps=steps, validation=held_out, eval_steps=2, resume_from=checkpoint)
    assert newest(split.folder).state["progressed"] == newest(whole.folder).state["progressed"]
    evals = [[r for r in read_records(t.folder / "metrics.jsonl") if "eval_loss" in r] for t in (whole, split)]
    assert evals[0] == evals[1]


def test_an_interrupted_evaluation_keeps_the_metric_of_its_step(trainer: Trainer) -> None:
    def interrupted() -> Iterator[MicroBatch]:
        for batch in held_out():
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    settings = {"steps": 2, "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "loss"}
    with StopRequest() as stop:
        trainer(make_model(), validation=interrupted, stop=stop, **settings)
    checkpoint = newest(trainer.folder)
    model = load_model(str(checkpoint.model_dir))
    trainer(model, validation=held_out, resume_from=checkpoint, **settings)
    checkpoint = newest(trainer.folder)
    assert checkpoint.state["progressed"]["eval_due"] is False
    manifest = read_manifest(checkpoint.path)
    assert (manifest.metric_name, manifest.metric) == ("loss", losses(trainer.folder)[-1])
    assert "unknown metric" not in trainer.output.getvalue()


def test_a_metric_that_a_skipped_step_has_not_is_not_unknown(trainer: Trainer) -> None:
    model = make_model()
    factors = iter([float("inf")] + 9 * [1.0])
    model.model.norm.weight.register_hook(lambda gradient: gradient * next(factors))
    common = {"on_nan": "skip", "max_skips": 1, "validation": held_out, "eval_steps": 1}
    trainer(model, stream=RowStream(accumulation=1), steps=2, metric_for_best_model="loss", **common)
    assert "unknown metric" not in trainer.output.getvalue()
    factors = iter([float("inf")] + 9 * [1.0])
    trainer(model, stream=RowStream(accumulation=1), steps=2, metric_for_best_model="los", **common)
    assert "did you mean 'loss'" in trainer.output.getvalue()


EARLY: dict[str, Any] = {"eval_steps": 1, "metric_for_best_model": "eval_loss", "validation": held_out}


@pytest.mark.full
def test_a_patience_of_zero_goes_on_after_an_early_end(trainer: Trainer) -> None:
    early = trainer(make_model(), steps=4, **EARLY, early_stopping_patience=1, early_stopping_threshold=100.0)
    assert (early.step, early.ended_early) == (2, True)
    checkpoint = newest(trainer.folder)
    whole = trainer(load_model(str(checkpoint.model_dir)), steps=4, resume_from=checkpoint, **EARLY)
    assert (whole.step, whole.ended_early) == (4, False)


@pytest.mark.full
@pytest.mark.parametrize("change", [{"greater_is_better": True}, {"metric_for_best_model": "eval_other_loss"}])
def test_values_of_two_metrics_are_not_compared(trainer: Trainer, change: dict[str, Any]) -> None:
    settings = {**EARLY, "early_stopping_patience": 1, "early_stopping_threshold": 100.0}
    assert trainer(make_model(), steps=4, **settings).ended_early
    checkpoint = newest(trainer.folder)
    model = load_model(str(checkpoint.model_dir))
    resumed = trainer(model, steps=4, resume_from=checkpoint, **{**settings, "early_stopping_patience": 2, **change})
    assert resumed.step == 4
    said = " ".join(trainer.output.getvalue().split())
    assert "is now the best, before it was the smallest eval_loss" in said
    steps = {int(step) for _, step in resumed.best_evaluations}
    assert steps <= {3, 4}, "earlier evaluations were ranked by another metric"
    assert resumed.ranked_by == change.get("metric_for_best_model", "eval_loss")


def test_only_the_newest_checkpoints_are_kept(trainer: Trainer) -> None:
    trainer(make_model(), steps=7, save_steps=2, save_total_limit=2)
    assert sorted(path.name for path in (trainer.folder / "checkpoints").iterdir()) == ["step-000006", "step-000007"]


def test_a_finished_run_is_left_as_it_is(trainer: Trainer) -> None:
    done = trainer(make_model(), steps=3, validation=held_out)
    checkpoint = newest(trainer.folder)
    before = (trainer.folder / "metrics.jsonl").read_text()
    again = trainer(load_model(str(checkpoint.model_dir)), steps=3, resume_from=checkpoint, validation=held_out)
    assert again == done
    assert (trainer.folder / "metrics.jsonl").read_text() == before


def test_a_loss_that_is_not_finite_is_refused_before_the_weights_change(trainer: Trainer) -> None:
    model = make_model()
    trainer(model, steps=2, save_steps=1)
    before = weights(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    before = weights(model)
    bad = replace(make_batch(1), input_ids=torch.full((1, 12), 5))
    with pytest.raises(NonFiniteError) as caught:
        trainer(model, stream=RowStream(rows={1: bad}))
    assert "step 1" in caught.value.what
    assert caught.value.where == "rows.jsonl:2"
    after = weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before if "embed" not in name)
    assert newest(trainer.folder).step == 2


def test_a_gradient_that_is_not_finite_is_refused_before_the_weights_change(trainer: Trainer) -> None:
    model = make_model()
    model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(model)
    with pytest.raises(NonFiniteError, match="gradient norm of step 1"):
        trainer(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_out_of_memory_names_the_batch_and_what_to_change(trainer: Trainer) -> None:
    """A real one: the logits of such a long batch would take petabytes."""
    long = torch.zeros(1, dtype=torch.long).expand(1, 1 << 46)
    batch = MicroBatch(long, long, long, ("rows.jsonl:1",))

    class Hungry(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, input_ids: torch.Tensor, **_: object) -> object:
            return torch.empty(input_ids.shape, dtype=torch.float64)

    stream = RowStream(num_rows=1, accumulation=1, rows={0: replace_counts(batch)})
    with pytest.raises(OutOfMemoryError) as caught:
        trainer(Hungry(), stream=stream)
    assert "step 1" in caught.value.what
    assert f"1 x {1 << 46:,} tokens" in caught.value.what
    assert caught.value.where == "rows.jsonl:1"
    assert "chunk_size" in caught.value.fix


def replace_counts(batch: MicroBatch) -> MicroBatch:
    """Return the batch with small labels and mask, so that counting tokens does not run out of memory."""
    short = torch.zeros(1, 1, dtype=torch.long)
    return replace(batch, attention_mask=short, shift_labels=short)


def test_resume_refuses_the_optimizer_of_another_model(trainer: Trainer) -> None:
    trainer(make_model(), steps=1)
    other = make_model()
    other.lm_head.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        trainer(other, steps=2, resume_from=newest(trainer.folder))


def test_a_run_whose_steps_were_all_skipped_is_resumed(trainer: Trainer) -> None:
    """Its checkpoint has no optimizer states, because the weights were never updated."""
    model = make_model()
    hook = model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    trainer(model, steps=1, on_nan="skip", max_skips=1)
    hook.remove()
    checkpoint = newest(trainer.folder)
    assert checkpoint.optimizer_tensors() == {}
    before = weights(model)
    trainer(model, steps=3, resume_from=checkpoint)
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {name.rpartition("/")[0] for name in newest(trainer.folder).optimizer_tensors()} == {
        name for name, _ in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_weight_without_gradient_has_no_state_until_it_is_updated(tmp_path: Path, name: str) -> None:
    """The embeddings had no gradient before the checkpoint."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))

    def backend() -> LocalBackend:
        return LocalBackend(model, build_optimizer(OptimChoice(name, 0.1), model.named_parameters()))

    saving = backend()
    model[1](torch.ones(1, 3)).sum().backward()
    saving.step(0.1)
    write_slices(tmp_path, saving.optimizer_slices(), 0, has_whole_tensors=True)
    resumed = backend()
    resumed.load_optimizer_slices(SliceReader(tmp_path))
    assert [bool(resumed.optimizer.state[p]) for p in model.parameters()] == [False, True, True]
    before = model[0].weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    resumed.step(0.1)
    assert not torch.equal(model[0].weight, before)


def test_frozen_parameters_stay_frozen(trainer: Trainer) -> None:
    model = make_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = weights(model)
    trainer(model, steps=2)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert "model.embed_tokens.weight" not in changed
    assert len(changed) == len(before) - 1


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 2000.0), (torch.bfloat16, 0.03), (torch.float32, 0.03)])
@pytest.mark.parametrize("kind", ["after", "backward"])
def test_the_norm_of_narrow_gradients_is_that_of_float32(dtype: torch.dtype, value: float, kind: str) -> None:
    """A float16 norm above 65,504 would be infinite, and a bfloat16 one has 8 bits."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5))).to(dtype)
    grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(n)) * value for n in range(5)]
    optimizer = build_optimizer(OptimChoice("adamw", 1e-3), model.named_parameters())
    backend: LocalBackend = LocalBackend(model, optimizer)
    if kind == "backward":
        backend = InBackwardBackend(model, optimizer, 1.0)
        backend.begin_step(1e-3, lambda: None)
    with backend.micro_batch_context(last=True):
        loss = sum((p * grad.to(dtype)).float().sum() for p, grad in zip(model.parameters(), grads, strict=True))
        loss.backward()
    want = torch.cat([grad.to(dtype).double().flatten() for grad in grads]).norm().item()
    assert backend.clip_gradients(1.0) == pytest.approx(want, rel=1e-5)
    backend.close()


def test_bf16_trains_float32_weights_under_autocast(trainer: Trainer) -> None:
    model = make_model()
    result = trainer(model, steps=20, autocast_dtype="bfloat16")
    assert result.last_loss < result.first_loss
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def changed(before: list[torch.Tensor], model: nn.Module) -> float:
    pairs = list(zip(before, model.parameters(), strict=True))
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["after", "backward", "host", "host, backward"])
def test_the_share_is_the_count(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 40)).to(dtype)
    optimizer = build_optimizer(OptimChoice("adamw", 1e-5), model.named_parameters())
    if "host" in kind:
        optimizer = HostOptimizer(optimizer)
    backend = InBackwardBackend(model, optimizer, 0.0) if "backward" in kind else LocalBackend(model, optimizer)
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        backend.begin_step(1e-5, lambda: None)
        watched = ChangedWeights(backend.updated_weights())
        with backend.micro_batch_context(last=True):
            backend.backward(model(torch.randn(8, 60, dtype=dtype)).float().square().mean())
        backend.clip_gradients(0.0)
        backend.step(1e-5)
        share = watched.changed_fraction(World())
        assert share == pytest.approx(changed(before, model), abs=1e-12)
        assert share > 0.95 if dtype == torch.float32 else share < 0.5
    backend.close()


def test_of_large_weights_every_nth_value_is_compared_and_small_ones_whole() -> None:
    large, small = torch.zeros(2 * MAX_COMPARED_VALUES), torch.zeros(MAX_FULLY_COMPARED_VALUES)
    watched = ChangedWeights([large, small, torch.zeros(0)])
    large[: MAX_COMPARED_VALUES // 2] = 1  # a quarter
    small[7] = 1
    want = (MAX_COMPARED_VALUES / 2 + 1) / (2 * MAX_COMPARED_VALUES + MAX_FULLY_COMPARED_VALUES)
    assert watched.changed_fraction(World()) == pytest.approx(want, rel=1e-5)
    held = sum(x.nbytes for x in watched._before)
    assert held < 4 * (MAX_COMPARED_VALUES + MAX_FULLY_COMPARED_VALUES)
    only_small = ChangedWeights([large, small])
    small[8] = 1
    assert only_small.changed_fraction(World()) == 1 / (2 * MAX_COMPARED_VALUES + MAX_FULLY_COMPARED_VALUES)


def test_without_weights_nothing_moves() -> None:
    assert ChangedWeights([]).changed_fraction(World()) == 0.0


def test_the_note_says_what_to_change() -> None:
    narrow = describe_unchanged_weights(0.031, {torch.bfloat16}, 1e-5)
    assert "changed 3.1% of the trained weights" in narrow
    assert "weight_rounding: stochastic" in narrow
    assert "raise learning_rate" in describe_unchanged_weights(0.0, {torch.float32}, 1e-12)
