"""Closed, full, broken or narrow standard streams: the exit code is right, and no bug is reported."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.kit import write_sft
from tests.faults.signals_kit import environment, events

from streamtune.base.streams import lost_output_error, replace_standard_streams

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="streams of Linux")


def shell(folder: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a bash line with ``$S`` as the command; return its output and the exit code of the first in a pipe."""
    command = f"{sys.executable} -m streamtune"
    return subprocess.run(
        ["bash", "-c", f"S='{command}'\n{line}\nexit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def is_sound(done: subprocess.CompletedProcess[str]) -> bool:
    """Return True if the output has no traceback and no report of a bug."""
    return not any(word in done.stdout + done.stderr for word in ("Traceback", "this is a bug", "Exception ignored"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("$S validate tiny.yaml >&-", 0, ""),
        ("$S validate tiny.yaml <&- >&- 2>&-", 0, ""),
        ("$S validate nowhere.yaml 2>&-", 2, ""),
        ("$S validate nowhere.yaml 2>/dev/full", 2, ""),
        ("$S validate nowhere.yaml >/dev/full", 2, "the file does not exist"),
        ("$S validate tiny.yaml --json >/dev/full", 1, "the output cannot be written: No space left on device"),
        ("$S validat 2>/dev/full", 2, ""),
        ("$S schema >/dev/full", 1, "the output cannot be written: No space left on device"),
        ("$S schema | head -n 1", 0, "{"),
        ("$S schema | true", 0, ""),
        ("$S --help | true", 0, ""),
        ("PYTHONUNBUFFERED=1 $S schema | true", 0, ""),
        ("PYTHONIOENCODING=ascii $S validate tiny.yaml --json", 0, '"ok": true'),
        ("LC_ALL=C PYTHONUTF8=0 $S validate tiny.yaml --set output_dir=ö", 2, ": set PYTHONUTF8=1, or LC_ALL=C.UTF-8"),
        ("COLUMNS=10 $S --help", 0, "Usage"),
        ("COLUMNS=0 $S validate tiny.yaml", 0, "OK tiny.yaml"),
        ("COLUMNS=10 $S validate nowhere.yaml", 2, "the file does not exist"),
        ("mkdir gone; cd gone; rmdir ../gone; $S env", 2, "the current directory was deleted"),
        ("setsid $S validate tiny.yaml", 0, "OK tiny.yaml"),
    ],
)
def test_a_command_that_prints(tmp_path: Path, line: str, code: int, said: str) -> None:
    write_sft(tmp_path)
    done = shell(tmp_path, line)
    assert done.returncode == code, done.stderr
    assert is_sound(done)
    assert said in done.stdout + done.stderr
    if not said:
        assert done.stdout + done.stderr == ""


def test_a_sign_that_the_locale_has_not_is_shown_by_its_number(tmp_path: Path) -> None:
    program = (
        "from streamtune.base.streams import replace_standard_streams; replace_standard_streams(); print(chr(0x258f))"
    )
    done = shell(tmp_path, f"LC_ALL=C PYTHONUTF8=0 {sys.executable} -c '{program}'")
    assert (done.returncode, done.stdout) == (0, "\\u258f\n"), done.stderr


def in_terminal(folder: Path, columns: int, *arguments: str) -> tuple[int, str]:
    """Return exit code and output of a command in a terminal of ``columns`` columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "streamtune", *arguments],
        cwd=folder,
        env={**environment(), "TERM": "xterm", "COLUMNS": str(columns)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how it ends when nobody has the other side any more
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    return process.wait(), shown.decode()


@pytest.mark.parametrize(
    ("arguments", "code", "said"), [("tiny.yaml", 0, "13"), ("no.yaml", 2, "the file does not exist")]
)
def test_a_terminal_of_ten_columns(tmp_path: Path, arguments: str, code: int, said: str) -> None:
    write_sft(tmp_path, learning_rate=0.13)
    found, shown = in_terminal(tmp_path, 10, "validate", arguments)
    assert found == code
    assert said in shown  # and not a column of dots
    assert "this is a bug" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "tiny.yaml"),
        ("verify", "tiny.yaml"),
        ("bench", "tiny.yaml", "--lengths", "32", "--repeats", "1"),
        ("probe-max-len", "tiny.yaml", "--device-memory", "1GiB", "--from", "32", "--to", "64"),
        ("sft", "tiny.yaml", "--set", "max_steps=2"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_in_a_narrow_terminal_and_without_output(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write_sft(tmp_path)
    found, shown = in_terminal(tmp_path, 10, *arguments)
    assert found == 0, shown
    assert "Traceback" not in shown
    lost = 0 if arguments[0] == "sft" else 1  # whose results are files
    for redirected, code in ((">&- 2>&-", 0), (">/dev/full 2>/dev/full", lost), ("| true", 143 if lost == 0 else 0)):
        done = shell(tmp_path, f"$S {' '.join(arguments)} --set output_dir=o{code} {redirected}")
        assert done.returncode == code, (redirected, done.stderr)
        assert is_sound(done)


@pytest.mark.slow
def test_a_run_goes_on_without_a_place_for_its_output(tmp_path: Path) -> None:
    write_sft(tmp_path)
    done = shell(tmp_path, "$S sft tiny.yaml --set max_steps=2 >/dev/full 2>/dev/full")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/tiny/final/model.safetensors").exists()
    last = events(tmp_path / "runs/tiny")[-1]
    assert (last["event"], last["output"]) == ("finish", "lost: No space left on device")


@pytest.mark.slow
def test_a_run_whose_reader_has_gone_saves_and_leaves(tmp_path: Path) -> None:
    write_sft(tmp_path, num_train_epochs=200)
    done = shell(tmp_path, "$S sft tiny.yaml | grep -m 1 step=3/")
    assert done.returncode == 143, done.stderr
    assert is_sound(done)
    assert "step=3/" in done.stdout
    said = events(tmp_path / "runs/tiny")
    assert said[-1]["event"] == "stop"
    assert said[-1]["reason"] == "the reader of the output has gone"
    step = said[-1]["step"]
    assert isinstance(step, int)
    assert step >= 3
    assert (tmp_path / f"runs/tiny/checkpoints/step-{step:06d}/manifest.json").exists()
    go_on = f"$S sft tiny.yaml --set max_steps={step + 1} --allow-change max_steps"
    done = shell(tmp_path, f"{go_on} --allow-change num_train_epochs")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, step + 2))


def test_what_is_printed_is_as_before(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that replaced its streams nothing changes, and the original streams are restored."""
    before = sys.stdout
    replace_standard_streams()()
    assert sys.stdout is before
    with os.fdopen(os.dup(1), "w") as own:
        monkeypatch.setattr(sys, "stdout", own)
        monkeypatch.setattr(sys, "__stdout__", own)
        replace_standard_streams()()
        assert sys.stdout is own
    assert lost_output_error() is None
