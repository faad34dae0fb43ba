"""The options of a plan on the command line, and the key of a plan that is kept whole, found without loading torch.

A plan depends on the recipe, the options, the configuration of the model, the versions of the libraries and the code of
StreamTune, and on the memory there is. So it is kept where all of that is known: for a device by name, with the host's
memory given (and the disk's, where one is used), of a model that is in the recipe or in a folder. Other plans use the
simulated steps that are kept (``simulate.kept``).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe
from streamtune.result_cache import hash_of, versions

__all__ = ["PLANS", "PlanOptions", "plan_key"]

PLANS = "plans"
"""Name of the folder of kept plans."""

READ = {".json", ".py", ".yaml", ".yml", ".jinja", ".txt", ".model"}
"""Files of a model's folder that are read for a plan; of others only size and date count."""

MODELS = ("model_name_or_path", "ref_model_name_or_path", "teacher")


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan on the command line; None where one is not given."""

    device: str | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    disk_memory: str | None = None
    length: int | None = None
    ranks: int | None = None
    nodes: int | None = None


def plan_key(loaded: LoadedRecipe, options: PlanOptions) -> str | None:
    """Return a hash of all that a plan depends on; None where it depends on what may change from run to run."""
    recipe = loaded.recipe
    engine = recipe.engine
    if not recipe.cache or options.device is None:
        return None
    if options.host_memory is None and engine.host_memory == "auto":
        return None
    if engine.offload_dir is not None and options.disk_memory is None and engine.disk_memory == "auto":
        return None
    values = recipe.model_dump(mode="json")
    folders: dict[str, Any] = {}
    for name in MODELS:
        if values.get(name) is None:
            continue
        folder = Path(values[name])
        if not folder.is_dir() or (folder / "adapter_config.json").exists():
            return None  # a name on a hub, or adapters, which name another model
        folders[name] = _describe_folder(folder)
    try:
        return hash_of([values, asdict(options), folders, _describe_deepspeed(recipe), versions()])
    except OSError:
        return None


def _describe_folder(folder: Path) -> list[Any]:
    found: list[Any] = []
    for file in sorted(folder.iterdir()):
        if file.suffix in READ:
            found.append([file.name, hashlib.sha256(file.read_bytes()).hexdigest()])
        else:
            facts = file.stat()
            found.append([file.name, facts.st_size, facts.st_mtime_ns])
    return found


def _describe_deepspeed(recipe: Recipe) -> str | None:
    if recipe.deepspeed is None or not (path := Path(recipe.deepspeed)).is_file():
        return recipe.deepspeed
    return hashlib.sha256(path.read_bytes()).hexdigest()
