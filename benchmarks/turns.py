"""Time of the turns of a conversation in one sequence, with common beginnings once, over that of each turn apart.

    python -m benchmarks.turns [--tokens 32768] [--turns 8] [--pairs 3] [--out docs/benchmarks/turns.md]

A conversation is made as a template renders it that drops earlier reasoning: every turn sees the questions and answers
before it, and trains its own reasoning and answer. The sequence has ``--tokens`` tokens. Both ways stream the same
model in the same chunks; each measurement of one stands between two of the other. In processor time of one thread.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

import streamtune
from benchmarks.batching import CONFIG, processor_seconds
from streamtune import Schedule, data
from streamtune.data.batches.prefixes import PrefixTree
from streamtune.tasks.sft import prefix_batch
from streamtune.train import MicroBatch

REASONING = (1 / 8, 1 / 4, 1 / 2)
"""Parts of a turn's tokens that later turns do not see."""


def conversation(tokens: int, turns: int, reasoning: float) -> list[data.Example]:
    """Return the rows of the turns; with common beginnings once they have ``tokens`` tokens."""
    draw = np.random.RandomState(0)
    thought = round(tokens / turns * reasoning)
    answer = (tokens // turns - thought) // 4
    question = tokens // turns - thought - answer
    rows, history = [], np.empty(0, np.int32)
    for _ in range(turns):
        asked, thinks, says = (draw.randint(3, 4000, n).astype(np.int32) for n in (question, thought, answer))
        ids = np.concatenate([history, asked, thinks, says])
        labels = ids.copy()
        labels[: len(history) + question] = -100
        rows.append(data.Example(ids, labels, "conversation"))
        history = np.concatenate([history, asked, says])
    return rows


def row_times(rows: Sequence[data.Example], pairs: int, model: Any, console: Console) -> tuple[list[float], PrefixTree]:
    """Return the ratios of processor time."""
    together = prefix_batch(rows)
    apart = [MicroBatch(**data.collate([row], pad_token_id=0), origins=("",)) for row in rows]
    tree = PrefixTree()
    for row in rows:
        tree.add(row)

    def seconds_apart() -> float:
        return sum(processor_seconds(model, batch) for batch in apart)

    ratios = []
    with console.status("measuring"):
        before = seconds_apart()
        for _ in range(pairs):
            ours, after = processor_seconds(model, together), seconds_apart()
            ratios.append(2 * ours / (before + after))
            before = after
    return ratios, tree


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).train()
    streamtune.stream(model, schedule=Schedule(chunk_size=1024, head_chunk_size=512))
    processor_seconds(model, prefix_batch(conversation(2048, 2, 0.5)))
    lines = [
        "| reasoning | tokens of the turns apart | together | squared lengths, to apart | time, together to apart |",
        "|---:|---:|---:|---:|---:|",
    ]
    for part in REASONING:
        rows = conversation(options.tokens, options.turns, part)
        ratios, tree = row_times(rows, options.pairs, model, console)
        tokens = sum(row.num_tokens for row in rows)
        squares = sum(row.num_tokens**2 for row in rows)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {part:.1%} | {tokens:,} | {tree.tokens:,} | {tree.squares / squares:.2f} | {spread} |")
        console.print(lines[-1])
    command = f"python -m benchmarks.turns --tokens {options.tokens} --turns {options.turns} --pairs {options.pairs}"
    page = PAGE.format(
        command=f"{command} --out {options.out}",
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        turns=options.turns,
        pairs=options.pairs,
        table="\n".join(lines),
    )
    print(page)
    if options.out is not None:
        options.out.write_text(page, "utf-8")


PAGE = """# Turns that share their beginnings

```
{command}
```

{versions}, one thread, fp32.

A conversation of {turns} turns whose template drops the reasoning of earlier turns: with `reasoning: per_turn` every
turn is trained as the model sees it when it writes it, and what turns have in common is computed once. Processor time of
forward and backward over that of the turns one by one, both streamed in chunks of 1,024 tokens: medians of {pairs} (smallest
to largest). The model has the shape of Qwen3, 4 layers of 256 channels with 4 heads of 64. Of a turn's tokens the given
part is reasoning, a quarter of the rest is the answer.

{table}
"""

if __name__ == "__main__":
    main()
