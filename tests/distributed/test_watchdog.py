"""Ranks that die, are stopped, hang or deadlock, and ranks that only seem to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamtune.distributed.environment import RankEnvironment
from streamtune.distributed.failure import RankEnd, error_of_first_failed_rank
from streamtune.distributed.failure_detector import (
    Heartbeat,
    Peer,
    Stragglers,
    WatchLimits,
    find_deadlock,
    find_unresponsive_rank,
    process_identity,
)
from streamtune.distributed.local_ranks import LocalRanks
from streamtune.distributed.process_activity import ProcessActivity, is_computing
from streamtune.distributed.watchdog import Watchdog
from streamtune.errors import ArgumentError
from tests.distributed.ranks_kit import start, wait
from tests.distributed.running import Running, command
from tests.sft_kit import FIXED, RECIPE, write_recipe, write_rows

CASES = {
    "kill": {},
    "kill-0": {"WATCHED_RANK": "0"},
    "stop": {},
    "stop-0": {"WATCHED_RANK": "0"},
    "raise": {},
    "done": {"WATCHED_RANK": "0"},
    "hold": {},
    "gloo-deadlock": {},
    "gloo-sleep": {},
    "gloo-ddp": {},
    "gloo-straggle": {},
}
WAITED = 240


FIRST = ("kill", "kill-0", "raise", "gloo-deadlock")
"""Cases of `make test`."""


class Outcomes:
    """How the ranks of a case ended, and what rank 0 recorded; cases run at the same time because they mostly wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[list[RankEnd], list[str]]] = {}

    def __getitem__(self, case: str) -> tuple[list[RankEnd], list[str]]:
        if case not in self._found:
            self._run([name for name in CASES if (name in FIRST) == (case in FIRST)])
        return self._found[case]

    def _run(self, cases: list[str]) -> None:
        running: dict[str, LocalRanks] = {}
        try:
            for case in cases:
                count = 3 if case == "stop-0" else 2
                more = {**CASES[case], **QUICK, "WATCHED_EVENTS": str(self._folder / f"{case}.jsonl")}
                running[case] = start(case.removesuffix("-0"), count=count, **more)
            for case, ranks in running.items():
                ends = wait(ranks, WAITED)
                written = self._folder / f"{case}.jsonl"
                self._found[case] = (ends, written.read_text().splitlines() if written.exists() else [])
        finally:
            for ranks in running.values():
                ranks.close()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("watched"))


QUICK = {"WATCHED_QUICK": "1"}


def error(ends: list[RankEnd], count: int = 2) -> str:
    """Return the one error of all ranks that ended."""
    found = error_of_first_failed_rank(ends)
    assert found is not None
    assert len(ends) == count, ends
    return str(found[0])


@pytest.mark.full
def test_a_killed_rank_ends_the_others(outcomes: Outcomes) -> None:
    ends, events = outcomes["kill"]
    assert "rank 1 on here was killed by SIGKILL, in step 3, batch 1/1" in error(ends)
    assert [end.code for end in ends] == [1, -9]
    assert "died without reporting an error" in json.loads(events[-1])["what"]
    assert "rank 0 on here was killed by SIGKILL, in step 3, batch 1/1" in error(outcomes["kill-0"][0])


@pytest.mark.full
def test_a_stopped_rank_is_found_and_ended(outcomes: Outcomes) -> None:
    assert "rank 1 on here has not responded for 6 s: stopped by a signal, in step 3" in error(outcomes["stop"][0])
    assert "rank 0 on here has not responded for 6 s: stopped by a signal" in error(outcomes["stop-0"][0], 3)


@pytest.mark.full
def test_an_error_of_one_rank_is_that_of_all(outcomes: Outcomes) -> None:
    ends, _ = outcomes["raise"]
    assert error(ends) == "rank 1 on here failed: a row is broken\nat rows.jsonl:7\nfix it"
    assert ends[1].code == 2
    assert ends[0].failure is not None
    assert (ends[0].failure.rank, ends[0].failure.own) == (1, False)


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_in(outcomes: Outcomes) -> None:
    said = error(outcomes["gloo-deadlock"][0])
    assert "deadlock: no rank has made progress for" in said
    assert "rank 0 on here waits in all_reduce (distributed/watched.py:" in said
    assert "rank 1 on here waits in barrier (distributed/watched.py:" in said


@pytest.mark.full
def test_the_rank_that_keeps_the_others_waiting_is_named(outcomes: Outcomes) -> None:
    said = error(outcomes["gloo-sleep"][0])
    assert said.startswith("rank 1 on here has made no progress for")
    assert "while the others wait, in step 3, batch 1/1" in said
    said = error(outcomes["gloo-ddp"][0])
    assert said.startswith("rank 1 on here has made no progress for")
    assert "rank 0 on here waits in _distributed_broadcast_coalesced (distributed/watched.py:" in said


@pytest.mark.full
@pytest.mark.parametrize("case", ["done", "hold", "gloo-straggle"])
def test_no_alarm(outcomes: Outcomes, case: str) -> None:
    """A rank that finishes early, one that holds the GIL for long, and one that is slow."""
    ends, _ = outcomes[case]
    assert [(end.code, end.failure) for end in ends] == [(0, None), (0, None)], ends


@pytest.mark.full
def test_a_slow_rank_is_an_event(outcomes: Outcomes) -> None:
    events = [json.loads(line) for line in outcomes["gloo-straggle"][1]]
    assert [(event["event"], event["rank"]) for event in events] == [("straggler", 1)]
    assert events[0]["seconds_per_step"] > 1.5 * events[0]["median_of_others"]


def peer(rank: int, heard: float = 100.0, **beat: object) -> Peer:
    found = {"step": 4, "phase": "batch 1/1", "place": "all_reduce (x.py:1)", "in_collective": True, **beat}
    return Peer(rank, f"h{rank}", heard, beat=Heartbeat(**found))  # type: ignore[arg-type]


def test_what_is_no_deadlock() -> None:
    limits = WatchLimits()
    still = {"idle_seconds": 60.0, "same_place_seconds": 60.0}
    assert find_deadlock([peer(0, **still), peer(1, **still)], limits) is not None
    assert find_deadlock([peer(0, **still), peer(1, idle_seconds=1.0)], limits) is None, "one computes"
    outside = {**still, "in_collective": False, "place": "wait (judge.py:3)"}
    assert find_deadlock([peer(0, **still), peer(1, **outside, waits_outside=True)], limits) is None, (
        "a judge may take long"
    )
    scoring = {**outside, "waits_outside": True, "phase": "scoring completions"}
    assert find_deadlock([peer(0, **scoring), peer(1, **scoring)], limits) is None, "nor where all ranks ask it"
    for_hours = {**scoring, "idle_seconds": 8000.0, "same_place_seconds": 8000.0}
    assert find_deadlock([peer(0, **for_hours), peer(1, **for_hours)], limits) is not None, "but not for ever"
    given_up = find_deadlock([peer(0, idle_seconds=8000.0, same_place_seconds=8000.0), peer(1, **for_hours)], limits)
    assert given_up is not None
    assert "rank 1 on h1 has made no progress for 8000 s while the others wait, in step 4, scoring" in given_up.what
    assert find_deadlock([peer(0, **still), peer(1, **still, phase="starting")], limits) is None
    one_waits = find_deadlock([peer(0, **still), peer(1, **outside)], limits)
    assert one_waits is not None
    assert one_waits.rank == 1
    spinning = {"idle_seconds": 0.0, "same_place_seconds": 1900.0}  # as on an accelerator
    assert find_deadlock([peer(0, **spinning), peer(1, **spinning)], limits) is not None


@pytest.mark.parametrize("text", ["on", "-1", "0", "nan", "1e9", "sixty"])
def test_a_setting_of_the_watchdog_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMTUNE_WATCHDOG", text)
    with pytest.raises(ArgumentError, match="must be off, or a number of seconds"):
        Watchdog(RankEnvironment(rank=0, world_size=2))
    Watchdog(RankEnvironment())  # with one rank there is none


def test_the_watchdog_can_be_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMTUNE_WATCHDOG", "600")
    limits = Watchdog(RankEnvironment(rank=0, world_size=2))._limits
    assert (limits.no_progress, limits.silence, limits.same_place, limits.external_wait) == (600, 600, 1800, 7200)


def test_what_a_phase_waited_for_does_not_count_in_the_next() -> None:
    """A rank that waited 25 s for a judge has made progress from its first report on."""
    activity = ProcessActivity()
    activity._active_at = activity._moved_at = time.monotonic() - 25
    assert activity.idle_seconds > 24
    activity.record_progress()
    assert (activity.idle_seconds < 1, activity.same_place_seconds < 1) == (True, True)
    activity._active_at = time.monotonic() - 25
    assert activity.idle_seconds < 1, "another place is progress, before the next look"


JUDGED = """
model: {init: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {train: {vocab_size: 280}}
datasets: [{path: demo-arithmetic, name: copy, max_rows: 8}]
engine: {schedule: fixed, chunk_size: 32, head_chunk_size: 32}
max_prompt_length: 64
max_completion_length: 4
num_generations: 2
per_device_train_batch_size: 2
max_steps: 1
val_size: 2
eval_steps: 1
output_dir: runs/tiny
reward_funcs: ["judge.py:score"]
"""
JUDGE = """
import socket, time
def score(completions, **columns):
    with socket.socket() as judge:
        judge.bind(("127.0.0.1", 0))
        judge.settimeout(25)
        judge.listen()
        try:
            judge.accept()
        except TimeoutError:
            pass
    return [float(len(str(completion))) for completion in completions]
"""


@pytest.mark.slow
def test_ranks_that_wait_for_a_judge_are_not_ended(tmp_path: Path) -> None:
    """In a step and in an evaluation, for longer than ranks may make no progress."""
    (tmp_path / "judge.yaml").write_text(JUDGED)
    (tmp_path / "judge.py").write_text(JUDGE)
    with Running(tmp_path, command("grpo", "judge.yaml", "--allow-code", "--nproc", "2")) as running:
        assert running.process.wait(400) == 0, running.stderr


WAITING = """
import os, time

class Wait:
    def on_step(self, record):
        time.sleep(12)
    def on_end(self, outcome):
        time.sleep(12)

fsync, waited = os.fsync, []

def slow(descriptor):
    if not waited and "final" in os.readlink(f"/proc/self/fd/{descriptor}"):
        waited.append(time.sleep(12))
    fsync(descriptor)

os.fsync = slow
"""


@pytest.mark.slow
def test_ranks_that_wait_for_a_callback_or_for_the_disk_of_the_final_model_are_not_ended(tmp_path: Path) -> None:
    """For longer than ranks may make no progress: a tracker waits for its server, and a disk for its cache."""
    write_rows(tmp_path, 8)
    own = {"callbacks": ["wait.py:Wait"], "allow_code": True, "output_dir": "runs/tiny"}
    write_recipe(tmp_path, {**RECIPE, "max_steps": 1, "engine": FIXED, "device": "cpu", **own})
    (tmp_path / "wait.py").write_text(WAITING)
    with Running(tmp_path, command("sft", "tiny.yaml", "--nproc", "2"), STREAMTUNE_WATCHDOG="6") as running:
        assert running.process.wait(400) == 0, running.stderr


@pytest.mark.parametrize(
    ("places", "unanswered", "fix"),
    [
        (("all_reduce (x.py:1)", "all_reduce (x.py:1)"), "", "a connection between them is blocked"),
        (("all_reduce (x.py:1)", "broadcast (x.py:2)"), "10.0.0.2:41234", "a connection between them is blocked"),
        (("all_reduce (x.py:1)", "broadcast (x.py:2)"), "", "find out why one rank took another code path"),
    ],
)
def test_a_blocked_connection_is_told_from_a_rank_that_left_the_path(
    places: tuple[str, str], unanswered: str, fix: str
) -> None:
    """If a connection breaks, one rank may be a collective ahead; retransmissions tell the two cases apart."""
    still = {"idle_seconds": 60.0, "same_place_seconds": 60.0}
    found = find_deadlock(
        [peer(0, place=places[0], **still, broken_connection=unanswered), peer(1, place=places[1], **still)],
        WatchLimits(),
    )
    assert found is not None
    assert fix in (found.fix or "")
    assert ("- data from rank 0 on h0 to 10.0.0.2:41234 does not arrive" in found.what) == bool(unanswered)


def test_what_is_computing_on_a_machine_that_is_busy() -> None:
    """Measured in 4 s of ranks that stand still: 0.03 s of a core, and up to 0.5 s in which the loops of twelve threads
    waited for one."""
    assert is_computing(0.5, 0.0, 4.0)
    assert is_computing(0.2, 3.8, 4.0), "it has a core one time in twenty"
    assert not is_computing(0.03, 0.0, 4.0)
    assert not is_computing(0.03, 0.5, 4.0)


def test_the_ranks_of_a_host_that_is_gone_are_named_together() -> None:
    peers = [peer(0), peer(1), peer(2, 80.0), peer(3, 80.0)]
    peers[3].host = peers[2].host
    found = find_unresponsive_rank(peers, 100.0, WatchLimits())
    assert found is not None
    assert found.what.startswith("ranks 2-3 on h2 have not responded for 15 s: stopped or unreachable, in step 4")
    peers[2].has_finished = peers[3].has_finished = True
    assert find_unresponsive_rank(peers, 100.0, WatchLimits()) is None


def test_a_rank_that_was_seen_stopped_is_so_while_it_dies() -> None:
    """A rank that another one kills runs for a moment before it is gone; one that continues sends messages."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    silent = Peer(0, "here", 0.0, (process_identity()[0], process.pid))
    limits = WatchLimits(silence=6.0)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert find_unresponsive_rank([silent], 3.0, limits) is None
        os.kill(process.pid, signal.SIGCONT)
        found = find_unresponsive_rank([silent], 10.0, limits)
        assert found is not None
        assert "stopped by a signal" in found.what
        silent.last_heard = 10.0
        assert find_unresponsive_rank([silent], 10.5, limits) is None
        found = find_unresponsive_rank([silent], 20.0, limits)
        assert found is not None
        assert "stopped or unreachable" in found.what
    finally:
        process.kill()
        process.wait()


def test_a_silent_rank_that_another_ended_meanwhile_was_stopped() -> None:
    """Ranks find out at the same time, and the first one kills it before the next one checks."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    machine, _ = process_identity()
    found = find_unresponsive_rank([Peer(0, "here", 90.0, (machine, ended.pid))], 100.0, WatchLimits(silence=6.0))
    assert found is not None
    assert "stopped by a signal" in found.what
    elsewhere = find_unresponsive_rank(
        [Peer(0, "there", 90.0, ("another machine", ended.pid))], 100.0, WatchLimits(silence=6.0)
    )
    assert elsewhere is not None
    assert "stopped or unreachable" in elsewhere.what


def test_stragglers_need_many_steps_and_are_named_once() -> None:
    stragglers = Stragglers(window_seconds=30.0)
    for step in range(41):
        for rank, seconds in ((0, 1.0), (1, 1.1), (2, 1.7)):
            stragglers.add_heartbeat(rank, step, step * seconds, now=step * 2.0)
        if step < 20:
            assert stragglers.new_stragglers() == []
    assert [rank for rank, _, _ in stragglers.new_stragglers()] == [2]
    assert stragglers.new_stragglers() == []
