"""An optimizer that lets a library step one weight at a time.

    for each weight with a gradient:   library's optimizer.param_groups = [{"params": [weight], ...}];   .step()

A step needs temporaries for one weight instead of all. And a library that counts its steps by group counts them by
weight: stepped in the backward, or on the host, each weight has its own count, which is saved with its state. What a
library computes from all of its weights at once, such as a norm of all gradients, is the training loop's.

With ``rounding: stochastic`` a bfloat16 weight is handed to the library in float32, with its gradient, and rounded
stochastically after the step (``narrow_states``). The library's states are then float32.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.optimizer_table import OPTIMIZERS, state_bytes
from streamtune.ops.devices import turns
from streamtune.optim.libraries import RULES, Rule
from streamtune.optim.weight_step import hash_of, pieces_of, random_bits, round_stochastically

OWN_KEYS = ("params", "rule", "lr_scale", "seed", "rounding")
"""Keys of a group that are not the library's options."""
COUNT = "group."
"""Prefix of numbers that a library keeps in a group, in the state of a weight."""
TAKEN = "taken"
"""Count of steps of a weight of which nothing else is kept: a checkpoint has something of each."""
ROUNDED = "rounded"
"""Count of steps of a weight that is rounded stochastically: the random bits of each step are other ones."""


class WeightwiseOptimizer(torch.optim.Optimizer):
    """A library's optimizer, a weight at a time; another one for each group.

    Args:
        groups: Each with ``params``, ``rule`` (a key of ``RULES``), ``lr``, ``weight_decay`` and the rule's options.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._inner: dict[int, torch.optim.Optimizer] = {}
        # Counted once: an optimizer in the backward empties the groups but for the weight that it steps.
        self._number: dict[int, int] = {}
        counts = Counter[str]()
        for group in self.param_groups:
            for parameter in group["params"]:
                counts[group["rule"]] += 1
                self._number[id(parameter)] = counts[group["rule"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the parameters that have a gradient."""
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(index, group, parameter)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state whose tensors are those of :func:`pack_state`; dtypes stay as they were saved.

        Args:
            state_dict: ``state`` by the number of a weight, and ``param_groups``.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        self.state.clear()
        for number, (parameter, group) in zip(saved, own, strict=True):
            if entry := state_dict["state"].get(number):
                self.state[parameter] = _unpacked(entry, parameter, group)
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})

    def _step_one(self, index: int, group: dict[str, Any], parameter: nn.Parameter) -> None:
        rule = RULES[group["rule"]]
        if parameter.is_meta and not rule.runs_on_meta:
            self._allocate(group, parameter)
            return
        if _is_rounded(parameter, group):
            self._step_rounded(index, group, parameter)
            return
        self._step_whole(index, group, parameter, parameter)

    def _step_rounded(self, index: int, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """Step a float32 copy of a weight, and round it to the weight stochastically."""
        assert parameter.grad is not None
        wide = nn.Parameter(parameter.detach().float())
        wide.grad = parameter.grad.float()
        rounded = self.state[parameter].pop(ROUNDED, 0) + 1
        self._step_whole(index, group, parameter, wide)
        self.state[parameter][ROUNDED] = rounded
        of = (group.get("seed", 0), rounded, self._number.get(id(parameter), 0), *group["rule"].encode())
        target = parameter if parameter.is_contiguous() else parameter.contiguous()
        values, out = wide.detach().contiguous().view(-1), target.view(-1)
        for piece in turns(pieces_of(values), parameter.device):
            bits = random_bits(len(values[piece]), parameter.device, *of, piece.start)
            round_stochastically(values[piece], bits, out=out[piece])
        if target is not parameter:
            parameter.copy_(target)

    def _step_whole(self, index: int, group: dict[str, Any], parameter: nn.Parameter, stepped: nn.Parameter) -> None:
        """Let the library step ``stepped``: the weight, or its copy in float32. The states are the weight's."""
        rule = RULES[group["rule"]]
        state = self.state[parameter]
        inner = self._inner.get(index)
        if inner is None:
            inner = rule.make([stepped], {key: group[key] for key in group if key not in OWN_KEYS})
            self._inner[index] = inner
        inner.state = self.state if stepped is parameter else defaultdict(dict, {stepped: state})
        own = inner.param_groups[0]
        own["params"] = [stepped]
        for key in group.keys() & own.keys() - set(OWN_KEYS):
            if isinstance(own[key], Tensor):
                own[key].fill_(group[key])
            else:
                own[key] = group[key]
        own.update({name: state.pop(COUNT + name, first) for name, first in rule.counts.items()})
        new = not state
        if new:
            state.update(rule.begin(self._number.get(id(parameter), 0)))
        with _eager(rule, parameter), self._draws(rule, group, parameter, state):
            inner.step()
        state = inner.state[stepped]
        if stepped is not parameter:
            self.state[parameter] = state
            own["params"], inner.state = [], self.state
        if new:
            state.update({name: state[name].clone() for name in rule.shared if name in state})
        state.update({COUNT + name: own[name] for name in rule.counts})
        if not any(isinstance(value, Tensor) for value in state.values()):
            state[TAKEN] = state.get(TAKEN, 0) + 1

    @contextmanager
    def _draws(self, rule: Rule, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Iterator[None]:
        """Give a step that draws random numbers its own, and leave those of the run as they were."""
        if not (rule.draws and group[rule.draws]) or parameter.is_meta:
            yield
            return
        taken = int(state.get("step", 0))
        key = (group.get("seed", 0), taken, self._number.get(id(parameter), 0))
        with torch.random.fork_rng([parameter.device] if parameter.device.type == "cuda" else []):
            torch.manual_seed(hash_of(*key) >> 1)
            yield

    def _allocate(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """Allocate, on ``meta``, what the library keeps of a weight and what its step holds for a moment."""
        entry, shape, width = OPTIMIZERS[group["rule"]], tuple(parameter.shape), parameter.element_size()
        wide: Tensor = parameter
        if _is_rounded(parameter, group):
            wide, width = parameter.detach().float(), 4
            wide.add_(parameter.grad.float())  # type: ignore[union-attr]
        if not self.state[parameter]:
            size = state_bytes(group["rule"], shape, width, {key: group[key] for key in entry.options})
            self.state[parameter] = {"state": torch.empty(size, dtype=torch.uint8, device=parameter.device)}
        if entry.scratch is not None:
            torch.empty(entry.scratch(shape, width), dtype=torch.uint8, device=parameter.device).zero_()
        self.state[parameter]["state"].add_(0)  # read and written
        parameter.add_(parameter.grad)  # type: ignore[arg-type]  # a weight that is stepped has one


def _is_rounded(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    """Return True for a weight that is stepped in float32 and rounded stochastically."""
    return parameter.dtype == torch.bfloat16 and group.get("rounding") == "stochastic"


def _eager(rule: Rule, parameter: Tensor) -> AbstractContextManager[Any]:
    if not rule.eager or parameter.device.type == "cuda":
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def is_averaged(group: Mapping[str, Any]) -> bool:
    """Return True if the weights of a group are evaluated and saved as an average."""
    rule = RULES.get(group.get("rule", ""))
    return rule is not None and rule.average is not None


def averaged_weights(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the weights of which another one is evaluated and saved, with that one.

    Args:
        optimizer: Anything with ``param_groups`` and ``state``.
    """
    for group in optimizer.param_groups:
        rule = RULES.get(group.get("rule", ""))
        if rule is not None and rule.average is not None:
            for parameter in group["params"]:
                yield parameter, rule.average(parameter.detach(), optimizer.state.get(parameter, {}), group)


def state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the state of a weight; of a quantised tensor ``x``, those it consists of: ``x.codes`` ..."""
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
    """Return the state of a weight as plain tensors, which a checkpoint can have. Nothing is copied but numbers.

    A whole number becomes int64, another one float64, both without dimensions. Of a quantised tensor ``x`` there are
    those of :func:`state_tensors`, and ``x.shape``; of another object, its tensors and its whole numbers.
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
    """Return a number as a tensor without dimensions: int64 of a whole one, float64 of another."""
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def unpack_number(x: Tensor) -> Any:
    """Return the number that :func:`pack_number` was given; a count of a library's own, which is float32, as it is."""
    return x.item() if x.dtype in (torch.int64, torch.float64) else x


def _copied(x: Tensor, parameter: Tensor) -> Tensor:
    return x.to(parameter.device, copy=True)


def _unpacked(entry: Mapping[str, Tensor], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`pack_state` was given, on the device of the weight."""
    rule, state, wide = RULES[group["rule"]], dict[str, Any](), _is_rounded(parameter, group)
    parts: dict[str, dict[str, Any]] = {}
    for key, value in entry.items():
        prefix, _, name = key.rpartition(".")
        if not isinstance(value, Tensor):  # of `state_dict`, not of a checkpoint
            state[key] = value
        elif prefix in rule.objects:
            parts.setdefault(prefix, {})[name] = value.item() if value.ndim == 0 else _copied(value, parameter)
        elif value.ndim == 0 and value.dtype in (torch.int64, torch.float64):
            state[key] = unpack_number(value)
        elif prefix:
            parts.setdefault(prefix, {})[name] = _copied(value, parameter)
        else:
            stays = key == "step" and not group.get("fused")  # a count that the host reads
            state[key] = value.to("cpu" if stays else parameter.device, copy=True)
    for prefix, found in parts.items():
        if prefix in rule.objects:
            state[prefix] = rule.objects[prefix](found, group)
            continue
        assert rule.rebuild is not None, "only libraries that quantise have such states"
        state[prefix] = rule.rebuild(prefix, found, torch.float32 if wide else parameter.dtype)
    return state
