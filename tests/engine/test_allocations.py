"""Nothing that grows with the square of the length, and no logits of a whole row, is ever allocated.

A dispatch mode looks at every tensor that any operation of a step returns, in forward, loss and backward. What counts
is the storage behind it (an expanded view holds nothing), in elements, whatever the dtype: sizes are chosen such that
any storage of T * T elements or more is either scores or a mask (T x T), or logits (T x vocabulary).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import streamtune
from streamtune import Schedule
from tests.exactness.families import build

LENGTH, ROWS, VOCAB, CHUNK, HEAD_CHUNK = 512, 2, 1021, 64, 32
LIMIT = LENGTH * LENGTH
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 100},
    "gemma2": {"sliding_window": 200, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": 100},
    "mixtral": {},
}
BATCHES = ("plain", "right", "left", "masked", "packed", "packed apart")


class Watcher(TorchDispatchMode):
    """Notes the largest storage any operation returned, and the shape of every tensor as large as LIMIT."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.operations = 0, 0
        self.large: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, elements)
                if elements >= LIMIT:
                    self.large.append((str(func), tuple(tensor.shape)))
        return out

    def saw(self, *trailing: int) -> bool:
        """Whether a tensor whose last dimensions are these was among the large ones."""
        return any(shape[-len(trailing) :] == trailing for _, shape in self.large)


def model_of(family: str, implementation: str | None = None) -> Any:
    model = build(family, **{**SHAPE, **FAMILIES[family]})
    largest = max(p.numel() for p in model.parameters())
    assert 4 * largest < LIMIT, "weights must not be mistaken for activations"
    if implementation:
        model.set_attn_implementation(implementation)
    return model


def batch(kind: str) -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels, mask = ids.clone(), torch.ones_like(ids)
    if kind in ("right", "left"):
        mask[1, slice(-100, None) if kind == "right" else slice(0, 100)] = 0
        labels = labels.masked_fill(mask == 0, -100)
        labels[:, 100] = -100  # eager attention predicts a label behind left padding by all tokens: that is one chunk
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if kind == "masked":
        labels[:, : LENGTH // 3] = -100
    if kind.startswith("packed"):
        ends = [(200,), (200,)] if kind == "packed" else [(200,), (3, 90, 91, 400)]
        rows = [torch.cat([torch.arange(b - a) for a, b in pairwise((0, *row, LENGTH))]) for row in ends]
        positions = torch.stack(rows)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "use_cache": False}
    return {"input_ids": ids, "labels": labels}


def watch(model: Any, inputs: dict[str, Any], train: bool = True) -> Watcher:
    with Watcher() as watcher, torch.set_grad_enabled(train):
        loss = model(**inputs).loss
        if train:
            loss.backward()
    model.zero_grad(set_to_none=True)
    assert torch.isfinite(loss)
    assert watcher.operations > 100
    return watcher


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_step_allocates_neither(family: str, kind: str) -> None:
    model = model_of(family)
    with streamtune.stream(model, schedule=Schedule(chunk_size=CHUNK, head_chunk_size=HEAD_CHUNK)):
        watcher = watch(model, batch(kind))
    assert watcher.large == []
    assert watcher.largest >= ROWS * LENGTH * 32, "the layers' own outputs were seen"


@pytest.mark.full
@pytest.mark.parametrize("schedule", [{"keep_kv": True}, {"grad_dtype": "param"}])
def test_nor_does_any_schedule(schedule: dict[str, Any]) -> None:
    model = model_of("qwen3")
    with streamtune.stream(model, schedule=Schedule(chunk_size=CHUNK, head_chunk_size=HEAD_CHUNK, **schedule)):
        for kind in BATCHES:
            assert watch(model, batch(kind)).large == [], kind


@pytest.mark.full
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_nor_does_streamed_evaluation(family: str, training: bool) -> None:
    model = model_of(family).train(training)
    with streamtune.stream(model, schedule=Schedule(chunk_size=CHUNK, head_chunk_size=HEAD_CHUNK)):
        for kind in BATCHES:
            assert watch(model, batch(kind), train=False).large == [], kind


def test_nor_do_packed_rows_in_one_chunk() -> None:
    """Scores are made for the rows alone, with no chunk to help (gemma2's softcap takes the formula, not a kernel)."""
    model, inputs = model_of("gemma2"), batch("plain")
    inputs |= {"position_ids": torch.arange(64).repeat(LENGTH // 64).expand(ROWS, -1), "use_cache": False}
    with streamtune.stream(model, schedule=Schedule(chunk_size=LENGTH, head_chunk_size=HEAD_CHUNK)):
        watcher = watch(model, inputs)
        assert watcher.large == []
        del inputs["position_ids"]
        assert watch(model, inputs).saw(LENGTH, LENGTH), "the watcher sees them where the sequence is one row"


@pytest.mark.parametrize("how", ["autocast", "bf16"])
def test_nor_does_a_step_in_bf16(how: str) -> None:
    model = model_of("qwen3").to(torch.bfloat16 if how == "bf16" else torch.float32)
    schedule = Schedule(chunk_size=CHUNK, head_chunk_size=HEAD_CHUNK)
    with streamtune.stream(model, schedule=schedule), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        for kind in ("plain", "right"):
            assert watch(model, batch(kind)).large == []


def test_the_working_set_follows_the_chunk() -> None:
    """Whatever is made inside a chunk shrinks with it; what remains is a layer's own input and output."""
    model, found = model_of("qwen3"), []
    for size in (256, 64, 16):
        with streamtune.stream(model, schedule=Schedule(chunk_size=size, head_chunk_size=size)):
            found.append(watch(model, batch("plain")).largest)
    assert found[0] == 256 * VOCAB  # logits of one chunk
    assert found[1] == 64 * VOCAB
    assert found[2] == ROWS * LENGTH * 32  # hidden states of all tokens


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_watcher_sees_what_plain_autograd_allocates(family: str, train: bool) -> None:
    model = model_of(family, "eager")
    for kind in ("plain", "right"):
        watcher = watch(model, batch(kind), train)
        assert watcher.saw(LENGTH, LENGTH)
        assert watcher.saw(VOCAB)


def test_the_watcher_sees_the_mask_of_a_fused_attention() -> None:
    """torch's own attention hides its scores in the kernel, but a padded batch still gives it a T x T mask."""
    model = model_of("qwen3", "sdpa")
    assert watch(model, batch("right")).saw(LENGTH, LENGTH)
    assert not watch(model, batch("plain")).saw(LENGTH, LENGTH)


def test_streamed_layers_with_the_models_own_head_allocate_the_logits_alone() -> None:
    model = model_of("qwen3")
    with streamtune.stream(model, schedule=Schedule(chunk_size=CHUNK), head=False):
        watcher = watch(model, batch("right"))
    assert watcher.saw(VOCAB)
    assert not watcher.saw(LENGTH, LENGTH)
