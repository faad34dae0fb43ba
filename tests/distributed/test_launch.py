"""Ranks started by one command: their environment, their start and end, and errors in options."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamtune.distributed.environment import expand_nodes, expand_tasks, read_environment
from streamtune.distributed.failure import Failure, RankEnd, error_of_first_failed_rank
from streamtune.distributed.hosts import Host, read_hostfile
from streamtune.distributed.launcher import _check_devices, launch, without_launch_options
from streamtune.distributed.remote_ranks import AGENT
from streamtune.errors import ArgumentError, DataError, StreamTuneError
from tests.distributed.ranks_kit import SRC
from tests.distributed.running import Running, command
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

TINY: dict[str, Any] = {
    **RECIPE,
    "max_length": 256,
    "engine": FIXED,
    "train_batch_size": 4,
    "max_steps": 400,
    "save_steps": 0,
}
GONE_SECONDS = 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    write_rows(tmp_path, 20)
    write_recipe(tmp_path, TINY)
    return tmp_path


# --- which rank this is ------------------------------------------------------------------------------------------


def test_an_ordinary_process_is_alone() -> None:
    found = read_environment({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "HOME": "/root"})
    assert (found.launcher, found.rank, found.world_size) == ("none", 0, 1)


@pytest.mark.parametrize(
    ("variables", "launcher", "place", "master"),
    [
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
             "MASTER_PORT": "29501", "TORCHELASTIC_RUN_ID": "none"},
            "torchrun", (3, 1, 4, 2), ("a", 29501),
        ),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1",
             "MASTER_ADDR": "a", "MASTER_PORT": "29501"},
            "deepspeed", (3, 1, 4, 2), ("a", 29501),
        ),
        (
            {"SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "5", "SLURM_NODEID": "1",
             "SLURM_STEP_NODELIST": "gpu[07-08,10]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "MASTER_PORT": "2000"},
            "srun", (4, 1, 5, 2), ("gpu07", 2000),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": "2000"},
            "mpirun", (1, 1, 2, 2), ("127.0.0.1", 2000),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "b",
             "MASTER_PORT": "2000"},
            "mpirun", (1, 0, 2, 1), ("b", 2000),
        ),
    ],
    ids=["torchrun", "deepspeed", "srun", "openmpi", "mpich"],
)  # fmt: skip
def test_what_launchers_say(
    variables: dict[str, str], launcher: str, place: tuple[int, ...], master: tuple[str, int]
) -> None:
    found = read_environment(variables)
    assert found.launcher == launcher
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == place
    assert (found.master_addr, found.master_port) == master
    environ = dict(variables)
    found.export_variables(environ)
    assert (environ["RANK"], environ["LOCAL_WORLD_SIZE"]) == (str(found.rank), str(found.local_world_size))
    assert int(environ["OMP_NUM_THREADS"]) >= 1


def test_slurm_gives_every_rank_of_a_job_the_same_port() -> None:
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
    each = [
        read_environment({**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank),
                          "SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
        for rank in (0, 1)
    ]  # fmt: skip
    assert each[0].master_port == each[1].master_port
    assert each[0].run_id == each[1].run_id
    assert each[0].run_id != read_environment({**common, "SLURM_JOB_ID": "8", "SLURM_PROCID": "0"}
                                              | {"SLURM_LOCALID": "0"}).run_id  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
         "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    ],
)  # fmt: skip
def test_variables_that_make_no_sense(variables: dict[str, str]) -> None:
    with pytest.raises(ArgumentError):
        read_environment(variables)


def test_slurms_short_forms() -> None:
    assert expand_nodes("a,n[01-03,7],b[1-2]x[3,4]") == "a n01 n02 n03 n7 b1x3 b1x4 b2x3 b2x4".split()  # noqa: SIM905
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]


# --- what is asked for ---------------------------------------------------------------------------------------------


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode-a slots=8\n\nme@10.0.0.2  slots=4 # half\n")
    hosts = read_hostfile(path)
    assert [(host.name, host.address, host.slots) for host in hosts] == [
        ("node-a", "node-a", 8),
        ("me@10.0.0.2", "10.0.0.2", 4),
    ]
    assert [host.slots for host in read_hostfile(path, 2)] == [2, 2]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a slots=2\nb slotz=3\n", ":2", "not a valid hostfile line"),
        ("-oProxyCommand=x slots=1\n", ":1", "not a valid hostfile line"),
        ("a\n", ":1", "lacks the number of ranks"),
        ("a slots=0\n", ":1", "0 slots, expected at least 1"),
        ("a slots=1\n\na slots=2\n", ":3", "twice"),
        ("localhost slots=1\nb slots=1\n", ":1", "a different machine on every host"),
        ("# nothing\n", "hosts", "has no host"),
    ],
)
def test_a_hostfile_that_says_something_else(tmp_path: Path, text: str, line: str, said: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=said) as caught:
        read_hostfile(path)
    assert caught.value.where.endswith(line)


def test_the_ranks_get_the_arguments_without_those_of_the_launcher() -> None:
    given = ["sft", "r.yaml", "--nproc", "2", "--set", "a=1", "--hostfile=h", "--resume", "never"]
    assert without_launch_options(given) == ["sft", "r.yaml", "--set", "a=1", "--resume", "never"]


def test_no_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nproc", "0") == 2
    assert capsys.readouterr().err == "error: --nproc must be 1 or more, found 0\nwhere: --nproc\nfix: set 1 or more\n"


def test_ranks_of_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    assert run("--nproc", "2") == 2
    assert "this process is already rank 0 of 2, started by torchrun" in capsys.readouterr().err


def test_a_port_that_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert run("--nproc", "2") == 2
    assert "is in use by another program\nwhere: MASTER_PORT" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_the_agent_of_another_host_starts_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-m", AGENT]
    started = subprocess.run(command, input="", capture_output=True, text=True, timeout=100)
    assert (started.returncode, started.stderr) == (0, "")
    assert "hello" in json.loads(started.stdout)


def test_more_ranks_than_devices() -> None:
    _check_devices(Host("here", 4), 4)
    _check_devices(Host("here", 4), 0)  # on the CPU
    with pytest.raises(ArgumentError, match="4 ranks need 4 devices, but here has 2"):
        _check_devices(Host("here", 4), 2)


def ssh(folder: Path, line: str) -> str:
    """Write a replacement of ssh, which gets a host and a shell command line."""
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255',
         "faraway cannot be reached: ssh: connect to host faraway port 22: No route to host\nwhere: hosts:1"),
        ("""exec sh -c "$(echo "$2" | sed 's/ -m / -I -S -m /')" """,
         "faraway cannot run streamtune: "),
    ],
    ids=["unreachable", "not installed"],
)  # fmt: skip
def test_a_host_that_cannot_help(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    monkeypatch.setenv("STREAMTUNE_SSH", ssh(folder, line))
    Path("hosts").write_text("faraway slots=2\n")
    assert run("--hostfile", "hosts") == 1
    shown = capsys.readouterr().err
    assert said in shown
    if "cannot run" in said:
        assert "No module named" in shown


@pytest.mark.full
def test_ranks_of_another_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the agent and back: rank 0's output, and the exit code."""
    monkeypatch.setenv("STREAMTUNE_SSH", ssh(folder, 'exec sh -c "$2"'))
    Path("hosts").write_text("faraway slots=2\n")
    assert launch(["--version"], nproc=None, hostfile=Path("hosts")) == 0
    assert capsys.readouterr().out.startswith("streamtune ")
    with pytest.raises(StreamTuneError, match="the file does not exist") as caught:
        launch(["validate", "nothing.yaml"], nproc=1, hostfile=Path("hosts"))
    assert caught.value.exit_code == 2


# --- who failed first ----------------------------------------------------------------------------------------------


def test_the_rank_that_failed_first_is_named() -> None:
    own = Failure.from_error(DataError("broken", where="rows:1"), 1, "b")
    report = Failure(
        1, "b", "rank 1 on b died without reporting an error, in step 3, batch 1/2", own=False, seen="died"
    )
    echo = Failure.from_error(RuntimeError("connection closed by peer"), 0, "a")
    cases = [
        # An error of one rank, and what the others saw of it.
        ([RankEnd(0, "a", 1, report, time=1.0), RankEnd(1, "b", 2, own, time=1.1)], 2, "rank 1 on b failed: broken"),
        # A killed rank, whose end made another one fail.
        ([RankEnd(0, "a", 1, echo, time=1.0), RankEnd(1, "b", -9, time=1.1)], 137, "rank 1 on b was killed by SIGKILL"),
        # The same with what was seen of it.
        ([RankEnd(0, "a", 1, report, time=1.0), RankEnd(1, "b", -9, time=1.1)], 137, "SIGKILL, in step 3, batch 1/2"),
        # The same error everywhere is nobody's in particular.
        (
            [
                RankEnd(rank, "a", 2, Failure.from_error(DataError("broken"), rank, "a"), time=float(rank))
                for rank in (0, 1)
            ],
            2,
            "broken",
        ),
        # One without a word, but with a log.
        (
            [RankEnd(1, "b", 3, None, ("Segfault ahead",), "rank-0001.log")],
            3,
            "code 3\nlast lines of its log:\nSegfault",
        ),
    ]
    for ends, code, said in cases:
        found = error_of_first_failed_rank(ends)
        assert found is not None
        assert found[1] == code
        assert said in str(found[0])
    assert isinstance(error_of_first_failed_rank(cases[3][0])[0], DataError)  # type: ignore[index]
    assert str(error_of_first_failed_rank(cases[3][0])[0]) == "broken"  # type: ignore[index]


def test_ranks_that_were_asked_to_end_have_not_failed() -> None:
    ends = [RankEnd(0, "a", 130), RankEnd(1, "a", -15, sent_signals=(signal.SIGTERM,)), RankEnd(2, "a", 0)]
    assert error_of_first_failed_rank(ends) is None


# --- trained ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_ctrl_c_in_a_terminal_saves_and_the_same_command_goes_on(folder: Path) -> None:
    """Two ranks in a terminal: rank 0 draws the live line, both stop once, and both resume."""
    ours, theirs = pty.openpty()
    in_terminal = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    call = [sys.executable, "-c", in_terminal, *command("sft", "tiny.yaml", "--nproc", "2")]
    seen: list[bytes] = []
    reader = threading.Thread(target=read_terminal, args=(ours, seen), daemon=True)
    reader.start()
    with Running(folder, call, terminal=theirs) as running:
        running.wait_for_step(2)
        os.write(ours, b"\x03")
        code = running.wait(120)
    os.close(theirs)
    reader.join(10)
    os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(seen).decode())
    assert code == 130, shown
    assert "\x1b[?25l" in shown, "a live line"
    assert shown.count("StreamTune 0") == 1
    assert shown.count("Stopping after this micro-batch") == 1
    log = (running.run / "logs/rank-0001.log").read_text()
    assert "StreamTune 0" in log
    assert log.count("Stopping after this micro-batch") == 1
    stopped = running.step
    assert (running.run / f"checkpoints/step-{stopped:06d}").is_dir()

    with Running(folder, command("sft", "tiny.yaml", "--nproc", "2")) as running:
        running.wait_for_step(stopped + 2)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(120) == 143, running.stderr
    events = (running.run / "events.jsonl").read_text()
    assert f'"event": "resume", "step": {stopped}' in events


@pytest.mark.slow
def test_fewer_ranks_whose_steps_would_have_fewer_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names keys that a user writes, and its fix works."""
    write_recipe(folder, {**TINY, "train_batch_size": None, "per_device_train_batch_size": 2, "max_steps": 2})
    with Running(folder, command("sft", "tiny.yaml", "--nproc", "2")) as running:
        assert running.wait(240) == 0, running.stderr
    more = ("--set", "max_steps=3", "--allow-change", "max_steps")
    assert run(*more) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "trains 4 rows per step on 2 ranks, but this recipe trains 2 on 1 rank" in shown
    assert "write train_batch_size: 4, which holds on any number of ranks, or start 2 ranks" in shown
    assert "gradient_accumulation_steps" not in shown.partition("--allow-change")[0]
    assert run(*more, "--set", "train_batch_size=4") == 0
    assert '"event": "resume", "step": 2' in (running.run / "events.jsonl").read_text()


def read_terminal(descriptor: int, into: list[bytes]) -> None:
    with suppress(OSError):  # how it ends when nobody has the other side any more
        while data := os.read(descriptor, 65536):
            into.append(data)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_all_within_seconds(folder: Path, how: signal.Signals, rank: int) -> None:
    with Running(folder, command("sft", "tiny.yaml", "--nproc", "2")) as running:
        running.wait_for_step(2)
        running.rank(rank).send_signal(how)
        began = time.monotonic()
        assert running.wait(GONE_SECONDS) == (137 if how == signal.SIGKILL else 1), running.stderr
        print(f"{how.name} of rank {rank}: all gone after {time.monotonic() - began:.1f} s")
    said = "was killed by SIGKILL" if how == signal.SIGKILL else "has not responded for 15 s: stopped by a signal"
    assert running.stderr.count("error:") == 1
    assert f"error: rank {rank} on {socket.gethostname()} {said}, in step" in running.stderr


@pytest.mark.slow
def test_the_ranks_end_with_their_launcher(folder: Path) -> None:
    with Running(folder, command("sft", "tiny.yaml", "--nproc", "2")) as running:
        running.wait_for_step(1)
        running.process.kill()
        assert running.wait(GONE_SECONDS) == -signal.SIGKILL


RAISES_IN_ONE_RANK = """
import ctypes, os, threading, time
if os.environ.get("RANK") == "1":
    main = threading.get_ident()
    def wait():
        while not os.path.exists("now"):
            time.sleep(0.05)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(MemoryError))
    threading.Thread(target=wait, daemon=True).start()
"""
"""Python runs it at its start: where the file ``now`` appears, memory runs out in rank 1, wherever it is."""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["streamtune", "torchrun"])
def test_an_error_of_one_rank_is_the_one_that_is_shown(folder: Path, launcher: str) -> None:
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(RAISES_IN_ONE_RANK)
    call = command("sft", "tiny.yaml", "--nproc", "2")
    if launcher == "torchrun":
        call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "streamtune", *call[3:5]]
    with Running(folder, call, PYTHONPATH=f"{SRC}:{folder / 'site'}") as running:
        running.wait_for_step(2)
        (folder / "now").touch()
        assert running.wait(GONE_SECONDS) == 1, running.stderr
    assert running.stderr.count("error: ") == 1
    assert f"error: rank 1 on {socket.gethostname()} failed: out of memory in step" in running.stderr
    assert "fix: " in running.stderr
    assert (running.run / "logs/rank-0001.log").exists()
