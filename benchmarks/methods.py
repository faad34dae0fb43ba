"""Train the quickstart's model by several optimizers or adapters on the same rows, and compare the held-out loss.

    python -m benchmarks.methods optimizers [--only lion,badam] [--steps 60] [--out docs/benchmarks/optimizers.json]

Each is trained by `streamtune sft` with every learning rate of its grid and seed 42; the rate with the lowest held-out
loss is trained with two more seeds. The seed is that of weights and order; held-out rows are the same. Runs are kept in
the file as they end, and one that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEEDS = (42, 43, 44)
COMMON = ("datasets.0.max_rows=900", "max_length=2048", "overlength=drop", "sample=null", "logging_steps=1000",
          "save_total_limit=1", "lr_scheduler_type=cosine")  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A way to train, with the learning rates that are tried."""

    rates: Sequence[float]
    settings: Sequence[str] = ()


OPTIMIZERS: Mapping[str, Method] = {
    "adamw": Method((1e-3, 3e-3, 1e-2)),
    "adamw, moments in bfloat16": Method((1e-3, 3e-3, 1e-2), ("optim_states=bfloat16",)),
    "adamw_8bit": Method((1e-3, 3e-3, 1e-2)),
    "adamw_torch_4bit": Method((1e-3, 3e-3, 1e-2)),
    "adafactor": Method((3e-3, 1e-2, 3e-2)),
    "adan": Method((1e-3, 3e-3, 1e-2)),
    "adopt": Method((1e-3, 3e-3, 1e-2)),
    "badam": Method((1e-3, 3e-3, 1e-2), ('optim_args={"switch_block_every": 10, "include_embedding": true}',)),
    "came": Method((1e-3, 3e-3, 1e-2)),
    "galore": Method((3e-3, 1e-2, 3e-2), ('optim_args={"rank": 32, "update_proj_gap": 20, "scale": 1.0}',)),
    "galore, dct": Method(
        (3e-3, 1e-2, 3e-2), ('optim_args={"rank": 32, "update_proj_gap": 20, "scale": 1.0, "projection": "dct"}',)
    ),
    "lamb": Method((3e-3, 1e-2, 3e-2)),
    "lion": Method((1e-4, 3e-4, 1e-3)),
    "muon": Method((1e-3, 3e-3, 1e-2)),
    "sgd": Method((3e-2, 1e-1, 3e-1)),
    "sinkgd": Method((1e-3, 3e-3, 1e-2)),
}


def trained(name: str, method: Method, rate: float, seed: int, steps: int, key: str) -> dict[str, Any]:
    """Train once and return the held-out loss and the processor time of the whole program."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = [*COMMON, *method.settings, f"{key}={name.split(',')[0]}", f"learning_rate={rate}", f"seed={seed}",
                    f"max_steps={steps}", f"eval_steps={steps}", f"output_dir={out}"]  # fmt: skip
        command = [sys.executable, "-m", "streamtune", "sft", "quickstart"]
        for setting in settings:
            command += ["--set", setting]
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True)
        after = os.times()
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-3:]}
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        took = after.children_user + after.children_system - before.children_user - before.children_system
        return {"eval_loss": next(x["eval_loss"] for x in reversed(lines) if "eval_loss" in x), "seconds": took}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["optimizers"])
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    methods = {name: m for name, m in OPTIMIZERS.items() if not options.only or name in options.only.split(",")}
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def run(name: str, rate: float, seed: int) -> dict[str, Any]:
        place = f"{name} {rate:g} {seed}"
        if place not in found:
            found[place] = trained(name, methods[name], rate, seed, options.steps, "optim")
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            print(place, found[place], file=sys.stderr, flush=True)
        return dict(found[place])

    print("| optimizer | rates tried (held-out loss) | best | held-out loss, three seeds |\n|---|---|---:|---:|")
    for name, method in methods.items():
        losses = {rate: run(name, rate, SEEDS[0]).get("eval_loss", float("nan")) for rate in method.rates}
        best = min(losses, key=lambda rate: (losses[rate] != losses[rate], losses[rate]))
        three = [run(name, best, seed).get("eval_loss", float("nan")) for seed in SEEDS]
        tried = ", ".join(f"{rate:g} ({loss:.2f})" for rate, loss in losses.items())
        print(f"| {name} | {tried} | {best:g} | {statistics.mean(three):.2f} ({min(three):.2f} to {max(three):.2f}) |",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
