"""Sequence parallelism: every rank calls the model with the whole rows, and computes its own tokens of them.

In a call with labels, or a call that scores targets, the arguments are changed before the model's forward. Tokens,
positions and targets are cut to the rank's own (``shards``), and the loss is summed over the ranks. A call without
targets is not shared: every rank computes all of it. docs/decisions/015-sequence-parallel.md gives the reasons.

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
from streamtune.engine.rotary import RowLengths
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.shards import SequenceParallel, SequenceShards
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.forward_state import RandomState

TOKENS = {"input_ids": 1, "inputs_embeds": 1, "labels": 1, "position_ids": -1, "shift_labels": 1}
"""Arguments with a sequence dimension, each with the index of this dimension."""
UNSHARED_FIX = "set sequence_parallel_size: 1"
"""Fix, in error messages, for a call that sequence parallelism does not support."""


class CallSharding:
    """Cuts the arguments of model calls to this rank's tokens; does nothing without sequence parallelism."""

    def __init__(self, handle: StreamedModel) -> None:
        self._handle = proxy(handle)
        self._random_state = ExitStack()
        self._min_tokens = 2 if any(map(carries_states, handle.layers)) else 1

    def shard_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], with_targets: bool) -> dict[str, Any]:
        """Return a call's arguments by name, cut to this rank's tokens; not cut if the call has no targets.

        Raises:
            UnsupportedModelError: Ranks cannot share the call, or it has gradients but no targets.
        """
        model = self._handle.model
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if with_targets:
            return self.shard_arguments(kwargs)
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            raise UnsupportedModelError(
                "ranks share this model's sequences, so a call without labels would return only this rank's logits",
                fix="pass labels, use handle.logprobs, or call it under torch.no_grad(), where ranks do not share",
            )
        return kwargs

    def shard_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments cut to this rank's tokens. Until :meth:`end_call` the model computes only these tokens.

        Raises:
            ArgumentError: The call has no tokens.
            UnsupportedModelError: Ranks cannot share the call.
        """
        handle = self._handle
        ranks, rows = handle.sequence_parallel, handle.context.rows
        if ranks is None:
            return kwargs
        self._set_shards(None)
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if tokens is None:
            raise ArgumentError("sequence parallelism needs input_ids or inputs_embeds in the call, found neither")
        batch, length = tokens.shape[:2]
        _refuse_arguments(handle, kwargs, length)
        branches = rows if isinstance(rows, Branches) else None
        packed = None if branches else rows
        shards = SequenceShards(
            ranks.group,
            handle.form,
            handle.schedule,
            batch,
            length,
            packed,
            _shifted_targets(kwargs),
            self._min_tokens,
            branches,
        )
        cut_kwargs = {key: value for key, value in kwargs.items() if key not in (*KERNEL_ROWS, POSITIONS[1])}
        cut_kwargs |= _positions_and_mask(handle, shards, tokens, kwargs)
        shards.padding = cut_kwargs["attention_mask"]
        cut_kwargs.pop("shift_labels", None)
        names = inspect.signature(type(handle.model).forward).parameters
        if "position_ids" not in names:
            del cut_kwargs["position_ids"]
        if handle.rotates_by_length:
            lengths = handle.context.lengths or RowLengths.from_batch(cut_kwargs["position_ids"])
            handle.context.lengths = lengths.select_tokens(lambda each_BT: shards.select_tokens(each_BT, -1))
        for name, dim in (TOKENS | dict.fromkeys(TOKEN_TYPES, 1)).items():
            if isinstance(value := cut_kwargs.get(name), Tensor):
                cut_kwargs[name] = shards.select_tokens(value, dim, IGNORE_INDEX if name == "labels" else None)
        if branches is not None and shards.padded_length > length:  # the padding behind the rows is a row of its own
            branches = branches.with_row_appended(shards.padded_length - length)
        handle.context.rows = branches
        self._set_shards(shards)
        if handle.model.training:
            self._random_state.enter_context(different_random_state_per_rank(ranks, model_device(handle.model)))
        return cut_kwargs

    def end_call(self) -> None:
        """End the call: from now on use all tokens, not only this rank's."""
        self._set_shards(None)
        self._handle.context.rows = self._handle.context.lengths = None

    def open_routers(self, attention_mask: Any) -> None:
        """Begin to collect router logits; the padding that makes a sequence divisible among ranks is not counted."""
        shards = self._handle.context.shards
        if shards is not None and attention_mask is None:
            device = model_device(self._handle.model)
            attention_mask = torch.ones(shards.batch, shards.length, device=device)
        self._handle.routers.begin_call(attention_mask)

    def _set_shards(self, shards: SequenceShards | None) -> None:
        self._random_state.close()
        handle = self._handle
        handle.context.shards = handle.routers.shards = shards
        if handle.head is not None:
            handle.head.shards = shards
        if handle.scored is not None and shards is not None:
            handle.scored.shards = shards


def _shifted_targets(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the targets ``[B, T]``: ``shift_labels``, or ``labels`` shifted by one token; None if there is neither."""
    shifted: Tensor | None = kwargs.get("shift_labels")
    labels: Tensor | None = kwargs.get("labels")
    if shifted is not None or labels is None:
        return shifted
    return nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def _positions_and_mask(
    handle: StreamedModel, shards: SequenceShards, tokens: Tensor, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return ``position_ids`` of the rows, and an ``attention_mask`` of the padded sequence; equal on every rank."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    padded = mask is not None and not bool(mask.bool().all())
    if positions is None:
        if kind := _class_computing_positions(handle, padded):
            raise UnsupportedModelError(
                f"{kind} computes positions from all tokens or padding, but a rank has only its own tokens",
                fix="pass position_ids",
            )
        positions = torch.arange(shards.length, device=tokens.device)[None]
    if mask is None:
        mask = torch.ones(*tokens.shape[:2], dtype=torch.long, device=tokens.device)
    # No row sees the padding behind its end, masked or not; a mask of ones is not built as a dense mask.
    return {
        "position_ids": positions,
        "attention_mask": nn.functional.pad(mask, (0, shards.padded_length - shards.length), value=int(not padded)),
    }


def _refuse_arguments(handle: StreamedModel, kwargs: dict[str, Any], length: int) -> None:
    accepted = {*TOKENS, *KERNEL_ROWS, *POSITIONS, "attention_mask", "num_items_in_batch"}
    name = type(handle.model).__name__
    for key, value in kwargs.items():
        if key in accepted or value is None:
            continue
        if key in TOKEN_TYPES and isinstance(value, Tensor) and value.dim() == 2 and not bool(value.any()):
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            raise UnsupportedModelError(
                f"{name} gets {key!r}, which sequence parallelism does not support", fix=UNSHARED_FIX
            )
        if key in (*CACHES, "output_hidden_states", "logits_to_keep") and value:
            raise UnsupportedModelError(
                f"the call passes {key}, which sequence parallelism does not support", fix=UNSHARED_FIX
            )
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == length):
        raise UnsupportedModelError(
            "with sequence parallelism, attention_mask must be a padding mask [B, T]", fix=UNSHARED_FIX
        )


def _class_computing_positions(handle: StreamedModel, has_padding: bool) -> str | None:
    inside = {id(module) for layer in handle.layers for module in layer.modules()}
    for module in handle.model.modules():
        if id(module) in inside:
            continue
        by_mask = (
            has_padding
            and isinstance(module, nn.Embedding)
            and "attention_mask" in inspect.signature(module.forward).parameters
        )
        names = {*dir(module), *(name for kind in type(module).__mro__ for name in vars(sys.modules[kind.__module__]))}
        if by_mask or any(name.startswith(MAKES_POSITIONS) for name in names):
            return type(module).__name__
    return None


@contextmanager
def different_random_state_per_rank(ranks: SequenceParallel, device: torch.device) -> Iterator[None]:
    """Let each rank draw other random numbers in the ``with`` block; then restore the random state."""
    seed = int(torch.randint(1 << 62, ()))
    outer = RandomState.capture(device)
    torch.manual_seed((seed + 0x9E3779B97F4A7C15 * (ranks.rank + 1)) % (1 << 63))
    try:
        yield
    finally:
        outer.restore()
