"""The model card: what the run's own files say of the model, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

from streamtune import __version__, train
from streamtune.programs.export.check import Differences
from streamtune.programs.export.source import TrainedModel

LEFT_OUT = frozenset({"model_name_or_path", "model", "tokenizer", "chat_template", "objective", "quantization"})
"""Keys of a recipe that the card has elsewhere, or that hold paths and long texts."""


def model_card(
    trained: TrainedModel,
    *,
    name: str,
    base: str | None,
    weights: str,
    check: Differences | None,
    compared: str,
    adapters: bool,
) -> str:
    """Return the text of ``README.md``.

    Args:
        trained: The model and its run.
        name: The title.
        base: The model that training started from, or None where it was made from a configuration.
        weights: What the folder holds, in words.
        check: The comparison with the model as it trained; None where it was left out.
        compared: The rows of the comparison, in words.
        adapters: True if the folder holds adapters in peft's format.
    """
    head = {"library_name": "peft" if adapters else "transformers", "tags": ["streamtune"]}
    if base is not None and not _is_path(base):
        head["base_model"] = base
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items())
    facts = [("base", _shown(base) if base else "random weights, from a configuration"), ("weights", weights)]
    facts += _run_facts(trained)
    facts += [("checked", _checked(check, compared))]
    table = "".join(f"| {key} | {_cell(value)} |\n" for key, value in facts if value)
    settings = {key: value for key, value in trained.settings.items() if key not in LEFT_OUT and value is not None}
    recipe = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
    block = f"\n## Recipe\n\n```yaml\n{recipe}```\n" if recipe else ""
    return (
        f"---\n{front}---\n\n# {name}\n\nWritten by `streamtune export` from the files of its run.\n\n"
        f"| | |\n|---|---|\n{table}{block}"
    )


def _run_facts(trained: TrainedModel) -> list[tuple[str, str]]:
    """Return objective, data, steps, losses and versions, as far as the run recorded them."""
    if trained.run is None:
        return []
    facts = []
    recipe = trained.loaded.recipe if trained.loaded is not None else None
    if recipe is not None:
        facts.append(("objective", f"{recipe.objective}, {recipe.finetuning_type}"))
        facts.append(("data", ", ".join(_shown(each.path) for each in recipe.datasets)))
    records = train.read_records(trained.run.metrics)
    steps = [r for r in records if "loss" in r and (trained.step is None or r.get("step", 0) <= trained.step)]
    held = [r for r in records if "eval_loss" in r and (trained.step is None or r.get("step", 0) <= trained.step)]
    if steps:
        tokens = sum(int(r.get("tokens", 0)) for r in steps)
        facts.append(("steps", f"{steps[-1].get('step', len(steps)):,}, on {tokens:,} tokens"))
        facts.append(("training loss", f"first {_number(steps[0]['loss'])}, last {_number(steps[-1]['loss'])}"))
    if held:
        facts.append(("held-out loss", f"{_number(held[-1]['eval_loss'])} at step {held[-1].get('step')}"))
    versions = trained.identity.get("versions", {})
    if versions:
        facts.append(("trained with", ", ".join(f"{key} {value}" for key, value in versions.items())))
    now = {"streamtune": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    facts.append(("exported with", ", ".join(f"{key} {value}" for key, value in now.items())))
    return facts


def _checked(check: Differences | None, compared: str) -> str:
    if check is None:
        return "no"
    return (
        f"logits of this folder against the model as it trained, in fp32 on {compared}: relative difference "
        f"{check.relative:.1e}, median of a token {check.median:.1e} (one rounding of the weights allows "
        f"{check.allowed_median:.1e})"
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and math.isfinite(value) else str(value)


def _shown(path: str) -> str:
    """Return a name as it is, and of a path its last part: the others say who trained it and where."""
    return Path(path).name if _is_path(path) else path


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).exists()


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")
