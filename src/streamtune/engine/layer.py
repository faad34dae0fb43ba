"""The streamed decoder layer: a forward chunk by chunk, and an autograd node whose backward is the sum in ``vjp``.

The node replaces ``torch.utils.checkpoint``. It saves the layer's inputs, the random state, recurrent states and the
tensors that the schedule keeps. Everything else is recomputed. The layer's parameters are inputs of the node, which
returns each parameter's gradient **once**. So hooks on parameters (DDP, ZeRO, FSDP, an optimizer in the backward) fire
once per layer and step, for any number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, distributed

from streamtune.engine.attention import BiasError
from streamtune.engine.cache import ChunkCache
from streamtune.engine.call import PAST, LayerCall
from streamtune.engine.chain import run_in_chain
from streamtune.engine.hf_names import STATE
from streamtune.engine.kv import Past, refuse_filled_cache
from streamtune.engine.memory.tiers import StoredTensor
from streamtune.engine.observe import notify_chunk
from streamtune.engine.outside_layers import pop_embeddings
from streamtune.engine.own_attention import OwnAttention
from streamtune.engine.passes import LayerStream, placeholder
from streamtune.engine.rows import Branches
from streamtune.engine.sharded import Weights
from streamtune.engine.streamed_layer import StreamedLayer
from streamtune.engine.vjp import GradientSum, LayerInput, streamed_vjp
from streamtune.errors import ArgumentError, StreamTuneError, UnsupportedModelError
from streamtune.ops import first_order, is_graph_retained
from streamtune.ops.attention.rules import NeedsMaskTensorError
from streamtune.ops.forward_state import RandomState


class StreamedForward(StreamedLayer):
    """Replaces a decoder layer's forward by the same computation on one chunk of the sequence at a time."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; arguments and result are the same as for the forward of its class."""
        args, kwargs = tuple(map(pop_embeddings, args)), {key: pop_embeddings(value) for key, value in kwargs.items()}
        context = self.parts.context
        if context.plain:
            with self.weights_on_device((), prefetch_offset=1):
                return type(self.layer).forward(self.layer, *args, **kwargs)
        if self.own_attention is not None or self.attention_known:
            return self._dispatch(args, kwargs)
        hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        before = RandomState.capture(torch.device("cpu") if hidden is None else hidden.device)
        try:
            result = self._dispatch(args, kwargs)
        except NeedsMaskTensorError as error:
            if context.shards is not None:
                raise UnsupportedModelError(error.what, fix="set sequence_parallel_size: 1") from error
            self.own_attention = OwnAttention("eager")
            before.restore()
            return self._dispatch(args, kwargs)
        except Exception as error:
            expected = isinstance(error, StreamTuneError | torch.OutOfMemoryError) or _is_collective_error(error)
            if context.shards is None or expected:
                raise
            what = f"{self.name} does not run on one rank's shard of the sequence ({type(error).__name__}: {error})"
            ring = context.shards.form == "ulysses"
            other = "set sequence_parallel: ring" if ring else "set sequence_parallel_size: 1"
            raise UnsupportedModelError(what, fix=other) from error
        self.attention_known = True
        return result

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer in the first of these ways that applies; return its output.

            1. On all tokens at once: a cache was passed and gradients are off (generation).
            2. By chunks without a graph: no gradient is needed.
            3. In a chain, whose layers run backward together (``chain``): the schedule has ``order="chunk"``.
            4. On all tokens at once: the schedule keeps this layer's activations (``keep_layers``).
            5. By chunks, as one autograd node.

        In ways 2 to 5, the call's tokens may follow the tokens of a filled cache.
        """
        call = self._bind_call(args, kwargs)
        if call.passed_cache is not None:
            if not torch.is_grad_enabled():
                return self._run_generation(call)
            self._prepend_cache(call)
        self.check_attention(call.length if call.shards is None else call.shards.length)
        self.check_hooks()
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in (*call.input_tensors(), *parameters))):
            return self._run_without_graph(call)
        if (self.parts.context.schedule or self.schedule).order == "chunk":
            return run_in_chain(self, call, parameters)
        return self._run_with_graph(call, parameters)

    def _bind_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        context = self.parts.context
        own_attention = (
            OwnAttention("eager") if self.own_attention is None and context.one_chunk else self.own_attention
        )
        try:
            call = LayerCall.bind(self.layer, args, kwargs, own_attention, self.configs)
        except BiasError as error:
            call = self._bind_with_bias_mask(error, args, kwargs)
        if context.shards is not None:
            call.set_rank_shards(context.shards)
        if context.rows is not None and (context.shards is None or isinstance(context.rows, Branches)):
            call.restrict_masks_to_rows(context.rows)
        return call

    def _bind_with_bias_mask(self, error: BiasError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """Bind the arguments for eager attention, which adds the mask ``[B, H, T, T]`` to the scores as a bias."""

        def as_additive(value: Any) -> Any:
            if value is hidden or not isinstance(value, Tensor) or value.dim() != 4 or value.shape[2] != value.shape[3]:
                return value
            if value.requires_grad:
                raise UnsupportedModelError(
                    f"{error.what} and requires a gradient, which streaming cannot compute", where=self.name
                ) from error
            if value.dtype != torch.bool:
                return value
            lowest = torch.finfo(hidden.dtype).min
            return torch.zeros(value.shape, dtype=hidden.dtype, device=value.device).masked_fill_(~value, lowest)

        hidden: Tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        named = {key: as_additive(value) for key, value in kwargs.items()}
        return LayerCall.bind(self.layer, tuple(map(as_additive, args)), named, OwnAttention("eager"), self.configs)

    def _prepend_cache(self, call: LayerCall) -> None:
        """Let the call's tokens attend to the tokens in the cache that the model passed, if the cache is filled.

        Raises:
            UnsupportedModelError: The layer or its cache does not support this while gradients are on.
        """
        if call.cache_name == STATE:
            refuse_filled_cache("the layer takes a recurrent state as an argument", self.name)
        try:
            seen = int(call.passed_cache.get_seq_length())
        except (ValueError, AttributeError) as error:
            raise UnsupportedModelError(
                f"a cache of recurrent states was passed while gradients are on ({error})",
                where=self.name,
                fix="pass the whole sequence without a cache, or call the model under torch.no_grad()",
            ) from error
        if seen > 0:
            if self.parts.context.rows is not None:
                refuse_filled_cache("rows are packed or share a prefix", self.name)
            call.prepend_past(Past.from_cache(self.layer, call.passed_cache))

    def _run_generation(self, call: LayerCall) -> Any:
        """Run the layer on all tokens at once with the cache that the model passed.

        The first call is also run in chunks, before the cache is written to, to learn if StreamTune's attention
        supports the layer.
        """
        unknown = self.own_attention is None and not self.attention_known
        if unknown and call.lazy_mask is not None and call.lazy_mask.q_offset == 0:
            with RandomState.capture(call.hidden.device).replayed():
                try:
                    stream = LayerStream(call, self)
                    with stream.pass_over_chunks():
                        stream.forward(call.input_tensors())
                except NeedsMaskTensorError:
                    raise
                except UnsupportedModelError:  # a model that cannot be streamed may still generate
                    pass
        try:
            with self.weights_on_device((), prefetch_offset=1):
                return call.run_unchunked()
        except NeedsMaskTensorError as error:
            raise UnsupportedModelError(error.what, fix="fill the cache after stream(model), not before") from error

    def _run_without_graph(self, call: LayerCall) -> Any:
        stream = LayerStream(call, self)
        with stream.pass_over_chunks():
            return stream.assemble_output(stream.forward(call.input_tensors()), call.shared_kv)

    def _run_with_graph(self, call: LayerCall, parameters: Sequence[Tensor]) -> Any:
        last_call, inputs = self.parts.last_call, [*call.input_tensors(), *parameters]
        before: LayerStream | None = last_call.producing_call(call.hidden)
        recompute = before is not None and before.can_recompute_output and not self.placement.begins_segment
        stream = LayerStream(call, self, before if recompute else None)
        sharing = call.shared_kv
        if (
            self.placement.unstreamed
            and call.past is None
            and (unchunked := stream.run_unchunked(call.input_tensors())) is not None
        ):
            return stream.assemble_output(unchunked, sharing)
        if self.schedule.stream_grads and call.hidden.requires_grad:
            stream.grad_target = last_call.call_for_gradient(call.hidden, self.layer)
        outputs = list(_StreamedLayer.apply(stream, self, *inputs))
        last_call.record_call(outputs[0], stream, self.layer)
        return stream.assemble_output(outputs, sharing)


COLLECTIVE_MODULES = ("torch.distributed", "streamtune.ops.messages")
"""Modules in which a rank waits for other ranks."""


def _is_collective_error(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(COLLECTIVE_MODULES):
            return True
        trace = trace.tb_next
    return False


class _StreamedLayer(torch.autograd.Function):
    """Autograd node of a streamed decoder layer ``z = f_W(x)`` with input x and parameters W.

    Its backward equals ``(dL/dx, dL/dW) = torch.autograd.grad(f_W(x), [x, W], dL/dz)``, computed one chunk at a time.
    """

    @staticmethod
    def forward(ctx: Any, stream: LayerStream, owner: StreamedLayer, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = len(stream.call.inputs)
        with stream.pass_over_chunks():
            outputs = stream.forward(inputs[:count], for_backward=True)
        ctx.save_for_backward(*inputs[1:count])  # the schedule says where the first is stored
        ctx.set_materialize_grads(False)
        ctx.stream, ctx.owner = stream, owner
        ctx.parameters = inputs[count:]
        ctx.weights = Weights.capture(owner.layer)
        stream.call.drop_input_tensors()
        return tuple(outputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        stream: LayerStream | None = ctx.stream
        if stream is None:
            raise ArgumentError(
                "backward ran a second time through a streamed layer",
                fix="pass retain_graph=True to the first backward",
            )
        owner: StreamedLayer = ctx.owner
        owner.check_before_backward(stream.call.length)
        ctx.weights.check_unchanged()
        saved = ctx.saved_tensors  # read first: load_input() may recompute the input and the keys shared with it
        inputs, keep_graph = [stream.load_input(), *saved], is_graph_retained()
        count = len(stream.output_sequence_dims)

        notify_chunk(owner.layer, slice(0, 0), "prepare")
        with ExitStack() as stack:
            stack.enter_context(ctx.weights.applied())
            ends = not ctx.needs_input_grad[2]  # the layers below are frozen and have no backward
            parameters = stack.enter_context(owner.weights_on_device(ctx.parameters, 0 if ends else None))
            sums = [GradientSum(p, stream.widen) for p in parameters]
            for total, parameter in zip(sums, ctx.parameters, strict=True):
                total.dtype = parameter.dtype  # of the parameter, not of its narrower copy
            stack.enter_context(stream.pass_over_chunks(sums))

            def run_chunk(chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], ChunkCache]:
                z_i, cache = stream.replay_chunk(chunk, x_i)
                owner.check_leaves(z_i[0], [*x_i, *cache.read_leaves, *parameters])
                return z_i, cache

            stream.prepare_replay(inputs, keep_graph)
            for place, index in enumerate(stream.entry_updates.values()):
                stream.kv.add_grads(index, grad_outputs[count + 2 * place : count + 2 * place + 2])
            grad_z = stream.output_gradient(grad_outputs[0])
            if isinstance(grad_z, StoredTensor):
                grad_z.set_read_order(stream.chunks[::-1])
            ours, grad_target = grad_z is not grad_outputs[0], stream.grad_target
            into = (
                None if grad_target is None else grad_target.allocate_grad_buffer(inputs[0], grad_z if ours else None)
            )
            needed = ctx.needs_input_grad[2 : 2 + len(inputs)]
            leaves = [LayerInput(*each) for each in zip(inputs, stream.call.inputs.values(), needed, strict=True)]
            leaves[0] = leaves[0]._replace(into=into)
            grads_z = list(zip([grad_z, *grad_outputs[1:count]], stream.output_sequence_dims, strict=True))
            grad_inputs, grad_parameters = streamed_vjp(run_chunk, stream.chunks, leaves, grads_z, sums, stream.widen)
            for total in sums:
                total.total = None  # free the sums before their casts are copied to the host
            if distributed.is_available() and distributed.is_initialized():
                # Ranks reduce the gradients of a layer together, also of experts that no token of this rank chose.
                grad_parameters = [
                    torch.zeros_like(parameter, dtype=total.dtype) if grad is None else grad
                    for grad, parameter, total in zip(grad_parameters, parameters, sums, strict=True)
                ]
            grad_parameters = owner.gradients_to_host(ctx.parameters, grad_parameters)
        if grad_target is not None:
            grad_inputs[0] = placeholder(inputs[0])
        for position, name in enumerate(stream.call.inputs):
            if isinstance(name, tuple) and name[0] == PAST:
                grad_inputs[position] = stream.kv.past_grads()[name[2]]
        if isinstance(grad_z, StoredTensor):
            grad_z.free()
        stream.free(keep_graph)
        if not keep_graph:
            ctx.stream = ctx.parameters = ctx.weights = None
        return (None, None, *grad_inputs, *grad_parameters)
