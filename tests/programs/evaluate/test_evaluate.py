"""``streamtune eval`` agrees with the run's own last evaluation, and with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamtune.cli import main
from streamtune.data import DataOptions, Source, prepare
from streamtune.models import load_tokenizer
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"packing": True}, marks=pytest.mark.full),
        pytest.param({"finetuning_type": "lora", "lora_r": 4}, marks=pytest.mark.full),
        pytest.param({"bf16": True}, marks=pytest.mark.full),
    ],
    ids=["all", "packed", "lora", "bf16"],
)
def test_eval_equals_the_last_evaluation_of_the_run(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    more = {"max_length": 256, "val_size": 4, "engine": FIXED, "max_steps": 2, "eval_steps": 1}
    write_recipe(tmp_path, {**RECIPE, **more, **changes})
    assert run() == 0
    records = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    expected = [record["eval_loss"] for record in records if "eval_loss" in record][-1]
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["eval", "runs/tiny", "--json", "--output", "found"])
    assert not left.value.code
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(Path("found/eval.json").read_text())
    part = shown["splits"]["held-out"]
    assert part["rows"] == 4
    assert part["loss"] == pytest.approx(expected, rel=1e-6)
    assert sum(bucket["tokens"] for bucket in part["positions"]) == part["tokens"]
    with pytest.raises(SystemExit) as left:
        main(["eval", "runs/tiny", "--output", "found"])
    assert left.value.code == 2


def test_eval_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"def f{n}(a):\n    return a + {n}\n" * (2 + n)}) + "\n" for n in range(6))
    )
    write_recipe(tmp_path, {**RECIPE, "max_length": 512, "engine": FIXED, "max_steps": 1})
    assert run() == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["eval", "runs/tiny", "--split", "train", "--json"])
    part = json.loads(capsys.readouterr().out)["splits"]["train"]

    model = AutoModelForCausalLM.from_pretrained("runs/tiny/final").eval()
    tokenizer = load_tokenizer("runs/tiny/final")
    rows = prepare([Source("rows.jsonl")], tokenizer, DataOptions(max_length=512)).training
    total, tokens = 0.0, 0
    for row in rows:
        ids = torch.tensor([[int(token) for token in row.input_ids]])
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (len(row.input_ids) - 1)
        tokens += len(row.input_ids) - 1
    assert part["rows"] == len(rows)
    assert part["tokens"] == tokens
    assert part["loss"] == pytest.approx(total / tokens, rel=1e-5)
