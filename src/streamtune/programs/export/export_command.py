"""``streamtune export``: write a trained model in Hugging Face format, and compare the files with the trained model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from streamtune.base.text import parse_size, show_size
from streamtune.cli.console import (
    err,
    loading_libraries,
    out,
    print_json,
    print_labelled,
    print_note,
    print_rows,
    print_title,
)
from streamtune.cli.options import JsonOption, let_idle_threads_sleep, option

if TYPE_CHECKING:
    from streamtune.programs.export.export import ExportReport


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run, a checkpoint, or a folder with a model or adapters.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; it must be new or empty.", show_default=False)
    ],
    checkpoint: Annotated[
        str | None,
        option(
            "NAME|STEP",
            "Checkpoint of the run to export, by name or step: step-000100 or 100. [default: the final model]",
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge/--no-merge",
            help="Merge adapters into their base model and write the merged model. --no-merge writes the adapters "
            "alone.",
        ),
    ] = True,
    onto: Annotated[
        Literal["trained", "original"],
        option(
            "trained|original",
            "Base weights to merge QLoRA adapters into. trained: dequantised weights of training; the result is the "
            "trained model. original: weights before quantisation; the result is a different model. [default: trained]",
        ),
    ] = "trained",
    base: Annotated[
        str | None,
        option(
            "PATH",
            "Folder or hub name of the adapters' base model. [default: the base model recorded in the run or with"
            " the adapters]",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        option(
            "float32|bfloat16|float16",
            "Dtype of the written weights. [default: the dtype of the stored weights; for adapters, the dtype of their "
            "base model in training]",
        ),
    ] = None,
    max_shard_size: Annotated[str, option("SIZE", "Maximum size of each safetensors file. [default: 5GB]")] = "5GB",
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare logits and greedy output of the written model with the trained model; exit with 1 if they "
            "differ by more than rounding explains.",
        ),
    ] = True,
    device: Annotated[
        Literal["cpu", "cuda", "xpu", "mps"],
        option("cpu|cuda|xpu|mps", "Device that runs the comparison of --check. [default: cpu]"),
    ] = "cpu",
    gguf: Annotated[
        str | None,
        option(
            "TYPE",
            "Also write a GGUF file, with llama.cpp's converter and this weight type: f32, f16, bf16, q8_0, tq1_0, "
            "tq2_0 or auto. [default: no GGUF file]",
        ),
    ] = None,
    llama_cpp: Annotated[
        Path | None, option("DIR", "Folder of llama.cpp's source, for --gguf. Set it if the converter is not on PATH.")
    ] = None,
    push: Annotated[
        str | None, option("NAME/MODEL", "Hub repository to upload the written model to. [default: no upload]")
    ] = None,
    public: Annotated[
        bool, option(None, "Make the repository public if --push creates it. [default: private]", "--public")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model in Hugging Face format with adapters merged, and compare it with the trained model.

    Exits with 1 if the two models differ by more than the rounding of the weights to the written dtype explains.
    """
    shard = parse_size(max_shard_size, where="--max-shard-size")
    let_idle_threads_sleep()
    with loading_libraries():
        from streamtune.programs.export.export import ExportOptions, export_model
    options = ExportOptions(
        checkpoint=checkpoint,
        merge=merge,
        onto=onto,
        base=base,
        dtype=dtype,
        max_shard_size=max(1, shard),
        check=check,
        device=device,
        gguf=gguf,
        llama_cpp=llama_cpp,
        push=push,
        private=not public,
    )
    report = export_model(run, folder, options, notify=print_note, doing=err.status)
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)


def _print_report(report: ExportReport) -> None:
    print_title(f"export {report.source}")
    out.print(_describe_verdict(report), soft_wrap=not out.is_terminal)
    shards = sum(name.endswith(".safetensors") for name in report.files)
    files = f"{shards} weight file{'s' if shards > 1 else ''}, {show_size(report.bytes)} in total"
    rows = [
        *([("base", report.base)] if report.base else []),
        ("weights", report.weights),
        ("written", f"{report.out}: {files}"),
        *_comparison_screen_rows(report),
        *_gguf_screen_rows(report),
        *([("pushed", report.pushed)] if report.pushed else []),
        ("load with", f'{report.loader}.from_pretrained("{report.out}")'),
    ]
    print_rows(rows)
    print_labelled(Text("Next: ", style="bold"), Text(shlex.join(["streamtune", "generate", str(report.out)])))


def _describe_verdict(report: ExportReport) -> Text:
    if report.check is None:
        return Text.assemble(("not checked", "bold yellow"), ": --no-check")
    model = "the trained model"
    if report.onto == "original":
        model = "the adapters with the original base, which is not the trained model"
    if report.trained_base is not True:
        known = "not the base that they were trained on" if report.trained_base is False else "the base that was given"
        model = f"the adapters with {report.base}, {known}"
    return Text.assemble(("the same model", "bold green"), f": logits and greedy text match {model}")


def _comparison_screen_rows(report: ExportReport) -> list[tuple[str, str]]:
    check = report.check
    if check is None:
        return []
    rows = [("compared on", f"{report.rows}; in fp32")]
    if check.effect:
        rows.append(("adapters", f"change the logits by {check.effect:.1e} of their norm"))
    rows.append(
        ("logits", f"relative difference {check.relative:.1e}; per token: median {check.median:.1e} (allowed "
         f"{check.allowed_median:.1e}), largest {check.largest:.1e} (allowed {check.allowed_largest:.1e})")
    )  # fmt: skip
    if check.own > 0 and report.dtype != "float32":
        rows.append(
            (
                "arithmetic",
                f"logits in {report.dtype} differ by {check.own:.1e} before the export, {check.own_after:.1e} after",
            )
        )
    if check.text_parts_at is None:
        rows.append(("text", f"{check.text_tokens} greedy tokens are equal"))
    else:
        rows.append(
            ("text", f"equal up to token {check.text_parts_at}, where rounding errors decide between two tokens")
        )
    return rows


def _gguf_screen_rows(report: ExportReport) -> list[tuple[str, str]]:
    found = report.gguf_check
    if report.gguf is None or found is None:
        return [("gguf", report.gguf)] if report.gguf else []
    types = ", ".join(f"{count} {kind}" for kind, count in found.types.items())
    rows = [
        ("gguf", f"{report.gguf}: {types}"),
        ("", f"{found.compared} weights compared; largest difference: {found.worst_part:.2g} of the allowed rounding "
         f"error, {found.worst}"),
        ("", f"logits, per token: median difference {found.median:.1e} (allowed {found.allowed_median:.1e}), largest "
         f"{found.largest:.1e} (allowed {found.allowed_largest:.1e})"),
    ]  # fmt: skip
    if found.reordered:
        rows.append(("", f"{len(found.reordered)} weights have the same values in another order"))
    if found.not_compared:
        rows.append(("", f"not compared, because the model has no such weight: {', '.join(found.not_compared[:4])}"))
    return rows
