"""Mamba-1's selective scan with an initial state; the scan of ``transformers`` has no such argument.

For each channel d and state n the scan is (Gu and Dao, Mamba, arXiv 2312.00752, eq. 2)

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t,    y_t = C_t h_t

``transformers`` and the kernel it calls start every scan from ``h_0 = 0``. This is right for a whole sequence and wrong
for a chunk. The scan is linear in h, so an initial state h_0 adds

    y_t += C_t exp(A S_t) h_0,    h_T += exp(A S_T) h_0,    S_t = sum_{s <= t} dt_s

to the result of the scan. The scans of Mamba-2 and of the delta rule take an initial state as an argument.

Shape suffixes: B batch, D channels, T tokens, N states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamtune.engine.cache import ChunkCache
from streamtune.engine.hf_names import SCAN
from streamtune.engine.observe import restore_forward


def stateless_scan_mixers(layer: nn.Module) -> list[nn.Module]:
    """Return a layer's modules whose forward calls Mamba-1's selective scan, which takes no initial state."""
    return [module for module in layer.modules() if SCAN in names_in_forward(type(module))]


def names_in_forward(module_class: type[nn.Module]) -> tuple[str, ...]:
    """Return the global names and attributes that the code of a module class's forward uses."""
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return () if code is None else code.co_names


@contextmanager
def scans_from_state(mixers: list[nn.Module], cache: ChunkCache) -> Iterator[None]:
    """Let the selective scans of ``mixers`` start from the state in ``cache`` in the ``with`` block.

    ``transformers`` is not changed: each mixer gets a copy of its class's forward in which the name of the scan refers
    to another function.
    """
    if not mixers or not cache.has_previous_state():
        yield
        return
    before = [mixer.__dict__.get("forward") for mixer in mixers]
    try:
        for mixer in mixers:
            forward = inspect.unwrap(type(mixer).forward)
            scan = _ScanFromState(forward.__globals__[SCAN], cache, mixer.layer_idx)  # type: ignore[arg-type]
            rebound = FunctionType(
                forward.__code__, {**forward.__globals__, SCAN: scan}, argdefs=forward.__defaults__, closure=None
            )
            rebound.__kwdefaults__ = forward.__kwdefaults__
            mixer.forward = rebound.__get__(mixer)
        yield
    finally:
        for mixer, forward in zip(mixers, before, strict=True):
            restore_forward(mixer, forward)


class _ScanFromState:
    """A mixer's selective scan, started from the cached state. If heads are scanned one by one, call n is head n."""

    def __init__(self, scan: Callable[..., Any], cache: ChunkCache, layer_idx: int) -> None:
        self.scan, self.cache, self.layer_idx = scan, cache, layer_idx
        self.calls = 0

    def __call__(self, x_BDT: Tensor, dt_BDT: Tensor, A_DN: Tensor, B_BNT: Tensor, C_BNT: Tensor, **kwargs: Any) -> Any:
        state = self.cache.get_recurrent_state(self.layer_idx)
        assert state is not None
        state_BDN = state[:, self.calls] if state.dim() == 4 else state
        self.calls += 1
        result = self.scan(x_BDT, dt_BDT, A_DN, B_BNT, C_BNT, **kwargs)
        y_BDT, last_BDN = result if kwargs.get("return_last_state") else (result, None)
        bias_D = kwargs.get("delta_bias")
        if bias_D is not None:
            dt_BDT = dt_BDT + bias_D.to(dt_BDT.dtype)[:, None]
        if kwargs.get("delta_softplus"):
            dt_BDT = nn.functional.softplus(dt_BDT)
        added_BDT, carried_BDN = initial_state_terms(state_BDN, dt_BDT, A_DN, C_BNT)
        if (z_BDT := kwargs.get("z")) is not None:
            added_BDT = added_BDT * nn.functional.silu(z_BDT)
        y_BDT = (y_BDT + added_BDT).to(y_BDT.dtype)
        return y_BDT if last_BDN is None else (y_BDT, last_BDN + carried_BDN)


def initial_state_terms(state_BDN: Tensor, dt_BDT: Tensor, A_DN: Tensor, C_BNT: Tensor) -> tuple[Tensor, Tensor]:
    """Return what an initial state adds to a selective scan's output ``[B, D, T]`` and last state ``[B, D, N]``.

    Equal to ``y_t += C_t exp(A S_t) h_0`` and ``h_T += exp(A S_T) h_0``. The decay ``exp(A S)`` ``[B, D, T, N]`` is
    never built: forward and backward compute it for one of the N states at a time.

    Args:
        state_BDN: Initial state h_0.
        dt_BDT: Step sizes, after bias and softplus.
        A_DN: Decay rates A.
        C_BNT: Output coefficients C_t.
    """
    S_BDT = dt_BDT.to(A_DN.dtype).cumsum(-1)

    def read_out(n: int, S_BDT: Tensor, A_DN: Tensor, C_BNT: Tensor, state_BDN: Tensor) -> Tensor:
        return (A_DN[:, n, None] * S_BDT).exp() * state_BDN[:, :, n, None] * C_BNT[:, n, None]

    added_BDT = torch.zeros_like(S_BDT)
    for n in range(A_DN.shape[1]):
        added_BDT = added_BDT + checkpoint(
            read_out, n, S_BDT, A_DN, C_BNT, state_BDN, use_reentrant=False, preserve_rng_state=False
        )
    return added_BDT, (A_DN * S_BDT[:, :, -1:]).exp() * state_BDN
