"""Quantised bases: the same weights as transformers' own loader gives, and errors that say what is missing."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import streamtune
from streamtune.base.text import show_size
from streamtune.errors import ArgumentError
from streamtune.models import (
    ModelOptions,
    PackedExperts,
    add_lora,
    choose_quantization,
    count_parameters,
    init_model,
    load_model,
    load_peft_adapters,
)
from streamtune.models.packed import pack_experts
from streamtune.models.quantize import PACKAGES, quantization_kind, quantize, unquantized_experts_note
from streamtune.plan.simulate import LiveBytes
from streamtune.plan.simulate.memory import model_tensors

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


def make(quantization: str | None = None, config: Mapping[str, Any] | None = None, dtype: str = "auto") -> Any:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    options = ModelOptions(dtype, quantization)
    return init_model({**CONFIG, **(config or {})}, options, vocab_size=64, token_ids=ids, seed=3)


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
    ours = load_model(str(folder), ModelOptions(dtype, kind))
    config = their_config(kind, getattr(torch, dtype))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).train()
    assert quantization_kind(ours) == quantization_kind(theirs) == kind
    assert torch.equal(logits(ours), logits(theirs))
    if dtype == "float32":  # torch 2.11 draws other weights in bfloat16 than in float32
        assert torch.equal(logits(ours), logits(make(kind)))
    assert not torch.equal(logits(ours), logits(load_model(str(folder), ModelOptions(dtype))))

    theirs.save_pretrained(tmp_path / "quantised")  # a checkpoint that comes quantised
    again = load_model(str(tmp_path / "quantised"), ModelOptions(dtype, kind))
    assert torch.equal(logits(again), logits(ours))
    other = next(name for name in PACKAGES if name != kind)
    with pytest.raises(ArgumentError, match=f"already quantised as {kind}, but {other} is requested") as caught:
        load_model(str(tmp_path / "quantised"), ModelOptions(quantization=other))
    assert caught.value.fix == f"write quantization: {kind}"


def test_it_is_counted_as_what_it_stands_for_and_takes_fewer_bytes(kind: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512}  # bitsandbytes' tables of a layer are 1 KiB
    plain, model = make(config=wide), make(kind, config=wide)
    assert count_parameters(model).total == count_parameters(plain).total
    linear = sum(p.numel() for name, p in plain.named_parameters() if "_proj.weight" in name)
    before, after = (sum(t.untyped_storage().nbytes() for t in model_tensors(m)) for m in (plain, model))
    saved = (before - after) / linear
    assert {"int8": 2.95, "nf4": 3.4}[kind] < saved < {"int8": 3.0, "nf4": 3.5}[kind]


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
           "decoder_sparse_step": 1}  # fmt: skip


def test_experts_in_one_tensor_are_quantised_too(kind: str) -> None:
    plain, model = make(config=EXPERTS, dtype="bfloat16"), make(kind, config=EXPERTS, dtype="bfloat16")
    packed = [x for x in model.parameters() if isinstance(x, PackedExperts)]
    assert len(packed) == 4
    assert unquantized_experts_note(model) is None
    assert count_parameters(model).total == count_parameters(plain).total
    whole = sum(x.nbytes for name, x in plain.named_parameters() if ".experts." in name)
    size = sum(part.untyped_storage().nbytes() for x in packed for part in x.packed_tensors())
    size -= len(packed) * 1024 if kind == "nf4" else 0  # bitsandbytes' table
    assert size / whole == pytest.approx({"int8": 0.5 + 1 / 64, "nf4": 0.25 + 1 / 128}[kind], rel=0.01)


def test_experts_of_a_checkpoint_that_came_quantised_are_told_with_their_bytes(kind: str) -> None:
    model = make(config=EXPERTS, dtype="bfloat16")
    experts = {name: x for name, x in model.named_parameters() if ".experts." in name}
    quantize(model, kind, CPU)
    for name, x in experts.items():  # as the quantisers of transformers leave them
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._parameters[key] = x.requires_grad_(False)
    size = sum(x.nbytes for x in experts.values())
    assert size == 2 * 4 * 3 * 64 * 64 * 2  # of two layers, four experts, three matrices
    note = unquantized_experts_note(add_lora(model, r=4))
    assert note is not None
    assert f"stay in bfloat16: {show_size(size)} of" in note
    assert unquantized_experts_note(make(kind)) is unquantized_experts_note(make(config=EXPERTS)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 96, 64), (3, 5, 7), (300, 16, 32)])
def test_packed_experts_are_written_out_where_they_are_used(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The whole, one expert and some of them are the same bits; each expert is rounded by itself."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed: Any = nn.Parameter(pack_experts(weight, kind, CPU), requires_grad=False)
    whole = packed.dequantize()
    assert type(packed) is PackedExperts
    assert isinstance(packed, nn.Parameter)
    assert type(whole) is Tensor
    assert (packed.shape, packed.dtype) == (whole.shape, whole.dtype) == (weight.shape, dtype)
    assert (whole - weight).norm() < {"int8": 0.01, "nf4": 0.11}[kind] * weight.norm()
    for index in (0, -1, 2, torch.tensor(1), slice(1, 3), torch.tensor([2, 0])):
        assert torch.equal(packed[index], whole[index])
    for index in range(3):
        alone = pack_experts(weight[index : index + 1], kind, CPU)
        if kind == "int8":  # the scales of nf4 are rounded together
            assert torch.equal(alone[0], whole[index])
    assert torch.equal(packed.transpose(1, 2), whole.transpose(1, 2))
    right = whole.new_ones(shape[0], shape[2], shape[2])
    assert torch.equal(torch.baddbmm(packed, whole, right), torch.baddbmm(whole, whole, right))


def test_nf4_experts_are_what_bitsandbytes_makes_of_them() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(5, 48, 64, generator=torch.Generator().manual_seed(0))
    values, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(pack_experts(weight, "nf4", CPU).dequantize(), functional.dequantize_4bit(values, state))


@pytest.mark.parametrize("transposed", [False, True])
def test_int8_experts_have_a_scale_for_each_output(transposed: bool) -> None:
    weight = torch.ones(2, 4, 6)
    outputs = weight.transpose(1, 2) if transposed else weight
    outputs[:, 1] *= 1000
    packed = pack_experts(weight, "int8", CPU, transposed=transposed)
    torch.testing.assert_close(packed.dequantize(), weight, rtol=1e-6, atol=0)
    assert (pack_experts(weight, "int8", CPU, transposed=not transposed).dequantize() - weight).abs().max() > 0.5


def test_packed_experts_move_widen_and_are_copied(kind: str) -> None:
    model = make(kind, config=EXPERTS, dtype="bfloat16")
    name = next(name for name, x in model.named_parameters() if isinstance(x, PackedExperts))
    bits = model.get_parameter(name).dequantize()
    twin = copy.deepcopy(model)
    other: Any = twin.get_parameter(name)
    assert not {x.data_ptr() for x in other.packed_tensors()} & {
        x.data_ptr() for x in model.get_parameter(name).packed_tensors()
    }
    wide = twin.float().get_parameter(name)
    assert wide is other
    assert wide.dtype == torch.float32
    assert torch.equal(wide.dequantize(), bits.float())  # the numbers that the model computes with, not better ones
    twin.get_submodule(name.rpartition(".")[0]).to("meta")
    moved: Any = twin.get_parameter(name)
    assert all(part.device.type == "meta" for part in moved.packed_tensors())
    assert moved.dequantize().shape == bits.shape
    with pytest.raises(TypeError, match="packed experts are frozen"):
        model.get_parameter(name).set_(bits)


def test_experts_are_written_out_for_one_layer_at_a_time(kind: str) -> None:
    """In a forward and backward of the streamed model, with the experts of one layer's chunk at most."""
    model = add_lora(make(kind, config={**EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 512}), r=4)
    ids = torch.arange(3, 51)[None]
    layer = 4 * 3 * 64 * 512 * 4
    with streamtune.stream(model, chunk_size=16):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=False)
        with LiveBytes(model, model.get_base_model().model.layers) as bytes_:
            model(input_ids=ids, labels=ids).loss.backward()
    assert layer < bytes_.peak < 2.5 * layer  # packed and with the adapters' product: no two of four layers


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
    assert torch.equal(logits(load_peft_adapters(make(kind), tmp_path)), logits(model))
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
    assert caught.value.fix.startswith("pip install torchao")
    assert ("write quantization: nf4" in caught.value.fix) != both


def test_a_model_without_linear_layers_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(ArgumentError, match=r"GPT2LMHeadModel has no nn\.Linear") as caught:
        quantize(AutoModelForCausalLM.from_config(config), "int8", CPU)
    assert caught.value.where == "finetuning_type"
