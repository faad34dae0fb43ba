"""``make faults``: every suite whole, then docs/reference/reliability.md with what it found.

    python -m tests.faults [SUITE ...] [--again] [--report-only]

``--again`` runs of the suites only the tests that failed in the run before; the page says so.

A suite that is not here yet is said to be missing. Others join by a line in :data:`SUITES`, and tell figures with
``figures.tell``. Suites that are run alone replace what :data:`RECORD` says of them; without names it begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamtune.train.progress import format_duration
from tests.faults.reliability import write_page

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "build/faults"
RECORD = ROOT / "docs/reference/reliability.json"
"""Source of the page: the last outcome and the figures of every suite."""

SUITES = {
    # name -> what pytest is given; a bench is run as it is
    "kill": "tests/faults/test_kill.py",
    "crash": "tests/faults/test_crash.py",
    "disk": "tests/faults/test_disk.py",
    "flips": "tests/faults/test_flips.py",
    "kept": "tests/faults/test_kept_files.py",
    "phases": "tests/faults/test_phases.py",
    "signals": "tests/faults/test_signals.py",
    "steps": "tests/faults/test_steps.py",
    "resume": "tests/faults/test_resume.py",
    "starts": "tests/faults/test_starts.py",
    "changed": "tests/faults/test_changed.py",
    "ranks": "tests/faults/test_ranks.py",
    "rank_saves": "tests/faults/test_rank_saves.py",
    "recipes": "tests/faults/test_recipes.py",
    "canaries": "tests/faults/test_canaries.py",
    "templates": "tests/faults/test_templates.py",
    "paths": "tests/faults/test_paths.py",
    "files": "tests/faults/test_data_files.py",
    "secrets": "tests/faults/test_secrets.py",
    "offline": "tests/faults/test_offline.py",
    "attacks": "tests/faults/test_attacks.py",
    "strangers": "tests/faults/test_strangers.py",
    "patterns": "tests/faults/test_patterns.py",
    "misuse": "tests/faults/test_misuse.py",
    "one_error": "tests/faults/test_one_error.py",
    "saving": "tests/faults/bench_saving.py",
}


def main(arguments: list[str]) -> int:
    """Run the suites that are named, or all; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Run fault suites, and write the page.")
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"suites to run, by default all: {', '.join(SUITES)}"
    )
    parser.add_argument("--again", action="store_true", help="run only the tests that failed in the run before")
    parser.add_argument("--report-only", action="store_true", help="run nothing, and write the page")
    options = parser.parse_args(arguments)
    named = options.suites
    if unknown := [name for name in named if name not in SUITES]:
        parser.error(f"no suite {', '.join(unknown)}; choose from {', '.join(SUITES)}")
    kept = FIGURES / "suites.json"
    if not options.report_only:
        if not named:
            shutil.rmtree(FIGURES, ignore_errors=True)  # a figure that is not measured now is not on the page
        for name in named or SUITES:
            before = _read(kept)
            outcome = {**before, name: asdict(run_suite(name, before.get(name) if options.again else None))}
            FIGURES.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(outcome, indent=1) + "\n")
    whole = not named and not options.report_only
    record = _updated({} if whole else _read(RECORD), kept)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    found = {name: Outcome(**values) for name, values in record["suites"].items()}
    told = {name: str(found[name]) if name in found else "not run" for name in SUITES}
    page = ROOT / "docs/reference/reliability.md"
    write_page(page, record["figures"], told, machine(), record["attacks"])
    failed = [name for name in named or SUITES if name in found and found[name].outcome == "failed"]
    print("docs/reference/reliability.md is written" + (f"; {', '.join(failed)} failed" if failed else ""))
    return 1 if failed else 0


def _updated(record: dict[str, Any], kept: Path) -> dict[str, Any]:
    """Return the record with what was measured now in the place of what was measured before."""
    figures = {path.stem: json.loads(path.read_text()) for path in sorted(FIGURES.glob("*.json")) if path != kept}
    attacks = [json.loads(path.read_text()) for path in sorted((FIGURES / "attacks").glob("*.json"))]
    return {
        "suites": {**record.get("suites", {}), **_read(kept)},
        "figures": {**record.get("figures", {}), **figures},
        "attacks": attacks or record.get("attacks", []),
    }


@dataclass(frozen=True)
class Outcome:
    """How a suite ended, and of which state of the project that is said."""

    outcome: str
    """``passed``, ``failed`` or ``missing``"""
    seconds: int
    commit: str
    again: str = ""
    """The commit at which what had failed was run again, alone."""

    def __str__(self) -> str:
        said = f"{self.outcome} in {format_duration(self.seconds)} at {self.commit}"
        return f"{said}; what had failed there was run again at {self.again}" if self.again else said


def run_suite(name: str, before: dict[str, Any] | None = None) -> Outcome:
    """Run it in a process of its own, or what failed of it ``before``; its figures are written into :data:`FIGURES`."""
    started, commit = time.monotonic(), _commit()
    if not (ROOT / SUITES[name]).exists():
        print(f"{name}: {SUITES[name]} is missing")
        return Outcome("missing", 0, commit)
    environment = {**os.environ, "STREAMTUNE_FAULTS": str(FIGURES)}
    how = ["-m", "tests.faults.bench_saving"] if name == "saving" else ["-m", "pytest", "-q", "-m", "", SUITES[name]]
    command = [sys.executable, *how, *(["--last-failed"] if before and name != "saving" else [])]
    code = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
    outcome = Outcome("failed" if code else "passed", round(time.monotonic() - started), commit)
    if before:
        outcome = Outcome(outcome.outcome, before["seconds"], before["commit"], again=commit)
    print(f"{name}: {outcome}", flush=True)
    return outcome


def _commit() -> str:
    """The state of the project: ``1a2b3c4``, and ``1a2b3c4-dirty`` where more than the page itself is not committed."""

    def answer(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()

    commit = answer("describe", "--always", "--exclude", "*")
    page = ":(exclude)docs/reference/reliability.*"
    changed = answer("status", "--porcelain", "--untracked-files=no", "--", ".", page)
    return (commit + ("-dirty" if changed else "")) or "no commit"


def _read(kept: Path) -> dict[str, Any]:
    return json.loads(kept.read_text()) if kept.exists() else {}


def machine() -> str:
    """Where the figures are from."""
    import torch
    import transformers

    parts = (
        platform.system(),
        f"{os.cpu_count()} cores",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"transformers {transformers.__version__}",
    )
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
