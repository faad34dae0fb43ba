"""The tier in a file: it leaves nothing behind however it ends, and says what is wrong where it cannot go on."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import streamtune
from streamtune import Schedule
from streamtune.engine.memory import disk as disk_module
from streamtune.engine.memory.disk import DiskTier
from streamtune.engine.memory.host import Arena, Tally
from streamtune.engine.memory.placement import Tiers
from streamtune.errors import StorageError
from tests.exactness.families import batch, build, gradients, reference

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")

CPU = torch.device("cpu")
MIB = 1 << 20


def disk(directory: Path) -> DiskTier:
    return DiskTier(CPU, str(directory), Arena(Tally()), Tally())


def schedule(directory: Path) -> Schedule:
    return Schedule(chunk_size=8, offload="disk", offload_dir=str(directory))


def files_open_in(directory: Path, process: int | str = "self") -> list[str]:
    """What a process holds open there, by name or without one."""
    found = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:  # the one this loop reads the folder with
            continue
    return [name for name in found if name.startswith(str(directory))]


def assert_works(tier: DiskTier) -> None:
    x = torch.randn(5, 3000)
    block = tier.put(x)
    assert torch.equal(block.get(), x)
    block.free()


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """The limit of ``ulimit -f``: a file that grows past it meets what a full disk means, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- the file -------------------------------------------------------------------------------------------------------


def test_the_file_has_no_name_and_goes_with_its_tier(tmp_path: Path) -> None:
    tier = disk(tmp_path / "made" / "for it")
    assert_works(tier)
    assert len(files_open_in(tmp_path)) == 1
    assert not list((tmp_path / "made" / "for it").iterdir())
    del tier
    gc.collect()
    assert not files_open_in(tmp_path)


def test_a_directory_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path)
    tier: Any = Tiers(schedule(Path("~/scratch"))).get_tier("disk", CPU)
    assert_works(tier)
    assert [path.name for path in tmp_path.rglob("*")] == ["me", "scratch"]


@pytest.mark.parametrize("missing", [["O_DIRECT"], ["O_TMPFILE"], ["O_DIRECT", "O_TMPFILE"], ["posix_fallocate"]])
def test_a_system_that_lacks_something(missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in missing:
        monkeypatch.delattr(os, name, raising=False)
    assert_works(disk(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_set_room_aside(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    assert_works(disk(tmp_path))


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flag = os.open, getattr(os, "O_DIRECT", 0)

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flag and flags & flag == flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert_works(disk(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(StorageError) as caught:
            disk(directory)
        assert caught.value.where == str(directory)
        assert "offload_dir" in caught.value.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_that_is_another_s(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="Permission denied"):
            disk(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_the_file_is_as_long_as_the_most_that_was_held(tmp_path: Path) -> None:
    tier, x = disk(tmp_path), torch.zeros(MIB // 4)
    for _ in range(3):
        blocks = [tier.put(x) for _ in range(4)]
        for block in reversed(blocks):
            block.get()
            block.free()
    assert tier.file is not None
    assert tier.tally.peak_bytes == tier.file.length == 4 * MIB
    assert tier.tally.moved_bytes == 24 * MIB


def test_losses_that_never_go_backward_take_no_more_of_the_disk(tmp_path: Path) -> None:
    """Each is dropped once the next one is there, as ``loss`` is in an evaluation with gradients on."""
    model, inputs = build("qwen3"), batch("plain")
    with streamtune.stream(model, schedule=schedule(tmp_path)) as handle:
        for _ in range(20):
            loss = model(**inputs).loss
        file = handle.tiers.get_tier("disk", CPU).file  # type: ignore[attr-defined]
        assert file.length < 3 * handle.tiers.disk.peak_bytes
        loss.backward()
        assert handle.tiers.disk.live_bytes == 0


def test_writes_under_way_outlive_their_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last to hold the file may be a thread that writes: it must not wait for itself, nor leave the file open."""
    go, real = threading.Event(), os.pwrite

    def slow(*args: Any) -> int:
        go.wait(30)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    tier = disk(tmp_path)
    for _ in range(3):
        tier.begin_write(tier.arena.allocate(MIB, CPU), 0, None)
    del tier
    gc.collect()
    assert files_open_in(tmp_path)
    go.set()
    deadline = time.monotonic() + 30
    while files_open_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not files_open_in(tmp_path)


# --- a step that meets trouble --------------------------------------------------------------------------------------


def test_a_disk_that_fills(tmp_path: Path) -> None:
    model, inputs = build("qwen3", num_hidden_layers=4), batch("plain")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    want = reference(model, inputs)
    model.zero_grad()
    with streamtune.stream(model, schedule=schedule(tmp_path)) as handle:
        with largest_file(48 << 10), pytest.raises(StorageError) as caught:
            gradients(model, inputs)
        assert "ulimit -f" in caught.value.what, "what filled is said"
        assert "0.00 GiB are needed for layer inputs" in caught.value.what
        assert "are free" in caught.value.what
        assert caught.value.where == str(tmp_path)
        assert "levels: 2" in caught.value.fix
        assert not list(tmp_path.iterdir())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        del caught
        assert handle.tiers.disk.live_bytes == 0
        model.zero_grad()
        want.check(gradients(model, inputs))  # there is room again


def test_a_full_disk_is_told_with_what_is_wanted_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = disk(tmp_path)
    block = tier.put(torch.zeros(MIB))
    monkeypatch.setattr(os, "posix_fallocate", full)
    free = shutil.disk_usage(tmp_path).free / (1 << 30)
    with pytest.raises(StorageError, match=r"the disk is full: 0\.02 GiB are needed for layer inputs") as caught:
        tier.put(torch.zeros(4 * MIB))
    assert float(caught.value.what.split()[-4]) == pytest.approx(free, rel=0.2)
    del caught
    assert tier.tally.live_bytes == 4 * MIB, "what was refused is not counted"
    assert torch.equal(block.get(), torch.zeros(MIB))


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_an_error_in_a_thread_ends_the_step_it_belongs_to(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("qwen3", num_hidden_layers=3), batch("plain")
    want = reference(model, inputs)
    model.zero_grad()

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with streamtune.stream(model, schedule=schedule(tmp_path)) as handle:
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            gradients(model, inputs)
        monkeypatch.undo()
        model.zero_grad()
        for _ in range(2):  # the step after it is not blamed
            model.zero_grad()
            found = gradients(model, inputs)
        want.check(found)
        assert handle.tiers.disk.live_bytes == 0


def test_an_error_after_weights_were_updated_does_not_deny_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``optim_in_backward`` the layers above have been updated when a lower layer's input cannot be read."""
    model, inputs = build("qwen3", num_hidden_layers=3), batch("plain")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def update(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        monkeypatch.setattr(os, "preadv", fail)

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with streamtune.stream(model, schedule=schedule(tmp_path)), pytest.raises(StorageError) as caught:
        model(**inputs).loss.backward()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "no weight was changed" not in str(caught.value)


def test_a_failed_write_leaves_no_host_memory_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tier = disk(tmp_path)
    monkeypatch.setattr(os, "pwrite", fail)
    blocks = [tier.put(torch.ones(10)) for _ in range(2)]
    for block in blocks:
        with pytest.raises(StorageError):
            block.get()
        block.free()
    monkeypatch.undo()
    for _ in range(disk_module.IN_FLIGHT + 1):  # as many as push the failed ones out
        assert_works(tier)
    assert tier.arena.tally.live_bytes <= disk_module.IN_FLIGHT * 5 * 3000 * 4
    assert tier.tally.live_bytes == 0


def test_a_file_that_lost_its_end(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    block = tier.put(torch.ones(MIB))
    block.written.result()  # type: ignore[attr-defined]
    (fd,) = [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)]
    os.truncate(fd, MIB)
    with pytest.raises(StorageError, match="shorter"):
        block.get()


def test_a_stream_that_is_removed_closes_its_file(tmp_path: Path) -> None:
    model, inputs = build("qwen3"), batch("plain")
    handle = streamtune.stream(model, schedule=schedule(tmp_path))
    for _ in range(2):
        gradients(model, inputs)
    assert len(files_open_in(tmp_path)) == 1
    handle.remove()
    gc.collect()
    assert not files_open_in(tmp_path)
    assert handle.tiers.disk.peak_bytes > 0, "what was counted stays"


def test_a_model_that_is_forgotten_closes_its_file(tmp_path: Path) -> None:
    model, inputs = build("qwen3"), batch("plain")
    handle = streamtune.stream(model, schedule=schedule(tmp_path))
    gradients(model, inputs)
    del model, handle
    gc.collect()
    assert not files_open_in(tmp_path)


def test_what_is_still_to_go_backward_keeps_the_file(tmp_path: Path) -> None:
    model, inputs = build("qwen3"), batch("plain")
    with streamtune.stream(model, schedule=schedule(tmp_path)):
        loss = model(**inputs).loss
    gc.collect()
    assert len(files_open_in(tmp_path)) == 1
    del loss
    gc.collect()
    assert not files_open_in(tmp_path)


KILLED = """
import sys, time
import streamtune
from streamtune import Schedule
from tests.exactness.families import batch, build

model = build("qwen3", num_hidden_layers=4)
schedule = Schedule(chunk_size=8, offload="disk", offload_dir=sys.argv[1])
handle = streamtune.stream(model, schedule=schedule)
loss = model(**batch("plain")).loss

def pause(grad):
    print("in mid-step", handle.tiers.disk.live_bytes, flush=True)
    time.sleep(600)

model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(pause)
loss.backward()
"""


@pytest.mark.full
def test_a_process_that_is_killed_in_mid_step_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in (str(Path(__file__).parents[2]), *sys.path) if path),
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().split()
            assert said[:2] == ["in", "mid-step"]
            assert int(said[2]) > 0
            assert len(files_open_in(tmp_path, process.pid)) == 1
            process.send_signal(signal.SIGKILL)
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
    assert not list(tmp_path.iterdir())
