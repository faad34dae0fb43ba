"""Log-probs of a reference that are computed once and kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamtune import data, train
from streamtune.adapters import is_of_adapters
from streamtune.paths import cache_folder
from streamtune.sizes import show_size

if TYPE_CHECKING:
    pass

__all__ = ["KeptLogps", "cache_directory", "compute_logps", "read_logps", "reference_key"]


@dataclass(frozen=True)
class KeptLogps:
    """Log-probs of trees that were computed before: fp32, ``[K]`` of each tree in the order of their completions."""

    logps: Tensor
    """[sum of K] fp32"""
    offsets: Tensor
    """[trees + 1] int64"""

    def of(self, trees: Iterable[int]) -> Tensor:
        """Return ``[K]``: the log-probs of some trees, one after another."""
        parts = [self.logps[self.offsets[tree] : self.offsets[tree + 1]] for tree in trees]
        return torch.cat(parts)


def reference_key(weights: Iterable[tuple[str, Tensor | None]], trees: Iterable[data.Tree], *, bf16: bool) -> str:
    """Return the hash of all that the reference's log-probs of some trees depend on; reads every weight once.

    Args:
        weights: The reference's by name; adapters are not part of the hash. None is a weight that another rank hashes.
        trees: The rows.
        bf16: True if it computes under autocast.
    """
    digest = hashlib.blake2b(digest_size=20)
    for name, parameter in weights:
        if not is_of_adapters(name) and parameter is not None:
            own = name.replace(".base_layer", "").replace(".original_module", "")
            digest.update(f"{own} {parameter.dtype} {tuple(parameter.shape)}".encode())
            _add_tensor(digest.update, parameter.detach())
    digest.update(f"autocast {bf16}".encode())
    for tree in trees:
        digest.update(repr((tree.prompt, tree.completions, tree.masks)).encode())
    return digest.hexdigest()


def _add_tensor(update: Callable[[bytes], None], x: Any) -> None:
    """Hash a tensor's bytes, or those of the tensors a quantised one is made of."""
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            _add_tensor(update, getattr(x, name))
        return
    for part in x.contiguous().flatten().view(torch.uint8).split(1 << 26):
        update(part.cpu().numpy().tobytes())


def cache_directory() -> Path:
    """Return the directory in which log-probs are kept."""
    return cache_folder() / "reference"


def read_logps(key: str) -> KeptLogps | None:
    """Return the log-probs kept under ``key``; None if there are none, or the file cannot be read."""
    try:
        kept = load_file(cache_directory() / f"{key}.safetensors")
        return KeptLogps(kept["logps"], kept["offsets"])
    except (OSError, SafetensorError, KeyError):
        return None


def compute_logps(
    key: str,
    reference: train.Reference,
    batches: Iterable[train.TreeBatch],
    device: torch.device,
    *,
    bf16: bool,
    notify: Callable[[str], None],
) -> KeptLogps:
    """Compute the reference's log-probs of every tree, and keep them under ``key``.

    Args:
        key: From :func:`reference_key`.
        reference: The reference.
        batches: A tree each, all trees in their order.
        device: The reference's device.
        bf16: Compute under autocast.
        notify: Called with where they are kept.
    """
    found: list[Tensor] = []
    for batch in batches:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
            found.append(reference.logprobs(batch.to(device)).float().cpu())
    sizes = torch.tensor([0, *(len(part) for part in found)])
    kept = KeptLogps(torch.cat(found), sizes.cumsum(0))
    path = cache_directory() / f"{key}.safetensors"
    staged = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"logps": kept.logps, "offsets": kept.offsets}, staged)
        staged.replace(path)
        notify(f"the reference's log-probs are kept in {path} ({show_size(kept.logps.nbytes)}) for the next run")
    except (OSError, SafetensorError) as error:
        staged.unlink(missing_ok=True)
        notify(f"the reference's log-probs cannot be kept for the next run: {error}")
    return kept
