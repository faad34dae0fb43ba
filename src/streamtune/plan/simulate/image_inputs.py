"""Simulate the memory and work of a vision tower, which computes all images of a micro-batch before its tokens.

The tower and the projector run once per micro-batch. If they are frozen, only their results stay in memory during the
step. If they are trained, what they save for their backward stays too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from streamtune.base.adapters import base_of
from streamtune.engine import decoder_layers
from streamtune.engine.image_tower import PIXELS, install_image_tower, stays_on_host
from streamtune.errors import UnsupportedModelError
from streamtune.ops.devices import simulate_device_type
from streamtune.plan.simulate.meta_operators import MetaAutocast, autocast_on_meta, meta_tensor_with_value
from streamtune.plan.simulate.step import DeviceChoices
from streamtune.plan.simulate.trace import COLUMNS, WORK, Trace
from streamtune.plan.simulate.workload import ImageCost


class _IntegersOnHost(TorchDispatchMode):
    """Dispatch mode in which tensors on ``meta`` can be combined with tensors on the CPU, such as the sizes of images.

    Shapes depend on integers alone, so these are computed with their values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        tensors = [*_tensors(args), *_tensors(given.values())]
        if any(x.device.type == "meta" for x in tensors) and any(x.device.type == "cpu" and x.dim() for x in tensors):
            if func in INDEXING:
                args = (args[0], [place for index in args[1] for place in _positions(index)], *args[2:])
            args, given = tree_map(_to_meta, (args, given))
        return func(*args, **given)


INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _positions(index: Tensor | None) -> Iterable[Tensor | None]:
    """Yield the indices that a boolean mask on the CPU stands for; any other index is returned unchanged."""
    is_mask = index is not None and index.dtype == torch.bool and index.device.type == "cpu"
    return index.nonzero(as_tuple=True) if index is not None and is_mask else (index,)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim():
        return meta_tensor_with_value(value)
    return value


def measure_images(
    model: Any, inputs: Mapping[str, Tensor], *, autocast: str | None = None, device: str = "cuda"
) -> ImageCost:
    """Return memory and work of the vision tower of a model on ``meta``, which computes parts of the images at a time.

    Args:
        model: Model on ``meta``; its parameters say whether they are trained.
        inputs: Inputs of the model for the images of a micro-batch, such as ``pixel_values``. Only the values of
            integers are read.
        autocast: Dtype of autocast, ``bfloat16`` or ``float16``; None: no autocast.
        device: Type of the simulated device.
    """
    base = base_of(model)
    layers = decoder_layers(base)
    tower = install_image_tower(base, layers)
    assert tower is not None, "a model that reads images has a vision tower"
    tower.remove()
    given = {name: value for name, value in inputs.items() if name in tower.argument_names}
    waiting = sum(value.nbytes for name, value in inputs.items() if not stays_on_host(name, value))
    shapes = {name: value.to("meta") if value.is_floating_point() else value for name, value in given.items()}

    def run(compute: Callable[..., Any], arguments: Mapping[str, Tensor]) -> _Traced:
        return _trace(model, layers, lambda: compute(**arguments), autocast, device)

    try:
        whole = run(tower, shapes)
    except (UnsupportedModelError, NotImplementedError):  # Idefics reads the pixels, to find images that are padding
        shapes = given
        whole = run(tower, shapes)
    held, peak, backward = whole.held, whole.peak, tuple(0.0 for _ in whole.work)
    needed = whole.work
    parts = tower.parts_of(shapes)
    largest: dict[str, Tensor] = {**shapes}
    if len(parts) > 1:
        largest |= max(parts, key=lambda part: part[PIXELS].numel())
    if tower.is_trained:
        parameters = [p for p in tower.parameters() if p.requires_grad]
        both = run(lambda **part: _differentiate(tower.compute_whole(**part), parameters), largest)
        if len(parts) == 1:
            backward = tuple(total - forward for total, forward in zip(both.work, whole.work, strict=True))
            needed = both.work
        else:  # each part is computed forward again and backward, in proportion to the largest part
            alone = run(tower.compute_whole, largest)
            peak = max(peak, held + alone.peak)
            ratios = (total / forward if forward else 0.0 for total, forward in zip(both.work, alone.work, strict=True))
            backward = needed = tuple(ratio * forward for ratio, forward in zip(ratios, whole.work, strict=True))
    if len(parts) > 1 and stays_on_host(PIXELS, inputs[PIXELS]):
        peak += largest[PIXELS].nbytes  # its copy on the device
    flops = sum(needed[WORK.index(name)] for name in ("matmul_flops", "attention_flops"))
    return ImageCost(waiting + held, waiting + peak, whole.work, backward, round(flops))


def _differentiate(results: Any, parameters: Sequence[nn.Parameter]) -> Any:
    """Return the gradients of a tower's parameters from its results."""
    found = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    return torch.autograd.grad(found, parameters, [torch.empty_like(x) for x in found], allow_unused=True)


class _Traced(NamedTuple):
    """Bytes that are live when a function has returned, with its result; the peak; and the work."""

    held: int
    peak: int
    work: tuple[float, ...]


def _trace(
    model: Any, layers: Sequence[nn.Module], compute: Callable[[], Any], autocast: str | None, device: str
) -> _Traced:
    switch = MetaAutocast(device)
    dtype = torch.float16 if autocast == "float16" else torch.bfloat16
    with (
        simulate_device_type(device),
        autocast_on_meta(),
        DeviceChoices(device, switch),
        Trace(model, layers, device=device, tiers=lambda: (0, 0, 0, 0)) as trace,
        _IntegersOnHost(),
        switch.outermost_autocast(),
        torch.autocast(switch.switch, dtype=dtype, enabled=autocast is not None, cache_enabled=False),
    ):
        results = compute()
        held = trace.total
        trace.finish()
        del results
    host = COLUMNS.index("host")
    peak = max((sum(moment[:host]) for cell in trace.cells.values() for moment in cell.moments), default=0)
    work = tuple(sum(cell.work[at] for cell in trace.cells.values()) for at in range(len(WORK)))
    return _Traced(held, peak, work)
