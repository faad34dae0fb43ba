"""Describe the ranks that share a recipe's step, for a plan: their number, their nodes, and the engine that joins them.

The command line gives the numbers. The recipe gives what they share, and by which engine: ``deepspeed``, ``fsdp``,
``sequence_parallel_size``, ``sequence_parallel``, ``train_batch_size``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from streamtune import train
from streamtune.distributed.deepspeed_config import resolve_config, stage_of
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits
from streamtune.plan.rates import Device, links_of, nearest_device
from streamtune.plan.refusal import longest_of
from streamtune.plan.simulate.cluster import Buckets, Cluster, Engine, Form, Links, form_of
from streamtune.plan.simulate.shard import heads_of
from streamtune.plan.simulate.workload import Workload
from streamtune.recipe.settings import BatchSettings, TrainingSettings
from streamtune.run.ranks import config_values
from streamtune.tasks.steps import accumulation

NODE = 8
"""Devices of a node where nothing is said."""

PREFETCH = 50_000_000
"""Elements that DeepSpeed gathers ahead where a configuration does not say."""


@dataclass(frozen=True)
class Wider:
    """The longest row that would fit, to some percent, if more ranks shared a sequence."""

    sequence_size: int
    form: Form
    max_length: int


@dataclass(frozen=True)
class RanksAsked:
    """The number of ranks and nodes on the command line; None where it is not given."""

    ranks: int | None = None
    nodes: int | None = None


def cluster_of(recipe: TrainingSettings, model: nn.Module, asked: RanksAsked, links: Links) -> Cluster:
    """Return the ranks of a recipe.

    Args:
        model: The model on ``meta``, for its heads.
        asked: The number of ranks. Without one there are as many as share a sequence.

    Raises:
        ArgumentError: The ranks cannot be laid out as asked; the error names the key or option.
    """
    size = recipe.sequence_parallel_size
    if asked.nodes is not None and asked.ranks is None:
        raise ArgumentError(
            f"--nodes {asked.nodes} without --ranks",
            where="--nodes",
            fix=f"--ranks counts the devices of all nodes, such as --ranks {NODE * asked.nodes} --nodes {asked.nodes}",
        )
    for name, number in (("--ranks", asked.ranks), ("--nodes", asked.nodes)):
        if number is not None and number < 1:
            raise ArgumentError(f"{name} takes a number from 1 up, not {number}", where=name)
    ranks = size if asked.ranks is None else asked.ranks
    nodes = asked.nodes or (ranks // NODE if ranks % NODE == 0 and ranks > NODE else 1)
    Cluster(ranks, nodes, sequence_size=size)  # what cannot be divided is refused first
    shared = _shared(recipe, model, train.World(0, ranks, size))
    cluster = replace(shared, ranks=ranks, nodes=nodes, sequence_size=size, links=links)
    if ranks > 1 and cluster.engine == "none":
        cluster = replace(cluster, engine="ddp")
    if size > 1:
        cluster = replace(cluster, form=form_of(recipe.sequence_parallel, size, heads_of(model)))
    accumulation_of(recipe, cluster)
    return cluster


def cluster_here(recipe: TrainingSettings, model: nn.Module, world: train.World, device: torch.device) -> Cluster:
    """Return the ranks of this run, by the environment variables of its launcher."""
    if world.size == 1:
        return Cluster()
    on_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return cluster_of(recipe, model, RanksAsked(world.size, max(1, world.size // on_a_node)), links_for(None, device))


def accumulation_of(recipe: BatchSettings, cluster: Cluster) -> int:
    """Return the number of micro-batches of a rank in one optimizer step."""
    return accumulation(recipe, train.World(0, cluster.ranks, cluster.sequence_size))


def links_for(device: Device | None, here: torch.device) -> Links:
    """Return the links between devices of a kind; for the local device, those of the nearest device in the table.

    CPU ranks communicate by loopback, for which 5 GB/s are assumed, and 1 GB/s between machines.
    """
    if device is not None:
        return links_of(device)
    if here.type == "cuda":
        return links_of(nearest_device(torch.cuda.get_device_properties(here).total_memory))
    return Links()


def wider_of(
    recipe: TrainingSettings, workload: Workload, limits: Limits, notify: Callable[[str], None]
) -> Iterator[Wider]:
    """Find the longest rows if the ranks of a node shared each sequence, and if all ranks did.

    Args:
        workload: A workload whose ranks share no sequence.
        limits: The memory of a rank.
        notify: Called with its name before what takes a while.
    """
    cluster, heads = workload.cluster, heads_of(workload.make_model())
    for size in sorted({cluster.ranks_per_node, cluster.ranks} - {1}):
        notify(f"how long a row {size} ranks would hold together")
        form = form_of("auto", size, heads)
        shared = replace(workload, cluster=cluster.shared_by(size, form))
        if longest := longest_of(shared, limits, recipe.engine.written()):
            yield Wider(size, form, longest)


def _shared(recipe: TrainingSettings, model: nn.Module, world: train.World) -> Cluster:
    """Return the engine of a recipe, as a cluster of one rank."""
    if recipe.fsdp:
        return Cluster(engine="fsdp")
    if recipe.deepspeed is None:
        return Cluster()
    config = resolve_config(recipe.deepspeed, config_values(recipe, model, world))
    zero, stage = config["zero_optimization"], stage_of(config)
    engines: tuple[Engine, ...] = ("zero1", "zero2", "zero3")
    return Cluster(
        engine="zero3_offload" if recipe.deepspeed == "zero3_offload" else engines[stage - 1],
        buckets=Buckets(
            reduce=int(zero.get("reduce_bucket_size", Buckets.reduce)),
            buffers=2 if stage < 3 and zero.get("overlap_comm") else 1,
            prefetch=int(zero.get("stage3_prefetch_bucket_size", PREFETCH)),
            sub_group=int(zero.get("sub_group_size", Buckets.sub_group)),
            reuse=int(zero.get("stage3_max_reuse_distance", Buckets.reuse)),
        ),
        optimizer_offload=_offloads(zero, "offload_optimizer"),
        weights_offload=_offloads(zero, "offload_param"),
    )


def _offloads(zero: dict[str, Any], name: str) -> bool:
    section = zero.get(name)
    return isinstance(section, dict) and section.get("device") not in (None, "none")
