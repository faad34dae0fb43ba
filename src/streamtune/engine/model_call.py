"""Arguments of a model call, read by name, and changed where streaming requires it.

After a change, packed rows and masks mean the same as in a call without streaming that has the original arguments.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine.hf_names import BY_POSITIONS, CACHE, cache_argument, parameters_of, renamed_cache
from streamtune.engine.rows import PackedRows, describes_packed_rows
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.attention.mask import HIGHEST_HIDDEN
from streamtune.ops.devices import clear_host_copies

TOKENS = ("input_ids", "inputs_embeds")
READ = "_streamtune_read"
"""Attribute that marks a cache that a call with gradients has read."""


@lru_cache(maxsize=64)
def _parameter_names(forward: Any) -> tuple[str, ...]:
    return tuple(parameters_of(forward))[1:]


@dataclass
class ModelCall:
    """Arguments of a call of ``model``, read and set by name whether they are passed by position or by keyword."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        clear_host_copies()  # copies of earlier calls
        if (name := cache_argument(type(self.model).forward, state=False)) is not None:
            self.kwargs = renamed_cache(self.kwargs, name)

    def get_argument(self, name: str) -> Any:
        """Return an argument; None if it was not passed."""
        names = _parameter_names(type(self.model).forward)[: len(self.args)]
        return self.kwargs.get(name, self.args[names.index(name)] if name in names else None)

    def set_argument(self, name: str, value: Any) -> None:
        """Set an argument of the call, also if it was not passed."""
        names = _parameter_names(type(self.model).forward)[: len(self.args)]
        if name in names:
            place = names.index(name)
            self.args = (*self.args[:place], value, *self.args[place + 1 :])
        else:
            self.kwargs = {**self.kwargs, name: value}

    @property
    def cache(self) -> Any:
        """The key/value cache passed under any of its argument names, or None."""
        name = cache_argument(type(self.model).forward, state=False)
        return None if name is None else self.get_argument(name)

    def has_parameter(self, name: str) -> bool:
        """Return True if the signature of the model's forward has a parameter ``name``."""
        return name in _parameter_names(type(self.model).forward)

    @property
    def batch_and_length(self) -> tuple[int, int]:
        """Number of rows B and number of tokens T per row; (0, 0) if no tokens were passed."""
        tokens = next((x for name in TOKENS if isinstance(x := self.get_argument(name), Tensor)), None)
        return (0, 0) if tokens is None else (tokens.shape[0], tokens.shape[1])

    def packed_rows(self) -> PackedRows | None:
        """Return the packed rows that ``transformers`` would find in the call; None if it would find none.

        ``transformers`` finds packed rows if the position ids restart, and the call has no attention mask and no cache.

        Raises:
            UnsupportedModelError: Kernel arguments describe packed rows at which positions do not restart.
        """
        if self.get_argument("attention_mask") is None and self.cache is None:
            rows = PackedRows.from_positions(self.get_argument("position_ids"))
            if rows is not None:
                rows.check_described_rows(self.kwargs)
                return rows
        if describes_packed_rows(self.kwargs):
            raise UnsupportedModelError(
                "cu_seq_lens or seq_idx describe packed rows, but position_ids do not restart",
                fix="pass position_ids that restart at each row, and no attention_mask",
            )
        return None

    def keep_one_row(self, attentions: list[Any], cache_enabled: bool) -> None:
        """Add an attention mask of ones if ``position_ids`` jump inside a row that stays one row without streaming.

        ``transformers`` treats a jump as the start of a packed row unless there is a mask or a cache. Streaming leaves
        out the cache that the call would create without streaming. Flash attention always finds packed rows by the
        positions.

        Args:
            attentions: Attention implementations that the configs name without streaming.
            cache_enabled: True if the configuration enables the cache and nothing overrides it.
        """
        use_cache = self.get_argument("use_cache")
        by_positions = describes_packed_rows(self.kwargs) or any(
            str(name).startswith(BY_POSITIONS) for name in attentions
        )
        if by_positions or not (cache_enabled if use_cache is None else use_cache):
            return
        if (
            self.get_argument("attention_mask") is None
            and self.has_parameter("attention_mask")
            and all(self.batch_and_length)
        ):
            positions = self.get_argument("position_ids")
            if PackedRows.from_positions(positions) is not None:
                self.set_argument(
                    "attention_mask", torch.ones(self.batch_and_length, dtype=torch.long, device=positions.device)
                )

    def has_left_padding(self) -> bool:
        """Return True if the attention mask has padding at the beginning of any row."""
        mask = self.get_argument("attention_mask")
        return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 0] == 0).any())

    def has_labelled_padding(self, targets: Tensor | None, eager: bool) -> bool:
        """Return True if a token has a target, but attends to all tokens because the mask hides all keys from it.

        Args:
            targets: Shifted targets ``[B, T]``; None uses the call's ``shift_labels`` or ``labels``.
            eager: True if layers use eager attention.
        """
        if (mask := self._seeing_tokens(eager)) is None:
            return False
        targets = self.kwargs.get("shift_labels") if targets is None else targets
        labels = self.get_argument("labels")
        if targets is None and labels is not None:
            targets = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        if targets is None or mask.shape[1:] != targets.shape[1:]:
            return False
        return bool(((mask == 0) & (targets != IGNORE_INDEX)).any())

    def _seeing_tokens(self, eager: bool) -> Tensor | None:
        """Return ``[B, T]``, 0 at tokens from which the mask hides all keys, so that they attend to all tokens.

        Eager attention treats padding so. All attentions do if a dense mask adds a finite number to the scores. None if
        the mask is of another kind.
        """
        mask = self.get_argument("attention_mask")
        if not isinstance(mask, Tensor):
            return None
        if mask.dim() == 4 and mask.is_floating_point():
            hidden = (mask <= HIGHEST_HIDDEN) & mask.isfinite()
            return ~hidden.all(-1).any(1)
        if mask.dim() != 2 or not eager:
            return None
        if self.cache is not None:
            is_token = mask.cumsum(1) > 0  # padding behind a token of the cache sees that token
            mask = is_token[:, is_token.shape[1] - self.batch_and_length[1] :]
        return mask


def mark_cache_read(call: ModelCall) -> None:
    """Mark the cache that a call with gradients reads but does not write to; raise an error if it is marked already.

    Without streaming, the model would write the call's tokens to the cache. A later streamed call with the same cache
    would lack these tokens.

    Raises:
        UnsupportedModelError: An earlier call with gradients has read this cache.
    """
    cache = call.cache
    if getattr(cache, READ, False):
        raise UnsupportedModelError(
            "the cache that was passed lacks the tokens of an earlier call with gradients, which read it without "
            "writing to it",
            where=CACHE,
            fix="pass copy.deepcopy(cache) to each call that trains; pass all tokens that attend to each other in "
            "one call",
        )
    if cache is not None and torch.is_grad_enabled():
        with contextlib.suppress(AttributeError):  # caches of old releases are tuples
            setattr(cache, READ, True)


def refuse_unsupported_modes(model: nn.Module) -> None:
    """Raise an error for a call under ``torch.func`` transforms or cached parametrisations, or on the meta device.

    Raises:
        UnsupportedModelError: A transform or ``parametrize.cached()`` is active.
        ArgumentError: The model has no weights to compute with.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedModelError(
            "a streamed model was called under a transform of torch.func (grad, vmap, jvp, jacrev), which cannot trace "
            "its backward",
            fix="use loss.backward() or torch.autograd.grad; of torch.func, only functional_call is supported",
        )
    if parametrize._cache_enabled:
        raise UnsupportedModelError(
            "a streamed model was called inside torch.nn.utils.parametrize.cached(), which would cache weights that "
            "the streamed forward computes without a graph",
            fix="call the model outside parametrize.cached()",
        )
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type == "meta" and not is_in_torch_dispatch_mode():
        raise ArgumentError(
            f"this {type(model).__name__} is on the meta device: it has no weights to compute with",
            fix="load its weights, or move it with model.to_empty(device=...) and initialise it",
        )
