"""One prompt with several completions: the rows of a preference pair or of a group, in each layout there is.

    shared   the prompt once, all completions behind it (``engine.branches``)
    batch    each completion behind a prompt of its own, as the rows of one batch
    turns    the same rows, one forward and backward after the other

The loss is the same number in all of them: the mean over all tokens of the completions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamtune.engine import Branches
from streamtune.labels import IGNORE_INDEX

__all__ = ["COMPLETIONS", "SHARING", "completion_length", "sharing_batches", "sharing_tokens"]

COMPLETIONS = 8
"""Completions of a prompt."""

SHARING = {
    "batch": f"{COMPLETIONS} rows, one batch",
    "turns": f"{COMPLETIONS} rows in turn",
    "shared": "prompt shared",
}
"""The layouts, for people."""


def completion_length(prompt: int) -> int:
    """Return the tokens of a completion: a fourth of its prompt's."""
    return max(2, prompt // 4)


def sharing_tokens(prompt: int) -> int:
    """Return the number of random tokens that are needed: a prompt, and the completions."""
    return prompt + COMPLETIONS * completion_length(prompt)


def sharing_batches(ids_T: Tensor, prompt: int, layout: str) -> list[dict[str, Any]]:
    """Return the batches of a step.

    Args:
        ids_T: ``[sharing_tokens(prompt)]``, the prompt and then the completions.
        prompt: Tokens of the prompt.
        layout: ``shared``, ``batch`` or ``turns``.
    """
    shared, last = ids_T[: prompt - 1], ids_T[prompt - 1 : prompt]
    branches = [torch.cat([last, part]) for part in ids_T[prompt:].split(completion_length(prompt))]
    count = sum(len(branch) - 1 for branch in branches)
    nothing = ids_T.new_full((1,), IGNORE_INDEX)
    if layout == "shared":
        targets = [shared.new_full(shared.shape, IGNORE_INDEX)]
        targets += [torch.cat([branch[1:], nothing]) for branch in branches]
        tree = Branches.of([(prompt - 1, [len(branch) for branch in branches])])
        ids = torch.cat([shared, *branches])
        return [{"input_ids": ids[None], "targets": torch.cat(targets)[None], "count": count, "branches": tree}]
    rows = torch.stack([torch.cat([shared, branch]) for branch in branches])
    targets_BT = torch.cat([rows[:, 1:], nothing.expand(len(rows), 1)], 1)
    targets_BT[:, : prompt - 1] = IGNORE_INDEX
    if layout == "batch":
        return [{"input_ids": rows, "targets": targets_BT, "count": count}]
    return [
        {"input_ids": row[None], "targets": target[None], "count": count}
        for row, target in zip(rows, targets_BT, strict=True)
    ]
