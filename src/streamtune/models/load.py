"""A causal language model, from a checkpoint (:func:`load_model`) or from a configuration (:func:`init_model`)."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from streamtune.base.privacy import is_offline
from streamtune.engine.hf_names import CAUSAL_NAMES, inside
from streamtune.errors import ArgumentError, StreamTuneError, did_you_mean
from streamtune.models.adapters.loftq import QuantisationChange
from streamtune.models.positions import RopeChange, position_limit, pretrained_positions
from streamtune.models.quantize import logical_size, quantize
from streamtune.models.reading import unchanged, unmapped
from streamtune.models.recorded import NotRecordedError
from streamtune.models.safety import (
    check_config,
    check_count,
    check_folder,
    check_kernels,
    key_place,
    pickles_in,
    place_in_init,
    without_hub_kernels,
)
from streamtune.models.weights_check import DRAFT_LAYERS, check_dtypes, check_finite, check_quantised, check_report

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelOptions:
    """Options by which a model is made, from a checkpoint or from a configuration."""

    dtype: str = "auto"
    """Dtype of the weights: ``float32``, ``bfloat16``, ``float16``, or ``auto``: the checkpoint's dtype, and float32
    for a configuration without one."""
    quantization: str | None = None
    """``nf4`` or ``int8`` of frozen layers and experts, see ``models.quantize``; None leaves them."""
    rope: RopeChange | None = None
    """A change to the positions of the configuration."""
    change: QuantisationChange | None = None
    """A change of the weights before they are quantised."""


DEFAULTS = ModelOptions()


@dataclass(frozen=True)
class ParameterCount:
    """The number of parameters of a model, shared ones counted once."""

    total: int
    trainable: int


def count_parameters(model: torch.nn.Module) -> ParameterCount:
    """Count all parameters and those that require a gradient; a quantised one counts as the weights it stands for."""
    sizes = [(count_weights(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return ParameterCount(sum(n for n, _ in sizes), sum(n for n, trainable in sizes if trainable))


def count_weights(parameter: torch.Tensor) -> int:
    """Return the number of weights in a parameter, of which this rank may hold only a part."""
    shared: int | None = getattr(parameter, "ds_numel", None)  # ZeRO-3 leaves it empty
    return logical_size(parameter) if shared is None else shared


def check_positions(model: Any, longest: int, *, training: bool = True) -> str | None:
    """Refuse rows of ``longest`` tokens if they exceed the positions that ``model`` was made for.

    Rotary and other computed positions go on past ``max_position_embeddings``, though the model was not trained on
    them; a learnt table ends there.

    Args:
        model: Its configuration is read.
        longest: Tokens of the longest row.
        training: The rows are trained on. Others are measured on rotary positions that the model has never seen, with
            the warning that is returned.

    Raises:
        ArgumentError: The rows are longer than the positions that the model reaches, its scaling included.
    """
    limit = position_limit(model.config)
    if limit is None or longest <= limit:
        return None
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        table = isinstance(module, torch.nn.Embedding) and module is not words
        if table and limit <= module.num_embeddings <= limit + 2:  # some keep two rows for padding
            raise ArgumentError(
                f"the longest row has {longest:,} tokens; the model's table of positions ({name}) ends at {limit:,}",
                where="max_length",
                mend=f"set max_length: {limit} and overlength: split, or choose a model with rotary positions",
            )
    what = f"the longest row has {longest:,} tokens; the model was made for {limit:,} (max_position_embeddings)"
    original = pretrained_positions(model.config)
    if original is not None and original < limit:
        what = (
            f"the longest row has {longest:,} tokens; the model was made for {original:,} positions, and the scaling "
            f"of its configuration or of rope_scaling reaches {limit:,}"
        )
    if not training or not getattr(model.config.get_text_config(decoder=True), "rope_parameters", None):
        return f"{what}: it goes on, at positions it has never seen"
    factor = math.ceil(longest / (original or limit))
    raise ArgumentError(
        what,
        where="max_length",
        mend=f"extend its positions: rope_scaling: {{rope_type: yarn, factor: {factor}}}; or train "
        f"at positions it has never seen: rope_scaling: {{rope_type: default}}; or set max_length: {limit}",
    )


def describe_positions(model: Any, longest: int) -> str | None:
    """Return one line for rows of ``longest`` tokens over the positions of a model, with what to write; else None.

    Args:
        model: Its configuration is read, and its modules; it may have no weights.
        longest: Tokens of the longest row.
    """
    try:
        return check_positions(model, longest)
    except ArgumentError as error:
        return f"{error.what}: a run refuses such rows; {error.mend}"


def left_out(model: Any) -> str | None:
    """Return a warning if the checkpoint of ``model`` has layers that ``transformers`` does not load, else None.

    These layers predict several tokens ahead. ``transformers`` loads them as a separate model without a loss, to draft
    tokens in generation. Its causal language models ignore their weights without a warning.
    """
    config = model.config.get_text_config(decoder=True)
    counts = {name: getattr(config, name, None) for name in DRAFT_LAYERS}
    found = [(name, count) for name, count in counts.items() if isinstance(count, int) and count > 0]
    if not found or not model.config.name_or_path:
        return None
    name, count = found[0]
    return (
        f"the checkpoint has layers for multi-token prediction ({name}: {count}); transformers loads the model without "
        "them, so they are not trained, and not in what is saved"
    )


def load_model(
    name_or_path: str,
    options: ModelOptions = DEFAULTS,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint, by hub name or from a local folder.

    Args:
        name_or_path: A folder with ``config.json`` and safetensors, or a name on the model hub.
        options: Dtype, quantisation and positions.
        device: Device of the weights.
        trust_remote_code: Allow code that comes with the checkpoint to run.
        allow_pickle: Allow weights in a pickle; only tensors are read from it.

    Raises:
        ArgumentError: There is no such checkpoint, it is not safe to read (``models.safety``), it lacks
            weights that the model needs, cannot be quantised so, or was written to while it was read.
    """
    check_exists(name_or_path)
    with unchanged(name_or_path), unmapped(name_or_path):
        safetensors = check_folder(name_or_path, allow_pickle=allow_pickle)
        config = read_config(name_or_path, trust_remote_code)
        if options.rope is not None and config is not None:
            options.rope.apply(config)
        check_quantised(name_or_path, config, options.quantization, device)
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                name_or_path,
                config=config,
                dtype="auto" if options.dtype == "auto" else DTYPES[options.dtype],
                trust_remote_code=trust_remote_code,
                use_safetensors=True if safetensors else None,  # False would refuse them where there are both
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except Exception as error:  # whatever a damaged file makes of transformers, torch and others
            if is_memory_error(error):
                raise
            raise loading_error("model", name_or_path, error) from error
        check_report(name_or_path, model, report)
        check_dtypes(name_or_path, config)
        check_finite(model, name_or_path)
        if options.quantization is not None:  # before the weights are copied: mapped ones are read layer by layer
            quantize(model, options.quantization, torch.device(device), change=options.change)
        return _own_weights(model.to(device))


def read_config(name_or_path: str, trust_remote_code: bool) -> Any:
    """Read the configuration of a checkpoint, without kernels of a hub; return None for adapters, which have none.

    Raises:
        ArgumentError: There is no configuration, it is not valid, or no model can have its numbers.
    """
    folder = Path(name_or_path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return None
    keys, place = key_place(name_or_path)
    check_count(keys, place)
    try:
        found = without_hub_kernels(AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code))
    except Exception as error:  # the validators of each configuration class raise types of their own
        raise loading_error("model", name_or_path, error) from error
    check_config(found, keys, place)
    return found


def _own_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy weights and buffers that may still be memory-mapped pages of the file they were read from.

    Such pages have the alignment of the file, and its content: the training would follow what is written to it. Kernels
    of the CPU may round differently for another alignment, and a resumed run must give exactly the losses of one that
    was never interrupted.
    """
    copies: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for name, buffer in module._buffers.items():
                in_file = buffer is not None and name not in module._non_persistent_buffers_set
                if in_file and buffer.device.type == "cpu":
                    copies.setdefault(id(buffer), buffer.clone(memory_format=torch.preserve_format))
                    module._buffers[name] = copies[id(buffer)]
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and type(parameter) is torch.nn.Parameter:  # a quantised one is new
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
    return model


def init_model(
    config: Mapping[str, Any],
    options: ModelOptions = DEFAULTS,
    *,
    vocab_size: int,
    token_ids: Mapping[str, int],
    device: str = "cpu",
    seed: int,
) -> PreTrainedModel:
    """Build a model from a configuration, with random weights. Needs no download.

    Args:
        config: ``model_type`` and keys of its transformers configuration; other keys have the defaults of that class.
        options: Dtype, quantisation and positions.
        vocab_size: Size of the tokenizer. The vocabulary is this size, unless ``config`` asks for a larger one.
        token_ids: ``bos_token_id``, ``eos_token_id``, ``pad_token_id`` of the tokenizer.
        device: Device of the weights. They are drawn on the CPU, so they do not depend on it.
        seed: Seed of the weights. The caller's random state is left as it was.

    Raises:
        ArgumentError: An unknown model type or key, a wrong value, a vocabulary smaller than the tokenizer's, or a
            model that cannot be quantised.
    """
    keys = {**token_ids, **config, "vocab_size": wanted_vocabulary(config, vocab_size)}
    hf_config = build_config(keys)
    if options.rope is not None:
        options.rope.apply(hf_config)
    chosen = torch.float32 if options.dtype == "auto" else DTYPES[options.dtype]
    with torch.random.fork_rng(), making_model(config):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=chosen)
    check_finite(model, where="model.init")
    if options.quantization is not None:
        quantize(model, options.quantization, torch.device(device), change=options.change)
    return model.to(device)


def wanted_vocabulary(config: Mapping[str, Any], smallest: int) -> int:
    """Return the size of the vocabulary that a configuration asks for; that of the tokenizer where it does not say.

    Raises:
        ArgumentError: It asks for one that is no number, or smaller than the tokenizer's.
    """
    wanted = config.get("vocab_size", smallest)
    where, mend = place_in_init("vocab_size"), "leave vocab_size out: it follows the tokenizer"
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise ArgumentError(f"'vocab_size: {str(wanted)[:60]}' is no whole number", where=where, mend=mend)
    if wanted < smallest:
        raise ArgumentError(
            f"a vocabulary of {wanted:,} is smaller than the tokenizer's {smallest:,} tokens", where=where, mend=mend
        )
    return wanted


@contextmanager
def making_model(keys: Mapping[str, Any]) -> Iterator[None]:
    """Report a model that cannot be made from a configuration as an error of the configuration.

    Args:
        keys: The configuration as the recipe has it.

    Raises:
        ArgumentError: Making it failed, and not for lack of memory.
    """
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
            mend="mend the value; the config.json of a published model of that type shows which belong together",
        ) from error


def is_memory_error(error: BaseException) -> bool:
    """Return True for the ways in which Python and torch report that memory ran out."""
    texts = ("can't allocate memory", "out of memory", "not enough memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def first_words(error: BaseException) -> str:
    """Return the first sentence of an error of a library, without the stack that torch adds to some."""
    if isinstance(error, KeyError):
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text if len(text) <= 300 else f"{text[:297]}..."


def build_config(keys: Mapping[str, Any]) -> PreTrainedConfig:
    """Turn plain keys into a transformers configuration; refuse unknown keys, which the library itself would keep.

    Raises:
        ArgumentError: An unknown model type or key, or a value its class does not take.
    """
    known_types = sorted(name for name in inside(CAUSAL_NAMES) if name in CONFIG_MAPPING)
    model_type = str(keys.get("model_type", ""))
    if model_type not in known_types:
        hint = did_you_mean(model_type, known_types)
        raise ArgumentError(
            f"transformers has no causal language model of type '{model_type}'"
            if model_type
            else "no model type given",
            where="model.init.model_type",
            mend=hint
            or "choose the model_type of a causal language model, as its config.json has it: qwen3, llama ...",
        )
    check_kernels(keys)
    config_class = CONFIG_MAPPING[model_type]
    check_count(keys, place_in_init)
    arguments = {key: value for key, value in keys.items() if key != "model_type"}
    try:
        config = config_class(**arguments)
    except Exception as error:  # The validators of each configuration class raise types of their own.
        reason = " ".join(str(error).split())
        raise ArgumentError(
            f"{config_class.__name__} does not accept these values: {reason}", where="model.init", mend="mend the value"
        ) from error
    known = {*config_class().to_dict(), *config_class.attribute_map}
    for key in arguments:
        if key not in known and key in config.to_dict() and not _reads(config_class, key):
            raise ArgumentError(
                f"{config_class.__name__} has no key '{key}'",
                where=f"model.init.{key}",
                mend=did_you_mean(key, known) or "remove it",
            )
    check_config(config, keys, place_in_init)
    return config


def _reads(config_class: type[Any], key: str) -> bool:
    """Return True if the code of a model reads a key that its configuration class does not name (``head_dim``)."""
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        source = inspect.getsource(sys.modules[model_class.__module__])
    except (ImportError, OSError, RuntimeError):  # of a package that it needs, or without its source
        return False
    return re.search(rf"""config(\.|,\s*["']){re.escape(key)}\b""", source) is not None


def check_exists(name_or_path: str) -> None:
    """Refuse a name that is spelled like a local path and does not exist, before a hub is asked for it.

    Raises:
        ArgumentError: There is no such folder, or it is that of a run; the message names one to use if there is one.
    """
    path = Path(name_or_path).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"'{_short(name_or_path)}' cannot be looked at: {reason}", where="model_name_or_path",
                            mend="give a folder that holds a model, or a name on the model hub") from error  # fmt: skip
    for file in (path / "config.json", path / "adapter_config.json"):
        if file.is_fifo() or file.is_char_device():  # reading it would not end
            raise ArgumentError(f"{file} is a pipe or a device, and no file", where="model_name_or_path",
                                mend="use a whole copy of the model")  # fmt: skip
    _check_no_run(path)
    if path.is_dir() or not (name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1):
        return
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    raise ArgumentError(
        f"there is no folder {path}",
        where="model_name_or_path",
        mend=did_you_mean(path.name, siblings) or "give a folder that holds a model, or a name on the model hub",
    )


def _check_no_run(path: Path) -> None:
    """Refuse the directory of a run, or of a run's checkpoint, given in place of the model in it.

    Raises:
        ArgumentError: ``path`` is such a directory; the message names the folder that holds the model.
    """
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return
    for what, mark, inner in (("a run", "run.json", "final"), ("a checkpoint of a run", "manifest.json", "model")):
        if (path / mark).is_file():
            there = (path / inner).is_dir()
            raise ArgumentError(
                f"{path} is the directory of {what}, and not a model",
                where="model_name_or_path",
                mend=f"write {path / inner}, which is the model"
                if there
                else f"the run is not done: its checkpoints hold a model each, {path / 'checkpoints'}/step-.../model",
            )


def loading_error(kind: str, name_or_path: str, error: Exception) -> ArgumentError:
    """Return an error that gives the cause of a loader's failure in one sentence, and what to do about it."""
    first_line, where = first_words(error), "model_name_or_path"
    mend = "check the name or folder; a gated model needs `hf auth login`; offline, give a local folder"
    if isinstance(error, UnpicklingError):  # torch advises to run it
        first_line = "its pickle holds more than tensors, which is code"
        mend = "use a copy with safetensors"
    elif "trust_remote_code" in str(error):
        mend = "set trust_remote_code: true if you trust the code that comes with it"
    elif _lacks_weights(error, name_or_path):
        first_line = "there are no weights in it"
        mend = "use a whole copy of the checkpoint, with its model.safetensors or all of its shards and their index"
    elif "safetensors" in str(error) and isinstance(error, OSError):
        first_line = "it has no safetensors weights; a pickle runs code when it is read"
        mend = "use a copy with safetensors; or, if you trust who made it, set allow_pickle: true"
    elif "alidation error" in str(error):  # transformers' of a config.json, which a tokenizer reads too
        _, place = key_place(name_or_path)
        field = re.search(r"field '(\w+)'", str(error))
        first_line, where = f"its config.json is not valid: {first_line}", place(field[1] if field else "")
        mend = "mend the value, or use a whole copy of the checkpoint"
    elif Path(name_or_path).expanduser().is_dir():
        mend = "use a whole copy of the checkpoint: a file in this folder is damaged, missing or of another kind"
    elif is_offline():
        mend = "--offline reads local folders and the cache only; run it once without, or give a local folder"
    return ArgumentError(f"cannot load the {kind} '{_short(name_or_path)}': {first_line}", where=where, mend=mend)


def _lacks_weights(error: Exception, name_or_path: str) -> bool:
    """Return True if a loader found no safetensors in a folder that has no pickle either."""
    folder = Path(name_or_path).expanduser()
    return "safetensors" in str(error) and isinstance(error, OSError) and folder.is_dir() and not pickles_in(folder)


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
