"""A recipe to a benchmark of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from streamtune import models, plan
from streamtune.errors import ArgumentError
from streamtune.recipe.build import choose_device, choose_quantization, make_schedule, quiet_libraries
from streamtune.recipe.loader import LoadedRecipe

__all__ = ["bench_recipe"]


def bench_recipe(
    loaded: LoadedRecipe,
    *,
    lengths: Sequence[int],
    modes: Sequence[plan.Mode],
    repeats: int,
    packed_rows: int = 0,
    notify: Callable[[str], None] = lambda message: None,
) -> plan.BenchReport:
    """Measure the recipe's model with its schedule, precision, adapters and batch size on random tokens.

    Raises:
        ArgumentError: A length, a mode or the number of repeats makes no sense.
    """
    if not lengths or any(length < 2 for length in lengths):
        raise ArgumentError("--lengths takes numbers of tokens from 2 up", mend="write --lengths 2048,8192")
    if unknown := [mode for mode in modes if mode not in plan.MODES]:
        raise ArgumentError(f"--modes does not know {unknown[0]!r}", mend=f"choose from {', '.join(plan.MODES)}")
    if repeats < 1:
        raise ArgumentError("--repeats takes a number from 1 up")
    if packed_rows and not 2 <= packed_rows <= min(lengths) // 2:
        raise ArgumentError(
            f"--packed-rows cuts every length into rows of two tokens or more; found {packed_rows}",
            mend="write --packed-rows 16 --lengths 16384",
        )
    recipe = loaded.recipe
    return plan.run_bench(
        partial(_make_model, recipe.model_dump(), str(choose_device(recipe.device))),
        lengths=lengths,
        modes=modes,
        schedule=make_schedule(recipe.engine),
        batch_size=recipe.per_device_train_batch_size,
        packed_rows=packed_rows,
        repeats=repeats,
        autocast=recipe.bf16,
        notify=notify,
    )


def _make_model(recipe: dict[str, Any], device: str) -> Any:
    """The recipe's model, in a process of its own: the recipe comes as plain values."""
    quiet_libraries(torch.device(device))
    quantization = choose_quantization(recipe["finetuning_type"], recipe["quantization"], torch.device(device))
    if recipe["model_name_or_path"] is not None:
        model: Any = models.load_model(
            recipe["model_name_or_path"],
            dtype=recipe["dtype"],
            device=device,
            trust_remote_code=recipe["trust_remote_code"],
            quantization=quantization,
        )
    else:
        init = recipe["model"]["init"]
        model = models.init_model(
            init,
            vocab_size=init.get("vocab_size", recipe["tokenizer"]["train"]["vocab_size"]),
            token_ids={},
            dtype=recipe["dtype"],
            device=device,
            seed=recipe["seed"],
            quantization=quantization,
        )
    if recipe["finetuning_type"] != "full":
        model = models.add_lora(
            model,
            r=recipe["lora_r"],
            alpha=recipe["lora_alpha"],
            dropout=recipe["lora_dropout"],
            target=recipe["lora_target"],
            seed=recipe["seed"],
        )
    return model
