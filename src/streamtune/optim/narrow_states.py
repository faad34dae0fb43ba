"""AdamW whose moments have their own dtype: bfloat16, float32, or float8 with an expanded range.

For a weight w with moments m and v, gradient g and step t. Only the stored m' and v' are not in float32:

    m = b1 m' + (1 - b1) g;   v = b2 v' + (1 - b2) g^2
    w <- (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    m' = round(m);   v' = round(v)

A step changes v by about 1/1000, and bfloat16 has 8 bits of precision: the nearest number is mostly the old value, so v
would never change. Stochastic rounding is unbiased, ``E[round(x)] = x``. The weight is updated with the unrounded
moments.

bfloat16 weights lose more than moments do: with a learning rate of 1e-5 most updates are below half the distance of two
bfloat16 numbers. With ``rounding: stochastic``, a bfloat16 weight is also updated in float32 and rounded
stochastically.

The random bits depend only on the run's seed, the step, the weight and the position in it. A resumed run draws the same
bits, in whatever order weights are updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from streamtune.ops.devices import loop_or_simulate
from streamtune.optim.weight_step import (
    ADAMW,
    PerWeightOptimizer,
    adamw_step,
    flat_slices,
    parameter_indices,
    random_bits,
    round_stochastically,
    saved_states,
)

WEIGHT_BITS = 1
"""Last number of the key for the random bits of a weight; the key for the bits of its moments lacks this number."""

StatesDtype = Literal["param", "float32", "bfloat16"]
"""Dtype of an optimizer's states; ``param`` is the dtype of each weight."""

Rounding = Literal["nearest", "stochastic"]
"""Rounding of a bfloat16 weight after its step, which is computed in float32."""

MOMENTS = ("exp_avg", "exp_avg_sq")
OWN_KEYS = ("params", "states", "seed", "rounding")
"""Keys of a group that ``load_state_dict`` does not change."""


class NarrowStatesAdamW(PerWeightOptimizer):
    """AdamW whose moments have another dtype than the weights.

    Args:
        params: Parameters, or groups of them.
        options: Options of AdamW, and:

            - ``states``: dtype of the moments. ``bfloat16`` is rounded stochastically; ``param`` is the weight's dtype.
            - ``rounding``: rounding of a bfloat16 weight after its step.
            - ``seed``: seed of the random bits.
            - ``fused``: True for torch's fused kernel, False for plain operators.
    """

    DEFAULTS: ClassVar = {**ADAMW, "fused": True, "states": "bfloat16", "seed": 0, "rounding": "nearest"}

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self._weight_number = parameter_indices(self)
        self._workers: _SliceWorkers | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer or of torch's AdamW. Moments are cast to the dtype set in ``states``.

        The options in ``OWN_KEYS``, such as the seed, do not change.
        """
        self.state.clear()
        for parameter, group, entry in saved_states(self, state_dict):
            dtype = _moments_dtype(parameter, group)
            self.state[parameter] = {
                "step": torch.as_tensor(entry["step"], dtype=torch.float32).detach().clone().cpu(),
                **{key: entry[key].detach().to(parameter.device, dtype, copy=True) for key in MOMENTS},
            }
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in other.items() if key not in OWN_KEYS})

    def _step_weight(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            dtype = _moments_dtype(parameter, group)
            for key in MOMENTS:
                state[key] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        whole = parameter if parameter.is_contiguous() else parameter.contiguous()
        flat = [x.detach().view(-1) for x in (whole, grad.contiguous(), *(state[key] for key in MOMENTS))]
        step = _SliceStep(group, int(state["step"].item()), self._weight_number[id(parameter)])
        slices = flat_slices(flat[0])
        if len(slices) > 1 and parameter.device.type == "cpu":
            self._workers = self._workers or _SliceWorkers()
            self._workers.run_on_slices(lambda span: step(span, *(x[span] for x in flat)), slices)
        else:
            for span in loop_or_simulate(slices, parameter.device):
                step(span, *(x[span] for x in flat))
        if whole is not parameter:
            parameter.copy_(whole)
        state["step"] += 1


def _moments_dtype(parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = parameter.dtype if group["states"] == "param" else getattr(torch, group["states"])
    return dtype


class _SliceStep:
    """AdamW update of one weight, slice by slice, after ``steps_taken`` earlier updates of the weight."""

    def __init__(self, group: dict[str, Any], steps_taken: int, weight_number: int) -> None:
        self.group, self.steps_taken, self.weight_number = group, steps_taken, weight_number

    def __call__(self, span: slice, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
        """Update the slice ``span`` of a flat weight. All tensors are ``[n]``; ``mean`` and ``square`` are moments."""
        group, device = self.group, weight.device
        wide = weight if weight.dtype == torch.float32 else weight.float()
        moments = [x if x.dtype == torch.float32 else x.float() for x in (mean, square)]
        step = torch.full((), float(self.steps_taken), device=device if group["fused"] else "cpu")
        state = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "step": step}
        adamw_step(wide, grad.float(), state, group, fused=group["fused"])
        key = (group["seed"], self.steps_taken + 1, self.weight_number, span.start)
        if weight.dtype == torch.bfloat16 and group["rounding"] == "stochastic":
            round_stochastically(wide, random_bits(len(weight), device, *key, WEIGHT_BITS), out=weight)
        elif wide is not weight:
            weight.copy_(wide)
        if mean.dtype == torch.bfloat16:
            bits = random_bits(len(weight), device, *key)
            round_stochastically(moments[0], bits, out=mean)
            round_stochastically(moments[1], bits.bitwise_right_shift_(16), out=square)


class _SliceWorkers:
    """Threads that update slices of a weight on the CPU; kernels inside a thread are single-threaded.

    A slice needs about twenty short kernels. Threads that share a kernel would synchronise at each kernel, and random
    numbers are drawn by a single thread in any case.
    """

    def __init__(self) -> None:
        count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="adamw") if count > 1 else None
        if self._pool is None:
            return
        # A thread reads torch's number of threads at its first call and caches the number: all workers call here.
        met = Barrier(count)
        torch.set_num_threads(1)
        try:
            list(self._pool.map(lambda _: (torch.get_num_threads(), met.wait()), range(count)))
        finally:
            torch.set_num_threads(count)

    def run_on_slices(self, step_slice: Callable[[slice], None], slices: list[slice]) -> None:
        for _ in map(step_slice, slices) if self._pool is None else self._pool.map(step_slice, slices):
            pass


# --- float8 ----------------------------------------------------------------------------------------------------------

LARGEST, RANGE = 448.0, 448.0 / 2**-9
"""Largest number of float8 (e4m3), and the ratio of the largest to the smallest positive number."""
POWERS = (1 / 16, 16.0)
"""Bounds of k, needed because a group of equal values does not determine k."""
PARTS = ("codes", "largest", "power")


class ExpandedFp8AdamW(PerWeightOptimizer):
    """AdamW with moments in float8 whose range is expanded, as in COAT (arXiv 2410.19313, section 4).

    Neighbouring values of a moment span a far smaller range than float8 (e4m3), so most codes would not be used. For
    each group of ``group_size`` values x, with y = |x| / max |x|, the power y^k that spans the whole range is stored:

        k = log(R) / log(1 / min y),   R = 448 / 2^-9, the largest over the smallest positive number
        codes = float8(448 sign(x) y^k)          x = max |x| sign(codes) (|codes| / 448)^(1/k)

    The minimum is over nonzero values; zeros stay 0. A step expands both moments of one weight to float32, updates the
    weight by AdamW, and packs the moments again. They take 1 byte per value and 8 per group.
    """

    DEFAULTS: ClassVar = {**ADAMW, "group_size": 128}

    def _step_weight(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        weight = parameter if parameter.dtype == torch.float32 else parameter.float()
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            moments = [torch.zeros_like(weight) for _ in MOMENTS]
        else:
            moments = [_expand_moment(state, name, weight) for name in MOMENTS]
        adam = {**dict(zip(MOMENTS, moments, strict=True)), "step": state["step"]}
        adamw_step(weight, grad.to(weight.dtype), adam, group, fused=False)
        if weight is not parameter:
            parameter.copy_(weight)
        for name, moment in zip(MOMENTS, moments, strict=True):
            for part, value in zip(PARTS, pack_moment(moment, group["group_size"]), strict=True):
                state[f"{name}_{part}"] = value


def _expand_moment(state: Mapping[str, Tensor], name: str, weight: Tensor) -> Tensor:
    codes, largest, power = (state[f"{name}_{part}"] for part in PARTS)
    return unpack_moment(codes, largest, power, weight.numel()).view_as(weight)


def pack_moment(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[g, group_size]`` in float8, the largest magnitudes ``[g]`` and the powers ``[g]`` in float32.

    ``x`` is float32; zeros pad its last group.
    """
    flat = x.flatten()
    groups = torch.nn.functional.pad(flat, (0, -len(flat) % group_size)).view(-1, group_size)
    magnitude = groups.abs()
    largest = magnitude.amax(1)
    fraction = magnitude / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    smallest_fraction = torch.where(fraction > 0, fraction, 1.0).amin(1)
    power = (math.log(RANGE) / -smallest_fraction.log().clamp_max(-1e-6)).clamp_(*POWERS)
    codes = (LARGEST * fraction.pow_(power[:, None])).copysign_(groups)
    return codes.to(torch.float8_e4m3fn), largest, power


def unpack_moment(codes: Tensor, largest: Tensor, power: Tensor, value_count: int) -> Tensor:
    """Return the ``value_count`` values that :func:`pack_moment` packed, flat, in float32."""
    wide_codes = codes.float()
    magnitude = (wide_codes.abs() / LARGEST).pow_((1 / power)[:, None]).mul_(largest[:, None])
    return magnitude.copysign_(wide_codes).flatten()[:value_count]
