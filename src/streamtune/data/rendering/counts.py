"""Counts of what rendering found: dropped reasoning, empty answers, unread columns.

:class:`RenderLog` has :class:`RenderCounts` for each dataset. When all rows are rendered, :meth:`RenderLog.finish`
notifies the user, or raises if the options say that a finding is an error.
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
    """Counts of what rendering the rows of a dataset found."""

    answers: int = 0
    """trained messages"""
    reasoning: int = 0
    """trained answers with reasoning"""
    reasoning_dropped: int = 0
    """trained answers whose reasoning the chat template leaves out"""
    reasoning_closed: int = 0
    """answers trained with reasoning behind a generation prompt that says there is none"""
    empty: int = 0
    """empty trained answers"""
    rows_with_empty: int = 0
    """rows with such an answer"""
    system_left_out: int = 0
    """rows whose system message the chat template does not print"""
    system_late: int = 0
    """rows whose system message it prints with the user's last message"""
    answers_before_system: int = 0
    """trained answers before such a system message"""
    tools_left_out: int = 0
    """rows whose tools the chat template does not print"""
    other_system: int = 0
    """rows whose column ``system`` is not read, as the messages have another system message"""
    wrapped_tools: int = 0
    """rows with a tool that is a function's schema alone"""
    special_rows: int = 0
    """rows whose text spells special tokens"""
    specials_by: Counter[str] = field(default_factory=Counter)
    """messages that spell special tokens, by their role; ``text`` for texts without roles"""
    specials: dict[str, None] = field(default_factory=dict)
    """special tokens that rows spell, in the order of finding"""
    begins_twice: int = 0
    """texts that begin with the token that the tokenizer puts in front of texts"""
    completions: int = 0
    """texts of a prompt and its completion"""
    merged_borders: int = 0
    """such texts with a token that holds characters of both"""
    flags_of_other_roles: Counter[str] = field(default_factory=Counter)
    """messages marked to be trained that are not, by their role"""
    unread_columns: dict[str, None] = field(default_factory=dict)
    """columns that are not read, in the order of finding"""
    dropped_at: list[str] = field(default_factory=list)
    """places of the first answers with dropped reasoning"""
    empty_at: list[str] = field(default_factory=list)
    """places of the first rows with an empty answer"""

    def add(self, other: RenderCounts) -> None:
        """Add what was found in further rows of the dataset."""
        for name, found in vars(other).items():
            mine = getattr(self, name)
            if isinstance(found, int):
                setattr(self, name, mine + found)
            elif isinstance(found, list):
                mine += found[: _SHOWN - len(mine)]
            else:
                mine.update(found)

    def drops_reasoning(self, places: Iterable[str]) -> None:
        for place in places:
            self.reasoning_dropped += 1
            self.dropped_at += [place] if len(self.dropped_at) < _SHOWN else []

    def spells(self, role: str, names: Sequence[str], *, new_row: bool) -> None:
        """Count a message that spells special tokens; ``new_row`` if it is the first of its row."""
        self.special_rows += new_row
        self.specials_by[role] += 1
        self.specials |= dict.fromkeys(names)

    def has_empty(self, answers: int, origin: str) -> None:
        self.empty += answers
        self.rows_with_empty += 1
        self.empty_at += [origin] if len(self.empty_at) < _SHOWN else []


class RenderLog:
    """The counts of each dataset, by its path, and messages for the user.

    Args:
        options: Options that decide what is an error.
    """

    def __init__(self, options: ChatOptions, notify: Callable[[str], None]) -> None:
        self.options, self._notify = options, notify
        self.by_path: dict[str, RenderCounts] = {}
        self.path = ""
        """dataset whose rows are rendered"""
        self.now = RenderCounts()
        """counts of that dataset"""
        self._noted: set[str] = set()

    def begin(self, path: str) -> None:
        """Count for the dataset at ``path`` from now on."""
        self.path = path
        self.now = self.of(path)

    def of(self, path: str) -> RenderCounts:
        return self.by_path.setdefault(path, RenderCounts())

    def note(self, message: str) -> None:
        """Notify the user, once of each message."""
        if message not in self._noted:
            self._noted.add(message)
            self._notify(message)

    def finish(self) -> None:
        """Notify the user of what was found in each dataset."""
        of_all = self._all()
        self._refuse(of_all)
        for path, counts in of_all.items():
            for text in _sentences(counts, self.options):
                self.note(f"{path}: {text}" if path else text)

    def check(self) -> None:
        """Raise as :meth:`finish` does, while rows are still being rendered."""
        self._refuse(self._all())

    def _all(self) -> dict[str, RenderCounts]:
        return {**self.by_path, **({} if self.by_path else {"": self.now})}

    def _refuse(self, of_all: Mapping[str, RenderCounts]) -> None:
        empty = [counts for counts in of_all.values() if counts.empty]
        if empty and self.options.on_empty == "error":
            number = sum(counts.empty for counts in empty)
            raise DataError(
                f"{'1 answer is' if number == 1 else f'{number:,} answers are'} empty",
                where=_first(place for counts in empty for place in counts.empty_at),
                fix="fix the rows, or say what to do with them: on_empty: drop leaves these rows out, train trains "
                "an answer of no words",
            )
        dropped = [counts for counts in of_all.values() if counts.reasoning_dropped]
        if dropped and self.options.reasoning == "error":
            raise DataError(
                f"thinking of {sum(counts.reasoning_dropped for counts in dropped):,} of "
                f"{sum(counts.answers for counts in of_all.values()):,} answers is not in the rendered text: the chat "
                "template drops it",
                where=_first(place for counts in dropped for place in counts.dropped_at),
                fix="reasoning: keep puts it into the text; reasoning: template trains without it",
            )


def _first(places: Iterable[str]) -> str:
    return "; ".join(list(places)[:_SHOWN])


def _sentences(counts: RenderCounts, options: ChatOptions) -> list[str]:
    found = []
    if counts.unread_columns:
        names = ", ".join(f"'{name}'" for name in counts.unread_columns)
        found.append(f"not read: the column{'s' if len(counts.unread_columns) > 1 else ''} {names}")
    if counts.reasoning_dropped:
        thinking = f"thinking of {counts.reasoning_dropped:,} of {counts.answers:,} answers"
        found.append(
            f"{thinking}, which the chat template drops, is put back (reasoning: keep)"
            if options.reasoning == "keep"
            else f"{thinking} is not in the rendered text: the template drops it (reasoning: keep puts it back)"
        )
    if counts.reasoning_closed:
        found.append(
            f"{counts.reasoning_closed:,} answers are trained with reasoning behind a generation prompt that says "
            "there is none: so the template prints it with these chat_template_kwargs (enable_thinking: false?)"
        )
    if counts.empty and options.on_empty == "train":
        found.append(f"{counts.empty:,} of {counts.answers:,} answers are empty and trained so (on_empty: train)")
    elif counts.empty:
        found.append(f"{_rows(counts.rows_with_empty)} with an empty answer left out (on_empty: drop)")
    if counts.other_system:
        found.append(f"the column 'system' of {_rows(counts.other_system)} is not read: messages have another one")
    if counts.wrapped_tools:
        form = '{"type": "function", "function": ...}'
        found.append(f"the tools of {_rows(counts.wrapped_tools)} are schemas of functions: put in the form {form}")
    if counts.system_left_out:
        found.append(f"the chat template does not print the system message of {_rows(counts.system_left_out)}")
    if counts.tools_left_out:
        found.append(f"the chat template does not print the tools of {_rows(counts.tools_left_out)}")
    if counts.system_late:
        text = "the chat template prints a system message with the last message of the user alone, as it does when it "
        text += f"asks for an answer: so in {_rows(counts.system_late)}"
        earlier = counts.answers_before_system
        found.append(text + (f", where {earlier:,} earlier answers are trained without it" if earlier else ""))
    if counts.special_rows:
        found.append(_describe_specials(counts, options))
    if counts.begins_twice:
        found.append(f"{counts.begins_twice:,} texts begin with the tokenizer's first token already: it is not doubled")
    if counts.merged_borders:
        found.append(
            f"in {counts.merged_borders:,} of {counts.completions:,} texts a token holds the end of the prompt and the "
            "start of the completion: it is trained with the completion"
        )
    for role, number in counts.flags_of_other_roles.items():
        are = "message is" if number == 1 else "messages are"
        trained = ", ".join(options.roles_to_train)
        found.append(f"{number:,} '{role}' {are} marked to be trained and not trained: roles_to_train is {trained}")
    return found


def _describe_specials(counts: RenderCounts, options: ChatOptions) -> str:
    names = ", ".join(list(counts.specials)[:_NAMED]) + (", ..." if len(counts.specials) > _NAMED else "")
    where = ", ".join(f"{role}: {number:,}" for role, number in counts.specials_by.items())
    does = (
        "they stay text (split_special_tokens: true)"
        if options.split_special_tokens
        else "they become these tokens, as in a request to a server; split_special_tokens: true keeps them text"
    )
    return f"special tokens are spelled in the text of {_rows(counts.special_rows)} ({names}; {where}): {does}"


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"
