"""Random weights that are drawn later, a tensor at a time, and are those the plain model would have been given.

    with RecordedInit(draw=True) as recorded:
        model = AutoModelForCausalLM.from_config(config)     # parameters on meta, buffers real
    weight = recorded.replay(model.lm_head.weight)           # bit for bit what the plain model has there

While a model is constructed, the in-place operations on empty tensors (drawing, filling, scaling) are recorded, each
with the random state before it. Draws are performed as well, into a scratch tensor that is freed at once: so the random
state advances as in the plain model, and no more than one parameter is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NotRecordedError(Exception):
    """A tensor was made by more than in-place operations on an empty one."""


@dataclass
class _Operation:
    function: Callable[..., Any]
    place: tuple[torch.Size, tuple[int, ...], int]
    """Size, stride and offset of the view that it works on."""
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    state: Tensor | None
    """The generator's before it; None where it draws nothing."""


@dataclass
class _History:
    made: Tensor
    """As it was made, on ``meta``; kept, so that its storage's address is not another's later."""
    operations: list[_Operation] = field(default_factory=list)


class RecordedInit(TorchDispatchMode):
    """A context that makes empty floating-point tensors on ``meta`` and records the in-place operations on them.

    Args:
        draw: Perform the draws, so that the random state before each is known. False where nothing is to be replayed.
    """

    def __init__(self, *, draw: bool) -> None:
        super().__init__()
        self.draw = draw
        self._histories: dict[int, _History] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and _on_cpu(kwargs):
            made: Tensor = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            self._histories[made.untyped_storage()._cdata] = _History(made)
            return made
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if self.draw and target is not None and target.device.type == "meta" and _writes(func):
            self._write_down(func, target, args[1:], kwargs)
        return func(*args, **kwargs)

    def _write_down(self, func: Any, target: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        history = self._histories.get(target.untyped_storage()._cdata)
        others = [value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)]
        if history is None or any(value.device.type == "meta" for value in others):
            raise NotRecordedError(f"{func} on a tensor that was not empty before")
        place = (target.size(), target.stride(), int(target.storage_offset()))
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            scratch = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device="cpu")
            func(scratch, *arguments, **keywords)
        kept = tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
        history.operations.append(_Operation(func, place, kept, keywords, state))

    def replay(self, parameter: Tensor) -> Tensor:
        """Return the values of a parameter on ``meta``, on the CPU. The caller's random state is left as it was.

        Raises:
            NotRecordedError: The parameter was not made empty while recording.
        """
        history = self._histories.get(parameter.untyped_storage()._cdata)
        if history is None or history.made.shape != parameter.shape:
            raise NotRecordedError("a parameter that was not made empty")
        values = torch.empty_strided(history.made.size(), history.made.stride(), dtype=history.made.dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for operation in history.operations:
                if operation.state is not None:
                    torch.set_rng_state(operation.state)
                view = values.as_strided(*operation.place)
                operation.function(view, *operation.arguments, **operation.keywords)
        return values


def _on_cpu(keywords: Mapping[str, Any]) -> bool:
    dtype = keywords.get("dtype") or torch.get_default_dtype()
    device = keywords.get("device")
    return bool(dtype.is_floating_point) and (device is None or torch.device(device).type == "cpu")


def _writes(func: Any) -> bool:
    """Return True if an operation changes its first argument in place (and makes no view of it)."""
    first = func._schema.arguments[0].alias_info
    return first is not None and bool(first.is_write)
