"""Left padding under eager attention: a label behind it is predicted as in the ordinary call, by all tokens."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import streamtune
from tests.conformance.reducer import build as build_any
from tests.exactness import families
from tests.exactness.families import reference
from tests.precision_kit import Float64, errors, in_float64

LENGTH = 27
TOLD = "label is predicted from left padding"


def padded(first_label: bool) -> dict[str, Tensor]:
    """Three rows, two of them padded on the left, one on the right too."""
    ids = torch.randint(3, 60, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :11] = mask[1, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if not first_label:
        labels[0, 5] = labels[1, 11] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["gemma2", "bloom", "gptj", "codegen", "xglm", "mpt", "qwen3"])
@pytest.mark.parametrize("chunk_size", [9, 27])
def test_a_label_behind_left_padding(family: str, chunk_size: int) -> None:
    """Its loss and gradient are those of the ordinary call, and the call says what it costs.

    In fp32, three ways: xglm clamps its scores at the lowest number of their dtype, where padding's all are.
    """
    model = build_any(family).eval()
    model.set_attn_implementation("eager")
    batch: dict[str, Any] = {**padded(True), "use_cache": False}
    expected = reference(model, batch)
    with (
        streamtune.stream(model, chunk_size=chunk_size),
        pytest.warns(UserWarning, match=TOLD),
    ):
        expected.check(families.gradients(model, batch))


@pytest.mark.parametrize("family", ["gemma2", "bloom", "qwen3"])
def test_no_label_there_is_streamed_in_chunks(family: str) -> None:
    with Float64():
        model = build_any(family).double().eval()
        want = gradients(model, padded(False))
        with streamtune.stream(model, chunk_size=9), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            got = gradients(model, padded(False))
    assert max(errors(got, want).values()) < 1e-9


def test_the_same_under_sdpa_is_streamed_in_chunks() -> None:
    """There a query that sees no key gives zeros, whatever the chunk."""
    with Float64():
        model = build_any("qwen3").double().eval()
        model.set_attn_implementation("sdpa")
        want = gradients(model, padded(True))
        with streamtune.stream(model, chunk_size=9), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            got = gradients(model, padded(True))
    assert max(errors(got, want).values()) < 1e-9


def test_log_probs_behind_left_padding() -> None:
    with Float64():
        model = build_any("gemma2").double().eval()
        batch = padded(True)
        targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        plain = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        want = plain.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
        with streamtune.stream(model, chunk_size=9) as handle, pytest.warns(UserWarning, match=TOLD):
            got = handle.logprobs(batch["input_ids"], targets, attention_mask=batch["attention_mask"]).logprobs
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_trainers_collator_gives_the_ordinary_curve() -> None:
    """Gemma 2 is eager by default, pads on the left, and the language-model collator labels every token of a row."""
    losses = []
    for streamed in (False, True):
        with Float64():
            torch.manual_seed(0)
            model = build_any("gemma2").double().train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            handle = streamtune.stream(model, chunk_size=9) if streamed else None
            curve = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(4):
                    loss = model(**padded(True), use_cache=False).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    curve.append(float(loss.detach()))
            if handle is not None:
                handle.remove()
            losses.append(curve)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_dense_mask_that_adds_a_number(attention: str, number: float) -> None:
    """All scores of padding have the number added, so that it attends to all tokens, under sdpa too."""
    batch = padded(True)
    seen = batch["attention_mask"].bool()[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    batch["attention_mask"] = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, number)
    with Float64(), sdpa_kernel(SDPBackend.MATH):  # the backward of the fused kernel is wrong there
        model = build_any("qwen3").double().eval()
        model.set_attn_implementation(attention)
        want = gradients(model, batch)
        with streamtune.stream(model, chunk_size=9), pytest.warns(UserWarning, match=TOLD):
            got = gradients(model, batch)
    assert max(errors(got, want).values()) < 1e-9


def test_padding_whose_outputs_reach_other_tokens() -> None:
    """blt pools bytes into patches: under eager attention its padding counts, whichever tokens have a label."""
    with Float64():
        model = in_float64(build_any("blt"))
        model.set_attn_implementation("eager")
        plain = gradients(model, padded(False))
        with streamtune.stream(model, chunk_size=9), pytest.warns(UserWarning, match=TOLD):
            streamed = gradients(model, padded(False))
    assert max(errors(streamed, plain).values()) < 1e-9
