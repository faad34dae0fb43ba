"""The modes that are compared: their names, the preparation of a model for each, and what each needs to run.

Peers run as their own documentation sets them up, on the same model of ``transformers`` as all the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from streamtune.programs.bench import peers
from streamtune.schedule import Schedule

Batch = dict[str, Any]
"""Arguments of the model: ``input_ids`` and, for packed rows, ``position_ids``; both [batch, length].

Of completions ``targets`` [batch, length] are what each position predicts, ``count`` how many there are in all batches
of a step, and ``branches`` how they lie where they share their prompt.
"""


@dataclass(frozen=True)
class Ready:
    """A model prepared for a mode.

    Attributes:
        loss: The mean loss of the next tokens of a batch.
        tiers: The counts of bytes that are kept on the host and on disk; None where nothing is.
    """

    loss: Callable[[Batch], Tensor]
    tiers: Tiers | None = None


Entered = Callable[[Any, Schedule], AbstractContextManager[Ready]]
"""Prepares a model in place and restores it on leaving; yields what is measured."""


@dataclass(frozen=True)
class Way:
    """A way to compute the gradient.

    Attributes:
        entered: Prepares a model.
        package: The package that must be installed; empty if none.
        accelerator: The reason why it needs an accelerator; empty if it needs none.
        alone: The reason why it is measured in a process without other peers and streaming; empty if it need not be.
    """

    entered: Entered
    package: str = ""
    accelerator: str = ""
    alone: str = ""

    def lacks(self, device_type: str) -> str:
        """Return the reason why it cannot run on such a device; empty if it can."""
        if self.accelerator and device_type == "cpu":
            return f"not run here: {self.accelerator}"
        if self.package and find_spec(self.package) is None:
            return f"not run here: {self.package} is not installed"
        return ""


@contextmanager
def _plain(model: Any, schedule: Schedule) -> Iterator[Ready]:
    yield Ready(_own_loss(model))


@contextmanager
def _checkpointed(model: Any, schedule: Schedule) -> Iterator[Ready]:
    with checkpointing(model):
        yield Ready(_own_loss(model))


@contextmanager
def _inputs_on_host(model: Any) -> Iterator[Tiers | None]:
    """Prepare checkpointing under torch's ``save_on_cpu``, which keeps the inputs of layers in pinned memory.

    If the device is the CPU, that would copy nothing. The inputs are then copied to memory that is counted as the
    host's, so that the bytes are those of a device.
    """
    tiers = Tiers(Schedule(offload="host"))
    here = model_device(model)

    def on_host(function: Callable[..., Any], *args: Any) -> Any:
        host = tiers.of("host", here)
        copied = saved_tensors_hooks(host.put, lambda block: block.get())
        with save_on_cpu(pin_memory=True) if here.type == "cuda" else copied:
            return recompute(function, *args)

    with checkpointing(model, on_host):
        yield None if here.type == "cuda" else tiers


@contextmanager
def _offloaded(model: Any, schedule: Schedule) -> Iterator[Ready]:
    with _inputs_on_host(model) as tiers:
        yield Ready(_own_loss(model), tiers)


@contextmanager
def _tiled(model: Any, schedule: Schedule) -> Iterator[Ready]:
    """Prepare checkpointing with what DeepSpeed's ALST adds on one device: the MLP and the loss tile by tile.

    The tiles of an MLP are those of ALST's documentation, of as many tokens as the model is wide; a tile of the loss is
    as long as a chunk of the streamed head.
    """
    with _tiled_mlps(decoder_layers(model)), checkpointing(model):
        yield Ready(lambda batch: _tiled_loss(model, batch, schedule.head_chunk_size))


@contextmanager
def _liger_head(model: Any, schedule: Schedule) -> Iterator[Ready]:
    with checkpointing(model):
        yield Ready(partial(_liger_loss, model))


@contextmanager
def _liger_head_offloaded(model: Any, schedule: Schedule) -> Iterator[Ready]:
    with _inputs_on_host(model) as tiers:
        yield Ready(partial(_liger_loss, model), tiers)


def _liger_loss(model: Any, batch: Batch) -> Tensor:
    head = model.get_output_embeddings()
    return peers.liger_loss(head, last_hidden_state(model, batch), _next_tokens(batch))


def _peer(prepared: Callable[[Any], AbstractContextManager[peers.Loss]]) -> Entered:
    """Return the preparation of a peer that has no schedule."""

    @contextmanager
    def entered(model: Any, schedule: Schedule) -> Iterator[Ready]:
        with prepared(model) as loss:
            yield Ready(loss)

    return entered


@contextmanager
def _streamed(model: Any, schedule: Schedule) -> Iterator[Ready]:
    handle = stream(model, schedule=schedule)
    try:
        yield Ready(_scored_loss(model, handle), handle.tiers)
    finally:
        handle.remove()


def _keeping_attention(model: Any, schedule: Schedule) -> AbstractContextManager[Ready]:
    return _streamed(model, replace(schedule, keep_attention="device"))


UNSLOTH_ALONE = "it changes transformers in its process; --modes plain,checkpoint,unsloth measures it"

WAYS: dict[Mode, Way] = {
    "plain": Way(_plain),
    "checkpoint": Way(_checkpointed),
    "checkpoint-offload": Way(_offloaded),
    "deepspeed-tiled": Way(_tiled, package="deepspeed"),
    "liger-loss": Way(_liger_head, "liger_kernel", "Liger's kernels need an accelerator"),
    "liger-loss-offload": Way(_liger_head_offloaded, "liger_kernel", "Liger's kernels need an accelerator"),
    "liger": Way(_peer(peers.liger), "liger_kernel", "Liger's kernels need an accelerator"),
    "trl": Way(_peer(peers.trl), "trl", "TRL's offloading needs an accelerator"),
    "unsloth": Way(_peer(peers.unsloth), "unsloth", "Unsloth's offloading needs an accelerator", UNSLOTH_ALONE),
    "stream": Way(_streamed),
    "stream-keep-attention": Way(_keeping_attention),
}


def absent(modes: Sequence[Mode], device_type: str) -> dict[str, str]:
    """Return those of the modes that cannot run together on such a device, with the reason."""
    lacks = {mode: WAYS[mode].lacks(device_type) for mode in modes}
    others = {mode for mode in modes if not lacks[mode]} - {"plain", "checkpoint"}
    for mode in others:
        if WAYS[mode].alone and len(others) > 1:
            lacks[mode] = f"not run here: {WAYS[mode].alone}"
    return {mode: why for mode, why in lacks.items() if why}


def last_hidden_state(model: Any, batch: Batch) -> Tensor:
    """Return the output of the decoder, which is the input of the head, [batch, length, width]."""
    hidden: Tensor = base_of(model).base_model(**batch, use_cache=False).last_hidden_state
    return hidden


def _own_loss(model: Any) -> Callable[[Batch], Tensor]:
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


def _scored_loss(model: Any, handle: StreamHandle) -> Callable[[Batch], Tensor]:
    """Return a loss like that of :func:`_own_loss`; completions are scored token by token, as an objective does."""
    own = _own_loss(model)

    def loss(batch: Batch) -> Tensor:
        if "targets" not in batch:
            return own(batch)
        scores = handle.logprobs(batch["input_ids"], batch["targets"], branches=batch.get("branches"))
        return -scores.logprobs.sum() / batch["count"]

    return loss


@contextmanager
def _tiled_mlps(layers: list[nn.Module]) -> Iterator[None]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    mlps: list[Any] = [layer.mlp for layer in layers if hasattr(layer, "mlp")]
    if len(mlps) < len(layers):
        raise UnsupportedModelError("its layers have no 'mlp' to tile")

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


def _tiled_loss(model: Any, batch: Batch, tile: int) -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    hidden, labels = last_hidden_state(model, batch), _next_tokens(batch)
    head, count = model.get_output_embeddings(), (labels != IGNORE_INDEX).sum()

    def of_tile(head: nn.Module, x_NC: Tensor, labels_N: Tensor) -> Tensor:
        return cross_entropy(head(x_NC).float(), labels_N, ignore_index=IGNORE_INDEX, reduction="sum") / count

    tiles = math.ceil(labels.numel() / tile)
    loss: Tensor = TiledFusedLogitsLoss.apply(
        of_tile, head, hidden, labels, None, tiles, list(head.parameters()), "sum"
    )
    return loss


def _next_tokens(batch: Batch) -> Tensor:
    """Return the label of every position, [batch, length]."""
    return pad(batch["input_ids"][:, 1:], (0, 1), value=IGNORE_INDEX)
