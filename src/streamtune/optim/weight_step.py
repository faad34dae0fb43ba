"""Parts of StreamTune's own optimizers: updates weight by weight, torch's AdamW, random bits, stochastic rounding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from streamtune.ops.devices import kernel_device_type

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""Options of AdamW and their defaults. ``eps`` is added to the denominator; the weight decay is decoupled."""

SLICE_SIZES = {"cpu": 1 << 17}
"""Number of values that are updated at a time, by device type: float32 temporaries stay in the processor's cache."""

LARGE_SLICE = 1 << 22
"""Number of values that are updated at a time on other devices, where a slice costs the launch of a few kernels."""


class PerWeightOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that update their weights one by one; ``options`` override :attr:`DEFAULTS`."""

    DEFAULTS: ClassVar[Mapping[str, Any]]
    """Default of each option of a group of weights."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        if unknown := options.keys() - self.DEFAULTS.keys():
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}")
        super().__init__(params, {**self.DEFAULTS, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_weight(parameter, parameter.grad, group)

    def _step_weight(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def saved_states(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, dict[str, Any], Mapping[str, Any]]]:
    """Yield (parameter, group, saved state) for each parameter of an optimizer that has state in ``state_dict``."""
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    own = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, (parameter, group) in zip(saved, own, strict=True):
        if entry := state_dict["state"].get(number):
            yield parameter, group, entry


def parameter_indices(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the index of each parameter in the optimizer, by ``id(parameter)``.

    Call this when the optimizer is built: later, an optimizer step inside the backward leaves only one weight in the
    groups.
    """
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter): number for number, parameter in enumerate(every)}


def adamw_step(
    weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], *, fused: bool
) -> None:
    """Update a weight and its moments in place, by torch's ``adamw`` function.

    Args:
        weight, grad: Tensors of equal shape and dtype.
        state: Moments ``exp_avg`` and ``exp_avg_sq``, of the same shape and dtype; ``step``, a float32 scalar that is
            incremented, on the weight's device if ``fused``.
        group: Mapping with ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        fused: True for torch's fused kernel, False for plain operators.
    """
    adamw(
        [weight],
        [grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        fused=fused,
        foreach=False,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def flat_slices(x: Tensor) -> list[slice]:
    """Return the slices of a flat tensor that are updated one at a time, so that temporary tensors are small."""
    size = SLICE_SIZES.get(kernel_device_type(x.device), LARGE_SLICE)
    return [slice(start, min(start + size, len(x))) for start in range(0, len(x), size)]


def random_bits(count: int, device: torch.device, *key: int) -> Tensor:
    """Return an int32 tensor ``[count]`` of random bits; ``key`` as for :func:`seeded_generator`."""
    pairs = torch.empty(-(-count // 2), dtype=torch.int64, device=device)
    return pairs.random_(-(2**63), None, generator=seeded_generator(device, *key)).view(torch.int32)[:count]


def seeded_generator(device: torch.device, *key: int) -> torch.Generator | None:
    """Return a random generator on a device; None on ``meta``, where tensors have no values.

    ``key`` determines its seed: the run's seed, the step, the number of the weight, and the position in the weight.
    """
    if device.type == "meta":
        return None
    return torch.Generator(device).manual_seed(hash_integers(*key) >> 1)


def hash_integers(*key: int) -> int:
    """Return a 64-bit hash of integers that is equal in every process."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def round_stochastically(x: Tensor, bits: Tensor, *, out: Tensor) -> None:
    """Round ``x`` (float32) into ``out``: at random to one of the two nearest bfloat16 numbers, so that ``E[out] = x``.

    Infinities and values that bfloat16 represents exactly do not change. ``bits`` is int32; the lower 16 bits are
    random. The memory of ``x`` is overwritten.
    """
    # bfloat16 is the upper half of float32. Adding a random number below 2^16 carries into that half with probability
    # lower half / 2^16. Sign and magnitude are separate bits, so both signs round alike.
    raw = x.view(torch.int32)
    raw.add_(bits & 0xFFFF).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(raw)
