"""Write a recipe as YAML, which a run directory keeps and which repeats the run."""

from __future__ import annotations

from typing import Any

import yaml

from streamtune.recipe.yaml import parse_scalar

from .schema import Recipe

__all__ = ["dump_recipe"]


def dump_recipe(recipe: Recipe, *, comment: str = "") -> str:
    """Return the recipe as YAML, with every default written out.

    Args:
        recipe: What to write; keys without a value are left out.
        comment: Lines to put above it.

    Returns:
        YAML that ``load_recipe`` reads back to an equal recipe.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    # mode="json" turns tuples into lists.
    values = recipe.model_dump(mode="json", exclude_none=True)
    return head + yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which our reader would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if any(character in text for character in "\r\x85\u2028\u2029"):  # line breaks a reader would fold
        style = '"'
    elif "\n" in text:
        style = "|"
    elif parse_scalar(text) != text:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
