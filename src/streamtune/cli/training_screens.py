"""The screens of the training commands: the banner of a run, its outcome, and what the trained model wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from textwrap import indent
from typing import TYPE_CHECKING, Any

from rich.text import Text

from streamtune.base.adapters import base_of
from streamtune.base.privacy import plain
from streamtune.base.text import show_size
from streamtune.recipe import code_of
from streamtune.recipe.keys.preset import describe_preset

from .console import out, print_rows, print_title
from .plan_screen import describe_optimizer, describe_plan

if TYPE_CHECKING:
    from streamtune.run.train import Run, RunOutcome

QUANTIZED = {
    "int8": "TorchAoConfig(Int8WeightOnlyConfig())",
    "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)',
}
"""Value of ``quantization_config`` with which transformers loads the base a run was trained on."""
SPARK = "▁▂▃▄▅▆▇█"


def print_banner(run: Run) -> None:
    """Print a summary of the run before its first step."""
    from streamtune.cli.data_screen import describe_batches
    from streamtune.cli.recipes import method_facts

    print_title(str(run.start.loaded.path))
    print_rows(
        [
            ("model", _describe_model(run)),
            *([("positions", positions)] if (positions := _describe_positions(run)) else []),
            ("data", run.prepared.report.describe()),
            *describe_batches(run.batch_facts if run.recipe.batching != "rows" or run.recipe.packing else None),
            ("engine", _describe_engine(run)),
            *([("ranks", _describe_ranks(run))] if run.world.size > 1 else []),
            *([("deepspeed", _describe_deepspeed(run))] if run.recipe.deepspeed is not None else []),
            *([("memory", describe_plan(run.streamed.memory))] if run.streamed.memory is not None else []),
            *([("without", _describe_baselines(run))] if run.streamed.baselines else []),
            *([("preset", preset)] if (preset := describe_preset(run.recipe)) is not None else []),
            *method_facts(run.recipe),
            *([("stops at", _describe_ends(run))] if run.added_ends else []),
            ("steps", _describe_steps(run)),
            ("output", _describe_output(run)),
            *([("runs code", "; ".join(code))] if (code := code_of(run.recipe)) else []),
        ]
    )


def _describe_model(run: Run) -> str:
    from streamtune import models

    total, trainable = run.parameters.total, run.parameters.trainable
    trained = "all trained" if trainable == total else f"{trainable:,} ({trainable / total:.2%}) trained"
    if run.recipe.step_kind.gradients == "block":
        trained += " at a time"
    base = base_of(run.model)
    dtype = str(base.dtype).removeprefix("torch.")
    if run.start.quantization is not None:
        experts = " and experts" if models.has_packed_experts(run.model) else ""
        dtype += f", linear layers{experts} in {run.start.quantization}"
    if run.recipe.weight_rounding == "stochastic":
        dtype += ", rounded stochastically"
    autocast = ", computed in bfloat16" if run.recipe.bf16 else ""
    return f"{type(base).__name__}, {_short(total)} parameters, {trained}; {dtype}{autocast} on {run.device}"


def _describe_positions(run: Run) -> str:
    """Describe the change to the model's positions that the recipe asks for; empty if it asks for none."""
    from streamtune import models

    config, scaling = base_of(run.model).config, run.recipe.rope_scaling
    if scaling is None and run.recipe.rope_theta is None:
        return ""
    theta = f"base {run.recipe.rope_theta:g}, " if run.recipe.rope_theta is not None else ""
    kind = f"{scaling.rope_type}, " if scaling is not None else ""
    return f"{theta}{kind}{models.pretrained_positions(config) or 0:,} to {models.position_limit(config) or 0:,} tokens"


def _describe_engine(run: Run) -> str:
    return f"exact streamed backward: {run.handle.schedule.describe(len(run.handle.layers))}"


def _describe_baselines(run: Run) -> str:
    """Describe the memory of the longest step without streaming."""
    assert run.streamed.memory is not None
    found, peak = run.streamed.baselines, run.streamed.memory.simulation.peak_bytes
    plain, checkpoint = show_size(found["plain"]), show_size(found["checkpoint"])
    return (
        f"the same step in {plain} by plain autograd, {checkpoint} by gradient checkpointing, {show_size(peak)} as "
        "planned; all simulated"
    )


def _describe_ranks(run: Run) -> str:
    recipe, world = run.recipe, run.world
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    nodes = f" on {world.size // local} machines" if world.size > local else ""
    shared = "PyTorch FSDP2" if recipe.fsdp else "a whole model each (DDP)"
    if recipe.deepspeed is not None:
        shared = f"DeepSpeed {recipe.deepspeed}"
    sequences = f"; each sequence on {world.sequence_size}" if world.sequence_size > 1 else ""
    return f"{world.size}{nodes}; {shared}{sequences}"


def _describe_deepspeed(run: Run) -> str:
    """Describe the values the recipe filled into the configuration; all of it is written to the run's directory."""
    from streamtune.distributed.deepspeed_config import filled

    assert run.recipe.deepspeed is not None
    values = filled(run.recipe.deepspeed, run.backend.config)
    shown = ", ".join(f"{key.removeprefix('zero_optimization.')} {json.dumps(value)}" for key, value in values.items())
    return f"{shown or 'as written'}; all of it in {run.directory.deepspeed.name}"


def _describe_ends(run: Run) -> str:
    from streamtune.run.samples import describe_ends

    return describe_ends(run.added_ends, run.tokenizer, run.model)


def _describe_steps(run: Run) -> str:
    from streamtune.tasks.steps import scaled_rate

    recipe, plan = run.recipe, run.plan
    rows, unit = run.start.rows_per_step, run.start.task.step_unit
    size = f"{rows} {unit}{'s' if rows > 1 else ''}"
    if recipe.tokens_per_batch is not None:
        size = f"at most {recipe.tokens_per_batch:,} tokens in {unit}s"
    if recipe.draws > 1:
        size += f", chosen among {recipe.draws * rows} by a forward of each"
    supervised = plan.supervised_steps
    steps = plan.total_steps - supervised
    epochs = "" if plan.steps_per_epoch is None else f" ({steps / plan.steps_per_epoch:.3g} epochs)"
    warmup = f" after {plan.warmup_steps:,} of warm-up" if plan.warmup_steps else ""
    if plan.warmup_steps >= plan.total_steps:
        warmup += ", more steps than the run has"
    first = f"{supervised:,} supervised, then " if supervised else ""
    return (
        f"{first}{steps:,}{epochs} of {size}; {describe_optimizer(recipe)}, "
        f"learning rate {scaled_rate(recipe, run.world):.4g}, {recipe.lr_scheduler_type}{warmup}"
    )


def _describe_output(run: Run) -> str:
    if run.checkpoint is not None:
        return f"{run.directory.path}, going on from {run.checkpoint.path.name}"
    if run.start.replaces:
        return f"{run.directory.path}; the run that is there is moved aside"
    return str(run.directory.path)


def print_outcome(run: Run, outcome: RunOutcome) -> None:
    """Print the results of the run, and how to load the model or resume."""
    state, folder = outcome.progressed, run.directory.path
    rows = []
    if state.first_loss is not None and state.last_loss is not None:
        held_out = f", held out {state.eval_loss:.3f}" if state.eval_loss is not None else ""
        rows.append(("loss", f"first {state.first_loss:.3f}, last {state.last_loss:.3f}{held_out}"))
    rows += _metric_rows(outcome)
    # The loss of a policy stands near 0 whatever it learns.
    rewards = [record["reward"] for record in outcome.records if "reward" in record]
    curve = rewards or outcome.losses
    if len(curve) > 1:
        line = sparkline(curve, width=min(out.width - 24, 60))
        rows.append(("", f"{line} {'reward' if rewards else 'loss'}"))
    if state.skipped:
        rows.append(("skipped", f"{state.skipped:,} of {state.step:,} steps, which were not finite: see events.jsonl"))
    if outcome.tokens > 0:
        rate = f"{outcome.tokens / outcome.seconds:,.0f} tokens/s"
        rows.append(("speed", f"{outcome.tokens:,} tokens in {outcome.seconds:.0f} s, {rate}, since this start"))
    if outcome.moved_aside is not None:
        rows.append(("before", f"the run that was here is now in {outcome.moved_aside}"))
    names = ("report.html", "loss.png", "metrics.jsonl")
    if drawn := [name for name in names if (folder / name).is_file()]:
        rows.append(("curves", f"{folder / drawn[0]}" + "".join(f", {name}" for name in drawn[1:])))
    if outcome.finished:
        rows.append(("model", str(run.directory.final)))
        rows.append(("load it", _how_to_load(run)))
        if run.added_ends and run.recipe.finetuning_type != "full":  # peft takes the generation config of the base
            ends = f'generation_config=GenerationConfig.from_pretrained("{run.directory.final}")'
            rows.append(("generate", f"model.generate(..., {ends}) stops where the trained turns end"))
        rows.append(("use it", f"streamtune generate {folder}; streamtune export {folder} OUT"))
        again = run.directory.recipe
        rows.append(("verify", f"streamtune verify {again}: is the streamed gradient that of plain autograd?"))
        rows.append(("plan", f"streamtune plan {again} --device h100: what fits, how fast, here or elsewhere"))
        rows.append(("longest", f"streamtune probe-max-len {again}: the longest row that trains"))
    elif outcome.checkpoint is not None:
        rows.append(("saved", str(outcome.checkpoint)))
        rows.append(("go on", "run the same command again"))
    else:
        rows.append(("saved", "nothing: no step was done"))
    out.print(_title(run, outcome), soft_wrap=True)
    print_rows(rows)
    print_samples(outcome.samples)


def _metric_rows(outcome: RunOutcome) -> list[tuple[str, str]]:
    """Return rows for the accuracy of pairs and the reward: the first, the last and the held-out value."""
    rows = []
    for name, title in (("rewards/accuracies", "accuracy"), ("reward", "reward")):
        course = [record[name] for record in outcome.records if name in record]
        if course:
            found = outcome.held_out.get(f"eval_{name}")
            held_out = f", held out {found:.3f}" if found is not None else ""
            rows.append((title, f"first {course[0]:.3f}, last {course[-1]:.3f}{held_out}"))
    return rows


def _title(run: Run, outcome: RunOutcome) -> Text:
    if not outcome.finished:
        step = f"{outcome.progressed.step:,} of {run.plan.total_steps:,}"
        return Text(f"Stopped after step {step}", style="bold yellow")
    if outcome.tokens == 0 and outcome.failure is None:
        return Text("Done before: nothing left to train (--resume never trains anew)", style="bold green")
    if outcome.failure is not None:
        return Text("At its end, but hardly trained", style="bold red")
    if outcome.progressed.ended_early:
        step = f"{outcome.progressed.step:,} of {run.plan.total_steps:,}"
        return Text(
            f"Done early, after step {step}: {run.recipe.metric_for_best_model} got no better", style="bold green"
        )
    return Text("Done", style="bold green")


def _how_to_load(run: Run) -> str:
    """Return the call that loads the model: for adapters on a quantised base, with its quantisation."""
    from streamtune import models

    if models.has_packed_experts(run.model):
        return "merge it first: transformers loads a quantised base without the quantisation of its experts"
    if models.taken_of(base_of(run.model)):
        return "merge it first: the base is quantised from weights that were changed (loftq_iter)"
    if run.recipe.finetuning_type != "full" and run.recipe.model is not None:
        return "merge it first: the base was made from a configuration and is in no folder that adapters could name"
    if run.recipe.finetuning_type != "full" and _describe_positions(run):
        return "merge it first: the base's configuration has other positions than the adapters trained at"
    loader = "AutoPeftModelForCausalLM" if run.recipe.finetuning_type != "full" else "AutoModelForCausalLM"
    quantized = f", quantization_config={QUANTIZED[run.start.quantization]}" if run.start.quantization else ""
    return f'{loader}.from_pretrained("{run.directory.final}"{quantized})'


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve as one line of text: ``width`` means of equal parts of ``values``, lowest to highest."""
    width = max(1, min(width, len(values)))
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(SPARK[round((mean - low) / ((high - low) or 1.0) * (len(SPARK) - 1))] for mean in means)


def _short(count: int) -> str:
    """Format a count: ``4.2M``, ``8.19B``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


# --- samples ----------------------------------------------------------------------------------------------------------


SHOWN_ANSWERS = 3
"""Held-out rows whose answers are printed; ``samples.jsonl`` has all."""


def print_samples(samples: Sequence[Mapping[str, Any]]) -> None:
    """Print what was asked and written; of held-out rows the first few, and how many were answered right.

    Args:
        samples: Lines of ``samples.jsonl``; held-out rows have the key ``right``.
    """
    own = [sample for sample in samples if "right" not in sample]
    rows = [sample for sample in samples if "right" in sample]
    for sample in own:
        for title, text, style in (("asked", sample["prompt"], ""), ("wrote", sample["completion"], "green")):
            out.print(Text(f"  {title}", style="dim"))
            out.print(Text(indent(plain(text.strip("\n")) or "(nothing)", "    "), style=style), soft_wrap=True)
    if not rows:
        return
    for sample in rows[:SHOWN_ANSWERS]:
        verdict = "right" if sample["right"] else f"wrong, expected {plain(' '.join(sample['expected'].split()))}"
        asked = plain(_last_line(str(sample["prompt"])))
        wrote = plain(" ".join(sample["completion"].split())) or "(nothing)"
        out.print(Text(f"  held out, after {sample['prompt_tokens']:,} tokens: {asked}", style="dim"), soft_wrap=True)
        style = "green" if sample["right"] else "red"
        out.print(Text.assemble("    ", (wrote, style), f"  ({verdict})"), soft_wrap=True)
    right = sum(bool(sample["right"]) for sample in rows)
    shortest, longest = (edge(sample["prompt_tokens"] for sample in rows) for edge in (min, max))
    span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    out.print(
        Text.assemble(
            "  answered ", (f"{right} of {len(rows)}", "bold"),
            f" held-out rows right, {span} tokens each; none of them was trained on",
        ),
        soft_wrap=True,
    )  # fmt: skip


def _last_line(prompt: str) -> str:
    """Return the last line of a prompt that is not the name of who speaks next."""
    lines = [line for line in prompt.split("\n") if line.strip()]
    if len(lines) > 1 and lines[-1].strip("<|>: ") in ("assistant", "model"):
        lines.pop()
    return lines[-1].strip() if lines else ""
