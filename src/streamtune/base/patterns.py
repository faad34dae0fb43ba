"""Regular expressions of a recipe or of a folder from elsewhere, matched within a limit of time.

Python's ``re`` goes back over a text for every way to divide it, which takes minutes for ``(a+)+b`` on a name of forty
letters. Libraries match patterns themselves, so each pattern is tried first, on the same names, in a process with a
limit of processor time. Texts of any length are searched by the library ``regex``, which takes a limit itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from streamtune.base.safe_path import safe_environment
from streamtune.errors import ArgumentError

SECONDS = 3
"""Processor time of one key's patterns on all names: a pattern that is not hostile takes milliseconds."""
PATIENCE = 120.0
"""Seconds of waiting, on a machine that is busy."""
MEBIBYTES = 1024
FIX = "write the end of a name, such as q_proj, or take the repetition inside of a repetition out"
PLAIN = re.compile(r"[\w.\-/ ]*")
PROGRAM = f"""
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS} + 1))
    resource.setrlimit(resource.RLIMIT_AS, ({MEBIBYTES} << 20,) * 2)
except (ImportError, ValueError, OSError):
    pass
how, patterns, names = json.load(sys.stdin)
for pattern in patterns:
    found = getattr(re.compile(pattern), how)
    print(json.dumps([number for number, name in enumerate(names) if found(name)]), flush=True)
"""
"""Runs by itself: only the standard library, nothing of the working directory."""


class PatternError(ValueError):
    """A pattern that is not a regular expression, or takes too long on a text."""


def wrong_pattern(pattern: str) -> str | None:
    """Return the reason why a text is not a regular expression; None if it is."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    except (OverflowError, RecursionError, MemoryError) as error:
        return f"too much for Python ({type(error).__name__})"
    return None


def find_matches(
    patterns: Sequence[str],
    names: Sequence[str],
    *,
    where: str,
    how: Literal["search", "match", "fullmatch"] = "search",
    form: str = "{}",
) -> list[list[int]]:
    """Return, for each pattern, the indices of the names that it matches.

    Args:
        patterns: Regular expressions.
        names: Names of modules or parameters.
        where: Key that has the patterns, for errors.
        how: Function of ``re``.
        form: Expression that a library makes of a pattern, ``{}``: ``(.*\\.)?({})$``.

    Raises:
        ArgumentError: A pattern is not a regular expression, or takes more than :data:`SECONDS` of processor time.
    """
    for pattern in patterns:
        if reason := wrong_pattern(pattern):
            raise ArgumentError(f"'{pattern[:80]}' is no pattern: {reason}", where=where, fix=FIX)
    whole = [form.replace("{}", pattern) for pattern in patterns]
    if all(PLAIN.fullmatch(pattern) for pattern in patterns):
        return [[number for number, name in enumerate(names) if getattr(re, how)(one, name)] for one in whole]
    output, ended = _run([sys.executable, "-I", "-S", "-c", PROGRAM], [how, whole, list(names)])
    answers = output.splitlines()
    if not ended:
        raise ArgumentError(
            f"the pattern '{patterns[len(answers)][:80]}' takes more than {SECONDS} s on the {len(names):,} names of "
            "this model: it goes back over a name again and again",
            where=where,
            fix=FIX,
        )
    return [json.loads(answer) for answer in answers]


def _run(command: Sequence[str], message: object, env: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """Run a command with a message as its input; return its output, and True if it ended by itself without an error."""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(message),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            env=env,
        )
        return done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(), False


SPLITS = f"""
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS} + 1))
except (ImportError, ValueError, OSError):
    pass
from tokenizers import Regex, pre_tokenizers
patterns, texts = json.load(sys.stdin)
for pattern in patterns:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in texts:
        split.pre_tokenize_str(text)
    print(flush=True)
"""
REPEATED = re.compile(r"\)\s*(?:[*+]|\{\d*,?\d*\})")
"""A repeated group: without it no pattern takes more than a power of the length."""
PIECES = ("a", "A", "1", " ", "\n", "!", "_", "'", "é", "中", "a1", "a ", "aA", "ab", "\t ")
TRIED = [piece * 120 + end for piece in PIECES for end in ("", "\0", "!", "x", "!x")]


def check_splits(patterns: Sequence[str], *, where: str) -> None:
    """Try the patterns (Oniguruma's) by which a tokenizer splits texts; its library matches them without a time limit.

    Raises:
        ArgumentError: A pattern takes more than :data:`SECONDS` of processor time on short texts, or is not one.
    """
    tried = [pattern for pattern in patterns if REPEATED.search(pattern)]
    if not tried:
        return
    environment = {**safe_environment(), "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    output, ended = _run([sys.executable, "-P", "-c", SPLITS], [tried, TRIED], env=environment)
    if not ended:
        pattern = tried[output.count("\n")]
        raise ArgumentError(
            f"the tokenizer's pattern '{pattern[:80]}' takes seconds on short texts: it goes back over them "
            "again and again",
            where=where,
            fix="take the repetition inside of a repetition out, or name another tokenizer",
        )


def of_tokenizer(error: BaseException) -> ArgumentError | None:
    """Return the error to show where a tokenizer's library gave up (``PanicException``); None for other errors."""
    if type(error).__name__ != "PanicException":
        return None
    return ArgumentError(
        f"the tokenizer gave up on a text: {error}",
        where="tokenizer",
        fix="its pattern goes back over the text again and again: correct it in tokenizer.json, or name another one",
    )


def is_found(pattern: str, text: str, *, whole: bool = False, seconds: float = 2.0) -> bool:
    """Return True if a regular expression of Python's ``re`` is found in a text.

    Raises:
        PatternError: The pattern is not a regular expression, or takes too long.
    """
    if reason := wrong_pattern(pattern):
        raise PatternError(f"the pattern {pattern[:60]!r} is no regular expression: {reason}")
    import regex  # type: ignore[import-untyped, unused-ignore]  # slow to import, and needed by few

    try:
        compiled = regex.compile(pattern, regex.VERSION0)
        found = (compiled.fullmatch if whole else compiled.search)(text, timeout=seconds)
    except TimeoutError:
        raise PatternError(
            f"the pattern {pattern[:60]!r} takes more than {seconds:g} s on {len(text):,} characters"
        ) from None
    except regex.error as error:
        raise PatternError(f"the pattern {pattern[:60]!r} is no regular expression: {error}") from error
    return found is not None
