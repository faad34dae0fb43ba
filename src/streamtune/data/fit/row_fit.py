"""Fit training rows to the maximum length: keep, truncate, split or drop each row."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.data_report import DataReport
from streamtune.data.fit.length_fit import LengthFitter, Notify, count_with_verb
from streamtune.data.image_files import ImageFile
from streamtune.data.options import SPLIT_AT, RowPolicy
from streamtune.data.record_table import Example, IntArray, TableWriter
from streamtune.data.rendering.tokens import Rendered
from streamtune.errors import DataError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TokenSpan:
    """Tokens ``start`` to ``stop`` (exclusive) of a row. The first ``context`` of these tokens have no label."""

    start: int
    stop: int
    context: int = 0


def truncate_row(trained: Mask, policy: RowPolicy, *, prefix_length: int, has_answer: bool) -> list[TokenSpan]:
    """Return the token ranges that remain of a truncated row: one range, or two (the row's beginning and its end).

    ``policy.truncate_side`` decides. The answer is the last run of tokens with a label::

        right     keeps the beginning of the row
        left      keeps the end of the row
        middle    keeps the beginning and the end, half the length each; the end gets more if the answer then fits
        auto      as ``right`` for a document; as ``left`` for other rows, if the answer and one token before it fit

    If the answer does not fit, ``auto`` keeps the beginning of the answer, and before it text of at most half the
    length. ``left`` and ``auto`` also keep the first ``prefix_length`` tokens, if these take at most half the length
    and a token with a label remains. The first token of a range has no label, because the token before it is missing.

    Args:
        trained: [T] True for tokens with a label; T exceeds ``max_length``.
        prefix_length: Number of tokens of a prefix to keep, such as a system message.
        has_answer: Whether the tokens with a label are answers to a prompt.
    """
    size, max_length, side = len(trained), policy.max_length, policy.truncate_side
    if side == "right" or (side == "auto" and not has_answer):
        return [TokenSpan(0, max_length, 1)]
    answer, _ = last_trained_run(trained)
    needed = size - answer + 1
    if side == "auto" and needed > max_length:
        start = answer - min(answer, max_length // 2)
        return _prepend_prefix(
            trained, prefix_length if start > 0 else 0, TokenSpan(start, start + max_length, 1), max_length
        )
    if side == "middle":
        end = max(max_length - max_length // 2, needed if has_answer and needed <= max_length - prefix_length else 0)
        first = max_length - end
        return [TokenSpan(0, first, 1), TokenSpan(size - end, size, 1)] if first else [TokenSpan(size - end, size, 1)]
    return _prepend_prefix(trained, prefix_length, TokenSpan(size - max_length, size, 1), max_length)


def _prepend_prefix(trained: Mask, prefix_length: int, span: TokenSpan, max_length: int) -> list[TokenSpan]:
    shorter = TokenSpan(span.start + prefix_length, span.stop, 1)
    if not prefix_length or prefix_length > max_length // 2 or not trained[shorter.start + 1 : shorter.stop].any():
        return [span]
    return [TokenSpan(0, prefix_length, 1), shorter]


def last_trained_run(trained: Mask) -> tuple[int, int]:
    """Return start and stop of the last run of True in a mask [T]; ``(T, T)`` if there is none."""
    places = np.flatnonzero(trained)
    if not len(places):
        return len(trained), len(trained)
    stop = int(places[-1]) + 1
    before = np.flatnonzero(~trained[:stop])
    return (int(before[-1]) + 1 if len(before) else 0), stop


def largest_untrained_length(trained: Mask, policy: RowPolicy, *, has_answer: bool) -> int:
    """Return the largest ``max_length`` at which truncation leaves no token with a label, so the row is dropped."""
    size, side = len(trained), policy.truncate_side
    if side == "auto" and has_answer:
        return 1
    first = int(trained.argmax()) if trained.any() else size
    if side in ("auto", "right"):
        return first
    start, stop = last_trained_run(trained)
    if side == "left":
        return size - stop + 1
    halves = min(2 * first + 1, 2 * (size - stop) + 2)
    return min(size - start, halves) if has_answer else halves


def split_row(trained: Mask, policy: RowPolicy, breaks: npt.NDArray[np.uint8] | None) -> list[TokenSpan]:
    """Return the consecutive parts into which a long row is split; a part may begin with tokens of the part before it.

    A part ends at its last border of the strongest possible kind. Borders, from strongest to weakest::

        turn               a user or system message after an answer, if the part then has a token with a label
        paragraph, line    only in the second half of the part
        token              any token

    Args:
        trained: [T] True for tokens with a label.
        breaks: [T] border before each token, as an index of :data:`SPLIT_AT`; None splits at any token.
    """
    size, start, parts = len(trained), 0, []
    while start < size:
        context = min(policy.split_overlap, start)
        room = policy.max_length - context
        stop = size if size - start <= room else start + room
        if stop < size and breaks is not None:
            stop = _find_part_end(trained, breaks, start, stop, SPLIT_AT.index(policy.split_at))
        # The first token of a part has no context, so it is not trained.
        parts.append(TokenSpan(start - context, stop, max(context, 1)))
        start = stop
    return parts


def _find_part_end(trained: Mask, breaks: npt.NDArray[np.uint8], start: int, stop: int, strongest_border: int) -> int:
    """Return the end (exclusive) of a part that starts at ``start``: a border if possible, at most ``stop``."""
    inside = breaks[start + 1 : stop + 1]
    for kind in range(strongest_border, 0, -1):
        places = np.flatnonzero(inside >= kind)
        if not len(places):
            continue
        place = start + 1 + int(places[-1])
        if SPLIT_AT[kind] == "turn":
            if trained[start:place].any():
                return place
        elif place - start >= (stop - start) / 2:
            return place
    return stop


class RowFitter(LengthFitter[Example, DataReport]):
    """Truncates, splits or drops training rows that exceed the maximum length, writes examples, and counts them."""

    record = Example
    report_type = DataReport

    def __init__(self, writer: TableWriter, policy: RowPolicy) -> None:
        limit = f"{policy.max_length:,}"
        super().__init__(writer, policy.overlength, limit=f"max_length is {limit}", over=f"{limit} tokens")
        self.policy = policy
        self._group: bytes | None = None

    def add_turns(self, turns: Sequence[Rendered], origin: str) -> None:
        """Add the examples of a conversation, one per turn, as a group that is held out together."""
        digest = hashlib.blake2b(digest_size=16)
        for turn in turns:
            digest.update(_to_int_array(turn.input_ids).data)
        for turn in turns:
            self.add(turn, origin, digest.digest())

    def add(self, rendered: Rendered, origin: str, group_digest: bytes | None = None) -> None:
        """Write the examples of a row; truncate, split or drop the row if it is too long.

        Args:
            group_digest: Hash of the row's group; rows with the same hash are held out together. With None, rows with
                equal examples form a group.
        """
        self._group = group_digest
        row = _Row(_to_int_array(rendered.input_ids), _to_int_array(rendered.labels), rendered.weight, rendered.images)
        trained = row.labels != IGNORE_INDEX
        uncut_size = _RowSize(len(trained), int(np.count_nonzero(trained)))
        if rendered.estimated is not None:
            uncut_size = _RowSize(rendered.estimated, round(rendered.estimated * rendered.trained_share))
        size = uncut_size.tokens
        if row.images and size > self.policy.max_length and self.policy.cuts_rows:
            raise _cut_images_error(row, size, self.policy, origin)
        self.counts["estimated"] += rendered.estimated is not None
        untrained_length = largest_untrained_length(trained, self.policy, has_answer=rendered.has_answer)
        self.record_row_lengths(
            size, origin, largest_untrained_length=untrained_length, estimated=rendered.estimated is not None
        )
        if size <= self.policy.max_length:
            self._write_examples(row, [[TokenSpan(0, size, 1)]], origin, uncut_size)
            return
        self.counts["too_long"] += 1
        self.counts["long_images"] += bool(row.images)
        if self.overlength == "truncate":
            parts = truncate_row(trained, self.policy, prefix_length=rendered.prefix, has_answer=rendered.has_answer)
            self.counts["without_system"] += _cuts_system_message(rendered, parts)
            self._write_examples(
                row, [parts] if _has_trained_token(trained, parts) else [], origin, uncut_size, "truncated"
            )
        elif self.overlength == "split":
            span_lists = [[kept] for kept in split_row(trained, self.policy, rendered.breaks)]
            trained_lists = [parts for parts in span_lists if _has_trained_token(trained, parts)]
            self.counts["pieces_dropped"] += len(span_lists) - len(trained_lists) if trained_lists else 0
            self._write_examples(row, trained_lists, origin, uncut_size, "split")
        else:
            self._write_examples(row, [], origin, uncut_size)

    def _write_examples(
        self,
        row: _Row,
        span_lists: Sequence[Sequence[TokenSpan]],
        origin: str,
        uncut_size: _RowSize,
        counter_name: str = "kept whole",
    ) -> None:
        """Write an example for each list of spans, joined end to end. Without any list, count the row as dropped."""
        covered_tokens = _count_covered_tokens(span_lists)
        lost = uncut_size.tokens - covered_tokens
        self.counts["tokens_lost"] += lost
        self.counts["supervised_tokens_lost"] += uncut_size.trained
        if not span_lists:
            self.counts["dropped"] += 1
            return
        self.counts[counter_name] += 1
        self.counts["tokens_repeated"] -= covered_tokens
        row_digest = hashlib.blake2b(digest_size=16)
        for parts in span_lists:
            ids, labels = row.join_spans(parts)
            piece_digest = hashlib.blake2b(ids.data, digest_size=16)
            piece_digest.update(labels.data)
            for image in row.images:
                piece_digest.update(ImageFile.parse(image).digest.encode())
            row_digest.update(piece_digest.digest())  # the weight does not make two rows different
            if row.weight != 1:
                piece_digest.update(np.float64(row.weight).tobytes())
            digest = piece_digest.digest()
            trained = int(np.count_nonzero(labels != IGNORE_INDEX))
            self.counts["tokens"] += len(ids)
            self.counts["tokens_repeated"] += len(ids)
            self.counts["supervised_tokens"] += trained
            self.counts["supervised_tokens_lost"] -= trained
            example = Example(ids, labels, origin, row.weight, row.images)
            cut = lost if counter_name == "truncated" else 0
            self.write_record(example, digest, trained_tokens=trained, lost_tokens=cut)
        self.groups.append(self._group or row_digest.digest())

    def raise_or_notify(self, notify: Notify) -> None:
        super().raise_or_notify(notify)
        if self.counts["without_system"]:
            notify(
                f"{count_with_verb(self.counts['without_system'], 'truncated row')} lost the system message: it takes "
                "more than half of max_length, or the chat template does not print it separately at the start"
            )

    def too_long_error(self) -> DataError:
        size, origin = self.longest
        return DataError(
            f"{count_with_verb(self.counts['too_long'], 'row')} more than max_length = {self.policy.max_length:,} "
            f"tokens; the longest has {self.longest_length}",
            where=origin,
            fix=self.long_rows_fix("max_length", size, ", or set overlength to truncate, drop or split"),
        )

    def extra_report_fields(self) -> dict[str, Any]:
        return {name: self.counts[name] for name in ("split", "pieces_dropped", "tokens_repeated", "estimated")}


def _to_int_array(tokens: Sequence[int]) -> IntArray:
    return np.frombuffer(tokens, dtype=np.int32) if isinstance(tokens, array) else np.array(tokens, dtype=np.int32)


@dataclass(frozen=True)
class _RowSize:
    tokens: int
    trained: int


@dataclass(frozen=True)
class _Row:
    input_ids: IntArray
    labels: IntArray
    weight: float
    images: tuple[str, ...] = ()

    def join_spans(self, spans: Sequence[TokenSpan]) -> tuple[IntArray, IntArray]:
        ids = [self.input_ids[part.start : part.stop] for part in spans]
        labels = [self.labels[part.start : part.stop].copy() for part in spans]
        for part, each in zip(spans, labels, strict=True):
            each[: part.context] = IGNORE_INDEX
        return (ids[0], labels[0]) if len(spans) == 1 else (np.concatenate(ids), np.concatenate(labels))


def _cut_images_error(row: _Row, size: int, policy: RowPolicy, origin: str) -> DataError:
    return DataError(
        f"the row has {size:,} tokens with its {len(row.images)} images, more than max_length = "
        f"{policy.max_length:,}, and a row with images is not {'split' if policy.overlength == 'split' else 'cut'}",
        where=origin,
        fix=f"set max_length to {size} or more, max_pixels for smaller images, or overlength: drop",
    )


def _cuts_system_message(rendered: Rendered, spans: Sequence[TokenSpan]) -> bool:
    system, first = rendered.system, spans[0]
    return system is not None and not (system > 0 and first.start == 0 and system <= first.stop)


def _count_covered_tokens(span_lists: Sequence[Sequence[TokenSpan]]) -> int:
    total = stop = 0
    for part in chain.from_iterable(span_lists):
        total += part.stop - max(part.start, stop)
        stop = part.stop
    return total


def _has_trained_token(trained: npt.NDArray[np.bool_], spans: Sequence[TokenSpan]) -> bool:
    return any(trained[part.start + part.context : part.stop].any() for part in spans)
