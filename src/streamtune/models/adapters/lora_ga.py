"""Start LoRA from the gradient of the weights: LoRA-GA (Wang et al., arXiv 2407.05000).

Of the gradient ``G = U S V'`` of a weight ``[out, in]``, at the model that training starts from (Algorithm 1):

    A0 = c V'[1..r],   B0 = c U[r+1..2r],   c = out^(1/4) / sqrt(gamma)

The first step of ``A`` and ``B`` by a small rate then moves the weight along ``B0 B0' G + G A0' A0``, which is ``c^2``
times the best approximation of ``G`` by rank 2r (Theorem 3.1), where LoRA moves it along ``G A' A`` of a random ``A``.
``B0 A0`` is taken away again by the constant adapter of ``start.py``.

A gradient is decomposed and freed when the backward hands it over, so there are never more than those of a layer. Of
several micro-batches gradients are summed on the host, in fp32, as long as there is another one to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.errors import NonFiniteError
from streamtune.models.adapters.start import set_start
from streamtune.models.adapters.targets import low_rank_layers

Factors = dict[str, tuple[Tensor, Tensor]]
"""Name of a layer in the base -> ``A0`` ``[r, in]`` and ``B0`` ``[out, r]``."""


def first_factors(adapted: Any, losses: Sequence[Callable[[], Tensor]], *, gamma: float, seed: int) -> Factors:
    """Return what the adapters of a model start from.

    Args:
        adapted: With adapters of kind ``lora_ga`` that change nothing yet; streamed or not. It is left as it was.
        losses: Each computes the loss of a micro-batch. The gradient is that of their sum.
        gamma: The smaller, the larger are both factors.
        seed: Of dropout, and of the random start of each decomposition.

    Raises:
        NonFiniteError: A gradient has values that are no numbers.
    """
    layers = dict(low_rank_layers(adapted))
    names = {id(layer.get_base_layer().weight): name for name, layer in layers.items()}
    sums: dict[str, Tensor] = {}
    found: Factors = {}

    def on_gradient(weight: Tensor, last: bool) -> None:
        name, grad = names[id(weight)], weight.grad
        assert grad is not None, "it has just been accumulated"
        weight.grad = None
        if not last:
            part = grad.detach().to("cpu", torch.promote_types(grad.dtype, torch.float32), copy=True)
            sums[name] = sums[name].add_(part) if name in sums else part
            return
        if name in sums:
            grad = sums.pop(name).to(grad.device).add_(grad)
        layer = layers[name]
        grad = grad.T if layer.fan_in_fan_out else grad
        if not torch.isfinite(grad).all():
            raise NonFiniteError(
                f"the gradient of {name}, which adapter_type: lora_ga starts from, is not finite",
                where="adapter_type",
                mend="look at the rows; or write adapter_type: lora",
            )
        found[name] = leading_factors(grad, layer.r["default"], gamma, seed)

    with torch.random.fork_rng(), torch.enable_grad(), _only_trained(adapted, names):
        for number, loss in enumerate(losses):
            torch.manual_seed(seed + number)
            hook = partial(on_gradient, last=number == len(losses) - 1)
            with _hooked([layer.get_base_layer().weight for layer in layers.values()], hook):
                loss().backward()
    for name in list(sums):  # the last micro-batch had no gradient for it
        layer, grad = layers[name], sums.pop(name)
        grad = grad.to(layer.get_base_layer().weight.device)
        found[name] = leading_factors(grad.T if layer.fan_in_fan_out else grad, layer.r["default"], gamma, seed)
    return found


def leading_factors(grad: Tensor, rank: int, gamma: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``A0`` and ``B0`` of a gradient ``[out, in]``, in fp32 or wider.

    Singular vectors are those of a random projection to four times the rank (Halko et al.), as the authors' are.
    """
    wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        u, _, v = torch.svd_lowrank(wide, q=min(4 * rank, *wide.shape), niter=4)
    scale = wide.shape[0] ** 0.25 / gamma**0.5
    return (scale * v[:, :rank].T).contiguous(), (scale * u[:, rank : 2 * rank]).contiguous()


@torch.no_grad()
def start_from_factors(adapted: Any, factors: Factors) -> None:
    """Start the adapters of a model from these factors. A layer without any, which had no gradient, stays as it is."""
    for name, layer in low_rank_layers(adapted):
        if name in factors:
            set_start(layer, *factors[name])


def summed_bytes(adapted: Any) -> int:
    """Return the bytes on the host of the gradients' sums, where they are of several micro-batches."""
    return sum(4 * layer.get_base_layer().weight.numel() for _, layer in low_rank_layers(adapted))


@contextmanager
def _only_trained(adapted: nn.Module, names: dict[int, str]) -> Iterator[None]:
    """Train the weights below adapters, and nothing else, while inside."""
    before = [(parameter, parameter.requires_grad) for parameter in adapted.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in names)
    try:
        yield
    finally:
        for parameter, trained in before:
            parameter.requires_grad_(trained)
            if id(parameter) in names:
                parameter.grad = None


@contextmanager
def _hooked(weights: Sequence[Tensor], hook: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``hook`` with each weight whose gradient has been accumulated, while inside."""
    handles = [weight.register_post_accumulate_grad_hook(hook) for weight in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
