"""A recipe to the devices its step is shared by, for a plan: how many, on how many nodes, and what engine.

The command line says how many; what they do with each other is the recipe's: ``deepspeed``, ``fsdp``,
``sequence_parallel_size``, ``sequence_parallel``, ``train_batch_size``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamtune.errors import ArgumentError, did_you_mean
from streamtune.plan.choices import Limits
from streamtune.plan.cluster import Buckets, Cluster, Engine, Form, Links, form_of
from streamtune.plan.cost import links_of
from streamtune.plan.devices import Device, nearest_device
from streamtune.plan.longer import longest_of
from streamtune.plan.simulate import Workload
from streamtune.plan.strip import heads_of
from streamtune.recipe.schema import Recipe

__all__ = ["RanksAsked", "Wider", "accumulation_of", "cluster_of", "links_for", "wider_of"]

PRESETS: tuple[Engine, ...] = ("zero1", "zero2", "zero3", "zero3_offload")

NODE = 8
"""Devices of a node where nothing is said."""

ALL = 500_000_000
"""Elements of DeepSpeed's bucket of gradients, or all of them where there are fewer."""


@dataclass(frozen=True)
class Wider:
    """What it would allow if more ranks shared a sequence: its longest row, to some percent."""

    sequence_size: int
    form: Form
    max_length: int


@dataclass(frozen=True)
class RanksAsked:
    """What the command line says; None where it says nothing."""

    ranks: int | None = None
    nodes: int | None = None


def cluster_of(recipe: Recipe, model: nn.Module, asked: RanksAsked, links: Links) -> Cluster:
    """The ranks of a recipe.

    Args:
        recipe: The recipe.
        model: On ``meta``, for its heads.
        asked: How many. Without a number there are as many as share a sequence.
        links: What joins them.

    Raises:
        ArgumentError: They cannot be laid out as it says, with the key or option that does.
    """
    size = recipe.sequence_parallel_size
    if asked.nodes is not None and asked.ranks is None:
        raise ArgumentError(
            f"--nodes {asked.nodes} without --ranks",
            where="--nodes",
            mend=f"--ranks counts the devices of all nodes, such as --ranks {NODE * asked.nodes} --nodes {asked.nodes}",
        )
    for name, number in (("--ranks", asked.ranks), ("--nodes", asked.nodes)):
        if number is not None and number < 1:
            raise ArgumentError(f"{name} takes a number from 1 up, not {number}", where=name)
    if recipe.deepspeed is not None and recipe.fsdp:
        raise ArgumentError("'deepspeed' and 'fsdp' exclude each other", where="fsdp", mend="keep one of them")
    ranks = size if asked.ranks is None else asked.ranks
    nodes = asked.nodes or (ranks // NODE if ranks % NODE == 0 and ranks > NODE else 1)
    cluster = replace(_shared(recipe), ranks=ranks, nodes=nodes, sequence_size=size, links=links)
    if ranks > 1 and cluster.engine == "none":
        cluster = replace(cluster, engine="ddp")
    if size > 1:
        cluster = replace(cluster, form=form_of(recipe.sequence_parallel, size, heads_of(model)))
    accumulation_of(recipe, cluster)
    return cluster


def accumulation_of(recipe: Recipe, cluster: Cluster) -> int:
    """Micro-batches of a rank in one optimizer step.

    Raises:
        ArgumentError: The rows of a step are no multiple of those of all ranks' micro-batches.
    """
    if recipe.train_batch_size is None:
        return recipe.gradient_accumulation_steps
    at_once = recipe.per_device_train_batch_size * cluster.data_size
    if recipe.train_batch_size % at_once:
        raise ArgumentError(
            f"train_batch_size is {recipe.train_batch_size}, and {cluster.data_size} groups of ranks with "
            f"{recipe.per_device_train_batch_size} rows each compute {at_once} at a time, which does not divide it",
            where="train_batch_size",
            mend=f"write a multiple of {at_once}, a smaller per_device_train_batch_size, or other --ranks",
        )
    return recipe.train_batch_size // at_once


def links_for(device: Device | None, here: torch.device) -> Links:
    """What joins devices of a kind: by the table, that of the device nearest to one at hand.

    CPU ranks talk by loopback, for which 5 GB/s are assumed, and 1 GB/s between machines.
    """
    if device is not None:
        return links_of(device)
    if here.type == "cuda":
        return links_of(nearest_device(torch.cuda.get_device_properties(here).total_memory))
    return Links()


def wider_of(recipe: Recipe, workload: Workload, limits: Limits, notify: Callable[[str], None]) -> Iterator[Wider]:
    """What sharing sequences within a node, and between all ranks, would allow.

    Args:
        recipe: The recipe.
        workload: Whose ranks share none.
        limits: The memory of a rank.
        notify: Told what takes a while.
    """
    cluster, heads = workload.cluster, heads_of(workload.make_model())
    for size in sorted({cluster.ranks_per_node, cluster.ranks} - {1}):
        notify(f"how long a row {size} ranks would hold together")
        form = form_of("auto", size, heads)
        shared = replace(workload, cluster=cluster.shared_by(size, form))
        if longest := longest_of(shared, limits, recipe.engine.written()):
            yield Wider(size, form, longest)


def _shared(recipe: Recipe) -> Cluster:
    """The engine of a recipe, on one rank."""
    if recipe.fsdp:
        return Cluster(engine="fsdp")
    if recipe.deepspeed is None:
        return Cluster()
    for engine in PRESETS:
        if engine != recipe.deepspeed:
            continue
        return Cluster(engine=engine, buckets=Buckets(buffers=2 if engine in ("zero1", "zero2") else 1))
    return _written(recipe.deepspeed)


def _written(name: str) -> Cluster:
    """The engine of a DeepSpeed configuration file. What it leaves ``auto`` is as in the presets.

    Raises:
        ArgumentError: It cannot be read, or has no stage.
    """
    try:
        config = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(
            f"there is no DeepSpeed configuration {name}",
            where="deepspeed",
            mend=did_you_mean(name, PRESETS) or f"write {', '.join(PRESETS)}, or the path of a JSON file",
        ) from None
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{name} cannot be read as JSON: {error}", where="deepspeed") from None
    zero: Any = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage not in (1, 2, 3):
        raise ArgumentError(
            f"{name} has no ZeRO stage to plan for: zero_optimization.stage is {stage!r}",
            where="deepspeed",
            mend="write stage 1, 2 or 3; without the key deepspeed, several ranks train by DDP, which is stage 0",
        )

    def number(key: str, default: int) -> int:
        value = zero.get(key, default)
        return int(value) if isinstance(value, int | float) else default

    engine: Engine = PRESETS[stage - 1]
    return Cluster(
        engine=engine,
        buckets=Buckets(
            reduce=number("reduce_bucket_size", ALL),
            buffers=2 if stage < 3 and zero.get("overlap_comm") else 1,
            prefetch=number("stage3_prefetch_bucket_size", 0),
            sub_group=number("sub_group_size", Buckets.sub_group),
            reuse=number("stage3_max_reuse_distance", Buckets.reuse),
        ),
        optimizer_offload=_offloads(zero, "offload_optimizer"),
        weights_offload=_offloads(zero, "offload_param"),
    )


def _offloads(zero: dict[str, Any], name: str) -> bool:
    section = zero.get(name)
    return isinstance(section, dict) and section.get("device") not in (None, "none")
