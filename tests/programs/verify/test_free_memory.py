"""The longest row that plain autograd has memory for: two short forwards predict the memory of a long one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.plan.simulate import LiveBytes
from streamtune.programs.verify.compared_rows import MARGIN, FreeMemory, measure_memory
from tests.exactness.families import batch, build


def forward_of(model: nn.Module, tokens: int) -> Tensor:
    return model(**batch("plain", rows=1, length=tokens), use_cache=False).loss


def free_memory_of(model: nn.Module, tokens: int = 128) -> FreeMemory:
    return measure_memory(model, torch.float32, lambda size: forward_of(model, size), tokens)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_two_short_forwards_predict_a_long_one(attention: str) -> None:
    model = build("llama", max_position_embeddings=1024)
    model.set_attn_implementation(attention)
    memory = free_memory_of(model, 256)
    with LiveBytes(model, decoder_layers(model)) as live:
        loss = forward_of(model, 512)
    predicted = memory.per_token * 512 + memory.per_square * 512**2
    assert loss.requires_grad
    assert predicted == pytest.approx(live.peak, rel=0.1)
    assert (memory.per_square * 512 > memory.per_token) == (attention == "eager")  # attention weights are kept there


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_longest_row_is_the_longest_that_lacks_nothing(attention: str, dtype: torch.dtype) -> None:
    model = build("llama")
    model.set_attn_implementation(attention)
    memory = replace(free_memory_of(model), free=1 << 28, host_free=1 << 28)
    longest = memory.max_tokens(dtype)
    assert longest > 100
    assert memory.why_too_large(longest, dtype) == ""
    assert memory.why_too_large(longest + 2, dtype) != ""
    assert memory.max_tokens(torch.float64) < memory.max_tokens(torch.float32)


def test_what_is_lacking_is_said() -> None:
    model = build("llama")
    parameters = sum(p.numel() for p in model.parameters())
    memory = replace(free_memory_of(model), free=int(parameters * 16 / MARGIN) - 1)  # 4 and 8 bytes
    assert memory.max_tokens(torch.float64) > 0
    assert "GiB more memory, " in memory.why_too_large(10**6, torch.float64)
    assert replace(memory, free=parameters * 8).max_tokens(torch.float64) == 0
    memory = replace(memory, free=1 << 40, host_free=parameters)
    assert memory.max_tokens(torch.float64) == 0
    assert "GiB more host memory, " in memory.why_too_large(64, torch.float64)
