"""AdamW that stores its two moments in a dtype of their own: bfloat16, rounded stochastically, or float32.

With the moments m and v of a weight w, its gradient g, and step t, all in float32 but for what is stored:

    m = b1 m' + (1 - b1) g;   v = b2 v' + (1 - b2) g^2
    w <- (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    m' = round(m);   v' = round(v)

A step changes v by about a 1000th of it, and bfloat16 has 8 bits: the nearest number is mostly the one that was there,
and v would never change. Rounding up as often as what is cut off is large has the right mean, ``E[round(x)] = x``. The
weight is stepped by the moments before they are rounded.

bfloat16 weights lose more than moments do: with a learning rate of 1e-5 most steps are smaller than half of the
distance between two numbers. With ``rounding: stochastic`` a bfloat16 weight is stepped in float32 as well and rounded
like the moments.

The random bits are those of the run's seed, the step, the weight and the place in it. A resumed run has the same, in
whatever order weights are stepped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from streamtune.ops.simulated import kernel_device, turns

WEIGHT = 1
"""Marks the random bits of a weight, beside the bits of its moments."""

StatesDtype = Literal["param", "float32", "bfloat16"]
"""The dtype of an optimizer's states; ``param`` is that of each weight."""

Rounding = Literal["nearest", "stochastic"]
"""Rounding of a bfloat16 weight after its step, which is computed in float32."""

PIECE = {"cpu": 1 << 17}
"""Values that are stepped at a time: temporaries in float32 stay in a processor's cache."""

LARGE_PIECE = 1 << 22
"""The same elsewhere, where each piece costs the start of a few kernels."""

KEYS = ("exp_avg", "exp_avg_sq")
OWN_KEYS = ("params", "states", "seed", "rounding")
"""Keys of a group that a state which is loaded leaves as they are."""


class NarrowStatesAdamW(torch.optim.Optimizer):
    """AdamW whose moments have another dtype than the weights.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate.
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        states: The dtype of the moments: ``bfloat16`` is rounded stochastically. ``param`` is the weight's dtype.
        seed: Of the random bits.
        rounding: How a bfloat16 weight is rounded after its step.
        fused: Step by torch's fused kernel; its plain operators otherwise.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        states: StatesDtype = "bfloat16",
        seed: int = 0,
        fused: bool = True,
        rounding: Rounding = "nearest",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused}
        super().__init__(params, {**defaults, "states": states, "seed": seed, "rounding": rounding})
        # Counted once: an optimizer in the backward empties the groups but for the weight that it steps.
        every = (parameter for group in self.param_groups for parameter in group["params"])
        self._number = {id(parameter): number for number, parameter in enumerate(every)}
        self._workers: _PieceWorkers | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; moments are cast to this optimizer's dtype, and not to that of the weights. Its seed stays.

        Args:
            state_dict: As ``state_dict`` returns it, of this optimizer or of torch's AdamW.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        self.state.clear()
        for number, (parameter, group) in zip(saved, own, strict=True):
            entry = state_dict["state"].get(number)
            if not entry:
                continue
            dtype = _dtype_of_states(parameter, group)
            self.state[parameter] = {
                "step": torch.as_tensor(entry["step"], dtype=torch.float32).detach().clone().cpu(),
                **{key: entry[key].detach().to(parameter.device, dtype, copy=True) for key in KEYS},
            }
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in other.items() if key not in OWN_KEYS})

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in KEYS:
                dtype = _dtype_of_states(parameter, group)
                state[key] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        grad = parameter.grad
        assert grad is not None
        whole = parameter if parameter.is_contiguous() else parameter.contiguous()
        flat = [x.detach().view(-1) for x in (whole, grad.contiguous(), *(state[key] for key in KEYS))]
        of = _StepOfWeight(group, int(state["step"].item()), self._number[id(parameter)])
        pieces = pieces_of(flat[0])
        if self._workers is None and len(pieces) > 1 and parameter.device.type == "cpu":
            self._workers = _PieceWorkers()
        if self._workers is not None and len(pieces) > 1 and parameter.device.type == "cpu":
            self._workers.map(lambda piece: of.step(piece, *(x[piece] for x in flat)), pieces)
        else:
            for piece in turns(pieces, parameter.device):
                of.step(piece, *(x[piece] for x in flat))
        if whole is not parameter:
            parameter.copy_(whole)
        state["step"] += 1


def _dtype_of_states(parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a weight's moments."""
    dtype: torch.dtype = parameter.dtype if group["states"] == "param" else getattr(torch, group["states"])
    return dtype


class _StepOfWeight:
    """A step of one weight, by pieces.

    Args:
        group: The options of the weight.
        taken: Steps that were taken.
        number: The place of the weight among those of the optimizer.
    """

    def __init__(self, group: dict[str, Any], taken: int, number: int) -> None:
        self.group, self.taken, self.number = group, taken, number

    def step(self, piece: slice, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
        """Step values ``piece`` of the flat weight, all [n]; ``mean`` and ``square`` are the moments."""
        group, device = self.group, weight.device
        wide = weight if weight.dtype == torch.float32 else weight.float()
        moments = [x if x.dtype == torch.float32 else x.float() for x in (mean, square)]
        step = torch.full((), float(self.taken), device=device if group["fused"] else "cpu")
        state = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "step": step}
        adamw_step(wide, grad.float(), state, group, fused=group["fused"])
        place = (group["seed"], self.taken + 1, self.number, piece.start)
        if weight.dtype == torch.bfloat16 and group["rounding"] == "stochastic":
            round_stochastically(wide, random_bits(len(weight), device, *place, WEIGHT), out=weight)
        elif wide is not weight:
            weight.copy_(wide)
        if mean.dtype == torch.bfloat16:
            bits = random_bits(len(weight), device, *place)
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
        """Call a function of each piece."""
        for _ in map(call, pieces) if self._pool is None else self._pool.map(call, pieces):
            pass


def pieces_of(x: Tensor) -> list[slice]:
    """Return the slices of a flat tensor that are stepped at a time."""
    size = PIECE.get(kernel_device(x.device), LARGE_PIECE)
    return [slice(start, min(start + size, len(x))) for start in range(0, len(x), size)]


def random_bits(count: int, device: torch.device, *of: int) -> Tensor:
    """Return [count] integers of 32 random bits, int32.

    Args:
        count: Their number.
        device: Their device.
        of: What they are drawn for: the run's seed, the step, the weight, the place in it.
    """
    pairs = torch.empty(-(-count // 2), dtype=torch.int64, device=device)
    return pairs.random_(-(2**63), None, generator=seeded(device, *of)).view(torch.int32)[:count]


def seeded(device: torch.device, *of: int) -> torch.Generator | None:
    """Return a generator for numbers on a device; None on ``meta``, which has no values.

    Args:
        device: The device.
        of: What is drawn for: the run's seed, the step, the weight, the place in it.
    """
    if device.type == "meta":
        return None
    digest = hashlib.blake2b(" ".join(map(str, of)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def round_stochastically(x: Tensor, bits: Tensor, *, out: Tensor) -> None:
    """Round float32 to bfloat16, away from zero as often as the part that is cut off is large.

    ``E[out] = x`` over the random bits. What bfloat16 holds stays as it is, and so do infinities.

    Args:
        x: [n] float32; its memory is used and overwritten.
        bits: [n] int32, of which the lower 16 bits are random.
        out: [n] bfloat16.
    """
    # bfloat16 is the upper half of float32. A random number below 2^16 carries into it with a probability of the lower
    # half / 2^16; sign and magnitude are apart, so both signs round alike.
    raw = x.view(torch.int32)
    raw.add_(bits & 0xFFFF).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(raw)


def adamw_step(
    weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], *, fused: bool
) -> None:
    """Step a weight and its moments in place, by torch's own function.

    Args:
        weight, grad: Of one shape and dtype.
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
