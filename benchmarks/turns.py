"""Time of the turns of a conversation in one sequence, with common beginnings once, over that of each turn apart.

    python -m benchmarks.turns [--tokens 8192,32768] [--reasoning 0.125] [--turns 8] [--pairs 3] [--out FILE]

A conversation is made as a template renders it that drops earlier reasoning: every turn sees the questions and answers
before it, and trains its own reasoning and answer. The turns are rendered from ``--tokens`` tokens in all. Both ways
stream the same model in the same chunks; each measurement of one stands between two of the other. In processor time of
one thread. ``--hidden`` and ``--layers`` size the model: the wider it is, the smaller a part of a step is attention.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import streamtune
from benchmarks.batching import CONFIG, processor_seconds
from benchmarks.gpu import LARGE
from streamtune import Schedule, data
from streamtune.data.batches.collate import PrefixTree
from streamtune.plan.simulate.workload import FlopCount, Span
from streamtune.tasks.sft import prefix_batch
from streamtune.train import MicroBatch

LAYERS = 36
"""Of Qwen3-8B."""
COUNTED = ((8192, 32768, 131072), (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2))
"""Tokens and reasoning for which operations are counted."""


def conversation(tokens: int, turns: int, reasoning: float) -> list[data.Example]:
    """Return the rows of the turns of a conversation of ``tokens`` tokens.

    Args:
        tokens: Tokens of questions, reasoning and answers, each once.
        turns: Questions.
        reasoning: Part of a turn that later turns do not see; a quarter of the rest is the answer.
    """
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


def row_times(rows: Sequence[data.Example], pairs: int, model: Any, console: Console) -> list[float]:
    """Return the ratios of processor time."""
    together = prefix_batch(rows)
    apart = [MicroBatch(**data.collate([row], pad_token_id=0), origins=("",)) for row in rows]

    def seconds_apart() -> float:
        return sum(processor_seconds(model, batch) for batch in apart)

    ratios = []
    with console.status("measuring"):
        before = seconds_apart()
        for _ in range(pairs):
            ours, after = processor_seconds(model, together), seconds_apart()
            ratios.append(2 * ours / (before + after))
            before = after
    return ratios


def spans_together(rows: Sequence[data.Example]) -> list[Span]:
    """Return the tokens before each part of the tree of the rows, and its own."""
    tree, found = PrefixTree(), list[Span]()
    for row in rows:
        tree.add(row)
    for parent, node in tree.nodes():
        before = sum(found[parent]) if parent >= 0 else 0
        found.append((before, len(node.ids)))
    return found


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,32768", help="of the conversation, several with commas")
    parser.add_argument("--reasoning", default="0.0625,0.125,0.25,0.5", help="part of a turn, several with commas")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = options.hidden
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": options.layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    model = Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, **sizes, **heads})).train()
    count = FlopCount.of(model)
    streamtune.stream(model, schedule=Schedule(chunk_size=1024, head_chunk_size=512))
    processor_seconds(model, prefix_batch(conversation(2048, 2, 0.5)))
    lines = [
        "| tokens | reasoning | apart | together | operations | time |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for tokens, part in product(map(int, options.tokens.split(",")), map(float, options.reasoning.split(","))):
        rows = conversation(tokens, options.turns, part)
        ratios = row_times(rows, options.pairs, model, console)
        apart, together = [(0, row.num_tokens) for row in rows], spans_together(rows)
        computed = (f"{sum(own for _, own in spans):,}" for spans in (apart, together))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {' | '.join((f'{tokens:,}', f'{part:.1%}', *computed, saved(count, rows), spread))} |")
        console.print(lines[-1], soft_wrap=True)
    page = PAGE.format(
        command=command_of(options),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        turns=options.turns,
        pairs=options.pairs,
        model=f"layers: {options.layers}, channels: {hidden:,}, heads: {hidden // 64} of 64",
        table="\n".join(lines),
        counted="\n".join(counted(options.turns)),
    )
    print(page)
    if options.out is not None:
        options.out.write_text(page, "utf-8")


def saved(count: FlopCount, rows: Sequence[data.Example]) -> str:
    """Return the operations of a conversation in one sequence over those of its turns apart."""
    return f"{count.step(spans_together(rows)) / count.step([(0, row.num_tokens) for row in rows]):.2f}"


def counted(turns: int) -> list[str]:
    """Return a table of the operations of Qwen3-8B."""
    sizes, parts = COUNTED
    count = FlopCount.of(large())
    lines = [
        f"| reasoning | {' | '.join(f'{tokens:,} tokens' for tokens in sizes)} |",
        f"|{'---:|' * (1 + len(sizes))}",
    ]
    for part in parts:
        ratios = [saved(count, conversation(tokens, turns, part)) for tokens in sizes]
        lines.append(f"| {part:.1%} | {' | '.join(ratios)} |")
    return lines


def large() -> Any:
    """Return Qwen3-8B without values."""
    config = AutoConfig.for_model("qwen3", **{**LARGE, "num_hidden_layers": LAYERS}, tie_word_embeddings=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def command_of(options: argparse.Namespace) -> str:
    """Return the command that gives the page again."""
    given = (f"--{name} {value}" for name, value in vars(options).items() if value is not None)
    return "python -m benchmarks.turns " + " ".join(given)


PAGE = """# Turns that share their beginnings

```
{command}
```

{versions}, one thread, fp32.

A conversation of {turns} turns whose template drops the reasoning of earlier turns: with `reasoning: per_turn` every
turn is trained as the model sees it when it writes it, and what turns have in common is computed once. *Time* is the
processor time of forward and backward over that of the turns one by one, both streamed in chunks of 1,024 tokens:
medians of {pairs} (smallest to largest). *Operations* are those of matrix products and attention, likewise together to
apart, by the [count](../guide/plan.md#flop-and-mfu) that `plan` shows. The model has the shape of Qwen3:
{model}. *Tokens* are those of the conversation, *apart* and *together* those that
are computed. Of a turn's tokens the given part is reasoning, a quarter of the rest is the answer.

{table}

A turn's reasoning and answer are computed for themselves, and the answer once more in the history of later turns. Of
matrix products more is saved than of attention, so a wide model saves more than a narrow one at the same length, and
short reasoning more than long. Operations of Qwen3-8B, together to apart, counted and not measured:

{counted}
"""

if __name__ == "__main__":
    main()
