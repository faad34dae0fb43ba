"""Parts of the preflight checks: saved model state, differences of tensors, trial batches, recorded layer calls.

A call of a decoder layer is recorded as a function of tensors, so that it can be repeated, on the whole sequence or in
chunks. Its inputs are the tensor arguments that need a gradient, hidden states first, and the keys and values that
layers share. Its outputs are the tensors that the layer returns, and the keys and values that it adds to the shared
ones.
"""

from __future__ import annotations

import inspect
import math
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import IGNORE_INDEX, model_device
from streamtune.engine.call_parts import SharedKey
from streamtune.engine.context import CallContext
from streamtune.engine.inspect_model import autocast_of_mixed_dtypes
from streamtune.engine.layer import StreamedForward
from streamtune.engine.memory.placement import Tiers
from streamtune.engine.streamed_layer import ModelParts
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError
from streamtune.ops.forward_state import RandomState
from streamtune.schedule import Schedule


@contextmanager
def checking_mode(handle: StreamedModel) -> Iterator[None]:
    """Put the model in evaluation mode, with gradients on and the head frozen, in the ``with`` block.

    If trained weights are float32 and frozen weights bfloat16, the model computes in bfloat16 autocast. On exit,
    restore the training flags, the layers' ``forward``, ``requires_grad`` of the head, the precision of fp32 matrix
    products and the random state.
    """
    model = handle.model
    training = [(module, module.training) for module in model.modules()]
    forwards: list[Any] = [layer.__dict__.get("forward") for layer in handle.layers]
    head = model.get_output_embeddings()
    frozen = [p for p in head.parameters() if p.requires_grad] if isinstance(head, nn.Module) else []
    precision = torch.get_float32_matmul_precision()
    device = model_device(model)
    try:
        with RandomState.capture(device).replayed(), torch.enable_grad(), autocast_of_mixed_dtypes(model):
            torch.set_float32_matmul_precision("highest")
            for module, _ in training:
                module.training = False
            for parameter in frozen:
                parameter.requires_grad_(False)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, flag in training:
            module.training = flag
        for parameter in frozen:
            parameter.requires_grad_(True)
        for layer, forward in zip(handle.layers, forwards, strict=True):
            layer.forward = forward


@contextmanager
def aliased_parameters(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace a layer's trainable parameters by new leaves on the same storage, without hooks, in the ``with`` block.

    Yield the leaves by parameter name.
    """
    names = {id(p): name for name, p in layer.named_parameters() if p.requires_grad}
    aliases: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in names:
                    before.append((module, name, parameter))
                    alias = aliases.setdefault(id(parameter), nn.Parameter(parameter.detach()))
                    module._parameters[name] = alias
        yield {names[key]: alias for key, alias in aliases.items()}
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


class LayerStep:
    """Replaces a layer's ``forward`` by ``step(index, args, kwargs)``, with the layer's weights on the device."""

    def __init__(self, handle: StreamedModel, index: int, step: Callable[..., Any]) -> None:
        self.handle, self.index, self.step = handle, index, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``step`` with the layer's index and these arguments; return its result."""
        with self.handle.layer_on_device(self.handle.layers[self.index]):
            return self.step(self.index, args, kwargs)


def replace_layer_forwards(handle: StreamedModel, step: Callable[..., Any]) -> None:
    """Make each decoder layer call ``step(index, args, kwargs)`` instead of its ``forward``."""
    for index, layer in enumerate(handle.layers):
        layer.forward = LayerStep(handle, index, step)


def refuse_if_removed(handle: StreamedModel) -> None:
    """Raise :class:`ArgumentError` if the model is no longer streamed."""
    if not handle.layers:
        raise ArgumentError("the model is no longer streamed", fix="call check() before .remove()")


def hidden_states_in_output(out: Any) -> Tensor:
    """Return the hidden states from the output of a layer, which may be a tuple or list."""
    return out[0] if isinstance(out, tuple | list) else out


BOUND = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest relative difference of norms that counts as rounding, by dtype. fp64 models compute some parts in fp32."""


def error_bound_dtype(tensor: Tensor, layer: nn.Module | None = None) -> torch.dtype:
    """Return the dtype with the largest entry in ``BOUND``, of a tensor and of its layer's parameters.

    Some models have fp32 hidden states between layers that compute in bf16. In autocast, all layers compute in its
    dtype.
    """
    dtypes = [tensor.dtype, *(p.dtype for p in layer.parameters())] if layer is not None else [tensor.dtype]
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    return max((dtype for dtype in dtypes if dtype in BOUND), key=BOUND.__getitem__, default=torch.float32)


def relative_difference(value: Tensor, reference: Tensor, valid: Tensor | None) -> float:
    """Return ``||value - reference|| / ||reference||`` where ``valid`` is True; infinity if the shapes differ."""
    if value.shape != reference.shape:
        return math.inf
    if valid is not None:
        value, reference = value[valid], reference[valid]
    return ratio(difference_norm(value, reference), difference_norm(reference))


def difference_norm(value: Tensor | None, subtracted: Tensor | None = None) -> float:
    """Return ``||value - subtracted||`` in fp32 or wider; None counts as a tensor of zeros."""
    if value is None:
        value, subtracted = subtracted, None
    if value is None:
        return 0.0
    wide = value.detach().to(torch.promote_types(value.dtype, torch.float32))
    return float((wide if subtracted is None else wide - subtracted.detach().to(wide)).norm())


def ratio(difference: float, norm: float) -> float:
    """Return ``difference / norm``: 0 for a difference of 0, else infinity if ``norm`` is 0 or a
    number is not finite.
    """
    if difference == 0:
        return 0.0
    return difference / norm if norm > 0 and math.isfinite(difference) and math.isfinite(norm) else math.inf


def widen_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Return a copy of nested containers with every floating-point tensor cast to ``dtype`` and detached."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype) if value.is_floating_point() else value
    if isinstance(value, UserDict):
        return type(value)({key: widen_tensors(item, dtype) for key, item in value.items()})
    if isinstance(value, dict):
        return {key: widen_tensors(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(widen_tensors(item, dtype) for item in value)
    return value


ROWS, LENGTH, PADDED = 2, 24, 5
SCHEDULE = Schedule(chunk_size=7, head_chunk_size=11)


def streamed_forward(
    layer: nn.Module, own_attention: str | None, context: CallContext | None = None, schedule: Schedule = SCHEDULE
) -> StreamedForward:
    """Return the streamed forward of one layer on its own; ``context`` has the packed rows of the layer's input."""
    parts = ModelParts(schedule, Tiers(schedule), CallContext() if context is None else context)
    return StreamedForward(layer, parts, own_attention)


def trial_batch(model: Any) -> dict[str, Any]:
    """Return model arguments for two rows of random tokens, the second padded.

    Torch's random state does not change.
    """
    head = model.get_output_embeddings()
    ids = random_tokens(model, ROWS, LENGTH)
    mask = torch.ones_like(ids)
    mask[-1, -PADDED:] = 0
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, IGNORE_INDEX),
    }
    if head is None:  # its labels are unknown: the check computes a scalar from its output instead
        del inputs["labels"]
    parameters = inspect.signature(type(model).forward).parameters
    if "use_cache" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        inputs["use_cache"] = False
    return inputs


def random_tokens(model: Any, rows: int, length: int) -> Tensor:
    """Return random token ids ``[rows, length]`` without special tokens; torch's random state does not change."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    vocabulary = min([table.shape[0], 4096, *([head.weight.shape[0]] if hasattr(head, "weight") else [])])
    config = model.config.get_text_config(decoder=True)
    special = {
        value
        for owner in (model.config, config)
        for key, value in vars(owner).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    ordinary = torch.tensor([token for token in range(vocabulary) if token not in special] or [0])
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)].to(model_device(model))


Name = str | SharedKey
Arguments = inspect.BoundArguments


@dataclass
class RecordedCall:
    """A recorded call of the decoder layer at ``index``, detached from its graph.

    ``trained_inputs`` has the names of the ``inputs`` that need a gradient. ``outputs`` are the outputs of the layer
    without streaming, the first ``[B, T, C]``.
    """

    index: int
    arguments: Arguments
    inputs: dict[Name, Tensor]
    trained_inputs: list[Name]
    outputs: list[Tensor]

    @property
    def z_in(self) -> Tensor:
        """Hidden states ``[B, T, C]`` at the layer's input."""
        return next(iter(self.inputs.values()))


def bind_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Bind the arguments of a call of ``layer`` to the parameters of its forward, ``self`` included."""
    return inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)


def input_tensors(arguments: Arguments) -> dict[Name, Tensor]:
    """Return hidden states, other tensors that need a gradient, and keys and values shared between layers, by name."""
    inputs: dict[Name, Tensor] = {}
    for position, (name, value) in enumerate(list(arguments.arguments.items())[1:]):
        if isinstance(value, Tensor) and (position == 0 or value.requires_grad):
            inputs[name] = value
        elif isinstance(value, UserDict):
            inputs |= {(name, entry, i): x for entry, pair in value.items() for i, x in enumerate(pair)}
    return inputs


def replace_tensors(arguments: Arguments, tensors: dict[Name, Tensor], layer: nn.Module | None = None) -> Arguments:
    """Return a copy of the arguments in which ``tensors`` replace the tensors of the same names.

    ``layer``, if given, replaces the layer. The dictionary of keys and values that layers share is copied.
    """
    new = inspect.BoundArguments(arguments.signature, arguments.arguments.copy())
    if layer is not None:
        new.arguments[next(iter(new.arguments))] = layer
    for name, value in arguments.arguments.items():
        if isinstance(value, UserDict):
            new.arguments[name] = type(value)(
                {
                    entry: tuple(tensors.get((name, entry, i), x) for i, x in enumerate(pair))
                    for entry, pair in value.items()
                }
            )
        elif name in tensors:
            new.arguments[name] = tensors[name]
    return new


def run_and_list_outputs(forward: Callable[..., Any], arguments: Arguments) -> tuple[Any, list[Tensor]]:
    """Call ``forward`` with ``arguments``; return its result, and a list of its output tensors.

    The list ends with the keys and values that the call added to the dictionary that layers share.
    """
    sharing = _shared_dictionary(arguments)
    before = set(sharing or ())
    out = forward(*arguments.args, **arguments.kwargs)
    outputs = [item for place, item in enumerate(_as_list(out)) if _is_output(place, item)]
    if sharing is not None:
        outputs += [x for entry, pair in sharing.items() if entry not in before for x in pair]
    return out, outputs


def recorded_outputs_as_leaves(arguments: Arguments, used_arguments: Arguments, out: Any, call: RecordedCall) -> Any:
    """Return the recorded outputs as new leaves, in the form of ``out``.

    Because the next layer reads leaves, only one layer's graph exists at a time. The repeated call may have added keys
    and values to the dictionary in ``used_arguments``, for other layers. Their recorded values are then added, as
    leaves, to the dictionary in ``arguments``.
    """
    leaves = iter([x.clone().requires_grad_(torch.is_grad_enabled()) for x in call.outputs])
    items = [next(leaves) if _is_output(place, item) else item for place, item in enumerate(_as_list(out))]
    sharing, filled = _shared_dictionary(arguments), _shared_dictionary(used_arguments)
    if sharing is not None and filled is not None:
        for entry, pair in filled.items():
            if entry not in sharing:
                sharing[entry] = tuple(next(leaves) for _ in pair)
    return type(out)(items) if isinstance(out, tuple | list) else items[0]


def _as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, tuple | list) else [out]


def _is_output(index: int, item: Any) -> bool:
    """Return True for hidden states and other floating tensors of up to 3 dims, not attention weights."""
    return index == 0 or (isinstance(item, Tensor) and item.is_floating_point() and item.dim() <= 3)


def _shared_dictionary(arguments: Arguments) -> Any:
    return next((value for value in arguments.arguments.values() if isinstance(value, UserDict)), None)


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return the module names, classes and settings of a layer, without layer indices.

    Layers of the same kind have the same value.
    """
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, str | bool | int) and "idx" not in key and not key.endswith("_id")
            ),
        )
        for name, module in layer.named_modules()
    )
