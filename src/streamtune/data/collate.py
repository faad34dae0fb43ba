"""Examples to a padded batch. Labels are shifted here, once, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from streamtune.data.render import IGNORE_INDEX
from streamtune.data.store import Example

__all__ = ["Batch", "collate"]


class Batch(TypedDict):
    """B sequences padded to T positions; everything int64 on the CPU."""

    input_ids: Tensor
    """[B, T]"""
    attention_mask: Tensor
    """[B, T] 1 on tokens, 0 on padding"""
    shift_labels: Tensor
    """[B, T] the token position t is to predict, that is ``labels[:, t + 1]``; -100 where there is none"""


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
    length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    input_ids = np.full((len(examples), length), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros((len(examples), length), dtype=np.int64)
    shift_labels = np.full((len(examples), length), IGNORE_INDEX, dtype=np.int64)
    for row, example in enumerate(examples):
        size = len(example.input_ids)
        start = 0 if padding_side == "right" else length - size
        input_ids[row, start : start + size] = example.input_ids
        attention_mask[row, start : start + size] = 1
        shift_labels[row, start : start + size - 1] = example.labels[1:]
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        shift_labels=torch.from_numpy(shift_labels),
    )
