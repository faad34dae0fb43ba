"""Steps of ranks that train a vision tower, of which one has no images: gradients compared with one process."""

from __future__ import annotations

import copy
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import streamtune
from streamtune import models, train
from streamtune.models import AdapterSpec, add_adapters
from streamtune.recipe import Recipe
from streamtune.run.ranks import make_backend
from tests.distributed.equality_cases import _accumulate, whole_gradients
from tests.exactness.test_adapters import moved
from tests.precision_kit import reference_of
from tests.run.test_image_adapters import TOWERS
from tests.run.test_packed_images import gradient, load

STEPS = [[[0], [2]], [[1, 2], [2]], [[2], [0, 1]], [[2], [2]]]
"""Rows of each rank in each step: row 0 has one image, row 1 two, row 2 none."""
TRAINED = {
    "all": models.TrainedParts(tower=True, projector=True),
    "projector": models.TrainedParts(projector=True, freeze=(".*language_model", "lm_head")),
    "language": models.TrainedParts(),
}


def run(case: dict[str, Any]) -> list[float]:
    """Return the largest error of a parameter's gradient in each step, each within what plain torch's error explains.

    ``trains``: ``adapters`` in both parts; ``all`` weights; the ``language`` model; the ``projector`` alone. A
    micro-batch has one row; the rank with fewer rows has a filler.
    """
    rank, world = distributed.get_rank(), train.World(distributed.get_rank(), distributed.get_world_size())
    kind, engine, trains = case["kind"], case["engine"], case["trains"]
    folder = [tempfile.mkdtemp()]  # rank 0 alone saves: transformers writes no configuration on the others
    distributed.broadcast_object_list(folder)
    os.chdir(folder[0])
    if rank == 0:
        load(kind, Path.cwd(), 3)
    distributed.barrier()
    model, batches, rows = load(kind, Path.cwd(), 3)
    if trains == "adapters":
        model = moved(add_adapters(model, AdapterSpec(r=2, target=TOWERS[kind])))
    else:
        models.freeze_parts(model, TRAINED[trains])
    plain = copy.deepcopy(model.train())
    recipe = Recipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        gradient_accumulation_steps=2,
        finetuning_type="lora" if trains == "adapters" else "full",
        deepspeed=engine if engine.startswith("zero") else None,
        fsdp=engine == "fsdp",
    )
    handle = streamtune.stream(model, schedule=streamtune.Schedule(chunk_size=13, head_chunk_size=9))
    backend = make_backend(recipe, model, handle.layers, world)
    objective = train.SupervisedObjective(handle)
    found = []
    for step in STEPS[:-1] if trains == "projector" else STEPS:  # without images plain autograd has nothing to train
        together = batches.collate([[rows[row]] for each in step for row in each], packed=False)
        want = reference_of(plain, lambda m, batch=together: gradient(m, [batch], batch.num_targets))  # type: ignore[misc]
        mine = [batches.collate([[rows[row]]], packed=False) for row in step[rank]]
        for _ in range(max(map(len, step)) - len(mine)):
            mine.append(replace(mine[0], filler=True))
        score = _accumulate(backend, objective, handle, mine, world)
        got = whole_gradients(backend, model)
        others = [value for name, value in got.items() if name not in want.truth[1]]
        assert not any(bool(value.any()) for value in others), "a gradient of no row"
        gradients = {name: got[name] for name in want.truth[1]}
        found.append(want.check((torch.tensor(score.loss), gradients), (case, step)))
        backend.drop_gradients()
    backend.close()
    return found
