"""The program of the process that renders chat templates: started by path, ends with its input.

A template is a program of whoever made the model. It is rendered by transformers, in the sandbox of jinja2; the sandbox
does not bound time and memory, so this process does, and ends where a limit is met inside a single operation.

Requests come as pickles from the process that started this one, and answers go back as a status byte and text:

    O text     rendered             L what     a limit was met
    E message  the template raised, or refuses what it is given
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct(">Q")
OUTPUT, MEMORY = "output", "memory"


def main() -> None:
    """Answer requests until there are no more."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    from transformers.utils.chat_template_utils import render_jinja_template

    _forbid_files()
    base = _address_space()
    while (data := _read(requests)) is not None:
        request = pickle.loads(data)
        limits = request.pop("limits")
        _limit(limits, base + limits["memory_bytes"])
        try:
            status, text = _render(render_jinja_template, request, limits["output_characters"])
            answer = status + text.encode("utf-8", "surrogatepass")
            del text
        except MemoryError:
            answer = b"L" + MEMORY.encode()
        _limit({"seconds": 0}, -1)
        del request, data
        answers.write(HEADER.pack(len(answer)))
        answers.write(answer)
        answers.flush()


def _render(render: Any, request: dict[str, Any], most: int) -> tuple[bytes, str]:
    try:
        rendered, _ = render(**request)
    except MemoryError:
        raise
    except RecursionError:
        return b"E", "it calls itself without end"
    except Exception as error:  # a template raises what it likes
        return b"E", (str(error) or type(error).__name__)[:2000]
    return (b"O", rendered[0]) if len(rendered[0]) <= most else (b"L", OUTPUT)


def _read(file: BinaryIO) -> bytes | None:
    head = file.read(HEADER.size)
    return file.read(HEADER.unpack(head)[0]) if len(head) == HEADER.size else None


def _limit(limits: dict[str, Any], memory_bytes: int) -> None:
    """Bound what follows in processor time, which ends the process, and in memory, which raises MemoryError."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if memory_bytes < 0:
            memory_bytes = hard
        elif hard != resource.RLIM_INFINITY:
            memory_bytes = min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))


def _forbid_files() -> None:
    """Rendering writes no file and starts no process: where a template breaks out of the sandbox, it cannot either."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _address_space() -> int:
    """Bytes of address space this process has by now; a guess where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (no more imports than it needs)
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 2 << 30


if __name__ == "__main__":
    main()
