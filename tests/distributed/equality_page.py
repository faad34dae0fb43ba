"""docs/reference/equality.md: how much gradients and losses of several ranks differ from one rank.

python -m tests.distributed.equality_page          # from what `make test-distributed` has noted
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.precision_kit import ROUNDING

__all__ = ["note"]

ROOT = Path(__file__).parents[2]
NOTES, PAGE = ROOT / "build/distributed/equality.jsonl", ROOT / "docs/reference/equality.md"
Noted = Mapping[str, Any]
ENGINES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP2"}
COLUMNS: dict[str, Callable[[Noted], bool]] = {
    "sft": lambda case: plain(case) and case.get("finetuning") != "lora" and case.get("objective") != "dpo",
    "sft, LoRA": lambda case: plain(case) and case.get("finetuning") == "lora" and case.get("objective") != "dpo",
    "dpo": lambda case: plain(case) and case.get("finetuning") != "lora" and case.get("objective") == "dpo",
    "dpo, LoRA": lambda case: plain(case) and case.get("finetuning") == "lora" and case.get("objective") == "dpo",
    "SP 2, Ulysses": lambda case: shared(case) == (2, "ulysses"),
    "SP 2, ring": lambda case: shared(case) == (2, "ring"),
    "SP 4, Ulysses": lambda case: shared(case) == (4, "ulysses"),
    "SP 4, ring": lambda case: shared(case) == (4, "ring"),
}
TEXT = """\
# Several ranks, the gradient of one

Written by `make test-distributed`, which fails where a figure is not what it should be.

Ranks train in fp32 over gloo on {machine}. The truth is plain autograd in fp64,
unstreamed, in one process over the rows of all ranks. Rows are ragged, prompts are masked, ranks have different numbers
of rows, tokens and targets, and in the last of three steps one has no row at all. Layers are computed in chunks of 5
tokens and the head in chunks of 7.

## Gradients

The relative error (norm of the difference over the norm) of the gradient of the worst parameter, of the worst step, of
all cases that a column stands for: accumulation 1 and 4 (2 for dpo on shared sequences), Llama, Gemma-2 and Qwen3, tied
embeddings, and gradients that were dropped before the step. SP 2 on 4 ranks is two groups of two. The bound of each
gradient of n entries is 1.1 (1 + 3 / sqrt(n)) times the worst error of plain autograd in fp32, and {rounding:.1e}.

{gradients}
Of the worst of all, plain autograd in fp32 in one process is off by {plain}.

## Losses

The largest difference of a loss, over 20 steps of a run and two evaluations, from the run on one rank: sft with all
weights, sft with LoRA on packed rows, dpo. The bound is 1e-4.

{curves}
"""


def note(figure: Noted) -> None:
    """Record a figure for the page, if ``STREAMTUNE_EQUALITY`` is set."""
    if os.environ.get("STREAMTUNE_EQUALITY"):
        NOTES.parent.mkdir(parents=True, exist_ok=True)
        with NOTES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figure) + "\n")


def plain(case: Noted) -> bool:
    """Return True if each rank has its own sequences."""
    return case.get("sequence", 1) == 1


def shared(case: Noted) -> tuple[int, str]:
    """Return how many ranks share a sequence, and in which form."""
    return case.get("sequence", 1), case.get("form", "")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), ["---"] * len(list(head)), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def worst(figures: Iterable[Noted], key: str) -> str:
    """Return the largest value of a figure; None if there is no value."""
    found = [figure[key] for figure in figures]
    return f"{max(found):.1e}" if found else ""


def main() -> None:
    """Write the page."""
    noted = [json.loads(line) for line in NOTES.read_text(encoding="utf-8").splitlines()]
    gradients = [figure for figure in noted if "gradient" in figure]
    rows = []
    for ranks in (2, 4):
        for engine, name in ENGINES.items():
            own = [f for f in gradients if f["ranks"] == ranks and f["case"]["engine"].partition("_")[0] == engine]
            cells = [worst([f for f in own if which(f["case"])], "gradient") for which in COLUMNS.values()]
            rows.append([str(ranks), name, *cells])
    furthest = max(gradients, key=lambda figure: figure["gradient"])
    curves = [figure for figure in noted if "curve" in figure]
    lines = [
        [
            str(ranks),
            name,
            *(worst(_of(curves, ranks, engine, objective, tuning), "curve") for objective, tuning in RUNS),
        ]
        for ranks in (2, 4)
        for engine, name in ENGINES.items()
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))
    PAGE.write_text(
        TEXT.format(
            machine=f"the CPU ({versions})",
            rounding=ROUNDING,
            gradients=table(["ranks", "engine", *COLUMNS], rows),
            plain=f"{furthest['torch']:.1e}",
            curves=table(["ranks", "engine", "sft", "sft, LoRA, packed", "dpo"], lines).rstrip(),
        ),
        encoding="utf-8",
    )
    print(f"{PAGE.relative_to(ROOT)} is written from {len(noted)} cases")


RUNS = (("sft", "full"), ("sft", "lora"), ("dpo", "full"))


def _of(curves: Iterable[Noted], ranks: int, engine: str, objective: str, tuning: str) -> list[Noted]:
    found = []
    for figure in curves:
        settings = figure["case"]["settings"]
        own = settings.get("deepspeed", "fsdp" if settings.get("fsdp") else "ddp")
        if (figure["ranks"], own, figure["case"]["objective"]) == (ranks, engine, objective):
            found += [figure] if settings.get("finetuning_type") == tuning else []  # others are of another model
    return found


if __name__ == "__main__":
    main()
