"""The comparison finds what is wrong with a written model, and lets pass what one rounding of its weights explains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamtune.errors import ArgumentError, RunError
from streamtune.programs.export import write
from streamtune.programs.export.check import ComparedRow, compare_with_trained, measure_trained
from streamtune.programs.export.export import ExportOptions, ExportReport, export_model
from streamtune.programs.export.merge import computing_in_fp32

from .cases import adapt, ids, make_base, write_run

BF16 = torch.bfloat16


def merged(model: Any, scale: float = 1.0, dtype: torch.dtype = BF16) -> Any:
    """A copy of the base with the adapters' update times ``scale``, rounded once."""
    base = make_base("llama", dtype)
    with torch.no_grad():
        for name, module in model.get_base_model().named_modules():
            if hasattr(module, "get_delta_weight"):
                weight = base.get_submodule(name).weight
                weight.copy_(weight.float() + scale * module.get_delta_weight("default").float())
    return base


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    model = adapt(make_base("llama", BF16))
    rows = [ComparedRow(row[None]) for row in ids()]
    return model, measure_trained(model, rows, ComparedRow(rows[0].ids[:, :8]), dtype=BF16, new_tokens=8)


def test_a_right_merge_passes(trained: tuple[Any, Any]) -> None:
    model, kept = trained
    found = compare_with_trained(kept, merged(model))
    assert found.passes
    assert found.why_failed == ""
    assert 0.2 * found.allowed_median < 3 * found.median  # the errors are of the size of what they measure
    assert kept.effect > 0.1


def leave_one_out(base: Any) -> None:
    with torch.no_grad():
        base.model.layers[1].mlp.down_proj.weight.copy_(make_base("llama", BF16).model.layers[1].mlp.down_proj.weight)


def swap(base: Any) -> None:
    layers = base.model.layers
    layers[0].self_attn.k_proj, layers[0].self_attn.v_proj = layers[0].self_attn.v_proj, layers[0].self_attn.k_proj


def not_a_number(base: Any) -> None:
    with torch.no_grad():
        base.model.norm.weight[0] = float("nan")


WRONG: dict[str, Callable[[Any], Any]] = {
    "one adapter left out": leave_one_out,
    "keys and values swapped": swap,
    "rotations of another context": lambda base: base.model.rotary_emb.inv_freq.mul_(4.0),
    "not a number": not_a_number,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_one_does_not(trained: tuple[Any, Any], wrong: str) -> None:
    model, kept = trained
    base = merged(model)
    WRONG[wrong](base)
    found = compare_with_trained(kept, base)
    assert not found.passes
    assert found.why_failed


@pytest.mark.parametrize("scale", [0.0, 0.9, 1.1, 2.0])
def test_nor_does_another_scale(trained: tuple[Any, Any], scale: float) -> None:
    model, kept = trained
    assert not compare_with_trained(kept, merged(model, scale)).passes


def test_a_model_is_widened_for_a_call_and_then_as_before() -> None:
    model = make_base("llama", BF16)
    before = {name: (x.dtype, x.data_ptr()) for name, x in model.named_parameters()}
    with torch.no_grad():
        want = make_base("llama").to(BF16).float()(ids()).logits
        with computing_in_fp32(model):
            found = model(ids()).logits
    assert found.dtype == torch.float32
    assert torch.equal(found, want)
    assert {name: (x.dtype, x.data_ptr()) for name, x in model.named_parameters()} == before


def damage(folder: Path) -> None:
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.02
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_what_differs_is_refused_and_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that damages a weight: the real one is called, and its file changed on disk before it is loaded."""
    write_run(tmp_path, "llama", "lora")

    def write_and_damage(model: Any, tokenizer: Any, folder: Path, **settings: Any) -> None:
        write.write_merged(model, tokenizer, folder, **settings)
        damage(folder)

    monkeypatch.setattr("streamtune.programs.export.export.write_merged", write_and_damage)
    with pytest.raises(RunError, match="the written model differs from the trained model") as error:
        export(tmp_path)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    assert error.value.where == str(tmp_path / "out.failed")
    assert (tmp_path / "out.failed/model.safetensors").is_file()


def export(folder: Path, **options: Any) -> ExportReport:
    return export_model(str(folder / "run"), folder / "out", ExportOptions(**options))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="not empty"):
        export(tmp_path)
    (tmp_path / "out/mine.txt").unlink()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/model.safetensors").touch()  # of the user's: no mark of an export is there
    with pytest.raises(ArgumentError, match="exists and was not written by an export"):
        export(tmp_path)


@pytest.mark.full
def test_adapters_that_the_rounding_swallows_are_told_of(tmp_path: Path) -> None:
    """Adapters that have learnt next to nothing: in bfloat16 the merged weights round back to the base."""
    model = write_run(tmp_path, "llama", "lora", BF16)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.mul_(1e-4)
    model.save_pretrained(tmp_path / "run/final")
    notes: list[str] = []
    export_model(str(tmp_path / "run"), tmp_path / "out", ExportOptions(), notify=notes.append)
    assert any("merging in this dtype loses the effect of the adapters" in note for note in notes)
