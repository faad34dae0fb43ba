"""The fields that other trainers document: each is mapped, explained or reported, and none is unknown."""

from __future__ import annotations

import inspect
import itertools
import os
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import StreamTuneError
from streamtune.programs.imports import importing
from streamtune.programs.imports.axolotl_datasets import SETS
from streamtune.programs.imports.conversion import Conversion, FieldFinding, PeerTrainer
from streamtune.programs.imports.importing import TRAINERS
from streamtune.programs.imports.recipe_files import PeerFile
from streamtune.recipe.aliases import ALIASES
from streamtune.recipe.schema import RECIPES
from streamtune.recipe.yaml import KeyOrigins
from tests.programs.imports.peer_schemas import PEERS, UNSAID, installed_trl, kept, keys_of

OLDER = {
    "axolotl": """flash_attn_fuse_qkv unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o
    unsloth_rms_norm unsloth_rope dpo_norm_loss""",
    "llamafactory": "ray_run_name",
    "swift": "train_type sft_type use_ray ray_exp_name device_groups",
    "trl": "max_seq_length torch_dtype use_liger_loss dataset_batch_size",
}
"""Fields of older releases."""

VALUES: dict[str, Any] = {
    **{"rl": "dpo", "stage": "sft", "rlhf_type": "grpo", "train_type": "lora", "tuner_type": "lora", "adapter": "lora"},
    **{"process_reward_model": False, "trl": {"beta": 0.1}, "dataset": "r.jsonl", "datasets": [{"path": "r.jsonl"}]},
    **{"pretraining_dataset": "r.jsonl", "dataset_name": "r.jsonl", "warmup_steps": 3, "warmup_ratio": 0.1},
    **{"target_modules": "all", "max_samples": 5, "deepspeed": "zero2", "max_length": 64, "max_completion_length": 64},
    **{"model": "own/model", "report_to": "none"},
}
"""Values of fields that have to be right for a recipe to be read at all."""

TOGETHER = """
optim optimizer
rl stage rlhf_type datasets dataset pretraining_dataset dataset_name dataset_train_split dataset_dir max_samples adapter
load_in_4bit load_in_8bit lora_target_linear lora_target_modules lora_target target_modules quant_bits quantization_bit
use_peft train_on_inputs mask_history chat_template template warmup_steps warmup_ratio report_to wandb_project
batch_size loss_type dtype torch_dtype max_length deepspeed reward_funcs scale_rewards
"""
"""Fields that are converted by functions."""


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return a value under its name, of which the parts between dots are groups."""
    first, _, rest = name.partition(".")
    return {first: nested(rest, value) if rest else value}


def answers(trainer: str, name: str) -> list[FieldFinding]:
    """The findings of a recipe with one field."""
    group, _, inner = name.partition(".")
    value = VALUES.get(name, not (trainer == "axolotl" and name == "reward_model"))
    fields: dict[str, Any] = {group: nested(inner, value) if inner else value}
    if group in SETS and inner:
        fields[group] = [{"path": "r.jsonl", **fields[group]}]
    lines = {(group,): 1} | ({(group, inner): 2} if inner else {})
    file = PeerFile(fields, KeyOrigins("r.yaml", lines), Path("r.yaml"))
    conversion = Conversion(file, TRAINERS[trainer])
    objective = conversion.trainer.objective(conversion)
    conversion.kind = RECIPES[objective]
    conversion.trainer.special(conversion)
    conversion.apply_rules()
    assert conversion.left == {}
    return [found for found in conversion.findings if found.theirs.partition(":")[0].startswith(group)]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_of_the_schema_is_classed_and_answered(trainer: str) -> None:
    """The table of the importer has every key of the trainer's own schema, and an answer says which class it is."""
    known = kept()[trainer]["keys"]
    assert len(known) > 200
    names = sorted({*known, *OLDER[trainer].split()})
    assert [name for name in names if TRAINERS[trainer].find_rule(name) is None] == []
    silent = [name for name in names if not answers(trainer, name)]
    unknown = [name for name in names if any("that is known here" in found.note for found in answers(trainer, name))]
    assert (silent, unknown) == ([], [])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_key_is_answered_as_its_class_says(trainer: str) -> None:
    """A key that is not needed is never lost, a starred one is, and no key of a class without counterpart is mapped."""
    for name in kept()[trainer]["keys"]:
        rule, found = TRAINERS[trainer].find_rule(name), answers(trainer, name)
        assert rule is not None
        if "." in name and name.partition(".")[0] in SETS:
            continue  # a switch in place of the name of a column is read as one
        if not (rule.ours or rule.needed) and name not in OBJECTIVE:
            assert {each.kind for each in found} <= {"not_needed"}, name
        elif not rule.ours and rule.needed and not any(rule.is_off(value) for value in (True, VALUES.get(name, True))):
            assert [(each.kind, each.changes_training) for each in found] == [("lost", rule.changes_training)], name
            assert rule.why, name


OBJECTIVE = {"rl", "stage", "rlhf_type"}
"""Fields that choose the objective, and its loss."""

SAME = {
    "optim": "adamw_torch_fused is adamw",
    "optimizer": "adamw_torch_fused is adamw",
    "scale_rewards": "the losses' own, which is group",
    "trl.scale_rewards": "the losses' own, which is group",
    "importance_sampling_level": "the losses' own, which is token",
    "router_aux_loss_coef": "0 says nothing, as here",
    "report_to": "no tracker",
    "save_steps": "when checkpoints are written does not change what is trained",
    "logging_steps": "what is printed",
    "per_device_eval_batch_size": "a mean over tokens, whatever the batch",
    "output_dir": "its name",
    "vllm_gpu_memory_utilization": "memory of the device",
    "vllm.gpu_memory_utilization": "memory of the device",
    "enable_thinking": "as the chat template does by itself",
    "preserve_thinking": "as the chat template does by itself",
    "load_in_4bit": "off",
    "load_in_8bit": "off",
    "use_peft": "off is finetuning_type: full",
    "train_on_inputs": "off is train_on: assistant",
    "freeze_parameters_ratio": "0 freezes nothing",
    "freeze_trainable_modules": "all modules of a trained layer",
    "shuffle_dataset": "another shuffle in front of that of each epoch",
}
"""Fields whose default is spelt otherwise and means ours, and why."""


WRITTEN = {
    "axolotl": "bf16 dtype max_length overlength split_at truncate_side warmup_ratio",
    "llamafactory": """bf16 default_system dtype finetuning_type learning_rate lora_r lr_scheduler_type num_train_epochs
    overlength packing per_device_train_batch_size reasoning split_at train_on trainable_layers truncate_side""",
    "swift": """adam_beta2 beta bf16 finetuning_type learning_rate lora_alpha lora_dropout lora_r num_train_epochs
    overlength per_device_train_batch_size reasoning simpo_gamma split_at temperature top_k top_p train_batch_size
    train_on truncate_side weight_decay""",
    "trl": """bf16 dtype learning_rate lora_alpha lora_dropout loss_type lr_scheduler_type max_length num_train_epochs
    overlength per_device_train_batch_size reasoning rpo_alpha split_at train_on truncate_side
    use_bias_correction_kl""",
}
"""Keys of ours that are written where the trainer's default differs."""


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_default_that_is_not_ours_is_written(trainer: str) -> None:
    """Their default of a key that is mapped is ours, or the table says that it is written into the recipe."""
    differ = {}
    for name, default in kept()[trainer]["keys"].items():
        rule = TRAINERS[trainer].find_rule(name)
        assert rule is not None
        said = default not in (None, UNSAID, "", [])
        if not (said and rule.ours) or rule.ours in WRITTEN[trainer].split() or rule.ours.endswith("datasets"):
            continue
        converted = rule.convert(default) if rule.convert else default
        kinds = [kind for kind in RECIPES.values() if rule.ours in kind.model_fields]
        ours = [
            kind.model_fields[rule.ours].get_default(call_default_factory=True, validated_data={}) for kind in kinds
        ]
        if converted is not None and converted not in ours and name not in SAME:
            differ[name] = (default, ours)
    assert differ == {}


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=lambda trainer: trainer.name)
def test_the_table_names_the_defaults_that_are_written(trainer: PeerTrainer) -> None:
    source = Path(inspect.getfile(trainer.objective)).read_text(encoding="utf-8")
    written = set(re.findall(r"conversion\.default\(\s*\"(\w+)\"", source))
    assert written <= set(WRITTEN[trainer.name].split())


@pytest.mark.full
def test_the_kept_keys_are_those_of_the_installed_trl() -> None:
    """Written anew by ``python -m tests.programs.imports.peer_schemas FOLDER``."""
    assert kept()["trl"] == {"version": metadata.version("trl"), "keys": installed_trl()}


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["trl", *PEERS])
def test_every_key_of_a_package_that_is_here_is_classed(trainer: str) -> None:
    """Packages of the other trainers are read where STREAMTUNE_PEERS names a folder that has them unpacked."""
    keys = installed_trl() if trainer == "trl" else keys_of(trainer, Path(os.environ["STREAMTUNE_PEERS"]))[1]
    assert [name for name in keys if TRAINERS[trainer].find_rule(name) is None] == []


KINDS_OF_VALUES = (True, -3, 0.5, "a,b", "", [], ["a"], [1, {"a": 2}], {"a": 1}, "train[:10%]")


@pytest.mark.full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_values_of_any_kind_are_answered_or_refused(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields that are converted together: nothing but an error of ours leaves the importer."""
    for name, value in itertools.product(TOGETHER.split(), KINDS_OF_VALUES):
        fields = {"model": "m", "model_name_or_path": "m", "base_model": "m", name: value}
        file = PeerFile(fields, KeyOrigins("r.yaml"), Path("r.yaml"))
        monkeypatch.setattr(importing, "read_peer_file", lambda path, file=file: file)
        with suppress(StreamTuneError):
            importing.import_recipe(Path("r.yaml"), trainer)


def test_an_unknown_field_is_reported_with_the_nearest() -> None:
    (found,) = answers("axolotl", "sequense_len")
    assert (found.kind, found.changes_training, found.where) == ("lost", True, "r.yaml:1")
    assert found.note.endswith("did you mean 'sequence_len'?")


def test_every_rule_leads_to_a_key_of_ours_or_says_why() -> None:
    keys = {key for kind in RECIPES.values() for key in kind.model_fields}
    for trainer in TRAINERS.values():
        for name, rule in trainer.fields.items():
            assert rule.ours in keys if rule.ours else rule.needed or rule.why, f"{trainer.name}: {name}"


def test_names_of_fields_are_aliases_of_the_same_key() -> None:
    """What a recipe may be called by another trainer's name means the same where such a recipe is imported."""
    axolotl = {"batch_size"}  # the rows of a whole step there
    for trainer in TRAINERS.values():
        for name, rule in trainer.fields.items():
            if name in ALIASES and rule.ours and name not in axolotl:
                assert rule.ours == ALIASES[name], f"{trainer.name}: {name}"
