"""Adapters beside frozen weights, of the kinds that peft has and one that it has not, as a recipe names them.

    lora    rslora    dora     low-rank terms; scaled by alpha / sqrt(r); with a trained norm of each row (DoRA)
    pissa   olora              LoRA that starts from the leading part of each weight: of its SVD, or of its QR
    lora_ga                    LoRA that starts from the leading part of each weight's gradient (``lora_ga.py``)
    loftq                      LoRA that starts from what quantisation takes from each weight (``loftq.py``)
    vera    ia3                trained vectors: on shared random matrices; on the outputs of layers
    oft     hra                a trained rotation of the input: in blocks; of r reflections
    loha    lokr    miss       Hadamard products; Kronecker products; sums over blocks of the input
    paca                       some columns of each weight, drawn at random (``paca.py``)

``pissa``, ``olora`` and ``lora_ga`` of their papers take the part ``B0 A0`` that the adapters start from away from the
base, which then is another model in every checkpoint, as a reference, and to every reader of the adapters. Here the
base stays, and ``- B0 A0`` is a second, constant adapter: the same function of the trained ``A`` and ``B``, without the
rounding of the base. They are written as one LoRA of twice the rank, ``[B, -B0] [A; A0]``, which peft puts on the model
as it was, and taken apart again when a run goes on. ``paca`` is written as a LoRA whose ``A`` has a one for each
column.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamtune.base.patterns import find_matches
from streamtune.engine.hf_names import CONV1D, inside
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.models.adapters import loftq
from streamtune.models.adapters.loftq import LoftqStart
from streamtune.models.adapters.saved_settings import PEFT_FORM, check_saved_settings
from streamtune.models.reading import READ, unchanged, unmapped

if TYPE_CHECKING:  # it imports every quantiser there is: two seconds that only adapters are worth
    from peft import PeftConfig, PeftModel

START = "start"
"""Name of the constant adapter that takes away what ``pissa``, ``olora`` and ``lora_ga`` start from."""
COLUMNS = "lora_A.index"
"""End of the names of the columns that ``paca`` trains, in the state of the adapters."""
CONSTANT = (f"lora_A.{START}.weight", f"lora_B.{START}.weight")
LOW_RANK = ("lora", "rslora", "dora", "pissa", "olora", "lora_ga", "loftq", "paca")
FROM_WEIGHTS = ("pissa", "olora")
WITH_START = (*FROM_WEIGHTS, "lora_ga")
AS_LORA = (*WITH_START, "paca")
"""Kinds that are saved as another LoRA than they are trained as."""
ON_QUANTISED = ("loftq",)
"""Kinds that start where the base is quantised."""
ON_EXPERTS = ("lora", "rslora")
"""Kinds that can be on experts that are one tensor."""


@dataclass(frozen=True)
class AdapterSpec:
    """Adapters to add to a model.

    Attributes:
        kind: A key of ``KINDS``.
        r: Rank; for ``hra`` the number of reflections.
        alpha: The adapters' output is scaled by ``alpha / r`` (``rslora``: ``alpha / sqrt(r)``); None is ``2 * r``.
        dropout: On the adapters' input.
        target: ``all-linear`` (every linear layer but the head and routers, and experts that are one tensor where peft
            names them) or ends of names of modules, such as ``q_proj``, and of tensors, such as ``gate_up_proj``.
        exclude: Ends of names of modules that get no adapter.
        ranks: Patterns of the ends of names -> their rank.
        alphas: Patterns of the ends of names -> their alpha.
        whole: Ends of names of modules that are trained as they are, and saved with the adapters.
        block_size: Of the rotations of ``oft``.
    """

    kind: str = "lora"
    r: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    target: Sequence[str] | str = "all-linear"
    exclude: Sequence[str] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    whole: Sequence[str] = ()
    block_size: int = 32

    @property
    def scale(self) -> float:
        """The number that ``alpha`` stands for."""
        return 2 * self.r if self.alpha is None else self.alpha


def _lora(spec: AdapterSpec, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": spec.r,
        "lora_alpha": spec.scale,
        "lora_dropout": spec.dropout,
        "rank_pattern": dict(spec.ranks),
        "alpha_pattern": dict(spec.alphas),
        "bias": "none",
        **more,
    }


KINDS: dict[str, Callable[[AdapterSpec, int], dict[str, Any]]] = {
    "lora": _lora,
    "rslora": lambda spec, seed: _lora(spec, seed, use_rslora=True),
    "dora": lambda spec, seed: _lora(spec, seed, use_dora=True),
    "pissa": _lora,
    "olora": _lora,
    "lora_ga": lambda spec, seed: _lora(spec, seed, use_rslora=True),
    "loftq": _lora,
    "paca": lambda spec, seed: _lora(
        spec,
        seed,
        lora_alpha=spec.r,
        lora_dropout=0.0,
        alpha_pattern=dict(spec.ranks),  # a scale of 1
    ),
    "vera": lambda spec, seed: {
        "peft_type": "VERA",
        "r": spec.r,
        "vera_dropout": spec.dropout,
        "projection_prng_key": seed,
    },
    "ia3": lambda spec, seed: {"peft_type": "IA3", "feedforward_modules": []},
    "oft": lambda spec, seed: {"peft_type": "OFT", "oft_block_size": spec.block_size, "r": 0},
    "hra": lambda spec, seed: {"peft_type": "HRA", "r": spec.r},
    "loha": lambda spec, seed: {"peft_type": "LOHA", "r": spec.r, "alpha": spec.scale},
    "lokr": lambda spec, seed: {"peft_type": "LOKR", "r": spec.r, "alpha": spec.scale},
    "miss": lambda spec, seed: {"peft_type": "MISS", "r": spec.r},
}
"""Kind -> the options of peft's configuration that are its own."""


def add_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target: Sequence[str] | str = "all-linear",
    seed: int = 0,
    new_tokens: Sequence[int] = (),
) -> PeftModel:
    """Freeze ``model`` and add trainable low-rank adapters; see :class:`AdapterSpec` and :func:`add_adapters`."""
    spec = AdapterSpec(r=r, alpha=alpha, dropout=dropout, target=target)
    return add_adapters(model, spec, seed=seed, new_tokens=new_tokens)


def add_adapters(
    model: PreTrainedModel, spec: AdapterSpec, *, seed: int = 0, new_tokens: Sequence[int] = ()
) -> PeftModel:
    """Freeze ``model`` and add trainable adapters.

    Args:
        model: The base; changed in place. On ``meta`` no weight is decomposed.
        spec: The adapters. Of kind ``lora_ga`` they change nothing until ``lora_ga.py`` starts them.
        seed: Of their random start. The caller's random state is left as it was.
        new_tokens: Tokens whose rows in the embedding and the head are trained beside the adapters.

    Raises:
        ArgumentError: A name or a pattern matches nothing in this model, a rank is larger than a matrix, or adapters
            of this kind cannot be on its layers.
    """
    adapted = _added(model, spec, seed, new_tokens)
    if spec.kind in FROM_WEIGHTS:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            _start_from_weights(adapted, spec)
    elif spec.kind in WITH_START:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            _add_start(adapted)
    elif spec.kind == "loftq" and next(model.parameters()).device.type != "meta":
        factors = loftq.first_values(model)
        with torch.no_grad():
            for name, layer in low_rank_layers(adapted):
                if name in factors:  # what is not quantised has nothing to make up for
                    layer.lora_A["default"].weight.copy_(factors[name][0])
                    layer.lora_B["default"].weight.copy_(factors[name][1])
    return adapted


def loftq_start(spec: AdapterSpec, *, iterations: int, seed: int) -> LoftqStart:
    """Return the change by which a model is quantised for adapters of kind ``loftq``.

    Args:
        spec: The adapters that :func:`add_adapters` will add.
        iterations: Of quantisation and decomposition, for each layer.
        seed: Of the decompositions.
    """

    def layers(model: PreTrainedModel) -> dict[str, tuple[int, float]]:
        with torch.device("meta"):
            adapted = _added(loftq.on_meta(model), spec, seed, ())
        return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in low_rank_layers(adapted)}

    return LoftqStart(layers, iterations=iterations, seed=seed)


def _added(model: PreTrainedModel, spec: AdapterSpec, seed: int, new_tokens: Sequence[int]) -> PeftModel:
    """Add adapters as peft starts them: of kinds that start from the weights, at random."""
    from peft import get_peft_config, get_peft_model

    _check_patterns(spec, model)
    options = KINDS[spec.kind](spec, seed)
    options |= {"task_type": "CAUSAL_LM", "modules_to_save": list(spec.whole) or None}
    _matching(spec.whole, [name for name, _ in model.named_modules() if name], "modules_to_save", "module", model)
    if spec.kind in LOW_RANK:
        options |= _low_rank_targets(model, spec)
        options["trainable_token_indices"] = {name: list(new_tokens) for name in _ends(model)} if new_tokens else None
        options["ensure_weight_tying"] = bool(_shared_ends(model, spec.whole))
    else:
        options["target_modules"] = _linear_targets(model, spec)
        _refuse_for(spec, model, new_tokens)
        if spec.kind in ("hra", "loha", "lokr", "miss"):
            _check_rank([model.get_submodule(name) for name in options["target_modules"]], spec)
    config = get_peft_config(options)
    _name_experts(model, spec, config)
    if spec.kind == "paca":
        _train_columns(model, config)
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Peft gives stacked experts a rank by a pattern of its own, follows it, and then says it did not.
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # and sets it, for Conv1D
        torch.manual_seed(seed)
        try:
            adapted: PeftModel = get_peft_model(model, config)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ArgumentError(
                f"peft cannot put adapters of kind {spec.kind} on {type(model).__name__}: {error}",
                where="adapter_type",
                mend="name other layers in lora_target, or write adapter_type: lora",
            ) from error
    _check_ranks(adapted, spec)
    if spec.kind == "dora":
        _check_lengths(adapted)
    return adapted


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, inside(CONV1D)))]


def _ends_with(name: str, end: str) -> bool:
    """Return True if peft takes ``end`` for this name: it is the whole name, or what follows a dot."""
    return name == end or name.endswith(f".{end}")


def _matching(ends: Sequence[str], names: Sequence[str], where: str, what: str, model: nn.Module) -> list[str]:
    """Return the names that end so.

    Raises:
        ArgumentError: An end matches none.
    """
    for end in ends:
        if not any(_ends_with(name, end) for name in names):
            known = sorted({name.rsplit(".", 1)[-1] for name in names} - {str(i) for i in range(len(names))})
            raise ArgumentError(
                f"{type(model).__name__} has no {what} called '{end}'",
                where=where,
                mend=did_you_mean(end, known) or f"choose among: {', '.join(known)}",
            )
    return [name for name in names if any(_ends_with(name, end) for end in ends)]


def _stacked(model: nn.Module) -> list[str]:
    """Return the names of parameters that peft can adapt and that are no linear layers: stacked experts, routers."""
    linear = {f"{name}.weight" for name in _linear_names(model)}
    return [
        name for name, x in model.named_parameters() if x.dim() == 3 or (_is_router(model, name) and name not in linear)
    ]


def _is_router(model: nn.Module, name: str) -> bool:
    """Return True if a module or parameter is the router of a mixture of experts."""
    config: Any = getattr(model, "config", None)
    experts = {getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")} - {None}
    if not any(part in ("gate", "router") for part in name.split(".")):
        return False
    module, _, last = name.rpartition(".")
    found: Any = model
    for part in (module if last == "weight" else name).split("."):
        found = getattr(found, part)
    weight = getattr(found, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] in experts


def _linear_targets(model: PreTrainedModel, spec: AdapterSpec) -> list[str]:
    """Return the whole names of the linear layers that get adapters.

    Raises:
        ArgumentError: A name matches none, or none is left.
    """
    names = _linear_names(model)
    excluded = _matching(spec.exclude, names, "lora_exclude", "linear layer", model)
    if isinstance(spec.target, str):
        head = model.get_output_embeddings()
        found = [x for x in names if model.get_submodule(x) is not head and not _is_router(model, x)]
    else:
        found = _matching(spec.target, names, "lora_target", "linear layer", model)
    if not (left := [name for name in found if name not in set(excluded)]):
        raise ArgumentError("all layers of lora_target are excluded", where="lora_exclude", mend="exclude fewer")
    return left


def _low_rank_targets(model: PreTrainedModel, spec: AdapterSpec) -> dict[str, Any]:
    """Return peft's options for the targets of LoRA, which can be tensors too.

    Raises:
        ArgumentError: A name matches none, or none is left.
    """
    if isinstance(spec.target, str):
        _linear_targets(model, spec)
        routers = [name for name in _linear_names(model) if _is_router(model, name)]
        return {"target_modules": spec.target, "exclude_modules": [*spec.exclude, *routers] or None}
    tensors = _stacked(model)
    linear = _linear_names(model)
    named = [end for end in spec.target if not any(_ends_with(name, end) for name in linear)]
    named = [end for end in named if any(_ends_with(name, end) for name in tensors)]
    modules = [end for end in spec.target if end not in named]
    if modules:
        _linear_targets(model, replace(spec, target=modules))
    return {
        "target_modules": modules,
        "target_parameters": named or None,
        "exclude_modules": list(spec.exclude) or None,
    }


def _name_experts(model: PreTrainedModel, spec: AdapterSpec, config: PeftConfig) -> None:
    """Let peft name the stacked experts that it adapts, and take the router from them, unless the recipe names it.

    Raises:
        ArgumentError: There are some, and this kind of adapters cannot be on them.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    options: Any = config
    if spec.kind not in LOW_RANK:
        return
    convert_peft_config_for_transformers(config, model, None)
    if isinstance(spec.target, str):
        named = {name for name in options.target_parameters or () if not name.endswith("gate.weight")}
        options.target_parameters = sorted(named) or None
    if not options.target_parameters:
        return
    what = None if spec.kind in ON_EXPERTS else f"adapters of kind {spec.kind}"
    if what or spec.dropout:
        raise ArgumentError(
            f"{what or 'dropout of adapters'} cannot be on experts that are one tensor "
            f"({', '.join(sorted(options.target_parameters))})",
            where="adapter_type" if what else "lora_dropout",
            mend="name other layers: lora_target: [q_proj, k_proj, v_proj, o_proj]",
        )


def _refuse_for(spec: AdapterSpec, model: PreTrainedModel, new_tokens: Sequence[int]) -> None:
    """Refuse what only adapters of low rank can be together with.

    Raises:
        ArgumentError: It says what.
    """
    if new_tokens:
        raise ArgumentError(
            f"rows of new tokens are trained beside adapters of low rank, not of kind {spec.kind}",
            where="adapter_type",
            mend=f"write adapter_type: {', '.join(LOW_RANK[:-1])} or {LOW_RANK[-1]}, or add no tokens",
        )
    for name in _shared_ends(model, spec.whole):
        raise ArgumentError(
            f"{name} shares its weight, and a copy of it beside adapters of kind {spec.kind} would not",
            where="modules_to_save",
            mend=f"write adapter_type: {', '.join(LOW_RANK[:-1])} or {LOW_RANK[-1]}, or leave it out",
        )


def _shared_ends(model: PreTrainedModel, whole: Sequence[str]) -> list[str]:
    """Return the embedding and the head where they share their weight and are among the modules that end so."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[1] is None or ends[0].weight is not ends[1].weight:
        return []
    names = [name for name, module in model.named_modules() if module in ends]
    return [name for name in names if any(_ends_with(name, end) for end in whole)]


def _check_patterns(spec: AdapterSpec, model: nn.Module) -> None:
    """Refuse what is no pattern, and what would take too long on the names of this model.

    Raises:
        ArgumentError: It names it.
    """
    names = _module_names(model)
    for where, patterns in (("lora_rank_pattern", spec.ranks), ("lora_alpha_pattern", spec.alphas)):
        find_matches(list(patterns), names, where=where, how="match", form=PEFT_FORM)


def _module_names(model: nn.Module) -> list[str]:
    """Return the names that peft matches patterns with."""
    modules = [name for name, _ in model.named_modules() if name]
    return [
        *modules,
        *(name for name, _ in model.named_parameters()),
        *(f"base_model.model.{name}" for name in modules),
    ]


def _check_ranks(adapted: Any, spec: AdapterSpec) -> None:
    """Refuse ranks that are larger than a matrix, and patterns that match no adapter.

    Raises:
        ArgumentError: It names the matrix, or the layers there are.
    """
    if spec.kind not in LOW_RANK:
        return
    layers = dict(low_rank_layers(adapted))
    for where, patterns in (("lora_rank_pattern", spec.ranks), ("lora_alpha_pattern", spec.alphas)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in layers):
                known = sorted({name.rsplit(".", 1)[-1] for name in layers})
                raise ArgumentError(
                    f"no layer with an adapter matches '{pattern}'",
                    where=where,
                    mend=did_you_mean(pattern, known) or f"there are: {', '.join(known)}",
                )
    too_small = {
        name: (layer, most, rank)
        for name, layer in layers.items()
        if (rank := layer.r[layer.active_adapters[0]]) > (most := _most(layer, spec))
    }
    # Among all linear layers there may be small ones, such as gates of one row, which are none of the user's choice.
    if isinstance(spec.target, str) and spec.kind not in (*AS_LORA, *ON_QUANTISED) and len(too_small) < len(layers):
        named = [name for name in too_small if any(re.match(rf"(.*\.)?({pattern})$", name) for pattern in spec.ranks)]
        too_small = {name: too_small[name] for name in named}
    for name, (layer, most, rank) in too_small.items():
        last = name.rsplit(".", 1)[-1]
        raise ArgumentError(
            f"adapters of rank {rank} are larger than {'half of ' if spec.kind == 'lora_ga' else ''}the matrix of "
            f"{name}, {layer.out_features:,} x {layer.in_features:,}",
            where="lora_r",
            mend=f"write lora_r: {most}, or lora_rank_pattern: {{{last}: {most}}}",
        )


def _check_lengths(adapted: Any) -> None:
    """Refuse DoRA on a weight with a row of zeros, by whose length it divides.

    Raises:
        ArgumentError: It names the layer.
    """
    for name, layer in low_rank_layers(adapted):
        lengths = layer.lora_magnitude_vector["default"].weight
        zeros = 0 if lengths.is_meta else int((lengths == 0).sum())
        if zeros:
            raise ArgumentError(
                f"DoRA divides by the length of each row of a weight, and {zeros:,} of {name} are all zeros (such as "
                "that of a padding token)",
                where="adapter_type",
                mend="leave it out of lora_target, or write adapter_type: lora",
            )


def _check_rank(layers: Sequence[Any], spec: AdapterSpec) -> None:
    """Refuse a rank, or a number of reflections, above the size of every layer: nothing is gained by it.

    Raises:
        ArgumentError: It names the size.
    """
    if spec.kind == "hra" and spec.r % 2:
        raise ArgumentError(
            f"reflections start in pairs that undo each other, and {spec.r} is odd: the model would start as another",
            where="lora_r",
            mend=f"write lora_r: {spec.r + 1}",
        )
    sizes = [(layer.in_features, layer.out_features) for layer in layers if hasattr(layer, "in_features")]
    most = max((size for pair in sizes for size in pair), default=spec.r)
    if spec.r > most:
        raise ArgumentError(
            f"adapters of rank {spec.r:,} are larger than every matrix: the largest has {most:,} rows or columns",
            where="lora_r",
            mend="write a rank far below that, such as 16",
        )


def _most(layer: Any, spec: AdapterSpec) -> int:
    """Return the largest rank of a layer's adapters: as many as there are columns (``paca``), or singular vectors."""
    found: int = layer.in_features if spec.kind == "paca" else min(layer.in_features, layer.out_features)
    return found // 2 if spec.kind == "lora_ga" else found


def _train_columns(model: nn.Module, config: Any) -> None:
    """Let peft put :class:`PacaLinear` on linear layers.

    Raises:
        ArgumentError: A weight is quantised.
    """
    from streamtune.models.adapters.paca import PacaLinear

    for name in _linear_names(model):
        weight: Any = model.get_submodule(name).weight
        if not weight.is_floating_point() or type(weight) is not nn.Parameter:
            raise ArgumentError(
                f"adapter_type: paca changes columns of the weight of {name}, which is quantised",
                where="adapter_type",
                mend="write adapter_type: lora, or use the checkpoint it was made from",
            )
    config._register_custom_module({nn.Linear: PacaLinear, inside(CONV1D): PacaLinear})


def low_rank_layers(adapted: Any) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers with LoRA, by the name of the module in the base."""
    from peft.tuners.lora import LoraLayer

    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield name.replace(".base_layer", ""), module


def _start_from_weights(adapted: Any, spec: AdapterSpec) -> None:
    """Start LoRA from the leading part of each weight, and add the constant adapter that takes it away.

    Raises:
        ArgumentError: The weights are quantised.
    """
    _add_start(adapted)
    for name, layer in low_rank_layers(adapted):
        weight = layer.get_base_layer().weight
        if weight.device.type == "meta":
            continue
        if not weight.is_floating_point() or type(weight) is not nn.Parameter:
            raise ArgumentError(
                f"adapter_type: {spec.kind} starts from the weight of {name}, which is quantised",
                where="adapter_type",
                mend="write finetuning_type: lora, or adapter_type: lora",
            )
        weight = weight.detach().float()
        weight = weight.T if layer.fan_in_fan_out else weight  # [out, in]
        rank, scale = layer.r["default"], layer.scaling["default"]
        if spec.kind == "pissa":  # A = sqrt(S) V^T, B = U sqrt(S), of the largest singular values
            u, s, v = torch.svd_lowrank(weight, q=min(2 * rank, *weight.shape), niter=8)
            root = (s[:rank] / scale).sqrt()
            down, up = root[:, None] * v[:, :rank].T, u[:, :rank] * root
        else:  # OLoRA: B = Q, A = R
            q, r = torch.linalg.qr(weight)
            down, up = r[:rank] / scale**0.5, q[:, :rank] / scale**0.5
        set_start(layer, down, up)


def set_start(layer: Any, down: Tensor, up: Tensor) -> None:
    """Start the adapters of a layer from ``A0`` ``[r, in]`` and ``B0`` ``[out, r]``, and take ``B0 A0`` away again."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.copy_(down)
    b.copy_(up)
    layer.lora_A[START].weight.copy_(a)
    layer.lora_B[START].weight.copy_(-b)


def started_values(adapted: Any) -> Iterator[Tensor]:
    """Yield all that :func:`set_start` writes into, layer by layer."""
    for _, layer in low_rank_layers(adapted):
        for parts in (layer.lora_A, layer.lora_B):
            yield from (parts[name].weight for name in ("default", START))


def _add_start(adapted: Any) -> None:
    """Add the constant adapter. Its values are buffers: peft makes parameters of active adapters trainable."""
    plain = copy.deepcopy(adapted.peft_config["default"])
    plain.lora_dropout, plain.modules_to_save, plain.trainable_token_indices = 0.0, None, None
    adapted.add_adapter(START, plain)
    for _, layer in low_rank_layers(adapted):
        for part in (layer.lora_A[START], layer.lora_B[START]):
            values = part.weight.detach()
            del part.weight
            part.register_buffer("weight", values)
        layer.set_adapter(["default", START])
    del adapted.peft_config[START]  # it is a part of the other one, in all that reads configurations


def _ends(model: PreTrainedModel) -> list[str]:
    """Return the names of the embedding and of the head; of the embedding alone where they share their weight."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[1] is None or ends[0].weight is ends[1].weight:  # peft trains a tied head with the embedding
        del ends[1]
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    return [names[id(end)] for end in ends]


def is_written_as_lora(adapted: Any) -> bool:
    """Return True if a model has adapters of a kind that is saved as another LoRA than it is trained as."""
    return any(START in layer.lora_A or _has_columns(layer) for _, layer in low_rank_layers(adapted))


def _has_columns(layer: Any) -> bool:
    return any(hasattr(part, "index") for part in layer.lora_A.values())


def written_adapters(adapted: Any, weights: Mapping[str, Tensor] | None = None) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Return the adapters of a model that :func:`is_written_as_lora`, as a LoRA on the model as it was.

    Args:
        adapted: The model.
        weights: Its state at the moment that is written; None is now.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = dict(adapted.state_dict() if weights is None else weights)
    constant = {name: state.pop(name) for name in list(state) if name.endswith(CONSTANT)}
    found = get_peft_model_state_dict(adapted, state_dict=state, save_embedding_layers=False)
    config = copy.deepcopy(adapted.peft_config["default"])
    config.inference_mode = True
    for name, values in constant.items():
        key = name.replace(f".{START}.weight", ".weight")
        found[key] = torch.cat([found[key], values.to(found[key])], dim=0 if "lora_A" in name else 1)
    if constant:
        # The scale stays: alpha / r, or alpha / sqrt(r).
        more = 2**0.5 if config.use_rslora else 2
        config.r, config.lora_alpha = 2 * config.r, more * config.lora_alpha
        config.rank_pattern = {key: 2 * rank for key, rank in config.rank_pattern.items()}
        config.alpha_pattern = {key: more * alpha for key, alpha in config.alpha_pattern.items()}
    for name in [name for name in found if name.endswith(COLUMNS)]:
        index, layer = found.pop(name), name.removesuffix(".index")
        like = found[f"{layer.removesuffix('A')}B.weight"]
        ones = like.new_zeros(len(index), adapted.get_submodule(f"{layer}.default").width)
        found[f"{layer}.weight"] = ones.scatter_(1, index[:, None].to(ones.device), 1)
    return config, {name: values.contiguous() for name, values in found.items()}


def load_adapters(
    model: PreTrainedModel, folder: Path, spec: AdapterSpec, *, new_tokens: Sequence[int] = ()
) -> PeftModel:
    """Put saved adapters on their base, ready to be trained further as they were.

    Args:
        model: The base.
        folder: With the adapters, as a run saves them.
        spec: The adapters as they were added. Of kinds with a constant part the file has both parts.
        new_tokens: As they were added.

    Raises:
        ArgumentError: They are a pickle.
    """
    if spec.kind not in AS_LORA:
        return load_lora(model, folder)
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    adapted = _added(model, spec, 0, new_tokens)
    saved = load_file(_weights_in(folder), backend=READ)
    if spec.kind == "paca":
        for name in [name for name in saved if name.endswith("lora_A.weight")]:
            saved[name.replace("lora_A.weight", COLUMNS)] = saved.pop(name).argmax(dim=1)
        set_peft_model_state_dict(adapted, saved)
        return adapted
    _add_start(adapted)
    trained: dict[str, Tensor] = {}
    constant: dict[str, Tensor] = {}
    for name, values in saved.items():
        trained[name] = values
        if "lora_A" in name or "lora_B" in name:
            trained[name], constant[name] = values.chunk(2, dim=0 if "lora_A" in name else 1)
    set_peft_model_state_dict(adapted, trained)
    for name, module in adapted.named_modules():
        if f"{name}.weight".endswith(CONSTANT):
            module.weight.copy_(constant[f"{name.removesuffix(f'.{START}')}.weight"])
    return adapted


def _weights_in(folder: Path) -> Path:
    """Return the file of saved adapters.

    Raises:
        ArgumentError: There is none.
    """
    if not (path := folder / "adapter_model.safetensors").is_file():
        raise ArgumentError(f"{folder} has no adapters in safetensors", where="--resume", mend="use another checkpoint")
    return path


def load_lora(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Put the adapters saved in ``folder`` on their base, ready to be trained further.

    Raises:
        ArgumentError: They are a pickle.
    """
    from peft import PeftModel

    _weights_in(folder)
    check_saved_settings(folder, _module_names(model), where="adapters")
    with warnings.catch_warnings():  # as where they were added
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys", category=RuntimeWarning)
        with unchanged(folder, where="adapters"), unmapped(folder):
            return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def start_from(model: PreTrainedModel, folder: str) -> PeftModel:
    """Put adapters that were saved in peft's format on their base, to be trained from there.

    Args:
        model: The base; on ``meta`` no weight is read.
        folder: With ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ArgumentError: There are none, they are of a kind that is not trained here, or not of this base.
    """
    from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from safetensors import safe_open

    key, path = "adapter_name_or_path", Path(folder).expanduser()
    mend = "name a folder with adapters of peft"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / name).is_file():
            raise ArgumentError(f"{folder} has no {name}", where=key, mend=mend)
    check_saved_settings(path, _module_names(model), where=key)
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"{path / 'adapter_config.json'} cannot be read: {error}", where=key, mend=mend) from error
    changed = str(getattr(config, "init_lora_weights", True)).lower()
    if config.is_prompt_learning or changed.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        kind = "a learnt prompt" if config.is_prompt_learning else f"adapters of {changed}, whose base was changed"
        raise ArgumentError(f"{folder} holds {kind}", where=key, mend="convert them to LoRA with peft")
    if (path / loftq.LOFTQ_FILE).is_file():
        raise ArgumentError(
            f"the adapters in {folder} (loftq_iter) belong to weights that were changed before they were quantised",
            where=key,
            mend=f"merge them, `streamtune export {folder} OUT`, and name OUT as the model",
        )
    config.inference_mode = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys", category=RuntimeWarning)
            if next(model.parameters()).device.type == "meta":
                return get_peft_model(model, config)
            with unchanged(path, where=key), unmapped(path):
                adapted = PeftModel.from_pretrained(model, str(path), is_trainable=True, config=config)
    except (IndexError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"peft cannot put the adapters in {folder} on this base: {str(error).splitlines()[0]}",
            where=key,
            mend="name adapters of this model",
        ) from error
    with safe_open(path / "adapter_model.safetensors", framework="pt") as file:
        there = {name for name in file.keys() if not name.endswith(".base_layer.weight")}  # noqa: SIM118
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if lost := sorted(there ^ {name for name in wanted if not name.endswith(".base_layer.weight")}):
        raise ArgumentError(
            f"the adapters in {folder} are not those of this base: {len(lost)} weights do not match, such as {lost[0]}",
            where=key,
            mend="name adapters of this model",
        )
    return adapted
