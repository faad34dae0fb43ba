"""The tools of the checks: a model borrowed for a comparison, differences of tensors, trial batches, recorded calls.

A decoder layer's call is recorded as a function of tensors, so that the preflight can repeat it, plain or in chunks.
Inputs are the tensor arguments that need a gradient, hidden states first, and the entries of a dictionary of keys and
values that the model shares between its layers. Outputs are the tensors that the layer returns or adds to that
dictionary.
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
from streamtune.engine.layer import StreamedForward
from streamtune.engine.memory.placement import Tiers
from streamtune.engine.observe import RandomState
from streamtune.engine.streamed_layer import ModelParts
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError
from streamtune.schedule import Schedule


@contextmanager
def borrowed(handle: StreamedModel) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore afterwards all that the preflight changes.

    That is the training flags, the layers' ``forward``, ``requires_grad`` of the head, the precision of fp32 products
    and the random state.
    """
    model = handle.model
    training = [(module, module.training) for module in model.modules()]
    forwards: list[Any] = [layer.__dict__.get("forward") for layer in handle.layers]
    head = model.get_output_embeddings()
    frozen = [p for p in head.parameters() if p.requires_grad] if isinstance(head, nn.Module) else []
    precision = torch.get_float32_matmul_precision()
    device = model_device(model)
    try:
        with RandomState.now(device).replayed(), torch.enable_grad():
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
def aliased(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace the layer's trainable parameters by leaves on the same storage, without ``.grad`` and hooks."""
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
    """Replaces a layer's ``forward`` in a forward of the model by ``step(index, args, kwargs)``.

    The layer holds its weights on the device in its step.
    """

    def __init__(self, handle: StreamedModel, index: int, step: Callable[..., Any]) -> None:
        self.handle, self.index, self.step = handle, index, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``step`` returns."""
        with self.handle.layer_on_device(self.handle.layers[self.index]):
            return self.step(self.index, args, kwargs)


def step_layers(handle: StreamedModel, step: Callable[..., Any]) -> None:
    """Replace the ``forward`` of all layers by :class:`LayerStep`."""
    for index, layer in enumerate(handle.layers):
        layer.forward = LayerStep(handle, index, step)


def refuse_removed(handle: StreamedModel) -> None:
    """Refuse to check a model that is not streamed any more."""
    if not handle.layers:
        raise ArgumentError("the model is not streamed any more", fix="check before .remove()")


def first_of(out: Any) -> Tensor:
    """Return the hidden states among what a layer returns."""
    return out[0] if isinstance(out, tuple | list) else out


BOUND = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative difference that rounding explains. fp64: some layers compute their norms, rotations or routers in fp32."""


def compared_dtype(tensor: Tensor, layer: nn.Module | None = None) -> torch.dtype:
    """Return the key of a tensor's bound: its dtype, or the dtype of the layer it went through if that is coarser.

    Some models keep the residual stream in fp32 between layers that compute in bf16.
    """
    dtypes = [tensor.dtype, *(p.dtype for p in layer.parameters())] if layer is not None else [tensor.dtype]
    return max((dtype for dtype in dtypes if dtype in BOUND), key=BOUND.__getitem__, default=torch.float32)


def distance(value: Tensor, reference: Tensor, valid: Tensor | None) -> float:
    """Return ``||value - reference|| / ||reference||`` over the valid tokens."""
    if value.shape != reference.shape:
        return math.inf
    if valid is not None:
        value, reference = value[valid], reference[valid]
    return ratio(norm_of(value, reference), norm_of(reference))


def norm_of(value: Tensor | None, other: Tensor | None = None) -> float:
    """Return ``||value - other||`` in fp32 or wider, where a missing tensor is zero."""
    if value is None:
        value, other = other, None
    if value is None:
        return 0.0
    wide = value.detach().to(torch.promote_types(value.dtype, torch.float32))
    return float((wide if other is None else wide - other.detach().to(wide)).norm())


def ratio(difference: float, whole: float) -> float:
    """Return ``difference / whole``: 0 for no difference, infinity if either is not finite or ``whole`` is 0."""
    if difference == 0:
        return 0.0
    return difference / whole if whole > 0 and math.isfinite(difference) and math.isfinite(whole) else math.inf


def widened(value: Any, dtype: torch.dtype) -> Any:
    """Return nested containers with every floating tensor in a wider dtype."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype) if value.is_floating_point() else value
    if isinstance(value, UserDict):
        return type(value)({key: widened(item, dtype) for key, item in value.items()})
    if isinstance(value, dict):
        return {key: widened(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(widened(item, dtype) for item in value)
    return value


ROWS, LENGTH, PADDED = 2, 24, 5
SCHEDULE = Schedule(chunk_size=7, head_chunk_size=11)


def streamed_forward(
    layer: nn.Module, own: str | None, context: CallContext | None = None, schedule: Schedule = SCHEDULE
) -> StreamedForward:
    """Return the streamed forward of a layer by itself: it shares nothing with other layers but ``context``."""
    parts = ModelParts(schedule, Tiers(schedule), CallContext() if context is None else context)
    return StreamedForward(layer, parts, own)


def trial_batch(model: Any) -> dict[str, Any]:
    """Return random ordinary tokens, the second row padded on the right; the random generator is our own."""
    head = model.get_output_embeddings()
    ids = ordinary_tokens(model, ROWS, LENGTH)
    mask = torch.ones_like(ids)
    mask[-1, -PADDED:] = 0
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, IGNORE_INDEX),
    }
    if head is None:  # what its labels would be is not known: a number is made of what it returns
        del inputs["labels"]
    parameters = inspect.signature(type(model).forward).parameters
    if "use_cache" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        inputs["use_cache"] = False
    return inputs


def ordinary_tokens(model: Any, rows: int, length: int) -> Tensor:
    """Return ``[rows, length]`` random tokens, none of them special; the random generator is our own."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    known = min([table.shape[0], 4096, *([head.weight.shape[0]] if hasattr(head, "weight") else [])])
    config = model.config.get_text_config(decoder=True)
    special = {
        value
        for owner in (model.config, config)
        for key, value in vars(owner).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    ordinary = torch.tensor([token for token in range(known) if token not in special] or [0])
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)].to(model_device(model))


Name = str | SharedKey
Arguments = inspect.BoundArguments


@dataclass
class RecordedCall:
    """A recorded call of a model's layer number ``index``, without gradients.

    ``wanted`` names the ``inputs`` that need a gradient; ``outputs`` are the plain layer's, the first ``[B, T, C]``.
    """

    index: int
    arguments: Arguments
    inputs: dict[Name, Tensor]
    wanted: list[Name]
    outputs: list[Tensor]

    @property
    def z_in(self) -> Tensor:
        """The hidden states."""
        return next(iter(self.inputs.values()))


def bind(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Bind a call of ``layer`` as Python does; the layer itself is the first argument."""
    return inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)


def inputs_of(arguments: Arguments) -> dict[Name, Tensor]:
    """Return the hidden states, other tensors with a gradient, and all shared keys and values, by name."""
    found: dict[Name, Tensor] = {}
    for position, (name, value) in enumerate(list(arguments.arguments.items())[1:]):
        if isinstance(value, Tensor) and (position == 0 or value.requires_grad):
            found[name] = value
        elif isinstance(value, UserDict):
            found |= {(name, entry, i): x for entry, pair in value.items() for i, x in enumerate(pair)}
    return found


def replaced(arguments: Arguments, tensors: dict[Name, Tensor], layer: nn.Module | None = None) -> Arguments:
    """Return the same call with other tensors, of another layer if given, and with its own shared dictionary."""
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


def outputs_of(forward: Callable[..., Any], arguments: Arguments) -> tuple[Any, list[Tensor]]:
    """Call ``forward``; return its result, and its outputs: tensors, then entries it adds to the dictionary."""
    sharing = _sharing(arguments)
    before = set(sharing or ())
    out = forward(*arguments.args, **arguments.kwargs)
    outputs = [item for place, item in enumerate(_items(out)) if _is_output(place, item)]
    if sharing is not None:
        outputs += [x for entry, pair in sharing.items() if entry not in before for x in pair]
    return out, outputs


def hand_on(arguments: Arguments, used: Arguments, out: Any, call: RecordedCall) -> Any:
    """Return the recorded outputs in the layer's own form, as new leaves: the graph of one layer lives at a time.

    Entries that the call ``used`` added to its shared dictionary are added to that of the model's own ``arguments``.
    """
    leaves = iter([x.clone().requires_grad_(torch.is_grad_enabled()) for x in call.outputs])
    items = [next(leaves) if _is_output(place, item) else item for place, item in enumerate(_items(out))]
    sharing, filled = _sharing(arguments), _sharing(used)
    if sharing is not None and filled is not None:
        for entry, pair in filled.items():
            if entry not in sharing:
                sharing[entry] = tuple(next(leaves) for _ in pair)
    return type(out)(items) if isinstance(out, tuple | list) else items[0]


def _items(out: Any) -> list[Any]:
    return list(out) if isinstance(out, tuple | list) else [out]


def _is_output(place: int, item: Any) -> bool:
    """Return True for hidden states and other floating tensors of up to 3 dims: not attention or choices of keys."""
    return place == 0 or (isinstance(item, Tensor) and item.is_floating_point() and item.dim() <= 3)


def _sharing(arguments: Arguments) -> Any:
    return next((value for value in arguments.arguments.values() if isinstance(value, UserDict)), None)


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return the classes inside of a layer and their settings, not its place: equal for two layers of one kind."""
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
