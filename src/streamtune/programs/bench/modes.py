"""Training methods (modes) that ``streamtune bench`` compares: preparation of a model, and requirements.

Methods of other libraries are set up as their documentation shows, on the same ``transformers`` model as all other
methods. Changes to the model are undone afterwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import cross_entropy, pad

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import IGNORE_INDEX, model_device
from streamtune.engine import StreamHandle, decoder_layers, stream
from streamtune.engine.memory.placement import Tiers
from streamtune.errors import UnsupportedModelError
from streamtune.plan.simulate.scored import checkpointing, recompute
from streamtune.plan.simulate.workload import Mode
from streamtune.schedule import Schedule

Batch = dict[str, Any]
"""Arguments of the model: ``input_ids`` and, for packed rows, ``position_ids``; both [batch, length].

A batch that scores completions also has ``targets`` [batch, length] (the token that each position predicts), ``count``
(number of targets in all batches of a step) and ``branches`` (layout of completions that share a prompt).
"""


Loss = Callable[[Batch], Tensor]
"""Function that returns the mean next-token loss of a batch."""


@dataclass(frozen=True)
class Ready:
    """Loss function and offload counters of a model that is prepared for a training method.

    Attributes:
        loss: Function that returns the mean next-token loss of a batch.
        tiers: Counters of the bytes offloaded to host and disk; None if nothing is counted.
    """

    loss: Loss
    tiers: Tiers | None = None


PrepareMode = Callable[[Any, Schedule], AbstractContextManager[Ready]]
"""Function ``(model, schedule)`` that returns a context manager; inside it, the model is prepared in place."""


@dataclass(frozen=True)
class ModeSetup:
    """Setup and requirements of a benchmarked training method.

    Attributes:
        prepare: Function ``(model, schedule)`` that returns a context manager; inside it, the model is prepared.
        package: Name of the required Python package; empty if none.
        accelerator: Reason why the method needs an accelerator; empty if it does not.
        alone: Reason why the method cannot share a process with streaming or another library's method; empty if it can.
    """

    prepare: PrepareMode
    package: str = ""
    accelerator: str = ""
    alone: str = ""

    def why_unavailable(self, device_type: str) -> str:
        """Return the reason why the method cannot run on a device of this type; empty if it can."""
        if self.accelerator and device_type == "cpu":
            return f"not run here: {self.accelerator}"
        if self.package and find_spec(self.package) is None:
            return f"not run here: {self.package} is not installed"
        return ""


def _make_prepare(
    prepared: Callable[[Any], AbstractContextManager[Tiers | None]], loss_of: Callable[[Any], Loss] | None = None
) -> PrepareMode:
    @contextmanager
    def prepare(model: Any, schedule: Schedule) -> Iterator[Ready]:
        with prepared(model) as tiers:
            yield Ready((loss_of or _make_model_loss)(model), tiers)

    return prepare


@contextmanager
def _offload_layer_inputs(model: Any) -> Iterator[Tiers | None]:
    """Context manager: use gradient checkpointing that offloads layer inputs to host memory.

    On a GPU, torch's ``save_on_cpu`` copies the inputs to pinned host memory. On a CPU, ``save_on_cpu`` would copy
    nothing. There, the inputs are copied to memory that is counted as host memory, so that device memory is counted as
    on a GPU.
    """
    tiers = Tiers(Schedule(offload="host"))
    here = model_device(model)

    def on_host(function: Callable[..., Any], *args: Any) -> Any:
        host = tiers.get_tier("host", here)
        copied = saved_tensors_hooks(host.put, lambda block: block.get())
        with save_on_cpu(pin_memory=True) if here.type == "cuda" else copied:
            return recompute(function, *args)

    with checkpointing(model, on_host):
        yield None if here.type == "cuda" else tiers


@contextmanager
def _prepare_tiling(model: Any, schedule: Schedule) -> Iterator[Ready]:
    """Context manager: use gradient checkpointing, and the tiled MLP and tiled loss of DeepSpeed's ALST.

    An MLP tile has as many tokens as the hidden size, as in ALST's documentation. A tile of the loss has
    ``schedule.head_chunk_size`` tokens.
    """
    with _tile_mlps(decoder_layers(model)), checkpointing(model):
        yield Ready(lambda batch: _tiled_loss(model, batch, schedule.head_chunk_size))


def _make_liger_loss(model: Any) -> Loss:
    def loss(batch: Batch) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        head, hidden_BTC = model.get_output_embeddings(), last_hidden_state(model, batch)
        fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX)
        out: Tensor = fused(head.weight, hidden_BTC.flatten(0, 1), _next_token_labels(batch).flatten(), head.bias)
        return out

    return loss


def _prepare_with_loss(open_loss: Callable[[Any], AbstractContextManager[Loss]]) -> PrepareMode:
    @contextmanager
    def prepare(model: Any, schedule: Schedule) -> Iterator[Ready]:
        with open_loss(model) as loss:
            yield Ready(loss)

    return prepare


@contextmanager
def _prepare_streaming(model: Any, schedule: Schedule) -> Iterator[Ready]:
    handle = stream(model, schedule=schedule)
    try:
        yield Ready(_make_scored_loss(model, handle), handle.tiers)
    finally:
        handle.remove()


def _prepare_streaming_keeping_attention(model: Any, schedule: Schedule) -> AbstractContextManager[Ready]:
    return _prepare_streaming(model, replace(schedule, keep_attention="device"))


# --- peers ------------------------------------------------------------------------------------------------------------


@contextmanager
def restoring_model(model: nn.Module) -> Iterator[None]:
    """Context manager: on exit, undo changes to the model's modules and to their ``transformers`` source modules."""
    modules = [vars(module) for module in model.modules()]
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    files = [vars(sys.modules[name]) for name in sorted(names) if name.startswith("transformers.models.")]
    classes = {value for file in files for value in file.values() if isinstance(value, type)}
    # dictionaries of a module, such as its hooks, stay the same objects
    held = [(value, dict(value)) for attributes in modules for value in attributes.values() if isinstance(value, dict)]
    before = [(attributes, dict(attributes)) for attributes in [*modules, *files]]
    methods = [(kind, dict(vars(kind))) for kind in classes if kind.__module__.startswith("transformers.models.")]
    try:
        yield
    finally:
        for now, then in [*before, *held]:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)
        for kind, then in methods:
            for name in vars(kind).keys() - then.keys():
                delattr(kind, name)
            for name, value in then.items():
                if vars(kind)[name] is not value:
                    setattr(kind, name, value)


@contextmanager
def importing_library(name: str) -> Iterator[None]:
    """Context manager: convert import errors to an UnsupportedModelError that names the library ``name``."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        raise UnsupportedModelError(f"{name} cannot be imported: {str(error).splitlines()[0]}") from error


@contextmanager
def liger(model: Any) -> Iterator[Loss]:
    """Context manager: use gradient checkpointing and all Liger kernels (RMSNorm, RoPE, SwiGLU, fused loss)."""
    with importing_library("Liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    causal = base_of(model)
    if causal.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedModelError(f"Liger has no kernels for {causal.config.model_type}")
    with restoring_model(causal), checkpointing(model):
        _apply_liger_kernel_to_instance(model=causal)
        yield lambda batch: model(**batch, labels=batch["input_ids"], use_cache=False).loss


@contextmanager
def trl(model: Any) -> Iterator[Loss]:
    """Context manager: use gradient checkpointing, activation offloading and the fused LM head of TRL's SFT trainer."""
    with importing_library("TRL"):  # older versions have no such head
        from trl.models import activation_offloading
        from trl.trainer.utils import add_fused_lm_head

    causal = base_of(model)
    with restoring_model(causal), checkpointing(model):
        add_fused_lm_head(causal)
        offloaded = activation_offloading.get_act_offloading_ctx_manager(model=model)

        def loss(batch: Batch) -> Tensor:
            with offloaded:
                out: Tensor = model(**batch, labels=batch["input_ids"], fused_lm_head=True).loss
            return out

        yield loss


@contextmanager
def unsloth(model: Any) -> Iterator[Loss]:
    """Context manager: use Unsloth's gradient checkpointing (layer inputs on the host) and chunked loss.

    Importing Unsloth patches ``transformers`` for the rest of the process. On exit, only later changes are undone.
    """
    with importing_library("Unsloth"), redirect_stdout(sys.stderr):  # it prints a greeting
        __import__("unsloth")
        from unsloth_zoo import gradient_checkpointing
        from unsloth_zoo.fused_losses import unsloth_fused_ce_loss

    causal = base_of(model)
    embeddings, head = causal.get_input_embeddings(), causal.get_output_embeddings()

    def loss(batch: Batch) -> Tensor:
        hidden = last_hidden_state(model, batch)
        out: Tensor = unsloth_fused_ce_loss(None, hidden, head.weight, head.bias, batch["input_ids"])
        return out

    gradient_checkpointing.patch_unsloth_smart_gradient_checkpointing(embeddings.weight.dtype)
    try:
        with restoring_model(causal), checkpointing(model, gradient_checkpointing.unsloth_checkpoint):
            # like torch's reentrant checkpointing, it needs an input that requires a gradient
            embeddings.register_forward_hook(lambda module, inputs, out: out.requires_grad_(True))
            yield loss
    finally:
        gradient_checkpointing.unpatch_unsloth_smart_gradient_checkpointing()


# --- all modes --------------------------------------------------------------------------------------------------------


UNSLOTH_ALONE = "unsloth patches transformers for the whole process: measure it with --modes plain,checkpoint,unsloth"

MODE_SETUPS: dict[Mode, ModeSetup] = {
    "plain": ModeSetup(_make_prepare(lambda model: nullcontext())),
    "checkpoint": ModeSetup(_make_prepare(checkpointing)),
    "checkpoint-offload": ModeSetup(_make_prepare(_offload_layer_inputs)),
    "deepspeed-tiled": ModeSetup(_prepare_tiling, package="deepspeed"),
    "liger-loss": ModeSetup(
        _make_prepare(checkpointing, _make_liger_loss), "liger_kernel", "Liger's kernels need an accelerator"
    ),
    "liger-loss-offload": ModeSetup(
        _make_prepare(_offload_layer_inputs, _make_liger_loss), "liger_kernel", "Liger's kernels need an accelerator"
    ),
    "liger": ModeSetup(_prepare_with_loss(liger), "liger_kernel", "Liger's kernels need an accelerator"),
    "trl": ModeSetup(_prepare_with_loss(trl), "trl", "TRL's offloading needs an accelerator"),
    "unsloth": ModeSetup(
        _prepare_with_loss(unsloth), "unsloth", "Unsloth's offloading needs an accelerator", UNSLOTH_ALONE
    ),
    "stream": ModeSetup(_prepare_streaming),
    "stream-keep-attention": ModeSetup(_prepare_streaming_keeping_attention),
}


def why_modes_unavailable(modes: Sequence[Mode], device_type: str) -> dict[str, str]:
    """Return {mode: reason} for the modes that cannot run on this device type or together with the other modes."""
    reasons = {mode: MODE_SETUPS[mode].why_unavailable(device_type) for mode in modes}
    others = {mode for mode in modes if not reasons[mode]} - {"plain", "checkpoint"}
    for mode in others:
        if MODE_SETUPS[mode].alone and len(others) > 1:
            reasons[mode] = f"not run here: {MODE_SETUPS[mode].alone}"
    return {mode: why for mode, why in reasons.items() if why}


def last_hidden_state(model: Any, batch: Batch) -> Tensor:
    """Return the decoder's last hidden states, [batch, length, hidden size]."""
    hidden: Tensor = base_of(model).base_model(**batch, use_cache=False).last_hidden_state
    return hidden


def _make_model_loss(model: Any) -> Loss:
    def loss(batch: Batch) -> Tensor:
        labels = {"labels": batch["input_ids"]}
        if "targets" in batch:
            labels = {
                "labels": batch["targets"],
                "shift_labels": batch["targets"],
                "num_items_in_batch": batch["count"],
            }
        given = {name: value for name, value in batch.items() if name not in ("targets", "count")}
        out: Tensor = model(**given, **labels, use_cache=False).loss
        return out

    return loss


def _make_scored_loss(model: Any, handle: StreamHandle) -> Loss:
    """Return the loss function of a streamed model; with ``targets``, the loss is the negative mean log-probability."""
    own = _make_model_loss(model)

    def loss(batch: Batch) -> Tensor:
        if "targets" not in batch:
            return own(batch)
        scores = handle.logprobs(batch["input_ids"], batch["targets"], branches=batch.get("branches"))
        return -scores.logprobs.sum() / batch["count"]

    return loss


@contextmanager
def _tile_mlps(layers: list[nn.Module]) -> Iterator[None]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    mlps: list[Any] = [layer.mlp for layer in layers if hasattr(layer, "mlp")]
    if len(mlps) < len(layers):
        raise UnsupportedModelError("the model's layers have no 'mlp' to tile")

    def tiled(mlp: Any) -> Callable[[Tensor], Tensor]:
        own = type(mlp).forward

        def forward(x_BTC: Tensor) -> Tensor:
            tiles = math.ceil(x_BTC.shape[1] / x_BTC.shape[2])
            out: Tensor = TiledMLP.apply(own, mlp, x_BTC, tiles, list(mlp.parameters()))
            return out

        return forward

    for mlp in mlps:
        mlp.forward = tiled(mlp)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward


def _tiled_loss(model: Any, batch: Batch, tile_tokens: int) -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    hidden, labels = last_hidden_state(model, batch), _next_token_labels(batch)
    head, count = model.get_output_embeddings(), (labels != IGNORE_INDEX).sum()

    def tile_loss(head: nn.Module, x_NC: Tensor, labels_N: Tensor) -> Tensor:
        return cross_entropy(head(x_NC).float(), labels_N, ignore_index=IGNORE_INDEX, reduction="sum") / count

    tiles = math.ceil(labels.numel() / tile_tokens)
    loss: Tensor = TiledFusedLogitsLoss.apply(
        tile_loss, head, hidden, labels, None, tiles, list(head.parameters()), "sum"
    )
    return loss


def _next_token_labels(batch: Batch) -> Tensor:
    return pad(batch["input_ids"][:, 1:], (0, 1), value=IGNORE_INDEX)
