"""Adapters in the vision tower and the projector, which a recipe names: exact, resumed, saved and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import streamtune
from streamtune.cli import main
from streamtune.engine import decoder_layers
from streamtune.engine.image_tower import install_image_tower
from streamtune.errors import ArgumentError
from streamtune.models import AdapterSpec, add_adapters, add_lora
from streamtune.models.model_class import frozen_modules, is_inside
from streamtune.plan.simulate.image_inputs import measure_images
from streamtune.plan.simulate.memory import LiveBytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.programs.export import export
from tests.exactness.families import gradients, reference
from tests.exactness.test_adapters import moved
from tests.sft_kit import run, write_recipe
from tests.vision_kit import save_checkpoint, write_image_rows

from .test_image_rows import RECIPE, SCHEDULES, folder, losses
from .test_packed_images import load

__all__ = ["folder"]

TOWERS = {
    "qwen3_vl": ["all-linear", "visual.*qkv", "visual.merger.*"],
    "gemma3": ["q_proj", "vision_tower.encoder.*.(q_proj|fc1)"],
    "idefics3": ["all-linear", "vision_model.*", "connector.*"],
}
"""A recipe's ``lora_target`` that names layers of the language model and of the tower, by family."""
IMAGE_PARTS = ("visual", "vision", "connector", "projector")


def targets(model: Any) -> set[str]:
    """Names of the adapted layers, with a star for each number."""
    base = model.get_base_model()
    names = (name for name, module in base.named_modules() if hasattr(module, "base_layer"))
    return {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}


def build(kind: str, where: Path) -> Any:
    save_checkpoint(kind, where / "base")
    return AutoModelForImageTextToText.from_pretrained("base").train()


LANGUAGE = "model.language_model.layers.*"
TOWER = "model.vision_tower.encoder.layers.*"


@pytest.mark.parametrize(
    ("target", "want"),
    [
        (["q_proj"], {f"{LANGUAGE}.self_attn.q_proj"}),
        (["layers.*.mlp.fc1"], {f"{TOWER}.mlp.fc1"}),
        (["fc1"], {f"{TOWER}.mlp.fc1", "model.vision_tower.head.mlp.fc1"}),
        (["vision_tower.*q_proj"], {f"{TOWER}.self_attn.q_proj"}),
        (["q_proj", "vision_tower.*v_proj"], {f"{LANGUAGE}.self_attn.q_proj", f"{TOWER}.self_attn.v_proj"}),
        (["(q|k)_proj"], {f"{LANGUAGE}.self_attn.q_proj", f"{LANGUAGE}.self_attn.k_proj"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_name_takes_the_language_model_or_else_the_tower(folder: Path, target: list[str], want: set[str]) -> None:
    model = add_lora(build("gemma3", folder), r=2, target=target)
    assert targets(model) == want
    assert not [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]


def test_all_linear_is_the_language_model_and_names_add_to_it(folder: Path) -> None:
    alone = targets(add_lora(build("qwen3_vl", folder), r=2))
    assert not [name for name in alone if "visual" in name]
    spec = AdapterSpec(r=2, target=["all-linear", "visual.*"], exclude=["visual.*qkv", "down_proj"])
    more = targets(add_adapters(build("qwen3_vl", folder), spec))
    assert {name for name in more if "visual" not in name} == {name for name in alone if "down_proj" not in name}
    assert {name.rpartition(".")[2] for name in more if "visual" in name} == {"proj", "linear_fc1", "linear_fc2"}
    for wrong in ("visual.*wkv", "visual.qkv"):
        with pytest.raises(ArgumentError, match="has no linear layer called") as caught:
            add_lora(build("qwen3_vl", folder), r=2, target=["q_proj", wrong])
        assert caught.value.where == "lora_target"


PARTS = {
    "qwen3_vl": ("visual.blocks.*", ("visual.merger.", "visual.deepstack_merger_list.")),
    "gemma3": ("vision_tower.*", ()),
    "idefics3": ("vision_model.*", ("connector.",)),
    "glm4v": ("visual.blocks.*", ("visual.merger.",)),
}
"""For each family: names of the tower's linear layers, and beginnings of names of the projector's linear layers."""


@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.full) for kind in PARTS if kind != "qwen3_vl")]
)
def test_all_layers_of_a_part_for_images(folder: Path, kind: str) -> None:
    tower, projector = PARTS[kind]
    language = targets(add_lora(build(kind, folder), r=2))
    assert targets(add_lora(build(kind, folder), r=2, target=["all-linear", "vision-tower"])) - language == {
        name
        for name in targets(add_lora(build(kind, folder), r=2, target=[tower]))
        if not any(p in name for p in projector)
    }
    if not projector:
        with pytest.raises(ArgumentError, match="has no linear layer in a vision projector"):
            add_lora(build(kind, folder), r=2, target=["vision-projector"])
        return
    alone = targets(add_lora(build(kind, folder), r=2, target=["vision-projector"]))
    assert alone
    assert all(any(f".{part}" in name for part in projector) for name in alone)
    for part in projector:
        assert any(f".{part}" in name for name in alone)


@pytest.mark.quick("qwen3_vl-lora-chunks")
@pytest.mark.parametrize("schedule", ["chunks", "host"])
@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3", "oft"])
@pytest.mark.parametrize("kind", TOWERS)
def test_gradients_of_adapters_in_the_tower(kind: str, adapter: str, schedule: str, folder: Path) -> None:
    """A batch of rows with one image, two and none; three ways; packed too."""
    model, batches, rows = load(kind, folder, 3)
    spec = AdapterSpec(kind=adapter, r=2, block_size=4, target=TOWERS[kind])
    model = moved(add_adapters(model, spec)).train()
    batch = batches.collate([[row] for row in rows], packed=False)
    inputs = {**batch.inputs, "labels": batch.shift_labels, "shift_labels": batch.shift_labels}
    want = reference(model, inputs)
    in_tower = {name: grad for name, grad in want.truth[1].items() if any(part in name for part in IMAGE_PARTS)}
    assert in_tower
    assert all(bool(grad.any()) for grad in in_tower.values())
    assert all(not p.requires_grad for name, p in model.named_parameters() if "base_layer" in name)
    with streamtune.stream(model, schedule=SCHEDULES[schedule]):
        want.check(gradients(model, inputs))


@pytest.mark.parametrize("target", [["visual.*"], ["visual.merger.*"]], ids=" ".join)
def test_adapters_in_the_tower_alone_are_planned_and_trained(folder: Path, target: list[str]) -> None:
    """The simulated step has no images, and the loss depends on trained weights through images only."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 3)
    write_recipe(folder, {**KEYS, "lora_target": target, "max_steps": 1, "engine": {}})
    assert run("--device", "h100", "--host-memory", "64GiB", command="plan") == 0
    assert run() == 0
    assert any(
        weight.any() for name, weight in load_file("run/final/adapter_model.safetensors").items() if "_B" in name
    )


KEYS: dict[str, Any] = {**RECIPE, "finetuning_type": "lora", "lora_r": 4, "oft_block_size": 4, "save_steps": 2}


@pytest.mark.full
def test_an_export_whose_tower_is_wrong_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export leaves out the tower's adapters, which are large. Only rows with images show the difference."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 3)
    write_recipe(folder, {**KEYS, "lora_target": ["visual.*"], "learning_rate": 0.05, "max_steps": 4})
    assert run() == 0
    with pytest.raises(SystemExit) as left:
        main(["export", "run", "right"])
    assert not left.value.code
    shown = capsys.readouterr()
    assert "with images" in shown.out + shown.err
    own = load_file("base/model.safetensors")
    real = export.write_merged

    def leave_out(model: Any, tokenizer: Any, folder: Path, **options: Any) -> None:
        real(model, tokenizer, folder, **options)
        written = load_file(folder / "model.safetensors")
        save_file(written | {name: own[name] for name in written if "visual" in name}, folder / "model.safetensors")

    monkeypatch.setattr(export, "write_merged", leave_out)
    with pytest.raises(SystemExit) as left:
        main(["export", "run", "wrong"])
    assert left.value.code
    assert "the written model differs from the trained model" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if number else kind for number, kind in enumerate(TOWERS)]
)
def test_trained_resumed_saved_and_merged(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapters load with peft and give the logits of the merged model, with images."""
    model, batches, rows = load(kind, folder, 6)
    write_recipe(folder, {**KEYS, "lora_target": TOWERS[kind]})
    assert run() == 0
    assert "adapters are trained in model." in capsys.readouterr().err
    whole = losses("run")
    assert whole[-1] < whole[0]
    assert run("--output-dir", "again", "--resume", "run/checkpoints/step-000002") == 0
    assert losses("again") == whole[2:]
    adapters, resumed = (load_file(f"{each}/final/adapter_model.safetensors") for each in ("run", "again"))
    assert adapters.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], value) for name, value in adapters.items())
    modules = frozen_modules(model)
    assert run(command="verify") == 0, "the exit code is 1 if a gradient is not exact"
    in_tower = [name for name in adapters if is_inside(name.removeprefix("base_model.model."), modules)]
    assert in_tower
    assert all(bool(adapters[name].any()) for name in in_tower), "also those that begin with zeros"

    inputs = batches.collate([[row] for row in rows[:3]], packed=False).inputs
    loaded = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained("base"), "run/final").eval()
    with torch.no_grad():
        want, plain = loaded(**inputs).logits, model.eval()(**inputs).logits
        with streamtune.stream(loaded, schedule=SCHEDULES["chunks"]):
            torch.testing.assert_close(loaded(**inputs).logits, want, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(want, plain, atol=1e-3)
        with pytest.raises(SystemExit) as left:
            main(["export", "run", "out"])
        assert not left.value.code
        merged = AutoModelForImageTextToText.from_pretrained("out").eval()
        torch.testing.assert_close(merged(**inputs).logits, want, rtol=1e-4, atol=1e-4)
    write_recipe(folder, {**RECIPE, "finetuning_type": "lora", "adapter_name_or_path": "run/final"})
    capsys.readouterr()
    assert run("--output-dir", "more") == 0
    assert "adapters are trained in model." in capsys.readouterr().err
    assert losses("more")[0] < whole[0]
    text = {"messages": [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": "red"}]}
    Path("rows.jsonl").write_text((json.dumps(text) + "\n") * 4)
    assert run("--output-dir", "text", "--set", "weight_decay=0.1") == 0
    assert "no row has images, so the adapters in model." in capsys.readouterr().err
    after = load_file("text/final/adapter_model.safetensors")
    assert all(torch.equal(after[name], adapters[name]) == (name in in_tower) for name in after)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"adapter_type": "dora"},
        {"adapter_type": "pissa"},
        {"adapter_type": "lora_ga"},
        {"adapter_type": "ia3"},
        {"adapter_type": "paca"},
        {"finetuning_type": "qlora", "quantization": "int8"},
        {"finetuning_type": "qlora", "adapter_type": "loftq", "quantization": "int8"},
        {"packing": True, "lora_dropout": 0.1},
        {"engine": {**RECIPE["engine"], "weights": "host"}},
        {"dtype": "bfloat16"},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    ],
    ids=lambda keys: " ".join(f"{key}={value}" for key, value in keys.items())[:40],
)
def test_other_ways_to_train(folder: Path, keys: dict[str, Any]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 6)
    write_recipe(folder, {**KEYS, "lora_target": TOWERS["qwen3_vl"], **keys})
    assert run() == 0
    found = losses("run")
    assert found[-1] < found[0] + 0.2
    saved = load_file("run/final/adapter_model.safetensors")
    assert [name for name in saved if "visual" in name]


def test_the_tower_is_planned_as_trained(folder: Path) -> None:
    """Byte for byte what the tower keeps for the backward of its adapters."""
    model, batches, rows = load("qwen3_vl", folder, 3)
    batch = batches.collate([[row] for row in rows], packed=False)
    images = batch.images or {}
    model.requires_grad_(False)
    frozen = measure_images(meta_copy(model), images, device="cpu")
    model = add_lora(model, r=2, target=TOWERS["qwen3_vl"])
    planned = measure_images(meta_copy(model), images, device="cpu")
    assert planned.held > 2 * frozen.held
    tower = install_image_tower(model.get_base_model(), decoder_layers(model.get_base_model()))
    assert tower is not None
    assert tower.is_trained
    given = {name: x for name, x in images.items() if name in tower.argument_names}
    with LiveBytes(model, []) as live:
        results = tower(**given)
        held = live.total
    del results
    extra = sum(x.nbytes for x in images.values()) - images["pixel_values"].nbytes
    assert planned.held == held + extra


@pytest.mark.full
def test_the_start_says_what_is_adapted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 3)
    write_recipe(folder, {**KEYS, "max_steps": 1})
    assert run("--dry-run") == 0
    shown = capsys.readouterr().err
    assert "only the language model is trained; frozen: model.visual (lora_target: [all-linear, vision-tower]" in shown
