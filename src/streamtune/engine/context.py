"""The context of a call of the model, which its layers need and are not passed."""

from __future__ import annotations

from dataclasses import dataclass

from streamtune.engine.rows import PackedRows
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.schedule import Schedule

__all__ = ["CallContext"]


@dataclass
class CallContext:
    """Per-call state that layers need but are not passed."""

    rows: PackedRows | None = None
    shards: SequenceShards | None = None
    schedule: Schedule | None = None
    """The schedule of this call's layers; None is the one they were given."""
    whole: bool = False
    """The layers run on all tokens at once, by the model's eager attention."""
