"""Steps that go wrong: found before the weights change, left out or taken again, and told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from streamtune.train import read_records
from streamtune.train.checkpoint import newest_checkpoint
from tests.faults.kit import MODEL, Zygotes, differences, kill_after, read_lines, report, size, state_of, write_sft

STEADY: dict[str, Any] = {"save_steps": 1, "save_total_limit": 99, "eval_steps": 0, "max_steps": 6}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        record for record in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if record["event"] == kind
    ]


def test_a_loss_that_is_not_finite_is_found_in_its_step(zygotes: Zygotes, tmp_path: Path) -> None:
    """Two micro-batches a step: micro-batch k belongs to step (k + 1) / 2, and the checkpoint before it is the last."""
    write_sft(tmp_path / "whole", **STEADY)
    assert zygotes.run(tmp_path / "whole").status == 0
    reference = tmp_path / "whole/runs/tiny"

    def trial(micro: int) -> tuple[int, list[str]]:
        folder = tmp_path / f"nan-{micro}"
        write_sft(folder, **STEADY)
        done = zygotes.run(folder, hook="not_finite", micro=micro)
        assert done.status == 1, done.output
        step, run = (micro + 1) // 2, folder / "runs/tiny"
        assert f"the loss of step {step} is nan; the weights were not changed" in " ".join(done.output.split())
        assert "rows.jsonl:" in done.output
        taken = read_records(run / "metrics.jsonl")
        late = len(taken) - (step - 1)
        found = []
        if step > 1:
            name = f"checkpoints/step-{step - 1:06d}/model/model.safetensors"
            ours, theirs = load_file(run / name), load_file(reference / name)
            found = [key for key in theirs if not ours[key].equal(theirs[key])]
        assert not (run / f"checkpoints/step-{step:06d}").exists()
        shutil.rmtree(folder)
        return late, found

    micros = range(1, 13) if size(1, 0) else (4, 7)
    found = zygotes.each(trial, micros)
    report("nan", trials=len(found), steps_late=max(late for late, _ in found), changed=sum(bool(d) for _, d in found))
    assert all(late == 0 and not changed for late, changed in found)


@pytest.mark.full
def test_skipped_steps_are_the_same_again_after_a_kill(zygotes: Zygotes, tmp_path: Path) -> None:
    changes = {"on_nan": "skip", "max_skips": 4}
    bad = {"hook": "not_finite", "rows": [":3", ":7"]}
    write_sft(tmp_path / "whole", **changes)
    done = zygotes.run(tmp_path / "whole", **bad)
    assert done.status == 0, done.output
    run = tmp_path / "whole/runs/tiny"
    skipped = [record["step"] for record in read_lines(run / "metrics.jsonl") if record.get("skipped")]
    assert 2 <= len(skipped) <= 4
    told = events(run, "non_finite")
    assert [event["step"] for event in told] == skipped
    assert all("rows.jsonl:" in event["rows"] for event in told)
    trained = [record["step"] for record in read_lines(run / "metrics.jsonl") if "loss" in record]
    assert sorted(trained + skipped) == list(range(1, 11))
    whole = state_of(run)
    for seconds in (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45) if size(1, 0) else (0.3,):
        folder = tmp_path / f"kill-{seconds}"
        write_sft(folder, **changes)
        zygotes.run(folder, after=kill_after(seconds), **bad)
        done = zygotes.run(folder, **bad)
        assert done.status == 0, done.output
        assert differences(state_of(folder / "runs/tiny"), whole) == []
        assert [event["step"] for event in events(folder / "runs/tiny", "non_finite")] == skipped


def test_no_more_steps_are_skipped_than_allowed(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path, on_nan="skip", max_skips=1)
    done = zygotes.run(tmp_path, hook="not_finite", rows=[":3", ":7"])
    assert done.status == 1
    assert "max_skips (1) is reached" in " ".join(done.output.split())


LONG: dict[str, Any] = {
    "longer": 200,
    "model": {"init": {**MODEL, "attention_dropout": 0.0}},
    "max_length": 4096,
    "max_steps": 4,
    "eval_steps": 0,
    "val_size": 0,
    "device": "cpu",
}
"""Rows of hundreds of tokens, which chunks of several sizes cut; no dropout, which is drawn chunk by chunk."""
COARSE = {"schedule": "fixed", "chunk_size": 4096, "head_chunk_size": 4096}


@pytest.mark.full
@pytest.mark.parametrize("engine", [COARSE, pytest.param({}, marks=pytest.mark.slow)], ids=["fixed", "auto"])
def test_memory_that_runs_out_is_planned_again(zygotes: Zygotes, tmp_path: Path, engine: dict[str, Any]) -> None:
    """The gradient is that of any other schedule."""
    write_sft(tmp_path / "whole", engine=engine, **LONG)
    assert zygotes.run(tmp_path / "whole").status == 0
    write_sft(tmp_path / "short", engine=engine, on_oom="replan", **LONG)
    done = zygotes.run(tmp_path / "short", hook="out_of_memory", micro=5, most=1024)
    assert done.status == 0, done.output
    ours, theirs = (read_lines(tmp_path / name / "runs/tiny/metrics.jsonl") for name in ("short", "whole"))
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    told = events(tmp_path / "short/runs/tiny", "out_of_memory")
    assert told[0]["step"] == 3
    assert told[-1]["replanned"]["chunk_size"] <= 1024
    assert told[0]["peak_bytes"] > 0
    assert "rows.jsonl:" in told[0]["rows"]
    saved = newest_checkpoint(tmp_path / "short/runs/tiny/checkpoints", print)
    assert saved is not None
    assert saved.state["identity"]["schedule"] == told[-1]["replanned"]


@pytest.mark.full
def test_memory_that_runs_out_stops_the_run_with_what_to_do(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path, engine=COARSE, **LONG)
    done = zygotes.run(tmp_path, hook="out_of_memory", micro=5, most=1024)
    assert done.status == 1
    said = " ".join(done.output.split())
    assert "out of memory in step 3, with a batch of 1 x" in said
    assert "(peak " in said
    assert "set on_oom: replan to continue with" in said
    assert "which gives the same gradient" in said
    assert events(tmp_path / "runs/tiny", "out_of_memory")[0]["next_schedule"]["chunk_size"] < 4096
