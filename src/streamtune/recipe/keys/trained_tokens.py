"""Keys of what a row becomes: its length, its tokens that are trained, and its text by a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from streamtune.recipe.rules import (
    GIVEN,
    ONE_OF_TWO,
    Clash,
    Custom,
    Not,
    OnlyFor,
    Reads,
    Refusal,
    Rules,
    Spec,
    Text,
    at_most,
    shown,
)

RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Variables of a chat template that a recipe cannot set."""


class TrainedTokenKeys(Spec):
    """Length of a row, and its tokens that are trained."""

    max_length: Annotated[int, Field(ge=2), at_most(10**12)] = 2048
    """Tokens a row may have."""

    overlength: Literal["error", "truncate", "drop", "split"] = "error"
    """A row longer than `max_length`: refuse it, cut a part off, leave it out, or make several rows of it."""

    truncate_side: Literal["auto", "left", "right", "middle"] = "auto"
    """The part that `overlength: truncate` cuts off. `auto` keeps the beginning of a document, and the last answer of
    other rows: the prompt loses its beginning, and an answer too long for `max_length` its end. A system message stays.
    Not for `dpo`; of a prompt (`grpo`) `auto` is `left`."""

    split_at: Literal["turn", "paragraph", "line", "token"] = "turn"
    """`overlength: split`: the best place to cut a row. `turn` is where an exchange of a chat begins; where there is
    none, rows are cut at a blank line, else at the end of a line, else at a token."""

    split_overlap: Annotated[int, Field(ge=0), at_most(10**12)] = 0
    """`overlength: split`: tokens in front of each later piece that are there as context, and not trained twice."""

    train_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """Tokens the loss counts: the assistant's turns, the completion (of a chat the last turn), the last turn alone, or
    every token."""

    roles_to_train: Annotated[
        tuple[Literal["assistant", "user", "system", "developer", "tool"], ...], Field(min_length=1, strict=False)
    ] = ("assistant",)
    """`sft`: roles whose messages are trained. A message with `train: false` is not, whatever its role."""

    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """`sft`: tokens that end turns and are trained: those of trained turns, those of all turns, the last one of the
    chat, or none."""

    reasoning: Literal["template", "keep", "error", "per_turn"] = "template"
    """Reasoning of a trained answer (`<think>`, `reasoning_content`, `reasoning`, `thinking`) that the chat template
    leaves out: train without it and say how much it is, put it into the text, or refuse the rows. `sft`: `per_turn`
    trains each turn as the model sees it when it writes it, with the beginnings that turns share computed once."""

    on_empty: Literal["error", "drop", "train"] = "error"
    """`sft`: a row with an empty answer, or one of blanks alone: refuse it, leave it out, or train that nothing is to
    be said."""

    default_system: Text | None = None
    """System message of conversations that have none."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Variables of the chat template, such as `{enable_thinking: false}`; a row's column of this name comes first."""

    split_special_tokens: bool = False
    """Special tokens that the text of a row spells, such as `<|im_end|>` in an answer, stay text. Otherwise they become
    these tokens, as in a request to a server, and rows that spell them are counted."""


def _reserved_variables(recipe: Any) -> Iterator[Refusal]:
    given = [name for name in RESERVED_VARIABLES if name in recipe.chat_template_kwargs]
    if given:
        what = f"'chat_template_kwargs' cannot set '{given[0]}', which every rendering sets itself"
        yield Refusal("chat_template_kwargs", what, "delete it")


TEMPLATE_RULES: Rules = (Custom(_reserved_variables),)

CHAT_RULES: Rules = (
    *(
        Clash(
            {key: GIVEN, "train_on": "all"},
            f"'{key}' chooses tokens, and 'train_on: all' trains every token",
            ONE_OF_TWO,
        )
        for key in ("roles_to_train", "train_on_eos")
    ),
    OnlyFor("sft", "roles_to_train", "train_on_eos", "on_empty"),
)


def _overlap_is_all(recipe: Any) -> Iterator[Refusal]:
    if recipe.split_overlap >= recipe.max_length:
        what = f"'split_overlap' leaves no token of 'max_length' ({recipe.max_length:,}) to what follows it"
        yield Refusal("split_overlap", what, "lower it, or raise max_length")


LENGTH_RULES: Rules = (
    Reads("truncate_side", "overlength", "truncate"),
    Reads("split_at", "overlength", "split"),
    Reads("split_overlap", "overlength", "split"),
    Custom(_overlap_is_all),
)

TURN_RULES: Rules = (
    Clash(
        {"reasoning": "per_turn", "objective": Not("sft")},
        "'reasoning: per_turn' needs 'objective: sft': other objectives train the completions of a prompt",
        "write reasoning: keep",
    ),
    *(
        Clash(
            {key: Not(value), "reasoning": "per_turn"},
            f"'reasoning: per_turn' needs '{key}: {shown(value)}': {why}",
            f"write {key}: {shown(value)}",
        )
        for key, value, why in (
            ("train_on", "assistant", "every turn is a row, and its last answer is trained"),
            ("batching", "rows", "the turns of a conversation are one sequence"),
            ("packing", False, "the turns of a conversation are one sequence already"),
            ("streaming", False, "conversations are laid out before the first step"),
            ("per_device_train_batch_size", 1, "the turns of a conversation are one sequence"),
            ("per_device_eval_batch_size", 1, "the turns of a conversation are one sequence"),
        )
    ),
)
