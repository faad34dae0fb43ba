"""Write a model the way every other tool reads it: Hugging Face layout, safetensors only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["save_pretrained"]


def save_pretrained(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer into ``folder``.

    A model with adapters writes the adapters and the name of their base, not the base.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
