"""Signals that are not the ordinary stop, and ordinary ones at odd moments."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.attacks.lab import Attacks, Lab
from tests.faults.kit import complete_checkpoints

ATTACKS = Attacks("Signals")


def kill_self(name: str, times: int = 1) -> str:
    """Return lines that send a signal to the run."""
    return "; ".join([f"os.kill(os.getpid(), signal.{name})"] * times) + "; time.sleep(0.02)"


@ATTACKS("SIGSTOP for a second in the middle of a save, then SIGCONT")
def stopped_in_a_save(lab: Lab) -> str:
    lab.write()

    def then(pid: int) -> None:
        lab.wait_for_step(3)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    lab.trained(acts=[("save", 0, "time.sleep(0.1)")], after=then)
    lab.goes_on()
    return "bit-identical"


@ATTACKS("SIGTSTP and SIGCONT, as Ctrl-Z and fg")
def suspended(lab: Lab) -> str:
    lab.write()

    def then(pid: int) -> None:
        lab.wait_for_step(2)
        os.kill(pid, signal.SIGTSTP)
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)

    lab.trained(acts=[("forward", 0, "time.sleep(0.05)")], after=then)
    lab.goes_on()
    return "bit-identical"


@ATTACKS("SIGWINCH a hundred times")
def resized(lab: Lab) -> str:
    lab.write()
    lab.trained(acts=[("forward", 0, kill_self("SIGWINCH", 5))])
    lab.goes_on()
    return "bit-identical"


@ATTACKS("SIGUSR1, which schedulers send before the end of a slot")
def user_signal(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 5, kill_self("SIGUSR1"))])
    assert done.status in (0, -signal.SIGUSR1, 128 + signal.SIGUSR1), done.output
    ended = "ignored" if done.status == 0 else f"ends with {done.status}"
    lab.goes_on()
    return f"{ended}; goes on bit-identical"


@ATTACKS("SIGXCPU, the end of the allowed processor time")
def processor_time(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 5, kill_self("SIGXCPU"))])
    assert done.status in (-signal.SIGXCPU, 128 + signal.SIGXCPU), done.output
    lab.goes_on()
    return f"ends with {done.status}; goes on bit-identical"


@ATTACKS("SIGPIPE")
def broken_pipe_signal(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 5, kill_self("SIGPIPE"))])
    assert done.status in (0, 141), (done.status, done.output)
    lab.goes_on()
    return "ignored, as Python does; bit-identical"


@ATTACKS("SIGHUP in a step, a forward, an evaluation, a save, the model's writing")
def hang_up(lab: Lab) -> str:
    for number, (moment, nth) in enumerate({"step": 3, "forward": 7, "evaluation": 1, "save": 2, "final": 1}.items()):
        at = Lab(lab.folder / str(number), lab.zygotes, lab.whole)
        at.write()
        done = at.start(acts=[(moment, nth, kill_self("SIGHUP"))])
        assert done.status in (0, 129, 143, -signal.SIGHUP), (moment, done.status, done.output)
        at.goes_on()
    return "saves and leaves, at each; all go on bit-identical"


@ATTACKS("SIGTERM twice within a millisecond, in a save")
def twice(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("save", 2, kill_self("SIGTERM", 2))])
    assert done.status in (143, -signal.SIGTERM), (done.status, done.output)
    lab.goes_on()
    return f"leaves at once ({done.status}); goes on bit-identical"


@ATTACKS("SIGINT, then SIGTERM before the step ends")
def interrupt_then_terminate(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("forward", 8, kill_self("SIGINT") + "; " + kill_self("SIGTERM"))])
    assert done.status in (130, 143, -signal.SIGTERM), (done.status, done.output)
    lab.goes_on()
    return f"leaves at once ({done.status}); goes on bit-identical"


@ATTACKS("ten SIGINT while the data is prepared")
def many_interrupts(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("data", 1, kill_self("SIGINT", 10))])
    assert done.status in (130, -signal.SIGINT), (done.status, done.output)
    assert not lab.path.exists() or not complete_checkpoints(lab.path)
    lab.goes_on()
    return "130, no traceback; a new start trains bit-identical"


@ATTACKS("SIGTERM in the first step of all, before any checkpoint")
def first_step(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("forward", 1, kill_self("SIGTERM"))])
    assert done.status == 143, (done.status, done.output)
    lab.goes_on()
    return "saved after that step; goes on bit-identical"


@ATTACKS("SIGTERM after the last step, before the model is written")
def after_the_last_step(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("final", 1, kill_self("SIGTERM"))])
    assert done.status in (0, 143, -signal.SIGTERM), (done.status, done.output)
    lab.goes_on()
    return "the model is written or made at the next start; bit-identical"


@ATTACKS("SIGKILL of the process that renders chat templates")
def renderer_killed(lab: Lab) -> str:
    lab.write()
    lines = "import psutil; [child.kill() for child in psutil.Process().children(recursive=True)]"
    done = lab.start(acts=[("forward", 3, lines), ("evaluation", 1, lines)])
    assert done.status == 0, (done.status, done.output)
    return "of no effect once rows are prepared"


@ATTACKS("stopped by SIGTERM in each of the first nine steps, one start after another")
def stop_at_each(lab: Lab) -> str:
    lab.write()
    for _ in range(9):
        done = lab.start(acts=[("step", 1, kill_self("SIGTERM"))])
        assert done.status == 143, (done.status, done.output)
    lab.goes_on()
    return "ten starts, bit-identical"
