"""All that a step holds is freed with its loss: nothing waits for Python's collector, which is off in these tests."""

from __future__ import annotations

import ast
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import streamtune
from streamtune import RouterLoss, Schedule, StreamHandle
from streamtune.engine import Branches, LossRequest
from streamtune.engine.evaluated import map_nested
from streamtune.ops import Divergence, TokenLoss
from tests.exactness.families import FAMILIES as FAMILY_SHAPES
from tests.exactness.families import SMALL, build

SOURCE = Path(streamtune.__file__).parent
LENGTH, VOCAB = 27, 90
FAMILIES = [
    "llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral", "granite", "gpt2", "gpt_neox", "phi", "starcoder2", "opt",
    "bloom", "gptj", "mamba2", "olmo2",
]  # fmt: skip
SCHEDULES = {
    "one chunk": Schedule(chunk_size=64),
    "device": Schedule(chunk_size=8),
    "host": Schedule(chunk_size=8, offload="host"),
    "by chunk": Schedule(chunk_size=8, order="chunk"),
    "weights on the host": Schedule(chunk_size=8, weights="host"),
}
SHAPES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0},
    "bloom": {"n_head": 4, "hidden_dropout": 0.0},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128},
    "phi": {"partial_rotary_factor": 0.5},
}


def model_of(family: str) -> Any:
    """Return a tiny model with the attention that its class has: some have no sdpa."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **SHAPES.get(family, FAMILY_SHAPES.get(family, {}))})
    return AutoModelForCausalLM.from_config(config).train()


def tokens(rows: int = 1) -> Tensor:
    return torch.randint(5, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.freeze()  # what there is already need not be looked at again
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


class Storages(TorchDispatchMode):
    """The storages of all tensors that operators returned inside, and which of them are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        map_nested(self._note, out)
        return out

    def _note(self, x: Any) -> None:
        if type(x) is Tensor:
            storage = x.untyped_storage()
            self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def alive(self) -> int:
        return sum(size for ref, size in self.made.values() if not ref.expired())


def assert_frees(step: Callable[[], None]) -> None:
    """Bytes and objects are the same after each step, and the collector finds nothing."""
    with collector_off():
        for _ in range(3):  # caches are filled, threads are started
            step()
        gc.collect()
        step()
        assert gc.collect() == 0, "a step leaves cycles"
        grown = []
        for _ in range(3):  # caches of abstract classes may be filled in one of them
            before = Counter(type(x).__name__ for x in gc.get_objects())
            step()
            grown.append(Counter(type(x).__name__ for x in gc.get_objects()) - before)
            del before
        least = min(grown, key=Counter.total)
        assert least.total() <= 8, least  # the counters' own
        with Storages() as storages:
            step()
            once = storages.alive()
            step()
            assert storages.alive() == once, "a step leaves tensors"


def test_no_function_inside_of_another_calls_itself() -> None:
    """Such a function is a cycle with its own cell, and holds whatever else it reads: masks, layers, a model."""
    rooms = [path for room in ("engine", "ops", "train", "programs/export") for path in (SOURCE / room).rglob("*.py")]
    assert len(rooms) > 80
    found = [
        f"{path.name}: {inner.name}"
        for path in rooms
        for outer in ast.walk(ast.parse(path.read_text()))
        if isinstance(outer, ast.FunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and inner is not outer
        if any(isinstance(name, ast.Name) and name.id == inner.name for name in ast.walk(inner))
    ]
    assert not found


def supervised(model: Any, ids: Tensor, **arguments: Any) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, **arguments).loss
        loss.backward()
        del loss
        model.zero_grad(set_to_none=True)

    return step


@pytest.mark.quick("qwen3", "gpt_neox", "gpt2")
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = model_of(family)
    with streamtune.stream(model, schedule=SCHEDULES["device"]):
        assert_frees(supervised(model, tokens()))


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str) -> None:
    model = build("granite").train()
    with streamtune.stream(model, schedule=SCHEDULES[schedule]):
        assert_frees(supervised(model, tokens()))


def scored(handle: StreamHandle, ids: Tensor) -> Tensor:
    scores = handle.logprobs(ids, ids.roll(-1, 1), entropy=True)
    return -(scores.logprobs * scores.logprobs.detach().exp()).sum()


def of_branches(handle: StreamHandle, ids: Tensor) -> Tensor:
    branches = Branches.of([(LENGTH - 12, [6, 6])])
    return handle.logprobs(ids, ids.roll(-1, 1), branches=branches).logprobs.sum()


def of_a_teacher(handle: StreamHandle, ids: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = handle.lazy_logits(ids, ids.roll(-1, 1))
    divergence = TokenLoss(divergence=Divergence())
    with handle.with_loss(LossRequest(divergence, teacher=teacher)):
        loss: Tensor = handle.model(input_ids=ids, labels=ids).loss
    return loss


def packed(handle: StreamHandle, ids: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])[None]
    loss: Tensor = handle.model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
    return loss


def with_hidden_states(handle: StreamHandle, ids: Tensor) -> Tensor:
    out = handle.model(input_ids=ids, labels=ids, output_hidden_states=True)
    return out.loss + out.hidden_states[1].square().mean()


def evaluated(handle: StreamHandle, ids: Tensor) -> Tensor:
    handle.model.eval()
    with torch.no_grad():
        out = handle.model(input_ids=ids, labels=ids)
        assert out.logits.argmax(-1).shape == ids.shape
        assert out.logits.sum().isfinite()
    loss: Tensor = handle.model.train()(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.full
@pytest.mark.parametrize("objective", [scored, of_branches, of_a_teacher, packed, with_hidden_states, evaluated])
def test_objectives(objective: Callable[[StreamHandle, Tensor], Tensor]) -> None:
    model, ids = build("qwen3").train(), tokens()
    with streamtune.stream(model, schedule=SCHEDULES["host"]) as handle:

        def step() -> None:
            loss = objective(handle, ids)
            loss.backward()
            del loss
            model.zero_grad(set_to_none=True)

        assert_frees(step)


@pytest.mark.full
def test_losses_of_routers() -> None:
    model = build("mixtral").train()
    with streamtune.stream(model, schedule=SCHEDULES["device"], router_loss=RouterLoss(0.1, 0.01)):
        assert_frees(supervised(model, tokens()))


def test_a_loss_that_is_dropped_without_its_backward() -> None:
    model, ids = build("gpt_neox").train(), tokens()
    with streamtune.stream(model, schedule=SCHEDULES["host"]):

        def step() -> None:
            loss = model(input_ids=ids, labels=ids).loss
            del loss

        assert_frees(step)


def test_embeddings_that_are_read_again() -> None:
    model, ids = build("gpt2").train(), tokens()
    reads: list[float] = []
    model.get_decoder().h[0].register_forward_pre_hook(lambda _, args: reads.append(args[0].mean().item()))
    with streamtune.stream(model, schedule=SCHEDULES["host"]):
        assert_frees(supervised(model, ids))
    assert reads


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [64, 160])
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_embeddings_are_resized_after_a_call(family: str, rows: int, tied: bool) -> None:
    """No node of an earlier call is left that holds the table's old shape."""
    model, ids = build(family, tie_word_embeddings=tied).train(), tokens() % 60
    with streamtune.stream(model, schedule=SCHEDULES["device"]), collector_off():
        supervised(model, ids)()
        model.resize_token_embeddings(rows, mean_resizing=False)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert model.get_input_embeddings().weight.grad.shape[0] == rows
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert (ours[name] - p.grad).norm() <= 2e-5 * p.grad.norm() + 1e-7, name
