"""Tiny models of many architectures as folders: a base, adapters on it, and the record of a run that made them."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from streamtune.base.adapters import base_of
from streamtune.models import train_tokenizer
from streamtune.models.quantize import quantize
from tests.conformance.reducer import build as build_any
from tests.exactness.families import FAMILIES, VOCAB, build
from tests.exactness.test_quantised import rounded
from tests.precision_kit import Float64, in_float64

CPU = torch.device("cpu")
ARCHITECTURES = {
    "llama": "dense, with biases",
    "qwen3": "norms of queries and keys",
    "gemma2": "tied embeddings, softcaps",
    "gemma3_text": "tied embeddings, windows",
    "phi3": "fused projections",
    "gpt_neox": "fused queries, keys and values; LayerNorm",
    "gpt2": "Conv1D, tied embeddings",
    "olmo2": "norms after the layers",
    "mixtral": "stacked experts",
    "gpt_oss": "stacked experts with biases, sinks",
    "deepseek_v3": "latent attention, experts with a router's correction",
    "qwen3_next": "gated delta rule, attention, experts",
    "mamba2": "no attention",
    "falcon_h1": "state space and attention in one layer",
}
"""Families of the table, with what is special about each."""


def make_base(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A model whose weights are away from their initial zeros and ones."""
    base = build(family, **overrides) if family in FAMILIES else build_any(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return base.to(dtype).eval()


def adapt(base: nn.Module, *, dora: bool = False, seed: int = 0, **settings: Any) -> Any:
    """Put adapters on every linear layer, away from their initial zeros."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft explains what it does about Conv1D and stacked experts
        model = get_peft_model(base, LoraConfig(use_dora=dora, **config))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                x.normal_(std=0.1)
            elif "magnitude" in name:
                x.mul_(1 + 0.1 * torch.rand_like(x))
            elif "modules_to_save" in name:
                x.add_(torch.randn_like(x) * 0.1)
    return model.eval()


@cache
def tokenizer() -> Any:
    """A tokenizer of 259 tokens with a chat template."""
    return train_tokenizer(["return a + b\n"], vocab_size=259)


def write_run(folder: Path, family: str, kind: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Write ``base/`` and the run ``run/`` with its ``final/``; return the model as it trained, computed in its dtype.

    Args:
        folder: An empty folder.
        family: Of :data:`ARCHITECTURES`.
        kind: ``full``, ``lora``, ``dora``, ``nf4`` or ``int8``.
        dtype: Of the base.
        overrides: Of the configuration.
    """
    base = make_base(family, dtype, **overrides)
    final = folder / "run/final"
    base.save_pretrained(folder / "base")
    tokenizer().save_pretrained(final)
    settings: dict[str, Any] = {"model_name_or_path": str(folder / "base"), "dtype": "auto", "seed": 0}
    if kind == "full":
        model = base
    else:
        if kind in ("nf4", "int8"):
            settings["quantization"] = kind
            quantize(base, kind, CPU)
        targets = {"target_modules": TARGETS[family]} if family in TARGETS else {}
        if kind == "dora" and family in STACKED:
            targets = {"target_modules": ["q_proj", "o_proj"]}
        model = adapt(base, dora=kind == "dora", **targets)
    model.save_pretrained(final)
    (folder / "run/run.json").write_text(json.dumps({"run": "0", "recipe": settings, "versions": {}}))
    return model


STACKED = ("mixtral", "deepseek_v3", "qwen3_next")
"""Their experts are one tensor, which peft gives no magnitude."""
TARGETS = {"mamba2": ["in_proj"], "falcon_h1": ["in_proj", "q_proj", "o_proj", "up_proj", "down_proj"]}
"""Peft refuses the projection that a kernel of these reads the weight of."""


def ids() -> Tensor:
    """Token ids, ``[2, 24]``."""
    return torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))


def truth(model: Any) -> Tensor:
    """Logits in fp64 of a model with or without adapters, merged or not, quantised or not; the model is used up."""
    base = base_of(model)
    base.set_attn_implementation("eager")  # transformers 5.17 chooses otherwise for a new model than for a loaded one
    for name, weight in [(name.partition("base_model.model.")[2] or name, x) for name, x in rounded(model)]:
        parent, _, last = name.rpartition(".")
        old: Any = base.get_submodule(name)
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=old.bias is not None)
        plain.weight = nn.Parameter(weight)
        plain.bias = None if old.bias is None else nn.Parameter(old.bias.detach().double())
        setattr(base.get_submodule(parent), last, plain)
    with Float64(), torch.no_grad():
        return in_float64(model).eval()(input_ids=ids()).logits.double()  # type: ignore[no-any-return]
