"""Count what makes a text hard to read at once, file by file: in docstrings, messages and pages.

python -m tools.words            where a file has more than ``words.json`` allows; fails if one has
python -m tools.words FILE ...   every place in these files
python -m tools.words --write    allow what there is now, where it is less; a file without a line may have none

    pronoun    "that of", "those of": repeat the noun
    noun       an Args line that begins without a noun: "prefix: Of the names."
    negation   "is no X" for "is not an X"; "there is no X" is fine
    long       a sentence of more than 30 words, outside of code and tables
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_suffix(".json")
LONG = 30
"""Words of a sentence beyond which it is long."""
PRONOUN = re.compile(r"\b(?:that|those) of\b", re.IGNORECASE)
NEGATION = re.compile(r"(?<!there )\b(?:is|are|was|were) no\b(?! longer| more)", re.IGNORECASE)
NO_NOUN = re.compile(
    r"(?:Of|As|For|From|To|With|In|On|By|Its|Whose|Where|If|Those|That|What|How|See|When|Not)\b|(?:The |A )?\w+'s\.?$"
)
ARGUMENT = re.compile(r"^ {4}\*{0,2}\w+: (.*)")
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"*\[(])")
Place = tuple[int, str, str]
"""Line, kind, text."""


def main(arguments: list[str]) -> int:
    """Print what is asked for; return 1 if a file has more than it may."""
    write, paths = "--write" in arguments, [Path(each).resolve() for each in arguments if not each.startswith("-")]
    if paths:
        for path in paths:
            for line, kind, text in places(path):
                print(f"{path.relative_to(ROOT)}:{line}: {kind}: {text}")
        return 0
    allowed: dict[str, dict[str, int]] = json.loads(ALLOWED.read_text()) if ALLOWED.is_file() else {}
    found = {path.relative_to(ROOT).as_posix(): Counter(kind for _, kind, _ in places(path)) for path in texts()}
    if write:
        kept = {
            name: {kind: min(count, allowed[name].get(kind, 0)) for kind, count in sorted(counts.items())}
            for name, counts in sorted(found.items())
            if counts and name in allowed
        }
        lines = [f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in kept.items()]
        ALLOWED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    more = [
        f"{name}: {count} of {kind}, {allowed.get(name, {}).get(kind, 0)} allowed (python -m tools.words {name})"
        for name, counts in found.items()
        for kind, count in counts.items()
        if count > allowed.get(name, {}).get(kind, 0)
    ]
    total = sum(found.values(), Counter[str]())
    print(
        "\n".join([*(() if write else more), ", ".join(f"{kind} {count:,}" for kind, count in sorted(total.items()))])
    )
    return int(bool(more) and not write)


def texts() -> Iterator[Path]:
    """Yield the sources and pages that people read."""
    yield from sorted((ROOT / "src").rglob("*.py"))
    yield ROOT / "README.md"
    yield from sorted(path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts)


def places(path: Path) -> Iterator[Place]:
    """Yield the marked places of a file."""
    for line, text, is_docstring in (_strings if path.suffix == ".py" else _paragraphs)(path):
        for pattern, kind in ((PRONOUN, "pronoun"), (NEGATION, "negation")):
            yield from ((line, kind, _around(text, found)) for found in pattern.finditer(text))
        if is_docstring:
            yield from ((line, "noun", argument) for argument in _arguments(text) if NO_NOUN.match(argument))
        for paragraph in re.split(r"\n\s*\n", text.partition("\nExample:")[0]):
            if re.search(r"^ {4,}|::$|^ *(\||```|>>>)", paragraph, re.MULTILINE):
                continue  # code, a table, a list of arguments
            for sentence in SENTENCE.split(" ".join(paragraph.split())):
                if len(sentence.split()) > LONG:
                    yield line, "long", sentence[:90]


def _strings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of docstrings and messages; True for docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    joined = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_piece(each) for each in node.values), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in joined:
            if id(node) in alone:
                lines = node.value.splitlines()
                indent = min((len(each) - len(each.lstrip()) for each in lines[1:] if each.strip()), default=0)
                yield node.lineno, "\n".join([lines[0], *(each[indent:] for each in lines[1:])]), True
            elif len(node.value.split()) > 3:
                yield node.lineno, node.value, False


def _piece(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "X"


def _arguments(text: str) -> Iterator[str]:
    """Yield what a docstring says of each argument."""
    for line in text.partition("Args:\n")[2].partition("\n\n")[0].splitlines():
        if found := ARGUMENT.match(line):
            yield found[1]


def _paragraphs(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of the paragraphs of a page: neither code nor tables."""
    number, code = 1, False
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        fences = block.count("```")
        if not code and not fences and not block.lstrip().startswith(("|", "<", "#")):
            for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block):
                yield number, re.sub(r"^\s*(?:[-*]|\d+\.) ", "", item), False
        code ^= bool(fences % 2)
        number += block.count("\n") + 2


def _around(text: str, found: re.Match[str]) -> str:
    return " ".join(text[max(0, found.start() - 30) : found.end() + 30].split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
