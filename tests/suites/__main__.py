"""``make suites``: the tests of transformers and peft, plain and streamed; writes docs/reference/suites.md.

    python -m tests.suites [FAMILY ...] [--minutes N] [--report-only]

Each family's tests run in two processes, one after another: plain, and with each model streamed when it is called
first. Outcomes are kept in ``build/suites``, so that a run which is cut short goes on where it ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.suites.models import FAMILIES
from tests.suites.page import Outcomes, write_page
from tests.suites.sources import BUILD, ROOT, environment, fetch, fetch_packages

HERE = Path(__file__).parent
SECONDS = 3600
"""Time that one process may take."""
PEFT = {
    "peft-lora-training": "test_training and LoraConfig",
    "peft-lora-rest": "LoraConfig and not test_training",
    "peft-others-training": "test_training and not LoraConfig",
    "peft-others-rest": "not LoraConfig and not test_training",
}
"""Parts of peft's decoder tests, by name: LoRA and its kin, and other adapters; ``-k`` ignores case."""
NEEDS = {"test_generation_tester_mixin_inheritance": "mixin whose file the distribution leaves out"}
"""Tests that are left out, with the reason."""


@dataclass(frozen=True)
class Suite:
    """One process's worth of tests.

    Args:
        name: Name in the page and in the file of outcomes.
        tests: File of tests.
        chosen: Expression of ``pytest -k``.
        family: Family of the models; empty where the tests name theirs.
    """

    name: str
    tests: Path
    chosen: str
    family: str = ""

    def outcomes(self, streamed: bool) -> Path:
        """Return the file of outcomes."""
        return BUILD / "outcomes" / f"{self.name}-{'streamed' if streamed else 'plain'}.jsonl"


def suites(families: list[str]) -> list[Suite]:
    """Fetch the tests and return what is run."""
    fetch_packages()
    found = []
    if fetch("transformers") is not None:
        out = " and ".join(f"not {name}" for name in NEEDS)
        found = [Suite(family, HERE / "of_transformers.py", out, family) for family in families]
    if (peft := fetch("peft")) is not None:
        found += [Suite(name, peft / "test_decoder_models.py", chosen) for name, chosen in PEFT.items()]
    fetch("trl")
    return found


def run(suite: Suite, streamed: bool) -> None:
    """Run a suite in a process, unless its outcomes are kept from an earlier run of these versions."""
    file = suite.outcomes(streamed)
    if file.exists():
        return
    part = file.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)
    names = {"STREAMED": str(int(streamed)), "OUTCOMES": str(part), "FAMILY": suite.family}
    plugins = ["-p", "no:cacheprovider", "-p", "tests.suites.streamed", "--noconftest", "-c", "/dev/null"]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "--tb=no", "--rootdir", str(ROOT), *plugins]
    start = time.monotonic()
    try:
        subprocess.run(
            [*command, "-k", suite.chosen, str(suite.tests)],
            cwd=BUILD,
            env=environment(**names),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        print(f"{suite.name}: not finished in {SECONDS} s", flush=True)
        return
    if part.exists():
        part.rename(file)
    print(f"{suite.name} {'streamed' if streamed else 'plain'}: {time.monotonic() - start:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    """Run what is not kept, and write the page. Return 1 if a test failed streamed that passes plain, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites")
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=list(FAMILIES))
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further process after so many")
    parser.add_argument("--report-only", action="store_true", help="run nothing; write the page of what is kept")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    chosen = suites(options.families)
    for suite in chosen:
        for streamed in (False, True):
            if not options.report_only and time.monotonic() - start < options.minutes * 60:
                run(suite, streamed)
    read = {suite.name: Outcomes.read(suite.outcomes(False), suite.outcomes(True)) for suite in chosen}
    whole = {name: outcomes for name, outcomes in read.items() if outcomes is not None}
    libraries = {name: version(name) for name in ("transformers", "peft", "trl", "torch")}
    write_page(ROOT / "docs/reference/suites.md", whole, [name for name in read if name not in whole], libraries, NEEDS)
    return int(any(outcomes.failed for outcomes in whole.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
