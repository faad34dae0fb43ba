"""Low-rank adapters (LoRA), through peft."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from streamtune.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:  # it imports every quantiser there is: two seconds that only adapters are worth
    from peft import PeftModel

__all__ = ["add_lora", "load_lora"]


def add_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target: Sequence[str] | str = "all-linear",
    seed: int = 0,
) -> PeftModel:
    """Freeze ``model`` and add trainable low-rank adapters to its linear layers.

    Args:
        model: The base; changed in place.
        r: Rank.
        alpha: The adapters' output is scaled by ``alpha / r``; ``None`` is ``2 * r``.
        dropout: On the adapters' input.
        target: ``all-linear`` (every linear layer but the head) or names of modules, such as ``q_proj``.
        seed: Of the adapters' random start. The caller's random state is left as it was.

    Raises:
        ArgumentError: A target that is not a linear layer of this model.
    """
    from peft import LoraConfig, get_peft_model

    if not isinstance(target, str):
        _check_targets(model, target)
    config = LoraConfig(
        r=r,
        lora_alpha=2 * r if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=target if isinstance(target, str) else list(target),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def load_lora(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Put the adapters saved in ``folder`` on their base, ready to be trained further.

    Raises:
        ArgumentError: They are a pickle.
    """
    from peft import PeftModel

    if not (folder / "adapter_model.safetensors").is_file():
        raise ArgumentError(f"{folder} has no adapters in safetensors", where="--resume", mend="use another checkpoint")

    return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def _check_targets(model: PreTrainedModel, target: Sequence[str]) -> None:
    linear = [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    for wanted in target:
        # peft's own rule: a target is a whole module name, or the end of one after a dot.
        if not any(re.fullmatch(rf"(.*\.)?{re.escape(wanted)}", name) for name in linear):
            names = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ArgumentError(
                f"{type(model).__name__} has no linear layer called '{wanted}'",
                where="lora_target",
                mend=did_you_mean(wanted, names) or f"choose among: {', '.join(names)}",
            )
