"""Checks of a folder with a model and of its configuration, before transformers and peft read them.

- Weights are safetensors. A pickle is a program; it is refused unless the recipe says ``allow_pickle``, and is then
  read by torch's restricted unpickler.
- Names of files in an index are of files in that folder.
- An attention kernel of the hub, which is code, is not taken from a configuration.
- Adapters do not choose their base among the models of a hub.

Numbers in a model's configuration that no model can have, found before one is made.

Transformers builds a model of them all the same: one of width 0 trains to its end and learns nothing, a dropout of
1.5 is never applied, and the rest fails later with an error about tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from streamtune.base.paths import escape_of
from streamtune.errors import ArgumentError
from streamtune.models.adapters.saved import check_adapter_settings

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
INDEX_BYTES = 64 << 20
WHERE = "model_name_or_path"


def check_folder(name_or_path: str, *, allow_pickle: bool = False, reads_weights: bool = True) -> bool:
    """Check a local folder with a model or adapters. A name on a hub is not checked.

    Args:
        name_or_path: As the recipe has it.
        allow_pickle: Allow weights in a pickle.
        reads_weights: True if weights are read, and so have to exist.

    Returns:
        True if weights have to be safetensors. False, where pickles are allowed, for a folder that has only those, for
        adapters without a model, and for a name on a hub.

    Raises:
        ArgumentError: The weights are a pickle, a name in a file leads out of the folder, or adapters name a base that
            the recipe does not.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return not allow_pickle
    for index in sorted(folder.glob("*.index.json")):
        _check_index(index, shards=reads_weights)
    config = _read(folder / "config.json")
    explicit = config.get("transformers_weights")
    if explicit is not None and (escape_of(explicit) or not str(explicit).endswith((".safetensors", ".json"))):
        raise ArgumentError(
            f"{folder / 'config.json'} names weights that are no safetensors in its folder: {str(explicit)[:80]!r}",
            where=WHERE,
            mend="delete transformers_weights there",
        )
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        _check_adapter(folder, _read(adapter), allow_pickle=allow_pickle, reads_weights=reads_weights)
        if not (folder / "config.json").is_file():
            return not allow_pickle
    if any((folder / name).is_file() for name in SAFE) or (isinstance(explicit, str) and (folder / explicit).is_file()):
        return True
    found = pickles_in(folder)
    if found and not allow_pickle:
        raise _pickle(folder, found[0])
    return not found


def pickles_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder that have a pickle's extension."""
    return sorted(path.name for pattern in PICKLES for path in folder.glob(pattern) if path.is_file())


def check_kernels(keys: Any) -> None:
    """Refuse a configuration in a recipe that names an attention or experts kernel of a hub.

    Raises:
        ArgumentError: It names one.
    """
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if _names_kernel(keys.get(key)):
            raise ArgumentError(
                f"'{key}: {keys[key]}' names a kernel of a hub, which is code",
                where=f"model.init.{key}",
                mend="delete the line; the engine picks the attention kernel, see `streamtune env`",
            )


def without_hub_kernels(config: Any) -> Any:
    """Remove kernels of a hub from a configuration and return it; transformers chooses its own in their place."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())):
        for key in ("_attn_implementation", "_experts_implementation"):
            if part is not None and _names_kernel(getattr(part, key, None)):
                setattr(part, key, None)
    return config


def _names_kernel(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_names_kernel, value.values()))
    return isinstance(value, str) and ("/" in value or ":" in value)


def _check_index(path: Path, *, shards: bool) -> None:
    """Check the names in an index of shards and, with ``shards``, that these files exist."""
    found = _read(path)
    listed = found.get("weight_map")
    if not isinstance(listed, dict) or not isinstance(found.get("metadata", {}), dict):
        raise ArgumentError(f"{path} lists no weights", where=WHERE, mend="use a whole copy of the checkpoint")
    for name in listed.values():
        if why := escape_of(name):
            raise ArgumentError(
                f"{path} names a file that {why}: {str(name)[:80]!r}",
                where=WHERE,
                mend="this checkpoint is broken, or means harm; use another copy",
            )
    whole = path.name.replace(".index.json", "")
    missing = sorted(name for name in set(listed.values()) if not (path.parent / name).is_file())
    if shards and missing and not (path.parent / whole).is_file():
        raise ArgumentError(
            f"{path} names {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}, and there is no "
            "such file beside it",
            where=WHERE,
            mend="use a whole copy of the checkpoint: a download may have been cut off",
        )


def _check_adapter(folder: Path, config: dict[str, Any], *, allow_pickle: bool, reads_weights: bool) -> None:
    """Check adapters, their settings and the name of their base."""
    if config:
        check_adapter_settings(config, folder / "adapter_config.json", where=WHERE)
    if not (folder / "adapter_model.safetensors").is_file():
        found = [name for name in pickles_in(folder) if name.startswith("adapter_model")]
        if reads_weights and not found and not (folder / "config.json").is_file():
            raise ArgumentError(
                f"{folder} has an adapter_config.json and no adapter_model.safetensors",
                where=WHERE,
                mend="use a whole copy of the adapters",
            )
        if found and not allow_pickle:
            raise _pickle(folder, found[0])
    base = config.get("base_model_name_or_path")
    if not (folder / "config.json").is_file() and not (isinstance(base, str) and Path(base).expanduser().is_dir()):
        raise ArgumentError(
            f"{folder} holds adapters, whose base {str(base)[:80]!r} is no folder here",
            where=WHERE,
            mend="merge them into their base first, and name that folder; nothing is fetched that no recipe names",
        )
    if isinstance(base, str) and Path(base).expanduser().is_dir() and Path(base).resolve() != folder.resolve():
        check_folder(base, allow_pickle=allow_pickle, reads_weights=reads_weights)


def _pickle(folder: Path, name: str) -> ArgumentError:
    return ArgumentError(
        f"the weights in {folder} are a pickle ({name}), which runs code when it is read",
        where=WHERE,
        mend="use a copy with safetensors; or, if you trust who made it, set allow_pickle: true: tensors only are read",
    )


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > INDEX_BYTES:
            raise ValueError(f"it has more than {INDEX_BYTES >> 20} MiB")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{path} cannot be read: {error}", where=WHERE, mend="use a whole copy of the checkpoint"
        ) from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} holds no JSON object", where=WHERE, mend="use a whole copy of the checkpoint")
    return found


SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Keys that count something a model has at least one of. Configurations with other names for them map them to these."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LARGEST = {"num_hidden_layers": 10_000}
"""More layers than this would be built one by one until the memory is full."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
LARGEST_SIZE = 2**31 - 1
DROPOUT = re.compile(r"(dropout(_p|_prob|_rate)?|pdrop|layerdrop)$")

Where = Callable[[str], str]
"""The place of a key, for an error."""


def check_config(config: Any, given: Mapping[str, Any], where: Where) -> None:
    """Refuse sizes, heads, experts, dropouts and numbers that no model can have.

    Args:
        config: A configuration of transformers; of a model with several parts the one of the text is checked.
        given: The keys as the user or the file has them; other keys of ``config`` were derived or are defaults.
        where: Returns the place at which a key is written.

    Raises:
        ArgumentError: A key is wrong; the message names the first such key and its place.
    """
    text = config.get_text_config(decoder=True)
    names: Mapping[str, str] = getattr(text, "attribute_map", None) or {}
    flat = given.get("text_config") if isinstance(given.get("text_config"), Mapping) else given
    assert isinstance(flat, Mapping)

    def refuse(key: str, what: str, mend: str) -> ArgumentError:
        written = names.get(key, key) if key not in flat else key
        return ArgumentError(f"'{written}: {_show(_value(text, key))}' {what}", where=where(written), mend=mend)

    for key in SIZES:
        value = _value(text, key)
        for size in value if isinstance(value, list | tuple) else () if value is None else (value,):
            if isinstance(size, bool) or not isinstance(size, int) or size < (0 if isinstance(value, list) else 1):
                raise refuse(key, "is no size of a model: it takes a whole number of at least 1", "mend the number")
            if size > LARGEST.get(key, LARGEST_SIZE):
                most = LARGEST.get(key, LARGEST_SIZE)
                raise refuse(key, f"is more than any model has: at most {most:,}", "mend the number")
    _check_heads(text, flat, names, refuse)
    chosen = _count(text, "num_experts_per_tok")
    if chosen is not None and chosen < 1 and any(_count(text, key) for key in EXPERTS):
        raise refuse("num_experts_per_tok", "leaves every token without an expert", "use at least 1")
    for key, value in _numbers(text):
        if math.isnan(value):
            raise refuse(key, "is not a number", "mend the number")
        if DROPOUT.search(key) and not 0 <= value < 1:
            raise refuse(key, "is no probability: it takes a number of at least 0 and below 1", "mend the number")


def check_count(given: Mapping[str, Any], where: Where) -> None:
    """Refuse a number of layers that no model has, before a configuration makes a list of as many entries.

    Args:
        given: The keys as the user or the file has them.
        where: Returns the place at which a key is written.

    Raises:
        ArgumentError: The number is too large; the message names its place.
    """
    text = given.get("text_config")
    for keys in (given, text if isinstance(text, Mapping) else {}):
        for key in LAYERS:
            count = keys.get(key)
            if isinstance(count, int) and count > LARGEST["num_hidden_layers"]:
                raise ArgumentError(
                    f"'{key}: {_show(count)}' is more than any model has: at most {LARGEST['num_hidden_layers']:,}",
                    where=where(key),
                    mend="mend the number",
                )


def _check_heads(
    text: Any, given: Mapping[str, Any], names: Mapping[str, str], refuse: Callable[[str, str, str], ArgumentError]
) -> None:
    """Refuse key heads that do not divide the query heads, and query heads that do not divide the hidden size."""
    heads, shared, width = (_count(text, key) for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if heads and shared and heads % shared:
        raise refuse("num_key_value_heads", f"does not divide the {heads} attention heads",
                     f"use a divisor of {heads}")  # fmt: skip
    each = _count(text, "head_dim")
    derived = "head_dim" not in given and names.get("head_dim", "head_dim") not in given
    by_layer = isinstance(_value(text, "head_dim"), list)
    if heads and width and width % heads and derived and not by_layer and each in (None, width // heads):
        name = names.get("hidden_size", "hidden_size")
        raise refuse("num_attention_heads", f"does not divide '{name}: {width}'",
                     f"use a divisor of {width}, or give head_dim where the model has one")  # fmt: skip


def _value(text: Any, key: str) -> Any:
    """Return a value of a configuration: None where it has none, and a list where each layer has its own."""
    try:
        return getattr(text, key, None)
    except Exception:  # of transformers, where layers differ and nothing was said of all of them
        return [_value(layer, key) for layer in getattr(text, "per_layer_config", None) or ()]


def _count(text: Any, key: str) -> int | None:
    value = _value(text, key)
    return value if isinstance(value, int) else None


def _numbers(text: Any) -> Iterable[tuple[str, float]]:
    """Yield each number of the configuration with its key."""
    for key, value in vars(text).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value if isinstance(value, float) or abs(value) < 2**63 else math.inf


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def place_in_init(key: str) -> str:
    """Return the place of a key in a recipe's own configuration."""
    return f"model.init.{key}"


def key_place(name_or_path: str) -> tuple[dict[str, Any], Where]:
    """Return the keys of a folder's ``config.json``, and a function that gives file and line of each.

    Args:
        name_or_path: A folder. For a model on a hub the keys are empty and each place is ``model_name_or_path``.
    """
    path = Path(name_or_path).expanduser() / "config.json"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""  # to read a pipe would wait
        keys = json.loads(text)
    except (OSError, ValueError, RecursionError):
        text, keys = "", {}
    if not isinstance(keys, dict):
        text, keys = "", {}

    def where(key: str) -> str:
        found = re.search(rf'"{re.escape(key)}"\s*:', text)
        if not text:
            return "model_name_or_path"
        return f"{path}:{text.count(chr(10), 0, found.start()) + 1}" if found else str(path)

    return keys, where


def keys_of_size(config: Any, size: int) -> list[str]:
    """Return the keys of a configuration that have this value, among those that determine sizes of weights."""
    text = config.get_text_config(decoder=True)
    names: Mapping[str, str] = getattr(text, "attribute_map", None) or {}
    return [names.get(key, key) for key in SIZES if _count(text, key) == size]
