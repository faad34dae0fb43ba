"""The ``engine:`` group and the schedule made from it without a planner."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe import EngineSpec, dump_recipe, load_recipe
from streamtune.run.device import make_schedule
from streamtune.schedule import CHOICES, DEFAULTS, Schedule


def test_every_choice_of_a_schedule_is_a_key():
    assert set(DEFAULTS) == set(Schedule.__dataclass_fields__)
    assert set(DEFAULTS) <= set(EngineSpec.model_fields)


def test_what_the_keys_say_of_their_defaults_is_so():
    words = {"None": "the size for which the fewest layer inputs are in memory at once", "False": "false"}
    for name, default in DEFAULTS.items():
        description = " ".join((EngineSpec.model_fields[name].description or "").split())
        described = re.search(r"Default with `schedule: fixed`: (.+)\.$", description)
        if described is None:
            assert EngineSpec.model_fields[name].default == default
        else:
            assert described[1] == words.get(str(default), str(default)), name


@pytest.mark.parametrize("name", CHOICES)
def test_a_key_takes_what_the_schedule_takes(name: str):
    more = {"offload": {"offload_dir": "x"}, "fetch_dtype": {"weights": "host"}}.get(name, {})
    for word in CHOICES[name]:
        needs = more if word in ("disk", "bfloat16") else {}
        made = EngineSpec(**{name: word}, **needs).schedule_fields()
        assert made[name] == getattr(Schedule(**{name: word}, **more), name)


@pytest.mark.parametrize(
    ("wrong", "what", "fix"),
    [
        ({"device_layers": 1}, "device_layers needs offloaded layer inputs, and offload is device",
         "set offload to host, or leave device_layers out"),
        ({"segment_size": 2}, "segment_size needs two levels, and levels is 1",
         "set levels to 2, or leave segment_size out"),
        ({"offload": "disk"}, "offload='disk' needs a directory",
         "set offload_dir to a directory on a fast local disk with space for the layer inputs"),
        ({"fetch_dtype": "bfloat16"}, "fetch_dtype needs weights on the host, and weights is device",
         "set weights to host, or leave fetch_dtype out"),
        ({"weights": "host", "keep_layers": 2},
         "keep_layers keeps the weights of layers on the device until the backward, and weights='host' does not",
         "set keep_layers to 0, or leave keep_layers out"),
        ({"weights": "host", "order": "chunk"},
         "order='chunk' reads the weights of all layers for every chunk, and weights='host' would copy them each "
         "time", "set order to layer, or leave order out"),
    ],
)  # fmt: skip
def test_contradictions_in_a_program(wrong: dict[str, Any], what: str, fix: str):
    with pytest.raises(ArgumentError) as caught:
        Schedule(**wrong)
    assert (caught.value.what, caught.value.fix) == (what, fix)
    with pytest.raises(ValidationError, match="engine"):
        EngineSpec(schedule="fixed", **wrong)


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


def test_the_order_of_chunks():
    assert make_schedule(EngineSpec(schedule="fixed", order="chunk")) == Schedule(order="chunk", keep_kv="device")
    assert make_schedule(EngineSpec(order="chunk", keep_kv="host", levels=2)).keep_kv == "host"


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("engine: {order: rows}", "'engine.order'", "must be 'auto', 'layer' or 'chunk'"),
        ("engine: {order: chunk, keep_kv: no}", "stores keys and values in place of layer inputs", "keep_kv: device"),
        ("engine: {order: chunk, offload: host, device_layers: 2}", "stores only one", "order: layer"),
        ("engine: {order: chunk}\ndeepspeed: zero3", "once for every chunk", "zero2"),
        ("engine: {order: chunk}\nsequence_parallel_size: 2", "needs whole rows", "order: layer"),
    ],
)
def test_what_the_order_of_chunks_excludes(write, text: str, what: str, fix: str):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(text + "\n"))
    assert what in str(caught.value)
    assert fix in str(caught.value)
    assert re.search(r"\.yaml:\d+", str(caught.value))
