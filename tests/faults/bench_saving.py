"""What saving costs: a run that saves every few steps, off the training thread and in it, beside one that does not.

    python -m tests.faults.bench_saving [STEPS_BETWEEN_SAVES] [ROUNDS]

A Llama of 29 million parameters (350 MB of weights and optimizer state in a checkpoint) on this CPU, rows of 512
tokens. The three are taken in turns, so that a machine that is busy for a while is so for all of them. The time of a
step is from the beginning of one to that of the next; the figure is the median over stretches of equally many steps,
with one save in each.

One thread trains and one core is left, as beside an accelerator. What saving would cost where every core trains is told
by the processor time it takes, hashing and copying, as a share of that of the steps.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune import models
from streamtune.engine import stream
from streamtune.optim import build_optimizer, build_schedule
from streamtune.train import (
    LocalBackend,
    MicroBatch,
    ModelWriter,
    Progress,
    RunDirectory,
    StopRequest,
    SupervisedObjective,
    TrainSettings,
    train,
)
from tests.faults.kit import report

LENGTH, VOCABULARY = 512, 8192


class Rows:
    """Random rows, and when each step began."""

    def __init__(self) -> None:
        self.began: list[tuple[float, float]] = []
        """By the clock, and by the processor time of all threads."""

    def next_step(self) -> list[MicroBatch]:
        self.began.append((time.perf_counter(), time.process_time()))
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


def stretches(
    model: LlamaForCausalLM, every: int, saves: int, *, save_steps: int, asynchronous: bool
) -> list[tuple[float, float]]:
    """Seconds a step takes, and processor seconds, of each stretch of ``every`` steps with a save in it; the first do
    not count."""
    rows, tokenizer = Rows(), NoTokenizer()
    size = sum(parameter.nbytes for parameter in model.parameters())
    writer = ModelWriter(
        lambda folder: models.save_pretrained(model, tokenizer, folder),  # type: ignore[arg-type]
        size,
        lambda: (
            lambda folder, copy=models.copy_weights(model): models.save_pretrained(  # type: ignore[misc]
                model,
                tokenizer,
                folder,
                weights=copy,  # type: ignore[arg-type]
            )
        ),
    )
    total = every * (saves + 1) + 1
    with TemporaryDirectory(dir=Path.cwd()) as folder, Progress(Console(file=io.StringIO()), total) as progress:
        train(
            LocalBackend(model, build_optimizer("adamw", model.named_parameters(), learning_rate=1e-4)),
            SupervisedObjective(),
            build_schedule("constant", learning_rate=1e-4, total_steps=total, warmup_steps=0),
            rows,
            None,
            settings=TrainSettings(
                total_steps=total,
                steps_per_epoch=total,
                max_grad_norm=1.0,
                eval_steps=0,
                save_steps=save_steps,
                save_total_limit=1,
                bf16=False,
                seed=0,
                out_of_memory_mend="",
                save_async=asynchronous,
            ),
            run=RunDirectory(Path(folder)),
            identity={"recipe": {}, "data": ""},
            writer=writer,
            resume_from=None,
            progress=progress,
            stop=StopRequest(),
        )
    # A save begins after step `every`, so before step `every + 1` does: stretches begin with the last step before it.
    marks = rows.began[every - 1 :: every]
    return [((later[0] - earlier[0]) / every, (later[1] - earlier[1]) / every) for earlier, later in pairwise(marks)]


def main() -> None:
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    torch.set_num_threads(1)
    model = make_model()
    stream(model, chunk_size=256)
    modes = {"none": (0, True), "asynchronous": (every, True), "synchronous": (every, False)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    for _ in range(rounds):
        for name, (save_steps, asynchronous) in modes.items():
            found[name] += stretches(model, every, 2, save_steps=save_steps, asynchronous=asynchronous)
    seconds = {name: statistics.median(wall for wall, _ in values) for name, values in found.items()}
    busy = {name: statistics.median(cpu for _, cpu in values) for name, values in found.items()}
    cost = {
        f"{name}_percent": round(100 * (seconds[name] / seconds["none"] - 1), 2) for name in modes if name != "none"
    }
    processor = round(100 * (busy["asynchronous"] / busy["none"] - 1), 2)
    figures = {**cost, "processor_percent": processor, "step_seconds": round(seconds["none"], 3), "save_steps": every}
    report("saving", **figures)
    print(figures, {name: [round(wall, 3) for wall, _ in values] for name, values in found.items()})


if __name__ == "__main__":
    main()
