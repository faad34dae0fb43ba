"""Hand a written model to other programs: llama.cpp converts it to GGUF, the hub takes it.

Both are looked for before anything is computed, so that an export does not fail after an hour for want of a program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from streamtune.errors import ArgumentError, RunError, did_you_mean
from streamtune.network import is_offline

__all__ = ["GGUF_TYPES", "check_gguf", "check_push", "find_converter", "push_folder", "write_gguf"]

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto")
"""Types that llama.cpp's converter writes; its `llama-quantize` makes others of these."""
CONVERTER = ("convert_hf_to_gguf.py", "convert-hf-to-gguf.py", "convert_hf_to_gguf")
"""Names that the converter has had."""


def check_gguf(kind: str, llama_cpp: Path | None) -> Path:
    """Return the converter of llama.cpp.

    Raises:
        ArgumentError: It does not write this type, or is not installed.
    """
    if kind not in GGUF_TYPES:
        raise ArgumentError(
            f"llama.cpp's converter writes no type '{kind}'",
            where="--gguf",
            mend=did_you_mean(kind, GGUF_TYPES)
            or f"choose from {', '.join(GGUF_TYPES)}; llama-quantize makes smaller types of an f16 file",
        )
    found = find_converter(llama_cpp)
    if found is None:
        place = f"in {llama_cpp}" if llama_cpp is not None else "on PATH"
        raise ArgumentError(
            f"--gguf needs llama.cpp's converter, and there is no {CONVERTER[0]} {place}",
            where="--llama-cpp" if llama_cpp is not None else "--gguf",
            mend="git clone https://github.com/ggml-org/llama.cpp, pip install gguf, and give its folder with "
            "--llama-cpp; or leave --gguf out",
        )
    if found.suffix == ".py" and find_spec("gguf") is None and not (found.parent / "gguf-py").is_dir():
        raise ArgumentError(
            f"{found} needs the package gguf, which is not installed", where="--gguf", mend="pip install gguf"
        )
    return found


def find_converter(llama_cpp: Path | None) -> Path | None:
    """Return the path of the converter in a folder of llama.cpp, or on PATH; None where there is none."""
    if llama_cpp is not None:
        return next((llama_cpp / name for name in CONVERTER if (llama_cpp / name).is_file()), None)
    return next((Path(found) for name in CONVERTER if (found := shutil.which(name))), None)


def write_gguf(folder: Path, kind: str, converter: Path) -> Path:
    """Convert a written model, and return the file, which is put beside its weights.

    Args:
        folder: The written model.
        kind: One of :data:`GGUF_TYPES`.
        converter: From :func:`check_gguf`.

    Raises:
        RunError: The converter failed; its last words are in the message. The model is as it was.
    """
    out = folder / f"{folder.resolve().name}-{kind}.gguf"
    command = [str(converter), str(folder), "--outfile", str(out), "--outtype", kind]
    if converter.suffix == ".py":
        command.insert(0, sys.executable)
    environment = {**os.environ, "NO_LOCAL_GGUF": "1"} if not (converter.parent / "gguf-py").is_dir() else None
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode or not out.is_file():
        out.unlink(missing_ok=True)
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RunError(
            f"llama.cpp's converter failed: {lines[-1].strip()[:300] if lines else f'exit code {done.returncode}'}",
            where=" ".join(command[-6:]),
            mend=f"{folder} itself is whole; llama.cpp lists the architectures that it converts",
        )
    return out


def check_push(repo: str) -> None:
    """Refuse what cannot be uploaded.

    Raises:
        ArgumentError: ``--offline``, no name of a repository, or no token.
    """
    if is_offline():
        raise ArgumentError("--push uploads, and --offline forbids every connection", where="--push",
                            mend="leave one of the two out")  # fmt: skip
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined, unused-ignore]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ArgumentError(f"'{repo}' is no name of a repository: {error}", where="--push",
                            mend="write NAME/MODEL") from error  # fmt: skip
    if get_token() is None:
        raise ArgumentError(
            "there is no token for the hub", where="--push", mend="`hf auth login`, or set HF_TOKEN to a write token"
        )


def push_folder(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a written model and return its address; the repository is made if it is not there.

    Raises:
        RunError: The hub refused it or was not reached.
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
            mend=f"{folder} is whole: `hf upload {repo} {folder}` tries again",
        ) from error
    return str(address)
