"""Chat templates, rendered in a process of their own: bounded in time, memory and output.

    render_chat(tokenizer, request) --request--> worker.py: transformers' sandbox
                                    <--text-----

A template is a program that comes with a model. The sandbox keeps it from files and modules, but not from endless loops
or from filling the memory, for which a single operation is enough (``10 ** 10 ** 10``). So it runs in a process that is
killed at its limits, with no secrets in its environment. The process is started with the first chat, and kept for the
next.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtune.errors import ArgumentError, DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ChatRequest",
    "TemplateLimitError",
    "TemplateLimits",
    "TemplateRefusalError",
    "TemplateVariables",
    "fix_date",
    "fixed_date",
    "render_ahead",
    "render_chat",
    "rendered_ahead",
]

WORKER = Path(__file__).with_name("worker.py")
HEADER, ANSWER = struct.Struct(">QdQQ"), struct.Struct(">Q")
"""Before a request: its size, and its limits in seconds, bytes and characters. Before an answer: its size."""


@dataclass(frozen=True)
class TemplateLimits:
    """Resources of one rendering. They grow with its input: a long chat takes more than a short one."""

    seconds: float = 5.0
    """processor time; and one second more for each MB of messages"""
    memory_mib: int = 256
    """memory beyond what the process has when it starts; and 48 bytes more for each byte of messages"""
    output_characters: int = 1 << 20
    """characters of text; and 16 more for each byte of messages"""
    template_characters: int = 1 << 20
    """characters of the template itself"""


class TemplateLimitError(ArgumentError):
    """A chat template takes more time or memory than rendering takes, or writes more."""


class TemplateRefusalError(ArgumentError):
    """A chat template refuses a conversation, or is not a template."""

    def __init__(self, what: str) -> None:
        super().__init__(what, where="chat_template", fix="set chat_template to a template that takes it")


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to render, with what the template reads beside it."""

    messages: list[dict[str, Any]]
    tools: Any = None
    """JSON schemas of tools, or None"""
    generation: bool = False
    """True if the header of an answer follows"""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """further variables of the template, such as ``enable_thinking``"""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``render_jinja_template``, without fields of messages that are None."""
        messages = [{key: value for key, value in m.items() if value is not None} for m in self.messages]
        return {
            **self.variables,
            "conversations": [messages],
            "tools": self.tools,
            "add_generation_prompt": self.generation,
        }


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    request: ChatRequest,
    template: str | None = None,
    limits: TemplateLimits = TemplateLimits(),
) -> str:
    """Return the text of ``tokenizer.apply_chat_template(..., tokenize=False)``.

    Args:
        tokenizer: Tokenizer with the template and the special tokens.
        template: Template in place of the tokenizer's own.

    Raises:
        TemplateLimitError: A limit is exceeded.
        TemplateRefusalError: The template raises.
    """
    if _renders_itself(tokenizer):
        return _by_itself(tokenizer, request)
    shared, own = _shared(tokenizer, template, request.tools, limits), request.arguments()
    ready = _WORKERS.take(shared["chat_template"], own)
    return _WORKERS.render({**shared, **own}, limits) if ready is None else ready[0]


def render_ahead(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[ChatRequest]) -> bool:
    """Render several conversations at once: :func:`render_chat` and :func:`rendered_ahead` then find them ready.

    Earlier results are forgotten. A conversation that the template refuses is left to :func:`render_chat`, which raises
    the error.

    Returns:
        False if nothing was rendered ahead: the tokenizer renders by itself, or a limit was met.
    """
    _WORKERS.forget()
    if not conversations or _renders_itself(tokenizer):
        return False
    limits = TemplateLimits()
    by_template: dict[str, list[ChatRequest]] = {}
    try:
        for each in conversations:
            by_template.setdefault(tokenizer.get_chat_template(None, each.tools), []).append(each)
        for some in by_template.values():
            _WORKERS.render_ahead(
                _shared(tokenizer, None, some[0].tools, limits), [each.arguments() for each in some], limits
            )
    except (ValueError, ArgumentError):
        return False
    return True


def rendered_ahead(
    tokenizer: PreTrainedTokenizerBase, request: ChatRequest
) -> tuple[str, list[tuple[int, int]] | None] | None:
    """Return the text of a conversation, and the characters that its ``{% generation %}`` blocks print.

    Returns:
        None unless the conversation was rendered ahead. The characters are None if the template has no such blocks, or
        has them inside ``set``, ``macro`` or ``filter``, which collect text.
    """
    if not _WORKERS.ready or _renders_itself(tokenizer):
        return None
    ready = _WORKERS.take(tokenizer.get_chat_template(None, request.tools), request.arguments())
    if ready is None:
        return None
    text, spans = ready
    return text, None if spans is None else [(start, end) for start, end in spans]


def _shared(
    tokenizer: PreTrainedTokenizerBase, template: str | None, tools: Any, limits: TemplateLimits
) -> dict[str, Any]:
    text = _template_text(tokenizer, template, tools)
    if len(text) > limits.template_characters:
        raise _too_much(f"is longer than {limits.template_characters:,} characters")
    return {**tokenizer.special_tokens_map, "chat_template": text}


def template_variables(tokenizer: PreTrainedTokenizerBase, tools: Any) -> set[str] | None:
    """Return the variables that a tokenizer's chat template reads, ``messages`` and ``tools`` among them.

    Args:
        tokenizer: Tokenizer with a template, or with several: one for conversations with tools.

    Returns:
        Their names; None if the tokenizer renders by a method of its own, of which nothing is known.

    Raises:
        TemplateLimitError: Reading the template takes too much time or memory.
        TemplateRefusalError: It is not a template.
    """
    if _renders_itself(tokenizer):
        return None
    text = _template_text(tokenizer, None, tools)
    return set(_WORKERS.render({"read": text}, TemplateLimits()).split())


def _template_text(tokenizer: PreTrainedTokenizerBase, template: str | None, tools: Any) -> str:
    try:
        return tokenizer.get_chat_template(template, tools)
    except ValueError as error:
        raise TemplateRefusalError(str(error)) from error


_GIVEN = {"messages", "tools", "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"}
"""Variables that a rendering gives to the template itself."""


class TemplateVariables:
    """Variables of the chat template, such as ``enable_thinking``: the recipe's; a row's own take precedence."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shared: Mapping[str, Any]) -> None:
        self._tokenizer, self._shared = tokenizer, shared
        self._read: dict[bool, set[str] | None] = {}

    def __call__(self, own: Mapping[str, Any] | None, tools: Any, origin: str) -> dict[str, Any]:
        """Return the variables of a conversation.

        Raises:
            ArgumentError: The template does not read a variable of the recipe.
            DataError: It does not read a variable of the row.
        """
        if self._shared:
            self._check(self._shared, tools, ArgumentError, "chat_template_kwargs")
        if own:
            self._check(own, tools, DataError, origin)
        return {**self._shared, **(own or {})}

    def _check(self, names: Mapping[str, Any], tools: Any, error: type[ArgumentError | DataError], where: str) -> None:
        has_tools = bool(tools)
        if has_tools not in self._read:
            try:
                self._read[has_tools] = template_variables(self._tokenizer, tools)
            except TemplateRefusalError:
                self._read[has_tools] = None  # rendering gives the error
        read = self._read[has_tools]
        if read is None:
            return
        known = sorted(read - _GIVEN - set(self._tokenizer.special_tokens_map))
        for name in names:
            if name not in known:
                raise error(
                    f"chat_template_kwargs has '{name}', which the chat template does not read",
                    where=where,
                    fix=f"{did_you_mean(name, known) or 'delete it'}; the template reads {', '.join(known) or 'none'}",
                )


def fix_date(date: str | None) -> None:
    """Let templates that print the date (``strftime_now``) print this one from now on, in this process.

    A run keeps its date, so that it renders the same when it is resumed on another day. ``date`` is ISO 8601; None lets
    templates print the day of rendering.

    Raises:
        ArgumentError: It is not a date.
    """
    try:
        _WORKERS.date = None if date is None else datetime.fromisoformat(date).isoformat()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{date!r} is no date", where="date", fix="write it as 2025-01-31") from error


def fixed_date() -> str | None:
    """Return the date that :func:`fix_date` set; None if templates print the day of rendering."""
    return _WORKERS.date


def _renders_itself(tokenizer: Any) -> bool:
    """Return True if the tokenizer renders chats by a method of its own, without a template."""
    kind: Any = type(tokenizer)
    return _has_own_method(kind)


@cache  # an import takes a while even where there is nothing to do
def _has_own_method(kind: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return kind.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def _by_itself(tokenizer: Any, request: ChatRequest) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.generation,
            tokenize=False,
            **request.variables,
        )
    except Exception as error:
        raise TemplateRefusalError(str(error) or type(error).__name__) from error
    return text


def _too_much(what: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template {what}: it is broken, or means harm",
        where="chat_template",
        fix="read the template; set chat_template to another one, such as chatml",
    )


class _Worker:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for this process
        )
        self.owner = os.getpid()

    def ask(self, head: bytes, request: bytes, patience: float) -> bytes | None:
        """Return the answer; None if the process ended or sends nothing for ``patience`` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(head)
            self.process.stdin.write(request)
            del request  # of a long conversation the memory counts
            self.process.stdin.flush()
            if not _readable(self.process.stdout, patience):
                return None
            head = self.process.stdout.read(ANSWER.size)
            return self.process.stdout.read(ANSWER.unpack(head)[0]) if len(head) == ANSWER.size else None
        except (BrokenPipeError, ConnectionError):
            return None

    def close(self) -> int:
        if self.owner != os.getpid():  # a fork's copy: the process is not its child
            return 0
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        try:
            return self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class _Workers:
    """The worker of this process, started when it is needed and again if it was killed."""

    def __init__(self) -> None:
        self.date: str | None = None
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self.ready: dict[bytes, Any] = {}
        atexit.register(self.close)

    def render_ahead(self, shared: dict[str, Any], own: Sequence[dict[str, Any]], limits: TemplateLimits) -> None:
        found = json.loads(self.render({**shared, "many": list(own)}, limits))
        for request, rendered in zip(own, found, strict=True):
            if rendered is not None and (key := _key(shared["chat_template"], request)):
                self.ready[key] = rendered

    def take(self, template: str, own: dict[str, Any]) -> Any:
        """Return ``[text, spans]`` of a conversation that was rendered ahead; otherwise None."""
        return self.ready.get(_key(template, own)) if self.ready else None

    def forget(self) -> None:
        self.ready.clear()

    def render(self, request: dict[str, Any], limits: TemplateLimits) -> str:
        """Render a conversation, or several as JSON, or return the variables of a template."""
        data = pickle.dumps({"date": self.date, "request": request}, protocol=pickle.HIGHEST_PROTOCOL)
        seconds = limits.seconds + len(data) / 1e6
        memory, output = (limits.memory_mib << 20) + 48 * len(data), limits.output_characters + 16 * len(data)
        head, asked = HEADER.pack(len(data), seconds, memory, output), [data]
        del data
        with self._lock:
            if self._worker is None or self._worker.owner != os.getpid():
                self._worker = _Worker()
            answer = self._worker.ask(head, asked.pop(), patience=60 + 10 * seconds)
            if answer is None:
                ended, self._worker = self._worker.close(), None
                raise _ended(ended, seconds)
        status, text = answer[:1], str(memoryview(answer)[1:], "utf-8", "surrogatepass")
        if status in (b"O", b"J"):
            return text
        if status == b"E":
            raise TemplateRefusalError(text)
        if text == "memory":
            raise _too_much(f"takes more than {memory >> 20:,} MiB of memory")
        raise _too_much(f"writes more than {output:,} characters")

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _key(template: str, own: dict[str, Any]) -> bytes:
    """Return the key of a conversation that is rendered ahead; empty if it holds more than plain values."""
    try:
        return marshal.dumps((template, own), 2)  # the last version without references: equal values, equal bytes
    except ValueError:
        return b""


def _ended(code: int, seconds: float) -> TemplateLimitError | TemplateRefusalError:
    import signal

    if hasattr(signal, "SIGPROF") and code in (-signal.SIGPROF, -signal.SIGKILL, 0):
        return _too_much(f"takes more than {seconds:.0f} s")
    if code > 0:
        return TemplateRefusalError(f"the process that renders chat templates cannot run (exit code {code})")
    return _too_much(f"ends the process that renders it (signal {-code})")


def _readable(file: Any, seconds: float) -> bool:
    if os.name == "nt":  # which cannot wait for a pipe
        return True
    return bool(select.select([file], [], [], seconds)[0])


def _environment() -> dict[str, str]:
    """Return an environment that imports transformers as this process does: offline, no tokens, one thread."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"), "1")
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    path = os.pathsep.join(entry for entry in sys.path if entry and Path(entry).is_absolute())
    return {**kept, **one, "PYTHONPATH": path, "HOME": "/nonexistent", "LANG": "C.UTF-8", "USE_TORCH": "0"}


_WORKERS = _Workers()
