"""Hooks that run before and after each call of a streamed model.

Attention weights, router logits and static caches need layers that run on all tokens at once. A call without gradients
that asks for any of these runs without streaming, with the attention that the config names outside of streaming.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.hf_names import CACHES, is_unchunked_only_cache
from streamtune.engine.inspect_model import REFUSED_OUTPUTS, owning_models
from streamtune.engine.lazy_logits import LazyLogits
from streamtune.engine.model_call import ModelCall, mark_cache_read, refuse_unsupported_modes
from streamtune.engine.observe import temporary_attribute
from streamtune.engine.outside_layers import read_embeddings
from streamtune.engine.requests import ScoreRequest
from streamtune.engine.rotary import RowLengths
from streamtune.engine.routers import RouterLoss, RouterTerms, adds_balance_loss
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.calls import CallSharding
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.schedule import Schedule

SHORT = Schedule(chunk_size=4096, keep_attention="device")
"""Default schedule of short calls. Chunks would save no memory there, and cost a second forward of the attention."""


class StreamedCalls(StreamedModel):
    """Adds hooks that run before and after each call of a streamed model.

    ``short`` is the schedule of calls with at most 4,096 tokens; None uses ``schedule`` for these calls too.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        head: bool,
        router_loss: RouterLoss | None = None,
        sequence_parallel: SequenceParallel | None = None,
        short: Schedule | None = None,
    ) -> None:
        super().__init__(model, schedule, head, router_loss, sequence_parallel)
        self._short_schedule = short
        self._sharing = CallSharding(self)
        self._branch_layout: Branches | None = None
        self._warned_of_padding = self._warned_of_routers = False
        self._length = 0
        """Number of tokens T of the current call."""
        self._outer_calls: int | None = None
        """Number of model calls that enclose the current call; None outside of calls."""
        self._plain_call = ExitStack()
        """Holds the context :meth:`plain` during a call that runs without streaming."""
        if has_generate(self.model):
            self.model.generate = Generation(self)
        self._hooks += [
            self.model.register_forward_pre_hook(self._before_call, with_kwargs=True),
            self.model.register_forward_hook(self._after_call, always_call=True),
        ]
        for inner in owning_models(self.model, self.layers):
            if inner is not self.model:  # an inner model may be called directly
                self._hooks += [
                    inner.register_forward_pre_hook(self._before_inner_call),
                    inner.register_forward_hook(self._after_inner_call, always_call=True),
                ]

    def remove(self) -> None:
        """Restore the model exactly as it was before streaming; may be called twice.

        A backward that has not run yet can no longer run. Offloaded weights (``Schedule(weights="host")``) stay on the
        host.
        """
        super().remove()
        if isinstance(vars(self.model).get("generate"), Generation):
            del self.model.generate

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_sharing", "_plain_call")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._sharing, self._plain_call = CallSharding(self), ExitStack()

    def returning_scores(self, scored: ScoreRequest) -> AbstractContextManager[None]:
        """Return a context in which a call returns the scores that ``scored`` requests, not the model's output."""
        return temporary_attribute(self, "scored", scored)

    def laid_out(self, branches: Branches) -> AbstractContextManager[None]:
        """Return a context in which a call's tokens are rows that share a prefix, in the layout ``branches``.

        A call needs ``labels`` or ``shift_labels`` ``[1, T]``, and the arguments ``branches.arguments(input_ids)``.
        """
        return temporary_attribute(self, "_branch_layout", branches)

    def plain(self) -> AbstractContextManager[None]:
        """Return a context in which calls run without streaming; gradients must be off.

        Raises:
            ArgumentError: Gradients are on.
        """
        if torch.is_grad_enabled():
            raise ArgumentError(
                "plain() computes no gradients, but gradients are on", fix="use torch.no_grad(), or call remove() first"
            )
        return temporary_attribute(self.context, "plain", True)

    def _before_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        refuse_unsupported_modes(self.model)
        self._restore_attention_names()  # an interrupted call leaves the names set
        if self.head is not None:
            self.head.end_call()  # and the head open
        if args and not isinstance(args[0], Tensor | None):  # forward was replaced by another function (TRL)
            self._length = 0
            return args, kwargs
        if self._runs_unstreamed(ModelCall(self.model, args, kwargs)):
            if not self.context.plain:
                self._plain_call.enter_context(self.plain())
            return args, kwargs
        self._outer_calls = self.names.begin_call(type(self.model).__name__)
        self._refuse_outputs(kwargs)
        self._stop_checkpointing()
        call = ModelCall(self.model, args, kwargs)
        with_labels = call.get_argument("labels") is not None or self.scored is not None  # a scored call counts as one
        mark_cache_read(call)
        self._disable_cache(call, with_labels)
        self._set_call_context(call, with_labels)
        padding, takes_positions = call.get_argument("attention_mask"), call.has_parameter("position_ids")
        args, kwargs = call.args, call.kwargs
        asked = kwargs.get("output_router_logits")
        if self.sequence_parallel is not None:
            args, kwargs = (), self._sharing.shard_call(args, kwargs, with_labels)
        if not takes_positions:
            kwargs = {key: value for key, value in kwargs.items() if key != "position_ids"}  # read for the rows only
        if self.head is not None and with_labels:
            self.head.begin_call()
        if asked is None:
            asked = adds_balance_loss(self.model)
        if self.routers.silent:
            kwargs = {**kwargs, "output_router_logits": False} if asked else kwargs
        elif asked or (self.routers.loss is not None and with_labels):
            self._sharing.open_routers(padding)
            kwargs = {**kwargs, "output_router_logits": False}
        return args, kwargs

    def _restore_attention_names(self) -> None:
        if self._outer_calls is not None:
            self.names.end_call(self._outer_calls)
            self._outer_calls = None

    def _before_inner_call(self, inner: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.context.plain:
            self.names.begin_call(type(inner).__name__)

    def _after_inner_call(self, inner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.context.plain:
            self.names.end_call()

    def _runs_unstreamed(self, call: ModelCall) -> bool:
        self._plain_call.close()  # an interrupted call leaves it open
        if self.context.plain:
            return True
        if torch.is_grad_enabled() or self.scored is not None or self.sequence_parallel is not None:
            return False
        by_config = not self.routers.silent and adds_balance_loss(self.model)
        arguments = {"output_router_logits": by_config, **call.kwargs}
        return needs_unchunked_layers(arguments, call.cache, call.get_argument("labels") is not None)

    def _refuse_outputs(self, arguments: dict[str, Any]) -> None:
        for name, why in REFUSED_OUTPUTS.items():
            if arguments.get(name):
                raise UnsupportedModelError(
                    f"{name}=True was requested, but {why}", fix="call the model under torch.no_grad()"
                )
        if arguments.get("use_cache") and torch.is_grad_enabled() and not self.model.training and self.scored is None:
            raise UnsupportedModelError(
                "use_cache=True was requested in evaluation with gradients on, where streaming returns no cache",
                fix="call the model under torch.no_grad(), or leave use_cache out",
            )
        if arguments.get("output_router_logits") and not self.model.training and not self._warned_of_routers:
            self._warned_of_routers = True
            warnings.warn(
                "a streamed evaluation with labels or gradients returns aux_loss and loss, but no router_logits. "
                "Without labels, under torch.no_grad(), router_logits are returned",
                stacklevel=3,
            )

    def _stop_checkpointing(self) -> None:
        """Turn off the decoder's gradient checkpointing, which would recompute streamed layers a second time."""
        for module in [*owning_models(self.model, self.layers), *(m for layer in self.layers for m in layer.modules())]:
            if getattr(module, "gradient_checkpointing", False):  # an image tower keeps its checkpointing
                module.gradient_checkpointing = False
                self._checkpointing.add(module)  # a set: a trainer may turn it on again for each step

    def _disable_cache(self, call: ModelCall, with_labels: bool) -> None:
        """Turn ``use_cache`` off in a training call, as ``transformers`` does under gradient checkpointing."""
        if call.cache is not None:
            return
        if self.scored is None:
            self._add_mask_for_one_row(call)
        by_default = call.get_argument("use_cache") is None and (with_labels or self.model.training)
        if torch.is_grad_enabled() or by_default:
            call.set_argument("use_cache", False)

    def _set_call_context(self, call: ModelCall, with_labels: bool) -> None:
        rows, self._length = call.batch_and_length
        self.context.one_chunk = with_labels and self._needs_one_chunk(call)
        self.context.schedule = self._short_schedule if 0 < rows * self._length <= SHORT.chunk_size else None
        branches = self._branch_layout if self.scored is None else self.scored.branches
        self.context.rows = call.packed_rows() if branches is None else branches
        self._set_rope_lengths()

    def _set_rope_lengths(self) -> None:
        rows = self.context.rows if self._rotations else None
        self.context.lengths = None if rows is None else RowLengths.from_rows(rows)

    def _add_mask_for_one_row(self, call: ModelCall) -> None:
        """Add a mask of ones if ``transformers`` would split the call into packed rows only because it has no cache."""
        decoder: Any = owning_models(self.model, self.layers)[-1]
        checkpointed = decoder in self._checkpointing and self.model.training
        cached = getattr(decoder.config, "use_cache", False) and not checkpointed
        call.keep_one_row(self.names.plain_names, cached)

    def _needs_one_chunk(self, call: ModelCall) -> bool:
        """Return True if the loss or a later layer reads the outputs of left padding, which attends to all tokens.

        Eager attention gives a query whose keys are all masked the mean of all values, and no chunk has them all
        (docs/decisions/003-queries-that-see-nothing.md). So does every attention with a dense mask that adds a finite
        number. This matters if left padding has a label, or if a cross-attention between the layers (blt) reads its
        outputs.

        Raises:
            UnsupportedModelError: Ranks share the sequence.
        """
        eager = "eager" in {self.own_attention, *self.names.plain_names}
        mixes = (
            eager
            and call.has_left_padding()
            and any("CrossAttention" in type(m).__name__ for m in self.model.modules())
        )
        if not mixes and not call.has_labelled_padding(None if self.scored is None else self.scored.targets, eager):
            return False
        if self.sequence_parallel is not None:
            raise UnsupportedModelError(
                "a label is predicted from left padding, which attends to all tokens under eager attention; ranks that "
                "share a sequence have only their own tokens",
                fix="give the first token of each row the label -100, or pad on the right",
            )
        if not self._warned_of_padding:
            self._warned_of_padding = True
            warnings.warn(
                "a label is predicted from left padding, which attends to all tokens under eager attention and with a "
                "dense mask of numbers: the call runs in one chunk. Give the first token of each row the label -100, "
                "pad on the right, or load the model with attn_implementation='sdpa' and pass a boolean mask",
                stacklevel=2,
            )
        return True

    def _after_call(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        try:
            if self.context.plain:
                return self._replace_embedding_placeholders(output)
            if self.scored is not None:
                return self._score_output(self.scored, output)
            self._check_hidden_states(output)
            return self._add_router_loss(self._replace_lazy_logits(output))
        finally:
            self._plain_call.close()
            self._restore_attention_names()
            self._sharing.end_call()
            self.context.one_chunk, self.context.schedule = False, None

    @staticmethod
    def _replace_embedding_placeholders(output: Any) -> Any:
        if isinstance(states := getattr(output, "hidden_states", None), tuple):
            output.hidden_states = tuple(map(read_embeddings, states))
        return output

    def _check_hidden_states(self, output: Any) -> None:
        """Replace embedding placeholders in the output; raise an error if a hidden state has only
        one chunk's tokens.
        """
        states = getattr(self._replace_embedding_placeholders(output), "hidden_states", None)
        partial_states = [
            x for x in states or () if isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2] < self._length
        ]
        if partial_states:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} records hidden states inside its decoder layers, which run on chunks: "
                f"a state has {partial_states[0].shape[-2]} of {self._length} tokens",
                fix="leave output_hidden_states out, or call the model without streaming",
            )

    def _score_output(self, scored: ScoreRequest, output: Any) -> Any:
        if self.head is not None:
            self.head.end_call()
        sums = self.routers.end_call()
        if sums is not None and output is not None:
            balance, scored.router_loss = self.routers.compute_losses(sums)
            share = self.routers.loss_factor * balance.detach()
            self.routers.terms = RouterTerms(torch.zeros_like(share), share)
        return None if output is None else scored.compute_result(self.model, output)

    def _add_router_loss(self, output: Any) -> Any:
        sums = self.routers.end_call()
        if sums is None or output is None:
            return output
        balance, added = self.routers.compute_losses(sums)
        if isinstance(output, tuple):  # the first item is the loss if the call has one
            return (output[0] + added, *output[1:]) if output and output[0].dim() == 0 else output
        if output.loss is not None:
            self.routers.terms = RouterTerms(output.loss.detach(), self.routers.loss_factor * balance.detach())
            output.loss = output.loss + added
        if "aux_loss" in {field.name for field in fields(output)}:
            output.aux_loss = balance
        return output

    def _make_logits_readable(self, output: Any) -> Any:
        assert self.head is not None
        compute = self.head.logits_with_graph if torch.is_grad_enabled() else self.head.logits_without_graph
        if isinstance(output, tuple):
            return tuple(compute(x) if isinstance(x, LazyLogits) else x for x in output)
        if isinstance(lazy := getattr(output, "logits", None), LazyLogits):
            output.logits = compute(lazy)
        return output

    def _replace_lazy_logits(self, output: Any) -> Any:
        """Return the model output without lazy logits: removed in training, made readable in evaluation."""
        if self.head is None or not self.head.active:
            return output
        self.head.end_call()
        if not self.model.training:
            return self._make_logits_readable(output)
        if isinstance(output, tuple):
            return tuple(item for item in output if not isinstance(item, LazyLogits))
        if isinstance(getattr(output, "logits", None), LazyLogits):
            return type(output)(**{key: value for key, value in output.items() if key != "logits"})
        return output


UNCHUNKED_OUTPUTS = ("output_attentions", "output_router_logits")
"""Arguments that request outputs which layers compute only if they run on all tokens at once."""
GROWING_CACHES = (None, "dynamic", "dynamic_full")
"""Values of ``cache_implementation`` for a cache that grows with the number of tokens."""


def needs_unchunked_layers(arguments: dict[str, Any], cache: Any, with_labels: bool) -> bool:
    """Return True if a call without gradients has outputs or a cache for which layers must run on all tokens at once.

    ``output_router_logits`` in a call with labels does not count: it asks for the balance loss, which is computed in
    chunks.
    """
    requested_outputs = [name for name in UNCHUNKED_OUTPUTS if arguments.get(name)]
    if with_labels and requested_outputs == ["output_router_logits"]:
        return False
    return bool(requested_outputs) or is_unchunked_only_cache(cache)


class Generation:
    """Replaces the method ``generate`` of a streamed model; generates without streaming if the options require that."""

    def __init__(self, handle: StreamedCalls) -> None:
        self.handle = handle

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._class_generate())

    def _class_generate(self) -> Callable[..., Any]:
        model = self.handle.model
        generate: Callable[..., Any] = type(model).generate.__get__(model)
        return generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate`` of the model's class."""
        if not self._needs_unchunked_layers(kwargs):
            return self._class_generate()(*args, **kwargs)
        with torch.no_grad(), self.handle.plain():
            return self._class_generate()(*args, **kwargs)

    def _needs_unchunked_layers(self, kwargs: dict[str, Any]) -> bool:
        configs = (kwargs.get("generation_config"), getattr(self.handle.model, "generation_config", None))
        options: dict[str, Any] = {}
        for config in reversed(configs):
            options |= {} if config is None else vars(config)
        options |= kwargs
        static = options.get("cache_implementation") not in GROWING_CACHES
        cache = next((options[name] for name in CACHES if options.get(name) is not None), None)
        return static or needs_unchunked_layers(options, cache, with_labels=False)


def has_generate(model: nn.Module) -> bool:
    """Return True if the model's class has ``generate`` and the model itself does not replace it."""
    return callable(getattr(type(model), "generate", None)) and "generate" not in vars(model)
