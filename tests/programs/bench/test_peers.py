"""Peers on the model of a test: what they compute, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from streamtune.errors import UnsupportedModelError
from streamtune.plan.simulate import ALL_MODES
from streamtune.programs.bench import modes
from streamtune.programs.bench.modes import MODE_SETUPS, why_modes_unavailable
from tests.exactness.families import build

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model() -> Any:
    return build("llama", max_position_embeddings=512).train()


def step(model: Any, loss: Any = None) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step, by plain autograd unless another loss is given."""
    ids = torch.randint(0, model.config.vocab_size, (1, 48), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    out = model(input_ids=ids, labels=ids).loss if loss is None else loss({"input_ids": ids})
    out.backward()
    return float(out.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def held(model: nn.Module) -> dict[str, Any]:
    """What modules hold, their hooks included, and the names of their file; not the fields that transformers leaves."""
    theirs = ("_gradient_checkpointing_func", "gradient_checkpointing", "training")
    found: dict[str, Any] = {"file": dict(vars(modeling_llama)), "forward": modeling_llama.LlamaRMSNorm.forward}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in theirs:
                found[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    return found


def assert_same_step(found: tuple[float, dict[str, Tensor]], plain: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    for name, gradient in plain[1].items():
        assert torch.linalg.vector_norm(found[1][name] - gradient) <= 1e-5 * torch.linalg.vector_norm(gradient), name


def test_what_is_replaced_inside_is_put_back(model: Any) -> None:
    before, plain = held(model), step(model)
    own = modeling_llama.LlamaForCausalLM.forward
    with modes.restoring_model(model):
        model.forward = lambda **given: None
        model.lm_head.register_forward_hook(lambda *given: None)
        model.model.norm.new = 1
        del model.model.norm.variance_epsilon
        modeling_llama.apply_rotary_pos_emb = None
        modeling_llama.LlamaForCausalLM.forward = lambda self, **given: None
        modeling_llama.LlamaRMSNorm.more = 1
    assert held(model) == before
    assert modeling_llama.LlamaForCausalLM.forward is own
    assert not hasattr(modeling_llama.LlamaRMSNorm, "more")
    assert_same_step(step(model), plain)


def test_trl_computes_the_same_and_leaves_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its offloading, which asks for a stream of an accelerator; its hooks on the head are there."""
    if find_spec("trl") is None:
        pytest.skip("trl is not installed")
    from trl.models import activation_offloading

    class Kept(nullcontext):  # type: ignore[type-arg]
        def __init__(self, **settings: Any) -> None:
            super().__init__()

        def update_model_params(self, model: nn.Module) -> None:
            """Does nothing: there is nothing to tell apart."""

    monkeypatch.setattr(activation_offloading, "OffloadActivations", Kept)
    before, plain = held(model), step(model)
    with modes.trl(model) as loss:
        assert model.lm_head._forward_hooks
        assert_same_step(step(model, loss), plain)
    assert held(model) == before


@pytest.fixture
def unsloth(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Unsloth's interface, by torch's reentrant checkpoint; returns what is called."""
    calls: list[str] = []
    checkpointing: Any = ModuleType("unsloth_zoo.gradient_checkpointing")

    def checkpoint(function: Any, *args: Any, **given: Any) -> Any:
        calls.append("checkpoint")
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True, **given)

    def chunked(trainer: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        logits = nn.functional.linear(hidden, weight, bias)[0, :-1]
        return nn.functional.cross_entropy(logits, labels[0, 1:])

    checkpointing.unsloth_checkpoint = checkpoint
    checkpointing.patch_unsloth_smart_gradient_checkpointing = lambda dtype: calls.append(f"patched for {dtype}")
    checkpointing.unpatch_unsloth_smart_gradient_checkpointing = lambda: calls.append("unpatched")
    package: Any = ModuleType("unsloth_zoo")
    package.gradient_checkpointing = checkpointing
    losses: Any = SimpleNamespace(unsloth_fused_ce_loss=chunked)
    files = {"unsloth": ModuleType("unsloth"), "unsloth_zoo": package, "unsloth_zoo.fused_losses": losses}
    for name, file in files.items():
        monkeypatch.setitem(sys.modules, name, file)
    return calls


def test_unsloth_is_called_by_its_interface_and_put_back(model: Any, unsloth: list[str]) -> None:
    before, plain = held(model), step(model)
    with modes.unsloth(model) as loss:
        assert_same_step(step(model, loss), plain)
    assert unsloth[0] == "patched for torch.float32"
    assert unsloth[1:-1] == ["checkpoint"] * model.config.num_hidden_layers
    assert unsloth[-1] == "unpatched"
    assert held(model) == before


def test_unsloth_is_measured_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "find_spec", lambda name: name)
    assert why_modes_unavailable(["plain", "checkpoint", "unsloth"], "cuda") == {}
    missing = why_modes_unavailable(ALL_MODES, "cuda")
    assert list(missing) == ["unsloth"]
    assert "--modes plain,checkpoint,unsloth" in missing["unsloth"]


@pytest.mark.parametrize("mode", ["liger-loss", "liger-loss-offload", "liger", "trl", "unsloth"])
def test_a_peer_that_cannot_run_is_named_with_the_reason(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_modes_unavailable([mode], "cpu")[mode].startswith("not run here: ")  # type: ignore[list-item]
    monkeypatch.setattr(modes, "find_spec", lambda name: None)
    assert why_modes_unavailable([mode], "cuda")[mode].endswith(" is not installed")  # type: ignore[list-item]


def test_a_peer_that_does_not_know_these_versions_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "unsloth", None)
    with pytest.raises(UnsupportedModelError, match="Unsloth cannot be imported"):
        MODE_SETUPS["unsloth"].prepare(model, modes.Schedule()).__enter__()


@contextmanager
def liger_without(model_type: str) -> Iterator[None]:
    """A Liger that knows no family."""
    with pytest.MonkeyPatch.context() as patch:
        transformers: Any = ModuleType("liger_kernel.transformers")
        transformers._apply_liger_kernel_to_instance = None
        patches: Any = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={})
        files = {
            "liger_kernel": ModuleType("liger_kernel"),
            "liger_kernel.transformers": transformers,
            "liger_kernel.transformers.monkey_patch": patches,
        }
        for name, file in files.items():
            patch.setitem(sys.modules, name, file)
        yield


def test_a_family_without_kernels_is_refused(model: Any) -> None:
    with liger_without("llama"), pytest.raises(UnsupportedModelError, match="Liger has no kernels for llama"):
        MODE_SETUPS["liger"].prepare(model, modes.Schedule()).__enter__()


@pytest.mark.full
def test_liger_computes_the_same_and_leaves_nothing() -> None:
    """Its kernels run in Triton's interpreter."""
    if missing := [package for package in ("triton", "liger_kernel") if find_spec(package) is None]:
        pytest.skip(f"{missing[0]} is not installed (make test-versions installs it)")
    command = [sys.executable, "-m", "tests.programs.bench.liger_cases"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["replaced"], "its kernels are used"
    for mode in ("liger-loss", "liger"):
        assert found[mode]["loss"] < 1e-6
        assert found[mode]["gradient"] < 1e-5
        assert found[mode]["left"] == []
