"""The adapter types that a recipe can select with ``adapter_type``.

    lora      low-rank adapters (LoRA)
    rslora    LoRA scaled by alpha / sqrt(r)
    dora      LoRA with a trained norm of each weight row
    pissa     LoRA initialised from the largest singular values of each weight
    olora     LoRA initialised from the QR decomposition of each weight
    lora_ga   LoRA initialised from the gradient of each weight
    loftq     LoRA initialised from the quantisation error of each weight
    vera      trained vectors that scale frozen random matrices, shared by all layers
    ia3       trained vectors that scale the outputs of layers
    oft       trained block-diagonal rotation of a layer's input
    hra       r trained Householder reflections of a layer's input
    loha      Hadamard product of low-rank matrices
    lokr      Kronecker product of matrices
    miss      one trained matrix, applied to the sum of the input's blocks
    paca      training of some columns of each weight, drawn at random

Recipes are checked against :data:`ADAPTERS` before torch and peft are imported. ``streamtune.models.adapters`` adds,
initialises, saves and loads the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from streamtune.base.text import Status


@dataclass(frozen=True)
class AdapterKind:
    """An adapter type, such as LoRA or DoRA."""

    peft: str
    """Name of the type in ``peft.PeftType``."""
    options: Mapping[str, str]
    """Option of the peft configuration -> attribute of :class:`AdapterSpec` with its value, or ``seed``."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options of the peft configuration whose value is the same in every recipe."""
    start: Literal["peft", "weights", "quantisation", "gradient"] = "peft"
    """Source of the initial adapter weights. ``peft``: peft's default. ``weights``, ``quantisation``, ``gradient``: a
    low-rank approximation of each weight, of its quantisation error, or of its gradient."""
    start_keys: tuple[str, ...] = ()
    """Recipe keys that configure the initialisation."""
    columns: bool = False
    """True if columns of the weight itself are trained, by ``PacaLinear``, in place of a peft layer."""
    largest_rank: Literal["any", "largest", "named", "each", "half", "columns"] = "any"
    """Upper bound of the rank. ``any``: none. ``largest``: the largest number of rows or columns of all adapted
    weights. Bounds for each weight are ``each`` (the smaller of its two dimensions), ``half`` (half of that) and
    ``columns`` (its columns). ``named`` is ``each``, but with ``all-linear`` only layers in ``lora_rank_pattern`` are
    checked."""
    even_rank: bool = False
    """True if the rank must be even, because initial Householder reflections come in equal pairs, which cancel."""
    divides_by_rows: bool = False
    """True if each weight row is divided by its norm, so that a row of zeros is an error."""
    on_quantised: bool = True
    """False if the base model cannot be quantised: its weights are changed, read unquantised, or need gradients."""
    can_be_sharded: bool = False
    """True if the base model's weights can be sharded (ZeRO-3, FSDP2)."""
    on_experts: bool = False
    """True if mixture-of-experts weights that are stored as one tensor (``gate_up_proj``) can have adapters."""
    prefix: str = ""
    """Prefix of the adapter parameters' names; empty: ``peft`` in lower case, with an underscore (``lora_``)."""
    switches: tuple[str, ...] = ()
    """Options of other training tools that select this adapter type, such as ``use_dora``; accepted as aliases."""
    status: Status = "stable"

    @property
    def is_lora(self) -> bool:
        """True if peft's type is ``LORA``, which alone supports ``target_parameters`` and
        ``trainable_token_indices``."""
        return self.peft == "LORA"

    @property
    def subtracts_initial_values(self) -> bool:
        """True if a second, frozen adapter subtracts the initial weights, so that the model's outputs start
        unchanged."""
        return self.start in ("weights", "gradient")

    @property
    def written_as_lora(self) -> bool:
        """True if the adapters are converted to a plain LoRA when they are saved."""
        return self.subtracts_initial_values or self.columns

    @property
    def own_recipe_keys(self) -> tuple[str, ...]:
        """Recipe keys that this adapter type reads, but not every adapter type, such as ``lora_r``."""
        return (*dict.fromkeys(KEYS[value] for value in self.options.values() if value in KEYS), *self.start_keys)


KEYS = {
    "r": "lora_r",
    "scale": "lora_alpha",
    "dropout": "lora_dropout",
    "ranks": "lora_rank_pattern",
    "alphas": "lora_alpha_pattern",
    "block_size": "oft_block_size",
}
"""Attribute of :class:`AdapterSpec` that only some kinds have -> key of a recipe that sets it."""

LOW_RANK = {
    "r": "r",
    "lora_alpha": "scale",
    "lora_dropout": "dropout",
    "rank_pattern": "ranks",
    "alpha_pattern": "alphas",
}
COLUMNS = {"r": "r", "lora_alpha": "r", "rank_pattern": "ranks", "alpha_pattern": "ranks"}  # alpha = r: a scale of 1
_lora = partial(AdapterKind, "LORA", LOW_RANK, largest_rank="named")

ADAPTERS: Mapping[str, AdapterKind] = {
    "lora": _lora(can_be_sharded=True, on_experts=True),
    "rslora": _lora(
        {"use_rslora": True}, can_be_sharded=True, on_experts=True, switches=("use_rslora", "peft_use_rslora")
    ),
    "dora": _lora({"use_dora": True}, divides_by_rows=True, switches=("use_dora", "peft_use_dora")),
    "pissa": _lora(start="weights", largest_rank="each", on_quantised=False, switches=("pissa_init",)),
    "olora": _lora(start="weights", largest_rank="each", on_quantised=False),
    "lora_ga": _lora(
        {"use_rslora": True},
        start="gradient",
        start_keys=("lora_ga_rows", "lora_ga_gamma"),
        largest_rank="half",
        on_quantised=False,
    ),
    "loftq": _lora(start="quantisation", largest_rank="each", start_keys=("loftq_iter",)),
    "vera": AdapterKind("VERA", {"r": "r", "vera_dropout": "dropout", "projection_prng_key": "seed"}),
    "ia3": AdapterKind("IA3", {}, {"feedforward_modules": []}),
    "oft": AdapterKind("OFT", {"oft_block_size": "block_size"}, {"r": 0}),
    "hra": AdapterKind("HRA", {"r": "r"}, largest_rank="largest", even_rank=True, on_quantised=False),
    "loha": AdapterKind(
        "LOHA", {"r": "r", "alpha": "scale"}, largest_rank="largest", on_quantised=False, prefix="hada_"
    ),
    "lokr": AdapterKind("LOKR", {"r": "r", "alpha": "scale"}, largest_rank="largest", on_quantised=False),
    "miss": AdapterKind("MISS", {"r": "r"}, largest_rank="largest"),
    "paca": AdapterKind(
        "LORA", COLUMNS, columns=True, largest_rank="columns", on_quantised=False, status="experimental"
    ),
}
"""Kind, named as in ``adapter_type`` -> row."""

if TYPE_CHECKING:
    AdapterName = str
else:
    AdapterName = Literal[tuple(ADAPTERS)]

NAMED_STARTS = sorted(
    (name for name, kind in ADAPTERS.items() if kind.start != "peft"),
    key=lambda name: ("weights", "quantisation", "gradient").index(ADAPTERS[name].start),
)
"""Kinds whose names are values of peft's ``init_lora_weights``."""
NAME_PARTS = (
    *sorted({kind.prefix or f"{kind.peft.lower()}_" for kind in ADAPTERS.values()}),
    ".modules_to_save.",
    "trainable_tokens_",
)
"""Parts of the names that peft gives to parameters that it adds to a model."""


@dataclass(frozen=True)
class AdapterSpec:
    """Type, size and target layers of the adapters to add to a model.

    Attributes:
        kind: Key of :data:`ADAPTERS`.
        r: Rank; for ``hra`` the number of reflections.
        alpha: Scale: the adapters' output is multiplied by ``alpha / r`` (``rslora``, ``lora_ga``: ``alpha /
            sqrt(r)``). None: ``2 * r``.
        dropout: Dropout on the adapters' input.
        target: ``all-linear``, or name endings of modules (``q_proj``) and of tensors (``gate_up_proj``). An ending
            of a module may be a regular expression. ``all-linear`` may stand among them.
            ``all-linear`` is every linear layer except head and routers, and experts stored as one tensor if peft
            supports them.
        exclude: Name endings of modules without adapters.
        ranks: Regular expression for name endings -> rank.
        alphas: Regular expression for name endings -> alpha.
        modules_to_save: Name endings of modules whose full weights are trained and saved with the adapters.
        block_size: Number of rows of each rotated block (``oft``).
    """

    kind: str = "lora"
    r: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    target: Sequence[str] | str = "all-linear"
    exclude: Sequence[str] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: Sequence[str] = ()
    block_size: int = 32

    @property
    def adapter_kind(self) -> AdapterKind:
        return ADAPTERS[self.kind]

    @property
    def scale(self) -> float:
        """``alpha``, or ``2 * r`` if it is None."""
        return 2 * self.r if self.alpha is None else self.alpha

    def peft_options(self, seed: int) -> dict[str, Any]:
        """Return the keyword arguments of the peft configuration, with ``peft_type``."""
        kind = self.adapter_kind
        options = {name: seed if value == "seed" else getattr(self, value) for name, value in kind.options.items()}
        mappings = {name: dict(value) for name, value in options.items() if isinstance(value, Mapping)}
        return {"peft_type": kind.peft, **kind.fixed, **options, **mappings}


def base_of(model: Any) -> Any:
    """Return the model inside a ``PeftModel``; any other model is returned unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_adapter_name(name: str) -> bool:
    """Return True if peft added the parameter or buffer of this name to the model."""
    return any(part in name for part in NAME_PARTS)
