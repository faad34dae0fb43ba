"""From sources to examples ready to train on: read, normalise, render, fit to the length, hold out, pack.

Everything is read and checked before this returns, so that a malformed last row costs seconds and not a night.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from streamtune.data.cells import texts_of
from streamtune.data.fit import OVERLENGTH, Prepared, RowFit, check_choice
from streamtune.data.packing import pack_rows
from streamtune.data.preferences import PREFERENCE_TYPES, normalise_preference
from streamtune.data.readers import Row
from streamtune.data.records import Example, spill
from streamtune.data.render import RowRenderer
from streamtune.data.report import DataReport
from streamtune.data.rows import (
    PROMPT_TYPES,
    ROW_TYPES,
    Content,
    Conversation,
    PromptCompletion,
    detect_type,
    looks_like,
    normalise,
    prompt_of,
)
from streamtune.data.sources import Source, typed_rows, with_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PreparedData", "iter_texts", "prepare"]

PreparedData = Prepared[Example, DataReport]
"""Examples, split into a training and a held-out part, with their packs where rows are packed."""


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    overlength: str = "error",
    train_on: str = "assistant",
    val_size: float = 0.0,
    packing: bool = False,
    seed: int = 42,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedData:
    """Read every source and make examples of its rows.

    Args:
        sources: Where the rows come from, in order.
        tokenizer: The model's tokenizer, with its chat template.
        max_length: Tokens an example has at most.
        overlength: What to do with a longer row: refuse them all (``error``), cut its end off (``truncate``), leave it
            out (``drop``), or cut it into consecutive pieces (``split``).
        train_on: ``assistant`` (every assistant turn, or the completion), ``completion`` (the last turn) or ``all``.
        val_size: Rows to hold out: a fraction below 1, or a count. Rows with the same tokens stay together, so that
            no held-out row is trained on.
        packing: Choose examples that share a sequence of at most ``max_length`` tokens.
        seed: Seed of the choice of held-out rows, and of the packs.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, too long or has nothing to train on, or nothing is left.
        ArgumentError: ``overlength`` or ``train_on`` is none of the known ones.
    """
    check_choice("overlength", overlength, OVERLENGTH)
    render = RowRenderer(tokenizer, train_on=train_on, notify=notify)
    with spill(Example) as (writer, tables):
        fit = RowFit(writer, overlength, max_length)
        for content, origin in with_progress(_contents(sources, notify)):
            fit.add(render(content, origin), origin)
        fit.check(notify)
    prepared = fit.prepared(tables[0], val_size, seed)
    return _packed(prepared, max_length, seed) if packing else prepared


def _packed(prepared: PreparedData, max_length: int, seed: int) -> PreparedData:
    """Return the data with its packs. They are part of the fingerprint: a run resumes only with the same ones."""
    parts = (prepared.train, prepared.validation)
    packs, held_out = (pack_rows(part.lengths(), max_length, seed=seed) for part in parts)
    digest = hashlib.sha256(prepared.fingerprint.encode())
    for part in (packs, held_out):
        digest.update(part.rows.tobytes() + part.starts.tobytes())
    return replace(
        prepared,
        report=replace(prepared.report, packs=len(packs), pack_fill=round(packs.fill_rate(max_length), 4)),
        fingerprint=digest.hexdigest(),
        packs=packs,
        validation_packs=held_out,
    )


def _contents(sources: Sequence[Source], notify: Callable[[str], None]) -> Iterator[tuple[Content, str]]:
    """Yield the normal form of every row of every source, with its origin."""
    for row, row_type in typed_rows(sources, ROW_TYPES, detect_type, notify):
        yield normalise(row, row_type), row.origin


# --- texts alone, for training a tokenizer ----------------------------------------------------------------------------

_KNOWN = tuple(dict.fromkeys((*ROW_TYPES, *PREFERENCE_TYPES, *PROMPT_TYPES)))


def iter_texts(sources: Sequence[Source], *, notify: Callable[[str], None] = lambda message: None) -> Iterator[str]:
    """Yield the texts of all rows: contents of messages, prompts, completions, documents; without a chat template.

    Raises:
        DataError: A file is missing, or a row is malformed.
    """
    for row, row_type in typed_rows(sources, _KNOWN, _detect, notify):
        yield from _texts(row, row_type)


def _detect(row: Row) -> str:
    """Return the type a row looks like, among those of all commands: its texts do not depend on the command."""
    if looks_like(row.columns) is None:
        if {"chosen", "rejected"} <= row.columns.keys():
            return "preference"
        if "prompt" in row.columns:
            return "prompts"
    return detect_type(row)


def _texts(row: Row, row_type: str) -> list[str]:
    if row_type in PREFERENCE_TYPES:
        return normalise_preference(row, row_type).texts()
    if row_type == "prompts":
        return texts_of(prompt_of(row, row_type))
    content = normalise(row, row_type)
    if isinstance(content, Conversation):
        return texts_of(content.messages)
    return [content.prompt + content.completion] if isinstance(content, PromptCompletion) else [content.text]
