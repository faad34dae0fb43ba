"""Logits that are not computed: a stand-in which the losses and operations on logits that models use accept."""

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
"""Operations that a model may apply to its logits before the loss, with a scalar: each maps a chunk by itself."""


class ScoringHead(Protocol):
    """A head that computes losses and scores of hidden states, without logits of the whole sequence."""

    model: Any
    module: nn.Module
    shards: Any

    def cross_entropy(
        self, logits: LazyLogits, targets: Tensor, num_items: Tensor | float | None, ignore_index: int
    ) -> Tensor:
        """Return the cross entropy of all rows, divided by ``num_items``."""
        ...

    def as_teacher(self, logits: LazyLogits, targets: Tensor) -> AbstractContextManager[TeacherHead]:
        """Context that yields the head as a teacher's."""
        ...

    def scores(self, logits: LazyLogits, targets: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of targets, and their entropies if ``entropy``."""
        ...


class LazyLogits:
    """Stands for the logits ``steps(head(hidden))`` ``[..., V]``, which are not computed.

    Torch functions take it (``__torch_function__``) for elementwise steps with a scalar and for the cross entropy. It
    can be sliced along tokens and vocabulary, and its tokens rearranged. Anything else is refused.

    Args:
        owner: The head.
        hidden: ``[..., C]``.
        steps: Functions applied to each chunk of logits, in order.
        vocabulary: V after the steps; None is the head's own.
    """

    def __init__(
        self, owner: ScoringHead, hidden: Tensor, steps: tuple[Step, ...] = (), vocabulary: int | None = None
    ) -> None:
        self.owner, self.hidden, self.steps, self.vocabulary = owner, hidden, steps, vocabulary

    def then(self, step: Step, vocabulary: int | None = None) -> LazyLogits:
        """Return the same logits with one more step, elementwise unless ``vocabulary``, its new size, is given."""
        return LazyLogits(self.owner, self.hidden, (*self.steps, step), vocabulary or self.vocabulary)

    def of(self, hidden: Tensor) -> LazyLogits:
        """Return the logits of other tokens, with the same steps."""
        return LazyLogits(self.owner, hidden, self.steps, self.vocabulary)

    def transform(self, logits: Tensor) -> Tensor:
        """Apply the model's own steps to one chunk of logits."""
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
            raise _refuse(getattr(func, "__name__", str(func)))
        return lazy.then(lambda x: step(*(x if arg is lazy else arg for arg in args), **(kwargs or {})))

    def _scalar(self, step: Callable[[Any, Any], Any], other: Any) -> LazyLogits:
        if not is_scalar(other):
            raise _refuse("arithmetic with a tensor")
        return self.then(lambda x: step(x, other))

    def __mul__(self, other: Any) -> LazyLogits:
        return self._scalar(torch.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LazyLogits:
        return self._scalar(torch.div, other)

    def __add__(self, other: Any) -> LazyLogits:
        return self._scalar(torch.add, other)

    def __sub__(self, other: Any) -> LazyLogits:
        return self._scalar(torch.sub, other)

    def tanh(self) -> LazyLogits:
        """Return ``logits.tanh()``."""
        return self.then(torch.tanh)

    def float(self) -> LazyLogits:
        """Return ``logits.float()``; a wider dtype stays."""
        return self.then(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)))

    @property
    def device(self) -> torch.device:
        """``logits.device``."""
        return self.hidden.device

    @property
    def shape(self) -> torch.Size:
        """``logits.shape``."""
        if self.vocabulary is not None:
            return torch.Size((*self.hidden.shape[:-1], self.vocabulary))
        weight = getattr(self.owner.module, "weight", None)
        if not isinstance(weight, Tensor):
            raise _refuse("shape", _MissingAttributeError)
        return torch.Size((*self.hidden.shape[:-1], weight.shape[0]))

    def size(self, dim: int | None = None) -> Any:
        """Return ``logits.size(dim)``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return ``logits.dim()``."""
        return self.hidden.dim()

    def view(self, *shape: Any) -> LazyLogits:
        """Return ``logits.view(..., V)``: the tokens in another arrangement."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) < 2 or sizes[-1] != self.shape[-1]:
            raise _refuse(f"view{sizes}")
        return self.of(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def contiguous(self) -> LazyLogits:
        """Return ``logits.contiguous()``: these logits, for each chunk is contiguous."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        """Return ``logits.to(dtype or device)``."""
        return self.then(lambda x: x.to(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refuse(name, _MissingAttributeError)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _refuse("item assignment")

    def __getitem__(self, key: Any) -> LazyLogits:
        """Return slices of the tokens and of the vocabulary."""
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.dim() - len(keys) + 1)
        words = keys.pop() if len(keys) == self.dim() else slice(None)
        if len(keys) >= self.dim() or not all(isinstance(k, slice) for k in [*keys, words]):
            raise _refuse("indexing")
        chosen = self.of(self.hidden[tuple(keys)])
        if words == slice(None):
            return chosen
        left = len(range(*words.indices(self.shape[-1])))
        if left == 0:
            raise _refuse("an empty slice of the vocabulary")
        return chosen.then(lambda x: x[..., words], left)


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
    """Compute ``torch.nn.functional.cross_entropy`` of lazy logits ``[N, V]`` and targets ``[N]``."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    fits = isinstance(input, LazyLogits) and isinstance(target, Tensor) and input.hidden.shape[:-1] == target.shape
    if not plain or not fits or target.dim() != 1 or reduction not in ("mean", "sum"):
        raise _refuse("cross_entropy with weights, smoothing, another reduction or targets that are no token numbers")
    if input.owner.shards is not None:
        raise UnsupportedModelError(
            f"{type(input.owner.model).__name__} computes its loss by its own hand, so it would shift labels in strips",
            fix="score its tokens by handle.logprobs, or set sequence_parallel_size: 1",
        )
    return input.owner.cross_entropy(input, target, None if reduction == "mean" else 1.0, ignore_index)


def is_scalar(value: Any) -> bool:
    """Return True for a number, or a tensor that holds one and needs no gradient."""
    return isinstance(value, int | float) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
    )


class LazyForward:
    """The ``forward`` of a head in a call with labels: it reads no weight."""

    def __init__(self, head: ScoringHead) -> None:
        self.head = head

    def __call__(self, hidden: Tensor) -> LazyLogits:
        """Return the logits of ``hidden``, which are not computed."""
        return LazyLogits(self.head, hidden)


class _MissingAttributeError(UnsupportedModelError, AttributeError):
    """A refusal that is also an ``AttributeError``: accelerate asks ``hasattr(x, "dtype")`` of outputs in autocast."""


def _refuse(operation: str, kind: type[UnsupportedModelError] = UnsupportedModelError) -> UnsupportedModelError:
    return kind(
        f"the model applies {operation!r} to its logits before the loss, which cannot be done chunk by chunk",
        fix="use stream(model, head=False): layers are streamed, the head is the model's own",
    )
