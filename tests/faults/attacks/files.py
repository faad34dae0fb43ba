"""Things of another type in the place of a run's files, of its data, or of the recipe."""

from __future__ import annotations

import os
import shutil
import stat

from tests.faults.attacks.lab import Attacks, Lab, checkpoints, digest

ATTACKS = Attacks("Other things in the place of files")


@ATTACKS("`metrics.jsonl` of the run is a named pipe")
def metrics_is_a_pipe(lab: Lab) -> str:
    lab.cut()
    (lab.path / "metrics.jsonl").unlink()
    os.mkfifo(lab.path / "metrics.jsonl")
    lab.refused("metrics.jsonl", "pipe|regular file", status=2)
    return "refused by name, without waiting for a writer"


@ATTACKS("`events.jsonl` of the run is a folder")
def events_is_a_folder(lab: Lab) -> str:
    lab.cut()
    (lab.path / "events.jsonl").unlink()
    (lab.path / "events.jsonl").mkdir()
    lab.refused("events.jsonl", status=2)
    return "refused by name"


@ATTACKS("`loss.png` of the run is a folder with a file in it")
def picture_is_a_folder(lab: Lab) -> str:
    lab.cut()
    (lab.path / "loss.png").unlink(missing_ok=True)
    (lab.path / "loss.png").mkdir()
    (lab.path / "loss.png/kept").write_text("kept")
    done = lab.start()
    assert done.status in (0, 2), done.output
    assert (lab.path / "loss.png/kept").read_text() == "kept"
    return "trained to the end without the picture" if done.status == 0 else "refused by name"


@ATTACKS("`final` is a file when the model is to be written")
def final_is_a_file(lab: Lab) -> str:
    lab.cut()
    (lab.path / "final").write_text("precious")
    done = lab.start()
    assert done.status in (1, 2), (done.status, done.output)
    assert "final" in done.output
    assert (lab.path / "final").read_text() == "precious"
    (lab.path / "final").unlink()
    lab.goes_on()
    return "refused by name, the file kept; without it the run goes on bit-identical"


@ATTACKS("`checkpoints` is a file")
def checkpoints_is_a_file(lab: Lab) -> str:
    lab.copy_whole()
    shutil.rmtree(lab.path / "checkpoints")
    (lab.path / "checkpoints").write_text("precious")
    before = digest(lab.path)
    lab.refused("checkpoints")
    assert digest(lab.path) == before
    return "refused by name, nothing changed"


@ATTACKS("`run.json` is a named pipe")
def identity_is_a_pipe(lab: Lab) -> str:
    lab.cut()
    (lab.path / "run.json").unlink()
    os.mkfifo(lab.path / "run.json")
    before = digest(lab.path)
    lab.refused("run.json|not a run of streamtune")
    assert digest(lab.path) == before
    assert stat.S_ISFIFO((lab.path / "run.json").stat().st_mode)
    return "refused, without waiting for a writer"


@ATTACKS("the dataset is a named pipe")
def data_is_a_pipe(lab: Lab) -> str:
    lab.write()
    (lab.folder / "rows.jsonl").unlink()
    os.mkfifo(lab.folder / "rows.jsonl")
    lab.refused("rows.jsonl")
    return "refused by name, without waiting for a writer"


@ATTACKS("the dataset is /dev/zero")
def data_without_end(lab: Lab) -> str:
    lab.write(datasets=[{"path": "/dev/zero", "type": "text"}])
    lab.refused("/dev/zero")
    return "refused by name, not read without end"


@ATTACKS("the dataset is a link to itself")
def data_in_a_circle(lab: Lab) -> str:
    lab.write()
    (lab.folder / "rows.jsonl").unlink()
    (lab.folder / "rows.jsonl").symlink_to("rows.jsonl")
    lab.refused("rows.jsonl")
    return "refused by name"


@ATTACKS("the recipe is a named pipe")
def recipe_is_a_pipe(lab: Lab) -> str:
    lab.write()
    (lab.folder / "tiny.yaml").unlink()
    os.mkfifo(lab.folder / "tiny.yaml")
    lab.refused("tiny.yaml")
    return "refused by name, without waiting for a writer"


@ATTACKS("the recipe is /dev/zero through a link")
def recipe_without_end(lab: Lab) -> str:
    lab.write()
    (lab.folder / "tiny.yaml").unlink()
    (lab.folder / "tiny.yaml").symlink_to("/dev/zero")
    lab.refused("tiny.yaml")
    return "refused by name, not read without end"


@ATTACKS("the recipe is 60 MB of one key")
def recipe_is_huge(lab: Lab) -> str:
    lab.write()
    with (lab.folder / "tiny.yaml").open("a") as file:
        file.write("output_dir: " + "x" * 60_000_000)
    lab.refused("tiny.yaml")
    return "refused by its size"


@ATTACKS("a checkpoint's weights are replaced by a named pipe")
def weights_are_a_pipe(lab: Lab) -> str:
    lab.cut()
    newest = checkpoints(lab.path)[-1]
    file = next(newest.rglob("*.safetensors"))
    file.unlink()
    os.mkfifo(file)
    done = lab.start()
    assert done.status in (0, 1, 2), done.output
    assert newest.name in done.output
    return "named as damaged, not opened; " + ("the one before is used" if done.status == 0 else "the run stops")


@ATTACKS("the output directory holds a stranger's files and no run")
def somebody_elses_folder(lab: Lab) -> str:
    lab.write()
    lab.path.mkdir(parents=True)
    (lab.path / "thesis.tex").write_text("years of work")
    lab.refused("not empty")
    lab.refused("not empty", arguments=("--resume", "never"))
    assert (lab.path / "thesis.tex").read_text() == "years of work"
    return "refused, also with --resume never; nothing changed"


@ATTACKS("the output directory is the dataset's own folder")
def output_beside_data(lab: Lab) -> str:
    lab.write(output_dir=".")
    before = digest(lab.folder)
    lab.refused("not empty")
    after = {name: text for name, text in digest(lab.folder).items() if name != "output.txt"}
    assert after == {name: text for name, text in before.items() if name != "output.txt"}
    return "refused; nothing changed"
