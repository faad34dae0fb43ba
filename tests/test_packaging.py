"""The package: what its wheel and sdist hold, what installing it asks for, and that it runs away from its sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import streamtune
from streamtune.base.chat_templates import CHAT_TEMPLATES
from streamtune.recipe.shipped import shipped_names

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITHOUT_A_WHEEL = {"deepspeed"}
"""Packages that are built where they are installed: extras, so that installing StreamTune needs no compiler."""


def name_of(requirement: str) -> str:
    """Return the package that a requirement names."""
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0]


def test_one_version() -> None:
    assert PROJECT["version"] == streamtune.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == streamtune.__version__


def test_what_everybody_installs_has_wheels() -> None:
    assert WITHOUT_A_WHEEL.isdisjoint(map(name_of, PROJECT["dependencies"]))
    extras = PROJECT["optional-dependencies"]
    assert {name_of(requirement) for names in extras.values() for requirement in names} >= WITHOUT_A_WHEEL


def test_every_extra_is_in_the_guide() -> None:
    guide = (ROOT / "docs/guide/install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)) == set(PROJECT["optional-dependencies"])


def test_the_image_copies_what_there_is() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    assert copied
    assert all((ROOT / name).exists() for names in copied for name in names)
    asked = set(re.search(r"/src\[([\w,]+)\]", text)[1].split(","))  # type: ignore[index]
    assert asked <= set(PROJECT["optional-dependencies"])


def test_the_forge_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in steps


class TestBatchJob:
    """deploy/slurm.sbatch, with programs of Slurm that write down how they were called."""

    def run(self, folder: Path, *arguments: str, ends: int = 0) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls = folder / "calls"
        calls.write_text("", encoding="utf-8")
        for name, code in (("srun", ends), ("scontrol", 0)):
            program = folder / name
            program.write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\nexit {code}\n', encoding="utf-8")
            program.chmod(0o755)
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin/activate").write_text("", encoding="utf-8")
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "ENVIRONMENT": str(folder), "SLURM_JOB_ID": "7"}
        script = ROOT / "deploy/slurm.sbatch"
        ended = subprocess.run(
            ["bash", str(script), *arguments], env=environment, capture_output=True, text=True, timeout=60
        )
        return ended, calls.read_text(encoding="utf-8").splitlines()

    def test_starts_a_rank_for_each_task(self, tmp_path: Path) -> None:
        ended, calls = self.run(tmp_path, "recipe.yaml", "--set", "seed=1")
        assert ended.returncode == 0
        assert calls == ["srun --kill-on-bad-exit=0 streamtune sft recipe.yaml --set seed=1"]

    def test_a_run_that_was_stopped_is_queued_again(self, tmp_path: Path) -> None:
        ended, calls = self.run(tmp_path, "recipe.yaml", ends=143)
        assert ended.returncode == 0
        assert calls[-1] == "scontrol requeue 7"

    def test_a_run_that_failed_is_not(self, tmp_path: Path) -> None:
        ended, calls = self.run(tmp_path, "recipe.yaml", ends=1)
        assert ended.returncode == 1
        assert len(calls) == 1

    def test_asks_for_a_recipe(self, tmp_path: Path) -> None:
        ended, calls = self.run(tmp_path)
        assert ended.returncode == 2
        assert "RECIPE" in ended.stderr
        assert calls == []


@pytest.mark.full
def test_wheel_and_sdist(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"streamtune-{streamtune.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 2 << 20
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"src/streamtune/__init__.py", "recipes/quickstart.yaml", "docs/recipe.schema.json", "LICENSE"} <= inside
    assert not any(name.startswith((".venv", "runs", "build", "dist")) for name in inside)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    templates = tmp_path / "installed" / "streamtune" / "base" / "chat_templates"
    assert {path.stem for path in templates.glob("*.jinja")} == CHAT_TEMPLATES.keys()
    # In another directory and with nothing but the wheel's own files before the installed libraries.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "streamtune", "recipes", "ls"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert all(name in ran.stdout for name in shipped_names())
    show = subprocess.run(
        [sys.executable, "-m", "streamtune", "recipes", "show", "quickstart"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert show.returncode == 0, show.stderr
    assert yaml.safe_load(show.stdout)["output_dir"] == "runs/quickstart"
