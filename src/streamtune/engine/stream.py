"""``stream(model)``: put the engine into a model in place, and take it out again without a trace.

Four seams of ``transformers`` are used and no modeling file is patched: each decoder layer's ``forward`` (on the
instance), the cache a layer updates, the attention function and the mask function its config names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_layers
from transformers.modeling_layers import GradientCheckpointingLayer

from streamtune.engine.ambient import RandomState
from streamtune.engine.attention import NAME
from streamtune.engine.balance import RouterLoss, RouterTerms, RouterWatch, balances_itself, not_balanced, reduced
from streamtune.engine.call import hands_on_cache, takes_cache
from streamtune.engine.head import LazyLogits, StreamedHead
from streamtune.engine.layer import StreamedForward
from streamtune.engine.placement import Tiers, Trail, place_layers
from streamtune.engine.pointwise import StreamedNorm, norms_outside
from streamtune.engine.preflight import check_exact
from streamtune.engine.rows import CallFacts, PackedRows, tells_of_rows
from streamtune.engine.schedule import Schedule
from streamtune.engine.tiles import FORMS, over
from streamtune.errors import ArgumentError, UnsupportedModelError

__all__ = ["StreamHandle", "decoder_layers", "stream"]

REFUSED_OUTPUTS = {
    "output_attentions": "attention weights are never built",
}

STATES_IN_MODULES = ("conv1d_state", "recurrent_states", "recurrent_state", "ssm_state")
"""What modules call a state they keep themselves, outside of the cache."""


def stream(
    model: nn.Module,
    chunk_size: int | None = None,
    *,
    schedule: Schedule | None = None,
    head: bool = True,
    router_loss: RouterLoss | None = None,
) -> StreamHandle:
    """Train ``model`` with the exact streaming backward (StreamBP, arXiv 2506.03077). The model is changed in place.

    Afterwards ``model(input_ids=ids, labels=labels).loss.backward()`` computes the ordinary loss and the ordinary
    gradient with the activations of one chunk; trainers, adapters and accelerate work unchanged.

    As under gradient checkpointing, a call that trains (training mode, or with ``labels``) runs with
    ``use_cache=False``. ``transformers`` looks for packed rows (``position_ids`` that restart) in just these calls.

    Args:
        model: A causal language model of ``transformers``, with or without peft adapters.
        chunk_size: Tokens of a chunk; shorthand for ``schedule=Schedule(chunk_size=...)``.
        schedule: How to cut the sequence.
        head: Stream the language-model head as well: a call with ``labels`` returns the loss and no logits.
        router_loss: Losses on the routers of a mixture of experts, added to the loss of a call with ``labels``. None
            adds what the model itself would, its balance loss where ``output_router_logits`` is set. Router logits are
            not returned.

    Returns:
        A handle with ``.schedule`` and ``.remove()``, which restores the model exactly.

    Raises:
        ArgumentError: Both ``chunk_size`` and ``schedule`` are given, or the model is streamed already.
        UnsupportedModelError: The model cannot be streamed exactly; it is left as it was.

    Example:
        >>> handle = streamtune.stream(model, chunk_size=2048)
        >>> model(input_ids=ids, labels=labels).loss.backward()
        >>> handle.remove()
    """
    if chunk_size is not None and schedule is not None:
        raise ArgumentError("give chunk_size or schedule, not both")
    if schedule is None:
        schedule = Schedule() if chunk_size is None else Schedule(chunk_size=chunk_size)
    return StreamHandle(model, schedule, head, router_loss)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The ``transformers`` model inside adapter wrappers.

    Raises:
        UnsupportedModelError: There is none.
    """
    unwrap: Any = getattr(model, "get_base_model", None)
    inner: Any = model if unwrap is None else unwrap()
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model")
    return inner


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost layers that take a key/value cache, in order.

    A layer says of itself that it is one (``GradientCheckpointingLayer``) and takes the cache by name. In a model where
    none does, the members of its module lists are asked, and those that only hand the cache on.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module, searching: bool) -> None:
        for child in module.children():
            listed = isinstance(module, nn.ModuleList) and searching and hands_on_cache(child)
            if listed or (isinstance(child, GradientCheckpointingLayer) and takes_cache(child)):
                found.append(child)
            else:
                visit(child, searching)

    visit(model, searching=False)
    if not found:
        visit(model, searching=True)
    return found


def check_streamable(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Refuse, by name, what is known not to stream exactly.

    Raises:
        UnsupportedModelError: With the reason.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only causal decoders are streamed")
    if not layers:
        raise UnsupportedModelError(
            f"{name} has no decoder layer with a key/value cache, so there is nothing to stream"
        )
    own = _own_attention(model, layers)
    if own is not None and own not in FORMS:
        raise UnsupportedModelError(
            f"{name} computes its attention itself, by {own!r}, which does not know the tile of a chunk",
            mend="load it with attn_implementation='eager'",
        )
    if isinstance(model, getattr(modeling_layers, "MtpModel", ())):
        raise UnsupportedModelError(
            f"{name} holds layers for multi-token prediction, which only draft: transformers gives them no loss",
            mend="stream the causal language model they belong to",
        )
    for layer in layers:
        if "forward" in layer.__dict__:
            raise UnsupportedModelError(
                f"{name} has a {type(layer).__name__} whose forward was replaced on the instance (a device map of "
                "accelerate does that, and so do patches); chunks would go around it",
                mend="load the model onto one device, or undo the patch",
            )
        for module in layer.modules():
            if any(hasattr(module, state) for state in STATES_IN_MODULES):
                raise UnsupportedModelError(
                    f"{name} has layers whose {type(module).__name__} keeps a state in the module itself, which no "
                    "chunk can be given"
                )
            if isinstance(module, nn.modules.batchnorm._NormBase):
                raise UnsupportedModelError(
                    f"{name} has a {type(module).__name__} in its {type(layer).__name__}; its statistic is of "
                    "the whole sequence or batch, not a sum over chunks"
                )
    for flag, why in REFUSED_OUTPUTS.items():
        if getattr(config, flag, False):
            raise UnsupportedModelError(
                f"{name} is configured with {flag}=True, but {why}", mend=f"set model.config.{flag} = False"
            )


class StreamHandle:
    """What :func:`stream` put into a model, and the way to take it out. Use as a context manager if you like."""

    def __init__(self, model: nn.Module, schedule: Schedule, head: bool, router_loss: RouterLoss | None = None) -> None:
        self.model = base_model(model)
        self.schedule = schedule
        self.layers = decoder_layers(self.model)
        if any(isinstance(layer.__dict__.get("forward"), StreamedForward) for layer in self.layers):
            raise ArgumentError(f"this {type(self.model).__name__} is streamed already", mend="call .remove() first")
        check_streamable(self.model, self.layers)
        self._head = StreamedHead(self.model, schedule) if head else None
        self.facts = CallFacts()
        self.routers = RouterWatch(self.model, self.layers, router_loss)
        self._checkpointing: set[Any] = set()
        self._attention = [
            (config, config._attn_implementation_internal) for config in _configs(self.model, self.layers)
        ]
        self.own_attention = _own_attention(self.model, self.layers)
        """The implementation that layers which compute their attention themselves keep; None where ours is used."""
        for config, _ in self._attention:
            config._attn_implementation_internal = NAME if self.own_attention is None else over(self.own_attention)
        self.tiers, self._trail = Tiers(schedule), Trail()
        for layer, place in zip(self.layers, place_layers(schedule, len(self.layers)), strict=True):
            layer.forward = StreamedForward(
                layer,
                schedule,
                own=self.own_attention,
                watch=self.routers,
                facts=self.facts,
                place=place,
                tiers=self.tiers,
                trail=self._trail,
            )
        self._norms = norms_outside(_owners(self.model, self.layers)[-1], self.layers)
        for norm in self._norms:
            norm.forward = StreamedNorm(norm, schedule, self.tiers, self._trail)
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, always_call=True),
        ]

    def check(self) -> None:
        """Compare this very model streamed and unstreamed on a few random tokens; costs a few short forwards.

        Raises:
            UnsupportedModelError: They differ; the layer is named. The model is left as it was, still streamed.
        """
        check_exact(self)

    @torch.no_grad()
    def count_routes(self, batches: Iterable[dict[str, Any]]) -> Tensor:
        """How often each expert is chosen over several micro-batches: what ``handle.routers.totals`` wants for a step.

        Costs a forward of the decoder for each batch. Random numbers (router jitter) are those the training calls will
        draw, if these follow in the same order.

        Args:
            batches: Arguments of the model's call, each; labels are not read.

        Returns:
            ``[E + 1]``: the routes by expert and, last, the number of pairs of a token and a layer's router; over all
            ranks where ``torch.distributed`` runs.
        """
        decoder: Any = getattr(self.model, self.model.base_model_prefix)
        counts: Tensor | None = None
        with RandomState.now(next(self.model.parameters()).device).replayed():
            for batch in batches:
                unread = ("labels", "shift_labels", "num_items_in_batch", "output_router_logits")
                read = {key: value for key, value in batch.items() if key not in unread}
                self.routers.open(batch.get("attention_mask"))
                self.facts.rows = self._rows((), read)
                try:
                    decoder(**{**read, "use_cache": False, **not_balanced(self.model)})
                finally:
                    sums, self.facts.rows = self.routers.close(), None
                assert sums is not None
                counts = sums.counts if counts is None else counts + sums.counts
        assert counts is not None
        return reduced(counts)

    def remove(self) -> None:
        """Restore the model exactly as it was; harmless when called twice. A loss still to go backward is lost."""
        for hook in self._hooks:
            hook.remove()
        self.routers.remove()
        for layer in self.layers:
            if isinstance(forward := layer.__dict__.get("forward"), StreamedForward):
                forward.removed = True
                del layer.forward
        for norm in self._norms:
            del norm.forward
        for config, implementation in self._attention:
            config._attn_implementation_internal = implementation
        for module in self._checkpointing:
            module.gradient_checkpointing = True
        self.tiers.close()
        self._hooks, self._attention, self._norms, self.layers, self._checkpointing = [], [], [], [], set()

    def __enter__(self) -> StreamHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for name, why in REFUSED_OUTPUTS.items():
            if kwargs.get(name):
                raise UnsupportedModelError(f"{name}=True was asked for, but {why}")
        for module in self._checkpointed():  # the node stands in checkpointing's place; both would recompute twice
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
                self._checkpointing.add(module)  # once, however often a trainer turns it on again
        with_labels = kwargs.get("labels") is not None
        if kwargs.get("past_key_values") is None and (with_labels or model.training):
            kwargs = {**kwargs, "use_cache": False}
        self.facts.rows = self._rows(args, kwargs)
        if "position_ids" not in inspect.signature(type(self.model).forward).parameters:
            kwargs = {key: value for key, value in kwargs.items() if key != "position_ids"}  # it was for the rows
        if self._head is not None and with_labels:
            self._head.close()
            self._head.open()
        asked = kwargs.get("output_router_logits")
        if asked is None:
            asked = balances_itself(self.model)
        if self.routers.silent:
            kwargs = {**kwargs, "output_router_logits": False} if asked else kwargs
        elif asked or (self.routers.loss is not None and with_labels):
            self.routers.open(_argument(model, args, kwargs, "attention_mask"))
            kwargs = {**kwargs, "output_router_logits": False}
        return args, kwargs

    def _checkpointed(self) -> Iterator[nn.Module]:
        """What may be told to checkpoint and is streamed instead: not an image tower beside the decoder."""
        yield from _owners(self.model, self.layers)
        for layer in self.layers:
            yield from layer.modules()

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedRows | None:
        """Packed rows, by the rule of ``transformers``: positions that restart, and no padding mask beside them."""
        given = {
            name: _argument(self.model, args, kwargs, name)
            for name in ("attention_mask", "past_key_values", "position_ids")
        }
        if given["attention_mask"] is None and given["past_key_values"] is None:
            rows = PackedRows.of(given["position_ids"])
            if rows is not None:
                return rows
        if tells_of_rows(kwargs):
            raise UnsupportedModelError(
                "cu_seq_lens or seq_idx tell of packed rows, but position_ids do not restart",
                mend="pass position_ids that restart at each row, and no attention_mask",
            )
        return None

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.facts.rows = None
        return self._with_router_loss(self._without_promise(output))

    def _with_router_loss(self, output: Any) -> Any:
        sums = self.routers.close() if self.routers.active else None
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

    def _without_promise(self, output: Any) -> Any:
        if self._head is None or not self._head.active:
            return output
        self._head.close()
        if isinstance(output, tuple):
            return tuple(item for item in output if not isinstance(item, LazyLogits))
        if isinstance(getattr(output, "logits", None), LazyLogits):
            return type(output)(**{key: value for key, value in output.items() if key != "logits"})
        return output


def _argument(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of the model's forward, however it was passed."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return kwargs.get(name, args[names.index(name)] if name in names[: len(args)] else None)


def _owners(model: PreTrainedModel, layers: list[nn.Module]) -> list[PreTrainedModel]:
    """The models around the layers, the outermost first."""
    inside = {id(layer) for layer in layers}
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(id(child) in inside for child in module.modules())
    ]


def _own_attention(model: PreTrainedModel, layers: list[nn.Module]) -> str | None:
    """The attention of layers that do not take it from ``transformers``' ``AttentionInterface``; None for others."""
    owner = _owners(model, layers)[-1]
    return None if owner._can_set_attn_implementation() else str(owner.config._attn_implementation_internal)


def _configs(model: PreTrainedModel, layers: list[nn.Module]) -> list[Any]:
    """The configs that name the attention of the decoder: the ones its layers and their model read, each once."""
    owners: list[Any] = [model.config.get_text_config(decoder=True)]
    owners += [module.config for module in _owners(model, layers)]
    for layer in layers:
        owners += [
            m.config
            for m in layer.modules()
            if hasattr(m, "config") and hasattr(m.config, "_attn_implementation_internal")
        ]
    return list({id(config): config for config in owners}.values())
