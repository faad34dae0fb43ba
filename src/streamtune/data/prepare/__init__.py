"""From sources to rows ready to train on: read, normalise, render, fit to the length, hold out, pack.

    examples       of next tokens
    completions    prompts with completions that are compared or judged, or yet to be written
    row_stream     examples of rows that are read as they are asked for
    texts          the texts alone, for training a tokenizer

Everything is read and checked before a function returns; a stream alone is read as it is trained on.
"""

from __future__ import annotations

from streamtune.data.prepare.completions import (
    PreparedPrompts,
    PreparedTrees,
    prepare_preferences,
    prepare_prompts,
    prepare_unpaired,
)
from streamtune.data.prepare.examples import PreparedData, prepare
from streamtune.data.prepare.row_stream import RowStream, StreamPosition
from streamtune.data.prepare.texts import ChatFrame, first_frame, holds_messages, iter_texts

__all__ = [
    "ChatFrame",
    "PreparedData",
    "PreparedPrompts",
    "PreparedTrees",
    "RowStream",
    "StreamPosition",
    "first_frame",
    "holds_messages",
    "iter_texts",
    "prepare",
    "prepare_preferences",
    "prepare_prompts",
    "prepare_unpaired",
]
