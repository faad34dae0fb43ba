"""Sums and means over the tokens of each completion, without padding.

A micro-batch holds N completions of any lengths. Their K target tokens lie one after another in ``logp_K``, and
``row_K`` says which completion a token belongs to:

    logp_K   -0.1 -2.3 -0.7 | -1.1 | -0.2 -0.4        row_K   0 0 0 | 1 | 2 2        N = 3

Row sums are float64 whatever the tokens are. A completion of 100,000 tokens has a log-prob near -100,000, where float32
steps by 0.008; preference losses subtract two such numbers and look at the rest. Gradients come back in the dtype of
the tokens.

Shape suffixes: K target tokens, N completions (rows).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_row(values_K: Tensor, row_K: Tensor, num_rows: int) -> Tensor:
    """Add up the tokens of each row: ``sum_N[n] = sum of values_K[k] with row_K[k] == n``.

    Float64 ``[N]``, differentiable; rows without a token sum to 0. ``row_K`` is int64 in ``[0, num_rows)``.
    """
    assert values_K.shape == row_K.shape, f"{tuple(values_K.shape)} values in {tuple(row_K.shape)} rows"
    zeros_N = torch.zeros(num_rows, dtype=torch.float64, device=values_K.device)
    return zeros_N.index_add(0, row_K, values_K.double())


def counts(row_K: Tensor, num_rows: int) -> Tensor:
    """Count the tokens of each row: int64 ``[N]``."""
    return torch.bincount(row_K, minlength=num_rows)


def mean_by_row(values_K: Tensor, row_K: Tensor, num_rows: int) -> Tensor:
    """Average the tokens of each row: float64 ``[N]``, differentiable; rows without a token are 0."""
    return sum_by_row(values_K, row_K, num_rows) / counts(row_K, num_rows).clamp(min=1)
