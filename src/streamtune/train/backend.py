"""Backends, which turn a loss into new weights: the part of a step that differs between one device and many.

The loop has the loss that it minimises; a backend has gradients, optimizer and weights. The shares of all ranks add
up to the gradient (``streamtune.distributed`` has the backends of several ranks).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.errors import CheckpointError
from streamtune.optim import RULES, BlockAdamW, averaged_weights, is_averaged, pack_state, set_learning_rate
from streamtune.train.objective import StepScore
from streamtune.train.slices import MASTER, Slice, SliceReader, share_out_whole

TRAINED = "trained"
"""The key of the weights that are trained, in the state of an optimizer whose average is saved as the model."""


class Backend(ABC):
    """Weights, gradients and optimizer, wherever they are.

    Args:
        module: The model; streamed already.
        config: The configuration of the library behind it, every value in force; empty where there is none.
    """

    whole = False
    """True if this rank alone holds all there is: its slices are whole tensors, and a checkpoint has them as such."""

    clipped_by: float | None = None
    """The norm that the gradient of this step is clipped by, where that may be another than its own."""

    def __init__(self, module: nn.Module, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.module, self.config = module, config

    @property
    def model(self) -> Any:
        """The module that is called for a loss that goes backward."""
        return self.module

    def begin_step(self, learning_rate: float, again: Callable[[], object]) -> None:  # noqa: B027 (most need nothing)
        """Prepare for the gradients of a step.

        Args:
            learning_rate: That of the step.
            again: Computes the gradients once more, with the same rows and random numbers.
        """

    def compute(self, take: Callable[[], StepScore | None]) -> StepScore | None:
        """Compute the gradients of a step, by calls of ``take``, which goes through all its micro-batches.

        Args:
            take: Returns None where it was broken off; then this does as well.
        """
        return take()

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context for the model's call and the backward of one micro-batch, the step's ``last`` or not."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, a scalar with graph, to that of the step; the shares of all ranks add up."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> float:
        """Bound the gradient to ``max_norm`` (0: leave it) at the latest in :meth:`step`; return the norm it has."""

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """Take the optimizer step and free the gradients."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradients that were added since the last step."""

    @abstractmethod
    def reset_optimizer(self) -> None:
        """Reset the optimizer's state."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides tensors, as JSON has it: the same on every rank, mostly nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have none)
        """Put back what :meth:`state` returned; empty for a checkpoint that has none."""

    @abstractmethod
    def stepped(self) -> Iterator[Tensor]:
        """Iterate over the weights that the optimizer steps, as this rank has them: whole, or its part of each."""

    @abstractmethod
    def slices(self) -> Iterator[Slice]:
        """Return the state that this rank writes, see ``slices.Slice``: all ranks together have each value once."""

    @abstractmethod
    def load_slices(self, saved: SliceReader) -> None:
        """Load this rank's part of a state, whichever ranks wrote it.

        Raises:
            CheckpointError: It belongs to a model with other parameters, or lacks values.
        """

    @abstractmethod
    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """Iterate over the parameters (those of ``names`` alone), each whole on rank 0 until the next one.

        Called by all ranks, each of which has to iterate to the end. Ranks other than 0 get None.
        """

    def called_directly(self) -> AbstractContextManager[Any]:
        """Return a context to call parts of the model (to write text), by all ranks in step; without gradients."""
        return nullcontext()

    def averaged(self) -> AbstractContextManager[Any]:
        """Return a context in which the model has the weights that are evaluated and saved.

        They are others than those that are trained where the optimizer averages; those are back afterwards, to the bit.
        """
        return nullcontext()

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Free threads and buffers; nothing is called after it."""


class TorchBackend(Backend):
    """A torch optimizer over the parameters of the model: one device, or several that share gradients (DDP, FSDP2).

    Args:
        module: The model.
        optimizer: Over its parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module)
        self.optimizer = optimizer
        self._trained_weights: dict[nn.Parameter, Tensor] = {}
        """Copies of the weights that are trained, while the model has their averages."""

    def backward(self, loss: Tensor) -> None:
        """See :class:`Backend`."""
        loss.backward()

    def clip_gradients(self, max_norm: float) -> float:
        """See :class:`Backend`."""
        trained = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        value = self._number(norm)
        if max_norm > 0 and math.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return value

    def _number(self, norm: Tensor) -> float:
        return norm.item()

    def step(self, learning_rate: float) -> None:
        """See :class:`Backend`."""
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """See :class:`Backend`."""
        self.optimizer.zero_grad(set_to_none=True)

    def stepped(self) -> Iterator[Tensor]:
        """See :class:`Backend`."""
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def reset_optimizer(self) -> None:
        """See :class:`Backend`."""
        self.optimizer.state.clear()  # it puts another dictionary there when it loads: looked up now

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Return the optimizer's state by ``PARAMETER/KEY``; nothing is copied.

        Of an optimizer that averages, the weights that are trained are a part of it: the model is saved as averaged.
        """
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        trained = {
            f"{names[id(p)]}/{TRAINED}": self._trained_weights.get(p, p.detach())
            for group in self.optimizer.param_groups
            if is_averaged(group)
            for p in group["params"]
        }
        return {**optimizer_tensors(self.optimizer, self.module), **trained}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See :class:`Backend`. Copies of the trained weights are in the host's memory for as long."""
        if self._trained_weights or not any(map(is_averaged, self.optimizer.param_groups)):
            yield
            return
        with torch.no_grad():
            for parameter, average in averaged_weights(self.optimizer):
                self._trained_weights[parameter] = parameter.detach().to("cpu", copy=True)
                parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, trained in self._trained_weights.items():
                    parameter.copy_(trained)
            self._trained_weights = {}

    def slices(self) -> Iterator[Slice]:
        """See :class:`Backend`."""
        return share_out_whole(self.optimizer_tensors(), 0, 1)

    def load_slices(self, saved: SliceReader) -> None:
        """See :class:`Backend`."""
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        saved.check_parameters(trained)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if TRAINED in saved.keys(name):
                    parameter.copy_(saved.whole(name, TRAINED))
        keys = {name: [key for key in saved.keys(name) if key not in (MASTER, TRAINED)] for name in trained}
        found = {f"{name}/{key}": saved.whole(name, key) for name in trained for key in keys[name]}
        if found:
            load_optimizer_tensors(self.optimizer, self.module, found)

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """See :class:`Backend`."""
        return ((name, x.detach()) for name, x in self.module.named_parameters() if names is None or name in names)


class LocalBackend(TorchBackend):
    """One device, which holds all there is."""

    whole = True


class BlockBackend(LocalBackend):
    """One device, which holds all weights and the gradients and moments of a block.

    A checkpoint has the steps taken, which tell the block, and its moments; none where the block has just begun.

    Args:
        module: The model; the optimizer says which of its weights require a gradient.
        optimizer: Over its parameters.
    """

    optimizer: BlockAdamW

    def __init__(self, module: nn.Module, optimizer: BlockAdamW) -> None:
        super().__init__(module, optimizer)

    def state(self) -> dict[str, Any]:
        """See :class:`Backend`."""
        return {"steps_taken": self.optimizer.steps_taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`Backend`."""
        self.optimizer.go_to(state["steps_taken"])

    def load_slices(self, saved: SliceReader) -> None:
        """See :class:`Backend`."""
        if saved.parameters():
            super().load_slices(saved)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state by parameter name, which survives a reordering of the optimizer's groups. Nothing is copied."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in pack_state(optimizer.state.get(parameter, {})).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the state back.

    Raises:
        CheckpointError: It belongs to a model with other parameters or to another optimizer, or has another form.
    """
    by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        by_parameter[name][key] = value
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    if differing := sorted(by_parameter.keys() ^ set(order)):
        raise CheckpointError(
            f"the optimizer's state in the checkpoint belongs to another model: {len(differing)} parameters differ, "
            f"among them {differing[0]}",
            mend="start anew with --resume never",
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _check_form(names[id(parameter)], parameter, by_parameter[names[id(parameter)]], group)
    # torch numbers the parameters in the order of the groups, and knows on which device each entry belongs.
    state = {index: by_parameter[name] for index, name in enumerate(order)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


ADAMW = {"step", "exp_avg", "exp_avg_sq"}
BLOCK = 256
"""Values of a weight that share a scale in the states of bitsandbytes, and values of a table."""


def _check_form(name: str, parameter: Tensor, entry: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Refuse a state that a kernel would read beyond its end: fused ones look at the size of the weight alone.

    Raises:
        CheckpointError: A tensor is missing, or has another shape or dtype.
    """

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(
            f"the optimizer's state of {name} in the checkpoint {what}", mend="use another checkpoint: --resume PATH"
        )

    rule = group.get("rule")
    own_shapes = rule in RULES and RULES[rule].own_shapes  # torch's operators refuse one that does not fit
    if rule in (None, "adamw") and entry and (missing := ADAMW - entry.keys()):
        raise refuse(f"has no {', '.join(sorted(missing))}")
    for key, value in entry.items():
        start = key.rstrip("12")
        if start == "absmax":
            fits = value.numel() == -(-parameter.numel() // BLOCK)
        elif start == "qmap":
            fits = value.numel() == BLOCK
        else:
            fits = value.ndim == 0 or own_shapes or value.shape == parameter.shape
        if not fits:
            raise refuse(f"has '{key}' of shape {list(value.shape)}, and the weight is {list(parameter.shape)}")
        if key in ADAMW and not value.is_floating_point() and rule in (None, "adamw"):
            raise refuse(f"has '{key}' in {str(value.dtype).removeprefix('torch.')}")
