"""Logits of an evaluation with labels: a tensor whose values are computed only when they are read.

``Trainer.predict`` and ``compute_metrics`` read the logits of a call with labels. Other evaluations need only the loss.
So a call in evaluation mode without gradients returns an :class:`EvaluatedLogits`. ``detach()`` and a change of dtype
do not compute the values; any other operation does. A copy to the host and a reduction over the vocabulary (``argmax``)
are computed in chunks of tokens, so the full logits never exist on the device.

Shape suffixes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.sharded import Weights
from streamtune.ops.forward_state import Autocast

_aten = torch.ops.aten


class EvaluatedLogits(Tensor):
    """Logits ``transform(head(hidden))`` ``[..., T, V]`` without a graph, computed when they are read.

    The computed logits are stored, so that later reads see changes in place.

    Args:
        head: Language-model head without adapters.
        hidden: Input ``[..., T, C]`` of the head; it is detached.
        transform: Function that applies the model's own operations after the head, such as a softcap.
        chunk_size: Number of tokens whose logits are computed at a time.
    """

    @staticmethod
    def __new__(
        cls, head: nn.Module, hidden: Tensor, transform: Callable[[Tensor], Tensor], chunk_size: int
    ) -> EvaluatedLogits:
        """Return a tensor with the shape and dtype of the logits, without memory for its values."""
        with torch.no_grad():
            first = transform(head(hidden[..., :1, :]))
        source = _LogitsSource(head, hidden.detach(), transform, chunk_size)
        return cls._from_source(source, (*hidden.shape[:-1], first.shape[-1]), (first.dtype,))

    @classmethod
    def _from_source(cls, source: _LogitsSource, shape: Any, casts: tuple[torch.dtype, ...]) -> EvaluatedLogits:
        logits = Tensor._make_wrapper_subclass(cls, shape, dtype=casts[-1], device=source.hidden.device)
        logits._source, logits._casts, logits._computed_logits = source, casts, []
        return logits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._source: _LogitsSource
        self._casts: tuple[torch.dtype, ...]
        """Dtypes to which the logits are cast, in order; the last is the dtype of this tensor."""
        self._computed_logits: list[Tensor]
        """The computed logits, or empty; the list is shared with tensors detached from this tensor."""

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"EvaluatedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], EvaluatedLogits) and not args[0]._computed_logits else None
        if logits is not None:
            if func is _aten.detach.default:
                twin = cls._from_source(logits._source, logits.shape, logits._casts)
                twin._computed_logits = logits._computed_logits
                return twin
            if func is _aten._to_copy.default and not {"layout", "memory_format"} & kwargs.keys():
                device, dtype = kwargs.get("device"), kwargs.get("dtype") or logits.dtype
                if device is None or torch.device(device).type == logits.device.type:
                    return cls._from_source(logits._source, logits.shape, (*logits._casts, dtype))
                return logits._compute_full(torch.device(device)).to(dtype)
            if func is _aten.argmax.default and _is_last_dim(logits, args[1:], kwargs):
                return logits._reduce_in_chunks(func, args[1:], kwargs)
        return func(*map_nested(_materialize_evaluated, args), **map_nested(_materialize_evaluated, kwargs))

    def materialize(self) -> Tensor:
        """Return the logits as an ordinary tensor on the model's device, computed at the first call."""
        if not self._computed_logits:
            self._computed_logits.append(self._compute_full(self.device))
        return self._computed_logits[0]

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits on the host. While they are computed, the device holds only a chunk of tokens at a time."""
        return self.materialize().cpu() if self._computed_logits else self._compute_full(torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.materialize().clone()

    def _iter_chunks(self) -> Iterator[Tensor]:
        for logits in self._source.iter_chunks():
            for dtype in self._casts:
                logits = logits.to(dtype)
            yield logits

    @torch.no_grad()
    def _compute_full(self, device: torch.device) -> Tensor:
        full = torch.empty(self.shape, dtype=self.dtype, device=device)
        start = 0
        for logits in self._iter_chunks():
            full.narrow(-2, start, logits.shape[-2]).copy_(logits)
            start += logits.shape[-2]
        return full

    def _reduce_in_chunks(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        keeps = (len(args) > 1 and args[1]) or kwargs.get("keepdim", False)
        return torch.cat([func(logits, *args, **kwargs) for logits in self._iter_chunks()], dim=-2 if keeps else -1)


def _method_of_computed_logits(name: str) -> Any:
    return lambda logits, *args, **kwargs: getattr(logits.materialize(), name)(*args, **kwargs)


READERS = ("numpy", "tolist", "data_ptr", "untyped_storage")
"""Methods that read a tensor's memory without a torch operation."""
for _name in (*READERS, "__array__", "__dlpack__", "__dlpack_device__", "__reduce_ex__"):
    setattr(EvaluatedLogits, _name, _method_of_computed_logits(_name))


class ReadableLogits(Tensor):
    """Logits ``transform(head(hidden))`` with their graph, computed when a torch function first reads their values.

    Attributes:
        source: Hidden states and head from which the logits are computed.
        logits: Logits; None until they are computed.
    """

    source: _LogitsSource
    logits: Tensor | None

    @staticmethod
    def create(
        head: nn.Module, hidden: Tensor, transform: Callable[[Tensor], Tensor], chunk_size: int
    ) -> ReadableLogits:
        """Return a tensor with the shape and dtype of the logits, without memory for its values.

        Args:
            head: Language-model head without adapters.
            hidden: Input ``[..., T, C]`` of the head, with its graph.
            transform: Function that applies the model's own operations after the head, such as a softcap.
            chunk_size: Number of tokens whose logits are computed at a time when no graph is needed.
        """
        with torch.no_grad():
            first = transform(head(hidden[..., :1, :]))
        shape = (*hidden.shape[:-1], first.shape[-1])
        logits: Any = Tensor._make_wrapper_subclass(ReadableLogits, shape, dtype=first.dtype, device=hidden.device)
        logits.source, logits.logits = _LogitsSource(head, hidden, transform, chunk_size), None
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SHAPE_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*map_nested(_materialize_readable, args), **map_nested(_materialize_readable, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*map_nested(_materialize_readable, args), **map_nested(_materialize_readable, kwargs or {}))

    def materialize(self) -> Tensor:
        """Return the logits as an ordinary tensor with its graph, computed at the first call."""
        if self.logits is None:
            with torch.enable_grad():
                self.logits = self.source.compute_with_graph()
        return self.logits


SHAPE_FUNCTIONS = (
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
)
"""Torch functions that read the shape, dtype or device of a tensor, but no values."""


def _materialize_readable(value: Any) -> Any:
    return value.materialize() if isinstance(value, ReadableLogits) else value


class _LogitsSource:
    """Computes logits from hidden states and a head, with the autocast settings and head weights of the model call."""

    def __init__(self, head: nn.Module, hidden: Tensor, transform: Callable[[Tensor], Tensor], chunk_size: int) -> None:
        self.head, self.hidden, self.transform, self.chunk_size = head, hidden, transform, chunk_size
        self.weights, self.autocast = Weights.capture(head), Autocast.capture(hidden.device)

    @torch.no_grad()
    def iter_chunks(self) -> Iterator[Tensor]:
        self.weights.check_unchanged("the model call and the reading of its logits")
        for part in self.hidden.split(self.chunk_size, dim=-2):
            with self.autocast.applied(), self.weights.applied():
                logits = self.transform(self.head(part))
            yield logits

    def compute_with_graph(self) -> Tensor:
        self.weights.check_unchanged("the model call and the reading of its logits")
        with self.autocast.applied(), self.weights.applied():
            return self.transform(self.head(self.hidden))


def _materialize_evaluated(value: Any) -> Any:
    return value.materialize() if isinstance(value, EvaluatedLogits) else value


def _is_last_dim(logits: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    dim = args[0] if args else kwargs.get("dim")
    return dim in (-1, logits.dim() - 1)


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to each item of nested dicts, lists and (named) tuples.

    ``torch.utils._pytree.tree_map`` creates closures that refer to themselves. More than a hundred per step would stay
    in memory until Python's garbage collector runs.
    """
    if isinstance(value, dict):
        return {key: map_nested(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [map_nested(function, item) for item in value]
    if isinstance(value, tuple):
        items = [map_nested(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return function(value)
