"""Every combination of what a schedule may choose gives plain autograd's gradient."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import streamtune
from streamtune import Schedule
from tests.conformance.reducer import build as build_any
from tests.precision_kit import EXACT, Float64, Reference, in_float64

from .families import batch, build, gradients, reference, worst
from .test_packing import apart, packed, rows, targets
from .test_routers import routed
from .test_states import SHARING, sharing

CHOICES: dict[str, tuple[Any, ...]] = {
    "offload": ("device", "host", "disk"),
    "levels": (1, 2),
    "keep_kv": ("no", "device", "host"),
    "keep_attention": ("no", "device", "host"),
    "keep_layers": (0, 1),
    "stream_grads": (False, True),
}
FAMILIES = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "mixtral",
    "gpt_oss",
    "qwen3_next",
    "mamba2",
    "falcon_h1",
    "bloom",
    "minimax",
)
"""Softcaps and windows; learnt positions; experts; sinks; states of several kinds; a layer that attends by itself."""
MORE_INPUTS = ("gemma3n_text", "gemma4_text", "zamba2", "zaya")
"""Layers that are handed more than hidden states, or return more: keys of other layers, a second stream."""
SOFTCAPS_AND_SINKS = ("gemma2", "gpt_oss")
"""Their reference is eager attention: sdpa knows neither."""
PER_FAMILY = 14


def schedules(directory: Path) -> list[Schedule]:
    """All of them. With tiers, some layer inputs stay on the device in every other one."""
    found = []
    for number, values in enumerate(itertools.product(*CHOICES.values())):
        chosen = dict(zip(CHOICES, values, strict=True))
        tiers = chosen["offload"] != "device"
        found.append(
            Schedule(
                chunk_size=16,
                head_chunk_size=11,
                offload_dir=str(directory) if chosen["offload"] == "disk" else None,
                device_layers=number % 3 if tiers else 0,
                **chosen,
            )
        )
    return found


def assert_exact(model: Any, inputs: dict[str, Any], want: Reference, schedule: Schedule) -> bool:
    """Loss and gradient are those wanted, and nothing is left in a tier. Returns whether the disk was used."""
    with streamtune.stream(model, schedule=schedule) as handle:
        want.check(gradients(model, inputs), schedule)
        assert handle.tiers.disk.live_bytes == 0
        if schedule.offload != "disk":  # else writes that nobody waits for may still hold their blocks
            assert handle.tiers.host.live_bytes == 0
        return bool(handle.tiers.disk.peak_bytes > 0)


@pytest.mark.full
def test_every_combination(tmp_path: Path) -> None:
    model = build("qwen3", num_hidden_layers=5)
    inputs = batch("multiturn", rows=2)
    want = reference(model, inputs)
    for schedule in schedules(tmp_path):
        assert assert_exact(model, inputs, want, schedule) == (schedule.offload == "disk")
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_combinations_of_other_families(family: str, tmp_path: Path) -> None:
    model = build(family) if family in SOFTCAPS_AND_SINKS else build_any(family)
    inputs = batch("left" if family == "gemma2" else "masked")
    want = reference(model, inputs)
    for schedule in random.Random(family).sample(schedules(tmp_path), PER_FAMILY):
        assert_exact(model, inputs, want, schedule)


@pytest.mark.full
@pytest.mark.parametrize("family", MORE_INPUTS)
def test_combinations_where_layers_share_more(family: str, tmp_path: Path) -> None:
    model = sharing(family) if family in SHARING else build_any(family)
    inputs = batch("left")
    want = reference(model, inputs)
    for schedule in random.Random(family).sample(schedules(tmp_path), PER_FAMILY):
        assert_exact(model, inputs, want, schedule)


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_combinations_under_a_balance_loss(family: str, tmp_path: Path) -> None:
    model = routed(family)
    inputs = batch("right")
    want = reference(model, inputs)
    for schedule in random.Random(family).sample(schedules(tmp_path), PER_FAMILY):
        assert_exact(model, inputs, want, schedule)


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_next", "falcon_h1"])
def test_combinations_of_packed_rows(family: str, tmp_path: Path) -> None:
    """Among them layers kept whole: one with states would carry them from one row into the next."""
    model, pieces = build_any(family), rows()
    want = apart(model, pieces)
    inputs = {**packed(pieces), "num_items_in_batch": targets(pieces)}
    whole = [Schedule(chunk_size=8, keep_layers=count) for count in (1, 9)]
    for schedule in [*whole, *random.Random(family).sample(schedules(tmp_path), PER_FAMILY // 2)]:
        with streamtune.stream(model, schedule=schedule):
            for _ in range(2):  # from the second call on it is known which layers have states
                want.check(gradients(model, inputs), schedule)


@pytest.mark.quick("3")
@pytest.mark.parametrize("segment_size", [1, 2, 3, 5, 9])
def test_segments_of_any_size(segment_size: int) -> None:
    model = in_float64(build("qwen3", num_hidden_layers=5, attention_dropout=0.2))
    inputs = batch("right")

    def seeded(schedule: Schedule) -> tuple[Any, Any]:
        with Float64(), streamtune.stream(model, schedule=schedule):
            torch.manual_seed(3)
            return gradients(model, inputs)

    loss, want = seeded(Schedule(chunk_size=8))
    for more in ({}, {"keep_attention": "host"}, {"keep_kv": "device", "stream_grads": True}):
        again, got = seeded(Schedule(chunk_size=8, levels=2, segment_size=segment_size, **more))
        torch.testing.assert_close(again, loss, rtol=0, atol=0)
        assert worst(got, want) <= EXACT


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_states_that_were_dropped_are_computed_again(family: str) -> None:
    model = build_any(family, num_hidden_layers=6)
    inputs = batch("plain")
    want = reference(model, inputs)
    for size in (2, 3, 6):
        assert_exact(model, inputs, want, Schedule(chunk_size=8, levels=2, segment_size=size, keep_kv="host"))


@pytest.mark.parametrize("more", [{"levels": 2}, {"stream_grads": True}, {"levels": 2, "offload": "host"}])
def test_something_between_two_layers(more: dict[str, Any]) -> None:
    """A hook that changes the hidden states between layers, and a loss on hidden states inside the decoder."""
    model = build("qwen3", num_hidden_layers=5)
    layers = model.model.layers
    layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
    inputs = batch("plain")

    def loss(model: Any, inputs: dict[str, Any]) -> Any:
        out = model(**inputs, output_hidden_states=True)
        return out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)

    want = reference(model, inputs, loss)
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, **more)):
        want.check(gradients(model, inputs, loss))


class Attentions(TorchDispatchMode):
    """Counts the forwards of the attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("kept", ["device", "host"])
def test_kept_attention_runs_no_forward_in_the_backward(kept: Any, levels: Any) -> None:
    model = build("qwen3", num_hidden_layers=4)
    inputs = batch("plain")
    with streamtune.stream(model, schedule=Schedule(chunk_size=16, keep_attention=kept, levels=levels)):
        loss = model(**inputs).loss
        with Attentions() as counted:
            loss.backward()
        assert counted.forwards == 0
    with streamtune.stream(model, schedule=Schedule(chunk_size=16, levels=levels)):
        loss = model(**inputs).loss
        with Attentions() as counted:
            loss.backward()
        assert counted.forwards > 0


@pytest.mark.full
def test_adapters_frozen_layers_and_accumulation(tmp_path: Path) -> None:
    model = build("llama", num_hidden_layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "layers.3." in name)
    inputs = batch("masked")

    def twice(model: Any, inputs: dict[str, Any]) -> Any:
        model(**inputs).loss.backward()
        return model(**inputs).loss

    want = reference(model, inputs, twice)
    for schedule in random.Random(1).sample(schedules(tmp_path), PER_FAMILY):
        with streamtune.stream(model, schedule=schedule):
            want.check(gradients(model, inputs, twice), schedule)


def test_a_forward_without_a_backward_leaves_nothing(tmp_path: Path) -> None:
    model = build("qwen3", num_hidden_layers=4)
    inputs = batch("plain")
    for levels, kept in itertools.product((1, 2), ("no", "host")):
        schedule = Schedule(chunk_size=16, offload="host", levels=levels, keep_attention=kept, keep_kv="host")
        with streamtune.stream(model, schedule=schedule) as handle:
            loss = model(**inputs).loss
            assert handle.tiers.host.live_bytes > 0
            del loss
            assert handle.tiers.host.live_bytes == 0


@pytest.mark.parametrize(
    ("more", "layers", "said"),
    [
        ({"keep_layers": 2}, None, "the last 2 layers kept whole"),
        ({"keep_layers": 2}, 3, "the last 2 layers kept whole"),
        ({"keep_layers": 1}, 3, "the last layer kept whole"),
        ({"keep_layers": 2}, 2, "no layer computed again: all kept whole"),
        ({"keep_layers": 3, "levels": 2, "offload": "host"}, 2, "no layer computed again: all kept whole"),
        ({"levels": 2, "keep_kv": "host"}, 2, "two levels, segments computed again; keys and values kept on host"),
    ],
)
def test_a_schedule_in_words(more: dict[str, Any], layers: int | None, said: str) -> None:
    assert Schedule(**more).describe(layers) == f"chunks of 2,048 tokens, head 1,024; {said}"
