"""Count, write the page with its figures and its picture, and fail if a bound breaks.

python -m benchmarks.communication [FOLDER]
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.communication.tables import CHUNKS, ENGINES, TABLES, Row, broken, measured, reference
from streamtune.base.palette import INK, to_png

Tables = dict[str, tuple[list[Row], str | None]]

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP2"}
SHOWN = {"ordinary": "checkpointing"}
"""Mode -> its name in the tables, if it is another."""
COLOURS = {"plain": "#8a909c", "ordinary": "#e4572e", "streaming": "#2f6fde", "naive": "#f0a202"}

MEANING = """
| mode | computation |
|---|---|
| plain | the model of `transformers` on the whole sequence |
| checkpointing | *plain* with gradient checkpointing |
| streaming | `streamtune.stream` with D chunks per sequence |
| naive | D forwards and backwards with gradient checkpointing, each with the loss of 1/D of the tokens |

- All modes of a backend compute the same gradient of the same rows (their gradient norms are compared, to 1e-5).
- A cell has *the number of collective calls, MiB* (or B) of one optimizer step on one rank, after two warm-up steps.
  The bytes of a call are the bytes of the whole gathered or reduced tensor.
- Calls are counted at the operators of `torch.distributed`, which DeepSpeed, DDP, FSDP2 and DTensor all use. Each run
  checks that DDP reduces exactly the bytes of its gradients, and that ZeRO-3 gathers exactly the bytes of its weights.
- The last columns are the bytes of the step relative to *plain* and to *checkpointing*. The command fails if streaming
  sends more than 1.01 times the bytes of either mode (with LoRA: of checkpointing). It also fails if the calls or bytes
  of streaming depend on the number of chunks.
- ZeRO-3 gathers weights a second time in the backward. With gradient checkpointing it gathers most weights a third
  time, because each module frees its gathered weights after the recomputation. With streaming it does not: the hooks
  around a layer's call keep the layer's weights gathered while its autograd node computes.
- Naive chunks cost nothing with DDP and ZeRO-1: a rank stores its whole gradient, and reduces it after the last chunk.
  ZeRO-2, ZeRO-3 and FSDP2 do not store a whole gradient, so they reduce after every backward.
- The model is small, so the backends are configured as for a large model, unless a table says otherwise. A reduction
  bucket has a fourth of the trained weights, and ZeRO-3 keeps no weights gathered between forward and backward. The
  persistence threshold, the prefetch size, `stage3_max_live_parameters` and `stage3_max_reuse_distance` are 0.
- DDP broadcasts the model's buffers. *step* includes the gradient norm and, with ZeRO-1 and 2, the new weights.
"""

NOTES = {
    "On the wire between two nodes": """\
Each rank is in its own network namespace, and a veth pair is the only connection. *sent* counts the bytes of the
network interface with headers (`tx` of `/proc/net/dev`), as the mean of five steps. For a reduce_scatter, gloo sends as
much as for an all_reduce. So these figures cannot be compared with NCCL's.""",
    "Sequences shared by two ranks": """\
Two ranks share each sequence. The last column has the bytes that they exchange for attention (all_to_all, or send in a
ring), per layer and chunk. Other bytes are for weights and gradients.""",
    "LoRA": """\
With adapters, plain training needs no backward before the first adapter. So ZeRO-3 does not gather the first layer's
attention weights again. Streaming always gathers a whole layer. With four layers the difference is visible; with 32
layers it is below 1%.""",
    "With the shipped presets' own values": """\
All gradients fit in one reduction bucket. ZeRO-3 keeps weights gathered until the backward, up to
`stage3_max_live_parameters` (1e9). The whole model is smaller than this limit.""",
}
"""Notes on single tables."""


def environment() -> dict[str, Any]:
    import deepspeed
    import torch
    import transformers

    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepspeed": deepspeed.__version__,
        "ranks": 2,
        "backend": "gloo",
    }


def render(env: dict[str, Any], tables: Tables) -> str:
    """Return the page; ``tables`` are title -> (rows, reason why there are none)."""
    first = next(rows[0] for rows, _ in tables.values() if rows)
    lines = [
        "# Bytes that ranks send in a step",
        "",
        "This page shows that streaming sends no more bytes between ranks than gradient checkpointing, "
        "for any number of chunks.",
        "",
        "```\nmake bench-comm\n```",
        "",
        f"The model is a Llama of 4 layers with {_mib(first.weight_bytes)} MiB of float32 weights. "
        "Each rank has a row of 128 tokens.",
        f"Measured with 2 ranks over gloo; {env['machine']}.",
        f"torch {env['torch']}, transformers {env['transformers']}, deepspeed {env['deepspeed']}, "
        f"Python {env['python']}.",
        "",
        "![Bytes of a step by backend and mode](communication.png)",
        "",
        "## What is measured",
        MEANING,
    ]
    for title, (rows, reason) in tables.items():
        lines += [f"## {title}", ""]
        if reason is not None:
            lines += [f"Not measured: {reason}.", ""]
            continue
        lines += [*([NOTES[title], ""] if title in NOTES else []), *_table(rows)]
    return "\n".join([*lines, "Figures by kind and phase: [communication.json](communication.json).", ""])


def _table(rows: Sequence[Row]) -> list[str]:
    wired, sequence = rows[0].sent is not None, "sequence" in rows[0].case
    head = ["backend", "mode", "D", "forward", "backward", "step", "calls", "MiB"]
    head += ["sent MiB", "sent / plain", "sent / checkpointing"] if wired else []
    head += ["KiB per layer and chunk"] if sequence else ["MiB / plain", "MiB / checkpointing"]
    lines = [_line(head), _line(["---", "---", *["---:"] * (len(head) - 2)])]
    before = ""
    for row in rows:
        engine = NAMES[row.case["engine"]]
        cells = [f"**{engine}**" if engine != before else "", _mode(row), _chunks(row)]
        cells += [_phase(row.traffic.get(phase, {})) for phase in ("forward", "backward", "step")]
        cells += [f"{row.calls:,}", _mib(row.bytes)]
        if row.sent is not None:
            cells += [_mib(row.sent), *(_ratio(list(rows), row, mode, "sent") for mode in ("plain", "ordinary"))]
        if sequence:
            cells.append(f"{_exchanged(row) / 4 / row.case['chunks'] / 2**10:,.1f}")
        else:
            cells += [_ratio(list(rows), row, mode, "bytes") for mode in ("plain", "ordinary")]
        lines.append(_line(cells))
        before = engine
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mode(row: Row) -> str:
    mode = SHOWN.get(row.case["mode"], str(row.case["mode"]))
    return f"{mode}, {row.case['form']}" if "form" in row.case else mode


def _chunks(row: Row) -> str:
    return str(row.case["chunks"]) if row.case["mode"] in ("streaming", "naive") else ""


def _phase(kinds: dict[str, list[int]]) -> str:
    return "<br>".join(f"{kind} {calls:,}, {_mib(size)}" for kind, (calls, size) in kinds.items()) or "-"


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}" if size >= 0.005 * 2**20 else f"{size:.0f} B"


def _ratio(rows: list[Row], row: Row, mode: str, what: str) -> str:
    other = reference(rows, row, mode)
    return "" if other is None else f"{getattr(row, what) / getattr(other, what):.3f}"


def _exchanged(row: Row) -> int:
    kinds = ("all_to_all", "send")
    return sum(size for found in row.traffic.values() for kind, (_, size) in found.items() if kind in kinds)


def draw(counted: list[Row], wired: list[Row], path: Path) -> None:
    """Draw bytes by backend and mode: counted, and on the wire if measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12 if wired else 8, 4.8), dpi=150, layout="constrained")
    left, *right = figure.subplots(1, 2, width_ratios=[6, 4]) if wired else [figure.subplots()]
    bars = [("plain", 1), ("ordinary", 1), *(("streaming", chunks) for chunks in CHUNKS), ("naive", 8)]
    _bars(left, counted, bars, "bytes", "Bytes of a step's collectives (MiB)")
    for axes in right:
        few = [(mode, chunks) for mode, chunks in bars if mode != "streaming" or chunks == 8]
        _bars(axes, wired, few, "sent", "Sent over the cable between two nodes in a step (MiB)")
    left.legend(frameon=False, labelcolor=INK, loc="upper left")
    path.write_bytes(to_png(figure, "What ranks send in a step"))


def _bars(axes: Any, rows: list[Row], bars: list[tuple[str, int]], what: str, title: str) -> None:
    engines = [engine for engine in ENGINES if any(row.case["engine"] == engine for row in rows)]
    shades = dict(zip(CHUNKS, ("#12305f", "#2f6fde", "#7fb4ff"), strict=True))
    names = {"plain": "plain", "ordinary": "gradient checkpointing", "naive": "naive, 8 chunks"}
    for place, (mode, chunks) in enumerate(bars):
        found = {row.case["engine"]: row for row in rows if (row.case["mode"], row.case["chunks"]) == (mode, chunks)}
        heights = [getattr(found[engine], what) / 2**20 for engine in engines if engine in found]
        left = [at + (place - (len(bars) - 1) / 2) * 0.84 / len(bars) for at in range(len(heights))]
        name = names.get(mode, f"streaming, {chunks} chunk{'s' if chunks > 1 else ''}")
        colour = shades[chunks] if mode == "streaming" else COLOURS[mode]
        drawn = axes.bar(left, heights, 0.8 / len(bars), color=colour, label=name)
        axes.bar_label(drawn, [f"{height:.0f}" for height in heights], color=INK, fontsize=7, padding=1)
    axes.set_xticks(range(len(engines)), [NAMES[engine] for engine in engines])
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.margins(y=0.1)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(folder: Path) -> int:
    """Measure every table, write after each, and return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    tables: Tables = {}
    for title, cases in TABLES.items():
        print(f"{title}: {len(cases)} cases on 2 ranks", flush=True)
        tables[title] = measured(title)
        if (reason := tables[title][1]) is not None:
            print(f"  left out: {reason}", flush=True)
        write(folder, tables)
    failures = [failure for found, _ in tables.values() for failure in broken(found)]
    print("\n".join(failures) or "streaming sends what training without it sends, on any number of chunks")
    print(folder / "communication.md")
    return bool(failures)


def write(folder: Path, tables: Tables) -> None:
    env = environment()
    figures = {title: [asdict(row) for row in rows] for title, (rows, _) in tables.items()}
    (folder / "communication.json").write_text(json.dumps({"environment": env, "tables": figures}, indent=1) + "\n")
    (folder / "communication.md").write_text(render(env, tables))
    wired = tables.get("On the wire between two nodes", ([], None))[0]
    draw(tables["One step"][0], wired, folder / "communication.png")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
