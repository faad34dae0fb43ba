"""First values of LoRA from the leading part of each weight, of its gradient, or of its quantisation error.

In their papers, ``pissa``, ``olora`` and ``lora_ga`` subtract the product ``B0 A0`` of the first values from the base.
Then every checkpoint, reference and reader of the adapters needs this changed base. Here the base does not change, and
``- B0 A0`` is a second, constant adapter. The model is the same function of the trained ``A`` and ``B``, without
rounding the base.

LoRA-GA (Wang et al., arXiv 2407.05000) starts from the gradient ``G = U S V'`` of a weight ``[out, in]`` (Algorithm 1):

    A0 = c V'[1..r],   B0 = c U[r+1..2r],   c = out^(1/4) / sqrt(gamma)

The first step of ``A`` and ``B``, with a small learning rate, then moves the weight along ``B0 B0' G + G A0' A0``. This
is ``c^2`` times the best approximation of ``G`` by rank 2r (Theorem 3.1). LoRA, with a random ``A``, moves the weight
along ``G A' A``. A gradient is decomposed and freed as soon as the backward has accumulated it, so at most one layer's
gradient exists. With several micro-batches, gradients are summed in host memory in fp32.

LoftQ (Li et al., arXiv 2310.08659) is for a quantised layer with an adapter of rank r and scale s. It starts from
``A = B = 0`` and alternates two assignments (Algorithm 1):

    Q = quantised(W - s B A),    s B A = the r largest singular values of W - Q

The iteration with the smallest ``|W - (Q + s B A)|`` is used: after the first few the error may rise again. With one
iteration Q is the quantised W, as in every other run. With more, Q is the quantised ``W - s B A``, with the ``s B A``
of the iteration before. That ``s B A`` is saved with the adapters (:data:`LOFTQ_FILE`), so a resume or an export
quantises the same weights without a decomposition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamtune.base.adapters import AdapterSpec
from streamtune.errors import ArgumentError, NonFiniteError
from streamtune.models.adapters.targets import is_whole, low_rank_layers
from streamtune.models.folder import READ

START = "start"
"""Name of the constant adapter."""
CONSTANT = (f"lora_A.{START}.weight", f"lora_B.{START}.weight")


def start_from_weights(adapted: Any, spec: AdapterSpec) -> None:
    """Set the first values of LoRA to the leading part of each weight; refuse quantised weights."""
    for name, layer in low_rank_layers(adapted):
        weight = layer.get_base_layer().weight
        if weight.device.type == "meta":
            continue
        if not is_whole(weight):
            raise ArgumentError(
                f"adapter_type: {spec.kind} starts from the weight of {name}, which is quantised",
                where="adapter_type",
                fix="write finetuning_type: lora, or adapter_type: lora",
            )
        weight = weight.detach().float()
        weight = weight.T if layer.fan_in_fan_out else weight  # [out, in]
        rank, scale = layer.r["default"], layer.scaling["default"]
        set_start(layer, *LEADING_PARTS[spec.kind](weight, rank, scale))


def _by_svd(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``A = sqrt(S) V^T`` and ``B = U sqrt(S)`` of the largest singular values (PiSSA)."""
    u, s, v = torch.svd_lowrank(weight, q=min(2 * rank, *weight.shape), niter=8)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * v[:, :rank].T, u[:, :rank] * root


def _by_qr(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``A = R`` and ``B = Q`` (OLoRA)."""
    q, r = torch.linalg.qr(weight)
    return r[:rank] / scale**0.5, q[:, :rank] / scale**0.5


LEADING_PARTS: Mapping[str, Callable[[Tensor, int, float], tuple[Tensor, Tensor]]] = {"pissa": _by_svd, "olora": _by_qr}
"""By kind: function of a weight ``[out, in]``, a rank and a scale that returns ``A`` and ``B``."""


def set_start(layer: Any, down: Tensor, up: Tensor) -> None:
    """Set a layer's trained adapter to ``A0`` ``[r, in]`` and ``B0`` ``[out, r]``, the constant one to the opposite."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.copy_(down)
    b.copy_(up)
    layer.lora_A[START].weight.copy_(a)
    layer.lora_B[START].weight.copy_(-b)


def started_values(adapted: Any) -> Iterator[Tensor]:
    """Yield all tensors that :func:`set_start` writes, layer by layer."""
    for _, layer in low_rank_layers(adapted):
        for parts in (layer.lora_A, layer.lora_B):
            yield from (parts[name].weight for name in ("default", START))


def add_start(adapted: Any) -> None:
    """Add the constant adapter. Its values are buffers, because peft trains the parameters of active adapters."""
    plain = copy.deepcopy(adapted.peft_config["default"])
    plain.lora_dropout, plain.modules_to_save, plain.trainable_token_indices = 0.0, None, None
    adapted.add_adapter(START, plain)
    for _, layer in low_rank_layers(adapted):
        for part in (layer.lora_A[START], layer.lora_B[START]):
            values = part.weight.detach()
            del part.weight
            part.register_buffer("weight", values)
        layer.set_adapter(["default", START])
    del adapted.peft_config[START]  # code that reads peft_config sees one adapter


Factors = dict[str, tuple[Tensor, Tensor]]
"""``A`` ``[r, in]`` and ``B`` ``[out, r]`` by the layer's name in the base."""


def first_factors(adapted: Any, losses: Sequence[Callable[[], Tensor]], *, gamma: float, seed: int) -> Factors:
    """Return the first values of a model's adapters, computed from gradients (``lora_ga``).

    The model, streamed or not, has adapters that have no effect yet, and does not change.

    Args:
        adapted: Model with adapters.
        losses: Functions that compute the losses of micro-batches. The gradient is taken of their sum.
        gamma: Constant of the paper; both factors are proportional to ``gamma ** -0.5``.
        seed: Seed of dropout, and of the random start of each decomposition.

    Raises:
        NonFiniteError: A gradient is not finite.
    """
    layers = dict(low_rank_layers(adapted))
    names = {id(layer.get_base_layer().weight): name for name, layer in layers.items()}
    sums: dict[str, Tensor] = {}
    factors: Factors = {}

    def on_gradient(weight: Tensor, last: bool) -> None:
        name, grad = names[id(weight)], weight.grad
        assert grad is not None, "it has just been accumulated"
        weight.grad = None
        if not last:
            part = grad.detach().to("cpu", torch.promote_types(grad.dtype, torch.float32), copy=True)
            sums[name] = sums[name].add_(part) if name in sums else part
            return
        if name in sums:
            grad = sums.pop(name).to(grad.device).add_(grad)
        layer = layers[name]
        grad = grad.T if layer.fan_in_fan_out else grad
        if not torch.isfinite(grad).all():
            raise NonFiniteError(
                f"the gradient of {name}, which adapter_type: lora_ga starts from, is not finite",
                where="adapter_type",
                fix="check the rows, or write adapter_type: lora",
            )
        factors[name] = leading_factors(grad, layer.r["default"], gamma, seed)

    with torch.random.fork_rng(), torch.enable_grad(), _only_trained(adapted, names):
        for number, loss in enumerate(losses):
            torch.manual_seed(seed + number)
            hook = partial(on_gradient, last=number == len(losses) - 1)
            with _hooked([layer.get_base_layer().weight for layer in layers.values()], hook):
                loss().backward()
    for name in list(sums):  # the last micro-batch had no gradient for it
        layer, grad = layers[name], sums.pop(name)
        grad = grad.to(layer.get_base_layer().weight.device)
        factors[name] = leading_factors(grad.T if layer.fan_in_fan_out else grad, layer.r["default"], gamma, seed)
    return factors


def leading_factors(grad: Tensor, rank: int, gamma: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``A0`` ``[r, in]`` and ``B0`` ``[out, r]`` for a gradient ``[out, in]``, in fp32 or wider.

    Singular vectors come from a random projection to four times the rank (Halko et al.), as in the authors' code.
    """
    wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        u, _, v = torch.svd_lowrank(wide, q=min(4 * rank, *wide.shape), niter=4)
    scale = wide.shape[0] ** 0.25 / gamma**0.5
    return (scale * v[:, :rank].T).contiguous(), (scale * u[:, rank : 2 * rank]).contiguous()


@torch.no_grad()
def start_from_factors(adapted: Any, factors: Factors) -> None:
    """Set the first values of a model's adapters. A layer without factors, which had no gradient, does not change."""
    for name, layer in low_rank_layers(adapted):
        if name in factors:
            set_start(layer, *factors[name])


def summed_bytes(adapted: Any) -> int:
    """Return how many bytes of host memory the sums of gradients over several micro-batches take."""
    return sum(4 * layer.get_base_layer().weight.numel() for _, layer in low_rank_layers(adapted))


@contextmanager
def _only_trained(adapted: nn.Module, names: dict[int, str]) -> Iterator[None]:
    """Context manager: only the base weights that have adapters require a gradient."""
    before = [(parameter, parameter.requires_grad) for parameter in adapted.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in names)
    try:
        yield
    finally:
        for parameter, trained in before:
            parameter.requires_grad_(trained)
            if id(parameter) in names:
                parameter.grad = None


@contextmanager
def _hooked(weights: Sequence[Tensor], hook: Callable[[Tensor], None]) -> Iterator[None]:
    """Context manager: call ``hook`` with each weight when its gradient has been accumulated."""
    handles = [weight.register_post_accumulate_grad_hook(hook) for weight in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


LOFTQ_FILE = "loftq.safetensors"
"""File beside the adapters with the factors subtracted from the weights before quantisation, if there are any."""
FACTORS = "_streamtune_loftq_factors"
TAKEN = "_streamtune_loftq_taken"

Quantise = Callable[[Tensor], tuple[Any, Tensor]]
"""Function that returns a weight quantised, and the same weight dequantised to fp32, ``[out, in]``."""


class QuantisationChange(Protocol):
    """A change to weights before they are quantised."""

    def quantised(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        """Return the quantised weight of the layer ``name``.

        ``weight`` is ``[out, in]``, on the device of the quantised weight; ``quantise`` is the model's quantiser.
        """

    def finish(self, model: PreTrainedModel) -> None:
        """Record on the model what adapters and checkpoints need, after all layers are quantised."""


class LoftqStart:
    """Quantises layers by LoftQ and computes the first values of their adapters.

    ``layers`` returns the rank and scale of each layer with adapters, by name. ``iterations`` is T of the paper.
    ``seed`` is the seed of the decompositions.
    """

    def __init__(
        self,
        layers: Callable[[PreTrainedModel], Mapping[str, tuple[int, float]]],
        *,
        iterations: int,
        seed: int,
    ) -> None:
        self._find, self._iterations, self._seed = layers, iterations, seed
        self._layers: Mapping[str, tuple[int, float]] = {}
        self._factors: Factors = {}
        self._taken: Factors = {}

    def prepare(self, model: PreTrainedModel) -> None:
        """Find the layers with adapters, before any layer is quantised."""
        self._layers = self._find(model)

    @torch.no_grad()
    def quantised(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        if name not in self._layers:
            return quantise(weight)[0]
        rank, scale = self._layers[name]
        wide = weight.float()
        taken: tuple[Tensor, Tensor] | None = None
        best: tuple[float, Any, tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor]] | None = None
        for _ in range(self._iterations):
            packed, written = quantise(weight if taken is None else _subtracted(weight, taken))
            rest = wide - written
            down, up = _leading(rest, rank, self._seed)
            error = float((rest - up @ down).norm())
            if best is None or error < best[0]:
                best = error, packed, taken, (down, up)
            taken = down, up
        assert best is not None
        _, packed, before, (down, up) = best
        root = scale**0.5
        self._factors[name] = (down / root).cpu(), (up / root).cpu()
        if before is not None:
            self._taken[name] = before[0].cpu(), before[1].cpu()
        return packed

    def finish(self, model: PreTrainedModel) -> None:
        setattr(model, FACTORS, self._factors)
        setattr(model, TAKEN, self._taken)


class QuantisedBefore:
    """Quantises layers in the way of an earlier run, which subtracted factors from the weights before (LoftQ).

    ``taken`` are these factors: ``A`` and ``s B`` by name of the layer.
    """

    def __init__(self, taken: Factors) -> None:
        self._taken = taken
        self._left = set(taken)

    @classmethod
    def load(cls, folder: Path) -> QuantisedBefore | None:
        """Read :data:`LOFTQ_FILE` beside the adapters in a folder; return None if there is none."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = folder / LOFTQ_FILE
        if not path.is_file():
            return None
        try:
            saved = load_file(path, backend=READ)
            names = {name.rpartition(".")[0] for name in saved}
            return cls({name: (saved[f"{name}.A"], saved[f"{name}.B"]) for name in sorted(names)})
        except (SafetensorError, KeyError) as error:
            raise ArgumentError(
                f"{path} is damaged, which is needed to quantise the base of its adapters: {error}",
                fix="use another checkpoint of the run",
            ) from error

    @torch.no_grad()
    def quantised(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        taken = self._taken.get(name)
        if taken is None:
            return quantise(weight)[0]
        if (taken[1].shape[0], taken[0].shape[1]) != weight.shape:
            raise self._other_model_error(name)
        self._left.discard(name)
        return quantise(_subtracted(weight, taken))[0]

    def finish(self, model: PreTrainedModel) -> None:
        """Check that all layers were quantised, and record the factors in the model."""
        if self._left:
            raise self._other_model_error(min(self._left))
        setattr(model, TAKEN, self._taken)

    def _other_model_error(self, name: str) -> ArgumentError:
        return ArgumentError(
            f"the adapters (loftq_iter) were trained on another model: its layer {name} is missing here or has another "
            "shape",
            fix="use the model that they were trained on",
        )


def start_from_quantisation(model: PreTrainedModel, layers: Iterable[tuple[str, Any]]) -> None:
    """Set the first values of adapters from quantisation errors; ``layers`` has (name in the base, layer)."""
    if not hasattr(model, FACTORS):
        raise ArgumentError(
            "adapters of kind loftq start from the quantisation error, and no weights of this model were quantised for "
            "them",
            where="adapter_type",
            fix="write finetuning_type: qlora and use an unquantised checkpoint, or write adapter_type: lora",
        )
    factors: Factors = getattr(model, FACTORS)
    delattr(model, FACTORS)
    for name, layer in layers:
        if name in factors:  # other layers are not quantised and have no quantisation error
            layer.lora_A["default"].weight.copy_(factors[name][0])
            layer.lora_B["default"].weight.copy_(factors[name][1])


def taken_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to write to :data:`LOFTQ_FILE`; ``model`` is the base without wrappers."""
    taken: Factors = getattr(model, TAKEN, {})
    return {f"{name}.{key}": x for name, pair in taken.items() for key, x in zip("AB", pair, strict=True)}


def save_taken(model: nn.Module, folder: Path) -> None:
    """Write :data:`LOFTQ_FILE` beside saved adapters, if factors were subtracted from the weights."""
    from safetensors.torch import save_file

    if taken := taken_of(model):
        save_file({name: x.contiguous() for name, x in taken.items()}, folder / LOFTQ_FILE)


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model on ``meta``, without values."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and id(x) not in memo:
                moved = torch.empty_like(x.detach(), device="meta")
                memo[id(x)] = nn.Parameter(moved, requires_grad=False) if isinstance(x, nn.Parameter) else moved
    return copy.deepcopy(model, memo)


def _subtracted(weight: Tensor, taken: tuple[Tensor, Tensor]) -> Tensor:
    """Return ``W - B A`` in the dtype of W."""
    down, up = (x.to(weight.device) for x in taken)
    return (weight.float() - up @ down).to(weight.dtype)


def _leading(rest: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``A`` ``[r, in]`` and ``B`` ``[out, r]`` whose product has the largest singular values of ``rest``."""
    with torch.random.fork_rng(devices=[rest.device] if rest.device.type == "cuda" else []):
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(rest, q=min(2 * rank, *rest.shape), niter=8)
    root = s[:rank].sqrt()
    return root[:, None] * v[:, :rank].T, u[:, :rank] * root
