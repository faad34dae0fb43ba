"""A model whose weights are provided later, one module at a time, so that ranks can share them without a whole copy.

The model is made with its parameters on ``meta`` (buffers are real). Its weights are in a :class:`Deferred`:
those of a checkpoint, read from its safetensors and converted as ``transformers`` converts them, or those the plain
model would have drawn at random. The code that shards the weights reads those of one module, distributes them, and goes
on to the next module: no rank holds the whole model.

    model = defer_load("Qwen/Qwen3-8B", ModelOptions(dtype="bfloat16"))
    deferred_of(model).read(["model.layers.0.mlp.up_proj.weight", ...])     # name -> tensor on the CPU
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamtune.base.adapters import base_of
from streamtune.models.blueprint import read_plain_config
from streamtune.models.checkpoint_files import CheckpointFiles
from streamtune.models.load import (
    DEFAULTS,
    DTYPES,
    ModelOptions,
    build_config,
    is_memory_error,
    loading_error,
    making_model,
    wanted_vocabulary,
)
from streamtune.models.recorded import NotRecordedError, RecordedInit

ATTRIBUTE = "_streamtune_deferred"


class WeightSource(Protocol):
    """A source of weights by name."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors of these parameters and buffers, on the CPU. A source may free its own copy afterwards."""
        ...


class Deferred:
    """The weights of a model that is on ``meta``.

    Args:
        model: Without adapters; they may be put into it afterwards.
        open_source: Makes the source; called at the first read, which happens on one rank only.
        dtypes: Dtypes of parameters that come in another one than the model was made in.
        note: A remark for the user on how the weights are made, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        open_source: Callable[[], WeightSource],
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        note: str | None = None,
    ) -> None:
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._open: Callable[[], WeightSource] | None = open_source
        self._source: WeightSource | None = None
        self.note = note
        first: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = first.setdefault(id(parameter), f"{prefix}.{key}" if prefix else key)
                    self._places.setdefault(name, []).append((module, key))
        self._awaited = set(self._places)
        for name in self._places:
            old = self.shape(name)
            dtype = (dtypes or {}).get(name, old.dtype)
            self._put(name, nn.Parameter(old.detach().to("meta", dtype), requires_grad=old.requires_grad))
        setattr(model, ATTRIBUTE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model keeps its parameters on ``meta`` and has no deferred weights."""
        return

    def names_in(self, module: nn.Module, recurse: bool = True) -> list[str]:
        """Return the parameters of a module (and of those below it) whose weights came, or are to come, from here."""
        below = {id(each) for each in (module.modules() if recurse else (module,))}
        return [name for name, places in self._places.items() if any(id(owner) in below for owner, _ in places)]

    def awaits(self, name: str) -> bool:
        """Return True if a parameter has no values yet. One that is used in several places gets them once."""
        return name in self._awaited

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the values of parameters, on the CPU.

        Raises:
            ArgumentError: The checkpoint cannot be read.
        """
        if self._source is None:
            assert self._open is not None
            self._source = self._open()
        return self._source.read(names)

    def place(self, name: str, values: Tensor) -> None:
        """Put the values of a parameter into every module that uses it."""
        old = self.shape(name)
        assert old.shape == values.shape, name
        self._put(name, nn.Parameter(values, requires_grad=old.requires_grad))
        self._awaited.remove(name)

    def shape(self, name: str) -> nn.Parameter:
        """Return the parameter that the model has now: on ``meta`` until its values are placed."""
        owner, key = self._places[name][0]
        found = owner._parameters[key]
        assert found is not None
        return found

    def close(self) -> None:
        """Check that all parameters have their values, and drop the source."""
        assert not self._awaited, f"{len(self._awaited)} parameters never came, such as {next(iter(self._awaited))}"
        self._source = self._open = None

    @contextmanager
    def phantom(self) -> Iterator[None]:
        """Replace the parameters, while inside, by ones on the CPU without memory: tensors made like them are real."""
        real = {name: self.shape(name) for name in self._places}
        for name, parameter in real.items():
            stand_in = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
            self._put(name, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
        try:
            yield
        finally:
            for name, parameter in real.items():
                parameter.requires_grad_(self.shape(name).requires_grad)
                self._put(name, parameter)

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for owner, key in self._places[name]:
            owner._parameters[key] = parameter


def deferred_of(model: Any) -> Deferred | None:
    """Return the deferred weights of ``model``; None if it has all its values."""
    base = base_of(model)
    found: Deferred | None = getattr(base, ATTRIBUTE, None)
    return found if found is not None and found._awaited else None


@contextmanager
def phantom_weights(model: PreTrainedModel) -> Iterator[None]:
    """Replace deferred weights, while inside, by ones on the CPU that take no memory: adapters are made for real."""
    found = deferred_of(model)
    if found is None:
        yield
        return
    with found.phantom():
        yield


def defer_load(
    name_or_path: str, options: ModelOptions = DEFAULTS, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Make the model that ``load_model`` loads, with its weights deferred.

    Args:
        name_or_path: A folder with ``config.json`` and safetensors, or a name on the model hub.
        options: Dtype and positions; weights that ranks share are not quantised here.
        trust_remote_code: Allow code that comes with the checkpoint to run.

    Raises:
        ArgumentError: There is no such checkpoint.
    """
    config = read_plain_config(name_or_path, trust_remote_code)
    if options.rope is not None:
        options.rope.apply(config)
    wanted = DTYPES.get(options.dtype) or getattr(config, "dtype", None)
    files = CheckpointFiles(name_or_path)
    if not isinstance(wanted, torch.dtype):
        wanted = files.dtype()
    try:
        # What a constructor draws is not looked at.
        with torch.random.fork_rng(devices=[]), RecordedInit(draw=False):
            remote = {"trust_remote_code": True} if trust_remote_code else {}
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=wanted, **remote)
    except Exception as error:  # classes of models check little of what they are given
        if is_memory_error(error):
            raise
        raise loading_error("model", name_or_path, error) from error
    model.config.name_or_path = model.name_or_path = name_or_path
    files.prepare(model)
    for name in [name for name, _ in model.named_buffers()]:
        if files.gives(name):  # small, and read by every rank
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = files.read([name])[name]
    Deferred(model, lambda: files, dtypes=files.dtypes)
    return model.eval()


def defer_init(
    config: Mapping[str, Any],
    options: ModelOptions = DEFAULTS,
    *,
    vocab_size: int,
    token_ids: Mapping[str, int],
    seed: int,
    draw: bool,
) -> PreTrainedModel:
    """Make the model that ``init_model`` makes, with its weights deferred; they will be the same, bit for bit.

    ``draw`` is True on the rank that reads the weights.
    """
    keys = {**token_ids, **config, "vocab_size": wanted_vocabulary(config, vocab_size)}

    wanted = build_config(keys)
    if options.rope is not None:
        options.rope.apply(wanted)

    def make() -> PreTrainedModel:
        chosen = torch.float32 if options.dtype == "auto" else DTYPES[options.dtype]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(wanted), dtype=chosen)
        return made

    recorded = RecordedInit(draw=draw)
    try:
        with recorded, making_model(config):
            model = make()
        replayed = _Replayed(model, recorded)
        Deferred(model, lambda: replayed)
    except NotRecordedError:
        with RecordedInit(draw=False), making_model(config):
            model = make()
        note = f"{type(model).__name__} draws its weights in a way of its own: rank 0 makes it whole, on the host"
        Deferred(model, lambda: _Whole(make()), note=note)
    return model


class _Replayed:
    """Random weights, drawn when they are read."""

    def __init__(self, model: PreTrainedModel, recorded: RecordedInit) -> None:
        self._recorded = recorded
        self._made = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        made = {name: self._made[name] for name in names}  # a few, such as gains of norms, are whole already
        return {name: self._recorded.replay(x) if x.device.type == "meta" else x.clone() for name, x in made.items()}


class _Whole:
    """The weights of a model that was made as a whole, because its initialisation could not be recorded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._left = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._left.pop(name) for name in names}
