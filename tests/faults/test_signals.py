"""Signals at random moments of every command: it ends in time, with the right code, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.figures import tell
from tests.faults.kit import Zygotes, complete_checkpoints, differences, size, state_of, write_sft
from tests.faults.signals_kit import COMMANDS, END_SECONDS, SFT, environment, events, interrupt, is_ready
from tests.faults.test_resume import write_dpo, write_grpo

TRAINED = {"sft": write_sft, "dpo": write_dpo, "grpo": write_grpo}
Whole = tuple[Path, dict[str, Any], float]


def write(name: str, folder: Path) -> None:
    """The recipe of a command."""
    if name in ("dpo", "grpo"):
        TRAINED[name](folder, max_steps=6, save_steps=2)
    else:
        write_sft(folder)


def saved(text: str) -> bool:
    """Whether a run has saved its first checkpoint."""
    return " saved=" in text


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_ctrl_c_from_the_first_instant_on(tmp_path: Path) -> None:
    write_sft(tmp_path)
    for after in (0.0, 0.2):
        ended = interrupt(tmp_path, ("validate", "tiny.yaml"), after)
        assert ended.sent
        assert ended.wrong == []
        assert ended.code == 130
        assert ended.output == "Stopped.\n"


def test_ctrl_c_while_libraries_are_loaded(tmp_path: Path) -> None:
    write_sft(tmp_path)
    ended = interrupt(tmp_path, SFT, 1.5)  # torch takes longer than that
    assert ended.wrong == []
    assert ended.code == 130


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_run_saves_and_goes_on_to_the_same_end(
    zygotes: Zygotes, whole: Whole, tmp_path: Path, signum: int, code: int
) -> None:
    write_sft(tmp_path)
    ended = interrupt(tmp_path, SFT, saved, signum=signum, code=code, seconds=30)
    assert ended.wrong == []
    assert ended.code == code
    assert events(tmp_path / "runs/tiny")[-1]["reason"] == signal.Signals(signum).name
    again = zygotes.run(tmp_path)
    assert again.status == 0, again.output
    assert differences(state_of(tmp_path / "runs/tiny"), whole[1]) == []


@pytest.mark.full
def test_hangups_never_count_as_the_second_signal(zygotes: Zygotes, whole: Whole, tmp_path: Path) -> None:
    """A terminal that is closed sends several: from its shell and from the kernel."""
    write_sft(tmp_path)
    done = zygotes.run(tmp_path, hook="hangups")
    assert done.status == 143, done.output
    assert "saved" in done.output
    assert events(tmp_path / "runs/tiny")[-1]["reason"] == "SIGHUP"
    again = zygotes.run(tmp_path)
    assert again.status == 0, again.output
    assert differences(state_of(tmp_path / "runs/tiny"), whole[1]) == []


def test_under_nohup_a_hangup_stays_ignored(zygotes: Zygotes, whole: Whole, tmp_path: Path) -> None:
    write_sft(tmp_path)
    done = zygotes.run(tmp_path, hook="hangups", nohup=True)
    assert done.status == 0, done.output
    assert differences(state_of(tmp_path / "runs/tiny"), whole[1]) == []


def test_a_run_goes_on_where_its_output_is_full(zygotes: Zygotes, whole: Whole, tmp_path: Path) -> None:
    write_sft(tmp_path)
    done = zygotes.run(tmp_path, hook="output_is_full")
    assert done.status == 0
    assert events(tmp_path / "runs/tiny")[-1]["output"] == "lost: No space left on device"
    assert differences(state_of(tmp_path / "runs/tiny"), whole[1]) == []


@pytest.mark.full
def test_a_run_whose_reader_has_gone_saves_and_leaves(zygotes: Zygotes, whole: Whole, tmp_path: Path) -> None:
    write_sft(tmp_path)
    done = zygotes.run(tmp_path, hook="reader_goes")
    assert done.status == 143, done.output
    assert "error" not in done.output
    last = events(tmp_path / "runs/tiny")[-1]
    assert (last["event"], last["reason"]) == ("stop", "the reader of the output has gone")
    assert complete_checkpoints(tmp_path / "runs/tiny")[-1] == last["step"]
    again = zygotes.run(tmp_path)
    assert again.status == 0, again.output
    assert differences(state_of(tmp_path / "runs/tiny"), whole[1]) == []


@pytest.mark.full
def test_a_run_whose_steps_were_mostly_skipped_has_failed(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path, on_nan="skip", max_skips=100)
    done = zygotes.run(tmp_path, hook="not_finite_but_the_first")
    assert done.status == 1, done.output
    assert "9 of 10 steps were skipped" in done.output
    assert "the first was step 2, with learning rate 0.00" in done.output
    assert "weights in float32" in done.output
    assert "model and checkpoints are kept" in done.output
    assert "Done" not in done.output
    assert (tmp_path / "runs/tiny/final/model.safetensors").exists()
    again = zygotes.run(tmp_path)  # at its end already, and as little trained as before
    assert again.status == 1, again.output


@pytest.mark.full
def test_a_run_with_a_few_skipped_steps_is_done(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path, on_nan="skip", max_skips=100)
    done = zygotes.run(tmp_path, hook="not_finite", micro=3)
    assert done.status == 0, done.output
    assert "1 of 10 steps, with a NaN or infinite loss or gradient" in done.output


@pytest.mark.slow
def test_the_terminal_is_as_before(tmp_path: Path) -> None:
    """Ctrl-C while a status line is drawn: the cursor is shown again, and the line is taken back."""
    write_sft(tmp_path)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "streamtune", *SFT]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**environment(), "TERM": "xterm", "COLUMNS": "80"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while b"\x1b[?25l" not in shown:  # the cursor is hidden by the first status line
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with pytest.raises(OSError):  # noqa: PT012 (how a terminal ends that nobody has open any more)
            while True:
                shown += os.read(ours, 65536)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert shown.endswith(b"\r\x1b[2K\x1b[?25hStopped.\r\n"), shown[-200:]


@pytest.mark.slow
def test_a_probe_ends_with_what_is_known_and_a_trial_ends_with_it(tmp_path: Path) -> None:
    write_sft(tmp_path)
    ended = interrupt(tmp_path, COMMANDS["probe"], lambda text: "length=32" in text, seconds=15)
    assert ended.wrong == []
    assert ended.code == 130
    assert "stopped before the end of the search" in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_any_moment(zygotes: Zygotes, tmp_path: Path, name: str) -> None:
    """Random moments of the command's whole life; where a run had begun it goes on to the same end."""
    write(name, tmp_path / "whole")
    life = interrupt(tmp_path / "whole", COMMANDS[name], 600.0)  # comes to its end before
    assert life.code == 0, life.output
    theirs = state_of(tmp_path / "whole/runs/tiny") if name in TRAINED else None
    chance = random.Random(name)
    found = []
    for number in range(size(12, 2)):
        folder = tmp_path / str(number)
        write(name, folder)
        ended = interrupt(folder, COMMANDS[name], chance.uniform(0.0, life.lasted))
        found.append(ended)
        if theirs is not None and ended.sent:
            again = zygotes.run(folder, command=name)
            if again.status != 0:
                ended.wrong.append(f"did not go on: {again.output[-1500:]}")
            elif name != "grpo":  # whose completions are drawn anew where the file with the reward is another
                ended.wrong += differences(state_of(folder / "runs/tiny"), theirs)
        shutil.rmtree(folder)
    wrong = [text for ended in found for text in ended.wrong]
    sent = [ended for ended in found if ended.sent]
    tell(
        f"signals_{name}",
        sum(not ended.wrong for ended in found),
        len(found),
        sent=len(sent),
        slowest_seconds=round(max((ended.seconds for ended in sent), default=0.0), 2),
    )
    assert wrong == []


def interrupt_after(seconds: float) -> Callable[[int], None]:
    """Waits from the moment the command has its handlers, then SIGINT, unless it has ended."""

    def press(pid: int) -> None:
        until = time.monotonic() + 10
        while not is_ready(pid) and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    return press


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["sft", "grpo", "plan", "verify", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "simulate"))],
)
def test_ctrl_c_once_libraries_are_there(zygotes: Zygotes, tmp_path: Path, name: str) -> None:
    """As above in forked commands, whose phases after the imports are all there is of them."""
    command, _, *arguments = COMMANDS[name]
    write(name, tmp_path / "whole")
    life = zygotes.run(tmp_path / "whole", *arguments, command=command)
    assert life.status == 0, life.output
    theirs = state_of(tmp_path / "whole/runs/tiny") if name in TRAINED else None
    chance = random.Random(name)
    wrong, slowest, stopped, count = [], 0.0, 0, size(15, 2)
    for number in range(count):
        folder, after = tmp_path / str(number), chance.uniform(0.02, life.seconds)
        write(name, folder)
        done = zygotes.run(folder, *arguments, command=command, after=interrupt_after(after))
        stopped += done.status == 130
        slowest = max(slowest, done.seconds - after)
        text = f"after {after:.2f} s: {done.status} {done.output[-1500:]}"
        if done.status not in (0, 130) or "Traceback" in done.output or "this is a bug" in done.output:
            wrong.append(text)
        if theirs is not None:
            again = zygotes.run(folder, *arguments, command=command)
            if again.status != 0:
                wrong.append(f"{text} did not go on: {again.output[-1500:]}")
            elif name != "grpo":  # the file with its reward has another path
                wrong += differences(state_of(folder / "runs/tiny"), theirs)
        shutil.rmtree(folder)
    tell(f"signals_forked_{name}", count - len(wrong), count, stopped=stopped, slowest_seconds=round(slowest, 2))
    assert wrong == []
    assert slowest < END_SECONDS
