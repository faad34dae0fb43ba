"""Describe the devices of a run: their number, nodes and links, and one device's share of a step.

W ranks are DP x SP. SP consecutive ranks share each sequence, DP such groups share the batch, and all W ranks form one
ZeRO, FSDP or DDP group. One rank has:

    sequence   T / SP tokens; in attention all T tokens, but only 1 / SP of the heads
    batch      1 / DP of the rows of a step
    weights, gradients, optimizer state
               all, or 1 / W, depending on the engine (``simulate.partition``)
    host       1 / ranks_per_node of its node's memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from streamtune.errors import ArgumentError

Engine = Literal["none", "ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp"]
Form = Literal["ulysses", "ring"]

ENGINES: tuple[Engine, ...] = get_args(Engine)

STAGES: dict[Engine, int] = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "fsdp": 3}


@dataclass(frozen=True)
class Links:
    """Bandwidths between devices, as reached in practice, per device and direction.

    Attributes:
        node: Bytes/s between devices of a node.
        network: Bytes/s between nodes, for each device.
        node_name, network_name: Names of the links.
        launch_seconds: Seconds to launch one collective.
    """

    node: float = 5e9
    network: float = 1e9
    node_name: str = "node"
    network_name: str = "network"
    launch_seconds: float = 30e-6


@dataclass(frozen=True)
class Buckets:
    """Buffer sizes of a ZeRO or FSDP engine, in elements.

    Attributes:
        reduce: Elements of one buffer (bucket) of gradients that are reduced together.
        buffers: Number of such buffers.
        prefetch: Elements of weights that are gathered before their layer runs.
        sub_group: Elements of a rank's shard that ZeRO-3 updates at a time, with fp32 gradients.
        reuse: Reuse distance: a layer stays gathered if fewer elements than this are used before its next use.
    """

    reduce: int = 500_000_000
    buffers: int = 1
    prefetch: int = 0
    sub_group: int = 1_000_000_000
    reuse: int = 1_000_000_000


@dataclass(frozen=True)
class Cluster:
    """Devices that train together.

    Args:
        ranks: Number of devices, W.
        nodes: Number of machines, each with the same number of devices.
        engine: Engine that shards weights, gradients and optimizer state, or replicates them.
        sequence_size: Number of devices that share a sequence, SP.
        form: Kind of sequence parallelism: ``ulysses`` exchanges attention heads for tokens, ``ring`` passes keys and
            values from rank to rank.
        links: Links between the devices.
        buckets: Sizes of the engine's communication buffers.
        optimizer_offload, weights_offload: True if ZeRO offloads optimizer state or weights to the host;
            ``zero3_offload`` offloads both.

    Raises:
        ArgumentError: A number is below 1, the ranks cannot be divided evenly, or the engine is unknown.
    """

    ranks: int = 1
    nodes: int = 1
    engine: Engine = "none"
    sequence_size: int = 1
    form: Form = "ulysses"
    links: Links = field(default_factory=Links)
    buckets: Buckets = field(default_factory=Buckets)
    optimizer_offload: bool = False
    weights_offload: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "sequence_size"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be 1 or more, found {getattr(self, name)!r}")
        if self.engine not in ENGINES:
            raise ArgumentError(f"unknown engine {self.engine!r}", fix=f"engines: {', '.join(ENGINES)}")
        if self.ranks % self.nodes:
            nearest = self.ranks // self.nodes * self.nodes or self.nodes
            raise ArgumentError(
                f"{self.ranks} ranks cannot be divided evenly among {self.nodes} nodes",
                where="--ranks, --nodes",
                fix=f"--ranks is the total over all nodes, such as {nearest}",
            )
        if self.ranks % self.sequence_size:
            fitting = [size for size in range(1, self.ranks + 1) if self.ranks % size == 0]
            nearest = min(fitting, key=lambda size: abs(size - self.sequence_size))
            raise ArgumentError(
                f"{self.ranks} ranks cannot be divided into groups of sequence_parallel_size = {self.sequence_size}",
                where="sequence_parallel_size",
                fix=f"set sequence_parallel_size: {nearest}, or use a multiple of {self.sequence_size} ranks",
            )
        if self.spans_nodes and self.sequence_size % self.ranks_per_node:
            raise ArgumentError(
                f"groups of {self.sequence_size} ranks do not fill whole nodes of {self.ranks_per_node} ranks",
                where="sequence_parallel_size",
                fix=f"set sequence_parallel_size to a divisor or a multiple of {self.ranks_per_node}",
            )

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that get different rows, DP."""
        return self.ranks // self.sequence_size

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def zero_stage(self) -> int:
        """ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
        return STAGES[self.engine]

    @property
    def keeps_fp32_weights(self) -> bool:
        """True if the engine keeps fp32 master weights that the optimizer updates (DeepSpeed)."""
        return self.engine.startswith("zero")

    @property
    def optimizer_on_host(self) -> bool:
        return self.optimizer_offload or self.engine == "zero3_offload"

    @property
    def weights_on_host(self) -> bool:
        return self.weights_offload or self.engine == "zero3_offload"

    @property
    def spans_nodes(self) -> bool:
        return self.sequence_size > self.ranks_per_node

    @property
    def gathers_layers(self) -> bool:
        """True if a rank has a shard of the weights and gathers each layer's weights while the layer runs."""
        return self.zero_stage == 3

    def rank_bytes(self, size: int, stage: int) -> int:
        """Return one rank's share of ``size`` bytes; ``stage`` is the lowest ZeRO stage that shards these bytes."""
        return -(-size // self.ranks) if self.zero_stage >= stage else size

    def with_sequence_size(self, sequence_size: int, form: Form) -> Cluster:
        return replace(self, sequence_size=sequence_size, form=form)

    def describe(self) -> str:
        where = f"{self.nodes} nodes of {self.ranks_per_node}" if self.nodes > 1 else "one node"
        words = [f"{self.ranks} ranks, {where}", self.engine]
        if self.sequence_size > 1:
            words.append(f"{self.sequence_size} share a sequence ({self.form})")
        if self.data_size > 1:
            words.append(f"{self.data_size} share the batch")
        return "; ".join(words)


@dataclass(frozen=True)
class HeadCounts:
    """Numbers and sizes of a model's attention heads; all 0 if no layer has attention.

    Attributes:
        queries: Number of query heads, H.
        keys: Number of key/value heads, G.
        key_dim, value_dim: Dimension of one head's keys and values.
    """

    queries: int
    keys: int
    key_dim: int
    value_dim: int

    def kv_copies(self, cluster: Cluster) -> float:
        """Return how many copies of a sequence's keys and values exist, summed over the sequence's ranks."""
        size = cluster.sequence_size
        if cluster.form == "ring" or size == 1 or self.keys == 0:
            return 1.0
        return math.lcm(self.keys, size) / self.keys


def choose_sequence_split(requested: str, num_ranks: int, heads: HeadCounts) -> Form:
    """Return ``ulysses`` or ``ring``; ``auto`` chooses ``ulysses`` if ``num_ranks`` divides the number of query heads.

    Raises:
        ArgumentError: ``ulysses`` was requested, and ``num_ranks`` does not divide the number of query heads.
    """
    divides = heads.queries % num_ranks == 0
    if requested == "ring" or (requested == "auto" and not divides):
        return "ring"
    if not divides:
        sizes = [str(n) for n in range(2, heads.queries + 1) if heads.queries % n == 0]
        raise ArgumentError(
            f"{heads.queries} attention heads cannot be divided among {num_ranks} ranks",
            where="sequence_parallel_size",
            fix="set sequence_parallel: ring, which does not divide heads, or sequence_parallel_size to one of "
            + ", ".join(sizes),
        )
    return "ulysses"
