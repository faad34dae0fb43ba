"""Rotary positions extended: what the configuration becomes, what is saved, exact gradients, runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exactness.families import batch, build, gradients, reference
from tests.precision_kit import relative
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows
from transformers import AutoConfig, AutoModelForCausalLM

from streamtune.engine import stream
from streamtune.errors import ArgumentError
from streamtune.models import (
    ModelOptions,
    RopeChange,
    build_meta_model,
    check_positions,
    init_model,
    load_model,
    position_limit,
    pretrained_position_limit,
)

SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0},
}
FAMILIES = ["llama", "qwen3", "gemma3_text", "mistral", "qwen3_next", "gpt_oss"]


def rope_of(config: Any) -> dict[str, Any]:
    kinds: dict[str, Any] = config.get_text_config(decoder=True).rope_parameters
    return kinds.get("full_attention", kinds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", SCALINGS)
def test_a_configuration_reaches_further_and_is_changed_once(family: str, kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family)
    before = rope_of(config).get("original_max_position_embeddings", config.max_position_embeddings)
    change = RopeChange(SCALINGS[kind], theta=5e6, length=7)
    change.apply(config)
    once = json.loads(config.to_json_string())
    assert rope_of(config)["rope_type"] == kind
    assert rope_of(config)["rope_theta"] == 5e6
    assert config.max_position_embeddings == position_limit(config) == 4 * before
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    change.apply(read)
    assert json.loads(read.to_json_string())["rope_parameters"] == once["rope_parameters"]
    assert read.max_position_embeddings == 4 * before


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_a_base_for_each_length_keeps_the_positions_of_the_pretraining(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family)
    before = rope_of(config).get("original_max_position_embeddings", config.max_position_embeddings)
    change = RopeChange({"rope_type": "dynamic"}, length=4 * before - 5)
    change.apply(config)
    assert rope_of(config)["factor"] == 4.0
    assert (config.max_position_embeddings, pretrained_position_limit(config)) == (before, before)
    assert position_limit(config) == 4 * before
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    change.apply(read)
    assert rope_of(read) == rope_of(config)
    assert (read.max_position_embeddings, position_limit(read)) == (before, 4 * before)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_a_number_for_each_frequency(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, head_dim=8, hidden_size=32, num_attention_heads=4)
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 1024, "factor": 8.0}
    factors = {"short_factor": (1.0, 1.0, 1.0, 1.0), "long_factor": (1, 2, 4, 8)}
    change = RopeChange({**scaling, **factors})
    change.apply(config)
    assert config.max_position_embeddings == position_limit(config) == 8192
    assert pretrained_position_limit(config) == 1024
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    change.apply(read)
    assert rope_of(read) == rope_of(config)
    assert rope_of(read)["long_factor"] == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ArgumentError, match="'long_factor' has 3 numbers; this model has 4 frequencies"):
        RopeChange({**scaling, **factors, "long_factor": (1, 2, 3)}).apply(read)


def test_windows_keep_their_rotation() -> None:
    config = AutoConfig.for_model("gemma3_text")
    window = dict(config.rope_parameters["sliding_attention"])
    RopeChange(SCALINGS["yarn"]).apply(config)
    assert config.rope_parameters["sliding_attention"] == window


def test_keys_that_are_not_of_the_scaling_stay() -> None:
    config = AutoConfig.for_model("gpt_oss")
    assert rope_of(config)["truncate"] is False
    RopeChange({"rope_type": "yarn", "factor": 64.0}).apply(config)
    assert rope_of(config)["truncate"] is False
    assert rope_of(config)["factor"] == 64.0
    RopeChange({"rope_type": "linear", "factor": 64.0}).apply(config)
    assert "truncate" not in rope_of(config)

    sections = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6}
    images = AutoConfig.for_model("qwen2_5_vl_text", rope_parameters=sections)
    for kind in ("yarn", "default"):
        RopeChange({"rope_type": kind}, length=100_000).apply(images)
        assert rope_of(images)["rope_type"] == kind
        assert rope_of(images)["mrope_section"] == [2, 1, 1]


def test_a_factor_follows_from_the_longest_row() -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=1000)
    RopeChange({"rope_type": "yarn"}, length=3500).apply(config)
    assert rope_of(config)["factor"] == 4.0
    assert config.max_position_embeddings == 4000


def test_another_base_alone_reaches_the_longest_row() -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=1000)
    RopeChange(theta=1e6, length=3500).apply(config)
    assert rope_of(config) == {"rope_type": "default", "rope_theta": 1e6}
    assert position_limit(config) == 3500


def test_a_model_without_rotary_positions() -> None:
    with pytest.raises(ArgumentError, match="'gpt2' has no rotary positions") as caught:
        RopeChange(theta=1e6).apply(AutoConfig.for_model("gpt2"))
    assert caught.value.where == "rope_theta"


def test_what_transformers_refuses() -> None:
    with pytest.raises(ArgumentError, match="must be one of"):
        RopeChange(SCALINGS["yarn"]).apply(AutoConfig.for_model("phi3"))


@pytest.mark.quick("yarn-llama", "llama3-gemma3_text", "linear-qwen3")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "mistral", "gpt_oss"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_streamed_gradients_are_those_of_the_scaled_model(kind: str, family: str) -> None:
    model = build(family)
    config = model.config
    config.max_position_embeddings = 8  # rows are longer: every band of frequencies matters
    RopeChange({**SCALINGS[kind], "factor": 8.0}).apply(config)
    torch.manual_seed(1)
    scaled = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    scaled.load_state_dict(model.state_dict())
    inputs = batch("masked")
    want = reference(scaled, inputs)
    with stream(scaled, chunk_size=8):
        want.check(gradients(scaled, inputs))
    ids = inputs["input_ids"]
    assert relative(scaled(input_ids=ids).logits, model(input_ids=ids).logits) > 1e-5


def test_models_are_loaded_made_and_planned_with_it(tmp_path: Path) -> None:
    made = init_model(QWEN3, vocab_size=64, token_ids={}, seed=0)
    made.save_pretrained(tmp_path)
    options = ModelOptions(rope=RopeChange(SCALINGS["yarn"]))
    models = [
        load_model(str(tmp_path), options),
        init_model(QWEN3, options, vocab_size=64, token_ids={}, seed=0),
        build_meta_model(str(tmp_path), options),
        build_meta_model(QWEN3, options, vocab_size=64),
    ]
    assert {rope_of(model.config)["rope_type"] for model in models} == {"yarn"}
    ids = torch.arange(60).reshape(1, -1)
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    assert relative(models[0](ids).logits, made(ids).logits) > 1e-3
    assert check_positions(models[0], position_limit(made.config) or 0) is None


# --- recipes ----------------------------------------------------------------------------------------------------------

SHORT = {**QWEN3, "max_position_embeddings": 32}


def write(folder: Path, **keys: Any) -> None:
    write_rows(folder, 8)
    recipe = {**RECIPE, "model": {"init": SHORT}, "max_length": 256, "engine": FIXED, "output_dir": "out", **keys}
    write_recipe(folder, recipe)


def test_rows_beyond_the_positions_name_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    assert run("--set", "max_steps=1") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the model supports 32" in said
    assert "rope_scaling: {rope_type: yarn, factor:" in said
    assert run("--set", "max_steps=1", "--set", "rope_scaling.rope_type=yarn", "--set", "rope_scaling.factor=1.1") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "pretrained for 32 positions, and the scaling in its configuration or in rope_scaling reaches 35" in said
    longest = int(said.split("the longest row has ")[1].split(" ")[0])
    assert f"factor: {-(-longest // 32)}}}" in said
    assert run("--set", "max_steps=1", "--set", "rope_scaling.rope_type=default") == 0
    assert "positions" in capsys.readouterr().out


@pytest.mark.full
def test_packs_and_long_rows_of_a_base_for_each_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rope_scaling={"rope_type": "dynamic"}, packing=True, save_steps=1, max_steps=2)
    assert run() == 0
    assert "dynamic" in capsys.readouterr().out
    whole = (tmp_path / "out/final/model.safetensors").read_bytes()
    assert run("--set", "max_steps=1", "--output-dir", "two") == 0
    assert run("--set", "max_steps=2", "--output-dir", "two", "--allow-change", "max_steps") == 0
    assert (tmp_path / "two/final/model.safetensors").read_bytes() == whole
    config = json.loads((tmp_path / "out/final/config.json").read_text())
    assert config["max_position_embeddings"] == 32
    from streamtune.cli import main

    with pytest.raises(SystemExit) as left:
        main(["verify", "tiny.yaml"])
    assert left.value.code in (0, None), capsys.readouterr()


@pytest.mark.full
@pytest.mark.parametrize("finetuning_type", ["full", "lora"])
def test_a_run_saves_resumes_and_exports_its_positions(
    finetuning_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rope_scaling={"rope_type": "yarn"}, finetuning_type=finetuning_type, save_steps=1, max_steps=2)
    assert run() == 0
    assert run("--set", "rope_theta=5e5") == 2
    assert "rope_theta" in capsys.readouterr().err
    assert run("--set", "rope_scaling.factor=9.0") == 2
    assert (
        'rope_scaling was {"rope_type": "yarn"}, is now {"rope_type": "yarn", "factor": 9.0}' in capsys.readouterr().err
    )
    assert run("--set", "max_steps=3", "--allow-change", "max_steps") == 0
    from streamtune.cli import main

    with pytest.raises(SystemExit) as left:
        main(["export", "out", "merged"])
    assert left.value.code in (0, None)
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 32 * config["rope_parameters"]["factor"]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "low_freq_factor": 1.0}},
            "rope_type: yarn does not read 'low_freq_factor'",
        ),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_type: default does not read 'factor'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "dynamic", "beta_fast": 2.0}}, "rope_type: dynamic does not read 'beta_fast'"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "longrope needs 'short_factor'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
            "'short_factor' has 1 number; this model has",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 32}},
            "'beta_fast' must be above 'beta_slow'; found 1 and 32",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0}},
            "'high_freq_factor' must be above 'low_freq_factor'; found 4 and 4",
        ),
        ({"rope_scaling": {"rope_type": "yarm"}}, "yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor"),
    ],
)
def test_what_no_scaling_is(
    keys: dict[str, Any],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **keys)
    assert run("--dry-run") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert what in said
    assert "tiny.yaml:" in said
