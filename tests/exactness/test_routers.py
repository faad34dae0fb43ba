"""Losses on the whole batch's routing equal the unstreamed model's: balance and z-loss, micro-batch and global step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

import streamtune
from streamtune import RouterLoss, Schedule
from streamtune.engine import check_packing
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build as build_any
from tests.precision_kit import EXACT, Float64, errors, in_float64

from .families import BOUND, batch, build, evaluation, gradients, reference, worst

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "granitemoehybrid", "jetmoe", "jamba")
PARTS = (slice(0, 11), slice(11, 37))
SCHEDULES = (Schedule(chunk_size=16), Schedule(chunk_size=5, keep_kv=True))


def routed(family: str, coefficient: float = 0.5) -> Any:
    """A mixture whose own balance loss is switched on."""
    model: Any = build_any(family)
    model.config.output_router_logits = True
    setattr(model, "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef", coefficient)
    if family == "jetmoe":
        model.config.aux_loss_coef = coefficient
    return model


def records_routers(model: Any) -> bool:
    """Whether transformers keeps its router logits; without them its own balance loss does not run."""
    return any("router_logits" in (getattr(m, "_can_record_outputs", None) or {}) for m in model.modules())


@pytest.mark.parametrize("kind", ["plain", "masked", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_balance_loss(family: str, kind: str) -> None:
    model, inputs = routed(family), batch(kind)
    if not records_routers(model):
        with (
            streamtune.stream(model, schedule=SCHEDULES[0]),
            pytest.raises(UnsupportedModelError, match="no router in its decoder layers"),
        ):
            model(**inputs)
        pytest.skip(f"{family}: this transformers records no router logits of it, its own balance loss does not run")
    want = reference(model, inputs)
    for schedule in SCHEDULES:
        with streamtune.stream(model, schedule=schedule):
            want.check(gradients(model, inputs), schedule)


def test_it_is_a_statistic_of_the_whole_batch() -> None:
    """What the exact form is exact against: the mean of the chunks' own balance losses has another gradient."""
    model, inputs = routed("mixtral", 5.0), batch("plain")
    _, want = gradients(model, inputs)

    def chunk_by_chunk(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        whole = model(**inputs, output_router_logits=False).loss
        parts = [model(input_ids=inputs["input_ids"][:, i : i + 8]).aux_loss for i in range(0, 32, 8)]
        return whole + 5.0 * torch.stack(parts).mean()

    _, naive = gradients(model, inputs, chunk_by_chunk)
    assert max(value for name, value in errors(naive, want).items() if "gate" in name) > 0.01


@pytest.mark.parametrize("how", ["call", "head off", "eval", "frozen routers", "tuple"])
def test_ways_to_ask(how: str) -> None:
    model, inputs = routed("mixtral"), dict(batch("right"))
    if how == "call":
        model.config.output_router_logits = False
        inputs["output_router_logits"] = True
    if how == "frozen routers":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("gate" not in name)
    if how == "tuple":
        inputs["return_dict"] = False
    if how == "eval":
        model.eval()
        plain, balance = evaluation(model, inputs), evaluation(model, inputs, lambda output: output.aux_loss)
        with torch.no_grad(), streamtune.stream(model, chunk_size=8):
            got = model(**inputs)
        plain.check((got.loss, {}))
        balance.check((got.aux_loss, {}))
        return
    read: Callable[..., Tensor] = lambda model, inputs: (  # noqa: E731
        model(**inputs)[0] if how == "tuple" else model(**inputs).loss
    )
    want = reference(model, inputs, read)
    with streamtune.stream(model, chunk_size=8, head=how != "head off"):
        want.check(gradients(model, inputs, read))


def test_the_balance_loss_is_reported_and_router_logits_are_not() -> None:
    model, inputs = routed("mixtral"), batch("plain")
    balance = evaluation(model, inputs, lambda output: output.aux_loss)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with streamtune.stream(model, chunk_size=8):
        output = model(**inputs)
    balance.check((output.aux_loss, {}))
    assert output.router_logits is None
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def whole_step(model: Any, inputs: dict[str, Tensor], balance: float, z: float) -> Tensor:
    """The formulas over all rows at once, from the unstreamed model's router logits, in plain torch."""
    output = model(**inputs, output_router_logits=True)
    logits = torch.cat([layer.flatten(0, -2) for layer in output.router_logits])
    mask = inputs["attention_mask"].flatten().repeat(len(output.router_logits)).to(logits)
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(model.num_experts_per_tok, -1).indices, 1.0)
    f, p = ((x * mask[:, None]).sum(0) / mask.sum() for x in (chosen, probabilities))
    squares = (logits.logsumexp(-1) ** 2 * mask).sum() / mask.sum()
    own = model.router_aux_loss_coef * output.aux_loss
    return output.loss - own + balance * model.num_experts * (f * p).sum() + z * squares


@pytest.mark.parametrize("z", [0.0, 0.3])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_z_loss(family: str, z: float) -> None:
    model, inputs = build_any(family), batch("right")
    want = reference(model, inputs, lambda model, inputs: whole_step(model, inputs, 0.7, z))
    with streamtune.stream(model, chunk_size=8, router_loss=RouterLoss(balance=0.7, z=z)):
        want.check(gradients(model, inputs))


def rows(inputs: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {key: value[start:stop] for key, value in inputs.items()}


def test_global_scope_over_micro_batches() -> None:
    """Three micro-batches of one ragged row each equal one unstreamed batch of three rows."""
    model, inputs = build_any("mixtral"), batch("right")
    items = int((inputs["labels"][:, 1:] != -100).sum())
    want = reference(model, inputs, lambda model, inputs: whole_step(model, inputs, 2.0, 0.1))
    micro = [rows(inputs, row, row + 1) for row in range(3)]
    with streamtune.stream(model, chunk_size=8, router_loss=RouterLoss(2.0, 0.1, "global")) as handle:
        handle.routers.totals = handle.count_routes(micro)
        found = gradients(
            model, {}, lambda model, _: sum(model(**part, num_items_in_batch=items).loss for part in micro)
        )
        handle.routers.totals = None
        _, alone = gradients(
            model, {}, lambda model, _: sum(model(**part, num_items_in_batch=items).loss for part in micro)
        )
    want.check(found)
    assert worst(alone, want.truth[1]) > 100 * BOUND, "the micro-batches' own frequencies would have done as well"


def test_counting_draws_what_training_will_draw() -> None:
    model = build("phimoe", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.4)
    inputs = batch("plain")
    with streamtune.stream(model, chunk_size=8, router_loss=RouterLoss(1.0, scope="global")) as handle:
        torch.manual_seed(5)
        counts = handle.count_routes([inputs])
        found = []
        keep = handle.routers.compute_losses
        handle.routers.compute_losses = lambda sums: (found.append(sums.counts), keep(sums))[1]  # type: ignore[method-assign]
        model(**inputs)
    torch.testing.assert_close(found[0], counts, rtol=0, atol=0)


def test_counting_keeps_packed_rows_apart_as_training_does() -> None:
    """In layers with a state, too, which are told of the rows by the model's call and not by their own."""
    model, inputs = in_float64(build_any("qwen3_next")), {key: value[:1] for key, value in batch("plain").items()}
    inputs |= {"position_ids": torch.cat([torch.arange(11), torch.arange(26)])[None], "use_cache": False}
    seen: list[Tensor] = []
    with Float64(), streamtune.stream(model, chunk_size=8, router_loss=RouterLoss(1.0, scope="global")) as handle:
        close = handle.routers.end_call
        handle.routers.end_call = lambda: (found := close(), seen.append(found.probabilities))[0]  # type: ignore
        handle.count_routes(
            [{key: value if key == "use_cache" else value[:, part] for key, value in inputs.items()} for part in PARTS]
        )
        handle.count_routes([inputs])
        model(**inputs)
        assert handle.context.rows is None
        handle.count_routes([{"input_ids": inputs["input_ids"]}])
    apart, packed, trained, one_row = seen[0] + seen[1], *seen[2:]
    torch.testing.assert_close(packed, apart, rtol=EXACT, atol=0)
    torch.testing.assert_close(trained, apart, rtol=EXACT, atol=0)
    assert float((one_row - apart).norm() / apart.norm()) > 1e-4, "the rows make no difference, so nothing was tested"


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    model, inputs = build_any("mixtral"), batch("right")
    items = int((inputs["labels"][:, 1:] != -100).sum())
    mine = rows(inputs, 0, 1) if rank == 0 else rows(inputs, 1, 3)
    with streamtune.stream(model, chunk_size=8, router_loss=RouterLoss(2.0, 0.1, "global")):
        loss, got = gradients(model, mine, lambda model, part: model(**part, num_items_in_batch=items).loss)
    for value in (loss, *got.values()):
        torch.distributed.all_reduce(value)
    if rank == 0:
        torch.save((loss, got), Path(folder) / "found.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.full
def test_global_scope_over_ranks(tmp_path: Path) -> None:
    """The ranks' sums are divided by the tokens of all: the gradients add up to the one process's."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    want = reference(build_any("mixtral"), batch("right"), lambda m, i: whole_step(m, i, 2.0, 0.1))
    want.check(torch.load(tmp_path / "found.pt"))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("doge", "no router in its decoder layers"),
        ("llama", "no router"),
        ("deepseek_v3", "balance loss with another formula|no router"),  # by version: are its router logits recorded
    ],
)
def test_refused_before_training(family: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        streamtune.stream(build_any(family), router_loss=RouterLoss(balance=0.1))


@pytest.mark.parametrize("bad", [{"balance": -0.1}, {"z": -1.0}, {"scope": "world"}])
def test_what_is_no_router_loss(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        RouterLoss(**bad)


def test_silenced_the_loss_is_the_cross_entropy() -> None:
    model, inputs = routed("mixtral"), batch("right")
    plain = evaluation(model, {**inputs, "output_router_logits": False})
    with streamtune.stream(model, chunk_size=8, router_loss=RouterLoss(5.0, 0.1)) as handle:
        with handle.routers.without_losses():
            output = model(**inputs)
        added = model(**inputs).loss
        terms = handle.routers.terms
    plain.check((output.loss, {}))
    assert output.aux_loss is None
    assert added > output.loss + 5.0
    assert terms is not None
    assert torch.equal(terms.loss, output.loss)


def test_padding_can_be_told_without_a_mask() -> None:
    """Behind the tokens it is hidden by causality, and a mask would only cost the faster kernels."""
    model, inputs = routed("mixtral"), dict(batch("right"))
    want = reference(model, inputs)
    mask = inputs.pop("attention_mask")
    with streamtune.stream(model, chunk_size=8) as handle, handle.routers.counting_tokens(mask):
        want.check(gradients(model, inputs))


def test_the_preflight_passes_a_model_that_balances_itself() -> None:
    with streamtune.stream(routed("mixtral"), chunk_size=8) as handle:
        handle.check()
        check_packing(handle)
