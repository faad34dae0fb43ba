"""Model configurations: read from a checkpoint or built from a recipe's keys, and checked before a model is made.

Transformers accepts impossible values: a model of width 0 trains to the end and learns nothing, and a dropout of 1.5 is
never applied. Other impossible values fail later with an error about tensors. Kernels from the hub are refused, because
a kernel is code.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from streamtune.base.privacy import is_offline
from streamtune.engine.hf_names import CAUSAL_NAMES, IMAGE_TEXT_NAMES, NEEDS_TOKEN_TYPES, hf_internal
from streamtune.errors import ArgumentError, StreamTuneError, did_you_mean
from streamtune.models.folder import pickle_names
from streamtune.models.new_processor import NEW_IMAGE_MODELS


def read_config(name_or_path: str, trust_remote_code: bool) -> Any:
    """Return the checked configuration of a checkpoint, without kernels from the hub; None if it has only adapters."""
    folder = Path(name_or_path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return None
    keys, place = read_config_json(name_or_path)
    check_layer_limit(keys, place)
    try:
        config = remove_hub_kernels(AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code))
    except Exception as error:  # the validators of each configuration class raise types of their own
        raise make_loading_error("model", name_or_path, error) from error
    check_config(config, keys, place)
    if config.model_type in NEEDS_TOKEN_TYPES:
        raise ArgumentError(
            f"models of type {config.model_type} are trained only with the type of each token (mm_token_type_ids), "
            "which recipes do not pass",
            where=place("model_type"),
            fix="train this model in Python: streamtune.stream(model) streams it with mm_token_type_ids",
        )
    return config


def requested_vocab_size(config: Mapping[str, Any], tokenizer_size: int) -> int:
    """Return the ``vocab_size`` of a configuration, or ``tokenizer_size`` (the number of tokens) if it has no such key.

    Raises:
        ArgumentError: The value is not an int, or is below ``tokenizer_size``.
    """
    text = text_keys(config)
    wanted = text.get("vocab_size", tokenizer_size)
    where = recipe_init_key("vocab_size" if text is config else "text_config.vocab_size")
    fix = "remove vocab_size: the default is the tokenizer's size"
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise ArgumentError(f"'vocab_size: {str(wanted)[:60]}' is not a whole number", where=where, fix=fix)
    if wanted < tokenizer_size:
        raise ArgumentError(
            f"vocab_size is {wanted:,}, below the tokenizer's {tokenizer_size:,} tokens", where=where, fix=fix
        )
    return wanted


def text_keys(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the language model in a recipe's configuration: ``text_config``, or all keys without it."""
    text = keys.get("text_config")
    return text if isinstance(text, Mapping) else keys


@contextmanager
def wrap_loading_errors(name_or_path: str) -> Iterator[None]:
    """Context manager: turn exceptions, such as for a damaged file, into an ArgumentError that names the checkpoint.

    StreamTune's own errors are converted too, because they do not name the checkpoint. Out-of-memory errors are not
    converted.
    """
    try:
        yield
    except Exception as error:
        if is_memory_error(error):
            raise
        raise make_loading_error("model", name_or_path, error) from error


class NotRecordedError(Exception):
    """Error: a weight's initialisation cannot be replayed, because its operations were not recorded."""


@contextmanager
def wrap_constructor_errors(keys: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: turn exceptions of a model's constructor into an ArgumentError for the key ``model.init``."""
    try:
        yield
    except (StreamTuneError, NotRecordedError):
        raise
    except Exception as error:  # model classes check few of their arguments
        if is_memory_error(error):
            raise
        raise ArgumentError(
            f"cannot build a model of type '{keys.get('model_type')}' from these values: {first_error_line(error)}",
            where="model.init",
            fix="fix the value; the config.json of a published model of that type shows values that fit together",
        ) from error


def is_memory_error(error: BaseException) -> bool:
    texts = ("can't allocate memory", "out of memory", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def first_error_line(error: BaseException) -> str:
    """Return the first line of a library's error, cut to 300 characters, without a stack trace that torch may add."""
    if isinstance(error, KeyError):
        return f"there is no entry {error}"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return _shorten(text, 300)


def check_model_type(keys: Mapping[str, Any]) -> None:
    """Raise an ArgumentError if no new model can be made of the ``model_type`` in a recipe's keys."""
    types = sorted(name for name in (*hf_internal(CAUSAL_NAMES), *NEW_IMAGE_MODELS) if name in CONFIG_MAPPING)
    model_type = str(keys.get("model_type", ""))
    if model_type in types:
        return
    problem = f"transformers has no causal language model of type '{model_type}'" if model_type else ""
    fix = did_you_mean(model_type, types)
    if model_type in hf_internal(IMAGE_TEXT_NAMES):
        problem = f"a new vision-language model of type '{model_type}' is not supported: it has no image processor"
        fix = f"use {', '.join(NEW_IMAGE_MODELS)}, or a checkpoint"
    raise ArgumentError(
        problem or "model_type is missing",
        where="model.init.model_type",
        fix=fix or "use the model_type in the config.json of a causal language model, such as qwen3 or llama",
    )


def build_config(keys: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the transformers configuration for a recipe's keys; raise an ArgumentError for unknown keys."""
    check_model_type(keys)
    model_type = keys["model_type"]
    refuse_hub_kernels(keys)
    config_class = CONFIG_MAPPING[model_type]
    check_layer_limit(keys, recipe_init_key)
    arguments = {key: value for key, value in keys.items() if key != "model_type"}
    if model_type in NEW_IMAGE_MODELS:
        inner = {key: arguments.pop(key) for key in TEXT_ONLY if key in arguments}
        arguments["text_config"] = {**inner, **_nested_keys(arguments, "text_config")}
        arguments["vision_config"] = _nested_keys(arguments, "vision_config")
    try:
        config = config_class(**arguments)
    except Exception as error:  # the validators of each configuration class raise types of their own
        reason = " ".join(str(error).split())
        raise ArgumentError(
            f"{config_class.__name__} does not accept these values: {reason}", where="model.init", fix="fix the value"
        ) from error
    _refuse_unknown_keys(config, arguments, "")
    if model_type in NEW_IMAGE_MODELS:
        for part in ("text_config", "vision_config"):
            _refuse_unknown_keys(getattr(config, part), arguments[part], f"{part}.")
    text = "text_config." if model_type in NEW_IMAGE_MODELS else ""
    check_config(config, arguments, lambda key: recipe_init_key(f"{text}{key}"))
    return config


TEXT_ONLY = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a vision-language model that belong into its ``text_config``."""


def _nested_keys(keys: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = keys.get(name, {})
    if not isinstance(value, Mapping):
        raise ArgumentError(f"'{name}' must be a mapping, found {value!r:.60}", where=f"model.init.{name}")
    return value


def _refuse_unknown_keys(config: PreTrainedConfig, written: Mapping[str, Any], prefix: str) -> None:
    config_class = type(config)
    known_keys = {*config_class().to_dict(), *config_class.attribute_map, *TEXT_ONLY}
    for key in written:
        if key not in known_keys and key in config.to_dict() and not _model_reads_key(config_class, key):
            raise ArgumentError(
                f"{config_class.__name__} has no key '{key}'",
                where=f"model.init.{prefix}{key}",
                fix=did_you_mean(key, known_keys) or "remove it",
            )


def _model_reads_key(config_class: type[Any], key: str) -> bool:
    """Return True if the model's code reads ``key`` although the configuration class does not declare the key."""
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        source = inspect.getsource(sys.modules[model_class.__module__])
    except (ImportError, OSError, RuntimeError, KeyError):  # a package or the source is missing, or it is a part
        return False
    return re.search(rf"""config(\.|,\s*["']){re.escape(key)}\b""", source) is not None


def check_path_exists(name_or_path: str) -> None:
    """Raise an ArgumentError for a local path that does not exist, before the name is looked up on a hub.

    The directory of a run is refused too; the message names the model's folder inside it.
    """
    path = Path(name_or_path).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"'{_shorten(name_or_path)}' cannot be accessed: {reason}", where="model_name_or_path",
                            fix="write a model's folder, or its name on the hub") from error  # fmt: skip
    for file in (path / "config.json", path / "adapter_config.json"):
        if file.is_fifo() or file.is_char_device():  # reading it would not end
            raise ArgumentError(f"{file} is a pipe or a device, not a file", where="model_name_or_path",
                                fix="use a complete copy of the model")  # fmt: skip
    _refuse_run_directory(path)
    if path.is_dir() or not (name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1):
        return
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    raise ArgumentError(
        f"the folder {path} does not exist",
        where="model_name_or_path",
        fix=did_you_mean(path.name, siblings) or "write a model's folder, or its name on the hub",
    )


def _refuse_run_directory(path: Path) -> None:
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return
    for what, mark, inner in (("a run", "run.json", "final"), ("a checkpoint of a run", "manifest.json", "model")):
        if (path / mark).is_file():
            raise ArgumentError(
                f"{path} is the directory of {what}, not a model",
                where="model_name_or_path",
                fix=f"use its model, {path / inner}"
                if (path / inner).is_dir()
                else f"the run is not finished; use a checkpoint's model, {path / 'checkpoints'}/step-.../model",
            )


def make_loading_error(kind: str, name_or_path: str, error: Exception) -> ArgumentError:
    """Return the ArgumentError for an exception while loading; ``kind`` is ``model`` or ``tokenizer``."""
    first_line, where = first_error_line(error), "model_name_or_path"
    folder = Path(name_or_path).expanduser()
    lacks_safetensors = "safetensors" in str(error) and isinstance(error, OSError)
    fix = "check the name or folder; a gated model needs `hf auth login`; offline, use a local folder"
    if isinstance(error, UnpicklingError):  # torch advises to run it
        first_line = "its pickle contains code, not only tensors"
        fix = "use a copy in safetensors format"
    elif "trust_remote_code" in str(error):
        fix = "set trust_remote_code: true if you trust the code in the checkpoint"
    elif lacks_safetensors and folder.is_dir() and not pickle_names(folder):
        first_line = "the folder has no weights"
        fix = "use a complete copy of the checkpoint, with its model.safetensors or all of its shards and their index"
    elif lacks_safetensors:
        first_line = "it has no safetensors weights, and reading a pickle can run code"
        fix = "use a copy in safetensors format, or set allow_pickle: true if you trust its author"
    elif "Unrecognized configuration class" in str(error):
        keys, place = read_config_json(name_or_path)
        where = place("model_type")
        first_line = f"transformers has no class that writes text for its model_type '{keys.get('model_type', '')}'"
        fix = "use a checkpoint of a causal language model or of a vision-language model"
    elif "alidation error" in str(error):  # from transformers, about config.json, which a tokenizer reads too
        _, place = read_config_json(name_or_path)
        field = re.search(r"field '(\w+)'", str(error))
        first_line, where = f"its config.json is not valid: {first_line}", place(field[1] if field else "")
        fix = "fix the value, or use a complete copy of the checkpoint"
    elif folder.is_dir():
        fix = "use a complete copy of the checkpoint: a file in this folder is damaged, missing or of the wrong kind"
    elif is_offline():
        fix = "--offline reads only local folders and the cache; run once without --offline, or use a local folder"
    return ArgumentError(f"cannot load the {kind} '{_shorten(name_or_path)}': {first_line}", where=where, fix=fix)


def _shorten(value: Any, max_chars: int = 100) -> str:
    text = str(value)
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def refuse_hub_kernels(keys: Any) -> None:
    """Raise an ArgumentError if a recipe's configuration would download an attention or experts kernel from the hub."""
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if _is_hub_kernel(keys.get(key)):
            raise ArgumentError(
                f"'{key}: {keys[key]}' would download a kernel from the hub, which is code",
                where=f"model.init.{key}",
                fix="delete the line: StreamTune chooses the attention kernel (see `streamtune env`)",
            )


def remove_hub_kernels(config: Any) -> Any:
    """Remove hub kernels from ``config`` in place and return ``config``; transformers then uses its own kernels."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())):
        for key in ("_attn_implementation", "_experts_implementation"):
            if part is not None and _is_hub_kernel(getattr(part, key, None)):
                setattr(part, key, None)
    return config


def _is_hub_kernel(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_hub_kernel, value.values()))
    return isinstance(value, str) and ("/" in value or ":" in value)


SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Keys whose value must be at least 1. A configuration's ``attribute_map`` maps these names to its own names."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LARGEST = {"num_hidden_layers": 10_000}
"""Largest allowed value by key: more layers would be built one by one until memory is exhausted."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
LARGEST_SIZE = 2**31 - 1
DROPOUT = re.compile(r"(dropout(_p|_prob|_rate)?|pdrop|layerdrop)$")

Where = Callable[[str], str]
"""Function of a key that returns the place where the key is written, for the ``where`` of an error."""


def check_config(config: Any, written_keys: Mapping[str, Any], where: Where) -> None:
    """Raise an ArgumentError for sizes, head counts, expert counts, dropouts or other numbers that no model can have.

    In a multimodal ``config``, the text model is checked. ``written_keys`` are the keys in the recipe or the file;
    other values are derived or defaults.
    """
    text = config.get_text_config(decoder=True)
    names: Mapping[str, str] = getattr(text, "attribute_map", None) or {}
    flat = written_keys.get("text_config") if isinstance(written_keys.get("text_config"), Mapping) else written_keys
    assert isinstance(flat, Mapping)

    def make_error(key: str, what: str, fix: str) -> ArgumentError:
        written = names.get(key, key) if key not in flat else key
        return ArgumentError(f"'{written}: {_shorten(_value_of(text, key), 60)}' {what}", where=where(written), fix=fix)

    for key in SIZES:
        value, most = _value_of(text, key), LARGEST.get(key, LARGEST_SIZE)
        for size in value if isinstance(value, list | tuple) else () if value is None else (value,):
            if isinstance(size, bool) or not isinstance(size, int) or size < (0 if isinstance(value, list) else 1):
                raise make_error(key, "is not a whole number of at least 1", "fix the number")
            if size > most:
                raise make_error(key, f"is too large: at most {most:,}", "fix the number")
    _check_head_counts(text, flat, names, make_error)
    chosen = _int_of(text, "num_experts_per_tok")
    if chosen is not None and chosen < 1 and any(_int_of(text, key) for key in EXPERTS):
        raise make_error("num_experts_per_tok", "leaves every token without an expert", "use at least 1")
    for key, value in _numbers_of(text):
        if math.isnan(value):
            raise make_error(key, "is not a number", "fix the number")
        if DROPOUT.search(key) and not 0 <= value < 1:
            raise make_error(key, "is not a dropout probability: at least 0 and below 1", "fix the number")


def check_layer_limit(written_keys: Mapping[str, Any], where: Where) -> None:
    """Raise an ArgumentError for more than 10,000 layers, before the configuration class makes a list of layers."""
    text = written_keys.get("text_config")
    for keys in (written_keys, text if isinstance(text, Mapping) else {}):
        for key in LAYERS:
            count = keys.get(key)
            if isinstance(count, int) and count > LARGEST["num_hidden_layers"]:
                what = f"is too large: at most {LARGEST['num_hidden_layers']:,}"
                raise ArgumentError(f"'{key}: {_shorten(count, 60)}' {what}", where=where(key), fix="fix the number")


def _check_head_counts(
    text: Any,
    keys: Mapping[str, Any],
    names: Mapping[str, str],
    make_error: Callable[[str, str, str], ArgumentError],
) -> None:
    heads, groups, width = (_int_of(text, key) for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if heads and groups and heads % groups:
        raise make_error("num_key_value_heads", f"does not divide the {heads} attention heads",
                     f"use a divisor of {heads}")  # fmt: skip
    head_dim = _int_of(text, "head_dim")
    derived = "head_dim" not in keys and names.get("head_dim", "head_dim") not in keys
    by_layer = isinstance(_value_of(text, "head_dim"), list)
    if heads and width and width % heads and derived and not by_layer and head_dim in (None, width // heads):
        name = names.get("hidden_size", "hidden_size")
        raise make_error("num_attention_heads", f"does not divide '{name}: {width}'",
                     f"use a divisor of {width}, or set head_dim if the model type has it")  # fmt: skip


def _value_of(config: Any, key: str) -> Any:
    """Return a configuration's value of ``key``; None if the key is absent, a list if layers have different values."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers raises if layers differ and have no common value
        return [_value_of(layer, key) for layer in getattr(config, "per_layer_config", None) or ()]


def _int_of(config: Any, key: str) -> int | None:
    value = _value_of(config, key)
    return value if isinstance(value, int) else None


def _numbers_of(config: Any) -> Iterable[tuple[str, float]]:
    """Yield (key, number) for each number in a configuration; integers of magnitude 2**63 or more become infinity."""
    for key, value in vars(config).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value if isinstance(value, float) or abs(value) < 2**63 else math.inf


def recipe_init_key(key: str) -> str:
    return f"model.init.{key}"


def read_config_json(name_or_path: str) -> tuple[dict[str, Any], Where]:
    """Return a folder's ``config.json`` as a dict, and a function that returns the file and line of a given key.

    For a model on a hub the dict is empty, and the function always returns ``model_name_or_path``.
    """
    path = Path(name_or_path).expanduser() / "config.json"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""  # reading a pipe would block
        keys = json.loads(text)
    except (OSError, ValueError, RecursionError):
        text, keys = "", {}
    if not isinstance(keys, dict):
        text, keys = "", {}

    def locate_key(key: str) -> str:
        match = re.search(rf'"{re.escape(key)}"\s*:', text)
        if not text:
            return "model_name_or_path"
        return f"{path}:{text.count(chr(10), 0, match.start()) + 1}" if match else str(path)

    return keys, locate_key


def config_keys_with_value(config: Any, size: int) -> list[str]:
    """Return the keys of ``SIZES`` whose value in a configuration is ``size``, for errors about a wrong shape."""
    text = config.get_text_config(decoder=True)
    names: Mapping[str, str] = getattr(text, "attribute_map", None) or {}
    return [names.get(key, key) for key in SIZES if _int_of(text, key) == size]
