"""The lock on a run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from streamtune.errors import ArgumentError, CheckpointError
from streamtune.train import RunDirectory
from streamtune.train.directory_lock import LOCK, DirectoryLock

pytest.importorskip("fcntl")


def test_who_comes_second_is_told_who_has_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a/run")
    with run.lock():
        before = {path: path.stat().st_mtime_ns for path in (run.path, run.path / LOCK)}
        with pytest.raises(ArgumentError) as caught:
            run.lock()
        assert f"another process is training in {run.path}: process {os.getpid()} on " in caught.value.what
        assert ", since 20" in caught.value.what
        assert before == {path: path.stat().st_mtime_ns for path in before}
    assert list(tmp_path.iterdir()) == [], "it was made for nothing"


@pytest.mark.quick("{")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1, "host": "h", "since": "then"}', "\xff"])
def test_a_lock_that_does_not_say_who_has_it(tmp_path: Path, text: str) -> None:
    with DirectoryLock(tmp_path):
        (tmp_path / LOCK).write_text(text, encoding="latin-1")
        with pytest.raises(ArgumentError, match="another process") as caught:
            DirectoryLock(tmp_path)
        assert caught.value.what == f"another process is training in {tmp_path}"


def test_a_directory_with_a_run_stays_and_one_that_was_there_stays_empty(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.claim({"recipe": {}}, "seed: 1\n"):
        pass
    with run.lock():
        pass
    assert {path.name for path in run.path.iterdir()} == {LOCK, "run.json", "recipe.yaml"}
    (tmp_path / "empty").mkdir()
    with RunDirectory(tmp_path / "empty").lock():
        pass
    assert list((tmp_path / "empty").iterdir()) == []


def test_what_is_not_a_run_gets_no_lock(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match="has no run"):
        RunDirectory(tmp_path).lock()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_begins_where_its_recipe_was_measured(tmp_path: Path) -> None:
    for name in ("probe.json", "probe.png", "bench.json", "bench.png"):
        (tmp_path / name).touch()
    run = RunDirectory(tmp_path)
    assert run.read_identity() is None
    with run.claim({"recipe": {}}, "seed: 1\n"):
        assert run.read_identity() == {"recipe": {}}
    assert (tmp_path / "probe.json").is_file()


def test_a_run_is_moved_aside_and_its_place_is_held(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.claim({"recipe": {}}, "seed: 1\n"):
        pass
    with run.lock() as lock:
        (tmp_path / "run.old-1").symlink_to(tmp_path / "nowhere")
        assert lock.move_aside() == tmp_path / "run.old-2"
        with RunDirectory(tmp_path / "run.old-2").lock():
            pass  # it is nobody's now
        run.path.mkdir()
        with pytest.raises(ArgumentError, match="another process"):
            lock.acquire(must_create=True)  # somebody was faster
        run.path.rmdir()
        lock.acquire(must_create=True)
        with pytest.raises(ArgumentError, match="another process"):
            run.lock()


def test_a_start_that_is_dropped_lets_go(tmp_path: Path) -> None:
    DirectoryLock(tmp_path / "run")
    with DirectoryLock(tmp_path / "run"):
        pass


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        DirectoryLock(tmp_path / "file" / "run")


def test_many_threads_make_and_remove_one_directory(tmp_path: Path) -> None:
    """A directory without a run is removed while others open it; no two threads ever have the lock."""
    inside, most, failed = [0], [0], list[Exception]()

    def start() -> None:
        for _ in range(60):
            try:
                with RunDirectory(tmp_path / "a/b/run").lock():
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    inside[0] -= 1
            except ArgumentError:
                pass
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert most[0] == 1
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


@pytest.mark.full
def test_a_killed_process_has_it_no_more_even_where_it_forked(tmp_path: Path) -> None:
    code = """
        import json, os, sys, time
        from pathlib import Path
        from streamtune.train.directory_lock import DirectoryLock
        lock = DirectoryLock(Path(sys.argv[1]))
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(json.dumps(child), flush=True)
        time.sleep(600)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = json.loads(process.stdout.readline())
        try:
            with pytest.raises(ArgumentError, match=f"process {process.pid} on"):
                DirectoryLock(tmp_path / "run")
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            with DirectoryLock(tmp_path / "run"):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
