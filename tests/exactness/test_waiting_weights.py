"""Weights that wait on the host: the gradient of plain autograd, to the same bits as with weights on the device."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import streamtune
from streamtune import Schedule
from streamtune.engine.memory.host import is_host_storage
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.models import AdapterSpec, add_adapters, add_lora, copy_weights, save_pretrained
from tests.conformance.reducer import build as build_any

from . import test_branches as branches
from .families import FAMILIES, batch, build, gradients, reference
from .test_packing import apart, packed, rows, targets
from .test_routers import routed
from .test_schedules import SOFTCAPS_AND_SINKS, assert_exact

KINDS = {
    "one level": {},
    "two levels": {"levels": 2, "segment_size": 2},
    "inputs on host": {"offload": "host", "stream_grads": True, "device_layers": 1},
    "two levels, inputs on host": {"levels": 2, "offload": "host", "keep_attention": "host"},
    "keys kept": {"keep_kv": "device", "keep_attention": "device"},
}


FULL = ("qwen3", "llama", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "mixtral", "bloom", "deepseek_v3", "qwen3_next")


def waiting(name: str, size: int = 8, **more: Any) -> Schedule:
    return Schedule(**{"chunk_size": size, "head_chunk_size": 11, "weights": "host", **KINDS[name], **more})


def model_of(family: str, **more: Any) -> Any:
    return build(family, **more) if family in {*FAMILIES, *SOFTCAPS_AND_SINKS} else build_any(family, **more)


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("family", FULL)
def test_every_schedule_gives_the_gradient(family: str) -> None:
    model = model_of(family)
    inputs = batch("left" if family == "gemma2" else "masked")
    want = reference(model, inputs)
    for name in KINDS:
        for size in (7, 256):
            assert_exact(copy.deepcopy(model), inputs, want, waiting(name, size))


@pytest.mark.quick("one level")
@pytest.mark.parametrize("name", KINDS)
def test_bits_are_those_of_weights_on_the_device(name: str) -> None:
    model, inputs = build("qwen3", num_hidden_layers=5), batch("right")

    def found(schedule: Schedule) -> Any:
        own = copy.deepcopy(model)
        with streamtune.stream(own, schedule=schedule):
            return gradients(own, inputs)

    (loss, want), (again, got) = found(replace(waiting(name), weights="device")), found(waiting(name))
    assert torch.equal(loss, again)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
def test_inputs_in_a_file(tied: bool, tmp_path: Any) -> None:
    model, inputs = build("qwen3", num_hidden_layers=5, tie_word_embeddings=tied), batch("right")
    want = reference(model, inputs)
    for more in ({}, {"levels": 2, "stream_grads": True}):
        disk = waiting("one level", offload="disk", offload_dir=str(tmp_path), **more)
        assert_exact(copy.deepcopy(model), inputs, want, disk)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_gradients_are_on_the_host(tied: bool) -> None:
    """Those of layers, embedding and head; the last norm stays on the device."""
    model = build("qwen3", tie_word_embeddings=tied)
    with streamtune.stream(model, schedule=waiting("one level")) as handle:
        model(**batch("right")).loss.backward()
        here = [name for name, p in model.named_parameters() if not is_host_storage(p.untyped_storage())]
        assert here == ["model.norm.weight"]
        summed = {"model.embed_tokens.weight"} if tied else set()  # autograd adds up that of the head
        away = [p for name, p in model.named_parameters() if name not in {*here, *summed}]
        assert all(is_host_storage(p.grad.untyped_storage()) for p in away)
        assert handle.tiers.host.moved_bytes > 2 * sum(p.nbytes for p in model.parameters())


def test_adapters_stay_on_the_device() -> None:
    model = add_lora(build("llama"), r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    inputs = batch("right")
    want = reference(model, inputs)
    for name in KINDS:
        assert_exact(copy.deepcopy(model), inputs, want, waiting(name))
    with streamtune.stream(model, schedule=waiting("one level")):
        on_host = {name for name, p in model.named_parameters() if is_host_storage(p.untyped_storage())}
    assert not any("lora" in name for name in on_host)
    assert sum("base_layer" in name for name in on_host) == 4 * 7


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_new_tokens_keep_their_table_on_the_device(tied: bool) -> None:
    """peft puts modules around embedding and head, which read their weights."""
    base = build("llama", tie_word_embeddings=tied)
    model = add_adapters(base, AdapterSpec(r=4, alpha=8), seed=0, new_tokens=[3, 5])
    inputs = batch("right")
    want = reference(model, inputs)
    assert_exact(copy.deepcopy(model), inputs, want, waiting("one level"))
    with streamtune.stream(model, schedule=waiting("one level")):
        names = {name for name, p in model.named_parameters() if is_host_storage(p.untyped_storage())}
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert any("base_layer" in name for name in names)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_packed_rows(family: str) -> None:
    model, pieces = model_of(family), rows()
    want = apart(model, pieces)
    inputs = {**packed(pieces), "num_items_in_batch": targets(pieces)}
    for name in KINDS:
        with streamtune.stream(model, schedule=waiting(name)):
            for _ in range(2):
                want.check(gradients(model, inputs), name)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_rows_that_share_their_beginnings(family: str) -> None:
    model = build(family, **branches.FAMILIES[family]) if family in branches.FAMILIES else build_any(family)
    branches.compare(model, branches.rows(), *(waiting(name, size) for name in KINDS for size in (6, 256)))


@pytest.mark.full
def test_a_balance_loss() -> None:
    model, inputs = routed("mixtral"), batch("right")
    want = reference(model, inputs)
    for name in KINDS:
        assert_exact(copy.deepcopy(model), inputs, want, waiting(name))


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "gemma3_text", "mixtral", "lfm2"])
def test_weights_fetched_in_bfloat16_are_a_bfloat16_model(family: str) -> None:
    """The gradient is as near to the truth as that of the model in bfloat16, and has the dtype of the weights."""
    model = model_of(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    inputs = batch("right")
    want = reference(copy.deepcopy(model).bfloat16(), inputs)
    for name in KINDS:
        own = copy.deepcopy(model)
        with streamtune.stream(own, schedule=waiting(name, fetch_dtype="bfloat16")):
            found = gradients(own, inputs)
        assert all(grad.dtype == torch.float32 for grad in found[1].values())
        want.check(found, name)


@pytest.mark.full
def test_steps_of_an_optimizer_change_what_is_fetched() -> None:
    """Ten steps, an evaluation and a call that is broken off in between, as with weights on the device."""

    def trained(schedule: Schedule) -> list[float]:
        model = build("qwen3", num_hidden_layers=4)
        losses = []
        with streamtune.stream(model, schedule=schedule):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            for step in range(10):
                loss = model(**batch("right")).loss
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                if step == 4:
                    hook = model.model.layers[2].register_forward_pre_hook(_stop)
                    with pytest.raises(KeyboardInterrupt), torch.no_grad():
                        model(**batch("right"))
                    hook.remove()
                with torch.no_grad():
                    losses.append(model(**batch("plain")).loss.item())
        return losses

    assert trained(waiting("one level")) == trained(replace(waiting("one level"), weights="device"))


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _run_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("part", ["get_input_embeddings", "get_output_embeddings"])
def test_a_call_that_fails_before_its_copies_are_there(part: str) -> None:
    """The next call copies the weights again, in bfloat16 as before."""
    model, inputs = build("qwen3"), batch("plain")
    with streamtune.stream(model, schedule=waiting("one level", fetch_dtype="bfloat16"), head=False):
        want = gradients(model, inputs)
        hook = getattr(model, part)().register_forward_pre_hook(_run_out_of_memory, prepend=True)
        with pytest.raises(torch.OutOfMemoryError):
            model(**inputs)
        hook.remove()
        for _ in range(2):
            found = gradients(model, inputs)
            assert torch.equal(found[0], want[0])
            assert all(torch.equal(found[1][name], grad) for name, grad in want[1].items())


def test_generation_and_the_preflight() -> None:
    model = build("qwen3").eval()
    ids = batch("plain")["input_ids"][:1, :5]
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    with streamtune.stream(model, schedule=waiting("one level")) as handle:
        handle.check()
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), want)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), want)


def test_saved_weights_are_whole_tensors(tmp_path: Any) -> None:
    model = build("qwen3")
    want = {name: x.clone() for name, x in model.state_dict().items()}
    with streamtune.stream(model, schedule=waiting("one level")):
        model.save_pretrained(tmp_path)
        state = {name: x.clone() for name, x in model.state_dict().items()}
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], x) and torch.equal(state[name], x) for name, x in want.items())


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.mark.parametrize("frozen", [False, True])
def test_copied_weights_are_written_while_the_model_computes(tmp_path: Path, frozen: bool) -> None:
    """A checkpoint is written by another thread, also while the embedding's copy stands in place of the tied weight."""
    model, tokenizer = build("qwen3", tie_word_embeddings=True), cast("Any", _NoTokenizer())
    model.get_input_embeddings().weight.requires_grad_(not frozen)
    save_pretrained(model, tokenizer, tmp_path / "before")

    def write_in_thread(*_: Any) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(save_pretrained, model, tokenizer, tmp_path / "during", weights=copies).result()

    with streamtune.stream(model, schedule=waiting("one level")):
        copies = copy_weights(model)
        model.get_input_embeddings().register_forward_hook(write_in_thread, prepend=True)
        model(**batch("plain"))
    before, during = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "during"))
    assert before == during


def test_what_excludes_it_is_refused() -> None:
    with pytest.raises(ArgumentError, match="order"):
        Schedule(weights="host", order="chunk")
    with pytest.raises(ArgumentError, match="keep_layers"):
        Schedule(weights="host", keep_layers=1)
    handle = streamtune.stream(build("qwen3"), schedule=waiting("one level"))
    with handle, pytest.raises(UnsupportedModelError, match="copied or pickled"):
        copy.deepcopy(handle.model)
