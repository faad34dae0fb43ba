"""The versions that were tested: one list, the bounds of the package, and what commands say of newer ones."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from streamtune.base import libraries
from streamtune.base.libraries import TESTED, missing_name_error, untested_versions_note
from streamtune.cli import main
from tests import canary
from tests import versions as sets

PROJECT = tomllib.loads((sets.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def bounds(package: str) -> str:
    return next(line.removeprefix(package) for line in PROJECT["dependencies"] if re.match(rf"{package}\W", line))


def install(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    given = {"transformers": "5.24.0", "torch": "2.13.0+cpu"} | found
    monkeypatch.setattr(libraries, "installed_version", lambda name: given[name])


def test_the_bounds_of_the_package_are_the_tested_versions() -> None:
    oldest, newest = TESTED["transformers"]
    major, minor = map(int, newest.split("."))
    assert bounds("transformers") == f">={oldest},<{major}.{minor + 1}"
    assert bounds("torch") == f">={TESTED['torch'][0]}"


def test_the_pinned_versions_are_among_them() -> None:
    pinned = dict(re.findall(r"^(\w+)==([0-9.]+)", (sets.ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package, (oldest, newest) in TESTED.items():
        assert (
            libraries._minor_version(oldest)
            <= libraries._minor_version(pinned[package])
            <= libraries._minor_version(newest)
        )
    assert pinned["transformers"].startswith(f"{TESTED['transformers'][1]}."), "the newest that passed"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, ""),
        ({"transformers": "5.24.9"}, ""),
        ({"transformers": "5.17.0", "torch": "2.11.0"}, ""),
        ({"transformers": "5.25.0.dev0"}, "not tested with transformers 5.25.0.dev0 (tested: 5.17 to 5.24)"),
        ({"transformers": "6.0.0"}, "not tested with transformers 6.0.0 (tested: 5.17 to 5.24)"),
        ({"torch": "2.15.0+cu130"}, "not tested with torch 2.15.0+cu130 (tested: 2.11 to 2.14)"),
        ({"torch": ""}, ""),
    ],
)
def test_a_version_is_untested_if_its_minor_version_is_newer(
    found: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **found)
    assert untested_versions_note() == said


def test_two_newer_libraries_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, transformers="5.30.1", torch="3.0.0")
    assert untested_versions_note() == (
        "not tested with transformers 5.30.1 (tested: 5.17 to 5.24) and torch 3.0.0 (tested: 2.11 to 2.14)"
    )
    assert libraries.pip_install_command() == "pip install 'transformers<5.25' 'torch<2.15'"


@pytest.mark.parametrize(("version", "fix"), [("5.31.0", "'transformers<5.25'"), ("5.3.0", "'transformers>=5.17'")])
def test_what_a_version_lacks_is_mended_by_another(version: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, transformers=version)
    error = missing_name_error("transformers", "transformers.cache_utils.Cache")
    assert error.what.startswith(f"transformers {version} has no transformers.cache_utils.Cache")
    assert error.fix == f"pip install {fix}"
    assert error.exit_code == 2


def test_a_command_says_so_before_it_computes(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    install(monkeypatch, transformers="5.30.0")
    said = {}
    for command in (["generate", str(tmp_path / "none")], ["sft", str(tmp_path / "none.yaml")], ["env", "--wrong"]):
        with pytest.raises(SystemExit):
            main(command)
        said[command[0]] = capsys.readouterr().err
    assert said["generate"].startswith("note: not tested with transformers 5.30.0 (tested: 5.17 to 5.24)")
    assert said["sft"].startswith("note: not tested with transformers 5.30.0")
    assert "not tested" not in said["env"]


def test_doctor_compares_the_versions(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = {}
    for name, version in (("tested", "5.24.0"), ("newer", "5.30.0")):
        install(monkeypatch, transformers=version)
        with pytest.raises(SystemExit):
            main(["doctor", "--json", "--dir", str(tmp_path)])
        checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        found[name] = checks["versions"]
        assert checks["exactness"]["status"] == "ok", "it is tried"
    assert found["tested"]["status"] == "ok"
    assert found["newer"] == {
        "check": "versions",
        "status": "advice",
        "found": "not tested with transformers 5.30.0 (tested: 5.17 to 5.24)",
        "mend": "if something fails: pip install 'transformers<5.25'",
    }


def test_the_canary_fails_only_where_the_package_allows_what_fails() -> None:
    oldest, newest = TESTED["transformers"]
    major, minor = map(int, newest.split("."))
    assert canary.allowed("transformers", f"{newest}.3")
    assert not canary.allowed("transformers", f"{major}.{minor + 1}.0")
    assert not canary.allowed("transformers", f"{major}.{int(oldest.split('.')[1]) - 1}.0")
    assert canary.allowed("trl", "1.99.0"), "no upper bound is stated"
    assert not canary.allowed("peft", "0.20.0")


def test_every_change_runs_the_canary_on_files_that_are_there() -> None:
    assert "make canary" in (sets.ROOT / ".ci/run").read_text()
    assert "-m tests.canary" in (sets.ROOT / "Makefile").read_text()
    assert [name for name in canary.TESTS if not (sets.ROOT / name).is_file()] == []
    assert canary.SECONDS <= 180
