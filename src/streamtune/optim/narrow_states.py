"""AdamW that stores its two moments in a dtype of their own: bfloat16, float32, or float8 with its range expanded.

With the moments m and v of a weight w, its gradient g, and step t, all in float32 but for what is stored:

    m = b1 m' + (1 - b1) g;   v = b2 v' + (1 - b2) g^2
    w <- (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    m' = round(m);   v' = round(v)

A step changes v by about a 1000th of it, and bfloat16 has 8 bits: the nearest number is mostly the old one, and v would
never change. Stochastic rounding has the right mean, ``E[round(x)] = x``. The weight is stepped by the moments before
they are rounded.

bfloat16 weights lose more than moments do: with a learning rate of 1e-5 most steps are smaller than half of the
distance between two numbers. With ``rounding: stochastic`` a bfloat16 weight is stepped in float32 as well and rounded
like the moments.

The random bits follow from the run's seed, the step, the weight and the place in it. A resumed run has the same, in
whatever order weights are stepped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from streamtune.ops.devices import turns
from streamtune.optim.weight_step import (
    ADAMW,
    EachWeight,
    adamw_step,
    numbers_of,
    pieces_of,
    random_bits,
    round_stochastically,
    saved_entries,
)

WEIGHT = 1
"""Marks the random bits of a weight, beside the bits of its moments."""

StatesDtype = Literal["param", "float32", "bfloat16"]
"""The dtype of an optimizer's states; ``param`` is the dtype of each weight."""

Rounding = Literal["nearest", "stochastic"]
"""Rounding of a bfloat16 weight after its step, which is computed in float32."""

MOMENTS = ("exp_avg", "exp_avg_sq")
OWN_KEYS = ("params", "states", "seed", "rounding")
"""Keys of a group that a state which is loaded leaves as they are."""


class NarrowStatesAdamW(EachWeight):
    """AdamW whose moments have another dtype than the weights.

    Args:
        params: Parameters, or groups of them.
        options: Options of AdamW, and:

            - ``states``: dtype of the moments: ``bfloat16`` is rounded stochastically. ``param`` is the weight's dtype.
            - ``rounding``: rounding of a bfloat16 weight after its step.
            - ``seed``: seed of the random bits.
            - ``fused``: step by torch's fused kernel; its plain operators otherwise.
    """

    DEFAULTS: ClassVar = {**ADAMW, "fused": True, "states": "bfloat16", "seed": 0, "rounding": "nearest"}

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self._number = numbers_of(self)
        self._workers: _PieceWorkers | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer or of torch's AdamW; moments get this optimizer's dtype. Its seed stays."""
        self.state.clear()
        for parameter, group, entry in saved_entries(self, state_dict):
            dtype = _states_dtype(parameter, group)
            self.state[parameter] = {
                "step": torch.as_tensor(entry["step"], dtype=torch.float32).detach().clone().cpu(),
                **{key: entry[key].detach().to(parameter.device, dtype, copy=True) for key in MOMENTS},
            }
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in other.items() if key not in OWN_KEYS})

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            dtype = _states_dtype(parameter, group)
            for key in MOMENTS:
                state[key] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        whole = parameter if parameter.is_contiguous() else parameter.contiguous()
        flat = [x.detach().view(-1) for x in (whole, grad.contiguous(), *(state[key] for key in MOMENTS))]
        step = _PieceStep(group, int(state["step"].item()), self._number[id(parameter)])
        pieces = pieces_of(flat[0])
        if len(pieces) > 1 and parameter.device.type == "cpu":
            self._workers = self._workers or _PieceWorkers()
            self._workers.map(lambda piece: step(piece, *(x[piece] for x in flat)), pieces)
        else:
            for piece in turns(pieces, parameter.device):
                step(piece, *(x[piece] for x in flat))
        if whole is not parameter:
            parameter.copy_(whole)
        state["step"] += 1


def _states_dtype(parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = parameter.dtype if group["states"] == "param" else getattr(torch, group["states"])
    return dtype


class _PieceStep:
    """A step of one weight, by pieces, after ``taken`` steps; ``number`` is the weight's index in the optimizer."""

    def __init__(self, group: dict[str, Any], taken: int, number: int) -> None:
        self.group, self.taken, self.number = group, taken, number

    def __call__(self, piece: slice, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
        """Step values ``piece`` of the flat weight, all ``[n]``; ``mean`` and ``square`` are the moments."""
        group, device = self.group, weight.device
        wide = weight if weight.dtype == torch.float32 else weight.float()
        moments = [x if x.dtype == torch.float32 else x.float() for x in (mean, square)]
        step = torch.full((), float(self.taken), device=device if group["fused"] else "cpu")
        state = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "step": step}
        adamw_step(wide, grad.float(), state, group, fused=group["fused"])
        key = (group["seed"], self.taken + 1, self.number, piece.start)
        if weight.dtype == torch.bfloat16 and group["rounding"] == "stochastic":
            round_stochastically(wide, random_bits(len(weight), device, *key, WEIGHT), out=weight)
        elif wide is not weight:
            weight.copy_(wide)
        if mean.dtype == torch.bfloat16:
            bits = random_bits(len(weight), device, *key)
            round_stochastically(moments[0], bits, out=mean)
            round_stochastically(moments[1], bits.bitwise_right_shift_(16), out=square)


class _PieceWorkers:
    """Threads that step pieces on the CPU, each with the kernels of one thread.

    A piece takes some twenty short kernels. Threads that share each of them would wait for one another as often, and
    random numbers are drawn by one thread in any case.
    """

    def __init__(self) -> None:
        count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="adamw") if count > 1 else None
        if self._pool is None:
            return
        # A thread takes the number of the moment when it first asks, and keeps it: all of them ask here.
        met = Barrier(count)
        torch.set_num_threads(1)
        try:
            list(self._pool.map(lambda _: (torch.get_num_threads(), met.wait()), range(count)))
        finally:
            torch.set_num_threads(count)

    def map(self, call: Callable[[slice], None], pieces: list[slice]) -> None:
        for _ in map(call, pieces) if self._pool is None else self._pool.map(call, pieces):
            pass


# --- float8 ----------------------------------------------------------------------------------------------------------

LARGEST, RANGE = 448.0, 448.0 / 2**-9
"""The largest number of float8 (e4m3), and its ratio to the smallest above 0."""
POWERS = (1 / 16, 16.0)
"""The smallest and the largest k: a group of equal values has none of its own."""
PARTS = ("codes", "largest", "power")


class ExpandedFp8AdamW(EachWeight):
    """AdamW whose moments are in float8 with their range expanded: COAT's (arXiv 2410.19313, section 4).

    Values of a moment that lie together have a far smaller range than float8 (e4m3) can have, so most of its codes are
    never used. For each group of ``group_size`` values x, with y = |x| / max |x|, the power of y is stored whose range
    is all of float8's:

        k = log(R) / log(1 / min y),   R = 448 / 2^-9, the largest over the smallest number above 0
        codes = float8(448 sign(x) y^k)          x = max |x| sign(codes) (|codes| / 448)^(1/k)

    The minimum is over values that are not 0, which stay 0. A step writes both moments out in float32 for one weight,
    steps it by AdamW, and packs them again. Bytes of a value: 1, and 8 for each group.
    """

    DEFAULTS: ClassVar = {**ADAMW, "group_size": 128}

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        weight = parameter if parameter.dtype == torch.float32 else parameter.float()
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            moments = [torch.zeros_like(weight) for _ in MOMENTS]
        else:
            moments = [_expanded(state, name, weight) for name in MOMENTS]
        adam = {**dict(zip(MOMENTS, moments, strict=True)), "step": state["step"]}
        adamw_step(weight, grad.to(weight.dtype), adam, group, fused=False)
        if weight is not parameter:
            parameter.copy_(weight)
        for name, moment in zip(MOMENTS, moments, strict=True):
            for part, value in zip(PARTS, pack_expanded(moment, group["group_size"]), strict=True):
                state[f"{name}_{part}"] = value


def _expanded(state: Mapping[str, Tensor], name: str, weight: Tensor) -> Tensor:
    """Return a moment in float32, in the shape of its weight."""
    codes, largest, power = (state[f"{name}_{part}"] for part in PARTS)
    return expand(codes, largest, power, weight.numel()).view_as(weight)


def pack_expanded(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[g, group_size]`` in float8, the largest magnitudes ``[g]`` and the powers ``[g]`` in float32.

    Zeros fill up the last group of ``x``, which is float32.
    """
    flat = x.flatten()
    groups = torch.nn.functional.pad(flat, (0, -len(flat) % group_size)).view(-1, group_size)
    size = groups.abs()
    largest = size.amax(1)
    part = size / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    least = torch.where(part > 0, part, 1.0).amin(1)
    power = (math.log(RANGE) / -least.log().clamp_max(-1e-6)).clamp_(*POWERS)
    codes = (LARGEST * part.pow_(power[:, None])).copysign_(groups)
    return codes.to(torch.float8_e4m3fn), largest, power


def expand(codes: Tensor, largest: Tensor, power: Tensor, count: int) -> Tensor:
    """Return the ``count`` values that were packed, in float32."""
    wide = codes.float()
    size = (wide.abs() / LARGEST).pow_((1 / power)[:, None]).mul_(largest[:, None])
    return size.copysign_(wide).flatten()[:count]
