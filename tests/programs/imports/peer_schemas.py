"""Keys of other trainers' recipes and their defaults, read from the source of the trainers without running it.

``peer_keys.json`` keeps what this module reads. ``python -m tests.programs.imports.peer_schemas FOLDER`` writes it
anew, from a folder in which the packages ``axolotl``, ``llamafactory`` and ``swift`` lie beside their
``*.dist-info``, and from the installed TRL.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("peer_keys.json")

ROOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "axolotl": ("axolotl", ("AxolotlInputConfig",)),
    "llamafactory": (
        "llamafactory",
        ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "GeneratingArguments"),
    ),
    "swift": ("ms_swift", ("SftArguments", "RLHFArguments", "PretrainArguments")),
}
"""Trainer -> its distribution, and the classes whose fields are the keys of a recipe."""

FOLDERS = {
    "axolotl": ("utils/schemas", "integrations"),
    "llamafactory": ("hparams",),
    "swift": ("arguments", "trainers/arguments.py", "rlhf_trainers/arguments.py", "rlhf_trainers/args_mixin.py"),
}
"""Trainer -> the parts of its package that define those classes."""

PEERS = list(ROOTS) if os.environ.get("STREAMTUNE_PEERS") else []
"""Trainers whose packages lie in the folder that STREAMTUNE_PEERS names."""

UNSAID = "..."
"""Default that is computed, or that the source does not say in one literal."""

Keys = dict[str, Any]


class Source:
    """The classes of a package, by name."""

    def __init__(self, package: Path, parts: tuple[str, ...]) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.plugins: list[str] = []
        for part in parts:
            place = package / part
            for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                if part == "integrations" and path.name != "args.py":
                    continue
                own = [
                    node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
                ]
                self.classes |= {node.name: node for node in own if node.name not in self.classes}
                if part == "integrations":
                    inner = {name for node in own for line in node.body for name in _names(line)}
                    self.plugins += [node.name for node in own if node.name not in inner]

    def fields(self, name: str, seen: frozenset[str] = frozenset()) -> Keys:
        """Return the fields of a class and its bases, with their defaults; those of a group are ``group.field``."""
        node = self.classes.get(name)
        if node is None:
            return _installed_fields(name)
        found: Keys = {}
        for base in reversed(node.bases):
            found |= self.fields(base.id, seen) if isinstance(base, ast.Name) else {}
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            field = line.target.id
            if field.startswith("_") or field == "model_config" or "ClassVar" in ast.unparse(line.annotation):
                continue
            found |= dict.fromkeys([field, *_aliases(line.value)], _default(line.value))
            if self._is_pydantic(name):
                for inner in self._groups(line.annotation):
                    if inner not in seen and inner != name:
                        within = self.fields(inner, seen | {inner})
                        found |= {f"{field}.{key}": value for key, value in within.items()}
        return found

    def _is_pydantic(self, name: str) -> bool:
        """Return True where a class of the package lies on pydantic's model, directly or through its bases."""
        node = self.classes.get(name)
        if node is None:
            return name == "BaseModel"
        return any(isinstance(base, ast.Name) and self._is_pydantic(base.id) for base in node.bases)

    def _groups(self, annotation: ast.expr) -> Iterator[str]:
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name) and self._is_pydantic(node.id):
                yield node.id


def _names(line: ast.stmt) -> Iterator[str]:
    """Yield the names in the annotation of a field."""
    for node in ast.walk(line.annotation) if isinstance(line, ast.AnnAssign) else ():
        if isinstance(node, ast.Name):
            yield node.id


def _aliases(value: ast.expr | None) -> list[str]:
    """Return the other name of a field of pydantic's, under which a file may give it."""
    given = value.keywords if isinstance(value, ast.Call) else []
    return [str(item.value.value) for item in given if item.arg == "alias" and isinstance(item.value, ast.Constant)]


def _default(value: ast.expr | None) -> Any:
    """Return the default of a field that is one literal."""
    if isinstance(value, ast.Call):
        given = next((item.value for item in value.keywords if item.arg == "default"), None)
        value = given if given is not None else value.args[0] if value.args else None
    try:
        found = ast.literal_eval(value) if value is not None else UNSAID
    except ValueError:
        return UNSAID
    return found if isinstance(found, str | int | float | bool | None) else list(found) or []


def _experimental(name: str) -> Any:
    """Return a module of TRL that warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"trl.experimental.{name}")


def _installed_fields(name: str) -> Keys:
    """Return the fields of a dataclass of transformers or TRL that a trainer's class lies on."""
    import transformers
    import trl

    if name in ("HfSeq2SeqTrainingArguments", "BaseTrainingArguments", "Seq2SeqTrainingArguments"):
        return dataclass_fields(transformers.Seq2SeqTrainingArguments)
    if name in ("HfTrainingArguments", "TrainingArguments"):
        return dataclass_fields(transformers.TrainingArguments)
    for module in (trl, *map(_experimental, ("cpo", "gkd", "kto", "orpo"))):
        if hasattr(module, name.removeprefix("Hf")) and name.endswith("Config"):
            return dataclass_fields(getattr(module, name.removeprefix("Hf")))
    return {}


def dataclass_fields(kind: Any) -> Keys:
    """Return the fields of an installed dataclass that a recipe can set, with their defaults."""
    found: Keys = {}
    for field in dataclasses.fields(kind):
        if field.init and not field.name.startswith("_"):
            said = isinstance(field.default, str | int | float | bool | None) and not hasattr(field.default, "value")
            found[field.name] = field.default if said else str(getattr(field.default, "value", UNSAID))
    return found


def installed_trl() -> Keys:
    """Return the keys of the installed TRL, of all commands together."""
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    cpo, orpo, kto = map(_experimental, ("cpo", "orpo", "kto"))

    # Those of SFTConfig win where commands differ; ``of_trl`` has each.
    kinds = (GRPOScriptArguments, trl.ScriptArguments, trl.ModelConfig, cpo.CPOConfig, orpo.ORPOConfig, kto.KTOConfig)
    found: Keys = {}
    for kind in (*kinds, trl.GRPOConfig, trl.DPOConfig, trl.SFTConfig):
        found |= dataclass_fields(kind)
    return found


def keys_of(trainer: str, folder: Path) -> tuple[str, Keys]:
    """Return the version of a trainer and the keys of its recipes, from a folder that has its package."""
    distribution, roots = ROOTS[trainer]
    (info,) = folder.glob(f"{distribution}-*.dist-info")
    source = Source(folder / trainer, FOLDERS[trainer])
    found: Keys = {}
    for root in (*roots, *source.plugins):
        found |= source.fields(root)
    return info.name.removeprefix(f"{distribution}-").removesuffix(".dist-info"), found


def kept() -> dict[str, dict[str, Any]]:
    """Return the kept lists: trainer -> version and keys."""
    read: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())
    return read


def main(folder: Path) -> None:
    """Write the lists anew."""
    lists = {"trl": {"version": metadata.version("trl"), "keys": installed_trl()}}
    for trainer in ROOTS:
        version, keys = keys_of(trainer, folder)
        lists[trainer] = {"version": version, "keys": keys}
    lines = []
    for trainer, entry in sorted(lists.items()):
        keys = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(entry["keys"].items()))
        lines.append(f'"{trainer}": {{\n  "version": "{entry["version"]}",\n  "keys": {{\n{keys}\n  }}\n}}')
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
