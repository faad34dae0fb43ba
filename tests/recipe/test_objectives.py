"""The objective of a recipe: from the file, from the command, and in conflict."""

from __future__ import annotations

import pytest

from streamtune.distributed.deepspeed_config import PRESETS
from streamtune.errors import RecipeError
from streamtune.recipe import DpoRecipe, Recipe, dump_recipe, load_recipe
from streamtune.recipe.keys.engine import DEEPSPEED_PRESETS


def test_a_recipe_that_says_nothing_is_supervised_fine_tuning(write):
    recipe = load_recipe(write("")).recipe
    assert type(recipe) is Recipe
    assert recipe.objective == "sft"


@pytest.mark.parametrize(
    ("lines", "overrides", "objective"),
    [
        ("objective: dpo\nbeta: 0.2\n", (), None),
        ("objective: dpo\nbeta: 0.2\n", (), "dpo"),
        ("beta: 0.2\n", (), "dpo"),
        ("beta: 0.2\n", ("objective=dpo",), None),
        ("", ("beta=0.2", "objective=dpo"), None),
        ("rl: dpo\npref_beta: 0.2\n", (), None),
        ("", ("rl=dpo", "rl_beta=0.2"), None),
    ],
)
def test_what_it_says_and_what_the_command_says(write, lines, overrides, objective):
    recipe = load_recipe(write(lines), overrides, objective).recipe
    assert isinstance(recipe, DpoRecipe)
    assert (recipe.objective, recipe.beta) == ("dpo", 0.2)


def test_it_is_written_back_with_its_objective(write, tmp_path):
    recipe = load_recipe(write("loss_type: ipo\n"), (), "dpo").recipe
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == recipe


@pytest.mark.parametrize(("said", "command"), [("dpo", "sft"), ("sft", "dpo"), ("grpo", "dpo")])
def test_a_command_refuses_a_recipe_of_another_objective(write, said, command):
    path = write(f"seed: 1\nobjective: {said}\n")
    with pytest.raises(
        RecipeError, match=f"the recipe has objective {said}, and the command trains {command}"
    ) as caught:
        load_recipe(path, (), command)
    assert caught.value.where == f"{path}:5"
    assert caught.value.fix == f"run `streamtune {said} {path}`"


def test_a_key_of_another_objective_is_told_apart_from_a_typo(refused):
    error = refused("beta: 0.1\n")
    assert "'beta' is a key of" in error.what
    assert "add objective: dpo, or run `streamtune dpo`" in error.fix
    error = refused("", overrides=("rpo_alpha=1.0",))
    assert error.what == "'rpo_alpha' is a key of dpo recipes only"
    assert error.where == "--set rpo_alpha=1.0"
    assert "unknown key 'objectiv'" in refused("objectiv: dpo\n").what
    assert "did you mean 'objective'" in refused("objectiv: dpo\n").fix


def test_an_unknown_objective(refused):
    error = refused("objective: ppo\n")
    assert error.what == "'objective' must be 'sft', 'dpo' or 'grpo'; found 'ppo'"


def test_a_value_in_place_of_a_list(refused):
    assert refused('objective: grpo\nreward_funcs: ""\n').what == "'reward_funcs[0]' must be text; found ''"


@pytest.mark.parametrize(
    ("lines", "what", "line"),
    [
        ("beta: 0\n", "'beta' must be a number above 0; found 0", 5),
        ("label_smoothing: 0.5\n", "'label_smoothing' must be", 5),
        ("packing: true\n", "'packing' is not read by dpo", 5),
        ("overlength: split\n", "'overlength: split' cuts a row into several", 5),
        ("overlength: truncate\ntruncate_side: left\n", "'truncate_side' is not read by dpo: a prompt loses", 6),
        ("max_length: 64\nmax_prompt_length: 64\n", "must be below 'max_length' (64)", 6),
        ("loss_type: orpo\nreference_free: true\n", "'reference_free' has no effect: 'orpo' uses no reference", 6),
        ("reference_free: true\nref_model_name_or_path: a/b\n", "'ref_model_name_or_path' needs a reference", 6),
        ("reference_free: true\nprecompute_ref_log_probs: true\n", "'precompute_ref_log_probs' needs a reference", 6),
        ("loss_type: simpo\nprecompute_ref_log_probs: true\n", "needs a reference, and 'simpo' uses none", 6),
        ("loss_type: kto\nrpo_alpha: 0.5\n", "'rpo_alpha' is not read by the loss 'kto'", 6),
        ("undesirable_weight: 0.5\n", "'undesirable_weight' is not read by the loss 'sigmoid'", 5),
        ("share_prefix: sometimes\n", "'share_prefix' must be 'auto', 'always' or 'never'", 5),
    ],
)
def test_mistakes_in_a_preference_recipe(refused, lines, what, line):
    error = refused(f"objective: dpo\n{lines}")
    assert what in error.what
    assert error.where.endswith(f":{line}")


def test_a_reference_beside_the_recipe_is_found(write, tmp_path):
    (tmp_path / "reference").mkdir()
    recipe = load_recipe(write("ref_model_name_or_path: reference\n"), (), "dpo").recipe
    assert isinstance(recipe, DpoRecipe)
    assert recipe.ref_model_name_or_path == str(tmp_path / "reference")


def test_a_deepspeed_configuration_beside_the_recipe_is_found(write, tmp_path):
    for name in ("ds.json", "zero2"):
        (tmp_path / name).write_text("{}")
    assert load_recipe(write("deepspeed: ds.json\n")).recipe.deepspeed == str(tmp_path / "ds.json")
    assert load_recipe(write("deepspeed: zero2\n")).recipe.deepspeed == "zero2"
    assert tuple(PRESETS) == DEEPSPEED_PRESETS


def test_the_order_of_rows_excludes_a_choice_of_prompts(write, refused):
    lines = "objective: grpo\nreward_funcs: [length]\nshuffle: false\n"
    assert "'prompts: pass_rate' draws prompts by their pass rates" in refused(f"{lines}prompts: pass_rate\n").what
    load_recipe(write(f"{lines}prompts: pass_rate\nsft_steps: 2\n"))  # the supervised steps have an order


@pytest.mark.parametrize("value", ["[dpo]", "{name: dpo}", "1", "null"])
def test_an_objective_that_is_no_text_is_one_mistake(write, value):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(f"objective: {value}\n"), (), "dpo")
    assert "'objective' " in caught.value.what
