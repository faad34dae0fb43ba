"""Two levels with sharded weights: a rank's bytes on the host, and the layers gathered at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import streamtune
from streamtune import models
from streamtune.distributed.deepspeed import DeepSpeedBackend
from streamtune.distributed.deepspeed_config import resolve_config
from streamtune.engine.observe import with_observer
from streamtune.recipe import Recipe
from streamtune.run.model import make_optimizer
from streamtune.run.ranks import deepspeed_values, make_backend
from streamtune.schedule import Schedule
from streamtune.train import World
from tests.distributed.equality_cases import whole_gradients
from tests.exactness.families import VOCAB, build

LAYERS, TOKENS = 7, 40


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Measure what three steps hold: bytes on the host with whole and with shared weights, layers gathered by pass.

    ``again`` is the number of times a layer ran forward in a backward, in the last step; ``left`` that of layers that
    are gathered after it; ``difference`` that of its gradients to those of whole weights, relative by norm.
    """
    schedule = Schedule(chunk_size=8, head_chunk_size=8, **case["schedule"])
    whole = streamtune.stream(_model(case), schedule=schedule)
    whole.model(input_ids=_ids(), labels=_ids(), use_cache=False).loss.backward()
    wanted = {name: p.grad for name, p in whole.model.named_parameters() if p.requires_grad}
    shared = streamtune.stream(_model(case), schedule=schedule)
    backend = _backend(case, shared)
    for _ in range(3):  # DeepSpeed learns the order of modules in the first two
        with with_observer(watch := _Gathered(shared.layers)):
            loss = backend.model(input_ids=_ids(), labels=_ids(), use_cache=False).loss
            watch.backward = True
            backend.backward(loss / torch.distributed.get_world_size())  # all have the same row
        left = sum(map(_is_gathered, shared.layers))
        got = whole_gradients(backend, shared.model)
        backend.drop_gradients()
    found = {
        "whole": whole.tiers.host.peak_bytes,
        "shared": shared.tiers.host.peak_bytes,
        "gathered": watch.most,
        "again": watch.again,
        "left": left,
        "difference": max(
            float((got[name] - grad).norm() / grad.norm().clamp_min(1e-3)) for name, grad in wanted.items()
        ),
    }
    backend.close()
    return found


class _Gathered:
    """Observes how many layers are gathered in the passes of a step."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers, self.backward = layers, False
        self.most: dict[str, int] = {}
        self.again = 0

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        if layer not in self.layers or not pass_name or chunk.stop == 0:
            return
        assert _is_gathered(layer)
        name = f"{'backward' if self.backward else 'forward'}: {pass_name}"
        self.most[name] = max(self.most.get(name, 0), sum(map(_is_gathered, self.layers)))
        self.again += self.backward and pass_name == "store" and chunk.start == 0

    def on_new_tensors(self, kind: str, tensors: tuple[Tensor, ...]) -> None:
        pass

    def on_resize(self, x: Tensor) -> None:
        pass


def _is_gathered(layer: nn.Module) -> bool:
    first: Any = next(layer.parameters())
    if hasattr(first, "ds_status"):
        return any(p.ds_status.name == "AVAILABLE" for p in layer.parameters())  # type: ignore[attr-defined]
    return not isinstance(first, DTensor)


def _model(case: dict[str, Any]) -> Any:
    model: Any = build("qwen3", num_hidden_layers=LAYERS).train()
    if case.get("finetuning") == "lora":
        model = models.add_lora(model, r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
    return model


def recipe_for(engine: str, **more: Any) -> Recipe:
    """Return a recipe that names an engine, but no model or data."""
    return Recipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        max_length=64,
        deepspeed=None if engine == "fsdp" else engine,
        fsdp=engine == "fsdp",
        **more,
    )


def _backend(case: dict[str, Any], handle: Any) -> Any:
    """Return the recipe's backend, with the ``zero_optimization`` values of the case."""
    recipe = recipe_for(case["engine"], finetuning_type=case.get("finetuning", "full"))
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if case["engine"] == "fsdp":
        return make_backend(recipe, handle.model, handle.layers, world)
    config = resolve_config(case["engine"], deepspeed_values(recipe, handle.model, world))
    config["zero_optimization"] |= case.get("zero", {})
    return DeepSpeedBackend(handle.model, make_optimizer(recipe, handle.model), config, handle.layers)


def _ids() -> Tensor:
    return torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))
