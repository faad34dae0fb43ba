"""All that a rented GPU can tell in 25 minutes: ``make gpu``, or

    python -m benchmarks.gpu [--only PIECE,...] [--again] [--page docs/benchmarks/gpu.md]

The pieces run one by one, the most telling first: exactness, then seconds and memory of a step beside checkpointing,
what the planner takes the device for, the tables beside peers, and the longest rows. Each has its seconds, and those
that the pieces before it left over, 8 minutes at most; then it is ended. What a piece found is kept in ``build/gpu``: a
second start goes on behind the last whole one. Nothing needs a network. The page and one JSON document beside it are
written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamtune.programs.bench.modes import MODE_SETUPS, why_modes_unavailable
from streamtune.programs.bench.named_tables import TABLES, row_cells, table_columns, table_notes
from streamtune.programs.bench.table_rows import TableReport, TableRow

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "gpu"
LIMIT = 480
"""Seconds that a piece may take at most."""
TOTAL = 1500
"""Seconds that all pieces may take together."""
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
FULL = [
    word
    for key in ("finetuning_type=full", "bf16=false", "optim_in_backward=true", "max_grad_norm=0")
    for word in ("--set", key)
]
"""The recipe of the whole model, changed: every weight is trained, in bf16."""
WHOLE = 131_072
"""Tokens of its row."""
TRIED = 262_144
"""Tokens of the longest row that is tried: steps of more take too long for a piece."""
LENGTHS = (16384, 65536)
"""Tokens of the steps that are measured one by one."""
STARTING = 40
"""Seconds that a process is given to begin: libraries, and weights."""
RATES = (
    "matmul_flops",
    "attention_flops",
    "attention_backward_flops",
    "touch_bandwidth",
    "copy_bandwidth",
    "launch_seconds",
)
"""The rates that are measured on the device."""
STREAMTUNE = [sys.executable, "-m", "streamtune"]

Document = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """A measurement: what it finds out, in words, and how.

    Attributes:
        seconds: Its part of the time of all.
        measure: Measures until a time of ``time.monotonic``.
        render: Returns the lines of the page.
    """

    title: str
    seconds: int
    measure: Callable[[float], Document]
    render: Callable[[Document], list[str]]


def run(until: float, *command: str) -> str:
    """Run a command of this environment until a time at most; return what it prints on stdout.

    Raises:
        RuntimeError: It failed, or the time was over; its last words are in the message.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    pipe, group = subprocess.PIPE, {"cwd": ROOT, "env": environment, "start_new_session": True}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **group) as child:  # type: ignore[call-overload]
        try:
            out, err = child.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"its time was over: {' '.join(command)}") from None
        finally:
            if child.poll() is None:  # with the processes that it started, which hold the device
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}: {(out + err)[-2000:]}")
    return str(out)


def settings(values: Document) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"model.init.{key}={value}")]


def environment(until: float) -> Document:
    found: Document = json.loads(run(until, *STREAMTUNE, "env", "--json"))
    return found


def tests(until: float) -> Document:
    report = KEPT / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-m", "", "-p", "no:cacheprovider"]
    # Of what a machine has beside: a plugin that refuses to share its processors, and packages not compiled yet.
    command += ["-p", "no:benchmark", "-W", "ignore::SyntaxWarning"]
    if find_spec("xdist"):  # models are tiny: most of the time is the processors'
        command += ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "loadgroup"]
    command.append(f"--junitxml={report}")
    try:
        run(until, *command)
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


def verified(until: float) -> Document:
    """Run ``streamtune verify`` on a small model of each family."""
    found = {}
    for family in FAMILIES:
        model = settings({"model_type": family, "num_hidden_layers": 2})
        try:
            command = [*STREAMTUNE, "verify", "recipes/bench.yaml", *model, "--length", "4096", "--json"]
            said = json.loads(run(until, *command))
            found[family] = {"exact": said["exact"], "worst": said["worst"]}
        except RuntimeError as error:
            found[family] = {"exact": False, "error": str(error)}
    return found


def written(until: float, path: Path, module: str, *options: str) -> Document:
    """Run a module of the benchmarks and return the figures that it writes to a file, also where it was ended."""
    path.unlink(missing_ok=True)
    try:
        run(until, sys.executable, "-m", f"benchmarks.{module}", *options, "--json", str(path))
    except RuntimeError as error:
        if not path.exists():
            raise
        return {**json.loads(path.read_text(encoding="utf-8")), "ended": str(error)}
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    return found


def steps(until: float, length: int, *options: str) -> Document:
    """Measure a step of every schedule at a length."""
    path = KEPT / f"steps-{length}.json"
    return written(until, path, "gpu_pieces", "step", "--layers", str(LAYERS), "--lengths", str(length), *options)


def calibration(until: float) -> Document:
    """Measure the rates of the device, and predict the steps that were measured before."""
    measured = [str(path) for length in LENGTHS if (path := KEPT / f"steps-{length}.json").exists()]
    return written(until, KEPT / "calibration.json", "predicted", "calibration", *measured)


def table(until: float, name: str, *options: str) -> Document:
    """Measure a table of ``streamtune bench`` beside the peers; one that changes its process for good has its own.

    A table that was ended has the rows that were measured.
    """
    model = settings({"model_type": "qwen3", **LARGE})
    schedule = json.dumps({"chunk_size": 8192, "head_chunk_size": 2048})
    model += ["--set", "dtype=bfloat16", "--set", f"engine={schedule}"]
    together = [mode for mode, way in MODE_SETUPS.items() if not way.alone]
    compares = TABLES[name].compares_modes
    alone = [mode for mode, way in MODE_SETUPS.items() if compares and way.alone and not way.why_unavailable("cuda")]
    found: Document = {"tables": []}
    for number, modes in enumerate([together, *(["plain", "checkpoint", mode] for mode in alone)]):
        folder = KEPT / f"{name}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        command = ["bench", "recipes/bench.yaml", "--table", name, "--modes", ",".join(modes), *options, *model]
        try:
            run(until, *STREAMTUNE, *command, "--output-dir", str(folder))
        except RuntimeError as error:
            if not any(folder.glob("*.json")):
                raise
            found["ended"] = str(error)
        [path] = folder.glob("*.json")
        found["tables"].append(json.loads(path.read_text(encoding="utf-8")))
    missing = why_modes_unavailable([*MODE_SETUPS], "cuda") if compares else {}
    found["absent"] = {mode: why for mode, why in missing.items() if mode not in alone}
    return found


def whole(until: float) -> Document:
    """Measure a training step of all of Qwen3-8B: AdamW on all weights in bf16, in the backward."""
    path = KEPT / f"whole-{WHOLE}.json"
    path.unlink(missing_ok=True)
    options = ["--length", str(WHOLE), "--repeats", "2"]
    run(until, sys.executable, "-m", "benchmarks.gpu_pieces", "whole", *FULL, *options, "--json", str(path))
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    return found


def peers(until: float) -> Document:
    """Find the longest row of each mode and peer, forward and backward."""
    seconds = str(max(10.0, until - time.monotonic() - STARTING))
    return written(until, KEPT / "peers.json", "gpu_pieces", "longest", "--layers", str(LAYERS), "--seconds", seconds)


def simulated(until: float) -> Document:
    """Simulate the longest rows of plain autograd, checkpointing and streaming in the memory of the device."""
    import torch

    size = torch.cuda.get_device_properties(0).total_memory
    return table(until, "max-length", "--device-memory", f"{size}B", "--method", "simulate")


def longest(until: float) -> Document:
    """Find the longest row that trains with and without streaming: AdamW on all weights in bf16."""
    model = settings({"model_type": "qwen3", **LARGE})
    bounds = ["--from", "16384", "--to", str(TRIED), "--trial-timeout", "90"]
    options = ["--set", "dtype=bfloat16", "--set", "engine={schedule: auto}", "--baseline", *bounds]
    folder = str(KEPT / "longest")
    command = ["probe-max-len", "recipes/bench.yaml", *model, *options, "--output-dir", folder, "--json"]
    said = run(until, *STREAMTUNE, *command)
    found: Document = json.loads(said)
    return found


def render_environment(found: Document) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    devices = ", ".join(str(device.get("model", device["name"])) for device in found["devices"])
    return [f"{devices}. {versions}.", "", "```json", json.dumps(found["attention"], indent=1), "```"]


def render_tests(found: Document) -> list[str]:
    lines = [f"{found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped (`tests/cuda`)."]
    return [*lines, *(f"- failed: `{name}`" for name in found["failed"])]


def render_verified(found: Document) -> list[str]:
    lines = ["| family | | worst parameter, relative to fp64 | plain autograd |", "|---|---|---:|---:|"]
    for family, said in found.items():
        worst = said.get("worst", {"error": float("nan"), "torch_error": float("nan")})
        outcome = "exact" if said["exact"] else "**not exact**"
        lines.append(f"| {family} | {outcome} | {worst['error']:.1e} | {worst['torch_error']:.1e} |")
    return lines


def render_steps(found: Document) -> list[str]:
    """Return a row for each mode, and the kernels that take most."""
    lines = [f"**Ended before it was whole**: {found['ended'][:200]}", ""] if "ended" in found else []
    lines += ["| tokens | mode | step | | peak |", "|---:|---|---:|---:|---:|"]
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


def render_calibration(found: Document) -> list[str]:
    """Return the rates beside those of the data sheet, and the steps beside their prediction."""
    measured, sheet = found["rates"]["measured"], found["rates"]["data sheet"]
    lines = [f"Measured: {measured['source']}. Planned with: {sheet['source']}.", ""]
    lines += ["| rate | measured | data sheet | |", "|---|---:|---:|---:|"]
    for name in RATES:
        ours, theirs = measured[name], sheet[name]
        lines.append(f"| {name} | {ours:.3g} | {theirs:.3g} | {ours / theirs:.2f}x |")
    lines += ["", "| tokens | mode | step | by measured rates | by the data sheet | peak | simulated | |"]
    lines += ["|---:|---|---:|---:|---:|---:|---:|---:|"]
    for row in found["rows"]:
        seconds, peak, share = row.get("error", ""), "", ""
        if "error" not in row:
            seconds, peak = f"{row['seconds']:.3f} s", f"{row['peak_bytes'] / GIB:.2f} GiB"
            share = f"{row['simulated_bytes'] / row['peak_bytes']:.3f}x"
        predicted = [f"{row['predicted_seconds'][name]:.3f} s" for name in found["rates"]]
        memory = [peak, f"{row['simulated_bytes'] / GIB:.2f} GiB", share]
        lines.append("| " + " | ".join([f"{row['length']:,}", row["mode"], seconds, *predicted, *memory]) + " |")
    return lines


def render_whole(found: Document) -> list[str]:
    """Return what was planned beside what was measured."""
    rows = {
        "seconds": (min(found["step_seconds"]), found["predicted_seconds"], "{:.1f}"),
        "GiB of the device": (found["peak_bytes"] / GIB, found["simulated_bytes"] / GIB, "{:.2f}"),
        "GiB of the host": (found["host_bytes"] / GIB, found["simulated_host_bytes"] / GIB, "{:.2f}"),
    }
    share = found["flops"] / min(found["step_seconds"]) / 1e12
    size = f"{found['parameters']:,} parameters, a row of {found['length']:,} tokens"
    lines = [f"{size}; {share:.0f} TFLOP/s of the operations that the model asks for."]
    command = (
        f"python -m benchmarks.gpu_pieces whole {' '.join(FULL)} --length {found['length']} --repeats 2 --json FILE"
    )
    lines += ["", "```", command, "```"]
    lines += ["", "| a step | measured | planned | |", "|---|---:|---:|---:|"]
    for name, (ours, planned, form) in rows.items():
        lines.append(f"| {name} | {form.format(ours)} | {form.format(planned)} | {planned / max(ours, 1e-9):.3f}x |")
    return lines


def render_table(found: Document) -> list[str]:
    """Return the tables of ``streamtune bench``, and the peers that are not in them."""
    lines = [f"**Ended before it was whole**: {found['ended'][:200]}", ""] if "ended" in found else []
    for document in found["tables"]:
        names = {field.name for field in fields(TableRow)}
        rows = [TableRow(**{key: value for key, value in row.items() if key in names}) for row in document["rows"]]
        report = TableReport(**{**document, "rows": rows, "absent": {}})
        shown = table_columns(report)
        lines += ["```", report.command, "```", ""]
        lines += ["| " + " | ".join(column.name for column in shown) + " |"]
        lines += ["|" + "|".join("---:" if column.right else "---" for column in shown) + "|"]
        lines += ["| " + " | ".join(row_cells(shown, row)) + " |" for row in rows]
        lines += ["", *(f"- {note}" for note in table_notes(report))]
    return [*lines, *(f"- {mode}: {why}." for mode, why in found["absent"].items())]


def render_peers(found: Document) -> list[str]:
    lines = [
        "One step of forward and backward, without an optimizer; rows of powers of two, and of three quarters of one. "
        "Seconds are of a second step, where there was time for two."
    ]
    lines += [f"**Ended before it was whole**: {found['ended'][:200]}"] if "ended" in found else []
    lengths = [str(length) for length in LENGTHS]
    titles = [f"{length:,} tokens" for length in LENGTHS]
    lines += ["", "| " + " | ".join(["mode", *titles, "longest row", "peak", ""]) + " |"]
    lines += ["|---|" + "---:|" * (len(titles) + 2) + "---|"]
    for row in found["rows"]:
        seconds = row.get("step_seconds", {})
        steps = [f"{seconds[length]:.2f} s" if length in seconds else "" for length in lengths]
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.1f} GiB"
        lines.append("| " + " | ".join([row["mode"], *steps, f"{row['fits']:,}", peak, row["stopped"]]) + " |")
    return [*lines, "", *(f"- {mode}: {why}." for mode, why in found["absent"].items())]


def render_longest(found: Document) -> list[str]:
    without = [f"{name} {tokens:,}" for name, tokens in (found.get("baseline") or {}).items()]
    return [f"Streaming {found['max_length']:,} tokens (none above {TRIED:,} was tried); {', '.join(without)}."]


PIECES = {
    "environment": Piece("Environment", 60, environment, render_environment),
    "tests": Piece("Exactness on the device", 180, tests, render_tests),
    "verify": Piece("Exactness of a model's every parameter", 90, verified, render_verified),
    "steps-16k": Piece("A step of 16,384 tokens", 120, lambda until: steps(until, 16384, "--profile"), render_steps),
    "steps-64k": Piece("A step of 65,536 tokens", 150, lambda until: steps(until, 65536), render_steps),
    "calibration": Piece("What is predicted and what is measured", 120, calibration, render_calibration),
    "whole": Piece("A whole model, by its plan", 190, whole, render_whole),
    "bp-time": Piece(
        "Time of a step beside the peers",
        110,
        lambda until: table(until, "bp-time", "--lengths", "16384", "--repeats", "2"),
        render_table,
    ),
    "memory": Piece(
        "Memory of a step beside the peers",
        90,
        lambda until: table(until, "memory", "--lengths", "16384"),
        render_table,
    ),
    "peers": Piece("The longest row beside the peers", 180, peers, render_peers),
    "longest": Piece("The longest row of a training step", 160, longest, render_longest),
    "max-length": Piece("The longest rows, simulated", 50, simulated, render_table),
}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write_page(found: Document, page: Path) -> None:
    lines = ["# One GPU", "", "```", "make gpu", "```", ""]
    lines += [f"A model is Qwen3-8B's shape with {LAYERS} layers and random weights in bf16, unless it says otherwise."]
    lines += ["", f"All pieces took {sum(figures['seconds'] for figures in found.values()):.0f} s."]
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
    failed, spare = False, 0.0
    for name in names:
        if name in found and "error" not in found[name] and not options.again:
            print(f"{name}: found before", flush=True)
            continue
        limit = min(LIMIT, PIECES[name].seconds + spare)
        print(f"{name}: {limit:.0f} s at most ...", flush=True)
        start = time.monotonic()
        figures: Document = {"commit": commit()}
        try:
            figures["found"] = PIECES[name].measure(start + limit)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            figures["error"], failed = str(error), True
        found[name] = {**figures, "seconds": time.monotonic() - start}
        spare = max(0.0, spare + PIECES[name].seconds - found[name]["seconds"])
        kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
        write_page(found, options.page)
        print(f"{name}: {'failed' if 'error' in figures else 'done'} in {found[name]['seconds']:.0f} s", flush=True)
    print(f"all pieces took {sum(figures['seconds'] for figures in found.values()):.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
