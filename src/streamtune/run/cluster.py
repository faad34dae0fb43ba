"""The cluster that a plan is made for: number of ranks and nodes, their bandwidths, and what the ranks share.

The command line sets the numbers of ranks and nodes. The recipe sets the rest: ``deepspeed``, ``fsdp``,
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
from streamtune.distributed.deepspeed_config import resolve_config, zero_stage
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits
from streamtune.plan.least_memory import longest_row_from
from streamtune.plan.rates import Device, data_sheet_links, nearest_device
from streamtune.plan.simulate.cluster import Buckets, Cluster, Engine, Form, Links, choose_sequence_split
from streamtune.plan.simulate.shard import count_heads
from streamtune.plan.simulate.workload import Workload
from streamtune.recipe.settings import BatchSettings, TrainingSettings
from streamtune.run.ranks import deepspeed_values
from streamtune.tasks.steps import count_micro_batches

DEVICES_PER_NODE = 8
"""Number of devices per node, if the command line does not set the number of nodes."""

PREFETCH = 50_000_000
"""Number of elements that DeepSpeed prefetches, if its configuration does not set it."""


@dataclass(frozen=True)
class SharedLimit:
    """Tokens of the longest row that fits in memory (within a few percent) if ``sequence_size`` ranks share each
    sequence."""

    sequence_size: int
    form: Form
    max_length: int


@dataclass(frozen=True)
class RequestedRanks:
    """Numbers of ranks and nodes from the command line; None if an option is not set."""

    ranks: int | None = None
    nodes: int | None = None


def cluster_of(recipe: TrainingSettings, model: nn.Module, requested: RequestedRanks, links: Links) -> Cluster:
    """Return the cluster that a recipe is planned for.

    Args:
        recipe: Recipe; its keys decide what the ranks share.
        model: Model on ``meta``, whose attention heads are counted.
        requested: Numbers of ranks and nodes; the default number of ranks is ``sequence_parallel_size``.
        links: Bandwidths between devices.

    Raises:
        ArgumentError: The recipe cannot run on these ranks; ``where`` names the key or option.
    """
    size = recipe.sequence_parallel_size
    if requested.nodes is not None and requested.ranks is None:
        raise ArgumentError(
            f"--nodes {requested.nodes} without --ranks",
            where="--nodes",
            fix="--ranks counts the devices of all nodes, such as "
            f"--ranks {DEVICES_PER_NODE * requested.nodes} --nodes {requested.nodes}",
        )
    for name, number in (("--ranks", requested.ranks), ("--nodes", requested.nodes)):
        if number is not None and number < 1:
            raise ArgumentError(f"{name} must be at least 1, found {number}", where=name)
    ranks = size if requested.ranks is None else requested.ranks
    nodes = requested.nodes or (
        ranks // DEVICES_PER_NODE if ranks % DEVICES_PER_NODE == 0 and ranks > DEVICES_PER_NODE else 1
    )
    Cluster(ranks, nodes, sequence_size=size)  # raises if the ranks cannot be divided
    shared = _one_rank_cluster(recipe, model, train.World(0, ranks, size))
    cluster = replace(shared, ranks=ranks, nodes=nodes, sequence_size=size, links=links)
    if ranks > 1 and cluster.engine == "none":
        cluster = replace(cluster, engine="ddp")
    if size > 1:
        cluster = replace(cluster, form=choose_sequence_split(recipe.sequence_parallel, size, count_heads(model)))
    micro_batches_per_step(recipe, cluster)
    return cluster


def cluster_of_run(recipe: TrainingSettings, model: nn.Module, world: train.World, device: torch.device) -> Cluster:
    """Return the ranks of the current run, their machines and what they share, for the planner."""
    if world.size == 1:
        return Cluster()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return cluster_of(
        recipe, model, RequestedRanks(world.size, max(1, world.size // ranks_per_node)), link_bandwidths(None, device)
    )


def micro_batches_per_step(recipe: BatchSettings, cluster: Cluster) -> int:
    """Return the number of micro-batches per rank in an optimizer step."""
    return count_micro_batches(recipe, train.World(0, cluster.ranks, cluster.sequence_size))


def link_bandwidths(table_device: Device | None, local_device: torch.device) -> Links:
    """Return the bandwidths between devices of a machine and between machines.

    Args:
        table_device: Device from the table of devices; None for the local device.
        local_device: Local device. An accelerator gets the bandwidths of the device in the table with the nearest
            memory size. CPU ranks get an assumed 5 GB/s within a machine and 1 GB/s between machines.
    """
    if table_device is not None:
        return data_sheet_links(table_device)
    if local_device.type == "cuda":
        return data_sheet_links(nearest_device(torch.cuda.get_device_properties(local_device).total_memory))
    return Links()


def longest_rows_if_shared(
    recipe: TrainingSettings, workload: Workload, limits: Limits, notify: Callable[[str], None]
) -> Iterator[SharedLimit]:
    """Yield the longest row that fits if all ranks of a node share each sequence, then if all ranks do.

    Args:
        recipe: Recipe; schedule fields that it sets are kept.
        workload: Training step whose ranks do not share sequences.
        limits: Memory of a rank.
        notify: Function called with a message before each search.
    """
    cluster, heads = workload.cluster, count_heads(workload.make_model())
    for size in sorted({cluster.ranks_per_node, cluster.ranks} - {1}):
        notify(f"searching for the longest row that {size} ranks can share")
        form = choose_sequence_split("auto", size, heads)
        shared = replace(workload, cluster=cluster.with_sequence_size(size, form))
        if longest := longest_row_from(shared, limits, recipe.engine.schedule_fields()):
            yield SharedLimit(size, form, longest)


def _one_rank_cluster(recipe: TrainingSettings, model: nn.Module, world: train.World) -> Cluster:
    """Return a cluster of one rank that uses the recipe's DDP, FSDP2 or ZeRO stage."""
    if recipe.fsdp:
        return Cluster(engine="fsdp")
    if recipe.deepspeed is None:
        return Cluster()
    config = resolve_config(recipe.deepspeed, deepspeed_values(recipe, model, world))
    zero, stage = config["zero_optimization"], zero_stage(config)
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
        optimizer_offload=_is_offloaded(zero, "offload_optimizer"),
        weights_offload=_is_offloaded(zero, "offload_param"),
    )


def _is_offloaded(zero: dict[str, Any], section_name: str) -> bool:
    section = zero.get(section_name)
    return isinstance(section, dict) and section.get("device") not in (None, "none")
