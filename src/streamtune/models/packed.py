"""Frozen expert weights in 8 or 4 bits, for models whose experts are one tensor ``[E, M, N]`` per layer.

    nf4   blocks of 64 weights of one expert, block scales in 8 bits, as bitsandbytes quantises linear layers (QLoRA,
          Dettmers et al., arXiv 2305.14314)
    int8  symmetric, one scale per output channel of an expert, in the dtype of the weights

A :class:`PackedExperts` replaces the parameter and has its shape and dtype. A torch function that is called with it
receives dequantised weights, a tensor that lives as long as the function or autograd needs it. One expert,
``experts[i]``, is dequantised alone. So all products with experts work unchanged: loops, grouped and batched products,
and peft, which adds the product of its factors to the tensor in each call.

``bitsandbytes.nn.parametrize`` does the same with a parametrization of the module. Peft's adapters on such tensors are
a second parametrization, added and removed in each call. With both on one tensor, peft 0.21 fails to remove its
parametrization after a call. The next call raises (``only Tensors of floating point dtype can require gradients``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

BLOCK = 64
"""Number of weights that share a scale in nf4."""
OUTER = 256
"""Number of block scales that share a second scale."""
MOST = 1 << 30
"""Most weights passed to bitsandbytes at once: it counts weights in 32 bits."""


class Codes(Protocol):
    """Packed weights of experts."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the weights, ``[E, M, N]``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights before they were packed, and of the dequantised weights."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors that hold the packed weights."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the packed weights."""

    def dequantize(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of experts ``first`` to ``last - 1``, ``[last - first, M, N]``, computed in ``dtype``."""

    def to_device(self, device: torch.device) -> Codes:
        """Return the packed weights on another device."""


@dataclass(frozen=True)
class Int8Codes:
    """Integers from -127 to 127, and their scales."""

    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    """``[E, M, N]``, int8."""
    scales: Tensor
    """``[E, M, 1]``, or ``[E, 1, N]`` if output channels are along N; in ``dtype``."""

    @classmethod
    def pack(cls, weight: Tensor, device: torch.device, *, transposed: bool) -> Int8Codes:
        """Pack ``[E, M, N]``, one expert at a time, on ``device``.

        Output channels are along M, or along N if ``transposed``.
        """
        along = 0 if transposed else 1
        count, rows, columns = weight.shape
        codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
        shape = (count, 1, columns) if transposed else (count, rows, 1)
        scales = torch.empty(shape, dtype=weight.dtype, device=device)
        least = torch.finfo(weight.dtype).tiny
        for index in range(count if device.type != "meta" else 0):
            one = weight[index].to(device)
            scale = (one.abs().amax(along, keepdim=True).float() / 127).to(weight.dtype).clamp_min(least)
            scales[index] = scale
            codes[index] = (one.float() / scale.float()).round_().clamp_(-127, 127)
        return cls(weight.shape, weight.dtype, codes, scales)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales

    def dequantize(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return self.codes[first:last] * self.scales[first:last].to(dtype)

    def to_device(self, device: torch.device) -> Int8Codes:
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


@dataclass(frozen=True)
class Nf4Codes:
    """Indices into the nf4 table, two per byte, and block scales, which are quantised to 8 bits.

    Each expert is padded with zeros to whole blocks, so that no block spans two experts.
    """

    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    """``[E, P / 2]``, uint8; P is M N, padded to whole blocks."""
    scales: Tensor
    """``[E P / 64]``, uint8: indices into ``table``."""
    outer: Tensor
    """``[E P / 64 / 256]``, fp32: scales of the block scales."""
    table: Tensor
    """``[256]``, fp32: value of each 8-bit index."""
    offset: Tensor
    """Mean of the block scales; it is subtracted before they are quantised, and added after they are dequantised."""

    @classmethod
    def pack(cls, weight: Tensor, device: torch.device) -> Nf4Codes:
        """Pack ``[E, M, N]``, some experts at a time, on ``device``."""
        from bitsandbytes import functional

        count, size = weight.shape[0], weight.shape[1:].numel()
        padded = -(-size // BLOCK) * BLOCK
        step = max(1, (1 << 26) // padded)
        codes, scales = [], []
        if device.type == "meta":
            step = count
            # bitsandbytes caches the table from its first call, whose tensor must not be on meta.
            functional.quantize_4bit(torch.zeros(BLOCK, BLOCK), quant_type="nf4", compress_statistics=True)
        for first in range(0, count, step):
            some = weight[first : first + step].detach().to(device).reshape(-1, size)
            some = torch.nn.functional.pad(some, (0, padded - size))
            packed, state = functional.quantize_4bit(some, blocksize=BLOCK, quant_type="nf4")
            codes.append(packed.view(-1, padded // 2))
            scales.append(state.absmax)
        whole = torch.cat(scales)
        offset = whole.mean()
        places, state = functional.quantize_blockwise(whole - offset, blocksize=OUTER)
        return cls(weight.shape, weight.dtype, torch.cat(codes), places, state.absmax, state.code, offset)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.outer, self.table, self.offset

    def dequantize(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        padded, size = 2 * self.codes.shape[1], self.shape[1:].numel()
        narrow = dtype if dtype.itemsize <= 4 else torch.float32
        step = max(1, MOST // padded)
        parts = [self._dequantized(at, min(at + step, last), narrow) for at in range(first, last, step)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[:, :size].reshape(last - first, *self.shape[1:]).to(dtype)

    def _dequantized(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        from bitsandbytes import functional

        padded = 2 * self.codes.shape[1]
        blocks = slice(first * padded // BLOCK, last * padded // BLOCK)
        state = functional.QuantState(
            absmax=self._scales(blocks),
            shape=torch.Size((last - first, padded)),
            dtype=dtype,
            blocksize=BLOCK,
            quant_type="nf4",
        )
        # As a column: a row would come back transposed.
        return functional.dequantize_4bit(self.codes[first:last].view(-1, 1), state)

    def _scales(self, blocks: slice) -> Tensor:
        """Return the dequantised scales of some blocks, in fp32."""
        outer = slice(blocks.start // OUTER, -(-blocks.stop // OUTER))
        factors = self.outer[outer].repeat_interleave(OUTER)[blocks.start - outer.start * OUTER :]
        values = self.table[self.scales[blocks].int()]
        return values.mul_(factors[: len(values)]).add_(self.offset)

    def to_device(self, device: torch.device) -> Nf4Codes:
        names = ("codes", "scales", "outer", "table", "offset")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


class PackedExperts(Tensor):
    """Packed expert weights ``[E, M, N]``: a frozen tensor that is dequantised for each use.

    ``dtype`` is the dtype of the dequantised weights: ``codes.dtype``, or a wider dtype with the same values.
    """

    codes: Codes

    @staticmethod
    def __new__(cls, codes: Codes, dtype: torch.dtype | None = None) -> PackedExperts:
        """Make a tensor without storage of its own."""
        made: PackedExperts = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype or codes.dtype, device=codes.device, requires_grad=False
        )
        made.codes = codes
        return made

    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the packed weights."""
        return self.codes.tensors()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return all weights, ``[E, M, N]``; ``dtype`` computes them in that dtype, without rounding to the model's."""
        count = self.codes.shape[0]
        if dtype is None:
            return self.dequantize_range(0, count)
        with torch.no_grad():
            return self.codes.dequantize(0, count, dtype)

    def dequantize_range(self, first: int, last: int) -> Tensor:
        """Return the weights of experts ``first`` to ``last - 1``."""
        with torch.no_grad():
            return self.codes.dequantize(first, last, self.codes.dtype).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedExperts({tuple(self.shape)}, {self.dtype}, {type(self.codes).__name__}, {self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer queries of shape, dtype and the like directly; call other functions with dequantised weights."""
        kwargs = kwargs or {}
        if (override := OVERRIDES.get(func)) is not None:
            return override(*args, **kwargs)
        if not _reads_metadata(func):
            args, kwargs = _dequantized(args), {key: _dequantized(item) for key, item in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call operators below autograd with dequantised weights; ``detach`` returns another packed tensor."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _like(args[0])
        if func is torch.ops.aten.set_.source_Tensor:  # torch functions that write in place come here at once
            return _set(*args)
        return func(*_dequantized(args), **{key: _dequantized(item) for key, item in (kwargs or {}).items()})


def pack_experts(weight: Tensor, kind: str, device: torch.device, *, transposed: bool = False) -> PackedExperts:
    """Return expert weights ``[E, M, N]`` packed as ``kind``, ``nf4`` or ``int8``, on ``device``.

    ``device`` gets some experts at a time, never all unpacked weights; ``meta`` packs nothing. An expert's output
    channels are along M, or along N if ``transposed``.
    """
    with torch.no_grad():
        if kind == "int8":
            return PackedExperts(Int8Codes.pack(weight.detach(), device, transposed=transposed))
        return PackedExperts(Nf4Codes.pack(weight.detach(), device))


def has_packed_experts(model: nn.Module) -> bool:
    """Return True if a model has packed experts, also if ranks shard them."""
    return any(isinstance(x, PackedExperts) for module in model.modules() for x in module._parameters.values()) or any(
        "packed_experts" in vars(module) for module in model.modules()
    )


def _dequantized(item: Any) -> Any:
    if isinstance(item, PackedExperts):
        return item.dequantize()
    return type(item)(map(_dequantized, item)) if type(item) in (tuple, list) else item


def _reads_metadata(func: Any) -> bool:
    """Return True if a function reads a tensor's metadata or its autograd state, not its values."""
    if func in METADATA_FUNCTIONS:
        return True
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    return getattr(func, "__name__", "") in ("__get__", "__set__") and attribute not in VALUE_ATTRIBUTES


METADATA_FUNCTIONS = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
    Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference,
    Tensor.get_device, Tensor.requires_grad_, Tensor.__len__, Tensor.__hash__, torch.is_floating_point,
    torch.is_complex, torch.is_inference, torch.numel,
}  # fmt: skip
"""Functions that do not read values."""
VALUE_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}
"""Attributes that read values."""


def _to(tensor: PackedExperts, *args: Any, **kwargs: Any) -> PackedExperts:
    others = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]  # ``to(other)``
    if others:
        return _like(tensor, others[0].dtype, others[0].device)
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
    return _like(tensor, dtype, device)


def _like(tensor: PackedExperts, dtype: torch.dtype | None = None, device: torch.device | None = None) -> PackedExperts:
    codes = tensor.codes if device is None or device == tensor.device else tensor.codes.to_device(device)
    return PackedExperts(codes, dtype or tensor.dtype)


def _set_data(tensor: PackedExperts, value: PackedExperts) -> None:
    """Set ``tensor.data`` to another packed tensor, as ``module.to()`` and in-place casts do."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    tensor.codes = value.codes


def _set(tensor: PackedExperts, value: Tensor) -> PackedExperts:
    """Return ``tensor.set_(value)``: when peft parametrizes the tensor for a call, torch sets it to itself."""
    if not isinstance(value, PackedExperts) or value.codes is not tensor.codes:
        raise TypeError("packed experts are frozen: they cannot be set to other values")
    return tensor


def _deep_copy(tensor: PackedExperts, memo: dict[int, Any]) -> PackedExperts:
    """Return a deep copy, which is a parameter if ``tensor`` is one."""
    made = PackedExperts(copy.deepcopy(tensor.codes, memo), tensor.dtype)
    if getattr(tensor, "_is_param", False):
        made._is_param = True
    memo[id(tensor)] = made
    return made


def _item(tensor: PackedExperts, index: Any) -> Tensor:
    """Return ``tensor[index]``; for one expert or consecutive experts, only these are dequantised."""
    count = tensor.codes.shape[0]
    if isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool:
        index = int(index)
    if type(index) is int and -count <= index < count:
        return tensor.dequantize_range(index % count, index % count + 1)[0]
    if isinstance(index, slice) and index.step in (None, 1):
        first, last, _ = index.indices(count)
        if first < last:
            return tensor.dequantize_range(first, last)
    return tensor.dequantize()[index]


OVERRIDES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _item,
    Tensor.__deepcopy__: _deep_copy,
    Tensor.data.__get__: lambda tensor, *_: _like(tensor),  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.detach: _like,
    Tensor.clone: lambda tensor, **_: _like(tensor),
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, *_, **__: _to(tensor, "cpu"),
    Tensor.cuda: lambda tensor, *args, **__: _to(tensor, *(args or ("cuda",))),
    Tensor.double: lambda tensor, *_, **__: _to(tensor, torch.float64),
    Tensor.float: lambda tensor, *_, **__: _to(tensor, torch.float32),
    Tensor.half: lambda tensor, *_, **__: _to(tensor, torch.float16),
    Tensor.bfloat16: lambda tensor, *_, **__: _to(tensor, torch.bfloat16),
    Tensor.__repr__: lambda tensor, **_: PackedExperts.__repr__(tensor),
}
"""Overrides of torch functions that return another packed tensor, or fewer than all weights."""


def shard_experts(outer: nn.Module, dtype: torch.dtype) -> None:
    """Let ranks shard packed expert weights: the codes become a parameter of ``dtype`` with the same bits.

    Hooks around each call rebuild the packed tensors from the gathered codes. The scales are not sharded: each rank's
    module has all of them. ``outer`` is the module with the experts, or the outermost adapter wrapper around it.
    """
    inner: Any = _innermost(outer)
    inner.packed_experts, inner.divided_experts = {}, {}
    for key, packed in list(inner._parameters.items()):
        if not isinstance(packed, PackedExperts):
            continue
        codes: Any = packed.codes
        inner.packed_experts[key] = replace(codes, codes=codes.codes.new_empty(0)), packed.dtype
        numbers = codes.codes.view(-1).view(dtype)[:, None]
        inner._parameters[key] = nn.Parameter(numbers, requires_grad=False)
    outer.register_forward_pre_hook(_rebuild_experts)
    outer.register_forward_hook(_restore_shards, always_call=True)


def _innermost(module: Any) -> Any:
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def _rebuild_experts(module: nn.Module, *_: Any) -> None:
    inner = _innermost(module)
    for key, (codes, dtype) in inner.packed_experts.items():
        numbers = inner.divided_experts[key] = inner._parameters[key]
        bits = numbers.detach().reshape(-1).view(torch.uint8).view(codes.shape[0], -1)
        packed = PackedExperts(replace(codes, codes=bits), dtype)
        inner._parameters[key] = nn.Parameter(packed, requires_grad=False)


def _restore_shards(module: nn.Module, *_: Any) -> None:
    inner = _innermost(module)
    inner._parameters.update(inner.divided_experts)
    inner.divided_experts.clear()
