"""Build the two stand-ins for a device.

``python -m tests.cuda_host.build_stub`` prints the environment of a process that uses the runtime without a device. It
needs the headers that come with torch's CUDA wheel. ``... build_stub claimed`` prints that of a process on the claimed
device, which needs a torch without CUDA.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from streamtune.cli.machine import ALLOCATOR_VARIABLES

SOURCES = Path(__file__).parent / "stub"
BUILD = Path(__file__).parents[2] / "build" / "cuda_host"


def headers() -> list[Path]:
    """Return the folders of CUDA's headers: a toolkit's, and those of packages that the wheel depends on."""
    site = Path(sysconfig.get_paths()["purelib"])
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    found = [toolkit, *site.glob("nvidia/cu1*/include"), site / "triton/backends/nvidia/include"]
    return [folder for folder in found if folder.is_dir()]


def compiled(sources: list[Path], commands: dict[str, list[str]]) -> Path:
    """Return the folder of the libraries that ``commands`` make of ``sources``; they are made unless they are there.

    Raises:
        subprocess.CalledProcessError: The compiler failed; it has printed why.
    """
    made_of = b"".join(source.read_bytes() for source in sources) + repr(commands).encode()
    folder = BUILD / hashlib.sha256(made_of).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in commands.items():
        if not (folder / name).exists():
            staged = folder / f"{name}.{os.getpid()}"
            subprocess.run([*command, "-o", str(staged)], check=True)
            staged.rename(folder / name)
    return folder


def runtime() -> dict[str, str]:
    """Return the environment of a process that uses the runtime without a device."""
    sources = [SOURCES / "runtime.cpp", SOURCES / "driver.c"]
    includes = [f"-I{found}" for found in headers()]
    commands = {
        "libcuda.so.1": ["gcc", "-O1", "-fPIC", "-shared", "-w", str(sources[1])],
        "libstubrt.so": ["g++", "-O1", "-fPIC", "-shared", "-std=c++17", "-w", *includes, str(sources[0])],
    }
    folder = str(compiled(sources, commands))
    libraries = {"STUB": folder, "LD_LIBRARY_PATH": folder, "LD_PRELOAD": f"{folder}/libstubrt.so"}
    # What triton compiles here is for this runtime only.
    caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    # Segments that grow, which the command line asks for, need more of the driver than there is here.
    kept = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    return {**kept, **libraries, **caches}


def claimed(kind: str = "cuda") -> dict[str, str]:
    """Return the environment of a process on the claimed device: ``cuda``, ``xpu`` or ``mps``."""
    source, torch = SOURCES / "claimed.cpp", Path(sysconfig.get_paths()["purelib"]) / "torch"
    options = ["-shared", "-fPIC", "-O1", "-std=c++20", f"-DKIND={kind.upper()}", f"-DCLAIMS_{kind.upper()}"]
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
    folder = compiled([source], {"libclaimed.so": ["g++", *options, *includes, str(source), *libraries]})
    return {**os.environ, "CLAIMED": kind, "LD_LIBRARY_PATH": f"{torch}/lib", "LD_PRELOAD": f"{folder}/libclaimed.so"}


if __name__ == "__main__":
    print(json.dumps(claimed() if "claimed" in sys.argv[1:] else runtime()))
