"""Schedule of a training step: the sizes of its chunks, and the tensors it stores until the backward.

The recipe's ``engine:`` keys, the planner and the engine read fields, choices and defaults from this module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from streamtune.errors import ArgumentError

__all__ = [
    "DEFAULTS",
    "GIVEN",
    "AutocastDtype",
    "FetchDtype",
    "Fuse",
    "GradDtype",
    "Kept",
    "Order",
    "Schedule",
    "Tier",
    "WeightTier",
    "find_contradictions",
    "normalise_keep_choice",
]


Tier = Literal["device", "host", "disk"]
"""Memory that stores a tensor until the backward: device memory, host memory, or a file."""

Kept = Literal["no", "device", "host"]
"""Memory that keeps a tensor which the backward could recompute. ``no`` keeps nothing: the backward recomputes it."""

Levels = Literal[1, 2]

Fuse = Literal["torch", "none"]
"""Code for norms and rotary embeddings: torch's fused operators where they are faster (``torch``), or the model's own.
"""

GradDtype = Literal["float32", "param"]
"""Dtype in which gradients are summed over chunks: float32, or the tensor's own (``param``)."""

Order = Literal["layer", "chunk"]
"""Outer loop of the backward: over layers (all chunks of a layer, then the preceding layer), or over chunks (all layers
of a chunk, then the preceding chunk).
"""


WeightTier = Literal["device", "host"]
"""Memory that holds weights while their module does not compute."""

AutocastDtype = Literal["bfloat16", "float16"]
"""Dtype in which autocast computes."""

FetchDtype = Literal["param", "bfloat16"]
"""Dtype of a weight's copy on the device: the weight's own (``param``), or bfloat16."""


@dataclass(frozen=True)
class Schedule:
    """Choices of a training step that runs in chunks of the sequence: chunk sizes, and where tensors are stored.

    All schedules give the same gradient up to rounding; they differ in time and memory. Bytes below are per token. C is
    the hidden size, L the number of layers, e the number of bytes of an element.

    Args:
        chunk_size: Maximum number of tokens for which a layer's activations exist at once.
        head_chunk_size: Maximum number of tokens for which logits exist at once.
        offload: Memory that stores the layer inputs until the backward: C e L bytes.
        offload_dir: Directory of the file for ``offload="disk"``. The file has no name, so it disappears with the
            process, also after a crash.
        device_layers: Number of layer inputs that stay on the device if ``offload`` is host or disk. They are the
            inputs that the backward reads first.
        levels: Levels of gradient checkpointing. 1 stores the input of every layer. 2 stores the input of every
            ``segment_size``-th layer. The backward recomputes the other inputs, a segment of layers at a time, with one
            more forward.
        segment_size: Number of layers in a segment with ``levels=2``. None chooses the size for which the fewest
            inputs are stored at once.
        keep_kv: Memory that keeps every layer's keys and values until the backward. ``"no"``: the backward recomputes
            them. ``True`` means ``"device"``.
        keep_attention: Memory that keeps the output and the log-sum-exp of every attention until the backward.
            ``"no"``: the backward recomputes them. They take H D e + 4 H bytes per layer, for H heads of dimension D.
        keep_layers: Number of last layers that keep all activations and recompute nothing, as without gradient
            checkpointing.
        stream_grads: True overwrites the gradient of a layer's output with the gradient of its input, chunk by chunk.
            The gradient is stored where ``offload`` stores layer inputs. Hooks on hidden states between two layers then
            see zeros.
        grad_dtype: Dtype in which the gradients of parameters, keys and values are summed over chunks: ``float32``, or
            ``param`` for the tensor's own.
        fuse: ``torch`` computes norms, rotary embeddings and the gates of MLPs on CUDA with fused operators of torch
            and, if it is installed, Liger. ``none`` runs the model's own code. The results are equal up to rounding.
        order: Outer loop of the backward. ``layer`` processes all chunks of a layer, then the preceding layer, and
            stores the input of every layer. ``chunk`` processes all layers of a chunk, then the preceding chunk. It
            stores the input of the first layer, and the keys and values (or recurrent states) of every layer.
            ``keep_kv`` then says where: ``device`` or ``host``. With ``levels=1`` a chunk's activations of all layers
            exist at once. With ``levels=2`` they exist for ``segment_size`` layers (default: one), at the cost of one
            more forward.
        weights: Memory of the weights of decoder layers, embedding and head while they do not compute. With ``host`` a
            layer's weights are copied to the device before its forward and backward. The gradient is copied to the
            host, where the optimizer steps. Adapters (trained weights beside frozen weights) stay on the device.
        fetch_dtype: Dtype of the copies on the device with ``weights="host"``: ``param`` for the weights' own, or
            ``bfloat16``. With bfloat16 the model computes with rounded weights, while weights, gradient sums and
            optimizer state stay in float32.

    Raises:
        ArgumentError: A value is out of range, or two values contradict each other.

    Example:
        >>> Schedule(chunk_size=4096, offload="host", keep_attention="device").offload
        'host'
    """

    chunk_size: int = 2048
    head_chunk_size: int = 1024
    offload: Tier = "device"
    offload_dir: str | None = None
    device_layers: int = 0
    levels: Levels = 1
    segment_size: int | None = None
    keep_kv: Kept | bool = "no"
    keep_attention: Kept = "no"
    keep_layers: int = 0
    stream_grads: bool = False
    grad_dtype: GradDtype = "float32"
    fuse: Fuse = "torch"
    order: Order = "layer"
    weights: WeightTier = "device"
    fetch_dtype: FetchDtype = "param"

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep_kv", normalise_keep_choice(self.keep_kv))
        if self.order == "chunk" and self.keep_kv == "no":
            object.__setattr__(self, "keep_kv", "device")
        for name in ("chunk_size", "head_chunk_size", "segment_size"):
            value = getattr(self, name)
            if (value is not None or name != "segment_size") and not _is_whole_number(value, least=1):
                raise ArgumentError(f"{name} must be a number of {_field_unit(name)}, at least 1; found {value!r}")
        for name in ("device_layers", "keep_layers"):
            if not _is_whole_number(getattr(self, name), least=0):
                raise ArgumentError(f"{name} must be a number of layers, at least 0; found {getattr(self, name)!r}")
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                known = ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
                raise ArgumentError(f"{name} must be {known}; found {getattr(self, name)!r}")
        for field, what, (other, value) in find_contradictions(vars(self), _show_in_python):
            alternative = "" if field == "offload" else f", or leave {field} out"
            raise ArgumentError(what, fix=f"set {other} to {value}{alternative}")

    @classmethod
    def plan(cls, model: Any, *, max_length: int, device_memory: int | str | None = None, **more: Any) -> Schedule:
        """Return the fastest schedule with which a training step of ``model`` fits the available memory.

        Args:
            model: Causal language model of ``transformers`` on which ``stream`` has not been called, with its adapters
                if it has any. A model on ``meta`` is planned for an accelerator with ``device_memory``.
            max_length: Number of tokens of the longest row (training example).
            device_memory: Memory of the device in bytes, or a size such as ``"80GiB"``. None: the memory that is free
                now, plus the memory of the model's weights.
            more: ``host_memory``; ``batch_size``; ``accumulated``, True if gradients of earlier micro-batches exist;
                ``optimizer``, a function of the model (default: AdamW); ``autocast``; ``margin``, the fraction of
                memory left free. Any field of a schedule is also accepted; the planner then does not change this field.

        Raises:
            ArgumentError: No schedule fits. The error names the part that takes the most memory, and the longest row
                that fits.

        Example:
            >>> schedule = Schedule.plan(model, max_length=131072, device_memory="80GiB")
            >>> handle = streamtune.stream(model, schedule=schedule)
        """
        # Imported by name: the planner imports the engine, so the engine cannot import the planner.
        schedule: Schedule = import_module("streamtune.plan.planner").plan_schedule(
            model, max_length=max_length, device_memory=device_memory, **more
        )
        return schedule

    @property
    def stores_on_host(self) -> bool:
        """True if layer inputs, keys and values, or attention outputs are stored in host memory."""
        return "host" in (self.offload, self.keep_kv, self.keep_attention)

    def describe(self, layers: int | None = None) -> str:
        """Return a one-line description of the chunk sizes and of the choices that differ from the default.

        ``layers`` is the model's number of layers. If the schedule keeps the activations of all layers, the description
        ends after saying so.
        """
        words = [f"chunks of {self.chunk_size:,} tokens, head {self.head_chunk_size:,}"]
        if layers is not None and self.keep_layers >= layers:
            return "; ".join([*words, "no layer computed again: all kept whole"])
        if self.order == "chunk":
            return "; ".join([*words, *self._describe_chunk_order()])
        if self.offload != "device":
            rest = f", the last {self.device_layers} on the device" if self.device_layers else ""
            words.append(f"layer inputs on {self.offload}{rest}")
        if self.levels == 2:
            size = f" of {self.segment_size} layers" if self.segment_size else ""
            words.append(f"two levels, segments{size} computed again")
        for name, kept in (("keys and values", self.keep_kv), ("attention outputs", self.keep_attention)):
            if kept != "no":
                words.append(f"{name} kept" + (" on host" if kept == "host" else ""))
        if self.keep_layers:
            last = "layer" if self.keep_layers == 1 else f"{self.keep_layers} layers"
            words.append(f"the last {last} kept whole")
        if self.stream_grads:
            words.append("gradients of hidden states streamed with them")
        if self.weights == "host":
            narrow = ", fetched in bfloat16" if self.fetch_dtype == "bfloat16" else ""
            words.append(f"weights on host{narrow}")
        return "; ".join(words)

    def _describe_chunk_order(self) -> Iterator[str]:
        away = " on host" if self.keep_kv == "host" else ""
        yield f"all layers of a chunk before the next chunk, keys and values{away} in place of layer inputs"
        if self.levels == 2:
            size = self.segment_size or 1
            yield f"{size} layer{'s' if size > 1 else ''} of a chunk at a time, the others computed again"
        if self.offload != "device":
            yield f"the first layer's input on {self.offload}"
        if self.keep_attention != "no":
            yield "attention outputs kept" + (" on host" if self.keep_attention == "host" else "")
        if self.keep_layers:
            yield f"the last {'layer' if self.keep_layers == 1 else f'{self.keep_layers} layers'} kept whole"
        if self.stream_grads:
            yield "the gradient of the last layer's output streamed"

    def chunks(self, length: int, cuts: Sequence[int] | None = None) -> list[slice]:
        """Cut a sequence of ``length`` tokens into the smallest number of chunks.

        All chunks have ``chunk_size`` tokens, except the last two, which share the rest. The last two differ by at most
        one token. If there are two or more chunks, each has more than half of ``chunk_size``. No chunk is a single
        token unless the sequence is: some layers would then run their decoding path, which writes states in place.

        Args:
            length: Number of tokens of the sequence.
            cuts: Sorted positions at which a chunk may end (``LazyMask.allowed_cuts``), ``length`` among them. None
                allows any position. A chunk ends at the allowed position nearest to its ideal end. It exceeds
                ``chunk_size`` only if there is no allowed position within ``chunk_size`` tokens.
        """
        if cuts is None:
            size = max(2, self.chunk_size)
            count = min(-(-length // size), length // 2)
            bounds = [size * index for index in range(count - 1)] or [0]
            if count > 1:
                bounds.append(length - (length - bounds[-1]) // 2)
            return [slice(*each) for each in pairwise([*bounds, length])]
        chunks: list[slice] = []
        start = 0
        while start < length or not chunks:
            stop = self._chunk_end(start, length, cuts)
            chunks.append(slice(start, stop))
            start = stop
        return chunks

    def _chunk_end(self, start: int, length: int, cuts: Sequence[int]) -> int:
        count = -(-(length - start) // self.chunk_size)
        if count <= 1:
            return length
        ideal = start - (-(length - start) // count)
        within = cuts[bisect_right(cuts, start) : bisect_right(cuts, start + self.chunk_size)]
        if within:
            return min(within, key=lambda cut: (abs(cut - ideal), cut))
        return cuts[bisect_right(cuts, start)]


CHOICES: dict[str, tuple[object, ...]] = {
    "offload": get_args(Tier),
    "levels": get_args(Levels),
    "keep_kv": get_args(Kept),
    "keep_attention": get_args(Kept),
    "stream_grads": (False, True),
    "grad_dtype": get_args(GradDtype),
    "fuse": get_args(Fuse),
    "order": get_args(Order),
    "weights": get_args(WeightTier),
    "fetch_dtype": get_args(FetchDtype),
}

GIVEN = ("grad_dtype", "fuse", "weights", "fetch_dtype")
"""Fields that the planner never changes: they affect how gradients are rounded, or where the optimizer runs."""

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Schedule)}
"""Default value of each field of a schedule, by field name."""


def normalise_keep_choice(choice: Kept | bool) -> Kept:
    """Return ``choice`` as a word: ``True`` is ``device``, ``False`` is ``no``."""
    return ("device" if choice else "no") if isinstance(choice, bool) else choice


class Contradiction(NamedTuple):
    """Two fields of a schedule whose values exclude each other: one field, the error message, and a change that
    resolves it.
    """

    field: str
    what: str
    instead: tuple[str, str]


def find_contradictions(choices: Mapping[str, Any], quote: Callable[..., str]) -> Iterator[Contradiction]:
    """Yield a contradiction for each pair of fields whose values exclude each other.

    Args:
        choices: Value of each field; None if the value is still open.
        quote: Function that returns a field, or a field with its value, as the user's recipe or program writes it.
    """
    offload, levels = choices["offload"], choices["levels"]
    if choices["device_layers"] and offload == "device":
        what = f"{quote('device_layers')} needs offloaded layer inputs, and {quote('offload')} is device"
        yield Contradiction("device_layers", what, ("offload", "host"))
    if choices["fetch_dtype"] == "bfloat16" and choices["weights"] not in ("host", None):
        what = f"{quote('fetch_dtype')} needs weights on the host, and {quote('weights')} is device"
        yield Contradiction("fetch_dtype", what, ("weights", "host"))
    if choices["weights"] == "host":
        yield from _host_weights_contradictions(choices, quote)
    if choices["order"] == "chunk":
        yield from _chunk_order_contradictions(choices, quote)
    if choices["segment_size"] is not None and levels == 1:
        what = f"{quote('segment_size')} needs two levels, and {quote('levels')} is 1"
        yield Contradiction("segment_size", what, ("levels", "2"))
    if offload == "disk" and choices["offload_dir"] is None:
        what = f"{quote('offload', 'disk')} needs a directory"
        yield Contradiction(
            "offload", what, ("offload_dir", "a directory on a fast local disk with space for the layer inputs")
        )


def _chunk_order_contradictions(choices: Mapping[str, Any], quote: Callable[..., str]) -> Iterator[Contradiction]:
    order = quote("order", "chunk")
    if choices["device_layers"]:
        what = f"{quote('device_layers')} needs several stored layer inputs, and {order} stores only one"
        yield Contradiction("device_layers", what, ("order", "layer"))
    if choices["keep_kv"] is not None and normalise_keep_choice(choices["keep_kv"]) == "no":
        what = f"{order} stores keys and values in place of layer inputs, and {quote('keep_kv')} forbids it"
        yield Contradiction("keep_kv", what, ("keep_kv", "device"))


def _host_weights_contradictions(choices: Mapping[str, Any], quote: Callable[..., str]) -> Iterator[Contradiction]:
    away = quote("weights", "host")
    if choices["order"] == "chunk":
        what = f"{quote('order', 'chunk')} reads the weights of all layers for every chunk, and {away} would copy them "
        yield Contradiction("order", what + "each time", ("order", "layer"))
    if choices["keep_layers"]:
        what = (
            f"{quote('keep_layers')} keeps the weights of layers on the device until the backward, and {away} does not"
        )
        yield Contradiction("keep_layers", what, ("keep_layers", "0"))


def _show_in_python(field: str, value: str | None = None) -> str:
    return field if value is None else f"{field}={value!r}"


def _is_whole_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _field_unit(name: str) -> str:
    return "layers" if name == "segment_size" else "tokens"
