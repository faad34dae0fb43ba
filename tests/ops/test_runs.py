"""Packed rows, spans and mutual blocks are facts of a mask: equal to the dense one and never examined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_overlay,
    find_packed_sequence_indices,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from streamtune import Schedule
from streamtune.engine.attention import lazy_mask
from streamtune.ops import LazyMask, row_starts

from .test_mask import LENGTH, both, from_segments, whole

PACKINGS = {
    "one sequence": [[20, 30, 3]],
    "rows of one token": [[1, 1, 1, 40, 1, 9]],
    "only rows of one token": [[1] * LENGTH],
    "the same boundaries": [[20, 30, 3]] * 3,
    "other boundaries": [[20, 30, 3], [53], [1, 1, 51]],
}


def positions_of(lengths: list[list[int]]) -> Tensor:
    """``[B, LENGTH]`` positions that restart."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def chunk_starts(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, LENGTH, size):
        yield start, min(start + size, LENGTH)


@pytest.fixture(autouse=True)
def nothing_is_examined(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """ParsedMask answer; a mask that is looked at tile by tile fails these tests."""
    if "unrecognised" in request.node.name:
        return

    def refuse(*args: Any) -> Any:
        raise AssertionError("a recognised mask was examined")

    monkeypatch.setattr(LazyMask, "examine_key_blocks", refuse)
    monkeypatch.setattr(LazyMask, "_last_key_by_tiles", refuse)


def packed(maker: str, lengths: list[list[int]]) -> tuple[LazyMask, Tensor]:
    call: dict[str, Any] = {"attention_mask": None, "past_key_values": None, "position_ids": positions_of(lengths)}
    lazy, dense = both(maker, rows=len(lengths), **call)
    return lazy, dense


@pytest.mark.parametrize("size", [1, 11, LENGTH])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("maker", ["causal", "window of 1", "window of 7", "window of 40", "chunked"])
def test_packed_position_ids(maker: str, packing: str, size: int) -> None:
    lazy, dense = packed(maker, PACKINGS[packing])
    assert lazy.function is None
    assert torch.equal(whole(lazy), dense)
    assert not lazy.sees_future
    for start, stop in chunk_starts(size):
        first = lazy.first_key(start)
        assert not dense[:, :, start:stop, :first].any(), "a visible key was cut off"
        assert dense[:, :, start, first].any(), "keys no row sees were kept"
        view = lazy.view_chunk(start, stop, first)
        assert torch.equal(from_segments(view), dense[:, :, start:stop, first:stop])


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_rows_take_no_masked_kernel_call(packing: str) -> None:
    """Not for one sequence, and not for several that are packed differently either."""
    lengths = PACKINGS[packing]
    lazy, _ = packed("causal", lengths)
    segments = lazy.view_chunk(0, LENGTH, 0).segments()
    assert not any(segment.masked for segment in segments)
    alike = all(row == lengths[0] for row in lengths)
    assert len(segments) == sum(len(row) for row in (lengths[:1] if alike else lengths))
    assert all((segment.row is None) == alike for segment in segments)


def test_a_packed_sequence_costs_the_sum_of_its_rows() -> None:
    """Scores computed (a causal square counts half): a row's own, however the sequence is cut."""
    lengths = [[7] * 7 + [4]]
    lazy, dense = packed("causal", lengths)
    for size in (5, 8, 13, LENGTH):
        scores = 0.0
        for start, stop in chunk_starts(size):
            for s in lazy.view_chunk(start, stop, lazy.first_key(start)).segments():
                queries, keys = s.q_stop - s.q_start, s.stop - s.start
                scores += queries * (keys + 1) / 2 if s.causal else queries * keys
        assert scores == dense.sum()


def test_row_starts() -> None:
    assert row_starts(torch.arange(5)) == [0]
    assert row_starts(torch.tensor([0])) == [0]
    assert row_starts(torch.tensor([0, 1, 2, 0, 1, 0])) == [0, 3, 5]
    assert row_starts(torch.tensor([0, 0, 0, 7, 8])) == [0, 1, 2, 3]
    positions = positions_of(PACKINGS["other boundaries"])
    assert row_starts(positions) == [0, 1, 2, 20, 50]
    lazy, _ = packed("causal", PACKINGS["other boundaries"])
    assert lazy.row_starts == [0, 1, 2, 20, 50]
    ids = find_packed_sequence_indices(positions)
    assert ids is not None
    places = torch.arange(LENGTH)
    assert torch.equal(lazy.row_start, torch.stack([(row[:, None] > row).sum(1) for row in ids]))  # type: ignore[arg-type]
    assert sorted({int(t) for row in lazy.row_start for t in places[row == places]}) == lazy.row_starts  # type: ignore[union-attr]


def test_spans_are_no_rows() -> None:
    """Llama 4's chunked attention cuts what is seen, not the sequence a recurrent state runs along."""
    lazy, _ = both("chunked", attention_mask=None, past_key_values=None)
    assert lazy.span_start is not None
    assert lazy.row_starts == [0]
    assert both("causal", attention_mask=None, past_key_values=None)[0].row_starts == [0]


# --- blocks whose tokens see each other -----------------------------------------------------------------------------

BLOCKS = {
    "none": [(0, 0)],
    "two images": [(5, 14), (30, 41)],
    "neighbours": [(5, 14), (14, 20)],
    "prefix": [(0, 17)],
    "suffix": [(40, LENGTH)],
    "longer than the window": [(10, 45)],
    "everything": [(0, LENGTH)],
}


def block_ids(blocks: list[tuple[int, int]]) -> Tensor:
    ids = torch.full((LENGTH,), -1)
    for index, (start, stop) in enumerate(blocks):
        ids[start:stop] = index
    return ids


def composed(kind: str, ids: Tensor) -> Any:
    """As Gemma 3 (full and sliding) and PaliGemma 2 (sliding) compose them."""
    if kind == "full":
        return or_masks(causal_mask_function, blockwise_overlay(ids))
    if kind == "window outside":
        return and_masks(or_masks(causal_mask_function, blockwise_overlay(ids)), sliding_window_overlay(9))
    return or_masks(sliding_window_causal_mask_function(9), blockwise_overlay(ids))


def made(function: Any, rows: int, padding: Tensor | None = None) -> LazyMask:
    return lazy_mask(rows, LENGTH, LENGTH, mask_function=function, attention_mask=padding)


def brute_force(function: Any, rows: int, padding: Tensor | None = None) -> Tensor:
    b, t = torch.arange(rows)[:, None, None, None], torch.arange(LENGTH)
    dense = function(b, torch.zeros(1, dtype=torch.long), t[:, None], t[None]).expand(rows, 1, LENGTH, LENGTH)
    return dense if padding is None else dense & padding.bool()[:, None, None]


@pytest.mark.parametrize("pad", ["none", "right", "left"])
@pytest.mark.parametrize("blocks", [*BLOCKS, "other blocks"])
@pytest.mark.parametrize("kind", ["full", "window outside", "window inside"])
def test_blocks(kind: str, blocks: str, pad: str) -> None:
    different = [BLOCKS["two images"], BLOCKS["prefix"], BLOCKS["none"]]
    ids = torch.stack([block_ids(row) for row in (different if blocks == "other blocks" else [BLOCKS[blocks]] * 3)])
    padding = None
    if pad != "none":
        padding = torch.ones(3, LENGTH, dtype=torch.long)
        padding[1, slice(-6, None) if pad == "right" else slice(0, 6)] = 0
    function = composed(kind, ids)
    lazy, dense = made(function, 3, padding), brute_force(function, 3, padding)
    assert lazy.function is None
    assert torch.equal(whole(lazy), dense)
    unpadded = brute_force(function, 3)
    allowed = [b for b in range(LENGTH + 1) if not unpadded[:, :, :b, b:].any()]
    if kind == "full":
        assert lazy.allowed_cuts == allowed
        assert lazy.sees_future == (blocks != "none")
    assert lazy.allowed_cuts is not None
    assert set(lazy.allowed_cuts) <= set(allowed)
    for size in (8, 20):
        for chunk in Schedule(chunk_size=size).chunks(LENGTH, lazy.allowed_cuts):
            first = lazy.first_key(chunk.start)
            assert not dense[:, :, chunk, :first].any(), "a visible key was cut off"
            view = lazy.view_chunk(chunk.start, chunk.stop, first)
            assert torch.equal(from_segments(view), dense[:, :, chunk, first : chunk.stop])


def test_an_image_takes_no_masked_kernel_call() -> None:
    lazy = made(composed("full", block_ids(BLOCKS["two images"])[None]), 1)
    found = [
        (s.q_start, s.q_stop, s.start, s.stop, s.causal, s.masked) for s in lazy.view_chunk(0, LENGTH, 0).segments()
    ]
    assert found == [
        (0, 5, 0, 5, True, False),
        (5, 14, 0, 14, False, False),
        (14, 30, 0, 14, False, False),
        (14, 30, 14, 30, True, False),
        (30, 41, 0, 41, False, False),
        (41, LENGTH, 0, 41, False, False),
        (41, LENGTH, 41, LENGTH, True, False),
    ]


@pytest.mark.parametrize("maker", ["causal", "window of 7"])
def test_blocks_within_packed_rows(maker: str) -> None:
    """Since 5.24 the packed rows are joined behind the blocks, before it in front of them."""
    ids = block_ids([(5, 14), (30, 41)])[None]
    positions = positions_of([[20, 33]])
    call: dict[str, Any] = {"attention_mask": None, "past_key_values": None, "position_ids": positions}
    lazy, dense = both(maker, rows=1, block_sequence_ids=ids, **call)
    assert lazy.function is None
    assert lazy.row_start is not None
    assert lazy.block_start is not None
    assert torch.equal(whole(lazy), dense)


def test_a_block_ends_with_its_row() -> None:
    across = packed_sequence_mask_function(torch.tensor([[0] * 10 + [1] * 43]))
    function = and_masks(
        across, or_masks(causal_mask_function, blockwise_overlay(block_ids([(5, 14), (30, 41)])[None]))
    )
    lazy, dense = made(function, 1), brute_force(function, 1)
    assert lazy.function is None
    assert torch.equal(whole(lazy), dense)
    assert lazy.allowed_cuts == [b for b in range(LENGTH + 1) if not dense[:, :, :b, b:].any()]
    for size in (8, 20):
        for chunk in Schedule(chunk_size=size).chunks(LENGTH, lazy.allowed_cuts):
            view = lazy.view_chunk(chunk.start, chunk.stop, lazy.first_key(chunk.start))
            assert torch.equal(from_segments(view), dense[:, :, chunk, view.k_start : chunk.stop])


# --- what is no fact stays a function -------------------------------------------------------------------------------


def unrecognised_functions() -> dict[str, Any]:
    ids = block_ids([(5, 14), (30, 41)])[None]
    twice = ids.clone()
    twice[0, 45:48] = 0  # a block in two runs
    rows = torch.tensor([[0] * 20 + [1] * 20 + [0] * 13])  # packed ids that come back

    def every_second(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k % 2 == 0) | (k == q)

    across = packed_sequence_mask_function(torch.tensor([[0] * 10 + [1] * 43]))
    return {
        "a block in two runs": or_masks(causal_mask_function, blockwise_overlay(twice)),
        "a row in two runs": and_masks(packed_sequence_mask_function(rows), causal_mask_function),
        "blocks without causality": blockwise_overlay(ids),
        "blocks and causality": and_masks(or_masks(causal_mask_function, blockwise_overlay(ids)), causal_mask_function),
        "rows without causality": across,
        "spans without causality": chunked_overlay(12, torch.zeros(1, dtype=torch.long)),
        "a window without causality": sliding_window_overlay(9),
        "two windows around blocks": and_masks(
            or_masks(sliding_window_causal_mask_function(9), blockwise_overlay(ids)), sliding_window_overlay(12)
        ),
        "blocks and a stranger": and_masks(or_masks(causal_mask_function, blockwise_overlay(ids)), every_second),
        "a stranger": and_masks(causal_mask_function, every_second),
    }


@pytest.mark.parametrize("name", unrecognised_functions())
def test_unrecognised_combinations_are_evaluated(name: str) -> None:
    function = unrecognised_functions()[name]
    lazy, dense = made(function, 1), brute_force(function, 1)
    assert lazy.function is not None
    assert torch.equal(whole(lazy), dense)
    allowed = [b for b in range(LENGTH + 1) if not dense[:, :, :b, b:].any()]
    assert allowed == (list(range(LENGTH + 1)) if lazy.allowed_cuts is None else lazy.allowed_cuts)
    for chunk in Schedule(chunk_size=8).chunks(LENGTH, lazy.allowed_cuts):
        view = lazy.view_chunk(chunk.start, chunk.stop, lazy.first_key(chunk.start))
        assert torch.equal(from_segments(view), dense[:, :, chunk, view.k_start : chunk.stop])


def test_causal_and_anything_is_causal_unrecognised() -> None:
    lazy = made(unrecognised_functions()["a stranger"], 1)
    assert lazy.causal
    assert not lazy.sees_future


def test_unrecognised_functions_of_scalars_may_index_tensors() -> None:
    """``transformers`` maps a caller's own mask function over scalars; it may look its ids up by them."""
    ids = block_ids(BLOCKS["two images"])

    def own(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) | ((ids[q] == ids[k]) & (ids[q] >= 0))

    lazy = lazy_mask(1, LENGTH, LENGTH, mask_function=own, use_vmap=True)
    assert torch.equal(whole(lazy), brute_force(composed("full", ids[None]), 1))


def test_unrecognised_keys_behind_the_last_query_allow_no_end() -> None:
    """Five queries over eight keys: the last query sees three tokens that no chunk computes."""
    lazy = LazyMask(1, 5, 8, causal=False, function=lambda b, h, q, k: k <= q + 3)
    assert lazy.sees_future
    assert lazy.allowed_cuts == [0]


# --- cutting --------------------------------------------------------------------------------------------------------


def test_chunks_are_of_one_length_but_for_the_last_two() -> None:
    schedule = Schedule(chunk_size=10)
    assert [c.stop for c in schedule.chunks(41)] == [10, 20, 30, 36, 41]
    assert [c.stop for c in schedule.chunks(40)] == [10, 20, 30, 40]
    assert [c.stop for c in schedule.chunks(11)] == [6, 11]
    assert schedule.chunks(0) == [slice(0, 0)]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 16])
def test_no_chunk_is_longer_than_it_may_be_or_a_single_token(size: int) -> None:
    for length in range(2, 70):
        lengths = [c.stop - c.start for c in Schedule(chunk_size=size).chunks(length)]
        assert sum(lengths) == length
        assert min(lengths) >= 2
        assert max(lengths) <= max(size, 2) + (size <= 2)  # three tokens where two would leave one alone
        assert all(2 * each >= size for each in lengths) or len(lengths) == 1
        assert abs(lengths[-1] - lengths[-2 % len(lengths)]) <= 1
        assert len(set(lengths[:-2])) <= 1


def test_chunks_at_allowed_cuts() -> None:
    schedule = Schedule(chunk_size=10)
    anywhere = list(range(41))
    assert schedule.chunks(40, anywhere) == schedule.chunks(40)
    assert schedule.chunks(7, [0, 3, 7]) == [slice(0, 7)]
    # 13 is nearer to where 20 would be cut than 8 is, but too far for a chunk of 10
    assert schedule.chunks(20, [0, 8, 13, 20]) == [slice(0, 8), slice(8, 13), slice(13, 20)]
    # a block longer than a chunk is a chunk of its own, and no longer than it must be
    assert schedule.chunks(40, [0, 4, 25, *range(30, 41)]) == [slice(0, 4), slice(4, 25), slice(25, 33), slice(33, 40)]
    assert schedule.chunks(40, [0, 40]) == [slice(0, 40)]
    assert schedule.chunks(0, [0]) == [slice(0, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_chunks_cover_the_sequence_whatever_the_cuts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length, size = (
        int(torch.randint(1, 80, (), generator=generator)),
        int(torch.randint(1, 20, (), generator=generator)),
    )
    inner = (torch.rand(length + 1, generator=generator) < 0.4).nonzero().flatten().tolist()
    cuts = sorted({0, length, *inner})
    chunks = Schedule(chunk_size=size).chunks(length, cuts)
    assert [c.start for c in chunks] + [length] == [0] + [c.stop for c in chunks]
    for chunk in chunks:
        assert {chunk.start, chunk.stop} <= set(cuts)
        inside = [cut for cut in cuts if chunk.start < cut < chunk.stop]
        assert chunk.stop - chunk.start <= size or not inside, "a chunk is larger than it must be"
