"""Show what the trained model wrote at the end of a run: to the prompts of the recipe, and to held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from rich.text import Text

from streamtune.base.secrets import plain

from .console import out

SHOWN_ANSWERS = 3
"""Held-out rows whose answers are printed; ``samples.jsonl`` has all."""


def print_samples(samples: Sequence[Mapping[str, Any]]) -> None:
    """Print what was asked and written; of held-out rows the first few, and how many were answered right.

    Args:
        samples: Lines of ``samples.jsonl``; those of held-out rows have ``right``.
    """
    own = [sample for sample in samples if "right" not in sample]
    rows = [sample for sample in samples if "right" in sample]
    for sample in own:
        for title, text, style in (("asked", sample["prompt"], ""), ("wrote", sample["completion"], "green")):
            out.print(Text(f"  {title}", style="dim"))
            out.print(Text(indent(plain(text.strip("\n")) or "(nothing)", "    "), style=style), soft_wrap=True)
    if not rows:
        return
    for sample in rows[:SHOWN_ANSWERS]:
        verdict = "right" if sample["right"] else f"wrong: {plain(' '.join(sample['expected'].split()))}"
        asked = plain(_last_line(str(sample["prompt"])))
        wrote = plain(" ".join(sample["completion"].split())) or "(nothing)"
        out.print(Text(f"  held out, after {sample['prompt_tokens']:,} tokens: {asked}", style="dim"), soft_wrap=True)
        style = "green" if sample["right"] else "red"
        out.print(Text.assemble("    ", (wrote, style), f"  ({verdict})"), soft_wrap=True)
    right = sum(bool(sample["right"]) for sample in rows)
    shortest, longest = (edge(sample["prompt_tokens"] for sample in rows) for edge in (min, max))
    span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    out.print(
        Text.assemble(
            "  answered ", (f"{right} of {len(rows)}", "bold"),
            f" held-out rows right, {span} tokens each; none of them was trained on",
        ),
        soft_wrap=True,
    )  # fmt: skip


def _last_line(prompt: str) -> str:
    """Return the last line of a prompt that is not the name of who speaks next."""
    lines = [line for line in prompt.split("\n") if line.strip()]
    if len(lines) > 1 and lines[-1].strip("<|>: ") in ("assistant", "model"):
        lines.pop()
    return lines[-1].strip() if lines else ""
