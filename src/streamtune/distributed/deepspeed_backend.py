"""DeepSpeed as backend: ZeRO stages 1, 2 and 3 with the traffic they have without streaming.

The engine's node returns each parameter's gradient once a layer and micro-step, whatever the number of chunks, so what
ZeRO reduces it reduces once. Under stage 3 a decoder layer is a *leaf module*: hooks around its call gather all of its
weights at once, once for the forward and once for the backward. No function of DeepSpeed is patched.

DeepSpeed averages over ranks; the shares of ranks add up, so each is multiplied with their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from streamtune.errors import ArgumentError, CheckpointError

__all__ = ["DeepSpeedBackend", "check_deepspeed"]


def check_deepspeed() -> None:
    """Refuse where it is not installed.

    Raises:
        ArgumentError: With the line that installs it.
    """
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            f"DeepSpeed is not installed ({error})", where="deepspeed", mend="pip install 'deepspeed>=0.18'"
        ) from None


class DeepSpeedBackend:
    """Weights, gradients and optimizer shared by ZeRO.

    Args:
        model: Streamed already; on this rank's device, or on the host for what is offloaded.
        optimizer: Over its parameters.
        config: From :func:`streamtune.distributed.deepspeed_config.resolve_config`.
        layers: The decoder layers, each gathered whole.

    Raises:
        ArgumentError: DeepSpeed is not installed, or refuses the configuration or the optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], layers: Iterable[nn.Module]
    ) -> None:
        check_deepspeed()
        import deepspeed

        if not distributed.get_backend().startswith("nccl") and not torch.cuda.is_available():
            # Shared memory between CPU ranks is an operator that takes a minute to compile, and saves nothing here.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("WARNING")
        deepspeed.init_distributed(dist_init_required=False)
        self.stage = int(config["zero_optimization"]["stage"])
        if self.stage == 3:
            deepspeed.utils.set_z3_leaf_modules(model, list({type(layer) for layer in layers}))
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            if not any(parameter.requires_grad for parameter in embedding.parameters()):
                # The hooks of a leaf hang on its first input: without a gradient there its weights are not gathered.
                embedding.register_forward_hook(_needs_gradient)
        self.module = model
        try:
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
            )
        except (ValueError, AssertionError, deepspeed.runtime.config.DeepSpeedConfigError) as error:
            raise ArgumentError(f"DeepSpeed refuses the configuration: {error}", where="deepspeed") from error
        self.size = distributed.get_world_size()

    @property
    def model(self) -> Any:
        """See :class:`streamtune.train.Backend`."""
        return self.engine

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """See :class:`streamtune.train.Backend`."""
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.engine.backward(loss * self.size, scale_wrt_gas=False)

    def clip_gradients(self, max_norm: float) -> float:
        """The norm; DeepSpeed clips in its step, by the ``gradient_clipping`` of its configuration."""
        assert max_norm == self.engine.gradient_clipping()
        local = sum(
            (part.detach().double().square().sum() for part in self._gradients()), torch.zeros((), dtype=torch.float64)
        )
        total = local.to("cpu")
        distributed.all_reduce(total)
        return math.sqrt(total.item())

    def _gradients(self) -> Iterator[Tensor]:
        """The parts of the gradient this rank holds; those of all ranks are the whole."""
        from deepspeed.utils import safe_get_local_grad

        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if self.stage == 3:
                yield safe_get_local_grad(parameter)
            elif getattr(parameter, "_hp_mapping", None) is not None:
                yield parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]

    def step(self, learning_rate: float) -> None:
        """See :class:`streamtune.train.Backend`."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()

    def drop_gradients(self) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.engine.optimizer.zero_grad(set_to_none=True)
        if hasattr(self.engine.optimizer, "averaged_gradients"):
            self.engine.optimizer.averaged_gradients.clear()

    def reset_optimizer(self) -> None:
        """See :class:`streamtune.train.Backend`."""
        for state in self.engine.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """See :class:`streamtune.train.Backend`."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found: dict[str, Tensor] = {}
        keep = distributed.get_rank() == 0
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            whole = {"master": safe_get_full_fp32_param(parameter)}
            whole |= {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
            if keep:
                found |= {f"{name}/{key}": value.detach().cpu() for key, value in whole.items()}
        return found

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See :class:`streamtune.train.Backend`."""
        raise CheckpointError("this run cannot be resumed yet")

    def whole(self) -> AbstractContextManager[Any]:
        """See :class:`streamtune.train.Backend`."""
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(self.module.parameters()))
        return gathered

    def close(self) -> None:
        """Let go of its threads and buffers."""
        self.engine.destroy()


def _needs_gradient(module: nn.Module, args: Any, out: Tensor) -> None:
    if torch.is_grad_enabled() and not out.requires_grad:
        out.requires_grad_(True)
