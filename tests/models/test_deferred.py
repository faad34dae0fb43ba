"""Weights that come later: those the plain model has, bit for bit, whether drawn or read, and adapters beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from streamtune import models
from streamtune.engine import decoder_layers
from streamtune.errors import ArgumentError

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PLAIN = {key: value for key, value in TINY.items() if key != "head_dim"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": TINY,
    "llama": {**TINY, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1},
    "gptj": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 512},
    "gemma2": TINY,
    "qwen3_moe": {**PLAIN, "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "gpt_oss": {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "mamba2": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16},
}
"""Tied weights, learnt positions and a table of them, stacked experts, and one whose draws are not written down."""


def place_all(model: Any) -> None:
    found = models.find_deferred_weights(model)
    assert found is not None
    for layer in [*decoder_layers(model), model]:
        names = [name for name in found.parameter_names_in(layer) if found.is_deferred(name)]
        for name, values in found.read(names).items():
            found.set_values(name, values)
    found.close()
    assert models.find_deferred_weights(model) is None


def differing(model: nn.Module, plain: nn.Module) -> list[str]:
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    wrong = [
        name for name in ours if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    ]
    buffers = zip(model.named_buffers(), plain.named_buffers(), strict=True)
    return wrong + [name for (name, a), (_, b) in buffers if not torch.equal(a, b)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_drawn_later_are_those_of_the_plain_model(family: str, dtype: str) -> None:
    keys = {"model_type": family, **FAMILIES[family]}
    given: dict[str, Any] = {"options": models.ModelOptions(dtype), "vocab_size": 64, "token_ids": {}, "seed": 5}
    plain = models.init_model(keys, **given)
    state = torch.get_rng_state()
    model = models.init_model_deferred(keys, draw=True, **given)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    place_all(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert differing(model, plain) == []
    assert len(list(model.parameters())) == len(list(plain.parameters())), "tied weights are one parameter"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_read_later_are_those_that_are_loaded(family: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[family](**FAMILIES[family])
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    skip_rounded_positions(made)
    made.save_pretrained(tmp_path, max_shard_size="40KB")
    model = models.load_model_deferred(str(tmp_path), models.ModelOptions("bfloat16"))
    place_all(model)
    assert differing(model, models.load_model(str(tmp_path), models.ModelOptions("bfloat16"))) == []


def test_settings_of_generation_are_read_too(tmp_path: Path) -> None:
    """Such as a second stop token: a run that divides the weights generates and saves with them."""
    config = CONFIG_MAPPING["qwen3"](**TINY, eos_token_id=3)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.generation_config.update(eos_token_id=[3, 5], do_sample=True, temperature=0.6)
    made.save_pretrained(tmp_path)
    loaded = (models.load_model_deferred(str(tmp_path)), models.load_model(str(tmp_path), device="cpu"))
    settings, whole = (model.generation_config.to_dict() for model in loaded if model.generation_config is not None)
    assert settings == whole
    assert settings["eos_token_id"] == [3, 5]
    (tmp_path / "generation_config.json").unlink()  # then the configuration of the model has them
    assert models.eos_token_ids(models.load_model_deferred(str(tmp_path)).generation_config) == [3]


def skip_rounded_positions(model: Any) -> None:
    if getattr(model.config, "model_type", "") == "gptj" and "embed_positions" in model.transformer.h[0].attn._buffers:
        pytest.skip("this version of transformers rounds the positions of GPT-J otherwise when it loads a model")


def test_the_positions_of_a_new_model_are_those_of_the_saved_one(tmp_path: Path) -> None:
    keys = {"model_type": "gptj", **FAMILIES["gptj"]}
    made = models.init_model(keys, models.ModelOptions("bfloat16"), vocab_size=64, token_ids={}, seed=5)
    skip_rounded_positions(made)
    made.save_pretrained(tmp_path)
    assert differing(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), made) == []


def test_adapters_are_made_beside_weights_that_are_to_come() -> None:
    keys, given = {"model_type": "qwen3", **TINY}, {"vocab_size": 64, "token_ids": {}, "seed": 5}
    plain = models.add_lora(models.init_model(keys, **given), r=4, seed=7)  # type: ignore[arg-type]
    base = models.init_model_deferred(keys, draw=True, **given)  # type: ignore[arg-type]
    with models.use_placeholder_weights(base):
        model = models.add_lora(base, r=4, seed=7)
    assert {p.device.type for name, p in model.named_parameters() if "lora_" not in name} == {"meta"}
    assert {p.requires_grad for name, p in model.named_parameters() if "lora_" not in name} == {False}
    place_all(model)
    assert differing(model, plain) == []


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**TINY))
    kept = {name: x for name, x in made.state_dict().items() if "q_norm" not in name}
    made.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ArgumentError, match="no weights for 2 parameters"):
        models.load_model_deferred(str(tmp_path))


def test_a_small_model_has_one_layer_of_each_kind() -> None:
    keys = {**TINY, "num_hidden_layers": 6, "sliding_window": 8}
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2
    config = CONFIG_MAPPING["qwen3"](**keys, layer_types=kinds, use_sliding_window=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    small = models.make_small_copy(model, decoder_layers(model), seed=0)
    assert small.config.layer_types == kinds[:2]
    assert len(decoder_layers(small)) == 2
    assert model.config.num_hidden_layers == 6


def test_a_single_file_is_read_before_an_index_that_an_earlier_save_left(tmp_path: Path) -> None:
    models_made = []
    for seed, size in ((0, "8KB"), (1, "1GB")):
        torch.manual_seed(seed)
        models_made.append(AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**TINY)))
        models_made[-1].save_pretrained(tmp_path / str(size), max_shard_size=size)
    for file in (tmp_path / "8KB").glob("model*"):
        shutil.copy(file, tmp_path / "1GB" / file.name)
    plain = models.load_model(str(tmp_path / "1GB"))
    model = models.load_model_deferred(str(tmp_path / "1GB"))
    place_all(model)
    assert differing(model, plain) == differing(model, models_made[1]) == []
    for file in (tmp_path / "1GB").glob("model-*"):  # the index stays
        file.unlink()
    place_all(models.load_model_deferred(str(tmp_path / "1GB")))


def test_a_checkpoint_without_a_dtype_has_the_dtype_that_transformers_finds(tmp_path: Path) -> None:
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**TINY), dtype=torch.bfloat16)
    made.lm_head.float()  # the first tensor by name, in the last file
    made.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    index = {name: f"model-0000{1 + (name == 'lm_head.weight')}-of-00002.safetensors" for name in sorted(tensors)}
    for file in sorted(set(index.values())):
        save_file({name: x for name, x in tensors.items() if index[name] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"}))
    plain = models.load_model(str(tmp_path))
    assert plain.dtype == models.checkpoint_dtype(str(tmp_path), False) == torch.bfloat16
    assert models.load_model_deferred(str(tmp_path)).dtype == torch.bfloat16


def test_weights_that_differ_are_not_tied(tmp_path: Path) -> None:
    """Whatever the configuration says: neither when they are loaded, nor when rows are added, nor in what is saved."""
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**TINY, tie_word_embeddings=False))
    made.config.tie_word_embeddings = True
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    later = models.load_model_deferred(str(tmp_path))
    place_all(later)
    for model in (models.load_model(str(tmp_path)), later):
        assert differing(model, made) == []
        assert model.config.tie_word_embeddings is False
        models.add_embedding_rows(model, 65, [64])
        assert torch.equal(model.get_output_embeddings().weight[:64], made.get_output_embeddings().weight)


@pytest.mark.parametrize("load", [models.load_model, models.load_model_deferred])
def test_a_norm_that_the_configuration_leaves_out_is_not_dropped(load: Any, tmp_path: Path) -> None:
    keys = {**PLAIN, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["glm4_moe"](**keys, use_qk_norm=True))
    made.save_pretrained(tmp_path)
    load(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_qk_norm": False}))
    with pytest.raises(ArgumentError, match=r"layers\.0\.self_attn\.k_norm\.weight and 3 more, which .* not load"):
        load(str(tmp_path))


@pytest.mark.parametrize("load", [models.load_model, models.load_model_deferred])
def test_stacked_experts_of_8_bits_without_a_quantization_config_are_refused(load: Any, tmp_path: Path) -> None:
    keys = {**TINY, "num_local_experts": 4, "intermediate_size_mlp": 48}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama4_text"](**keys)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "experts" in name]:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(4, 1, 1)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArgumentError, match=r"experts\.down_proj has dtype F8_E4M3"):
        load(str(tmp_path))


@pytest.mark.parametrize("load", [models.load_model, models.load_model_deferred])
def test_a_buffer_that_is_not_finite_is_refused(load: Any, tmp_path: Path) -> None:
    keys = {**PLAIN, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["glm4_moe"](**keys))
    made.model.layers[1].mlp.gate.e_score_correction_bias.fill_(float("nan"))
    made.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="e_score_correction_bias contains 4 NaN"):
        load(str(tmp_path))
