"""A decoder layer that streams: the forward chunk by chunk, and an autograd node whose backward is the paper's sum.

The node stands where ``torch.utils.checkpoint`` stands: it saves the layer's input and nothing else. It takes the
layer's parameters as inputs and returns the gradient of each **once**, so hooks on parameters (DDP, ZeRO, FSDP, an
optimizer in the backward) fire once per layer and step, whatever the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from streamtune.engine.ambient import Autocast, RandomState
from streamtune.engine.cache import ChunkCache, KeysAndValues, ProjectionDone, Walk
from streamtune.engine.call import LayerCall
from streamtune.engine.outputs import OtherOutputs
from streamtune.engine.schedule import Schedule
from streamtune.engine.tiles import OwnAttention, is_ours
from streamtune.engine.vjp import streamed_vjp
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.mask import ForeignAttentionError

__all__ = ["StreamedForward", "strange_leaves"]


class StreamedForward:
    """Replaces ``layer.forward`` on one instance; computes the same function with the activations of one chunk.

    Args:
        layer: A decoder layer of a ``transformers`` model.
        schedule: How to cut the sequence.
        own: The attention implementation of a layer that computes its attention itself. None for one that takes it
            from ``transformers``' interface; if its first call finds that it does more, it keeps its eager one.
    """

    def __init__(self, layer: nn.Module, schedule: Schedule, own: str | None = None) -> None:
        self.layer = layer
        self.schedule = schedule
        self.leaves_checked = self.settled = False
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
        stream = _Stream(call, self.schedule)
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        inputs = [*call.tensors(call.streamed), *call.tensors(call.shared), *parameters]
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            return stream.restore(_StreamedLayer.apply(stream, self, *inputs))
        return stream.restore(stream.forward(call.hidden))

    def _generate(self, call: LayerCall) -> Any:
        """The layer on its model's own cache. What it asks of its attention is found out before that is written to."""
        if self.own is None and not self.settled and call.mask is not None and call.mask.q_offset == 0:
            with RandomState.now(call.hidden.device).replayed():
                try:
                    _Stream(call, self.schedule).forward(call.hidden)
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

    def __init__(self, call: LayerCall, schedule: Schedule) -> None:
        mask = call.mask
        if mask is not None and mask.sees_future:
            raise UnsupportedModelError(
                "the attention mask lets a token see later tokens, so its chunk cannot be computed before theirs",
                where=type(call.layer).__name__,
            )
        self.call, self.length, self.mask = call, call.length, mask
        self.chunks = schedule.chunks(call.length)
        self.keep_kv = schedule.keep_kv
        self.widen = schedule.grad_dtype == "float32"
        self.kv = KeysAndValues(call.length, self.widen)
        self.autocast = Autocast.now(call.hidden.device)
        self.random: dict[int, RandomState] = {}
        self.others = OtherOutputs(type(call.layer).__name__)

    def run(self, chunk: slice, walk: Walk, given: dict[str, Tensor]) -> tuple[Tensor, ChunkCache]:
        """The layer on one chunk: ``z_out(i)`` ``[B, T_i, C]`` and the cache it saw."""
        cache = ChunkCache(self.kv, chunk, self.call.first_key(chunk), walk)
        out = self.call.run(chunk, cache, given, self.length)
        return self.others.take(out, chunk, keep=walk == "store"), cache

    def restore(self, z_out: Tensor) -> Any:
        """The output in the form the layer gives it."""
        return self.others.restore(z_out)

    @torch.no_grad()
    def forward(self, z_in: Tensor, for_backward: bool = False) -> Tensor:
        """``z_out`` ``[B, T, C]``, chunk by chunk, first to last."""
        names = self.call.streamed
        inputs = self.call.tensors(names)
        z_out: Tensor | None = None
        for chunk in self.chunks:
            if for_backward:
                self.random[chunk.start] = RandomState.now(z_in.device)
            z_out_i, _ = self.run(chunk, "store", {n: x[:, chunk] for n, x in zip(names, inputs, strict=True)})
            if z_out is None:
                z_out = z_out_i.new_empty((z_in.shape[0], self.length, *z_out_i.shape[2:]))
            z_out[:, chunk] = z_out_i
        assert z_out is not None
        if not (for_backward and self.keep_kv):
            self.kv.release()
        return z_out

    @torch.no_grad()
    def project(self, streamed: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        """Fill K and V again, running the layer only until they are made. The last chunk makes its own in replay."""
        if self.kv.pairs or not self.kv.updates:
            return
        for chunk in self.chunks[:-1]:
            given = self.given(streamed, shared, chunk)
            with self.random[chunk.start].replayed(), self.autocast.again():
                try:
                    self.run(chunk, "project", given)
                except ProjectionDone:
                    continue

    def given(self, streamed: Sequence[Tensor], shared: Sequence[Tensor], chunk: slice) -> dict[str, Tensor]:
        """The tensor arguments of one chunk by name."""
        cut = {name: x[:, chunk] for name, x in zip(self.call.streamed, streamed, strict=True)}
        return cut | dict(zip(self.call.shared, shared, strict=True))

    def replay(self, chunk: slice, streamed: list[Tensor], shared: list[Tensor]) -> tuple[Tensor, ChunkCache]:
        """The layer on one chunk with gradients, drawing the forward's random numbers again."""
        given = dict(zip([*self.call.streamed, *self.call.shared], [*streamed, *shared], strict=True))
        with self.random[chunk.start].replayed(), self.autocast.again():
            return self.run(chunk, "replay", given)


class _StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: _Stream, owner: StreamedForward, *inputs: Tensor) -> Tensor:
        streamed, shared = len(stream.call.streamed), len(stream.call.shared)
        z_out = stream.forward(inputs[0], for_backward=True)
        ctx.save_for_backward(*inputs[: streamed + shared])
        ctx.counts = (streamed, shared)
        ctx.stream, ctx.owner = stream, owner
        ctx.parameters = inputs[streamed + shared :]
        stream.call.forget_tensors()
        return z_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z_out: Tensor) -> tuple[Tensor | None, ...]:
        stream: _Stream | None = ctx.stream
        if stream is None:
            raise ArgumentError(
                "a streamed layer can go backward once", mend="call the model again for a second backward"
            )
        count, _ = ctx.counts
        streamed, shared = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:])

        def run_chunk(chunk: slice, x_i: list[Tensor], shared_i: list[Tensor]) -> tuple[Tensor, ChunkCache]:
            z_out_i, cache = stream.replay(chunk, x_i, shared_i)
            if not ctx.owner.leaves_checked:
                _check_leaves(stream.call.layer, z_out_i, [*x_i, *shared_i, *cache.leaves, *ctx.parameters])
                ctx.owner.leaves_checked = True
            return z_out_i, cache

        stream.project(streamed, shared)
        grad_streamed, grad_rest = streamed_vjp(
            run_chunk,
            stream.chunks,
            stream.kv,
            streamed,
            shared,
            ctx.parameters,
            grad_z_out,
            needs_grad=ctx.needs_input_grad[2 : 2 + count],
            widen=stream.widen,
        )
        stream.kv.release()
        ctx.stream = ctx.parameters = None
        return (None, None, *grad_streamed, *grad_rest)


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
