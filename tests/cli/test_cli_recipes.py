"""``streamtune validate``, ``recipes`` and ``schema``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.cli import main
from streamtune.cli.recipes import GENERAL_RECIPES
from streamtune.recipe import Recipe, load_recipe, read_shipped, shipped_names


def call(*arguments: str) -> int:
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


# --- validate ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_recipe_is_valid(name, capsys):
    path = read_shipped(name).path
    assert call("validate", str(path)) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == f"OK {path}"
    assert "  model  " in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("command", ["verify", "bench --lengths x", "probe-max-len --from 9 --to 3"])
def test_commands_that_measure_name_keys_without_effect(command, tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text("model_name_or_path: ./none\nmax_bad_rows: 3\ndatasets: [{path: rows.jsonl}]\n")
    assert call(*command.split(), str(path)) == 2, "a wrong length, or no such model"
    assert "note: 'max_bad_rows' has no effect with" in capsys.readouterr().err


def test_validate_says_what_a_recipe_does(tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text(
        "base_model: Qwen/Qwen3-8B\nfinetuning_type: lora\ndtype: bfloat16\n"
        "datasets: [{path: a, max_rows: 1000}, {path: b}]\n"
        "max_length: 131072\ngradient_accumulation_steps: 8\nmax_steps: 1500\nwarmup_steps: 10\n"
    )
    assert call("validate", str(path), "--set", "lr=1e-4") == 0
    printed = capsys.readouterr()
    assert [line.rstrip() for line in printed.out.splitlines()] == [
        f"OK {path}",
        "  model      Qwen/Qwen3-8B",
        "  tokenizer  the model's own",
        "  objective  supervised fine-tuning",
        "  training   LoRA of rank 16 on all-linear; weights in bfloat16",
        "  data       a (at most 1,000 rows), b",
        "  length     131,072 tokens; longer rows are refused",
        "  loss on    assistant turns; in plain text, every token",
        "  batch      8 rows a step (1 at a time)",
        "  optimizer  adamw, learning rate 0.0001, cosine, 10 steps warm-up",
        "  duration   1,500 steps",
        "  output     runs/my",
    ]
    assert printed.err.splitlines() == [
        "note: 'base_model' is read as 'model_name_or_path'",
        "note: 'lr' is read as 'learning_rate'",
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("lora_r: 4\n", "LoRA of rank 4 on all-linear; weights"),
        ("adapter_type: ia3\n", "ia3 adapters on all-linear; weights"),
        ("adapter_type: dora\nlora_r: 4\n", "dora adapters of rank 4 on all-linear; weights"),
        ("adapter_name_or_path: org/adapters\n", "adapters of org/adapters; weights"),
    ],
)
def test_validate_says_which_adapters_are_trained(keys, said, tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text(f"model_name_or_path: a\ndatasets: [{{path: org/rows}}]\nfinetuning_type: lora\n{keys}")
    assert call("validate", str(path)) == 0
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("dtype: auto\n", "all weights; weights in float32, or bfloat16 if that does not fit"),
        ("deepspeed: zero2\n", "all weights; weights in the checkpoint's dtype batch"),
        ("fsdp: true\n", "all weights; weights in float32 batch"),
        ("finetuning_type: qlora\nfsdp: true\n", "linear layers in nf4 batch"),
        ("finetuning_type: qlora\n", "linear layers in nf4 on an accelerator, int8 on the CPU batch"),
        ("objective: dpo\nper_device_train_batch_size: 4\n", "batch 4 pairs a step"),
        ("objective: dpo\nloss_type: kto\nper_device_train_batch_size: 4\n", "batch 4 rows a step"),
        ("objective: grpo\nreward_funcs: [length]\n", "batch 8 completions a step"),
        ("objective: grpo\nloss_type: gkd\nteacher: b\n", "objective the teacher's distribution: gkd loss"),
    ],
)
def test_validate_says_how_weights_are_kept_and_what_a_batch_counts(keys, said, tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text(f"model_name_or_path: a\ndatasets: [{{path: org/rows}}]\n{keys}")
    assert call("validate", str(path)) == 0
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if not line.startswith(("  data", "  length", "  loss on"))
    ]
    assert said in " ".join(" ".join(lines).split())


def test_validate_names_data_files_that_are_not_here(tmp_path, capsys):
    (tmp_path / "here.jsonl").write_text("{}\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: a/b\ndatasets: [{path: here.jsonl}, {path: gone.jsonl, max_rows: 5}, {path: a/b.c}]\n"
    )
    assert call("validate", str(recipe)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  data"))
    assert line.endswith("here.jsonl, gone.jsonl (at most 5 rows, no such file here), a/b.c")


def test_validate_json(tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text("model_name_or_path: a\ndatasets: [{path: b}]\ncutoff_len: 64\n")
    assert call("validate", str(path), "--json", "--set", "seed=7") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["notes"] == ["'cutoff_len' is read as 'max_length'"]
    assert set(document["recipe"]) == set(Recipe.model_fields)
    assert (document["recipe"]["seed"], document["recipe"]["max_length"]) == (7, 64)


def test_validate_json_of_a_wrong_recipe(tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text("model_name_or_path: a\ndatasets: [{path: b}]\nsede: 64\n")
    assert call("validate", str(path), "--json") == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "ok": False,
        "what": "unknown key 'sede'",
        "where": f"{path}:3",
        "mend": "did you mean 'seed'?",
    }
    assert "error: unknown key 'sede'" in printed.err


# --- recipes -------------------------------------------------------------------------------------------------------


def test_ls(capsys):
    assert call("recipes", "ls") == 0
    first, *tasks, last = capsys.readouterr().out.split("\n\n")
    groups = [[line.split()[0] for line in group.splitlines()] for group in (first, *tasks)]
    assert [group[0] for group in groups[1:]] == ["sft:", "dpo:", "grpo:"]
    assert {*groups[0][1:], *(name for group in groups[1:] for name in group[2:])} == set(shipped_names())
    assert groups[0][1:] == list(GENERAL_RECIPES)
    assert set(GENERAL_RECIPES) == {name for name in shipped_names() if "/" not in name}
    assert last == "Next: streamtune recipes copy NAME my.yaml\n"
    # By model and device, and numbers by their size.
    qwen = [name for name in groups[1] if name.startswith(("qwen3/8b-lora", "qwen3/14b-lora"))]
    assert qwen == [f"qwen3/{name}gb" for name in ("8b-lora-24", "8b-lora-48", "8b-lora-80", "14b-lora-80")]
    (row,) = [line for line in tasks[0].splitlines() if line.startswith("qwen3/32b-full-8x80gb")]
    assert " ".join(row.split()) == "qwen3/32b-full-8x80gb full 8x80GB 131,072 Qwen3-32B"


def test_ls_of_a_device(capsys):
    assert call("recipes", "ls", "--device", "48", "--json") == 0
    assert {recipe["device"] for recipe in json.loads(capsys.readouterr().out)} == {"48 GB"}
    assert call("recipes", "ls", "--device", "48gib") == 0
    shown = capsys.readouterr().out
    assert "qwen3/8b-dpo-48gb" in shown
    assert "quickstart" not in shown
    assert call("recipes", "ls", "--device", "40GB") == 2
    assert "choose one of: 24GB, " in capsys.readouterr().err


def test_ls_json(capsys):
    assert call("recipes", "ls", "--json") == 0
    listed = {recipe["name"]: recipe for recipe in json.loads(capsys.readouterr().out)}
    assert list(listed) == shipped_names()
    assert all(Path(recipe["path"]).is_file() and recipe["summary"] for recipe in listed.values())
    made = listed["qwen3/8b-dpo-80gb"]
    assert (made["objective"], made["finetuning_type"], made["device"]) == ("dpo", "lora", "80 GB")
    assert (made["model"], made["max_length"]) == ("Qwen/Qwen3-8B", 65536)
    assert listed["quickstart"]["device"] is None


def test_show_prints_the_file(capsys):
    assert call("recipes", "show", "quickstart") == 0
    assert capsys.readouterr().out == read_shipped("quickstart").text


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("quikstart", "did you mean 'quickstart'?"),
        ("qwen3-8b-lora-80gb", "did you mean 'qwen3/8b-lora-80gb'?"),
        ("zzzzzz", "`streamtune recipes ls` lists the shipped recipes"),
    ],
)
def test_an_unknown_name(name, fix, capsys):
    assert call("recipes", "show", name) == 2
    assert fix in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("name", shipped_names())
def test_copy_writes_a_recipe_that_loads(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("recipes", "copy", name) == 0
    file, recipe = f"{name.replace('/', '-')}.yaml", load_recipe(read_shipped(name).path).recipe
    assert f"wrote {file}; train with `streamtune {recipe.objective} {file}`" in capsys.readouterr().err
    assert load_recipe(file).recipe == recipe


def test_copy_to_a_file_and_to_a_folder(tmp_path):
    assert call("recipes", "copy", "sft-lora", str(tmp_path / "mine.yaml")) == 0
    assert call("recipes", "copy", "sft-lora.yaml", str(tmp_path)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "sft-lora.yaml"]


def test_copy_never_overwrites(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert call("recipes", "copy", "sft-lora", str(path)) == 2
    assert path.read_text() == "mine"
    printed = capsys.readouterr().err
    assert "the file already exists; it is not overwritten" in printed
    assert f"where: {path}" in printed


def test_copy_into_a_folder_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "no" / "mine.yaml"
    assert call("recipes", "copy", "sft-lora", str(path)) == 2
    assert f"mkdir -p {path.parent}" in capsys.readouterr().err


# --- schema --------------------------------------------------------------------------------------------------------


def test_schema_prints_one_document(capsys):
    assert call("schema") == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["$defs"]["Recipe"]["properties"]) == set(Recipe.model_fields)


# --- optim ---------------------------------------------------------------------------------------------------------


def test_optim_ls_lists_every_optimizer(capsys):
    assert call("optim", "ls") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.partition("\n\n")[0].splitlines())) <= 80
    assert call("optim", "ls", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == list(OPTIMIZERS)
    assert all(each["name"] in printed for each in found)
    muon = next(each for each in found if each["name"] == "muon")
    assert muon["state_bytes_per_parameter"] == {"float32": 4, "bfloat16": 2}
    assert muon["not_divided"] == "the optimizer needs whole matrices, and each rank has a part of them"
    assert muon["options"]["momentum"] == 0.95
