"""The predicted time of a row: a term in its tokens, and one in their square.

Operations of a forward pass, relative to which the backward is in about the same proportion for both terms:

    2 P T               matrix products with P weights of layers and head
    2 sum(H D) T^2      scores and weighted values of causal attention, H heads of D channels in each layer
    4 sum(H D) W T      the same of a layer whose tokens see W others at most
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from streamtune import models
from streamtune.base.adapters import base_of

WITHOUT_SCORES = ("linear_attention", "mamba", "conv", "moe", "mlp")
"""Types of layers whose work grows with the tokens alone."""


@dataclass(frozen=True)
class RowCost:
    """The cost of rows, in operations."""

    per_token: float = 1.0
    per_square: float = 0.0
    """of the square of a row's tokens"""

    def __call__(self, tokens: int, squares: int) -> float:
        """Return the cost of a unit, of its tokens and the sum of the squares of its rows' lengths."""
        return self.per_token * tokens + self.per_square * squares

    @classmethod
    def of_model(cls, model: Any) -> RowCost:
        """Return the cost of rows in a model, from its weights and its configuration."""
        base = base_of(model)
        config = base.config.get_text_config(decoder=True)
        embedding: Any = base.get_input_embeddings()
        tied = bool(getattr(config, "tie_word_embeddings", False))
        weights = sum(_active(name, parameter, config) for name, parameter in model.named_parameters())
        per_token = 2.0 * (weights - (0 if tied else models.count_weights(embedding.weight)))
        heads = getattr(config, "num_attention_heads", None)
        heads = heads if isinstance(heads, int) else 0
        head_dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // max(1, heads))
        types = getattr(config, "layer_types", None) or ["full_attention"] * getattr(config, "num_hidden_layers", 0)
        window, per_square = getattr(config, "sliding_window", None), 0.0
        for kind in types:
            if kind in WITHOUT_SCORES:
                continue
            if "sliding" in kind and window:
                per_token += 4.0 * heads * head_dim * window
            else:
                per_square += 2.0 * heads * head_dim
        return cls(max(per_token, 1.0), per_square)


def _active(name: str, parameter: nn.Parameter, config: Any) -> float:
    """Return the weights of a parameter that a token is multiplied with: of experts, those that it goes to."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = chosen / experts if ".experts." in name and experts and chosen else 1.0
    return share * models.count_weights(parameter)
