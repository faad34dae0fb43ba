"""Layers with experts, of which each rank uses another one in a step: norms and weights, compared with one rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from streamtune import stream, train
from streamtune.engine import decoder_layers
from streamtune.recipe import Recipe
from streamtune.run.ranks import make_backend
from streamtune.schedule import Schedule
from tests.sft_kit import QWEN3

STEPS, LENGTH, RATE = 3, 12, 1e-2


class _Experts(nn.Module):
    """Three experts, of which one computes all tokens and the last is never used."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(3))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.experts[self.chosen](x)
        return result


def _choose(model: Any, expert: int) -> None:
    for module in model.modules():
        if isinstance(module, _Experts):
            module.chosen = expert


def run(case: list[Any]) -> dict[str, Any]:
    """Return the gradient norms of each step on two ranks and on one, and the largest final difference of a weight."""
    engine, keep_layers = case
    rank, world = distributed.get_rank(), train.World(distributed.get_rank(), distributed.get_world_size())
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3, vocab_size=64))
    for layer in decoder_layers(plain):
        layer.mlp = _Experts(plain.config.hidden_size)
    rows = torch.randint(0, 64, (world.size, LENGTH))
    model = copy.deepcopy(plain)
    recipe = Recipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        learning_rate=RATE,
        weight_decay=0.0,
        max_grad_norm=0,
        gradient_accumulation_steps=1,
        deepspeed=engine if engine.startswith("zero") else None,
        fsdp=engine == "fsdp",
    )
    handle = stream(model, schedule=Schedule(chunk_size=5, head_chunk_size=4, keep_layers=keep_layers))
    backend = make_backend(recipe, model, handle.layers, world)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.0)
    targets, norms, wanted = world.size * (LENGTH - 1), [], []
    for _ in range(STEPS):
        for number, ids in enumerate(rows):
            _choose(plain, number % 2)
            logits = plain(input_ids=ids[None]).logits[0, :-1]
            (nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / targets).backward()
        wanted.append(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
        _choose(model, rank % 2)
        with backend.micro_batch_context(last=True):
            ids = rows[rank][None]
            backend.backward(backend.model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss)
        norms.append(backend.clip_gradients(0.0))
        backend.step(RATE)
    truth = dict(plain.named_parameters())
    apart = [(x - truth[name]).abs().max().item() for name, x in backend.full_weights() if x is not None]
    backend.close()
    return {"norms": norms, "wanted": wanted, "apart": max(apart, default=0.0)}
