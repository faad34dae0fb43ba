from __future__ import annotations

import torch
from torch import nn

import streamtune
from streamtune.engine import decoder_layers
from streamtune.plan.simulate import LiveBytes
from tests.exactness.families import batch, build


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) ** 2


def test_bytes_of_a_step_are_counted_by_kind() -> None:
    model = Square()
    with LiveBytes(model, [model]) as bytes_:
        x = torch.ones(50, 10)  # 2000 bytes, and a layer input
        model(x).sum().backward()
    assert bytes_.live["layer input"] == 2000
    assert bytes_.live["gradient"] == 400
    # x @ w is saved, its square is alive until the sum is taken
    assert 4000 <= bytes_.activation_peak <= 10_000
    assert bytes_.peak >= bytes_.activation_peak + 2000


def test_what_is_freed_is_no_longer_counted() -> None:
    with LiveBytes(nn.Identity(), []) as bytes_:
        for _ in range(5):
            x = torch.ones(1000)
            y = x[:10]  # a view: no new bytes
            del x, y
    assert bytes_.peak == 4000
    assert sum(bytes_.live.values()) == 0


def test_weights_and_views_of_them_cost_nothing() -> None:
    layer = nn.Linear(100, 100, bias=False)
    with LiveBytes(layer, []) as bytes_:
        layer.weight.detach().mT.add_(0)
    assert bytes_.peak == 0


def test_streaming_holds_less_the_smaller_the_chunk() -> None:
    model = build("qwen3")
    inputs = batch("plain", rows=1, length=96)
    peaks = []
    for chunk_size in (96, 24, 6):
        with streamtune.stream(model, schedule=streamtune.Schedule(chunk_size=chunk_size, head_chunk_size=chunk_size)):
            with LiveBytes(model, decoder_layers(model)) as bytes_:
                model(**inputs).loss.backward()
            model.zero_grad(set_to_none=True)
        peaks.append(bytes_.activation_peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 2
