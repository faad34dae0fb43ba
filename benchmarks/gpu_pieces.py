"""The pieces of ``benchmarks.gpu`` that have their own process: steps, longest rows, a whole model.

    python -m benchmarks.gpu_pieces step [--layers 8] [--lengths 16384,65536] [--profile] [--json FILE]
    python -m benchmarks.gpu_pieces longest [--seconds 180] --json FILE
    python -m benchmarks.gpu_pieces whole [RECIPE] [--set KEY=VALUE]... --length 131072 [--short 4096] --json FILE

``step``: gradient checkpointing and streaming, in seconds, peak memory and kernels. The model has the layers of
Qwen3-8B, fewer of them, with random weights in bf16, made on the device. A step is forward and backward of one row into
existing gradients, as with accumulation, without an optimizer.

``longest``: the longest row of each mode, with the same model. Each mode doubles the length until a row does not fit,
then tries three quarters of that. All modes share the seconds: a row that is expected to take longer than what is left
is not tried, and the figures say so.

``whole``: a training step of a whole model by its plan, predicted and measured. The recipe is
``recipes/qwen3-8b-long.yaml``, planned for the free memory; weights are drawn on the device. The step is the training
loop's, on random tokens: objective, clipping and optimizer. A step of few tokens comes first, which tries kernels and
makes the optimizer's states.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import streamtune
from benchmarks.gpu import GIB, LARGE
from streamtune import Schedule
from streamtune.cli.machine import use_expandable_segments
from streamtune.engine.memory.host import total_host_bytes
from streamtune.plan.simulate import Mode
from streamtune.programs.bench.modes import MODE_SETUPS, Ready, why_modes_unavailable
from streamtune.programs.probe.recipe_trials import run_optimizer_step
from streamtune.recipe import load_recipe
from streamtune.run.device import prepare_libraries, stream_model
from streamtune.run.model import make_model_without_data, train_largest_block
from streamtune.run.plan import LongestStep, plan_model
from streamtune.run.ranks import local_optimizer
from streamtune.tasks import task_of
from streamtune.tasks.task import TrialStep

# --- a step -----------------------------------------------------------------------------------------------------------


SCHEDULES = {
    "stream, chunks of 2,048": Schedule(chunk_size=2048, head_chunk_size=1024),
    "stream, chunks of 2,048, attention kept": Schedule(chunk_size=2048, head_chunk_size=1024, keep_attention="device"),
    "stream, chunks of 8,192": Schedule(chunk_size=8192, head_chunk_size=2048),
    "stream, chunks of 8,192, attention kept": Schedule(chunk_size=8192, head_chunk_size=2048, keep_attention="device"),
    "stream, chunks of 8,192, inputs on host": Schedule(chunk_size=8192, head_chunk_size=2048, offload="host"),
}


def make_model(layers: int) -> PreTrainedModel:
    """Return the model, with a gradient of zeros for every parameter."""
    config = AutoConfig.for_model("qwen3", **{**LARGE, "num_hidden_layers": layers}, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    complete_gradients(model)
    return model


def complete_gradients(model: PreTrainedModel) -> None:
    """Add a gradient of zeros where there is none, as after a backward that ended early."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def forward_backward(model: PreTrainedModel, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def measure_step(model: PreTrainedModel, ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Return median seconds of a step, peak bytes of the allocator and the loss; or ``error`` if out of memory."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        forward_backward(model, ids)  # the first compares and times kernels
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = forward_backward(model, ids)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    peak = torch.cuda.max_memory_allocated()
    return {"seconds": statistics.median(seconds), "fastest": min(seconds), "peak_bytes": peak, "loss": loss}


def profile_step(model: PreTrainedModel, ids: torch.Tensor, rows: int = 16) -> dict[str, Any]:
    """Return device time and launches of one step, and its slowest kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        forward_backward(model, ids)
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


def steps(options: argparse.Namespace) -> None:
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
        ids = torch.randint(0, LARGE["vocab_size"], (1, length), device="cuda")
        base = None
        for name in ("checkpoint", *SCHEDULES):
            if name == "checkpoint":
                model.gradient_checkpointing_enable({"use_reentrant": False})
                found = measure_step(model, ids, options.repeats)
                model.gradient_checkpointing_disable()
                base = found.get("seconds")
            else:
                with streamtune.stream(model, schedule=SCHEDULES[name]):
                    found = measure_step(model, ids, options.repeats)
                    if options.profile and length == lengths[0] and "host" not in name:
                        found["profile"] = profile_step(model, ids)
            document["rows"].append({"mode": name, "length": length, **found})
            if options.json:  # after each row, in case the process is ended
                options.json.write_text(json.dumps(document, indent=1) + "\n")
            if "error" in found:
                print(f"{length:>8,}  {name:<42} {found['error']}", flush=True)
                complete_gradients(model)
                continue
            ratio = f"{found['seconds'] / base:.2f}x" if base else ""
            peak = found["peak_bytes"] / GIB
            print(f"{length:>8,}  {name:<42} {found['seconds']:7.3f} s {ratio:>6} {peak:7.2f} GiB", flush=True)


# --- the longest rows -------------------------------------------------------------------------------------------------


MODES = "stream,checkpoint,liger,deepspeed-tiled,trl,checkpoint-offload,plain"
LONGEST_SCHEDULE = Schedule(chunk_size=8192, head_chunk_size=2048, offload="host")
FIRST, MOST = 16384, 262_144
"""Tokens of the first row, and of the longest to try."""
GROWTH = 4.0
"""Most seconds of a row relative to a row half as long: attention's."""


def search(step: Callable[[int], str], left: Callable[[], float]) -> dict[str, Any]:
    """Find the longest row of a mode.

    Args:
        step: Runs a step of a number of tokens; returns why it failed, or an empty text.
        left: Returns the seconds left.

    Returns:
        ``fits``, the longest row, and ``stopped``, why no longer one was tried.
    """
    fits, length, seconds = 0, FIRST, 0.0
    while length <= MOST:
        if fits and GROWTH * seconds > left():
            return {"fits": fits, "stopped": f"{length:,} was not tried: too little time"}
        start = time.monotonic()
        if why := step(length):
            between = length * 3 // 4
            if fits and not (2 * seconds > left()) and not step(between):
                fits = between
            return {"fits": fits, "stopped": f"{length:,}: {why}"}
        seconds = time.monotonic() - start
        fits, length = length, 2 * length
    return {"fits": fits, "stopped": f"none above {MOST:,} was tried"}


def longest(model: Any, mode: Mode, left: Callable[[], float]) -> dict[str, Any]:
    """Return the longest row of a mode, the peak of its step, and the seconds of each (``step_seconds``)."""
    try:
        with MODE_SETUPS[mode].prepare(model, LONGEST_SCHEDULE) as ready:  # once: what it keeps between steps stays
            return {"mode": mode, **_longest(model, ready, left)}
    except Exception as error:  # a peer may not know this model or these versions
        return {"mode": mode, "fits": 0, "stopped": _first_line(error), "peak_bytes": None, "step_seconds": {}}


def _longest(model: Any, ready: Ready, left: Callable[[], float]) -> dict[str, Any]:
    peaks: dict[int, int] = {}
    seconds: dict[int, float] = {}

    def step(length: int) -> str:
        gc.collect()
        complete_gradients(model)
        torch.cuda.empty_cache()
        ids = torch.randint(0, LARGE["vocab_size"], (1, length), device="cuda")
        try:
            for _ in range(2):  # the first tries kernels and allocates
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                start = time.monotonic()
                ready.loss({"input_ids": ids}).backward()
                torch.cuda.synchronize()
                seconds[length] = time.monotonic() - start
                if GROWTH * seconds[length] > left():
                    break
        except torch.OutOfMemoryError:
            seconds.pop(length, None)
            return "out of memory"
        except Exception as error:
            return _first_line(error)
        peaks[length] = torch.cuda.max_memory_allocated()
        return ""

    found = search(step, left)
    return {**found, "peak_bytes": peaks.get(found["fits"]), "step_seconds": seconds}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def measure_longest(model: Any, modes: Sequence[Mode], seconds: float, path: Path) -> None:
    """Measure the modes one after the other, each with an equal share of the time left; write after each."""
    end = time.monotonic() + seconds
    missing = why_modes_unavailable(modes, "cuda")
    here = [mode for mode in modes if mode not in missing]
    document: dict[str, Any] = {"absent": missing, "rows": []}
    for number, mode in enumerate(here):
        share = time.monotonic() + (end - time.monotonic()) / (len(here) - number)
        document["rows"].append(longest(model, mode, lambda share=share: share - time.monotonic()))  # type: ignore[misc]
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


# --- a whole model ----------------------------------------------------------------------------------------------------


RECIPE = Path(__file__).parents[1] / "recipes" / "qwen3-8b-long.yaml"


def measure_whole(recipe: Any, length: int, short: int, repeats: int) -> dict[str, Any]:
    """Plan, build and step; return predicted and measured figures."""
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_libraries(device)
    task = task_of(recipe)
    start = time.monotonic()
    with device:
        model = make_model_without_data(recipe, device)
    built = time.monotonic()
    plan = plan_model(recipe, model, LongestStep(length), device)
    planned = time.monotonic()
    handle = stream_model(recipe, model, plan.schedule)
    train_largest_block(recipe, model)
    optimizer = local_optimizer(recipe, model)
    trial = TrialStep(
        model=model, handle=handle, scorer=handle, reference=None, length=length, batch_size=1, share=False
    )
    handle.tiers.reserve(plan.simulation.streamed_host_bytes, device)  # as before a run's first step
    reserved = time.monotonic()
    first = replace(trial, length=short)
    run_optimizer_step(recipe, first, optimizer, task.make_random_step(first))
    torch.cuda.synchronize()
    ready = time.monotonic()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds, norms = [], []
    for _ in range(repeats):
        begun = time.monotonic()
        norms.append(run_optimizer_step(recipe, trial, optimizer, task.make_random_step(trial)))
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


def whole(options: argparse.Namespace) -> None:
    recipe = load_recipe(options.recipe, overrides=options.set).recipe
    found = {
        "device": torch.cuda.get_device_name(),
        "host_bytes_of_machine": total_host_bytes(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "recipe": options.recipe.name,
        "set": options.set,
        **measure_whole(recipe, options.length, options.short, options.repeats),
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    step, peak = min(found["step_seconds"]), found["peak_bytes"] / GIB
    print(
        f"{options.length:,} tokens: {step:.1f} s a step ({found['predicted_seconds']:.1f} planned), "
        f"{peak:.1f} GiB ({found['simulated_bytes'] / GIB:.1f} planned), host {found['host_bytes'] / GIB:.1f} GiB "
        f"({found['simulated_host_bytes'] / GIB:.1f} planned)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    step = commands.add_parser("step")
    step.add_argument("--lengths", default="16384,65536", help="tokens of the row")
    step.add_argument("--repeats", type=int, default=3, help="timed steps of each")
    step.add_argument("--profile", action="store_true", help="list the kernels of a step at the first length")
    rows = commands.add_parser("longest")
    rows.add_argument("--modes", default=MODES, help="modes of streamtune bench")
    rows.add_argument("--seconds", type=float, default=180, help="of all modes together")
    for command in (step, rows):
        command.add_argument("--layers", type=int, default=8, help="decoder layers; Qwen3-8B has 36")
    model = commands.add_parser("whole")
    model.add_argument("recipe", nargs="?", type=Path, default=RECIPE)
    model.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    model.add_argument("--length", type=int, default=131_072, help="tokens of the row")
    model.add_argument("--short", type=int, default=4096, help="tokens of the step before")
    model.add_argument("--repeats", type=int, default=1, help="timed steps")
    for command in (step, rows, model):
        command.add_argument("--json", type=Path, required=command is not step, help="write the figures to this file")
    options = parser.parse_args()
    if options.what == "whole":
        use_expandable_segments()  # as the command line does, before the device is used
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.what == "longest":
        gpu_model = make_model(options.layers)
        forward_backward(gpu_model, torch.zeros(1, 128, dtype=torch.long, device="cuda"))
        measure_longest(gpu_model, cast(Any, options.modes.split(",")), options.seconds, options.json)
    else:
        (steps if options.what == "step" else whole)(options)


if __name__ == "__main__":
    main()
