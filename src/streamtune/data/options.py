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
"""Ways to handle a row with more than ``max_length`` tokens."""
COMPLETION_OVERLENGTH = ("error", "truncate", "drop")
"""Ways to handle a pair or a prompt over the length. It cannot be split."""
TRUNCATE_SIDES = ("auto", "left", "right", "middle")
"""Parts of a row that ``overlength: truncate`` cuts off."""
PROMPT_SIDES = ("auto", "left", "middle")
"""Parts of a prompt that ``overlength: truncate`` cuts off; its end, where it asks for the answer, always stays."""
SPLIT_AT = ("token", "line", "paragraph", "turn")
"""Borders that ``overlength: split`` looks for, from the weakest: a stronger one is preferred to those before it."""
IDENTICAL_PAIRS = ("error", "drop")
"""Ways to handle a pair whose answers are the same."""
REASONING = ("template", "keep", "error", "per_turn")
"""Ways to handle reasoning that the chat template leaves out of a trained answer."""
ON_EMPTY = ("error", "drop", "train")
"""Ways to handle a row with an empty answer."""
TRAIN_ON_EOS = ("turn", "all", "last", "none")
"""Tokens that end turns of a chat and are trained."""


def check_choice(name: str, value: str, known: tuple[str, ...], mend: str = "") -> None:
    """Raise unless an option is one of the known words.

    Raises:
        ArgumentError: It is none of them.
    """
    if value not in known:
        raise ArgumentError(f"{name} is '{value}'", where=name, mend=mend or f"use {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of rendering that the rows of all datasets share.

    Raises:
        ArgumentError: One of them is none of the known words.
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
    """system message of conversations that have none"""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """variables of the chat template; a row's own come first"""

    split_special_tokens: bool = False
    """special tokens that the text of a row spells stay text"""

    def __post_init__(self) -> None:
        words = {"reasoning": REASONING, "on_empty": ON_EMPTY, "train_on_eos": TRAIN_ON_EOS}
        for name, known in words.items():
            check_choice(name, getattr(self, name), known)
        unknown = [role for role in self.roles_to_train if role not in ROLES]
        if unknown or not self.roles_to_train:
            what = f"roles_to_train names the role '{unknown[0]}'" if unknown else "roles_to_train names no role"
            raise ArgumentError(what, where="roles_to_train", mend=f"use {', '.join(ROLES)}")


DEFAULT_CHAT = ChatOptions()
"""Options of a recipe that names none."""


@dataclass(frozen=True)
class RowPolicy:
    """The length that a row may have, and the handling of longer ones.

    Raises:
        ArgumentError: One of the values is none of the known ones, or they contradict each other.
    """

    max_length: int
    """tokens of a row, or of a piece of it"""
    overlength: str = "error"
    """one of :data:`OVERLENGTH`"""
    truncate_side: str = "auto"
    """one of :data:`TRUNCATE_SIDES`: ``auto`` keeps the beginning of a document, and the last answer of other rows"""
    split_at: str = "turn"
    """one of :data:`SPLIT_AT`: the strongest border to cut at"""
    split_overlap: int = 0
    """tokens before each later piece that are there as context, and trained in the piece before it alone"""

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
                mend=f"set it from 0 to {self.max_length - 1:,}",
            )
        if self.split_overlap and self.overlength != "split":
            raise ArgumentError(
                f"split_overlap is read where rows are split, and overlength is '{self.overlength}'",
                where="split_overlap",
                mend="set overlength: split, or delete split_overlap",
            )

    @property
    def finds_breaks(self) -> bool:
        """True if rows are split at borders of their text."""
        return self.overlength == "split" and self.split_at != "token"

    @property
    def splits_at_turns(self) -> bool:
        """True if chats are split where an exchange begins."""
        return self.overlength == "split" and self.split_at == "turn"

    @property
    def needs_length(self) -> bool:
        """True if the length of a row that is too long is needed exactly: nothing of it is kept otherwise."""
        return self.overlength in ("truncate", "split")

    def may_exceed(self, text: str) -> bool:
        """Return True unless a text is too short to have more than ``max_length`` tokens, of a byte each at least."""
        return 4 * len(text) + 8 > self.max_length


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """All that a recipe says about preparing rows, beside the sources and the tokenizer.

    Rows of each kind read the options that have a meaning for them, and check those when they are prepared.
    """

    max_length: int = 2048
    """tokens of an example at most; of a tree its prompt and its longest completion together"""
    max_prompt_length: int | None = None
    """tokens of a prompt at most; None sets no limit of its own (trees)"""
    overlength: str = "error"
    """what to do with a longer row: refuse them all (``error``), cut a part off (``truncate``), leave it out
    (``drop``), or cut it into consecutive pieces (``split``, examples only). Of a truncated tree the prompt keeps its
    last ``max_prompt_length`` tokens, then the completions their first ones; it is left out if nothing to prefer is
    left, or if its prompt fills ``max_length``"""
    truncate_side: str = "auto"
    """the part of an example or a prompt that is cut off, see :func:`streamtune.data.fit.row_fit.cut_row`; of a prompt
    ``middle`` keeps the first tokens as well, half of them all"""
    split_at: str = "turn"
    """the strongest border that pieces end at: ``turn``, ``paragraph``, ``line`` or ``token``"""
    split_overlap: int = 0
    """tokens before each later piece that are there as context, not trained twice"""
    train_on: str = "assistant"
    """``assistant`` (every assistant turn, or the completion), ``completion`` (the last turn; of a row of prompt and
    completion all turns behind the prompt), ``last`` (the last turn of any row) or ``all``"""
    chat: ChatOptions = DEFAULT_CHAT
    identical_pairs: str = "error"
    """what to do with a pair whose answers are the same: refuse it (``error``), or leave it out (``drop``), counted"""
    packing: bool = False
    """choose examples that share a sequence of at most ``max_length`` tokens"""
    val_size: float = 0.0
    """rows to hold out: a fraction below 1, or a count. Examples with the same tokens, and trees and prompts with the
    same prompt, stay together, so that nothing held out is trained on"""
    seed: int = 42
    """seed of the choice of held-out rows, of the packs, and of the order of a stream"""
    shuffle_buffer: int = 1
    """rows that the next one of a stream is drawn from; 1 keeps the order"""
    on_bad_row: str = "error"
    """what to do with rows that are malformed or cannot be trained on: list the first ten and refuse (``error``), or
    count and leave them out (``skip``)"""
    max_bad_rows: int = 100
    """rows that ``skip`` may leave out; of a stream in each pass"""
    processes: int = 1
    """processes that render; 1 is this one"""
    cache: RowCache | None = None
    """where prepared rows are kept and found again; None keeps none, as does a stream"""

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
