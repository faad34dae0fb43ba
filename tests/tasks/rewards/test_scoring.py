"""User-defined reward functions: how they are found and called, and how their results are checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune.errors import ArgumentError, RunError
from streamtune.tasks.rewards import Rewards, load_rewards

FUNCTIONS = """
import math

LIMIT = 3

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def matches(completions, answer, scale=1.0):
    return [scale * (text == right) for text, right in zip(completions, answer)]

def everything(prompts, completions, **columns):
    assert sorted(columns) == ["answer", "level"], sorted(columns)
    return [None if level is None else len(prompt) + level for prompt, level in zip(prompts, columns["level"])]

def raises(completions, **columns):
    return [1.0 / len(text) for text in completions]

def raises_together(completions, **columns):
    if len(completions) > 1:
        raise RuntimeError("one at a time, please")
    return [0.0]

def short(completions, **columns):
    return [1.0]

def nan(completions, **columns):
    return [math.nan if text == "b" else 1.0 for text in completions]

def text(completions, **columns):
    return ["good"] * len(completions)

def number(completions, **columns):
    return 1.0

def tensor(completions, **columns):
    import torch
    return torch.arange(len(completions))

def tensors(completions, **columns):
    import torch
    return [torch.tensor(2.0) for _ in completions]

async def later(completions, **columns):
    return []

def positional(prompts, completions, /):
    return []

def huge(completions, **columns):
    return [10**400] * len(completions)

def leaves(completions, **columns):
    raise SystemExit(0)

def cancels(completions, **columns):
    import asyncio
    raise asyncio.CancelledError

def takes_apart(prompts, completions, **columns):
    for column in (prompts, completions, *columns.values()):
        column.clear()
    return [1.0] * 3

def takes_inner(completions, level, **columns):
    level[0].pop()
    return [1.0] * len(completions)

def upsets(completions, **columns):
    import os, sys, torch
    os.chdir("/")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    sys.stdout = None
    return [float(torch.rand(())) for _ in completions]

class Judge:
    def __call__(self, completions, **columns):
        return [True for _ in completions]

judge = Judge()
"""


def line_with(match: re.Match[str]) -> str:
    """Return the number of the first line of the functions above that contains a text."""
    return str(next(n for n, line in enumerate(FUNCTIONS.splitlines(), start=1) if match[1] in line))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return tmp_path


def load(folder: Path, *names: str, **knobs: Any) -> Rewards:
    return load_rewards([f"own.py:{name}" for name in names], directory=folder, **knobs)


COMPLETIONS = ["abc", "b", ""]
COLUMNS = {"answer": ["abc", "a", ""], "level": [1, None, 3]}


def call(rewards: Rewards, **knobs: Any) -> Any:
    return rewards(["p", "pp", "ppp"], COMPLETIONS, COLUMNS, **knobs)


def test_functions_get_the_columns_they_name_and_are_weighted(folder: Path) -> None:
    rewards = load(folder, "length", "matches", "everything", weights=[0.5, 10.0, 1.0])
    scores = call(rewards)
    assert scores.by_function == {
        "length": [3.0, 1.0, 0.0],
        "matches": [1.0, 0.0, 1.0],
        "everything": [2.0, None, 6.0],
    }
    assert scores.total == [1.5 + 10 + 2, 0.5, 10 + 6]


def test_no_function_has_anything_to_say(folder: Path) -> None:
    rewards = load(folder, "everything")
    assert rewards(["p"], ["a"], {"answer": [1], "level": [None]}).total == [None]


def test_options_objects_and_tensors(folder: Path) -> None:
    assert call(load(folder, "matches(scale=2)")).total == [2.0, 0.0, 2.0]
    assert call(load(folder, "judge")).total == [1.0, 1.0, 1.0]
    assert call(load(folder, "tensor")).total == [0.0, 1.0, 2.0]
    assert call(load(folder, "tensors")).total == [2.0, 2.0, 2.0]
    assert torch.tensor(call(load(folder, "tensor")).total).sum() == 3


def test_two_functions_of_one_name(folder: Path) -> None:
    assert list(load(folder, "length", "matches(scale=2)", "matches").functions) == ["length", "matches", "matches_2"]


def test_a_module_beside_the_recipe(tmp_path: Path) -> None:
    package = tmp_path / "streamtune_test_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(FUNCTIONS)
    rewards = load_rewards(["streamtune_test_rewards.own:length"], directory=tmp_path)
    assert call(rewards).total == [3.0, 1.0, 0.0]


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"def score(completions):\n    return [{value}] * len(completions)\n")
    scores = call(load_rewards(["a/own.py:score", "b/own.py:score"], directory=tmp_path))
    assert scores.by_function == {"score": [1.0] * 3, "score_2": [2.0] * 3}


@pytest.mark.parametrize(
    ("name", "says", "where"),
    [
        (
            "raises",
            "'raises' raised ZeroDivisionError: float division by zero",
            "own.py:{1.0 / len(text)}, rows.jsonl:3",
        ),
        ("raises_together", "raised RuntimeError: one at a time", "own.py:{one at a time}"),
        ("short", "returned 1 scores for 3 completions", "own.py:{def short}"),
        ("nan", "must be a finite number or None, found nan", "own.py:{def nan}, rows.jsonl:2"),
        ("text", "must be a finite number or None, found 'good'", "own.py:{def text}, rows.jsonl:1"),
        ("number", "returned 1.0, not a list", "own.py:{def number}"),
        ("huge", "must be a finite number or None, found 10000", "own.py:{def huge}, rows.jsonl:1"),
        ("leaves", "'leaves' raised SystemExit: 0", "own.py:{raise SystemExit}, rows.jsonl:1"),
        ("cancels", "'cancels' raised CancelledError", "own.py:{raise asyncio}, rows.jsonl:1"),
    ],
)
def test_what_a_function_does_wrong_names_it_and_the_row(folder: Path, name: str, says: str, where: str) -> None:
    with pytest.raises(RunError, match=says) as error:
        call(load(folder, name), origins=["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"])
    assert error.value.where == f"{folder}/{re.sub('{(.*)}', line_with, where)}"
    assert error.value.fix


def test_a_function_changes_its_own_copies(folder: Path) -> None:
    """The arguments of a function are also training data, and arguments of the next function."""
    levels = [[1, 2], [3], [4]]
    rewards = load(folder, "takes_apart", "takes_inner", "length")
    assert rewards(["p"] * 3, COMPLETIONS, {**COLUMNS, "level": levels}).by_function["length"] == [3.0, 1.0, 0.0]
    assert levels == [[1, 2], [3], [4]]
    assert COMPLETIONS == ["abc", "b", ""]


def test_a_function_leaves_the_process_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    rewards, before, stdout = load(folder, "upsets"), torch.get_rng_state(), sys.stdout
    first = call(rewards)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert sys.stdout is stdout
    assert Path.cwd() == folder
    assert call(rewards) == first


def test_what_a_function_draws_is_not_what_the_next_rollout_draws(folder: Path) -> None:
    (folder / "draws.py").write_text(
        "import torch\ndef score(completions):\n    return torch.rand(len(completions)).tolist()\n"
    )
    rewards = load_rewards(["draws.py:score"], directory=folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, drawn = call(rewards).total, torch.rand(3).tolist()
        assert call(rewards).total != first
        torch.manual_seed(3)
        assert call(rewards).total == first, "a resumed run"
    assert first != drawn


def test_without_origins_completions_are_counted(folder: Path) -> None:
    with pytest.raises(RunError) as error:
        call(load(folder, "nan"))
    assert error.value.where.endswith("completion 2 of 3")


def test_a_column_that_is_missing_is_found_before_the_run(folder: Path) -> None:
    rewards = load(folder, "matches")
    rewards.check_columns(["answer"])
    with pytest.raises(ArgumentError, match="reads the column 'answer'") as error:
        rewards.check_columns(["answers", "level"])
    assert error.value.fix == "did you mean 'answers'?"
    assert (
        error.value.where
        == f"{folder}/own.py:{FUNCTIONS.splitlines().index('def matches(completions, answer, scale=1.0):') + 1}"
    )
    of_another_column = load_rewards(["exact_match(column='target')"])
    for columns, fix in {
        ("answer", "completion_ids"): "the rows have: answer",
        ("completion_ids",): "the rows have: no other columns",
    }.items():
        with pytest.raises(ArgumentError, match="'exact_match' reads the column 'target'") as error:
            of_another_column.check_columns(columns)
        assert error.value.fix == fix


@pytest.mark.parametrize(
    ("spec", "says", "fix"),
    [
        ("exact_mach", "unknown built-in reward 'exact_mach'", "did you mean 'exact_match'?"),
        ("something_else", "unknown built-in reward", "choose one of: exact_match"),
        ("exact_match(ignore=True)", "no option 'ignore'", "did you mean 'ignore_case'?"),
        ("exact_match(True)", "invalid options of the reward", "Python literals by keyword"),
        ("exact_match(tag=answer)", "invalid options of the reward", ""),
        ("exact_match(tag='a'", "invalid reward function", "module:function"),
        ("", "invalid reward function", ""),
        ("unit_tests", "runs code that the model writes", "allow_code: true"),
        ("no.py:length", "there is no file no.py", "paths are relative to"),
        ("own.py:lenght", "has no function 'lenght'", "did you mean 'length'?"),
        ("own.py:LIMIT", "must be a function, found int", ""),
        ("own.py:later", "is an async function", "asyncio.run"),
        ("own.py:positional", "is positional-only", ""),
        ("own.py:matches(scales=2)", "no option 'scales'", "did you mean 'scale'?"),
        ("no_such_module_of_mine:score", "there is no module 'no_such_module_of_mine'", "install it"),
        ("no_such_module_of_mine.part:score", "there is no module", "install it"),
    ],
)
def test_wrong_specs(folder: Path, spec: str, says: str, fix: str) -> None:
    with pytest.raises(ArgumentError, match=says.replace("(", r"\(")) as error:
        load_rewards([spec], directory=folder)
    assert error.value.where == "reward_funcs"
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("source", "says", "where"),
    [
        ("import no_such_package_of_mine\n", "raised ModuleNotFoundError", "reward_funcs"),
        ("def f(:\n", "raised SyntaxError", "{file}:1"),
        ("1 / 0\n", "raised ZeroDivisionError", "reward_funcs"),
        ("import sys\nsys.exit()\n", "raised SystemExit", "reward_funcs"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, source: str, says: str, where: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(source)
    with pytest.raises(ArgumentError, match=f"importing own.py {says}") as error:
        load_rewards(["own.py:f"], directory=tmp_path)
    assert error.value.where == where.format(file=file)


@pytest.mark.parametrize(
    ("weights", "says"),
    [([1.0, 2.0], "each of 1 functions, found 2 weights"), ([float("inf")], "must be finite, found inf")],
)
def test_wrong_weights(folder: Path, weights: list[float], says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as error:
        load(folder, "length", weights=weights)
    assert error.value.where == "reward_weights"


def test_no_function_at_all() -> None:
    with pytest.raises(ArgumentError, match="reward_funcs is empty"):
        load_rewards([])
