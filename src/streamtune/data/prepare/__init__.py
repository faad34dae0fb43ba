"""From sources to rows ready to train on: read, normalise, render, fit to the length, hold out, pack.

    examples      of next tokens
    trees         prompts with completions that are compared or judged
    prompts       prompts that completions are yet to be written for
    row_stream    examples of rows that are read as they are asked for
    texts         the texts alone, for training a tokenizer

Everything is read and checked before a function returns; a stream alone is read as it is trained on.
"""

from __future__ import annotations

from streamtune.data.prepare.examples import PreparedData, prepare
from streamtune.data.prepare.prompts import PreparedPrompts, prepare_prompts
from streamtune.data.prepare.row_stream import RowStream, StreamPosition
from streamtune.data.prepare.texts import ChatFrame, first_frame, holds_messages, iter_texts
from streamtune.data.prepare.trees import PreparedTrees, prepare_preferences, prepare_unpaired

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
