"""The options that :mod:`tools.support_matrix` combines, by groups, and the tables it makes of them.

An option is keys of a recipe, with the keys that it needs: ``eval_steps`` with ``val_size``. Losses and presets are
read from the recipe's types and DeepSpeed's presets. Other groups are samples: a key is shown with a few of its values,
also if no rule refuses any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from streamtune.base.adapters import ADAPTERS
from streamtune.distributed.deepspeed_config import PRESETS
from streamtune.recipe import RECIPES

__all__ = ["BASES", "GROUPS", "MODELS", "OF_THREE", "TABLES", "THEMES", "Option", "Table"]


@dataclass(frozen=True)
class Option:
    """An option of a recipe.

    Args:
        name: Name on the page.
        keys: Dotted key -> value.
        ranks: Number of ranks that it needs.
        objective: Name of the objective, for an option that is an objective and has no keys.
    """

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    objective: str | None = None

    @property
    def title(self) -> str:
        """The name as the page shows it."""
        return f"`{self.name}`" if ":" in self.name else self.name


@dataclass(frozen=True)
class Table:
    """A table of the page: each option of the row groups with each option of the column groups."""

    title: str
    text: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]


DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MIXTURE: dict[str, Any] = {
    **{key: value for key, value in DENSE.items() if key != "head_dim"},
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
MODELS = (DENSE, MIXTURE)

COMMON: dict[str, Any] = {
    "model": {"init": DENSE},
    "tokenizer": {"train": {"vocab_size": 320}},
    "engine": {"chunk_size": 32, "head_chunk_size": 16},
    "output_dir": "runs/support",
}
BASES: dict[str, dict[str, Any]] = {
    "sft": {"objective": "sft", **COMMON, "datasets": [{"path": "rows.jsonl"}]},
    "dpo": {"objective": "dpo", **COMMON, "datasets": [{"path": "demo-preferences", "max_rows": 32}]},
    "grpo": {
        "objective": "grpo",
        **COMMON,
        "datasets": [{"path": "demo-arithmetic", "name": "copy", "max_rows": 32}],
        "reward_funcs": ["exact_match"],
        "max_prompt_length": 64,
        "max_completion_length": 8,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
    },
}
"""Objective -> the recipe that options are added to."""


def _options(*keys: dict[str, Any], ranks: int = 1) -> tuple[Option, ...]:
    """Return options that are named by their first key."""
    return tuple(Option(_written(next(iter(each.items()))), each, ranks) for each in keys)


def _losses(objective: str) -> tuple[Option, ...]:
    """Return an option for each loss of an objective; ``exo_pair`` needs its smoothing, and ``gkd`` a teacher."""
    kinds = get_args(RECIPES[objective].model_fields["loss_type"].annotation)
    names = [name for kind in kinds for name in get_args(kind) or (kind,)]  # of one Literal, or of several
    more = {"exo_pair": {"label_smoothing": 0.1}, "gkd": {"teacher": "reference"}}
    return tuple(Option(name, {"loss_type": name, **more.get(name, {})}) for name in names)


def _written(item: tuple[str, Any]) -> str:
    key, value = item
    value = ANY.get(key, value)
    return f"{key}: {str(value).lower() if isinstance(value, bool) else value}"


HELD_OUT = {"val_size": 4}
PROMPT = {"sample.prompt": "Add 1.", "sample.max_new_tokens": 4}
ANY = {"engine.offload_dir": "DIR", "sample.prompt": "TEXT", "ref_model_name_or_path": "NAME", "teacher": "NAME"}
"""Keys with any value -> the word for it in a name."""

ON_WHOLE = [name for name, kind in ADAPTERS.items() if kind.start != "quantisation"]
QUANTISED = tuple(
    Option(f"qlora {kind}", {"finetuning_type": "qlora", "quantization": kind}) for kind in ("int8", "nf4")
)
PLACES = _options(
    {"engine.schedule": "fixed"},
    {"engine.offload": "device"},
    {"engine.offload": "host"},
    {"engine.offload": "disk", "engine.offload_dir": "."},
)
LEVELS = _options({"engine.levels": 1}, {"engine.levels": 2}, {"engine.keep_layers": 1})

GROUPS: dict[str, tuple[Option, ...]] = {
    "objectives": tuple(Option(name, objective=name) for name in BASES),
    "ways": (
        *_options({"finetuning_type": "full"}, {"trainable_layers": "last 1"}, {"finetuning_type": "lora"}),
        *QUANTISED,
    ),
    "adapters": (
        *(
            # lora_ga needs twice the rank in singular vectors; the tiny model's matrices have enough for 8.
            Option(f"adapter_type: {kind}", {"adapter_type": kind, "finetuning_type": "lora", "lora_r": 8})
            for kind in ON_WHOLE
        ),
        *(
            Option(f"adapter_type: {kind}", {"adapter_type": kind, "finetuning_type": "qlora"})
            for kind in ADAPTERS
            if kind not in ON_WHOLE
        ),
        Option("modules_to_save", {"modules_to_save": ["norm"], "finetuning_type": "lora"}),
    ),
    "quantised": QUANTISED,
    "sharing": (
        Option("DDP (nothing shared)", {"fsdp": False, "deepspeed": None}, ranks=2),
        *_options(*({"deepspeed": name} for name in PRESETS), ranks=2),
        *_options({"fsdp": True}, ranks=2),
    ),
    "sequence": tuple(
        Option(f"sequence_parallel: {form}", {"sequence_parallel_size": 2, "sequence_parallel": form}, ranks=2)
        for form in ("ulysses", "ring")
    ),
    "batches": _options(
        {"packing": True},
        {"overlength": "split"},
        {"overlength": "truncate"},
        {"train_batch_size": 8},
        {"gradient_accumulation_steps": 2},
        {"batching": "tokens", "tokens_per_batch": 8192},
        {"batching": "buckets", "tokens_per_batch": 8192},
        {"reasoning": "per_turn"},
        {"select_rows": "colm"},
        {"share_prefix": "always"},
    ),
    "engine": (
        *PLACES,
        *_options({"engine.offload_dir": "."}, {"engine.device_layers": 1}),
        *LEVELS[:2],
        *_options(
            {"engine.segment_size": 2},
            {"engine.keep_kv": "device"},
            {"engine.keep_attention": "device"},
            {"engine.keep_attention": "host"},
        ),
        LEVELS[2],
        *_options(
            {"engine.stream_grads": True},
            {"engine.grad_dtype": "param"},
            {"engine.fuse": "none"},
            {"engine.order": "layer"},
            {"engine.order": "chunk"},
            {"engine.weights": "device"},
            {"engine.weights": "host"},
            {"engine.optimizer": "device"},
            {"engine.optimizer": "host"},
            {"engine.fetch_dtype": "param"},
            {"engine.fetch_dtype": "bfloat16", "engine.weights": "host"},
        ),
    ),
    "places": PLACES,
    "levels": LEVELS,
    "run": _options(
        {"bf16": True},
        {"deterministic": True},
        {"optim_in_backward": True},
        {"clip_norm": "lagged", "optim_in_backward": True},
        {"optim_states": "float32"},
        {"optim_states": "bfloat16"},
        {"optim": "adamw_8bit"},
        {"optim": "adamw_torch_8bit"},
        {"optim": "adafactor"},
        {"optim": "lion"},
        {"optim": "mezo"},
        {"optim": "muon"},
        {"lr_groups": [{"match": "weight", "learning_rate": 1e-6}]},
        {"lr_layer_decay": 0.9},
        {"on_nan": "skip"},
        {"on_oom": "replan"},
        {"dataloader_num_workers": 2},
        {"lr_scaling": "sqrt", "lr_scaling_base": 8},
    ),
    "evaluation": _options(
        HELD_OUT,
        {"eval_steps": 1, **HELD_OUT},
        {"metric_for_best_model": "eval_loss", "save_steps": 1, **HELD_OUT},
        {"early_stopping_patience": 2, "metric_for_best_model": "eval_loss", "eval_steps": 1, **HELD_OUT},
        PROMPT,
        {"sample_steps": 1, **PROMPT},
        {"sample.held_out": 1, **HELD_OUT},
    ),
    "rollouts": _options(
        {"use_vllm": True},
        {"repetition_penalty": 1.1},
        {"prompts": "pass_rate"},
        {"allocation": "gvm"},
        {"allocation": "neyman"},
        {"num_iterations": 2},
        {"sft_steps": 2},
    ),
    "references": _options(
        {"ref_model_name_or_path": "reference"},
        {"precompute_ref_log_probs": True},
        {"reference_free": True},
    ),
    "models": (Option("dense model", {"model.init": DENSE}), Option("mixture of experts", {"model.init": MIXTURE})),
    "routers": (
        *_options({"router_aux_loss_coef": 0.001}, {"router_z_loss_coef": 0.001}, {"moe_balance": "global"}),
        Option(
            "moe_balance: global, router_aux_loss_coef: 0.001",
            {"moe_balance": "global", "router_aux_loss_coef": 0.001},
        ),
    ),
    "sft losses": (
        *_options(
            {"loss_type": "dft"},
            {"loss_type": "focal"},
            {"label_smoothing_factor": 0.1},
            {"z_loss_coef": 0.001},
            {"teacher": "reference"},
            {"kd_divergence": "jsd", "teacher": "reference"},
        ),
        Option("teacher: FILE", {"teacher": "taught.safetensors"}),
    ),
    "dpo losses": _losses("dpo"),
    "dpo keys": _options(
        {"label_smoothing": 0.1},
        {"rpo_alpha": 0.5},
        {"simpo_gamma": 1.0},
        {"cpo_alpha": 0.5},
        {"dpop_lambda": 10.0},
        {"desirable_weight": 2.0},
        {"length_normalization": True},
    ),
    "grpo losses": _losses("grpo"),
    "grpo keys": _options(
        {"importance_sampling_level": "token"},
        {"importance_sampling_level": "sequence"},
        {"scale_rewards": "batch"},
        {"delta": 4.0},
        {"num_generations": 1},
        {"mask_truncated_completions": True},
        {"use_bias_correction_kl": True, "beta": 0.1},
    ),
    "kl": _options({"beta": 0.04}),
}
"""Group -> its options."""

THEMES = {
    "ways": "what is trained",
    "adapters": "adapters",
    "quantised": "a quantised base",
    "sharing": "what ranks share",
    "sequence": "sequences on several ranks",
    "batches": "batches",
    "engine": "streaming",
    "run": "the run",
    "evaluation": "evaluation and samples",
    "rollouts": "rollouts",
    "references": "the reference",
    "grpo keys": "the loss",
    "kl": "the reference",
}
"""Group -> its name in tables of several."""

TABLES = (
    Table(
        "Objectives",
        "Each option in each objective.",
        ("ways", "sharing", "sequence", "batches", "engine", "run", "evaluation", "rollouts", "references"),
        ("objectives",),
    ),
    Table(
        "What ranks share",
        "Asked for two ranks. DDP is what ranks do without a key: nothing is shared but gradients.",
        ("sharing",),
        ("sharing", "sequence"),
    ),
    Table(
        "Several ranks",
        "Asked for two ranks as well.",
        ("ways", "batches", "engine", "run", "evaluation", "rollouts"),
        ("sharing", "sequence"),
    ),
    Table(
        "Full, lora, qlora",
        "`qlora` is `finetuning_type: qlora` with `quantization`.",
        ("batches", "engine", "run", "evaluation", "rollouts", "references"),
        ("ways",),
    ),
    Table(
        "Adapters",
        "With `finetuning_type: lora`, and on a quantised base.",
        ("adapters",),
        ("objectives", "quantised", "sharing", "sequence"),
    ),
    Table("Batches", "Packing, cut rows, and the size of a step.", ("engine", "run", "evaluation"), ("batches",)),
    Table(
        "Places of layer inputs", "Keys of `engine:` with the place of the layers' inputs.", ("engine",), ("places",)
    ),
    Table("Levels and kept layers", "Keys of `engine:` with what is computed again.", ("engine",), ("levels",)),
    Table(
        "Losses of sft",
        "Keys of the loss of a token: [objectives](../objectives.md).",
        ("sft losses",),
        ("ways", "batches", "sharing", "sequence"),
    ),
    Table("Routers", "Losses on the routers of a mixture of experts.", ("routers",), ("models",)),
    Table(
        "Losses of dpo",
        "Rows are values of `loss_type`; their formulas: [objectives](../objectives.md).",
        ("dpo losses",),
        ("dpo keys",),
    ),
    Table("References of dpo", "Rows are values of `loss_type`.", ("dpo losses",), ("references",)),
    Table(
        "Losses of grpo",
        "Columns are values of `loss_type`; their formulas: [objectives](../objectives.md).",
        ("grpo keys", "kl", "rollouts"),
        ("grpo losses",),
    ),
    Table("Rollouts", "Who writes completions, and how often they are trained on.", ("rollouts",), ("rollouts", "kl")),
)

OF_THREE = ("ways", "sharing", "sequence", "batches", "places", "levels", "rollouts", "kl")
"""Groups whose options are asked for three at a time as well."""
