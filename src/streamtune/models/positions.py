"""Rotary positions of a model beyond its pretrained length: scaled, or of another base frequency.

Position interpolation is ``linear`` (Chen et al., arXiv 2306.15595), YaRN ``yarn`` (Peng et al., arXiv 2309.00071),
``llama3`` the scaling by wavelength of Llama 3.1, ``dynamic`` NTK scaling with a base for each length, and ``longrope``
divides each frequency by a number of its own (Ding et al., arXiv 2402.13753). ``transformers`` makes the frequencies
from the configuration, which is saved with the model, so that inference engines use the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from streamtune.errors import ArgumentError

ORIGINAL = "original_max_position_embeddings"

WRITTEN = {
    "rope_type", "type", "factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
    "high_freq_factor", "short_factor", "long_factor", "alpha",
}  # fmt: skip
"""Keys of a scaling that another one replaces. Others stay, such as ``rope_theta`` and the sections of image models."""

OF_THE_TYPE = {"truncate", "mscale", "mscale_all_dim", "short_mscale", "long_mscale"}
"""Keys that recipes cannot write: a scaling of the same type keeps them (gpt-oss, DeepSeek)."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The bands of Llama 3.1."""


@dataclass(frozen=True)
class RopeChange:
    """A change to the rotary positions of a configuration.

    Attributes:
        scaling: ``rope_type`` (``default``, ``linear``, ``yarn``, ``llama3``, ``dynamic`` or ``longrope``), ``factor``
            and other keys that ``transformers`` reads for that type. The default factor is the smallest whole number
            with which ``length`` tokens are reached. None leaves the scaling.
        theta: Base of the frequencies. None leaves it.
        length: Tokens of the longest row. A configuration without scaling is said to reach so far.
    """

    scaling: Mapping[str, Any] | None = field(default=None)
    theta: float | None = None
    length: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> RopeChange | None:
        """Return the change that settings ask for by ``rope_scaling`` and ``rope_theta``; None without them.

        ``max_length`` of the settings is the length.
        """
        scaling, theta = settings.get("rope_scaling"), settings.get("rope_theta")
        if scaling is None and theta is None:
            return None
        return cls(scaling, theta, int(settings.get("max_length") or 0))

    def apply(self, config: Any) -> None:
        """Change a configuration in place. A configuration that has been changed so stays as it is.

        Layers with a window keep their rotation if the configuration has another one for them (Gemma 3).
        """
        key = "rope_scaling" if self.scaling is not None else "rope_theta"
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "rope_parameters", None)
        if not kinds:
            raise ArgumentError(
                f"a model of type '{text.model_type}' has no rotary positions to change",
                where=key,
                fix=f"delete '{key}', or choose a model with rotary positions",
            )
        nested = all(isinstance(kind, dict) for kind in kinds.values())
        old = kinds.get("full_attention") if nested else kinds
        if old is None:
            raise ArgumentError(
                f"this model has the rotations {', '.join(kinds)}, and none of layers with full attention",
                where=key,
                fix=f"delete '{key}', and write rope_parameters into its config.json",
            )
        new, reached = self._changed(old, text.max_position_embeddings)
        for name in ("short_factor", "long_factor"):
            if name in new:
                new[name] = _factors(text, name, new[name])
        if ORIGINAL in new and hasattr(text, ORIGINAL):  # Phi-3's configuration has it twice
            setattr(text, ORIGINAL, new[ORIGINAL])
        text.rope_parameters = {**kinds, "full_attention": new} if nested else new
        text.max_position_embeddings = reached
        try:
            text.validate_rope()
        except Exception as error:  # the validators raise types of their own
            reason = " ".join(str(error).split())
            raise ArgumentError(
                f"transformers refuses these positions: {reason}", where=key, fix="fix the value"
            ) from error

    def _changed(self, old: Mapping[str, Any], limit: int) -> tuple[dict[str, Any], int]:
        """Return the new parameters of the rotation, and the number of positions that the model then reaches.

        ``old`` are the parameters it has, ``limit`` the positions that it reaches now.
        """
        theta = {} if self.theta is None else {"rope_theta": self.theta}
        was = old.get("rope_type", "default")
        if self.scaling is None:
            return {**old, **theta}, max(limit, self.length) if was == "default" else limit
        given = {name: value for name, value in self.scaling.items() if value is not None}
        kind = given["rope_type"]
        replaced = WRITTEN if kind == was else WRITTEN | OF_THE_TYPE
        kept = {name: value for name, value in old.items() if name not in replaced}
        if kind == "default":
            return {**kept, **theta, "rope_type": kind}, max(limit, self.length)
        made_for = round(limit / old["factor"]) if was == "linear" else limit
        made_for = given.pop("original_max_position_embeddings", None) or old.get(ORIGINAL) or made_for
        factor = float(given.setdefault("factor", float(max(1, math.ceil(self.length / made_for)))))
        # The linear scaling does not depend on the length that the model was made for, and has no key for it; the
        # dynamic one takes the positions of the configuration for it.
        original = {} if kind in ("linear", "dynamic") else {ORIGINAL: made_for}
        new = {**kept, **theta, **(LLAMA3 if kind == "llama3" else {}), **given, **original}
        return new, made_for if kind == "dynamic" else round(made_for * factor)


def position_limit(config: Any) -> int | None:
    """Return the number of positions that a model reaches, scaling included; None if it does not say."""
    limit = _written_limit(config)
    for kind in _scalings(config) if limit is not None else ():
        # Some configurations give the positions before the scaling, as Qwen's pages advise for YaRN.
        original, factor = kind.get(ORIGINAL), kind.get("factor")
        if kind["rope_type"] == "dynamic":
            original = _written_limit(config)
        if isinstance(original, int) and factor:
            limit = max(limit or 0, round(original * float(factor)))
    return limit


def pretrained_positions(config: Any) -> int | None:
    """Return the number of positions that a model was pretrained for, without scaling; None if it does not say."""
    limit = _written_limit(config)
    for kind in _scalings(config) if limit is not None else ():
        if isinstance(original := kind.get(ORIGINAL), int):
            return original
        if kind["rope_type"] == "linear":
            return round((limit or 0) / kind["factor"])
    return limit


def _factors(config: Any, name: str, given: Sequence[float]) -> list[float]:
    """Return the factors of ``longrope`` as a list; refuse another number of factors than of frequencies."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    partial = parameters.get("full_attention", parameters).get("partial_rotary_factor", 1.0)
    if len(given) != (count := int(size * partial) // 2):
        raise ArgumentError(
            f"'{name}' has {len(given)} number{'s' if len(given) > 1 else ''}, and this model has {count} frequencies "
            f"(heads of {size})",
            where="rope_scaling",
            fix=f"write {count} numbers",
        )
    return [float(each) for each in given]


def _written_limit(config: Any) -> int | None:
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def _scalings(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of the rotations that are scaled."""
    kinds = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = bool(kinds) and all(isinstance(kind, dict) for kind in kinds.values())
    return [kind for kind in (kinds.values() if nested else [kinds]) if kind.get("rope_type", "default") != "default"]


def check_positions(model: Any, longest: int, *, training: bool = True) -> str | None:
    """Refuse rows of ``longest`` tokens if they exceed the positions of ``model``, scaling included.

    Rotary and other computed positions go on past ``max_position_embeddings``, though the model was not trained on
    them; a learnt table ends there. Rows that are not for ``training`` may use unseen rotary positions: then a warning
    is returned.
    """
    limit = position_limit(model.config)
    if limit is None or longest <= limit:
        return None
    words = model.get_input_embeddings()
    for name, module in model.named_modules():
        table = isinstance(module, torch.nn.Embedding) and module is not words
        if table and limit <= module.num_embeddings <= limit + 2:  # some keep two rows for padding
            raise ArgumentError(
                f"the longest row has {longest:,} tokens; the model's table of positions ({name}) ends at {limit:,}",
                where="max_length",
                fix=f"set max_length: {limit} and overlength: split, or choose a model with rotary positions",
            )
    what = f"the longest row has {longest:,} tokens; the model was made for {limit:,} (max_position_embeddings)"
    original = pretrained_positions(model.config)
    if original is not None and original < limit:
        what = (
            f"the longest row has {longest:,} tokens; the model was made for {original:,} positions, and the scaling "
            f"of its configuration or of rope_scaling reaches {limit:,}"
        )
    if not training or not getattr(model.config.get_text_config(decoder=True), "rope_parameters", None):
        return f"{what}: it goes on, at positions it has never seen"
    factor = math.ceil(longest / (original or limit))
    raise ArgumentError(
        what,
        where="max_length",
        fix=f"extend its positions: rope_scaling: {{rope_type: yarn, factor: {factor}}}; or train "
        f"at positions it has never seen: rope_scaling: {{rope_type: default}}; or set max_length: {limit}",
    )


def describe_positions(model: Any, longest: int) -> str | None:
    """Return one line for rows of ``longest`` tokens beyond the positions of a model, with a fix; else None.

    The model may have no weights.
    """
    try:
        return check_positions(model, longest)
    except ArgumentError as error:
        return f"{error.what}: a run refuses such rows; {error.fix}"
