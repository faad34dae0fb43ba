"""State that layers and attentions need and are not passed: of a call of the model, and of a run on a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

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
