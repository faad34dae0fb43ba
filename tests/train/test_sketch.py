"""The sketch of a row is its projected gradient, as plain autograd computes it, and changes nothing in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.exactness.families import VOCAB, build
from tests.precision_kit import Float64, assert_as_precise, in_float64
from torch import Tensor, nn

from streamtune.data import Tree
from streamtune.engine import decoder_layers, stream
from streamtune.errors import UnsupportedModelError
from streamtune.ops import TokenLoss
from streamtune.plan.simulate.memory import LiveBytes
from streamtune.schedule import Schedule
from streamtune.tasks.preference import batch_trees
from streamtune.train import MicroBatch, SupervisedObjective, TreeBatch
from streamtune.train.sketch import CompletionGradient, CountSketch, RowSketch, adam_step, value_projection_weights

SCHEDULES = {
    "layers": Schedule(chunk_size=8, head_chunk_size=5),
    "chunks": Schedule(chunk_size=8, head_chunk_size=5, order="chunk"),
    "two levels": Schedule(chunk_size=8, levels=2),
    "on the host": Schedule(chunk_size=8, weights="host"),
}
CPU = torch.device("cpu")


def a_row(length: int = 37, seed: int = 1) -> MicroBatch:
    """Return a row whose first third is not trained."""
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = labels[:, : length // 3] = -100
    return MicroBatch(ids, torch.ones_like(ids), labels, ("rows.jsonl:1",))


def plain_gradient(model: Any, row: MicroBatch) -> Tensor:
    """Return the gradient ``[n]`` of the row's mean loss for the sketch's weights, by plain autograd."""
    weights = list(value_projection_weights(decoder_layers(getattr(model, "base_model", model))).values())
    model.eval()
    logits = model(input_ids=row.input_ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[0], row.shift_labels[0], ignore_index=-100)
    found = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights)])
    model.train()
    return found


def adapted(family: str) -> Any:
    model: Any = get_peft_model(
        build(family, num_hidden_layers=3), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def sketch_of(model: Any, handle: Any, **more: Any) -> RowSketch:
    return RowSketch(model, handle, SupervisedObjective(handle, **more), device=CPU, size=64, seed=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "gpt2", "mixtral", "adapters"])
def test_it_is_the_projected_gradient_of_plain_autograd(family: str, schedule: str) -> None:
    model = adapted("qwen3") if family == "adapters" else build(family)
    row = a_row()
    plain = plain_gradient(model, row)
    with Float64():
        truth = plain_gradient(in_float64(model), row)
    before = [parameter.requires_grad for parameter in model.parameters()]
    with stream(model, schedule=SCHEDULES[schedule]) as handle:
        sketch = sketch_of(model, handle)
        found = sketch(row)
        assert found.shape == (64,)
        assert torch.equal(found, sketch(row)), "dropout is off"
        assert_as_precise(found, sketch.project(plain), sketch.project(truth), family)
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert model.training


def test_gradients_and_hooks_and_the_random_state_are_left_alone() -> None:
    model = build("qwen3")
    weight: Any = model.get_parameter("model.layers.1.self_attn.v_proj.weight")
    weight.grad = torch.ones_like(weight)
    called: list[Any] = []
    weight.register_post_accumulate_grad_hook(called.append)
    state = torch.get_rng_state()
    with stream(model, chunk_size=8) as handle:
        sketch_of(model, handle)(a_row())
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in model.parameters() if p is not weight)
    assert not called
    assert torch.equal(torch.get_rng_state(), state)


def test_it_is_of_the_loss_that_is_trained() -> None:
    """A focal loss has another gradient; a row of weight 0 has none; another weight alone changes nothing."""
    model, row = build("qwen3"), a_row()
    with stream(model, chunk_size=8) as handle:
        plain = sketch_of(model, handle)
        focal = sketch_of(model, handle, loss=TokenLoss("focal", 2.0))
        assert float((focal(row) - plain(row)).norm()) > 0.05 * float(plain(row).norm())
        weighed = MicroBatch(**{**vars(row), "weights": torch.full(row.shift_labels.shape, 3.0)})
        torch.testing.assert_close(plain(weighed), plain(row), rtol=1e-4, atol=1e-6)
        nothing = MicroBatch(**{**vars(row), "weights": torch.zeros(row.shift_labels.shape)})
        assert torch.equal(plain(nothing), torch.zeros(64))


def test_with_moments_it_is_the_step_that_adam_would_take() -> None:
    """Compared with how ``torch.optim.AdamW`` changes the weight, in fp64."""
    generator = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.randn(6, 7, dtype=torch.float64, generator=generator))
    optimizer = torch.optim.AdamW([weight], lr=0.5, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn(6, 7, dtype=torch.float64, generator=generator)
        optimizer.step()
    grad = torch.randn(6, 7, dtype=torch.float64, generator=generator)
    kept = {key: value.clone() for key, value in optimizer.state[weight].items()}
    expected = adam_step(grad, kept, optimizer.param_groups[0])
    assert all(torch.equal(value, optimizer.state[weight][key]) for key, value in kept.items())
    before = weight.detach().clone()
    weight.grad = grad
    optimizer.step()
    torch.testing.assert_close((before - weight.detach()) / 0.5, expected, rtol=1e-9, atol=1e-12)
    assert adam_step(grad, {}, optimizer.param_groups[0]) is grad


def test_moments_of_the_run_scale_the_sketch() -> None:
    model, row = build("qwen3"), a_row()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with stream(model, chunk_size=8) as handle:
        sketch = sketch_of(model, handle)
        plain = sketch(row)
        sketch.optimizer = optimizer
        assert torch.equal(sketch(row), plain), "there are no moments before the first step"
        for seed in (11, 12):
            other = a_row(seed=seed)
            model(input_ids=other.input_ids, labels=other.input_ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        grad = plain_gradient_of(sketch, model, row)
        weight = next(iter(sketch.weights.values()))
        scaled = adam_step(grad.view_as(weight), optimizer.state[weight], optimizer.param_groups[0])
        torch.testing.assert_close(sketch(row), sketch.project(scaled.flatten()), rtol=1e-3, atol=1e-4)
        assert float((sketch(row) / sketch(row).norm() - plain / plain.norm()).norm()) > 0.1


def plain_gradient_of(sketch: RowSketch, model: Any, row: MicroBatch) -> Tensor:
    """Return the gradient ``[n]`` by the streamed model's ordinary backward."""
    model(input_ids=row.input_ids, labels=row.shift_labels, shift_labels=row.shift_labels).loss.backward()
    found = torch.cat([weight.grad.flatten() for weight in sketch.weights.values() if weight.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def test_a_projection_keeps_products_in_the_mean() -> None:
    """Over 400 draws: the mean product of two sketches, and the spread of a squared norm, about 2 / k."""
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    two = two + one
    draws = [CountSketch(1000, 128, seed) for seed in range(400)]
    products = torch.stack([project(one) @ project(two) for project in draws])
    want = one @ two
    assert abs(float(products.mean() - want)) < 4 * float(products.std()) / 20
    norms = torch.stack([project(one).norm() ** 2 for project in draws]) / one.norm() ** 2
    assert float(norms.var()) < 3 / 128
    assert torch.equal(CountSketch(1000, 128, 7)(one), CountSketch(1000, 128, 7)(one))
    few = CountSketch(5, 128, 7)
    assert few.size == 5
    assert float(few(one[:5]).norm()) == pytest.approx(float(one[:5].norm()))


def test_a_model_without_a_trained_value_projection_is_refused() -> None:
    model: Any = get_peft_model(build("qwen3"), LoraConfig(r=4, target_modules=["q_proj"]))
    with stream(model, chunk_size=8) as handle, pytest.raises(UnsupportedModelError, match="value projection") as error:
        sketch_of(model, handle)
    assert error.value.where == "select_rows"
    assert "lora_target" in error.value.fix


@pytest.mark.full
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("schedule", [Schedule(chunk_size=64), Schedule(chunk_size=64, levels=2)])
def test_it_holds_less_than_the_step_of_the_same_row(adapters: bool, schedule: Schedule) -> None:
    """It has no layer inputs and the gradient of only one weight, so a plan of the step covers it."""
    shape = {"num_hidden_layers": 4, "max_position_embeddings": 1024}
    model: Any = build("qwen3", **shape)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    row = a_row(512)
    with stream(model, schedule=schedule) as handle:
        sketch = sketch_of(model, handle)
        sketch(row)
        with LiveBytes(handle.model, handle.layers) as choosing:
            sketch(row)
        loss = sketch.objective.score(model, row, sketch.objective.step_totals([row])).total_loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        with LiveBytes(handle.model, handle.layers) as training:
            sketch.objective.score(model, row, sketch.objective.step_totals([row])).total_loss.backward()
    assert 0 < choosing.peak < training.peak


def a_completion(length: int = 21, prompt: int = 9) -> TreeBatch:
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(4)).tolist()
    tree = Tree(ids[:prompt], [ids[prompt:]], None, "rows.jsonl:1")
    return TreeBatch(**batch_trees([tree], pad_token_id=0, share=False))


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "adapters"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_norm_of_a_completion_is_that_of_plain_autograd(family: str, temperature: float) -> None:
    model: Any = adapted("qwen3") if family == "adapters" else build(family)
    batch = a_completion()

    def plain(model: Any) -> Tensor:
        weights = list(value_projection_weights(decoder_layers(getattr(model, "base_model", model))).values())
        model.eval()
        logits = model(input_ids=batch.input_ids, use_cache=False).logits / temperature
        loss = nn.functional.cross_entropy(logits[0], batch.shift_labels[0], ignore_index=-100, reduction="sum")
        found = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights)]).double().norm()
        model.train()
        return found.reshape(1)

    with Float64():
        truth = plain(in_float64(model))
    torch32 = plain(model)
    with stream(model, chunk_size=8) as handle:
        norm = CompletionGradient(model, handle, temperature=temperature, device=CPU)
        found = torch.tensor([norm(batch)], dtype=torch.float64)
    assert_as_precise(found, torch32, truth, family)
