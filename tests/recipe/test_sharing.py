"""Choices that need whole weights are refused with their line, before data or a model is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune import train
from streamtune.distributed.deepspeed_config import PRESETS, zero_stage
from streamtune.errors import ArgumentError
from streamtune.recipe import GrpoRecipe, load_recipe
from streamtune.recipe.keys.engine import SHARDING_PRESETS
from streamtune.run.model import choose_quantization
from streamtune.run.ranks import check_rank_layout, weights_are_sharded
from streamtune.tasks import TASKS
from streamtune.tasks.grpo.groups import single_rank_recipe

GRPO = "objective: grpo\nreward_funcs: [exact_match]\n"
REFUSED = [
    (
        "finetuning_type: qlora\nquantization: int8\n",
        "int8 weights (torchao) cannot be",
        "write quantization: nf4",
    ),
    (f"{GRPO}use_vllm: true\n", "'use_vllm' needs whole weights on each rank", "use_vllm: false"),
    (
        f"{GRPO}repetition_penalty: 1.1\n",
        "'repetition_penalty' would count padding, which ranks with sharded weights add",
        "repetition_penalty: 1.0",
    ),
]


def test_presets_that_share_weights_are_those_of_stage_3() -> None:
    assert set(SHARDING_PRESETS) == {name for name, config in PRESETS.items() if zero_stage(config) == 3}


@pytest.mark.parametrize("engine", ["fsdp: true", *(f"deepspeed: {name}" for name in SHARDING_PRESETS)])
@pytest.mark.parametrize(("lines", "what", "fix"), REFUSED)
def test_a_recipe_refuses_them(refused: Any, lines: str, what: str, fix: str, engine: str) -> None:
    error = refused(f"{engine}\n{lines}")
    assert error.what.startswith(what)
    assert error.where.endswith(f"recipe.yaml:{4 + lines.count(chr(10))}")
    assert fix in error.fix


@pytest.mark.parametrize(("lines", "what", "fix"), REFUSED[1:])  # int8 with any file is refused by the recipe
def test_a_run_refuses_them_for_a_file_of_stage_3(write: Any, tmp_path: Path, lines: str, what: str, fix: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    recipe = load_recipe(write(f"deepspeed: {tmp_path / 'ds.json'}\n{lines}")).recipe
    with pytest.raises(ArgumentError) as caught:
        check_rank_layout(recipe, 2, weights_are_sharded=weights_are_sharded(recipe))
    assert caught.value.what.startswith(what)
    assert fix in caught.value.fix


def test_ranks_that_divide_a_quantised_base_have_the_kind_that_can_be(write: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    kinds = {
        line: choose_quantization(load_recipe(write(f"{line}\nfinetuning_type: qlora\n")).recipe, torch.device("cpu"))
        for line in (
            "fsdp: true",
            "deepspeed: zero3",
            f"deepspeed: {tmp_path / 'ds.json'}",
            "deepspeed: zero2",
            "seed: 1",
        )
    }
    assert list(kinds.values()) == ["nf4", "nf4", "nf4", "nf4", "int8"]


def test_completions_that_make_no_whole_steps_of_the_ranks_are_refused_before_anything_is_loaded(write: Any) -> None:
    lines = f"{GRPO}num_generations: 6\nper_device_train_batch_size: 6\ntrain_batch_size: 18\ngeneration_batch_size: 24"
    loaded = load_recipe(write(lines))
    task = TASKS["grpo"].for_run(loaded.recipe, loaded.path.parent, print)
    with pytest.raises(ArgumentError, match=r"must be a multiple of completions per step \(18 on 1 rank\)") as caught:
        task.check_ranks(torch.device("cpu"), train.World())
    assert caught.value.where == "generation_batch_size"


@pytest.mark.parametrize(
    ("lines", "ranks", "found"),
    [
        ("num_generations: 8\nper_device_train_batch_size: 4\ntrain_batch_size: 16", 1, (16, 16)),
        ("num_generations: 8\nper_device_train_batch_size: 4\ntrain_batch_size: 16", 4, (16, 16)),
        ("per_device_train_batch_size: 8\ntrain_batch_size: 16\ngeneration_batch_size: 32", 2, (16, 32)),
        ("per_device_train_batch_size: 8\ntrain_batch_size: 32\nsteps_per_generation: 2", 4, (32, 64)),
        ("gradient_accumulation_steps: 2\ngeneration_batch_size: 32", 2, (32, 32)),
        ("num_generations: 4\nper_device_train_batch_size: 6\nsteps_per_generation: 2", 2, (12, 24)),
    ],
)
def test_completions_of_a_step_and_of_a_generation_over_all_ranks(
    write: Any, lines: str, ranks: int, found: tuple[int, int]
) -> None:
    recipe = load_recipe(write(GRPO + lines)).recipe
    assert isinstance(recipe, GrpoRecipe)
    joint = single_rank_recipe(recipe, train.World(0, ranks))
    assert (joint.completions_per_step, joint.completions_per_generation) == found
    assert recipe.needs_old_logprobs >= joint.needs_old_logprobs  # the plan reads the recipe, whose ranks are unknown
    if recipe.train_batch_size is not None and recipe.steps_per_generation is None:
        assert (recipe.completions_per_step, recipe.completions_per_generation) == found
        assert recipe.needs_old_logprobs == joint.needs_old_logprobs


@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_that_would_have_different_numbers_of_prompts_are_refused(write: Any, ranks: int) -> None:
    lines = "num_generations: 4\nper_device_train_batch_size: 6\nsteps_per_generation: 2"
    recipe = load_recipe(write(GRPO + lines)).recipe
    assert isinstance(recipe, GrpoRecipe)
    with pytest.raises(ArgumentError, match=rf"completions per step \({6 * ranks} on {ranks} rank") as caught:
        single_rank_recipe(recipe, train.World(0, ranks))
    assert "and completions per step of num_generations, found 4" in caught.value.what


@pytest.mark.parametrize("lines", [lines for lines, *_ in REFUSED[1:]])
def test_ranks_with_whole_weights_take_them(write: Any, lines: str) -> None:
    recipe = load_recipe(write(f"deepspeed: zero2\n{lines}")).recipe
    assert check_rank_layout(recipe, 2, weights_are_sharded=weights_are_sharded(recipe)).size == 2
