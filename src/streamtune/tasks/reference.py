"""Log-probs of the reference model, computed once and cached on disk.

The cache key has four hashes: of the computation (versions, device, precision, temperature), of the rows, of the
model's configuration, and of its weights. A resumed run compares the first two hashes with its own. If the reference
is the model before training, it also compares the third. It cannot compute the fourth, because the weights have
changed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from streamtune import data, train
from streamtune.base.adapters import is_adapter_name
from streamtune.base.paths import cache_folder
from streamtune.base.result_cache import CacheFile, Notify, code_versions, json_hash
from streamtune.base.text import show_size

UNHASHED_SETTINGS = ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "torch_dtype")
"""Settings of a model configuration that are not hashed: they do not affect log-probs, or another hash includes them.
Settings that end in ``_token_id`` are not hashed either.
"""
KEY_PART_LENGTH = 20
"""Number of characters of the first three hashes in a cache key."""


@dataclass(frozen=True)
class CachedLogps:
    """Precomputed log-probs of the reference model for a list of trees (prompts with completions)."""

    logps: Tensor
    """fp32 ``[K]``: log-probs of the target tokens of all trees, in the order of the trees"""
    offsets: Tensor
    """int64 ``[trees + 1]``: index in ``logps`` at which each tree begins, then the length of ``logps``"""

    def concatenate_logps(self, trees: Iterable[int]) -> Tensor:
        """Return the log-probs of the trees with these indices, in this order: fp32, one value per target token."""
        parts = [self.logps[self.offsets[tree] : self.offsets[tree + 1]] for tree in trees]
        return torch.cat(parts)


def computation_hash(device: torch.device, *, bf16: bool, temperature: float) -> str:
    """Return a hash of all that affects how log-probs are computed: code, versions, device, precision, temperature."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, str(torch.version.cuda)]
    return json_hash([code_versions(), name, precision, bf16, temperature])[:KEY_PART_LENGTH]


def configuration_hash(model: nn.Module, *, adapters: bool) -> str:
    """Return a hash of a model's configuration, its buffers, and its custom code if it has any.

    Args:
        adapters: True if adapters are part of the reference; their settings are then hashed too.
    """
    config: Any = getattr(model, "config", None)
    settings = {} if config is None else config.to_dict()
    hashed = {
        key: value for key, value in settings.items() if key not in UNHASHED_SETTINGS and not key.endswith("_token_id")
    }
    digest = hashlib.blake2b(repr(_sort_keys(hashed)).encode(), digest_size=20)
    for name, adapter_config in sorted(getattr(model, "peft_config", {}).items()) if adapters else ():
        digest.update(repr((name, _sort_keys(adapter_config.to_dict()))).encode())
    for name, buffer in sorted(model.named_buffers()):
        if (adapters or not is_adapter_name(name)) and not buffer.is_meta:
            digest.update(f"{name.rpartition('.')[2]} {buffer.dtype} {tuple(buffer.shape)}".encode())
            _hash_tensor(digest.update, buffer.detach())
    for module in sorted({type(each).__module__ for each in model.modules()}):
        if module.startswith("transformers_modules."):
            digest.update(Path(str(sys.modules[module].__file__)).read_bytes())
    return digest.hexdigest()[:KEY_PART_LENGTH]


def _sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((str(key), _sort_keys(item)) for key, item in value.items())
    return [_sort_keys(item) for item in value] if isinstance(value, list | tuple) else value


def rows_hash(trees: Iterable[data.Tree]) -> str:
    """Return a hash of the rows whose log-probs the reference computes."""
    digest = hashlib.blake2b(digest_size=20)
    for tree in trees:
        images = [data.ImageFile.parse(image).digest for image in tree.images]
        digest.update(repr((tree.prompt, tree.completions, tree.masks, *images)).encode())
    return digest.hexdigest()[:KEY_PART_LENGTH]


def weights_hash(weights: Iterable[tuple[str, Tensor | None]], *, adapters: bool) -> str:
    """Return a hash of the reference model's weights.

    Args:
        weights: Names and tensors of the reference. A tensor is None if another rank hashes it.
        adapters: True if adapters are part of the reference; False if it is the trained model without its adapters.
    """
    digest = hashlib.blake2b(digest_size=20)
    for name, parameter in weights:
        if (adapters or not is_adapter_name(name)) and parameter is not None:
            base_name = name.replace(".base_layer", "").replace(".original_module", "")
            digest.update(f"{base_name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            _hash_tensor(digest.update, parameter.detach())
    return digest.hexdigest()


def _hash_tensor(update: Callable[[bytes], None], tensor: Any) -> None:
    state = getattr(tensor, "quant_state", None)  # of bitsandbytes: the scales
    for part in state.as_dict(packed=True).values() if state is not None else ():
        _hash_tensor(update, part)
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            _hash_tensor(update, getattr(tensor, name))
        return
    for part in tensor.contiguous().flatten().view(torch.uint8).split(1 << 26):
        update(part.cpu().numpy().tobytes())


def cache_directory() -> Path:
    return cache_folder() / "reference"


def read_logps(key: str, notify: Notify) -> CachedLogps | None:
    """Return the log-probs cached under ``key``; None if nothing is cached or the file is damaged."""
    content = _cache_file(key).read(notify)
    if content is None:
        return None
    tensors = load(content)
    return CachedLogps(tensors["logps"], tensors["offsets"])


def _cache_file(key: str) -> CacheFile:
    return CacheFile(cache_directory() / f"{key}.logps", f"reference/{key}")


def compute_logps(
    key: str,
    reference: train.Reference,
    batches: Iterable[train.TreeBatch],
    device: torch.device,
    *,
    bf16: bool,
    notify: Callable[[str], None],
) -> CachedLogps:
    """Compute the reference's log-probs of every tree, cache them under ``key``, and return them.

    Args:
        key: Cache key: hashes of the computation, of the rows, of the configuration, and of the weights.
        batches: Batches with one tree each.
        notify: Function called with the path of the cache file, or with the reason why it cannot be written.
    """
    logps_of_batches: list[Tensor] = []
    for batch in batches:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
            logps_of_batches.append(reference.logprobs(batch.to(device)).float().cpu())
    sizes = torch.tensor([0, *(len(part) for part in logps_of_batches)])
    logps = CachedLogps(torch.cat(logps_of_batches), sizes.cumsum(0))
    file = _cache_file(key)
    try:
        file.write(save({"logps": logps.logps, "offsets": logps.offsets}), durably=True)
        notify(f"the reference's log-probs are cached in {file.path} ({show_size(logps.logps.nbytes)})")
    except OSError as error:
        notify(f"the reference's log-probs cannot be cached for the next run: {error}")
    return logps
