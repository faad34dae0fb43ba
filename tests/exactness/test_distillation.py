"""A step of grpo with a teacher, against the divergence written out over whole logits, completion by completion.

The reference below runs every completion behind its own prompt through both models, unstreamed, and averages the
divergence over its tokens, and then over completions (arXiv 2306.13649, algorithm 1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamtune import RouterLoss, Schedule, stream
from streamtune.ops import Divergence, TokenLoss
from streamtune.recipe.schema import GrpoRecipe
from streamtune.tasks.grpo.groups import BatchLayout, Group, make_micro_batches
from streamtune.tasks.grpo.objective import DistillationObjective
from streamtune.train import ModelReference
from tests.exactness.families import build, gradients
from tests.exactness.test_grpo import LONGEST, make_groups
from tests.exactness.test_routers import routed
from tests.exactness.test_token_losses import LargestOfVocabulary
from tests.precision_kit import in_float64, reference_of

DIVERGENCES = {
    "forward": Divergence("forward"),
    "reverse": Divergence("reverse", temperature=2.0),
    "jsd": Divergence("jsd", beta=0.3, temperature=0.5),
}


def make_recipe(**more: Any) -> GrpoRecipe:
    return GrpoRecipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        loss_type="gkd",
        teacher="none",
        max_completion_length=LONGEST,
        temperature=0.7,
        **more,
    )


def alike(groups: list[Group]) -> list[Group]:
    """The same groups, of which completions of the first begin with the same three tokens."""
    first = groups[0]
    begin = [*first.completions[0][:1], 5, 9]
    completions = [[*begin, *completion[1:]] for completion in first.completions]
    return [replace(first, completions=completions), *groups[1:]]


def make_layout(recipe: GrpoRecipe, batch_size: int, share: bool) -> BatchLayout:
    return BatchLayout(
        batch_size=batch_size,
        pad_token_id=0,
        share=share,
        leave_out=True,
        mask_truncated=recipe.mask_truncated_completions,
        zero_advantage_has_gradient=True,
    )


def divergence_of(logits: Tensor, taught: Tensor, asked: Divergence) -> Tensor:
    """The divergence of each token ``[T]`` of logits ``[T, V]``."""
    p, t = (
        (x.to(torch.promote_types(x.dtype, torch.float32)) / asked.temperature).softmax(-1) for x in (logits, taught)
    )
    if asked.kind == "forward":
        return (t * (t / p).log()).sum(-1)
    if asked.kind == "reverse":
        return (p * (p / t).log()).sum(-1)
    m = asked.beta * t + (1 - asked.beta) * p
    return asked.beta * (t * (t / m).log()).sum(-1) + (1 - asked.beta) * (p * (p / m).log()).sum(-1)


def reference_loss(
    model: Any, teacher: Any, recipe: GrpoRecipe, asked: Divergence, groups: list[Group], prompts: Any
) -> Tensor:
    means: list[Tensor] = []
    for group in groups:
        for index, completion in enumerate(group.completions):
            prompt = prompts[group.prompt].input_ids
            ids = torch.tensor([prompt + completion])
            cut = slice(len(prompt) - 1, -1)
            logits = model(input_ids=ids, use_cache=False).logits[0, cut]
            with torch.no_grad():
                taught = teacher(input_ids=ids, use_cache=False).logits[0, cut]
            masked = recipe.mask_truncated_completions and group.truncated[index]
            means.append(divergence_of(logits, taught, asked).mean() * (0.0 if masked else 1.0))
    return torch.stack(means).mean()


def compare(
    name: str,
    *,
    recipe: GrpoRecipe | None = None,
    batch_size: int = 5,
    share: bool = True,
    family: str = "qwen3",
    schedule: Schedule | None = None,
) -> dict[str, float]:
    """Loss and gradients of a step are as precise as plain torch's; returns the metrics of the step."""
    recipe, asked = recipe or make_recipe(), DIVERGENCES[name]
    groups, prompts = make_groups(old=False, ref=False)
    groups = alike(groups)
    model, teacher = build(family), build("llama", hidden_size=48).eval().requires_grad_(False)

    def plain(m: Any) -> Any:
        wide = in_float64(teacher) if next(m.parameters()).dtype == torch.float64 else teacher
        return gradients(m, {}, lambda m, _: reference_loss(m, wide, recipe, asked, groups, prompts))

    want = reference_of(model, plain)
    schedule = schedule or Schedule(chunk_size=4, head_chunk_size=5)
    found: dict[str, list[float]] = {}
    with stream(model, schedule=schedule) as handle, stream(teacher, schedule=schedule) as other:
        loss = TokenLoss(divergence=asked)
        objective = DistillationObjective(handle, recipe, loss, ModelReference(teacher, other))
        batches = make_micro_batches(groups, prompts, make_layout(recipe, batch_size, share))
        totals, total = objective.step_totals(batches), 0.0
        for batch in batches:
            score = objective.score(model, batch, totals)
            score.total_loss.backward()
            total += score.loss.item()
            for key, (value, count) in score.metrics.items():
                before = found.setdefault(key, [0.0, 0.0])
                found[key] = [before[0] + value, before[1] + count]
    want.check(
        (total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})
    )
    assert all(p.grad is None for p in teacher.parameters())
    return {key: value / count for key, (value, count) in found.items() if count}


@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence_and_its_gradient_are_those_of_plain_torch(name: str, share: bool) -> None:
    metrics = compare(name, share=share)
    assert metrics["kl"] > 0
    assert metrics["completions/mean_length"] > 0


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, 3, 12])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
def test_a_step_is_the_same_however_it_is_split(batch_size: int, share: bool) -> None:
    """Groups are cut between micro-batches; what completions begin with alike counts for each of them."""
    compare("reverse", batch_size=batch_size, share=share)


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", [2, 7, 64])
def test_chunks_may_cut_prompt_boundary_and_completion(chunk_size: int) -> None:
    compare("jsd", schedule=Schedule(chunk_size=chunk_size, head_chunk_size=3))


@pytest.mark.full
def test_truncated_completions_may_be_left_out_of_the_loss() -> None:
    recipe = make_recipe(mask_truncated_completions=True)
    for batch_size in (1, 5):
        compare("forward", recipe=recipe, batch_size=batch_size)


@pytest.mark.full
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral"])
def test_other_families(family: str, share: bool) -> None:
    compare("jsd", family=family, share=share)


@pytest.mark.full
@pytest.mark.parametrize(
    "choices", [{"weights": "host"}, {"levels": 2, "offload": "host"}, {"order": "chunk"}], ids=str
)
def test_in_other_schedules(choices: dict[str, Any]) -> None:
    compare("reverse", schedule=Schedule(chunk_size=4, head_chunk_size=5, **choices))


def test_held_out_completions_have_their_mean_divergence() -> None:
    """``held_out`` adds up over batches to the mean over completions; nothing is divided by totals."""
    groups, prompts = make_groups(old=False, ref=False)
    model, teacher = build("qwen3").eval(), build("llama", hidden_size=48).eval().requires_grad_(False)
    recipe, asked = make_recipe(), DIVERGENCES["jsd"]
    with torch.no_grad():
        want = reference_loss(model, teacher, recipe, asked, groups, prompts).item()
        with stream(model, 4) as handle, stream(teacher, 4) as other:
            objective = DistillationObjective(
                handle, recipe, TokenLoss(divergence=asked), ModelReference(teacher, other)
            )
            batches = make_micro_batches(groups, prompts, make_layout(recipe, 5, share=True))
            parts = [objective.score(model, batch, None).held_out[0] for batch in batches]
    assert sum(part[1] for part in parts) == 12
    assert sum(part[0] for part in parts) / 12 == pytest.approx(want, rel=1e-5)


@pytest.mark.full
def test_losses_on_routers_are_added_and_not_shown() -> None:
    groups, prompts = make_groups(old=False, ref=False)
    teacher = build("llama", hidden_size=48).eval().requires_grad_(False)
    recipe, loss = make_recipe(), TokenLoss(divergence=DIVERGENCES["forward"])

    def scores(coefficient: float) -> tuple[float, float]:
        model: nn.Module = routed("qwen3_moe")
        weight = RouterLoss(coefficient)
        with stream(model, chunk_size=4, router_loss=weight) as handle, stream(teacher, 4) as other:
            objective = DistillationObjective(handle, recipe, loss, ModelReference(teacher, other))
            (batch,) = make_micro_batches(groups, prompts, make_layout(recipe, 12, share=False))
            score = objective.score(model, batch, objective.step_totals([batch]))
        assert score.reported is not None
        return score.reported.item(), score.total_loss.item()

    (plain, _), (shown, minimised) = scores(0.0), scores(0.1)
    assert shown == pytest.approx(plain, rel=1e-6)
    assert minimised > shown + 0.05


def test_no_logits_of_a_whole_row_are_made() -> None:
    groups, prompts = make_groups(old=False, ref=False)
    model, teacher = build("llama"), build("qwen3", hidden_size=48).eval().requires_grad_(False)
    recipe, largest = make_recipe(), LargestOfVocabulary()
    with stream(model, schedule=Schedule(chunk_size=6, head_chunk_size=5)) as handle, stream(teacher, 6) as other:
        objective = DistillationObjective(
            handle, recipe, TokenLoss(divergence=DIVERGENCES["jsd"]), ModelReference(teacher, other)
        )
        batches = make_micro_batches(groups, prompts, make_layout(recipe, 5, share=True))
        with largest:
            for batch in batches:
                objective.score(model, batch, objective.step_totals(batches)).loss.backward()
    assert 0 < largest.rows <= 5
