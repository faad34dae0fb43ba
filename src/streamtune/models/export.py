"""Write a model in Hugging Face format, safetensors only.

A sharded model is written one parameter after another, in files of bounded size. Ranks go through the parameters
together; each is gathered on rank 0, which writes it, before the next one. The files are as ``save_pretrained`` writes
them: the same names (experts unstacked, fused projections split as in the checkpoint), tied weights once, adapters in
peft's format.
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
from streamtune.engine.hf_names import AS_IN_FILES, SAFE_FILE, SAFE_INDEX, inside, tied_weights
from streamtune.errors import ArgumentError
from streamtune.models.adapters.attach import is_written_as_lora, written_adapters
from streamtune.models.adapters.start import keep_taken
from streamtune.models.generation import add_ends, ends_of
from streamtune.models.older import AS_TRANSFORMERS, TOKENIZER_CONFIG, add_old_names, old_tokenizer_config

if TYPE_CHECKING:  # it imports every quantiser: two seconds
    from peft import PeftModel

SHARD_BYTES = 2 << 30
"""Most bytes collected on the host before a file of weights is written."""


class SavedTokenizer:
    """The files of a tokenizer, made once: it does not change while a model is trained, and large ones take a second.

    Once made, they are written without the tokenizer, which two threads may not use at the same time.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._files: Mapping[Path, bytes] | None = None

    def read(self) -> Mapping[Path, bytes]:
        """Return the contents of the files, by their path in the model's folder."""
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
    """Copy the state of ``model`` to the host as it is now, except frozen weights, which are returned uncopied.

    A shared weight is copied once, and is shared in the copy. ``trained`` are the weights that may change while the
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

    A model with adapters writes the adapters and the name of their base. Any other model is written one layer after
    another, on the host: transformers' own ``save_pretrained`` splits all stacked experts at once, on their device,
    which then holds a second copy of them.

    ``weights`` come from :func:`copy_weights` and are not used afterwards; None writes the current weights. A tensor
    larger than ``shard_bytes`` is a file of its own.
    """
    if not hasattr(model, "peft_config"):
        _write(model, tokenizer, folder, _on_host(model, weights), shard_bytes)
        keep_taken(model, folder)
        return
    if is_written_as_lora(model):
        folder.mkdir(parents=True, exist_ok=True)
        config, adapters = written_adapters(model, weights)
        save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        with _names_in_order([config]):
            config.save_pretrained(str(folder))
    else:
        more: dict[str, Any] = {} if weights is None else {"state_dict": weights}
        # Rows of new tokens are among the adapters: the whole table is not needed.
        with _names_in_order(model.peft_config.values()):
            model.save_pretrained(folder, save_embedding_layers=False, **more)
        keep_taken(base_of(model), folder)
    _write_generation(model, folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _names_in_order(configs: Iterable[Any]) -> Iterator[None]:
    """Write sets of module names sorted: the order of a set differs from process to process, and so would the file."""
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
    """Write configurations and tokenizer without weights into ``folder``, for an engine that is given the weights.

    Of a model with adapters it is the base, into which the adapters are merged.
    """
    base = base_of(model)
    base.config.save_pretrained(folder)
    add_old_names(folder)
    _write_generation(model, folder)
    tokenizer.save_pretrained(folder)


def _write_generation(model: Any, folder: Path) -> None:
    """Write ``generation_config.json``, beside adapters too: it says at which tokens the trained turns end."""
    base = base_of(model)
    if base.can_generate() and base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def use_saved_ends(model: Any, folder: Path) -> None:
    """Let generation also end where ``generation_config.json`` beside saved adapters says."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        ends = ends_of(GenerationConfig.from_pretrained(str(folder)))
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where="RUN", fix="fix or delete it") from error
    add_ends(model, ends)


Found = Iterator[tuple[str, Tensor | None]]
"""Names of parameters, and on rank 0 their values."""
Weights = Callable[[Collection[str] | None], Found]
"""Goes through some parameters, or all: their names, and on rank 0 their values."""


def copy_gathered(model: Any, weights: Weights, *, is_main: bool) -> dict[str, Tensor]:
    """Copy the tensors that a save of ``model`` writes to the host of rank 0. Called by all ranks.

    The training thread calls it: no second thread may gather parameters while the model trains.
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
    """Write the result of :func:`copy_gathered`, and tokenizer, into ``folder``. Rank 0 calls it, from any thread."""
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
    """Write model and tokenizer into ``folder``. Called by all ranks.

    A failure to write is raised at the end: until then the other ranks wait for rank 0 at every parameter.
    """
    with _exhausted(weights(_saved_names(model))) as found:
        if is_main:
            _write(model, tokenizer, folder, _with_buffers(model, found), shard_bytes)


@contextmanager
def _exhausted(found: Found) -> Iterator[Found]:
    """Exhaust ``found`` on exit, also after an error on rank 0: the other ranks wait for it at every parameter."""
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
    """Return the names of trained parameters of a model with adapters; None, for all, of any other model."""
    adapters = hasattr(model, "peft_config")
    return {name for name, x in model.named_parameters() if x.requires_grad} if adapters else None


def _on_main(found: Found) -> Iterator[tuple[str, Tensor]]:
    for name, values in found:
        assert values is not None, "rank 0 has it"
        yield name, values


def write_shards(
    model: Any, saved: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int, *, untied: bool = False
) -> None:
    """Write weights in safetensors, under the names of ``save_pretrained``, with an index for several files.

    The weights of ``model``, without adapters, are not read: ``saved`` has parameters and buffers by name, tensors of
    one layer next to each other. A tensor larger than ``shard_bytes`` is a file of its own. ``untied`` writes both of
    two weights that the model ties, which differ.
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
    """Yield the parameters and buffers that are saved, each on the host."""
    state = model.state_dict(keep_vars=True) if weights is None else weights
    found = ((name, state[name].detach().cpu()) for name, _ in model.named_parameters())
    return _with_buffers(model, found, state)


def _with_shared(model: Any, found: Found) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, of which ``found`` has each once, under all saved names, each with values of its own.

    Of weights that the model's class ties, one is saved. A class that does not know that weights are shared could not
    load the others.
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
    """Yield the parameters and buffers that are saved: buffers before their layer's parameters, or at the end.

    ``state`` has the buffers; None is the state of ``model``. A model with adapters saves no buffers.
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
    """Yield groups of tensors to convert together: all of a layer, and each of the others alone."""
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
    """Return the prefix ``model.layers.3`` for any name below it; the name itself without a number."""
    match = re.match(r"^(?:.*?\.)?\d+(?=\.)", name)
    return match[0] if match else name


def _ties(model: Any) -> dict[str, str]:
    """Return the weights that the model's class ties and that are tied now, each with its saved name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: kept for name, kept in tied_weights(model).items() if named.get(name) is named.get(kept)}


def _as_saved(model: Any, group: dict[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors with names and shapes of ``save_pretrained``; only one of tied weights."""
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {ties.get(name, name): values for name, values in group.items() if name not in ignored}
    return inside(AS_IN_FILES)(model, kept)


def _write_configuration(model: Any, folder: Path) -> None:
    """Write the files of ``save_pretrained`` other than the weights."""
    written = {path.name for path in folder.iterdir()}
    model.save_pretrained(folder / "configuration", state_dict={})
    for path in (folder / "configuration").iterdir():
        if path.name not in written and not path.name.startswith(SAFE_FILE.split(".")[0] + "."):
            path.rename(folder / path.name)
        else:
            path.unlink()
    (folder / "configuration").rmdir()
