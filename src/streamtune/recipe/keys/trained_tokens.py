"""Recipe keys of a row's length, of its tokens that count in the loss, and of its chat template."""

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
    Where,
    at_most,
    show_value,
)

RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Variables of a chat template that a recipe cannot set."""


class TrainedTokenKeys(Spec):
    """Recipe keys that limit the length of a row, and select its tokens that count in the loss."""

    max_length: Annotated[int, Field(ge=2), at_most(10**12)] = 2048
    """Maximum number of tokens of a row; for `dpo` and `grpo`, of a prompt plus its longest completion. Default for
    `grpo`: `max_prompt_length` plus `max_completion_length`."""

    overlength: Literal["error", "truncate", "drop", "split"] = "error"
    """Action on a row longer than `max_length`, and in `dpo` and `grpo` on a prompt longer than `max_prompt_length`.
    `error` ends the run before training. `truncate` cuts off a part of the row. `drop` leaves the row out. `split`
    (only `sft`) makes several rows of it."""

    truncate_side: Literal["auto", "left", "right", "middle"] = "auto"
    """With `overlength: truncate` in `sft` and `grpo`: part that is cut off. `left`: the beginning. `right` (only
    `sft`): the end. `middle`: the middle. `auto`: the end of plain text, or the beginning of a `grpo` prompt. In rows
    with an answer, `auto` cuts off the beginning, except a system message. If the last answer alone is longer than
    `max_length`, its end is cut off too."""

    split_at: Literal["turn", "paragraph", "line", "token"] = "turn"
    """With `overlength: split` (only `sft`): preferred place of a cut. `turn`: the start of an exchange in a chat.
    `paragraph`: a blank line. `line`: the end of a line. `token`: any token. A row without the preferred place is cut
    at the next place in this order."""

    split_overlap: Annotated[int, Field(ge=0), at_most(10**12)] = 0
    """With `overlength: split` (only `sft`): number of tokens of the previous piece that each later piece repeats as
    context. Repeated tokens do not count in the loss again."""

    train_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """Only for `sft`: tokens that count in the loss. `assistant`: in a chat, the assistant's turns; in plain text,
    every token. `last`: in a chat, the last assistant turn; in plain text, every token. `completion`: the completion of
    a prompt, or the last turn of a chat. `all`: every token."""

    roles_to_train: Annotated[
        tuple[Literal["assistant", "user", "system", "developer", "tool"], ...], Field(min_length=1, strict=False)
    ] = ("assistant",)
    """Only for `sft`: list of the roles whose messages count in the loss. A message with `train: false` never
    counts."""

    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """Only for `sft`: end-of-turn tokens that count in the loss. `turn`: at the end of each turn that counts in the
    loss. `all`: at the end of every turn. `last`: only at the end of the chat. `none`: no end-of-turn token."""

    reasoning: Literal["template", "keep", "error", "per_turn"] = "template"
    """Action if the chat template leaves out the reasoning of an answer that counts in the loss (`<think>`,
    `reasoning_content`, `reasoning`, `thinking`). `template` trains without this reasoning and reports how much is left
    out. `keep` adds the reasoning to the text. `error` ends the run before training. `per_turn` (only `sft`) makes a
    row of each trained turn, with the context that the model sees at inference. The common beginning of these rows is
    computed once."""

    on_empty: Literal["error", "drop", "train"] = "error"
    """Only for `sft`: action on a row whose answer is empty or only whitespace. `error` ends the run before training.
    `drop` leaves the row out. `train` trains on the empty answer."""

    default_system: Text | None = None
    """Text of the system message that is added to conversations without a system message. Default: no message is
    added."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Variables that are passed to the chat template, such as `{enable_thinking: false}`. The column
    `chat_template_kwargs` of a row takes precedence."""

    split_special_tokens: bool = False
    """True to tokenise special tokens in a row's text, such as `<|im_end|>` in an answer, as plain text. With `false`
    they become special tokens, as in a request to an inference server; the run reports how many rows contain them."""


def _refuse_reserved_variables(recipe: Any) -> Iterator[Refusal]:
    given = [name for name in RESERVED_VARIABLES if name in recipe.chat_template_kwargs]
    if given:
        what = f"'chat_template_kwargs' cannot set '{given[0]}': StreamTune sets it"
        yield Refusal("chat_template_kwargs", what, "delete it")


TEMPLATE_RULES: Rules = (Custom(_refuse_reserved_variables),)

CHAT_RULES: Rules = (
    *(
        Clash(
            {key: GIVEN, "train_on": "all"},
            f"'{key}' selects tokens, and 'train_on: all' trains on every token",
            ONE_OF_TWO,
        )
        for key in ("roles_to_train", "train_on_eos")
    ),
    OnlyFor("sft", "train_on", "roles_to_train", "train_on_eos", "on_empty"),
)


def _refuse_long_overlap(recipe: Any) -> Iterator[Refusal]:
    if recipe.split_overlap >= recipe.max_length:
        what = f"'split_overlap' must be below 'max_length' ({recipe.max_length:,}): no token is left after the overlap"
        yield Refusal("split_overlap", what, "lower split_overlap, or raise max_length")


LENGTH_RULES: Rules = (
    Where({"objective": Not("dpo")}, Reads("truncate_side", "overlength", "truncate")),
    OnlyFor("sft", "split_at", "split_overlap", what="'{key}' needs 'overlength: split', which is not for {objective}"),
    Reads("split_at", "overlength", "split"),
    Reads("split_overlap", "overlength", "split"),
    Custom(_refuse_long_overlap),
)

TURN_RULES: Rules = (
    Clash(
        {"reasoning": "per_turn", "objective": Not("sft")},
        "'reasoning: per_turn' needs 'objective: sft': {objective} trains on completions of a prompt",
        "write reasoning: keep",
    ),
    *(
        Clash(
            {key: Not(value), "reasoning": "per_turn"},
            f"'reasoning: per_turn' needs '{key}: {show_value(value)}': {why}",
            f"write {key}: {show_value(value)}",
        )
        for key, value, why in (
            ("train_on", "assistant", "every turn is a row, and trains on its last answer"),
            ("batching", "rows", "the turns of a conversation are one sequence"),
            ("packing", False, "the turns of a conversation are one sequence already"),
            ("streaming", False, "conversations are rendered before the first step"),
            ("per_device_train_batch_size", 1, "the turns of a conversation are one sequence"),
            ("per_device_eval_batch_size", 1, "the turns of a conversation are one sequence"),
        )
    ),
)
