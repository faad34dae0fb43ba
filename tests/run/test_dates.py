"""A chat template that prints the date: a run keeps its start date, also if it is resumed on another day."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.data.templates import fix_template_date
from streamtune.run import start
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED: dict[str, Any] = {**RECIPE, "chat_template": TEMPLATE, "engine": FIXED, "max_steps": 1, "max_length": 256}
MORE = ("--set", "max_steps=2", "--allow-change", "max_steps")


class Another(datetime.date):
    """Date class whose today is 29 February 2024."""

    @classmethod
    def today(cls) -> Another:
        return cls(2024, 2, 29)


def test_a_resumed_run_keeps_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 4)
    write_recipe(tmp_path, {**DATED, "output_dir": "run"})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(start, "date", Another)
            assert run() == 0
        before = json.loads((tmp_path / "run/run.json").read_text())
        assert before["date"] == "2024-02-29"
        assert run(*MORE) == 0, capsys.readouterr().err
        after = json.loads((tmp_path / "run/run.json").read_text())
        assert (after["date"], after["data"]) == (before["date"], before["data"])
    finally:
        fix_template_date(None)


@pytest.mark.full
def test_a_run_with_the_file_of_a_teacher_has_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is written on one day has the rows of a run on another day."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 4)
    write_recipe(tmp_path, {**RECIPE, "engine": FIXED, "max_steps": 1, "max_length": 256, "output_dir": "taught"})
    assert run() == 0
    student = {key: value for key, value in DATED.items() if key not in ("model", "tokenizer")}
    write_recipe(tmp_path, {**student, "model_name_or_path": "taught/final", "teacher": "taught/final"})
    try:
        assert run("taught.safetensors", "--top-k", "8", command="teach") == 0
        fix_template_date(None)
        with monkeypatch.context() as patch:
            patch.setattr(start, "date", Another)
            assert run("--set", "teacher=taught.safetensors", "--set", "output_dir=run") == 0
        assert json.loads((tmp_path / "run/run.json").read_text())["date"] == datetime.date.today().isoformat()
    finally:
        fix_template_date(None)
