"""Lazy logits: a placeholder for logits that supports the losses and operations which models apply to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.errors import UnsupportedModelError
from streamtune.ops import TeacherHead

Step = Callable[[Tensor], Tensor]


ELEMENTWISE = {
    getattr(owner, name): getattr(torch, name)
    for owner in (Tensor, torch)
    for name in ("mul", "div", "add", "sub", "tanh")
}
"""Operations with a scalar that a model may apply to its logits before the loss. Each maps to the torch function that
is applied to the logits of a chunk.
"""


class ScoringHead(Protocol):
    """A language-model head that computes losses and scores from hidden states, without full logits."""

    model: Any
    module: nn.Module
    shards: Any

    def cross_entropy(
        self, logits: LazyLogits, targets: Tensor, num_items: Tensor | float | None, ignore_index: int
    ) -> Tensor:
        """Return the summed loss of ``targets``, divided by ``num_items`` (None: by the number of targets)."""
        ...

    def teacher_head(self, logits: LazyLogits, targets: Tensor) -> AbstractContextManager[TeacherHead]:
        """Yield this model's head and hidden states in a context, for a student's distillation loss."""
        ...

    def token_log_probs(self, logits: LazyLogits, targets: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of targets, and the entropies of the predicted distributions or None."""
        ...


class LazyLogits:
    """Placeholder for the logits ``steps(head(hidden))`` ``[..., V]``, which are not computed.

    Torch functions accept it (``__torch_function__``) for elementwise operations with a scalar and for the
    cross-entropy. It can be sliced along tokens and vocabulary, and reshaped along tokens. Anything else raises an
    error.

    Args:
        head: Head that computes losses and scores.
        hidden: Final hidden states ``[..., C]``.
        steps: Functions that the model applies to the head's output, in order.
        vocabulary: Vocabulary size V after the steps; None is the head's output size.
    """

    def __init__(
        self, head: ScoringHead, hidden: Tensor, steps: tuple[Step, ...] = (), vocabulary: int | None = None
    ) -> None:
        self.head, self.hidden, self.steps, self.vocabulary = head, hidden, steps, vocabulary

    def add_step(self, step: Step, vocabulary: int | None = None) -> LazyLogits:
        """Return lazy logits with one more step; ``vocabulary`` is the new vocabulary size if the step changes it."""
        return LazyLogits(self.head, self.hidden, (*self.steps, step), vocabulary or self.vocabulary)

    def with_hidden(self, hidden: Tensor) -> LazyLogits:
        """Return lazy logits with the same steps for the hidden states ``hidden``."""
        return LazyLogits(self.head, hidden, self.steps, self.vocabulary)

    def apply_steps(self, logits: Tensor) -> Tensor:
        """Return one chunk of the head's output after the model's own steps (softcap, scale)."""
        for step in self.steps:
            logits = step(logits)
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        step: Any = ELEMENTWISE.get(func)
        lazy = next((arg for arg in args if isinstance(arg, LazyLogits)), None)
        others = [arg for arg in args if arg is not lazy]
        if step is None or lazy is None or not all(is_scalar(arg) for arg in others):
            raise _unsupported_error(getattr(func, "__name__", str(func)))
        return lazy.add_step(lambda x: step(*(x if arg is lazy else arg for arg in args), **(kwargs or {})))

    def _add_scalar_step(self, step: Callable[[Any, Any], Any], other: Any) -> LazyLogits:
        if not is_scalar(other):
            raise _unsupported_error("arithmetic with a tensor")
        return self.add_step(lambda x: step(x, other))

    def __mul__(self, other: Any) -> LazyLogits:
        return self._add_scalar_step(torch.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LazyLogits:
        return self._add_scalar_step(torch.div, other)

    def __add__(self, other: Any) -> LazyLogits:
        return self._add_scalar_step(torch.add, other)

    def __sub__(self, other: Any) -> LazyLogits:
        return self._add_scalar_step(torch.sub, other)

    def tanh(self) -> LazyLogits:
        """Return lazy logits after ``tanh``."""
        return self.add_step(torch.tanh)

    def float(self) -> LazyLogits:
        """Return lazy logits in float32, or in their own dtype if that is wider."""
        return self.add_step(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)))

    @property
    def device(self) -> torch.device:
        """Device of the hidden states, on which logits are computed."""
        return self.hidden.device

    @property
    def shape(self) -> torch.Size:
        """Shape ``[..., V]`` that the logits would have."""
        if self.vocabulary is not None:
            return torch.Size((*self.hidden.shape[:-1], self.vocabulary))
        weight = getattr(self.head.module, "weight", None)
        if not isinstance(weight, Tensor):
            raise _unsupported_error("shape", _MissingAttributeError)
        return torch.Size((*self.hidden.shape[:-1], weight.shape[0]))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.hidden.dim()

    def view(self, *shape: Any) -> LazyLogits:
        """Return lazy logits reshaped along the tokens; the last size must be V."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) < 2 or sizes[-1] != self.shape[-1]:
            raise _unsupported_error(f"view{sizes}")
        return self.with_hidden(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def contiguous(self) -> LazyLogits:
        """Return these lazy logits unchanged, because each computed chunk is contiguous."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        """Return lazy logits converted to another dtype or device, as ``Tensor.to`` does."""
        return self.add_step(lambda x: x.to(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported_error(name, _MissingAttributeError)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _unsupported_error("item assignment")

    def __getitem__(self, key: Any) -> LazyLogits:
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.dim() - len(keys) + 1)
        vocabulary_slice = keys.pop() if len(keys) == self.dim() else slice(None)
        if len(keys) >= self.dim() or not all(isinstance(k, slice) for k in [*keys, vocabulary_slice]):
            raise _unsupported_error("indexing")
        sliced = self.with_hidden(self.hidden[tuple(keys)])
        if vocabulary_slice == slice(None):
            return sliced
        size = len(range(*vocabulary_slice.indices(self.shape[-1])))
        if size == 0:
            raise _unsupported_error("an empty slice of the vocabulary")
        return sliced.add_step(lambda x: x[..., vocabulary_slice], size)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the same loss as ``functional.cross_entropy``, for lazy logits ``[N, V]`` and targets ``[N]``."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    fits = isinstance(input, LazyLogits) and isinstance(target, Tensor) and input.hidden.shape[:-1] == target.shape
    if not plain or not fits or target.dim() != 1 or reduction not in ("mean", "sum"):
        raise _unsupported_error(
            "cross_entropy with weights, smoothing, another reduction, or targets that are not token ids"
        )
    if input.head.shards is not None:
        raise UnsupportedModelError(
            f"{type(input.head.model).__name__} computes its loss in its own code, which would shift labels only "
            "within each rank's shard",
            fix="use handle.logprobs, or set sequence_parallel_size: 1",
        )
    return input.head.cross_entropy(input, target, None if reduction == "mean" else 1.0, ignore_index)


def is_scalar(value: Any) -> bool:
    """Return True for a Python number, or a tensor without dimensions and without a gradient."""
    return isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
    )


class LazyForward:
    """Replaces the forward of a head in a call with labels: it returns lazy logits without reading the weight."""

    def __init__(self, head: ScoringHead) -> None:
        self.head = head

    def __call__(self, hidden: Tensor) -> LazyLogits:
        """Return the lazy logits of the hidden states ``hidden``."""
        return LazyLogits(self.head, hidden)


class _MissingAttributeError(UnsupportedModelError, AttributeError):
    """Raised for an unsupported operation on lazy logits; an ``AttributeError``, so that ``hasattr`` returns False."""


def _unsupported_error(
    operation: str, kind: type[UnsupportedModelError] = UnsupportedModelError
) -> UnsupportedModelError:
    return kind(
        f"the model applies {operation!r} to its logits before the loss, which streaming does not support",
        fix="use stream(model, head=False), which streams the layers and keeps the model's own head",
    )
