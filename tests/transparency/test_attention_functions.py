"""The attention a model was set to is what is streamed, or ours in its place where the two compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import streamtune
from streamtune.errors import UnsupportedModelError
from tests.exactness.families import build, gradients, worst
from tests.precision_kit import EXACT, Float64


def averages(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Another attention than softmax's: all queries see the mean of all values."""
    groups = query.shape[1] // value.shape[1]
    mean = value.mean(dim=2, keepdim=True).repeat_interleave(groups, dim=1)
    return mean.expand(query.shape).transpose(1, 2).contiguous(), None


@pytest.fixture
def registered() -> Iterator[str]:
    AttentionInterface.register("averages", averages)
    yield "averages"
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop("averages", None)


def test_a_function_of_the_users_own_is_refused(registered: str) -> None:
    model = build("qwen3")
    model.set_attn_implementation(registered)
    with pytest.raises(UnsupportedModelError, match="uses the registered attention function 'averages'") as caught:
        streamtune.stream(model, chunk_size=8)
    assert "set_attn_implementation" in caught.value.fix
    assert "sdpa" in caught.value.fix
    ids = torch.randint(1, 60, (1, 27))
    model(input_ids=ids, labels=ids).loss.backward()  # and is left as it was


def test_one_in_the_place_of_a_known_one_as_well() -> None:
    model = build("qwen3")
    model.set_attn_implementation("sdpa")
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", averages)
    try:
        with pytest.raises(UnsupportedModelError, match="uses the registered attention function 'sdpa'"):
            streamtune.stream(model, chunk_size=8)
    finally:
        AttentionInterface.register("sdpa", before)
    streamtune.stream(model, chunk_size=8).remove()


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_those_of_transformers_are_streamed(name: str) -> None:
    model = build("qwen3")
    model.set_attn_implementation(name)
    with streamtune.stream(model, chunk_size=8):
        pass
    assert model.config._attn_implementation == name


def test_a_mask_of_flex_attention_is_applied() -> None:
    """Documents and a prefix; each row has another prefix, so the mask depends on the row."""
    length, prefix = 150, torch.tensor([3, 7])
    documents = torch.arange(length) // 100

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q >= k) & (documents[q] == documents[k])) | ((k < prefix[b]) & (documents[q] == 0))

    ids = torch.randint(1, 60, (2, length), generator=torch.Generator().manual_seed(0))
    places = torch.arange(length)
    rows, q, k = torch.arange(2)[:, None, None, None], places[:, None], places
    with Float64():
        model = build("qwen3", max_position_embeddings=length).double()
        want = gradients(model, {"input_ids": ids, "labels": ids, "attention_mask": rule(rows, rows, q, k)})
        model.set_attn_implementation("flex_attention")
        mask = create_block_mask(rule, 2, None, length, length, "cpu")
        inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        for chunk_size in (40, length):
            with streamtune.stream(model, chunk_size=chunk_size):
                loss, got = gradients(model, inputs)
            torch.testing.assert_close(loss, want[0], rtol=EXACT, atol=0)
            assert worst(got, want[1]) <= EXACT


def test_a_mask_of_flex_attention_for_each_head_is_refused() -> None:
    model, ids = build("qwen3"), torch.randint(1, 60, (1, 128))
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 9 + h), 1, 4, 128, 128, "cpu")
    with streamtune.stream(model, chunk_size=40), pytest.raises(UnsupportedModelError, match="each of 4 heads"):
        model(input_ids=ids, labels=ids, attention_mask=mask)
