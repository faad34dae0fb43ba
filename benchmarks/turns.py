"""Time of sequences that share their beginnings, computed once, over the same sequences apart.

    python -m benchmarks.turns conversations [--tokens 8192,32768] [--reasoning 0.125] [--turns 8] [--out FILE]
    python -m benchmarks.turns completions [--tokens 4096,16384] [--shared 0.5,0.75,0.9] [--out FILE]

All layouts stream the same model in the same chunks, in processor time of one thread; each measurement of a layout
stands between two of another. ``--hidden`` and ``--layers`` size the model: the wider, the smaller attention's part.

``conversations``: a conversation as a template renders it that drops earlier reasoning. Every turn sees the questions
and answers before it, and trains its own reasoning and answer. The conversation has ``--tokens`` tokens in all.

``completions``: pairs and groups as trees, over prompts once alone and over rows apart. A quarter of a pair's tokens is
the prompt; the ``--shared`` part of the other tokens is common to both completions, trained in both. A group has eight
completions, every two of which were resampled from the middle of one. The loss, ``orpo`` for pairs and a weighted sum
of log-probabilities for groups, reads common tokens for each completion.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from functools import partial
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
from benchmarks.batching import CONFIG, processor_seconds
from benchmarks.predicted import qwen3_8b
from benchmarks.processor_time import interleaved, spread
from streamtune import Schedule, data, train
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data import Tree
from streamtune.data.batches.collate import PrefixTree
from streamtune.engine import Branches, StreamHandle
from streamtune.plan.simulate.workload import FlopCount, Span
from streamtune.tasks import objectives
from streamtune.tasks.preference import batch_trees
from streamtune.tasks.sft import collate_prefix_batch

COUNTED = ((8192, 32768, 131072), (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2))
"""Tokens and parts of reasoning for which operations are counted."""
GROUP = 8
"""Completions of a group."""
SCHEDULE = Schedule(chunk_size=1024, head_chunk_size=512)


def shape_of(hidden: int, layers: int) -> dict[str, int]:
    """Return the sizes of a small model with heads of 64 channels."""
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    return {**CONFIG, **sizes, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}


# --- turns of a conversation ------------------------------------------------------------------------------------------


def conversation(tokens: int, turns: int, reasoning: float) -> list[data.Example]:
    """Return the rows of the turns of a conversation of ``tokens`` tokens.

    Args:
        tokens: Number of tokens of questions, reasoning and answers, each counted once.
        turns: Number of questions.
        reasoning: Fraction of a turn that later turns do not see; a quarter of the rest is the answer.
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
        labels[: len(history) + question] = IGNORE_INDEX
        rows.append(data.Example(ids, labels, "conversation"))
        history = np.concatenate([history, asked, says])
    return rows


def spans_together(rows: Sequence[data.Example]) -> list[Span]:
    """Return (tokens before, own tokens) of each part of the tree of the rows."""
    tree, found = PrefixTree(), list[Span]()
    for row in rows:
        tree.add(row)
    for parent, node in tree.nodes_in_order():
        before = sum(found[parent]) if parent >= 0 else 0
        found.append((before, len(node.ids)))
    return found


def spans_apart(rows: Sequence[data.Example]) -> list[Span]:
    """Return (0, tokens) of each row."""
    return [(0, row.num_tokens) for row in rows]


def saved(count: FlopCount, rows: Sequence[data.Example]) -> str:
    """Return the operations of a conversation in one sequence relative to its turns apart."""
    return f"{count.step_flops(spans_together(rows)) / count.step_flops(spans_apart(rows)):.2f}"


def counted(turns: int) -> list[str]:
    sizes, parts = COUNTED
    count = FlopCount.from_model(qwen3_8b())
    lines = [
        f"| reasoning | {' | '.join(f'{tokens:,} tokens' for tokens in sizes)} |",
        f"|{'---:|' * (1 + len(sizes))}",
    ]
    for part in parts:
        ratios = [saved(count, conversation(tokens, turns, part)) for tokens in sizes]
        lines.append(f"| {part:.1%} | {' | '.join(ratios)} |")
    return lines


def conversations(options: argparse.Namespace, console: Console) -> str:
    hidden = options.hidden
    model = Qwen3ForCausalLM(Qwen3Config(**shape_of(hidden, options.layers))).train()
    count = FlopCount.from_model(model)
    streamtune.stream(model, schedule=SCHEDULE)
    processor_seconds(model, collate_prefix_batch(conversation(2048, 2, 0.5)))
    lines = ["| tokens | reasoning | apart | together | operations | time |", "|---:|---:|---:|---:|---:|---:|"]
    for tokens, part in product(map(int, options.tokens.split(",")), map(float, options.reasoning.split(","))):
        rows = conversation(tokens, options.turns, part)
        batches = [train.MicroBatch(**data.collate([row], pad_token_id=0), origins=("",)) for row in rows]

        def apart(batches: Sequence[train.MicroBatch] = batches) -> float:
            return sum(processor_seconds(model, batch) for batch in batches)

        with console.status("measuring"):
            together = partial(processor_seconds, model, collate_prefix_batch(rows))
            _, ratios = interleaved(apart, {"together": together}, options.pairs)
        computed = (f"{sum(own for _, own in spans):,}" for spans in (spans_apart(rows), spans_together(rows)))
        cells = (f"{tokens:,}", f"{part:.1%}", *computed, saved(count, rows), spread(ratios["together"]))
        lines.append(f"| {' | '.join(cells)} |")
        console.print(lines[-1], soft_wrap=True)
    return CONVERSATIONS.format(
        **facts_of(options),
        turns=options.turns,
        model=f"layers: {options.layers}, hidden size: {hidden:,}, heads: {hidden // 64} of size 64",
        table="\n".join(lines),
        counted="\n".join(counted(options.turns)),
    )


# --- completions of a prompt ------------------------------------------------------------------------------------------


def ids(draw: np.random.RandomState, count: int) -> list[int]:
    found: list[int] = draw.randint(3, 4000, count).tolist()
    return found


def pair(tokens: int, shared: float) -> Tree:
    """Return a pair; each completion has ``tokens`` tokens with its prompt."""
    draw = np.random.RandomState(0)
    prompt, rest = tokens // 4, tokens - tokens // 4
    common = ids(draw, round(rest * shared))
    return Tree(ids(draw, prompt), [common + ids(draw, rest - len(common)) for _ in range(2)])


def group(tokens: int, shared: float) -> Tree:
    """Return a group; every two completions share a part of their tokens."""
    draw = np.random.RandomState(0)
    prompt, rest, completions = tokens // 4, tokens - tokens // 4, []
    for _ in range(GROUP // 2):
        common = ids(draw, round(rest * shared))
        completions += [common + ids(draw, rest - len(common)) for _ in range(2)]
    return Tree(ids(draw, prompt), completions)


def prompt_once(tree: Tree) -> train.TreeBatch:
    """Return a tree with its prompt once and each completion whole."""
    prompt = tree.prompt[:-1]
    branches = [tree.branch_tokens(index) for index in range(len(tree.completions))]
    tokens = np.concatenate([np.array(prompt, np.int32), *(ids for ids, _ in branches)]).astype(np.int64)
    targets = np.concatenate([np.full(len(prompt), IGNORE_INDEX), *(targets for _, targets in branches)])
    sizes = [len(ids) for ids, _ in branches]
    flat_index_K = torch.as_tensor(targets != IGNORE_INDEX).nonzero()[:, 0]
    return train.TreeBatch(
        input_ids=torch.as_tensor(tokens)[None],
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        shift_labels=torch.as_tensor(targets)[None],
        origins=("",) * len(branches),
        flat_index_K=flat_index_K,
        row_K=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes) - 1),
        num_rows=len(sizes),
        branches=Branches.of([(len(prompt), sizes)]),
    )


def seconds(model: Any, batches: Sequence[train.TreeBatch]) -> float:
    """Return the processor time of forwards and backwards of batches."""
    model.zero_grad(set_to_none=True)
    handle, start = StreamHandle.of(model), process_time()
    for batch in batches:
        scores = handle.logprobs(targets=batch.shift_labels, **batch.inputs)
        logp_K = batch.gather_targets(scores.logprobs)
        if batch.num_rows == 2:
            logps = objectives.PairLogps.from_tokens(logp_K, batch.row_K, 2)
            loss = objectives.preference_loss("orpo", logps, None).losses_P.sum()
        else:
            loss = (logp_K * (batch.row_K - 3.5)).sum()
        loss.backward()
    return process_time() - start


def models(hidden: int, layers: int) -> dict[str, Any]:
    """Return a model whose layers attend, and a model half of whose layers have a state."""
    settings = shape_of(hidden, layers)
    linear = {"linear_num_key_heads": hidden // 64, "linear_num_value_heads": hidden // 64}
    kinds = ["linear_attention", "full_attention"] * (layers // 2)
    dims = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "mlp_only_layers": list(range(layers))}
    mixed = Qwen3NextConfig(**settings, **linear, **dims, layer_types=kinds)
    return {
        "Qwen3": Qwen3ForCausalLM(Qwen3Config(**settings)).train(),
        "Qwen3-Next, dense": Qwen3NextForCausalLM(mixed).train(),
    }


def completions(options: argparse.Namespace, console: Console) -> str:
    lines = [
        "| model | completions | tokens of one | shared | apart | prompt once | together "
        "| time of together / prompt once | time of together / apart |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lengths, parts = list(map(int, options.tokens.split(","))), list(map(float, options.shared.split(",")))
    for (name, model), (what, make), tokens, shared in product(
        models(options.hidden, options.layers).items(), (("pair", pair), ("group of 8", group)), lengths, parts
    ):
        if what != "pair" and tokens != min(lengths):
            continue
        tree = make(tokens, shared)
        together = [train.TreeBatch(**batch_trees([tree], pad_token_id=0, share=True))]
        once = [prompt_once(tree)]
        alone = [Tree(tree.prompt, [each]) for each in tree.completions]
        rows = [train.TreeBatch(**batch_trees([each], pad_token_id=0, share=False)) for each in alone]
        with streamtune.stream(model, schedule=SCHEDULE):
            seconds(model, together)
            step = {"together": partial(seconds, model, together)}
            found = [interleaved(partial(seconds, model, base), step, options.pairs)[1] for base in (once, rows)]
        counts = [f"{sum(batch.num_tokens for batch in each):,}" for each in (rows, once, together)]
        times = [spread(ratios["together"]) for ratios in found]
        lines.append(f"| {' | '.join((name, what, f'{tokens:,}', f'{shared:.0%}', *counts, *times))} |")
        console.print(lines[-1], soft_wrap=True)
    model_facts = f"{options.layers} layers and hidden size {options.hidden:,}"
    return COMPLETIONS.format(**facts_of(options), model=model_facts, table="\n".join(lines))


# --- pages ------------------------------------------------------------------------------------------------------------


def facts_of(options: argparse.Namespace) -> Mapping[str, Any]:
    given = (f"--{name} {value}" for name, value in vars(options).items() if value is not None and name != "what")
    return {
        "command": f"python -m benchmarks.turns {options.what} {' '.join(given)}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}",
        "times": "once" if options.pairs == 1 else f"{options.pairs} times: median (smallest to largest)",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    turns = commands.add_parser("conversations")
    turns.add_argument("--tokens", default="8192,32768", help="of the conversation, several with commas")
    turns.add_argument("--reasoning", default="0.0625,0.125,0.25,0.5", help="part of a turn, several with commas")
    turns.add_argument("--turns", type=int, default=8)
    trees = commands.add_parser("completions")
    trees.add_argument("--tokens", default="4096,16384", help="of a prompt with one completion, several with commas")
    trees.add_argument("--shared", default="0.5,0.75,0.9", help="part of a completion, several with commas")
    for command, hidden, layers in ((turns, 1024, 1), (trees, 512, 2)):
        command.add_argument("--pairs", type=int, default=3)
        command.add_argument("--hidden", type=int, default=hidden)
        command.add_argument("--layers", type=int, default=layers)
        command.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    page = (conversations if options.what == "conversations" else completions)(options, Console(stderr=True))
    print(page)
    if options.out is not None:
        options.out.write_text(page, "utf-8")


CONVERSATIONS = """# Turns of a conversation in one sequence

This page shows how much time `reasoning: per_turn` saves by computing the common tokens of a conversation's turns once.

```
{command}
```

Versions: {versions}; one thread, fp32.

The chat template drops the reasoning of earlier turns. So `reasoning: per_turn` trains every turn as the model sees it
at inference. The conversation has {turns} turns, and the model is a small Qwen3 ({model}).

- *tokens*: length of the conversation.
- *reasoning*: share of a turn's tokens that is reasoning. The answer is a quarter of the other tokens.
- *apart*: computed tokens if each turn is a row.
- *together*: computed tokens if all turns are in one sequence.
- *operations*: matrix products and attention, together relative to apart, by the
  [count](../guide/plan.md#flop-and-mfu) of `plan`.
- *time*: processor time of forward and backward, together relative to apart, in chunks of 1,024 tokens. Measured
  {times}.

{table}

Reasoning and answer of a turn are computed once when they are trained. The answer is computed once more, as history of
later turns. Sharing saves more matrix products than attention, so at the same length it saves more in a wide model than
in a narrow one. It saves more if the reasoning is short. Operations of Qwen3-8B, together relative to apart (counted,
not measured):

{counted}
"""

COMPLETIONS = """# Completions that share turns

This page shows how much time `dpo` and `grpo` save by computing the common beginning of two completions once.

```
{command}
```

Versions: {versions}; one thread, fp32.

The two completions of a pair begin with the same turns. A group of eight is four such pairs after one prompt. The
prompt is a quarter of one row (the prompt and one completion).

- *tokens of one*: tokens of the prompt and one completion.
- *shared*: share of a completion's tokens that the pair has in common.
- *apart*: computed tokens if every completion is a row with its own copy of the prompt.
- *prompt once*: computed tokens if every completion is a branch of one prompt.
- *together*: computed tokens if the common beginning of completions is computed once, too.
- *time of together*: processor time of forward and backward, relative to the layout *prompt once* or *apart*, in
  chunks of 1,024 tokens. Measured {times}. The models have {model}.

{table}

Loss and gradient are the same in all three layouts. The log-probability of a shared token is used for each completion
that contains it. The gradient of a shared token is the sum over these completions.
"""


if __name__ == "__main__":
    main()
