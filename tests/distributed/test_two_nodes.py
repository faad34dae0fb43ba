"""Two machines: network namespaces on this machine, joined by a pair of virtual interfaces."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.running import Running, command
from tests.distributed.test_launch import GONE_SECONDS, TINY
from tests.distributed.two_nodes import TwoNodes, why_not
from tests.sft_kit import write_recipe, write_rows

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network name spaces here: {why_not()}")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    write_rows(tmp_path, 20)
    write_recipe(tmp_path, TINY)
    with TwoNodes(tmp_path) as made:
        yield made


def sft(nodes: TwoNodes, *more: str) -> Running:
    call = nodes.on_first(*command("sft", "tiny.yaml", "--hostfile", str(nodes.hostfile), *more))
    return Running(nodes.hostfile.parent, call, **nodes.environment)


def test_a_host_that_is_not_there_is_named_with_its_line(nodes: TwoNodes) -> None:
    with nodes.hostfile.open("a") as file:
        file.write("10.77.0.3 slots=1\n")
    with sft(nodes) as running:
        assert running.wait(60) == 1
    assert "10.77.0.3 cannot be reached: ssh: connect to host 10.77.0.3 port 22: No route to host" in running.stderr
    assert f"where: {nodes.hostfile}:3" in running.stderr


@pytest.mark.slow
def test_two_machines_train_stop_and_go_on(nodes: TwoNodes) -> None:
    with sft(nodes, "--offline") as running:
        running.wait_for_step(2)
        for name, address in zip(nodes.names, nodes.addresses, strict=True):
            call = ["ip", "netns", "exec", name, "ss", "-ltnH"]
            lines = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()
            places = {line.split()[3].rpartition(":")[0] for line in lines}
            assert places == {address}, "ranks listen where the other machine calls them, and nowhere else"
        running.process.send_signal(signal.SIGINT)
        assert running.wait(120) == 130, running.stderr
        stopped = running.step
    log = (running.run / "logs/rank-0001.log").read_text()
    assert "Stopping after this micro-batch" in log
    with sft(nodes) as running:
        running.wait_for_step(stopped + 2)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(120) == 130, running.stderr
    assert f'"event": "resume", "step": {stopped}' in (running.run / "events.jsonl").read_text()


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_sides(nodes: TwoNodes) -> None:
    with sft(nodes) as running:
        running.wait_for_step(2)
        nodes.cut()
        began = time.monotonic()
        assert running.wait(GONE_SECONDS) == 1, running.stderr
        print(f"the link was cut: all gone after {time.monotonic() - began:.1f} s")
    assert "error: rank 1 on 10.77.0.2 has not responded for 15 s: stopped or unreachable, in step" in running.stderr


@pytest.mark.slow
def test_a_blocked_port_ends_both_sides(nodes: TwoNodes) -> None:
    """The process group's packets are dropped, the watchdog's are not: all ranks wait, and report where."""
    with sft(nodes) as running:
        running.wait_for_step(2)
        nodes.block_process_group()
        began = time.monotonic()
        assert running.wait(GONE_SECONDS) == 1, running.stderr
        print(f"the process group was blocked: all gone after {time.monotonic() - began:.1f} s")
    assert "error: deadlock: no rank has made progress for" in running.stderr
    assert "all_reduce (train/" in running.stderr
    assert re.search(r"- data from rank \d on 10.77.0.\d to 10.77.0.\d:\d+ does not arrive\n", running.stderr)
    assert "a connection between them is blocked" in running.stderr


@pytest.mark.slow
def test_ranks_of_another_machine_end_with_the_launcher(nodes: TwoNodes) -> None:
    with sft(nodes) as running:
        running.wait_for_step(1)
        running.process.kill()
        assert running.wait(GONE_SECONDS) == -signal.SIGKILL
    here = subprocess.run(["ip", "netns", "pids", nodes.names[1]], capture_output=True, text=True, check=True)
    assert here.stdout == ""
