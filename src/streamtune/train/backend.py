"""Backends turn a loss into new weights: gradients, optimizer and weights of one device (here) or of several ranks
(``streamtune.distributed``). The shares of all ranks add up to the gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.errors import ArgumentError, CheckpointError
from streamtune.optim import (
    RULES,
    BlockAdamW,
    ZerothOrderSGD,
    averaged_weights,
    is_averaged,
    pack_state,
    perturbed,
    set_learning_rate,
)
from streamtune.train.objective import StepScore
from streamtune.train.process import capture_rng, restore_rng
from streamtune.train.slices import MASTER, Slice, SliceReader, check_same_parameters, share_out_whole
from streamtune.train.world import WORLD, World

TRAINED = "trained"
"""Key of the trained weights in the state of an optimizer whose average is saved as the model."""


class Backend(ABC):
    """Weights, gradients and optimizer, wherever they are.

    Args:
        module: The streamed model.
        config: Configuration of the library behind it, with every default filled in; empty without a library.
    """

    whole = False
    """True if this rank alone holds everything: its slices are whole tensors, and so are a checkpoint's slices."""

    clipped_by: float | None = None
    """Norm that this step's gradient is clipped by, where that may differ from its own norm."""

    def __init__(self, module: nn.Module, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.module, self.config = module, config

    @property
    def model(self) -> Any:
        """The module that is called for a loss that goes backward."""
        return self.module

    def begin_step(self, learning_rate: float, again: Callable[[], object]) -> None:  # noqa: B027 (most need nothing)
        """Prepare a step; ``again`` computes its gradients once more, with the same rows and random numbers."""

    def compute(self, take: Callable[[], StepScore | None]) -> StepScore | None:
        """Compute the gradients of a step by calls of ``take``, each over all micro-batches; None if it was stopped."""
        return take()

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context for the model's call and the backward of one micro-batch, the step's ``last`` or not."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, a scalar with graph, to the step's gradient."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> float:
        """Bound the gradient to ``max_norm`` (0: leave it) at the latest in :meth:`step`; return its norm."""

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
        """Return what a checkpoint needs besides tensors, as JSON values: the same on every rank, mostly nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have none)
        """Restore what :meth:`state` returned; empty for a checkpoint without it."""

    @abstractmethod
    def stepped(self) -> Iterator[Tensor]:
        """Iterate over the weights that the optimizer steps, as this rank has them: whole, or its part of each."""

    @abstractmethod
    def slices(self) -> Iterator[Slice]:
        """Return the state that this rank writes: all ranks together write each value once."""

    @abstractmethod
    def load_slices(self, saved: SliceReader) -> None:
        """Load this rank's part of a state, whichever ranks wrote it; CheckpointError if it is another model's."""

    @abstractmethod
    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """Iterate over the parameters (or ``names``), each whole on rank 0 and None elsewhere.

        A tensor is valid until the next one. All ranks iterate to the end.
        """

    def called_directly(self) -> AbstractContextManager[Any]:
        """Return a context to call parts of the model without gradients, by all ranks in step, as to write text."""
        return nullcontext()

    def averaged(self) -> AbstractContextManager[Any]:
        """Return a context in which the model has the weights that are evaluated and saved.

        If the optimizer averages, they differ from the trained weights, which are back afterwards, to the bit.
        """
        return nullcontext()

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Free threads and buffers; nothing is called afterwards."""


class TorchBackend(Backend):
    """A torch optimizer over the parameters of the model: one device, or several that share gradients (DDP, FSDP2)."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module)
        self.optimizer = optimizer
        self._trained_weights: dict[nn.Parameter, Tensor] = {}
        """Copies of the trained weights, while the model has their averages."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_gradients(self, max_norm: float) -> float:
        trained = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        value = self._number(norm)
        if max_norm > 0 and math.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return value

    def _number(self, norm: Tensor) -> float:
        return norm.item()

    def step(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def stepped(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()  # it puts another dictionary there when it loads: looked up now

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Return the optimizer's state by ``PARAMETER/KEY``, not copied; with trained weights if it averages."""
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
        """While active, a copy of the trained weights is held in host memory."""
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
        return share_out_whole(self.optimizer_tensors(), 0, 1)

    def load_slices(self, saved: SliceReader) -> None:
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
        return ((name, x.detach()) for name, x in self.module.named_parameters() if names is None or name in names)


class LocalBackend(TorchBackend):
    """One device, which holds everything."""

    whole = True


class BlockBackend(LocalBackend):
    """One device with all weights, and the gradients and moments of one block of layers.

    A checkpoint has the number of steps taken, which determines the block, and the block's moments, if there are any.
    """

    optimizer: BlockAdamW

    def __init__(self, module: nn.Module, optimizer: BlockAdamW) -> None:
        super().__init__(module, optimizer)

    def state(self) -> dict[str, Any]:
        return {"steps_taken": self.optimizer.steps_taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.go_to(state["steps_taken"])

    def load_slices(self, saved: SliceReader) -> None:
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
    """Load a state by parameter name; CheckpointError if it is another model's or optimizer's."""
    by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        by_parameter[name][key] = value
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    check_same_parameters(by_parameter, order)
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
    """Refuse a state that a kernel would read beyond its end: fused kernels look at the size of the weight alone."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(
            f"the optimizer's state of {name} in the checkpoint {what}", fix="use another checkpoint: --resume PATH"
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


LEAST_MOVED = 0.5
"""Share of the weights that a perturbation has to change."""


class ForwardBackend(TorchBackend):
    """Steps by the losses of a step's micro-batches at perturbed weights, without gradients (``optim.zeroth_order``).

    Several ranks have the same weights and draw the same directions. They exchange the loss of each forward alone, and
    then take the same step. The loss of a step is the mean of the measured losses; it equals the loss at the weights to
    second order in eps. Dropout takes the same random numbers in all forwards.

    Args:
        module: The streamed model.
        optimizer: Optimizer over its parameters.
        layers: Decoder layers of the model.
        world: The ranks that share the step.

    Raises:
        ArgumentError: The perturbation is lost in the rounding of most weights.
    """

    optimizer: ZerothOrderSGD

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZerothOrderSGD,
        layers: Iterable[nn.Module],
        world: World = WORLD,
    ) -> None:
        super().__init__(module, optimizer)
        self.whole, self.layers = world.size == 1, list(layers)
        self._world, self._loss = world, 0.0
        self._slopes: list[float] = []
        self._check_moved()

    def compute(self, take: Callable[[], StepScore | None]) -> StepScore | None:
        """Call ``take`` on both sides of the weights in each direction."""
        optimizer, began, scores = self.optimizer, capture_rng(), list[StepScore]()
        self._slopes = []
        for direction in range(optimizer.directions):
            losses = []
            for sign in (1, -1):
                restore_rng(began)
                self._loss = 0.0
                with perturbed(optimizer, self.module, self.layers, direction, sign), torch.no_grad():
                    score = take()
                if score is None:
                    return None
                scores.append(score)
                losses += self._world.sums([self._loss])
            self._slopes.append((losses[0] - losses[1]) / (2 * optimizer.eps))
        return StepScore.mean(scores)

    def backward(self, loss: Tensor) -> None:
        """Add a loss to the forward's loss."""
        self._loss += loss.item()

    def clip_gradients(self, max_norm: float) -> float:
        """Bound and return the root mean square of the slopes, which estimates the gradient's norm."""
        norm = math.sqrt(sum(slope * slope for slope in self._slopes) / max(1, len(self._slopes)))
        if 0 < max_norm < norm < math.inf:
            self._slopes = [slope * max_norm / norm for slope in self._slopes]
        return norm

    def step(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step(self._slopes)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._slopes = []

    def state(self) -> dict[str, Any]:
        return {"steps_taken": self.optimizer.steps_taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.steps_taken = state.get("steps_taken", 0)

    def slices(self) -> Iterator[Slice]:
        """Return nothing: no weight has a state."""
        return iter(())

    def load_slices(self, saved: SliceReader) -> None:
        """Load nothing: no weight has a state."""

    def _check_moved(self) -> None:
        moved = self.optimizer.moved_share()
        if moved < LEAST_MOVED:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
            raise ArgumentError(
                f"an eps of {self.optimizer.eps:g} is rounded off in {1 - moved:.0%} of the weights, which are in "
                f"{' and '.join(dtypes)}",
                where="optim_args.eps",
                fix="write a larger eps, dtype: float32, or train adapters (finetuning_type: lora)",
            )
