"""Every kind of adapters: streamed gradients three ways, on quantised bases too; merged and saved, the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import streamtune
from streamtune.base.adapters import ADAPTERS, AdapterName
from streamtune.models import AdapterSpec, add_adapters, load_run_adapters, save_pretrained
from streamtune.models.adapters.initial_values import FACTORS_OF_WEIGHT
from streamtune.models.quantize import quantize
from streamtune.programs.export.merge import merged_weights
from streamtune.recipe.keys.adapters import UNQUANTISED
from streamtune.schedule import Schedule
from tests.precision_kit import Errors, Float64, Reference, excesses, in_float64, mean_errors, told

from .families import batch, build, gradients, reference
from .test_quantised import rounded

FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "mistral")
CPU = torch.device("cpu")
ON_WHOLE = [name for name, kind in ADAPTERS.items() if kind.start != "quantisation"]
"""Kinds that can be on whole weights; the other is in tests/models/test_loftq.py."""


def adapted(kind: str, family: str = "llama", *, quantization: str | None = None, **choices: Any) -> Any:
    """A model with adapters away from where they start, which for most is a function that is zero."""
    base = build(family)
    if quantization is not None:
        quantize(base, quantization, CPU)
    model = add_adapters(base, AdapterSpec(kind=kind, r=4, block_size=8, **choices))
    return moved(model)


def moved(model: Any, seed: int = 3) -> Any:
    """The model with its trained parameters moved by 0.1, each entry."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def check(model: Any) -> None:
    """Streamed gradients are as near to fp64 as torch's own: of a batch, or in the mean of eight.

    Where rounding grows through a model, that of one batch is 0.6 to 2.6 times torch's by chance, on one processor or
    another (pissa on gemma3_text: 1.2 in the mean).
    """

    def drawn(shift: int) -> dict[str, Errors]:
        inputs = batch("multiturn", rows=2, length=29)
        inputs["input_ids"] = inputs["input_ids"].roll(shift, dims=1)
        want = reference(model, inputs)
        with streamtune.stream(model, chunk_size=8):
            return want.compare(gradients(model, inputs))

    draws = [drawn(0)]
    if excesses(draws[0]):
        draws += [drawn(shift) for shift in range(1, 8)]
    wrong = excesses(mean_errors(draws))
    assert not wrong, told(wrong)


def test_a_recipe_names_the_kinds_that_there_are() -> None:
    assert get_args(AdapterName) == tuple(ADAPTERS)
    assert set(FACTORS_OF_WEIGHT) == {name for name, kind in ADAPTERS.items() if kind.start == "weights"}


@pytest.mark.quick("dora-qwen3", "pissa-llama")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ON_WHOLE)
def test_gradients_of_every_kind_and_family(kind: str, family: str) -> None:
    check(adapted(kind, family))


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in ON_WHOLE if kind not in UNQUANTISED])
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_gradients_on_a_quantised_base(kind: str, quantization: str) -> None:
    pytest.importorskip({"int8": "torchao", "nf4": "bitsandbytes"}[quantization])
    model = adapted(kind, quantization=quantization)
    wide = in_float64(adapted(kind))
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    with torch.no_grad():
        for name, weight in rounded(model):
            wide.get_submodule(name).weight.copy_(weight)
        for name, parameter in wide.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
    with Float64():
        truth = gradients(wide, batch("masked"))
    want = Reference(truth, gradients(model, batch("masked")))
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, batch("masked")))


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("whole", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head"), ("norm",)])
def test_modules_that_are_trained_whole(family: str, whole: tuple[str, ...]) -> None:
    model = adapted("lora", family, modules_to_save=whole)
    assert any("modules_to_save" in name for name, x in model.named_parameters() if x.requires_grad)
    check(model)


@pytest.mark.full
def test_tied_ends_that_are_trained_whole_stay_tied() -> None:
    base = build("qwen3", tie_word_embeddings=True)
    model = moved(add_adapters(base, AdapterSpec(r=4, modules_to_save=["embed_tokens"])))
    ends = [name for name, x in model.named_parameters() if x.requires_grad and "modules_to_save" in name]
    assert len(ends) == 1
    check(model)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "pissa"])
def test_ranks_and_scales_of_their_own(kind: str) -> None:
    model = adapted(kind, ranks={"o_proj": 2, "1.mlp.up_proj": 3}, alphas={"o_proj": 1.0}, exclude=["down_proj"])
    layers = dict(model.get_base_model().named_modules())
    assert layers["model.layers.0.self_attn.o_proj"].r["default"] == 2
    assert layers["model.layers.0.mlp.up_proj"].r["default"] == 4
    assert layers["model.layers.1.mlp.up_proj"].r["default"] == 3
    assert not hasattr(layers["model.layers.0.mlp.down_proj"], "lora_A")
    check(model)


@pytest.mark.full
@pytest.mark.parametrize("kind", FACTORS_OF_WEIGHT)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_starts_from_weights_as_papers_have_it_with_the_base_left_alone(kind: str, family: str) -> None:
    """The model that starts is the base; gradients are those of the papers' form, with ``B A`` taken from the base."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    def trained(model: Any) -> dict[str, torch.Tensor]:
        return {name: x.detach().clone() for name, x in model.named_parameters() if x.requires_grad}

    base = build(family).double()
    with torch.no_grad():
        before = base(**batch("plain")).logits
    ours = add_adapters(base, AdapterSpec(kind=kind, r=4)).double()
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch("plain")).logits, before, rtol=1e-12, atol=1e-12)
        with ours.disable_adapter():
            assert torch.equal(ours(**batch("plain")).logits, before)
    theirs = get_peft_model(
        build(family).double(),
        LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2"
        ),
        autocast_adapter_dtype=False,
    )
    values = trained(ours)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in values:
                parameter.data = values[name].clone()
        for module in theirs.modules():
            if isinstance(module, LoraLayer):
                module.get_base_layer().weight -= module.get_delta_weight("default")
    with Float64():
        for step in range(2):
            want, found = gradients(theirs, batch("masked"))[1], gradients(ours, batch("masked"))[1]
            assert want.keys() == found.keys()
            for name, gradient in want.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
            moved(theirs, step), moved(ours, step)


@pytest.mark.full
def test_the_leading_part_of_a_weight() -> None:
    model: Any = add_adapters(build("llama"), AdapterSpec(kind="pissa", r=4))
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    weight = layer.base_layer.weight.detach()
    left = weight - layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    best = torch.linalg.svdvals(weight)[4:].norm()
    assert left.norm().item() == pytest.approx(best.item(), rel=1e-3)


@pytest.mark.quick("vera", "pissa")
@pytest.mark.parametrize("kind", ON_WHOLE)
def test_saved_and_loaded_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    save_pretrained(model, Nothing(), tmp_path)
    spec = AdapterSpec(kind=kind, r=4, block_size=8)
    again: Any = load_run_adapters(build("llama"), tmp_path, spec)
    want, found = model.state_dict(), again.state_dict()
    assert want.keys() == found.keys()
    assert all(torch.equal(want[name], found[name]) for name in want)
    assert [name for name, x in model.named_parameters() if x.requires_grad] == [
        name for name, x in again.named_parameters() if x.requires_grad
    ]


class Nothing:
    """A tokenizer that writes no files."""

    def save_pretrained(self, folder: Path) -> None:
        """Write nothing."""


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "int8", "nf4"])
@pytest.mark.parametrize("kind", ON_WHOLE)
def test_merged_weights_give_the_same_logits(kind: str, quantization: str | None) -> None:
    if quantization is not None:
        pytest.importorskip({"int8": "torchao", "nf4": "bitsandbytes"}[quantization])
        if kind in UNQUANTISED:
            pytest.skip("refused on a quantised base")
    model = adapted(kind, quantization=quantization).eval()
    plain = build("llama").eval()
    with torch.no_grad():
        want = model(**batch("plain")).logits
        before = plain(**batch("plain")).logits
        plain.load_state_dict(dict(merged_weights(model)))
        found = plain(**batch("plain")).logits
    assert (before - want).norm() > 0.01 * want.norm()
    assert (found - want).norm() <= 3e-6 * want.norm()


SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two levels": {"levels": 2, "segment_size": 2},
    "chunk order": {"order": "chunk"},
    "keys and attention kept": {"keep_kv": "device", "keep_attention": "device"},
}


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_experts_that_are_one_tensor(family: str, schedule: str) -> None:
    """Peft parametrizes the experts for each call of a layer, which runs several times before its backward is over."""
    mixture: dict[str, Any] = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
    }  # fmt: skip
    more = mixture if family == "qwen3_next" else {"num_hidden_layers": 4}
    model = moved(add_adapters(build(family, **more), AdapterSpec(r=2)))
    assert any(".experts." in name for name, x in model.named_parameters() if x.requires_grad)
    inputs = batch("plain", rows=1, length=29)
    want = reference(model, inputs)
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, **SCHEDULES[schedule])):
        want.check(gradients(model, inputs))


def adapted_head(dropout: float) -> Any:
    """A model in fp64 with adapters on its head, whose effect is not zero."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, vocab_size=61, tie_word_embeddings=False,
        )
    ).double()  # fmt: skip
    model = add_adapters(model, AdapterSpec(r=4, alpha=8, dropout=dropout, target=["lm_head", "q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def test_log_probs_of_a_head_with_dropout_have_the_gradient_of_their_forward() -> None:
    """The backward computes logits again, and draws the same mask."""
    model = adapted_head(0.5)
    ids, weights = torch.randint(0, 61, (1, 64)), torch.rand(1, 64, dtype=torch.float64)
    handle = streamtune.stream(model, schedule=Schedule(chunk_size=64, head_chunk_size=16))
    parameter = next(p for name, p in model.named_parameters() if "lm_head" in name and "lora_B" in name)

    def loss() -> Tensor:
        torch.manual_seed(5)
        return (handle.logprobs(ids, ids).logprobs * weights).sum()

    loss().backward()
    gradient, direction = parameter.grad.clone(), torch.randn_like(parameter)
    found = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            found.append(float(loss()))
            parameter.sub_(direction, alpha=step)
    assert (found[0] - found[1]) / 2e-6 == pytest.approx(float((gradient * direction).sum()), rel=1e-5)
    value, after = loss(), torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), after)


def test_log_probs_of_a_projected_head_are_computed_again_with_the_same_autocast() -> None:
    model = adapted_head(0.0).float()
    ids, dtypes = torch.randint(0, 61, (1, 64)), []
    handle = streamtune.stream(model, schedule=Schedule(chunk_size=64, head_chunk_size=16))
    base = next(m for name, m in model.named_modules() if name.endswith("lm_head.base_layer"))
    plain = base.forward
    base.forward = lambda h: dtypes.append((out := plain(h)).dtype) or out
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs = handle.logprobs(ids, ids).logprobs
    logprobs.sum().backward()
    assert set(dtypes) == {torch.bfloat16}
    assert len(dtypes) >= 8  # forward and backward, four chunks each
