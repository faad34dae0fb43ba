"""Rows that share their beginning: scores and gradient are those of the same rows alone, each from its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamtune
from streamtune import RouterLoss, Schedule, StreamHandle
from streamtune.engine import Branches, check_branches
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.models import add_lora
from tests.conformance.reducer import build as build_any
from tests.precision_kit import EXACT, Float64, assert_as_precise, in_float64, relative

from .families import VOCAB, build, gradients, reference, worst

TREES = ((13, (5, 2, 9)), (0, (4, 6)), (1, (7,)), (20, (3, 30)))
"""Tokens of trunks and branches; the last token of a trunk's rows' common beginning stands in each branch."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "gpt_oss": {},
    "mixtral": {},
    "llama4_text": {},
}
RECURRENT = ("qwen3_next", "mamba2", "mamba", "falcon_h1", "lfm2", "zamba2", "bamba", "nemotron_h", "zaya", "minimax")
CHUNKS = (1, 4, 11, 256)


@dataclass(frozen=True)
class Rows:
    """The rows of trees: alone, and laid out as one sequence."""

    alone: list[Tensor]
    begins: list[int]
    """Of each row the first token of its branch."""
    ids: Tensor
    targets: Tensor
    branches: Branches

    @property
    def row_of_target(self) -> Tensor:
        """For each target of the sequence, in order, the row it is of."""
        counts = [len(row) - begin - 1 for row, begin in zip(self.alone, self.begins, strict=True)]
        return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def rows(trees: tuple[tuple[int, tuple[int, ...]], ...] = TREES, seed: int = 5) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randint(3, VOCAB, (count,), generator=generator)

    alone, begins, ids, targets = [], [], [], []
    for trunk, lengths in trees:
        shared, last = draw(trunk), draw(1)
        ids.append(shared)
        targets.append(torch.full((trunk,), -100))
        for length in lengths:
            branch = torch.cat([last, draw(length - 1)])
            alone.append(torch.cat([shared, branch]))
            begins.append(trunk)
            ids.append(branch)
            targets.append(torch.cat([branch[1:], torch.tensor([-100])]))
    return Rows(alone, begins, torch.cat(ids)[None], torch.cat(targets)[None], Branches.of(trees))


def objective(logprobs_K: Tensor, row_K: Tensor) -> Tensor:
    """Differences of rows, as preferences have, and clipped ratios of tokens, as policies have.

    In fp64, so that what is compared is the log-probabilities and not how a sum of them is rounded.
    """
    logprobs_K = logprobs_K.double()
    per_row = logprobs_K.new_zeros(int(row_K.max()) + 1).index_add(0, row_K, logprobs_K)
    ratio = (logprobs_K - logprobs_K.detach() + 0.1).exp()
    sign = 1.0 - 2.0 * (row_K % 2)
    clipped = torch.minimum(ratio * sign, ratio.clamp(0.8, 1.05) * sign).mean()
    return -torch.nn.functional.logsigmoid(0.1 * (per_row[0] - per_row[1:])).mean() - clipped


def alone(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Every row from its start, all logits at once, no streaming."""
    given: Rows = inputs["rows"]
    picked = []
    for row, begin in zip(given.alone, given.begins, strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits[0]
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        picked.append(logprobs[begin:-1].gather(-1, row[begin + 1 :, None]).squeeze(-1))
    return objective(torch.cat(picked), given.row_of_target)


def together(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """All trees in one streamed sequence."""
    given: Rows = inputs["rows"]
    handle: StreamHandle = inputs["handle"]
    scores = handle.logprobs(given.ids, given.targets, branches=given.branches)
    return objective(scores.logprobs[given.targets != -100], given.row_of_target)


def compare(model: nn.Module, given: Rows, *schedules: Schedule) -> None:
    want = reference(model, {"rows": given}, alone)
    for schedule in schedules:
        with streamtune.stream(model, schedule=schedule) as handle:
            want.check(gradients(model, {"rows": given, "handle": handle}, together), schedule)


@pytest.mark.quick("gemma2")
@pytest.mark.parametrize("family", FAMILIES)
def test_branches_equal_their_rows_alone(family: str) -> None:
    model = build_any(family) if family == "llama4_text" else build(family, **FAMILIES[family])
    compare(model, rows(), *(Schedule(chunk_size=size, head_chunk_size=7) for size in CHUNKS))


@pytest.mark.quick("mamba2")
@pytest.mark.parametrize("family", RECURRENT)
def test_branches_take_up_the_state_of_their_trunk(family: str) -> None:
    model = build_any(family)
    compare(model, rows(), *(Schedule(chunk_size=size) for size in (4, 11, 256)))
    with streamtune.stream(model) as handle:
        check_branches(handle)


@pytest.mark.quick("qwen3_next", "mamba2", "kimi_linear")
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2", "granitemoehybrid", "kimi_linear"])
def test_a_part_of_one_token_is_exact_or_refused(family: str) -> None:
    """Many layers compute it as a decoding step, in place: the branches behind it would start from another state."""
    model, branches = build_any(family), Branches.of_nodes([(-1, 5), (0, 1), (0, 6)])
    ids = torch.randint(3, VOCAB, (1, branches.length), generator=torch.Generator().manual_seed(3))
    targets = torch.full_like(ids, 5)
    with torch.no_grad(), streamtune.stream(model, chunk_size=8) as handle:
        if family not in ("qwen3_next", "lfm2"):
            with pytest.raises(UnsupportedModelError, match="a chunk of 1 token as a decoding step") as caught:
                handle.logprobs(ids, targets, branches=branches)
            assert caught.value.fix == "set share_prefix: never"
            return
        shared = handle.logprobs(ids, targets, branches=branches).logprobs[:, 6:]
        row = torch.cat([ids[:, :5], ids[:, 6:]], dim=1)
        alone = handle.logprobs(row, torch.full_like(row, 5)).logprobs[:, 5:]
    torch.testing.assert_close(shared, alone)


@pytest.mark.parametrize(
    "choices",
    [
        {"keep_kv": "device"},
        {"keep_attention": "device"},
        {"keep_layers": 1},
        {"offload": "host", "keep_kv": "host", "keep_attention": "host", "stream_grads": True},
        {"offload": "host", "levels": 2, "segment_size": 2, "keep_kv": "host", "keep_attention": "host"},
    ],
    ids=lambda choices: ", ".join(choices),
)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_next", "lfm2"])
def test_whatever_is_kept_and_wherever(family: str, choices: dict[str, Any]) -> None:
    model = build(family, **FAMILIES[family]) if family in FAMILIES else build_any(family)
    compare(model, rows(), Schedule(chunk_size=6, head_chunk_size=5, **choices))


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_in_fp64(family: str) -> None:
    model, given = in_float64(build(family, **FAMILIES[family])), rows()
    with Float64():
        want_loss, want = gradients(model, {"rows": given}, alone)
        with streamtune.stream(model, chunk_size=8) as handle:
            loss, got = gradients(model, {"rows": given, "handle": handle}, together)
    assert float(loss) == pytest.approx(float(want_loss), rel=EXACT)
    assert worst(got, want) <= EXACT


@pytest.mark.full
def test_a_branch_may_be_longer_than_a_block_of_keys() -> None:
    model = build("qwen3", max_position_embeddings=4096)
    given = rows(((1500, (40, 1200)),))
    compare(model, given, Schedule(chunk_size=700))


def test_windows_reach_back_into_the_trunk() -> None:
    """Windows that end in the trunk, at its end, and inside the branch."""
    for window in (2, 5, 12, 21, 40):
        model = build("mistral", sliding_window=window)
        compare(model, rows(((20, (3, 30, 12)),)), Schedule(chunk_size=9))


@pytest.mark.quick("llama", "qwen3_next")
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "qwen3_next"])
def test_a_model_that_shares_is_told_from_one_that_does_not(family: str) -> None:
    with streamtune.stream(build(family) if family in FAMILIES else build_any(family)) as handle:
        check_branches(handle)
    with (
        streamtune.stream(build_any("bloom")) as handle,
        pytest.raises(UnsupportedModelError, match="computes rows that share a prefix differently"),
    ):
        check_branches(handle)


def test_entropies_and_temperature() -> None:
    model, given = build("llama"), rows()
    with streamtune.stream(model, chunk_size=8) as handle:
        scores = handle.logprobs(given.ids, given.targets, branches=given.branches, entropy=True, temperature=0.7)
    assert scores.entropy is not None

    def of_rows(model: Any) -> tuple[Tensor, Tensor]:
        picked, entropy = [], []
        for row, begin in zip(given.alone, given.begins, strict=True):
            logprobs = (model(input_ids=row[None]).logits[0] / 0.7).log_softmax(-1)[begin:-1]
            picked.append(logprobs.gather(-1, row[begin + 1 :, None]).squeeze(-1))
            entropy.append(-(logprobs.exp() * logprobs).sum(-1))
        return torch.cat(picked), torch.cat(entropy)

    chosen, plain = given.targets != -100, of_rows(model)
    with Float64():
        truth = of_rows(in_float64(model))
    assert_as_precise(scores.logprobs[chosen], plain[0], truth[0])
    assert_as_precise(scores.entropy[chosen], plain[1], truth[1])
    assert not scores.logprobs[~chosen].any()


def test_it_streams_without_gradients_too() -> None:
    model, given = build("qwen3"), rows()
    with streamtune.stream(model, chunk_size=8) as handle:
        with_graph = handle.logprobs(given.ids, given.targets, branches=given.branches).logprobs
        with torch.no_grad():
            without = handle.logprobs(given.ids, given.targets, branches=given.branches).logprobs
    assert torch.equal(with_graph, without)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": torch.zeros(1, 3, dtype=torch.long)}, "must both be"),
        ({"temperature": 0.0}, "temperature"),
        ({"branches": Branches.of([(2, (3,))])}, r"input_ids must be \(1, 5\)"),
    ],
)
def test_what_cannot_be_scored(changes: dict[str, Any], words: str) -> None:
    given = rows()
    call = {"input_ids": given.ids, "targets": given.targets, "branches": given.branches, **changes}
    with streamtune.stream(build("llama")) as handle, pytest.raises(ArgumentError, match=words):
        handle.logprobs(**call)


def test_no_scores_without_a_streamed_head() -> None:
    given = rows()
    with streamtune.stream(build("llama"), head=False) as handle, pytest.raises(ArgumentError, match="head"):
        handle.logprobs(given.ids, given.targets, branches=given.branches)
    with pytest.raises(ArgumentError, match="no longer streamed"):
        handle.logprobs(given.ids, given.targets)


@pytest.mark.parametrize("trees", [[], [(3, ())], [(-1, (2,))], [(3, (2, 0))]])
def test_what_is_no_tree(trees: Any) -> None:
    with pytest.raises(ArgumentError, match="tree"):
        Branches.of(trees)


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule",
    [Schedule(chunk_size=6, levels=2, segment_size=2, offload="host"), Schedule(chunk_size=7, keep_layers=1)],
)
def test_adapters_on_a_frozen_model(schedule: Schedule) -> None:
    model = add_lora(build("qwen3"), r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # fresh ones are zero, and so is half of the gradient
            torch.nn.init.normal_(parameter, std=0.02)
    compare(model, rows(), schedule)


def test_tied_embeddings() -> None:
    compare(build("qwen3", tie_word_embeddings=True), rows(), Schedule(chunk_size=7))


@pytest.mark.full
def test_a_balance_loss_counts_each_token_once() -> None:
    """The routers' losses come beside the scores, are those of all tokens that are computed, and know no chunks."""
    model, given = in_float64(build("mixtral")), rows(((0, (9, 13, 20)),))
    ones = {"input_ids": given.ids, "position_ids": given.branches.position_ids, "use_cache": False}
    found = []
    for chunk_size in (4, 11, 256):
        handle = streamtune.stream(model, chunk_size=chunk_size, router_loss=RouterLoss(balance=0.7, z=0.1))
        with Float64(), handle:
            # Rows that share nothing are packed rows: what a call with labels adds to its loss.
            labelled = model(**ones, labels=given.targets, shift_labels=given.targets).loss
            assert handle.routers.terms is not None
            added = labelled - handle.routers.terms.loss
            scores = handle.logprobs(given.ids, given.targets, branches=given.branches)
            assert scores.router_loss is not None
            torch.testing.assert_close(scores.router_loss, added, rtol=EXACT, atol=0)
            model.zero_grad(set_to_none=True)
            scores.router_loss.backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append(torch.cat([grad.flatten() for grad in grads]))
            model.zero_grad(set_to_none=True)
    for other in found[1:]:
        assert relative(other, found[0]) <= EXACT
