"""States: the ranks between which they go, ends of chunks with which none is lost, and what one adds to a scan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamtune import Schedule
from streamtune.engine.inspect_model import hybrid_layer_name
from streamtune.engine.rows import Branches, PackedRows
from streamtune.engine.scan import initial_state_terms
from streamtune.engine.sequence.shards import SequenceShards, chunks_between_rows
from streamtune.engine.sequence.states import StateRoutes
from streamtune.errors import UnsupportedModelError
from tests.conformance.reducer import build

DEEP = [(-1, 13), (0, 5), (1, 7), (1, 2), (0, 9), (-1, 4), (5, 7), (5, 6), (0, 11)]
"""Trunks in trunks; the last part goes on from the first one, behind another tree."""


def shards(size: int, given: int, rows: PackedRows | None = None, chunk_size: int = 4) -> SequenceShards:
    """The shards of a call, without ranks."""
    made = SequenceShards(None, "ulysses", Schedule(chunk_size=chunk_size), 1, given, rows, min_tokens=2)
    vars(made)["size"] = size
    return made


def packed(*lengths: int) -> PackedRows:
    rows = PackedRows.from_positions(torch.cat([torch.arange(length) for length in lengths])[None])
    assert rows is not None
    return rows


def test_a_state_goes_to_the_next_rank_and_from_the_last_to_the_first() -> None:
    routes = StateRoutes(shards(3, 24), None)
    assert [fragment.positions.stop for fragment in routes.fragments[1]] == [8, 20]
    assert [fragment.read_position for fragment in routes.fragments[0]] == [None, 12]
    assert [routes.sent_positions(rank, (rank + 1) % 3) for rank in range(3)] == [[4, 16], [8, 20], [12]]
    assert routes.returned_positions(0, 1) == [16, 4]
    assert routes.sent_positions(1, 0) == routes.sent_positions(0, 0) == []


def test_pieces_end_with_rows_and_begin_without_a_state() -> None:
    rows = packed(5, 1, 10)
    routes = StateRoutes(shards(2, 16, rows), rows)
    assert [
        (fragment.positions.start, fragment.positions.stop, fragment.read_position) for fragment in routes.fragments[1]
    ] == [
        (4, 5, 4),
        (5, 6, None),
        (6, 8, None),
        (12, 16, 12),
    ]


def test_every_state_that_is_taken_up_is_made_by_a_piece_before() -> None:
    for size in (2, 3, 4):
        rows = Branches.of_nodes(DEEP)
        call = shards(size, rows.length)
        call.trees = rows
        whole = rows.with_row_appended(call.padded_length - rows.length) if call.padded_length > rows.length else rows
        routes = StateRoutes(call, whole)
        pieces = sorted(
            (fragment for of_rank in routes.fragments for fragment in of_rank),
            key=lambda fragment: fragment.positions.start,
        )
        assert [fragment.positions.start for fragment in pieces] == [
            0,
            *(fragment.positions.stop for fragment in pieces[:-1]),
        ]
        for fragment in pieces:
            assert fragment.read_position is None or fragment.read_position <= fragment.positions.start
            assert fragment.read_position is None or fragment.read_position in routes.producers
            alone = fragment.own_slice.stop - fragment.own_slice.start == 1
            assert not (alone and fragment.read_position is not None and fragment.positions.stop in routes.readers)


def test_chunks_stay_where_no_state_is_lost() -> None:
    schedule = Schedule(chunk_size=8)
    assert chunks_between_rows(schedule, 40, 2, packed(31, 17, 32)) == schedule.chunks(40)
    trunk = Branches.of([(16, (20, 44))])  # the second rank of the second chunk would begin with its last token
    schedule = Schedule(chunk_size=5)
    moved = chunks_between_rows(schedule, 40, 2, trunk)
    assert moved != schedule.chunks(40)
    assert moved[-1].stop == 40


def test_a_row_of_one_token_beside_a_longer_one_is_refused() -> None:
    beside = PackedRows.from_positions(torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2], [*range(8)]]))
    assert beside is not None
    with pytest.raises(UnsupportedModelError, match="a chunk of one token at position 4"):
        chunks_between_rows(Schedule(chunk_size=4), 4, 2, beside)


def test_a_row_behind_a_trunk_of_another_begins_anew() -> None:
    rows = Branches.of_nodes([(-1, 4), (-1, 5), (0, 3)])
    assert rows.start_state_position(4) is None
    assert rows.start_state_position(9) == 4
    assert rows.continues_past(4)


def test_layers_that_attend_and_carry_a_state_are_known() -> None:
    assert hybrid_layer_name(build("falcon_h1")) == "FalconH1DecoderLayer"
    assert hybrid_layer_name(build("qwen3_next")) is None


def recurrence(state: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(x.shape[-1]):
        state = (a * dt[:, :, t, None]).exp() * state + (dt[:, :, t] * x[:, :, t])[:, :, None] * b[:, None, :, t]
        outputs.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(outputs, -1), state


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_scan_is_linear_in_its_state(tokens: int) -> None:
    torch.manual_seed(0)
    batch, channels, states = 2, 3, 4
    state = torch.randn(batch, channels, states, dtype=torch.float64, requires_grad=True)
    dt = torch.rand(batch, channels, tokens, dtype=torch.float64, requires_grad=True)
    a = (-torch.rand(channels, states, dtype=torch.float64)).requires_grad_()
    b, c = (torch.randn(batch, states, tokens, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(batch, channels, tokens, dtype=torch.float64)
    want = recurrence(state, dt, a, b, c, x)
    bare = recurrence(torch.zeros_like(state), dt, a, b, c, x)
    got = [mine + added for mine, added in zip(bare, initial_state_terms(state, dt, a, c), strict=True)]
    grads = [torch.randn_like(z) for z in want]
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    leaves = [state, dt, a, b, c]
    for mine, its in zip(
        torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)
