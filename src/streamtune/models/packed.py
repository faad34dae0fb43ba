"""Frozen expert weights in 8 or 4 bits, for models whose experts are one tensor ``[E, M, N]`` per layer.

    nf4   blocks of 64 weights of one expert, block scales in 8 bits, as bitsandbytes quantises linear layers (QLoRA,
          Dettmers et al., arXiv 2305.14314)
    int8  symmetric, one scale per output channel of an expert, in the dtype of the weights

A :class:`PackedExperts` replaces the parameter and has the same shape and dtype. A torch function that is called with
it receives dequantised weights, which are freed after the function and its backward. One expert, ``experts[i]``, is
dequantised alone. So all matmuls with experts work unchanged, also peft's.

``bitsandbytes.nn.parametrize`` is not used: peft 0.21 adds its adapters as a second parametrization, and fails to
remove it if a tensor has both.
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
MAX_WEIGHTS = 1 << 30
"""Largest number of weights that are passed to bitsandbytes at once: bitsandbytes counts weights in 32 bits."""


class Codes(Protocol):
    """Interface: packed weights of all experts of a layer, ``[E, M, N]`` when dequantised."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the weights, ``[E, M, N]``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights before they were packed, and of the dequantised weights."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors that contain the packed weights."""

    def component_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that contain the packed weights."""

    def dequantize(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of experts ``start`` to ``stop - 1``, ``[stop - start, M, N]``, computed in ``dtype``."""

    def to_device(self, device: torch.device) -> Codes:
        """Return the packed weights on another device."""


@dataclass(frozen=True)
class Int8Codes:
    """Expert weights as integers from -127 to 127, with a scale for each output channel."""

    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    """``[E, M, N]``, int8."""
    scales: Tensor
    """``[E, M, 1]``, or ``[E, 1, N]`` if output channels are along N; in ``dtype``."""

    @classmethod
    def pack(cls, weight: Tensor, device: torch.device, *, transposed: bool) -> Int8Codes:
        """Quantise weights ``[E, M, N]`` on ``device``, one expert at a time.

        Output channels are along M, or along N if ``transposed``.
        """
        along = 0 if transposed else 1
        count, rows, columns = weight.shape
        codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
        shape = (count, 1, columns) if transposed else (count, rows, 1)
        scales = torch.empty(shape, dtype=weight.dtype, device=device)
        smallest_scale = torch.finfo(weight.dtype).tiny
        for index in range(count if device.type != "meta" else 0):
            expert = weight[index].to(device)
            scale = (expert.abs().amax(along, keepdim=True).float() / 127).to(weight.dtype).clamp_min(smallest_scale)
            scales[index] = scale
            codes[index] = (expert.float() / scale.float()).round_().clamp_(-127, 127)
        return cls(weight.shape, weight.dtype, codes, scales)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def component_tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales

    def dequantize(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self.codes[start:stop] * self.scales[start:stop].to(dtype)

    def to_device(self, device: torch.device) -> Int8Codes:
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


@dataclass(frozen=True)
class Nf4Codes:
    """Expert weights as indices into the nf4 table, two per byte, and block scales, which are quantised to 8 bits.

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
    """Mean of the block scales, subtracted before scales are quantised and added after scales are dequantised."""

    @classmethod
    def pack(cls, weight: Tensor, device: torch.device) -> Nf4Codes:
        """Quantise weights ``[E, M, N]`` on ``device``, a few experts at a time."""
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
            experts = weight[first : first + step].detach().to(device).reshape(-1, size)
            experts = torch.nn.functional.pad(experts, (0, padded - size))
            packed, state = functional.quantize_4bit(experts, blocksize=BLOCK, quant_type="nf4")
            codes.append(packed.view(-1, padded // 2))
            scales.append(state.absmax)
        block_scales = torch.cat(scales)
        offset = block_scales.mean()
        places, state = functional.quantize_blockwise(block_scales - offset, blocksize=OUTER)
        return cls(weight.shape, weight.dtype, torch.cat(codes), places, state.absmax, state.code, offset)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def component_tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.outer, self.table, self.offset

    def dequantize(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        padded, size = 2 * self.codes.shape[1], self.shape[1:].numel()
        narrow = dtype if dtype.itemsize <= 4 else torch.float32
        step = max(1, MAX_WEIGHTS // padded)
        parts = [self._dequantize_chunk(first, min(first + step, stop), narrow) for first in range(start, stop, step)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[:, :size].reshape(stop - start, *self.shape[1:]).to(dtype)

    def _dequantize_chunk(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        from bitsandbytes import functional

        padded = 2 * self.codes.shape[1]
        blocks = slice(start * padded // BLOCK, stop * padded // BLOCK)
        state = functional.QuantState(
            absmax=self._block_scales(blocks),
            shape=torch.Size((stop - start, padded)),
            dtype=dtype,
            blocksize=BLOCK,
            quant_type="nf4",
        )
        # As a column: bitsandbytes would return a row transposed.
        return functional.dequantize_4bit(self.codes[start:stop].view(-1, 1), state)

    def _block_scales(self, blocks: slice) -> Tensor:
        outer = slice(blocks.start // OUTER, -(-blocks.stop // OUTER))
        factors = self.outer[outer].repeat_interleave(OUTER)[blocks.start - outer.start * OUTER :]
        values = self.table[self.scales[blocks].int()]
        return values.mul_(factors[: len(values)]).add_(self.offset)

    def to_device(self, device: torch.device) -> Nf4Codes:
        names = ("codes", "scales", "outer", "table", "offset")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


class PackedExperts(Tensor):
    """Packed expert weights ``[E, M, N]``: a frozen tensor that is dequantised for each use.

    ``dtype`` is the dtype of the dequantised weights: ``codes.dtype``, or a wider dtype with equal values.
    """

    codes: Codes

    @staticmethod
    def __new__(cls, codes: Codes, dtype: torch.dtype | None = None) -> PackedExperts:
        made: PackedExperts = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype or codes.dtype, device=codes.device, requires_grad=False
        )
        made.codes = codes
        return made

    def packed_tensors(self) -> tuple[Tensor, ...]:
        return self.codes.component_tensors()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return all weights ``[E, M, N]``, computed in ``dtype``.

        If ``dtype`` is None, they are computed in ``codes.dtype`` and cast to this tensor's dtype. The same happens
        when this tensor is passed to a torch function.
        """
        count = self.codes.shape[0]
        if dtype is None:
            return self.dequantize_range(0, count)
        with torch.no_grad():
            return self.codes.dequantize(0, count, dtype)

    def dequantize_range(self, start: int, stop: int) -> Tensor:
        with torch.no_grad():
            return self.codes.dequantize(start, stop, self.codes.dtype).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedExperts({tuple(self.shape)}, {self.dtype}, {type(self.codes).__name__}, {self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call metadata functions with packed tensors, and all other functions with dequantised weights."""
        kwargs = kwargs or {}
        if (override := OVERRIDES.get(func)) is not None:
            return override(*args, **kwargs)
        if not _reads_metadata(func):
            args, kwargs = _dequantize_nested(args), {key: _dequantize_nested(item) for key, item in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call operators with dequantised weights, except ``detach``, which returns a packed tensor."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _cast_packed(args[0])
        if func is torch.ops.aten.set_.source_Tensor:  # in-place torch functions reach only this level
            return _override_set(*args)
        return func(
            *_dequantize_nested(args), **{key: _dequantize_nested(item) for key, item in (kwargs or {}).items()}
        )


def pack_experts(weight: Tensor, kind: str, device: torch.device, *, transposed: bool = False) -> PackedExperts:
    """Return expert weights ``[E, M, N]`` packed as ``kind``, ``nf4`` or ``int8``, on ``device``.

    ``device`` receives a few experts at a time, never all unpacked weights; on ``meta`` no value is computed. An
    expert's output channels are along M, or along N if ``transposed``.
    """
    with torch.no_grad():
        if kind == "int8":
            return PackedExperts(Int8Codes.pack(weight.detach(), device, transposed=transposed))
        return PackedExperts(Nf4Codes.pack(weight.detach(), device))


def has_packed_experts(model: nn.Module) -> bool:
    return any(isinstance(x, PackedExperts) for module in model.modules() for x in module._parameters.values()) or any(
        "packed_experts" in vars(module) for module in model.modules()
    )


def _dequantize_nested(argument: Any) -> Any:
    if isinstance(argument, PackedExperts):
        return argument.dequantize()
    return type(argument)(map(_dequantize_nested, argument)) if type(argument) in (tuple, list) else argument


def _reads_metadata(func: Any) -> bool:
    """Return True if a function reads only metadata or the autograd state of a tensor, no values."""
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
"""Torch functions that do not read values."""
VALUE_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}
"""Tensor attributes that read values."""


def _override_to(tensor: PackedExperts, *args: Any, **kwargs: Any) -> PackedExperts:
    others = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]  # ``to(other)``
    if others:
        return _cast_packed(tensor, others[0].dtype, others[0].device)
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
    return _cast_packed(tensor, dtype, device)


def _cast_packed(
    tensor: PackedExperts, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> PackedExperts:
    codes = tensor.codes if device is None or device == tensor.device else tensor.codes.to_device(device)
    return PackedExperts(codes, dtype or tensor.dtype)


def _override_set_data(tensor: PackedExperts, value: PackedExperts) -> None:
    """Set ``tensor.data`` to another packed tensor, as ``module.to()`` and in-place casts do."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    tensor.codes = value.codes


def _override_set(tensor: PackedExperts, value: Tensor) -> PackedExperts:
    """Return ``tensor`` if ``value`` has the same codes, as when torch calls ``set_`` for a parametrization."""
    if not isinstance(value, PackedExperts) or value.codes is not tensor.codes:
        raise TypeError("packed experts are frozen: they cannot be set to other values")
    return tensor


def _override_deepcopy(tensor: PackedExperts, memo: dict[int, Any]) -> PackedExperts:
    made = PackedExperts(copy.deepcopy(tensor.codes, memo), tensor.dtype)
    if getattr(tensor, "_is_param", False):
        made._is_param = True
    memo[id(tensor)] = made
    return made


def _override_getitem(tensor: PackedExperts, index: Any) -> Tensor:
    """Return ``tensor[index]``; an index of one expert or consecutive experts dequantises only these experts."""
    count = tensor.codes.shape[0]
    if isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool:
        index = int(index)
    if type(index) is int and -count <= index < count:
        return tensor.dequantize_range(index % count, index % count + 1)[0]
    if isinstance(index, slice) and index.step in (None, 1):
        start, stop, _ = index.indices(count)
        if start < stop:
            return tensor.dequantize_range(start, stop)
    return tensor.dequantize()[index]


OVERRIDES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _override_getitem,
    Tensor.__deepcopy__: _override_deepcopy,
    Tensor.data.__get__: lambda tensor, *_: _cast_packed(tensor),  # type: ignore[attr-defined]
    Tensor.data.__set__: _override_set_data,  # type: ignore[attr-defined]
    Tensor.detach: _cast_packed,
    Tensor.clone: lambda tensor, **_: _cast_packed(tensor),
    Tensor.to: _override_to,
    Tensor.cpu: lambda tensor, *_, **__: _override_to(tensor, "cpu"),
    Tensor.cuda: lambda tensor, *args, **__: _override_to(tensor, *(args or ("cuda",))),
    Tensor.double: lambda tensor, *_, **__: _override_to(tensor, torch.float64),
    Tensor.float: lambda tensor, *_, **__: _override_to(tensor, torch.float32),
    Tensor.half: lambda tensor, *_, **__: _override_to(tensor, torch.float16),
    Tensor.bfloat16: lambda tensor, *_, **__: _override_to(tensor, torch.bfloat16),
    Tensor.__repr__: lambda tensor, **_: PackedExperts.__repr__(tensor),
}
"""Overrides of torch functions that return a packed tensor, or read fewer than all weights."""


def shard_packed_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Make packed expert weights shardable: the packed bytes become a parameter of ``dtype``.

    Hooks around each call rebuild the packed tensors from the gathered parameter. The scales are not sharded: each
    rank's module has all scales. ``module`` contains the experts, or is the outermost adapter wrapper around their
    module.
    """
    inner: Any = _innermost_base_layer(module)
    inner.packed_experts, inner.sharded_experts = {}, {}
    for key, packed in list(inner._parameters.items()):
        if not isinstance(packed, PackedExperts):
            continue
        codes: Any = packed.codes
        inner.packed_experts[key] = replace(codes, codes=codes.codes.new_empty(0)), packed.dtype
        numbers = codes.codes.view(-1).view(dtype)[:, None]
        inner._parameters[key] = nn.Parameter(numbers, requires_grad=False)
    module.register_forward_pre_hook(_rebuild_packed_experts)
    module.register_forward_hook(_restore_shards, always_call=True)


def _innermost_base_layer(module: Any) -> Any:
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def _rebuild_packed_experts(module: nn.Module, *_: Any) -> None:
    inner = _innermost_base_layer(module)
    for key, (codes, dtype) in inner.packed_experts.items():
        numbers = inner.sharded_experts[key] = inner._parameters[key]
        bits = numbers.detach().reshape(-1).view(torch.uint8).view(codes.shape[0], -1)
        packed = PackedExperts(replace(codes, codes=bits), dtype)
        inner._parameters[key] = nn.Parameter(packed, requires_grad=False)


def _restore_shards(module: nn.Module, *_: Any) -> None:
    inner = _innermost_base_layer(module)
    inner._parameters.update(inner.sharded_experts)
    inner.sharded_experts.clear()
