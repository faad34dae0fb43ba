"""Keys of what is trained: all weights or adapters, which kinds read them, and what they combine with."""

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
    having,
)

OF_ALL = ("lora_target", "lora_exclude", "modules_to_save", "adapter_name_or_path")
OF_KINDS = tuple(dict.fromkeys(key for kind in ADAPTERS.values() for key in kind.reads))
ADAPTER_KEYS = ("adapter_type", *OF_KINDS, *OF_ALL)
"""Keys that have no effect where all weights are trained."""
UNQUANTISED = tuple(name for name, kind in ADAPTERS.items() if not kind.on_quantised)


def unread_adapter_keys(recipe: Any) -> dict[str, str]:
    """Return the keys that are given and have no effect in this recipe, with the setting that says so."""
    given = [key for key in ADAPTER_KEYS if key in recipe.model_fields_set]
    if recipe.finetuning_type == "full":
        return dict.fromkeys(given, "finetuning_type: full")
    unread = [key for key in given if key in OF_KINDS and key not in ADAPTERS[recipe.adapter_type].reads]
    return dict.fromkeys(unread, f"adapter_type: {recipe.adapter_type}")


class AdapterKeys(Spec):
    """Keys of what is trained: every weight, or adapters."""

    finetuning_type: Literal["full", "lora", "qlora"] = "full"
    """Train every weight, or low-rank adapters beside frozen weights, which `qlora` keeps in 8 or 4 bits."""

    quantization: Literal["auto", "nf4", "int8"] = "auto"
    """Of the frozen linear layers and experts, with `finetuning_type: qlora`: `nf4` (4 bits, bitsandbytes) or `int8`
    (torchao); `auto` is nf4 on an accelerator and where ranks divide the weights (`zero3`, `fsdp`), else int8.
    Embedding, norms and head keep their dtype."""

    adapter_type: AdapterName = "lora"
    """Kind of the adapters: `lora`; `rslora` (scaled by alpha / sqrt(r)), `dora`; `pissa` and `olora` (LoRA that starts
    from the leading part of each weight), `lora_ga` (of its gradient), `loftq` (of what `qlora` takes from it); `vera`,
    `ia3`, `oft`, `hra`, `loha`, `lokr`, `miss`, which peft has; `paca` (`lora_r` columns of each weight)."""

    lora_r: Annotated[int, Field(ge=1), at_most(10**5)] = 16
    """Rank of the adapters."""

    lora_alpha: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """Scale of the adapters (the update is multiplied by lora_alpha / lora_r); without it, twice the rank."""

    lora_dropout: Fraction = 0.0
    """Dropout on the input of the adapters."""

    lora_target: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter, by the end of their name: `[q_proj, v_proj]`, or experts that are one tensor:
    `[gate_up_proj]`. `all-linear` is all but the head and routers."""

    lora_exclude: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Modules that get no adapter, by the end of their name: `[down_proj]`."""

    lora_rank_pattern: Annotated[dict[Text, Annotated[int, Field(ge=1), at_most(10**5)]], Field(default_factory=dict)]
    """Another rank for some modules, by a pattern of the end of their name: `{o_proj: 4}`."""

    lora_alpha_pattern: Annotated[
        dict[Text, Annotated[float, Field(gt=0), at_most(10**6)]], Field(default_factory=dict)
    ]
    """Another `lora_alpha` for some modules, by a pattern of the end of their name: `{o_proj: 8}`."""

    lora_ga_rows: Annotated[int, Field(ge=1), at_most(10**4)] = 8
    """`adapter_type: lora_ga`: rows, drawn by the seed, of whose gradient the adapters start. Gradients of several rows
    are summed on the host."""

    lora_ga_gamma: Annotated[float, Field(gt=0), at_most(10**9)] = 16.0
    """`adapter_type: lora_ga`: the first values of the adapters are divided by its square root."""

    loftq_iter: Annotated[int, Field(ge=1), at_most(100)] = 1
    """`adapter_type: loftq`: how often each weight is quantised without what its adapters start from. From 2 on the
    quantised base is one of its own, and what was taken from the weights is saved with the adapters."""

    oft_block_size: Annotated[int, Field(ge=2), at_most(10**5)] = 32
    """`adapter_type: oft`: size of the blocks that inputs are rotated in."""

    modules_to_save: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Modules that are trained whole and saved with the adapters, by the end of their name: `[lm_head]`."""

    adapter_name_or_path: Text | None = None
    """Folder with adapters to start from, in peft's format. Their kind, ranks and modules are theirs."""

    @property
    def starts_from_gradients(self) -> bool:
        """True if adapters start from gradients of rows, which a run computes before its first step."""
        return self.finetuning_type == "lora" and ADAPTERS[self.adapter_type].start == "gradient"

    @property
    def starts_from_quantisation(self) -> bool:
        """True if adapters start from what quantisation takes from the weights."""
        qlora = self.finetuning_type == "qlora" and self.adapter_name_or_path is None
        return qlora and ADAPTERS[self.adapter_type].start == "quantisation"


def _decided_by_a_folder(recipe: Any) -> Iterator[Refusal]:
    for key in ADAPTER_KEYS:
        if key in recipe.model_fields_set and key != "adapter_name_or_path":
            what = f"'{key}' is decided by the adapters in {recipe.adapter_name_or_path}"
            yield Refusal(key, what, "delete one of the two lines")


OTHERS = ", ".join(f"adapter_type: {kind}" for kind in ADAPTERS if kind not in UNQUANTISED)
LORA = "write adapter_type: lora, or "

ADAPTER_RULES: Rules = (
    Clash(
        {"adapter_type": having(ADAPTERS, {"on_quantised": False}), "finetuning_type": "qlora"},
        "'adapter_type: {adapter_type}' computes with the weights themselves, and 'finetuning_type: qlora' keeps them "
        "in 4 or 8 bits",
        f"write finetuning_type: lora, or one of: {OTHERS}",
    ),
    Clash(
        {"adapter_type": having(ADAPTERS, {"start": "quantisation"}), "finetuning_type": "lora"},
        "'adapter_type: {adapter_type}' starts from what quantisation takes from the weights, and "
        "'finetuning_type: lora' keeps them whole",
        "write finetuning_type: qlora, or adapter_type: pissa, which starts from the weights themselves",
    ),
    Where(
        {"finetuning_type": Not("full"), "adapter_type": having(ADAPTERS, {"start": "gradient"})},
        Clash(
            {"objective": Not("sft")},
            "starts from the gradient of rows that are trained on, and {objective} has a reference, or completions "
            "that are not written yet",
            LORA + "pissa",
            key="adapter_type",
        ),
        *(
            Clash({key: GIVEN}, why, LORA + f"delete {key}", key="adapter_type")
            for key, why in (
                ("streaming", "draws rows from all of them, and 'streaming' reads rows as training goes"),
                ("teacher", "computes gradients before there is a teacher"),
                (
                    "sequence_parallel_size",
                    "computes gradients on one rank, and ranks that share a sequence have parts of it",
                ),
            )
        ),
        text="'adapter_type: {adapter_type}' {}",
    ),
    Where(
        {"finetuning_type": Not("full"), "adapter_name_or_path": Not(None)},
        Custom(_decided_by_a_folder),
    ),
)

QUANTIZATION_RULES: Rules = (
    Clash(
        {"quantization": GIVEN, "finetuning_type": Not("qlora")},
        "'quantization: {quantization}' needs frozen weights, and 'finetuning_type' is {finetuning_type}",
        "write finetuning_type: qlora, or delete the line",
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"quantization": "int8"},
        "weights that torchao quantised (int8) cannot be divided between ranks",
        "write quantization: nf4, or deepspeed: zero2 (each rank keeps the quantised base)",
    ),
    Clash(
        {"adapter_type": having(ADAPTERS, {"on_shared": False}), "finetuning_type": Not("full")},
        "adapters of kind {adapter_type} are made of whole weights or have values that are no parameters, and ranks "
        "that share the weights have and save neither",
        "write deepspeed: zero2, or adapter_type: lora or rslora",
    ),
    Clash(
        {"modules_to_save": GIVEN, "finetuning_type": Not("full")},
        "modules that are saved whole are copies, which are made before ranks that share the weights have any",
        "write deepspeed: zero2, or delete the line",
    ),
)
"""Choices that are refused where ranks share the weights."""
