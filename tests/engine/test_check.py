"""The preflight passes models that stream exactly, refuses those that do not, and leaves no trace either way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import streamtune
from streamtune.engine.head import StreamedHead
from streamtune.engine.hf_names import cache_argument, cache_keyword
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build as build_any
from tests.exactness.families import FAMILIES, batch, build, gradients, reference


@pytest.mark.quick("llama", "gemma2", "gpt2", "mixtral", "gpt_oss")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_tested_families_pass(family: str, dtype: torch.dtype) -> None:
    with streamtune.stream(build(family, dtype=dtype)) as handle:
        handle.check()


@pytest.mark.full
@pytest.mark.parametrize("family", ["mamba", "mamba2", "zaya", "qwen3_next", "falcon_h1", "gemma3n_text", "bloom"])
def test_layers_of_other_kinds_pass_in_bf16(family: str) -> None:
    """Some of them keep the residual stream in fp32 between layers that compute in bf16."""
    with streamtune.stream(build_any(family).to(torch.bfloat16)) as handle:
        handle.check()


def test_lora_passes() -> None:
    adapted = peft.get_peft_model(
        build("qwen3", dtype=torch.bfloat16),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5),
    )
    with streamtune.stream(adapted) as handle:
        handle.check()


@pytest.mark.parametrize("trainable", ["none", "norms"])
def test_frozen_parameters_pass(trainable: str) -> None:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable in name)
    with streamtune.stream(model) as handle:
        handle.check()
    assert [name for name, p in model.named_parameters() if p.requires_grad and trainable not in name] == []


def test_a_head_that_is_not_streamed_passes() -> None:
    with streamtune.stream(build("llama"), head=False) as handle:
        handle.check()


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_routes_that_flip_on_rounding_are_no_alarm(scale: float) -> None:
    """Sixteen experts and a router that can hardly tell them apart: bf16 rounding sends tokens elsewhere."""
    model = build("mixtral", num_local_experts=16, num_experts_per_tok=4, num_hidden_layers=4, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(scale)
    with streamtune.stream(model) as handle:
        handle.check()


def taking_cache(forward: Any) -> Any:
    """Call the cache of a layer's forward as the installed ``transformers`` calls it."""
    name = cache_argument(LlamaDecoderLayer.forward)
    signature = inspect.signature(forward)

    @wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **{"cache" if key == name else key: value for key, value in kwargs.items()})

    named.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(name=name) if p.name == "cache" else p for p in signature.parameters.values()]
    )
    return named


class CumulativeMean(LlamaDecoderLayer):
    @taking_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        out = super().forward(hidden_states, **cache_keyword(LlamaDecoderLayer.forward, cache), **kwargs)
        seen = torch.arange(1, out.shape[1] + 1, device=out.device)[:, None]
        return out + 0.3 * out.cumsum(1) / seen.to(out.dtype)


class ShiftByOne(LlamaDecoderLayer):
    @taking_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(
            hidden_states + 0.1 * before, **cache_keyword(LlamaDecoderLayer.forward, cache), **kwargs
        )


class LosesGradient(LlamaDecoderLayer):
    """The right output and the wrong gradient, wherever there is a cache."""

    @taking_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        out = super().forward(hidden_states, **cache_keyword(LlamaDecoderLayer.forward, cache), **kwargs)
        return out if cache is None else hidden_states + (out - hidden_states).detach()


class Breaks(LlamaDecoderLayer):
    @taking_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        if cache is not None:
            raise KeyError("no such thing")
        return super().forward(hidden_states, **cache_keyword(LlamaDecoderLayer.forward, cache), **kwargs)


class WantsMore(LlamaDecoderLayer):
    @taking_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        raise ValueError("give me an image")


class Shared(LlamaDecoderLayer):
    """Reads what the layer before it left behind, as models with shared keys and values do."""

    left: list[Tensor]

    @taking_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        if self.self_attn.layer_idx == 0:
            self.left[:] = [hidden_states.tanh()]
        out = super().forward(hidden_states, **cache_keyword(LlamaDecoderLayer.forward, cache), **kwargs)
        start = 0 if cache is None else cache.get_seq_length()
        left = self.left[0] if self.left[0].shape[1] == out.shape[1] else self.left[0][:, start : start + out.shape[1]]
        return out + left


def mixing(kind: type[nn.Module], dtype: torch.dtype = torch.float32, layers: tuple[int, ...] = (1,)) -> nn.Module:
    """A llama some of whose layers are of another kind."""
    model = build("llama", num_hidden_layers=3, dtype=dtype)
    for index in layers:
        model.model.layers[index].__class__ = kind
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [CumulativeMean, ShiftByOne])
def test_tokens_that_meet_outside_the_cache_are_refused(kind: type[nn.Module], dtype: torch.dtype) -> None:
    with (
        streamtune.stream(mixing(kind, dtype)) as handle,
        pytest.raises(
            UnsupportedModelError,
            match=rf"LlamaForCausalLM is not streamed exactly: the output of {kind.__name__} .* differs .* by \d",
        ) as caught,
    ):
        handle.check()
    assert caught.value.where == f"layer 1 of 3 ({kind.__name__})"
    assert "without streaming" in caught.value.fix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_output_with_a_wrong_gradient_is_refused(dtype: torch.dtype) -> None:
    with (
        streamtune.stream(mixing(LosesGradient, dtype)) as handle,
        pytest.raises(UnsupportedModelError, match=r"the gradient of .* of LosesGradient") as caught,
    ):
        handle.check()
    assert caught.value.where == "layer 1 of 3 (LosesGradient)"


def test_a_tensor_left_by_another_layer_is_refused() -> None:
    Shared.left = []
    with (
        streamtune.stream(mixing(Shared, layers=(0, 1))) as handle,
        pytest.raises(UnsupportedModelError, match="neither argument nor parameter") as caught,
    ):
        handle.check()
    assert caught.value.where == "layer 1 of 3 (Shared)"


def test_an_exception_in_a_chunk_is_refused_by_name() -> None:
    with (
        streamtune.stream(mixing(Breaks)) as handle,
        pytest.raises(UnsupportedModelError, match=r"does not run in chunks .KeyError: 'no such thing'") as caught,
    ):
        handle.check()
    assert caught.value.where == "layer 1 of 3 (Breaks)"


def test_a_model_that_does_not_run_unstreamed_is_refused() -> None:
    with (
        streamtune.stream(mixing(WantsMore)) as handle,
        pytest.raises(UnsupportedModelError, match=r"fails to compute a loss from 2 x 24 tokens of text") as caught,
    ):
        handle.check()
    assert "give me an image" in str(caught.value.where)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (
            "deepseek_v4",
            "reads 'store_compression_weights' from its cache, a kind of state that streaming does not support",
        ),
        ("minimax_m3_vl_text", "reads 'update_index' from its cache, a kind of state that streaming does not support"),
        ("prophetnet", "gets 72 hidden states but 'attention_mask' over 24 tokens: several streams concatenated"),
    ],
)
def test_what_layers_ask_beyond_keys_values_and_known_states_is_refused_by_name(family: str, said: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    with streamtune.stream(build_any(family)) as handle, pytest.raises(UnsupportedModelError, match=said):
        handle.check()


def test_what_the_engine_refuses_by_itself_is_refused_before_training() -> None:
    with (
        streamtune.stream(build("gemma3_text", use_bidirectional_attention=True)) as handle,
        pytest.raises(UnsupportedModelError, match="Gemma3ForCausalLM: the attention mask lets a token see later"),
    ):
        handle.check()


def test_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss function of the model's own is refused by name before (tests/transparency/test_losses.py)."""
    model = build("llama")
    right = StreamedHead.cross_entropy
    monkeypatch.setattr(StreamedHead, "cross_entropy", lambda *args: right(*args) / 2)
    with streamtune.stream(model) as handle:
        with pytest.raises(UnsupportedModelError, match=r"its head.s loss differs by 5\.0e-01") as caught:
            handle.check()
        assert "head=False" in caught.value.fix
    with streamtune.stream(model, head=False) as handle:
        handle.check()


def test_batch_normalisation_is_refused_by_stream() -> None:
    model = build("llama")
    model.model.layers[0].mlp.norm = nn.BatchNorm1d(4)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has a BatchNorm1d in its LlamaDecoderLayer"):
        streamtune.stream(model)


def state(model: nn.Module) -> dict[str, Any]:
    """All that a forward or a backward could move."""
    return {
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "parameters": [(id(p), p.data_ptr(), p._version) for p in model.parameters()],
        "grads": [(id(p.grad), p.grad.clone()) for p in model.parameters() if p.grad is not None],
        "buffers": [b.clone() for b in model.buffers()],
        "forwards": [id(m.__dict__.get("forward")) for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "checkpointing": [getattr(m, "gradient_checkpointing", None) for m in model.modules()],
        "attention": model.config._attn_implementation_internal,
        "config": model.config.to_dict(),
        "loss": model.__dict__.get("_loss_function"),
        "random": torch.get_rng_state(),
        "precision": torch.get_float32_matmul_precision(),
        "grad_mode": torch.is_grad_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    ("make", "passes"),
    [
        (lambda: build("gemma2"), True),
        (lambda: build("mixtral", dtype=torch.bfloat16), True),
        (lambda: mixing(CumulativeMean), False),
        (lambda: mixing(LosesGradient), False),
        (lambda: mixing(Breaks), False),
        (lambda: mixing(WantsMore), False),
    ],
)
def test_nothing_is_touched(make: Callable[[], nn.Module], passes: bool) -> None:
    model: Any = make()
    model.model.layers[0].mlp.eval()
    model.gradient_checkpointing_enable()
    model.model.embed_tokens.weight.requires_grad_(False)
    fired: list[int] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: fired.append(1))
            parameter.register_post_accumulate_grad_hook(lambda p: fired.append(1))
            parameter.grad = torch.ones_like(parameter)
    handle = streamtune.stream(model)
    with torch.no_grad():
        before = state(model)
        if passes:
            handle.check()
        else:
            with pytest.raises(UnsupportedModelError):
                handle.check()
        after = state(model)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert not fired
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_training_goes_on_after_it() -> None:
    model = build("qwen3")
    want = reference(model, batch("right"))
    with streamtune.stream(model, chunk_size=8) as handle:
        handle.check()
        want.check(gradients(model, batch("right")))


def test_a_removed_handle_and_a_model_without_weights() -> None:
    handle = streamtune.stream(build("llama"))
    handle.remove()
    with pytest.raises(ArgumentError, match="no longer streamed"):
        handle.check()
    with streamtune.stream(build("llama").to("meta")) as handle, pytest.raises(ArgumentError, match="no weights"):
        handle.check()


class Explodes(LlamaDecoderLayer):
    """A gradient that is no number, wherever there is a cache; the output is right."""

    @taking_cache
    def forward(self, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        out = super().forward(hidden_states, **cache_keyword(LlamaDecoderLayer.forward, cache), **kwargs)
        return out if cache is None else out + (hidden_states - hidden_states.detach()).sqrt() * 0


def test_a_gradient_that_is_no_number_is_refused() -> None:
    with (
        streamtune.stream(mixing(Explodes)) as handle,
        pytest.raises(UnsupportedModelError, match=r"the gradient of .* of Explodes .* by inf"),
    ):
        handle.check()
