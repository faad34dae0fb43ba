"""A rank that is killed, stopped or cut off in any phase of a real run: all others end in time, and it is named."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.ranks_kit import ROOT, SRC
from tests.distributed.running import Running, command
from tests.distributed.test_launch import GONE_SECONDS, TINY
from tests.distributed.two_nodes import TwoNodes, why_not
from tests.faults.figures import full, tell
from tests.faults.rank_trap import PHASES
from tests.sft_kit import write_recipe, write_rows

CODES = {"SIGKILL": 137, "SIGSTOP": 1, "wait": 1}
STANDS = re.compile(r"error: .*made (no )?progress for \d+ s.*(\n- ranks? [\d-].* (waits?|is|are) in \w+ \(.+:\d+\))+")
START_SECONDS = 180
RECIPE = {**TINY, "save_steps": 4, "eval_steps": 3, "val_size": 4}
"""The third step begins with the phases of a step broken; it ends with an evaluation, and the fourth with a save."""


@dataclass(frozen=True)
class Case:
    """What is done to whom, and when."""

    how: str
    phase: str
    victim: int
    ranks: int = 2

    def __str__(self) -> str:
        return f"{self.how} of rank {self.victim} of {self.ranks}, {self.phase}"


@dataclass
class Found:
    """What came of it."""

    case: Case
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    guessed: bool = False
    """The error says that a connection is blocked; else that ranks stand still, and where."""


@contextmanager
def trapped(
    case: Case, folder: Path, *arguments: str, nodes: TwoNodes | None = None, recipe: dict[str, Any] = RECIPE
) -> Iterator[Running]:
    """The run with a trap in it."""
    write_rows(folder, 20)
    write_recipe(folder, recipe)
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text("import tests.faults.rank_trap\n")
    call = command("sft", "tiny.yaml", *arguments)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(SRC), str(ROOT), str(folder / "site")]),
        "TRAP_RANK": str(case.victim),
        "TRAP_PHASE": case.phase,
        "TRAP_HOW": case.how,
        "TRAP_FILE": str(folder / "sprung"),
        **({} if nodes is None else nodes.environment),
    }
    try:
        with Running(folder, call if nodes is None else nodes.on_first(*call), **environment) as running:
            yield running
    finally:
        for process in left_behind(folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def left_behind(folder: Path) -> list[psutil.Process]:
    """Every process that still carries the environment of this run, whoever is its parent by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TRAP_FILE") == str(folder / "sprung") and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def await_trap(running: Running, folder: Path) -> float:
    """When it sprang."""
    until = time.monotonic() + START_SECONDS
    while not (folder / "sprung").exists():
        assert running.process.poll() is None, running.stderr
        assert time.monotonic() < until, f"the phase was never reached: {running.stderr}"
        time.sleep(0.05)
    return float((folder / "sprung").read_text())


def judge(case: Case, running: Running, folder: Path, began: float) -> Found:
    """Wait for the end, and see what is wrong with it."""
    found = Found(case)
    code: int | None = None
    with suppress(Exception):  # it does not end in time: told below
        code = running.process.wait(max(0.0, began + 3 * GONE_SECONDS - time.time()))
    gone = time.time() + 2.0
    while (left := left_behind(folder)) and time.time() < gone:
        time.sleep(0.05)
    found.seconds = time.time() - began
    said = running.stderr
    if found.seconds > GONE_SECONDS:
        found.wrong.append(f"gone after {found.seconds:.0f} s")
    if code != CODES[case.how]:
        found.wrong.append(f"exit code {code}")
    if left:
        found.wrong.append(f"left behind: {[process.cmdline() for process in left]}")
    if case.how == "wait":
        found.guessed = "a connection between them is blocked" in said
        if not STANDS.search(said):
            found.wrong.append(f"no rank with its place: {said[-1500:]}")
    elif f"error: rank {case.victim} on " not in said:
        found.wrong.append(f"not named: {said[-1500:]}")
    if case.phase != "loading" and "in step " not in said:
        found.wrong.append(f"no step: {said[-1500:]}")
    if "Traceback" in said:
        found.wrong.append(f"a traceback: {said[-1500:]}")
    return found


def break_rank(case: Case, folder: Path) -> Found:
    """One run of ranks on this machine, of which one is killed or stopped."""
    folder.mkdir()
    with trapped(case, folder, "--nproc", str(case.ranks)) as running:
        return judge(case, running, folder, await_trap(running, folder))


def block_port(case: Case, folder: Path) -> Found:
    """One run on two machines, whose ranks cannot reach each other any more; what watches them can."""
    folder.mkdir()
    with TwoNodes(folder) as nodes:
        slots = case.ranks // 2
        nodes.hostfile.write_text(nodes.hostfile.read_text().replace("slots=1", f"slots={slots}"))
        with trapped(case, folder, "--hostfile", str(nodes.hostfile), nodes=nodes) as running:
            await_trap(running, folder)
            nodes.block_process_group()
            began = time.time()
            (folder / "sprung.go").touch()
            return judge(case, running, folder, began)


def report(name: str, found: list[Found]) -> None:
    """Tell the figure, and fail where something is wrong."""
    wrong = [f"{each.case}: {text}" for each in found for text in each.wrong]
    good, slowest = sum(not each.wrong for each in found), max(each.seconds for each in found)
    orphans = sum("left behind" in text for text in wrong)
    guessed = {"told_to_be_a_blocked_connection": sum(each.guessed for each in found)} if "port" in name else {}
    tell(name, good, len(found), slowest_seconds=round(slowest, 1), left_behind=orphans, **guessed)
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_is_gone_in_any_phase(how: str, ranks: int, tmp_path: Path) -> None:
    if ranks > 2 and not full():
        pytest.skip("two ranks are enough here; make faults tries four")
    # Rank 0, which listens to the others, is in every other phase; with four ranks in those between, and the like for
    # the other signal.
    turn = (how == "SIGSTOP") + (ranks > 2)
    cases = [Case(how, phase, (ranks - 1) * ((turn + at) % 2), ranks) for at, phase in enumerate(PHASES)]
    with ThreadPoolExecutor(2) as pool:  # most of the time nothing is computed
        found = list(pool.map(lambda case: break_rank(case, tmp_path / f"{case.phase}-{case.victim}"), cases))
    report(f"rank_{how}_in_any_phase_of_{ranks}", found)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"no network name spaces here: {why_not()}")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_port_of_the_ranks_is_blocked_in_any_phase(ranks: int, tmp_path: Path) -> None:
    if ranks > 2 and not full():
        pytest.skip("two ranks are enough here; make faults tries four")
    cases = [Case("wait", phase, ranks // 2, ranks) for phase in PHASES]
    report(f"rank_port_blocked_in_any_phase_of_{ranks}", [block_port(case, tmp_path / case.phase) for case in cases])
