"""The order of chunks beside that of layers: the longest row by simulation, and the time of a step on this CPU.

    python -m benchmarks.chunk_order longest [--models qwen2.5-7b,gemma-3-12b] [--memory 80] [--host 256]
    python -m benchmarks.chunk_order steps [--lengths 8192,16384] [--pairs 5]

``longest`` simulates adapters of rank 16 on bf16 weights by the engine's own code, on a device of ``--memory`` GiB
and a host of ``--host`` GiB, and takes 5% of both away. A model whose weights alone are larger than half the device has
the device's memory besides its weights. ``steps`` compares processor time: each step in the order of chunks stands
between two in the order of layers.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import streamtune
from benchmarks.processor_time import interleaved, row_seconds, small_model, spread
from streamtune import Schedule
from streamtune.models import add_lora
from streamtune.plan.budget import Limits
from streamtune.plan.planner import Plan, evaluate_schedule
from streamtune.plan.rates import data_sheet_rates, nearest_device
from streamtune.plan.simulate import Workload
from streamtune.plan.simulate.memory import model_bytes

GIB = 1 << 30
Line = tuple[float, float]
"""Start and slope."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-7b": (
        "qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "vocab_size": 152064},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
         "sliding_window": 128, "vocab_size": 201088},
    ),
    "gemma-3-12b": (
        "gemma3_text",
        {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024, "vocab_size": 262208},
    ),
    "qwen3-next-80b": (
        "qwen3_next",
        {"hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
         "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 151936},
    ),
}  # fmt: skip
"""Family and shape of each, as its authors publish them."""
AWAY: dict[str, Any] = {"offload": "host", "stream_grads": True, "head_chunk_size": 256}
FORMS: dict[str, dict[str, Any]] = {
    "layer, levels 1": {"order": "layer", "levels": 1, **AWAY},
    "layer, levels 2": {"order": "layer", "levels": 2, **AWAY},
    "chunk, levels 1": {"order": "chunk", "levels": 1, "keep_kv": "host", **AWAY},
    "chunk, levels 1, bf16 sums": {
        "order": "chunk", "levels": 1, "keep_kv": "host", "grad_dtype": "param", **AWAY,
    },
    "chunk, levels 2, bf16 sums": {
        "order": "chunk", "levels": 2, "keep_kv": "host", "grad_dtype": "param", **AWAY,
    },
}  # fmt: skip
CHUNKS = {"layer": (4096,), "chunk, 1": (4096, 2048), "chunk, 2": (8192,)}
"""Chunk sizes to try, by order and levels: in the order of chunks a window or a state is stored once for each chunk."""
PROBES = (1 << 18, 1 << 19)
"""Lengths that are simulated to know the line on which longer ones lie."""


def adapted(name: str, target: list[str]) -> Any:
    """Return a model on ``meta`` with adapters on linear layers of these names, or on all if there are none."""
    family, shape = MODELS[name]
    config = AutoConfig.for_model(family, **shape, max_position_embeddings=1 << 24)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return add_lora(model, r=16, target=target or "all-linear")


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)


def longest(
    name: str, form: dict[str, Any], limits: Limits, sizes: tuple[int, ...], target: list[str]
) -> tuple[int, Plan | None]:
    """Return the longest row, and its plan: predicted by the line through two lengths, and simulated."""
    model = adapted(name, target)
    config = model.get_base_model().config
    if (weights := model_bytes(model)) > limits.device_bytes / 2:
        limits = replace(limits, device_bytes=limits.device_bytes + weights)
    rates = data_sheet_rates(nearest_device(80 * GIB))
    best: tuple[int, Plan | None] = 0, None
    for size in sizes or CHUNKS["layer" if form["order"] == "layer" else f"chunk, {form['levels']}"]:
        plain = Schedule(chunk_size=size, **form)

        def step(length: int, schedule: Schedule) -> Plan:
            workload = Workload(lambda: model, length, make_optimizer=adamw)
            return evaluate_schedule(workload, schedule, limits, rates)

        short, long = (step(length, plain).simulation for length in PROBES)
        # The phase of the peak may change with the length: the forward holds two hidden states of the whole row.
        device = [_line(short.phases[phase], long.phases[phase]) for phase in short.phases]
        host = _line(short.host_bytes, long.host_bytes)
        moves = 2 * config.hidden_size if form["order"] == "layer" else 0  # bytes of a layer input that stays
        counts = range(config.num_hidden_layers if moves else 1)

        def fits(count: int, device: list[Line] = device, host: Line = host, moves: int = moves) -> float:
            on_device = min((limits.device_limit - start) / max(1e-9, slope + count * moves) for start, slope in device)
            return min(on_device, (limits.host_limit - host[0]) / max(1e-9, host[1] - count * moves))

        count = max(counts, key=fits)
        for part in (0.995, 0.98, 0.96, 0.93, 0.9, 0.85):
            length = int(part * fits(count)) // 4096 * 4096
            if length <= 0:  # what one chunk holds is too much
                break
            found = step(length, replace(plain, device_layers=count))
            if found.fits:
                best = max(best, (length, found), key=lambda each: each[0])
                break
    return best


def _line(short: float, long: float) -> Line:
    """Return the line through the bytes at the lengths of ``PROBES``."""
    slope = (long - short) / (PROBES[1] - PROBES[0])
    return short - PROBES[0] * slope, slope


def show_longest(
    names: list[str], memory: int, host: int, forms: list[str], sizes: tuple[int, ...], target: list[str]
) -> None:
    print(
        f"| model | order | longest row | of it, device | host | seconds a step | schedule |\n|{'---|' * 7}", flush=True
    )
    limits = Limits(memory * GIB, host * GIB, 0, 0.05, False)
    for name in names:
        for title in forms:
            length, plan = longest(name, FORMS[title], limits, sizes, target)
            if plan is None:
                print(f"| {name} | {title} | none |", flush=True)
                continue
            took = f"{plan.simulation.peak_bytes / GIB:.1f} GiB", f"{plan.simulation.host_bytes / GIB:.1f} GiB"
            row = (name, title, f"{length:,}", *took, f"{plan.step_seconds:,.0f}", plan.schedule.describe())
            print("| " + " | ".join(row) + " |", flush=True)


SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768,
}  # fmt: skip


def show_steps(lengths: list[int], pairs: int, levels: list[Any]) -> None:
    """Print the ratios of a step in the order of chunks to one in the order of layers."""
    torch.set_num_threads(1)
    plain = Schedule(chunk_size=2048)
    others = {f"chunk, levels {n}": replace(plain, order="chunk", keep_kv="device", levels=n) for n in levels}
    print("| tokens | layer, s | " + " | ".join(others) + f" |\n|{'---|' * (2 + len(others))}")
    models = {}
    for title, schedule in {"layer": plain, **others}.items():
        models[title] = small_model(**SMALL)
        streamtune.stream(models[title], schedule=schedule)
    for length in lengths:
        ids = torch.randint(0, SMALL["vocab_size"], (1, length))
        for model in models.values():
            row_seconds(model, ids[:, :4096])  # warms up
        steps = {title: partial(row_seconds, model, ids) for title, model in models.items()}
        base, found = interleaved(steps.pop("layer"), steps, pairs)
        ratios = (spread(each, 3, 3) for each in found.values())
        print(f"| {length:,} | {statistics.median(base):.1f} | " + " | ".join(ratios) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("longest", "steps"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--memory", type=int, default=80, help="GiB of the device")
    parser.add_argument("--host", type=int, default=256, help="GiB of the host")
    parser.add_argument("--forms", default=";".join(FORMS), help="orders, with ; between them")
    parser.add_argument("--chunk-size", type=int, help="tokens; by default a few are tried")
    parser.add_argument("--target", default="", help="names of the layers with adapters; by default all linear ones")
    parser.add_argument("--lengths", default="8192,16384")
    parser.add_argument("--levels", default="1,2", help="of the steps in the order of chunks")
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    if given.what == "longest":
        sizes = (given.chunk_size,) if given.chunk_size else ()
        target = [name for name in given.target.split(",") if name]
        show_longest(given.models.split(","), given.memory, given.host, given.forms.split(";"), sizes, target)
    else:
        show_steps([int(n) for n in given.lengths.split(",")], given.pairs, [int(n) for n in given.levels.split(",")])


if __name__ == "__main__":
    main()
