"""The program that renders chat templates in a separate process; it ends when its input is closed.

A template is a program by the model's authors. transformers renders it in the sandbox of jinja2, which does not limit
time or memory. This process sets these limits, and is killed if a single operation exceeds a limit.

Requests come as pickles from the parent process. Answers are a status byte and text::

    O text     rendered text        L what     a limit was exceeded
    J items    several conversations as JSON, each [text, spans]; null if the template rejects one
    E message  the template raised an error, or rejects its input

Spans are [start, end] of the characters that ``{% generation %}`` blocks print. They are null if the template has no
such block. They are also null if a block is inside ``set``, ``macro``, ``filter`` or a recursive loop: these collect
text, so its position in the output is unknown.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import os
import pickle
import signal
import struct
import sys
from datetime import datetime
from typing import Any

HEADER, ANSWER = struct.Struct(">QdQQ"), struct.Struct(">Q")
OUTPUT, MEMORY = "output", "memory"


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not mix with answers
    gc.disable()  # imports make no garbage; freeze() then excludes their objects from collections
    library = _import_library()
    gc.freeze()
    gc.enable()
    _forbid_files()
    bound = _MemoryLimit()
    while head := requests.read(HEADER.size):
        size, seconds, memory_bytes, max_characters = HEADER.unpack(head)
        data = requests.read(size)
        asked = pickle.loads(data)
        bound.allow(memory_bytes)
        _kill_process_after(seconds)
        try:
            status, text = _answer_request(library, asked["request"], asked["date"], max_characters)
            answer = status + text.encode("utf-8", "surrogatepass")
            del text
        except MemoryError:
            answer = b"L" + MEMORY.encode()
        _kill_process_after(0)
        del asked, data
        answers.write(ANSWER.pack(len(answer)) + answer)
        answers.flush()


def _import_library() -> Any:
    """Import only the chat template module of transformers, because importing all of it takes most of a second.

    The parent packages are created without running their ``__init__``. If the module needs their contents, all of
    transformers is imported.
    """
    name = "transformers.utils.chat_template_utils"
    try:
        for package in ("transformers", "transformers.utils"):
            found = importlib.util.find_spec(package)
            assert found is not None, "transformers is installed"
            sys.modules[package] = importlib.util.module_from_spec(found)
        return importlib.import_module(name)
    except Exception:
        for loaded in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
            del sys.modules[loaded]
        return importlib.import_module(name)


def _answer_request(library: Any, request: dict[str, Any], date: str | None, max_characters: int) -> tuple[bytes, str]:
    """Return the status byte and the text that answer a request to render or inspect a template."""
    try:
        if request.keys() == {"read"}:
            return b"O", _variable_names(library, request["read"])
        _set_date(library._compile_jinja_template(request["chat_template"]).environment, date)
        if "many" in request:
            found = json.dumps(list(_render_many(library, **request)))
            return (b"J", found) if len(found) <= 6 * max_characters else (b"L", OUTPUT)
        rendered, _ = library.render_jinja_template(**request)
    except MemoryError:
        raise
    except RecursionError:
        return b"E", "it recurses without end"
    except Exception as error:  # a template may raise any exception
        return b"E", (str(error) or type(error).__name__)[:2000]
    return (b"O", rendered[0]) if len(rendered[0]) <= max_characters else (b"L", OUTPUT)


def _render_many(library: Any, requests: list[dict[str, Any]], chat_template: str, **shared: Any) -> Any:
    """Yield ``[text, spans]`` for each conversation, or None for a conversation that the template rejects."""
    marks = _has_recordable_marks(library, chat_template)
    for own in requests:
        try:
            texts, spans = library.render_jinja_template(
                chat_template=chat_template, return_assistant_tokens_mask=marks, **{**shared, **own}
            )
        except MemoryError:
            raise
        except Exception:  # a request for this conversation alone returns the error
            yield None
        else:
            yield [texts[0], spans[0] if marks else None]


@functools.lru_cache
def _has_recordable_marks(library: Any, template: str) -> bool:
    """Return True if a template has ``{% generation %}`` blocks whose positions in the output can be recorded."""
    from jinja2 import nodes

    collects = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
    found = []

    def walk(node: Any, collected: bool) -> None:
        called: Any = getattr(getattr(node, "call", None), "node", None)
        if isinstance(node, nodes.CallBlock) and getattr(called, "name", "") == "_generation_support":
            found.append(collected)
        for child in node.iter_child_nodes():
            walk(child, collected or isinstance(node, collects) or getattr(node, "recursive", False))

    walk(library._compile_jinja_template(template).environment.parse(template), False)
    return bool(found) and not any(found)


def _variable_names(library: Any, template: str) -> str:
    from jinja2 import meta

    environment = library._compile_jinja_template(template).environment
    return " ".join(sorted(meta.find_undeclared_variables(environment.parse(template))))


def _set_date(environment: Any, date: str | None) -> None:
    moment = datetime.fromisoformat(date) if date is not None else None
    environment.globals["strftime_now"] = lambda form: (moment or datetime.now()).strftime(form)


def _kill_process_after(seconds: float) -> None:
    """Set a timer that kills this process after ``seconds`` of processor time, even within one operation; 0 cancels."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


class _MemoryLimit:
    """Limits how much memory this process may add after its start; beyond the limit Python raises MemoryError."""

    def __init__(self) -> None:
        self.base, self.now = _address_space_bytes(), 0

    def allow(self, memory_bytes: int) -> None:
        """Set the limit to ``memory_bytes``; a present limit of up to twice as much stays, to save a system call."""
        if memory_bytes <= self.now <= 2 * memory_bytes:
            return
        self.now = memory_bytes
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            max_bytes = self.base + memory_bytes
            resource.setrlimit(
                resource.RLIMIT_AS, (max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard), hard)
            )


def _forbid_files() -> None:
    """Forbid this process to write files, in case a template escapes the sandbox."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (avoids importing pathlib)
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 2 << 30


if __name__ == "__main__":
    main()
