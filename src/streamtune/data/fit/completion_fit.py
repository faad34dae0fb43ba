"""Fit prompts, with or without completions, to the maximum length: keep, cut or drop each of them."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamtune.data.data_report import CompletionReport, length_percentiles
from streamtune.data.fit.length_fit import LengthFitter, Notify, count_with_verb
from streamtune.data.image_files import ImageFile
from streamtune.data.options import COMPLETION_OVERLENGTH, check_choice
from streamtune.data.record_table import Prompt, TableWriter, Tree
from streamtune.errors import ArgumentError, DataError


@dataclass(frozen=True)
class LengthPolicy:
    """The maximum length of a prompt with its completions, and the option for longer rows.

    Raises:
        ArgumentError: ``overlength`` is unknown, or ``max_prompt_length`` leaves no room for a completion.
    """

    max_length: int
    """maximum number of tokens of the prompt with its longest completion"""
    max_prompt_length: int | None = None
    """maximum number of tokens of the prompt; None sets no separate limit"""
    overlength: str = "error"
    """one of :data:`COMPLETION_OVERLENGTH`"""

    def __post_init__(self) -> None:
        split = "a pair or a prompt cannot be split; use " if self.overlength == "split" else "use "
        known = COMPLETION_OVERLENGTH
        check_choice("overlength", self.overlength, known, fix=split + ", ".join(known))
        if self.max_prompt_length is not None and not 0 < self.max_prompt_length < self.max_length:
            raise ArgumentError(
                f"max_prompt_length must be between 1 and {self.max_length - 1:,} (max_length - 1), "
                f"found {self.max_prompt_length:,}",
                where="max_prompt_length",
                fix="set max_prompt_length below max_length, so that a completion fits",
            )

    def fits_limits(self, tree: Tree) -> bool:
        """Return True if neither the prompt, nor the prompt with its longest completion, exceeds its maximum length."""
        return self.fits_prompt(tree) and tree.longest_row_tokens <= self.max_length

    def fits_prompt(self, tree: Tree) -> bool:
        return self.max_prompt_length is None or len(tree.prompt) <= self.max_prompt_length

    def truncate(self, tree: Tree) -> Tree | None:
        """Return the tree without the start of a long prompt and without the ends of long completions.

        Return None if the prompt leaves no room for a completion, or if a completion keeps no token that counts in the
        loss.
        """
        prompt = tree.prompt if self.max_prompt_length is None else tree.prompt[-self.max_prompt_length :]
        room = self.max_length - len(prompt)
        if room < 1:
            return None
        completions = [completion[:room] for completion in tree.completions]
        masks = None if tree.masks is None else [mask[:room] for mask in tree.masks]
        if masks is not None and not all(map(any, masks)):
            return None
        return replace(tree, prompt=prompt, completions=completions, masks=masks)


class CompletionsFitter(LengthFitter[Tree, CompletionReport]):
    """Cuts or drops prompts with completions that exceed the maximum length, writes the others, and counts them.

    Args:
        policy: Maximum lengths, and the option for longer rows.
        identical_pairs: One of :data:`IDENTICAL_PAIRS`.
        kinds: Names of the two kinds of completions: chosen and rejected, or desirable and undesirable.
    """

    record = Tree
    report_type = CompletionReport

    def __init__(self, writer: TableWriter, policy: LengthPolicy, identical_pairs: str, kinds: tuple[str, str]) -> None:
        super().__init__(writer, policy.overlength, limit=f"max_length is {policy.max_length:,}", over="the length")
        self.policy, self.identical_pairs, self.kinds = policy, identical_pairs, kinds
        self.prompt_lengths: array[int] = array("q")
        self.completion_lengths: dict[str, array[int]] = {}
        self.tree_lengths: array[int] = array("q")
        """[kept rows] number of tokens of each tree; common prefixes count once"""
        self.longest_prompt: tuple[int, str] = (0, "")
        """number of tokens of the longest prompt, and its file and line"""

    def add(self, tree: Tree, prompt_digest: bytes) -> None:
        """Write a prompt with its completions; truncate it or count it as dropped if it is too long.

        Args:
            prompt_digest: Hash of the prompt; rows with the same hash are held out together.
        """
        if _has_identical_answers(tree):
            self.drop_identical_pair(tree.origin)
            return
        self._measure_tree(tree)
        if self.policy.fits_limits(tree):
            self._write_tree(tree, prompt_digest)
            return
        if tree.images and self.overlength == "truncate":
            raise DataError(
                f"the row has {tree.longest_row_tokens:,} tokens with its {len(tree.images)} images, more than its "
                "limits, and a row with images is not cut",
                where=tree.origin,
                fix=f"set max_length to {tree.longest_row_tokens} or more, max_pixels for smaller images, or "
                "overlength: drop",
            )
        self.counts["too_long"] += 1
        self.counts["long_images"] += bool(tree.images)
        self.counts["long_prompts"] += not self.policy.fits_prompt(tree)
        cut = self.policy.truncate(tree) if self.overlength == "truncate" else None
        if cut is None or _has_identical_answers(cut):
            self.counts["dropped"] += 1
            self.counts["tokens_lost"] += tree.num_tokens_separate
            self.counts["supervised_tokens_lost"] += tree.num_targets
        else:
            self.counts["truncated"] += 1
            self.counts["supervised_tokens_lost"] += tree.num_targets - cut.num_targets
            self._write_tree(cut, prompt_digest, lost_tokens=tree.num_tokens_separate - cut.num_tokens_separate)

    def drop_identical_pair(self, origin: str) -> None:
        """Count a pair of identical answers as dropped.

        Raises:
            DataError: ``identical_pairs`` is ``error``.
        """
        if self.identical_pairs == "error":
            raise DataError(
                f"'{self.kinds[0]}' and '{self.kinds[1]}' are the same, so there is no preference to learn"
                if self.kinds[0] == "chosen"
                else "'chosen' and 'rejected' are the same: one answer cannot be desirable and undesirable",
                where=origin,
                fix="remove the row, or drop all such rows with identical_pairs: drop",
            )
        self.counts["identical"] += 1
        self.counts["dropped"] += 1

    def _measure_tree(self, tree: Tree) -> None:
        self.record_row_lengths(tree.longest_row_tokens, tree.origin, tokens=tree.num_tokens_separate)
        self.longest_prompt = max(self.longest_prompt, (len(tree.prompt), tree.origin), key=lambda pair: pair[0])
        self.prompt_lengths.append(len(tree.prompt))
        labels = tree.labels or [True, False]
        for label, completion in zip(labels, tree.completions, strict=True):
            kind = self.kinds[0] if label else self.kinds[1]
            self.completion_lengths.setdefault(kind, array("q")).append(len(completion))

    def _write_tree(self, tree: Tree, prompt_digest: bytes, lost_tokens: int = 0) -> None:
        self.write_record(tree, _tree_digest(tree), trained_tokens=tree.num_targets, lost_tokens=lost_tokens)
        self.counts["tokens_lost"] += lost_tokens
        self.groups.append(prompt_digest)
        # Each completion is computed with its own copy of a prompt with images.
        self.tree_lengths.append(tree.num_tokens_separate if tree.images else tree.num_tokens)
        self.counts["completions"] += len(tree.completions)
        self.counts["tokens"] += tree.num_tokens_separate
        self.counts["supervised_tokens"] += tree.num_targets
        self.counts["negative_margins"] += tree.margin is not None and tree.margin < 0
        self.counts["missing_margins"] += tree.labels is None and tree.margin is None
        self.counts["margins"] += tree.margin is not None

    def raise_or_notify(self, notify: Notify) -> None:
        super().raise_or_notify(notify)
        if self.counts["negative_margins"]:
            notify(f"{count_with_verb(self.counts['negative_margins'], 'pair')} a chosen answer with the lower score")
        if self.counts["margins"] and (missing := self.counts["missing_margins"]):
            notify(
                f"{count_with_verb(missing, 'pair')} no score, unlike other pairs; a loss that reads scores (copg) "
                f"gives {'it' if missing == 1 else 'each'} the default difference of rewards, 1/2"
            )

    def too_long_error(self) -> DataError:
        policy = self.policy
        size, origin = self.longest_prompt
        if self.counts["long_prompts"]:
            return DataError(
                f"{count_with_verb(self.counts['long_prompts'], 'prompt')} more than max_prompt_length = "
                f"{policy.max_prompt_length:,} tokens; the longest has {size:,}",
                where=origin,
                fix=self.long_rows_fix(
                    "max_prompt_length", size, ", or set overlength to truncate (keeps the end of the prompt) or drop"
                ),
            )
        if size >= policy.max_length:
            return DataError(
                f"a prompt of {size:,} tokens leaves no room for a completion in max_length = {policy.max_length:,}",
                where=origin,
                fix=self.long_rows_fix(
                    "max_length",
                    self.longest[0],
                    "; or keep the end of prompts with max_prompt_length and overlength: truncate; or drop the rows "
                    "with overlength: drop",
                ),
            )
        size, origin = self.longest
        return DataError(
            f"{count_with_verb(self.counts['too_long'], 'row')} more than max_length = {policy.max_length:,} tokens "
            f"in the prompt plus its longest completion; the longest such row has {size:,}",
            where=origin,
            fix=self.long_rows_fix("max_length", size, ", or set overlength to truncate or drop"),
        )

    def extra_report_fields(self) -> dict[str, Any]:
        lengths = self.completion_lengths
        return {
            **{name: self.counts[name] for name in ("identical", "completions", "negative_margins")},
            "tree_tokens": sum(self.tree_lengths),
            "prompt_lengths": length_percentiles(self.prompt_lengths),
            "completion_lengths": {kind: length_percentiles(lengths[kind]) for kind in self.kinds if kind in lengths},
            "tree_lengths": length_percentiles(self.tree_lengths),
        }


def _has_identical_answers(tree: Tree) -> bool:
    """Return True if both answers of a pair have the same token ids, although their texts may differ."""
    return len(tree.completions) == 2 and tree.completions[0] == tree.completions[1]


def _tree_digest(tree: Tree) -> bytes:
    digest = hashlib.blake2b(repr((tree.labels, tree.margin)).encode(), digest_size=16)
    lists = [tree.prompt, *tree.completions]
    digest.update(np.array([len(items) for items in lists], dtype=np.int64).tobytes())
    for items in lists:
        digest.update(np.array(items, dtype=np.int32).tobytes())
    for mask in tree.masks or ():
        digest.update(np.array(mask, dtype=np.bool_).tobytes())
    for image in tree.images:
        digest.update(ImageFile.parse(image).digest.encode())
    return digest.digest()


class PromptFitter(LengthFitter[Prompt, CompletionReport]):
    """Cuts or drops prompts that exceed ``max_prompt_length``, writes the others, and counts them (for GRPO).

    Args:
        overlength: One of :data:`COMPLETION_OVERLENGTH`.
        truncate_side: One of :data:`PROMPT_SIDES`; ``auto`` means ``left``.
    """

    record = Prompt
    report_type = CompletionReport
    noun = "prompt"
    trains = False

    def __init__(
        self, writer: TableWriter, overlength: str, max_prompt_length: int, truncate_side: str = "auto"
    ) -> None:
        limit = f"{max_prompt_length:,}"
        super().__init__(writer, overlength, limit=f"max_prompt_length = {limit}", over=f"{limit} tokens")
        self.max_prompt_length = max_prompt_length
        self.first = max_prompt_length // 2 if truncate_side == "middle" else 0
        """number of first tokens that a truncated prompt keeps"""

    def add(self, prompt: Prompt, group_digest: bytes) -> None:
        """Write a prompt; truncate it or count it as dropped if it is too long.

        Args:
            group_digest: Hash of the prompt's group; prompts with the same hash are held out together.
        """
        self.record_row_lengths(prompt.num_tokens, prompt.origin)
        lost = 0
        if prompt.num_tokens > self.max_prompt_length:
            if prompt.images and self.overlength == "truncate":
                raise DataError(
                    f"the prompt has {prompt.num_tokens:,} tokens with its {len(prompt.images)} images, more than "
                    f"max_prompt_length = {self.max_prompt_length:,}, and a prompt with images is not cut",
                    where=prompt.origin,
                    fix=f"set max_prompt_length to {prompt.num_tokens} or more, max_pixels for smaller images, or "
                    "overlength: drop",
                )
            self.counts["too_long"] += 1
            self.counts["long_images"] += bool(prompt.images)
            if self.overlength != "truncate":
                self.counts["dropped"] += 1
                self.counts["tokens_lost"] += prompt.num_tokens
                return
            self.counts["truncated"] += 1
            lost = prompt.num_tokens - self.max_prompt_length
            self.counts["tokens_lost"] += lost
            ids, last = prompt.input_ids, self.max_prompt_length - self.first
            prompt = replace(prompt, input_ids=ids[: self.first] + ids[-last:])
        self.write_record(prompt, _prompt_digest(prompt), lost_tokens=lost)
        self.groups.append(group_digest)
        self.counts["tokens"] += prompt.num_tokens

    def describe_changes(self) -> str:
        return "truncated" if self.counts["truncated"] else "dropped"

    def too_long_error(self) -> DataError:
        size, origin = self.longest
        return DataError(
            f"{count_with_verb(self.counts['too_long'], 'prompt')} more than {self.limit} tokens; "
            f"the longest has {size:,}",
            where=origin,
            fix=self.long_rows_fix(
                "max_prompt_length", size, ", or set overlength to truncate (keeps the end) or drop"
            ),
        )

    def extra_report_fields(self) -> dict[str, Any]:
        return {"tree_tokens": self.counts["tokens"], "prompt_lengths": length_percentiles(self.lengths)}


def _prompt_digest(prompt: Prompt) -> bytes:
    digest = hashlib.blake2b(np.array(prompt.input_ids, dtype=np.int32).tobytes(), digest_size=16)
    digest.update(json.dumps([prompt.prompt, prompt.columns], sort_keys=True, default=repr).encode())
    for image in prompt.images:
        digest.update(ImageFile.parse(image).digest.encode())
    return digest.digest()
