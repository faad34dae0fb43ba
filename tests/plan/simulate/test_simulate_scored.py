"""Simulated steps that score completions equal real ones, and one ordinary row replaces many chunks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from streamtune.engine import decoder_layers, stream
from streamtune.errors import ArgumentError
from streamtune.ops import Divergence, TokenLoss
from streamtune.plan.simulate import LiveBytes, Mode, Workload, simulate
from streamtune.plan.simulate.memory import model_bytes
from streamtune.plan.simulate.scored import PlainScores, Scored, Trees, use_checkpointing
from streamtune.plan.simulate.workload import TeacherShape
from streamtune.recipe.schema import GrpoRecipe
from streamtune.schedule import Schedule
from streamtune.tasks.grpo.objective import DistillationObjective
from streamtune.tasks.random_batches import RandomTokens
from streamtune.train import ModelReference
from tests.plan.simulate.test_simulate import BASE, build, build_adapted, schedule_of
from tests.precision_kit import EXACT, Float64, in_float64

PAIR: Trees = ((150, (100, 120)),)
SHAPES: dict[str, Trees] = {"pair": PAIR, "two pairs": ((60, (50, 70)), (100, (40, 64)))}


def workload(make: Callable[[str], Any], scored: Scored, mode: Mode = "stream", **changes: Any) -> Workload:
    return Workload(
        partial(make, "meta"),
        256,
        mode=mode,
        completions=lambda length, size: scored,
        **{"device_type": "cpu", **changes},
    )


def measured(make: Callable[[str], Any], mode: Mode, schedule: Schedule, scored: Scored) -> int:
    """Return weight bytes and live bytes of a real CPU step; the reference is the model without adapters."""
    model = make("cpu").train()
    if mode == "checkpoint":
        use_checkpointing(model)
    scorer: Any = stream(model, schedule=schedule) if mode == "stream" else PlainScores(model)
    batch = (scored if mode == "stream" else scored.as_separate_rows()).random_batch(
        model.config.vocab_size, torch.device("cpu")
    )
    given = {key: value for key, value in batch.items() if key != "count"}

    def step() -> None:
        if scored.forwards:
            without = model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()
            with torch.no_grad(), without:
                scorer.logprobs(**given)
            model.train()
        scorer.logprobs(**given, entropy=scored.entropy).logprobs.sum().backward()

    step()  # what is made once is there
    model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveBytes(model, decoder_layers(model)) as live:
        step()
    return model_bytes(model) + live.peak


@pytest.mark.quick("qwen3-plain chunks-pair")
@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("qwen3", "plain chunks", "pair"),
        ("qwen3", "two levels on host", "two pairs"),
        ("qwen3", "last layer whole", "pair"),
        ("lfm2", "attention kept", "two pairs"),
        ("lfm2", "host", "pair"),
    ],
)
def test_the_simulated_peak_is_the_one_measured(family: str, name: str, shape: str, tmp_path: Any) -> None:
    make, schedule = partial(build, family), schedule_of(name, tmp_path)
    scored = Scored(SHAPES[shape], forwards=1, entropy=shape == "pair")
    found = simulate(workload(make, scored), schedule)
    assert found.peak_bytes == pytest.approx(measured(make, "stream", schedule, scored), rel=0.01)
    assert sum(found.terms.values()) == found.peak_bytes == max(found.phases.values())
    assert found.phases["reference"] < found.peak_bytes


@pytest.mark.full
@pytest.mark.parametrize("mode", ["plain", "checkpoint", "stream"])
def test_so_it_is_with_a_row_for_each_completion(mode: Mode) -> None:
    make, scored = partial(build, "qwen3"), Scored(PAIR, share=False)
    found = simulate(workload(make, scored, mode), BASE).peak_bytes
    assert found == pytest.approx(measured(make, mode, BASE, scored), rel=0.01)


@pytest.mark.full
def test_so_it_is_with_adapters_that_are_switched_off_for_the_reference() -> None:
    make = partial(build_adapted, dtype=torch.float32, num_hidden_layers=2)
    scored = Scored(PAIR, forwards=1)
    found = simulate(workload(make, scored), BASE).peak_bytes
    assert found == pytest.approx(measured(make, "stream", BASE, scored), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [True, False], ids=str)
def test_so_it_is_with_the_divergence_from_a_teacher(share: bool, shape: str) -> None:
    """On-policy distillation: hidden states and logits of one chunk of both models, if the peak is in the head."""
    make, schedule = partial(build, "qwen3", vocab_size=20_011), replace(BASE, head_chunk_size=64)
    loss, scored = TokenLoss(divergence=Divergence("reverse")), Scored(SHAPES[shape], share)
    model: Any = make("cpu").train()
    teacher: Any = build("llama", "cpu", vocab_size=20_011, hidden_size=96, num_hidden_layers=1).requires_grad_(False)
    recipe = GrpoRecipe(model_name_or_path="x", datasets=[{"path": "x"}], loss_type="gkd", teacher="x")
    batch = RandomTokens(recipe, model).draw_policy_batch(recipe, scored)
    with stream(model, schedule=schedule) as handle, stream(teacher, schedule=schedule) as other:
        objective = DistillationObjective(handle, recipe, loss, ModelReference(teacher, other))

        def backward() -> None:
            objective.score(model, batch, objective.step_totals([batch])).total_loss.backward()

        backward()  # what is made once is there
        model.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes(torch.nn.ModuleList([model, teacher]), decoder_layers(model)) as live:
            backward()
    weights = [model_bytes(each) for each in (model, teacher)]
    beside = {"teacher": TeacherShape(96, 20_011, torch.float32), "reference_bytes": weights[1]}
    found = simulate(workload(make, scored, token_loss=loss, **beside), schedule)
    assert found.peak_bytes == pytest.approx(sum(weights) + live.peak, rel=0.01)
    assert found.terms["reference"] == weights[1]
    assert found.terms["head"] > found.peak_bytes / 4


WIDE = {
    "vocab_size": 20000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1 << 17,
}


@pytest.mark.full
@pytest.mark.parametrize("trees", [((5000, (5500, 6000)),), ((3900, (1600,) * 8),)])
@pytest.mark.parametrize("away", [{}, {"offload": "host", "stream_grads": True}])
def test_one_row_that_stands_for_many_chunks(
    trees: Trees, away: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, schedule = partial(build, "qwen3", dtype=torch.bfloat16, **WIDE), Schedule(chunk_size=1024, **away)
    step = workload(make, Scored(trees, forwards=1), device_type="cuda")
    whole = simulate(step, schedule, full=True)
    monkeypatch.setattr(sys.modules["streamtune.plan.simulate.simulate"], "MAX_CHUNKS_RUN", 4)
    told = simulate(step, schedule)
    assert told != whole
    assert told.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.03)
    assert told.host_bytes == pytest.approx(whole.host_bytes, rel=0.03)
    assert told.work.matmul_flops == pytest.approx(whole.work.matmul_flops, rel=0.01)
    assert told.work.attention_flops == pytest.approx(whole.work.attention_flops, rel=0.15)


@pytest.mark.full
def test_what_a_reference_adds() -> None:
    make = partial(build, "qwen3")
    alone, asked, half = (
        simulate(workload(make, Scored(PAIR, forwards=times)), BASE).work.matmul_flops for times in (0, 1, 0.5)
    )
    assert alone < half < asked < 1.4 * alone
    assert half == pytest.approx((alone + asked) / 2, rel=1e-6)
    step = workload(make, Scored(PAIR))
    beside = simulate(replace(step, reference_bytes=1 << 20), BASE)
    assert beside.peak_bytes == simulate(step, BASE).peak_bytes + (1 << 20)
    assert beside.terms["reference"] == 1 << 20


def test_a_shape_is_counted_right() -> None:
    shared = Scored(((3, (2, 4)), (0, (5,))))
    assert (shared.num_rows, shared.length, shared.num_targets, shared.num_completions) == (1, 14, 8, 3)
    assert shared.targets().tolist() == [[-100] * 3 + [0, -100] + [0, 0, 0, -100] + [0, 0, 0, 0, -100]]
    assert shared.num_unmasked_pairs == (3 * 4 // 2) + (2 * 3 + 3) + (4 * 3 + 10) + 15
    apart = shared.as_separate_rows()
    assert (apart.num_rows, apart.length, apart.num_targets) == (3, 7, 8)
    assert (apart.targets() == 0).sum(1).tolist() == [1, 3, 4]
    batch, rows = (each.random_batch(97, torch.device("cpu")) for each in (shared, apart))
    for each in (batch, rows):
        assert (each["targets"] != -100).sum() == each["count"] == 8
    assert batch["input_ids"][0, 3:5].tolist() == rows["input_ids"][0, 3:5].tolist()
    turns = Scored(((3, (2, 4)), (4, (5,))), common=(2, 0))
    assert turns.targets()[0, :9].tolist() == [-100, 0, 0, 0, -100, 0, 0, 0, -100]
    assert (turns.num_targets, turns.as_separate_rows().num_targets) == (2 + 1 + 3 + 4, 2 * 2 + 1 + 3 + 4)
    assert (turns.as_separate_rows().targets() == 0).sum(1).tolist() == [3, 5, 4]
    for wrong in ({"trees": ((3, (1,)),)}, {"trees": ((3, (2,)),), "common": (4,)}, {"common": (1, 1)}):
        with pytest.raises(ArgumentError):
            Scored(**{"trees": ((3, (2,)),), **wrong})


def test_plain_log_probabilities_are_the_streamed_ones() -> None:
    model: Any = in_float64(build("qwen3", "cpu"))
    batch = Scored(PAIR, share=False).random_batch(499, torch.device("cpu"))
    del batch["count"]
    with Float64():
        plain = PlainScores(model).logprobs(**batch, entropy=True, temperature=0.7)
    with Float64(), stream(model, schedule=BASE) as handle:
        streamed = handle.logprobs(**batch, entropy=True, temperature=0.7)
    torch.testing.assert_close(plain.logprobs, streamed.logprobs, rtol=EXACT, atol=0)
    assert plain.entropy is not None
    assert streamed.entropy is not None
    torch.testing.assert_close(plain.entropy, streamed.entropy.detach(), rtol=EXACT, atol=0)
    with pytest.raises(ArgumentError, match="shared prompts need a streamed model"):
        PlainScores(model).logprobs(**Scored(PAIR).random_batch(499, torch.device("cpu")))
