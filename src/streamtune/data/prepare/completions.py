"""Make a tree or a prompt of each row: a prompt with its completions, or one whose completions are not written yet.

Rows with the same prompt are held out together, so that no held-out prompt is trained on. Every column beside a prompt
without completions is kept and goes to the reward functions as a list under its name, as does ``messages`` itself,
which holds the answer that was taken off. ``tools`` goes to the chat template too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from streamtune.data.data_report import CompletionReport
from streamtune.data.fit import LengthPolicy, Prepared, PromptFit, TreeFit
from streamtune.data.options import COMPLETION_OVERLENGTH, IDENTICAL_PAIRS, PROMPT_SIDES, DataOptions, check_choice
from streamtune.data.preferences import (
    PREFERENCE_TYPES,
    Answers,
    detect_preference_type,
    normalise_preference,
    preference_columns_read,
)
from streamtune.data.prepare.row_kind import Read, Reading, RowKind, prepare_kind
from streamtune.data.reading.cells import TextOrMessages, texts_of
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import Source, typed_rows
from streamtune.data.record_table import Prompt, Tree
from streamtune.data.rendering.pool import Item, Notify
from streamtune.data.rendering.render import PromptRenderer, TreeRenderer
from streamtune.data.rendering.renderings import require_template
from streamtune.data.row_types import PROMPT_TYPES, detect_prompt_type, prompt_of
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PreparedTrees = Prepared[Tree, CompletionReport]
"""Trees, split into a training and a held-out part; no prompt is in both."""


def prepare_preferences(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedTrees:
    """Read every source and make one tree of each pair: its completions are ``[chosen, rejected]``.

    Args:
        sources: Where the rows come from, in order; of type ``preference``.
        tokenizer: The model's tokenizer, with its chat template.
        options: See :class:`DataOptions`.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, identical, too long or empty, or nothing is left.
        ArgumentError: ``overlength`` or ``identical_pairs`` is none of the known ones, or the lengths leave no room.
    """
    read = partial(_answers, tokenizer, ("preference",), lambda answers: answers)
    kind = _tree_kind(tokenizer, options, ("chosen", "rejected"), read)
    return prepare_kind(kind, sources, tokenizer, options, notify)


def prepare_unpaired(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedTrees:
    """Read every source and make one tree of each row, its completions labelled desirable or not.

    A row of type ``unpaired`` has one completion. A pair is read as two: ``chosen`` is desirable, ``rejected`` is not,
    and both stay in one tree, where they share their prompt.

    Args and raises as :func:`prepare_preferences`; in addition a ``DataError`` if all labels are the same.
    """

    def labelled(answers: Answers) -> Answers:
        return answers if answers.labels else replace(answers, labels=(True, False))

    read = partial(_answers, tokenizer, PREFERENCE_TYPES, labelled)
    kind = _tree_kind(tokenizer, options, ("desirable", "undesirable"), read)
    prepared = prepare_kind(kind, sources, tokenizer, options, notify)
    found = list(prepared.report.completion_lengths)
    if len(found) == 1:
        raise DataError(
            f"all completions are labelled {found[0]}: there is nothing to tell them from",
            where=sources[0].place,
            mend="add rows with the other label",
        )
    return prepared


def _tree_kind(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, kinds: tuple[str, str], read: Read[Answers]
) -> RowKind[TreeFit]:
    """Return how trees are prepared; ``kinds`` names their two kinds of completions."""
    policy = LengthPolicy(options.max_length, options.max_prompt_length, options.overlength)
    check_choice("identical_pairs", options.identical_pairs, IDENTICAL_PAIRS)
    return RowKind(
        Tree,
        settings={
            "policy": vars(policy),
            "identical_pairs": options.identical_pairs,
            "kinds": kinds,
            "chat": vars(options.chat),
        },
        make_fit=lambda writer: TreeFit(writer, policy, options.identical_pairs, kinds),
        make_renderer=partial(TreeRenderer, tokenizer, chat=options.chat),
        read=read,
        add=_add,
    )


def _add(fit: TreeFit, tree: tuple[Tree, bytes] | None, origin: str) -> None:
    """Fit a rendered tree with the hash of its prompt: None is a pair whose answers are the same."""
    if tree is None:
        fit.skip_identical(origin)
    else:
        fit.add(*tree)


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


_TAKEN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function that a column cannot be."""


PreparedPrompts = Prepared[Prompt, CompletionReport]
"""Prompts, split into a training and a held-out part; none is in both."""


def prepare_prompts(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedPrompts:
    """Read every source and render its prompts.

    Args:
        sources: Where the rows come from, in order; of one of :data:`PROMPT_TYPES`.
        tokenizer: The model's tokenizer, with its chat template.
        options: See :class:`DataOptions`; ``max_prompt_length`` is the limit.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed or too long, or nothing is left.
        ArgumentError: ``overlength`` is none of the known ones.
    """
    overlength, side, most = options.overlength, options.truncate_side, options.max_prompt_length
    assert most is not None, "prompts have a limit of their own"
    split = "a prompt cannot be split; use " if overlength == "split" else "use "
    check_choice("overlength", overlength, COMPLETION_OVERLENGTH, mend=split + ", ".join(COMPLETION_OVERLENGTH))
    check_choice("truncate_side", side, PROMPT_SIDES)
    kind = RowKind(
        Prompt,
        settings={
            "max_prompt_length": most,
            "overlength": overlength,
            "truncate_side": side,
            "chat": vars(options.chat),
        },
        make_fit=lambda writer: PromptFit(writer, overlength, most, side),
        make_renderer=partial(PromptRenderer, tokenizer, chat=options.chat),
        read=partial(_prompts, tokenizer),
        add=lambda fit, prompt, origin: fit.add(*prompt),
    )
    return prepare_kind(kind, sources, tokenizer, options, notify)


def _prompts(
    tokenizer: PreTrainedTokenizerBase, reading: Reading, source: Source
) -> Iterator[Item[tuple[Row, TextOrMessages]]]:
    """Yield every row of a source with its prompt, checked."""
    for row, row_type in typed_rows([source], PROMPT_TYPES, detect_prompt_type, reading.bad):
        taken = next((name for name in _TAKEN if name in row.columns), None)
        if taken is not None:
            raise DataError(
                f"a column cannot be called '{taken}': reward functions take an argument of that name",
                where=row.origin,
                mend="rename the column",
            )
        prompt = None
        with reading.bad:
            prompt = prompt_of(row, row_type)
        if prompt is not None:
            if not isinstance(prompt, str):
                require_template(tokenizer, "prompt", row.origin)
            size = len(prompt) if isinstance(prompt, str) else sum(map(len, texts_of(prompt)))
            yield Item(source.path, row.origin, size, (row, prompt))
