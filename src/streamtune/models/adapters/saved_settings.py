"""The settings of saved adapters, ``adapter_config.json``, checked before peft reads and follows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamtune.base.patterns import find_matches
from streamtune.errors import ArgumentError

ENDS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.down_proj", "input_layernorm"]
USUAL = [f"model.layers.{layer}.{end}" for layer in range(32) for end in ENDS]
"""Names to try patterns on where there is no model yet."""
MOST_RANK = 10**5
PEFT_FORM = r"(.*\.)?({})$"
"""The expression that peft makes of a key of ``rank_pattern``."""


def check_saved_settings(
    folder: Path, names: Sequence[str], *, where: str, mend: str = "use a whole copy of it"
) -> None:
    """Read the settings of a folder with adapters, and refuse what peft would trip over or match for minutes.

    Args:
        folder: The folder.
        names: Names of the modules that the patterns are matched with.
        where: The key or the argument that named the folder, for errors.
        mend: The way out where the file cannot be read.

    Raises:
        ArgumentError: A setting is of another type, or a pattern takes too long.
    """
    path = folder / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where=where, mend=mend) from error
    check_adapter_settings(settings, path, names, where=where)


def check_adapter_settings(settings: Any, path: Path, names: Sequence[str] = USUAL, *, where: str) -> None:
    """Refuse settings of adapters of another type than peft's, and patterns that take too long on ``names``.

    Args:
        settings: The content of ``adapter_config.json``.
        path: The file.
        names: Names of modules.
        where: The key or the argument that named the folder.

    Raises:
        ArgumentError: It names the setting.
    """

    def refuse(key: str, wanted: str) -> ArgumentError:
        shown = json.dumps(settings.get(key))[:60] if isinstance(settings, Mapping) else ""
        return ArgumentError(
            f"'{key}' in {path} is {shown}, and must be {wanted}", where=where, mend="correct the file"
        )

    if not isinstance(settings, Mapping):
        raise ArgumentError(f"{path} is not a mapping of settings", where=where, mend="use a whole copy of it")
    for key in ("r", "oft_block_size"):
        if key in settings and not (_is_number(settings[key], whole=True) and 0 <= settings[key] <= MOST_RANK):
            raise refuse(key, f"a whole number up to {MOST_RANK:,}")
    for key in ("lora_alpha", "lora_dropout", "alpha"):
        if key in settings and not _is_number(settings[key]):
            raise refuse(key, "a number")
    for key in ("rank_pattern", "alpha_pattern"):
        given = settings.get(key) or {}
        if not isinstance(given, Mapping) or not all(_is_number(value) for value in given.values()):
            raise refuse(key, "a mapping of patterns to numbers")
        find_matches(list(given), names, where=f"{key} in {path}", how="match", form=PEFT_FORM)
    for key in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters"):
        given = settings.get(key)
        if given is not None and not isinstance(given, str) and not _are_texts(given):
            raise refuse(key, "a text or a list of texts")
        if isinstance(given, str):
            find_matches([given], names, where=f"{key} in {path}", how="fullmatch")
    layers = settings.get("layers_pattern") or []
    forms = [layers] if isinstance(layers, str) else list(layers)
    find_matches(forms, names, where=f"layers_pattern in {path}", how="match", form=r".*\.{}\.(\d+)\.")


def _is_number(value: Any, *, whole: bool = False) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
