"""Sharded parameters (ZeRO stage 3, FSDP2), and the state of a layer's weights at one moment.

A sharded parameter is complete only inside a call of its module: hooks gather it before the call and free it after, and
again in the backward. So a weight is read only inside that call. The exception is a layer that runs forward again in
the backward of a later layer (``levels: 2``): :func:`gathered_weights` gathers its weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streamtune.errors import ArgumentError, UnsupportedModelError

LEAF_FLAG = "_z3_leaf"
"""Attribute with which ``deepspeed.utils.set_z3_leaf_modules`` marks a module to be gathered as a whole."""

DEEPSPEED = "deepspeed.runtime.zero"
"""Package whose hooks gather modules under ZeRO stage 3."""

GATHER, FREE = "pre_sub_module_forward_function", "post_sub_module_forward_function"
"""Methods of ``DeepSpeedZeRoOffload`` with which DeepSpeed's hooks gather and free a module."""


class FlatParametersError(UnsupportedModelError):
    """Raised for a model wrapped by FSDP1, whose parameters are flat tensors, split into weights only during a call."""

    def __init__(self, where: str) -> None:
        super().__init__(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters a layer holds only during "
            "one call",
            where=where,
            fix="use FSDP2: torch.distributed.fsdp.fully_shard(layer), or fsdp_version: 2 of accelerate",
        )


def is_sharded(module: nn.Module) -> bool:
    """Return True if the module's own parameters are sharded by ZeRO stage 3 or FSDP2."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):  # ZeRO stage 3
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without this import no module can be sharded by it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def flag_leaf_layers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Flag layers so that ZeRO stage 3 gathers each as a whole; return the layers that were not flagged before.

    All chunks run inside one call of the layer, so its modules must not be gathered one by one.
    ``deepspeed.initialize`` reads the flag. Without DeepSpeed the flag has no effect.

    Raises:
        UnsupportedModelError: ``deepspeed.initialize`` has already prepared a layer.
    """
    flagged: list[nn.Module] = []
    for layer in layers:
        if getattr(layer, LEAF_FLAG, False):
            continue
        if any(_is_gathered_by_deepspeed(module) for module in layer.modules() if module is not layer):
            unflag_leaf_layers(flagged)
            raise UnsupportedModelError(
                "deepspeed.initialize() (ZeRO stage 3) gathers the modules of a layer one by one, but streaming needs "
                "the whole layer",
                where=type(layer).__name__,
                fix="call streamtune.stream(model) before deepspeed.initialize() and before the trainer that calls it",
            )
        setattr(layer, LEAF_FLAG, True)
        flagged.append(layer)
    return flagged


def require_input_gradient(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the hidden states of a trained layer require a gradient under ZeRO stage 3 (a forward pre-hook).

    DeepSpeed attaches its backward hooks to a layer's first input. If this input needs no gradient (adapters over a
    frozen embedding), DeepSpeed frees the weights before the layer's backward.
    """
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not torch.is_grad_enabled() or not isinstance(hidden, Tensor) or hidden.requires_grad:
        return None
    parameters = list(layer.parameters())
    if not any(hasattr(p, "ds_id") for p in parameters) or not any(p.requires_grad for p in parameters):
        return None
    hidden = hidden.detach().requires_grad_()
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def require_output_gradient(module: nn.Module, args: Any, out: Tensor) -> None:
    """Make the output of a module, such as an embedding, require a gradient (a forward hook)."""
    if torch.is_grad_enabled() and not out.requires_grad:
        out.requires_grad_(True)


def unflag_leaf_layers(flagged: Iterable[nn.Module]) -> None:
    """Remove the flag that :func:`flag_leaf_layers` set, except from layers that DeepSpeed has already sharded."""
    for layer in flagged:
        if hasattr(layer, LEAF_FLAG) and not any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            delattr(layer, LEAF_FLAG)


def _is_gathered_by_deepspeed(module: nn.Module) -> bool:
    return any(map(_is_deepspeed_hook, module._forward_pre_hooks.values()))


def _is_deepspeed_hook(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(DEEPSPEED)


@contextmanager
def gathered_weights(layer: nn.Module, *, during: nn.Module, next_backward: bool) -> Iterator[None]:
    """Gather a layer's sharded weights in the ``with`` block, to run the layer forward in another layer's backward.

    Args:
        layer: Layer to gather.
        during: Layer whose backward runs.
        next_backward: True if the backward of ``layer`` comes next; under FSDP2 its weights then stay gathered.
    """
    if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
        with _gathered_by_deepspeed(layer, during):
            yield
        return
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules: list[Any] = [] if fsdp is None else [m for m in layer.modules() if isinstance(m, fsdp.FSDPModule)]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in [] if next_backward else modules:
            module.reshard()


@contextmanager
def _gathered_by_deepspeed(layer: nn.Module, during: nn.Module) -> Iterator[None]:
    """Gather a layer as DeepSpeed's hooks do, so that DeepSpeed's prefetch order includes this forward.

    DeepSpeed's hooks that count expected backwards are left out, because this forward has no backward.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    offload = _deepspeed_offload(layer)
    parameters: list[Any] = list(layer.parameters())
    before = [set(parameter.ds_active_sub_modules) for parameter in parameters]
    offload.pre_sub_module_forward_function(layer)
    # DeepSpeed assumes gradient checkpointing, and would keep frozen weights until the backward of ``during``.
    needed: set[Any] = getattr(during, "ds_recompute_parameters", set())
    for parameter, users in zip(parameters, before, strict=True):
        if during.ds_id not in users:
            needed.discard(parameter)
            parameter.ds_active_sub_modules.discard(during.ds_id)
    try:
        yield
    finally:
        FWD_MODULE_STACK.pop()  # DeepSpeed's hook does the same before this call
        offload.post_sub_module_forward_function(layer)


def _deepspeed_offload(layer: nn.Module) -> Any:
    """Return the DeepSpeed object that gathers the layer, found in the closures of the layer's hooks.

    Raises:
        UnsupportedModelError: The hooks hold no such object.
    """
    functions: list[Any] = [hook for hook in layer._forward_pre_hooks.values() if _is_deepspeed_hook(hook)]
    while functions:
        function = functions.pop()
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        held.append(getattr(function, "__wrapped__", None))
        for value in held:
            if hasattr(value, GATHER) and hasattr(value, FREE):
                return value
        functions += [value for value in held if hasattr(value, "__closure__")]
    raise UnsupportedModelError(
        "levels: 2 runs a layer forward again in the backward, and this version of DeepSpeed has no "
        f"{GATHER}() to gather its weights",
        where=type(layer).__name__,
        fix="set levels: 1, or install the version of DeepSpeed that constraints.txt names",
    )


@dataclass(frozen=True)
class Weights:
    """A record of one layer's parameters and buffers, to detect changes or to restore them.

    ``tensors`` has name, tensor, version counter, data address and ``requires_grad`` of each parameter and buffer. It
    is empty if the weights are sharded, because they are gathered anew for each call.
    """

    layer: nn.Module
    tensors: tuple[tuple[str, Tensor, int, int, bool], ...]

    @classmethod
    def capture(cls, layer: nn.Module) -> Weights:
        """Record the parameters and buffers that ``layer`` has now."""
        if any(map(is_sharded, layer.modules())):
            return cls(layer, ())
        tensors: list[tuple[str, Tensor, int, int, bool]]
        tensors = [(name, p, p._version, _data_address(p), p.requires_grad) for name, p in layer.named_parameters()]
        tensors += [(name, buffer, buffer._version, 0, False) for name, buffer in layer.named_buffers()]
        return cls(layer, tuple(tensors))

    def check_unchanged(self, between: str = "the forward and its backward") -> None:
        """Raise an error if the layer's weights have changed since they were recorded.

        Args:
            between: The two events between which the weights must not change, for the message.

        Raises:
            ArgumentError: A weight was changed in place, replaced through ``.data``, or frozen.
            FlatParametersError: A weight is no longer a parameter of the layer.
        """
        for name, parameter, version, place, trained in self.tensors:
            table, key = _tensor_table_and_key(self.layer, name)
            if key not in table:  # a layer may replace its own buffers
                if not isinstance(parameter, nn.Parameter) and not trained:
                    continue
                raise FlatParametersError(type(self.layer).__name__)
            if trained and not parameter.requires_grad:
                raise ArgumentError(
                    f"{name} was frozen between {between}, so its gradient would be lost",
                    where=type(self.layer).__name__,
                    fix="call loss.backward() first; peft's disable_adapter() freezes adapters inside its context",
                )
            if parameter._version != version or (place and _data_address(parameter) != place):
                raise ArgumentError(
                    f"{name} was changed in place between {between}; both read it",
                    where=type(self.layer).__name__,
                    fix="change weights after loss.backward(), as an optimizer step does",
                )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the layer the recorded tensors in the ``with`` block, also outside ``torch.func.functional_call``."""
        places = [(*_tensor_table_and_key(self.layer, name), tensor) for name, tensor, *_ in self.tensors]
        swapped = [(table, key, tensor) for table, key, tensor in places if table[key] is not tensor]
        before = [table[key] for table, key, _ in swapped]
        try:
            for table, key, tensor in swapped:
                table[key] = tensor
            yield
        finally:
            for (table, key, _), current in zip(swapped, before, strict=True):
                table[key] = current


def peft_wrapped_weights(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters that peft wraps in ``ParamWrapper``, such as stacked experts; empty without peft."""
    wrapper: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if wrapper is None:
        return ()
    wrapped: list[Any] = [module for module in layer.modules() if isinstance(module, wrapper)]
    return tuple(weight for module in wrapped if not (weight := module.get_param()).is_inference())


def preserve_version_counters(weights: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """Return a context in which writes to ``weights`` do not change their version counters.

    In each call peft parametrizes a weight that it wraps in ``ParamWrapper``, and torch writes the weight's own values
    into it. Without this context :meth:`Weights.check_unchanged` would raise an error in the backward.
    """
    preserve: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
    context: AbstractContextManager[None] = preserve(weights) if weights else nullcontext()
    return context


def _data_address(parameter: Tensor) -> int:
    """Return a tensor's data address; 0 if it may change (quantised tensors, several ranks)."""
    fixed = type(parameter) in (Tensor, nn.Parameter) and not (dist.is_available() and dist.is_initialized())
    return parameter.data_ptr() if fixed else 0


def _tensor_table_and_key(layer: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    path, _, key = name.rpartition(".")
    module = layer.get_submodule(path)
    return module._buffers if key in module._buffers else module._parameters, key  # type: ignore[return-value]
