"""The texts of rows of every type, for training a tokenizer: no chat template is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from streamtune.data.cells import texts_of
from streamtune.data.preferences import PREFERENCE_TYPES, normalise_preference
from streamtune.data.prepare_completions import PROMPT_TYPES, prompt_of
from streamtune.data.readers import Row
from streamtune.data.rows import ROW_TYPES, Conversation, PromptCompletion, detect_type, looks_like, normalise
from streamtune.data.sources import Source, typed_rows

__all__ = ["iter_texts"]

_KNOWN = tuple(dict.fromkeys((*ROW_TYPES, *PREFERENCE_TYPES, *PROMPT_TYPES)))


def iter_texts(sources: Sequence[Source], *, notify: Callable[[str], None] = lambda message: None) -> Iterator[str]:
    """Yield the texts of all rows: contents of messages, prompts, completions, documents.

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
