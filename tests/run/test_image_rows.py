"""Recipes on rows with images: the tower computes, the language model is trained, exactly and resumably."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import streamtune
from streamtune import Schedule, data
from streamtune.recipe.loader import load_recipe
from streamtune.tasks.preference import PreferenceBatches
from streamtune.tasks.sft import Batches
from tests.exactness.families import gradients, reference
from tests.sft_kit import FIXED, QWEN3, run, write_recipe, write_rows
from tests.vision_kit import KINDS, draw, save_checkpoint, write_image_rows

OTHERS = ("gemma3", "idefics3")
TOWER = ("vision", "visual", "projector", "connector")
RECIPE: dict[str, Any] = {
    "model_name_or_path": "base",
    "datasets": [{"path": "rows.jsonl"}],
    "engine": FIXED,
    "max_length": 128,
    "learning_rate": 1.0e-2,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "output_dir": "run",
}
SCHEDULES = {
    "chunks": Schedule(chunk_size=13, head_chunk_size=9),
    "two levels": Schedule(chunk_size=20, head_chunk_size=9, levels=2, segment_size=1),
    "host": Schedule(chunk_size=20, head_chunk_size=9, offload="host"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(run_folder: str) -> list[float]:
    records = map(json.loads, Path(run_folder, "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.quick("qwen3_vl")
@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("gemma3", "idefics3"))]
)
def test_trained_and_resumed(folder: Path, kind: str) -> None:
    save_checkpoint(kind, folder / "base")
    write_image_rows(folder, 6)
    write_recipe(folder, {**RECIPE, "save_steps": 2})
    assert run() == 0
    before, after = load_file("base/model.safetensors"), load_file("run/final/model.safetensors")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved
    assert not [name for name in moved if any(part in name for part in TOWER)]
    assert Path("run/final/preprocessor_config.json").read_bytes() == Path("base/preprocessor_config.json").read_bytes()
    whole = losses("run")
    assert whole[-1] < whole[0]
    assert run("--output-dir", "again", "--resume", "run/checkpoints/step-000002") == 0
    assert losses("again") == whole[2:]
    resumed = load_file("again/final/model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in after.items())


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_batch_with_images(kind: str, schedule: str, folder: Path) -> None:
    """One image, two and none in a batch; of all parameters, the tower's included; three ways."""
    save_checkpoint(kind, folder / "base")
    write_image_rows(folder, 3)
    tokenizer, images = AutoTokenizer.from_pretrained("base"), data.ImageOptions("base", "held")
    prepared = data.prepare([data.Source("rows.jsonl")], tokenizer, data.DataOptions(max_length=512, images=images))
    batch = Batches(prepared, tokenizer, images=images).training_batch([0, 1, 2])
    model = AutoModelForImageTextToText.from_pretrained("base").train()
    inputs = {**batch.inputs, "labels": batch.shift_labels, "shift_labels": batch.shift_labels}
    want = reference(model, inputs)
    with streamtune.stream(model, schedule=SCHEDULES[schedule]):
        want.check(gradients(model, inputs))


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"finetuning_type": "lora"},
        {"finetuning_type": "qlora", "quantization": "int8"},
        {"gradient_accumulation_steps": 2, "dataset_num_proc": 2, "dataloader_num_workers": 2},
        {"batching": "tokens", "tokens_per_batch": 200},
        {"streaming": True, "overlength": "drop"},
        {"val_size": 2, "eval_steps": 2},
        {"dtype": "bfloat16"},
        {"engine": {**FIXED, "weights": "host"}, "optim_in_backward": True},
    ],
    ids=lambda keys: " ".join(f"{key}={value}" for key, value in keys.items())[:40],
)
def test_other_ways_to_train(folder: Path, keys: dict[str, Any]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 6)
    write_recipe(folder, {**RECIPE, **keys})
    assert run() == 0
    found = losses("run")
    assert found[-1] < found[0] + 0.2


PROJECTORS = ("projector", "connector", "merger")


@pytest.mark.parametrize(
    ("kind", "tower", "projector"),
    [
        ("qwen3_vl", True, False),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                ("qwen3_vl", False, True),
                ("qwen3_vl", True, True),
                ("gemma3", False, True),
                ("llava", True, True),
            )
        ),
    ],
)
def test_the_tower_is_trained(folder: Path, kind: str, tower: bool, projector: bool) -> None:
    """Only the weights that the recipe chooses change; a resumed run ends with the same weights, bit for bit."""
    save_checkpoint(kind, folder / "base")
    write_image_rows(folder, 6)
    keys = {"freeze_vision_tower": not tower, "freeze_projector": not projector, "trainable_layers": "last 1"}
    write_recipe(folder, {**RECIPE, **keys, "save_steps": 2})
    assert run() == 0
    before, after = load_file("base/model.safetensors"), load_file("run/final/model.safetensors")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    in_projector = {name for name in after if any(part in name for part in PROJECTORS)}
    in_tower = {name for name in after if any(part in name for part in TOWER)} - in_projector
    assert bool(moved & in_tower) == tower
    assert bool(moved & in_projector) == projector
    assert not any(".layers.0." in name for name in moved - in_tower), "of the language model, the last layer"
    assert run("--output-dir", "again", "--resume", "run/checkpoints/step-000002") == 0
    resumed = load_file("again/final/model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in after.items())


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"freeze_projector": False, "finetuning_type": "lora"}, "'finetuning_type: lora' freezes all of them"),
        ({"freeze_vision_tower": False, "model_name_or_path": "text"}, "and Qwen3ForCausalLM has none"),
    ],
)
def test_no_tower_to_train(folder: Path, keys: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_rows(folder, 3)
    Qwen3ForCausalLM(Qwen3Config(**QWEN3, vocab_size=400)).save_pretrained("text")
    AutoTokenizer.from_pretrained("base").save_pretrained("text")
    write_recipe(folder, {**RECIPE, **keys})
    assert run() == 2
    assert what in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(("key", "changes"), [("freeze_vision_tower", False), ("freeze_projector", True)])
def test_a_parameter_beside_all_modules_is_of_the_projector(folder: Path, key: str, changes: bool) -> None:
    """LLaVA-NeXT's ``image_newline``, which was trained with every recipe."""
    save_checkpoint("llava_next", folder / "base")
    write_image_rows(folder, 6)
    write_recipe(folder, {**RECIPE, "max_length": 512})
    before, name = load_file("base/model.safetensors"), "image_newline"
    assert run() == 0
    assert torch.equal(load_file("run/final/model.safetensors")[name], before[name])
    assert run("--set", f"{key}=false", "--output-dir", "other") == 0
    assert torch.equal(load_file("other/final/model.safetensors")[name], before[name]) is not changes


@pytest.mark.slow  # test_packed_images.py has a full test of ranks
def test_ranks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks train on the rows of one, to the same loss. ZeRO-3 is refused: it would gather on one rank only."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 6)
    write_recipe(folder, {**RECIPE, "train_batch_size": 2, "per_device_train_batch_size": 1})
    assert run("--output-dir", "one") == 0
    assert run("--output-dir", "two", "--nproc", "2") == 0
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    assert run("--output-dir", "three", "--nproc", "2", "--set", "deepspeed=zero3") == 2
    assert "ZeRO-3 gathers the vision tower's weights only if all ranks have images" in capfd.readouterr().err


@pytest.mark.slow  # tests/distributed/test_equality.py has a full test of the gradients
@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ({"freeze_vision_tower": False, "freeze_projector": False}, ()),
        ({"finetuning_type": "lora", "lora_target": ["all-linear", "visual.*qkv"]}, ("--set", "fsdp=true")),
    ],
    ids=["tower", "adapters"],
)
def test_the_tower_is_trained_on_ranks(
    folder: Path, keys: dict[str, Any], ranks: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """To the losses of one rank; one rank goes on from a checkpoint of two. DeepSpeed is refused."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 6)
    divided = {"train_batch_size": 2, "per_device_train_batch_size": 1, "save_steps": 2}
    write_recipe(folder, {**RECIPE, **keys, **divided, "learning_rate": 1.0e-3})
    assert run("--output-dir", "one") == 0
    assert run("--output-dir", "two", "--nproc", "2", *ranks) == 0
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    assert run("--output-dir", "again", "--resume", "two/checkpoints/step-000002") == 0
    assert losses("again") == pytest.approx(losses("one")[2:], rel=1e-4)
    weights = sorted(Path("one/final").glob("*model.safetensors"))[0].name
    one, two = (load_file(f"{name}/final/{weights}") for name in ("one", "two"))
    assert all(torch.allclose(two[name], value, atol=2e-4) for name, value in one.items())
    before = load_file("base/model.safetensors")
    tower = [value for name, value in two.items() if "visual" in name and ("lora_B" in name or name in before)]
    assert any(bool(value.any()) for value in tower)
    assert run("--output-dir", "three", "--nproc", "2", "--set", "deepspeed=zero2") == 2
    assert "DeepSpeed reduces gradients in the order in which they are computed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"reasoning": "per_turn", "per_device_train_batch_size": 1}, "do not share their beginning"),
        pytest.param(
            {"batching": "buckets", "tokens_per_batch": 512}, "rows with images are not cut", marks=pytest.mark.full
        ),
        ({"freeze_vision_tower": False, "datasets": [{"path": "text.jsonl"}]}, "no row has images, so model.visual"),
    ],
)
def test_refused_with_images(folder: Path, keys: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 3)
    text = {"messages": [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": "red"}]}
    Path("text.jsonl").write_text(json.dumps(text) + "\n")
    write_recipe(folder, {**RECIPE, **keys})
    assert run() == 2
    assert what in capsys.readouterr().err


PAIRS: dict[str, Any] = {**RECIPE, "objective": "dpo", "loss_type": "sigmoid", "beta": 0.5}


def write_pairs(folder: Path, *, with_prompt: bool) -> None:
    """Four pairs on two images and two questions, one pair of text."""
    rows = []
    for number, colour in enumerate(("red", "green", "blue", "red")):
        image = {"type": "image"} if number else {"type": "text", "text": "No picture. "}
        prompt = [{"role": "user", "content": [image, {"type": "text", "text": "Which colour?"}]}]
        chosen, rejected = ([{"role": "assistant", "content": each}] for each in (colour, "black and white"))
        row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if not with_prompt:
            row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
        if number:
            row["images"] = [draw(folder / f"{colour}.png", colour, (20 + 8 * number, 16)).name]
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_row_with_images_is_not_divided(folder: Path, objective: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before any rank starts."""
    save_checkpoint("qwen3_vl", folder / "base")
    if objective == "dpo":
        write_pairs(folder, with_prompt=True)
    else:
        write_image_rows(folder, 3)
    write_recipe(folder, {**(PAIRS if objective == "dpo" else RECIPE), "sequence_parallel_size": 2})
    assert run(command="data") == 2
    assert "rows with images are not divided, but the recipe has sequence_parallel_size: 2" in capsys.readouterr().err


MORE = [pytest.param(each, marks=pytest.mark.full) for each in KINDS if each != "qwen3_vl"]


@pytest.mark.parametrize("kind", ["qwen3_vl", *MORE])
def test_pairs_with_images(folder: Path, kind: str) -> None:
    """The log-probs of each answer equal the plain model's log-probs on the row with its image."""
    save_checkpoint(kind, folder / "base")
    options = data.ImageOptions("base", "held")
    tokenizer, limits = AutoTokenizer.from_pretrained("base"), data.DataOptions(max_length=512, images=options)
    source = data.Source("rows.jsonl", type="preference")
    write_pairs(folder, with_prompt=False)
    without = data.prepare_preferences([source], tokenizer, limits)
    write_pairs(folder, with_prompt=True)
    prepared = data.prepare_preferences([source], tokenizer, limits)
    assert without.fingerprint == prepared.fingerprint
    assert [len(tree.images) for tree in prepared.training] == [0, 1, 1, 1]
    recipe: Any = load_recipe(write_recipe(folder, PAIRS)).recipe
    processor, pad = data.ImageProcessor(options, tokenizer), tokenizer.pad_token_id
    batches = PreferenceBatches(prepared, recipe, pad_token_id=pad, share=False, has_baseline=False, images=processor)
    batch = batches.training_batch(range(4))
    model = AutoModelForImageTextToText.from_pretrained("base").double().eval()
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in batch.inputs.items()}
    with torch.no_grad():
        logits = model(**wide).logits.log_softmax(-1)
        want = logits.gather(-1, batch.shift_labels.clamp(min=0)[..., None])[..., 0].flatten()[batch.flat_index_K]
        with streamtune.stream(model, schedule=SCHEDULES["chunks"]) as handle:
            found = batch.gather_targets(handle.logprobs(targets=batch.shift_labels, **wide).logprobs)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [{}, {"precompute_ref_log_probs": True}, {"loss_type": "kto"}, {"finetuning_type": "lora"}, {"val_size": 1}],
    ids=str,
)
def test_dpo_with_images(folder: Path, keys: dict[str, Any]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_pairs(folder, with_prompt=True)
    write_recipe(folder, {**PAIRS, **keys})
    assert run(command="dpo") == 0
    found = losses("run")
    if keys.get("loss_type") != "kto":
        assert found[0] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1] < found[0]


def test_images_of_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_recipe(folder, RECIPE)
    device = ("--device", "h100", "--host-memory", "64GiB", "--json")
    held = []
    capsys.readouterr()  # a library may print while it saves
    for count in (1, 3):
        assert run(*device, "--images", str(count), "--image-size", "60x48", command="plan") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["images"] == count
        held.append(document["terms"]["images"])
    assert held[1] == 3 * held[0] > 0
    for arguments, problem in {
        ("--images", "20", "--image-size", "60x48"): "20 images of 60x48 pixels have 240 tokens, and a row has 128",
        ("--images", "2", "--image-size", "60"): "'60' is not a size: WIDTHxHEIGHT, at most 67 million pixels",
        ("--image-size", "99999x99999"): "'99999x99999' is not a size",
    }.items():
        assert run(*device, *arguments, command="plan") == 2
        assert problem in capsys.readouterr().err
    write_recipe(folder, {**RECIPE, "model_name_or_path": None, "model": {"init": QWEN3}, "tokenizer": {"train": {}}})
    assert run(*device, "--images", "2", command="plan") == 2
    assert "rows of this recipe have no images" in capsys.readouterr().err


@pytest.mark.full
def test_rows_are_shown_with_their_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_image_rows(folder, 3)
    write_recipe(folder, RECIPE)
    assert run("--html", "page.html", command="data") == 0
    shown = capsys.readouterr().out
    assert "images: 1-0.png (21 x 16), 1-1.png (27 x 16)" in shown
    page = Path("page.html").read_text()
    assert page.count('<figure><img src="data:image/jpeg;base64,') == 6, (
        "each row stands twice: by its length, as a sample"
    )
    assert page.count("<figcaption>1-1.png, 27 x 16</figcaption>") == 2
    assert run("--json", command="data") == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(each["images"]) for each in found["samples"]] == [1, 2, 0]
    assert {each["lost_if_truncated"] for each in found["lengths"]} == {None}  # rows with images are never cut


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["gemma3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_vl", "llava"))]
)
def test_verify_with_images(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(kind, folder / "base")
    write_image_rows(folder, 3)
    write_recipe(folder, RECIPE)
    assert run(command="verify") == 0, "the exit code is 1 if a gradient is not exact"
    shown = capsys.readouterr()
    assert "without images" not in shown.err
    assert run("--length", "20", command="verify") == 0
    assert "the rows that are compared are without images" in capsys.readouterr().err
    for loss_type in ("sigmoid", "kto"):
        write_pairs(folder, with_prompt=True)
        write_recipe(folder, {**PAIRS, "loss_type": loss_type})
        assert run(command="verify") == 0
        assert "without images" not in capsys.readouterr().err
