"""Predicted steps of Qwen3-8B: by the rates of a data sheet, and beside measured steps of a GPU.

    python -m benchmarks.predicted step [--device h100-80gb] [--layers 36] [--lengths 16384,65536,262144]
    python -m benchmarks.predicted calibration STEPS.json... --json FILE

``step``: streaming beside gradient checkpointing, both simulated on ``meta`` and predicted in the same way, without a
device. MFU is the work of plain autograd, products and attention, over the predicted seconds and the device's rate.
Without an optimizer; weights and gradients in bf16.

``calibration``: rates of operators measured on the device beside the rates of its data sheet; then the steps that
``benchmarks.gpu_pieces step`` measured beside their prediction by both sets of rates, and simulated bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import gpu_pieces
from benchmarks.gpu import GIB, LARGE
from streamtune import Schedule
from streamtune.plan.calibrate import measure_rates
from streamtune.plan.rates import DEVICES, Device, Rates, data_sheet_rates, find_device, nearest_device, predict_seconds
from streamtune.plan.simulate import Workload, simulate

SCHEDULES = {
    "chunks of 2,048": Schedule(chunk_size=2048, head_chunk_size=1024),
    "chunks of 2,048, attention kept": Schedule(2048, 1024, keep_attention="device", keep_kv="device"),
    "chunks of 8,192, attention kept": Schedule(8192, 4096, keep_attention="device", keep_kv="device"),
    "chunks of 8,192, all on host": Schedule(8192, 4096, offload="host", keep_attention="host", keep_kv="host"),
}


def qwen3_8b(layers: int = 36) -> Any:
    """Return Qwen3-8B with a number of layers on ``meta``, in bf16."""
    config = AutoConfig.for_model("qwen3", **{**LARGE, "num_hidden_layers": layers}, tie_word_embeddings=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def show_steps(device_name: str, layers: int, lengths: list[int]) -> None:
    device = find_device(device_name)
    rates = data_sheet_rates(device)
    print("| tokens | mode | step | over checkpointing | MFU | peak |\n|---:|---|---:|---:|---:|---:|")
    for length in lengths:
        workload = Workload(lambda: qwen3_8b(layers), length)
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


def sheet_of(name: str, size: int) -> Device:
    """Return the data sheet of a named device; of the nearest memory size if no name matches."""
    words = name.lower().replace("-", " ").split()
    named = [device for device in DEVICES.values() if set(device.name.split("-")[:-1]) <= {*words}]
    return min(named, key=lambda device: abs(device.memory_bytes - size)) if named else nearest_device(size)


def compared(rows: list[dict[str, Any]], layers: int, rates: dict[str, Rates]) -> list[dict[str, Any]]:
    """Return the measured steps that can be simulated, each with its prediction.

    Args:
        rows: Rows of ``benchmarks.gpu_pieces step``.
        layers: Decoder layers of its model.
        rates: Rates by the name of their source.
    """
    found = []
    for row in rows:
        if row["mode"] not in gpu_pieces.SCHEDULES and row["mode"] != "checkpoint":
            continue
        # the second micro-batch, which has gradients already
        workload = Workload(lambda: qwen3_8b(layers), row["length"], micro_batches=2)
        workload = replace(workload, mode="checkpoint") if row["mode"] == "checkpoint" else workload
        simulated = simulate(workload, gpu_pieces.SCHEDULES.get(row["mode"], Schedule()))
        seconds = {name: predict_seconds(simulated.work, of) / 2 for name, of in rates.items()}
        found.append({**row, "predicted_seconds": seconds, "simulated_bytes": simulated.peak_bytes})
    return found


def calibrate(files: list[Path], out: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    measured = measure_rates(device, torch.bfloat16)
    sheet = sheet_of(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
    rates = {"measured": measured, "data sheet": data_sheet_rates(sheet)}
    rows = []
    for path in files:
        steps = json.loads(path.read_text(encoding="utf-8"))
        rows += compared(steps["rows"], steps["layers"], rates)
    document = {"sheet": sheet.title, "rates": {name: asdict(of) for name, of in rates.items()}, "rows": rows}
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    step = commands.add_parser("step")
    step.add_argument("--device", default="h100-80gb", help="a device by name")
    step.add_argument("--layers", type=int, default=36, help="decoder layers")
    step.add_argument("--lengths", default="16384,65536,262144", help="tokens of the row")
    calibration = commands.add_parser("calibration")
    calibration.add_argument("steps", nargs="*", type=Path, help="figures of benchmarks.gpu_pieces step")
    calibration.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    options = parser.parse_args()
    if options.what == "step":
        show_steps(options.device, options.layers, [int(length) for length in options.lengths.split(",")])
    elif torch.cuda.is_available():
        calibrate(options.steps, options.json)
    else:
        parser.error("there is no CUDA device")


if __name__ == "__main__":
    main()
