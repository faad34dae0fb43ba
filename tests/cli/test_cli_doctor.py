"""``streamtune doctor``: every check runs for real; a problem that would stop a run gives exit code 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.cli import main

CHECKED = {"device", "attention", "exactness", "host memory", "disk", "temporary files", "hub"}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--json", *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return int(stopped.value.code or 0), found


def test_a_machine_that_can_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = document(capsys, "--dir", str(tmp_path))
    checks = {check["check"]: check for check in found["checks"]}
    assert (code, found["problems"]) == (0, 0)
    assert checks.keys() >= CHECKED
    assert checks["exactness"]["status"] == "ok"
    assert "offline" in checks["hub"]["found"]
    assert str(tmp_path) in checks["disk"]["found"]
    assert not list(tmp_path.iterdir()), "nothing stays"


def test_a_folder_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = document(capsys, "--dir", str(tmp_path / "missing"))
    assert (code, found["problems"]) == (1, 1)
    (problem,) = [check for check in found["checks"] if check["status"] == "problem"]
    assert problem["check"] == "disk"
    assert "--dir" in problem["mend"]
