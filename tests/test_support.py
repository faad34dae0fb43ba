"""The page of what combines: it is what the tool makes, *yes* trains, and *no* is the error of the command."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tools.support_matrix import PAGE, Matrix, page, recipe_of
from tools.support_options import GROUPS, Option

from streamtune.cli import main
from streamtune.distributed.deepspeed_config import PRESETS
from streamtune.schedule import CHOICES, DEFAULTS
from streamtune.tasks.objectives import POLICY_LOSSES, PREFERENCE_LOSSES, UNPAIRED_LOSSES
from tests.sft_kit import write_rows

REWARD = "def low(completion_ids, **columns):\n    return [-sum(ids) / len(ids) for ids in completion_ids]\n"
"""Gives each completion of a random model another score; where all were equal nothing would be learnt."""

ELSEWHERE = {
    "use_vllm: true",
    "ref_model_name_or_path: NAME",
    "teacher: NAME",
    "teacher: FILE",
    "kd_divergence: jsd",
    "gkd",
}
"""Options that need an accelerator or a second model."""

AT_ONCE = 8
"""Options in a run that trains."""


@cache
def made() -> tuple[Matrix, str]:
    """The answers, and the page that was made of them."""
    matrix = Matrix()
    return matrix, page(matrix)


def values(group: str, key: str) -> set[Any]:
    return {option.keys[key] for option in GROUPS[group] if key in option.keys}


def accepted_together() -> Iterator[tuple[str, tuple[Option, ...]]]:
    """Yield options any two of which are accepted, so that each occurs that one process on a CPU can train."""
    matrix, _ = made()
    left = {
        each.name: each
        for options in GROUPS.values()
        for each in options
        if not each.objective and each.ranks == 1 and each.name not in ELSEWHERE
    }
    every = list(left.values())
    while left:
        first = next(iter(left.values()))
        pairs = ((objective, other) for other in every for objective in yes(matrix, first, other))
        objective, second = next(pairs, ("", first))
        if not objective:  # `moe_balance: global` by itself: a no in every cell
            left.pop(first.name)
            continue
        chosen = [first, second]
        for other in left.values():
            if len(chosen) < AT_ONCE and all(objective in yes(matrix, each, other) for each in chosen):
                chosen.append(other)
        for each in chosen:
            left.pop(each.name, None)
        yield objective, tuple(chosen)


def yes(matrix: Matrix, one: Option, other: Option) -> list[str]:
    """Return the objectives in which the cell of two options is a yes."""
    return [objective for objective, refusal in matrix.pair(one, other).items() if refusal is None]


def write(objective: str, options: tuple[Option, ...]) -> None:
    """``tiny.yaml`` with the options, and what it reads."""
    recipe = recipe_of(objective, options)
    recipe = {key: value for key, value in recipe.items() if value is not None}
    recipe |= {"max_steps": 2, "learning_rate": 1e-2, "output_dir": "run"}
    if objective != "grpo":
        recipe["max_length"] = 128  # few chunks even where rows are packed
    else:
        Path("rewards.py").write_text(REWARD)
        recipe |= {"reward_funcs": ["rewards.py:low"], "allow_code": True}
    write_rows(Path(), 24)
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def run(objective: str, *arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main([objective, "tiny.yaml", *arguments])
    torch.use_deterministic_algorithms(False)
    return int(left.value.code or 0)


@pytest.mark.full
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == made()[1], "make docs"


def test_every_choice_is_asked_for() -> None:
    assert values("sharing", "deepspeed") - {None} == set(PRESETS)
    assert values("dpo losses", "loss_type") == {*PREFERENCE_LOSSES, *UNPAIRED_LOSSES}
    assert values("grpo losses", "loss_type") == {*POLICY_LOSSES, "gkd"}
    asked = {key.removeprefix("engine.") for option in GROUPS["engine"] for key in option.keys}
    assert asked >= DEFAULTS.keys() - {"chunk_size", "head_chunk_size"}
    assert values("engine", "engine.offload") == set(CHOICES["offload"])


def refused(
    objective: str, options: tuple[Option, ...], what: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> list[str]:
    """Return the faults of a refusal by the command.

    Where ranks share nothing, no key of the recipe tells that there are several: two are started.
    """
    write(objective, options)
    several = any(option.name.startswith("DDP") for option in options)
    code = run(objective, *(("--nproc", "2") if several else ()))
    said = " ".join(capfd.readouterr().err.split())
    wrong = [f"exit code {code}"] if code != 2 else []
    if what not in said or "tiny.yaml:" not in said:
        wrong.append(f"{what!r} is not said: {said}")
    if (folder / "run/metrics.jsonl").exists():
        wrong.append("it trained")
        shutil.rmtree(folder / "run")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("cells", [slice(0, 30, 12), pytest.param(slice(None), marks=pytest.mark.slow)], ids=str)
def test_no_is_what_the_command_says(
    cells: slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = list(made()[0].examples.values())
    assert len(examples) > 40
    found = {
        refusal.what: wrong
        for objective, options, refusal in examples[cells]
        if (wrong := refused(objective, options, refusal.what, tmp_path, capfd))
    }
    assert found == {}


@pytest.mark.slow
def test_yes_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for number, (objective, options) in enumerate(accepted_together()):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        write(objective, options)
        code, said = run(objective), capsys.readouterr().err
        records = folder / "run/metrics.jsonl"
        steps = records.read_text().count('"loss"') if records.exists() else 0
        if code or steps < 2:
            found[f"{objective}: {', '.join(option.name for option in options)}"] = f"{code}, {steps} steps: {said}"
    assert found == {}
