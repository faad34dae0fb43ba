"""Numerical check, before training, that a model with its current weights is streamed exactly.

A short random batch goes through the model twice. The forward without streaming records the call of every decoder
layer. In the streamed forward each layer gets its recorded input, so the error names the first layer that differs. Then
one layer of each kind is differentiated both ways (``layer``).
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
    bind_arguments,
    checking_mode,
    hidden_states_in_output,
    input_tensors,
    layer_kind,
    recorded_outputs_as_leaves,
    refuse_if_removed,
    relative_difference,
    replace_layer_forwards,
    replace_tensors,
    run_and_list_outputs,
    streamed_forward,
    trial_batch,
)
from streamtune.engine.preflight.layer import FIX, DiffersError, LayerCheck, with_self_argument
from streamtune.engine.routers import without_router_loss
from streamtune.engine.streamed_layer import trainable_leaves_except
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError, StreamTuneError, UnsupportedModelError


class _PlainError(UnsupportedModelError): ...


def check_exact(handle: StreamedModel) -> None:
    """Raise an error if streaming changes the loss or gradients of a few random tokens.

    The cost is about six forwards of 48 tokens, and the gradient of one layer of each kind at a time. Gradients, random
    state, training flags and configuration are restored, also after an error. Without streaming, the model runs with
    its configured attention. If the results differ, the check is repeated with eager attention, because other
    implementations may lack what a layer needs (softcap, sinks).

    Raises:
        ArgumentError: The streaming was removed, or the model is on the meta device.
        UnsupportedModelError: The results differ, or the model does not run on the batch without streaming.
    """
    refuse_if_removed(handle)
    if any(p.device.type == "meta" for p in handle.model.parameters()):
        raise ArgumentError("a model on the meta device has no weights to check")
    plain_names = handle.names.plain_names
    first_error: UnsupportedModelError | None = None
    for reference in (plain_names, ["eager"] * len(plain_names)):
        try:
            with checking_mode(handle):
                _Preflight(handle, reference).compare_forwards()
            return
        except (DiffersError, _PlainError) as error:
            first_error = first_error or error
            if set(plain_names) == {"eager"}:
                break
    assert first_error is not None
    raise first_error


def check_chunk_order(handle: StreamedModel) -> None:
    """Run a short forward if the schedule has ``order="chunk"``; layers that do not support it raise an error.

    Raises:
        UnsupportedModelError: The layers share keys and values.
        ArgumentError: The weights are sharded over ranks.
    """
    if handle.schedule.order == "chunk":
        with checking_mode(handle):
            model: Any = handle.model
            model(**trial_batch(model), **without_router_loss(model))


class _Preflight:
    """Compares a model's forward with and without streaming; without, its configs name the attention ``reference``."""

    def __init__(self, handle: StreamedModel, reference: list[Any]) -> None:
        self.handle, self.model, self.layers = handle, handle.model, handle.layers
        self.own_attention = handle.own_attention
        self.reference = reference
        self.head = None if handle.head is None else StreamedHead(handle.model, SCHEDULE, handle.head.offloaded)
        self.inputs: dict[str, Any] = {}
        self.calls: list[RecordedCall] = []
        self.streamed: list[Arguments] = []
        self.last: Tensor | None = None
        self.current_layer: int | None = None
        """Index of the current layer; None outside of layers."""

    def compare_forwards(self) -> None:
        try:
            self.inputs = trial_batch(self.model)
            valid = self.inputs["attention_mask"].bool()
            names, reference = self.handle.names, self.reference
            self.layer_check = LayerCheck(self.model, self.layers, names, reference, self.own_attention, valid)
            loss_ref, grad_ref = self._run_forward(self._record_call)
            self._refuse_nan(loss_ref)
        except (StreamTuneError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise _PlainError(
                f"{self._model_name} cannot be checked: without streaming it fails to compute a loss from {ROWS} x "
                f"{LENGTH} tokens of text",
                where=f"{type(error).__name__}: {error}",
                fix="find out why the plain model fails; a model that needs more than text (images) is not supported",
            ) from error
        if not self.calls:
            raise UnsupportedModelError(
                f"{self._model_name} never calls its decoder layers, so nothing can be streamed"
            )
        try:
            loss, grad = self._run_forward(self._compare_call)
            if len(self.streamed) != len(self.calls):
                raise DiffersError(
                    f"{self._model_name} calls its layers {len(self.streamed)} times with streaming, but "
                    f"{len(self.calls)} times without"
                )
            self._check_head(loss, loss_ref, grad, grad_ref)
            for call, streamed in self._one_call_per_kind():
                self.current_layer = call.index
                with self.handle.layer_on_device(self.layers[call.index]):
                    self.layer_check.check_gradients(call, streamed)
        except torch.OutOfMemoryError:
            raise
        except UnsupportedModelError as error:
            if self._model_name not in error.what:
                error.what, error.where = (
                    f"{self._model_name}: {error.what}",
                    self.layer_check.layer_location(self.current_layer),
                )
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self._model_name} does not run in chunks ({type(error).__name__}: {error})",
                where=self.layer_check.layer_location(self.current_layer),
                fix=FIX,
            ) from error

    def _run_forward(self, step: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        """Run the model's forward, with ``step(index, args, kwargs)`` in place of each decoder layer.

        Return the loss, and its gradient with respect to the last layer's output; None if the loss has no gradient. The
        gradient of the head's weight is not computed, because it is as large as the head.
        """
        streamed = step == self._compare_call
        self.last = None
        with ExitStack() as stack:
            names = self.handle.names
            stack.enter_context(names.using_names(names.engine_names if streamed else self.reference))
            replace_layer_forwards(self.handle, step)
            if streamed and self.head is not None:
                self.head.begin_call()
                stack.callback(self.head.end_call)
            out = self.model.forward(**self.inputs, **without_router_loss(self.model))
            loss = out.loss if "labels" in self.inputs else out[0].float().square().mean()
        if self.last is None or not loss.requires_grad:
            return loss.detach(), None
        (grad,) = torch.autograd.grad(loss, [self.last], allow_unused=True)
        return loss.detach(), grad

    def _record_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.current_layer, layer = index, self.layers[index]
        arguments = bind_arguments(layer, args, kwargs)
        leaves = {name: _as_leaf(x) for name, x in input_tensors(arguments).items()}
        used = replace_tensors(arguments, leaves)
        out, outputs = run_and_list_outputs(type(layer).forward, used)
        for z in outputs:
            self._refuse_foreign_leaves(index, z, [*leaves.values(), *layer.parameters()])
        inputs = {name: leaf.detach() for name, leaf in leaves.items()}
        call = RecordedCall(
            index,
            replace_tensors(arguments, inputs),
            inputs,
            [name for name, leaf in leaves.items() if leaf.requires_grad],
            [z.detach() for z in outputs],
        )
        self.calls.append(call)
        self.current_layer = None
        return self._recorded_result(arguments, used, out, call)

    def _compare_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.calls[len(self.streamed)] if len(self.streamed) < len(self.calls) else None
        if call is None or call.index != index:
            raise DiffersError(f"{self._model_name} calls its layers in another order when it is streamed")
        self.current_layer, layer = index, self.layers[index]
        LayerCall.bind(
            layer, args, kwargs, OwnAttention(self.own_attention) if self.own_attention else None
        )  # refuses by name
        arguments = bind_arguments(layer, args, kwargs)
        bound_input = self.layer_check.rounding_bound(index, call.z_in)
        for name, x in input_tensors(arguments).items():
            reference = call.inputs.get(name)
            if reference is None:
                continue
            valid = self.layer_check.valid_tokens(reference) if x.shape == call.z_in.shape else None
            error = relative_difference(x, reference, valid)
            if not error <= bound_input:
                raise self.layer_check.difference_error(index, "input", error, bound_input)
        used = replace_tensors(arguments, {name: _as_leaf(call.inputs[name]) for name in call.trained_inputs})
        out, outputs = run_and_list_outputs(with_self_argument(streamed_forward(layer, self.own_attention)), used)
        self.streamed.append(replace_tensors(arguments, {}))  # a shared dictionary as it was before the call
        self.layer_check.check_output(outputs, call, self.streamed[-1])
        self.current_layer = None
        return self._recorded_result(arguments, used, out, call)

    def _recorded_result(self, arguments: Arguments, used_arguments: Arguments, out: Any, call: RecordedCall) -> Any:
        result = recorded_outputs_as_leaves(arguments, used_arguments, out, call)
        self.last = hidden_states_in_output(result)
        return result

    def _refuse_nan(self, loss: Tensor) -> None:
        if bool(torch.isfinite(loss)):
            return
        bad = next((call.index for call in self.calls if not all(torch.isfinite(z).all() for z in call.outputs)), None)
        raise _PlainError(
            f"{self._model_name} computes a loss of {loss.item()} from text, even without streaming: its weights, or "
            "values in its configuration (epsilons, rope_theta, scales), overflow",
            where="the head" if bad is None else self.layer_check.layer_location(bad),
            fix="use another copy of the checkpoint, or correct its config.json; for float16 set dtype: bfloat16",
        )

    def _refuse_foreign_leaves(self, index: int, output: Tensor, allowed_leaves: list[Tensor]) -> None:
        for leaf in trainable_leaves_except(output, allowed_leaves):
            raise UnsupportedModelError(
                f"{self._model_name} is not streamed exactly: {type(self.layers[index]).__name__} reads a tensor with "
                f"a gradient (leaf of shape {tuple(leaf.shape)}) that is neither argument nor parameter, such as "
                "shared keys and values",
                where=self.layer_check.layer_location(index),
                fix="train this model without streaming",
            )

    def _check_head(
        self, loss: Tensor, unstreamed_loss: Tensor, grad: Tensor | None, unstreamed_grad: Tensor | None
    ) -> None:
        bound = self.layer_check.rounding_bound(self.calls[-1].index, self.calls[-1].outputs[0])
        pairs = [("loss", loss, unstreamed_loss)]
        if unstreamed_grad is not None:
            grad = torch.zeros_like(unstreamed_grad) if grad is None else grad
            pairs.append(("gradient of the final hidden states", grad, unstreamed_grad))
        for what, value, reference in pairs:
            if not relative_difference(value, reference, None) <= bound:
                raise DiffersError(
                    f"{self._model_name} is not streamed exactly: its head's {what} differs by "
                    f"{relative_difference(value, reference, None):.1e} (rounding explains at most {bound:.0e})",
                    where=f"the head of {self._model_name}",
                    fix="use stream(model, head=False), which streams the layers and keeps the model's own head and "
                    "loss",
                )

    def _one_call_per_kind(self) -> Iterator[tuple[RecordedCall, Arguments]]:
        seen = set()
        for call, streamed in zip(self.calls, self.streamed, strict=True):
            kind = layer_kind(self.layers[call.index])
            if kind not in seen and call.trained_inputs:
                seen.add(kind)
                yield call, streamed

    @property
    def _model_name(self) -> str:
        return type(self.model).__name__


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())
