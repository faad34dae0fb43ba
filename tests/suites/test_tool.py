"""`make suites` itself: sorting of outcomes, the page, and the plugin that streams models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suites.models import FAMILIES, family_of
from tests.suites.page import Outcomes, write_page
from tests.suites.sources import ROOT

TESTS = """
import pytest, torch
from tests.exactness.families import build
from streamtune.engine.layer import StreamedForward
import streamtune

IDS = torch.randint(5, 90, (1, 11))


def test_streams():
    model = build("llama")
    model(IDS, labels=IDS).loss.backward()
    layer = model.get_decoder().layers[0]
    assert isinstance(vars(layer).get("forward"), StreamedForward) == STREAMED


def test_refused():
    build("llama")(IDS, output_attentions=True)


def test_fails_both_ways():
    assert False, "a | b"


@pytest.mark.skip
def test_skipped():
    pass
"""


def outcomes(folder: Path, streamed: bool) -> Path:
    """Run the tests above as a suite is run."""
    file, told = folder / "test_model.py", folder / f"{streamed}.jsonl"
    file.write_text(f"STREAMED = {streamed}\n{TESTS}")
    plugins = ["-p", "no:cacheprovider", "-p", "tests.suites.streamed", "--noconftest", "-c", os.devnull]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *plugins, str(file)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "STREAMED": str(int(streamed)),
            "OUTCOMES": str(told),
        },
        capture_output=True,
    )
    return told


@pytest.mark.full
def test_outcomes_of_tests_that_run_plain_and_streamed(tmp_path: Path) -> None:
    found = Outcomes.read(outcomes(tmp_path, False), outcomes(tmp_path, True))
    assert found is not None
    assert found.plain == {
        "test_streams": "passed", "test_refused": "passed", "test_fails_both_ways": "failed", "test_skipped": "skipped"
    }  # fmt: skip
    assert (found.passed, list(found.refused), found.failed) == (1, ["test_refused"], {})
    assert "output_attentions=True" in found.refused["test_refused"]


def test_a_test_in_parts_counts_as_its_worst_and_one_that_is_lost_as_failed(tmp_path: Path) -> None:
    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    told = [("x", "passed"), ("y", "passed"), ("z", "passed")]
    plain.write_text("".join(json.dumps({"test": t, "outcome": o, "why": ""}) + "\n" for t, o in told))
    told = [("x", "passed"), ("x", "refused"), ("x", "passed"), ("y", "failed")]
    streamed.write_text("".join(json.dumps({"test": t, "outcome": o, "why": f"{o} | so"}) + "\n" for t, o in told))
    found = Outcomes.read(plain, streamed)
    assert found is not None
    assert (found.passed, list(found.refused), list(found.failed)) == (0, ["x"], ["y", "z"])
    assert Outcomes.read(plain, tmp_path / "none") is None
    write_page(tmp_path / "page.md", {"llama": found}, ["qwen3"], {"torch": "2"}, {"test_w": "no file"})
    page = (tmp_path / "page.md").read_text()
    assert "| llama | 3 | 0 | 1 | 2 |" in page
    assert "Not run: qwen3." in page
    assert "| `y` | 1 | llama | failed \\| so |" in page


def test_names_of_models_on_the_hub() -> None:
    assert family_of("peft-internal-testing/tiny-random-OPTForCausalLM") == "opt"
    assert family_of("hf-internal-testing/tiny-random-Gemma3ForCausalLM") == "gemma3_text"
    with pytest.raises(ValueError, match="stands in"):
        family_of("somebody/tiny-random-T5")
    assert len(set(FAMILIES)) == 30
