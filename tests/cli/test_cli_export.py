"""``streamtune export`` and ``generate`` through the command line: the screen, the documents, a real run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.programs.export.cases import write_run
from tests.sft_kit import FIXED, RECIPE, write_recipe, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamtune.cli import main


def streamtune(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, "llama", "lora", vocab_size=259)
    return tmp_path


@pytest.mark.full
def test_the_screen_and_the_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert streamtune("export", "run", "merged") == 0
    shown = capsys.readouterr().out
    assert "the same model" in shown
    assert "adapters merged into their base, float32" in shown
    assert 'AutoModelForCausalLM.from_pretrained("merged")' in shown
    assert streamtune("export", "run", "merged") == 2
    assert "not empty; nothing is overwritten" in capsys.readouterr().err
    card = (run / "merged/README.md").read_text()
    assert "allowed for rounding the weights" in card
    assert str(run) not in card  # who trained it, and where, is nobody's business


def test_what_is_not_installed(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(run / "home"))
    for arguments, text in (
        (("--gguf", "f16"), "needs llama.cpp's converter"),
        (("--gguf", "f17"), "did you mean 'f16'?"),
        (("--gguf", "f16", "--llama-cpp", "nowhere"), "no convert_hf_to_gguf.py in nowhere"),
        (("--push", "me/model", "--offline"), "--push and --offline exclude each other"),
        (("--max-shard-size", "much"), "expected a size"),
    ):
        assert streamtune("export", "run", "out", *arguments) == 2
        assert text in capsys.readouterr().err
        os.environ.pop("STREAMTUNE_OFFLINE", None)
    assert streamtune("generate", "run", "--vllm", "--prompt", "x") == 2
    assert "needs vLLM, which is not installed" in capsys.readouterr().err
    assert not (run / "out").exists()


CONVERTER = """#!{python}
import sys
arguments = sys.argv[1:]
out = arguments[arguments.index("--outfile") + 1]
if "q8_0" in arguments:
    sys.exit("Model LlamaForCausalLM is not supported")
open(out, "wb").write(b"GGUF")
"""


@pytest.mark.full
def test_a_converter_is_called_and_its_failure_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "llama.cpp/gguf-py").mkdir(parents=True)
    converter = run / "llama.cpp/convert_hf_to_gguf"  # a program of its own: a .py file needs sentencepiece here
    converter.write_text(CONVERTER.format(python=sys.executable))
    converter.chmod(converter.stat().st_mode | stat.S_IXUSR)
    assert streamtune("export", "run", "one", "--gguf", "f16", "--llama-cpp", "llama.cpp", "--no-check") == 0
    assert (run / "one/one-f16.gguf").read_bytes() == b"GGUF"
    assert "not checked" in capsys.readouterr().out
    assert streamtune("export", "run", "two", "--gguf", "q8_0", "--llama-cpp", "llama.cpp", "--no-check") == 1
    assert "LlamaForCausalLM is not supported" in capsys.readouterr().err
    assert (run / "two/model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_a_real_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is trained and exported by the commands and loaded by transformers, also with a base without a folder."""
    if kind == "qlora":
        pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    recipe = {**RECIPE, "finetuning_type": kind, "engine": FIXED, "max_length": 256, "save_steps": 4, "val_size": 2}
    write_recipe(tmp_path, recipe)
    assert streamtune("sft", "tiny.yaml") == 0
    shown = capsys.readouterr().out
    assert "streamtune export runs/tiny OUT\n" in shown
    assert shown.endswith("\nNext: streamtune generate runs/tiny\n")
    assert streamtune("export", "runs/tiny", "out", "--json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["check"]["passes"]
    assert report["rows"].startswith("rows.jsonl:")
    assert report["quantization"] == ("int8" if kind == "qlora" else None)
    assert AutoModelForCausalLM.from_pretrained("out").config.vocab_size == len(AutoTokenizer.from_pretrained("out"))
    card = (tmp_path / "out/README.md").read_text()
    assert "rows.jsonl" in card
    assert "training loss" in card
    assert "held-out loss" in card

    assert streamtune("export", "runs/tiny", "early", "--checkpoint", "8") == 0
    assert "after step 8" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").unlink()
    assert streamtune("export", "runs/tiny", "later") == 0
    assert "cannot be read any more" in capsys.readouterr().err

    same = []
    for model in ("runs/tiny", "out"):
        assert streamtune("generate", model, "--prompt", "Add 3.", "--temperature", "0", "--max-new-tokens", "12") == 0
        same.append(capsys.readouterr())
        assert "answer: 12 tokens" in same[-1].err or "truncated" not in same[-1].err
    assert same[0].out == same[1].out


def test_prompts_from_options_files_and_pipes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "asked.jsonl").write_text('{"prompt": "ab"}\n{"messages": [{"role": "user", "content": "ab"}]}\n')
    settings = ("--temperature", "0", "--max-new-tokens", "4", "--device", "cpu")
    assert streamtune("generate", "run", "--file", "asked.jsonl", "--json", *settings) == 0
    document = json.loads(capsys.readouterr().out)
    first, second = document["answers"]
    assert first["text"] == second["text"]  # the same prompt, rendered by the chat template
    assert (first["tokens"], first["finished"], second["read_tokens"]) == (4, False, 1)
    assert streamtune("generate", "run", "--prompt", "ab", "--file", "asked.jsonl") == 2
    assert streamtune("generate", "run", "--prompt", "ab", "--top-p", "2") == 2
    assert streamtune("generate", "run", "--file", "nothing.txt") == 2
    assert "cannot read nothing.txt" in capsys.readouterr().err


@pytest.mark.full
def test_a_pipe_is_a_prompt(run: Path) -> None:
    command = [sys.executable, "-m", "streamtune", "generate", "run", "--max-new-tokens", "3", "--temperature", "0"]
    done = subprocess.run(command, input="ab", capture_output=True, text=True, check=True)
    assert "answer: 3 tokens" in done.stderr
    empty = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert (empty.returncode, "the prompt is missing" in empty.stderr) == (2, True)
