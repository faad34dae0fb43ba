"""The program that runs over the runtime without a device: ``python -m tests.cuda_host.measure``, cases on stdin.

Values are garbage there, so the few choices that look at values are made beforehand: which attention kernel agrees with
the formula, which tokens have a target. Prints one JSON document: for each case what was counted in its second step.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

import streamtune
from streamtune import Schedule
from streamtune.engine import fused as engine_fused
from streamtune.engine import model_call, outside_layers
from streamtune.ops import fused
from streamtune.ops.attention import kernels, view_kernels
from streamtune.ops.devices import cached_host_copy, to_device_with_host_copy
from streamtune.ops.head import cross_entropy, sweep
from streamtune.plan.simulate import Workload, simulate

COUNTERS = ("launches", "syncs", "d2h", "h2d", "mallocs", "frees", "used", "peak", "operations", "not_ready")
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
GEMMA2_9B = {
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
MISTRAL_7B = {**QWEN3_8B, "vocab_size": 32768, "intermediate_size": 14336, "sliding_window": 1024}
LFM2: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "layer_types": ["conv", "full_attention", "conv"],
    "vocab_size": 65536,
}
"""Three layers of it: convolutions, which leave a state to later chunks, around attention."""
SHAPES = {"qwen3": QWEN3_8B, "gemma2": GEMMA2_9B, "mistral": MISTRAL_7B, "lfm2": LFM2}
COMMON = {
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Counts:
    """The counters of the runtime."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["STUB"] + "/libstubrt.so")
        self.library.stub_get.restype = ctypes.c_long

    def reset(self) -> None:
        self.library.stub_reset()

    def get(self, name: str) -> int:
        return int(self.library.stub_get(COUNTERS.index(name)))

    def by_name(self) -> dict[str, int]:
        with tempfile.NamedTemporaryFile() as file:
            self.library.stub_dump(file.name.encode())
            rows = [line.split("\t", 1) for line in Path(file.name).read_text().splitlines()]
        return {name: int(count) for count, name in rows}


class AllTargets(sweep.TargetRows):
    """Rows that all have a target; the real one looks for them on the device."""

    def __init__(self, targets: torch.Tensor, ignore_index: int, chunk_size: int) -> None:
        self.targets, self.chunk_size = targets.flatten(), chunk_size
        self.positions = torch.arange(len(self.targets))
        self.every = True


def decide_without_values() -> None:
    """Make the choices for which values on the device would be read."""
    kernels._fastest_agreeing_kernel = lambda candidates, *_: candidates[0]  # type: ignore[assignment]
    engine_fused.is_norm_kernel_correct = lambda *_: True  # type: ignore[assignment]
    fused._matmul_accumulates_wide = lambda *_: True  # type: ignore[assignment]
    view_kernels.is_band_correct = lambda *_: True  # type: ignore[assignment]
    view_kernels.is_rows_kernel_correct = lambda *_: True  # type: ignore[assignment]
    view_kernels.is_flex_correct = lambda *_: True  # type: ignore[assignment]
    view_kernels._is_band_faster = lambda *_: True  # type: ignore[assignment]
    cross_entropy.TargetRows = AllTargets  # type: ignore[misc]
    cross_entropy.choose_head_kernel = lambda *_, **__: None
    outside_layers.StreamedNorm._is_pointwise = lambda *_: True  # type: ignore[method-assign,assignment]
    model_call.clear_host_copies = lambda: None  # what they are copies of cannot be read
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda ids: None if cached_host_copy(ids) is None else found(ids)


_waits_of_threads = itertools.count()


class _Event(torch.cuda.Event):
    """An event that counts the waits of threads: those do not hold up the step."""

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            next(_waits_of_threads)
        super().synchronize()


def make(case: dict[str, Any], device: str) -> Any:
    """Return the model of a case, in bf16 unless it says otherwise."""
    family = case.get("family", "qwen3")
    settings = {**COMMON, **SHAPES[family], "num_hidden_layers": case["layers"], **case.get("config", {})}
    config = AutoConfig.for_model(family, **settings)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.get("dtype", "bfloat16"))).train()


def measure(case: dict[str, Any], counts: Counts) -> dict[str, Any]:
    """Run two steps of a case and return what the second one took, beside the simulated bytes."""
    folder = tempfile.TemporaryDirectory()
    more = {"offload_dir": folder.name} if case["schedule"].get("offload") == "disk" else {}
    model, schedule = make(case, "cuda"), Schedule(**case["schedule"], **more)
    ids = torch.zeros(1, case["length"], dtype=torch.long, device="cuda")
    rows: dict[str, Any] = {}
    if "row" in case:
        positions = torch.arange(case["length"])[None] % case["row"]
        rows = {"position_ids": to_device_with_host_copy(positions, torch.device("cuda")), "use_cache": False}
    bf16 = torch.autocast("cuda", torch.bfloat16, enabled=case.get("autocast", False))
    with streamtune.stream(model, schedule=schedule):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            counts.reset()
            before = next(_waits_of_threads)
            with bf16:
                loss = model(input_ids=ids, labels=ids, **rows).loss
            forward = counts.get("launches")
            loss.backward()
            elsewhere = next(_waits_of_threads) - before - 1
    found = {
        "forward": forward,
        "backward": counts.get("launches") - forward,
        "syncs": counts.get("syncs") - elsewhere,
        "unpinned": sum(count for name, count in counts.by_name().items() if "UNPINNED" in name),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    del model, loss
    gc.collect()
    torch.cuda.empty_cache()
    folder.cleanup()
    if case.get("simulated", False):
        workload = Workload(
            lambda: make(case, "meta"), case["length"], autocast="bfloat16" if case.get("autocast") else None
        )
        found["simulated_bytes"] = simulate(workload, schedule).peak_bytes
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    decide_without_values()
    torch.cuda.Event = torch.cuda.streams.Event = _Event  # type: ignore[misc]
    json.dump([measure(case, Counts()) for case in json.load(sys.stdin)], sys.stdout)
