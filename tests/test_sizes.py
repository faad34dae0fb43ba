"""Sizes as people write them."""

from __future__ import annotations

import pytest

from streamtune.base.text import parse_size, show_size
from streamtune.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80G", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("512MiB", 2**29),
        ("100 B", 100),
        (" 24GiB ", 24 * 2**30),
    ],
)
def test_read(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "80", "GiB", "80 gib", "-1GiB", "1.2.3GiB", "80GiBs"])
def test_no_size(text: str):
    with pytest.raises(ArgumentError, match="expected a size"):
        parse_size(text, where="--device-memory")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1.00 KiB"),
        (80 * 2**30, "80.0 GiB"),
        (139 * 2**30, "139 GiB"),
        (999.7 * 2**20, "0.98 GiB"),
        (-(2**31), "-2.00 GiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_shown(size: float, text: str):
    assert show_size(size) == text
