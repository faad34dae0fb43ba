"""``optim``, ``optim_args``, ``lr_groups`` and ``lr_layer_decay``, from a recipe to a trained model."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamtune import models
from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe import load_recipe
from streamtune.run.model import make_meta_model, make_optimizer
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

COMMON: dict[str, Any] = {
    **RECIPE,
    "max_length": 160,
    "val_size": 5,
    "engine": FIXED,
    "max_steps": 6,
    "save_steps": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
}
SEVERAL = [
    pytest.param(
        name,
        marks=[] if OPTIMIZERS[name].is_installed else pytest.mark.skip(f"{OPTIMIZERS[name].library} is not installed"),
    )
    for name in ("adamw_8bit", "adamw_torch_4bit", "galore", "muon", "schedule_free")
]
"""An optimizer of each library and each kind of state; ``tests/optim`` has all of them without a run."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 40)
    return tmp_path


def weights_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    (file,) = (folder / name / "final").glob("*model.safetensors")
    return load_file(file)


def losses(folder: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [each["loss"] for each in records if "loss" in each]


@pytest.mark.full
@pytest.mark.parametrize("name", SEVERAL)
def test_a_run_learns_and_goes_on_where_it_stopped(folder: Path, name: str) -> None:
    common = {**COMMON, "optim": name, "lr_scheduler_type": "constant"}
    if name == "galore":
        common["optim_args"] = {"rank": 4, "update_proj_gap": 3}
    write_recipe(folder, {**common, "output_dir": "whole"})
    assert run() == 0
    want = losses(folder, "whole")
    assert want[-1] < want[0]
    write_recipe(folder, {**common, "output_dir": "parts", "max_steps": 2})
    assert run() == 0
    host = {"weights": "host", "optimizer": "host"} if name in ("muon", "adamw_8bit") else {}
    write_recipe(folder, {**common, "output_dir": "parts", "optim_in_backward": True, "engine": {**FIXED, **host}})
    assert run("--allow-change", "max_steps") == 0
    assert losses(folder, "parts") == want
    whole, parts = weights_of(folder, "whole"), weights_of(folder, "parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.full
def test_blocks_are_trained_in_turn_and_go_on_where_they_stopped(folder: Path) -> None:
    """Runs are stopped within a block and at the end of a block."""
    common = {**COMMON, "optim": "badam", "optim_args": {"switch_block_every": 2, "include_embedding": True}}
    common |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    write_recipe(folder, {**common, "output_dir": "whole"})
    assert run() == 0
    for steps in (3, 4, 6):
        write_recipe(folder, {**common, "output_dir": "parts", "max_steps": steps})
        assert run("--allow-change", "max_steps") == 0
    assert losses(folder, "parts") == losses(folder, "whole")
    whole, parts = weights_of(folder, "whole"), weights_of(folder, "parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.full
def test_a_checkpoint_that_is_written_late_has_the_weights_of_its_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is trained from step 5, while the copy is written, was frozen when the copy was made at step 3."""
    common = {**COMMON, "optim": "badam", "learning_rate": 1e-2}
    common |= {"max_steps": 6, "save_steps": 3, "optim_args": {"switch_block_every": 2, "switch_mode": "ascending"}}
    write_recipe(folder, {**common, "output_dir": "at-once", "save_async": False})
    assert run() == 0
    save = models.save_pretrained

    def late(*args: Any, **more: Any) -> None:
        if more.get("weights") is not None:
            time.sleep(1.0)
        save(*args, **more)

    monkeypatch.setattr(models, "save_pretrained", late)
    write_recipe(folder, {**common, "output_dir": "late"})
    assert run() == 0
    for step in (3, 6):
        paths = (folder / name / f"checkpoints/step-{step:06}/model/model.safetensors" for name in ("at-once", "late"))
        want, got = map(load_file, paths)
        assert all(torch.equal(got[key], want[key]) for key in want), step


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"optim": "badam", "optim_args": {"switch_block_every": 2}}),
        pytest.param({}, {"optim": "adafactor"}, marks=pytest.mark.full),
        pytest.param({"optim": "badam"}, {"optim": "mezo"}, marks=pytest.mark.full),
        pytest.param({"optim": "badam"}, {"optim_args": {"switch_block_every": 1}}, marks=pytest.mark.full),
        (
            {"optim": "galore", "optim_args": {"rank": 8, "update_proj_gap": 3}},
            {"optim": "galore", "optim_args": {"rank": 4, "update_proj_gap": 3}},
        ),
        ({"optim": "muon", "dtype": "bfloat16"}, {"weight_rounding": "stochastic"}),
        ({"optim": "muon", "dtype": "float32"}, {"dtype": "bfloat16"}),
    ],
)
def test_another_optimizer_begins_with_states_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The run is as from a checkpoint without states: same weights, rows and rates, and a first optimizer step."""
    common = {**COMMON, "output_dir": "changed", "max_steps": 6, "save_steps": 3}
    write_recipe(folder, {**common, **before})
    assert run() == 0
    write_recipe(folder, {**common, **before, **after})
    last = ("--resume", "changed/checkpoints/step-000003")
    assert run(*last) != 0
    changed = [word for key in after for word in ("--allow-change", key)]
    assert run(*last, *changed) == 0
    assert "its states are initialised again" in " ".join(capsys.readouterr().err.split())
    events = [json.loads(line) for line in (folder / "changed/events.jsonl").read_text().splitlines()]
    assert any(text.startswith(tuple(after)) for event in events for text in event.get("changes", ()))
    records = [json.loads(line) for line in (folder / "changed/metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records if "lr" in each] == [1, 2, 3, 4, 5, 6]
    assert weights_of(folder, "changed")


def test_blocks_by_names_are_planned_and_trained(folder: Path) -> None:
    args = {"blocks": ["mlp", "self_attn", "layers.1"], "switch_block_every": 1}
    write_recipe(folder, {**COMMON, "optim": "badam", "optim_args": args, "max_steps": 2, "engine": {}})
    assert run() == 0


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"optim_in_backward": True}, "has gradients of one block only"),
        ({"engine": {"weights": "host"}}, "to the host only once"),
        ({"deepspeed": "zero2"}, "ranks shard them only once"),
        ({"sequence_parallel_size": 2}, "needs a single device"),
        ({"optim_args": {"blocks": ["mlp"], "layers_per_block": 2}}, "exclude each other"),
        ({"optim_args": {"switch_mode": "ascendin"}}, "'random', 'ascending' or 'descending'"),
    ],
)
def test_what_blocks_do_not_combine_with(folder: Path, keys: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        made(folder, optim="badam", **keys)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="full"),
        pytest.param({"finetuning_type": "lora", "lora_dropout": 0.2, "optim_args": {"n": 2}}, id="lora"),
        pytest.param({"dtype": "bfloat16", "optim_args": {"eps": 1e-2}}, id="bfloat16"),
    ],
)
def test_steps_by_losses_alone_go_on_where_they_stopped(folder: Path, keys: dict[str, Any]) -> None:
    common = {**COMMON, **keys, "optim": "mezo", "gradient_accumulation_steps": 2, "learning_rate": 1e-4}
    common["lr_scheduler_type"] = "constant"
    write_recipe(folder, {**common, "output_dir": "whole"})
    assert run() == 0
    for steps in (3, 6):
        write_recipe(folder, {**common, "output_dir": "parts", "max_steps": steps})
        assert run("--allow-change", "max_steps") == 0
    assert losses(folder, "parts") == losses(folder, "whole")
    whole, parts = weights_of(folder, "whole"), weights_of(folder, "parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    write_recipe(folder, {**common, "output_dir": "start", "max_steps": 1, "learning_rate": 0.0})
    assert run() == 0
    start = weights_of(folder, "start")
    assert not all(torch.equal(whole[key], start[key]) for key in whole)


@pytest.mark.full
def test_steps_by_losses_alone_learn(folder: Path) -> None:
    keys = {"optim": "mezo", "optim_args": {"n": 4}, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
    write_recipe(
        folder, {**COMMON, **keys, "max_steps": 60, "save_steps": 0, "output_dir": "run", "max_grad_norm": 0.0}
    )
    assert run() == 0
    found = losses(folder, "run")
    assert sum(found[-10:]) / 10 < sum(found[:10]) / 10 - 0.1


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"optim_in_backward": True}, "frees gradients early"),
        ({"engine": {"weights": "host"}}, "while its layer computes"),
        ({"engine": {"optimizer": "host"}}, "keeps no states"),
        ({"deepspeed": "zero2"}, "perturbs and steps whole weights"),
        ({"fsdp": True}, "perturbs and steps whole weights"),
        ({"loss_type": "dft"}, "treats the probability of each token as a constant"),
        ({"optim_args": {"eps": 0.0}}, "from 1e-06 to 1; found 0"),
        ({"optim_args": {"n": 0}}, "whole number of at least 1"),
        ({"adam_beta2": 0.95}, "is an option of AdamW"),
    ],
)
def test_what_losses_alone_do_not_combine_with(folder: Path, keys: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        made(folder, optim="mezo", **keys)


@pytest.mark.full
@pytest.mark.skipif(not OPTIMIZERS["schedule_free"].is_installed, reason="schedulefree is not installed")
def test_the_average_is_saved_and_evaluated_and_training_goes_on_without_it(folder: Path) -> None:
    common = {**COMMON, "optim": "schedule_free", "lr_scheduler_type": "constant", "max_steps": 3, "save_steps": 0}
    sample = {"sample": {"prompt": "Add 3.", "max_new_tokens": 2}, "sample_steps": 1}
    for name, more in (("often", {"eval_steps": 1, "save_steps": 1, **sample}), ("once", {})):
        write_recipe(folder, {**common, **more, "output_dir": name})
        assert run() == 0
    assert losses(folder, "often") == losses(folder, "once")
    checkpoint = folder / "once" / "checkpoints" / "step-000003"
    state = load_file(checkpoint / "optimizer-00001.safetensors")
    final = weights_of(folder, "once")
    (saved,) = (checkpoint / "model").glob("*model.safetensors")
    for key, average in final.items():
        trained, z = (state[f"{key}/{name}"] for name in ("trained", "z"))
        assert torch.equal(average, trained.lerp(z, 1 - 1 / 0.9))
        assert not torch.equal(average, trained)
    assert all(torch.equal(final[key], x) for key, x in load_file(saved).items())


def made(folder: Path, **keys: Any) -> Any:
    path = write_recipe(folder, {**RECIPE, **keys})
    return load_recipe(path).recipe


def groups_of(recipe: Any) -> tuple[dict[str, tuple[float, float]], Any]:
    """Return name -> (learning rate, weight decay) of each parameter."""
    model = make_meta_model(recipe, torch.device("cpu"))
    optimizer = make_optimizer(recipe, model)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }, optimizer


def test_learning_rates_by_name_and_by_layer(folder: Path) -> None:
    recipe = made(
        folder,
        learning_rate=1e-3,
        weight_decay=0.1,
        lr_layer_decay=0.5,
        lr_groups=[
            {"match": "embed_tokens", "learning_rate": 1e-5},
            {"match": "layers.0.mlp.up*", "learning_rate": 2e-3, "weight_decay": 0.0},
            {"match": "norm", "weight_decay": 0.2},
        ],
    )
    found, _ = groups_of(recipe)
    last = max(int(name.split(".")[2]) for name in found if ".layers." in name)
    assert found["model.embed_tokens.weight"] == (1e-5, 0.1)
    assert found["model.layers.0.mlp.up_proj.weight"] == (2e-3, 0.0)
    assert found["model.layers.0.mlp.down_proj.weight"] == (1e-3 * 0.5 ** (last + 1), 0.1)
    assert found[f"model.layers.{last}.mlp.down_proj.weight"] == (5e-4, 0.1)
    assert found["model.norm.weight"] == (1e-3, 0.2)
    assert found[f"model.layers.{last}.input_layernorm.weight"] == (5e-4, 0.0)  # whole parts of a name match


def test_a_schedule_keeps_the_ratio_of_each_group(folder: Path) -> None:
    from streamtune.optim import set_learning_rate

    recipe = made(folder, learning_rate=1e-3, lr_groups=[{"match": "embed_tokens", "learning_rate": 4e-3}])
    _, optimizer = groups_of(recipe)
    set_learning_rate(optimizer, 5e-4)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [5e-4, 2e-3]


@pytest.mark.full
def test_a_group_at_rate_zero_is_not_trained_in_the_backward_either(folder: Path) -> None:
    groups = [{"match": "embed_tokens", "learning_rate": 0.0, "weight_decay": 0.0}]
    kinds = {"after": {}, "in": {"optim_in_backward": True}}
    for name, more in kinds.items():
        write_recipe(folder, {**COMMON, **more, "output_dir": name, "lr_groups": groups, "optim": "muon"})
        assert run() == 0
    after, inside = (weights_of(folder, name) for name in kinds)
    assert all(torch.equal(after[key], inside[key]) for key in after)
    write_recipe(folder, {**COMMON, "output_dir": "start", "max_steps": 1, "learning_rate": 0.0})
    assert run() == 0
    start = weights_of(folder, "start")
    same = [key for key in after if torch.equal(after[key], start[key])]
    assert [key for key in same if "embed_tokens" in key]
    assert len(same) < 3


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"optim": "adamx"}, "'optim' must be", "did you mean 'adamw'?"),
        ({"optim": "sgd", "optim_args": {"momentun": 0.9}}, "has no option 'momentun'", "did you mean 'momentum'?"),
        ({"optim": "lion", "adam_beta2": 0.95}, "'adam_beta2' is an option of AdamW", "optim_args"),
        ({"optim": "muon", "optim_states": "bfloat16"}, "sets the dtype of AdamW's moments", "delete the line"),
        ({"optim": "lamb", "deepspeed": "zero2"}, "trust ratio uses norms of whole weights", "delete 'deepspeed'"),
        ({"optim": "muon", "fsdp": True}, "needs whole matrices", "delete 'fsdp'"),
        ({"optim": "paged_adamw_8bit", "engine": {"optimizer": "host"}}, "steps on the host", "adamw_8bit"),
        ({"optim": "schedule_free"}, "'lr_scheduler_type' is cosine", "lr_scheduler_type: constant"),
        ({"lr_groups": [{"match": "norm"}]}, "has neither learning_rate nor weight_decay", "add learning_rate"),
        ({"learning_rate": 0.0, "lr_groups": [{"match": "norm", "learning_rate": 1.0}]}, "which is 0", "above 0"),
        ({"lr_layer_decay": 1.5}, "'lr_layer_decay' must be a number", ""),
    ],
)
def test_what_is_refused(folder: Path, keys: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        made(folder, **keys)
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_library_that_is_missing_is_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "schedulefree" else found(name))
    write_recipe(folder, {**COMMON, "optim": "schedule_free", "lr_scheduler_type": "constant"})
    assert run() == 2
    said = capsys.readouterr().err
    assert "'optim: schedule_free' needs schedulefree, which is not installed" in said
    assert "pip install 'streamtune[optim]'" in said
    assert not (folder / "runs").exists()


def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is(folder: Path) -> None:
    recipe = made(folder, lr_groups=[{"match": "embed_token", "learning_rate": 1e-5}])
    with pytest.raises(ArgumentError, match="'embed_token' matches no trained parameter") as caught:
        groups_of(recipe)
    assert caught.value.where == "lr_groups.0.match"
    assert "embed_tokens" in caught.value.fix
    assert "layers.*.mlp" in caught.value.what


@pytest.mark.full
def test_lora_plus_and_matrices_of_adapters(folder: Path) -> None:
    groups = [{"match": "lora_B", "learning_rate": 1.6e-2}]
    recipe = made(folder, finetuning_type="lora", learning_rate=1e-3, lr_groups=groups, optim="muon")
    found, optimizer = groups_of(recipe)
    assert {rate for name, (rate, _) in found.items() if "lora_B" in name} == {1.6e-2}
    assert {rate for name, (rate, _) in found.items() if "lora_A" in name} == {1e-3}
    assert {group["rule"] for group in optimizer.param_groups} == {"muon"}
