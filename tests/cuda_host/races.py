"""Steps under torch's CUDA sanitizer, over the runtime without a device: ``python -m tests.cuda_host.races [MUTANT]``.

The sanitizer follows which stream reads and writes which memory, and raises where two do with nothing between that
orders them. A mutant leaves one such order out. Prints one JSON document: for each schedule the race, or null.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.cuda._sanitizer

import streamtune
from streamtune import Schedule
from streamtune.engine import offloaded_weights
from streamtune.engine.memory import disk, tiers
from tests.cuda_host.measure import decide_without_values, make

BASE = {"chunk_size": 256, "head_chunk_size": 512}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain chunks": {},
    "host": {"offload": "host"},
    "attention on the host": {"offload": "host", "keep_attention": "host", "keep_kv": "host"},
    "two levels": {"levels": 2, "offload": "host", "device_layers": 1},
    "gradients in place": {"offload": "host", "stream_grads": True},
    "disk": {"offload": "disk"},
    "order of chunks": {"order": "chunk", "keep_kv": "host", "offload": "host", "stream_grads": True},
    "weights on the host": {"weights": "host"},
    "weights and inputs on the host": {"weights": "host", "levels": 2, "offload": "host", "stream_grads": True},
}
"""Those with weights on the host are last: there the weights stay."""
SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
LENGTH = 2048


def get_without_waiting(self: Any) -> torch.Tensor:
    """Return what was fetched, before it has arrived."""
    self.prefetch_to_device()
    (x, _), self.fetched = self.fetched, None
    tensor: torch.Tensor = x
    return tensor


def fetched_without_waiting(self: Any) -> list[torch.Tensor]:
    """Return weights that were fetched, before they have arrived."""
    return [x for x, _ in self.copies]


def settle_without_waiting(self: Any, most: int = 0) -> None:
    """Drop what is being copied to the host."""
    while len(self._in_flight) > most:
        self._in_flight.popleft()


def copy_without_waiting(self: Any, x: torch.Tensor, host: torch.Tensor) -> Any:
    """Copy to the host what may not be computed yet."""
    with torch.cuda.stream(self.stream):
        host.copy_(x, non_blocking=True)
        event = self.stream.record_event()
    self._in_flight.append((event, x))
    self.wait_for_copies(tiers.IN_FLIGHT)
    return event


MUTANTS = {
    "get": ((tiers._HostBlock, "get", get_without_waiting), (disk._DiskBlock, "get", get_without_waiting)),
    "fetched": ((offloaded_weights._Fetched, "wait", fetched_without_waiting),),
    "settle": ((tiers.Copies, "wait_for_copies", settle_without_waiting),),
    "to_host": ((tiers.Copies, "to_host", copy_without_waiting),),
}


def race_of(model: Any, settings: dict[str, Any], batch: int) -> str | None:
    """Return what the sanitizer says of two steps."""
    ids = torch.zeros(batch, LENGTH, dtype=torch.long, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        more = {"offload_dir": folder} if settings.get("offload") == "disk" else {}
        try:
            with streamtune.stream(model, schedule=Schedule(**BASE, **settings, **more)):
                for _ in range(2):
                    model.zero_grad(set_to_none=True)
                    model(input_ids=ids, labels=ids).loss.backward()
        except torch.cuda._sanitizer.CUDASanitizerErrors as error:
            return str(error)[:400]
    return None


def main(mutants: list[str]) -> None:
    """Run every schedule."""
    warnings.simplefilter("ignore")
    decide_without_values()
    for mutant in mutants:
        for owner, name, function in MUTANTS[mutant]:
            setattr(owner, name, function)
    torch.cuda._sanitizer.enable_cuda_sanitizer()
    model = make({"layers": 4, "config": SMALL}, "cuda")
    found = {}
    for name, settings in SCHEDULES.items():
        races = [race_of(model, settings, batch) for batch in (1, 2)]
        found[name] = next((race for race in races if race is not None), None)
    settings = SCHEDULES["order of chunks"]  # convolutions leave states to later chunks
    found["states"] = race_of(make({"family": "lfm2", "layers": 3, "config": SMALL}, "cuda"), settings, batch=1)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
