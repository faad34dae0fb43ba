"""Log-probs of a reference that are computed once and kept on disk.

Their key has three parts: the computation (versions, device, precision, temperature), the configuration, and the
weights and rows. A resumed run compares the first, and the second where its model has the reference's configuration:
its weights have changed since it began.
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
from streamtune.base.result_cache import CacheFile, Notify, hash_of, versions
from streamtune.base.text import show_size

UNUSED = ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "torch_dtype")
"""Settings of a configuration that change no log-probability, or are known otherwise; ``*_token_id`` are others."""
OWN = 20
"""Characters of each part of a key."""


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


def computation(device: torch.device, *, bf16: bool, temperature: float) -> str:
    """Return a hash of how log-probs are computed: versions and code, device, precision, temperature."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, str(torch.version.cuda)]
    return hash_of([versions(), name, precision, bf16, temperature])[:OWN]


def configuration(model: nn.Module, *, adapters: bool) -> str:
    """Return a hash of a model's resolved configuration, its constant tensors, and its own code if it has any.

    With ``adapters`` they are a part of the reference, see :func:`row_key`: their settings count too.
    """
    config: Any = getattr(model, "config", None)
    settings = {} if config is None else config.to_dict()
    used = {key: value for key, value in settings.items() if key not in UNUSED and not key.endswith("_token_id")}
    digest = hashlib.blake2b(repr(_sorted(used)).encode(), digest_size=20)
    for name, added in sorted(getattr(model, "peft_config", {}).items()) if adapters else ():
        digest.update(repr((name, _sorted(added.to_dict()))).encode())
    for name, buffer in sorted(model.named_buffers()):
        if (adapters or not is_adapter_name(name)) and not buffer.is_meta:
            digest.update(f"{name.rpartition('.')[2]} {buffer.dtype} {tuple(buffer.shape)}".encode())
            _add_tensor(digest.update, buffer.detach())
    for module in sorted({type(each).__module__ for each in model.modules()}):
        if module.startswith("transformers_modules."):
            digest.update(Path(str(sys.modules[module].__file__)).read_bytes())
    return digest.hexdigest()[:OWN]


def _sorted(value: Any) -> Any:
    """Return plain values with the keys of every mapping in order."""
    if isinstance(value, dict):
        return sorted((str(key), _sorted(item)) for key, item in value.items())
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def row_key(weights: Iterable[tuple[str, Tensor | None]], trees: Iterable[data.Tree], *, adapters: bool) -> str:
    """Return a hash of the reference's weights and of the rows; reads every weight once.

    Args:
        weights: The reference's weights by name. None is a weight that another rank hashes.
        adapters: Adapters are a part of the reference. They are not where it is the trained model without its own.
    """
    digest = hashlib.blake2b(digest_size=20)
    for name, parameter in weights:
        if (adapters or not is_adapter_name(name)) and parameter is not None:
            own = name.replace(".base_layer", "").replace(".original_module", "")
            digest.update(f"{own} {parameter.dtype} {tuple(parameter.shape)}".encode())
            _add_tensor(digest.update, parameter.detach())
    for tree in trees:
        digest.update(repr((tree.prompt, tree.completions, tree.masks)).encode())
    return digest.hexdigest()


def _add_tensor(update: Callable[[bytes], None], x: Any) -> None:
    """Hash a tensor's bytes; for a quantised tensor, hash its components."""
    state = getattr(x, "quant_state", None)  # of bitsandbytes: the scales
    for part in state.as_dict(packed=True).values() if state is not None else ():
        _add_tensor(update, part)
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            _add_tensor(update, getattr(x, name))
        return
    for part in x.contiguous().flatten().view(torch.uint8).split(1 << 26):
        update(part.cpu().numpy().tobytes())


def cache_directory() -> Path:
    return cache_folder() / "reference"


def read_logps(key: str, notify: Notify) -> KeptLogps | None:
    """Return the log-probs kept under ``key``; None if there are none, or the file is damaged."""
    content = _file(key).read(notify)
    if content is None:
        return None
    kept = load(content)
    return KeptLogps(kept["logps"], kept["offsets"])


def _file(key: str) -> CacheFile:
    return CacheFile(cache_directory() / f"{key}.logps", f"reference/{key}")


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
        key: The key, of :func:`computation`, :func:`configuration` and :func:`row_key`.
        batches: Batches of a tree each, all trees in their order.
        bf16: Compute under autocast.
        notify: Called with where they are kept.
    """
    found: list[Tensor] = []
    for batch in batches:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
            found.append(reference.logprobs(batch.to(device)).float().cpu())
    sizes = torch.tensor([0, *(len(part) for part in found)])
    kept = KeptLogps(torch.cat(found), sizes.cumsum(0))
    file = _file(key)
    try:
        file.write(save({"logps": kept.logps, "offsets": kept.offsets}), durably=True)
        notify(f"the reference's log-probs are kept in {file.path} ({show_size(kept.logps.nbytes)}) for the next run")
    except OSError as error:
        notify(f"the reference's log-probs cannot be kept for the next run: {error}")
    return kept
