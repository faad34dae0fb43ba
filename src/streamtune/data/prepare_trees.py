"""From sources to trees ready to train on: pairs of answers, or answers labelled one by one, behind their prompt.

Everything is read and checked before these functions return. Rows with the same prompt are held out together, so that
no held-out prompt is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from streamtune.data.fit_trees import IDENTICAL_PAIRS, LengthPolicy, TreeFitting, check_choice
from streamtune.data.holdout import choose_held_out
from streamtune.data.progress import with_progress
from streamtune.data.render_tree import TreeRenderer
from streamtune.data.report_trees import TreeReport
from streamtune.data.rows_preference import (
    PREFERENCE_TYPES,
    Answers,
    detect_preference_type,
    normalise_preference,
)
from streamtune.data.said import prompt_digest
from streamtune.data.sources import Source, typed_rows
from streamtune.data.store import spill
from streamtune.data.tree import TREE_SCHEMA, TreeSequence
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PreparedTrees", "prepare_preferences", "prepare_unpaired"]

Rows = Iterator[tuple[Answers, str]]
"""Normal forms with their origins."""


@dataclass(frozen=True)
class PreparedTrees:
    """Trees, split into a training and a held-out part; no prompt is in both."""

    train: TreeSequence
    validation: TreeSequence
    report: TreeReport
    fingerprint: str
    """hash of all token ids, masks, labels and margins in order: equal if and only if a run sees the same data"""


def prepare_preferences(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_prompt_length: int | None = None,
    overlength: str = "error",
    identical_pairs: str = "error",
    val_size: float = 0.0,
    seed: int = 42,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedTrees:
    """Read every source and make one tree of each pair: its completions are ``[chosen, rejected]``.

    Args:
        sources: Where the rows come from, in order; of type ``preference``.
        tokenizer: The model's tokenizer, with its chat template.
        max_length: Tokens that the prompt and the longest completion have together at most.
        max_prompt_length: Tokens a prompt has at most; no limit of its own unless given.
        overlength: What to do with a row over either length: refuse them all (``error``), leave it out (``drop``), or
            cut it (``truncate``): the prompt keeps its last ``max_prompt_length`` tokens, then the completions their
            first ones. A row with nothing left to prefer after that is left out, as is one whose prompt fills
            ``max_length`` by itself.
        identical_pairs: What to do with a pair whose answers are the same: refuse it (``error``) or leave it out
            (``drop``), counted.
        val_size: Rows to hold out: a fraction below 1, or a count.
        seed: Seed of the choice of held-out rows.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, identical, too long or empty, or nothing is left.
        ArgumentError: ``overlength`` or ``identical_pairs`` is none of the known ones, or the lengths leave no room.
    """
    check_choice("identical_pairs", identical_pairs, IDENTICAL_PAIRS)
    policy = LengthPolicy(max_length, max_prompt_length, overlength)
    rows = _answers(sources, ("preference",), notify)
    with spill(TREE_SCHEMA) as (writer, tables):
        fitting = TreeFitting(writer, policy, identical_pairs, ("chosen", "rejected"))
        _render_all(rows, fitting, tokenizer, notify)
    return _held_out(fitting, tables[0], val_size, seed)


def prepare_unpaired(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_prompt_length: int | None = None,
    overlength: str = "error",
    identical_pairs: str = "error",
    val_size: float = 0.0,
    seed: int = 42,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedTrees:
    """Read every source and make one tree of each row, its completions labelled desirable or not.

    A row of type ``unpaired`` has one completion. A pair is read as two: ``chosen`` is desirable, ``rejected`` is not,
    and both stay in one tree, where they share their prompt.

    Args and raises as :func:`prepare_preferences`; in addition a ``DataError`` if all labels are the same.
    """
    check_choice("identical_pairs", identical_pairs, IDENTICAL_PAIRS)
    policy = LengthPolicy(max_length, max_prompt_length, overlength)
    rows = _answers(sources, PREFERENCE_TYPES, notify)
    labelled = ((a if a.labels else replace(a, labels=(True, False)), origin) for a, origin in rows)
    with spill(TREE_SCHEMA) as (writer, tables):
        fitting = TreeFitting(writer, policy, identical_pairs, ("desirable", "undesirable"))
        _render_all(labelled, fitting, tokenizer, notify)
    if len(fitting.completion_lengths) == 1:
        (only,) = fitting.completion_lengths
        raise DataError(
            f"all completions are labelled {only}: there is nothing to tell them from",
            where=sources[0].where or sources[0].path,
            mend="add rows with the other label",
        )
    return _held_out(fitting, tables[0], val_size, seed)


def _answers(sources: Sequence[Source], wanted: Sequence[str], notify: Callable[[str], None]) -> Rows:
    """Yield the normal form of every row, with its origin."""
    for row, row_type in typed_rows(sources, PREFERENCE_TYPES, detect_preference_type, notify):
        if row_type not in wanted:
            raise DataError(
                f"the rows are of type '{row_type}', and pairs of 'chosen' and 'rejected' are compared here",
                where=row.origin,
                mend="set loss_type: kto, which judges answers one by one",
            )
        yield normalise_preference(row, row_type), row.origin


def _render_all(
    rows: Rows, fitting: TreeFitting, tokenizer: PreTrainedTokenizerBase, notify: Callable[[str], None]
) -> None:
    """Render and fit every row."""
    render = TreeRenderer(tokenizer, notify=notify)
    for answers, origin in with_progress(rows):
        if answers.identical:
            fitting.skip_identical(origin)
        else:
            fitting.add(render(answers, origin), prompt_digest(answers.prompt, answers.tools))
    fitting.check(notify)


def _held_out(fitting: TreeFitting, table: pa.Table, val_size: float, seed: int) -> PreparedTrees:
    """Split the trees by their prompts into a training and a held-out part."""
    held_out = choose_held_out(fitting.prompts, val_size, seed)
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    return PreparedTrees(
        train=TreeSequence(table, train),
        validation=TreeSequence(table, validation),
        report=fitting.report(len(train), len(validation)),
        fingerprint=fitting.fingerprint(train, validation),
    )
