"""The inputs of the preflights: a few random tokens, and a schedule of chunks far smaller than they are."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from streamtune.schedule import Schedule

__all__ = ["LENGTH", "ROWS", "SCHEDULE", "ordinary_tokens", "trial_batch"]

ROWS, LENGTH, PADDED = 2, 24, 5
SCHEDULE = Schedule(chunk_size=7, head_chunk_size=11)


def trial_batch(model: Any) -> dict[str, Any]:
    """Return random ordinary tokens, the second row padded on the right; the random generator is our own."""
    head = model.get_output_embeddings()
    ids = ordinary_tokens(model, ROWS, LENGTH)
    mask = torch.ones_like(ids)
    mask[-1, -PADDED:] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if head is None:  # what its labels would be is not known: a number is made of what it returns
        del inputs["labels"]
    parameters = inspect.signature(type(model).forward).parameters
    if "use_cache" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        inputs["use_cache"] = False
    return inputs


def ordinary_tokens(model: Any, rows: int, length: int) -> Tensor:
    """Return ``[rows, length]`` random tokens that are no special ones; the random generator is our own."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    known = min([table.shape[0], 4096, *([head.weight.shape[0]] if hasattr(head, "weight") else [])])
    config = model.config.get_text_config(decoder=True)
    special = {
        value
        for owner in (model.config, config)
        for key, value in vars(owner).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    ordinary = torch.tensor([token for token in range(known) if token not in special] or [0])
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)].to(table.device)
