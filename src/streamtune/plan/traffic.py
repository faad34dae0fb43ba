"""Predict what ranks send each other in a step, over which link, and how long that takes, without running the step.

The autograd node of the engine determines the traffic of ZeRO: a layer is gathered once forward and once backward, and
its gradient is reduced once, for any number of chunks. So the traffic follows from sizes. In a world of W ranks, on n
nodes of g, of a model of P bytes with gradients of G, each rank sends in a step of M micro-batches

    ddp          all-reduce     2 G (W - 1) / W
    zero1        reduce           G (W - 1) / W, gather of what was updated G (W - 1) / W
    zero2        reduce       M x G (W - 1) / W, gather of what was updated G (W - 1) / W
    zero3, fsdp  gather       M x 2 P (W - 1) / W, reduce M x G (W - 1) / W
                 and each layer that runs forward once more (``levels: 2``) another time; under FSDP2 not the last one
                 of a segment, which is gathered for its backward by then

of which G (n - 1) / (n g) crosses to another node, as in rings that leave a node once through each of its devices.
Ranks that share a sequence exchange every chunk's queries, keys, values, outputs and their gradients (ulysses), or pass
the keys and values of all earlier chunks around (ring). A layer with a state passes each chunk's state on to the next
rank, and its gradient back.

The transfers of one collective over the two links are assumed to overlap, and no collective to overlap with
computation: if an engine does overlap them, a step is faster than predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import carries_states
from streamtune.engine.memory.placement import extra_forwards
from streamtune.engine.observe import observed
from streamtune.plan.rates import Rates, predict_seconds
from streamtune.plan.simulate.cluster import HeadCounts
from streamtune.plan.simulate.partition import divided_bytes, outside_bytes, trained_bytes
from streamtune.plan.simulate.shard import heads_of, only_states, shard_of
from streamtune.plan.simulate.step import Step, trace_step
from streamtune.schedule import Schedule

if TYPE_CHECKING:
    from streamtune.plan.simulate.simulate import Work
    from streamtune.plan.simulate.workload import Workload

FP32 = 4


@dataclass(frozen=True)
class Flow:
    """One kind of message of a step, as one rank sends it.

    Attributes:
        what: Its description.
        count: Number of collectives.
        node_bytes, network_bytes: Bytes sent to ranks of the same node, and to others.
        seconds: Time of all of them, one after another.
    """

    what: str
    count: int
    node_bytes: int
    network_bytes: int
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """The messages of a step, by kind, and the names of the links."""

    flows: tuple[Flow, ...]
    node_name: str
    network_name: str

    @property
    def seconds(self) -> float:
        return sum(flow.seconds for flow in self.flows)

    @property
    def node_bytes(self) -> int:
        """Bytes that a rank sends within its node."""
        return sum(flow.node_bytes for flow in self.flows)

    @property
    def network_bytes(self) -> int:
        """Bytes that a rank sends to other nodes."""
        return sum(flow.network_bytes for flow in self.flows)

    def to_json(self) -> dict[str, Any]:
        """Return the bytes and seconds of one rank in a step, as JSON values."""
        return {
            "node_link": self.node_name,
            "network_link": self.network_name,
            "node_bytes": self.node_bytes,
            "network_bytes": self.network_bytes,
            "seconds": self.seconds,
            "flows": [asdict(flow) for flow in self.flows],
        }


class Pace:
    """Predicts the seconds of a step of one workload: a rank's computation, then its messages."""

    def __init__(self, workload: Workload, rates: Rates) -> None:
        self.rates, self.workload, self.cluster = rates, workload, workload.cluster
        self._exchange = None if self.cluster.ranks == 1 else _Messages(workload)

    def seconds(self, work: Work, schedule: Schedule) -> float:
        return predict_seconds(work, self.rates) + self.traffic(schedule).seconds

    def traffic(self, schedule: Schedule) -> Traffic:
        links = self.cluster.links
        flows = () if self._exchange is None else tuple(self._exchange.flows(schedule))
        return Traffic(flows, links.node_name, links.network_name)


class _Messages:
    """The sizes of the messages, computed once from a model."""

    def __init__(self, workload: Workload) -> None:
        model: Any = workload.make_model()
        self.workload, self.cluster = workload, workload.cluster
        self.layers = len(decoder_layers(model))
        self.modules = self.layers + len(outside_bytes(model))
        self.weights, self.trained = divided_bytes(model), trained_bytes(model)
        self.layer_weights = max(map(divided_bytes, decoder_layers(model)))
        self.elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        embedding = model.get_input_embeddings().weight.element_size()
        self.element = 2 if workload.autocast else embedding
        self.heads: HeadCounts = heads_of(model)
        self.copies = shard_of(model, workload.cluster).copies
        layers = decoder_layers(model)
        self.attending = sum(not only_states(layer) for layer in layers) / len(layers)
        shared = self.cluster.sequence_size > 1
        self.states = carried_states(model, autocast=workload.autocast) if shared else CarriedStates(0, 0)
        scored = workload.scored
        self.forwards = 0.0 if scored is None else scored.forwards

    def flows(self, schedule: Schedule) -> Iterator[Flow]:
        """Iterate over the messages of a step that have bytes."""
        for flow in (*self._partitions(schedule), *self._sequences(schedule)):
            if flow.node_bytes or flow.network_bytes:
                yield flow

    # --- weights and gradients ----------------------------------------------------------------------------------------

    def _partitions(self, schedule: Schedule) -> Iterator[Flow]:
        cluster, times = self.cluster, self.workload.micro_batches
        buckets = max(1, -(-self.elements // max(1, cluster.buckets.reduce)))
        match cluster.engine:
            case "none" | "ddp" if self.workload.step.gradients == "none":
                return  # ranks exchange losses
            case "none" | "ddp":
                yield self._collective("all-reduce of gradients", buckets, 2 * self.trained)
            case "zero1" | "zero2":
                often = 1 if cluster.engine == "zero1" else times
                yield self._collective("reduction of gradients", often * buckets, often * self.trained)
                yield self._collective("gathering of updated weights", buckets, self.trained)
            case _:
                again = self._again(schedule, begun=cluster.engine == "fsdp")
                whole = round(times * (1 + self.forwards) * self.weights)
                yield self._collective("gathering of weights, forward", times * self.modules, whole)
                yield self._collective(
                    "gathering of weights, backward",
                    times * (self.modules + again),
                    times * (self.weights + again * self.layer_weights),
                )
                count = self.layers if cluster.engine == "fsdp" else max(buckets, 1)
                yield self._collective("reduction of gradients", times * count, times * self.trained)

    def _collective(self, what: str, count: int, size: int) -> Flow:
        """Return the flow of ``count`` gatherings or reductions of ``size`` bytes in all."""
        cluster, links = self.cluster, self.cluster.links
        sent = size * (cluster.ranks - 1) / cluster.ranks
        crossing = size * (cluster.nodes - 1) / cluster.nodes / cluster.ranks_per_node
        inside = sent - crossing if cluster.ranks_per_node > 1 else 0.0
        seconds = max(inside / links.node, crossing / links.network) + count * links.launch_seconds
        return Flow(what, count, round(inside), round(crossing), seconds)

    # --- sequences ----------------------------------------------------------------------------------------------------

    def _again(self, schedule: Schedule, *, begun: bool = False) -> int:
        """Return how many layers run forward once more, to compute inputs that were not stored.

        ``begun`` leaves out the last layer of each segment, whose weights are on their way for its backward.
        """
        if self.workload.mode != "stream":
            return 0
        forwards = extra_forwards(schedule, self.layers)
        return sum(forwards) - (sum(map(bool, forwards)) if begun else 0)

    def _sequences(self, schedule: Schedule) -> Iterator[Flow]:
        cluster = self.cluster
        if cluster.sequence_size == 1:
            return
        workload, heads = self.workload, self.heads
        tokens = workload.rows * workload.shard_tokens * workload.micro_batches
        chunks = len(schedule.chunks(workload.shard_tokens)) * workload.micro_batches
        width = heads.keys * (heads.key_dim + heads.value_dim)
        keys = tokens * width * self.element
        queries = tokens * heads.queries * (heads.key_dim + heads.value_dim) * self.element  # and outputs
        again = self._again(schedule) / self.layers
        yield from self._states(workload.rows * chunks, 1 + self.forwards + again)
        layers = self.attending * self.layers
        streamed = self.attending * (self.layers - min(schedule.keep_layers, self.layers))
        forwards = (1 + self.forwards + again) * layers
        if cluster.form == "ring":
            replayed = streamed if schedule.keep_attention == "no" else 0
            yield from self._ring(keys, tokens * width * FP32, forwards + replayed, layers, chunks)
            return
        keys = round(keys * self.copies)
        projected = streamed * (1 - 1 / chunks) if schedule.keep_kv == "no" else 0  # the last chunk's are made anyway
        size = forwards * (queries + keys) + projected * keys + streamed * (queries + keys)
        count = 4 * forwards + 2 * projected + 4 * streamed
        yield self._all_to_all("all-to-all, forward and recomputed", round(count * chunks), round(size))
        yield self._all_to_all("all-to-all of gradients", round(4 * layers * chunks), round(layers * (queries + keys)))

    def _all_to_all(self, what: str, count: int, size: int) -> Flow:
        """Return the flow of ``count`` exchanges of ``size`` bytes in all, of which each rank keeps its own part."""
        cluster, links = self.cluster, self.cluster.links
        near = min(cluster.sequence_size, cluster.ranks_per_node)
        inside = size * (near - 1) / cluster.sequence_size
        crossing = size * (cluster.sequence_size - near) / cluster.sequence_size
        seconds = max(inside / links.node, crossing / links.network) + count * links.launch_seconds
        return Flow(what, count, round(inside), round(crossing), seconds)

    def _states(self, row_chunks: int, forwards: float) -> Iterator[Flow]:
        """Iterate over the flows of states: a rank sends one state a chunk, and the next rank waits for it."""
        cluster, states = self.cluster, self.states
        size = row_chunks * states.row_bytes
        chunks = row_chunks // self.workload.rows * states.layers
        for what, times in (("states passed on", forwards), ("their gradients passed back", 1.0)):
            flow = self._passed(what, times, size, chunks)
            yield replace(flow, seconds=flow.seconds * cluster.sequence_size)

    def _ring(self, keys: int, sums: int, forwards: float, layers: float, chunks: int) -> Iterator[Flow]:
        """Iterate over the flows of a ring.

        A rank's keys and values are passed to all others with every chunk that follows. Their gradients are passed
        along with them, and on to the rank whose keys and values they are.
        """
        hops, visits = self.cluster.sequence_size - 1, (chunks // self.workload.micro_batches + 1) / 2
        yield self._passed("keys and values passed on", (forwards + layers) * hops, keys * visits, chunks)
        yield self._passed("their gradients passed on", layers * (hops + 1), sums * visits, chunks)

    def _passed(self, what: str, hops: float, size: float, chunks: int) -> Flow:
        """Return the flow of ``size`` bytes, of all chunks together, that are passed on ``hops`` times."""
        cluster, links = self.cluster, self.cluster.links
        sent, far = size * hops, 1 / cluster.ranks_per_node if cluster.spans_nodes else 0.0
        count = round(chunks * hops)
        # All wait for the slowest hop, the one between two nodes.
        seconds = sent / (links.network if cluster.spans_nodes else links.node) + count * links.launch_seconds
        return Flow(what, count, round(sent * (1 - far)), round(sent * far), seconds)


# --- states that layers carry from token to token --------------------------------------------------------------------

CHUNKS = 2
"""Chunks of the step in which states are measured."""


@dataclass(frozen=True)
class CarriedStates:
    """The states of all layers after one token: number of layers that carry any, and bytes for each row."""

    layers: int
    row_bytes: int


def carried_states(model: Any, *, autocast: bool = False) -> CarriedStates:
    """Return the states of a model on ``meta``, which is left as it was."""
    layers = sum(map(carries_states, decoder_layers(model)))
    if not layers:
        return CarriedStates(0, 0)
    sizes = _StateSizes()
    with observed(sizes):
        trace_step(model, Schedule(chunk_size=2), Step("stream", 2 * CHUNKS, autocast=autocast))
    return CarriedStates(layers, sizes.kept // CHUNKS)


class _StateSizes:
    """Adds up the bytes of the states that the engine keeps."""

    kept = 0

    def on_hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        if kind == "state":
            self.kept += sum(tensor.nbytes for tensor in tensors)

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        """Do nothing: states are kept in the forward only."""

    def on_resize(self, x: Tensor) -> None:
        """Do nothing: a state has one size."""
