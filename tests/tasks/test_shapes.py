"""Shapes of micro-batches by recipe and length. The micro-batches of a run must not be larger."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from streamtune import data
from streamtune.data.record_table import Stored, Tree, open_record_table
from streamtune.plan.simulate.scored import Scored
from streamtune.recipe import DpoRecipe, GrpoRecipe, Recipe
from streamtune.tasks import task_of
from streamtune.tasks.dpo import make_scaled_shape_function
from streamtune.tasks.grpo.groups import BatchLayout, Group, make_micro_batches
from streamtune.tasks.grpo.task import Grpo
from streamtune.tasks.preference import batch_trees
from streamtune.tasks.steps import count_micro_batches
from streamtune.train import World

COMMON: dict[str, Any] = {"model_name_or_path": "none", "datasets": [{"path": "none"}]}


def dpo(**keys: Any) -> DpoRecipe:
    return DpoRecipe(**COMMON, **keys)


def grpo(**keys: Any) -> GrpoRecipe:
    return GrpoRecipe(**COMMON, reward_funcs="none", **keys)


def shape(recipe: Recipe, length: int, batch_size: int) -> Scored:
    completions = task_of(recipe).make_shape_function()
    assert completions is not None
    return completions(length, batch_size)


def test_rows_are_no_completions() -> None:
    assert task_of(Recipe(**COMMON)).make_shape_function() is None
    assert task_of(Recipe(**COMMON)).unit_noun == "row"


@pytest.mark.parametrize(
    ("keys", "length", "trees", "forwards"),
    [
        ({}, 100, ((49, (51, 51)),), 1),
        ({"max_prompt_length": 20}, 100, ((19, (81, 81)),), 1),
        ({"max_prompt_length": 200, "max_length": 500}, 100, ((49, (51, 51)),), 1),
        ({"loss_type": "simpo"}, 4, ((1, (3, 3)),), 0),
        ({"reference_free": True}, 4, ((1, (3, 3)),), 0),
        ({"precompute_ref_log_probs": True}, 4, ((1, (3, 3)),), 0),
        ({"loss_type": "apo_zero_unpaired"}, 100, ((49, (51,)),), 1),
        ({"loss_type": "kto"}, 100, ((49, (51,)),), 3),
    ],
)
def test_preferences(keys: dict[str, Any], length: int, trees: Any, forwards: float) -> None:
    found = shape(dpo(**keys), length, 1)
    assert (found.trees, found.forwards, found.share) == (trees, forwards, True)
    assert found.as_separate_rows().length == length
    assert shape(dpo(**keys), length, 3).trees == trees * 3
    assert task_of(dpo(**keys)).unit_noun == ("pair" if len(trees[0][1]) == 2 else "row")


@pytest.mark.parametrize(
    ("keys", "length", "trees", "forwards"),
    [
        ({"max_completion_length": 30}, 100, ((69, (31,) * 8),), 0),
        ({"max_completion_length": 512}, 100, ((49, (51,) * 8),), 0),
        ({"max_completion_length": 30, "num_generations": 4, "beta": 0.1}, 100, ((69, (31,) * 4),) * 2, 1),
        ({"beta": 0.1, "num_iterations": 4}, 100, ((49, (51,) * 8),), 0.5),
    ],
)
def test_rewards(keys: dict[str, Any], length: int, trees: Any, forwards: float) -> None:
    found = shape(grpo(**keys), length, 8)
    assert (found.trees, found.forwards, found.entropy) == (trees, forwards, True)
    assert found.as_separate_rows().length == length


def test_a_recipe_that_shares_nothing() -> None:
    assert shape(dpo(share_prefix="never"), 100, 1).share is False
    completions = task_of(dpo()).make_shape_function(share=False)
    assert completions is not None
    assert (completions(100, 2).num_rows, completions(100, 2).length) == (4, 100)


def test_a_run_whose_data_is_known() -> None:
    like = make_scaled_shape_function(
        lambda trees, common: Scored(trees, True, common=common), ((600, (300, 401)),), 1000
    )
    assert like(1000, 1).trees == ((600, (300, 401)),)
    assert like(500, 1).trees == ((300, (150, 200)),)
    assert like(4000, 1).trees == ((600, (300, 401)),)


def test_first_turns_that_the_largest_pair_shares_are_planned_once() -> None:
    turns = list(range(3, 40))
    pairs = [Tree([1, 2], [[5] * 9, [6] * 9]), Tree([1, 2, 3], [[*turns, 5, 6, 7], [*turns, 8]])]
    with open_record_table(Tree) as (writer, tables):
        for pair in pairs:
            writer.append(pair)
    prepared: Any = SimpleNamespace(training=Stored(Tree, tables[0], np.arange(2)))
    for keys, count in (({}, 2), ({"loss_type": "kto"}, 2)):
        task = task_of(dpo(per_device_train_batch_size=count, **keys))
        completions = task.make_measured_shape_function(prepared, pairs[1].longest_row_tokens, share=True)
        assert completions is not None
        planned = completions(pairs[1].longest_row_tokens, count)
        batch = batch_trees([pairs[1], replace(pairs[1], prompt=[9, 8, 7])], pad_token_id=0, share=True)
        assert planned.trees == ((2 + 37, (4, 2)),) * 2
        assert planned.length == batch["input_ids"].shape[1]
        assert torch.equal(planned.targets().sort()[0], batch["shift_labels"].clamp(max=0).sort()[0])
        assert planned.num_targets == (batch["shift_labels"] != -100).sum()
        apart = batch_trees([pairs[1]] * 2, pad_token_id=0, share=False)
        assert planned.as_separate_rows().num_targets == (apart["shift_labels"] != -100).sum()
        half = completions(pairs[1].longest_row_tokens // 2, count)
        assert half.common == (18, 18)
        separate = task.make_measured_shape_function(prepared, pairs[1].longest_row_tokens, share=False)
        assert separate is not None
        assert separate(pairs[1].longest_row_tokens, count).length == pairs[1].longest_row_tokens


@pytest.mark.parametrize(
    ("keys", "held"),
    [
        ({}, True),
        ({"finetuning_type": "lora"}, False),
        ({"finetuning_type": "lora", "ref_model_name_or_path": "other"}, True),
        ({"loss_type": "orpo"}, False),
        ({"precompute_ref_log_probs": True}, False),
    ],
)
def test_whether_a_second_model_is_held(keys: dict[str, Any], held: bool) -> None:
    assert task_of(dpo(**keys)).has_second_model is held
    assert task_of(Recipe(**COMMON)).has_second_model is False
    assert task_of(grpo(beta=0.1)).has_second_model
    assert not task_of(grpo()).has_second_model


@pytest.mark.parametrize(
    ("keys", "ranks", "micro_batches"),
    [
        ({"batching": "tokens", "tokens_per_batch": 8192}, 1, 8),
        ({"batching": "tokens", "tokens_per_batch": 8192, "per_device_train_batch_size": 2}, 2, 2),
        ({"batching": "tokens", "tokens_per_batch": 1024}, 1, 2),
        ({"batching": "buckets", "tokens_per_batch": 1024}, 1, 2),
        ({"batching": "buckets", "tokens_per_batch": 1024, "packing": True}, 1, 1),
        ({"batching": "buckets", "tokens_per_batch": 8192, "packing": True}, 4, 2),
    ],
)
def test_the_step_that_is_planned_where_tokens_are_counted(
    keys: dict[str, Any], ranks: int, micro_batches: int
) -> None:
    """The planned step has rows of ``max_length``; at least two micro-batches if shorter rows would make several."""
    recipe = Recipe(**COMMON, max_length=1024, **keys)
    assert count_micro_batches(recipe, World(0, ranks)) == micro_batches
    assert task_of(recipe).planned_length(700) == (1024 if recipe.packing else 700)


@pytest.mark.parametrize("make", [dpo, grpo, lambda **keys: Recipe(**COMMON, **keys)])
def test_a_trial_accumulates_gradients_if_the_run_does(make: Any) -> None:
    """A second micro-batch is computed while the gradients of the first are in memory."""
    for keys, count in (
        ({}, 1),
        ({"train_batch_size": 8}, 1),
        ({"train_batch_size": 32}, 2),
        ({"gradient_accumulation_steps": 4}, 2),
    ):
        assert len(task_of(make(per_device_train_batch_size=8, **keys))._trial_micro_batches()) == count


@pytest.mark.parametrize(("group", "size"), [(8, 8), (8, 4), (4, 8), (4, 6), (3, 5), (2, 3), (5, 4)])
def test_a_micro_batch_meets_no_more_prompts_than_are_planned_for(group: int, size: int) -> None:
    """Completions of further prompts go into the next micro-batch, also if completions are left out."""
    recipe = grpo().model_copy(update={"num_generations": group})
    most = Grpo(recipe).max_prompts_per_batch(size)
    prompts = [data.Prompt([1, 2, number + 3], "ask", origin="rows:1") for number in range(12)]
    for leaves_out in (False, True):
        groups = [
            Group(
                prompt=number,
                completions=[[7, 8, 9]] * group,
                truncated=[False] * group,
                rewards=[1.0] * group,
                scores={"one": [1.0] * group},
                advantages=[0.0 if leaves_out and index else 1.0 for index in range(group)],
            )
            for number in range(12)
        ]
        layout = BatchLayout(size, 0, True, True, False, False, most)
        batches = make_micro_batches(groups, prompts, layout)
        met = [len(batch.origins) for batch in batches]
        assert max(met) <= most
        trained = 12 if leaves_out else 12 * group
        assert sum(batch.num_rows for batch in batches) == trained
        if not leaves_out:
            assert len(batches) == -(-trained // size)
