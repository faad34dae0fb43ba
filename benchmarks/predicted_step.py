"""A step of Qwen3-8B by the rates of a data sheet: streaming beside gradient checkpointing, simulated on ``meta``.

    python -m benchmarks.predicted_step [--device h100-80gb] [--layers 36] [--lengths 16384,65536,262144]

Both are simulated and predicted in the same way. MFU is the work of plain autograd, products and attention, over the
predicted seconds and the device's rate. Without an optimizer; weights and gradients in bf16.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import LARGE
from streamtune import Schedule
from streamtune.plan.rates import find_device, predict_seconds, sheet_rates
from streamtune.plan.simulate import Workload, simulate

GIB = 1024**3
SCHEDULES = {
    "chunks of 2,048": Schedule(chunk_size=2048, head_chunk_size=1024),
    "chunks of 2,048, attention kept": Schedule(2048, 1024, keep_attention="device", keep_kv="device"),
    "chunks of 8,192, attention kept": Schedule(8192, 4096, keep_attention="device", keep_kv="device"),
    "chunks of 8,192, all on host": Schedule(8192, 4096, offload="host", keep_attention="host", keep_kv="host"),
}


def make_model(layers: int) -> Any:
    """Return the model on ``meta``."""
    config = AutoConfig.for_model("qwen3", **{**LARGE, "num_hidden_layers": layers}, tie_word_embeddings=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted_step")
    parser.add_argument("--device", default="h100-80gb", help="a device by name")
    parser.add_argument("--layers", type=int, default=36, help="decoder layers")
    parser.add_argument("--lengths", default="16384,65536,262144", help="tokens of the row")
    options = parser.parse_args()
    device = find_device(options.device)
    rates = sheet_rates(device)
    print("| tokens | mode | step | over checkpointing | MFU | peak |\n|---:|---|---:|---:|---:|---:|")
    for length in map(int, options.lengths.split(",")):
        workload = Workload(lambda: make_model(options.layers), length)
        plain = simulate(replace(workload, mode="plain"), Schedule()).work
        work = plain.matmul_flops + plain.attention_flops
        base = None
        for name, schedule in {"gradient checkpointing": None, **SCHEDULES}.items():
            mode = workload if schedule is not None else replace(workload, mode="checkpoint")
            found = simulate(mode, schedule or Schedule())
            seconds = predict_seconds(found.work, rates)
            base = base or seconds
            mfu = work / seconds / device.matmul_flops
            peak = found.peak_bytes / GIB
            print(
                f"| {length:,} | {name} | {seconds:.2f} s | {seconds / base:.3f} | {mfu:.2f} | {peak:.1f} GiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
