"""Kinds of adapters other than those of the table: on tied weights, embeddings and experts, modules saved whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from streamtune.errors import ArgumentError
from streamtune.programs.export.merge import adapted_modules, merged_weights, needs_untying
from streamtune.programs.export.write import write_merged
from tests.precision_kit import relative

from .cases import adapt, make_base, tokenizer, truth
from .test_table import EXACT


def exported(model: Any, folder: Path) -> Any:
    write_merged(model, tokenizer(), folder, dtype=None, shard_bytes=20_000)
    return AutoModelForCausalLM.from_pretrained(folder)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "head of a tied pair": ("gemma2", {"target_modules": ["lm_head", "q_proj"]}),
    "embedding of a tied pair": ("gemma2", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "saved whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "saved whole, tied": ("gemma2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "some tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [4, 7]}),
    "some tokens and the head of a tied pair": (
        "gemma2",
        {"target_modules": ["lm_head", "q_proj"], "trainable_token_indices": [4, 7]},
    ),
    "stacked experts": ("gpt_oss", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "two of the experts' tensors": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]},
    ),
    "rank-stabilised": ("qwen3", {"use_rslora": True}),
}


@pytest.mark.quick(
    "head of a tied pair", "some tokens and the head of a tied pair", "saved whole", "two of the experts' tensors"
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter(kind: str, tmp_path: Path) -> None:
    family, settings = KINDS[kind]
    model = adapt(make_base(family), **settings)
    if "some tokens" in kind:
        with torch.no_grad():
            for name, x in model.named_parameters():
                if "token_adapter" in name and "delta" in name:
                    x.add_(torch.randn_like(x))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = exported(model, tmp_path)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert found.config.tie_word_embeddings == ("tied" not in kind and family == "gemma2")
    assert relative(truth(make_base(family)), want := truth(model)) > 1e-3
    assert relative(truth(found), want) <= EXACT


def test_files_are_no_larger_than_asked_for(tmp_path: Path) -> None:
    exported(adapt(make_base("llama")), tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 21_500 for path in shards)  # names and shapes come on top


def test_adapters_in_bfloat16_are_merged_in_fp32() -> None:
    model = adapt(make_base("llama"))
    wide = copy.deepcopy(model)
    for name, x in model.named_parameters():
        if "lora_" in name:
            x.data = x.data.bfloat16()
    for name, x in wide.named_parameters():
        if "lora_" in name:
            x.data = x.data.bfloat16().float()
    found, want = dict(merged_weights(model)), dict(merged_weights(wide))
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert all(x.dtype == torch.bfloat16 for name, x in model.named_parameters() if "lora_" in name)


def test_other_kinds_are_refused_by_name() -> None:
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ArgumentError, match="learned prompt"):
        adapted_modules(get_peft_model(make_base("llama"), prompt))
    assert not needs_untying(make_base("gemma2"))
