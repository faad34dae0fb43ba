"""Aliases of other trainers' keys and values."""

from __future__ import annotations

from typing import get_args

import pytest

from streamtune.base.adapters import AdapterName
from streamtune.recipe import RECIPES, load_recipe
from streamtune.recipe.aliases import ALIASES, INSTEAD, SWITCHES, VALUES


def test_a_recipe_in_other_trainers_names(write):
    text = (
        "base_model: Qwen/Qwen3-4B\nadapter: lora\nlora_rank: 8\ndatasets: [{path: x}]\nsequence_len: 4096\n"
        "micro_batch_size: 2\nnum_epochs: 3\noptimizer: adamw_torch\nval_set_size: 0.1\nlora_target: all\n"
    )
    loaded = load_recipe(write(text, before=""))
    recipe = loaded.recipe
    assert recipe.model_name_or_path == "Qwen/Qwen3-4B"
    assert (recipe.finetuning_type, recipe.lora_r, recipe.lora_target) == ("lora", 8, "all-linear")
    assert (recipe.max_length, recipe.per_device_train_batch_size) == (4096, 2)
    assert (recipe.num_train_epochs, recipe.optim, recipe.val_size) == (3, "adamw", 0.1)
    assert "'sequence_len' is read as 'max_length'" in loaded.notes
    assert "'optim: adamw_torch' is read as 'adamw'" in loaded.notes
    assert len(loaded.notes) == 10


def test_an_alias_keeps_its_line(refused):
    error = refused("cutoff_len: 1\n")
    assert error.what.startswith("'max_length' must be")
    assert error.where.endswith(":4")


def test_an_alias_beside_the_real_name(refused):
    error = refused("max_length: 4096\nseed: 1\nsequence_len: 8192\n")
    assert "'sequence_len' means 'max_length'" in error.what
    assert "is already set at" in error.what
    assert error.where.endswith(":6")


def test_two_aliases_of_one_key(refused):
    error = refused("cutoff_len: 4096\nsequence_len: 8192\n")
    assert "'sequence_len' means 'max_length'" in error.what
    assert error.where.endswith(":5")


def test_a_misspelt_alias_is_recognised(refused):
    assert refused("sequence_leng: 8192\n").fix == "did you mean 'sequence_len'?"


@pytest.mark.parametrize("key", INSTEAD)
def test_a_key_with_no_equal_says_how_to_say_it_here(refused, key):
    error = refused(f"seed: 1\n{key}: x\n")
    assert error.what == f"'{key}' is another trainer's key"
    assert error.fix == INSTEAD[key]
    assert error.where.endswith(":5")


@pytest.mark.parametrize(
    ("lines", "quantization"),
    [
        ("adapter: qlora\nload_in_4bit: true\n", "nf4"),
        ("adapter: qlora\nload_in_8bit: true\nload_in_4bit: false\n", "int8"),
        ("finetuning_type: qlora\nquantization_bit: 4\n", "nf4"),
        ("finetuning_type: qlora\nquantization_bit: 8\n", "int8"),
        ("load_in_8bit: false\n", "auto"),
        ("finetuning_type: qlora\n", "auto"),
    ],
)
def test_bits_in_other_trainers_names(write, lines, quantization):
    assert load_recipe(write(lines)).recipe.quantization == quantization


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("load_in_4bit: true\n", "'quantization: nf4' needs 'finetuning_type: qlora'; found full"),
        ("seed: 1\nfinetuning_type: qlora\nload_in_4bit: 4\n", "'load_in_4bit' must be true or false; found 4"),
        (
            "finetuning_type: qlora\nquantization: int8\nload_in_4bit: true\n",
            "'load_in_4bit' means 'quantization: nf4', and",
        ),
        ("adapter: qlora\nload_in_4bit: false\n", "'load_in_4bit: false' excludes nf4, which 'finetuning_type: qlora'"),
        ("adapter: qlora\nquantization_bit: 4\nload_in_4bit: false\n", "'load_in_4bit: false' excludes 'quantization"),
        ("adapter: lora\nadapter_type: dora\nuse_dora: false\n", "'use_dora: false' excludes 'adapter_type: dora'"),
        ("adapter: lora\nuse_dora: true\npeft_use_dora: false\n", "'peft_use_dora: false' excludes 'adapter_type: do"),
        ("adapter: lora\npeft_use_dora: true\nseed: 1\nuse_dora: false\n", "'use_dora: false' excludes"),
    ],
)
def test_a_switch_that_says_something_else(refused, lines, what):
    error = refused(lines)
    assert error.what.startswith(what)
    assert error.where.endswith(f":{3 + len(lines.splitlines())}")


def test_a_misspelt_switch_is_recognised(refused):
    assert refused("load_in_4bits: true\n").fix == "did you mean 'load_in_4bit'?"


@pytest.mark.parametrize("value", ["none", "[none]", "[]"])
def test_no_tracker(write, value):
    assert load_recipe(write(f"report_to: {value}\n")).recipe.report_to == ()


def test_the_tables_agree_with_the_schema():
    keys = {key for kind in RECIPES.values() for key in kind.model_fields}
    assert set(ALIASES.values()) <= keys
    assert set(VALUES) <= keys
    assert {key for key, _ in SWITCHES.values()} <= keys
    assert not keys & (set(ALIASES) | set(INSTEAD) | set(SWITCHES))


@pytest.mark.parametrize(
    ("line", "kind", "note"),
    [
        ("init_lora_weights: pissa", "pissa", "'init_lora_weights: pissa' is read as 'adapter_type: pissa'"),
        ("init_lora_weights: pissa_niter_16", "pissa", "is read as 'adapter_type: pissa'"),
        ("peft_init_lora_weights: olora", "olora", "is read as 'adapter_type: olora'"),
        ("init_weights: lora-ga", "lora_ga", "is read as 'adapter_type: lora_ga'"),
        (
            "init_lora_weights: true",
            "lora",
            "'init_lora_weights: true' has no effect: it is the default of adapter_type: lora",
        ),
    ],
)
def test_peft_says_how_adapters_begin(write, line, kind, note):
    loaded = load_recipe(write(f"finetuning_type: lora\n{line}\n"))
    assert loaded.recipe.adapter_type == kind
    assert any(note in told for told in loaded.notes)


def test_a_beginning_of_adapters_that_is_not_here(refused):
    error = refused("finetuning_type: lora\ninit_lora_weights: gaussian\n")
    assert error.what == "unknown initialisation of adapters 'init_lora_weights: gaussian'"
    assert error.fix.startswith("write one of: adapter_type: pissa")
    assert error.where.endswith(":5")


@pytest.mark.parametrize("kind", [kind for kind in get_args(AdapterName) if kind != "lora"])
@pytest.mark.parametrize("key", ["finetuning_type", "adapter"])
def test_a_kind_of_adapters_is_sent_to_its_key(refused, write, key, kind):
    error = refused(f"{key}: {kind}\n")
    assert "is an adapter type" in error.what
    written = error.fix.removeprefix("write ").replace(" and ", "\n")
    recipe = load_recipe(write(f"{written}\n")).recipe
    assert recipe.adapter_type == kind


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("interleave_probs: [0.5, 0.5]", "write weight: P in each entry of datasets"),
        ("test_datasets: [{path: x}]", "write eval_datasets: {NAME: PATH}"),
        ("new_special_tokens: [<a>]", "write special_tokens: {additional_special_tokens: [...]}"),
    ],
)
def test_names_of_other_trainers_in_ours(refused, line, fix):
    error = refused(f"{line}\n")
    assert error.fix == fix
    assert error.where.endswith(":4")


def test_keys_of_other_trainers_in_an_entry(refused, write):
    text = "model_name_or_path: x\ndatasets:\n- {path: a, field_messages: talk}\n"
    error = refused("", before=text)
    assert "'field_messages' is another trainer's key" in error.what
    assert "write columns: {messages: NAME}" in str(error)
    loaded = load_recipe(write("tokens: [<a>]\n"))
    assert loaded.recipe.added_tokens == ("<a>",)


def test_the_name_in_a_list_of_eval_sets_is_not_a_subset(write):
    loaded = load_recipe(write("eval_datasets: [{name: en, path: org/data}, {name: de, path: org/data, subset: de}]\n"))
    assert [loaded.recipe.eval_datasets[name][0].name for name in ("en", "de")] == [None, "de"]
    found = [note for note in loaded.notes if "is the name of the eval set" in note]
    assert found == [
        "'eval_datasets[0].name' is the name of the eval set; to read a subset of org/data, write subset: NAME"
    ]
    assert load_recipe(write("eval_datasets: [{name: en, path: rows/en.jsonl}]\n")).notes == ()
