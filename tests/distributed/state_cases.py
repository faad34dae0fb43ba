"""Runs that save on one layout of ranks and go on with another: what a group of ranks does for ``test_state``.

A layout is an engine's name; ``one`` is one device (rank 0 by itself, while the others wait). A case is a run in the
folder of the test, from its beginning or from a checkpoint of another case.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, distributed

from streamtune.recipe import load_recipe
from streamtune.recipe.build_run import Run
from streamtune.recipe.build_sft import build_sft, run_sft
from streamtune.train.slices import Slice, SliceReader


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run, a digest of its final model, and whether the state it began with was the checkpoint's."""
    folder, alone = Path(case["folder"]), case["layout"] == "one"
    exact, notes = None, list[str]()
    if not alone or distributed.get_rank() == 0:
        with _alone(alone):
            exact, notes = _run(folder, case)
    distributed.barrier()
    output = folder / case["output"]
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "exact": exact,
        "notes": notes,
        "losses": [record["loss"] for record in records if "loss" in record],
        "final": {name: _digest(x) for name, x in sorted(_saved_weights(output / "final").items())},
    }


def _run(folder: Path, case: dict[str, Any]) -> tuple[bool | None, list[str]]:
    layout = case["layout"]
    settings = {
        "deepspeed": layout if layout.startswith("zero") else None,
        "fsdp": layout == "fsdp",
        "output_dir": str(folder / case["output"]),
        **case.get("settings", {}),
    }
    loaded = load_recipe(folder / "tiny.yaml", [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    notes: list[str] = []
    resume = str(folder / case["from"]) if "from" in case else "never"
    built = build_sft(loaded, resume=resume, notify=notes.append)
    exact = None if built.checkpoint is None else _is_as_saved(built)
    outcome = run_sft(built, Console(file=io.StringIO()))
    if outcome.sample is not None:
        notes.append(f"sample: {outcome.sample}")
    built.backend.close()
    return exact, notes


@contextmanager
def _alone(alone: bool) -> Iterator[None]:
    """One device in this process, whatever the group."""
    before = os.environ["WORLD_SIZE"]
    if alone:
        os.environ["WORLD_SIZE"] = "1"
    try:
        yield
    finally:
        os.environ["WORLD_SIZE"] = before


def _is_as_saved(built: Run) -> bool:
    """Whether all ranks together hold, before the first step, what the checkpoint has; bit for bit."""
    assert built.checkpoint is not None
    saved, backend = SliceReader(built.checkpoint.path), built.backend
    backend.load_slices(saved)
    same = True
    keys: set[tuple[str, str]] = set()
    for each in (Slice(*found) for found in backend.slices()):
        keys.add((each.parameter, each.key))
        if each.key in saved.keys(each.parameter):
            values = saved.read(each.parameter, each.key, each.offset, each.values.numel())
            same &= torch.equal(values.to(each.values.dtype), each.values.cpu())
    weights = _saved_weights(built.checkpoint.model_dir)
    for name, whole in backend.weights():
        if whole is not None and name in weights:
            same &= torch.equal(weights[name], whole.cpu())
    every = built.start.world.collect((same, keys))
    together = set().union(*(found for _, found in every))
    trained = {name for name, parameter in built.model.named_parameters() if parameter.requires_grad}
    return all(found for found, _ in every) and {name for name, key in together if key == "exp_avg"} == trained


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _saved_weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*model*.safetensors"):
        found |= load_file(path)
    return found
