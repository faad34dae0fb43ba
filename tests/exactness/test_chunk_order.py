"""The order of chunks: all layers of a chunk before the next chunk, and the gradient of plain autograd."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import streamtune
from streamtune import RouterLoss, Schedule
from streamtune.engine.chain import _ChainBackward
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.models import add_lora
from tests.conformance.reducer import build as build_any
from tests.precision_kit import EXACT, Float64, in_float64

from . import test_branches as branches
from .families import FAMILIES, batch, build, gradients, reference, worst
from .test_packing import apart, packed, rows, targets
from .test_routers import routed
from .test_schedules import SOFTCAPS_AND_SINKS, assert_exact
from .test_states import sharing

ORDERS = {
    "one level": {},
    "two levels": {"levels": 2, "segment_size": 2},
    "keys on host": {"keep_kv": "host", "offload": "host", "stream_grads": True},
    "two levels, keys on host": {"levels": 2, "keep_kv": "host", "keep_attention": "host"},
    "attention kept, last layer whole": {"keep_attention": "device", "keep_layers": 1},
}
ATTENTION = ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt_oss", "gpt2", "mixtral", "bloom", "deepseek_v3")
RECURRENT = ("qwen3_next", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "mamba2", "minimax", "rwkv")
MORE_INPUTS = ("zamba2", "zaya")


def chunked(name: str, size: int = 8, **more: Any) -> Schedule:
    return Schedule(**{"chunk_size": size, "head_chunk_size": 11, "order": "chunk", **ORDERS[name], **more})


def model_of(family: str, **more: Any) -> Any:
    return build(family, **more) if family in {*FAMILIES, *SOFTCAPS_AND_SINKS} else build_any(family, **more)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of each chain that went backward."""
    found: list[int] = []
    run = _ChainBackward.run

    def counted(self: Any, *args: Any) -> Any:
        found.append(len(self.links))
        return run(self, *args)

    monkeypatch.setattr(_ChainBackward, "run", counted)
    return found


@pytest.mark.quick("qwen3", "gemma3_text", "qwen3_next")
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("family", [*ATTENTION, *RECURRENT, *MORE_INPUTS])
def test_every_form_gives_the_gradient(family: str, name: str) -> None:
    model = model_of(family)
    inputs = batch("left" if family == "gemma2" else "masked")
    want = reference(model, inputs)
    for size in (7, 16, 256):
        assert_exact(model, inputs, want, chunked(name, size))


@pytest.mark.full
@pytest.mark.parametrize("segment_size", [1, 2, 3, 5, 9])
def test_segments_of_any_size_and_dropout(segment_size: int) -> None:
    model = in_float64(build("qwen3", num_hidden_layers=5, attention_dropout=0.2))
    inputs = batch("right")

    def seeded(schedule: Schedule) -> tuple[Any, Any]:
        with Float64(), streamtune.stream(model, schedule=schedule):
            torch.manual_seed(3)
            return gradients(model, inputs)

    loss, want = seeded(Schedule(chunk_size=8))
    again, got = seeded(chunked("two levels", segment_size=segment_size))
    assert float(again) == pytest.approx(float(loss), rel=EXACT)
    assert worst(got, want) <= EXACT


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_a_balance_loss_is_of_all_layers_of_a_chain(family: str, lengths: list[int]) -> None:
    model = routed(family)
    inputs = batch("right")
    want = reference(model, inputs)
    for name in ORDERS:
        assert_exact(model, inputs, want, chunked(name))
    assert max(lengths) == 2


@pytest.mark.full
def test_a_global_balance_loss_is_that_of_the_order_of_layers() -> None:
    model, inputs = routed("mixtral"), batch("right")

    def found(schedule: Schedule) -> Any:
        loss = RouterLoss(0.5, z=0.1, scope="global")
        with streamtune.stream(model, schedule=schedule, router_loss=loss) as handle:
            handle.routers.totals = handle.count_routes([inputs, inputs])
            return gradients(model, inputs)

    (loss, want), (again, got) = found(Schedule(chunk_size=8)), found(chunked("one level"))
    assert float(again) == pytest.approx(float(loss), rel=1e-6)
    assert worst(got, want) <= 1e-5


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "mamba2", "qwen3_next", "falcon_h1"])
def test_packed_rows(family: str, lengths: list[int]) -> None:
    model, pieces = model_of(family), rows()
    want = apart(model, pieces)
    inputs = {**packed(pieces), "num_items_in_batch": targets(pieces)}
    for name in ORDERS:
        with streamtune.stream(model, schedule=chunked(name)):
            for _ in range(2):  # from the second call on it is known which layers have states
                want.check(gradients(model, inputs), name)
    assert max(lengths) >= 2


@pytest.mark.quick("mistral")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", "qwen3_next", "lfm2"])
def test_rows_that_share_their_beginnings(family: str) -> None:
    model = build(family, **branches.FAMILIES[family]) if family in branches.FAMILIES else build_any(family)
    branches.compare(model, branches.rows(), *(chunked(name, size) for name in ORDERS for size in (6, 256)))


@pytest.mark.full
@pytest.mark.parametrize("name", ["one level", "two levels, keys on host"])
def test_hidden_states_that_are_used_elsewhere(name: str, lengths: list[int]) -> None:
    """One is changed between two layers, and all are part of the loss: nodes of earlier layers run as well."""
    model = build("qwen3", num_hidden_layers=5)
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
    inputs = batch("plain")

    def loss(model: Any, inputs: dict[str, Any]) -> Any:
        out = model(**inputs, output_hidden_states=True)
        return out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)

    want = reference(model, inputs, loss)
    with streamtune.stream(model, schedule=chunked(name)):
        want.check(gradients(model, inputs, loss))
    assert sorted(lengths) == [1, 1, 2, 2, 3]


def test_a_loss_on_hidden_states_that_was_computed_on_the_way(lengths: list[int]) -> None:
    model, found = build("qwen3", num_hidden_layers=5), []
    model.model.layers[2].register_forward_hook(lambda module, args, out: found.append(out.square().mean()))

    def loss(model: Any, inputs: dict[str, Any]) -> Any:
        found.clear()
        return model(**inputs).loss + found[0]

    inputs = batch("plain")
    want = reference(model, inputs, loss)
    with streamtune.stream(model, schedule=chunked("one level")):
        want.check(gradients(model, inputs, loss))
    assert lengths == [5, 3]


def test_a_hook_on_hidden_states_gets_their_gradient() -> None:
    model, inputs = build("qwen3", num_hidden_layers=4), batch("plain")
    seen: list[torch.Tensor] = []

    def watch(module: Any, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: seen.append(grad.clone()))

    model.model.layers[1].register_forward_hook(watch)
    model(**inputs).loss.backward()
    with streamtune.stream(model, schedule=chunked("one level")):
        model(**inputs).loss.backward()
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-7)


def test_hooks_of_parameters_run_once_in_a_step_and_gradients_add_up() -> None:
    model, inputs, calls = build("llama", num_hidden_layers=4), batch("masked"), Counter[str]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "layers.3." in name)

    def twice(model: Any, inputs: dict[str, Any]) -> Any:
        model(**inputs).loss.backward()
        return model(**inputs).loss

    want = reference(model, inputs, twice)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.update([name]))  # type: ignore[misc]
    with streamtune.stream(model, schedule=chunked("two levels")):
        want.check(gradients(model, inputs, twice))
    assert set(calls.values()) == {2}


def test_adapters_over_a_frozen_model() -> None:
    model = add_lora(build("qwen3", num_hidden_layers=3), r=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = batch("masked")
    want = reference(model, inputs)
    for name in ORDERS:
        assert_exact(model, inputs, want, chunked(name))


@pytest.mark.full
def test_several_backwards() -> None:
    model, inputs = build("qwen3", num_hidden_layers=3), batch("plain")
    for name in ORDERS:
        with streamtune.stream(model, schedule=chunked(name)):
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward(retain_graph=True)
            once = {n: p.grad.clone() for n, p in model.named_parameters()}
            loss.backward()
            assert worst({n: p.grad for n, p in model.named_parameters()}, {n: 2 * g for n, g in once.items()}) <= 1e-5
            with pytest.raises((ArgumentError, RuntimeError), match="second time"):
                loss.backward()


@pytest.mark.full
def test_the_gradient_of_some_weights_before_the_backward() -> None:
    """A backward pass that ends above the first layer leaves nothing for the next one to add."""
    model, inputs = build("qwen3", num_hidden_layers=3), batch("plain")
    want = reference(model, inputs)
    for name in ORDERS:
        with streamtune.stream(model, schedule=chunked(name)):
            model.zero_grad()
            loss = model(**inputs).loss
            torch.autograd.grad(loss, [model.model.layers[2].mlp.up_proj.weight], retain_graph=True)
            loss.backward()
            want.check((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))


def test_a_forward_without_a_backward_leaves_nothing() -> None:
    model, inputs = build("qwen3", num_hidden_layers=4), batch("plain")
    for name in ("keys on host", "two levels, keys on host"):
        with streamtune.stream(model, schedule=chunked(name)) as handle:
            loss = model(**inputs).loss
            assert handle.tiers.host.live_bytes > 0
            del loss
            assert handle.tiers.host.live_bytes == 0


def test_layers_that_share_keys_are_refused_by_name() -> None:
    model = sharing("gemma3n_text")
    with streamtune.stream(model, schedule=chunked("one level")), pytest.raises(UnsupportedModelError) as caught:
        model(**batch("plain"))
    with streamtune.stream(model, schedule=chunked("one level")) as handle, pytest.raises(UnsupportedModelError):
        handle.check()
    assert "Gemma3nTextDecoderLayer shares keys and values" in caught.value.what
    assert "order: layer" in str(caught.value.fix)


def test_a_check_runs_the_order_and_leaves_nothing() -> None:
    model = build("qwen3", num_hidden_layers=4)
    with streamtune.stream(model, schedule=chunked("keys on host")) as handle:
        handle.check()
        assert handle.tiers.host.live_bytes == 0
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
        handle.remove()


def test_weights_on_other_ranks_are_refused() -> None:
    model = build("qwen3")
    with streamtune.stream(model, schedule=chunked("one level")) as handle:
        for parameter in model.model.layers[0].self_attn.q_proj.parameters():
            parameter.ds_id = 0  # what DeepSpeed's ZeRO stage 3 marks a parameter by
        with pytest.raises(ArgumentError, match="once for every chunk"):
            model(**batch("plain"))
        handle.remove()


def test_rows_in_parts_are_refused() -> None:
    two: Any = SimpleNamespace(size=2)  # ranks, of which it asks no more
    with pytest.raises(ArgumentError, match="exclude each other"):
        streamtune.stream(build("qwen3"), schedule=chunked("one level"), sequence_parallel=two)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "keys and values in place of layer inputs"),
        ({"levels": 2, "keep_kv": "host", "offload": "host"},
         "keys and values on host in place of layer inputs; 1 layer of a chunk at a time, the others computed again; "
         "the first layer's input on host"),
    ],
)  # fmt: skip
def test_a_schedule_in_words(more: dict[str, Any], said: str) -> None:
    before = "chunks of 2,048 tokens, head 1,024; all layers of a chunk before the next chunk, "
    assert Schedule(order="chunk", **more).describe() == before + said


def test_contradictions() -> None:
    assert Schedule(order="chunk").keep_kv == "device"
    with pytest.raises(ArgumentError, match="stores only one"):
        Schedule(order="chunk", offload="host", device_layers=1)
    with pytest.raises(ArgumentError, match="order must be 'layer' or 'chunk'"):
        Schedule(order="rows")  # type: ignore[arg-type]
