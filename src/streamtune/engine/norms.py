"""The norms before and behind the decoder layers, chunk by chunk.

A norm maps each token on its own and computes in fp32: for a whole sequence in bf16 autograd keeps two to four times
its bytes. Streamed, its gradient is a sum over chunks as well, with nothing passed from chunk to chunk.

Shape suffixes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.embeddings import take
from streamtune.engine.memory.tiers import StoredTensor
from streamtune.engine.observe import Autocast, notify_chunk
from streamtune.engine.passes import LayerStream, placeholder
from streamtune.engine.sharded import Weights
from streamtune.engine.streamed_layer import ModelParts
from streamtune.engine.vjp import streamed_vjp
from streamtune.errors import ArgumentError
from streamtune.ops import first_order, graph_is_kept


def norms_outside(owner: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the model's own norms, outside its layers: modules named so by class, with weights of one dimension."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [
        module
        for module in owner.children()
        if id(module) not in inside
        and type(module).__name__.endswith("Norm")
        and not isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm)
        and not list(module.children())
        and all(parameter.dim() <= 1 for parameter in module.parameters())
        and "forward" not in module.__dict__
    ]


class StreamedNorm:
    """Replaces a norm's ``forward`` on its instance; computes the same."""

    def __init__(self, norm: nn.Module, parts: ModelParts) -> None:
        self.norm, self.parts, self.schedule = norm, parts, parts.schedule
        self.pointwise: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm, with its own signature and result."""
        args = tuple(map(take, args))
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] <= self.schedule.chunk_size:
            return self.own(*args, **kwargs)
        if self.pointwise is None and x.device.type != "meta":
            self.pointwise = self._is_pointwise(x.detach())
        if self.pointwise is False:
            return self.own(x)
        parameters = [p for p in self.norm.parameters() if p.requires_grad]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters))):
            return self.forward(x, None)
        return _StreamedNorm.apply(self, self.parts.last_call.grad_target(x, self.norm), x, *parameters)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        return type(self.norm).forward(self.norm, *args, **kwargs)

    @torch.no_grad()
    def _is_pointwise(self, x_BTC: Tensor) -> bool:
        few = x_BTC[:, :4]
        alone = torch.cat([self.own(few[:, place : place + 1]) for place in range(few.shape[1])], 1)
        together = self.own(few)
        return alone.shape == together.shape and bool(torch.allclose(alone, together, rtol=1e-2, atol=1e-3))

    @torch.no_grad()
    def forward(self, x_BTC: Tensor, into: StoredTensor | None) -> Tensor:
        """Return the whole sequence's output; store the input in ``into``, if given, chunk by chunk."""
        out: Tensor | None = None
        for chunk in self.schedule.chunks(x_BTC.shape[1]):
            notify_chunk(self.norm, chunk, "store")
            x_i = x_BTC[:, chunk]
            if into is not None:
                into.put(chunk, x_i)
            y_i = self.own(x_i)
            if out is None:
                out = y_i.new_empty((*x_BTC.shape[:2], y_i.shape[2]))
            out[:, chunk] = y_i
        if into is not None:
            into.tier.settle()
        assert out is not None
        return out


class _StreamedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: StreamedNorm, maker: LayerStream | None, x: Tensor, *parameters: Tensor) -> Tensor:
        schedule = norm.schedule
        ctx.stored = None
        if schedule.offload == "device" or schedule.device_layers:
            ctx.save_for_backward(x)
        else:
            ctx.stored = StoredTensor(norm.parts.tiers.of(schedule.offload, x.device), x, 1)
        ctx.norm, ctx.parameters, ctx.autocast = norm, parameters, Autocast.now(x.device)
        ctx.weights = Weights.now(norm.norm)
        ctx.grad_target = maker if schedule.stream_grads and x.requires_grad else None
        return norm.forward(x, ctx.stored)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        norm: StreamedNorm | None = ctx.norm
        if norm is None:
            raise ArgumentError(
                "a streamed norm went backward a second time", mend="pass retain_graph=True to the backward before"
            )
        ctx.weights.check()
        source = ctx.stored if ctx.stored is not None else ctx.saved_tensors[0]
        own, chunks = norm.own, norm.schedule.chunks(source.shape[1])
        if isinstance(source, StoredTensor):
            source.expect(chunks[::-1])

        def run_chunk(chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], _Nothing]:
            notify_chunk(norm.norm, chunk, "replay")
            with ctx.autocast.restored(), ctx.weights.restored():
                return [own(x_i[0])], _Nothing()

        grad_target: LayerStream | None = ctx.grad_target
        grad_inputs, grad_parameters = streamed_vjp(
            run_chunk,
            chunks,
            [source],
            [1],
            ctx.parameters,
            [grad_out],
            [1],
            needs_grad=[ctx.needs_input_grad[2]],
            widen=norm.schedule.grad_dtype == "float32",
            into=None if grad_target is None else grad_target.room_for_grad(source, None),
        )
        if not graph_is_kept():
            if isinstance(source, StoredTensor):
                source.free()
            ctx.stored = ctx.norm = ctx.parameters = ctx.grad_target = ctx.weights = None
        return None, None, placeholder(source) if grad_target is not None else grad_inputs[0], *grad_parameters


class _Nothing:
    """The tensors a chunk reads of others and passes on, for a norm: none, as it maps each token on its own."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []

    def handed_on(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())

    def hand_back(self, grads: Iterator[Tensor | None]) -> None:
        pass
