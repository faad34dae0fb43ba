"""Adapters as a recipe describes them: names, patterns, ranks, routers and experts, and adapters to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.exactness.families import build
from tests.exactness.test_adapters import ON_WHOLE, Nothing, moved

from streamtune.base.adapters import ADAPTERS
from streamtune.engine import decoder_layers
from streamtune.errors import ArgumentError
from streamtune.models import (
    AdapterSpec,
    ModelOptions,
    add_adapters,
    build_meta_model,
    load_initial_adapters,
    load_peft_adapters,
    load_run_adapters,
    make_small_copy,
    save_pretrained,
)
from streamtune.models.quantize import PACKAGES


def names_of(model: Any) -> set[str]:
    """Ends of the names of modules that have trained parameters."""
    found = {name.partition(".lora_")[0] for name, x in model.named_parameters() if x.requires_grad}
    return {name.replace(".base_layer", "").rpartition("layers.")[2].partition(".")[2] for name in found}


@pytest.mark.parametrize(
    ("choices", "where", "fix"),
    [
        ({"target": ["qproj"]}, "lora_target", "did you mean 'q_proj'?"),
        ({"exclude": ["wings"]}, "lora_exclude", "choose among: down_proj, gate_proj"),
        ({"modules_to_save": ["lm_heat"]}, "modules_to_save", "did you mean 'lm_head'?"),
        ({"ranks": {"qq_proj": 2}}, "lora_rank_pattern", "did you mean 'q_proj'?"),
        ({"ranks": {"(": 2}}, "lora_rank_pattern", "write the end of a name"),
        ({"alphas": {"tail": 2.0}}, "lora_alpha_pattern", "layers with adapters: down_proj, gate_proj"),
        ({"r": 20, "target": ["k_proj"]}, "lora_r", "write lora_r: 16, or lora_rank_pattern: {k_proj: 16}"),
        ({"r": 20, "kind": "pissa"}, "lora_r", "write lora_r: 16, or lora_rank_pattern: {k_proj: 16}"),
        ({"ranks": {"k_proj": 20}}, "lora_r", "lora_rank_pattern: {k_proj: 16}"),
        ({"r": 100000, "kind": "loha"}, "lora_r", "such as 16"),
        ({"r": 3, "kind": "hra"}, "lora_r", "write lora_r: 4"),
        ({"r": 200}, "lora_r", "write lora_r: 32, or lora_rank_pattern: {q_proj: 32}"),
        ({"target": ["q_proj"], "exclude": ["self_attn.q_proj"], "kind": "vera"}, "lora_exclude", "exclude fewer"),
    ],
)
def test_what_matches_nothing_or_does_not_fit(choices: dict[str, Any], where: str, fix: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        add_adapters(build("qwen3"), AdapterSpec(**choices))
    assert caught.value.where == where
    assert fix in caught.value.fix


def test_a_row_of_zeros_has_no_direction() -> None:
    model = build("qwen3")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3] = 0
    with pytest.raises(ArgumentError, match=r"1 rows of .*layers\.1\.self_attn\.o_proj are all zeros"):
        add_adapters(model, AdapterSpec(kind="dora"))


def test_a_copy_of_an_end_that_is_shared_is_for_low_rank_alone() -> None:
    with pytest.raises(ArgumentError, match=r"is tied \(embedding and head share a weight\)"):
        add_adapters(
            build("qwen3", tie_word_embeddings=True), AdapterSpec(kind="ia3", modules_to_save=["embed_tokens"])
        )
    with pytest.raises(ArgumentError, match="new tokens"):
        add_adapters(build("qwen3"), AdapterSpec(kind="ia3"), new_tokens=[5])


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_has_an_adapter_or_rows_of_new_tokens(tied: bool) -> None:
    base = build("qwen3", tie_word_embeddings=tied)
    with pytest.raises(ArgumentError, match="lm_head cannot have an adapter and trained rows") as caught:
        add_adapters(base, AdapterSpec(r=4, target=["q_proj", "lm_head"]), new_tokens=[5])
    assert caught.value.where == "lora_target"
    add_adapters(base, AdapterSpec(r=4, target=["q_proj"]), new_tokens=[5])


@pytest.mark.parametrize("kind", ["paca", "pissa"])
@pytest.mark.parametrize("whole", ["embed_tokens", "lm_head"])
def test_tied_ends_trained_whole_beside_adapters_that_are_saved_as_lora(kind: str, whole: str, tmp_path: Path) -> None:
    def base() -> Any:
        return build("qwen3", tie_word_embeddings=True)

    spec = AdapterSpec(kind=kind, r=4, target=["q_proj"], modules_to_save=[whole])
    model = moved(add_adapters(base(), spec))
    save_pretrained(model, Nothing(), tmp_path)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        want = model(input_ids=ids).logits
        resumed = load_run_adapters(base(), tmp_path, spec)
        assert torch.equal(resumed(input_ids=ids).logits, want)
        torch.testing.assert_close(load_initial_adapters(base(), str(tmp_path))(input_ids=ids).logits, want)
    ends = [name for name, x in resumed.named_parameters() if x.requires_grad and "modules_to_save" in name]
    assert len(ends) == 1


def trained_whole(model: Any) -> set[str]:
    """Full names of the modules that are trained whole."""
    trained = [name for name, x in model.get_base_model().named_parameters() if x.requires_grad]
    return {name.partition(".modules_to_save")[0] for name in trained if ".modules_to_save" in name}


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_modules_are_trained_whole_by_the_ends_of_their_names(kind: str) -> None:
    """``norm`` names no ``input_layernorm``, and a module inside another one is a part of it."""
    spec = AdapterSpec(kind=kind, r=2, modules_to_save=["norm", "layers.1.mlp", "layers.1.mlp.up_proj"])
    assert trained_whole(add_adapters(build("qwen3"), spec)) == {"model.norm", "model.layers.1.mlp"}


@pytest.mark.parametrize(
    ("family", "tied", "choices", "what", "fix"),
    [
        ("qwen3", False, {"modules_to_save": ["act_fn"]}, "has no weights to train", "modules with weights"),
        ("qwen3", False, {"modules_to_save": ["lm_head"], "target": ["q_proj", "lm_head"]}, "both", "lora_exclude"),
        ("qwen3", True, {"modules_to_save": ["embed_tokens"], "target": ["q_proj", "lm_head"]}, "both", "delete it"),
        ("qwen3", False, {"modules_to_save": ["mlp"], "target": ["q_proj", "up_proj"]}, "both", "delete it"),
        ("qwen3", True, {"modules_to_save": ["model"]}, "model contains it", "leave it out"),
        ("gpt2", True, {"modules_to_save": ["wte"]}, "peft would not keep it tied", "leave it out"),
        ("phi", True, {"modules_to_save": ["lm_head"]}, "leave out the bias of the head", "finetuning_type: full"),
    ],
)
def test_modules_that_peft_would_not_train_as_asked(
    family: str, tied: bool, choices: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(ArgumentError, match=what) as caught:
        add_adapters(build(family, tie_word_embeddings=tied), AdapterSpec(**choices))
    assert caught.value.where == "modules_to_save"
    assert fix in caught.value.fix


@pytest.mark.parametrize("quantization", PACKAGES)
def test_quantised_modules_are_not_trained_whole(quantization: str) -> None:
    pytest.importorskip(PACKAGES[quantization])
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 64, **size}
    model = build_meta_model(config, ModelOptions("float32", quantization))
    with pytest.raises(ArgumentError, match=r"model\.layers\.0\.mlp is quantised") as caught:
        add_adapters(model, AdapterSpec(r=2, modules_to_save=["mlp"]))
    assert caught.value.where == "modules_to_save"
    assert trained_whole(add_adapters(model, AdapterSpec(r=2, modules_to_save=["lm_head"]))) == {"lm_head"}


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_keep_the_bias_of_the_head(tied: bool) -> None:
    """Peft computes a head without its bias where it trains single rows."""
    with pytest.raises(ArgumentError, match="lm_head has a bias") as caught:
        add_adapters(build("phi", tie_word_embeddings=tied), AdapterSpec(r=2), new_tokens=[5])
    assert caught.value.where == "added_tokens"
    assert ("modules_to_save: [embed_tokens, lm_head]" in caught.value.fix) is not tied
    if not tied:
        model, ids = build("phi", tie_word_embeddings=False).eval(), torch.arange(3, 20)[None]
        before = model(input_ids=ids).logits
        spec = AdapterSpec(r=2, modules_to_save=["embed_tokens", "lm_head"])
        adapted = add_adapters(model, spec, new_tokens=[5]).eval()
        assert torch.equal(adapted(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("tied", "whole", "rows"),
    [
        (False, ["embed_tokens", "lm_head"], []),
        (False, ["lm_head"], ["model.embed_tokens"]),
        (True, ["lm_head"], []),
        (True, [], ["model.embed_tokens"]),
    ],
)
def test_a_matrix_that_is_trained_whole_needs_no_rows_of_new_tokens(
    tied: bool, whole: list[str], rows: list[str]
) -> None:
    spec = AdapterSpec(r=2, modules_to_save=whole)
    model = add_adapters(build("qwen3", tie_word_embeddings=tied), spec, new_tokens=[5])
    assert sorted(model.peft_config["default"].trainable_token_indices or {}) == rows
    ends = (model.get_base_model().get_input_embeddings(), model.get_base_model().get_output_embeddings())
    assert (ends[0].weight is ends[1].weight) is (tied and bool(whole))


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.full
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_that_are_one_tensor(family: str) -> None:
    attention = {f"self_attn.{end}_proj" for end in "qkvo"}
    model = add_adapters(build(family, **MIXTURES[family]), AdapterSpec(r=2))
    assert names_of(model) == attention | {"mlp.experts"}
    model = add_adapters(build(family, **MIXTURES[family]), AdapterSpec(r=2, target=["q_proj", "down_proj"]))
    assert names_of(model) == {"self_attn.q_proj", "mlp.experts"}
    model = add_adapters(build(family, **MIXTURES[family]), AdapterSpec(r=2, target=["q_proj", "mlp.gate.weight"]))
    assert names_of(model) == {"self_attn.q_proj", "mlp.gate"}
    for choices in ({"kind": "dora"}, {"kind": "pissa"}, {"dropout": 0.1}):
        with pytest.raises(ArgumentError, match="cannot be used on experts stacked in one tensor"):
            add_adapters(build(family, **MIXTURES[family]), AdapterSpec(r=2, **choices))
    model = add_adapters(build(family, **MIXTURES[family]), AdapterSpec(kind="ia3"))
    assert not any(".experts." in name for name, x in model.named_parameters() if x.requires_grad)


@pytest.mark.parametrize("whole", ["mlp", "experts", "layers.0.mlp"])
def test_experts_that_are_trained_whole_get_no_adapters(whole: str, tmp_path: Path) -> None:
    model = moved(add_adapters(build("mixtral"), AdapterSpec(r=2, modules_to_save=[whole])))
    adapted = [name for name, x in model.named_parameters() if x.requires_grad and "lora_" in name and ".mlp." in name]
    assert all(".layers.1." in name for name in adapted)
    assert bool(adapted) is (whole == "layers.0.mlp")
    save_pretrained(model, Nothing(), tmp_path)
    again, ids = load_peft_adapters(build("mixtral"), tmp_path), torch.arange(3, 20)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_model_with_parameters_of_layers_themselves() -> None:
    """Gated delta nets have numbers that belong to no linear layer."""
    model = add_adapters(build("qwen3_next", num_hidden_layers=4), AdapterSpec(r=2, target=["q_proj", "in_proj_qkvz"]))
    assert {name.rsplit(".", 1)[-1] for name in names_of(model)} == {"q_proj", "in_proj_qkvz"}


@pytest.mark.quick("pissa", "vera")
@pytest.mark.parametrize("kind", ON_WHOLE)
def test_on_meta_they_have_the_same_parameters(kind: str) -> None:
    def shapes(model: Any) -> dict[str, Any]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: (tuple(x.shape), x.dtype, x.requires_grad) for name, x in named}

    spec = AdapterSpec(kind=kind, r=4, block_size=8)
    base = build("qwen3", dtype=torch.bfloat16)
    with torch.device("meta"):
        simulated = add_adapters(build("qwen3", dtype=torch.bfloat16).to("meta"), spec)
    real = add_adapters(base, spec)
    assert shapes(simulated) == shapes(real)
    assert all(x.device.type == "meta" for x in simulated.parameters())


@pytest.mark.quick("lora", "olora")
@pytest.mark.parametrize("kind", ON_WHOLE)
def test_start_from_adapters(kind: str, tmp_path: Path) -> None:
    model = moved(add_adapters(build("qwen3"), AdapterSpec(kind=kind, r=4, block_size=8)))
    save_pretrained(model, Nothing(), tmp_path)
    again = load_initial_adapters(build("qwen3"), str(tmp_path))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        want, found = model(input_ids=ids).logits, again(input_ids=ids).logits
    assert (want - found).norm() <= (1e-6 if ADAPTERS[kind].written_as_lora else 0) * want.norm()
    assert any(x.requires_grad for x in again.parameters())
    with torch.device("meta"):
        simulated = load_initial_adapters(build("qwen3").to("meta"), str(tmp_path))
    trained = [(name, x.shape) for name, x in simulated.named_parameters() if x.requires_grad]
    assert trained == [(name, x.shape) for name, x in again.named_parameters() if x.requires_grad]


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    model = add_adapters(build("qwen3"), AdapterSpec(r=4))
    with pytest.raises(ArgumentError, match=r"no adapter_config\.json"):
        load_initial_adapters(build("qwen3"), str(tmp_path))
    save_pretrained(model, Nothing(), tmp_path)
    with pytest.raises(ArgumentError, match="on this base"):
        load_initial_adapters(build("qwen3", intermediate_size=64), str(tmp_path))
    with pytest.raises(ArgumentError, match="belong to another base"):
        load_initial_adapters(build("qwen3", num_hidden_layers=1), str(tmp_path))
    with pytest.raises(ArgumentError, match="size mismatch for base_model"):
        load_initial_adapters(build("qwen3", intermediate_size=64), str(tmp_path))


def test_a_small_copy_gets_the_adapters_of_its_layers(tmp_path: Path) -> None:
    save_pretrained(add_adapters(build("qwen3"), AdapterSpec(r=4)), Nothing(), tmp_path)
    model = build("qwen3")
    small = load_initial_adapters(
        make_small_copy(model, decoder_layers(model), seed=0), str(tmp_path), reads_weights=False
    )
    assert names_of(small) == names_of(load_initial_adapters(model, str(tmp_path)))


def test_replicated_layers_and_rows_beside_a_bias_are_not_trained_further(tmp_path: Path) -> None:
    def save(family: str, **options: Any) -> Any:
        config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], **options)
        get_peft_model(build(family), config).save_pretrained(tmp_path)
        return load_initial_adapters(build(family), str(tmp_path))

    with pytest.raises(ArgumentError, match="layer replication") as caught:
        save("llama", layer_replication=[(0, 2), (0, 2)])
    assert "merge them with peft" in caught.value.fix
    with pytest.raises(ArgumentError, match="lm_head has a bias"):
        save("phi", trainable_token_indices={"lm_head": [5]})
    assert save("phi", trainable_token_indices=[5]) is not None
    assert any("trainable_tokens" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
