"""State of a forward that its backward restores: random generators and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from streamtune.ops.devices import autocast_device_type, random_state, set_random_state


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's random generator and, on an accelerator, of the device's generator."""

    cpu: Tensor
    device: torch.device
    accelerator: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Return the current state of the CPU's and the device's random generators."""
        return cls(torch.get_rng_state(), device, random_state(device))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Set the generators to this state in the ``with`` block, to draw the same numbers; restore them on exit."""
        outer = RandomState.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            outer.restore()

    def restore(self) -> None:
        """Set the random generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            set_random_state(self.accelerator, self.device)


@dataclass(frozen=True)
class Autocast:
    """Autocast settings of a forward. The backward restores them, because autograd runs a backward without autocast."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, device: torch.device) -> Autocast:
        """Return the autocast settings now active for ``device``."""
        kind = autocast_device_type(device)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def applied(self) -> AbstractContextManager[None]:
        """Return a context with these autocast settings, without the weight cache, which would outlive the graph."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
