"""A decoder layer that streams: the forward chunk by chunk, and an autograd node whose backward is the paper's sum.

The node stands where ``torch.utils.checkpoint`` stands: it saves the layer's input and nothing else. It takes the
layer's parameters as inputs and returns the gradient of each **once**, so hooks on parameters (DDP, ZeRO, FSDP, an
optimizer in the backward) fire once per layer and step, whatever the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from streamtune.engine.ambient import Autocast, RandomState, tell_chunk
from streamtune.engine.balance import RouterWatch
from streamtune.engine.cache import ChunkCache, KeysAndValues, ProjectionDone, States, Walk
from streamtune.engine.call import LayerCall
from streamtune.engine.outputs import LayerOutputs
from streamtune.engine.rows import CallFacts
from streamtune.engine.scan import carried_scan, mixers_with_a_bare_scan
from streamtune.engine.schedule import Schedule
from streamtune.engine.tiles import OwnAttention, is_ours
from streamtune.engine.vjp import Along, cut, streamed_vjp
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.view import ForeignAttentionError

__all__ = ["StreamedForward", "strange_leaves"]


class StreamedForward:
    """Replaces ``layer.forward`` on one instance; computes the same function with the activations of one chunk.

    Args:
        layer: A decoder layer of a ``transformers`` model.
        schedule: How to cut the sequence.
        own: The attention implementation of a layer that computes its attention itself. None for one that takes it
            from ``transformers``' interface; if its first call finds that it does more, it keeps its eager one.
        watch: Listens to the layer's router, if it has one.
        facts: What the model's call says that its layers are not told; read at each call.
    """

    def __init__(
        self,
        layer: nn.Module,
        schedule: Schedule,
        own: str | None = None,
        watch: RouterWatch | None = None,
        facts: CallFacts | None = None,
    ) -> None:
        self.layer = layer
        self.facts = CallFacts() if facts is None else facts
        self.carries_states = False
        self.watch = watch
        self.bare_scans = mixers_with_a_bare_scan(layer)
        self.schedule = schedule
        self.leaves_checked = self.settled = False
        self.narrow_states = False
        """Whether its last call handed on a state in a narrower dtype than that of its hidden states."""
        configs: list[Any] = [getattr(module, "config", None) for module in layer.modules()]
        self.configs = [config for config in configs if hasattr(config, "_attn_implementation_internal")]
        self.own = None if own is None else OwnAttention(own, tuple(self.configs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own signature and result."""
        if self.own is not None or self.settled:
            return self._call(args, kwargs)
        hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        before = RandomState.now(torch.device("cpu") if hidden is None else hidden.device)
        try:
            result = self._call(args, kwargs)
        except ForeignAttentionError:
            self.own = OwnAttention("eager", tuple(self.configs))
            before.restore()
            return self._call(args, kwargs)
        self.settled = True
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = LayerCall.bind(self.layer, args, kwargs, self.own)
        if call.cache is not None:
            if not torch.is_grad_enabled():  # generation: the model's own cache, the model's own walk
                return self._generate(call)
            if call.cache.get_seq_length() > 0:
                raise UnsupportedModelError(
                    "a filled key/value cache was passed while gradients are on",
                    where=type(self.layer).__name__,
                    mend="pass the whole sequence without past_key_values, or call the model under torch.no_grad()",
                )
        self._check_attention(call.length)
        stream = _Stream(call, self)
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        inputs = [*call.tensors(), *parameters]
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            sharing = call.sharing
            return stream.restore(list(_StreamedLayer.apply(stream, self, *inputs)), sharing)
        return stream.restore(stream.forward(call.tensors()), call.sharing)

    def _generate(self, call: LayerCall) -> Any:
        """The layer on its model's own cache. What it asks of its attention is found out before that is written to."""
        if self.own is None and not self.settled and call.mask is not None and call.mask.q_offset == 0:
            with RandomState.now(call.hidden.device).replayed():
                try:
                    _Stream(call, self).forward(call.tensors())
                except ForeignAttentionError:
                    raise
                except UnsupportedModelError:  # what cannot be streamed may still generate
                    pass
        try:
            return call.run_whole()
        except ForeignAttentionError as error:
            raise UnsupportedModelError(error.what, mend="fill the cache after stream(model), not before") from error

    def _check_attention(self, length: int) -> None:
        """Another attention does not know that a chunk's queries are the last of its keys, and would be wrong.

        Neither can a choice of keys be repeated that was made between equals: a score of the value alone is the same
        wherever a token stands again in the first layer, and which of them ``torch.topk`` keeps hangs on the number of
        keys, which is smaller in a chunk.
        """
        for config in self.configs:
            kept = getattr(config, "keep_window_size", None)
            if kept is not None and length > kept:
                raise UnsupportedModelError(
                    f"of {length} tokens the attention keeps keep_window_size={kept} by a score that repeated tokens "
                    "share, so that what it keeps depends on the chunk",
                    where=type(self.layer).__name__,
                    mend=f"train on rows of at most {kept} tokens",
                )
            if not is_ours(config._attn_implementation_internal):
                raise UnsupportedModelError(
                    f"the attention was set to {config._attn_implementation_internal!r} while the model is streamed",
                    where=type(self.layer).__name__,
                    mend="call set_attn_implementation before stream(model), or .remove() the stream first",
                )


class _Stream:
    """One call of one layer and all that its walks share."""

    def __init__(self, call: LayerCall, owner: StreamedForward) -> None:
        schedule = owner.schedule
        self.call, self.length, self.owner, self.rows = call, call.length, owner, owner.facts.rows
        self.chunks = self.rows.chunks(schedule) if self.rows and owner.carries_states else call.chunks(schedule)
        self.keep_kv = schedule.keep_kv != "no"
        self.widen = schedule.grad_dtype == "float32"
        self.kv = KeysAndValues(call.length, self.widen)
        self.states = States(self.rows)
        self.filled: dict[Any, int] = {}
        self.autocast = Autocast.now(call.hidden.device)
        self.random: dict[int, RandomState] = {}
        self.outputs = LayerOutputs(type(call.layer).__name__, call.inputs[call.hidden_name])
        self.bare_scans, self.sums = owner.bare_scans, 0
        self.watch = owner.watch if owner.watch is not None and owner.watch.active else None
        self.tokens = self.watch.mask_BT if self.watch else None  # at the time of its backward there may be others

    def run(self, chunk: slice, walk: Walk, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """The layer on one chunk: its outputs ``z(i)``, the first ``[B, T_i, C]``, and the cache it saw."""
        tell_chunk(self.call.layer, chunk, walk)
        cache = ChunkCache(self.kv, self.states, chunk, self.call.first_key(chunk), walk)
        given = dict(zip(self.call.inputs, x_i, strict=True))
        listening: AbstractContextManager[list[Tensor]] = self.watch.listening() if self.watch else nullcontext([])
        with carried_scan(self.bare_scans, cache), listening as heard:
            out, filled = self.call.run(chunk, cache, given)
        self.filled |= filled
        sums = self.watch.sums(heard, None if self.tokens is None else self.tokens[:, chunk]) if self.watch else []
        self.sums = len(sums)
        return [*self.outputs.take(out, chunk, keep=walk == "store"), *sums], cache

    @property
    def along(self) -> list[Along]:
        """How the outputs of a chunk follow the sequence: the layer's own do, its router's sums do not."""
        return [*self.outputs.along, *[None] * self.sums]

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], for_backward: bool = False) -> list[Tensor]:
        """The outputs ``z``, the first ``[B, T, C]``, chunk by chunk, first to last; behind them, what is shared."""
        z: list[Tensor] = []
        begin = RandomState.now(inputs[0].device) if self.rows else None
        for chunk in self.chunks:
            if for_backward:
                self.random[chunk.start] = RandomState.now(inputs[0].device)
            x_i = [cut(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            z_i, cache = self.run(chunk, "store", x_i)
            if begin is not None and cache.met_states and not self.owner.carries_states:
                self.owner.carries_states = True  # known from its first chunk on
                return self._again(inputs, for_backward, begin)
            if not z:
                z = [_whole(part, along, self.length) for part, along in zip(z_i, self.along, strict=True)]
            for whole, part, along in zip(z, z_i, self.along, strict=True):
                whole.add_(part) if along is None else cut(whole, along, chunk).copy_(part)
        self.owner.narrow_states = self.states.narrower_than(inputs[0].dtype)
        shared = [buffer for index in self.filled.values() for buffer in self.kv.pairs[index]]
        if not (for_backward and (self.keep_kv or shared)):
            self.kv.release()
        if not for_backward:
            self.states.release()
        return z + shared

    def _again(self, inputs: Sequence[Tensor], for_backward: bool, begin: RandomState) -> list[Tensor]:
        """The forward from its start, in chunks that end where packed rows do."""
        assert self.rows is not None
        self.chunks = self.rows.chunks(self.owner.schedule)
        self.kv, self.states, self.random = KeysAndValues(self.length, self.widen), States(self.rows), {}
        begin.restore()
        return self.forward(inputs, for_backward)

    def restore(self, outputs: list[Tensor], sharing: Any) -> Any:
        """The output in the form the layer gives it; what it shares goes where the next layers look for it."""
        own, count = len(self.outputs.along), len(self.along)
        if self.watch:
            self.watch.add(outputs[own:count])
        for place, key in enumerate(self.filled):
            sharing[key] = tuple(outputs[count + 2 * place : count + 2 * place + 2])
        return self.outputs.restore(outputs[:own])

    @torch.no_grad()
    def project(self, inputs: Sequence[Tensor]) -> None:
        """Fill K and V again, running the layer only until they are made. The last chunk makes its own in replay."""
        if self.kv.pairs or not self.kv.updates:
            return
        for chunk in self.chunks[:-1]:
            x_i = [cut(x, along, chunk) for x, along in zip(inputs, self.call.inputs.values(), strict=True)]
            with self.random[chunk.start].replayed(), self.autocast.again():
                try:
                    self.run(chunk, "project", x_i)
                except ProjectionDone:
                    continue

    def replay(self, chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
        """The layer on one chunk with gradients, drawing the forward's random numbers again."""
        with self.random[chunk.start].replayed(), self.autocast.again():
            return self.run(chunk, "replay", x_i)


def _whole(part: Tensor, along: Along, length: int) -> Tensor:
    """Room for an output of the whole sequence, given one chunk's; zeros for a sum."""
    if along is None:
        return torch.zeros_like(part)
    return part.new_empty([length if dim == along else size for dim, size in enumerate(part.shape)])


class _StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: _Stream, owner: StreamedForward, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = len(stream.call.inputs)
        outputs = stream.forward(inputs[:count], for_backward=True)
        ctx.save_for_backward(*inputs[:count])
        ctx.set_materialize_grads(False)
        ctx.stream, ctx.owner = stream, owner
        ctx.parameters = inputs[count:]
        stream.call.forget_tensors()
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        stream: _Stream | None = ctx.stream
        if stream is None:
            raise ArgumentError(
                "a streamed layer can go backward once", mend="call the model again for a second backward"
            )
        inputs = list(ctx.saved_tensors)
        count = len(stream.along)

        def run_chunk(chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
            z_i, cache = stream.replay(chunk, x_i)
            if not ctx.owner.leaves_checked:
                _check_leaves(stream.call.layer, z_i[0], [*x_i, *cache.leaves, *ctx.parameters])
                ctx.owner.leaves_checked = True
            return z_i, cache

        stream.project(inputs)
        for place, index in enumerate(stream.filled.values()):
            stream.kv.add_grads(index, grad_outputs[count + 2 * place : count + 2 * place + 2])
        grad_inputs, grad_parameters = streamed_vjp(
            run_chunk,
            stream.chunks,
            inputs,
            list(stream.call.inputs.values()),
            ctx.parameters,
            grad_outputs[:count],
            stream.along,
            needs_grad=ctx.needs_input_grad[2 : 2 + len(inputs)],
            widen=stream.widen,
        )
        stream.kv.release()
        stream.states.release()
        ctx.stream = ctx.parameters = None
        return (None, None, *grad_inputs, *grad_parameters)


def _check_leaves(layer: nn.Module, z_out: Tensor, known: Sequence[Tensor]) -> None:
    """Refuse a layer that reaches a trainable tensor the node does not know, and would not return the gradient of."""
    for leaf in strange_leaves(z_out, known):
        raise UnsupportedModelError(
            f"{type(layer).__name__} uses a trainable tensor of shape {tuple(leaf.shape)} "
            "that is not its own parameter, so its gradient would be lost",
            mend="freeze that tensor, or train without streaming",
        )


def strange_leaves(z_out: Tensor, known: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves of ``z_out``'s graph that need a gradient and are not among the known ones."""
    known_ids = {id(tensor) for tensor in known}
    todo, seen = [z_out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known_ids:
            yield variable
        todo.extend(parent for parent, _ in node.next_functions)
