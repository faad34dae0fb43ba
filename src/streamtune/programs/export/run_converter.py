"""llama.cpp's converter with the pre-tokenizers of new vocabularies: ``python FILE CONVERTER ...``.

llama.cpp has every pre-tokenizer pattern in its code, under a name that its converter finds by the hash of one encoded
text, so only for released vocabularies. A newly trained vocabulary has another hash with the same pattern. Here
tokenizer.json names two patterns. Run as a program by :mod:`streamtune.programs.export.elsewhere`; imports only the
standard library and the converter.
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


def pattern_of(tokenizer: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer pattern, or None; ``tokenizer`` is ``tokenizer.json``."""
    before = tokenizer.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    if tokenizer.get("normalizer") is not None or tokenizer.get("model", {}).get("type") != "BPE":
        return None
    plain = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    return {str([BYTES]): "gpt-2", str([DIGITS, BYTES]): "smollm"}.get(str(_sorted(plain)))


def _sorted(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps with their keys in the order of :data:`BYTES` and :data:`DIGITS`."""
    order = [*BYTES, *DIGITS]
    return [{key: step[key] for key in sorted(step, key=lambda key: order.index(key) if key in order else 99)}
            for step in steps]  # fmt: skip


def _name_patterns(folder: Path) -> None:
    """If llama.cpp does not recognise the tokenizer's hash, name its pre-tokenizer from ``tokenizer.json``."""
    try:
        name = pattern_of(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        models: Any = import_module("conversion.base").TextModel
        known = models.get_vocab_base_pre
    except (OSError, ValueError, ImportError, AttributeError):
        return  # no such file, or another version of the converter, which reports the unknown hash itself
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
    sys.path.insert(0, str(converter.parent))  # as if it had been run itself
    local = converter.parent / "gguf-py"
    if local.is_dir():
        sys.path.insert(1, str(local))
    _name_patterns(Path(sys.argv[1]))
    runpy.run_path(str(converter), run_name="__main__")
