"""Predict the communication between ranks in a training step (bytes, links and time) without running the step.

A streamed layer is one autograd node. So ZeRO gathers a layer once forward and once backward, and reduces its gradient
once, for any number of chunks. The traffic follows from sizes alone. Let W ranks run on n nodes with g ranks each, and
let the model have P bytes of weights and G bytes of gradients. In a step of M micro-batches each rank sends

    ddp          all-reduce     2 G (W - 1) / W
    zero1        reduce           G (W - 1) / W, gather of updated weights  G (W - 1) / W
    zero2        reduce       M x G (W - 1) / W, gather of updated weights  G (W - 1) / W
    zero3, fsdp  gather       M x 2 P (W - 1) / W, reduce M x G (W - 1) / W

With zero3 and fsdp a layer whose forward is recomputed (``levels: 2``) is gathered again. FSDP2 does not gather the
last layer of a segment again, because this layer is already gathered for its backward.

In a collective of G bytes each rank sends G (n - 1) / (n g) to another node: a ring leaves a node once through each
device. With ``ulysses``, ranks that share a sequence exchange every chunk's queries, keys, values, outputs
and their gradients. With ``ring`` these ranks pass the keys and values of all earlier chunks around. A recurrent layer
sends each chunk's state to the next rank, and the state's gradient back.

The two links of one collective are assumed to work at the same time. Collectives are assumed not to overlap with
computation; if they overlap, a step is faster than predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import carries_states, first_differentiated_layer
from streamtune.engine.memory.placement import count_recomputed_layers
from streamtune.engine.observe import with_observer
from streamtune.plan.rates import Rates, predict_seconds
from streamtune.plan.simulate.cluster import HeadCounts
from streamtune.plan.simulate.partition import bytes_outside_layers, shardable_bytes, trained_bytes
from streamtune.plan.simulate.shard import count_heads, is_purely_recurrent, rank_shard
from streamtune.plan.simulate.step import Step, trace_step
from streamtune.schedule import Schedule

if TYPE_CHECKING:
    from streamtune.plan.simulate.simulate import Work
    from streamtune.plan.simulate.workload import Workload

FP32 = 4


@dataclass(frozen=True)
class Flow:
    """Messages of one kind that a rank sends in a step, such as the all-reduce of gradients.

    Attributes:
        what: Description of the messages.
        count: Number of collectives.
        node_bytes: Bytes that the rank sends to ranks on the same node.
        network_bytes: Bytes that the rank sends to other nodes.
        seconds: Total time of the collectives, one after another.
    """

    what: str
    count: int
    node_bytes: int
    network_bytes: int
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """Messages that a rank sends in a step, by kind, and the names of the links within and between nodes."""

    flows: tuple[Flow, ...]
    node_name: str
    network_name: str

    @property
    def seconds(self) -> float:
        return sum(flow.seconds for flow in self.flows)

    @property
    def node_bytes(self) -> int:
        return sum(flow.node_bytes for flow in self.flows)

    @property
    def network_bytes(self) -> int:
        return sum(flow.network_bytes for flow in self.flows)

    def to_json(self) -> dict[str, Any]:
        return {
            "node_link": self.node_name,
            "network_link": self.network_name,
            "node_bytes": self.node_bytes,
            "network_bytes": self.network_bytes,
            "seconds": self.seconds,
            "flows": [asdict(flow) for flow in self.flows],
        }


class StepTimeModel:
    """Predicts the step time of a workload with any schedule: computation of a rank, plus its messages."""

    def __init__(self, workload: Workload, rates: Rates) -> None:
        self.rates, self.workload, self.cluster = rates, workload, workload.cluster
        self._messages = None if self.cluster.ranks == 1 else _Messages(workload)

    def seconds(self, work: Work, schedule: Schedule) -> float:
        return predict_seconds(work, self.rates) + self.traffic(schedule).seconds

    def traffic(self, schedule: Schedule) -> Traffic:
        links = self.cluster.links
        flows = () if self._messages is None else tuple(self._messages.flows(schedule))
        return Traffic(flows, links.node_name, links.network_name)


class _Messages:
    """Computes the messages that a rank sends in a step, from the sizes of the model."""

    def __init__(self, workload: Workload) -> None:
        model: Any = workload.make_model()
        self.workload, self.cluster = workload, workload.cluster
        self.layers, self.first = len(decoder_layers(model)), first_differentiated_layer(model)
        self.differentiated = self.layers - self.first
        """Number of layers with a backward; layers below the lowest trained weight have none."""
        self.num_gathers = self.layers + len(bytes_outside_layers(model))
        self.weights, self.trained = shardable_bytes(model), trained_bytes(model)
        self.layer_weights = max(map(shardable_bytes, decoder_layers(model)))
        self.forward_only_weights = sum(map(shardable_bytes, decoder_layers(model)[: self.first]))
        self.trained_elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        embedding = model.get_input_embeddings().weight.element_size()
        self.element_bytes = 2 if workload.autocast else embedding
        self.heads: HeadCounts = count_heads(model)
        self.kv_copies = rank_shard(model, workload.cluster).kv_copies
        layers = decoder_layers(model)
        self.attention_fraction = sum(not is_purely_recurrent(layer) for layer in layers) / len(layers)
        shared = self.cluster.sequence_size > 1
        self.states = measure_carried_states(model, autocast=workload.autocast) if shared else CarriedStates(0, 0)
        scored = workload.scored
        self.reference_forwards = 0.0 if scored is None else scored.forwards

    def flows(self, schedule: Schedule) -> Iterator[Flow]:
        """Yield a :class:`Flow` for each kind of message that a rank sends in a step, unless it has no bytes."""
        for flow in (*self._weight_flows(schedule), *self._sequence_flows(schedule)):
            if flow.node_bytes or flow.network_bytes:
                yield flow

    # --- weights and gradients ----------------------------------------------------------------------------------------

    def _weight_flows(self, schedule: Schedule) -> Iterator[Flow]:
        cluster, times = self.cluster, self.workload.micro_batches
        buckets = max(1, -(-self.trained_elements // max(1, cluster.buckets.reduce)))
        match cluster.engine:
            case "none" | "ddp" if self.workload.step.gradients == "none":
                return  # ranks exchange only losses
            case "none" | "ddp":
                yield self._collective_flow("all-reduce of gradients", buckets, 2 * self.trained)
            case "zero1" | "zero2":
                reductions = 1 if cluster.engine == "zero1" else times
                yield self._collective_flow("reduction of gradients", reductions * buckets, reductions * self.trained)
                yield self._collective_flow("gathering of updated weights", buckets, self.trained)
            case _:
                again = self._count_recomputed_layers(schedule, skip_gathered=cluster.engine == "fsdp")
                whole = round(times * (1 + self.reference_forwards) * self.weights)
                yield self._collective_flow("gathering of weights, forward", times * self.num_gathers, whole)
                yield self._collective_flow(
                    "gathering of weights, backward",
                    times * (self.num_gathers - self.first + again),
                    times * (self.weights - self.forward_only_weights + again * self.layer_weights),
                )
                count = self.differentiated if cluster.engine == "fsdp" else max(buckets, 1)
                yield self._collective_flow("reduction of gradients", times * count, times * self.trained)

    def _collective_flow(self, what: str, count: int, size: int) -> Flow:
        """Return bytes and seconds of ``count`` all-gathers or reductions, with ``size`` bytes in total."""
        cluster, links = self.cluster, self.cluster.links
        sent = size * (cluster.ranks - 1) / cluster.ranks
        crossing = size * (cluster.nodes - 1) / cluster.nodes / cluster.ranks_per_node
        inside = sent - crossing if cluster.ranks_per_node > 1 else 0.0
        seconds = max(inside / links.node, crossing / links.network) + count * links.launch_seconds
        return Flow(what, count, round(inside), round(crossing), seconds)

    # --- sequences ----------------------------------------------------------------------------------------------------

    def _count_recomputed_layers(self, schedule: Schedule, *, skip_gathered: bool = False) -> int:
        """Return how many layer forwards are recomputed because an input was not stored.

        With ``skip_gathered`` the last layer of each segment does not count, because it is already gathered.
        """
        if self.workload.mode != "stream":
            return 0
        forwards = count_recomputed_layers(schedule, self.layers, self.first)
        return sum(forwards) - (sum(map(bool, forwards)) if skip_gathered else 0)

    def _sequence_flows(self, schedule: Schedule) -> Iterator[Flow]:
        cluster = self.cluster
        if cluster.sequence_size == 1:
            return
        workload, heads = self.workload, self.heads
        tokens = workload.num_rows * workload.shard_tokens * workload.micro_batches
        chunks = len(schedule.chunks(workload.shard_tokens)) * workload.micro_batches
        width = heads.keys * (heads.key_dim + heads.value_dim)
        keys = tokens * width * self.element_bytes
        queries = tokens * heads.queries * (heads.key_dim + heads.value_dim) * self.element_bytes  # and outputs
        again = self._count_recomputed_layers(schedule) / self.layers
        yield from self._state_flows(workload.num_rows * chunks, 1 + self.reference_forwards + again)
        layers = self.attention_fraction * self.differentiated
        streamed = self.attention_fraction * (self.differentiated - min(schedule.keep_layers, self.differentiated))
        forwards = (1 + self.reference_forwards + again) * self.attention_fraction * self.layers
        if cluster.form == "ring":
            replayed = streamed if schedule.keep_attention == "no" else 0
            yield from self._ring_flows(keys, tokens * width * FP32, forwards + replayed, layers, chunks)
            return
        keys = round(keys * self.kv_copies)
        projected = streamed * (1 - 1 / chunks) if schedule.keep_kv == "no" else 0  # the last chunk's are made anyway
        size = forwards * (queries + keys) + projected * keys + streamed * (queries + keys)
        count = 4 * forwards + 2 * projected + 4 * streamed
        yield self._all_to_all_flow("all-to-all, forward and recomputed", round(count * chunks), round(size))
        yield self._all_to_all_flow(
            "all-to-all of gradients", round(4 * layers * chunks), round(layers * (queries + keys))
        )

    def _all_to_all_flow(self, what: str, count: int, size: int) -> Flow:
        """Return bytes and seconds of ``count`` all-to-alls; the total ``size`` includes each rank's own part."""
        cluster, links = self.cluster, self.cluster.links
        ranks_on_node = min(cluster.sequence_size, cluster.ranks_per_node)
        inside = size * (ranks_on_node - 1) / cluster.sequence_size
        crossing = size * (cluster.sequence_size - ranks_on_node) / cluster.sequence_size
        seconds = max(inside / links.node, crossing / links.network) + count * links.launch_seconds
        return Flow(what, count, round(inside), round(crossing), seconds)

    def _state_flows(self, row_chunks: int, forwards: float) -> Iterator[Flow]:
        """Yield the messages with recurrent states, which a rank sends to the waiting next rank after each chunk."""
        cluster, states = self.cluster, self.states
        size = row_chunks * states.row_bytes
        chunks = row_chunks // self.workload.num_rows * states.layers
        for what, times in (("states passed on", forwards), ("gradients of states passed back", 1.0)):
            flow = self._hop_flow(what, times, size, chunks)
            yield replace(flow, seconds=flow.seconds * cluster.sequence_size)

    def _ring_flows(
        self, kv_bytes: int, grad_bytes: int, forwards: float, layers: float, chunks: int
    ) -> Iterator[Flow]:
        """Yield the messages of ring attention.

        A rank's keys and values are passed to all other ranks for every later chunk. Their gradients are passed the
        same way, plus one hop back to the rank that owns the keys and values.
        """
        hops, visits = self.cluster.sequence_size - 1, (chunks // self.workload.micro_batches + 1) / 2
        yield self._hop_flow("keys and values passed on", (forwards + layers) * hops, kv_bytes * visits, chunks)
        yield self._hop_flow("gradients of keys and values passed on", layers * (hops + 1), grad_bytes * visits, chunks)

    def _hop_flow(self, what: str, hops: float, size: float, chunks: int) -> Flow:
        """Return bytes and seconds of sending ``size`` bytes (summed over all chunks) ``hops`` times to the next
        rank."""
        cluster, links = self.cluster, self.cluster.links
        sent, network_share = size * hops, 1 / cluster.ranks_per_node if cluster.spans_nodes else 0.0
        count = round(chunks * hops)
        # All ranks wait for the slowest hop, which is between two nodes.
        seconds = sent / (links.network if cluster.spans_nodes else links.node) + count * links.launch_seconds
        return Flow(what, count, round(sent * (1 - network_share)), round(sent * network_share), seconds)


# --- recurrent states -------------------------------------------------------------------------------------------------

NUM_MEASURED_CHUNKS = 2
"""Number of chunks of the simulated step in which recurrent states are measured."""


@dataclass(frozen=True)
class CarriedStates:
    """Recurrent states of a model: number of layers with a state, and bytes of all states per row."""

    layers: int
    row_bytes: int


def measure_carried_states(model: Any, *, autocast: bool = False) -> CarriedStates:
    """Return the recurrent states of a model on ``meta``, measured in a simulated step; the model is not changed."""
    layers = sum(map(carries_states, decoder_layers(model)))
    if not layers:
        return CarriedStates(0, 0)
    sizes = _StateByteCounter()
    with with_observer(sizes):
        trace_step(model, Schedule(chunk_size=2), Step("stream", 2 * NUM_MEASURED_CHUNKS, autocast=autocast))
    return CarriedStates(layers, sizes.stored_bytes // NUM_MEASURED_CHUNKS)


class _StateByteCounter:
    """Sums the bytes of the recurrent states that the engine stores."""

    stored_bytes = 0

    def on_new_tensors(self, kind: str, tensors: Iterable[Tensor]) -> None:
        if kind == "state":
            self.stored_bytes += sum(tensor.nbytes for tensor in tensors)

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None: ...

    def on_resize(self, x: Tensor) -> None: ...
