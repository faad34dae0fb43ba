"""Count the work of an operator: FLOPs of matrix products and attention, bytes read and written by other operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Cost = Literal["view", "allocation", "product", "attention", "other"]
TouchedTensors = Literal["all", "result", "filled"] | int

ATTENTION_WORK = {"forward": 2, "backward": 5}
"""Matrix products per attention tile. Forward: scores and output. Backward: scores again, dV, dP, dQ and dK."""

CAUSAL_ARGUMENT = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}
"""Fused attention operators, with the index of their argument ``is_causal``."""


OPTIMIZER_STEP_8BIT = "bitsandbytes::optimizer_update_8bit_blockwise"
"""The 8-bit optimizer step of bitsandbytes: a kernel on accelerators, torch operators on a CPU."""

SVD, MEAN = "aten::_linalg_svd", "aten::mean"

PACKED_PRODUCT = "bitsandbytes::gemm_4bit"
"""Product with a 4-bit weight, for which torch has no FLOP formula."""

GROUPED_PRODUCT = "aten::_grouped_mm"
"""Product of each group of rows with its own weight, as in experts, for which torch has no FLOP formula."""

ALLOCATING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators that allocate a tensor and touch none of its bytes."""


def cost_kind(func: Any) -> Cost:
    """Return the kind of an operator's work. Operators without a tensor result count as views, which do no work."""
    name = func._schema.name.removeprefix("aten::")
    if name in CAUSAL_ARGUMENT:
        return "attention"
    if _flop_formula(func) is not None:
        return "product"
    returns = func._schema.returns
    aliases = [item.alias_info for item in returns]
    if name == "_unsafe_view" or (not func._schema.is_mutable and not any(_is_tensor(item.type) for item in returns)):
        return "view"
    if any(alias is not None and not alias.is_write for alias in aliases):
        return "view"
    return "allocation" if name in ALLOCATING else "other"


def _is_tensor(schema_type: Any) -> bool:
    return "Tensor" in str(schema_type)


def product_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    summed_index = SUMMED_ARGUMENT.get(func._schema.name)
    if summed_index is not None:
        return int(2 * out.numel() * args[summed_index].shape[-1])
    formula_args = [item for item in args if not isinstance(item, torch.dtype)]  # formulas accept no dtype
    formula_kwargs = {name: value for name, value in kwargs.items() if name not in ("out_dtype", "out")}
    return int(_flop_formula(func)(*formula_args, **formula_kwargs, out_val=out))


def _flop_formula(func: Any) -> Any:
    """Return the FLOP formula of a matrix product; None for other operators.

    An in-place product has the formula of its out-of-place form.
    """
    if func._schema.name == PACKED_PRODUCT:
        return _packed_product_flops
    if func._schema.name == GROUPED_PRODUCT:
        return _grouped_product_flops
    formula = flop_registry.get(func._overloadpacket)
    name = func._schema.name.removeprefix("aten::")
    if formula is None and name in ("addmm_", "baddbmm_"):
        formula = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_")))
    return formula


def _packed_product_flops(x: Tensor, packed: Tensor, shape: Sequence[int], *rest: Any, **other: Any) -> int:
    """Return the FLOPs of the product of ``x`` [..., k] and a packed 4-bit weight of ``shape`` [n, k]."""
    return 2 * x.numel() * shape[0]


def _grouped_product_flops(a: Tensor, b: Tensor, *rest: Any, **other: Any) -> int:
    """Return the FLOPs of a grouped matrix product, in which each row (or column) belongs to one group."""
    if a.dim() == 3 and b.dim() == 2:  # [g, m, k] times columns of [k, n]
        return 2 * a.shape[1] * b.numel()
    return 2 * a.numel() * b.shape[-1]


def is_self_copy(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operator copies memory to itself (as after ``a[i] += b``), a copy that torch skips."""
    if func is not torch.ops.aten.copy_.default:
        return False
    to, source = args[:2]
    alike = (to.shape, to.stride(), to.storage_offset(), to.dtype)
    same = alike == (source.shape, source.stride(), source.storage_offset(), source.dtype)
    return same and to.untyped_storage()._cdata == source.untyped_storage()._cdata


SUMMED_ARGUMENT = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1}
"""Matrix products, with the index of the argument whose last dimension is the inner dimension."""

MATRIX_PRODUCTS = ("mm", "addmm", "addmm_", "_grouped_mm")
FLOPS_PER_BYTE = {"cuda": 200, "cpu": 5}
"""FLOPs that a device computes in the time it reads or writes one byte: about its FLOP/s divided by its bandwidth."""


def bandwidth_bound_bytes(func: Any, flops: int, args: tuple[Any, ...], out: Any, device: str) -> int:
    """Return how many bytes of a matrix product cannot be read or written in the time of its FLOPs.

    A product of few rows is limited by memory bandwidth, not by FLOPs (Williams et al., Roofline, Communications of the
    ACM 52(4), 2009).
    """
    if func._schema.name.removeprefix("aten::") not in MATRIX_PRODUCTS:
        return 0
    return max(0, touched_bytes("all", args, out) - flops // FLOPS_PER_BYTE[device])


def attention_flops(func: Any, args: tuple[Any, ...]) -> int:
    """Return the FLOPs of a fused attention operator.

    All pairs of a query and a key count. For causal attention with as many queries as keys, only unmasked pairs count.
    """
    name = func._schema.name.removeprefix("aten::")
    backward = name.endswith("_backward")
    q, k, v = args[1:4] if backward else args[:3]
    queries, keys = q.shape[-2], k.shape[-2]
    causal_index = CAUSAL_ARGUMENT[name]
    causal = len(args) > causal_index and bool(args[causal_index])
    pairs = queries * (queries + 1) // 2 if causal and queries == keys else queries * keys
    products = ATTENTION_WORK["backward" if backward else "forward"]
    return int(products * pairs * (q.shape[-1] + v.shape[-1]) * math.prod(q.shape[:-2]))


def queries_and_keys(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the queries ``[B, H, T, D]`` and keys ``[B, G, S, D]`` of a fused attention operator."""
    q, k = args[1:3] if func._schema.name.endswith("_backward") else args[:2]
    return q, k


@dataclass(frozen=True)
class EmbeddingSums:
    """Sizes of the fp32 sums from which a CUDA kernel computes an embedding's gradient.

    Attributes:
        rows: Vocabulary size.
        row_bytes: Bytes of the sum for one token.
    """

    rows: int
    row_bytes: int

    def bound_scratch_bytes(self, func: Any, scratch: int) -> int:
        """Return ``scratch``, or fewer bytes if ``func`` is an embedding's backward."""
        if func is None or func._schema.name != EMBEDDING_BACKWARD:
            return scratch
        tokens = scratch // self.row_bytes
        return 0 if tokens <= MAX_UNSORTED_TOKENS else (tokens // 10 + min(tokens, self.rows)) * self.row_bytes


def embedding_sums(func: Any, args: tuple[Any, ...]) -> EmbeddingSums | None:
    if func._schema.name != EMBEDDING_BACKWARD:
        return None
    return EmbeddingSums(args[2], 4 * -(-args[0].shape[-1] // 32) * 32)


FLASH_BACKWARD = "aten::_scaled_dot_product_flash_attention_backward"
EMBEDDING_BACKWARD = "aten::embedding_dense_backward"
MAX_UNSORTED_TOKENS = 3072
"""Largest number of tokens for which an embedding's gradient is summed in place; more tokens are sorted first."""


def may_allocate_scratch(func: Any) -> bool:
    return func._schema.name in (PACKED_PRODUCT, FLASH_BACKWARD, EMBEDDING_BACKWARD, OPTIMIZER_STEP_8BIT, SVD, MEAN)


def scratch_bytes(func: Any, args: tuple[Any, ...], device: str) -> int:
    """Return the scratch bytes of a kernel: bytes that the kernel allocates and frees before it returns.

    FlashAttention-2's backward sums dQ in fp32, with rows padded to 128 and head dimensions to 32. It stores one more
    fp32 number per row. If query heads share keys, it writes dK and dV for each query head before they are summed.

    The gradient of an embedding has at most one fp32 sum per ten tokens and one per distinct token, in rows padded to
    32 (``embedding_backward_cuda_kernel`` in torch's ``EmbeddingBackwardKernel.cu``). Here one sum per token is
    counted, which is linear in the length. :meth:`EmbeddingSums.bound_scratch_bytes` applies the bound.

    A 4-bit product of bitsandbytes dequantises the weight and the scales of its blocks, except for few rows on some
    devices. On a CPU the 8-bit optimizer step allocates five fp32 tensors, and an fp32 copy of a narrower weight. On a
    CPU torch's mean converts narrow numbers to fp32. A singular value decomposition overwrites a copy of its matrix.
    """
    if func._schema.name == SVD:
        return int(args[0].nbytes)
    if func._schema.name == MEAN and device == "cpu":
        return 4 * int(args[0].numel()) if args[0].element_size() < 4 and args[0].is_floating_point() else 0
    if func._schema.name == OPTIMIZER_STEP_8BIT and device == "cpu":
        gradient, weight = args[1:3] if isinstance(args[0], str) else args[:2]
        return int((20 if weight.element_size() == 4 else 24) * gradient.numel())
    if device != "cuda" or func._schema.name not in (PACKED_PRODUCT, FLASH_BACKWARD, EMBEDDING_BACKWARD):
        return 0
    if func._schema.name == EMBEDDING_BACKWARD:
        sums = embedding_sums(func, args)
        return 0 if sums is None else args[1].numel() * sums.row_bytes
    if func._schema.name == PACKED_PRODUCT:
        x, blocks = args[0], -(-math.prod(args[2]) // args[4])
        return int(math.prod(args[2]) * x.element_size() + 4 * blocks)
    q, k = args[1], args[2]
    batch, heads, queries, dim = q.shape
    rows, wide = -(-queries // 128) * 128, -(-dim // 32) * 32
    scratch = 4 * batch * heads * rows * (wide + 1)
    if heads != k.shape[1]:
        scratch += 2 * batch * heads * k.shape[2] * dim * k.element_size()
    return int(scratch)


GATHERS = ("index", "index_select", "gather", "embedding")
FILLS = ("new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like")
"""Operators that fill a new tensor and read only the shape of the argument."""
SCATTERS = {"index_put": 2, "index_put_": 2, "scatter_add_": 3, "index_add_": 3, "scatter_": 3}
"""Operators that write to some elements of a tensor, with the index of the argument that contains the values."""


def touched_tensors(func: Any) -> TouchedTensors:
    """Return how the bytes that an operator reads and writes are counted.

    ``all``: bytes of all arguments and the result. ``result``: twice the bytes of the result. ``filled``: bytes of the
    result. A number: twice the bytes of the argument with this index.
    """
    name = func._schema.name.removeprefix("aten::")
    return "result" if name in GATHERS else "filled" if name in FILLS else SCATTERS.get(name, "all")


def touched_bytes(touched: TouchedTensors, args: tuple[Any, ...], out: Any) -> int:
    """Return how many bytes an operator reads and writes; ``touched`` is the result of :func:`touched_tensors`."""
    total = 0
    if touched == "result":
        args = (out,)
    elif touched == "filled":
        args = ()
    elif touched != "all":
        out = values = args[touched] if len(args) > touched else None
        args = (values,)
    for item in (*args, out):
        if isinstance(item, Tensor):
            total += item.nbytes
        elif isinstance(item, (tuple, list)):
            total += sum(element.nbytes for element in item if isinstance(element, Tensor))
    return total
