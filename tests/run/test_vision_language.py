"""Text on checkpoints of a vision-language class: the language model is trained, the tower stays bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from streamtune import models
from streamtune.cli import main
from streamtune.errors import ArgumentError
from streamtune.models.model_class import frozen_modules
from tests.exactness.vision import IMAGE, MODELS
from tests.models.test_deferred import place_all
from tests.sft_kit import FIXED, QWEN3, run, write_recipe, write_rows

OTHERS = ("gemma3", "llava", "mistral3", "idefics3", "internvl", "qwen2_5_vl", "glm4v")
TOWER = ("vision", "visual", "projector", "connector")
RECIPE: dict[str, Any] = {
    "model_name_or_path": "base",
    "datasets": [{"path": "rows.jsonl"}],
    "chat_template": "chatml",
    "engine": FIXED,
    "max_length": 256,
    "learning_rate": 1.0e-2,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "output_dir": "run",
}
LORA: dict[str, Any] = {**RECIPE, "finetuning_type": "lora"}


def save_base(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a vision-language model in bf16, with a tokenizer and a processor's file; return the written tensors."""
    tokenizer = models.train_tokenizer(["Add it. return a + b"] * 8, vocab_size=300)
    sizes = {key: IMAGE + 180 if value == IMAGE else value for key, value in MODELS[kind].items()}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(kind, **sizes | {"text_config": {**sizes["text_config"], "vocab_size": 300, **ends}})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 16}\n')
    return load_file(folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 8)
    return tmp_path


def is_in_tower(name: str) -> bool:
    return any(part in name for part in TOWER)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_full_training_leaves_the_tower(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = save_base(kind, folder / "base")
    write_recipe(folder, RECIPE)
    assert run() == 0
    assert "only the language model is trained; frozen: model." in capsys.readouterr().err
    after = load_file("run/final/model.safetensors")
    assert after.keys() == before.keys()
    moved = {name for name in after if not torch.equal(after[name].float(), before[name].float())}
    assert moved == {name for name in after if not is_in_tower(name)}
    model, report = AutoModelForImageTextToText.from_pretrained("run/final", output_loading_info=True)
    assert not report["missing_keys"]
    assert type(model).__name__ == json.loads(Path("base/config.json").read_text())["architectures"][0]
    assert Path("run/final/preprocessor_config.json").read_bytes() == Path("base/preprocessor_config.json").read_bytes()


def test_adapters_are_on_the_language_model_and_merged(folder: Path) -> None:
    """The tower of llava has ``q_proj`` too."""
    before = save_base("llava", folder / "base")
    write_recipe(folder, LORA)
    assert run() == 0
    adapters = load_file("run/final/adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 7, "two layers of seven linear layers"
    assert all(".language_model." in name for name in adapters)
    loaded = AutoModelForImageTextToText.from_pretrained("base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(loaded, "run/final")
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 14
    with pytest.raises(SystemExit) as left:
        main(["export", "run", "out"])
    assert not left.value.code
    merged = load_file("out/model.safetensors")
    assert {name for name in merged if not torch.equal(merged[name], before[name])} == {
        name for name in before if "language_model" in name and "proj" in name
    }
    assert Path("out/preprocessor_config.json").is_file()


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"finetuning_type": "lora", "lora_target": ["q_proj", "v_proj"], "lora_exclude": ["v_proj"]},
        {"finetuning_type": "lora", "adapter_type": "ia3"},
        {"finetuning_type": "lora", "added_tokens": ["<x>"]},
        {"finetuning_type": "lora", "packing": True},
        {"finetuning_type": "qlora", "quantization": "int8"},
        {"finetuning_type": "qlora", "quantization": "nf4"},
        {"added_tokens": ["<x>"], "optim": "badam"},
        {"engine": {**FIXED, "weights": "host"}, "optim_in_backward": True},
    ],
    ids=lambda keys: " ".join(f"{key}={value}" for key, value in keys.items())[:40],
)
def test_other_ways_to_train(folder: Path, keys: dict[str, Any]) -> None:
    before = save_base("llava", folder / "base")
    write_recipe(folder, {**RECIPE, **keys})
    assert run() == 0
    if "finetuning_type" not in keys:
        after = load_file("run/final/model.safetensors")
        tower = [name for name in after if is_in_tower(name)]
        assert tower
        assert all(torch.equal(after[name].float(), before[name].float()) for name in tower)
        return
    adapters = load_file("run/final/adapter_model.safetensors")
    assert adapters
    assert not any(is_in_tower(name) for name in adapters)
    if "lora_exclude" in keys:
        assert not any("v_proj" in name for name in adapters)


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_the_tower_is_not_quantised(folder: Path, quantization: str) -> None:
    save_base("llava", folder / "base")
    options = models.ModelOptions("bfloat16", quantization=quantization)
    for model in (models.load_model("base", options), models.build_meta_model("base", options)):
        kinds = {name: type(x.weight).__name__ for name, x in model.named_modules() if name.endswith("q_proj")}
        assert {kind for name, kind in kinds.items() if is_in_tower(name)} == {"Parameter"}
        assert {kind for name, kind in kinds.items() if not is_in_tower(name)} <= {"Int8Tensor", "Params4bit"}


def test_weights_that_come_later_are_the_same(folder: Path) -> None:
    save_base("qwen3_vl", folder / "base")
    plain, later = models.load_model("base"), models.load_model_deferred("base")
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in later.named_parameters() if parameter.requires_grad}
    assert trained
    assert not any(is_in_tower(name) for name in trained)
    place_all(later)
    later.load_state_dict(later.state_dict())
    assert all(torch.equal(x, later.state_dict()[name]) for name, x in plain.state_dict().items())


def test_the_written_class_decides_where_there_are_two(tmp_path: Path) -> None:
    """Families such as qwen3_5 have a class for text, and one for images and text, of the same configuration."""
    text = {key: value for key, value in QWEN3.items() if key != "model_type"}
    text |= {"vocab_size": 64, "layer_types": ["full_attention"] * 2}
    tower = {**MODELS["qwen3_vl"]["vision_config"], "deepstack_visual_indexes": []}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=tower)
    for auto_class in (AutoModelForImageTextToText, AutoModelForCausalLM):
        made = auto_class.from_config(config)
        made.save_pretrained(tmp_path / "m")
        model = models.load_model(str(tmp_path / "m"))
        assert type(model) is type(made)
        assert bool(frozen_modules(model)) == (auto_class is AutoModelForImageTextToText)
        assert all(x.requires_grad != is_in_tower(name) for name, x in model.named_parameters())


@pytest.mark.skipif("molmo2" not in CONFIG_MAPPING, reason="transformers has no Molmo 2")
def test_a_family_that_needs_token_types_is_named(folder: Path) -> None:
    config = AutoConfig.for_model("molmo2")
    config.save_pretrained(folder / "base")
    with pytest.raises(ArgumentError, match="only with the type of each token"):
        models.build_meta_model("base")


@pytest.mark.full
@pytest.mark.parametrize("command", ["dpo", "grpo", "plan", "verify", "probe-max-len"])
def test_the_other_commands(folder: Path, command: str) -> None:
    save_base("qwen3_vl", folder / "base")
    recipe = {key: value for key, value in LORA.items() if key not in ("datasets", "max_length")}
    rows = [{"prompt": f"Add {n}.", "chosen": "return a", "rejected": "b"} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text("def short(completions, **more):\n    return [-len(x) for x in completions]\n")
    own: dict[str, dict[str, Any]] = {
        "dpo": {"datasets": [{"path": "pairs.jsonl"}], "max_length": 256},
        "grpo": {"datasets": [{"path": "pairs.jsonl"}], "num_generations": 2, "max_prompt_length": 64,
                 "max_completion_length": 4, "reward_funcs": ["rewards.py:short"]},
    }  # fmt: skip
    write_recipe(folder, {**recipe, **own.get(command, {"datasets": [{"path": "rows.jsonl"}], "max_length": 256})})
    arguments = {"grpo": ["--allow-code"], "probe-max-len": ["--to", "128"]}.get(command, [])
    assert run(*arguments, command=command) == 0
