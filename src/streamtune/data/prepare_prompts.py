"""From sources to prompts that a model writes completions for.

    prompts     prompt: a string or a list of messages       the prompt as it stands
    messages    messages: [{role, content, ...}]             the conversation without its last answer

Every other column is kept and goes to the reward functions as a list under its name, as does ``messages`` itself, which
holds the answer that was taken off. ``tools`` goes to the chat template too.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamtune.data.cells import column_names, tools_of
from streamtune.data.fit_trees import TREE_OVERLENGTH, check_choice
from streamtune.data.holdout import choose_held_out
from streamtune.data.progress import with_progress
from streamtune.data.prompt import PROMPT_SCHEMA, Prompt, PromptSequence
from streamtune.data.readers import Row
from streamtune.data.render_prompt import PromptRenderer
from streamtune.data.report import length_percentiles
from streamtune.data.report_trees import TreeReport
from streamtune.data.said import Said, check_order, prompt_digest, said
from streamtune.data.sources import Source, typed_rows
from streamtune.data.store import TableWriter, spill
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PROMPT_TYPES", "PreparedPrompts", "iter_prompts", "prepare_prompts", "prompt_of"]

PROMPT_TYPES = ("prompts", "messages")
"""Names a recipe's ``type`` may have, besides ``auto``, for prompts."""

_COLUMN = {"prompts": "prompt", "messages": "messages"}

_TAKEN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function that a column cannot be."""


@dataclass(frozen=True)
class PreparedPrompts:
    """Prompts, split into a training and a held-out part; none is in both."""

    train: Sequence[Prompt]
    validation: Sequence[Prompt]
    report: TreeReport
    fingerprint: str
    """hash of all token ids and columns in order: equal if and only if a run sees the same data"""


def prepare_prompts(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    overlength: str = "error",
    val_size: float = 0.0,
    seed: int = 42,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedPrompts:
    """Read every source and render its prompts.

    Args:
        sources: Where the rows come from, in order; of one of :data:`PROMPT_TYPES`.
        tokenizer: The model's tokenizer, with its chat template.
        max_prompt_length: Tokens a prompt has at most.
        overlength: What to do with a longer prompt: refuse them all (``error``), keep its last tokens (``truncate``),
            or leave it out (``drop``).
        val_size: Rows to hold out: a fraction below 1, or a count. Rows with the same prompt stay together.
        seed: Seed of the choice of held-out rows.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed or too long, or nothing is left.
        ArgumentError: ``overlength`` is none of the known ones.
    """
    split = "a prompt cannot be split; use " if overlength == "split" else "use "
    check_choice("overlength", overlength, TREE_OVERLENGTH, mend=split + ", ".join(TREE_OVERLENGTH))
    render = PromptRenderer(tokenizer)
    with spill(PROMPT_SCHEMA) as (writer, tables):
        fitting = _Fitting(writer, max_prompt_length, overlength)
        for row, prompt in with_progress(iter_prompts(sources, notify)):
            tools = tools_of(row.columns.get("tools"), row.origin)
            columns = {name: value for name, value in row.columns.items() if name != "prompt"}
            fitting.add(Prompt(render(prompt, tools, row.origin), prompt, columns, row.origin), tools)
        fitting.check(notify)
    held_out = choose_held_out(fitting.prompts, val_size, seed)
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    return PreparedPrompts(
        train=PromptSequence(tables[0], train),
        validation=PromptSequence(tables[0], validation),
        report=fitting.report(len(train), len(validation)),
        fingerprint=fitting.fingerprint(train, validation),
    )


def iter_prompts(sources: Sequence[Source], notify: Callable[[str], None]) -> Iterator[tuple[Row, Said]]:
    """Yield every row of every source with its prompt, checked.

    Raises:
        DataError: A row is malformed.
    """
    for row, row_type in typed_rows(sources, PROMPT_TYPES, detect_prompt_type, notify):
        taken = next((name for name in _TAKEN if name in row.columns), None)
        if taken is not None:
            raise DataError(
                f"a column cannot be called '{taken}': reward functions take an argument of that name",
                where=row.origin,
                mend="rename the column",
            )
        yield row, prompt_of(row, row_type)


def detect_prompt_type(row: Row) -> str:
    """Return the type of prompts a row looks like.

    Raises:
        DataError: It looks like none.
    """
    for row_type, column in _COLUMN.items():
        if column in row.columns:
            return row_type
    raise DataError(
        f"there is no prompt in the columns {column_names(row.columns)}",
        where=row.origin,
        mend="a row needs 'prompt' or 'messages'; rename the column",
    )


def prompt_of(row: Row, row_type: str) -> Said:
    """Return the prompt of a row.

    Raises:
        DataError: There is none, it is malformed, or it ends with an assistant message.
    """
    column = _COLUMN[row_type]
    if row.columns.get(column) is None:
        raise DataError(
            f"the prompt is missing: a '{row_type}' row needs the column '{column}', this one has "
            f"{column_names(row.columns)}",
            where=row.origin,
        )
    prompt = said(row.columns, column, row.origin)
    if isinstance(prompt, str):
        if row_type == "messages":
            raise DataError("'messages' must be a list of messages, it is a string", where=row.origin)
        return prompt
    check_order(prompt, column, row.origin)
    if row_type == "messages" and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt or prompt[-1]["role"] == "assistant":
        mend = "type: messages takes the last answer off" if row_type == "prompts" else "remove the row"
        raise DataError(f"'{column}' asks nothing: it ends with what the assistant says", where=row.origin, mend=mend)
    return prompt


@dataclass
class _Fitting:
    """Fits prompts to the length, writes them, and counts the cut and dropped ones."""

    writer: TableWriter
    max_prompt_length: int
    overlength: str
    counts: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """of every prompt as rendered"""
    prompts: list[bytes] = field(default_factory=list)
    """for every kept prompt a hash of what it says"""
    digests: list[bytes] = field(default_factory=list)
    """for every kept prompt a hash of all a run sees of it"""
    longest: tuple[int, str] = (0, "")

    def add(self, prompt: Prompt, tools: Any) -> None:
        """Fit one prompt to the length, and write it unless it is dropped."""
        size = len(prompt.input_ids)
        self.lengths.append(size)
        self.longest = max(self.longest, (size, prompt.origin), key=lambda pair: pair[0])
        if size > self.max_prompt_length:
            self.counts["too_long"] += 1
            if self.overlength != "truncate":
                self.counts["dropped"] += 1
                return
            self.counts["truncated"] += 1
            ids = prompt.input_ids[-self.max_prompt_length :]
            prompt = Prompt(ids, prompt.prompt, prompt.columns, prompt.origin)
        self.prompts.append(prompt_digest(prompt.prompt, tools))
        self.digests.append(_digest(prompt))
        self.counts["tokens"] += len(prompt.input_ids)
        self.writer.append(prompt.stored(), len(prompt.input_ids))

    def check(self, notify: Callable[[str], None]) -> None:
        """Raise if prompts are too long or none is left; notify the user of the changes.

        Raises:
            DataError: Prompts are over the length and ``overlength`` is ``error``, or nothing is left.
        """
        size, origin = self.longest
        too_long = self.counts["too_long"]
        limit = f"max_prompt_length = {self.max_prompt_length:,}"
        if too_long and self.overlength == "error":
            prompts = "1 prompt has" if too_long == 1 else f"{too_long:,} prompts have"
            raise DataError(
                f"{prompts} more than {limit} tokens; the longest has {size:,}",
                where=origin,
                mend=f"set max_prompt_length to {size} or more, or say what to do with them: overlength: truncate "
                "(keeps the end) or drop",
            )
        if not self.digests:
            raise DataError(
                f"no prompt is left: all {len(self.lengths):,} were dropped",
                where=origin,
                mend=f"the longest has {size:,} tokens, {limit}",
            )
        if too_long:
            how = "truncated" if self.counts["truncated"] else "dropped"
            notify(f"{too_long:,} of {len(self.lengths):,} prompts are over {self.max_prompt_length:,} tokens: {how}")

    def report(self, train_examples: int, validation_examples: int) -> TreeReport:
        """Return the counts and lengths of the rows."""
        lengths = length_percentiles(np.frombuffer(self.lengths, dtype=np.int64))
        return TreeReport(
            rows=len(self.lengths),
            kept=len(self.digests),
            truncated=self.counts["truncated"],
            dropped=self.counts["dropped"],
            identical=0,
            train_examples=train_examples,
            validation_examples=validation_examples,
            completions=0,
            tokens=self.counts["tokens"],
            tree_tokens=self.counts["tokens"],
            supervised_tokens=0,
            length_percentiles=lengths,
            prompt_lengths=lengths,
            completion_lengths={},
            tree_lengths={},
        )

    def fingerprint(self, train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> str:
        """Return a hash of the prompts of both parts in order."""
        total = hashlib.sha256(f"{len(train)} {len(validation)}".encode())
        for index in (*train, *validation):
            total.update(self.digests[index])
        return total.hexdigest()


def _digest(prompt: Prompt) -> bytes:
    """Return a hash of everything a run reads of a prompt: its tokens, its text and its columns."""
    digest = hashlib.blake2b(np.array(prompt.input_ids, dtype=np.int32).tobytes(), digest_size=16)
    digest.update(json.dumps([prompt.prompt, prompt.columns], sort_keys=True, default=repr).encode())
    return digest.digest()
