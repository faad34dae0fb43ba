"""One call of a decoder layer, and its passes over the chunks of the sequence.

    forward    first to last chunk, without a graph: computes the outputs, and saves the tensors that the backward needs
    recompute  the forward again with the same random numbers, for the hidden states alone: the input of the next layer,
               if it was not stored; with ``order="chunk"``, of one chunk
    project    first to last chunk, without a graph: stops in each chunk once its keys and values are computed
    replay     one chunk with its graph, for the backward, which runs from the last chunk to the first
    whole      the whole sequence at once with its graph, as in plain autograd

The names of passes are values of ``Pass``; the forward has the name ``store``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from streamtune.engine.attention import SavedAttention, SavedOutputs
from streamtune.engine.cache import ChunkCache, Pass, ProjectionDone
from streamtune.engine.call import LayerCall
from streamtune.engine.call_parts import LayerOutputs
from streamtune.engine.context import ChunkContext
from streamtune.engine.fused import FusedLinears
from streamtune.engine.inspect_model import caches_keys
from streamtune.engine.kv import KeysAndValues, States
from streamtune.engine.memory.tiers import Source, StoredTensor, Tier
from streamtune.engine.observe import Modes, notify_chunk
from streamtune.engine.rows import PackedRows
from streamtune.engine.saved import SavedTensors, save_kv_spans
from streamtune.engine.scan import scans_from_state
from streamtune.engine.sequence.shards import ChunkExchange
from streamtune.engine.sequence.states import NeedsFragments, SharedStates
from streamtune.engine.sharded import gathered_weights
from streamtune.engine.streamed_layer import Scope, StreamedLayer
from streamtune.engine.vjp import Along, GradientSum, chunk_view, read_chunk
from streamtune.ops.forward_state import Autocast, RandomState
from streamtune.schedule import Schedule
from streamtune.schedule import Tier as TierName


@dataclass(frozen=True)
class CallSettings:
    """Schedule, modes and packed rows of one layer call, recorded in its forward for its backward."""

    schedule: Schedule
    device: torch.device
    batch: int
    rows: PackedRows | None
    autocast: Autocast
    modes: Modes
    counted: Tensor | None
    """Mask ``[B, T]``, nonzero at the tokens that the router loss counts; None counts all tokens."""

    @classmethod
    def capture(cls, call: LayerCall, owner: StreamedLayer) -> CallSettings:
        """Return the settings that now apply to ``call``."""
        context, routers, device = owner.parts.context, owner.parts.routers, call.hidden.device
        rows = call.shards.rows if call.shards is not None and context.rows is None else context.rows
        counted_BT = routers.mask_BT if routers is not None and routers.active else None
        schedule, batch = context.schedule or owner.schedule, call.hidden.shape[0]
        return cls(schedule, device, batch, rows, Autocast.capture(device), Modes.capture(call.layer), counted_BT)


class LayerStream:
    """One call of a layer, run chunk by chunk: its forward, and the recomputation that its backward needs.

    ``producer`` is the layer call whose output is this call's input, if that call can recompute its output; else None.
    """

    def __init__(self, call: LayerCall, owner: StreamedLayer, producer: LayerStream | None = None) -> None:
        self.call, self.owner, self.producer = call, owner, producer
        self.settings, self.saved = CallSettings.capture(call, owner), SavedTensors()
        self.widen = self.settings.schedule.grad_dtype == "float32"
        self.chain: weakref.ref[Any] | None = None
        """With ``order="chunk"``, the chain of layer calls (``LayerChain``) that this call belongs to."""
        self.input_is_recomputed = False
        """True if the previous layer of the chain recomputes this call's input in the backward."""
        self.grad_target: LayerStream | None = None
        """Layer call that computed this call's input; with ``stream_grads`` it receives the gradient of that input."""
        self.grad_from_next = _NextLayerGradient()
        self.outputs, self.sums = LayerOutputs(owner.name, call.inputs[call.hidden_name]), 0
        routers = owner.parts.routers
        self.routers = routers if routers is not None and routers.active else None
        listening: list[Scope] = [] if self.routers is None else [self.routers.collecting_logits]
        self.scopes = [*owner.chunk_contexts(self.settings.device), *listening]
        self._choose_chunks(owner.carries_states or (self.is_chunk_order and owner.parts.last_call.ends_with_rows))

    def _choose_chunks(self, with_rows: bool) -> None:
        """Set the chunks, with ``with_rows`` also cut where packed rows begin; create empty stores
        for keys and states.
        """
        settings, shards = self.settings, self.call.shards
        self.states = States(settings.rows)
        if shards is not None:
            self.states = SharedStates(shards, settings.rows, with_rows, settings.device)
        if self.owner.parts.context.one_chunk:
            self.chunks = [slice(0, self.call.length)]
        elif settings.rows is None or not with_rows:
            self.chunks = self.call.split_into_chunks(settings.schedule)
        elif isinstance(self.states, SharedStates):
            self.chunks = self.states.fragments
        else:
            self.chunks = settings.rows.chunks(settings.schedule)
        if shards is None:
            kv_length = self.call.key_positions(slice(0, self.call.length)).stop
        else:
            kv_length = self.call.length if shards.form == "ring" else shards.padded_length
        self.kv = KeysAndValues(kv_length, self.widen, self.call.past)
        self.entry_updates: dict[Any, int] = {}
        """Index of the cache update that computed each entry which this layer adds to the keys and values shared
        between layers.
        """
        self.random: dict[int, RandomState] = {}

    @property
    def is_chunk_order(self) -> bool:
        """True if the schedule has ``order="chunk"``."""
        return self.settings.schedule.order == "chunk"

    @property
    def hidden_sequence_dim(self) -> int:
        """Sequence dimension of the hidden states."""
        along = self.outputs.hidden_sequence_dim
        assert along is not None
        return along

    @property
    def output_sequence_dims(self) -> list[Along]:
        """Sequence dimension of each output; None for sums over router logits."""
        return [*self.outputs.along, *[None] * self.sums]

    @property
    def can_recompute_output(self) -> bool:
        """True if no input but the hidden states needs a gradient; they then suffice to recompute the output."""
        return len(self.call.inputs) == 1

    def run_chunk(self, chunk: slice, pass_name: Pass, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """Compute ``z(i) = f_W(x(i), prefix)`` on one chunk, with the layer's own forward.

        The prefix is the keys, values and states of earlier chunks. Return the outputs, the first ``[B, T_i, C]``, and
        the cache that the layer used.
        """
        notify_chunk(self.call.layer, chunk, pass_name)
        run_slice = self.states.tokens_to_run(chunk)
        if run_slice != chunk:
            x_i = [_repeat_token(x, along) for x, along in zip(x_i, self.call.inputs.values(), strict=True)]
        shards = self.call.shards
        exchange = None if shards is None else ChunkExchange(shards, chunk)
        keys = self.call.key_positions(chunk) if exchange is None else exchange.cache_slice
        cache = ChunkCache(self.kv, self.states, keys, self.call.first_key_position(chunk), pass_name, exchange)
        if exchange is not None:
            exchange.first_key = cache.first_key
        attention = self.saved.attention
        saved = SavedOutputs(attention, chunk.start, last_read=pass_name == "replay") if attention is not None else None
        chunk_scopes: list[Scope] = [
            ChunkContext(exchange, saved).as_current,
            partial(scans_from_state, self.owner.stateless_scans, cache),
        ]
        with ExitStack() as stack:
            for scope in (*self.scopes, *chunk_scopes):
                stack.enter_context(scope())
            out, entry_updates = self.call.run_chunk(run_slice, cache, dict(zip(self.call.inputs, x_i, strict=True)))
            sums = (
                [] if self.routers is None else self.routers.sum_collected_logits(self._router_mask(chunk, run_slice))
            )
        cache.end_chunk()
        self.entry_updates |= entry_updates
        self.sums = len(sums)
        outputs = self.outputs.chunk_tensors(out, run_slice, keep=pass_name in ("store", "whole"))
        if run_slice != chunk:
            outputs = [chunk_view(z, along, slice(0, 1)) for z, along in zip(outputs, self.outputs.along, strict=True)]
        return [*outputs, *sums], cache

    def _router_mask(self, chunk: slice, run_slice: slice) -> Tensor | None:
        """Return a mask over ``run_slice``, nonzero at the tokens that the router loss counts; None counts all."""
        counted_BT = self.settings.counted
        if run_slice == chunk:
            return None if counted_BT is None else counted_BT[:, chunk]
        counted = torch.zeros(self.settings.batch, run_slice.stop - run_slice.start, device=self.settings.device)
        counted[:, : chunk.stop - chunk.start] = 1 if counted_BT is None else counted_BT[:, chunk]
        return counted

    @contextmanager
    def pass_over_chunks(self, sums: Sequence[GradientSum] = ()) -> Iterator[None]:
        """Copy the layer's weights to the device, and cast its linear weights, once for all chunks in this context.

        In a backward, ``sums`` are the gradient accumulators of the parameters.
        """
        offloaded, scopes = self.owner.parts.offloaded, self.scopes
        with nullcontext() if offloaded is None else offloaded.weights_on_device(self.call.layer, prefetch_offset=1):
            if len(self.chunks) > 1:
                self.scopes = [*scopes, FusedLinears(self.call.layer, self.settings.autocast, sums).replacing_forwards]
            try:
                yield
            finally:
                self.scopes = scopes

    # The forward.

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], for_backward: bool = False) -> list[Tensor]:
        """Compute ``z = f_W(x)`` chunk by chunk, first to last, without a graph.

        Return the outputs, the first ``[B, T, C]``, followed by the keys and values that the layer shares with other
        layers.
        """
        z: list[Tensor] = []
        random_before = RandomState.capture(self.settings.device) if self.settings.rows else None
        if for_backward:
            self._save_input(inputs[0])
        if for_backward and self.is_chunk_order and self.settings.schedule.keep_kv == "host" and len(self.chunks) > 1:
            self.states.tier = self._get_tier("host")
        self.states.begin_pass(backward=False)
        for chunk in self.chunks:
            if for_backward:
                self.random[chunk.start] = RandomState.capture(self.settings.device)
            x_i = [chunk_view(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            if isinstance(self.saved.z_in, StoredTensor):
                self.saved.z_in.put(chunk, x_i[0])
            # The first chunk shows if the layer has states. Then it starts over, with chunks that end where rows do.
            try:
                z_i, cache = self.run_chunk(chunk, "store", x_i)
                uses_states = cache.uses_states and not self.owner.carries_states
            except NeedsFragments:
                uses_states = True
            if random_before is not None and uses_states:
                random_before.restore()
                self._cut_chunks_at_rows()
                return self.forward(inputs, for_backward)
            if not z:
                z = [
                    _empty_output(out, along, self.call.length)
                    for out, along in zip(z_i, self.output_sequence_dims, strict=True)
                ]
            for full, out, along in zip(z, z_i, self.output_sequence_dims, strict=True):
                full.add_(out) if along is None else chunk_view(full, along, chunk).copy_(out)
        self.saved.wait_for_copies()
        self.owner.narrow_states = self.states.has_state_narrower_than(inputs[0].dtype)
        self.states.end_pass()
        shared = [buffer for index in self.entry_updates.values() for buffer in self.kv.pairs[index]]
        self._save_kv_and_states(for_backward, recomputed=False, shared=bool(shared))
        return z + shared

    def _cut_chunks_at_rows(self) -> None:
        if caches_keys(self.call.layer):
            self.states.on_keys_used()
        self.owner.carries_states = self.owner.parts.last_call.ends_with_rows = True
        self._choose_chunks(with_rows=True)

    def run_unchunked(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute ``z = f_W(x)`` on the whole sequence with autograd's own graph, which saves all activations.

        Return the outputs, followed by keys and values that the layer shares with other layers. Return None if the
        layer has states and rows are packed or ranks share the sequence: the layer must then run in chunks.
        """
        random_before = RandomState.capture(self.settings.device) if self.settings.rows or self.call.shards else None
        uses_states = random_before is not None and self.owner.carries_states
        if not uses_states:
            try:
                z, cache = self.run_chunk(slice(0, self.call.length), "whole", list(inputs))
                uses_states = random_before is not None and cache.uses_states
            except NeedsFragments:
                uses_states = True
        if random_before is not None and uses_states:
            random_before.restore()
            self._cut_chunks_at_rows()
            return None
        if distributed.is_available() and distributed.is_initialized():
            z[0] = _with_unused_weights(z, inputs, self.call.layer)
        return z + [cache.chunk_kv[2 * index + place] for index in self.entry_updates.values() for place in (0, 1)]

    def assemble_output(self, outputs: list[Tensor], sharing: Any) -> Any:
        """Return the output in the layer's form (a tensor or tuple); store shared keys and values in ``sharing``."""
        layer_output_count, output_count = len(self.outputs.along), len(self.output_sequence_dims)
        if self.routers is not None:
            self.routers.add_layer_sums(outputs[layer_output_count:output_count])
        for place, key in enumerate(self.entry_updates):
            sharing[key] = tuple(outputs[output_count + 2 * place : output_count + 2 * place + 2])
        return self.outputs.rebuild_output(outputs[:layer_output_count])

    # Tensors that are saved for the backward.

    def _get_tier(self, name: TierName) -> Tier:
        return self.owner.parts.tiers.get_tier(name, self.settings.device)

    def _save_input(self, hidden: Tensor) -> None:
        place, keep_attention = self.owner.placement, self.settings.schedule.keep_attention
        if keep_attention != "no":
            self.saved.attention = SavedAttention(self._get_tier(keep_attention))
        if self.producer is not None or self.input_is_recomputed:
            self.saved.z_in = None
        elif place.tier == "device":
            self.saved.keep_on_device(hidden)
        else:
            self.saved.z_in = self._new_stored_tensor(place.tier, hidden)

    def _new_stored_tensor(self, name: TierName, like: Source) -> StoredTensor:
        return StoredTensor(self._get_tier(name), like, self.hidden_sequence_dim)

    def _save_kv_and_states(self, for_backward: bool, recomputed: bool, shared: bool = False) -> None:
        if self.is_chunk_order and for_backward:
            self._save_kv_by_chunk()
            return
        keep_kv = self.settings.schedule.keep_kv
        recompute = not self.owner.placement.ends_segment and self.can_recompute_output
        self.saved.must_recompute_kv = for_backward and not recomputed and recompute
        wanted = for_backward and not self.saved.must_recompute_kv
        if not (for_backward and shared) and not (wanted and keep_kv != "no"):
            self.kv.free_kv()
        elif keep_kv == "host" and not shared:
            self.kv.offload(self._get_tier("host"))
        if not wanted:
            self.states.free_states()

    def _save_kv_by_chunk(self) -> None:
        keys = [self.call.key_positions(chunk) for chunk in self.chunks]
        if len(keys) == 1:
            self.kv.free_kv()
            return
        first_keys = {
            own_keys.start: self.call.first_key_position(chunk)
            for own_keys, chunk in zip(keys, self.chunks, strict=True)
        }
        tier = self._get_tier("host" if self.settings.schedule.keep_kv == "host" else "device")
        notify_chunk(self.call.layer, self.chunks[-1], "keep")
        self.saved.kv = save_kv_spans(self.kv, keys, lambda own_keys: first_keys[own_keys.start], tier)

    # The backward.

    def load_input(self) -> Source:
        """Return the layer's input; if it was not stored, recompute it with the preceding layers of its segment.

        If weights are sharded (ZeRO stage 3, FSDP2), the weights of each recomputed layer are gathered once more.
        """
        todo: list[LayerStream] = []
        stream = self
        while stream.saved.z_in is None:
            assert stream.producer is not None
            todo.append(stream)
            stream = stream.producer
        for later in reversed(todo):
            source = stream.stored_input()
            later.saved.z_in = into = later._new_stored_tensor(later.owner.placement.tier, source)
            with (
                gathered_weights(stream.call.layer, during=self.call.layer, next_backward=later is self),
                stream.pass_over_chunks(),
            ):
                stream.recompute_forward(source, into)
            later.producer = None
            stream = later
        return self.stored_input()

    def stored_input(self) -> Source:
        """Return the stored input; raise :class:`ArgumentError` if it was changed in place since the forward."""
        return self.saved.checked_input(self.owner.name)

    def output_gradient(self, autograd_gradient: Tensor | None) -> Source | None:
        """Return the gradient of the output hidden states: autograd's plus the gradient that the next layer stored.

        None if there is neither. With ``stream_grads`` the next layer's backward stores a gradient here.
        """
        left = self.grad_from_next.take()
        if left is None or autograd_gradient is None:
            return left if autograd_gradient is None else autograd_gradient
        if is_placeholder(autograd_gradient):
            return left
        # Something besides the next layer read the hidden states.
        grad = torch.cat(
            [read_chunk(left, self.hidden_sequence_dim, chunk) for chunk in self.chunks], self.hidden_sequence_dim
        )
        return grad.add_(autograd_gradient)

    def allocate_grad_buffer(self, z: Source, grad_after: Source | None) -> Source:
        """Return the memory in which the next layer's backward writes the gradient of this call's output ``z``.

        The memory is on host or disk if layer inputs are offloaded. Otherwise it is the memory of ``grad_after``, the
        gradient of the next layer's output, if that has the same shape and dtype; else a new tensor. ``grad_after`` is
        None if it must not be overwritten.
        """
        offload, buffer = self.settings.schedule.offload, grad_after
        if offload != "device":
            buffer = self._new_stored_tensor(offload, z)
        elif not (isinstance(buffer, Tensor) and buffer.shape == z.shape and buffer.dtype == z.dtype):
            buffer = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        self.grad_from_next.put(buffer)
        return buffer

    def prepare_replay(self, inputs: Sequence[Source], keep_graph: bool = False) -> None:
        """Fetch or recompute the keys, values and states that chunks read in the backward (:meth:`replay_chunk`).

        With ``keep_graph`` another backward may follow. Then keys and values shared with other layers are copied,
        because :meth:`replay_chunk` overwrites them.
        """
        self.kv.grads.clear()  # an interrupted backward leaves sums behind
        self.states.grads.clear()
        if self.saved.must_recompute_kv and (self.states.has_states or self.settings.schedule.keep_kv != "no"):
            self.recompute_forward(inputs[0], None)
        self.states.begin_pass(backward=True)
        self.kv.fetch()
        if keep_graph and self.entry_updates:
            self.kv.copy_buffers()
        self.recompute_kv(inputs)
        self.saved.set_read_order(self.chunks[::-1])

    @torch.no_grad()
    def recompute_forward(self, z_in: Source, output_store: StoredTensor | None) -> None:
        """Run the forward again with the same random numbers; write the hidden states to ``output_store``, if given."""
        if isinstance(z_in, StoredTensor):
            z_in.set_read_order(self.chunks)
        self.states.begin_pass(backward=False)
        for chunk in self.chunks:
            with self._restored_state(chunk):
                z_i, _ = self.run_chunk(chunk, "store", [read_chunk(z_in, self.hidden_sequence_dim, chunk)])
            if output_store is not None:
                output_store.put(chunk, z_i[0])
        if output_store is not None:
            output_store.tier.wait_for_copies()
        self.states.end_pass()
        self._save_kv_and_states(for_backward=True, recomputed=True)

    @torch.no_grad()
    def recompute_kv(self, inputs: Sequence[Source]) -> None:
        """Recompute keys and values: run the layer on each chunk until they are computed.

        The last chunk is left out, because the backward begins with a run of that chunk (:meth:`replay_chunk`). If its
        keys and values are shared with other layers, it is included.
        """
        if self.kv.pairs or not self.kv.updates:
            return
        if isinstance(inputs[0], StoredTensor):
            inputs[0].set_read_order(self.chunks)
        chunks = self.chunks if self.entry_updates else self.chunks[:-1]  # gradients of shared K, V come before replay
        for chunk in chunks:
            x_i = [read_chunk(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            with self._restored_state(chunk):
                try:
                    self.run_chunk(chunk, "project", x_i)
                except ProjectionDone:
                    continue

    @torch.no_grad()
    def recompute_chunk(self, chunk: slice, x_i: list[Tensor]) -> Tensor:
        """Return the output hidden states ``[B, T_i, C]`` of one chunk, recomputed without a graph."""
        with self._restored_state(chunk):
            return self.run_chunk(chunk, "recompute", x_i)[0][0]

    def replay_chunk(self, chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """Run the layer on one chunk again, with a graph; return its outputs and the cache that it used."""
        with self._restored_state(chunk):
            return self.run_chunk(chunk, "replay", x_i)

    @contextmanager
    def _restored_state(self, chunk: slice) -> Iterator[None]:
        with self.random[chunk.start].replayed(), self.settings.autocast.applied(), self.settings.modes.applied():
            yield

    def free(self, keep_graph: bool = False) -> None:
        """Free the tensors that the backward used; with ``keep_graph`` keep input and states for another backward."""
        self.kv.free_all()
        self.states.end_pass()
        if keep_graph:
            self.saved.attention = None  # the next backward recomputes attention
            self.states.grads.clear()
            return
        self.states.free_states()
        self.saved.free()
        self.producer = self.grad_target = None


class _NextLayerGradient:
    """Gradient of a call's output, written by the next layer's backward, and the id of that backward pass.

    If a backward pass stops before this layer, the gradient stays here, and a later backward pass must not use it.
    """

    def __init__(self) -> None:
        self._grad: Source | None = None
        self._task = -1

    def put(self, grad: Source) -> None:
        self._grad, self._task = grad, torch._C._current_graph_task_id()

    def take(self) -> Source | None:
        grad, self._grad = self._grad, None
        return grad if self._task == torch._C._current_graph_task_id() else None


def placeholder(like: Source) -> Tensor:
    """Return zeros that take no memory: autograd gets them in place of a gradient stored elsewhere."""
    return _zero_scalar(like.dtype, like.device).expand(like.shape)


def is_placeholder(grad: Tensor) -> bool:
    """Return True if ``grad`` is a tensor from :func:`placeholder` to which autograd has added nothing."""
    return grad.untyped_storage()._cdata == _zero_scalar(grad.dtype, grad.device).untyped_storage()._cdata


@lru_cache(maxsize=32)
def _zero_scalar(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _with_unused_weights(outputs: Sequence[Tensor], inputs: Sequence[Tensor], layer: nn.Module) -> Tensor:
    """Return the first output plus 0 times the trained weights that took no part in the outputs.

    These weights then have a gradient of 0, as ranks need it, which reduce the gradients of a layer together.
    """
    seen, nodes, used = {x.grad_fn for x in inputs}, [x.grad_fn for x in outputs], set[int]()
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        used.add(id(getattr(node, "variable", None)))
        nodes += [before for before, _ in node.next_functions]
    out = outputs[0]
    for parameter in layer.parameters():
        if parameter.requires_grad and parameter.numel() and id(parameter) not in used:
            out = out + (0.0 * parameter.reshape(-1)[0]).to(out.dtype)
    return out


def _repeat_token(x: Tensor, sequence_dim: Along) -> Tensor:
    return x if sequence_dim is None else torch.cat([x, x.detach()], sequence_dim)


def _empty_output(chunk_output: Tensor, sequence_dim: Along, length: int) -> Tensor:
    if sequence_dim is None:
        return torch.zeros_like(chunk_output)
    return chunk_output.new_empty(
        [length if dim == sequence_dim else size for dim, size in enumerate(chunk_output.shape)]
    )
