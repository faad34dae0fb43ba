"""Installs streaming in a model of ``transformers``, and removes it again completely.

No modeling file is patched. The ``forward`` of decoder layers, norms and embedding is replaced on the module instances.
So are the cache that a layer updates, and the attention and mask functions that the model's config names.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.context import CallContext
from streamtune.engine.head import StreamedHead, has_head
from streamtune.engine.image_tower import install_image_tower
from streamtune.engine.inspect_model import (
    attention_configs,
    base_model,
    check_streamable,
    choose_parallel_form,
    decoder_layers,
    own_attention_name,
    owning_models,
)
from streamtune.engine.layer import StreamedForward
from streamtune.engine.memory.placement import Tiers, place_layers
from streamtune.engine.offloaded_weights import OffloadedWeights
from streamtune.engine.outside_layers import StreamedEmbedding, StreamedNorm, norms_outside_layers, token_embedding
from streamtune.engine.own_attention import AttentionNames
from streamtune.engine.requests import ScoreRequest
from streamtune.engine.rotary import LengthRotary, RowLengths
from streamtune.engine.routers import RouterLogitCollector, RouterLoss
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.sharded import flag_leaf_layers, require_input_gradient, unflag_leaf_layers
from streamtune.engine.streamed_layer import ModelParts
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.schedule import Schedule


class StreamedModel:
    """A streamed model, with all that ``stream`` installs in it. Arguments and errors are the same
    as for ``stream``.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        head: bool,
        router_loss: RouterLoss | None,
        sequence_parallel: SequenceParallel | None,
    ) -> None:
        self.model: Any = base_model(model)
        """The model of ``transformers``, without wrappers."""
        if head:
            _refuse_own_loss(model)
        self.schedule = schedule
        self.layers = decoder_layers(self.model)
        if any(isinstance(layer.__dict__.get("forward"), StreamedForward) for layer in self.layers):
            raise ArgumentError(
                f"this {type(self.model).__name__} is streamed already",
                fix="call StreamHandle.of(model).remove() first",
            )
        check_streamable(self.model, self.layers)
        self.sequence_parallel = None if sequence_parallel is None or sequence_parallel.size == 1 else sequence_parallel
        """Ranks that share each sequence; None for a single rank."""
        if self.sequence_parallel is not None and schedule.order == "chunk":
            raise ArgumentError(
                "order='chunk' and sequence parallelism exclude each other",
                fix="set order: layer (Schedule(order='layer')), or sequence_parallel_size: 1",
            )
        self.form = ""
        """Exchange of keys and values between ranks: ``ulysses`` or ``ring``; empty for a single rank."""
        if self.sequence_parallel is not None:
            self.form = choose_parallel_form(self.sequence_parallel, self.model, self.layers, head)
        self.head = StreamedHead(self.model, schedule) if head and has_head(self.model) else None
        """Streamed head; None if the head is not streamed."""
        self._flagged_layers = flag_leaf_layers(self.layers)
        self.routers = RouterLogitCollector(self.model, self.layers, router_loss)
        self.scored: ScoreRequest | None = None
        """Request for scores that the current call computes; None for an ordinary call."""
        self.own_attention = own_attention_name(self.model, self.layers)
        """Attention implementation of layers with their own attention code; None if layers use
        StreamTune's attention.
        """
        self.names = AttentionNames(attention_configs(self.model, self.layers), self.own_attention)
        """Attention implementations that the model's configs name during calls and outside of calls."""
        self.context, self.tiers = CallContext(), Tiers(schedule)
        self.offloaded: OffloadedWeights | None = None
        """Weights offloaded to the host; None if all weights are on the device."""
        if schedule.weights == "host":  # after all checks, because it moves the weights
            dtype = torch.bfloat16 if schedule.fetch_dtype == "bfloat16" else None
            self.offloaded = OffloadedWeights(self.model, self.layers, self.tiers, dtype)
            if self.head is not None:
                self.head.offloaded = self.offloaded
        self._install()

    def _install(self) -> None:
        parts = ModelParts(self.schedule, self.tiers, self.context, self.routers, offloaded=self.offloaded)
        for layer, place in zip(self.layers, place_layers(self.schedule, len(self.layers)), strict=True):
            layer.forward = StreamedForward(layer, parts, self.own_attention, place)
        self._norms = norms_outside_layers(owning_models(self.model, self.layers)[-1], self.layers)
        for norm in self._norms:
            norm.forward = StreamedNorm(norm, parts)
        self._embedding = token_embedding(self.model)
        if self._embedding is not None:
            self._embedding.forward = StreamedEmbedding(self._embedding)  # type: ignore[method-assign]
        self._tower = install_image_tower(self.model, self.layers)
        self._rotations = LengthRotary.install_in_model(self.model, partial(_row_lengths_of_call, self.context))
        self._checkpointing: set[Any] = set()
        """Modules whose gradient checkpointing is turned off while the model is streamed."""
        self._hooks = [
            layer.register_forward_pre_hook(require_input_gradient, with_kwargs=True, prepend=True)
            for layer in self.layers
        ]

    def remove(self) -> None:
        """Undo everything that ``stream`` installed in the model; offloaded weights stay on the host."""
        for hook in self._hooks:
            hook.remove()
        if self.head is not None:
            self.head.end_call()
        self.routers.remove()
        if self.offloaded is not None:
            self.offloaded.remove()
        for layer in self.layers:
            if isinstance(forward := layer.__dict__.get("forward"), StreamedForward):
                forward.removed = True
                del layer.forward
        for module in (*self._norms, self._embedding):
            if module is not None:
                del module.forward
        for rotation in self._rotations:
            rotation.remove()
        if self._tower is not None:
            self._tower.remove()
        self.names.end_call(0)
        for module in self._checkpointing:
            module.gradient_checkpointing = True
        unflag_leaf_layers(self._flagged_layers)
        self.tiers.close()
        self._hooks, self._norms, self._rotations, self._embedding = [], [], [], None
        self.layers, self._checkpointing = [], set()

    @property
    def streams_head(self) -> bool:
        """True if the language-model head is streamed."""
        return self.head is not None

    @property
    def rotates_by_length(self) -> bool:
        """True if the model's rotary embeddings depend on the longest position (``dynamic``, ``longrope``)."""
        return bool(self._rotations)

    def layer_on_device(self, layer: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the layer's weights are on the device, also if they are offloaded."""
        return nullcontext() if self.offloaded is None else self.offloaded.weights_on_device(layer)


def _row_lengths_of_call(context: CallContext, position_ids: Tensor) -> RowLengths | None:
    lengths = context.lengths
    return None if lengths is None else lengths.to(position_ids.device)


def _refuse_own_loss(model: nn.Module) -> None:
    configs: Any = getattr(model, "peft_config", None)
    kinds = [getattr(config, "peft_type", None) for config in configs.values()] if isinstance(configs, dict) else []
    if "CPT" in kinds:
        raise UnsupportedModelError(
            "context-aware prompt tuning (CPT) computes its own loss from full logits, which streaming does not build",
            fix="use stream(model, head=False), which streams the layers and keeps the model's own head and loss",
        )
