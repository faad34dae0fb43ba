"""Compute the vision tower of a model on a few images at a time, so that its memory does not grow with their number.

The tower and the projector compute each image by itself. Therefore the results for parts of the images, concatenated,
are the result for all of them, and the gradient is the sum of the parts' gradients. If the tower is trained, each part
is recomputed in the backward (``torch.utils.checkpoint``), so that only one part's activations are in memory at a time.

The pixels of many images may stay on the host (:func:`stays_on_host`). Each part is copied to the device when it is
computed.

A batch without images does not call the tower. With :func:`with_tower_gradients` its gradient of the tower is zero. So
all ranks have the same gradients to reduce, and with adapters in the tower alone, its loss can be differentiated.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamtune.engine.inspect_model import image_parameters

FROZEN_ELEMENTS = 1 << 25
"""Number of elements of ``pixel_values`` that a frozen tower computes at a time: about 20 pages of a million pixels."""
TRAINED_ELEMENTS = 1 << 22
"""Number of elements of ``pixel_values`` that a trained tower computes at a time, and recomputes in the backward."""

PIXELS, GRID = "pixel_values", "image_grid_thw"
BY_LAYER = "deepstack_features"
"""Field of a tower's result with a list over layers; other lists are over images."""


class ImageTower:
    """Replaces ``get_image_features`` of a model by a function that computes parts of the images.

    Args:
        owner: The module whose method computes the features of all images of a call.
        layer: A decoder layer; the child of ``owner`` that has it is not part of the tower.
    """

    def __init__(self, owner: Any, layer: nn.Module) -> None:
        self.owner, self.compute_whole = owner, owner.get_image_features
        self._layer = layer
        self.__signature__ = inspect.signature(self.compute_whole)  # generate() of transformers reads it
        self.argument_names = list(self.__signature__.parameters)
        owner.get_image_features = self

    def remove(self) -> None:
        """Give the model its own method again."""
        del self.owner.get_image_features

    @property
    def is_trained(self) -> bool:
        """True if the results need a gradient."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the vision tower and the projector."""
        return image_parameters(self.owner, [self._layer])

    def parts_of(self, inputs: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return the inputs of each part that is computed at a time; a single empty part stands for all images."""
        return split_images(inputs, TRAINED_ELEMENTS if self.is_trained else FROZEN_ELEMENTS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own ``get_image_features`` returns for all images."""
        given = {**dict(zip(self.argument_names, args, strict=False)), **kwargs}
        parts = self.parts_of(given)
        if len(parts) < 2:
            return self.compute_whole(*args, **kwargs)
        device = next(self.parameters()).device
        results = []
        for part in parts:
            compute = partial(self._compute_part, device, {**given, **part})
            results.append(checkpoint(compute, use_reentrant=False) if self.is_trained else compute())
        return join_results(results)

    def _compute_part(self, device: torch.device, inputs: Mapping[str, Any]) -> Any:
        if device.type == "meta":  # a simulation, in which some models read the values of the pixels
            return self.compute_whole(**inputs)
        return self.compute_whole(**{**inputs, PIXELS: inputs[PIXELS].to(device, non_blocking=True)})


def install_image_tower(model: nn.Module, layers: Sequence[nn.Module]) -> ImageTower | None:
    """Install an :class:`ImageTower` in a model with decoder ``layers``; None if it has no vision tower."""
    owners = [module for module in model.modules() if hasattr(type(module), "get_image_features")]
    return ImageTower(owners[-1], layers[0]) if owners else None  # outer modules only call the innermost one


def find_image_tower(model: nn.Module) -> ImageTower | None:
    """Return the :class:`ImageTower` that is installed in a model; None for a model without one."""
    installed = (vars(module).get("get_image_features") for module in model.modules())
    return next((tower for tower in installed if isinstance(tower, ImageTower)), None)


class _ZeroGradients(torch.autograd.Function):
    """Returns a loss. Its backward also gives parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Expanded, because these zeros stay in memory until the gradients of the images are added to them.
        return gradient, *(torch.zeros((), dtype=kind, device=device).expand(shape) for shape, kind, device in ctx.like)


def with_tower_gradients(loss: Tensor, model: nn.Module) -> Tensor:
    """Return ``loss``, whose backward gives a gradient to all trained parameters of a streamed model's vision tower.

    Without images in the batch, the gradients are zero. Zeros are computed before the gradients of the decoder layers,
    gradients of images after them. So this is for libraries that do not reduce gradients in the order of computation:
    DDP and FSDP2, not DeepSpeed.
    """
    trained = trained_tower_parameters(model)
    return _ZeroGradients.apply(loss, *trained) if trained else loss


def trained_tower_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of a streamed model's vision tower and projector."""
    tower = find_image_tower(model)
    return [] if tower is None else [p for p in tower.parameters() if p.requires_grad]


def stays_on_host(name: str, value: Tensor) -> bool:
    """Return True for an input that :class:`ImageTower` reads in parts: the pixels of many images."""
    return name == PIXELS and value.numel() > FROZEN_ELEMENTS


def split_images(inputs: Mapping[str, Any], max_elements: int) -> list[dict[str, Tensor]]:
    """Return the inputs of parts of the images, each with at most ``max_elements`` elements, but at least one image.

    The pixels of an image are the row of ``pixel_values`` with its number. With ``image_grid_thw``, ``[n, 3]``, they
    are the next ``t * h * w`` rows. All tensors that have a row for each image are split with them. A batch of lists
    of images, ``[B, n, C, H, W]``, becomes up to ``B * n`` lists of one image; images of zeros are padding.
    """
    pixels, grid = inputs.get(PIXELS), inputs.get(GRID)
    if not isinstance(pixels, Tensor) or pixels.numel() <= max_elements or pixels.dim() not in (2, 4, 5):
        return [{}]
    if pixels.dim() == 5:
        lists = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.shape[:2] == pixels.shape[:2]}
        real = pixels.flatten(0, 1).flatten(1).any(1)
        inputs = {**inputs, **{name: x.flatten(0, 1)[real][:, None] for name, x in lists.items()}}
        pixels = inputs[PIXELS]
    if pixels.dim() == 2 and not isinstance(grid, Tensor):
        return [{}]
    rows = grid.prod(-1).tolist() if isinstance(grid, Tensor) else [1] * len(pixels)
    per_row = pixels.numel() // max(1, len(pixels))
    bounds, held = [0], 0
    for image, count in enumerate(rows):
        if held and (held + count) * per_row > max_elements:
            bounds.append(image)
            held = 0
        held += count
    bounds.append(len(rows))
    others = [
        name
        for name, value in inputs.items()
        if name != PIXELS and isinstance(value, Tensor) and value.dim() and len(value) == len(rows)
    ]
    parts, start = [], 0
    for first, last in pairwise(bounds):
        stop = start + sum(rows[first:last])
        parts.append({PIXELS: pixels[start:stop], **{name: inputs[name][first:last] for name in others}})
        start = stop
    return parts


def join_results(results: Sequence[Any], *, by_layer: bool = False) -> Any:
    """Return the result for all images, from the results for parts of them."""
    first = results[0]
    if isinstance(first, dict):  # an output of transformers, which has its fields as keys too
        joined = {
            name: join_results([result[name] for result in results], by_layer=name == BY_LAYER)
            for name, value in first.items()
            if value is not None
        }
        return type(first)(**joined)
    if isinstance(first, Tensor):
        return torch.cat(list(results))
    if by_layer:
        return [join_results(layers) for layers in zip(*results, strict=True)]
    return type(first)(item for result in results for item in result)
