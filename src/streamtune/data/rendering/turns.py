"""A row for every trained turn of a conversation, as the model sees it when it writes that turn.

Chat templates that drop the reasoning of earlier answers render a conversation that ends with a turn as another text
than one in which the turn is followed by others. ``reasoning: per_turn`` trains each turn on the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from streamtune.data.options import DEFAULT_CHAT, ChatOptions, RowPolicy
from streamtune.data.rendering.pool import Item
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.row_types import Content, Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TurnRenderer:
    """Renders rows turn by turn; a row that is no conversation is rendered as it is.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
        notify: Called once with each thing a user should know.
        chat: Options of rendering. Reasoning that the template drops even from a last answer is put back.
        policy: The length of rows, and what becomes of longer ones.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        notify: Callable[[str], None],
        chat: ChatOptions = DEFAULT_CHAT,
        policy: RowPolicy | None = None,
    ) -> None:
        chat = replace(chat, reasoning="keep")
        self._rows = RowRenderer(tokenizer, train_on="last", notify=notify, chat=chat, policy=policy)
        self.log = self._rows.log

    def render_item(self, item: Item[Content]) -> list[Rendered] | None:
        """Return a row for every turn; None if all turns are left out for empty answers."""
        turns = self._turns(item.take())
        found = [self._rows(turn, item.origin) for turn in turns if not self._rows.leaves_out(turn, item.origin)]
        return [replace(turn, weight=item.weight) for turn in found] or None

    def render_ahead(self, items: Sequence[Item[Content]]) -> None:
        contents = [item.row for item in items if item.row is not None]
        self._rows.ask_ahead(turn for content in contents for turn in self._turns(content))

    def _turns(self, content: Content) -> list[Content]:
        """Return the conversation up to each of its trained turns."""
        if not isinstance(content, Conversation):
            return [content]
        trained = self._rows.trainable(content)
        # Without a turn to train on it is rendered as it is, and refused for that.
        return [replace(content, messages=content.messages[: index + 1]) for index in trained] or [content]
