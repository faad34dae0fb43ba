"""Folders that transformers 4 reads: the old names beside the new ones, and what version 4 itself makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import versions
from tests.sft_kit import FIXED, QWEN3, run, write_recipe, write_rows
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from streamtune.models import RopeChange, SavedTokenizer, save_pretrained, train_tokenizer
from streamtune.models.transformers4 import with_transformers4_names
from streamtune.programs.export.export import ExportOptions, export_model

TINY: dict[str, Any] = {**QWEN3, "max_position_embeddings": 64}
del TINY["model_type"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "mistral": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50000.0,
                                    "original_max_position_embeddings": 16}},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000000.0}}},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 70000.0, "partial_rotary_factor": 0.5}},
    "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 70000.0, "partial_rotary_factor": 0.5}},
    "phi3": {"original_max_position_embeddings": 16, "pad_token_id": 0, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 30000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "qwen3_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 600000.0}, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip
"""Configurations with positions that no default has; of most the name or the place changed between 4 and 5."""


def make(family: str, folder: Path) -> Any:
    """Save a model in ``folder/base`` and return it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, "vocab_size": 300, **MODELS[family]})
    model = AutoModelForCausalLM.from_config(config).eval()
    save_pretrained(model, SavedTokenizer(train_tokenizer(["one two"] * 8, vocab_size=300)), folder)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_the_names_of_both_are_written_and_this_version_reads_the_same(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path)
    written, plain = json.loads((tmp_path / "config.json").read_text()), json.loads(model.config.to_json_string())
    assert written.keys() >= plain.keys()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text(json.dumps(plain))
    folders = (tmp_path / "plain", tmp_path)
    of_plain, of_both = (json.loads(AutoConfig.from_pretrained(each).to_json_string()) for each in folders)
    for read in (of_plain, of_both):  # where a scaling is read, a share of 1 is filled in, and the old name stays
        rope = read.get("rope_parameters", {})
        rope.pop("type", None)
        if rope.get("partial_rotary_factor") == 1.0:
            del rope["partial_rotary_factor"]
    assert {key: of_both[key] for key in of_plain} == of_plain, "this version reads what it would read without them"
    assert written["torch_dtype"] == "float32"
    if family == "qwen3_moe":
        assert written["num_experts"] == 4
    if "rope_parameters" not in MODELS[family]:
        return
    rope = plain["rope_parameters"]
    full = rope.get("full_attention", rope)
    theta = {"gpt_neox": "rotary_emb_base"}.get(family, "rope_theta")
    assert written[theta] == full["rope_theta"]
    assert ("rope_scaling" in written) == (full["rope_type"] != "default")
    if family == "gemma3_text":
        assert written["rope_local_base_freq"] == 20000.0


def test_infinities_and_kinds_of_layers_have_the_old_form(tmp_path: Path) -> None:
    config = AutoConfig.for_model("granitemoehybrid", num_hidden_layers=2, layer_types=["mamba", "attention"])
    found = with_transformers4_names(json.loads(config.to_json_string()))
    assert found["layer_types"] == ["mamba", "attention"]
    assert found["time_step_limit"] == [0.0, float("inf")]
    (tmp_path / "config.json").write_text(json.dumps(found))
    read = AutoConfig.from_pretrained(tmp_path)
    assert (read.layer_types, read.time_step_limit) == (config.layer_types, config.time_step_limit)


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_positions_that_a_recipe_extends_are_read_back(family: str, kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family)
    RopeChange({"rope_type": kind, "factor": 4.0}, theta=5e6, length=7).apply(config)
    text = with_transformers4_names(json.loads(config.to_json_string()))
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


NESTED = ("gemma4_text", "lfm3", "dory", "laguna", "mellum", "mimo_v2_flash")
"""Families with parameters for each kind of layer, which an old ``rope_scaling`` would replace."""


@pytest.mark.parametrize("kind", [None, "yarn", "llama3", "dynamic"])
@pytest.mark.parametrize("family", [name for name in NESTED if name in CONFIG_MAPPING])
def test_parameters_of_each_kind_of_layer_are_read_back(family: str, kind: str | None, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family)
    if kind is not None:
        RopeChange({"rope_type": kind, "factor": 4.0}, theta=5e6, length=7).apply(config)
    text = json.loads(config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(text))
    plain = AutoConfig.from_pretrained(tmp_path).rope_parameters
    (tmp_path / "config.json").write_text(json.dumps(with_transformers4_names(text)))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == plain


def test_configurations_inside_of_others_have_them_too() -> None:
    inner = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "bfloat16"}
    found = with_transformers4_names(
        {"model_type": "x", "text_config": inner, "vision_config": {"rope_parameters": None}}
    )
    assert (found["text_config"]["rope_theta"], found["text_config"]["torch_dtype"]) == (5e5, "bfloat16")
    assert found["vision_config"] == {"rope_parameters": None}


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    return found


def test_a_tokenizer_has_the_class_and_the_settings_of_its_base(tmp_path: Path) -> None:
    made = train_tokenizer(["one two"] * 8, vocab_size=300)
    SavedTokenizer(made).save_pretrained(tmp_path / "made")
    found = settings_of(tmp_path / "made")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["additional_special_tokens"] == ["<|im_start|>"]
    assert "extra_special_tokens" not in found, "version 4 asks a dict of it"

    base = {**found, "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": False,
            "extra_special_tokens": {"image_token": "<|im_start|>"}}  # fmt: skip
    (tmp_path / "made/tokenizer_config.json").write_text(json.dumps(base))
    SavedTokenizer(AutoTokenizer.from_pretrained(tmp_path / "made")).save_pretrained(tmp_path / "second")
    second = settings_of(tmp_path / "second")
    for key in ("add_bos_token", "add_eos_token", "extra_special_tokens"):
        assert second[key] == base[key]
    assert second["tokenizer_class"] in ("LlamaTokenizerFast", "LlamaTokenizer")
    SavedTokenizer(AutoTokenizer.from_pretrained(tmp_path / "second")).save_pretrained(tmp_path / "third")
    assert settings_of(tmp_path / "third") == second, "a run that goes on writes the same"


def write_run(folder: Path) -> None:
    """Train a step from a base with positions of its own, and export it."""
    make("llama", folder / "base")
    write_rows(folder, 4)
    recipe = {"model_name_or_path": "base", "datasets": [{"path": "rows.jsonl"}], "engine": FIXED, "max_steps": 1,
              "max_length": 256, "output_dir": "run", "rope_scaling": {"rope_type": "llama3", "factor": 8}}  # fmt: skip
    write_recipe(folder, recipe)
    assert run() == 0
    export_model("run", folder / "out", ExportOptions(check=False))


def test_final_and_export_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    for name in ("run/final", "out"):
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500000.0
        assert written["rope_scaling"]["rope_type"] == "llama3"
        assert settings_of(tmp_path / name)["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.fixture(scope="module")
def older() -> Path:
    """Packages of transformers 4 in a folder of their own, before those of this environment on the path."""
    folder = versions.ROOT / "build/versions/transformers-4"
    if not (folder / "transformers").is_dir():
        packages = ["transformers==4.57.*", "huggingface_hub<1", "tokenizers<0.23"]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs transformers 4.57, and no package index has it")
    return folder


def read_by(older: Path, folders: list[Path]) -> list[dict[str, Any]]:
    reader = Path(__file__).with_name("older_reader.py")
    environment = {**os.environ, "PYTHONPATH": str(older), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, reader, *folders], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


TEXTS = ["one two", " one  two\n\n", "<|im_start|>user\none<|im_end|>", "\u00fcber 123"]
CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.mark.full
def test_transformers_4_computes_the_same(older: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for family in MODELS:
        make(family, tmp_path / family)
    write_run(tmp_path)
    folders = [*(tmp_path / family for family in MODELS), tmp_path / "run/final", tmp_path / "out"]
    ids = [number * 7 % 250 + 3 for number in range(48)]
    for folder in folders:
        (folder / "asked.json").write_text(json.dumps({"ids": ids, "texts": TEXTS, "chat": CHAT}))
    for folder, theirs in zip(folders, read_by(older, folders), strict=True):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        with torch.no_grad():
            ours = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        error = (torch.tensor(theirs["logits"]) - ours).norm() / ours.norm()
        assert error < 1e-5, (folder.name, float(error))
        assert not theirs["lost"], folder.name
        assert (theirs["ends"], theirs["dtype"]) == (model.generation_config.eos_token_id, str(model.dtype))
        assert theirs["texts"] == [tokenizer(text)["input_ids"] for text in TEXTS]
        assert theirs["special"] == sorted(tokenizer.all_special_tokens)
        assert theirs["chat"] == list(tokenizer.apply_chat_template(CHAT)["input_ids"])


@pytest.mark.full
def test_the_reader_is_of_another_version(tmp_path: Path) -> None:
    """Under this version it refuses, so that it never compares a version with itself."""
    reader = Path(__file__).with_name("older_reader.py")
    done = subprocess.run([sys.executable, reader], capture_output=True, text=True)
    assert done.returncode == 1
    assert "AssertionError: 5." in done.stderr
