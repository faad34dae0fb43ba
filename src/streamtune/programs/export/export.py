"""Export of a trained model: load as in training, merge, write, load the written model, compare.

Never are two models in memory: only logits of a few rows are kept of the trained model, and modules are merged one at a
time.
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
from streamtune.programs.export.check import AsTrained, Differences, Doing, choose_rows, compare, measure
from streamtune.programs.export.elsewhere import check_convertible, check_gguf, check_push, push_folder, write_gguf
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
    check_target,
    describe_check,
    keep_failed,
    model_card,
    staged,
    write_adapters,
    write_merged,
    written_bytes,
)
from streamtune.run.device import choose_device, prepare_libraries

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Settings of an export."""

    checkpoint: str | None = None
    """name or step of a checkpoint, in place of the run's final model"""
    merge: bool = True
    """merge adapters; False exports them alone"""
    onto: str = "trained"
    """``trained``: the dequantised base of training; ``original``: the base before quantisation"""
    base: str | None = None
    """base of adapters in place of the run's"""
    dtype: str | None = None
    """one of :data:`DTYPES`; None is the dtype of training"""
    max_shard_size: int = 5 * 10**9
    """most bytes of a file"""
    check: bool = True
    """compare the written model with the trained model"""
    device: str = "cpu"
    """device of the comparison"""
    gguf: str | None = None
    """type of an additional GGUF file"""
    llama_cpp: Path | None = None
    """folder of llama.cpp"""
    push: str | None = None
    """repository on the hub to upload to"""
    private: bool = True


@dataclass(frozen=True)
class ExportReport:
    """The result of an export."""

    source: str
    out: str
    kind: str
    """``full``, ``merged`` or ``adapters``."""
    base: str | None
    dtype: str
    quantization: str | None
    onto: str | None
    """``trained`` or ``original``, for a merged model"""
    trained_base: bool | None
    """False if the adapters trained on another base; None if unknown"""
    weights: str
    """content of the folder, in words"""
    files: list[str]
    bytes: int
    rows: str
    """rows of the comparison, in words"""
    check: Differences | None
    text_before: str
    text_after: str
    gguf: str | None = None
    """path of the GGUF file"""
    gguf_check: GgufComparison | None = None
    """comparison of the GGUF file with the written model"""
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
    given: str,
    out: Path,
    options: ExportOptions,
    *,
    notify: Notify = lambda text: None,
    doing: Doing = lambda text: nullcontext(),
) -> ExportReport:
    """Write the model of a run, a checkpoint or a folder to ``out``.

    Args:
        given: Run, checkpoint or folder.
        out: New or empty folder.
        options: Settings of the export.
        notify: Callback for messages to the user, one sentence each.
        doing: Returns a context that shows a message during a long step.

    Raises:
        ArgumentError: The request is impossible; nothing is written.
        RunError: The written model differs from the trained model and is kept as ``OUT.failed``; or writing failed.
    """
    check_target(out)
    prepare_libraries(choose_device(options.device))
    converter = check_gguf(options.gguf, options.llama_cpp) if options.gguf else None
    if options.push:
        check_push(options.push)
    with doing("reading the run"):
        trained = find_trained(given, checkpoint=options.checkpoint, notify=notify)
    _check(trained, options, notify)
    base = resolve_base(trained, options.base, notify)
    same_base = is_trained_base(trained, options.base)
    quantization = trained.quantization if options.onto == "trained" else None
    with doing("loading the model as it trained"):
        model, tokenizer = load_trained(
            trained, device=options.device, base=options.base, quantization=quantization, notify=notify
        )
    _check_model(model, trained, options)
    if converter is not None:
        with doing("asking llama.cpp's converter for the vocabulary"):
            check_convertible(base_of(model).config, tokenizer, converter)
    merges = trained.adapters and options.merge
    own: torch.dtype = base_of(model).dtype
    dtype = DTYPES[options.dtype] if options.dtype is not None and DTYPES[options.dtype] != own else None
    rounded_to = dtype or (own if merges else None)
    rows = choose_rows(trained, model, tokenizer, notify) if options.check else None
    kept = None
    if rows is not None:
        kept = measure(model, rows.rows, rows.prompt, dtype=rounded_to, everything=dtype is not None, doing=doing)
        _tell_effect(kept, notify)
    needed = written_bytes(model, dtype) if merges or not trained.adapters else 0
    with staged(out, needed) as partial:
        with doing(f"writing {out}"):
            if trained.adapters and not merges:
                write_adapters(Path(trained.folder), tokenizer, partial, base)
            else:
                write_merged(model, tokenizer, partial, dtype=dtype, shard_bytes=options.max_shard_size)
        del model
        gc.collect()
        check = None
        if kept is not None:
            check = _compare(kept, partial, trained, options, quantization, doing)
            if not check.passes:
                failed = keep_failed(partial, out)
                raise RunError(
                    f"what was written is not the model that trained: {check.why_not}",
                    where=str(failed),
                    fix="it is kept there to be looked at; --no-merge copies the adapters apart"
                    if merges
                    else "it is kept there to be looked at",
                )
        weights = _describe(trained, merges, options, dtype or own, quantization)
        card = model_card(
            trained,
            name=out.resolve().name,
            base=base or _full_base(trained),
            weights=weights,
            checked=describe_check(check, rows.origin if rows is not None else ""),
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
        text_before=tokenizer.decode(kept.written) if kept is not None else "",
        text_after=tokenizer.decode(check.after) if check is not None else "",
        gguf=None if gguf is None else str(gguf),
        gguf_check=gguf_check,
        pushed=pushed,
    )


def _check(trained: TrainedModel, options: ExportOptions, notify: Notify) -> None:
    """Raise ArgumentError for options that do not fit the model, and for a model with its own code."""
    if trained.trusts_code or _has_code(Path(trained.folder)):
        raise ArgumentError(
            f"{trained.folder} runs Python that comes with it (trust_remote_code), which a folder of weights has not",
            where="RUN",
            fix="copy the folder as it is, with the code beside it",
        )
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ArgumentError(f"--dtype does not know '{options.dtype}'", fix=f"choose from {', '.join(DTYPES)}")
    if not trained.adapters:
        for asked, name in ((not options.merge, "--no-merge"), (options.base is not None, "--base"),
                            (options.onto == "original", "--onto")):  # fmt: skip
            if asked:
                raise ArgumentError(f"{name} is for adapters, and {trained.folder} holds all of its weights",
                                    where=name, fix="leave it out")  # fmt: skip
        return
    if not options.merge and (options.dtype is not None or options.gguf or options.onto == "original"):
        raise ArgumentError(
            "--no-merge copies the adapters as they are",
            where="--no-merge",
            fix="leave --dtype, --gguf and --onto out",
        )
    if not options.merge and trained.base is None and options.base is None:
        raise ArgumentError(
            "the base was made from a configuration and is in no folder, so adapters apart from it have none to name",
            where="--no-merge",
            fix="leave --no-merge out, or name a base: --base PATH",
        )
    if options.onto == "original" and trained.quantization is None:
        notify("the base was not quantised while the adapters trained, so --onto original changes nothing")
    name = str(trained.settings.get("adapter_type"))
    if options.onto == "original" and name in ADAPTERS and ADAPTERS[name].start == "quantisation":
        raise ArgumentError(
            f"adapters of kind {name} make up for what quantisation took from the base, and the original one lacks "
            "nothing",
            where="--onto",
            fix="leave --onto out: they are merged into the base as they trained on it",
        )
    if options.onto == "original" and trained.quantization is not None:
        notify(
            f"the adapters trained on the base in {trained.quantization}; merged into the original one they make "
            "another model than the one that trained, and no loss of the run is that model's"
        )
    if trained.base is None and options.base is None:
        versions = trained.identity.get("versions", {})
        if versions.get("torch") not in (None, torch.__version__):
            notify(
                f"the base is drawn again from its seed; the run drew it with torch {versions['torch']}, and this is "
                f"{torch.__version__}, which may draw other numbers"
            )


def _has_code(folder: Path) -> bool:
    try:
        return '"auto_map"' in (folder / "config.json").read_text(encoding="utf-8")
    except OSError:
        return False


def _check_model(model: Any, trained: TrainedModel, options: ExportOptions) -> None:
    """Raise ArgumentError for a base that another library has quantised."""
    kind = models.quantization(base_of(model))
    if kind not in (None, "nf4", "int8"):
        raise ArgumentError(
            f"the weights of {options.base or trained.base or trained.folder} came quantised ({kind}), which is not "
            "written out here",
            where="RUN",
            fix="--base with the checkpoint they were made from, or --no-merge" if trained.adapters else "copy it",
        )


def _tell_effect(kept: AsTrained, notify: Notify) -> None:
    """Notify if one rounding moves the logits more than the adapters do."""
    rounding = float(kept.yardstick.median())
    if 0 < kept.effect < rounding:
        notify(
            f"the adapters move the logits by {kept.effect:.1e}, less than one rounding of the weights does "
            f"({rounding:.1e}): merged in this dtype they are lost in it; --dtype float32 or --no-merge keeps them"
        )


def _compare(
    kept: AsTrained,
    folder: Path,
    trained: TrainedModel,
    options: ExportOptions,
    quantization: str | None,
    doing: Doing,
) -> Differences:
    """Load the written model with plain transformers, and compare it."""
    with doing("loading what was written"):
        written: Any
        if trained.adapters and not options.merge:
            copy = TrainedModel(str(folder), str(folder), True, trained.run, trained.loaded, trained.identity)
            written, _ = load_trained(copy, device=options.device, base=options.base, quantization=quantization)
        else:
            written = _load_written(folder, options.device)
    return compare(kept, written, doing=doing)


def _load_written(folder: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    written, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    lost = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info.get(kind, ())]
    if lost:
        raise RunError(f"what was written lacks or adds weights: {', '.join(map(str, lost[:4]))}")
    return written.to(device).eval()


def _compare_gguf(
    file: Path, folder: Path, tokenizer: Any, rows: Sequence[torch.Tensor], device: str, doing: Doing
) -> GgufComparison:
    """Compare the GGUF file with the written model.

    Raises:
        RunError: They differ. The file is moved out of the folder, as ``FILE.failed``.
    """
    with doing("loading what was written"):
        model = _load_written(folder, device)
    found = compare_gguf(file, model, tokenizer, rows, doing=doing)
    if not found.passes:
        failed = keep_failed(file, folder.absolute().parent / file.name)
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise RunError(
            f"the GGUF file is not the model that was exported: {found.problems[0]}{more}",
            where=str(failed),
            fix=f"it is kept there to be looked at, and {folder} is whole; --no-check leaves it uncompared",
        )
    return found


def _describe(
    trained: TrainedModel, merges: bool, options: ExportOptions, dtype: torch.dtype, quantization: str | None
) -> str:
    """Return the content of the folder, in words."""
    name = str(dtype).removeprefix("torch.")
    if not trained.adapters:
        return f"all of the model, {name}"
    if not merges:
        on = f", trained on it in {trained.quantization}" if trained.quantization else ""
        return f"adapters, apart from their base{on}"
    if quantization is not None:
        return (
            f"adapters merged into the base as they trained on it: quantised to {quantization} and written out, {name}"
        )
    if trained.quantization is not None:
        return (
            f"adapters that trained on the base in {trained.quantization}, merged into the base before it was "
            f"quantised: another model than the one that trained, {name}"
        )
    return f"adapters merged into their base, {name}"


def _full_base(trained: TrainedModel) -> str | None:
    """Return the model from which full fine-tuning started."""
    if trained.adapters or trained.loaded is None:
        return None
    return trained.loaded.recipe.model_name_or_path
