"""A numerical preflight: is this very model, with these very weights, streamed exactly? Asked before it is trained.

A short random batch goes through the model twice. The plain forward records every decoder layer's call; the streamed
forward gets the recorded input of each layer, so that outputs are compared layer by layer and the first layer that
differs can be named. Then one layer of each kind is differentiated both ways (``layer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.call import LayerCall
from streamtune.engine.head import StreamedHead
from streamtune.engine.own_attention import OwnAttention
from streamtune.engine.preflight.common import (
    LENGTH,
    ROWS,
    SCHEDULE,
    Arguments,
    RecordedCall,
    bind,
    borrowed,
    distance,
    first_of,
    hand_on,
    inputs_of,
    kind_of,
    outputs_of,
    refuse_removed,
    replaced,
    step_layers,
    streamed_forward,
    trial_batch,
)
from streamtune.engine.preflight.layer import FIX, DiffersError, LayerCheck, without_self
from streamtune.engine.routers import not_balanced
from streamtune.engine.streamed_layer import strange_leaves
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError, StreamTuneError, UnsupportedModelError


class _PlainError(UnsupportedModelError):
    """The unstreamed model does not run on the preflight's batch."""


def check_exact(handle: StreamedModel) -> None:
    """Compare the streamed model with itself unstreamed on a few random tokens, forward and backward.

    Costs about six forwards of 48 tokens, and the gradient of one layer of each kind at a time. Gradients, random
    state, training flags and configuration are left as they were, also when it fails. The reference is the attention
    the model came with; if that lacks what the layer asks for (softcap, sinks), the model's eager attention.
    """
    refuse_removed(handle)
    if any(p.device.type == "meta" for p in handle.model.parameters()):
        raise ArgumentError("a model on the meta device has no weights to check")
    own = handle.names.before
    first: UnsupportedModelError | None = None
    for reference in (own, ["eager"] * len(own)):
        try:
            with borrowed(handle):
                _Preflight(handle, reference).run()
            return
        except (DiffersError, _PlainError) as error:
            first = first or error
            if set(own) == {"eager"}:
                break
    assert first is not None
    raise first


def check_order(handle: StreamedModel) -> None:
    """Run a few tokens forward by the handle's own schedule, if that is in the order of chunks."""
    if handle.schedule.order == "chunk":
        with borrowed(handle):
            model: Any = handle.model
            model(**trial_batch(model), **not_balanced(model))


class _Preflight:
    """Both forwards of a model and their comparison, the plain one under the given attention implementations."""

    def __init__(self, handle: StreamedModel, reference: list[Any]) -> None:
        self.handle, self.model, self.layers = handle, handle.model, handle.layers
        self.own = handle.own_attention
        self.reference = reference
        self.head = None if handle.head is None else StreamedHead(handle.model, SCHEDULE, handle.head.waiting)
        self.inputs: dict[str, Any] = {}
        self.calls: list[RecordedCall] = []
        self.streamed: list[Arguments] = []
        self.last: Tensor | None = None
        self.at: int | None = None
        """Current layer, None outside of layers."""

    def run(self) -> None:
        """Raise at the first difference."""
        try:
            self.inputs = trial_batch(self.model)
            valid = self.inputs["attention_mask"].bool()
            names, reference = self.handle.names, self.reference
            self.layer_check = LayerCheck(self.model, self.layers, names, reference, self.own, valid)
            loss_ref, grad_ref = self._forward(self._record)
            self._refuse_nan(loss_ref)
        except (StreamTuneError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise _PlainError(
                f"{self._name} cannot be checked: unstreamed, its loss cannot be computed from {ROWS} x {LENGTH} "
                "tokens of text alone",
                where=f"{type(error).__name__}: {error}",
                fix="see why the plain model fails; one that needs more than text (images) is not streamed",
            ) from error
        if not self.calls:
            raise UnsupportedModelError(f"{self._name} never calls its decoder layers, so there is nothing to stream")
        try:
            loss, grad = self._forward(self._compare)
            if len(self.streamed) != len(self.calls):
                raise DiffersError(f"{self._name} calls its layers {len(self.streamed)} times, not {len(self.calls)}")
            self._same_head(loss, loss_ref, grad, grad_ref)
            for call, streamed in self._kinds():
                self.at = call.index
                with self.handle.layer_on_device(self.layers[call.index]):
                    self.layer_check.same_gradients(call, streamed)
        except torch.OutOfMemoryError:
            raise
        except UnsupportedModelError as error:
            if self._name not in error.what:
                error.what, error.where = f"{self._name}: {error.what}", self.layer_check.where(self.at)
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self._name} does not run in chunks ({type(error).__name__}: {error})",
                where=self.layer_check.where(self.at),
                fix=FIX,
            ) from error

    def _forward(self, step: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        """Run a forward with ``step(index, args, kwargs)`` in each layer's place.

        Return the loss and the gradient of its last z_out. The gradient of the head's own weight is not computed: it is
        as large as the head.
        """
        streamed = step == self._compare
        self.last = None
        with ExitStack() as stack:
            names = self.handle.names
            stack.enter_context(names.using(names.ours if streamed else self.reference))
            step_layers(self.handle, step)
            if streamed and self.head is not None:
                self.head.open()
                stack.callback(self.head.close)
            out = self.model.forward(**self.inputs, **not_balanced(self.model))
            loss = out.loss if "labels" in self.inputs else out[0].float().square().mean()
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
            raise DiffersError(f"{self._name} calls its layers in another order when it is streamed")
        self.at, layer = index, self.layers[index]
        LayerCall.bind(layer, args, kwargs, OwnAttention(self.own) if self.own else None)  # refuses by name
        arguments = bind(layer, args, kwargs)
        bound_input = self.layer_check.bound(index, call.z_in)
        for name, x in inputs_of(arguments).items():
            reference = call.inputs.get(name)
            if reference is None:
                continue
            valid = self.layer_check.valid_tokens(reference) if x.shape == call.z_in.shape else None
            error = distance(x, reference, valid)
            if not error <= bound_input:
                raise self.layer_check.differs(index, "input", error, bound_input)
        used = replaced(arguments, {name: _leaf(call.inputs[name]) for name in call.wanted})
        out, outputs = outputs_of(without_self(streamed_forward(layer, self.own)), used)
        self.streamed.append(replaced(arguments, {}))  # a shared dictionary as it was before the call
        self.layer_check.same_output(outputs, call, self.streamed[-1])
        self.at = None
        return self._handed_on(arguments, used, out, call)

    def _handed_on(self, arguments: Arguments, used: Arguments, out: Any, call: RecordedCall) -> Any:
        result = hand_on(arguments, used, out, call)
        self.last = first_of(result)
        return result

    def _refuse_nan(self, loss: Tensor) -> None:
        """Refuse a model whose loss is not finite without streaming either, whatever the chunks."""
        if bool(torch.isfinite(loss)):
            return
        bad = next((call.index for call in self.calls if not all(torch.isfinite(z).all() for z in call.outputs)), None)
        raise _PlainError(
            f"{self._name} computes a loss of {loss.item()} from text, without streaming: its weights, or numbers in "
            "its configuration (epsilons, rope_theta, scales), overflow",
            where="the head" if bad is None else self.layer_check.where(bad),
            fix="use another copy of the checkpoint, or fix its config.json; for float16, dtype: bfloat16",
        )

    def _own_graph(self, index: int, z_out: Tensor, known: list[Tensor]) -> None:
        """Refuse a layer whose output depends on a tensor that is neither its argument nor its parameter.

        Under streaming the layers before it run without a graph, so a tensor they left somewhere has lost its gradient.
        """
        for leaf in strange_leaves(z_out, known):
            raise UnsupportedModelError(
                f"{self._name} is not streamed exactly: {type(self.layers[index]).__name__} uses a tensor with a "
                f"gradient (shape {tuple(leaf.shape)} at its root) that is neither its argument nor its "
                "parameter, such as keys and values shared between layers",
                where=self.layer_check.where(index),
                fix="train this model without streaming",
            )

    def _same_head(self, loss: Tensor, loss_ref: Tensor, grad: Tensor | None, grad_ref: Tensor | None) -> None:
        bound = self.layer_check.bound(self.calls[-1].index, self.calls[-1].outputs[0])
        pairs = [("loss", loss, loss_ref)]
        if grad_ref is not None:
            given = torch.zeros_like(grad_ref) if grad is None else grad
            pairs.append(("gradient of the final hidden states", given, grad_ref))
        for what, value, reference in pairs:
            if not distance(value, reference, None) <= bound:
                raise DiffersError(
                    f"{self._name} is not streamed exactly: its head's {what} differs by "
                    f"{distance(value, reference, None):.1e} (rounding explains {bound:.0e})",
                    where=f"the head of {self._name}",
                    fix="use stream(model, head=False): layers are streamed, head and loss are the model's own",
                )

    def _kinds(self) -> Iterator[tuple[RecordedCall, Arguments]]:
        """Yield one differentiated call of each kind of layer."""
        seen = set()
        for call, streamed in zip(self.calls, self.streamed, strict=True):
            kind = kind_of(self.layers[call.index])
            if kind not in seen and call.wanted:
                seen.add(kind)
                yield call, streamed

    @property
    def _name(self) -> str:
        return type(self.model).__name__


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())
