"""Comparison of one layer on the whole sequence (z_ref, g_ref) and in chunks: its outputs z and gradients g.

    differs:  ||z - z_ref|| > bound * ||z_ref - z_in|| + eps * ||z_ref||        (z_ref - z_in is what the layer adds)
    or        ||g - g_ref|| > bound * max(||g_ref||, 1e-2 ||G_ref||)            (for z_in, arguments and parameters)

G_ref is all gradients g_ref together. A difference above the bound may still be rounding, or a router that chose
another expert because of rounding. Then a copy of the layer in a wider dtype is compared as well.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streamtune.engine.layer import StreamedForward
from streamtune.engine.memory.placement import Placement
from streamtune.engine.own_attention import AttentionNames
from streamtune.engine.preflight.common import (
    BOUND,
    Arguments,
    RecordedCall,
    aliased_parameters,
    checking_mode,
    difference_norm,
    error_bound_dtype,
    ratio,
    relative_difference,
    replace_tensors,
    run_and_list_outputs,
    streamed_forward,
    trial_batch,
    widen_tensors,
)
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import StreamTuneError, UnsupportedModelError
from streamtune.schedule import Schedule

UNSETTLED_BOUND = 0.3
"""Accepted relative difference of a layer that cannot be copied in a wider dtype (quantised): its router may choose
other experts.
"""
WIDER_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
FIX = (
    "train this model without streaming, or choose another model; its layers may exchange data between tokens outside "
    "the key/value cache"
)


class DiffersError(UnsupportedModelError):
    """Raised if the streamed and the unstreamed model compute different results."""


class LayerCheck:
    """Compares recorded calls of layers with the same calls in chunks.

    Args:
        model: Model, for its class name in errors.
        layers: Decoder layers of the model.
        names: Object that sets the attention implementation in the model's configs.
        reference: Name of each config's attention implementation in calls without chunks.
        own_attention: Attention implementation of layers that compute attention in their own code; None for others.
        valid: Mask ``[B, T]``, True where the batch has a token.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[nn.Module],
        names: AttentionNames,
        reference: list[Any],
        own_attention: str | None,
        valid: Tensor,
    ) -> None:
        self.name, self.layers, self.own_attention, self.valid = type(model).__name__, layers, own_attention, valid
        self.names, self.reference = names, reference

    def check_output(self, outputs: list[Tensor], call: RecordedCall, streamed: Arguments) -> None:
        """Raise :class:`DiffersError` if outputs in chunks differ from recorded outputs by more than rounding."""
        if len(outputs) != len(call.outputs):
            raise DiffersError(
                f"{self.name}: a layer returns {len(outputs)} tensors with streaming, but {len(call.outputs)} without"
            )
        error, bound = self._output_error(outputs, call), self.rounding_bound(call.index, call.outputs[0])
        if not error <= bound:
            self._compare_in_wider_dtype(call, streamed, "output", error, bound)

    def check_gradients(self, call: RecordedCall, streamed: Arguments) -> None:
        """Raise :class:`DiffersError` if gradients with and without chunks differ by more than rounding."""
        bound = self.rounding_bound(call.index, call.z_in)
        what, error = self._gradient_error(self.layers[call.index], call, streamed)
        if not error <= bound:
            self._compare_in_wider_dtype(call, streamed, what, error, bound)

    def _output_error(self, outputs: list[Tensor], call: RecordedCall) -> float:
        first = self._relative_difference(outputs[0], call.outputs[0], call.z_in)
        others = zip(outputs[1:], call.outputs[1:], strict=True)
        return max([first, *(relative_difference(z, z_ref, self.valid_tokens(z_ref)) for z, z_ref in others)])

    def _gradient_error(self, layer: nn.Module, call: RecordedCall, streamed: Arguments) -> tuple[str, float]:
        generator = torch.Generator().manual_seed(call.index)
        grad_outputs = []
        for z in call.outputs:
            grad = torch.randn(z.shape, generator=generator).to(z)
            mask = self.valid_tokens(z)
            grad_outputs.append(grad * mask.reshape(mask.shape + (1,) * (z.dim() - 2)))
        with torch.enable_grad(), aliased_parameters(layer) as parameters:
            grads = []
            for plain in (True, False):
                leaves = {name: call.inputs[name].detach().clone().requires_grad_() for name in call.trained_inputs}
                arguments = replace_tensors(call.arguments if plain else streamed, leaves, layer)
                with self.names.using_names(self.reference if plain else self.names.engine_names):
                    forward = (
                        type(layer).forward
                        if plain
                        else with_self_argument(streamed_forward(layer, self.own_attention))
                    )
                    _, outputs = run_and_list_outputs(forward, arguments)
                    live = [n for n, z in enumerate(outputs) if z.requires_grad]
                    inputs = [*leaves.values(), *parameters.values()]
                    live_outputs, incoming = [outputs[n] for n in live], [grad_outputs[n] for n in live]
                    grads.append(torch.autograd.grad(live_outputs, inputs, incoming, allow_unused=True))
        norms = [difference_norm(plain_gradients) for plain_gradients in grads[0]]
        floor = 1e-2 * math.hypot(*norms)
        worst = ("", 0.0)
        for name, plain_gradients, streamed_gradients, norm in zip(
            [*call.trained_inputs, *parameters], *grads, norms, strict=True
        ):
            error = ratio(difference_norm(streamed_gradients, plain_gradients), max(norm, floor))
            if error > worst[1]:
                worst = (f"gradient of {name}", error)
        return worst

    def _relative_difference(self, z: Tensor, z_ref: Tensor, z_in: Tensor) -> float:
        """Return ``(||z - z_ref|| - eps ||z_ref||) / ||z_ref - z_in||`` over the batch's tokens; at least 0."""
        if z.shape != z_ref.shape:
            return math.inf
        valid = self.valid_tokens(z_in)
        z, z_ref, z_in = z.detach()[valid], z_ref[valid], z_in[valid]
        rounding = torch.finfo(error_bound_dtype(z_in)).eps * difference_norm(z_ref)
        added = difference_norm(z_ref, z_in) if z_in.shape == z_ref.shape else difference_norm(z_ref)
        return ratio(max(difference_norm(z, z_ref) - rounding, 0.0), added)

    def _compare_in_wider_dtype(
        self, call: RecordedCall, streamed: Arguments, tensor_name: str, error: float, bound: float
    ) -> None:
        """Repeat the comparison with a copy of the layer in a wider dtype; raise :class:`DiffersError` if it fails."""
        layer = self.layers[call.index]
        wider = WIDER_DTYPES.get(error_bound_dtype(call.z_in, layer))
        try:
            if wider is None:
                raise self.difference_error(call.index, tensor_name, error, bound)
            installed_forward = layer.__dict__.pop("forward", None)
            try:
                wide = copy.deepcopy(layer, {id(config): config for config in self.names.configs}).to(wider)
            finally:
                if installed_forward is not None:
                    layer.forward = installed_forward
            for module in wide.modules():
                if hasattr(module, "compute_dtype"):  # bitsandbytes always computes in this dtype; fp32 is its widest
                    module.compute_dtype = torch.float32  # type: ignore[assignment]
            plain, chunked = (_widen_arguments(arguments, wide, wider) for arguments in (call.arguments, streamed))
            inputs = {name: widen_tensors(x, wider) for name, x in call.inputs.items()}
            with torch.autocast(call.z_in.device.type, enabled=False):
                with torch.no_grad():
                    with self.names.using_names(self.reference):
                        _, reference = run_and_list_outputs(type(wide).forward, replace_tensors(plain, inputs))
                    with self.names.using_names(self.names.engine_names):
                        _, outputs = run_and_list_outputs(
                            with_self_argument(streamed_forward(wide, self.own_attention)),
                            replace_tensors(chunked, inputs),
                        )
                wide_call = RecordedCall(
                    call.index, replace_tensors(plain, inputs), inputs, call.trained_inputs, reference
                )
                errors = {"output": self._output_error(outputs, wide_call)}
                if tensor_name != "output":
                    name, value = self._gradient_error(wide, wide_call, chunked)
                    errors[name] = value
        except StreamTuneError:
            raise
        except Exception:  # no wider copy is possible (quantised weights, memory, kernels without the dtype)
            if error <= (UNSETTLED_BOUND if wider is torch.float32 else bound):
                return
            raise self.difference_error(call.index, tensor_name, error, bound) from None
        for name, value in errors.items():
            if not value <= BOUND[error_bound_dtype(reference[0])]:
                raise self.difference_error(call.index, name, value, BOUND[error_bound_dtype(reference[0])])

    def valid_tokens(self, z: Tensor) -> Tensor:
        """Return a mask ``[B, T]``, True where the batch has a token; all True for a ``z`` of another length."""
        return self.valid if z.shape[:2] == self.valid.shape else z.new_ones(z.shape[:2], dtype=torch.bool)

    def rounding_bound(self, index: int, z: Tensor) -> float:
        """Return the largest relative difference that counts as rounding, for an input or output ``z`` of a layer."""
        return BOUND[error_bound_dtype(z, self.layers[index])]

    def layer_location(self, index: int | None) -> str:
        """Return the place of layer ``index`` in the model, as text for messages; None stands for
        outside the layers.
        """
        if index is None:
            return f"{self.name}, outside its decoder layers"
        return f"layer {index} of {len(self.layers)} ({type(self.layers[index]).__name__})"

    def difference_error(self, index: int, tensor_name: str, error: float, bound: float) -> DiffersError:
        """Return the :class:`DiffersError` for a relative difference ``error`` above ``bound``."""
        return DiffersError(
            f"{self.name} is not streamed exactly: the {tensor_name} of {type(self.layers[index]).__name__} in chunks "
            f"differs from the whole sequence's by {error:.1e} (rounding explains at most {bound:.0e})",
            where=self.layer_location(index),
            fix=FIX,
        )


def with_self_argument(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` as a function with a first argument ``self``, like the forward of a class."""
    return lambda _self, *args, **kwargs: forward(*args, **kwargs)


def _widen_arguments(arguments: Arguments, layer: nn.Module, dtype: torch.dtype) -> Arguments:
    new = inspect.BoundArguments(arguments.signature, widen_tensors(dict(arguments.arguments), dtype))
    new.arguments[next(iter(new.arguments))] = layer
    return new


SHORT = Schedule(chunk_size=3, head_chunk_size=5)


def check_sequence_parallel(handle: StreamedModel) -> None:
    """Raise an error if ranks that share a sequence do not compute the same results as a single rank.

    The loss is compared, and the gradient of the first trained layer. All ranks of the group must call this together.

    Raises:
        UnsupportedModelError: Loss or gradient differs by more than rounding.
    """
    ranks = handle.sequence_parallel
    assert ranks is not None
    layer = next((layer for layer in handle.layers if any(p.requires_grad for p in layer.parameters())), None)
    trained_inputs = [] if layer is None else [p for p in layer.parameters() if p.requires_grad]
    with checking_mode(handle), _with_short_chunks(handle), handle.routers.without_losses():
        shared = _loss_and_gradient(handle, trained_inputs)
        for tensor in shared[1:]:
            dist.all_reduce(tensor, group=ranks.group)
        try:
            handle.sequence_parallel = None
            alone = _loss_and_gradient(handle, trained_inputs)
        finally:
            handle.sequence_parallel = ranks
    bound = max(BOUND[error_bound_dtype(tensor, handle.layers[-1])] for tensor in alone)
    pairs = [("loss", shared[0], alone[0])]
    if trained_inputs:
        gradients = [torch.cat([x.flatten() for x in grads[1:]]) for grads in (shared, alone)]
        pairs.append((f"gradient of {type(layer).__name__}", gradients[0], gradients[1]))
    for what, value, reference in pairs:
        if not (error := relative_difference(value, reference, None)) <= bound:
            raise UnsupportedModelError(
                f"{type(handle.model).__name__} gives other results when {ranks.size} ranks share its sequence: the "
                f"{what} differs by {error:.1e} (rounding explains at most {bound:.0e})",
                fix="set sequence_parallel_size: 1",
            )


def _loss_and_gradient(handle: StreamedModel, tensors: Sequence[Tensor]) -> list[Tensor]:
    loss = handle.model(**trial_batch(handle.model)).loss
    grads = torch.autograd.grad(loss, tensors, allow_unused=True) if tensors else ()
    return [
        loss.detach(),
        *(torch.zeros_like(p) if grad is None else grad.contiguous() for p, grad in zip(tensors, grads, strict=True)),
    ]


@contextmanager
def _with_short_chunks(handle: StreamedModel) -> Iterator[None]:
    forwards = [forward for layer in handle.layers if isinstance(forward := layer.forward, StreamedForward)]
    schedule, before = handle.schedule, [(forward.schedule, forward.placement) for forward in forwards]
    try:
        handle.schedule = SHORT
        for forward in forwards:
            forward.schedule, forward.placement = SHORT, Placement()
        yield
    finally:
        handle.schedule = schedule
        for forward, (schedule_before, place) in zip(forwards, before, strict=True):
            forward.schedule, forward.placement = schedule_before, place
