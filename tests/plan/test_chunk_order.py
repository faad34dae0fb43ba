"""The planner chooses ``order: chunk`` if it fits a longer row, or if it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from streamtune import Schedule
from streamtune.errors import ArgumentError
from streamtune.models import ModelOptions, build_meta_model
from streamtune.plan import Limits, Rates, choose
from streamtune.plan.choices import allows_chunk_order
from streamtune.plan.simulate import Simulation, Workload, simulate
from streamtune.plan.simulate.cluster import Cluster

RATES = Rates("a device", 1e13, 1e13, 1e13, 1e12, 1e11, launch_seconds=1e-8)
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
"""Layer inputs of 512 bytes a token and layer; keys, values and their gradients of 192."""
LEVEL = {"levels": 1, "stream_grads": False}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), foreach=False)


@pytest.fixture(scope="module")
def workload() -> Workload:
    model = build_meta_model(CONFIG, ModelOptions("bfloat16"))
    return Workload(lambda: model, 65536, make_optimizer=sgd)


@pytest.fixture(scope="module")
def known() -> Any:
    found: dict[Schedule, Simulation] = {}

    def remembered(asked: Workload, schedule: Schedule) -> Simulation:
        if schedule not in found:
            found[schedule] = simulate(asked, schedule)
        return found[schedule]

    return remembered


@pytest.fixture(scope="module")
def between(workload: Workload, known: Any) -> Limits:
    """Memory that fits a step with ``order: chunk``, but none with ``order: layer`` and one level."""
    by_chunks, by_layers = (
        known(workload, Schedule(1024, 256, order=order, **LEVEL)).peak_bytes for order in ("chunk", "layer")
    )
    assert by_chunks < 0.8 * by_layers
    return Limits((by_chunks + by_layers) // 2, 0, margin=0.0)


@pytest.mark.full
def test_it_is_chosen_where_nothing_else_fits(workload: Workload, known: Any, between: Limits) -> None:
    plan = choose(workload, between, RATES, fixed=LEVEL, simulate=known)
    assert plan.fits
    assert plan.schedule.order == "chunk"
    assert plan.simulation.terms["keys and values"] > 0


@pytest.mark.full
def test_the_order_of_layers_stays_where_it_is_given(workload: Workload, known: Any, between: Limits) -> None:
    with pytest.raises(ArgumentError, match="no schedule fits"):
        choose(workload, between, RATES, fixed={**LEVEL, "order": "layer"}, simulate=known)


def test_with_room_it_is_not_chosen_unless_it_is_given(workload: Workload, known: Any) -> None:
    room = Limits(1 << 40, 1 << 40)
    assert choose(workload, room, RATES, simulate=known).schedule.order == "layer"
    given = choose(workload, room, RATES, fixed={"order": "chunk"}, simulate=known).schedule
    assert (given.order, given.levels, given.keep_kv) == ("chunk", 1, "device")


def test_what_excludes_it() -> None:
    alone = Cluster()
    assert allows_chunk_order({}, alone)
    assert not allows_chunk_order({"order": "layer"}, alone)
    assert not allows_chunk_order({}, Cluster(ranks=2, sequence_size=2))


@pytest.mark.full
@pytest.mark.parametrize("wanted", [2048, 8192])
def test_chunks_are_the_largest_that_fit(workload: Workload, known: Any, wanted: int) -> None:
    """One tier has no memory, so it is neither full nor empty."""
    kept = {"order": "chunk", "head_chunk_size": 256, "levels": 1}
    steps = [known(workload, Schedule(chunk_size=size, **kept)).peak_bytes for size in (wanted, 2 * wanted)]
    limits = Limits(sum(steps) // 2, 0, margin=0.0)
    plan = choose(workload, limits, RATES, fixed={"order": "chunk", "levels": 1}, simulate=known)
    assert plan.schedule.chunk_size == wanted
