"""A step of grpo from groups of completions to gradients, against the formulas in plain torch, row by row, unstreamed.

The reference below knows nothing of trees, chunks or micro-batches: it runs every completion behind its own prompt
through an ordinary model, and writes each loss down as its paper does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune import Schedule, data, stream
from streamtune.recipe.schema import GrpoRecipe
from streamtune.tasks.grpo.groups import BatchLayout, DistributedLogprobs, Group, make_micro_batches, store_logprobs
from streamtune.tasks.grpo.objective import PolicyObjective
from streamtune.train import ModelReference, World
from tests.exactness.families import VOCAB, build, gradients
from tests.precision_kit import Float64, assert_as_precise, in_float64, reference_of

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "rloo", "remax")
IN_REWARD = ("rloo", "remax")
EPSILON, EPSILON_HIGH, TEMPERATURE, LONGEST = 0.2, 0.28, 0.7, 12


def make_groups(*, flat: bool = True, old: bool = True, ref: bool = True) -> tuple[list[Group], list[data.Prompt]]:
    """Three prompts, one of a single token, with four ragged completions each; ratios on both sides of the clips."""
    draw = random.Random(3)
    groups, prompts = [], []
    for number, length in enumerate((11, 1, 6)):
        prompts.append(data.Prompt([draw.randrange(3, VOCAB) for _ in range(length)], "", {}, f"rows:{number}"))
        sizes = [draw.randrange(1, LONGEST + 1) for _ in range(4)]
        completions = [[draw.randrange(3, VOCAB) for _ in range(size)] for size in sizes]
        advantages = [0.0] * 4 if flat and number == 1 else [draw.uniform(-2, 2) for _ in range(4)]
        groups.append(
            Group(
                prompt=number,
                completions=completions,
                truncated=[size == LONGEST or index == 2 for index, size in enumerate(sizes)],
                rewards=[1.0] * 4,
                scores={"one": [1.0] * 4},
                advantages=advantages,
                flat=not any(advantages),
                old=[[draw.uniform(-5.5, -3.5) for _ in range(size)] for size in sizes] if old else None,
                ref=[[draw.uniform(-5.0, -4.0) for _ in range(size)] for size in sizes] if ref else None,
            )
        )
    return groups, prompts


def make_recipe(loss_type: str, **more: Any) -> GrpoRecipe:
    return GrpoRecipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        reward_funcs="none",
        loss_type=loss_type,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        temperature=TEMPERATURE,
        max_completion_length=LONGEST,
        **more,
    )


def make_layout(recipe: GrpoRecipe, batch_size: int, share: bool) -> BatchLayout:
    return BatchLayout(
        batch_size=batch_size,
        pad_token_id=0,
        share=share,
        leave_out=recipe.loss_type != "bnpo",
        mask_truncated=recipe.mask_truncated_completions,
        zero_advantage_has_gradient=recipe.beta > 0 and recipe.loss_type not in IN_REWARD,
    )


def row_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int], **images: Tensor) -> Tensor:
    """Log-probs of a completion's tokens: the whole logits of one row, nothing else.

    ``images`` are further inputs of the prompt; those with a value per token, ``[1, P]``, are 0 in the completion.
    """
    ids = torch.tensor([prompt + completion])
    for name, x in images.items():
        if x.shape == (1, len(prompt)):
            images[name] = torch.nn.functional.pad(x, (0, len(completion)))
        elif x.is_floating_point():
            images[name] = x.to(next(model.parameters()).dtype)
    logits = model(input_ids=ids, use_cache=False, **images).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    return chosen[torch.arange(len(completion)), torch.tensor(completion)]


def reference_loss(
    model: torch.nn.Module,
    recipe: GrpoRecipe,
    groups: list[Group],
    prompts: list[data.Prompt],
    batch_size: int,
    images: Sequence[dict[str, Tensor]] | None = None,
) -> Tensor:
    """The loss of the step by its formula, completion by completion; ``images`` are the inputs of each prompt."""
    terms: list[Tensor] = []  # of each completion: its token losses, none where it is masked
    for group in groups:
        for index, completion in enumerate(group.completions):
            more = {} if images is None else images[group.prompt]
            logp = row_logprobs(model, prompts[group.prompt].input_ids, completion, **more)
            old = torch.tensor(group.old[index]) if group.old else logp.detach()
            advantage = group.advantages[index]
            gap = logp - old
            if recipe.loss_type == "gspo" or recipe.importance_sampling_level == "sequence":
                gap = gap.mean().expand_as(gap)
            if recipe.loss_type in IN_REWARD:
                gap = gap.sum().expand_as(gap)  # one action, whose loss is spread over its tokens
            ratio = gap.exp()
            bounded = ratio if recipe.delta is None else ratio.clamp(max=recipe.delta)
            loss = -torch.minimum(bounded * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH) * advantage)
            if recipe.loss_type in IN_REWARD:
                loss = loss / len(completion)
            if recipe.beta and recipe.loss_type not in IN_REWARD:
                assert group.ref is not None
                above = torch.tensor(group.ref[index]) - logp
                factor = ratio if recipe.use_bias_correction_kl else 1.0
                loss = loss + recipe.beta * factor * (above.exp() - above - 1)
            masked = recipe.mask_truncated_completions and group.truncated[index]
            terms.append(loss[:0] if masked else loss)
    count, tokens = len(terms), sum(map(len, terms))
    if recipe.loss_type in ("grpo", "gspo"):
        return torch.stack([term.sum() / max(1, len(term)) for term in terms]).sum() / count
    if recipe.loss_type == "dapo":
        return torch.cat(terms).sum() / tokens
    if recipe.loss_type == "dr_grpo":
        return torch.cat(terms).sum() / (count * LONGEST)
    if recipe.loss_type == "bnpo":
        parts = [torch.cat(terms[start : start + batch_size]) for start in range(0, count, batch_size)]
        sizes = [len(terms[start : start + batch_size]) for start in range(0, count, batch_size)]
        means = [part.sum() / max(1, len(part)) * size for part, size in zip(parts, sizes, strict=True)]
        return torch.stack(means).sum() / count
    return torch.cat(terms).sum() / count


def compare(
    recipe: GrpoRecipe,
    *,
    batch_size: int = 5,
    share: bool = True,
    chunk_size: int = 4,
    family: str = "qwen3",
    schedule: Schedule | None = None,
    **make: bool,
) -> None:
    """Loss and gradients of a step are as precise as plain torch's."""
    groups, prompts = make_groups(**make)
    model = build(family)
    want = reference_of(
        model, lambda m: gradients(m, {}, lambda m, _: reference_loss(m, recipe, groups, prompts, batch_size))
    )
    with stream(model, schedule=schedule or Schedule(chunk_size=chunk_size)) as handle:
        objective = PolicyObjective(handle, recipe)
        batches = make_micro_batches(groups, prompts, make_layout(recipe, batch_size, share))
        totals, total = objective.step_totals(batches), 0.0
        for batch in batches:
            score = objective.score(model, batch, totals)
            score.loss.backward()
            total += score.loss.item()
    want.check(
        (total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})
    )


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
def test_every_loss_and_gradient_is_that_of_plain_torch(loss_type: str, share: bool) -> None:
    beta = 0.0 if loss_type in IN_REWARD else 0.07
    compare(make_recipe(loss_type, beta=beta), share=share)


@pytest.mark.quick("grpo", "gspo")
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_first_step_has_no_old_log_probs_and_needs_none(loss_type: str) -> None:
    compare(make_recipe(loss_type), old=False, ref=False)


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", [2, 3, 7, 64])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
def test_chunks_may_cut_prompt_boundary_and_completion(chunk_size: int, share: bool) -> None:
    compare(make_recipe("grpo", beta=0.07), share=share, chunk_size=chunk_size)


@pytest.mark.quick("grpo", "dapo")
@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("batch_size", [1, 3, 12])
def test_a_step_is_the_same_however_it_is_split(loss_type: str, batch_size: int) -> None:
    """Groups are cut between micro-batches; completions without a gradient are left out and still counted."""
    compare(make_recipe(loss_type), batch_size=batch_size)


@pytest.mark.full
@pytest.mark.parametrize("loss_type", LOSSES)
def test_truncated_completions_may_be_left_out_of_the_loss(loss_type: str) -> None:
    recipe = make_recipe(loss_type, mask_truncated_completions=True)
    groups, _ = make_groups()
    assert 0 < sum(cut for group in groups for cut in group.truncated) < 12
    compare(recipe)
    compare(recipe, batch_size=1)


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
@pytest.mark.parametrize("batch_size", [3, 12])
def test_the_divergence_times_the_ratio(loss_type: str, batch_size: int) -> None:
    compare(make_recipe(loss_type, beta=0.07, use_bias_correction_kl=True), batch_size=batch_size)


@pytest.mark.full
def test_ratios_by_completion_and_a_bound_on_both_sides() -> None:
    compare(make_recipe("grpo", importance_sampling_level="sequence"))
    compare(make_recipe("dapo", delta=1.5))


@pytest.mark.full
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mixtral"])
def test_in_the_order_of_chunks(family: str, share: bool) -> None:
    for form in ({}, {"levels": 2, "keep_kv": "host"}):
        schedule = Schedule(chunk_size=4, order="chunk", **form)  # type: ignore[arg-type]
        compare(make_recipe("grpo", beta=0.07), share=share, family=family, schedule=schedule)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral"])
def test_other_families(family: str) -> None:
    compare(make_recipe("dapo", beta=0.07), family=family)


def test_remembered_log_probs_are_those_of_each_row_alone() -> None:
    """What inner epochs and a KL read: of every completion with a gradient, whatever the layout."""
    groups, prompts = make_groups(old=False, ref=False)
    recipe, model = make_recipe("grpo"), build("qwen3").eval()

    def rows_alone(model: torch.nn.Module) -> list[list[Tensor]]:
        return [[row_logprobs(model, prompts[g.prompt].input_ids, c) for c in g.completions] for g in groups]

    with torch.no_grad():
        alone = rows_alone(model)
        with Float64():
            truth = rows_alone(in_float64(model))
        with stream(model, chunk_size=4) as handle:
            policy = ModelReference(model, handle, temperature=recipe.temperature, adapters=True)
            asked = partial(DistributedLogprobs(World()), lambda batch: policy.logprobs(batch).tolist())
            store_logprobs("old", asked, groups, prompts, make_layout(recipe, 5, share=True))
    for group, rows, wide in zip(groups, alone, truth, strict=True):
        assert group.old is not None
        for index, row in enumerate(rows):
            if group.advantages[index] == 0:
                assert group.old[index] == []  # nothing reads them
            else:
                assert_as_precise(torch.tensor(group.old[index]), row, wide[index])


def test_a_step_without_a_gradient_has_no_micro_batch() -> None:
    groups, prompts = make_groups()
    recipe = make_recipe("dapo")
    assert make_micro_batches([groups[1]], prompts, make_layout(recipe, 5, share=True)) == []
    held = make_recipe("dapo", beta=0.1)
    assert len(make_micro_batches([groups[1]], prompts, make_layout(held, 5, share=True))) == 1
