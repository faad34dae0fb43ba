"""Run forward, loss and backward of one training step of a model on ``meta``, and record live bytes and work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine import Branches, LazyLogits, LossRequest, StreamHandle, decoder_layers
from streamtune.engine.inspect_model import image_parameters
from streamtune.engine.memory.host import HostPool
from streamtune.engine.memory.placement import Tiers
from streamtune.engine.offloaded_weights import offloaded_parameters
from streamtune.engine.passes import placeholder
from streamtune.ops import TeacherHead, TokenLoss, TopKTeacher
from streamtune.ops.devices import SimulatedDeviceMode, simulate_device_type
from streamtune.ops.head.sweep import autocast_dtype, cast_tensors
from streamtune.plan.simulate.memory import GRADIENT
from streamtune.plan.simulate.meta_operators import MetaAutocast, autocast_on_meta, meta_tensor_with_value
from streamtune.plan.simulate.scored import PlainScores, Scored, checkpointing, fused_loss
from streamtune.plan.simulate.shard import WHOLE_ROW, RankShard
from streamtune.plan.simulate.simulation_cache import all_modules, model_configs
from streamtune.plan.simulate.trace import Trace
from streamtune.plan.simulate.workload import Mode, TeacherShape
from streamtune.schedule import Schedule

FUSED_LOSS_MODES = ("liger-loss", "liger-loss-offload")
"""Modes with Liger's fused loss."""

FLASH = 1
"""Value of flash attention in torch's ``SDPBackend``."""


@dataclass(frozen=True)
class Step:
    """Options of a training step that is run on ``meta`` and recorded.

    Attributes:
        mode: Method to compute the gradient: ``stream`` or a baseline.
        length: Number of tokens of a row.
        batch_size: Number of rows.
        accumulating: True if gradients of a previous micro-batch are already allocated.
        autocast: Dtype of autocast, ``bfloat16`` or ``float16``; None: no autocast.
        device: Type of the simulated device.
        targets: Number of tokens with a target in each row; None: all tokens.
        scored: Completions to score instead of ordinary rows; ``token_loss`` replaces their log-probabilities.
        uses_scored_layout: True if tokens are laid out as in ``scored``; False: ordinary rows in which every token is
            scored.
        shard: One rank's part of each row, if ranks share rows.
        frees_gradients: True if each gradient is freed as soon as it exists.
        token_loss: Per-token loss, if not cross-entropy.
        teacher: Teacher of a distillation loss; None without one.
        teacher_top_k: Number of saved teacher tokens per target, for a distillation loss; 0 without saved tokens.
        perturb: Function that returns a context manager with perturbed weights, for a step without a backward.
    """

    mode: Mode
    length: int
    batch_size: int = 1
    accumulating: bool = False
    autocast: str | None = None
    device: str = "cuda"
    targets: int | None = None
    scored: Scored | None = None
    uses_scored_layout: bool = False
    shard: RankShard = WHOLE_ROW
    frees_gradients: bool = False
    token_loss: TokenLoss | None = None
    teacher: TeacherShape | None = None
    teacher_top_k: int = 0
    perturb: Callable[[Any], AbstractContextManager[None]] | None = None


def trace_step(model: Any, schedule: Schedule, step: Step) -> Trace:
    """Run a step of a model on ``meta`` and return its record of bytes and work; the model is unchanged afterwards."""
    with ExitStack() as stack:
        if gc.isenabled():  # garbage collection needs a tenth of the time, and tensors are in no reference cycles
            gc.disable()
            stack.callback(gc.enable)
        # Integer tensors are small: starting more threads costs more time than the threads save.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        autocast = MetaAutocast(step.device)
        scorer, tiers = _enter_mode(stack, model, schedule, step.mode, autocast)
        stack.enter_context(_gradients_of_images(model))
        ids = meta_tensor_with_value(torch.zeros(step.batch_size, step.length, dtype=torch.long))
        labels = meta_tensor_with_value(_make_targets(step))
        teacher_weight = None
        if (shape := step.teacher) is not None:
            teacher_weight = torch.empty(shape.vocabulary, shape.hidden, dtype=shape.dtype, device="meta")
        stack.enter_context(simulate_device_type(step.device))
        stack.enter_context(autocast_on_meta())
        if schedule.stream_grads:  # placeholders exist once for all steps, so they are not recorded
            for dtype in {
                torch.bfloat16,
                torch.float16,
                *(p.dtype for p in model.parameters() if p.is_floating_point()),
            }:
                placeholder(torch.empty((), dtype=dtype, device="meta"))
        if step.mode != "stream" or step.autocast:
            stack.enter_context(DeviceChoices(step.device, autocast))
        recorder = Trace(model, decoder_layers(model), device=step.device, tiers=tiers, shard=step.shard)
        trace = stack.enter_context(recorder)
        stack.callback(model.zero_grad, set_to_none=True)
        if step.accumulating:
            offloaded_ids: set[int] = set()
            if schedule.weights != "device":
                offloaded_ids = {id(p) for p in offloaded_parameters(base_of(model), decoder_layers(model))}
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    continue
                trace.begin_earlier_gradients(parameter)
                if id(parameter) in offloaded_ids:
                    parameter.grad = HostPool().allocate(parameter.shape, parameter.dtype, parameter.device)
                else:
                    parameter.grad = torch.empty_like(parameter)
                    trace.set_kind(GRADIENT, parameter.grad)
            trace.begin_cell("forward")
        if step.frees_gradients:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(_free_gradient).remove)
        dtype = torch.float16 if step.autocast == "float16" else torch.bfloat16
        region = torch.autocast(autocast.switch, dtype=dtype, enabled=step.autocast is not None, cache_enabled=False)
        if step.scored is not None and step.scored.forwards:
            trace.begin_cell("reference")
            with autocast.outermost_autocast(), region, _reference_mode(model):
                _score_completions(scorer, step, ids, labels)
            trace.begin_cell("forward")
        if step.perturb is not None:
            stack.enter_context(torch.no_grad())
            stack.enter_context(step.perturb(model))
        with autocast.outermost_autocast(), region:
            if step.mode in FUSED_LOSS_MODES:
                loss = fused_loss(model, ids)
            elif step.scored is None or step.token_loss is not None:
                with _use_step_loss(scorer, step, teacher_weight) as make_loss_arguments:
                    loss = model(
                        **{"input_ids": ids, "labels": labels, "use_cache": False, **make_loss_arguments(ids, labels)}
                    ).loss
            else:
                loss = _score_completions(scorer, step, ids, labels).sum()
                trace.begin_cell("head")  # a new cell for the head's second loop over its chunks
        if step.perturb is None:
            _run_backward(loss)
        trace.finish()
    return trace


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _use_step_loss(
    scorer: Any, step: Step, weight: Tensor | None
) -> Iterator[Callable[[Tensor, Tensor], dict[str, Any]]]:
    """Context manager in which calls of the streamed model compute the step's loss.

    It yields a function ``(ids, targets)`` that returns additional arguments for such a call.
    """
    branches = None
    if step.scored is not None and step.scored.has_hidden_tokens and step.uses_scored_layout:
        branches = Branches.of(step.scored.trees)

    def make_loss_arguments(ids: Tensor, targets: Tensor) -> dict[str, Any]:
        if step.scored is None:
            return {}
        return {"shift_labels": targets, **({} if branches is None else branches.arguments(ids))}

    if step.token_loss is None or not isinstance(scorer, StreamHandle):
        yield make_loss_arguments
        return
    teacher: Any = None
    targets_shape = _make_targets(step).shape
    weights = None if step.scored is None else torch.empty(targets_shape, dtype=torch.float64, device="meta")
    if step.teacher is not None:
        shape = step.teacher
        hidden = torch.empty(step.batch_size, step.length, shape.hidden, dtype=shape.dtype, device="meta")
        assert weight is not None
        head: Any = _TeacherHead(weight)
        teacher = LazyLogits(head, hidden)
    top_k = None if not step.teacher_top_k else _MetaTopK.from_step(step)
    with scorer.with_loss(LossRequest(step.token_loss, weights, teacher, top_k)), ExitStack() as stack:
        if branches is not None:
            stack.enter_context(scorer.laid_out(branches))
        yield make_loss_arguments


class _MetaTopK(TopKTeacher):
    """Saved top-k tokens of a teacher, read in chunks as ``meta`` tensors."""

    @classmethod
    def from_step(cls, step: Step) -> _MetaTopK:
        """Return the top-k tokens of a step; their tensors are empty, because saved tokens are on the host."""
        index = torch.empty(step.batch_size, step.length, dtype=torch.long, device="meta")
        width = step.teacher_top_k
        return cls(index, torch.empty(0, width, device="meta"), torch.empty(0, width + 1, device="meta"))

    def known(self, chunk: Tensor | slice, device: torch.device) -> tuple[Tensor, ...]:
        size = len(chunk) if isinstance(chunk, Tensor) else chunk.stop - chunk.start
        k = self.ids_Kk.shape[1]
        ids = torch.empty(size, k, dtype=torch.int32, device=device).long()
        return ids, torch.empty(size, k + 1, device=device)


class _TeacherHead:
    """Head of a teacher on ``meta``, with a weight ``[V, C]`` that exists before the step."""

    model: Any = None
    module: Any = None
    shards: Any = None

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @contextmanager
    def teacher_head(self, logits: LazyLogits, targets: Tensor) -> Iterator[TeacherHead]:
        dtype = autocast_dtype(logits.hidden)
        (weight,) = cast_tensors(dtype, self.weight)
        yield TeacherHead(logits.hidden, lambda h: nn.functional.linear(cast_tensors(dtype, h)[0], weight))


def _make_targets(step: Step) -> Tensor:
    """Return int64 targets ``[B, T]``: 0 where a token has a target, -100 elsewhere."""
    if step.scored is not None and step.uses_scored_layout:
        return step.scored.targets()
    targets = torch.zeros(step.batch_size, step.length, dtype=torch.long)
    if step.targets is not None:
        targets[:, step.targets :] = IGNORE_INDEX
    return targets


def _score_completions(scorer: Any, step: Step, ids: Tensor, targets: Tensor) -> Tensor:
    assert step.scored is not None
    arguments: dict[str, Any] = {"use_cache": False}
    if step.scored.has_hidden_tokens and step.uses_scored_layout:
        arguments["branches"] = Branches.of(step.scored.trees)
    out: Tensor = scorer.logprobs(ids, targets, entropy=step.scored.entropy, **arguments).logprobs
    return out


@contextmanager
def _reference_mode(model: Any) -> Iterator[None]:
    """Context manager in which the model computes as a reference: evaluation mode, no gradients, no adapters."""
    without = model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()
    model.eval()
    try:
        with torch.no_grad(), without:
            yield
    finally:
        model.train()


@contextmanager
def _gradients_of_images(model: Any) -> Iterator[None]:
    """Context manager in which embedded tokens require a gradient if a vision tower or a projector is trained.

    The simulated step has no images. In a real step, features of images that need a gradient are among the tokens.
    """
    if not any(parameter.requires_grad for parameter in image_parameters(base_of(model), decoder_layers(model))):
        yield
        return

    def require_gradient(embedding: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    with model.get_input_embeddings().register_forward_hook(require_gradient):
        yield


def _run_backward(loss: Tensor) -> None:
    """Run the backward of a loss with torch function modes active; ``loss.backward()`` would disable them."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _enter_mode(
    stack: ExitStack, model: Any, schedule: Schedule, mode: Mode, autocast: MetaAutocast
) -> tuple[Any, Callable[[], tuple[int, int, int, int]]]:
    """Put the model into a mode (``stream`` or a baseline) until the stack closes.

    Returns:
        Object with the method ``logprobs``, and the argument ``tiers`` of :class:`Trace`.
    """
    if mode in ("checkpoint", "liger-loss"):
        stack.enter_context(checkpointing(model, partial(_checkpoint, autocast)))
    elif mode == "liger-loss-offload":
        tiers = Tiers(Schedule(offload="host"))
        stack.enter_context(checkpointing(model, partial(_checkpoint_on_host, autocast, tiers)))
        return PlainScores(model), lambda: (tiers.host.live_bytes, 0, tiers.host.moved_bytes, 0)
    elif mode == "stream":
        handle = stack.enter_context(StreamHandle(model, schedule, head=True))
        host, disk = handle.tiers.host, handle.tiers.disk
        return handle, lambda: (host.live_bytes, disk.live_bytes, host.moved_bytes, disk.moved_bytes)
    return PlainScores(model), lambda: (0, 0, 0, 0)


def _checkpoint(autocast: MetaAutocast, function: Callable[..., Any], *args: Any) -> Any:
    def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), autocast.outermost_autocast()  # a recomputed layer has its own autocast region

    return checkpoint(function, *args, use_reentrant=False, context_fn=checkpoint_contexts)


def _checkpoint_on_host(autocast: MetaAutocast, tiers: Tiers, function: Callable[..., Any], *args: Any) -> Any:
    host = tiers.get_tier("host", torch.device("meta"))
    with saved_tensors_hooks(host.put, lambda block: block.get()):
        return _checkpoint(autocast, function, *args)


@contextmanager
def fewer_layers(model: nn.Module, layer_indices: list[int]) -> Iterator[None]:
    """Context manager in which the model has only the decoder layers ``layer_indices``.

    Per-layer lists and layer counts in the model's configurations are shortened too.
    """
    layers = decoder_layers(model)
    count, kept_ids = len(layers), {id(layers[index]) for index in layer_indices}
    all_layer_ids = {id(layer) for layer in layers}
    modules = all_modules(model)
    lists = [module for module in modules if isinstance(module, nn.ModuleList)]
    layer_lists = [module for module in lists if any(id(child) in all_layer_ids for child in module)]
    configs = model_configs(modules)
    restored: list[tuple[dict[str, Any], str, Any]] = []
    for module in layer_lists:
        restored.append((module.__dict__, "_modules", module._modules))
        left = [child for child in module if id(child) in kept_ids or id(child) not in all_layer_ids]
        module.__dict__["_modules"] = {str(place): child for place, child in enumerate(left)}
    for config in configs:
        for name, value in list(vars(config).items()):
            short = _shorten_config_value(name, value, count, layer_indices)
            if short is not value:
                restored.append((vars(config), name, value))
                vars(config)[name] = short
    try:
        yield
    finally:
        for owner, name, value in reversed(restored):
            owner[name] = value


def _shorten_config_value(name: str, value: Any, count: int, layer_indices: list[int]) -> Any:
    if isinstance(value, list) and len(value) == count:
        return [value[index] for index in layer_indices]
    if name in ("num_hidden_layers", "n_layer") and value == count:
        return len(layer_indices)
    return value


PLAIN = (Tensor, nn.Parameter)
"""Tensor classes that do not override ``__torch_function__``."""


class DeviceChoices(SimulatedDeviceMode):
    """Torch function mode that makes two device-dependent choices as torch makes them on the simulated device.

    ``scaled_dot_product_attention`` calls a fused kernel (on ``meta`` torch would compute all scores). Autocast casts
    arguments.
    """

    def __init__(self, device: str, autocast: MetaAutocast) -> None:
        super().__init__()
        self.device, self.autocast = device, autocast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # a property (two of three calls): nothing to choose
            return func(*args)
        # A quantised tensor: autocast applies to its components.
        if types and types[0] not in PLAIN and torch._C._is_torch_function_enabled():
            with self:
                return types[0].__torch_function__(func, types, args, kwargs or {})
        args, cast_kwargs = self.autocast.cast_arguments(func, args, kwargs or {})
        if func is nn.functional.scaled_dot_product_attention and args and args[0].device.type == "meta":
            return _fused_attention(self.device, func, *args, **cast_kwargs)
        return func(*args, **cast_kwargs)


def _fused_attention(
    device: str,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``scaled_dot_product_attention``, computed by the kernel that torch would choose on ``device``."""
    settings: dict[str, Any] = {"scale": scale}
    aten = torch.ops.aten
    out: Tensor
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # torch converts boolean masks for a kernel
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if device == "cpu":
        tiny = [torch.empty(*x.shape[:2], 2, x.shape[3], dtype=x.dtype) for x in (query, key, value)]
        choose: Any = torch._fused_sdp_choice
        if choose(*tiny, None, dropout_p, is_causal, enable_gqa=enable_gqa) == FLASH:
            out, _ = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, **settings
            )
            return out
    elif attn_mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        out, *_ = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, **settings)
        return out
    elif query.dtype != torch.float64:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        out, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, **settings
        )
        return out
    out = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out


def shorten_step(step: Step, length: int, head_chunk_size: int) -> Step:
    """Return the step with ``length`` tokens. Its last head chunk has as many targets as in ``step``."""
    targets = length - (length - step.length) % head_chunk_size
    return replace(step, length=length, targets=targets, uses_scored_layout=False)
