"""Recipe keys of the model: its weights, tokenizer, special tokens and rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamtune.recipe.rules import KEEP_ONE, Clash, Count, Custom, Not, Refusal, Rules, Spec, Text, at_most, mistake


class ModelInit(Spec):
    """Keys of the recipe key ``model``: a model with random weights, built from a configuration without downloads."""

    init: Annotated[
        dict[str, Any],
        Field(json_schema_extra={"required": ["model_type"], "properties": {"model_type": {"type": "string"}}}),
    ]
    """Keys of the model's Hugging Face configuration. `model_type` is required: `{model_type: qwen3, hidden_size: 256,
    ...}`. Other keys have the defaults of transformers. Vision-language models: `qwen2_vl`, `qwen2_5_vl`,
    `qwen3_vl`, `qwen3_vl_moe` and `glm4v`, with the keys `text_config` and `vision_config`."""

    @field_validator("init")
    @classmethod
    def _check_model_type(cls, init: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(init.get("model_type"), str):
            raise mistake("'model.init' has no model_type", key="model", fix="add a model_type, such as qwen3")
        return init


class TokenizerTrain(Spec):
    """Keys of the recipe key ``tokenizer.train``, which trains a new byte-level BPE tokenizer on the recipe's rows."""

    vocab_size: Annotated[int, Field(ge=259), at_most(2 * 10**6)] = 4096
    """Number of tokens in the vocabulary, including the 256 single bytes and 3 special tokens."""


class TokenizerSpec(Spec):
    """Keys of the recipe key ``tokenizer``: either `path` or `train`."""

    path: Text | None = None
    """Hub name or local folder of a tokenizer. Set either this key or `train`."""

    train: TokenizerTrain | None = None
    """Train a byte-level BPE tokenizer on the rows of the recipe: `{vocab_size: 4096}`. Its chat template is ChatML.
    Set either this key or `path`."""

    rules = tuple(
        Clash(
            both,
            "'tokenizer' needs either 'path' or 'train'",
            "write {path: NAME} or {train: {vocab_size: 4096}}",
            key="tokenizer",
        )
        for both in ({"path": None, "train": None}, {"path": Not(None), "train": Not(None)})
    )


class SpecialTokens(Spec):
    """Keys of the recipe key ``special_tokens``, named as in `transformers`. A token that the tokenizer lacks is
    added."""

    bos_token: Text | None = None
    """Token at the beginning of a text (BOS). Default: the tokenizer's."""

    eos_token: Text | None = None
    """Token that ends a text or a turn (EOS); generation stops at it. Default: the tokenizer's."""

    pad_token: Text | None = None
    """Token that pads shorter rows of a batch. Default: the tokenizer's."""

    unk_token: Text | None = None
    """Token for text that the vocabulary does not cover. Default: the tokenizer's."""

    additional_special_tokens: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """List of further special tokens, such as the turn markers of a chat template: `["<|im_start|>"]`. Decoding with
    `skip_special_tokens` leaves them out."""


Factors = Annotated[tuple[Annotated[float, Field(gt=0), at_most(10**6)], ...], Field(min_length=1, strict=False)]
"""Divisors of the rotary frequencies, one number for each frequency."""


class RopeScaling(Spec):
    """Keys of the recipe key ``rope_scaling`` (scaling of rotary positions), named as in Hugging Face
    configurations."""

    rope_type: Literal["yarn", "linear", "llama3", "dynamic", "longrope", "default"]
    """Kind of scaling. `yarn` (arXiv 2309.00071). `linear`: position interpolation (arXiv 2306.15595). `llama3`: the
    scaling of Llama 3. `dynamic`: the rotary base depends on the length of the row. `longrope` (arXiv 2402.13753).
    `default`: no scaling; tokens beyond the pretraining length get positions that the model has never seen."""

    factor: Annotated[float, Field(ge=1), at_most(10**6)] | None = None
    """Extended length divided by the pretraining length. Default: the smallest whole number for which the extended
    length is at least `max_length`."""

    original_max_position_embeddings: Count | None = None
    """Pretraining length in tokens. Default: the value in the model's configuration."""

    attention_factor: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """With `yarn` and `longrope`: factor of the rotary cosines and sines. Attention scores are multiplied by its
    square. Default: derived from `factor`."""

    beta_fast: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """With `yarn`: number of rotations within the pretraining length above which a rotary frequency is not scaled.
    Default: 32."""

    beta_slow: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """With `yarn`: number of rotations within the pretraining length below which a rotary frequency is divided by
    `factor`. Default: 1."""

    low_freq_factor: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """With `llama3`: number of rotations within the pretraining length below which a rotary frequency is divided by
    `factor`. Default: 1."""

    high_freq_factor: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """With `llama3`: number of rotations within the pretraining length above which a rotary frequency is not scaled.
    Default: 4."""

    short_factor: Factors | None = None
    """With `longrope` (required): list of divisors of the rotary frequencies, one number per frequency, for rows up to
    the pretraining length."""

    long_factor: Factors | None = None
    """With `longrope` (required): list of divisors of the rotary frequencies, one number per frequency, for rows longer
    than the pretraining length."""

    @model_validator(mode="after")
    def _check_keys_of_rope_type(self) -> RopeScaling:
        for kind, keys in KEYS_OF_TYPES.items():
            given = next((key for key in keys if getattr(self, key) is not None), None)
            if given is not None and self.rope_type not in kind:
                raise mistake(
                    f"rope_type: {self.rope_type} does not read '{given}'",
                    key=f"rope_scaling.{given}",
                    fix=f"delete it, or write rope_type: {kind[0]}",
                )
        for key in ("short_factor", "long_factor"):
            if self.rope_type == "longrope" and getattr(self, key) is None:
                raise mistake(
                    f"rope_type: longrope needs '{key}', a list with a number for each frequency",
                    key="rope_scaling.rope_type",
                    fix="write the published factors of this model, or rope_type: yarn, which needs none",
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
                    f"'{above}' must be above '{below}'; found {high:g} and {low:g}",
                    key=f"rope_scaling.{above if getattr(self, above) is not None else below}",
                    fix=f"delete both lines: the defaults are {defaults[0]} and {defaults[1]}",
                )
        return self


KEYS_OF_TYPES = {
    ("yarn", "linear", "llama3", "dynamic", "longrope"): ("factor",),
    ("yarn", "llama3", "dynamic", "longrope"): ("original_max_position_embeddings",),
    ("yarn", "longrope"): ("attention_factor",),
    ("yarn",): ("beta_fast", "beta_slow"),
    ("llama3",): ("low_freq_factor", "high_freq_factor"),
    ("longrope",): ("short_factor", "long_factor"),
}
"""Values of ``rope_type`` -> keys that only these types read."""


class ModelKeys(Spec):
    """Recipe keys of the model to fine-tune: weights, dtypes, tokenizer, special tokens and rotary positions."""

    model_name_or_path: Text | None = None
    """Hub name or local folder of the model to fine-tune. Set either this key or `model`."""

    model: ModelInit | None = None
    """Configuration of a new model with random weights: `{init: {model_type: qwen3, ...}}`. Set either this key or
    `model_name_or_path`."""

    tokenizer: TokenizerSpec | None = None
    """Tokenizer to load (`{path: NAME}`) or to train on the rows (`{train: {vocab_size: 4096}}`). Default: the
    tokenizer of `model_name_or_path`."""

    special_tokens: SpecialTokens = SpecialTokens()
    """Special tokens that replace or extend the tokenizer's: `{eos_token: "<|im_end|>", additional_special_tokens:
    ["<|im_start|>"]}`. Tokens that the tokenizer lacks are added, and the model's embedding gets a row for each new
    token."""

    added_tokens: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """List of tokens to add that decode as ordinary text: `["<think>", "</think>"]`. Their rows of the embedding and
    head matrices start as the mean of the other rows, and are trained even with adapters."""

    chat_template: Text | None = None
    """Chat template: a name, the path of a Jinja file, or the template itself. The names are `chatml`, `llama3`,
    `llama3_tools`, `qwen3`, `qwen3_nothink`, `gemma`, `gemma3`, `mistral`, `phi4`, `deepseek_r1`, `gpt_oss`, `granite`,
    `cohere2`, `smollm2`, `vicuna` and `alpaca`. A name is never read as a file: for a file of the same name write
    `./chatml`. Default: the template of the tokenizer."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only if you trust the source of the model."""

    allow_pickle: bool = False
    """Also read weights from pickle files (`pytorch_model.bin`); of these files, only tensors are loaded. With `false`,
    only safetensors files are read."""

    dtype: Literal["auto", "mixed", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the model's weights; adapters are float32. `float32` or `bfloat16`: all weights have this dtype.
    `float16`: the frozen weights under adapters have this dtype; it needs `fp16: true`. `mixed`: trained weights are
    float32, so that small updates are not lost by rounding; frozen weights keep the checkpoint's dtype. `auto`: the
    checkpoint's dtype, except that float16 becomes bfloat16; a model built from a configuration is float32. In full
    fine-tuning of a 16-bit checkpoint without DeepSpeed, `auto` is `mixed` with `bf16: true`. If that does not fit in
    memory, it is `bfloat16` with `weight_rounding: stochastic`. With `fp16: true`, a 16-bit checkpoint is `mixed`, or
    `float16` under adapters. The start of the run reports this choice."""

    weight_rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of a bfloat16 weight after an optimizer step, which is computed in float32. `nearest`: to the nearest
    bfloat16 number; a change of less than half the distance between two such numbers is lost. `stochastic`: up or down
    at random (with `seed`), so that the mean is the unrounded weight. `stochastic` needs `dtype: bfloat16`, or
    `modules_to_save` of a bfloat16 checkpoint."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary positions, for rows longer than the pretraining length: `{rope_type: yarn, factor: 4}`. It
    is saved in the model's configuration, so inference engines apply it too. Default: as in the model's
    configuration."""

    rope_theta: Annotated[float, Field(gt=1), at_most(10**15)] | None = None
    """Base of the rotary frequencies, which is saved in the model's configuration. Default: the base in the model's
    configuration."""


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
        "'model' comes without a tokenizer, and the recipe names none",
        "add tokenizer: {train: {vocab_size: 4096}} or tokenizer: {path: NAME}",
    ),
)


def _refuse_duplicate_tokens(recipe: Any) -> Iterator[Refusal]:
    named = [*recipe.special_tokens.additional_special_tokens, *recipe.added_tokens]
    if twice := next((token for token in named if named.count(token) > 1), None):
        yield Refusal("added_tokens", f"the token '{twice}' is added twice", "keep one of the two")


TOKEN_RULES: Rules = (Custom(_refuse_duplicate_tokens),)
