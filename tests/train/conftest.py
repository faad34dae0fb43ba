"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_kit import Trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "run")
