"""Logits of an evaluation with labels: a tensor that is computed only when something reads it.

``Trainer.predict`` and ``compute_metrics`` read the logits of a call with labels; an evaluation that only wants the
loss must not pay for them. So such a call, without gradients and in evaluation mode, returns an
:class:`EvaluatedLogits` in their place. It has their shape, dtype and device. ``detach()`` and a change of dtype do not
compute it; any other operation does. Moved to the host, or reduced over the vocabulary (``argmax``), it is computed a
chunk of tokens at a time and never whole on the device.

Shape suffixes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.observe import Autocast
from streamtune.engine.sharded import Weights

_aten = torch.ops.aten


class EvaluatedLogits(Tensor):
    """Stands for ``transform(head(hidden))`` ``[..., T, V]``, and is computed when it is read.

    The result of :meth:`computed` is kept, so that later reads see what was written into it, or into a part of it.

    Args:
        head: Language-model head, a matrix without adapters.
        hidden: Input ``[..., T, C]`` of the head; detached.
        transform: The model's own steps on its logits (softcap, scale).
        chunk_size: Tokens computed at a time.
    """

    @staticmethod
    def __new__(
        cls, head: nn.Module, hidden: Tensor, transform: Callable[[Tensor], Tensor], chunk_size: int
    ) -> EvaluatedLogits:
        """Return a tensor without memory."""
        with torch.no_grad():
            first = transform(head(hidden[..., :1, :]))
        source = _Source(head, hidden.detach(), transform, chunk_size)
        return cls._made(source, (*hidden.shape[:-1], first.shape[-1]), (first.dtype,))

    @classmethod
    def _made(cls, source: _Source, shape: Any, casts: tuple[torch.dtype, ...]) -> EvaluatedLogits:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=casts[-1], device=source.hidden.device)
        made._source, made._casts, made._kept = source, casts, []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._source: _Source
        self._casts: tuple[torch.dtype, ...]
        """Dtypes that the logits went through; the last is their own."""
        self._kept: list[Tensor]
        """The logits, once they are computed; shared with tensors detached from this one."""

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"EvaluatedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], EvaluatedLogits) and not args[0]._kept else None
        if logits is not None:
            if func is _aten.detach.default:
                twin = cls._made(logits._source, logits.shape, logits._casts)
                twin._kept = logits._kept
                return twin
            if func is _aten._to_copy.default and not {"layout", "memory_format"} & kwargs.keys():
                device, dtype = kwargs.get("device"), kwargs.get("dtype") or logits.dtype
                if device is None or torch.device(device).type == logits.device.type:
                    return cls._made(logits._source, logits.shape, (*logits._casts, dtype))
                return logits._whole(torch.device(device)).to(dtype)
            if func is _aten.argmax.default and _is_last(logits, args[1:], kwargs):
                return logits._reduced(func, args[1:], kwargs)
        return func(*map_nested(_computed, args), **map_nested(_computed, kwargs))

    def computed(self) -> Tensor:
        """Return the logits, on the device of the model; the same tensor each time."""
        if not self._kept:
            self._kept.append(self._whole(self.device))
        return self._kept[0]

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits on the host, computed a chunk at a time."""
        return self.computed().cpu() if self._kept else self._whole(torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.computed().clone()

    def _chunks(self) -> Iterator[Tensor]:
        for logits in self._source.chunks():
            for dtype in self._casts:
                logits = logits.to(dtype)
            yield logits

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


def _of_computed(name: str) -> Any:
    return lambda logits, *args, **kwargs: getattr(logits.computed(), name)(*args, **kwargs)


READERS = ("numpy", "tolist", "data_ptr", "untyped_storage")
"""Methods that read the memory of a tensor without an operation."""
for _name in (*READERS, "__array__", "__dlpack__", "__dlpack_device__", "__reduce_ex__"):
    setattr(EvaluatedLogits, _name, _of_computed(_name))


class ReadableLogits(Tensor):
    """Stands for ``transform(head(hidden))`` with its gradient: computed by the first function of torch that reads it.

    Shape, dtype and device are known before.

    Attributes:
        found: Logits, once they are computed.
    """

    source: _Source
    found: Tensor | None

    @staticmethod
    def of(head: nn.Module, hidden: Tensor, transform: Callable[[Tensor], Tensor], chunk_size: int) -> ReadableLogits:
        """Return a tensor without memory; arguments as :class:`EvaluatedLogits`, with the graph of ``hidden``."""
        with torch.no_grad():
            first = transform(head(hidden[..., :1, :]))
        shape = (*hidden.shape[:-1], first.shape[-1])
        made: Any = Tensor._make_wrapper_subclass(ReadableLogits, shape, dtype=first.dtype, device=hidden.device)
        made.source, made.found = _Source(head, hidden, transform, chunk_size), None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KNOWN_BEFORE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*map_nested(_with_graph, args), **map_nested(_with_graph, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*map_nested(_with_graph, args), **map_nested(_with_graph, kwargs or {}))

    def computed(self) -> Tensor:
        """Return the logits, with their graph; the same tensor each time."""
        if self.found is None:
            with torch.enable_grad():
                self.found = self.source.with_graph()
        return self.found


KNOWN_BEFORE = (
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
)
"""Functions of torch that read no number."""


def _with_graph(value: Any) -> Any:
    return value.computed() if isinstance(value, ReadableLogits) else value


class _Source:
    """Hidden states, and the head with the weights it had in the call, from which logits are computed."""

    def __init__(self, head: nn.Module, hidden: Tensor, transform: Callable[[Tensor], Tensor], chunk_size: int) -> None:
        self.head, self.hidden, self.transform, self.chunk_size = head, hidden, transform, chunk_size
        self.weights, self.autocast = Weights.now(head), Autocast.now(hidden.device)

    @torch.no_grad()
    def chunks(self) -> Iterator[Tensor]:
        """Yield the logits of one chunk of tokens after the other."""
        self.weights.check("the call and the reading of its logits")
        for part in self.hidden.split(self.chunk_size, dim=-2):
            with self.autocast.restored(), self.weights.restored():
                logits = self.transform(self.head(part))
            yield logits

    def with_graph(self) -> Tensor:
        """Return all logits at once, with their graph."""
        self.weights.check("the call and the reading of its logits")
        with self.autocast.restored(), self.weights.restored():
            return self.transform(self.head(self.hidden))


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, EvaluatedLogits) else value


def _is_last(logits: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    dim = args[0] if args else kwargs.get("dim")
    return dim in (-1, logits.dim() - 1)


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each item in nested dicts, lists and tuples, named ones too.

    ``torch.utils._pytree.tree_map`` makes closures that refer to themselves: a hundred and more in each step would stay
    in memory until Python's collector runs.
    """
    if isinstance(value, dict):
        return {key: map_nested(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [map_nested(function, item) for item in value]
    if isinstance(value, tuple):
        items = [map_nested(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return function(value)
