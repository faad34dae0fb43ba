"""The table of what ranks that share a sequence are tested on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.precision_kit import ROUNDING

BOUND = ROUNDING
"""What a check may find: in fp32, by how much an error is above what plain torch's explains."""

SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
DYNAMIC = {
    "max_position_embeddings": 12,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}
"""Positions by the length of a row, above 12 tokens."""
LONGROPE = {
    "original_max_position_embeddings": 12,
    "rope_parameters": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 12,
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 4.0, 9.0, 20.0],
    },
}


@dataclass(frozen=True)
class Case:
    """A model, a batch and a schedule; ``check`` compares, or does something else, and says by how much it is off."""

    model: str
    kind: str = "plain"
    form: str = "auto"
    schedule: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    check: str = "loss"
    sizes: tuple[int, ...] = (2, 4)
    slow: bool = False

    @property
    def name(self) -> str:
        """As it is printed."""
        words = [self.check, self.model, self.kind, self.form]
        words += [f"{key}={value}" for key, value in {**self.schedule, **self.overrides}.items()]
        return "-".join(words)


DENSE = {
    "mlp_only_layers": [0, 1],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Qwen3-Next without experts."""
RECURRENT = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "granitemoehybrid",
    "bamba",
    "jamba",
    "zamba",
    "zamba2",
    "falcon_h1",
    "zaya",
    "minimax",
    "kimi_linear",
    "olmo_hybrid",
)
"""Families with states: gated delta rules, Mamba-1 and -2, linear attention, short convolutions."""

WITHOUT_POSITIONS = ("mamba", "mamba2")

KEPT = {"keep_kv": "device", "keep_attention": "device"}
HOST = {"offload": "host", "keep_kv": "host", "keep_attention": "host", "stream_grads": True}
CASES = [
    Case("llama", "multiturn"),
    Case("llama", "plain", "ring"),
    Case("qwen3", "right", schedule=KEPT),
    Case("gemma2", "left"),
    Case("gemma3_text", "left", "ring"),
    Case("gpt2", "sparse", "ring", schedule={"levels": 2, "offload": "host"}),
    Case("qwen3", "right", overrides=SIX_HEADS),
    Case("phi3", "masked", schedule={"keep_layers": 1}),
    Case("llama", "plain", check="lora"),
    Case("llama", check="packed"),
    Case("llama", check="token_losses", sizes=(2,)),
    Case("llama", check="teacher", sizes=(2,)),
    Case("llama", check="teacher", form="ring", sizes=(2,), slow=True),
    Case("llama", check="token_losses", form="ring", sizes=(2,), slow=True),
    Case("gemma3_text", "plain", check="scores"),
    Case("llama", check="branches", sizes=(2,)),
    Case("nemotron_h", check="pairs", sizes=(2,)),
    Case("mixtral", "right", check="routers", sizes=(2,)),
    Case("llama", "right", overrides=DYNAMIC),
    Case("phi3", "right", "ring", overrides=LONGROPE, sizes=(2,)),
    Case("qwen3", check="packed", overrides=DYNAMIC, sizes=(2,)),
    Case("qwen3", check="packed", form="ring", overrides=LONGROPE, slow=True),
    Case("llama", check="dropout", sizes=(2,)),
    Case("llama", check="preflight", sizes=(2,)),
    Case("llama", check="refused", sizes=(2,)),
    Case("qwen3", "right", check="calls", sizes=(4,)),
    Case("qwen3", "right", "ring", check="calls", slow=True),
    Case("qwen3", "right", check="groups", sizes=(4,)),
    Case("qwen3", "right", "ring", check="groups", sizes=(4,), slow=True),
    Case("llama", check="traffic"),
    Case("llama", check="traffic", form="ring"),
    Case("qwen3_next", "left", schedule=KEPT),
    Case("mamba2", "plain", sizes=(4,)),
    Case("lfm2", "right", schedule={"keep_layers": 1}, sizes=(2,)),
    Case("nemotron_h", check="packed"),
    Case("nemotron_h", check="branches"),
    Case("qwen3_next", "right", check="preflight", sizes=(2,)),
    Case("lfm2", check="state_traffic"),
    Case("lfm2", check="frozen", sizes=(2,)),
    Case("gemma2", "left", "ring", slow=True),
    Case("olmo2", "right", slow=True),
    Case("gpt_oss", "right", slow=True),
    Case("gpt_oss", "right", "ring", slow=True),
    Case("gpt2", "masked", "ulysses", slow=True),
    Case("mistral", "right", "ring", slow=True),
    Case("phi3", "masked", "ring", schedule={"keep_layers": 1}, slow=True),
    Case("qwen3", "multiturn", schedule=HOST, slow=True),
    Case("qwen3", "multiturn", "ring", schedule=HOST, slow=True),
    Case("qwen3", "left", "ring", schedule={"levels": 2, **HOST}, slow=True),
    Case("qwen3", "left", schedule={"keep_layers": 2}, slow=True),
    Case("gpt_neox", "plain", schedule={"grad_dtype": "param"}, slow=True),
    Case("gemma3n_text", "plain", slow=True),
    Case("llama4_text", "left", slow=True),
    Case("deepseek_v3", "right", slow=True),
    Case("deepseek_v3", "right", "ring", slow=True),
    Case("llama", "plain", "ring", check="lora", slow=True),
    Case("llama", "plain", "ring", check="packed", slow=True),
    Case("mistral", check="packed", overrides={"sliding_window": 6}, slow=True),
    Case("mistral", check="packed", form="ring", overrides={"sliding_window": 6}, slow=True),
    Case("gemma2", "left", "ring", check="scores", slow=True),
    Case("mistral", check="branches", overrides={"sliding_window": 6}, slow=True),
    Case("mistral", form="ring", check="branches", overrides={"sliding_window": 6}, slow=True),
    Case("mistral", check="pairs", overrides={"sliding_window": 6}, slow=True),
    Case("mistral", form="ring", check="pairs", overrides={"sliding_window": 6}, slow=True),
    *(Case(model, check="pairs", slow=True) for model in ("llama", "qwen3_next", "lfm2", "mamba2")),
    Case("mixtral", "right", "ring", check="routers", slow=True),
    Case("mixtral", "right", check="routes", slow=True),
    Case("qwen3", "right", "ring", check="dropout", slow=True),
    Case("qwen3", "right", "ring", check="preflight", slow=True),
    Case("gpt_oss", "right", check="preflight", slow=True),
    Case("qwen3_next", "right", check="dropout", overrides=DENSE, slow=True),
    *(Case(model, "left", slow=True) for model in RECURRENT),
    *(Case(model, "multiturn", slow=True) for model in WITHOUT_POSITIONS),
    *(Case(model, check="packed", slow=True) for model in ("qwen3_next", "lfm2", "mamba2", "minimax", "jamba")),
    *(Case(model, check="branches", slow=True) for model in ("qwen3_next", "lfm2", "mamba2", "mamba", "minimax")),
    *(Case(model, check="packs", slow=True) for model in ("qwen3_next", "lfm2", "mamba2", "nemotron_h", "mamba")),
    Case("qwen3_next", "multiturn", "ring", schedule={"levels": 2, **HOST}, slow=True),
    Case("nemotron_h", "right", schedule={"levels": 2, "keep_kv": "device"}, slow=True),
    Case("qwen3_5_text", "right", schedule={"keep_layers": 2}, slow=True),
    Case("qwen3_next", check="lora", slow=True),
    Case("lfm2", check="scores", slow=True),
    Case("qwen3_next", check="frozen", slow=True),
    Case("qwen3_next", "right", check="calls", slow=True),
    Case("nemotron_h", "right", check="groups", sizes=(4,), slow=True),
    Case("granitemoehybrid", "right", check="preflight", slow=True),
    Case("mamba2", check="preflight", slow=True),
]


def cases(size: int, slow: bool) -> list[Case]:
    """Those that a group of ``size`` ranks runs."""
    return [case for case in CASES if size in case.sizes and case.slow == slow]
