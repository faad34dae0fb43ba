"""State of the model call, of the chunk and of the last layer call, for code that does not get it as an argument.

A layer looks up which layer call computed its input. ZeRO stage 3 and FSDP2 pass hidden states through autograd
functions of their own, so the next layer gets another tensor with the same storage. Therefore two things are checked.
The input must have the values that the call returned. Its gradient must reach the call unchanged, without a hook in
between.
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

from streamtune.engine.observe import has_user_backward_hooks
from streamtune.engine.rotary import RowLengths
from streamtune.engine.rows import PackedRows
from streamtune.engine.sequence.shards import ChunkExchange, SequenceShards
from streamtune.ops.attention.attention import Memory
from streamtune.schedule import Schedule


@dataclass
class CallContext:
    """State of the current model call that its layers read, such as packed rows and the schedule."""

    rows: PackedRows | None = None
    lengths: RowLengths | None = None
    """Row lengths for rotary embeddings that depend on row length. None: the embedding reads the call's longest
    position.
    """
    shards: SequenceShards | None = None
    schedule: Schedule | None = None
    """Schedule of this call; None uses the schedule of each layer."""
    one_chunk: bool = False
    """True if layers run on all tokens in one chunk, with the model's eager attention."""
    plain: bool = False
    """True if the call runs without streaming: not in chunks, and with the model's own attention."""


@dataclass(frozen=True)
class ChunkContext:
    """State of the chunk on which a layer runs, for the layer's attention function."""

    exchange: ChunkExchange | None
    """Exchange with the ranks that share the sequence; None if this rank has the whole sequence."""
    outputs: Memory | None
    """Attention outputs that the forward saved for this chunk; None if none are saved."""

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make :meth:`current` return this object in the ``with`` block."""
        token = _chunk.set(self)
        try:
            yield
        finally:
            _chunk.reset(token)

    @staticmethod
    def current() -> ChunkContext:
        """Return the context of the chunk that runs now; outside of chunks all its fields are None."""
        return _chunk.get()


OUTSIDE_CHUNKS = ChunkContext(None, None)
_chunk: ContextVar[ChunkContext] = ContextVar("the chunk that a layer runs on", default=OUTSIDE_CHUNKS)


Call = TypeVar("Call")

PASS_GRADIENTS = (
    "RegisterPostBackwardFunctionBackward",  # FSDP2, around a layer's inputs
    "PostBackwardFunctionModuleBackward",  # ZeRO stage 3, around its inputs
    "PreBackwardFunctionForModuleBackward",  # and its outputs
)
"""Autograd nodes that return the gradient of output n, unchanged, as the gradient of input n."""

FULL_BACKWARD_HOOK = "BackwardHookFunctionBackward"
"""Autograd node around a module with a full backward hook. A user's hook may read or change gradients; ZeRO stage 3's
hook does not.
"""


class LastLayerCall(Generic[Call]):
    """The last layer call of a model and the tensor that it returned, to find the call behind a layer's input."""

    def __init__(self) -> None:
        self._last: tuple[_TensorIdentity, weakref.ref[Call], bool] | None = None
        self._has_reader = False
        """True once :meth:`call_for_gradient` has returned the last call."""
        self.ends_with_rows = False
        """True once a layer with a state has run on packed rows. With ``order="chunk"`` the chunks of all layers must
        be equal, so chunks of all layers then end where rows end.
        """

    def __reduce__(self) -> tuple[type[LastLayerCall[Any]], tuple[()]]:
        return LastLayerCall, ()  # a copy of the model has not been called

    def record_call(self, output: Tensor, call: Call, layer: nn.Module) -> None:
        """Record that ``call``, a call of ``layer``, returned the tensor ``output``."""
        self._last, self._has_reader = (
            (_TensorIdentity(output), weakref.ref(call), has_user_backward_hooks(layer)),
            False,
        )

    def producing_call(self, hidden: Tensor) -> Call | None:
        """Return the last layer call if ``hidden`` has the storage and the values of the call's output, else None."""
        if self._last is None:
            return None
        output, call, _ = self._last
        return call() if output.has_same_values(hidden) else None

    def call_for_gradient(self, hidden: Tensor, reader: nn.Module) -> Call | None:
        """Return the last layer call if it computed ``hidden``, and the gradient of ``hidden`` reaches it unchanged.

        Otherwise return None. Only the first reader of an output gets the call, because a call stores one gradient
        (dory norms a layer's output twice).
        """
        if self._last is None or self._has_reader:
            return None
        output, _, has_hooks = self._last
        if not output.is_same_tensor(hidden):
            passed_nodes = (
                PASS_GRADIENTS
                if has_hooks or has_user_backward_hooks(reader)
                else (*PASS_GRADIENTS, FULL_BACKWARD_HOOK)
            )
            if not output.was_returned_by(_gradient_receiver(hidden, passed_nodes)):
                return None
        call = self.producing_call(hidden)
        self._has_reader = call is not None
        return call


class _TensorIdentity:
    """Identifies a tensor and its values, to recognise them in another tensor with the same storage.

    References are weak, so neither the tensor nor its memory stays alive. The weak reference to the storage keeps the
    storage's address from being reused.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), tensor._version
        self.node = None if tensor.grad_fn is None else weakref.ref(tensor.grad_fn)
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.layout = _memory_layout(tensor)

    def is_same_tensor(self, tensor: Tensor) -> bool:
        return self.tensor() is tensor and tensor._version == self.version

    def has_same_values(self, tensor: Tensor) -> bool:
        if self.is_same_tensor(tensor):
            return True
        same = tensor._version == self.version and _memory_layout(tensor) == self.layout
        return same and tensor.untyped_storage()._cdata == self.storage.cdata

    def was_returned_by(self, node: Any) -> bool:
        return node is not None and self.node is not None and self.node() is node


def _memory_layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _gradient_receiver(tensor: Tensor, passed_nodes: tuple[str, ...]) -> Any:
    """Return the autograd node to which a tensor's gradient goes, skipping nodes named in ``passed_nodes``.

    Return None if the gradient does not belong to the node's first output.
    """
    node: Any = tensor.grad_fn
    place = tensor.output_nr
    while node is not None and type(node).__name__ in passed_nodes:
        node, place = node.next_functions[place]
    return node if place == 0 else None
