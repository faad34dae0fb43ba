"""Logits of an evaluation with labels: a tensor that is computed when something reads it, and not before.

``Trainer.predict`` and ``compute_metrics`` read the logits of a call with labels; an evaluation that only wants the
loss must not pay for them. So such a call, without gradients and in evaluation mode, returns this in the place of
logits. It knows its shape, dtype and device; ``detach()`` and another dtype leave it as it is; any other operation
computes it.
Moved to the host, or reduced over the vocabulary (``argmax``), it is computed a chunk of tokens at a time and
never whole on the device.

Shape suffixes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from streamtune.engine.ambient import Autocast

__all__ = ["EvaluatedLogits"]

_aten = torch.ops.aten


class EvaluatedLogits(Tensor):
    """Stands for ``steps(head(hidden))`` ``[..., T, V]`` until it is read.

    Args:
        head: The language-model head.
        hidden: ``[..., T, C]``, what it is given; detached.
        transform: What the model does to its logits, elementwise (softcap, scale).
        chunk_size: Tokens computed at a time.
        dtype: None is that of head and steps.
    """

    @staticmethod
    def __new__(
        cls,
        head: nn.Module,
        hidden: Tensor,
        transform: Callable[[Tensor], Tensor],
        chunk_size: int,
        dtype: torch.dtype | None = None,
    ) -> EvaluatedLogits:
        """A tensor without memory."""
        autocast = Autocast.now(hidden.device)
        with torch.no_grad():
            first = transform(head(hidden[..., :1, :]))
        made = Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], first.shape[-1]), dtype=dtype or first.dtype, device=hidden.device
        )
        made._parts = (head, hidden.detach(), transform, chunk_size)
        made._autocast = autocast
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._parts: tuple[nn.Module, Tensor, Callable[[Tensor], Tensor], int]
        self._autocast: Autocast

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"EvaluatedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', not computed)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0]._as(args[0].dtype)
        if func is _aten._to_copy.default:
            device = kwargs.get("device")
            if device is None or torch.device(device).type == args[0].device.type:
                return args[0]._as(kwargs.get("dtype") or args[0].dtype)
            return args[0]._whole(torch.device(device)).to(kwargs.get("dtype") or args[0].dtype)
        if func is _aten.argmax.default and _is_last(args[0], args[1:], kwargs):
            return args[0]._reduced(func, args[1:], kwargs)
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs))

    def computed(self) -> Tensor:
        """The logits, on the device of the model."""
        return self._whole(self.device)

    # What reads the memory of a tensor without an operation.

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """The logits on the host, computed a chunk at a time."""
        return self._whole(torch.device("cpu"))

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """``computed().numpy()``."""
        return self.computed().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """``computed().tolist()``."""
        return self.computed().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.computed().__array__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.computed()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def _as(self, dtype: torch.dtype) -> EvaluatedLogits:
        head, hidden, transform, chunk_size = self._parts
        with self._autocast.again():
            return EvaluatedLogits(head, hidden, transform, chunk_size, dtype)

    @torch.no_grad()
    def _chunks(self) -> Iterator[Tensor]:
        head, hidden, transform, chunk_size = self._parts
        for part in hidden.split(chunk_size, dim=-2):
            with self._autocast.again():
                logits = transform(head(part))
            yield logits.to(self.dtype)

    @torch.no_grad()
    def _whole(self, device: torch.device) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype, device=device)
        start = 0
        for logits in self._chunks():
            whole.narrow(-2, start, logits.shape[-2]).copy_(logits)
            start += logits.shape[-2]
        return whole

    def _reduced(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        keeps = (len(args) > 1 and args[1]) or kwargs.get("keepdim", False)
        return torch.cat([func(logits, *args, **kwargs) for logits in self._chunks()], dim=-2 if keeps else -1)


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, EvaluatedLogits) else value


def _is_last(logits: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    dim = args[0] if args else kwargs.get("dim")
    return dim in (-1, logits.dim() - 1)
