"""Models with deferred weights: ranks read and shard weights one module at a time, so no rank needs the whole model.

Parameters are on ``meta``, buffers have values. A :class:`DeferredWeights` provides the weights: from safetensors, or,
for a new model, random values that are equal to the values of a model that is initialised as a whole.

    model = load_model_deferred("Qwen/Qwen3-8B", ModelOptions(dtype="bfloat16"))
    find_deferred_weights(model).read(["model.layers.0.mlp.up_proj.weight", ...])     # name -> tensor on the CPU

To draw weights later, :class:`RecordedInit` records the in-place operations on empty tensors (drawing, filling,
scaling) while the model is constructed, each with the generator state before it. Draws are also performed, into a
temporary tensor. So the generator state advances as usual, and at most one parameter is allocated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, PreTrainedModel

from streamtune.base.adapters import base_of
from streamtune.models.checkpoint_files import CheckpointFiles
from streamtune.models.config import (
    NotRecordedError,
    build_config,
    requested_vocab_size,
    wrap_constructor_errors,
    wrap_loading_errors,
)
from streamtune.models.frozen_parts import freeze_parts, narrow_dtypes
from streamtune.models.load import DEFAULT_OPTIONS, ModelOptions, read_unquantized_config, recompute_tables
from streamtune.models.model_class import auto_class_of

ATTRIBUTE = "_streamtune_deferred"


class WeightSource(Protocol):
    """Interface: reads weights by name, from a checkpoint's files or by replaying a recorded initialisation."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return parameters and buffers by name, on the CPU. The source may then free its own copy."""
        ...


class DeferredWeights:
    """Loads the weights of a model on ``meta`` when they are needed. Adapters may be added to the model afterwards.

    Args:
        model: Model, whose parameters are moved to ``meta``.
        open_source: Function that opens the source of weights, called at the first read. Only one rank reads.
        dtypes: Dtypes of parameters, by name, that replace the model's.
        note: Remark for the user on how the weights are made.
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
            old = self.parameter(name)
            dtype = (dtypes or {}).get(name, old.dtype)
            self._replace_parameter(name, nn.Parameter(old.detach().to("meta", dtype), requires_grad=old.requires_grad))
        setattr(model, ATTRIBUTE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model keeps its parameters on ``meta``, without a source of weights."""
        return

    def parameter_names_in(self, module: nn.Module, recurse: bool = True) -> list[str]:
        """Return the names of a module's deferred parameters; with ``recurse``, also of its submodules' parameters."""
        below = {id(part) for part in (module.modules() if recurse else (module,))}
        return [name for name, places in self._places.items() if any(id(owner) in below for owner, _ in places)]

    def is_deferred(self, name: str) -> bool:
        """Return True if a parameter has no values yet. A shared parameter gets values once, under its first name."""
        return name in self._awaited

    def read(self, parameter_names: Iterable[str]) -> dict[str, Tensor]:
        if self._source is None:
            assert self._open is not None
            self._source = self._open()
        return self._source.read(parameter_names)

    def set_values(self, name: str, values: Tensor) -> None:
        """Set the values of a deferred parameter, in every module that shares it."""
        old = self.parameter(name)
        assert old.shape == values.shape, name
        self._replace_parameter(name, nn.Parameter(values, requires_grad=old.requires_grad))
        self._awaited.remove(name)

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter with this name, which is on ``meta`` until :meth:`set_values`."""
        owner, key = self._places[name][0]
        found = owner._parameters[key]
        assert found is not None
        return found

    def close(self) -> None:
        """Check that all parameters have values, and release the source of weights."""
        assert not self._awaited, f"{len(self._awaited)} parameters have no values: {next(iter(self._awaited))} ..."
        self._source = self._open = None

    @contextmanager
    def use_placeholders(self) -> Iterator[None]:
        """Context manager: replace the parameters by expanded CPU scalars, which need no memory.

        Tensors that are created on a parameter's device, such as adapters, are then on the CPU and have values.
        """
        real = {name: self.parameter(name) for name in self._places}
        for name, parameter in real.items():
            stand_in = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
            self._replace_parameter(name, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
        try:
            yield
        finally:
            for name, parameter in real.items():
                parameter.requires_grad_(self.parameter(name).requires_grad)
                self._replace_parameter(name, parameter)

    def _replace_parameter(self, name: str, parameter: nn.Parameter) -> None:
        for owner, key in self._places[name]:
            owner._parameters[key] = parameter


def find_deferred_weights(model: Any) -> DeferredWeights | None:
    """Return the :class:`DeferredWeights` of ``model``; None if all its weights have values."""
    base = base_of(model)
    found: DeferredWeights | None = getattr(base, ATTRIBUTE, None)
    return found if found is not None and found._awaited else None


@contextmanager
def use_placeholder_weights(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: replace deferred weights by CPU tensors that need no memory.

    Adapters that are added inside are then on the CPU with values, not on ``meta``.
    """
    found = find_deferred_weights(model)
    with nullcontext() if found is None else found.use_placeholders():
        yield


def load_model_deferred(
    name_or_path: str, options: ModelOptions = DEFAULT_OPTIONS, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the unquantised model that ``load_model`` would return, on ``meta``; weights are loaded when needed."""
    config = read_unquantized_config(name_or_path, trust_remote_code)
    if options.rope is not None:
        options.rope.apply(config)
    dtype = options.torch_dtype or getattr(config, "dtype", None)
    files = CheckpointFiles(name_or_path)
    if not isinstance(dtype, torch.dtype):
        dtype = files.dtype()
    # Values drawn by a constructor are not used.
    with wrap_loading_errors(name_or_path), torch.random.fork_rng(devices=[]), RecordedInit(draw=False):
        remote = {"trust_remote_code": True} if trust_remote_code else {}
        model: PreTrainedModel = auto_class_of(config).from_config(config, dtype=dtype, **remote)
    recompute_tables(model)
    model.config.name_or_path = model.name_or_path = name_or_path
    if model.can_generate():
        with suppress(OSError):  # without the file, the configuration of the model has the settings
            model.generation_config = GenerationConfig.from_pretrained(name_or_path)
    files.map_parameters(model)  # may untie weights
    freeze_parts(model, options.trained)
    for name in [name for name, _ in model.named_buffers()]:
        if files.has_parameter(name):  # buffers are small: every rank reads them
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = files.read([name])[name]
    DeferredWeights(model, lambda: files, dtypes={**files.dtypes, **narrow_dtypes(model, options.trained)})
    return model.eval()


def init_model_deferred(
    config: Mapping[str, Any],
    options: ModelOptions = DEFAULT_OPTIONS,
    *,
    vocab_size: int,
    token_ids: Mapping[str, int],
    seed: int,
    draw: bool,
) -> PreTrainedModel:
    """Return the model that ``init_model`` would return, on ``meta``; its weights get the same values when loaded.

    The rank that loads the weights must pass ``draw=True``, which records the initialisation.
    """
    wanted = build_config({**token_ids, **config, "vocab_size": requested_vocab_size(config, vocab_size)})
    if options.rope is not None:
        options.rope.apply(wanted)

    def make_model() -> PreTrainedModel:
        dtype = options.torch_dtype or torch.float32
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model: PreTrainedModel = auto_class_of(wanted).from_config(copy.deepcopy(wanted), dtype=dtype)
        freeze_parts(model, options.trained)
        return model

    recorded = RecordedInit(draw=draw)
    try:
        with recorded, wrap_constructor_errors(config):
            model = make_model()
        replayed = _ReplayedInit(model, recorded)
        DeferredWeights(model, lambda: replayed)
    except NotRecordedError:
        with RecordedInit(draw=False), wrap_constructor_errors(config):
            model = make_model()
        note = f"{type(model).__name__} cannot be initialised weight by weight: rank 0 makes all weights in host memory"
        DeferredWeights(model, lambda: _WholeInit(make_model()), note=note)
    recompute_tables(model)
    return model


class _ReplayedInit:
    """Weight source that replays the recorded random initialisation of a parameter when the parameter is read."""

    def __init__(self, model: PreTrainedModel, recorded: RecordedInit) -> None:
        self._recorded = recorded
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        made = {name: self._parameters[name] for name in names}  # a few, such as norm weights, have values already
        return {
            name: self._recorded.replay_init(x) if x.device.type == "meta" else x.clone() for name, x in made.items()
        }


class _WholeInit:
    """Weight source of a model that was initialised as a whole, because its initialisation could not be recorded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._weights.pop(name) for name in names}


@dataclass
class _RecordedOperation:
    function: Callable[..., Any]
    view: tuple[torch.Size, tuple[int, ...], int]
    """Size, stride and storage offset of the view that the operation changes."""
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    state: Tensor | None
    """Generator state before the operation; None if the operation draws nothing."""


@dataclass
class _OperationHistory:
    made: Tensor
    """Tensor on ``meta``. This reference prevents reuse of its storage's address, the key of the history."""
    operations: list[_RecordedOperation] = field(default_factory=list)


class RecordedInit(TorchDispatchMode):
    """Dispatch mode that creates floating-point tensors on ``meta`` and records the operations that initialise them.

    With ``draw``, random operations are also performed, so that the generator state before each operation is correct.
    Without ``draw`` nothing is recorded.
    """

    def __init__(self, *, draw: bool) -> None:
        super().__init__()
        self.draw = draw
        self._histories: dict[int, _OperationHistory] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and _is_cpu_float(kwargs):
            made: Tensor = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            self._histories[made.untyped_storage()._cdata] = _OperationHistory(made)
            return made
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if self.draw and target is not None and target.device.type == "meta" and _is_in_place(func):
            self._record_call(func, target, args[1:], kwargs)
        return func(*args, **kwargs)

    def _record_call(self, func: Any, target: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        history = self._histories.get(target.untyped_storage()._cdata)
        others = [value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)]
        if history is None or any(value.device.type == "meta" for value in others):
            raise NotRecordedError(
                f"{func} changes a tensor that was not made by torch.empty, so it cannot be replayed"
            )
        view = (target.size(), target.stride(), int(target.storage_offset()))
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            scratch = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device="cpu")
            func(scratch, *arguments, **keywords)
        copies = tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
        history.operations.append(_RecordedOperation(func, view, copies, keywords, state))

    def replay_init(self, parameter: Tensor) -> Tensor:
        """Return a ``meta`` parameter's initial values on the CPU; the global generator state does not change."""
        history = self._histories.get(parameter.untyped_storage()._cdata)
        if history is None or history.made.shape != parameter.shape:
            raise NotRecordedError("a parameter was not made by torch.empty, so its initialisation cannot be replayed")
        values = torch.empty_strided(history.made.size(), history.made.stride(), dtype=history.made.dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for operation in history.operations:
                if operation.state is not None:
                    torch.set_rng_state(operation.state)
                region = values.as_strided(*operation.view)
                operation.function(region, *operation.arguments, **operation.keywords)
        return values


def _is_cpu_float(keywords: Mapping[str, Any]) -> bool:
    dtype = keywords.get("dtype") or torch.get_default_dtype()
    device = keywords.get("device")
    return bool(dtype.is_floating_point) and (device is None or torch.device(device).type == "cpu")


def _is_in_place(func: Any) -> bool:
    first = func._schema.arguments[0].alias_info
    return first is not None and bool(first.is_write)
