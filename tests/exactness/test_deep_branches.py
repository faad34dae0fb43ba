"""Trees of four levels: each row, from the root to a leaf, is computed as it is alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import streamtune
from streamtune import Schedule
from streamtune.engine import Branches
from streamtune.errors import ArgumentError
from tests.conformance.reducer import build as build_any

from .families import VOCAB, build, gradients
from .test_branches import Rows, alone, compare, reference, together

NODES = (
    (-1, 9),  # 0, of four levels: 0 1 3 5
    (0, 4),  # 1
    (0, 7),  # 2, a leaf
    (1, 3),  # 3
    (1, 12),  # 4, a leaf
    (3, 6),  # 5, a leaf
    (3, 2),  # 6, a leaf
    (-1, 5),  # 7, another tree, whose branches lie apart from what they continue
    (7, 6),  # 8
    (7, 3),  # 9
    (8, 4),  # 10, leaves from here on
    (9, 5),  # 11
    (8, 2),  # 12
    (9, 8),  # 13
    (7, 3),  # 14
)
CONVERSATION = ((-1, 14), (0, 11), (0, 5), (2, 9), (2, 6), (4, 13), (4, 4), (6, 8))
"""Turns whose reasoning the next turn does not see: each is a leaf, and the answer without it goes on."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 11},
    "gpt_oss": {},
    "mixtral": {},
}
RECURRENT = ("qwen3_next", "mamba2", "lfm2", "nemotron_h", "falcon_h1")


def rows(nodes: tuple[tuple[int, int], ...], seed: int = 5) -> Rows:
    """Rows of random tokens; those of a leaf but its first are scored."""
    draw = torch.Generator().manual_seed(seed)
    branches = Branches.of_nodes(nodes)
    ids = torch.randint(3, VOCAB, (branches.length,), generator=draw)
    targets = torch.full_like(ids, -100)
    alone, begins = [], []
    for leaf in branches.table.last_parts:
        alone.append(torch.cat([ids[start:stop] for start, stop, _ in leaf.row_ranges]))
        begins.append(leaf.trunk_length)
        targets[leaf.start : leaf.stop - 1] = ids[leaf.start + 1 : leaf.stop]
    return Rows(alone, begins, ids[None], targets[None], branches)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_deep_trees_equal_their_rows_alone(family: str) -> None:
    model = build(family, **FAMILIES[family])
    for nodes in (NODES, CONVERSATION):
        compare(model, rows(nodes), *(Schedule(chunk_size=size, head_chunk_size=7) for size in (1, 4, 11, 256)))


@pytest.mark.full
@pytest.mark.parametrize("family", RECURRENT)
def test_states_are_taken_up_at_every_level(family: str) -> None:
    model = build_any(family)
    for nodes in (NODES, CONVERSATION):
        compare(model, rows(nodes), *(Schedule(chunk_size=size) for size in (4, 11, 256)))


@pytest.mark.quick("qwen3-keep_attention")
@pytest.mark.parametrize(
    "choices",
    [
        {"keep_kv": "device"},
        {"keep_attention": "device"},
        {"keep_layers": 1},
        {"order": "chunk"},
        {"order": "chunk", "keep_kv": "host"},
        {"offload": "host", "levels": 2, "segment_size": 2, "keep_kv": "host", "keep_attention": "host"},
    ],
    ids=lambda choices: ", ".join(choices),
)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_next"])
def test_under_every_schedule(family: str, choices: dict[str, Any]) -> None:
    model = build(family, **FAMILIES[family]) if family in FAMILIES else build_any(family)
    compare(model, rows(NODES), Schedule(chunk_size=6, head_chunk_size=5, **choices))


@pytest.mark.quick("qwen3_next")
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_parts_of_one_token(family: str) -> None:
    model = build(family) if family in FAMILIES else build_any(family)
    given = rows(((-1, 1), (0, 1), (0, 3), (1, 1), (3, 2), (1, 4), (-1, 2), (6, 2)))
    want = reference(model, {"rows": given}, alone)
    with streamtune.stream(model, chunk_size=4) as handle:
        want.check(gradients(model, {"rows": given, "handle": handle}, together))


@pytest.mark.parametrize("nodes", [(), ((0, 3),), ((-1, 3), (1, 2)), ((-1, 0),), ((-2, 1),)])
def test_what_is_no_tree(nodes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ArgumentError, match="a part must have 1 or more tokens and come after"):
        Branches.of_nodes(nodes)
