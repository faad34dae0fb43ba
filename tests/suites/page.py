"""The page of what other libraries' tests found, made of kept outcomes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Outcomes", "write_page"]

HEAD = """# The suites of transformers and peft

<!-- written by `make suites`; do not edit -->

Tests of other libraries, taken from the source distributions that the package index has for the installed versions
({versions}),
run twice: as they are, and with each causal language model streamed in chunks of 4 tokens when it is called first. No
hub is asked: models have tiny configurations and random weights.

- transformers: its distribution has the common tests of models (`tests/test_modeling_common.py`) and none of the files
  of single families, of generation or of exporters. So the common tests are run here, for each family on a tiny model.
- peft: `tests/test_decoder_models.py`, in four parts, on models made here under the names that those on the
  hub have.
- TRL: its distribution has no tests. What its trainers train is compared in
  [the table of trainers](../transparency.md#trainers).

*Passed*: of the tests that are not skipped. *Refused*: a test ends with an error of StreamTune's own that says what is
not streamed. *Failed*: it passes plain and fails streamed in another way. A test with parts counts once, as its worst.
"""


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of a suite, by test.

    Args:
        plain: Outcome of each test without streaming.
        streamed: Outcome and reason of each with it.
    """

    plain: dict[str, str]
    streamed: dict[str, tuple[str, str]]

    @classmethod
    def read(cls, plain: Path, streamed: Path) -> Outcomes | None:
        """Read both files; None where one is missing."""
        if not (plain.exists() and streamed.exists()):
            return None
        of_plain = {name: outcome for name, (outcome, _) in _read(plain).items()}
        return cls(of_plain, _read(streamed))

    @property
    def passed_plain(self) -> list[str]:
        """Tests that pass without streaming."""
        return [name for name, outcome in self.plain.items() if outcome == "passed"]

    def _of(self, outcome: str) -> dict[str, str]:
        lost = ("missing", "the process ended before it")
        found = {name: self.streamed.get(name, lost) for name in self.passed_plain}
        return {name: why for name, (came, why) in found.items() if came == outcome}

    @property
    def passed(self) -> int:
        """Number of tests that pass both ways."""
        return len(self._of("passed"))

    @property
    def refused(self) -> dict[str, str]:
        """Tests that pass plain and are refused streamed, with the refusal."""
        return self._of("refused")

    @property
    def failed(self) -> dict[str, str]:
        """Tests that pass plain and neither pass nor are refused, with the reason."""
        return {name: why for came in ("failed", "skipped", "missing") for name, why in self._of(came).items()}


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """Return outcome and reason of each test; of several parts the worst."""
    order = ("skipped", "passed", "refused", "failed")
    found: dict[str, tuple[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        name, now = told["test"], (told["outcome"], told["why"])
        if name not in found or order.index(now[0]) > order.index(found[name][0]):
            found[name] = now
    return found


EXPLAINED = {
    "test_attention_outputs": "sets `config.output_attentions` on a streamed model's configuration, whose attention is "
    "not called eager; in a call under `torch.no_grad()` the weights are returned",
    **dict.fromkeys(
        [f"test_training_gradient_checkpointing{way}" for way in ("", "_use_reentrant_false", "_use_reentrant_true")],
        "counts calls of `torch.utils.checkpoint`, in whose place the streamed layers stand; the gradient is the same",
    ),
}
"""Reasons of failures that are no defect, in words."""


def write_page(
    path: Path, whole: dict[str, Outcomes], missing: list[str], libraries: dict[str, str], left_out: dict[str, str]
) -> None:
    """Write the page.

    Args:
        path: File of the page.
        whole: Suites that ran both ways.
        missing: Names of those that did not.
        libraries: Versions by name.
        left_out: Tests that are not run, with the reason.
    """
    versions = ", ".join(f"{name} {release}" for name, release in libraries.items())
    lines = [HEAD.format(versions=versions)]
    sums = [sum(map(len, (x.passed_plain for x in whole.values()))), sum(x.passed for x in whole.values())]
    sums += [sum(len(x.refused) for x in whole.values()), sum(len(x.failed) for x in whole.values())]
    lines += ["| suite | passed plain | passed streamed | refused | failed |", "|---|---:|---:|---:|---:|"]
    for name, found in whole.items():
        cells = (len(found.passed_plain), found.passed, len(found.refused), len(found.failed))
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    lines += [f"| **all** | {' | '.join(f'**{total}**' for total in sums)} |", ""]
    if missing:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    lines += [f"Left out: `{name}` ({why})." for name, why in left_out.items()]
    for title, kind in (("Refused", "refused"), ("Failed", "failed")):
        lines += ["", f"## {title}", ""]
        lines += _reasons({name: getattr(found, kind) for name, found in whole.items()}) or ["None."]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _reasons(found: dict[str, dict[str, str]]) -> list[str]:
    """Return a table of the tests, in how many cases and in which suites, with the reason in most of them."""
    cases: dict[str, list[tuple[str, str]]] = {}
    for suite, tests in found.items():
        for name, why in tests.items():
            cases.setdefault(name.partition("[")[0], []).append((suite, why))
    lines = ["| test | cases | suites | why |", "|---|---:|---|---|"]
    for test, told in sorted(cases.items()):
        why = Counter(why for _, why in told).most_common(1)[0][0]
        names = list(dict.fromkeys(suite for suite, _ in told))
        where = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"| `{test}` | {len(told)} | {where} | {EXPLAINED.get(test) or _in_a_cell(why)} |")
    return lines if cases else []


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").strip()[:200]
