"""Completions of a grpo run on several ranks: greedy tokens after a few prompts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from torch import distributed

from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.tasks import rollout
from streamtune.tasks.grpo.task import _make_writer

RECIPE = Path(__file__).parents[2] / "recipes/quickstart_grpo.yaml"
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [3, 4]]
FIXED = ["engine.schedule=fixed", "sft_steps=0", "eval_steps=0", "cache=false"]


def run(case: dict[str, Any]) -> list[list[int]]:
    """Return the tokens after each prompt."""
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(folder, src=0)
    settings = [f"output_dir={folder[0]}/run", *FIXED, *(f"{key}={json.dumps(value)}" for key, value in case.items())]
    built = build_run(load_recipe(RECIPE, settings, "grpo"))
    with built.closing:
        writer = _make_writer(built.recipe, built)
        written = writer.write(PROMPTS, 1, rollout.Sampling(6, temperature=0.0))
    built.backend.close()
    return [completions[0].token_ids for completions in written]
