"""Changes made by somebody else while a run loads, trains or saves; two runs at once."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil

from streamtune.train.checkpoint import newest_checkpoint
from tests.faults.attacks.lab import STOP, Attacks, Lab, checkpoints, digest, in_line
from tests.faults.kit import Done, complete_checkpoints, write_sft

ATTACKS = Attacks("Races")

SLOW = ("forward", 0, "time.sleep(0.1)")


def second_start(lab: Lab, *arguments: str) -> Done:
    """Start the same recipe in the same directory, from another folder."""
    other = lab.folder / "second"
    write_sft(other)
    return lab.start("--output-dir", str(lab.path), *arguments, at=other)


def wait_until_stopped(pid: int) -> None:
    """Wait until the signal has reached every thread: one of them may be in the middle of a write."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        if set(states) <= {"T", "t"}:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} does not stop")


def while_it_trains(lab: Lab, *arguments: str, stopped: bool = False) -> tuple[Done, dict[str, str], dict[str, str]]:
    """Start a second run in the directory after the first's second step; return how it ended, and the files."""
    found: list[tuple[Done, dict[str, str], dict[str, str]]] = []

    def then(pid: int) -> None:
        lab.wait_for_step(2)
        os.kill(pid, signal.SIGSTOP)
        wait_until_stopped(pid)
        try:
            before = digest(lab.path)
            found.append((second_start(lab, *arguments), before, digest(lab.path)))
        finally:
            os.kill(pid, signal.SIGCONT)

    lab.trained(acts=[SLOW], after=then)
    return found[0]


@ATTACKS("a second start with --resume never while the first trains (and is stopped, SIGSTOP)")
def second_never(lab: Lab) -> str:
    lab.write()
    done, before, after = while_it_trains(lab, "--resume", "never")
    assert done.status in (1, 2), done.output
    assert before == after
    return "refused; no byte of the first changed, which goes on to its end"


@ATTACKS("a second start with another learning rate and --allow-change while the first trains")
def second_changed(lab: Lab) -> str:
    lab.write()
    done, before, after = while_it_trains(lab, "--set", "learning_rate=0.5", "--allow-change", "learning_rate")
    assert done.status in (1, 2), done.output
    assert before == after
    return "refused; no byte of the first changed"


@ATTACKS("a second start through a symbolic link to the directory while the first trains")
def second_through_a_link(lab: Lab) -> str:
    lab.write()
    (lab.folder / "link").symlink_to("runs")
    done, before, after = while_it_trains(lab, "--output-dir", str(lab.folder / "link/tiny"))
    assert done.status in (1, 2), done.output
    assert before == after
    return "refused: it is the same directory"


@ATTACKS("a dry run in the directory while the first trains")
def dry_run_beside(lab: Lab) -> str:
    lab.write()
    done, before, after = while_it_trains(lab, "--dry-run")
    assert done.status in (0, 1, 2), done.output
    assert before == after
    return ("it says what would run" if done.status == 0 else "refused") + "; no byte of the first changed"


@ATTACKS("a run of dpo in the directory of a run of sft")
def other_objective(lab: Lab) -> str:
    lab.cut()
    write_sft(lab.folder, objective="dpo", beta=0.1)
    before = digest(lab.path)
    done = lab.start(command="dpo")
    assert done.status == 2, done.output
    assert digest(lab.path) == before
    return "refused; nothing changed"


@ATTACKS("the dataset is deleted after it was read")
def data_deleted(lab: Lab) -> str:
    lab.write()
    lab.trained(acts=[("forward", 3, "os.unlink('rows.jsonl')")])
    return "trained to the end from what was read"


@ATTACKS("the dataset is cut to half while the model loads")
def data_cut(lab: Lab) -> str:
    lab.write()
    lab.trained(acts=[("model", 1, "os.truncate('rows.jsonl', os.path.getsize('rows.jsonl') // 2)")])
    return "trained to the end from what was read"


@ATTACKS("the dataset is replaced between the tokenizer's reading of it and the rows'")
def data_replaced(lab: Lab) -> str:
    lab.write()
    swap = "Path('rows.jsonl').write_text(Path('rows.jsonl').read_text().replace('Add', 'Sum'))"
    done = lab.start(acts=[("data", 1, swap)])
    assert done.status in (0, 2), done.output
    if done.status == 0:  # then its identity is that of the rows it trained on: a second start agrees
        assert lab.trained().status == 0
    return "trained on what was read; the run's fingerprint is of these rows" if done.status == 0 else "refused"


@ATTACKS("the recipe is edited while the run trains")
def recipe_edited(lab: Lab) -> str:
    lab.write()
    lab.trained(acts=[("step", 3, "Path('tiny.yaml').write_text('nonsense: [')")])
    assert "nonsense" not in (lab.path / "recipe.yaml").read_text()
    return "the run keeps the recipe it began with"


@ATTACKS("the output directory is deleted while the run trains")
def output_deleted(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 5, "remove(run)")])
    assert done.status == 1, (done.status, done.output)
    assert "runs/tiny" in in_line(done.output).replace(" ", "")
    return "ends with 1 and names the directory"


@ATTACKS("the output directory is renamed while the run trains")
def output_renamed(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 5, "run.rename(run.parent / 'moved')")])
    moved = lab.folder / "runs/moved"
    assert complete_checkpoints(moved)
    assert done.status in (0, 1), (done.status, done.output)
    if done.status == 1:
        shutil.rmtree(lab.path, ignore_errors=True)
        moved.rename(lab.path)
        lab.goes_on()
        return "ends with 1 and names it; moved back it goes on bit-identical"
    return "trained on in the directory it had opened"


@ATTACKS("another directory takes the place of the output directory while the run trains")
def output_swapped(lab: Lab) -> str:
    lab.write()
    swap = "run.rename(run.parent / 'moved'); run.mkdir(); (run / 'theirs').write_text('precious')"
    done = lab.start(acts=[("step", 5, swap)])
    assert (lab.path / "theirs").read_text() == "precious"
    assert complete_checkpoints(lab.folder / "runs/moved")
    assert done.status in (0, 1), done.output
    return "ends with 1; their file and our checkpoints are kept" if done.status else "trained on where it began"


@ATTACKS("all checkpoints are deleted while the run trains")
def checkpoints_deleted(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 7, "remove(run / 'checkpoints')")])
    assert done.status in (0, 1), done.output
    if done.status == 0:
        assert newest_checkpoint(lab.path / "checkpoints", lambda text: None) is not None
    return "later ones are written; trained to the end" if done.status == 0 else "ends with 1"


@ATTACKS("a stranger's folder appears under the name of the next checkpoint")
def checkpoint_name_taken(lab: Lab) -> str:
    lab.write()
    plant = "p = run / 'checkpoints/step-000006'; p.mkdir(parents=True); (p / 'theirs').write_text('precious')"
    done = lab.start(acts=[("step", 5, plant)])
    kept = list(lab.folder.rglob("theirs"))
    assert done.status in (0, 1), done.output
    assert done.status == 1 or kept or "step-000006" in done.output, done.output
    return "trained to the end" + ("; their file is kept" if kept else "") if done.status == 0 else "ends with 1"


@ATTACKS("the staged checkpoint is deleted while it is written")
def staged_deleted(lab: Lab) -> str:
    lab.write(save_async=False)
    sweep = "[shutil.rmtree(p, ignore_errors=True) for p in (run / 'checkpoints').glob('.tmp-*')]"
    done = lab.start(acts=[("save", 2, "import threading; threading.Timer(0.004, lambda: " + sweep + ").start()")])
    assert done.status in (0, 1), done.output
    assert complete_checkpoints(lab.path)
    return "what is left verifies" + (", trained to the end" if done.status == 0 else ", ends with 1")


@ATTACKS("metrics.jsonl is deleted while the run trains")
def metrics_deleted(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 5, "os.unlink(run / 'metrics.jsonl')")])
    assert done.status in (0, 1), done.output
    return "trained to the end" if done.status == 0 else "ends with 1 and names it"


@ATTACKS("the owner of the lock is killed; the next start follows at once")
def owner_killed(lab: Lab) -> str:
    lab.write()

    def then(pid: int) -> None:
        lab.wait_for_step(3)
        os.kill(pid, signal.SIGKILL)

    done = lab.start(acts=[SLOW], after=then)
    assert done.status == -signal.SIGKILL
    lab.goes_on()
    return "it has the lock and ends bit-identical"


@ATTACKS("a child of the run outlives it: does it hold the lock?")
def child_outlives(lab: Lab) -> str:
    lab.write()
    child = "import subprocess; Path('child').write_text(str(subprocess.Popen(['sleep', '30']).pid))"
    done = lab.start(acts=[("step", 3, child), ("step", 5, STOP)])
    assert done.status == 143, done.output
    try:
        lab.goes_on()
    finally:
        psutil.Process(int((lab.folder / "child").read_text())).kill()
    return "no: the next start goes on bit-identical"


@ATTACKS("a checkpoint is damaged between the check of its bytes and the loading of its weights")
def damaged_after_the_check(lab: Lab) -> str:
    lab.cut()
    newest = checkpoints(lab.path)[-1].name
    file = f"next((run / 'checkpoints/{newest}').rglob('model.safetensors'))"
    damage = f"p = {file}; b = bytearray(p.read_bytes()); b[-1] ^= 1; p.write_bytes(bytes(b))"
    done = lab.start(acts=[("model", 1, damage)])
    assert done.status in (0, 1, 2), done.output
    if done.status != 0:
        return "found: the run stops"
    return "not found: the bytes are checked before they are read again"
