"""Parts of a layer that are computed in another way than its modules are written: the same function, but for rounding.

**Linear modules**, called for one chunk after another. Autocast casts a weight whenever its module is called: here it
is cast once for a walk over the chunks. And the gradient of a weight,

    dL/dW = sum_i  (dL/dy_i)' x_i,

is added to its sum over the chunks by the matrix product itself, which reads and writes the sum once, in place of a
product that is written out, read again and added. In bf16 the sum then rounds once per chunk, in fp32, and not before.

**Norms and rotary embeddings**, on a device where each operator of their formulas is a separate kernel that reads and
writes memory: one kernel for a norm, three for an embedding. A part qualifies by what it computes, not by its name: its
own forward and the formula are compared on random numbers when the layer is streamed. Anything else stays as it is.

Everything but the call of such a module still sees the module and its weight.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

from streamtune.engine.observe import Autocast, function_modes, restore_forward
from streamtune.engine.sharded import is_sharded
from streamtune.engine.vjp import GradientSum
from streamtune.ops.devices import autocast_kind
from streamtune.ops.fused import norm_is_right, rms_norm, rotary

KINDS = (Tensor, nn.Parameter)
"""Types of tensors that are computed with here. Quantised and sharded tensors have types of their own."""

LINEAR_FORWARD = nn.Linear.forward


class Linears:
    """The linear modules of one layer, for one walk over the chunks of a sequence.

    Modules keep their own forward if their weights have other types, if ranks share the weights of the layer, if a part
    of the layer is compiled, or if somebody replaced what a linear module computes. Weights of a layer with hooks are
    not cast once: a hook may write them before each chunk.

    Args:
        autocast: Autocast settings of its forward.
        sums: Gradient accumulators of the parameters, in a backward.
    """

    def __init__(self, layer: nn.Module, autocast: Autocast, sums: Sequence[GradientSum] = ()) -> None:
        self.autocast = autocast
        self._casts: dict[int, Tensor] = {}
        self._calls: list[_Call] = []
        parts = list(layer.modules())
        if not (sums or autocast.enabled) or any(is_sharded(part) or _is_compiled(part) for part in parts):
            return
        # Hooks of the layer itself run once, before its chunks.
        hooked = any(part._forward_pre_hooks or part._forward_hooks for part in parts[1:])
        by_owner = {id(total.owner): total for total in sums}
        for module in parts:
            if not _is_plain(module):
                continue
            assert isinstance(module, nn.Linear)
            weight = None if hooked else self._cast(module.weight)
            bias = None if hooked or module.bias is None else self._cast(module.bias)
            if module.bias is not None and (weight is None) != (bias is None):
                continue  # autocast would cast one of them
            both = by_owner.get(id(module.weight)), by_owner.get(id(module.bias))
            if weight is not None or any(both):
                self._calls.append(_Call(module, autocast, weight, bias, both))

    @torch.no_grad()
    def _cast(self, x: Tensor) -> Tensor | None:
        """Return ``x`` in autocast's dtype, or None where autocast would leave it."""
        if not self.autocast.enabled or x.dtype != torch.float32:
            return None
        if autocast_kind(x.device) != self.autocast.device_type:
            return None
        if id(x) not in self._casts:
            self._casts[id(x)] = x.detach().to(self.autocast.dtype)
        return self._casts[id(x)]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context for one chunk: the modules compute as described."""
        for call in self._calls:
            call.module.forward = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            for call in self._calls:
                restore_forward(call.module, None)


@dataclass(frozen=True)
class _Call:
    module: nn.Linear
    autocast: Autocast
    weight: Tensor | None
    """Weight in autocast's dtype; None if autocast leaves it."""
    bias: Tensor | None
    sums: tuple[GradientSum | None, GradientSum | None]
    """Gradient accumulators of weight and bias; None if no gradient is wanted."""

    def __call__(self, input: Tensor) -> Tensor:
        if _saves_elsewhere() or not is_linear_original():
            return nn.Linear.forward(self.module, input)
        own = [p for p in (self.module.weight, self.module.bias) if p is not None]
        x, now = input, Autocast.now(input.device)
        weight: Tensor = self.module.weight
        bias: Tensor | None = self.module.bias
        if self.weight is not None and now == self.autocast and x.is_floating_point() and x.dtype != torch.float64:
            x, weight, bias = x.to(self.weight.dtype), self.weight, self.bias
        as_given = type(x) in KINDS and x.dtype == weight.dtype and (not now.enabled or now.dtype == x.dtype)
        wanted = torch.is_grad_enabled() and any(p.requires_grad for p in own)
        summed = all(total is not None or not p.requires_grad for p, total in zip(own, self.sums, strict=False))
        if not as_given or (wanted and not summed):
            return nn.Linear.forward(self.module, input)
        return _Linear.apply(x, weight, bias, self.sums, *own) if wanted else linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """``x W' + b``, whose backward adds the gradients of W and b to their sums.

    The parameters are inputs so that the result needs a gradient where they do; none is returned for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: tuple[GradientSum | None, GradientSum | None],
        *own: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.sums, ctx.others = weight.detach(), sums, 3 + len(own)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (weight_sum, bias_sum) = ctx.saved_tensors, ctx.sums
        grad_nV = grad.reshape(-1, grad.shape[-1])
        if weight_sum is not None:
            weight_sum.add_outer(grad_nV, x.reshape(-1, x.shape[-1]))
        if bias_sum is not None:
            bias_sum.add(grad_nV.sum(0, dtype=bias_sum.sum_dtype))
        grad_x = grad @ ctx.weight if ctx.needs_input_grad[0] else None
        return (grad_x, *[None] * ctx.others)


def _is_plain(module: nn.Module) -> bool:
    """Return True for a linear module as torch defines it, with floating-point weights of its own."""
    if type(module).forward is not nn.Linear.forward or "forward" in module.__dict__:
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return type(weight) in KINDS and (bias is None or type(bias) in KINDS)


def is_linear_original() -> bool:
    """Return False if linear modules compute something else now: a function was replaced, or a mode intercepts it."""
    if nn.Linear.forward is not LINEAR_FORWARD or functional.linear is not torch._C._nn.linear:
        return False
    return not function_modes()


def _saves_elsewhere() -> bool:
    """Return True inside ``saved_tensors_hooks``, such as a checkpoint's inside a layer.

    The checkpoint calls the module again in the backward, and both calls have to save the same tensors.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _is_compiled(module: nn.Module) -> bool:
    return module.__dict__.get("_compiled_call_impl") is not None or type(module).__name__ == "OptimizedModule"


# Norms and rotary embeddings.


class FusedParts:
    """The norms of one layer, and the rotary embeddings its attentions call."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._norms: list[_Norm] = []
        self._rotary: list[tuple[dict[str, Any], _Rotary]] = []
        self._find()

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": self.layer}  # a copy finds its own: functions are in modules, which are not copied

    def _find(self) -> None:
        self._norms, self._rotary = [], []
        if any(map(_is_compiled, self.layer.modules())):
            return
        seen: set[int] = set()
        for module in self.layer.modules():
            if "forward" not in module.__dict__ and (form := _norm_form(module)) is not None:
                self._norms.append(_Norm(module, form, type(module).forward))
            names = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
            function = names.get(ROTARY)
            if id(names) not in seen and callable(function) and _is_rotary(function):
                self._rotary.append((names, _Rotary(function)))
            seen.add(id(names))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context for one chunk: norms and rotary embeddings are computed by the fused operators.

        A norm or a function that somebody has replaced since is called as it is now.
        """
        if "_norms" not in self.__dict__:
            self._find()
        norms = [norm for norm in self._norms if norm.is_as_written()]
        rotary = [(names, fused) for names, fused in self._rotary if names.get(ROTARY) is fused.own]
        for norm in norms:
            norm.module.forward = norm
        for names, fused in rotary:
            names[ROTARY] = fused
        try:
            yield
        finally:
            for names, fused in rotary:
                names[ROTARY] = fused.own
            for norm in norms:
                restore_forward(norm.module, None)


ROTARY = "apply_rotary_pos_emb"
"""Function by which the attentions of ``transformers`` rotate queries and keys, in the module of each family."""


@dataclass(frozen=True)
class _Form:
    """The formula of a norm: ``x / sqrt(mean(x^2) + eps) * (offset + weight)``."""

    eps: float
    offset: float
    widens: bool
    """True if the result has the dtype of the weight where that is wider than the input's."""


@dataclass(frozen=True)
class _Norm:
    module: nn.Module
    form: _Form
    own: Callable[..., Any]
    """The ``forward`` of its class when it was compared with the formula."""

    def is_as_written(self) -> bool:
        """Return True if neither the module nor its class was given another ``forward`` since."""
        return "forward" not in self.module.__dict__ and type(self.module).forward is self.own

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        form, weight = self.form, self.module._parameters.get("weight")
        plain = type(x) in KINDS and x.is_floating_point() and (weight is None or type(weight) in KINDS)
        if args or kwargs or not plain or not norm_is_right(x.device, x.dtype):  # such as the gate of a gated norm
            return self.own(self.module, x, *args, **kwargs)
        if weight is None or (weight.dtype == x.dtype and not form.offset):
            return rms_norm(x, weight, form.eps)
        result = torch.promote_types(x.dtype, weight.dtype) if form.widens else x.dtype
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        factor = form.offset + weight.to(wide) if form.offset else weight.to(wide)
        return rms_norm(x.to(wide), factor, form.eps).to(result)


def _norm_form(module: nn.Module) -> _Form | None:
    """Return the formula that a module computes, if it is a root mean square norm with one weight or none."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    eps = next((module.__dict__[name] for name in ("variance_epsilon", "eps", "epsilon") if name in module.__dict__), 0)
    if names not in ([], ["weight"]) or module._modules or module._buffers or not isinstance(eps, float):
        return None
    if isinstance(module, nn.RMSNorm):  # torch's own is one kernel already
        return None
    weight = module._parameters.get("weight")
    shape = getattr(weight, "ds_shape", torch.Size([16]) if weight is None else weight.shape)  # of ZeRO-3 the whole's
    if len(shape) != 1:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(4, *shape, generator=generator, device="cpu") * torch.tensor(
        [[1e-3], [1e-2], [1.0], [30.0]], device="cpu"
    )
    w = torch.randn(*shape, generator=generator, device="cpu")
    own = copy.copy(module)
    own.__dict__["_parameters"] = {**module._parameters, **({"weight": nn.Parameter(w)} if names else {})}
    try:
        with torch.no_grad():
            want = type(module).forward(own, x)
            mixed = type(module).forward(own, x.bfloat16())
            if names:
                own._parameters["weight"] = nn.Parameter(w.bfloat16())
            narrow = type(module).forward(own, x.bfloat16())
    except Exception:  # it is called in another way
        return None
    if not isinstance(want, Tensor) or want.shape != x.shape or narrow.dtype != torch.bfloat16:
        return None
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0) if names else (0.0,):
        if _close(want, normed * (offset + w) if names else normed):
            return _Form(eps, offset, widens=mixed.dtype == torch.float32)
    return None


@dataclass(frozen=True)
class _Rotary:
    """The function that rotates queries and keys, by the fused operator where it fits."""

    own: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _fit(*args):
            q, k, cos, sin = args
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            return rotary(q, cos, sin), rotary(k, cos, sin)
        return self.own(*args, **kwargs)


def _fit(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Return True for ``[B, H, T, D]`` and ``[B, T, D]`` of one floating dtype, the second without gradient."""
    if not all(type(x) in KINDS for x in (q, k, cos, sin)) or (q.dim(), k.dim(), cos.dim(), sin.dim()) != (4, 4, 3, 3):
        return False
    width, dtype = q.shape[-1], q.dtype
    same = all(x.shape[-1] == width and x.dtype == dtype and x.device == q.device for x in (k, cos, sin))
    return same and width % 2 == 0 and not (cos.requires_grad or sin.requires_grad)


def _is_rotary(function: Callable[..., Any]) -> bool:
    """Return True if a function rotates ``(q, k, cos, sin)`` by halves."""
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, cos, sin = (
        torch.randn(*shape, 3, 8, generator=generator, device="cpu") for shape in ((1, 4), (1, 2), (1,), (1,))
    )
    try:
        with torch.no_grad():
            got = function(q, k, cos, sin)
            want = [rotary(x, cos[:, None], sin[:, None]) for x in (q, k)]
        return all(_close(a, b) for a, b in zip(got, want, strict=True))
    except Exception:  # it is called in another way
        return False


def _close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).norm() <= 1e-5 * want.norm())
