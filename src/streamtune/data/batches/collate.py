"""Examples to a padded batch, one or several to a sequence. Labels are shifted here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.record_table import Example


class Batch(TypedDict):
    """B sequences padded to T positions; ids, mask and labels int64 on the CPU."""

    input_ids: Tensor
    """[B, T]"""
    attention_mask: Tensor
    """[B, T] 1 on tokens, 0 on padding"""
    shift_labels: Tensor
    """[B, T] the token position t is to predict, that is ``labels[:, t + 1]``; -100 where there is none"""
    weights: NotRequired[Tensor]
    """[B, T] fp32, the factor of the loss of what position t is to predict; left out where all are 1"""


class PackedBatch(Batch):
    """A batch whose sequences hold several rows. A model is given no mask: the positions show where a row ends."""

    position_ids: Tensor
    """[B, T] from 0 in each row; the padding behind the last is a row of its own"""


def collate(
    examples: Sequence[Example],
    *,
    pad_token_id: int,
    padding_side: Literal["right", "left"] = "right",
    pad_to_multiple_of: int = 1,
) -> Batch:
    """Pad examples to one length and shift their labels by one.

    ``shift_labels[b, t] = labels[b, t + 1]``, with -100 at the last position and on all padding. A sequence's first
    token is predicted by nothing, not even by padding on its left.

    Args:
        examples: At least one.
        pad_token_id: What to pad with; masked, so any id of the vocabulary does.
        padding_side: Where the padding goes.
        pad_to_multiple_of: Round the length up to a multiple of this.
    """
    assert examples, "a batch holds at least one example"
    assert pad_to_multiple_of >= 1, "the length is rounded up to a positive multiple"
    longest = max(len(example.input_ids) for example in examples)
    batch = _empty(len(examples), longest, pad_token_id, pad_to_multiple_of)
    length = batch["input_ids"].shape[1]
    for row, example in enumerate(examples):
        _write(batch, row, 0 if padding_side == "right" else length - len(example.input_ids), example)
    return batch


def collate_packed(
    packs: Sequence[Sequence[Example]], *, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PackedBatch:
    """Lay the examples of each pack end to end, and pad the packs to one length on the right.

    As :func:`collate` for each example: its last token predicts nothing, least of all the next row's first.

    Args:
        packs: At least one, each of at least one example.
        pad_token_id: What to pad with.
        pad_to_multiple_of: Round the length up to a multiple of this.
    """
    assert packs, "a batch holds at least one pack"
    assert all(packs), "a pack holds at least one example"
    longest = max(sum(len(example.input_ids) for example in pack) for pack in packs)
    batch = _empty(len(packs), longest, pad_token_id, pad_to_multiple_of)
    position_ids = torch.zeros_like(batch["input_ids"])
    for row, pack in enumerate(packs):
        start = 0
        for example in pack:
            stop = start + len(example.input_ids)
            _write(batch, row, start, example)
            position_ids[row, start:stop] = torch.arange(stop - start)
            start = stop
        position_ids[row, start:] = torch.arange(position_ids.shape[1] - start)
    return PackedBatch(**batch, position_ids=position_ids)


def _empty(rows: int, longest: int, pad_token_id: int, pad_to_multiple_of: int) -> Batch:
    """Return a batch that is all padding."""
    length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    return Batch(
        input_ids=torch.full((rows, length), pad_token_id),
        attention_mask=torch.zeros((rows, length), dtype=torch.int64),
        shift_labels=torch.full((rows, length), IGNORE_INDEX),
    )


def _write(batch: Batch, row: int, start: int, example: Example) -> None:
    """Put an example into a batch, its labels shifted."""
    size = len(example.input_ids)
    batch["input_ids"][row, start : start + size] = torch.as_tensor(np.array(example.input_ids, dtype=np.int64))
    batch["attention_mask"][row, start : start + size] = 1
    labels = np.array(example.labels[1:], dtype=np.int64)
    batch["shift_labels"][row, start : start + size - 1] = torch.as_tensor(labels)
    if example.weight != 1:
        weights = batch.setdefault("weights", torch.ones(batch["input_ids"].shape))
        weights[row, start : start + size] = example.weight
