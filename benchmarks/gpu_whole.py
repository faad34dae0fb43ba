"""A whole training step of a whole model on a GPU, by the plan for its length: seconds and bytes, told and measured.

    python -m benchmarks.gpu_whole [RECIPE] [--set KEY=VALUE]... --length 131072 [--short 4096] --json FILE

The recipe is ``recipes/qwen3-8b-long.yaml``, planned for the memory that is free. Its weights are drawn on the device,
which takes a second where the CPU takes minutes; the step is the training loop's, on random tokens: objective,
clipping and optimizer. A step of few tokens comes before, which tries kernels and makes the optimizer's states.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from streamtune.cli.machine import grow_segments
from streamtune.engine.memory.host import total_host_bytes
from streamtune.programs.probe.prepare import take_step
from streamtune.recipe import load_recipe
from streamtune.run.device import prepare_libraries, stream_model
from streamtune.run.model import make_model_alone, train_largest
from streamtune.run.plan import LongestStep, plan_model
from streamtune.run.ranks import local_optimizer
from streamtune.tasks import task_of
from streamtune.tasks.task import TrialStep

GIB = 1024**3
RECIPE = Path(__file__).parents[1] / "recipes" / "qwen3-8b-long.yaml"


def measure(recipe: Any, length: int, short: int, repeats: int) -> dict[str, Any]:
    """Plan, build and step; return what was planned and what was measured."""
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_libraries(device)
    task = task_of(recipe)
    start = time.monotonic()
    with device:
        model = make_model_alone(recipe, device)
    built = time.monotonic()
    plan = plan_model(recipe, model, LongestStep(length), device)
    planned = time.monotonic()
    handle = stream_model(recipe, model, plan.schedule)
    train_largest(recipe, model)
    optimizer = local_optimizer(recipe, model)
    trial = TrialStep(
        model=model, handle=handle, scorer=handle, reference=None, length=length, batch_size=1, share=False
    )
    handle.tiers.reserve(plan.simulation.streamed_host_bytes, device)  # as before a run's first step
    reserved = time.monotonic()
    first = replace(trial, length=short)
    take_step(recipe, first, optimizer, task.random_step(first))
    torch.cuda.synchronize()
    ready = time.monotonic()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds, norms = [], []
    for _ in range(repeats):
        begun = time.monotonic()
        norms.append(take_step(recipe, trial, optimizer, task.random_step(trial)))
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - begun)
    held = handle.tiers.host.peak_bytes
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "length": length,
        "step_seconds": seconds,
        "gradient_norms": norms,
        "predicted_seconds": plan.step_seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "simulated_bytes": plan.simulation.peak_bytes,
        "host_bytes": held,
        "simulated_host_bytes": plan.simulation.host_bytes,
        "flops": plan.flops,
        "build_seconds": built - start,
        "plan_seconds": planned - built,
        "reserve_seconds": reserved - planned,
        "first_step_seconds": ready - reserved,
        "plan": plan.to_json(),
    }


def main() -> None:
    """Measure a step and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_whole")
    parser.add_argument("recipe", nargs="?", type=Path, default=RECIPE)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    parser.add_argument("--length", type=int, default=131_072, help="tokens of the row")
    parser.add_argument("--short", type=int, default=4096, help="tokens of the step before")
    parser.add_argument("--repeats", type=int, default=1, help="timed steps")
    parser.add_argument("--json", type=Path, required=True, help="write the figures to this file")
    options = parser.parse_args()
    grow_segments()  # as the command line does, before the device is used
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    recipe = load_recipe(options.recipe, overrides=options.set).recipe
    found = {
        "device": torch.cuda.get_device_name(),
        "host_bytes_of_machine": total_host_bytes(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "recipe": options.recipe.name,
        "set": options.set,
        **measure(recipe, options.length, options.short, options.repeats),
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    step, peak = min(found["step_seconds"]), found["peak_bytes"] / GIB
    print(
        f"{options.length:,} tokens: {step:.1f} s a step ({found['predicted_seconds']:.1f} planned), "
        f"{peak:.1f} GiB ({found['simulated_bytes'] / GIB:.1f} planned), host {found['host_bytes'] / GIB:.1f} GiB "
        f"({found['simulated_host_bytes'] / GIB:.1f} planned)"
    )


if __name__ == "__main__":
    main()
