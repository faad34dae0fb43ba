"""``plan``, ``probe-max-len``, ``verify`` and ``bench`` on recipes that score completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from streamtune import data
from streamtune.cli import main
from streamtune.engine import Branches
from streamtune.plan.budget import Budget
from streamtune.plan.simulate.simulate import simulate
from streamtune.programs.probe.recipe_trials import prepare_step
from streamtune.programs.probe.trial import Shape, _run_trial_on_cpu
from streamtune.recipe import load_recipe
from streamtune.run.device import make_schedule
from streamtune.run.model import make_meta_model
from streamtune.run.plan import LongestStep, make_workload, reference_bytes
from streamtune.tasks import task_of
from streamtune.tasks.random_batches import choose_trees

COMMON: dict[str, Any] = {
    "model": {
        "init": {
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 500,
        }
    },
    "tokenizer": {"train": {"vocab_size": 500}},
    "device": "cpu",
    "engine": {"schedule": "fixed", "chunk_size": 64, "head_chunk_size": 32},
}
RECIPES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo", **COMMON, "datasets": [{"path": "pairs.jsonl"}], "max_length": 512},
    "grpo": {
        "objective": "grpo",
        **COMMON,
        "datasets": [{"path": "prompts.jsonl"}],
        "reward_funcs": ["exact_match"],
        "max_prompt_length": 300,
        "max_completion_length": 100,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "beta": 0.04,
    },
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``streamtune COMMAND dpo.yaml ...`` in this process; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, recipe in RECIPES.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    pairs = [
        {"prompt": f"question {n}? " * 6, "chosen": f"yes, {n} is right", "rejected": f"no, {n} is wrong, I think"}
        for n in range(4)
    ]
    asked = [{"prompt": f"say {n} again and again, please. " * 4, "answer": str(n)} for n in range(4)]
    for name, rows in (("pairs", pairs), ("prompts", asked)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(*arguments: str) -> int:
        try:
            main(list(arguments))
        except SystemExit as left:
            return int(left.code or 0)
        return 0

    return call


# --- plan -------------------------------------------------------------------------------------------------------------

ELSEWHERE = ("--device-memory", "200MiB", "--host-memory", "1GiB", "--set", "device=auto")


@pytest.mark.parametrize(
    ("recipe", "settings", "step", "time"),
    [
        (
            "dpo",
            (),
            "1 pair of 2 x 512 tokens, prompt shared: 769 tokens; adamw",
            "tokens/s (predicted); includes forward passes without gradient",
        ),
        pytest.param(
            "dpo",
            ("share_prefix=never", "per_device_train_batch_size=2", "gradient_accumulation_steps=3", "loss_type=simpo"),
            "2 pairs of 2 x 512 tokens: 2,048 tokens, 3 times; adamw",
            "tokens/s (predicted)",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "dpo",
            ("loss_type=kto",),
            "1 row of 512 tokens: 512 tokens; adamw",
            "includes forward passes without gradient",
            marks=pytest.mark.full,
        ),
        (
            "grpo",
            (),
            "4 completions of 400 tokens, prompt shared: 703 tokens; adamw",
            "includes forward passes without gradient; excludes the rollout",
        ),
    ],
)
def test_the_plan_says_what_a_step_is(
    run: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    recipe: str,
    settings: tuple[str, ...],
    step: str,
    time: str,
) -> None:
    assert run("plan", f"{recipe}.yaml", *ELSEWHERE, *(part for text in settings for part in ("--set", text))) == 0
    lines = {line.split()[0]: line for line in capfd.readouterr().out.splitlines() if line.strip()}
    assert lines["step"].removeprefix("  step      ") == step
    assert lines["time"].endswith(time)
    assert ("reference" in lines) == ("loss_type=simpo" not in settings)


@pytest.mark.full
def test_the_plan_as_json(run: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "dpo.yaml", *ELSEWHERE, "--json", "--set", "engine.schedule=auto") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["fits"] is True
    assert found["peak_bytes"] == sum(found["terms"].values()) == max(found["phases"].values())
    assert (found["objective"], found["length"], found["tokens"]) == ("dpo", 512, 769)
    assert found["completions"]["trees"] == [[255, [257, 257]]]
    assert found["terms"]["reference"] == found["terms"]["weights"]


@pytest.mark.slow
def test_a_pair_that_fits_nowhere(run: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    small = (
        "--device-memory",
        "4MiB",
        "--host-memory",
        "1MiB",
        "--set",
        "device=auto",
        "--set",
        "engine.schedule=auto",
    )
    assert run("plan", "dpo.yaml", *small, "--length", "4096", "--set", "finetuning_type=lora") == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "no schedule fits 2 completions of 1 prompt, up to 4,096 tokens each with prompt, 6,145 in total" in said
    assert "set max_length: " in said


# --- probe-max-len ----------------------------------------------------------------------------------------------------


def settings_of(*settings: str) -> tuple[str, ...]:
    return tuple(part for text in settings for part in ("--set", text))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "mode"),
    [
        pytest.param("dpo", ["gradient_accumulation_steps=2"], "stream", marks=pytest.mark.full),
        ("dpo", ["finetuning_type=lora", "loss_type=ipo"], "stream"),
        pytest.param("dpo", ["finetuning_type=lora", "loss_type=ipo"], "plain", marks=pytest.mark.full),
        pytest.param("dpo", ["loss_type=kto", "per_device_train_batch_size=2"], "checkpoint", marks=pytest.mark.full),
        pytest.param("dpo", ["precompute_ref_log_probs=true"], "stream", marks=pytest.mark.full),
        pytest.param("grpo", ["use_vllm=true"], "stream", marks=pytest.mark.full),
        ("grpo", ["num_iterations=2", "finetuning_type=lora", "use_vllm=true"], "checkpoint"),
    ],
)
def test_a_real_step_holds_what_a_simulated_one_does(
    run: Callable[..., int], name: str, settings: list[str], mode: Any
) -> None:
    """The step uses the training loop's functions and the recipe's objective on random tokens, without a rollout."""
    compare_step(load_recipe(f"{name}.yaml", settings).recipe, mode)


@pytest.mark.full
def test_so_it_is_with_a_teacher(run: Callable[..., int]) -> None:
    """A teacher is called in each step, but a reference once per rollout."""
    config = {**COMMON["model"]["init"], "hidden_size": 96}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained("taught")
    settings = ["loss_type=gkd", "teacher=taught", "beta=0.0", "use_vllm=true", "reward_funcs=[]"]
    compare_step(load_recipe("grpo.yaml", settings).recipe, "stream")


def compare_step(recipe: Any, mode: Any) -> None:
    length, size = 384, recipe.per_device_train_batch_size
    said: dict[str, Any] = {}
    step = prepare_step(recipe, "cpu", Budget(), Shape(mode, length, size))
    _run_trial_on_cpu(step, Budget(), lambda phase: None, said)
    device = torch.device("cpu")
    workload = make_workload(
        recipe,
        make_meta_model(recipe, device),
        LongestStep(length, task_of(recipe).make_shape_function(), reference_bytes(task_of(recipe), device)),
        device,
    )
    found = simulate(replace(workload, mode=mode), make_schedule(recipe.engine))
    assert found.peak_bytes == pytest.approx(said["peak_bytes"], rel=0.03)
    assert found.terms.get("reference", 0) == said["terms"].get("reference", 0)


@pytest.mark.slow
def test_the_longest_with_its_rollout(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device-memory", "64MiB", "--from", "256", "--to", "256", "--output-dir", "out")
    assert run("probe-max-len", "grpo.yaml", *options) == 0
    shown, said = capsys.readouterr()
    assert shown.splitlines()[0] == "Longest sequence: 256 tokens in 64.0 MiB of device memory (grpo, measured)"
    assert "tokens of a prompt plus its longest completion; 4 completions in a batch" in shown
    assert "; a trial also generates the end of each completion" in shown
    assert "mode=stream length=256 batch_size=4 fits=true" in said
    document = json.loads(Path("out/probe.json").read_text())
    assert (document["objective"], document["unit"], document["max_length"]) == ("grpo", "completion", 256)
    assert document["trials"][0]["terms"]["reference"] > 0


@pytest.mark.full
def test_the_largest_batch_simulated(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--method", "simulate", "--batch-size", "--length", "256", "--from", "2", "--to", "2", "--baseline")
    assert run("probe-max-len", "dpo.yaml", *options, "--device-memory", "1GiB", "--output-dir", "out") == 0
    shown = capsys.readouterr().out
    assert "Largest batch: 2 pairs of 256 tokens in 1.00 GiB" in shown
    lines = shown.splitlines()
    assert any("largest," in above and "pairs" in below for above, below in pairwise(lines)), "the column's title"
    document = json.loads(Path("out/probe.json").read_text())
    assert document["max_batch_size"] == 2
    assert set(document["baseline"]) == {"checkpoint", "plain"}


def test_a_length_that_leaves_no_completion(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("probe-max-len", "dpo.yaml", "--from", "3") == 2
    assert "a prompt with its completion needs at least 4 tokens, found 3" in " ".join(capsys.readouterr().err.split())


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("dpo", (), marks=pytest.mark.full),
        pytest.param("dpo", ("finetuning_type=lora", "lora_dropout=0.1", "loss_type=ipo"), marks=pytest.mark.full),
        pytest.param("dpo", ("loss_type=kto",), marks=pytest.mark.full),
        pytest.param("dpo", ("share_prefix=never", "loss_type=orpo"), marks=pytest.mark.full),
        pytest.param("grpo", (), marks=pytest.mark.full),
        ("grpo", ("finetuning_type=lora", "temperature=0.8", "loss_type=gspo")),
    ],
)
def test_the_streamed_loss_is_plain_autograds(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str, settings: tuple[str, ...]
) -> None:
    assert run("verify", f"{name}.yaml", "--length", "320", "--json", *settings_of(*settings)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] is True
    assert document["objective"] == name
    assert document["shared_prompts"] is ("share_prefix=never" not in settings)
    assert 0 < document["trained_tokens"] < document["tokens"]


@pytest.mark.full
def test_the_screen_says_what_was_scored(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "dpo.yaml", "--length", "120", "--set", "bf16=true") == 0
    shown = capsys.readouterr().out
    assert "4 completions of the first 2 prompts, cut to" in shown or "2 completions of the first prompt" in shown
    assert "prompts shared: " in shown
    assert "  loss    sigmoid; reference: a second model" in shown
    assert "exact: streamed loss and gradients equal plain autograd's" in shown


def test_prompts_that_are_shared_wrongly_are_caught(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong sharing has positions that do not continue after the prompt."""

    def arguments(self: Branches, input_ids: Tensor) -> dict[str, Any]:
        return {"position_ids": torch.arange(self.length)[None], "attention_mask": torch.ones_like(input_ids)}

    monkeypatch.setattr(Branches, "arguments", arguments)
    monkeypatch.setattr("streamtune.tasks.task.Task.can_share_prompts", lambda *_, **more: True)  # it would find out
    assert run("verify", "dpo.yaml", "--length", "320") == 1
    assert "NOT exact: " in capsys.readouterr().out


def test_trees_are_cut_where_their_completions_differ() -> None:
    alike = list(range(50))
    tree = data.Tree([1] * 100, [[*alike, 7, 8], [*alike, 9]], origin="rows:1")
    [cut], shortened = choose_trees([tree], 40, distinct_prompts=False)
    assert shortened
    assert cut.num_tokens_separate <= 40
    assert cut.completions[0] != cut.completions[1]
    [same], shortened = choose_trees([tree], 1000, distinct_prompts=False)
    assert same == tree
    assert not shortened


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_bench_on_pairs(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "dpo.yaml", "--lengths", "256", "--repeats", "1", "--modes", "stream") == 0
    shown = capsys.readouterr().out
    assert "Streaming computes a prompt once for all its completions" in " ".join(shown.split())
    document = json.loads(Path("runs/dpo/bench.json").read_text())
    [row] = document["rows"]
    assert row["error"] is None
    assert row["tokens_per_s"] > 0
    assert (row["length"], document["objective"]) == (256, "dpo")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--modes", "liger-loss"), "mode 'liger-loss' cannot score the completions of dpo"),
        (("--packed-rows", "2"), "--packed-rows needs an sft recipe, found dpo"),
        (("--table", "bp-time"), "--table bp-time needs an sft recipe, found dpo"),
    ],
)
def test_what_bench_does_not_measure(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert run("bench", "dpo.yaml", *options) == 2
    assert said in " ".join(capsys.readouterr().err.split())
