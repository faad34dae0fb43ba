"""Complete the sample prompts of a recipe, while a run trains and at its end.

While it trains the model stays streamed: a call without gradients honours its cache. Mode and random state are put
back, so the steps that follow are, bit for bit, those of a run without samples. Where ranks share the weights all of
them compute each token together and draw the same; otherwise rank 0 writes alone, and the others wait for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from streamtune import models, train
from streamtune.adapters import base_of
from streamtune.recipe.schema import Recipe
from streamtune.secrets import redact
from streamtune.tasks.task import Built

__all__ = ["SAMPLE_TEMPERATURE", "write_samples"]

SAMPLE_TEMPERATURE = 0.3
"""Of all samples. The likeliest token each time would go in circles where little is learnt yet."""


def write_samples(
    built: Built, recipe: Recipe, step: int, stop: train.StopRequest | None = None
) -> list[dict[str, Any]] | None:
    """Return the lines of ``samples.jsonl`` for a step; None where ``stop`` was requested. Called by all ranks.

    Args:
        built: The run; its model and random state are left as they are.
        recipe: Gives the prompts, and the seed of what is drawn.
        step: Steps taken.
        stop: Looked at before each prompt.
    """
    sample, world, together = recipe.sample, built.world, built.shares_weights
    assert sample is not None

    def write() -> list[str] | None:
        written = []
        for prompt in sample.prompts:
            stopped = stop is not None and stop.requested
            if world.any(stopped) if together else stopped:
                return None
            text = models.sample_text(
                base_of(built.model),
                built.tokenizer,
                prompt,
                max_new_tokens=sample.max_new_tokens,
                temperature=SAMPLE_TEMPERATURE,
                seed=recipe.seed,
                in_step=together,
            )
            written.append(text)
        return written

    routers: AbstractContextManager[Any] = built.handle.routers.silenced() if built.handle.layers else nullcontext()
    with train.preserve_rng(), train.evaluating(built.model), routers:
        found = world.together(write) if together else world.main(write)
    if found is None:
        return None
    return [
        {"step": step, "prompt": redact(prompt), "completion": redact(text)}
        for prompt, text in zip(sample.prompts, found, strict=True)
    ]
