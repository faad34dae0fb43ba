"""Modules outside of the decoder layers: the token embedding, whose output is freed early, and norms.

A decoder holds its embeddings in a variable until it returns, although nothing reads them after the first layer. That
is a whole hidden state ``[B, T, C]``. So the embedding of a streamed model returns a placeholder tensor that holds the
embeddings. The first layer takes them out of the placeholder, so they are freed once that layer has stored them. A
later read recomputes them.

A norm maps each token independently and computes in fp32: for a whole bf16 sequence, autograd saves two to four times
the sequence's bytes. A streamed norm sums its gradient over chunks as a layer does, but passes nothing between chunks.

Shape suffixes: B batch, T tokens, C channels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from streamtune.engine.evaluated import map_nested
from streamtune.engine.lazy_logits import is_scalar
from streamtune.engine.memory.tiers import StoredTensor
from streamtune.engine.observe import notify_chunk
from streamtune.engine.offloaded_weights import OffloadedWeights
from streamtune.engine.passes import LayerStream, placeholder
from streamtune.engine.sharded import Weights
from streamtune.engine.streamed_layer import ModelParts
from streamtune.engine.vjp import GradientSum, LayerInput, streamed_vjp
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops import first_order, is_graph_retained
from streamtune.ops.forward_state import Autocast

LOOKUP_PACKAGES = ("torch.", "transformers.")
"""Packages whose embeddings are plain lookups, so that a second call returns the same values."""

SCALING_FUNCTIONS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__)
"""Functions with which models scale their embeddings while a variable still holds the unscaled tensor."""


def token_embedding(model: Any) -> nn.Embedding | None:
    """Return a model's token embedding if it is a plain lookup, whose output can be recomputed; else None."""
    try:
        module = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    is_lookup = isinstance(module, nn.Embedding) and type(module).__module__.startswith(LOOKUP_PACKAGES)
    plain = is_lookup and module.max_norm is None and not list(module.children()) and "forward" not in module.__dict__
    return module if plain else None


class StreamedEmbedding:
    """Replaces the ``forward`` of a token-embedding module; the output is a placeholder that holds the embeddings."""

    def __init__(self, module: nn.Embedding) -> None:
        self.module, self.table = module, module.weight

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embeddings ``[B, T, C]`` in a placeholder (:class:`Embeddings`), or as is if
        the module has hooks.
        """
        value: Tensor = type(self.module).forward(self.module, *args, **kwargs)
        if value.dim() != 3 or torch.compiler.is_compiling() or self._must_return_tensor():
            return value
        read_from = [self.table, *(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))]
        if any(x.is_inference() for x in (value, *read_from)):  # inference tensors have no version counter
            return value
        state = _versions_and_addresses(read_from)

        def recompute() -> Tensor:
            if _versions_and_addresses(read_from) != state:
                raise ArgumentError(
                    "the token embeddings of a call were read after the embedding weight or the token ids were changed "
                    "in place",
                    fix="read or copy the embeddings before the optimizer step, and before tokens are overwritten",
                )
            embeddings: Tensor = self.module(*args, **kwargs)
            return embeddings

        return Embeddings.create(value, recompute)

    def _must_return_tensor(self) -> bool:
        module = self.module
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        ours = [isinstance(getattr(hook, "__self__", None), OffloadedWeights) for hook in hooks]
        global_forward = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        backward = (module._backward_hooks, module._backward_pre_hooks, torch_module._global_backward_hooks)
        weight_replaced = module.weight is not self.table and not any(ours)
        return weight_replaced or not all(ours) or any((*global_forward, *backward))


def _versions_and_addresses(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(x._version, x.data_ptr()) for x in tensors]


@dataclass
class _Content:
    value: Tensor | None
    """Embeddings ``[B, T, C]``; None once they are taken out."""
    recompute: Callable[[], Tensor]
    version: int
    with_graph: bool
    """True if the embeddings were computed with gradients on."""
    node: weakref.ref[Any] | None = None
    """Autograd node of the placeholder, or None. The reference is weak, because the node holds this object."""

    def is_original_node(self, node: Any) -> bool:
        return node is None if self.node is None else node is not None and node is self.node()


class Embeddings(Tensor):
    """Placeholder for embeddings ``[B, T, C]``: torch functions get the embeddings themselves.

    The embeddings are freed after their first use and recomputed if they are read again.

    Attributes:
        content: The embeddings and the function that recomputes them.
    """

    content: _Content

    @staticmethod
    def create(value: Tensor, recompute: Callable[[], Tensor]) -> Any:
        """Return a placeholder for ``value`` ``[B, T, C]``; ``recompute`` returns the same values again."""
        content = _Content(value, recompute, value._version, torch.is_grad_enabled())
        embeddings: Any = _PlaceholderNode.apply(value, content) if value.requires_grad else _create_placeholder(value)
        node = _grad_fn_of(embeddings)
        embeddings.content, content.node = content, None if node is None else weakref.ref(node)
        return embeddings

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            func in SCALING_FUNCTIONS
            and len(args) == 2
            and not kwargs
            and isinstance(args[0], Embeddings)
            and is_scalar(args[1])
        ):
            return args[0].scaled_by(func, args[1])
        return func(*map_nested(read_embeddings, args), **map_nested(read_embeddings, kwargs or {}))

    def scaled_by(self, func: Callable[[Tensor, Any], Tensor], factor: Any) -> Any:
        """Return a placeholder for ``func(self, factor)``; free the unscaled embeddings."""
        scaled = func(pop_embeddings(self), factor)
        return Embeddings.create(scaled, lambda: func(read_embeddings(self), factor))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map_nested(_embeddings_in, args), **map_nested(_embeddings_in, kwargs or {}))


class _PlaceholderNode(torch.autograd.Function):
    """Autograd node of a placeholder (:class:`Embeddings`), used if a custom autograd function gets the placeholder."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, content: _Content) -> Tensor:
        ctx.content = content
        return _create_placeholder(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.content.value is not None and ctx.content.value._version != ctx.content.version:
            raise UnsupportedModelError(
                "the token embeddings were changed in place and then passed to a custom autograd function",
                fix="change a copy of the embeddings",
            )
        return grad, None


def _create_placeholder(value: Tensor) -> Tensor:
    made: Tensor = Tensor._make_wrapper_subclass(
        Embeddings, value.shape, value.stride(), dtype=value.dtype, layout=value.layout, device=value.device
    )
    return made


def read_embeddings(x: Any) -> Any:
    """Return the embeddings if ``x`` is an :class:`Embeddings` placeholder, else ``x`` itself."""
    if not isinstance(x, Embeddings):
        return x
    if not x.content.is_original_node(_grad_fn_of(x)):
        with torch._C.DisableTorchFunctionSubclass():
            return x.clone()  # keeps the graph that the custom function gave it
    return _embeddings_in(x)


def pop_embeddings(x: Any) -> Any:
    """Return the embeddings that a placeholder ``x`` (:class:`Embeddings`) holds, and free them.

    Other objects are returned as is. A placeholder keeps embeddings that were changed in place, because they cannot be
    recomputed.
    """
    value: Any = read_embeddings(x)
    if isinstance(x, Embeddings) and value._version == x.content.version and value is x.content.value:
        x.content.value = None
    return value


def _embeddings_in(x: Any) -> Any:
    if not isinstance(x, Embeddings):
        return x
    content = x.content
    if content.value is None:
        with torch.set_grad_enabled(content.with_graph):
            content.value = read_embeddings(content.recompute())
    return content.value


def _grad_fn_of(x: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return x.grad_fn


def norms_outside_layers(owner: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return ``owner``'s child modules outside ``layers`` that are norms.

    A norm is a module whose class name ends with ``Norm`` and whose weights have at most one dimension.
    """
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
    """Replaces the ``forward`` of a norm module; computes the same result chunk by chunk."""

    def __init__(self, norm: nn.Module, parts: ModelParts) -> None:
        self.norm, self.parts, self.schedule = norm, parts, parts.schedule
        self.pointwise: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm; arguments and result are the same as for the forward of its class."""
        args = tuple(map(pop_embeddings, args))
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] <= self.schedule.chunk_size:
            return self.run_module(*args, **kwargs)
        if self.pointwise is None and x.device.type != "meta":
            self.pointwise = self._is_pointwise(x.detach())
        if self.pointwise is False:
            return self.run_module(x)
        parameters = [p for p in self.norm.parameters() if p.requires_grad]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters))):
            return self.forward(x, None)
        return _StreamedNorm.apply(self, self.parts.last_call.call_for_gradient(x, self.norm), x, *parameters)

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward of the norm's class."""
        return type(self.norm).forward(self.norm, *args, **kwargs)

    @torch.no_grad()
    def _is_pointwise(self, x_BTC: Tensor) -> bool:
        few = x_BTC[:, :4]
        alone = torch.cat([self.run_module(few[:, place : place + 1]) for place in range(few.shape[1])], 1)
        together = self.run_module(few)
        return alone.shape == together.shape and bool(torch.allclose(alone, together, rtol=1e-2, atol=1e-3))

    @torch.no_grad()
    def forward(self, x_BTC: Tensor, input_store: StoredTensor | None) -> Tensor:
        """Return the norm's output for the whole sequence; ``input_store``, if given, stores the input."""
        out: Tensor | None = None
        for chunk in self.schedule.chunks(x_BTC.shape[1]):
            notify_chunk(self.norm, chunk, "store")
            x_i = x_BTC[:, chunk]
            if input_store is not None:
                input_store.put(chunk, x_i)
            y_i = self.run_module(x_i)
            if out is None:
                out = y_i.new_empty((*x_BTC.shape[:2], y_i.shape[2]))
            out[:, chunk] = y_i
        if input_store is not None:
            input_store.tier.wait_for_copies()
        assert out is not None
        return out


class _StreamedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: StreamedNorm, producer: LayerStream | None, x: Tensor, *parameters: Tensor) -> Tensor:
        schedule = norm.schedule
        ctx.stored = None
        if schedule.offload == "device" or schedule.device_layers:
            ctx.save_for_backward(x)
        else:
            ctx.stored = StoredTensor(norm.parts.tiers.get_tier(schedule.offload, x.device), x, 1)
        ctx.norm, ctx.parameters, ctx.autocast = norm, parameters, Autocast.capture(x.device)
        ctx.weights = Weights.capture(norm.norm)
        ctx.grad_target = producer if schedule.stream_grads and x.requires_grad else None
        return norm.forward(x, ctx.stored)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        norm: StreamedNorm | None = ctx.norm
        if norm is None:
            raise ArgumentError(
                "backward ran a second time on a streamed model", fix="pass retain_graph=True to the first backward"
            )
        ctx.weights.check_unchanged()
        source = ctx.stored if ctx.stored is not None else ctx.saved_tensors[0]
        run_module, chunks = norm.run_module, norm.schedule.chunks(source.shape[1])
        if isinstance(source, StoredTensor):
            source.set_read_order(chunks[::-1])

        def run_chunk(chunk: slice, x_i: list[Tensor]) -> tuple[list[Tensor], _EmptyBoundary]:
            notify_chunk(norm.norm, chunk, "replay")
            with ctx.autocast.applied(), ctx.weights.applied():
                return [run_module(x_i[0])], _EmptyBoundary()

        grad_target: LayerStream | None = ctx.grad_target
        into = None if grad_target is None else grad_target.allocate_grad_buffer(source, None)
        widen = norm.schedule.grad_dtype == "float32"
        sums = [GradientSum(p, widen) for p in ctx.parameters]
        z_in = LayerInput(source, 1, ctx.needs_input_grad[2], into)
        grad_inputs, grad_parameters = streamed_vjp(run_chunk, chunks, [z_in], [(grad_out, 1)], sums, widen)
        if not is_graph_retained():
            if isinstance(source, StoredTensor):
                source.free()
            ctx.stored = ctx.norm = ctx.parameters = ctx.grad_target = ctx.weights = None
        return None, None, placeholder(source) if grad_target is not None else grad_inputs[0], *grad_parameters


class _EmptyBoundary:
    def __init__(self) -> None:
        self.read_leaves: list[Tensor] = []

    def tensors_for_later_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())

    def add_leaf_grads(self, grads: Iterator[Tensor | None]) -> None:
        pass
