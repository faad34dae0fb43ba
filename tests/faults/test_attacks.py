"""Attacks of kinds that no other test makes, on real runs; docs/reference/reliability.md lists them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.attacks import ATTACKS, Attack, Lab
from tests.faults.kit import Zygotes, compile_shim, write_sft


@pytest.fixture(scope="module")
def two_zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygotes]:
    """Two runs at once, for those that get in each other's way."""
    found = Zygotes(compile_shim(tmp_path_factory.mktemp("shim")), 2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(two_zygotes: Zygotes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write_sft(folder)
    assert two_zygotes.run(folder).status == 0
    return folder


def test_there_are_sixty_and_each_is_listed_once() -> None:
    titles = [attack.title for attack in ATTACKS]
    assert len(titles) >= 60
    assert len(set(titles)) == len(titles)


LONG = {"odd_names", "hang_up", "stop_at_each"}
"""Attacks that `make faults` alone tries: half a minute each."""


@pytest.mark.full
@pytest.mark.parametrize(
    "attack",
    [pytest.param(each, marks=[pytest.mark.slow] if each.run.__name__ in LONG else []) for each in ATTACKS],
    ids=lambda attack: f"{attack.kind.split()[0]}-{attack.run.__name__}",
)
def test_attack(attack: Attack, two_zygotes: Zygotes, whole: Path, tmp_path: Path) -> None:
    lab = Lab(tmp_path, two_zygotes, whole)
    lab.write()
    outcome = attack.run(lab)
    print(f"{attack.title}: {outcome}")
    folder = os.environ.get("STREAMTUNE_FAULTS")
    if folder:  # under `make faults`, for docs/reference/reliability.md
        target = Path(folder) / "attacks"
        target.mkdir(parents=True, exist_ok=True)
        record = {"kind": attack.kind, "title": attack.title, "outcome": outcome}
        (target / f"{ATTACKS.index(attack):03d}.json").write_text(json.dumps(record) + "\n")
