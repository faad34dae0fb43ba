"""Quantised bases: the same weights as transformers' own loader gives, and errors that say what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from streamtune.errors import ArgumentError
from streamtune.models import add_lora, choose_quantization, count_parameters, init_model, load_lora, load_model
from streamtune.models.quantize import PACKAGES, left_whole, quantization, quantize
from streamtune.simulate import LiveBytes
from streamtune.simulate.memory import held_tensors
from streamtune.sizes import show_size

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
IDS = torch.arange(3, 20)[None]


@pytest.fixture(params=["int8", "nf4"])
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


def make(quantization: str | None = None, **settings: Any) -> Any:
    config = {**CONFIG, **settings.pop("config", {})}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    arguments = {"dtype": "auto", "device": "cpu", "seed": 3, **settings}
    return init_model(config, vocab_size=64, token_ids=ids, quantization=quantization, **arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def their_config(kind: str, dtype: torch.dtype) -> Any:
    """How a user of transformers asks for the same."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS).logits.detach()
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initialised_and_loaded_are_what_transformers_loads(
    kind: str, dtype: str, folder: Path, tmp_path: Path
) -> None:
    ours = load_model(str(folder), dtype=dtype, quantization=kind)
    config = their_config(kind, getattr(torch, dtype))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).train()
    assert quantization(ours) == quantization(theirs) == kind
    assert torch.equal(logits(ours), logits(theirs))
    if dtype == "float32":  # torch 2.11 draws other weights in bfloat16 than in float32
        assert torch.equal(logits(ours), logits(make(kind)))
    assert not torch.equal(logits(ours), logits(load_model(str(folder), dtype=dtype)))

    theirs.save_pretrained(tmp_path / "quantised")  # a checkpoint that comes quantised
    again = load_model(str(tmp_path / "quantised"), dtype=dtype, quantization=kind)
    assert torch.equal(logits(again), logits(ours))
    other = next(name for name in PACKAGES if name != kind)
    with pytest.raises(ArgumentError, match=f"quantised already \\({kind}\\), and {other}") as caught:
        load_model(str(tmp_path / "quantised"), quantization=other)
    assert caught.value.mend == f"write quantization: {kind}"


def test_it_is_counted_as_what_it_stands_for_and_takes_fewer_bytes(kind: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512}  # bitsandbytes' tables of a layer are 1 KiB
    plain, model = make(config=wide), make(kind, config=wide)
    assert count_parameters(model).total == count_parameters(plain).total
    linear = sum(p.numel() for name, p in plain.named_parameters() if "_proj.weight" in name)
    before, after = (sum(t.untyped_storage().nbytes() for t in held_tensors(m)) for m in (plain, model))
    saved = (before - after) / linear
    assert {"int8": 2.95, "nf4": 3.4}[kind] < saved < {"int8": 3.0, "nf4": 3.5}[kind]


def test_experts_in_one_tensor_are_told_with_their_bytes(kind: str) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
               "decoder_sparse_step": 1}  # fmt: skip
    model = make(kind, config=experts, dtype="bfloat16")
    size = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert size == 2 * 4 * 3 * 64 * 64 * 2  # of two layers, four experts, three matrices
    note = left_whole(add_lora(model, r=4))
    assert note is not None
    assert f"stay in bfloat16: {show_size(size)} of" in note
    assert left_whole(make(kind)) is left_whole(make(config=experts)) is None


def test_its_weights_are_not_taken_for_activations(kind: str) -> None:
    model = make(kind)
    with LiveBytes(model, model.model.layers) as bytes_, torch.no_grad():
        model.model.layers[0].mlp.up_proj(torch.ones(1, 64))
    written_out = 64 * 96 * 4
    assert bytes_.peak <= 2 * written_out + 4 * 96 + 4096
    assert sum(bytes_.live.values()) <= 4096


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit:UserWarning")  # it is what the test allows for
def test_adapters_train_on_it_come_back_from_disk_and_merge(kind: str, tmp_path: Path) -> None:
    model = add_lora(make(kind), r=4)
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_lora(make(kind), tmp_path)), logits(model))
    distance = (logits(model) - logits(model.merge_and_unload())).norm() / logits(make()).norm()
    assert distance < {"int8": 0.02, "nf4": 0.2}[kind]  # rounded again, to 8 and to 4 bits


def test_auto_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_quantization("auto", CPU) == "int8"
    assert choose_quantization("auto", torch.device("cuda")) == "nf4"
    assert choose_quantization("nf4", CPU) == "nf4"


@pytest.mark.parametrize("both", [False, True])
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, both: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if both or name == "torchao" else object())
    with pytest.raises(ArgumentError, match="int8 needs torchao, which is not installed") as caught:
        choose_quantization("auto", CPU)
    assert caught.value.where == "quantization"
    assert caught.value.mend.startswith("pip install torchao")
    assert ("write quantization: nf4" in caught.value.mend) != both


def test_a_model_without_linear_layers_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(ArgumentError, match=r"GPT2LMHeadModel has no nn\.Linear") as caught:
        quantize(AutoModelForCausalLM.from_config(config), "int8", CPU)
    assert caught.value.where == "finetuning_type"
