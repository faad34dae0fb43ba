"""A whole step of preference training against plain, unstreamed torch: each completion a row alone, formulas by hand.

What the loop runs is on one side: batches as they are collated, objective, reference, accumulation. On the other side
every prompt is computed once for each completion, without padding, and the losses are written out from their papers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import streamtune
from streamtune import Schedule, train
from streamtune.data import Tree
from streamtune.engine import StreamHandle
from streamtune.recipe import DpoRecipe
from streamtune.tasks.preference import (
    PairObjective,
    PreferenceBatch,
    UnpairedObjective,
    batch_trees,
    mismatched_tree,
    preference_batch,
)
from streamtune.train.step import StepScore, TrainSettings, accumulate_gradients
from tests.precision_kit import EXACT, ROUNDING, Float64, Reference, assert_as_precise, in_float64, total_error

from .families import VOCAB, build

Layout = Literal["shared", "right", "left"]
Formula = Callable[[Tensor, Tensor, DpoRecipe], Tensor]

SHAPES = ((13, (5, 2)), (1, (4, 6)), (4, (1, 7)), (20, (3, 11)))
"""Tokens of prompts, and of chosen and rejected completions. A prompt of one token has no trunk."""
MARGINS = (0.5, 2.0, -1.0, 0.25)
MAX_LENGTH = 24


def pairs(prompts: Sequence[int] = range(len(SHAPES))) -> list[Tree]:
    """Ragged pairs; in the last one some tokens of an answer do not count."""
    generator = torch.Generator().manual_seed(5)
    trees = []
    for index, (length, sizes) in enumerate(SHAPES):
        ids = [torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in (length, *sizes)]
        masks = None
        if index == 3:
            masks = [[True] * sizes[0], [position not in (2, 3, 7) for position in range(sizes[1])]]
        trees.append(Tree(ids[0], ids[1:], masks, f"pairs.jsonl:{index + 1}", [True, False], MARGINS[index]))
    return [trees[index] for index in prompts]


def recipe_of(**keys: Any) -> DpoRecipe:
    return DpoRecipe(model_name_or_path="none", datasets=[{"path": "none"}], max_length=MAX_LENGTH, **keys)


# --- by hand ----------------------------------------------------------------------------------------------------------


def scored(model: nn.Module, tree: Tree) -> list[tuple[Tensor, int]]:
    """Summed log-prob and number of counted tokens of each completion, each a row of its own."""
    found = []
    for index, completion in enumerate(tree.completions):
        ids = torch.tensor([tree.prompt + completion])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        logps = logits.log_softmax(-1)[len(tree.prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0]
        counted = torch.tensor(tree.masks[index] if tree.masks else [True] * len(completion))
        found.append((logps[counted].sum(), int(counted.sum())))
    return found


def log_odds(score: Tensor) -> Tensor:
    return score - torch.log(1 - torch.exp(score))


FORMULAS: dict[str, Formula] = {
    "sigmoid": lambda won, lost, r: (
        (1 - r.label_smoothing) * softplus(-r.beta * (won - lost)) + r.label_smoothing * softplus(r.beta * (won - lost))
    ),
    "robust": lambda won, lost, r: (
        (
            (1 - r.label_smoothing) * softplus(-r.beta * (won - lost))
            - r.label_smoothing * softplus(r.beta * (won - lost))
        )
        / (1 - 2 * r.label_smoothing)
    ),
    "hinge": lambda won, lost, r: (1 - r.beta * (won - lost)).clamp(min=0),
    "ipo": lambda won, lost, r: ((won - lost) - 0.5 / r.beta) ** 2,
    "exo_pair": lambda won, lost, r: exo(r.beta * (won - lost), r.label_smoothing),
    "sppo_hard": lambda won, lost, r: (won - 0.5 / r.beta) ** 2 + (lost + 0.5 / r.beta) ** 2,
    "apo_zero": lambda won, lost, r: 1 - torch.sigmoid(r.beta * won) + torch.sigmoid(r.beta * lost),
    "apo_down": lambda won, lost, r: torch.sigmoid(r.beta * won) + 1 - torch.sigmoid(r.beta * (won - lost)),
    "dpop": lambda won, lost, r: softplus(-r.beta * (won - lost - r.dpop_lambda * (-won).clamp(min=0))),
    "orpo": lambda won, lost, r: r.beta * softplus(-(log_odds(won) - log_odds(lost))),
    "simpo": lambda won, lost, r: softplus(-(r.beta * (won - lost) - r.simpo_gamma)),
    "cpo": lambda won, lost, r: softplus(-r.beta * (won - lost)),
}
"""Scores of chosen and rejected, the recipe -> the loss."""

ILL_CONDITIONED = {"copg"}
NEEDS_NONE, PER_TOKEN = {"orpo", "simpo", "cpo"}, {"orpo", "simpo", "ipo"}
LOSSES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in FORMULAS if name not in ("robust", "exo_pair")),
    {"loss_type": "sigmoid", "label_smoothing": 0.1, "rpo_alpha": 0.5},
    {"loss_type": "sigmoid", "length_normalization": True, "beta": 2.0},
    {"loss_type": "sigmoid", "reference_free": True},
    {"loss_type": "robust", "label_smoothing": 0.2},
    {"loss_type": "exo_pair", "label_smoothing": 0.01},
    {"loss_type": "copg"},
]


def exo(logits: Tensor, smoothing: float) -> Tensor:
    won, lost = torch.sigmoid(logits), torch.sigmoid(-logits)
    return won * (torch.log(won) - math.log(1 - smoothing)) + lost * (torch.log(lost) - math.log(smoothing))


def plain_pairs(model: nn.Module, reference: nn.Module, trees: Sequence[Tree], recipe: DpoRecipe) -> Tensor:
    """The mean loss of the pairs."""
    name, losses = recipe.loss_type, []
    for tree in trees:
        policy = scored(model, tree)
        with torch.no_grad():
            other = scored(reference, tree)
        means = recipe.length_normalization or name in PER_TOKEN
        uniform = recipe.reference_free or name in NEEDS_NONE
        sizes = [size if means else 1 for _, size in policy]
        won, lost = (
            (mine - (0.0 if uniform else its)) / size
            for (mine, _), (its, _), size in zip(policy, other, sizes, strict=True)
        )
        nll = -policy[0][0] / policy[0][1]
        if name == "copg":
            gap = 0.5 if tree.margin is None else tree.margin
            loss = -(gap - 0.5 * recipe.beta * (won - lost)) * (won - lost)
        else:
            loss = FORMULAS[name](won, lost, recipe)
        weight = {"orpo": 1.0, "cpo": recipe.cpo_alpha}.get(name, 0.0) + (recipe.rpo_alpha or 0.0)
        losses.append(loss + weight * nll)
    return torch.stack(losses).mean()


def plain_unpaired(model: nn.Module, reference: nn.Module, trees: Sequence[Tree], recipe: DpoRecipe) -> Tensor:
    """The mean loss of single completions; KTO's baseline is the mean log-ratio of mismatched ones."""
    baseline = torch.zeros(())
    if recipe.loss_type == "kto":
        ratios = []
        for index, tree in enumerate(trees):
            other = trees[(index + 1) % len(trees)]
            cut = [ids[: MAX_LENGTH - len(tree.prompt)] for ids in other.completions]
            masks = other.masks and [mask[: MAX_LENGTH - len(tree.prompt)] for mask in other.masks]
            with torch.no_grad():
                swapped = Tree(tree.prompt, cut, masks)
                ratios += [p[0] - r[0] for p, r in zip(scored(model, swapped), scored(reference, swapped), strict=True)]
        baseline = torch.stack(ratios).mean().clamp(min=0)
    losses = []
    for tree in trees:
        with torch.no_grad():
            others = scored(reference, tree)
        assert tree.labels is not None
        for (mine, _), (its, _), good in zip(scored(model, tree), others, tree.labels, strict=True):
            gain = recipe.beta * (mine - its - baseline)
            weight = recipe.desirable_weight if good else recipe.undesirable_weight
            losses.append(weight * (1 - torch.sigmoid(gain if good else -gain)))
    return torch.stack(losses).mean()


def plain(model: nn.Module, reference: nn.Module, trees: Sequence[Tree], recipe: DpoRecipe) -> tuple[float, Any]:
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    how = plain_unpaired if recipe.is_unpaired else plain_pairs
    loss = how(model, reference, trees, recipe)
    loss.backward()
    return loss.item(), taken(model)


def taken(model: nn.Module) -> dict[str, Tensor]:
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return grads


# --- ours -------------------------------------------------------------------------------------------------------------


def collated(trees: Sequence[Tree], layout: Layout, recipe: DpoRecipe, others: Sequence[Tree]) -> PreferenceBatch:
    side: Literal["right", "left"] = "left" if layout == "left" else "right"

    def made(some: Sequence[Tree]) -> PreferenceBatch:
        batch = preference_batch(some, pad_token_id=0, share=layout == "shared")
        return replace(batch, **batch_trees(some, pad_token_id=0, share=layout == "shared", padding_side=side))

    batch = made(trees)
    if recipe.loss_type != "kto":
        return batch
    indices = [next(i for i, other in enumerate(others) if other is tree) for tree in trees]
    beside = [mismatched_tree(tree, others, index + 1, MAX_LENGTH) for tree, index in zip(trees, indices, strict=True)]
    return PreferenceBatch(**{**vars(batch), "mismatched": made(beside)})


def ours(
    model: nn.Module,
    handle: StreamHandle,
    reference: train.Reference | None,
    steps: Sequence[Sequence[Tree]],
    recipe: DpoRecipe,
    layout: Layout,
) -> tuple[StepScore, dict[str, Tensor]]:
    """Score and gradients of a step, by the loop's own function."""
    trees = [tree for part in steps for tree in part]
    batches = [collated(part, layout, recipe, trees) for part in steps]
    objective: train.Objective
    if recipe.is_unpaired:
        assert reference is not None
        objective = UnpairedObjective(handle, recipe, reference, torch.device("cpu"))
    else:
        objective = PairObjective(handle, recipe, reference)
    settings = TrainSettings(1, 1, 0.0, 0, 0, 1, autocast_dtype=recipe.autocast_dtype, seed=0, out_of_memory_fix="")
    backend = train.LocalBackend(model, torch.optim.SGD(model.parameters()))
    context = train.StepContext(backend, objective, settings, handle)
    score = accumulate_gradients(context, batches, step=1, stop=train.StopRequest())
    assert score is not None
    return score, taken(model)


def models(family: str = "qwen3", **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A model and a reference that differs from it."""
    return with_reference(build(family, **settings))


def with_reference(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model and a reference that differs from it."""
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model, reference.requires_grad_(False)


def compare(
    recipe: DpoRecipe,
    layout: Layout,
    split: Sequence[int],
    schedules: Sequence[Schedule],
    family: str = "qwen3",
    **settings: Any,
) -> None:
    """Ours equals what was written by hand, in fp32; in fp64 what squares a difference of large sums."""
    compare_models(*models(family, **settings), pairs(), recipe, layout, split, schedules)


def compare_models(
    model: nn.Module,
    reference: nn.Module,
    trees: Sequence[Tree],
    recipe: DpoRecipe,
    layout: Layout,
    split: Sequence[int],
    schedules: Sequence[Schedule],
) -> None:
    """As :func:`compare`, of a model, its reference and trees."""
    ill = recipe.loss_type in ILL_CONDITIONED
    with Float64():
        truth = plain(in_float64(model), in_float64(reference), trees, recipe)
    if ill:
        model, reference = in_float64(model), in_float64(reference)
    want = Reference(truth, truth if ill else plain(model, reference, trees, recipe))
    parts, start = [], 0
    for size in split:
        parts.append(trees[start : start + size])
        start += size
    needed = recipe.is_unpaired or not (recipe.reference_free or recipe.loss_type in NEEDS_NONE)
    for schedule in schedules:
        with (
            Float64() if ill else nullcontext(),
            streamtune.stream(model, schedule=schedule) as handle,
            streamtune.stream(reference, schedule=schedule) as h,
        ):
            asked = train.ModelReference(reference, h) if needed else None
            score, got = ours(model, handle, asked, parts, recipe, layout)
        want.check((score.loss, got), schedule, EXACT if ill else ROUNDING)


CUTS = [Schedule(chunk_size=size, head_chunk_size=head) for size, head in ((3, 5), (8, 64), (13, 7), (64, 4))]
"""Chunks that end in prompts, at their ends and in completions; the last holds whole rows."""


@pytest.mark.quick("sigmoid-0.1-0.5", "orpo")
@pytest.mark.parametrize("keys", LOSSES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_every_loss_and_every_gradient(keys: dict[str, Any]) -> None:
    recipe = recipe_of(**keys)
    compare(recipe, "shared", (3, 1), [Schedule(chunk_size=7, head_chunk_size=5)])
    compare(recipe, "right", (2, 2), [Schedule(chunk_size=6, head_chunk_size=9)])


@pytest.mark.full
@pytest.mark.parametrize("split", [(4,), (1, 3), (2, 2)], ids=str)
def test_a_pair_with_scores_keeps_them_beside_pairs_without(split: Sequence[int]) -> None:
    trees = [replace(tree, margin=8.0 if index == 1 else None) for index, tree in enumerate(pairs())]
    schedules = [Schedule(chunk_size=7, head_chunk_size=5)]
    compare_models(*models(), trees, recipe_of(loss_type="copg"), "shared", split, schedules)


@pytest.mark.full
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"chunks of {cut.chunk_size}")
@pytest.mark.parametrize("layout", ["shared", "right", "left"])
@pytest.mark.parametrize("split", [(4,), (1, 3), (2, 1, 1)], ids=str)
def test_however_a_step_is_laid_out_split_and_cut(layout: Layout, split: Sequence[int], cut: Schedule) -> None:
    compare(recipe_of(rpo_alpha=0.3), layout, split, [cut])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shared", "right"])
@pytest.mark.parametrize("split", [(4,), (1, 3)], ids=str)
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_single_completions(loss: str, split: Sequence[int], layout: Layout) -> None:
    recipe = recipe_of(loss_type=loss, desirable_weight=1.3, undesirable_weight=0.7)
    compare(recipe, layout, split, CUTS[1:3])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shared", "right"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_in_the_order_of_chunks(family: str, layout: Layout) -> None:
    forms: tuple[dict[str, Any], ...] = ({}, {"levels": 2, "keep_kv": "host"}, {"keep_attention": "device"})
    schedules = [Schedule(chunk_size=7, head_chunk_size=5, order="chunk", **form) for form in forms]
    compare(recipe_of(), layout, (3, 1), schedules, family)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"])
def test_families(family: str) -> None:
    compare(recipe_of(), "shared", (2, 2), [Schedule(chunk_size=7, head_chunk_size=5)], family)


def test_an_evaluation_of_kto_scores_a_filler_like_any_batch() -> None:
    """Another rank may have one batch more; the filler then needs a baseline too."""
    recipe, (model, other) = recipe_of(loss_type="kto"), models()
    singles = [Tree(tree.prompt, tree.completions[:1], None, labels=[True]) for tree in pairs()[:2]]
    batch = collated(singles, "right", recipe, singles)
    with streamtune.stream(model) as handle, streamtune.stream(other) as second, torch.no_grad():
        reference = train.ModelReference(other, second)
        objective = UnpairedObjective(handle, recipe, reference, torch.device("cpu"))
        losses = [objective.score(model, replace(batch, filler=filler), None).loss for filler in (False, True)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("keys", [{}, {"loss_type": "kto"}, {"loss_type": "orpo"}], ids=str)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_as_precise_as_torch(keys: dict[str, Any], bf16: bool) -> None:
    """Three ways: fp64 by hand, torch by hand at the dtype, ours at the dtype."""
    recipe = recipe_of(bf16=bf16, **keys)
    model, reference = models()
    trees = pairs()
    _, truth = plain(copy.deepcopy(model).double(), copy.deepcopy(reference).double(), trees, recipe)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
        _, torch_grads = plain(model, reference, trees, recipe)
    torch_error = total_error(torch_grads, truth)
    for layout in ("shared", "right"):
        schedule = Schedule(chunk_size=9, head_chunk_size=6)
        with (
            streamtune.stream(model, schedule=schedule) as handle,
            streamtune.stream(reference, schedule=schedule) as h,
        ):
            asked = None if recipe.loss_type in NEEDS_NONE else train.ModelReference(reference, h)
            _, got = ours(model, handle, asked, [trees[:3], trees[3:]], recipe, layout)
        assert total_error(got, truth) <= 1.1 * torch_error + 1e-6


def test_metrics_are_those_of_the_pairs() -> None:
    model, reference = models()
    trees, recipe = pairs(), recipe_of(beta=0.2)

    def rewards_tensor(model: nn.Module, reference: nn.Module) -> Tensor:
        found = [
            [0.2 * (p - r) for (p, _), (r, _) in zip(scored(model, t), scored(reference, t), strict=True)]
            for t in trees
        ]
        return torch.stack([torch.stack(pair) for pair in found])

    with torch.no_grad():
        rewards = rewards_tensor(model, reference)
        with Float64():
            truth = rewards_tensor(in_float64(model), in_float64(reference))
    with streamtune.stream(model, chunk_size=8) as handle, streamtune.stream(reference, chunk_size=8) as h:
        score, _ = ours(model, handle, train.ModelReference(reference, h), [trees[:1], trees[1:]], recipe, "shared")
    margins = rewards[:, 0] - rewards[:, 1]
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins")
    got, plain, wide = (
        torch.tensor([*pair, pair[0] - pair[1]], dtype=torch.float64)
        for pair in ([score.metrics[name] for name in names[:2]], rewards.mean(0), truth.mean(0))
    )
    got[2] = score.metrics[names[2]]
    assert_as_precise(got, plain, wide, names)
    assert score.metrics["rewards/accuracies"] == (margins > 0).double().mean().item()
    assert score.metrics["kl"] >= 0


def test_adapters_switched_off_are_the_base_without_dropout() -> None:
    """The reference of a model with adapters is its base, to the last bit, and leaves the model in training."""
    from streamtune.models import add_lora

    base, _ = models()
    batch = collated(pairs(), "shared", recipe_of(), [])
    with streamtune.stream(base, chunk_size=8) as handle:
        want = train.ModelReference(base, handle).logprobs(batch)
    adapted = add_lora(build("qwen3", attention_dropout=0.5), r=4, dropout=0.5)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(1.0)
    adapted.train()
    with streamtune.stream(adapted, chunk_size=8) as handle:
        got = train.ModelReference(adapted, handle).logprobs(batch)
        assert not torch.equal(
            got, batch.gather_targets(handle.logprobs(targets=batch.shift_labels, **batch.inputs).logprobs)
        )
    assert torch.equal(got, want)
    assert adapted.training
    assert all(p.requires_grad for name, p in adapted.named_parameters() if "lora_" in name)
