"""Keys of the model: its weights, tokenizer, special tokens and rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamtune.recipe.rules import KEEP_ONE, Clash, Count, Custom, Not, Refusal, Rules, Spec, Text, at_most, mistake


class ModelInit(Spec):
    """A model made from a configuration, with random weights and no download."""

    init: Annotated[
        dict[str, Any],
        Field(json_schema_extra={"required": ["model_type"], "properties": {"model_type": {"type": "string"}}}),
    ]
    """The keys of the model's Hugging Face configuration, `model_type` among them:
    `{model_type: qwen3, hidden_size: 256, ...}`."""

    @field_validator("init")
    @classmethod
    def _names_its_type(cls, init: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(init.get("model_type"), str):
            raise mistake(
                "'model.init' does not say which kind of model", key="model", fix="add a model_type, such as qwen3"
            )
        return init


class TokenizerTrain(Spec):
    """A byte-level BPE tokenizer trained on the recipe's own rows."""

    vocab_size: Annotated[int, Field(ge=259), at_most(2 * 10**6)] = 4096
    """Entries in the vocabulary, the 256 bytes and the 3 special tokens included."""


class TokenizerSpec(Spec):
    """The source of the tokenizer: `path` or `train`, one of the two."""

    path: Text | None = None
    """Hub name or local folder of a tokenizer."""

    train: TokenizerTrain | None = None
    """Train a tokenizer on the recipe's own rows, with the ChatML template."""

    rules = tuple(
        Clash(
            both,
            "'tokenizer' needs one of 'path' and 'train'",
            "write {path: NAME} or {train: {vocab_size: 4096}}",
            key="tokenizer",
        )
        for both in ({"path": None, "train": None}, {"path": Not(None), "train": Not(None)})
    )


class SpecialTokens(Spec):
    """Special tokens of the tokenizer, by their names in `transformers`; those that it does not have are added."""

    bos_token: Text | None = None
    """Token that begins a text."""

    eos_token: Text | None = None
    """Token that ends a text or a turn, where generation stops."""

    pad_token: Text | None = None
    """Token that fills up shorter rows."""

    unk_token: Text | None = None
    """Token for text that no other token stands for."""

    additional_special_tokens: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Others, such as those that a chat template writes: `["<|im_start|>"]`. Decoding may leave them out."""


Factors = Annotated[tuple[Annotated[float, Field(gt=0), at_most(10**6)], ...], Field(min_length=1, strict=False)]
"""Numbers that frequencies are divided by."""


class RopeScaling(Spec):
    """A scaling of rotary positions, by the names of the model's own configuration."""

    rope_type: Literal["yarn", "linear", "llama3", "dynamic", "longrope", "default"]
    """`yarn` (arXiv 2309.00071), `linear` (position interpolation, arXiv 2306.15595), `llama3`, `dynamic` (a base for
    each length of a row) or `longrope` (arXiv 2402.13753); `default` scales nothing: longer rows are trained at
    positions the model has never seen."""

    factor: Annotated[float, Field(ge=1), at_most(10**6)] | None = None
    """Times the length that the model was pretrained for; without it, the smallest whole number that reaches
    `max_length`."""

    original_max_position_embeddings: Count | None = None
    """Tokens that the model was pretrained for; without it, what its configuration says."""

    attention_factor: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """`yarn`, `longrope`: scale of the attention scores; without it, what follows from the factor."""

    beta_fast: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """`yarn`: rotations above which a frequency is left as it is; 32 without it."""

    beta_slow: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """`yarn`: rotations below which a frequency is interpolated; 1 without it."""

    low_freq_factor: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """`llama3`: end of the band of low frequencies; 1 without it."""

    high_freq_factor: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """`llama3`: begin of the band of high frequencies; 4 without it."""

    short_factor: Factors | None = None
    """`longrope`: what each frequency is divided by in rows up to the length of the pretraining, a list of numbers."""

    long_factor: Factors | None = None
    """`longrope`: the same in longer rows."""

    @model_validator(mode="after")
    def _keys_of_the_type(self) -> RopeScaling:
        for kind, keys in OF_TYPE.items():
            given = next((key for key in keys if getattr(self, key) is not None), None)
            if given is not None and self.rope_type not in kind:
                raise mistake(
                    f"'{given}' is not for rope_type: {self.rope_type}",
                    key=f"rope_scaling.{given}",
                    fix=f"delete it, or write rope_type: {kind[0]}",
                )
        for key in ("short_factor", "long_factor"):
            if self.rope_type == "longrope" and getattr(self, key) is None:
                raise mistake(
                    f"rope_type: longrope needs '{key}', a number for each frequency",
                    key="rope_scaling.rope_type",
                    fix="write the factors that were searched for this model, or another rope_type: yarn needs none",
                )
        for above, below, defaults in (
            ("beta_fast", "beta_slow", (32, 1)),
            ("high_freq_factor", "low_freq_factor", (4, 1)),
        ):
            high, low = (
                default if (value := getattr(self, key)) is None else value
                for key, default in zip((above, below), defaults, strict=True)
            )
            if high <= low:
                raise mistake(
                    f"'{above}' is {high:g} and '{below}' {low:g}: it must be the larger of the two",
                    key=f"rope_scaling.{above if getattr(self, above) is not None else below}",
                    fix=f"without them they are {defaults[0]} and {defaults[1]}",
                )
        return self


OF_TYPE = {
    ("yarn", "linear", "llama3", "dynamic", "longrope"): ("factor",),
    ("yarn", "llama3", "dynamic", "longrope"): ("original_max_position_embeddings",),
    ("yarn", "longrope"): ("attention_factor",),
    ("yarn",): ("beta_fast", "beta_slow"),
    ("llama3",): ("low_freq_factor", "high_freq_factor"),
    ("longrope",): ("short_factor", "long_factor"),
}
"""Types of scaling, and the keys that only they have."""


class ModelKeys(Spec):
    """The model to fine-tune, and its tokenizer."""

    model_name_or_path: Text | None = None
    """Hub name or local folder of the model to fine-tune; or give `model`."""

    model: ModelInit | None = None
    """Start from a configuration and random weights: `{init: {model_type: qwen3, ...}}`."""

    tokenizer: TokenizerSpec | None = None
    """Tokenizer; without it, the one that belongs to `model_name_or_path`."""

    special_tokens: SpecialTokens = SpecialTokens()
    """Special tokens to use, and to add where the tokenizer does not have them:
    `{eos_token: "<|im_end|>", additional_special_tokens: ["<|im_start|>"]}`. The model gets a row for each new one."""

    added_tokens: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tokens to add that are ordinary text when decoded: `["<think>", "</think>"]`. Their rows in embedding and head
    begin as the mean of the others and are trained, beside adapters too."""

    chat_template: Text | None = None
    """Jinja chat template, inline or the path of a file; without it, the tokenizer's own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    allow_pickle: bool = False
    """Read weights that are a pickle (`pytorch_model.bin`), tensors only. Without it weights are safetensors."""

    dtype: Literal["auto", "mixed", "float32", "bfloat16"] = "auto"
    """Dtype of the weights. `mixed`: the checkpoint's own where they are frozen, float32 where they are trained, which
    keeps steps that bfloat16 would round away. `auto` is `mixed` with `bf16`; where that does not fit, bfloat16 with
    `weight_rounding: stochastic`, and the banner says so. A model made from a configuration is float32."""

    weight_rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of bfloat16 weights after each step, which is computed in float32. `nearest` loses steps smaller than
    half of the distance between two numbers; `stochastic` rounds up as often as what is cut off is large, by bits of
    `seed`, and keeps them on average. With `dtype: bfloat16`, or `modules_to_save` of a bfloat16 checkpoint."""

    rope_scaling: RopeScaling | None = None
    """Extend the rotary positions of the model to longer rows: `{rope_type: yarn, factor: 4}`. Saved in the model's
    configuration, where inference engines read it."""

    rope_theta: Annotated[float, Field(gt=1), at_most(10**15)] | None = None
    """Base of the frequencies of the rotary positions; without it, the model's own. Saved in its configuration."""


MODEL_RULES: Rules = (
    Clash(
        {"model_name_or_path": None, "model": None},
        "the recipe names no model",
        "add model_name_or_path, or model: {init: ...}",
    ),
    Clash(
        {"model": Not(None), "model_name_or_path": Not(None)},
        "'model_name_or_path' and 'model' exclude each other",
        KEEP_ONE,
    ),
    Clash(
        {"model": Not(None), "tokenizer": None},
        "a model made from a configuration has no tokenizer of its own",
        "add tokenizer: {train: {vocab_size: 4096}} or tokenizer: {path: NAME}",
    ),
)


def _token_added_twice(recipe: Any) -> Iterator[Refusal]:
    named = [*recipe.special_tokens.additional_special_tokens, *recipe.added_tokens]
    if twice := next((token for token in named if named.count(token) > 1), None):
        yield Refusal("added_tokens", f"the token '{twice}' is added twice", "keep one of the two")


TOKEN_RULES: Rules = (Custom(_token_added_twice),)
