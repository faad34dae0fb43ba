"""Losses on a router's outputs over the whole batch, exact under streaming.

A mixture's load-balancing loss (Fedus et al., Switch Transformers, arXiv 2101.03961, eq. 4) and its router z-loss (Zoph
et al., ST-MoE, arXiv 2202.08906, eq. 5) are not sums over chunks: the first multiplies two means,

    L_balance = E sum_e f_e P_e,    f_e = sum_t [e routed for t] / N,    P_e = sum_t softmax(r_t)_e / N
    L_z       = sum_t logsumexp(r_t)^2 / N                               for the N pairs of a token and a layer's router

But both are functions of sums over tokens, and a sum over tokens is a sum over chunks. So a streamed layer returns its
sums with its hidden states, and each chunk's backward gets their gradient unchanged (``vjp``). f is a count and has no
gradient, so its scope can be wider than one backward: the micro-batch, or every micro-batch and rank of the step (Qiu
et al., arXiv 2501.11873), which takes one reduction of E numbers.

Shape suffixes: N tokens, E experts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from streamtune.engine.hf_names import BALANCE_ARGUMENTS, BALANCE_LOSS, recorded_outputs
from streamtune.engine.observe import attribute_as
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.exchange import summed


@dataclass(frozen=True)
class RouterLoss:
    """Coefficients and scope of the router losses that are added to the loss.

    Args:
        balance: Coefficient of the load-balancing loss (``router_aux_loss_coef``).
        z: Coefficient of the router z-loss.
        scope: Tokens over which the experts' frequencies are counted: those of the ``micro`` batch, or of the whole
            ``global`` step, on every rank.

    Raises:
        ArgumentError: A coefficient is negative, or the scope is unknown.
    """

    balance: float = 0.0
    z: float = 0.0
    scope: Literal["micro", "global"] = "micro"

    def __post_init__(self) -> None:
        if self.balance < 0 or self.z < 0:
            raise ArgumentError(f"coefficients of a router's losses are positive, not {self.balance!r} and {self.z!r}")
        if self.scope not in ("micro", "global"):
            raise ArgumentError(f"the scope of a router's losses is 'micro' or 'global', not {self.scope!r}")


@dataclass(frozen=True)
class RouterSums:
    """Sums over tokens and layers.

    ``probabilities`` ``[E]`` and ``squares`` ``[]`` have gradients; ``routed`` ``[E]``, how often an expert was chosen,
    and ``tokens`` ``[]`` have none.
    """

    probabilities: Tensor
    squares: Tensor
    routed: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, logits_NE: Tensor, top_k: int, mask_N: Tensor | None) -> RouterSums:
        """Return the sums of one router's logits; a token whose mask is 0 does not count."""
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        weight_N1 = logits_NE.new_ones(len(logits_NE), 1) if mask_N is None else mask_N.to(logits_NE)[:, None]
        p_NE = logits_NE.softmax(-1)
        chosen_NE = torch.zeros_like(p_NE).scatter_(-1, p_NE.detach().topk(top_k, dim=-1).indices, 1.0)
        return cls(
            (p_NE * weight_N1).sum(0),
            (logits_NE.logsumexp(-1).square() * weight_N1[:, 0]).sum(),
            (chosen_NE * weight_N1).sum(0),
            weight_N1.sum().detach(),
        )

    def __add__(self, other: RouterSums) -> RouterSums:
        return RouterSums(*(mine + its for mine, its in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> list[Tensor]:
        """The four sums."""
        return [self.probabilities, self.squares, self.routed, self.tokens]

    @property
    def counts(self) -> Tensor:
        """``[E + 1]``: the sums without a gradient, as one tensor to reduce over ranks."""
        return torch.cat([self.routed.detach(), self.tokens.detach()[None]])


@dataclass(frozen=True)
class RouterTerms:
    """The terms of the last call's loss; scalars without gradient."""

    loss: Tensor
    """Loss before the routers' losses were added."""
    balance: Tensor
    """The micro-batch's share in the step's balance loss, without its coefficient: the shares add up."""


class RouterWatch:
    """Collects a model's router logits while a call is streamed, and computes the losses to add to its loss.

    Args:
        layers: Decoder layers of the model.
        loss: Losses to add; None takes the balance coefficient of the model's own configuration, and only if a call or
            the configuration says ``output_router_logits``.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], loss: RouterLoss | None) -> None:
        self.model, self.loss = model, loss
        self.active = False
        self.totals: Tensor | None = None
        """Counts of the whole global step ``[E + 1]``, if the caller has them (:meth:`StreamHandle.count_routes`)."""
        self.weight = 1.0
        """Share of the micro-batch in the step's mean; not read under a global scope."""
        self.counted_BT: Tensor | None = None
        """Nonzero for tokens of the next calls that are not padding, if their attention mask does not say so."""
        self.shards: SequenceShards | None = None
        """Shards whose tokens the routers see, if ranks share the sequence."""
        self.silent = False
        self.terms: RouterTerms | None = None
        """Terms of the last call with a loss."""
        self.found: RouterSums | None = None
        self._heard: list[Tensor] | None = None
        self.mask_BT: Tensor | None = None
        """Nonzero for tokens of the call that are not padding."""
        self._hooks = [
            router.register_forward_hook(partial(self._hear, index))
            for layer in layers
            for router, index in _routers(model, layer)
        ]
        if loss is not None:
            self._check()

    def remove(self) -> None:
        """Remove the hooks from the routers."""
        for hook in self._hooks:
            hook.remove()

    def open(self, attention_mask: Any) -> None:
        """Begin a call, whose attention mask is given."""
        self._check()
        self.active, self.found = True, None
        mask = attention_mask if self.counted_BT is None else self.counted_BT
        if self.shards is not None and isinstance(mask, Tensor):
            mask = self.shards.cut(mask, 1, 0)
        self.mask_BT = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def close(self) -> RouterSums | None:
        """End the call; return the sums of its layers, or None if no layer reported any."""
        self.active, found, self.found = False, self.found, None
        return found

    def silenced(self) -> AbstractContextManager[None]:
        """Add no router losses in calls inside the context, so that models can be compared by their predictions."""
        return attribute_as(self, "silent", True)

    def counting(self, tokens_BT: Tensor) -> AbstractContextManager[None]:
        """Count the tokens with nonzero entries in calls inside the context, in place of their attention mask."""
        return attribute_as(self, "counted_BT", tokens_BT)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect the logits of every router that runs inside the context, for :meth:`sums`."""
        self._heard = []
        try:
            yield
        finally:
            self._heard = None

    def sums(self, mask_BT: Tensor | None) -> list[Tensor]:
        """Return the sums of the chunk that is listened to, as outputs of the layer; an empty list without a router."""
        mask_N = None if mask_BT is None else mask_BT.flatten()
        found: RouterSums | None = None
        for logits in self._heard or ():
            logits_NE = logits.flatten(0, -2)
            if mask_N is not None and len(mask_N) != len(logits_NE):
                raise UnsupportedModelError(f"a router of {type(self.model).__name__} sees other tokens than the batch")
            one = RouterSums.of(logits_NE, self._top_k, mask_N)
            found = one if found is None else found + one
        return [] if found is None else found.parts

    def add(self, parts: Sequence[Tensor]) -> None:
        """Add the sums of a layer's whole sequence to the sums of the call."""
        if parts:
            sums = RouterSums(*parts)
            self.found = sums if self.found is None else self.found + sums

    def losses(self, sums: RouterSums) -> tuple[Tensor, Tensor]:
        """Return ``(balance loss, term to add to the loss)``; with global scope, the call's shares of the step's."""
        loss = self.loss or RouterLoss(balance=balance_coefficient(self.model))
        counts = sums.counts
        if loss.scope == "global":
            counts = reduced(counts) if self.totals is None else self.totals
        elif self.shards is not None:
            counts = summed(counts, self.shards.group)
        tokens = counts[-1]
        experts = getattr(self.model, "num_experts", len(counts) - 1)
        balance = experts * (counts[:-1] / tokens * sums.probabilities / tokens).sum()
        squares = sums.squares / tokens
        if self.shards is not None:  # of the whole sequence on every rank; the gradient is a rank's share
            balance, squares = (summed(x, self.shards.group) for x in (balance, squares))
        return balance, self.share * (loss.balance * balance + loss.z * squares)

    @property
    def share(self) -> float:
        """Factor on a call's router losses: ``weight``, or 1 with global scope, where the calls' shares add up."""
        return 1.0 if self.loss is not None and self.loss.scope == "global" else self.weight

    def _hear(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._heard is not None:
            self._heard.append(output[index] if isinstance(output, tuple | list) else output)

    @property
    def _top_k(self) -> int:
        return int(getattr(self.model, "num_experts_per_tok", None) or self.model.config.num_experts_per_tok)

    def _check(self) -> None:
        name = type(self.model).__name__
        if not self._hooks:
            raise UnsupportedModelError(f"{name} has no router in its decoder layers, so there is nothing to balance")
        form = getattr(sys.modules[type(self.model).__module__], BALANCE_LOSS, None)
        if form is None or tuple(inspect.signature(form).parameters) != BALANCE_ARGUMENTS:
            raise UnsupportedModelError(
                f"{name} has a balance loss of its own form, which is not streamed",
                fix="train it without output_router_logits",
            )


def balances_itself(model: Any) -> bool:
    """Return True if a model adds its balance loss to a call with labels that does not pass ``output_router_logits``.

    Its configuration decides, unless its forward has a boolean default for that argument.
    """
    parameter = inspect.signature(type(model).forward).parameters.get("output_router_logits")
    if parameter is not None and isinstance(parameter.default, bool):
        return parameter.default
    return bool(getattr(model.config.get_text_config(decoder=True), "output_router_logits", False))


def not_balanced(model: Any) -> dict[str, bool]:
    """Return arguments with which a ``transformers`` model adds no router loss and keeps no router logits."""
    return {"output_router_logits": False} if balances_itself(model) else {}


def balance_coefficient(model: Any) -> float:
    """Return the coefficient with which a ``transformers`` model multiplies its balance loss.

    Raises:
        UnsupportedModelError: Neither the model nor its configuration has it.
    """
    config = model.config.get_text_config(decoder=True)
    for owner, name in (
        (model, "router_aux_loss_coef"),
        (config, "router_aux_loss_coef"),
        (config, "aux_loss_coef"),
    ):
        if (value := getattr(owner, name, None)) is not None:
            return float(value)
    raise UnsupportedModelError(
        f"{type(model).__name__} does not say how much its balance loss counts",
        fix="use stream(model, router_loss=RouterLoss(balance=...))",
    )


def reduced(counts: Tensor) -> Tensor:
    """Return the counts summed over all ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
    return counts


def _routers(model: nn.Module, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield (router, index of its logits in its output) for the modules that transformers records as routers."""
    recorded = [spec for module in model.modules() for spec in recorded_outputs(module, "router_logits")]
    for name, module in layer.named_modules():
        for kind, where, index in recorded:
            of_kind = isinstance(kind, type) and isinstance(module, kind)
            if of_kind and (where is None or name.endswith(where)):
                yield module, index
                break
