"""Check of layers on a row longer than a chunk: some compute in another way above a number of tokens.

The other preflights use a few tokens, fewer than every chunk has. Here one layer of each kind runs forward on a row
that is longer than the schedule's chunk c, plainly and in its chunks, from the same hidden states. The chunks of a row
are about equally long: c/2 at least, which a row of c + 1 tokens has. A layer that changes its computation below c/2 is
exact, one that does so between c/2 and c differs there, and one that does so above c differs in a row that is as long
as that.

Within a chunk the median over its tokens is compared, so that a router that sends a token elsewhere because of rounding
does not count.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.layer import StreamedForward
from streamtune.engine.observe import attention_as
from streamtune.engine.preflight.common import BOUND, LayerStep, borrowed, compared_dtype, first_of, ordinary_tokens
from streamtune.engine.preflight.recorded import bind, kind_of
from streamtune.engine.routers import not_balanced
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import UnsupportedModelError
from streamtune.schedule import Schedule

__all__ = ["check_length", "lengths_to_check"]

SHORT, BEYOND = 256, 64
"""Below this chunk a second row has so many tokens more than a chunk."""
LONGEST = 4096
"""The longest chunk that is tried unasked: the plain layer runs on the whole row."""


def lengths_to_check(handle: StreamedModel) -> list[int]:
    """Return lengths of rows a little longer than a chunk; none that costs too much or exceeds the model's rows."""
    chunk, longest = handle.schedule.chunk_size, _longest(handle)
    lengths = [chunk + 1, *([chunk + BEYOND] if chunk < SHORT else [])]
    return [length for length in lengths if length <= LONGEST + 1 and (longest is None or length <= longest)]


def check_length(handle: StreamedModel, length: int) -> None:
    """Compare one layer of each kind, whole and in the chunks of the schedule, on a random row of ``length`` tokens.

    Costs two forwards of the decoder on that row; the whole one has the memory of a plain layer.

    Args:
        handle: The handle that ``stream(model)`` returned.
        length: Tokens of the row.

    Raises:
        UnsupportedModelError: A layer differs; the message names it and the tokens. The model is left as it was.
    """
    own = [name for _, name in handle.attention]
    first: UnsupportedModelError | None = None
    for reference in (own, ["eager"] * len(own)):  # as for the few tokens: some have no form for what a layer asks
        with borrowed(handle), torch.no_grad():
            forwards = _Forwards(handle, reference)
            forwards.run(length, plain=True)
            try:
                forwards.run(length, plain=False)
            except UnsupportedModelError as error:
                first = first or error
            else:
                return
    assert first is not None
    raise first


class _Forwards:
    """Two forwards of a decoder: the first records inputs and outputs of layers, the second compares with them."""

    def __init__(self, handle: StreamedModel, plainly: list[Any]) -> None:
        self.handle, self.model, self.layers = handle, handle.model, handle.layers
        self.schedule = Schedule(chunk_size=handle.schedule.chunk_size)
        self.configs = [config for config, _ in handle.attention]
        self.plainly = plainly
        self.ours = [config._attn_implementation_internal for config in self.configs]
        self.kinds: set[Any] = set()
        self.noted: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, length: int, plain: bool) -> None:
        step = self._note if plain else self._compare
        for index, layer in enumerate(self.layers):
            layer.forward = LayerStep(index, step)
        decoder: Any = getattr(self.model, self.model.base_model_prefix, self.model)
        ids = ordinary_tokens(self.model, 1, length)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **not_balanced(self.model)}
        if "use_cache" in inspect.signature(type(decoder).forward).parameters:
            given["use_cache"] = False
        with attention_as(self.configs, self.plainly if plain else self.ours), self.handle.routers.silenced():
            decoder(**given)

    def _note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.layers[index]
        out = type(layer).forward(layer, *args, **kwargs)
        kind = kind_of(layer)
        if kind not in self.kinds:
            self.kinds.add(kind)
            z_in = list(bind(layer, args, kwargs).arguments.values())[1]
            self.noted[index] = z_in.clone(), first_of(out).clone()
        return out

    def _compare(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.layers[index]
        forward = StreamedForward(layer, self.schedule, self.handle.own_attention, context=self.handle.context)
        noted = self.noted.get(index)
        arguments = bind(layer, args, kwargs)
        if noted is not None:
            arguments.arguments[list(arguments.arguments)[1]] = noted[0]
        out = forward(*arguments.args[1:], **arguments.kwargs)
        if noted is not None:
            self._check(index, first_of(out), *noted)
        return out

    def _check(self, index: int, z: Tensor, z_in: Tensor, z_ref: Tensor) -> None:
        layer = self.layers[index]
        dtype = compared_dtype(z_ref, layer)
        error, added, whole = ((x.double().norm(dim=-1)) for x in (z - z_ref, z_ref - z_in, z_ref))
        excess = error / (BOUND[dtype] * added + torch.finfo(dtype).eps * whole).clamp_min(1e-30)
        for chunk in self.schedule.chunks(z.shape[-2]):
            found = float(excess[..., chunk].flatten().nan_to_num(torch.inf).median())
            if found > 1:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} is not streamed exactly: of a row of {z.shape[-2]:,}, tokens "
                    f"{chunk.start:,} to {chunk.stop:,} differ in chunks of {self.schedule.chunk_size:,} by "
                    f"{found:.0f} times what rounding explains, so the layer does something else above some length",
                    where=f"layer {index} of {len(self.layers)} ({type(layer).__name__})",
                    mend="choose a chunk_size above that length and check again, or train without streaming",
                )


def _longest(handle: StreamedModel) -> int | None:
    """Return the longest row the model takes: some have one vector a position, or choose keys above a length."""
    config = handle.model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "keep_window_size")]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
