"""Options of ``streamtune plan``, and the cache key of its result. Does not import torch.

A result is cached only if everything that it depends on is known without planning: the device is named, the sizes of
host memory (and of the disk, if used) are set, and the model is in the recipe or in a local folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamtune.base.paths import open_nonblocking
from streamtune.base.result_cache import code_versions, json_hash
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe

PLANS = "plans"
"""Name of the cache folder of plans."""

HASHED_SUFFIXES = {".json", ".py", ".yaml", ".yml", ".jinja", ".txt", ".model"}
"""Suffixes of files in a model's folder whose content goes into the key; for other files, size and date do."""

FOLDER_KEYS = ("model_name_or_path", "ref_model_name_or_path", "teacher", "adapter_name_or_path")
"""Recipe keys that may name a folder which a plan reads."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``streamtune plan``; None if an option is not set."""

    device: str | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    disk_memory: str | None = None
    length: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    images: int | None = None
    image_size: str | None = None


def plan_key(loaded: LoadedRecipe, options: PlanOptions) -> str | None:
    """Return a hash of all inputs of a plan; None if an input is unknown, such as free memory."""
    recipe = loaded.recipe
    engine = recipe.engine
    if not recipe.cache or options.device is None:
        return None
    if recipe.trust_remote_code:
        return None  # the model's code may read anything
    if options.host_memory is None and engine.host_memory == "auto":
        return None
    if engine.offload_dir is not None and options.disk_memory is None and engine.disk_memory == "auto":
        return None
    values = recipe.model_dump(mode="json")
    folders: dict[str, Any] = {}
    try:
        for name in FOLDER_KEYS:
            if values.get(name) is None:
                continue
            folder = Path(values[name])
            adapters = (folder / "adapter_config.json").exists()
            if not folder.is_dir() or (adapters and name != "adapter_name_or_path"):
                return None  # a model on a hub, or adapters that name another model
            folders[name] = _describe_folder(folder)
        return json_hash([values, asdict(options), folders, _describe_deepspeed(recipe), code_versions()])
    except (OSError, ValueError):  # planning reports an unreadable folder
        return None


def _describe_folder(folder: Path) -> list[Any]:
    """Return, for each file in a folder, its hash if a plan may read the file, else its size and modification time."""
    facts_of_files: list[Any] = []
    for path in sorted(folder.iterdir()):
        try:
            file_stat = path.stat()
        except FileNotFoundError:  # a dangling link
            file_stat = path.lstat()
        if not stat.S_ISREG(file_stat.st_mode):
            facts_of_files.append([path.name, stat.S_IFMT(file_stat.st_mode)])
        elif path.suffix in HASHED_SUFFIXES:
            facts_of_files.append([path.name, _hash_file(path)])
        else:
            facts_of_files.append([path.name, file_stat.st_size, file_stat.st_mtime_ns])
    return facts_of_files


def _describe_deepspeed(recipe: Recipe) -> str | None:
    if recipe.deepspeed is None or not (path := Path(recipe.deepspeed).expanduser()).is_file():
        return recipe.deepspeed
    return _hash_file(path)


def _hash_file(path: Path) -> str:
    with open(path, "rb", opener=open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        return hashlib.file_digest(file, "sha256").hexdigest()
