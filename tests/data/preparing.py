"""Functions that prepare rows, with the options as keyword arguments; a renderer of plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from streamtune import data
from streamtune.data import DataOptions, PreparedCompletions, PreparedData, PreparedPrompts, Source
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.row_types import Content

Notify = Callable[[str], None]


def silent(message: str) -> None:
    """Tell nobody."""


def prepare(sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any) -> PreparedData:
    return data.prepare(sources, tokenizer, DataOptions(**options), notify)


def prepare_preferences(
    sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any
) -> PreparedCompletions:
    return data.prepare_preferences(sources, tokenizer, DataOptions(**options), notify)


def prepare_unpaired(
    sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any
) -> PreparedCompletions:
    return data.prepare_unpaired(sources, tokenizer, DataOptions(**options), notify)


def prepare_prompts(
    sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any
) -> PreparedPrompts:
    return data.prepare_prompts(sources, tokenizer, DataOptions(**options), notify)


# --------------------------------- A renderer whose ids and labels are lists, which compare with what tokenizers return


class ListRenderer(RowRenderer):
    def __call__(self, content: Content, origin: str) -> Rendered:
        found = super().__call__(content, origin)
        return replace(found, input_ids=list(found.input_ids), labels=list(found.labels))
