"""Asked before training: is this very model, with these very weights, streamed exactly, and are packed rows kept apart?

``exact`` walks the model, ``judge`` compares one layer with itself, ``packing`` compares rows with rows.
"""

from streamtune.engine.preflight.exact import check_exact
from streamtune.engine.preflight.packing import check_branches, check_packing

__all__ = ["check_branches", "check_exact", "check_packing"]
