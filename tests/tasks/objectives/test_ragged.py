"""Row sums, means and counts against padded tensors."""

from __future__ import annotations

import pytest
import torch
from ragged_kit import make_rows

from streamtune.tasks.objectives import counts, mean_by_row, sum_by_row


@pytest.mark.parametrize("left", [False, True])
def test_sums_and_means_are_those_of_padded_rows(left: bool) -> None:
    rows = make_rows(left=left)
    tokens_N = rows.mask_NL.sum(1)
    sums_N = sum_by_row(rows.logp_K, rows.row_K, rows.num_rows)
    means_N = mean_by_row(rows.logp_K, rows.row_K, rows.num_rows)
    torch.testing.assert_close(sums_N, (rows.logp_NL * rows.mask_NL).sum(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(means_N, (rows.logp_NL * rows.mask_NL).sum(1) / tokens_N, atol=1e-12, rtol=0)
    assert counts(rows.row_K, rows.num_rows).tolist() == tokens_N.tolist()


def test_gradients_come_back_in_the_dtype_of_the_tokens() -> None:
    logp_K = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    row_K = torch.tensor([0, 0, 2])
    (mean_by_row(logp_K, row_K, 3) * torch.tensor([1.0, 5.0, 3.0])).sum().backward()
    assert logp_K.grad is not None
    assert logp_K.grad.dtype == torch.float32
    assert logp_K.grad.tolist() == [0.5, 0.5, 3.0]


def test_a_row_without_tokens_is_zero() -> None:
    row_K = torch.tensor([0, 2])
    assert mean_by_row(torch.tensor([1.0, 3.0]), row_K, 4).tolist() == [1.0, 0.0, 3.0, 0.0]
    assert counts(row_K, 4).tolist() == [1, 0, 1, 0]


def test_long_rows_keep_what_float32_sums_lose() -> None:
    """Two log-probs near -100,000 that differ by 0.001: in float32 the difference is rounding."""
    logp_K = torch.full((200_000,), -1.0)
    logp_K[0] = -1.001
    row_K = torch.arange(2).repeat_interleave(100_000)
    sums_N = sum_by_row(logp_K, row_K, 2)
    assert (sums_N[1] - sums_N[0]).item() == pytest.approx(0.001, rel=1e-4)
