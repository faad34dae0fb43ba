"""A renderer whose ids and labels are lists, which compare with what tokenizers return."""

from __future__ import annotations

from dataclasses import replace

from streamtune.data.rendering.render import RowRenderer
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.row_types import Content


class ListRenderer(RowRenderer):
    def __call__(self, content: Content, origin: str) -> Rendered:
        found = super().__call__(content, origin)
        return replace(found, input_ids=list(found.input_ids), labels=list(found.labels))
