"""``make faults``: every suite whole, then docs/reliability.md with what it found.

    python -m tests.faults [SUITE ...] [--report-only]

A suite that is not here yet is said to be missing. Others join by a line in :data:`SUITES`, and tell figures with
``figures.tell``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.reliability import write_page

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "build/faults"

SUITES = {
    # name -> what pytest is given; a bench is run as it is
    "kill": "tests/faults/test_kill.py",
    "crash": "tests/faults/test_crash.py",
    "disk": "tests/faults/test_disk.py",
    "flips": "tests/faults/test_flips.py",
    "phases": "tests/faults/test_phases.py",
    "steps": "tests/faults/test_steps.py",
    "resume": "tests/faults/test_resume.py",
    "ranks": "tests/faults/test_ranks.py",
    "recipes": "tests/faults/test_recipes.py",
    "canaries": "tests/faults/test_canaries.py",
    "templates": "tests/faults/test_templates.py",
    "paths": "tests/faults/test_paths.py",
    "files": "tests/faults/test_data_files.py",
    "secrets": "tests/faults/test_secrets.py",
    "offline": "tests/faults/test_offline.py",
    "saving": "tests/faults/bench_saving.py",
}


def main(arguments: list[str]) -> int:
    """Run the suites that are named, or all; the exit code is 1 where one failed."""
    named = [argument for argument in arguments if not argument.startswith("--")] or list(SUITES)
    outcome: dict[str, Any] = {}
    kept = FIGURES / "suites.json"
    if kept.exists():
        outcome = json.loads(kept.read_text())
    if "--report-only" not in arguments:
        for name in named:
            outcome[name] = run_suite(name)
            FIGURES.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(outcome, indent=1) + "\n")
    figures = {path.stem: json.loads(path.read_text()) for path in sorted(FIGURES.glob("*.json")) if path != kept}
    write_page(
        ROOT / "docs/reliability.md", figures, {name: outcome.get(name, "not run") for name in SUITES}, machine()
    )
    failed = [name for name in named if outcome.get(name) == "failed"]
    print(f"docs/reliability.md is written; {', '.join(failed)} failed" if failed else "docs/reliability.md is written")
    return 1 if failed else 0


def run_suite(name: str) -> str:
    """``passed``, ``failed`` or ``missing``."""
    if not (ROOT / SUITES[name]).exists():
        print(f"{name}: {SUITES[name]} is missing")
        return "missing"
    started = time.monotonic()
    environment = {**os.environ, "STREAMTUNE_FAULTS": str(FIGURES)}
    how = ["-m", "tests.faults.bench_saving"] if name == "saving" else ["-m", "pytest", "-q", "-m", "", SUITES[name]]
    command = [sys.executable, *how]
    code = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
    print(f"{name}: {'passed' if code == 0 else 'failed'} in {time.monotonic() - started:.0f} s", flush=True)
    return "passed" if code == 0 else "failed"


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
