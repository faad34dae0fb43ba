"""A cached simulation is used if model, step, schedule and code are the same, and never otherwise."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune.base.result_cache import code_versions
from streamtune.plan.simulate import simulation_cache
from streamtune.plan.simulate.scored import Scored
from streamtune.plan.simulate.simulate import simulate
from streamtune.plan.simulate.simulation_cache import step_cache_key
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

SCHEDULE = Schedule(chunk_size=16, head_chunk_size=16)


def model_of(*, layers: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, **settings
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(dtype)


def step_of(model: Any, **options: Any) -> Workload:
    return Workload(lambda: model, **{"length": 64, "device_type": "cpu", "keep": True, **options})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "streamtune" / "simulations"


def test_a_second_simulation_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = partial(torch.optim.AdamW, lr=1e-3)
    step = step_of(model_of(), make_optimizer=lambda model: adam(model.parameters()))
    first = simulate(step, SCHEDULE)
    assert first == simulate(replace(step, keep=False), SCHEDULE)
    assert len(list(folder.iterdir())) == 1
    with monkeypatch.context() as broken:
        broken.setattr(sys.modules["streamtune.plan.simulate.simulate"], "_trace_micro_batch", None)
        assert simulate(step, SCHEDULE) == first
    for file in folder.iterdir():
        file.write_text("{")
    assert simulate(step, SCHEDULE) == first


def test_the_key_depends_on_the_code_of_the_whole_package(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(f"{path.parent.name}/{path.name}") or b"")
    code_versions.__wrapped__()
    assert {"engine/vjp.py", "simulate/step.py", "base/result_cache.py"} <= set(read)


@pytest.mark.parametrize("package", ["torch", "transformers", "peft", "torchao", "bitsandbytes", "pytorch-optimizer"])
def test_another_version_of_a_package_that_a_step_is_made_of_is_another_key(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = code_versions.__wrapped__
    before, real = find(), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == package else real(name))
    assert find() != before


def test_everything_that_decides_a_step_is_part_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = model_of()
    frozen.model.embed_tokens.weight.requires_grad_(False)
    tree = Scored(((5, (6, 6)),))
    steps = [
        step_of(model_of()),
        step_of(model_of(layers=3)),
        step_of(model_of(dtype=torch.bfloat16)),
        step_of(model_of(hidden_act="gelu")),
        step_of(model_of(attn_implementation="eager")),
        step_of(frozen),
        step_of(model_of(), length=65),
        step_of(model_of(), batch_size=2),
        step_of(model_of(), micro_batches=2),
        step_of(model_of(), autocast="bfloat16"),
        step_of(model_of(), device_type="cuda"),
        step_of(model_of(), mode="checkpoint"),
        step_of(model_of(), completions=lambda length, size: tree),
        step_of(model_of(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        step_of(model_of(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    ]
    keys = [step_cache_key(step, SCHEDULE) for step in steps]
    keys += [step_cache_key(steps[0], replace(SCHEDULE, keep_kv="device")), step_cache_key(steps[0], Schedule(32, 16))]
    with monkeypatch.context() as older:
        older.setattr(simulation_cache, "code_versions", lambda: ["torch 1.0"])
        keys.append(step_cache_key(steps[0], SCHEDULE))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert step_cache_key(step_of(model_of()), SCHEDULE) == keys[0]


class OwnAttention(torch.nn.Module):
    pass


def test_a_model_with_code_or_hooks_of_its_own_is_not_kept() -> None:
    hooked, replaced, other = model_of(), model_of(), model_of()
    hooked.model.layers[0].register_forward_hook(lambda *args: None)
    replaced.model.layers[0].forward = lambda *args, **kwargs: None
    other.model.layers[0].self_attn = OwnAttention()
    OwnAttention.__module__ = "transformers_modules.theirs"
    for model in (hooked, replaced, other):
        assert step_cache_key(step_of(model), SCHEDULE) is None
