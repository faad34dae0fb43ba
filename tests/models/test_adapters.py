"""Adapters as a recipe describes them: names, patterns, ranks, routers and experts, and adapters to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exactness.families import build
from tests.exactness.test_adapters import ON_WHOLE, Nothing, moved

from streamtune.base.adapters import ADAPTERS
from streamtune.errors import ArgumentError
from streamtune.models import AdapterSpec, add_adapters, load_initial_adapters, load_run_adapters, save_pretrained


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
