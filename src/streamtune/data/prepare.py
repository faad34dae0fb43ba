"""From sources to rows ready to train on: read, normalise, render, fit to the length, hold out, pack.

:func:`prepare_dataset` makes rows of next tokens; the others make prompts with completions, or prompts that completions
are yet to be written for.

A row of type ``preference`` becomes a tree of its prompt with both answers, one of type ``unpaired`` a tree with one
answer; a row of type ``prompts`` or ``messages`` becomes a prompt.

Everything is read and checked before these functions return. Rows with the same prompt are held out together, so that
no held-out prompt is trained on.

Every column beside a prompt is kept and goes to the reward functions as a list under its name, as does ``messages``
itself, which holds the answer that was taken off. ``tools`` goes to the chat template too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from streamtune.data.batches.sampler import pack_parts
from streamtune.data.cache import RowCache, fit_rows
from streamtune.data.faults import ON_BAD_ROW, BadRows
from streamtune.data.fit import (
    COMPLETION_OVERLENGTH,
    IDENTICAL_PAIRS,
    PROMPT_SIDES,
    LengthFit,
    LengthPolicy,
    Prepared,
    PromptFit,
    RowFit,
    TreeFit,
    check_choice,
)
from streamtune.data.fit.parts import make_mixture, set_bounds, share_epoch
from streamtune.data.preferences import (
    PREFERENCE_TYPES,
    Answers,
    detect_preference_type,
    normalise_preference,
    preference_columns_read,
)
from streamtune.data.reading.cells import TextOrMessages, prompt_digest, texts_of, tools_of, variables_of
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import BUILT_IN, Source, typed_rows, with_progress
from streamtune.data.records import Example, Prompt, Tree
from streamtune.data.rendering.counts import DEFAULT_CHAT, ChatOptions, RenderLog
from streamtune.data.rendering.policy import RowPolicy
from streamtune.data.rendering.render import PromptRenderer, RowRenderer, TreeRenderer
from streamtune.data.rendering.renderings import require_template
from streamtune.data.report import CompletionReport, DataReport
from streamtune.data.rows import (
    PROMPT_TYPES,
    ROW_TYPES,
    Content,
    Conversation,
    PromptCompletion,
    columns_read,
    detect_prompt_type,
    detect_type,
    looks_like,
    normalise,
    prompt_of,
    size_of,
)
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "PreparedData",
    "PreparedPrompts",
    "PreparedTrees",
    "holds_messages",
    "iter_texts",
    "prepare",
    "prepare_preferences",
    "prepare_prompts",
    "prepare_unpaired",
]

PreparedData = Prepared[Example, DataReport]
"""Examples, split into a training and a held-out part, with their packs where rows are packed."""


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    overlength: str = "error",
    truncate_side: str = "auto",
    split_at: str = "turn",
    split_overlap: int = 0,
    train_on: str = "assistant",
    val_size: float = 0.0,
    packing: bool = False,
    seed: int = 42,
    on_bad_row: str = "error",
    max_bad_rows: int = 100,
    chat: ChatOptions = DEFAULT_CHAT,
    cache: RowCache | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedData:
    """Read every source and make examples of its rows.

    Args:
        sources: Where the rows come from, in order.
        tokenizer: The model's tokenizer, with its chat template.
        max_length: Tokens an example has at most.
        overlength: What to do with a longer row: refuse them all (``error``), cut a part off (``truncate``), leave it
            out (``drop``), or cut it into consecutive pieces (``split``).
        truncate_side: The part that is cut off, see :func:`streamtune.data.fit.cuts.cut_row`.
        split_at: The strongest border that pieces end at: ``turn``, ``paragraph``, ``line`` or ``token``.
        split_overlap: Tokens before each later piece that are there as context, not trained twice.
        train_on: ``assistant`` (every assistant turn, or the completion), ``completion`` (the last turn; of a row of
            prompt and completion all turns behind the prompt), ``last`` (the last turn of any row) or ``all``.
        val_size: Rows to hold out: a fraction below 1, or a count. Rows with the same tokens stay together, so that
            no held-out row is trained on.
        packing: Choose examples that share a sequence of at most ``max_length`` tokens.
        seed: Seed of the choice of held-out rows, and of the packs.
        on_bad_row: What to do with rows that are malformed or cannot be trained on: list the first ten and refuse
            (``error``), or count and leave them out (``skip``).
        max_bad_rows: Rows that ``skip`` may leave out.
        chat: Options of rendering.
        cache: Where prepared rows are kept and found again; None keeps none.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, too long or has nothing to train on, or nothing is left.
        ArgumentError: ``overlength``, ``train_on`` or another choice is none of the known ones.
    """
    policy = RowPolicy(max_length, overlength, truncate_side, split_at, split_overlap)
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)

    def fill(fit: RowFit, note: Callable[[str], None]) -> None:
        bad = BadRows(on_bad_row, max_bad_rows, note)
        render = RowRenderer(tokenizer, train_on=train_on, notify=note, chat=chat, policy=policy)
        reading = _Reading(sources, fit, render.log, bad)
        for content, origin in with_progress(_contents(reading, render.render_ahead)):
            if isinstance(content, Conversation):
                require_template(tokenizer, "row", origin)  # no fault of the row: outside of what is reported as one
            with bad:
                if render.leaves_out(content, origin):
                    fit.skip_empty()
                    continue
                rendered = render(content, origin)
                del content  # of a long row the memory counts
                fit.add(rendered, origin)
                del rendered
        reading.finish()

    fit, table = fit_rows(
        Example,
        lambda writer: RowFit(writer, policy),
        fill,
        sources=sources,
        tokenizer=tokenizer,
        settings={
            "policy": vars(policy),
            "train_on": train_on,
            "on_bad_row": on_bad_row,
            "max_bad_rows": max_bad_rows,
            "chat": vars(chat),
        },
        cache=cache,
        notify=notify,
    )
    prepared = fit.prepared(table, val_size, seed, notify)
    return _packed(prepared, sources, max_length, seed) if packing else prepared


def _packed(prepared: PreparedData, sources: Sequence[Source], max_length: int, seed: int) -> PreparedData:
    """Return the data with its packs. They are part of the fingerprint: a run resumes only with the same ones.

    Rows of an eval set share no pack with those of another, and with weights rows of a source none with another's.
    """
    lengths, mixture, report = prepared.train.lengths(), prepared.mixture, prepared.report
    bounds = (0, len(lengths)) if mixture is None else prepared.bounds
    packs, firsts = pack_parts(lengths, bounds, max_length, seed=seed)
    set_starts = set_bounds(prepared.eval_sets, len(prepared.validation))
    held_out, _ = pack_parts(prepared.validation.lengths(), set_starts, max_length, seed=seed)
    if mixture is not None:
        trained = [source for source in sources if source.evaluates is None]
        tokens = np.add.reduceat(lengths[packs.rows], packs.starts[:-1])
        mixture = make_mixture(trained, firsts, np.diff(packs.starts), tokens)
        report = replace(report, sources=share_epoch(report.sources, bounds, lengths, mixture))
    digest = hashlib.sha256(prepared.fingerprint.encode())
    for part in (packs, held_out):
        digest.update(part.rows.tobytes() + part.starts.tobytes())
    return replace(
        prepared,
        report=replace(report, packs=len(packs), pack_fill=round(packs.fill_rate(max_length), 4)),
        fingerprint=digest.hexdigest(),
        packs=packs,
        validation_packs=held_out,
        mixture=mixture,
    )


@dataclass(frozen=True)
class _Reading:
    """The rows of all sources, and what counts them: as rows of their source, as bad ones, by what rendering finds."""

    sources: Sequence[Source]
    fit: LengthFit[Any, Any]
    log: RenderLog
    bad: BadRows

    def rows(self, known: Sequence[str], detect: Callable[[Row], str]) -> Iterator[tuple[Row, str]]:
        """Do as :func:`typed_rows`, source by source."""
        for source in self.each():
            yield from typed_rows([source], known, detect, self.bad)

    def each(self) -> Iterator[Source]:
        """Yield the sources; the rows that follow are counted as those of the last one."""
        for source in self.sources:
            self.fit.begin(source)
            self.log.begin(source.path)
            yield source

    def find_unread(self, row: Row, read: Sequence[str]) -> None:
        """Record columns that are not read and hold something, but for those of the built-in sets."""
        if self.log.path not in BUILT_IN:
            self.log.now.unread_columns |= dict.fromkeys(
                name for name, value in row.columns.items() if name not in read and value not in (None, "", [])
            )

    def finish(self) -> None:
        """Raise if rows are bad or none is left; notify the user of the rows that are left out or changed."""
        self.bad.check()
        if not self.fit.rows:
            self.bad.nothing_left()
        self.log.finish()
        self.fit.bad_rows = self.bad.to_json()
        self.fit.check(self.bad.notify)


def _contents(reading: _Reading, ahead: Callable[[Sequence[Content]], None]) -> Iterator[tuple[Content, str]]:
    """Yield the normal form of every row of every source, with its origin.

    ``ahead`` is called with some rows of a source before they are yielded.
    """
    for source in reading.each():
        some: list[tuple[Content, str]] = []
        size = 0
        for content, origin in _of_source(reading, source):
            some.append((content, origin))
            size += size_of(content)
            del content
            if len(some) == AHEAD_ROWS or size > AHEAD_CHARACTERS:
                ahead([content for content, _ in some])
                some.reverse()
                while some:
                    yield some.pop()  # of a long row the memory counts
                size = 0
        ahead([content for content, _ in some])
        some.reverse()
        while some:
            yield some.pop()


AHEAD_ROWS, AHEAD_CHARACTERS = 32, 1 << 18
"""Rows that are read before they are rendered, together: a chat template then runs once for many."""


def _of_source(reading: _Reading, source: Source) -> Iterator[tuple[Content, str]]:
    for row, row_type in typed_rows([source], ROW_TYPES, detect_type, reading.bad):
        found: list[Content] = []
        with reading.bad:
            found = [normalise(row, row_type)]
            reading.find_unread(row, columns_read(row_type, found[0]))
        if found:
            row.columns.clear()  # a long text is held by its reader alone
            yield found.pop(), row.origin


# --- texts alone, for training a tokenizer ----------------------------------------------------------------------------

_KNOWN = tuple(dict.fromkeys((*ROW_TYPES, *PREFERENCE_TYPES, *PROMPT_TYPES)))


def iter_texts(
    sources: Sequence[Source],
    *,
    on_bad_row: str = "error",
    max_bad_rows: int = 100,
    notify: Callable[[str], None] = lambda message: None,
) -> Iterator[str]:
    """Yield the texts of all rows: contents of messages, prompts, completions, documents; without a chat template.

    Raises:
        DataError: A file is missing, or a row is malformed.
    """
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
    bad = BadRows(on_bad_row, max_bad_rows, notify)
    for row, row_type in typed_rows(sources, _KNOWN, _detect, bad):
        texts: list[str] = []
        with bad:
            texts = _texts(row, row_type)
        yield from texts
    bad.check()


def holds_messages(sources: Sequence[Source]) -> bool:
    """Return True if the first row of the first source is a conversation, or answers one.

    Raises:
        DataError: A file is missing, or the row is malformed.
    """
    for row, row_type in typed_rows(sources[:1], _KNOWN, _detect, BadRows("skip", sys.maxsize)):
        with suppress(DataError):  # the next row may be sound
            if row_type in PREFERENCE_TYPES:
                return not isinstance(normalise_preference(row, row_type).prompt, str)
            if row_type == "prompts":
                return not isinstance(prompt_of(row, row_type), str)
            return isinstance(normalise(row, row_type), Conversation)
    return False


def _detect(row: Row) -> str:
    """Return the type a row looks like, among those of all commands: its texts do not depend on the command."""
    if looks_like(row.columns) is None:
        if {"chosen", "rejected"} <= row.columns.keys():
            return "preference"
        if "prompt" in row.columns:
            return "prompts"
    return detect_type(row)


def _texts(row: Row, row_type: str) -> list[str]:
    if row_type in PREFERENCE_TYPES:
        return normalise_preference(row, row_type).texts()
    if row_type == "prompts":
        return texts_of(prompt_of(row, row_type))
    content = normalise(row, row_type)
    if isinstance(content, Conversation):
        return texts_of(content.messages)
    return [content.prompt + content.completion] if isinstance(content, PromptCompletion) else [content.text]


PreparedTrees = Prepared[Tree, CompletionReport]
"""Trees, split into a training and a held-out part; no prompt is in both."""

PreparedPrompts = Prepared[Prompt, CompletionReport]
"""Prompts, split into a training and a held-out part; none is in both."""

Rows = Iterator[tuple[Answers, str]]
"""Normal forms with their origins."""


_TAKEN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function that a column cannot be."""


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
        cache: Where prepared rows are kept and found again; None keeps none.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, identical, too long or empty, or nothing is left.
        ArgumentError: ``overlength`` or ``identical_pairs`` is none of the known ones, or the lengths leave no room.
    """
    policy = LengthPolicy(max_length, max_prompt_length, overlength)
    rules = _TreeRules(policy, identical_pairs, on_bad_row, max_bad_rows, chat)

    def read(reading: _Reading) -> Rows:
        return _answers(reading, ("preference",))

    kinds = ("chosen", "rejected")
    return _prepare_trees(
        sources, read, tokenizer, rules, kinds, val_size=val_size, seed=seed, cache=cache, notify=notify
    )


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

    def read(reading: _Reading) -> Rows:
        for answers, origin in _answers(reading, PREFERENCE_TYPES):
            yield (answers if answers.labels else replace(answers, labels=(True, False))), origin

    kinds = ("desirable", "undesirable")
    prepared = _prepare_trees(
        sources, read, tokenizer, rules, kinds, val_size=val_size, seed=seed, cache=cache, notify=notify
    )
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
        check_choice("on_bad_row", self.on_bad_row, ON_BAD_ROW)


def _prepare_trees(
    sources: Sequence[Source],
    read: Callable[[_Reading], Rows],
    tokenizer: PreTrainedTokenizerBase,
    rules: _TreeRules,
    kinds: tuple[str, str],
    *,
    val_size: float,
    seed: int,
    cache: RowCache | None,
    notify: Callable[[str], None],
) -> PreparedTrees:
    """Render, fit and split every row."""

    def fill(fit: TreeFit, note: Callable[[str], None]) -> None:
        bad = BadRows(rules.on_bad_row, rules.max_bad_rows, note)
        render = TreeRenderer(tokenizer, notify=note, chat=rules.chat)
        reading = _Reading(sources, fit, render.log, bad)
        for answers, origin in with_progress(read(reading)):
            if not isinstance(answers.prompt, str) and not answers.identical:
                require_template(tokenizer, "row", origin)
            with bad:
                if answers.identical:
                    fit.skip_identical(origin)
                else:
                    fit.add(render(answers, origin), prompt_digest(answers.prompt, answers.tools))
        reading.finish()

    fit, table = fit_rows(
        Tree,
        lambda writer: TreeFit(writer, rules.policy, rules.identical_pairs, kinds),
        fill,
        sources=sources,
        tokenizer=tokenizer,
        settings={**vars(rules), "policy": vars(rules.policy), "chat": vars(rules.chat), "kinds": kinds},
        cache=cache,
        notify=notify,
    )
    return fit.prepared(table, val_size, seed, notify)


def _answers(reading: _Reading, wanted: Sequence[str]) -> Rows:
    """Yield the normal form of every row, with its origin."""
    for row, row_type in reading.rows(PREFERENCE_TYPES, detect_preference_type):
        if row_type not in wanted:
            raise DataError(
                f"the rows are of type '{row_type}', and pairs of 'chosen' and 'rejected' are compared here",
                where=row.origin,
                mend="set loss_type: kto, which judges answers one by one",
            )
        answers = None
        with reading.bad:
            answers = normalise_preference(row, row_type)
            reading.find_unread(row, preference_columns_read(row_type, answers))
        if answers is not None:
            yield answers, row.origin


def prepare_prompts(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    overlength: str = "error",
    truncate_side: str = "auto",
    val_size: float = 0.0,
    seed: int = 42,
    on_bad_row: str = "error",
    max_bad_rows: int = 100,
    chat: ChatOptions = DEFAULT_CHAT,
    cache: RowCache | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedPrompts:
    """Read every source and render its prompts.

    Args:
        sources: Where the rows come from, in order; of one of :data:`PROMPT_TYPES`.
        tokenizer: The model's tokenizer, with its chat template.
        max_prompt_length: Tokens a prompt has at most.
        overlength: What to do with a longer prompt: refuse them all (``error``), keep its last tokens (``truncate``),
            or leave it out (``drop``).
        truncate_side: ``middle`` keeps its first tokens as well, half of them all.
        val_size: Rows to hold out: a fraction below 1, or a count. Rows with the same prompt stay together.
        seed: Seed of the choice of held-out rows.
        on_bad_row: What to do with rows that are malformed or cannot be trained on: list the first ten and refuse
            (``error``), or count and leave them out (``skip``).
        max_bad_rows: Rows that ``skip`` may leave out.
        chat: Options of rendering.
        cache: Where prepared rows are kept and found again; None keeps none.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed or too long, or nothing is left.
        ArgumentError: ``overlength`` is none of the known ones.
    """
    split = "a prompt cannot be split; use " if overlength == "split" else "use "
    check_choice("overlength", overlength, COMPLETION_OVERLENGTH, mend=split + ", ".join(COMPLETION_OVERLENGTH))
    check_choice("truncate_side", truncate_side, PROMPT_SIDES)
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)

    def fill(fit: PromptFit, note: Callable[[str], None]) -> None:
        bad = BadRows(on_bad_row, max_bad_rows, note)
        render = PromptRenderer(tokenizer, chat=chat, notify=note)
        reading = _Reading(sources, fit, render.log, bad)
        for row, prompt in with_progress(_prompts(reading)):
            if not isinstance(prompt, str):
                require_template(tokenizer, "prompt", row.origin)
            with bad:
                tools = tools_of(row.columns.get("tools"), row.origin)
                variables = variables_of(row.columns.get("chat_template_kwargs"), row.origin)
                columns = {name: value for name, value in row.columns.items() if name != "prompt"}
                ids = render(prompt, tools, row.origin, variables)
                fit.add(Prompt(ids, prompt, columns, row.origin), prompt_digest(prompt, tools))
        reading.finish()

    fit, table = fit_rows(
        Prompt,
        lambda writer: PromptFit(writer, overlength, max_prompt_length, truncate_side),
        fill,
        sources=sources,
        tokenizer=tokenizer,
        settings={
            "max_prompt_length": max_prompt_length,
            "overlength": overlength,
            "truncate_side": truncate_side,
            "on_bad_row": on_bad_row,
            "max_bad_rows": max_bad_rows,
            "chat": vars(chat),
        },
        cache=cache,
        notify=notify,
    )
    return fit.prepared(table, val_size, seed, notify)


def _prompts(reading: _Reading) -> Iterator[tuple[Row, TextOrMessages]]:
    """Yield every row of every source with its prompt, checked."""
    for row, row_type in reading.rows(PROMPT_TYPES, detect_prompt_type):
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
            yield row, prompt
