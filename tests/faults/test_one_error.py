"""Two exports at once, seeds beyond any range, too few descriptors, escapes in answers: one error, nothing left."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streamtune.base import interrupts
from streamtune.base.privacy import escape_terminal_controls
from streamtune.cli.machine import machine_limit_error
from streamtune.data.reading.files import make_local_file, open_bytes
from streamtune.errors import ArgumentError, RunError
from streamtune.programs.export.write import MARK, check_export_folder, staging_export
from streamtune.train.staging import write_output


def test_a_second_export_to_the_same_folder_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging_export(out, 0) as partial:
        (partial / "model.safetensors").write_text("first")
        for _ in range(2):
            check_export_folder(out)
            with pytest.raises(ArgumentError, match="another export is writing"), staging_export(out, 0):
                raise AssertionError("never here")
        assert (partial / "model.safetensors").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_what_a_killed_export_left_is_written_over(tmp_path: Path) -> None:
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / MARK).touch()
    (left / "old").touch()
    with staging_export(tmp_path / "out", 0) as partial:
        assert [path.name for path in partial.iterdir()] == [MARK]
        (partial / "new").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    with pytest.raises(ValueError, match="in the middle"), staging_export(tmp_path / "again", 0):
        raise ValueError("in the middle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("left", ["nothing", "mark", "old"])
def test_wherever_an_export_is_killed_the_next_one_goes_on(left: str, tmp_path: Path) -> None:
    """Killed between making its folder and its mark, before it wrote, or while it removed what it had written."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    if left != "nothing":
        (partial / MARK).touch()
    if left == "old":
        (partial / "additional_chat_templates").mkdir()
        (partial / "additional_chat_templates/tool.jinja").touch()
    check_export_folder(tmp_path / "out")
    with staging_export(tmp_path / "out", 0) as made:
        (made / "new").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "out"]


def test_a_folder_is_removed_with_its_mark_last(tmp_path: Path) -> None:
    """A second Ctrl-C, or a kill, in the middle leaves a folder that the next export takes."""
    folder = tmp_path / "out.partial"
    (folder / "zz").mkdir(parents=True)
    for name in (MARK, "a", "model.safetensors", "zz/b"):
        (folder / name).touch()
    seen: list[list[str]] = []
    real = os.unlink

    def unlink(path: str, **options: Any) -> None:
        seen.append(sorted(os.listdir(folder)))  # noqa: PTH208
        real(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        interrupts.remove_folder(str(folder))
    assert not folder.exists()
    assert len(seen) >= 4
    assert all(MARK in names for names in seen)


def test_a_folder_of_the_user_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "out.partial").mkdir(exist_ok=True)
        (tmp_path / "out.partial" / name).write_text("mine")
    with pytest.raises(ArgumentError, match="exists and was not written by an export"):
        check_export_folder(tmp_path / "out")
    with pytest.raises(ArgumentError, match="another export"), staging_export(tmp_path / "out", 0):
        raise AssertionError("never here")
    assert (tmp_path / "out.partial/model.safetensors").read_text() == "mine"
    (tmp_path / "other.partial").symlink_to(tmp_path / "out.partial")
    with pytest.raises(ArgumentError, match="exists and was not written by an export"):
        check_export_folder(tmp_path / "other")


def open_many(held: ExitStack, rows: Path) -> None:
    for _ in range(1000):
        held.enter_context(open_bytes(make_local_file(rows, "rows.jsonl")))


def test_too_few_descriptors_are_said_so_wherever_a_file_is_opened(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "x"}))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))  # noqa: PTH208
        with ExitStack() as held, pytest.raises(RunError, match="too many open files") as caught:
            open_many(held, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "ulimit -n" in caught.value.fix
    known = machine_limit_error(OSError(errno.EMFILE, "Too many open files", "x.png"))
    assert known is not None
    assert "ulimit -n" in known.fix


@pytest.mark.parametrize("seed", [str(2**70), "-1", str(2**32)])
def test_a_seed_beyond_its_range_is_refused(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    from streamtune.cli import main

    with pytest.raises(SystemExit) as left:
        main(["generate", "nowhere", "--prompt", "x", "--seed", seed])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert "--seed" in said
    assert "4294967295" in said
    with pytest.raises(SystemExit) as left:
        main(["generate", "nowhere", "--prompt", "x", "--top-k", str(2**70)])
    assert left.value.code == 2


def test_answers_behind_a_pipe_have_no_escapes_and_all_letters() -> None:
    assert escape_terminal_controls("a\x1b]0;t\x07\x9b2J\r\nb\t\u200fא") == "a\\x1b]0;t\\x07\\x9b2J\r\nb\t\u200fא"


def test_a_result_that_finds_no_room_leaves_the_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    result = tmp_path / "probe.json"
    write_output(result, b"earlier")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write .*: File too large"):
            write_output(result, bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [result]
