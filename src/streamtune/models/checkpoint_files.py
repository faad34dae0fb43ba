"""The files of a model: read a few parameters at a time and converted as ``transformers`` does, and fingerprinted.

The mapping of tensors in the files to parameters, and their conversion (experts are stacked, fused projections split),
use the renamings and converters of ``from_pretrained``.

Fingerprints are by content, so a folder may move but not change. A folder of 16 GB is read once, by several threads, at
the speed of its disk; its pages are in memory then for the loading that follows. Hashes are remembered below the user's
cache directory by each file's place, size and times, of which the system sets one itself (``ctime``): the next start on
the same machine reads nothing again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from streamtune.base.paths import cache_folder, escape_of
from streamtune.base.result_cache import CacheFile
from streamtune.engine.hf_names import (
    ANY_OF,
    CONVERSIONS,
    CONVERTER,
    HUB_COMMIT,
    HUB_FILE,
    ORDER_OF_KEYS,
    RENAMED_KEY,
    RENAMING,
    SAFE_FILE,
    SAFE_INDEX,
    inside,
)
from streamtune.errors import ArgumentError
from streamtune.models.config import check_exists, loading, loading_error, read_config
from streamtune.models.folder import READ, SETTLED_SECONDS, check_folder
from streamtune.models.weights_check import check_dtypes, check_missing, check_unused, is_finite, not_finite, size_error


def checkpoint_dtype(name_or_path: str, trust_remote_code: bool) -> torch.dtype | None:
    """Return the dtype that ``auto`` loads a checkpoint in; None if it is quantised, or holds adapters."""
    check_exists(name_or_path)
    config = read_config(name_or_path, trust_remote_code)
    if config is None or getattr(config, "quantization_config", None) is not None:
        return None
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return CheckpointFiles(name_or_path).dtype()
    except ArgumentError:  # weights are a pickle or missing: loading reports it
        return None


class CheckpointFiles:
    """Weights in safetensors, in a folder or on the model hub."""

    def __init__(self, name_or_path: str) -> None:
        check_exists(name_or_path)
        check_folder(name_or_path, allow_pickle=True)  # pickles are never read here
        self.name = name_or_path
        self._files = _find(name_or_path)
        """Tensor in the files -> file."""
        self._loads: dict[str, Any] = {}
        """First parameter that a conversion gives -> the conversion, with what it reads."""
        self._gives: dict[str, str] = {}
        """Parameter -> the first parameter of the conversion that gives it."""
        self._aliases: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        """Parameter or buffer -> dtype; known once it is prepared."""
        self._model: PreTrainedModel | None = None
        self._used: set[str] = set()
        """Tensors in the files that the model has a use for."""

    def dtype(self) -> torch.dtype:
        """Return the first floating dtype in the files: the meaning of ``dtype: auto`` if none is configured."""
        for key, path in self._files.items():
            with safe_open(path, framework="pt") as file:
                found: torch.dtype = file.get_slice(key)[:0].dtype
            if found.is_floating_point:
                return found
        return torch.float32

    def prepare(self, model: PreTrainedModel) -> None:
        """Find the tensors and the conversion that give each parameter of ``model``; no values are read."""
        self._model = model
        state = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self._aliases = {name: first.setdefault(id(value), name) for name, value in state.items()}
        self.dtypes = _dtypes(model, state)
        mapping = inside(CONVERSIONS)(model)
        renamings = [entry for entry in mapping if isinstance(entry, inside(RENAMING))]
        converters = [entry for entry in mapping if isinstance(entry, inside(CONVERTER))]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, renamed = model.base_model_prefix, inside(RENAMED_KEY)
        for key in sorted(self._files, key=inside(ORDER_OF_KEYS)):
            name, pattern = renamed(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = renamed(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
            if name not in state:
                continue  # the model has no use for it
            self._used.add(key)
            made = inside(RENAMING)(key, name) if pattern is None else copy.deepcopy(by_pattern[pattern])
            if pattern is None:
                self._check_size(key, name, state[name])
            load = self._loads.setdefault(name, made)
            load.add_tensor(name, key, pattern or key, partial(self._tensor, key, self.dtypes[name]))
        # Kept as by `from_pretrained`: saving converts back.
        model._weight_conversions = [conversion for conversion in mapping if conversion.was_used()]
        self._link(state)
        check_unused(self.name, model, self._files.keys() - self._used)
        check_dtypes(self.name, model.config)

    def _check_size(self, key: str, name: str, wanted: Tensor) -> None:
        """Refuse a tensor of another size than its parameter."""
        try:
            with safe_open(self._files[key], framework="pt") as file:
                size = tuple(file.get_slice(key).get_shape())
        except (OSError, SafetensorError) as error:
            raise loading_error("model", self.name, error) from error
        if size != tuple(wanted.shape):
            assert self._model is not None
            raise size_error(self.name, self._model.config, name, size, tuple(wanted.shape))

    def _link(self, state: Mapping[str, Tensor]) -> None:
        """Record the conversion that gives each parameter; refuse files that lack some."""
        for start, load in self._loads.items():
            names = [start]
            if isinstance(load, inside(CONVERTER)) and len(load.target_patterns) > 1:
                ends = [pattern.replace("*", "") for pattern in load.target_patterns]
                used = next((end for end in ends if end in start), None)
                names += [start.replace(used, end) for end in ends if used is not None and end != used]
            for name in names:
                if name in state:
                    self._gives[self._aliases[name]] = start
        ignored = _may_lack(self._model)
        needed = {self._aliases[name] for name in state if not ignored(self._aliases[name])}
        check_missing(self.name, self._model, needed - self._gives.keys())

    def gives(self, name: str) -> bool:
        return self._aliases.get(name, name) in self._gives

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read parameters and buffers by name, on the CPU, in the model's dtypes. Each can be read once."""
        assert self._model is not None, "prepare() comes first"
        wanted, tensors = list(names), dict[str, Tensor]()
        for start in dict.fromkeys(self._gives[name] for name in wanted):
            load = self._loads.pop(start, None)
            if load is None:
                continue
            with loading(self.name):  # a converter may be given tensors of other sizes
                converted = load.convert(start, model=self._model, config=self._model.config)
            for name, value in converted.items():
                tensors[self._aliases.get(name, name)] = value[0] if isinstance(value, list) else value
        return {name: tensors[name].contiguous() for name in wanted}

    def _tensor(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a copy of a tensor: kernels may round differently for its alignment in the file."""
        with safe_open(self._files[key], framework="pt", backend=READ) as file:
            values: Tensor = file.get_tensor(key)
            if not is_finite(values):
                raise not_finite(key, values, str(self._files[key]))
            return values.to(dtype, copy=True)


def _may_lack(model: Any) -> Callable[[str], bool]:
    """Return a function that is True for names that may be missing from the files, by the model's own rules."""
    patterns = model._keys_to_ignore_on_load_missing or []
    if not patterns:
        return lambda name: False
    together = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return lambda name: together.search(name) is not None


def _dtypes(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter and buffer: some models keep a few in float32."""
    plan = model._get_dtype_plan(model.dtype)
    dtypes = {name: value.dtype for name, value in state.items()}
    if plan:
        pattern, groups, _ = inside(ANY_OF)(list(plan))
        for name in dtypes:
            if (match := pattern.search(name)) is not None and match.lastgroup is not None:
                dtypes[name] = plan[groups[match.lastgroup]]
    return dtypes


def _find(name_or_path: str) -> dict[str, Path]:
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    try:
        index = inside(HUB_FILE)(name_or_path, SAFE_INDEX, **options)
        if index is not None:
            listed: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            paths = {name: inside(HUB_FILE)(name_or_path, name) for name in dict.fromkeys(listed.values())}
            return {key: Path(str(paths[name])) for key, name in listed.items()}
        single = inside(HUB_FILE)(name_or_path, SAFE_FILE, **options)
        if single is not None:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), Path(single))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise loading_error("model", name_or_path, error) from error
    raise ArgumentError(
        f"'{name_or_path}' has no weights in safetensors, which ranks that share them read a layer at a time",
        where="model_name_or_path",
        fix="convert it: load it with transformers and save_pretrained()",
    )


SETTINGS = ("config.json", "generation_config.json", "adapter_config.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.bin.index.json")
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
             "additional_chat_templates/*")  # fmt: skip
REMEMBERED_BYTES = 64 << 20
"""Smaller files are always read."""
THREADS = 8


FileTimes = dict[Path, tuple[int, ...]]
"""Size, times and inode of files, as they were when they were first hashed."""


def fingerprint_model(
    name_or_path: str, *, code: bool = False, weights: bool = True, times: FileTimes | None = None
) -> str | None:
    """Return the fingerprint of a model: of a folder its configuration and weights, of a hub's model its commit.

    None without such a model, which its loading reports. ``code`` is True if Python files that come with the model are
    run, ``weights`` if weights are read besides the configuration; ``times`` as for :func:`fingerprint_files`.
    """
    if not is_folder(name_or_path):
        return _commit_of(name_or_path)
    folder = Path(name_or_path).expanduser()
    files = (_names(folder, WEIGHTS) or _names(folder, PICKLES)) if weights else []
    names = {*_names(folder, SETTINGS), *files, *(_names(folder, ("*.py",)) if code else ())}
    return fingerprint_files({name: folder / name for name in names}.items(), times)


def absolute_name(name_or_path: str) -> str:
    """Return the absolute path of a folder, and any other name unchanged: adapters are loaded from any directory."""
    return str(Path(name_or_path).expanduser().absolute()) if is_folder(name_or_path) else name_or_path


def is_folder(name_or_path: str) -> bool:
    """Return True if the name is a folder on this machine, and not a model on a hub."""
    try:
        return Path(name_or_path).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # not a file name: too long, or ``~`` of an unknown user
        return False


def fingerprint_tokenizer(name_or_path: str) -> str | None:
    """Return the fingerprint of the tokenizer's files in a folder; None without a folder."""
    if not is_folder(name_or_path):
        return None
    folder = Path(name_or_path).expanduser()
    return fingerprint_files({name: folder / name for name in _names(folder, TOKENIZER)}.items())


def fingerprint_files(files: Iterable[tuple[str, Path]], times: FileTimes | None = None) -> str:
    """Return one fingerprint of files by name and content.

    ``times`` has the files that were hashed before, and gets the others. A file that was written to since is an error,
    also if it holds the same again: it may have been read in between.
    """
    ordered = sorted(files)
    for _, path in ordered if times is not None else ():
        assert times is not None, "asked for"
        with suppress(OSError):  # hashing reports it
            status = path.stat()
            now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            if times.setdefault(path, now) != now:
                raise ArgumentError(
                    f"{path} was written to while the run was being started",
                    fix="wait until it is written, and start again",
                )
    with ThreadPoolExecutor(THREADS) as pool:  # hashing releases the interpreter's lock
        hashes = list(pool.map(_hash_of, [path for _, path in ordered]))
    digest = hashlib.sha256()
    for (name, _), content in zip(ordered, hashes, strict=True):
        digest.update(f"{name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _names(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return sorted({path.relative_to(folder).as_posix() for path in found if path.is_file()})


def _commit_of(name: str) -> str | None:
    """Return the commit of a model on a hub that is loaded by this name."""
    if escape_of(name):
        return None
    try:
        found = inside(HUB_FILE)(
            name,
            "config.json",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except Exception:  # loading the model fails alike and reports it
        return None
    return inside(HUB_COMMIT)(found, None)


def _hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, from the cache if it is there."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            cached = _remembered(path, state) if state.st_size >= REMEMBERED_BYTES else None
            if cached is not None and (text := cached.read()) is not None:  # damaged: hashed again, with a message
                return text.decode("ascii")
            content = hashlib.file_digest(file, "sha256").hexdigest()
            changed = os.fstat(file.fileno())
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be read: {error}", where="model_name_or_path", fix="use a whole copy of the model"
        ) from error
    same = (state.st_size, state.st_mtime_ns, state.st_ctime_ns) == (
        changed.st_size, changed.st_mtime_ns, changed.st_ctime_ns
    )  # fmt: skip
    if cached is not None and same and time.time() - max(state.st_mtime, state.st_ctime) > SETTLED_SECONDS:
        with suppress(OSError):
            cached.write(content.encode("ascii"))
    return content


def _remembered(path: Path, state: os.stat_result) -> CacheFile:
    """Return the cache file for the hash of a file in this state."""
    facts = (str(path.resolve()), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    key = hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()
    return CacheFile(cache_folder() / "files" / key, f"files/{key}")
