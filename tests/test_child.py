"""The child process of measurements: its pipe in both directions, its end, and Ctrl-C, which it ignores."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection

from streamtune.base.child import Child


def echo(connection: Connection, more: str) -> None:
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    connection.send((connection.recv() + more, ignored))


def endless(connection: Connection) -> None:
    connection.send("here")
    time.sleep(600)


def test_it_answers_and_leaves_ctrl_c_to_its_parent() -> None:
    before = signal.getsignal(signal.SIGINT)
    child = Child(echo, " and back")
    child.connection.send("there")
    assert child.connection.recv() == ("there and back", True)
    child.close(seconds=10)
    assert child.process.exitcode == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_killed_where_it_does_not_end() -> None:
    child = Child(endless)
    assert child.connection.recv() == "here"
    child.close(seconds=0)
    assert child.process.exitcode == -signal.SIGKILL
