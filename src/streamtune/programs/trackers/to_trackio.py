"""Trackio: its local database (``TRACKIO_DIR``), or the Space or server of the user's environment unless offline.

It keeps every row: steps that a resumed run takes again are there twice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamtune.programs.trackers.tracker import Tracker, facts_of, project_name

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


class TrackioTracker(Tracker):
    """A run found again by its name, which ends in a part of our own run's id."""

    name = "trackio"
    _run: Any

    def start(self) -> dict[str, Any]:
        import trackio

        # It prints in our thread, onto the standard output of a run that may be read by a program.
        for module in [found for key, found in sys.modules.items() if key.partition(".")[0] == "trackio"]:
            module.print = _say_nothing  # type: ignore[attr-defined]
        if self.offline:
            for variable in ELSEWHERE:
                os.environ.pop(variable, None)
        ids = dict(self.ids) or {
            "project": project_name("TRACKIO_PROJECT"),
            "name": f"{self.facts.name}-{self.facts.run[:6]}",
        }
        self._run = trackio.init(**ids, config=facts_of(self.facts), resume="allow", embed=False)
        return ids

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, samples: list[dict[str, Any]]) -> None:
        import trackio

        shown = "\n\n".join(f"**{each['prompt']}**\n\n{each['completion']}" for each in samples)
        self._run.log({"samples": trackio.Markdown(shown)}, step=step)

    def picture(self, step: int, path: Path) -> None:
        import trackio

        self._run.log({path.stem: trackio.Image(str(path))}, step=step)

    def close(self, status: str) -> None:
        self._run.finish()


def _say_nothing(*values: Any, **options: Any) -> None:
    """Print nothing, in place of ``print``."""
