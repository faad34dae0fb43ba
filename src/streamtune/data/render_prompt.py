"""From a prompt to the token ids that a model goes on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamtune.errors import DataError
from streamtune.templates import TemplateRefusalError, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PromptRenderer"]


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
        if not self._tokenizer.chat_template:
            raise DataError(
                "the prompt is a conversation and the tokenizer has no chat template",
                where=origin,
                mend="set chat_template in the recipe: chatml, the path of a Jinja file, or the template itself",
            )
        try:
            text = render_chat(self._tokenizer, messages, tools=tools, add_generation_prompt=True)
        except TemplateRefusalError as error:
            raise DataError(
                f"the chat template refuses the conversation: {error.what}",
                where=origin,
                mend="mend the row, or set chat_template to a template that takes it",
            ) from error
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                "the conversation holds half a surrogate pair, which is no character", where=origin
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
