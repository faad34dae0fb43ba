"""Tiny, config-initialised models of the tested families, the batches they are tested on, and their gradients.

How a gradient is compared stands in :mod:`tests.precision_kit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.precision_kit import Reference, errors, reference_of, widened

BOUND = 2e-5
"""A relative error in fp32 that is another function's where it is 100 times as large, whatever the BLAS."""
VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "loss_type": "ForCausalLM",
    },
    "gpt_neox": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def build(family: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A model of a family with every parameter away from its initial zeros and ones."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **overrides})
    # Sinks and softcaps have no SDPA form: the reference of these two is their eager attention.
    implementation = "eager" if family in ("gpt_oss", "gemma2") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).train()


def batch(kind: str, rows: int = 3, length: int = 37) -> dict[str, Tensor]:
    """One batch of ``rows`` x ``length`` tokens: plain, masked, multiturn, sparse, right or left (padded, ragged)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if kind == "masked":
        labels[:, : length // 2] = -100
    elif kind == "multiturn":
        for row in range(rows):
            for start in range(row, length, 9):
                labels[row, start : start + 5] = -100
    elif kind == "sparse":
        labels[:, :] = -100
        labels[:, 11::13] = ids[:, 11::13]
    elif kind in ("right", "left"):
        for row, missing in enumerate((0, 5, 11)[:rows]):
            if missing:
                mask[row, slice(-missing, None) if kind == "right" else slice(0, missing)] = 0
        labels = labels.masked_fill(mask == 0, -100)
        if kind == "left":  # the first real token has no position before it that could predict it
            labels = labels.masked_fill(mask.cumsum(1) == 1, -100)
    out = {"input_ids": ids, "labels": labels}
    if kind in ("right", "left"):
        out |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    return out


BATCHES = ("plain", "masked", "multiturn", "sparse", "right", "left")


def gradients(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    loss: Callable[[torch.nn.Module, dict[str, Any]], Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the gradient of every trainable parameter (zeros where autograd gives none)."""
    model.zero_grad(set_to_none=True)
    value = model(**inputs).loss if loss is None else loss(model, inputs)
    value.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return value.detach(), grads


def reference(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    loss: Callable[[torch.nn.Module, dict[str, Any]], Tensor] | None = None,
) -> Reference:
    """Loss and gradients of an unstreamed model in its own dtype and in fp64; arguments as of :func:`gradients`."""
    return reference_of(model, lambda m: gradients(m, inputs, loss), lambda m: gradients(m, widened(inputs), loss))


def evaluation(
    model: torch.nn.Module, inputs: dict[str, Any], read: Callable[[Any], Tensor] = lambda output: output.loss
) -> Reference:
    """The loss alone, without gradients, or another number that is read from the output."""
    with torch.no_grad():
        return reference_of(model, lambda m: (read(m(**inputs)), {}), lambda m: (read(m(**widened(inputs))), {}))


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest of :func:`tests.precision_kit.errors`."""
    return max(errors(got, want).values())
