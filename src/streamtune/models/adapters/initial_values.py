"""Initial values of LoRA from the leading part of each weight, of its gradient, or of its quantisation error.

In their papers, ``pissa``, ``olora`` and ``lora_ga`` subtract the product ``B0 A0`` of the initial values from the
base. Then all users of the adapters need this changed base. Here the base does not change, and ``- B0 A0`` is a second,
constant adapter. The model is the same function of the trained ``A`` and ``B``, without rounding the base.

LoRA-GA (Wang et al., arXiv 2407.05000) starts from the gradient ``G = U S V'`` of a weight ``[out, in]`` (Algorithm 1):

    A0 = c V'[1..r],   B0 = c U[r+1..2r],   c = out^(1/4) / sqrt(gamma)

With a small learning rate, the first step of ``A`` and ``B`` then moves the weight along ``B0 B0' G + G A0' A0``. This
direction is ``c^2`` times the best approximation of ``G`` by rank 2r (Theorem 3.1). LoRA, with a random ``A``, moves
the weight along ``G A' A``. A gradient is decomposed and freed as soon as the backward has accumulated it, so at most
one layer's gradient exists. With several micro-batches, gradients are summed in host memory in fp32.

LoftQ (Li et al., arXiv 2310.08659) is for a quantised layer with an adapter of rank r and scale s. It starts from
``A = B = 0`` and alternates two assignments (Algorithm 1):

    Q = quantised(W - s B A),    s B A = the r largest singular values of W - Q

The iteration with the smallest ``|W - (Q + s B A)|`` is used: the error may rise again after the first few iterations.
With one iteration Q is the quantised W, as without LoftQ. With more iterations, Q is the quantised ``W - s B A`` for
the ``s B A`` of the previous iteration. This subtracted ``s B A`` is saved with the adapters (:data:`LOFTQ_FILE`), so a
resume or an export quantises the same weights without a decomposition.
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
from streamtune.models.adapters.targets import is_unquantized, lora_layers
from streamtune.models.folder import READ_BACKEND

START = "start"
"""Name of the constant adapter."""
CONSTANT = (f"lora_A.{START}.weight", f"lora_B.{START}.weight")


def initialize_from_weights(adapted_model: Any, spec: AdapterSpec) -> None:
    """Set the initial values of adapters from a decomposition of each weight; refuse quantised weights."""
    for name, layer in lora_layers(adapted_model):
        weight = layer.get_base_layer().weight
        if weight.device.type == "meta":
            continue
        if not is_unquantized(weight):
            raise ArgumentError(
                f"adapter_type: {spec.kind} starts from the weight of {name}, which is quantised",
                where="adapter_type",
                fix="write finetuning_type: lora, or adapter_type: lora",
            )
        weight = weight.detach().float()
        weight = weight.T if layer.fan_in_fan_out else weight  # [out, in]
        rank, scale = layer.r["default"], layer.scaling["default"]
        set_initial_factors(layer, *FACTORS_OF_WEIGHT[spec.kind](weight, rank, scale))


def _pissa_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``A = sqrt(S / scale) V^T`` and ``B = U sqrt(S / scale)`` for the largest singular values (PiSSA)."""
    u, s, v = torch.svd_lowrank(weight, q=min(2 * rank, *weight.shape), niter=8)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * v[:, :rank].T, u[:, :rank] * root


def _olora_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``A = R / sqrt(scale)`` and ``B = Q / sqrt(scale)`` of the QR decomposition, cut to the rank (OLoRA)."""
    q, r = torch.linalg.qr(weight)
    return r[:rank] / scale**0.5, q[:, :rank] / scale**0.5


FactorsOfWeight = Callable[[Tensor, int, float], tuple[Tensor, Tensor]]
FACTORS_OF_WEIGHT: Mapping[str, FactorsOfWeight] = {"pissa": _pissa_factors, "olora": _olora_factors}
"""By kind of adapter: function of a weight ``[out, in]``, a rank and a scale that returns ``A`` and ``B``."""


def set_initial_factors(layer: Any, factor_a: Tensor, factor_b: Tensor) -> None:
    """Set a layer's adapter to ``A0`` ``[r, in]`` and ``B0`` ``[out, r]``, and its constant adapter to -B0 A0."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.copy_(factor_a)
    b.copy_(factor_b)
    layer.lora_A[START].weight.copy_(a)
    layer.lora_B[START].weight.copy_(-b)


def initial_value_tensors(adapted_model: Any) -> Iterator[Tensor]:
    """Yield all tensors that :func:`set_initial_factors` writes, layer by layer."""
    for _, layer in lora_layers(adapted_model):
        for parts in (layer.lora_A, layer.lora_B):
            yield from (parts[name].weight for name in ("default", START))


def add_constant_adapter(adapted_model: Any) -> None:
    """Add a constant adapter, stored in buffers, to each layer: it cancels the trained adapter's initial product."""
    plain = copy.deepcopy(adapted_model.peft_config["default"])
    plain.lora_dropout, plain.modules_to_save, plain.trainable_token_indices = 0.0, None, None
    plain.ensure_weight_tying, plain.modules_to_tie = False, None
    adapted_model.add_adapter(START, plain)
    for _, layer in lora_layers(adapted_model):
        for part in (layer.lora_A[START], layer.lora_B[START]):
            values = part.weight.detach()
            del part.weight
            part.register_buffer("weight", values)
        layer.set_adapter(["default", START])
    del adapted_model.peft_config[START]  # code that reads peft_config sees one adapter


Factors = dict[str, tuple[Tensor, Tensor]]
"""``A`` ``[r, in]`` and ``B`` ``[out, r]`` by the layer's name in the base."""


def factors_from_gradients(
    adapted_model: Any, losses: Sequence[Callable[[], Tensor]], *, gamma: float, seed: int
) -> Factors:
    """Return the initial values of a model's adapters, computed from gradients (``lora_ga``).

    The model does not change.

    Args:
        adapted_model: Model, streamed or not, with adapters that have no effect yet.
        losses: Functions that compute the losses of micro-batches, whose sum is differentiated.
        gamma: Constant of the paper; both factors are proportional to ``gamma ** -0.5``.
        seed: Seed of dropout, and of the random start of each decomposition.

    Raises:
        NonFiniteError: A gradient is not finite.
    """
    layers = dict(lora_layers(adapted_model))
    names = {id(layer.get_base_layer().weight): name for name, layer in layers.items()}
    sums: dict[str, Tensor] = {}
    factors: Factors = {}

    def collect_gradient(weight: Tensor, is_last_batch: bool) -> None:
        name, grad = names[id(weight)], weight.grad
        assert grad is not None, "the hook runs after the gradient is accumulated"
        weight.grad = None
        if not is_last_batch:
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
        factors[name] = factors_of_gradient(grad, layer.r["default"], gamma, seed)

    with torch.random.fork_rng(), torch.enable_grad(), _train_only_adapted_weights(adapted_model, names):
        for number, loss in enumerate(losses):
            torch.manual_seed(seed + number)
            hook = partial(collect_gradient, is_last_batch=number == len(losses) - 1)
            with _gradient_hooks([layer.get_base_layer().weight for layer in layers.values()], hook):
                loss().backward()
    for name in list(sums):  # the last micro-batch had no gradient for it
        layer, grad = layers[name], sums.pop(name)
        grad = grad.to(layer.get_base_layer().weight.device)
        factors[name] = factors_of_gradient(grad.T if layer.fan_in_fan_out else grad, layer.r["default"], gamma, seed)
    return factors


def factors_of_gradient(grad: Tensor, rank: int, gamma: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return LoRA-GA's ``A0`` ``[r, in]`` and ``B0`` ``[out, r]`` for a gradient ``[out, in]``, in fp32 or wider.

    Singular vectors come from a random projection to four times the rank (Halko et al.), as in the authors' code.
    """
    wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        u, _, v = torch.svd_lowrank(wide, q=min(4 * rank, *wide.shape), niter=4)
    scale = wide.shape[0] ** 0.25 / gamma**0.5
    return (scale * v[:, :rank].T).contiguous(), (scale * u[:, rank : 2 * rank]).contiguous()


@torch.no_grad()
def initialize_from_factors(adapted_model: Any, factors: Factors) -> None:
    """Set the initial values of a model's adapters. Layers without factors, which had no gradient, do not change."""
    for name, layer in lora_layers(adapted_model):
        if name in factors:
            set_initial_factors(layer, *factors[name])


def gradient_sum_bytes(adapted_model: Any) -> int:
    """Return the bytes of host memory that are needed to sum gradients in fp32 over several micro-batches (LoRA-GA)."""
    return sum(4 * layer.get_base_layer().weight.numel() for _, layer in lora_layers(adapted_model))


@contextmanager
def _train_only_adapted_weights(adapted_model: nn.Module, name_by_weight_id: dict[int, str]) -> Iterator[None]:
    parameters = [(parameter, parameter.requires_grad) for parameter in adapted_model.parameters()]
    for parameter, _ in parameters:
        parameter.requires_grad_(id(parameter) in name_by_weight_id)
    try:
        yield
    finally:
        for parameter, trained in parameters:
            parameter.requires_grad_(trained)
            if id(parameter) in name_by_weight_id:
                parameter.grad = None


@contextmanager
def _gradient_hooks(weights: Sequence[Tensor], hook: Callable[[Tensor], None]) -> Iterator[None]:
    handles = [weight.register_post_accumulate_grad_hook(hook) for weight in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


LOFTQ_FILE = "loftq.safetensors"
"""File in the adapters' folder with the factors whose product was subtracted from the weights before quantisation."""
FACTORS = "_streamtune_loftq_factors"
SUBTRACTED = "_streamtune_loftq_taken"

Quantise = Callable[[Tensor], tuple[Any, Tensor]]
"""Function that returns a weight quantised, and the quantised weight dequantised to fp32 ``[out, in]``."""


class LayerQuantizer(Protocol):
    """Interface: quantiser of linear layers that may change weights before they are quantised."""

    def quantize_layer(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        """Return the quantised weight of the layer ``name``.

        ``weight`` is ``[out, in]``, on the device of the quantised weight. ``quantise`` is the function that quantises
        a weight.
        """

    def store_factors_on(self, model: PreTrainedModel) -> None:
        """Store the factors for adapters and checkpoints as attributes of the model; called after the last layer."""


class LoftqQuantizer:
    """Quantises layers by LoftQ and computes the initial values of their adapters from the quantisation errors.

    ``rank_and_scale_by_layer`` returns rank and scale of each layer with adapters, by name. ``iterations`` is the
    number of times that a layer is quantised; ``seed`` is the seed of the decompositions.
    """

    def __init__(
        self,
        rank_and_scale_by_layer: Callable[[PreTrainedModel], Mapping[str, tuple[int, float]]],
        *,
        iterations: int,
        seed: int,
    ) -> None:
        self._find_layers, self._iterations, self._seed = rank_and_scale_by_layer, iterations, seed
        self._layers: Mapping[str, tuple[int, float]] = {}
        self._factors: Factors = {}
        self._subtracted: Factors = {}

    def record_layers(self, model: PreTrainedModel) -> None:
        self._layers = self._find_layers(model)

    @torch.no_grad()
    def quantize_layer(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        if name not in self._layers:
            return quantise(weight)[0]
        rank, scale = self._layers[name]
        wide = weight.float()
        subtracted: tuple[Tensor, Tensor] | None = None
        best: tuple[float, Any, tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor]] | None = None
        for _ in range(self._iterations):
            packed, written = quantise(weight if subtracted is None else _subtract_product(weight, subtracted))
            residual = wide - written
            down, up = _truncated_svd(residual, rank, self._seed)
            error = float((residual - up @ down).norm())
            if best is None or error < best[0]:
                best = error, packed, subtracted, (down, up)
            subtracted = down, up
        assert best is not None
        _, packed, best_subtracted, (down, up) = best
        root = scale**0.5
        self._factors[name] = (down / root).cpu(), (up / root).cpu()
        if best_subtracted is not None:
            self._subtracted[name] = best_subtracted[0].cpu(), best_subtracted[1].cpu()
        return packed

    def store_factors_on(self, model: PreTrainedModel) -> None:
        setattr(model, FACTORS, self._factors)
        setattr(model, SUBTRACTED, self._subtracted)


class SavedLoftqQuantizer:
    """Quantises layers as an earlier LoftQ run did: first subtracts the product of that run's factors from each weight.

    ``subtracted`` has these factors, ``A`` and ``s B``, by the layer's name.
    """

    def __init__(self, subtracted: Factors) -> None:
        self._subtracted = subtracted
        self._unused = set(subtracted)

    @classmethod
    def load(cls, folder: Path) -> SavedLoftqQuantizer | None:
        """Return the quantiser for the :data:`LOFTQ_FILE` in an adapter folder; None if the folder has no such file."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = folder / LOFTQ_FILE
        if not path.is_file():
            return None
        try:
            saved = load_file(path, backend=READ_BACKEND)
            names = {name.rpartition(".")[0] for name in saved}
            return cls({name: (saved[f"{name}.A"], saved[f"{name}.B"]) for name in sorted(names)})
        except (SafetensorError, KeyError) as error:
            raise ArgumentError(
                f"{path} is damaged; it is needed to quantise the base of the adapters: {error}",
                fix="use another checkpoint of the run",
            ) from error

    @torch.no_grad()
    def quantize_layer(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        subtracted = self._subtracted.get(name)
        if subtracted is None:
            return quantise(weight)[0]
        if (subtracted[1].shape[0], subtracted[0].shape[1]) != weight.shape:
            raise self._make_other_model_error(name)
        self._unused.discard(name)
        return quantise(_subtract_product(weight, subtracted))[0]

    def store_factors_on(self, model: PreTrainedModel) -> None:
        """Check that the factors of all layers were subtracted, and store the factors as an attribute of the model."""
        if self._unused:
            raise self._make_other_model_error(min(self._unused))
        setattr(model, SUBTRACTED, self._subtracted)

    def _make_other_model_error(self, name: str) -> ArgumentError:
        return ArgumentError(
            f"the adapters (loftq_iter) were trained on another model: its layer {name} is missing in this model or "
            "has another shape",
            fix="use the model that they were trained on",
        )


def initialize_from_quantization_error(model: PreTrainedModel, layers: Iterable[tuple[str, Any]]) -> None:
    """Initialise adapters from the quantisation errors of ``layers``, given as (name in the base model, layer)."""
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


def loftq_file_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to write to :data:`LOFTQ_FILE`, by name; ``model`` is the base without peft's wrappers."""
    subtracted: Factors = getattr(model, SUBTRACTED, {})
    return {f"{name}.{key}": x for name, pair in subtracted.items() for key, x in zip("AB", pair, strict=True)}


def save_loftq_file(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    if tensors := loftq_file_tensors(model):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / LOFTQ_FILE)


def copy_to_meta(model: PreTrainedModel) -> PreTrainedModel:
    memo: dict[int, Any] = {}
    for module in model.modules():
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and id(x) not in memo:
                moved = torch.empty_like(x.detach(), device="meta")
                memo[id(x)] = nn.Parameter(moved, requires_grad=False) if isinstance(x, nn.Parameter) else moved
    return copy.deepcopy(model, memo)


def _subtract_product(weight: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    down, up = (x.to(weight.device) for x in factors)
    return (weight.float() - up @ down).to(weight.dtype)


def _truncated_svd(matrix: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``A`` ``[r, in]`` and ``B`` ``[out, r]``, where ``B A`` is the best rank-r approximation of ``matrix``."""
    with torch.random.fork_rng(devices=[matrix.device] if matrix.device.type == "cuda" else []):
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(matrix, q=min(2 * rank, *matrix.shape), niter=8)
    root = s[:rank].sqrt()
    return root[:, None] * v[:, :rank].T, u[:, :rank] * root
