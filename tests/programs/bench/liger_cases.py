"""Steps of the modes with Liger's kernels on the CPU.

``TRITON_INTERPRET=1 python -m tests.programs.bench.liger_cases`` runs them.
Triton reads the variable when a kernel is defined. Prints a JSON document.
"""

from __future__ import annotations

import json
import sys

import torch

from streamtune import Schedule
from streamtune.programs.bench.modes import MODE_SETUPS
from tests import triton_kit
from tests.exactness.families import build
from tests.programs.bench.test_peers import held, step


def main() -> None:
    triton_kit.complete()
    model = build("llama", max_position_embeddings=512).train()
    file = sys.modules[type(model).__module__]
    own, before = vars(file)["apply_rotary_pos_emb"], held(model)
    plain = step(model)
    found: dict[str, object] = {}
    for mode in ("liger-loss", "liger"):
        with MODE_SETUPS[mode].prepare(model, Schedule()) as ready:
            found["replaced"] = vars(file)["apply_rotary_pos_emb"] is not own
            loss, gradients = step(model, ready.loss)
        after = held(model)
        worst = max(float(torch.dist(gradients[name], g) / g.norm()) for name, g in plain[1].items())
        left = sorted(key for key in before.keys() | after.keys() if before.get(key) is not after.get(key))
        left = [key for key in left if before.get(key) != after.get(key)]
        found[mode] = {"loss": abs(loss / plain[0] - 1), "gradient": worst, "left": left}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
