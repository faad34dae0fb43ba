"""An imported recipe of TRL beside TRL itself: the same losses at every step, and the same weights at the end.

TRL's own trainers run here, on the same folder of a model and the same file of rows; nothing of them is written down.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from streamtune.cli import main
from tests.data.trained_tokenizers import read_template, train_bpe, wrap
from tests.exactness.families import build

STEPS = 3
TURNS = [
    ("What is it?", "The answer is 42.", "Paris"),
    ("again", "The quick brown fox jumps over the lazy dog.", "What is it?"),
    ("The quick", " brown", " fox jumps over"),
    ("Paris is", "the capital of France.", "again again again"),
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": asked}],
        "chosen": [{"role": "assistant", "content": good}],
        "rejected": [{"role": "assistant", "content": bad}],
    }
    for asked, good, bad in TURNS
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS
    for name in ("chosen", "rejected")
]
CHATS = [{"messages": [*row["prompt"], *row["chosen"]]} for row in PAIRS]
COMMON = {
    "model_name_or_path": "model",
    "dataset_name": "rows.jsonl",
    "output_dir": "theirs",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_steps": STEPS,
    "logging_steps": 1,
    "max_length": 256,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
}
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    # name -> trainer, rows, its fields
    "sft": ("sft", CHATS, {}),
    "sft dft": ("sft", CHATS, {"loss_type": "dft"}),
    "dpo": ("dpo", PAIRS, {"beta": 0.3}),
    "dpo robust": ("dpo", PAIRS, {"loss_type": "robust", "label_smoothing": 0.2}),
    "dpo hinge": ("dpo", PAIRS, {"loss_type": "hinge", "beta": 0.3}),
    "dpo ipo": ("dpo", PAIRS, {"loss_type": "ipo"}),
    "dpo exo": ("dpo", PAIRS, {"loss_type": "exo_pair", "label_smoothing": 0.1}),
    "dpo sppo": ("dpo", PAIRS, {"loss_type": "sppo_hard"}),
    "dpo apo_zero": ("dpo", PAIRS, {"loss_type": "apo_zero"}),
    "dpo apo_down": ("dpo", PAIRS, {"loss_type": "apo_down"}),
    "simpo": ("cpo", PAIRS, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.4}),
    "cpo without NLL": ("cpo", PAIRS, {"beta": 0.2, "cpo_alpha": 0.0}),
    "cpo, one pair": ("cpo", PAIRS[:1], {"beta": 0.2}),
    "simpo with NLL, one pair": ("cpo", PAIRS[:1], {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.4}),
    # of two rows each is the other's mismatched completion, whoever draws it
    "kto, two rows": ("kto", [JUDGED[0], JUDGED[3]], {"beta": 0.2, "desirable_weight": 1.5}),
    "kto apo_zero_unpaired": ("kto", JUDGED, {"loss_type": "apo_zero_unpaired", "beta": 0.2}),
}


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


def trl_classes(trainer: str) -> tuple[type, type]:
    import trl

    name = trainer.upper()
    module: Any = trl
    if not hasattr(trl, f"{name}Trainer"):
        from importlib import import_module

        module = import_module(f"trl.experimental.{trainer}")
    return getattr(module, f"{name}Config"), getattr(module, f"{name}Trainer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and its tokenizer in ``model/``."""
    monkeypatch.chdir(tmp_path)
    # docs/guide/import.md names what is another token there: this template writes no newline behind a turn, and a
    # special token before every answer; the tokenizer has no ``bos_token``.
    special = ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"]
    tokenizer = wrap(train_bpe(special=special), read_template("phi4"), bos_token=None)
    model = build("qwen3", vocab_size=len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    return tmp_path


def by_trl(trainer: str, rows: list[dict[str, Any]], fields: dict[str, Any]) -> tuple[list[float], PreTrainedModel]:
    config_class, trainer_class = trl_classes(trainer)
    own = {name: value for name, value in fields.items() if name not in ("model_name_or_path", "dataset_name")}
    tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    trained = trainer_class(
        model=model,
        args=config_class(**own, use_cpu=True, save_strategy="no"),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trained.train()
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry], trained.model


def same_weights(their_model: PreTrainedModel) -> None:
    """Compare TRL's weights with those in ``ours/final``, by the way they have gone from ``model``."""
    start, mine = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).state_dict() for each in ("model", "ours/final")
    )
    theirs = their_model.state_dict()
    apart = {key: (float((mine[key] - theirs[key]).norm()), float((theirs[key] - start[key]).norm())) for key in theirs}
    assert max(error / moved for error, moved in apart.values()) <= 1e-3, apart
    errors, moves = zip(*apart.values(), strict=True)
    assert math.hypot(*errors) <= 1e-5 * math.hypot(*moves)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_imported_recipe_trains_the_same_model(name: str, folder: Path) -> None:
    trainer, rows, more = CASES[name]
    fields = {**COMMON, "per_device_train_batch_size": len(rows), **more}
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = " ".join(f"--{key} {value}" for key, value in fields.items())
    Path("train.sh").write_text(f"trl {trainer} {options}\n")
    assert call("recipes", "import", "train.sh", "ours.yaml") == 0
    objective = yaml.safe_load(Path("ours.yaml").read_text()).get("objective", "sft")
    settings = ("output_dir=ours", "engine.chunk_size=16", "device=cpu")
    assert call(objective, "ours.yaml", *(word for each in settings for word in ("--set", each))) == 0
    lines = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if "loss" in line]
    wanted, their_model = by_trl(trainer, rows, fields)
    assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    same_weights(their_model)


# --- completions of the model -----------------------------------------------------------------------------------------

REWARDS = '''import json


def score(completion_ids, prompts, **columns):
    """Odd tokens, counted; what is asked is written down."""
    with open("asked.jsonl", "a") as file:
        file.write(json.dumps([[str(prompt), ids] for prompt, ids in zip(prompts, completion_ids)]) + "\\n")
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]
'''
POLICIES: dict[str, dict[str, Any]] = {
    # name -> TRL's fields
    "grpo": {"loss_type": "grpo"},
    "grpo with a reference": {"loss_type": "grpo", "beta": 0.2},
    "with a biased KL": {"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": False},
    "gspo with a reference, twice": {
        **{"loss_type": "grpo", "importance_sampling_level": "sequence"},
        **{"num_iterations": 2, "beta": 0.2},
    },
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo, twice": {"loss_type": "dapo", "num_iterations": 2, "epsilon_high": 0.28},
    "gspo, twice": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
}


def replay(fields: dict[str, Any], asked: list[dict[str, list[list[int]]]]) -> tuple[list[float], PreTrainedModel]:
    """Train by TRL on completions that were written down, rollout by rollout."""
    from trl import GRPOConfig, GRPOTrainer

    own = {name: value for name, value in fields.items() if name not in ("model_name_or_path", "dataset_name")}
    tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
    rollouts = iter(asked)

    def written(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        left = {prompt: list(ids) for prompt, ids in next(rollouts).items()}
        turns = ("role", "content")  # some versions of datasets sort the keys
        named = [str([{key: turn[key] for key in turns} for turn in prompt]) for prompt in prompts]
        completions = [left[name].pop(0) for name in named]
        rendered = [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in prompts]
        return {
            "prompt_ids": rendered,
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
        }

    def score(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(sum(token % 2 for token in ids)) for ids in completion_ids]

    trained = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32),
        reward_funcs=score,
        args=GRPOConfig(**own, use_cpu=True, save_strategy="no"),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in PAIRS[:2]]),
        processing_class=tokenizer,
        rollout_func=written,
    )
    trained.train()
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry], trained.model


@pytest.mark.quick("grpo")
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_completions_train_the_same_policy(name: str, folder: Path) -> None:
    """Completions and rewards of our run are handed to TRL's trainer as its rollouts."""
    fields = {
        **{key: value for key, value in COMMON.items() if key != "max_length"},
        **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 4},
        **POLICIES[name],
    }
    Path("rows.jsonl").write_text("".join(f"{json.dumps({'prompt': row['prompt']})}\n" for row in PAIRS[:2]))
    Path("rewards.py").write_text(REWARDS)
    options = " ".join(f"--{key} {value}" for key, value in fields.items())
    Path("train.sh").write_text(f"trl grpo --reward_funcs rewards.score {options}\n")
    assert call("recipes", "import", "train.sh", "ours.yaml") == 0
    settings = ("output_dir=ours", "engine.chunk_size=16", "device=cpu")
    assert call("grpo", "ours.yaml", "--allow-code", *(word for each in settings for word in ("--set", each))) == 0
    asked: list[dict[str, list[list[int]]]] = []
    for line in (folder / "asked.jsonl").read_text().splitlines():
        rollout: dict[str, list[list[int]]] = {}
        for prompt, ids in json.loads(line):
            rollout.setdefault(prompt, []).append(ids)
        asked.append(rollout)
    _, their_model = replay(fields, asked)
    same_weights(their_model)
