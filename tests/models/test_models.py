"""Load, initialise, adapt and save: with tiny models, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.exactness.test_adapters import Nothing
from tests.plan.simulate.test_simulate import allocated
from transformers import AutoModelForCausalLM, AutoTokenizer, ViTConfig, ViTModel

from streamtune.base.chat_templates import read_chat_template
from streamtune.errors import ArgumentError
from streamtune.models import (
    CHATML_TEMPLATE,
    Decoding,
    ModelOptions,
    add_lora,
    build_meta_model,
    check_positions,
    copy_weights,
    count_parameters,
    init_model,
    load_model,
    load_peft_adapters,
    load_tokenizer,
    sample_text,
    save_gathered_weights,
    save_pretrained,
    set_chat_template,
    train_tokenizer,
    unloaded_layers_warning,
)
from streamtune.models.transformers4 import add_transformers4_names

TEXTS = ["def double(x):\n    return x + x\n", "class Pair:\n    def __init__(self, a, b):\n        self.a = a\n"] * 4
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TEXTS, vocab_size=300)


def make(tokenizer: Any, **changes: Any) -> Any:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return init_model({**CONFIG, **changes}, vocab_size=len(tokenizer), token_ids=ids, seed=3)


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- tokenizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\n\n", "naïve 日本 🐍\t\x00 123  \n", "<|im_sta", TEXTS[0]])
def test_a_trained_tokenizer_gives_every_text_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_trained_tokenizer_is_the_same_each_time_and_after_loading(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    for other in (train_tokenizer(iter(TEXTS), vocab_size=300), load_tokenizer(str(tmp_path))):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert other(TEXTS[1])["input_ids"] == tokenizer(TEXTS[1])["input_ids"]
        assert other.chat_template == CHATML_TEMPLATE
        assert (other.eos_token, other.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers makes an empty one of the model's type."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    with pytest.raises(ArgumentError, match="has no tokenizer: none of its files has tokens"):
        load_tokenizer(str(tmp_path))


def test_the_chat_template_marks_the_assistant_and_its_end_of_turn(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [i for i, m in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "b<|im_end|>"


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no room") as caught:
        train_tokenizer(TEXTS, vocab_size=200)
    assert caught.value.where == "tokenizer.train.vocab_size"


def test_chat_templates_by_name_by_file_and_inline(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}")
    for given, expected in ((str(tmp_path / "t.jinja"), "{{ messages[0]['content'] }}"), ("{{ 1 }}", "{{ 1 }}")):
        set_chat_template(tokenizer, given)
        assert tokenizer.chat_template == expected
    set_chat_template(tokenizer, "chatml")
    assert tokenizer.chat_template == CHATML_TEMPLATE
    with pytest.raises(ArgumentError, match=r"the chat template file nowhere.jinja does not exist"):
        set_chat_template(tokenizer, "nowhere.jinja")
    with pytest.raises(ArgumentError, match=r"unknown chat template 'nowhere', and no file") as caught:
        set_chat_template(tokenizer, "nowhere")
    assert "chatml, llama3," in caught.value.fix


def test_a_name_of_a_template_is_never_read_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    monkeypatch.chdir(tmp_path)
    Path("llama3").write_text("{{ 1 }}")
    set_chat_template(tokenizer, "llama3")
    assert tokenizer.chat_template == read_chat_template("llama3")
    set_chat_template(tokenizer, "./llama3")
    assert tokenizer.chat_template == "{{ 1 }}"


# --- model ----------------------------------------------------------------------------------------------------------


def test_init_is_a_function_of_the_seed_and_draws_nothing_else(tokenizer: Any) -> None:
    before = torch.get_rng_state()
    first, second = make(tokenizer), make(tokenizer)
    assert same_weights(first, second)
    assert torch.equal(before, torch.get_rng_state())
    assert first.config.vocab_size == len(tokenizer)
    assert first.config.eos_token_id == tokenizer.eos_token_id
    assert first.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"model_type": "qwen33"}, "model.init.model_type", "'qwen3'"),
        ({"hiden_size": 8}, "model.init.hiden_size", "'hidden_size'"),
        ({"hidden_size": "big"}, "model.init", ""),
        ({"vocab_size": 20}, "model.init.vocab_size", "the default is the tokenizer's size"),
    ],
)
def test_a_wrong_configuration_is_refused_by_key(tokenizer: Any, changes: Any, where: str, fix: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(tokenizer, **changes)
    assert caught.value.where == where
    assert fix in caught.value.fix


def test_keys_that_transformers_renames_are_known(tokenizer: Any) -> None:
    assert make(tokenizer, rope_theta=5e5).config.rope_parameters["rope_theta"] == 5e5
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "num_attention_heads": 2, "n_layer": 1}
    model = init_model(gpt2, ModelOptions("bfloat16"), vocab_size=300, token_ids={}, seed=1)
    assert (model.config.hidden_size, model.config.n_head, model.dtype) == (16, 2, torch.bfloat16)


def test_a_key_that_only_the_models_code_reads_is_known() -> None:
    """Qwen3-MoE's class of configuration does not name the size of its heads."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    keys = {"model_type": "qwen3_moe", **sizes, "num_experts": 4, "moe_intermediate_size": 32}
    given: dict[str, Any] = {"vocab_size": 64, "token_ids": {}, "seed": 1}
    model: Any = init_model({**keys, "head_dim": 32}, **given)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (128, 64)
    with pytest.raises(ArgumentError, match="has no key 'head_dims'"):
        init_model({**keys, "head_dims": 32}, **given)
    with pytest.raises(ArgumentError, match="larger than the matrix"):
        add_lora(model, r=65)


def test_a_model_comes_back_from_disk_as_it_was(tokenizer: Any, tmp_path: Path) -> None:
    model = make(tokenizer, tie_word_embeddings=True)
    save_pretrained(model, tokenizer, tmp_path / "m")
    assert same_weights(load_model(str(tmp_path / "m")), model)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), model)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "m")) == len(tokenizer)
    assert not list((tmp_path / "m").glob("*.bin"))
    assert load_model(str(tmp_path / "m"), ModelOptions("bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize("copied", [False, True])
def test_experts_are_saved_a_layer_at_a_time(tmp_path: Path, copied: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    keys = {"model_type": "qwen3_moe", **sizes, "num_experts": 8, "moe_intermediate_size": 64, "head_dim": 16}
    given: dict[str, Any] = {"vocab_size": 64, "token_ids": {}, "seed": 1}
    model: Any = init_model(keys, **given)
    model.save_pretrained(tmp_path / "theirs")
    add_transformers4_names(tmp_path / "theirs")
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)

    weights = copy_weights(model) if copied else None
    held = allocated(
        lambda: save_pretrained(model, Nothing(), tmp_path / "ours", weights=weights, shard_bytes=experts // 6)
    )
    assert held <= 3 * experts // 6  # a file that is collected and the layer after it; transformers holds them all

    save_pretrained(model, Nothing(), tmp_path / "one file", weights=weights)
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "one file").iterdir()} == theirs
    assert same_weights(load_model(str(tmp_path / "ours")), model)


@pytest.mark.parametrize("how", ["now", "copied", "gathered"])
def test_every_weight_is_in_the_files(tokenizer: Any, tmp_path: Path, how: str) -> None:
    """Also of weights that are shared in a way that the model's class does not know, and of tied ones taken apart."""
    model = make(tokenizer, tie_word_embeddings=True)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    if how == "gathered":
        weights = lambda names: ((name, x.detach()) for name, x in model.named_parameters())  # noqa: E731
        save_gathered_weights(model, Nothing(), tmp_path, weights, is_main=True)
    else:
        save_pretrained(model, Nothing(), tmp_path, weights=copy_weights(model) if how == "copied" else None)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], values) for name, values in model.state_dict().items())


def test_a_checkpoint_that_lacks_weights_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    save_pretrained(make(tokenizer), tokenizer, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=r"no weights for 1 parameters .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(tmp_path))


def test_an_index_of_pickles_that_were_not_downloaded_is_passed_over(tokenizer: Any, tmp_path: Path) -> None:
    save_pretrained(make(tokenizer), tokenizer, tmp_path)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-00002.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    load_model(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match="names files that do not exist"):
        load_model(str(tmp_path), allow_pickle=True)


def test_a_model_that_writes_no_text_is_named(tmp_path: Path) -> None:
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ViTModel(config).save_pretrained(tmp_path)
    for load in (load_model, build_meta_model):
        with pytest.raises(ArgumentError, match="no class that writes text for its model_type 'vit'") as caught:
            load(str(tmp_path))
        assert str(caught.value.where).startswith(f"{tmp_path / 'config.json'}:")


def test_a_folder_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "qwen-small").mkdir()
    with pytest.raises(ArgumentError, match=r"the folder .* does not exist") as caught:
        load_model(str(tmp_path / "qwen-smal"))
    assert "'qwen-small'" in caught.value.fix
    with pytest.raises(ArgumentError, match="cannot load the model"):
        load_model(str(tmp_path / "qwen-small"))


# --- adapters -------------------------------------------------------------------------------------------------------


def test_lora_trains_its_adapters_only_and_comes_back_from_disk(tokenizer: Any, tmp_path: Path) -> None:
    base, adapted = tmp_path / "base", tmp_path / "adapter"
    save_pretrained(make(tokenizer), tokenizer, base)
    model = add_lora(load_model(str(base)), r=4)
    counts = count_parameters(model)
    assert 0 < counts.trainable < counts.total / 4
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert not any("lm_head" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    save_pretrained(model, tokenizer, adapted)
    written = json.loads((adapted / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    assert len(written["target_modules"]) > 3, "several, so that their order is one of many"
    assert written["target_modules"] == sorted(written["target_modules"])
    again = load_peft_adapters(load_model(str(base)), adapted)
    assert same_weights(again, model)
    assert count_parameters(again) == counts


def test_lora_targets_are_checked(tokenizer: Any) -> None:
    model = add_lora(make(tokenizer), r=2, target=["q_proj", "layers.1.mlp.up_proj"])
    adapted = {name.split(".lora_")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(adapted) == 3
    with pytest.raises(ArgumentError, match="'qproj'") as caught:
        add_lora(make(tokenizer), r=2, target=["q_proj", "qproj"])
    assert "'q_proj'" in caught.value.fix


# --- sample ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sample_is_repeatable_and_leaves_the_random_state(tokenizer: Any, temperature: float) -> None:
    model = make(tokenizer)
    before = torch.get_rng_state()
    texts = [sample_text(model, tokenizer, "hello", Decoding(8, temperature, seed=1)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert torch.equal(before, torch.get_rng_state())


def test_a_sample_without_a_chat_template_continues_the_text(tokenizer: Any) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.chat_template = None
    assert isinstance(sample_text(make(tokenizer), tokenizer, "def", Decoding(3)), str)


def test_rows_longer_than_the_models_positions(tokenizer: Any) -> None:
    rotary = make(tokenizer, max_position_embeddings=64)
    for model in (rotary, add_lora(rotary, r=2, alpha=4, dropout=0.0, target="all-linear", seed=0)):
        assert check_positions(model, 64) is None
        with pytest.raises(ArgumentError, match="65 tokens") as caught:
            check_positions(model, 65)
        assert "rope_scaling: {rope_type: yarn, factor: 2}" in caught.value.fix
        note = check_positions(model, 65, training=False)
        assert note is not None
        assert "65 tokens" in note
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    learnt = init_model(gpt2, vocab_size=len(tokenizer), token_ids={}, seed=0)
    assert check_positions(learnt, 64) is None
    with pytest.raises(ArgumentError, match=r"position embeddings .* end at 64"):
        check_positions(learnt, 65)


# --- layers for multi-token prediction --------------------------------------------------------------------------------


def test_layers_that_predict_several_tokens_ahead_are_said_to_be_left_out(tokenizer: Any, tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    config = {**CONFIG, **sizes, "model_type": "glm4_moe", "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1}
    del config["head_dim"]
    model = init_model(config, vocab_size=len(tokenizer), token_ids={}, seed=3)
    assert unloaded_layers_warning(model) is None, "a model made from its configuration has lost nothing"
    save_pretrained(model, tokenizer, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    ahead = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in weights.items() if "layers.1." in name}
    save_file({**weights, **ahead, "model.layers.2.eh_proj.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path))
    said = unloaded_layers_warning(loaded)
    assert said is not None
    assert "layers for multi-token prediction (num_nextn_predict_layers: 1)" in said
    assert same_weights(loaded, model)
    loaded = add_lora(loaded, r=2, alpha=None, dropout=0.0, target=("q_proj",), seed=0)
    assert unloaded_layers_warning(loaded) == said


def test_a_model_without_such_layers_is_silent(tokenizer: Any, tmp_path: Path) -> None:
    save_pretrained(make(tokenizer), tokenizer, tmp_path)
    assert unloaded_layers_warning(load_model(str(tmp_path))) is None
