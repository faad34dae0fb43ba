"""The backward of one trained block beside that of all weights, on this CPU: where it ends, and what it costs.

    python -m benchmarks.blocks [--layers 36] [--length 2048] [--pairs 5]

Processor time of one thread. Each backward with one trained layer stands between two with all weights trained and is
divided by their mean; the median of the ratios is shown. The forward is shown as a ratio too: inputs of frozen layers
below the block are not stored.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streamtune
from streamtune import Schedule

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768,
}  # fmt: skip


def seconds(model: Any, ids: torch.Tensor, layer: int | None) -> tuple[float, float]:
    """Return the processor time of forward and backward with one layer trained, or all weights."""
    model.requires_grad_(layer is None)
    if layer is not None:
        model.model.layers[layer].requires_grad_(True)
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    between = time.process_time()
    loss.backward()
    return between - start, time.process_time() - between


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=options.layers)).train()
    streamtune.stream(model, schedule=Schedule(chunk_size=options.length // 8))
    ids = torch.randint(0, SHAPE["vocab_size"], (1, options.length))
    layers = [0, options.layers // 3, 2 * options.layers // 3, options.layers - 1]
    seconds(model, ids, None)  # what is made once
    whole = [seconds(model, ids, None)]
    found: dict[int, list[tuple[float, float]]] = {layer: [] for layer in layers}
    for _ in range(options.pairs):
        for layer in layers:
            took = seconds(model, ids, layer)
            whole.append(seconds(model, ids, None))
            means = [(a + b) / 2 for a, b in zip(whole[-1], whole[-2], strict=True)]
            found[layer].append((took[0] / means[0], took[1] / means[1]))
    forward, backward = (statistics.median(each) for each in zip(*whole, strict=True))
    print(f"{options.layers} layers, {options.length:,} tokens; all weights: forward {forward:.2f} s, "
          f"backward {backward:.2f} s")  # fmt: skip
    print("| trained layer | forward | backward |\n|---:|---:|---:|")
    for layer, ratios in found.items():
        columns = [sorted(each) for each in zip(*ratios, strict=True)]
        shown = (f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in columns)
        print(f"| {layer} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
