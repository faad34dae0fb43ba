"""Symbolic and hard links planted where a run reads and writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.faults.attacks.lab import Attacks, Lab, checkpoints, digest

ATTACKS = Attacks("Links")


@ATTACKS("`checkpoints` is a link to another run's")
def checkpoints_elsewhere(lab: Lab) -> str:
    lab.cut()
    shutil.move(lab.path / "checkpoints", lab.folder / "theirs")
    (lab.path / "checkpoints").symlink_to(lab.folder / "theirs")
    before = digest(lab.folder / "theirs")
    lab.refused("symbolic link")
    assert digest(lab.folder / "theirs") == before
    return "refused, theirs unchanged"


@ATTACKS("a checkpoint of the run is a link to a sound checkpoint elsewhere")
def one_checkpoint_elsewhere(lab: Lab) -> str:
    lab.cut()
    newest = checkpoints(lab.path)[-1]
    shutil.move(newest, lab.folder / "theirs")
    newest.symlink_to(lab.folder / "theirs")
    before = digest(lab.folder / "theirs")
    lab.refused("symbolic link")
    assert digest(lab.folder / "theirs") == before
    return "refused, theirs unchanged"


@ATTACKS("`metrics.jsonl` is a hard link to a victim")
def metrics_hard_linked(lab: Lab) -> str:
    lab.cut()
    victim = lab.folder / "victim"
    os.link(lab.path / "metrics.jsonl", victim)
    text = victim.read_text()
    done = lab.start()
    kept = victim.read_text() == text
    assert done.status == 2 or (done.status == 0 and kept), (done.status, done.output)
    return "refused" if done.status == 2 else "replaced, not written through: the victim is unchanged"


@ATTACKS("`run.json` and `recipe.yaml` are hard links to victims")
def identity_hard_linked(lab: Lab) -> str:
    lab.cut()
    victims = []
    for name in ("run.json", "recipe.yaml"):
        os.link(lab.path / name, lab.folder / f"victim-{name}")
        victims.append((lab.folder / f"victim-{name}", (lab.path / name).read_text()))
    lab.goes_on()
    assert all(victim.read_text() == text for victim, text in victims)
    return "replaced, not written through; bit-identical end"


def staged_names(run: Path) -> list[str]:
    """Return the names under which a run writes before it renames."""
    tops = ["run.json", "recipe.yaml", "metrics.jsonl", "events.jsonl", "loss.png", "final", "deepspeed.json"]
    steps = [f"checkpoints/.tmp-step-{step:06d}" for step in (2, 4, 6, 8, 10)]
    return [*(f".tmp-{name}" for name in tops), *steps, "checkpoints/.tmp-deleted-step-000006"]


@ATTACKS("every `.tmp-*` name of a finished half run is a link to a victim's file")
def staged_links_to_files(lab: Lab) -> str:
    lab.cut()
    victims = []
    for number, name in enumerate(staged_names(lab.path)):
        if not (lab.path / name).parent.is_dir():
            continue
        victim = lab.victim(f"victim-{number}")
        (lab.path / name).symlink_to(victim)
        victims.append(victim)
    done = lab.start()
    assert all(victim.read_text() == "precious\n" for victim in victims)
    assert done.status in (0, 2), done.output
    return f"{len(victims)} victims unchanged; " + ("the run went on" if done.status == 0 else "refused by name")


@ATTACKS("every `.tmp-*` name is a link to a victim's folder")
def staged_links_to_folders(lab: Lab) -> str:
    lab.cut()
    victims = []
    for number, name in enumerate(staged_names(lab.path)):
        if not (lab.path / name).parent.is_dir():
            continue
        victim = lab.folder / f"victim-{number}"
        victim.mkdir()
        (victim / "kept").write_text("precious\n")
        (lab.path / name).symlink_to(victim)
        victims.append(victim)
    done = lab.start()
    assert all(digest(victim).keys() == {"kept"} for victim in victims)
    assert all((victim / "kept").read_text() == "precious\n" for victim in victims)
    assert done.status in (0, 2), done.output
    return f"{len(victims)} victims unchanged; " + ("the run went on" if done.status == 0 else "refused by name")


@ATTACKS("every `.tmp-*` name dangles: a link to a file that does not exist")
def staged_links_dangle(lab: Lab) -> str:
    lab.cut()
    targets = []
    for number, name in enumerate(staged_names(lab.path)):
        if not (lab.path / name).parent.is_dir():
            continue
        target = lab.folder / f"made-{number}"
        (lab.path / name).symlink_to(target)
        targets.append(target)
    done = lab.start()
    assert not any(target.exists() for target in targets)
    assert done.status in (0, 2), done.output
    return "none was created; " + ("the run went on" if done.status == 0 else "refused by name")


@ATTACKS("the lock's name is a link to a victim")
def lock_is_a_link(lab: Lab) -> str:
    lab.cut()
    victim = lab.victim()
    made = {path.name for path in lab.path.iterdir()}
    locks = sorted(name for name in made if "lock" in name) or [".lock", "lock"]
    for name in locks:
        (lab.path / name).unlink(missing_ok=True)
        (lab.path / name).symlink_to(victim)
    done = lab.start()
    assert victim.read_text() == "precious\n"
    assert done.status in (0, 2), done.output
    return "the victim is unchanged; " + ("the run went on" if done.status == 0 else "refused by name")


@ATTACKS("`output_dir` itself is a link to a disk with room")
def output_is_a_link(lab: Lab) -> str:
    lab.write()
    (lab.folder / "disk").mkdir()
    (lab.folder / "runs").mkdir()
    (lab.folder / "runs/tiny").symlink_to(lab.folder / "disk")
    lab.goes_on()
    assert (lab.folder / "disk/final").is_dir()
    return "used, as it should be; bit-identical"


@ATTACKS("`output_dir` is a link that dangles")
def output_dangles(lab: Lab) -> str:
    lab.write()
    (lab.folder / "runs").mkdir()
    (lab.folder / "runs/tiny").symlink_to(lab.folder / "nowhere")
    done = lab.start()
    assert done.status in (0, 2), done.output
    return "the folder is made there" if done.status == 0 else "refused by name"


@ATTACKS("the output directory is moved to another place between two starts, and linked back")
def moved_and_linked_back(lab: Lab) -> str:
    lab.cut()
    shutil.move(lab.path, lab.folder / "elsewhere")
    lab.path.symlink_to(lab.folder / "elsewhere")
    lab.goes_on()
    return "goes on bit-identical"
