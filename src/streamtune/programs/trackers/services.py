"""Experiment trackers with a common interface, and a check that their packages are installed.

    start -> (log_numbers | log_samples | log_event)* -> log_image* -> close

All methods are called on one thread, in this order. After an error, no method is called any more. Importing this module
imports no tracker's package: :meth:`Tracker.start` or a later method does.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamtune.base.privacy import redact
from streamtune.errors import ArgumentError

if TYPE_CHECKING:
    from streamtune.train import RunFacts

PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
"""Name in ``report_to`` -> (module to import, package to install)."""


def check_installed(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed.

    Args:
        names: Keys of :data:`PACKAGES`.

    Raises:
        ArgumentError: A package is not installed.
    """
    missing = [name for name in names if not _is_installed(PACKAGES[name][0])]
    if missing:
        named = " and ".join(f"'{name}'" for name in missing)
        packages = " ".join(PACKAGES[name][1] for name in missing)
        raise ArgumentError(
            f"report_to names {named}, which {'is' if len(missing) == 1 else 'are'} not installed",
            where="report_to",
            fix=f"pip install 'streamtune[trackers]' (or only: pip install {packages}), or remove it from report_to",
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a module of that name without a spec, such as one set to None
        return False


PROJECT = "streamtune"


@dataclass
class Tracker(ABC):
    """Connection of one training run to one experiment tracker.

    Args:
        facts: Id, directory, recipe, versions and plan of the run.
        ids: Ids that :meth:`start` returned when the run began; empty for a new run.
        offline: True to write local files only.
    """

    facts: RunFacts
    ids: Mapping[str, Any]
    offline: bool

    name: ClassVar[str] = ""
    """Name of the tracker in ``report_to``."""

    @property
    def resumed(self) -> bool:
        """True if an earlier start of this run was logged to the tracker."""
        return bool(self.ids)

    @property
    def folder(self) -> Path:
        return self.facts.directory / self.name

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """Create or resume the run at the tracker, log recipe, versions and plan, and return the ids to save."""

    @abstractmethod
    def log_numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a training step or of an evaluation."""

    @abstractmethod
    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Log prompts and completions that the model generated."""

    @abstractmethod
    def log_image(self, step: int, path: Path) -> None:
        """Log a PNG file."""

    def log_event(self, name: str, details: Mapping[str, Any]) -> None:  # noqa: B027 (not every tracker supports events)
        """Log an event of the run, such as a saved checkpoint."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Flush and end the run at the tracker; ``status`` is ``finished``, ``stopped`` or ``failed``."""


def numeric_fields(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric fields of a line of ``metrics.jsonl``, without ``step``."""
    return {name: float(value) for name, value in record.items() if name != "step" and isinstance(value, (int, float))}


def values_at_start(facts: RunFacts) -> dict[str, Any]:
    """Return the values that are logged once: recipe, versions, plan, run id and number of steps."""
    more = {"run": facts.run, "total_steps": facts.total_steps}
    return {"recipe": dict(facts.recipe), "versions": dict(facts.versions), "plan": dict(facts.plan), **more}


def flatten_mappings(
    values: Mapping[str, Any], prefix: str = "", *, names: re.Pattern[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every leaf of nested mappings.

    Lists are leaves, and so are mappings with a key that does not match ``names``.
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and (names is None or all(names.fullmatch(key) for key in value)):
            yield from flatten_mappings(value, f"{prefix}{name}.", names=names)
        else:
            yield f"{prefix}{name}", value


def _value_as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def project_name(*variables: str) -> str:
    """Return the value of the first environment variable that is set, otherwise ``streamtune``."""
    return next((os.environ[name] for name in variables if os.environ.get(name)), PROJECT)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


class TensorboardTracker(Tracker):
    """Writes event files to ``RUN/tensorboard``; after a resume, repeated steps replace the earlier ones."""

    name = "tensorboard"
    _writer: Any

    def start(self) -> dict[str, Any]:
        from torch.utils.tensorboard import SummaryWriter

        # From a run's second file on, readers drop steps of earlier files that are at or after purge_step.
        self._writer = SummaryWriter(str(self.folder), purge_step=self.facts.step + 1, flush_secs=10)
        for part, values in values_at_start(self.facts).items():
            if isinstance(values, Mapping):
                rows = "".join(f"| {key} | {_format_table_cell(value)} |\n" for key, value in flatten_mappings(values))
                self._writer.add_text(part, f"| key | value |\n|---|---|\n{rows}", self.facts.step + 1)
        for term, size in self.facts.plan.get("terms", {}).items():
            self._writer.add_scalar(f"plan/terms/{term}", size, self.facts.step + 1)
        self._writer.flush()
        return {"folder": self.folder.name}

    def log_numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        for number, sample in enumerate(samples):
            shown = f"**{_format_table_cell(sample['prompt'])}**\n\n```text\n{sample['completion']}\n```"
            self._writer.add_text(f"samples/{number}", shown, step)

    def log_event(self, name: str, details: Mapping[str, Any]) -> None:
        self._writer.add_text("events", f"{name}: `{json.dumps(details)}`", int(details.get("step", self.facts.step)))

    def log_image(self, step: int, path: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(path.name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self, status: str) -> None:
        self._writer.close()


def _format_table_cell(value: Any) -> str:
    return _value_as_text(value).replace("|", "\\|").replace("\n", " ")


# --- Weights & Biases -------------------------------------------------------------------------------------------------


WANDB_SECONDS = 25
"""Timeouts in seconds: of the connection at the start, and of the remaining upload at the end."""


class WandbTracker(Tracker):
    """Writes files to ``RUN/wandb``, and uploads them unless offline. A resumed run keeps its id.

    The x axis of charts is the metric ``step``. Logged values cannot be changed, so steps that are repeated after a
    resume appear twice.
    """

    name = "wandb"
    _run: Any

    def start(self) -> dict[str, Any]:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Without an API key wandb would ask for one, on this thread, while the run uses the terminal.
        os.environ.setdefault("WANDB_SILENT", "true")
        if not self.offline:
            _check_wandb_settings()
        import wandb

        settings = wandb.Settings(
            console="off",  # the run directory already has the output
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,  # arguments and environment may contain secrets
            silent=True,
            init_timeout=WANDB_SECONDS,
            finish_timeout=WANDB_SECONDS,
        )
        self.facts.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.ids.get("project") or project_name("WANDB_PROJECT"),
            name=os.environ.get("WANDB_NAME") or self.facts.name,
            id=self.ids.get("id", self.facts.run),
            resume="allow",
            dir=str(self.facts.directory),
            mode="offline" if self.offline else None,
            config=values_at_start(self.facts),
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return {"id": self._run.id, "project": self._run.project}

    def log_numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        import wandb

        rows = [[step, each["prompt"], each["completion"]] for each in samples]
        self._run.log({"step": step, "samples": wandb.Table(columns=["step", "prompt", "completion"], data=rows)})

    def log_image(self, step: int, path: Path) -> None:
        import wandb

        self._run.log({"step": step, path.stem: wandb.Image(str(path))})

    def log_event(self, name: str, details: Mapping[str, Any]) -> None:
        self._run.summary[f"events/{name}"] = dict(details)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _check_wandb_settings() -> None:
    """Check that ``wandb/settings`` in the working directory does not redirect the run to another server or account.

    Raises:
        ArgumentError: The file sets ``base_url`` or ``api_key``, and the environment does not.
    """
    file = Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings"
    settings = ConfigParser(interpolation=None)
    try:
        settings.read(file)
        found = dict(settings.items("default"))
    except (OSError, ValueError, ConfigParserError):  # wandb cannot read it either
        return
    for name, value in found.items():
        variable = f"WANDB_{name.upper()}"
        if variable in ("WANDB_BASE_URL", "WANDB_API_KEY") and variable not in os.environ:
            shown = value if variable == "WANDB_BASE_URL" else "another API key"
            raise ArgumentError(
                f"{file} in the working directory sets {name} to {shown}: the run would be logged there",
                where="report_to",
                fix=f"remove the line, or set the environment variable {variable} to log there",
            )


# --- MLflow -----------------------------------------------------------------------------------------------------------


PARAMETER_CHARACTERS = 500
"""Maximum length of a parameter's value that all stores and versions of MLflow accept."""
PARAMETERS_PER_CALL = 90
"""Number of parameters per call; MLflow accepts at most 100."""
MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Environment variables that are set unless the user has set them.

With these values, retries of a server that does not answer end within a minute. MLflow prints no link to the run: the
link would have the password of the server's address.
"""
PARAMETER_NAME = re.compile(r"[\w .-]{1,80}")
"""Pattern of a mapping's key that may be a part of a parameter's name; MLflow refuses regular expressions."""
MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """Logs to the server of ``MLFLOW_TRACKING_URI`` or to MLflow's default store.

    Offline, or without SQLAlchemy, it writes files to ``RUN/mlflow``. A run resumes by its id. Logged values cannot be
    changed, so steps that are repeated after a resume appear twice, and a parameter that differs is logged as a tag.
    """

    name = "mlflow"
    _client: Any
    _id: str

    def start(self) -> dict[str, Any]:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Metric, Param, RunTag

        self._metric = Metric
        uri = self._store_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        address = redact(uri)  # the file of the ids must not have the password of a server's address
        if self.resumed and redact(str(self.ids.get("tracking_uri"))) == address:
            self._id = str(self.ids["run_id"])
            self._client.update_run(self._id, status="RUNNING")
        else:
            project = project_name("MLFLOW_EXPERIMENT_NAME")
            found = self._client.get_experiment_by_name(project)
            experiment_id = found.experiment_id if found is not None else self._client.create_experiment(project)
            self._id = self._client.create_run(experiment_id, run_name=self.facts.name).info.run_id
        before = self._client.get_run(self._id).data.params
        leaves = flatten_mappings(values_at_start(self.facts), names=PARAMETER_NAME)
        values = {key: _shorten(value) for key, value in leaves}
        fresh = [Param(key, value) for key, value in values.items() if key not in before]
        changed = [RunTag(key, value) for key, value in values.items() if before.get(key, value) != value]
        for first in range(0, len(fresh), PARAMETERS_PER_CALL):
            self._client.log_batch(self._id, params=fresh[first : first + PARAMETERS_PER_CALL])
        self._client.log_batch(self._id, tags=changed[:PARAMETERS_PER_CALL])
        self._client.log_dict(self._id, values_at_start(self.facts), "run.json")
        return {"run_id": self._id, "tracking_uri": address}

    def _store_uri(self) -> str:
        import mlflow

        if not self.offline and os.environ.get("MLFLOW_TRACKING_URI"):
            return os.environ["MLFLOW_TRACKING_URI"]
        if not self.offline and find_spec("sqlalchemy") is not None:
            return str(mlflow.get_tracking_uri())
        return self.folder.as_uri()

    def log_numbers(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        shown = "\n\n".join(f"## {each['prompt']}\n\n{each['completion']}" for each in samples)
        self._client.log_text(self._id, shown, f"samples/step-{step:06d}.md")

    def log_image(self, step: int, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def log_event(self, name: str, details: Mapping[str, Any]) -> None:
        self._client.set_tag(self._id, f"events.{name}", json.dumps(details))

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, status=MLFLOW_STATUS[status])


def _shorten(value: Any) -> str:
    text = _value_as_text(value)
    return text if len(text) <= PARAMETER_CHARACTERS else text[: PARAMETER_CHARACTERS - 3] + "..."


# --- Trackio ----------------------------------------------------------------------------------------------------------


TRACKIO_REMOTES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


class TrackioTracker(Tracker):
    """Writes to Trackio's local database, or unless offline to the Space or server that the environment sets.

    Logged values cannot be changed. A run resumes by its name, which ends in a part of StreamTune's run id.
    """

    name = "trackio"
    _run: Any

    def start(self) -> dict[str, Any]:
        import trackio

        # Trackio prints to stdout, which another program may parse.
        for module in [found for key, found in sys.modules.items() if key.partition(".")[0] == "trackio"]:
            module.print = _print_nothing  # type: ignore[attr-defined]
        if self.offline:
            for variable in TRACKIO_REMOTES:
                os.environ.pop(variable, None)
        ids = dict(self.ids) or {
            "project": project_name("TRACKIO_PROJECT"),
            "name": f"{self.facts.name}-{self.facts.run[:6]}",
        }
        self._run = trackio.init(**ids, config=values_at_start(self.facts), resume="allow", embed=False)
        return ids

    def log_numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        import trackio

        shown = "\n\n".join(f"**{each['prompt']}**\n\n{each['completion']}" for each in samples)
        self._run.log({"samples": trackio.Markdown(shown)}, step=step)

    def log_image(self, step: int, path: Path) -> None:
        import trackio

        self._run.log({path.stem: trackio.Image(str(path))}, step=step)

    def close(self, status: str) -> None:
        self._run.finish()


def _print_nothing(*values: Any, **options: Any) -> None:
    """Print nothing; replaces ``print`` in Trackio."""


CLASSES: dict[str, type[Tracker]] = {
    kind.name: kind for kind in (TensorboardTracker, WandbTracker, MlflowTracker, TrackioTracker)
}
"""Name in ``report_to`` -> class of the tracker."""
