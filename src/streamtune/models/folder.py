"""Check a folder with a model or adapters before libraries read it, and read it safely while others may write to it.

- Weights are safetensors. A pickle can run code, so it is refused unless the recipe sets ``allow_pickle``. Then torch's
  restricted unpickler reads the pickle.
- An index may name only files in its own folder.
- Adapters cannot choose a base on the hub, and their settings are checked before peft uses them.

:func:`refuse_file_changes` compares size and times of the files before and after reading. :func:`read_without_mmap`
makes libraries read safetensors into memory. If a memory-mapped file is truncated, as by ``cp`` onto the file, the
process ends with SIGBUS; without mmap, reading raises an error.

Two kinds of weights stay memory-mapped: pickles, and weights larger than half of the host's free memory, summed over
the host's ranks. A process that ends with SIGBUS prints its stack.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from streamtune.base.paths import unsafe_name_reason
from streamtune.base.patterns import find_matches
from streamtune.base.result_cache import checksum_of
from streamtune.engine.hf_names import SAFE_OPEN, hf_internal, replace_internal
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.errors import ArgumentError
from streamtune.models.adapters.targets import PEFT_FORM

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
INDEX_BYTES = 64 << 20
WHERE = "model_name_or_path"
WHOLE_COPY = "use a complete copy of the checkpoint"


def check_model_folder(name_or_path: str, *, allow_pickle: bool = False, reads_weights: bool = True) -> bool:
    """Check a local folder with a model or adapters; return True if its weights must be safetensors.

    A name on a hub is not checked. With ``allow_pickle`` the result is False for a folder that has only pickles, for
    adapters without a model, and for a name on a hub.

    Raises:
        ArgumentError: Weights are a pickle (without ``allow_pickle``) or missing (with ``reads_weights``), a file names
            a path outside the folder, or the base of adapters is not a local folder.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return not allow_pickle
    is_safe = any((folder / name).is_file() for name in SAFE)
    for index in sorted(folder.glob("*.index.json")):
        # Pickles beside safetensors are not read: a download may have left them out, but not their index.
        _check_weight_index(index, check_shards=reads_weights and (index.name in SAFE or not is_safe))
    config = _read_json_object(folder / "config.json")
    explicit = config.get("transformers_weights")
    if explicit is not None and (unsafe_name_reason(explicit) or not str(explicit).endswith((".safetensors", ".json"))):
        what = f"transformers_weights must name safetensors next to config.json, found {str(explicit)[:80]!r}"
        raise ArgumentError(what, where=WHERE, fix=f"remove the key from {folder / 'config.json'}")
    if (folder / "adapter_config.json").is_file():
        _check_adapter_folder(folder, allow_pickle=allow_pickle, reads_weights=reads_weights)
        if not (folder / "config.json").is_file():
            return not allow_pickle
    if is_safe or (isinstance(explicit, str) and (folder / explicit).is_file()):
        return True
    pickles = pickle_names(folder)
    if pickles and not allow_pickle:
        raise _pickle_error(folder, pickles[0])
    return not pickles


def pickle_names(folder: Path) -> list[str]:
    return sorted(path.name for pattern in PICKLES for path in folder.glob(pattern) if path.is_file())


def _check_weight_index(path: Path, *, check_shards: bool) -> None:
    index = _read_json_object(path)
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not isinstance(index.get("metadata", {}), dict):
        raise ArgumentError(f"{path} lists no weights", where=WHERE, fix=WHOLE_COPY)
    for name in listed.values():
        if reason := unsafe_name_reason(name):
            what = f"{path} names a file that {reason}: {str(name)[:80]!r}"
            raise ArgumentError(what, where=WHERE, fix="use another copy: this one is damaged or malicious")
    unsharded_name = path.name.replace(".index.json", "")
    missing = sorted(name for name in set(listed.values()) if not (path.parent / name).is_file())
    if check_shards and missing and not (path.parent / unsharded_name).is_file():
        names = f"{missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"
        raise ArgumentError(
            f"{path} names files that do not exist in its folder: {names}",
            where=WHERE,
            fix=f"{WHOLE_COPY}: a download may be incomplete",
        )


def _check_adapter_folder(folder: Path, *, allow_pickle: bool, reads_weights: bool) -> None:
    path, beside_model = folder / "adapter_config.json", (folder / "config.json").is_file()
    config = _read_json_object(path)
    if config:
        check_adapter_config(config, path, where=WHERE)
    if not (folder / "adapter_model.safetensors").is_file():
        pickles = [name for name in pickle_names(folder) if name.startswith("adapter_model")]
        if reads_weights and not pickles and not beside_model:
            what = f"{folder} has an adapter_config.json but no adapter_model.safetensors"
            raise ArgumentError(what, where=WHERE, fix="use a complete copy of the adapters")
        if pickles and not allow_pickle:
            raise _pickle_error(folder, pickles[0])
    base = config.get("base_model_name_or_path")
    is_here = isinstance(base, str) and Path(base).expanduser().is_dir()
    if not beside_model and not is_here:
        raise ArgumentError(
            f"{folder} contains adapters, whose base {str(base)[:80]!r} is not a local folder",
            where=WHERE,
            fix="merge them into their base and use the merged model: StreamTune downloads only what the recipe names",
        )
    if isinstance(base, str) and is_here and Path(base).resolve() != folder.resolve():
        check_model_folder(base, allow_pickle=allow_pickle, reads_weights=reads_weights)


def _pickle_error(folder: Path, name: str) -> ArgumentError:
    return ArgumentError(
        f"the weights in {folder} are a pickle ({name}), and reading a pickle can run code",
        where=WHERE,
        fix="use a copy in safetensors format; or, if you trust its author, allow_pickle: true (reads only tensors)",
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > INDEX_BYTES:
            raise ValueError(f"it is larger than {INDEX_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where=WHERE, fix=WHOLE_COPY) from error
    if not isinstance(content, dict):
        raise ArgumentError(f"{path} is not a JSON object", where=WHERE, fix=WHOLE_COPY)
    return content


SUFFIXES = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.down_proj", "input_layernorm"]
TYPICAL_MODULES = [f"model.layers.{layer}.{suffix}" for layer in range(32) for suffix in SUFFIXES]
"""Module names on which patterns are tried before a model exists."""
MAX_RANK = 10**5


def check_adapter_config_file(
    folder: Path, module_names: Sequence[str], *, where: str, fix: str = "use a complete copy of it"
) -> None:
    """Raise an ArgumentError for an ``adapter_config.json`` with which peft would fail, or match patterns for minutes.

    Args:
        folder: Folder with an ``adapter_config.json``.
        module_names: Names of modules on which the patterns are tried.
        where: Key that names the folder, for errors.
        fix: Fix in the error if the file cannot be read.
    """
    path = folder / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where=where, fix=fix) from error
    check_adapter_config(settings, path, module_names, where=where)


def check_adapter_config(settings: Any, path: Path, names: Sequence[str] = TYPICAL_MODULES, *, where: str) -> None:
    """Raise an ArgumentError for settings of the wrong type, and for patterns that take too long to match on ``names``.

    ``settings`` is the content of the ``adapter_config.json`` at ``path``. ``names`` are module names. ``where`` is the
    key that names the adapters' folder.
    """

    def make_error(key: str, wanted: str) -> ArgumentError:
        shown = json.dumps(settings.get(key))[:60] if isinstance(settings, Mapping) else ""
        return ArgumentError(f"'{key}' in {path} must be {wanted}, found {shown}", where=where, fix="correct the file")

    if not isinstance(settings, Mapping):
        raise ArgumentError(f"{path} is not a JSON object", where=where, fix="use a complete copy of it")
    for key in ("r", "oft_block_size"):
        if key in settings and not (_is_number(settings[key], integer=True) and 0 <= settings[key] <= MAX_RANK):
            raise make_error(key, f"a whole number up to {MAX_RANK:,}")
    for key in ("lora_alpha", "lora_dropout", "alpha"):
        if key in settings and not _is_number(settings[key]):
            raise make_error(key, "a number")
    for key in ("rank_pattern", "alpha_pattern"):
        setting = settings.get(key) or {}
        if not isinstance(setting, Mapping) or not all(_is_number(value) for value in setting.values()):
            raise make_error(key, "a mapping of patterns to numbers")
        find_matches(list(setting), names, where=f"{key} in {path}", match_function="match", template=PEFT_FORM)
    for key in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters"):
        setting = settings.get(key)
        if setting is not None and not isinstance(setting, str) and not _is_string_list(setting):
            raise make_error(key, "a string or a list of strings")
        if isinstance(setting, str):
            find_matches([setting], names, where=f"{key} in {path}", match_function="fullmatch")
    layers = settings.get("layers_pattern") or []
    forms = [layers] if isinstance(layers, str) else list(layers)
    find_matches(forms, names, where=f"layers_pattern in {path}", match_function="match", template=r".*\.{}\.(\d+)\.")


def _is_number(value: Any, *, integer: bool = False) -> bool:
    return isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


READ_BACKEND = "pread"
"""Backend of safetensors that reads a file without mapping the file. A slice reads the whole tensor."""
SETTINGS_BYTES = 1 << 20
SETTLED_SECONDS = 3.0
"""Number of seconds after a change in which a file may change again while its times stay equal."""
FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".py")
"""Suffixes of a model's files."""
PEFT_READS = "peft.utils.save_and_load", "safe_load_file"

State = tuple[int, int, int, int, str]
"""Size, times and inode of a file, and its checksum if it changed within ``SETTLED_SECONDS``, else ``""``."""


@contextmanager
def refuse_file_changes(name_or_path: str | Path, *, where: str = "model_name_or_path") -> Iterator[None]:
    """Context manager: raise an ArgumentError if a file in the folder is written to, even if it is then restored.

    The base of adapters is checked too; hub files do not change. The ArgumentError replaces any error raised inside.
    ``where`` is the key or argument that names the folder.
    """
    folders = _folder_and_base(name_or_path)
    before = _file_states(folders)

    def check_files(cause: Exception | None) -> None:
        after = _file_states(folders, to_checksum={path for path, state in before.items() if state[-1]})
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) != after.get(path):
                raise ArgumentError(
                    f"{path} was written to while it was read",
                    where=where,
                    fix="wait until the file is complete, then start again",
                ) from cause

    try:
        yield
    except Exception as error:
        check_files(error)
        raise
    check_files(None)


def _file_states(folders: list[str], to_checksum: set[Path] | None = None) -> dict[Path, State]:
    states: dict[Path, State] = {}
    for folder in folders:
        with suppress(OSError, ValueError, RuntimeError):  # not a folder: loading reports it
            for path in Path(folder).expanduser().iterdir():
                with suppress(OSError):
                    if path.suffix in FILES and stat.S_ISREG((status := path.stat()).st_mode):
                        changed = max(status.st_mtime, status.st_ctime)
                        new = time.time() - changed < SETTLED_SECONDS if to_checksum is None else path in to_checksum
                        content = _file_checksum(path) if new else ""
                        states[path] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, content)
    return states


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return checksum_of(file)


@contextmanager
def read_without_mmap(name_or_path: str | Path) -> Iterator[None]:
    """Context manager: transformers and peft read safetensors without mmap if the files fit in half the free memory."""
    with ExitStack() as stack:
        if _local_rank_count() * _safetensors_bytes(name_or_path) <= usable_host_bytes() // 2:
            safe_open = hf_internal(SAFE_OPEN)
            stack.callback(replace_internal, SAFE_OPEN, safe_open)
            replace_internal(SAFE_OPEN, partial(_open_without_mmap, safe_open))
            with suppress(ImportError):
                module = importlib.import_module(PEFT_READS[0])
                safe_load_file = getattr(module, PEFT_READS[1])
                stack.callback(setattr, module, PEFT_READS[1], safe_load_file)
                setattr(module, PEFT_READS[1], partial(safe_load_file, backend=READ_BACKEND))
        if not faulthandler.is_enabled():
            with suppress(OSError, ValueError, RuntimeError, AttributeError):  # stderr has no file descriptor
                faulthandler.enable(all_threads=False)
                stack.callback(faulthandler.disable)
        yield


def _open_without_mmap(safe_open: Any, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "") -> Any:
    return safe_open(filename, framework=framework, device=device, backend=READ_BACKEND)


def _local_rank_count() -> int:  # all ranks of a machine load at the same time
    rank_count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(rank_count)) if rank_count.isascii() and rank_count.isdecimal() else 1


def _safetensors_bytes(name_or_path: str | Path) -> int:
    total = 0
    for folder in _folder_and_base(name_or_path):
        with suppress(OSError, ValueError, RuntimeError):
            total += sum(path.stat().st_size for path in Path(folder).expanduser().glob("*.safetensors"))
    return total


def _folder_and_base(name_or_path: str | Path) -> list[str]:
    base = local_adapter_base(str(name_or_path))
    return [str(name_or_path), *([] if base is None else [base])]


def local_adapter_base(name_or_path: str) -> str | None:
    """Return the folder of the base model of the adapters in ``name_or_path``; None if it is not a local folder."""
    try:
        folder = Path(name_or_path).expanduser()
        settings = folder / "adapter_config.json"
        if not settings.is_file() or settings.stat().st_size > SETTINGS_BYTES:
            return None
        found = Path(json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]).expanduser()
        return str(found) if found.is_dir() and found.resolve() != folder.resolve() else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
