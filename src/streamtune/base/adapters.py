"""The kinds of adapters that a recipe can name, and the model inside peft's wrapper.

    lora    rslora    dora     low-rank terms; scaled by alpha / sqrt(r); with a trained norm of each row (DoRA)
    pissa   olora              LoRA that starts from the leading part of each weight: of its SVD, or of its QR
    lora_ga                    LoRA that starts from the leading part of each weight's gradient
    loftq                      LoRA that starts from the quantisation error of each weight
    vera    ia3                trained vectors: on shared random matrices; on the outputs of layers
    oft     hra                a trained rotation of the input: in blocks; of r reflections
    loha    lokr    miss       Hadamard products; Kronecker products; sums over blocks of the input
    paca                       some columns of each weight, drawn at random

Every kind is a row of :data:`ADAPTERS`, against which recipes are checked, so neither torch nor peft is imported.
``streamtune.models.adapters`` adds, starts, saves and loads adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from streamtune.base.text import Status


@dataclass(frozen=True)
class AdapterKind:
    """A kind of adapter, such as LoRA or DoRA, that a recipe can name."""

    peft: str
    """Name of the type in peft."""
    options: Mapping[str, str]
    """Option of peft's configuration -> attribute of :class:`AdapterSpec` that sets it, or ``seed``."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options of peft's configuration that have a fixed value for this kind."""
    start: Literal["peft", "weights", "quantisation", "gradient"] = "peft"
    """Initial values: peft's default, or the leading part of each weight, of its quantisation error, or of its
    gradient. With ``weights`` and ``gradient`` a second, constant adapter subtracts these values."""
    start_keys: tuple[str, ...] = ()
    """Recipe keys that configure the initialisation."""
    columns: bool = False
    """True if some columns of each weight are trained, by ``PacaLinear`` instead of peft's layer."""
    largest_rank: Literal["any", "largest", "named", "each", "half", "columns"] = "any"
    """Upper bound of the rank: ``any`` (none), ``largest`` (the largest size of all layers), or per layer ``each`` (the
    number of singular values), ``half`` (half of them) or ``columns`` (the number of columns). ``named`` is ``each``,
    but only for layers that a recipe names; with ``all-linear`` smaller layers are accepted."""
    even_rank: bool = False
    """True if the rank must be even, because terms start in pairs that cancel."""
    divides_by_rows: bool = False
    """True if rows of the weight are divided by their norm, which a row of zeros does not allow."""
    on_quantised: bool = True
    """False if the base cannot be quantised: its weights are changed, read unquantised, or have gradients."""
    on_shared: bool = False
    """True if ranks can shard the weights: the adapters do not need whole weights, and only parameters are saved."""
    on_experts: bool = False
    """True if experts stored as one tensor can have adapters."""
    prefix: str = ""
    """Prefix of the parameters' names, if it is not peft's name of the type."""
    switches: tuple[str, ...] = ()
    """Switches with which other trainers select this kind."""
    status: Status = "stable"

    @property
    def is_lora(self) -> bool:
        """True if peft's type is LoRA, which also adapts parameter tensors and trains the rows of new tokens."""
        return self.peft == "LORA"

    @property
    def subtracts_initial_values(self) -> bool:
        """True if a second, constant adapter subtracts the initial values, so that outputs start unchanged."""
        return self.start in ("weights", "gradient")

    @property
    def written_as_lora(self) -> bool:
        """True if saving converts the adapters to a LoRA with other weights than the trained ones."""
        return self.subtracts_initial_values or self.columns

    @property
    def own_recipe_keys(self) -> tuple[str, ...]:
        """Keys of a recipe that this kind of adapter reads and some other kinds do not."""
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
    "lora": _lora(on_shared=True, on_experts=True),
    "rslora": _lora({"use_rslora": True}, on_shared=True, on_experts=True, switches=("use_rslora", "peft_use_rslora")),
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
    """Adapters to add to a model.

    Attributes:
        kind: Key of :data:`ADAPTERS`.
        r: Rank; for ``hra`` the number of reflections.
        alpha: Scale: the adapters' output is multiplied by ``alpha / r`` (``rslora``, ``lora_ga``: ``alpha /
            sqrt(r)``). None: ``2 * r``.
        dropout: Dropout on the adapters' input.
        target: ``all-linear``, or name endings of modules (``q_proj``) and of tensors (``gate_up_proj``).
            ``all-linear`` is every linear layer except head and routers, and experts stored as one tensor if peft
            supports them.
        exclude: Name endings of modules without adapters.
        ranks: Pattern of name endings -> rank.
        alphas: Pattern of name endings -> alpha.
        modules_to_save: Name endings of modules whose full weights are trained and saved with the adapters.
        block_size: Size of the rotated blocks (``oft``).
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
        """``alpha``, or its default ``2 * r``."""
        return 2 * self.r if self.alpha is None else self.alpha

    def peft_options(self, seed: int) -> dict[str, Any]:
        """Return the options with which peft's configuration of these adapters is made."""
        kind = self.adapter_kind
        options = {name: seed if value == "seed" else getattr(self, value) for name, value in kind.options.items()}
        mappings = {name: dict(value) for name, value in options.items() if isinstance(value, Mapping)}
        return {"peft_type": kind.peft, **kind.fixed, **options, **mappings}


def base_of(model: Any) -> Any:
    """Return the model inside peft's wrapper; a model without a wrapper is returned unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_adapter_name(name: str) -> bool:
    """Return True if a parameter or buffer of this name is a part of the adapters that peft has added to a model."""
    return any(part in name for part in NAME_PARTS)
