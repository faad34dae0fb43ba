"""GGUF by llama.cpp's converter, and upload to the hub.

Both are checked before anything is computed, so that an export does not fail after an hour.
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
"""Types that llama.cpp's converter writes; `llama-quantize` makes smaller types."""
CONVERTER = ("convert_hf_to_gguf.py", "convert-hf-to-gguf.py", "convert_hf_to_gguf")
"""Names of the converter in several versions."""


def check_gguf(kind: str, llama_cpp: Path | None) -> Path:
    """Return the converter of llama.cpp.

    Raises:
        ArgumentError: The type is unknown, or the converter or a package that it needs is missing.
    """
    if kind not in GGUF_TYPES:
        raise ArgumentError(
            f"llama.cpp's converter writes no type '{kind}'",
            where="--gguf",
            fix=did_you_mean(kind, GGUF_TYPES)
            or f"choose from {', '.join(GGUF_TYPES)}; llama-quantize makes smaller types of an f16 file",
        )
    found = find_converter(llama_cpp)
    if found is None:
        place = f"in {llama_cpp}" if llama_cpp is not None else "on PATH"
        raise ArgumentError(
            f"--gguf needs llama.cpp's converter, and there is no {CONVERTER[0]} {place}",
            where="--llama-cpp" if llama_cpp is not None else "--gguf",
            fix="git clone https://github.com/ggml-org/llama.cpp, pip install gguf sentencepiece, and give its folder "
            "with --llama-cpp; or leave --gguf out",
        )
    # The converter reads tokenizers with sentencepiece; the file is compared with gguf.
    needed = ("gguf", "sentencepiece") if found.suffix == ".py" else ("gguf",)
    if lacking := [name for name in needed if find_spec(name) is None]:
        raise ArgumentError(
            f"--gguf needs the package{'s' if len(lacking) > 1 else ''} {' and '.join(lacking)}, not installed here",
            where="--gguf",
            fix=f"pip install {' '.join(lacking)}",
        )
    return found


def find_converter(llama_cpp: Path | None) -> Path | None:
    """Return the path of the converter in a folder of llama.cpp, else on PATH, else None."""
    if llama_cpp is not None:
        return next((llama_cpp / name for name in CONVERTER if (llama_cpp / name).is_file()), None)
    return next((Path(found) for name in CONVERTER if (found := shutil.which(name))), None)


def check_convertible(config: Any, tokenizer: Any, converter: Path) -> None:
    """Run the converter on configuration and vocabulary alone, which takes seconds.

    Raises:
        ArgumentError: The converter does not know the architecture or the tokenizer.
    """
    if converter.suffix != ".py":  # another program by its name, whose options may be others
        return
    with interrupts.temporary_directory(prefix="streamtune-gguf-") as name:
        folder = Path(name)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        out = folder / "vocabulary.gguf"
        if words := _convert(folder, out, ["--vocab-only"], converter):
            raise ArgumentError(
                f"llama.cpp's converter does not take this model: {words}", where="--gguf", fix=_fix(words)
            )


def write_gguf(folder: Path, kind: str, converter: Path) -> Path:
    """Convert a written model, and return the path of the GGUF file beside its weights.

    Args:
        folder: Folder of the model.
        kind: One of :data:`GGUF_TYPES`.
        converter: Path from :func:`check_gguf`.

    Raises:
        RunError: The converter failed. The model is unchanged.
    """
    out = folder / f"{folder.resolve().name}-{kind}.gguf"
    with interrupts.temporary_directory(prefix=f"{folder.resolve().name}.gguf-", dir=folder.resolve().parent) as name:
        made = Path(name) / out.name
        if words := _convert(folder, made, ["--outtype", kind], converter):
            raise RunError(
                f"llama.cpp's converter failed: {words}", where=str(converter),
                fix=f"{_fix(words)}; {folder} itself is whole",
            )  # fmt: skip
        made.rename(out)
    return out


def _convert(folder: Path, out: Path, options: list[str], converter: Path) -> str:
    """Run the converter, and return the last line of its error, or an empty text."""
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


def _fix(words: str) -> str:
    if "pre-tokenizer" in words:
        return (
            "it knows the tokenizers of released models, and byte-level ones without a pattern of their own; llama.cpp "
            "takes new ones into get_vocab_base_pre"
        )
    if "No module named" in words:
        return "pip install the package that it names"
    return "llama.cpp lists the architectures that it converts"


def check_push(repo: str) -> None:
    """Raise ArgumentError if an upload is impossible: ``--offline``, a bad repository name, or no token."""
    if is_offline():
        raise ArgumentError("--push uploads, and --offline forbids every connection", where="--push",
                            fix="leave one of the two out")  # fmt: skip
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined, unused-ignore]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ArgumentError(f"'{repo}' is no name of a repository: {error}", where="--push",
                            fix="write NAME/MODEL") from error  # fmt: skip
    if get_token() is None:
        raise ArgumentError(
            "there is no token for the hub", where="--push", fix="`hf auth login`, or set HF_TOKEN to a write token"
        )


def push_folder(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a written model and return its address; a missing repository is created.

    Raises:
        RunError: The hub refused the upload or was not reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Upload by streamtune export")
    except Exception as error:  # of the connection, the token, the quota: each has a type of its own
        first = str(error).strip().splitlines()
        raise RunError(
            f"the upload to {repo} failed: {first[0][:300] if first else type(error).__name__}",
            where="--push",
            fix=f"{folder} is whole: `hf upload {repo} {folder}` tries again",
        ) from error
    return str(address)
