"""Micro-batches of streamed rows, which are read and tokenized during training (``streaming: true``).

Every rank reads and tokenizes all rows of a step and trains on its part of them, so ranks do not exchange rows. The
order of the rows does not depend on the number of ranks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamtune import data, train
from streamtune.errors import CheckpointError, DataError, StreamTuneError
from streamtune.recipe.settings import BatchSettings
from streamtune.tasks.steps import RowCost, count_micro_batches
from streamtune.train.staging import replace_file

SAMPLE_ROWS = 1000
"""Maximum number of rows that commands other than training read from each streamed dataset."""


@dataclass(frozen=True)
class StreamReport:
    """Report on streamed rows before they are read: files, shuffle buffer, length limit and held-out rows."""

    paths: Sequence[str]
    """paths of the datasets to train on"""
    buffer: int
    """size of the shuffle buffer in rows; 1 keeps the order"""
    max_length: int
    held_out: data.DataReport | None

    @property
    def length_percentiles(self) -> dict[str, int]:
        """Only ``{"max": max_length}``, because the lengths of streamed rows are unknown before they are read."""
        return {"max": self.max_length}

    def describe(self) -> str:
        order = f"shuffled in a buffer of {self.buffer:,} rows" if self.buffer > 1 else "in their order"
        held_out = "" if self.held_out is None else f"; {self.held_out.validation_examples:,} held out"
        return f"streamed from {', '.join(self.paths)}, {order}{held_out}"

    def to_json(self) -> dict[str, Any]:
        held_out = None if self.held_out is None else self.held_out.to_json()
        return {"streamed": list(self.paths), "shuffle_buffer": self.buffer, "held_out": held_out}


@dataclass(frozen=True)
class StreamedRows:
    """The rows of a run with ``streaming: true``: a stream of training rows, and held-out rows tokenized in advance."""

    stream: data.RowStream
    held_out: data.PreparedData | None
    report: StreamReport
    fingerprint: str
    """hash of the contents of the dataset files, and of the held-out rows"""

    @property
    def bad_rows(self) -> Sequence[Any]:
        """Faulty rows of the held-out sets. Faulty rows of the stream are recorded when they are read."""
        return () if self.held_out is None else self.held_out.bad_rows

    @property
    def training(self) -> Sequence[data.Example]:
        """Empty, because training rows are read from :attr:`stream` during training."""
        return ()

    def first_examples(self, count: int) -> list[data.Example]:
        """Return the first ``count`` examples in the order of the sources, or all if there are fewer."""
        options = replace(self.stream.options, shuffle_buffer=1, processes=1)
        stream = data.RowStream(self.stream.sources, self.stream.tokenizer, options)
        examples_read: list[data.Example] = []
        with closing(stream.examples(data.StreamPosition())) as examples:
            for example, _ in examples:
                if example is None or len(examples_read) == count:
                    break
                examples_read.append(example)
        return examples_read

    @property
    def validation(self) -> Sequence[data.Example]:
        return () if self.held_out is None else self.held_out.validation

    @property
    def has_images(self) -> bool:
        return self.held_out is not None and self.held_out.has_images

    @property
    def eval_sets(self) -> Sequence[data.EvalSet]:
        return () if self.held_out is None else self.held_out.eval_sets


class StreamSteps:
    """Makes the micro-batches of each optimizer step from a stream of rows.

    A step never contains rows of two epochs. During a step, a background thread prepares the next
    ``dataloader_num_workers`` steps. A checkpoint has the position after the last step that was returned, not after the
    last step that was prepared.

    Args:
        collate: Function that makes a micro-batch of tokenized rows.
        cost: Function that predicts the cost of a row, so that ranks get rows of similar total cost.

    Attributes:
        report_messages: Function called in the training thread with messages of the stream and errors of skipped rows.
    """

    def __init__(
        self,
        stream: data.RowStream,
        collate: Callable[[Sequence[data.Example]], train.MicroBatch],
        recipe: BatchSettings,
        world: train.World = train.WORLD,
        cost: RowCost = RowCost(),  # noqa: B008 (frozen)
    ) -> None:
        self.stream, self.collate, self.world, self.cost = stream, collate, world, cost
        self.batch_size = recipe.per_device_train_batch_size
        self.budget = recipe.tokens_per_batch
        self.step_size = self.batch_size * count_micro_batches(recipe, world) * world.data_size
        self.num_prefetched = recipe.dataloader_num_workers
        self.report_messages: Callable[[Sequence[str], Sequence[DataError]], None] = lambda messages, errors: None
        self._messages: deque[str] = deque()
        self._errors: deque[DataError] = deque()
        stream.notify, stream.left_out = self._messages.append, self._errors.append
        self.steps_taken = 0
        self._pool = ThreadPoolExecutor(1, "batches") if self.num_prefetched else None
        self._prefetched: list[Future[tuple[list[train.MicroBatch], data.StreamPosition]]] = []
        self._start_at(data.StreamPosition())

    def _start_at(self, position: data.StreamPosition) -> None:
        self._position = self._drawn_position = position
        """stream positions after the last returned step, and after the last step that was read"""
        self._examples: Generator[tuple[data.Example | None, data.StreamPosition]] = self.stream.examples(position)
        self._leftover: tuple[data.Example, data.StreamPosition] | None = None
        """a row that did not fit into the last step that was read, and the stream position after the row"""
        self._has_started = False

    def next_step(self) -> list[train.MicroBatch]:
        """Return this rank's micro-batches of the next step.

        Raises:
            DataError: A row is faulty, or a dataset file was replaced during training.
        """
        if self._pool is None or not self._has_started:  # processes are started by this thread, which handles signals
            self._has_started = True
            step, self._position = self._make_step()
        else:
            while len(self._prefetched) <= self.num_prefetched:
                self._prefetched.append(self._pool.submit(self._make_step))
            step, self._position = self._prefetched.pop(0).result()
        self.steps_taken += 1
        if self._messages or self._errors:
            messages = [self._messages.popleft() for _ in range(len(self._messages))]
            errors = [self._errors.popleft() for _ in range(len(self._errors))]
            self.report_messages(messages, errors)
        return step

    def _make_step(self) -> tuple[list[train.MicroBatch], data.StreamPosition]:
        rows = self._draw_rows()
        self.stream.check_files()
        shares = data.assign_to_ranks(
            range(len(rows)),
            lambda row: self._cost_of(rows[row]),
            ranks=self.world.data_size,
            batch_size=self.batch_size,
        )
        mine = shares[self.world.data_rank]
        # A rank without rows computes the step's shortest row as a filler: it would wait for the other ranks anyway.
        shortest = min(rows, key=self._cost_of)
        batches = [
            self.collate([rows[row] for row in batch]) if batch else replace(self.collate([shortest]), filler=True)
            for batch in mine
        ]
        return batches, self._drawn_position

    def _draw_rows(self) -> list[data.Example]:
        rows: list[data.Example] = []
        tokens = 0
        while self.budget is not None or len(rows) < self.step_size:
            example, position = self._leftover or next(self._examples)
            self._leftover = None
            if example is None:
                self._drawn_position = position
                if rows:
                    break
                continue
            tokens += example.num_tokens
            if self.budget is not None and rows and tokens > self.budget:
                self._leftover = (example, position)
                break
            rows.append(example)
            self._drawn_position = position
        return rows

    def _cost_of(self, example: data.Example) -> float:
        return self.cost(example.num_tokens, example.num_tokens**2)

    def state_dict(self) -> dict[str, Any]:
        return {**self._order_settings(), **self._position.to_json()}

    def _order_settings(self) -> dict[str, Any]:
        return {"seed": self.stream.options.seed, "shuffle_buffer": self.stream.options.shuffle_buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position from :meth:`state_dict`.

        Raises:
            CheckpointError: The seed or the size of the shuffle buffer differs, or the position is invalid.
        """
        for key, mine in self._order_settings().items():
            if state.get(key) != mine:
                raise CheckpointError(
                    f"the checkpoint streams the data with {key} = {state.get(key)}, this run with {mine}",
                    fix="resume with the settings of the checkpoint",
                )
        self._cancel_prefetch()
        fields = data.StreamPosition().to_json()
        position = {name: state.get(name, []) if name == "bad_places" else state[name] for name in fields}
        whole = (count for name, count in position.items() if name not in ("counts", "bad_places"))
        if any(type(count) is not int or count < 0 for count in whole):
            raise CheckpointError(
                f"the checkpoint has an invalid position: row {position['rows']} of epoch {position['epoch']}",
                fix="use another checkpoint: --resume PATH",
            )
        self._start_at(data.StreamPosition(**position))

    def _cancel_prefetch(self) -> None:
        for future in self._prefetched:
            if not future.cancel():
                with suppress(StreamTuneError):
                    future.result()
        self._prefetched.clear()
        self._examples.close()

    def close(self) -> None:
        """Stop the thread that prepares steps, and the processes that tokenize rows."""
        self._cancel_prefetch()
        if self._pool is not None:
            self._pool.shutdown()


def record_bad_rows(path: Path, errors: Sequence[DataError]) -> None:
    """Add faulty rows that were left out to the JSON file ``path``. Rows that the file already has are not repeated."""
    rows: dict[str, dict[str, str]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        rows = {each["row"]: each for each in json.loads(path.read_text("utf-8"))["bad_rows"]}
    rows |= {error.where: {"row": error.where, "what": error.what, "mend": error.fix} for error in errors}
    replace_file(path, f"{json.dumps({'bad_rows': list(rows.values())}, indent=1)}\n".encode(), durably=False)
