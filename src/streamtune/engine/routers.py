"""Losses on the router logits of a whole batch, exact although layers run in chunks.

The load-balancing loss (Switch Transformers, arXiv 2101.03961, eq. 4) multiplies two means over the batch. The router
z-loss (ST-MoE, arXiv 2202.08906, eq. 5) is one mean:

    L_balance = E sum_e f_e P_e,    f_e = sum_t [e routed for t] / N,    P_e = sum_t softmax(r_t)_e / N
    L_z       = sum_t logsumexp(r_t)^2 / N                               for the N pairs of a token and a layer's router

Both are functions of sums over tokens, and a sum over tokens is a sum over chunks. So a layer returns its sums together
with its hidden states. Each chunk's backward gets the gradient of the sums unchanged (``vjp``). The count f has no
gradient, so it may cover more tokens than one backward. It covers the micro-batch, or all micro-batches and ranks of a
step (Qiu et al., arXiv 2501.11873). The latter costs one reduction of E + 1 numbers.

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

from streamtune.engine.hf_names import BALANCE_ARGUMENTS, BALANCE_LOSS, recorded_modules
from streamtune.engine.observe import temporary_attribute
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.exchange import sum_over_ranks


@dataclass(frozen=True)
class RouterLoss:
    """Settings of the losses on the routers of a mixture of experts, which are added to the model's loss.

    Args:
        balance: Coefficient of the load-balancing loss (``router_aux_loss_coef``).
        z: Coefficient of the router z-loss.
        scope: Tokens over which the load-balancing loss counts how often each expert is chosen. ``micro`` counts over
            the micro-batch, ``global`` over all micro-batches of the step on all ranks.

    Raises:
        ArgumentError: A coefficient is negative, or the scope is unknown.

    Example:
        >>> RouterLoss(balance=0.01, z=0.001).balance
        0.01
    """

    balance: float = 0.0
    z: float = 0.0
    scope: Literal["micro", "global"] = "micro"

    def __post_init__(self) -> None:
        if self.balance < 0 or self.z < 0:
            raise ArgumentError(
                f"RouterLoss: balance and z must be 0 or more, found balance={self.balance!r}, z={self.z!r}"
            )
        if self.scope not in ("micro", "global"):
            raise ArgumentError(f"RouterLoss.scope must be 'micro' or 'global', found {self.scope!r}")


@dataclass(frozen=True)
class RouterSums:
    """Sums over tokens and layers of what routers compute; the router losses are functions of these sums."""

    probabilities: Tensor
    """Sum of the experts' probabilities ``[E]``, with a gradient."""
    squares: Tensor
    """Sum of ``logsumexp(logits) ** 2`` ``[]``, with a gradient."""
    routed: Tensor
    """Number of tokens routed to each expert ``[E]``."""
    tokens: Tensor
    """Number of (token, router) pairs ``[]``."""

    @classmethod
    def from_logits(cls, logits_NE: Tensor, top_k: int, mask_N: Tensor | None) -> RouterSums:
        """Return the sums for one router's logits; tokens at which ``mask_N`` is 0 are not counted."""
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
        return RouterSums(*(own_sum + its for own_sum, its in zip(self.as_list, other.as_list, strict=True)))

    @property
    def as_list(self) -> list[Tensor]:
        """The four sums, in the order of the fields."""
        return [self.probabilities, self.squares, self.routed, self.tokens]

    @property
    def counts(self) -> Tensor:
        """Counts ``[E + 1]``: ``routed`` and ``tokens`` in one tensor, to reduce over ranks."""
        return torch.cat([self.routed.detach(), self.tokens.detach()[None]])


@dataclass(frozen=True)
class RouterTerms:
    """Terms of the last call's loss, for the log: scalars without a gradient."""

    loss: Tensor
    """Loss before the router losses are added."""
    balance: Tensor
    """Balance loss without its coefficient: this micro-batch's share of the step's balance loss."""


class RouterLogitCollector:
    """Collects a model's router logits during a call, and computes the router losses to add to its loss.

    Args:
        model: Streamed model.
        layers: Decoder layers of the model.
        loss: Router losses to add. None adds the balance loss with the coefficient in the model's configuration, if a
            call or the configuration sets ``output_router_logits``.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], loss: RouterLoss | None) -> None:
        self.model, self.loss = model, loss
        self.active = False
        self.totals: Tensor | None = None
        """Counts ``[E + 1]`` of the whole step (:meth:`StreamHandle.count_routes`). None sums the counts of each call
        over ranks.
        """
        self.weight = 1.0
        """Weight of the micro-batch in the mean over the step; not used if the scope is ``global``."""
        self.counted_BT: Tensor | None = None
        """Mask for the next calls, nonzero at the tokens to count; None uses the attention masks of the calls."""
        self.shards: SequenceShards | None = None
        """Tokens of the sequence on which this rank's routers run, if ranks share the sequence."""
        self.silent = False
        self.terms: RouterTerms | None = None
        self.call_sums: RouterSums | None = None
        """Sums of the layers that have run in the current call."""
        self._chunk_logits: list[Tensor] | None = None
        self.mask_BT: Tensor | None = None
        """Mask for the current call, nonzero at the tokens to count; None counts all tokens."""
        self._hooks = [
            router.register_forward_hook(partial(self._collect, index))
            for layer in layers
            for router, index in _router_modules(model, layer)
        ]
        if loss is not None:
            self._check_supported()

    def remove(self) -> None:
        """Remove the hooks from the routers."""
        for hook in self._hooks:
            hook.remove()

    def begin_call(self, attention_mask: Any) -> None:
        """Begin a model call: clear the sums, and collect router logits of the tokens in ``attention_mask``."""
        self._check_supported()
        self.active, self.call_sums = True, None
        mask = attention_mask if self.counted_BT is None else self.counted_BT
        if self.shards is not None and isinstance(mask, Tensor):
            mask = self.shards.select_tokens(mask, 1, 0)
        self.mask_BT = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def end_call(self) -> RouterSums | None:
        """End the model call; return the sums over its layers, or None if no router ran."""
        self.active, sums, self.call_sums = False, self.call_sums, None
        return sums

    def without_losses(self) -> AbstractContextManager[None]:
        """Return a context in which model calls add no router losses."""
        return temporary_attribute(self, "silent", True)

    def counting_tokens(self, tokens_BT: Tensor) -> AbstractContextManager[None]:
        """Return a context in which routers count the tokens where ``tokens_BT`` is nonzero.

        Otherwise they count the tokens of the attention mask.
        """
        return temporary_attribute(self, "counted_BT", tokens_BT)

    @contextmanager
    def collecting_logits(self) -> Iterator[None]:
        """Collect the logits of every router that runs in this context, for :meth:`sum_collected_logits`."""
        self._chunk_logits = []
        try:
            yield
        finally:
            self._chunk_logits = None

    def sum_collected_logits(self, mask_BT: Tensor | None) -> list[Tensor]:
        """Return the four sums (:class:`RouterSums`) for the collected logits; an empty list if no router ran."""
        mask_N = None if mask_BT is None else mask_BT.flatten()
        total: RouterSums | None = None
        for logits in self._chunk_logits or ():
            logits_NE = logits.flatten(0, -2)
            if mask_N is not None and len(mask_N) != len(logits_NE):
                raise UnsupportedModelError(
                    f"a router of {type(self.model).__name__} returns logits for {len(logits_NE)} tokens, but the "
                    f"layer ran on {len(mask_N)}"
                )
            sums = RouterSums.from_logits(logits_NE, self._top_k, mask_N)
            total = sums if total is None else total + sums
        return [] if total is None else total.as_list

    def add_layer_sums(self, parts: Sequence[Tensor]) -> None:
        """Add the sums of one layer over the whole sequence to the sums of the call."""
        if parts:
            sums = RouterSums(*parts)
            self.call_sums = sums if self.call_sums is None else self.call_sums + sums

    def compute_losses(self, sums: RouterSums) -> tuple[Tensor, Tensor]:
        """Return the balance loss, and the router losses to add to the call's loss.

        The first is ``E sum_e f_e P_e``, the second ``loss_factor * (balance * L_balance + z * L_z)`` with the formulas
        of this module. If the scope is ``global``, both are this call's shares of the step's losses.
        """
        loss = self.loss or RouterLoss(balance=balance_coefficient(self.model))
        counts = sums.counts
        if loss.scope == "global":
            counts = sum_counts_over_ranks(counts) if self.totals is None else self.totals
        elif self.shards is not None:
            counts = sum_over_ranks(counts, self.shards.group)
        tokens = counts[-1]
        experts = getattr(self.model, "num_experts", len(counts) - 1)
        balance = experts * (counts[:-1] / tokens * sums.probabilities / tokens).sum()
        squares = sums.squares / tokens
        if self.shards is not None:  # every rank has the whole sequence's value; its gradient is the rank's share
            balance, squares = (sum_over_ranks(x, self.shards.group) for x in (balance, squares))
        return balance, self.loss_factor * (loss.balance * balance + loss.z * squares)

    @property
    def loss_factor(self) -> float:
        """Factor on the router losses of a call: the micro-batch's weight, or 1 if the scope is ``global``."""
        return 1.0 if self.loss is not None and self.loss.scope == "global" else self.weight

    def _collect(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._chunk_logits is not None:
            self._chunk_logits.append(output[index] if isinstance(output, tuple | list) else output)

    @property
    def _top_k(self) -> int:
        config = self.model.config.get_text_config(decoder=True)
        return int(getattr(self.model, "num_experts_per_tok", None) or config.num_experts_per_tok)

    def _check_supported(self) -> None:
        name = type(self.model).__name__
        if not self._hooks:
            raise UnsupportedModelError(f"{name} has no router in its decoder layers, so it has no router loss")
        form = getattr(sys.modules[type(self.model).__module__], BALANCE_LOSS, None)
        if form is None or tuple(inspect.signature(form).parameters) != BALANCE_ARGUMENTS:
            raise UnsupportedModelError(
                f"{name} has a balance loss with another formula than Switch Transformers, which is not supported",
                fix="train it without output_router_logits",
            )


def adds_balance_loss(model: Any) -> bool:
    """Return True if a model adds its balance loss although the call does not pass ``output_router_logits``.

    The model's configuration decides, unless its forward has a boolean default for that argument.
    """
    parameter = inspect.signature(type(model).forward).parameters.get("output_router_logits")
    if parameter is not None and isinstance(parameter.default, bool):
        return parameter.default
    return bool(getattr(model.config.get_text_config(decoder=True), "output_router_logits", False))


def without_router_loss(model: Any) -> dict[str, bool]:
    """Return keyword arguments with which a ``transformers`` model call has no router loss and no router logits."""
    return {"output_router_logits": False} if adds_balance_loss(model) else {}


def balance_coefficient(model: Any) -> float:
    """Return the coefficient of a ``transformers`` model's balance loss, from the model or its configuration.

    Raises:
        UnsupportedModelError: Neither the model nor its configuration has such a coefficient.
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
        f"neither {type(model).__name__} nor its configuration has router_aux_loss_coef",
        fix="use stream(model, router_loss=RouterLoss(balance=...))",
    )


def sum_counts_over_ranks(counts: Tensor) -> Tensor:
    """Return the sum of ``counts`` over all ranks; ``counts`` itself if ``torch.distributed`` is not initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
    return counts


def _router_modules(model: nn.Module, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield (router, index of its logits in its output) for each router that the model records in a layer."""
    recorded = [spec for module in model.modules() for spec in recorded_modules(module, "router_logits")]
    for name, module in layer.named_modules():
        for kind, where, index in recorded:
            of_kind = isinstance(kind, type) and isinstance(module, kind)
            if of_kind and (where is None or name.endswith(where)):
                yield module, index
                break
