"""The Trainer of transformers, by DDP or DeepSpeed, on a plain and on a streamed model.

Stage 0 is DDP; there the callback streams the model, once the Trainer has wrapped it.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

import streamtune
from streamtune import models
from streamtune.integrations import StreamTuneCallback
from tests.exactness.families import build

STEPS = 4


def run(case: dict[str, Any]) -> dict[str, list[float]]:
    """Return the losses of both models on rank 0."""
    plain: Any = build("qwen3")  # before the first Trainer, which has later models made in parts
    if case["adapters"]:
        plain = models.add_lora(plain, r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
    losses = {}
    for name, model in {"plain": plain, "streamed": copy.deepcopy(plain)}.items():
        callbacks = [StreamTuneCallback(chunk_size=8)] if name == "streamed" and case["stage"] == 0 else []
        if name == "streamed" and not callbacks:
            streamtune.stream(model, chunk_size=8)
        trainer = Trainer(model, _arguments(case["stage"]), train_dataset=_rows(), callbacks=callbacks)
        trainer.train()
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses


def _rows() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 60, (27,), generator=generator).tolist() for _ in range(4)] * 4
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


def _arguments(stage: int) -> TrainingArguments:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    return TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        optim="sgd",
        bf16=False,
        use_cpu=True,
        deepspeed=config if stage else None,
        ddp_backend="gloo",
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
