"""Making the model of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamtune.errors import ArgumentError
from streamtune.models import ModelOptions, init_model
from streamtune.models.quantize import PACKAGES
from streamtune.recipe import load_recipe
from streamtune.run.model import _add_adapters


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_that_came_quantised_are_not_trained_themselves(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[kind])
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
              "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    model = init_model(config, ModelOptions("float32", kind), vocab_size=64, token_ids=ids, seed=3)
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen3-4B\ndatasets:\n  - path: train.jsonl\n")
    with pytest.raises(ArgumentError, match=f"the checkpoint is quantised \\({kind}\\)") as caught:
        _add_adapters(load_recipe(path).recipe, model)
    assert "finetuning_type: qlora" in caught.value.fix
    path.write_text(path.read_text() + "finetuning_type: lora\n")
    adapted = _add_adapters(load_recipe(path).recipe, model)
    assert all("lora_" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
