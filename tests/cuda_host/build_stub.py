"""Build the runtime without a device, with the headers that come with torch's CUDA wheel.

``python -m tests.cuda_host.build_stub`` prints the environment of a process that uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent / "stub"
BUILD = Path(__file__).parents[2] / "build" / "cuda_host"


def headers() -> list[Path]:
    """Return the folders of CUDA's headers: a toolkit's, and those of packages that the wheel depends on."""
    site = Path(sysconfig.get_paths()["purelib"])
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    found = [toolkit, *site.glob("nvidia/cu1*/include"), site / "triton/backends/nvidia/include"]
    return [folder for folder in found if folder.is_dir()]


def build() -> Path:
    """Return the folder of the two libraries, which are made unless they are there.

    Raises:
        subprocess.CalledProcessError: The compiler failed; it has printed why.
    """
    runtime, driver = SOURCES / "runtime.cpp", SOURCES / "driver.c"
    folder = BUILD / hashlib.sha256(runtime.read_bytes() + driver.read_bytes()).hexdigest()[:12]
    includes = [f"-I{found}" for found in headers()]
    commands = {
        "libcuda.so.1": ["gcc", "-O1", "-fPIC", "-shared", "-w", str(driver)],
        "libstubrt.so": ["g++", "-O1", "-fPIC", "-shared", "-std=c++17", "-w", *includes, str(runtime)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in commands.items():
        if not (folder / name).exists():
            staged = folder / f"{name}.{os.getpid()}"
            subprocess.run([*command, "-o", str(staged)], check=True)
            staged.rename(folder / name)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that uses the libraries in ``folder``."""
    return {
        **os.environ,
        "STUB": str(folder),
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / "libstubrt.so"),
    }


if __name__ == "__main__":
    print(json.dumps(environment(build())))
