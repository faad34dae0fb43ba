"""The tests of `make test` with other versions of what StreamTune needs, each set in an environment of its own.

python -m tests.versions                              # make test-versions: all of them, one after another
python -m tests.versions oldest                       # one
python -m tests.versions newest --tests tests/engine  # a part of the tests
python -m tests.versions oldest --install             # make the environment, run nothing
python -m tests.versions cuda                         # the pinned versions, with torch's build for CUDA

An environment is made once, and brought up to date each time it is used. Needs the standard library only, since it
runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOWER_BOUNDS = "LOWER BOUNDS"
"""Stands for a file of constraints made of the lower bounds in pyproject.toml."""
PINNED_TORCH = "PINNED TORCH"
"""Stands for the pinned torch without a local label, as PyPI has it: on Linux, built for CUDA."""

VERSIONS: dict[str, list[str]] = {
    # name of the environment: what pip is given besides the package; a new release of torch is one line
    "pinned": ["-c", "constraints.txt"],  # the tested versions; where the index gives torch for CUDA, that one
    "newest": ["--upgrade", "--upgrade-strategy", "eager"],  # what `pip install streamtune` takes today
    "oldest": ["-c", LOWER_BOUNDS],
    "cuda": ["-c", "constraints.txt", PINNED_TORCH],  # also where the index or a folder has a wheel for the CPU only
}
USUAL = ("pinned", "newest", "oldest")
"""What runs unless a name is given; the tests that need torch's build for CUDA are those of `make cuda-host`."""

QUICK = "not slow and not full"
"""Marks of `make test`."""
PEERS = ["liger-kernel"] if sys.platform == "linux" else []
"""Packages that are used where they are installed, and that tests try."""
SHOWN = ("torch", "transformers", "peft", "trl", "datasets", "deepspeed", "torchao", "bitsandbytes", "triton")


def main() -> int:
    """Make the environments and run the tests in each. Returns 1 if they failed in any, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(VERSIONS)}; without one, {', '.join(USUAL)}"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build/versions", help="holds the environments")
    parser.add_argument("--tests", nargs="+", default=[], metavar="ARG", help="tests to run")
    parser.add_argument("--install", action="store_true", help="make the environments, run nothing")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in VERSIONS]:
        parser.error(f"no environment is called {unknown[0]}; there are {', '.join(VERSIONS)}")

    lines, failed = [], False
    for name in options.names or USUAL:
        started = time.monotonic()
        folder = options.folder.resolve() / name
        python, command = prepare(folder, VERSIONS[name])
        print("$", *command, flush=True)
        if code := subprocess.run(command, cwd=ROOT).returncode:
            return code  # for instance because no set of versions agrees; pip has printed why
        code = 0 if options.install else run_tests(python, options.tests)
        failed = failed or code != 0
        outcome = "installed" if options.install else "passed" if code == 0 else f"failed (pytest exited {code})"
        day = date.today().isoformat()  # what is newest, and what the lower bounds resolve to, changes from day to day
        lines.append(f"{name:<8} {day} {outcome}, {time.monotonic() - started:.0f} s: {describe(python)}")
    print("\n".join(["", *lines]))
    return int(failed)


def prepare(folder: Path, arguments: list[str]) -> tuple[Path, list[str]]:
    """Make a virtual environment in ``folder`` unless it is there.

    Returns:
        Its python, and the command that installs the package and what its tests need; to be run in ``ROOT``.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    bounds = folder / "lower-bounds.txt"
    bounds.write_text(lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8")), encoding="utf-8")
    pinned = pinned_torch((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    meant = {LOWER_BOUNDS: str(bounds), PINNED_TORCH: pinned}
    given = [meant.get(argument, argument) for argument in arguments]
    options = ["--quiet", "--disable-pip-version-check", "--use-pep517"]
    return python, [str(python), "-m", "pip", "install", *options, *given, "-e", ".[dev]", *PEERS]


def run_tests(python: Path, arguments: list[str]) -> int:
    """Run the tests of this tree with ``python``; returns the exit code of pytest."""
    command = [str(python), "-m", "pytest", "-n", "2", "--durations=10", "--durations-min=1", "-m", QUICK, *arguments]
    print("$", *command, flush=True)
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


def lower_bounds(pyproject: str) -> str:
    """Return pip's constraints for the lowest versions of all that a user installs: ``>=5.17`` gives ``==5.17.*``."""
    project = tomllib.loads(pyproject)["project"]
    lines = []
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["quant"]]:
        found = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", requirement)
        if not found:
            raise ValueError(f"pyproject.toml: {requirement} has no lower bound (>=), so its oldest version is unknown")
        name, version = found.groups()
        lines.append(f"{name}=={version if '.' in version else f'{version}.0'}.*\n")
    return "".join(lines)


def pinned_torch(constraints: str) -> str:
    """Return the requirement of exactly the pinned torch: ``===`` does not take ``2.13.0+cpu`` for ``2.13.0``."""
    found = re.search(r"^torch==([0-9.]+)", constraints, re.MULTILINE)
    if not found:
        raise ValueError("constraints.txt does not name a version of torch")
    return f"torch==={found[1]}"


def describe(python: Path) -> str:
    """Return the versions of what matters most in an environment, as torch and the metadata of the others name them."""
    code = f"""
from importlib import metadata
import torch
found = {{d.metadata["Name"]: d.version for d in metadata.distributions()}}
found["torch"] = torch.__version__
print(", ".join(f"{{name}} {{found.get(name, 'not installed')}}" for name in {SHOWN}))"""
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
