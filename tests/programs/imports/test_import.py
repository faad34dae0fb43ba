"""``streamtune recipes import``: recipes of other trainers become ours, and every field is accounted for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from streamtune.base.chat_templates import CHAT_TEMPLATES
from streamtune.cli import main
from streamtune.data.preferences import normalise_preference
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import read_rows
from streamtune.errors import ArgumentError, RecipeError
from streamtune.models import ModelOptions, TrainedParts, build_meta_model
from streamtune.programs.imports.importing import ImportedRecipe, import_recipe
from streamtune.programs.imports.rows_and_templates import EQUAL_TEMPLATES, NEAR_TEMPLATES
from streamtune.recipe import load_recipe
from streamtune.run.data import make_sources

AXOLOTL = """
base_model: own/base-1b
adapter: qlora
load_in_4bit: true
load_in_8bit: false
datasets:
  - path: rows/talk.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
  - {path: own/tasks, type: alpaca, split: "train[:300]"}
dataset_prepared_path:
val_set_size: 0.05
output_dir: out/a
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 64
lora_target_linear: true
wandb_project: mine
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: true
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
warmup_ratio: 0.1
neftune_noise_alpha: 5
"""

LLAMAFACTORY = """
model_name_or_path: own/base-8b
quantization_bit: 4
stage: dpo
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
pref_beta: 0.2
pref_loss: simpo
pref_ftx: 0.0
dataset: pairs, hub
dataset_dir: sets
template: llama3
cutoff_len: 1024
max_samples: 100
output_dir: out/l
learning_rate: 5.0e-6
lr_scheduler_type: constant
warmup_ratio: 0.1
bf16: true
deepspeed: configs/ds_z2_config.json
"""
DATASET_INFO = {
    "pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt",
              "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    "hub": {"hf_hub_url": "own/pairs", "ranking": True, "subset": "en", "num_samples": 40,
            "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}},
}  # fmt: skip

TRL = """
model_name_or_path: own/base-1b
dataset_name: own/sums
dataset_config: main
use_peft: true
lora_r: 8
lora_target_modules: [q_proj, k_proj]
reward_funcs: [rewards.brevity, think_format_reward]
num_generations: 4
per_device_train_batch_size: 4
max_prompt_length: 256
max_completion_length: 128
scale_rewards: false
beta: 0.04
attn_implementation: flash_attention_2
learning_rate: 1e-6
fp16: true
neftune_noise_alpha: 5
"""

SWIFT = """\
#!/bin/bash
MODEL=own/base-7b
NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \\
swift sft \\
    --model $MODEL \\
    --train_type lora --quant_bits 4 --quant_method bnb \\
    --dataset 'own/talk:en#500' rows.jsonl \\
    --target_modules all-linear \\
    --torch_dtype bfloat16 \\
    --loss_scale last_round \\
    --attn_impl flash_attn \\
    --max_length 2048 --truncation_strategy delete \\
    --split_dataset_ratio=0.01 --eval_steps 50 \\
    --hub_token hf_abcdefghijklmnopqrstuv \\
    --use_dora true --lora_bias all
"""

WANTED: dict[str, dict[str, Any]] = {
    "axolotl": {
        "model_name_or_path": "own/base-1b", "finetuning_type": "qlora", "quantization": "nf4", "lora_r": 32,
        "lora_alpha": 64, "lora_target": "all-linear", "val_size": 0.05, "output_dir": "out/a", "max_length": 4096,
        "packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
        "optim": "adamw", "lr_scheduler_type": "cosine", "learning_rate": 2e-4, "bf16": True,
        "roles_to_train": ("system", "developer", "user", "assistant", "tool"),
        "warmup_steps": 10, "dtype": "bfloat16", "overlength": "drop", "report_to": ("wandb",),
    },
    "llamafactory": {
        "chat_template": "llama3",
        "objective": "dpo", "model_name_or_path": "own/base-8b", "finetuning_type": "qlora", "quantization": "nf4",
        "lora_r": 8, "lora_target": ("q_proj", "v_proj"), "beta": 0.2, "loss_type": "simpo", "max_length": 1024,
        "output_dir": "out/l", "learning_rate": 5e-6, "lr_scheduler_type": "constant", "bf16": True,
        "deepspeed": "zero2", "num_train_epochs": 3, "per_device_train_batch_size": 8, "dtype": "bfloat16",
        "overlength": "truncate",
    },
    "trl": {
        "objective": "grpo", "model_name_or_path": "own/base-1b", "finetuning_type": "lora", "lora_r": 8,
        "lora_alpha": 32, "lora_dropout": 0.05, "lora_target": ("q_proj", "k_proj"), "num_generations": 4,
        "reward_funcs": ("rewards:brevity", "trl.rewards:think_format_reward"), "per_device_train_batch_size": 4,
        "max_prompt_length": 256, "max_completion_length": 128, "max_length": 384, "scale_rewards": "none",
        "beta": 0.04, "use_bias_correction_kl": True,
        "learning_rate": 1e-6, "lr_scheduler_type": "linear", "num_train_epochs": 3, "dtype": "float32",
        "fp16": True,
    },
    "swift": {
        "model_name_or_path": "own/base-7b", "finetuning_type": "qlora", "quantization": "nf4", "lora_r": 8,
        "lora_alpha": 32, "lora_dropout": 0.05, "lora_target": "all-linear", "dtype": "bfloat16", "bf16": True,
        "train_on": "last", "max_length": 2048, "overlength": "drop", "val_size": 0.01, "eval_steps": 50,
        "learning_rate": 1e-4, "weight_decay": 0.1, "adam_beta2": 0.95, "num_train_epochs": 3, "train_batch_size": 16,
        "adapter_type": "dora",
    },
}  # fmt: skip
DATASETS = {
    "axolotl": [("rows/talk.jsonl", "sharegpt", "train", None, None), ("own/tasks", "alpaca", "train", None, 300)],
    "llamafactory": [
        ("sets/pairs.json", "preference", "train", None, 100),
        ("own/pairs", "preference", "train", "en", 40),
    ],
    "trl": [("own/sums", "auto", "train", "main", None)],
    "swift": [("own/talk", "auto", "train", "en", 500), ("rows.jsonl", "auto", "train", None, None)],
}
LOST = {
    "axolotl": {"datasets.type", "neftune_noise_alpha"},
    "llamafactory": {"dataset", "template"},
    "trl": {"neftune_noise_alpha"},
    "swift": {"lora_bias"},
}
"""Fields that change training and have no counterpart."""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A recipe of each trainer, in a folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    files = {"axolotl": ("a.yaml", AXOLOTL), "llamafactory": ("l.yaml", LLAMAFACTORY), "trl": ("t.yaml", TRL)}
    files["swift"] = ("s.sh", SWIFT)
    for name, text in files.values():
        Path(name).write_text(text)
    return {trainer: Path(name) for trainer, (name, _) in files.items()}


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def lost(imported: ImportedRecipe) -> set[str]:
    return {found.theirs.partition(":")[0] for found in imported.changes_training}


@pytest.mark.parametrize("trainer", WANTED)
def test_a_recipe_of_each_trainer(trainer: str, theirs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("recipes", "import", str(theirs[trainer]), "ours.yaml") == 0
    assert f"written: ours.yaml\nNext: streamtune {WANTED[trainer].get('objective', 'sft')} " in capsys.readouterr().err
    recipe = load_recipe("ours.yaml").recipe
    assert {key: getattr(recipe, key) for key in WANTED[trainer]} == WANTED[trainer]
    assert recipe.model_fields_set - {"datasets", "output_dir"} <= WANTED[trainer].keys()
    assert [(d.path, d.type, d.split, d.name, d.max_rows) for d in recipe.datasets] == DATASETS[trainer]
    imported = import_recipe(theirs[trainer])
    assert imported.trainer.name == trainer
    assert imported.guessed
    assert lost(imported) == LOST[trainer]
    assert call("validate", "ours.yaml") == 0


@pytest.mark.parametrize("trainer", WANTED)
def test_every_field_has_an_answer_with_its_line(trainer: str, theirs: dict[str, Path]) -> None:
    imported = import_recipe(theirs[trainer])
    text = theirs[trainer].read_text().splitlines()
    given = {line.partition(":")[0] for line in text if line[:1].isalpha() and ":" in line}
    if trainer == "swift":
        given = {word[2:].partition("=")[0] for line in text for word in line.split() if word.startswith("--")}
    answered = {found.theirs.partition(":")[0].partition(".")[0] for found in imported.findings if found.where}
    assert given <= answered
    for found in imported.findings:
        if found.where:
            name = found.theirs.partition(":")[0].partition(".")[-1] or found.theirs.partition(":")[0]
            file, line = found.where.rsplit(":", 1)
            assert file == str(theirs[trainer])
            assert name.partition("=")[0] in text[int(line) - 1], found


def test_defaults_that_differ_are_written_with_their_reason(theirs: dict[str, Path]) -> None:
    imported = import_recipe(theirs["llamafactory"])
    assert "learning_rate: 5.0e-06" in imported.text
    assert "per_device_train_batch_size: 8  # default of LLaMA-Factory" in imported.text
    assert {found.ours for found in imported.findings_of_kind("default")} >= {
        "num_train_epochs: 3.0",
        "overlength: truncate",
    }


def test_a_token_goes_nowhere(theirs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("recipes", "import", str(theirs["swift"]), "ours.yaml") == 0
    printed = capsys.readouterr()
    assert "hf_abc" not in printed.out + printed.err + Path("ours.yaml").read_text()


def test_strict_writes_nothing_and_names_the_lines(theirs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("recipes", "import", str(theirs["axolotl"]), "ours.yaml", "--strict") == 2
    error = capsys.readouterr().err
    assert "- a.yaml:11: datasets.type: alpaca" in error
    assert "- a.yaml:34: neftune_noise_alpha: 5" in error
    assert not Path("ours.yaml").exists()


def test_strict_passes_where_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(
        "base_model: own/b\nsequence_len: 64\nmicro_batch_size: 1\nlearning_rate: 1e-5\nsaves_per_epoch: 1\n"
        "datasets: [{path: r.jsonl, type: chat_template}]\n"
    )
    assert call("recipes", "import", "a.yaml", "--strict") == 0
    assert load_recipe("a-streamtune.yaml").recipe.max_length == 64


def test_json(theirs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("recipes", "import", str(theirs["trl"]), "ours.yaml", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["from"], document["objective"], document["path"]) == ("trl", "grpo", "ours.yaml")
    assert document["changes_training"] == 1
    (noise,) = document["lost"]
    note = "noise on embeddings"
    assert noise == {"theirs": "neftune_noise_alpha: 5", "where": "t.yaml:18", "note": note, "changes_training": True}
    assert {"theirs": "fp16: true", "where": "t.yaml:17", "ours": "fp16: true"} in document["mapped"]
    assert {"theirs": "scale_rewards: false", "where": "t.yaml:13", "ours": "scale_rewards: none"} in document["mapped"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "base_model: a\nsequence_len: 64\ndatasets: [{path: r.jsonl}]\nadapter: lora\nfp16: true\nbf16: auto\n",
            ("fp16: true", "dtype: float16"),
        ),
        ("model_name_or_path: a\nstage: sft\ndataset: d\nfp16: true\n", ("fp16: true", "dtype: float16")),
        ("model: a\ntrain_type: full\ndataset: r.jsonl\ntorch_dtype: float16\n", ("fp16: true", "dtype: auto")),
    ],
    ids=["axolotl", "llamafactory", "swift"],
)
def test_float16_is_computed_with_a_scaled_loss(tmp_path: Path, text: str, keys: tuple[str, ...]) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    lines = [line.partition("  #")[0] for line in import_recipe(tmp_path / "theirs.yaml").text.splitlines()]
    assert {*keys} <= {*lines}
    assert not any(line.startswith("bf16: true") for line in lines)


def test_a_project_is_no_line_of_the_recipe(tmp_path: Path) -> None:
    text = 'base_model: a\nsequence_len: 64\ndatasets: [{path: r.jsonl}]\nwandb_project: "mine\\noutput_dir: other"\n'
    imported = convert(tmp_path, text)
    assert "# wandb_project; set WANDB_PROJECT=mine output_dir: other\n" in imported.text
    (tmp_path / "ours.yaml").write_text(imported.text)
    assert load_recipe(tmp_path / "ours.yaml").recipe.output_dir != "other"


def test_to_stdout(theirs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe alone, so that it can be piped; the account, with the tracker's project, goes to stderr."""
    assert call("recipes", "import", str(theirs["axolotl"]), "-") == 0
    printed = capsys.readouterr()
    assert not Path("-").exists()
    (tmp_path / "piped.yaml").write_text(printed.out)
    assert load_recipe(tmp_path / "piped.yaml").recipe.max_length == 4096
    assert "set WANDB_PROJECT=mine" in printed.err
    assert call("recipes", "import", str(theirs["axolotl"]), "-", "--json") == 2


def test_a_file_is_never_overwritten(theirs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    Path("ours.yaml").write_text("mine")
    assert call("recipes", "import", str(theirs["trl"]), "ours.yaml") == 2
    assert "the file already exists" in capsys.readouterr().err
    assert Path("ours.yaml").read_text() == "mine"


def convert(folder: Path, text: str, name: str = "r.yaml", **more: Any) -> ImportedRecipe:
    path = folder / name
    path.write_text(dedent(text))
    return import_recipe(path, **more)


def test_a_mistake_has_their_file_and_line(tmp_path: Path) -> None:
    """Six completions at once make no whole groups of four: the loader's finding, in their terms."""
    text = TRL.replace("per_device_train_batch_size: 4", "per_device_train_batch_size: 6")
    with pytest.raises(RecipeError, match="must be a multiple of 'num_generations'") as caught:
        convert(tmp_path, text)
    assert caught.value.where == f"{tmp_path / 'r.yaml'}:9"


@pytest.mark.parametrize(
    ("trainer", "text", "what", "line"),
    [
        ("llamafactory", "model_name_or_path: a\nstage: ppo\n", "StreamTune does not support 'stage: ppo'", 2),
        ("axolotl", "base_model: a\nrl: gdpo\n", "StreamTune has no objective for 'rl: gdpo'", 2),
        ("axolotl", "base_model: a\nreward_model: true\n", "trains a reward model", 2),
        ("swift", "model: a\nrlhf_type: ppo\n", "StreamTune has no objective for 'rlhf_type: ppo'", 2),
        ("trl", "model_name_or_path: a\n", "'datasets' is missing", 1),
    ],
)
def test_what_cannot_be_imported(trainer: str, text: str, what: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=what) as caught:
        convert(tmp_path, text, trainer=trainer)
    assert caught.value.where.endswith(f":{line}")


def test_nobody_can_tell_whose_it_is(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="the trainer of this recipe cannot be recognised"):
        convert(tmp_path, "learning_rate: 1e-5\nseed: 3\n")
    with pytest.raises(ArgumentError, match="already a StreamTune recipe"):
        convert(tmp_path, "model_name_or_path: a\ndatasets: [{path: b}]\n")
    with pytest.raises(ArgumentError, match="unknown trainer 'nemo'"):
        convert(tmp_path, "seed: 3\n", trainer="nemo")


@pytest.mark.parametrize(
    ("rl", "loss"), [("dpo", "sigmoid"), ("ipo", "ipo"), ("orpo", "orpo"), ("simpo", "simpo"), ("kto", "kto")]
)
def test_preferences_of_axolotl(rl: str, loss: str, tmp_path: Path) -> None:
    kind = "chat_template.default" if rl != "kto" else "llama3.ultra"
    text = f"base_model: a\nrl: {rl}\nsequence_len: 64\ndatasets: [{{path: b, type: {kind}}}]\nsample_packing: true\n"
    imported = convert(tmp_path, text)
    assert (imported.objective, f"loss_type: {loss}  # rl" in imported.text) == ("dpo", True)
    assert any(found.theirs == "sample_packing: true" for found in imported.findings_of_kind("not_needed"))


@pytest.mark.parametrize(
    ("fields", "ours", "starred"),
    [
        ("beta: 0.2", {"loss_type": "sigmoid"}, set()),
        ("loss_type: ipo", {"loss_type": "ipo"}, set()),
        ("loss_type: orpo", {"loss_type": "orpo"}, {"loss_type"}),
        ("desirable_weight: 1.5", {"loss_type": "kto", "desirable_weight": 1.5}, set()),
        ("cpo_alpha: 0.0", {"loss_type": "cpo", "cpo_alpha": 0.0}, set()),
        ("loss_type: nca_pair", {"loss_type": "sigmoid"}, {"loss_type"}),
        ("loss_type: [sigmoid, sft]", {"loss_type": "sigmoid"}, {"loss_type"}),
        ("cpo_alpha: 0.5", {"loss_type": "cpo", "cpo_alpha": 0.5}, {"loss_type"}),
        ("cpo_alpha: 0.5\nloss_type: sigmoid", {"loss_type": "cpo"}, {"loss_type"}),
        ("cpo_alpha: 0.0\nloss_type: simpo", {"loss_type": "simpo"}, set()),
        ("simpo_gamma: 0.4\nloss_type: simpo", {"loss_type": "simpo", "rpo_alpha": 1.0}, {"rpo_alpha"}),
        ("cpo_alpha: 0.5\nloss_type: hinge", {"loss_type": "cpo"}, {"loss_type"}),
    ],
)
def test_losses_of_preferences_of_trl(fields: str, ours: dict[str, Any], starred: set[str], tmp_path: Path) -> None:
    """By the fields of a configuration alone, which does not name its trainer."""
    imported = convert(tmp_path, f"model_name_or_path: a\ndataset_name: own/a\n{fields}\n", trainer="trl")
    assert imported.objective == "dpo"
    (tmp_path / "ours.yaml").write_text(imported.text)
    found = load_recipe(tmp_path / "ours.yaml").recipe
    assert {key: getattr(found, key) for key in ours} == ours
    assert lost(imported) == starred


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ("beta: 0.1", True),
        ("beta: 0.1\nuse_bias_correction_kl: true", True),
        ("beta: 0.1\nuse_bias_correction_kl: false", False),
        ("beta: 0.0\nuse_bias_correction_kl: true", False),
        ("num_generations: 4", False),
    ],
)
def test_the_kl_of_grpo(fields: str, on: bool, tmp_path: Path) -> None:
    """TRL 1.16 multiplies it by the ratio by default."""
    head = "model_name_or_path: a\ndataset_name: own/a\nreward_funcs: accuracy_reward\n"
    imported = convert(tmp_path, f"{head}{fields}\n", trainer="trl")
    assert ("use_bias_correction_kl: true" in imported.text) is on
    assert not lost(imported) & {"use_bias_correction_kl"}


def test_packing_without_a_length_is_what_trl_refuses(tmp_path: Path) -> None:
    text = "model_name_or_path: a\ndataset_name: own/a\nmax_length: null\npacking: true\npacking_strategy: wrapped\n"
    imported = convert(tmp_path, text, trainer="trl")
    assert "overlength: split" in imported.text
    assert "overlength: error" not in imported.text
    assert kinds(imported, "max_length") == ["lost"]


@pytest.mark.parametrize(("beta", "on"), [(0.1, True), (0.0, False)])
def test_the_kl_of_axolotl(beta: float, on: bool, tmp_path: Path) -> None:
    text = f"""base_model: a
rl: grpo
micro_batch_size: 4
datasets: [{{path: own/a}}]
trl: {{beta: {beta}, num_generations: 4, use_bias_correction_kl: true, reward_funcs: [rewards.f]}}
"""
    imported = convert(tmp_path, text, trainer="axolotl")
    assert ("use_bias_correction_kl: true" in imported.text) is on
    assert not lost(imported) & {"trl.use_bias_correction_kl"}


def test_yaml_json_and_command_of_swift_are_the_same(tmp_path: Path) -> None:
    values = {"model": "own/m", "train_type": "full", "dataset": ["r.jsonl"], "max_length": 64, "learning_rate": 1e-5}
    command = "swift sft " + " ".join(
        f"--{key} {value[0] if isinstance(value, list) else value}" for key, value in values.items()
    )
    texts = {"r.json": json.dumps(values, indent="\t"), "r.sh": command, "commands.txt": command}
    recipes = [convert(tmp_path, text, name).text.split("\n", 1)[1] for name, text in texts.items()]
    assert recipes[0] == recipes[1] == recipes[2]


def test_separators_within_a_word_of_a_command_stay(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"query": "a", "response": "b"}\n')
    command = f"swift sft --model a --max_length 64 --dataset {tmp_path / 'r.jsonl'} --system 'One.\u2028Two.'\n"
    path = tmp_path / "r.sh"
    path.write_text(command, encoding="utf-8")
    out = tmp_path / "ours.yaml"
    out.write_text(import_recipe(path).text, encoding="utf-8")
    assert load_recipe(out).recipe.default_system == "One.\u2028Two."


@pytest.mark.parametrize(
    "end",
    ["2>&1 | tee log.txt", "> log.txt", "2>>log.txt 1>&2 &", "&& echo done", "; echo done", "&>log.txt", "|| exit 1"],
)
def test_what_a_shell_does_with_a_command_is_no_argument(end: str, tmp_path: Path) -> None:
    command = "swift sft --model a --max_length 64 --dataset b 'c > d;' --lora_rank 4 --target_modules q_proj v_proj"
    for given in (f"{command} {end}\n", f"cd x && nohup {command} \\\n  {end}\n"):
        imported = convert(tmp_path, given, "r.sh")
        recipe = yaml.safe_load(imported.text)
        assert (recipe["lora_r"], recipe["lora_target"]) == (4, ["q_proj", "v_proj"])
        assert [each["path"] for each in recipe["datasets"]] == ["b", "c > d;"]


def test_a_variable_has_its_default_and_what_a_shell_computes_is_noted(tmp_path: Path) -> None:
    command = "MODEL=${1:-own/m}\nswift sft --model $MODEL --max_length 64 --dataset b --learning_rate ${LR:-3e-5}"
    imported = convert(tmp_path, f"{command} --output_dir runs/$(date +%F)\n", "r.sh")
    assert "model_name_or_path: own/m" in imported.text
    assert "learning_rate: 3.0e-05" in imported.text
    assert imported.notes == (f"{tmp_path / 'r.sh'}:2: the shell computes 'runs/$(date': write its value",)


@pytest.mark.parametrize(
    ("trainer", "lines", "key", "kept", "starred"),
    [
        ("trl", "use_peft: true\nuse_rslora: true\nuse_dora: true\n", "adapter_type", "rslora", {"use_dora"}),
        ("llamafactory", "use_rslora: true\npissa_init: true\n", "adapter_type", "rslora", {"pissa_init"}),
        ("axolotl", "rl: orpo\norpo_alpha: 0.3\nrl_beta: 0.2\n", "beta", 0.2, {"loss_type"}),
        ("axolotl", "rl: dpo\ndpo_loss_type: [ipo]\n", "loss_type", "ipo", set()),
        ("axolotl", "rl: simpo\n", "rpo_alpha", 1.0, {"rpo_alpha"}),
        ("axolotl", "rl: simpo\ncpo_alpha: 0.0\n", "rpo_alpha", None, set()),
        ("swift", "rlhf_type: simpo\ncpo_alpha: 0.5\n", "rpo_alpha", 0.5, {"dataset", "rpo_alpha"}),
        ("swift", "loss_type: focal\nenable_dft_loss: true\n", "loss_type", "focal", {"enable_dft_loss"}),
        ("swift", "loss_type: focal\nenable_dft_loss: false\n", "loss_type", "focal", set()),
        ("llamafactory", "stage: kto\npref_loss: sigmoid\n", "loss_type", "kto", set()),
        ("llamafactory", "stage: dpo\nuse_dft_loss: false\n", "loss_type", None, set()),
        ("trl", "max_length: 64\nmax_seq_length: 32\n", "max_length", 64, {"max_seq_length"}),
        ("trl", "packing: true\npacking_strategy: wrapped\ntruncation_mode: keep_end\n", "overlength", "split", set()),
    ],
)
def test_two_fields_of_one_key_are_not_both_mapped(
    trainer: str, lines: str, key: str, kept: Any, starred: set[str], tmp_path: Path
) -> None:
    base = {
        "trl": "model_name_or_path: a\ndataset_name: b\ncompletion_only_loss: false\nlora_target_modules: [q_proj]\n",
        "llamafactory": "model_name_or_path: a\ndataset: b\ndataset_dir: ONLINE\ncutoff_len: 64\n",
        "axolotl": "base_model: a\nsequence_len: 64\ndatasets: [{path: b}]\n",
        "swift": "model: a\nmax_length: 64\ndataset: [b]\n",
    }
    imported = convert(tmp_path, base[trainer] + lines, trainer=trainer)
    assert yaml.safe_load(imported.text).get(key) == kept
    assert lost(imported) == starred


def test_commands_of_trl_and_llamafactory(tmp_path: Path) -> None:
    imported = convert(tmp_path, "trl dpo --model_name_or_path a --dataset_name b --beta=0.3 --bf16\n", "r.sh")
    assert (imported.trainer.name, imported.objective) == ("trl", "dpo")
    assert "bf16: true" in imported.text
    with pytest.raises(RecipeError, match=r"reads its arguments from 'x\.yaml'"):
        convert(tmp_path, "llamafactory-cli train x.yaml\n", "r.sh")
    with pytest.raises(RecipeError, match="no training command"):
        convert(tmp_path, "echo hello\n", "r.sh")


def test_a_field_of_another_stage_is_not_lost(tmp_path: Path) -> None:
    imported = convert(tmp_path, "base_model: a\nsequence_len: 64\nrl_beta: 0.1\ndatasets: [{path: r.jsonl}]\n")
    assert [(found.theirs, found.note) for found in imported.findings_of_kind("not_needed")] == [
        ("rl_beta: 0.1", "read by dpo and grpo only")
    ]


def test_rows_of_a_step_of_axolotl(tmp_path: Path) -> None:
    text = "base_model: a\nsequence_len: 64\nmicro_batch_size: 2\nbatch_size: 16\ndatasets: [{path: r.jsonl}]\n"
    assert "train_batch_size: 16" in convert(tmp_path, text).text
    imported = convert(tmp_path, text + "gradient_accumulation_steps: 8\n")
    assert "train_batch_size: 16" not in imported.text


@pytest.mark.parametrize(
    ("trainer", "lines", "sizes"),
    [
        ("swift", "", (None, 16)),
        ("swift", "per_device_train_batch_size: 32\n", (32, 32)),
        ("swift", "per_device_train_batch_size: 6\n", (6, 18)),
        ("swift", "gradient_accumulation_steps: 2\n", (None, None)),
        ("swift", "rlhf_type: grpo\nreward_funcs: [accuracy]\n", (1, 16)),
        ("swift", "rlhf_type: grpo\nreward_funcs: [accuracy]\nper_device_train_batch_size: 4\n", (4, 16)),
        ("axolotl", "rl: grpo\ngradient_accumulation_steps: 8\ntrl: {reward_funcs: [r.f]}\n", (1, None)),
    ],
)
def test_rows_of_a_step_that_a_trainer_chooses(
    trainer: str, lines: str, sizes: tuple[int | None, int | None], tmp_path: Path
) -> None:
    base = {"swift": "model: a\ndataset: [b]\n", "axolotl": "base_model: a\ndatasets: [{path: b}]\n"}
    recipe = yaml.safe_load(convert(tmp_path, base[trainer] + lines, trainer=trainer).text)
    assert (recipe.get("per_device_train_batch_size"), recipe.get("train_batch_size")) == sizes


def test_a_switch_that_a_command_turns_off(tmp_path: Path) -> None:
    imported = convert(
        tmp_path,
        "trl sft --model_name_or_path a --dataset_name b --no_bf16 --no_use_cache --completion_only_loss true\n",
        "r.sh",
    )
    assert "bf16: false  # no_bf16" in imported.text
    assert imported.changes_training == []


def test_a_file_of_dataset_info_that_is_missing(tmp_path: Path) -> None:
    imported = convert(tmp_path, "model_name_or_path: a\nstage: sft\ntemplate: qwen\ndataset: mine\ncutoff_len: 64\n")
    assert lost(imported) == {"dataset"}
    assert "- path: mine" in imported.text


@pytest.mark.parametrize(("theirs", "ours"), [
        ("adamw_bnb_8bit", "adamw_8bit"), ("adafactor", None), ("sgd", "sgd"), ("paged_adamw_32bit", "adamw"),
        ("adamw_torch_xla", "adamw"), ("adamw_torch_npu_fused", "adamw"), ("paged_adamw_8bit", "paged_adamw_8bit"),
        ("ao_adamw_fp8", "adamw_torch_fp8"), ("ao_adamw_8bit", "adamw_torch_8bit"), ("lion_8bit", "lion_8bit"),
        ("paged_lion_32bit", "lion"), ("galore_adamw", None), ("schedule_free_adamw", None),
    ])  # fmt: skip
def test_an_optimizer_with_our_name_and_other_steps_is_lost(theirs: str, ours: str | None, tmp_path: Path) -> None:
    text = f"base_model: a\nsequence_len: 64\noptimizer: {theirs}\ndatasets: [{{path: r.jsonl}}]\n"
    imported = convert(tmp_path, text)
    lost = [found.theirs for found in imported.findings_of_kind("lost")]
    assert lost == ([] if ours else [f"optimizer: {theirs}"])
    assert (f"optim: {ours}" in imported.text) is (ours is not None)


def test_arguments_of_an_optimizer_that_are_others_there(tmp_path: Path) -> None:
    more = "optim: paged_lion_8bit\nadam_beta2: 0.95\n"
    for text, ours in ((more, {"betas": [0.9, 0.95]}), ("optim: sgd\n", {"momentum": 0.0})):
        imported = convert(tmp_path, f"model_name_or_path: a\ndataset_name: own/a\n{text}", trainer="trl")
        (tmp_path / "ours.yaml").write_text(imported.text)
        assert load_recipe(tmp_path / "ours.yaml").recipe.optim_args == ours
        assert not lost(imported) & {"optim", "adam_beta2"}


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  gradient_accumulation_steps: 4
  zero3_init_flag: true
mixed_precision: bf16
num_processes: 8
num_machines: 1
"""


def launched(folder: Path, options: str) -> ImportedRecipe:
    (folder / "acc.yaml").write_text(ACCELERATE)
    command = (
        f"accelerate launch {options} trl/scripts/sft.py --model_name_or_path a --dataset_name b --max_length 64\n"
    )
    return convert(folder, command, "r.sh")


def test_every_option_of_a_launcher_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--num_processes 4 --mixed_precision bf16 --use_deepspeed --zero_stage=2 --dynamo_backend no"
    imported = launched(tmp_path, options)
    found = {each.theirs: (each.kind, each.ours or each.note) for each in imported.findings}
    assert found["num_processes: 4"] == ("not_needed", "use `--nproc 4`")
    assert found["mixed_precision: bf16"] == ("mapped", "bf16: true")
    assert found["zero_stage: 2"] == ("mapped", "deepspeed: zero2")
    assert any(name.startswith("dynamo_backend") for name in found)
    assert {"bf16: true  # mixed_precision", "deepspeed: zero2  # zero_stage"} <= set(imported.text.splitlines())


def test_the_configuration_of_a_launcher_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    imported = launched(tmp_path, "--config_file acc.yaml")
    found = {each.theirs: (each.kind, each.ours, each.where.rpartition("/")[2]) for each in imported.findings}
    assert found["deepspeed_config.zero_stage: 3"] == ("mapped", "deepspeed: zero3_offload", "acc.yaml:5")
    assert found["deepspeed_config.gradient_accumulation_steps: 4"] == (
        "mapped", "gradient_accumulation_steps: 4", "acc.yaml:7"
    )  # fmt: skip
    assert found["mixed_precision: bf16"][:2] == ("mapped", "bf16: true")
    keys = {each.theirs.partition(":")[0].rpartition(".")[2] for each in imported.findings}
    assert {line.strip().partition(":")[0] for line in ACCELERATE.split("\n") if line} - keys == {"deepspeed_config"}


def test_what_a_launcher_changes_and_is_not_here_is_starred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "fp16: true  # mixed_precision" in launched(tmp_path, "--mixed_precision fp16").text
    assert "mixed_precision" in lost(launched(tmp_path, "--mixed_precision fp8"))
    assert "config_file" in lost(launched(tmp_path, "--config_file gone.yaml"))
    with pytest.raises(ArgumentError, match="configuration of accelerate"):
        convert(tmp_path, ACCELERATE)


@pytest.mark.parametrize(
    "command",
    ["axolotl train x.yaml", "accelerate launch -m axolotl.cli.train x.yaml", "trl sft --config x.yaml --seed 3"],
)
def test_a_command_that_reads_a_file_names_it(command: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"reads its arguments from 'x\.yaml'"):
        convert(tmp_path, f"{command}\n", "r.sh")


def test_a_command_of_preferences_names_its_loss(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        convert(tmp_path, "trl orpo --config x.yaml\n", "r.sh")
    assert "loss_type: orpo" in caught.value.fix


# --- what was mistaken ------------------------------------------------------------------------------------------------


def kinds(imported: ImportedRecipe, name: str) -> list[str]:
    """The classes of the answers to a field."""
    return [each.kind for each in imported.findings if each.theirs.partition(":")[0] == name]


def axolotl(folder: Path, lines: str) -> ImportedRecipe:
    base = "base_model: a\nsequence_len: 64\nlearning_rate: 1e-5\nadapter: lora\nlora_target_linear: true\n"
    sets = "" if "datasets: [" in lines else "datasets: [{path: r.jsonl}]\n"
    return convert(folder, base + sets + dedent(lines), trainer="axolotl")


def llamafactory(folder: Path, lines: str, **columns: Any) -> ImportedRecipe:
    info = {"mine": {"file_name": "r.jsonl", **columns}}
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    return convert(folder, f"model_name_or_path: a\ndataset: mine\ncutoff_len: 64\n{lines}", trainer="llamafactory")


def test_the_least_rate_of_a_cosine(tmp_path: Path) -> None:
    imported = axolotl(tmp_path, "lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n")
    assert "lr_scheduler_type: cosine_with_min_lr  # lr_scheduler" in imported.text
    assert "min_lr_rate: 0.1" in imported.text
    assert imported.changes_training == []
    imported = axolotl(tmp_path, "lr_scheduler: linear\ncosine_min_lr_ratio: 0.1\n")
    assert kinds(imported, "cosine_min_lr_ratio") == ["not_needed"]


def test_vllm_of_axolotl(tmp_path: Path) -> None:
    imported = axolotl(
        tmp_path,
        "rl: grpo\nmicro_batch_size: 8\nmax_prompt_len: 32\nvllm: {gpu_memory_utilization: 0.85, host: h}\n"
        "trl: {reward_funcs: [m.f], use_vllm: true, vllm_server_host: h, max_completion_length: 32}\n",
    )
    assert "vllm_gpu_memory_utilization: 0.85" in imported.text
    assert kinds(imported, "trl.vllm_server_host") == kinds(imported, "vllm.host") == ["lost"]


def test_early_stopping_is_kept_or_said(tmp_path: Path) -> None:
    imported = axolotl(tmp_path, "early_stopping_patience: 3\nval_set_size: 0.1\neval_steps: 10\n")
    assert "metric_for_best_model: eval_loss" in imported.text
    assert "early_stopping_patience: 3" in imported.text
    imported = axolotl(tmp_path, "early_stopping_patience: 3\nval_set_size: 0.1\nevals_per_epoch: 4\n")
    assert "early_stopping_patience" in lost(imported)
    assert "\nearly_stopping_patience" not in imported.text


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: a\nreward_funcs: [m.f]\nreward_weights: [1.0, 2.0]\nnum_generations: 7\n"
        "epsilon: 0.2\ndelta: 1.0\ndataset_name: b\n"
    )
    with pytest.raises(RecipeError) as caught:
        convert(tmp_path, text, trainer="trl")
    assert "3 mistakes" in caught.value.what
    for line in (3, 4, 6):
        assert f"- line {line}: " in caught.value.what


FROZEN_MODEL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 12,
                "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}  # fmt: skip


def trained_names(imported: ImportedRecipe) -> set[str]:
    """Return the names of the parameters that an imported recipe trains, of a model of 12 layers."""
    read = yaml.safe_load(imported.text)
    parts = TrainedParts(read.get("trainable_layers"), tuple(read.get("freeze", ())), tuple(read.get("train", ())))
    model = build_meta_model(FROZEN_MODEL, ModelOptions(trained=parts))
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_freeze_of_llamafactory_trains_the_same_parameters(tmp_path: Path) -> None:
    """As ``_setup_freeze_tuning`` of 0.9.5: names that contain ``.LAYER.MODULE``, or an extra module."""
    all_names = [name for name, _ in build_meta_model(FROZEN_MODEL).named_parameters()]
    for fields, layers, modules, extra in (
        ("", range(10, 12), [""], []),
        ("freeze_trainable_layers: 1", range(11, 12), [""], []),
        ("freeze_trainable_layers: -2\nfreeze_trainable_modules: mlp,self_attn", range(2), ["mlp", "self_attn"], []),
        ("freeze_extra_modules: embed_tokens,norm", range(10, 12), [""], ["embed_tokens", "norm"]),
        ("freeze_trainable_layers: 0\nfreeze_extra_modules: lm_head", range(0), [""], ["lm_head"]),
    ):
        imported = llamafactory(tmp_path, f"finetuning_type: freeze\nlora_rank: 8\n{fields}\n")
        assert lost(imported) == set()
        assert "finetuning_type: full" in imported.text
        assert "lora_r:" not in imported.text
        parts = [*(f".{layer}.{module}" for layer in layers for module in modules), *extra]
        assert trained_names(imported) == {name for name in all_names if any(part in name for part in parts)}
    mixed = llamafactory(tmp_path, "finetuning_type: freeze\nbf16: true\n")
    assert "dtype: mixed" in mixed.text  # trained weights in fp32, the others in the compute dtype


def test_unfrozen_parameters_of_axolotl_train_the_same_parameters(tmp_path: Path) -> None:
    """As ``freeze_layers_except`` of 0.19.0: ``re.match``, and a ``.`` is a point unless a ``+`` follows."""
    all_names = [name for name, _ in build_meta_model(FROZEN_MODEL).named_parameters()]
    patterns = ["^lm_head.weight$", "model.layers.1.", "model.layers.[5-7].mlp", "model.+norm"]
    expressions = [re.sub(r"\.(?!\+)", "\\.", pattern) for pattern in patterns]
    text = f"base_model: a\ndatasets: [{{path: b, type: alpaca}}]\nunfrozen_parameters: {json.dumps(patterns)}\n"
    imported = convert(tmp_path, text, trainer="axolotl")
    assert "unfrozen_parameters" not in lost(imported)
    assert trained_names(imported) == {name for name in all_names if any(re.match(e, name) for e in expressions)}
    ranged = convert(tmp_path, text.replace("weight$", "weight$[:100]"), trainer="axolotl")
    assert "unfrozen_parameters" in lost(ranged)
    adapters = convert(tmp_path, text + "adapter: lora\n", trainer="axolotl")
    assert "unfrozen_parameters" in lost(adapters)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "trained", "missing"),
    [
        ("--freeze_parameters model.embed_tokens model.layers.1", r"(?!model\.(embed_tokens|layers\.1))", set()),
        ("--freeze_parameters model --trainable_parameters model.layers.11", r"(lm_head|model\.layers\.11)", set()),
        ("--freeze_parameters_ratio 1 --trainable_parameters lm_head", "lm_head", set()),
        ("--freeze_parameters model --trainable_parameters_regex layers.1..mlp", r"lm_head|model\.layers\.1\d\.mlp",
         set()),
        ("--freeze_parameters_regex mlp", r"(?!.*mlp)", set()),
        ("--trainable_parameters lm_head", "", set()),  # nothing was frozen
        ("--freeze_parameters_ratio 0.5", "", {"freeze_parameters_ratio"}),
    ],
)  # fmt: skip
def test_frozen_parameters_of_swift_train_the_same_parameters(
    tmp_path: Path, options: str, trained: str, missing: set[str]
) -> None:
    """As ``freeze_parameters`` and ``activate_parameters`` of 4.6.0: prefixes, or a pattern found anywhere."""
    names = [name for name, _ in build_meta_model(FROZEN_MODEL).named_parameters()]
    text = f"swift sft --model a --dataset b.jsonl --max_length 512 --tuner_type full {options}"
    imported = convert(tmp_path, text, "run.sh")
    assert lost(imported) & {*options.replace("--", "").split()} == missing
    assert trained_names(imported) == {name for name in names if re.match(trained, name)}


def test_oft_is_a_kind_of_adapters(tmp_path: Path) -> None:
    imported = llamafactory(tmp_path, "finetuning_type: oft\noft_block_size: 16\noft_target: all\n")
    assert lost(imported) == set()
    for line in ("finetuning_type: lora", "adapter_type: oft", "oft_block_size: 16", "lora_target: all-linear"):
        assert line in imported.text


@pytest.mark.parametrize("value", ["true", "false"])
@pytest.mark.parametrize("trainer", ["llamafactory", "swift"])
def test_thinking_is_handed_to_the_chat_template(trainer: str, value: str, tmp_path: Path) -> None:
    line = f"enable_thinking: {value}\n"
    swift = f"model: a\nmax_length: 64\ndataset: r.jsonl\n{line}"
    imported = llamafactory(tmp_path, line) if trainer == "llamafactory" else convert(tmp_path, swift, trainer="swift")
    if trainer == "swift":  # which reads it when it generates
        assert kinds(imported, "enable_thinking") == ["not_needed"]
        more = "rlhf_type: grpo\nreward_funcs: accuracy\nper_device_train_batch_size: 8\n"
        grpo = convert(tmp_path, swift + more, trainer="swift")
        assert f"\n  enable_thinking: {value}\n" in grpo.text
        return
    assert f"\n  enable_thinking: {value}\n" in imported.text
    assert kinds(imported, "enable_thinking") == ["mapped"]
    named = llamafactory(tmp_path, f"template: llama3\n{line}")
    assert kinds(named, "enable_thinking") == ["not_needed"]


def test_images_are_read_and_videos_have_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"prompt": "q", "response": "a", "images": "pictures"}
    said = llamafactory(tmp_path, "", columns=columns)
    assert not [each.note for each in said.changes_training if each.theirs == "dataset: mine"]
    written = {line.strip().partition(" #")[0].rstrip() for line in said.text.splitlines()}
    assert {"images: pictures", "max_pixels: 589824", "min_pixels: 1024"} <= written
    given = "image_max_pixels: 9000\nfinetuning_type: full\nfreeze_multi_modal_projector: false\n"
    said = llamafactory(tmp_path, given, columns=columns)
    written = {line.strip().partition(" #")[0].rstrip() for line in said.text.splitlines()}
    assert {"max_pixels: 9000", "min_pixels: 1024", "freeze_projector: false"} <= written
    said = llamafactory(tmp_path, "freeze_vision_tower: false\n", columns=columns)
    assert yaml.safe_load(said.text)["lora_target"] == ["all-linear", "vision-tower"]
    assert not any("tower" in each.theirs for each in said.changes_training)
    said = llamafactory(tmp_path, "freeze_vision_tower: false\nlora_target: q_proj\n", columns=columns)
    assert any("add vision-tower to lora_target" in each.note for each in said.changes_training)
    script = "IMAGE_MAX_TOKEN_NUM=1024 VIDEO_MAX_TOKEN_NUM=128 FPS_MAX_FRAMES=16 swift sft "
    for model, pixels in (("Qwen/Qwen3-VL-4B", 1024 * 32 * 32), ("Qwen/Qwen2.5-VL-3B", 1024 * 28 * 28), ("a/b", None)):
        Path("run.sh").write_text(f"{script} --model {model} --dataset r.jsonl --max_length 64\n")
        said = import_recipe(Path("run.sh"), "swift", "sft")
        assert yaml.safe_load(said.text).get("max_pixels") == pixels
        assert any(each.theirs.startswith("IMAGE_MAX_TOKEN_NUM") for each in said.changes_training)
        assert not any(each.theirs.startswith(("VIDEO", "FPS")) for each in said.changes_training)
    for lines, pixels in (  # exported before the command; the number of tokens wins
        ("export IMAGE_MAX_TOKEN_NUM=64\nexport MAX_PIXELS=602112\n", 64 * 32 * 32),
        ("export MAX_PIXELS=602112\n", 602112),
    ):
        Path("run.sh").write_text(f"{lines}swift sft --model Qwen/Qwen3-VL-4B --dataset r.jsonl --max_length 64\n")
        assert yaml.safe_load(import_recipe(Path("run.sh"), "swift", "sft").text).get("max_pixels") == pixels
    given = "model: a\nmax_length: 64\ndataset: r.jsonl\nfreeze_vit: false\nlearning_rate: 1e-4\nvit_lr: 1e-5\n"
    assert any(each.theirs.startswith("vit_lr") for each in convert(tmp_path, given, trainer="swift").changes_training)
    given = "model_name_or_path: org/Qwen3-VL-4B\ndataset: mine\ncutoff_len: 64\nfreeze_vision_tower: false\n"
    said = convert(tmp_path, given, trainer="llamafactory")
    assert any("mergers" in each.theirs for each in said.changes_training)
    given = "model: a\nmax_length: 64\ndataset: r.jsonl\ntarget_modules: all-linear\n"
    said = convert(tmp_path, given + "freeze_vit: false\nfreeze_aligner: false\n", trainer="swift")
    assert yaml.safe_load(said.text)["lora_target"] == ["all-linear", "vision-tower", "vision-projector"]
    said = llamafactory(tmp_path, "", columns={"prompt": "q", "response": "a", "videos": "films"})
    assert [each.note for each in said.changes_training if each.theirs == "dataset: mine"] == [
        "'mine' in dataset_info.json: StreamTune does not train on the column 'films'"
    ]
    for column, starred in (("images", False), ("videos", True)):
        Path("r.jsonl").write_text(json.dumps({"messages": [], column: ["a"]}) + "\n")
        for imported in (
            axolotl(tmp_path, "datasets: [{path: r.jsonl, type: chat_template}]\n"),
            convert(tmp_path, "model: a\nmax_length: 64\ndataset: r.jsonl\nfreeze_vit: true\n", trainer="swift"),
            convert(tmp_path, "model_name_or_path: a\ndataset_name: r.jsonl\n", trainer="trl"),
        ):
            found = any(f"'{column}'" in each.note for each in imported.changes_training)
            assert found == starred, imported.trainer.name


@pytest.mark.parametrize(("engine", "kept"), [("deepspeed: zero2.json\n", False), ("", True)])
def test_eight_bits_are_not_for_deepspeed(tmp_path: Path, engine: str, kept: bool) -> None:
    (tmp_path / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    said = llamafactory(tmp_path, f"finetuning_type: lora\nquantization_bit: 8\n{engine}")
    assert ("quantization: int8" in said.text) is kept
    assert ("quantization_bit" in lost(said)) is not kept


def test_rows_of_openai_are_messages(tmp_path: Path) -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    imported = llamafactory(tmp_path, "", formatting="openai", columns={"messages": "talk"}, tags=tags)
    assert "type: messages" in imported.text
    assert "messages: talk" in imported.text


def test_no_false_stars(tmp_path: Path) -> None:
    columns = "field_messages: prompt, field_chosen: chosen, field_rejected: rejected"
    entry = f"{{path: r.jsonl, type: chat_template.default, {columns}}}"
    more = "ring_attn_func: varlen_llama3\ncontext_parallel_size: 2\n"
    assert lost(axolotl(tmp_path, f"rl: dpo\ndatasets: [{entry}]\n{more}")) == set()
    own = "{path: r.jsonl, type: {field_prompt: q, field_chosen: good, field_rejected: rejected}}"
    imported = axolotl(tmp_path, f"rl: dpo\ndatasets: [{own}]\n")
    assert lost(imported) == set()
    assert {"prompt: q", "chosen: good"} <= {line.strip() for line in imported.text.splitlines()}


def test_without_a_length_no_row_is_left_out(tmp_path: Path) -> None:
    """A length that is not given, or null, cuts nothing there; a default of ours would cut or drop rows unseen."""
    imported = convert(tmp_path, "model_name_or_path: a\ndataset_name: b\nmax_length: null\n", trainer="trl")
    written = imported.text.partition("# Not converted")[0]
    assert "overlength: error" in written
    assert "max_length:" not in written
    imported = convert(tmp_path, "model: a\ndataset: r.jsonl\ntruncation_strategy: delete\n", trainer="swift")
    assert "overlength" not in imported.text.partition("# Not converted")[0]


def test_strict_refuses_what_is_cut_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = "[{path: a.jsonl, type: completion}, {path: b.jsonl, type: chat_template}]"
    Path("a.yaml").write_text(f"base_model: a\nsequence_len: 64\ndatasets: {sets}\n")
    assert call("recipes", "import", "a.yaml", "--strict") == 2
    assert not Path("a-streamtune.yaml").exists()
    assert "excess_length_strategy" in capsys.readouterr().err


def test_texts_of_swift_pt_have_no_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "swift pt --model a --max_length 64 --dataset r.jsonl --use_hf true\n"
    Path("r.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    assert "datasets[0]" in lost(convert(tmp_path, command, "r.sh"))
    Path("r.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    assert lost(convert(tmp_path, command, "r.sh")) == set()


def test_what_trl_trains_of_rows_that_are_not_here_is_starred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "model_name_or_path: a\ndataset_name: r.jsonl\n"
    assert lost(convert(tmp_path, text, trainer="trl")) == {"completion_only_loss"}
    Path("r.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    imported = convert(tmp_path, text, trainer="trl")
    assert lost(imported) == set()
    assert "train_on: completion" in imported.text


def test_a_shuffle_before_that_of_each_epoch_is_not_an_order(tmp_path: Path) -> None:
    """``shuffle: false`` visits rows in the order of the files, which the Trainer does only where it is told so."""
    imported = axolotl(tmp_path, "shuffle_merged_datasets: false\n")
    assert kinds(imported, "shuffle_merged_datasets") == ["not_needed"]
    assert "shuffle" not in imported.text
    assert "shuffle: false" in axolotl(tmp_path, "curriculum_sampling: true\n").text
    rows = "model_name_or_path: a\ndataset_name: b\nshuffle_dataset: false\n"
    assert "shuffle" not in convert(tmp_path, rows, trainer="trl").text
    grpo = rows + "reward_funcs: [m.f]\n"
    assert "shuffle: false" in convert(tmp_path, grpo, trainer="trl", objective="grpo").text


def test_fsdp_of_axolotl_by_its_configuration_alone(tmp_path: Path) -> None:
    imported = axolotl(tmp_path, "fsdp_version: 2\nfsdp_config: {offload_params: false}\n")
    assert "fsdp: true  # fsdp_config" in imported.text
    assert lost(imported) == set()


def test_thoughts_of_another_column_are_starred(tmp_path: Path) -> None:
    entry = "datasets: [{{path: r.jsonl, type: chat_template, field_thinking: {}}}]\n"
    assert lost(axolotl(tmp_path, entry.format("reasoning_content"))) == set()
    assert lost(axolotl(tmp_path, entry.format("chain"))) == {"datasets.field_thinking"}


def test_rope_scaling_of_a_configuration(tmp_path: Path) -> None:
    imported = axolotl(tmp_path, "overrides_of_model_config: {rope_scaling: {type: yarn, factor: 4}, window: 8}\n")
    assert "rope_type: yarn" in imported.text
    assert lost(imported) == {"overrides_of_model_config.window"}


def test_adapters_that_do_not_combine_are_starred(tmp_path: Path) -> None:
    imported = axolotl(tmp_path, "load_in_4bit: true\npeft_init_lora_weights: pissa\n")
    assert lost(imported) == {"peft_init_lora_weights"}
    assert "adapter_type: pissa" in axolotl(tmp_path, "peft_init_lora_weights: pissa_niter_16\n").text


def dataset_notes(imported: ImportedRecipe) -> str:
    """Return the lines about datasets that change what is trained."""
    return "\n".join(each.note for each in imported.changes_training if each.theirs.startswith("dataset"))


def test_pairs_of_sharegpt_are_read(tmp_path: Path) -> None:
    """dpo_en_demo as LLaMA-Factory ships it: turns with 'from' and 'value'."""
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    imported = llamafactory(tmp_path, "stage: dpo\n", ranking=True, formatting="sharegpt", columns=columns)
    assert dataset_notes(imported) == ""
    assert "prompt: conversations" in imported.text
    row = {
        "conversations": [{"from": "human", "value": "3 + 4?"}],
        **{name: {"from": "gpt", "value": value} for name, value in (("chosen", "7"), ("rejected", "8"))},
    }
    read = normalise_preference(Row("r:1", {**row, "prompt": row["conversations"]}), "preference")
    assert read.prompt == [{"role": "user", "content": "3 + 4?"}]


@pytest.mark.parametrize(
    ("stage", "entry", "row", "said"),
    [
        ("sft", {"formatting": "openai", "columns": {"messages": "m"}}, {}, "detailed thinking off"),
        ("sft", {"columns": {"prompt": "q", "response": "a"}}, {"q": "", "a": "", "input": "x"}, "'input'"),
        ("sft", {}, {"instruction": "", "output": "", "system": "x"}, "'system'"),
        ("sft", {}, {"instruction": "", "output": "", "history": [["a", "b"]]}, "'history'"),
        ("sft", {"formatting": "sharegpt"}, {"conversations": [], "tools": "[{}]"}, "'tools'"),
        ("sft", {"formatting": "sharegpt", "tags": {"role_tag": "who"}}, {}, "'from' and 'value'"),
        ("dpo", {"ranking": True, "columns": {"prompt": "prompt"}}, {"prompt": "a"}, "texts to chat messages"),
        ("dpo", {"ranking": True, "columns": {"prompt": "q", "query": "x"}}, {"q": [], "x": "a"}, "'x'"),
        ("kto", {"columns": {"prompt": "q", "response": "a", "kto_tag": "l"}}, {"q": "a"}, "texts to chat messages"),
        ("kto", {"formatting": "sharegpt", "columns": {"messages": "m", "kto_tag": "l"}}, {}, "last message"),
    ],
)
def test_rows_that_llamafactory_reads_otherwise_are_starred(
    stage: str, entry: dict[str, Any], row: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/r.jsonl").write_text(json.dumps(row) + "\n")
    assert said in dataset_notes(llamafactory(tmp_path, f"stage: {stage}\n", **entry))


def test_a_name_that_swift_puts_into_rows_is_starred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "swift sft --model a --max_length 64 --model_name b --model_author c --dataset {} --use_hf true\n"
    imported = convert(tmp_path, command.format("own/chats 'swift/self-cognition#500'"), "r.sh")
    assert {"dataset", "model_name", "model_author"} <= lost(imported)
    assert "instruction: query" in imported.text
    imported = convert(tmp_path, command.format("own/chats"), "r.sh")
    assert kinds(imported, "model_name") == ["not_needed"]
    assert any(each.kind == "lost" and "the rows cannot be read; ms-swift" in each.note for each in imported.findings)


@pytest.mark.parametrize(
    ("row", "columns", "row_type"),
    [
        ({"query": "a", "response": "b"}, {"instruction": "query", "output": "response"}, "alpaca"),
        ({"query": "a", "response": "b", "history": []}, {"instruction": "query", "output": "response"}, "alpaca"),
        ({"question": "a", "Answer": "b"}, {"instruction": "question", "output": "Answer"}, "alpaca"),
        ({"query": "a", "question": "c", "answer": "b"}, {"instruction": "query", "output": "answer"}, "alpaca"),
        ({"conversation": [{"from": "human", "value": "a"}]}, None, "auto"),
        ({"conversation": [{"role": "user", "content": "a"}]}, {"messages": "conversation"}, "messages"),
        ({"messages": [], "system_prompt": "a"}, {"system": "system_prompt"}, "auto"),
        ({"question": "a", "problem": "c", "answer": "b"}, None, "auto"),
    ],
)
def test_columns_of_swift(
    row: dict[str, Any], columns: dict[str, str] | None, row_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.jsonl").write_text(json.dumps(row) + "\n")
    imported = convert(tmp_path, "swift sft --model a --max_length 64 --dataset r.jsonl --use_hf true\n", "r.sh")
    (tmp_path / "ours.yaml").write_text(imported.text)
    (entry,) = load_recipe(tmp_path / "ours.yaml").recipe.datasets
    assert (entry.columns, entry.type) == (columns, row_type)
    assert bool(dataset_notes(imported)) is ("problem" in row)


@pytest.mark.parametrize(
    ("template", "more", "reasoning", "said"),
    [
        ("qwen3", "", "keep", "adds a think block, maybe empty, to every answer"),
        ("qwen3", "mask_history: true\n", None, "adds a think block, maybe empty, to every answer"),
        ("qwen3", "enable_thinking: false\n", None, "removes reasoning"),
        ("llama3", "", None, "StreamTune's llama3 strips whitespace at the ends of messages; LLaMA-Factory's does not"),
        ("llama2", "", None, "without the tokenizer template's system message or date"),
        ("default", "", None, "StreamTune uses the tokenizer's own template"),
    ],
)
def test_templates_of_llamafactory_are_starred(
    template: str, more: str, reasoning: str | None, said: str, tmp_path: Path
) -> None:
    imported = llamafactory(tmp_path, f"stage: sft\ntemplate: {template}\n{more}")
    assert [each.note for each in imported.changes_training if said in each.note]
    assert ("reasoning: keep" in imported.text) is (reasoning == "keep")


def test_templates_of_llamafactory_that_streamtune_has(tmp_path: Path) -> None:
    imported = llamafactory(tmp_path, "stage: sft\ntemplate: qwen3_nothink\nenable_thinking: false\n")
    assert lost(imported) == set()
    assert "chat_template: qwen3_nothink" in imported.text
    assert kinds(imported, "enable_thinking") == ["not_needed"]
    assert "You are Qwen" in llamafactory(tmp_path, "stage: sft\ntemplate: qwen\n").text
    tools = {"messages": "conversations", "tools": "tools"}
    imported = llamafactory(tmp_path, "stage: sft\ntemplate: qwen\n", formatting="sharegpt", columns=tools)
    assert "renders tools differently" in dataset_notes(imported)
    texts = llamafactory(tmp_path, "stage: pt\ntemplate: qwen3\n", columns={"prompt": "text"})
    assert kinds(texts, "template") == ["not_needed"]


THINKER = "{{ '<think>' }}"


@pytest.mark.parametrize(
    ("name", "config", "thinks"),
    [
        ("Qwen/Qwen3-8B", None, True),
        ("Qwen/Qwen3-4B-Instruct-2507", None, False),
        ("meta-llama/Llama-3.1-8B", None, False),
        ("Qwen3-8B", "{{ messages }}", False),
        ("mine", THINKER, True),
        ("mine", [{"name": "default", "template": THINKER}], True),
    ],
)
def test_templates_with_think_blocks_are_starred(
    name: str, config: Any, thinks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name of a template: by the model's own template where its folder is here, else by its name."""
    monkeypatch.chdir(tmp_path)
    if config is not None:
        Path(name).mkdir()
        Path(name, "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    swift = convert(tmp_path, f"swift sft --model {name} --max_length 64 --dataset own/a --use_hf true\n", "r.sh")
    trl = f"model_name_or_path: {name}\ndataset_name: own/a\nassistant_only_loss: true\n"
    own = f"base_model: {name}\nsequence_len: 64\nlearning_rate: 1e-5\ndatasets: [{{path: a, type: chat_template}}]\n"
    wanted = {
        "template": swift,
        "assistant_only_loss": convert(tmp_path, trl, trainer="trl"),
        "datasets.type": convert(tmp_path, own, trainer="axolotl"),
    }
    for theirs, imported in wanted.items():
        assert lost(imported) == ({theirs} if thinks else set())
        assert ("reasoning: keep" in imported.text) is (thinks and theirs != "datasets.type")


def test_a_template_of_swift_is_starred(tmp_path: Path) -> None:
    command = "swift {} --model a --max_length 64 --dataset own/a --use_hf true --template llama3_2\n"
    assert lost(convert(tmp_path, command.format("sft"), "r.sh")) == {"template"}
    assert kinds(convert(tmp_path, command.format("pt"), "r.sh"), "template") == ["not_needed"]


def test_a_completion_of_several_turns_is_starred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    turn = {"role": "assistant", "content": "a"}
    text = "model_name_or_path: a\ndataset_name: r.jsonl\n"
    for turns, starred in (([turn], False), ([turn, {"role": "user", "content": "b"}, turn], True)):
        Path("r.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "c"}], "completion": turns}))
        assert (lost(convert(tmp_path, text, trainer="trl")) == {"completion_only_loss"}) is starred


@pytest.mark.parametrize("named", ["messages", "conversation", "prompt"])
def test_prompts_of_axolotl_are_a_column_of_messages(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """instruct-dpo-lora as axolotl ships it; ``field_messages`` is ``messages`` where it is not said."""
    monkeypatch.chdir(tmp_path)
    turns = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "good"})
    row = {named: [turns[0]], "chosen": turns[1], "rejected": {**turns[1], "content": "bad"}}
    Path("r.jsonl").write_text(json.dumps(row) + "\n")
    said = "" if named == "messages" else f", field_messages: {named}"
    mappings = "message_property_mappings: {role: role, content: content}"
    imported = axolotl(
        tmp_path, f"rl: dpo\ndatasets: [{{path: r.jsonl, type: chat_template.default, {mappings}{said}}}]\n"
    )
    assert lost(imported) == set()
    Path("ours.yaml").write_text(imported.text)
    (source,) = make_sources(load_recipe("ours.yaml"))
    (read,) = read_rows(source)
    assert normalise_preference(read, "preference").prompt == [turns[0]]


def test_pairs_of_axolotl_with_from_and_value_are_preferences(tmp_path: Path) -> None:
    mappings = "message_property_mappings: {role: from, content: value}"
    imported = axolotl(tmp_path, f"rl: dpo\ndatasets: [{{path: r, type: chat_template.default, {mappings}}}]\n")
    assert "type: preference" in imported.text


@pytest.mark.parametrize(
    ("more", "theirs"), [("", "eval_strategy"), ("dataset_test_split: test\n", "dataset_test_split")]
)
def test_a_file_has_no_split_to_evaluate(more: str, theirs: str, tmp_path: Path) -> None:
    text = "model_name_or_path: a\ndataset_name: {}\neval_strategy: steps\neval_steps: 5\ncompletion_only_loss: false\n"
    imported = convert(tmp_path, text.format("r.jsonl") + more, trainer="trl")
    assert "eval_datasets" not in imported.text.partition("# Not converted")[0]
    assert [each.changes_training for each in imported.findings if "is a file without a split 'test'" in each.note] == [
        False
    ]
    assert kinds(imported, theirs)[0] == "lost" or not more
    assert "eval_datasets" in convert(tmp_path, text.format("own/set") + more, trainer="trl").text


@pytest.mark.parametrize(
    ("more", "stars", "reasoning"),
    [
        ("", {"template"}, True),
        ("--preserve_thinking false", {"template"}, False),
        ("--loss_scale last_round", set(), False),
        ("--loss_scale last_round --preserve_thinking true", {"template"}, True),
        ("--template qwen3_nothinking --enable_thinking false", set(), False),
        ("--template_backend jinja", set(), False),
        ("--agent_template react_en", {"template", "agent_template"}, True),
    ],
)
def test_thoughts_of_swift(more: str, stars: set[str], reasoning: bool, tmp_path: Path) -> None:
    """ms-swift writes a think block into every answer of Qwen3, and with ``last_round`` into the last alone."""
    command = f"swift sft --model Qwen/Qwen3-8B --max_length 64 --dataset own/a --use_hf true {more}\n"
    imported = convert(tmp_path, command, "r.sh")
    assert lost(imported) == stars
    assert ("reasoning: keep" in imported.text) is reasoning
    assert ("chat_template: qwen3_nothink" in imported.text) is ("nothinking" in more)


TEMPLATES = [
    (trainer, theirs, ours, system, equal)
    for table, equal in ((EQUAL_TEMPLATES, True), (NEAR_TEMPLATES, False))
    for trainer, names in table.items()
    for theirs, (ours, rest) in names.items()
    for system in [rest if equal else ""]
]


@pytest.mark.parametrize(
    ("trainer", "theirs", "ours", "system", "equal"), TEMPLATES, ids=[f"{each[0]} {each[1]}" for each in TEMPLATES]
)
@pytest.mark.quick("LLaMA-Factory qwen", "axolotl alpaca", "ms-swift phi4")
def test_templates_by_name(trainer: str, theirs: str, ours: str, system: str, equal: bool, tmp_path: Path) -> None:
    """The recipe names StreamTune's template; one that only comes near has a star."""
    own = f"chat_template: {theirs}\ndatasets: [{{path: own/a, type: chat_template}}]\n"
    imported = {
        "LLaMA-Factory": lambda: llamafactory(tmp_path, f"stage: sft\ntemplate: {theirs}\n"),
        "axolotl": lambda: axolotl(tmp_path, own),
        "ms-swift": lambda: convert(
            tmp_path, f"swift sft --model a --max_length 64 --dataset own/a --use_hf true --template {theirs}\n", "r.sh"
        ),
    }[trainer]()
    field = "chat_template" if trainer == "axolotl" else "template"
    assert lost(imported) == (set() if equal else {field})
    assert "mapped" in kinds(imported, field)
    (tmp_path / "ours.yaml").write_text(imported.text)
    recipe = load_recipe(tmp_path / "ours.yaml").recipe
    assert (recipe.chat_template, recipe.default_system or "") == (ours, system)
    assert ours in CHAT_TEMPLATES


@pytest.mark.parametrize(("kind", "said"), [("dpo", "rejected_response"), ("kto", "a label")])
def test_pairs_of_swift_are_starred(kind: str, said: str, tmp_path: Path) -> None:
    command = f"swift rlhf --rlhf_type {kind} --model a --max_length 64 --dataset own/a --use_hf true\n"
    assert said in dataset_notes(convert(tmp_path, command, "r.sh"))


@pytest.mark.parametrize(
    ("trainer", "message", "more", "said"),
    [
        ("trl", {}, {"system": "Be brief."}, "'system'"),
        ("trl", {"weight": 0}, {}, "'weight'"),
        ("axolotl", {"train": False}, {}, ""),
        ("axolotl", {"weight": 0}, {}, "'weight'"),
        ("axolotl", {"reasoning": "a"}, {}, "'reasoning'"),
        ("axolotl", {}, {"tools": [{}]}, "'tools'"),
        ("llamafactory", {"weight": 0}, {}, "'weight'"),
        ("llamafactory", {"reasoning_content": "a"}, {}, "'reasoning_content'"),
        ("llamafactory", {"tool_calls": [{}]}, {}, "'tool_calls'"),
        ("swift", {"loss": False}, {}, ""),
        ("swift", {"train": False}, {}, "'train'"),
        ("swift", {}, {"tools": [{}]}, "renders tools differently"),
        ("swift", {"reasoning_content": "", "tool_calls": None}, {}, ""),
    ],
)
def test_what_is_read_of_rows_here_alone_is_starred(
    trainer: str,
    message: dict[str, Any],
    more: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **message}], **more}
    Path("data").mkdir()
    for path in ("r.jsonl", "data/r.jsonl"):
        Path(path).write_text(json.dumps(row) + "\n")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = "{path: r.jsonl, type: chat_template, message_field_training: train}"
    swift = "model: a\nmax_length: 64\ndataset: r.jsonl\ntemplate: chatml\n"
    imported = {
        "trl": lambda: convert(
            tmp_path, "model_name_or_path: a\ndataset_name: r.jsonl\nassistant_only_loss: true\n", trainer="trl"
        ),
        "axolotl": lambda: axolotl(tmp_path, f"chat_template: chatml\ndatasets: [{entry}]\n"),
        "llamafactory": lambda: llamafactory(tmp_path, "", formatting="sharegpt", columns={"messages": "messages"},
                                             tags=tags),
        "swift": lambda: convert(tmp_path, swift, trainer="swift"),
    }[trainer]()  # fmt: skip
    notes = dataset_notes(imported)
    assert (said in notes) if said else (notes == "")
