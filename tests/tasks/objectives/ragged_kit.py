"""Random completions in two forms: padded tensors with a mask, and ragged tensors of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = (5, 3, 1, 7, 4, 4, 2, 6)


@dataclass(frozen=True)
class Rows:
    logp_NL: Tensor  # noqa: N815
    """log-probs that require a gradient; arbitrary numbers where the mask is 0"""
    mask_NL: Tensor  # noqa: N815
    row_K: Tensor  # noqa: N815

    @property
    def logp_K(self) -> Tensor:  # noqa: N802
        return self.logp_NL[self.mask_NL.bool()]

    @property
    def num_rows(self) -> int:
        return len(self.logp_NL)

    def other(self, seed: int, spread: float = 0.4) -> Tensor:
        """Return log-probs of another model for the same tokens, padded and without gradient."""
        generator = torch.Generator().manual_seed(seed)
        noise_NL = torch.randn(self.logp_NL.shape, generator=generator, dtype=torch.float64).to(self.logp_NL)
        return (self.logp_NL.detach() + spread * noise_NL).clamp(max=-1e-3)

    def ragged(self, padded_NL: Tensor) -> Tensor:
        return padded_NL[self.mask_NL.bool()]


def make_rows(
    lengths: Sequence[int] = LENGTHS, *, dtype: torch.dtype = torch.float64, left: bool = False, seed: int = 0
) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) + 2
    positions = torch.arange(width).flip(0) if left else torch.arange(width)
    mask_NL = (positions[None] < torch.tensor(lengths)[:, None]).to(dtype)
    logp_NL = -(torch.rand(len(lengths), width, generator=generator, dtype=torch.float64) * 2 + 0.01).to(dtype)
    row_K = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Rows(logp_NL.requires_grad_(), mask_NL, row_K)
