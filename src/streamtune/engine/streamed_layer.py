"""A decoder layer of a streamed model: the state that its calls share, and the checks before a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.context import CallContext, LastLayerCall
from streamtune.engine.fused import FusedParts
from streamtune.engine.hf_names import KEPT_WINDOW, attention_name, has_attention_name
from streamtune.engine.memory.placement import Placement, Tiers
from streamtune.engine.observe import has_chunkwise_hooks, refuse_hooks
from streamtune.engine.offloaded_weights import OffloadedWeights
from streamtune.engine.own_attention import OwnAttention, refuse_changed_attention
from streamtune.engine.routers import RouterLogitCollector
from streamtune.engine.scan import stateless_scan_mixers
from streamtune.engine.sharded import FlatParametersError
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.fused import is_fusion_faster
from streamtune.schedule import Schedule

Scope = Callable[[], AbstractContextManager[Any]]
"""Function that returns a context in which a layer runs on a chunk."""


@dataclass
class ModelParts:
    """Objects that the layers and norms of a streamed model share: schedule, storage, routers, offloaded weights."""

    schedule: Schedule
    tiers: Tiers
    """Storage tiers (device, host and disk) for saved tensors."""
    context: CallContext = field(default_factory=CallContext)
    routers: RouterLogitCollector | None = None
    """Collector of router logits; None for a layer that is checked alone."""
    last_call: LastLayerCall[Any] = field(default_factory=LastLayerCall)
    """The last layer call; the next layer compares its input with that call's output."""
    offloaded: OffloadedWeights | None = None
    """Weights offloaded to the host; None if all weights are on the device."""


class StreamedLayer:
    """A decoder layer of a streamed model, and the state that its calls share.

    Args:
        layer: Decoder layer of a ``transformers`` model.
        parts: Objects that all layers of the streamed model share.
        own_attention: Attention implementation of a layer that computes attention in its own code. None uses
            StreamTune's attention. If the first call shows that StreamTune's attention does not support the layer, the
            layer then uses its eager attention.
        placement: Storage of the layer's input until the backward.
    """

    def __init__(
        self, layer: nn.Module, parts: ModelParts, own_attention: str | None = None, placement: Placement | None = None
    ) -> None:
        self.layer, self.parts, self.schedule = layer, parts, parts.schedule
        self.placement = Placement() if placement is None else placement
        self.own_attention = None if own_attention is None else OwnAttention(own_attention)
        self.fused = FusedParts(layer) if self.schedule.fuse == "torch" else None
        self.stateless_scans = stateless_scan_mixers(layer)
        self.carries_states = False
        """True if chunks are cut where packed rows begin, so that states do not pass from row to row."""
        self.narrow_states = False
        """True if the last call passed on a state in a narrower dtype than the hidden states."""
        self.leaves_checked = self.attention_known = self.removed = False
        configs: list[Any] = [getattr(module, "config", None) for module in layer.modules()]
        self.configs = list({id(config): config for config in configs if has_attention_name(config)}.values())
        self.attention = [attention_name(config) for config in self.configs]

    @property
    def name(self) -> str:
        """Class name of the layer, for error messages."""
        return type(self.layer).__name__

    def chunk_contexts(self, device: torch.device) -> list[Scope]:
        """Return the contexts in which a chunk runs: the layer's fused operators, if they are faster on ``device``."""
        return [self.fused.replacing_functions] if self.fused is not None and is_fusion_faster(device) else []

    @contextmanager
    def weights_on_device(
        self, parameters: Sequence[Tensor], prefetch_offset: int | None = None
    ) -> Iterator[list[Tensor]]:
        """Hold the layer's weights on the device in this context; yield the device copies of ``parameters``.

        ``prefetch_offset`` is the offset of the layer whose weights are copied next (1: the next layer, -1: the
        preceding layer, 0: none). None chooses the offset for a backward.
        """
        offloaded = self.parts.offloaded
        if offloaded is None:
            yield list(parameters)
            return
        if (
            prefetch_offset is None
        ):  # below the first layer of a segment, layers of the segment before run forward again
            prefetch_offset = 0 if self.schedule.levels == 2 and self.placement.begins_segment else -1
        with offloaded.weights_on_device(self.layer, prefetch_offset) as copies:
            yield [copies.get(id(p), p) for p in parameters]

    def gradients_to_host(self, parameters: Sequence[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of ``parameters``, copied to the host if the parameters are offloaded."""
        return grads if self.parts.offloaded is None else self.parts.offloaded.gradients_to_host(parameters, grads)

    def check_before_backward(self, sequence_length: int) -> None:
        """Raise an error if, since the forward, streaming was removed, the attention changed, or a hook was added."""
        if self.removed:
            raise ArgumentError(
                "streaming was removed between a forward and its backward, which must run the layers again",
                where=self.name,
                fix="call loss.backward() before handle.remove(), or inside the with statement",
            )
        self.check_attention(sequence_length)
        self.check_hooks()

    def check_hooks(self) -> None:
        """Raise an error if the user registered a hook inside the layer, which would be called once per chunk."""
        refuse_hooks(
            self.layer,
            within=True,
            why="and would be called for each chunk, forward and backward",
            fix="register it on the decoder layer, which is called once with the whole sequence; or, if it treats "
            "each token independently, register streamtune.chunkwise(hook)",
        )

    def check_attention(self, sequence_length: int) -> None:
        """Raise an error if the layer's attention implementation would compute chunks wrongly.

        Two kinds would. One is an implementation that was set after ``stream()``. The other is the attention of Doge,
        which keeps the top-k keys by scores that are independent of the query. The scores of repeated tokens are tied.
        Which of the tied keys are kept depends on the number of keys, and this number differs in a chunk.

        Raises:
            UnsupportedModelError: The attention was changed, or keeps fewer than ``sequence_length`` keys.
        """
        for config, name in zip(self.configs, self.attention, strict=True):
            kept = getattr(config, KEPT_WINDOW, None)
            if kept is not None and sequence_length > kept:
                raise UnsupportedModelError(
                    f"the attention keeps {KEPT_WINDOW}={kept} of {sequence_length} tokens by a score that is equal "
                    "for repeated tokens, so its choice depends on the chunk",
                    where=self.name,
                    fix=f"train on rows of at most {kept} tokens",
                )
            refuse_changed_attention(config, name, self.name)

    def check_leaves(self, z_i: Tensor, allowed: Sequence[Tensor]) -> None:
        """Raise an error if the layer reads a trainable tensor not in ``allowed``, whose gradient would be lost.

        The graph is checked in the first call, and in each call if the layer has hooks marked ``chunkwise``.

        Args:
            z_i: Output of a chunk.
            allowed: Inputs of the layer's autograd node: tensor arguments and parameters.

        Raises:
            UnsupportedModelError: The graph of ``z_i`` has another trainable leaf.
        """
        if self.leaves_checked and not has_chunkwise_hooks(self.layer):
            return
        for leaf in trainable_leaves_except(z_i, allowed):
            if getattr(leaf, "_is_flat_param", False):
                raise FlatParametersError(self.name)
            raise UnsupportedModelError(
                f"{self.name} uses a trainable tensor of shape {tuple(leaf.shape)} "
                "that is not one of its parameters, so its gradient would be lost",
                fix="freeze that tensor, or train without streaming",
            )
        self.leaves_checked = True


def trainable_leaves_except(output: Tensor, allowed: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the trainable leaf tensors in the graph of ``output``, except the tensors ``allowed``."""
    known_ids = {id(tensor) for tensor in allowed}
    todo, visited = [output.grad_fn], {tensor.grad_fn for tensor in allowed if tensor.grad_fn is not None}
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known_ids:
            yield variable
        todo.extend(parent for parent, _ in node.next_functions)
