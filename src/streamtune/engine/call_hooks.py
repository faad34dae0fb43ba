"""The hooks of a streamed model: what happens before and after each of its calls.

Attention weights, router logits and caches of a fixed size belong to a whole layer. A call without gradients that asks
for them is the plain model's own: its layers run whole, with the attention that their config named before.
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

from streamtune.engine.hf_names import CACHES
from streamtune.engine.inspect_model import REFUSED_OUTPUTS, owners
from streamtune.engine.lazy_logits import LazyLogits
from streamtune.engine.model_call import ModelCall, mark_read, refuse_surroundings
from streamtune.engine.observe import attribute_as
from streamtune.engine.outside_layers import read
from streamtune.engine.requests import ScoreRequest
from streamtune.engine.rotary import RowLengths
from streamtune.engine.routers import RouterLoss, RouterTerms, balances_itself
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.calls import Sharing
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.schedule import Schedule

SHORT = Schedule(chunk_size=4096, keep_attention="device")
"""For calls of few tokens by default: chunks save nothing there and cost a second forward of the attention."""


class StreamedCalls(StreamedModel):
    """A streamed model whose calls are hooked; ``short`` is the schedule of calls with few tokens, if another."""

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
        self._short = short
        self._sharing = Sharing(self)
        self._laid_out: Branches | None = None
        self._warned_of_padding = self._warned_of_routers = False
        self._length = 0
        """Tokens of the current call."""
        self._around: int | None = None
        """Number of calls around the current one; None outside of calls."""
        self._plain_call = ExitStack()
        """Open during a call of the plain model's own."""
        if has_generate(self.model):
            self.model.generate = Generation(self)
        self._hooks += [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, always_call=True),
        ]
        for inner in owners(self.model, self.layers):
            if inner is not self.model:  # which may be called by itself
                self._hooks += [
                    inner.register_forward_pre_hook(self._before_inner),
                    inner.register_forward_hook(self._after_inner, always_call=True),
                ]

    def remove(self) -> None:
        """Restore the model exactly as it was; harmless when called twice. A loss still to go backward is lost.

        Weights that wait on the host (``Schedule(weights="host")``) stay there.
        """
        super().remove()
        if isinstance(vars(self.model).get("generate"), Generation):
            del self.model.generate

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but two that a copy makes anew: a copy of a streamed model is streamed by itself."""
        return {key: value for key, value in vars(self).items() if key not in ("_sharing", "_plain_call")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._sharing, self._plain_call = Sharing(self), ExitStack()

    def scoring(self, scored: ScoreRequest) -> AbstractContextManager[None]:
        """Make a call inside the context return the requested scores in place of its output."""
        return attribute_as(self, "scored", scored)

    def laid_out(self, branches: Branches) -> AbstractContextManager[None]:
        """Take the tokens of calls inside the context for rows that share their beginnings.

        A call has ``labels`` or ``shift_labels`` ``[1, T]`` and the arguments ``branches.arguments(input_ids)``.
        """
        return attribute_as(self, "_laid_out", branches)

    def plain(self) -> AbstractContextManager[None]:
        """Make calls inside the context the plain model's own: nothing is streamed.

        Raises:
            ArgumentError: Gradients are on.
        """
        if torch.is_grad_enabled():
            raise ArgumentError(
                "plain calls of a streamed model compute no gradient", fix="use torch.no_grad(), or remove() first"
            )
        return attribute_as(self.context, "plain", True)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        refuse_surroundings(self.model)
        self._end_names()  # an interrupt in a call has left them
        if self.head is not None:
            self.head.close()  # likewise
        if args and not isinstance(args[0], Tensor | None):  # somebody's function stands in forward's place (TRL)
            self._length = 0
            return args, kwargs
        if self._is_plain(ModelCall(self.model, args, kwargs)):
            if not self.context.plain:
                self._plain_call.enter_context(self.plain())
            return args, kwargs
        self._around = self.names.begin(type(self.model).__name__)
        self._refuse_outputs(kwargs)
        self._stop_checkpointing()
        call = ModelCall(self.model, args, kwargs)
        with_labels = call.get("labels") is not None or self.scored is not None  # to be scored is to be trained on
        mark_read(call)
        self._leave_out_cache(call, with_labels)
        self._set_context(call, with_labels)
        padding, takes_positions = call.get("attention_mask"), call.takes("position_ids")
        args, kwargs = call.args, call.kwargs
        asked = kwargs.get("output_router_logits")
        if self.sequence_parallel is not None:
            args, kwargs = (), self._sharing.begin(args, kwargs, with_labels)
        if not takes_positions:
            kwargs = {key: value for key, value in kwargs.items() if key != "position_ids"}  # it was for the rows
        if self.head is not None and with_labels:
            self.head.open()
        if asked is None:
            asked = balances_itself(self.model)
        if self.routers.silent:
            kwargs = {**kwargs, "output_router_logits": False} if asked else kwargs
        elif asked or (self.routers.loss is not None and with_labels):
            self._sharing.open_routers(padding)
            kwargs = {**kwargs, "output_router_logits": False}
        return args, kwargs

    def _end_names(self) -> None:
        """Let the configs name their own attention again, unless another call is around this one."""
        if self._around is not None:
            self.names.end(self._around)
            self._around = None

    def _before_inner(self, inner: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.context.plain:
            self.names.begin(type(inner).__name__)

    def _after_inner(self, inner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.context.plain:
            self.names.end()

    def _is_plain(self, call: ModelCall) -> bool:
        """Return True if a call is the plain model's: it asks for what streaming never builds, without gradients."""
        self._plain_call.close()  # an interrupt in a call has left it open
        if self.context.plain:
            return True
        if torch.is_grad_enabled() or self.scored is not None or self.sequence_parallel is not None:
            return False
        by_config = not self.routers.silent and balances_itself(self.model)
        asked = {"output_router_logits": by_config, **call.kwargs}
        return needs_whole_layers(asked, call.cache, call.get("labels") is not None)

    def _refuse_outputs(self, asked: dict[str, Any]) -> None:
        """Refuse outputs that a streamed call does not have; router logits are left out with a warning."""
        for name, why in REFUSED_OUTPUTS.items():
            if asked.get(name):
                raise UnsupportedModelError(
                    f"{name}=True was asked for, but {why}", fix="call the model under torch.no_grad()"
                )
        if asked.get("use_cache") and torch.is_grad_enabled() and not self.model.training and self.scored is None:
            raise UnsupportedModelError(
                "use_cache=True was asked for in evaluation with gradients on, where streaming returns no cache",
                fix="call the model under torch.no_grad(), or leave use_cache out",
            )
        if asked.get("output_router_logits") and not self.model.training and not self._warned_of_routers:
            self._warned_of_routers = True
            warnings.warn(
                "router_logits are not returned by a streamed evaluation with labels or gradients; aux_loss and loss "
                "are. Without labels, under torch.no_grad(), they are returned",
                stacklevel=3,
            )

    def _stop_checkpointing(self) -> None:
        """Turn gradient checkpointing off: the node does its work, and both would recompute twice."""
        for module in [*owners(self.model, self.layers), *(m for layer in self.layers for m in layer.modules())]:
            if getattr(module, "gradient_checkpointing", False):  # not an image tower's
                module.gradient_checkpointing = False
                self._checkpointing.add(module)  # once, however often a trainer turns it on again

    def _leave_out_cache(self, call: ModelCall, with_labels: bool) -> None:
        """Return no cache from a call that trains, as under gradient checkpointing."""
        by_default = call.get("use_cache") is None and (with_labels or self.model.training)
        if call.cache is None and (torch.is_grad_enabled() or by_default):
            if self.scored is None:
                self._keep_one_row(call)
            call.put("use_cache", False)

    def _set_context(self, call: ModelCall, with_labels: bool) -> None:
        """Set the rows of the call and their lengths for the layers, and if they run whole or by the short schedule."""
        rows, self._length = call.size
        self.context.whole = with_labels and self._sees_everything(call)
        self.context.schedule = self._short if 0 < rows * self._length <= SHORT.chunk_size else None
        branches = self._laid_out if self.scored is None else self.scored.branches
        self.context.rows = call.packed_rows() if branches is None else branches
        self._set_lengths()

    def _set_lengths(self) -> None:
        rows = self.context.rows if self._rotations else None
        self.context.lengths = None if rows is None else RowLengths.of(rows)

    def _keep_one_row(self, call: ModelCall) -> None:
        """Keep a call one row if it is one without streaming, where the configuration asks for a cache."""
        decoder: Any = owners(self.model, self.layers)[-1]
        checkpointed = decoder in self._checkpointing and self.model.training
        cached = getattr(decoder.config, "use_cache", False) and not checkpointed
        call.keep_one_row(self.names.before, cached)

    def _sees_everything(self, call: ModelCall) -> bool:
        """Return True if a label follows left padding under eager attention, which then averages over all keys.

        No chunk has them all (docs/decisions/003-queries-that-see-nothing.md). A cross attention between the layers
        (blt) reads outputs of padding for other tokens too.
        """
        if "eager" not in {self.own_attention, *self.names.before}:
            return False
        mixes = call.pads_left() and any("CrossAttention" in type(m).__name__ for m in self.model.modules())
        if not mixes and not call.labels_padding(None if self.scored is None else self.scored.targets):
            return False
        if self.sequence_parallel is not None:
            raise UnsupportedModelError(
                "a label follows left padding, and eager attention lets padding see every token, which no rank that "
                "shares a sequence has",
                fix="give the first token of each row the label -100, or pad on the right",
            )
        if not self._warned_of_padding:
            self._warned_of_padding = True
            warnings.warn(
                "a label follows left padding, and eager attention lets padding see every token: such a call is "
                "computed in one chunk, as without streaming. Give the first token of each row the label -100, pad on "
                "the right, or load the model with attn_implementation='sdpa'",
                stacklevel=2,
            )
        return True

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        try:
            if self.context.plain:
                return self._with_plain_states(output)
            if self.scored is not None:
                return self._score_output(self.scored, output)
            self._check_hidden_states(output)
            return self._with_router_loss(self._without_lazy_logits(output))
        finally:
            self._plain_call.close()
            self._end_names()
            self._sharing.end()
            self.context.whole, self.context.schedule = False, None

    @staticmethod
    def _with_plain_states(output: Any) -> Any:
        if isinstance(states := getattr(output, "hidden_states", None), tuple):
            output.hidden_states = tuple(map(read, states))
        return output

    def _check_hidden_states(self, output: Any) -> None:
        """Make recorded hidden states plain tensors; refuse states of layers inside a layer, a chunk each (zamba)."""
        states = getattr(self._with_plain_states(output), "hidden_states", None)
        pieces = [x for x in states or () if isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2] < self._length]
        if pieces:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} records hidden states of layers inside of its decoder layers, which run "
                f"on chunks ({pieces[0].shape[-2]} of {self._length} tokens)",
                fix="leave output_hidden_states out, or call the model without streaming where they are wanted",
            )

    def _score_output(self, scored: ScoreRequest, output: Any) -> Any:
        if self.head is not None:
            self.head.close()
        sums = self.routers.close()
        if sums is not None and output is not None:
            balance, scored.router_loss = self.routers.losses(sums)
            share = self.routers.share * balance.detach()
            self.routers.terms = RouterTerms(torch.zeros_like(share), share)
        return None if output is None else scored.compute(self.model, output)

    def _with_router_loss(self, output: Any) -> Any:
        sums = self.routers.close()
        if sums is None or output is None:
            return output
        balance, added = self.routers.losses(sums)
        if isinstance(output, tuple):  # labels or not, the first item is the loss if there is one
            return (output[0] + added, *output[1:]) if output and output[0].dim() == 0 else output
        if output.loss is not None:
            self.routers.terms = RouterTerms(output.loss.detach(), self.routers.share * balance.detach())
            output.loss = output.loss + added
        if "aux_loss" in {field.name for field in fields(output)}:
            output.aux_loss = balance
        return output

    def _evaluated(self, output: Any) -> Any:
        """Return the output of an evaluation, with logits that are computed when they are read."""
        assert self.head is not None
        compute = self.head.readable if torch.is_grad_enabled() else self.head.evaluated
        if isinstance(output, tuple):
            return tuple(compute(x) if isinstance(x, LazyLogits) else x for x in output)
        if isinstance(lazy := getattr(output, "logits", None), LazyLogits):
            output.logits = compute(lazy)
        return output

    def _without_lazy_logits(self, output: Any) -> Any:
        if self.head is None or not self.head.active:
            return output
        self.head.close()
        if not self.model.training:
            return self._evaluated(output)
        if isinstance(output, tuple):
            return tuple(item for item in output if not isinstance(item, LazyLogits))
        if isinstance(getattr(output, "logits", None), LazyLogits):
            return type(output)(**{key: value for key, value in output.items() if key != "logits"})
        return output


OUTPUTS = ("output_attentions", "output_router_logits")
"""Arguments that ask for outputs of whole layers."""
GROWING = (None, "dynamic", "dynamic_full")
"""Values of ``cache_implementation`` for a cache that grows with the tokens."""


def needs_whole_layers(arguments: dict[str, Any], cache: Any, with_labels: bool) -> bool:
    """Return True if a call without gradients asks for something that only whole layers give.

    With labels ``output_router_logits`` asks for the routers' balance loss, which is streamed.
    """
    asked = [name for name in OUTPUTS if arguments.get(name)]
    if with_labels and asked == ["output_router_logits"]:
        return False
    return bool(asked) or bool(getattr(cache, "is_compileable", False))


class Generation:
    """Replaces ``generate`` of a streamed model on its instance."""

    def __init__(self, handle: StreamedCalls) -> None:
        self.handle = handle

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own())

    def _own(self) -> Callable[..., Any]:
        model = self.handle.model
        own: Callable[..., Any] = type(model).generate.__get__(model)
        return own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, by the plain model if the call asks for what streaming never builds."""
        if not self._asks_for_whole_layers(kwargs):
            return self._own()(*args, **kwargs)
        with torch.no_grad(), self.handle.plain():
            return self._own()(*args, **kwargs)

    def _asks_for_whole_layers(self, kwargs: dict[str, Any]) -> bool:
        configs = (kwargs.get("generation_config"), getattr(self.handle.model, "generation_config", None))
        given: dict[str, Any] = {}
        for config in reversed(configs):
            given |= {} if config is None else vars(config)
        given |= kwargs
        fixed = given.get("cache_implementation") not in GROWING
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        return fixed or needs_whole_layers(given, cache, with_labels=False)


def has_generate(model: nn.Module) -> bool:
    """Return True if a model's class generates and nobody replaced ``generate`` on the instance."""
    return callable(getattr(type(model), "generate", None)) and "generate" not in vars(model)
