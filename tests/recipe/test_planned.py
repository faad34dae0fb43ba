"""Shipped recipes for a model and a device: headers match the planner, and the page matches the headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.model_shapes import SHAPES
from tools.recipe_headers import PAGE, command_of, page, plan_shipped, planned_recipes, read_header

from streamtune.base.text import parse_size
from streamtune.plan.rates import find_device
from streamtune.recipe import ShippedRecipe, load_recipe

PLANNED = planned_recipes()
GIB = 1024**3
DEVICES = {"24gb": "rtx-4090", "48gb": "l40s", "80gb": "h100", "141gb": "h200"}
HOST = {"24gb": "64GiB", "48gb": "128GiB", "80gb": "256GiB", "141gb": "256GiB", "8x80gb": "1900GB"}
HOST_OF_OFFLOADED = {"8b-full-24gb": "192GiB", "14b-full-48gb": "320GiB", "32b-full-80gb": "640GiB"}
"""Host memory of the recipes that keep weights, gradients and optimizer there (`engine.weights: host`)."""
every_recipe = pytest.mark.parametrize("shipped", PLANNED, ids=lambda shipped: shipped.name)


def test_the_page_is_made_from_the_headers():
    assert len(PLANNED) >= 30
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.recipe_headers --page"


@every_recipe
def test_the_header_agrees_with_the_recipe(shipped: ShippedRecipe):
    recipe, planned, options = load_recipe(shipped.path).recipe, read_header(shipped), command_of(shipped)
    size, kind, device = shipped.path.stem.rsplit("-", 2)
    ranks = 8 if device.startswith("8x") else 1
    offloaded = recipe.engine.weights == "host"
    host = HOST_OF_OFFLOADED[shipped.path.stem] if offloaded else HOST[device]
    assert options == {
        "device": DEVICES[device.removeprefix("8x")],
        "host_memory": host,
        **({"ranks": 8} if ranks == 8 else {}),
    }
    assert (recipe.objective, recipe.finetuning_type) == ((kind, "lora") if kind in ("dpo", "grpo") else ("sft", kind))
    assert recipe.output_dir == f"runs/{shipped.name}"
    assert recipe.model_name_or_path in SHAPES
    longest = getattr(recipe, "max_completion_length", recipe.max_length)
    assert f"of up to {longest:,} tokens" in shipped.summary
    assert f"{'8 devices' if ranks == 8 else 'one device'} of {device.removeprefix('8x')[:-2]} GB" in shipped.summary
    assert (f"{host.removesuffix('iB')[:-1]} GB of host memory" in shipped.summary) == offloaded
    assert re.search(rf"^#   streamtune {recipe.objective} {shipped.name} .*--set", shipped.text, re.MULTILINE)
    assert ("--nproc 8" in shipped.text) == (ranks == 8)
    assert planned.size == round(find_device(options["device"]).memory_bytes / GIB, 1)
    assert planned.peak <= 0.95 * planned.size
    assert planned.host * GIB <= 0.95 * parse_size(options["host_memory"])
    assert len(shipped.text.splitlines()) <= 40
    assert size


@every_recipe
def test_rows_are_no_longer_than_the_model_goes(shipped: ShippedRecipe):
    recipe = load_recipe(shipped.path).recipe
    shape = SHAPES[str(recipe.model_name_or_path)]
    positions = shape.get("text_config", shape)["max_position_embeddings"]
    if recipe.rope_scaling is not None:
        positions = recipe.rope_scaling.factor * recipe.rope_scaling.original_max_position_embeddings
    assert recipe.max_length <= positions


@pytest.mark.parametrize(
    "name",
    [
        "qwen3/0.6b-full-24gb",
        pytest.param("qwen3/1.7b-full-24gb", marks=pytest.mark.slow),
        pytest.param("llama3/1b-full-24gb", marks=pytest.mark.slow),
    ],
)
def test_a_shorter_row_is_planned_for_the_device_of_the_header(name: str, tmp_path: Path):
    (shipped,) = [recipe for recipe in PLANNED if recipe.name == name]
    written, now = read_header(shipped), plan_shipped(shipped, tmp_path, length=2048)
    assert (now.size, now.step, now.ranks) == (pytest.approx(written.size, abs=0.06), written.step, written.ranks)
    assert now.peak <= 0.95 * now.size
    assert now.seconds < written.seconds / 8


IN_FULL = ("qwen3/8b-lora-80gb",)
"""Planned by `make test-all`; all of them take 25 minutes and are planned by `pytest -m slow` and before a release."""


@pytest.mark.parametrize(
    "shipped",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.full if each.name in IN_FULL else pytest.mark.slow)
        for each in PLANNED
    ],
)
def test_the_planner_says_what_the_header_says(shipped: ShippedRecipe, tmp_path: Path):
    written, now = read_header(shipped), plan_shipped(shipped, tmp_path)
    assert (now.size, now.step, now.ranks) == (pytest.approx(written.size, abs=0.06), written.step, written.ranks)
    assert now.peak == pytest.approx(written.peak, rel=0.03)
    assert now.seconds == pytest.approx(written.seconds, rel=0.15)
