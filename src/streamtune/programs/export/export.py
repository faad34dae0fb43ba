"""Export a trained model: load it as in training, merge, write, load the written model, compare.

Memory never contains two models. Of the trained model, only the logits of a few rows are kept for the comparison.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from streamtune import models
from streamtune.base.adapters import ADAPTERS, base_of
from streamtune.errors import ArgumentError, RunError
from streamtune.programs.export.check import (
    AsTrained,
    ComparedRow,
    Differences,
    Doing,
    choose_rows,
    compare_with_trained,
    measure_trained,
)
from streamtune.programs.export.gguf_and_hub import check_convertible, check_gguf, check_push, push_folder, write_gguf
from streamtune.programs.export.gguf_check import GgufComparison, compare_gguf
from streamtune.programs.export.source import (
    Notify,
    TrainedModel,
    find_trained,
    is_trained_base,
    load_trained,
    resolve_base,
)
from streamtune.programs.export.write import (
    check_export_folder,
    describe_comparison,
    merged_size_bytes,
    model_card,
    rename_failed_export,
    staging_export,
    write_adapters,
    write_merged,
)
from streamtune.run.device import choose_device, prepare_libraries

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``streamtune export``."""

    checkpoint: str | None = None
    """Name or step of a checkpoint; None means the run's final model."""
    merge: bool = True
    """True to merge adapters into their base model; False to export the adapters alone."""
    onto: str = "trained"
    """Base weights to merge QLoRA adapters into: ``trained`` (dequantised) or ``original`` (before quantisation)."""
    base: str | None = None
    """Base model of the adapters; None means the base model that the run records."""
    dtype: str | None = None
    """Dtype of the written weights, a key of :data:`DTYPES`. None: the dtype of the stored weights, or of the adapters'
    base model in training."""
    max_shard_size: int = 5 * 10**9
    """Maximum size of each safetensors file, in bytes."""
    check: bool = True
    """True to compare the written model with the trained model."""
    device: str = "cpu"
    """Device of the comparison."""
    gguf: str | None = None
    """Weight type of an additional GGUF file; None writes none."""
    llama_cpp: Path | None = None
    """Folder of llama.cpp's source; None looks for the converter on PATH."""
    push: str | None = None
    """Hub repository to upload to; None uploads nothing."""
    private: bool = True


@dataclass(frozen=True)
class ExportReport:
    """Files that an export wrote, and the result of the comparison with the trained model."""

    source: str
    out: str
    kind: str
    """Kind of the exported model: ``full``, ``merged`` or ``adapters``."""
    loader: str
    """Name of the class of ``transformers`` or ``peft`` that loads the written folder."""
    base: str | None
    dtype: str
    quantization: str | None
    onto: str | None
    """Option ``onto`` if QLoRA adapters were merged; None otherwise."""
    trained_base: bool | None
    """True if the adapters were trained on this base, False if on another base; None if unknown."""
    weights: str
    """Description of the exported weights."""
    files: list[str]
    bytes: int
    rows: str
    """Description of the compared rows."""
    check: Differences | None
    text_before: str
    text_after: str
    gguf: str | None = None
    """Path of the GGUF file, if one was written."""
    gguf_check: GgufComparison | None = None
    """Comparison of the GGUF file with the exported model."""
    pushed: str | None = None

    def to_json(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if key not in ("check", "gguf_check")}
        converted = None if self.gguf_check is None else {**asdict(self.gguf_check), "passes": self.gguf_check.passes}
        check = None
        if self.check is not None:
            check = {key: value for key, value in asdict(self.check).items() if key not in ("before", "after")}
            check["passes"] = self.check.passes
        return {**found, "check": check, "gguf_check": converted}


def export_model(
    model_name_or_path: str,
    out: Path,
    options: ExportOptions,
    *,
    notify: Notify = lambda text: None,
    doing: Doing = lambda text: nullcontext(),
) -> ExportReport:
    """Write the model of a run, a checkpoint or a folder to ``out``.

    Args:
        out: Folder to write; new or empty.
        notify: Called with each note to show to the user.
        doing: Called with a message before slow work; returns a context manager that shows the message.

    Raises:
        ArgumentError: The model cannot be exported with these options; nothing is written.
        RunError: The written model differs from the trained model (it is kept as ``OUT.failed``), or writing failed.
    """
    check_export_folder(out)
    prepare_libraries(choose_device(options.device))
    converter = check_gguf(options.gguf, options.llama_cpp) if options.gguf else None
    if options.push:
        check_push(options.push)
    with doing("reading the run"):
        trained = find_trained(model_name_or_path, checkpoint=options.checkpoint, notify=notify)
    _check_options(trained, options, notify)
    base = resolve_base(trained, options.base, notify)
    same_base = is_trained_base(trained, options.base)
    quantization = trained.quantization if options.onto == "trained" else None
    with doing("loading the trained model"):
        model, tokenizer = load_trained(
            trained, device=options.device, base=options.base, quantization=quantization, notify=notify
        )
    _check_model(model, trained, options)
    if converter is not None:
        with doing("testing llama.cpp's converter on configuration and vocabulary"):
            check_convertible(base_of(model).config, tokenizer, converter)
    merges = trained.adapters and options.merge
    own: torch.dtype = base_of(model).dtype
    loader = models.loader_class_name(model, adapters=bool(trained.adapters and not merges))
    dtype = DTYPES[options.dtype] if options.dtype is not None and DTYPES[options.dtype] != own else None
    rounded_to = dtype or (own if merges else None)
    rows = choose_rows(trained, model, tokenizer, notify) if options.check else None
    as_trained = None
    if rows is not None:
        as_trained = measure_trained(
            model, rows.rows, rows.prompt, dtype=rounded_to, all_weights=dtype is not None, doing=doing
        )
        _warn_if_rounding_hides_adapters(as_trained, notify)
    needed = merged_size_bytes(model, dtype) if merges or not trained.adapters else 0
    with staging_export(out, needed) as partial:
        with doing(f"writing {out}"):
            if trained.adapters and not merges:
                write_adapters(Path(trained.folder), tokenizer, partial, base)
            else:
                write_merged(model, tokenizer, partial, dtype=dtype, shard_bytes=options.max_shard_size)
        del model
        gc.collect()
        check = None
        if as_trained is not None:
            check = _compare_written(as_trained, partial, trained, options, quantization, doing)
            if not check.passes:
                failed = rename_failed_export(partial, out)
                raise RunError(
                    f"the written model differs from the trained model: {check.why_failed}",
                    where=str(failed),
                    fix="inspect the kept folder; --no-merge exports the adapters alone"
                    if merges
                    else "inspect the kept folder",
                )
        weights = _describe_weights(trained, merges, options, dtype or own, quantization)
        card = model_card(
            trained,
            name=out.resolve().name,
            base=base or _initial_model_name(trained),
            weights=weights,
            checked=describe_comparison(check, rows.origin if rows is not None else ""),
            adapters=trained.adapters and not merges,
        )
        (partial / "README.md").write_text(card, encoding="utf-8")
    gguf = gguf_check = None
    if converter is not None:
        assert options.gguf is not None
        with doing("converting to GGUF"):
            gguf = write_gguf(out, options.gguf, converter)
        if rows is not None:
            gguf_check = _compare_gguf(gguf, out, tokenizer, rows.rows, options.device, doing)
    pushed = None
    if options.push:
        with doing(f"uploading to {options.push}"):
            pushed = push_folder(out, options.push, private=options.private)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return ExportReport(
        source=trained.describe(),
        out=str(out),
        kind="merged" if merges else "adapters" if trained.adapters else "full",
        loader=loader,
        base=base,
        dtype=str(dtype or own).removeprefix("torch."),
        quantization=trained.quantization,
        onto=options.onto if merges and trained.quantization else None,
        trained_base=same_base,
        weights=weights,
        files=[path.relative_to(out).as_posix() for path in files],
        bytes=sum(path.stat().st_size for path in files),
        rows=rows.origin if rows is not None else "",
        check=check,
        text_before=tokenizer.decode(as_trained.written) if as_trained is not None else "",
        text_after=tokenizer.decode(check.after) if check is not None else "",
        gguf=None if gguf is None else str(gguf),
        gguf_check=gguf_check,
        pushed=pushed,
    )


def _check_options(trained: TrainedModel, options: ExportOptions, notify: Notify) -> None:
    if trained.trusts_code or _has_code(Path(trained.folder)):
        raise ArgumentError(
            f"{trained.folder} needs its own Python code (trust_remote_code), which an export does not write",
            where="RUN",
            fix="copy the whole folder, with its code",
        )
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ArgumentError(f"--dtype: unknown dtype '{options.dtype}'", fix=f"choose from {', '.join(DTYPES)}")
    if not trained.adapters:
        for asked, name in ((not options.merge, "--no-merge"), (options.base is not None, "--base"),
                            (options.onto == "original", "--onto")):  # fmt: skip
            if asked:
                raise ArgumentError(f"{name} needs adapters, but {trained.folder} has none",
                                    where=name, fix="leave it out")  # fmt: skip
        return
    if not options.merge and (options.dtype is not None or options.gguf or options.onto == "original"):
        raise ArgumentError(
            "--no-merge cannot be used with --dtype, --gguf or --onto: adapters are copied unchanged",
            where="--no-merge",
            fix="leave these options or --no-merge out",
        )
    if not options.merge and trained.base is None and options.base is None:
        raise ArgumentError(
            "the base model was built from a configuration, so exported adapters could not name a base model",
            where="--no-merge",
            fix="leave --no-merge out, or give a base model: --base PATH",
        )
    if options.onto == "original" and trained.quantization is None:
        notify("--onto original changes nothing: the base was not quantised during training")
    name = str(trained.settings.get("adapter_type"))
    if options.onto == "original" and name in ADAPTERS and ADAPTERS[name].start == "quantisation":
        raise ArgumentError(
            f"{name} adapters correct the base's quantisation error and do not fit the original base",
            where="--onto",
            fix="leave --onto out: the adapters are merged into the dequantised base",
        )
    if options.onto == "original" and trained.quantization is not None:
        notify(
            f"the adapters were trained on a base quantised to {trained.quantization}; merged into the original base "
            "they give a different model, to which the losses of the run do not apply"
        )
    if trained.base is None and options.base is None:
        versions = trained.identity.get("versions", {})
        if versions.get("torch") not in (None, torch.__version__):
            notify(
                f"the base is initialised again from its seed with torch {torch.__version__}; training used torch "
                f"{versions['torch']}, so the random weights may differ"
            )


def _has_code(folder: Path) -> bool:
    try:
        return '"auto_map"' in (folder / "config.json").read_text(encoding="utf-8")
    except OSError:
        return False


def _check_model(model: Any, trained: TrainedModel, options: ExportOptions) -> None:
    """Raise an ArgumentError if the base model is quantised, but neither to nf4 nor to int8."""
    kind = models.quantization_kind(base_of(model))
    if kind not in (None, "nf4", "int8"):
        raise ArgumentError(
            f"export cannot dequantise the checkpoint {options.base or trained.base or trained.folder} ({kind})",
            where="RUN",
            fix="give the unquantised checkpoint with --base, or --no-merge" if trained.adapters else "copy the folder",
        )


def _warn_if_rounding_hides_adapters(as_trained: AsTrained, notify: Notify) -> None:
    rounding = float(as_trained.rounding_errors.median())
    if 0 < as_trained.effect < rounding:
        notify(
            f"merging in this dtype loses the effect of the adapters: they change logits by {as_trained.effect:.1e}, "
            f"rounding the weights by {rounding:.1e}; use --dtype float32 or --no-merge"
        )


def _compare_written(
    as_trained: AsTrained,
    folder: Path,
    trained: TrainedModel,
    options: ExportOptions,
    quantization: str | None,
    doing: Doing,
) -> Differences:
    """Load the written model and compare it; adapters are loaded onto their base model as in training."""
    with doing("loading the written model"):
        written: Any
        if trained.adapters and not options.merge:
            copy = TrainedModel(str(folder), str(folder), True, trained.run, trained.loaded, trained.identity)
            written, _ = load_trained(copy, device=options.device, base=options.base, quantization=quantization)
        else:
            written = _load_written(folder, options.device)
    return compare_with_trained(as_trained, written, doing=doing)


def _load_written(folder: Path, device: str) -> Any:
    from transformers import AutoConfig

    auto_class = models.auto_class_of(AutoConfig.from_pretrained(folder))
    written, info = auto_class.from_pretrained(folder, output_loading_info=True)
    lost = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info.get(kind, ())]
    if lost:
        raise RunError(f"the written model has missing or additional weights: {', '.join(map(str, lost[:4]))}")
    return written.to(device).eval()


def _compare_gguf(
    file: Path, folder: Path, tokenizer: Any, rows: Sequence[ComparedRow], device: str, doing: Doing
) -> GgufComparison:
    """Compare the GGUF file with the exported model.

    Raises:
        RunError: The models differ. The file is moved out of the folder, to ``FILE.failed``.
    """
    with doing("loading the written model"):
        model = _load_written(folder, device)
    found = compare_gguf(file, model, tokenizer, rows, doing=doing)
    if not found.passes:
        failed = rename_failed_export(file, folder.absolute().parent / file.name)
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise RunError(
            f"the GGUF file differs from the exported model: {found.problems[0]}{more}",
            where=str(failed),
            fix=f"inspect the kept file; {folder} is complete; --no-check skips the comparison",
        )
    return found


def _describe_weights(
    trained: TrainedModel, merges: bool, options: ExportOptions, dtype: torch.dtype, quantization: str | None
) -> str:
    name = str(dtype).removeprefix("torch.")
    if not trained.adapters:
        return f"whole model, {name}"
    if not merges:
        on = f", trained on a base quantised to {trained.quantization}" if trained.quantization else ""
        return f"adapters alone{on}"
    if quantization is not None:
        return f"adapters merged into the base of training: quantised to {quantization}, dequantised to {name}"
    if trained.quantization is not None:
        return (
            f"adapters trained on a base quantised to {trained.quantization}, merged into the unquantised base: not "
            f"the trained model, {name}"
        )
    return f"adapters merged into their base, {name}"


def _initial_model_name(trained: TrainedModel) -> str | None:
    """Return the name of the model before full fine-tuning; None for adapters or if unknown."""
    if trained.adapters or trained.loaded is None:
        return None
    return trained.loaded.recipe.model_name_or_path
