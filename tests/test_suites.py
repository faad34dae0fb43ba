"""Split of the suite into `make test`, the rest of `make test-all`, and what is asked for by name."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import sample, values_of
from tests.versions import QUICK, USUAL, VERSIONS, lower_bounds, pinned_torch

ROOT = Path(__file__).resolve().parents[1]


def matrix(*sizes: int) -> list[set[Any]]:
    return [set(zip("abcd", case, strict=False)) for case in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", [(1,), (7,), (2, 2), (3, 5), (6, 1, 4), (2, 3, 4, 5)], ids=str)
def test_every_value_is_in_the_sample(sizes: tuple[int, ...]) -> None:
    cases = matrix(*sizes)
    chosen = sample(cases)
    assert set().union(*(cases[number] for number in chosen)) == set().union(*cases)
    assert len(chosen) == max(sizes)
    assert chosen[0] == 0


@pytest.fixture(params=["one", "two"])
def of_a_fixture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("first", "second"), [(1, "x"), (1, "y")])  # two values, since these go together
@pytest.mark.parametrize("third", [2.5])
def test_values_are_distinguished(
    first: int, second: str, third: float, of_a_fixture: str, request: pytest.FixtureRequest
) -> None:
    assert values_of(request.node) == {
        ("first,second", (id(first), id(second))),
        ("third", (id(third),)),
        ("of_a_fixture", (id(of_a_fixture),)),
    }


def test_make_runs_each_part_once() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"-m '{QUICK}'" in makefile
    assert "-m 'full and not slow'" in makefile
    assert "\ntest-all: test " in makefile, "the quick part comes first, and is not run again"


COLLECT = """
import json, pytest, sys

class Told:
    left = []

    def pytest_deselected(self, items):
        self.left += [item.nodeid for item in items if item.get_closest_marker("slow") is None]

    def pytest_collection_finish(self, session):
        quick = [item.nodeid for item in session.items]
        print(json.dumps({"quick": quick, "whole": quick + self.left}), file=sys.stderr)

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], [Told()]))
"""


def collected(*arguments: str) -> dict[str, list[str]]:
    """Return the names of the tests that are chosen, and of the whole: those and the others that are not slow."""
    done = subprocess.run([sys.executable, "-c", COLLECT, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = json.loads(done.stderr.splitlines()[-1])
    return found


@pytest.mark.full
def test_every_file_has_a_quick_test() -> None:
    found = collected("-m", QUICK)
    whole, quick = found["whole"], found["quick"]
    assert set(quick) < set(whole)
    files, covered = ({name.partition("::")[0] for name in names} for names in (whole, quick))
    assert files == covered


def test_versions_are_known() -> None:
    assert set(USUAL) | {"cuda"} == VERSIONS.keys()


def test_the_pinned_torch_is_asked_for_without_a_local_label() -> None:
    assert pinned_torch("tokenizers==0.23\ntorch==2.13.0\ntorchao==0.18.0\n") == "torch===2.13.0"
    with pytest.raises(ValueError, match="does not name a version of torch"):
        pinned_torch("torchao==0.18.0\n")


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    bounds = lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8")).splitlines()
    assert "torch==2.11.*" in bounds
    assert "transformers==5.17.*" in bounds
    assert "pyarrow==21.0.*" in bounds
    assert len(bounds) == len(set(bounds)) > 12


def test_a_requirement_without_a_lower_bound_is_refused() -> None:
    project = '[project]\ndependencies = ["torch"]\n[project.optional-dependencies]\nquant = []\n'
    with pytest.raises(ValueError, match="torch has no lower bound"):
        lower_bounds(project)


@pytest.mark.slow
def test_a_green_run_says_nothing_beside_its_report() -> None:
    """The table of families is made by the process that starts the workers, whose imports pytest does not capture."""
    test = "tests/conformance/test_conformance.py::test_exact_or_refused[llama]"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-m", "", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 names of the causal language models" in done.stdout
    assert done.stderr == ""
