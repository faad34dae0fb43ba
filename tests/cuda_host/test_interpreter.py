"""The environment with torch's build for CUDA: what is asked of pip, and what is said where it cannot be had."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import versions
from tests.cuda_host import interpreter


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Linux machine where no interpreter has CUDA; returns the folder of the environment, which is not there."""
    for name in ("STREAMTUNE_CUDA_PYTHON", "STREAMTUNE_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(interpreter, "has_cuda", lambda python: False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["interpreter"])
    monkeypatch.setattr(interpreter, "FOLDER", tmp_path / "cuda")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 << 30))
    monkeypatch.setattr(versions.venv, "create", lambda folder, with_pip: (folder / "bin").mkdir())
    return tmp_path / "cuda"


def pip(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str = "") -> list[list[str]]:
    """Let pip end with a code; returns the commands that are run."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=code, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The line that says why there is none."""
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()[-1]


def test_pip_is_asked_for_the_wheel_without_a_local_label(without: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip(monkeypatch, 0)
    monkeypatch.setattr(interpreter, "has_cuda", lambda python: bool(commands) and python != sys.executable)
    assert interpreter.find() == str(without / "bin" / "python")
    pinned = next(line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert pinned.replace("==", "===").partition("+")[0] in commands[0]
    assert interpreter.find(make=False) == str(without / "bin" / "python")
    assert len(commands) == 1, "it is made once"


def test_an_interpreter_that_is_named_is_used(without: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMTUNE_CUDA_PYTHON", "/there/python")
    assert interpreter.find() == "/there/python"


def test_pip_without_a_network(
    without: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip(monkeypatch, 1, "WARNING: Retrying\nERROR: No matching distribution found for torch===2.13.0\n")
    assert interpreter.main() == 1
    assert said(capsys).endswith("are skipped: No matching distribution found for torch===2.13.0")


def test_a_full_disk(without: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands = pip(monkeypatch, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 30))
    assert interpreter.main() == 1
    assert said(capsys).endswith("3 GiB free, and 8 are needed")
    assert commands == []


def test_another_system(without: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands = pip(monkeypatch, 0)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interpreter.main() == 1
    assert "not built for CUDA on darwin" in said(capsys)
    assert commands == []


def test_it_is_not_made_unless_that_is_asked_for(
    without: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = pip(monkeypatch, 1)
    monkeypatch.setattr(sys, "argv", ["interpreter", "--if-made"])
    assert interpreter.main() == 1
    assert "make cuda-host" in said(capsys)
    assert commands == []
    monkeypatch.setenv("STREAMTUNE_CUDA", "1")
    assert interpreter.main() == 1
    assert len(commands) == 1
