"""Runs that save on one layout of ranks and go on with another: what a group of ranks does for ``test_state``.

A layout is an engine's name; ``one`` is one device (rank 0 by itself, while the others wait). A case is a run in the
folder of the test, from its beginning or from a checkpoint of another case.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from streamtune import models, train
from streamtune.distributed.deepspeed import shard_module
from streamtune.distributed.deepspeed_config import resolve_config
from streamtune.distributed.pytorch import DdpBackend, shard_layer
from streamtune.engine import decoder_layers
from streamtune.errors import ArgumentError, CheckpointError
from streamtune.models import save_gathered_weights
from streamtune.recipe import Recipe, load_recipe
from streamtune.run import ranks as build_world
from streamtune.run.build import build_run
from streamtune.run.ranks import load_weights_by_layer, make_backend
from streamtune.run.train import Run, train_run
from streamtune.train.process import capture_rng
from streamtune.train.saver import CheckpointSaver, KeepPolicy
from streamtune.train.slices import MASTER, Slice, SliceReader


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run, a digest of its final model, and whether the state it began with was the checkpoint's.

    Or what one of the other cases finds: ``memory``, ``failure``, ``apart``.
    """
    if "what" in case:
        return {"memory": memory, "failure": failure, "apart": apart}[case["what"]](case)
    folder, alone = Path(case["folder"]), case["layout"] == "one"
    exact, notes = None, list[str]()
    if not alone or distributed.get_rank() == 0:
        with _alone(alone):
            exact, notes = _run(folder, case)
    distributed.barrier()
    output = folder / case["output"]
    metrics = output / "metrics.jsonl"  # not there where the run went on from its last step
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
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
    loaded = load_recipe(
        folder / case.get("recipe", "tiny.yaml"), [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    )
    notes: list[str] = []
    resume = str(folder / case["from"]) if "from" in case else "never"
    built: Any = build_run(loaded, resume=resume, notify=notes.append)
    exact = None if built.checkpoint is None else _is_as_saved(built)
    if steps := case.get("skipped", 0):
        calls = count()
        built.model.model.norm.register_forward_hook(
            lambda module, args, out: out * math.nan if next(calls) < steps * built.start.micro_batches else None
        )
    outcome = train_run(built, Console(file=io.StringIO()))  # type: ignore[operator]
    notes += [f"sample: {sample['completion']}" for sample in outcome.samples]
    return exact, notes


def memory(case: dict[str, Any]) -> dict[str, Any]:
    """Of a model that is loaded shared and written again: the most bytes of tensors a rank holds, beside its own.

    The engine's flat copies are not there yet while weights come, so what is counted is weights.
    """
    folder, world = Path(case["folder"]), train.World(distributed.get_rank(), distributed.get_world_size())
    recipe = Recipe(
        model_name_or_path=str(folder / "whole"),
        datasets=[{"path": "none"}],
        deepspeed="zero3" if case["layout"] == "zero3" else None,
        fsdp=case["layout"] == "fsdp",
    )
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    model = models.load_model_deferred(str(folder / "whole"))
    layers = decoder_layers(model)
    peak = 0

    def watched(share: Callable[[Any], None]) -> Callable[[Any], None]:
        def shared(module: Any) -> None:
            nonlocal peak
            peak = max(peak, _live_bytes())
            share(module)
            peak = max(peak, _live_bytes())

        return shared

    share = _share_of(recipe, model, layers, world)
    load_weights_by_layer(model, layers, world, torch.device("cpu"), watched(share))
    after = _live_bytes()
    backend = make_backend(recipe, model, layers, world, torch.device("cpu"))
    held, written = _live_bytes(), 0

    def weights(names: Any) -> Iterator[Any]:
        nonlocal written
        for found in backend.full_weights(names):
            written = max(written, _live_bytes() - held)
            yield found

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            pass

    target = folder / f"again-{case['layout']}"
    save_gathered_weights(model, Tokenizer(), target, weights, is_main=world.is_main, shard_bytes=20_000)  # type: ignore[arg-type]
    backend.close()
    gc.unfreeze()
    whole = sum(x.nbytes for x in load_file(folder / "whole" / "model.safetensors").values())
    return {
        "whole": whole,
        "loading": world.gather_all_ranks(peak),
        "held": world.gather_all_ranks(after),
        "writing": written,
    }


def _share_of(recipe: Recipe, model: Any, layers: Any, world: train.World) -> Callable[[Any], None]:
    """Return the function with which ``make_backend`` shards the layers."""
    if recipe.fsdp:
        return lambda module: shard_layer(module, layers)
    assert recipe.deepspeed is not None
    config = resolve_config(recipe.deepspeed, build_world.deepspeed_values(recipe, model, world))
    return lambda module: shard_module(module, config)


def _live_bytes() -> int:
    """Return the CPU bytes of the storages of all new tensors in this process."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and type(x) is not DTensor]
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors if x.device.type == "cpu"}
    return sum(storage.nbytes() for storage in storages.values())


def failure(case: dict[str, Any]) -> dict[str, Any]:
    """What each rank says where rank 1 cannot write its part, and what is left in the folder.

    ``asynchronous``: it is said at the next boundary, and the step goes on meanwhile.
    """
    world = train.World(distributed.get_rank(), distributed.get_world_size())
    folder = Path(case["folder"]) / f"failing-{case['asynchronous']}"
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    backend = DdpBackend(model, optimizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    said, went_on = "", False
    try:
        writer = train.ModelWriter(Path.mkdir, 0, lambda: Path.mkdir)
        saver = CheckpointSaver(
            folder, writer, KeepPolicy(1), world=world.with_new_group(), asynchronous=case["asynchronous"]
        )
        saver.save(backend, state={"step": 1}, rng=capture_rng())
        went_on = world.sum_over_ranks([1.0]) == [world.size]  # over the group of the training thread
        saver.wait_and_pop_committed()
    except CheckpointError as error:
        said = error.what
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    distributed.barrier()
    left = sorted(path.name for path in folder.iterdir())
    return {"said": world.gather_all_ranks(said), "went_on": went_on, "left": left}


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """Return what is reported for a folder that differs between ranks, and for a shared folder."""
    world = train.World(distributed.get_rank(), distributed.get_world_size())
    train.check_shared_folder(Path(case["folder"]) / "together", world)
    try:
        train.check_shared_folder(Path(case["folder"]) / f"apart-{world.rank}", world)
    except ArgumentError as error:
        return {"said": error.what, "left": [path.name for path in (Path(case["folder"]) / "together").iterdir()]}
    return {"said": "", "left": []}


@contextmanager
def _alone(alone: bool) -> Iterator[None]:
    """Train on one device in this process, whatever the process group."""
    before = os.environ["WORLD_SIZE"]
    if alone:
        os.environ["WORLD_SIZE"] = "1"
    try:
        yield
    finally:
        os.environ["WORLD_SIZE"] = before


def _is_as_saved(built: Run) -> bool:
    """Return True if all ranks together hold the checkpoint's state bit for bit, before the first step."""
    assert built.checkpoint is not None
    saved, backend = SliceReader(built.checkpoint.path), built.backend
    backend.load_optimizer_slices(saved)
    same = True
    keys: set[tuple[str, str]] = set()
    for each in (Slice(*found) for found in backend.optimizer_slices()):
        keys.add((each.parameter, each.key))
        if each.key in saved.state_keys(each.parameter):
            values = saved.read(each.parameter, each.key, each.offset, each.values.numel())
            same &= torch.equal(values.to(each.values.dtype), each.values.cpu())
    weights = _saved_weights(built.checkpoint.model_dir)
    for name, whole in backend.full_weights():
        if whole is not None and name in weights:
            same &= torch.equal(weights[name], whole.cpu())
    every = built.start.world.gather_all_ranks((same, keys))
    together = set().union(*(found for _, found in every))
    trained = {name for name, parameter in built.model.named_parameters() if parameter.requires_grad}
    if not saved.parameter_names():  # an optimizer without states
        trained = set()
    return all(found for found, _ in every) and {name for name, key in together if key != MASTER} == trained


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _saved_weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*model*.safetensors"):
        found |= load_file(path)
    return found
