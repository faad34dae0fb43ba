"""Configurations of models: read from a checkpoint, made of a recipe's keys, and checked before a model is made.

Transformers makes a model of numbers that no model can have: one of width 0 trains to its end and learns nothing, a
dropout of 1.5 is never applied, and the rest fails later with an error about tensors. A kernel of the hub, which is
code, is never taken from a configuration.
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
from streamtune.engine.hf_names import CAUSAL_NAMES, inside
from streamtune.errors import ArgumentError, StreamTuneError, did_you_mean
from streamtune.models.folder import pickles_in


def read_config(name_or_path: str, trust_remote_code: bool) -> Any:
    """Read the configuration of a checkpoint, without kernels of a hub; return None for adapters alone."""
    folder = Path(name_or_path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return None
    keys, place = key_place(name_or_path)
    check_count(keys, place)
    try:
        config = without_hub_kernels(AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code))
    except Exception as error:  # the validators of each configuration class raise types of their own
        raise loading_error("model", name_or_path, error) from error
    check_config(config, keys, place)
    return config


def wanted_vocabulary(config: Mapping[str, Any], smallest: int) -> int:
    """Return the vocabulary size of a configuration, by default and at least the tokenizer's, ``smallest``."""
    wanted = config.get("vocab_size", smallest)
    where, fix = place_in_init("vocab_size"), "leave vocab_size out: it follows the tokenizer"
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise ArgumentError(f"'vocab_size: {str(wanted)[:60]}' is no whole number", where=where, fix=fix)
    if wanted < smallest:
        raise ArgumentError(
            f"a vocabulary of {wanted:,} is smaller than the tokenizer's {smallest:,} tokens", where=where, fix=fix
        )
    return wanted


@contextmanager
def loading(name_or_path: str) -> Iterator[None]:
    """Report whatever a damaged file makes of transformers, torch and others as an error of the checkpoint.

    Errors of ours too, such as a connection that ``--offline`` forbids: they do not name the checkpoint.
    """
    try:
        yield
    except Exception as error:
        if is_memory_error(error):
            raise
        raise loading_error("model", name_or_path, error) from error


class NotRecordedError(Exception):
    """A tensor was made by more than in-place operations on an empty one."""


@contextmanager
def making_model(keys: Mapping[str, Any]) -> Iterator[None]:
    """Report a model that cannot be made as an error of its configuration, ``keys`` as the recipe has them."""
    try:
        yield
    except (StreamTuneError, NotRecordedError):
        raise
    except Exception as error:  # classes of models check little of what they are given
        if is_memory_error(error):
            raise
        raise ArgumentError(
            f"no model of type '{keys.get('model_type')}' can be made of these values: {first_words(error)}",
            where="model.init",
            fix="fix the value; the config.json of a published model of that type shows which belong together",
        ) from error


def is_memory_error(error: BaseException) -> bool:
    """Return True for the errors by which Python and torch report that memory ran out."""
    texts = ("can't allocate memory", "out of memory", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def first_words(error: BaseException) -> str:
    """Return the first sentence of a library's error, without the stack that torch adds to some."""
    if isinstance(error, KeyError):
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return _short(text, 300)


def build_config(keys: Mapping[str, Any]) -> PreTrainedConfig:
    """Turn plain keys into a transformers configuration; refuse unknown keys, which the library would keep."""
    types = sorted(name for name in inside(CAUSAL_NAMES) if name in CONFIG_MAPPING)
    model_type = str(keys.get("model_type", ""))
    if model_type not in types:
        what = f"transformers has no causal language model of type '{model_type}'"
        fix = "choose the model_type of a causal language model, as its config.json has it: qwen3, llama ..."
        raise ArgumentError(
            what if model_type else "no model type given",
            where="model.init.model_type",
            fix=did_you_mean(model_type, types) or fix,
        )
    check_kernels(keys)
    config_class = CONFIG_MAPPING[model_type]
    check_count(keys, place_in_init)
    arguments = {key: value for key, value in keys.items() if key != "model_type"}
    try:
        config = config_class(**arguments)
    except Exception as error:  # the validators of each configuration class raise types of their own
        reason = " ".join(str(error).split())
        raise ArgumentError(
            f"{config_class.__name__} does not accept these values: {reason}", where="model.init", fix="fix the value"
        ) from error
    known_keys = {*config_class().to_dict(), *config_class.attribute_map}
    for key in arguments:
        if key not in known_keys and key in config.to_dict() and not _reads(config_class, key):
            raise ArgumentError(
                f"{config_class.__name__} has no key '{key}'",
                where=f"model.init.{key}",
                fix=did_you_mean(key, known_keys) or "remove it",
            )
    check_config(config, keys, place_in_init)
    return config


def _reads(config_class: type[Any], key: str) -> bool:
    """Return True if the code of a model reads a key that its configuration class does not name (``head_dim``)."""
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        source = inspect.getsource(sys.modules[model_class.__module__])
    except (ImportError, OSError, RuntimeError):  # a package is missing, or the source
        return False
    return re.search(rf"""config(\.|,\s*["']){re.escape(key)}\b""", source) is not None


def check_exists(name_or_path: str) -> None:
    """Refuse a name that is spelled like a local path and does not exist, before a hub is asked for it.

    The directory of a run is refused too; the message names a folder to use if there is one.
    """
    path = Path(name_or_path).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"'{_short(name_or_path)}' cannot be looked at: {reason}", where="model_name_or_path",
                            fix="give a folder that holds a model, or a name on the model hub") from error  # fmt: skip
    for file in (path / "config.json", path / "adapter_config.json"):
        if file.is_fifo() or file.is_char_device():  # reading it would not end
            raise ArgumentError(f"{file} is a pipe or a device, and no file", where="model_name_or_path",
                                fix="use a whole copy of the model")  # fmt: skip
    _check_no_run(path)
    if path.is_dir() or not (name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1):
        return
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    raise ArgumentError(
        f"there is no folder {path}",
        where="model_name_or_path",
        fix=did_you_mean(path.name, siblings) or "give a folder that holds a model, or a name on the model hub",
    )


def _check_no_run(path: Path) -> None:
    """Refuse the directory of a run, or of a run's checkpoint, in place of the model in it."""
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return
    for what, mark, inner in (("a run", "run.json", "final"), ("a checkpoint of a run", "manifest.json", "model")):
        if (path / mark).is_file():
            there = (path / inner).is_dir()
            raise ArgumentError(
                f"{path} is the directory of {what}, and not a model",
                where="model_name_or_path",
                fix=f"write {path / inner}, which is the model"
                if there
                else f"the run is not done: its checkpoints hold a model each, {path / 'checkpoints'}/step-.../model",
            )


def loading_error(kind: str, name_or_path: str, error: Exception) -> ArgumentError:
    """Return an error with the cause of a loader's failure in one sentence, and a fix."""
    first_line, where = first_words(error), "model_name_or_path"
    folder = Path(name_or_path).expanduser()
    lacks_safetensors = "safetensors" in str(error) and isinstance(error, OSError)
    fix = "check the name or folder; a gated model needs `hf auth login`; offline, give a local folder"
    if isinstance(error, UnpicklingError):  # torch advises to run it
        first_line = "its pickle holds more than tensors, which is code"
        fix = "use a copy with safetensors"
    elif "trust_remote_code" in str(error):
        fix = "set trust_remote_code: true if you trust the code that comes with it"
    elif lacks_safetensors and folder.is_dir() and not pickles_in(folder):
        first_line = "there are no weights in it"
        fix = "use a whole copy of the checkpoint, with its model.safetensors or all of its shards and their index"
    elif lacks_safetensors:
        first_line = "it has no safetensors weights; a pickle runs code when it is read"
        fix = "use a copy with safetensors; or, if you trust who made it, set allow_pickle: true"
    elif "alidation error" in str(error):  # by transformers on a config.json, which a tokenizer reads too
        _, place = key_place(name_or_path)
        field = re.search(r"field '(\w+)'", str(error))
        first_line, where = f"its config.json is not valid: {first_line}", place(field[1] if field else "")
        fix = "fix the value, or use a whole copy of the checkpoint"
    elif folder.is_dir():
        fix = "use a whole copy of the checkpoint: a file in this folder is damaged, missing or of another kind"
    elif is_offline():
        fix = "--offline reads local folders and the cache only; run it once without, or give a local folder"
    return ArgumentError(f"cannot load the {kind} '{_short(name_or_path)}': {first_line}", where=where, fix=fix)


def _short(value: Any, most: int = 100) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def check_kernels(keys: Any) -> None:
    """Refuse a configuration that would download an attention or experts kernel of the hub: it is code."""
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
        if _names_kernel(keys.get(key)):
            raise ArgumentError(
                f"'{key}: {keys[key]}' names a kernel of a hub, which is code",
                where=f"model.init.{key}",
                fix="delete the line; the engine picks the attention kernel, see `streamtune env`",
            )


def without_hub_kernels(config: Any) -> Any:
    """Remove kernels of the hub from a configuration and return it; transformers then chooses its own."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())):
        for key in ("_attn_implementation", "_experts_implementation"):
            if part is not None and _names_kernel(getattr(part, key, None)):
                setattr(part, key, None)
    return config


def _names_kernel(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_names_kernel, value.values()))
    return isinstance(value, str) and ("/" in value or ":" in value)


SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Keys whose value is at least 1. Configurations with other names for them map them to these."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LARGEST = {"num_hidden_layers": 10_000}
"""Most layers: more would be built one by one until the memory is full."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
LARGEST_SIZE = 2**31 - 1
DROPOUT = re.compile(r"(dropout(_p|_prob|_rate)?|pdrop|layerdrop)$")

Where = Callable[[str], str]
"""Returns the place of a key, for an error."""


def check_config(config: Any, given: Mapping[str, Any], where: Where) -> None:
    """Refuse sizes, heads, experts, dropouts and numbers that no model can have.

    Of several parts of ``config`` the text part is checked. ``given`` are the keys as the user or the file has them;
    other keys were derived or are defaults.
    """
    text = config.get_text_config(decoder=True)
    names: Mapping[str, str] = getattr(text, "attribute_map", None) or {}
    flat = given.get("text_config") if isinstance(given.get("text_config"), Mapping) else given
    assert isinstance(flat, Mapping)

    def refuse(key: str, what: str, fix: str) -> ArgumentError:
        written = names.get(key, key) if key not in flat else key
        return ArgumentError(f"'{written}: {_short(_value(text, key), 60)}' {what}", where=where(written), fix=fix)

    for key in SIZES:
        value, most = _value(text, key), LARGEST.get(key, LARGEST_SIZE)
        for size in value if isinstance(value, list | tuple) else () if value is None else (value,):
            if isinstance(size, bool) or not isinstance(size, int) or size < (0 if isinstance(value, list) else 1):
                raise refuse(key, "is no size of a model: it takes a whole number of at least 1", "fix the number")
            if size > most:
                raise refuse(key, f"is more than any model has: at most {most:,}", "fix the number")
    _check_heads(text, flat, names, refuse)
    chosen = _count(text, "num_experts_per_tok")
    if chosen is not None and chosen < 1 and any(_count(text, key) for key in EXPERTS):
        raise refuse("num_experts_per_tok", "leaves every token without an expert", "use at least 1")
    for key, value in _numbers(text):
        if math.isnan(value):
            raise refuse(key, "is not a number", "fix the number")
        if DROPOUT.search(key) and not 0 <= value < 1:
            raise refuse(key, "is no probability: it takes a number of at least 0 and below 1", "fix the number")


def check_count(given: Mapping[str, Any], where: Where) -> None:
    """Refuse a number of layers that no model has, before a configuration makes a list of as many entries."""
    text = given.get("text_config")
    for keys in (given, text if isinstance(text, Mapping) else {}):
        for key in LAYERS:
            count = keys.get(key)
            if isinstance(count, int) and count > LARGEST["num_hidden_layers"]:
                what = f"is more than any model has: at most {LARGEST['num_hidden_layers']:,}"
                raise ArgumentError(f"'{key}: {_short(count, 60)}' {what}", where=where(key), fix="fix the number")


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
    """Return a value of a configuration; None without one, and a list if each layer has its own."""
    try:
        return getattr(text, key, None)
    except Exception:  # transformers raises if layers differ and have no common value
        return [_value(layer, key) for layer in getattr(text, "per_layer_config", None) or ()]


def _count(text: Any, key: str) -> int | None:
    value = _value(text, key)
    return value if isinstance(value, int) else None


def _numbers(text: Any) -> Iterable[tuple[str, float]]:
    """Yield each number of the configuration with its key."""
    for key, value in vars(text).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value if isinstance(value, float) or abs(value) < 2**63 else math.inf


def place_in_init(key: str) -> str:
    return f"model.init.{key}"


def key_place(name_or_path: str) -> tuple[dict[str, Any], Where]:
    """Return the keys of a folder's ``config.json``, and a function that gives file and line of each.

    For a model on a hub the keys are empty and each place is ``model_name_or_path``.
    """
    path = Path(name_or_path).expanduser() / "config.json"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""  # reading a pipe would wait
        keys = json.loads(text)
    except (OSError, ValueError, RecursionError):
        text, keys = "", {}
    if not isinstance(keys, dict):
        text, keys = "", {}

    def where(key: str) -> str:
        match = re.search(rf'"{re.escape(key)}"\s*:', text)
        if not text:
            return "model_name_or_path"
        return f"{path}:{text.count(chr(10), 0, match.start()) + 1}" if match else str(path)

    return keys, where


def keys_of_size(config: Any, size: int) -> list[str]:
    """Return the keys of a configuration that have this value, among the keys that determine sizes of weights."""
    text = config.get_text_config(decoder=True)
    names: Mapping[str, str] = getattr(text, "attribute_map", None) or {}
    return [names.get(key, key) for key in SIZES if _count(text, key) == size]
