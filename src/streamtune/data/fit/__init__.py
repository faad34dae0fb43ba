"""Fit rows and prompts to the maximum length: keep, cut or drop each of them, write the records, and count."""

from __future__ import annotations

from streamtune.data.fit.completion_fit import CompletionsFitter, LengthPolicy, PromptFitter
from streamtune.data.fit.length_fit import LengthFitter, Measured, Prepared
from streamtune.data.fit.row_fit import RowFitter

__all__ = ["CompletionsFitter", "LengthFitter", "LengthPolicy", "Measured", "Prepared", "PromptFitter", "RowFitter"]
