"""Tiny models by the names that other libraries' tests give to those on the hub, and the families that are run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.reducer import build
from tests.suites.sources import BUILD

__all__ = ["FAMILIES", "family_of", "local_model"]

FAMILIES = (
    "llama", "qwen3", "gemma3_text", "gpt2", "gpt_oss", "mixtral", "gpt_neox", "phi3", "olmo2", "mistral",
    "qwen2", "gemma2", "granite", "opt", "bloom", "gptj", "falcon", "codegen", "phi", "starcoder2",
    "cohere2", "smollm3", "glm4", "ministral", "qwen3_moe", "olmoe", "granitemoe", "stablelm", "gemma", "mamba2",
)  # fmt: skip
"""Families whose models transformers' common tests are run for, the usual ones first."""

NAMES = {"opt": "opt", "gpt2": "gpt2", "gptj": "gptj", "llama": "llama", "qwen2": "qwen2", "gemma3": "gemma3_text",
         "mistral": "mistral"}  # fmt: skip
"""Beginnings of what follows ``tiny-`` in a model's name on the hub, and their families."""


def family_of(name: str) -> str:
    """Return the family of a model named as on the hub.

    Raises:
        ValueError: It is none of those that stand in for the hub.
    """
    rest = re.sub(r"^tiny-(random|dummy)-", "", name.rpartition("/")[2].lower())
    found = next((family for start, family in NAMES.items() if rest.startswith(start)), None)
    if found is None:
        raise ValueError(f"no model stands in for {name}")
    return found


def local_model(name: str) -> Path:
    """Return the folder of a tiny model of the family that a name tells, made once."""
    family = family_of(name)
    folder = BUILD / "models" / name.rpartition("/")[2]
    if not (folder / "config.json").exists():
        build(family).eval().save_pretrained(folder)
    return folder
