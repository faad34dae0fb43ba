"""LoftQ: adapters and base together are nearer to the weights than the base, and are saved as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exactness.families import batch, build, gradients
from tests.exactness.test_adapters import Nothing, moved
from tests.precision_kit import Float64, Reference, in_float64
from torch import Tensor

import streamtune
from streamtune.errors import ArgumentError
from streamtune.models import (
    AdapterSpec,
    SavedLoftqQuantizer,
    add_adapters,
    load_initial_adapters,
    load_peft_adapters,
    make_loftq_quantizer,
)
from streamtune.models.adapters.initial_values import LOFTQ_FILE
from streamtune.models.adapters.targets import lora_layers
from streamtune.models.export import save_pretrained
from streamtune.models.quantize import PACKAGES, dequantize_weight, is_quantized, quantize

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(params=["int8", "nf4"])
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


def made(kind: str, iterations: int = 1, dtype: torch.dtype = torch.float32, **choices: Any) -> Any:
    """A quantised model with adapters as they start."""
    spec = AdapterSpec(kind="loftq", **{"r": 8, **choices})
    base = build("llama", dtype=dtype, **WIDE)
    quantize(base, kind, CPU, layer_quantizer=make_loftq_quantizer(spec, iterations=iterations, seed=3))
    return add_adapters(base, spec, seed=3)


def errors_of(model: Any, weights: dict[str, Tensor]) -> dict[str, tuple[float, float, float]]:
    """By layer: the norms of W - Q of the model's base, of W - (Q + s B A), and of W."""
    found = {}
    for name, layer in lora_layers(model):
        weight = weights[f"{name}.weight"].double()
        base = dequantize_weight(layer.get_base_layer().weight).double()
        a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        rest = weight - base
        norms = (rest, rest - layer.scaling["default"] * b @ a, weight)
        found[name] = tuple(float(x.detach().norm()) for x in norms)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_and_adapters_are_nearer_to_the_weights(kind: str, dtype: torch.dtype) -> None:
    """With one iteration the base is that of any run, and the adapters are the best of their rank for what is left."""
    weights = dict(build("llama", dtype=dtype, **WIDE).named_parameters())
    model = made(kind, dtype=dtype, ranks={"o_proj": 4}, alphas={"v_proj": 3})
    plain = build("llama", dtype=dtype, **WIDE)
    quantize(plain, kind, CPU)
    for name, parameter in plain.named_parameters():
        if is_quantized(parameter):
            other = model.get_base_model().get_submodule(name.rpartition(".")[0]).get_base_layer().weight
            assert torch.equal(dequantize_weight(parameter), dequantize_weight(other))
    errors = errors_of(model, weights)
    assert len(errors) == 14
    for name, layer in lora_layers(model):
        before, after, _ = errors[name]
        rest = weights[f"{name}.weight"].double() - dequantize_weight(layer.get_base_layer().weight).double()
        rank = layer.r["default"]
        best = float(torch.linalg.svdvals(rest.detach())[rank:].norm())
        assert after == pytest.approx(best, rel=2e-3), name
        assert after < 0.95 * before, name


def test_the_error_falls_with_iterations(kind: str) -> None:
    weights = dict(build("llama", **WIDE).named_parameters())
    found = [errors_of(made(kind, iterations), weights) for iterations in (1, 2, 5)]
    for name in found[0]:
        first, second, fifth = (errors[name][1] for errors in found)
        assert fifth <= second * (1 + 1e-6) <= first * (1 + 2e-6), name
    totals = [sum(after**2 for _, after, _ in errors.values()) ** 0.5 for errors in found]
    assert totals[1] < totals[0]
    assert totals[2] < totals[1]


def test_the_algorithm_of_the_paper_by_hand() -> None:
    """Two iterations of each layer, with exact singular values."""
    functional = pytest.importorskip("bitsandbytes").functional
    model = made("nf4", 2)
    weights = dict(build("llama", **WIDE).named_parameters())

    def rounded(weight: Tensor) -> Tensor:
        packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        written: Tensor = functional.dequantize_4bit(packed, state)
        return written

    def leading(rest: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(rest)
        return u[:, :8] * s[:8] @ v[:8]

    ours = errors_of(model, weights)
    for name in ours:
        weight = weights[f"{name}.weight"].detach()
        taken, errors = torch.zeros_like(weight), []
        for _ in range(2):
            rest = weight - rounded(weight - taken)
            taken = leading(rest)
            errors.append(float((rest - taken).norm()))
        assert ours[name][1] == pytest.approx(min(errors), rel=0.01), name


@pytest.mark.parametrize("iterations", [1, 3])
def test_saved_and_loaded_to_the_same_bits(kind: str, iterations: int, tmp_path: Path) -> None:
    model = moved(made(kind, iterations))
    save_pretrained(model, Nothing(), tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / LOFTQ_FILE).is_file() == (iterations > 1)
    base = build("llama", **WIDE)
    quantize(base, kind, CPU, layer_quantizer=SavedLoftqQuantizer.load(tmp_path))
    again = load_peft_adapters(base, tmp_path)
    inputs = batch("plain")
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, again(**inputs).logits)
    other = tmp_path / "again"
    save_pretrained(again, Nothing(), other)  # type: ignore[arg-type]
    for name in ("adapter_model.safetensors", LOFTQ_FILE):
        if (tmp_path / name).is_file():
            assert (other / name).read_bytes() == (tmp_path / name).read_bytes()
    if iterations > 1:
        plain = build("llama", **WIDE)
        quantize(plain, kind, CPU)
        with pytest.raises(ArgumentError, match="changed before quantisation"):
            load_initial_adapters(plain, str(tmp_path))


def test_what_was_taken_is_checked(kind: str, tmp_path: Path) -> None:
    save_pretrained(made(kind, 2), Nothing(), tmp_path)  # type: ignore[arg-type]
    for other in ({"hidden_size": 32, "intermediate_size": 48}, {**WIDE, "num_hidden_layers": 1}):
        with pytest.raises(ArgumentError, match=r"trained on another model: its layer model\.layers"):
            quantize(build("llama", **other), kind, CPU, layer_quantizer=SavedLoftqQuantizer.load(tmp_path))
    (tmp_path / LOFTQ_FILE).write_bytes(b"none")
    with pytest.raises(ArgumentError, match=f"{LOFTQ_FILE} is damaged"):
        SavedLoftqQuantizer.load(tmp_path)


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_gradient_is_that_of_the_same_model_unstreamed(kind: str, iterations: int) -> None:
    model = moved(made(kind, iterations))
    wide = in_float64(moved(add_adapters(build("llama", **WIDE), AdapterSpec(r=8), seed=3)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            written = dequantize_weight(parameter) if is_quantized(parameter) else parameter
            wide.get_parameter(name).copy_(written)
    with Float64():
        truth = gradients(wide, batch("masked"))
    want = Reference(truth, gradients(model, batch("masked")))
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, batch("masked")))


def test_what_has_no_weights_to_start_from_is_refused(kind: str, tmp_path: Path) -> None:
    spec = AdapterSpec(kind="loftq", r=8)
    for quantised in (False, True):
        base = build("llama", **WIDE)
        if quantised:
            quantize(base, kind, CPU)
        with pytest.raises(ArgumentError, match="no weights of this model were quantised for") as caught:
            add_adapters(base, spec)
        assert caught.value.where == "adapter_type"
    base = build("llama", **WIDE)
    quantize(base, kind, CPU)
    with pytest.raises(ArgumentError, match="already quantised"):
        quantize(base, kind, CPU, layer_quantizer=make_loftq_quantizer(spec, iterations=1, seed=0))
    with pytest.raises(ArgumentError, match="larger than the matrix"):
        made(kind, r=65)
    experts = build("mixtral")
    with pytest.raises(ArgumentError, match="loftq cannot be used on experts"):
        quantize(experts, kind, CPU, layer_quantizer=make_loftq_quantizer(spec, iterations=1, seed=0))
