"""``streaming: true`` from a recipe to a trained model: like prepared rows, resumed anywhere, ranks, bad rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from streamtune.data.reading.data_paths import hub_rows
from streamtune.errors import DataError, RecipeError
from streamtune.models import train_tokenizer
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.tasks.streamed import StreamSteps
from streamtune.train import MicroBatch, World
from tests.distributed.running import command
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

KEYS: dict[str, Any] = {
    **RECIPE,
    "tokenizer": {"path": "tokenizer"},
    "max_length": 120,
    "overlength": "drop",
    "engine": FIXED,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "streaming": True,
    "shuffle_buffer": 5,
}
TIMINGS = ("tokens_per_s", "peak_mem_gib", "epoch")
UNSHUFFLED = {"shuffle": False, "shuffle_buffer": 10_000}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with 18 rows (rows over 120 tokens are dropped), two more datasets and an eval set."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 18)
    train_tokenizer([(tmp_path / "rows.jsonl").read_text()], vocab_size=300).save_pretrained(tmp_path / "tokenizer")
    for name, count in (("a", 12), ("b", 6), ("e", 4)):
        texts = [f"{name}{number} " * (3 + number % 4) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def records(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def steps_of(folder: Path, **more: Any) -> StreamSteps:
    built = build_run(load_recipe(write_recipe(folder, {**KEYS, **more}), []))
    steps = built.start.task.make_training(built).steps
    built.start.release()
    assert isinstance(steps, StreamSteps)
    return steps


def places(step: list[MicroBatch]) -> list[str]:
    return [Path(origin).name for batch in step for origin in batch.origins]


@pytest.mark.quick("rows")
@pytest.mark.parametrize("more", [{}, {"batching": "tokens", "tokens_per_batch": 300,
                                       "gradient_accumulation_steps": 1}], ids=["rows", "tokens"])  # fmt: skip
def test_without_a_shuffle_the_losses_are_those_of_prepared_rows(folder: Path, more: dict[str, Any]) -> None:
    keys = {**KEYS, **UNSHUFFLED, **more, "eval_datasets": {"e": "e.jsonl"}, "overlength": "split", "max_length": 60}
    write_recipe(folder, keys)
    assert run("--output-dir", "streamed") == 0
    write_recipe(folder, {**keys, "streaming": False})
    assert run("--output-dir", "prepared") == 0
    assert records("streamed") == records("prepared")
    assert len(records("streamed")) == 7  # six steps and an evaluation
    same = [Path(name, "final", "model.safetensors").read_bytes() for name in ("streamed", "prepared")]
    assert same[0] == same[1]
    assert "streamed" in json.loads(Path("streamed/data.json").read_text())
    assert "epoch" not in json.loads(Path("streamed/metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("how", ["replaced", "edited in place", "cut", "removed", "a new one beside it"])
@pytest.mark.quick("replaced", "edited in place")
def test_a_file_that_changes_in_the_middle_stops_before_its_rows_are_trained_on(folder: Path, how: str) -> None:
    (folder / "rows").mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").rename(folder / "rows" / f"{name}.jsonl")
    file = folder / "rows/b.jsonl"
    content = file.read_text()
    steps = steps_of(folder, datasets=[{"path": "rows/*.jsonl"}], **UNSHUFFLED)
    for _ in range(2):
        steps.next_step()
    os.utime(file, (1, 1))  # touched: the same bytes
    steps.next_step()
    steps.next_step()  # reads b
    before = steps.state_dict()
    if how == "replaced":
        (folder / "new").write_text(content.replace("b", "c"))
        (folder / "new").replace(file)
    elif how == "edited in place":
        file.write_text(content.replace("b5", "c5"))
    elif how == "cut":
        os.truncate(file, 10)
    elif how == "removed":
        file.unlink()
    else:
        (folder / "rows/a2.jsonl").write_text(content)
    with pytest.raises(DataError) as caught:
        deque((steps.next_step() for _ in range(6)), maxlen=0)
    assert "since the run began, so the streamed rows would differ" in caught.value.what
    assert "rows/a2.jsonl" in caught.value.what if how.startswith("a new") else "rows/b.jsonl" in caught.value.what
    assert "--allow-change data" in caught.value.fix
    (folder / "rows/a2.jsonl").unlink(missing_ok=True)
    file.write_text(content)
    steps.load_state_dict(before)
    steps.next_step()
    steps.close()


@pytest.mark.full
def test_a_run_that_stopped_at_a_file_that_changed_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run is resumed with the original file, and with the changed file after --allow-change."""
    write_recipe(folder, {**KEYS, "save_steps": 2, "max_steps": 8, "callbacks": ["swap.py:Swap"], "allow_code": True})
    whole, content = (folder / "rows.jsonl"), (folder / "rows.jsonl").read_text()
    (folder / "swap.py").write_text(
        "from pathlib import Path\n\n\nclass Swap:\n    def on_step(self, record):\n"
        "        if record['step'] == 3 and Path('new.jsonl').exists():\n"
        "            Path('new.jsonl').replace('rows.jsonl')\n"
    )
    assert run("--output-dir", "whole") == 0
    (folder / "new.jsonl").write_text(content.replace("1", "2"))
    assert run("--output-dir", "out") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "rows.jsonl was changed, replaced or removed since the run began, so the streamed rows would differ" in told
    assert [each["step"] for each in records("out") if "loss" in each] == [1, 2, 3]
    shutil.copytree("out", "other")
    whole.write_text(content)
    assert run("--output-dir", "out") == 0
    assert records("out") == records("whole")
    whole.write_text(content.replace("1", "2"))
    assert run("--output-dir", "other") == 2
    assert run("--output-dir", "other", "--allow-change", "data") == 0
    assert "it is read again from its beginning" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("more", [
    {"dataloader_num_workers": 2},
    {"overlength": "split", "split_overlap": 4, "max_length": 50, "batching": "tokens", "tokens_per_batch": 200,
     "gradient_accumulation_steps": 1},
    {"datasets": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 1}]},
    {"dataset_num_proc": 2},
], ids=["ahead", "split", "weights", "processes"])  # fmt: skip
@pytest.mark.quick("split")
def test_a_resume_anywhere_is_the_uninterrupted_stream(folder: Path, more: dict[str, Any]) -> None:
    steps = steps_of(folder, **more)
    states, seen = [steps.state_dict()], []
    for _ in range(30):
        seen.append(steps.next_step())
        states.append(json.loads(json.dumps(steps.state_dict())))
    assert states[-1]["epoch"] >= 1
    for number in (0, 1, 4, 7, 13, 24) if more.get("dataset_num_proc", 1) == 1 else (4,):
        steps.load_state_dict(states[number])
        for before in seen[number : number + 3]:
            again = steps.next_step()
            assert places(again) == places(before)
            assert all(a.input_ids.equal(b.input_ids) for a, b in zip(again, before, strict=True))
        assert steps.state_dict() == states[number + 3]
    steps.close()


@pytest.mark.full
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(folder: Path) -> None:
    """Step 4 is the last of the first pass, and step 5 the first of the second."""
    write_recipe(folder, {**KEYS, "save_steps": 2, "save_total_limit": 9, "max_length": 110})
    assert run("--output-dir", "run") == 0
    whole, final = records("run"), Path("run/final/model.safetensors").read_bytes()
    for last in (4, 2):
        for step in range(last + 2, 8, 2):
            shutil.rmtree(f"run/checkpoints/step-{step:06}")
        shutil.rmtree("run/final")
        assert run("--output-dir", "run") == 0
        assert records("run") == whole
        assert Path("run/final/model.safetensors").read_bytes() == final


@pytest.mark.full
def test_a_resume_over_changed_files_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**KEYS, "save_steps": 2, "max_steps": 2})
    assert run("--output-dir", "run") == 0
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert run("--output-dir", "run") == 2
    assert "data" in capsys.readouterr().err


def test_a_pass_has_every_row_once_in_another_order_each_time(folder: Path) -> None:
    steps = steps_of(folder, max_length=400, datasets=["rows.jsonl", {"path": "a.jsonl", "repeat": 2}])
    passes: list[list[str]] = [[], []]
    while (epoch := steps._drawn_position.epoch) < 2:
        passes[epoch] += places(steps.next_step())
    expected = Counter({f"rows.jsonl:{number}": 1 for number in range(1, 19)})
    expected += Counter({f"a.jsonl:{number}": 2 for number in range(1, 13)})
    assert Counter(passes[0]) == Counter(passes[1]) == expected
    assert passes[0] != passes[1]
    in_order = [f"rows.jsonl:{number}" for number in range(1, 19)]
    assert passes[0][:18] != in_order


@pytest.mark.full
def test_weights_are_the_odds_of_the_next_row(folder: Path) -> None:
    datasets = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 3}]
    steps = steps_of(folder, datasets=datasets)
    names: list[str] = []
    while len(names) < 2000:
        names += [place[0] for place in places(steps.next_step())]
    assert 0.72 < names.count("b") / len(names) < 0.78


def test_ranks_share_the_rows_of_the_steps_of_one(folder: Path) -> None:
    keys = {"train_batch_size": 4, "gradient_accumulation_steps": 1}
    alone, *others = (steps_of(folder, **keys) for _ in range(3))
    recipe = load_recipe(folder / "tiny.yaml", []).recipe
    ranks = [StreamSteps(each.stream, each.collate, recipe, World(rank, 2)) for rank, each in enumerate(others)]
    for _ in range(8):
        whole, parts = places(alone.next_step()), [each.next_step() for each in ranks]
        assert sorted(whole) == sorted(place for part in parts for batch in part if not batch.filler
                                       for place in places([batch]))  # fmt: skip
        assert alone.state_dict() == ranks[0].state_dict() == ranks[1].state_dict()


@pytest.mark.full
def test_two_processes_train_as_one(folder: Path) -> None:
    keys = {**KEYS, "train_batch_size": 4, "per_device_train_batch_size": 1, "eval_datasets": {"e": "e.jsonl"}}
    del keys["gradient_accumulation_steps"]
    write_recipe(folder, keys)
    assert run("--output-dir", "ranks1") == 0
    call = command("sft", "tiny.yaml", "--nproc", "2", "--output-dir", "ranks2")
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for one, two in zip(records("ranks1"), records("ranks2"), strict=True):
        for name in one.keys() & {"loss", "eval_loss", "grad_norm"}:
            assert two[name] == pytest.approx(one[name], rel=2e-5)


def spoil(folder: Path) -> None:
    """Make rows 7 to 9 bad: invalid JSON, wrong format, nothing to train on."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    lines[6:6] = ["{not json", '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user", "content": "x"}]}']
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def test_bad_rows_are_left_out_or_raised_at_their_line(folder: Path) -> None:
    spoil(folder)
    keys = {**UNSHUFFLED, "max_length": 400}
    with pytest.raises(DataError, match="malformed JSON") as raised:
        steps_of(folder, **keys).next_step()
    assert Path(raised.value.where).name == "rows.jsonl:7"
    steps = steps_of(folder, **keys, on_bad_row="skip")
    seen = [place for _ in range(5) for place in places(steps.next_step())]
    assert seen == [f"rows.jsonl:{number}" for number in range(1, 22) if number not in (7, 8, 9)]
    with pytest.raises(DataError, match=r"more than 2 bad rows \(max_bad_rows\)"):
        steps_of(folder, **keys, on_bad_row="skip", max_bad_rows=2).next_step()


@pytest.mark.full
def test_bad_rows_of_a_run_are_listed_in_its_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(folder)
    write_recipe(folder, {**KEYS, **UNSHUFFLED, "max_length": 400})
    assert run("--output-dir", "stopped") == 2
    assert "rows.jsonl:7" in capsys.readouterr().err
    assert run("--output-dir", "run", "--set", "on_bad_row=skip") == 0
    listed = json.loads(Path("run/bad_rows.json").read_text())["bad_rows"]
    assert [each["row"] for each in listed] == ["rows.jsonl:7", "rows.jsonl:8", "rows.jsonl:9"]
    assert "21 rows; 3 skipped as bad" in capsys.readouterr().out


@pytest.mark.full
def test_nothing_that_is_left_ends_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**KEYS, "max_length": 4})
    assert run("--output-dir", "run") == 2
    assert "no row of a pass is left to train on: all 18 were dropped" in capsys.readouterr().err
    write_recipe(folder, {**KEYS, "datasets": ["nowhere.jsonl"]})
    assert run("--output-dir", "run2") == 2
    assert "the file 'nowhere.jsonl' does not exist" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("name", ["data", "plan", "verify"])
def test_other_commands_take_the_first_rows(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, KEYS)
    assert run(command=name) == 0
    assert ("first 1,000 rows" in capsys.readouterr().err) == (name != "plan")
    assert run("--dry-run", command="sft") == 0
    assert "streamed from rows.jsonl" in capsys.readouterr().out


@pytest.mark.full
def test_a_dataset_of_the_hub_is_read_without_a_copy(folder: Path) -> None:
    (folder / "set").mkdir()
    shutil.copy("a.jsonl", folder / "set" / "train.jsonl")
    rows = hub_rows("./set", None, "train", "here", streamed=True)
    assert next(rows).origin == "./set[train]:row 1"
    assert len(list(rows)) == 11


@pytest.mark.parametrize(("keys", "key", "what"), [
    ({"max_steps": -1}, "streaming", "needs 'max_steps'"),
    ({"overlength": "error"}, "overlength", "before training begins"),
    ({"packing": True}, "packing", "before training begins"),
    ({"batching": "buckets", "tokens_per_batch": 512, "gradient_accumulation_steps": 1}, "batching", "cuts all rows"),
    ({"num_train_epochs": 2}, "num_train_epochs", "needs the number of rows"),
    ({"val_size": 3}, "val_size", "draws held-out rows from all rows"),
    ({"datasets": [{"path": "a.jsonl", "weight": 1}], "mix_by": "tokens"}, "mix_by", "lengths of all rows"),
    ({"tokenizer": {"train": {"vocab_size": 300}}}, "train", "reads all texts"),
    ({"shuffle": False}, "shuffle_buffer", "keeps their order\n"),
    ({"datasets": [{"path": "a.jsonl", "max_rows": 3, "shuffle": True}]}, "shuffle", "draws from all of its rows"),
    ({"objective": "dpo"}, "streaming", "is only for sft"),
    ({"streaming": False}, "shuffle_buffer", "needs 'streaming: true'"),
], ids=lambda value: value if isinstance(value, str) and " " not in value else "")  # fmt: skip
@pytest.mark.quick("val_size")
def test_what_needs_all_rows_is_refused_at_its_line(folder: Path, keys: dict[str, Any], key: str, what: str) -> None:
    path = write_recipe(folder, {**KEYS, **keys})
    with pytest.raises(RecipeError, match=what) as refused:
        load_recipe(path, [])
    number = int(str(refused.value.where).rpartition(":")[2])
    assert key in path.read_text().splitlines()[number - 1]
