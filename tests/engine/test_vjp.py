"""The sum over chunks by itself: on a function without a layer, whose chunks may have nothing to differentiate."""

from __future__ import annotations

import torch
from torch import Tensor

from streamtune.engine.cache import ChunkCache
from streamtune.engine.kv import KeysAndValues, States
from streamtune.engine.vjp import GradientSum, LayerInput, streamed_vjp

CHUNKS = [slice(0, 3), slice(3, 4), slice(4, 9)]


def nothing_kept(chunk: slice) -> ChunkCache:
    return ChunkCache(KeysAndValues(9), States(), chunk, 0, "replay")


def test_inputs_outputs_and_sums() -> None:
    """z follows the sequence, s is a sum over it; one input follows it along dim 2, another is read by every chunk."""
    torch.manual_seed(0)
    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    along_two = torch.randn(2, 1, 9, dtype=torch.float64, requires_grad=True)
    shared = torch.randn(4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, along_two: Tensor, shared: Tensor) -> list[Tensor]:
        z = (x @ weight + shared).tanh() * along_two.mT
        return [z, (z * shared).square().sum((0, 1))]

    grads = [torch.randn(2, 9, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    want = torch.autograd.grad(function(x, along_two, shared), [x, along_two, shared, weight], grads)
    got_inputs, got_weight = streamed_vjp(
        lambda chunk, parts: (function(*parts), nothing_kept(chunk)),
        CHUNKS,
        [LayerInput(x, 1, True), LayerInput(along_two, 2, True), LayerInput(shared, None, True)],
        [(grads[0], 1), (grads[1], None)],
        [GradientSum(weight, True)],
    )
    for got, its in zip([*got_inputs, *got_weight], want, strict=True):
        torch.testing.assert_close(got, its, rtol=1e-12, atol=1e-12)


def test_a_chunk_that_nothing_trainable_took_part_in() -> None:
    """As where only an expert is trained, and no token of the chunk was sent to it."""
    weight = torch.tensor(2.0, requires_grad=True)
    x = torch.arange(9.0)[None, :, None]

    def run_chunk(chunk: slice, parts: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        return [parts[0] * weight if chunk.start == 3 else parts[0] * 2.0], nothing_kept(chunk)

    grads, (total,) = streamed_vjp(
        run_chunk, CHUNKS, [LayerInput(x, 1, False)], [(torch.ones(1, 9, 1), 1)], [GradientSum(weight, True)]
    )
    assert grads == [None]
    assert total is not None
    assert float(total) == 3.0


def test_an_output_nobody_used() -> None:
    weight, x = torch.tensor(2.0, requires_grad=True), torch.ones(1, 9, 1)
    _, (total,) = streamed_vjp(
        lambda chunk, parts: ([parts[0] * weight, parts[0] * weight**2], nothing_kept(chunk)),
        CHUNKS,
        [LayerInput(x, 1, False)],
        [(None, 1), (torch.ones(1, 9, 1), 1)],
        [GradientSum(weight, True)],
    )
    assert total is not None
    assert float(total) == 36.0
