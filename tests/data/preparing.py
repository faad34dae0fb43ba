"""Functions that prepare rows, with the options as keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamtune import data
from streamtune.data import DataOptions, PreparedData, PreparedPrompts, PreparedTrees, Source

Notify = Callable[[str], None]


def silent(message: str) -> None:
    """Tell nobody."""


def prepare(sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any) -> PreparedData:
    return data.prepare(sources, tokenizer, DataOptions(**options), notify)


def prepare_preferences(
    sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any
) -> PreparedTrees:
    return data.prepare_preferences(sources, tokenizer, DataOptions(**options), notify)


def prepare_unpaired(
    sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any
) -> PreparedTrees:
    return data.prepare_unpaired(sources, tokenizer, DataOptions(**options), notify)


def prepare_prompts(
    sources: Sequence[Source], tokenizer: Any, *, notify: Notify = silent, **options: Any
) -> PreparedPrompts:
    return data.prepare_prompts(sources, tokenizer, DataOptions(**options), notify)
