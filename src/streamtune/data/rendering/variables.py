"""Variables of the chat template that a recipe or a row sets, such as ``enable_thinking``, checked by what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from streamtune.data.templates import TemplateRefusalError, template_variables
from streamtune.errors import ArgumentError, DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GIVEN = {"messages", "tools", "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"}
"""Variables that a rendering gives to the template itself."""


class TemplateVariables:
    """Variables of the chat template: those of the recipe, and those of a row, which come first.

    Args:
        tokenizer: Has the template.
        shared: Variables for all rows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shared: Mapping[str, Any]) -> None:
        self._tokenizer, self._shared = tokenizer, shared
        self._read: dict[bool, set[str] | None] = {}

    def __call__(self, own: Mapping[str, Any] | None, tools: Any, origin: str) -> dict[str, Any]:
        """Return the variables for one conversation.

        Raises:
            ArgumentError: The template does not read a variable of the recipe.
            DataError: It does not read one of the row.
        """
        if self._shared:
            self._check(self._shared, tools, ArgumentError, "chat_template_kwargs")
        if own:
            self._check(own, tools, DataError, origin)
        return {**self._shared, **(own or {})}

    def _check(self, names: Mapping[str, Any], tools: Any, error: type[ArgumentError | DataError], where: str) -> None:
        has_tools = bool(tools)
        if has_tools not in self._read:
            try:
                self._read[has_tools] = template_variables(self._tokenizer, tools)
            except TemplateRefusalError:
                self._read[has_tools] = None  # rendering gives the error
        read = self._read[has_tools]
        if read is None:
            return
        known = sorted(read - _GIVEN - set(self._tokenizer.special_tokens_map))
        for name in names:
            if name not in known:
                raise error(
                    f"chat_template_kwargs has '{name}', which the chat template does not read",
                    where=where,
                    mend=f"{did_you_mean(name, known) or 'delete it'}; the template reads {', '.join(known) or 'none'}",
                )
