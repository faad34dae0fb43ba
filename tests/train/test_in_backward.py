"""The optimizer in the backward takes the ordinary steps bit for bit, and frees gradients one by one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tests.exactness.families import batch, build
from torch import Tensor, nn

from streamtune.errors import NonFiniteError, OutOfMemoryError
from streamtune.train import Backend, HostOptimizer, InBackwardBackend, LocalBackend
from streamtune.train.loop import make_replay


def made(kind: str, max_norm: float, **config: Any) -> tuple[nn.Module, Backend]:
    model = build("qwen3", attention_dropout=0.3, **config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    if kind == "after":
        return model, LocalBackend(model, optimizer)
    if kind == "after, on host":
        return model, LocalBackend(model, HostOptimizer(optimizer))
    if kind == "in, on host":
        return model, InBackwardBackend(model, HostOptimizer(optimizer), max_norm)
    return model, InBackwardBackend(model, optimizer, max_norm, lagged=kind == "lagged")


def take(model: nn.Module, backend: Backend, micro_batches: int, stop: Any = None) -> float:
    total = 0.0
    for index in range(micro_batches):
        with backend.micro_batch_context(last=index == micro_batches - 1):
            loss = model(**batch("masked" if index else "right")).loss / micro_batches
            backend.backward(loss)
            total += loss.item()
    return total


def trained(kind: str, max_norm: float, micro_batches: int, **config: Any) -> tuple[list[float], dict[str, Tensor]]:
    model, backend = made(kind, max_norm, **config)
    found = []
    torch.manual_seed(5)
    for step in range(4):
        gradients = partial(take, model, backend, micro_batches)
        rate = 1e-2 / (step + 1)
        backend.begin_step(rate, make_replay(gradients))
        found.append(gradients())
        found.append(backend.clip_gradients(max_norm))
        backend.step(rate)
        assert all(p.grad is None for p in model.parameters())
    found.append(torch.rand(()).item())
    backend.close()
    return found, model.state_dict()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("max_norm", "micro_batches"), [(0.0, 1), (0.5, 1), (0.5, 3), (0.0, 3), (1e9, 1)])
def test_weights_are_those_of_the_ordinary_steps(max_norm: float, micro_batches: int, tied: bool) -> None:
    (want, weights), (got, own) = (
        trained(kind, max_norm, micro_batches, tie_word_embeddings=tied) for kind in ("after", "in")
    )
    assert got == want
    assert all(torch.equal(weights[name], own[name]) for name in weights)


@pytest.mark.parametrize("kind", ["after, on host", "in, on host"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_an_optimizer_on_the_host_takes_the_ordinary_steps(kind: str, max_norm: float) -> None:
    want, weights = trained("after", max_norm, 2)
    got, own = trained(kind, max_norm, 2)
    assert got == want
    assert all(torch.equal(weights[name], own[name]) for name in weights)


def test_an_optimizer_on_the_host_has_states_there_and_nothing_else() -> None:
    model, backend = made("after, on host", 0.5)
    take(model, backend, 1)
    backend.step(1e-2)
    assert isinstance(backend, LocalBackend)
    optimizer = backend.optimizer
    assert isinstance(optimizer, HostOptimizer)
    stand_ins = [p for group in optimizer.inner.param_groups for p in group["params"]]
    assert len(stand_ins) == len(list(model.parameters()))
    assert all(p.numel() == 0 and p.grad is None and p.device.type == "cpu" for p in stand_ins)
    assert set(optimizer.state) == set(model.parameters())
    assert {x.device.type for state in optimizer.state.values() for x in state.values()} == {"cpu"}
    backend.reset_optimizer()
    assert len(optimizer.state) == 0


def test_two_gradients_of_a_layer_at_most_are_there() -> None:
    model, backend = made("in", 0.0)
    held: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(p.grad is not None for p in model.parameters()))
        )
    backend.begin_step(1e-2, lambda: None)
    take(model, backend, 1)
    backend.step(1e-2)
    assert max(held) <= 1
    backend.close()


def test_a_loss_that_is_not_finite_steps_nothing_and_a_gradient_that_is_not_ends_the_run() -> None:
    model, backend = made("in", 0.0)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    backend.begin_step(1e-2, lambda: None)
    with backend.micro_batch_context(last=True):
        backend.backward(model(**batch("right")).loss * float("nan"))
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    backend.drop_gradients()
    backend.begin_step(1e-2, lambda: None)
    with backend.micro_batch_context(last=True):
        loss = model(**batch("right")).loss
        backend.backward(loss + 0 * (loss - loss.detach()).sqrt())  # the root's gradient at 0 is infinite, times 0
    with pytest.raises(NonFiniteError, match="weights were already updated"):
        backend.clip_gradients(0.0)


@pytest.mark.parametrize("kind", ["in", "lagged"])
def test_one_loss_of_several_that_is_not_finite_steps_nothing(kind: str) -> None:
    model, backend = made(kind, 0.5 if kind == "lagged" else 0.0)
    backend.load_state({"norm_before": 1.0})
    before = {name: x.clone() for name, x in model.state_dict().items()}
    backend.begin_step(1e-2, lambda: None)
    for index, factor in enumerate((float("nan"), 1.0)):
        with backend.micro_batch_context(last=index == 1):
            backend.backward(model(**batch("right")).loss * factor)
    backend.drop_gradients()
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    backend.close()


def test_a_step_is_not_repeated_once_some_weights_were_stepped() -> None:
    model, backend = made("in", 0.0)
    backend.begin_step(1e-2, lambda: None)
    take(model, backend, 1)
    with pytest.raises(OutOfMemoryError, match="already updated some weights"):
        backend.drop_gradients()


def test_nothing_is_stepped_while_the_norm_is_measured() -> None:
    model, backend = made("in", 1.0)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    backend.begin_step(1e-2, lambda: None)
    take(model, backend, 1)
    assert backend.clip_gradients(1.0) > 0
    backend.drop_gradients()  # such as for on_nan: skip
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def plain_lagged(max_norm: float, micro_batches: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train with torch only: each gradient is clipped by the previous norm, the first by its own."""
    model = build("qwen3", attention_dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    before, norms = None, []
    torch.manual_seed(5)
    for step in range(steps):
        for index in range(micro_batches):
            (model(**batch("masked" if index else "right")).loss / micro_batches).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm if before is None else before)
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
        before = norm
        norms.append(norm.item())
    return norms, model.state_dict()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_clipped_by_the_norm_of_the_step_before(micro_batches: int) -> None:
    norms, weights = plain_lagged(0.5, micro_batches, 4)
    got, own = trained("lagged", 0.5, micro_batches)
    assert got[1:-1:2] == norms
    assert all(torch.equal(weights[name], own[name]) for name in weights)
    assert got != trained("in", 0.5, micro_batches)[0]


def test_the_norm_of_the_step_before_takes_one_backward_and_is_in_the_state() -> None:
    model, backend = made("lagged", 0.5)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    norms = []
    for step in range(3):
        backend.begin_step(1e-2, partial(take, model, backend, 1))
        take(model, backend, 1)
        norms.append(backend.clip_gradients(0.5))
        backend.step(1e-2)
        assert len(calls) == step + 2  # the first step has two
        assert backend.clip_norm == norms[max(0, step - 1)]
        assert backend.state() == {"norm_before": norms[-1]}
    _, other = made("lagged", 0.5)
    other.load_state(backend.state())
    other.begin_step(1e-2, lambda: None)
    assert other.clip_norm == norms[-1]
    other.reset_optimizer()  # another loss comes
    assert other.state() == {}


@pytest.mark.parametrize("kind", ["in", "in, on host"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_thread_and_the_backward_step_beside_each_other(
    max_norm: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an accelerator, the thread updates some weights, and the backward others in between."""
    want, weights = trained("after", max_norm, 1)
    made_before = InBackwardBackend.__init__

    def with_thread(self: InBackwardBackend, *args: Any, **options: Any) -> None:
        made_before(self, *args, **options)
        self._thread, step = ThreadPoolExecutor(1), self.optimizer.step

        def watched() -> None:
            chosen = [list(group["params"]) for group in self.optimizer.param_groups]
            time.sleep(1e-3)  # the other one has the time to change them
            assert [list(map(id, group["params"])) for group in self.optimizer.param_groups] == [
                list(map(id, each)) for each in chosen
            ]
            step()

        self.optimizer.step = watched  # type: ignore[method-assign, assignment]

    monkeypatch.setattr(InBackwardBackend, "__init__", with_thread)
    monkeypatch.setattr(InBackwardBackend, "_is_updated_in_thread", lambda self, parameter: parameter.dim() > 1)
    got, own = trained(kind, max_norm, 1)
    assert got == want
    assert all(torch.equal(weights[name], own[name]) for name in weights)
