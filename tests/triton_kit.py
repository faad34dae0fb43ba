"""What Triton's interpreter lacks for kernels that pass numbers and call functions of CUDA's library."""

from __future__ import annotations

import importlib

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._implicit_cvt


def converted(argument: object) -> object:
    """Make a tensor of a float, as the compiler does."""
    if isinstance(argument, float):
        held = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(held, tl.float32)
    return convert(argument)


def complete() -> None:
    """Let the interpreter run Liger's kernels."""
    interpreter._implicit_cvt = converted
    norms = importlib.import_module("liger_kernel.ops.rms_norm")
    norms.rsqrt = lambda value: tl.rsqrt(value)  # looked up at the call: the interpreter replaces it for a kernel
