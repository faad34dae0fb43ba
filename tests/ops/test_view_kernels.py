"""One call for a whole chunk gives what its segments give.

flex attention is torch's own, uncompiled, with its refusal of gradients on CPU taken away; the band runs around flash
attention's operators as they are documented.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from streamtune.ops import LazyMask, MaskView, prefix_attention, prefix_attention_reference
from streamtune.ops.attention import attention, flex, view_kernels
from streamtune.ops.attention.flex import FlexView, is_flex_correct
from streamtune.ops.attention.kernel_trial import AttentionHeadCounts, ScoreRule
from streamtune.ops.attention.runs import run_starts
from streamtune.ops.attention.view_kernels import band_kernel_of_view, fused_view_kernel, is_band_correct
from tests.ops.cuda_operators import cuda_operators
from tests.precision_kit import assert_as_precise

__all__ = ["cuda_operators"]

HERE = torch.device("cpu")
B, H, G, D, LENGTH = 2, 4, 2, 16, 300
SCALE = 0.3


@pytest.fixture(autouse=True)
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_WARNINGS_SHOWN", {"flex_attention_performance"})
    torch._dynamo.reset()  # so that a test has no shapes of the one before


def draw(heads: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(heads + length)
    return torch.randn(B, heads, length, D, generator=generator, dtype=torch.float64).to(dtype)


def starts(*places: int) -> Tensor:
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    for place in places:
        ids[:, place:] += 1
    return run_starts(ids)


def padding(left: int, right: int) -> Tensor:
    kept = torch.ones(B, LENGTH, dtype=torch.bool)
    kept[0, :left] = False
    kept[1, LENGTH - right :] = False
    return kept


def images() -> Tensor:
    block = torch.arange(LENGTH).repeat(B, 1)
    block[:, 170:260] = 170
    block[1, 20:50] = 20
    return block


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 40},
    "packed": {"row_start": starts(33, 140, 141, 280)},
    "packed in a window": {"row_start": starts(33, 140), "window": 60},
    "padded": {"padding": padding(150, 30)},
    "blocks": {"block_start": images()},
    "blocks in a window": {"block_start": images(), "window": 30, "window_cuts_blocks": True},
    "function": {"function": lambda b, h, q, k: (k % 3 != 1) | (q == k), "vectorize": True},
    "both ways": {"causal": False},
}


def mask_of(name: str) -> LazyMask:
    return LazyMask(B, LENGTH, LENGTH, device=HERE, **MASKS[name])


def view_of(name: str, start: int, stop: int) -> MaskView:
    mask = mask_of(name)
    return mask.view_queries(start, stop) if mask.sees_future or not mask.causal else mask.view_chunk(start, stop, 0)


def run(kernel: Any, view: MaskView, dtype: torch.dtype, sinks: Tensor | None, keep: bool) -> list[Tensor]:
    """Output and gradients with a sink in the softmax, as ``prefix_attention`` has it."""
    queries, keys = view.shape[2:]
    q, k, v, grad = draw(H, queries, dtype), draw(G, keys, dtype), draw(G, keys, dtype), draw(H, queries, dtype)
    o, lse = kernel.forward(q, k, v, for_backward=keep)
    blind = lse == -torch.inf
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
        o, lse = (o * (lse - total).exp()[..., None]).to(o.dtype), total
    o, lse = o.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, float("inf"))
    return [o, *kernel.backward(grad, q, k, v, o, lse)]


def reference(
    view: MaskView,
    softcap: float | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
    computed: torch.dtype = torch.float64,
) -> list[Tensor]:
    queries, keys = view.shape[2:]
    q, k, v = (
        x.to(computed).requires_grad_() for x in (draw(H, queries, dtype), draw(G, keys, dtype), draw(G, keys, dtype))
    )
    allowed = view.mask.tile(view.q_start, view.q_stop, view.k_start, view.k_stop).expand(B, 1, -1, -1)
    o = prefix_attention_reference(
        q, k, v, allowed, scale=SCALE, softcap=softcap, sinks_H=None if sinks is None else sinks.to(computed)
    )
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), draw(H, queries, dtype).to(computed))]


def close(got: list[Tensor], want: list[Tensor], bound: float) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert (g.double() - w).norm() <= bound * w.norm()


def precise(got: list[Tensor], view: MaskView, softcap: float | None, sinks: Tensor | None) -> None:
    """In fp32 as near to the formula as the formula is in fp32."""
    plain, truth = (reference(view, softcap, sinks, torch.float32, to) for to in (torch.float32, torch.float64))
    for g, p, t in zip(got, plain, truth, strict=True):
        assert_as_precise(g, p, t)


@pytest.mark.parametrize("name", MASKS)
def test_flex_is_the_formula(name: str) -> None:
    view = view_of(name, 100, 300)
    got = run(FlexView(view, SCALE, None), view, torch.float64, None, keep=True)
    close(got, reference(view, None, None, torch.float64), 1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sunk", "softcap", "dtype", "bound"),
    [
        (True, None, torch.float64, 1e-12),
        (True, 2.0, torch.float64, 1e-12),
        (False, 2.0, torch.float32, None),
        (True, 2.0, torch.bfloat16, 1e-2),
    ],
)
def test_flex_with_softcap_and_sinks(
    sunk: bool, softcap: float | None, dtype: torch.dtype, bound: float | None
) -> None:
    sinks = torch.linspace(-1, 3, H, dtype=torch.float64) if sunk else None
    view = view_of("packed in a window", 100, 300)
    got = run(FlexView(view, SCALE, softcap), view, dtype, sinks, keep=False)
    if bound is None:
        precise(got, view, softcap, sinks)
    else:
        close(got, reference(view, softcap, sinks, dtype), bound)


def test_the_blocks_flex_skips_are_those_no_query_sees() -> None:
    for name in MASKS:
        view = view_of(name, 100, 300)
        ours = flex._cached_block_mask(view)
        theirs = torch_flex.create_block_mask(flex._make_mask_mod(view), B, None, *view.shape[2:], device="cpu")
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


def test_a_mask_is_cut_into_blocks_once() -> None:
    mask = mask_of("packed")
    assert flex._cached_block_mask(mask.view_chunk(0, 100, 0)) is flex._cached_block_mask(mask.view_chunk(0, 100, 0))
    assert flex._cached_block_mask(mask.view_chunk(0, 100, 0)) is not flex._cached_block_mask(
        mask.view_chunk(100, 300, 0)
    )


@pytest.mark.parametrize("softcapped", [False, True])
def test_flex_passes_its_check_and_a_wrong_one_does_not(monkeypatch: pytest.MonkeyPatch, softcapped: bool) -> None:
    heads = AttentionHeadCounts(H, G, D)
    check = is_flex_correct.__wrapped__
    assert check(HERE, torch.float32, heads, softcapped)
    right = FlexView.backward

    def forgetful(self: FlexView, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Any:
        return right(self, grad_o, q, k, v, *self.forward(q, k, v, for_backward=False))

    monkeypatch.setattr(FlexView, "backward", forgetful)
    assert not check(HERE, torch.float32, heads, softcapped)
    monkeypatch.setattr(flex, "flex_attention", lambda *a, **k: (_ for _ in ()).throw(ValueError("no compiler")))
    assert not check(HERE, torch.float32, heads, softcapped)


@pytest.mark.usefixtures("cuda_operators")
@pytest.mark.parametrize("name", ["causal", "window", "packed", "packed in a window"])
@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
def test_a_band_is_the_formula(name: str, sunk: bool) -> None:
    sinks = torch.linspace(-1, 3, H) if sunk else None
    for start, stop in ((0, 33), (33, 100), (150, 250)):
        view = view_of(name, start, stop)
        band = band_kernel_of_view(view, SCALE)
        assert band is not None
        precise(run(band, view, torch.float32, sinks, True), view, None, sinks)


def test_what_is_no_band() -> None:
    assert band_kernel_of_view(view_of("packed", 100, 200), SCALE) is None, "two rows"
    assert band_kernel_of_view(view_of("padded", 160, 200), SCALE) is None
    assert band_kernel_of_view(view_of("blocks", 180, 200), SCALE) is None
    assert band_kernel_of_view(view_of("function", 0, 100), SCALE) is None
    assert band_kernel_of_view(view_of("both ways", 0, 100), SCALE) is None
    assert band_kernel_of_view(view_of("blocks", 60, 100), SCALE) is None, "row 1 has a block elsewhere: rows differ"


@pytest.mark.usefixtures("cuda_operators")
@pytest.mark.parametrize("windowed", [False, True])
def test_a_band_with_another_alignment_is_rejected(monkeypatch: pytest.MonkeyPatch, windowed: bool) -> None:
    assert is_band_correct(HERE, torch.bfloat16, 16, windowed)
    inner: Any = torch.ops.aten._flash_attention_forward

    def top_left(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> Any:
        """A triangle that begins at the first key."""
        o, *more = inner(
            q, k[:, : q.shape[1]], v[:, : q.shape[1]], None, None, q.shape[1], q.shape[1], *rest[4:], **how
        )
        return o, *more

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", top_left)
    assert not is_band_correct(HERE, torch.bfloat16, 16, windowed)


def test_on_cpu_segments_are_attended_one_by_one() -> None:
    view = view_of("packed", 0, 300)
    q, k = draw(H, 300, torch.float32), draw(G, 300, torch.float32)
    assert fused_view_kernel(view, q, k, k, ScoreRule(SCALE)) is None


def test_addresses_beyond_32_bits_are_left_to_the_segments() -> None:
    q = torch.zeros(1, 1, 1, 1).expand(1, 32, 2048, 128)
    k = torch.zeros(1, 1, 1, 1).expand(1, 8, 1 << 20, 128)
    assert view_kernels._memory_span(q, k) == 32 * 128 << 20
    far = torch.empty_strided((1, 2, 3, 8), (1, 1 << 31, 8, 1), device="meta")
    assert view_kernels._memory_span(far, far) == (1 << 31) + 2 * 8 + 7


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view in one call, as a device has it where these kernels are right."""

    def choose(view: MaskView, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, *rest: Any) -> Any:
        band = None if rule.softcap is not None else band_kernel_of_view(view, rule.scale)
        return band or FlexView(view, rule.scale, rule.softcap)

    monkeypatch.setattr(attention, "fused_view_kernel", choose)
    monkeypatch.setattr(view_kernels, "_failed_kernels", set())


def through_attention(view: MaskView, softcap: float | None, sinks: Tensor | None) -> list[Tensor]:
    queries, keys = view.shape[2:]
    drawn = (draw(H, queries, torch.float32), draw(G, keys, torch.float32), draw(G, keys, torch.float32))
    leaves = [x.requires_grad_() for x in drawn]
    o = prefix_attention(leaves[0], leaves[1], leaves[2], view, scale=SCALE, softcap=softcap, sinks_H=sinks)
    return [o.detach(), *torch.autograd.grad(o, leaves, draw(H, queries, torch.float32))]


@pytest.mark.usefixtures("cuda_operators", "whole")
@pytest.mark.parametrize(("name", "softcap"), [("window", None), ("packed", 2.0), ("padded", None)])
def test_prefix_attention_in_one_call(name: str, softcap: float | None) -> None:
    view, sinks = view_of(name, 100, 300), torch.linspace(-1, 3, H)
    precise(through_attention(view, softcap, sinks), view, softcap, sinks)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_kernel_that_fails_late_leaves_the_rest_to_the_segments(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fail(self: FlexView, *arguments: Any, **more: Any) -> Any:
        raise RuntimeError("cannot be compiled\nfor this shape")

    monkeypatch.setattr(FlexView, method, fail)
    view = view_of("packed", 100, 300)
    with pytest.warns(UserWarning, match=r"by flex failed and is not used again \(RuntimeError: cannot be compiled\)"):
        precise(through_attention(view, 2.0, None), view, 2.0, None)
    precise(through_attention(view, 2.0, None), view, 2.0, None)


@pytest.mark.usefixtures("whole")
def test_no_memory_is_not_the_kernels_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FlexView, *arguments: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(FlexView, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        through_attention(view_of("packed", 100, 300), 2.0, None)
