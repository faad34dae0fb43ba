"""Standard input, output and error in odd states, and terminals that lie about themselves."""

from __future__ import annotations

import os
import pty
import signal

from tests.faults.attacks.lab import Attacks, Lab

ATTACKS = Attacks("Streams and terminals")

TO_TERMINAL = "os.dup2(os.open({name!r}, os.O_RDWR | os.O_NOCTTY), 1); os.dup2(1, 2)"
REBUILD = """
import sys
sys.stdout = open(1, "w", closefd=False)
sys.stderr = open(2, "w", closefd=False)
"""


@ATTACKS("standard input closed")
def no_input(lab: Lab) -> str:
    lab.write()
    lab.trained(acts=[("start", 0, "os.close(0)")])
    lab.goes_on()
    return "trained to the end"


@ATTACKS("all three streams closed")
def no_streams(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("start", 0, "os.close(0); os.close(1); os.close(2)")])
    assert done.status == 0, done.status
    lab.goes_on()
    return "trained to the end; files opened meanwhile are not written into"


@ATTACKS("standard output is full (/dev/full) in the middle of the run")
def full_midway(lab: Lab) -> str:
    lab.write()
    lab.trained(acts=[("step", 4, "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)")])
    lab.goes_on()
    return "trained to the end"


@ATTACKS("standard error is full in the middle of the run")
def errors_full(lab: Lab) -> str:
    lab.write()
    lab.trained(acts=[("step", 4, "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)")])
    lab.goes_on()
    return "trained to the end"


@ATTACKS("the reader of standard output goes away in step 4")
def reader_gone(lab: Lab) -> str:
    lab.write()
    lines = "r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r)"
    done = lab.start(acts=[("step", 4, lines)])
    assert done.status in (0, 141, 143), (done.status, done.output)
    lab.goes_on()
    return f"ends with {done.status} after a save; goes on bit-identical"


@ATTACKS("the terminal hangs up in step 4 (its other end is closed)")
def terminal_gone(lab: Lab) -> str:
    lab.write()
    lines = "import pty; m, s = pty.openpty(); os.dup2(s, 1); os.dup2(s, 2); os.close(s); os.close(m)"
    done = lab.start(acts=[("step", 4, lines)])
    assert done.status in (0, 129, 141, 143), (done.status, done.output)
    lab.goes_on()
    return f"ends with {done.status}; goes on bit-identical"


def sized(lab: Lab, columns: str, lines: str = "24") -> None:
    """Train with these words for the terminal's size."""
    at = Lab(lab.folder / f"columns{columns or 'none'}".replace("-", "m"), lab.zygotes, lab.whole)
    at.write()
    environment = f"os.environ.update(COLUMNS={columns!r}, LINES={lines!r})"
    done = at.start(acts=[("start", 0, environment)])
    assert done.status == 0, (columns, done.output)


@ATTACKS("COLUMNS of 0, 1, -5, abc, 10^9 and nothing")
def odd_widths(lab: Lab) -> str:
    for columns in ("0", "1", "-5", "abc", "1000000000", ""):
        sized(lab, columns, "0" if columns == "0" else "24")
    return "trained to the end at each"


@ATTACKS("a terminal of 1 x 1 characters")
def tiny_terminal(lab: Lab) -> str:
    import fcntl
    import struct
    import termios

    lab.write()
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 1, 1, 0, 0))
    reader = os.fork()
    if reader == 0:
        os.close(slave)
        try:
            while os.read(master, 65536):
                pass
        finally:
            os._exit(0)
    try:
        lab.trained(acts=[("start", 0, TO_TERMINAL.format(name=os.ttyname(slave)) + "\n" + REBUILD)])
    finally:
        os.close(slave)
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)
        os.close(master)
    return "trained to the end"


@ATTACKS("TERM of dumb, nothing and a terminal that does not exist; NO_COLOR, FORCE_COLOR")
def odd_terminals(lab: Lab) -> str:
    for number, setting in enumerate(({"TERM": "dumb"}, {"TERM": ""}, {"TERM": "zz-9"}, {"NO_COLOR": "1"},
                                      {"FORCE_COLOR": "1"}, {"CLICOLOR_FORCE": "x", "COLORTERM": "?"})):  # fmt: skip
        at = Lab(lab.folder / str(number), lab.zygotes, lab.whole)
        at.write()
        at.trained(acts=[("start", 0, f"os.environ.update({setting!r})")])
    return "trained to the end with each"
