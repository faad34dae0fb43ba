"""Resolve a recipe for the ranks at hand, and make those ranks and the backend that shares gradients and weights.

make_world     which rank this process is; the process group is joined
check_layout   refuses a number of ranks that does not suit the recipe
make_backend   DDP, FSDP2 or DeepSpeed by the recipe; one device by itself
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from streamtune import models, optim, train
from streamtune.base.adapters import base_of
from streamtune.distributed import agree
from streamtune.engine import SequenceParallel, decoder_layers
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.engine import DeviceKeys
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe
from streamtune.recipe.settings import OptimizerSettings, TrainingSettings
from streamtune.run.device import choose_device, prepare_libraries
from streamtune.run.model import choose_quantization, make_optimizer, shares_weights
from streamtune.tasks import TASKS, Task
from streamtune.tasks.steps import accumulation
from streamtune.tasks.task import Notify


def device_of_rank(device: torch.device) -> torch.device:
    """Return the accelerator of this rank, by ``LOCAL_RANK``, where a machine has several; else ``device`` itself."""
    if device.type != "cuda" or "LOCAL_RANK" not in os.environ:
        return device
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def leave_ranks() -> None:
    """Leave the process group, if there is one, when all ranks are done."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from streamtune.distributed.pytorch import leave

        leave()


def make_world(recipe: Recipe, device: torch.device, *, shares_weights: bool) -> train.World:
    """Join the ranks of this run, by the environment variables of their launcher; without them the run has one rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    check_layout(recipe, size, shares_weights=shares_weights)
    if size == 1 and recipe.deepspeed is None and not recipe.fsdp:
        return train.WORLD
    from streamtune.distributed.pytorch import join

    if size == 1:  # DeepSpeed on one device: its host offload
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", "0")
    join(device)
    return train.World(int(os.environ["RANK"]), size, recipe.sequence_parallel_size)


def check_layout(recipe: Recipe, size: int, *, shares_weights: bool) -> train.World:
    """Return rank 0 of ``size`` ranks, after checking that the recipe can be laid out on them. Nothing is joined."""
    together = recipe.sequence_parallel_size
    if size % together:
        raise ArgumentError(
            f"{together} ranks are to share each sequence, and there {'is' if size == 1 else 'are'} {size}",
            where="sequence_parallel_size",
            fix="start a multiple of that many, with --nproc, or share each sequence between fewer",
        )
    alone = {
        "engine.weights": recipe.engine.weights == "host",
        "engine.optimizer": recipe.engine.optimizer == "host",
        "optim_in_backward": recipe.optim_in_backward,
    }
    if size > 1 and any(alone.values()):
        key = next(name for name, chosen in alone.items() if chosen)
        raise ArgumentError(
            f"'{key}' is for one device by itself, and there are {size} ranks",
            where=key,
            fix="start one rank, or delete the line and write deepspeed: zero3_offload",
        )
    if shares_weights:  # by a DeepSpeed file: presets are refused where the recipe is read
        for key, what, fix in recipe.needs_whole_weights():
            raise ArgumentError(what, where=key, fix=fix)
    world = train.World(0, size, together)
    accumulation(recipe, world)
    return world


def sequence_ranks(recipe: DeviceKeys, world: train.World) -> SequenceParallel | None:
    """Return the ranks that share this rank's sequences; None where each has its own. Called by all ranks together."""
    if world.sequence_size == 1:
        return None
    from streamtune.distributed.pytorch import sequence_group

    return SequenceParallel(sequence_group(world.sequence_size), form=recipe.sequence_parallel)


def make_backend(
    recipe: TrainingSettings,
    model: Any,
    layers: Iterable[nn.Module],
    world: train.World,
    device: torch.device | None = None,
) -> train.Backend:
    """Make the backend that computes gradients and updates the weights.

    Args:
        model: The streamed model, the same on every rank, or on ``meta`` where its weights are still to come.
        device: The device of this rank; None where the weights are there.

    Raises:
        ArgumentError: DeepSpeed is not installed or refuses what is asked of it.
    """
    layers = list(layers)
    if shares_weights(recipe) and models.quantization(model) == "nf4":
        models.divide_packed(model, keeps_objects=recipe.deepspeed is not None)
    if recipe.deepspeed is not None:
        from streamtune.distributed.deepspeed import DeepSpeedBackend, check_deepspeed, share_module
        from streamtune.distributed.deepspeed_config import resolve_config

        check_deepspeed()
        config = resolve_config(recipe.deepspeed, config_values(recipe, model, world))
        fill_model(model, layers, world, device, lambda module: share_module(module, config))
        return DeepSpeedBackend(model, make_optimizer(recipe, model), config, layers)
    if recipe.fsdp:
        from streamtune.distributed.pytorch import FsdpBackend, share_layer

        fill_model(model, layers, world, device, lambda module: share_layer(module, layers))
        return FsdpBackend(model, lambda sharded: make_optimizer(recipe, sharded), layers)
    if world.size == 1:
        return local_backend(recipe, model, local_optimizer(recipe, model))
    if recipe.step_kind.gradients == "block":
        raise ArgumentError(
            f"'optim: {recipe.optim}' is for one device by itself, and the run has {world.size} ranks",
            where="optim",
            fix="start one process, or write optim: adamw",
        )
    optimizer = make_optimizer(recipe, model)
    if isinstance(optimizer, optim.ZerothOrderSGD):
        return train.ForwardBackend(model, optimizer, layers, world)
    from streamtune.distributed.pytorch import DdpBackend

    return DdpBackend(model, optimizer)


def local_optimizer(recipe: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of one device by itself, whose states are on the host if the recipe says so."""
    optimizer = make_optimizer(recipe, model)
    return train.HostOptimizer(optimizer) if recipe.step_kind.states == "host" else optimizer


def local_backend(recipe: OptimizerSettings, model: nn.Module, optimizer: torch.optim.Optimizer) -> train.Backend:
    if isinstance(optimizer, optim.BlockAdamW):
        return train.BlockBackend(model, optimizer)
    if isinstance(optimizer, optim.ZerothOrderSGD):
        return train.ForwardBackend(model, optimizer, decoder_layers(base_of(model)))
    if recipe.step_kind.gradients == "layer":
        return train.InBackwardBackend(model, optimizer, recipe.max_grad_norm, lagged=recipe.clip_norm == "lagged")
    return train.LocalBackend(model, optimizer)


def fill_model(
    model: Any,
    layers: list[nn.Module],
    world: train.World,
    device: torch.device | None,
    share: Callable[[nn.Module], None],
) -> None:
    """Give a model on ``meta`` its weights, a layer at a time; one that has them is left as it is.

    Args:
        model: The streamed model.
        share: Shares the weights of a layer between the ranks.
    """
    source = models.deferred_of(model)
    if source is None:
        return
    from streamtune.distributed.pytorch import fill

    assert device is not None, "weights that are to come go somewhere"
    fill(model, layers, source, device=device, main=world.main, share=share)


def share_reference(
    recipe: TrainingSettings, model: Any, layers: Iterable[nn.Module], world: train.World, device: torch.device
) -> Any:
    """Give a reference on ``meta`` its weights, shared as the trained model's are; any other is left as it is.

    Returns:
        The object that gathers its weights, to be kept while it is called and destroyed after; None where hooks do.
    """
    layers = list(layers)
    if models.deferred_of(model) is None:
        return None
    if recipe.deepspeed is None:
        from torch.distributed.fsdp import fully_shard

        from streamtune.distributed.pytorch import share_layer

        fill_model(model, layers, world, device, lambda module: share_layer(module, layers))
        fully_shard(model)
        return None
    from streamtune.distributed.deepspeed import share_frozen, share_module
    from streamtune.distributed.deepspeed_config import resolve_config

    config = resolve_config(recipe.deepspeed, config_values(recipe, model, world))
    fill_model(model, layers, world, device, lambda module: share_module(module, config))
    return share_frozen(model, config, layers)


def whole_weights(recipe: DeviceKeys, model: Any) -> Iterator[tuple[str, Tensor | None]]:
    """Iterate over the parameters of a sharded model, each whole on rank 0 until the next one. Called by all ranks."""
    if recipe.fsdp:
        from streamtune.distributed import pytorch

        return pytorch.whole_weights(model)
    from streamtune.distributed import deepspeed as deepspeed_backend

    return deepspeed_backend.whole_weights(model)


def config_values(recipe: TrainingSettings, model: Any, world: train.World) -> dict[str, Any]:
    """Return the values of a DeepSpeed configuration that follow from the recipe.

    Batches are counted per rank, whether each rank has rows of its own or a part of the same ones.
    """
    layers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    steps = accumulation(recipe, world)
    return {
        "train_micro_batch_size_per_gpu": recipe.per_device_train_batch_size,
        "gradient_accumulation_steps": steps,
        "train_batch_size": recipe.per_device_train_batch_size * steps * world.size,
        "gradient_clipping": recipe.max_grad_norm,
        "bf16.enabled": next(model.parameters()).dtype == torch.bfloat16,
        "torch_autocast.enabled": bool(recipe.bf16),
        "zero_optimization.reduce_bucket_size": min(500_000_000, max(1, layers)),
        "zero_optimization.stage3_param_persistence_threshold": 0,
        "zero_optimization.stage3_prefetch_bucket_size": 0,
        "zero_optimization.offload_optimizer.pin_memory": torch.cuda.is_available(),
        "zero_optimization.offload_param.pin_memory": torch.cuda.is_available(),
    }


@dataclass(frozen=True)
class Setup:
    """A recipe with everything that follows from it on the device and the ranks at hand."""

    loaded: LoadedRecipe
    task: Task[Any]
    device: torch.device
    """The device of this rank."""
    world: train.World
    """The ranks that train together."""
    quantization: str | None
    """``nf4`` or ``int8``: of frozen linear layers and experts."""
    shares_weights: bool
    """True if each rank holds a part of the weights."""
    micro_batches: int
    """Micro-batches of a rank in an optimizer step."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    def with_recipe(self, recipe: Recipe) -> Self:
        """Return the setup of a recipe that differs in ``engine`` and in precision alone."""
        return replace(self, loaded=replace(self.loaded, recipe=recipe), task=self.task.with_recipe(recipe))

    @property
    def sharing(self) -> train.World | None:
        """The ranks that share the weights; None where each has all of them."""
        return self.world if self.shares_weights else None

    @property
    def rows_per_step(self) -> int:
        """Number of the task's units in an optimizer step, of all ranks."""
        return self.recipe.per_device_train_batch_size * self.micro_batches * self.world.data_size


def resolve(loaded: LoadedRecipe, notify: Notify) -> Setup:
    """Check the settings of the objective, choose the device, and join the ranks.

    Raises:
        ArgumentError: The objective refuses a setting, a device or library is not there, or the ranks cannot be laid
            out.
        DistributedError: The ranks have other versions or another recipe, or do not reach each other.
    """
    recipe = loaded.recipe
    task = TASKS[recipe.objective].of_run(recipe, loaded.path.parent, notify)
    check_start(task)
    device = device_of_rank(choose_device(recipe.device))
    if recipe.deterministic:
        train.use_deterministic_kernels()
    quantization = choose_quantization(recipe, device)
    optim.check_optimizer(recipe.optim, device.type)
    prepare_libraries(device)
    agree(_facts(recipe))
    shares = shares_weights(recipe)
    world = make_world(recipe, device, shares_weights=shares)
    return Setup(loaded, task, device, world, quantization, shares, accumulation(recipe, world))


def check_start(task: Task[Any]) -> None:
    """Refuse to compare with the model without its adapters where training starts with trained adapters."""
    if not task.compares or task.reference_name is not None:
        return
    if task.recipe.starts_from_quantisation:
        raise ArgumentError(
            "training starts from adapters that make up for the quantisation of the base, and its reference would be "
            "the model without them",
            where="adapter_type",
            fix=f"write ref_model_name_or_path: {task.recipe.model_name_or_path or 'NAME'}, or adapter_type: lora",
        )
    given = task.recipe.adapter_name_or_path if task.recipe.finetuning_type != "full" else None
    if given is None:
        return
    raise ArgumentError(
        f"training starts from the adapters in {given}, and its reference would be the model without them",
        where="adapter_name_or_path",
        fix=f"merge them, `streamtune export {given} OUT`, and write ref_model_name_or_path: OUT (or "
        "model_name_or_path: OUT in place of the adapters)",
    )


def _facts(recipe: Recipe) -> dict[str, str]:
    """Return the settings that must be the same on all ranks: all but the places of files."""
    settings = recipe.model_dump(mode="json", exclude={"output_dir", "datasets", "eval_datasets"})
    return {f"recipe {name}": json.dumps(value) for name, value in settings.items()}
