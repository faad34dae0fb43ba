"""What the planner takes a device for, and what it is.

    python -m benchmarks.gpu_calibration STEPS.json... --json FILE

Rates of operators measured beside those of the data sheet; then the steps that ``benchmarks.gpu_step`` measured beside
their prediction: seconds by both sets of rates, and bytes by simulation, which needs no device.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_step import SCHEDULES
from benchmarks.predicted_step import make_model
from streamtune import Schedule
from streamtune.plan.calibrate import measure_rates
from streamtune.plan.rates import DEVICES, Device, Rates, nearest_device, predict_seconds, sheet_rates
from streamtune.plan.simulate import Workload, simulate


def sheet_of(name: str, size: int) -> Device:
    """Return the device of the data sheets that a name means; where none is named so, that of the nearest memory."""
    words = name.lower().replace("-", " ").split()
    named = [device for device in DEVICES.values() if set(device.name.split("-")[:-1]) <= {*words}]
    return min(named, key=lambda device: abs(device.memory_bytes - size)) if named else nearest_device(size)


def compared(rows: list[dict[str, Any]], layers: int, rates: dict[str, Rates]) -> list[dict[str, Any]]:
    """Return the measured steps that can be simulated, with what is predicted of each.

    Args:
        rows: Rows of ``benchmarks.gpu_step``.
        layers: Decoder layers of its model.
        rates: Rates by the name of their source.
    """
    found = []
    for row in rows:
        if row["mode"] not in SCHEDULES and row["mode"] != "checkpoint":
            continue
        # of the second micro-batch, since there are gradients already
        workload = Workload(lambda: make_model(layers), row["length"], micro_batches=2)
        workload = replace(workload, mode="checkpoint") if row["mode"] == "checkpoint" else workload
        simulated = simulate(workload, SCHEDULES.get(row["mode"], Schedule()))
        seconds = {name: predict_seconds(simulated.work, of) / 2 for name, of in rates.items()}
        found.append({**row, "predicted_seconds": seconds, "simulated_bytes": simulated.peak_bytes})
    return found


def main() -> None:
    """Measure the rates, predict the steps, write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_calibration")
    parser.add_argument("steps", nargs="*", type=Path, help="figures of benchmarks.gpu_step")
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    measured = measure_rates(device, torch.bfloat16)
    sheet = sheet_of(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
    rates = {"measured": measured, "data sheet": sheet_rates(sheet)}
    rows = []
    for path in options.steps:
        steps = json.loads(path.read_text(encoding="utf-8"))
        rows += compared(steps["rows"], steps["layers"], rates)
    document = {"sheet": sheet.title, "rates": {name: asdict(of) for name, of in rates.items()}, "rows": rows}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
