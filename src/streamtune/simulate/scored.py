"""Completions that a step scores token by token, instead of a loss on the next tokens of its rows.

An objective of preferences or of rewards computes its loss from log-probabilities: the head's logits are computed
twice, final hidden states are kept until the loss is known, and a reference may run first. The memory of that depends
on the layout of prompts and completions in the sequence, and hardly on the objective.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from streamtune.engine import Branches
from streamtune.errors import ArgumentError

__all__ = ["IGNORED", "Completions", "Scored", "Trees"]

Trees = tuple[tuple[int, tuple[int, ...]], ...]
"""For each prompt the tokens of its trunk and of its branches, as ``Branches.of`` takes them.

The last token of a prompt is the first of every branch, which scores the others."""

IGNORED = -100


@dataclass(frozen=True)
class Scored:
    """The completions that a micro-batch scores.

    Attributes:
        trees: The prompts and their completions.
        share: True for one sequence with each prompt once; else a row for each completion behind its own copy.
        entropy: True if the entropies at the targets are computed as well.
        forwards: Number of further forwards of the same tokens without gradient, of a reference or of the model itself;
            a fraction where one serves several steps.
    """

    trees: Trees
    share: bool = True
    entropy: bool = False
    forwards: float = 0.0

    def __post_init__(self) -> None:
        if not self.trees or any(trunk < 0 or not branches or min(branches) < 2 for trunk, branches in self.trees):
            raise ArgumentError(
                "a prompt has a trunk of 0 or more tokens and branches of 2 or more, of which the first is its last"
            )

    @property
    def rows(self) -> int:
        """Number of sequences, B."""
        return 1 if self.share else self.completions

    @property
    def length(self) -> int:
        """Number of tokens of a sequence, T."""
        if self.share:
            return sum(trunk + sum(branches) for trunk, branches in self.trees)
        return max(trunk + max(branches) for trunk, branches in self.trees)

    @property
    def completions(self) -> int:
        """Number of completions."""
        return sum(len(branches) for _, branches in self.trees)

    @property
    def num_targets(self) -> int:
        """Number of tokens that are scored."""
        return sum(sum(branches) - len(branches) for _, branches in self.trees)

    @property
    def pairs(self) -> int:
        """Number of pairs of a token and one that it sees, itself included, in all rows."""
        if not self.share:  # padding behind a row is computed like it
            return self.rows * (self.length * (self.length + 1) // 2)
        total = 0
        for trunk, branches in self.trees:
            total += trunk * (trunk + 1) // 2
            total += sum(branch * trunk + branch * (branch + 1) // 2 for branch in branches)
        return total

    @property
    def shares(self) -> bool:
        """True if tokens of the sequence are hidden from later ones, so that it is no ordinary causal row."""
        return self.share and (len(self.trees) > 1 or len(self.trees[0][1]) > 1)

    def describe(self) -> str:
        """Return ``8 completions of 1 prompt`` or the like."""
        prompts, completions = len(self.trees), self.completions
        return (
            f"{completions} completion{'s' if completions > 1 else ''} of {prompts} prompt{'s' if prompts > 1 else ''}"
        )

    def apart(self) -> Scored:
        """Return the same completions, each behind its own copy of the prompt."""
        return replace(self, share=False)

    def batch(self, vocabulary: int, device: torch.device) -> dict[str, Any]:
        """Return random tokens as a batch of ``plan.modes``: the same rows, shared or apart."""
        draw = torch.Generator().manual_seed(0)

        def tokens(count: int) -> Tensor:
            return torch.randint(0, vocabulary, (count,), generator=draw)

        ids = torch.zeros(self.rows, self.length, dtype=torch.long)
        row = place = 0
        for trunk, branches in self.trees:
            prompt = tokens(trunk + 1)
            for number, branch in enumerate(branches):
                if not number or not self.share:
                    ids[row, place : place + trunk] = prompt[:-1]
                    place += trunk
                ids[row, place : place + branch] = torch.cat([prompt[-1:], tokens(branch - 1)])
                row, place = (row, place + branch) if self.share else (row + 1, 0)
        targets = torch.where(self.targets() == IGNORED, IGNORED, ids.roll(-1, 1))
        tree = {"branches": Branches.of(self.trees)} if self.shares else {}
        return {"input_ids": ids.to(device), "targets": targets.to(device), "count": self.num_targets, **tree}

    def targets(self) -> Tensor:
        """Return ``[B, T]`` int64: 0 where a token is scored, -100 elsewhere."""
        parts = [(trunk, branch) for trunk, branches in self.trees for branch in branches]
        if not self.share:
            targets = torch.full((self.rows, self.length), IGNORED)
            for row, (trunk, branch) in enumerate(parts):
                targets[row, trunk : trunk + branch - 1] = 0
            return targets
        targets = torch.full((1, self.length), IGNORED)
        place = 0
        for trunk, branches in self.trees:
            place += trunk
            for branch in branches:
                targets[0, place : place + branch - 1] = 0
                place += branch
        return targets


Completions = Callable[[int, int], Scored]
"""``(length, batch_size)`` -> what a micro-batch scores where a prompt with its completion has ``length`` tokens."""
