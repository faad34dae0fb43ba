"""Facts of a model that every simulation of it needs, such as what its optimizer holds, computed once and remembered.

A plan simulates one model by several schedules. What does not depend on the schedule is found again as long as the
model's tensors and configuration are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

Fact = TypeVar("Fact")

_FACTS: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[Hashable, Any]]] = WeakKeyDictionary()


def fact_of(model: nn.Module, name: Hashable, compute: Callable[[], Fact]) -> Fact:
    """Return the fact of a model that has a name, computed now or before.

    Args:
        model: On ``meta``. If its modules, tensors or settings have changed since, the fact is computed again.
        name: The name of the fact, with all that it depends on besides the model; if it cannot be hashed, the fact is
            computed each time.
        compute: Computes it from the model.
    """
    known, state = _FACTS.setdefault(model, {}), _state_of(model)
    try:
        found = known.get(name)
    except TypeError:
        return compute()
    if found is None or found[0] != state:
        found = known[name] = (state, compute())
    fact: Fact = found[1]
    return fact


def _state_of(model: nn.Module) -> Hashable:
    """Return what tells a model that was changed from the one it was."""
    modules = all_modules(model)
    tensors = tuple(
        (id(module), tuple((id(x), x.dtype, x.requires_grad) for x in module._parameters.values() if x is not None))
        for module in modules
    )
    configs = configs_of(modules)
    return tensors, tuple(repr(sorted(vars(config).items(), key=lambda item: item[0])) for config in configs)


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the configurations that modules have, each once."""
    return list({id(m.__dict__["config"]): m.__dict__["config"] for m in modules if "config" in m.__dict__}.values())


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, each once, in the order of ``model.modules()``, in a fourth of its time."""
    found: dict[int, nn.Module] = {}
    todo: list[nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            todo.extend(reversed(module._modules.values()))
    return list(found.values())
