"""``allocation: gvm`` from a recipe to a step: groups of unequal size, runs that are resumed, ranks, and refusals."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from streamtune.cli import main
from streamtune.errors import RecipeError
from streamtune.recipe import load_recipe
from tests.distributed.running import command

RECIPE: dict[str, Any] = {
    "objective": "grpo",
    "model": {
        "init": {
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        }
    },
    "tokenizer": {"train": {"vocab_size": 300}},
    "datasets": [{"path": "demo-arithmetic", "name": "copy", "max_rows": 12}],
    "max_prompt_length": 40,
    "max_completion_length": 6,
    "reward_funcs": ["rewards.py:low_tokens"],
    "allow_code": True,
    "num_generations": 4,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "allocation": "gvm",
    "pass_reward": 0.6,
    "max_steps": 7,
    "num_completions_to_print": 99,
    "learning_rate": 1.0e-2,
    "engine": {"schedule": "fixed", "chunk_size": 64, "head_chunk_size": 32},
}
REWARDS = '''
def low_tokens(completions, completion_ids, **columns):
    """The smaller the ids, the better: every completion of a random model gets another score."""
    return [1.0 - sum(ids) / (300 * len(ids)) for ids in completion_ids]
'''
TIMINGS = ("tokens_per_s", "peak_mem_gib")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("tiny.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    return tmp_path


def grpo(*arguments: str, **settings: Any) -> int:
    """Run ``streamtune grpo tiny.yaml --set ...`` and return the exit code."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    with pytest.raises(SystemExit) as left:
        main(["grpo", "tiny.yaml", *arguments, *sets])
    return int(left.value.code or 0)


def lines(run: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(run, name).read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in found]


def weights_of(run: str) -> dict[str, Tensor]:
    (file,) = Path(run, "final").glob("*.safetensors")
    return load_file(file)


def groups_of(run: str) -> dict[int, list[int]]:
    """Return the group sizes of each step, from its logged completions."""
    counts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for record in lines(run, "completions.jsonl"):
        counts[record["step"]][record["origin"]] += 1
    return {step: list(of_step.values()) for step, of_step in counts.items()}


def test_a_prompt_has_as_many_completions_as_its_variance_asks_for(folder: Path) -> None:
    assert grpo("--output-dir", "run", save_steps=7) == 0
    sizes = groups_of("run")
    assert sizes[1] == [4, 4, 4], "nothing is known of any prompt"
    assert all(sum(own) == 12 and min(own) >= 2 for own in sizes.values())
    assert any(len(set(own)) > 1 for own in sizes.values())
    for record in lines("run"):
        own = sizes[record["step"]]
        unequal = (min(own), max(own)) if len(set(own)) > 1 else (None, None)
        assert (record.get("completions/fewest"), record.get("completions/most")) == unequal
    state = json.loads(Path("run/checkpoints/step-000007/state.json").read_text())["stream"]
    assert state["picker"]["rates"], "kept though prompts come in turn"
    assert state["norms"]
    assert all(norm > 0 for norm in state["norms"].values())


@pytest.mark.full
def test_the_first_steps_are_those_of_equal_groups(folder: Path) -> None:
    """Groups are equal until a prompt occurs again: there are twelve prompts, three per step."""
    settings = {"lr_scheduler_type": "constant", "max_steps": 5}
    for allocation in ("equal", "gvm"):
        assert grpo("--output-dir", allocation, allocation=allocation, **settings) == 0
    equal, divided = lines("equal"), lines("gvm")
    assert equal[:4] == divided[:4]
    assert equal[4] != divided[4]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"finetuning_type": "lora"}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "rloo", "beta": 0.1}, marks=pytest.mark.slow),
        pytest.param({"allocation": "neyman"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_to_the_same_bits(folder: Path, more: dict[str, Any]) -> None:
    """A rollout is used for four steps: 1 to 4, then 5 to 8."""
    settings = {"num_iterations": 2, "steps_per_generation": 4, "save_steps": 1, "save_total_limit": 99, **more}
    settings |= {"max_steps": 14}
    assert grpo("--output-dir", "whole", **settings) == 0
    whole = lines("whole")
    assert any("completions/most" in record for record in whole)
    for step in (3, 4, 9):
        checkpoint = f"whole/checkpoints/step-{step:06d}"
        again = f"from-{step}"
        assert grpo("--output-dir", again, "--resume", checkpoint, **settings) == 0
        assert lines(again) == whole[step:]
        ours, theirs = (weights_of(run) for run in (again, "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        written = [record for record in lines("whole", "completions.jsonl") if record["step"] > step]
        assert lines(again, "completions.jsonl") == written


@pytest.mark.full
def test_two_ranks_divide_alike(folder: Path) -> None:
    call = command("grpo", "tiny.yaml", "--nproc", "2", "--output-dir", "run")
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in lines("run")] == list(range(1, 8))
    sizes = groups_of("run")
    assert all(sum(own) == 24 and min(own) >= 2 for own in sizes.values())
    assert any(len(set(own)) > 1 for own in sizes.values())


@pytest.mark.full
def test_another_division_is_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo(max_steps=1) == 0
    assert grpo(allocation="equal") != 0
    assert "allocation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said", "fix"),
    [
        ({"allocation": "more"}, "'equal', 'gvm' or 'neyman'", ""),
        ({"num_generations": 2}, "'num_generations: 2' leaves none to distribute", "num_generations: 8"),
        ({"beta": 0.1}, "'beta' adds a divergence that has no advantage", "loss_type: rloo"),
        (
            {"fsdp": True},
            "the gradient of each completion, which needs unsharded weights, but 'fsdp' shards them",
            "delete 'fsdp'",
        ),
        (
            {"deepspeed": "zero2"},
            "the gradient of each completion, which needs unsharded weights, but 'deepspeed' shards them",
            "delete 'deepspeed'",
        ),
        ({"sequence_parallel_size": 2}, "each rank has a part", "sequence_parallel_size: 1"),
        ({"optim": "badam"}, "trains it only while its block is active", "optim: adamw"),
        (
            {"loss_type": "gkd", "teacher": "some/model", "num_generations": 4},
            "learns from its teacher",
            "delete the line",
        ),
    ],
)
def test_what_is_wrong(folder: Path, changes: dict[str, Any], said: str, fix: str) -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}, sort_keys=False))
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("tiny.yaml"), [])
    shown = str(caught.value)
    assert said in shown
    assert fix in shown
    assert "tiny.yaml:" in shown


@pytest.mark.full
def test_a_run_is_evaluated_and_says_how_it_divides(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluated model has no trainable weights, and needs no gradient."""
    assert grpo("--output-dir", "run", max_steps=2, val_size=4) == 0
    assert "allocated among the prompts of a step (gvm)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["eval", "run"])
    assert not left.value.code


@pytest.mark.full
def test_epochs_are_of_the_steps_with_rewards(folder: Path) -> None:
    assert grpo("--output-dir", "run", max_steps=2, sft_steps=3) == 0
    epochs = [record["epoch"] for record in lines("run")]
    assert epochs[:3] == [0.0, 0.0, 0.0]
    assert 0 < epochs[3] < epochs[4] == 2 * epochs[3]
