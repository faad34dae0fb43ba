"""One case on one rank: a model, an engine that shares it, a few steps, and the collectives of one step.

Modes:
    plain       the model as ``transformers`` has it
    ordinary    with its gradient checkpointing: the baseline
    streaming   ``streamtune.stream`` with D chunks
    naive       D times forward and backward, each with the loss of a D-th of the tokens: chunks without the node

All modes have the same gradient; its norm is returned to show it.

Collectives are counted at the operators of ``torch.distributed``. DeepSpeed and DDP call ``c10d``, DTensor calls the
functional collectives; a dispatch mode sees both, from Python or C++. Bytes are of the whole tensor of a
collective, as one rank has it: everything reduced, gathered or sent. What a network carries depends on the algorithm;
:func:`wire_bytes` reads that.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import streamtune
from streamtune import models, train
from streamtune.distributed.deepspeed import DeepSpeedBackend
from streamtune.distributed.deepspeed_config import resolve_config
from streamtune.recipe import Recipe
from streamtune.run.model import make_optimizer
from streamtune.run.ranks import deepspeed_values, make_backend, sequence_ranks

Rows = list[tuple[Tensor, Tensor]]

TOKENS, VOCABULARY, CLIP = 128, 512, 1.0
WARM_UP = 2
"""Steps before the counted one: DDP lays out its buckets in the first, ZeRO-3 learns the order of modules."""
WIRE_STEPS = 5
SIZES: dict[str, dict[str, int]] = {
    "table": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8},
    "test": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    "deep": {"num_hidden_layers": 7, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
}
UNHIDDEN = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""ZeRO-3 keeps up to 1e9 numbers gathered from forward to backward: all of a small model, which is then gathered once
instead of twice. Here nothing is kept, as in a model of many billions."""


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Count the collectives of one optimizer step, and the bytes on the wire if each rank is a node."""
    world = _world(case)
    recipe, model = _recipe(case), _model(case)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    layers = list(model.get_decoder().layers)
    if case["mode"] == "streaming":
        chunk, ranks = TOKENS // case["chunks"], sequence_ranks(recipe, world)
        schedule = streamtune.Schedule(chunk_size=chunk, head_chunk_size=chunk, **case.get("schedule", {}))
        layers = streamtune.stream(model, schedule=schedule, sequence_parallel=ranks).layers
    elif case["mode"] != "plain":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    backend = _backend(case, recipe, model, layers, world)
    rows = _rows(recipe.gradient_accumulation_steps, world)
    targets = world.data_size * len(rows) * (TOKENS - 1)
    parts = case["chunks"] if case["mode"] == "naive" else 1
    for _ in range(WARM_UP):
        _step(backend, rows, parts, targets, Traffic())
    with Traffic() as traffic:
        norm = _step(backend, rows, parts, targets, traffic)
    found = {"bytes": whole, "trained_bytes": trained, "norm": norm, "traffic": traffic.found}
    if case.get("wire"):
        found["wire"] = _wire(backend, rows, parts, targets)
    backend.close()
    del backend, model
    gc.collect()
    return found


def _world(case: dict[str, Any]) -> train.World:
    return train.World(distributed.get_rank(), distributed.get_world_size(), case.get("sequence", 1))


def _recipe(case: dict[str, Any]) -> Recipe:
    return Recipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        max_length=TOKENS,
        learning_rate=1e-5,
        max_grad_norm=CLIP,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=case.get("accumulation", 1),
        finetuning_type=case.get("finetuning", "full"),
        deepspeed=case["engine"] if case["engine"].startswith("zero") else None,
        fsdp=case["engine"] == "fsdp",
        sequence_parallel_size=case.get("sequence", 1),
        sequence_parallel=case.get("form", "auto"),
    )


def _model(case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    size = SIZES[case.get("size", "table")]
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_key_value_heads=size["num_attention_heads"] // 2,
            tie_word_embeddings=case.get("tied", False),
            **size,
        )
    )
    if case.get("finetuning") == "lora":
        model = models.add_lora(model, r=8, alpha=16, dropout=0.0, target="all-linear", seed=0)
    return model.train()


def _backend(case: dict[str, Any], recipe: Recipe, model: Any, layers: list[nn.Module], world: train.World) -> Any:
    """Return our backend; for a model that is not streamed, DeepSpeed's without leaf modules.

    In all modes buckets are small and nothing stays gathered, unless the case says ``preset``.
    """
    if not case["engine"].startswith("zero"):
        return make_backend(recipe, model, layers, world)
    streams = case["mode"] == "streaming"
    if case.get("preset") and streams:
        return make_backend(recipe, model, layers, world)
    config = resolve_config(case["engine"], deepspeed_values(recipe, model, world))
    zero = config["zero_optimization"]
    if not case.get("preset"):
        zero["reduce_bucket_size"] //= len(layers)
        if zero["stage"] == 3:
            zero |= UNHIDDEN
    kind = DeepSpeedBackend if streams else _OrdinaryDeepSpeed
    return kind(model, make_optimizer(recipe, model), config, layers)


class _OrdinaryDeepSpeed(DeepSpeedBackend):
    """No leaf modules: hooks around every module, as without streaming."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, config: Any, layers: Any) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("WARNING")
        deepspeed.init_distributed(dist_init_required=False)
        self.stage, self.module = config["zero_optimization"]["stage"], model
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.size = distributed.get_world_size()


def _rows(count: int, world: train.World) -> Rows:
    """Return this rank's micro-batches: ``[1, T]`` tokens and the targets they predict."""
    generator = torch.Generator().manual_seed(1 + world.data_rank)
    rows = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
        rows.append((ids, nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]))
    return rows


def _step(backend: Any, rows: Rows, parts: int, targets: int, traffic: Traffic) -> float:
    """Run one optimizer step, each micro-batch in ``parts`` backwards; return the gradient norm."""
    size = TOKENS // parts
    for index, (ids, labels) in enumerate(rows):
        for start in range(0, TOKENS, size):
            mine = torch.full_like(labels, -100)
            mine[:, start : start + size] = labels[:, start : start + size]
            with backend.micro_batch_context(last=index == len(rows) - 1 and start + size == TOKENS):
                traffic.phase = "forward"
                out = backend.model(input_ids=ids, labels=mine, shift_labels=mine, num_items_in_batch=targets)
                traffic.phase = "backward"
                backend.backward(out.loss)
    traffic.phase = "step"
    norm: float = backend.clip_gradients(CLIP)
    backend.step(1e-5)
    return norm


def _wire(backend: Any, rows: Rows, parts: int, targets: int) -> dict[str, float]:
    """Return bytes that this node received and sent in a step, by the kernel's count; mean of several steps."""
    distributed.barrier()
    before = wire_bytes()
    for _ in range(WIRE_STEPS):
        _step(backend, rows, parts, targets, Traffic())
    distributed.barrier()
    received, sent = (after - was for was, after in zip(before, wire_bytes(), strict=True))
    return {"received": received / WIRE_STEPS, "sent": sent / WIRE_STEPS}


# --- the count --------------------------------------------------------------------------------------------------------


KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
}
"""Operator -> name in the tables."""
SILENT = {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
"""Operators that carry nothing."""


class Traffic(TorchDispatchMode):
    """Counts collectives while it is active.

    Attributes:
        phase: Current phase of the step: ``forward``, ``backward`` or ``step``.
        found: Phase -> kind -> ``[calls, bytes]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.found: dict[str, dict[str, list[int]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count ``func`` if it is a collective, and run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor becomes plain operators, with its collectives
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name not in SILENT:
                calls = self.found.setdefault(self.phase, {}).setdefault(KINDS[name], [0, 0])
                calls[0] += 1
                calls[1] += max(_bytes(value) for value in (*args, out))
        return out


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists. A collective counts its largest argument."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def wire_bytes() -> tuple[int, int]:
    """Return bytes received and sent so far by the interfaces of this network namespace, without loopback."""
    received = sent = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        if name.strip() != "lo":
            columns = figures.split()
            received += int(columns[0])
            sent += int(columns[8])
    return received, sent


assert os.environ.get("WORLD_SIZE"), "imported by ranks alone"
