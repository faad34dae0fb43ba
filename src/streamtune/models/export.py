"""Write a model the way every other tool reads it: Hugging Face layout, safetensors only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["SavedTokenizer", "copy_weights", "save_pretrained"]


class SavedTokenizer:
    """The files of a tokenizer, made once: it does not change while a model is trained, and large ones take a second.

    Once made, they are written without the tokenizer, which two threads may not use at the same time.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._files: Mapping[Path, bytes] | None = None

    def read(self) -> Mapping[Path, bytes]:
        """Return the contents of the files, by their path in the model's folder."""
        if self._files is None:
            with TemporaryDirectory() as name:
                folder = Path(name)
                self._tokenizer.save_pretrained(folder)
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                self._files = {path.relative_to(folder): path.read_bytes() for path in files}
        return self._files

    def save_pretrained(self, folder: Path) -> None:
        """Write the files into ``folder``."""
        for name, content in self.read().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def copy_weights(model: nn.Module) -> dict[str, Any]:
    """Copy the state of ``model`` to the host as it is now, except frozen weights, which are returned uncopied.

    A shared weight is copied once, and is shared in the copy.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, nn.Parameter) and not value.requires_grad:
            return value.detach()
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        return copies[id(value)]

    state = model.state_dict(keep_vars=True)
    return {name: copied(value) for name, value in state.items()}


def save_pretrained(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    *,
    weights: dict[str, Any] | None = None,
) -> None:
    """Write model and tokenizer into ``folder``.

    A model with adapters writes the adapters and the name of their base, not the base.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        folder: The folder to write.
        weights: From :func:`copy_weights`, not to be used afterwards; None writes the weights the model has now.
    """
    model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
    tokenizer.save_pretrained(folder)
