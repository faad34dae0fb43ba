"""A rank's part of a step whose sequences several ranks share, as a step that the engine can run on one rank.

The schedule cuts a rank's own T / SP tokens into chunks. All ranks' chunks together are a chunk of the sequence, and
each rank's part of it is its shard. Everything but attention is computed by the rank that has the token; for attention
a rank has all tokens on heads / SP (ulysses), or receives the keys of all of them one part after another (ring). In
bytes and operations that is the step of a sequence SP times shorter, with windows SP times narrower, except for this:

- Attention does SP times the work: a shard's H heads of T / SP queries over T / SP keys replace H / SP heads of T
  queries over T keys (ulysses), or H heads of T / SP queries over T keys (ring). The inputs of a kernel have the
  same number of bytes.
- If ranks do not divide the key/value heads, several hold the same: keys and values are held lcm(G, SP) / G times.
- An exchange needs buffers to send and to receive: a chunk's queries, keys, values or outputs, twice; in a ring all
  keys and values of a rank, and their gradients in fp32, twice.
- Token ids, labels, positions and the starts of packed rows are whole on every rank.
- A layer with a state scans the shards of a chunk on one rank after another. Its operations are those of a shard; the
  time that a rank waits for its state is not counted.
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
"""Spans of chunked attention restart every so many tokens: what a chunk sees is then not linear."""

ID_BYTES, FP32 = 8, 4


@dataclass(frozen=True)
class RankShard:
    """The differences between a shard and a row of as many tokens.

    Attributes:
        size: Ranks that share the sequence; 1 is not a shard.
        form: How they share it.
        copies: How many times keys and values are held, by all of them together.
    """

    size: int = 1
    form: Form = "ulysses"
    copies: float = 1.0

    def tokens(self, length: int) -> int:
        """Return the tokens of the rank that has most of a row of ``length``."""
        return max(2, -(-length // self.size)) if self.size > 1 else length

    def exchange_bytes(self, q: Tensor, k: Tensor) -> int:
        """Return the bytes to send and receive for an attention of ``q`` [B, H, T, D] with keys ``k``."""
        if self.size == 1 or self.form == "ring":
            return 0
        own = q.nbytes * k.shape[1] // q.shape[1]  # the chunk's keys, or its values
        return int(2 * q.nbytes + 2 * 2 * own * self.copies)

    def passing_bytes(self, model: Any, length: int, rows: int, *, backward: bool) -> int:
        """Return the bytes of all of a rank's keys and values, which a ring sends and receives with the last chunk; in
        the backward also of their gradients.
        """
        if self.size == 1 or self.form == "ulysses":
            return 0
        heads, element = heads_of(model), model.get_input_embeddings().weight.element_size()
        each = rows * self.tokens(length) * heads.keys * (heads.key_dim + heads.value_dim)
        return int(2 * each * (element + (FP32 if backward else 0)))

    def keys_on_host(self, model: Any, schedule: Schedule, length: int, rows: int) -> int:
        """Return the bytes of the copies of keys and values on the host in addition to the shard's own."""
        if schedule.keep_kv != "host" or self.copies == 1:
            return 0
        heads, layers = heads_of(model), len(decoder_layers(model)) - schedule.keep_layers
        element = model.get_input_embeddings().weight.element_size()
        each = rows * self.tokens(length) * heads.keys * (heads.key_dim + heads.value_dim) * element
        return int((self.copies - 1) * each * max(0, layers))

    def row_bytes(self, length: int, rows: int) -> int:
        """Return the bytes of ids, labels, positions and row starts that a rank holds for other ranks' shards."""
        return 4 * ID_BYTES * rows * (length - self.tokens(length)) if self.size > 1 else 0


WHOLE = RankShard()
"""A row as it is."""


def shard_of(model: nn.Module, cluster: Cluster) -> RankShard:
    if cluster.sequence_size == 1:
        return RankShard()
    return RankShard(cluster.sequence_size, cluster.form, heads_of(model).copies(cluster))


def only_states(layer: nn.Module) -> bool:
    """Return True if a layer carries a state from token to token, and keeps no keys and values."""
    return carries_states(layer) and not keeps_keys(layer)


def heads_of(model: Any) -> HeadCounts:
    """Return the heads of a model, by the first of its configurations that has a number of attention heads."""
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
def narrower(model: nn.Module, size: int) -> Iterator[None]:
    """Make windows and spans of attention ``size`` times narrower, while inside."""
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
