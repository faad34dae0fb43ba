"""Weights & Biases: files in ``RUN/wandb``, sent to the service unless offline.

A row has its step as the metric ``step``, which all charts are drawn over. The service cannot change rows that it has:
steps that a resumed run takes again are there twice, with the same ``step``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import Path
from typing import Any

from streamtune.errors import ArgumentError
from streamtune.programs.trackers.tracker import Tracker, facts_of, project_name

SECONDS = 25
"""For the service to answer at the start, and to take the rest at the end."""


class WandbTracker(Tracker):
    """A run whose id is that of our run, so a resumed one goes on."""

    name = "wandb"
    _run: Any

    def start(self) -> dict[str, Any]:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if not self.offline:
            _check_folder()
        import wandb

        settings = wandb.Settings(
            console="off",  # our own lines are in the run's files
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,  # arguments and environment may hold secrets
            silent=True,
            init_timeout=SECONDS,
            finish_timeout=SECONDS,
        )
        self.facts.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project_name("WANDB_PROJECT"),
            name=os.environ.get("WANDB_NAME") or self.facts.name,
            id=self.ids.get("id", self.facts.run),
            resume="allow",
            dir=str(self.facts.directory),
            mode="offline" if self.offline else None,
            config=facts_of(self.facts),
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return {"id": self._run.id, "project": self._run.project}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, samples: list[dict[str, Any]]) -> None:
        import wandb

        rows = [[step, each["prompt"], each["completion"]] for each in samples]
        self._run.log({"step": step, "samples": wandb.Table(columns=["step", "prompt", "completion"], data=rows)})

    def picture(self, step: int, path: Path) -> None:
        import wandb

        self._run.log({"step": step, path.stem: wandb.Image(str(path))})

    def note(self, name: str, details: Mapping[str, Any]) -> None:
        self._run.summary[f"events/{name}"] = dict(details)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _check_folder() -> None:
    """Refuse a settings file of the working directory that chooses who receives what a run logs, and the user's key.

    Raises:
        ArgumentError: ``wandb/settings`` names an address or a key that the environment does not name.
    """
    file = Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings"
    settings = ConfigParser(interpolation=None)
    try:
        settings.read(file)
        found = dict(settings.items("default"))
    except (OSError, ValueError, ConfigParserError):  # wandb does not read it either
        return
    for name, value in found.items():
        variable = f"WANDB_{name.upper()}"
        if variable in ("WANDB_BASE_URL", "WANDB_API_KEY") and variable not in os.environ:
            shown = value if variable == "WANDB_BASE_URL" else "a key of its own"
            raise ArgumentError(
                f"{file} of the working directory sets {name} to {shown}: the run would be logged there",
                where="report_to",
                mend=f"set {variable} yourself if that is meant, or remove the line",
            )
