"""Rotary frequencies that depend on the length of a row, where ranks have rows of other lengths."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, Qwen3Config

from streamtune import stream, train
from streamtune.recipe import Recipe
from streamtune.run.ranks import make_backend
from streamtune.schedule import Schedule
from tests.sft_kit import QWEN3

LENGTHS = ((5, 14, 6, 20), (12, 4, 13, 5), (6, 15, 5, 11))
"""Tokens of the rows of each step; the model changes its frequencies from 9 tokens on."""
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def run(engine: str) -> dict[str, list[float]]:
    """Return the gradient norms of three steps on two ranks, and of the same steps on one rank."""
    rank, world = distributed.get_rank(), train.World(distributed.get_rank(), distributed.get_world_size())
    torch.manual_seed(0)
    config = Qwen3Config(**QWEN3, vocab_size=64, max_position_embeddings=8, rope_parameters=ROPE)
    alone: Any = AutoModelForCausalLM.from_config(config)
    model = copy.deepcopy(alone)
    recipe = Recipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        max_grad_norm=0,
        gradient_accumulation_steps=2,
        deepspeed=engine if engine.startswith("zero") else None,
        fsdp=engine == "fsdp",
    )
    schedule = Schedule(chunk_size=5, head_chunk_size=4)
    stream(alone, schedule=schedule)
    handle = stream(model, schedule=schedule)
    backend = make_backend(recipe, model, handle.layers, world)
    norms, wanted = [], []
    for lengths in LENGTHS:
        rows = [torch.randint(0, 64, (1, length)) for length in lengths]
        targets = sum(lengths) - len(lengths)
        for ids in rows:
            alone(input_ids=ids, labels=ids, num_items_in_batch=targets).loss.backward()
        wanted.append(torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None]).item())
        alone.zero_grad()
        for ids, last in ((rows[rank], False), (rows[rank + 2], True)):
            with backend.micro_batch_context(last=last):
                backend.backward(backend.model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss)
        norms.append(backend.clip_gradients(0.0))
        backend.drop_gradients()
    backend.close()
    return {"norms": norms, "wanted": wanted}
