"""``--set key=value``."""

from __future__ import annotations

import pytest

from streamtune.errors import RecipeError
from streamtune.recipe import DpoRecipe, load_recipe

INIT = """\
model:
  init: {model_type: qwen3, hidden_size: 64}
tokenizer: {train: {vocab_size: 512}}
datasets: [{path: a}]
"""


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("learning_rate=1e-4", ("learning_rate",), 1e-4),
        ("engine.chunk_size=64", ("engine", "chunk_size"), 64),
        ("chunk_size=64", ("engine", "chunk_size"), 64),
        ("engine={keep_kv: true}", ("engine", "keep_kv"), True),
        ("keep_kv=true", ("engine", "keep_kv"), True),
        ("datasets.0.path=b.jsonl", ("datasets", 0, "path"), "b.jsonl"),
        ("datasets[0].max_rows=5", ("datasets", 0, "max_rows"), 5),
        ("datasets=[{path: b}]", ("datasets", 0, "path"), "b"),
        ("lora_target=[q_proj, v_proj]", ("lora_target",), ("q_proj", "v_proj")),
        ("cutoff_len=99", ("max_length",), 99),
        ("lr=1e-3", ("learning_rate",), 1e-3),
        ("vocab_size=1000", ("tokenizer", "train", "vocab_size"), 1000),
        ("model.init.hidden_size=32", ("model", "init", "hidden_size"), 32),
        ("hidden_size=32", ("model", "init", "hidden_size"), 32),
        ("output_dir=runs/a=b", ("output_dir",), "runs/a=b"),
        ("sample.prompt=Hello: you", ("sample", "prompt"), None),
        ("sample.prompt='Hello: you'", ("sample", "prompt"), "Hello: you"),
        (" seed = 7", ("seed",), 7),
        ("max_new_tokens=7", ("sample", "max_new_tokens"), None),
    ],
)
def test_a_setting_writes_its_key(write, refused, setting, path, value):
    if value is None:
        assert refused(INIT, before="", overrides=(setting,)).where == f"--set {setting}"
        return
    loaded = load_recipe(write(INIT, before=""), [setting])
    here = loaded.recipe
    for part in path:
        here = here[part] if isinstance(part, int) or isinstance(here, dict) else getattr(here, part)
    assert here == value
    assert loaded.key_origin(*path) == f"--set {setting}"


def test_a_setting_wins_over_the_file_and_the_last_over_the_first(write):
    loaded = load_recipe(write("sequence_len: 64\n"), ["max_length=128", "max_length=256"])
    assert loaded.recipe.max_length == 256
    assert loaded.key_origin("max_length") == "--set max_length=256"
    assert loaded.notes == ("'sequence_len' is read as 'max_length'",)


def test_another_model_by_setting(write):
    loaded = load_recipe(write(INIT, before=""), ["model=null", "tokenizer=null", "model_name_or_path=a/b"])
    assert loaded.recipe.model is None
    assert loaded.recipe.model_name_or_path == "a/b"


@pytest.mark.parametrize(
    ("setting", "what", "fix"),
    [
        ("max_length", "'max_length' has no key or no '='", "write --set key=value, such as --set max_length=4096"),
        ("=5", "'=5' has no key or no '='", "write --set key=value"),
        ("", "'' has no key or no '='", "write --set key=value"),
        ("learning_rat=1", "unknown key 'learning_rat'", "did you mean 'learning_rate'?"),
        ("hidden_siz=1", "unknown key 'hidden_siz'", "did you mean 'hidden_size'?"),
        ("engine.chunk=1", "unknown key 'chunk' in 'engine'", "did you mean 'chunk_size'?"),
        ("qqq=1", "unknown key 'qqq'", "`streamtune schema` lists every key"),
        ("max_length=many", "'max_length' must be a whole number of at least 2; found 'many'", ""),
        ("max_length=", "'max_length' has no value", ""),
        ("bf16=yes", "'bf16' must be true or false; found 'yes'", "write true"),
        ("seed={a: 1", "the bracket or brace opened here is not closed", "quote the value"),
        ("seed=&a 1", "anchors and aliases are not allowed", "quote the value"),
        ("engine={keep_kv: true, keep_kv: false}", "'keep_kv' occurs twice", "delete one"),
        ("datasets.3.path=x", "'datasets' has 1 entries", ""),
        ("datasets.path=x", "'datasets' has no key 'path'", "set the whole value"),
        ("seed.x=1", "'seed' must be a whole number of at least 0 and below 4294967296; found a group of keys", ""),
        ("offload=disk", "'engine.offload: disk' needs a directory", "add offload_dir"),
        (
            "finetuning_type=freeze",
            "'finetuning_type: freeze' trains some of the layers",
            "write finetuning_type: full and trainable_layers: last N",
        ),
        ("quantization=int4", "'quantization: int4' is not supported", "write nf4"),
        ("quantization=nf4", "'quantization: nf4' needs 'finetuning_type: qlora'", "write finetuning_type: qlora"),
        ("load_in_8bit=true", "'quantization: int8' needs 'finetuning_type: qlora'", "write finetuning_type: qlora"),
        ("gradient_checkpointing=true", "'gradient_checkpointing' is another trainer's key", "delete the line"),
    ],
)
def test_a_wrong_setting_names_itself(refused, setting, what, fix):
    error = refused(INIT, before="", overrides=(setting,))
    assert what in error.what
    assert error.fix.startswith(fix)
    assert error.where == f"--set {setting}"


def test_a_name_that_could_be_two_keys(refused):
    text = INIT.replace("hidden_size: 64", "hidden_size: 64, vocab_size: 600")
    error = refused(text, before="", overrides=("vocab_size=700",))
    assert error.what == "'vocab_size' is ambiguous: tokenizer.train.vocab_size or model.init.vocab_size"
    assert error.fix == "write the full key, such as --set tokenizer.train.vocab_size=..."


def test_a_name_that_stands_in_a_list(refused):
    error = refused("", before=INIT.replace("path: a", "path: a, max_rows: 5"), overrides=("max_rows=7",))
    assert error.what == "'max_rows' is a key in an entry of 'datasets'"
    assert error.fix == "write --set datasets.0.max_rows=..."


def test_an_unknown_key_is_named_whatever_the_datasets_are(write):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write("datasets: 2\n", before="model_name_or_path: a\n"), ["nothing=1"])
    assert caught.value.what == "unknown key 'nothing'"


def test_a_switch_that_is_set_to_false_is_not_left_out(write):
    path = write("adapter: qlora\nload_in_4bit: true\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["load_in_4bit=false"])
    assert caught.value.what.startswith("'load_in_4bit: false' excludes 'quantization: nf4', which is set at")
    assert caught.value.where == "--set load_in_4bit=false"


@pytest.mark.parametrize("value", ["dpo", '"dpo"', "'dpo'", "dpo # pairs"])
def test_the_objective_is_read_as_in_the_file(write, value):
    assert isinstance(load_recipe(write(""), [f"objective={value}"]).recipe, DpoRecipe)
