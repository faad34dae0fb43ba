"""Options of preparing rows: the length they may have, what becomes of longer ones, and how chats are rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamtune.data.reading.cells import ROLES
from streamtune.errors import ArgumentError

if TYPE_CHECKING:
    from streamtune.data.row_cache import RowCache

OVERLENGTH = ("error", "truncate", "drop", "split")
"""Handling of a row with more than ``max_length`` tokens."""
COMPLETION_OVERLENGTH = ("error", "truncate", "drop")
"""Handling of a pair or a prompt over the length; it cannot be split."""
TRUNCATE_SIDES = ("auto", "left", "right", "middle")
"""Parts of a row that ``overlength: truncate`` cuts off."""
PROMPT_SIDES = ("auto", "left", "middle")
"""Parts of a prompt that ``overlength: truncate`` cuts off; its end, which asks for the answer, always stays."""
SPLIT_AT = ("token", "line", "paragraph", "turn")
"""Borders that ``overlength: split`` looks for, from the weakest to the strongest, which is preferred."""
IDENTICAL_PAIRS = ("error", "drop")
"""Handling of a pair whose answers are the same."""
REASONING = ("template", "keep", "error", "per_turn")
"""Handling of reasoning that the chat template leaves out of a trained answer."""
ON_EMPTY = ("error", "drop", "train")
"""Handling of a row with an empty answer."""
TRAIN_ON_EOS = ("turn", "all", "last", "none")
"""End tokens of turns that are trained."""


def check_choice(name: str, value: str, known: tuple[str, ...], fix: str = "") -> None:
    """Raise unless an option is a known word.

    Raises:
        ArgumentError: It is not.
    """
    if value not in known:
        raise ArgumentError(f"{name} is '{value}'", where=name, fix=fix or f"use {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of rendering that all datasets share.

    Raises:
        ArgumentError: A word is unknown.
    """

    reasoning: str = "template"
    """one of :data:`REASONING`"""
    on_empty: str = "error"
    """one of :data:`ON_EMPTY`"""
    roles_to_train: tuple[str, ...] = ("assistant",)
    """roles whose messages are trained"""
    train_on_eos: str = "turn"
    """one of :data:`TRAIN_ON_EOS`"""
    default_system: str | None = None
    """system message of conversations without one"""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """variables of the chat template; a row's own take precedence"""

    split_special_tokens: bool = False
    """special tokens spelled in a row's text stay text"""

    def __post_init__(self) -> None:
        words = {"reasoning": REASONING, "on_empty": ON_EMPTY, "train_on_eos": TRAIN_ON_EOS}
        for name, known in words.items():
            check_choice(name, getattr(self, name), known)
        unknown = [role for role in self.roles_to_train if role not in ROLES]
        if unknown or not self.roles_to_train:
            what = f"roles_to_train names the role '{unknown[0]}'" if unknown else "roles_to_train names no role"
            raise ArgumentError(what, where="roles_to_train", fix=f"use {', '.join(ROLES)}")


DEFAULT_CHAT = ChatOptions()


@dataclass(frozen=True)
class RowPolicy:
    """Limit on the length of a row, and the handling of longer ones.

    Raises:
        ArgumentError: A word is unknown, or the values contradict each other.
    """

    max_length: int
    """most tokens of a row, or of a piece of it"""
    overlength: str = "error"
    """one of :data:`OVERLENGTH`"""
    truncate_side: str = "auto"
    """one of :data:`TRUNCATE_SIDES`: ``auto`` keeps the beginning of a document, and the last answer of other rows"""
    split_at: str = "turn"
    """one of :data:`SPLIT_AT`: the strongest border to cut at"""
    split_overlap: int = 0
    """tokens of context before each later piece; they are trained only in the piece before it"""

    def __post_init__(self) -> None:
        words = {"overlength": OVERLENGTH, "truncate_side": TRUNCATE_SIDES, "split_at": SPLIT_AT}
        for name, known in words.items():
            check_choice(name, getattr(self, name), known)
        if not 0 <= self.split_overlap < self.max_length:
            raise ArgumentError(
                f"split_overlap = {self.split_overlap:,} leaves no token of max_length = {self.max_length:,} to what "
                "follows it"
                if self.split_overlap > 0
                else f"split_overlap is {self.split_overlap:,}",
                where="split_overlap",
                fix=f"set it from 0 to {self.max_length - 1:,}",
            )
        if self.split_overlap and self.overlength != "split":
            raise ArgumentError(
                f"split_overlap is read where rows are split, and overlength is '{self.overlength}'",
                where="split_overlap",
                fix="set overlength: split, or delete split_overlap",
            )

    @property
    def finds_breaks(self) -> bool:
        return self.overlength == "split" and self.split_at != "token"

    @property
    def splits_at_turns(self) -> bool:
        return self.overlength == "split" and self.split_at == "turn"

    @property
    def needs_length(self) -> bool:
        """True if the exact length of a row that is too long is needed; otherwise nothing of it is kept."""
        return self.overlength in ("truncate", "split")

    def may_exceed(self, text: str) -> bool:
        """Return True unless a text is too short for more than ``max_length`` tokens of at least a byte each."""
        return 4 * len(text) + 8 > self.max_length


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """All that a recipe says about preparing rows, beside the sources and the tokenizer.

    Each kind of rows reads the options that have a meaning for it, and checks them when it is prepared.
    """

    max_length: int = 2048
    """most tokens of an example; of a tree its prompt and its longest completion together"""
    max_prompt_length: int | None = None
    """most tokens of a prompt; None sets no separate limit (trees)"""
    overlength: str = "error"
    """handling of a longer row: refuse all (``error``), cut a part off (``truncate``), leave it out (``drop``), or cut
    it into consecutive pieces (``split``, examples only). A truncated tree keeps the last ``max_prompt_length`` tokens
    of its prompt, then the first tokens of its completions; it is left out if nothing to prefer is left, or if its
    prompt fills ``max_length``"""
    truncate_side: str = "auto"
    """part of an example or a prompt that is cut off, see :func:`streamtune.data.fit.row_fit.cut_row`; of a prompt
    ``middle`` keeps the first tokens as well, half of them all"""
    split_at: str = "turn"
    """strongest border that pieces end at: ``turn``, ``paragraph``, ``line`` or ``token``"""
    split_overlap: int = 0
    """tokens of context before each later piece, not trained twice"""
    train_on: str = "assistant"
    """``assistant`` (every assistant turn, or the completion), ``completion`` (the last turn; of a row of prompt and
    completion all turns behind the prompt), ``last`` (the last turn of any row) or ``all``"""
    chat: ChatOptions = DEFAULT_CHAT
    identical_pairs: str = "error"
    """handling of a pair whose answers are the same: refuse it (``error``), or leave it out (``drop``), counted"""
    packing: bool = False
    """pack examples into sequences of at most ``max_length`` tokens"""
    val_size: float = 0.0
    """rows to hold out: a fraction below 1, or a count. Examples with the same tokens, and trees and prompts with the
    same prompt, stay together, so that nothing held out is trained on"""
    seed: int = 42
    """seed of the held-out rows, of the packs, and of the order of a stream"""
    shuffle_buffer: int = 1
    """rows of a stream that the next row is drawn from; 1 keeps the order"""
    on_bad_row: str = "error"
    """handling of rows that are malformed or cannot be trained on: list the first ten and refuse (``error``), or count
    and leave them out (``skip``)"""
    max_bad_rows: int = 100
    """most rows that ``skip`` leaves out; of a stream in each pass"""
    processes: int = 1
    """processes that render; 1 renders in this process"""
    cache: RowCache | None = None
    """cache of prepared rows; None and a stream keep nothing"""

    @property
    def per_turn(self) -> bool:
        """True if the turns of a conversation are examples that share their beginnings."""
        return self.chat.reasoning == "per_turn"

    def row_policy(self) -> RowPolicy:
        """Return the limit on the length of examples.

        Raises:
            ArgumentError: As :class:`RowPolicy`.
        """
        return RowPolicy(self.max_length, self.overlength, self.truncate_side, self.split_at, self.split_overlap)
