"""The length that a row may have, and the handling of longer ones."""

from __future__ import annotations

from dataclasses import dataclass

from streamtune.errors import ArgumentError

OVERLENGTH = ("error", "truncate", "drop", "split")
"""Ways to handle a row with more than ``max_length`` tokens."""

TRUNCATE_SIDES = ("auto", "left", "right", "middle")
"""Parts of a row that ``overlength: truncate`` cuts off."""

SPLIT_AT = ("token", "line", "paragraph", "turn")
"""Borders that ``overlength: split`` looks for, from the weakest: a stronger one is preferred to those before it."""


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
            if getattr(self, name) not in known:
                raise ArgumentError(f"{name} is '{getattr(self, name)}'", where=name, mend=f"use {', '.join(known)}")
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
