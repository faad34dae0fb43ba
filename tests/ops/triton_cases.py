"""Heads written in Triton against the streamed sweep, on the CPU: Triton's interpreter runs their kernels as Python.

Run as a module with TRITON_INTERPRET=1, which Triton reads when a kernel is defined. Prints a JSON document.
"""

from __future__ import annotations

import json
from functools import partial

import torch

from streamtune.ops.head import cross_entropy as module
from streamtune.ops.head.kernels import agrees_with_sweep, head_candidates

TOKENS, VOCAB, HIDDEN = 24, 71, 16


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
            sweep = partial(module._sweep, h, w, targets, wanted)
            found[f"{dtype} {wanted}"] = [
                agrees_with_sweep(liger, h, w, targets, wanted, sweep),
                agrees_with_sweep(liger, h, 1.05 * w, targets, wanted, sweep),
            ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
