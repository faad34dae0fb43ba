"""From sources to records ready to train on: read, normalise, render, fit to the length, hold out, pack.

    prepare               examples of next tokens
    prepare_preferences   trees: prompts with completions that are compared
    prepare_unpaired      trees: prompts with completions that are judged one by one
    prepare_prompts       prompts whose completions are not written yet

Everything is read and checked before a function returns; :class:`streamtune.data.row_stream.RowStream` reads rows as
they are trained on.

Trees and prompts with the same prompt are held out together, so that no held-out prompt is trained on. Every column
beside a prompt without completions is kept and goes to the reward functions as a list under its name, as does
``messages`` itself, which holds the answer that was taken off. ``tools`` goes to the chat template too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from streamtune.data.batches.collate import pack_turns
from streamtune.data.batches.sampler import Packs, pack_parts
from streamtune.data.data_report import CompletionReport, DataReport
from streamtune.data.faults import ON_BAD_ROW, BadRows
from streamtune.data.fit import LengthFit, LengthPolicy, Prepared, PromptFit, RowFit, TreeFit
from streamtune.data.fit.parts import make_mixture, set_bounds, share_epoch
from streamtune.data.options import COMPLETION_OVERLENGTH, IDENTICAL_PAIRS, PROMPT_SIDES, DataOptions, check_choice
from streamtune.data.preferences import (
    PREFERENCE_TYPES,
    Answers,
    detect_preference_type,
    normalise_preference,
    preference_columns_read,
)
from streamtune.data.reading.cells import TextOrMessages, texts_of
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import BUILT_IN, Source, typed_rows, with_progress
from streamtune.data.record_table import Example, Prompt, Record, Stored, TableWriter, Tree
from streamtune.data.rendering.counts import RenderLog
from streamtune.data.rendering.pool import Item, Notify, RenderedItems, Renderer, rendering
from streamtune.data.rendering.render import PromptRenderer, RowRenderer, TreeRenderer, TurnRenderer
from streamtune.data.rendering.renderings import require_template
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.row_cache import MadeOf, fit_rows
from streamtune.data.row_types import (
    PROMPT_TYPES,
    ROW_TYPES,
    Content,
    Conversation,
    columns_read,
    detect_prompt_type,
    detect_type,
    normalise,
    prompt_of,
    size_of,
    weight_of,
)
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")
FitT = TypeVar("FitT", bound=LengthFit[Any, Any])
Read = Callable[["Reading", Source], Iterator[Item[ItemT]]]
"""Yields the rows of a source in their normal form; reports faulty rows to ``Reading.bad``."""


@dataclass(frozen=True)
class RowKind(Generic[FitT]):
    """A kind of records: how its rows are read, rendered and fitted to the length."""

    record: type[Record]
    _: KW_ONLY
    settings: Mapping[str, Any]
    """all that decides the records beside sources, tokenizer and the handling of bad rows, see :class:`MadeOf`"""
    make_fit: Callable[[TableWriter], FitT]
    """makes an empty fit, given the writer of its records"""
    make_renderer: Callable[..., Renderer]
    """makes the renderer of a row, given ``notify``"""
    read: Read[Any]
    add: Callable[[FitT, Any, str], None]
    """gives a rendered row to the fit, with its origin"""


def prepare_kind(
    kind: RowKind[FitT],
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify,
) -> Prepared[Any, Any]:
    """Read, render and fit the rows of all sources, or load what was made of them before; hold some out.

    Raises:
        DataError: A file is missing, rows are bad or too long, or nothing is left.
        ArgumentError: ``on_bad_row`` is unknown.
    """
    check_choice("on_bad_row", options.on_bad_row, ON_BAD_ROW)

    def fill(fit: FitT, note: Notify) -> None:
        bad = BadRows(options.on_bad_row, options.max_bad_rows, note)
        with rendering(kind.make_renderer, options.processes, note) as (log, render):
            reading = Reading(sources, fit, log, bad)
            for item, outcome in reading.rendered(render, reading.items(kind.read)):
                with bad:
                    rendered = outcome.get()
                    del outcome  # of a long row the memory counts
                    kind.add(fit, rendered, item.origin)
                    del rendered
            reading.finish()

    settings = {**kind.settings, "on_bad_row": options.on_bad_row, "max_bad_rows": options.max_bad_rows}
    made_of = MadeOf(kind.record, sources, tokenizer, settings)
    fit, table = fit_rows(made_of, kind.make_fit, fill, options.cache, notify)
    return fit.prepared(table, options.val_size, options.seed, notify)


class _ReadAhead(BadRows):
    """Faulty rows found while rows are read ahead; each waits for its turn. ``bad`` receives them if too many wait."""

    def __init__(self, bad: BadRows) -> None:
        super().__init__(bad.on_bad_row, bad.limit, bad.notify)
        self._bad = bad

    def report(self, error: DataError) -> None:
        self.count += 1
        self.errors.append(error)
        if len(self.errors) >= MOST_WAITING:
            for waiting in self.take():
                self._bad.report(waiting)

    def take(self) -> list[DataError]:
        """Return the waiting errors, and forget them."""
        waiting, self.errors = self.errors, []
        return waiting


MOST_WAITING = 1_000
"""Most consecutive faulty rows that wait for their turn."""


@dataclass(frozen=True)
class Reading:
    """The rows of all sources, and what counts them: the fit by source, the log by finding, and bad rows."""

    sources: Sequence[Source]
    fit: LengthFit[Any, Any]
    log: RenderLog
    bad: BadRows
    _begun: list[Source] = field(default_factory=list)

    def items(self, read: Read[ItemT]) -> Iterator[Item[ItemT]]:
        """Yield the rows of every source, faulty ones among them; they may be read ahead of being counted."""
        ahead = _ReadAhead(self.bad)
        reading = replace(self, bad=ahead)
        for number, source in enumerate(self.sources):
            for item in read(reading, source):
                for error in ahead.take():
                    yield Item(source.path, error.where, 0, None, source=number, error=error)
                item.source = number
                yield item
                del item  # of a long row the memory counts
            for error in ahead.take():
                yield Item(source.path, error.where, 0, None, source=number, error=error)

    def rendered(
        self, render: Callable[[Iterable[Item[ItemT]]], RenderedItems[ItemT]], items: Iterator[Item[ItemT]]
    ) -> RenderedItems[ItemT]:
        """Yield every row with its outcome, counted for its source. Shows progress."""
        for item, outcome in with_progress(render(items)):
            self._begin(item.source + 1)
            yield item, outcome
            del item, outcome  # of a long row the memory counts
        self._begin(len(self.sources))

    def _begin(self, count: int) -> None:
        """Begin the first ``count`` sources, also those without a row."""
        while len(self._begun) < count:
            self._begun.append(self.sources[len(self._begun)])
            self.fit.begin(self._begun[-1])

    def find_unread(self, path: str, row: Row, read: Sequence[str]) -> None:
        """Record columns that hold something and are not read; built-in sets are exempt."""
        if path not in BUILT_IN:
            self.log.of(path).unread_columns |= dict.fromkeys(
                name for name, value in row.columns.items() if name not in read and value not in (None, "", [])
            )

    def finish(self) -> None:
        """Raise if rows are bad or none is left; notify the user of rows left out or changed."""
        self.bad.check()
        if not self.fit.rows:
            self.bad.nothing_left()
        self.log.finish()
        self.fit.counts["special_rows"] = sum(counts.special_rows for counts in self.log.by_path.values())
        self.fit.bad_rows = self.bad.to_json()
        self.fit.check(self.bad.notify)


# ------------------------------------------------------------------------------------------------------------- examples

PreparedData = Prepared[Example, DataReport]
"""Examples, split into a training and a held-out part, with their packs if rows are packed."""


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedData:
    """Read every source and make examples of its rows.

    Raises:
        DataError: A file is missing, a row is malformed, too long or has nothing to train on, or nothing is left.
        ArgumentError: ``overlength``, ``train_on`` or another choice is unknown.
    """
    policy, max_length = options.row_policy(), options.max_length
    kind = RowKind(
        Example,
        settings={"policy": vars(policy), "train_on": options.train_on, "chat": vars(options.chat)},
        make_fit=lambda writer: RowFit(writer, policy),
        make_renderer=partial(TurnRenderer, tokenizer, chat=options.chat, policy=policy)
        if options.per_turn
        else partial(RowRenderer, tokenizer, train_on=options.train_on, chat=options.chat, policy=policy),
        read=partial(read_contents, tokenizer),
        add=_add_rows,
    )
    prepared = prepare_kind(kind, sources, tokenizer, options, notify)
    if options.per_turn:
        packed = _with_packs(prepared, sources, max_length, partial(pack_turns, max_length=max_length))
        notify(_describe_turn_packs(packed, max_length))
        return packed
    if not options.packing:
        return prepared

    def pack(examples: Stored[Example], bounds: Sequence[int]) -> tuple[Packs, list[int]]:
        return pack_parts(examples.lengths(), bounds, max_length, seed=options.seed)

    return _with_packs(prepared, sources, max_length, pack)


def _add_rows(fit: RowFit, rendered: Rendered | list[Rendered] | None, origin: str) -> None:
    """Fit a rendered row: None has an empty answer, a list holds the turns of a conversation."""
    if rendered is None:
        fit.skip_empty()
    elif isinstance(rendered, list):
        fit.add_turns(rendered, origin)
    else:
        fit.add(rendered, origin)


def _describe_turn_packs(prepared: PreparedData, max_length: int) -> str:
    """Return a note of the tokens that turns share, and of conversations that one sequence does not hold."""
    packs, rows = prepared.packs, int(prepared.train.lengths().sum())
    assert packs is not None
    origins = [prepared.train[int(packs.rows[start])].origin for start in packs.starts[:-1]]
    further = sum(one == other for one, other in pairwise(origins))
    note = (
        f"reasoning: per_turn: {len(prepared.train):,} turns in {len(packs):,} sequences; with common beginnings once "
        f"{packs.tokens:,} tokens are computed, {packs.tokens / max(rows, 1):.0%} of the {rows:,} of the turns apart"
    )
    if further:
        note += f"; {further:,} sequences continue a conversation that does not fit max_length {max_length:,}"
    return note


Pack = Callable[[Stored[Example], Sequence[int]], tuple[Packs, list[int]]]
"""Packs the rows of each part by themselves; returns the packs, and the first of each part."""


def _with_packs(prepared: PreparedData, sources: Sequence[Source], max_length: int, pack: Pack) -> PreparedData:
    """Return the data with its packs. They are part of the fingerprint: a run resumes only with the same packs.

    Rows of an eval set share no pack with another set's, and with weights rows of a source none with another's.
    """
    lengths, mixture, report = prepared.train.lengths(), prepared.mixture, prepared.report
    bounds = (0, len(lengths)) if mixture is None else prepared.bounds
    packs, firsts = pack(prepared.train, bounds)
    set_starts = set_bounds(prepared.eval_sets, len(prepared.validation))
    held_out, _ = pack(prepared.validation, set_starts)
    if mixture is not None:
        trained = [source for source in sources if source.evaluates is None]
        tokens = np.add.reduceat(lengths[packs.rows], packs.starts[:-1]) if packs.sizes is None else packs.sizes
        mixture = make_mixture(trained, firsts, np.diff(packs.starts), tokens)
        report = replace(report, sources=share_epoch(report.sources, bounds, lengths, mixture))
    digest = hashlib.sha256(prepared.fingerprint.encode())
    for part in (packs, held_out):
        digest.update(part.rows.tobytes() + part.starts.tobytes())
    return replace(
        prepared,
        report=replace(
            report,
            packs=len(packs),
            pack_fill=round(packs.fill_rate(max_length), 4),
            shared_tokens=0 if packs.sizes is None else packs.tokens,
        ),
        fingerprint=digest.hexdigest(),
        packs=packs,
        validation_packs=held_out,
        mixture=mixture,
    )


def read_contents(tokenizer: PreTrainedTokenizerBase, reading: Reading, source: Source) -> Iterator[Item[Content]]:
    for row, row_type in typed_rows([source], ROW_TYPES, detect_type, reading.bad):
        found: list[Content] = []
        with reading.bad:
            found, weight = [normalise(row, row_type)], weight_of(row)
            reading.find_unread(source.path, row, columns_read(row_type, found[0]))
        if found:
            row.columns.clear()  # a long text is held by its reader alone
            if isinstance(found[0], Conversation):
                require_template(tokenizer, "row", row.origin)  # no fault of the row: it is not reported as one
            size = size_of(found[0])
            yield Item(source.path, row.origin, size, found.pop(), weight)


# ---------------------------------------------------------------------------------------------------- trees and prompts

PreparedTrees = Prepared[Tree, CompletionReport]
"""Trees, split into a training and a held-out part; no prompt is in both."""


def prepare_preferences(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedTrees:
    """Read every source and make a tree of each pair, with the completions ``[chosen, rejected]``.

    Sources are of type ``preference``.

    Raises:
        DataError: A file is missing, a row is malformed, identical, too long or empty, or nothing is left.
        ArgumentError: ``overlength`` or ``identical_pairs`` is unknown, or the lengths leave no room.
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
    """Read every source and make a tree of each row, its completions labelled desirable or not.

    A row of type ``unpaired`` has one completion. A pair becomes two in one tree, with a common prompt: ``chosen`` is
    desirable, ``rejected`` is not.

    Raises:
        DataError: As :func:`prepare_preferences`, or all labels are the same.
        ArgumentError: As :func:`prepare_preferences`.
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
            fix="add rows with the other label",
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
        add=_add_tree,
    )


def _add_tree(fit: TreeFit, tree: tuple[Tree, bytes] | None, origin: str) -> None:
    """Fit a rendered tree with the hash of its prompt; None is a pair with identical answers."""
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
    for row, row_type in typed_rows([source], PREFERENCE_TYPES, detect_preference_type, reading.bad):
        if row_type not in wanted:
            raise DataError(
                f"the rows are of type '{row_type}', and pairs of 'chosen' and 'rejected' are compared here",
                where=row.origin,
                fix="set loss_type: kto, which judges answers one by one",
            )
        answers = None
        with reading.bad:
            answers = change(normalise_preference(row, row_type))
            reading.find_unread(source.path, row, preference_columns_read(row_type, answers))
        if answers is not None:
            if not isinstance(answers.prompt, str) and not answers.identical:
                require_template(tokenizer, "row", row.origin)
            yield Item(source.path, row.origin, sum(map(len, answers.texts())), answers)


_REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function, which a column's name cannot be."""


PreparedPrompts = Prepared[Prompt, CompletionReport]
"""Prompts, split into a training and a held-out part; none is in both."""


def prepare_prompts(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedPrompts:
    """Read every source and render its prompts.

    Sources are of one of :data:`PROMPT_TYPES`; ``max_prompt_length`` is the limit.

    Raises:
        DataError: A file is missing, a row is malformed or too long, or nothing is left.
        ArgumentError: ``overlength`` is unknown.
    """
    overlength, side, most = options.overlength, options.truncate_side, options.max_prompt_length
    assert most is not None, "prompts have a limit of their own"
    split = "a prompt cannot be split; use " if overlength == "split" else "use "
    check_choice("overlength", overlength, COMPLETION_OVERLENGTH, fix=split + ", ".join(COMPLETION_OVERLENGTH))
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
    for row, row_type in typed_rows([source], PROMPT_TYPES, detect_prompt_type, reading.bad):
        taken = next((name for name in _REWARD_ARGUMENTS if name in row.columns), None)
        if taken is not None:
            raise DataError(
                f"a column cannot be called '{taken}': reward functions take an argument of that name",
                where=row.origin,
                fix="rename the column",
            )
        prompt = None
        with reading.bad:
            prompt = prompt_of(row, row_type)
        if prompt is not None:
            if not isinstance(prompt, str):
                require_template(tokenizer, "prompt", row.origin)
            size = len(prompt) if isinstance(prompt, str) else sum(map(len, texts_of(prompt)))
            yield Item(source.path, row.origin, size, (row, prompt))
