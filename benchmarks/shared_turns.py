"""Time of pairs and groups whose completions share turns, as trees, over prompts once alone and over rows apart.

    python -m benchmarks.shared_turns [--tokens 4096,16384] [--shared 0.5,0.75,0.9] [--repeats 3] [--out FILE]

A pair is a conversation whose prompt is a quarter of its tokens; of the other tokens the ``--shared`` part is common to
both completions, trained in both, and each goes on by itself. A group has eight completions, every two of which were
resampled from the middle of one. All layouts stream the same model in the same chunks, in the loss of ``orpo`` for
pairs and a weighted sum of log-probabilities for groups, which read common tokens of each completion by themselves. In
processor time of one thread; each measurement of one layout stands between two of another.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

import streamtune
from benchmarks.batching import CONFIG
from streamtune import Schedule, train
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data import Tree
from streamtune.engine import Branches, StreamHandle
from streamtune.tasks import objectives
from streamtune.tasks.preference import tree_batch

GROUP = 8
"""Completions of a group."""


def ids(draw: np.random.RandomState, count: int) -> list[int]:
    """Return random tokens."""
    found: list[int] = draw.randint(3, 4000, count).tolist()
    return found


def pair(tokens: int, shared: float) -> Tree:
    """Return a pair of ``tokens`` tokens, each completion with its prompt."""
    draw = np.random.RandomState(0)
    prompt, rest = tokens // 4, tokens - tokens // 4
    common = ids(draw, round(rest * shared))
    return Tree(ids(draw, prompt), [common + ids(draw, rest - len(common)) for _ in range(2)])


def group(tokens: int, shared: float) -> Tree:
    """Return a group, in which every two completions share a part of their tokens."""
    draw = np.random.RandomState(0)
    prompt, rest, completions = tokens // 4, tokens - tokens // 4, []
    for _ in range(GROUP // 2):
        common = ids(draw, round(rest * shared))
        completions += [common + ids(draw, rest - len(common)) for _ in range(2)]
    return Tree(ids(draw, prompt), completions)


def prompt_once(tree: Tree) -> train.TreeBatch:
    """Return a tree with its prompt once and each completion whole, as it was laid out before."""
    prompt = tree.prompt[:-1]
    branches = [tree.branch(index) for index in range(len(tree.completions))]
    tokens = np.concatenate([np.array(prompt, np.int32), *(ids for ids, _ in branches)]).astype(np.int64)
    targets = np.concatenate([np.full(len(prompt), IGNORE_INDEX), *(targets for _, targets in branches)])
    sizes = [len(ids) for ids, _ in branches]
    place_K = torch.as_tensor(targets != IGNORE_INDEX).nonzero()[:, 0]
    return train.TreeBatch(
        input_ids=torch.as_tensor(tokens)[None],
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        shift_labels=torch.as_tensor(targets)[None],
        origins=("",) * len(branches),
        place_K=place_K,
        row_K=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes) - 1),
        num_rows=len(sizes),
        branches=Branches.of([(len(prompt), sizes)]),
    )


def seconds(model: Any, batches: Sequence[train.TreeBatch]) -> float:
    """Return the processor time of the forwards and backwards of some batches."""
    model.zero_grad(set_to_none=True)
    handle, start = StreamHandle.of(model), process_time()
    for batch in batches:
        scores = handle.logprobs(targets=batch.shift_labels, **batch.arguments)
        logp_K = batch.ragged(scores.logprobs)
        if batch.num_rows == 2:
            logps = objectives.PairLogps.of(logp_K, batch.row_K, 2)
            loss = objectives.preference_loss("orpo", logps, None).losses_P.sum()
        else:
            loss = (logp_K * (batch.row_K - 3.5)).sum()
        loss.backward()
    return process_time() - start


def ratios(model: Any, batches: Sequence[train.TreeBatch], over: Sequence[train.TreeBatch], repeats: int) -> str:
    """Return the time over that of others: the median, the smallest and the largest."""
    found, before = [], seconds(model, over)
    for _ in range(repeats):
        ours, after = seconds(model, batches), seconds(model, over)
        found.append(2 * ours / (before + after))
        before = after
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def models(hidden: int, layers: int) -> dict[str, Any]:
    """Return a model whose layers attend, and one of which half have a state."""
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    settings = {**CONFIG, **sizes, **heads}
    linear = {"linear_num_key_heads": hidden // 64, "linear_num_value_heads": hidden // 64}
    kinds = ["linear_attention", "full_attention"] * (layers // 2)
    dims = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "mlp_only_layers": list(range(layers))}
    return {
        "Qwen3": Qwen3ForCausalLM(Qwen3Config(**settings)).train(),
        "Qwen3-Next, dense": Qwen3NextForCausalLM(
            Qwen3NextConfig(**settings, **linear, **dims, layer_types=kinds)
        ).train(),
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384", help="of a prompt with one completion, several with commas")
    parser.add_argument("--shared", default="0.5,0.75,0.9", help="part of a completion, several with commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [
        "| model | completions | tokens of one | shared | apart | prompt once | together | time over prompt once "
        "| time over apart |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lengths, parts = list(map(int, options.tokens.split(","))), list(map(float, options.shared.split(",")))
    for (name, model), (what, make), tokens, shared in product(
        models(options.hidden, options.layers).items(), (("pair", pair), ("group of 8", group)), lengths, parts
    ):
        if what != "pair" and tokens != min(lengths):
            continue
        tree = make(tokens, shared)
        apart = [Tree(tree.prompt, [each]) for each in tree.completions]
        together = [train.TreeBatch(**tree_batch([tree], pad_token_id=0, share=True))]
        once = [prompt_once(tree)]
        rows = [train.TreeBatch(**tree_batch([each], pad_token_id=0, share=False)) for each in apart]
        with streamtune.stream(model, schedule=Schedule(chunk_size=1024, head_chunk_size=512)):
            seconds(model, together)
            times = [ratios(model, together, over, options.repeats) for over in (once, rows)]
        counts = [f"{sum(batch.num_tokens for batch in each):,}" for each in (rows, once, together)]
        lines.append(f"| {' | '.join((name, what, f'{tokens:,}', f'{shared:.0%}', *counts, *times))} |")
        console.print(lines[-1], soft_wrap=True)
    given = " ".join(f"--{key} {value}" for key, value in vars(options).items() if value is not None)
    page = PAGE.format(
        command=f"python -m benchmarks.shared_turns {given}",
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        repeats=options.repeats,
        model=f"layers: {options.layers}, channels: {options.hidden:,}",
        table="\n".join(lines),
    )
    print(page)
    if options.out is not None:
        options.out.write_text(page, "utf-8")


PAGE = """# Completions that share turns

```
{command}
```

{versions}, one thread, fp32.

A pair whose completions begin with the same turns, and a group of eight of which every two were resampled from the
middle of one. *Shared* is the part of a completion that another has too; a quarter of the tokens is the prompt. *Apart*
every completion is a row behind its own prompt, *prompt once* it is a branch behind it, *together* what two completions
share is there once. Times are processor time of forward and backward, in chunks of 1,024 tokens: medians of {repeats}
(smallest to largest). {model}.

{table}

The loss and its gradient are the same in all three: a common token's log-probability is read for each of its
completions, and its gradient is the sum of theirs.
"""

if __name__ == "__main__":
    main()
