"""A GGUF file is compared with the model: right ones pass, one changed number is refused by the name of its weight.

Files are written by the package ``gguf``. ``STREAMTUNE_LLAMA_CPP`` names a folder of llama.cpp, whose converter then
writes some too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamtune.errors import ArgumentError, RunError
from streamtune.models import train_tokenizer
from streamtune.programs.export import gguf_and_hub
from streamtune.programs.export.check import ComparedRow
from streamtune.programs.export.export import ExportOptions, export_model
from streamtune.programs.export.gguf_check import GgufComparison, compare_gguf
from streamtune.programs.export.run_converter import pre_tokenizer_name

from .cases import ids, make_base, tokenizer, write_run

gguf = pytest.importorskip("gguf")
LLAMA_CPP = os.environ.get("STREAMTUNE_LLAMA_CPP")
KINDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
Change = Callable[[dict[str, np.ndarray]], object]


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotary heads as llama.cpp has them: the two halves of a head alternate."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def stored(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The weights by llama.cpp's names, in its order."""
    names = gguf.get_tensor_name_map(
        next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        model.config.num_hidden_layers,
    )
    found = {}
    for name, x in model.named_parameters():
        stem, _, ending = name.rpartition(".")
        values, place = x.detach().float().numpy(), f"{names.get_name(stem)}.{ending}"
        if architecture == "llama" and ("attn_q." in place or "attn_k." in place):
            heads = model.config.num_attention_heads if "attn_q." in place else model.config.num_key_value_heads
            values = turned(values, heads)
        if architecture.startswith("gemma") and place.endswith("norm.weight"):
            values = values + 1
        found[place] = values
    return found


def write(path: Path, model: Any, architecture: str, kind: str, change: Change, **facts: Any) -> Path:
    """Write a file by the package ``gguf`` alone."""
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_embedding_length(facts.get("hidden_size", config.hidden_size))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters.get("full_attention") or config.rope_parameters
    writer.add_rope_freq_base(facts.get("rope_theta", rope["rope_theta"]))
    tokens = tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokens, key=tokens.__getitem__))
    writer.add_eos_token_id(facts.get("eos", tokenizer().eos_token_id))
    writer.add_chat_template(tokenizer().chat_template)
    weights = stored(model, architecture)
    change(weights)
    for place, values in weights.items():
        used = KINDS[kind] if values.ndim > 1 and values.shape[-1] % 32 == 0 else KINDS["f32"]
        writer.add_tensor(place, gguf.quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def model_of(family: str) -> Any:
    return make_base(family, torch.float32)


def nothing(weights: dict[str, np.ndarray]) -> None:
    pass


def compared(
    folder: Path, family: str, architecture: str, kind: str, change: Change = nothing, **facts: Any
) -> GgufComparison:
    path = write(folder / "model.gguf", model_of(family), architecture, kind, change, **facts)
    return compare_gguf(path, model_of(family), tokenizer(), [ComparedRow(row[None]) for row in ids()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "architecture"), [("llama", "llama"), ("qwen3", "qwen3"), ("gemma3_text", "gemma3"), ("olmo2", "olmo2")]
)
def test_a_right_file_passes(tmp_path: Path, family: str, architecture: str, kind: str) -> None:
    found = compared(tmp_path, family, architecture, kind)
    assert found.problems == []
    assert found.compared == len(list(model_of(family).parameters()))
    assert found.reordered == found.not_compared == []
    assert found.median is not None
    assert found.allowed_median is not None
    assert kind == "f32" or 0.05 * found.allowed_median < found.median  # the errors are of the size of the rounding


def one_number(weights: dict[str, np.ndarray]) -> None:
    weights["blk.1.ffn_up.weight"] = weights["blk.1.ffn_up.weight"].copy()
    weights["blk.1.ffn_up.weight"][3, 5] = weights["blk.1.ffn_up.weight"][3, 5] * 1.05 + 0.002


def not_turned(weights: dict[str, np.ndarray]) -> None:
    place = "blk.0.attn_q.weight"
    weights[place] = turned(turned(weights[place], 4), 4)


def a_norm_without_its_one(weights: dict[str, np.ndarray]) -> None:
    weights["output_norm.weight"] = weights["output_norm.weight"] - 1


def swapped(weights: dict[str, np.ndarray]) -> None:
    a, b = "blk.0.attn_k.weight", "blk.0.attn_v.weight"
    weights[a], weights[b] = weights[b], weights[a]


CHANGES: dict[str, tuple[str, str, Change, str]] = {
    "one number": ("llama", "llama", one_number, "model.layers.1.mlp.up_proj.weight differs"),
    "rows of heads": ("llama", "llama", not_turned, "model.layers.0.self_attn.q_proj.weight differs"),
    "keys and values": ("qwen3", "qwen3", swapped, "model.layers.0.self_attn.k_proj.weight differs"),
    "a norm": ("gemma3_text", "gemma3", a_norm_without_its_one, "model.norm.weight differs"),
    "left out": (
        "qwen3",
        "qwen3",
        lambda weights: weights.pop("blk.0.ffn_down.weight"),
        "the weight model.layers.0.mlp.down_proj.weight is missing",
    ),
    "unknown order": ("olmo2", "olmo2", one_number, "model.layers.1.mlp.up_proj.weight differs"),
}


@pytest.mark.quick("one number-f16", "a norm-f16", "left out-f16")
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_named(tmp_path: Path, change: str, kind: str) -> None:
    family, architecture, apply, words = CHANGES[change]
    found = compared(tmp_path, family, architecture, kind, apply)
    assert not found.passes
    assert words in found.problems[0]
    assert "is missing" in words or found.worst == words.split()[0]


@pytest.mark.full
def test_the_same_numbers_in_another_order_are_no_comparison_of_places(tmp_path: Path) -> None:
    """Of an architecture whose order is not known here; of the others the order is part of the comparison."""

    def upside_down(weights: dict[str, np.ndarray]) -> None:
        weights["blk.0.attn_q.weight"] = np.ascontiguousarray(weights["blk.0.attn_q.weight"][::-1])

    found = compared(tmp_path, "olmo2", "olmo2", "f16", upside_down)
    assert found.passes
    assert found.reordered == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hidden_size": 64}, "embedding_length is 64"),
        ({"rope_theta": 500.0}, "rope.freq_base is 500.0"),
        ({"eos": 7}, "eos_token_id differs from the tokenizer's: 7"),
    ],
)
def test_facts_are_compared(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    found = compared(tmp_path, "qwen3", "qwen3", "f16", **facts)
    assert words in found.problems[0]


CONVERTER = """
import sys
from pathlib import Path
folder, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
if "--vocab-only" in sys.argv:
    out.touch()
else:
    out.write_bytes((folder.parent / "made.gguf").read_bytes())
"""


def test_a_file_that_differs_is_moved_away_and_the_folder_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converter is a program that hands over a file that was written before."""
    write_run(tmp_path, "qwen3", "full")
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    monkeypatch.setattr(gguf_and_hub, "find_spec", lambda name: True)  # sentencepiece, which this one does not need
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = ExportOptions(gguf="f16", llama_cpp=tmp_path)
    write(tmp_path / "made.gguf", model, "qwen3", "f16", nothing)
    report = export_model(str(tmp_path / "run"), tmp_path / "right", options)
    assert report.gguf == str(tmp_path / "right/right-f16.gguf")
    assert report.gguf_check is not None
    assert json.loads(json.dumps(report.to_json()))["gguf_check"]["passes"]
    write(tmp_path / "made.gguf", model, "qwen3", "f16", one_number)
    with pytest.raises(
        RunError, match=r"GGUF file differs from the exported model: model\.layers\.1\.mlp\.up_proj\.weight differs"
    ) as error:
        export_model(str(tmp_path / "run"), tmp_path / "wrong", options)
    assert error.value.where == str(tmp_path / "wrong-f16.gguf.failed")
    assert (tmp_path / "wrong-f16.gguf.failed").is_file()
    assert not list((tmp_path / "wrong").glob("*.gguf"))
    assert load_file(tmp_path / "wrong/model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {
        "base", "run", "right", "wrong", "wrong-f16.gguf.failed", "made.gguf", "convert_hf_to_gguf.py",
    }  # fmt: skip


def test_a_missing_package_is_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    monkeypatch.setattr(gguf_and_hub, "find_spec", lambda name: None if name == "gguf" else True)
    with pytest.raises(ArgumentError, match="needs the package gguf, not installed") as error:
        export_model(str(tmp_path / "no-run"), tmp_path / "out", ExportOptions(gguf="f16", llama_cpp=tmp_path))
    assert error.value.fix == "pip install gguf"


def test_splitting_that_llama_cpp_has_a_name_for() -> None:
    ours = json.loads(tokenizer().backend_tokenizer.to_str())
    assert pre_tokenizer_name(ours) == "smollm"
    assert pre_tokenizer_name({**ours, "pre_tokenizer": ours["pre_tokenizer"]["pretokenizers"][1]}) == "gpt-2"
    assert pre_tokenizer_name({**ours, "normalizer": {"type": "NFC"}}) is None
    assert pre_tokenizer_name({**ours, "pre_tokenizer": {"type": "Whitespace"}}) is None


@pytest.mark.full
@pytest.mark.skipif(LLAMA_CPP is None, reason="STREAMTUNE_LLAMA_CPP names no folder of llama.cpp")
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_llama_cpps_own_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str) -> None:
    pytest.importorskip("sentencepiece")
    trained = train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=300)
    monkeypatch.setattr("tests.programs.export.cases.tokenizer", lambda: trained)
    write_run(tmp_path, family, "lora", torch.bfloat16, vocab_size=len(trained))
    options = ExportOptions(gguf=kind, llama_cpp=Path(str(LLAMA_CPP)))
    found = export_model(str(tmp_path / "run"), tmp_path / "out", options).gguf_check
    assert found is not None
    assert found.passes
    assert found.compared > 20
    assert found.not_compared == found.reordered == []


@pytest.mark.full
@pytest.mark.skipif(LLAMA_CPP is None, reason="STREAMTUNE_LLAMA_CPP names no folder of llama.cpp")
def test_a_tokenizer_that_the_converter_does_not_know_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentencepiece")
    from tokenizers import normalizers

    trained = train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=300)
    trained.backend_tokenizer.normalizer = normalizers.NFKD()
    monkeypatch.setattr("tests.programs.export.cases.tokenizer", lambda: trained)
    write_run(tmp_path, "qwen3", "lora", torch.bfloat16, vocab_size=320)
    with pytest.raises(ArgumentError, match="BPE pre-tokenizer was not recognized") as error:
        export_model(str(tmp_path / "run"), tmp_path / "out", ExportOptions(gguf="f16", llama_cpp=Path(str(LLAMA_CPP))))
    assert "get_vocab_base_pre" in error.value.fix
    assert not (tmp_path / "out").exists()
