"""Training backends, which run the backward pass and the optimizer step.

This module has the backends for one device; ``streamtune.distributed`` has the backends for several ranks.
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
    pack_state,
    perturb_weights,
    set_learning_rate,
    uses_averaged_weights,
)
from streamtune.train.loss_scale import LossScale
from streamtune.train.objective import StepScore
from streamtune.train.process import capture_rng, restore_rng
from streamtune.train.slices import MASTER, Slice, SliceReader, check_parameters_are_trained, slices_of_replicated_state
from streamtune.train.world import WORLD, World

TRAINED = "trained"
"""Key of the trained weights in the state of an averaging optimizer, whose averaged weights are saved as the model."""


class Backend(ABC):
    """Base class of training backends. A backend owns the weights, gradients and optimizer of a run.

    The gradient of a step is the sum over all ranks, not the mean.

    Args:
        module: Model changed by ``streamtune.stream``.
        config: Full configuration of the backend's library, such as DeepSpeed; empty if the library has none.
    """

    has_whole_state = False
    """True if this rank has the whole optimizer state; its slices, also in a checkpoint, are then whole tensors."""

    clip_norm: float | None = None
    """Gradient norm by which this step is clipped; None if it is the step's own norm."""

    loss_scale: LossScale | None = None
    """Factor of the loss in float16 training; None: the loss is not scaled."""

    def __init__(self, module: nn.Module, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.module, self.config = module, config

    @property
    def model(self) -> Any:
        """Module to call in training steps: ``module``, or the wrapper of DDP or DeepSpeed around it."""
        return self.module

    def begin_step(self, learning_rate: float, recompute: Callable[[], object]) -> None:  # noqa: B027 (most need nothing)
        """Prepare an optimizer step. Called before the first forward pass of the step.

        Args:
            learning_rate: Learning rate of the step.
            recompute: Function that computes the step's gradients again, with the same rows and random numbers.
        """

    def compute_gradients(self, run_micro_batches: Callable[[], StepScore | None]) -> StepScore | None:
        """Compute the gradients of a step; return its score, or None if the step was interrupted.

        Args:
            run_micro_batches: Function that runs forward and backward passes of all micro-batches; may be called
                several times.
        """
        return run_micro_batches()

    def micro_batch_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context manager for the forward and backward pass of one micro-batch.

        Args:
            last: True for the last micro-batch of the step.
        """
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``, a scalar, and add them to the gradients of the step."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradients to ``max_norm`` (0: no clipping), now or in :meth:`step`; return the norm before
        clipping."""

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """Update the weights and free the gradients."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Free the gradients without an update."""

    @abstractmethod
    def reset_optimizer(self) -> None:
        """Reset the optimizer states to the states before the first step."""

    def scaled_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, from which the backward starts."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def state(self) -> dict[str, Any]:
        """Return JSON values, equal on all ranks, to save in a checkpoint in addition to the optimizer states."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have none)
        """Restore the result of :meth:`state`; empty if the checkpoint has none."""

    @abstractmethod
    def updated_weights(self) -> Iterator[Tensor]:
        """Iterate over the trained weights; if they are sharded, over this rank's shards."""

    @abstractmethod
    def optimizer_slices(self) -> Iterator[Slice]:
        """Iterate over the optimizer states that this rank saves; all ranks together save each value once."""

    @abstractmethod
    def load_optimizer_slices(self, saved: SliceReader) -> None:
        """Load the optimizer states of this rank, which any number of ranks may have saved.

        A parameter without saved state starts with a fresh one.

        Raises:
            CheckpointError: The states do not belong to this model.
        """

    @abstractmethod
    def full_weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """Iterate over (parameter name, full tensor); the tensor is None on ranks other than 0.

        All ranks must iterate to the end, because each tensor may be gathered. A tensor is valid only until the next
        iteration.

        Args:
            names: Names of the parameters; None: all.
        """

    def allow_direct_calls(self) -> AbstractContextManager[Any]:
        """Return a context manager in which all ranks may call submodules of the model without gradients, as in
        generation."""
        return nullcontext()

    def use_averaged_weights(self) -> AbstractContextManager[Any]:
        """Return a context manager in which the model has the weights to evaluate and save.

        If the optimizer averages weights, these are the averaged weights. On exit the trained weights are restored
        exactly.
        """
        return nullcontext()

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Free threads and buffers. The backend must not be used afterwards."""


class TorchBackend(Backend):
    """Backend with a ``torch.optim.Optimizer``: on one device, with DDP or FSDP2."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module)
        self.optimizer = optimizer
        self._trained_weights: dict[nn.Parameter, Tensor] = {}
        """Copies of the trained weights while the model has the averaged weights; empty at other times."""

    def backward(self, loss: Tensor) -> None:
        self.scaled_loss(loss).backward()

    def clip_gradients(self, max_norm: float) -> float:
        trained = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        if self.loss_scale is not None:
            with torch.no_grad():
                torch._foreach_mul_(grads, 1 / self.loss_scale.value)
        norm = total_gradient_norm(grads)
        value = self._to_float(norm)
        if max_norm > 0 and math.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return value

    def _to_float(self, norm: Tensor) -> float:
        return norm.item()

    def step(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def updated_weights(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()  # loading replaces the dictionary, so it is looked up here

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the optimizer states by ``NAME/KEY`` (parameter name and state key), not copied.

        If the optimizer averages weights, the trained weights are included.
        """
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        trained = {
            f"{names[id(p)]}/{TRAINED}": self._trained_weights.get(p, p.detach())
            for group in self.optimizer.param_groups
            if uses_averaged_weights(group)
            for p in group["params"]
        }
        return {**optimizer_tensors(self.optimizer, self.module), **trained}

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        if self._trained_weights or not any(map(uses_averaged_weights, self.optimizer.param_groups)):
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

    def optimizer_slices(self) -> Iterator[Slice]:
        return slices_of_replicated_state(self.optimizer_tensors(), 0, 1)

    def load_optimizer_slices(self, saved: SliceReader) -> None:
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        saved.check_parameters(trained)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if TRAINED in saved.state_keys(name):
                    parameter.copy_(saved.read_whole(name, TRAINED))
        keys = {name: [key for key in saved.state_keys(name) if key not in (MASTER, TRAINED)] for name in trained}
        tensors = {f"{name}/{key}": saved.read_whole(name, key) for name in trained for key in keys[name]}
        if tensors:
            load_optimizer_tensors(self.optimizer, self.module, tensors)

    def full_weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        return ((name, x.detach()) for name, x in self.module.named_parameters() if names is None or name in names)


NORM_SLICE = 1 << 20
"""Number of values of a narrow gradient on the CPU that are read at a time."""


def gradient_norm(grad: Tensor) -> Tensor:
    """Return the norm of a gradient, in float32 if the gradient is narrower: a float16 norm is infinite from 65,520."""
    if grad.dtype.itemsize >= 4:
        return torch.linalg.vector_norm(grad)
    if type(grad) is not Tensor or grad.device.type != "cpu" or not grad.is_contiguous():
        return torch.linalg.vector_norm(grad, dtype=torch.float32)
    # On the CPU torch makes a float32 copy of what it reads.
    parts = grad.view(-1).split(NORM_SLICE)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x, dtype=torch.float32) for x in parts]))


def total_gradient_norm(grads: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together."""
    if all(grad.dtype.itemsize >= 4 for grad in grads):
        return torch.nn.utils.get_total_norm(grads)
    device = grads[0].device
    return torch.linalg.vector_norm(torch.stack([gradient_norm(grad).to(device) for grad in grads]))


class LocalBackend(TorchBackend):
    """Backend for one device, which has the whole optimizer state."""

    has_whole_state = True


class BlockBackend(LocalBackend):
    """Backend for ``BlockAdamW`` on one device; gradients and moments exist for one block of layers at a time.

    A checkpoint has the number of steps, which determines the block, and the moments of that block.
    """

    optimizer: BlockAdamW

    def __init__(self, module: nn.Module, optimizer: BlockAdamW) -> None:
        super().__init__(module, optimizer)

    def state(self) -> dict[str, Any]:
        return {"steps_taken": self.optimizer.steps_taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.train_block_after(state["steps_taken"])


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the optimizer states by ``NAME/KEY`` (parameter name and state key), not copied."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in pack_state(optimizer.state.get(parameter, {})).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load optimizer states from tensors named ``NAME/KEY`` (parameter name and state key).

    Raises:
        CheckpointError: The states do not belong to this model or optimizer.
    """
    by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        by_parameter[name][key] = value
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameter_order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    check_parameters_are_trained(by_parameter, parameter_order)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _check_state_shapes(names[id(parameter)], parameter, by_parameter.get(names[id(parameter)], {}), group)
    # torch numbers parameters in the order of the groups, and moves each entry to its device.
    state = {index: by_parameter[name] for index, name in enumerate(parameter_order) if name in by_parameter}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


ADAMW_STATE_KEYS = {"step", "exp_avg", "exp_avg_sq"}
QUANTIZED_BLOCK_SIZE = 256
"""Number of values per quantization scale in states of bitsandbytes, and number of entries of the quantization map."""


def _check_state_shapes(name: str, parameter: Tensor, entry: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Check the shapes and dtypes of a saved optimizer state: fused kernels would read beyond the end of a smaller
    state."""

    def mismatch_error(problem: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint's optimizer state of {name} {problem}", fix="use another checkpoint: --resume PATH"
        )

    rule = group.get("rule")
    own_shapes = rule in RULES and RULES[rule].has_other_shapes  # torch's operators check these shapes
    if rule in (None, "adamw") and entry and (missing := ADAMW_STATE_KEYS - entry.keys()):
        raise mismatch_error(f"has no {', '.join(sorted(missing))}")
    for key, value in entry.items():
        kind = key.rstrip("12")
        if kind == "absmax":
            has_right_size = value.numel() == -(-parameter.numel() // QUANTIZED_BLOCK_SIZE)
        elif kind == "qmap":
            has_right_size = value.numel() == QUANTIZED_BLOCK_SIZE
        else:
            has_right_size = value.ndim == 0 or own_shapes or value.shape == parameter.shape
        if not has_right_size:
            raise mismatch_error(
                f"has '{key}' of shape {list(value.shape)}, but the weight has shape {list(parameter.shape)}"
            )
        if key in ADAMW_STATE_KEYS and not value.is_floating_point() and rule in (None, "adamw"):
            raise mismatch_error(f"has '{key}' in {str(value.dtype).removeprefix('torch.')}, expected floating point")


MIN_CHANGED_FRACTION = 0.5
"""Smallest fraction of the weights that a perturbation must change."""


class ZerothOrderBackend(TorchBackend):
    """Backend for zeroth-order optimization (MeZO): losses at perturbed weights, without a backward pass.

    All ranks have equal weights and draw the same random directions. They exchange only the losses, and then take the
    same step. The reported loss is the mean over all perturbations.

    Args:
        module: Model changed by ``streamtune.stream``.
        optimizer: Optimizer of the model's parameters.
        layers: Decoder layers of the model.
        world: Ranks of the run.

    Raises:
        ArgumentError: Rounding absorbs the perturbation in most weights.
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
        self.has_whole_state, self.layers = world.size == 1, list(layers)
        self._world, self._loss = world, 0.0
        self._slopes: list[float] = []
        self._check_perturbation_size()

    def compute_gradients(self, run_micro_batches: Callable[[], StepScore | None]) -> StepScore | None:
        """Call ``run_micro_batches`` with weights perturbed by +eps and -eps along each direction; return the mean
        score."""
        optimizer, rng, scores = self.optimizer, capture_rng(), list[StepScore]()
        self._slopes = []
        for direction in range(optimizer.directions):
            losses = []
            for sign in (1, -1):
                restore_rng(rng)
                self._loss = 0.0
                with perturb_weights(optimizer, self.module, self.layers, direction, sign), torch.no_grad():
                    score = run_micro_batches()
                if score is None:
                    return None
                scores.append(score)
                losses += self._world.sum_over_ranks([self._loss])
            self._slopes.append((losses[0] - losses[1]) / (2 * optimizer.eps))
        return StepScore.mean(scores)

    def backward(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch to the total at the perturbed weights; no gradient is computed."""
        self._loss += loss.item()

    def clip_gradients(self, max_norm: float) -> float:
        """Return the root mean square of the directional derivatives as gradient norm, and clip the derivatives."""
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

    def optimizer_slices(self) -> Iterator[Slice]:
        return iter(())

    def load_optimizer_slices(self, saved: SliceReader) -> None:
        """Do nothing: the optimizer has no tensors as state."""

    def _check_perturbation_size(self) -> None:
        moved = self.optimizer.perturbed_value_fraction()
        if moved < MIN_CHANGED_FRACTION:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
            raise ArgumentError(
                f"eps {self.optimizer.eps:g} is too small: rounding absorbs it in {1 - moved:.0%} of the weights "
                f"({' and '.join(dtypes)})",
                where="optim_args.eps",
                fix="set a larger eps or dtype: float32, or train adapters (finetuning_type: lora)",
            )
