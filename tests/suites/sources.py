"""Source distributions of installed libraries, by the package index; their tests become packages that can be imported.

The folder ``tests`` of a distribution is put into ``build/suites/src`` as ``transformers_tests``, ``peft_tests`` or
``trl_tests``, since ``tests`` is this repository's own. What a distribution leaves out of its tests is not looked for
elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

__all__ = ["BUILD", "ROOT", "environment", "fetch", "fetch_packages"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/suites"
PACKAGES = {"parameterized": "transformers' common tests", "diffusers": "peft's common tests"}
"""Packages that the tests import and StreamTune does not need, with the tests that do."""
EMPTY_MIXINS = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
"""Mixins that transformers' common tests inherit, in files that its distribution leaves out."""


def fetch(name: str) -> Path | None:
    """Return the package made of a library's tests, fetched once for each version; None where it comes with none."""
    release = version(name)
    archive = BUILD / "sdist" / f"{name}-{release}.tar.gz"
    if not archive.exists():
        _pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(archive.parent), f"{name}=={release}")
    place = BUILD / "src" / f"{name}_tests"
    made = place / "VERSION"
    if made.exists() and made.read_text(encoding="utf-8") == release:
        return place
    shutil.rmtree(place, ignore_errors=True)
    inside = f"{name}-{release}/tests/"
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if member.name.startswith(inside)]
        for member in members:
            member.name = member.name.removeprefix(inside)
        if not members:
            return None
        tar.extractall(place, members=[member for member in members if member.name], filter="data")
    (place / "__init__.py").touch()
    if name == "transformers":
        for file, mixin in EMPTY_MIXINS.items():
            (place / file).parent.mkdir(exist_ok=True)
            (place / file).parent.joinpath("__init__.py").touch()
            (place / file).write_text(f"class {mixin}:\n    pass\n", encoding="utf-8")
    made.write_text(release, encoding="utf-8")
    return place


def fetch_packages() -> None:
    """Install what the tests import and StreamTune does not need, beside the environment and not into it."""
    target = BUILD / "packages"
    for package in PACKAGES:
        if not (target / package).exists():
            _pip("install", "--no-deps", "--target", str(target), package)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs such tests: without a hub, on the CPU.

    Args:
        **more: Further variables.
    """
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT, BUILD / "src", BUILD / "packages")))
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, "PYTHONPATH": path, **quiet, **more}


def _pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
        stderr=subprocess.PIPE,
    )
