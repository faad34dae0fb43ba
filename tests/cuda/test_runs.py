"""Whole runs on the device: every optimizer, adapter, objective and tier trains, as on the processor, and goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest

from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.recipe.schema import Recipe
from tests.run.test_dpo_cli import RECIPE as PAIRS
from tests.run.test_dpo_cli import add
from tests.run.test_grpo_cli import RECIPE as PROMPTS
from tests.run.test_grpo_cli import REWARDS
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

COMMON: dict[str, Any] = {
    **RECIPE,
    "model": {"init": {**RECIPE["model"]["init"], "hidden_size": 64, "intermediate_size": 128}},
    "max_length": 160,
    "val_size": 5,
    "engine": FIXED,
    "max_steps": 4,
    "save_steps": 2,
    "eval_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
}
HOST = {"weights": "host", "optimizer": "host"}
ADAPTERS = get_args(Recipe.model_fields["adapter_type"].annotation)
LORA = {"finetuning_type": "lora", "lora_r": 4}
SIZES = {key: value for key, value in COMMON["model"]["init"].items() if key not in ("model_type", "head_dim")}
MIXTURE = {**SIZES, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {**SIZES, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    **{f"optim {name}": {"optim": name} for name in OPTIMIZERS},
    **{f"adapter {name}": {**LORA, "adapter_type": name} for name in ADAPTERS},
    "nf4": {**LORA, "finetuning_type": "qlora", "quantization": "nf4"},
    "int8": {**LORA, "finetuning_type": "qlora", "quantization": "int8"},
    "bf16 weights": {"dtype": "bfloat16"},
    "autocast": {"bf16": True},
    "planned": {"engine": {"schedule": "auto"}},
    "weights on host": {"engine": {**FIXED, "weights": "host"}, "sample": {"prompt": "Add 3.", "max_new_tokens": 4}},
    "weights and optimizer on host": {"engine": {**FIXED, **HOST}, "optim_in_backward": True},
    "states narrow": {"optim_states": "bfloat16", "dtype": "bfloat16"},
    "order of chunks": {"engine": {**FIXED, "order": "chunk", "keep_kv": "host"}},
    "disk": {"engine": {**FIXED, "offload": "disk", "offload_dir": "."}},
    "late checkpoints": {"save_async": True},
    "packing": {"packing": True},
    "rows chosen": {"train_batch_size": 4, "select_rows": "colm", "select_from": 8},
    "mixture": {"model": {"init": MIXTURE}, "moe_balance": "global", "router_aux_loss_coef": 0.01},
    "hybrid": {"model": {"init": HYBRID}},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "optim galore": {"optim_args": {"rank": 4, "update_proj_gap": 3}},
    "optim natural_galore": {"optim_args": {"rank": 4, "update_proj_gap": 3}},
    "adapter oft": {"oft_block_size": 8},
    "adapter loftq": {"finetuning_type": "qlora", "quantization": "nf4"},
    "optim mezo": {"learning_rate": 1e-4},
}
DRAWN = ("optim mezo", "adapter", "nf4", "int8")
"""Kinds with random numbers of the device: only their first loss is that of the CPU."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 40)
    return tmp_path


def losses(folder: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [each["loss"] for each in records if "loss" in each]


def files(folder: Path, name: str) -> dict[str, bytes]:
    """The weights at the end of a run."""
    return {file.name: file.read_bytes() for file in (folder / name / "final").glob("*.safetensors")}


def missing(name: str) -> str | None:
    """The package that a kind needs and that is not installed."""
    optimizer = OPTIMIZERS.get(name.removeprefix("optim "))
    return None if optimizer is None or optimizer.is_installed else optimizer.library


@pytest.mark.parametrize("name", KINDS)
def test_a_run_trains_as_on_the_processor_and_goes_on_to_the_same_bits(folder: Path, name: str) -> None:
    if package := missing(name):
        pytest.skip(f"{package} is not installed")
    if name in ("nf4", "adapter loftq"):
        pytest.importorskip("bitsandbytes")
    if name == "int8":
        pytest.importorskip("torchao")
    recipe = {**COMMON, **KINDS[name], **MORE.get(name, {})}
    write_recipe(folder, {**recipe, "output_dir": "whole"})
    assert run("--set", "device=cuda") == 0
    found = losses(folder, "whole")
    assert len(found) == 4
    assert all(map(math.isfinite, found))
    for steps in (2, 4):
        write_recipe(folder, {**recipe, "output_dir": "parts", "max_steps": steps})
        assert run("--set", "device=cuda", "--allow-change", "max_steps") == 0
    assert losses(folder, "parts") == found
    assert files(folder, "parts") == files(folder, "whole")
    if name == "optim paged_adamw_8bit":
        return  # there is none without a device
    write_recipe(folder, {**recipe, "output_dir": "processor"})
    assert run("--set", "device=cpu") == 0
    compared = 1 if name.startswith(DRAWN) else 4
    narrow = 2e-2 if {"dtype", "bf16", "quantization"} & {*recipe} else 1e-3
    assert found[:compared] == pytest.approx(losses(folder, "processor")[:compared], rel=narrow)


@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("command", ["dpo", "grpo"])
def test_other_objectives(folder: Path, command: str, more: dict[str, Any]) -> None:
    for number in range(12):
        add(
            "pairs.jsonl",
            prompt=f"Add {number}.",
            chosen=f"It is {number + 1}.",
            rejected="No idea." * (1 + number % 2),
        )
    (folder / "rewards.py").write_text(REWARDS)
    write_recipe(folder, {**(PAIRS if command == "dpo" else PROMPTS), **more, "save_steps": 1, "max_steps": 2})
    for steps, name in ((2, "whole"), (1, "parts"), (2, "parts")):
        arguments = ["--set", f"max_steps={steps}", "--set", f"output_dir={name}", "--allow-change", "max_steps"]
        assert run(*arguments, "--set", "device=cuda", command=command) == 0
    assert losses(folder, "parts") == losses(folder, "whole")
    assert files(folder, "parts") == files(folder, "whole")
