"""Rotary embeddings that depend on the length of a row: each row has the frequencies that it has alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import streamtune
from streamtune import Schedule
from streamtune.engine import Branches
from streamtune.engine.rotary import RowLengths, longest_unscaled_length, rotate_rows_as_if_alone
from streamtune.engine.rows import PackedRows
from streamtune.errors import UnsupportedModelError
from tests.conformance.reducer import build as build_any

from .families import batch, build, gradients, reference
from .test_branches import alone as rows_alone
from .test_branches import rows as trees
from .test_branches import together
from .test_packing import apart, packed, rows, targets

LIMIT = 8
"""Rows above so many tokens have other frequencies."""
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 16.0,
    "original_max_position_embeddings": LIMIT,
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 4.0, 9.0, 20.0],
}
SLIDING = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "gpt_oss": {},
    "olmo2": {},
    "phi3": {},
}
CASES = [
    (family, kind) for family in FAMILIES for kind in ("dynamic", "longrope") if family != "phi3" or kind != "dynamic"
]
PACKED = [(family, kind) for family, kind in CASES if family != "gpt_oss"]  # its plain model does not keep rows apart


def scaled(family: str, kind: str) -> Any:
    rope = DYNAMIC if kind == "dynamic" else LONGROPE
    limit = LIMIT if kind == "dynamic" else 128
    given = {"full_attention": rope, "sliding_attention": SLIDING} if family == "gemma3_text" else rope
    extra = {"original_max_position_embeddings": LIMIT} if family == "phi3" else {}
    return build(
        family,
        **{**FAMILIES[family], "max_position_embeddings": limit, "rope_parameters": copy.deepcopy(given), **extra},
    )


@pytest.mark.quick("llama-dynamic", "phi3-longrope", "gemma3_text-dynamic")
@pytest.mark.parametrize(("family", "kind"), PACKED)
def test_packed_rows_of_any_length(family: str, kind: str) -> None:
    model, pieces = scaled(family, kind), rows()
    want = apart(model, pieces)
    for chunk_size in (4, 11, 64):
        with streamtune.stream(model, chunk_size=chunk_size):
            want.check(gradients(model, {**packed(pieces), "num_items_in_batch": targets(pieces)}), chunk_size)


@pytest.mark.quick("qwen3-longrope-right")
@pytest.mark.parametrize("form", ["plain", "right", "left"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_batch_is_that_of_the_plain_model(family: str, kind: str, form: str) -> None:
    model, inputs = scaled(family, kind), batch(form)
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, inputs))


@pytest.mark.quick("llama-longrope")
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_rows_that_share_a_long_beginning(family: str, kind: str) -> None:
    lengths = (7, 7) if kind == "dynamic" else (5, 9)
    model, given = scaled(family, kind), trees(((13, lengths), (2, (4, 5))))
    want = reference(model, {"rows": given}, rows_alone)
    with streamtune.stream(model, schedule=Schedule(chunk_size=6)) as handle:
        want.check(gradients(model, {"rows": given, "handle": handle}, together))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_beginning_of_rows_with_other_frequencies_is_refused(kind: str) -> None:
    model, given = scaled("llama", kind), trees(((6, (2, 9)),))
    with (
        streamtune.stream(model, chunk_size=6) as handle,
        pytest.raises(UnsupportedModelError, match="share a prefix with longer rows"),
    ):
        together(model, {"rows": given, "handle": handle})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_call_does_not_depend_on_the_calls_before(kind: str) -> None:
    model, ids = scaled("llama", kind), batch("plain")["input_ids"][:1]
    first, longer = ({"input_ids": x, "labels": x} for x in (ids[:, :12], ids))
    want = reference(model, first)
    with streamtune.stream(model, chunk_size=5):
        gradients(model, longer)
        want.check(gradients(model, first))
    if kind == "dynamic":  # the plain model keeps the frequencies of the longest call
        gradients(model, longer)
        assert max(each.excess for each in want.compare(gradients(model, first)).values()) > 1e-4
    with rotate_rows_as_if_alone(model):
        gradients(model, longer)
        want.check(gradients(model, first))


def test_the_model_is_restored() -> None:
    model = scaled("llama", "dynamic")
    rotary = model.model.rotary_emb
    with rotate_rows_as_if_alone(model):
        inside = rotary.forward
        with streamtune.stream(model, chunk_size=5):
            assert rotary.forward is not inside
        assert rotary.forward is inside
    assert "forward" not in vars(rotary)
    with streamtune.stream(model, chunk_size=5):
        copied = copy.deepcopy(model)
    assert copied.model.rotary_emb.forward.module is copied.model.rotary_emb
    inputs = batch("plain")
    reference(model, inputs).check(gradients(copied, inputs))


def test_lengths_of_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    lengths = RowLengths.from_rows(PackedRows(positions))
    assert lengths.longest_BT.tolist() == [[3, 3, 3, 2, 2, 1], [1, 5, 5, 5, 5, 5]]
    lengths = RowLengths.from_rows(Branches.of([(2, (1, 3)), (0, (2,))]))
    assert lengths.longest_BT.tolist() == [[5, 5, 3, 5, 5, 5, 2, 2]]
    assert lengths.shortest_BT.tolist() == [[3, 3, 3, 5, 5, 5, 2, 2]]


def test_up_to_where_frequencies_are_the_same() -> None:
    assert longest_unscaled_length(scaled("llama", "dynamic").config) == LIMIT
    assert longest_unscaled_length(scaled("phi3", "longrope").config) == LIMIT
    assert longest_unscaled_length(scaled("gemma3_text", "longrope").config) == LIMIT
    assert longest_unscaled_length(build("llama").config) is None
    assert longest_unscaled_length(build_any("gpt2").config) is None
