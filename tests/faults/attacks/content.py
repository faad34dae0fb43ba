"""A run directory, its data or its model changed between two starts."""

from __future__ import annotations

import os
import shutil

from tests.faults.attacks.lab import RUN, Attacks, Lab, checkpoints, digest, edit_json
from tests.faults.kit import write_sft

ATTACKS = Attacks("Content changed between two starts")


@ATTACKS("one letter of one row of the data")
def one_letter(lab: Lab) -> str:
    lab.cut()
    file = lab.folder / "rows.jsonl"
    file.write_text(file.read_text().replace("Add 3.", "Add 4."))
    before = digest(lab.path)
    lab.refused("data")
    assert digest(lab.path) == before
    return "refused, `--allow-change data` named; nothing changed"


@ATTACKS("the rows in another order")
def other_order(lab: Lab) -> str:
    lab.cut()
    file = lab.folder / "rows.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    lab.refused("data")
    return "refused"


@ATTACKS("the data's file touched and rewritten with the same bytes")
def same_bytes(lab: Lab) -> str:
    lab.cut()
    file = lab.folder / "rows.jsonl"
    text = file.read_text()
    file.unlink()
    file.write_text(text)
    os.utime(file, (0, 0))
    lab.goes_on()
    return "goes on bit-identical"


@ATTACKS("run.json taken from another run")
def identity_of_another(lab: Lab) -> str:
    lab.cut()
    other = lab.folder / "other"
    write_sft(other, learning_rate=5.0e-3, output_dir="runs/tiny")
    lab.trained(at=other)
    shutil.copy(other / RUN / "run.json", lab.path / "run.json")
    before = digest(lab.path / "checkpoints")
    lab.refused("learning_rate|another run|belong")
    assert digest(lab.path / "checkpoints") == before
    return "refused; the checkpoints are kept"


@ATTACKS("a checkpoint of another run, of a later step, put beside its own")
def later_checkpoint_of_another(lab: Lab) -> str:
    lab.cut()
    other = lab.folder / "other"
    write_sft(other, learning_rate=5.0e-3)
    lab.trained(at=other)
    theirs = checkpoints(other / RUN)[-1]
    shutil.copytree(theirs, lab.path / "checkpoints" / theirs.name)
    done = lab.start()
    assert done.status in (0, 1, 2), done.output
    if done.status == 0:
        lab_end = (lab.path / "final/model.safetensors").read_bytes()
        assert lab_end == (lab.whole / RUN / "final/model.safetensors").read_bytes()
        return "passed over: the run goes on from its own, bit-identical"
    assert theirs.name in done.output
    return "refused by name"


@ATTACKS("the resolved recipe.yaml of the run edited")
def resolved_recipe_edited(lab: Lab) -> str:
    lab.cut()
    file = lab.path / "recipe.yaml"
    file.write_text(file.read_text().replace("0.01", "0.5"))
    lab.goes_on()
    return "of no effect: the run's identity is in run.json and the checkpoint"


@ATTACKS("the last line of metrics.jsonl torn in the middle")
def torn_metrics(lab: Lab) -> str:
    lab.cut()
    file = lab.path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    lab.goes_on()
    return "cut back to the checkpoint; bit-identical"


@ATTACKS("metrics.jsonl deleted between two starts")
def metrics_deleted(lab: Lab) -> str:
    lab.cut()
    (lab.path / "metrics.jsonl").unlink()
    done = lab.start()
    assert done.status in (0, 2), done.output
    return "goes on, later steps are recorded" if done.status == 0 else "refused by name"


@ATTACKS("a line in the middle of metrics.jsonl removed")
def missing_line(lab: Lab) -> str:
    lab.cut()
    file = lab.path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2] + lines[3:]))
    done = lab.start()
    assert done.status in (0, 2), done.output
    return "goes on, the other lines are kept" if done.status == 0 else "refused by name"


@ATTACKS("a finished run's model changed by one bit, then the same command again")
def final_changed(lab: Lab) -> str:
    lab.copy_whole()
    file = lab.path / "final/model.safetensors"
    blob = bytearray(file.read_bytes())
    blob[-1] ^= 1
    file.write_bytes(bytes(blob))
    done = lab.start()
    assert done.status in (0, 1, 2), done.output
    return "it says that nothing is left to train; the folder is the user's" if done.status == 0 else "refused"


@ATTACKS("a manifest of a later format than this version knows")
def later_format(lab: Lab) -> str:
    lab.cut()
    for folder in checkpoints(lab.path):
        edit_json(folder / "manifest.json", lambda document: document.update(format=99))
    before = digest(lab.path)
    done = lab.start()
    assert done.status in (1, 2), (done.status, done.output)
    assert digest(lab.path) == before
    return "no checkpoint can be used: stops, nothing changed"


@ATTACKS("every checkpoint damaged by one bit")
def all_damaged(lab: Lab) -> str:
    lab.cut()
    for folder in checkpoints(lab.path):
        file = next(folder.rglob("*.safetensors"))
        blob = bytearray(file.read_bytes())
        blob[len(blob) // 2] ^= 16
        file.write_bytes(bytes(blob))
    before = digest(lab.path)
    done = lab.start()
    assert done.status in (1, 2), (done.status, done.output)
    assert digest(lab.path) == before
    return "stops and names each; nothing changed, no metric cut"


@ATTACKS("the checkpoint's state says a step that is not its own")
def other_step(lab: Lab) -> str:
    lab.cut()
    newest = checkpoints(lab.path)[-1]
    newest.rename(newest.with_name("step-000009"))
    done = lab.start()
    assert done.status in (0, 1, 2), done.output
    assert "step-000009" in done.output or done.status == 0
    return "named and passed over" if done.status == 0 else "stops and names it"


@ATTACKS("--resume with a checkpoint of another run")
def resume_another(lab: Lab) -> str:
    lab.write()
    other = lab.folder / "other"
    write_sft(other, learning_rate=5.0e-3)
    lab.trained(at=other)
    theirs = checkpoints(other / RUN)[0]
    before = digest(other)
    done = lab.start("--resume", str(theirs))
    assert done.status in (0, 2), done.output
    after = digest(other)
    assert {k: v for k, v in after.items() if k != "output.txt"} == {
        k: v for k, v in before.items() if k != "output.txt"
    }
    return "refused: learning_rate differs" if done.status == 2 else "goes on from it; theirs unchanged"


@ATTACKS("the base folder of a LoRA run holds other weights of the same shape")
def other_base(lab: Lab) -> str:
    base = lab.folder / "base"
    shutil.copytree(lab.whole / RUN / "final", base)
    changes = {"model_name_or_path": "base", "finetuning_type": "lora", "lora_r": 2}
    lora(lab, changes)
    lab.half()
    from safetensors.torch import load_file, save_file

    file = base / "model.safetensors"
    save_file({name: x + 0.01 for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    before = digest(lab.path)
    lab.refused("base")
    assert digest(lab.path) == before
    return "refused, `--allow-change base` named; nothing changed"


def lora(lab: Lab, changes: dict[str, object]) -> None:
    """Write the recipe with a model from a folder instead of one that is made."""
    import yaml

    lab.write()
    recipe = yaml.safe_load((lab.folder / "tiny.yaml").read_text())
    del recipe["model"], recipe["tokenizer"]
    (lab.folder / "tiny.yaml").write_text(yaml.safe_dump({**recipe, **changes}))


@ATTACKS("the chat template of the model's folder changed")
def other_template(lab: Lab) -> str:
    base = lab.folder / "base"
    shutil.copytree(lab.whole / RUN / "final", base)
    lora(lab, {"model_name_or_path": "base"})
    lab.half()
    changed = 0
    for file in base.glob("*"):
        if file.suffix in (".jinja", ".json") and "im_start" in file.read_text():
            file.write_text(file.read_text().replace("im_start", "im_begin"))
            changed += 1
    assert changed, sorted(path.name for path in base.iterdir())
    done = lab.start()
    assert done.status in (0, 2), done.output
    if done.status == 0:  # the checkpoint's own tokenizer counts
        return "of no effect: the checkpoint brings its own tokenizer and template"
    return "refused"


@ATTACKS("a checkpoint made by another user, unreadable here")
def unreadable(lab: Lab) -> str:
    lab.cut()
    newest = checkpoints(lab.path)[-1]
    file = newest / "manifest.json"
    file.chmod(0)
    if os.access(file, os.R_OK):
        file.chmod(0o644)
        file.write_bytes(b"")  # root reads everything: an empty one instead
    done = lab.start()
    assert done.status in (0, 1, 2), done.output
    assert newest.name in done.output
    return "named; " + ("the one before is used" if done.status == 0 else "the run stops")
