"""Groups of keys of a recipe: the model, the tokenizer, special tokens, rotary positions, samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamtune.recipe.spec import Count, Spec, Steps, Text, at_most, mistake


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
                "'model.init' does not say which kind of model", key="model", mend="add a model_type, such as qwen3"
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

    @model_validator(mode="after")
    def _one_source(self) -> TokenizerSpec:
        if (self.path is None) == (self.train is None):
            raise mistake(
                "'tokenizer' needs one of 'path' and 'train'",
                key="tokenizer",
                mend="write {path: NAME} or {train: {vocab_size: 4096}}",
            )
        return self


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
                    mend=f"delete it, or write rope_type: {kind[0]}",
                )
        for key in ("short_factor", "long_factor"):
            if self.rope_type == "longrope" and getattr(self, key) is None:
                raise mistake(
                    f"rope_type: longrope needs '{key}', a number for each frequency",
                    key="rope_scaling.rope_type",
                    mend="write the factors that were searched for this model, or another rope_type: yarn needs none",
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
                    mend=f"without them they are {defaults[0]} and {defaults[1]}",
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


class SampleSpec(Spec):
    """Prompts that the model completes at the end of a run and, with `sample_steps`, while it trains."""

    prompt: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | Text | None = None
    """The user's message (the beginning of the text for a tokenizer without chat template), or a list of them."""

    held_out: Steps = 0
    """`sft`: also complete the prompts of so many held-out rows, the longest of them, by the likeliest token each time,
    and count the answers that are those of the rows."""

    max_new_tokens: Count = 64
    """Tokens to write at most."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts, one or several."""
        if self.prompt is None:
            return ()
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt
