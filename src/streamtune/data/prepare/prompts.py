"""Make a prompt of each row, which completions are yet to be written for.

Every column beside a prompt is kept and goes to the reward functions as a list under its name, as does ``messages``
itself, which holds the answer that was taken off. ``tools`` goes to the chat template too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from streamtune.data.data_report import CompletionReport
from streamtune.data.fit import Prepared, PromptFit
from streamtune.data.options import COMPLETION_OVERLENGTH, PROMPT_SIDES, DataOptions, check_choice
from streamtune.data.prepare.row_kind import Reading, RowKind, read_and_fit
from streamtune.data.reading.cells import TextOrMessages, texts_of
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import Source, typed_rows
from streamtune.data.record_table import Prompt
from streamtune.data.rendering.pool import Item, Notify
from streamtune.data.rendering.render import PromptRenderer
from streamtune.data.rendering.renderings import require_template
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
    options: DataOptions,
    notify: Notify = lambda message: None,
) -> PreparedPrompts:
    """Read every source and render its prompts.

    Args:
        sources: Where the rows come from, in order; of one of :data:`PROMPT_TYPES`.
        tokenizer: The model's tokenizer, with its chat template.
        options: See :class:`DataOptions`; ``max_prompt_length`` is the limit.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: A file is missing, a row is malformed or too long, or nothing is left.
        ArgumentError: ``overlength`` is none of the known ones.
    """
    overlength, side, most = options.overlength, options.truncate_side, options.max_prompt_length
    assert most is not None, "prompts have a limit of their own"
    split = "a prompt cannot be split; use " if overlength == "split" else "use "
    check_choice("overlength", overlength, COMPLETION_OVERLENGTH, mend=split + ", ".join(COMPLETION_OVERLENGTH))
    check_choice("truncate_side", side, PROMPT_SIDES)
    kind = RowKind(
        Prompt,
        settings={
            "max_prompt_length": most,
            "overlength": overlength,
            "truncate_side": side,
            "chat": vars(options.chat),
        },
        make_fit=lambda writer: PromptFit(writer, overlength, most, side),
        make_renderer=partial(PromptRenderer, tokenizer, chat=options.chat),
        read=partial(_prompts, tokenizer),
        add=lambda fit, prompt, origin: fit.add(*prompt),
    )
    fit, table = read_and_fit(kind, sources, tokenizer, options, notify)
    return fit.prepared(table, options.val_size, options.seed, notify)


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
