"""One training step on a GPU: gradient checkpointing and streaming, seconds, peak memory and where the time goes.

    python -m benchmarks.gpu_step [--layers 8] [--lengths 16384,65536] [--profile] [--json FILE]

The model has the layers of Qwen3-8B, fewer of them, with random weights in bf16, made on the device. A step is forward
and backward of one row into gradients that are there already, as with accumulation; there is no optimizer.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import streamtune
from streamtune import Schedule

GIB = 1024**3
VOCABULARY = 151936
SCHEDULES = {
    "stream, chunks of 2,048": Schedule(chunk_size=2048, head_chunk_size=1024),
    "stream, chunks of 2,048, attention kept": Schedule(chunk_size=2048, head_chunk_size=1024, keep_attention="device"),
    "stream, chunks of 8,192": Schedule(chunk_size=8192, head_chunk_size=2048),
    "stream, chunks of 8,192, attention kept": Schedule(chunk_size=8192, head_chunk_size=2048, keep_attention="device"),
    "stream, chunks of 8,192, inputs on host": Schedule(chunk_size=8192, head_chunk_size=2048, offload="host"),
}


def make_model(layers: int) -> PreTrainedModel:
    """Return the model, with a gradient of zeros for every parameter."""
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def complete_gradients(model: PreTrainedModel) -> None:
    """Make a gradient of zeros where there is none: a backward that ended early may have left none."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def take_step(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Run forward and backward; return the loss once the device is done."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def measure(model: PreTrainedModel, ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Return median seconds of a step, peak bytes of the allocator and the loss; or that the memory was too small."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        take_step(model, ids)  # the first compares and times kernels
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = take_step(model, ids)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    peak = torch.cuda.max_memory_allocated()
    return {"seconds": statistics.median(seconds), "fastest": min(seconds), "peak_bytes": peak, "loss": loss}


def profile_step(model: PreTrainedModel, ids: torch.Tensor, rows: int = 16) -> dict[str, Any]:
    """Return the device's time and launches in one step, and the kernels that take most."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        take_step(model, ids)
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profiled.key_averages()
        if event.self_device_time_total > 0 and str(event.device_type).endswith("CUDA")
    ]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    top = [(event.key[:100], event.count, event.self_device_time_total / 1e6) for event in kernels[:rows]]
    return {
        "kernels": sum(event.count for event in kernels),
        "device_seconds": sum(event.self_device_time_total for event in kernels) / 1e6,
        "top": top,
    }


def main() -> None:
    """Measure every mode at every length, print a table, write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_step")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers; Qwen3-8B has 36")
    parser.add_argument("--lengths", default="16384,65536", help="tokens of the row")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step at the first length")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    lengths = [int(word) for word in options.lengths.split(",")]
    model = make_model(options.layers)
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "layers": options.layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows": [],
    }
    print(json.dumps({key: value for key, value in document.items() if key != "rows"}), flush=True)
    for length in lengths:
        ids = torch.randint(0, VOCABULARY, (1, length), device="cuda")
        base = None
        for name in ("checkpoint", *SCHEDULES):
            if name == "checkpoint":
                model.gradient_checkpointing_enable({"use_reentrant": False})
                found = measure(model, ids, options.repeats)
                model.gradient_checkpointing_disable()
                base = found.get("seconds")
            else:
                with streamtune.stream(model, schedule=SCHEDULES[name]):
                    found = measure(model, ids, options.repeats)
                    if options.profile and length == lengths[0] and "host" not in name:
                        found["profile"] = profile_step(model, ids)
            document["rows"].append({"mode": name, "length": length, **found})
            if options.json:  # after each row: what was measured is there if the rest is ended
                options.json.write_text(json.dumps(document, indent=1) + "\n")
            if "error" in found:
                print(f"{length:>8,}  {name:<42} {found['error']}", flush=True)
                complete_gradients(model)
                continue
            ratio = f"{found['seconds'] / base:.2f}x" if base else ""
            peak = found["peak_bytes"] / GIB
            print(f"{length:>8,}  {name:<42} {found['seconds']:7.3f} s {ratio:>6} {peak:7.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
