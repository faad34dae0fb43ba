"""A numerical preflight: is this very model, with these very weights, streamed exactly? Asked before it is trained.

A short random batch goes through the model twice. The plain walk records every decoder layer's call; the streamed walk
is handed the recorded input of each layer, so that what it gives is compared layer by layer and the first layer that
differs can be named. Then one layer of each kind is differentiated both ways. Nothing is learned from a comparison of
rounding errors: where a difference could be rounding (or a router that chose another expert because of it), a copy of
that one layer in a wider dtype decides.

    differs:  ||z - z_ref|| > bound * ||z_ref - z_in|| + eps * ||z_ref||        (z_ref - z_in is what the layer adds)
    or        ||g - g_ref|| > bound * max(||g_ref||, 1e-2 ||G_ref||)            (for z_in, arguments and parameters)
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from streamtune.engine.borrow import aliased, attention_as, borrowed
from streamtune.engine.call import LayerCall
from streamtune.engine.difference import BOUND, compared_dtype, distance, norm_of, ratio, widened
from streamtune.engine.head import StreamedHead
from streamtune.engine.layer import StreamedForward, strange_leaves
from streamtune.engine.recorded import Arguments, RecordedCall, bind, hand_on, inputs_of, outputs_of, replaced
from streamtune.engine.schedule import Schedule
from streamtune.engine.tiles import OwnAttention
from streamtune.errors import ArgumentError, StreamTuneError, UnsupportedModelError

if TYPE_CHECKING:
    from streamtune.engine.stream import StreamHandle

__all__ = ["check_exact"]

ROWS, LENGTH, PADDED = 2, 24, 5
SCHEDULE = Schedule(chunk_size=7, head_chunk_size=11)
UNSETTLED = 0.3
"""The same where no wider copy of a layer can be made (a quantised one): what a few flipped routes explain."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
MEND = (
    "its layers let tokens meet outside the attention's key/value cache; train this model without streaming, or choose "
    "one whose layers only attend"
)


class _DiffersError(UnsupportedModelError):
    """Plain and streamed do not agree."""


class _PlainError(UnsupportedModelError):
    """The unstreamed model does not run on the preflight's batch."""


def check_exact(handle: StreamHandle) -> None:
    """Compare the streamed model with itself unstreamed on a few random tokens, forward and backward.

    Costs about six forwards of 48 tokens, and the gradient of one layer of each kind at a time. Gradients, random
    state, training flags and configuration are left as they were, also when it fails. The reference is the attention
    the model came with; where that has no form for what the layer asks (softcap, sinks), the model's eager one.

    Args:
        handle: What ``stream(model)`` returned.

    Raises:
        ArgumentError: The handle was removed, or the model has no weights (it is on the meta device).
        UnsupportedModelError: The streamed model is not the model; says which layer, and by how much.
    """
    if not handle.layers:
        raise ArgumentError("the model is not streamed any more", mend="check before .remove()")
    if any(p.device.type == "meta" for p in handle.model.parameters()):
        raise ArgumentError("a model on the meta device has no weights to check")
    own = [implementation for _, implementation in handle._attention]
    first: UnsupportedModelError | None = None
    for reference in (own, ["eager"] * len(own)):
        try:
            with borrowed(handle):
                _Preflight(handle, reference).run()
            return
        except (_DiffersError, _PlainError) as error:
            first = first or error
            if set(own) == {"eager"}:
                break
    assert first is not None
    raise first


class _Preflight:
    """Both walks of one model and their comparison, with the plain one under the given attention implementations."""

    def __init__(self, handle: StreamHandle, reference: list[Any]) -> None:
        self.model, self.layers = handle.model, handle.layers
        self.configs = [config for config, _ in handle._attention]
        self.own = handle.own_attention
        self.ours = [config._attn_implementation_internal for config in self.configs]
        self.reference = reference
        self.head = StreamedHead(handle.model, SCHEDULE) if handle._head is not None else None
        self.inputs: dict[str, Any] = {}
        self.calls: list[RecordedCall] = []
        self.streamed: list[Arguments] = []
        self.last: Tensor | None = None
        self.at: int | None = None
        """The layer that runs, None outside of them."""

    def run(self) -> None:
        """Raise at the first difference."""
        try:
            self.inputs = _batch(self.model)
            self.valid = self.inputs["attention_mask"].bool()
            loss_ref, grad_ref = self._walk(self._record)
        except (StreamTuneError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise _PlainError(
                f"{self._name} cannot be checked: unstreamed, its loss cannot be computed from {ROWS} x {LENGTH} "
                "tokens of text alone",
                where=f"{type(error).__name__}: {error}",
                mend="see why the plain model fails; one that needs more than text (images) is not streamed",
            ) from error
        if not self.calls:
            raise UnsupportedModelError(f"{self._name} never calls its decoder layers, so there is nothing to stream")
        try:
            loss, grad = self._walk(self._compare)
            if len(self.streamed) != len(self.calls):
                raise _DiffersError(f"{self._name} calls its layers {len(self.streamed)} times, not {len(self.calls)}")
            self._same_head(loss, loss_ref, grad, grad_ref)
            for call, streamed in self._kinds():
                self._same_gradients(call, streamed)
        except torch.OutOfMemoryError:
            raise
        except UnsupportedModelError as error:
            if self._name not in error.what:
                error.what, error.where = f"{self._name}: {error.what}", self._where(self.at)
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self._name} does not run in chunks ({type(error).__name__}: {error})",
                where=self._where(self.at),
                mend=MEND,
            ) from error

    def _walk(self, step: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        """One forward with ``step(index, args, kwargs)`` in each layer's place: the loss and its last z_out's gradient.

        The gradient of the head's own weight is not asked for: it is as large as the head.
        """
        streamed = step == self._compare
        self.last = None
        with ExitStack() as stack:
            stack.enter_context(attention_as(self.configs, self.ours if streamed else self.reference))
            for index, layer in enumerate(self.layers):
                layer.forward = _Step(index, step)
            if streamed and self.head is not None:
                self.head.open()
                stack.callback(self.head.close)
            loss = self.model.forward(**self.inputs).loss
        if self.last is None or not loss.requires_grad:
            return loss.detach(), None
        (grad,) = torch.autograd.grad(loss, [self.last], allow_unused=True)
        return loss.detach(), grad

    def _record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.at, layer = index, self.layers[index]
        arguments = bind(layer, args, kwargs)
        leaves = {name: _leaf(x) for name, x in inputs_of(arguments).items()}
        used = replaced(arguments, leaves)
        out, outputs = outputs_of(type(layer).forward, used)
        for z in outputs:
            self._own_graph(index, z, [*leaves.values(), *layer.parameters()])
        inputs = {name: leaf.detach() for name, leaf in leaves.items()}
        call = RecordedCall(
            index,
            replaced(arguments, inputs),
            inputs,
            [name for name, leaf in leaves.items() if leaf.requires_grad],
            [z.detach() for z in outputs],
        )
        self.calls.append(call)
        self.at = None
        return self._handed_on(arguments, used, out, call)

    def _compare(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.calls[len(self.streamed)] if len(self.streamed) < len(self.calls) else None
        if call is None or call.index != index:
            raise _DiffersError(f"{self._name} calls its layers in another order when it is streamed")
        self.at, layer = index, self.layers[index]
        LayerCall.bind(layer, args, kwargs, OwnAttention(self.own) if self.own else None)  # refuses by name
        arguments = bind(layer, args, kwargs)
        bound_input = BOUND[compared_dtype(call.z_in)]
        for name, x in inputs_of(arguments).items():
            reference = call.inputs.get(name)
            if reference is None:
                continue
            error = distance(x, reference, self._valid(reference) if x.shape == call.z_in.shape else None)
            if not error <= bound_input:
                raise self._differs(index, "input", error, bound_input)
        used = replaced(arguments, {name: _leaf(call.inputs[name]) for name in call.wanted})
        out, outputs = outputs_of(_without_self(StreamedForward(layer, SCHEDULE, self.own)), used)
        self.streamed.append(replaced(arguments, {}))  # a shared dictionary as it was before the call
        if len(outputs) != len(call.outputs):
            raise _DiffersError(f"{self._name} returns {len(outputs)} tensors from a streamed layer")
        error, bound_forward = self._output_error(outputs, call), BOUND[compared_dtype(call.outputs[0])]
        if not error <= bound_forward:
            self._settle(call, self.streamed[-1], "output", error, bound_forward)
        self.at = None
        return self._handed_on(arguments, used, out, call)

    def _handed_on(self, arguments: Arguments, used: Arguments, out: Any, call: RecordedCall) -> Any:
        result = hand_on(arguments, used, out, call)
        self.last = _first(result)
        return result

    def _output_error(self, outputs: list[Tensor], call: RecordedCall) -> float:
        """The largest relative difference of an output."""
        first = self._added(outputs[0], call.outputs[0], call.z_in)
        others = zip(outputs[1:], call.outputs[1:], strict=True)
        return max([first, *(distance(z, z_ref, self._valid(z_ref)) for z, z_ref in others)])

    def _own_graph(self, index: int, z_out: Tensor, known: list[Tensor]) -> None:
        """Refuse a layer whose output hangs on something that is neither its argument nor its parameter.

        Under streaming the layers before it run without a graph, so a tensor they left somewhere has lost its gradient.
        """
        for leaf in strange_leaves(z_out, known):
            raise UnsupportedModelError(
                f"{self._name} is not streamed exactly: {type(self.layers[index]).__name__} uses a tensor with a "
                f"gradient (shape {tuple(leaf.shape)} at its root) that is neither its argument nor its "
                "parameter, such as keys and values shared between layers",
                where=self._where(index),
                mend="train this model without streaming",
            )

    def _same_head(self, loss: Tensor, loss_ref: Tensor, grad: Tensor | None, grad_ref: Tensor | None) -> None:
        bound = BOUND[compared_dtype(self.calls[-1].outputs[0])]
        pairs = [("loss", loss, loss_ref)]
        if grad_ref is not None:
            given = torch.zeros_like(grad_ref) if grad is None else grad
            pairs.append(("gradient of the final hidden states", given, grad_ref))
        for what, value, reference in pairs:
            if not distance(value, reference, None) <= bound:
                raise _DiffersError(
                    f"{self._name} is not streamed exactly: its head's {what} differs by "
                    f"{distance(value, reference, None):.1e} (rounding explains {bound:.0e})",
                    where=f"the head of {self._name}",
                    mend="use stream(model, head=False): layers are streamed, head and loss are the model's own",
                )

    def _kinds(self) -> Iterator[tuple[RecordedCall, Arguments]]:
        """One differentiated call of each kind of layer."""
        seen = set()
        for call, streamed in zip(self.calls, self.streamed, strict=True):
            kind = _structure(self.layers[call.index])
            if kind not in seen and call.wanted:
                seen.add(kind)
                yield call, streamed

    def _same_gradients(self, call: RecordedCall, streamed: Arguments) -> None:
        self.at, bound = call.index, BOUND[compared_dtype(call.z_in)]
        what, error = self._gradient_error(self.layers[call.index], call, streamed)
        if not error <= bound:
            self._settle(call, streamed, what, error, bound)

    def _gradient_error(self, layer: nn.Module, call: RecordedCall, streamed: Arguments) -> tuple[str, float]:
        """The largest relative difference of a gradient of the layer, and whose it is."""
        generator = torch.Generator().manual_seed(call.index)
        grad_outputs = []
        for z in call.outputs:
            grad = torch.randn(z.shape, generator=generator).to(z)
            mask = self._valid(z)
            grad_outputs.append(grad * mask.reshape(mask.shape + (1,) * (z.dim() - 2)))
        with torch.enable_grad(), aliased(layer) as parameters:
            grads = []
            for plain in (True, False):
                leaves = {name: call.inputs[name].detach().clone().requires_grad_() for name in call.wanted}
                arguments = replaced(call.arguments if plain else streamed, leaves, layer)
                with attention_as(self.configs, self.reference if plain else self.ours):
                    forward = (
                        type(layer).forward if plain else _without_self(StreamedForward(layer, SCHEDULE, self.own))
                    )
                    _, outputs = outputs_of(forward, arguments)
                    live = [n for n, z in enumerate(outputs) if z.requires_grad]
                    inputs = [*leaves.values(), *parameters.values()]
                    of, incoming = [outputs[n] for n in live], [grad_outputs[n] for n in live]
                    grads.append(torch.autograd.grad(of, inputs, incoming, allow_unused=True))
        norms = [norm_of(want) for want in grads[0]]
        floor = 1e-2 * math.hypot(*norms)
        worst = ("", 0.0)
        for name, want, got, norm in zip([*call.wanted, *parameters], *grads, norms, strict=True):
            error = ratio(norm_of(got, want), max(norm, floor))
            if error > worst[1]:
                worst = (f"gradient of {name}", error)
        return worst

    def _added(self, z: Tensor, z_ref: Tensor, z_in: Tensor) -> float:
        """Difference of two outputs relative to what the layer adds, less what rounding does to the sum."""
        if z.shape != z_ref.shape:
            return math.inf
        valid = self._valid(z_in)
        z, z_ref, z_in = z.detach()[valid], z_ref[valid], z_in[valid]
        rounding = torch.finfo(compared_dtype(z_in)).eps * norm_of(z_ref)
        added = norm_of(z_ref, z_in) if z_in.shape == z_ref.shape else norm_of(z_ref)
        return ratio(max(norm_of(z, z_ref) - rounding, 0.0), added)

    def _settle(self, call: RecordedCall, streamed: Arguments, what: str, error: float, bound: float) -> None:
        """Ask a copy of the layer in a wider dtype whether a difference was rounding; raise if it was not."""
        wider = WIDER.get(compared_dtype(call.z_in))
        layer = self.layers[call.index]
        try:
            if wider is None:
                raise self._differs(call.index, what, error, bound)
            shadow = layer.__dict__.pop("forward", None)
            try:
                wide = copy.deepcopy(layer, {id(config): config for config in self.configs}).to(wider)
            finally:
                if shadow is not None:
                    layer.forward = shadow
            for module in wide.modules():
                if hasattr(module, "compute_dtype"):  # bitsandbytes computes in it whatever comes; fp32 is its widest
                    module.compute_dtype = torch.float32  # type: ignore[assignment]
            plain, chunked = (_widened_call(arguments, wide, wider) for arguments in (call.arguments, streamed))
            inputs = {name: widened(x, wider) for name, x in call.inputs.items()}
            with torch.no_grad():
                with attention_as(self.configs, self.reference):
                    _, reference = outputs_of(type(wide).forward, replaced(plain, inputs))
                with attention_as(self.configs, self.ours):
                    _, outputs = outputs_of(
                        _without_self(StreamedForward(wide, SCHEDULE, self.own)), replaced(chunked, inputs)
                    )
            wide_call = RecordedCall(call.index, replaced(plain, inputs), inputs, call.wanted, reference)
            errors = {"output": self._output_error(outputs, wide_call)}
            if what != "output":
                name, value = self._gradient_error(wide, wide_call, chunked)
                errors[name] = value
        except StreamTuneError:
            raise
        except Exception:  # no wider copy (quantised weights, memory, kernels without the dtype): judge what there is
            if error <= (UNSETTLED if wider is torch.float32 else bound):
                return
            raise self._differs(call.index, what, error, bound) from None
        for name, value in errors.items():
            if not value <= BOUND[compared_dtype(reference[0])]:
                raise self._differs(call.index, name, value, BOUND[compared_dtype(reference[0])])

    def _valid(self, z: Tensor) -> Tensor:
        """``[B, T]``: where the batch has a token; everywhere if the layers see another length than the batch has."""
        return self.valid if z.shape[:2] == self.valid.shape else z.new_ones(z.shape[:2], dtype=torch.bool)

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _where(self, index: int | None) -> str:
        if index is None:
            return f"{self._name}, outside its decoder layers"
        return f"layer {index} of {len(self.layers)} ({type(self.layers[index]).__name__})"

    def _differs(self, index: int, what: str, error: float, bound: float) -> _DiffersError:
        return _DiffersError(
            f"{self._name} is not streamed exactly: the {what} of {type(self.layers[index]).__name__} in chunks "
            f"differs from the whole sequence's by {error:.1e} (rounding explains {bound:.0e})",
            where=self._where(index),
            mend=MEND,
        )


class _Step:
    """Stands in a layer's ``forward`` for one walk."""

    def __init__(self, index: int, step: Callable[..., Any]) -> None:
        self.index, self.step = index, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(self.index, args, kwargs)


def _batch(model: Any) -> dict[str, Any]:
    """Random ordinary tokens, the second row padded on the right; the generator is our own."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    rows = min([table.shape[0], 4096, *([head.weight.shape[0]] if hasattr(head, "weight") else [])])
    config = model.config.get_text_config(decoder=True)
    special = {
        value
        for owner in (model.config, config)
        for key, value in vars(owner).items()
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    ordinary = torch.tensor([token for token in range(rows) if token not in special] or [0])
    generator = torch.Generator().manual_seed(0)
    ids = ordinary[torch.randint(len(ordinary), (ROWS, LENGTH), generator=generator)].to(table.device)
    mask = torch.ones_like(ids)
    mask[-1, -PADDED:] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    parameters = inspect.signature(type(model).forward).parameters
    if "use_cache" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        inputs["use_cache"] = False
    return inputs


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple | list) else out


def _without_self(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _self, *args, **kwargs: forward(*args, **kwargs)


def _widened_call(arguments: Arguments, layer: nn.Module, dtype: torch.dtype) -> Arguments:
    """The call of a wider copy of the layer, its tensors widened."""
    new = inspect.BoundArguments(arguments.signature, widened(dict(arguments.arguments), dtype))
    new.arguments[next(iter(new.arguments))] = layer
    return new


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    """What makes two layers of one kind: the classes inside them and their settings, not their place in the model."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, str | bool | int) and "idx" not in key and not key.endswith("_id")
            ),
        )
        for name, module in layer.named_modules()
    )
