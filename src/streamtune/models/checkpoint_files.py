"""Read the weights of a checkpoint a few parameters at a time, and compute fingerprints of model and tokenizer files.

Tensors in the files are renamed and converted as ``from_pretrained`` does: experts are stacked, fused projections
split.

Fingerprints are hashes of file contents, so a folder may move but not change. Several threads read the files, which are
then in the page cache for loading. Hashes of large files are cached in the user's cache directory, by the file's path,
inode, size and times (also ``ctime``, which only the system sets). So the next start on the same machine does not hash
these files again.
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
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamtune.base.paths import cache_folder, unsafe_name_reason
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
    hf_internal,
)
from streamtune.errors import ArgumentError
from streamtune.models.config import check_path_exists, make_loading_error, read_config, wrap_loading_errors
from streamtune.models.folder import READ_BACKEND, SETTLED_SECONDS, check_model_folder
from streamtune.models.weights_check import (
    check_file_dtypes,
    is_finite,
    make_not_finite_error,
    make_shape_error,
    refuse_missing_weights,
    refuse_unused_tensors,
    write_untied_embeddings,
)


def checkpoint_dtype(name_or_path: str, trust_remote_code: bool) -> torch.dtype | None:
    """Return the dtype in which ``dtype: auto`` loads a checkpoint.

    None if the checkpoint is quantised, contains only adapters, or has no safetensors.
    """
    check_path_exists(name_or_path)
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
    """Reader of the safetensors weights in a folder or on the model hub: call ``map_parameters``, then ``read``."""

    def __init__(self, name_or_path: str) -> None:
        check_path_exists(name_or_path)
        check_model_folder(name_or_path, allow_pickle=True)  # pickles are never read here
        self.name = name_or_path
        self._files = _tensor_files(name_or_path)
        """Path of the file with each tensor, by the tensor's name in the files."""
        self._conversions: dict[str, Any] = {}
        """Conversions of file tensors, each by the name of the first parameter that it produces."""
        self._conversion_of: dict[str, str] = {}
        """Key in ``_conversions`` of the conversion that produces a parameter, by parameter name."""
        self._aliases: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        """Dtype of each parameter and buffer, by name; filled by ``map_parameters``."""
        self._model: PreTrainedModel | None = None
        self._used: set[str] = set()
        """Names of the tensors in the files that the model uses."""

    def dtype(self) -> torch.dtype:
        """Return the dtype of the first floating-point tensor in the first file; float32 if it has no such tensor.

        ``dtype: auto`` means this dtype if the configuration has no dtype. ``from_pretrained`` reads the same tensor.
        """
        if self._files:
            with safe_open(min(self._files.values()), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is not a mapping
                    found: torch.dtype = file.get_slice(key)[:0].dtype
                    if found.is_floating_point:
                        return found
        return torch.float32

    def map_parameters(self, model: PreTrainedModel) -> None:
        """Map each parameter of ``model`` to the file tensors and the conversion that produce it; read no values."""
        self._model = model
        state = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self._aliases = {name: first.setdefault(id(value), name) for name, value in state.items()}
        self.dtypes = _parameter_dtypes(model, state)
        mapping = hf_internal(CONVERSIONS)(model)
        renamings = [entry for entry in mapping if isinstance(entry, hf_internal(RENAMING))]
        converters = [entry for entry in mapping if isinstance(entry, hf_internal(CONVERTER))]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, renamed = model.base_model_prefix, hf_internal(RENAMED_KEY)
        keys: dict[str, str] = {}
        for key in sorted(self._files, key=hf_internal(ORDER_OF_KEYS)):
            name, pattern = renamed(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = renamed(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
            if name not in state:
                continue  # the model does not use this tensor
            self._used.add(key)
            conversion = hf_internal(RENAMING)(key, name) if pattern is None else copy.deepcopy(by_pattern[pattern])
            if pattern is None:
                self._check_shape(key, name, state[name])
                keys[name] = key
            load = self._conversions.setdefault(name, conversion)
            load.add_tensor(name, key, pattern or key, partial(self._read_tensor, key, self.dtypes[name]))
        # `from_pretrained` sets this too: saving converts back.
        model._weight_conversions = [entry for entry in mapping if entry.was_used()]
        self._untie_different_weights(keys)
        self._map_parameters_to_conversions(state)
        refuse_unused_tensors(self.name, model, self._files.keys() - self._used)
        check_file_dtypes(self.name, model.config)

    def _untie_different_weights(self, keys: Mapping[str, str]) -> None:
        """Untie weights that the configuration ties although the files have both, with different values.

        ``keys`` are names in the files, by parameter name. ``from_pretrained`` does not tie such weights either.
        """
        assert self._model is not None
        for name, first in self._aliases.items():
            if name == first or not {name, first} <= keys.keys():
                continue
            dtype = self.dtypes[name]
            if not torch.equal(self._read_tensor(keys[name], dtype), self._read_tensor(keys[first], dtype)):
                owner, _, last = name.rpartition(".")
                parameters = self._model.get_submodule(owner)._parameters
                tied = parameters[last]
                assert tied is not None
                parameters[last] = nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
                self._aliases[name] = name
        write_untied_embeddings(self._model)

    def _check_shape(self, key: str, name: str, parameter: Tensor) -> None:
        try:
            with safe_open(self._files[key], framework="pt") as file:
                size = tuple(file.get_slice(key).get_shape())
        except (OSError, SafetensorError) as error:
            raise make_loading_error("model", self.name, error) from error
        if size != tuple(parameter.shape):
            assert self._model is not None
            raise make_shape_error(self.name, self._model.config, name, size, tuple(parameter.shape))

    def _map_parameters_to_conversions(self, state: Mapping[str, Tensor]) -> None:
        for start, load in self._conversions.items():
            names = [start]
            if isinstance(load, hf_internal(CONVERTER)) and len(load.target_patterns) > 1:
                ends = [pattern.replace("*", "") for pattern in load.target_patterns]
                used = next((end for end in ends if end in start), None)
                names += [start.replace(used, end) for end in ends if used is not None and end != used]
            for name in names:
                if name in state:
                    self._conversion_of[self._aliases[name]] = start
        ignored = _make_optional_parameter_test(self._model)
        needed = {self._aliases[name] for name in state if not ignored(self._aliases[name])}
        refuse_missing_weights(self.name, self._model, needed - self._conversion_of.keys())

    def has_parameter(self, parameter_name: str) -> bool:
        return self._aliases.get(parameter_name, parameter_name) in self._conversion_of

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return parameters and buffers by name, on the CPU, in the model's dtypes. Each name can be read only once."""
        assert self._model is not None, "map_parameters() comes first"
        wanted, tensors = list(names), dict[str, Tensor]()
        for start in dict.fromkeys(self._conversion_of[name] for name in wanted):
            load = self._conversions.pop(start, None)
            if load is None:
                continue
            with wrap_loading_errors(self.name):  # a converter may raise for tensors of unexpected sizes
                converted = load.convert(start, model=self._model, config=self._model.config)
            for name, value in converted.items():
                tensors[self._aliases.get(name, name)] = value[0] if isinstance(value, list) else value
        return {name: tensors[name].contiguous() for name in wanted}

    def _read_tensor(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a copy of the file tensor ``key`` in ``dtype``: rounding in CPU kernels depends on alignment."""
        with safe_open(self._files[key], framework="pt", backend=READ_BACKEND) as file:
            values: Tensor = file.get_tensor(key)
            if not is_finite(values):
                raise make_not_finite_error(key, values, str(self._files[key]))
            return values.to(dtype, copy=True)


def _make_optional_parameter_test(model: Any) -> Callable[[str], bool]:
    """Return a function that is True for the names of parameters which checkpoints of this model class may lack."""
    patterns = model._keys_to_ignore_on_load_missing or []
    if not patterns:
        return lambda name: False
    together = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return lambda name: together.search(name) is not None


def _parameter_dtypes(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    plan = model._get_dtype_plan(model.dtype)
    dtypes = {name: value.dtype for name, value in state.items()}
    if plan:
        pattern, groups, _ = hf_internal(ANY_OF)(list(plan))
        for name in dtypes:
            if (match := pattern.search(name)) is not None and match.lastgroup is not None:
                dtypes[name] = plan[groups[match.lastgroup]]
    return dtypes


def _tensor_files(name_or_path: str) -> dict[str, Path]:
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    try:
        single = hf_internal(HUB_FILE)(name_or_path, SAFE_FILE, **options)
        if single is not None:  # as `from_pretrained` does: an index beside it is of an earlier save
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), Path(single))
        index = hf_internal(HUB_FILE)(name_or_path, SAFE_INDEX, **options)
        if index is not None:
            listed: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            paths = {name: hf_internal(HUB_FILE)(name_or_path, name) for name in dict.fromkeys(listed.values())}
            return {key: Path(str(paths[name])) for key, name in listed.items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise make_loading_error("model", name_or_path, error) from error
    raise ArgumentError(
        f"'{name_or_path}' has no safetensors weights, which ranks need to read a sharded model layer by layer",
        where="model_name_or_path",
        fix="convert it: load it with transformers, then call save_pretrained()",
    )


SETTINGS = ("config.json", "generation_config.json", "adapter_config.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.bin.index.json")
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
             "additional_chat_templates/*")  # fmt: skip
CACHED_HASH_BYTES = 64 << 20
"""Smallest size of a file whose hash is cached; smaller files are hashed at every start."""
THREADS = 8


FileTimes = dict[Path, tuple[int, ...]]
"""Size, times and inode of each file when it was first hashed."""


def fingerprint_model(
    name_or_path: str, *, code: bool = False, weights: bool = True, times: FileTimes | None = None
) -> str | None:
    """Return the fingerprint of a model: a hash of a folder's configuration and weights, or a hub model's commit.

    None if the hub model is not found; loading the model reports the error.

    Args:
        name_or_path: Model folder, or name on the hub.
        code: True includes the folder's Python files, which ``trust_remote_code`` runs.
        weights: False leaves out the weights.
        times: Record of file sizes and times, as for :func:`fingerprint_files`.
    """
    if not is_local_folder(name_or_path):
        return _hub_commit(name_or_path)
    folder = Path(name_or_path).expanduser()
    files = (_file_names(folder, WEIGHTS) or _file_names(folder, PICKLES)) if weights else []
    names = {*_file_names(folder, SETTINGS), *files, *(_file_names(folder, ("*.py",)) if code else ())}
    return fingerprint_files({name: folder / name for name in names}.items(), times)


def make_path_absolute(name_or_path: str) -> str:
    """Return the absolute path of a local folder, so that saved adapters find their base; return hub names as given."""
    return str(Path(name_or_path).expanduser().absolute()) if is_local_folder(name_or_path) else name_or_path


def is_local_folder(name_or_path: str) -> bool:
    try:
        return Path(name_or_path).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # not a file name: too long, or ``~`` of an unknown user
        return False


def fingerprint_tokenizer(name_or_path: str) -> str | None:
    """Return the fingerprint of a folder's tokenizer files; None if the name is not a folder."""
    if not is_local_folder(name_or_path):
        return None
    folder = Path(name_or_path).expanduser()
    return fingerprint_files({name: folder / name for name in _file_names(folder, TOKENIZER)}.items())


def fingerprint_files(files: Iterable[tuple[str, Path]], times: FileTimes | None = None) -> str:
    """Return one fingerprint for several files, given as (name, path), from their names and contents.

    ``times`` records each file's size, times and inode when the file is first hashed.

    Raises:
        ArgumentError: A file cannot be read, or was written to since ``times`` recorded it, even if its content is
            equal: other content may have been read in between.
    """
    ordered = sorted(files)
    for _, path in ordered if times is not None else ():
        assert times is not None, "checked above"
        with suppress(OSError):  # hashing reports it
            status = path.stat()
            now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            if times.setdefault(path, now) != now:
                raise ArgumentError(
                    f"{path} was written to while the run was starting",
                    fix="wait until the file is complete, then start again",
                )
    with ThreadPoolExecutor(THREADS) as pool:  # hashing releases the interpreter's lock
        hashes = list(pool.map(_file_hash, [path for _, path in ordered]))
    digest = hashlib.sha256()
    for (name, _), content in zip(ordered, hashes, strict=True):
        digest.update(f"{name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _file_names(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return sorted({path.relative_to(folder).as_posix() for path in found if path.is_file()})


def _hub_commit(name: str) -> str | None:
    if unsafe_name_reason(name):
        return None
    try:
        found = hf_internal(HUB_FILE)(
            name,
            "config.json",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except Exception:  # loading the model raises the same error and reports it
        return None
    return hf_internal(HUB_COMMIT)(found, None)


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            cached = _hash_cache_file(path, state) if state.st_size >= CACHED_HASH_BYTES else None
            if cached is not None and (text := cached.read()) is not None:  # damaged: hashed again, with a message
                return text.decode("ascii")
            content = hashlib.file_digest(file, "sha256").hexdigest()
            changed = os.fstat(file.fileno())
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be read: {error}", where="model_name_or_path", fix="use a complete copy of the model"
        ) from error
    same = (state.st_size, state.st_mtime_ns, state.st_ctime_ns) == (
        changed.st_size, changed.st_mtime_ns, changed.st_ctime_ns
    )  # fmt: skip
    if cached is not None and same and time.time() - max(state.st_mtime, state.st_ctime) > SETTLED_SECONDS:
        with suppress(OSError):
            cached.write(content.encode("ascii"))
    return content


def _hash_cache_file(path: Path, status: os.stat_result) -> CacheFile:
    facts = (str(path.resolve()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    key = hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()
    return CacheFile(cache_folder() / "files" / key, f"files/{key}")
