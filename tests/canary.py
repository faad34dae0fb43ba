"""The newest releases that the package index has, tried before somebody installs them: a part of every `.ci/run`.

python -m tests.canary

Transformers, its kin and what tests compare with are installed as new as they are, in an environment of their own in
``build/canary`` that takes everything else, torch too, from the environment that runs this: of torch an index may have
the build for CUDA alone, of several GB, which `make test-versions` tries. Then about 150 quick tests over families,
caches, checkpoints and rollouts run, in at most three minutes.

A failure is a warning where a version is newer than pyproject.toml allows, and an error where it is allowed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/canary"
NEWEST = ("transformers", "peft", "trl", "accelerate", "datasets", "deepspeed", "torchao", "bitsandbytes")
"""Packages whose newest release is installed, with their dependencies."""
TESTS = (
    "tests/engine/test_hf_names.py",
    "tests/engine/test_check.py",
    "tests/exactness/test_families.py",
    "tests/transparency/test_past.py",
    "tests/models/test_models.py",
    "tests/tasks/rollout/test_generate.py",
)
SECONDS = 180
"""The tests end after so many."""


def main() -> int:
    """Install, run the tests, print one line; returns 1 if versions that are allowed fail, else 0."""
    started = time.monotonic()
    python = FOLDER / "bin" / "python"
    if problem := install(python):
        print(f"canary: WARNING: the newest releases cannot be installed together; nothing was tried\n{problem}")
        return 0
    installed = time.monotonic() - started
    found = versions(python)
    code, last = run_tests(python)
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    print(f"canary: {last} (installed in {installed:.0f} s, ran for {time.monotonic() - started - installed:.0f} s)")
    print(f"canary: {shown}; torch is the pinned one, the index has {newest_torch() or 'none'}")
    if code == 0:
        return 0
    if beyond := [name for name in found if not allowed(name, found[name])]:
        print(f"canary: WARNING: tests fail with {', '.join(f'{name} {found[name]}' for name in beyond)}, which "
              "pyproject.toml does not allow")  # fmt: skip
        return 0
    print("canary: FAILED with versions that pyproject.toml allows")
    return 1


def install(python: Path) -> str:
    """Make the environment, or bring it up to date. Returns the end of pip's output if that fails, else nothing."""
    if not python.exists():
        venv.create(FOLDER, with_pip=False)
    inside = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)}))
    own = [path for path in sys.path if path.endswith("site-packages")]
    inside.joinpath("around.pth").write_text("\n".join(own) + "\n", encoding="utf-8")
    pinned = FOLDER / "pinned.txt"
    pinned.write_text(f"torch=={version_of(Path(sys.executable), 'torch').partition('+')[0]}\n", encoding="utf-8")
    options = ["--quiet", "--disable-pip-version-check", "--upgrade", "-c", str(pinned)]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *NEWEST]
    done = subprocess.run(command, capture_output=True, text=True)
    return "\n".join((done.stdout + done.stderr).splitlines()[-5:]) if done.returncode else ""


def run_tests(python: Path) -> tuple[int, str]:
    """Run the tests. Returns pytest's exit code, and the last line of its output."""
    chosen = ["-m", "not slow and not full", "-p", "no:cacheprovider", "-n", "2", "--tb=line", *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    try:
        done = subprocess.run(
            [str(python), "-m", "pytest", "-q", *chosen],
            cwd=ROOT, env=environment, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 0, f"WARNING: not done after {SECONDS} s"
    if done.returncode:
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))))
    return done.returncode, done.stdout.strip().splitlines()[-1]


def versions(python: Path) -> dict[str, str]:
    """Return the versions that were tried."""
    code = (
        f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {NEWEST}}}))"
    )
    return json.loads(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout)


def version_of(python: Path, name: str) -> str:
    """Return the version of a package in an environment."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def newest_torch() -> str:
    """Return the newest version of torch that the index has."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    line = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    return line.partition("(")[2].rstrip(")")


def allowed(name: str, version: str, project: Path = ROOT / "pyproject.toml") -> bool:
    """Return True if pyproject.toml allows a version of a package, or does not name it."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    lines = [*table["dependencies"], *(line for extra in table["optional-dependencies"].values() for line in extra)]
    return all(
        each.specifier.contains(version, prereleases=True)
        for each in map(Requirement, lines)
        if each.name == name and (each.marker is None or each.marker.evaluate())
    )


if __name__ == "__main__":
    sys.exit(main())
