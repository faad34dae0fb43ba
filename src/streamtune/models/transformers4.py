"""Make saved folders also readable by ``transformers`` 4, which many inference servers use.

``transformers`` 5 writes the RoPE base and scaling, the dtype and the tokenizer's class under new names. Version 4
ignores the new names without a warning: it uses a RoPE base of 10,000 for a model with a base of 1,000,000. So the old
names are written in addition to the new names; version 5 reads both. A name with which version 5 would read other
rotary parameters is left out.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase

from streamtune.engine.hf_names import HUB_FILE, hf_internal

TOKENIZER_CONFIG = "tokenizer_config.json"
AS_TRANSFORMERS: dict[str, Any] = {"indent": 2, "sort_keys": True, "ensure_ascii": False}
"""Arguments of ``json.dumps`` that give the layout in which transformers writes JSON files."""

NEW_CLASS = "TokenizersBackend"
"""Class in ``transformers`` 5 of a tokenizer that ``tokenizer.json`` describes completely."""
OLD_CLASS = "PreTrainedTokenizerFast"
"""Class in ``transformers`` 4 of a tokenizer that ``tokenizer.json`` describes completely."""

OLD_KEYS = ("add_bos_token", "add_eos_token")
"""Settings that ``transformers`` 5 does not write. Without them, the classes of version 4 use their own defaults."""

THETA: tuple[tuple[str, str, str], ...] = (
    # start of the model type, old name of the base for full attention, and for windowed attention
    ("gemma3", "rope_theta", "rope_local_base_freq"),
    ("modernbert", "global_rope_theta", "local_rope_theta"),
    ("gpt_neox", "rotary_emb_base", ""),
    ("", "rope_theta", ""),
)
SHARE: tuple[tuple[str, str], ...] = (("gpt_neox", "rotary_pct"), ("", "partial_rotary_factor"))
"""Start of the model type, and the old name of the fraction of a head that is rotated."""
ORIGINAL = "original_max_position_embeddings"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys for the number of experts: version 5 writes one of these keys, version 4 may read another."""
LAYERS: dict[str, tuple[str, dict[str, str]]] = {
    "granitemoehybrid": ("layer_types", {"linear_attention": "mamba", "full_attention": "attention"}),
    **dict.fromkeys(("zamba", "zamba2"), ("layers_block_type", {"linear_attention": "mamba"})),
}
"""By model type: the key that lists the kinds of layers, and the old kind for each new kind in the list."""


def add_transformers4_names(folder: Path) -> None:
    """Add the keys that transformers 4 reads to the ``config.json`` in a saved folder."""
    path = folder / "config.json"
    config = with_transformers4_names(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, **AS_TRANSFORMERS) + "\n", encoding="utf-8")


def with_transformers4_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the key names of transformers 4 added, also in nested configurations."""
    settings = {
        key: with_transformers4_names(value)
        if isinstance(value, Mapping) and key.endswith("_config")
        else _decode_infinities(value)
        for key, value in config.items()
    }
    model_type = str(config.get("model_type", ""))
    for new, old_name in _expert_count_keys(model_type):
        if new in settings:
            settings.setdefault(old_name, settings[new])
    if model_type in LAYERS:
        key, words = LAYERS[model_type]
        settings |= (
            {key: [words.get(kind, kind) for kind in settings[key]]} if isinstance(settings.get(key), list) else {}
        )
    if isinstance(config.get("dtype"), str):
        settings.setdefault("torch_dtype", config["dtype"])
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope:
        return settings
    kinds = [value for value in rope.values() if isinstance(value, Mapping)]
    nested = any(isinstance(rope.get(name), Mapping) for name in ("full_attention", "sliding_attention"))
    full = rope.get("full_attention") or kinds[0] if nested else rope
    theta, windowed = next(names for start, *names in THETA if model_type.startswith(start))
    share = next(name for start, name in SHARE if model_type.startswith(start))
    old: dict[str, Any] = {theta: full.get("rope_theta"), share: full.get("partial_rotary_factor")}
    if nested and windowed and isinstance(rope.get("sliding_attention"), Mapping):
        old[windowed] = rope["sliding_attention"].get("rope_theta")
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if set(scaling) - {"rope_type"} or scaling.get("rope_type", "default") != "default":
        old["rope_scaling"] = scaling
        if scaling.get("rope_type") == "longrope" and ORIGINAL in scaling:
            old[ORIGINAL] = scaling[ORIGINAL]
        if model_type.startswith(("phi3", "phi4")):  # their classes in version 4 accept only these three fields
            old["rope_scaling"] = {
                "type": scaling.get("rope_type"),
                **{key: scaling[key] for key in ("short_factor", "long_factor") if key in scaling},
            }
    old = {key: value for key, value in old.items() if value is not None}
    if nested and not _reads_same_rope(model_type, settings, {**settings, **old}):
        old.pop("rope_scaling", None)
        old = old if _reads_same_rope(model_type, settings, {**settings, **old}) else {}
    return {**settings, **old}


def _reads_same_rope(model_type: str, settings: Mapping[str, Any], more: Mapping[str, Any]) -> bool:
    """Return True if version 5 reads the same rotary parameters from ``more`` as from ``settings``.

    With parameters for each kind of layer, some classes (Gemma 4) replace them all by an old ``rope_scaling``.
    """
    if model_type not in CONFIG_MAPPING:
        return True
    try:
        with warnings.catch_warnings(action="ignore"):  # the old names are deprecated
            # Copies: a class may complete the parameters in place.
            first, second = (CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(x))) for x in (settings, more))
        return bool(first.rope_parameters == second.rope_parameters)
    except Exception:  # the validators of each configuration class raise types of their own
        return False


def _expert_count_keys(model_type: str) -> Iterator[tuple[str, str]]:
    """Yield (saved key, other key) for the keys of a configuration that mean the number of experts."""
    for alias, written in (CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}).items():
        if alias in EXPERTS and written in EXPERTS:
            yield written, alias


def _decode_infinities(value: Any) -> Any:
    """Return a JSON value in which infinities are floats; transformers 5 writes objects that version 4 cannot read."""
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return [_decode_infinities(item) for item in value] if isinstance(value, list) else value


def transformers4_tokenizer_config(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a ``tokenizer_config.json`` of transformers 5 with the class and settings that version 4 reads.

    The class comes from the files from which ``tokenizer`` was loaded.
    """
    settings, base = dict(config), _loaded_tokenizer_config(tokenizer)
    named = base.get("tokenizer_class")
    known = isinstance(named, str) and named != NEW_CLASS
    if settings.get("tokenizer_class") == NEW_CLASS:
        settings["tokenizer_class"] = named if known else OLD_CLASS
    if known:
        settings |= {key: base[key] for key in OLD_KEYS if key in base and key not in settings}
    if isinstance(settings.get("extra_special_tokens"), list):  # in version 4 a dict of names, as in multimodal models
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if isinstance(named_tokens := base.get("extra_special_tokens"), Mapping) and named_tokens:
        settings["extra_special_tokens"] = dict(named_tokens)
    return settings


def _loaded_tokenizer_config(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    name = tokenizer.name_or_path
    if not name:
        return {}
    try:
        path = hf_internal(HUB_FILE)(name, TOKENIZER_CONFIG, local_files_only=True)
        found = json.loads(Path(path).read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
