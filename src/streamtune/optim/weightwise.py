"""Optimizer that lets an optimizer of another library update one weight at a time.

    for each weight with a gradient:   library's optimizer.param_groups = [{"params": [weight], ...}];   .step()

So a step needs temporary tensors for one weight, not for all. If a library counts steps per parameter group, here each
weight has its own count, because a weight may be updated inside the backward or on the CPU. The training loop computes
values over all weights, such as the norm of all gradients.

With ``rounding: stochastic`` the library gets a bfloat16 weight and its gradient in float32, and the weight is rounded
stochastically after the step (``weight_step``). The library's states are then float32.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from streamtune.base.optimizer_table import OPTIMIZERS, state_bytes
from streamtune.ops.devices import loop_or_simulate
from streamtune.optim.libraries import RULES, Rule
from streamtune.optim.weight_step import flat_slices, hash_integers, random_bits, round_stochastically, saved_states

OWN_KEYS = ("params", "rule", "lr_scale", "seed", "rounding")
"""Keys of a parameter group that are not options of the library."""
GROUP_PREFIX = "group."
"""Prefix of entries in a weight's state for numbers that the library stores in a group."""
STEPS_TAKEN = "taken"
"""Entry with the step count of a weight without tensors in its state: a checkpoint needs an entry for each weight."""
ROUNDED_STEPS = "rounded"
"""Entry with the step count of a stochastically rounded weight, which determines the random bits of a step."""


class WeightwiseOptimizer(torch.optim.Optimizer):
    """Optimizer that updates each weight separately, with one optimizer of a library for each parameter group.

    Args:
        groups: Groups with ``params``, ``rule`` (a key of ``RULES``), ``lr``, ``weight_decay`` and the rule's options.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._library_optimizers: dict[int, torch.optim.Optimizer] = {}
        # Numbered now, because a step in the backward removes all weights but one from the groups.
        self._weight_number: dict[int, int] = {}
        counts = Counter[str]()
        for group in self.param_groups:
            for parameter in group["params"]:
                counts[group["rule"]] += 1
                self._weight_number[id(parameter)] = counts[group["rule"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_weight(index, group, parameter)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state.clear()
        for parameter, group, entry in saved_states(self, state_dict):
            self.state[parameter] = _unpack_state(entry, parameter, group)
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})

    def _step_weight(self, index: int, group: dict[str, Any], parameter: nn.Parameter) -> None:
        rule = RULES[group["rule"]]
        if parameter.is_meta and not rule.runs_on_meta:
            self._allocate_state_on_meta(group, parameter)
            return
        if _is_rounded_stochastically(parameter, group):
            self._step_and_round(index, group, parameter)
            return
        self._step_with_library(index, group, parameter, parameter)

    def _step_and_round(self, index: int, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """Update a float32 copy of a weight, then round the copy stochastically into the weight."""
        assert parameter.grad is not None
        wide = nn.Parameter(parameter.detach().float())
        wide.grad = parameter.grad.float()
        rounded = self.state[parameter].pop(ROUNDED_STEPS, 0) + 1
        self._step_with_library(index, group, parameter, wide)
        self.state[parameter][ROUNDED_STEPS] = rounded
        key = (group.get("seed", 0), rounded, self._weight_number.get(id(parameter), 0), *group["rule"].encode())
        target = parameter if parameter.is_contiguous() else parameter.contiguous()
        values, out = wide.detach().contiguous().view(-1), target.view(-1)
        for span in loop_or_simulate(flat_slices(values), parameter.device):
            bits = random_bits(len(values[span]), parameter.device, *key, span.start)
            round_stochastically(values[span], bits, out=out[span])
        if target is not parameter:
            parameter.copy_(target)

    def _step_with_library(
        self, index: int, group: dict[str, Any], parameter: nn.Parameter, stepped: nn.Parameter
    ) -> None:
        """Let the library update ``stepped``, the parameter or its float32 copy, with the parameter's state."""
        rule = RULES[group["rule"]]
        state = self.state[parameter]
        optimizer = self._library_optimizers.get(index)
        if optimizer is None:
            optimizer = rule.make([stepped], {key: group[key] for key in group if key not in OWN_KEYS})
            self._library_optimizers[index] = optimizer
        optimizer.state = self.state if stepped is parameter else defaultdict(dict, {stepped: state})
        settings = optimizer.param_groups[0]
        settings["params"] = [stepped]
        for key in group.keys() & settings.keys() - set(OWN_KEYS):
            if isinstance(settings[key], Tensor):
                settings[key].fill_(group[key])
            else:
                settings[key] = group[key]
        settings.update({name: state.pop(GROUP_PREFIX + name, first) for name, first in rule.group_numbers.items()})
        new = not state
        if new:
            state.update(rule.initial_state(group.get("seed", 0), self._weight_number.get(id(parameter), 0)))
        with _without_compilation(rule, parameter), self._seed_random_numbers(rule, group, parameter, state):
            optimizer.step()
        state = optimizer.state[stepped]
        if stepped is not parameter:
            self.state[parameter] = state
            settings["params"], optimizer.state = [], self.state
        if new:
            state.update({name: state[name].clone() for name in rule.shared_tensors if name in state})
        state.update({GROUP_PREFIX + name: settings[name] for name in rule.group_numbers})
        if not any(isinstance(value, Tensor) for value in state.values()):
            state[STEPS_TAKEN] = state.get(STEPS_TAKEN, 0) + 1

    @contextmanager
    def _seed_random_numbers(
        self, rule: Rule, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]
    ) -> Iterator[None]:
        """Context manager: if the rule draws random numbers, they depend on the seed, step and weight, and no
        generator of other work changes."""
        if not (rule.random_option and group[rule.random_option]) or parameter.is_meta:
            yield
            return
        taken = int(state.get("step", 0))
        key = (group.get("seed", 0), taken, self._weight_number.get(id(parameter), 0))
        if parameter.device.type != "cuda":
            with _DrawsOf(torch.Generator(parameter.device).manual_seed(hash_integers(*key) >> 1)):
                yield
            return
        # A compiled step draws from the device's own generator.
        generator = torch.cuda.default_generators[parameter.device.index]
        before = generator.get_state()
        generator.manual_seed(hash_integers(*key) >> 1)
        try:
            yield
        finally:
            generator.set_state(before)

    def _allocate_state_on_meta(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """On ``meta``, allocate what the library would: the state of a weight, and the temporaries of its step."""
        entry, shape, width = OPTIMIZERS[group["rule"]], tuple(parameter.shape), parameter.element_size()
        wide: Tensor = parameter
        if _is_rounded_stochastically(parameter, group):
            wide, width = parameter.detach().float(), 4
            wide.add_(parameter.grad.float())  # type: ignore[union-attr]
        if not self.state[parameter]:
            size = state_bytes(group["rule"], shape, width, {key: group[key] for key in entry.options})
            self.state[parameter] = {"state": torch.empty(size, dtype=torch.uint8, device=parameter.device)}
        if entry.scratch is not None:
            torch.empty(entry.scratch(shape, width), dtype=torch.uint8, device=parameter.device).zero_()
        self.state[parameter]["state"].add_(0)  # read and written
        parameter.add_(parameter.grad)  # type: ignore[arg-type]  # a stepped weight has a gradient


class _DrawsOf(TorchFunctionMode):
    """Mode in which this thread draws random numbers from ``generator``: the global ones serve all threads."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        more = {"generator": self._generator} if func in (torch.rand, torch.randint, torch.randn) else {}
        return func(*args, **{**(kwargs or {}), **more})


def _is_rounded_stochastically(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    return parameter.dtype == torch.bfloat16 and group.get("rounding") == "stochastic"


def _without_compilation(rule: Rule, parameter: Tensor) -> AbstractContextManager[Any]:
    if not rule.is_compiled or parameter.device.type == "cuda":
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def uses_averaged_weights(group: Mapping[str, Any]) -> bool:
    """Return True if evaluation and saving replace the weights of a parameter group by their averages."""
    rule = RULES.get(group.get("rule", ""))
    return rule is not None and rule.average is not None


def averaged_weights(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (weight, average) for each weight whose average is used in evaluation and saving."""
    for group in optimizer.param_groups:
        rule = RULES.get(group.get("rule", ""))
        if rule is not None and rule.average is not None:
            for parameter in group["params"]:
                yield parameter, rule.average(parameter.detach(), optimizer.state.get(parameter, {}), group)


def state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for a weight's state; a quantised tensor ``x`` yields its parts, such as ``x.codes``."""
    for key, value in state.items():
        if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
            names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            for name in names:
                yield f"{key}.{name}", getattr(value, name)
        elif isinstance(value, Tensor):
            yield key, value
        elif hasattr(value, "__dict__"):
            yield from ((f"{key}.{name}", x) for name, x in vars(value).items() if isinstance(x, Tensor))


def pack_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state of a weight as plain tensors, for a checkpoint. Tensors are not copied.

    Integers become int64 scalars, other numbers float64 scalars. A quantised tensor ``x`` becomes its parts
    (:func:`state_tensors`) and ``x.shape``; any other object becomes its tensors and its integers.
    """
    packed = dict(state_tensors(state))
    for key, value in state.items():
        if isinstance(value, Tensor) and key not in packed:
            packed[f"{key}.shape"] = torch.tensor(value.shape)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            packed[key] = pack_number(value)
        elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
            numbers = {name: x for name, x in vars(value).items() if type(x) is int}
            packed |= {f"{key}.{name}": pack_number(x) for name, x in numbers.items()}
    return packed


def pack_number(value: float) -> Tensor:
    """Return a number as a scalar tensor: int64 for an integer, else float64."""
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def unpack_number(x: Tensor) -> Any:
    """Return the number packed by :func:`pack_number`; return a tensor of another dtype (a float32 count) unchanged."""
    return x.item() if x.dtype in (torch.int64, torch.float64) else x


def _copy_to_device_of(x: Tensor, parameter: Tensor) -> Tensor:
    return x.to(parameter.device, copy=True)


def _unpack_state(entry: Mapping[str, Tensor], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    rule, state, wide = RULES[group["rule"]], dict[str, Any](), _is_rounded_stochastically(parameter, group)
    parts: dict[str, dict[str, Any]] = {}
    for key, value in entry.items():
        prefix, _, name = key.rpartition(".")
        if not isinstance(value, Tensor):  # from `state_dict`, not from a checkpoint
            state[key] = value
        elif prefix in rule.rebuild_objects:
            parts.setdefault(prefix, {})[name] = (
                value.item() if value.ndim == 0 else _copy_to_device_of(value, parameter)
            )
        elif value.ndim == 0 and value.dtype in (torch.int64, torch.float64):
            state[key] = unpack_number(value)
        elif prefix:
            parts.setdefault(prefix, {})[name] = _copy_to_device_of(value, parameter)
        else:
            on_host = key == "step" and not group.get("fused")  # the host reads this count
            state[key] = value.to("cpu" if on_host else parameter.device, copy=True)
    for prefix, found in parts.items():
        if prefix in rule.rebuild_objects:
            state[prefix] = rule.rebuild_objects[prefix](found, group)
            continue
        assert rule.rebuild_quantised is not None, "only quantised states are saved in parts"
        state[prefix] = rule.rebuild_quantised(prefix, found, torch.float32 if wide else parameter.dtype)
    return state
