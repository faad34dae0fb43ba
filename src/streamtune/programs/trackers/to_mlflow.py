"""MLflow: a file store in ``RUN/mlflow``, or the server of ``MLFLOW_TRACKING_URI`` unless offline.

MLflow keeps every value that is logged: steps that a resumed run takes again are there twice, the later one with a
later time. Parameters cannot be changed either; what is another at a resumption becomes a tag.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamtune.programs.trackers.tracker import Tracker, facts_of, flatten, project_name

PARAMETER_CHARACTERS = 500
"""Of a value: what every store and version takes."""
AT_ONCE = 90
"""Parameters in one call; MLflow takes 100."""
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Variables of MLflow's, where the user has not set them: a server that does not answer is given up within a minute."""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """A run found again by its id."""

    name = "mlflow"
    _client: Any
    _id: str

    def start(self) -> dict[str, Any]:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Metric, Param, RunTag

        self._metric = Metric
        uri = self._uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if self.resumed and self.ids.get("tracking_uri") == uri:
            self._id = str(self.ids["run_id"])
            self._client.update_run(self._id, status="RUNNING")
        else:
            project = project_name("MLFLOW_EXPERIMENT_NAME")
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(project)
            self._id = self._client.create_run(experiment, run_name=self.facts.name).info.run_id
        before = self._client.get_run(self._id).data.params
        values = {key: _short(value) for key, value in flatten(facts_of(self.facts))}
        fresh = [Param(key, value) for key, value in values.items() if key not in before]
        changed = [RunTag(key, value) for key, value in values.items() if before.get(key, value) != value]
        for first in range(0, len(fresh), AT_ONCE):
            self._client.log_batch(self._id, params=fresh[first : first + AT_ONCE])
        self._client.log_batch(self._id, tags=changed[:AT_ONCE])
        self._client.log_dict(self._id, facts_of(self.facts), "run.json")
        return {"run_id": self._id, "tracking_uri": uri}

    def _uri(self) -> str:
        """Return the store: the user's, MLflow's own default, or files where that default needs more than is here."""
        import mlflow

        if not self.offline and os.environ.get("MLFLOW_TRACKING_URI"):
            return os.environ["MLFLOW_TRACKING_URI"]
        if not self.offline and find_spec("sqlalchemy") is not None:
            return str(mlflow.get_tracking_uri())
        return self.folder.as_uri()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def text(self, step: int, samples: list[dict[str, Any]]) -> None:
        shown = "\n\n".join(f"## {each['prompt']}\n\n{each['completion']}" for each in samples)
        self._client.log_text(self._id, shown, f"samples/step-{step:06d}.md")

    def picture(self, step: int, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def note(self, name: str, details: Mapping[str, Any]) -> None:
        self._client.set_tag(self._id, f"events.{name}", json.dumps(details))

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, status=STATUS[status])


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= PARAMETER_CHARACTERS else text[: PARAMETER_CHARACTERS - 3] + "..."
