"""State that layers and attentions need and are not passed: of the model's call, of the chunk, of the layer before.

A layer finds the call that made its input by the last layer call. Engines that share weights (ZeRO stage 3, FSDP2) put
hooks around a layer's call. They pass its hidden states through autograd functions of their own, so that the next layer
gets another tensor with the same storage. So there are two questions: are these the same numbers, and does their
gradient arrive unchanged and unseen?
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from streamtune.engine.observe import watches_gradients
from streamtune.engine.rotary import RowLengths
from streamtune.engine.rows import PackedRows
from streamtune.engine.sequence.shards import ChunkExchange, SequenceShards
from streamtune.ops.attention.attention import Memory
from streamtune.schedule import Schedule


@dataclass
class CallContext:
    """Per-call state that layers need but are not passed."""

    rows: PackedRows | None = None
    lengths: RowLengths | None = None
    """Lengths of the rows, for rotary embeddings that depend on them; None is the longest position of the call."""
    shards: SequenceShards | None = None
    schedule: Schedule | None = None
    """Schedule of this call's layers; None is their own."""
    whole: bool = False
    """The layers run on all tokens at once, by the model's eager attention."""
    plain: bool = False
    """The layers run whole, by the model's own attention: the call is the plain model's."""


@dataclass(frozen=True)
class ChunkContext:
    """State of one run of a layer on a chunk, which the attentions inside it need but are not passed."""

    exchange: ChunkExchange | None
    """Exchange with the ranks that share the sequence, if any."""
    outputs: Memory | None
    """Outputs of attentions that ran on the chunk before; None if they are not kept."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the state that :meth:`now` returns inside the context."""
        token = _chunk.set(self)
        try:
            yield
        finally:
            _chunk.reset(token)

    @staticmethod
    def now() -> ChunkContext:
        """Return the state of the current chunk; an empty one outside of all."""
        return _chunk.get()


OUTSIDE = ChunkContext(None, None)
_chunk: ContextVar[ChunkContext] = ContextVar("the chunk that a layer runs on", default=OUTSIDE)


Call = TypeVar("Call")

PASS_GRADIENTS = (
    "RegisterPostBackwardFunctionBackward",  # FSDP2, around a layer's inputs
    "PostBackwardFunctionModuleBackward",  # ZeRO stage 3, around its inputs
    "PreBackwardFunctionForModuleBackward",  # and its outputs
)
"""Autograd nodes that pass the gradient of each output to the input at the same place, unchanged."""

FULL_BACKWARD_HOOK = "BackwardHookFunctionBackward"
"""Node around a module with a full backward hook, which sees the gradients; ZeRO stage 3's hook ignores them."""


class LastLayerCall(Generic[Call]):
    """The last layer call and its output.

    A layer's input can be computed again if it is what the layer before returned, unchanged.
    """

    def __init__(self) -> None:
        self._last: tuple[_Numbers, weakref.ref[Call], bool] | None = None
        self._has_reader = False
        """True once a reader leaves the gradient of the last output at its call."""
        self.ends_with_rows = False
        """True once a layer carries states and rows are packed. In the order of chunks all layers have the same chunks,
        so they all end where rows do.
        """

    def __reduce__(self) -> tuple[type[LastLayerCall[Any]], tuple[()]]:
        return LastLayerCall, ()  # a copy was not called yet

    def note(self, output: Tensor, call: Call, layer: nn.Module) -> None:
        """Record that ``call``, of ``layer``, made ``output``."""
        self._last, self._has_reader = (_Numbers(output), weakref.ref(call), watches_gradients(layer)), False

    def maker(self, hidden: Tensor) -> Call | None:
        """Return the last layer call if it made the numbers of these hidden states, else None."""
        if self._last is None:
            return None
        numbers, call, _ = self._last
        return call() if numbers.are_of(hidden) else None

    def grad_target(self, hidden: Tensor, module: nn.Module) -> Call | None:
        """Return :meth:`maker` if the gradient of these hidden states arrives at its output unchanged; else None.

        There is room for the gradient of one reader, the first that asks (dory norms the output of a layer twice).
        """
        if self._last is None or self._has_reader:
            return None
        numbers, _, watched = self._last
        if not numbers.are(hidden):
            passing = PASS_GRADIENTS if watched or watches_gradients(module) else (*PASS_GRADIENTS, FULL_BACKWARD_HOOK)
            if not numbers.come_from(_origin(hidden, passing)):
                return None
        found = self.maker(hidden)
        self._has_reader = found is not None
        return found


class _Numbers:
    """The numbers of a tensor, recognised in another tensor that has its storage.

    The weak references keep neither alive. The reference to the storage keeps its address from being reused.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), tensor._version
        self.node = None if tensor.grad_fn is None else weakref.ref(tensor.grad_fn)
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.form = _form(tensor)

    def are(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` is the tensor itself, and was not written to since."""
        return self.tensor() is tensor and tensor._version == self.version

    def are_of(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` has the same numbers, and none of them was written to since."""
        if self.are(tensor):
            return True
        same = tensor._version == self.version and _form(tensor) == self.form
        return same and tensor.untyped_storage()._cdata == self.storage.cdata

    def come_from(self, node: Any) -> bool:
        """Return True if ``node`` is the autograd node that made the tensor."""
        return node is not None and self.node is not None and self.node() is node


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _origin(tensor: Tensor, passing: tuple[str, ...]) -> Any:
    """Return the node at which a tensor's gradient arrives, behind ``passing``; None if not at its first output."""
    node: Any = tensor.grad_fn
    place = tensor.output_nr
    while node is not None and type(node).__name__ in passing:
        node, place = node.next_functions[place]
    return node if place == 0 else None
