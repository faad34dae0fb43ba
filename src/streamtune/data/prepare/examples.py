"""Make examples of the rows: read, normalise, render, fit to the length, hold out, pack."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from streamtune.data.batches.prefixes import pack_turns
from streamtune.data.batches.sampler import Packs, pack_parts
from streamtune.data.data_report import DataReport
from streamtune.data.fit import Prepared, RowFit
from streamtune.data.fit.parts import make_mixture, set_bounds, share_epoch
from streamtune.data.prepare.row_kind import Reading, read_and_fit
from streamtune.data.reading.sources import Source, typed_rows
from streamtune.data.record_table import Example, Stored
from streamtune.data.rendering.counts import DEFAULT_CHAT, ChatOptions
from streamtune.data.rendering.policy import RowPolicy
from streamtune.data.rendering.pool import Item
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.rendering.renderings import require_template
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.rendering.turns import TurnRenderer
from streamtune.data.row_cache import RowCache
from streamtune.data.row_types import (
    ROW_TYPES,
    Content,
    Conversation,
    columns_read,
    detect_type,
    normalise,
    size_of,
    weight_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    processes: int = 1,
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
        processes: Processes that render; 1 is this one.
        cache: Where prepared rows are kept and found again; None keeps none.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, too long or has nothing to train on, or nothing is left.
        ArgumentError: ``overlength``, ``train_on`` or another choice is none of the known ones.
    """
    policy = RowPolicy(max_length, overlength, truncate_side, split_at, split_overlap)

    per_turn = chat.reasoning == "per_turn"

    def add(fit: RowFit, rendered: Rendered | list[Rendered] | None, origin: str) -> None:
        if rendered is None:
            fit.skip_empty()
        elif isinstance(rendered, list):
            fit.add_turns(rendered, origin)
        else:
            fit.add(rendered, origin)

    fit, table = read_and_fit(
        Example,
        lambda writer: RowFit(writer, policy),
        partial(TurnRenderer, tokenizer, chat=chat, policy=policy)
        if per_turn
        else partial(RowRenderer, tokenizer, train_on=train_on, chat=chat, policy=policy),
        partial(read_contents, tokenizer),
        add,
        sources=sources,
        tokenizer=tokenizer,
        settings={"policy": vars(policy), "train_on": train_on, "chat": vars(chat)},
        on_bad_row=on_bad_row,
        max_bad_rows=max_bad_rows,
        processes=processes,
        cache=cache,
        notify=notify,
    )
    prepared = fit.prepared(table, val_size, seed, notify)
    if per_turn:
        packed = _packed(prepared, sources, max_length, partial(pack_turns, max_length=max_length))
        notify(_saved(packed, max_length))
        return packed
    if not packing:
        return prepared

    def pack(examples: Stored[Example], bounds: Sequence[int]) -> tuple[Packs, list[int]]:
        return pack_parts(examples.lengths(), bounds, max_length, seed=seed)

    return _packed(prepared, sources, max_length, pack)


def _saved(prepared: PreparedData, max_length: int) -> str:
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


def _packed(prepared: PreparedData, sources: Sequence[Source], max_length: int, pack: Pack) -> PreparedData:
    """Return the data with its packs. They are part of the fingerprint: a run resumes only with the same ones.

    Rows of an eval set share no pack with those of another, and with weights rows of a source none with another's.
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
    """Yield the normal form of every row of a source."""
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
