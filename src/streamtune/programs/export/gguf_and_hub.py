"""Convert exported models to GGUF with llama.cpp's converter, and upload them to the Hugging Face Hub.

The requirements of both are checked before the export starts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamtune.base import interrupts
from streamtune.base.privacy import is_offline
from streamtune.base.safe_path import safe_environment
from streamtune.errors import ArgumentError, RunError, did_you_mean

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto")
"""Types that llama.cpp's converter writes; `llama-quantize` writes smaller types."""
CONVERTER = ("convert_hf_to_gguf.py", "convert-hf-to-gguf.py", "convert_hf_to_gguf")
"""File names of the converter in different versions of llama.cpp."""


def check_gguf(kind: str, llama_cpp: Path | None) -> Path:
    """Return the path of llama.cpp's converter.

    Raises:
        ArgumentError: The type is unknown, or the converter or a package that it needs is not installed.
    """
    if kind not in GGUF_TYPES:
        raise ArgumentError(
            f"--gguf: unknown type '{kind}'",
            where="--gguf",
            fix=did_you_mean(kind, GGUF_TYPES)
            or f"choose from {', '.join(GGUF_TYPES)}; llama-quantize converts an f16 file to smaller types",
        )
    found = find_converter(llama_cpp)
    if found is None:
        place = f"in {llama_cpp}" if llama_cpp is not None else "on PATH"
        raise ArgumentError(
            f"--gguf needs llama.cpp's converter, but there is no {CONVERTER[0]} {place}",
            where="--llama-cpp" if llama_cpp is not None else "--gguf",
            fix="git clone https://github.com/ggml-org/llama.cpp, pip install gguf sentencepiece, and give the folder "
            "with --llama-cpp; or leave --gguf out",
        )
    # The converter needs sentencepiece for tokenizers; the comparison needs gguf.
    needed = ("gguf", "sentencepiece") if found.suffix == ".py" else ("gguf",)
    if lacking := [name for name in needed if find_spec(name) is None]:
        raise ArgumentError(
            f"--gguf needs the package{'s' if len(lacking) > 1 else ''} {' and '.join(lacking)}, not installed",
            where="--gguf",
            fix=f"pip install {' '.join(lacking)}",
        )
    return found


def find_converter(llama_cpp: Path | None) -> Path | None:
    """Return the path of the converter in the folder ``llama_cpp``, or on PATH; None if there is none."""
    if llama_cpp is not None:
        return next((llama_cpp / name for name in CONVERTER if (llama_cpp / name).is_file()), None)
    return next((Path(found) for name in CONVERTER if (found := shutil.which(name))), None)


def check_convertible(config: Any, tokenizer: Any, converter: Path) -> None:
    """Run the converter on configuration and vocabulary alone, to find out in seconds if it supports the model.

    Raises:
        ArgumentError: The converter does not support the architecture or the tokenizer.
    """
    if converter.suffix != ".py":  # an installed program, whose options may differ
        return
    with interrupts.temporary_directory(prefix="streamtune-gguf-") as name:
        folder = Path(name)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        out = folder / "vocabulary.gguf"
        if message := _run_converter(folder, out, ["--vocab-only"], converter):
            raise ArgumentError(
                f"llama.cpp's converter does not support this model: {message}",
                where="--gguf",
                fix=_conversion_fix(message),
            )


def write_gguf(folder: Path, kind: str, converter: Path) -> Path:
    """Convert an exported model to a GGUF file in the same folder, and return the file's path.

    Args:
        kind: One of :data:`GGUF_TYPES`.
        converter: Path from :func:`check_gguf`.

    Raises:
        RunError: The converter failed. The exported model is not changed.
    """
    out = folder / f"{folder.resolve().name}-{kind}.gguf"
    with interrupts.temporary_directory(prefix=f"{folder.resolve().name}.gguf-", dir=folder.resolve().parent) as name:
        made = Path(name) / out.name
        if message := _run_converter(folder, made, ["--outtype", kind], converter):
            raise RunError(
                f"llama.cpp's converter failed: {message}", where=str(converter),
                fix=f"{_conversion_fix(message)}; {folder} itself is complete",
            )  # fmt: skip
        made.rename(out)
    return out


def _run_converter(folder: Path, out: Path, options: list[str], converter: Path) -> str:
    """Run the converter; return the last line of its error output, or an empty string if it succeeded."""
    command = [str(converter), str(folder), "--outfile", str(out), *options]
    if converter.suffix == ".py":
        command = [sys.executable, "-P", str(Path(__file__).with_name("run_converter.py")), *command]
    local = (converter.parent / "gguf-py").is_dir()
    environment = {**safe_environment(), **({} if local else {"NO_LOCAL_GGUF": "1"})}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0 and out.is_file():
        return ""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {done.returncode}"


def _conversion_fix(message: str) -> str:
    if "pre-tokenizer" in message:
        return (
            "it supports the tokenizers of released models, and byte-level tokenizers with the default pattern; new "
            "patterns need an entry in llama.cpp's get_vocab_base_pre"
        )
    if "No module named" in message:
        return "pip install the named package"
    return "see llama.cpp's list of supported architectures"


def check_push(repo: str) -> None:
    """Raise an ArgumentError if an upload is impossible: offline, invalid repository name, or no access token."""
    if is_offline():
        raise ArgumentError("--push and --offline exclude each other", where="--push",
                            fix="leave one of them out")  # fmt: skip
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined, unused-ignore]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ArgumentError(f"invalid repository name '{repo}': {error}", where="--push",
                            fix="write NAME/MODEL") from error  # fmt: skip
    if get_token() is None:
        raise ArgumentError(
            "no access token for the Hugging Face Hub is set",
            where="--push",
            fix="`hf auth login`, or set HF_TOKEN to a write token",
        )


def push_folder(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder to a Hub repository and return the URL; the repository is created if it does not exist.

    Raises:
        RunError: The hub rejected the upload or could not be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Upload by streamtune export")
    except Exception as error:  # connection, token and quota errors have different types
        first = str(error).strip().splitlines()
        raise RunError(
            f"the upload to {repo} failed: {first[0][:300] if first else type(error).__name__}",
            where="--push",
            fix=f"{folder} is complete; retry with `hf upload {repo} {folder}`",
        ) from error
    return str(address)
