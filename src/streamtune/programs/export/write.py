"""Write the exported folder: weights in shards, configuration, tokenizer and model card.

The folder is written as ``OUT.partial``, and renamed to ``OUT`` after the comparison with the trained model. A
folder that fails the comparison is kept as ``OUT.failed``.
"""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from streamtune import __version__, models, train
from streamtune.base import interrupts
from streamtune.base.adapters import base_of, is_adapter_name
from streamtune.base.result_cache import is_open_at, try_lock
from streamtune.base.text import show_size
from streamtune.errors import ArgumentError, RunError
from streamtune.models.quantize import is_quantized, logical_numel
from streamtune.programs.export.check import Differences
from streamtune.programs.export.merge import merged_weights, needs_untying
from streamtune.programs.export.source import TrainedModel
from streamtune.train.staging import free_bytes, remove_path

MARK = ".streamtune-export"
"""Marker file of an incomplete exported folder; it is locked during the export."""


def check_export_folder(out: Path) -> None:
    """Raise an ArgumentError if ``out`` is not a new or empty folder, or ``OUT.partial`` has other files."""
    try:
        is_folder = out.is_dir() and not out.is_symlink()
        taken = any(out.iterdir()) if is_folder else out.exists() or out.is_symlink()
    except OSError as error:
        raise ArgumentError(f"cannot read {out}: {error.strerror}", where="OUT", fix="give a new folder") from error
    if taken:
        what = "a link" if out.is_symlink() else "a folder that is not empty" if is_folder else "a file"
        raise ArgumentError(f"{out} is {what}; nothing is overwritten", where="OUT", fix="give a new folder")
    partial = _sibling_path(out, "partial")
    if os.path.lexists(partial) and not _is_export(partial):
        raise ArgumentError(
            f"{partial} exists and was not written by an export", where="OUT", fix="move it, or give another folder"
        )


def _is_export(partial: Path) -> bool:
    """Return True if the folder has the marker file of an export, or is empty."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    return (partial / MARK).is_file() or not any(partial.iterdir())


@contextmanager
def staging_export(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Context manager: yield ``OUT.partial``; rename it to ``out`` at the end, or remove it on an error.

    Args:
        needed_bytes: Approximate size of the folder, in bytes.

    Raises:
        ArgumentError: Another export is writing to the same folder.
        RunError: The disk is full or not writable.
    """
    partial = _sibling_path(out, "partial")
    lock: int | None = None
    try:
        free = free_bytes(out)
        if needed_bytes > free:
            raise OSError(errno.ENOSPC, "No space left on device")
        lock = _lock_partial(partial, out)
        interrupts.remove_on_signal(str(partial))
        yield partial
        if partial.exists():  # otherwise it was kept as OUT.failed
            if out.is_dir():
                out.rmdir()
            partial.rename(out)
            (out / MARK).unlink()  # last: the marker identifies the folder of a killed export
    except BaseException as error:
        if lock is not None:  # otherwise it belongs to another export
            interrupts.remove_folder(str(partial))
        if _is_disk_error(error):
            if isinstance(error, OSError) and error.errno not in (None, errno.ENOSPC, errno.EDQUOT):
                raise RunError(f"cannot write {out}: {error}", fix="give a writable folder") from error
            raise RunError(
                f"cannot write {out}: {error}; it needs {show_size(needed_bytes)}, "
                f"{show_size(free_bytes(out))} are free",
                fix="free disk space, or give a folder on another disk",
            ) from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _lock_partial(partial: Path, out: Path) -> int:
    """Create an empty ``OUT.partial`` with a locked marker file, and return the file descriptor of the marker.

    Raises:
        ArgumentError: Another export is writing to it.
    """
    lock = -1
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if not _is_export(partial):
            raise FileExistsError(errno.EEXIST, "it was created meanwhile", str(partial))
        lock = os.open(partial / MARK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try_lock(lock)
        if not is_open_at(lock, partial / MARK):  # the export that owned it has ended
            raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile", str(partial / MARK))
        for path in partial.iterdir():
            if path.name != MARK:
                remove_path(path)
    except (BlockingIOError, FileExistsError, FileNotFoundError) as error:
        with suppress(OSError):
            os.close(lock)
        raise ArgumentError(
            f"another export is writing {out}", where="OUT", fix="wait for it to end, or give another folder"
        ) from error
    return lock


def rename_failed_export(partial: Path, out: Path) -> Path:
    """Rename a failed folder or file to ``OUT.failed``, or to the first free ``OUT.failed-N``; return the new path."""
    number, target = 1, _sibling_path(out, "failed")
    while os.path.lexists(target):
        number += 1
        target = _sibling_path(out, f"failed-{number}")
    partial.rename(target)
    if target.is_dir():
        (target / MARK).unlink(missing_ok=True)
    return target


def _sibling_path(out: Path, ending: str) -> Path:
    return out.absolute().with_name(f"{out.absolute().name}.{ending}")


def _is_disk_error(error: BaseException) -> bool:
    from safetensors import SafetensorError

    return isinstance(error, (OSError, SafetensorError))


def write_merged(
    model: nn.Module, tokenizer: Any, folder: Path, *, dtype: torch.dtype | None, shard_bytes: int
) -> None:
    """Write the merged weights of ``model`` module by module, with its configuration and tokenizer.

    Args:
        model: Model with or without adapters; it is not changed.
        tokenizer: Tokenizer with the chat template.
        dtype: Dtype of the written weights; None keeps each weight's dtype.
        shard_bytes: Maximum size of a weight file, in bytes.
    """
    base, untied = base_of(model), needs_untying(model)
    names = _cpu_weights(model, dtype)
    models.write_shards(base, names, folder, shard_bytes, untied=untied)
    _write_configuration(base, folder, dtype, untied=untied)
    models.SavedTokenizer(tokenizer, base).save_pretrained(folder)


def _cpu_weights(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, values in merged_weights(model, dtype=dtype):
        yield name, values.cpu()


def _write_configuration(base: Any, folder: Path, dtype: torch.dtype | None, *, untied: bool) -> None:
    config = copy.deepcopy(base.config)
    for each in {id(each): each for each in (config, config.get_text_config(decoder=True))}.values():
        if untied:
            each.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(base).__name__]
    config.dtype = dtype or base.dtype
    config.save_pretrained(folder)
    models.add_transformers4_names(folder)
    if base.generation_config is not None and base.can_generate():
        with suppress(ValueError):  # an inconsistent generation config is not written
            base.generation_config.save_pretrained(folder)


def merged_size_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the approximate size of the merged weights, in bytes."""
    base = base_of(model)
    size = (dtype or base.dtype).itemsize
    own = [x for name, x in base.named_parameters() if not is_adapter_name(name)]
    return sum(logical_numel(x) * (size if dtype or is_quantized(x) else x.element_size()) for x in own)


def write_adapters(source: Path, tokenizer: Any, folder: Path, base: str | None) -> None:
    """Copy adapters in peft's format, write their tokenizer, and record ``base`` as their base model if given."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(source / name, folder / name)
    for name in (models.LOFTQ_FILE, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if base is not None:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = models.make_path_absolute(base)
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    models.SavedTokenizer(tokenizer).save_pretrained(folder)


# --- the model card ---------------------------------------------------------------------------------------------------


OMITTED_KEYS = frozenset({"model_name_or_path", "model", "tokenizer", "chat_template", "objective", "quantization"})
"""Recipe keys that the model card shows elsewhere, or that contain paths or long texts."""


def model_card(
    trained: TrainedModel,
    *,
    name: str,
    base: str | None,
    weights: str,
    checked: str,
    adapters: bool,
) -> str:
    """Return the text of the model card, ``README.md``.

    Args:
        name: Title of the card.
        base: Model before training; None if it was initialised from a configuration.
        weights: Description of the exported weights.
        checked: Description of the comparison with the trained model.
        adapters: True if the folder has adapters in peft's format.
    """
    head = {"library_name": "peft" if adapters else "transformers", "tags": ["streamtune"]}
    if base is not None and not _is_path(base):
        head["base_model"] = base
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items())
    facts = [
        ("base", _name_without_folders(base) if base else "random weights, from a configuration"),
        ("weights", weights),
    ]
    facts += _model_card_fields(trained)
    facts += [("checked", checked)]
    table = "".join(f"| {key} | {_format_table_cell(value)} |\n" for key, value in facts if value)
    settings = {key: value for key, value in trained.settings.items() if key not in OMITTED_KEYS and value is not None}
    recipe = "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
    block = f"\n## Recipe\n\n```yaml\n{recipe}```\n" if recipe else ""
    return (
        f"---\n{front}---\n\n# {name}\n\nWritten by `streamtune export` from the files of its run.\n\n"
        f"| | |\n|---|---|\n{table}{block}"
    )


def _model_card_fields(trained: TrainedModel) -> list[tuple[str, str]]:
    if trained.run is None:
        return []
    facts = []
    recipe = trained.loaded.recipe if trained.loaded is not None else None
    if recipe is not None:
        facts.append(("objective", f"{recipe.objective}, {recipe.finetuning_type}"))
        facts.append(("data", ", ".join(_name_without_folders(each.path) for each in recipe.datasets)))
    records = train.read_records(trained.run.metrics)
    steps = [r for r in records if "loss" in r and (trained.step is None or r.get("step", 0) <= trained.step)]
    held = [r for r in records if "eval_loss" in r and (trained.step is None or r.get("step", 0) <= trained.step)]
    if steps:
        tokens = sum(int(r.get("tokens", 0)) for r in steps)
        facts.append(("steps", f"{steps[-1].get('step', len(steps)):,}, on {tokens:,} tokens"))
        facts.append(
            ("training loss", f"first {_show_number(steps[0]['loss'])}, last {_show_number(steps[-1]['loss'])}")
        )
    if held:
        facts.append(("held-out loss", f"{_show_number(held[-1]['eval_loss'])} at step {held[-1].get('step')}"))
    versions = trained.identity.get("versions", {})
    if versions:
        facts.append(("trained with", ", ".join(f"{key} {value}" for key, value in versions.items())))
    now = {"streamtune": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    facts.append(("exported with", ", ".join(f"{key} {value}" for key, value in now.items())))
    return facts


def describe_comparison(differences: Differences | None, rows_description: str) -> str:
    """Return a description of the comparison with the trained model, on the rows of ``rows_description``."""
    if differences is None:
        return "no"
    return (
        f"logits compared with the trained model, in fp32 on {rows_description}: relative difference "
        f"{differences.relative:.1e}, median per token {differences.median:.1e} "
        f"(allowed for rounding the weights: {differences.allowed_median:.1e})"
    )


def _show_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and math.isfinite(value) else str(value)


def _name_without_folders(path: str) -> str:
    """Return the last part of a local path, as the rest may contain a user name; keep other names unchanged."""
    return Path(path).name if _is_path(path) else path


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).exists()


def _format_table_cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")
