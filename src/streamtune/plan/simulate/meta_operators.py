"""Run models on ``meta`` tensors, with values of integer tensors, cached result shapes, and autocast.

Tensors on ``meta`` have no values, but models and the engine need some: whether positions restart, whether a mask hides
tokens, which tokens have a target. These values are integers, booleans or constants, which are small compared with
activations. So each such tensor has an attribute with its value on the CPU, computed by the same operator. Values of
large masks are computed on demand. The choices of a router are unknown; tokens are assumed to be spread evenly over
experts.

Shape functions of many operators are written in Python and are slow. A step calls them with the same shapes for every
chunk and layer. So results are cached by the shapes of the arguments, as in torch's fake tensor cache.

torch has no autocast on ``meta``, so this module casts the arguments of operators. It uses torch's lists of operators
(``aten/src/ATen/autocast_mode.h``) and the rule of ``cached_cast``. A trainable fp32 weight is cast once and kept until
the outermost region ends. Any other tensor is cast for each use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.models import PackedExperts
from streamtune.ops.devices import autocast_device_type

MAX_VALUE_ELEMENTS = 1 << 22
"""Largest number of elements of a tensor whose value is computed; some masks are larger."""

aten = torch.ops.aten
VALUE_DEPENDENT = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.masked_select.default,
    aten.bincount.default,
}
"""Operators whose result, or whose result's shape, depends on the values of their arguments."""


CONSTANTS = (aten.ones.default, aten.zeros.default, aten.full.default)
"""Operators that fill a tensor with one number. Values of floating-point results are stored too; some masks need
them."""


def needs_values(func: Any) -> bool:
    return func in VALUE_DEPENDENT or func is aten._to_copy.default


def meta_tensor_with_value(value: Tensor) -> Tensor:
    made: Any = torch.empty_like(value, device="meta")
    made._value = value
    return made


MAX_EAGER_ELEMENTS = 1 << 14
"""Largest number of elements of a value that is computed immediately. Most masks are larger, and are never read."""


class DeferredValue:
    """The value of a large tensor, computed on demand from an operator that writes to no argument."""

    __slots__ = ("__weakref__", "_call", "_value")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = (func, args, kwargs)
        self._value: Tensor | None = None

    def value(self) -> Tensor | None:
        """Return the value, computed at the first call; None if the CPU does not support the operator."""
        if self._call is not None:
            func, args, kwargs = self._call
            self._call = None
            args = tuple(item.value() if isinstance(item, DeferredValue) else item for item in args)
            with suppress(RuntimeError):
                self._value = func(*args, **kwargs)
        return self._value


@lru_cache(maxsize=1024)
def _can_defer_result(func: Any) -> bool:
    if func._schema.is_mutable or len(func._schema.returns) != 1:
        return False
    return torch.Tag.pointwise in func.tags or func in CONSTANTS


class IntegerValues:
    """Computes the values of integer and boolean ``meta`` tensors, large values on demand.

    A dispatch mode calls its methods while modes are disabled.
    """

    def __init__(self) -> None:
        self._deferred: WeakSet[DeferredValue] = WeakSet()

    def evaluate_if_needed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Return True and the result if an operator needs the values of its arguments; else False and None.

        Raises:
            ArgumentError: A value is too large to compute.
            UnsupportedModelError: A value is unknown.
        """
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.device.type != "meta":
            return False, None
        if func is aten._to_copy.default and (device := kwargs.get("device")) is not None:
            if torch.device(device).type == "meta":
                return False, None
            return True, self._evaluate(func, args, kwargs)
        if func not in VALUE_DEPENDENT:
            return False, None
        out = self._evaluate(func, args, kwargs)
        if isinstance(out, Tensor):
            return True, meta_tensor_with_value(out)
        if isinstance(out, tuple):
            return True, tuple(meta_tensor_with_value(item) for item in out)
        return True, out

    def attach_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Attach values to an operator's results, if they are integers or booleans and the arguments have values."""
        if func is aten.topk.default:
            self._spread_tokens_evenly(out[1], args[0].shape[-1])
            return
        if func in CONSTANTS and out.is_floating_point() and out.numel() <= MAX_VALUE_ELEMENTS:
            out._constant = self._defer_value(func, args, kwargs), out._version
            return
        results = (out,) if isinstance(out, Tensor) else out
        if not isinstance(results, (tuple, list)):
            return
        for item in results:
            if isinstance(item, Tensor) and (item.is_floating_point() or item.device.type != "meta"):
                return
        if not results or not isinstance(results[0], Tensor):
            return
        if results[0].numel() > MAX_VALUE_ELEMENTS:
            results[0]._too_large_elements = results[0].numel()  # type: ignore[attr-defined]
            return
        values: Any
        try:
            if results[0].numel() > MAX_EAGER_ELEMENTS and _can_defer_result(func):
                values = self._defer_value(func, args, kwargs)
            else:
                if _writes_in_place(func):  # deferred values may depend on the value that is overwritten
                    for waiting in list(self._deferred):
                        waiting.value()
                    self._deferred.clear()
                values = self._evaluate(func, args, kwargs)
        except (ArgumentError, UnsupportedModelError, RuntimeError):  # no value, or no CPU operator
            if func is aten.index.Tensor and (value := _compute_attached_value(args[0])) is not None:
                self._attach_uniform_value(results[0], value)
            elif _writes_in_place(func):
                results[0]._value = None  # type: ignore[attr-defined]
            if too_large_elements := max((getattr(item, "_too_large_elements", 0) for item in args), default=0):
                results[0]._too_large_elements = too_large_elements  # type: ignore[attr-defined]
            return
        for item, value in zip(results, values if isinstance(values, (tuple, list)) else (values,), strict=True):
            if isinstance(item, Tensor):
                item._value = value  # type: ignore[attr-defined]

    def _evaluate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {key: self._get_value(item, func) for key, item in kwargs.items()}
        if "device" in given and given["device"] is not None:
            given["device"] = torch.device("cpu")
        return func(*(self._get_value(item, func) for item in args), **given)

    def _defer_value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferredValue:
        """Return the value of an operator's result, to be computed when it is first read.

        Raises:
            ArgumentError, UnsupportedModelError: An argument has no value.
        """
        given = {key: self._get_value(item, func) for key, item in kwargs.items()}
        if "device" in given and given["device"] is not None:
            given["device"] = torch.device("cpu")
        later = DeferredValue(func, tuple(self._get_value(item, func, allow_deferred=True) for item in args), given)
        self._deferred.add(later)
        return later

    def _get_value(self, item: Any, func: Any, *, allow_deferred: bool = False) -> Any:
        if isinstance(item, (tuple, list)):
            return type(item)(self._get_value(part, func) for part in item)
        if not isinstance(item, Tensor) or item.device.type == "cpu":
            return item
        value = _attached_value(item) if allow_deferred else _compute_attached_value(item)
        if value is None and (too_large_elements := getattr(item, "_too_large_elements", 0)):
            raise ArgumentError(
                "the micro-batch is too large to simulate: its positions or masks have "
                f"{too_large_elements:,} elements, and the limit is {MAX_VALUE_ELEMENTS:,}",
                where="per_device_train_batch_size",
                fix="lower per_device_train_batch_size (gradients accumulate over micro-batches) or max_length",
            )
        if value is None:
            raise UnsupportedModelError(
                f"the model needs the values of a tensor ({func}), but a simulated step has only shapes",
                fix="measure a real step instead",
            )
        return value

    def _attach_uniform_value(self, out: Tensor, value: Tensor) -> None:
        """Attach the value of an indexing operation with an unknown index, if all elements of ``value`` are equal.

        The index of ``x[:, [-1, 0]]`` is unknown, because torch creates it on the device without a call to the mode.
        """
        if value.numel() and bool((value == value.flatten()[0]).all()):
            out._value = value.flatten()[0].expand(out.shape)  # type: ignore[attr-defined]

    def _spread_tokens_evenly(self, indices: Tensor, num_experts: int) -> None:
        if indices.numel() <= MAX_VALUE_ELEMENTS:
            indices._value = torch.arange(indices.numel()).remainder(num_experts).view(indices.shape)  # type: ignore[attr-defined]


def _compute_attached_value(x: Tensor) -> Tensor | None:
    """Return the known value of a ``meta`` tensor, computed now if needed; None if the value is unknown."""
    value = _attached_value(x)
    return value.value() if isinstance(value, DeferredValue) else value


def _attached_value(x: Any) -> Tensor | DeferredValue | None:
    """Return the known value of a ``meta`` tensor, perhaps not yet computed; None if the value is unknown.

    The value of a floating-point constant is unknown once an operator has written to the tensor.
    """
    value: Tensor | DeferredValue | None = getattr(x, "_value", None)
    constant, version = getattr(x, "_constant", (None, None))
    return constant if value is None and version == x._version else value


@lru_cache(maxsize=1024)
def _writes_in_place(func: Any) -> bool:
    return bool(func._schema.is_mutable)


RESHAPING = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_", "detach_"}
"""In-place operators that change the shape, strides or storage of their tensor."""


ResultKind = Literal["in place", "given", "new", "several", "grouped", "other"]
"""Kinds of an operator's result: the first argument (in place), the argument ``out`` (given), a new tensor, several new
tensors, a grouped product, or another result.
"""

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]

MAX_CACHED_LAYOUTS = 1 << 16
"""Largest number of cached shapes."""


class ResultShapes:
    """Calls operators on ``meta`` tensors with cached result shapes; used in a dispatch mode.

    Attributes:
        layouts: Shape, strides and dtype of results, by operator and by shapes, strides and dtypes of its arguments;
            shared by all steps.
    """

    layouts: ClassVar[dict[Any, Any]] = {}

    def call_operator(self, func: Any, kind: ResultKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)``, created from the cached layout on a cache hit.

        ``kind`` is the result of :func:`classify_result`.
        """
        if kind == "other":
            return func(*args, **kwargs)
        if kind == "in place":
            first = args[0]
            copied = func is torch.ops.aten.copy_.default and args[1].is_meta  # to the host: torch 2.11 refuses it
            return first if first.is_meta or copied else func(*args, **kwargs)
        if kind == "given":
            given = kwargs["out"]
            return given if given.is_meta and given.numel() else func(*args, **kwargs)
        if kind == "grouped" and args[0].is_meta:
            return _grouped_product(func, args, kwargs)
        try:
            key = (id(func), _cache_key(args), _cache_key(tuple(kwargs.items())) if kwargs else ())
            known = self.layouts.get(key)
        except TypeError:  # an argument cannot be hashed
            return func(*args, **kwargs)
        if known is not None:
            return _make_result(known) if kind == "new" else tuple(_make_result(each) for each in known)
        out = func(*args, **kwargs)
        layout = _result_layout(out, args) if kind == "new" else _result_layouts(out, args)
        if layout is not None:
            if len(self.layouts) >= MAX_CACHED_LAYOUTS:
                self.layouts.clear()
            self.layouts[key] = layout
        return out


def _make_result(layout: Any) -> Any:
    if type(layout) is not tuple:
        return layout
    return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")


def _result_layout(out: Any, args: tuple[Any, ...]) -> _Layout | None:
    """Return shape, strides and dtype of a result on ``meta`` that shares no memory; None for other results."""
    if not isinstance(out, Tensor) or out.device.type != "meta" or _shares_storage(out, args):
        return None
    return out.shape, out.stride(), out.dtype


def _result_layouts(out: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return shape, strides and dtype of several results, and numbers as they are; None if one cannot be cached."""
    if type(out) is not tuple:
        return None
    found = [_result_layout(item, args) if isinstance(item, Tensor) else item for item in out]
    tensors = [layout for layout, item in zip(found, out, strict=True) if isinstance(item, Tensor)]
    others = [layout for layout, item in zip(found, out, strict=True) if not isinstance(item, Tensor)]
    if None in tensors or any(item is not None and type(item) not in (int, float, bool) for item in others):
        return None
    return tuple(found)


def classify_result(func: Any) -> ResultKind:
    if func is torch.ops.aten._grouped_mm.default:
        return "grouped"
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if name in ("mm", "addmm") and [each.name for each in schema.arguments if each.is_out] == ["out"]:
        return "given"
    if name == "_unsafe_view":  # a view whose schema does not declare a view
        return "other"
    if len(schema.returns) > 1 and not schema.is_mutable and not any(item.alias_info for item in schema.returns):
        return "other" if func in VALUE_DEPENDENT else "several"
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return "other"
    alias = schema.returns[0].alias_info
    if alias is None:
        return "other" if schema.is_mutable else "new"
    writes_first = schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write
    return "in place" if alias.is_write and writes_first and name not in RESHAPING else "other"


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the result of a grouped product on ``meta``.

    torch's shape function supports only bf16, while the kernels support more dtypes.
    """

    def as_bf16(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device="meta")

    out = func(as_bf16(args[0]), as_bf16(args[1]), *args[2:], **kwargs)
    return torch.empty_strided(out.shape, out.stride(), dtype=args[0].dtype, device="meta")


def _shares_storage(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Return True if ``out`` is a view of one of ``args`` or of another tensor; schemas do not declare all views."""
    storage = out.untyped_storage()
    if any(isinstance(item, Tensor) and item.untyped_storage()._cdata == storage._cdata for item in args):
        return True
    contiguous = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    return bool(out.storage_offset()) or storage.nbytes() != contiguous.untyped_storage().nbytes()


def _cache_key(items: tuple[Any, ...]) -> tuple[Any, ...]:
    out: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            out.append((item.shape, item.stride(), item.dtype, item.is_meta))
        elif isinstance(item, (list, tuple)):
            out.append(_cache_key(tuple(item)))
        else:
            out.append((type(item), item))
    return tuple(out)


Model = TypeVar("Model", bound=nn.Module)


def meta_copy(model: Model) -> Model:
    """Return a copy of ``model`` on ``meta``: the same modules, shapes, dtypes and adapters, without values."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _to_meta(tensor, isinstance(module._parameters.get(name), nn.Parameter))
    return copy.deepcopy(model, memo)


def _to_meta(tensor: Tensor, is_parameter: bool) -> Tensor:
    state = getattr(tensor, "quant_state", None)
    if state is not None:  # bitsandbytes: the scales are copied too
        packed = torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")
        kind: Any = type(tensor)
        return _attach_quant_state(kind(packed, requires_grad=tensor.requires_grad, bnb_quantized=True), tensor, state)
    if is_traceable_wrapper_subclass(tensor) or isinstance(tensor, PackedExperts):
        moved = tensor.detach().to("meta")
    else:
        moved = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if is_parameter else moved


def _attach_quant_state(made: Any, tensor: Any, state: Any) -> Tensor:
    kept = {name: value for name, value in vars(tensor).items() if name not in ("quant_state", "module")}
    made.__dict__.update(kept, quant_state=_quant_state_to_meta(state))
    return made


def _quant_state_to_meta(state: Any) -> Any:
    made = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor) and value.dim():
            setattr(made, name, value.to("meta"))
        elif type(value) is type(state):
            setattr(made, name, _quant_state_to_meta(value))
    return made


Rule = Literal["lower", "fp32", "to fp32", "widest"]
"""Actions of autocast: cast arguments to the lower precision, to fp32, or to the widest dtype among the arguments; ``to
fp32`` makes the result fp32 unless the call has a dtype.
"""


def _name_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


LOWER = _name_set(
    "linear matmul mm bmm addmm addbmm baddbmm einsum conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d prelu linalg_vecdot scaled_dot_product_attention"
)
"""Functions cast to the lower precision on every device. The CPU has no rule for ``einsum``, only for its parts."""

LOSSES = _name_set(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss margin_ranking_loss "
    "cosine_embedding_loss hinge_embedding_loss soft_margin_loss multi_margin_loss multilabel_margin_loss "
    "triplet_margin_loss binary_cross_entropy_with_logits"
)
RULES: dict[str, dict[Rule, frozenset[str]]] = {
    "cpu": {
        "lower": LOWER,
        "fp32": LOSSES | _name_set("prod cdist trace polar view_as_complex quantile nanquantile"),
        "widest": _name_set("cat stack index_copy"),
    },
    "cuda": {
        "lower": LOWER | {"addmv", "addr", "mv", "chain_matmul"},
        "fp32": LOSSES
        | _name_set(
            "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow softplus layer_norm "
            "rms_norm group_norm cosine_similarity cdist dist pdist renorm logsumexp"
        ),
        "to fp32": _name_set("softmax log_softmax sum prod cumsum cumprod"),
        "widest": _name_set("addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"),
    },
}
"""Functions with an autocast rule, by device type; functions that no language model calls are left out."""

SPELLINGS = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow", "__rpow__": "pow"}


@lru_cache(maxsize=4096)
def autocast_rule(func: Any, device: str) -> Rule | None:
    """Return autocast's rule for a function of torch, by its name; None if autocast does not change it."""
    if isinstance(func, OpOverloadPacket) and not func._qualified_op_name.startswith("aten::"):
        return None
    name = getattr(func, "__name__", "")
    name = SPELLINGS.get(name, name)
    return next((rule for rule, names in RULES[device].items() if name in names), None)


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Context manager in which ``torch.autocast("meta")`` controls the simulated device's autocast.

    torch rejects ``meta``, but some models call ``torch.autocast`` with their tensors' device type, as adapters on
    fused experts do to disable autocast.
    """
    original_init, switch = torch.autocast.__init__, autocast_device_type(torch.device("meta"))

    def patched_init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original_init(self, switch if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = patched_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original_init  # type: ignore[method-assign]


class MetaAutocast:
    """Casts the arguments of operators on ``meta`` as autocast casts them on the simulated device.

    Autocast is enabled if it is enabled for the device type that
    :func:`~streamtune.ops.devices.autocast_device_type` returns for ``meta``.
    """

    def __init__(self, device: str) -> None:
        self.device, self.switch = device, autocast_device_type(torch.device("meta"))
        self._cached_casts: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def outermost_autocast(self) -> Iterator[None]:
        """Context manager for an outermost autocast region; cached casts are freed at its end."""
        try:
            yield
        finally:
            self._cached_casts.clear()

    def cast_arguments(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rule = autocast_rule(func, self.device)
        if rule is None or not torch.is_autocast_enabled(self.switch):
            return args, kwargs
        if rule == "to fp32":
            first = args[0] if args else kwargs.get("input")
            dtype_given = any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values()))
            return args, {**kwargs, "dtype": torch.float32} if _is_castable(first) and not dtype_given else kwargs
        lower = torch.get_autocast_dtype(self.switch)
        dtype = lower if rule == "lower" else torch.float32
        if rule == "widest" and not any(x.dtype == torch.float32 for x in _castables((args, tuple(kwargs.values())))):
            dtype = lower
        return self._cast(args, dtype), {name: self._cast(item, dtype) for name, item in kwargs.items()}

    def _cast(self, item: Any, dtype: torch.dtype) -> Any:
        if isinstance(item, (tuple, list)):
            return type(item)([self._cast(part, dtype) for part in item])
        if not _is_castable(item) or item.dtype == dtype:
            return item
        weight = item.dtype == torch.float32 and item.requires_grad and item.is_leaf and not item._is_view()
        if not weight or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
            return item.to(dtype)
        known = self._cached_casts.get(id(item))
        if known is None:  # the weight is stored too, so that its id is not reused
            known = self._cached_casts[id(item)] = (item, item.to(dtype))
        return known[1]


def _is_castable(item: Any) -> bool:
    if not isinstance(item, Tensor) or item.device.type != "meta":
        return False
    return item.is_floating_point() and item.dtype != torch.float64


def _castables(item: Any) -> Iterator[Tensor]:
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from _castables(part)
    elif _is_castable(item):
        yield item
