"""Kinds of adapters: held-out loss after equal tokens, memory and time of a step.

    python -m benchmarks.adapters loss BASE [--kinds lora,dora] [--seeds 3] [--steps 30]
    python -m benchmarks.adapters cost [--kinds lora,dora] [--pairs 3]
    python -m benchmarks.adapters loftq BASE

``loss`` trains adapters on BASE, the model of the quickstart, with its data, by ``streamtune sft``: the same rows for
every kind with a seed, and a small grid of learning rates with every seed. ``cost`` simulates a step of Qwen3-8B in
bf16 (32,768 tokens, chunks of 4,096) with its optimizer, and measures the processor time of forward and backward of a
small model on this CPU, each step between two steps with LoRA. ``loftq`` compares quantised weights with adapters at
their start with the weights of BASE, and the logits of 1,024 random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import streamtune
from benchmarks.chunk_order import GIB, SMALL, adamw
from benchmarks.predicted import qwen3_8b
from benchmarks.processor_time import interleaved, spread
from streamtune import Schedule
from streamtune.base.adapters import ADAPTERS
from streamtune.cli import main as command
from streamtune.models import AdapterSpec, ModelOptions, add_adapters, load_model, make_loftq_quantizer
from streamtune.models.adapters.targets import lora_layers
from streamtune.models.quantize import dequantize_weight
from streamtune.plan.simulate import Workload, simulate

USUAL = (3e-4, 1e-3, 3e-3, 1e-2)
"""Default grid of learning rates."""
RATES = {
    "vera": (3e-2, 1e-1, 3e-1),
    "ia3": (3e-3, 1e-2, 3e-2, 1e-1),
    "loha": (3e-3, 1e-2, 3e-2),
    "lokr": (3e-3, 1e-2, 3e-2),
    "lora_ga": (1e-4, 3e-4, 1e-3, 3e-3),
    "paca": (1e-3, 3e-3, 1e-2, 3e-2),
}
"""Learning rates of other kinds."""


def recipe(base: str, kind: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    return {
        "model_name_or_path": base,
        "datasets": [{"path": "demo-passkey", "max_rows": 800}],
        "max_length": 512,
        "overlength": "drop",
        "val_size": 24,
        "train_on": "assistant",
        "engine": {"schedule": "fixed", "chunk_size": 128},
        "finetuning_type": "lora",
        "adapter_type": kind,
        "per_device_train_batch_size": 4,
        "max_steps": steps,
        "eval_steps": steps,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "seed": seed,
    }


def trained(base: str, kind: str, rate: float, seed: int, steps: int, folder: Path) -> float:
    """Return the held-out loss at the end of a run; a finished run in the folder is reused."""
    out, path = folder / f"{kind}-{rate:g}-{seed}", folder / "adapters.yaml"
    if not (out / "final").exists():
        path.write_text(yaml.safe_dump(recipe(base, kind, rate, seed, steps)), encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            command(["sft", str(path), "--output-dir", str(out), "--resume", "never"])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return float([line["eval_loss"] for line in lines if "eval_loss" in line][-1])


def show_losses(base: str, kinds: list[str], seeds: int, steps: int, folder: Path) -> None:
    """Print a table of held-out losses: the mean over the seeds for each rate, and each seed with the best rate."""
    print("| kind | rates tried: mean loss | best | of the seeds |\n|---|---|---:|---|", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        tried = {
            rate: [trained(base, kind, rate, seed, steps, folder) for seed in range(seeds)]
            for rate in RATES.get(kind, USUAL)
        }
        best = min(tried, key=lambda rate: statistics.mean(tried[rate]))
        grid = ", ".join(f"{rate:g}: {statistics.mean(losses):.3f}" for rate, losses in tried.items())
        shown = ", ".join(f"{loss:.3f}" for loss in tried[best])
        print(f"| `{kind}` | {grid} | {best:g} | {shown} |", flush=True)


def small(kind: str) -> Any:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SMALL))
    model = add_adapters(base, AdapterSpec(kind=kind)).train()
    streamtune.stream(model, schedule=Schedule(chunk_size=512))
    return model


def seconds(model: Any, ids: torch.Tensor) -> float:
    start = time.process_time()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.process_time() - start


def peak(kind: str) -> tuple[int, float]:
    """Return the number of trained parameters of Qwen3-8B with adapters of a kind, and the simulated peak in GiB."""
    with torch.device("meta"):
        model = add_adapters(qwen3_8b(), AdapterSpec(kind=kind))
    found = simulate(Workload(lambda: model, 32768, make_optimizer=adamw), Schedule(chunk_size=4096))
    return sum(x.numel() for x in model.parameters() if x.requires_grad), found.peak_bytes / GIB


def show_costs(kinds: list[str], pairs: int) -> None:
    torch.set_num_threads(1)
    print("| kind | trained parameters | peak, GiB | time of a step, LoRA is 1 |\n|---|---:|---:|---|", flush=True)
    ids = torch.randint(0, SMALL["vocab_size"], (1, 2048))
    lora = small("lora")
    for kind in kinds:
        count, memory = peak(kind)
        model = small(kind)
        seconds(model, ids)
        _, ratios = interleaved(partial(seconds, lora, ids), {kind: partial(seconds, model, ids)}, pairs)
        print(f"| `{kind}` | {count:,} | {memory:.1f} | {spread(ratios[kind])} |", flush=True)


@torch.no_grad()
def show_starts(base: str) -> None:
    """Print a table of the distances of quantised models from the model, with adapters at their start."""
    plain = load_model(base)
    weights = dict(plain.named_parameters())
    ids = torch.randint(0, plain.config.vocab_size, (4, 256), generator=torch.Generator().manual_seed(0))
    want = plain(input_ids=ids).logits
    print("| base | rank | loftq_iter | weights | logits |\n|---|---:|---:|---:|---:|", flush=True)
    for kind in ("nf4", "int8"):
        for rank, iterations in ((16, 0), (16, 1), (16, 2), (16, 5), (64, 1), (64, 5)):
            spec = AdapterSpec(kind="loftq" if iterations else "lora", r=rank)
            change = make_loftq_quantizer(spec, iterations=iterations, seed=0) if iterations else None
            model = add_adapters(load_model(base, ModelOptions(quantization=kind, layer_quantizer=change)), spec)
            error = size = 0.0
            for name, layer in lora_layers(model):
                weight = weights[f"{name}.weight"]
                added = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
                error += float((weight - dequantize_weight(layer.get_base_layer().weight) - added).square().sum())
                size += float(weight.square().sum())
            off = float((model(input_ids=ids).logits - want).norm() / want.norm())
            named = (kind, rank, iterations) if iterations else (kind, "", "")
            print(f"| {' | '.join(map(str, named))} | {(error / size) ** 0.5:.4f} | {off:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loss", "cost", "loftq"))
    parser.add_argument("base", nargs="?", default="runs/quickstart/final")
    parser.add_argument(
        "--kinds", default=",".join(name for name, kind in ADAPTERS.items() if kind.start != "quantisation")
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/adapters"))
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if given.what == "loss":
        show_losses(given.base, kinds, given.seeds, given.steps, given.folder)
    elif given.what == "loftq":
        show_starts(given.base)
    else:
        show_costs(kinds, given.pairs)


if __name__ == "__main__":
    main()
