"""Optimizers on the same rows: a small grid of learning rates, then three seeds of the best.

    python -m benchmarks.optimizers FOLDER [--only adamw,lion] [--steps 90] [--jobs 2]

Trains the quickstart's model by ``streamtune sft``, steps of 8 rows, cosine. Rows of the quickstart's data drawn with
another seed are held out, the same for every run; a seed is that of weights and order. Each optimizer is trained with
every rate of its grid and the first seed, and the rate with the lowest held-out loss with two more seeds. Its bytes of
state are those of the last checkpoint; peak bytes are simulated (``streamtune plan``), and processor time is that of
the whole program over AdamW's. FOLDER keeps what is done: a run that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from streamtune.data.reading.builtin import passkey_rows
from streamtune.recipe import load_recipe

SEEDS = (1, 2, 3)
ROWS, HELD_OUT = 720, 60
BASE = Path(__file__).parents[1] / "recipes/quickstart.yaml"


@dataclass(frozen=True)
class Method:
    rates: Sequence[float]
    keys: Mapping[str, Any]


def of(name: str, *rates: float, **args: Any) -> Method:
    return Method(rates, {"optim": name, "optim_args": args})


METHODS: Mapping[str, Method] = {
    "adamw": of("adamw", 1e-3, 3e-3, 1e-2, 3e-2),
    "adamw, moments in bfloat16": Method((1e-3, 3e-3, 1e-2, 3e-2), {"optim_states": "bfloat16"}),
    "adamw_8bit": of("adamw_8bit", 1e-3, 3e-3, 1e-2, 3e-2),
    "adamw_torch_4bit": of("adamw_torch_4bit", 1e-3, 3e-3, 1e-2, 3e-2),
    "adamw_coat": of("adamw_coat", 1e-3, 3e-3, 1e-2, 3e-2),
    "adafactor": of("adafactor", 3e-3, 1e-2, 3e-2, 1e-1),
    "adan": of("adan", 1e-3, 3e-3, 1e-2, 3e-2),
    "adopt": of("adopt", 1e-3, 3e-3, 1e-2, 3e-2),
    "apollo": of("apollo", 1e-3, 3e-3, 1e-2, 3e-2, rank=32, update_proj_gap=20),
    "badam": of("badam", 3e-3, 1e-2, 3e-2, 1e-1, switch_block_every=6, include_embedding=True),
    "badam_ratio": of("badam_ratio", 3e-3, 1e-2, 3e-2, 1e-1, update_ratio=0.25, switch_block_every=6),
    "came": of("came", 3e-4, 1e-3, 3e-3, 1e-2),
    "galore": of("galore", 1e-3, 3e-3, 1e-2, 3e-2, rank=32, update_proj_gap=20, scale=1.0),
    "galore, randomized": of(
        "galore", 1e-3, 3e-3, 1e-2, 3e-2, rank=32, update_proj_gap=20, scale=1.0, projection="randomized"
    ),
    "galore, dct": of("galore", 1e-3, 3e-3, 1e-2, 3e-2, rank=32, update_proj_gap=20, scale=1.0, projection="dct"),
    "galore, both sides": of(
        "galore", 1e-3, 3e-3, 1e-2, 3e-2, rank=32, update_proj_gap=20, scale=1.0, proj_type="full"
    ),
    "lamb": of("lamb", 3e-3, 1e-2, 3e-2, 1e-1),
    "lion": of("lion", 3e-4, 1e-3, 3e-3, 1e-2),
    "mezo": of("mezo", 1e-4, 3e-4, 1e-3, 3e-3, n=4),
    "muon": of("muon", 1e-3, 3e-3, 1e-2, 3e-2),
    "natural_galore": of(
        "natural_galore", 1e-3, 3e-3, 1e-2, 3e-2, rank=32, update_proj_gap=20, scale=1.0, history=8, damping=1.0
    ),
    "schedule_free": Method((3e-3, 1e-2, 3e-2, 1e-1), {"optim": "schedule_free", "lr_scheduler_type": "constant"}),
    "sgd": of("sgd", 3e-2, 1e-1, 3e-1, 1.0),
    "sinkgd": of("sinkgd", 1e-3, 3e-3, 1e-2, 3e-2),
}


def write_data(folder: Path) -> None:
    for name, count, seed in (("rows", ROWS, 0), ("held_out", HELD_OUT, 7)):
        rows = [json.dumps(row.columns) for row in passkey_rows(max_rows=5 * count, seed=seed)]
        kept = rows[::5]  # as many of each length
        (folder / f"{name}.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")


def write_recipe(folder: Path, method: Method, rate: float, seed: int, steps: int, out: Path) -> Path:
    found = load_recipe(BASE).recipe.model_dump(mode="json", exclude_defaults=True)
    for key in ("val_size", "sample", "adam_beta2", "num_train_epochs", "shuffle"):
        found.pop(key, None)
    found |= {
        "datasets": [str(folder / "rows.jsonl")],
        "eval_datasets": {"others": str(folder / "held_out.jsonl")},
        "max_length": 2048,
        "overlength": "drop",
        "max_steps": steps,
        "eval_steps": steps,
        "save_total_limit": 1,
        "lr_scheduler_type": "cosine",
        "learning_rate": rate,
        "seed": seed,
        "output_dir": str(out),
        **{key: value for key, value in method.keys.items() if value},
    }
    path = out.parent / f"{out.name}.yaml"
    path.write_text(json.dumps(found), encoding="utf-8")  # JSON is YAML
    return path


def command(*arguments: str) -> tuple[str, float]:
    """Run ``streamtune`` and return what it prints, and its processor time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "streamtune", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert done.stdout is not None
    assert done.stderr is not None
    said = done.stdout.read()
    wrong = done.stderr.read()
    _, status, usage = os.wait4(done.pid, 0)
    if status:
        raise RuntimeError(wrong[-2000:])
    return said, usage.ru_utime + usage.ru_stime


def run(folder: Path, name: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Train once, or return what was found before: held-out loss, bytes of state, processor time."""
    out = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{rate:g}-{seed}"
    kept = folder / f"{out.name}.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    recipe = write_recipe(folder, METHODS[name], rate, seed, steps, out)
    _, seconds = command("sft", str(recipe), "--resume", "never")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    state = 0
    for path in (out / "checkpoints").glob("*/optimizer-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            state += sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    found = {
        "loss": next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line),
        "seconds": seconds,
        "state": state,
    }
    kept.write_text(json.dumps(found))
    return found


def row(folder: Path, name: str, steps: int, jobs: ThreadPoolExecutor) -> dict[str, Any]:
    """Return the figures of an optimizer: the losses of its grid, and the runs with the best rate."""
    rates = METHODS[name].rates
    tried = dict(zip(rates, jobs.map(lambda rate: run(folder, name, rate, SEEDS[0], steps), rates), strict=True))
    best = min(tried, key=lambda rate: tried[rate]["loss"])
    recipe = write_recipe(folder, METHODS[name], best, SEEDS[0], steps, folder / "plan")
    return {
        "peak": json.loads(command("plan", str(recipe), "--length", "2048", "--json")[0])["peak_bytes"],
        "tried": {rate: each["loss"] for rate, each in tried.items()},
        "best": best,
        "runs": list(jobs.map(lambda seed: run(folder, name, best, seed, steps), SEEDS)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(name for name in METHODS if "," not in name))
    parser.add_argument("--all", action="store_true", help="variants too")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_data(options.folder)
    names = list(METHODS) if options.all else options.only.split(",")
    print("| optimizer | rates tried: held-out loss | rate | three seeds | state, KiB | peak, MiB | time |\n"
          "|---|---|---:|---|---:|---:|---:|", flush=True)  # fmt: skip
    with ThreadPoolExecutor(options.jobs) as jobs:
        base = statistics.median(each["seconds"] for each in row(options.folder, "adamw", options.steps, jobs)["runs"])
        for name in names:
            found = row(options.folder, name, options.steps, jobs)
            losses = [each["loss"] for each in found["runs"]]
            tried = ", ".join(f"{rate:g}: {loss:.2f}" for rate, loss in found["tried"].items())
            took = statistics.median(each["seconds"] for each in found["runs"]) / base
            last = found["runs"][0]
            print(
                f"| {name} | {tried} | {found['best']:g} | {statistics.mean(losses):.3f} ({min(losses):.3f} to "
                f"{max(losses):.3f}) | {last['state'] / 1024:,.0f} | {found['peak'] / 2**20:.1f} | {took:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
