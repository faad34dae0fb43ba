"""Training with DeepSpeed ZeRO stages 1, 2 and 3, with as much communication as without chunked computation.

Each decoder layer is one autograd node, which returns each parameter's gradient once per micro-batch, however many
chunks a sequence has. So ZeRO reduces each gradient once. In stage 3 a decoder layer is a ZeRO leaf module: hooks
gather all its weights together, once for the forward pass and once for the backward pass. No DeepSpeed function is
patched.

DeepSpeed averages gradients over ranks, but here they must be summed. So each loss is multiplied by the number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from streamtune.base.adapters import base_of
from streamtune.engine.inspect_model import first_differentiated_layer
from streamtune.engine.sharded import require_output_gradient
from streamtune.errors import ArgumentError
from streamtune.optim import WeightwiseOptimizer, pack_number, set_learning_rate
from streamtune.train.backend import Backend
from streamtune.train.slices import MASTER, Slice, SliceReader

NO_MICRO_STEP = -1
"""DeepSpeed's ``micro_step_id`` before the first backward of a step."""


class _OptimizerRange(NamedTuple):
    """Range of a parameter that this rank updates, stored in a flat fp32 tensor of DeepSpeed."""

    flat: Tensor
    start: int
    """Offset of the range in ``flat``."""
    offset: int
    """Offset of the range in the flattened parameter."""
    length: int

    @property
    def flat_slice(self) -> slice:
        return slice(self.start, self.start + self.length)


def check_deepspeed() -> None:
    """Raise an ArgumentError if DeepSpeed is not installed."""
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            f"DeepSpeed is not installed ({error})", where="deepspeed", fix="pip install 'deepspeed>=0.18'"
        ) from None


def _init_deepspeed() -> None:
    import deepspeed

    if not distributed.get_backend().startswith("nccl") and not torch.cuda.is_available():
        # The operator for shared memory between CPU ranks takes a minute to compile and saves no time here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed(dist_init_required=False)


class DeepSpeedBackend(Backend):
    """Training backend with DeepSpeed ZeRO.

    Args:
        module: Model changed by ``streamtune.stream``, on this rank's device; offloaded weights are on the host.
        optimizer: Optimizer of the module's parameters.
        config: DeepSpeed configuration without ``auto`` values.
        layers: Decoder layers; all weights of a layer are gathered together.

    Raises:
        ArgumentError: DeepSpeed is not installed, or rejects the configuration or the optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        layers: Iterable[nn.Module],
    ) -> None:
        check_deepspeed()
        import deepspeed

        _init_deepspeed()
        super().__init__(module, config)
        self.stage = int(config["zero_optimization"]["stage"])
        if self.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(module, list({type(layer) for layer in layers}))
        try:
            self.engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=dict(config), dist_init_required=False
            )
        except (ValueError, AssertionError, deepspeed.runtime.config.DeepSpeedConfigError) as error:
            raise ArgumentError(f"DeepSpeed rejects the configuration: {error}", where="deepspeed") from error
        embedding: Any = module.get_input_embeddings()  # type: ignore[operator]
        frozen = not any(parameter.requires_grad for parameter in embedding.parameters())
        if self.stage == 3 and frozen and first_differentiated_layer(base_of(module)) == 0:
            # A leaf module gathers its weights in the backward only if its first input requires a gradient. This hook
            # must run after DeepSpeed's own hooks, which would otherwise gather the frozen embedding for a backward.
            # If the lowest layers are frozen too, the streamed model does this for its lowest trained layer.
            embedding.register_forward_hook(require_output_gradient)
        self.size = distributed.get_world_size()

    @property
    def model(self) -> Any:
        return self.engine

    def micro_batch_context(self, *, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.size, scale_wrt_gas=False)

    def clip_gradients(self, max_norm: float) -> float:
        """Return the gradient norm over all ranks; DeepSpeed clips the gradients in :meth:`step`."""
        assert max_norm == self.engine.gradient_clipping()
        local = sum(
            (part.detach().double().square().sum() for part in self._gradient_shards()),
            torch.zeros((), dtype=torch.float64),
        )
        total = local.to("cpu")
        distributed.all_reduce(total)
        return math.sqrt(total.item())

    def _gradient_shards(self) -> Iterator[Tensor]:
        from deepspeed.utils import safe_get_local_grad

        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if self.stage == 3:
                yield safe_get_local_grad(parameter)
            elif getattr(parameter, "_hp_mapping", None) is not None:
                yield parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]

    def step(self, learning_rate: float) -> None:
        set_learning_rate(self.engine.optimizer, learning_rate)
        self.engine.step()

    def drop_gradients(self) -> None:
        optimizer = self.engine.optimizer
        optimizer.zero_grad(set_to_none=True)
        optimizer.averaged_gradients.clear()
        if self.stage < 3:  # zero_grad alone would let the next backward add to the host copies
            optimizer.micro_step_id = NO_MICRO_STEP
        if getattr(optimizer, "cpu_offload", False):
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()

    def reset_optimizer(self) -> None:
        for state in self.engine.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
            state.update({key: 0 for key, value in state.items() if isinstance(value, int)})

    def updated_weights(self) -> Iterator[Tensor]:
        """Yield this rank's shards of the trained weights; fp32 master weights if the weights are bf16 or fp16."""
        parts = (self._optimizer_range(parameter) for _, parameter in self._trained_parameters())
        return (part.flat[part.flat_slice] for part in parts if part is not None)

    def optimizer_slices(self) -> Iterator[Slice]:
        for name, parameter in self._trained_parameters():
            part = self._optimizer_range(parameter)
            if part is None:
                continue
            shape = self._full_shape(parameter)
            if part.flat.dtype != parameter.dtype:
                yield Slice(name, MASTER, shape, part.offset, part.flat.detach()[part.flat_slice])
            for key, value in self._optimizer_state(part.flat).items():
                if isinstance(value, Tensor) and value.shape == part.flat.shape:
                    yield Slice(name, key, shape, part.offset, value[part.flat_slice])
                elif part.offset == 0:  # a step count, saved by the rank with the parameter's first element
                    yield Slice(name, key, (), 0, self._to_saved_step_count(value).reshape(1))

    def load_optimizer_slices(self, saved: SliceReader) -> None:
        trained = self._trained_parameters()
        saved.check_parameters([name for name, _ in trained])
        state = self.engine.optimizer.optimizer.state
        reset_ids: set[int] = set()
        for name, parameter in trained:
            part = self._optimizer_range(parameter)
            if part is None:
                continue
            flat = part.flat
            if id(flat) not in reset_ids:
                reset_ids.add(id(flat))
                state[flat] = {}
            for key in saved.state_keys(name):
                if key == MASTER:
                    if flat.dtype != parameter.dtype:
                        with torch.no_grad():
                            flat[part.flat_slice].copy_(saved.read(name, key, part.offset, part.length))
                elif saved.shape(name, key) == ():  # a step count
                    state[flat][key] = self._to_optimizer_step_count(flat, saved.read(name, key, 0, 1))
                else:
                    values = state[flat].setdefault(key, torch.zeros_like(flat, requires_grad=False))
                    values[part.flat_slice].copy_(saved.read(name, key, part.offset, part.length))
        if self.stage < 3:  # DeepSpeed still refers to the old state
            self.engine.optimizer._hp_optimizer_states_linked = False

    def _to_optimizer_step_count(self, flat: Tensor, steps: Tensor) -> Any:
        optimizer = self.engine.optimizer.optimizer
        if type(optimizer) is not torch.optim.AdamW:
            return int(steps.item())  # DeepSpeed's own optimizers
        return steps.reshape(()).to(flat.device if optimizer.defaults.get("fused") else "cpu", torch.float32)

    def _to_saved_step_count(self, value: Any) -> Tensor:
        if isinstance(self.engine.optimizer.optimizer, WeightwiseOptimizer):
            return pack_number(value)
        return torch.as_tensor(value, dtype=torch.float32)

    def _trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def _full_shape(self, parameter: Any) -> tuple[int, ...]:
        return tuple(parameter.ds_shape if self.stage == 3 else parameter.shape)

    def _optimizer_state(self, flat: Tensor) -> Mapping[str, Any]:
        return self.engine.optimizer.optimizer.state.get(flat, {})

    def _optimizer_range(self, parameter: Any) -> _OptimizerRange | None:
        """Return the range of a parameter that this rank updates, without padding; None if there is none."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            group, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            size = parameter.ds_tensor.numel()
            offset = distributed.get_rank() * size
            count = min(size, parameter.ds_numel - offset)
            flat = optimizer.fp32_partitioned_groups_flat[group]
            return _OptimizerRange(flat, start, offset, count) if count > 0 else None
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
        high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
        return _OptimizerRange(flat, high.start, low.start, low.numel)

    def full_weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        return gather_weights(self.module, names)

    def close(self) -> None:
        self.engine.destroy()


def shard_module(module: nn.Module, config: Mapping[str, Any]) -> None:
    """Shard a module with ZeRO-3: rank 0 broadcasts its weights, and each rank keeps its shard.

    On other ranks the weights may be uninitialised. Parameters that are already sharded do not change.
    """
    _init_deepspeed()
    import deepspeed

    deepspeed.zero.Init(module=module, config_dict_or_path=dict(config))


def gather_frozen_weights_on_call(model: nn.Module, config: Mapping[str, Any], layers: Iterable[nn.Module]) -> Any:
    """Add ZeRO-3 hooks to a frozen model sharded by :func:`shard_module`; they gather a module's weights when it is
    called.

    Args:
        model: The frozen model.
        config: DeepSpeed configuration.
        layers: Decoder layers; all weights of a layer are gathered together.

    Returns:
        The DeepSpeed engine. Keep a reference to it as long as the model is called.
    """
    _init_deepspeed()
    import deepspeed

    deepspeed.utils.set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
    engine, *_ = deepspeed.initialize(model=model, config=dict(config), dist_init_required=False)
    return engine


def gather_weights(model: nn.Module, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, full tensor on the CPU) of each parameter; the tensor is None on ranks other than 0.

    All ranks must iterate to the end, because each tensor is gathered.
    """
    import deepspeed

    main = distributed.get_rank() == 0
    for name, parameter in model.named_parameters():
        if names is not None and name not in names:
            continue
        sharded = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if sharded else nullcontext():
            full_weight = parameter.detach().to("cpu", copy=sharded) if main else None
        yield name, full_weight
