"""Fit prompts to the length: keep, cut or leave out each."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np

from streamtune.data.data_report import CompletionReport, length_percentiles
from streamtune.data.fit.length_fit import LengthFit, have
from streamtune.data.record_table import Prompt, TableWriter
from streamtune.errors import DataError


class PromptFit(LengthFit[Prompt, CompletionReport]):
    """Fits prompts that completions are yet to be written for.

    Args:
        writer: Gets the prompts.
        overlength: One of :data:`COMPLETION_OVERLENGTH`.
        max_prompt_length: Tokens a prompt has at most.
        truncate_side: One of :data:`PROMPT_SIDES`; ``auto`` is ``left``.

    Raises:
        ArgumentError: ``overlength`` is none of the known ones.
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
        """tokens that a prompt keeps of its beginning when it is cut"""

    def add(self, prompt: Prompt, group: bytes) -> None:
        """Fit one prompt to the length, and write it unless it is dropped; prompts of a group are held out together."""
        self.measure(prompt.num_tokens, prompt.origin)
        lost = 0
        if prompt.num_tokens > self.max_prompt_length:
            self.counts["too_long"] += 1
            if self.overlength != "truncate":
                self.counts["dropped"] += 1
                self.counts["tokens_lost"] += prompt.num_tokens
                return
            self.counts["truncated"] += 1
            lost = prompt.num_tokens - self.max_prompt_length
            self.counts["tokens_lost"] += lost
            ids, last = prompt.input_ids, self.max_prompt_length - self.first
            prompt = replace(prompt, input_ids=ids[: self.first] + ids[-last:])
        self.write(prompt, _prompt_digest(prompt), lost=lost)
        self.groups.append(group)
        self.counts["tokens"] += prompt.num_tokens

    def changes(self) -> str:
        """See :class:`LengthFit`: all of them are changed alike."""
        return "truncated" if self.counts["truncated"] else "dropped"

    def too_long(self) -> DataError:
        """See :class:`LengthFit`."""
        size, origin = self.longest
        return DataError(
            f"{have(self.counts['too_long'], 'prompt')} more than {self.limit} tokens; the longest has {size:,}",
            where=origin,
            mend=f"set max_prompt_length to {size} or more, or say what to do with them: overlength: truncate "
            "(keeps the end) or drop",
        )

    def own_counts(self) -> dict[str, Any]:
        """See :class:`LengthFit`."""
        return {"tree_tokens": self.counts["tokens"], "prompt_lengths": length_percentiles(self.lengths)}


def _prompt_digest(prompt: Prompt) -> bytes:
    """Return a hash of everything a run reads of a prompt: its tokens, its text and its columns."""
    digest = hashlib.blake2b(np.array(prompt.input_ids, dtype=np.int32).tobytes(), digest_size=16)
    digest.update(json.dumps([prompt.prompt, prompt.columns], sort_keys=True, default=repr).encode())
    return digest.digest()
