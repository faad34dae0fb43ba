"""Trained columns (PaCA): what is computed, what is kept for the backward, and that the base stays as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exactness.families import batch, build, gradients, reference
from tests.exactness.test_adapters import Nothing, moved
from tests.precision_kit import Float64, total_error
from torch import nn
from torch.nn.functional import linear

import streamtune
from streamtune.errors import ArgumentError
from streamtune.models import AdapterSpec, add_adapters, load_peft_adapters, save_pretrained
from streamtune.models.quantize import quantize
from streamtune.schedule import Schedule

SPEC = AdapterSpec(kind="paca", r=4)
SCHEDULES: dict[str, dict[str, Any]] = {
    "weights on host": {"weights": "host", "offload": "host"},
    "two levels": {"levels": 2, "segment_size": 2},
    "chunk order": {"order": "chunk"},
    "last layer whole": {"keep_layers": 1},
}


def columns_of(model: Any) -> dict[str, Any]:
    """The layers with trained columns, by the name of their module in the base."""
    return {name: module for name, module in model.get_base_model().named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_those_columns_of_the_gradient_of_whole_weights(family: str) -> None:
    """The paper's equation, in fp64: ``dL/dW[:, index]`` of the model that has the columns in its weights."""
    base = build(family).double()
    plain = copy.deepcopy(base)
    model = moved(add_adapters(base, SPEC).double())
    layers = columns_of(model)
    with torch.no_grad():
        for name, layer in layers.items():
            plain.get_submodule(name).weight.add_(layer.get_delta_weight("default"))
    with Float64():
        loss, want = gradients(plain, batch("masked"))
        found_loss, found = gradients(model, batch("masked"))
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    assert len(found) == len(layers)
    for name, layer in layers.items():
        whole = want[f"{name}.weight"].T if family == "gpt2" else want[f"{name}.weight"]
        own = found[f"base_model.model.{name}.lora_B.default.weight"]
        torch.testing.assert_close(own, whole[:, layer.lora_A["default"].index], rtol=1e-9, atol=1e-13)


def test_one_product_and_the_columns_of_its_input() -> None:
    """The backward keeps ``[tokens, r]`` of the input; the forward is the product of the changed weight, to the bit."""
    model = moved(add_adapters(build("llama"), SPEC))
    layer: Any = next(iter(columns_of(model).values()))
    base, x = layer.get_base_layer(), torch.randn(64, layer.in_features)
    held = {base.weight.data_ptr(), layer.lora_B["default"].weight.data_ptr(), layer.lora_A["default"].index.data_ptr()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = layer(x)
    assert [tuple(x.shape) for x in kept if x.data_ptr() not in held] == [(64, 4)]
    assert torch.equal(found, linear(x, base.weight + layer.get_delta_weight("default"), base.bias))


def test_the_base_stays_as_it_is() -> None:
    base = build("qwen3", dtype=torch.bfloat16)
    before = copy.deepcopy(base.state_dict())
    with torch.no_grad():
        want = base(**batch("plain")).logits
    model: Any = add_adapters(base, SPEC)
    layers = columns_of(model)
    with torch.no_grad():
        assert torch.equal(model(**batch("plain")).logits, want)
    moved(model)
    loss = model(**batch("plain")).loss
    with torch.no_grad(), model.disable_adapter():  # a reference is computed between a forward and its backward
        assert torch.equal(model(**batch("plain")).logits, want)
    loss.backward()
    assert all(torch.equal(layer.get_base_layer().weight, before[f"{name}.weight"]) for name, layer in layers.items())
    assert all(layer.lora_B["default"].weight.grad.norm() > 0 for layer in layers.values())


def test_calls_of_one_layer_before_their_backward() -> None:
    model = moved(add_adapters(build("llama"), SPEC))
    first, second = batch("plain"), batch("masked")
    apart = gradients(model, first)[1], gradients(model, second)[1]
    (model(**first).loss + model(**second).loss).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, apart[0][name] + apart[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.quick("weights on host")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_under_other_schedules(schedule: str) -> None:
    model = moved(add_adapters(build("qwen3", num_hidden_layers=4), SPEC))
    inputs = batch("multiturn", rows=2, length=29)
    want = reference(model, inputs)
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, **SCHEDULES[schedule])):
        want.check(gradients(model, inputs))


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_in_bf16(family: str) -> None:
    """As near to fp64 as torch's own, in the mean of 16: one draw of bf16 varies."""
    inputs, torchs, ours = batch("masked"), 0.0, 0.0
    for seed in range(16):
        model = moved(add_adapters(build(family, dtype=torch.bfloat16), SPEC), seed)
        assert {x.dtype for x in model.parameters() if x.requires_grad} == {torch.float32}
        want = reference(model, inputs)
        torchs += total_error(want.plain[1], want.truth[1]) / 16
        with streamtune.stream(model, chunk_size=8):
            ours += total_error(gradients(model, inputs)[1], want.truth[1]) / 16
    assert ours <= 1.1 * torchs <= 0.05


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_saved_file_is_a_lora_that_peft_merges_to_the_same_model(family: str, tmp_path: Path) -> None:
    model = moved(add_adapters(build(family), SPEC)).eval()
    save_pretrained(model, Nothing(), tmp_path)
    with torch.no_grad():
        want = model(**batch("plain")).logits
    theirs: Any = load_peft_adapters(build(family), tmp_path).eval()
    assert type(next(iter(columns_of(theirs).values()))).__name__ == "Linear"
    with torch.no_grad():
        found = theirs(**batch("plain")).logits
        merged = theirs.merge_and_unload()(**batch("plain")).logits
        ours = model.merge_and_unload()(**batch("plain")).logits
    assert (found - want).norm() <= 1e-6 * want.norm()
    assert torch.equal(merged, want)
    assert torch.equal(ours, want)


def test_columns_are_drawn_by_the_seed_for_each_layer() -> None:
    def drawn(seed: int) -> list[list[int]]:
        layers = columns_of(add_adapters(build("llama"), SPEC, seed=seed))
        return [layer.lora_A["default"].index.tolist() for layer in layers.values()]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len({tuple(index) for index in drawn(1)}) > 10
    assert all(index == sorted(set(index)) and len(index) == 4 for index in drawn(1))


def test_ranks_by_pattern_have_a_scale_of_one() -> None:
    model = moved(add_adapters(build("llama"), AdapterSpec(kind="paca", r=4, ranks={"o_proj": 2})))
    layers = columns_of(model)
    assert {layer.scaling["default"] for layer in layers.values()} == {1.0}
    assert layers["model.layers.0.self_attn.o_proj"].lora_A["default"].index.shape == (2,)
    inputs = batch("plain")
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, inputs))


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="larger than the matrix"):
        add_adapters(build("llama"), AdapterSpec(kind="paca", r=40))
    with pytest.raises(ArgumentError, match="cannot be used on experts stacked in one tensor"):
        add_adapters(build("mixtral"), SPEC)
    pytest.importorskip("torchao")
    base: nn.Module = build("llama")
    quantize(base, "int8", torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="which is quantised"):
        add_adapters(base, SPEC)  # type: ignore[arg-type]
