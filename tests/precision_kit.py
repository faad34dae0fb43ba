"""Precision, measured three ways: the truth in fp64, plain torch in the tested dtype, ours in the tested dtype.

The rule, for the loss, for the whole gradient and for the gradient of every parameter:

    error(ours, truth) <= 1.1 * error(plain, truth) * (1 + 3 / sqrt(n)) + ROUNDING         n: the number of its entries

where a parameter's error(plain, truth) is the largest of any parameter of the model.

A bare bound in fp32 says how one BLAS rounds. Another one, or another alignment of memory, adds in another order and is
above it where a gradient is a small sum of large terms: the weight of a query or key norm, the skip of a state space,
an objective that subtracts sums of log-probabilities. Plain torch rounds the same sums: its own error says how much.

Both errors are chance. The norm of n roundings varies by 1 / sqrt(2 n) of itself, the quotient of two by 1 / sqrt(n):
1.1 is a bound for a matrix, not for a single draw of four numbers, and torch's own draw may be a lucky one: hence the
largest of all parameters. The whole gradient has so many entries that 1.1 is all. Measured over ten draws of rows, root
mean square of ours over torch's: 0.97 to 1.05 for all parameters of mamba2, gemma3 and gemma4, 0.83 to 1.20 for each of
their noisiest; 1.08 to 1.29 for the adapters of llama with few targets, up to 1.49 for one. A single draw of ours was 5
times torch's.

In fp64 there is nothing to explain: what is computed there throughout (:class:`Float64`) is compared by EXACT.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

FACTOR = 1.1
ROUNDING = 2.0**-18
"""3.8e-6, 32 epsilon of fp32, for where plain torch's error happens to be next to nothing; half of it for the whole
gradient. Ours adds over chunks and blocks what torch adds at once: n partial sums, each rounded by half an epsilon, are
off by about sqrt(n) / 2 of them. The largest tests add 37 chunks of three rows, 5 epsilon of the terms, which are up to
ten times as large as a sum that cancels. Measured: at most 2.5e-6 is needed (adapters of a key projection)."""
EXACT = 1e-12
"""Relative error in fp64: the largest measured is 1e-14."""

Gradients = Mapping[str, Tensor]
Found = tuple[Tensor | float, Gradients]


class Float64(TorchDispatchMode):
    """Compute in fp64 what models compute in fp32 whatever their weights are: norms, rotations, softmax, states.

    The streamed backward computes layers again below autograd, where only a mode of the dispatcher reaches.
    """

    def __enter__(self) -> Float64:
        self.narrow = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.narrow)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bitsandbytes":  # its kernels have no fp64, and would leave the result unwritten
            return func(*args, **(kwargs or {}))
        wide = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
        return func(*(torch.float64 if x is torch.float32 else x for x in args), **wide)


def errors(got: Gradients, want: Gradients) -> dict[str, float]:
    """Relative error per parameter, the denominator never below a thousandth of the whole gradient's norm."""
    assert got.keys() == want.keys()
    whole = torch.stack([g.double().norm() for g in want.values()]).norm()
    assert whole > 0
    return {
        name: float((got[name].double() - g.double()).norm() / torch.maximum(g.double().norm(), 1e-3 * whole))
        for name, g in want.items()
    }


def relative(got: Tensor, want: Tensor) -> float:
    """``||got - want|| / ||want||`` in fp64."""
    assert got.shape == want.shape
    return float(
        (got.detach().double() - want.detach().double()).norm() / want.detach().double().norm().clamp_min(1e-30)
    )


class Errors(NamedTuple):
    """Errors of ours and of plain torch in one quantity of ``entries`` numbers."""

    ours: float
    plain: float
    entries: int

    @property
    def excess(self) -> float:
        """By how much ours is above what plain torch's explains; what is no number is as far off as can be."""
        if math.isnan(self.ours):
            return math.inf
        return self.ours - FACTOR * (1 + 3 / math.sqrt(self.entries)) * self.plain

    def __str__(self) -> str:
        return f"off by {self.ours:.2e}, plain torch by {self.plain:.2e}"


def assert_as_precise(got: Tensor, plain: Tensor, truth: Tensor, what: Any = "", constant: float = ROUNDING) -> None:
    """Assert the rule for one tensor, by the relative norm of its error."""
    found = Errors(relative(got, truth), relative(plain, truth), truth.numel())
    assert found.excess <= constant, f"{what}: {found}"


def total_error(got: Gradients, truth: Gradients) -> float:
    """Return the relative error of the whole gradient."""
    difference = torch.stack([(got[name].double() - g).norm() for name, g in truth.items()]).norm()
    return float(difference / torch.stack([g.norm() for g in truth.values()]).norm())


def excesses(pairs: Mapping[str, Errors], constant: float = ROUNDING) -> dict[str, Errors]:
    """Return the errors that break the rule."""
    return {
        name: pair for name, pair in pairs.items() if not pair.excess <= constant / (1 + (name == "whole gradient"))
    }


def mean_errors(draws: Sequence[Mapping[str, Errors]]) -> dict[str, Errors]:
    """Return the mean errors over several batches of one model, for where rounding grows and one batch says little."""
    count = len(draws)
    return {
        name: Errors(
            sum(pairs[name].ours for pairs in draws) / count,
            sum(pairs[name].plain for pairs in draws) / count,
            pair.entries,
        )
        for name, pair in draws[0].items()
    }


def told(wrong: Mapping[str, Errors]) -> str:
    """Return errors, a line each."""
    return "\n".join(f"{name}: {pair}" for name, pair in wrong.items())


@dataclass(frozen=True)
class Reference:
    """Loss and gradients of plain autograd: in fp64, and in the dtype that is tested."""

    truth: Found
    plain: Found

    def compare(self, found: Found) -> dict[str, Errors]:
        """Return the errors of ours and of plain torch: of the loss, the whole gradient, and every parameter's."""
        loss, plain, want = (float(torch.as_tensor(x[0]).detach()) for x in (found, self.plain, self.truth))
        size, grads = abs(want) or 1.0, self.truth[1]
        pairs = {"loss": Errors(abs(loss - want) / size, abs(plain - want) / size, 1)}
        if grads:
            ours, own = errors(found[1], grads), errors(self.plain[1], grads)
            whole = total_error(found[1], grads), total_error(self.plain[1], grads)
            pairs["whole gradient"] = Errors(*whole, sum(g.numel() for g in grads.values()))
            pairs |= {name: Errors(ours[name], max(own.values()), g.numel()) for name, g in grads.items()}
        return pairs

    def check(self, found: Found, what: Any = "", constant: float = ROUNDING) -> float:
        """Assert the rule.

        Args:
            found: Our loss and gradients.
            what: Stands in the message of a failure.
            constant: In place of ROUNDING; EXACT where all is computed in fp64.

        Returns:
            The largest of our errors of a parameter's gradient, for tables.
        """
        pairs = self.compare(found)
        wrong = excesses(pairs, constant)
        assert not wrong, f"{what}\n" + told(wrong)
        return max((pair.ours for name, pair in pairs.items() if name in self.truth[1]), default=0.0)


def in_float64(model: nn.Module) -> Any:
    """Return a copy of a model in fp64; experts are computed one by one there, the grouped product has no fp64."""
    wide: Any = copy.deepcopy(model)
    for module in wide.modules():
        if getattr(module, "_can_set_experts_implementation", None) and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
    return wide.double()


def widened(inputs: Any) -> Any:
    """Return inputs with every floating tensor in fp64."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return inputs.detach().double().requires_grad_(inputs.requires_grad)
    return {key: widened(value) for key, value in inputs.items()} if isinstance(inputs, dict) else inputs


def reference_of(
    model: nn.Module, compute: Callable[[Any], Found], truth: Callable[[Any], Found] | None = None
) -> Reference:
    """Compute loss and gradients of an unstreamed model, plain and in fp64.

    Args:
        compute: Loss and gradients of the model it is given.
        truth: The same for the copy in fp64, where other inputs are needed.
    """
    with Float64():
        wide = (truth or compute)(in_float64(model))
    assert all(grad.dtype == torch.float64 for grad in wide[1].values())
    return Reference(wide, compute(model))
