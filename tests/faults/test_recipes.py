"""Recipes that somebody damaged, by accident or on purpose: an answer or one error, at once, in little memory.

Mutations know the structure of a recipe (keys, values, indentation) and do not (bytes). They run in a process of their
own through the command line, so that its peak of memory is theirs.

    STREAMTUNE_FAULTS=DIR   60 seconds in place of 5, figures to DIR
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from streamtune.cli import main
from streamtune.recipe import shipped_recipes
from tests.faults.figures import full, tell

PROGRAM = """
import contextlib, io, json, random, sys, time
from pathlib import Path

from streamtune.cli import main
from tests.faults.memory import peak_mib
from tests.faults.test_recipes import mutate

folder, seconds, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
draw, path = random.Random(seed), folder / "recipe.yaml"
cases, slowest, codes, wrong = 0, 0.0, {}, []
end = time.monotonic() + seconds
while time.monotonic() < end:
    data = mutate(draw)
    path.write_bytes(data)
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    started = time.process_time()
    code = "no exit"
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(["validate", str(path)])
    except SystemExit as left:
        code = left.code or 0
    except BaseException as error:
        code = repr(error)
    spent = time.process_time() - started
    said.flush()
    text = said.buffer.getvalue().decode()
    cases, slowest = cases + 1, max(slowest, spent)
    codes[str(code)] = codes.get(str(code), 0) + 1
    shown = "Traceback" not in text and "\\x1b" not in text and (code == 0 or str(path) in text)
    if code not in (0, 2) or not shown or spent > 1.0:
        if len(wrong) < 5:
            (folder / f"wrong-{len(wrong)}.yaml").write_bytes(data)
        wrong.append([repr(data[:300]), code, spent, text[-500:]])
report = {"cases": cases, "slowest": slowest, "codes": codes, "wrong": wrong[:5], "bad": len(wrong)}
print(json.dumps({**report, "peak_mib": peak_mib()}))
"""

TEXTS = [recipe.text for recipe in shipped_recipes()]
KEYS = sorted({line.split(":")[0].strip(" -#") for text in TEXTS for line in text.splitlines() if ":" in line})
VALUES = [
    *("", "~", "null", "true", "no", "on", "yes", "off", "0", "-1", "1e-5", "1e999", ".nan", "-.inf", "1_000", "0x10"),
    *("0o17", "012", "1:30:00", "2026-01-01", "'", '"', "[]", "{}", "[[[[]]]]", "{a: {b: {c: d}}}", "!x 1", "&a 1"),
    *("*a", "!!python/object/apply:os.system [id]", "<<: *a", "|", ">-", "---", "...", "@x", "`x`", "%TAG", "? a"),
    *('"\\0"', '"\\ud800"', '"\\x1b[2J"', "9" * 400, "0x" + "f" * 5000, "9" * 70, "-" + "9" * 2000, "a" * 9000, "猫"),
    *("../../etc/passwd", "/dev/zero", "~nobody-here/x", "{{ 1 }}", "{% raw %}", "hf_" + "a" * 34, "x: y: z", "\t"),
    *("[1, 2", "{a: 1", "https://u:p@x/y", "sk-" + "a-" * 900, "\u2028", "\ufeff", "\x85", "#", "a #b", "- - - -"),
]
PIECES = [value.encode() for value in VALUES] + [b"\x00", b"\xff", b"\xfe\xff", b"\r", b"\n\n", b"    ", b"\t", b": "]


def mutate(draw: random.Random) -> bytes:
    """A shipped recipe after a few mutations, or no recipe at all."""
    if draw.random() < 0.04:
        return draw.randbytes(draw.choice([0, 1, 16, 500, 9000, 70_000]))
    if draw.random() < 0.04:
        return draw.choice(PIECES) * draw.choice([1, 50, 3000, 70_000 // 8])
    lines = draw.choice(TEXTS).splitlines(keepends=True)
    for _ in range(draw.choice([1, 1, 2, 3, 8])):
        draw.choice(MUTATIONS)(draw, lines)
    data = bytearray("".join(lines).encode("utf-8", "surrogatepass"))
    for _ in range(draw.choice([0, 0, 0, 1, 2, 6])):
        start = draw.randrange(len(data) + 1)
        data[start : start + draw.choice([0, 1, 5, 60])] = draw.choice(PIECES)
    return bytes(data)


def _value(draw: random.Random, lines: list[str]) -> None:
    at = draw.randrange(len(lines))
    key = lines[at].partition(":")[0]
    lines[at] = f"{key}: {draw.choice(VALUES)}\n"


def _key(draw: random.Random, lines: list[str]) -> None:
    indent = " " * draw.choice([0, 0, 2, 4, 7])
    lines.insert(draw.randrange(len(lines) + 1), f"{indent}{draw.choice(KEYS)}: {draw.choice(VALUES)}\n")


def _swap(draw: random.Random, lines: list[str]) -> None:
    one, two = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]


def _drop(draw: random.Random, lines: list[str]) -> None:
    if len(lines) > 1:
        del lines[draw.randrange(len(lines))]


def _repeat(draw: random.Random, lines: list[str]) -> None:
    at = draw.randrange(len(lines))
    lines[at:at] = [lines[at]] * draw.choice([1, 2, 40, 1500])


def _indent(draw: random.Random, lines: list[str]) -> None:
    at = draw.randrange(len(lines))
    lines[at] = draw.choice(["  ", "\t", "- ", " "]) + lines[at]


def _many(draw: random.Random, lines: list[str]) -> None:
    near = draw.choice(KEYS)
    lines += [f"{near}{number}: {draw.choice(VALUES[:16])}\n" for number in range(draw.choice([5, 300, 1200]))]


def _deep(draw: random.Random, lines: list[str]) -> None:
    bracket = draw.choice(["[", "{a: ", "- ", "? "])
    lines.append(f"{draw.choice(KEYS)}: {bracket * draw.choice([5, 31, 33, 2000, 12_000])}\n")


MUTATIONS = (_value, _value, _value, _key, _key, _swap, _drop, _repeat, _indent, _many, _deep)


@pytest.mark.full
def test_a_damaged_recipe_is_an_answer_or_one_error(tmp_path: Path) -> None:
    """Exit code 0 or 2, no traceback, within a second of processor time and 200 MB."""
    seconds = 60 if full() else 5
    source = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(seconds), "7"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    tell(
        "recipe_fuzz",
        report["cases"] - report["bad"],
        report["cases"],
        seconds=seconds,
        slowest_seconds=round(report["slowest"], 3),
        peak_mib=round(report["peak_mib"]),
        exit_codes=report["codes"],
    )
    assert report["wrong"] == []
    assert report["cases"] > 0
    assert report["peak_mib"] < 200


def test_what_is_shown_obeys_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes, changes of direction, bytes that are no text: in a value, a key, the file's name; as text and JSON."""
    names = [b"plain.yaml", b"\x1b[2Jname.yaml", b"\xff.yaml", "\u202eflow.yaml".encode()]
    texts = [
        'model_name_or_path: "a\\e[2Jb"\noutput_dir: "\\u202eb\\x9b1m"\ndatasets: [{path: "\\e]0;x\\a"}]\n',
        'model_name_or_path: a/b\n"\\e[2J\\u202e": 1\ndatasets: [{path: x}]\n',
    ]
    for name in names:
        for code, text in zip((0, 2), texts, strict=True):
            path = tmp_path / os.fsdecode(name)
            path.write_text(text, encoding="utf-8")
            for more in ([], ["--json"]):
                with pytest.raises(SystemExit) as left:
                    main(["validate", str(path), *more])
                assert (left.value.code or 0) == code
                said = "".join(capsys.readouterr())
                assert not set(said) & set("\x1b\x9b\u202e\a"), said


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fifo", "zero", "endless", "socket", "link"])
def test_what_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    """The real command, whose end is awaited: nothing is read without end or waited for."""
    path = tmp_path / "recipe.yaml"
    code = 2
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # a file of a terabyte, without a byte on disk
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "link":
        (tmp_path / "real.yaml").write_text("model_name_or_path: a/b\ndatasets: [{path: rows.jsonl}]\n")
        path.symlink_to("real.yaml")
        code = 0
    command = [sys.executable, "-m", "streamtune", "validate", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert str(path) in done.stderr
