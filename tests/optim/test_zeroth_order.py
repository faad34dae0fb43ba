"""Steps by losses alone: the paper's algorithm written out, bits that come back, and what rounding leaves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamtune
from streamtune import Schedule
from streamtune.engine import decoder_layers
from streamtune.errors import ArgumentError
from streamtune.models import add_lora
from streamtune.optim import OptimChoice, ZerothOrderSGD, build_optimizer, perturb_weights
from streamtune.optim.weight_step import flat_slices, seeded_generator
from streamtune.train import ZerothOrderBackend
from streamtune.train.objective import StepScore
from tests.exactness.families import build
from tests.precision_kit import Float64, in_float64

RATE, DECAY, EPS, STEPS = 5e-6, 0.1, 1e-3, 50


def tokens(seed: int) -> Tensor:
    return torch.randint(5, 90, (1, 21), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, step: int) -> Tensor:
    """Two micro-batches."""
    losses = [model(input_ids=ids, labels=ids).loss for ids in (tokens(2 * step), tokens(2 * step + 1))]
    return (losses[0] + losses[1]) / 2


def optimizer_of(model: nn.Module, **args: Any) -> ZerothOrderSGD:
    made = build_optimizer(
        OptimChoice("mezo", RATE, weight_decay=DECAY, seed=3, args={"eps": EPS, **args}), model.named_parameters()
    )
    assert isinstance(made, ZerothOrderSGD)
    return made


def train(model: Any, backend: ZerothOrderBackend, steps: range) -> list[float]:
    found = []
    for step in steps:

        def take(step: int = step) -> StepScore:
            loss = loss_of(model, step)
            backend.backward(loss)
            return StepScore(loss.item(), {})

        score = backend.compute_gradients(take)
        assert score is not None
        found.append(score.loss)
        backend.clip_gradients(0.0)
        backend.step(RATE)
    return found


def normals(weight: Tensor, *of: int) -> Tensor:
    """z of a weight, in its shape."""
    flat = weight.detach().reshape(-1)
    parts = []
    for span in flat_slices(flat):
        z = torch.empty(span.stop - span.start)
        parts.append(z.normal_(generator=seeded_generator(flat.device, *of, span.start)))
    return torch.cat(parts).view(weight.shape)


@torch.no_grad()
def algorithm_1(model: Any, directions: int) -> None:
    """The paper's algorithm: weights go to one side, to the other and back, in place. Normals are drawn in fp32."""
    weights = [(p, group["weight_decay"]) for group in optimizer_of(model).param_groups for p in group["params"]]
    wide = Float64() if weights[0][0].dtype == torch.float64 else nullcontext()
    for step in range(STEPS):
        update = [torch.zeros_like(p) for p, _ in weights]
        for direction in range(directions):
            z = [normals(p, 3, step, direction, number).to(p.dtype) for number, (p, _) in enumerate(weights)]
            losses = []
            for shift in (EPS, -2 * EPS):
                for (p, _), each in zip(weights, z, strict=True):
                    p.add_(each, alpha=shift)
                with wide:
                    losses.append(loss_of(model, step).item())
            slope = (losses[0] - losses[1]) / (2 * EPS)
            for (p, _), each, sums in zip(weights, z, update, strict=True):
                p.add_(each, alpha=EPS)
                sums.add_(each, alpha=slope / directions)
        for (p, decay), each in zip(weights, update, strict=True):
            p.sub_(each + decay * p, alpha=RATE)


def make(dtype: torch.dtype, adapted: bool) -> Any:
    model: Any = build("qwen3", num_hidden_layers=3, dtype=dtype)
    if adapted:
        model = add_lora(model, r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
    return model


def relative(a: nn.Module, b: nn.Module) -> dict[str, float]:
    """Distance of each trained weight, relative to its norm, or to 1 where it began at zero."""
    pairs = zip(a.named_parameters(), b.parameters(), strict=True)
    return {
        name: (torch.linalg.vector_norm((x - y).double()) / torch.linalg.vector_norm(y.double()).clamp(min=1)).item()
        for (name, x), y in pairs
        if x.requires_grad
    }


@pytest.mark.full
@pytest.mark.parametrize(
    "directions", [pytest.param(1, id="one direction"), pytest.param(3, id="three directions", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "adapted", [pytest.param(False, id="all weights"), pytest.param(True, id="adapters", marks=pytest.mark.full)]
)
def test_steps_are_those_of_the_paper(adapted: bool, directions: int) -> None:
    """In fp32, streamed, beside the algorithm on the plain model in fp64 and in fp32."""
    model, plain = make(torch.float32, adapted), make(torch.float32, adapted)
    truth = in_float64(plain)
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, head_chunk_size=4)) as handle:
        train(model, ZerothOrderBackend(model, optimizer_of(model, n=directions), handle.layers), range(STEPS))
    algorithm_1(plain, directions)
    algorithm_1(truth, directions)
    ours, torchs = relative(model, truth), relative(plain, truth)
    assert max(ours.values()) <= 1e-6
    assert max(ours.values()) <= 1.1 * max(torchs.values()) + 1e-7
    assert max(relative(model, make(torch.float32, adapted)).values()) > 1e-4


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_weights_have_their_bits_after_each_loss(family: str, dtype: torch.dtype) -> None:
    """Tied embeddings among them, and after a layer that raises an error; all of them were elsewhere inside."""
    model = build(family, dtype=dtype)
    layers = decoder_layers(model)
    optimizer, before = optimizer_of(model, eps=1e-2), bits(model)
    inside: list[dict[str, Tensor]] = []
    hook = layers[-1].register_forward_pre_hook(lambda *_: inside.append(bits(model)))
    with torch.no_grad(), perturb_weights(optimizer, model, layers, 0, 1):
        loss_of(model, 0)
    assert same(model, before)
    own = {name for name, p in model.named_parameters() if any(p is x for x in layers[-1].parameters())}
    first = {name for name, p in model.named_parameters() if any(p is x for x in layers[0].parameters())}
    moved = {name for name, x in inside[0].items() if not torch.equal(x, before[name])}
    # The hook of the model's own comes before the last layer is perturbed, and the first is back by then.
    assert not moved & (own | first)
    assert {name for name in before if "embed" in name or name.endswith("wte.weight")} <= moved
    hook.remove()

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    failing = next(
        module for module in layers[1].modules() if isinstance(module, nn.LayerNorm) or "Norm" in str(module)
    )
    hook = failing.register_forward_pre_hook(fail)
    with (
        pytest.raises(RuntimeError, match="no more"),
        torch.no_grad(),
        perturb_weights(optimizer, model, layers, 0, -1),
    ):
        loss_of(model, 0)
    hook.remove()
    assert same(model, before)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


def test_the_loss_is_that_of_perturbed_weights() -> None:
    model, other = build("qwen3"), build("qwen3")
    optimizer, second = optimizer_of(model), optimizer_of(other)
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, head_chunk_size=4)) as handle, torch.no_grad():
        with perturb_weights(optimizer, model, handle.layers, 1, -1):
            found = loss_of(model, 0)
        for parameter in other.parameters():
            second.perturb(parameter, 1, -1)
        assert found.item() == pytest.approx(loss_of(other, 0).item(), rel=1e-6)
        assert found.item() != pytest.approx(loss_of(model, 0).item(), rel=1e-6)


def test_a_bfloat16_weight_moves_where_its_perturbation_did_and_by_the_mean_of_its_steps() -> None:
    weight = nn.Parameter(torch.cat([torch.full((20_000,), x) for x in (0.02, 1.0)]).bfloat16())
    optimizer = ZerothOrderSGD([weight], lr=1e-3, eps=1e-3, seed=1)
    z = normals(weight, 1, 0, 0, 0)
    # Half a step of bfloat16 is 2^-9 below 1 and 2^-14 at 0.02: 5% of eps z are above the one, and below the other.
    assert optimizer.perturbed_value_fraction() == pytest.approx(0.5, abs=0.01)
    before = weight.detach().clone()
    optimizer.step([0.1])
    change = (weight - before).float()
    assert not change[20_000:][z[20_000:].abs() < 1.95].any()
    small, want = change[:20_000], -1e-4 * z[:20_000]
    step = 2**-13  # of bfloat16 at 0.02
    assert set(small.unique().tolist()) <= {k * step for k in range(-8, 9)}
    # A change is 1e-4 on average, less than a step: it is right in the mean.
    assert (small @ want / want.square().sum()).item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("dtype", "eps", "refused"),
    [(torch.bfloat16, 1e-3, False), (torch.bfloat16, 3e-5, True), (torch.float32, 1e-7, False)],
)
def test_an_eps_that_is_rounded_off_is_refused(dtype: torch.dtype, eps: float, refused: bool) -> None:
    model = build("qwen3", dtype=dtype)
    if refused:
        with pytest.raises(
            ArgumentError, match=r"eps 3e-05 is too small: rounding absorbs it in \d+% of the weights \(bfloat16\)"
        ):
            ZerothOrderBackend(model, optimizer_of(model, eps=eps), decoder_layers(model))
    else:
        ZerothOrderBackend(model, optimizer_of(model, eps=eps), decoder_layers(model))


@pytest.mark.full
def test_clipping_bounds_the_estimate_of_the_gradient_norm() -> None:
    """The root mean square of the slopes, which is right in the mean of many directions."""
    model = build("qwen3")
    backend = ZerothOrderBackend(model, optimizer_of(model, n=200), decoder_layers(model))

    def take() -> StepScore:
        loss = loss_of(model, 0)
        backend.backward(loss)
        return StepScore(loss.item(), {})

    backend.compute_gradients(take)
    estimate = backend.clip_gradients(0.0)
    assert backend.clip_gradients(estimate / 2) == estimate
    assert backend.clip_gradients(0.0) == pytest.approx(estimate / 2)
    loss_of(model, 0).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    assert estimate == pytest.approx(norm, rel=0.2)


def test_steps_that_go_on_from_a_count_are_the_same_to_the_bit() -> None:
    model = build("qwen3", dtype=torch.bfloat16)
    backend = ZerothOrderBackend(model, optimizer_of(model, eps=1e-2), decoder_layers(model))
    train(model, backend, range(3))
    other = build("qwen3", dtype=torch.bfloat16)
    other.load_state_dict(model.state_dict())
    again = ZerothOrderBackend(other, optimizer_of(other, eps=1e-2), decoder_layers(other))
    again.load_state(backend.state())
    assert train(model, backend, range(3, 6)) == train(other, again, range(3, 6))
    assert same(other, bits(model))
    assert not list(backend.optimizer_slices())
