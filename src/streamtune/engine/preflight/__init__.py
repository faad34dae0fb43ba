"""Asked before training: is this very model, with these very weights, streamed exactly, and are packed rows kept apart?

``exact`` compares a forward of the model, and ``layer`` the gradients of one layer, with those of the plain model, and
ranks that share a sequence with one alone; ``rows`` compares packed rows, and rows that share their beginning, with the
same rows alone, and a row longer than a chunk with its chunks.
"""

from streamtune.engine.preflight.exact import check_exact, check_order
from streamtune.engine.preflight.layer import check_shared
from streamtune.engine.preflight.rows import check_branches, check_length, check_packing, lengths_to_check

__all__ = [
    "check_branches",
    "check_exact",
    "check_length",
    "check_order",
    "check_packing",
    "check_shared",
    "lengths_to_check",
]
