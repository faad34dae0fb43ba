"""Make a prompt of each row, which completions are yet to be written for.

Every column beside a prompt is kept and goes to the reward functions as a list under its name, as does ``messages``
itself, which holds the answer that was taken off. ``tools`` goes to the chat template too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from streamtune.data.data_report import CompletionReport
from streamtune.data.fit import COMPLETION_OVERLENGTH, PROMPT_SIDES, Prepared, PromptFit, check_choice
from streamtune.data.prepare.row_kind import Reading, read_and_fit
from streamtune.data.reading.cells import TextOrMessages, texts_of
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import Source, typed_rows
from streamtune.data.record_table import Prompt
from streamtune.data.rendering.counts import DEFAULT_CHAT, ChatOptions
from streamtune.data.rendering.pool import Item
from streamtune.data.rendering.render import PromptRenderer
from streamtune.data.rendering.renderings import require_template
from streamtune.data.row_cache import RowCache
from streamtune.data.row_types import PROMPT_TYPES, detect_prompt_type, prompt_of
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TAKEN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function that a column cannot be."""


PreparedPrompts = Prepared[Prompt, CompletionReport]
"""Prompts, split into a training and a held-out part; none is in both."""


def prepare_prompts(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    overlength: str = "error",
    truncate_side: str = "auto",
    val_size: float = 0.0,
    seed: int = 42,
    on_bad_row: str = "error",
    max_bad_rows: int = 100,
    chat: ChatOptions = DEFAULT_CHAT,
    processes: int = 1,
    cache: RowCache | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> PreparedPrompts:
    """Read every source and render its prompts.

    Args:
        sources: Where the rows come from, in order; of one of :data:`PROMPT_TYPES`.
        tokenizer: The model's tokenizer, with its chat template.
        max_prompt_length: Tokens a prompt has at most.
        overlength: What to do with a longer prompt: refuse them all (``error``), keep its last tokens (``truncate``),
            or leave it out (``drop``).
        truncate_side: ``middle`` keeps its first tokens as well, half of them all.
        val_size: Rows to hold out: a fraction below 1, or a count. Rows with the same prompt stay together.
        seed: Seed of the choice of held-out rows.
        on_bad_row: What to do with rows that are malformed or cannot be trained on: list the first ten and refuse
            (``error``), or count and leave them out (``skip``).
        max_bad_rows: Rows that ``skip`` may leave out.
        chat: Options of rendering.
        processes: Processes that render; 1 is this one.
        cache: Where prepared rows are kept and found again; None keeps none.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed or too long, or nothing is left.
        ArgumentError: ``overlength`` is none of the known ones.
    """
    split = "a prompt cannot be split; use " if overlength == "split" else "use "
    check_choice("overlength", overlength, COMPLETION_OVERLENGTH, mend=split + ", ".join(COMPLETION_OVERLENGTH))
    check_choice("truncate_side", truncate_side, PROMPT_SIDES)
    fit, table = read_and_fit(
        Prompt,
        lambda writer: PromptFit(writer, overlength, max_prompt_length, truncate_side),
        partial(PromptRenderer, tokenizer, chat=chat),
        partial(_prompts, tokenizer),
        lambda fit, prompt, origin: fit.add(*prompt),
        sources=sources,
        tokenizer=tokenizer,
        settings={
            "max_prompt_length": max_prompt_length,
            "overlength": overlength,
            "truncate_side": truncate_side,
            "chat": vars(chat),
        },
        on_bad_row=on_bad_row,
        max_bad_rows=max_bad_rows,
        processes=processes,
        cache=cache,
        notify=notify,
    )
    return fit.prepared(table, val_size, seed, notify)


def _prompts(
    tokenizer: PreTrainedTokenizerBase, reading: Reading, source: Source
) -> Iterator[Item[tuple[Row, TextOrMessages]]]:
    """Yield every row of a source with its prompt, checked."""
    for row, row_type in typed_rows([source], PROMPT_TYPES, detect_prompt_type, reading.bad):
        taken = next((name for name in _TAKEN if name in row.columns), None)
        if taken is not None:
            raise DataError(
                f"a column cannot be called '{taken}': reward functions take an argument of that name",
                where=row.origin,
                mend="rename the column",
            )
        prompt = None
        with reading.bad:
            prompt = prompt_of(row, row_type)
        if prompt is not None:
            if not isinstance(prompt, str):
                require_template(tokenizer, "prompt", row.origin)
            size = len(prompt) if isinstance(prompt, str) else sum(map(len, texts_of(prompt)))
            yield Item(source.path, row.origin, size, (row, prompt))
