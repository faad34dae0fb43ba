"""Options for preparing rows: the maximum length, the option for longer rows, and the rendering of chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamtune.data.reading.cells import ROLES
from streamtune.errors import ArgumentError

if TYPE_CHECKING:
    from streamtune.data.images import ImageOptions
    from streamtune.data.row_cache import RowCache

OVERLENGTH = ("error", "truncate", "drop", "split")
"""Actions for a row of more than ``max_length`` tokens."""
COMPLETION_OVERLENGTH = ("error", "truncate", "drop")
"""Actions for a pair or a prompt that is too long; neither can be split."""
TRUNCATE_SIDES = ("auto", "left", "right", "middle")
"""Parts of a row that ``overlength: truncate`` can remove."""
PROMPT_SIDES = ("auto", "left", "middle")
"""Parts of a prompt that ``overlength: truncate`` can remove. The end of a prompt always stays."""
SPLIT_AT = ("token", "line", "paragraph", "turn")
"""Kinds of borders at which ``overlength: split`` cuts, from weakest to strongest. The strongest are preferred."""
IDENTICAL_PAIRS = ("error", "drop")
"""Actions for a pair whose answers are the same."""
REASONING = ("template", "keep", "error", "per_turn")
"""Actions for reasoning that the chat template omits from an answer to train on."""
ON_EMPTY = ("error", "drop", "train")
"""Actions for a row whose answer is empty."""
TRAIN_ON_EOS = ("turn", "all", "last", "none")
"""Choices of the end-of-turn tokens to train on."""


def check_choice(name: str, value: str, choices: tuple[str, ...], fix: str = "") -> None:
    """Check that an option has one of its known values.

    Args:
        fix: Advice in the error. [default: a list of the valid values]

    Raises:
        ArgumentError: The value is unknown.
    """
    if value not in choices:
        raise ArgumentError(f"unknown {name} '{value}'", where=name, fix=fix or f"use {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options for rendering chats; all datasets of a recipe share them.

    Raises:
        ArgumentError: An option has an unknown value.
    """

    reasoning: str = "template"
    """one of :data:`REASONING`"""
    on_empty: str = "error"
    """one of :data:`ON_EMPTY`"""
    roles_to_train: tuple[str, ...] = ("assistant",)
    """roles whose messages count in the loss"""
    train_on_eos: str = "turn"
    """one of :data:`TRAIN_ON_EOS`"""
    default_system: str | None = None
    """text of the system message for conversations that have none"""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """variables of the chat template; variables in a row take precedence"""

    split_special_tokens: bool = False
    """True tokenizes special tokens such as ``<|im_end|>`` in the text of a row as ordinary text"""

    def __post_init__(self) -> None:
        words = {"reasoning": REASONING, "on_empty": ON_EMPTY, "train_on_eos": TRAIN_ON_EOS}
        for name, known in words.items():
            check_choice(name, getattr(self, name), known)
        unknown = [role for role in self.roles_to_train if role not in ROLES]
        if unknown or not self.roles_to_train:
            what = f"unknown role '{unknown[0]}' in roles_to_train" if unknown else "roles_to_train is empty"
            raise ArgumentError(what, where="roles_to_train", fix=f"use {', '.join(ROLES)}")


DEFAULT_CHAT = ChatOptions()


@dataclass(frozen=True)
class RowPolicy:
    """The maximum length of a row, and the options for longer rows.

    Raises:
        ArgumentError: An option has an unknown value, or two options contradict each other.
    """

    max_length: int
    """maximum number of tokens of a row, or of each part of a split row"""
    overlength: str = "error"
    """one of :data:`OVERLENGTH`"""
    truncate_side: str = "auto"
    """one of :data:`TRUNCATE_SIDES`: ``auto`` keeps the beginning of a document, and the last answer of other rows"""
    split_at: str = "turn"
    """one of :data:`SPLIT_AT`: the strongest kind of border at which a row is split"""
    split_overlap: int = 0
    """number of tokens at the start of each part that repeat the end of the part before it, as context without label"""

    def __post_init__(self) -> None:
        words = {"overlength": OVERLENGTH, "truncate_side": TRUNCATE_SIDES, "split_at": SPLIT_AT}
        for name, known in words.items():
            check_choice(name, getattr(self, name), known)
        if not 0 <= self.split_overlap < self.max_length:
            raise ArgumentError(
                f"split_overlap must be below max_length = {self.max_length:,}, found {self.split_overlap:,}"
                if self.split_overlap > 0
                else f"split_overlap must be at least 0, found {self.split_overlap:,}",
                where="split_overlap",
                fix=f"set split_overlap from 0 to {self.max_length - 1:,}",
            )
        if self.split_overlap and self.overlength != "split":
            raise ArgumentError(
                f"split_overlap needs overlength: split, found '{self.overlength}'",
                where="split_overlap",
                fix="set overlength: split, or delete split_overlap",
            )

    @property
    def splits_at_borders(self) -> bool:
        return self.overlength == "split" and self.split_at != "token"

    @property
    def splits_at_turns(self) -> bool:
        return self.overlength == "split" and self.split_at == "turn"

    @property
    def cuts_rows(self) -> bool:
        """True if rows over the maximum length are truncated or split; False if they are dropped or raise an error."""
        return self.overlength in ("truncate", "split")

    def may_be_too_long(self, text: str) -> bool:
        """Return False if a text certainly has at most ``max_length`` tokens, because it is short.

        A character has at most 4 bytes, and a token at least 1 byte; 8 tokens are added as a margin.
        """
        return 4 * len(text) + 8 > self.max_length


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """All settings of a recipe for preparing rows, except the datasets and the tokenizer.

    Each function ``prepare...`` reads and checks the options for its kind of rows.

    Example:
        >>> DataOptions(max_length=4096, overlength="split", packing=True).overlength
        'split'
    """

    max_length: int = 2048
    """maximum number of tokens of an example, or of a prompt with its longest completion"""
    max_prompt_length: int | None = None
    """maximum number of tokens of a prompt; None sets no separate limit for prompts"""
    overlength: str = "error"
    """action for a longer row::

        error       raise an error
        truncate    cut a part off
        drop        drop the row
        split       split it into consecutive parts (examples only)

    A truncated pair keeps the last ``max_prompt_length`` tokens of its prompt, then the first tokens of its answers.
    The pair is dropped if both answers become equal, if one has no token left that counts in the loss, or if the prompt
    fills ``max_length``."""
    truncate_side: str = "auto"
    """part of an example or a prompt to cut off (:func:`streamtune.data.fit.row_fit.truncate_row`); of a prompt,
    ``middle`` keeps the first and the last tokens, half each"""
    split_at: str = "turn"
    """strongest kind of border at which a row is split: ``turn``, ``paragraph``, ``line`` or ``token``"""
    split_overlap: int = 0
    """number of tokens at the start of each part that repeat the end of the part before it, as context without label"""
    train_on: str = "assistant"
    """tokens that count in the loss::

        assistant     every assistant turn, or the completion
        completion    the last turn; of a row with prompt and completion, all turns after the prompt
        last          the last turn of any row
        all           all tokens

    :attr:`ChatOptions.roles_to_train` adds the turns of other roles."""
    chat: ChatOptions = DEFAULT_CHAT
    identical_pairs: str = "error"
    """action for a pair whose answers are the same: raise an error (``error``), or drop and count it (``drop``)"""
    packing: bool = False
    """True packs examples into sequences of at most ``max_length`` tokens"""
    val_size: float = 0.0
    """rows to hold out for evaluation: a fraction below 1, or a count. Rows with the same tokens, and pairs or prompts
    with the same prompt, are held out together, so no row that ``val_size`` holds out is trained on"""
    seed: int = 42
    """seed of the random choice of held-out rows, of packing, and of the order of a stream"""
    shuffle_buffer: int = 1
    """number of buffered rows of a stream from which the next row is drawn; 1 keeps the order"""
    on_bad_row: str = "error"
    """action for a row that is malformed or cannot be trained on: raise an error that lists the first ten (``error``),
    or skip and count it (``skip``)"""
    max_bad_rows: int = 100
    """maximum number of rows that ``skip`` may leave out, for a stream per pass over the data"""
    processes: int = 1
    """number of processes that render rows; 1 renders in the calling process"""
    images: ImageOptions | None = None
    """model whose processor prepares images of rows; None refuses rows with images"""
    cache: RowCache | None = None
    """disk cache of prepared rows; None disables the cache. Streams do not use it"""

    @property
    def one_example_per_turn(self) -> bool:
        """True if each turn of a conversation becomes a separate example (``reasoning: per_turn``)."""
        return self.chat.reasoning == "per_turn"

    def row_policy(self) -> RowPolicy:
        """Return the maximum length of examples and the options for longer rows.

        Raises:
            ArgumentError: An option has an unknown value, or two options contradict each other.
        """
        return RowPolicy(self.max_length, self.overlength, self.truncate_side, self.split_at, self.split_overlap)
