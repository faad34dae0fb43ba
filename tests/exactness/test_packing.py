"""Packed rows: the gradient of rows laid end to end is that of the same rows alone, however the sequence is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import streamtune
from streamtune import Schedule
from streamtune.engine import check_packing
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build as build_any
from tests.precision_kit import EXACT, Float64, Reference, assert_as_precise, in_float64, reference_of

from .families import VOCAB, batch, build, gradients, worst

ROWS = (9, 1, 13, 2, 2, 10)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "mixtral": {},
    "gpt_oss": {"sliding_window": 6},
    "opt": {},
}
"""``transformers`` makes the masks of the last two without a look at positions: the engine keeps their rows apart."""
RECURRENT = (
    "granitemoehybrid",
    "qwen3_next",
    "mamba2",
    "mamba",
    "falcon_h1",
    "lfm2",
    "zamba2",
    "bamba",
    "nemotron_h",
    "zaya",
)
CHUNKS = (1, 4, 8, 11, 64)


def rows(lengths: tuple[int, ...] = ROWS, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def packed(*packs: list[Tensor]) -> dict[str, Any]:
    """Each pack a sequence, padded on the right by tokens that are a row of their own and train nothing."""
    width = max(sum(map(len, pack)) for pack in packs)
    out: dict[str, list[Tensor]] = {"input_ids": [], "position_ids": [], "shift_labels": []}
    for pack in packs:
        missing = width - sum(map(len, pack))
        parts = [*pack, *([torch.zeros(missing, dtype=torch.long)] if missing else [])]
        out["input_ids"].append(torch.cat(parts))
        out["position_ids"].append(torch.cat([torch.arange(len(part)) for part in parts]))
        shifted = [torch.cat([row[1:], torch.tensor([-100])]) for row in pack]
        out["shift_labels"].append(torch.cat([*shifted, torch.full((missing,), -100)]))
    stacked = {key: torch.stack(value) for key, value in out.items()}
    return {**stacked, "labels": stacked["shift_labels"], "use_cache": False}


def targets(pieces: list[Tensor]) -> int:
    return sum(len(row) - 1 for row in pieces)


def alone(model: torch.nn.Module, pieces: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the rows one by one, unpacked and unstreamed."""
    loss, total = 0.0, {}
    for row in pieces:
        if len(row) < 2:
            continue  # nothing in it is a target
        value, grads = gradients(
            model, {"input_ids": row[None], "labels": row[None], "num_items_in_batch": targets(pieces)}
        )
        loss += float(value)
        total = {name: grad + total.get(name, 0) for name, grad in grads.items()}
    return loss, total


def apart(model: torch.nn.Module, pieces: list[Tensor]) -> Reference:
    """The same, and in fp64."""
    return reference_of(model, lambda m: alone(m, pieces))


@pytest.mark.quick("llama", "gemma2", "gpt_oss")
@pytest.mark.parametrize("keep_kv", [False, True], ids=["", "keep_kv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_sequence_equals_its_rows(family: str, keep_kv: bool) -> None:
    model, pieces = build(family, **FAMILIES[family]), rows()
    want = apart(model, pieces)
    for chunk_size in CHUNKS:
        with streamtune.stream(model, schedule=Schedule(chunk_size=chunk_size, keep_kv=keep_kv)):
            want.check(gradients(model, {**packed(pieces), "num_items_in_batch": targets(pieces)}), chunk_size)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_in_fp64(family: str) -> None:
    model, pieces = in_float64(build(family, **FAMILIES[family])), rows()
    with Float64():
        loss_ref, want = alone(model, pieces)
        with streamtune.stream(model, chunk_size=8):
            loss, got = gradients(model, {**packed(pieces), "num_items_in_batch": targets(pieces)})
    assert float(loss) == pytest.approx(loss_ref, rel=EXACT)
    assert worst(got, want) <= EXACT


@pytest.mark.parametrize("alike", [True, False], ids=["same boundaries", "other boundaries"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_several_sequences(family: str, alike: bool) -> None:
    model = build(family, **FAMILIES[family])
    packs = [rows(), rows(ROWS if alike else (5, 20), seed=6), rows(ROWS if alike else (1, 30), seed=7)]
    pieces = [row for pack in packs for row in pack]
    want = apart(model, pieces)
    for chunk_size in (4, 8, 64):
        with streamtune.stream(model, chunk_size=chunk_size):
            want.check(gradients(model, {**packed(*packs), "num_items_in_batch": targets(pieces)}), chunk_size)


@pytest.mark.quick("granitemoehybrid", "qwen3_next", "mamba2")
@pytest.mark.parametrize("chunk_size", [1, 4, 8, 64])
@pytest.mark.parametrize("family", RECURRENT)
def test_a_state_ends_with_its_row(family: str, chunk_size: int) -> None:
    model, pieces = build_any(family), rows()
    want = apart(model, pieces)
    with streamtune.stream(model, chunk_size=chunk_size):
        want.check(gradients(model, {**packed(pieces), "num_items_in_batch": targets(pieces)}), chunk_size)
    with streamtune.stream(model) as handle:
        check_packing(handle)


@pytest.mark.quick("mamba2")
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "mamba", "falcon_h1"])
def test_states_of_several_sequences(family: str) -> None:
    """Rows of one sequence end where those of another go on: their states are left out one by one."""
    model = build_any(family)
    packs = [rows((9, 3, 13, 12)), rows((5, 20, 12), seed=6), rows((7, 30), seed=7)]
    pieces = [row for pack in packs for row in pack]
    want = apart(model, pieces)
    for chunk_size in (4, 8, 64):
        with streamtune.stream(model, chunk_size=chunk_size):
            want.check(gradients(model, {**packed(*packs), "num_items_in_batch": targets(pieces)}), chunk_size)


def test_a_row_of_one_token_beside_a_longer_one_is_refused_where_states_are() -> None:
    packs = [rows((9, 1, 10)), rows((20,), seed=6)]
    model = build_any("lfm2")
    with (
        streamtune.stream(model, chunk_size=8),
        pytest.raises(UnsupportedModelError, match="a chunk of one token at position 9"),
    ):
        gradients(model, packed(*packs))


def test_evaluation_of_packed_rows_with_states() -> None:
    model, pieces = build_any("qwen3_next").eval(), rows()
    inputs = {**packed(pieces), "num_items_in_batch": targets(pieces)}
    want = reference_of(model, lambda m: (alone(m, pieces)[0], {}))
    with streamtune.stream(model, chunk_size=8), torch.no_grad():
        want.check((model(**inputs).loss, {}))


def test_what_flattening_collators_say_beside_positions_is_not_needed() -> None:
    model, pieces = build_any("qwen3_next"), rows((9, 13, 10))
    ends = torch.tensor([0, 9, 22, 32], dtype=torch.int32)
    words = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 13, "max_length_k": 13}
    inputs = {**packed(pieces), "num_items_in_batch": targets(pieces)}
    want = apart(model, pieces)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, inputs | words))
        del inputs["position_ids"]
        with pytest.raises(UnsupportedModelError, match="position_ids do not restart"):
            model(**inputs, **words)


@pytest.mark.parametrize("kind", ["ends", "ids"])
def test_rows_that_arguments_of_kernels_add_are_refused(kind: str) -> None:
    """Positions that go on where ``cu_seq_lens`` or ``seq_idx`` begin a row: flash attention would separate it."""
    model, inputs = build("qwen3"), packed(rows((9, 13, 10)))
    ends = torch.tensor([0, 9, 15, 22, 32], dtype=torch.int32)
    ids = torch.arange(4).repeat_interleave(ends.diff())[None]
    words = {"seq_idx": ids} if kind == "ids" else {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with (
        streamtune.stream(model, chunk_size=8),
        pytest.raises(UnsupportedModelError, match="begin a row at token 15, where position_ids do not restart"),
    ):
        model(**inputs, **words)


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("lengths", [(1,) * 12, (37,), (36, 1), (1, 36), (18, 19)])
def test_extreme_packings(lengths: tuple[int, ...], chunk_size: int) -> None:
    """The plain model on the same packed sequence is the reference: rows of one token have no target of their own.

    In fp64: where a token attends to itself alone, the gradient of its query and key is rounding and nothing else.
    """
    model, inputs = build("qwen3").double(), packed(rows(lengths))
    inputs["shift_labels"] = inputs["labels"] = inputs["input_ids"].roll(-1)
    with Float64():
        loss_ref, want = gradients(model, inputs)
        with streamtune.stream(model, chunk_size=chunk_size):
            loss, got = gradients(model, inputs)
        torch.testing.assert_close(loss, loss_ref, rtol=EXACT, atol=0)
        assert worst(got, want) <= EXACT


def test_evaluation_keeps_the_rows_apart() -> None:
    model, pieces = build("llama").eval(), rows()
    wide = in_float64(model)
    with streamtune.stream(model, chunk_size=8), torch.no_grad():
        inputs = packed(pieces)
        logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits[0]
        ends = torch.tensor([0, *ROWS]).cumsum(0).tolist()
        for row, (start, stop) in zip(pieces, pairwise(ends), strict=True):
            with Float64():
                truth = wide(row[None]).logits[0]
            assert_as_precise(logits[start:stop], model(row[None]).logits[0], truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_preflight_lets_a_model_pass_that_keeps_rows_apart(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype, **FAMILIES[family])
    forwards = [layer.__dict__.get("forward") for layer in model.modules()]
    state = torch.get_rng_state()
    with streamtune.stream(model, chunk_size=8) as handle:
        inside = [layer.__dict__["forward"] for layer in handle.layers]
        check_packing(handle)
        assert [layer.__dict__["forward"] for layer in handle.layers] == inside
    assert [layer.__dict__.get("forward") for layer in model.modules()] == forwards
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mpt"])
def test_the_preflight_refuses_a_model_that_does_not(family: str, dtype: torch.dtype) -> None:
    """A bias by distance counts from the start of the sequence, so a row sees how far behind it begins."""
    model = build_any(family).to(dtype)
    with streamtune.stream(model, chunk_size=8) as handle:
        with pytest.raises(UnsupportedModelError, match="does not keep packed rows apart") as caught:
            check_packing(handle)
        assert type(model).__name__ in caught.value.what
        assert "layer 0 of 2" in caught.value.where
        gradients(model, batch("plain"))  # still streamed


@pytest.mark.parametrize("family", ["gpt_oss", "mistral"])
def test_several_sequences_with_masks_that_the_engine_makes(family: str) -> None:
    """Rows that begin elsewhere in each sequence, with a window, with and without the library's own packed mask."""
    model = build(family, sliding_window=6)
    packs = [rows(), rows((5, 20), seed=6), rows((1, 30), seed=7)]
    pieces = [row for pack in packs for row in pack]
    want = apart(model, pieces)
    for schedule in (Schedule(chunk_size=8), Schedule(chunk_size=8, order="chunk"), Schedule(chunk_size=64)):
        with streamtune.stream(model, schedule=schedule):
            want.check(gradients(model, {**packed(*packs), "num_items_in_batch": targets(pieces)}), schedule)


def test_the_preflight_finds_positions_that_do_not_restart() -> None:
    """A model that numbers its tokens itself keeps the mask's rows apart and is still another function."""
    model = build("gpt2")
    own = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda ids: own(torch.arange(ids.shape[-1])[None])  # type: ignore[method-assign]
    with streamtune.stream(model) as handle, pytest.raises(UnsupportedModelError, match="the input of GPT2Block"):
        check_packing(handle)


def test_the_preflight_names_what_does_not_take_positions() -> None:
    model = build("llama")
    model.forward = lambda input_ids, use_cache: None  # type: ignore[method-assign]
    with streamtune.stream(model) as handle:
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM fails on packed rows"):
            check_packing(handle)
        handle.remove()
        with pytest.raises(ArgumentError, match="no longer streamed"):
            check_packing(handle)
