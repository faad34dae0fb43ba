"""Weighted datasets and named eval sets by the real command line: trained, evaluated, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamtune.base.text import eval_set_names
from streamtune.cli import main
from streamtune.data import concat_squared_lengths
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from tests.sft_kit import FIXED, RECIPE, run, write_recipe

KEYS: dict[str, Any] = {
    **RECIPE,
    "tokenizer": {"train": {"vocab_size": 270}},
    "datasets": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 3}],
    "eval_datasets": {"code": "e.jsonl", "prose": [{"path": "f.jsonl", "max_rows": 3}]},
    "max_length": 128,
    "engine": FIXED,
    "per_device_train_batch_size": 2,
    "eval_steps": 2,
    "max_steps": 4,
}
TIMINGS = ("tokens_per_s", "peak_mem_gib")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory with two datasets and two eval sets."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 12), ("b", 6), ("e", 4), ("f", 5)):
        texts = [f"{name}{number} " * (3 + number % 4) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        pairs = [{"prompt": f"{name}{number}?", "chosen": text, "rejected": "no"} for number, text in enumerate(texts)]
        (tmp_path / f"{name}-pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tmp_path


def records(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def test_an_epoch_has_the_shares_of_the_weights(folder: Path) -> None:
    write_recipe(folder, {**KEYS, "max_steps": -1})
    built = build_run(load_recipe(folder / "tiny.yaml", []))
    assert built.plan.total_steps == 9  # 18 rows, as both datasets have together
    steps = built.start.task.make_training(built).steps
    seen = [Path(origin).name[0] for _ in range(9) for batch in steps.next_step() for origin in batch.origins]
    assert (seen.count("a"), seen.count("b")) == (4, 14)


@pytest.mark.parametrize("more", [{}, {"batching": "tokens", "tokens_per_batch": 256}], ids=["rows", "tokens"])
def test_padding_and_attention_are_those_of_the_rows_that_an_epoch_visits(folder: Path, more: dict[str, Any]) -> None:
    write_recipe(folder, {**KEYS, "max_steps": -1, **more})
    built = build_run(load_recipe(folder / "tiny.yaml", []))
    facts, steps = built.batch_facts, built.start.task.make_training(built).steps
    assert facts is not None
    batches = [batch for _ in range(facts.steps) for batch in steps.next_step()]
    positions = sum(batch.input_ids.numel() for batch in batches)
    tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
    assert facts.padding == round(1 - tokens / positions, 4)
    assert facts.squared_lengths_concat == concat_squared_lengths(tokens, 128)


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"packing": True, "mix_by": "tokens"}, {"val_size": 3}],
                         ids=["rows", "packing", "val"])  # fmt: skip
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(folder: Path, more: dict[str, Any]) -> None:
    write_recipe(folder, {**KEYS, **more, "save_steps": 2})
    assert run("--output-dir", "run") == 0
    whole = records("run")
    evaluated = [record for record in whole if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == [2, 4]
    names = ["held_out", "code", "prose"] if "val_size" in more else ["code", "prose"]
    assert list(evaluated[0]) == ["step", "eval_loss", *(f"eval_{name}_loss" for name in names)]
    assert eval_set_names(whole, "loss") == names
    low, *_, high = sorted(evaluated[0][f"eval_{name}_loss"] for name in names)
    assert low < evaluated[0]["eval_loss"] < high
    page = Path("run/report.html").read_text()
    assert all(f"loss of {name}" in page for name in names)
    assert "all held out" in page
    final = Path("run/final/model.safetensors").read_bytes()
    shutil.rmtree("run/checkpoints/step-000004")
    shutil.rmtree("run/final")
    assert run("--output-dir", "run") == 0
    assert records("run") == whole
    assert Path("run/final/model.safetensors").read_bytes() == final


@pytest.mark.full
def test_other_weights_are_other_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**KEYS, "save_steps": 2})
    assert run("--output-dir", "run", "--set", "max_steps=2") == 0
    assert run("--output-dir", "run", "--set", "max_steps=2", "--set", "datasets.0.weight=2") == 2
    assert "data" in capsys.readouterr().err


@pytest.mark.full
def test_an_eval_set_has_the_loss_it_has_as_held_out_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``streamtune eval`` finds the losses of the run, set by set."""
    write_recipe(folder, KEYS)
    assert run("--output-dir", "run") == 0
    last = records("run")[-1]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["eval", "run", "--json"])
    part = json.loads(capsys.readouterr().out)["splits"]["held-out"]
    assert part["loss"] == pytest.approx(last["eval_loss"], rel=1e-5)
    assert {each["name"]: each["rows"] for each in part["sets"]} == {"code": 4, "prose": 3}
    for each in part["sets"]:
        assert each["loss"] == pytest.approx(last[f"eval_{each['name']}_loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"precompute_ref_log_probs": True}], ids=["copy", "kept"])
def test_preferences_have_the_metrics_of_every_set(folder: Path, more: dict[str, Any],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    datasets = [{"path": "a-pairs.jsonl", "weight": 1}, {"path": "b-pairs.jsonl", "weight": 3}]
    sets = {"code": "e-pairs.jsonl", "prose": "f-pairs.jsonl"}
    keys = {**KEYS, "objective": "dpo", "datasets": datasets, "eval_datasets": sets, "save_steps": 2, **more}
    write_recipe(folder, keys)
    assert run("--output-dir", "run", command="dpo") == 0
    whole = records("run")
    assert eval_set_names(whole, "loss") == ["code", "prose"]
    found = whole[-1]
    assert found["eval_loss"] == pytest.approx((4 * found["eval_code_loss"] + 5 * found["eval_prose_loss"]) / 9)
    assert "eval_prose_rewards/accuracies" in found
    shutil.rmtree("run/checkpoints/step-000004")
    assert run("--output-dir", "run", command="dpo") == 0
    assert records("run") == whole


def test_data_shows_weights_and_eval_sets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, KEYS)
    with pytest.raises(SystemExit):
        main(["data", "tiny.yaml", "--json", "--rows", "0"])
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert [(each["weight"], each["evaluates"], each["epoch_rows"]) for each in sources] == [
        (1.0, None, 4), (3.0, None, 14), (None, "code", 0), (None, "prose", 0),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        main(["data", "tiny.yaml", "--rows", "0"])
    shown = capsys.readouterr().out
    assert "of rows" in shown
    assert "77.8%" in shown
    assert "(eval prose)" in shown
