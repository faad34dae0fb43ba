"""Ranks of a run: check their number, join the process group, and create the training backend."""

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
from streamtune.distributed import check_ranks_agree
from streamtune.engine import SequenceParallel, decoder_layers
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.engine import DeviceKeys
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe
from streamtune.recipe.settings import OptimizerSettings, TrainingSettings
from streamtune.run.device import choose_device, prepare_libraries, refuse_unsuitable_device
from streamtune.run.model import choose_quantization, make_optimizer, weights_are_sharded
from streamtune.tasks import TASKS, Task
from streamtune.tasks.steps import check_final_learning_rate, count_micro_batches
from streamtune.tasks.task import Notify


def device_of_rank(device: torch.device) -> torch.device:
    """Return the accelerator with index ``LOCAL_RANK``; ``device`` itself on a CPU or without this variable."""
    if device.type != "cuda" or "LOCAL_RANK" not in os.environ:
        return device
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def leave_ranks() -> None:
    """Leave the process group when all ranks are done; no-op without a process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from streamtune.distributed.pytorch import leave_process_group

        leave_process_group()


def make_world(recipe: Recipe, device: torch.device, *, weights_are_sharded: bool) -> train.World:
    """Join the process group that the launcher's environment variables describe; without them there is one rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    check_rank_layout(recipe, size, weights_are_sharded=weights_are_sharded)
    if size == 1 and recipe.deepspeed is None and not recipe.fsdp:
        return train.WORLD
    from streamtune.distributed.pytorch import join_process_group

    if size == 1:  # DeepSpeed on one device: its host offload
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", "0")
    join_process_group(device)
    return train.World(int(os.environ["RANK"]), size, recipe.sequence_parallel_size)


def check_rank_layout(recipe: Recipe, size: int, *, weights_are_sharded: bool) -> train.World:
    """Check that the recipe can run on ``size`` ranks, and return the ranks as seen by rank 0.

    Raises:
        ArgumentError: The recipe cannot run on this number of ranks; ``where`` is the recipe key.
    """
    sequence_size = recipe.sequence_parallel_size
    if size % sequence_size:
        raise ArgumentError(
            f"the number of ranks must be a multiple of {sequence_size}, found {size}",
            where="sequence_parallel_size",
            fix=f"start a multiple of {sequence_size} ranks with --nproc, or lower sequence_parallel_size",
        )
    single_rank_keys = {
        "engine.weights": recipe.engine.weights == "host",
        "engine.optimizer": recipe.engine.optimizer == "host",
        "optim_in_backward": recipe.optim_in_backward,
    }
    if size > 1 and any(single_rank_keys.values()):
        key = next(name for name, is_set in single_rank_keys.items() if is_set)
        raise ArgumentError(
            f"'{key}' works on one device only, and the run has {size} ranks",
            where=key,
            fix="start one rank, or delete the line and write deepspeed: zero3_offload",
        )
    if weights_are_sharded:  # known from a DeepSpeed file; presets are checked when the recipe is read
        for key, problem, fix in recipe.find_sharding_conflicts():
            raise ArgumentError(problem, where=key, fix=fix)
    world = train.World(0, size, sequence_size)
    count_micro_batches(recipe, world)
    return world


def sequence_ranks(recipe: DeviceKeys, world: train.World) -> SequenceParallel | None:
    """Return the ranks that share this rank's sequences; None if each rank has its own. Called by all ranks."""
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
    """Return the training backend: DDP, FSDP2 or DeepSpeed, as the recipe sets, or a backend for one device.

    Args:
        recipe: Recipe of the run.
        model: Model changed by ``streamtune.stream``; on ``meta`` if its weights are loaded later.
        layers: Decoder layers of the model.
        world: Ranks of the run.
        device: Device of this rank; None if the weights are already loaded.

    Raises:
        ArgumentError: DeepSpeed is not installed or rejects its configuration, or the optimizer supports only one
            device.
    """
    layers = list(layers)
    if weights_are_sharded(recipe) and models.quantization_kind(model) == "nf4":
        models.shard_packed_weights(model, keeps_parameter_objects=recipe.deepspeed is not None)
    if recipe.deepspeed is not None:
        from streamtune.distributed.deepspeed import DeepSpeedBackend, check_deepspeed, shard_module
        from streamtune.distributed.deepspeed_config import resolve_config

        check_deepspeed()
        config = resolve_config(recipe.deepspeed, deepspeed_values(recipe, model, world))
        load_weights_by_layer(model, layers, world, device, lambda module: shard_module(module, config))
        return DeepSpeedBackend(model, make_optimizer(recipe, model), config, layers)
    if recipe.fsdp:
        from streamtune.distributed.pytorch import FsdpBackend, shard_layer

        load_weights_by_layer(model, layers, world, device, lambda module: shard_layer(module, layers))
        return FsdpBackend(model, lambda sharded: make_optimizer(recipe, sharded), layers)
    if world.size == 1:
        return local_backend(recipe, model, local_optimizer(recipe, model))
    if recipe.step_kind.gradients == "block":
        raise ArgumentError(
            f"'optim: {recipe.optim}' works on one device only, and the run has {world.size} ranks",
            where="optim",
            fix="start one process, or write optim: adamw",
        )
    optimizer = make_optimizer(recipe, model)
    if isinstance(optimizer, optim.ZerothOrderSGD):
        return train.ZerothOrderBackend(model, optimizer, layers, world)
    from streamtune.distributed.pytorch import DdpBackend

    return DdpBackend(model, optimizer)


def with_loss_scale(recipe: OptimizerSettings, backend: train.Backend) -> train.Backend:
    """Return ``backend``, with the initial loss scale if it computes gradients in float16."""
    if recipe.fp16 and recipe.step_kind.gradients != "none":
        backend.loss_scale = train.LossScale()
    return backend


def local_optimizer(recipe: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a run on one device, with states in host memory if ``engine.optimizer`` is ``host``."""
    optimizer = make_optimizer(recipe, model)
    return train.HostOptimizer(optimizer) if recipe.step_kind.states == "host" else optimizer


def local_backend(recipe: OptimizerSettings, model: nn.Module, optimizer: torch.optim.Optimizer) -> train.Backend:
    """Return the training backend for one device that fits the optimizer."""
    if isinstance(optimizer, optim.BlockAdamW):
        return train.BlockBackend(model, optimizer)
    if isinstance(optimizer, optim.ZerothOrderSGD):
        return train.ZerothOrderBackend(model, optimizer, decoder_layers(base_of(model)))
    if recipe.step_kind.gradients == "layer":
        return train.InBackwardBackend(model, optimizer, recipe.max_grad_norm, lagged=recipe.clip_norm == "lagged")
    return train.LocalBackend(model, optimizer)


def load_weights_by_layer(
    model: Any,
    layers: list[nn.Module],
    world: train.World,
    device: torch.device | None,
    shard: Callable[[nn.Module], None],
) -> None:
    """Load the weights of a model on ``meta``, one layer at a time; no-op for a loaded model.

    Args:
        model: Model changed by ``streamtune.stream``.
        layers: Decoder layers of the model.
        world: Ranks that shard the weights.
        device: Device of this rank.
        shard: Function that shards the weights of a module over the ranks.
    """
    source = models.find_deferred_weights(model)
    if source is None:
        return
    from streamtune.distributed.pytorch import load_sharded_weights

    assert device is not None, "unreachable: weights that are loaded later need a device"
    load_sharded_weights(model, layers, source, device=device, run_on_rank_0=world.run_on_rank_0, shard=shard)


def shard_reference(
    recipe: TrainingSettings, model: Any, layers: Iterable[nn.Module], world: train.World, device: torch.device
) -> Any:
    """Load the weights of a reference model on ``meta``, sharded like the trained model; no-op for a loaded model.

    Returns:
        The DeepSpeed engine that gathers the weights: keep it while the reference is called, then destroy it. None
            without DeepSpeed.
    """
    layers = list(layers)
    if models.find_deferred_weights(model) is None:
        return None
    if recipe.deepspeed is None:
        from torch.distributed.fsdp import fully_shard

        from streamtune.distributed.pytorch import shard_layer

        load_weights_by_layer(model, layers, world, device, lambda module: shard_layer(module, layers))
        fully_shard(model)
        return None
    from streamtune.distributed.deepspeed import gather_frozen_weights_on_call, shard_module
    from streamtune.distributed.deepspeed_config import resolve_config

    config = resolve_config(recipe.deepspeed, deepspeed_values(recipe, model, world))
    load_weights_by_layer(model, layers, world, device, lambda module: shard_module(module, config))
    return gather_frozen_weights_on_call(model, config, layers)


def gather_weights(recipe: DeviceKeys, model: Any) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, full tensor) of sharded parameters; the tensor is None on ranks other than 0."""
    if recipe.fsdp:
        from streamtune.distributed import pytorch

        return pytorch.gather_weights(model)
    from streamtune.distributed import deepspeed as deepspeed_backend

    return deepspeed_backend.gather_weights(model)


def deepspeed_values(recipe: TrainingSettings, model: Any, world: train.World) -> dict[str, Any]:
    """Return the values of a DeepSpeed configuration that the recipe sets, by dotted key.

    DeepSpeed counts batches per rank, even if several ranks share the same rows.
    """
    layers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    steps = count_micro_batches(recipe, world)
    return {
        "train_micro_batch_size_per_gpu": recipe.per_device_train_batch_size,
        "gradient_accumulation_steps": steps,
        "train_batch_size": recipe.per_device_train_batch_size * steps * world.size,
        "gradient_clipping": recipe.max_grad_norm,
        "fp16.enabled": False,  # the recipe's rules exclude fp16 with DeepSpeed
        "bf16.enabled": next(model.parameters()).dtype == torch.bfloat16,
        "torch_autocast.enabled": bool(recipe.bf16),
        "zero_optimization.reduce_bucket_size": min(500_000_000, max(1, layers)),
        "zero_optimization.stage3_param_persistence_threshold": 0,
        "zero_optimization.stage3_prefetch_bucket_size": 0,
        "zero_optimization.offload_optimizer.pin_memory": torch.cuda.is_available(),
        "zero_optimization.offload_param.pin_memory": torch.cuda.is_available(),
    }


@dataclass(frozen=True)
class RunSetup:
    """A recipe with its task, device, ranks, quantisation and micro-batches per step."""

    loaded: LoadedRecipe
    task: Task[Any]
    device: torch.device
    world: train.World
    quantization: str | None
    """Quantisation of frozen linear layers and experts: ``nf4``, ``int8`` or None."""
    weights_are_sharded: bool
    """True if the weights are sharded over ranks."""
    micro_batches: int
    """Number of micro-batches per rank in an optimizer step."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    def with_recipe(self, recipe: Recipe) -> Self:
        """Return a copy with another recipe, which may differ only in ``engine`` and in precision."""
        return replace(self, loaded=replace(self.loaded, recipe=recipe), task=self.task.with_recipe(recipe))

    @property
    def shard_world(self) -> train.World | None:
        """Ranks that shard the weights; None if each rank has all weights."""
        return self.world if self.weights_are_sharded else None

    @property
    def rows_per_step(self) -> int:
        """Number of rows, pairs or completions in an optimizer step on all ranks."""
        return self.recipe.per_device_train_batch_size * self.micro_batches * self.world.data_size


def resolve_setup(loaded: LoadedRecipe, notify: Notify) -> RunSetup:
    """Check the recipe for this machine, choose the device, and join the ranks of the run.

    Raises:
        ArgumentError: The objective rejects a setting, a device or library is missing, or the number of ranks is wrong.
        DistributedError: Versions or recipe differ between ranks, or ranks cannot reach each other.
    """
    recipe = loaded.recipe
    task = TASKS[recipe.objective].for_run(recipe, loaded.path.parent, notify)
    check_reference_start(task)
    device = device_of_rank(choose_device(recipe.device))
    refuse_unsuitable_device(device, recipe.objective, int(os.environ.get("WORLD_SIZE", "1")))
    if recipe.deterministic:
        train.use_deterministic_kernels()
    quantization = choose_quantization(recipe, device)
    optim.check_optimizer(recipe.optim, device.type)
    prepare_libraries(device)
    check_ranks_agree(_shared_settings(recipe))
    is_weight_sharded = weights_are_sharded(recipe)
    world = make_world(recipe, device, weights_are_sharded=is_weight_sharded)
    check_final_learning_rate(recipe, world)
    return RunSetup(loaded, task, device, world, quantization, is_weight_sharded, count_micro_batches(recipe, world))


def check_reference_start(task: Task[Any]) -> None:
    """Check that the reference is the model that training starts from.

    By default the reference is the trained model without its adapters. This is wrong if training starts from trained
    adapters or from LoftQ adapters.

    Raises:
        ArgumentError: Training starts from such adapters, and the recipe names no reference.
    """
    if not task.uses_reference or task.reference_name is not None:
        return
    if task.recipe.starts_from_quantisation:
        raise ArgumentError(
            "training starts from LoftQ adapters, which correct the quantisation of the base, but the reference would "
            "be the model without them",
            where="adapter_type",
            fix=f"write ref_model_name_or_path: {task.recipe.model_name_or_path or 'NAME'}, or adapter_type: lora",
        )
    given = task.recipe.adapter_name_or_path if task.recipe.finetuning_type != "full" else None
    if given is None:
        return
    raise ArgumentError(
        f"training starts from the adapters in {given}, but the reference would be the model without them",
        where="adapter_name_or_path",
        fix=f"merge them, `streamtune export {given} OUT`, and write ref_model_name_or_path: OUT (or "
        "model_name_or_path: OUT in place of the adapters)",
    )


def _shared_settings(recipe: Recipe) -> dict[str, str]:
    """Return all settings except file paths; they must be equal on all ranks."""
    settings = recipe.model_dump(mode="json", exclude={"output_dir", "datasets", "eval_datasets"})
    return {f"recipe {name}": json.dumps(value) for name, value in settings.items()}
