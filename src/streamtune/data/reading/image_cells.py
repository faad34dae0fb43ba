"""Find the images of a row, and replace each in the messages by the character :data:`MARK`.

A row names its images in its messages, or in the column ``images``::

    {"type": "image", "image": VALUE}    a part of a message's content; also "path", "url" or "base64" for the value
    {"type": "image_url", "image_url": {"url": VALUE}}
    {"type": "image"}                    the next image of the column
    <image>                              in a text, if the row has the column: its next image

Rows of type ``alpaca`` have ``<image>`` in ``instruction`` or ``input``.

If the messages have no place for an image, the images of the column are put before the first user message, as TRL does.

A value is the path of a file, a ``data:`` URL, the bytes of a file, or an object with ``bytes`` or ``path``, as in
columns of ``datasets``. A path is relative to the file of the row.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamtune.data.reading.cells import SHAREGPT_ROLES, json_type_of, parse_cell
from streamtune.data.reading.readers import Row
from streamtune.errors import DataError

MARK = "\ufdd0"
"""Character of a message's text at the place of an image: a code point that Unicode never assigns to a character."""
MESSAGE_COLUMNS = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected")
"""Columns with messages, in the order in which their images are counted."""
TEXT_MARK = "<image>"
"""Place of an image in the text of a row with the column, as in LLaMA-Factory and ms-swift."""
_SCHEME = re.compile(r"(?!file:|data:)[a-zA-Z][a-zA-Z0-9+.-]*://")
"""Beginning of a URL."""
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2")
_VALUE_KEYS = ("image", "path", "url", "base64")


@dataclass(frozen=True)
class ImageCell:
    """An image of a row that is not read yet: the path of a file, or the bytes of a file."""

    where: str
    """place in the row, such as ``images[0]``, for errors"""
    path: Path | None = None
    content: bytes | None = None


def image_column(row: Row) -> str | None:
    """Return the name of the row's column with images; None if it has none.

    A column ``image`` that is text counts if it names an image file, or if the row has places for images.
    """
    if row.columns.get("images") not in (None, "", []):
        return "images"
    value = row.columns.get("image")
    if value in (None, "", []):
        return None
    is_other_text = isinstance(value, str) and not value.lower().endswith(_SUFFIXES) and not value.startswith("data:")
    return None if is_other_text and not _has_places(row) else "image"


def _has_places(row: Row) -> bool:
    lists = (_message_list(row, name) for name in MESSAGE_COLUMNS if name in row.columns)
    return TEXT_MARK in str(row.columns) or any(_has_image_part(message) for each in lists for message in each)


def mark_images(row: Row) -> tuple[Row, tuple[ImageCell, ...]]:
    """Return a row with :data:`MARK` in place of each image in its messages, and the images in this order.

    A row without images is returned unchanged.

    Raises:
        DataError: An image is malformed, is part of an answer, or has no place in the messages; or a place has no
            image.
    """
    column = image_column(row)
    if column is None and not any(_may_have_image(row.columns.get(name)) for name in MESSAGE_COLUMNS):
        _refuse_places_without_images(row)
        return row, ()
    lists = {name: _message_list(row, name) for name in MESSAGE_COLUMNS if name in row.columns}
    if column is None and not any(_has_image_part(message) for each in lists.values() for message in each):
        _refuse_places_without_images(row)
        return row, ()
    if column is not None and isinstance(row.columns.get("instruction"), str) and not any(lists.values()):
        return _mark_instruction(row, column)
    if not any(lists.values()):
        raise DataError(
            f"the row has images in the column '{column}', and no messages that could show them",
            where=row.origin,
            fix="write the row as messages, or remove the column",
        )
    _separate_prompt(row, lists)
    reader = _PlaceReader(row, column)
    marked = {
        name: [reader.mark(message, f"{name}[{number}]") for number, message in enumerate(messages)]
        for name, messages in lists.items()
        if name != "rejected"
    }
    images = reader.finish(marked)
    if "rejected" in lists:  # another answer to the same prompt, perhaps with the prompt before it
        marked["rejected"] = _mark_other_answer(
            row, lists.get("chosen", []), marked.get("chosen", []), lists["rejected"], column
        )
    return replace(row, columns={**row.columns, **marked}), tuple(images)


class _PlaceReader:
    """Replaces the places of images in the messages of a row by :data:`MARK`, and collects the images."""

    def __init__(self, row: Row, column: str | None) -> None:
        self.row, self.column = row, column
        self.waiting = [] if column is None else _read_column(row, column)
        self.found: list[ImageCell] = []
        self.used = 0

    def mark(self, message: Any, place: str) -> Any:
        """Return a message with the marks of its images."""
        parts = _split_content(message, self.column is not None)
        for index, part in enumerate(parts):
            where = f"{place}.content[{index}]"
            if MARK in (_text_of(part) or ""):
                raise DataError(
                    f"{where} has the character U+FDD0, which marks images here",
                    where=self.row.origin,
                    fix="remove the character",
                )
            if not _is_image_part(part):
                continue
            if _role_of(message) == "assistant":
                raise DataError(
                    f"{where} is an image in an answer, and models write text only",
                    where=self.row.origin,
                    fix="remove the image, or the row",
                )
            value = _part_value(part)
            if value is None and self.used == len(self.waiting):
                raise _wrong_count_error(self.row, self.column, len(self.waiting), "more places for images")
            self.found.append(self.waiting[self.used] if value is None else _to_cell(value, where, self.row))
            self.used += value is None
            parts[index] = {"type": "text", "text": MARK}
        return {**message, _content_key(message): parts} if parts else message

    def finish(self, marked: Mapping[str, list[Any]]) -> list[ImageCell]:
        """Return all images in order. Images without places get places before the first user message."""
        if self.waiting and not self.found:
            _put_before_first_user(self.row, marked, len(self.waiting))
            return self.waiting
        if self.used < len(self.waiting):
            raise _wrong_count_error(self.row, self.column, len(self.waiting), _places(self.used))
        return self.found


def _refuse_places_without_images(row: Row) -> None:
    """Raise an error if a row with an empty column of images has :data:`TEXT_MARK` in a text."""
    empty = next((name for name in ("images", "image") if name in row.columns), None)
    if empty is None or row.columns[empty] not in (None, "", []):
        return
    texts = [row.columns.get(name) for name in (*MESSAGE_COLUMNS, "instruction", "input")]
    if any(TEXT_MARK in str(text) for text in texts if text):
        raise DataError(
            f"the row has {TEXT_MARK} in a text, and its column '{empty}' is empty",
            where=row.origin,
            fix=f"name the image, or remove {TEXT_MARK}",
        )


def _separate_prompt(row: Row, lists: dict[str, list[Any]]) -> None:
    """Make a message of a prompt that is text, and remove the prompt from answers that begin with it, in place."""
    text, answers = row.columns.get("prompt"), [name for name in ("completion", "chosen", "rejected") if name in lists]
    if isinstance(text, str) and not lists.get("prompt") and any(lists[name] for name in answers):
        lists["prompt"] = [{"role": "user", "content": text}]
    prompt = lists.get("prompt")
    for name in answers:
        if prompt and lists[name][: len(prompt)] == prompt:
            lists[name] = lists[name][len(prompt) :]
    ordered = {name: lists[name] for name in MESSAGE_COLUMNS if name in lists}
    lists.clear()
    lists.update(ordered)


def split_at_marks(text: str) -> list[dict[str, Any]]:
    """Return a message's text as content parts, with ``{"type": "image"}`` in place of each :data:`MARK`."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def unmark_messages(messages: Sequence[Any], images: Sequence[Any]) -> list[Any]:
    """Return messages with an image part in place of each :data:`MARK`, as reward functions of TRL get them.

    The content of a message with images is a list of parts, such as ``{"type": "image", "image": IMAGE}``. The content
    of any other message is text.

    Args:
        images: Images of the messages, in order.
    """
    waiting, found = iter(images), []
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else "".join(filter(None, map(_text_of, content or ())))
        parts = [{**part, "image": next(waiting)} if part["type"] == "image" else part for part in split_at_marks(text)]
        found.append({**message, "content": parts if MARK in text else text} if content else message)
    return found


def _mark_instruction(row: Row, column: str) -> tuple[Row, tuple[ImageCell, ...]]:
    """Return a row of type ``alpaca`` with the marks of its images, which belong to ``instruction`` and ``input``."""
    images = _read_column(row, column)
    texts = {name: text for name in ("instruction", "input") if isinstance(text := row.columns.get(name), str)}
    places = sum(text.count(TEXT_MARK) for text in texts.values())
    others = [row.columns.get(name) for name in ("history", "output", "system")]
    if MARK in "".join(texts.values()) or TEXT_MARK in str(others):
        raise DataError(
            "images of an alpaca row belong to 'instruction' and 'input'",
            where=row.origin,
            fix="write the row as messages",
        )
    if places not in (0, len(images)):
        raise _wrong_count_error(row, column, len(images), _places(places))
    marked = {name: text.replace(TEXT_MARK, MARK) for name, text in texts.items()}
    if not places:
        marked["instruction"] = MARK * len(images) + marked["instruction"]
    return replace(row, columns={**row.columns, **marked}), tuple(images)


def _mark_other_answer(
    row: Row, chosen: Sequence[Any], marked: Sequence[Any], rejected: Sequence[Any], column: str | None
) -> list[Any]:
    """Return the rejected messages with the marks of the chosen ones, which begin with the same messages."""
    same = next((n for n, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    shared = min(len(chosen), len(rejected)) if same is None else same
    if any(_is_image_part(part) for each in rejected[shared:] for part in _split_content(each, column is not None)):
        raise DataError(
            "'rejected' has an image that 'chosen' does not have at the same place",
            where=row.origin,
            fix="put the images in the prompt",
        )
    return [*marked[:shared], *rejected[shared:]]


def _message_list(row: Row, name: str) -> list[Any]:
    value = row.columns[name]
    if isinstance(value, str):  # JSON text in a cell of CSV or Parquet, or a text that only looks like it
        with suppress(DataError):
            value = parse_cell(value, name, row.origin)
    value = [value] if isinstance(value, Mapping) else value
    return value if isinstance(value, list) else []


def _role_of(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return None
    speaker = message.get("from")
    return message.get("role") or (SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None)


def _content_key(message: Mapping[str, Any]) -> str:
    return "value" if "from" in message and "value" in message else "content"


def _places(count: int) -> str:
    return f"{count} place{'' if count == 1 else 's'} for images"


def _wrong_count_error(row: Row, column: str | None, count: int, places: str) -> DataError:
    what = f"the column '{column}' has {count}" if column else "the row has no column 'images'"
    return DataError(
        f"the messages have {places}, and {what}",
        where=row.origin,
        fix=f'write one {TEXT_MARK} or {{"type": "image"}} for each image',
    )


def _put_before_first_user(row: Row, lists: Mapping[str, list[Any]], count: int) -> None:
    for messages in lists.values():
        for number, message in enumerate(messages):
            if _role_of(message) == "user":
                key = _content_key(message)
                marks = {"type": "text", "text": MARK * count}
                messages[number] = {**message, key: [marks, *(message.get(key) or [])]}
                return
    raise DataError("the row has images and no user message", where=row.origin, fix="add a user message")


def _may_have_image(value: Any) -> bool:
    """Return True if a cell of messages may have an image; False for most cells, without parsing them."""
    return '"image' in value if isinstance(value, str) else isinstance(value, list | Mapping)


def _has_image_part(message: Any) -> bool:
    content = message.get(_content_key(message)) if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(map(_is_image_part, content))


def _is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _part_value(part: Mapping[str, Any]) -> Any:
    """Return the image of a content part; None if the part is only a place for one."""
    if part.get("type") == "image_url":
        address = part.get("image_url")
        return address.get("url") if isinstance(address, Mapping) else address
    name = next((name for name in _VALUE_KEYS if part.get(name) is not None), None)
    if name is None:
        return None
    return f"data:;base64,{part[name]}" if name == "base64" else part[name]


def _split_content(message: Any, has_column: bool) -> list[Any]:
    """Return the parts of a message's content; with a column of images, its texts are split at ``<image>``.

    The list is empty if the content is missing or malformed, which a later check refuses.
    """
    content = message.get(_content_key(message)) if isinstance(message, Mapping) else None
    if not isinstance(content, list | str):
        return []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    if not has_column:
        return parts
    found: list[Any] = []
    for part in parts:
        text = _text_of(part)
        if not text or TEXT_MARK not in text:
            found.append(part)
            continue
        for number, piece in enumerate(text.split(TEXT_MARK)):
            found += [{"type": "image"}] if number else []
            found += [{"type": "text", "text": piece}] if piece else []
    return found


def _text_of(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _read_column(row: Row, column: str) -> list[ImageCell]:
    value = parse_cell(row.columns[column], column, row.origin)
    values = value if isinstance(value, list) else [value]
    return [_to_cell(each, f"{column}[{index}]", row) for index, each in enumerate(values)]


def _to_cell(value: Any, where: str, row: Row) -> ImageCell:
    of_datasets = isinstance(value, Mapping)
    if isinstance(value, Mapping):
        held = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
        if held is None:
            raise DataError(f"{where} must have 'bytes' or 'path'", where=row.origin, fix="name the file of the image")
        value = held
    if isinstance(value, bytes | bytearray):
        return ImageCell(where, content=bytes(value))
    if hasattr(value, "save") and hasattr(value, "mode"):  # a Pillow image, as `datasets` decodes it
        held = io.BytesIO()
        value.save(held, "PNG")
        return ImageCell(where, content=held.getvalue())
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where} must be the path of an image, found {json_type_of(value)}",
            where=row.origin,
            fix="write the path of a file, or an object with 'bytes'",
        )
    if value.startswith("data:"):
        return ImageCell(where, content=_decode_data_url(value, where, row.origin))
    if _SCHEME.match(value):
        raise DataError(
            f"{where} is a URL: {value:.80}", where=row.origin, fix="download the image, and write the path of the file"
        )
    try:
        if "\0" in value or len(value) > 4096:
            raise ValueError("it is base64 without data:image/png;base64," if len(value) > 4096 else "it has a NUL")
        path = Path(value.removeprefix("file://")).expanduser()
        folder = row.folder or Path()
        if of_datasets and not (folder / path).exists() and path.exists():  # `datasets` names files so
            folder = Path()
        return ImageCell(where, folder / path)
    except (ValueError, RuntimeError) as error:  # expanduser of an unknown user
        raise DataError(
            f"{where} is not a path: {value[:80]!r} ({error})", where=row.origin, fix="write the path of a file"
        ) from error


def _decode_data_url(value: str, where: str, origin: str) -> bytes:
    head, _, body = value.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(
            f"{where} is not a valid data URL: {error}",
            where=origin,
            fix="write it as data:image/png;base64,...",
        ) from error
