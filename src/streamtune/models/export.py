"""Write a model in Hugging Face format, safetensors only.

A sharded model is written one parameter after another, in files of bounded size. All ranks iterate over the parameters
together: rank 0 gathers and writes a parameter before the next parameter. The files have the format of
``save_pretrained``: names as in the checkpoint (experts unstacked, fused projections split), tied weights once,
adapters in peft's format.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from streamtune.base.adapters import base_of
from streamtune.engine.hf_names import AS_IN_FILES, HUB_FILE, SAFE_FILE, SAFE_INDEX, hf_internal, tied_weights
from streamtune.errors import ArgumentError
from streamtune.models.adapters.attach import convert_to_lora, is_converted_when_saved
from streamtune.models.adapters.initial_values import save_loftq_file
from streamtune.models.frozen_parts import trained_dtype
from streamtune.models.generation import add_eos_token_ids, eos_token_ids
from streamtune.models.model_class import is_vision_language
from streamtune.models.new_processor import processor_files
from streamtune.models.transformers4 import (
    AS_TRANSFORMERS,
    TOKENIZER_CONFIG,
    add_transformers4_names,
    transformers4_tokenizer_config,
)

if TYPE_CHECKING:  # it imports every quantiser: two seconds
    from peft import PeftModel

SHARD_BYTES = 2 << 30
"""Largest number of bytes that are collected in host memory before a weight file is written."""


class SavedTokenizer:
    """A tokenizer's files, created once and kept in memory, because training does not change them.

    Later writes do not use the tokenizer, which two threads must not use at the same time. With a vision-language
    model, the files of its base's image processor are included, or those made for a new model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: Any = None) -> None:
        self._tokenizer = tokenizer
        self._processor_files = {} if model is None else _find_processor_files(base_of(model).config)
        self._files: Mapping[Path, bytes] | None = None

    def read_files(self) -> Mapping[Path, bytes]:
        """Return the content of each file, by the file's path relative to the model's folder."""
        if self._files is None:
            with TemporaryDirectory() as name:
                folder = Path(name)
                self._tokenizer.save_pretrained(folder)
                if (path := folder / TOKENIZER_CONFIG).is_file():
                    written = json.loads(path.read_text(encoding="utf-8"))
                    settings = transformers4_tokenizer_config(written, self._tokenizer)
                    path.write_text(json.dumps(settings, **AS_TRANSFORMERS) + "\n", encoding="utf-8")
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                self._files = {path.relative_to(folder): path.read_bytes() for path in files} | self._processor_files
        return self._files

    def save_pretrained(self, folder: Path) -> None:
        for name, content in self.read_files().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def _find_processor_files(config: Any) -> dict[Path, bytes]:
    """Return the files of the image processor in a vision-language model's checkpoint, or of a new model, by name."""
    if not is_vision_language(config):
        return {}
    if not config.name_or_path:
        return {Path(name): text.encode() for name, text in processor_files(config).items()}
    found: dict[Path, bytes] = {}
    for name in PROCESSOR_FILES:
        with suppress(OSError):  # this checkpoint does not have it
            path = hf_internal(HUB_FILE)(config.name_or_path, name, _raise_exceptions_for_missing_entries=False)
            if path is not None:
                found[Path(name)] = Path(path).read_bytes()
    return found


def copy_weights(model: nn.Module, changing_weights: Sequence[nn.Parameter] | None = None) -> dict[str, Any]:
    """Return the state dict of ``model``, in which changing weights and buffers are copies in host memory.

    Frozen weights are not copied. A shared weight is one tensor in the result. ``changing_weights`` are by default the
    weights that require a gradient.
    """
    changing = {id(p) for p in changing_weights or (p for p in model.parameters() if p.requires_grad)}
    copies: dict[int, torch.Tensor] = {}

    def copy_value(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            is_frozen = isinstance(value, nn.Parameter) and id(value) not in changing
            copies[id(value)] = value.detach() if is_frozen else value.detach().to("cpu", copy=True)
        return copies[id(value)]

    state = model.state_dict(keep_vars=True)
    return {name: copy_value(value) for name, value in state.items()}


def save_pretrained(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    *,
    weights: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model and tokenizer into ``folder``.

    For a model with adapters, the adapters and the name of their base are written. Any other model is copied to host
    memory and written layer by layer, because transformers would split all stacked experts at once on their device.

    ``weights`` are the result of :func:`copy_weights` and must not be used afterwards; None writes the current weights.
    A tensor larger than ``shard_bytes`` is written to a separate file.
    """
    if not hasattr(model, "peft_config"):
        _write_model(model, tokenizer, folder, _tensors_to_save(model, weights), shard_bytes, weights)
        save_loftq_file(model, folder)
        return
    if is_converted_when_saved(model):
        folder.mkdir(parents=True, exist_ok=True)
        config, adapters = convert_to_lora(model, weights)
        save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        with _sort_module_names([config]):
            config.save_pretrained(str(folder))
    else:
        more: dict[str, Any] = {} if weights is None else {"state_dict": weights}
        # The adapters include the rows of new tokens: the rest of the embedding is not needed.
        with _sort_module_names(model.peft_config.values()):
            model.save_pretrained(folder, save_embedding_layers=False, **more)
        save_loftq_file(base_of(model), folder)
    _write_generation_config(model, folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _sort_module_names(configs: Iterable[Any]) -> Iterator[None]:
    """Context manager: sort the sets in peft's configurations into lists, so that all processes write equal files."""
    sets = [(config, key, value) for config in configs for key, value in vars(config).items() if isinstance(value, set)]
    for config, key, value in sets:
        setattr(config, key, sorted(value))
    try:
        yield
    finally:
        for config, key, value in sets:
            setattr(config, key, value)


def save_architecture(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase | SavedTokenizer, folder: Path
) -> None:
    """Write configurations and tokenizer, without weights, into ``folder`` for vLLM, which receives the weights later.

    For a model with adapters the configuration of the base is written, because vLLM receives merged weights.
    """
    base = base_of(model)
    base.config.save_pretrained(folder)
    add_transformers4_names(folder)
    _write_generation_config(model, folder)
    tokenizer.save_pretrained(folder)


def _write_generation_config(model: Any, folder: Path) -> None:
    """Write ``generation_config.json``, also for adapters: it has the EOS tokens, including a chat's end of turn."""
    base = base_of(model)
    if base.can_generate() and base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def add_saved_eos_tokens(model: Any, folder: Path) -> None:
    """Add the EOS token ids in an adapter folder's ``generation_config.json`` to the model's EOS token ids."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        ends = eos_token_ids(GenerationConfig.from_pretrained(str(folder)))
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where="RUN", fix="fix or delete it") from error
    add_eos_token_ids(model, ends)


NamedValues = Iterator[tuple[str, Tensor | None]]
"""Iterator over (name, values) of parameters; the values are None on ranks other than 0."""
GatherWeights = Callable[[Collection[str] | None], NamedValues]
"""Function that gathers parameters one by one: the parameters with these names, or all parameters for None."""


def copy_gathered_weights(model: Any, gather: GatherWeights, *, is_main: bool) -> dict[str, Tensor]:
    """Return copies in host memory of the tensors to save for ``model``; an empty dict on ranks other than 0.

    All ranks must call this, in the training thread: no other thread may gather parameters while the model trains.
    """
    with _exhaust_on_exit(gather(_names_to_gather(model))) as gathered:
        saved = _with_buffers(model, gathered) if is_main else ()
        return {name: x.detach().to("cpu", copy=True) for name, x in saved}


def save_copied_weights(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    copies: Mapping[str, Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the result of :func:`copy_gathered_weights` and the tokenizer into ``folder``; on rank 0, in any thread."""
    _write_model(model, tokenizer, folder, iter(copies.items()), shard_bytes)


def save_gathered_weights(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    gather: GatherWeights,
    *,
    is_main: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Gather a sharded model; write model and tokenizer into ``folder``. All ranks must call this.

    A write error is raised only at the end, because the other ranks wait for rank 0 at every parameter.
    """
    with _exhaust_on_exit(gather(_names_to_gather(model))) as gathered:
        if is_main:
            _write_model(model, tokenizer, folder, _with_buffers(model, gathered), shard_bytes)


@contextmanager
def _exhaust_on_exit(gathered: NamedValues) -> Iterator[NamedValues]:
    """Context manager: iterate ``gathered`` to its end even after an error: other ranks wait at each parameter."""
    try:
        yield gathered
    finally:
        for _ in gathered:
            pass


def _write_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    shard_bytes: int,
    copies: Mapping[str, Any] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "peft_config"):
        with _sort_module_names(model.peft_config.values()):
            model.save_pretrained(folder, state_dict={name: x.contiguous() for name, x in tensors})
        _write_generation_config(model, folder)
    else:
        write_shards(model, tensors, folder, shard_bytes, copies=copies)
        _write_all_but_weights(model, folder)
        add_transformers4_names(folder)
    tokenizer.save_pretrained(folder)


def _names_to_gather(model: Any) -> Collection[str] | None:
    """Return the names of the trained parameters of a model with adapters; None (all parameters) without adapters."""
    adapters = hasattr(model, "peft_config")
    return {name for name, x in model.named_parameters() if x.requires_grad} if adapters else None


def _values_on_rank_0(gathered: NamedValues) -> Iterator[tuple[str, Tensor]]:
    for name, values in gathered:
        assert values is not None, "rank 0 gets the values of every parameter"
        yield name, values


def write_shards(
    model: Any,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    shard_bytes: int,
    *,
    untied: bool = False,
    copies: Mapping[str, Any] | None = None,
) -> None:
    """Write weights as safetensors under the names of ``save_pretrained``; several files get an index.

    Args:
        model: Model without adapters, whose own weights are not read.
        tensors: Names and values of parameters and buffers, with the tensors of one layer next to each other.
        folder: Existing folder for the files.
        shard_bytes: Largest size of a file. A larger tensor is written to a separate file.
        untied: True writes all weights that the model class ties, because their values differ.
        copies: Result of :func:`copy_weights`, which says which weights are shared; None asks the model.
    """
    ties = {} if untied else _saved_name_by_tied_weight(model, copies)
    collected: dict[str, Tensor] = {}
    names_by_file: list[list[str]] = []
    total_bytes = 0

    def write_file(name: str = "") -> None:
        nonlocal collected
        save_file(collected, folder / (name or f"part-{len(names_by_file):05d}.safetensors"), metadata={"format": "pt"})
        names_by_file.append(list(collected))
        collected = {}

    for group in _group_by_layer(tensors):
        for name, values in _convert_to_saved_names(model, group, ties).items():
            if collected and sum(x.nbytes for x in collected.values()) + values.nbytes > shard_bytes:
                write_file()
            collected[name] = values.contiguous()
            total_bytes += values.nbytes
    if not names_by_file:
        write_file(SAFE_FILE)
        return
    write_file()
    file_names: dict[str, str] = {}
    for number, names in enumerate(names_by_file):
        name = SAFE_FILE.replace(".", f"-{number + 1:05d}-of-{len(names_by_file):05d}.")
        (folder / f"part-{number:05d}.safetensors").rename(folder / name)
        file_names |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_names.items()))}
    (folder / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors_to_save(model: Any, weights: Mapping[str, Any] | None) -> Iterator[tuple[str, Tensor]]:
    state = model.state_dict(keep_vars=True) if weights is None else weights
    parameters = ((first, state[first].detach().cpu()) for first, *_ in _names_by_weight(model, weights))
    return _with_buffers(model, parameters, state, weights)


def _weights_by_name(model: Any, copies: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the weights of ``model`` by all of their names; from ``copies`` (:func:`copy_weights`), if given.

    Another thread reads the copies: while an offloaded module computes, the model has other tensors in their place.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters if copies is None else {name: copies[name] for name in parameters}


def _names_by_weight(model: Any, copies: Mapping[str, Any] | None = None) -> Iterable[list[str]]:
    """Return the names of each weight; a shared weight has several."""
    names = defaultdict(list)
    for name, weight in _weights_by_name(model, copies).items():
        names[id(weight)].append(name)
    return names.values()


def _with_shared_names(
    model: Any, parameters: NamedValues, copies: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) for every name to save.

    ``parameters`` has each shared parameter once; here each further name gets a copy, because loading with the model
    class needs every name. Weights that the class ties have only one saved name.
    """
    ties = _saved_name_by_tied_weight(model, copies)
    shared = {first: [name for name in more if name not in ties] for first, *more in _names_by_weight(model, copies)}
    repeated = []
    for name, values in _values_on_rank_0(parameters):
        yield name, values
        repeated += [(shared_name, values.clone()) for shared_name in shared.get(name, ())]
    yield from repeated  # last: a layer's own weights stay next to each other


def _with_buffers(
    model: Any,
    parameters: NamedValues,
    state: Mapping[str, Any] | None = None,
    copies: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the parameters and buffers to save; a layer's buffers precede its parameters.

    ``state`` contains the buffers, by default the state of ``model``; ``copies`` as for :func:`write_shards`. A model
    with adapters saves no buffers.
    """
    if hasattr(model, "peft_config"):
        yield from _values_on_rank_0(parameters)
        return
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict(keep_vars=True) if state is None else state
    buffers = {name: x for name, x in state.items() if name not in parameter_names}
    layer = ""
    for name, values in _with_shared_names(model, parameters, copies):
        if _layer_prefix(name) != layer:
            layer = _layer_prefix(name)
            for buffer in [buffer_name for buffer_name in buffers if _layer_prefix(buffer_name) == layer]:
                yield buffer, buffers.pop(buffer).detach().cpu()
        yield name, values
    for buffer, values in buffers.items():
        yield buffer, values.detach().cpu()


def _group_by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield groups of tensors to convert together: all tensors of a layer, or a single other tensor."""
    group: dict[str, Tensor] = {}
    layer = ""
    for name, values in tensors:
        if group and _layer_prefix(name) != layer:
            yield group
            group = {}
        layer = _layer_prefix(name)
        group[name] = values
    if group:
        yield group


def _layer_prefix(name: str) -> str:
    """Return the name up to its first number, such as ``model.layers.3``; the whole name if it has no number."""
    match = re.match(r"^(?:.*?\.)?\d+(?=\.)", name)
    return match[0] if match else name


def _saved_name_by_tied_weight(model: Any, copies: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return {name: saved name} of the weights that the model class ties and that are one weight (in ``copies``)."""
    weights = _weights_by_name(model, copies)
    return {name: saved for name, saved in tied_weights(model).items() if weights.get(name) is weights.get(saved)}


def _convert_to_saved_names(model: Any, tensors: dict[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {ties.get(name, name): values for name, values in tensors.items() if name not in ignored}
    return hf_internal(AS_IN_FILES)(model, kept)


def _write_all_but_weights(model: Any, folder: Path) -> None:
    written = {path.name for path in folder.iterdir()}
    model.save_pretrained(folder / "configuration", state_dict={})
    if (dtype := trained_dtype(model)) != model.dtype:  # `dtype="auto"` then reads every weight as it was trained
        model.config.dtype = dtype
        model.config.save_pretrained(folder / "configuration")
    for path in (folder / "configuration").iterdir():
        if path.name not in written and not path.name.startswith(SAFE_FILE.split(".")[0] + "."):
            path.rename(folder / path.name)
        else:
            path.unlink()
    (folder / "configuration").rmdir()
