"""Liger's kernels on the CPU: its head against the streamed sweep, its norm, rotation and gate against our formulas.

Triton's interpreter runs them as Python.

Run as a module with TRITON_INTERPRET=1, which Triton reads when a kernel is defined. Prints a JSON document.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from streamtune.ops import fused, gate
from streamtune.ops.head import cross_entropy as module
from streamtune.ops.head.kernels import agrees_with_loop, head_candidates
from tests import triton_kit

TOKENS, VOCAB, HIDDEN = 24, 71, 16
EPS = 1e-5


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    [liger] = [kernel for kernel in head_candidates() if kernel.name == "liger"]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        h, w = hidden.to(dtype), weight.to(dtype)
        for wanted in ((True, True), (True, False)):
            sweep = partial(module._chunk_loss_and_grads, h, w, targets, wanted)
            found[f"{dtype} {wanted}"] = [
                agrees_with_loop(liger, h, w, targets, wanted, sweep),
                agrees_with_loop(liger, h, 1.05 * w, targets, wanted, sweep),
            ]
    print(json.dumps({"head": found, "layers": layers(generator)}))


def layers(generator: torch.Generator) -> dict[str, list[float]]:
    """The distances of values and gradients of Liger's kernels to those of the formulas, relative."""
    triton_kit.complete()
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x_NC, weight_C = normal(5, 48), normal(48)
    gate_NC, up_NC = normal(5, 40), normal(5, 40)
    q_BHTD, k_BHTD, angles = normal(2, 4, 6, 16), normal(2, 2, 6, 16), normal(1, 6, 8)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))

    def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(fused.apply_rotary(x, cos[:, None], sin[:, None]) for x in (q, k))

    def norm(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", True),)

    assert gate.is_gate_kernel_correct(torch.device("cpu"), torch.float32)
    return {
        "norm": distances(norm, lambda x, w: (fused.rms_norm(x, w, EPS),), x_NC, weight_C),
        "rotation": distances(lambda q, k: liger_rotary_pos_emb(q, k, cos, sin), rotated, q_BHTD, k_BHTD),
        "gate": distances(
            lambda g, u: (LigerSiLUMulFunction.apply(g, u, 1.0, 1.0),), lambda g, u: (silu(g) * u,), gate_NC, up_NC
        ),
        "streamed gate": distances(lambda g, u: (gate.silu_mul(g, u),), lambda g, u: (silu(g) * u,), gate_NC, up_NC),
    }


def distances(theirs: Any, ours: Any, *given: Tensor) -> list[float]:
    """The relative distance of every output, and of the gradient of every input."""
    found = []
    for function in (theirs, ours):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        outputs = function(*(tensor * 1 for tensor in inputs))
        total = sum((out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum() for out in outputs)
        values = [out.detach().clone() for out in outputs]
        found.append([*values, *torch.autograd.grad(total, inputs)])
    return [float(torch.dist(a, b) / b.norm()) for a, b in zip(*found, strict=True)]


if __name__ == "__main__":
    main()
