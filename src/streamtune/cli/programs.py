"""Tables of commands, and of other functions in ``streamtune.programs`` that are imported only when needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

COMMANDS: tuple[tuple[str, str, str], ...] = (
    # name, heading in the help, function
    ("sft", "Training", "streamtune.cli.training:sft"),
    ("dpo", "Training", "streamtune.cli.training:dpo"),
    ("grpo", "Training", "streamtune.cli.training:grpo"),
    ("data", "Measuring", "streamtune.cli.data:data"),
    ("plan", "Measuring", "streamtune.cli.plan:plan"),
    ("bench", "Measuring", "streamtune.programs.bench.bench_command:bench"),
    ("probe-max-len", "Measuring", "streamtune.programs.probe.probe_command:probe_max_len"),
    ("verify", "Measuring", "streamtune.programs.verify.verify_command:verify"),
    ("teach", "Training", "streamtune.programs.evaluate.eval_commands:teach"),
    ("generate", "Afterwards", "streamtune.programs.generate.generate_command:generate"),
    ("eval", "Afterwards", "streamtune.programs.evaluate.eval_commands:evaluate"),
    ("export", "Afterwards", "streamtune.programs.export.export_command:export"),
    ("report", "Afterwards", "streamtune.programs.report.page:report"),
    ("validate", "Recipes", "streamtune.cli.recipes:validate"),
    ("recipes", "Recipes", "streamtune.cli.recipes:recipes"),
    ("recipes import", "", "streamtune.programs.imports.import_command:import_recipe"),
    ("optim", "Recipes", "streamtune.cli.recipes:optimizers"),
    ("schema", "Recipes", "streamtune.cli.recipes:schema"),
    ("doctor", "This machine", "streamtune.cli.doctor:doctor"),
    ("env", "This machine", "streamtune.cli.env:env"),
)
"""Commands, in the order of the help. A command loads PyTorch only when it runs."""

PARTS = {
    "trackers": "streamtune.programs.trackers.reporter:make_reporters",
    "check trackers": "streamtune.programs.trackers.services:check_installed",
    "page of a run": "streamtune.programs.report.page:write_report",
    "page of rows": "streamtune.programs.report.rows_page:render_rows",
}
"""Key -> ``module:name`` of a function in ``streamtune.programs``."""


def import_object(entry: str) -> Any:
    """Import and return the object named ``module:name``."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)
