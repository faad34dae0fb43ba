"""Count what the user should know about rendered rows: dropped reasoning, empty answers, ignored columns.

:class:`RenderLog` has one :class:`RenderCounts` per dataset. When all rows are rendered,
:meth:`RenderLog.notify_or_raise` notifies the user, or raises if the options treat a case as an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from streamtune.data.options import ChatOptions
from streamtune.errors import DataError

_SHOWN, _NAMED = 10, 4


@dataclass
class RenderCounts:
    """Numbers of rows and answers of one dataset that the user should know about, such as dropped reasoning."""

    answers: int = 0
    """number of answers to train on"""
    reasoning: int = 0
    """number of answers to train on that have reasoning"""
    reasoning_dropped: int = 0
    """number of answers to train on whose reasoning the chat template omits"""
    reasoning_closed: int = 0
    """number of answers trained with reasoning although their generation prompt has an empty ``<think></think>``"""
    empty: int = 0
    """number of empty answers to train on"""
    rows_with_empty: int = 0
    """number of rows with an empty answer to train on"""
    system_left_out: int = 0
    """number of rows whose system message the chat template does not print"""
    system_late: int = 0
    """number of rows whose system message the chat template prints with the user's last message"""
    answers_before_system: int = 0
    """number of answers to train on before a system message that is printed late"""
    messages_left_out: Counter[str] = field(default_factory=Counter)
    """role -> number of messages that the chat template does not print, without system messages at the start"""
    tools_left_out: int = 0
    """number of rows whose tools the chat template does not print"""
    other_system: int = 0
    """number of rows whose column ``system`` is ignored, because the messages have another system message"""
    wrapped_tools: int = 0
    """number of rows with a tool that is a bare function schema"""
    special_rows: int = 0
    """number of rows whose text contains special tokens, such as ``<|im_end|>``"""
    specials_by: Counter[str] = field(default_factory=Counter)
    """role -> number of messages that contain special tokens; ``text`` for texts without roles"""
    specials: dict[str, None] = field(default_factory=dict)
    """texts of special tokens found in rows, as keys in order"""
    begins_twice: int = 0
    """number of texts that already begin with BOS, which the tokenizer adds too"""
    completions: int = 0
    """number of texts made of a prompt and its completion"""
    merged_borders: int = 0
    """number of texts of ``completions`` with a token that crosses the border between prompt and completion"""
    flags_of_other_roles: Counter[str] = field(default_factory=Counter)
    """role -> number of messages flagged for training whose role is not in ``roles_to_train``"""
    unread_columns: dict[str, None] = field(default_factory=dict)
    """names of columns that are not read, as keys in order"""
    dropped_at: list[str] = field(default_factory=list)
    """places of the first answers with dropped reasoning, such as ``file:3 messages[1]``"""
    empty_at: list[str] = field(default_factory=list)
    """file and line of the first rows with an empty answer"""

    def add_counts(self, other: RenderCounts) -> None:
        for name, other_value in vars(other).items():
            own_value = getattr(self, name)
            if isinstance(other_value, int):
                setattr(self, name, own_value + other_value)
            elif isinstance(other_value, list):
                own_value += other_value[: _SHOWN - len(own_value)]
            else:
                own_value.update(other_value)

    def add_dropped_reasoning(self, places: Iterable[str]) -> None:
        """Count answers whose reasoning the template drops, with their places, such as ``file:3 messages[1]``."""
        for place in places:
            self.reasoning_dropped += 1
            self.dropped_at += [place] if len(self.dropped_at) < _SHOWN else []

    def add_special_names(self, role: str, names: Sequence[str], *, new_row: bool) -> None:
        """Count a message that contains special tokens, such as ``<|im_end|>``.

        Args:
            role: Role of the message, or ``text``.
            names: Texts of the special tokens.
            new_row: Whether the message is the first such message of its row.
        """
        self.special_rows += new_row
        self.specials_by[role] += 1
        self.specials |= dict.fromkeys(names)

    def add_empty_answers(self, answers: int, origin: str, *, new_row: bool) -> None:
        self.empty += answers
        self.rows_with_empty += new_row
        self.empty_at += [origin] if new_row and len(self.empty_at) < _SHOWN else []


class RenderLog:
    """Collects the counts of each dataset (empty answers, dropped reasoning ...), and tells the user about them."""

    def __init__(self, options: ChatOptions, notify: Callable[[str], None]) -> None:
        self.options, self._notify = options, notify
        self.by_path: dict[str, RenderCounts] = {}
        self.path = ""
        """path of the dataset whose rows are being rendered"""
        self.current = RenderCounts()
        """counts of the dataset at ``path``"""
        self._noted: set[str] = set()

    def start_dataset(self, path: str) -> None:
        """Set ``current`` to the counts of the dataset at ``path``."""
        self.path = path
        self.current = self.counts_of(path)

    def counts_of(self, path: str) -> RenderCounts:
        return self.by_path.setdefault(path, RenderCounts())

    def notify_once(self, message: str, key: str = "") -> None:
        """Show the user a message, once per ``key``, which is the message by default."""
        if (key or message) not in self._noted:
            self._noted.add(key or message)
            self._notify(message)

    def clear_counts(self) -> None:
        """Count from zero again, for another pass over the data; what the user was told is not told again."""
        self.by_path.clear()
        self.current = RenderCounts()

    def notify_or_raise(self) -> None:
        """Notify the user of the counts of each dataset.

        Raises:
            DataError: There is an empty answer or dropped reasoning, and the options make it an error.
        """
        all_counts = self._counts_by_path()
        self._check_findings(all_counts)
        for path, counts in all_counts.items():
            for kind, text in _describe_findings(counts, self.options).items():
                self.notify_once(f"{path}: {text}" if path else text, f"{path}: {kind}")

    def raise_errors(self) -> None:
        """Raise the error that :meth:`notify_or_raise` would raise; call it while rows are still being rendered."""
        self._check_findings(self._counts_by_path())

    def _counts_by_path(self) -> dict[str, RenderCounts]:
        return {**self.by_path, **({} if self.by_path else {"": self.current})}

    def _check_findings(self, all_counts: Mapping[str, RenderCounts]) -> None:
        empty = [counts for counts in all_counts.values() if counts.empty]
        if empty and self.options.on_empty == "error":
            number = sum(counts.empty for counts in empty)
            raise DataError(
                f"{'1 answer is' if number == 1 else f'{number:,} answers are'} empty",
                where=_join_places(place for counts in empty for place in counts.empty_at),
                fix="fix the rows; or set on_empty: drop to drop the rows, or on_empty: train to train empty answers",
            )
        dropped = [counts for counts in all_counts.values() if counts.reasoning_dropped]
        if dropped and self.options.reasoning == "error":
            raise DataError(
                f"the chat template drops the reasoning of {sum(counts.reasoning_dropped for counts in dropped):,} of "
                f"{sum(counts.answers for counts in all_counts.values()):,} answers",
                where=_join_places(place for counts in dropped for place in counts.dropped_at),
                fix="set reasoning: keep to train with the reasoning, or reasoning: template to train without it",
            )


def _join_places(places: Iterable[str]) -> str:
    return "; ".join(list(places)[:_SHOWN])


def _describe_findings(counts: RenderCounts, options: ChatOptions) -> dict[str, str]:
    """Return a message for each kind of finding, which the key names without numbers."""
    found: dict[str, str] = {}
    if counts.unread_columns:
        names = ", ".join(f"'{name}'" for name in counts.unread_columns)
        text = f"column{'s' if len(counts.unread_columns) > 1 else ''} not read: {names}"
        found[text] = text
    if counts.reasoning_dropped:
        share = f"{counts.reasoning_dropped:,} of {counts.answers:,} answers"
        found["reasoning dropped"] = (
            f"reasoning that the chat template drops was restored in {share} (reasoning: keep)"
            if options.reasoning == "keep"
            else f"the chat template drops the reasoning of {share}; reasoning: keep would train on it"
        )
    if counts.reasoning_closed:
        found["reasoning closed"] = (
            f"{counts.reasoning_closed:,} answers are trained with reasoning, but their generation prompt has an empty "
            "<think></think>: check chat_template_kwargs (enable_thinking: false?)"
        )
    if counts.empty and options.on_empty == "train":
        found["empty"] = f"{counts.empty:,} of {counts.answers:,} trained answers are empty (on_empty: train)"
    elif counts.empty:
        found["empty"] = f"{_rows_text(counts.rows_with_empty)} with an empty answer dropped (on_empty: drop)"
    if counts.other_system:
        found["other system"] = (
            f"the column 'system' of {_rows_text(counts.other_system)} is ignored: the messages have another "
            "system message"
        )
    if counts.wrapped_tools:
        form = '{"type": "function", "function": ...}'
        found["wrapped tools"] = (
            f"the tools of {_rows_text(counts.wrapped_tools)} are bare function schemas; converted to {form}"
        )
    if counts.system_left_out:
        found["system left out"] = (
            f"the chat template does not print the system message of {_rows_text(counts.system_left_out)}"
        )
    for role, number in counts.messages_left_out.items():
        noun = "message" if number == 1 else "messages"
        found[f"{role} left out"] = f"the chat template does not print {number:,} '{role}' {noun}"
    if counts.tools_left_out:
        found["tools left out"] = f"the chat template does not print the tools of {_rows_text(counts.tools_left_out)}"
    if counts.system_late:
        text = "the chat template prints the system message only before the user's last message: "
        text += f"{_rows_text(counts.system_late)} affected"
        if earlier := counts.answers_before_system:
            text += f", with {earlier:,} earlier answers trained without a system message"
        found["system late"] = text
    if counts.special_rows:
        found["specials"] = _describe_specials(counts, options)
    if counts.begins_twice:
        found["begins twice"] = f"{counts.begins_twice:,} texts already begin with BOS: no second BOS is added"
    if counts.merged_borders:
        found["merged borders"] = (
            f"in {counts.merged_borders:,} of {counts.completions:,} texts a token crosses the border between prompt "
            "and completion; it is trained with the completion"
        )
    for role, number in counts.flags_of_other_roles.items():
        have = "message is" if number == 1 else "messages are"
        trained = ", ".join(options.roles_to_train)
        found[f"flags of {role}"] = (
            f"{number:,} '{role}' {have} flagged for training, but roles_to_train is {trained}: not trained"
        )
    return found


def _describe_specials(counts: RenderCounts, options: ChatOptions) -> str:
    names = ", ".join(list(counts.specials)[:_NAMED]) + (", ..." if len(counts.specials) > _NAMED else "")
    where = ", ".join(f"{role}: {number:,}" for role, number in counts.specials_by.items())
    does = (
        "tokenized as ordinary text (split_special_tokens: true)"
        if options.split_special_tokens
        else "tokenized as special tokens, as an inference server does; split_special_tokens: true keeps them as text"
    )
    return f"the text of {_rows_text(counts.special_rows)} contains special tokens ({names}; {where}): {does}"


def _rows_text(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"
