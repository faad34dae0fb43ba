"""All that a rented GPU can tell in 25 minutes: ``make gpu``, or

    python -m benchmarks.gpu [--only PIECE,...] [--again] [--page docs/benchmarks/gpu.md]

The pieces run one by one, the most telling first: exactness, then seconds and memory of a step beside checkpointing,
then the longest row. Each ends in 8 minutes, or is ended. What a piece found is kept in ``build/gpu``: a second start
goes on behind the last whole one. Nothing needs a network. The page and one JSON document beside it are written after
each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "gpu"
LIMIT = 480
"""Seconds of a piece."""
GIB = 1024**3
FAMILIES = ("qwen3", "llama", "gemma2")
LAYERS = 8
LARGE = {
    "hidden_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 1 << 24,
}
"""Qwen3-8B with fewer layers."""
TRIED = 262_144
"""Tokens of the longest row that is tried: steps of more take too long for a piece."""
STREAMTUNE = [sys.executable, "-m", "streamtune"]

Document = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A measurement: what it finds out, in words, and how."""

    title: str
    measure: Callable[[], Document]
    render: Callable[[Document], list[str]]


def run(*command: str) -> str:
    """Run a command of this environment in the time of a piece; return what it prints on stdout.

    Raises:
        RuntimeError: It failed; its last words are in the message.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def settings(values: Document) -> list[str]:
    """Return ``--set`` for every key of the recipe's model."""
    return [word for key, value in values.items() for word in ("--set", f"model.init.{key}={value}")]


def environment() -> Document:
    """Return versions, devices and kernels."""
    found: Document = json.loads(run(*STREAMTUNE, "env", "--json"))
    return found


def tests() -> Document:
    """Run the tests of the device."""
    report = KEPT / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    try:
        run(*command)
    except RuntimeError:
        if not report.exists():
            raise
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "passed": sum(case.find("skipped") is None for case in cases) - len(failed),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def verified() -> Document:
    """Run ``streamtune verify`` on a small model of each family."""
    found = {}
    for family in FAMILIES:
        model = settings({"model_type": family, "num_hidden_layers": 2})
        try:
            said = json.loads(run(*STREAMTUNE, "verify", "recipes/bench.yaml", *model, "--length", "4096", "--json"))
            found[family] = {"exact": said["exact"], "worst": said["worst"]}
        except RuntimeError as error:
            found[family] = {"exact": False, "error": str(error)}
    return found


def steps(length: int, *options: str) -> Document:
    """Measure a step of every mode at a length."""
    path = KEPT / f"steps-{length}.json"
    command = ["-m", "benchmarks.gpu_step", "--layers", str(LAYERS), "--lengths", str(length), "--json", str(path)]
    run(sys.executable, *command, *options)
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    return found


def longest() -> Document:
    """Find the longest row that trains with and without streaming: AdamW on all weights in bf16."""
    model = settings({"model_type": "qwen3", **LARGE})
    bounds = ["--from", "16384", "--to", str(TRIED), "--trial-timeout", "90"]
    options = ["--set", "dtype=bfloat16", "--set", "engine={schedule: auto}", "--baseline", *bounds]
    folder = str(KEPT / "longest")
    said = run(*STREAMTUNE, "probe-max-len", "recipes/bench.yaml", *model, *options, "--output-dir", folder, "--json")
    found: Document = json.loads(said)
    return found


def render_environment(found: Document) -> list[str]:
    """Return the versions and the device."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    devices = ", ".join(str(device.get("model", device["name"])) for device in found["devices"])
    return [f"{devices}. {versions}.", "", "```json", json.dumps(found["attention"], indent=1), "```"]


def render_tests(found: Document) -> list[str]:
    """Return the counts and the names of what failed."""
    lines = [f"{found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped (`tests/cuda`)."]
    return [*lines, *(f"- failed: `{name}`" for name in found["failed"])]


def render_verified(found: Document) -> list[str]:
    """Return a row for each family."""
    lines = ["| family | | worst parameter, relative to fp64 | plain autograd |", "|---|---|---:|---:|"]
    for family, said in found.items():
        worst = said.get("worst", {"error": float("nan"), "torch_error": float("nan")})
        outcome = "exact" if said["exact"] else "**not exact**"
        lines.append(f"| {family} | {outcome} | {worst['error']:.1e} | {worst['torch_error']:.1e} |")
    return lines


def render_steps(found: Document) -> list[str]:
    """Return a row for each mode, and the kernels that take most."""
    lines = ["| tokens | mode | step | | peak |", "|---:|---|---:|---:|---:|"]
    base = next((row.get("seconds") for row in found["rows"] if row["mode"] == "checkpoint"), None)
    for row in found["rows"]:
        if "error" in row:
            lines.append(f"| {row['length']:,} | {row['mode']} | {row['error']} | | |")
            continue
        ratio = f"{row['seconds'] / base:.2f}x" if base else ""
        peak = row["peak_bytes"] / GIB
        lines.append(f"| {row['length']:,} | {row['mode']} | {row['seconds']:.3f} s | {ratio} | {peak:.1f} GiB |")
    for row in found["rows"]:
        if "profile" in row:
            profile = row["profile"]
            busy = f"{profile['device_seconds']:.3f} s on the device, {profile['kernels']:,} launches"
            lines += ["", f"{row['mode']}: {busy}.", "", "| kernel | calls | ms |", "|---|---:|---:|"]
            for name, count, seconds in profile["top"]:
                lines.append(f"| `{name.replace('|', '/')}` | {count:,} | {1000 * seconds:.1f} |")
    return lines


def render_longest(found: Document) -> list[str]:
    """Return the longest rows."""
    without = [f"{name} {tokens:,}" for name, tokens in (found.get("baseline") or {}).items()]
    return [f"Streaming {found['max_length']:,} tokens (none above {TRIED:,} was tried); {', '.join(without)}."]


PIECES = {
    "environment": Piece("Environment", environment, render_environment),
    "tests": Piece("Exactness on the device", tests, render_tests),
    "verify": Piece("Exactness of a model's every parameter", verified, render_verified),
    "steps-16k": Piece("A step of 16,384 tokens", lambda: steps(16384, "--profile"), render_steps),
    "steps-64k": Piece("A step of 65,536 tokens", lambda: steps(65536), render_steps),
    "longest": Piece("The longest row", longest, render_longest),
}


def commit() -> str:
    """Return the commit that is measured."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write_page(found: Document, page: Path) -> None:
    """Write the page, and the figures beside it."""
    lines = ["# One GPU", "", "```", "make gpu", "```", ""]
    lines += [f"A model is Qwen3-8B's shape with {LAYERS} layers and random weights in bf16, unless it says otherwise."]
    for name, piece in PIECES.items():
        if name not in found:
            continue
        figures = found[name]
        lines += ["", f"## {piece.title}", "", f"At {figures['commit']}, in {figures['seconds']:.0f} s.", ""]
        lines += [f"**Failed**: {figures['error']}"] if "error" in figures else piece.render(figures["found"])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run what has not run; return 1 where a piece failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure a GPU, piece by piece.")
    parser.add_argument("--only", help=f"these of {', '.join(PIECES)}")
    parser.add_argument("--again", action="store_true", help="run also what was found before")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/benchmarks/gpu.md", help="where the page is written")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(PIECES)
    unknown = [name for name in names if name not in PIECES]
    if unknown:
        parser.error(f"there is no piece {unknown[0]!r}: {', '.join(PIECES)}")
    if options.only is None:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no CUDA device")
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / "found.json"
    found: Document = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    failed = False
    for name in names:
        if name in found and "error" not in found[name] and not options.again:
            print(f"{name}: found before", flush=True)
            continue
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        figures: Document = {"commit": commit()}
        try:
            figures["found"] = PIECES[name].measure()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            figures["error"], failed = str(error), True
        found[name] = {**figures, "seconds": time.monotonic() - start}
        kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
        write_page(found, options.page)
        print(f"{name}: {'failed' if 'error' in figures else 'done'} in {found[name]['seconds']:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
