"""Find an interpreter whose torch is built for CUDA, or make its environment.

``python -m tests.cuda_host.interpreter`` prints its path. It is the first of: ``STREAMTUNE_CUDA_PYTHON``, this one, and
that of the environment ``cuda`` of ``tests/versions.py``, which is made where it is not there: some 6 GB, and minutes.
With ``--if-made`` it is made only where ``STREAMTUNE_CUDA=1``. Where none can be had, one line says why, and the exit
code is 1.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import versions

FOLDER = versions.ROOT / "build/versions/cuda"
NEEDED = 8 << 30
"""Bytes on disk of the environment and, while it is made, of what pip downloads."""


class NoInterpreterError(Exception):
    """There is no such interpreter, and its environment cannot be made."""


def has_cuda(python: str) -> bool:
    """Return True if the torch of an interpreter is built for CUDA."""
    code = "import sys, torch; sys.exit(torch.version.cuda is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def find(make: bool = True) -> str:
    """Return the path of an interpreter; its environment is made where there is none, if that is asked for.

    Raises:
        NoInterpreterError: There is none on this system, no room, or pip failed.
    """
    if given := os.environ.get("STREAMTUNE_CUDA_PYTHON"):
        return given
    if has_cuda(sys.executable):
        return sys.executable
    if sys.platform != "linux":
        raise NoInterpreterError(f"torch is not built for CUDA on {sys.platform}")
    return made(FOLDER, make)


def made(folder: Path, make: bool) -> str:
    """Make the environment in a folder unless what it is made of is the same as the last time; return its python.

    Raises:
        NoInterpreterError: There is no room, pip failed, or it found a torch without CUDA.
    """
    made_of = b"".join((versions.ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
    stamp, digest = folder / "made-of", hashlib.sha256(made_of).hexdigest()
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == digest and has_cuda(str(python)):
        return str(python)
    if not make:
        raise NoInterpreterError("`make cuda-host` makes an environment for them, as does STREAMTUNE_CUDA=1")
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < NEEDED and not has_cuda(str(python)):
        raise NoInterpreterError(f"{folder} has {free >> 30} GiB free, and {NEEDED >> 30} are needed")
    python, command = versions.prepare(folder, versions.VERSIONS["cuda"])
    print(f"making {folder} (some 6 GB)", file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=versions.ROOT, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NoInterpreterError((errors or done.stderr.splitlines() or ["pip failed"])[-1].removeprefix("ERROR: "))
    if not has_cuda(str(python)):
        raise NoInterpreterError("pip found a torch that is built without CUDA")
    stamp.write_text(digest)
    return str(python)


def main() -> int:
    """Print the path; return 1 if there is none."""
    try:
        print(find(make="--if-made" not in sys.argv[1:] or os.environ.get("STREAMTUNE_CUDA") == "1"))
    except NoInterpreterError as error:
        print(f"no torch for CUDA, so the tests that need one are skipped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
