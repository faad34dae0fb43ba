"""One call of a model before its forward: its arguments are read, and changed where streaming requires that.

Rows are packed, and tokens see each other, as in the ordinary call with the same arguments.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine.hf_names import BY_POSITIONS, CACHE, cache_argument, parameters_of, renamed_cache
from streamtune.engine.rows import PackedRows, names_several_rows
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.devices import forget_host_copies

TOKENS = ("input_ids", "inputs_embeds")
READ = "_streamtune_read"
"""Attribute that marks a cache read by a call with gradients."""


@lru_cache(maxsize=64)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(parameters_of(forward))[1:]


@dataclass
class ModelCall:
    """Arguments of a call of ``model``, by name however they were passed."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        forget_host_copies()  # of earlier calls
        if (name := cache_argument(type(self.model).forward, state=False)) is not None:
            self.kwargs = renamed_cache(self.kwargs, name)

    def get(self, name: str) -> Any:
        """Return the argument, None if it was not passed."""
        names = _parameters(type(self.model).forward)[: len(self.args)]
        return self.kwargs.get(name, self.args[names.index(name)] if name in names else None)

    def put(self, name: str, value: Any) -> None:
        """Change an argument, or pass it as well."""
        names = _parameters(type(self.model).forward)[: len(self.args)]
        if name in names:
            place = names.index(name)
            self.args = (*self.args[:place], value, *self.args[place + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: value}

    @property
    def cache(self) -> Any:
        """Cache that was passed, by whichever name, or None."""
        name = cache_argument(type(self.model).forward, state=False)
        return None if name is None else self.get(name)

    def takes(self, name: str) -> bool:
        """Return True if the model names such an argument."""
        return name in _parameters(type(self.model).forward)

    @property
    def size(self) -> tuple[int, int]:
        """Rows B and tokens T; zeros without tokens."""
        tokens = next((x for name in TOKENS if isinstance(x := self.get(name), Tensor)), None)
        return (0, 0) if tokens is None else (tokens.shape[0], tokens.shape[1])

    def packed_rows(self) -> PackedRows | None:
        """Return packed rows by the rule of ``transformers``: positions that restart, no mask, no cache."""
        if self.get("attention_mask") is None and self.cache is None:
            rows = PackedRows.of(self.get("position_ids"))
            if rows is not None:
                return rows
        if names_several_rows(self.kwargs):
            raise UnsupportedModelError(
                "cu_seq_lens or seq_idx tell of packed rows, but position_ids do not restart",
                fix="pass position_ids that restart at each row, and no attention_mask",
            )
        return None

    def keep_one_row(self, attentions: list[Any], cached: bool) -> None:
        """Pass a mask of ones where ``position_ids`` jump within what is one row to the ordinary call.

        ``transformers`` takes a jump for the start of a packed row unless there is a mask or a cache, and streaming
        leaves out the caller's cache. Flash attention reads packed rows from the positions in any case.

        Args:
            attentions: Attention implementations of the model without streaming.
            cached: True if the configuration asks for a cache, and nothing overrules it.
        """
        asked = self.get("use_cache")
        by_positions = names_several_rows(self.kwargs) or any(str(name).startswith(BY_POSITIONS) for name in attentions)
        if by_positions or not (cached if asked is None else asked):
            return
        if self.get("attention_mask") is None and self.takes("attention_mask") and all(self.size):
            positions = self.get("position_ids")
            if PackedRows.of(positions) is not None:
                self.put("attention_mask", torch.ones(self.size, dtype=torch.long, device=positions.device))

    def pads_left(self) -> bool:
        """Return True if a row begins with padding."""
        mask = self.get("attention_mask")
        return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 0] == 0).any())

    def labels_padding(self, targets: Tensor | None) -> bool:
        """Return True if padding has a shifted target ``[B, T]``; without targets the call's labels are read."""
        targets = self.kwargs.get("shift_labels") if targets is None else targets
        labels, mask = self.get("labels"), self.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and self.cache is not None:
            seen = mask.cumsum(1) > 0  # what is behind a token of the cache sees that
            mask = seen[:, seen.shape[1] - self.size[1] :]
        if targets is None and labels is not None:
            targets = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        if targets is None or not isinstance(mask, Tensor) or mask.shape != targets.shape:
            return False
        return bool(((mask == 0) & (targets != IGNORE_INDEX)).any())


def mark_read(call: ModelCall) -> None:
    """Mark the cache that a call with gradients reads and does not write to.

    The plain model writes to it, so a later call would take its keys for the keys of all tokens so far.
    """
    cache = call.cache
    if getattr(cache, READ, False):
        raise UnsupportedModelError(
            "the cache that was passed was read by a call with gradients, which has not written its tokens to it",
            where=CACHE,
            fix="pass copy.deepcopy(cache) to each call that trains; segments of one row that attend to each other "
            "are one call of the whole row",
        )
    if cache is not None and torch.is_grad_enabled():
        with contextlib.suppress(AttributeError):  # a tuple of an old release
            setattr(cache, READ, True)


def refuse_surroundings(model: nn.Module) -> None:
    """Refuse a call under a transform of ``torch.func``, or without weights."""
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedModelError(
            "a streamed model was called under a transform of torch.func (grad, vmap, jvp, jacrev), which would have "
            "to see the inside of its backward",
            fix="use loss.backward() or torch.autograd.grad; torch.func.functional_call alone is streamed",
        )
    if parametrize._cache_enabled:
        raise UnsupportedModelError(
            "a streamed model was called inside of torch.nn.utils.parametrize.cached(), which keeps weights that its "
            "forward computed without a graph",
            fix="leave the context out: each chunk computes its parametrised weights again",
        )
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type == "meta" and not is_in_torch_dispatch_mode():
        raise ArgumentError(
            f"this {type(model).__name__} is on the meta device: it has no weights to compute with",
            fix="load its weights, or move it by model.to_empty(device=...) and initialise it",
        )
