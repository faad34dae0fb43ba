"""Fit rows, trees and prompts to the length: keep, cut or leave out each, write what is kept, and count.

:class:`LengthFit` counts and hashes; the cut, and the text of its error, differ for rows, trees and prompts.
"""

from __future__ import annotations

from streamtune.data.fit.length_fit import (
    COMPLETION_OVERLENGTH,
    IDENTICAL_PAIRS,
    LengthFit,
    Measured,
    Prepared,
    check_choice,
)
from streamtune.data.fit.prompt_fit import PROMPT_SIDES, PromptFit
from streamtune.data.fit.row_fit import RowFit
from streamtune.data.fit.tree_fit import LengthPolicy, TreeFit
from streamtune.data.rendering.policy import OVERLENGTH

__all__ = [
    "COMPLETION_OVERLENGTH",
    "IDENTICAL_PAIRS",
    "OVERLENGTH",
    "PROMPT_SIDES",
    "LengthFit",
    "LengthPolicy",
    "Measured",
    "Prepared",
    "PromptFit",
    "RowFit",
    "TreeFit",
    "check_choice",
]
