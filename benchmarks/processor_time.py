"""Processor time of a step on this CPU, relative to another step; short rows and trained blocks.

    python -m benchmarks.processor_time short-rows [--lengths 512,1024,2048,4096] [--pairs 9] [--out FILE]
    python -m benchmarks.processor_time blocks [--layers 36] [--length 2048] [--pairs 5]
    python -m benchmarks.processor_time frozen [--layers 36] [--trained 8] [--length 2048] [--pairs 5]

Processor time of one thread, so that other processes on the machine count little. Each step stands between two others
and is divided by their mean; the median of these ratios is shown.

``short-rows`` compares ``stream(model)`` with gradient checkpointing: forward and backward of one row of a model with
the shape of Qwen3, four layers of 512 channels, in fp32. The default schedule is the one of ``stream(model)``; the
fixed one is ``Schedule()``, which does not look at the length.

``blocks`` compares the backward of one trained layer with the backward of all weights. The forward is a ratio too:
inputs of frozen layers below the trained one are not stored.

``frozen`` compares a whole step (forward, backward and AdamW) that trains only the last layers, as with
``trainable_layers: last 8``, with a step that trains all weights.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

import streamtune
from streamtune import Schedule

SHORT_ROWS = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
SCHEDULES: dict[str, Schedule | None] = {"default": None, "fixed": Schedule()}
BLOCKS = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768,
}  # fmt: skip


def small_model(**shape: Any) -> Any:
    """Return a Qwen3 model with the same random weights each time."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**shape)).train()


def row_seconds(model: Any, ids: torch.Tensor) -> float:
    """Return the processor time of forward and backward of ``[1, T]`` tokens."""
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return time.process_time() - start


def interleaved(
    base: Callable[[], float], others: Mapping[str, Callable[[], float]], pairs: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Measure each step between two base steps.

    Args:
        base: Runs the base step and returns its seconds.
        others: The same for other steps, by name.
        pairs: Measurements of each of the others.

    Returns:
        Seconds of the base, and for each other step its ratios to the mean of the two base steps around it.
    """
    seconds, ratios = [base()], {name: list[float]() for name in others}
    for _ in range(pairs):
        for name, step in others.items():
            own = step()
            seconds.append(base())
            ratios[name].append(2 * own / (seconds[-1] + seconds[-2]))
    return seconds, ratios


def spread(ratios: Sequence[float], digits: int = 2, ends: int = 2) -> str:
    """Return the median, the smallest and the largest: ``0.98 (0.95 to 1.02)``; a single ratio alone."""
    if len(ratios) == 1:
        return f"{ratios[0]:.{digits}f}"
    return f"{statistics.median(ratios):.{digits}f} ({min(ratios):.{ends}f} to {max(ratios):.{ends}f})"


# --- short rows -------------------------------------------------------------------------------------------------------


def short_rows(lengths: Sequence[int], pairs: int, out: Path | None) -> None:
    checkpointed = small_model(**SHORT_ROWS)
    checkpointed.gradient_checkpointing_enable()
    models = {name: small_model(**SHORT_ROWS) for name in SCHEDULES}
    for name, schedule in SCHEDULES.items():
        streamtune.stream(models[name], schedule=schedule)
    lines = ["| tokens | " + " | ".join(f"{name}: median (smallest to largest)" for name in SCHEDULES) + " |"]
    lines.append("|---:|" + "---|" * len(SCHEDULES))
    console = Console()
    for length in lengths:
        ids = torch.randint(0, SHORT_ROWS["vocab_size"], (1, length))
        cells = []
        for name, model in models.items():
            with console.status(f"{length:,} tokens, {name}"):
                for warm_up in (checkpointed, model):
                    row_seconds(warm_up, ids)
                step = {name: partial(row_seconds, model, ids)}
                _, found = interleaved(partial(row_seconds, checkpointed, ids), step, pairs)
            cells.append(spread(found[name], digits=3))
        lines.append(f"| {length:,} | " + " | ".join(cells) + " |")
        console.print(lines[-1])
    if out is not None:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
        out.write_text(PAGE.format(pairs=pairs, versions=versions, table="\n".join(lines)), encoding="utf-8")


PAGE = """# Short rows: streaming relative to gradient checkpointing

The table shows the processor time of forward and backward of a streamed model on one short row, relative to gradient
checkpointing. By default, streaming takes no more time than gradient checkpointing.

Each figure is the median of {pairs} measurements (smallest to largest), on one thread. Versions: {versions}. Command:
`python -m benchmarks.processor_time short-rows --out docs/benchmarks/short-rows.md`.

{table}

- *Default* is `stream(model)` without a chunk size or a schedule. A call of at most 4,096 tokens is then one chunk, and
  its attention outputs are kept.
- *Fixed* is `stream(model, schedule=Schedule())`: chunks of 2,048 tokens, and nothing is kept.
"""


# --- blocks -----------------------------------------------------------------------------------------------------------


def block_seconds(model: Any, ids: torch.Tensor, layer: int | None) -> tuple[float, float]:
    """Return the processor time of forward and backward with one layer trained; with all weights for None."""
    model.requires_grad_(layer is None)
    if layer is not None:
        model.model.layers[layer].requires_grad_(True)
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    between = time.process_time()
    loss.backward()
    return between - start, time.process_time() - between


def blocks(layers: int, length: int, pairs: int) -> None:
    model = small_model(**BLOCKS, num_hidden_layers=layers)
    streamtune.stream(model, schedule=Schedule(chunk_size=length // 8))
    ids = torch.randint(0, BLOCKS["vocab_size"], (1, length))
    block_seconds(model, ids, None)  # warms up
    whole = [block_seconds(model, ids, None)]
    found: dict[int, list[tuple[float, float]]] = {layer: [] for layer in (0, layers // 3, 2 * layers // 3, layers - 1)}
    for _ in range(pairs):
        for layer, ratios in found.items():
            took = block_seconds(model, ids, layer)
            whole.append(block_seconds(model, ids, None))
            means = [(a + b) / 2 for a, b in zip(whole[-1], whole[-2], strict=True)]
            ratios.append((took[0] / means[0], took[1] / means[1]))
    forward, backward = (statistics.median(each) for each in zip(*whole, strict=True))
    print(f"{layers} layers, {length:,} tokens; all weights: forward {forward:.2f} s, backward {backward:.2f} s")
    print("| trained layer | forward | backward |\n|---:|---:|---:|")
    for layer, ratios in found.items():
        print(f"| {layer} | " + " | ".join(spread(each) for each in zip(*ratios, strict=True)) + " |")


# --- frozen parts -----------------------------------------------------------------------------------------------------


def frozen(layers: int, trained: int, length: int, pairs: int) -> None:
    model = small_model(**BLOCKS, num_hidden_layers=layers)
    last = {p for layer in model.model.layers[-trained:] for p in layer.parameters()}
    streamtune.stream(model, schedule=Schedule(chunk_size=length // 8))
    ids = torch.randint(0, BLOCKS["vocab_size"], (1, length))
    optimizers = {part: torch.optim.AdamW([p for p in model.parameters() if not part or p in last], lr=1e-5)
                  for part in (False, True)}  # fmt: skip

    def step_seconds(part: bool) -> float:
        for parameter in model.parameters():
            parameter.requires_grad_(not part or parameter in last)
        model.zero_grad(set_to_none=True)
        start = time.process_time()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizers[part].step()
        return time.process_time() - start

    step_seconds(False), step_seconds(True)  # warms up, and allocates the moments
    whole, ratios = [step_seconds(False)], list[float]()
    for _ in range(pairs):
        took = step_seconds(True)
        whole.append(step_seconds(False))
        ratios.append(2 * took / (whole[-1] + whole[-2]))
    print(f"{layers} layers, {length:,} tokens; all weights: {statistics.median(whole):.2f} s")
    print(f"the last {trained} layers: {spread(ratios)} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    rows = commands.add_parser("short-rows")
    rows.add_argument("--lengths", default="512,1024,2048,4096", help="tokens of a row")
    rows.add_argument("--pairs", type=int, default=9, help="streamed steps at each length")
    rows.add_argument("--out", type=Path, help="the page to write; printed in any case")
    trained = commands.add_parser("blocks")
    trained.add_argument("--layers", type=int, default=36)
    trained.add_argument("--length", type=int, default=2048)
    trained.add_argument("--pairs", type=int, default=5)
    parts = commands.add_parser("frozen")
    parts.add_argument("--layers", type=int, default=36)
    parts.add_argument("--trained", type=int, default=8)
    parts.add_argument("--length", type=int, default=2048)
    parts.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "frozen":
        frozen(options.layers, options.trained, options.length, options.pairs)
    elif options.what == "blocks":
        blocks(options.layers, options.length, options.pairs)
    else:
        short_rows([int(length) for length in options.lengths.split(",")], options.pairs, options.out)


if __name__ == "__main__":
    main()
