"""Matching of untrusted regular expressions within a time limit.

Regular expressions come from recipes and downloaded models. ``re`` may backtrack exponentially: ``(a+)+b`` takes
minutes on a name of forty letters. Libraries such as peft match without a limit, so each pattern is first tried on the
same names, in a child process with a limit of CPU time. Long texts are searched with ``regex``, which has a time limit.
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
"""Limit of CPU time for the patterns of one key on all names; a harmless pattern takes milliseconds."""
PATIENCE = 120.0
"""Limit of seconds to wait on a busy machine."""
MEBIBYTES = 1024
"""Limit of the address space of the process."""
FIX = "write the end of a name, such as q_proj, or remove the nested quantifier"
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
"""Program of the process: only the standard library, nothing from the working directory."""


class PatternError(ValueError):
    """A text is not a regular expression, or matching it takes too long."""


def pattern_error(pattern: str) -> str | None:
    """Return the reason why ``re`` cannot compile a pattern; None if it can."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    except (OverflowError, RecursionError, MemoryError) as error:
        return f"Python cannot compile it ({type(error).__name__})"
    return None


def escape_points(pattern: str) -> str:
    """Return a pattern in which a ``.`` is a point, unless a quantifier such as ``*`` follows.

    So ``model.layers.1.`` does not match layers 10 to 19.
    """
    return re.sub(r"(?<!\\)\.(?![*+?{])", r"\\.", pattern)


def find_matches(
    patterns: Sequence[str],
    names: Sequence[str],
    *,
    where: str,
    match_function: Literal["search", "match", "fullmatch"] = "search",
    template: str = "{}",
) -> list[list[int]]:
    """Return, for each pattern, the indices of the names that it matches.

    Args:
        patterns: Regular expressions.
        names: Names of modules or parameters.
        where: Recipe key that has the patterns, for errors.
        match_function: Name of the function of ``re`` that matches.
        template: Regular expression around each pattern, which replaces ``{}``, such as ``.*({})$``.

    Raises:
        ArgumentError: A pattern is not a regular expression, or matching takes more than :data:`SECONDS` of CPU time.
    """
    for pattern in patterns:
        if reason := pattern_error(pattern):
            raise ArgumentError(f"'{pattern[:80]}' is not a regular expression: {reason}", where=where, fix=FIX)
    expressions = [template.replace("{}", pattern) for pattern in patterns]
    if all(PLAIN.fullmatch(pattern) for pattern in patterns):
        return [
            [number for number, name in enumerate(names) if getattr(re, match_function)(one, name)]
            for one in expressions
        ]
    output, ended = _run_with_input(
        [sys.executable, "-I", "-S", "-c", PROGRAM], [match_function, expressions, list(names)]
    )
    answers = output.splitlines()
    if not ended:
        raise ArgumentError(
            f"the pattern '{patterns[len(answers)][:80]}' takes more than {SECONDS} s on the {len(names):,} names of "
            "this model: catastrophic backtracking",
            where=where,
            fix=FIX,
        )
    return [json.loads(answer) for answer in answers]


def _run_with_input(command: Sequence[str], message: object, env: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """Run a command with ``message`` as JSON on stdin; return its output, and True if its exit code is 0."""
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
"""A repeated group. Without one, a pattern's time is at most a power of the text's length."""
FRAGMENTS = ("a", "A", "1", " ", "\n", "!", "_", "'", "é", "中", "a1", "a ", "aA", "ab", "\t ")
SAMPLE_TEXTS = [piece * 120 + end for piece in FRAGMENTS for end in ("", "\0", "!", "x", "!x")]


def check_split_patterns(patterns: Sequence[str], *, where: str) -> None:
    """Check that a tokenizer's pre-tokenization patterns match short texts in time.

    The patterns are Oniguruma regular expressions, which ``tokenizers`` matches without a time limit.

    Args:
        patterns: Patterns of the pre-tokenizer.
        where: Recipe key, for errors.

    Raises:
        ArgumentError: A pattern is invalid, or takes more than :data:`SECONDS` of CPU time.
    """
    tried = [pattern for pattern in patterns if REPEATED.search(pattern)]
    if not tried:
        return
    environment = {**safe_environment(), "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    output, ended = _run_with_input([sys.executable, "-P", "-c", SPLITS], [tried, SAMPLE_TEXTS], env=environment)
    if not ended:
        pattern = tried[output.count("\n")]
        raise ArgumentError(
            f"the tokenizer's pattern '{pattern[:80]}' takes more than {SECONDS} s on short texts: catastrophic "
            "backtracking",
            where=where,
            fix="remove the nested quantifier, or name another tokenizer",
        )


def tokenizer_panic_error(error: BaseException) -> ArgumentError | None:
    """Return an ArgumentError for a ``PanicException`` of the library ``tokenizers``; None for other errors."""
    if type(error).__name__ != "PanicException":
        return None
    return ArgumentError(
        f"the tokenizer failed on a text: {error}",
        where="tokenizer",
        fix="its pattern causes catastrophic backtracking: correct it in tokenizer.json, or name another tokenizer",
    )


def search_within_limit(pattern: str, text: str, *, whole: bool = False, seconds: float = 2.0) -> bool:
    """Return True if a regular expression is found in a text.

    Args:
        pattern: Regular expression in the syntax of Python's ``re``.
        text: Text to search.
        whole: True to match the whole text.
        seconds: Time limit.

    Raises:
        PatternError: The pattern is not a regular expression, or the time limit is exceeded.
    """
    if reason := pattern_error(pattern):
        raise PatternError(f"the pattern {pattern[:60]!r} is not a regular expression: {reason}")
    import regex  # type: ignore[import-untyped, unused-ignore]  # slow to import, and needed by few

    try:
        compiled = regex.compile(pattern, regex.VERSION0)
        match = (compiled.fullmatch if whole else compiled.search)(text, timeout=seconds)
    except TimeoutError:
        raise PatternError(
            f"the pattern {pattern[:60]!r} takes more than {seconds:g} s on {len(text):,} characters"
        ) from None
    except regex.error as error:
        raise PatternError(f"the pattern {pattern[:60]!r} is not a regular expression: {error}") from error
    return match is not None
