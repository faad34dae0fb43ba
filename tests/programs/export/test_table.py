"""Architectures trained in full, with LoRA, DoRA and on a quantised base: exported, loaded anew, compared."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from streamtune.models.quantize import PACKAGES, dequantize_weight, is_quantized, quantize
from streamtune.programs.export.export import ExportOptions, export_model
from tests.precision_kit import relative

from .cases import ARCHITECTURES, CPU, make_base, truth, write_run

EXACT = 1e-6
"""Relative difference of logits in fp64: what one rounding of the weights to fp32 makes of them."""
CASES = [
    (family, kind)
    for family in ARCHITECTURES
    for kind in ("full", "lora", "dora", "nf4", "int8")
    if not (family == "gpt2" and kind in PACKAGES)  # it has no nn.Linear that could be quantised
]


def export(folder: Path, **options: Any) -> Any:
    return export_model(str(folder / "run"), folder / "out", ExportOptions(**options))


@pytest.mark.quick("llama-full", "gemma2-nf4", "mixtral-lora")
@pytest.mark.parametrize(("family", "kind"), CASES, ids=[f"{family}-{kind}" for family, kind in CASES])
def test_what_is_loaded_is_what_trained(family: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(kind, "torch"))
    want = truth(write_run(tmp_path, family, kind))
    report = export(tmp_path)
    assert report.kind == ("full" if kind == "full" else "merged")
    assert report.dtype == "float32"
    assert report.check is not None
    assert report.check.passes
    assert kind == "full" or report.check.effect > 0.05  # the adapters of this test do something
    found = truth(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert relative(found, want) <= (0.0 if kind == "full" else EXACT)
    if kind != "full":
        assert relative(truth(make_base(family)), want) > 0.05


@pytest.mark.quick("dora-phi3")
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral"])
@pytest.mark.parametrize("kind", ["lora", "dora", "nf4", "int8"])
def test_three_ways_in_bfloat16(kind: str, family: str, tmp_path: Path) -> None:
    """Each weight is the nearest number to the merged one in fp64; where peft adds in bfloat16 it need not be."""
    pytest.importorskip(PACKAGES.get(kind, "torch"))
    write_run(tmp_path, family, kind, torch.bfloat16)
    report = export(tmp_path)
    assert report.dtype == "bfloat16"
    assert report.check is not None
    assert report.check.passes
    assert 1e-4 < report.check.median < 0.03 < report.check.effect
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    want = peft_merged(tmp_path, family, kind, torch.float64).state_dict()
    theirs = peft_merged(tmp_path, family, kind, torch.bfloat16).state_dict()
    assert ours.keys() == want.keys()
    for name, exact in want.items():
        if ours[name].dtype != torch.bfloat16:  # a router's correction stays as it is
            assert torch.equal(ours[name].double(), exact.double())
            continue
        assert relative(ours[name], exact) <= relative(theirs[name], exact) + 1e-9, name
        gap = torch.finfo(torch.bfloat16).eps * torch.exp2(exact.abs().clamp_min(1e-30).log2().floor())
        cancelled = 2.0**-22 * float(exact.abs().max())  # fp32's own rounding, where base and update cancel
        assert bool(((ours[name].double() - exact).abs() <= 0.5 * gap + cancelled).all()), name


def peft_merged(folder: Path, family: str, kind: str, dtype: torch.dtype) -> Any:
    """The model merged by peft in ``dtype``; a quantised base is written out before."""
    base = make_base(family, torch.bfloat16).to(dtype)
    if kind in PACKAGES:
        quantised = make_base(family, torch.bfloat16)
        quantize(quantised, kind, CPU)
        with torch.no_grad():
            for name, weight in values(quantised):
                base.get_parameter(name).copy_(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        adapted = PeftModel.from_pretrained(base, str(folder / "run/final"), autocast_adapter_dtype=False)
    for name, x in adapted.named_parameters():
        if "lora_" in name and dtype == torch.float64:
            x.data = x.data.double()
    return adapted.merge_and_unload()


def values(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a quantised model stands for, in fp64, by their names."""
    for name, weight in model.named_parameters():
        if is_quantized(weight):
            yield name, dequantize_weight(weight, torch.float32).double()
