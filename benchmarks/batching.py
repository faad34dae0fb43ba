"""Buckets beside concat-and-chunk: attention, time of a step, and how long ranks wait for each other.

    python -m benchmarks.batching [--max-length 8192] [--pairs 5] [--out docs/benchmarks/batching.md]

The corpus is ``python-stdlib``, whole modules among single functions, all tokens trained, with a tokenizer of 4,096
entries trained on it. Attention is counted as the sum of squared lengths (``streamtune/data/length_measures.py``).

A step of concat-and-chunk is one sequence of ``--max-length`` tokens of several rows that see each other. A step of
buckets is as many tokens in pieces of one length, end to end. Both are streamed in the same chunks, in processor time
of one thread; each step of buckets stands between two steps of concat-and-chunk. The median of a bucket is weighted by
its tokens in the corpus.

Ranks are simulated: 200 optimizer steps of 32 rows on 8 ranks, with the predicted time of a row in Qwen3-8B.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

import streamtune
from benchmarks.predicted import qwen3_8b
from benchmarks.processor_time import interleaved, small_model, spread
from streamtune import Schedule, data, models
from streamtune.tasks.steps import RowCost
from streamtune.train import MicroBatch
from streamtune.train.objective import supervised_loss

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65536,
}
RANKS, ROWS, STEPS, LONGEST = 8, 32, 200, 131072
Assign = Callable[[Sequence[int], Callable[[int], float]], list[list[list[int]]]]


# --- attention --------------------------------------------------------------------------------------------------------


def read_corpus(max_length: int) -> data.PreparedData:
    """Return the rows as token ids, longer ones split."""
    sources = [data.Source("python-stdlib")]
    tokenizer = models.train_tokenizer(data.iter_texts(sources), vocab_size=CONFIG["vocab_size"])
    options = data.DataOptions(max_length=max_length, overlength="split", train_on="all", packing=True, seed=0)
    return data.prepare(sources, tokenizer, options)


def attention_table(prepared: data.PreparedData, pieces: data.Pieces, max_length: int) -> list[str]:
    """Return the sum of squared lengths for each way of making sequences."""
    lengths = prepared.training.lengths()
    packs, tokens = prepared.packs, int(lengths.sum())
    assert packs is not None
    concat = data.concat_squared_lengths(tokens, max_length)
    lines = [
        "| sequences | sum of squared lengths | relative to concat-and-chunk | padding | tokens not trained |",
        "|---|---:|---:|---:|---:|",
    ]
    lines.append(f"| concat-and-chunk | {concat:.4g} | 1 | {0:.2%} | 0 |")
    for name, squares, padding, lost in (
        ("best-fit packing", int((lengths**2).sum()), 1 - packs.fill_rate(max_length), 0),
        ("buckets", int((pieces.lengths() ** 2).sum()), 0.0, pieces.tokens_lost),
    ):
        part = f"{squares / concat:.3f}, {concat / squares:.2f}x fewer"
        lines.append(f"| {name} | {squares:.4g} | {part} | {padding:.2%} | {lost:,} |")
    return lines


# --- time -------------------------------------------------------------------------------------------------------------


def time_table(
    prepared: data.PreparedData, pieces: data.Pieces, max_length: int, pairs: int, console: Console
) -> list[str]:
    """Return the processor time of a step of each bucket relative to concat-and-chunk."""
    model = small_model(**CONFIG)
    streamtune.stream(model, schedule=Schedule(chunk_size=1024, head_chunk_size=512))
    examples, random = prepared.training, np.random.RandomState(0)
    chunks = concat_and_chunk(examples, max_length, 2 * pairs + 2, random)
    processor_seconds(model, chunks[0])
    lines = ["| bucket | share of all tokens | time relative to concat-and-chunk |", "|---:|---:|---:|"]
    held, tokens = pieces.lengths(), int(pieces.lengths().sum())
    total = 0.0
    for size in sorted(pieces.piece_counts_by_bucket()):
        members = np.flatnonzero(pieces.buckets == size)
        following = iter(chunks[1:])

        def base(following: Iterator[MicroBatch] = following) -> float:
            return processor_seconds(model, next(following))

        def bucket(members: np.ndarray[Any, Any] = members, size: int = size) -> float:
            """Return the seconds for as many tokens as a chunk has."""
            units = random.choice(members, min(len(members), max_length // size), replace=False)
            cut = [pieces.cut_piece(examples, int(unit)) for unit in units]
            batch = MicroBatch(**data.collate_packed([cut], pad_token_id=0), origins=())
            return processor_seconds(model, batch) * max_length / batch.num_tokens

        with console.status(f"pieces of {size:,}"):
            _, found = interleaved(base, {"bucket": bucket}, pairs)
        share = int(held[members].sum()) / tokens
        total += share * statistics.median(found["bucket"])
        lines.append(f"| {size:,} | {share:.1%} | {spread(found['bucket'])} |")
        console.print(lines[-1])
    lines.append(f"| all | 100% | {total:.2f}, {1 / total:.2f}x as fast |")
    return lines


def concat_and_chunk(examples: Any, max_length: int, count: int, random: np.random.RandomState) -> list[MicroBatch]:
    """Return ``count`` sequences cut from rows that are joined in a random order."""
    ids: list[int] = []
    order = iter(random.permutation(len(examples)).tolist())
    while len(ids) < count * max_length:
        ids += np.asarray(examples[next(order)].input_ids).tolist()
    parts = (np.array(ids[start : start + max_length]) for start in range(0, count * max_length, max_length))
    return [MicroBatch(**data.collate([data.Example(part, part, "")], pad_token_id=0), origins=()) for part in parts]


def processor_seconds(model: Any, batch: MicroBatch) -> float:
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    supervised_loss(model, batch, num_targets=batch.num_targets).backward()
    return time.process_time() - start


# --- ranks ------------------------------------------------------------------------------------------------------------


def by_tokens(rows: Sequence[int], tokens: Callable[[int], Any], batch_size: int) -> list[list[list[int]]]:
    """Assign rows as an earlier version did: sorted by tokens, equally many to each batch, to and fro."""
    micro_steps = -(-len(rows) // (RANKS * batch_size))
    ordered = sorted(rows, key=lambda row: (-tokens(row), row))
    smaller, more = divmod(len(rows), micro_steps * RANKS)
    batches, start = [], 0
    for index in range(micro_steps * RANKS):
        size = smaller + (index < more)
        batches.append(ordered[start : start + size])
        start += size
    steps = [batches[start : start + RANKS] for start in range(0, len(batches), RANKS)]
    turned = [step[::-1] if index % 2 else step for index, step in enumerate(steps)]
    return [[step[rank] for step in turned] for rank in range(RANKS)]


def waits(shares: list[list[list[int]]], cost: Callable[[int], float], padded: bool) -> tuple[float, float]:
    """Return the time of the slowest rank relative to the mean: in lockstep micro-steps, and for whole steps."""

    def seconds(batch: Sequence[int]) -> float:
        costs = [cost(row) for row in batch]
        return (len(costs) * max(costs) if padded else sum(costs)) if costs else 0.0

    times = np.array([[seconds(batch) for batch in share] for share in shares])
    of_ranks = times.sum(axis=1)
    return float(times.max(axis=0).sum() / times.mean(axis=0).sum()), float(of_ranks.max() / of_ranks.mean())


def rank_table() -> list[str]:
    """Return how long ranks wait, by distribution, layout and assignment."""
    cost_of = RowCost.from_model(qwen3_8b())
    random = np.random.RandomState(0)
    drawn = {
        "log-normal": random.lognormal(7.5, 1.5, 40000),
        "Pareto": 500 * (1 + random.pareto(1.1, 40000)),
        "two kinds": np.where(random.random_sample(40000) < 0.1, 1, 0.02) * random.uniform(5e4, 1.3e5, 40000),
    }
    lines = [
        "| distribution of lengths | layout | micro-batch size | every micro-batch: old | new "
        "| every step: old | new | longest row alone |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, values in drawn.items():
        lengths = values.astype(np.int64).clip(2, LONGEST)
        packs = data.pack_rows(lengths, LONGEST, seed=0)
        of_packs = [np.add.reduceat(x[packs.rows], packs.starts[:-1]) for x in (lengths, lengths**2)]
        for layout, (tokens, squares), sizes, padded in (
            ("rows", (lengths, lengths**2), (1, 4), True),
            ("packs", of_packs, (1, 4), False),
        ):
            for batch_size in sizes:
                found = []
                for _ in range(STEPS):
                    # steps that count tokens have varying numbers of rows
                    count = ROWS if batch_size == 1 else int(random.randint(ROWS // 2, ROWS + 1))
                    rows = random.choice(len(tokens), min(count, len(tokens)), replace=False).tolist()
                    cost = {row: cost_of(int(tokens[row]), int(squares[row])) for row in rows}.__getitem__
                    before = by_tokens(rows, tokens.__getitem__, batch_size)
                    now = data.assign_to_ranks(rows, cost, ranks=RANKS, batch_size=batch_size, padded=padded)
                    costs = [cost(row) for row in rows]
                    least = max(1.0, max(costs) / (sum(costs) / RANKS))
                    found.append([*waits(before, cost, padded), *waits(now, cost, padded), least])
                lock, end, lock_now, end_now, least = np.mean(found, axis=0)
                lines.append(
                    f"| {name} | {layout} | {batch_size} | {lock:.2f} | {lock_now:.2f} | {end:.2f} "
                    f"| {end_now:.2f} | {least:.2f} |"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--pairs", type=int, default=5, help="timed steps of each bucket")
    parser.add_argument("--out", type=Path, help="the page to write; printed in any case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    ranks = rank_table()
    console.print("\n".join(ranks))
    prepared = read_corpus(options.max_length)
    pieces = data.cut_rows_into_pieces(prepared.training, max_length=options.max_length, min_length=64, packing=True)
    attention = attention_table(prepared, pieces, options.max_length)
    console.print(prepared.report.describe(), "\n".join(attention), sep="\n")
    times = time_table(prepared, pieces, options.max_length, options.pairs, console)
    console.print(times[-1])
    if options.out is not None:
        text = page(prepared, pieces, options, *("\n".join(table) for table in (attention, times, ranks)))
        options.out.write_text(text, encoding="utf-8")


def page(
    prepared: data.PreparedData,
    pieces: data.Pieces,
    options: argparse.Namespace,
    attention: str,
    times: str,
    ranks: str,
) -> str:
    report, length = prepared.report, options.max_length
    lengths = report.length_percentiles
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
    return f"""# Batches of rows of mixed lengths

This page compares three ways to make batches from rows of mixed lengths: concat-and-chunk, best-fit packing
(`packing: true`) and buckets (`batching: buckets`). It also shows how long ranks wait for each other.

```
python -m benchmarks.batching --max-length {length} --pairs {options.pairs} --out docs/benchmarks/batching.md
```

Versions: {versions}; one thread, fp32. The corpus is `python-stdlib`: {report.rows:,} rows, {report.tokens:,} tokens.
Rows have {lengths["min"]:,} to {lengths["max"]:,} tokens, the median is {lengths["p50"]:,}. Rows longer than {length:,}
tokens are split; all tokens are trained.

## Attention

{attention}

The sum of squared lengths is proportional to the operations of attention. Concat-and-chunk joins all rows and cuts them
into sequences of {length:,} tokens, in which rows attend to each other. Buckets cut the rows into {len(pieces):,}
pieces, and the first token of a piece is not trained. So {pieces.targets_lost:,} targets of the rows are not trained
({pieces.targets_lost / report.tokens:.2%} of all tokens).

## Time of a step

Processor time of forward and backward of {length:,} tokens in pieces of one bucket, relative to {length:,} tokens of
concat-and-chunk: the median of {options.pairs} measurements (smallest to largest). The model is a small Qwen3: 4
layers, hidden size 256, 4 heads of size 64. It is streamed in chunks of 1,024 tokens. *All* is weighted by the tokens
of each bucket.

{times}

## Ranks

The figures of this table are simulated: the time of the slowest of 8 ranks relative to the mean time of the ranks. Each
figure is a mean over 200 optimizer steps. A step has 32 rows in micro-batches of 1, or 16 to 32 rows in micro-batches
of 4. The time of a row is predicted for Qwen3-8B; rows have at most 131,072 tokens.

- *Every micro-batch*: ranks wait for each other in every micro-batch (ZeRO-3, FSDP).
- *Every step*: ranks wait for each other once per optimizer step (DDP, ZeRO-1).
- *Old*: earlier versions sorted rows by tokens, and assigned them to ranks in alternating order.
- *New*: rows are assigned to ranks by predicted time ([decision 023](../decisions/023-batches-of-mixed-lengths.md)).

{ranks}

If one row is much longer than all others, ranks wait for its rank with any assignment. *Longest row alone* is the ratio
if one rank has only the longest row: the lowest possible ratio for *every step*.
"""


if __name__ == "__main__":
    main()
