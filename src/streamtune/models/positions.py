"""Rotary positions (RoPE) beyond a model's pretrained length: scaled, or with another base frequency.

    linear    position interpolation (Chen et al., arXiv 2306.15595)
    yarn      YaRN (Peng et al., arXiv 2309.00071)
    llama3    scaling by wavelength, as in Llama 3.1
    dynamic   NTK scaling, with a base that depends on the length
    longrope  each frequency divided by its own factor (Ding et al., arXiv 2402.13753)

``transformers`` computes the frequencies from the configuration. The configuration is saved with the model, so that
inference servers use the same frequencies.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from streamtune.engine.hf_names import NUMBERS_AXES, TEXT_AND_AXES, TOKEN_TYPES
from streamtune.errors import ArgumentError

ORIGINAL = "original_max_position_embeddings"

SCALING_KEYS = {
    "rope_type", "type", "factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
    "high_freq_factor", "short_factor", "long_factor", "alpha",
}  # fmt: skip
"""Keys that a new scaling replaces. Other keys stay, such as ``rope_theta`` and the sections of image models."""

SAME_TYPE_KEYS = {"truncate", "mscale", "mscale_all_dim", "short_mscale", "long_mscale"}
"""Keys that recipes cannot set; they stay if the new scaling has the same type (gpt-oss, DeepSeek)."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Frequency bands of Llama 3.1, the defaults of ``llama3``."""


@dataclass(frozen=True)
class RopeChange:
    """A change to the rotary positions (RoPE) in a model configuration.

    Attributes:
        scaling: ``rope_type`` (``default``, ``linear``, ``yarn``, ``llama3``, ``dynamic`` or ``longrope``), ``factor``
            and other keys that ``transformers`` reads for this type. The default factor is the smallest integer with
            which positions reach ``length``. None keeps the model's scaling.
        theta: Base of the frequencies. None keeps the model's base.
        length: Number of tokens of the longest row. Without a scaling, the position limit is raised to ``length``.
    """

    scaling: Mapping[str, Any] | None = field(default=None)
    theta: float | None = None
    length: int = 0

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RopeChange | None:
        """Return the change for the keys ``rope_scaling``, ``rope_theta`` and ``max_length`` of a recipe.

        None if neither ``rope_scaling`` nor ``rope_theta`` is set.
        """
        scaling, theta = settings.get("rope_scaling"), settings.get("rope_theta")
        if scaling is None and theta is None:
            return None
        return cls(scaling, theta, int(settings.get("max_length") or 0))

    def apply(self, config: Any) -> None:
        """Change a configuration in place; a second call changes nothing.

        The rotary parameters of sliding-window layers do not change if the configuration has them separately (Gemma 3).

        Raises:
            ArgumentError: The model has no rotary positions, or transformers rejects the new values.
        """
        key = "rope_scaling" if self.scaling is not None else "rope_theta"
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "rope_parameters", None)
        if not kinds:
            raise ArgumentError(
                f"a model of type '{text.model_type}' has no rotary positions to change",
                where=key,
                fix=f"remove '{key}', or choose a model with rotary positions",
            )
        nested = all(isinstance(kind, dict) for kind in kinds.values())
        old = kinds.get("full_attention") if nested else kinds
        if old is None:
            raise ArgumentError(
                f"this model has rope_parameters for {', '.join(kinds)}, but not for full_attention",
                where=key,
                fix=f"remove '{key}', and set rope_parameters in its config.json",
            )
        new, reached = self._make_rope_parameters(old, text.max_position_embeddings)
        for name in ("short_factor", "long_factor"):
            if name in new:
                new[name] = _longrope_factors(text, name, new[name])
        if ORIGINAL in new and hasattr(text, ORIGINAL):  # Phi-3's configuration has it twice
            setattr(text, ORIGINAL, new[ORIGINAL])
        text.rope_parameters = {**kinds, "full_attention": new} if nested else new
        text.max_position_embeddings = reached
        try:
            text.validate_rope()
        except Exception as error:  # the validators raise types of their own
            reason = " ".join(str(error).split())
            raise ArgumentError(
                f"transformers rejects these rope_parameters: {reason}", where=key, fix="fix the value"
            ) from error

    def _make_rope_parameters(self, old: Mapping[str, Any], old_limit: int) -> tuple[dict[str, Any], int]:
        """Return new ``rope_parameters`` in place of ``old``, and the number of positions that the model then supports.

        ``old_limit`` is the number of positions that the model supports with ``old``.
        """
        theta = {} if self.theta is None else {"rope_theta": self.theta}
        old_type = old.get("rope_type", "default")
        if self.scaling is None:
            return {**old, **theta}, max(old_limit, self.length) if old_type == "default" else old_limit
        settings = {name: value for name, value in self.scaling.items() if value is not None}
        kind = settings["rope_type"]
        replaced = SCALING_KEYS if kind == old_type else SCALING_KEYS | SAME_TYPE_KEYS
        others = {name: value for name, value in old.items() if name not in replaced}
        if kind == "default":
            return {**others, **theta, "rope_type": kind}, max(old_limit, self.length)
        pretrained_limit = round(old_limit / old["factor"]) if old_type == "linear" else old_limit
        pretrained_limit = (
            settings.pop("original_max_position_embeddings", None) or old.get(ORIGINAL) or pretrained_limit
        )
        factor = float(settings.setdefault("factor", float(max(1, math.ceil(self.length / pretrained_limit)))))
        # Linear scaling does not depend on the pretrained length, so it has no key; dynamic scaling reads the length
        # from max_position_embeddings.
        original = {} if kind in ("linear", "dynamic") else {ORIGINAL: pretrained_limit}
        new = {**others, **theta, **(LLAMA3 if kind == "llama3" else {}), **settings, **original}
        return new, pretrained_limit if kind == "dynamic" else round(pretrained_limit * factor)


def position_limit(config: Any) -> int | None:
    """Return how many positions a model supports, with rotary scaling; None if its configuration has no limit."""
    limit = _configured_limit(config)
    for kind in _scaled_rope_parameters(config) if limit is not None else ():
        # In some configurations max_position_embeddings excludes the scaling, as Qwen's pages advise for YaRN.
        original, factor = kind.get(ORIGINAL), kind.get("factor")
        if kind["rope_type"] == "dynamic":
            original = _configured_limit(config)
        if isinstance(original, int) and factor:
            limit = max(limit or 0, round(original * float(factor)))
    return limit


def pretrained_position_limit(config: Any) -> int | None:
    """Return how many positions a model was pretrained for, without rotary scaling; None if its config has no limit."""
    limit = _configured_limit(config)
    for kind in _scaled_rope_parameters(config) if limit is not None else ():
        if isinstance(original := kind.get(ORIGINAL), int):
            return original
        if kind["rope_type"] == "linear":
            return round((limit or 0) / kind["factor"])
    return limit


def _longrope_factors(config: Any, key: str, factors: Sequence[float]) -> list[float]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    partial = parameters.get("full_attention", parameters).get("partial_rotary_factor", 1.0)
    if len(factors) != (count := int(size * partial) // 2):
        raise ArgumentError(
            f"'{key}' has {len(factors)} number{'s' if len(factors) > 1 else ''}; this model has {count} frequencies "
            f"(head size {size})",
            where="rope_scaling",
            fix=f"write {count} numbers",
        )
    return [float(factor) for factor in factors]


def _configured_limit(config: Any) -> int | None:
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def _scaled_rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Return the dicts of ``rope_parameters`` that scale positions: at most one, or one per kind of layer."""
    kinds = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = bool(kinds) and all(isinstance(kind, dict) for kind in kinds.values())
    return [kind for kind in (kinds.values() if nested else [kinds]) if kind.get("rope_type", "default") != "default"]


def check_positions(model: Any, longest_row: int, *, training: bool = True) -> str | None:
    """Raise an ArgumentError if rows of ``longest_row`` tokens exceed the positions that ``model`` supports.

    Rotary and other computed positions continue past ``max_position_embeddings``, although the model was not trained on
    them; learned position embeddings end there. A warning is returned instead if positions are computed but not rotary,
    or if ``training`` is False.
    """
    limit = position_limit(model.config)
    if limit is None or longest_row <= limit:
        return None
    if (name := _position_table_name(model)) is not None:
        raise ArgumentError(
            f"the longest row has {longest_row:,} tokens; the model's learned position embeddings ({name}) end at "
            f"{limit:,}",
            where="max_length",
            fix=f"set max_length: {limit} and overlength: split, or choose a model with rotary positions",
        )
    what = f"the longest row has {longest_row:,} tokens; the model supports {limit:,} (max_position_embeddings)"
    original = pretrained_position_limit(model.config)
    if original is not None and original < limit:
        what = (
            f"the longest row has {longest_row:,} tokens; the model was pretrained for {original:,} positions, and the "
            f"scaling in its configuration or in rope_scaling reaches {limit:,}"
        )
    if not training or not getattr(model.config.get_text_config(decoder=True), "rope_parameters", None):
        return f"{what}: the model continues at positions that it was not trained on"
    factor = math.ceil(longest_row / (original or limit))
    raise ArgumentError(
        what,
        where="max_length",
        fix=f"scale the positions: rope_scaling: {{rope_type: yarn, factor: {factor}}}; or train "
        f"at new positions: rope_scaling: {{rope_type: default}}; or set max_length: {limit}",
    )


def position_table_limit(model: Any) -> int | None:
    """Return the number of positions at which learned position embeddings end; None if positions are computed."""
    return position_limit(model.config) if _position_table_name(model) is not None else None


def _position_table_name(model: Any) -> str | None:
    limit, embedding = position_limit(model.config), model.get_input_embeddings()
    if limit is None:
        return None
    for name, module in model.named_modules():
        table = isinstance(module, torch.nn.Embedding) and module is not embedding
        if table and limit <= module.num_embeddings <= limit + 2:  # some tables have two more rows, for padding
            return str(name)
    return None


def position_warning(model: Any, longest_row: int) -> str | None:
    """Return a warning with a fix if rows of ``longest_row`` tokens exceed the positions of a model; else None."""
    try:
        return check_positions(model, longest_row)
    except ArgumentError as error:
        return f"{error.what}: a run refuses such rows; {error.fix}"


def packed_image_positions(
    model: Any, input_ids: Tensor, position_ids: Tensor, images: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``position_ids`` of packed rows in models that number the tokens of images along time, height and width.

    Each row has the positions that the model gives to the row alone. The result is an argument of the model's call; it
    is empty for other models, which read the positions in each row as they are.

    Args:
        model: Model, which may be on ``meta``.
        input_ids: [B, T] token ids of packed sequences.
        position_ids: [B, T] positions, counted from 0 in each row.
        images: Inputs of the model for the images of the sequences, such as ``image_grid_thw``.

    Raises:
        ArgumentError: The positions have another number of axes, so that the model has no room for the rows' borders.
    """
    owner = next((module for module in model.modules() if hasattr(type(module), NUMBERS_AXES)), None)
    if owner is None:
        return {}
    starts = (position_ids.flatten() == 0).nonzero()[:, 0].tolist()
    lengths = torch.tensor([*starts, position_ids.numel()]).diff().tolist()

    def by_row(values: Tensor) -> Tensor:
        return pad_sequence(list(values.flatten().split(lengths)), batch_first=True)

    number = getattr(owner, NUMBERS_AXES)
    known = {name: value for name, value in images.items() if name in inspect.signature(number).parameters}
    known |= {name: by_row(value) for name, value in known.items() if name in TOKEN_TYPES}
    mask = by_row(torch.ones_like(input_ids))
    axes, _ = number(input_ids=by_row(input_ids), attention_mask=mask, **known)
    positions = torch.cat([position_ids[None], axes[:, mask.bool()].unflatten(1, tuple(position_ids.shape))])
    if len(positions) != TEXT_AND_AXES:
        raise ArgumentError(
            f"rows with images are not packed for {type(model).__name__}: its positions have {len(axes)} axes, not 3",
            where="packing",
            fix="delete the line",
        )
    return {"position_ids": positions}
