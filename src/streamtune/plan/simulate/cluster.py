"""Several devices: their number, their nodes, the links between them, and each device's part of a step.

A world of W ranks is DP x SP: SP consecutive ranks share each sequence, DP groups of them share the batch, and all W
are one group of ZeRO, FSDP or DDP. For one rank it means:

    sequence   T / SP tokens of everything but attention; attention of all T on heads / SP
    batch      1 / DP of the rows of a step
    weights, gradients, optimizer state
               whole, or 1 / W, by the engine (``simulate.partition``)
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
    """The links between devices: bytes/s of one device in one direction, as programs get them.

    Attributes:
        node: Bytes/s between devices of a node.
        network: Bytes/s between nodes, for each device.
        node_name, network_name: Names of the links.
        launch_seconds: Overhead of one collective besides its bytes.
    """

    node: float = 5e9
    network: float = 1e9
    node_name: str = "node"
    network_name: str = "network"
    launch_seconds: float = 30e-6


@dataclass(frozen=True)
class Buckets:
    """The sizes of an engine's buffers while it gathers and reduces, in elements.

    Attributes:
        reduce: Elements of the buffer that gradients are reduced from.
        buffers: Number of such buffers.
        prefetch: Elements of the weights that are gathered ahead of the layer that runs.
        sub_group: Elements of a rank's part that stage 3 steps at a time, with its gradients in fp32.
        reuse: A layer stays gathered if fewer elements of weights than this are used before it is used again.
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
        engine: The engine that divides weights, gradients and optimizer state between them.
        sequence_size: Number of devices that share a sequence, SP.
        form: Way of sharing a sequence: ``ulysses`` exchanges heads for tokens, ``ring`` passes keys and values around.
        links: The links between them.
        buckets: Sizes of the engine's buffers for its collectives.
        optimizer_offload, weights_offload: ZeRO's offload of either to the host; ``zero3_offload`` has both.

    Raises:
        ArgumentError: A number does not divide another.
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
                raise ArgumentError(f"{name} must be 1 or more, not {getattr(self, name)!r}")
        if self.engine not in ENGINES:
            raise ArgumentError(f"no engine is called {self.engine!r}", fix=f"there are {', '.join(ENGINES)}")
        if self.ranks % self.nodes:
            nearest = self.ranks // self.nodes * self.nodes or self.nodes
            raise ArgumentError(
                f"{self.ranks} ranks cannot be shared evenly by {self.nodes} nodes",
                where="--ranks, --nodes",
                fix=f"--ranks counts the devices of all nodes: {nearest} would do",
            )
        if self.ranks % self.sequence_size:
            fitting = [size for size in range(1, self.ranks + 1) if self.ranks % size == 0]
            nearest = min(fitting, key=lambda size: abs(size - self.sequence_size))
            raise ArgumentError(
                f"{self.ranks} ranks cannot be cut into groups of sequence_parallel_size = {self.sequence_size}",
                where="sequence_parallel_size",
                fix=f"write sequence_parallel_size: {nearest}, or take a multiple of {self.sequence_size} ranks",
            )
        if self.spans_nodes and self.sequence_size % self.ranks_per_node:
            raise ArgumentError(
                f"groups of {self.sequence_size} ranks do not fill nodes of {self.ranks_per_node}",
                where="sequence_parallel_size",
                fix=f"a group has a divisor of {self.ranks_per_node} ranks, or a multiple of them",
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
        """Stage of ZeRO, which divides nothing (0), optimizer state (1), also gradients (2), also weights (3)."""
        return STAGES[self.engine]

    @property
    def keeps_master(self) -> bool:
        """True if the engine has its own fp32 weights, which the optimizer steps (DeepSpeed)."""
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
        """True if a rank holds a part of the weights, and gathers a layer's weights while it runs."""
        return self.zero_stage == 3

    def divided(self, size: int, stage: int) -> int:
        """Return one rank's share of ``size`` bytes that are divided from ``stage`` on."""
        return -(-size // self.ranks) if self.zero_stage >= stage else size

    def shared_by(self, sequence_size: int, form: Form) -> Cluster:
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
    """The attention heads of a model: query heads, key/value heads, and their sizes; all 0 if no layer attends.

    Attributes:
        queries: Query heads H.
        keys: Key/value heads G.
        key_dim, value_dim: Elements of a key and of a value of one head, for one token.
    """

    queries: int
    keys: int
    key_dim: int
    value_dim: int

    def copies(self, cluster: Cluster) -> float:
        """Return how many times the ranks that share a sequence hold its keys and values, in all."""
        size = cluster.sequence_size
        if cluster.form == "ring" or size == 1 or self.keys == 0:
            return 1.0
        return math.lcm(self.keys, size) / self.keys


def form_of(asked: str, size: int, heads: HeadCounts) -> Form:
    """Return the form in which ``size`` ranks share a sequence; ``auto`` is ulysses if they divide the heads."""
    divides = heads.queries % size == 0
    if asked == "ring" or (asked == "auto" and not divides):
        return "ring"
    if not divides:
        sizes = [str(n) for n in range(2, heads.queries + 1) if heads.queries % n == 0]
        raise ArgumentError(
            f"{heads.queries} attention heads cannot be shared out to {size} ranks",
            where="sequence_parallel_size",
            fix=f"write sequence_parallel: ring, which needs no heads, or sequence_parallel_size: {', '.join(sizes)}",
        )
    return "ulysses"
