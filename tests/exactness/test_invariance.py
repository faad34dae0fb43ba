"""What must not change the gradient does not: chunk count, ragged tails, padding, accumulation split, loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import streamtune
from streamtune import Schedule
from tests.precision_kit import EXACT, Float64

from .families import batch, build, evaluation, gradients, reference, worst


@pytest.fixture(scope="module")
def model() -> Any:
    return build("qwen3")


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 12, 13, 18, 19, 36, 37, 1000])
def test_chunk_count_and_ragged_tails(model: Any, chunk_size: int) -> None:
    inputs = batch("multiturn")
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=chunk_size):
        want.check(gradients(model, inputs))


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17])
def test_short_sequences(length: int) -> None:
    """In fp64: a token that sees only itself has no gradient of its scores, and in fp32 two roundings of 0 differ."""
    model = build("qwen3", dtype=torch.float64)
    inputs = batch("plain", length=length)
    if length == 1:  # one token predicts nothing: train on its shifted label explicitly
        inputs["shift_labels"] = inputs["labels"]
    with Float64():
        _, want = gradients(model, inputs)
        with streamtune.stream(model, chunk_size=2):
            _, got = gradients(model, inputs)
    assert worst(got, want) <= EXACT


def test_padding_side_does_not_matter(model: Any) -> None:
    row = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(5))
    pad = torch.zeros(1, 9, dtype=torch.long)
    found = []
    for ids, mask in (
        (row, torch.ones_like(row)),
        (torch.cat([row, pad], 1), torch.cat([torch.ones_like(row), pad], 1)),
        (torch.cat([pad, row], 1), torch.cat([pad, torch.ones_like(row)], 1)),
    ):
        labels = ids.masked_fill(mask == 0, -100).masked_fill(mask.cumsum(1) == 1, -100)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        }
        if not found:
            want = reference(model, inputs)
        with streamtune.stream(model, chunk_size=6):
            found.append(gradients(model, inputs))
        want.check(found[-1])


def test_rows_that_are_all_padding_give_nothing(model: Any) -> None:
    inputs = batch("right")
    want = reference(model, inputs)
    more = {key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in inputs.items()}
    more["labels"][-1] = -100
    with streamtune.stream(model, chunk_size=8):
        found = gradients(model, more)
    assert all(torch.isfinite(g).all() for g in found[1].values())
    want.check(found)


def test_accumulation_split(model: Any) -> None:
    inputs = batch("right")
    items = (inputs["labels"][:, 1:] != -100).sum()
    want = reference(model, inputs)

    def split(streamed: torch.nn.Module, whole: dict[str, Any]) -> Tensor:
        losses = []
        for row in range(len(whole["input_ids"])):
            micro = {key: value[row : row + 1] for key, value in whole.items()}
            losses.append(streamed(**micro, num_items_in_batch=items).loss)
        return torch.stack(losses).sum()

    with streamtune.stream(model, chunk_size=9):
        want.check(gradients(model, inputs, split))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1024.0])
def test_loss_scale_is_honoured(model: Any, scale: float) -> None:
    inputs = batch("masked")
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=9):
        loss, got = gradients(model, inputs, lambda m, kw: m(**kw).loss * scale)
    want.check((loss / scale, {name: g / scale for name, g in got.items()}))


@pytest.mark.parametrize("head_chunk_size", [1, 10, 1000])
@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("grad_dtype", ["float32", "param"])
def test_every_schedule(model: Any, head_chunk_size: int, keep_kv: bool, grad_dtype: Any) -> None:
    inputs = batch("left")
    want = reference(model, inputs)
    schedule = Schedule(chunk_size=10, head_chunk_size=head_chunk_size, keep_kv=keep_kv, grad_dtype=grad_dtype)
    with streamtune.stream(model, schedule=schedule):
        want.check(gradients(model, inputs))


def test_the_head_alone_and_the_layers_alone(model: Any) -> None:
    """Without ``head=True`` the logits come back whole and any loss may be put on them."""
    inputs = batch("plain")
    want = reference(model, inputs)

    def own_loss(streamed: torch.nn.Module, given: dict[str, Any]) -> Tensor:
        logits = streamed(input_ids=given["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())

    for head in (True, False):
        with streamtune.stream(model, chunk_size=8, head=head):
            want.check(gradients(model, inputs, own_loss))
    with streamtune.stream(model, chunk_size=8, head=False):
        assert model(**inputs).logits.shape == (3, 37, 97)
    with streamtune.stream(model, chunk_size=8):
        assert model(**inputs).logits is None
        assert model(**inputs, return_dict=False)[0].dim() == 0


def test_evaluation_streams_too(model: Any) -> None:
    inputs = batch("right")
    with torch.no_grad():
        want = evaluation(model, inputs)
        with streamtune.stream(model, chunk_size=6):
            want.check((model(**inputs).loss, {}))
            model.eval()
            want.check((model(**inputs).loss, {}))
    model.train()


def test_generation_under_a_streamed_model_is_the_models_own(model: Any) -> None:
    model.eval()
    prompt = batch("plain", rows=2, length=9)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    given = {"input_ids": prompt, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**given)
    with streamtune.stream(model, chunk_size=4):
        got = model.generate(**given)
    model.train()
    assert torch.equal(got, want)
