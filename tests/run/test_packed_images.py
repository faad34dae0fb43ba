"""Packed rows with images: the gradient of the rows alone, and models that compute them otherwise are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

import streamtune
from streamtune import Schedule, data, models
from streamtune.engine.preflight import check_packed_images
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.recipe.loader import load_recipe
from streamtune.run.build import build_run
from streamtune.tasks.sft import Batches
from streamtune.tasks.steps import Steps
from streamtune.train import MicroBatch
from tests.exactness.families import gradients
from tests.exactness.vision import IMAGE, TEXT, build
from tests.precision_kit import Reference, reference_of, widened
from tests.sft_kit import FIXED, run, write_recipe
from tests.vision_kit import KINDS, save_checkpoint, write_image_rows

from .test_image_rows import RECIPE, SCHEDULES, folder, losses

__all__ = ["folder"]

PACKED = {**RECIPE, "packing": True, "max_length": 160, "save_steps": 2}
ROWS = 6


def load(kind: str, where: Path, rows: int = ROWS) -> tuple[Any, Batches, list[data.Example]]:
    """A model, and rows with one image, two and none in turn, each image of another size."""
    if not (where / "base").exists():
        save_checkpoint(kind, where / "base")
        write_image_rows(where, rows)
    tokenizer, images = AutoTokenizer.from_pretrained("base"), data.ImageOptions("base", "held")
    prepared = data.prepare([data.Source("rows.jsonl")], tokenizer, data.DataOptions(max_length=512, images=images))
    model = AutoModelForImageTextToText.from_pretrained("base").train()
    batches = Batches(prepared, tokenizer, images=images, model=model)
    return model, batches, [prepared.training[row] for row in range(rows)]


def gradient(model: Any, batches: list[MicroBatch], num_targets: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of several calls, each divided by the same number of targets."""
    total, sums = torch.zeros(()), dict[str, Tensor]()
    for batch in batches:
        labels = {"labels": batch.shift_labels, "shift_labels": batch.shift_labels, "num_items_in_batch": num_targets}
        inputs = {**batch.inputs, **labels}
        value, grads = gradients(model, widened(inputs) if model.dtype == torch.float64 else inputs)
        total, sums = total + value, {name: grad + sums.get(name, 0) for name, grad in grads.items()}
    return total, sums


def apart(model: Any, batches: Batches, rows: list[data.Example], num_targets: int) -> Reference:
    """The sum over the rows, each alone in a call of the plain model."""
    alone = [batches.collate([[row]], packed=False) for row in rows]
    return reference_of(model, lambda m: gradient(m, alone, num_targets))


@pytest.mark.quick("qwen3_vl-chunks")
@pytest.mark.parametrize("kind_schedule", [f"{kind}-{schedule}" for kind in KINDS for schedule in SCHEDULES])
def test_packed_rows_have_the_gradient_of_the_rows_alone(kind_schedule: str, folder: Path) -> None:
    """Two sequences, of four rows and of two; of all parameters, the tower's included; three ways."""
    kind, schedule = kind_schedule.split("-")
    model, batches, rows = load(kind, folder)
    packed = batches.collate([rows[:4], rows[4:]], packed=True)
    assert packed.images is not None
    assert ("position_ids" in packed.images) == hasattr(model.model, "get_rope_index")
    want = apart(model, batches, rows, packed.num_targets)
    tower = [grad.norm() for name, grad in want.truth[1].items() if "vision" in name or "visual" in name]
    assert sum(map(float, tower)) > 0
    with streamtune.stream(model, schedule=SCHEDULES[schedule]):
        want.check(gradient(model, [packed], packed.num_targets))


def test_an_image_ends_with_its_row() -> None:
    """Images that end and begin a row are neighbours: their tokens do not see each other, within windows too."""
    model, generator = build("gemma3"), torch.Generator().manual_seed(2)
    lengths = (9, 8, 12)
    ids = [torch.randint(3, 100, (length,), generator=generator) for length in lengths]
    ids[0][-4:], ids[1][:4], ids[1][-4:], ids[2][:4] = IMAGE, IMAGE, IMAGE, IMAGE
    pixels = torch.randn(4, 3, 16, 16, generator=generator).split([1, 2, 1])

    def call(rows: list[int], packed: bool) -> MicroBatch:
        tokens = torch.cat([ids[row] for row in rows])[None]
        labels = torch.cat([torch.cat([ids[row][1:], torch.tensor([-100])]) for row in rows])[None]
        positions = torch.cat([torch.arange(lengths[row]) for row in rows])[None] if packed else None
        images = {"pixel_values": torch.cat([pixels[row] for row in rows]), "token_type_ids": (tokens == IMAGE).long()}
        labels = labels.masked_fill(labels == IMAGE, -100)
        return MicroBatch(tokens, torch.ones_like(tokens), labels, (), positions, images=images)

    packed = call([0, 1, 2], packed=True)
    alone = [call([row], packed=False) for row in range(3)]
    want = reference_of(model, lambda m: gradient(m, alone, packed.num_targets))
    for chunk_size in (5, 8, 64):
        with streamtune.stream(model, schedule=Schedule(chunk_size=chunk_size, head_chunk_size=9)) as handle:
            want.check(gradient(model, [packed], packed.num_targets), chunk_size)
            check_packed_images(handle, packed.inputs, [each.inputs for each in alone])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "idefics3"])
def test_a_step_of_several_batches(folder: Path, kind: str) -> None:
    """From a recipe: two micro-batches of two sequences, of unlike lengths and numbers of images."""
    save_checkpoint(kind, folder / "base")
    write_image_rows(folder, 11)
    write_recipe(folder, {**PACKED, "gradient_accumulation_steps": 2})
    built = build_run(load_recipe(Path("tiny.yaml"), []))
    step, rows = Steps(built.batches, built.recipe).next_step(), built.prepared.training
    assert len(step) == 2
    assert sum(len(batch.origins) for batch in step) > 4
    targets = sum(batch.num_targets for batch in step)
    found = gradient(built.model, list(step), targets)
    built.handle.remove()
    visited = {origin for batch in step for origin in batch.origins}
    chosen = [rows[row] for row in range(len(rows)) if rows[row].origin in visited]
    apart(built.model, built.batches, chosen, targets).check(found)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "idefics3"))]
)
def test_trained_packed_and_resumed(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(kind, folder / "base")
    write_image_rows(folder, 12)
    write_recipe(folder, {**PACKED, "val_size": 2, "eval_steps": 2, "freeze_vision_tower": False})
    assert run("--dry-run") == 0
    assert run() == 0
    assert run("--output-dir", "again", "--resume", "run/checkpoints/step-000002") == 0
    whole = losses("run")
    assert whole[-1] < whole[0]
    assert losses("again") == whole[2:]
    resumed, after = load_file("again/final/model.safetensors"), load_file("run/final/model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in after.items())
    assert run(command="verify") == 0, "the exit code is 1 if a gradient is not exact"
    assert "without images" not in capsys.readouterr().err
    assert run("--json", command="data") == 0
    assert json.loads(capsys.readouterr().out)["batches"]["packs"] > 0


def test_the_largest_sequence_is_planned(folder: Path) -> None:
    """A packed sequence has the images of all its rows."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, ROWS)
    write_recipe(folder, {**PACKED, "per_device_train_batch_size": 1})
    built = build_run(load_recipe(Path("tiny.yaml"), []))
    rows, packs = built.prepared.training, built.prepared.packs
    assert packs is not None
    most = max(sum(len(rows[row].images) for row in packs[pack]) for pack in range(len(packs)))
    assert most > 2
    found = built.batches.largest_images(1)
    assert found is not None
    assert len(found["image_grid_thw"]) == most


def test_positions_that_do_not_restart_are_refused(folder: Path) -> None:
    """The check before training compares every layer with the rows alone."""
    model, batches, rows = load("qwen3_vl", folder, 3)
    alone = [batches.collate([[row]], packed=False).inputs for row in rows]
    packed = batches.collate([rows], packed=True).inputs
    with streamtune.stream(model, chunk_size=16) as handle:
        check_packed_images(handle, packed, alone)
        for wrong in (packed["position_ids"][0], packed["position_ids"][[0, 0, 0, 0]]):
            with pytest.raises(UnsupportedModelError, match="packed rows with images differently") as caught:
                check_packed_images(handle, {**packed, "position_ids": wrong}, alone)
            assert caught.value.fix == "set packing: false"
        with pytest.raises(UnsupportedModelError, match="the input of Qwen3VLTextDecoderLayer"):
            check_packed_images(handle, {**packed, "pixel_values": packed["pixel_values"].flip(0)}, alone)


def test_a_family_with_other_axes_is_refused_by_name() -> None:
    """Hunyuan-VL numbers images too, along a fourth axis."""
    pytest.importorskip("transformers.models.hunyuan_vl", reason="transformers before 5.24")
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}}
    config = AutoConfig.for_model("hunyuan_vl", text_config=text)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    images = {"image_grid_thw": torch.zeros(0, 3, dtype=torch.long), "mm_token_type_ids": torch.zeros_like(ids)}
    with pytest.raises(ArgumentError, match="not packed for HunYuanVLForConditionalGeneration") as caught:
        models.packed_image_positions(model, ids, positions, images)
    assert caught.value.where == "packing"


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"finetuning_type": "qlora", "quantization": "int8"},
        {"engine": {**FIXED, "weights": "host"}},
        {"engine": {"schedule": "auto"}},
        {"dtype": "bfloat16"},
        {"batching": "tokens", "tokens_per_batch": 400},
    ],
    ids=lambda keys: " ".join(f"{key}={value}" for key, value in keys.items())[:40],
)
def test_other_ways_to_train(folder: Path, keys: dict[str, Any]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 12)
    write_recipe(folder, {**PACKED, **keys})
    assert run() == 0
    found = losses("run")
    assert found[-1] < found[0] + 0.2


@pytest.mark.full
def test_ranks(folder: Path) -> None:
    """Two ranks train on the packed rows of one, to the same loss."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 12)
    write_recipe(folder, {**PACKED, "train_batch_size": 2, "per_device_train_batch_size": 1})
    assert run("--output-dir", "one") == 0
    assert run("--output-dir", "two", "--nproc", "2") == 0
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
