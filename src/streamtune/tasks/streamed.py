"""The micro-batches of rows that are streamed: read, rendered and fitted as training goes.

Each rank reads and renders the rows of a whole step and computes its share of them, so that ranks need not exchange
rows. A step has the same rows on any number of ranks.
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
from streamtune.tasks.steps import RowCost, accumulation
from streamtune.train.staging import replace_file

SAMPLED = 1000
"""First rows of each dataset that stand for the others where no stream is trained on: on screens, in comparisons."""


@dataclass(frozen=True)
class StreamReport:
    """Facts about streamed rows that are known before they are read."""

    paths: Sequence[str]
    """the datasets that are trained on"""
    buffer: int
    """rows that the next one is drawn from; 1 keeps the order"""
    max_length: int
    held_out: data.DataReport | None
    """the report of the rows that are held out; None without any"""

    @property
    def length_percentiles(self) -> dict[str, int]:
        """The longest row there may be: the longest there is is unknown, so this one is planned for."""
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
    """The rows of a run that streams them: a stream to train on, and held-out rows that are prepared as usual."""

    stream: data.RowStream
    held_out: data.PreparedData | None
    report: StreamReport
    fingerprint: str
    """hash of the contents of the files, and of the held-out rows"""

    @property
    def bad_rows(self) -> Sequence[Any]:
        """Faulty rows of the eval sets; faulty rows of the stream are written down as they are met."""
        return () if self.held_out is None else self.held_out.bad_rows

    @property
    def train(self) -> Sequence[data.Example]:
        """Empty: they are not known."""
        return ()

    def first(self, count: int) -> list[data.Example]:
        """Return the first examples in the order of the sources."""
        options = replace(self.stream.options, shuffle_buffer=1, processes=1)
        stream = data.RowStream(self.stream.sources, self.stream.tokenizer, options)
        found: list[data.Example] = []
        with closing(stream.examples(data.StreamPosition())) as examples:
            for example, _ in examples:
                if example is None or len(found) == count:
                    break
                found.append(example)
        return found

    @property
    def validation(self) -> Sequence[data.Example]:
        return () if self.held_out is None else self.held_out.validation

    @property
    def eval_sets(self) -> Sequence[data.EvalSet]:
        return () if self.held_out is None else self.held_out.eval_sets


class StreamSteps:
    """The examples of a stream as the micro-batches of one optimizer step after the other. None reaches over a pass.

    With ``dataloader_num_workers`` one thread prepares so many coming steps while one is trained on. The position is
    behind the last step returned, not the last step prepared.

    Args:
        cost: The predicted time of a row, by which rows are assigned to ranks.

    Attributes:
        tell: Called by the thread that trains with messages of the stream, and the errors of rows that it left out.
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
        self.step_size = self.batch_size * accumulation(recipe, world) * world.data_size
        self.ahead = recipe.dataloader_num_workers
        self.tell: Callable[[Sequence[str], Sequence[DataError]], None] = lambda messages, errors: None
        self._messages: deque[str] = deque()
        self._errors: deque[DataError] = deque()
        stream.notify, stream.left_out = self._messages.append, self._errors.append
        self.taken = 0
        """steps returned"""
        self._pool = ThreadPoolExecutor(1, "batches") if self.ahead else None
        self._coming: list[Future[tuple[list[train.MicroBatch], data.StreamPosition]]] = []
        self._begin(data.StreamPosition())

    def _begin(self, start: data.StreamPosition) -> None:
        self._position = self._behind = start
        """of the last step returned, and of the last one drawn"""
        self._examples: Generator[tuple[data.Example | None, data.StreamPosition]] = self.stream.examples(start)
        self._held: tuple[data.Example, data.StreamPosition] | None = None
        """an example that was too long for the step before"""
        self._begun = False

    def next_step(self) -> list[train.MicroBatch]:
        """Return this rank's micro-batches.

        Raises:
            DataError: A row is bad, or a file was replaced, see :meth:`streamtune.data.RowStream.examples`.
        """
        if self._pool is None or not self._begun:  # processes are started by this thread, which handles signals
            self._begun = True
            step, self._position = self._make()
        else:
            while len(self._coming) <= self.ahead:
                self._coming.append(self._pool.submit(self._make))
            step, self._position = self._coming.pop(0).result()
        self.taken += 1
        if self._messages or self._errors:
            messages = [self._messages.popleft() for _ in range(len(self._messages))]
            errors = [self._errors.popleft() for _ in range(len(self._errors))]
            self.tell(messages, errors)
        return step

    def _make(self) -> tuple[list[train.MicroBatch], data.StreamPosition]:
        """Return this rank's micro-batches of the next step, and the position behind it."""
        rows = self._take()
        self.stream.check_files()
        shares = data.assign_rows(
            range(len(rows)),
            lambda row: self._cost_of(rows[row]),
            ranks=self.world.data_size,
            batch_size=self.batch_size,
        )
        mine = shares[self.world.data_rank]
        # A rank without a row of its own computes the shortest of the others': it waits for them in any case.
        shortest = min(rows, key=self._cost_of)
        batches = [
            self.collate([rows[row] for row in batch]) if batch else replace(self.collate([shortest]), filler=True)
            for batch in mine
        ]
        return batches, self._behind

    def _take(self) -> list[data.Example]:
        rows: list[data.Example] = []
        tokens = 0
        while self.budget is not None or len(rows) < self.step_size:
            example, behind = self._held or next(self._examples)
            self._held = None
            if example is None:
                self._behind = behind
                if rows:
                    break
                continue
            tokens += example.num_tokens
            if self.budget is not None and rows and tokens > self.budget:
                self._held = (example, behind)
                break
            rows.append(example)
            self._behind = behind
        return rows

    def _cost_of(self, example: data.Example) -> float:
        return self.cost(example.num_tokens, example.num_tokens**2)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last step that was returned, and what decides the order."""
        return {**self._order(), **self._position.to_json()}

    def _order(self) -> dict[str, Any]:
        return {"seed": self.stream.options.seed, "shuffle_buffer": self.stream.options.shuffle_buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position saved by ``state_dict``, if the rows have the same order."""
        for key, mine in self._order().items():
            if state.get(key) != mine:
                raise CheckpointError(
                    f"the checkpoint streams the data with {key} = {state.get(key)}, this run with {mine}",
                    fix="resume with the settings the checkpoint was made with",
                )
        self._stop()
        known = data.StreamPosition().to_json()
        place = {name: state[name] for name in known}
        if any(type(count) is not int or count < 0 for name, count in place.items() if name != "counts"):
            raise CheckpointError(
                f"the checkpoint is at row {place['rows']} of pass {place['epoch']}, which is no place",
                fix="use another checkpoint: --resume PATH",
            )
        self._begin(data.StreamPosition(**place))

    def _stop(self) -> None:
        for future in self._coming:
            if not future.cancel():
                with suppress(StreamTuneError):
                    future.result()
        self._coming.clear()
        self._examples.close()

    def close(self) -> None:
        """End the thread, and the processes that render."""
        self._stop()
        if self._pool is not None:
            self._pool.shutdown()


def record_bad_rows(path: Path, errors: Sequence[DataError]) -> None:
    """Add rows that were left out to the record of the run, each once: the next pass meets them again."""
    rows: dict[str, dict[str, str]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        rows = {each["row"]: each for each in json.loads(path.read_text("utf-8"))["bad_rows"]}
    rows |= {error.where: {"row": error.where, "what": error.what, "mend": error.fix} for error in errors}
    replace_file(path, f"{json.dumps({'bad_rows': list(rows.values())}, indent=1)}\n".encode(), durably=False)
