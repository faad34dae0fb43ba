"""The interface of a writer, which completes prompts on any backend: its settings, its results and its method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token. The defaults draw from the model's own distribution."""

    max_completion_length: int
    """Tokens of a completion at most, its end token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together; 1 is all of them."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 is all of them."""
    min_p: float = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen before, in prompt or completion, are divided by it (multiplied where negative)."""


@dataclass(frozen=True)
class Completion:
    """The tokens written after a prompt."""

    token_ids: list[int]
    """At least one; the end token, where one was written, is the last."""
    truncated: bool
    """True if it was cut off at the longest length allowed: no end token was written."""


class WritingStopped(Exception):  # noqa: N818 (nothing is wrong: somebody asked for it)
    """Writing was stopped early, on request."""


class Writer(Protocol):
    """Completes prompts with the model as it is now."""

    def write(
        self, prompts: Sequence[list[int]], count: int | Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``count`` completions of each prompt.

        Args:
            prompts: Token ids, each at least one.
            count: Completions of each prompt: the same number, or one number for each.
            sampling: Settings for drawing. Random numbers come from torch's global generators: a resumed run draws the
                same.

        Raises:
            WritingStopped: A stop was requested before the last token.
        """
        ...


def ended(token_ids: Sequence[int], end_token_ids: frozenset[int]) -> Completion:
    """Return the completion up to its first end token. All tokens after that are padding."""
    for index, token in enumerate(token_ids):
        if token in end_token_ids:
            return Completion(list(token_ids[: index + 1]), truncated=False)
    return Completion(list(token_ids), truncated=True)
