"""``streamtune export``: a trained model in Hugging Face format, compared with the model in training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from streamtune.base.text import parse_size, show_size
from streamtune.cli.console import err, loading_libraries, out, print_json, print_note, print_rows, print_title
from streamtune.cli.options import JsonOption, option, wait_passively

if TYPE_CHECKING:
    from streamtune.programs.export.export import ExportReport


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run's directory, a checkpoint, or a folder with a model or adapters.",
            show_default=False,
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)],
    checkpoint: Annotated[
        str | None, option("NAME|STEP", "Export this checkpoint of the run in place of its final model.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge/--no-merge", help="Merge adapters into their base, or copy them apart.")
    ] = True,
    onto: Annotated[
        Literal["trained", "original"],
        option(
            "trained|original",
            "Of a base that was quantised: merge into it as the adapters trained on it, written out (default), or into "
            "the base as it was before, which is another model.",
        ),
    ] = "trained",
    base: Annotated[str | None, option("PATH", "The base of the adapters, where it is not where the run says.")] = None,
    dtype: Annotated[str | None, option("float32|bfloat16|float16", "Write the weights in this dtype.")] = None,
    max_shard_size: Annotated[str, option("SIZE", "Most bytes of a file; 5GB by default.")] = "5GB",
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare logits and greedy text with the model as it trained; refuse a difference.",
        ),
    ] = True,
    device: Annotated[
        Literal["cpu", "cuda"], option("cpu|cuda", "Where the models are loaded to be compared; cpu by default.")
    ] = "cpu",
    gguf: Annotated[
        str | None, option("TYPE", "Write a GGUF file as well, by llama.cpp's converter: f16, bf16, q8_0 ...")
    ] = None,
    llama_cpp: Annotated[Path | None, option("DIR", "The folder of llama.cpp, if it is not on PATH.")] = None,
    push: Annotated[str | None, option("NAME/MODEL", "Upload to this repository of the hub.")] = None,
    public: Annotated[
        bool, option(None, "Make a repository that --push creates public; private without it.", "--public")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model the way every other tool reads it, adapters merged, and prove that it is the same model.

    Exits with 1 if what was written differs from the model that trained by more than the rounding of its weights.
    """
    shard = parse_size(max_shard_size, where="--max-shard-size")
    wait_passively()
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
    shards = sum(name.endswith(".safetensors") for name in report.files)
    files = f"{shards} file{'s' if shards > 1 else ''} of weights, {show_size(report.bytes)} in all"
    rows = [
        *([("base", report.base)] if report.base else []),
        ("weights", report.weights),
        ("written", f"{report.out}: {files}"),
        *_check_rows(report),
        *_gguf_rows(report),
        *([("pushed", report.pushed)] if report.pushed else []),
        ("load it", f'{_loader(report)}.from_pretrained("{report.out}")'),
        ("try it", f"streamtune generate {report.out}"),
    ]
    print_rows(rows)
    if report.check is None:
        out.print(Text.assemble(("not checked", "bold yellow"), ": --no-check"))
        return
    which = "the model that trained"
    if report.onto == "original":
        which = "the adapters on the original base, which is not the model that trained"
    if report.trained_base is not True:
        known = "not the model they trained on" if report.trained_base is False else "as it was given"
        which = f"the adapters on {report.base}, {known}"
    out.print(Text.assemble(("the same model", "bold green"), f": logits and greedy text are those of {which}"))


def _check_rows(report: ExportReport) -> list[tuple[str, str]]:
    check = report.check
    if check is None:
        return []
    rows = [("compared", f"{report.rows}, in fp32")]
    if check.effect:
        rows.append(("adapters", f"move the logits by {check.effect:.1e}, relative"))
    rows.append(
        ("difference", f"{check.relative:.1e} of the logits; median of a token {check.median:.1e}, largest "
         f"{check.largest:.1e}, allowed {check.allowed_median:.1e} and {check.allowed_largest:.1e}")
    )  # fmt: skip
    if check.own > 0 and report.dtype != "float32":
        rows.append(("arithmetic", f"in {report.dtype} {check.own:.1e} before and {check.own_after:.1e} after"))
    if check.text_parts_at is None:
        rows.append(("text", f"{check.text_tokens} greedy tokens are the same"))
    else:
        rows.append(("text", f"the same up to token {check.text_parts_at}, where two were as close as the rounding"))
    return rows


def _gguf_rows(report: ExportReport) -> list[tuple[str, str]]:
    found = report.gguf_check
    if report.gguf is None or found is None:
        return [("gguf", report.gguf)] if report.gguf else []
    types = ", ".join(f"{count} {kind}" for kind, count in found.types.items())
    rows = [
        ("gguf", f"{report.gguf}: {types}"),
        ("", f"{found.compared} weights compared; {found.worst} is furthest off, {found.worst_part:.2g} of a rounding"),
        ("", f"logits off by {found.median:.1e} in the median, {found.largest:.1e} at most, allowed "
         f"{found.allowed_median:.1e} and {found.allowed_largest:.1e}"),
    ]  # fmt: skip
    if found.reordered:
        rows.append(("", f"{len(found.reordered)} hold the same numbers in an order that is not known here"))
    if found.not_compared:
        rows.append(("", f"not weights of the model, and not compared: {', '.join(found.not_compared[:4])}"))
    return rows


def _loader(report: ExportReport) -> str:
    return "AutoPeftModelForCausalLM" if report.kind == "adapters" else "AutoModelForCausalLM"
