"""``make gpu`` without a GPU: the pieces that need none, the page, and going on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu, gpu_pieces, predicted

from streamtune.plan.rates import data_sheet_rates, find_device
from streamtune.programs.bench.table_rows import TableReport, TableRow

STEPS = {
    "rows": [
        {"mode": "checkpoint", "length": 16384, "seconds": 0.8, "peak_bytes": 44 << 30},
        {"mode": "stream", "length": 16384, "seconds": 0.6, "peak_bytes": 16 << 30,
         "profile": {"kernels": 5000, "device_seconds": 0.5, "top": [["a|b", 12, 0.0123]]}},
        {"mode": "stream, host", "length": 16384, "error": "out of memory"},
    ]
}  # fmt: skip


CALIBRATION = {
    "sheet": "NVIDIA H100 SXM",
    "rates": {
        "measured": {"source": "measured", **dict.fromkeys(gpu.RATES, 6e14)},
        "data sheet": {"source": "data sheet", **dict.fromkeys(gpu.RATES, 5e14)},
    },
    "rows": [
        {"mode": "checkpoint", "length": 16384, "seconds": 0.8, "peak_bytes": 44 << 30,
         "predicted_seconds": {"measured": 0.9, "data sheet": 0.7}, "simulated_bytes": 40 << 30},
        {"mode": "checkpoint", "length": 65536, "error": "out of memory",
         "predicted_seconds": {"measured": 4.0, "data sheet": 3.0}, "simulated_bytes": 130 << 30},
    ],
}  # fmt: skip


def table() -> dict[str, Any]:
    """The document of a table of the command, with a peer that failed."""
    env = {"device_type": "cuda", "device": "H100", "batch_size": 1, "parameters": 1}
    rows = [
        TableRow("plain", 16384, "plain autograd", forward_s=0.25, backward_s=0.5, to_checkpoint=1.5),
        TableRow("liger", 16384, "Liger", error="out of memory"),
    ]
    return TableReport("bp-time", "streamtune bench r.yaml --table bp-time", {}, env, rows).to_json()


def test_pieces_fit_the_time() -> None:
    assert sum(piece.seconds for piece in gpu.PIECES.values()) <= gpu.TOTAL == 25 * 60
    assert all(piece.seconds <= gpu.LIMIT == 8 * 60 for piece in gpu.PIECES.values())


def test_time_that_is_left_over_is_given_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def measure(until: float) -> dict[str, Any]:
        limits.append(round(until - time.monotonic()))
        return {}

    def slow(until: float) -> dict[str, Any]:
        clock["now"] += until - time.monotonic()
        return measure(until)

    clock = {"now": 0.0}
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(gpu, "KEPT", tmp_path / "kept")
    pieces = {"a": (100, measure), "b": (450, measure), "c": (50, slow), "d": (20, slow), "e": (30, measure)}
    monkeypatch.setattr(
        gpu, "PIECES", {name: gpu.Piece(name, *of, render=lambda found: []) for name, of in pieces.items()}
    )
    assert gpu.main(["--only", "a,b,c,d,e", "--page", str(tmp_path / "p.md")]) == 0
    assert limits == [100, 480, 0, 0, 30 + 550 + 50 + 20 - 480 - 140]


@pytest.mark.full
def test_a_process_is_ended_with_those_that_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    inner = f"import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    with pytest.raises(RuntimeError, match="its time was over"):
        gpu.run(time.monotonic() + 1, sys.executable, "-c", code, inner)
    time.sleep(4)
    assert not (tmp_path / "late").exists()


def test_figures_of_a_benchmark_that_was_ended_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"

    def ended(until: float, *command: str) -> str:
        path.write_text('{"rows": []}')
        raise RuntimeError("its time was over")

    monkeypatch.setattr(gpu, "run", ended)
    assert gpu.written(0, path, "gpu_pieces", "longest") == {"rows": [], "ended": "its time was over"}
    monkeypatch.setattr(gpu, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("no device")))
    with pytest.raises(RuntimeError, match="no device"):
        gpu.written(0, path, "gpu_pieces", "longest")


def test_the_longest_row_is_found_by_doubling() -> None:
    tried: list[int] = []

    def step(length: int) -> str:
        tried.append(length)
        return "out of memory" if length > 100_000 else ""

    assert gpu_pieces.search(step, lambda: 60.0) == {"fits": 98304, "stopped": "131,072: out of memory"}
    assert tried == [16384, 32768, 65536, 131072, 98304]
    assert gpu_pieces.search(lambda length: "", lambda: 60.0)["fits"] == gpu_pieces.MOST
    assert gpu_pieces.search(lambda length: "no", lambda: 60.0) == {"fits": 0, "stopped": "16,384: no"}
    found = gpu_pieces.search(lambda length: "", lambda: -1.0)
    assert found == {"fits": 16384, "stopped": "32,768 was not tried: too little time"}


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", 23, "rtx-4090-24gb"),
        ("Unknown", 178, "b200-192gb"),
    ],
)
def test_the_data_sheet_of_a_device(name: str, gib: int, found: str) -> None:
    assert predicted.sheet_of(name, gib << 30).name == found


def test_a_measured_step_is_predicted() -> None:
    rates = {"data sheet": data_sheet_rates(find_device("h100-80gb"))}
    rows = [{"mode": "checkpoint", "length": 2048, "seconds": 1.0}, {"mode": "liger", "length": 2048, "seconds": 1.0}]
    [row] = predicted.compared(rows, 1, rates)
    assert row["seconds"] == 1.0
    assert 0.001 < row["predicted_seconds"]["data sheet"] < 1
    assert 4 * gpu.GIB < row["simulated_bytes"] < 20 * gpu.GIB


@pytest.mark.full
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
        "calibration": CALIBRATION,
        "bp-time": {"tables": [table()], "absent": {"trl": "not run here: trl is not installed"}, "ended": "its time"},
        "whole": {
            "parameters": 1000,
            "length": 131072,
            "step_seconds": [70.0, 50.0],
            "predicted_seconds": 55.0,
            "peak_bytes": 70 << 30,
            "simulated_bytes": 69 << 30,
            "host_bytes": 90 << 30,
            "simulated_host_bytes": 90 << 30,
            "flops": 2 * 10**16,
        },
        "peers": {
            "rows": [
                {
                    "mode": "liger",
                    "fits": 49152,
                    "stopped": "65,536: out of memory",
                    "peak_bytes": 60 << 30,
                    "step_seconds": {"16384": 0.5},
                }
            ],
            "absent": {"unsloth": "not run here: unsloth is not installed"},
        },
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
        "| matmul_flops | 6e+14 | 5e+14 | 1.20x |",
        "| 16,384 | checkpoint | 0.800 s | 0.900 s | 0.700 s | 44.00 GiB | 40.00 GiB | 0.909x |",
        "| 65,536 | checkpoint | out of memory | 4.000 s | 3.000 s |  | 130.00 GiB |  |",
        "| 16,384 | plain | 0.25 | 0.50 | 21,845 | 1.50x |",
        "| 16,384 | liger | out of memory |  |  |  |",
        "**Ended before it was whole**: its time",
        "- liger: checkpointing, all kernels (Liger).",
        "- trl: not run here: trl is not installed.",
        "| liger | 0.50 s |  | 49,152 | 60.0 GiB | 65,536: out of memory |",
        "| seconds | 50.0 | 55.0 | 1.100x |",
        "| GiB of the device | 70.00 | 69.00 | 0.986x |",
        "- unsloth: not run here: unsloth is not installed.",
        "All pieces took 8 s.",
    ):
        assert line in text.splitlines(), line


def test_pieces_are_known() -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
