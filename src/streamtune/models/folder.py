"""Check a folder with a model or adapters before libraries read it, and read it safely while others may write to it.

- Weights are safetensors. A pickle is a program: it is refused unless the recipe sets ``allow_pickle``, and then read
  by torch's restricted unpickler.
- An index may only name files in its own folder.
- Adapters cannot choose a base on the hub, and their settings are checked before peft uses them.

:func:`unchanged` compares size and times of the files before and after reading. So everything that is read belongs to
one state of the folder. :func:`unmapped` makes libraries read safetensors into memory instead of mapping them. If a
mapped file is truncated, as ``cp`` over it does, the process ends with SIGBUS; reading a truncated file raises an
error.

Two kinds of weights stay mapped: pickles, and weights that take more than half of the host's free memory, summed over
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


def check_folder(name_or_path: str, *, allow_pickle: bool = False, reads_weights: bool = True) -> bool:
    """Check a local folder with a model or adapters. A name on a hub is not checked.

    Returns:
        True if weights must be safetensors. With ``allow_pickle``, False for a folder that has only pickles, for
        adapters without a model, and for a name on a hub.

    Raises:
        ArgumentError: Weights are a pickle (without ``allow_pickle``) or missing (with ``reads_weights``), a file names
            a path outside the folder, or the base of adapters is not a local folder.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return not allow_pickle
    for index in sorted(folder.glob("*.index.json")):
        _check_index(index, shards=reads_weights)
    config = _read(folder / "config.json")
    explicit = config.get("transformers_weights")
    if explicit is not None and (unsafe_name_reason(explicit) or not str(explicit).endswith((".safetensors", ".json"))):
        what = f"transformers_weights must name safetensors beside the config.json, found {str(explicit)[:80]!r}"
        raise ArgumentError(what, where=WHERE, fix=f"remove the key from {folder / 'config.json'}")
    if (folder / "adapter_config.json").is_file():
        _check_adapter(folder, allow_pickle=allow_pickle, reads_weights=reads_weights)
        if not (folder / "config.json").is_file():
            return not allow_pickle
    if any((folder / name).is_file() for name in SAFE) or (isinstance(explicit, str) and (folder / explicit).is_file()):
        return True
    pickles = pickles_in(folder)
    if pickles and not allow_pickle:
        raise _pickle(folder, pickles[0])
    return not pickles


def pickles_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder with an extension of pickles, such as ``.bin`` or ``.pt``."""
    return sorted(path.name for pattern in PICKLES for path in folder.glob(pattern) if path.is_file())


def _check_index(path: Path, *, shards: bool) -> None:
    """Refuse an index of shards that names files outside its folder or, with ``shards``, files that do not exist."""
    index = _read(path)
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not isinstance(index.get("metadata", {}), dict):
        raise ArgumentError(f"{path} lists no weights", where=WHERE, fix=WHOLE_COPY)
    for name in listed.values():
        if why := unsafe_name_reason(name):
            what = f"{path} names a file that {why}: {str(name)[:80]!r}"
            raise ArgumentError(what, where=WHERE, fix="use another copy: this one is damaged or malicious")
    whole = path.name.replace(".index.json", "")
    missing = sorted(name for name in set(listed.values()) if not (path.parent / name).is_file())
    if shards and missing and not (path.parent / whole).is_file():
        names = f"{missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"
        raise ArgumentError(
            f"{path} names {names}, which its folder does not have",
            where=WHERE,
            fix=f"{WHOLE_COPY}: a download may be incomplete",
        )


def _check_adapter(folder: Path, *, allow_pickle: bool, reads_weights: bool) -> None:
    path, beside_model = folder / "adapter_config.json", (folder / "config.json").is_file()
    config = _read(path)
    if config:
        check_adapter_settings(config, path, where=WHERE)
    if not (folder / "adapter_model.safetensors").is_file():
        pickles = [name for name in pickles_in(folder) if name.startswith("adapter_model")]
        if reads_weights and not pickles and not beside_model:
            what = f"{folder} has an adapter_config.json but no adapter_model.safetensors"
            raise ArgumentError(what, where=WHERE, fix="use a complete copy of the adapters")
        if pickles and not allow_pickle:
            raise _pickle(folder, pickles[0])
    base = config.get("base_model_name_or_path")
    is_here = isinstance(base, str) and Path(base).expanduser().is_dir()
    if not beside_model and not is_here:
        raise ArgumentError(
            f"{folder} holds adapters, whose base {str(base)[:80]!r} is not a local folder",
            where=WHERE,
            fix="merge them into their base and use that folder: StreamTune downloads only what the recipe names",
        )
    if isinstance(base, str) and is_here and Path(base).resolve() != folder.resolve():
        check_folder(base, allow_pickle=allow_pickle, reads_weights=reads_weights)


def _pickle(folder: Path, name: str) -> ArgumentError:
    return ArgumentError(
        f"the weights in {folder} are a pickle ({name}), and reading a pickle can run code",
        where=WHERE,
        fix="use a copy in safetensors format; or, if you trust its author, allow_pickle: true (reads only tensors)",
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file does not exist."""
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


def check_saved_settings(
    folder: Path, names: Sequence[str], *, where: str, fix: str = "use a complete copy of it"
) -> None:
    """Refuse the settings in an adapter folder if peft would fail on them or match their patterns for minutes.

    Args:
        folder: Folder with an ``adapter_config.json``.
        names: Names of modules on which the patterns are tried.
        where: Key that named the folder, for errors.
        fix: Fix to show if the file cannot be read.
    """
    path = folder / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where=where, fix=fix) from error
    check_adapter_settings(settings, path, names, where=where)


def check_adapter_settings(settings: Any, path: Path, names: Sequence[str] = TYPICAL_MODULES, *, where: str) -> None:
    """Refuse adapter settings of the wrong type, and patterns that take too long on ``names``.

    ``settings`` is the content of the ``adapter_config.json`` at ``path``; ``where`` is the key that named its folder.
    """

    def refuse(key: str, wanted: str) -> ArgumentError:
        shown = json.dumps(settings.get(key))[:60] if isinstance(settings, Mapping) else ""
        return ArgumentError(f"'{key}' in {path} must be {wanted}, found {shown}", where=where, fix="correct the file")

    if not isinstance(settings, Mapping):
        raise ArgumentError(f"{path} is not a JSON object", where=where, fix="use a complete copy of it")
    for key in ("r", "oft_block_size"):
        if key in settings and not (_is_number(settings[key], whole=True) and 0 <= settings[key] <= MAX_RANK):
            raise refuse(key, f"a whole number up to {MAX_RANK:,}")
    for key in ("lora_alpha", "lora_dropout", "alpha"):
        if key in settings and not _is_number(settings[key]):
            raise refuse(key, "a number")
    for key in ("rank_pattern", "alpha_pattern"):
        given = settings.get(key) or {}
        if not isinstance(given, Mapping) or not all(_is_number(value) for value in given.values()):
            raise refuse(key, "a mapping of patterns to numbers")
        find_matches(list(given), names, where=f"{key} in {path}", match_function="match", template=PEFT_FORM)
    for key in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters"):
        given = settings.get(key)
        if given is not None and not isinstance(given, str) and not _are_texts(given):
            raise refuse(key, "a string or a list of strings")
        if isinstance(given, str):
            find_matches([given], names, where=f"{key} in {path}", match_function="fullmatch")
    layers = settings.get("layers_pattern") or []
    forms = [layers] if isinstance(layers, str) else list(layers)
    find_matches(forms, names, where=f"layers_pattern in {path}", match_function="match", template=r".*\.{}\.(\d+)\.")


def _is_number(value: Any, *, whole: bool = False) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


READ = "pread"
"""Backend with which safetensors reads a file without mapping it. Reading a slice reads the whole tensor."""
SETTINGS_BYTES = 1 << 20
SETTLED_SECONDS = 3.0
"""A file that changed less than this long ago may change again without a change of its times."""
FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".py")
"""Suffixes of a model's files."""
PEFT_READS = "peft.utils.save_and_load", "safe_load_file"

State = tuple[int, int, int, int, str]
"""Size, times and inode of a file, and its checksum if it changed within ``SETTLED_SECONDS``, else ``""``."""


@contextmanager
def unchanged(name_or_path: str | Path, *, where: str = "model_name_or_path") -> Iterator[None]:
    """Context manager: refuse a folder whose files are written to inside, even if they are then restored.

    The base of adapters is watched too; hub files do not change. The ArgumentError replaces any error raised inside.
    ``where`` is the key or argument that names the folder.
    """
    folders = _with_base(name_or_path)
    before = _states(folders)

    def check(cause: Exception | None) -> None:
        after = _states(folders, recent={path for path, state in before.items() if state[-1]})
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
        check(error)
        raise
    check(None)


def _states(folders: list[str], recent: set[Path] | None = None) -> dict[Path, State]:
    """Return the state of each model file in the folders.

    ``recent`` are the files to checksum; None checksums the files that changed within ``SETTLED_SECONDS``.
    """
    states: dict[Path, State] = {}
    for folder in folders:
        with suppress(OSError, ValueError, RuntimeError):  # not a folder: loading reports it
            for path in Path(folder).expanduser().iterdir():
                with suppress(OSError):
                    if path.suffix in FILES and stat.S_ISREG((facts := path.stat()).st_mode):
                        changed = max(facts.st_mtime, facts.st_ctime)
                        new = time.time() - changed < SETTLED_SECONDS if recent is None else path in recent
                        content = _checksum(path) if new else ""
                        states[path] = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, content)
    return states


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return checksum_of(file)


@contextmanager
def unmapped(name_or_path: str | Path) -> Iterator[None]:
    """Context manager: transformers and peft read safetensors without mapping, if half of free memory holds them."""
    with ExitStack() as stack:
        if _ranks_here() * _weights_bytes(name_or_path) <= usable_host_bytes() // 2:
            opens = hf_internal(SAFE_OPEN)
            stack.callback(replace_internal, SAFE_OPEN, opens)
            replace_internal(SAFE_OPEN, partial(_open, opens))
            with suppress(ImportError):
                module = importlib.import_module(PEFT_READS[0])
                loads = getattr(module, PEFT_READS[1])
                stack.callback(setattr, module, PEFT_READS[1], loads)
                setattr(module, PEFT_READS[1], partial(loads, backend=READ))
        if not faulthandler.is_enabled():
            with suppress(OSError, ValueError, RuntimeError, AttributeError):  # stderr has no file descriptor
                faulthandler.enable(all_threads=False)
                stack.callback(faulthandler.disable)
        yield


def _open(opens: Any, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "") -> Any:
    """Open a safetensors file as ``safe_open`` does, without mapping it."""
    return opens(filename, framework=framework, device=device, backend=READ)


def _ranks_here() -> int:
    """Return the number of ranks on this machine. They load at the same time, each into its own memory."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(given)) if given.isascii() and given.isdecimal() else 1


def _weights_bytes(name_or_path: str | Path) -> int:
    total = 0
    for folder in _with_base(name_or_path):
        with suppress(OSError, ValueError, RuntimeError):
            total += sum(path.stat().st_size for path in Path(folder).expanduser().glob("*.safetensors"))
    return total


def _with_base(name_or_path: str | Path) -> list[str]:
    """Return the folder, followed by the folder of its base if it holds adapters that name a local base."""
    base = adapter_base(str(name_or_path))
    return [str(name_or_path), *([] if base is None else [base])]


def adapter_base(name_or_path: str) -> str | None:
    """Return the local folder of the base that the adapters in ``name_or_path`` name; None if there is none."""
    try:
        folder = Path(name_or_path).expanduser()
        settings = folder / "adapter_config.json"
        if not settings.is_file() or settings.stat().st_size > SETTINGS_BYTES:
            return None
        found = Path(json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]).expanduser()
        return str(found) if found.is_dir() and found.resolve() != folder.resolve() else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
