"""Fit rows, trees and prompts to the maximum length: keep, cut or drop each, write the records, and count."""

from __future__ import annotations

from streamtune.data.fit.completion_fit import LengthPolicy, PromptFit, TreeFit
from streamtune.data.fit.length_fit import LengthFit, Measured, Prepared
from streamtune.data.fit.row_fit import RowFit

__all__ = ["LengthFit", "LengthPolicy", "Measured", "Prepared", "PromptFit", "RowFit", "TreeFit"]
