"""Parts of the optimizers written here: a step of each weight, torch's AdamW, random bits, stochastic rounding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from streamtune.ops.devices import kernel_device

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""Options of AdamW: the learning rate, decay rates of both moments, the denominator's addend, decoupled decay."""

PIECE = {"cpu": 1 << 17}
"""Values that are stepped at a time: temporaries in float32 stay in a processor's cache."""

LARGE_PIECE = 1 << 22
"""The same elsewhere, where each piece costs the start of a few kernels."""


class EachWeight(torch.optim.Optimizer):
    """An optimizer that steps its weights one by one, with options in place of :attr:`DEFAULTS`."""

    DEFAULTS: ClassVar[Mapping[str, Any]]
    """Options of a group of weights, with their defaults."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        if unknown := options.keys() - self.DEFAULTS.keys():
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}")
        super().__init__(params, {**self.DEFAULTS, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def saved_entries(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, dict[str, Any], Mapping[str, Any]]]:
    """Yield each parameter of an optimizer that has state in ``state_dict``, with its group and its state there."""
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    own = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, (parameter, group) in zip(saved, own, strict=True):
        if entry := state_dict["state"].get(number):
            yield parameter, group, entry


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the identity of each parameter -> its number.

    It is counted once: an optimizer in the backward empties the groups but for the weight that it steps.
    """
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter): number for number, parameter in enumerate(every)}


def adamw_step(
    weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], *, fused: bool
) -> None:
    """Step a weight and its moments in place, by torch's own function.

    Args:
        weight, grad: Tensors of one shape and dtype.
        state: Moments ``exp_avg`` and ``exp_avg_sq``, of that shape and dtype; ``step``, a float32 scalar that is
            counted up, on the device of the weight if ``fused``.
        group: ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        fused: Step by torch's fused kernel; its plain operators otherwise.
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


def pieces_of(x: Tensor) -> list[slice]:
    """Return the slices of a flat tensor that are stepped at a time."""
    size = PIECE.get(kernel_device(x.device), LARGE_PIECE)
    return [slice(start, min(start + size, len(x))) for start in range(0, len(x), size)]


def random_bits(count: int, device: torch.device, *key: int) -> Tensor:
    """Return ``[count]`` integers of 32 random bits, int32, on a device; ``key`` as for :func:`seeded`."""
    pairs = torch.empty(-(-count // 2), dtype=torch.int64, device=device)
    return pairs.random_(-(2**63), None, generator=seeded(device, *key)).view(torch.int32)[:count]


def seeded(device: torch.device, *key: int) -> torch.Generator | None:
    """Return a generator for numbers on a device; None on ``meta``, which has no values.

    ``key`` makes its seed: the run's seed, the step, the weight, the place in it.
    """
    if device.type == "meta":
        return None
    return torch.Generator(device).manual_seed(hash_of(*key) >> 1)


def hash_of(*key: int) -> int:
    """Return a hash of some numbers, of 64 bits, the same in every process."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def round_stochastically(x: Tensor, bits: Tensor, *, out: Tensor) -> None:
    """Round float32 to bfloat16, away from zero as often as the part that is cut off is large.

    ``E[out] = x`` over the random bits. Values that bfloat16 holds stay as they are, and so do infinities.

    The lower 16 bits of ``bits``, int32, are random. The memory of ``x`` is overwritten.
    """
    # bfloat16 is the upper half of float32. A random number below 2^16 carries into it with a probability of the lower
    # half / 2^16; sign and magnitude are apart, so both signs round alike.
    raw = x.view(torch.int32)
    raw.add_(bits & 0xFFFF).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(raw)
