"""Completions that go on alike behind their prompt, and prompts that go on from each other: computed once, as alone.

A token that several completions begin with is scored once, and its log-probability is that of each of them: the
gradient of a shared token is the sum over its rows, whatever a loss does with them (differences, means over tokens,
terms of one completion alone). Held against each completion as a row of its own in plain torch, as in the tests of dpo
and grpo without shared turns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from streamtune import Schedule, data, stream
from streamtune.data import Tree
from streamtune.data.batches import collate as batching
from streamtune.tasks.grpo.groups import DistributedLogprobs, Group, make_micro_batches, store_logprobs
from streamtune.tasks.grpo.objective import PolicyObjective
from streamtune.tasks.preference import batch_trees
from streamtune.train import ModelReference, World
from tests.conformance.reducer import build as build_any
from tests.precision_kit import reference_of

from . import test_dpo as dpo
from . import test_grpo as grpo
from .families import VOCAB, build, gradients
from .test_deep_branches import FAMILIES, RECURRENT

MARGINS = (0.5, 2.0, -1.0, 0.25)


def draw_ids(draw: torch.Generator, count: int) -> list[int]:
    found: list[int] = torch.randint(3, VOCAB, (count,), generator=draw).tolist()
    return found


def conversations() -> list[Tree]:
    """Pairs with common first turns, two of them of one conversation; masks as a chat template gives them.

    turn     a first answer and the next question in both, then answers that differ
    later    the conversation of ``turn``, from a question behind its chosen answer on
    beside   the prompt of ``turn`` with other answers, of which one is the beginning of the other
    short    a prompt of one token, answers that begin with the same one
    """
    draw = torch.Generator().manual_seed(9)

    def made(count: int) -> list[int]:
        return draw_ids(draw, count)

    prompt, first, question = made(11), made(6), made(4)
    ends = [made(5), made(3)]
    chosen, rejected = ([*first, *question, *end] for end in ends)
    masks = [[True] * 6 + [False] * 4 + [True] * len(end) for end in ends]
    turn = Tree(prompt, [chosen, rejected], masks, "pairs:1", [True, False], MARGINS[0])
    start = made(2)
    later = Tree([*prompt, *chosen, *made(3)], [[*start, *made(4)], [*start, *made(1)]], None, "pairs:2", [True, False])
    answer = made(4)
    beside = Tree(prompt, [answer, [*answer, *made(3)]], None, "pairs:3", [False, True])
    one = made(1)
    short = Tree(made(1), [[*one, *made(2)], [*one, *made(6)]], None, "pairs:4", [True, False])
    trees = [turn, later, beside, short]
    return [Tree(**{**_fields(tree), "margin": margin}) for tree, margin in zip(trees, MARGINS, strict=True)]


def _fields(tree: Tree) -> dict[str, Any]:
    names = ("prompt", "completions", "masks", "origin", "labels", "margin")
    return {name: getattr(tree, name) for name in names}


@pytest.fixture(params=[1, batching.LEAST_SAVED], ids=["deep", "long"])
def least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens that a common beginning saves at least: 1 makes trees of four levels of these rows."""
    monkeypatch.setattr(batching, "LEAST_SAVED", request.param)
    return int(request.param)


def schedules(*sizes: int) -> list[Schedule]:
    return [Schedule(chunk_size=size, head_chunk_size=5) for size in sizes]


def test_the_trees_are_deep(least: int) -> None:
    """The trees of these tests have common tokens, and a common target counts for each of its completions."""
    trees = conversations()
    batch = batch_trees(trees, pad_token_id=0, share=True)
    separate = batch_trees(trees, pad_token_id=0, share=False)
    depths: list[tuple[int, Any]] = []
    for part in batch["branches"].table.parts:
        before = [depth for depth, other in depths if part.trunk and other.stop == part.trunk[-1][1]]
        depths.append((1 + max(before, default=0), part))
    assert max(depth for depth, _ in depths) == 4
    assert batch["flat_index_K"].numel() == separate["flat_index_K"].numel()
    assert (
        batch["flat_index_K"].numel() > batch["flat_index_K"].unique().numel() == (batch["shift_labels"] != -100).sum()
    )
    assert torch.equal(batch["row_K"], separate["row_K"])
    for name in ("input_ids", "shift_labels"):
        got, want = (each[name].flatten()[each["flat_index_K"]] for each in (batch, separate))
        assert torch.equal(got, want)


@pytest.mark.full
@pytest.mark.parametrize("keys", dpo.LOSSES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_every_loss_of_pairs(keys: dict[str, Any], least: int) -> None:
    model, reference = dpo.models()
    trees, recipe = conversations(), dpo.recipe_of(**keys)
    dpo.compare_models(model, reference, trees, recipe, "shared", (3, 1), schedules(7))
    dpo.compare_models(model, reference, trees, recipe, "right", (2, 2), schedules(6))


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 3, 8, 13, 64])
@pytest.mark.parametrize("split", [(4,), (1, 3), (1, 1, 1, 1)], ids=str)
def test_however_a_step_is_split_and_cut(split: Sequence[int], size: int, least: int) -> None:
    model, reference = dpo.models()
    recipe = dpo.recipe_of(rpo_alpha=0.3, length_normalization=True)
    dpo.compare_models(model, reference, conversations(), recipe, "shared", split, schedules(size))


@pytest.mark.full
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_single_completions(loss: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpo, "MAX_LENGTH", 48)  # mismatched completions are cut to it, some in what they share
    model, reference = dpo.models()
    recipe = dpo.recipe_of(loss_type=loss, desirable_weight=1.3, undesirable_weight=0.7)
    dpo.compare_models(model, reference, conversations(), recipe, "shared", (1, 3), schedules(8, 13))


@pytest.mark.quick("deep-gemma2")
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_families(family: str, least: int) -> None:
    built = build(family, **FAMILIES[family]) if family in FAMILIES else build_any(family)
    model, reference = dpo.with_reference(built)
    for keys in ({"rpo_alpha": 0.3}, {"loss_type": "orpo"}):
        recipe = dpo.recipe_of(**keys)
        dpo.compare_models(model, reference, conversations(), recipe, "shared", (3, 1), schedules(4, 11))


@pytest.mark.parametrize(
    "choices",
    [
        {"keep_kv": "device", "keep_attention": "device"},
        {"order": "chunk", "keep_kv": "host"},
        {"offload": "host", "levels": 2, "segment_size": 2, "keep_kv": "host", "keep_attention": "host"},
    ],
    ids=lambda choices: ", ".join(choices),
)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_next"])
def test_under_every_schedule(family: str, choices: dict[str, Any]) -> None:
    built = build(family, **FAMILIES[family]) if family in FAMILIES else build_any(family)
    recipe = dpo.recipe_of(loss_type="orpo")
    models = dpo.with_reference(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "LEAST_SAVED", 1)
        schedule = Schedule(chunk_size=6, head_chunk_size=5, **choices)
        dpo.compare_models(*models, conversations(), recipe, "shared", (4,), [schedule])


def resampled() -> tuple[list[Group], list[data.Prompt]]:
    """Groups whose completions were resampled from the middle, and one that was written twice."""
    groups, prompts = grpo.make_groups()
    draw = random.Random(11)
    for group in groups:
        whole = group.completions[0]
        cuts = (len(whole), len(whole), len(whole) // 2, len(whole) // 3)
        for index in range(1, 4):
            rest = [draw.randrange(3, VOCAB) for _ in range(grpo.LONGEST - cuts[index] - index)]
            group.completions[index] = whole[: cuts[index]] + ([] if index == 1 else rest)
        sizes = [len(completion) for completion in group.completions]
        group.old = [[draw.uniform(-5.5, -3.5) for _ in range(size)] for size in sizes]
        group.ref = [[draw.uniform(-5.0, -4.0) for _ in range(size)] for size in sizes]
    return groups, prompts


@pytest.mark.full
@pytest.mark.parametrize("loss_type", grpo.LOSSES)
def test_completions_that_were_resampled(loss_type: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, prompts = resampled()
    monkeypatch.setattr(grpo, "make_groups", lambda **_: (groups, prompts))
    for beta in (0.0, 0.1):
        grpo.compare(grpo.make_recipe(loss_type, beta=beta), batch_size=8)
        grpo.compare(grpo.make_recipe(loss_type, beta=beta, mask_truncated_completions=True), family="gemma2")


@pytest.mark.full
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_completions_that_were_resampled_in_families(family: str, least: int) -> None:
    groups, prompts = resampled()
    model = build(family, **FAMILIES[family]) if family in FAMILIES else build_any(family)
    recipe = grpo.make_recipe("grpo", beta=0.1)
    want = reference_of(
        model, lambda m: gradients(m, {}, lambda m, _: grpo.reference_loss(m, recipe, groups, prompts, 6))
    )
    with stream(model, chunk_size=5) as handle:
        objective = PolicyObjective(handle, recipe)
        batches = make_micro_batches(groups, prompts, grpo.make_layout(recipe, 6, True))
        totals, total = objective.step_totals(batches), 0.0
        for batch in batches:
            score = objective.score(model, batch, totals)
            score.loss.backward()
            total += score.loss.item()
    want.check(
        (total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})
    )


def test_log_probs_of_the_policy_that_wrote_are_those_of_rows_apart(least: int) -> None:
    """Log-probs of common tokens are stored for each completion."""
    model = build("qwen3")
    found = []
    for share in (True, False):
        groups, prompts = resampled()
        layout = grpo.make_layout(grpo.make_recipe("grpo"), 8, share)
        with stream(model, chunk_size=5) as handle, torch.no_grad():
            policy = ModelReference(model, handle, temperature=grpo.TEMPERATURE)
            shared = DistributedLogprobs(World())
            for name in ("old", "ref"):
                store_logprobs(
                    name,
                    lambda count, make: shared(lambda batch: policy.logprobs(batch).tolist(), count, make),  # noqa: B023
                    groups,
                    prompts,
                    layout,
                )
        found.append([torch.tensor(row) for group in groups for row in [*group.old, *group.ref]])  # type: ignore[misc]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
