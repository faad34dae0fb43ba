"""The screen and the document of ``streamtune probe-max-len --method simulate``, byte for byte; versions are masked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.golden_kit import WIDTHS, check_golden, masked, of_pinned_torch, once, screen
from tests.plan.test_golden_plan import PAIRS, RECIPE, run

GOLDEN = Path(__file__).parent / "golden"
DEVICE = ["--method", "simulate", "--device", "rtx-4090", "--host-memory", "8GiB", "--device-memory", "2GiB"]
FIXED = ["--set", "engine.chunk_size=2048", "--set", "engine.head_chunk_size=256"]
CASES = {
    "baselines": (RECIPE, [*DEVICE, *FIXED, "--baseline", "--to", "8192"]),
    "planned": (RECIPE, [*DEVICE, "--to", "4096"]),
    "batch": (PAIRS, [*DEVICE, *FIXED, "--batch-size", "--length", "1024", "--to", "4"]),
    "ranks": (RECIPE, [*DEVICE, *FIXED, "--to", "8192", "--ranks", "4", "--set", "deepspeed=zero2"]),
}


@of_pinned_torch
@pytest.mark.quick("planned")
@pytest.mark.parametrize("case", CASES)
def test_a_simulated_probe(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    once(monkeypatch, "streamtune.programs.probe.probe_recipe.probe_recipe")
    recipe, options = CASES[case]
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    command = ["probe-max-len", "tiny.yaml", *options, "--output-dir", "found"]
    run(*command, "--json")
    document = masked(json.loads(capsys.readouterr().out), {"torch"})
    check_golden(GOLDEN / f"{case}.json", json.dumps(document, indent=2) + "\n")
    for width in WIDTHS:
        check_golden(GOLDEN / f"{case}-{width}.txt", screen(width, lambda: run(*command), capsys))
