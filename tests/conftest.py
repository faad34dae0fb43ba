"""One thread a process, since the models are tiny; and what of the suite is quick.

There are two markers: `make test` runs what has neither, `make test-all` what is marked ``full`` as well. What is
marked ``slow`` is run by `make test-slow`, and much of it by suites of its own (`make conformance`, `make faults`,
`make test-distributed`).

A test function with several parametrised arguments is a matrix. Here all of its cases are marked ``full`` but for a
sample in which each value of each argument occurs, so that `make test` tries every family, mode and dtype, and
`make test-all` all of their combinations. In tests/exactness, engine, transparency and plan it tries a part of these
(``ONE_OF``); `make conformance`, which a change to the engine has to pass, and `make test-slow` try the others as well.
Where a list is long, ``@pytest.mark.quick("llama", "mamba2")`` names the values that `make test` tries; a test that is
long by itself is marked ``full``. Of a matrix that is marked ``full``, `make test-all` runs such a sample, and
`make test-slow` the rest.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the environment of the process that starts them
    # What the tests prepare is kept in a folder of theirs; compiled extensions and packages where they were.
    _caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("PIP_CACHE_DIR", str(_caches / "pip"))
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="streamtune-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    (Path(os.environ["XDG_CACHE_HOME"]) / "torch_extensions").symlink_to(_caches / "torch_extensions")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


TESTS = Path(__file__).parent
ONE_OF = {"exactness": 3, "engine": 2, "transparency": 2, "plan": 4}
"""Folder -> of so many further cases of a matrix `make test-all` runs one."""

PLANNED = ("cli", "faults", "plan", "programs", "run")
"""Folders whose tests plan for this machine, many of them with an empty cache."""


@pytest.fixture(scope="session")
def measured_once() -> Iterator[None]:
    """The rates of this machine, measured once in a process instead of by every plan with an empty cache."""
    from streamtune.plan import calibrate  # imports torch, so not before it is needed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "measure_rates", cache(calibrate.measure_rates))
        yield


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    long: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.path.relative_to(TESTS).parts[0] in PLANNED:
            item.fixturenames.insert(0, "measured_once")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            if is_full(item) and item.get_closest_marker("quick"):
                raise pytest.UsageError(
                    f"{item.nodeid}: `quick` names cases of `make test`, which has none of a `full` test"
                )
            if not is_long(item):
                cases[item.nodeid.partition("[")[0]].append(item)
            elif is_full(item):
                long[item.nodeid.partition("[")[0]].append(item)
    for whole in cases.values():
        matrix = quick_cases(whole)
        chosen = {id(matrix[number]) for number in sample([values_of(item) for item in matrix])}
        for place, item in enumerate(item for item in whole if id(item) not in chosen):
            thinned = place % ONE_OF.get(item.path.relative_to(TESTS).parts[0], 1)
            item.add_marker(pytest.mark.slow if thinned else pytest.mark.full)
    for whole in long.values():
        chosen = {id(whole[number]) for number in sample([values_of(item) for item in whole])}
        for item in whole:
            if id(item) not in chosen:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what is there by now out of every later collection: libraries and tests are millions of objects."""
    gc.collect()
    gc.freeze()


def quick_cases(matrix: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases with a value that ``@pytest.mark.quick`` names, or all where there is none."""
    marker = matrix[0].get_closest_marker("quick")
    if marker is None:
        return matrix
    return [item for item in matrix if any(f"-{name}-" in f"-{item.callspec.id}-" for name in marker.args)]


def is_long(item: pytest.Item) -> bool:
    """Return True where the test is left out of `make test` by a marker of its own."""
    return any(item.get_closest_marker(name) for name in ("slow", "full"))


def is_full(item: pytest.Function) -> bool:
    """Return True where the whole test, not a case of it, is marked ``full``, and the case is not ``slow``."""
    marks = getattr(item.function, "pytestmark", [])
    return any(mark.name == "full" for mark in marks) and item.get_closest_marker("slow") is None


def values_of(item: pytest.Function) -> set[tuple[str, tuple[int, ...]]]:
    """Return what each ``parametrize`` of a test gives to a case: its arguments, and the identities of their values."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [tuple(name.replace(" ", "").split(",")) if isinstance(name, str) else tuple(name) for name in names]
    named = {name for group in groups for name in group}
    groups += [(name,) for name in item.callspec.params if name not in named]  # of parametrised fixtures
    return {(",".join(group), tuple(id(item.callspec.params[name]) for name in group)) for group in groups}


def sample(cases: Sequence[set[Hashable]]) -> list[int]:
    """Choose cases in which every value occurs: the next is always the first of those that add most values.

    Args:
        cases: The values of each case.

    Returns:
        The chosen cases' numbers.
    """
    missing: set[Hashable] = {value for case in cases for value in case}
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(cases[number] & missing))  # max gives the first
        chosen.append(best)
        missing -= cases[best]
    return chosen
