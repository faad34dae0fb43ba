"""The lazy mask equals the dense one transformers builds, and its segments cover the allowed keys and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from streamtune.engine import Branches
from streamtune.engine.attention import NAME, lazy_mask_from_dense
from streamtune.errors import UnsupportedModelError
from streamtune.ops import LazyMask, MaskView
from streamtune.ops.attention import mask as mask_module
from streamtune.ops.attention import rules as rules_module
from tests.exactness.families import SMALL

ROWS, LENGTH = 3, 53

Create = Callable[..., Any]
MAKERS: dict[str, tuple[Create, dict[str, Any]]] = {
    "causal": (create_causal_mask, {"model_type": "llama"}),
    "window of 1": (create_sliding_window_causal_mask, {"model_type": "mistral", "sliding_window": 1}),
    "window of 7": (create_sliding_window_causal_mask, {"model_type": "mistral", "sliding_window": 7}),
    "window of 40": (create_sliding_window_causal_mask, {"model_type": "mistral", "sliding_window": 40}),
    "window of 99": (create_sliding_window_causal_mask, {"model_type": "mistral", "sliding_window": 99}),
    "chunked": (create_chunked_causal_mask, {"model_type": "llama4_text", "attention_chunk_size": 12}),
}


def padding(kind: str) -> Tensor | None:
    """``[ROWS, LENGTH]`` as a tokenizer pads: None, right, left or both sides; ``inside`` as no tokenizer does."""
    if kind == "none":
        return None
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row, missing in enumerate((0, 4, 19)):
        if missing and kind in ("right", "both"):
            mask[row, -missing:] = 0
        if missing and kind in ("left", "both"):
            mask[row, :missing] = 0
    if kind == "inside":
        mask[1, 20:24] = 0
    return mask


def both(maker: str, rows: int = ROWS, **call: Any) -> tuple[LazyMask, Tensor]:
    """The mask under our name, and the boolean form of what the same call builds for eager attention."""
    create, settings = MAKERS[maker]
    made = []
    for implementation in (NAME, "eager"):
        config = AutoConfig.for_model(**{**SMALL, **settings})
        config._attn_implementation = implementation
        made.append(create(config=config, inputs_embeds=torch.zeros(rows, LENGTH, 8), **call))
    lazy, dense = made
    assert isinstance(lazy, LazyMask)
    return lazy, dense == 0


def whole(lazy: LazyMask) -> Tensor:
    """The dense mask a lazy one stands for."""
    first, last = lazy.q_offset, lazy.q_offset + lazy.q_length
    tile = lazy.tile(first, last, lazy.kv_offset, lazy.kv_offset + lazy.kv_length)
    return tile.expand(lazy.batch_size, -1, -1, -1)


def from_segments(view: MaskView) -> Tensor:
    """What a view's segments let through, put together; every segment's bias must say the same."""
    batch, _, queries, keys = view.shape
    covered, seen = torch.zeros(view.shape, dtype=torch.bool), torch.zeros(view.shape, dtype=torch.bool)
    answered = torch.zeros(batch, queries, dtype=torch.bool)
    for segment in view.segments():
        assert 0 <= segment.start < segment.stop <= keys
        assert 0 <= segment.q_start < segment.q_stop <= queries
        rows = slice(None) if segment.row is None else slice(segment.row, segment.row + 1)
        size, asked = batch if segment.row is None else 1, segment.q_stop - segment.q_start
        place = (rows, slice(None), slice(segment.q_start, segment.q_stop), slice(segment.start, segment.stop))
        assert not covered[place].any(), "segments overlap"
        covered[place], answered[rows, place[2]] = True, True
        bias = view.additive_mask(segment, torch.float32)
        let = torch.ones(size, 1, asked, segment.stop - segment.start, dtype=torch.bool)
        assert (bias is None) == (not segment.masked)
        if bias is not None:
            assert bias.shape[2:] == let.shape[2:]
            assert set(bias.unique().tolist()) <= {0.0, mask_module.score_of_hidden_key(torch.float32)}
            let &= bias == 0
            part = view.segment_mask(segment, slice(asked // 3, asked)).expand(size, 1, asked - asked // 3, -1)
            assert torch.equal(part, (bias == 0)[:, :, asked // 3 :].expand(size, 1, -1, -1))
        if segment.causal:
            assert asked == segment.stop - segment.start
            let &= torch.ones(asked, asked, dtype=torch.bool).tril()
        seen[place] = let
    assert answered.all(), "a query has no segment, so no output"
    return seen


@pytest.mark.parametrize("pad", ["none", "right", "left", "both", "inside"])
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_the_dense_mask_of_transformers(maker: str, pad: str) -> None:
    lazy, dense = both(maker, attention_mask=padding(pad), past_key_values=None)
    assert torch.equal(whole(lazy), dense.expand(ROWS, -1, -1, -1))
    assert not lazy.sees_future
    assert lazy.function is None, "every mask of this list is recognised"


@pytest.mark.parametrize("block", [5, 16, rules_module.KEY_BLOCK])
@pytest.mark.parametrize("pad", ["none", "right", "left", "both", "inside"])
@pytest.mark.parametrize("maker", MAKERS)
def test_segments_of_every_chunk(maker: str, pad: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_module, "KEY_BLOCK", block)
    lazy, dense = both(maker, attention_mask=padding(pad), past_key_values=None)
    for size in (1, 8, 13, LENGTH):
        for start in range(0, LENGTH, size):
            stop = min(start + size, LENGTH)
            first = lazy.first_key(start)
            assert not dense[:, :, start:stop, :first].any(), "a visible key was cut off"
            view = lazy.view_chunk(start, stop, first)
            want = dense[:, :, start:stop, first:stop].expand(ROWS, -1, -1, -1)
            assert torch.equal(from_segments(view), want), (start, stop)


@pytest.mark.parametrize("pad", ["none", "left"])
def test_a_decoding_step_sees_its_cache(pad: str) -> None:
    """17 tokens in the cache, LENGTH - 17 new ones."""
    past, mask = 17, padding(pad)
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(ROWS, 1, past, 8), torch.zeros(ROWS, 1, past, 8), layer)
    create, settings = MAKERS["causal"]
    made = []
    for implementation in (NAME, "eager"):
        config = AutoConfig.for_model(**{**SMALL, **settings})
        config._attn_implementation = implementation
        embeds = torch.zeros(ROWS, LENGTH - past, 8)
        made.append(create(config=config, inputs_embeds=embeds, attention_mask=mask, past_key_values=cache))
    lazy, dense = made[0], (made[1] == 0).expand(ROWS, -1, -1, -1)
    assert torch.equal(whole(lazy), dense)
    assert torch.equal(from_segments(lazy.view_queries(0, LENGTH - past)), dense)


@pytest.mark.parametrize("row", ["first", "last"])
def test_sees_future(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One allowed place above the diagonal is found, wherever it is; the diagonal itself is not the future."""
    monkeypatch.setattr(rules_module, "KEY_BLOCK", 16)
    allowed = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    assert not lazy_mask_from_dense(allowed).sees_future
    q, k = (0, LENGTH - 1) if row == "first" else (LENGTH - 2, LENGTH - 1)
    allowed[1, 0, q, k] = True
    assert lazy_mask_from_dense(allowed).sees_future


@pytest.mark.parametrize("kind", ["boolean", "additive", "finite"])
def test_a_dense_mask_of_the_callers_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_module, "KEY_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    allowed = (torch.rand(ROWS, 1, LENGTH, LENGTH, generator=generator) < 0.3).tril()
    allowed[:, :, :, :16] = torch.ones(LENGTH, 16, dtype=torch.bool).tril()  # a block that is all allowed further down
    allowed[:, :, 40:, 16:32] = False  # and one that is not at all
    low = float("-inf") if kind == "additive" else torch.finfo(torch.float32).min
    given = allowed if kind == "boolean" else torch.zeros(allowed.shape).masked_fill(~allowed, low)
    lazy = lazy_mask_from_dense(given)
    assert torch.equal(whole(lazy), allowed)
    for start in range(0, LENGTH, 13):
        view = lazy.view_chunk(start, min(start + 13, LENGTH), 0)
        assert torch.equal(from_segments(view), allowed[:, :, view.q_start : view.q_stop, : view.q_stop])


def test_blocks_that_are_all_or_nothing_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel is kept wherever it can be, also for a mask function nobody recognises."""
    monkeypatch.setattr(rules_module, "KEY_BLOCK", 16)

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k < 32) | (k >= 48))

    segments = LazyMask(1, 80, 80, causal=False, function=function).view_chunk(64, 80, 0).segments()
    assert [(s.start, s.stop, s.masked) for s in segments] == [(0, 32, False), (48, 64, False), (64, 80, True)]


@pytest.mark.parametrize(
    ("pad", "interval"),
    [
        ("none", (0, LENGTH)),
        ("right", (0, LENGTH - 19)),
        ("left", (19, LENGTH)),
        ("both", (19, LENGTH - 19)),
        ("inside", (0, 0)),
    ],
)
def test_unpadded(pad: str, interval: tuple[int, int]) -> None:
    lazy, _ = both("causal", attention_mask=padding(pad), past_key_values=None)
    assert lazy.unpadded_keys == interval


def test_unpadded_where_rows_share_no_token() -> None:
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, :4], mask[1, 6:] = True, True
    start, stop = LazyMask(2, 10, 10, padding=mask).unpadded_keys
    assert start >= stop
    lazy = LazyMask(2, 10, 10, padding=mask)
    assert torch.equal(from_segments(lazy.view_chunk(5, 10, 0)), whole(lazy)[:, :, 5:])


def test_padding_that_pads_nothing_is_forgotten() -> None:
    lazy = LazyMask(2, 8, 8, padding=torch.ones(2, 8, dtype=torch.bool))
    assert lazy.padding is None
    assert not any(segment.masked for segment in lazy.view_chunk(4, 8, 0).segments())


def test_causal_chunks_take_two_unmasked_kernel_calls() -> None:
    lazy = LazyMask(1, 64, 64)
    assert [(s.start, s.stop, s.causal, s.masked) for s in lazy.view_chunk(32, 64, 0).segments()] == [
        (0, 32, False, False),
        (32, 64, True, False),
    ]
    assert [(s.start, s.stop, s.causal, s.masked) for s in lazy.view_chunk(0, 32, 0).segments()] == [
        (0, 32, True, False)
    ]


TREES = {
    "one level": Branches.of(((11, (4, 2, 9)), (0, (3, 5)), (1, (6,)), (7, (5,)))),
    "four levels": Branches.of_nodes(
        ((-1, 6), (0, 5), (0, 4), (1, 3), (1, 2), (3, 7), (4, 1), (3, 4), (-1, 8), (8, 2), (9, 5), (8, 6))
    ),
}


@pytest.mark.parametrize("facts", [{}, {"window": 1}, {"window": 5}, {"window": 13}, {"span": 6}, {"function": True}])
@pytest.mark.parametrize("size", [1, 4, 9, 20, LENGTH])
@pytest.mark.parametrize("trees", TREES)
def test_rows_that_share_their_beginning(
    trees: str, facts: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense: every row's own square, put where its trunk and its branch lie."""
    monkeypatch.setattr(mask_module, "MASKED_KEYS", 7)
    table = TREES[trees].table
    assert table.length == LENGTH
    positions = torch.arange(LENGTH)
    spans = None if "span" not in facts else (positions - positions % facts["span"])[None]

    def every_third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q + k) % 3 != 1) | (q == k)

    lazy = LazyMask(
        1,
        LENGTH,
        LENGTH,
        window=facts.get("window"),
        span_start=spans,
        function=every_third if "function" in facts else None,
    )
    alone = whole(lazy)[0, 0]
    want = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for part in table.parts:
        trunk = torch.cat([torch.arange(*run) for run in (*part.trunk, (0, 0))])
        own = torch.arange(part.start, part.stop)
        places = torch.cat([trunk, own])
        row = alone[: len(places), : len(places)]
        want[own[:, None], places] = row[len(trunk) :]
    shared = lazy.with_shared_prefixes(table)
    assert torch.equal(whole(shared)[0, 0], want)
    for start in range(0, LENGTH, size):
        stop = min(start + size, LENGTH)
        first = min(shared.first_key(start), start)
        assert not want[start:stop, :first].any(), "a key before the first is seen"
        assert torch.equal(from_segments(shared.view_chunk(start, stop, first))[0, 0], want[start:stop, first:stop])


@pytest.mark.parametrize(
    "facts",
    [
        {"batch_size": 2},
        {"padding": torch.arange(LENGTH)[None] > 0},
        {"row_start": torch.zeros(1, LENGTH, dtype=torch.long)},
        {"block_start": torch.zeros(1, LENGTH, dtype=torch.long)},
        {"q_length": 3},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_masks_that_are_not_of_one_row(facts: dict[str, Any]) -> None:
    sizes = {"batch_size": 1, "q_length": LENGTH, "kv_length": LENGTH}
    with pytest.raises(UnsupportedModelError, match="rows cannot share a prefix"):
        LazyMask(**{**sizes, **facts}).with_shared_prefixes(TREES["one level"].table)
