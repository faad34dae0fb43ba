"""Short rows: processor time of a step by ``stream(model)`` over that of gradient checkpointing.

    python -m benchmarks.short_rows [--lengths 512,1024,2048,4096] [--pairs 9] [--out docs/benchmarks/short-rows.md]

One thread of one process, so that other processes on the machine count little: processor time, not seconds. A step is
forward and backward of one row of a model with the shape of Qwen3, four layers of 512 channels, in fp32. Each streamed
step stands between two checkpointed ones and is divided by their mean; the median of these ratios is shown. The default
schedule is that of ``stream(model)``; the fixed one is ``Schedule()``, which does not look at the length.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import streamtune
from streamtune import Schedule

CONFIG = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
SCHEDULES: dict[str, Schedule | None] = {"default": None, "fixed": Schedule()}


def make_model() -> PreTrainedModel:
    """Return the model with the same random weights each time."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**CONFIG)).train()


def processor_seconds(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Return the processor time of forward and backward of ``[1, T]`` tokens."""
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.process_time() - start


def ratios(checkpointed: PreTrainedModel, streamed: PreTrainedModel, length: int, pairs: int) -> list[float]:
    """Return the ratio of each streamed step to the mean of the two checkpointed ones around it."""
    ids = torch.randint(0, CONFIG["vocab_size"], (1, length))
    for model in (checkpointed, streamed):
        processor_seconds(model, ids)
    before, found = processor_seconds(checkpointed, ids), []
    for _ in range(pairs):
        ours, after = processor_seconds(streamed, ids), processor_seconds(checkpointed, ids)
        found.append(2 * ours / (before + after))
        before = after
    return found


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens of a row")
    parser.add_argument("--pairs", type=int, default=9, help="streamed steps at each length")
    parser.add_argument("--out", type=Path, help="the page to write; printed in any case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpointed = make_model()
    checkpointed.gradient_checkpointing_enable()
    models = {name: make_model() for name in SCHEDULES}
    for name, schedule in SCHEDULES.items():
        streamtune.stream(models[name], schedule=schedule)
    lines = ["| tokens | " + " | ".join(f"{name}: median (smallest to largest)" for name in SCHEDULES) + " |"]
    lines.append("|---:|" + "---|" * len(SCHEDULES))
    console = Console()
    for length in map(int, options.lengths.split(",")):
        cells = []
        for name in SCHEDULES:
            with console.status(f"{length:,} tokens, {name}"):
                found = ratios(checkpointed, models[name], length, options.pairs)
            cells.append(f"{statistics.median(found):.3f} ({min(found):.2f} to {max(found):.2f})")
        lines.append(f"| {length:,} | " + " | ".join(cells) + " |")
        console.print(lines[-1])
    if options.out is not None:
        options.out.write_text(page("\n".join(lines), options.pairs), encoding="utf-8")


def page(table: str, pairs: int) -> str:
    """Return the page around the table."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"""# Short rows

Processor time of a step by `stream(model)` over that of gradient checkpointing, medians of {pairs} pairs, one thread;
{versions}, {platform.machine()}. `python -m benchmarks.short_rows --out docs/benchmarks/short-rows.md` makes this page.

{table}

*Default* is `stream(model)` with neither a chunk size nor a schedule: a call of at most 4,096 tokens is one chunk that
keeps its attention outputs. *Fixed* is `stream(model, schedule=Schedule())`, chunks of 2,048 tokens that keep nothing.
"""


if __name__ == "__main__":
    main()
