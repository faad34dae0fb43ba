"""Numerical checks of rows: packed rows, rows that share a prefix, and rows longer than a chunk.

Packed rows must not affect each other. A model is told of packed rows only by positions that restart, and its signature
does not show whether it reads these positions. Models that do not read them may add a bias by distance (ALiBi), carry a
state past the end of a row, or number positions themselves. So a few short rows go through the streamed model together.
Then each layer gets the same inputs again, one row at a time, and must add the same to its input:

    fails:  ||z - z_row|| > bound * ||z_row - z_in|| + eps * ||z_row||       (z_row - z_in is what the layer adds)

In a narrow dtype, rounding alone may let a router choose another expert for a few tokens. Then the median over the
first tokens of all rows decides, because a layer that lets rows see each other differs at each of these tokens.

Rows that share a prefix (``branches``) are checked in the same way: a row alone is its trunk and its branch. So are
packed rows with images, with tokens and images of the data.

Some layers compute differently above some number of tokens, and the other checks use fewer tokens than a chunk has. So
one layer of each kind also runs forward on a row longer than the schedule's chunk size c, whole and in chunks. Chunks
of a row have at least c/2 tokens. A layer that changes its computation below c/2 tokens is exact. A layer that changes
it between c/2 and c tokens differs in this check; above c, it differs in a row that is long enough. Within a chunk the
median over its tokens is compared.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.context import CallContext
from streamtune.engine.hf_names import KEPT_WINDOW
from streamtune.engine.inspect_model import hybrid_layer_name
from streamtune.engine.preflight.common import (
    BOUND,
    Arguments,
    bind_arguments,
    checking_mode,
    difference_norm,
    error_bound_dtype,
    hidden_states_in_output,
    layer_kind,
    random_tokens,
    refuse_if_removed,
    replace_layer_forwards,
    streamed_forward,
    trial_batch,
)
from streamtune.engine.routers import without_router_loss
from streamtune.engine.rows import Branches, PackedRows
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import StreamTuneError, UnsupportedModelError
from streamtune.ops.devices import to_float64
from streamtune.schedule import Schedule

ROWS = (9, 2, 13, 3, 11, 10)
"""Lengths of the packed rows in the check: chunks end inside some rows, and several rows lie inside one chunk."""

TREES = ((-1, 11), (0, 5), (0, 2), (2, 4), (2, 3), (0, 9), (-1, 4), (6, 7), (6, 10))
"""Parts of the trees in the check (``Branches.of_nodes``): chunks end in trunks, behind trunks and in branches."""

OPTIONAL = ("position_ids", "attention_mask", "logits_to_keep")
"""Arguments that some models' forwards lack."""


@dataclass(frozen=True)
class _Layout:
    rows: PackedRows
    arguments: Mapping[str, Any]
    """Arguments for the model call; those in ``OPTIONAL`` that the model's forward lacks are left out."""
    places: list[Tensor]
    """Indices in the sequence of each row's tokens."""
    first_tokens: list[int]
    """Index in each row of its first token that other rows precede in the sequence; in half precision only this token
    is compared."""
    fault: str
    fix: str
    alone: Sequence[Mapping[str, Any]] = ()
    """Arguments for the call with each row alone; empty if they are the tokens and positions of the row."""


@dataclass
class _PackedCall:
    index: int
    z_in: Tensor
    z_out: Tensor


def check_packing(handle: StreamedModel) -> None:
    """Raise an error if a packed row changes another: compare each layer on packed rows and on the rows alone.

    The cost is seven forwards of a few random tokens. Random state, training flags and the model are restored, also
    after an error.

    Raises:
        ArgumentError: The streaming was removed.
        UnsupportedModelError: A packed row affects another; the message names the layer and the difference.
    """
    refuse_if_removed(handle)
    _refuse_hybrid_layers(handle, "set packing: false, or sequence_parallel_size: 1")
    positions = torch.cat([torch.arange(length) for length in ROWS])[None]
    rows = PackedRows.from_positions(positions)
    assert rows is not None
    ends = [sum(ROWS[:count]) for count in range(len(ROWS) + 1)]
    places = [torch.arange(start, stop) for start, stop in pairwise(ends)]
    fault = "does not keep packed rows apart: the {what} for a row changes with the rows before it"
    layout = _Layout(rows, {"position_ids": positions}, places, [0] * len(ROWS), fault, "set packing: false")
    with checking_mode(handle), torch.no_grad():
        _Trial(handle, layout).compare_rows()


def check_packed_images(handle: StreamedModel, packed: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error if a packed row with images is computed differently from the row alone.

    In half precision only the last token of each row is compared.

    Args:
        handle: Handle of the streamed model.
        packed: Arguments of the model's call for one packed sequence ``[1, T]``, on the model's device.
        alone: Arguments of the model's call for each row of the sequence, ``[1, T_row]``.

    Raises:
        ArgumentError: The streaming was removed.
        UnsupportedModelError: A row differs; the message names the layer and the difference.
    """
    refuse_if_removed(handle)
    rows = PackedRows.from_positions(packed["position_ids"])
    assert rows is not None, "several rows are packed"
    lengths = [each["input_ids"].shape[1] for each in alone]
    places = list(torch.arange(sum(lengths)).split(lengths))
    fault = "computes packed rows with images differently from the rows alone: the {what} for a row differs"
    last_tokens = [length - 1 for length in lengths]
    layout = _Layout(rows, packed, places, last_tokens, fault, "set packing: false", alone)
    with checking_mode(handle), torch.no_grad():
        _Trial(handle, layout).compare_rows()


def check_branches(handle: StreamedModel) -> None:
    """Raise an error if a row that shares a prefix with others is computed differently from the row alone.

    Raises:
        ArgumentError: The streaming was removed.
        UnsupportedModelError: A row differs; the message names the layer and the difference.
    """
    refuse_if_removed(handle)
    _refuse_hybrid_layers(handle, "set share_prefix: never, or sequence_parallel_size: 1")
    branches = Branches.of_nodes(TREES)
    parts = [part for part in branches.table.last_parts if part.trunk]
    places = [torch.cat([torch.arange(start, stop) for start, stop, _ in part.row_ranges]) for part in parts]
    first_tokens = [part.trunk_length for part in parts]
    fault = "computes rows that share a prefix differently from the rows alone: the {what} for a row differs"
    arguments = branches.arguments(torch.zeros(1, branches.length, dtype=torch.long))
    layout = _Layout(branches, arguments, places, first_tokens, fault, "set share_prefix: never")
    with checking_mode(handle), torch.no_grad():
        _Trial(handle, layout).compare_rows()


def _refuse_hybrid_layers(handle: StreamedModel, fix: str) -> None:
    if handle.sequence_parallel is not None and (kind := hybrid_layer_name(handle.model)) is not None:
        raise UnsupportedModelError(
            f"{kind} has both attention and a recurrent state, so sequence parallelism supports only one row per "
            "sequence",
            fix=fix,
        )


class _Trial:
    def __init__(self, handle: StreamedModel, layout: _Layout) -> None:
        self.handle, self.model, self.layout = handle, handle.model, layout
        self.layers, self.own_attention = handle.layers, handle.own_attention
        self.context = CallContext()
        self.packed_calls: list[_PackedCall] = []
        self.calls = 0
        self.row, self.first_token = torch.arange(0), 0
        self.errors: dict[tuple[int, str], list[float]] = {}

    def compare_rows(self) -> None:
        layout, positions = self.layout, self.layout.rows.positions_BT
        arguments, length = dict(layout.arguments), positions.shape[1]
        if layout.alone:
            arguments["logits_to_keep"] = 1  # logits are not compared: of rows with images, they need much memory
        else:
            ids = trial_batch(self.model)["input_ids"].flatten()
            arguments["input_ids"] = ids.repeat(-(-length // len(ids)))[:length][None]
        device = arguments["input_ids"].device
        packed = self._run_forward(self._record_call, layout.rows, arguments)
        for number, (places, first_token) in enumerate(zip(layout.places, layout.first_tokens, strict=True)):
            self.calls, self.row, self.first_token = 0, places.to(device), first_token
            row = {"input_ids": arguments["input_ids"][:, self.row], "position_ids": positions[:, places]}
            alone = self._run_forward(
                self._compare_call, None, {**layout.alone[number], "logits_to_keep": 1} if layout.alone else row
            )
            if not layout.alone:
                self._record_error(len(self.layers), "logits", packed[:, self.row], alone, torch.zeros_like(alone))
        self._check_errors()

    def _run_forward(self, step: Callable[..., Any], rows: PackedRows | None, arguments: Mapping[str, Any]) -> Tensor:
        replace_layer_forwards(self.handle, step)
        self.context.rows = rows
        parameters = inspect.signature(type(self.model).forward).parameters
        device = arguments["input_ids"].device
        accepted = {  # others: in the context
            name: value.to(device) if name in OPTIONAL and isinstance(value, Tensor) else value
            for name, value in arguments.items()
            if name in parameters or name not in OPTIONAL
        }
        try:
            out = self.model.forward(**{**accepted, "use_cache": False, **without_router_loss(self.model)})
        except (StreamTuneError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self._model_name} fails on packed rows ({type(error).__name__}: {error})", fix=self.layout.fix
            ) from error
        logits: Tensor = out[0] if isinstance(out, tuple) else out.logits
        return logits

    def _run_streamed(self, index: int, bound: Arguments) -> Any:
        forward = streamed_forward(self.layers[index], self.own_attention, self.context)
        return forward(*bound.args[1:], **bound.kwargs)

    def _record_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind_arguments(self.layers[index], args, kwargs)
        out = self._run_streamed(index, bound)
        self.packed_calls.append(
            _PackedCall(index, bound.arguments[_hidden_argument_name(bound)], hidden_states_in_output(out))
        )
        return out

    def _compare_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind_arguments(self.layers[index], args, kwargs)
        call = self.packed_calls[self.calls] if self.calls < len(self.packed_calls) else None
        if call is None or call.index != index:
            raise UnsupportedModelError(
                f"{self._model_name} calls other layers when rows are packed", fix=self.layout.fix
            )
        self.calls += 1
        name, z_in = _hidden_argument_name(bound), call.z_in[:, self.row]
        if self.calls == 1:  # learned positions are added before the first layer
            alone = bound.arguments[name]
            self._record_error(index, "input", z_in, alone, torch.zeros_like(alone))
        bound.arguments[name] = z_in
        out, z_out = self._run_streamed(index, bound), call.z_out[:, self.row]
        self._record_error(index, "output", z_out, hidden_states_in_output(out), z_in)
        return type(out)([z_out, *out[1:]]) if isinstance(out, tuple | list) else z_out

    def _record_error(self, index: int, tensor_name: str, packed: Tensor, alone: Tensor, z_in: Tensor) -> None:
        """Record how far a row's values, packed and alone, differ, as a multiple of what rounding explains.

        In half precision only one token is compared, but for the first layer's input, which no router changes.
        """
        dtype = self._error_bound_dtype(index, alone)
        if torch.finfo(dtype).bits < 32 and tensor_name != "input":
            first = slice(self.first_token, self.first_token + 1)
            packed, alone, z_in = packed[:, first], alone[:, first], z_in[:, first]
        explained = BOUND[dtype] * difference_norm(alone, z_in) + torch.finfo(dtype).eps * difference_norm(alone)
        error = difference_norm(packed, alone)
        self.errors.setdefault((index, tensor_name), []).append(
            error / explained if explained > 0 else float(error > 0)
        )

    def _check_errors(self) -> None:
        for (index, what), errors in self.errors.items():
            behind = errors[1:]  # no row precedes the first
            narrow = torch.finfo(self._error_bound_dtype(index, self.packed_calls[0].z_out)).bits < 32
            error = statistics.median(behind) if narrow else max(behind)
            if not error <= 1:
                layer = index < len(self.layers)
                kind = type(self.layers[index]).__name__ if layer else "the head"
                fault = self.layout.fault.format(what=f"{what} of {kind}")
                raise UnsupportedModelError(
                    f"{self._model_name} {fault}, by {error:.0f} times what rounding explains",
                    where=f"layer {index} of {len(self.layers)} ({kind})"
                    if layer
                    else f"the head of {self._model_name}",
                    fix=self.layout.fix,
                )

    def _error_bound_dtype(self, index: int, z: Tensor) -> torch.dtype:
        return error_bound_dtype(z, self.layers[min(index, len(self.layers) - 1)])

    @property
    def _model_name(self) -> str:
        return type(self.model).__name__


def _hidden_argument_name(bound: Arguments) -> str:
    return list(bound.arguments)[1]


SHORT, BEYOND = 256, 64
"""Chunk size below which a second row is checked, and the number of tokens by which that row is longer than a chunk."""
LONGEST = 4096
"""Largest chunk size that is checked by default, because a layer runs on the whole row for comparison."""


def lengths_to_check(handle: StreamedModel) -> list[int]:
    """Return row lengths just above a chunk for :func:`check_length`.

    Lengths above 4,097 tokens, or above the model's maximum, are left out.
    """
    chunk, longest = handle.schedule.chunk_size, _longest_supported_length(handle)
    lengths = [chunk + 1, *([chunk + BEYOND] if chunk < SHORT else [])]
    return [length for length in lengths if length <= LONGEST + 1 and (longest is None or length <= longest)]


def check_length(handle: StreamedModel, length: int) -> None:
    """Raise an error if a layer's output on a row of ``length`` random tokens changes when it runs in chunks.

    One layer of each kind runs on the whole row and in chunks. The cost is two forwards of the decoder on that row; the
    forward without chunks needs the memory of one layer on the whole row.

    Raises:
        UnsupportedModelError: A layer differs; the message names the layer.
    """
    plain_names = handle.names.plain_names
    first_error: UnsupportedModelError | None = None
    for reference in (
        plain_names,
        ["eager"] * len(plain_names),
    ):  # as in check_exact: an implementation may lack what a layer needs
        with checking_mode(handle), torch.no_grad():
            forwards = _Forwards(handle, reference)
            forwards.run_decoder(length, plain=True)
            try:
                forwards.run_decoder(length, plain=False)
            except UnsupportedModelError as error:
                first_error = first_error or error
            else:
                return
    assert first_error is not None
    raise first_error


class _Forwards:
    def __init__(self, handle: StreamedModel, reference: list[Any]) -> None:
        self.handle, self.model, self.layers = handle, handle.model, handle.layers
        self.schedule = Schedule(chunk_size=handle.schedule.chunk_size)
        self.reference = reference
        self.kinds: set[Any] = set()
        self.recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def run_decoder(self, length: int, plain: bool) -> None:
        step = self._record_plain if plain else self._compare_call
        replace_layer_forwards(self.handle, step)
        decoder: Any = getattr(self.model, self.model.base_model_prefix, self.model)
        ids = random_tokens(self.model, 1, length)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arguments |= without_router_loss(self.model)
        if "use_cache" in inspect.signature(type(decoder).forward).parameters:
            arguments["use_cache"] = False
        names = self.handle.names
        with names.using_names(self.reference if plain else names.engine_names), self.handle.routers.without_losses():
            decoder(**arguments)

    def _record_plain(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.layers[index]
        out = type(layer).forward(layer, *args, **kwargs)
        kind = layer_kind(layer)
        if kind not in self.kinds:
            self.kinds.add(kind)
            z_in = list(bind_arguments(layer, args, kwargs).arguments.values())[1]
            self.recorded[index] = z_in.clone(), hidden_states_in_output(out).clone()
        return out

    def _compare_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.layers[index]
        forward = streamed_forward(layer, self.handle.own_attention, self.handle.context, self.schedule)
        recorded = self.recorded.get(index)
        arguments = bind_arguments(layer, args, kwargs)
        if recorded is not None:
            arguments.arguments[_hidden_argument_name(arguments)] = recorded[0]
        out = forward(*arguments.args[1:], **arguments.kwargs)
        if recorded is not None:
            self._check_output(index, hidden_states_in_output(out), *recorded)
        return out

    def _check_output(self, index: int, z: Tensor, z_in: Tensor, z_ref: Tensor) -> None:
        layer = self.layers[index]
        dtype = error_bound_dtype(z_ref, layer)
        error, added, norm = ((to_float64(x).norm(dim=-1)) for x in (z - z_ref, z_ref - z_in, z_ref))
        excess = error / (BOUND[dtype] * added + torch.finfo(dtype).eps * norm).clamp_min(1e-30)
        for chunk in self.schedule.chunks(z.shape[-2]):
            median = float(excess[..., chunk].flatten().nan_to_num(torch.inf).median())
            if median > 1:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} is not streamed exactly on a row of {z.shape[-2]:,} tokens in chunks "
                    f"of {self.schedule.chunk_size:,}: tokens {chunk.start:,} to {chunk.stop:,} differ by "
                    f"{median:.0f} times what rounding explains. The layer computes differently above some length",
                    where=f"layer {index} of {len(self.layers)} ({type(layer).__name__})",
                    fix="choose a chunk_size above that length and check again, or train without streaming",
                )


def _longest_supported_length(handle: StreamedModel) -> int | None:
    config = handle.model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", KEPT_WINDOW)]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
