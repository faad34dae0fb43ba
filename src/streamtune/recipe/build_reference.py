"""Make the reference of a recipe: the trained model without its adapters, a second model, or log-probs on disk.

    adapters, and no name       the trained model, adapters switched off        nothing is held
    full, and no name           the model as it is when training starts         a second copy of the weights
    ref_model_name_or_path      that model                                      its weights
    precompute_ref_log_probs    any of these, run once before training          nothing, once it has been run

Log-probs that were computed once are kept below the user's cache directory under a hash of all they depend on: the
reference's weights, the dtypes it computes in, and every token of the rows.
"""

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

from streamtune import data, models, train
from streamtune.engine import Schedule, StreamHandle, stream
from streamtune.errors import ArgumentError, StreamTuneError, UserError
from streamtune.recipe.build_model import make_reference_model
from streamtune.recipe.schema import Recipe
from streamtune.sizes import show_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "KeptLogps",
    "asked_for",
    "cache_directory",
    "compute_logps",
    "load_reference",
    "read_logps",
    "reference_key",
    "streamed",
]

KEY = "ref_model_name_or_path"


def asked_for(recipe: Recipe) -> str | None:
    """Return the reference that a recipe names, if it names one."""
    name: str | None = getattr(recipe, KEY, None)
    return name


def load_reference(
    recipe: Recipe,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    *,
    sharing: train.World | None = None,
) -> Any | None:
    """Load the reference as a second model; return None if the trained model without its adapters is the reference.

    Args:
        recipe: The recipe.
        model: The trained model.
        tokenizer: Its tokenizer.
        device: The reference's device.
        sharing: The ranks that will share its weights: it is on ``meta`` then, and they are provided later.

    Raises:
        ArgumentError: There is no such model, or its vocabulary is another.
    """
    name = asked_for(recipe)
    if name is None:
        if recipe.finetuning_type != "full":
            return None
        return _frozen(make_reference_model(recipe, tokenizer, device, sharing=sharing))
    try:
        reference = make_reference_model(recipe, tokenizer, device, name=name, sharing=sharing)
    except UserError as error:
        error.where = KEY
        raise
    _check_vocabulary(name, reference, model, tokenizer, trust_remote_code=recipe.trust_remote_code)
    return _frozen(reference)


def streamed(
    model: Any, like: StreamHandle, *, temperature: float = 1.0, share: Callable[[Any, Any], None] | None = None
) -> train.ModelReference:
    """Stream a second model by an engine of its own, which cuts and shares sequences as the trained model's does.

    Args:
        model: The reference.
        like: The trained model's engine.
        temperature: The number that logits are divided by.
        share: Called with the reference and its decoder layers; gives it its weights if they are provided later.
    """
    chunks = Schedule(chunk_size=like.schedule.chunk_size, head_chunk_size=like.schedule.head_chunk_size)
    handle = stream(model, schedule=chunks, sequence_parallel=like.sequence_parallel)
    if share is not None:
        share(model, handle.layers)
    return train.ModelReference(model, handle, temperature=temperature)


def _frozen(model: Any) -> Any:
    model.requires_grad_(False)
    return model.eval()


def _check_vocabulary(
    name: str, reference: Any, model: Any, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> None:
    """Refuse a reference with other token ids: every number would be finite and worth nothing.

    Where the reference comes without a tokenizer only the sizes can be compared. With one, embeddings of different
    sizes are fine: those of a family are often padded differently.
    """
    mend = "use a reference with the tokenizer of the model, such as the model it was made from"
    ours, theirs = (m.get_input_embeddings().weight.shape[0] for m in (model, reference))
    if len(tokenizer) > theirs:
        what = (
            f"the reference '{name}' has an embedding of {theirs:,} rows, and the tokenizer {len(tokenizer):,} tokens"
        )
        raise ArgumentError(what, where=KEY, mend=mend)
    try:
        vocabulary = models.load_tokenizer(name, trust_remote_code=trust_remote_code).get_vocab()
    except StreamTuneError:
        if ours != theirs:
            what = f"the reference '{name}' has a vocabulary of {theirs:,} tokens, and the model one of {ours:,}"
            raise ArgumentError(what, where=KEY, mend=mend) from None
        return
    known = tokenizer.get_vocab()
    differing = sum(vocabulary.get(token) != index for token, index in known.items())
    if differing:
        what = f"the reference '{name}' has another vocabulary: {differing:,} of {len(known):,} tokens differ"
        raise ArgumentError(what, where=KEY, mend=mend)


# --- computed once ----------------------------------------------------------------------------------------------------


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
        if "lora_" not in name and parameter is not None:
            digest.update(f"{name.replace('.base_layer', '')} {parameter.dtype} {tuple(parameter.shape)}".encode())
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
    """Return the directory in which log-probs are kept, by the convention of the XDG base directories."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home.startswith("/") else Path.home() / ".cache") / "streamtune" / "reference"


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
