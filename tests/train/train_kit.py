"""A tiny model and a stream of random rows, with which real training takes milliseconds."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune.optim import OptimChoice, build_optimizer, build_schedule
from streamtune.train import (
    Checkpoint,
    LocalBackend,
    MicroBatch,
    ModelWriter,
    Objective,
    Progress,
    RunDirectory,
    RunProgress,
    StopRequest,
    SupervisedObjective,
    TrainJob,
    TrainSettings,
    train,
)
from streamtune.train.process import capture_rng
from streamtune.train.saver import CheckpointContent, save_checkpoint
from streamtune.train.slices import Slice, slices_of_replicated_state

VOCABULARY = 64


def make_model(dropout: float = 0.0) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=dropout,
        )
        return LlamaForCausalLM(config)


def make_batch(row: int, length: int = 12) -> MicroBatch:
    generator = torch.Generator().manual_seed(row)
    ids = torch.randint(0, VOCABULARY, (1, length), generator=generator)
    labels = torch.full_like(ids, -100)
    # Rows differ in how many positions they train: a mean of means would not be the mean.
    start = row % 5
    labels[:, start:-1] = ids[:, start + 1 :]
    return MicroBatch(ids, torch.ones_like(ids), labels, (f"rows.jsonl:{row + 1}",))


@dataclass
class RowStream:
    """Rows in a fixed order, ``accumulation`` per step; the last step of an epoch has the rest."""

    num_rows: int = 10
    accumulation: int = 3
    position: int = 0
    on_step: Callable[[int], None] = lambda position: None
    rows: dict[int, MicroBatch] = field(default_factory=dict)

    def next_step(self) -> list[MicroBatch]:
        self.on_step(self.position)
        end = min(self.position + self.accumulation, self.num_rows)
        rows = range(self.position, end)
        self.position = end % self.num_rows
        return [self.rows.get(row) or make_batch(row) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class Trainer:
    """Calls ``train`` with defaults that a test overrides."""

    folder: Path
    output: io.StringIO = field(default_factory=io.StringIO)

    def __call__(
        self,
        model: torch.nn.Module,
        *,
        objective: Objective | None = None,
        stream: RowStream | None = None,
        steps: int = 8,
        resume_from: Checkpoint | None = None,
        stop: StopRequest | None = None,
        validation: Callable[[], Iterator[MicroBatch]] | None = None,
        learning_rate: float = 1e-2,
        **settings: Any,
    ) -> RunProgress:
        defaults: dict[str, Any] = {
            "max_grad_norm": 1.0,
            "eval_steps": 0,
            "save_steps": 0,
            "save_total_limit": 2,
            "autocast_dtype": None,
            "seed": 1,
            "out_of_memory_fix": "lower engine.chunk_size",
        }
        self.folder.mkdir(exist_ok=True)
        console = Console(file=self.output, width=100)
        with Progress(console, total_steps=steps) as progress:
            optimizer = build_optimizer(OptimChoice("adamw", learning_rate), model.named_parameters())
            job = TrainJob(
                backend=LocalBackend(model, optimizer),
                objective=objective or SupervisedObjective(),
                learning_rate_at=build_schedule(
                    "cosine", learning_rate=learning_rate, total_steps=steps, warmup_steps=2
                ),
                steps=stream or RowStream(),
                held_out={} if validation is None else {"": validation},
                directory=RunDirectory(self.folder),
                identity={"recipe": {}, "data": "rows"},
                writer=ModelWriter(lambda folder: model.save_pretrained(folder), 100_000),
                resume_from=resume_from,
            )
            chosen = TrainSettings(total_steps=steps, steps_per_epoch=4, **{**defaults, **settings})
            return train(job, chosen, progress, stop or StopRequest())


class State:
    """A fake backend with optimizer state as whole tensors or slices, by ``PARAMETER/KEY``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, whole: bool = True) -> None:
        self.tensors, self.has_whole_state = tensors, whole

    def optimizer_slices(self) -> Iterator[Slice]:
        return slices_of_replicated_state(self.tensors, 0, 1)


def save_tensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    writer: ModelWriter,
    state: dict[str, Any],
    *,
    whole: bool = True,
    **more: Any,
) -> Path:
    """Write a checkpoint with these tensors from one rank."""
    needed = writer.num_bytes + sum(tensor.nbytes for tensor in tensors.values())
    slices = slices_of_replicated_state(tensors, 0, 1)
    content = CheckpointContent(
        **{"rng": capture_rng(), **more}, state=state, slices=slices, has_whole_state=whole, needed_bytes=needed
    )
    return save_checkpoint(folder, content, writer)
