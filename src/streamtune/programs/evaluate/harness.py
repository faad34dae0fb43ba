"""Run tasks of lm-evaluation-harness, where it is installed, on the model that is loaded already."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamtune.base.adapters import base_of
from streamtune.errors import ArgumentError, RunError, StreamTuneError

OPTION = "--lm-eval"


def check_harness(tasks: Sequence[str]) -> None:
    """Refuse where lm-evaluation-harness is not installed, or a file of a task is not there.

    Raises:
        ArgumentError: It is so.
    """
    if find_spec("lm_eval") is None:
        raise ArgumentError(
            "lm-evaluation-harness is not installed",
            where=OPTION,
            mend="pip install lm-eval, or leave --lm-eval out",
        )
    for task in tasks:
        if task.endswith((".yaml", ".yml")) and not Path(task).is_file():
            raise ArgumentError(f"there is no file {task}", where=OPTION, mend="name a task, or the file of one")


def run_harness(
    model: Any, tokenizer: Any, tasks: Sequence[str], *, max_length: int, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return the figures of tasks, by the name of the task.

    The model computes as transformers computes it, in the dtype of its weights: it is not streamed.

    Args:
        model: With its adapters, not streamed, in evaluation mode.
        tokenizer: Its tokenizer.
        tasks: Names that the harness knows, or YAML files of tasks.
        max_length: Tokens of a request at most; longer ones lose their beginning.
        limit: Documents of each task at most.

    Raises:
        ArgumentError: A task is not known.
        RunError: The harness failed.
    """
    import lm_eval  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    try:
        manager = TaskManager(include_path=sorted({str(file.parent.resolve()) for file in files}) or None)
        names = [_name_of(task) for task in tasks]
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise ArgumentError(
                f"lm-evaluation-harness knows no task '{unknown[0]}'",
                where=OPTION,
                mend="`lm-eval ls tasks` lists those it knows; a task of your own is named by its YAML file",
            )
        wrapped = HFLM(pretrained=base_of(model), tokenizer=tokenizer, max_length=max_length, batch_size=1)
        found = lm_eval.simple_evaluate(
            model=wrapped, tasks=names, task_manager=manager, limit=limit, log_samples=False, bootstrap_iters=1000
        )
    except StreamTuneError:
        raise
    except Exception as error:  # of a package with its own errors, which are not ours to list
        raise RunError(
            f"lm-evaluation-harness failed: {type(error).__name__}: {error}",
            where=OPTION,
            mend="--debug shows where; `lm-eval run` with the exported model tells if it is the task",
        ) from error
    return {name: _figures(figures) for name, figures in found["results"].items()}


def _name_of(task: str) -> str:
    """Return the name of a task; of a file the one that is written in it.

    Raises:
        ArgumentError: There is none in it.
    """
    if not task.endswith((".yaml", ".yml")):
        return task
    for line in Path(task).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key == "task" and value.strip():
            return value.split("#")[0].strip().strip("'\"")
    raise ArgumentError(f"{task} names no task", where=OPTION, mend="write `task: NAME` in it")


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a task; ``acc,none`` is ``acc``, and what is no number is left out."""
    return {
        name.removesuffix(",none"): value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
