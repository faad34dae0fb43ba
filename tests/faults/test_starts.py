"""Many starts in one directory: one run is in it, the others are refused, and nothing of the run is changed by them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kit import Zygotes, differences, read_lines, report, state_of, write_sft

Whole = tuple[Path, dict[str, Any], float]


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with a hash of its content, and every link with where it leads."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}"
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize(
    ("count", "held_at"),
    [
        (6, "loading"),
        pytest.param(6, 7, marks=pytest.mark.slow),
        pytest.param(40, "loading", marks=pytest.mark.slow),
        pytest.param(40, 7, marks=pytest.mark.slow),
    ],
)
def test_of_many_starts_one_trains_and_the_others_change_nothing(
    zygotes: Zygotes, whole: Whole, tmp_path: Path, count: int, held_at: str | int
) -> None:
    """The one that trains is held up, while it loads or in its fourth step, until all others have come and gone."""
    write_sft(tmp_path)
    done = zygotes.run(
        tmp_path, hook="many_starts", count=count, seed=count, seconds=max(whole[2], 1.0), held_at=held_at
    )
    assert done.status == 0, done.output
    ended = json.loads((tmp_path / "started.json").read_text())
    texts = [" ".join((tmp_path / f"started-{number}.txt").read_text().split()) for number in range(count)]
    won = [number for number, (_, code) in enumerate(ended) if code == 0]
    assert len(won) == 1, list(zip(ended, texts, strict=True))
    pid = ended[won[0]][0]
    for number in set(range(count)) - set(won):
        assert ended[number][1] == 2, texts[number]
        assert "another process is training in runs/tiny" in texts[number].replace(str(tmp_path) + "/", "")
        assert f"process {pid} on " in texts[number]
    run = tmp_path / "runs/tiny"
    assert differences(state_of(run), whole[1]) == []
    assert [record["event"] for record in read_lines(run / "events.jsonl")].count("start") == 1
    assert "resume" not in [record["event"] for record in read_lines(run / "events.jsonl")]
    report(f"starts_{count}_{held_at}", trials=count, trained=1, refused=count - 1)

    again = zygotes.run(tmp_path)  # as if it had begun after that one
    assert again.status == 0, again.output
    assert "Already finished" in again.output
    assert differences(state_of(run), whole[1]) == []


@pytest.mark.full
def test_a_dry_run_neither_needs_the_lock_nor_leaves_anything(zygotes: Zygotes, tmp_path: Path) -> None:
    from streamtune.train import RunDirectory

    write_sft(tmp_path, max_steps=2)
    assert zygotes.run(tmp_path, "--dry-run").status == 0
    assert not (tmp_path / "runs").exists()
    assert zygotes.run(tmp_path).status == 0
    before = tree(tmp_path / "runs")
    with RunDirectory(tmp_path / "runs/tiny").lock():
        assert zygotes.run(tmp_path, "--dry-run").status == 0
        assert zygotes.run(tmp_path).status == 2
    before.pop("tiny/.lock")
    after = tree(tmp_path / "runs")
    assert after.pop("tiny/.lock")
    assert after == before


def test_what_was_made_for_nothing_is_removed(zygotes: Zygotes, tmp_path: Path) -> None:
    """A start that fails before it trains leaves no directory, and a directory that was there as it was."""
    write_sft(tmp_path, datasets=[{"path": "nowhere.jsonl"}])
    assert zygotes.run(tmp_path).status == 2
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs/tiny").mkdir(parents=True)
    assert zygotes.run(tmp_path).status == 2
    assert list((tmp_path / "runs/tiny").iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("damage", ["flipped", "deleted"])
def test_a_run_none_of_whose_checkpoints_can_be_used_is_left_as_it_is(
    zygotes: Zygotes, tmp_path: Path, damage: str
) -> None:
    write_sft(tmp_path, max_steps=4, save_steps=2)
    assert zygotes.run(tmp_path).status == 0
    run = tmp_path / "runs/tiny"
    saved = sorted((run / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step-000002", "step-000004"]
    kept = {path: (path / "optimizer-00001.safetensors").read_bytes() for path in saved}
    for path in saved:
        file = path / "optimizer-00001.safetensors"
        if damage == "flipped":
            content = bytearray(kept[path])
            content[-1] ^= 1
            file.write_bytes(content)
        else:
            path.rename(tmp_path / path.name)
    before = tree(run)
    done = zygotes.run(tmp_path)
    told = " ".join(done.output.split())
    assert done.status == 1, told
    assert "--resume never moves this run aside" in told
    assert "nothing was changed" in told
    assert "going back" not in told
    if damage == "flipped":
        for path in saved:
            assert f"{path.relative_to(tmp_path)} is damaged: optimizer-00001.safetensors was changed" in (
                told.replace(f"{tmp_path}/", "")
            )
    after = tree(run)
    assert after.pop(".lock")
    before.pop(".lock")
    assert after == before

    if damage == "flipped":  # one of them is put back: the run goes back to it and says so
        (saved[0] / "optimizer-00001.safetensors").write_bytes(kept[saved[0]])
        done = zygotes.run(tmp_path)
        assert done.status == 0, done.output
        assert "going back to step-000002" in " ".join(done.output.split())
        assert (run / "checkpoints/step-000004.superseded").is_dir()
        assert len(read_lines(run / "metrics.jsonl")) == 5  # four steps and one evaluation
