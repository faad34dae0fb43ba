"""A device that says it is ``cuda:0`` and computes on the CPU, for a torch without CUDA; or ``xpu:0``, or ``mps:0``.

Its tensors hold CPU numbers and are dispatched as CUDA's: the engine takes its CUDA paths, with values that are right.
Tensors of two devices in one operator raise, as they do on a device. Operators that only CUDA has are computed by their
formulas in fp64, and refuse what the real ones refuse: dtypes, head sizes, strides, alignment of biases.

``stub/claimed.cpp`` must be loaded before torch is. The variable ``CLAIMED`` names the device. On xpu and mps there is
no float64, and ``torch.cuda`` raises: nothing that runs there may call it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

KIND = os.environ.get("CLAIMED", "cuda")
CUDA = torch.device(KIND, 0)
CALLED: Counter[str] = Counter()
"""Operators that ran on the device, by name and overload."""
WAITED: Counter[str] = Counter()
"""Operators for which the host waited."""
READ = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_consecutive")
"""Operators whose results the host needs."""
ACROSS = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")
"""Operators that take tensors of the host beside those of the device."""


class Claimed(Tensor):
    """A tensor on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Claimed:
        made = Tensor._make_subclass(cls, inner, False, dispatch_device=True, device_for_backend_keys=CUDA)
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        WAITED["tolist"] += 1
        return self.inner.tolist()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Makes tensors on the device where ``cuda`` is asked for, also in threads of autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator: on the CPU's numbers if it is the device's, as it is otherwise."""
    name = func._schema.name.removeprefix("aten::")
    if func is torch.ops.prim.device.default:
        return CUDA
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours, wanted = any(isinstance(x, Claimed) for x in tensors), kwargs.get("device")
    if not ours and (wanted is None or torch.device(wanted).type != KIND):
        return func(*args, **kwargs)
    if ours and name not in ACROSS and any(not isinstance(x, Claimed) and x.dim() for x in tensors):
        raise RuntimeError(f"{name}: tensors are on {CUDA} and on the CPU")
    CALLED[f"{name}.{func._schema.overload_name}".rstrip(".")] += 1
    leaves = name == "_to_copy" and ours and wanted is not None and torch.device(wanted).type == "cpu"
    lands = name == "copy_" and not isinstance(args[0], Claimed)
    if name in READ or ((leaves or lands) and not (kwargs.get("non_blocking") or args[2:3] == (True,))):
        WAITED[name] += 1
    given = {**kwargs, **({} if wanted is None else {"device": torch.device("cpu")})}
    args_in, kwargs_in = tree_map_only(Claimed, lambda x: x.inner, (args, given))
    if KIND != "cuda" and any(x.dtype == torch.float64 for x in tensors if isinstance(x, Claimed)):
        raise TypeError(f"{name}: {KIND} has no float64")
    run = ONLY_ON_CUDA.get(f"{name}.{func._schema.overload_name}".rstrip("."), func)
    out = run(*args_in, **kwargs_in)
    for place, argument in enumerate(func._schema.arguments):  # an operator in place returns its argument
        if argument.alias_info is not None and argument.alias_info.is_write and func._schema.returns:
            return kwargs[argument.name] if argument.name in kwargs else args[place]
    return out if leaves else tree_map_only(Tensor, lambda x: x if isinstance(x, Claimed) else Claimed(x), out)


# Operators that only CUDA has.


def need(fits: bool, what: str) -> None:
    if not fits:
        raise RuntimeError(f"the kernel does not take this {what}")


def scored(
    q: Tensor, k: Tensor, scale: float, causal: bool = False, bias: Tensor | None = None, left: int = -1
) -> Tensor:
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    behind = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    scores = scores.masked_fill(behind < 0, -math.inf) if causal else scores
    scores = scores.masked_fill(behind > left, -math.inf) if left >= 0 else scores
    return scores if bias is None else scores + bias.double()


def attended(scores: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    v = v.double().repeat_interleave(scores.shape[1] // v.shape[1], 1)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).to(dtype), scores.logsumexp(-1).float()


def attended_backward(
    scores: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    p, grad = (scores - lse.double()[..., None]).exp(), grad.double()
    grad_s = p * (grad @ wide_v.mT - (grad * o.double()).sum(-1, keepdim=True)) * scale
    grad_k, grad_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (grad_s.mT @ q.double(), p.mT @ grad))
    return (grad_s @ wide_k).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def need_flash(*tensors: Tensor) -> None:
    need(len({x.dtype for x in tensors}) == 1 and tensors[0].dtype in (torch.float16, torch.bfloat16), "dtype")
    need(tensors[0].shape[-1] % 8 == 0 and tensors[0].shape[-1] <= 256, "head size")
    need(all(x.stride(-1) == 1 for x in tensors), "stride")


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def flash(
    q: Tensor, k: Tensor, v: Tensor, drop: float = 0.0, causal: bool = False, debug: bool = False, *, scale: float
) -> tuple[Any, ...]:
    need_flash(q, k, v)
    o, lse = attended(scored(q, k, scale, causal), v, q.dtype)
    none = torch.zeros(0)
    return o.transpose(1, 2).contiguous().transpose(1, 2), lse, none, none, q.shape[2], k.shape[2], none, none, none


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    need_flash(grad, q, k, v, o)
    need(lse.dtype == torch.float32 and lse.is_contiguous(), "log-sum-exp")
    return attended_backward(scored(q, k, scale, rest[5]), grad, q, k, v, o, lse, scale)


def of_rows(bounds: Sequence[Tensor]) -> list[tuple[slice, slice]]:
    """Return the queries and keys of each row."""
    need(all(each.dtype == torch.int32 for each in bounds), "bounds of rows")
    return list(zip(*([slice(*pair) for pair in pairwise(each.tolist())] for each in bounds), strict=True))


def flash_window(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, window_size_left: int = -1, window_size_right: int = -1
) -> tuple[Any, ...]:
    if rest[0] is not None:
        more = {"scale": scale, "window_size_left": window_size_left, "window_size_right": window_size_right}
        rows = of_rows(rest[:2])
        done = [flash_window(q[None, i], k[None, j], v[None, j], None, *rest[1:], **more) for i, j in rows]
        return torch.cat([x[0][0] for x in done]), torch.cat([x[1][0] for x in done], 1), *done[0][2:]
    need_flash(q, k, v)
    q, k, v = heads_first(q, k, v)
    o, lse = attended(scored(q, k, scale, rest[5] or window_size_right == 0, None, window_size_left), v, q.dtype)
    return o.transpose(1, 2).contiguous(), lse, torch.zeros(2, dtype=torch.long), torch.zeros(0), torch.zeros(0)


def flash_window_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any,
    scale: float, window_size_left: int = -1, window_size_right: int = -1,
) -> tuple[Tensor, ...]:  # fmt: skip
    if rest[0] is not None:
        more = {"scale": scale, "window_size_left": window_size_left, "window_size_right": window_size_right}
        done = []
        for i, j in of_rows(rest[:2]):
            parts = (x[None, each] for x, each in ((grad, i), (q, i), (k, j), (v, j), (o, i)))
            done.append(flash_window_backward(*parts, lse[None, :, i], None, *rest[1:], **more))
        return tuple(torch.cat([x[0] for x in each]) for each in zip(*done, strict=True))
    need_flash(grad, q, k, v, o)
    grad, q, k, v, o = heads_first(grad, q, k, v, o)
    scores = scored(q, k, scale, rest[5] or window_size_right == 0, None, window_size_left)
    return tuple(heads_first(*attended_backward(scores, grad, q, k, v, o, lse, scale)))


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, drop: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    need_flash(q, k, v)
    need(q.shape[-1] <= 128 and with_lse, "head size")
    o, lse = attended(scored(q, k, scale, causal, bias), v, q.dtype)
    none = torch.zeros(0)
    return o, lse[..., None], none, none, q.shape[2], k.shape[2], none, none, none


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    need_flash(grad, q, k, v, o)
    need(lse.shape == (*q.shape[:3], 1), "log-sum-exp")
    return attended_backward(scored(q, k, scale, rest[8], rest[2]), grad, q, k, v, o, lse[..., 0], scale)


def need_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    need(q.shape[:2] == k.shape[:2] == v.shape[:2], "number of heads")
    need(q.shape[-1] % (4 if q.dtype == torch.float32 else 8) == 0, "head size")
    if bias is not None:
        need(bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype, "bias")
        need(bias.stride(-1) == 1 and all(step % 16 == 0 for step in bias.stride()[:-1]), "stride of a bias")


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, drop: float = 0.0, causal: bool = False,
    *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    need_efficient(q, k, v, bias)
    o, lse = attended(scored(q, k, scale, causal, bias), v, q.dtype)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    seed = torch.zeros((), dtype=torch.long)
    return o.transpose(1, 2).contiguous().transpose(1, 2), lse, seed, seed


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, drop: float, wanted: list[bool], causal: bool = False, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    need_efficient(q, k, v, bias)
    need(lse.shape[2] % 32 == 0, "log-sum-exp")
    scores = scored(q, k, scale, causal, bias)
    return *attended_backward(scores, grad, q, k, v, o, lse[:, :, : q.shape[2]], scale), torch.zeros(0)


def wide_addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))


def wide_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


ONLY_ON_CUDA: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_flash_attention_forward": flash_window,
    "_flash_attention_backward": flash_window_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "histc": lambda x, *bins: torch.histc(x.double(), *bins).to(x.dtype),
    "addmm.dtype_out": wide_addmm,
    "mm.dtype": wide_mm,
}


# ``torch.cuda`` without a driver.


class Stream:
    """A stream whose work is done when it is asked for."""

    device, device_index, device_type, stream_id, cuda_stream = CUDA, 0, 1, 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def nothing(self, *args: Any) -> None: ...

    wait_stream = wait_event = synchronize = nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event(Stream):
    """An event that has happened."""

    wait = record = Stream.nothing

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Generator(torch.Generator):
    """A generator of the host that says which device it was made for."""

    device = torch.device("cpu")

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.device = torch.device(device)
        return made


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    yield


CUDA_CALLS = (
    "Stream", "Event", "stream", "current_stream", "default_stream", "synchronize", "get_device_name", "cudart",
    "get_device_properties", "get_device_capability", "get_rng_state", "set_rng_state", "mem_get_info", "empty_cache",
    "memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats",
)  # fmt: skip
"""Functions of ``torch.cuda`` that fail where there is no CUDA device."""


def install_other() -> None:
    """Let ``torch.xpu`` or ``torch.mps`` speak of the device, and ``torch.cuda`` raise."""

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"torch.cuda.{name} is called on {KIND}")

        return call

    for name in CUDA_CALLS:
        setattr(torch.cuda, name, refused(name))
    replaced: dict[str, Any] = {
        "synchronize": lambda *_: None, "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }  # fmt: skip
    if KIND == "xpu":
        properties = SimpleNamespace(has_fp64=False, total_memory=16 << 30)
        replaced |= {
            "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
            "get_device_name": lambda *_: "Claimed", "get_device_properties": lambda *_: properties,
            "mem_get_info": lambda *_: (8 << 30, 16 << 30),
            "memory_allocated": lambda *_: 1 << 30, "memory_reserved": lambda *_: 1 << 30,
            "max_memory_allocated": lambda *_: 2 << 30, "reset_peak_memory_stats": lambda *_: None,
        }  # fmt: skip
    else:
        torch.backends.mps.is_available = lambda: True  # type: ignore[assignment]
    for name, value in replaced.items():
        setattr(getattr(torch, KIND), name, value)
    torch.Generator = Generator  # type: ignore[misc]
    torch.__future__.set_overwrite_module_params_on_conversion(True)


def install() -> None:
    """Let ``torch.cuda`` speak of the device."""
    if KIND != "cuda":
        install_other()
        return
    main = Stream()
    properties = SimpleNamespace(
        name="Claimed", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, L2_cache_size=50 << 20,
        warp_size=32, shared_memory_per_block_optin=232448,
    )  # fmt: skip
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None, "Stream": Stream, "Event": Event, "stream": on_stream, "cudart": lambda: runtime,
        "current_stream": lambda device=None: main, "default_stream": lambda device=None: main,
        "synchronize": lambda device=None: None, "is_available": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_name": lambda device=None: "Claimed",
        "get_device_properties": lambda device=None: properties, "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "mem_get_info": lambda device=None: (40 << 30, 80 << 30), "is_bf16_supported": lambda *_, **__: True,
        "memory_allocated": lambda device=None: 1 << 30, "memory_reserved": lambda device=None: 1 << 30,
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    torch.Generator = Generator  # type: ignore[misc]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
