"""Recipe keys that choose full fine-tuning or adapters, and rules that refuse combinations with other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from streamtune.base.adapters import ADAPTERS, AdapterName
from streamtune.recipe.rules import (
    GIVEN,
    Clash,
    Custom,
    Fraction,
    Not,
    Refusal,
    Rules,
    Spec,
    Text,
    Where,
    at_most,
    is_given,
    names_where,
)

OF_ALL = ("lora_target", "lora_exclude", "modules_to_save", "adapter_name_or_path")
OF_KINDS = tuple(dict.fromkeys(key for kind in ADAPTERS.values() for key in kind.own_recipe_keys))
ADAPTER_KEYS = ("adapter_type", *OF_KINDS, *OF_ALL)
"""Keys without effect when all weights are trained."""
FREEZE_KEYS = ("trainable_layers", "freeze", "train")
"""Keys that choose the trained weights of full fine-tuning."""
TOWER_KEYS = ("freeze_vision_tower", "freeze_projector")
"""Keys that choose whether the parts of a vision-language model for images are trained."""
LAYERS_PATTERN = r"^((first|last) [1-9]\d{0,5}|\d{1,6}-\d{1,6})$"
UNQUANTISED = tuple(name for name, kind in ADAPTERS.items() if not kind.on_quantised)


def keys_without_effect(recipe: Any) -> dict[str, str]:
    """Return the adapter keys that have no effect in a recipe, each with the setting that disables it."""
    if recipe.finetuning_type == "full":
        return dict.fromkeys(ADAPTER_KEYS, "finetuning_type: full")
    if recipe.adapter_name_or_path is not None:
        others = (key for key in ADAPTER_KEYS if key != "adapter_name_or_path")
        return dict.fromkeys(others, f"adapter_name_or_path: {recipe.adapter_name_or_path}")
    unread = (key for key in OF_KINDS if key not in ADAPTERS[recipe.adapter_type].own_recipe_keys)
    return dict.fromkeys(unread, f"adapter_type: {recipe.adapter_type}")


def unread_adapter_keys(recipe: Any) -> dict[str, str]:
    """Return the keys of :func:`keys_without_effect` that the recipe sets."""
    return {key: setting for key, setting in keys_without_effect(recipe).items() if key in recipe.model_fields_set}


Layers = Annotated[str, Field(pattern=LAYERS_PATTERN, json_schema_extra={"examples": ["last 8", "first 8", "28-35"]})]


class AdapterKeys(Spec):
    """Recipe keys that select full fine-tuning or adapters, choose the trained weights, and configure the adapters."""

    finetuning_type: Literal["full", "lora", "qlora"] = "full"
    """Weights to train. `full`: all weights, or those that `trainable_layers`, `freeze` and `train` choose. `lora`:
    adapters, while the model's weights are frozen. `qlora`: adapters, while the model's weights are frozen and
    quantised to 4 or 8 bits, which takes less memory."""

    trainable_layers: Layers | None = None
    """With `finetuning_type: full`: decoder layers to train: `last 8`, `first 8`, or `28-35` (the first layer has
    number 0). All other layers, the embedding, the final norm and the head are frozen; `train` adds them by name.
    Default: all weights."""

    freeze: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """With `finetuning_type: full`: list of patterns of parameters that are not trained: `[model.embed_tokens]`. A
    pattern is a regular expression that matches the beginning of a parameter's name. A `.` in it is a point, except
    in `.*` and `.+`. Patterns are applied after `trainable_layers`."""

    train: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """With `finetuning_type: full`: list of patterns of parameters that are trained: `[lm_head, model.norm]`. Without
    `trainable_layers` and `freeze`, all other parameters are frozen. With one of them, these parameters are trained as
    well, because `train` is applied last. Patterns match as in `freeze`."""

    freeze_vision_tower: bool = True
    """With `finetuning_type: full` and a vision-language model: `false` also trains the vision tower, without the
    projector. Several ranks: DDP or `fsdp: true`."""

    freeze_projector: bool = True
    """With `finetuning_type: full` and a vision-language model: `false` also trains the projector, which maps features
    of images to the language model. Several ranks: DDP or `fsdp: true`."""

    quantization: Literal["auto", "nf4", "int8"] = "auto"
    """With `finetuning_type: qlora`: number format of the frozen linear layers and experts. `nf4` has 4 bits
    (bitsandbytes), `int8` has 8 bits (torchao). `auto` is `nf4` on an accelerator or with `deepspeed` or `fsdp`, else
    `int8`. Embedding, norms and head are not quantised."""

    adapter_type: AdapterName = "lora"
    """Kind of adapters. `lora`: low-rank adapters. `rslora`: LoRA that is scaled by alpha / sqrt(r). `dora`: LoRA that
    also trains the norms of the weights' rows. LoRA with other initial values: `pissa` (from the SVD of each weight),
    `olora` (from its QR decomposition), `lora_ga` (from its gradient; only with `objective: sft`), `loftq` (from its
    quantisation error; only with `finetuning_type: qlora`). `paca`: trains `lora_r` random columns of each weight.
    Other methods of the library peft: `vera`, `ia3`, `oft`, `hra`, `loha`, `lokr`, `miss`."""

    lora_r: Annotated[int, Field(ge=1), at_most(10**5)] = 16
    """Rank of the adapters. A higher rank trains more parameters."""

    lora_alpha: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """Scale of the adapters: their output is multiplied by `lora_alpha` / `lora_r`, or by `lora_alpha` / sqrt(`lora_r`)
    for `rslora` and `lora_ga`. Default: 2 x `lora_r`."""

    lora_dropout: Fraction = 0.0
    """Dropout probability on the input of the adapters during training. 0 disables dropout."""

    lora_target: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | Literal["all-linear"] = "all-linear"
    """List of the modules that get an adapter, as ends of module names: `[q_proj, v_proj]`. `all-linear`: every linear
    layer except the head and routers. Experts that are stored as one tensor can be listed too: `[gate_up_proj]`. A
    name may be a regular expression. In a vision-language model a name selects layers of the language model. Only if
    none of them has the name, it selects layers of the vision tower or the projector. `vision-tower` and
    `vision-projector` select all linear layers of these parts: `[all-linear, vision-tower]`."""

    lora_exclude: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """List of the modules that get no adapter although `lora_target` selects them, as ends of module names or regular
    expressions: `[down_proj]`."""

    lora_rank_pattern: Annotated[dict[Text, Annotated[int, Field(ge=1), at_most(10**5)]], Field(default_factory=dict)]
    """Ranks of some modules, which replace `lora_r`: mapping from the end of a module name (a regular expression) to a
    rank, such as `{o_proj: 4}`."""

    lora_alpha_pattern: Annotated[
        dict[Text, Annotated[float, Field(gt=0), at_most(10**6)]], Field(default_factory=dict)
    ]
    """Alphas of some modules, which replace `lora_alpha`: mapping from the end of a module name (a regular expression)
    to an alpha, such as `{o_proj: 8}`."""

    lora_ga_rows: Annotated[int, Field(ge=1), at_most(10**4)] = 8
    """Only for `sft` with `adapter_type: lora_ga`: number of training rows, drawn with `seed`, whose gradient
    initialises the adapters. Gradients of several rows are summed in host memory."""

    lora_ga_gamma: Annotated[float, Field(gt=0), at_most(10**9)] = 16.0
    """Only for `sft` with `adapter_type: lora_ga`: number whose square root divides the initial values of the adapters.
    A larger number gives smaller initial values."""

    loftq_iter: Annotated[int, Field(ge=1), at_most(100)] = 1
    """With `adapter_type: loftq`: number of LoftQ iterations. Each iteration subtracts the product of the adapters from
    the weight, quantises the difference, then recomputes the adapters. With 2 or more, the quantised base weights
    differ from plain quantisation, and the difference is saved with the adapters."""

    oft_block_size: Annotated[int, Field(ge=2), at_most(10**5)] = 32
    """With `adapter_type: oft`: number of input features that each trained rotation acts on."""

    modules_to_save: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """List of modules whose full weights are trained next to the adapters and saved with them, as ends of module names:
    `[lm_head]`."""

    adapter_name_or_path: Text | None = None
    """Folder with trained adapters in peft's format, from which training starts. The folder sets their kind, rank and
    modules, so other adapter keys are refused. Default: new adapters."""

    @property
    def starts_from_gradients(self) -> bool:
        """True if adapters are initialised from gradients of training rows, computed before the first step."""
        return self.finetuning_type == "lora" and ADAPTERS[self.adapter_type].start == "gradient"

    @property
    def starts_from_quantisation(self) -> bool:
        """True if adapters are initialised from the quantisation error of the weights."""
        qlora = self.finetuning_type == "qlora" and self.adapter_name_or_path is None
        return qlora and ADAPTERS[self.adapter_type].start == "quantisation"


def _refuse_reversed_layers(recipe: Any) -> Iterator[Refusal]:
    first, dash, last = (recipe.trainable_layers or "").partition("-")
    if dash and int(first) > int(last):
        what = f"'trainable_layers: {recipe.trainable_layers}' ends before it begins"
        yield Refusal("trainable_layers", what, f"write trainable_layers: {last}-{first}")


def _refuse_keys_of_adapter_folder(recipe: Any) -> Iterator[Refusal]:
    for key in keys_without_effect(recipe):
        if is_given(recipe, key):
            what = f"'{key}' has no effect: the adapters in {recipe.adapter_name_or_path} set it"
            yield Refusal(key, what, "delete one of the two lines")


OTHERS = ", ".join(f"adapter_type: {kind}" for kind in ADAPTERS if kind not in UNQUANTISED)
LORA = "write adapter_type: lora, or "

ADAPTER_RULES: Rules = (
    *(
        Clash(
            {key: GIVEN, "finetuning_type": Not("full")},
            f"'{key}' chooses weights of the model, and 'finetuning_type: {{finetuning_type}}' freezes all of them",
            "write finetuning_type: full, or delete the line; lora_target, lora_exclude and modules_to_save choose "
            "what adapters train",
        )
        for key in FREEZE_KEYS
    ),
    *(
        Clash(
            {key: False, "finetuning_type": Not("full")},
            f"'{key}: false' trains weights of the model, and 'finetuning_type: {{finetuning_type}}' freezes all of "
            "them",
            "write finetuning_type: full, or delete the line",
        )
        for key in TOWER_KEYS
    ),
    Custom(_refuse_reversed_layers),
    Clash(
        {"adapter_type": names_where(ADAPTERS, {"on_quantised": False}), "finetuning_type": "qlora"},
        "'adapter_type: {adapter_type}' needs unquantised weights, and 'finetuning_type: qlora' quantises them to 4 or "
        "8 bits",
        f"write finetuning_type: lora, or one of: {OTHERS}",
    ),
    Clash(
        {"adapter_type": names_where(ADAPTERS, {"start": "quantisation"}), "finetuning_type": "lora"},
        "'adapter_type: {adapter_type}' is initialised from the quantisation error, and 'finetuning_type: lora' "
        "does not quantise the weights",
        "write finetuning_type: qlora, or adapter_type: pissa, which is initialised from the weights",
    ),
    Where(
        {"finetuning_type": Not("full"), "adapter_type": names_where(ADAPTERS, {"start": "gradient"})},
        Clash(
            {"objective": Not("sft")},
            "is initialised from gradients of training rows, and gradients of {objective} need a reference or "
            "completions that do not exist yet",
            LORA + "pissa",
            key="adapter_type",
        ),
        *(
            Clash({key: GIVEN}, why, LORA + f"delete {key}", key="adapter_type")
            for key, why in (
                ("streaming", "draws from all rows, and 'streaming' reads them only during training"),
                ("teacher", "computes gradients before the teacher is loaded"),
                (
                    "sequence_parallel_size",
                    "computes gradients of whole rows on one rank, and here each rank has a part of a row",
                ),
            )
        ),
        text="'adapter_type: {adapter_type}' {}",
    ),
    Where(
        {"finetuning_type": Not("full"), "adapter_name_or_path": Not(None)},
        Custom(_refuse_keys_of_adapter_folder),
    ),
)

QUANTIZATION_RULES: Rules = (
    Clash(
        {"quantization": GIVEN, "finetuning_type": Not("qlora")},
        "'quantization: {quantization}' needs 'finetuning_type: qlora'; found {finetuning_type}",
        "write finetuning_type: qlora, or delete the line",
    ),
    Clash(
        {"quantization": "int8", "deepspeed": GIVEN},
        "int8 weights (torchao) cannot be moved by DeepSpeed",
        "write quantization: nf4, or train without deepspeed (DDP: each rank keeps the quantised base)",
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"quantization": "int8"},
        "int8 weights (torchao) cannot be sharded between ranks",
        "write quantization: nf4, or train without deepspeed and fsdp (DDP: each rank keeps the quantised base)",
    ),
    Clash(
        {"adapter_type": names_where(ADAPTERS, {"can_be_sharded": False}), "finetuning_type": Not("full")},
        "'adapter_type: {adapter_type}' does not work with sharded weights, and here ranks shard the weights",
        "write deepspeed: zero2, or adapter_type: lora or rslora",
    ),
    Clash(
        {"modules_to_save": GIVEN, "finetuning_type": Not("full")},
        "'modules_to_save' copies modules before the ranks have loaded their shards of the weights",
        "write deepspeed: zero2, or delete the line",
    ),
)
"""Choices that are refused if ranks shard the weights."""
