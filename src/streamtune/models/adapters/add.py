"""Adapters beside frozen weights, of the kinds of ``base/adapters.py``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from streamtune.base.adapters import ADAPTERS, AdapterSpec
from streamtune.base.patterns import find_matches
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.models.adapters import loftq
from streamtune.models.adapters.loftq import LoftqStart
from streamtune.models.adapters.start import add_start, start_from_weights
from streamtune.models.adapters.targets import (
    PEFT_FORM,
    end_names,
    linear_targets,
    low_rank_layers,
    low_rank_targets,
    matching,
    module_names,
    name_experts,
    no_pattern_warnings,
    shared_ends,
)

if TYPE_CHECKING:  # it imports every quantiser there is: two seconds that only adapters are worth
    from peft import PeftModel


def add_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target: Sequence[str] | str = "all-linear",
    seed: int = 0,
) -> PeftModel:
    """Freeze ``model`` and add LoRA; see :class:`AdapterSpec` and :func:`add_adapters`."""
    return add_adapters(model, AdapterSpec(r=r, alpha=alpha, dropout=dropout, target=target), seed=seed)


def add_adapters(
    model: PreTrainedModel, spec: AdapterSpec, *, seed: int = 0, new_tokens: Sequence[int] = ()
) -> PeftModel:
    """Freeze ``model`` and add trainable adapters.

    Args:
        model: The base; changed in place. On ``meta`` no weight is decomposed.
        spec: The adapters. Of kind ``lora_ga`` they change nothing until ``lora_ga.py`` starts them.
        seed: Of their random start. The caller's random state is left as it was.
        new_tokens: Tokens whose rows in the embedding and the head are trained beside the adapters.

    Raises:
        ArgumentError: A name or a pattern matches nothing in this model, a rank is larger than a matrix, or adapters
            of this kind cannot be on its layers.
    """
    adapted = add_unstarted(model, spec, seed, new_tokens)
    if spec.row.start == "peft":
        return adapted
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        if spec.row.constant_start:
            add_start(adapted)
        if spec.row.start == "weights":
            start_from_weights(adapted, spec)
        elif spec.row.start == "quantisation" and next(model.parameters()).device.type != "meta":
            loftq.start_from_quantisation(model, low_rank_layers(adapted))
    return adapted


def loftq_start(spec: AdapterSpec, *, iterations: int, seed: int) -> LoftqStart:
    """Return the change by which a model is quantised for adapters of kind ``loftq``.

    Args:
        spec: The adapters that :func:`add_adapters` will add.
        iterations: Of quantisation and decomposition, for each layer.
        seed: Of the decompositions.
    """

    def layers(model: PreTrainedModel) -> dict[str, tuple[int, float]]:
        with torch.device("meta"):
            adapted = add_unstarted(loftq.on_meta(model), spec, seed, ())
        return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in low_rank_layers(adapted)}

    return LoftqStart(layers, iterations=iterations, seed=seed)


def add_unstarted(model: PreTrainedModel, spec: AdapterSpec, seed: int, new_tokens: Sequence[int]) -> PeftModel:
    """Add adapters with peft's own first values, whatever the kind starts from."""
    from peft import get_peft_config, get_peft_model

    _check_patterns(spec, model)
    options = spec.peft_options(seed)
    options |= {"task_type": "CAUSAL_LM", "modules_to_save": list(spec.whole) or None}
    matching(spec.whole, [name for name, _ in model.named_modules() if name], "modules_to_save", "module", model)
    if spec.row.low_rank:
        options |= low_rank_targets(model, spec)
        options["trainable_token_indices"] = (
            {name: list(new_tokens) for name in end_names(model)} if new_tokens else None
        )
        options["ensure_weight_tying"] = bool(shared_ends(model, spec.whole))
    else:
        options["target_modules"] = linear_targets(model, spec)
        _refuse_for(spec, model, new_tokens)
        _check_rank([model.get_submodule(name) for name in options["target_modules"]], spec)
    config = get_peft_config(options)
    name_experts(model, spec, config)
    if spec.row.columns:
        from streamtune.models.adapters.paca import train_columns

        train_columns(model, config)
    with torch.random.fork_rng(), no_pattern_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # and sets it, for Conv1D
        torch.manual_seed(seed)
        try:
            adapted: PeftModel = get_peft_model(model, config)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ArgumentError(
                f"peft cannot put adapters of kind {spec.kind} on {type(model).__name__}: {error}",
                where="adapter_type",
                mend="name other layers in lora_target, or write adapter_type: lora",
            ) from error
    if spec.row.low_rank:
        _check_ranks(dict(low_rank_layers(adapted)), spec)
    if spec.row.divides_by_rows:
        _check_lengths(adapted)
    return adapted


def _refuse_for(spec: AdapterSpec, model: PreTrainedModel, new_tokens: Sequence[int]) -> None:
    """Refuse what only adapters of low rank can be together with.

    Raises:
        ArgumentError: It says what.
    """
    *others, last = (name for name, kind in ADAPTERS.items() if kind.low_rank)
    mend = f"write adapter_type: {', '.join(others)} or {last}"
    if new_tokens:
        raise ArgumentError(
            f"rows of new tokens are trained beside adapters of low rank, not of kind {spec.kind}",
            where="adapter_type",
            mend=f"{mend}, or add no tokens",
        )
    for name in shared_ends(model, spec.whole):
        raise ArgumentError(
            f"{name} shares its weight, and a copy of it beside adapters of kind {spec.kind} would not",
            where="modules_to_save",
            mend=f"{mend}, or leave it out",
        )


def _check_patterns(spec: AdapterSpec, model: nn.Module) -> None:
    """Refuse what is no pattern, and what would take too long on the names of this model.

    Raises:
        ArgumentError: It names it.
    """
    names = module_names(model)
    for where, patterns in (("lora_rank_pattern", spec.ranks), ("lora_alpha_pattern", spec.alphas)):
        find_matches(list(patterns), names, where=where, how="match", form=PEFT_FORM)


def _check_ranks(layers: Mapping[str, Any], spec: AdapterSpec) -> None:
    """Refuse ranks that are larger than a matrix, and patterns that match no adapter.

    Raises:
        ArgumentError: It names the matrix, or the layers there are.
    """
    for where, patterns in (("lora_rank_pattern", spec.ranks), ("lora_alpha_pattern", spec.alphas)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in layers):
                known = sorted({name.rsplit(".", 1)[-1] for name in layers})
                raise ArgumentError(
                    f"no layer with an adapter matches '{pattern}'",
                    where=where,
                    mend=did_you_mean(pattern, known) or f"there are: {', '.join(known)}",
                )
    too_small = {
        name: (layer, most, rank)
        for name, layer in layers.items()
        if (rank := layer.r[layer.active_adapters[0]]) > (most := _most(layer, spec))
    }
    # Among all linear layers there may be small ones, such as gates of one row, which are none of the user's choice.
    if isinstance(spec.target, str) and spec.row.largest_rank == "named" and len(too_small) < len(layers):
        named = [name for name in too_small if any(re.match(rf"(.*\.)?({pattern})$", name) for pattern in spec.ranks)]
        too_small = {name: too_small[name] for name in named}
    for name, (layer, most, rank) in too_small.items():
        last, part = name.rsplit(".", 1)[-1], "half of " if spec.row.largest_rank == "half" else ""
        raise ArgumentError(
            f"adapters of rank {rank} are larger than {part}the matrix of {name}, "
            f"{layer.out_features:,} x {layer.in_features:,}",
            where="lora_r",
            mend=f"write lora_r: {most}, or lora_rank_pattern: {{{last}: {most}}}",
        )


def _check_lengths(adapted: Any) -> None:
    """Refuse DoRA on a weight with a row of zeros, by whose length it divides.

    Raises:
        ArgumentError: It names the layer.
    """
    for name, layer in low_rank_layers(adapted):
        lengths = layer.lora_magnitude_vector["default"].weight
        zeros = 0 if lengths.is_meta else int((lengths == 0).sum())
        if zeros:
            raise ArgumentError(
                f"DoRA divides by the length of each row of a weight, and {zeros:,} of {name} are all zeros (such as "
                "that of a padding token)",
                where="adapter_type",
                mend="leave it out of lora_target, or write adapter_type: lora",
            )


def _check_rank(layers: Sequence[Any], spec: AdapterSpec) -> None:
    """Refuse a rank, or a number of reflections, above the size of every layer: nothing is gained by it.

    Raises:
        ArgumentError: It names the size.
    """
    if spec.row.even_rank and spec.r % 2:
        raise ArgumentError(
            f"reflections start in pairs that undo each other, and {spec.r} is odd: the model would start as another",
            where="lora_r",
            mend=f"write lora_r: {spec.r + 1}",
        )
    if spec.row.largest_rank != "largest":
        return
    sizes = [(layer.in_features, layer.out_features) for layer in layers if hasattr(layer, "in_features")]
    most = max((size for pair in sizes for size in pair), default=spec.r)
    if spec.r > most:
        raise ArgumentError(
            f"adapters of rank {spec.r:,} are larger than every matrix: the largest has {most:,} rows or columns",
            where="lora_r",
            mend="write a rank far below that, such as 16",
        )


def _most(layer: Any, spec: AdapterSpec) -> int:
    columns, singular = layer.in_features, min(layer.in_features, layer.out_features)
    most: int = {"columns": columns, "half": singular // 2}.get(spec.row.largest_rank, singular)
    return most
