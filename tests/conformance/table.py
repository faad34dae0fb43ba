"""docs/reference/families.md from the findings: one line a name, sorted, so that another run gives a small diff."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.conformance.reducer import IMAGE_TEXT

__all__ = ["COMMAND", "outcomes", "render", "summary"]

COMMAND = "make conformance"
OUTCOMES = ("exact", "refused", "not a causal decoder", "not built", "crashed", "silently wrong")

HEAD = """\
# Families: what is streamed exactly

<!-- written by `{command}`; do not edit -->

Every name of the causal language models of `transformers` {version}, and of its classes for images and text
(`/image-text`, here with text alone), tried with a tiny random model of its class.
*Exact*: loss and the gradient of every parameter equal plain autograd's,
`||g - g_ref|| <= 2e-5 max(||g_ref||, 1e-3 ||G_ref||)` in fp32, for plain, masked, right- and left-padded batches of
3 x 37 tokens in training mode, in chunks of 13 by a plain schedule, and in chunks of 5 with layer inputs, their
gradients, keys, values and attention outputs on the host, over two levels; the largest error is in the table.
*Refused*: `stream()` or `handle.check()` says so before training, by name. *Not a causal decoder*: another last token
changes the outputs at earlier ones, or the class is no language model of its own.

{counts}

**{percent:.1f}%** of the {decoders} causal decoder families are exact, by their classes for text.

- *Not built*: the tiny configuration of a class for images and text could not be made from its keys alone, or the class
  needs a package that is not installed.

- *Dense tiles*: the layer computes its attention itself and is handed the chunk's tile of the mask; scores and mask of
  chunk x prefix exist at a time. Without this note nothing larger than a kernel's block does.
- *Dense mask*: the model computes with its mask before its layers, so the T x T mask exists once, as without streaming.
- *Settled in fp64*: the error in fp32 is above the bound; in fp64, where need be with what the model keeps in fp32
  widened too, it is rounding (at most 2e-6).

| family | outcome | largest error | notes |
|---|---|---|---|
"""


def outcome(category: str) -> str:
    """The category of a finding as the table has it."""
    return "refused" if category.startswith("refused") else category


def summary(rows: Sequence[dict[str, Any]]) -> tuple[Counter[str], int, float]:
    """Counts by outcome, the number of causal decoder families, and how many percent of them are exact."""
    counts = Counter(outcome(row["category"]) for row in rows)
    decoders = len(rows) - counts["not a causal decoder"]
    return counts, decoders, 100 * counts["exact"] / max(1, decoders)


def render(rows: Sequence[dict[str, Any]], version: str) -> str:
    """The whole file.

    Args:
        rows: Findings as dictionaries (name, category, reason, error, notes), in any order.
        version: Of transformers.
    """
    image_text = [row for row in rows if row["name"].endswith(IMAGE_TEXT)]
    counts, decoders, percent = summary([row for row in rows if row not in image_text])
    others, _, _ = summary(image_text)
    counted = "\n".join(
        ["| outcome | classes for text | classes for images and text |", "|---|---:|---:|"]
        + [f"| {name} | {counts[name]} | {others[name]} |" for name in OUTCOMES if counts[name] or others[name]]
        + [f"| all | {len(rows) - len(image_text)} | {len(image_text)} |"]
    )
    head = HEAD.format(command=COMMAND, version=version, counts=counted, percent=percent, decoders=decoders)
    return head + "".join(_line(row) for row in sorted(rows, key=lambda row: row["name"]))


def outcomes(text: str) -> dict[str, str]:
    """Outcome by name, read back from the file."""
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE))


def _line(row: dict[str, Any]) -> str:
    category = outcome(row["category"])
    error = f"{row['error']:.0e}" if category == "exact" else ""
    notes = [row["reason"], *row["notes"]] if category != "exact" else row["notes"]
    said = "; ".join(_cell(note) for note in notes if note)
    return f"| `{row['name']}` | {category} | {error} | {said} |\n"


def _cell(note: str) -> str:
    """The first line of a note, on one line, safe inside a table."""
    first = note.strip().partition("\n")[0]
    return first.replace("|", "\\|")
