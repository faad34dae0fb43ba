"""``order="chunk"``: the backward runs through all layers of a chunk, then through all layers of the preceding chunk.

A *chain* is a sequence of layer calls in which each call reads the tensor that the preceding call returned. So the
chain is one function of its first input. Layer k's call returns an autograd node for layers 1..k. Its inputs are the
chain's first input and the parameters of layers 1..k. Usually only the last node runs; the earlier nodes are freed with
their outputs. For the chain f = f_L ... f_1 and chunks i = D..1 the backward is

    x_0(i) = the input, x_l(i) = f_l(x_(l-1)(i), prefix of layer l)              all layers of chunk i, first to last
    dx_(l-1)(i), dK_l, dV_l (prefix), dW_l  +=  vjp of layer l on chunk i        last to first

with one ``chunk_vjp`` for each chunk and layer. The chain stores one layer input instead of L. For every layer it
stores the keys and values (``saved``) or the states at chunk borders, with their gradients. If the hidden states
between two layers are used elsewhere too, the node that returned them runs as well, and autograd adds both gradients.
The gradient is exact, and the layers before that node are computed twice.

With ``levels: 1`` the graphs of all layers of a chunk exist at once. With ``levels: 2`` only the graphs of one segment
of layers do. A pass without a graph first stores the input of each segment, at the cost of one more forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.cache import ChunkCache
from streamtune.engine.call import PAST, LayerCall
from streamtune.engine.call_parts import SharedKey
from streamtune.engine.memory.tiers import Source, StoredTensor
from streamtune.engine.observe import notify_chunk
from streamtune.engine.passes import LayerStream
from streamtune.engine.routers import RouterSums
from streamtune.engine.saved import SavedTensors
from streamtune.engine.sharded import Weights, is_sharded
from streamtune.engine.streamed_layer import StreamedLayer
from streamtune.engine.vjp import Along, GradientSum, chunk_vjp, read_chunk
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops import first_order, is_graph_retained


def run_in_chain(owner: StreamedLayer, call: LayerCall, parameters: Sequence[Tensor]) -> Any:
    """Run a layer's forward as the next layer of the current chain, or the first of a new chain; return its output."""
    weights = Weights.capture(owner.layer)
    _check_chainable(owner.layer, [name for name in call.shared if name[0] != PAST], weights)
    last_call = owner.parts.last_call
    before = last_call.call_for_gradient(call.hidden, owner.layer)
    chain = None if before is None or before.chain is None else before.chain()
    stream = LayerStream(call, owner)
    tensors = call.input_tensors()
    if chain is not None and not chain.can_append(before, stream, tensors):
        chain = None
    if owner.placement.unstreamed and call.past is None and (unchunked := stream.run_unchunked(tensors)) is not None:
        return stream.assemble_output(unchunked, None)
    stream.input_is_recomputed = chain is not None
    with stream.pass_over_chunks():
        outputs = stream.forward(tensors, for_backward=True)
    _check_chainable(owner.layer, list(stream.entry_updates), weights)
    if chain is None or chain.chunks != stream.chunks:  # the forward may have changed the chunks: the layer has states
        if stream.input_is_recomputed:
            stream.input_is_recomputed = False
            stream.saved.keep_on_device(tensors[0])
        chain = LayerChain(stream, tensors[0])
    results = chain.append(owner, stream, weights, parameters, tensors[1:], outputs)
    layer_output_count = len(stream.outputs.along)
    last_call.record_call(results[0], stream, owner.layer)
    stream.chain = weakref.ref(chain)
    if stream.routers is not None and len(results) > layer_output_count:
        # These sums cover all layers of the chain so far.
        stream.routers.call_sums = chain.sums_before
        stream.routers.add_layer_sums(results[layer_output_count:])
    return stream.outputs.rebuild_output(results[:layer_output_count])


def _check_chainable(layer: nn.Module, shared_names: list[Any], weights: Weights) -> None:
    name = type(layer).__name__
    if shared_names:
        raise UnsupportedModelError(
            f"{name} shares keys and values with other layers; order='chunk' needs a separate cache for each layer",
            where="engine.order",
            fix="set order: layer (Schedule(order='layer'))",
        )
    if not weights.tensors and any(map(is_sharded, layer.modules())):
        raise ArgumentError(
            "order='chunk' reads the weights of all layers once for every chunk; these weights are sharded over ranks "
            "and would be gathered each time",
            where=name,
            fix="set order: layer (Schedule(order='layer')), or train without ZeRO stage 3 and FSDP2",
        )


@dataclass
class _Link:
    owner: StreamedLayer
    stream: LayerStream
    weights: Weights
    parameters: tuple[Tensor, ...]
    other_inputs: list[int]
    """Indices, in the chain's ``other_inputs``, of the layer's inputs other than its hidden states."""
    sums: list[GradientSum] = field(default_factory=list)

    @property
    def layer(self) -> nn.Module:
        return self.stream.call.layer

    @property
    def saved(self) -> SavedTensors:
        return self.stream.saved

    @property
    def frees_kv_early(self) -> bool:
        """True if the keys and values on the device are freed between a chunk's forward and its backward."""
        schedule = self.stream.settings.schedule
        return self.saved.kv is not None and (schedule.levels, schedule.keep_kv) == (1, "host")

    def prepare_backward(self) -> None:
        stream = self.stream
        stream.kv.grads.clear()
        stream.states.grads.clear()
        if self.saved.kv is not None:
            self.saved.kv.free_gradient_sums()
        if self.saved.attention is not None:
            self.saved.attention.set_read_order(stream.chunks[::-1])
        self.sums = [GradientSum(p, stream.widen) for p in self.parameters]

    def load_prefix(self, chunk: slice) -> None:
        self.stream.states.prefetch_states(chunk)
        if self.saved.kv is not None:
            call = self.stream.call
            notify_chunk(self.layer, chunk, "load")
            self.saved.kv.load_kv(call.key_positions(chunk), call.first_key_position(chunk))

    def recompute_output(self, chunk: slice, x_i: list[Tensor]) -> Tensor:
        self.load_prefix(chunk)
        z = self.stream.recompute_chunk(chunk, x_i)
        if self.saved.kv is not None:
            self.saved.kv.free_buffers()
        return z

    def run_with_graph(self, chunk: slice, x_i: list[Tensor]) -> _ChunkGraph:
        self.load_prefix(chunk)
        with torch.enable_grad():
            z_i, cache = self.stream.replay_chunk(chunk, x_i)
        self.owner.check_leaves(z_i[0], [*x_i, *cache.read_leaves, *self.parameters])
        if self.frees_kv_early:
            assert self.saved.kv is not None
            self.saved.kv.release_buffers()
        return _ChunkGraph(self, x_i, z_i, cache)

    def free(self, keep_graph: bool) -> None:
        stream = self.stream
        stream.saved.attention, self.sums = None, []
        if not keep_graph:
            if stream.saved.kv is not None:
                stream.saved.kv.free()
            stream.free()
            return
        stream.kv.grads.clear()
        stream.states.grads.clear()


@dataclass
class _ChunkGraph:
    """Autograd graph of one layer of a chain on one chunk, from its inputs to its outputs."""

    link: _Link
    x_i: list[Tensor]
    z_i: list[Tensor]
    cache: ChunkCache

    def backward(self, chunk: slice, grads_z: Sequence[Tensor | None], keep_graph: bool) -> list[Tensor | None]:
        """Add the chunk's gradients to the sums of parameters, keys, values and states; return its input gradients."""
        link, kept_kv = self.link, self.link.saved.kv
        keys = link.stream.call.key_positions(chunk)
        if kept_kv is not None:
            if link.frees_kv_early:
                notify_chunk(link.layer, chunk, "refill")
                kept_kv.refill_buffers(keys, self.cache.chunk_kv)
            notify_chunk(link.layer, chunk, "load sums")
            kept_kv.load_gradient_sums(keys)
        notify_chunk(link.layer, chunk, "vjp")
        output_grads = [(z, grad) for z, grad in zip(self.z_i, grads_z, strict=True) if grad is not None]
        leaves = [x for x in self.x_i if x.requires_grad]
        grads = chunk_vjp(leaves, output_grads, self.cache, link.parameters)
        grads_x = [next(grads) if x.requires_grad else None for x in self.x_i]
        self.cache.add_leaf_grads(grads)
        for total, grad in zip(link.sums, grads, strict=True):
            total.add_term(grad)
        if kept_kv is not None:
            notify_chunk(link.layer, chunk, "save sums")
            kept_kv.save_gradient_sums(keys, keep_graph)
        return grads_x


class LayerChain:
    """Layer calls that run backward together, chunk by chunk; each call reads the preceding call's hidden states."""

    def __init__(self, first_stream: LayerStream, hidden: Tensor) -> None:
        self.chunks, self.schedule = first_stream.chunks, first_stream.settings.schedule
        self.along: Along = first_stream.call.inputs[first_stream.call.hidden_name]
        self.links: list[_Link] = []
        self.other_inputs: list[Tensor] = []
        """Inputs of the layers other than hidden states, each once."""
        self.other_along: list[Along] = []
        self.router_totals: list[Tensor] = []
        """Sums over the router logits (``RouterSums``) of the chain's layers so far."""
        self.sums_before: RouterSums | None = None if first_stream.routers is None else first_stream.routers.call_sums
        """Sums over the router logits of the layers before the chain."""
        self.nodes: list[weakref.ref[Any]] = []
        self.nodes_run: set[tuple[int, int]] = set()
        """(id of the backward pass, number of layers) of each node that ran."""
        self.freed = False
        self.grad_input = _GradientSlot()
        self.token = _ChainInput.apply(self.grad_input, hidden)
        """Scalar that connects the chain to its first input; its node returns the gradient in ``grad_input``."""

    def can_append(self, previous: LayerStream | None, stream: LayerStream, tensors: Sequence[Tensor]) -> bool:
        """Return True if a layer call can be appended to the chain.

        The call must have the chain's chunks and schedule, and its other arguments must not be outputs of the chain.
        The hidden states between the chain and the call must have no gradient hooks and not retain their gradient.
        """
        hidden, other_inputs = tensors[0], tensors[1:]
        watched = hidden._backward_hooks or hidden.retains_grad
        chain_nodes = {id(node) for ref in self.nodes if (node := ref()) is not None}
        return (
            not (self.freed or watched)
            and self.links[-1].stream is previous
            and self.chunks == stream.chunks
            and self.schedule == stream.settings.schedule
            and not any(id(x.grad_fn) in chain_nodes for x in other_inputs)
        )

    def append(
        self,
        owner: StreamedLayer,
        stream: LayerStream,
        weights: Weights,
        parameters: Sequence[Tensor],
        other_inputs: Sequence[Tensor],
        outputs: list[Tensor],
    ) -> list[Tensor]:
        """Append a layer call that has run forward; return its outputs, attached to the node of all layers so far.

        The hidden states come first, the sums over router logits of all layers so far last.
        """
        places = []
        for x, along in zip(other_inputs, list(stream.call.inputs.values())[1:], strict=True):
            matches = (i for i, other in enumerate(self.other_inputs) if other is x and self.other_along[i] == along)
            if (place := next(matches, None)) is None:
                place = len(self.other_inputs)
                self.other_inputs.append(x)
                self.other_along.append(along)
            places.append(place)
        self.links.append(_Link(owner, stream, weights, tuple(parameters), places))
        stream.call.drop_input_tensors()
        layer_output_count = len(stream.outputs.along)
        if stream.sums:
            sums = outputs[layer_output_count:]
            self.router_totals = (
                [a + b for a, b in zip(self.router_totals, sums, strict=True)] if self.router_totals else sums
            )
        trained = [p for link in self.links for p in link.parameters]
        returned = [*outputs[:layer_output_count], *(total.clone() for total in self.router_totals)]
        return list(_ChainedLayers.apply(self, len(self.links), returned, self.token, *self.other_inputs, *trained))

    def has_other_pending_nodes(self, node_number: int) -> bool:
        """Record that node ``node_number`` runs; return True if another node of the chain will run in this backward."""
        task = torch._C._current_graph_task_id()
        self.nodes_run.add((task, node_number))
        others = ((n, node) for n, ref in enumerate(self.nodes, 1) if (node := ref()) is not None)
        return any((task, n) not in self.nodes_run and torch._C._will_engine_execute_node(node) for n, node in others)

    def free(self, keep_graph: bool) -> None:
        """Free the tensors of all layers after a backward; with ``keep_graph`` another backward may follow."""
        for link in self.links:
            link.free(keep_graph)
        if not keep_graph:
            self.freed = True
            self.links, self.other_inputs, self.router_totals = [], [], []


class _GradientSlot:
    """Holds the gradient of a chain's first input until the autograd node of this input returns it.

    A backward pass may end before that node, for example ``torch.autograd.grad`` of a layer's weights. Its gradient
    stays here, and a later backward pass must not use it.
    """

    def __init__(self) -> None:
        self._grad: Tensor | None = None
        self._task = -1

    def add(self, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        self._grad = grad if self._grad is None or self._task != task else self._grad + grad
        self._task = task

    def take(self) -> Tensor | None:
        grad, self._grad = self._grad, None
        return grad if self._task == torch._C._current_graph_task_id() else None


class _ChainInput(torch.autograd.Function):
    """Autograd node of a chain's first input; its backward returns the gradient held in the slot."""

    @staticmethod
    def forward(ctx: Any, slot: _GradientSlot, x: Tensor) -> Tensor:
        ctx.slot = slot
        return torch.zeros((), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        return None, ctx.slot.take()


class _ChainedLayers(torch.autograd.Function):
    """Autograd node of the first ``count`` layers of a chain of layer calls."""

    @staticmethod
    def forward(ctx: Any, chain: LayerChain, count: int, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        other_inputs = len(chain.other_inputs)
        ctx.save_for_backward(*inputs[1 : 1 + other_inputs])
        ctx.set_materialize_grads(False)
        ctx.chain, ctx.count = chain, count
        chain.nodes.append(weakref.ref(ctx))
        return tuple(outputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        chain: LayerChain | None = ctx.chain
        if chain is None or chain.freed:
            raise ArgumentError(
                "backward ran a second time through a streamed layer",
                fix="pass retain_graph=True to the first backward",
            )
        for link in chain.links[: ctx.count]:
            link.owner.check_before_backward(link.stream.call.length)
            link.weights.check_unchanged()
        other_inputs = list(ctx.saved_tensors)
        needs_input, *needs_extras = ctx.needs_input_grad[3 : 4 + len(other_inputs)]
        keep_graph = is_graph_retained() or chain.has_other_pending_nodes(ctx.count)
        step = _ChainBackward(chain, ctx.count, other_inputs, (needs_input, *needs_extras), keep_graph)
        grad_extras, grad_parameters = step.run(grad_outputs)
        chain.free(keep_graph)
        if not keep_graph:
            ctx.chain = None
        token = torch.zeros((), dtype=chain.token.dtype, device=chain.token.device) if needs_input else None
        return (None, None, None, token, *grad_extras, *grad_parameters)


class _ChainBackward:
    """Backward of the first ``count`` layers of a chain of layer calls.

    ``needed`` says which gradients to compute: of the chain's first input, then of each tensor in ``other_inputs``.
    """

    def __init__(
        self, chain: LayerChain, count: int, other_inputs: list[Tensor], needed: tuple[bool, ...], keep_graph: bool
    ) -> None:
        self.chain, self.links = chain, chain.links[:count]
        self.other_inputs, self.keep_graph = other_inputs, keep_graph
        self.needs_input, *self.needs_extras = needed
        widen = chain.schedule.grad_dtype == "float32"
        self.full_grads = [
            torch.zeros_like(x) if needs and along is not None else None
            for x, along, needs in zip(other_inputs, chain.other_along, self.needs_extras, strict=False)
        ]
        self.extra_sums = [GradientSum(x, widen) for x in other_inputs]
        size = count if chain.schedule.levels == 1 else min(count, chain.schedule.segment_size or 1)
        self.starts = sorted({max(0, start) for start in range(count - size, -size, -size)})
        """Index of the first layer of each segment; only the first segment may be shorter than the others."""

    def run(self, grad_outputs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run the backward over all chunks; return the gradients of ``other_inputs`` and of the layers' parameters.

        The gradient of the first input is stored in ``chain.grad_input``.
        """
        chain, last = self.chain, self.links[-1].stream
        layer_output_count = len(last.outputs.along)
        source = self.links[0].stream.stored_input()
        with ExitStack() as stack:
            for link in self.links:
                notify_chunk(link.layer, slice(0, 0), "prepare")
                link.prepare_backward()
                stack.enter_context(link.weights.applied())
                stack.enter_context(link.stream.pass_over_chunks(link.sums))
            grads_z = [last.output_gradient(grad_outputs[0]), *grad_outputs[1:layer_output_count]]
            for stored in (source, grads_z[0]):
                if isinstance(stored, StoredTensor):
                    stored.set_read_order(chain.chunks[::-1])
            grad_input = self._input_grad_buffer(source, grads_z[0], grad_outputs[0]) if self.needs_input else None
            for chunk in reversed(chain.chunks):
                grads_z_i = [
                    None if grad is None else read_chunk(grad, along, chunk)
                    for grad, along in zip(grads_z, last.outputs.along, strict=True)
                ]
                dx_i = self._run_chunk(
                    chunk, read_chunk(source, chain.along, chunk), grads_z_i, grad_outputs[layer_output_count:]
                )
                if grad_input is not None:
                    buffer_i = read_chunk(grad_input, chain.along, chunk)
                    buffer_i.zero_() if dx_i is None else buffer_i.copy_(dx_i)
        if isinstance(grads_z[0], StoredTensor):
            grads_z[0].free()
        if grad_input is not None:
            chain.grad_input.add(grad_input)
        return self._other_grads(), list(self._parameter_grads())

    def _input_grad_buffer(self, source: Source, grad_z: Source | None, incoming: Tensor | None) -> Tensor:
        may_overwrite = isinstance(grad_z, Tensor) and grad_z is not incoming
        if (
            isinstance(grad_z, Tensor)
            and may_overwrite
            and (grad_z.shape, grad_z.dtype) == (source.shape, source.dtype)
        ):
            return grad_z
        return torch.empty(source.shape, dtype=source.dtype, device=source.device)

    def _run_chunk(
        self, chunk: slice, x: Tensor, grads_z_i: list[Tensor | None], grad_sums: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Run all layers on one chunk forward, then backward; return the gradient of the first layer's input chunk."""
        x = x.detach()
        inputs = {0: x}
        for index, link in enumerate(self.links[: self.starts[-1]]):
            x = link.recompute_output(chunk, [x, *self._other_inputs_of(link, chunk)])
            if index + 1 in self.starts:
                inputs[index + 1] = x
        extra_grads: dict[int, Tensor] = {}
        for start, stop in zip(self.starts[::-1], [len(self.links), *self.starts[:0:-1]], strict=True):
            x, graphs = inputs.pop(start), []
            for index, link in enumerate(self.links[start:stop], start):
                leaves = [x.detach(), *self._other_inputs_of(link, chunk)]
                needs = [index > 0 or self.needs_input, *(self.needs_extras[place] for place in link.other_inputs)]
                for leaf, needed in zip(leaves, needs, strict=True):
                    leaf.requires_grad_(needed)
                graphs.append(link.run_with_graph(chunk, leaves))
                x = graphs[-1].z_i[0]
            del x, leaves
            while graphs:
                graph = graphs.pop()
                sums = grad_sums if graph.link.stream.sums else ()
                grads = graph.backward(chunk, [*grads_z_i, *sums], self.keep_graph)
                self._add_other_grads(graph.link, grads[1:], extra_grads)
                grads_z_i = [grads[0]] + [None] * (len(graphs[-1].link.stream.outputs.along) - 1 if graphs else 0)
            if start:
                grads_z_i = [grads_z_i[0]] + [None] * (len(self.links[start - 1].stream.outputs.along) - 1)
        for place, grad in extra_grads.items():
            full_grad = self.full_grads[place]
            assert full_grad is not None
            read_chunk(full_grad, self.chain.other_along[place], chunk).copy_(grad)
        return grads_z_i[0]

    def _other_inputs_of(self, link: _Link, chunk: slice) -> list[Tensor]:
        along = self.chain.other_along
        return [read_chunk(self.other_inputs[place], along[place], chunk).detach() for place in link.other_inputs]

    def _add_other_grads(self, link: _Link, grads: Sequence[Tensor | None], chunk_grads: dict[int, Tensor]) -> None:
        for place, grad in zip(link.other_inputs, grads, strict=True):
            if self.full_grads[place] is None:
                self.extra_sums[place].add_term(grad)
            elif grad is not None:
                chunk_grads[place] = chunk_grads[place] + grad if place in chunk_grads else grad

    def _other_grads(self) -> list[Tensor | None]:
        grads = [
            total.result() if full_grad is None else full_grad
            for full_grad, total in zip(self.full_grads, self.extra_sums, strict=True)
        ]
        for link in self.links:
            names: list[str | SharedKey] = list(link.stream.call.inputs)[1:]
            for name, place in zip(names, link.other_inputs, strict=True):
                if isinstance(name, tuple) and name[0] == PAST:
                    grads[place] = link.stream.kv.past_grads()[name[2]]
        return grads

    def _parameter_grads(self) -> Iterator[Tensor | None]:
        for link in self.links:
            notify_chunk(link.layer, slice(0, 0), "finish")
            for total in link.sums:
                yield total.result()
                total.total = None  # free this sum before the next is cast
