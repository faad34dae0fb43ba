"""``make gpu`` without a GPU: the pieces that need none, the page, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import gpu

STEPS = {
    "rows": [
        {"mode": "checkpoint", "length": 16384, "seconds": 0.8, "peak_bytes": 44 << 30},
        {"mode": "stream", "length": 16384, "seconds": 0.6, "peak_bytes": 16 << 30,
         "profile": {"kernels": 5000, "device_seconds": 0.5, "top": [["a|b", 12, 0.0123]]}},
        {"mode": "stream, host", "length": 16384, "error": "out of memory"},
    ]
}  # fmt: skip


def test_what_was_found_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "KEPT", tmp_path / "kept")
    page = tmp_path / "gpu.md"
    arguments = ["--only", "environment", "--page", str(page)]
    assert gpu.main(arguments) == 0
    text = page.read_text(encoding="utf-8")
    assert "## Environment" in text
    assert "torch" in text
    found = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert found["environment"]["found"]["versions"]["torch"]
    monkeypatch.setattr(gpu, "run", lambda *_: pytest.fail("a piece ran again"))
    assert gpu.main(arguments) == 0


def test_a_piece_that_fails_is_said_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(gpu, "STREAMTUNE", [gpu.sys.executable, "-c", "raise SystemExit('no such thing')"])
    page = tmp_path / "gpu.md"
    arguments = ["--only", "environment", "--page", str(page)]
    for _ in range(2):
        assert gpu.main(arguments) == 1
        assert "no such thing" in page.read_text(encoding="utf-8")


def test_every_piece_is_rendered(tmp_path: Path) -> None:
    worst = {"error": 1.5e-6, "torch_error": 1.1e-6}
    found = {
        "tests": {"passed": 110, "skipped": 1, "failed": ["tests.cuda.test_head::test_it"]},
        "verify": {"qwen3": {"exact": True, "worst": worst}, "gemma2": {"exact": False, "error": "no"}},
        "steps-16k": STEPS,
        "longest": {"max_length": 262144, "baseline": {"checkpoint": 33088, "plain": 17728}},
    }
    gpu.write_page(
        {name: {"commit": "abc", "seconds": 1.0, "found": x} for name, x in found.items()}, tmp_path / "p.md"
    )
    text = (tmp_path / "p.md").read_text(encoding="utf-8")
    for line in (
        "110 passed, 1 failed, 1 skipped (`tests/cuda`).",
        "| qwen3 | exact | 1.5e-06 | 1.1e-06 |",
        "| gemma2 | **not exact** | nan | nan |",
        "| 16,384 | stream | 0.600 s | 0.75x | 16.0 GiB |",
        "| 16,384 | stream, host | out of memory | | |",
        "| `a/b` | 12 | 12.3 |",
        "Streaming 262,144 tokens (none above 262,144 was tried); checkpoint 33,088, plain 17,728.",
    ):
        assert line in text.splitlines(), line


def test_pieces_are_known() -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
