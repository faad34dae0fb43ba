"""From a prompt and its answers to token ids: one trunk, and the tokens of each answer that count.

Every answer is tokenised **with its prompt before it**, whole, as supervised training does (:mod:`.render`): a
conversation by the chat template, text as the plain joint of both with the end token behind it. The tree's prompt is
then the longest beginning that all of these have in common and in which no token counts. So ``prompt + completion`` is,
token for token, what the whole conversation renders to, for any template and tokenizer, also at the border:

- A token that holds the end of the prompt and the start of an answer belongs to the answer and counts there.
- Where that token differs from answer to answer, or a template writes a prompt differently before different answers,
  the tokens that differ and do not count go with the completion, masked.

A token counts if it holds a character of an assistant's turn behind the prompt, its terminator included; the end token
behind a text counts. Messages of users and tools in an answer of several turns do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from streamtune.data.preferences import Answers
from streamtune.data.records import Tree
from streamtune.data.render import RowRenderer
from streamtune.data.renderings import check_unicode, render_messages, require_template
from streamtune.errors import DataError
from streamtune.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptRenderer", "TreeRenderer"]


class TreeRenderer:
    """Renders prompts with their answers to trees.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
        notify: Called once with each thing a user should know.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, notify: Callable[[str], None]) -> None:
        self._render = RowRenderer(tokenizer, train_on="assistant", notify=notify)

    def __call__(self, answers: Answers, origin: str) -> Tree:
        """Render one prompt and its answers.

        Raises:
            DataError: A row cannot be rendered, an answer has no token that counts, or the prompt has no token.
        """
        rendered = [self._render(content, origin) for content in answers.contents]
        ids = [row.input_ids for row in rendered]
        counted = [[label != IGNORE_INDEX for label in row.labels] for row in rendered]
        start = min(_common_beginning(ids), *(mask.index(True) for mask in counted))
        if start == 0:
            raise DataError(
                "the prompt has no token that all its answers share, so nothing predicts their first token",
                where=origin,
                mend="give the row a prompt, or use a tokenizer that begins texts with a token",
            )
        masks = [mask[start:] for mask in counted]
        return Tree(
            prompt=ids[0][:start],
            completions=[row[start:] for row in ids],
            masks=None if all(map(all, masks)) else masks,
            origin=origin,
            labels=None if answers.labels is None else list(answers.labels),
            margin=answers.margin,
        )


def _common_beginning(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of items in the common beginning of all rows."""
    shortest = min(map(len, rows))
    return next((index for index in range(shortest) if len({row[index] for row in rows}) > 1), shortest)


class PromptRenderer:
    """Renders prompts: messages by the chat template with its generation prompt, text as it is.

    A text is tokenised by itself, with what the tokenizer puts in front of texts but without the end token that some
    put behind them: after an end there is nothing to write.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, prompt: str | list[dict[str, Any]], tools: Any, origin: str) -> list[int]:
        """Render one prompt.

        Raises:
            DataError: There is no chat template for messages, it refuses them, or the prompt has no token.
        """
        ids = self._text(prompt) if isinstance(prompt, str) else self._messages(prompt, tools, origin)
        if not ids:
            raise DataError("the tokenizer makes no token of the prompt", where=origin, mend="remove the row")
        return ids

    def _text(self, prompt: str) -> list[int]:
        ids = list(self._tokenizer(prompt, verbose=False)["input_ids"])
        end = self._tokenizer.eos_token
        if end is not None and ids and ids[-1] == self._tokenizer.eos_token_id and not prompt.endswith(end):
            ids.pop()
        return ids

    def _messages(self, messages: list[dict[str, Any]], tools: Any, origin: str) -> list[int]:
        require_template(self._tokenizer, "prompt", origin)
        text = check_unicode(render_messages(self._tokenizer, messages, tools, origin, generation=True), origin)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
