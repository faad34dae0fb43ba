"""Precision for a bfloat16 checkpoint: float32 if it fits, else bfloat16 with stochastic rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamtune.cli import main
from streamtune.recipe import Recipe, load_recipe
from streamtune.recipe.keys.engine import EngineSpec
from streamtune.run.engine import with_chosen_placement
from streamtune.run.model import make_meta_model, weights_dtype
from streamtune.run.plan import choose_placement
from streamtune.run.start import start_run
from streamtune.run.weight_choices import (
    recipes_by_precision,
    rounding_warning,
    with_best_precision,
    with_saved_precision,
)
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

CUDA = torch.device("cuda")
TRAIN = {"model_name_or_path": "base", "datasets": [{"path": "rows.jsonl"}], "learning_rate": 1.0e-5,
         "lr_scheduler_type": "constant", "max_steps": 12, "output_dir": "out"}  # fmt: skip
LARGE = {
    "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "dtype": "bfloat16",
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "architectures": [
        "Qwen3ForCausalLM"
    ],
}  # fmt: skip
"""In float32 its weights are 116 MiB, its gradients as many and its moments twice as many; in bfloat16 half of that."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a bfloat16 checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows(folder, 32)
        write_recipe(folder, {**RECIPE, "dtype": "bfloat16", "max_steps": 1, "engine": FIXED, "output_dir": "out"})
        assert run() == 0
    return folder / "out" / "final"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 32)
    shutil.copytree(base, tmp_path / "base")
    return tmp_path


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def moved(name: str) -> float:
    before, after = weights(Path("base")), weights(Path(name) / "final")
    changed = sum(int((before[key].float() != after[key].float()).sum()) for key in before)
    return changed / sum(x.numel() for x in before.values())


def test_weights_of_a_bfloat16_checkpoint_are_trained_in_float32(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(folder, TRAIN)
    assert run() == 0
    out = capsys.readouterr()
    assert "trained in float32 and computed in bfloat16 (dtype: mixed)" in out.out + out.err
    assert "fp32, computed in bf16" in out.out + out.err
    found = weights(folder / "out" / "final")
    norms = {key: x for key, x in found.items() if "norm" in key}
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert norms
    assert all((x != weights(folder / "base")[key].float()).all() for key, x in norms.items())
    shares = [each.get("moved") for each in records(folder / "out")]
    assert all(share > 0.7 for share in shares[:10])  # all but the rows of tokens that do not occur
    assert shares[10:] == [None, None]
    kept = json.loads((folder / "out" / "run.json").read_text())["recipe"]
    assert (kept["dtype"], kept["bf16"]) == ("mixed", True)
    resolved = (folder / "out" / "recipe.yaml").read_text()
    assert "dtype: mixed" in resolved
    assert "bf16: true" in resolved


@pytest.mark.full
def test_bfloat16_that_is_written_is_kept_and_noted(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(folder, {**TRAIN, "dtype": "bfloat16"})
    assert run() == 0
    out = capsys.readouterr()
    said = out.out + out.err
    assert "rounding to nearest, which loses most small steps at a learning rate of 1e-05" in said
    assert "of the trained weights: most updates are lost in rounding of 16-bit weights" in said
    assert {x.dtype for x in weights(folder / "out" / "final").values()} == {torch.bfloat16}
    assert moved("out") < 0.2
    assert all(each["moved"] < 0.2 for each in records(folder / "out")[:10])


@pytest.mark.full
def test_stochastic_rounding_goes_on_to_the_same_bits(folder: Path, capsys: pytest.CaptureFixture[str]):
    for optim in ("adamw", "lion"):
        recipe = {**TRAIN, "dtype": "bfloat16", "weight_rounding": "stochastic", "optim": optim, "save_steps": 2}
        write_recipe(folder, {**recipe, "max_steps": 4})
        assert run("--output-dir", f"whole-{optim}") == 0
        assert "note=a step" not in capsys.readouterr().out
        assert run("--output-dir", f"part-{optim}") == 0
        shutil.rmtree(folder / f"part-{optim}" / "checkpoints" / "step-000004")
        shutil.rmtree(folder / f"part-{optim}" / "final")
        assert run("--output-dir", f"part-{optim}") == 0
        whole, part = (weights(folder / f"{name}-{optim}" / "final") for name in ("whole", "part"))
        assert all(torch.equal(whole[key], part[key]) for key in whole)
        assert [each["loss"] for each in records(folder / f"whole-{optim}")] == [
            each["loss"] for each in records(folder / f"part-{optim}")
        ]


@pytest.mark.full
def test_a_run_rounded_stochastically_learns_as_one_in_float32(folder: Path):
    found = {}
    for name, more in {
        "float32": {},
        "stochastic": {"dtype": "bfloat16", "weight_rounding": "stochastic"},
        "nearest": {"dtype": "bfloat16"},
    }.items():
        write_recipe(folder, {**TRAIN, **more, "learning_rate": 3.0e-5, "max_steps": 200, "num_train_epochs": 1})
        assert run("--output-dir", name) == 0
        losses = [each["loss"] for each in records(folder / name)]
        found[name] = sum(losses[-40:]) / 40
    learnt = sum(each["loss"] for each in records(folder / "float32")[:20]) / 20 - found["float32"]
    assert abs(found["stochastic"] - found["float32"]) < 0.05 * learnt
    assert found["nearest"] - found["float32"] > 0.3 * learnt


@pytest.mark.parametrize(
    ("key", "value", "dtype"),
    [
        pytest.param("fsdp", True, "mixed", marks=pytest.mark.full),
        pytest.param("deepspeed", "zero2", "auto", marks=pytest.mark.slow),
        pytest.param("deepspeed", "zero3", "auto", marks=pytest.mark.full),
        pytest.param("seed", 1, "mixed", marks=pytest.mark.slow),
    ],
)
def test_ranks_step_float32_weights_too(folder: Path, key: str, value: Any, dtype: str):
    """FSDP2 shards float32 weights, DeepSpeed keeps a float32 copy, and with DDP each rank has the whole model."""
    if key == "deepspeed":
        pytest.importorskip("deepspeed")
    write_recipe(folder, {**TRAIN, "max_steps": 2, key: value})
    assert run("--nproc", "2") == 0
    assert all(each["moved"] > 0.7 for each in records(folder / "out"))
    assert json.loads((folder / "out" / "run.json").read_text())["recipe"]["dtype"] == dtype


def large(folder: Path, **more: Any) -> Recipe:
    """Return a recipe whose checkpoint has only a configuration, which is enough to plan."""
    (folder / "large").mkdir(exist_ok=True)
    (folder / "large" / "config.json").write_text(json.dumps(LARGE))
    write_recipe(folder, {**TRAIN, "model_name_or_path": "large", "max_length": 256, **more})
    return load_recipe("tiny.yaml").recipe


PLACES = {
    "640MiB": ("mixed", "auto", "auto"),
    "330MiB": ("bfloat16", "auto", "auto"),
    "128MiB": ("mixed", "host", "auto"),
}
"""Memory of the device: dtype, place of the weights and of the optimizer."""


@pytest.mark.full
@pytest.mark.parametrize("device", PLACES)
def test_bfloat16_is_tried_before_the_host(folder: Path, device: str, capsys: pytest.CaptureFixture[str]):
    engine = {"device_memory": device, "host_memory": "4GiB"}
    chosen = choose_placement(large(folder, engine=engine), 256, CUDA)
    assert (chosen.dtype, chosen.engine.weights, chosen.engine.optimizer) == PLACES[device]
    narrow = chosen.dtype == "bfloat16"
    assert chosen.weight_rounding == ("stochastic" if narrow else "nearest")
    assert chosen.optim_states == ("bfloat16" if narrow else "param")
    assert bool(chosen.bf16) is not narrow
    arguments = ("--device", "h100", "--device-memory", device, "--host-memory", "4GiB", "--json")
    large(folder)
    assert run(*arguments, command="plan") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["schedule"]["weights"] == chosen.engine.weights.replace("auto", "device")
    if narrow:  # and it is the plan of a recipe that says so, to the byte
        large(folder, dtype="bfloat16", weight_rounding="stochastic", optim_states="bfloat16")
        assert run(*arguments, command="plan") == 0
        assert json.loads(capsys.readouterr().out)["terms"] == planned["terms"]


@pytest.mark.full
def test_a_schedule_that_is_fixed_takes_what_fits(folder: Path):
    engine = {**FIXED, "device_memory": "330MiB", "host_memory": "4GiB"}
    assert choose_placement(large(folder, engine=engine), 256, CUDA).dtype == "bfloat16"
    assert choose_placement(large(folder, engine={**engine, "device_memory": "1GiB"}), 256, CUDA).dtype == "mixed"


def placed(folder: Path, recipe: Mapping[str, Any], said: list[str]) -> Any:
    from streamtune.run.data import make_shared_tokenizer, make_sources, prepare_on_all_ranks

    write_recipe(folder, dict(recipe))
    with start_run(load_recipe("tiny.yaml"), "auto", said.append, dry_run=True) as start:
        sources = make_sources(start.loaded)
        tokenizer = make_shared_tokenizer(start.world, start.recipe, sources, None, said.append)
        prepared = prepare_on_all_ranks(start.task, start.world, sources, tokenizer, said.append)
        return with_chosen_placement(start, prepared, start.task.longest_row_tokens(prepared), said.append)


def test_a_run_on_too_small_a_device_says_what_it_takes_and_what_it_costs(folder: Path):
    said: list[str] = []
    start = placed(folder, {**TRAIN, "engine": {"device_memory": "600KiB"}}, said)
    assert (start.recipe.dtype, start.recipe.weight_rounding) == ("bfloat16", "stochastic")
    assert start.identity["recipe"]["weight_rounding"] == "stochastic"
    note = next(each for each in said if "do not fit" in each)
    assert "(they take 280 KiB more)" in note  # 8 bytes of each weight
    assert "unbiased, but noisier" in note


def test_a_run_that_was_begun_keeps_the_precision_it_was_begun_with(folder: Path):
    """This includes a run of a version without this choice: it is resumed in the checkpoint's dtype."""
    write_recipe(folder, {**TRAIN, "max_steps": 1})
    assert run() == 0
    path = folder / "out" / "run.json"
    begun = json.loads(path.read_text())
    shutil.rmtree(folder / "out" / "checkpoints")
    (folder / "out" / "events.jsonl").unlink()
    said: list[str] = []
    recipe = {**TRAIN, "max_steps": 1}
    start = placed(folder, {**recipe, "engine": {"device_memory": "600KiB"}}, said)
    assert (start.recipe.dtype, start.recipe.bf16) == ("mixed", True)  # though it does not fit now
    begun["recipe"] |= {"dtype": "auto", "bf16": False}
    path.write_text(json.dumps(begun))
    start = placed(folder, recipe, said)
    assert (start.recipe.dtype, bool(start.recipe.bf16), start.recipe.weight_rounding) == ("auto", False, "nearest")
    assert weights_dtype(start.recipe) == "auto"
    assert not any("mixed" in each for each in said)
    begun["recipe"] |= {"dtype": "bfloat16", "weight_rounding": "stochastic", "optim_states": "bfloat16"}
    path.write_text(json.dumps(begun))
    kept = placed(folder, recipe, said).recipe
    assert (kept.dtype, kept.weight_rounding, kept.optim_states) == ("bfloat16", "stochastic", "bfloat16")


@pytest.mark.full
def test_another_precision_than_the_runs_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(folder, {**TRAIN, "max_steps": 2, "save_steps": 1})
    assert run() == 0
    assert run("--set", "bf16=false") == 2
    assert "bf16 was true, is now false" in " ".join(capsys.readouterr().err.split())
    assert run("--set", "dtype=bfloat16") == 2
    assert run() == 0  # it goes on


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({}, [("mixed", True, "nearest"), ("bfloat16", None, "stochastic")]),
        ({"bf16": False}, [("mixed", False, "nearest"), ("bfloat16", False, "stochastic")]),
        ({"engine": {"weights": "host", "fetch_dtype": "bfloat16"}},
         [("mixed", None, "nearest"), ("bfloat16", None, "stochastic")]),
        ({"optim": "badam"}, [("mixed", True, "nearest"), ("bfloat16", None, "nearest")]),
        ({"optim": "mezo"}, [("mixed", True, "nearest"), ("bfloat16", None, "nearest")]),
        ({"optim": "muon"}, [("mixed", True, "nearest"), ("bfloat16", None, "stochastic")]),
        ({"fsdp": True}, [("mixed", True, "nearest")]),
        ({"deepspeed": "zero2"}, [("auto", None, "nearest")]),  # which keeps float32 weights itself
        ({"dtype": "float32"}, [("float32", None, "nearest")]),
        ({"dtype": "bfloat16"}, [("bfloat16", None, "nearest")]),
        ({"finetuning_type": "lora"}, [("auto", None, "nearest")]),
        ({"finetuning_type": "qlora"}, [("auto", None, "nearest")]),
        ({"finetuning_type": "lora", "modules_to_save": ["lm_head"]}, [("auto", None, "stochastic")]),
    ],
)  # fmt: skip
def test_what_a_recipe_leaves_open(folder: Path, more: dict[str, Any], want: list[tuple[Any, ...]]):
    found = recipes_by_precision(large(folder, **more))
    assert [(each.dtype, each.bf16, each.weight_rounding) for each in found] == want


def test_a_float16_checkpoint_is_not_trained_in_float16(folder: Path):
    """float16 gradients would underflow, because the loss is not scaled."""
    large(folder)
    (folder / "large" / "config.json").write_text(json.dumps({**LARGE, "dtype": "float16"}))
    recipe = load_recipe("tiny.yaml").recipe
    assert [each.dtype for each in recipes_by_precision(recipe)] == ["mixed", "bfloat16"]
    for more in ({"finetuning_type": "lora"}, {"deepspeed": "zero2"}):
        assert [each.dtype for each in recipes_by_precision(recipe.model_copy(update=more))] == ["bfloat16"]


def test_a_float32_checkpoint_and_a_configuration_are_as_they_were(folder: Path):
    recipe = large(folder)
    (folder / "large" / "config.json").write_text(json.dumps({**LARGE, "dtype": "float32"}))
    assert recipes_by_precision(recipe) == [recipe]
    write_recipe(folder, RECIPE)
    recipe = load_recipe("tiny.yaml").recipe
    assert recipes_by_precision(recipe) == [recipe]


def test_a_checkpoint_without_a_dtype_in_its_configuration_is_read_from_its_weights(folder: Path):
    config = json.loads((folder / "base" / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (folder / "base" / "config.json").write_text(json.dumps(config))
    write_recipe(folder, TRAIN)
    assert with_best_precision(load_recipe("tiny.yaml").recipe).dtype == "mixed"


def test_another_model_that_is_not_trained_keeps_its_own_dtype(folder: Path):
    recipe = with_best_precision(large(folder))
    assert weights_dtype(recipe) == "float32"
    assert weights_dtype(recipe, frozen=True) == "auto"
    assert make_meta_model(recipe, CUDA).dtype == torch.float32


@pytest.mark.full
def test_modules_that_are_saved_whole_beside_adapters_move(folder: Path, capsys: pytest.CaptureFixture[str]):
    recipe = {**TRAIN, "finetuning_type": "lora", "lora_target": ["q_proj"], "modules_to_save": ["lm_head"]}
    write_recipe(folder, {**recipe, "weight_decay": 0.0, "max_steps": 4})
    assert run() == 0
    assert "modules_to_save are bfloat16: their steps are rounded stochastically" in capsys.readouterr().err
    assert "of the trained weights" not in capsys.readouterr().out
    write_recipe(folder, {**recipe, "max_steps": 4, "learning_rate": 1.0e-6})
    assert run("--output-dir", "slow") == 0
    after = load_file(folder / "slow" / "final" / "adapter_model.safetensors")
    head = next(x for key, x in after.items() if "lm_head" in key)
    before = weights(folder / "base")
    head_before = before.get("lm_head.weight", before["model.embed_tokens.weight"])
    assert (head.float() != head_before.float()).float().mean() > 0.005  # a step of 1e-6 of 1e-4


@pytest.mark.full
def test_adapters_and_rows_of_new_tokens_are_float32(folder: Path):
    write_recipe(folder, {**TRAIN, "finetuning_type": "lora", "added_tokens": ["<a>"], "max_steps": 1})
    assert run() == 0
    saved = load_file(folder / "out" / "final" / "adapter_model.safetensors")
    assert {x.dtype for key, x in saved.items() if "lora" in key or "token_adapter" in key} == {torch.float32}


@pytest.mark.full
def test_eval_computes_as_the_run_did(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(folder, {**TRAIN, "max_steps": 2, "val_size": 4})
    assert run() == 0
    last = records(folder / "out")[-1]["eval_loss"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["eval", "out", "tiny.yaml", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert last == pytest.approx(found["splits"]["held-out"]["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "needs trained bfloat16 weights, and 'dtype' is auto"),
        ({"dtype": "float32"}, "and 'dtype' is float32"),
        ({"dtype": "bfloat16", "optim": "badam"}, "keeps the trained block in float32"),
        ({"dtype": "bfloat16", "optim": "mezo"}, "in the weights' dtype"),
        ({"dtype": "bfloat16", "deepspeed": "zero2"}, "keeps a float32 copy of them"),
        ({"dtype": "bfloat16", "fsdp": True}, "'fsdp' shards them"),
    ],
)
def test_stochastic_rounding_of_what_is_not_rounded_is_a_mistake(
    folder: Path, more: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
):
    write_recipe(folder, {**TRAIN, **more, "weight_rounding": "stochastic"})
    assert run(command="validate") == 2
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_warning_is_of_weights_that_lose_steps_alone(folder: Path):
    narrow = large(folder, dtype="bfloat16")
    model = make_meta_model(narrow, CUDA)
    assert "bfloat16 weights are trained" in (rounding_warning(narrow, model) or "")
    for more in ({"weight_rounding": "stochastic"}, {"optim": "badam"}, {"deepspeed": "zero2"}):
        assert rounding_warning(narrow.model_copy(update=more), model) is None
    assert (
        rounding_warning(with_best_precision(large(folder)), make_meta_model(with_best_precision(large(folder)), CUDA))
        is None
    )


def test_settings_of_an_older_run_are_taken_over_where_the_recipe_leaves_them_open(folder: Path):
    recipe = large(folder)
    assert with_saved_precision(recipe, {"dtype": "auto", "bf16": False}).bf16 is False
    assert with_saved_precision(recipe, {}) == recipe
    written = recipe.model_copy(update={"dtype": "float32", "engine": EngineSpec()})
    assert with_saved_precision(written, {"dtype": "mixed", "bf16": True}).dtype == "float32"
