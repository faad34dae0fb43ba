"""Keys of several devices: what ranks share."""

from __future__ import annotations

from typing import Literal

from streamtune.recipe.rules import KEEP_ONE, Clash, Not, Rules
from streamtune.recipe.spec import Rows, Spec, Text

SHARING_PRESETS = ("zero3", "zero3_offload")
"""Values of ``deepspeed`` with which each rank holds a part of the weights."""


class DeviceKeys(Spec):
    """Keys of several devices."""

    deepspeed: Text | None = None
    """Share optimizer, gradients and weights between ranks through DeepSpeed: `zero1`, `zero2`, `zero3`,
    `zero3_offload` (weights and optimizer on the host), or the path of a DeepSpeed configuration, whose `auto` values
    are filled from the recipe. Without it several ranks keep a whole model each (DDP)."""

    fsdp: bool = False
    """Share weights, gradients and optimizer between ranks through PyTorch's FSDP2, in DeepSpeed's place."""

    sequence_parallel_size: Rows = 1
    """Ranks that share each sequence: the longest one grows with them. Divides the number of ranks."""

    sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto"
    """Way of sharing a sequence: `ulysses` exchanges heads for tokens, `ring` passes keys and values around; `auto` is
    ulysses where the ranks divide the heads."""

    train_batch_size: Rows | None = None
    """Rows of one optimizer step over all ranks, in place of `gradient_accumulation_steps`, which then follows from the
    number of ranks: the same recipe trains the same on any number of them."""

    @property
    def divides(self) -> str | None:
        """The key that has ranks divide the optimizer or the weights; None where each has them whole."""
        return "fsdp" if self.fsdp else "deepspeed" if self.deepspeed is not None else None

    @property
    def shares_weights(self) -> bool:
        """True if ranks share the weights by a key; a DeepSpeed file says its own stage."""
        return self.fsdp or self.deepspeed in SHARING_PRESETS


DEVICE_RULES: Rules = (
    Clash({"fsdp": True, "deepspeed": Not(None)}, "'deepspeed' and 'fsdp' exclude each other", KEEP_ONE),
)
