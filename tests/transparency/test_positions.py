"""``position_ids`` mean to a streamed call what they mean to the ordinary one: packed rows, or one row with gaps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import streamtune
from tests.conformance.reducer import build as build_any
from tests.exactness.families import build
from tests.precision_kit import Float64, in_float64

LENGTH = 27
POSITIONS = {
    "jump": [*range(10), *range(30, 47)],
    "stride": [*range(0, 2 * LENGTH, 2)],
    "restart": [*range(12), *range(15)],
    "ordinary": [*range(LENGTH)],
}
CALLS: dict[str, dict[str, Any]] = {
    "as configured": {},
    "use_cache=True": {"use_cache": True},
    "use_cache=False": {"use_cache": False},
    "mask": {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
}


def tokens() -> Tensor:
    return torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def gradients(model: Any, **call: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens(), **call).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("chunk_size", [9, 27])
def test_positions_as_in_the_ordinary_call(family: str, positions: str, call: str, chunk_size: int) -> None:
    with Float64():
        model = build(family).double().train()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        given = {"position_ids": torch.tensor([POSITIONS[positions]] * 2), **CALLS[call]}
        want = gradients(model, **given)
        with streamtune.stream(model, chunk_size=chunk_size):
            got = gradients(model, **given)
    assert_same(got, want)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("configured", [False, True])
def test_the_configuration_and_checkpointing_decide_as_they_do(configured: bool, checkpointing: bool) -> None:
    """A trainer sets ``config.use_cache``, and checkpointing turns the cache off: rows are then packed."""
    with Float64():
        model = build("qwen3").double().train()
        model.config.use_cache = configured
        if checkpointing:
            model.gradient_checkpointing_enable()
        given = {"position_ids": torch.tensor([POSITIONS["restart"]] * 2)}
        want = gradients(model, **given)
        with streamtune.stream(model, chunk_size=9):
            got = gradients(model, **given)
    assert_same(got, want)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("call", ["as configured", "use_cache=True", "mask"])
def test_evaluation_of_one_row_with_gaps(family: str, call: str) -> None:
    """A call that makes a cache has one row, whatever its positions; layers with a state go on through it."""
    with Float64(), torch.no_grad():
        model = in_float64(build_any(family)).eval()
        given = {"position_ids": torch.tensor([POSITIONS["restart"]] * 2), **CALLS[call]}
        want = model(tokens(), **given).logits
        with streamtune.stream(model, chunk_size=9):
            got = model(tokens(), **given).logits
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("call", CALLS)
def test_positions_of_text_and_image_axes(call: str) -> None:
    """``[4, B, T]``: the first are the positions of tokens, which show the rows."""
    with Float64():
        model = build_any("qwen3_5_text").double().train()
        positions = torch.tensor([POSITIONS["restart"]] * 2)
        given = {"position_ids": positions.expand(4, -1, -1), **CALLS[call]}
        want = gradients(model, **given)
        with streamtune.stream(model, chunk_size=9):
            got, flat = gradients(model, **given), gradients(model, **{**given, "position_ids": positions})
    assert_same(got, flat)
    if call != "use_cache=False":  # the plain model passes its states from row to row
        assert_same(got, want)


def test_positions_by_place_and_embeddings() -> None:
    with Float64():
        model = build("qwen3").double().train()
        positions = torch.tensor([POSITIONS["jump"]] * 2)
        embedded = model.get_input_embeddings()(tokens()).detach()

        def both(model: Any) -> dict[str, Tensor]:
            model.zero_grad()
            model(tokens(), None, positions, labels=tokens()).loss.backward()
            model(inputs_embeds=embedded, position_ids=positions, labels=tokens()).loss.backward()
            return {name: p.grad.clone() for name, p in model.named_parameters()}

        want = both(model)
        with streamtune.stream(model, chunk_size=9):
            got = both(model)
    assert_same(got, want)


def test_scores_are_of_packed_rows() -> None:
    """``handle.logprobs`` is a call that trains: positions that restart are rows, whatever the configuration says."""
    with Float64():
        model = build("qwen3").double().train()
        positions = torch.tensor([POSITIONS["restart"]] * 2)
        targets = torch.nn.functional.pad(tokens(), (0, 1), value=-100)[:, 1:]
        with streamtune.stream(model, chunk_size=9) as handle:
            together = handle.logprobs(tokens(), targets, position_ids=positions).logprobs
            alone = handle.logprobs(tokens()[:, :12], targets[:, :12]).logprobs
    torch.testing.assert_close(together[:, :12], alone)
    assert copy.deepcopy(model.config).use_cache is True
