"""The pictures of the README and of the page on the longest row.

    python -m benchmarks.readme_picture [--redraw] [--out docs/images]

``measured.png`` shows seconds and peak memory measured on a GPU, from ``docs/benchmarks/h200.json``.

``memory.png`` is simulated: memory over length, and the longest row. It is drawn from ``memory.json``, the results of
``streamtune probe-max-len recipes/qwen3-8b-long.yaml --method simulate`` for devices of 24 and 80 GiB, twice each: with
256 GiB of host memory and the baselines, and with no host memory, so that everything stays on the device. The four
searches take about half an hour on one CPU core; ``--redraw`` only draws.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from streamtune.base.palette import COLOURS, INK

RECIPE = "recipes/qwen3-8b-long.yaml"
DEVICES = {"80GiB": "h100-80gb", "24GiB": "rtx-4090"}
HOST = "256GiB"
H200 = Path("docs/benchmarks/h200.json")
GIB = 1 << 30

NAMES = {
    "plain": "plain autograd",
    "checkpoint": "gradient checkpointing",
    "liger-loss": "checkpointing, Liger's loss",
    "liger-loss-offload": "the same, layer inputs on the host",
    "device": "StreamTune, all on the device",
    "host": "StreamTune, with host memory",
}
MEASURED = {
    "checkpoint": ("transformers, checkpointing", COLOURS["checkpoint"]),
    "liger": ("Liger, checkpointing", COLOURS["liger"]),
    "stream": ("StreamTune", COLOURS["stream"]),
    "stream-host": ("StreamTune, activations on the host", COLOURS["stream-keep-attention"]),
}
BASELINES = ("plain", "checkpoint", "liger-loss", "liger-loss-offload")
PAINT = {
    **{mode: COLOURS[mode] for mode in BASELINES},
    "device": COLOURS["stream"],
    "host": COLOURS["stream-keep-attention"],
}


def search(memory: str, host: str, *, baseline: bool) -> dict[str, Any]:
    """Return the document of ``probe-max-len --method simulate --json``."""
    command = [sys.executable, "-m", "streamtune", "probe-max-len", RECIPE, "--method", "simulate", "--json"]
    command += ["--device", DEVICES[memory], "--device-memory", memory, "--host-memory", host]
    done = subprocess.run([*command, *(["--baseline"] if baseline else [])], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def collect() -> dict[str, Any]:
    found: dict[str, Any] = {"recipe": RECIPE, "devices": {}}
    for memory in DEVICES:
        on_host, on_device = search(memory, HOST, baseline=True), search(memory, "0GiB", baseline=False)
        longest = {mode: on_host["baseline"][mode] for mode in BASELINES}
        longest |= {"device": on_device["max_length"], "host": on_host["max_length"]}
        lines = {mode: points(on_host, mode) for mode in BASELINES}
        lines |= {"device": points(on_device, "stream"), "host": points(on_host, "stream")}
        found["devices"][memory] = {"longest": longest, "lines": lines, "torch": on_host["env"]["torch"]}
    return found


def points(found: dict[str, Any], mode: str) -> list[tuple[int, int]]:
    """Return the length and peak bytes of every trial of a mode that fits, by length."""
    return sorted((t["length"], t["peak_bytes"]) for t in found["trials"] if t["mode"] == mode and t["fits"])


def draw_measured(found: dict[str, Any], path: Path) -> None:
    """Draw the measured peak memory of a step, with its seconds, a group of bars for each way of training."""
    figure = Figure(figsize=(11, 3.6), dpi=160, layout="constrained")
    axes, place, ticks = figure.subplots(), 0.0, dict[float, str]()
    most = max(step["peak_gib"] for steps in found["steps"].values() for step in steps.values() if step)
    for kind, steps in found["steps"].items():
        ticks[place + (len(steps) - 1) / 2] = kind
        for mode, step in steps.items():
            name, colour = MEASURED[mode]
            size = step["peak_gib"] if step else 0
            said = f"{size:.1f} GiB, {step['seconds']:.3f} s" if step else "out of memory (139 GiB)"
            axes.barh(place, size, color=colour, height=0.8)
            axes.annotate(f" {name}: {said}", (size, place), va="center", color=INK, fontsize=11)
            place += 1
        place += 0.8
    axes.set_title(
        f"Measured on {found['card']}: a training step of one row of {found['tokens']:,} tokens",
        loc="left",
        color=INK,
        fontsize=12,
        fontweight="bold",
    )
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0, labelsize=11, colors=INK)
    axes.tick_params(axis="x", labelsize=11, colors=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * most)
    axes.set_xlabel("peak memory of the device, GiB", color=INK, fontsize=11)
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw memory over length for a device of 80 GiB, and the longest row for every device."""
    figure = Figure(figsize=(11, 5.4), dpi=160, layout="constrained")
    over_length, longest = figure.subplots(1, 2, width_ratios=(1.15, 1))
    draw_memory(over_length, found["devices"]["80GiB"]["lines"], 80)
    draw_longest(longest, {memory: of["longest"] for memory, of in found["devices"].items()})
    for axes in (over_length, longest):
        axes.tick_params(colors=INK, labelsize=11)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=INK, fontsize=11, columnspacing=1.6)
    FigureCanvasAgg(figure).print_png(str(path))


def draw_memory(axes: Any, lines: dict[str, list[tuple[int, int]]], memory: int) -> None:
    """Draw peak bytes over length, and the memory of the device as a line."""
    for mode, line in lines.items():
        known = [(length, size / GIB) for length, size in line]
        axes.plot(
            *zip(*known, strict=True), color=PAINT[mode], marker="o", markersize=4, linewidth=2.2, label=NAMES[mode]
        )
    axes.axhline(memory, color=INK, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"the device: {memory} GiB",
        (0.99, memory),
        xytext=(0, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color=INK,
        fontsize=11,
    )
    axes.set_title("Peak memory of a training step, GiB", loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_xlabel("tokens in the row", color=INK, fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.12 * memory)
    axes.minorticks_off()
    shown = [1 << power for power in range(11, 22, 2)]
    axes.set_xticks(shown, [tokens(length) for length in shown])
    axes.set_xlim(left=1 << 11)
    axes.grid(alpha=0.25)


def draw_longest(axes: Any, longest: dict[str, dict[str, int]]) -> None:
    """Draw a bar with its number for every device and mode, devices as groups from the smallest down."""
    most = max(max(of.values()) for of in longest.values())
    place, ticks = 0.0, dict[float, str]()
    for memory, of in sorted(longest.items(), key=lambda item: max(item[1].values())):
        ticks[place + (len(of) - 1) / 2] = memory.replace("GiB", " GiB")
        for mode, length in of.items():
            axes.barh(place, length, color=PAINT[mode], height=0.8)
            axes.annotate(f" {length:,}", (length, place), va="center", color=INK, fontsize=11)
            place += 1
        place += 0.8
    axes.set_title("Longest row that trains, tokens", loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * most)
    axes.xaxis.set_major_formatter(lambda value, position: tokens(int(value)))
    axes.set_xlabel("tokens in the row", color=INK, fontsize=11)
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)


def tokens(number: int) -> str:
    """Return a number of tokens in thousands or millions, of 1,024 where it is a power of two."""
    base = 1024 if number & (number - 1) == 0 else 1000
    if number >= base * base:
        return f"{number / base**2:g}M"
    return f"{number / base:g}K" if number else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="draw memory.json again")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    figures: Path = arguments.out / "memory.json"
    if not arguments.redraw:
        figures.parent.mkdir(parents=True, exist_ok=True)
        figures.write_text(json.dumps(collect(), indent=1) + "\n")
    draw(json.loads(figures.read_text()), arguments.out / "memory.png")
    draw_measured(json.loads(H200.read_text()), arguments.out / "measured.png")


if __name__ == "__main__":
    main()
