"""Results of ``streamtune eval`` are kept in the run; losses by position say if context helps; memory; bases."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune import data, train
from streamtune.cli import main
from streamtune.engine import stream
from streamtune.models import ModelOptions, init_model
from streamtune.plan.simulate.memory import LiveBytes
from streamtune.programs.evaluate.eval_scores import LossSums, ScoringModel, describe_context_gain, score_rows
from streamtune.schedule import Schedule
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows

TINY: dict[str, Any] = {**RECIPE, "max_length": 256, "val_size": 4, "engine": FIXED, "max_steps": 1}


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``streamtune eval``."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["eval", *arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.full
def test_a_run_keeps_the_result_and_the_next_one_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, {**TINY, "save_steps": 1})
    assert run() == 0
    code, shown, _ = evaluated(capsys, "runs/tiny", "--needle", "--needle-depths", "50", "--needle-trials", "1")
    assert code == 0
    assert "lowest to highest" in shown
    assert "█" in shown
    assert "ontext" in shown  # the sentence
    assert shown.startswith("held-out: loss ")
    assert " prompts by greedy decoding; lengths " in shown
    assert shown.splitlines()[-1] == "Next: streamtune generate runs/tiny"
    assert names("runs/tiny/eval") == {"eval.json", "position.png", "needle.png"}
    before = json.loads(Path("runs/tiny/eval/eval.json").read_text())

    Path("runs/tiny/eval/mine.txt").write_text("a note")
    code, _, _ = evaluated(capsys, "runs/tiny")
    assert code == 0
    assert names("runs/tiny/eval") == {"eval.json", "position.png", "mine.txt"}  # and no picture of another result
    after = json.loads(Path("runs/tiny/eval/eval.json").read_text())
    assert after["splits"] == before["splits"]

    code, _, _ = evaluated(capsys, "runs/tiny", "--checkpoint", "1")
    assert code == 0
    assert names("runs/tiny/eval/step-000001") == {"eval.json", "position.png"}

    shutil.copytree("runs/tiny/final", "bare")
    code, shown, _ = evaluated(capsys, "bare", "tiny.yaml", "--json")
    assert code == 0
    assert json.loads(shown)["splits"] == after["splits"]
    assert names("bare") == names("runs/tiny/final")

    Path("runs/tiny/eval/position.png").unlink()
    Path("runs/tiny/eval/eval.json").write_text("[]")
    code, _, shown = evaluated(capsys, "runs/tiny")
    assert code == 2
    assert "was not written by `streamtune eval`" in shown


@pytest.mark.full
def test_another_chat_template_than_the_model_has_is_said_to_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, {**TINY, "chat_template": "chatml"})
    assert run() == 0
    code, shown, told = evaluated(capsys, "runs/tiny")
    assert (code, "has no effect" in told) == (0, False)
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    code, again, told = evaluated(capsys, "runs/tiny", "--set", f"chat_template={json.dumps(plain)}")
    assert (code, again) == (0, shown)
    assert "'chat_template' has no effect: the model's tokenizer has another chat template" in " ".join(told.split())


def sums(*rows: list[float], start: int = 10) -> dict[str, Any]:
    found = LossSums()
    for losses in rows:
        found.add("rows", torch.tensor(losses), torch.arange(len(losses)) + start)
    return found.to_json()


def test_thirds_of_rows_are_compared_row_by_row() -> None:
    context = sums([3.0, 3.0, 2.0, 2.0, 1.0, 1.0], [9.0, 8.0, 7.5])["context"]
    assert context["gain"] == pytest.approx((2.0 + 1.5) / 2)
    assert context["standard_error"] == pytest.approx(0.25)
    assert context["rows"] == 2
    assert describe_context_gain(context).startswith("More context seems to help: ")
    assert "1.75 +- 0.25 nats lower" in describe_context_gain(context)
    worse = describe_context_gain(sums([1.0, 2.0, 3.0], [1.0, 2.0, 3.5])["context"])
    assert worse.startswith("More context does not seem to help: ")
    assert "higher" in worse
    assert "Cannot tell from these rows whether more context helps" in describe_context_gain(
        sums([1.0, 2.0, 3.0], [3.0, 2.0, 1.1])["context"]
    )
    assert "Cannot tell from one row" in describe_context_gain(sums([2.0, 1.5, 1.0])["context"])
    assert "no row has three" in describe_context_gain(sums([2.0, 1.0])["context"])


def test_scoring_a_row_holds_less_than_training_on_it() -> None:
    length = 512
    model = init_model(QWEN3, ModelOptions("float32"), vocab_size=300, token_ids={}, seed=0)
    ids = torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(0)).int().numpy()
    row = data.Example(ids, ids.copy(), "rows.jsonl:1")
    batch = train.MicroBatch(**data.collate([row], pad_token_id=0), origins=("rows.jsonl:1",))
    with stream(model, schedule=Schedule(chunk_size=64, head_chunk_size=32)) as handle:
        objective = train.SupervisedObjective(handle)
        with LiveBytes(model, handle.layers) as training:
            objective.score(model, batch, objective.step_totals([batch])).loss.backward()
        model.zero_grad(set_to_none=True)
        with LiveBytes(model, handle.layers) as scoring:
            found = score_rows(
                ScoringModel(handle, model, torch.device("cpu"), False), [row], batch_size=1,
                collate=lambda rows: batch, rows_done=lambda done, rows: None,
            )  # fmt: skip
    assert found.whole.tokens == length - 1
    # Of the three layer inputs one is alive at a time, and neither gradients nor logits of the row are.
    assert scoring.peak < training.peak - 2 * length * 32 * 4
    assert scoring.peak < length * 300 * 4


@pytest.mark.full
def test_adapters_are_evaluated_on_the_base_they_were_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, TINY)
    assert run() == 0
    shutil.copytree("runs/tiny/final", "base")
    shutil.copytree("runs/tiny/final", "other")
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained("other")
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    other.save_pretrained("other")
    changes: dict[str, Any] = {"model": None, "tokenizer": None, "finetuning_type": "lora", "lora_r": 4}
    lora = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    write_recipe(tmp_path, {**lora, "model_name_or_path": str(tmp_path / "base"), "output_dir": "runs/lora"})
    assert run() == 0
    code, shown, notes = evaluated(capsys, "runs/lora", "--json")
    assert code == 0
    assert "trained on" not in notes
    expected = json.loads(shown)["splits"]

    write_recipe(tmp_path, {**lora, "model_name_or_path": str(tmp_path / "other")})
    shutil.copytree("runs/lora/final", "bare")
    for model in ("runs/lora", "bare"):
        code, shown, notes = evaluated(capsys, model, "tiny.yaml", "--json")
        assert code == 0
        assert "the recipe names a different model" in " ".join(notes.split())
        assert json.loads(shown)["splits"] == expected

    shutil.move("base", "moved")
    write_recipe(tmp_path, {**lora, "model_name_or_path": str(tmp_path / "moved")})
    code, shown, notes = evaluated(capsys, "bare", "tiny.yaml", "--json")
    assert code == 0
    assert "does not exist here" in " ".join(notes.split())
    assert json.loads(shown)["splits"] == expected


@pytest.mark.full
def test_a_whole_model_is_not_quantised_by_a_qlora_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, TINY)
    assert run() == 0
    code, shown, _ = evaluated(capsys, "runs/tiny", "--json")
    expected = json.loads(shown)["splits"]
    settings = ["--set", "finetuning_type=qlora", "--set", "quantization=int8"]
    code, shown, notes = evaluated(capsys, "runs/tiny", "tiny.yaml", "--json", *settings)
    assert code == 0
    assert "without the quantisation" in " ".join(notes.split())
    assert json.loads(shown)["splits"] == expected


def test_a_harness_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("lm_eval") is not None:
        pytest.skip("it is installed")
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, TINY)
    assert run() == 0
    code, _, shown = evaluated(capsys, "runs/tiny", "--lm-eval", "hellaswag")
    assert code == 2
    assert "pip install lm-eval" in shown
