"""Sequence parallelism: each rank makes the ordinary call with the whole rows, and computes its shards of them.

In a call with labels, or a scored call, the arguments are changed before the model's forward: tokens, positions and
targets are cut to the rank's own (``shards``), and the loss is summed over the ranks. Calls without targets are not
shared: every rank computes them whole. docs/decisions/015-sequence-parallel.md has the reasons.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import IGNORE_INDEX, model_device
from streamtune.engine.hf_names import CACHES, KERNEL_ROWS, MAKES_POSITIONS, POSITIONS, TOKEN_TYPES
from streamtune.engine.inspect_model import carries_states
from streamtune.engine.observe import RandomState
from streamtune.engine.rotary import RowLengths
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.shards import SequenceParallel, SequenceShards
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError, UnsupportedModelError

TOKENS = {"input_ids": 1, "inputs_embeds": 1, "labels": 1, "position_ids": -1, "shift_labels": 1}
"""Arguments that follow the tokens, and the dimension along which they do."""
UNSHARED = "set sequence_parallel_size: 1"


class Sharing:
    """Changes calls of a streamed model to calls on this rank's shards; does nothing if ranks share no sequences."""

    def __init__(self, handle: StreamedModel) -> None:
        self._handle = proxy(handle)
        self._drawing = ExitStack()
        self._least = 2 if any(map(carries_states, handle.layers)) else 1

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], with_targets: bool) -> dict[str, Any]:
        """Return a call's arguments by name: for this rank's shards, or unchanged if the call has no targets."""
        model = self._handle.model
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if with_targets:
            return self.share(kwargs)
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            raise UnsupportedModelError(
                "ranks share this model's sequences, and logits would be those of a strip",
                fix="pass labels, ask handle.logprobs, or call it under torch.no_grad(), where ranks do not share",
            )
        return kwargs

    def share(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for this rank's shards; give the shards to layers, head and routers until ``end``."""
        handle = self._handle
        ranks, rows = handle.sequence_parallel, handle.context.rows
        if ranks is None:
            return kwargs
        self._set_shards(None)
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if tokens is None:
            raise ArgumentError("a call that ranks share needs input_ids or inputs_embeds")
        batch, length = tokens.shape[:2]
        _refuse(handle, kwargs, length)
        branches = rows if isinstance(rows, Branches) else None
        packed = None if branches else rows
        shards = SequenceShards(
            ranks.group, handle.form, handle.schedule, batch, length, packed, _targets(kwargs), self._least, branches
        )
        given = {key: value for key, value in kwargs.items() if key not in (*KERNEL_ROWS, POSITIONS[1])}
        given |= _placed(handle, shards, tokens, kwargs)
        shards.padding = given["attention_mask"]
        given.pop("shift_labels", None)
        names = inspect.signature(type(handle.model).forward).parameters
        if "position_ids" not in names:
            del given["position_ids"]
        if handle.rotates_by_length:
            lengths = handle.context.lengths or RowLengths.of_batch(given["position_ids"])
            handle.context.lengths = lengths.cut(lambda each_BT: shards.cut(each_BT, -1))
        for name, dim in (TOKENS | dict.fromkeys(TOKEN_TYPES, 1)).items():
            if isinstance(value := given.get(name), Tensor):
                given[name] = shards.cut(value, dim, IGNORE_INDEX if name == "labels" else None)
        if branches is not None and shards.total > length:  # what is behind the rows is a row of its own
            branches = branches.followed_by(shards.total - length)
        handle.context.rows = branches
        self._set_shards(shards)
        if handle.model.training:
            self._drawing.enter_context(drawn_apart(ranks, model_device(handle.model)))
        return given

    def end(self) -> None:
        """End the call: reset its shards and its rows."""
        self._set_shards(None)
        self._handle.context.rows = self._handle.context.lengths = None

    def open_routers(self, attention_mask: Any) -> None:
        """Let the routers count the tokens of the rows, without the padding behind their end."""
        shards = self._handle.context.shards
        if shards is not None and attention_mask is None:
            device = model_device(self._handle.model)
            attention_mask = torch.ones(shards.batch, shards.given, device=device)
        self._handle.routers.open(attention_mask)

    def _set_shards(self, shards: SequenceShards | None) -> None:
        self._drawing.close()
        handle = self._handle
        handle.context.shards = handle.routers.shards = shards
        if handle.head is not None:
            handle.head.shards = shards
        if handle.scored is not None and shards is not None:
            handle.scored.shards = shards


def _targets(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the targets ``[B, T]``: ``shift_labels``, or the labels shifted once over the whole rows."""
    shifted: Tensor | None = kwargs.get("shift_labels")
    labels: Tensor | None = kwargs.get("labels")
    if shifted is not None or labels is None:
        return shifted
    return nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def _placed(handle: StreamedModel, shards: SequenceShards, tokens: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return positions of the rows, and a padding mask of the whole padded sequence, the same on every rank."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    padded = mask is not None and not bool(mask.bool().all())
    if positions is None:
        if kind := _places_tokens_itself(handle, padded):
            raise UnsupportedModelError(
                f"{kind} makes positions from tokens or padding, which no rank sees all of", fix="pass position_ids"
            )
        positions = torch.arange(shards.given, device=tokens.device)[None]
    if mask is None:
        mask = torch.ones(*tokens.shape[:2], dtype=torch.long, device=tokens.device)
    # No row sees what is behind its end, masked or not; unmasked it costs no mask.
    return {
        "position_ids": positions,
        "attention_mask": nn.functional.pad(mask, (0, shards.total - shards.given), value=int(not padded)),
    }


def _refuse(handle: StreamedModel, kwargs: dict[str, Any], length: int) -> None:
    """Refuse arguments that do not follow the tokens, or that need all of them."""
    known = {*TOKENS, *KERNEL_ROWS, *POSITIONS, "attention_mask", "num_items_in_batch"}
    name = type(handle.model).__name__
    for key, value in kwargs.items():
        if key in known or value is None:
            continue
        if key in TOKEN_TYPES and isinstance(value, Tensor) and value.dim() == 2 and not bool(value.any()):
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            raise UnsupportedModelError(f"{name} is handed {key!r}, which ranks cannot share", fix=UNSHARED)
        if key in (*CACHES, "output_hidden_states", "logits_to_keep") and value:
            raise UnsupportedModelError(
                f"{key} is asked for, which ranks that share a sequence do not have", fix=UNSHARED
            )
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == length):
        raise UnsupportedModelError(
            "ranks that share a sequence take an attention_mask [B, T] of its padding, and no other", fix=UNSHARED
        )


def _places_tokens_itself(handle: StreamedModel, padded: bool) -> str | None:
    """Return the class that makes positions from tokens, or from padding if ``padded``; None if none does."""
    inside = {id(module) for layer in handle.layers for module in layer.modules()}
    for module in handle.model.modules():
        if id(module) in inside:
            continue
        by_mask = (
            padded
            and isinstance(module, nn.Embedding)
            and "attention_mask" in inspect.signature(module.forward).parameters
        )
        names = {*dir(module), *(name for kind in type(module).__mro__ for name in vars(sys.modules[kind.__module__]))}
        if by_mask or any(name.startswith(MAKES_POSITIONS) for name in names):
            return type(module).__name__
    return None


@contextmanager
def drawn_apart(ranks: SequenceParallel, device: torch.device) -> Iterator[None]:
    """Draw the rank's own random numbers inside the context, and restore the ranks' common state afterwards."""
    seed = int(torch.randint(1 << 62, ()))
    outer = RandomState.now(device)
    torch.manual_seed((seed + 0x9E3779B97F4A7C15 * (ranks.rank + 1)) % (1 << 63))
    try:
        yield
    finally:
        outer.restore()
