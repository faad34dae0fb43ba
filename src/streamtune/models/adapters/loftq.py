"""Adapters that start from what quantisation takes from the weights: LoftQ (Li et al., arXiv 2310.08659).

For each quantised layer with an adapter of rank r, scaled by s, the paper's algorithm 1 alternates

    Q = quantised(W - s B A),    s B A = the r largest singular values of W - Q

from ``A = B = 0``, so that ``Q + s B A`` is nearer to W than the quantised W is. Q is made by the quantiser that the
layer has, and written out as the layer computes with it. Of the iterations the one whose ``|W - (Q + s B A)|`` is the
smallest is kept: beyond the first few the error may rise again.

With one iteration Q is the quantised W, which every other run has too. After more it is that of ``W - s B A`` with the
``s B A`` of the iteration before. These are small, and are saved with the adapters (:data:`LOFTQ_FILE`): a resume and
an export quantise the same weights again, and decompose nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamtune.errors import ArgumentError
from streamtune.models.reading import READ

LOFTQ_FILE = "loftq.safetensors"
"""What is taken from the weights before they are quantised, beside the adapters; absent where nothing is."""
FACTORS = "_streamtune_loftq_factors"
TAKEN = "_streamtune_loftq_taken"

Quantise = Callable[[Tensor], tuple[Any, Tensor]]
"""Returns the quantised weight, and the same written out in fp32, ``[out, in]``."""
Factors = dict[str, tuple[Tensor, Tensor]]
"""Name of a layer -> ``A`` ``[r, in]`` and ``B`` ``[out, r]``, in fp32 on the CPU."""


class QuantisationChange(Protocol):
    """A change of weights before they are quantised."""

    def quantised(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        """Return the quantised weight of a layer.

        Args:
            name: Of the layer in the model.
            weight: ``[out, in]``, on the device of the quantised one.
            quantise: The model's quantiser.
        """

    def finish(self, model: PreTrainedModel) -> None:
        """Note in the model what adapters and checkpoints need, once all layers are quantised."""


class LoftqStart:
    """Quantises layers by LoftQ and finds what their adapters start from.

    Args:
        layers: Finds the layers with adapters: name -> rank and scale.
        iterations: T of the paper.
        seed: Of the decompositions.
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
        """Find the layers, before any is quantised."""
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
            packed, written = quantise(weight if taken is None else _less(weight, taken))
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
    """Quantises layers as a run did, from what it took from the weights.

    Args:
        taken: Name of a layer -> ``A`` and ``s B``.
    """

    def __init__(self, taken: Factors) -> None:
        self._taken = taken
        self._left = set(taken)

    @classmethod
    def of(cls, folder: Path) -> QuantisedBefore | None:
        """Return the change of the adapters in a folder; None where there is none.

        Raises:
            ArgumentError: The file is damaged.
        """
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
                f"{path} is damaged, by which the base of its adapters was quantised: {error}",
                mend="use another checkpoint of the run",
            ) from error

    @torch.no_grad()
    def quantised(self, name: str, weight: Tensor, quantise: Quantise) -> Any:
        taken = self._taken.get(name)
        if taken is None:
            return quantise(weight)[0]
        if (taken[1].shape[0], taken[0].shape[1]) != weight.shape:
            raise self._another(name)
        self._left.discard(name)
        return quantise(_less(weight, taken))[0]

    def finish(self, model: PreTrainedModel) -> None:
        """Check that all layers were quantised, and note what was taken from them.

        Raises:
            ArgumentError: The model lacks a layer.
        """
        if self._left:
            raise self._another(min(self._left))
        setattr(model, TAKEN, self._taken)

    def _another(self, name: str) -> ArgumentError:
        return ArgumentError(
            f"the adapters (loftq_iter) were trained on another model: {name} is not the layer that was quantised for "
            "them",
            mend="name the model they were trained on",
        )


def first_values(model: PreTrainedModel) -> Factors:
    """Return what the adapters start from, once; the model keeps it no longer.

    Raises:
        ArgumentError: The model was not quantised by :class:`LoftqStart`.
    """
    if not hasattr(model, FACTORS):
        raise ArgumentError(
            "adapters of kind loftq start from the difference between the weights and their quantised form, and this "
            "model has not both",
            where="adapter_type",
            mend="write finetuning_type: qlora and name a checkpoint that is not quantised, or adapter_type: lora",
        )
    found: Factors = getattr(model, FACTORS)
    delattr(model, FACTORS)
    return found


def start_from_quantisation(model: PreTrainedModel, layers: Iterable[tuple[str, Any]]) -> None:
    """Start the adapters of quantised layers.

    Args:
        model: The base, quantised by :class:`LoftqStart`.
        layers: Peft's layers, by the name of the module in the base.
    """
    factors = first_values(model)
    for name, layer in layers:
        if name in factors:  # what is not quantised has nothing to make up for
            layer.lora_A["default"].weight.copy_(factors[name][0])
            layer.lora_B["default"].weight.copy_(factors[name][1])


def taken_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of :data:`LOFTQ_FILE` of a model without wrappers; none where nothing was taken."""
    taken: Factors = getattr(model, TAKEN, {})
    return {f"{name}.{key}": x for name, pair in taken.items() for key, x in zip("AB", pair, strict=True)}


def keep_taken(model: nn.Module, folder: Path) -> None:
    """Write :data:`LOFTQ_FILE` into a folder of saved adapters, where something was taken from the weights."""
    from safetensors.torch import save_file

    if taken := taken_of(model):
        save_file({name: x.contiguous() for name, x in taken.items()}, folder / LOFTQ_FILE)


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model without values."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and id(x) not in memo:
                moved = torch.empty_like(x.detach(), device="meta")
                memo[id(x)] = nn.Parameter(moved, requires_grad=False) if isinstance(x, nn.Parameter) else moved
    return copy.deepcopy(model, memo)


def _less(weight: Tensor, taken: tuple[Tensor, Tensor]) -> Tensor:
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
