"""Compute gradients on the claimed device: ``python -m tests.cuda_host.claimed_steps``, cases on stdin.

Prints one JSON document: for each case and schedule how precise the gradients are, and what ran on the device.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from typing import Any

import torch

import streamtune
from streamtune import Schedule
from streamtune.engine import fused
from streamtune.ops.attention import kernels, view_kernels
from tests.cuda_host import claimed
from tests.exactness.families import batch, build, gradients
from tests.exactness.test_packing import alone, packed, rows
from tests.precision_kit import ROUNDING, Reference, reference_of


def decide_without_times() -> None:
    """Make the choices that take times: there are none on this device."""
    kernels.median_seconds = lambda *_: 1.0
    view_kernels._is_band_faster = lambda *_: True
    fused.PLAIN_TYPES = (*fused.PLAIN_TYPES, claimed.Claimed)  # type: ignore[assignment]


def reference(model: Any, kind: str) -> tuple[Reference, dict[str, Any]]:
    """Return loss and gradients by plain autograd on the CPU, in the model's dtype and in fp64, and the batch."""
    if kind == "packed":  # plain autograd of its rows one by one
        pieces = rows()
        return reference_of(model, lambda other: alone(other, pieces)), packed(pieces)
    inputs = batch(kind)
    return reference_of(model, lambda other: gradients(other, inputs)), inputs


def case_on_device(case: dict[str, Any]) -> dict[str, Any]:
    """Compute one case by each of its schedules: what is wrong, what the second step calls and waits for."""
    model = build(case["family"], dtype=getattr(torch, case["dtype"]), **case.get("config", {}))
    want, inputs = reference(model, case["batch"])
    found = {}
    with claimed.OnDevice():
        there = copy.deepcopy(model).to(claimed.KIND)
        given = {name: x.to(claimed.KIND) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        for name, settings in case["schedules"].items():
            with streamtune.stream(there, schedule=Schedule(**settings)):
                gradients(there, given)
                given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
                claimed.CALLED.clear()
                claimed.WAITED.clear()
                loss, ours = gradients(there, given)
                called, waited = dict(claimed.CALLED), dict(claimed.WAITED)
            pairs = want.compare((loss.to("cpu"), {name: x.to("cpu") for name, x in ours.items()}))
            # The loss is one number: by chance plain torch's may be off by far less than its logits are.
            constants = {"whole gradient": ROUNDING / 2, "loss": max(ROUNDING, torch.finfo(model.dtype).eps / 64)}
            found[name] = {
                "wrong": {
                    what: str(pair) for what, pair in pairs.items() if not pair.excess <= constants.get(what, ROUNDING)
                },
                "called": called,
                "waited": waited,
            }
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    claimed.install()
    decide_without_times()
    print(json.dumps([case_on_device(case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
