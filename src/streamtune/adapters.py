"""The model that peft's wrapper holds, without importing peft.

This module is a leaf: it imports nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["base_of"]


def base_of(model: Any) -> Any:
    """Return the model inside of peft's wrapper; a model that is not wrapped as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
