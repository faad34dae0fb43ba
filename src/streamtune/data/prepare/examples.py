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
from streamtune.data.options import DataOptions
from streamtune.data.prepare.row_kind import Reading, RowKind, prepare_kind
from streamtune.data.reading.sources import Source, typed_rows
from streamtune.data.record_table import Example, Stored
from streamtune.data.rendering.pool import Item, Notify
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.rendering.renderings import require_template
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.rendering.turns import TurnRenderer
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
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedData:
    """Read every source and make examples of its rows.

    Args:
        sources: Where the rows come from, in order.
        tokenizer: The model's tokenizer, with its chat template.
        options: See :class:`DataOptions`.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed, too long or has nothing to train on, or nothing is left.
        ArgumentError: ``overlength``, ``train_on`` or another choice is none of the known ones.
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
        add=_add,
    )
    prepared = prepare_kind(kind, sources, tokenizer, options, notify)
    if options.per_turn:
        packed = _packed(prepared, sources, max_length, partial(pack_turns, max_length=max_length))
        notify(_saved(packed, max_length))
        return packed
    if not options.packing:
        return prepared

    def pack(examples: Stored[Example], bounds: Sequence[int]) -> tuple[Packs, list[int]]:
        return pack_parts(examples.lengths(), bounds, max_length, seed=options.seed)

    return _packed(prepared, sources, max_length, pack)


def _add(fit: RowFit, rendered: Rendered | list[Rendered] | None, origin: str) -> None:
    """Fit a rendered row: None is one with an empty answer, a list the turns of a conversation."""
    if rendered is None:
        fit.skip_empty()
    elif isinstance(rendered, list):
        fit.add_turns(rendered, origin)
    else:
        fit.add(rendered, origin)


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
