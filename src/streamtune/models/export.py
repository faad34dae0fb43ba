"""Write a model in Hugging Face format, safetensors only.

A sharded model is written one parameter after another, in files of bounded size. All ranks go through the parameters
together: rank 0 gathers and writes a parameter before the next one. The files are equal to those that
``save_pretrained`` writes: the same names (experts unstacked, fused projections split as in the checkpoint), tied
weights once, adapters in peft's format.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from streamtune.base.adapters import base_of
from streamtune.engine.hf_names import AS_IN_FILES, SAFE_FILE, SAFE_INDEX, hf_internal, tied_weights
from streamtune.errors import ArgumentError
from streamtune.models.adapters.attach import is_written_as_lora, written_adapters
from streamtune.models.adapters.start import save_taken
from streamtune.models.generation import add_ends, ends_of
from streamtune.models.older import AS_TRANSFORMERS, TOKENIZER_CONFIG, add_old_names, old_tokenizer_config

if TYPE_CHECKING:  # it imports every quantiser: two seconds
    from peft import PeftModel

SHARD_BYTES = 2 << 30
"""Most bytes collected in host memory before a weight file is written."""


class SavedTokenizer:
    """Contents of a tokenizer's files, made once: training does not change them, and a large tokenizer takes a second.

    Later writes do not use the tokenizer, which two threads must not use at the same time.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._files: Mapping[Path, bytes] | None = None

    def read(self) -> Mapping[Path, bytes]:
        """Return the content of each file, by its path relative to the model's folder."""
        if self._files is None:
            with TemporaryDirectory() as name:
                folder = Path(name)
                self._tokenizer.save_pretrained(folder)
                if (path := folder / TOKENIZER_CONFIG).is_file():
                    written = json.loads(path.read_text(encoding="utf-8"))
                    settings = old_tokenizer_config(written, self._tokenizer)
                    path.write_text(json.dumps(settings, **AS_TRANSFORMERS) + "\n", encoding="utf-8")
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                self._files = {path.relative_to(folder): path.read_bytes() for path in files}
        return self._files

    def save_pretrained(self, folder: Path) -> None:
        for name, content in self.read().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def copy_weights(model: nn.Module, trained: Sequence[nn.Parameter] | None = None) -> dict[str, Any]:
    """Return a copy of the state of ``model`` in host memory; frozen weights are returned without copying.

    A shared weight is copied once and stays shared in the copy. ``trained`` are the weights that may change while the
    copy is used; None takes the weights that require a gradient now.
    """
    changing = {id(p) for p in trained or (p for p in model.parameters() if p.requires_grad)}
    copies: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, nn.Parameter) and id(value) not in changing:
            return value.detach()
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        return copies[id(value)]

    state = model.state_dict(keep_vars=True)
    return {name: copied(value) for name, value in state.items()}


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
    memory and written layer by layer. The ``save_pretrained`` of transformers would split all stacked experts at once,
    on their device, which would then hold a second copy of them.

    ``weights`` come from :func:`copy_weights` and must not be used afterwards; None writes the current weights. A
    tensor larger than ``shard_bytes`` gets a file of its own.
    """
    if not hasattr(model, "peft_config"):
        _write(model, tokenizer, folder, _on_host(model, weights), shard_bytes)
        save_taken(model, folder)
        return
    if is_written_as_lora(model):
        folder.mkdir(parents=True, exist_ok=True)
        config, adapters = written_adapters(model, weights)
        save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        with _names_in_order([config]):
            config.save_pretrained(str(folder))
    else:
        more: dict[str, Any] = {} if weights is None else {"state_dict": weights}
        # The adapters include the rows of new tokens: the rest of the embedding is not needed.
        with _names_in_order(model.peft_config.values()):
            model.save_pretrained(folder, save_embedding_layers=False, **more)
        save_taken(base_of(model), folder)
    _write_generation(model, folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _names_in_order(configs: Iterable[Any]) -> Iterator[None]:
    """Context manager: replace sets of module names by sorted lists, so that every process writes the same file."""
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

    For a model with adapters this is the configuration of the base, into which the adapters are merged.
    """
    base = base_of(model)
    base.config.save_pretrained(folder)
    add_old_names(folder)
    _write_generation(model, folder)
    tokenizer.save_pretrained(folder)


def _write_generation(model: Any, folder: Path) -> None:
    """Write ``generation_config.json``, also beside adapters: it has the tokens that end a turn in training."""
    base = base_of(model)
    if base.can_generate() and base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def use_saved_ends(model: Any, folder: Path) -> None:
    """Add the end tokens in the ``generation_config.json`` beside saved adapters to the model's end tokens."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        ends = ends_of(GenerationConfig.from_pretrained(str(folder)))
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where="RUN", fix="fix or delete it") from error
    add_ends(model, ends)


Found = Iterator[tuple[str, Tensor | None]]
"""Iterator over (name, values) of parameters; the values are None on ranks other than 0."""
Weights = Callable[[Collection[str] | None], Found]
"""Function that gathers the named parameters, or all for None, one by one."""


def copy_gathered(model: Any, weights: Weights, *, is_main: bool) -> dict[str, Tensor]:
    """Return, on rank 0, a copy in host memory of the tensors that a save of ``model`` writes.

    All ranks must call this, in the training thread: no other thread may gather parameters while the model trains.
    """
    with _exhausted(weights(_saved_names(model))) as found:
        saved = _with_buffers(model, found) if is_main else ()
        return {name: x.detach().to("cpu", copy=True) for name, x in saved}


def save_copied(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    copies: Mapping[str, Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the result of :func:`copy_gathered` and the tokenizer into ``folder``; on rank 0, in any thread."""
    _write(model, tokenizer, folder, iter(copies.items()), shard_bytes)


def save_gathered(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    weights: Weights,
    *,
    is_main: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Gather a sharded model and write it and the tokenizer into ``folder``. All ranks must call this.

    A write error is raised only at the end, because the other ranks wait for rank 0 at every parameter.
    """
    with _exhausted(weights(_saved_names(model))) as found:
        if is_main:
            _write(model, tokenizer, folder, _with_buffers(model, found), shard_bytes)


@contextmanager
def _exhausted(found: Found) -> Iterator[Found]:
    """Context manager: on exit exhaust ``found``, even after an error, as other ranks wait at every parameter."""
    try:
        yield found
    finally:
        for _ in found:
            pass


def _write(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | SavedTokenizer,
    folder: Path,
    saved: Iterator[tuple[str, Tensor]],
    shard_bytes: int,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "peft_config"):
        with _names_in_order(model.peft_config.values()):
            model.save_pretrained(folder, state_dict={name: x.contiguous() for name, x in saved})
        _write_generation(model, folder)
    else:
        write_shards(model, saved, folder, shard_bytes)
        _write_configuration(model, folder)
        add_old_names(folder)
    tokenizer.save_pretrained(folder)


def _saved_names(model: Any) -> Collection[str] | None:
    """Return the names of the trained parameters of a model with adapters; None (all) for any other model."""
    adapters = hasattr(model, "peft_config")
    return {name for name, x in model.named_parameters() if x.requires_grad} if adapters else None


def _on_main(found: Found) -> Iterator[tuple[str, Tensor]]:
    for name, values in found:
        assert values is not None, "rank 0 has it"
        yield name, values


def write_shards(
    model: Any, saved: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int, *, untied: bool = False
) -> None:
    """Write weights as safetensors under the names of ``save_pretrained``; several files get an index.

    Args:
        model: Model without adapters, whose own weights are not read.
        saved: Names and values of parameters and buffers, with the tensors of one layer next to each other.
        folder: Folder of the files, which exists.
        shard_bytes: Most bytes of a file. A larger tensor gets a file of its own.
        untied: True writes all weights that the model class ties, because their values differ.
    """
    ties = {} if untied else _ties(model)
    held: dict[str, Tensor] = {}
    written: list[list[str]] = []
    total = 0

    def flush(name: str = "") -> None:
        nonlocal held
        save_file(held, folder / (name or f"part-{len(written):05d}.safetensors"), metadata={"format": "pt"})
        written.append(list(held))
        held = {}

    for group in _layers(saved):
        for name, values in _as_saved(model, group, ties).items():
            if held and sum(x.nbytes for x in held.values()) + values.nbytes > shard_bytes:
                flush()
            held[name] = values.contiguous()
            total += values.nbytes
    if not written:
        flush(SAFE_FILE)
        return
    flush()
    places: dict[str, str] = {}
    for number, names in enumerate(written):
        name = SAFE_FILE.replace(".", f"-{number + 1:05d}-of-{len(written):05d}.")
        (folder / f"part-{number:05d}.safetensors").rename(folder / name)
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _on_host(model: Any, weights: Mapping[str, Any] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and host tensors of the parameters and buffers to save."""
    state = model.state_dict(keep_vars=True) if weights is None else weights
    found = ((name, state[name].detach().cpu()) for name, _ in model.named_parameters())
    return _with_buffers(model, found, state)


def _with_shared(model: Any, found: Found) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters in ``found``, which has each once, under all names to save; each name gets its own copy.

    Weights that the model class ties are saved under one name. Other shared weights are saved under every name: the
    class does not know that they are shared, and loading needs all of them.
    """
    ties, names = _ties(model), defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    shared = {first: [name for name in more if name not in ties] for first, *more in names.values()}
    copies = []
    for name, values in _on_main(found):
        yield name, values
        copies += [(other, values.clone()) for other in shared.get(name, ())]
    yield from copies  # last: a layer's own weights stay next to each other


def _with_buffers(model: Any, found: Found, state: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers to save; buffers come before their layer's parameters, or last.

    ``state`` has the buffers; None takes the state of ``model``. A model with adapters saves no buffers.
    """
    if hasattr(model, "peft_config"):
        yield from _on_main(found)
        return
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict(keep_vars=True) if state is None else state
    buffers = {name: x for name, x in state.items() if name not in parameters}
    layer = ""
    for name, values in _with_shared(model, found):
        if _layer(name) != layer:
            layer = _layer(name)
            for buffer in [each for each in buffers if _layer(each) == layer]:
                yield buffer, buffers.pop(buffer).detach().cpu()
        yield name, values
    for buffer, values in buffers.items():
        yield buffer, values.detach().cpu()


def _layers(found: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield groups of tensors to convert together: all tensors of a layer, or a single other tensor."""
    held: dict[str, Tensor] = {}
    layer = ""
    for name, values in found:
        if held and _layer(name) != layer:
            yield held
            held = {}
        layer = _layer(name)
        held[name] = values
    if held:
        yield held


def _layer(name: str) -> str:
    """Return the layer of a name, such as ``model.layers.3``; the name itself if it has no number."""
    match = re.match(r"^(?:.*?\.)?\d+(?=\.)", name)
    return match[0] if match else name


def _ties(model: Any) -> dict[str, str]:
    """Return the saved name of each weight that the model class ties and that is tied now."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: saved for name, saved in tied_weights(model).items() if named.get(name) is named.get(saved)}


def _as_saved(model: Any, group: dict[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors with the names and shapes of ``save_pretrained``, tied weights once."""
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {ties.get(name, name): values for name, values in group.items() if name not in ignored}
    return hf_internal(AS_IN_FILES)(model, kept)


def _write_configuration(model: Any, folder: Path) -> None:
    """Write all files of ``save_pretrained`` except the weights."""
    written = {path.name for path in folder.iterdir()}
    model.save_pretrained(folder / "configuration", state_dict={})
    for path in (folder / "configuration").iterdir():
        if path.name not in written and not path.name.startswith(SAFE_FILE.split(".")[0] + "."):
            path.rename(folder / path.name)
        else:
            path.unlink()
    (folder / "configuration").rmdir()
