"""Describe steps that compute log-probabilities of completions, as in DPO and GRPO, and run unstreamed baselines.

In such a step the head's logits are computed twice, final hidden states are stored until the loss is computed, and a
reference may run first. The memory depends on the layout of prompts and completions in the sequence, and hardly on the
loss.

The baselines train without streaming: checkpointing of every layer, log-probabilities from full logits, and Liger's
fused loss. Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine import Branches, TokenScores
from streamtune.engine.hf_names import set_checkpointing
from streamtune.errors import ArgumentError

Trees = tuple[tuple[int, tuple[int, ...]], ...]
"""Numbers of tokens ``(trunk, branches)`` for each prompt, the argument of ``Branches.of``.

The trunk is the prompt without its last token. A branch is this last token and one completion.
"""


@dataclass(frozen=True)
class Scored:
    """Completions of a micro-batch whose log-probabilities are computed, as in DPO and GRPO.

    Attributes:
        trees: For each prompt, number of tokens of the trunk (the prompt without its last token), and of each branch
            (this token and a completion).
        share: True for one sequence in which each prompt occurs once; False for one row per prompt and completion.
        entropy: True if the entropy at each scored token is computed too.
        forwards: Number of extra forwards of the same tokens without gradient, by a reference or the model itself; a
            fraction if one forward is used in several steps.
        common: For each prompt, number of tokens at the end of the trunk that are scored, because all completions begin
            with them. Empty if completions begin differently.

    Raises:
        ArgumentError: There are no trees, a branch has fewer than 2 tokens, or ``common`` does not match the trees.
    """

    trees: Trees
    share: bool = True
    entropy: bool = False
    forwards: float = 0.0
    common: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.trees or any(trunk < 0 or not branches or min(branches) < 2 for trunk, branches in self.trees):
            raise ArgumentError(
                f"each tree must have a prompt of 0 or more tokens and completions of 2 or more, found {self.trees}"
            )
        within = zip(self.common, self.trees, strict=False)
        if self.common and (len(self.common) != len(self.trees) or any(not 0 <= c <= t for c, (t, _) in within)):
            raise ArgumentError(
                f"common must have one number of tokens for each of the {len(self.trees)} trees, from 0 to the length "
                f"of the tree's prompt, found {self.common}"
            )

    @property
    def num_rows(self) -> int:
        return 1 if self.share else self.num_completions

    @property
    def length(self) -> int:
        if self.share:
            return sum(trunk + sum(branches) for trunk, branches in self.trees)
        return max(trunk + max(branches) for trunk, branches in self.trees)

    @property
    def num_completions(self) -> int:
        return sum(len(branches) for _, branches in self.trees)

    @property
    def num_targets(self) -> int:
        """Number of scored tokens in all rows."""
        copies = [1 if self.share else len(branches) for _, branches in self.trees]
        common = sum(tokens * times for tokens, times in zip(self._common_token_counts, copies, strict=True))
        return common + sum(sum(branches) - len(branches) for _, branches in self.trees)

    @property
    def _common_token_counts(self) -> tuple[int, ...]:
        return self.common or (0,) * len(self.trees)

    @property
    def num_unmasked_pairs(self) -> int:
        """Number of query-key pairs that are not masked, in all rows."""
        if not self.share:  # padding is computed like other tokens
            return self.num_rows * (self.length * (self.length + 1) // 2)
        total = 0
        for trunk, branches in self.trees:
            total += trunk * (trunk + 1) // 2
            total += sum(branch * trunk + branch * (branch + 1) // 2 for branch in branches)
        return total

    @property
    def has_hidden_tokens(self) -> bool:
        """True if several completions share the sequence, so that tokens do not attend to all earlier tokens."""
        return self.share and (len(self.trees) > 1 or len(self.trees[0][1]) > 1)

    def describe(self) -> str:
        """Return a text such as ``8 completions of 1 prompt``."""
        prompts, completions = len(self.trees), self.num_completions
        return (
            f"{completions} completion{'s' if completions > 1 else ''} of {prompts} prompt{'s' if prompts > 1 else ''}"
        )

    def as_separate_rows(self) -> Scored:
        return replace(self, share=False)

    def random_batch(self, vocabulary: int, device: torch.device) -> dict[str, Any]:
        """Return a batch of random token ids below ``vocabulary`` in the layout of the trees, to measure real steps."""
        draw = torch.Generator().manual_seed(0)

        def random_tokens(count: int) -> Tensor:
            return torch.randint(0, vocabulary, (count,), generator=draw)

        ids = torch.zeros(self.num_rows, self.length, dtype=torch.long)
        row = place = 0
        for trunk, branches in self.trees:
            prompt = random_tokens(trunk + 1)
            for number, branch in enumerate(branches):
                if not number or not self.share:
                    ids[row, place : place + trunk] = prompt[:-1]
                    place += trunk
                ids[row, place : place + branch] = torch.cat([prompt[-1:], random_tokens(branch - 1)])
                row, place = (row, place + branch) if self.share else (row + 1, 0)
        targets = torch.where(self.targets() == IGNORE_INDEX, IGNORE_INDEX, ids.roll(-1, 1))
        tree = {"branches": Branches.of(self.trees)} if self.has_hidden_tokens else {}
        return {"input_ids": ids.to(device), "targets": targets.to(device), "count": self.num_targets, **tree}

    def targets(self) -> Tensor:
        """Return int64 targets ``[B, T]``: 0 where the next token is scored, -100 elsewhere."""
        if not self.share:
            parts = [
                (trunk, branch, common)
                for (trunk, branches), common in zip(self.trees, self._common_token_counts, strict=True)
                for branch in branches
            ]
            targets = torch.full((self.num_rows, self.length), IGNORE_INDEX)
            for row, (trunk, branch, common) in enumerate(parts):
                targets[row, trunk - common : trunk + branch - 1] = 0
            return targets
        targets = torch.full((1, self.length), IGNORE_INDEX)
        place = 0
        for (trunk, branches), common in zip(self.trees, self._common_token_counts, strict=True):
            targets[0, place + trunk - common : place + trunk] = 0
            place += trunk
            for branch in branches:
                targets[0, place : place + branch - 1] = 0
                place += branch
        return targets


Completions = Callable[[int, int], Scored]
"""Function of length (tokens of prompt plus completion) and batch size that returns a micro-batch's completions."""


class PlainScores:
    """Computes log-probabilities with a model that is not streamed, by the same method as ``StreamHandle``.

    All logits of a batch exist at once and are saved for the backward. Router losses are not included.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.routers = self

    @contextmanager
    def without_losses(self) -> Iterator[None]:
        yield

    def logprobs(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        branches: Branches | None = None,
        entropy: bool = False,
        temperature: float = 1.0,
        model: nn.Module | None = None,
        **arguments: Any,
    ) -> TokenScores:
        """Return log-probabilities as ``StreamHandle.logprobs`` does.

        Raises:
            ArgumentError: ``branches`` is given; shared prompts need a streamed model.
        """
        if branches is not None:
            raise ArgumentError("shared prompts need a streamed model", fix="pass one row per completion")
        called: Any = self.model if model is None else model
        logits = called(input_ids=input_ids, **{"use_cache": False, **arguments}).logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1.0:
            wide = wide / temperature
        flat = nn.functional.cross_entropy(
            wide.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE_INDEX
        )
        entropies = None
        if entropy:
            with torch.no_grad():  # entropy is only logged
                entropies = torch.where(targets == IGNORE_INDEX, 0.0, _entropy(wide))
        return TokenScores(-flat.view(targets.shape), entropies, None)


def _entropy(logits_BTV: Tensor) -> Tensor:
    """Return the entropies ``[B, T]``, computed one row at a time."""
    return torch.stack([_row_entropy(row) for row in logits_BTV])


def _row_entropy(logits_TV: Tensor) -> Tensor:
    logprobs = logits_TV.log_softmax(-1)
    return -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(-1)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` with gradient checkpointing: only its inputs are saved for the backward."""
    return checkpoint(function, *args, use_reentrant=False)


def use_checkpointing(model: Any, function: Callable[..., Any] = recompute) -> None:
    set_checkpointing(model, True, function)


@contextmanager
def checkpointing(model: Any, function: Callable[..., Any] = recompute) -> Iterator[None]:
    """Context manager in which the model runs with gradient checkpointing: ``function`` calls each layer."""
    use_checkpointing(model, function)
    try:
        yield
    finally:
        set_checkpointing(model, False, function)


def fused_loss(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the loss of a model on ``meta``, with the same allocations as Liger's fused loss; all tokens have a
    target.

    Liger (``LigerFusedLinearCrossEntropyLoss``, version 0.8.5) computes the loss and the head's gradients together, in
    chunks of tokens, and stores the gradients until the backward. Chunks and buffers here have the same sizes. Liger's
    kernels overwrite the logits, so no other tensor is allocated on ``meta``.
    """
    causal = base_of(model)
    hidden: Tensor = causal.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    out: Tensor = _FusedLoss.apply(hidden.flatten(0, 1), causal.get_output_embeddings().weight)
    return out


class _FusedLoss(torch.autograd.Function):
    """Mean cross-entropy of ``hidden_NC @ weight_VC.T`` on ``meta``, with Liger's buffers."""

    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
        tokens, (classes, width) = len(hidden_NC), weight_VC.shape
        size = min(tokens, 1 << (-(-tokens // -(-classes // width)) - 1).bit_length())
        ctx.hidden_grad = torch.zeros_like(hidden_NC)
        ctx.weight_grad = torch.zeros_like(weight_VC) if ctx.needs_input_grad[1] else None
        losses = hidden_NC.new_zeros(tokens, dtype=torch.float32)
        logits = hidden_NC.new_empty(size, classes)
        for start in range(0, tokens, size):
            chunk = hidden_NC[start : start + size]
            chunk_logits = logits[: len(chunk)]
            torch.mm(chunk, weight_VC.t().to(chunk.dtype), out=chunk_logits)
            torch.mm(chunk_logits, weight_VC.to(chunk.dtype), out=ctx.hidden_grad[start : start + size])
            if ctx.weight_grad is not None:
                torch.addmm(ctx.weight_grad, chunk_logits.t(), chunk, out=ctx.weight_grad)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden_grad, weight_grad = ctx.hidden_grad, ctx.weight_grad
        del ctx.hidden_grad, ctx.weight_grad
        return hidden_grad, weight_grad
