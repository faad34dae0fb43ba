"""Built-in rewards: functions of one completion and one value of its row.

A completion is text or a list of messages, of which the last one is scored. The score is None if the row's value is
None. An unusable value raises a ``ValueError``, to which the caller adds the name of the row.

The reward ``unit_tests`` runs code that a model wrote, with tests, in a subprocess.

    trainer --request on stdin--> supervisor (run_tests.py) --fork--> code and tests
            <--number passed--               kills what is left of them, after the timeout at the latest

Limits: wall-clock and CPU time, address space, file sizes, open files, core dumps, and 64 processes at a time. The
process works in a temporary directory that is removed. It has its own environment, without the trainer's tokens and
keys, and its own session. All processes that it starts are killed with it.

This is not a sandbox. The code runs as the same user, so it can read the user's files and use the network. If you train
on prompts that you do not trust, run the whole trainer in a container. Code can also forge the result on purpose,
because the tests run in the same process.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamtune.base import interrupts
from streamtune.base.patterns import PatternError, search_within_limit
from streamtune.errors import ArgumentError
from streamtune.tasks.rewards.json_check import check_schema, conforms


def exact_match(completion: str, answer: Any, *, ignore_case: bool = False, tag: str | None = None) -> float:
    """Return 1 if the completion equals the answer, without white space at both ends, else 0.

    Args:
        answer: Right answer, or a list of right answers.
        tag: Tag whose last content, ``<tag>...</tag>``, is compared instead of the whole completion.
    """
    if tag is not None:
        before, closed, _ = completion.rpartition(f"</{tag}>")
        _, opened, completion = before.rpartition(f"<{tag}>")
        if not (opened and closed):
            return 0.0
    answers = answer if isinstance(answer, list | tuple) else [answer]

    def normalise(text: Any) -> str:
        return str(text).strip().casefold() if ignore_case else str(text).strip()

    return float(normalise(completion) in {normalise(text) for text in answers})


SIGN = r"(?:(?<![\w)])[-+])?"  # the 12 of "10-12" is not negative
NUMBER = rf"{SIGN}(?:(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
FRACTION = re.compile(
    rf"(?P<sign>-?)\\[dt]?frac\{{\s*({NUMBER})\s*\}}\{{\s*({NUMBER})\s*\}}|({NUMBER})\s*/\s*({NUMBER})|({NUMBER})"
)


def numeric_answer(completion: str, answer: Any, *, tolerance: float = 1e-6) -> float:
    r"""Return 1 if the final number of the completion equals the number of the answer, else 0.

    The final number is the last number in the last ``\boxed{...}``. Without a box, it is the last number after the last
    ``####`` or, if there is none, the last number of the text. Commas may separate thousands; ``3/4`` and
    ``\frac{3}{4}`` are fractions; currency and percent signs are ignored. The answer is read in the same way, so it may
    be a worked solution.

    Args:
        answer: Number, or text with a number.
        tolerance: Largest difference at which two numbers count as equal, as a fraction of ``max(1, |answer|)``.

    Raises:
        ValueError: The answer has no number.
    """
    right = float(answer) if isinstance(answer, int | float) else _final_number(str(answer))
    if right is None or not math.isfinite(right):
        raise ValueError(f"the answer {str(answer)[:60]!r} has no finite number")
    given = _final_number(completion)
    return float(given is not None and abs(given - right) <= tolerance * max(1.0, abs(right)))


def _final_number(text: str) -> float | None:
    boxed = text.rfind("\\boxed{")
    if boxed >= 0:
        text = _text_in_braces(text, boxed + len("\\boxed"))
    elif "####" in text:
        text = text.rpartition("####")[2]
    *_, number = (None, *FRACTION.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if number is None:
        return None
    sign, *parts = number.groups()
    numerator, *denominator = [float(part.replace(",", "")) for part in parts if part is not None]
    value = -numerator if sign else numerator
    if not denominator:
        return value
    return value / denominator[0] if denominator[0] else None


def _text_in_braces(text: str, start: int) -> str:
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return text[start + 1 :]


def regex_match(completion: str, pattern: Any, *, whole: bool = False) -> float:
    """Return 1 if the pattern matches somewhere in the completion, else 0.

    Args:
        pattern: Regular expression of Python's ``re``.
        whole: True if the pattern must match the whole completion, without white space at both ends.

    Raises:
        ValueError: The pattern is malformed, or needs more than two seconds on this completion.
    """
    return float(search_within_limit(str(pattern), completion.strip() if whole else completion, whole=whole))


def format_tags(completion: str, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """Return 1 if the completion is ``<think>...</think> <answer>...</answer>``, else 0.

    Every tag must open and close exactly once, in the order of ``tags``, and must not be empty. Outside of tags only
    white space may occur.
    """
    position = 0
    for tag in tags:
        section = re.compile(rf"\s*<{re.escape(tag)}>(.*?)</{re.escape(tag)}>\s*", re.DOTALL).match(
            completion, position
        )
        marks = [f"<{other}>" for other in tags] + [f"</{other}>" for other in tags]
        if not section or not section[1].strip() or any(mark in section[1] for mark in marks):
            return 0.0
        position = section.end()
    return float(position == len(completion))


def json_schema(completion: str, schema: Any) -> float:
    """Return 1 if the completion is a JSON document that conforms to the schema, else 0.

    The document may be inside one code fence (three backticks). A subset of JSON Schema is supported
    (:mod:`json_check`).

    Args:
        schema: JSON Schema, as an object or as JSON text.

    Raises:
        ValueError: The schema is malformed or has an unsupported keyword, or its pattern takes too long on a text.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"the schema is not valid JSON: {error}") from error
    check_schema(schema)
    fenced = re.fullmatch(r"\s*```(?:json)?[^\S\n]*\n(.*?)```\s*", completion, re.DOTALL)
    try:
        document = json.loads(fenced[1] if fenced else completion, parse_constant=_reject_json_constant)
        return float(conforms(document, schema))
    except PatternError:
        raise
    except (ValueError, RecursionError):
        return 0.0


def _reject_json_constant(name: str) -> None:
    raise ValueError(f"JSON does not allow {name}")


def unit_tests(
    completion: str,
    tests: Any,
    *,
    timeout: float = 5.0,
    memory_mib: int = 1024,
    partial: bool = False,
) -> float:
    """Return 1 if the completion's code passes all tests, else 0.

    The code is the last fenced block of the completion (three backticks), or the whole completion if it has none. It
    runs in a subprocess.

    Args:
        tests: Python text that raises if the code is wrong (``assert add(1, 2) == 3``), or a list of such texts. Each
            text is run after the code.
        timeout: Seconds for code and tests together.
        memory_mib: Limit of the process's address space, in MiB.
        partial: True to return the fraction of tests that pass.

    Raises:
        ValueError: There are no tests, or a limit is not positive.
    """
    texts = [tests] if isinstance(tests, str) else list(tests)
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("the tests must be Python text, or a list of Python texts")
    blocks = re.findall(r"```[^\n`]*\n(.*?)```", completion, re.DOTALL)
    passed = count_passed_tests(blocks[-1] if blocks else completion, texts, CodeLimits(timeout, memory_mib))
    return passed / len(texts) if partial else float(passed == len(texts))


@dataclass(frozen=True)
class Builtin:
    function: Callable[..., float]
    """function of a completion's text and, if ``reads`` is set, of a value; options are keyword arguments"""
    reads: str | None = None
    """name of the value, and of the column that has it. The option ``column`` names another column; an option with the
    name of the value sets it for all rows"""
    runs_code: bool = False

    @property
    def option_names(self) -> tuple[str, ...]:
        parameters = tuple(inspect.signature(self.function).parameters)[1:]
        return (*parameters, "column") if self.reads else parameters


BUILTINS: dict[str, Builtin] = {
    "exact_match": Builtin(exact_match, "answer"),
    "numeric_answer": Builtin(numeric_answer, "answer"),
    "regex_match": Builtin(regex_match, "pattern"),
    "format_tags": Builtin(format_tags),
    "json_schema": Builtin(json_schema, "schema"),
    "unit_tests": Builtin(unit_tests, "tests", runs_code=True),
}
"""Name of a built-in reward -> the reward."""


def bind_reward_options(
    builtin: Builtin, options: Mapping[str, Any]
) -> tuple[Callable[..., list[float | None]], frozenset[str]]:
    """Return a function (prompts, completions, columns) -> scores with the options applied, and the columns it reads.

    Raises:
        ArgumentError: The options set both the value and a column, or the reward cannot use an option's value.
    """
    remaining = dict(options)
    column = remaining.pop("column", builtin.reads)
    constant = remaining.pop(builtin.reads, None) if builtin.reads else None
    if constant is not None and "column" in options:
        raise ArgumentError(f"'{builtin.reads}' and 'column' exclude each other", where="reward_funcs")
    _check_option_types(builtin, remaining)
    score = partial(builtin.function, **remaining)
    from_rows = builtin.reads is not None and constant is None
    if constant is not None and not builtin.runs_code:
        try:
            score("", constant)
        except ValueError as error:
            raise ArgumentError(str(error), where="reward_funcs") from error

    def score_one(completion: Any, value: Any) -> float | None:
        if builtin.reads is None:
            return score(completion_text(completion))
        return None if value is None else score(completion_text(completion), value)

    def compute_scores(
        prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None]:
        values = columns[column] if from_rows else [constant] * len(completions)
        if not builtin.runs_code:
            return [score_one(completion, value) for completion, value in zip(completions, values, strict=True)]
        with ThreadPoolExecutor(max(1, min(len(completions), os.cpu_count() or 1))) as pool:
            return list(pool.map(score_one, completions, values))

    return compute_scores, frozenset({column}) if from_rows else frozenset()


def _check_option_types(builtin: Builtin, options: Mapping[str, Any]) -> None:
    accepted_types: dict[type, tuple[type, ...]] = {float: (int, float), tuple: (list, tuple), type(None): (str,)}
    for key, value in options.items():
        kind = type(inspect.signature(builtin.function).parameters[key].default)
        if not isinstance(value, accepted_types.get(kind, (kind,))) or (isinstance(value, bool) and kind is not bool):
            names = " or ".join(accepted_type.__name__ for accepted_type in accepted_types.get(kind, (kind,)))
            raise ArgumentError(
                f"the option '{key}' of the reward '{builtin.function.__name__}' must be {names}, found {value!r}",
                where="reward_funcs",
            )


def completion_text(completion: Any) -> str:
    """Return a completion if it is text, else the text of its last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):  # parts of a message; only their text counts
        return "".join(part.get("text", "") for part in content)
    return content or ""


SUPERVISOR = Path(__file__).with_name("run_tests.py")
GRACE_SECONDS = 10.0
"""seconds beyond the timeout after which the supervisor is killed; it needs time to start and to clean up"""


@dataclass(frozen=True)
class CodeLimits:
    """Limits on the resources that code and tests of one completion may use."""

    seconds: float = 5.0
    memory_mib: int = 1024
    file_mib: int = 16


def count_passed_tests(code: str, tests: Sequence[str], limits: CodeLimits) -> int:
    """Run the code, then each test on a copy of the code's variables, and return how many tests did not raise.

    The result is 0 if the code itself raises, exits, or takes too long.

    Raises:
        ValueError: A limit is not positive and finite.
    """
    if not (math.isfinite(limits.seconds) and limits.seconds > 0 and limits.memory_mib > 0):
        what = f"found {limits.seconds} s and {limits.memory_mib} MiB"
        raise ValueError(f"timeout and memory limit must be positive and finite, {what}")
    request = {
        "code": code,
        "tests": list(tests),
        "seconds": limits.seconds,
        "memory_bytes": limits.memory_mib << 20,
        "file_bytes": limits.file_mib << 20,
    }
    with interrupts.temporary_directory(prefix="streamtune-tests-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", str(SUPERVISOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=_minimal_environment(directory),
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(json.dumps(request).encode(), timeout=limits.seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            answer = b""
        finally:
            process.kill()
            if not answer:  # the code may have killed the supervisor before it could kill the code's processes
                _kill_session(process.pid)
            process.communicate()
    passed = json.loads(answer)["passed"] if answer else 0
    assert 0 <= passed <= len(tests)
    return int(passed)


def _kill_session(session: int) -> None:
    """Kill all processes of a session until none is left (Linux). On other systems, kill the leader's process group."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    is_any_alive = True
    while is_any_alive:
        is_any_alive = False
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                # pid (name) state parent group session ...: the name may hold blanks and parentheses
                state, _, _, session_id = file.read_text().rpartition(")")[2].split()[:4]
                if int(session_id) == session and state not in "ZX":
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    is_any_alive = True


def _minimal_environment(directory: str) -> dict[str, str]:
    """Return environment variables for Python; numerical libraries get one thread, to reserve less address space."""
    thread_limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", **thread_limits}
