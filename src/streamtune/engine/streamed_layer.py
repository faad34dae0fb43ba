"""A decoder layer of a streamed model, with all that its calls have in common, and the checks before a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.context import CallContext, LastLayerCall
from streamtune.engine.fused import FusedParts
from streamtune.engine.hf_names import KEPT_WINDOW, attention_of, names_attention
from streamtune.engine.memory.placement import Placement, Tiers
from streamtune.engine.observe import may_bring_leaves, refuse_hooks
from streamtune.engine.own_attention import OwnAttention, refuse_another
from streamtune.engine.routers import RouterWatch
from streamtune.engine.scan import mixers_with_a_bare_scan
from streamtune.engine.sharded import FlatParametersError
from streamtune.engine.waiting import WaitingWeights
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.fused import fusion_pays
from streamtune.schedule import Schedule

Scope = Callable[[], AbstractContextManager[Any]]
"""A context around each run of a layer on a chunk, provided by the owner of what it changes."""


@dataclass
class ModelParts:
    """The parts of a streamed model that its layers and norms share."""

    schedule: Schedule
    tiers: Tiers
    """The memory of host and disk."""
    context: CallContext = field(default_factory=CallContext)
    routers: RouterWatch | None = None
    """Collects the logits of routers, if there are any."""
    last_call: LastLayerCall[Any] = field(default_factory=LastLayerCall)
    """The last layer call, by which the next finds the call that made its input."""
    waiting: WaitingWeights | None = None
    """The weights that wait on the host; None where all are on the device."""


class StreamedLayer:
    """A decoder layer, and the state that its calls share.

    Args:
        layer: Decoder layer of a ``transformers`` model.
        parts: Parts that it shares with the other layers.
        own: Attention implementation of a layer that computes its attention itself. None takes ours; a layer whose
            first call shows that ours is not enough keeps its eager one.
        place: Placement of the layer's input until the backward.
    """

    def __init__(
        self, layer: nn.Module, parts: ModelParts, own: str | None = None, place: Placement | None = None
    ) -> None:
        self.layer, self.parts, self.schedule = layer, parts, parts.schedule
        self.place = Placement() if place is None else place
        self.own = None if own is None else OwnAttention(own)
        self.fused = FusedParts(layer) if self.schedule.fuse == "torch" else None
        self.bare_scans = mixers_with_a_bare_scan(layer)
        self.carries_states = False
        """True if its chunks end where packed rows do: states must not pass from one to the next."""
        self.narrow_states = False
        """True if its last call passed on a state in a narrower dtype than its hidden states."""
        self.leaves_checked = self.attention_known = self.removed = False
        configs: list[Any] = [getattr(module, "config", None) for module in layer.modules()]
        self.configs = list({id(config): config for config in configs if names_attention(config)}.values())
        self.attention = [attention_of(config) for config in self.configs]

    @property
    def name(self) -> str:
        """The layer's class, for errors."""
        return type(self.layer).__name__

    def scopes(self, device: torch.device) -> list[Scope]:
        """Return the contexts in which the layer's own parts run on a chunk."""
        return [self.fused.used] if self.fused is not None and fusion_pays(device) else []

    @contextmanager
    def on_device(self, parameters: Sequence[Tensor], prefetch: int | None = None) -> Iterator[list[Tensor]]:
        """Hold the layer's weights on the device inside; yield the tensors that stand for ``parameters``.

        ``prefetch`` is the next layer, as in :meth:`WaitingWeights.used`; None is the layer before, as in a backward.
        """
        waiting = self.parts.waiting
        if waiting is None:
            yield list(parameters)
            return
        if prefetch is None:  # before the first layer of a segment, layers of the segment before run forward again
            prefetch = 0 if self.schedule.levels == 2 and self.place.begins else -1
        with waiting.used(self.layer, prefetch) as copies:
            yield [copies.get(id(p), p) for p in parameters]

    def to_host(self, parameters: Sequence[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of ``parameters``, on the host if the parameters wait there."""
        return grads if self.parts.waiting is None else self.parts.waiting.to_host(parameters, grads)

    def check_in_place(self, length: int) -> None:
        """Refuse a backward after the stream was removed, or one that would run another attention or a user's hooks."""
        if self.removed:
            raise ArgumentError(
                "the stream was removed between a forward and its backward, which has to run the layers again",
                where=self.name,
                fix="call loss.backward() before handle.remove(), or inside of the with statement",
            )
        self.check_attention(length)
        self.check_hooks()

    def check_hooks(self) -> None:
        """Refuse hooks of the user's own that would be called with chunks."""
        refuse_hooks(
            self.layer,
            within=True,
            why="and would be called for each chunk, forward and backward",
            fix="register it on the decoder layer, which is called once with the whole sequence; or, if it treats "
            "every token by itself, register streamtune.chunkwise(hook)",
        )

    def check_attention(self, length: int) -> None:
        """Refuse another attention: it does not align a chunk's queries with the last of its keys, and would be wrong.

        Also refuse ``topk`` over scores of values alone. Repeated tokens have equal scores, and which of them is kept
        depends on the number of keys, which is smaller in a chunk.
        """
        for config, name in zip(self.configs, self.attention, strict=True):
            kept = getattr(config, KEPT_WINDOW, None)
            if kept is not None and length > kept:
                raise UnsupportedModelError(
                    f"of {length} tokens the attention keeps {KEPT_WINDOW}={kept} by a score that repeated tokens "
                    "share, so that what it keeps depends on the chunk",
                    where=self.name,
                    fix=f"train on rows of at most {kept} tokens",
                )
            refuse_another(config, name, self.name)

    def check_leaves(self, z_i: Tensor, known: Sequence[Tensor]) -> None:
        """Refuse a trainable tensor that is not an input of the layer's node: its gradient would be lost.

        Once is enough, unless hooks are inside.
        """
        if self.leaves_checked and not may_bring_leaves(self.layer):
            return
        for leaf in strange_leaves(z_i, known):
            if getattr(leaf, "_is_flat_param", False):
                raise FlatParametersError(self.name)
            raise UnsupportedModelError(
                f"{self.name} uses a trainable tensor of shape {tuple(leaf.shape)} "
                "that is not its own parameter, so its gradient would be lost",
                fix="freeze that tensor, or train without streaming",
            )
        self.leaves_checked = True


def strange_leaves(z_out: Tensor, known: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of ``z_out``'s graph that need a gradient and are not among the known ones."""
    known_ids = {id(tensor) for tensor in known}
    todo, seen = [z_out.grad_fn], {tensor.grad_fn for tensor in known if tensor.grad_fn is not None}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known_ids:
            yield variable
        todo.extend(parent for parent, _ in node.next_functions)
