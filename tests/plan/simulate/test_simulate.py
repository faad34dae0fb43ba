"""The simulated step equals the same real step on the CPU, and an extrapolated step equals the whole simulation."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from streamtune.base.optimizer_table import OPTIMIZERS, PLAIN_STEP, state_bytes
from streamtune.engine import LossRequest, decoder_layers, stream
from streamtune.engine.cache import ChunkCache
from streamtune.engine.memory.host import is_host_storage
from streamtune.errors import ArgumentError
from streamtune.models import AdapterSpec, add_adapters, add_lora
from streamtune.models.quantize import PACKAGES, quantize
from streamtune.ops import Divergence, TokenLoss, TopKTeacher, top_k_classes
from streamtune.ops.attention.attention import KEY_BLOCK
from streamtune.optim import BlockAdamW, OptimChoice, ZerothOrderSGD, build_optimizer, train_largest_block
from streamtune.plan.simulate import LiveBytes, Mode, Simulation, Workload, simulate
from streamtune.plan.simulate.memory import model_bytes, model_tensors
from streamtune.plan.simulate.meta_operators import RULES, MetaAutocast
from streamtune.plan.simulate.partition import ResidentMemory
from streamtune.plan.simulate.step import DeviceChoices, trace_step
from streamtune.plan.simulate.trace import Trace
from streamtune.plan.simulate.workload import TeacherShape
from streamtune.schedule import Schedule
from streamtune.train import (
    HostOptimizer,
    InBackwardBackend,
    LocalBackend,
    MicroBatch,
    ModelReference,
    SupervisedObjective,
    ZerothOrderBackend,
)
from streamtune.train.objective import StepScore
from streamtune.train.objective import autocast as autocasting
from tests.conformance.reducer import tiny_config

LENGTH = 384
SMALL: dict[str, Any] = {
    "vocab_size": 499,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma3_text": {"sliding_window": 100, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "lfm2": {},
    "gemma2": {"sliding_window": 100, "query_pre_attn_scalar": 16},
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
BASE = Schedule(chunk_size=64, head_chunk_size=32)
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain chunks": {},
    "host": {"offload": "host"},
    "host but for two": {"offload": "host", "device_layers": 2},
    "disk": {"offload": "disk"},
    "two levels": {"levels": 2, "segment_size": 2},
    "two levels on host": {"levels": 2, "segment_size": 2, "offload": "host", "stream_grads": True},
    "keys kept": {"keep_kv": "device"},
    "keys on host": {"keep_kv": "host"},
    "attention kept": {"keep_attention": "device"},
    "attention on host": {"keep_attention": "host"},
    "last layer whole": {"keep_layers": 1},
    "gradients streamed": {"stream_grads": True},
    "chunk order": {"order": "chunk"},
    "chunk order, two levels": {"order": "chunk", "levels": 2, "segment_size": 2},
    "chunk order, keys on host": {"order": "chunk", "keep_kv": "host", "offload": "host", "stream_grads": True},
    "chunk order, two levels, keys on host": {"order": "chunk", "levels": 2, "keep_kv": "host"},
    "weights on host": {"weights": "host"},
    "weights and inputs on host": {"weights": "host", "offload": "host", "stream_grads": True, "keep_kv": "device"},
    "weights on host, two levels": {"weights": "host", "levels": 2, "segment_size": 2, "offload": "host"},
    "weights fetched in bfloat16": {"weights": "host", "fetch_dtype": "bfloat16", "keep_attention": "device"},
}


def allocated(step: Callable[[], Any]) -> int:
    """Return the peak number of bytes that the CPU allocator has given out during ``step``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        step()
    events: Any = found.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def build(family: str, device: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    config = AutoConfig.for_model(family, **{**SMALL, **MODELS[family], **changes})
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def schedule_of(name: str, directory: Any) -> Schedule:
    choices = SCHEDULES[name]
    where = {"offload_dir": str(directory)} if choices.get("offload") == "disk" else {}
    return replace(BASE, **choices, **where)


def measured(
    make: Callable[[str], Any],
    mode: Mode,
    schedule: Schedule,
    optimizer: Any = None,
    autocast: str | None = None,
    length: int = LENGTH,
    token_loss: TokenLoss | None = None,
) -> int:
    """Return weight bytes and live bytes of a real CPU step, the second one if there is an optimizer."""
    model: Any = make("cpu").train()
    if mode == "stream":
        handle = stream(model, schedule=schedule)
        if token_loss is not None:
            handle.with_loss(LossRequest(token_loss)).__enter__()
    elif mode == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, model.config.vocab_size, (1, length))
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in model_tensors(model)}.values()
    weights = sum(storage.nbytes() for storage in storages if not is_host_storage(storage))
    steps = None if optimizer is None else optimizer(model)

    def backward() -> None:
        with autocasting(torch.device("cpu"), autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    backward()  # what is made once is there
    model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveBytes(model, decoder_layers(model)) as live:
        for _ in range(1 if steps is None else 2):
            backward()
            if steps is not None:
                steps.step()
                model.zero_grad(set_to_none=True)
    return weights + live.peak


def workload(make: Callable[[str], Any], mode: Mode = "stream", **changes: Any) -> Workload:
    return Workload(partial(make, "meta"), LENGTH, mode=mode, device_type="cpu", **changes)


@pytest.mark.quick("plain chunks", "chunk order, keys on host")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_simulated_peak_is_the_one_measured(name: str, tmp_path: Any) -> None:
    make = partial(build, "qwen3")
    schedule = schedule_of(name, tmp_path)
    found = simulate(workload(make), schedule)
    assert found.peak_bytes == pytest.approx(measured(make, "stream", schedule), rel=0.01)
    assert sum(found.terms.values()) == found.peak_bytes == max(found.phases.values())


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize("mode", ["plain", "checkpoint", "stream"])
def test_so_it_is_for_other_models_and_modes(family: str, mode: Mode) -> None:
    make = partial(build, family)
    assert simulate(workload(make, mode), BASE).peak_bytes == pytest.approx(measured(make, mode, BASE), rel=0.03)


@pytest.mark.quick("mamba2", "bloom")
@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "phi3", "mamba2", "qwen3_next", "falcon_h1", "bloom"])
def test_so_it_is_for_families_that_are_built_otherwise(family: str) -> None:
    def make(device: str) -> nn.Module:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(tiny_config(family))

    schedule = Schedule(chunk_size=16, head_chunk_size=16)
    found = simulate(replace(workload(make), length=96), schedule).peak_bytes
    assert found == pytest.approx(measured(make, "stream", schedule, length=96), rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("levels", [1, 2])
def test_states_wait_on_the_host_with_keys(family: str, levels: int) -> None:
    """With ``order: chunk`` and twice the chunks, the device holds the same bytes, except for those after the row."""

    def make(device: str) -> nn.Module:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(tiny_config(family))

    here = Schedule(chunk_size=16, head_chunk_size=16, order="chunk", levels=levels, offload="host", stream_grads=True)
    away = replace(here, keep_kv="host")
    for length in (96, 192):
        found = simulate(replace(workload(make), length=length), away)
        assert found.peak_bytes == pytest.approx(measured(make, "stream", away, length=length), rel=0.03)
    states = carried_bytes(make("cpu"), 16)
    assert states > 0
    held = simulate(replace(workload(make), length=192), here)
    assert held.peak_bytes - found.peak_bytes > 8 * states  # of ten borders, and of the chunk that is computed
    assert found.host_bytes - held.host_bytes > 10 * states
    model: Any = make("cpu").train()
    with stream(model, schedule=away) as handle:
        ids = torch.randint(3, model.config.vocab_size, (1, length))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert found.host_bytes == pytest.approx(handle.tiers.host.peak_bytes, rel=0.03)


def carried_bytes(model: Any, size: int) -> int:
    """Return the bytes of the recurrent states of all layers after one chunk."""
    found: dict[tuple[int, Any], int] = {}

    def kept(self: Any, key: Any, state: Any) -> None:
        keep(self, key, state)
        found[id(self.states), key] = state.nbytes

    keep = ChunkCache._save_state
    with pytest.MonkeyPatch.context() as patch, stream(model, schedule=Schedule(chunk_size=size, head_chunk_size=size)):
        patch.setattr(ChunkCache, "_save_state", kept)
        ids = torch.randint(3, model.config.vocab_size, (1, 2 * size))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return sum(found.values())


@pytest.mark.parametrize("mode", ["plain", "checkpoint"])
def test_so_it_is_in_bf16(mode: Mode) -> None:
    make = partial(build, "qwen3", dtype=torch.bfloat16)
    assert simulate(workload(make, mode), BASE).peak_bytes == pytest.approx(measured(make, mode, BASE), rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("mode", ["plain", "checkpoint", "stream"])
def test_so_it_is_under_autocast(family: str, mode: Mode) -> None:
    make = partial(build, family)
    found = simulate(workload(make, mode, autocast="bfloat16"), BASE).peak_bytes
    assert found == pytest.approx(measured(make, mode, BASE, autocast="bfloat16"), rel=0.01)
    assert found != simulate(workload(make, mode), BASE).peak_bytes


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "mode"), [(torch.float32, "stream"), (torch.float16, "plain")])
def test_so_it_is_under_autocast_in_float16(dtype: torch.dtype, mode: Mode) -> None:
    """float16 has the same peak as bfloat16; frozen weights in float16 are not cast."""
    make = partial(build_adapted, dtype=dtype)
    found = simulate(workload(make, mode, autocast="float16"), BASE).peak_bytes
    assert found == pytest.approx(measured(make, mode, BASE, autocast="float16"), rel=0.01)


def build_adapted(
    device: str, *, family: str = "qwen3", kind: str | None = None, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> nn.Module:
    """Return a model with fp32 adapters on a base that may be quantised."""
    model: Any = build(family, device, dtype, **changes)
    if kind is not None:
        pytest.importorskip(PACKAGES[kind])
        quantize(model, kind, torch.device(device))
    with torch.device(device):
        return add_lora(model, r=8, alpha=16, dropout=0.0, target="all-linear", seed=0)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["checkpoint", "stream"])
@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, None), (torch.bfloat16, "bfloat16"), (torch.float32, "bfloat16")]
)
def test_so_it_is_with_adapters_on_any_base(
    mode: Mode, kind: str | None, dtype: torch.dtype, autocast: str | None
) -> None:
    make = partial(build_adapted, kind=kind, dtype=dtype, num_hidden_layers=2)
    found = simulate(workload(make, mode, autocast=autocast), BASE).peak_bytes
    assert found == pytest.approx(measured(make, mode, BASE, autocast=autocast), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain chunks", "weights on host"])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, None), (torch.float32, None), (torch.float32, "bfloat16")]
)
def test_so_it_is_with_trained_columns(name: str, dtype: torch.dtype, autocast: str | None, tmp_path: Any) -> None:
    def make(device: str) -> nn.Module:
        model: Any = build("qwen3", device, dtype)
        with torch.device(device):
            return add_adapters(model, AdapterSpec(kind="paca", r=8))

    schedule = schedule_of(name, tmp_path)
    found = simulate(workload(make, autocast=autocast), schedule).peak_bytes
    assert found == pytest.approx(measured(make, "stream", schedule, autocast=autocast), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["checkpoint", "stream"])
@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
@pytest.mark.parametrize(
    ("family", "dtype", "autocast"),
    [
        ("qwen3_moe", torch.bfloat16, None),
        ("qwen3_moe", torch.float32, "bfloat16"),
        ("qwen3_next", torch.bfloat16, None),
    ],
)
def test_so_it_is_with_adapters_on_experts_of_one_tensor(
    family: str, dtype: torch.dtype, autocast: str | None, kind: str | None, mode: Mode
) -> None:
    layers = 4 if family == "qwen3_next" else 2
    make = partial(build_adapted, family=family, kind=kind, dtype=dtype, num_hidden_layers=layers)
    found = simulate(workload(make, mode, autocast=autocast), BASE).peak_bytes
    assert found == pytest.approx(measured(make, mode, BASE, autocast=autocast), rel=0.01)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_what_a_quantised_base_takes_on_an_accelerator(kind: str) -> None:
    plain, packed = (
        simulate(Workload(partial(build_adapted, "meta", kind=each, **WIDE), LENGTH), BASE) for each in (None, kind)
    )
    inside = sum(p.numel() for layer in decoder_layers(build("qwen3", "meta", **WIDE)) for p in layer.parameters())
    saved = plain.terms["weights"] - packed.terms["weights"]
    bytes_of_one = {"int8": 1, "nf4": 0.5 + 1 / 64}[kind]
    assert saved == pytest.approx((2 - bytes_of_one) * inside, rel=0.02)
    assert packed.work.matmul_flops == plain.work.matmul_flops
    layer = inside  # bytes of one of the two layers, written out in bf16
    assert plain.peak_bytes - saved < packed.peak_bytes < plain.peak_bytes - saved + 1.1 * layer


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_what_quantised_experts_take_on_an_accelerator(kind: str) -> None:
    """The bytes of all layers' packed weights, and of one layer's weights dequantised to bf16."""
    shape = {**WIDE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    make = partial(build_adapted, "meta", family="qwen3_moe", **shape)
    plain, packed = (simulate(Workload(partial(make, kind=each), LENGTH), BASE) for each in (None, kind))
    layers = decoder_layers(build("qwen3_moe", "meta", **shape))
    inside = sum(p.numel() for layer in layers for p in layer.parameters())
    saved = plain.terms["weights"] - packed.terms["weights"]
    bytes_of_one = {"int8": 1, "nf4": 0.5 + 1 / 64}[kind]
    assert saved == pytest.approx((2 - bytes_of_one) * inside, rel=0.02)
    assert packed.work.matmul_flops == plain.work.matmul_flops
    layer = 2 * inside / len(layers)
    assert plain.peak_bytes - saved <= packed.peak_bytes < plain.peak_bytes - saved + 1.1 * layer


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_autocast_casts_is_on_the_lists_of_torch(device: str) -> None:
    listed = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    names = {name.removeprefix("aten::").partition(".")[0] for name in listed}
    made_of_others = {"cross_entropy", "einsum"}
    since_lately = {"rms_norm"}
    assert set().union(*RULES[device].values()) - names <= made_of_others | since_lately


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        ("lower", lambda x: x @ x),
        ("lower", lambda x: nn.functional.linear(x, x)),
        ("fp32", lambda x: x.to(torch.bfloat16) ** 2),
        ("fp32", lambda x: nn.functional.layer_norm(x.to(torch.bfloat16), (4,), weight=x[0])),
        ("to fp32", lambda x: x.to(torch.bfloat16).softmax(-1)),
        ("to fp32", lambda x: x.to(torch.bfloat16).sum()),
        ("widest", lambda x: x.index_put((torch.zeros(1, dtype=torch.long, device="meta"),), x[:1].bfloat16())),
    ],
)
def test_what_autocast_makes_on_an_accelerator(rule: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.empty(4, 4, device="meta")
    with DeviceChoices("cuda", MetaAutocast("cuda")), torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(x).dtype == (torch.bfloat16 if rule == "lower" else torch.float32)
        with torch.autocast("cpu", enabled=False):
            assert (x @ x).dtype == torch.float32


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "autocast"), [(TokenLoss("dft"), "bfloat16"), (TokenLoss(label_smoothing=0.1, z_loss=1e-3), None)]
)
def test_so_it_is_with_another_loss(loss: TokenLoss, autocast: str | None) -> None:
    """The peak is in the head here."""
    make, schedule = partial(build, "qwen3", vocab_size=20_011), replace(BASE, head_chunk_size=64)
    found = simulate(workload(make, token_loss=loss, autocast=autocast), schedule)
    want = measured(make, "stream", schedule, autocast=autocast, token_loss=loss)
    assert found.peak_bytes == pytest.approx(want, rel=0.01)
    assert found.terms["head"] > found.peak_bytes / 4


@pytest.mark.full
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_so_it_is_with_a_teacher(autocast: str | None) -> None:
    """The teacher's weights, hidden states and logits of one chunk count, if the peak is in the head."""
    make, schedule = partial(build, "qwen3", vocab_size=20_011), replace(BASE, head_chunk_size=64)
    loss = TokenLoss(divergence=Divergence("reverse"))
    model: Any = make("cpu").train()
    teacher: Any = build("llama", "cpu", vocab_size=20_011, hidden_size=96, num_hidden_layers=1).requires_grad_(False)
    ids = torch.randint(3, 20_011, (1, LENGTH))
    batch = MicroBatch(ids, torch.ones_like(ids), ids, ("rows:1",))
    with stream(model, schedule=schedule) as handle, stream(teacher, schedule=schedule) as other:
        objective = SupervisedObjective(handle, loss, ModelReference(teacher, other))

        def backward() -> None:
            with autocasting(torch.device("cpu"), autocast):
                score = objective.score(model, batch, 1.0)
            score.total_loss.backward()

        backward()  # what is made once is there
        model.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes(nn.ModuleList([model, teacher]), decoder_layers(model)) as live:
            backward()
    weights = [sum(p.nbytes for p in each.parameters()) for each in (model, teacher)]
    shape = TeacherShape(96, 20_011, torch.float32)
    found = simulate(
        workload(make, token_loss=loss, teacher=shape, reference_bytes=weights[1], autocast=autocast), schedule
    )
    assert found.peak_bytes == pytest.approx(sum(weights) + live.peak, rel=0.01)
    assert found.terms["reference"] == weights[1]


@pytest.mark.full
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_so_it_is_with_likeliest_tokens_of_a_file(autocast: str | None) -> None:
    """One chunk of the saved tokens is on the device, the rest in host memory, and there is no teacher model."""
    make, schedule = partial(build, "qwen3", vocab_size=20_011), replace(BASE, head_chunk_size=64)
    loss, k = TokenLoss(divergence=Divergence("reverse")), 512
    model: Any = make("cpu").train()
    ids = torch.randint(3, 20_011, (1, LENGTH))
    tables = top_k_classes(torch.randn(LENGTH, 20_011), k)
    taught = TopKTeacher.of_targets(ids, tables[0].int(), tables[1])
    batch = MicroBatch(ids, torch.ones_like(ids), ids, ("rows:1",), top_k=taught)
    with stream(model, schedule=schedule) as handle:
        objective = SupervisedObjective(handle, loss)

        def backward() -> None:
            with autocasting(torch.device("cpu"), autocast):
                score = objective.score(model, batch, 1.0)
            score.total_loss.backward()

        backward()  # what is made once is there
        model.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes(model, decoder_layers(model)) as live:
            backward()
    found = simulate(workload(make, token_loss=loss, teacher_top_k=k, autocast=autocast), schedule)
    assert found.peak_bytes == pytest.approx(sum(p.nbytes for p in model.parameters()) + live.peak, rel=0.01)
    held = (taught.index_BT, taught.ids_Kk, taught.logprobs_Kc)
    assert found.host_bytes == found.host_terms["teacher"] == sum(each.nbytes for each in held)


@pytest.mark.full
def test_the_forward_of_a_teacher_that_is_larger_than_the_model() -> None:
    """The peak is in the teacher's forward; it is simulated separately, and not below the measured bytes."""
    wide = {"hidden_size": 128, "intermediate_size": 4096, "num_hidden_layers": 2}
    make, teacher = partial(build, "qwen3"), partial(build, "llama", **wide)
    held: Any = teacher("cpu").requires_grad_(False).eval()
    ids = torch.randint(3, held.config.vocab_size, (1, LENGTH))
    with stream(held, schedule=BASE) as handle, torch.no_grad():
        handle.lazy_logits(ids, ids)
        gc.collect()
        with LiveBytes(held, decoder_layers(held)) as live:
            handle.lazy_logits(ids, ids)
    weights = [sum(p.nbytes for p in each.parameters()) for each in (make("meta"), held)]
    blueprint = teacher("meta")
    shape = TeacherShape(128, held.config.vocab_size, torch.float32, make_model=lambda: blueprint)
    loss = TokenLoss(divergence=Divergence())
    found = simulate(workload(make, token_loss=loss, teacher=shape, reference_bytes=weights[1]), BASE)
    want = sum(weights) + live.peak
    assert want <= found.phases["reference"] <= 1.1 * want
    assert found.phase == "reference"
    assert sum(found.terms.values()) == found.peak_bytes


@pytest.mark.full
@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}, {}])
def test_so_it_is_with_an_optimizer(form: dict[str, bool]) -> None:
    make = partial(build, "qwen3", vocab_size=9973)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **form)

    found = simulate(workload(make, make_optimizer=adam), BASE)
    assert found.peak_bytes == pytest.approx(measured(make, "stream", BASE, adam), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit", "adamw_torch_4bit", "galore", "muon"])
def test_so_it_is_with_every_kind_of_optimizer(name: str) -> None:
    """For optimizers whose kernels run on ``meta``, or whose bytes are in the table."""
    if not OPTIMIZERS[name].is_installed:
        pytest.skip(f"{OPTIMIZERS[name].library} is not installed")
    make = partial(build, "qwen3", vocab_size=10240)

    # A plan has the step that makes projections: here each does.
    args: dict[str, Any] = {"rank": 8, "update_proj_gap": 1} if name == "galore" else {}

    def in_layer(own: str) -> bool:
        return ".layers." in own

    def optimizer(model: Any) -> torch.optim.Optimizer:
        return build_optimizer(OptimChoice(name, 1e-3, args=args), model.named_parameters(), is_in_layer=in_layer)

    step = workload(make, make_optimizer=optimizer)
    found = simulate(step, BASE)
    live = measured(make, "stream", BASE, optimizer)
    assert found.peak_bytes == pytest.approx(max(live, held_in_a_step(make("cpu"), optimizer)), rel=0.01)
    named = make("meta").named_parameters()
    states = sum(state_bytes(name, tuple(p.shape), 4, args, in_layer=in_layer(own)) for own, p in named)
    assert ResidentMemory.from_model(make("meta"), step).state == pytest.approx(states, rel=1e-3)


def held_in_a_step(model: Any, make_optimizer: Any) -> int:
    """Weights, gradients, states, and by the allocator what a step needs besides: live bytes have nothing of what
    operators of a library allocate inside of themselves."""
    optimizer = make_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    gc.collect()
    allocated(optimizer.step)  # what this frees was allocated before: it is not seen
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    weights = sum(p.nbytes for p in model.parameters())
    return 2 * weights + sum(map(bytes_of, states)) + allocated(optimizer.step)


def bytes_of(x: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of its components."""
    if not hasattr(x, "__tensor_flatten__"):
        return x.nbytes
    names, _ = x.__tensor_flatten__()  # type: ignore[operator]
    return sum(bytes_of(getattr(x, name)) for name in names)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("embedding", [False, True])
def test_so_it_is_with_a_block_of_the_weights(dtype: torch.dtype, embedding: bool) -> None:
    def make(device: str) -> Any:
        model: Any = build("qwen3", device, num_hidden_layers=5, vocab_size=9973).to(dtype)
        train_largest_block(model, include_embedding=embedding)
        return model

    def optimizer(model: Any) -> torch.optim.Optimizer:
        args = {"include_embedding": embedding}
        made = build_optimizer(OptimChoice("badam", 1e-3, args=args), model.named_parameters())
        assert isinstance(made, BlockAdamW)
        made.merge_blocks()
        return made

    found = simulate(workload(make, make_optimizer=optimizer), BASE)
    assert found.peak_bytes == pytest.approx(measured(make, "stream", BASE, optimizer), rel=0.01)
    trained = sum(p.numel() for p in make("meta").parameters() if p.requires_grad)
    assert found.terms.get("optimizer", 0) in (
        0,
        pytest.approx((8 if dtype == torch.float32 else 12) * trained, rel=0.01),
    )


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_so_it_is_without_a_backward(dtype: torch.dtype, tied: bool) -> None:
    """Weights, copies of one layer and of the modules outside layers, and the forward's activations."""
    make = partial(build, "qwen3", dtype=dtype, num_hidden_layers=5, tie_word_embeddings=tied)

    def optimizer(model: Any) -> ZerothOrderSGD:
        made = build_optimizer(OptimChoice("mezo", 1e-6), model.named_parameters())
        assert isinstance(made, ZerothOrderSGD)
        return made

    model: Any = make("cpu").train()
    backend = ZerothOrderBackend(model, optimizer(model), decoder_layers(model))
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH))

    def take() -> StepScore:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        backend.backward(loss)
        return StepScore(loss.item(), {})

    with stream(model, schedule=BASE):
        backend.compute_gradients(take)
        gc.collect()
        with LiveBytes(model, decoder_layers(model)) as live:
            backend.compute_gradients(take)
            backend.step(1e-6)
    weights = model_bytes(model)
    for micro_batches in (1, 3):
        step = workload(make, make_optimizer=optimizer, step=OPTIMIZERS["mezo"].step, micro_batches=micro_batches)
        found = simulate(step, BASE)
        assert found.peak_bytes == pytest.approx(weights + live.peak, rel=0.01)
        assert not {"gradients", "optimizer"} & found.terms.keys()
        assert found.terms.get("layer inputs", 0) <= LENGTH * 64 * 4  # that of one layer
        assert found == simulate(step, BASE, full=True)
    trained = simulate(workload(make, make_optimizer=adamw), BASE)
    assert found.peak_bytes - weights < (trained.peak_bytes - weights) / 2
    once = simulate(workload(make, make_optimizer=optimizer, step=replace(OPTIMIZERS["mezo"].step, forwards=1)), BASE)
    assert found.work.matmul_flops == 6 * once.work.matmul_flops


@pytest.mark.full
def test_so_it_is_with_an_optimizer_in_the_backward() -> None:
    make = partial(build, "qwen3", vocab_size=9973)
    model: Any = make("cpu").train()
    backend = InBackwardBackend(model, adamw(model), max_norm=0.0)
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH))

    def step() -> None:
        backend.begin_step(1e-3, lambda: None)
        with backend.micro_batch_context(last=True):
            backend.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        backend.clip_gradients(0.0)
        backend.step(1e-3)

    with stream(model, schedule=BASE), LiveBytes(model, decoder_layers(model)) as live:
        step()
        step()
    weights = sum(p.nbytes for p in model.parameters())
    found = simulate(workload(make, make_optimizer=adamw, step=PLAIN_STEP.with_step_in_backward()), BASE)
    after = simulate(workload(make, make_optimizer=adamw), BASE)
    assert found.peak_bytes == pytest.approx(weights + live.peak, rel=0.01)
    largest = max(p.nbytes for p in model.parameters())
    assert after.phases["optimizer"] - found.phases["optimizer"] == pytest.approx(weights - largest, rel=0.01)
    backend.close()


def narrow_states(model: Any) -> torch.optim.Optimizer:
    return build_optimizer(OptimChoice("adamw", 1e-3, states="bfloat16"), model.named_parameters())


@pytest.mark.full
def test_bytes_of_states_in_bfloat16_are_those_measured() -> None:
    make = partial(build, "qwen3", vocab_size=9973)
    model: Any = make("cpu").train()
    backend = LocalBackend(model, narrow_states(model))
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH))

    def step() -> None:
        backend.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        backend.step(1e-3)

    with stream(model, schedule=BASE), LiveBytes(model, decoder_layers(model)) as live:
        step()
        step()
    found = simulate(workload(make, make_optimizer=narrow_states), BASE)
    wide = simulate(workload(make, make_optimizer=adamw), BASE)
    weights = sum(p.nbytes for p in model.parameters())
    assert found.peak_bytes == pytest.approx(weights + live.peak, rel=0.01)
    assert found.terms["optimizer"] == pytest.approx(weights, rel=1e-3)
    assert wide.terms["optimizer"] == pytest.approx(2 * weights, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("in_backward", [False, True])
def test_bytes_of_an_optimizer_on_the_host_are_those_measured(in_backward: bool) -> None:
    make = partial(build, "qwen3", vocab_size=9973)
    model: Any = make("cpu").train()
    optimizer = HostOptimizer(adamw(model))
    backend = InBackwardBackend(model, optimizer, 0.0) if in_backward else LocalBackend(model, optimizer)
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH))

    def step() -> None:
        backend.begin_step(1e-3, lambda: None)
        with backend.micro_batch_context(last=True):
            backend.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        backend.clip_gradients(0.0)
        backend.step(1e-3)

    with stream(model, schedule=BASE), LiveBytes(model, decoder_layers(model)) as live:
        step()
        step()
    backend.close()
    kind = PLAIN_STEP.with_step_in_backward() if in_backward else PLAIN_STEP
    found = simulate(workload(make, make_optimizer=adamw, step=kind.with_host_states()), BASE)
    there = simulate(workload(make, make_optimizer=adamw, step=kind), BASE)
    states = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    weights, largest = (f(p.nbytes for p in model.parameters()) for f in (sum, max))
    # On a CPU the states are in the memory that is measured, and what is copied there is not.
    assert found.peak_bytes + states == pytest.approx(weights + live.peak, rel=0.01)
    assert "optimizer" not in found.terms
    assert found.host_terms == {"optimizer": pytest.approx(states, rel=1e-3), "stepped weight": 2 * largest}
    assert there.peak_bytes - found.peak_bytes == pytest.approx(states, rel=0.01)
    assert found.work.moved_bytes - there.work.moved_bytes == 3 * weights
    assert bool(found.work.host_overlapped_bytes) == in_backward != bool(found.work.host_touched_bytes)
    here, away = (
        simulate(replace(workload(make, make_optimizer=adamw, step=step), device_type="cuda"), BASE).phases
        for step in (kind, kind.with_host_states())
    )
    waits = 2 * largest if in_backward else 0  # gradients, for the thread
    assert here["backward"] - away["backward"] == pytest.approx(states - waits, rel=0.01)


@pytest.mark.full
def test_bytes_of_weights_gradients_and_optimizer_on_the_host() -> None:
    make = partial(build, "qwen3", tie_word_embeddings=False)
    model: Any = make("meta")
    norm, all_of_it = model.model.norm.weight.nbytes, sum(p.nbytes for p in model.parameters())
    schedule = replace(BASE, weights="host")
    found = simulate(workload(make, make_optimizer=adamw), schedule)
    assert found.host_terms["weights"] == found.host_terms["gradients"] == all_of_it - norm
    assert found.host_terms["optimizer"] == pytest.approx(2 * (all_of_it - norm), rel=1e-3)
    assert found.terms["weights"] == model_bytes(model) - (all_of_it - norm)
    freed = simulate(workload(make, make_optimizer=adamw, step=PLAIN_STEP.with_step_in_backward()), schedule)
    layer = sum(p.nbytes for p in decoder_layers(model)[0].parameters())
    assert freed.host_terms["gradients"] == 2 * max(layer, model.lm_head.weight.nbytes)
    # Every weight goes there twice (embedding and head once), and its gradient comes back.
    inside = sum(p.nbytes for each in decoder_layers(model) for p in each.parameters())
    ends = all_of_it - norm - inside
    assert found.work.moved_bytes == 3 * inside + 2 * ends
    assert found.work.host_touched_bytes > 0
    narrow = simulate(workload(make, make_optimizer=narrow_states), schedule)
    assert narrow.host_terms["optimizer"] == pytest.approx(all_of_it - norm, rel=1e-3)
    assert found.work.host_touched_bytes - narrow.work.host_touched_bytes == pytest.approx(
        2 * (all_of_it - norm), rel=1e-3
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain chunks", "host but for two", "two levels on host", "last layer whole"])
def test_a_step_told_from_shorter_ones_is_the_whole_step(name: str, tmp_path: Any) -> None:
    make = partial(build, "qwen3", "meta", num_hidden_layers=9)
    long = Workload(make, 64 * 9)
    schedule = schedule_of(name, tmp_path)
    assert simulate(long, schedule) == simulate(long, schedule, full=True)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [64 * 9 + 1, 64 * 9 + 33, 64 * 10 - 1])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_so_it_is_for_a_row_of_any_length(name: str, tokens: int, tmp_path: Any) -> None:
    """The last two chunks share the rest of the row."""
    long = Workload(partial(build, "qwen3", "meta", num_hidden_layers=9), tokens, device_type="cuda")
    schedule = schedule_of(name, tmp_path)
    assert simulate(long, schedule) == simulate(long, schedule, full=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["host", "disk", "host but for two", "keys on host", "gradients streamed"])
def test_so_it_is_where_the_last_two_chunks_are_copied_with_others(name: str, tmp_path: Any) -> None:
    """The last two chunks are shorter, and are copied while chunks before them are computed."""
    long = Workload(partial(build, "qwen3", "meta", num_hidden_layers=6), 64 * 16 + 20, device_type="cuda")
    schedule = schedule_of(name, tmp_path)
    assert simulate(long, schedule) == simulate(long, schedule, full=True)


@pytest.mark.full
@pytest.mark.parametrize("chunks", [33, pytest.param(40, marks=pytest.mark.slow)])
def test_so_it_is_where_keys_come_in_blocks(chunks: int) -> None:
    """Most chunks have more than one block of keys before them, the last block a partial one."""
    long = Workload(partial(build, "qwen3", "meta", num_hidden_layers=9), 64 * chunks)
    assert long.num_tokens > 2 * KEY_BLOCK
    assert simulate(long, BASE) == simulate(long, BASE, full=True)


@pytest.mark.full
def test_so_it_is_of_an_embedding_whose_tokens_repeat() -> None:
    """On CUDA an embedding's gradient has one sum per distinct token, at most as many as the vocabulary has."""
    vocabulary = 5000
    wide = {"vocab_size": vocabulary, "hidden_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": False}
    long = Workload(partial(build, "qwen3", "meta", **wide), 64 * 100, device_type="cuda")
    schedule = replace(BASE, chunk_size=64, offload="host", stream_grads=True)
    found = simulate(long, schedule)
    assert found == simulate(long, schedule, full=True)
    sums = 4 * 512 * (long.num_tokens // 10 + vocabulary)
    assert found.phases["backward"] - simulate(replace(long, device_type="cpu"), schedule).phases["backward"] == sums


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [{"offload": "host"}, {"offload": "host", "keep_kv": "host"}, {"keep_attention": "host"}, {"levels": 2}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_so_it_is_where_chunks_fill_regions_of_host_memory(settings: dict[str, Any]) -> None:
    """Host memory is mapped every few chunks, at other chunks in every step; no chunk's work includes it."""
    wide = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "num_key_value_heads": 8}
    long = Workload(partial(build, "qwen3", "meta", num_hidden_layers=6, **wide), 1024 * 10)
    schedule = Schedule(chunk_size=1024, head_chunk_size=1024, **settings)
    assert simulate(long, schedule) == simulate(long, schedule, full=True)


@pytest.mark.full
def test_so_it_is_of_steps_under_autocast() -> None:
    long = Workload(partial(build, "qwen3", "meta", num_hidden_layers=9), 64 * 9, autocast="bfloat16")
    assert simulate(long, BASE) == simulate(long, BASE, full=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["keys kept", "keys on host", "attention on host", "chunk order, keys on host"])
def test_adapted_layers_are_told_from_fewer(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest layer passes no gradient on, so its buffers belong to no other layer."""
    walked: list[int] = []

    def noted(model: Any, *args: Any) -> Trace:
        walked.append(len(decoder_layers(model)))
        return trace_step(model, *args)

    monkeypatch.setattr(sys.modules["streamtune.plan.simulate.simulate"], "trace_step", noted)
    long = Workload(partial(build_adapted, "meta", num_hidden_layers=9), 64 * 9)
    schedule = schedule_of(name, tmp_path)
    told = simulate(long, schedule)
    assert max(walked) < 9
    assert told == simulate(long, schedule, full=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "changes"), [("gemma2", {"num_hidden_layers": 11}), ("lfm2", {"num_hidden_layers": 8})]
)
def test_so_it_is_where_layers_take_turns(family: str, changes: dict[str, Any]) -> None:
    long = Workload(partial(build, family, "meta", **changes), 64 * 9)
    assert simulate(long, BASE) == simulate(long, BASE, full=True)


def told(**changes: Any) -> Simulation:
    make = partial(build, "qwen3", "meta")
    return simulate(Workload(make, LENGTH, **changes), BASE)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def test_gradients_of_an_earlier_micro_batch_are_there() -> None:
    weights = sum(p.nbytes for p in build("qwen3", "meta").parameters())
    one, two = told(), told(micro_batches=2)
    assert two.phases["forward"] == one.phases["forward"] + weights
    assert two.work.matmul_flops == 2 * one.work.matmul_flops


def test_work_is_that_of_the_formula() -> None:
    model: Any = build("qwen3", "meta")
    inside = sum(p.numel() for layer in decoder_layers(model) for p in layer.parameters() if p.dim() == 2)
    head = model.lm_head.weight.numel()
    work = told().work
    # forward, again in backward, twice for the gradients; q, k and v a third time, but for the last chunk
    again = 2 * 4 * SMALL["hidden_size"] * (4 + 2 * 2) * 16 * (LENGTH - 64)
    # in older releases rotations are a matrix product, [8, 1] times [1, T]
    again += (
        2 * 8 * LENGTH if "@" in inspect.getsource(type(model.model.rotary_emb).forward).split("def forward")[1] else 0
    )
    assert work.matmul_flops == 2 * 4 * inside * LENGTH + 2 * 3 * head * (LENGTH - 1) + again
    pairs = LENGTH * (LENGTH + 1) // 2
    assert work.attention_flops == (2 + 2 + 5) * 2 * 4 * 4 * 16 * pairs


def test_bytes_elsewhere() -> None:
    make = partial(build, "qwen3", "meta")
    inputs = 4 * LENGTH * SMALL["hidden_size"] * 4  # layers, tokens, channels, bytes
    host = simulate(Workload(make, LENGTH), replace(BASE, offload="host"))
    assert host.host_bytes == pytest.approx(inputs, rel=0.3)
    assert host.work.moved_bytes >= 2 * inputs
    assert "layer inputs" not in host.terms or host.terms["layer inputs"] < inputs / 2
    assert host.disk_bytes == host.work.disk_moved_bytes == 0


@pytest.mark.parametrize("wrong", [{"length": 1}, {"batch_size": 0}, {"device_type": "tpu"}])
def test_what_no_step_is(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Workload(**{"make_model": partial(build, "qwen3", "meta"), "length": 64, **wrong})
