"""Keys of a row's length, of its tokens that count in the loss, and of the chat template that renders it."""

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
    show_value,
)

RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Variables of a chat template that a recipe cannot set."""


class TrainedTokenKeys(Spec):
    """Keys of a row's length, and of its tokens that count in the loss."""

    max_length: Annotated[int, Field(ge=2), at_most(10**12)] = 2048
    """Maximum number of tokens of a row; for `dpo` and `grpo`, of a prompt plus its longest completion."""

    overlength: Literal["error", "truncate", "drop", "split"] = "error"
    """Action on a row longer than `max_length`. `error` refuses the data, `truncate` cuts off a part of the row, `drop`
    leaves the row out, `split` makes several rows of it."""

    truncate_side: Literal["auto", "left", "right", "middle"] = "auto"
    """`overlength: truncate`: part of a row that is cut off. `auto` cuts off the end of a document; of other rows the
    beginning of the prompt, except a system message, and the end of a last answer longer than `max_length`. For the
    prompts of `grpo`, `auto` is `left`. `dpo` does not read this key."""

    split_at: Literal["turn", "paragraph", "line", "token"] = "turn"
    """`overlength: split`: preferred place of a cut. `turn` is the start of an exchange in a chat. A row without such a
    place is cut at a blank line, else at the end of a line, else at any token."""

    split_overlap: Annotated[int, Field(ge=0), at_most(10**12)] = 0
    """`overlength: split`: number of tokens that each later piece repeats from the piece before, as context. Repeated
    tokens are not trained twice."""

    train_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """Tokens that count in the loss. `assistant`: the assistant's turns. `completion`: the completion (in a chat, the
    last turn). `last`: only the last turn. `all`: every token."""

    roles_to_train: Annotated[
        tuple[Literal["assistant", "user", "system", "developer", "tool"], ...], Field(min_length=1, strict=False)
    ] = ("assistant",)
    """`sft`: roles whose messages are trained. A message with `train: false` is never trained."""

    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """`sft`: end-of-turn tokens that are trained. `turn`: at the end of trained turns. `all`: at the end of all turns.
    `last`: only at the end of the chat. `none`: no end-of-turn token."""

    reasoning: Literal["template", "keep", "error", "per_turn"] = "template"
    """Action on the reasoning of a trained answer (`<think>`, `reasoning_content`, `reasoning`, `thinking`) that the
    chat template leaves out. `template` trains without this reasoning and reports how much is left out, `keep` adds the
    reasoning to the text, `error` refuses the data. `per_turn` (`sft`) trains each turn with the context that the model
    sees when it writes this turn; prefixes that turns share are computed once."""

    on_empty: Literal["error", "drop", "train"] = "error"
    """`sft`: action on a row whose answer is empty or only whitespace. `error` refuses the data, `drop` leaves the row
    out, `train` trains the empty answer."""

    default_system: Text | None = None
    """System message that conversations without a system message get."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Variables of the chat template, such as `{enable_thinking: false}`. A row's own column `chat_template_kwargs`
    takes precedence."""

    split_special_tokens: bool = False
    """Tokenise the text of special tokens in a row, such as `<|im_end|>` in an answer, as plain text. With false it
    becomes special tokens, as in a request to an inference server, and rows with such text are counted."""


def _reserved_variables(recipe: Any) -> Iterator[Refusal]:
    given = [name for name in RESERVED_VARIABLES if name in recipe.chat_template_kwargs]
    if given:
        what = f"'chat_template_kwargs' cannot set '{given[0]}': rendering sets it"
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
    OnlyFor("sft", "train_on", "roles_to_train", "train_on_eos", "on_empty"),
)


def _overlap_too_long(recipe: Any) -> Iterator[Refusal]:
    if recipe.split_overlap >= recipe.max_length:
        what = f"'split_overlap' must be below 'max_length' ({recipe.max_length:,}): no token is left after the overlap"
        yield Refusal("split_overlap", what, "lower it, or raise max_length")


LENGTH_RULES: Rules = (
    Reads("truncate_side", "overlength", "truncate"),
    Reads("split_at", "overlength", "split"),
    Reads("split_overlap", "overlength", "split"),
    Custom(_overlap_too_long),
)

TURN_RULES: Rules = (
    Clash(
        {"reasoning": "per_turn", "objective": Not("sft")},
        "'reasoning: per_turn' needs 'objective: sft': {objective} trains the completions of a prompt",
        "write reasoning: keep",
    ),
    *(
        Clash(
            {key: Not(value), "reasoning": "per_turn"},
            f"'reasoning: per_turn' needs '{key}: {show_value(value)}': {why}",
            f"write {key}: {show_value(value)}",
        )
        for key, value, why in (
            ("train_on", "assistant", "every turn is a row, and its last answer is trained"),
            ("batching", "rows", "the turns of a conversation are one sequence"),
            ("packing", False, "the turns of a conversation are one sequence already"),
            ("streaming", False, "conversations are rendered before the first step"),
            ("per_device_train_batch_size", 1, "the turns of a conversation are one sequence"),
            ("per_device_eval_batch_size", 1, "the turns of a conversation are one sequence"),
        )
    ),
)
