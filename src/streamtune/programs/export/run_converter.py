"""Run llama.cpp's converter on models with a new vocabulary: ``python FILE CONVERTER ...``.

llama.cpp knows pre-tokenizer patterns by name. Its converter finds the name from a hash of an encoded text, which
works only for the vocabularies of released models. This program instead recognises two patterns in
``tokenizer.json``. It imports only the standard library and the converter.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def pre_tokenizer_name(tokenizer: dict[str, Any]) -> str | None:
    """Return llama.cpp's name for the pre-tokenizer pattern of a parsed ``tokenizer.json``; None if unknown."""
    before = tokenizer.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    if tokenizer.get("normalizer") is not None or tokenizer.get("model", {}).get("type") != "BPE":
        return None
    plain = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    return {str([BYTES]): "gpt-2", str([DIGITS, BYTES]): "smollm"}.get(str(_sort_keys(plain)))


def _sort_keys(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pre-tokenizer steps with sorted keys, so that their text can be compared."""
    order = [*BYTES, *DIGITS]
    return [{key: step[key] for key in sorted(step, key=lambda key: order.index(key) if key in order else 99)}
            for step in steps]  # fmt: skip


def _register_pre_tokenizer(folder: Path) -> None:
    """Make the converter use the name from ``tokenizer.json`` if it does not know the tokenizer's hash."""
    try:
        name = pre_tokenizer_name(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        models: Any = import_module("conversion.base").TextModel
        known = models.get_vocab_base_pre
    except (OSError, ValueError, ImportError, AttributeError):
        return  # no such file, or another version of the converter: it reports the unknown hash
    if name is None:
        return

    def named(self: Any, tokenizer: Any) -> str:
        try:
            found: str = known(self, tokenizer)
        except NotImplementedError:
            return name
        return found

    models.get_vocab_base_pre = named


if __name__ == "__main__":
    converter = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(converter.parent))  # as if the converter had been run directly
    local = converter.parent / "gguf-py"
    if local.is_dir():
        sys.path.insert(1, str(local))
    _register_pre_tokenizer(Path(sys.argv[1]))
    runpy.run_path(str(converter), run_name="__main__")
