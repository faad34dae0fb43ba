"""``select_rows`` from a recipe to a step: chosen rows, resumed runs, several ranks, the plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamtune.data import choose_rows_to_train, collate, find_small_sources
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.tasks.steps import SelectedSteps
from streamtune.train.sketch import adam_step
from tests.distributed.running import command
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

COMMON: dict[str, Any] = {
    **RECIPE,
    "datasets": [{"path": "many.jsonl"}, {"path": "few.jsonl"}],
    "engine": FIXED,
    "select_rows": "colm",
    "select_from": 3,
    "train_batch_size": 4,
    "per_device_train_batch_size": 2,
    "max_steps": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"finetuning_type": "lora", "lora_dropout": 0.2},
    "in the backward": {"optim_in_backward": True},
    "computed in bfloat16": {"bf16": True},
    "another loss": {"loss_type": "focal", "label_smoothing_factor": 0.0, "z_loss_coef": 1.0e-3},
    "weights on the host": {"engine": {**FIXED, "weights": "host"}},
    "a mixture": {"datasets": [{"path": "many.jsonl", "weight": 1.0}, {"path": "few.jsonl", "weight": 1.0}]},
}
IN_FULL = ("all weights",)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, count in (("few", 6), ("many", 40)):
        write_rows(tmp_path, count)
        (tmp_path / "rows.jsonl").rename(f"{name}.jsonl")
    return tmp_path


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def curve(folder: str) -> list[tuple[Any, ...]]:
    return [tuple(line.get(key) for key in ("step", "loss", "tokens", "grad_norm")) for line in lines(folder)]


def test_a_step_is_on_the_rows_that_plain_autograd_would_choose(folder: Path) -> None:
    """Step 1 has no AdamW moments yet; step 2 has the moments of one step."""
    run = build_run(load_recipe(write_recipe(folder, COMMON), []))
    training = run.start.task.make_training(run)
    steps, model = training.steps, run.model
    assert isinstance(steps, SelectedSteps)
    optimizer: torch.optim.Optimizer = run.backend.optimizer  # type: ignore[attr-defined]
    steps.sketch.optimizer = optimizer
    weight = model.model.layers[-1].self_attn.v_proj.weight
    twin = type(model)(model.config).eval()  # not streamed
    for number in (0, 1):
        drawn = steps.sampler.epoch_order(0)[12 * number : 12 * (number + 1)].tolist()
        twin.load_state_dict(model.state_dict())
        theirs, points = twin.model.layers[-1].self_attn.v_proj.weight, []
        for row in drawn:
            batch = collate([run.prepared.training[row]], pad_token_id=0)
            logits = twin(input_ids=batch["input_ids"]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, batch["shift_labels"][0], ignore_index=-100)
            (grad,) = torch.autograd.grad(loss, theirs)
            step = adam_step(grad, optimizer.state.get(weight, {}), optimizer.param_groups[0])
            points.append(steps.sketch.project(step.flatten()).numpy())
        sources = [int(row >= 40) for row in drawn]
        expected = choose_rows_to_train(np.array(points, dtype=np.float64), sources, 4, find_small_sources([40, 6]))
        batches = steps.next_step()
        origins = [origin for batch in batches for origin in batch.origins]
        assert origins == [run.prepared.training[drawn[place]].origin for place in expected.places]
        record = lines(str(run.directory.selected))[-1]
        assert (record["step"], record["of"], record["kept"]) == (number + 1, 12, expected.kept)
        assert record["rows"] == origins
        assert record["gap"] == pytest.approx(expected.gap, rel=1e-2)
        for batch in batches:
            training.objective.score(model, batch, 1.0).total_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.start.release()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind in IN_FULL else pytest.mark.slow) for kind in KINDS]
)
def test_trains_and_resumes_to_the_same_choices(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**COMMON, **KINDS[kind]})
    assert run("--output-dir", "whole") == 0
    assert " x 4 rows (chosen from 12, which takes a forward pass of each)" in capsys.readouterr().out
    settings = ("--set", "save_steps=1", "--set", "save_total_limit=99", "--output-dir", "split")
    assert run(*settings) == 0
    whole = lines("whole/selected.jsonl")
    assert [line["step"] for line in whole] == list(range(1, 9))
    for step in (3, 6):  # in the middle of an epoch
        assert run(*settings, "--resume", f"split/checkpoints/step-{step:06}") == 0
        assert lines("split/selected.jsonl") == whole
        assert curve("split/metrics.jsonl") == curve("whole/metrics.jsonl")


@pytest.mark.full
def test_an_epoch_draws_every_row_once(folder: Path) -> None:
    write_recipe(folder, {**COMMON, "max_steps": -1, "num_train_epochs": 1})
    assert run("--output-dir", "whole") == 0
    found = lines("whole/selected.jsonl")
    assert [line["of"] for line in found] == [12, 12, 12, 10]
    assert [len(line["rows"]) for line in found] == [4, 4, 4, 4]
    assert [line["epoch"] for line in lines("whole/metrics.jsonl")] == [0.25, 0.5, 0.75, 1.0]
    chosen = [row for line in found for row in line["rows"]]
    assert len(set(chosen)) == 16
    assert sum(line["kept"] for line in found) == sum("few" in row for row in chosen) == 6


@pytest.mark.slow
def test_where_weights_and_states_are_changes_no_choice(folder: Path) -> None:
    """A resumed run may have another engine; the moments are read from wherever they are."""
    write_recipe(folder, {**COMMON, "max_steps": 5})
    places: dict[str, list[str]] = {
        "device": [],
        "states": ["--set", "engine.optimizer=host"],
        "weights": ["--set", "engine.weights=host"],
        "backward": ["--set", "optim_in_backward=true"],
    }
    for name, changes in places.items():
        assert run("--output-dir", name, *changes) == 0
    chosen = {name: [line["rows"] for line in lines(f"{name}/selected.jsonl")] for name in places}
    assert chosen == dict.fromkeys(places, chosen["device"])


@pytest.mark.full
def test_two_ranks_choose_as_one(folder: Path) -> None:
    write_recipe(folder, {**COMMON, "max_steps": 5})
    assert run("--output-dir", "ranks1") == 0
    call = command("sft", "tiny.yaml", "--nproc", "2", "--output-dir", "ranks2")
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (lines(f"ranks{ranks}/selected.jsonl") for ranks in (1, 2))
    assert [line["rows"] for line in one] == [line["rows"] for line in two]
    for want, got in zip(lines("ranks1/metrics.jsonl"), lines("ranks2/metrics.jsonl"), strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["tokens"] == want["tokens"]


@pytest.mark.full
def test_another_choice_is_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**COMMON, "max_steps": 1})
    assert run() == 0
    assert run("--set", "select_from=4") != 0
    assert "select_from" in capsys.readouterr().err


@pytest.mark.full
def test_a_stop_while_rows_are_chosen_takes_no_step(folder: Path) -> None:
    """The stopped step is not counted, and the resumed run chooses the same rows."""
    built = build_run(load_recipe(write_recipe(folder, COMMON), []))
    steps: Any = built.start.task.make_training(built).steps
    before, asked = steps.state_dict(), iter([False, False, True])
    steps.is_stopped = lambda: next(asked)
    assert steps.next_step()
    assert steps.state_dict() == before
    assert not built.directory.selected.exists()
    built.start.release()


@pytest.mark.full
def test_the_plan_tells_the_time_of_choosing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the rows take twice the time; a forward of three rows takes less than three steps of one row."""
    write_recipe(folder, COMMON)
    found = []
    for times in (3, 6):
        assert run("--device", "h100", "--set", f"select_from={times}", "--json", command="plan") == 0
        found.append(json.loads(capsys.readouterr().out))
    first, second = found
    assert first["step_seconds"] == second["step_seconds"]
    assert second["select_seconds"] == pytest.approx(2 * first["select_seconds"])
    assert 0.5 * first["step_seconds"] < first["select_seconds"] < 3 * first["step_seconds"]
    assert run("--device", "h100", command="plan") == 0
    assert " of it for selecting 1 of 3 drawn rows" in capsys.readouterr().out
    assert run("--device", "h100", "--set", "select_rows=null", "--set", "select_from=2", "--json", command="plan") == 0
    assert "select_seconds" not in json.loads(capsys.readouterr().out)
