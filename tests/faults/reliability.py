"""docs/reference/reliability.md: what was broken, how often the run survived it, and how to see it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_page"]

Figures = Mapping[str, Mapping[str, Any]]


def write_page(
    target: Path,
    figures: Figures,
    suites: Mapping[str, str],
    machine: str,
    attacks: Sequence[Mapping[str, str]] = (),
) -> None:
    """Write the page; a figure that was not measured is said to be missing."""
    parts = [INTRODUCTION.format(machine=machine), _table(figures), STATUS, _status(suites), HOW]
    parts += [f"{title}\n\n{text}\n{_others(figures, mine)}" for title, (text, mine) in OTHERS.items()]
    parts.append(ATTACKS + "\n" + _attacks(attacks))
    parts.append(LIMITS)
    target.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _table(figures: Figures) -> str:
    rows = ["| what is done to a run | figure | suite |", "|---|---|---|"]
    for what, suite, tell in ROWS:
        try:
            found = tell(figures)
        except KeyError:
            found = "not measured"
        rows.append(f"| {what} | {found} | `{suite}` |")
    return "\n".join(rows) + "\n"


def _share(name: str, part: str, whole: str = "trials") -> Callable[[Figures], str]:
    return lambda figures: f"**{figures[name][part]}/{figures[name][whole]}**"


def _resumed(objective: str) -> Callable[[Figures], str]:
    def tell(figures: Figures) -> str:
        workers = [count for count in (0, 2) if f"resume_{objective}-{count}" in figures]
        found = [figures[f"resume_{objective}-{count}"] for count in workers]
        share = f"**{sum(each['identical'] for each in found)}/{sum(each['trials'] for each in found)}**"
        if not found:
            raise KeyError(objective)
        return share if len(found) == 2 else f"{share}; not measured with {2 - workers[0]} workers"

    return tell


def _kill(figures: Figures) -> str:
    found = figures["kill_random"]
    return f"**{found['identical']}/{found['trials']}** bit-identical ({found['kills']} kills)"


def _crash(figures: Figures) -> str:
    found = figures["crash"]
    covered = f"{found['states']} states, {found['distinct']} of them distinct"
    return f"**{found['recovered']}/{found['distinct']}** bit-identical ({covered})"


def _flips(figures: Figures) -> str:
    found = figures["flips"]
    return f"**{found['loaded']}** loaded of {found['flips']:,} flips and {found['truncations']} truncations"


def _phases(figures: Figures) -> str:
    found = figures["phases"]
    return f"**{found['identical']}/{found['trials']}**, the slowest in {found['slowest_seconds']} s"


def _nan(figures: Figures) -> str:
    found = figures["nan"]
    return f"**{found['steps_late']}** steps late, weights changed in **{found['changed']}** of {found['trials']}"


def _tmpfs(figures: Figures) -> str:
    found = figures["disk_tmpfs"]
    return f"**{found['intact']}/{found['trials']}** (full in {found['ran_full']})"


def _overhead(figures: Figures) -> str:
    found = figures["saving"]

    def told(name: str) -> str:
        median, low, high = found[name]["percent"]
        return f"**{median:.1f}%** of the step time {name} (95%: {low:.1f} to {high:.1f}, {found[name]['saves']} saves)"

    return (
        f"{told('asynchronous')}, {told('synchronous')}: 350 MB every {found['save_steps']} steps of "
        f"{found['asynchronous']['step_seconds']:.2f} s; one core trains, one is left; "
        f"{found['asynchronous']['processor_percent']:.1f}% of the processor time"
    )


ROWS: tuple[tuple[str, str, Callable[[Figures], str]], ...] = (
    ("SIGKILL at seeded random instants, half inside a save, half of those in the middle of a write", "kill", _kill),
    (
        "SIGKILL at every open, mkdir, fsync, rename and unlink of a run that saves twice, asynchronous",
        "kill",
        _share("kill_calls_asynchronous", "identical"),
    ),
    ("the same, synchronous", "kill", _share("kill_calls_synchronous", "identical")),
    ("a complete checkpoint is left right after such a kill", "kill", _share("kill_left", "with_a_checkpoint")),
    ("power cut at every call: what was not synced is lost, in three ways", "crash", _crash),
    ("disk full (ENOSPC) at every write, some torn", "disk", _share("disk_ENOSPC", "intact")),
    ("input/output error (EIO) at every call", "disk", _share("disk_EIO", "intact")),
    ("read-only (EROFS) from every call on", "disk", _share("disk_EROFS", "intact")),
    ("a tmpfs of 1 MiB that fills up at every 8 KiB", "disk", _tmpfs),
    (
        "resumed at every step of 40: sft, two epochs, accumulation 4, workers 0 and 2",
        "resume",
        _resumed("sft"),
    ),
    (
        "resumed at every step of 40: dpo, two epochs, accumulation 4, workers 0 and 2",
        "resume",
        _resumed("dpo"),
    ),
    ("resumed at every step of 40: grpo, accumulation 4, two iterations", "resume", _share("resume_grpo", "identical")),
    ("bytes of a checkpoint flipped, files truncated", "flips", _flips),
    (
        "a file that is kept between runs (rows, tokenizer, hashes, simulation, plan, rates, log-probs), damaged in 13 "
        "ways: the same result, one message, made again",
        "kept",
        _share("kept_files", "made_again"),
    ),
    ("SIGTERM while loading, in a forward, in the optimizer, evaluating, saving, writing the model", "phases", _phases),
    ("NaN in the loss of micro-batch k, for every k", "steps", _nan),
    (
        "40 starts in one directory at random offsets, one held up while it loads: refused, and nothing changed",
        "starts",
        _share("starts_40_loading", "refused"),
    ),
    ("the same, held up in a step", "starts", _share("starts_40_7", "refused")),
    ("what saving costs", "saving", _overhead),
)


def _of_ranks(name: str) -> bool:
    return name.startswith("rank")


RANKS = """A real run (`streamtune sft --nproc`, DDP over gloo) in which one rank kills or stops itself in the middle of
a phase: loading the model, a forward, a backward, the optimizer's step, evaluating, writing its part of a checkpoint.
It is rank 0, which listens to the others, in every other phase. For the blocked port the ranks are on two network name
spaces, and everything between them is dropped but for what watches them. Counted where all processes were gone within
30 s, none was left behind, and the one error shown names the rank and, after loading, the step; of a blocked port, of
which no rank is to blame: the line each rank stands at.
"""

HOSTILE = """What is guaranteed, and what is not, is in [security.md](../security.md).
"""

OTHERS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "## Several ranks": (RANKS, _of_ranks),
    "## Recipes, paths and files that are out to do harm": (HOSTILE, lambda name: not _of_ranks(name)),
}
"""Sections of suites that tell their own figures, with ``figures.tell``."""


TITLES = {
    "rank_SIGKILL_in_any_phase_of_2": "2 ranks, one killed (SIGKILL) in each phase",
    "rank_SIGKILL_in_any_phase_of_4": "4 ranks, one killed (SIGKILL) in each phase",
    "rank_SIGSTOP_in_any_phase_of_2": "2 ranks, one stopped (SIGSTOP) in each phase",
    "rank_SIGSTOP_in_any_phase_of_4": "4 ranks, one stopped (SIGSTOP) in each phase",
    "rank_port_blocked_in_any_phase_of_2": "2 ranks on two machines, what is between them dropped in each phase",
    "rank_port_blocked_in_any_phase_of_4": "4 ranks on two machines, what is between them dropped in each phase",
    "ranks_killed_within_a_save_of_ddp": "2 ranks (DDP), one killed at each part of a save: goes on bit-identical",
    "ranks_killed_within_a_save_of_zero3": "2 ranks (ZeRO-3), the same",
    "recipe_fuzz": "damaged recipes: an answer or one error, within a second and 200 MB",
    "data_fuzz": "damaged data files: rows, or one error with its place",
    "path_payloads": "names that lead out of a folder, as a model's shards and a checkpoint's files: refused",
    "canaries_in_model_folders": "code hidden in folders with models that did not run",
    "canaries_in_recipes": "code hidden in recipes that did not run",
    "hostile_templates_limited": "chat templates without end or measure: ended in time, with one error",
    "hostile_templates_refused": "chat templates that reach for Python: refused",
    "secrets_in_runs": "tokens planted around runs that are in none of the files written and nothing said",
    "connections_of_a_local_run": "connections of a run that names nothing remote",
}
"""Of the figures of :data:`OTHERS`, as a reader wants them; one that is not here is told by its name."""


def _others(figures: Figures, mine: Callable[[str], bool]) -> str:
    """A table; those of :data:`TITLES` that were not measured are in it as well."""
    measured = {name for name, values in figures.items() if "of" in values}
    names = [name for name in [*TITLES, *sorted(measured - TITLES.keys())] if mine(name)]
    rows = ["| what | figure | more |", "|---|---|---|"]
    for name in names:
        title = TITLES.get(name, name.replace("_", " "))
        if name not in measured:
            rows.append(f"| {title} | not measured | |")
            continue
        values = figures[name]
        # Nothing is to be counted where a figure is of nothing.
        share = f"{values['done']}/{values['of']}" if values["of"] else f"{values['done']}"
        rows.append(f"| {title} | **{share}** | {_more(values)} |")
    return "\n".join(rows) + "\n"


def _more(values: Mapping[str, Any]) -> str:
    """Whatever else a suite told, in words."""
    told = []
    for key, value in values.items():
        if key in ("name", "done", "of") or value in ([], {}):
            continue
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            told.append(f"{name} " + ", ".join(f"{inner} ({count} times)" for inner, count in value.items()))
        elif name.endswith(" seconds"):
            told.append(f"{name.removesuffix(' seconds')}: {value} s")
        elif name.endswith(" mib"):
            told.append(f"{name.removesuffix(' mib')}: {value} MiB")
        else:
            told.append(f"{name}: {'yes' if value is True else 'no' if value is False else value}")
    return "; ".join(told)


def _attacks(attacks: Sequence[Mapping[str, str]]) -> str:
    """Return a table for each kind of attack: the deed and its outcome."""
    lines: list[str] = []
    for kind in dict.fromkeys(attack["kind"] for attack in attacks):
        lines += [f"### {kind}", "", "| what is done | outcome |", "|---|---|"]
        lines += [f"| {attack['title']} | {attack['outcome']} |" for attack in attacks if attack["kind"] == kind]
        lines.append("")
    return "\n".join(lines or ["Not measured.", ""])


def _status(suites: Mapping[str, str]) -> str:
    return "".join(f"- `{name}`: {status}\n" for name, status in suites.items())


INTRODUCTION = """# Runs that survive

Written by `make faults`; do not edit. Every figure is counted by a test that fails where it is not what it should be.
"Bit-identical" compares a run that was broken and went on with one that was left alone: every weight, the optimizer's
state, the generators, the position in the data, and each line of `metrics.jsonl` but for its clock.

The page was written on {machine}. A suite was run with the versions of its commit, which is named below.
"""

STATUS = """## Suites

`python -m tests.faults NAME` runs one alone. A part of each is in `make test`. Below: how long each took, in
minutes and seconds, and the commit it ran at.
"""

HOW = """## How it is done

- **Runs.** The real command line, forked from a process that has imported everything (`tests/faults/zygote.py`); a run
  of ten steps with five checkpoints takes about half a second. The model is a Qwen3 of 13,000 parameters with dropout.
- **Faults in the system.** A library in C is loaded before all others (`tests/faults/shim.c`). It counts `open`,
  `rename`, `fsync`, `unlink`, `mkdir` and `write` below a folder, and at the chosen call kills the process, tears the
  write in two, or returns the error. It sees what goes through the C library; the rename within safetensors does not,
  and happens inside the staging directory.
- **Power cuts.** The same library writes down every call and keeps a link to every file that is deleted. From that
  `tests/faults/crash.py` lays out what a disk may hold after each call: nothing but what was synced; every name and
  only the synced bytes; or names up to some moment after the last sync, as a journal keeps them, and some more bytes.
- **A full disk.** A tmpfs of 1 MiB in a mount namespace of its own, with ever more on it; and ENOSPC, EIO and EROFS
  returned at every call. Each such run must end in 0, or in 1 with the bytes it takes and those that are free; the
  checkpoints before must verify; and without the fault it goes on to the same end.
- **Kills.** Instants are drawn from the seeds 0 to 199. Every other one is a call inside a save, before it or in the
  middle of it; the rest are moments of the whole run, loading included. A third of the runs are killed twice.

## What a checkpoint is

A directory, staged as `.tmp-step-N`, every file fsynced, `manifest.json` (size and SHA-256 of each file, and a digest
of itself) written last, then the directories, the rename, and the parent. It is read back before an older one is
deleted, and only checkpoints with this run's own mark in the manifest are ever deleted. When a run goes on, every byte
is compared with the manifest: a file that differs, is missing or was added, a symbolic link, a path that leads out of
the checkpoint, a manifest that is not byte for byte what it says: it is named and the one before is used. Tensors are
safetensors and everything else JSON; nothing is unpickled.

With `save_async` (the default) the training thread copies what training changes to the host and goes on; one worker
writes, syncs, verifies and deletes. Of several ranks each copies what it holds and has such a worker; these agree over
a group of their own, so that all write or none does. One save is in flight at most: its copy is the memory it costs.
Where that would be more than half of the host memory that is free, training waits for the save instead. An error is
raised at the next boundary between steps, and a run that ends or stops waits for its save.

## What a resume compares

Keys of the recipe that decide the result, and fingerprints of what is read again: a difference is refused unless it is
named with `--allow-change KEY`.

| key | fingerprint of |
|---|---|
| `data` | every token of the rows; other data is gone through from its beginning |
| `base` | configuration and weights of `model_name_or_path`; of a model on a hub its commit |
| `adapter` | the same of the base that adapters in that folder name |
| `reference` | the same of `ref_model_name_or_path` |
| `rewards` | the source of your reward functions, and of modules they import from beside them |

Where all weights are trained they come from the checkpoint, and the base is compared only where it is the reference.
Keys that do not change the result, the versions of streamtune, torch and transformers, and the number of ranks are told
where they differ; so are the tokenizer's files, for a run goes on with the tokenizer in its checkpoint. Which run is in
a directory, and from which checkpoint it goes on, is decided under a lock that is held until the run ends: a second
start is refused, with the process, host and time of the first. Where every checkpoint of a run is damaged or gone it is
left as it is.
"""

ATTACKS = """## Attacks

Each is made on real runs of the tiny recipe by a test (`tests/faults/attacks`), which fails where the outcome is
another: a wrong exit code, a traceback, a hang, a changed file that is not the run's, an end that is not bit-identical.
"""

LIMITS = """## What is not tested here

- An accelerator: with `deterministic: true` torch refuses kernels that differ from run to run. Without it a resumed run
  on an accelerator is as far from the uninterrupted one as two runs are from each other.
- A disk that lies about fsync. A checkpoint is read back before another is deleted, with its pages dropped from memory
  first where the system allows that, which finds what the disk already shows.
- Several real machines, and NCCL: ranks talk by gloo, and "two machines" are two network name spaces on one.
- Windows, and file systems without atomic rename.
"""
