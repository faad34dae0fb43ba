"""The power goes: writes that were not synced are lost, and the run goes on from what was."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

from tests.faults.crash import Crash, replay
from tests.faults.kit import (
    ALL,
    COUNT,
    Zygotes,
    complete_checkpoints,
    differences,
    lines_of,
    report,
    size,
    state_of,
    write_sft,
)


def lay_out(crash: Crash, folder: Path) -> None:
    """The files of a crashed disk."""
    folder.mkdir()
    for name, content in crash.files.items():
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def key(crash: Crash) -> str:
    """Equal states are tried once."""
    digest = hashlib.sha256()
    for name in sorted(crash.files):
        content = crash.files[name]
        digest.update(repr((name, None if content is None else hashlib.sha256(content).digest())).encode())
    return digest.hexdigest()


def test_what_was_not_synced_is_lost_and_the_run_is_not(zygotes: Zygotes, tmp_path: Path) -> None:
    changes = {"save_steps": 5, "save_total_limit": 1}
    source = tmp_path / "source"
    write_sft(source, **changes)
    log, graves, root = tmp_path / "log", tmp_path / "graves", source / "runs"
    graves.mkdir()
    done = zygotes.run(source, arm=(str(root), ALL, 0, COUNT, 0, str(log), str(graves)))
    assert done.status == 0, done.output
    whole = state_of(root / "tiny")

    states = list(replay(log, root, graves))
    committed = next(
        index
        for index, call in enumerate(lines_of(log), start=1)
        if call[0] == "syncdir" and call[3].endswith("/checkpoints") and index > 20
    )
    unique: dict[str, Crash] = {}
    for crash in states:
        unique.setdefault(key(crash), crash)
    chosen = list(unique.values())
    chosen = chosen if size(1, 0) else random.Random(3).sample(chosen, 4)

    def trial(case: tuple[int, Crash]) -> list[str]:
        number, crash = case
        folder = tmp_path / f"crash-{number}"
        write_sft(folder, **changes)
        lay_out(crash, folder / "runs")
        kept = complete_checkpoints(folder / "runs/tiny")
        again = zygotes.run(folder)
        assert again.status == 0, f"{crash.kind} after {crash.after} calls: {again.output}"
        found = differences(state_of(folder / "runs/tiny"), whole)
        if crash.after >= committed and not kept:
            found.append("the committed checkpoint is lost")
        shutil.rmtree(folder)
        return [f"{crash.kind} after {crash.after} calls: {text}" for text in found]

    found = zygotes.each(trial, enumerate(chosen))
    lost = [text for texts in found for text in texts]
    report("crash", states=len(states), distinct=len(chosen), recovered=sum(not texts for texts in found))
    assert lost == []
