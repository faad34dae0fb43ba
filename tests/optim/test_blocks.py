"""Blocks of weights, one after another: the steps of the badam package, and gradients for one block only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamtune
from streamtune import Schedule
from streamtune.errors import ArgumentError
from streamtune.optim.badam import BlockAdamW, SwitchMode, split_blocks, train_largest_block
from tests.exactness.families import build
from tests.precision_kit import Float64

NAMES = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "layers.2.a", "norm", "head"]


def test_blocks_are_layers_unless_more_is_asked_for() -> None:
    assert [block.name for block in split_blocks(NAMES)] == ["layers.0", "layers.1", "layers.2"]
    assert split_blocks(NAMES)[1].parameters == {"layers.1.a", "layers.1.b"}
    every = split_blocks(NAMES, include_embedding=True, include_lm_head=True, layers_per_block=2)
    assert [block.name for block in every] == ["embedding", "layers.0 to layers.1", "layers.2", "head"]
    assert every[-1].parameters == {"norm", "head"}
    by_pattern = split_blocks(NAMES, patterns=[r"\.a$", r"head"])
    assert [len(block.parameters) for block in by_pattern] == [3, 1]


def test_a_pattern_that_finds_nothing_lists_what_there_is() -> None:
    with pytest.raises(ArgumentError, match="the pattern 'mlp' matches no trained parameter") as error:
        split_blocks(NAMES, patterns=["mlp"])
    assert "layers.*.a" in str(error.value.fix)


def tokens(seed: int) -> Tensor:
    return torch.randint(5, 90, (1, 13), generator=torch.Generator().manual_seed(seed))


def groups(model: nn.Module, decay: float = 0.0) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": [x for x in named if x[1].ndim >= 2], "weight_decay": decay},
            {"params": [x for x in named if x[1].ndim < 2], "weight_decay": 0.0}]  # fmt: skip


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        ids = tokens(step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:BAdam expect model")
@pytest.mark.parametrize("mode", ["ascending", "descending"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_steps_are_those_of_the_badam_package(mode: SwitchMode, dtype: torch.dtype) -> None:
    badam = pytest.importorskip("badam")
    model, other = (build("qwen3", dtype=dtype) for _ in range(2))
    ours = BlockAdamW(groups(model), lr=1e-3, switch_block_every=7, switch_mode=mode)
    base = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    theirs = badam.BlockOptimizer(
        base, list(other.named_parameters()), switch_block_every=10**9, switch_mode=mode, verbose=0
    )

    for step in range(50):
        ids = tokens(step)
        model(input_ids=ids, labels=ids).loss.backward()
        for mine, yours in zip(model.parameters(), other.parameters(), strict=True):
            assert mine.requires_grad == yours.requires_grad
            yours.grad = None if mine.grad is None else mine.grad.clone()
        ours.step()
        ours.zero_grad()
        theirs.step()
        if (step + 1) % 7 == 0:  # by itself it takes the first block for a step less than the others
            theirs.switch_trainable_params(verbose=0)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.linalg.vector_norm((a - b).double()) <= 1e-6 * torch.linalg.vector_norm(b.double()), name


def test_each_block_is_trained_once_in_a_pass_in_another_order_each_time() -> None:
    model = build("qwen3", num_hidden_layers=5)
    optimizer = BlockAdamW(groups(model), switch_block_every=3, seed=1)
    passes = []
    for number in range(4):
        order = []
        for turn in range(5):
            optimizer.train_block_after(3 * (5 * number + turn))
            order.append(optimizer.current_block_index)
        passes.append(order)
    assert all(sorted(order) == list(range(5)) for order in passes)
    assert len({tuple(order) for order in passes}) > 1


def test_gradients_and_moments_are_of_the_block_alone() -> None:
    model = build("qwen3")
    optimizer = BlockAdamW(groups(model), switch_block_every=1, switch_mode="ascending")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, 1)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == optimizer.blocks[0].parameters
    assert {name for name, p in model.named_parameters() if p.requires_grad} == optimizer.blocks[1].parameters
    assert optimizer.has_no_moments


@pytest.mark.parametrize("schedule", [Schedule(chunk_size=8), Schedule(chunk_size=8, keep_kv=True, offload="host"),
                                      Schedule(chunk_size=8, levels=2, segment_size=2),
                                      Schedule(chunk_size=8, order="chunk", keep_kv="device")])  # fmt: skip
def test_streamed_steps_are_those_of_the_plain_model(schedule: Schedule) -> None:
    """The trained layer changes while the model is streamed."""
    model, other = (build("qwen3", num_hidden_layers=4, dtype=torch.float64) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-3, "switch_block_every": 2, "switch_mode": "descending"}
    with Float64():
        with streamtune.stream(model, schedule=schedule):
            train(model, BlockAdamW(groups(model), **options), 9)
        train(other, BlockAdamW(groups(other), **options), 9)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.linalg.vector_norm(a - b) <= 1e-11 * torch.linalg.vector_norm(b), name


def test_a_state_that_is_loaded_goes_on_to_the_same_bits() -> None:
    model, other = (build("qwen3", dtype=torch.bfloat16) for _ in range(2))
    optimizer = BlockAdamW(groups(model), lr=1e-3, switch_block_every=4)
    train(model, optimizer, 6)
    other.load_state_dict(model.state_dict())
    loaded = BlockAdamW(groups(other), lr=1e-3, switch_block_every=4)
    loaded.train_block_after(6)
    loaded.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 5)
    train(other, loaded, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def trained(model: nn.Module) -> set[Tensor]:
    return {p for p in model.parameters() if p.requires_grad}


def test_the_largest_step_is_that_of_the_lowest_block_unless_another_is_larger() -> None:
    model = build("qwen3")
    train_largest_block(model)
    assert trained(model) == set(model.model.layers[0].parameters())
    model = build("qwen3", vocab_size=512, tie_word_embeddings=False)
    train_largest_block(model, include_lm_head=True)
    assert trained(model) == {*model.model.layers[0].parameters(), *model.model.norm.parameters(), model.lm_head.weight}
