"""Numerical preflights with rows: packed ones, rows that share their beginning, rows longer than a chunk.

Packed rows must not affect each other, and shared beginnings must be exact.

A model is given packed rows as positions that restart, and in no other way. Its signature does not show if it follows
them: a model that adds a bias by distance (ALiBi), carries a state past a row's end or numbers positions itself takes
the same arguments and lets a row see the row before it. So a few short rows go through the streamed model together, and
each layer is then given the very same inputs again, one row at a time. What it adds to its input must be the same.

    fails:  ||z - z_row|| > bound * ||z_row - z_in|| + eps * ||z_row||       (z_row - z_in is what the layer adds)

In a narrow dtype a router may choose another expert because of rounding alone, for a token here and there. A layer that
lets rows see each other differs at the first token of every row: there the median over the rows decides.

Rows that share their beginning (``branches``) are checked in the same way: a row alone is its trunk and its branch.

Some layers compute in another way above a number of tokens. The other preflights use a few tokens, fewer than every
chunk has. Here one layer of each kind runs forward on a row that is longer than the schedule's chunk c, plainly and in
its chunks, from the same hidden states. The chunks of a row are about equally long: c/2 at least, which a row of c + 1
tokens has. A layer that changes its computation below c/2 is exact. If it changes between c/2 and c, it differs there;
if above c, it differs in a row as long as that.

Within a chunk the median over its tokens is compared: a router that sends a token elsewhere by rounding does not count.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.context import CallContext
from streamtune.engine.hf_names import KEPT_WINDOW
from streamtune.engine.inspect_model import both_at_once
from streamtune.engine.preflight.common import (
    BOUND,
    Arguments,
    bind,
    borrowed,
    compared_dtype,
    first_of,
    kind_of,
    norm_of,
    ordinary_tokens,
    refuse_removed,
    step_layers,
    streamed_forward,
    trial_batch,
)
from streamtune.engine.routers import not_balanced
from streamtune.engine.rows import Branches, PackedRows
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import StreamTuneError, UnsupportedModelError
from streamtune.schedule import Schedule

ROWS = (9, 2, 13, 3, 11, 10)
"""Tokens of the trial's rows: chunks end inside some, and several lie inside one chunk."""

TREES = ((-1, 11), (0, 5), (0, 2), (2, 4), (2, 3), (0, 9), (-1, 4), (6, 7), (6, 10))
"""Parts of the trial's trees (``Branches.of_nodes``): chunks end in trunks, behind them and in branches."""


@dataclass(frozen=True)
class _Layout:
    """The layout of a trial's rows in one sequence, and the error text for a model that mixes them up."""

    rows: PackedRows
    arguments: dict[str, Tensor]
    """Arguments of the model's call, if it takes them."""
    places: list[Tensor]
    """Places of each row alone."""
    begins: list[int]
    """First token of each row that others lie before, counted in the row."""
    fault: str
    fix: str


@dataclass
class _Seen:
    """One call of a layer in the packed forward: its input and output ``[1, T, C]``."""

    index: int
    z_in: Tensor
    z_out: Tensor


def check_packing(handle: StreamedModel) -> None:
    """Compare packed rows with the same rows alone, layer by layer, on a few random tokens; costs seven short forwards.

    Random state, training flags and the model are left as they were, also when it fails.

    Raises:
        ArgumentError: The handle was removed.
        UnsupportedModelError: The model does not keep packed rows apart; the message names the layer and the
            difference.
    """
    refuse_removed(handle)
    _refuse_both(handle, "set packing: false, or sequence_parallel_size: 1")
    positions = torch.cat([torch.arange(length) for length in ROWS])[None]
    rows = PackedRows.of(positions)
    assert rows is not None
    ends = [sum(ROWS[:count]) for count in range(len(ROWS) + 1)]
    places = [torch.arange(start, stop) for start, stop in pairwise(ends)]
    fault = "keep packed rows apart: the {what} for a row changes with the rows before it"
    layout = _Layout(rows, {"position_ids": positions}, places, [0] * len(ROWS), fault, "set packing: false")
    with borrowed(handle), torch.no_grad():
        _Trial(handle, layout).run()


def check_branches(handle: StreamedModel) -> None:
    """Compare rows that share their beginning with the same rows alone, layer by layer, as :func:`check_packing` does.

    Raises:
        ArgumentError: The handle was removed.
        UnsupportedModelError: The model does not compute a branch as it would compute its row alone.
    """
    refuse_removed(handle)
    _refuse_both(handle, "set share_prefix: never, or sequence_parallel_size: 1")
    branches = Branches.of_nodes(TREES)
    parts = [part for part in branches.table.leaves if part.trunk]
    places = [torch.cat([torch.arange(start, stop) for start, stop, _ in part.runs]) for part in parts]
    begins = [part.trunk_length for part in parts]
    fault = "compute rows that share their beginning as it does alone: the {what} for a row is another"
    arguments = branches.arguments(torch.zeros(1, branches.length, dtype=torch.long))
    layout = _Layout(branches, arguments, places, begins, fault, "set share_prefix: never")
    with borrowed(handle), torch.no_grad():
        _Trial(handle, layout).run()


def _refuse_both(handle: StreamedModel, fix: str) -> None:
    """Refuse layers that keep keys and values and a state too, where ranks would exchange those of rows."""
    if handle.sequence_parallel is not None and (kind := both_at_once(handle.model)) is not None:
        raise UnsupportedModelError(
            f"{kind} both attends and carries a state, and would meet several rows in a sequence that ranks share",
            fix=fix,
        )


class _Trial:
    def __init__(self, handle: StreamedModel, layout: _Layout) -> None:
        self.handle, self.model, self.layout = handle, handle.model, layout
        self.layers, self.own = handle.layers, handle.own_attention
        self.context = CallContext()
        length = layout.rows.positions_BT.shape[1]
        ids = trial_batch(self.model)["input_ids"].flatten()
        self.ids = ids.repeat(-(-length // len(ids)))[:length][None]
        self.seen: list[_Seen] = []
        self.calls = 0
        self.row, self.begin = torch.arange(0), 0
        self.errors: dict[tuple[int, str], list[float]] = {}

    def run(self) -> None:
        """Raise if a row depends on another."""
        layout, device = self.layout, self.ids.device
        positions = layout.rows.positions_BT
        arguments = {name: value.to(device) for name, value in layout.arguments.items()}
        packed = self._forward(self._record, self.ids, layout.rows, arguments)
        for places, begin in zip(layout.places, layout.begins, strict=True):
            self.calls, self.row, self.begin = 0, places.to(device), begin
            own = {"position_ids": positions[:, places].to(device)}
            alone = self._forward(self._compare, self.ids[:, self.row], None, own)
            self._note(len(self.layers), "logits", packed[:, self.row], alone, torch.zeros_like(alone))
        self._check_errors()

    def _forward(
        self, step: Callable[..., Any], ids: Tensor, rows: PackedRows | None, arguments: dict[str, Tensor]
    ) -> Tensor:
        step_layers(self.handle, step)
        self.context.rows = rows
        taken = inspect.signature(type(self.model).forward).parameters
        given = {name: value for name, value in arguments.items() if name in taken}  # the rest is in the context
        try:
            more = {"use_cache": False, **not_balanced(self.model)}
            out = self.model.forward(input_ids=ids, **given, **more)
        except (StreamTuneError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self._name} does not take packed rows ({type(error).__name__}: {error})", fix=self.layout.fix
            ) from error
        logits: Tensor = out[0] if isinstance(out, tuple) else out.logits
        return logits

    def _streamed(self, index: int, bound: Arguments) -> Any:
        forward = streamed_forward(self.layers[index], self.own, self.context)
        return forward(*bound.args[1:], **bound.kwargs)

    def _record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind(self.layers[index], args, kwargs)
        out = self._streamed(index, bound)
        self.seen.append(_Seen(index, bound.arguments[_hidden_name(bound)], first_of(out)))
        return out

    def _compare(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind(self.layers[index], args, kwargs)
        call = self.seen[self.calls] if self.calls < len(self.seen) else None
        if call is None or call.index != index:
            raise UnsupportedModelError(f"{self._name} calls other layers when rows are packed", fix=self.layout.fix)
        self.calls += 1
        name, z_in = _hidden_name(bound), call.z_in[:, self.row]
        if self.calls == 1:  # positions that are learnt are added here, before any layer
            given = bound.arguments[name]
            self._note(index, "input", z_in, given, torch.zeros_like(given))
        bound.arguments[name] = z_in
        out, z_out = self._streamed(index, bound), call.z_out[:, self.row]
        self._note(index, "output", z_out, first_of(out), z_in)
        return type(out)([z_out, *out[1:]]) if isinstance(out, tuple | list) else z_out

    def _note(self, index: int, what: str, packed: Tensor, alone: Tensor, z_in: Tensor) -> None:
        """Record a row's error relative to what rounding explains; in a narrow dtype that of its first token."""
        dtype = self._dtype(index, alone)
        if torch.finfo(dtype).bits < 32:
            first = slice(self.begin, self.begin + 1)
            packed, alone, z_in = packed[:, first], alone[:, first], z_in[:, first]
        explained = BOUND[dtype] * norm_of(alone, z_in) + torch.finfo(dtype).eps * norm_of(alone)
        error = norm_of(packed, alone)
        self.errors.setdefault((index, what), []).append(error / explained if explained > 0 else float(error > 0))

    def _check_errors(self) -> None:
        for (index, what), errors in self.errors.items():
            behind = errors[1:]  # the first row has none before it
            narrow = torch.finfo(self._dtype(index, self.seen[0].z_out)).bits < 32
            error = statistics.median(behind) if narrow else max(behind)
            if not error <= 1:
                layer = index < len(self.layers)
                kind = type(self.layers[index]).__name__ if layer else "the head"
                fault = self.layout.fault.format(what=f"{what} of {kind}")
                raise UnsupportedModelError(
                    f"{self._name} does not {fault}, {error:.0f} times as much as rounding explains",
                    where=f"layer {index} of {len(self.layers)} ({kind})" if layer else f"the head of {self._name}",
                    fix=self.layout.fix,
                )

    def _dtype(self, index: int, z: Tensor) -> torch.dtype:
        """Return the dtype that gives the bound of a layer's tensor; the head's is that of the last layer."""
        return compared_dtype(z, self.layers[min(index, len(self.layers) - 1)])

    @property
    def _name(self) -> str:
        return type(self.model).__name__


def _hidden_name(bound: Arguments) -> str:
    return list(bound.arguments)[1]


SHORT, BEYOND = 256, 64
"""Below this chunk size a second row has so many tokens more than a chunk."""
LONGEST = 4096
"""Longest chunk that is tried unasked: the plain layer runs on the whole row."""


def lengths_to_check(handle: StreamedModel) -> list[int]:
    """Return lengths of rows a little longer than a chunk, unless they cost too much or exceed the model's rows."""
    chunk, longest = handle.schedule.chunk_size, _longest(handle)
    lengths = [chunk + 1, *([chunk + BEYOND] if chunk < SHORT else [])]
    return [length for length in lengths if length <= LONGEST + 1 and (longest is None or length <= longest)]


def check_length(handle: StreamedModel, length: int) -> None:
    """Compare one layer of each kind, whole and in the chunks of the schedule, on a random row of ``length`` tokens.

    Costs two forwards of the decoder on that row; the whole one has the memory of a plain layer.
    """
    own = handle.names.before
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
        self.plainly = plainly
        self.kinds: set[Any] = set()
        self.noted: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, length: int, plain: bool) -> None:
        step = self._note if plain else self._compare
        step_layers(self.handle, step)
        decoder: Any = getattr(self.model, self.model.base_model_prefix, self.model)
        ids = ordinary_tokens(self.model, 1, length)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **not_balanced(self.model)}
        if "use_cache" in inspect.signature(type(decoder).forward).parameters:
            given["use_cache"] = False
        names = self.handle.names
        with names.using(self.plainly if plain else names.ours), self.handle.routers.silenced():
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
        forward = streamed_forward(layer, self.handle.own_attention, self.handle.context, self.schedule)
        noted = self.noted.get(index)
        arguments = bind(layer, args, kwargs)
        if noted is not None:
            arguments.arguments[_hidden_name(arguments)] = noted[0]
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
                    fix="choose a chunk_size above that length and check again, or train without streaming",
                )


def _longest(handle: StreamedModel) -> int | None:
    """Return the longest row the model takes: some have one vector a position, or choose keys above a length."""
    config = handle.model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", KEPT_WINDOW)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
