"""Values that ranks exchange; :func:`tests.distributed.rank_group.run_ranks` runs these functions on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed

from streamtune.data.templates import TemplateLimitError
from streamtune.errors import DataError, StreamTuneError
from streamtune.train.world import World

MANY = {1: (2.5, float("inf")), "a": [None, True, b"\x00\xff"], (1, "b"): {"c": 2**80}, "path": Path("x/y")}


def run(case: str) -> Any:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    world = World(rank, size, sequence_size=2 if case == "sequence" else 1)
    found = CASES[case](world)
    world.barrier()  # all are at the same collective still
    return found


def values(world: World) -> Any:
    found = world.gather_all_ranks((world.rank, MANY, "x" * (10_000 * world.rank)))
    assert found == [(rank, MANY, "x" * (10_000 * rank)) for rank in range(world.size)]
    assert world.run_on_rank_0(lambda: MANY if world.is_main else 1 / 0) == MANY
    return True


def sequence(world: World) -> Any:
    return world.gather_data_ranks(world.rank)


def unsendable(world: World) -> Any:
    """One rank has a value that cannot be sent: all ranks raise an error, and none waits."""
    said = []
    for attempt in (
        lambda: world.gather_all_ranks(torch.nn.Linear(1, 1) if world.rank == 1 else 1),
        lambda: world.run_on_rank_0(lambda: torch.zeros(1)),
    ):
        try:
            attempt()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    return world.gather_all_ranks(said)


def errors(world: World) -> Any:
    """An error of rank 0 is raised on the other ranks with its class, or the nearest known class."""

    def fail() -> None:
        raise TemplateLimitError("too long", where="a.jinja:3", fix="shorten it")

    def fail_plainly() -> None:
        raise ZeroDivisionError("by nothing")

    def fail_on_1() -> None:
        if world.rank == 1:
            raise DataError("no rows", where="rows.jsonl:7", fix="add some")

    said = []
    for attempt in (
        lambda: world.run_on_rank_0(fail),
        lambda: world.run_on_rank_0(fail_plainly),
        lambda: world.run_on_all_ranks(fail_on_1),
    ):
        try:
            attempt()
        except StreamTuneError as error:
            said.append([type(error).__name__, error.what, error.where, error.fix, error.exit_code])
        except ZeroDivisionError as error:
            said.append([type(error).__name__, str(error)])
    return world.gather_all_ranks(said)


def garbage(world: World) -> Any:
    """One rank sends invalid bytes, another announces an impossible size."""
    said = []
    for size, data in ((4, b"\x80\x04N."), (1 << 60, b""), (-1, b"")):
        try:
            if world.is_main:
                distributed.broadcast(torch.tensor([size]), src=0)
                if data:
                    distributed.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0)
            else:
                world.run_on_rank_0(lambda: None)
        except StreamTuneError as error:
            said.append([type(error).__name__, error.what])
    return world.gather_all_ranks(said)


CASES = {case.__name__: case for case in (values, sequence, unsendable, errors, garbage)}
