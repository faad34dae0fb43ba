"""Read prompts from a file: text, or messages in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamtune.data.reading.cells import add_system, check_message, convert_sharegpt_turn, read_chat_kwargs, read_tools
from streamtune.data.reading.image_cells import TEXT_MARK, ImageCell, image_column, mark_images
from streamtune.data.reading.readers import Row
from streamtune.errors import ArgumentError, DataError


@dataclass(frozen=True)
class ToolPrompt:
    """A conversation to answer, with tools and variables for the chat template, and images."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools; None without tools."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template (``chat_template_kwargs``)."""
    images: tuple[ImageCell, ...] = ()
    """Images, in the order of their marks in the messages."""
    origin: str = "--file"
    """Option that gives the prompt, for errors."""


Prompt = str | list[dict[str, Any]] | ToolPrompt
"""A prompt: text, the messages of a conversation, or messages with tools, variables and images."""

CHAT_COLUMNS = ("system", "tools", "chat_template_kwargs")
"""Keys of a prompt's JSON object that the chat template reads."""

MAX_BYTES = 1 << 30
"""Maximum size of a prompt file, in bytes."""


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts in a file.

    A ``.json`` file has a list of messages, an object with ``messages`` or ``prompt``, or a list of such objects. A
    ``.jsonl`` file has one prompt on each line, in the same forms. Any other file is one prompt. An assistant message
    at the end of a conversation is dropped. The keys ``system``, ``tools``, ``chat_template_kwargs`` and ``images`` of
    an object are used as in training.

    Raises:
        DataError: The file cannot be read, or its content is not prompts.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path} is larger than 1 GiB, the limit for prompts", where="--file")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", where="--file", fix="give a text or JSON file"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text", where="--file") from error
    ending = path.suffix.lower()
    if ending == ".json":
        found = list(_iterate_document_prompts(_parse_json(text, str(path)), str(path), path.parent))
    elif ending == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        found = [
            _parse_prompt(_parse_json(line, f"{path}:{number}"), f"{path}:{number}", path.parent)
            for number, line in lines
        ]
    else:
        found = [text] if text.strip() else []
    if not found:
        raise DataError(f"{path} is empty", where="--file", fix="write a prompt into it")
    return found


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"invalid JSON: {error}", where=where, fix="write valid JSON, or put a plain-text prompt into a .txt file"
        ) from error


def _iterate_document_prompts(value: Any, where: str, folder: Path) -> Iterator[Prompt]:
    if isinstance(value, list) and value and not _is_message(value[0]):
        for number, item in enumerate(value):
            yield _parse_prompt(item, f"{where}[{number}]", folder)
    else:
        yield _parse_prompt(value, where, folder)


def prompt_with_images(text: str, images: Sequence[str]) -> ToolPrompt:
    """Return a user message with images: in the places of ``<image>`` in its text, otherwise before it.

    Raises:
        ArgumentError: The text has another number of ``<image>`` than there are images.
    """
    if text.count(TEXT_MARK) not in (0, len(images)):
        raise ArgumentError(
            f"the prompt has {text.count(TEXT_MARK)} times {TEXT_MARK}, and --image is given {len(images)} times",
            where="--image",
            fix=f"write {TEXT_MARK} once for each image, or not at all",
        )
    columns = {"messages": [{"role": "user", "content": text}], "images": list(images)}
    row, cells = mark_images(Row("--image", columns))
    messages = [_to_training_message(message, "--prompt", "--image") for message in row.columns["messages"]]
    return ToolPrompt(messages, images=cells, origin="--image")


def _parse_prompt(value: Any, where: str, folder: Path) -> Prompt:
    if isinstance(value, Mapping) and not _is_message(value):
        for key in ("messages", "prompt", "conversations"):
            if key in value:
                columns = dict(value)
                if isinstance(value[key], str) and value[key] and image_column(Row(where, columns)):
                    columns[key] = [{"role": "user", "content": value[key]}]
                row, images = mark_images(Row(where, columns, folder=folder))
                found = _parse_messages(row.columns[key], f"{where}: {key}")
                return _add_columns_to_prompt(found, row.columns, where, images)
        raise DataError("an object needs 'messages' or 'prompt'", where=where)
    row, images = mark_images(Row(where, {"messages": value}, folder=folder))
    return _add_columns_to_prompt(_parse_messages(row.columns["messages"], where), {}, where, images)


def _parse_messages(value: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        if not value:
            raise DataError("the prompt is empty", where=where)
        return value
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise DataError(
            "expected text or a list of messages", where=where, fix='write {"role": "user", "content": "..."}'
        )
    prompt = [_to_training_message(message, f"messages[{index}]", where) for index, message in enumerate(messages)]
    if prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt or prompt[-1]["role"] == "assistant":
        raise DataError("the conversation has nothing to answer: it ends with an assistant message", where=where)
    return prompt


def _add_columns_to_prompt(
    prompt: str | list[dict[str, Any]], columns: Mapping[str, Any], where: str, images: tuple[ImageCell, ...]
) -> Prompt:
    """Return the prompt with the system message, tools and template variables of its JSON object, and its images.

    A text with one of these becomes a user message.
    """
    if not isinstance(prompt, list):
        if not any(columns.get(name) for name in CHAT_COLUMNS):
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    messages, _ = add_system(prompt, columns, where)
    tools, variables = (
        read_tools(columns.get("tools"), where),
        read_chat_kwargs(columns.get("chat_template_kwargs"), where),
    )
    return ToolPrompt(messages, tools, variables, images) if tools or variables or images else messages


def _to_training_message(message: Mapping[str, Any], place: str, where: str) -> dict[str, Any]:
    """Return a message in the format of training data, without the key ``weight``."""
    own = dict(message)
    checked = check_message(convert_sharegpt_turn(own, place, where) if "from" in own else own, place, where)
    checked.pop("weight", None)
    return checked


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) or (isinstance(value.get("from"), str) and "value" in value)
