"""Describe one rank's part of a step with sequence parallelism, so that the step can be simulated on one rank.

SP ranks share each sequence of T tokens. The schedule divides a rank's own T / SP tokens into chunks. Chunk i of the
sequence consists of chunk i of every rank. Outside attention a rank computes its own tokens. In attention it has all
tokens and 1 / SP of the heads (ulysses), or receives the keys of other ranks one after another (ring). So a rank has
the bytes and operations of a step whose sequence is SP times shorter and whose windows are SP times narrower, except
for five points:

- Attention does SP times the work. The simulated step has H heads, T / SP queries and T / SP keys. A rank really
  computes H / SP heads with T queries and T keys (ulysses), or H heads with T / SP queries and T keys (ring).
- If SP does not divide the G key/value heads, ranks replicate heads: keys and values exist lcm(G, SP) / G times.
- Send and receive buffers have twice the size of a chunk's queries, keys, values or outputs. In a ring they have twice
  the size of a rank's keys and values, and in the backward also of their fp32 gradients.
- Every rank stores the token ids, labels, positions and row starts of the whole sequence.
- The ranks scan a recurrent layer's shards one after another. Time in which a rank waits for its state is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import caches_keys, carries_states
from streamtune.plan.simulate.cluster import Cluster, Form, HeadCounts
from streamtune.schedule import Schedule

WINDOWS = ("sliding_window", "local_attention", "attention_window", "window_size")
CHUNKED_ATTENTION = ("attention_chunk_size",)
"""Configuration keys of chunked attention, which restarts after some tokens, so memory is not linear in the chunks."""

ID_BYTES, FP32 = 8, 4


@dataclass(frozen=True)
class RankShard:
    """One rank's shard of a row, compared with a whole row of the same number of tokens.

    Attributes:
        size: Number of ranks that share the sequence; 1: a whole row.
        form: Kind of sequence parallelism, ``ulysses`` or ``ring``.
        kv_copies: Number of copies of a sequence's keys and values on all ranks together.
    """

    size: int = 1
    form: Form = "ulysses"
    kv_copies: float = 1.0

    def shard_tokens(self, length: int) -> int:
        """Return the largest number of tokens that a rank has of a row with ``length`` tokens."""
        return max(2, -(-length // self.size)) if self.size > 1 else length

    def all_to_all_buffer_bytes(self, q: Tensor, k: Tensor) -> int:
        """Return the bytes of the all-to-all buffers of attention with queries ``q`` [B, H, T, D] and keys ``k``."""
        if self.size == 1 or self.form == "ring":
            return 0
        own = q.nbytes * k.shape[1] // q.shape[1]  # the chunk's keys, or its values
        return int(2 * q.nbytes + 2 * 2 * own * self.kv_copies)

    def ring_buffer_bytes(self, model: Any, length: int, rows: int, *, backward: bool) -> int:
        """Return the bytes of the ring buffers at the last chunk: two copies of a rank's keys and values.

        In the backward the buffers also have two copies of the fp32 gradients of keys and values.
        """
        if self.size == 1 or self.form == "ulysses":
            return 0
        heads, element = count_heads(model), model.get_input_embeddings().weight.element_size()
        each = rows * self.shard_tokens(length) * heads.keys * (heads.key_dim + heads.value_dim)
        return int(2 * each * (element + (FP32 if backward else 0)))

    def replicated_host_kv_bytes(self, model: Any, schedule: Schedule, length: int, rows: int) -> int:
        """Return the host bytes of keys and values that exist only because heads are replicated."""
        if schedule.keep_kv != "host" or self.kv_copies == 1:
            return 0
        heads, layers = count_heads(model), len(decoder_layers(model)) - schedule.keep_layers
        element = model.get_input_embeddings().weight.element_size()
        each = rows * self.shard_tokens(length) * heads.keys * (heads.key_dim + heads.value_dim) * element
        return int((self.kv_copies - 1) * each * max(0, layers))

    def other_ranks_input_bytes(self, length: int, rows: int) -> int:
        """Return the bytes of token ids, labels, positions and row starts of the other ranks' tokens."""
        return 4 * ID_BYTES * rows * (length - self.shard_tokens(length)) if self.size > 1 else 0


WHOLE_ROW = RankShard()
"""A row that is not shared between ranks."""


def rank_shard(model: nn.Module, cluster: Cluster) -> RankShard:
    """Return one rank's part of each row; a whole row if ranks do not share sequences."""
    if cluster.sequence_size == 1:
        return RankShard()
    return RankShard(cluster.sequence_size, cluster.form, count_heads(model).kv_copies(cluster))


def is_purely_recurrent(layer: nn.Module) -> bool:
    """Return True if a layer is recurrent and has no keys and values."""
    return carries_states(layer) and not caches_keys(layer)


def count_heads(model: Any) -> HeadCounts:
    """Return numbers and sizes of a model's attention heads, from its first configuration that has a number of heads.

    Of a model for images and text this is the text's configuration. A value that differs between layers is the largest.
    All counts are 0 if no layer has attention.
    """
    layers = decoder_layers(model)
    if layers and all(is_purely_recurrent(layer) for layer in layers):
        return HeadCounts(0, 0, 0, 0)
    own = [m.config for m in model.modules() if hasattr(m, "config")]
    configs = [c.get_text_config(decoder=True) if hasattr(c, "get_text_config") else c for c in own]
    config = next((c for c in configs if _largest_value(c, "num_attention_heads")), configs[0])
    queries = _largest_value(config, "num_attention_heads", "n_head") or 1
    dim = _largest_value(config, "head_dim") or _largest_value(config, "hidden_size", "n_embd") // queries
    keys = _largest_value(config, "num_key_value_heads") or queries
    if getattr(config, "new_decoder_architecture", False):  # Falcon: keys are repeated for every query head
        keys = queries
    elif getattr(config, "multi_query", False):  # Falcon and GPT-BigCode
        keys = 1
    return HeadCounts(
        queries, keys, _largest_value(config, "qk_head_dim") or dim, _largest_value(config, "v_head_dim") or dim
    )


def _largest_value(config: Any, *names: str) -> int:
    """Return the first of these values that is a number above 0, the largest if layers differ; 0 if there is none."""
    for name in names:
        try:
            values = [getattr(config, name, None)]
        except Exception:  # transformers raises if layers differ and have no common value
            values = [getattr(layer, name, None) for layer in getattr(config, "per_layer_config", None) or ()]
        if found := max((value for value in values if isinstance(value, int)), default=0):
            return found
    return 0


@contextmanager
def narrow_windows(model: nn.Module, factor: int) -> Iterator[None]:
    """Context manager in which attention windows in the model's configurations are ``factor`` times narrower."""
    before: list[tuple[dict[str, Any], str, int]] = []
    if factor > 1:
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            for name in (*WINDOWS, *CHUNKED_ATTENTION):
                value = vars(config).get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    before.append((vars(config), name, value))
                    vars(config)[name] = -(-value // factor)
    try:
        yield
    finally:
        for owner, name, value in before:
            owner[name] = value
