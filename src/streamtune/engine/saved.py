"""Tensors that one layer call saves for its backward.

With ``order="chunk"`` the backward of a layer runs once for every chunk. It reads the keys and values of earlier chunks
that this chunk sees, and their gradient sums so far. In between, these are stored in one *span* of keys per chunk:

    chunk        0        1        2        3
    full         [  K0  ][  K1  ][  K2  ]             chunk 3 recomputes its own keys; no later chunk reads them
    window            [K0]    [K1]    [K2]            the next chunk sees only the last tokens of a chunk

Keys and values of a span are freed once the span's own chunk has run backward. Their gradient sums exist from the first
chunk that adds to them until the span's own chunk reads them. On the device, the spans of a layer without a window
would copy nearly all of its buffers. Then the buffers are kept instead (:func:`save_kv_spans` returns None).

Shape suffixes: B batch, G key/value heads, S tokens of a span, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from streamtune.engine.attention import SavedAttention
from streamtune.engine.kv import KeysAndValues
from streamtune.engine.memory.tiers import Block, DeviceTier, Source, StoredTensor, Tier
from streamtune.engine.observe import notify_resized, notify_tensors
from streamtune.errors import ArgumentError


class SavedTensors:
    """Tensors that one layer call saves for its backward: input, attention outputs, keys and values."""

    def __init__(self) -> None:
        self.z_in: Source | None = None
        """The layer's input, on the device or in a storage tier; None until it is recomputed."""
        self._version = 0
        self.attention: SavedAttention | None = None
        """Attention outputs; None if the backward recomputes them."""
        self.kv: SavedKV | None = None
        """Keys and values by span, with ``order="chunk"``; None if they stay in their buffers."""
        self.must_recompute_kv = False
        """True if keys, values and states were freed after the forward and are not recomputed yet."""

    def keep_on_device(self, hidden: Tensor) -> None:
        """Keep the layer's input ``hidden`` on the device, with its version counter, to detect changes in place."""
        self.z_in, self._version = hidden.detach(), hidden._version

    def checked_input(self, layer: str) -> Source:
        """Return the saved input; raise :class:`ArgumentError`, which names ``layer``, if it was changed in place."""
        assert self.z_in is not None
        if isinstance(self.z_in, Tensor) and self.z_in._version != self._version:
            raise ArgumentError(
                f"the input of {layer} was changed in place after the forward",
                fix="change a copy of the hidden states",
            )
        return self.z_in

    def wait_for_copies(self) -> None:
        """Make the current stream wait until the saved tensors are copied to the host."""
        if isinstance(self.z_in, StoredTensor):
            self.z_in.tier.wait_for_copies()
        if self.attention is not None:
            self.attention.tier.wait_for_copies()

    def set_read_order(self, chunks: Sequence[slice]) -> None:
        """Set the order in which the backward will read the chunks, so that the next chunks are prefetched."""
        if isinstance(self.z_in, StoredTensor):
            self.z_in.set_read_order(chunks)
        if self.attention is not None:
            self.attention.set_read_order(chunks)

    def free(self) -> None:
        """Free the layer's input and the attention outputs."""
        if isinstance(self.z_in, StoredTensor):
            self.z_in.free()
        self.z_in = self.attention = None


MAX_COPIED_SHARE = 0.5
"""Largest fraction of the tokens whose keys and values are copied into spans on the device; above
it buffers are kept.
"""


def save_kv_spans(
    kv: KeysAndValues, chunks: Sequence[slice], first_key: Callable[[slice], int], tier: Tier
) -> SavedKV | None:
    """Save the keys and values of a layer's forward as one span per chunk, and free their buffers.

    A span has the keys of one chunk that later chunks see. Return None, and keep the buffers, if spans would copy most
    of them, or if the keys begin with tokens before the call.

    Args:
        kv: Keys and values of the layer call.
        chunks: Key positions of each chunk, in order.
        first_key: Function from a chunk to the first key position that the chunk sees.
        tier: Storage tier for the spans.
    """
    spans: list[slice] = []
    lowest = chunks[-1].start
    for chunk, later in zip(reversed(chunks[:-1]), reversed(chunks[1:]), strict=True):
        lowest = min(lowest, first_key(later))
        spans.append(slice(min(max(chunk.start, lowest), chunk.stop), chunk.stop))
    spans.reverse()
    copied, tokens = sum(span.stop - span.start for span in spans), chunks[-1].start
    if kv.past is not None or not kv.pairs or (isinstance(tier, DeviceTier) and copied > MAX_COPIED_SHARE * tokens):
        return None
    return SavedKV(kv, dict(zip((chunk.start for chunk in chunks), spans, strict=False)), tier)


class SavedKV:
    """Keys and values of one layer call, saved in spans: one per chunk, with the keys that later chunks see.

    Args:
        kv: Keys and values of the layer call; from now on its buffers hold only the keys that one chunk sees.
        spans: Key positions of each span, by the start of its chunk.
        tier: Storage tier for the spans.
    """

    def __init__(self, kv: KeysAndValues, spans: dict[int, slice], tier: Tier) -> None:
        self.kv, self.spans, self.tier = kv, spans, tier
        self.forms = [tuple(x.new_empty((0,)) for x in pair) for pair in kv.pairs]
        self.shapes = [tuple(x.shape for x in pair) for pair in kv.pairs]
        self.blocks: dict[tuple[int, int, int], Block] = {}
        """Keys (place 0) and values (place 1), by (start of the chunk, index of the cache update, place)."""
        self.sums: dict[tuple[int, int, int], Block] = {}
        """Gradient sums of the keys and values in ``blocks``, by (start of the chunk, index of the cache update,
        place).
        """
        for start, span in spans.items():
            if span.start < span.stop:
                self._store_spans(self.blocks, start, span, kv.pairs)
        tier.wait_for_copies()
        kv.pairs.clear()

    def load_kv(self, chunk: slice, first_key: int) -> None:
        """Load the earlier keys and values that ``chunk`` sees into new buffers, with room for its own."""
        self.free_buffers()
        if chunk.start == 0:
            return
        seen_spans = self._seen_spans(chunk, first_key)
        self.kv.offset = min([self.spans[start].start for start in seen_spans], default=chunk.start)
        self.kv.pairs = self._allocate_buffers(chunk, lambda like, shape: like.new_empty(shape))
        self._fill_buffers(self.blocks, seen_spans, self.kv.pairs)

    def release_buffers(self) -> None:
        """Free the memory of the buffers, but keep the tensor objects, to which a chunk's graph refers."""
        for pair in self.kv.pairs:
            for x in pair:
                _resize_storage(x, 0)

    def refill_buffers(self, chunk: slice, chunk_kv: Sequence[Tensor]) -> None:
        """Allocate the released buffers again and fill them; ``chunk_kv`` has the keys and values of ``chunk``."""
        for index, pair in enumerate(self.kv.pairs):
            for place, x in enumerate(pair):
                _resize_storage(x, x.numel() * x.element_size())
                with _unsafe_preserve_version_counter(x):
                    x[:, :, self.kv.buffer_slice(chunk)] = chunk_kv[2 * index + place].detach()
        seen_spans = [s for s, span in self.spans.items() if s < chunk.start and span.start >= self.kv.offset]
        self._fill_buffers(self.blocks, seen_spans, self.kv.pairs)

    def load_gradient_sums(self, chunk: slice) -> None:
        """Load the sums of dK and dV so far, for the keys in the buffers and the keys of ``chunk``."""
        within = [start for start, span in self.spans.items() if start <= chunk.start and span.start >= self.kv.offset]
        if self.kv.pairs or (chunk.start, 0, 0) in self.sums:
            self.kv.grads = self._allocate_buffers(
                chunk, lambda like, shape: self.kv.new_grad_sum(like.new_empty(shape))
            )
            self._fill_buffers(self.sums, within, self.kv.grads)

    def save_gradient_sums(self, chunk: slice, keep_graph: bool) -> None:
        """Store the sums of dK and dV of earlier chunks; free the sums of ``chunk``.

        Also free the keys and values of ``chunk``, unless ``keep_graph`` is True.
        """
        if self.kv.grads:
            for start, span in self.spans.items():
                if self.kv.offset <= span.start < span.stop and start < chunk.start:
                    self._store_spans(self.sums, start, span, self.kv.grads)
            self.tier.wait_for_copies()
        for blocks in (self.sums,) if keep_graph else (self.sums, self.blocks):
            for key in [key for key in blocks if key[0] == chunk.start]:
                blocks.pop(key).free()
        self.free_buffers()

    def free_buffers(self) -> None:
        """Free the buffers of keys, values and gradient sums; the stored spans remain."""
        self.kv.pairs, self.kv.grads, self.kv.offset = [], [], 0

    def free_gradient_sums(self) -> None:
        """Free the stored gradient sums, for example after an interrupted backward."""
        for block in self.sums.values():
            block.free()
        self.sums.clear()

    def free(self) -> None:
        """Free the buffers, the stored gradient sums, and the stored keys and values."""
        self.free_buffers()
        self.free_gradient_sums()
        for block in self.blocks.values():
            block.free()
        self.blocks.clear()

    def _seen_spans(self, chunk: slice, first_key: int) -> list[int]:
        return [
            start
            for start, span in self.spans.items()
            if start < chunk.start and span.start < span.stop and span.stop > first_key
        ]

    def _allocate_buffers(
        self, chunk: slice, make_buffer: Callable[[Tensor, tuple[int, ...]], Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        length = chunk.stop - self.kv.offset
        buffers: list[tuple[Tensor, Tensor]] = []
        for forms, shapes in zip(self.forms, self.shapes, strict=True):
            k, v = (make_buffer(x, (*s[:2], length, s[3])) for x, s in zip(forms, shapes, strict=True))
            notify_tensors("keys and values", k, v)
            buffers.append((k, v))
        return buffers

    def _store_spans(
        self, blocks: dict[tuple[int, int, int], Block], start: int, span: slice, pairs: list[tuple[Tensor, Tensor]]
    ) -> None:
        for index, pair in enumerate(pairs):
            for place, x in enumerate(pair):
                x_BGSD = x[:, :, self.kv.buffer_slice(span)].clone(memory_format=torch.contiguous_format)
                notify_tensors("keys and values", x_BGSD)
                if (block := blocks.get((start, index, place))) is not None:
                    block.replace(x_BGSD)
                else:
                    blocks[start, index, place] = self.tier.put(x_BGSD)

    def _fill_buffers(
        self, blocks: dict[tuple[int, int, int], Block], starts: Sequence[int], pairs: list[tuple[Tensor, Tensor]]
    ) -> None:
        keys = [(start, index, place) for start in starts for index in range(len(pairs)) for place in (0, 1)]
        keys = [key for key in keys if key in blocks]
        for number, key in enumerate(keys):
            for ahead in keys[number + 1 : number + 3]:  # prefetch the next two while this block is copied
                blocks[ahead].prefetch_to_device()
            start, index, place = key
            with _unsafe_preserve_version_counter(pairs[index][place]):
                pairs[index][place][:, :, self.kv.buffer_slice(self.spans[start])] = blocks[key].get()


def _resize_storage(x: Tensor, nbytes: int) -> None:
    x.untyped_storage().resize_(nbytes)
    notify_resized(x)
