"""Make a tree of each row: a prompt with both answers of a pair, or with one that is labelled.

Rows with the same prompt are held out together, so that no held-out prompt is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from streamtune.data.data_report import CompletionReport
from streamtune.data.fit import IDENTICAL_PAIRS, LengthPolicy, Prepared, TreeFit, check_choice
from streamtune.data.preferences import (
    PREFERENCE_TYPES,
    Answers,
    detect_preference_type,
    normalise_preference,
    preference_columns_read,
)
from streamtune.data.prepare.row_kind import Reading, read_and_fit
from streamtune.data.reading.sources import Source, typed_rows
from streamtune.data.record_table import Tree
from streamtune.data.rendering.counts import DEFAULT_CHAT, ChatOptions
from streamtune.data.rendering.pool import Item
from streamtune.data.rendering.render import TreeRenderer
from streamtune.data.rendering.renderings import require_template
from streamtune.data.row_cache import RowCache
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PreparedTrees = Prepared[Tree, CompletionReport]
"""Trees, split into a training and a held-out part; no prompt is in both."""


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
    on_bad_row: str = "error",
    max_bad_rows: int = 100,
    chat: ChatOptions = DEFAULT_CHAT,
    processes: int = 1,
    cache: RowCache | None = None,
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
        on_bad_row: What to do with rows that are malformed or cannot be trained on: list the first ten and refuse
            (``error``), or count and leave them out (``skip``).
        max_bad_rows: Rows that ``skip`` may leave out.
        chat: Options of rendering.
        processes: Processes that render; 1 is this one.
        cache: Where prepared rows are kept and found again; None keeps none.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, identical, too long or empty, or nothing is left.
        ArgumentError: ``overlength`` or ``identical_pairs`` is none of the known ones, or the lengths leave no room.
    """
    policy = LengthPolicy(max_length, max_prompt_length, overlength)
    rules = _TreeRules(policy, identical_pairs, on_bad_row, max_bad_rows, chat)

    wanted = ("preference",)
    kinds = ("chosen", "rejected")
    return _prepare_trees(
        sources, wanted, lambda answers: answers, tokenizer, rules, kinds,
        val_size=val_size, seed=seed, processes=processes, cache=cache, notify=notify,
    )  # fmt: skip


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
    on_bad_row: str = "error",
    max_bad_rows: int = 100,
    chat: ChatOptions = DEFAULT_CHAT,
    processes: int = 1,
    cache: RowCache | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedTrees:
    """Read every source and make one tree of each row, its completions labelled desirable or not.

    A row of type ``unpaired`` has one completion. A pair is read as two: ``chosen`` is desirable, ``rejected`` is not,
    and both stay in one tree, where they share their prompt.

    Args and raises as :func:`prepare_preferences`; in addition a ``DataError`` if all labels are the same.
    """
    policy = LengthPolicy(max_length, max_prompt_length, overlength)
    rules = _TreeRules(policy, identical_pairs, on_bad_row, max_bad_rows, chat)

    def labelled(answers: Answers) -> Answers:
        return answers if answers.labels else replace(answers, labels=(True, False))

    kinds = ("desirable", "undesirable")
    prepared = _prepare_trees(
        sources, PREFERENCE_TYPES, labelled, tokenizer, rules, kinds,
        val_size=val_size, seed=seed, processes=processes, cache=cache, notify=notify,
    )  # fmt: skip
    found = list(prepared.report.completion_lengths)
    if len(found) == 1:
        raise DataError(
            f"all completions are labelled {found[0]}: there is nothing to tell them from",
            where=sources[0].place,
            mend="add rows with the other label",
        )
    return prepared


@dataclass(frozen=True)
class _TreeRules:
    """Everything but the sources and the tokenizer that decides trees."""

    policy: LengthPolicy
    identical_pairs: str
    on_bad_row: str
    max_bad_rows: int
    chat: ChatOptions

    def __post_init__(self) -> None:
        check_choice("identical_pairs", self.identical_pairs, IDENTICAL_PAIRS)


def _prepare_trees(
    sources: Sequence[Source],
    wanted: Sequence[str],
    change: Callable[[Answers], Answers],
    tokenizer: PreTrainedTokenizerBase,
    rules: _TreeRules,
    kinds: tuple[str, str],
    *,
    val_size: float,
    seed: int,
    processes: int,
    cache: RowCache | None,
    notify: Callable[[str], None],
) -> PreparedTrees:
    """Render, fit and split every row."""

    def add(fit: TreeFit, tree: tuple[Tree, bytes] | None, origin: str) -> None:
        if tree is None:
            fit.skip_identical(origin)
        else:
            fit.add(*tree)

    fit, table = read_and_fit(
        Tree,
        lambda writer: TreeFit(writer, rules.policy, rules.identical_pairs, kinds),
        partial(TreeRenderer, tokenizer, chat=rules.chat),
        partial(_answers, tokenizer, wanted, change),
        add,
        sources=sources,
        tokenizer=tokenizer,
        settings={
            "policy": vars(rules.policy),
            "identical_pairs": rules.identical_pairs,
            "kinds": kinds,
            "chat": vars(rules.chat),
        },
        on_bad_row=rules.on_bad_row,
        max_bad_rows=rules.max_bad_rows,
        processes=processes,
        cache=cache,
        notify=notify,
    )
    return fit.prepared(table, val_size, seed, notify)


def _answers(
    tokenizer: PreTrainedTokenizerBase,
    wanted: Sequence[str],
    change: Callable[[Answers], Answers],
    reading: Reading,
    source: Source,
) -> Iterator[Item[Answers]]:
    """Yield the normal form of every row of a source."""
    for row, row_type in typed_rows([source], PREFERENCE_TYPES, detect_preference_type, reading.bad):
        if row_type not in wanted:
            raise DataError(
                f"the rows are of type '{row_type}', and pairs of 'chosen' and 'rejected' are compared here",
                where=row.origin,
                mend="set loss_type: kto, which judges answers one by one",
            )
        answers = None
        with reading.bad:
            answers = change(normalise_preference(row, row_type))
            reading.find_unread(source.path, row, preference_columns_read(row_type, answers))
        if answers is not None:
            if not isinstance(answers.prompt, str) and not answers.identical:
                require_template(tokenizer, "row", row.origin)
            yield Item(source.path, row.origin, sum(map(len, answers.texts())), answers)
