"""What saving costs a run: every other stretch of it begins with a save, and is compared with the two beside it.

    python -m tests.faults.bench_saving [STEPS_IN_A_STRETCH] [SAVES]

A Llama of 29 million parameters (350 MB of weights and optimizer state in a checkpoint) on this CPU, rows of 512
tokens. The time of a step is from the beginning of one to that of the next. What a save costs is how much longer its
stretch takes than the mean of the stretch before and the one after, which have none: a machine that grows slower or
faster does so for both, and stretches are short, as far as a save ends within one. The figure is the median over the
saves and where it lies with 95% (by the order of the values), as a share of the steps between two saves of a run that
saves every :data:`SAVE_STEPS`.

One thread trains and one core is left, as beside an accelerator. What saving would cost where every core trains is told
by the processor time it takes, hashing and copying, as a share of that of the steps.
"""

from __future__ import annotations

import io
import math
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune import models
from streamtune.engine import stream
from streamtune.optim import OptimChoice, build_optimizer, build_schedule
from streamtune.train import (
    LocalBackend,
    MicroBatch,
    ModelWriter,
    Progress,
    RunDirectory,
    StopRequest,
    SupervisedObjective,
    TrainJob,
    TrainSettings,
    train,
)
from tests.faults.kit import report

LENGTH, VOCABULARY = 512, 8192
SAVE_STEPS = 15
FOLDER = Path(__file__).parents[2] / "build"
"""On the disk that holds the project: the system's temporary folder may be memory."""

Mark = np.ndarray
"""``(2,)`` float64: seconds by the clock, and processor seconds of all threads."""


class Rows:
    """Random rows, and when each step began."""

    def __init__(self) -> None:
        self.began: list[Mark] = []

    def next_step(self) -> list[MicroBatch]:
        self.began.append(np.array([time.perf_counter(), time.process_time()]))
        ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(len(self.began)))
        labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
        return [MicroBatch(ids, torch.ones_like(ids), labels, ("row",))]

    def state_dict(self) -> dict[str, Any]:
        return {"position": len(self.began)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


class Cost(NamedTuple):
    """What one save adds to its stretch, and what such a stretch takes without one: seconds."""

    wall: float
    processor: float
    stretch_wall: float
    stretch_processor: float


class Noted(Progress):
    """Progress that notes how many steps had begun when each checkpoint was seen to be committed."""

    def __init__(self, rows: Rows, total: int) -> None:
        super().__init__(Console(file=io.StringIO()), total)
        self.rows, self.committed = rows, {}

    def report_checkpoint(self, step: int, path: object) -> None:
        self.committed[step] = len(self.rows.began)


def costs(model: LlamaForCausalLM, every: int, saves: int, *, asynchronous: bool) -> list[Cost]:
    """Train with a save at the beginning of every other stretch of ``every`` steps; what each of them cost.

    Raises:
        RuntimeError: A save was still being written when its stretch was over: part of its cost would be missed.
    """
    rows, tokenizer = Rows(), NoTokenizer()
    size = sum(parameter.nbytes for parameter in model.parameters())
    total = every * 2 * (saves + 1)

    def write(folder: Path, **weights: Any) -> None:
        models.save_pretrained(model, tokenizer, folder, **weights)  # type: ignore[arg-type]

    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER) as folder, Noted(rows, total) as progress:
        job = TrainJob(
            backend=LocalBackend(model, build_optimizer(OptimChoice("adamw", 1e-4), model.named_parameters())),
            objective=SupervisedObjective(),
            learning_rate_at=build_schedule("constant", learning_rate=1e-4, total_steps=total, warmup_steps=0),
            steps=rows,
            held_out={},
            directory=RunDirectory(Path(folder)),
            identity={"recipe": {}, "data": ""},
            writer=ModelWriter(write, size, lambda: partial(write, weights=models.copy_weights(model))),
        )
        settings = TrainSettings(
            total_steps=total,
            steps_per_epoch=total,
            max_grad_norm=1.0,
            eval_steps=0,
            save_steps=2 * every,
            save_total_limit=1,
            autocast_dtype=None,
            seed=0,
            out_of_memory_fix="",
            save_async=asynchronous,
        )
        train(job, settings, progress, StopRequest())
    at = [2 * every * (index + 1) for index in range(saves)]
    if late := [step for step in at if progress.committed[step] > step + every - 1]:
        raise RuntimeError(f"the save of step {late[0]} takes longer than {every} steps: make the stretches longer")
    # A save comes after step k and before step k + 1 begins: its stretch begins with step k, whose index is k - 1.
    return [_cost(*(rows.began[step - 1 + offset * every] for offset in (-1, 0, 1, 2))) for step in at]


def _cost(before: Mark, begin: Mark, end: Mark, after: Mark) -> Cost:
    """Of the stretch from ``begin`` to ``end``, between the one that began at ``before`` and the one to ``after``."""
    taken, without = end - begin, (begin - before + after - end) / 2
    return Cost(*(taken - without).tolist(), *without.tolist())


def median_between(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the two of the values between which that of many more would lie in 95 of 100 cases."""
    ordered, half = sorted(values), round(0.98 * math.sqrt(len(values)))
    low, high = (len(ordered) - 1) // 2 - half, len(ordered) // 2 + half
    return statistics.median(ordered), ordered[max(0, low)], ordered[min(high, len(ordered) - 1)]


def main() -> None:
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    saves = int(sys.argv[2]) if len(sys.argv) > 2 else 24
    torch.set_num_threads(1)
    model = make_model()
    stream(model, chunk_size=256)
    figures: dict[str, Any] = {"save_steps": SAVE_STEPS}
    for name, asynchronous, count in (("asynchronous", True, saves), ("synchronous", False, saves // 3)):
        found = costs(model, every, count, asynchronous=asynchronous)
        seconds = median_between([cost.wall for cost in found])
        busy = statistics.median(cost.processor for cost in found)
        steps = SAVE_STEPS / every * statistics.median(cost.stretch_wall for cost in found)
        busy_steps = SAVE_STEPS / every * statistics.median(cost.stretch_processor for cost in found)
        figures[name] = {
            "saves": count,
            "percent": [round(100 * value / steps, 2) for value in seconds],
            "seconds": [round(value, 3) for value in seconds],
            "processor_percent": round(100 * busy / busy_steps, 2),
            "step_seconds": round(steps / SAVE_STEPS, 3),
        }
        print(name, figures[name], [round(cost.wall, 2) for cost in found], flush=True)
    report("saving", **figures)


if __name__ == "__main__":
    main()
