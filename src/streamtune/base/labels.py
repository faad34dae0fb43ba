"""The label of a token that is not trained on; torch's and transformers' losses leave the same one out.

This module is a leaf: it imports nothing.
"""

from __future__ import annotations

IGNORE_INDEX = -100
