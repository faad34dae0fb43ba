"""Twenty steps of a recipe on several ranks, and the losses they record; each rank calls ``run``."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import distributed

from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.train import train_run

RECIPE = """
model:
  init: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
         num_attention_heads: 4, num_key_value_heads: 2}
tokenizer: {train: {vocab_size: 300}}
max_length: 96
engine: {schedule: fixed, chunk_size: 32}
train_batch_size: 8
learning_rate: 1.0e-3
max_steps: 20
val_size: 5
eval_steps: 10
"""
DATA = {
    "sft": "datasets: [{path: python-stdlib, max_rows: 60}]\noverlength: truncate\ntrain_on: all\n",
    "dpo": "objective: dpo\ndatasets: [{path: demo-preferences, max_rows: 50}]\n",
}


def run(case: dict[str, Any]) -> dict[str, list[float]]:
    """Return training and held-out losses by step."""
    folder = [tempfile.mkdtemp() if not distributed.is_initialized() or distributed.get_rank() == 0 else ""]
    objective = case.get("objective", "sft")
    if folder[0]:  # by one rank, before the others hear of it
        (Path(folder[0]) / "recipe.yaml").write_text(RECIPE + DATA[objective])
    if distributed.is_initialized():
        distributed.broadcast_object_list(folder, src=0)
    path = Path(folder[0]) / "recipe.yaml"
    settings = [
        f"output_dir={folder[0]}/run",
        *(f"{key}={json.dumps(value)}" for key, value in case["settings"].items()),
    ]
    loaded = load_recipe(path, settings, objective)
    console = Console(file=io.StringIO())
    train_run(build_run(loaded), console)
    if distributed.is_initialized():
        distributed.barrier()
    records = [json.loads(line) for line in Path(folder[0], "run", "metrics.jsonl").read_text().splitlines()]
    return {name: [record[name] for record in records if name in record] for name in ("loss", "eval_loss")}
