"""The model that peft's wrapper holds, without importing peft.

This module is a leaf: it imports nothing.
"""

from __future__ import annotations

from typing import Any

OF_ADAPTERS = (
    "lora_",
    "vera_",
    "ia3_",
    "oft_",
    "hra_",
    "hada_",
    "lokr_",
    "miss_",
    ".modules_to_save.",
    "trainable_tokens_",
)
"""Parts of the names that peft gives to what it adds to a model."""


def base_of(model: Any) -> Any:
    """Return the model inside of peft's wrapper; a model that is not wrapped as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_of_adapters(name: str) -> bool:
    """Return True if a parameter or buffer of a wrapped model belongs to its adapters, and not to its base."""
    return any(part in name for part in OF_ADAPTERS)
