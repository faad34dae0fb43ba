"""Names and values on the command line that are made to be misread."""

from __future__ import annotations

import os

from tests.faults.attacks.lab import Attacks, Lab, in_line

ATTACKS = Attacks("Names and values")


def output_named(lab: Lab, name: str) -> None:
    """Train into a directory of this name and end in it."""
    lab.write()
    target = lab.folder / "out" / name
    done = lab.start("--output-dir", str(target))
    assert done.status == 0, (name, done.output)
    assert (target / "final/model.safetensors").is_file(), name
    assert "\x1b]" not in done.output
    again = lab.start("--output-dir", str(target))
    assert again.status == 0, (name, again.output)


@ATTACKS("output directories named with a newline, `%s`, `{}`, `$(id)`, quotes, blanks, a leading `-`")
def odd_names(lab: Lab) -> str:
    for name in (
        "a\nb",
        "%s%n",
        "{0.__class__}",
        "$(id)`id`",
        'it\'s "quoted"',
        " blank ",
        "-rf",
        "#1",
        "a=b",
        "ünï ☃",
    ):
        output_named(lab, name)
    return "ten names, each trained into and gone on with"


@ATTACKS("an output directory named with rich markup and terminal escapes")
def markup(lab: Lab) -> str:
    lab.write()
    name = "[red]x[/red]\x1b[31m\x1b]0;title\x07"
    done = lab.start("--output-dir", str(lab.folder / name))
    assert done.status in (0, 2), done.output
    assert "\x1b]0;" not in done.output
    assert "\x1b[31m" not in done.output
    assert done.status == 2 or "[red]x[/red]" in in_line(done.output).replace(" ", "")
    return "shown as it is, without the escapes" if done.status == 0 else "refused"


@ATTACKS("a recipe, data and output directory whose names are not UTF-8")
def not_utf8(lab: Lab) -> str:
    lab.write()
    odd = os.fsdecode(b"r\xff\xfe")
    done = lab.start("--output-dir", str(lab.folder / odd))
    assert done.status in (0, 2), done.output
    return "trained into" if done.status == 0 else "refused by name"


@ATTACKS("`--set` with a NUL, a newline, a megabyte, an anchor bomb, a tag that makes objects")
def odd_settings(lab: Lab) -> str:
    lab.write()
    canary = lab.folder / "canary"
    values = [
        "learning_rate=1\n2",
        "output_dir=" + "x" * 1_000_000,
        f"output_dir=!!python/object/apply:os.system ['touch {canary}']",
        "datasets=[&a [*a]]",
        "datasets=" + "[" * 20_000,
        "=1",
        "learning_rate",
        "learning_rate=",
        "learning_rate=1e400",
        "seed=-1",
        "__class__=1",
        "model.init.__init__=1",
        "\u217cearning_rate=1",
    ]
    for value in values:
        done = lab.start("--set", value)
        assert done.status == 2, (value[:60], done.status, done.output[:2000])
    assert not canary.exists()
    assert not lab.path.exists()
    return f"{len(values)} of {len(values)} refused in one error, no directory made"


@ATTACKS("`--resume` with nothing, a file, /, .., a folder without a checkpoint, a name of 5,000 letters")
def odd_resumes(lab: Lab) -> str:
    lab.cut()
    for value in ("", "tiny.yaml", "/", "..", "runs", "x" * 5000, "AUTO", "runs/tiny/checkpoints"):
        done = lab.start("--resume", value)
        assert done.status in (1, 2), (value[:20], done.status, done.output)
    lab.goes_on()
    return "each refused by name; the run goes on bit-identical"


@ATTACKS("`--nproc` of 0, -1, 10^6, 1.5; `--hostfile` of a folder, /dev/zero, an empty file")
def odd_launches(lab: Lab) -> str:
    lab.write()
    (lab.folder / "empty").touch()
    for words in (("--nproc", "0"), ("--nproc", "-1"), ("--nproc", "1000000"), ("--nproc", "1.5"),
                  ("--hostfile", "."), ("--hostfile", "/dev/zero"), ("--hostfile", "empty")):  # fmt: skip
        done = lab.start(*words)
        assert done.status == 2, (words, done.status, done.output)
    return "each refused in one error"


@ATTACKS("rows whose text is terminal escapes, markup and right-to-left marks, one of them too long")
def odd_rows(lab: Lab) -> str:
    import json

    lab.write(max_length=48)
    text = "[bold]\x1b]0;owned\x07\x1b[2J\u202e" * 40
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    with (lab.folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    done = lab.start()
    assert done.status == 2, done.output
    assert "\x1b]0;" not in done.output
    assert "\x1b[2J" not in done.output
    return "the error names the row's file and line, and shows no escape"
