"""Checks before training: a model, with its current weights, is compared with itself without streaming.

``exact`` compares forwards of the model. ``layer`` compares gradients of one layer, and ranks that share a sequence
with one rank alone. ``rows`` compares packed rows, and rows that share a prefix, with the same rows alone. It also
compares a long row in chunks with the row as a whole.
"""

from streamtune.engine.preflight.exact import check_chunk_order, check_exact
from streamtune.engine.preflight.layer import check_sequence_parallel
from streamtune.engine.preflight.rows import (
    check_branches,
    check_length,
    check_packed_images,
    check_packing,
    lengths_to_check,
)

__all__ = [
    "check_branches",
    "check_chunk_order",
    "check_exact",
    "check_length",
    "check_packed_images",
    "check_packing",
    "check_sequence_parallel",
    "lengths_to_check",
]
