"""Parameters that several ranks share, of which each holds a part: ZeRO stage 3 and FSDP2.

Such a parameter is whole only inside a call of its module: hooks around the call gather it before and free it after,
and do so again in the backward. So the engine computes with a weight inside that module's call: a decoder layer's
chunks run inside its ``forward``, the head's inside the head's. The one exception is a layer that runs forward again in
the backward of a later layer (``levels: 2``): :func:`gathered` gathers it for that.
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

LEAF = "_z3_leaf"
"""Flag by which ``deepspeed.utils.set_z3_leaf_modules`` marks a module that is gathered whole around its call."""

DEEPSPEED = "deepspeed.runtime.zero"
"""The package whose hooks gather modules under ZeRO stage 3."""

GATHER, FREE = "pre_sub_module_forward_function", "post_sub_module_forward_function"
"""Methods of its ``DeepSpeedZeRoOffload`` by which these hooks gather a module and free it."""


class FlatParametersError(UnsupportedModelError):
    """FSDP1 joins the parameters of many modules in one, and gives a module views of it for one call only."""

    def __init__(self, where: str) -> None:
        super().__init__(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters a layer only borrows for "
            "one call",
            where=where,
            fix="use FSDP2: torch.distributed.fsdp.fully_shard(layer), or fsdp_version: 2 of accelerate",
        )


def is_sharded(module: nn.Module) -> bool:
    """Return True if a call of ``module`` gathers parameters of its own that are on other ranks otherwise."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):  # ZeRO stage 3
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is of its kind where nobody imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def gather_whole(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Have ZeRO stage 3 gather a layer whole around its call, and not each module inside of it.

    Chunks run inside of one call of the layer, and again in one call of its backward. ``deepspeed.initialize`` reads
    the flag; without DeepSpeed it has no effect. Return the layers that were not flagged before.
    """
    flagged: list[nn.Module] = []
    for layer in layers:
        if getattr(layer, LEAF, False):
            continue
        if any(_gathers(module) for module in layer.modules() if module is not layer):
            ungather_whole(flagged)
            raise UnsupportedModelError(
                "deepspeed.initialize() (ZeRO stage 3) gathers the modules inside of each layer one by one, and chunks "
                "need the layer whole",
                where=type(layer).__name__,
                fix="call streamtune.stream(model) before deepspeed.initialize() and before the trainer that calls it",
            )
        setattr(layer, LEAF, True)
        flagged.append(layer)
    return flagged


def need_gradient(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the hidden states of a trained layer require a gradient under ZeRO stage 3, as a forward pre-hook.

    DeepSpeed's backward hooks of a layer are attached to its first input. If that needs no gradient (adapters over a
    frozen embedding), it frees the weights before the layer's backward.
    """
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not torch.is_grad_enabled() or not isinstance(hidden, Tensor) or hidden.requires_grad:
        return None
    parameters = list(layer.parameters())
    if not any(hasattr(p, "ds_id") for p in parameters) or not any(p.requires_grad for p in parameters):
        return None
    hidden = hidden.detach().requires_grad_()
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def ungather_whole(flagged: Iterable[nn.Module]) -> None:
    """Remove the flag, except from layers that DeepSpeed already gathers by it."""
    for layer in flagged:
        if hasattr(layer, LEAF) and not any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            delattr(layer, LEAF)


def _gathers(module: nn.Module) -> bool:
    return any(map(_is_deepspeeds, module._forward_pre_hooks.values()))


def _is_deepspeeds(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(DEEPSPEED)


@contextmanager
def gathered(layer: nn.Module, *, during: nn.Module, next_backward: bool) -> Iterator[None]:
    """Gather a layer's sharded weights for a forward in the backward of another layer; free them after.

    If the backward of ``layer`` comes next, FSDP2 has begun to gather it, and it stays gathered.
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
    """Gather a layer as the hooks of ZeRO stage 3 do around its forward, without its other hooks.

    So this forward is in the order of modules by which DeepSpeed fetches ahead. The hooks that count the backwards to
    come are left out, since this forward has none.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    offload = _offload_of(layer)
    parameters: list[Any] = list(layer.parameters())
    before = [set(parameter.ds_active_sub_modules) for parameter in parameters]
    offload.pre_sub_module_forward_function(layer)
    # DeepSpeed takes this for gradient checkpointing, and would keep frozen weights until the backward of ``during``.
    needed: set[Any] = getattr(during, "ds_recompute_parameters", set())
    for parameter, users in zip(parameters, before, strict=True):
        if during.ds_id not in users:
            needed.discard(parameter)
            parameter.ds_active_sub_modules.discard(during.ds_id)
    try:
        yield
    finally:
        FWD_MODULE_STACK.pop()  # as the hook does that calls the following
        offload.post_sub_module_forward_function(layer)


def _offload_of(layer: nn.Module) -> Any:
    """Return the object of DeepSpeed that gathers the layer, which its hooks hold in their closures."""
    functions: list[Any] = [hook for hook in layer._forward_pre_hooks.values() if _is_deepspeeds(hook)]
    while functions:
        function = functions.pop()
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        held.append(getattr(function, "__wrapped__", None))
        for value in held:
            if hasattr(value, GATHER) and hasattr(value, FREE):
                return value
        functions += [value for value in held if hasattr(value, "__closure__")]
    raise UnsupportedModelError(
        "a layer is to run forward again in the backward (levels: 2), and this version of DeepSpeed does not gather it "
        f"by {GATHER}()",
        where=type(layer).__name__,
        fix="set levels: 1, or install the version of DeepSpeed that constraints.txt names",
    )


@dataclass(frozen=True)
class Weights:
    """The parameters of one layer at one moment.

    ``held`` has the name, tensor, version counter, address of its numbers and ``requires_grad`` of each parameter and
    buffer. It is empty if ranks share the weights, which are gathered anew for each call.
    """

    layer: nn.Module
    held: tuple[tuple[str, Tensor, int, int, bool], ...]

    @classmethod
    def now(cls, layer: nn.Module) -> Weights:
        """Return the weights at this moment."""
        if any(map(is_sharded, layer.modules())):
            return cls(layer, ())
        held: list[tuple[str, Tensor, int, int, bool]]
        held = [(name, p, p._version, _place(p), p.requires_grad) for name, p in layer.named_parameters()]
        held += [(name, buffer, buffer._version, 0, False) for name, buffer in layer.named_buffers()]
        return cls(layer, tuple(held))

    def check(self, between: str = "the forward and its backward") -> None:
        """Refuse, as autograd does, to compute with other weights than the forward's.

        Raises:
            ArgumentError: A weight was changed in place, given other numbers (``.data``) or frozen.
            FlatParametersError: A weight is not a parameter of the layer any more.
        """
        for name, parameter, version, place, trained in self.held:
            table, key = _owner(self.layer, name)
            if key not in table:  # of a buffer, a new one was put in its place: the layer's own doing
                if not isinstance(parameter, nn.Parameter) and not trained:
                    continue
                raise FlatParametersError(type(self.layer).__name__)
            if trained and not parameter.requires_grad:
                raise ArgumentError(
                    f"{name} was frozen between {between}, which would lose its gradient",
                    where=type(self.layer).__name__,
                    fix="call loss.backward() first; disable_adapter() of peft freezes adapters as long as it is open",
                )
            if parameter._version != version or (place and _place(parameter) != place):
                raise ArgumentError(
                    f"{name} was changed in place between {between}, and both compute with it",
                    where=type(self.layer).__name__,
                    fix="change weights after loss.backward(), as an optimizer's step does",
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put these tensors into the layer while inside: ``torch.func.functional_call`` has restored its own by now."""
        places = [(*_owner(self.layer, name), tensor) for name, tensor, *_ in self.held]
        swapped = [(table, key, tensor) for table, key, tensor in places if table[key] is not tensor]
        before = [table[key] for table, key, _ in swapped]
        try:
            for table, key, tensor in swapped:
                table[key] = tensor
            yield
        finally:
            for (table, key, _), own in zip(swapped, before, strict=True):
                table[key] = own


def adapted_tensors(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return the weights that peft adapts as tensors, such as stacked experts; none if peft is not imported."""
    wrapper: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if wrapper is None:
        return ()
    wrapped: list[Any] = [module for module in layer.modules() if isinstance(module, wrapper)]
    return tuple(weight for module in wrapped if not (weight := module.get_param()).is_inference())


def same_versions(weights: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """Context that keeps the version counters of :func:`adapted_tensors`.

    For each call peft parametrizes the weight, and torch then writes the tensor's own numbers into it. Only its version
    changes, and a layer that runs again before its backward would be refused by :meth:`Weights.check`.
    """
    kept: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
    context: AbstractContextManager[None] = kept(weights) if weights else nullcontext()
    return context


def _place(parameter: Tensor) -> int:
    """Return the address of a tensor's numbers; 0 if it has none or may change it (quantised, other types, ranks)."""
    says = type(parameter) in (Tensor, nn.Parameter) and not (dist.is_available() and dist.is_initialized())
    return parameter.data_ptr() if says else 0


def _owner(layer: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Return (table of parameters or buffers that holds a name, key of the name in it)."""
    path, _, key = name.rpartition(".")
    module = layer.get_submodule(path)
    return module._buffers if key in module._buffers else module._parameters, key  # type: ignore[return-value]
