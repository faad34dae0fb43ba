"""Render chat templates in a separate process with limits on time, memory and output.

    render_chat(tokenizer, request) --request--> worker.py: transformers' sandbox
                                    <--text-----

A template is a program that comes with a model. The sandbox denies it files and modules. The sandbox does not stop
endless loops or the exhaustion of memory; one operation is enough for this (``10 ** 10 ** 10``). So the template runs
in a process that is killed at its limits and has no secrets in its environment. The process starts with the first chat
and serves all later chats.
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

from streamtune.data.reading.image_cells import MARK, split_at_marks
from streamtune.errors import ArgumentError, DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ChatRequest",
    "TemplateLimitError",
    "TemplateLimits",
    "TemplateRefusalError",
    "TemplateVariables",
    "find_rendered_ahead",
    "fix_template_date",
    "fixed_template_date",
    "image_text",
    "render_ahead",
    "render_chat",
]

WORKER = Path(__file__).with_name("worker.py")
HEADER, ANSWER = struct.Struct(">QdQQ"), struct.Struct(">Q")
"""Header of a request (size, and limits in seconds, bytes and characters), and header of an answer (size)."""


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of time, memory and output size for one rendering of a chat template."""

    seconds: float = 5.0
    """maximum processor time in seconds; one second is added per MB of the request"""
    memory_mib: int = 256
    """maximum MiB of memory beyond the process's memory at its start; 48 bytes are added per byte of the request"""
    output_characters: int = 1 << 20
    """maximum number of characters of the rendered text; 16 are added per byte of the request"""
    template_characters: int = 1 << 20
    """maximum number of characters of the template"""


class TemplateLimitError(ArgumentError):
    """A chat template exceeds a limit of time, memory or size."""


class TemplateRefusalError(ArgumentError):
    """A chat template rejects a conversation, or is not a valid template."""

    def __init__(self, what: str) -> None:
        super().__init__(what, where="chat_template", fix="set chat_template to a template that accepts it")


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to render, with its tools and template variables."""

    messages: list[dict[str, Any]]
    tools: Any = None
    """JSON schemas of tools; None without tools"""
    generation: bool = False
    """True adds the generation prompt"""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """further variables of the template, such as ``enable_thinking``"""
    has_images: bool = False
    """True if texts have :data:`MARK` in place of images; the template then gets them as lists of parts"""

    def to_kwargs(self, *, as_parts: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of ``render_jinja_template``, without message fields that are None.

        Args:
            as_parts: True to give the template the content of every message as a list of parts.
        """
        messages = [_with_reasoning({key: x for key, x in m.items() if x is not None}) for m in self.messages]
        if self.has_images or as_parts:
            messages = [_with_parts(message, self.has_images, as_parts) for message in messages]
        return {
            **self.variables,
            "conversations": [messages],
            "tools": self.tools,
            "add_generation_prompt": self.generation,
        }


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message with its reasoning; the first that is there counts, as in ``transformers`` 5.24."""


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has the names that templates read, as ``transformers`` 5.24 gives it to them."""
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_parts(message: dict[str, Any], has_images: bool, as_parts: bool) -> dict[str, Any]:
    """Return a message with its content as a list of parts; unchanged if the content needs no parts."""
    content = message.get("content")
    if not isinstance(content, str) or not (as_parts or (has_images and MARK in content)):
        return message
    parts = split_at_marks(content) if has_images else [{"type": "text", "text": content}]
    return {**message, "content": parts or [{"type": "text", "text": ""}]}


def _reads_parts_only(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template prints a list of parts, but not a text, as the templates of Llava do."""
    template = tokenizer.get_chat_template()
    if template not in _PARTS_ONLY:
        _PARTS_ONLY[template] = False
        request = ChatRequest([{"role": "user", "content": _PROBE}])
        shared = {**tokenizer.special_tokens_map, "chat_template": template}

        def prints(as_parts: bool) -> bool:
            with suppress(ArgumentError):
                return _PROBE in _WORKERS.render({**shared, **request.to_kwargs(as_parts=as_parts)}, TemplateLimits())
            return False

        _PARTS_ONLY[template] = "image" in template and not prints(False) and prints(True)
    return _PARTS_ONLY[template]


def image_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the tokenizer's chat template prints for an image of a message.

    Return an empty string if the template prints no images, or if there is no template.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or "image" not in template:
        return ""
    parts = [{"type": "text", "text": "1"}, {"type": "image"}, {"type": "text", "text": "2"}]
    try:
        plain, shown = (
            render_chat(tokenizer, ChatRequest([{"role": "user", "content": content}]))
            for content in (parts[::2], parts)
        )
    except ArgumentError:  # the template takes texts only
        return ""
    start = next(
        (place for place, (one, other) in enumerate(zip(plain, shown, strict=False)) if one != other), len(plain)
    )
    added = shown[start : start + len(shown) - len(plain)]
    return added if plain[:start] + added + plain[start:] == shown else ""


_PARTS_ONLY: dict[str, bool] = {}
_PROBE = "Hello"


def _request_kwargs(tokenizer: PreTrainedTokenizerBase, request: ChatRequest) -> dict[str, Any]:
    return request.to_kwargs(as_parts=_reads_parts_only(tokenizer))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    request: ChatRequest,
    template: str | None = None,
    limits: TemplateLimits = TemplateLimits(),
) -> str:
    """Return the text of ``tokenizer.apply_chat_template(..., tokenize=False)``, rendered in the template process.

    Args:
        template: Chat template; None uses the tokenizer's.

    Raises:
        TemplateLimitError: A limit is exceeded.
        TemplateRefusalError: The template raises an error.
    """
    if _has_own_rendering(tokenizer):
        return _render_by_method(tokenizer, request)
    shared, own = _shared_arguments(tokenizer, template, request.tools, limits), _request_kwargs(tokenizer, request)
    ready = _WORKERS.take_rendered(shared["chat_template"], own)
    return _WORKERS.render({**shared, **own}, limits) if ready is None else ready[0]


def render_ahead(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[ChatRequest]) -> bool:
    """Render several conversations in one request to the template process, for :func:`render_chat` to return later.

    Results of earlier calls are discarded. A conversation that the template rejects has no result: :func:`render_chat`
    renders it again and raises the error.

    Returns:
        True if results are stored; False if the tokenizer renders without a template, or a limit was exceeded.
    """
    _WORKERS.forget_rendered()
    if not conversations or _has_own_rendering(tokenizer):
        return False
    limits = TemplateLimits()
    by_template: dict[str, list[ChatRequest]] = {}
    try:
        for each in conversations:
            by_template.setdefault(tokenizer.get_chat_template(None, each.tools), []).append(each)
        for some in by_template.values():
            _WORKERS.render_ahead(
                _shared_arguments(tokenizer, None, some[0].tools, limits),
                [_request_kwargs(tokenizer, each) for each in some],
                limits,
            )
    except (ValueError, ArgumentError):
        return False
    return True


def find_rendered_ahead(
    tokenizer: PreTrainedTokenizerBase, request: ChatRequest
) -> tuple[str, list[tuple[int, int]] | None] | None:
    """Return the text of a conversation that :func:`render_ahead` rendered, and the spans of ``{% generation %}``
    blocks.

    Args:
        tokenizer: Tokenizer that was given to :func:`render_ahead`.

    Returns:
        None for a conversation that was not rendered ahead. The spans are None if the template has no such blocks, or
            has them inside ``set``, ``macro`` or ``filter``, where their positions are unknown.
    """
    if not _WORKERS.ready or _has_own_rendering(tokenizer):
        return None
    own = _request_kwargs(tokenizer, request)
    ready = _WORKERS.take_rendered(tokenizer.get_chat_template(None, request.tools), own)
    if ready is None:
        return None
    text, spans = ready
    return text, None if spans is None else [(start, end) for start, end in spans]


def _shared_arguments(
    tokenizer: PreTrainedTokenizerBase, template: str | None, tools: Any, limits: TemplateLimits
) -> dict[str, Any]:
    text = _template_text(tokenizer, template, tools)
    if len(text) > limits.template_characters:
        raise _limit_error(f"has more than {limits.template_characters:,} characters")
    return {**tokenizer.special_tokens_map, "chat_template": text}


def template_variables(tokenizer: PreTrainedTokenizerBase, tools: Any) -> set[str] | None:
    """Return the names of the variables that a tokenizer's chat template reads, including ``messages`` and ``tools``.

    Args:
        tokenizer: Tokenizer with a template. It may have another template for conversations with tools.
        tools: Tools of the conversation; None without tools.

    Returns:
        The names; None if the tokenizer renders by its own method, whose variables are unknown.

    Raises:
        TemplateLimitError: Parsing the template takes too much time or memory.
        TemplateRefusalError: The text is not a valid template.
    """
    if _has_own_rendering(tokenizer):
        return None
    text = _template_text(tokenizer, None, tools)
    return set(_WORKERS.render({"read": text}, TemplateLimits()).split())


def _template_text(tokenizer: PreTrainedTokenizerBase, template: str | None, tools: Any) -> str:
    try:
        return tokenizer.get_chat_template(template, tools)
    except ValueError as error:
        raise TemplateRefusalError(str(error)) from error


_SET_BY_RENDERING = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
"""Variables that ``apply_chat_template`` sets."""


class TemplateVariables:
    """Merges chat template variables of the recipe and of a row, and checks that the template reads them.

    Args:
        shared: Variables of the recipe, such as ``enable_thinking``; variables of a row take precedence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shared: Mapping[str, Any]) -> None:
        self._tokenizer, self._shared = tokenizer, shared
        self._read: dict[bool, set[str] | None] = {}

    def __call__(self, row_variables: Mapping[str, Any] | None, tools: Any, origin: str) -> dict[str, Any]:
        """Return the template variables of a conversation.

        Args:
            tools: Tools of the conversation; None without tools.
            origin: File and line of the row, for errors.

        Raises:
            ArgumentError: The template does not read a variable of the recipe.
            DataError: The template does not read a variable of the row.
        """
        if self._shared:
            self._check(self._shared, tools, ArgumentError, "chat_template_kwargs")
        if row_variables:
            self._check(row_variables, tools, DataError, origin)
        return {**self._shared, **(row_variables or {})}

    def _check(
        self, variables: Mapping[str, Any], tools: Any, error_type: type[ArgumentError | DataError], where: str
    ) -> None:
        has_tools = bool(tools)
        if has_tools not in self._read:
            try:
                self._read[has_tools] = template_variables(self._tokenizer, tools)
            except TemplateRefusalError:
                self._read[has_tools] = None  # rendering raises the error
        read = self._read[has_tools]
        if read is None:
            return
        known = sorted(read - _SET_BY_RENDERING - set(self._tokenizer.special_tokens_map))
        for name in variables:
            if name not in known:
                raise error_type(
                    f"chat_template_kwargs has '{name}', which the chat template does not read",
                    where=where,
                    fix=f"{did_you_mean(name, known) or 'remove it'}; the template reads {', '.join(known) or 'none'}",
                )


def fix_template_date(date: str | None) -> None:
    """Set the date that chat templates get from ``strftime_now``, for all later renderings of this process.

    A run stores its date, so that it renders the same text when it is resumed on another day.

    Args:
        date: Date in ISO 8601; None gives templates the current date.

    Raises:
        ArgumentError: The text is not a date.
    """
    try:
        _WORKERS.date = None if date is None else datetime.fromisoformat(date).isoformat()
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"expected an ISO 8601 date, found {date!r}", where="date", fix="write it as 2025-01-31"
        ) from error


def fixed_template_date() -> str | None:
    """Return the date that :func:`fix_template_date` set; None if chat templates print the current date."""
    return _WORKERS.date


def _has_own_rendering(tokenizer: Any) -> bool:
    """Return True if the tokenizer's class overrides ``apply_chat_template``."""
    kind: Any = type(tokenizer)
    return _has_own_method(kind)


@cache  # importing transformers is slow even if it is already loaded
def _has_own_method(tokenizer_class: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return tokenizer_class.apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def _render_by_method(tokenizer: Any, request: ChatRequest) -> str:
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


def _limit_error(violation: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"the chat template {violation}: it is faulty or malicious",
        where="chat_template",
        fix="inspect the template, or set chat_template to another one, such as chatml",
    )


class _Worker:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_worker_environment(),
            start_new_session=True,  # Ctrl-C must not reach the worker
        )
        self.owner = os.getpid()

    def send_request(self, header: bytes, request: bytes, timeout: float) -> bytes | None:
        """Return the answer of the process; None if it ended, or sends nothing within ``timeout`` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(header)
            self.process.stdin.write(request)
            del request  # frees the memory of a long conversation
            self.process.stdin.flush()
            if not _becomes_readable(self.process.stdout, timeout):
                return None
            header = self.process.stdout.read(ANSWER.size)
            return self.process.stdout.read(ANSWER.unpack(header)[0]) if len(header) == ANSWER.size else None
        except (BrokenPipeError, ConnectionError):
            return None

    def close(self) -> int:
        if self.owner != os.getpid():  # after a fork: the worker belongs to the parent process
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
    """Manages the template process of this process, which is started on demand, and again after it was killed."""

    def __init__(self) -> None:
        self.date: str | None = None
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self.ready: dict[bytes, Any] = {}
        atexit.register(self.close)

    def render_ahead(self, shared: dict[str, Any], requests: Sequence[dict[str, Any]], limits: TemplateLimits) -> None:
        found = json.loads(self.render({**shared, "many": list(requests)}, limits))
        for request, rendered in zip(requests, found, strict=True):
            if rendered is not None and (key := _lookup_key(shared["chat_template"], request)):
                self.ready[key] = rendered

    def take_rendered(self, template: str, request: dict[str, Any]) -> Any:
        """Return the stored ``[text, spans]`` of a conversation; None if it was not rendered ahead."""
        return self.ready.get(_lookup_key(template, request)) if self.ready else None

    def forget_rendered(self) -> None:
        self.ready.clear()

    def render(self, request: dict[str, Any], limits: TemplateLimits) -> str:
        """Send a request to the template process and return its answer.

        Raises:
            TemplateLimitError: A limit was exceeded.
            TemplateRefusalError: The template raises an error, or the process cannot run.
        """
        data = pickle.dumps({"date": self.date, "request": request}, protocol=pickle.HIGHEST_PROTOCOL)
        seconds = limits.seconds + len(data) / 1e6
        memory, output = (limits.memory_mib << 20) + 48 * len(data), limits.output_characters + 16 * len(data)
        head, asked = HEADER.pack(len(data), seconds, memory, output), [data]
        del data
        with self._lock:
            if self._worker is None or self._worker.owner != os.getpid():
                self._worker = _Worker()
            answer = self._worker.send_request(head, asked.pop(), timeout=60 + 10 * seconds)
            if answer is None:
                ended, self._worker = self._worker.close(), None
                raise _worker_error(ended, seconds)
        status, text = answer[:1], str(memoryview(answer)[1:], "utf-8", "surrogatepass")
        if status in (b"O", b"J"):
            return text
        if status == b"E":
            raise TemplateRefusalError(text)
        if text == "memory":
            raise _limit_error(f"takes more than {memory >> 20:,} MiB of memory")
        raise _limit_error(f"prints more than {output:,} characters")

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _lookup_key(template: str, request: dict[str, Any]) -> bytes:
    """Return the key of a conversation for lookup; empty if it contains other than basic Python types."""
    try:
        return marshal.dumps((template, request), 2)  # version 2 has no references: equal values give equal bytes
    except ValueError:
        return b""


def _worker_error(code: int, seconds: float) -> TemplateLimitError | TemplateRefusalError:
    import signal

    if hasattr(signal, "SIGPROF") and code in (-signal.SIGPROF, -signal.SIGKILL, 0):
        return _limit_error(f"takes more than {seconds:.0f} s")
    if code > 0:
        return TemplateRefusalError(f"the process that renders chat templates failed (exit code {code})")
    return _limit_error(f"killed the process that renders it (signal {-code})")


def _becomes_readable(file: Any, seconds: float) -> bool:
    if os.name == "nt":  # Windows cannot wait for a pipe
        return True
    return bool(select.select([file], [], [], seconds)[0])


def _worker_environment() -> dict[str, str]:
    """Return the environment of the template process: same import path, offline, no access tokens, one thread."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"), "1")
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    path = os.pathsep.join(entry for entry in sys.path if entry and Path(entry).is_absolute())
    return {**kept, **one, "PYTHONPATH": path, "HOME": "/nonexistent", "LANG": "C.UTF-8", "USE_TORCH": "0"}


_WORKERS = _Workers()
