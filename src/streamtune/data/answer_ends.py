"""The tokens that end what is trained, at which generation must stop.

A base model ends its texts with one token (``<|endoftext|>``), a chat template its turns with another (``<|im_end|>``).
A model that is trained with the template writes the second one, so whoever generates with it has to stop there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.options import ChatOptions
from streamtune.data.record_table import Example, Tree
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import Conversation
from streamtune.errors import StreamTuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_ROWS = 512
"""Rows that are looked at, spread evenly over all."""
MOST_TOKENS = 1 << 24
"""Tokens of these rows: no further row is looked at once there are more."""

_EXCHANGE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"})


def trained_ends(rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, chat: ChatOptions) -> list[int]:
    """Return the tokens that end trained turns or texts, the most frequent first; none if no end is trained.

    A token counts if the tokenizer has it as an added or a special one, a run of trained tokens ends with it, and no
    such run has it inside. The token that ends the last answer under the chat template counts wherever it is trained.
    It also stands for rows that show no end: prompts whose answers are not written yet, and rows that were cut. A token
    that ends earlier answers in its place is left out: gpt-oss closes its reasoning with that one.

    Args:
        rows: Examples, trees or prompts to train on.
        tokenizer: The model's tokenizer, with its chat template.
        chat: Options of rendering; with ``train_on_eos: none`` no end is trained.
    """
    if chat.train_on_eos == "none":
        return []
    marks = _marks(tokenizer)
    last: Counter[int] = Counter()
    inside: set[int] = set()
    for run in _runs_of(rows):
        last[int(run[-1])] += 1
        inside.update(np.intersect1d(run[:-1], marks).tolist())
    own, earlier = _template_ends(tokenizer, chat)
    own = own if own in marks else None
    ends = [token for token, _ in last.most_common() if token in marks]
    found = [token for token in ends if token == own or token not in {*inside, earlier}]
    if own is not None and own not in found and (own in inside or not ends):
        found.append(own)
    return found


def _marks(tokenizer: PreTrainedTokenizerBase) -> np.ndarray[Any, Any]:
    """Return the tokens that can be an end: added ones, and special ones."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return np.array(sorted({*added, *tokenizer.all_special_ids}), dtype=np.int64)


def _template_ends(tokenizer: PreTrainedTokenizerBase, chat: ChatOptions) -> tuple[int | None, int | None]:
    """Return the last trained token of the last answer of a short chat, and of an earlier one; None where unknown."""
    options = replace(chat, roles_to_train=("assistant",), train_on_eos="turn", reasoning="template")
    render = RowRenderer(tokenizer, train_on="assistant", notify=lambda message: None, chat=options)
    for exchanges in (2, 1) if tokenizer.chat_template else ():
        with suppress(StreamTuneError):  # some templates know one exchange alone
            row = render(Conversation([dict(message) for message in _EXCHANGE * exchanges]), "the chat template")
            runs = list(_runs(np.asarray(row.input_ids), np.asarray(row.labels) != IGNORE_INDEX))
            return int(runs[-1][-1]), int(runs[0][-1])
    return None, None


def _runs_of(rows: Sequence[Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the runs of trained tokens of some of the rows."""
    seen = 0
    for place in np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).astype(int)) if len(rows) else ():
        if seen > MOST_TOKENS:
            return
        row = rows[int(place)]
        if isinstance(row, Example):
            seen += len(row.input_ids)
            yield from _runs(np.asarray(row.input_ids), np.asarray(row.labels) != IGNORE_INDEX)
        elif isinstance(row, Tree):
            for number, completion in enumerate(row.completions):
                seen += len(completion)
                counted = np.ones(len(completion), bool) if row.masks is None else np.asarray(row.masks[number], bool)
                yield from _runs(np.asarray(completion), counted)


def _runs(ids: np.ndarray[Any, Any], trained: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the longest runs of trained tokens of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], trained, [False])).astype(np.int8)))
    for start, stop in edges.reshape(-1, 2):
        yield ids[start:stop]
