"""The ``engine:`` group and the schedule made from it without a planner."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from streamtune.recipe import EngineSpec, dump_recipe, load_recipe
from streamtune.recipe.engine import SCHEDULE_KEYS
from streamtune.run.streaming import make_schedule
from streamtune.schedule import Schedule


def test_every_choice_of_a_schedule_is_a_key():
    assert set(SCHEDULE_KEYS) == set(Schedule.__dataclass_fields__)
    assert set(SCHEDULE_KEYS) <= set(EngineSpec.model_fields)


def test_what_is_not_written_is_the_schedules_own_default():
    assert make_schedule(EngineSpec()) == make_schedule(EngineSpec(schedule="fixed")) == Schedule()


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ({"chunk_size": 64, "head_chunk_size": 8}, {"chunk_size": 64, "head_chunk_size": 8}),
        ({"keep_kv": True}, {"keep_kv": "device"}),
        ({"keep_kv": False}, {}),
        ({"keep_kv": "host", "keep_attention": "host"}, {"keep_kv": "host", "keep_attention": "host"}),
        ({"offload": "disk", "offload_dir": "x"}, {"offload": "disk", "offload_dir": "x"}),
        ({"offload_dir": "x"}, {}),
        ({"device_layers": 2}, {"offload": "host", "device_layers": 2}),
        ({"device_layers": 2, "offload_dir": "x"}, {"offload": "disk", "offload_dir": "x", "device_layers": 2}),
        ({"device_layers": 0, "keep_layers": 3}, {"keep_layers": 3}),
        ({"segment_size": 3}, {"levels": 2, "segment_size": 3}),
        ({"levels": 2, "stream_grads": True}, {"levels": 2, "stream_grads": True}),
        ({"grad_dtype": "param", "device_memory": "80GiB"}, {"grad_dtype": "param"}),
    ],
)
def test_what_is_written_is_in_the_schedule(written: dict[str, Any], made: dict[str, Any]):
    assert make_schedule(EngineSpec(**written)) == Schedule(**made)


@pytest.mark.parametrize("size", ["80GiB", "1.5TB", "512 MiB", "80G"])
def test_sizes(size: str):
    assert EngineSpec(device_memory=size).device_memory == size


@pytest.mark.parametrize(
    "wrong",
    [{"device_memory": "80"}, {"device_memory": "80 gib"}, {"levels": True}, {"levels": 1.0}, {"device_layers": -1}],
)
def test_wrong_values(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        EngineSpec(**wrong)


def test_a_resolved_recipe_says_the_same(write):
    text = "engine: {keep_kv: no, keep_attention: host, levels: 2, device_memory: 80GiB, stream_grads: false}\n"
    recipe = load_recipe(write(text)).recipe
    assert recipe.engine.keep_kv == "no"
    again = load_recipe(write(dump_recipe(recipe), before="", name="again.yaml")).recipe
    assert again == recipe
