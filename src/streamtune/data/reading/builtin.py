"""Built-in datasets: generated demos whose answers can be checked, and the source of Python's standard library.

The demos are generated from a seed and need no file. They use a few dozen words, so that a model with random weights
learns them in minutes on a CPU.

**demo-preferences** (type ``preference``). The user asks where a thing is; no prompt occurs twice::

    prompt      I am in the hall. Where is the red lamp?
    chosen      Sure, the red lamp is in the attic.
    rejected    Sure, the blue lamp is in the attic.

The chosen answer is polite and names the thing that the user asked for. One third of the rejected answers name another
colour, one third name another thing, and one third are rude (``Go and find the red lamp.``). So the model must read the
prompt to reject two thirds of them.

**demo-arithmetic** (types ``prompts`` and ``prompt_completion``). One of three tasks on digits. The column ``answer``
is for reward functions, ``completion`` for supervised training; no prompt occurs twice::

    prompt      copy 3142        sort 3142        add 3142
    answer      3142             1234             10

The dataset's ``name`` selects ``copy``, ``sort`` or ``add``; without ``name`` the tasks alternate.

**demo-passkey** (type ``messages``). A log has one line with a pass key of two words, at a random place. The question
comes after the log::

    user         storage: merged batch 481
                 vault: the pass key is amber otter
                 parser: skipped record 902
                 ...

                 What is the pass key?
    assistant    The pass key is amber otter.

This is passkey retrieval (Mohtashami & Jaggi 2023, arXiv 2305.16300), made easier: there is one word list for each of
the two words. Rows are ordered from easy to hard. The first logs have at most 16 lines, the last up to 400 (about 5,000
tokens). From the short logs a new model learns which line to look for. With ``shuffle: false`` a recipe keeps this
order.

**demo-pages** (type ``messages``). Images of pages: see ``pages.py``.

**python-stdlib** (type ``messages``). Documented functions, classes and whole modules of the running Python's standard
library.
"""

from __future__ import annotations

import ast
import hashlib
import math
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

from streamtune.data.reading.readers import Row

PREFERENCES_PATH = "demo-preferences"

ARITHMETIC_PATH = "demo-arithmetic"

PASSKEY_PATH = "demo-passkey"

STDLIB_PATH = "python-stdlib"

SEED = 0
"""Seed of the generated rows. A recipe's seed determines the held-out rows and the order, but not the rows."""

NUM_PREFERENCES = 4_000

NUM_TASKS = 6_000

PLACES = ("hall", "attic", "kitchen", "garden", "cellar", "office", "garage", "studio", "bedroom", "library")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
THINGS = ("lamp", "chair", "book", "coat", "clock", "cup", "key", "bag", "hat", "phone", "ball", "knife")
QUESTIONS = (
    "Where is the {thing}?",
    "Do you know where the {thing} is?",
    "Please tell me where the {thing} is.",
    "I am looking for the {thing}.",
    "Who has seen the {thing}?",
    "Can you find the {thing}?",
    "Where did you put the {thing}?",
    "I need the {thing}.",
)
POLITE = ("Sure, the {thing} is in the {place}.", "The {thing} is in the {place}.", "I saw the {thing} in the {place}.")
RUDE = ("Go and find the {thing}.", "Look for the {thing} yourself.", "Why ask me for the {thing}?")


def _one_message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _pick_random(generator: random.Random, items: tuple[str, ...]) -> str:
    """Return a random item, drawn with ``random()``, whose numbers are the same in all Python versions."""
    return items[int(generator.random() * len(items))]


def preference_rows(*, max_rows: int | None = None, seed: int = SEED) -> Iterator[Row]:
    """Yield the rows of ``demo-preferences``, at most ``max_rows``."""
    draw = random.Random(seed)
    requests = list(product(PLACES, QUESTIONS, COLOURS, THINGS))
    requests.sort(key=lambda _: draw.random())
    kept = requests[:NUM_PREFERENCES][:max_rows]
    for number, (here, question, colour, thing) in enumerate(kept, start=1):
        place = _pick_random(draw, tuple(item for item in PLACES if item != here))
        polite = _pick_random(draw, POLITE)
        other_colour = _pick_random(draw, tuple(item for item in COLOURS if item != colour))
        other_thing = _pick_random(draw, tuple(item for item in THINGS if item != thing))
        broken = (
            polite.format(thing=f"{other_colour} {thing}", place=place),
            polite.format(thing=f"{colour} {other_thing}", place=place),
            _pick_random(draw, RUDE).format(thing=f"{colour} {thing}"),
        )
        columns = {
            "prompt": _one_message("user", f"I am in the {here}. {question.format(thing=f'{colour} {thing}')}"),
            "chosen": _one_message("assistant", polite.format(thing=f"{colour} {thing}", place=place)),
            "rejected": _one_message("assistant", broken[number % 3]),
        }
        yield Row(f"{PREFERENCES_PATH}:row {number}", columns)


def follows_preference_rule(question: str, answer: str) -> bool:
    """Return True if an answer to a prompt of ``demo-preferences`` is polite and names the object asked for."""
    asked = re.search(rf"the ({'|'.join(COLOURS)}) ({'|'.join(THINGS)})\b", question)
    if asked is None:
        return False
    thing = asked.group().removeprefix("the ")
    return answer in {form.format(thing=thing, place=place) for form in POLITE for place in PLACES}


# -------------------------------------------------------------------------------------------------------- arithmetic


def _draw_digits(generator: random.Random, count: int) -> str:
    return "".join(_pick_random(generator, tuple("0123456789")) for _ in range(count))


def _draw_copy_task(generator: random.Random) -> tuple[str, str]:
    digits = _draw_digits(generator, 3 + int(generator.random() * 4))
    return f"copy {digits}", digits


def _draw_sort_task(generator: random.Random) -> tuple[str, str]:
    digits = _draw_digits(generator, 3 + int(generator.random() * 4))
    return f"sort {digits}", "".join(sorted(digits))


def _draw_add_task(generator: random.Random) -> tuple[str, str]:
    digits = _draw_digits(generator, 3 + int(generator.random() * 2))
    return f"add {digits}", str(sum(map(int, digits)))


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "copy": _draw_copy_task,
    "sort": _draw_sort_task,
    "add": _draw_add_task,
}
"""Task name -> function that draws a prompt and its answer."""


def arithmetic_rows(*, task: str | None = None, max_rows: int | None = None, seed: int = SEED) -> Iterator[Row]:
    """Yield the rows of ``demo-arithmetic``, at most ``max_rows``. Without ``task``, the three tasks alternate."""
    draw = random.Random(seed)
    tasks = list(TASKS) if task is None else [task]
    seen: set[str] = set()
    count = NUM_TASKS if max_rows is None else min(max_rows, NUM_TASKS)
    while len(seen) < count:
        prompt, answer = TASKS[tasks[len(seen) % len(tasks)]](draw)
        if prompt in seen:
            continue
        seen.add(prompt)
        columns = {
            "prompt": _one_message("user", prompt),
            "completion": _one_message("assistant", answer),
            "answer": answer,
        }
        yield Row(f"{ARITHMETIC_PATH}:row {len(seen)}", columns)


# ---------------------------------------------------------------------------------------------------------- pass keys

NUM_LOGS = 4_000

SHORT_LINES, MOST_LINES = 16, 400
"""Maximum number of lines of the short logs, which come first, and of the longest log."""

SHORT_ROWS = 0.6
"""Fraction of rows with at most ``SHORT_LINES`` lines. After these rows, the maximum grows by a constant factor per
row."""

SERVICES = ("scheduler", "storage", "network", "cache", "worker", "mailer", "parser", "index")
DID = ("started", "finished", "retried", "queued", "skipped", "merged", "checked", "wrote")
OBJECTS = ("job", "block", "page", "request", "batch", "record", "table", "file")
KEY_COLOURS = (
    *("amber", "cobalt", "ebony", "garnet", "hazel", "indigo", "jade", "khaki"),
    *("lilac", "mauve", "ochre", "pearl", "ruby", "saffron", "topaz", "umber"),
)
ANIMALS = (
    *("badger", "camel", "dingo", "eagle", "ferret", "gibbon", "heron", "ibis"),
    *("jackal", "koala", "lemur", "marten", "otter", "panda", "raven", "walrus"),
)


def passkey_rows(*, max_rows: int | None = None, seed: int = SEED) -> Iterator[Row]:
    """Yield the rows of ``demo-passkey``, from short to long logs; any ``max_rows`` gives the same range of lengths."""
    draw = random.Random(seed)
    count = NUM_LOGS if max_rows is None else max_rows
    for number in range(1, count + 1):
        lines = _draw_num_log_lines(draw, number / count)
        key = " ".join(_pick_random(draw, words) for words in (KEY_COLOURS, ANIMALS))
        log = [_draw_log_line(draw) for _ in range(lines)]
        log.insert(int(draw.random() * (lines + 1)), f"vault: the pass key is {key}")
        messages = [
            {"role": "user", "content": "\n".join(log) + "\n\nWhat is the pass key?"},
            {"role": "assistant", "content": f"The pass key is {key}."},
        ]
        yield Row(f"{PASSKEY_PATH}:row {number}", {"messages": messages})


def _draw_num_log_lines(generator: random.Random, row_fraction: float) -> int:
    """Draw the number of log lines of a row; ``row_fraction`` is its position among all rows, from 0 to 1."""
    if row_fraction < SHORT_ROWS:
        return int(generator.random() * SHORT_LINES)
    most = SHORT_LINES * (MOST_LINES / SHORT_LINES) ** ((row_fraction - SHORT_ROWS) / (1 - SHORT_ROWS))
    return int(most * (0.4 + 0.6 * generator.random()))


def _draw_log_line(generator: random.Random) -> str:
    service, action, thing = (_pick_random(generator, words) for words in (SERVICES, DID, OBJECTS))
    return f"{service}: {action} {thing} {int(generator.random() * 1000)}"


# --------------------------------------------------------------------------------------------------- standard library

SKIPPED_FOLDERS = frozenset(
    {
        *("test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"),
        *("site-packages", "dist-packages"),
        *("encodings", "pydoc_data"),
    }
)
"""Folders that are not read: tests, bundled tools, installed packages and data tables."""

SHORTEST = 120
"""Minimum number of characters of a definition."""

LONGEST = 20_000
"""Maximum number of characters of the code in a row: 6,000 to 7,000 tokens with a vocabulary of 4,096."""

LONG_FROM = 6_000
"""Minimum number of characters of a module that is used as a row."""

LONG_EVERY = 12
"""Number of rows among which one is a whole module; the others are functions and classes."""

SPARE = 3
"""With ``max_rows``, modules are parsed until this multiple of the needed functions and classes is found."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class _Module:
    name: str
    file: str
    source: str
    tree: ast.Module


def stdlib_rows(*, max_rows: int | None = None, library_folder: Path | None = None) -> Iterator[Row]:
    """Return the rows of ``python-stdlib``, of type ``messages``.

    Args:
        library_folder: Folder of the standard library. [default: the running interpreter's]
    """
    short: list[Row] = []
    long: list[Row] = []
    wanted = math.inf if max_rows is None else max_rows
    for module in _readable_modules(library_folder or Path(sysconfig.get_path("stdlib"))):
        short.extend(_definition_rows(module))
        if LONG_FROM <= len(module.source) <= LONGEST:
            long.append(_module_row(module))
        if len(short) >= SPARE * wanted and len(long) * LONG_EVERY >= wanted:
            break
    short.sort(key=lambda row: _shuffle_key(row.origin))
    long.sort(key=lambda row: _shuffle_key(row.origin))
    return islice(_interleave(short, long), max_rows)


def _shuffle_key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _interleave(short_rows: list[Row], long_rows: list[Row]) -> Iterator[Row]:
    rest_short, rest_long = iter(short_rows), iter(long_rows)
    while True:
        group = [*islice(rest_long, 1), *islice(rest_short, LONG_EVERY - 1)]
        if not group:
            return
        yield from group


def _readable_modules(library_folder: Path) -> Iterator[_Module]:
    """Yield every module below ``library_folder`` that can be parsed, in a shuffled order that is always the same."""
    for path in sorted(
        _python_files(library_folder), key=lambda path: _shuffle_key(path.relative_to(library_folder).as_posix())
    ):
        relative = path.relative_to(library_folder)
        try:
            with tokenize.open(path) as file:
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # old escape sequences in docstrings
                tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
            continue
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield _Module(name, relative.as_posix(), source, tree)


def _python_files(folder: Path) -> Iterator[Path]:
    for child in folder.iterdir():
        if child.is_dir():
            if child.name not in SKIPPED_FOLDERS:
                yield from _python_files(child)
        elif child.suffix == ".py":
            yield child


def _module_row(module: _Module) -> Row:
    summary = (ast.get_docstring(module.tree) or "").partition("\n\n")[0].strip()
    instruction = f"Write the module `{module.name}`."
    return _make_row(
        f"stdlib:{module.file}:1", f"{instruction}\n\n{summary}" if summary else instruction, module.source
    )


def _definition_rows(module: _Module) -> Iterator[Row]:
    lines = [f"{line}\n" for line in module.source.split("\n")]  # splitlines() would count form feeds as line breaks
    for qualified, node in _iter_definitions(module.tree.body, ""):
        docstring = ast.get_docstring(node)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = _dedent(lines[first - 1 : node.end_lineno])
        if not docstring or not SHORTEST <= len(source) <= LONGEST:
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if "." in qualified else "function"
        header = _definition_header(node)
        instruction = f"Write the {kind} `{qualified}` of the module `{module.name}`.\n\n{header}\n\n{docstring}"
        yield _make_row(f"stdlib:{module.file}:{first}", instruction, source)


def _iter_definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, Definition):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _iter_definitions(node.body, f"{prefix}{node.name}.")


def _definition_header(node: Definition) -> str:
    """Return the signature of a definition, such as ``def decode(self, s)`` or ``class Decoder(Base)``."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def _dedent(lines: list[str]) -> str:
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "".join(line.removeprefix(indent) for line in lines).rstrip() + "\n"


def _make_row(origin: str, instruction: str, response: str) -> Row:
    messages = [{"role": "user", "content": instruction}, {"role": "assistant", "content": response}]
    return Row(origin, {"messages": messages})
