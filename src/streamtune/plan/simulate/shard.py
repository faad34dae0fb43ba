"""Simulate one rank's part of a step whose sequences SP ranks share, as a step that runs on one rank.

The schedule cuts a rank's own T / SP tokens into chunks. The chunks of all ranks together are a chunk of the sequence,
and each rank has one shard of it. Outside attention a rank computes its own tokens. In attention it has all tokens and
1 / SP of the heads (ulysses), or receives the keys of the other ranks one after another (ring). So it has the bytes and
operations of a step whose sequence is SP times shorter and whose windows are SP times narrower, except for five points:

- Attention does SP times the work. The simulated step has H heads, T / SP queries and T / SP keys. A rank really
  computes H / SP heads with T queries and T keys (ulysses), or H heads with T / SP queries and T keys (ring). A
  kernel's inputs have the same number of bytes.
- If SP does not divide the key/value heads, ranks replicate heads: keys and values exist lcm(G, SP) / G times.
- Buffers to send and receive hold twice a chunk's queries, keys, values or outputs. In a ring they hold twice a rank's
  keys and values, and their gradients in fp32.
- Every rank holds the token ids, labels, positions and row starts of the whole sequence.
- The ranks scan a recurrent layer's shards one after another. Time in which a rank waits for its state is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import carries_states, keeps_keys
from streamtune.plan.simulate.cluster import Cluster, Form, HeadCounts
from streamtune.schedule import Schedule

WINDOWS = ("sliding_window", "local_attention", "attention_window", "window_size")
SPANS = ("attention_chunk_size",)
"""Settings of chunked attention, which restarts every so many tokens; what a chunk sees is then not linear."""

ID_BYTES, FP32 = 8, 4


@dataclass(frozen=True)
class RankShard:
    """The differences between a rank's shard of a row and a whole row with as many tokens.

    Attributes:
        size: Number of ranks that share the sequence; 1: the row is whole.
        form: Way of sharing the sequence.
        copies: Number of copies of keys and values that the ranks hold together.
    """

    size: int = 1
    form: Form = "ulysses"
    copies: float = 1.0

    def tokens(self, length: int) -> int:
        """Return the largest number of tokens that a rank has of a row of ``length`` tokens."""
        return max(2, -(-length // self.size)) if self.size > 1 else length

    def exchange_bytes(self, q: Tensor, k: Tensor) -> int:
        """Return the bytes of the all-to-all buffers for an attention of ``q`` [B, H, T, D] with keys ``k``."""
        if self.size == 1 or self.form == "ring":
            return 0
        own = q.nbytes * k.shape[1] // q.shape[1]  # the chunk's keys, or its values
        return int(2 * q.nbytes + 2 * 2 * own * self.copies)

    def passing_bytes(self, model: Any, length: int, rows: int, *, backward: bool) -> int:
        """Return the bytes of the ring's buffers for the last chunk: twice all of a rank's keys and values.

        In the backward their fp32 gradients are added.
        """
        if self.size == 1 or self.form == "ulysses":
            return 0
        heads, element = heads_of(model), model.get_input_embeddings().weight.element_size()
        each = rows * self.tokens(length) * heads.keys * (heads.key_dim + heads.value_dim)
        return int(2 * each * (element + (FP32 if backward else 0)))

    def keys_on_host(self, model: Any, schedule: Schedule, length: int, rows: int) -> int:
        """Return the bytes of replicated keys and values on the host, without the shard's own."""
        if schedule.keep_kv != "host" or self.copies == 1:
            return 0
        heads, layers = heads_of(model), len(decoder_layers(model)) - schedule.keep_layers
        element = model.get_input_embeddings().weight.element_size()
        each = rows * self.tokens(length) * heads.keys * (heads.key_dim + heads.value_dim) * element
        return int((self.copies - 1) * each * max(0, layers))

    def row_bytes(self, length: int, rows: int) -> int:
        """Return the bytes of token ids, labels, positions and row starts of the other ranks' tokens."""
        return 4 * ID_BYTES * rows * (length - self.tokens(length)) if self.size > 1 else 0


WHOLE_ROW = RankShard()
"""A row that is not shared between ranks."""


def shard_of(model: nn.Module, cluster: Cluster) -> RankShard:
    if cluster.sequence_size == 1:
        return RankShard()
    return RankShard(cluster.sequence_size, cluster.form, heads_of(model).copies(cluster))


def only_states(layer: nn.Module) -> bool:
    """Return True if a layer is recurrent and has no keys and values."""
    return carries_states(layer) and not keeps_keys(layer)


def heads_of(model: Any) -> HeadCounts:
    """Return the attention heads of a model, from its first configuration that has a number of heads.

    All counts are 0 if no layer has attention.
    """
    layers = decoder_layers(model)
    if layers and all(only_states(layer) for layer in layers):
        return HeadCounts(0, 0, 0, 0)
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    config = next((c for c in configs if getattr(c, "num_attention_heads", None)), configs[0])
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def asked(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value), 0)

    queries = asked("num_attention_heads", "n_head") or 1
    dim = asked("head_dim") or asked("hidden_size", "n_embd") // queries
    return HeadCounts(
        queries, asked("num_key_value_heads") or queries, asked("qk_head_dim") or dim, asked("v_head_dim") or dim
    )


@contextmanager
def narrow_windows(model: nn.Module, size: int) -> Iterator[None]:
    """Context manager: attention windows and spans in the model's configurations are ``size`` times narrower."""
    before: list[tuple[dict[str, Any], str, int]] = []
    if size > 1:
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            for name in (*WINDOWS, *SPANS):
                value = vars(config).get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    before.append((vars(config), name, value))
                    vars(config)[name] = -(-value // size)
    try:
        yield
    finally:
        for owner, name, value in before:
            owner[name] = value
