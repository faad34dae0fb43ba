"""Checks of a folder with a model, before transformers and peft read it.

- Weights are safetensors. A pickle is a program; it is refused unless the recipe says ``allow_pickle``, and is then
  read by torch's restricted unpickler.
- Names of files in an index are of files in that folder.
- An attention kernel of the hub, which is code, is not taken from a configuration.
- Adapters do not choose their base among the models of a hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamtune.errors import ArgumentError
from streamtune.paths import escape_of

__all__ = ["check_folder", "check_kernels", "pickles_in", "without_hub_kernels"]

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
    """Check adapters and the name of their base."""
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
