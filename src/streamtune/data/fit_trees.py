"""Trees cut to the length, written, and counted."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from streamtune.data.report import length_percentiles
from streamtune.data.report_trees import TreeReport
from streamtune.data.store import TableWriter
from streamtune.data.tree import Tree
from streamtune.errors import ArgumentError, DataError

__all__ = ["IDENTICAL_PAIRS", "TREE_OVERLENGTH", "LengthPolicy", "TreeFitting", "check_choice"]

TREE_OVERLENGTH = ("error", "truncate", "drop")
"""Ways to handle a row over the length. A pair or a prompt cannot be split."""

IDENTICAL_PAIRS = ("error", "drop")
"""Ways to handle a pair whose answers are the same."""


def check_choice(name: str, value: str, known: tuple[str, ...], mend: str = "") -> None:
    """Raise unless an option is one of the known words.

    Raises:
        ArgumentError: It is none of them.
    """
    if value not in known:
        raise ArgumentError(f"{name} is '{value}'", where=name, mend=mend or f"use {', '.join(known)}")


@dataclass(frozen=True)
class LengthPolicy:
    """Limits on the length of a prompt with its completions, and the handling of longer ones.

    Raises:
        ArgumentError: ``overlength`` is none of :data:`TREE_OVERLENGTH`, or the prompt may fill the whole length.
    """

    max_length: int
    """tokens that the prompt and the longest completion have together at most"""
    max_prompt_length: int | None = None
    """tokens that the prompt has at most"""
    overlength: str = "error"
    """one of :data:`TREE_OVERLENGTH`"""

    def __post_init__(self) -> None:
        split = "a pair or a prompt cannot be split; use " if self.overlength == "split" else "use "
        check_choice("overlength", self.overlength, TREE_OVERLENGTH, mend=split + ", ".join(TREE_OVERLENGTH))
        if self.max_prompt_length is not None and not 0 < self.max_prompt_length < self.max_length:
            raise ArgumentError(
                f"max_prompt_length = {self.max_prompt_length:,} leaves no room for a completion in "
                f"max_length = {self.max_length:,}",
                where="max_prompt_length",
                mend="set it to less than max_length, and to 1 at least",
            )

    def holds(self, tree: Tree) -> bool:
        """Return True if a tree needs no cut."""
        return self.holds_prompt(tree) and _row_length(tree) <= self.max_length

    def holds_prompt(self, tree: Tree) -> bool:
        """Return True if the prompt is short enough; completions are not considered."""
        return self.max_prompt_length is None or len(tree.prompt) <= self.max_prompt_length

    def cut(self, tree: Tree) -> Tree | None:
        """Cut the prompt's start and the completions' ends off; None if a completion has no counted token left."""
        prompt = tree.prompt if self.max_prompt_length is None else tree.prompt[-self.max_prompt_length :]
        room = self.max_length - len(prompt)
        if room < 1:
            return None
        completions = [completion[:room] for completion in tree.completions]
        masks = None if tree.masks is None else [mask[:room] for mask in tree.masks]
        if masks is not None and not all(map(any, masks)):
            return None
        return replace(tree, prompt=prompt, completions=completions, masks=masks)


def _row_length(tree: Tree) -> int:
    """Return the number of tokens of the prompt and the longest completion."""
    return len(tree.prompt) + max(map(len, tree.completions))


def _lengths() -> array[int]:
    return array("q")


@dataclass
class TreeFitting:
    """Fits trees to the length, writes them, and counts the kept, cut and dropped ones."""

    writer: TableWriter
    policy: LengthPolicy
    identical_pairs: str
    """one of :data:`IDENTICAL_PAIRS`"""
    kinds: tuple[str, str]
    """names of the first and the second completion of a tree, or of desirable and undesirable ones"""
    counts: Counter[str] = field(default_factory=Counter)
    row_lengths: array[int] = field(default_factory=_lengths)
    """prompt and longest completion of every row as rendered"""
    prompt_lengths: array[int] = field(default_factory=_lengths)
    completion_lengths: dict[str, array[int]] = field(default_factory=dict)
    tree_lengths: array[int] = field(default_factory=_lengths)
    """positions of every kept tree"""
    prompts: list[bytes] = field(default_factory=list)
    """for every kept tree a hash of its prompt"""
    digests: list[bytes] = field(default_factory=list)
    """for every kept tree a hash of all a step sees of it"""
    longest: tuple[int, str] = (0, "")
    """length and origin of the longest row"""
    longest_prompt: tuple[int, str] = (0, "")
    """length and origin of the longest prompt"""

    def add(self, tree: Tree, prompt: bytes) -> None:
        """Add one tree, with the hash of its prompt.

        Raises:
            DataError: Its completions are the same, and ``identical_pairs`` is ``error``.
        """
        if _identical(tree):
            self.skip_identical(tree.origin)
            return
        self._measure(tree)
        if self.policy.holds(tree):
            self._keep(tree, prompt)
            return
        self.counts["too_long"] += 1
        self.counts["long_prompts"] += not self.policy.holds_prompt(tree)
        cut = self.policy.cut(tree) if self.policy.overlength == "truncate" else None
        if cut is None or _identical(cut):
            self.counts["dropped"] += 1
        else:
            self.counts["truncated"] += 1
            self._keep(cut, prompt)

    def skip_identical(self, origin: str) -> None:
        """Leave out a pair whose answers are the same.

        Raises:
            DataError: ``identical_pairs`` is ``error``.
        """
        if self.identical_pairs == "error":
            raise DataError(
                f"'{self.kinds[0]}' and '{self.kinds[1]}' are the same: there is nothing to prefer"
                if self.kinds[0] == "chosen"
                else "'chosen' and 'rejected' are the same: one answer cannot be desirable and undesirable",
                where=origin,
                mend="remove the row, or leave out all such rows with identical_pairs: drop",
            )
        self.counts["identical"] += 1
        self.counts["dropped"] += 1
        self.counts["rows"] += 1

    def _measure(self, tree: Tree) -> None:
        """Record the lengths of a tree as rendered."""
        self.counts["rows"] += 1
        size = _row_length(tree)
        self.longest = max(self.longest, (size, tree.origin), key=lambda pair: pair[0])
        self.longest_prompt = max(self.longest_prompt, (len(tree.prompt), tree.origin), key=lambda pair: pair[0])
        self.row_lengths.append(size)
        self.prompt_lengths.append(len(tree.prompt))
        labels = tree.labels or [True, False]
        for label, completion in zip(labels, tree.completions, strict=True):
            kind = self.kinds[0] if label else self.kinds[1]
            self.completion_lengths.setdefault(kind, _lengths()).append(len(completion))

    def _keep(self, tree: Tree, prompt: bytes) -> None:
        self.prompts.append(prompt)
        self.digests.append(_digest(tree))
        self.tree_lengths.append(tree.num_tokens)
        self.counts["completions"] += len(tree.completions)
        self.counts["tokens"] += tree.num_tokens_separate
        self.counts["supervised_tokens"] += tree.num_targets
        self.counts["negative_margins"] += tree.margin is not None and tree.margin < 0
        self.writer.append(tree.columns(), tree.num_tokens)

    def check(self, notify: Callable[[str], None]) -> None:
        """Raise if rows are too long or none is left; notify the user of the changes.

        Raises:
            DataError: Rows are over the length and ``overlength`` is ``error``, or nothing is left.
        """
        rows, too_long = self.counts["rows"], self.counts["too_long"]
        if too_long and self.policy.overlength == "error":
            raise self._too_long()
        if self.counts["identical"]:
            notify(f"{self.counts['identical']:,} of {rows:,} pairs have the same answer twice: dropped")
        if not self.digests:
            size, origin = self.longest
            mend = f"the longest has {size:,} tokens, max_length is {self.policy.max_length:,}" if size else ""
            raise DataError(f"no row is left to train on: all {rows:,} were dropped", where=origin, mend=mend)
        if too_long:
            dropped = self.counts["dropped"] - self.counts["identical"]
            named = {"truncated": self.counts["truncated"], "dropped": dropped}
            changed = ", ".join(f"{count:,} {how}" for how, count in named.items() if count)
            notify(f"{too_long:,} of {rows:,} rows are over the length: {changed}")
        if self.counts["negative_margins"]:
            notify(f"{_count(self.counts['negative_margins'], 'pair')} a chosen answer with the lower score")

    def _too_long(self) -> DataError:
        """Return the error for rows over the length: it names the prompts or the rows, and how to mend it."""
        policy = self.policy
        size, origin = self.longest_prompt
        if self.counts["long_prompts"]:
            return DataError(
                f"{_count(self.counts['long_prompts'], 'prompt')} more than max_prompt_length = "
                f"{policy.max_prompt_length:,} tokens; the longest has {size:,}",
                where=origin,
                mend=f"set max_prompt_length to {size} or more, or say what to do with them: overlength: truncate "
                "(keeps the end of the prompt) or drop",
            )
        if size >= policy.max_length:
            return DataError(
                f"a prompt of {size:,} tokens leaves no room for a completion in max_length = {policy.max_length:,}",
                where=origin,
                mend=f"set max_length to {self.longest[0]} or more; or keep the end of prompts with max_prompt_length "
                "and overlength: truncate; or leave the rows out with overlength: drop",
            )
        size, origin = self.longest
        return DataError(
            f"{_count(self.counts['too_long'], 'row')} more than max_length = {policy.max_length:,} tokens of prompt "
            f"and longest completion; the longest has {size:,}",
            where=origin,
            mend=f"set max_length to {size} or more, or say what to do with them: overlength: truncate or drop",
        )

    def report(self, train_examples: int, validation_examples: int) -> TreeReport:
        """Return the counts and lengths of the rows."""
        counts = self.counts
        return TreeReport(
            rows=counts["rows"],
            kept=len(self.digests),
            truncated=counts["truncated"],
            dropped=counts["dropped"],
            identical=counts["identical"],
            train_examples=train_examples,
            validation_examples=validation_examples,
            completions=counts["completions"],
            tokens=counts["tokens"],
            tree_tokens=sum(self.tree_lengths),
            supervised_tokens=counts["supervised_tokens"],
            length_percentiles=_percentiles(self.row_lengths),
            prompt_lengths=_percentiles(self.prompt_lengths),
            completion_lengths={kind: _percentiles(self.completion_lengths[kind]) for kind in self._found_kinds()},
            tree_lengths=_percentiles(self.tree_lengths),
            negative_margins=counts["negative_margins"],
        )

    def _found_kinds(self) -> list[str]:
        return [kind for kind in self.kinds if kind in self.completion_lengths]

    def fingerprint(self, train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> str:
        """Return a hash of the trees of both parts in order."""
        total = hashlib.sha256(f"{len(train)} {len(validation)}".encode())
        for index in (*train, *validation):
            total.update(self.digests[index])
        return total.hexdigest()


def _identical(tree: Tree) -> bool:
    """Return True if a pair's answers are the same tokens: a template may write two answers as one."""
    return len(tree.completions) == 2 and tree.completions[0] == tree.completions[1]


def _count(number: int, noun: str) -> str:
    return f"1 {noun} has" if number == 1 else f"{number:,} {noun}s have"


def _percentiles(lengths: Iterable[int]) -> dict[str, int]:
    return length_percentiles(np.array(lengths, dtype=np.int64))


def _digest(tree: Tree) -> bytes:
    """Return a hash of everything a step reads of a tree."""
    digest = hashlib.blake2b(repr((tree.labels, tree.margin)).encode(), digest_size=16)
    lists = [tree.prompt, *tree.completions]
    digest.update(np.array([len(items) for items in lists], dtype=np.int64).tobytes())
    for items in lists:
        digest.update(np.array(items, dtype=np.int32).tobytes())
    for mask in tree.masks or ():
        digest.update(np.array(mask, dtype=np.bool_).tobytes())
    return digest.digest()
