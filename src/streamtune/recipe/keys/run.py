"""Keys of the run: seed, checkpoints, evaluation, samples, and code of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from streamtune.recipe.rules import GIVEN, Clash, Count, Custom, Not, Refusal, Rules, Spec, Steps, Text, Where, at_most


class SampleSpec(Spec):
    """Prompts that the model completes at the end of a run and, with `sample_steps`, while it trains."""

    prompt: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | Text | None = None
    """The user's message (the beginning of the text for a tokenizer without chat template), or a list of them."""

    held_out: Steps = 0
    """`sft`: also complete the prompts of so many held-out rows, the longest of them, by the likeliest token each time,
    and count the answers that are those of the rows."""

    max_new_tokens: Count = 64
    """Tokens to write at most."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts, one or several."""
        if self.prompt is None:
            return ()
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt


class RunKeys(Spec):
    """The run: its folder, what is saved, shown and tried, and when it ends."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the weights, the order of the rows and dropout."""

    shuffle: bool = True
    """Visit the rows in an order drawn from the seed, another one each epoch. `false`: in the order of the datasets,
    such as from easy to hard; with `packing`, packs in the order they were made."""

    output_dir: Annotated[Text, Field(default_factory=lambda: "runs/recipe")]
    """Folder of the run, relative to the working directory; without it, `runs/` and the recipe's file name."""

    save_steps: Steps = 0
    """Save a checkpoint every so many steps; 0 saves at the end and when interrupted."""

    save_total_limit: Count = 2
    """Checkpoints to keep."""

    save_async: bool = True
    """Copy what is saved to the host and write it while training goes on, one checkpoint at a time. Where the copy
    would take more than half of the memory that is free, training waits instead."""

    metric_for_best_model: Text | None = None
    """Keep the best checkpoints too, by this name of `metrics.jsonl` as it was when they were saved: `eval_loss`. An
    evaluation (`eval_...`) that is among the best so far is saved, whatever `save_steps` says."""

    greater_is_better: bool | None = None
    """True if more of that metric is better; without it, more is better unless its name ends in `loss`."""

    early_stopping_patience: Steps = 0
    """Stop, as at the end of the run, after so many evaluations in a row without a better `metric_for_best_model`; 0
    never does. The final model is that of the last step; the best one is a checkpoint."""

    early_stopping_threshold: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """`early_stopping_patience`: a metric is better if it is better by more than this."""

    save_best_limit: Count = 1
    """Best checkpoints to keep, besides the newest."""

    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: stop before the weights change, or leave that step out and go on."""

    max_skips: Steps = 10
    """Steps of the whole run that `on_nan: skip` may leave out."""

    on_oom: Literal["stop", "replan"] = "stop"
    """Memory that runs out in a step: stop and say what the planner would take next, or take it and do the step again,
    for the same gradient. With several ranks the run stops."""

    deterministic: bool = False
    """Refuse kernels whose result differs from run to run: slower on accelerators, and a resumed run is the same there
    to the last bit too. On the CPU it is in any case."""

    dataloader_num_workers: Annotated[int, Field(ge=0), at_most(1000)] = 0
    """Threads that prepare the batches of coming steps; 0 prepares each when it is its turn. The rows are the same."""

    eval_steps: Steps = 0
    """Evaluate on the held-out rows every so many steps; 0 evaluates at the end."""

    logging_steps: Count = 1
    """Without a terminal, print a line every so many steps; `metrics.jsonl` has every step."""

    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], Field(strict=False)] = ()
    """Experiment trackers that get what `metrics.jsonl` gets, through their own packages (`pip install
    'streamtune[trackers]'`). With `--offline` they write local files only."""

    sample: SampleSpec | None = None
    """Prompts to try at the end of the run, and while it trains."""

    sample_steps: Steps = 0
    """Complete the prompts of `sample` every so many steps, into `samples.jsonl`; 0 does it at the end only. Losses and
    weights stay what they are without."""

    callbacks: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Classes of your own that are called as the run goes on: `file.py:Name` or `module:Name`, with any of the methods
    `on_start`, `on_step`, `on_evaluate`, `on_end`. Needs `allow_code`."""

    allow_code: bool = False
    """Let code run that the recipe names: `callbacks` and, in grpo, reward functions of your own and what the model has
    written (`unit_tests`), the latter in a subprocess with limits on time and memory. `--allow-code` is the same."""

    @field_validator("report_to")
    @classmethod
    def _each_tracker_once(cls, report_to: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(report_to))


def _metric_of_patience(recipe: Any) -> Iterator[Refusal]:
    metric = recipe.metric_for_best_model
    if metric is None or not metric.startswith("eval_"):
        yield Refusal(
            "early_stopping_patience",
            "'early_stopping_patience' counts evaluations without a better 'metric_for_best_model', which is "
            f"{'not given' if metric is None else repr(metric)}",
            "add metric_for_best_model: eval_loss",
        )
    elif recipe.eval_steps == 0:
        yield Refusal(
            "early_stopping_patience",
            "'early_stopping_patience' counts evaluations, and there is one at the end alone",
            "add eval_steps: 100",
        )


EARLY_STOPPING_RULES: Rules = (
    Clash(
        {"early_stopping_threshold": GIVEN, "early_stopping_patience": 0},
        "'early_stopping_threshold' is read with 'early_stopping_patience'",
        "add early_stopping_patience: 3, or delete the line",
    ),
    Where({"early_stopping_patience": GIVEN}, Custom(_metric_of_patience)),
)


def _metric_without_rows(recipe: Any) -> Iterator[Refusal]:
    metric = recipe.metric_for_best_model
    if metric is not None and metric.startswith("eval_"):
        yield Refusal("metric_for_best_model", f"'metric_for_best_model: {metric}' needs rows to evaluate on", HOLD_OUT)


HOLD_OUT = "set val_size, such as val_size: 0.02, or eval_datasets"

EVALUATION_RULES: Rules = (
    Clash(
        {"sample_steps": GIVEN, "sample": None},
        "'sample_steps' needs prompts to complete",
        "add sample: {prompt: ...}, or a list: sample: {prompt: [..., ...]}",
    ),
    Clash(
        {"sample": Not(None), "sample.prompt": None, "sample.held_out": 0},
        "'sample' has nothing to complete",
        "add prompt: ..., or held_out: 10",
    ),
    Clash(
        {"sample.held_out": Not(None, 0), "objective": Not("sft")},
        "'held_out' compares with the answers of rows, and 'objective: {objective}' has none",
        "write prompt: ...",
    ),
    Clash(
        {"sample.held_out": Not(None, 0), "evaluates": False},
        "'held_out' needs rows that are held out",
        "set val_size, such as 0.02",
    ),
    Where({"evaluates": False}, Custom(_metric_without_rows)),
    Clash({"eval_steps": GIVEN, "evaluates": False}, "'eval_steps' needs rows to evaluate on", HOLD_OUT),
)
