"""Prepare training records from sources: read, normalise, render, fit to the maximum length, hold out, pack.

    prepare               examples: sequences to train on
    prepare_preferences   trees: prompts with two completions to compare
    prepare_unpaired      trees: prompts with labelled completions
    prepare_prompts       prompts for which the model writes the completions

Each function reads and checks all rows before it returns. :class:`streamtune.data.row_stream.RowStream` reads rows
during training instead.

Rows with the same prompt are held out together by all of these functions but ``prepare``, so that no prompt that
``val_size`` holds out is trained on. ``prepare`` holds out together only rows with the same tokens and labels, and the
turns of a conversation.

Reward functions get the other columns of a prompt's row, each as a list under its name. The column ``messages`` still
has the last answer. ``tools`` also goes to the chat template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from streamtune.data.bad_rows import ON_BAD_ROW, BadRows
from streamtune.data.batches.collate import pack_turns
from streamtune.data.batches.sampler import Packs, pack_sections
from streamtune.data.data_report import CompletionReport, DataReport
from streamtune.data.fit import CompletionsFitter, LengthFitter, LengthPolicy, Prepared, PromptFitter, RowFitter
from streamtune.data.fit.held_out import add_epoch_counts, eval_set_bounds, make_mixture
from streamtune.data.options import COMPLETION_OVERLENGTH, IDENTICAL_PAIRS, PROMPT_SIDES, DataOptions, check_choice
from streamtune.data.preferences import (
    PREFERENCE_TYPES,
    Answers,
    detect_preference_type,
    normalise_preference,
    preference_columns,
)
from streamtune.data.reading.cells import message_texts
from streamtune.data.reading.image_cells import image_column, mark_images
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import BUILT_IN, Source, typed_rows, with_progress
from streamtune.data.record_table import Example, Prompt, Record, Stored, TableWriter, Tree, find_labels
from streamtune.data.rendering.chat_variants import require_template
from streamtune.data.rendering.counts import RenderLog
from streamtune.data.rendering.pool import Item, Notify, RenderedItems, Renderer, open_renderer
from streamtune.data.rendering.render import PromptRenderer, RowRenderer, TreeRenderer, TurnRenderer
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.row_cache import RowInputs, load_or_prepare_rows
from streamtune.data.row_types import (
    PROMPT_TYPES,
    ROW_TYPES,
    Content,
    Conversation,
    PromptRow,
    count_characters,
    detect_prompt_type,
    detect_type,
    normalise_row,
    read_loss_weight,
    read_prompt,
    row_columns,
)
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")
FitterT = TypeVar("FitterT", bound=LengthFitter[Any, Any])
Read = Callable[["Reading", Source], Iterator[Item[ItemT]]]
"""Function that yields the rows of a source in normal form, and reports bad rows to ``Reading.bad``."""


@dataclass(frozen=True)
class RowKind(Generic[FitterT]):
    """Functions that read, render and truncate rows of one kind: examples, prompts with answers (:class:`Tree`), or
    prompts.
    """

    record: type[Record]
    _: KW_ONLY
    settings: Mapping[str, Any]
    """options that determine the records; sources, tokenizer and the handling of bad rows are not included"""
    make_fitter: Callable[[TableWriter], FitterT]
    """function of a :class:`TableWriter` that returns the object which truncates, writes and counts rows"""
    make_renderer: Callable[..., Renderer]
    """function with the argument ``notify`` that returns a renderer"""
    read: Read[Any]
    """function that yields the rows of a source"""
    add: Callable[[FitterT, Any, str], None]
    """function that adds a rendered row to the object from ``make_fitter``; the third argument is its file and line"""


def prepare_rows_of_kind(
    kind: RowKind[FitterT],
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify,
) -> Prepared[Any, Any]:
    """Read, render and truncate the rows of all sources, or load them from the cache; hold some out for evaluation.

    Raises:
        DataError: A file is missing, rows are bad or too long, or no row is left.
        ArgumentError: ``on_bad_row`` has an unknown value.
    """
    check_choice("on_bad_row", options.on_bad_row, ON_BAD_ROW)

    def fill_fitter(fitter: FitterT, note: Notify) -> None:
        bad = BadRows(options.on_bad_row, options.max_bad_rows, note)
        with open_renderer(kind.make_renderer, options.processes, note) as (log, render):
            reading = Reading(sources, fitter, log, bad)
            for item, outcome in reading.render_rows(render, reading.iter_items(kind.read)):
                with bad:
                    rendered = outcome.get_or_raise()
                    del outcome  # frees the memory of a long row
                    kind.add(fitter, rendered, item.origin)
                    del rendered
            reading.notify_or_raise()

    settings = {**kind.settings, "on_bad_row": options.on_bad_row, "max_bad_rows": options.max_bad_rows}
    inputs = RowInputs(kind.record, sources, tokenizer, settings)
    fitter, table = load_or_prepare_rows(inputs, kind.make_fitter, fill_fitter, options.cache, notify)
    return fitter.make_prepared(table, options.val_size, options.seed, notify)


class _ReadAhead(BadRows):
    """Holds back the errors of bad rows that are read ahead, until all rows before them are counted.

    If too many errors are held back, they are reported to ``bad`` at once.
    """

    def __init__(self, bad: BadRows) -> None:
        super().__init__(bad.on_bad_row, bad.limit, bad.notify)
        self._bad = bad

    def report(self, error: DataError) -> None:
        self.count += 1
        self.errors.append(error)
        if len(self.errors) >= MOST_WAITING:
            for waiting in self.take_errors():
                self._bad.report(waiting)

    def take_errors(self) -> list[DataError]:
        waiting, self.errors = self.errors, []
        return waiting


MOST_WAITING = 1_000
"""Maximum number of consecutive bad rows whose errors are held back."""


@dataclass(frozen=True)
class Reading:
    """Reads the rows of all sources, and passes rows and errors to the objects that count them."""

    sources: Sequence[Source]
    """sources to read, in order"""
    fitter: LengthFitter[Any, Any]
    """object that counts the rows of each source"""
    log: RenderLog
    """object that counts what the user should know about rendered rows, such as empty answers"""
    bad: BadRows
    """object that collects the errors of bad rows"""
    _started_sources: list[Source] = field(default_factory=list)

    def iter_items(self, read_source: Read[ItemT]) -> Iterator[Item[ItemT]]:
        """Yield the rows of every source in order; a bad row becomes an :class:`Item` with its error."""
        ahead = _ReadAhead(self.bad)
        reading = replace(self, bad=ahead)
        for number, source in enumerate(self.sources):
            for item in read_source(reading, source):
                for error in ahead.take_errors():
                    yield Item(source.path, error.where, 0, None, source=number, error=error)
                item.source = number
                yield item
                del item  # frees the memory of a long row
            for error in ahead.take_errors():
                yield Item(source.path, error.where, 0, None, source=number, error=error)

    def render_rows(
        self, render: Callable[[Iterable[Item[ItemT]]], RenderedItems[ItemT]], items: Iterator[Item[ItemT]]
    ) -> RenderedItems[ItemT]:
        """Yield each row with its rendering or error; count the row for its source, and show progress."""
        for item, outcome in with_progress(render(items)):
            self._start_to_count_sources(item.source + 1)
            yield item, outcome
            del item, outcome  # frees the memory of a long row
        self._start_to_count_sources(len(self.sources))

    def _start_to_count_sources(self, count: int) -> None:
        while len(self._started_sources) < count:
            self._started_sources.append(self.sources[len(self._started_sources)])
            self.fitter.start_source(self._started_sources[-1])

    def record_unread_columns(self, path: str, row: Row, read_columns: Sequence[str]) -> None:
        """Record the non-empty columns of a row that are not read, to tell the user; built-in datasets are excluded."""
        if path not in BUILT_IN:
            self.log.counts_of(path).unread_columns |= dict.fromkeys(
                name for name, value in row.columns.items() if name not in read_columns and value not in (None, "", [])
            )

    def notify_or_raise(self) -> None:
        """Notify the user of skipped, dropped and changed rows.

        Raises:
            DataError: Rows are bad or too long, or no row is left.
        """
        self.bad.raise_or_notify()
        if not self.fitter.rows:
            self.bad.raise_if_all_bad()
        self.log.notify_or_raise()
        self.fitter.counts["special_rows"] = sum(counts.special_rows for counts in self.log.by_path.values())
        self.fitter.bad_rows = self.bad.to_json()
        self.fitter.raise_or_notify(self.bad.notify)


# ------------------------------------------------------------------------------------------------------------- examples

PreparedData = Prepared[Example, DataReport]
"""Examples, split into a training part and a held-out part, with packed sequences if rows are packed."""


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedData:
    """Read all sources and return their rows as examples.

    Raises:
        DataError: A file is missing, a row is malformed, too long or without a token to train on, or no row is left.
        ArgumentError: ``overlength``, ``train_on`` or another option has an unknown value.

    Example:
        >>> from streamtune.data import DataOptions, Source
        >>> options = DataOptions(max_length=128, overlength="split", train_on="all")
        >>> prepared = prepare([Source("python-stdlib", max_rows=3)], tokenizer, options)
        >>> max(prepared.training.lengths()).item() <= 128
        True
    """
    policy, max_length = options.row_policy(), options.max_length
    kind = RowKind(
        Example,
        settings={
            "policy": vars(policy),
            "train_on": options.train_on,
            "chat": vars(options.chat),
            **_image_settings(options),
        },
        make_fitter=lambda writer: RowFitter(writer, policy),
        make_renderer=partial(TurnRenderer, tokenizer, chat=options.chat, policy=policy, images=options.images)
        if options.one_example_per_turn
        else partial(
            RowRenderer,
            tokenizer,
            train_on=options.train_on,
            chat=options.chat,
            policy=policy,
            images=options.images,
        ),
        read=partial(read_training_rows, tokenizer),
        add=_add_rendered_row,
    )
    prepared = prepare_rows_of_kind(kind, sources, tokenizer, options, notify)
    if options.one_example_per_turn:
        packed = _add_packs(prepared, sources, max_length, partial(pack_turns, max_length=max_length))
        notify(_describe_turn_packs(packed, max_length))
        return packed
    if not options.packing:
        return prepared

    def pack_examples(examples: Stored[Example], bounds: Sequence[int]) -> tuple[Packs, list[int]]:
        return pack_sections(examples.lengths(), bounds, max_length, seed=options.seed)

    return _add_packs(prepared, sources, max_length, pack_examples)


def _image_settings(options: DataOptions) -> dict[str, Any]:
    identity = None if options.images is None else options.images.identity()
    return {} if identity is None else {"images": identity}


def _add_rendered_row(fitter: RowFitter, rendered: Rendered | list[Rendered] | None, origin: str) -> None:
    """Add a rendered row. None is a row with an empty answer; a list has one example per turn of a conversation."""
    if rendered is None:
        fitter.count_empty_row()
    elif isinstance(rendered, list):
        fitter.add_turns(rendered, origin)
    else:
        fitter.add(rendered, origin)


def _describe_turn_packs(prepared: PreparedData, max_length: int) -> str:
    packs, rows = prepared.packs, int(prepared.training.lengths().sum())
    assert packs is not None
    origins = [prepared.training[int(packs.rows[start])].origin for start in packs.starts[:-1]]
    continued_sequences = sum(one == other for one, other in pairwise(origins))
    note = (
        f"reasoning: per_turn: {len(prepared.training):,} turns in {len(packs):,} sequences; turns share beginnings, "
        f"so {packs.tokens:,} tokens are computed instead of {rows:,} ({packs.tokens / max(rows, 1):.0%})"
    )
    if continued_sequences:
        note += f"; {continued_sequences:,} sequences continue a conversation that exceeds max_length {max_length:,}"
    return note


Pack = Callable[[Stored[Example], Sequence[int]], tuple[Packs, list[int]]]
"""Function that packs the rows of each section separately; returns the packs and the index of each section's first
pack."""


def _add_packs(prepared: PreparedData, sources: Sequence[Source], max_length: int, pack: Pack) -> PreparedData:
    """Return the prepared data with packed sequences, which the fingerprint then covers.

    A pack has rows of only one eval set. With weights it has rows of only one source.
    """
    lengths, mixture, report = prepared.training.lengths(), prepared.mixture, prepared.report
    bounds = (0, len(lengths)) if mixture is None else prepared.bounds
    packs, firsts = pack(prepared.training, bounds)
    set_starts = eval_set_bounds(prepared.eval_sets, len(prepared.validation))
    held_out, _ = pack(prepared.validation, set_starts)
    if mixture is not None:
        trained = [source for source in sources if source.evaluates is None]
        tokens = np.add.reduceat(lengths[packs.rows], packs.starts[:-1]) if packs.sizes is None else packs.sizes
        mixture = make_mixture(trained, firsts, np.diff(packs.starts), tokens)
        report = replace(report, sources=add_epoch_counts(report.sources, bounds, lengths, mixture))
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


def read_training_rows(tokenizer: PreTrainedTokenizerBase, reading: Reading, source: Source) -> Iterator[Item[Content]]:
    """Yield the training rows of a source as conversations, pairs of prompt and completion, or documents.

    Args:
        tokenizer: Tokenizer that must have a chat template if a row is a conversation.
        reading: Object that counts bad rows and records unread columns.

    Raises:
        DataError: A file is missing, or the tokenizer has no chat template.
    """
    for row, row_type in typed_rows([source], ROW_TYPES, detect_type, reading.bad):
        contents: list[Content] = []
        with reading.bad:
            contents, weight = [normalise_row(row, row_type)], read_loss_weight(row)
            reading.record_unread_columns(source.path, row, row_columns(row_type, contents[0]))
        if contents:
            row.columns.clear()  # keep no reference to a long text
            if isinstance(contents[0], Conversation):
                require_template(tokenizer, "row", row.origin)  # raised at once, because the row itself is not bad
            size = count_characters(contents[0])
            yield Item(source.path, row.origin, size, contents.pop(), weight)


# ---------------------------------------------------------------------------------------------------- trees and prompts

PreparedCompletions = Prepared[Tree, CompletionReport]
"""Prompts with their completions, split into a training part and a held-out part."""


def prepare_preferences(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedCompletions:
    """Read all sources and return each pair as a prompt with the completions ``[chosen, rejected]`` (:class:`Tree`).

    Args:
        sources: Sources of type ``preference``, in order.

    Raises:
        DataError: A file is missing, a row is malformed, too long or empty, both answers are identical, or no row is
            left.
        ArgumentError: ``overlength`` or ``identical_pairs`` has an unknown value, or ``max_prompt_length`` leaves no
            room for a completion.
    """
    read = partial(_read_answers, tokenizer, ("preference",), lambda answers: answers)
    kind = _make_tree_kind(tokenizer, options, ("chosen", "rejected"), read)
    return prepare_rows_of_kind(kind, sources, tokenizer, options, notify)


def prepare_unpaired(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedCompletions:
    """Read all sources and return each row as a prompt with completions labelled desirable or not (:class:`Tree`).

    A row of type ``unpaired`` has one completion. A pair has two: ``chosen`` is desirable, ``rejected`` is not.

    Args:
        sources: Sources of type ``unpaired`` or ``preference``, in order.

    Raises:
        DataError: A file is missing, a row is malformed, too long or empty, both answers are identical, no row is left,
            or all labels of the rows to train on are the same.
        ArgumentError: ``overlength`` or ``identical_pairs`` has an unknown value, or ``max_prompt_length`` leaves no
            room for a completion.
    """

    def add_labels(answers: Answers) -> Answers:
        return answers if answers.labels else replace(answers, labels=(True, False))

    read = partial(_read_answers, tokenizer, PREFERENCE_TYPES, add_labels)
    kind = _make_tree_kind(tokenizer, options, ("desirable", "undesirable"), read)
    prepared = prepare_rows_of_kind(kind, sources, tokenizer, options, notify)
    _check_both_labels(prepared, sources[0].place)
    return prepared


def _check_both_labels(prepared: PreparedCompletions, where: str) -> None:
    labels = find_labels(prepared.training)
    if len(labels) == 2:
        return
    name, other = ("desirable", "undesirable") if True in labels else ("undesirable", "desirable")
    if other not in prepared.report.completion_lengths:
        raise DataError(
            f"completions must have both labels, found only {name}",
            where=where,
            fix="add rows with the other value in 'label'",
        )
    raise DataError(
        f"completions to train on must have both labels, found only {name}; all {other} ones were dropped or held out",
        where=where,
        fix="raise max_length or set overlength: truncate, lower val_size, or add rows with the other value in 'label'",
    )


def _make_tree_kind(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, kinds: tuple[str, str], read: Read[Answers]
) -> RowKind[CompletionsFitter]:
    policy = LengthPolicy(options.max_length, options.max_prompt_length, options.overlength)
    check_choice("identical_pairs", options.identical_pairs, IDENTICAL_PAIRS)
    return RowKind(
        Tree,
        settings={
            "policy": vars(policy),
            "identical_pairs": options.identical_pairs,
            "kinds": kinds,
            "chat": vars(options.chat),
            **_image_settings(options),
        },
        make_fitter=lambda writer: CompletionsFitter(writer, policy, options.identical_pairs, kinds),
        make_renderer=partial(TreeRenderer, tokenizer, chat=options.chat, images=options.images),
        read=read,
        add=_add_tree,
    )


def _add_tree(fitter: CompletionsFitter, tree: tuple[Tree, bytes] | None, origin: str) -> None:
    """Add a prompt with its completions, and the hash of the prompt; None is a pair with identical answers."""
    if tree is None:
        fitter.drop_identical_pair(origin)
    else:
        fitter.add(*tree)


def _read_answers(
    tokenizer: PreTrainedTokenizerBase,
    allowed_types: Sequence[str],
    convert_answers: Callable[[Answers], Answers],
    reading: Reading,
    source: Source,
) -> Iterator[Item[Answers]]:
    for row, row_type in typed_rows([source], PREFERENCE_TYPES, detect_preference_type, reading.bad):
        if row_type not in allowed_types:
            raise DataError(
                f"this loss_type needs pairs of 'chosen' and 'rejected', found rows of type '{row_type}'",
                where=row.origin,
                fix="set loss_type: kto, which trains on single labelled answers",
            )
        answers = None
        with reading.bad:
            answers = convert_answers(normalise_preference(row, row_type))
            reading.record_unread_columns(source.path, row, preference_columns(row_type, answers))
        if answers is not None:
            if not isinstance(answers.prompt, str) and not answers.identical:
                require_template(tokenizer, "row", row.origin)
            yield Item(source.path, row.origin, sum(map(len, answers.all_texts())), answers)


_REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of reward functions; a column must not have one of these names."""


PreparedPrompts = Prepared[Prompt, CompletionReport]
"""Prompts, split into a training part and a held-out part."""


def prepare_prompts(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedPrompts:
    """Read all sources and return their prompts, of at most ``max_prompt_length`` tokens.

    Args:
        sources: Sources whose type is one of :data:`PROMPT_TYPES`, in order.

    Raises:
        DataError: A file is missing, a row is malformed or too long, or no row is left.
        ArgumentError: ``overlength`` or ``truncate_side`` has an unknown value.
    """
    overlength, side, max_prompt_length = options.overlength, options.truncate_side, options.max_prompt_length
    assert max_prompt_length is not None, "prompts need max_prompt_length"
    split = "a prompt cannot be split; use " if overlength == "split" else "use "
    check_choice("overlength", overlength, COMPLETION_OVERLENGTH, fix=split + ", ".join(COMPLETION_OVERLENGTH))
    check_choice("truncate_side", side, PROMPT_SIDES)
    kind = RowKind(
        Prompt,
        settings={
            "max_prompt_length": max_prompt_length,
            "overlength": overlength,
            "truncate_side": side,
            "chat": vars(options.chat),
            **_image_settings(options),
        },
        make_fitter=lambda writer: PromptFitter(writer, overlength, max_prompt_length, side),
        make_renderer=partial(PromptRenderer, tokenizer, chat=options.chat, images=options.images),
        read=partial(_read_prompts, tokenizer),
        add=lambda fitter, prompt, origin: fitter.add(*prompt),
    )
    return prepare_rows_of_kind(kind, sources, tokenizer, options, notify)


def _read_prompts(tokenizer: PreTrainedTokenizerBase, reading: Reading, source: Source) -> Iterator[Item[PromptRow]]:
    for row, row_type in typed_rows([source], PROMPT_TYPES, detect_prompt_type, reading.bad):
        reserved_name = next((name for name in _REWARD_ARGUMENTS if name in row.columns), None)
        if reserved_name is not None:
            raise DataError(
                f"a column must not be called '{reserved_name}': reward functions have an argument of this name",
                where=row.origin,
                fix="rename the column",
            )
        prompt = None
        with reading.bad:
            marked, images = mark_images(row)
            prompt = read_prompt(marked, row_type)
        if prompt is not None:
            if not isinstance(prompt, str):
                require_template(tokenizer, "prompt", row.origin)
            size = len(prompt) if isinstance(prompt, str) else sum(map(len, message_texts(prompt)))
            left_out = {"prompt", image_column(row) if images else None}
            columns = {name: value for name, value in marked.columns.items() if name not in left_out}
            yield Item(source.path, row.origin, size, PromptRow(prompt, columns, images))
