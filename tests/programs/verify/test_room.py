"""How long a row plain autograd has room for: what two short forwards foretell is what a long one holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.plan.simulate import LiveBytes
from streamtune.programs.verify.compared_rows import MARGIN, Room, measure_room
from tests.exactness.families import batch, build


def forward_of(model: nn.Module, tokens: int) -> Tensor:
    return model(**batch("plain", rows=1, length=tokens), use_cache=False).loss


def room_of(model: nn.Module, tokens: int = 128) -> Room:
    return measure_room(model, torch.float32, lambda size: forward_of(model, size), tokens)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_two_short_forwards_foretell_a_long_one(attention: str) -> None:
    model = build("llama", max_position_embeddings=1024)
    model.set_attn_implementation(attention)
    room = room_of(model, 256)
    with LiveBytes(model, decoder_layers(model)) as live:
        loss = forward_of(model, 512)
    foretold = room.per_token * 512 + room.per_square * 512**2
    assert loss.requires_grad
    assert foretold == pytest.approx(live.peak, rel=0.1)
    assert (room.per_square * 512 > room.per_token) == (attention == "eager")  # attention weights are kept there


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_longest_row_is_the_longest_that_lacks_nothing(attention: str, dtype: torch.dtype) -> None:
    model = build("llama")
    model.set_attn_implementation(attention)
    room = replace(room_of(model), free=1 << 28, host_free=1 << 28)
    longest = room.longest(dtype)
    assert longest > 100
    assert room.lacks(longest, dtype) == ""
    assert room.lacks(longest + 2, dtype) != ""
    assert room.longest(torch.float64) < room.longest(torch.float32)


def test_what_is_lacking_is_said() -> None:
    model = build("llama")
    parameters = sum(p.numel() for p in model.parameters())
    room = replace(room_of(model), free=int(parameters * 16 / MARGIN) - 1)  # weights by 4 bytes, gradients by 8
    assert room.longest(torch.float64) > 0
    assert "GiB more, " in room.lacks(10**6, torch.float64)
    assert replace(room, free=parameters * 8).longest(torch.float64) == 0
    room = replace(room, free=1 << 40, host_free=parameters)
    assert room.longest(torch.float64) == 0
    assert "of the host more" in room.lacks(64, torch.float64)
