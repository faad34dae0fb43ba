"""``streamtune grpo`` by the real command line, on tiny models and rewards that distinguish random completions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from streamtune.cli import main
from streamtune.errors import RecipeError
from streamtune.models import load_model
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.ranks import resolve_setup
from streamtune.run.start import _make_identity as make_identity
from streamtune.run.start import _with_generation_size as with_generation_size
from streamtune.tasks.steps import count_micro_batches
from streamtune.train import World
from streamtune.train.rundir import check_same_run

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
    "datasets": [{"path": "demo-arithmetic", "name": "copy", "max_rows": 40}],
    "max_prompt_length": 40,
    "max_completion_length": 6,
    "reward_funcs": ["rewards.py:low_tokens"],
    "allow_code": True,
    "num_generations": 4,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1.0e-2,
    "engine": {"schedule": "fixed", "chunk_size": 64, "head_chunk_size": 32},
}
REWARDS = '''
def low_tokens(completions, completion_ids, **columns):
    """The smaller the ids, the better: every completion of a random model gets another score."""
    assert all(message[0]["role"] == "assistant" for message in completions)
    return [1.0 - sum(ids) / (300 * len(ids)) for ids in completion_ids]


def even(completion_ids, answer, **columns):
    """No opinion on every other row."""
    return [None if int(right) % 2 else -ids[0] / 300 for ids, right in zip(completion_ids, answer)]


def same(completions, **columns):
    return [0.5] * len(completions)


def raising(completions, answer, **columns):
    return [1.0 if int(right) >= 0 else 0.0 for right in [*answer[:3], "what", *answer[4:]]]


def not_a_number(completions, **columns):
    return [1.0, float("nan"), *[0.0] * (len(completions) - 2)]


def too_few(completions, **columns):
    return [1.0]


def interrupting(completions, completion_ids, **columns):
    """Presses Ctrl-C while the completions of the third step are scored, once."""
    import os, signal
    calls = int(os.environ.get("CALLS", "0")) + 1
    os.environ["CALLS"] = str(calls)
    if calls == 3:
        signal.raise_signal(signal.SIGINT)
    return low_tokens(completions, completion_ids)


def wants_more(completions, difficulty, **columns):
    return [0.0] * len(completions)
'''
TIMINGS = ("tokens_per_s", "peak_mem_gib")

Grpo = Callable[..., int]


@pytest.fixture
def grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grpo:
    """Run ``streamtune grpo tiny.yaml --set ...`` in this process, in a new folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))

    def run(*arguments: str, command: str = "grpo", **settings: Any) -> int:
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        with pytest.raises(SystemExit) as left:
            main([command, "tiny.yaml", *arguments, *sets])
        return int(left.value.code or 0)

    return run


def lines(run: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(run, name).read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in found]


def same_model(first: str, second: str) -> bool:
    ours, theirs = (load_model(f"{folder}/final").state_dict() for folder in (first, second))
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_trains_from_a_recipe_to_a_model_that_transformers_loads(
    grpo: Grpo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo(max_steps=16, learning_rate=3e-2, lr_scheduler_type="constant", val_size=6, eval_steps=8) == 0
    records = lines("runs/tiny")
    train = [record for record in records if "loss" in record]
    assert [record["step"] for record in train] == list(range(1, 17))
    assert {
        "reward",
        "reward_std",
        "rewards/low_tokens/mean",
        "frac_reward_zero_std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "entropy",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
    } <= train[0].keys()
    before, after = (sum(record["reward"] for record in part) / 4 for part in (train[:4], train[-4:]))
    assert after > before + 0.1
    held_out = [record for record in records if "eval_reward" in record]
    assert [record["step"] for record in held_out] == [8, 16]
    assert "eval_reward_std" not in held_out[0]  # of one completion to a prompt

    AutoModelForCausalLM.from_pretrained("runs/tiny/final")
    assert Path("runs/tiny/loss.png").read_bytes().startswith(b"\x89PNG")
    kept = lines("runs/tiny", "completions.jsonl")
    assert [record["step"] for record in kept] == [step for step in range(1, 17) for _ in range(4)][: len(kept)]
    assert {"prompt", "completion", "reward", "rewards", "advantage", "truncated", "origin"} <= kept[0].keys()
    assert kept[0]["origin"].startswith("demo-arithmetic:row")
    shown = capsys.readouterr().out
    assert "12 completions" in shown
    assert "reward" in shown


@pytest.mark.full
def test_ctrl_c_in_a_rollout_saves_and_the_same_command_goes_on(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLS", "10")
    assert grpo("--output-dir", "whole", reward_funcs=["rewards.py:interrupting"], max_steps=4) == 0
    monkeypatch.setenv("CALLS", "0")
    settings = {"reward_funcs": ["rewards.py:interrupting"], "max_steps": 4}
    assert grpo("--output-dir", "split", **settings) == 130
    assert [path.name for path in Path("split/checkpoints").iterdir()] == ["step-000002"]
    assert grpo("--output-dir", "split", **settings) == 0
    assert lines("split") == lines("whole")
    assert lines("split", "completions.jsonl") == lines("whole", "completions.jsonl")
    assert same_model("split", "whole")


INNER = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 7, "epsilon": 0.01, "prompts": "pass_rate"}


@pytest.mark.full
def test_a_run_goes_on_in_the_middle_of_inner_epochs_bit_for_bit(grpo: Grpo) -> None:
    """A rollout is used for four steps: 1 to 4, then 5 to 8. Runs resumed at steps 3 and 5 use saved completions."""
    settings = {**INNER, "save_steps": 1, "save_total_limit": 9, "pass_reward": 0.55, "beta": 0.1}
    assert grpo("--output-dir", "whole", **settings) == 0
    whole = lines("whole")
    assert any(record["clip_ratio/region_mean"] > 0 for record in whole)  # old log-probs are read
    assert len({record["kl"] for record in whole}) == 7
    for step in (3, 4, 5):
        folder = f"from-{step}"
        checkpoint = f"whole/checkpoints/step-{step:06d}"
        assert grpo("--output-dir", folder, "--resume", checkpoint, **settings) == 0
        assert lines(folder) == whole[step:]
        assert same_model(folder, "whole")
        written = [record for record in lines("whole", "completions.jsonl") if record["step"] > step]
        assert lines(folder, "completions.jsonl") == written if written else True
    state = json.loads(Path("whole/checkpoints/step-000003/state.json").read_text())
    groups = state["stream"]["rollout"]["groups"]
    assert len(groups) == 6
    assert [len(row) for row in groups[0]["old"]] == [len(row) for row in groups[0]["completions"]]
    assert state["stream"]["picker"]["rates"]


@pytest.mark.full
def test_other_data_begins_with_new_completions(grpo: Grpo) -> None:
    """The completions of the checkpoint belong to prompts of the old data, which has as many rows."""
    settings = {"num_iterations": 4, "val_size": 0}
    for word in ("Say", "Add"):
        prompts = [[{"role": "user", "content": f"{word} {number}."}] for number in range(20)]
        Path(f"{word}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    assert grpo(max_steps=2, datasets=[{"path": "Say.jsonl"}], **settings) == 0
    changes = ("--allow-change", "data", "--allow-change", "max_steps")
    assert grpo(*changes, max_steps=4, datasets=[{"path": "Add.jsonl"}], **settings) == 0
    written = lines("runs/tiny", "completions.jsonl")
    assert {record["step"] for record in written} == {1, 3}
    assert {record["origin"].partition(":")[0] for record in written if record["step"] == 3} == {"Add.jsonl"}


@pytest.mark.full
def test_another_reference_begins_with_new_completions(grpo: Grpo, capsys: pytest.CaptureFixture[str]) -> None:
    """The log-probs in the checkpoint are those of the old reference."""
    assert grpo() == 0
    Path("runs/tiny/final").rename("reference")
    shutil.rmtree("runs")
    settings = {"beta": 0.1, "ref_model_name_or_path": "reference", "num_iterations": 4}
    assert grpo(max_steps=2, **settings) == 0
    weights = load_file("reference/model.safetensors")
    save_file({name: 1.1 * weight for name, weight in weights.items()}, "reference/model.safetensors", {"format": "pt"})
    changes = ("--allow-change", "reference", "--allow-change", "max_steps")
    assert grpo(*changes, max_steps=4, **settings) == 0
    assert {record["step"] for record in lines("runs/tiny", "completions.jsonl")} == {1, 3}
    assert "the reference changed: completions" in " ".join(capsys.readouterr().err.split())


def test_the_size_of_a_generation_is_compared_over_all_ranks(grpo: Grpo) -> None:
    def identity_of(ranks: int, **settings: Any) -> dict[str, Any]:
        loaded = load_recipe("tiny.yaml", [f"{key}={value}" for key, value in settings.items()])
        setup = resolve_setup(loaded, lambda text: None)
        world = World(0, ranks)
        setup = replace(setup, world=world, micro_batches=count_micro_batches(loaded.recipe, world))
        return make_identity(setup, None, "2030-01-01")

    two = identity_of(2, steps_per_generation=4)
    assert two["recipe"]["generation_batch_size"] == 2 * 4 * 6
    older_recipe = {**two["recipe"], "steps_per_generation": 4, "generation_batch_size": None}
    assert with_generation_size({**two, "recipe": older_recipe}) == two == with_generation_size(two)
    step = {"train_batch_size": 24}
    for ranks, settings, same in (
        (1, {"steps_per_generation": 8}, True),
        (1, {"generation_batch_size": 48}, True),
        (2, {"generation_batch_size": 48}, True),
        (1, {"steps_per_generation": 4}, False),
    ):
        other = identity_of(ranks, **settings, **step)
        with nullcontext() if same else pytest.raises(RecipeError, match="generation_batch_size was 48, is now 24"):
            check_same_run(two, other, where=Path("run"))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_learning_rate_is_scaled_once_by_the_completions_of_all_ranks(grpo: Grpo, ranks: int) -> None:
    """A step has 12 completions on each rank, and the rate is that of 12 completions."""
    scaled = ["lr_scaling_base=12", "lr_scaling=linear", "lr_scheduler_type=constant", "warmup_steps=0"]
    built = build_run(load_recipe("tiny.yaml", scaled), dry_run=True)

    class OfRanks:
        world = World(0, ranks)

        def __getattr__(self, name: str) -> Any:
            return getattr(built, name)

    rate = built.start.task.make_training(OfRanks()).learning_rate_at  # type: ignore[arg-type]
    assert rate(1) == pytest.approx(ranks * 1e-2)


@pytest.mark.full
def test_a_run_of_two_ranks_is_not_resumed_with_fewer_completions_per_generation(
    grpo: Grpo, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved run is one of an older version: it has the number of micro-batches of one rank."""
    settings = {"train_batch_size": 12, "reward_funcs": ["rewards.py:raising"]}
    assert grpo(steps_per_generation=8, **settings) == 1  # before the first checkpoint, which has a checksum
    identity = json.loads(Path("runs/tiny/run.json").read_text())
    identity["recipe"] |= {"steps_per_generation": 4, "generation_batch_size": None}
    Path("runs/tiny/run.json").write_text(json.dumps({**identity, "world_size": 2}))
    capsys.readouterr()
    assert grpo("--dry-run", steps_per_generation=4, **settings) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "writes 48 completions per generation on 2 ranks, but this recipe writes 24 on 1 rank" in shown
    assert "write generation_batch_size: 48 in place of steps_per_generation" in shown
    assert grpo("--dry-run", generation_batch_size=48, **settings) == 0
    allowed = ("--dry-run", "--allow-change", "steps_per_generation")
    assert grpo(*allowed, steps_per_generation=4, **settings) == 0
    assert "generation_batch_size was 48, is now 24" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_supervised_steps_come_first_and_a_run_goes_on_at_their_end(grpo: Grpo) -> None:
    settings = {"sft_steps": 4, "sft_batch_size": 8, "max_steps": 3, "save_steps": 1, "save_total_limit": 9}
    assert grpo("--output-dir", "whole", **settings) == 0
    whole = lines("whole")
    assert ["reward" in record for record in whole] == [False] * 4 + [True] * 3
    assert whole[3]["loss"] < whole[0]["loss"]
    for step in (3, 4, 5):
        folder = f"from-{step}"
        assert grpo("--output-dir", folder, "--resume", f"whole/checkpoints/step-{step:06d}", **settings) == 0
        assert lines(folder) == whole[step:]
        assert same_model(folder, "whole")


def test_supervised_steps_do_not_see_held_out_prompts_and_need_answers(
    grpo: Grpo, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert grpo(datasets=[{"path": "rows.jsonl"}], sft_steps=2, reward_funcs=["rewards.py:same"]) == 2
    shown = capsys.readouterr().err
    assert "but this row has none" in shown
    assert "rows.jsonl:" in shown


@pytest.mark.quick("rloo")
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo", "gspo", "rloo", "remax"])
def test_every_loss_trains_with_and_without_a_reference(grpo: Grpo, loss_type: str) -> None:
    assert grpo("--output-dir", "with", loss_type=loss_type, beta=0.05, mask_truncated_completions=False) == 0
    with_reference = lines("with")
    assert with_reference[0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert with_reference[1]["kl"] > 1e-4
    assert all(record["grad_norm"] > 0 for record in with_reference)


@pytest.mark.full
def test_adapters_are_their_own_reference(grpo: Grpo) -> None:
    assert grpo(finetuning_type="lora", lora_r=4, beta=0.05, max_steps=3) == 0
    records = lines("runs/tiny")
    assert records[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert records[2]["kl"] > 1e-6


@pytest.mark.full
def test_shared_and_separate_prompts_take_the_same_steps(grpo: Grpo) -> None:
    for share in ("always", "never"):
        assert grpo("--output-dir", share, share_prefix=share, reward_funcs=["exact_match", "rewards.py:even"]) == 0
    for first, second in zip(lines("always"), lines("never"), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-3, abs=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("reward", "what"),
    [
        ("raising", "the reward function 'raising' raised ValueError"),
        ("not_a_number", "must be a finite number or None, found nan"),
        ("too_few", "returned 1 scores for 12 completions"),
    ],
)
def test_a_reward_function_that_fails_is_named_and_nothing_is_trained(
    grpo: Grpo, reward: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo(reward_funcs=[f"rewards.py:{reward}"]) == 1
    shown = capsys.readouterr().err
    assert what in shown
    assert "rewards.py:" in shown
    assert not Path("runs/tiny/metrics.jsonl").exists()


def test_rewards_that_are_all_equal_are_counted_and_end_the_run_after_a_while(
    grpo: Grpo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo(reward_funcs=["rewards.py:same"], skip_limit=3) == 1
    assert "3 rollouts in a row had no gradient" in capsys.readouterr().err
    events = [record["event"] for record in lines("runs/tiny", "events.jsonl")]
    assert events == ["start", "skip", "skip", "skip", "failure"]
    assert not Path("runs/tiny/metrics.jsonl").exists()
    assert len(lines("runs/tiny", "completions.jsonl")) == 12


@pytest.mark.parametrize(
    ("settings", "what", "where"),
    [
        ({"max_prompt_length": 8}, "prompts have more than max_prompt_length = 8 tokens", "demo-arithmetic:row"),
        ({"reward_funcs": ["unit_tests"], "allow_code": False}, "runs code that the model writes", "--set"),
        ({"reward_funcs": ["exact_mach"]}, "unknown built-in reward 'exact_mach'", "--set"),
        ({"reward_funcs": ["rewards.py:wants_more"]}, "reads the column 'difficulty'", "rewards.py"),
        ({"use_vllm": True}, "'use_vllm: true' needs", "--set"),
        ({"num_generations": 5}, "must be a multiple of 'num_generations', 5", "--set"),
        (
            {"loss_type": "rloo", "scale_rewards": "group"},
            "does not divide advantages by a standard deviation",
            "--set",
        ),
        ({"beta": 0.1, "sft_steps": 3}, "'sft_steps' changes the model first", "--set"),
        ({"max_length": 20}, "completion; found 20", "--set"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_input_is_told_before_anything_is_written(
    grpo: Grpo, settings: dict[str, Any], what: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo(**settings) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert what in shown
    assert where in shown
    assert not Path("runs").exists()


def test_a_dry_run_says_what_would_run_and_writes_nothing(grpo: Grpo, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo("--dry-run") == 0
    assert not Path("runs").exists()
    assert "2 (" in capsys.readouterr().out


@pytest.mark.full
def test_the_resolved_recipe_replays_the_run(grpo: Grpo, tmp_path: Path) -> None:
    assert grpo("--output-dir", "first") == 0
    (tmp_path / "tiny.yaml").write_text(Path("first/recipe.yaml").read_text())
    assert grpo("--output-dir", "second") == 0
    assert lines("first") == lines("second")
    assert same_model("first", "second")
