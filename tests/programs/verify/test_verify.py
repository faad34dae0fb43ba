"""The verification: right engines pass, planted wrong ones are caught and named, the model is left as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, VeraConfig, get_peft_model
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamtune import Schedule
from streamtune.engine import StreamHandle, cache, decoder_layers, head, vjp
from streamtune.errors import ArgumentError, NonFiniteError, UnsupportedModelError
from streamtune.programs.verify.report import VerifyReport, module_of
from streamtune.programs.verify.restore import prepared_for_comparison, widening_weights
from streamtune.programs.verify.verify import Comparison, LossOf, compare_gradients, verify_schedules
from streamtune.train.objective import autocast
from tests.conformance.reducer import build as build_any
from tests.exactness.families import batch, build
from tests.precision_kit import ROUNDING, Errors

ROWS, LENGTH = 2, 47
Plant = Callable[[pytest.MonkeyPatch, nn.Module], None]


def loss_of(model: Any, autocast_dtype: str | None) -> Tensor:
    with autocast(torch.device("cpu"), autocast_dtype):
        return model(**batch("masked", rows=ROWS, length=LENGTH), use_cache=False).loss


def lora(model: Any) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))


class SameLoss:
    """One loss for plain autograd and for the engine."""

    def __init__(self, loss_of: LossOf) -> None:
        self.plain_loss = loss_of

    def streamed_loss(self, handle: StreamHandle) -> LossOf:
        return self.plain_loss


def check(model: nn.Module, loss: LossOf = loss_of, bf16: bool = False, **options: Any) -> VerifyReport:
    options |= {"autocast_dtype": "bfloat16"} if bf16 else {}
    return compare_gradients(Comparison(model, SameLoss(loss), verify_schedules(LENGTH, Schedule()), **options))


# --- right engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_exact(family: str, bf16: bool) -> None:
    model = lora(build(family)) if family == "qwen3" else build(family)
    said: list[str] = []
    report = check(model, bf16=bf16, notify=said.append)
    assert report.exact, report.worst
    assert not report.refusal
    assert report.truth == ("float32" if bf16 and family != "mixtral" else "float64")
    assert report.dtype == ("bfloat16 autocast" if bf16 else "float32")
    assert said[0] == f"{report.truth}, plain autograd (1 of 8)"
    assert said[-1].endswith("chunks of 5 (8 of 8)")
    widest = [run for run in report.runs if run.schedule and run.dtype == report.runs[0].dtype]
    same = max(max(run.errors.values()) for run in widest)
    if report.truth == "float64":
        assert same < 2e-6
    else:  # of two fp32 sums each is as far from the truth as the other
        assert same <= 3 * max(row.torch_error for row in check(model).modules) + ROUNDING
    for row in report.modules:
        if bf16:
            assert 1e-4 < max(row.error, row.torch_error) < 3e-2, row
        else:
            assert max(row.error, row.torch_error) > 1e-9, row
            assert Errors(row.error, row.torch_error, entries=8).excess <= ROUNDING, row


@pytest.mark.full
@pytest.mark.parametrize("adapters", [False, True])
def test_a_model_that_has_learnt_its_rows_is_as_exact(adapters: bool) -> None:
    """Its p - 1 is next to nothing: a head or loss in float32 would be no float64 truth."""
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    while (loss := loss_of(model, None)) > 0.1:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = check(lora(model) if adapters else model)
    assert report.exact, report.worst
    same = [run for run in report.runs if run.schedule and run.dtype == torch.float64]
    assert max(max(run.errors.values()) for run in same) < 1e-9
    assert "_loss_function" not in model.__dict__


@pytest.mark.full
def test_layers_that_compute_their_states_in_fp32_are_held_to_its_bound() -> None:
    report = check(build_any("qwen3_next"))
    assert report.exact, report.worst
    streamed = [run for run in report.runs if run.schedule]
    assert {run.dtype: run.narrow_states for run in streamed} == {torch.float64: True, torch.float32: False}
    assert not any(run.narrow_states for run in check(build("llama")).runs)


def test_adapters_start_with_a_zero_half_and_are_compared_all_the_same() -> None:
    model = lora(build("qwen3"))
    report = check(model)
    assert report.filled == 14
    assert all(row.torch_error > 0 for row in report.modules)
    assert all(not p.any() for name, p in model.named_parameters() if "lora_B" in name)


def test_a_zero_vector_of_adapters_hides_no_gradient() -> None:
    config = VeraConfig(r=4, d_initial=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(build("qwen3"), config)
    zeros = [p for name, p in model.named_parameters() if "vera_lambda_b" in name]
    report = check(model)
    assert report.exact, report.worst
    assert report.filled == len(zeros) > 0
    assert all(error > 0 for run in report.runs[-1:] for error in run.errors.values())
    assert not any(p.any() for p in zeros)


@pytest.mark.full
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_of_weights(weights: torch.dtype) -> None:
    report = check(build("llama", dtype=weights))
    assert report.exact
    assert report.truth == {torch.bfloat16: "float32", torch.float32: "float64", torch.float64: None}[weights]


def test_weights_can_be_widened_first() -> None:
    report = check(build("llama", dtype=torch.bfloat16), dtype=torch.float32)
    assert (report.exact, report.dtype, report.truth) == (True, "float32", "float64")


@pytest.mark.parametrize("bf16", [False, True])
def test_without_room_for_a_truth_plain_autograd_is_the_reference(bf16: bool) -> None:
    report = check(build("llama"), bf16=bf16, why_too_large=lambda dtype: "it takes too much")
    assert report.exact
    assert report.truth is None
    assert report.why_no_truth == f"{'float32' if bf16 else 'float64'}: it takes too much"
    assert report.worst.allowed == (3e-2 if bf16 else 2e-5)
    assert all(row.torch_error == 0 for row in report.modules)


def test_a_dtype_the_kernels_do_not_know_is_no_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    norm = type(model.model.norm)
    forward = norm.forward

    def narrow_only(self: Any, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("no kernel for 'Double'\nand a page of detail")
        return forward(self, x)

    monkeypatch.setattr(norm, "forward", narrow_only)
    report = check(model)
    assert (report.exact, report.truth) == (True, None)
    assert report.why_no_truth == "float64: NotImplementedError: no kernel for 'Double'"


@pytest.mark.full
@pytest.mark.parametrize("known", [True, False])
def test_an_attention_without_the_layers_form_gives_way_to_the_eager_one(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it ignores a softcap or refuses it: what plain autograd is to compute only the eager attention knows."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def without_softcap(*arguments: Any, softcap: float | None = None, **options: Any) -> Any:
        if not known and softcap is not None:
            raise ValueError("no softcap here")
        return sdpa(*arguments, **options)

    without_softcap.__module__ = sdpa.__module__  # a later version of transformers: others are refused
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", without_softcap)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", sdpa_mask)
    model = build("gemma2")
    model.set_attn_implementation("flex_attention")
    report = check(model)
    assert (report.exact, report.attention) == (True, "eager")
    assert model.config._attn_implementation == "flex_attention"


# --- wrong engines ----------------------------------------------------------------------------------------------------


def labels_shifted_in_each_chunk(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    right = head.linear_cross_entropy

    def wrong(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_size: int, **options: Any) -> Tensor:
        last = torch.arange(targets.shape[1]) % chunk_size == chunk_size - 1  # its target lies in the next chunk
        return right(hidden, weight, targets.masked_fill(last, -100), chunk_size=chunk_size, **options)

    monkeypatch.setattr(head, "linear_cross_entropy", wrong)


def prefix_gradient_dropped(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    right = cache.KeysAndValues.grad_views

    def wrong(self: Any, index: int, keys: slice) -> tuple[Tensor, Tensor]:
        grad_k, grad_v = right(self, index, keys)
        return torch.zeros_like(grad_k), torch.zeros_like(grad_v)

    monkeypatch.setattr(cache.KeysAndValues, "grad_views", wrong)


def terms_of_one_chunk_lost(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    right = vjp.GradientSum.add_term

    def wrong(self: Any, part: Tensor | None) -> None:
        self.parts = getattr(self, "parts", 0) + 1
        if self.parts != 2:
            right(self, part)

    monkeypatch.setattr(vjp.GradientSum, "add_term", wrong)


def a_thousandth_in_one_parameter(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    parameter = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    first, right = vjp.GradientSum.__init__, vjp.GradientSum.result

    def init(self: Any, owner: Tensor, widen: bool) -> None:
        first(self, owner, widen)
        self.factor = 1.001 if owner is parameter else 1.0

    def wrong(self: Any) -> Tensor | None:
        total = right(self)
        return None if total is None else total * self.factor

    monkeypatch.setattr(vjp.GradientSum, "__init__", init)
    monkeypatch.setattr(vjp.GradientSum, "result", wrong)


PLANTED: dict[str, tuple[Plant, tuple[str, ...], bool]] = {
    "labels": (labels_shifted_in_each_chunk, (), True),
    "prefix": (prefix_gradient_dropped, ("self_attn.k_proj", "self_attn.v_proj"), False),
    "terms": (terms_of_one_chunk_lost, (), False),
    "thousandth": (a_thousandth_in_one_parameter, ("model.layers.1.mlp.up_proj.weight",), False),
}


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_engine_is_caught_and_named(
    monkeypatch: pytest.MonkeyPatch, planted: str, bf16: bool, truth: bool
) -> None:
    if planted == "thousandth" and bf16 and not truth:
        pytest.skip("a thousandth is less than bfloat16 rounds: this is what the truth is for")
    plant, names, loss_is_off = PLANTED[planted]
    model = build("llama")
    plant(monkeypatch, model)
    report = check(model, bf16=bf16, why_too_large=lambda dtype: "" if truth else "no memory")
    assert not report.exact
    assert report.worst.error_over_bound > 1
    assert any(name in report.worst.parameter for name in names or ("model",))
    if truth or not bf16 or not loss_is_off:  # a mean over other tokens may be the same mean to three digits
        assert (report.loss.worst.error_over_bound > 1) == loss_is_off
    if planted == "thousandth":
        assert report.worst.error == pytest.approx(1e-3, rel=1e-2)
        wrong = [row.module for row in report.modules if row.exact_error > 2e-5]
        assert wrong == ["mlp.up_proj"]


@pytest.mark.full
def test_a_thousandth_is_caught_in_a_model_of_experts_and_in_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, name in ((build("mixtral"), "self_attn.o_proj.weight"), (lora(build("qwen3")), "lora_A.default.weight")):
        parameter = next(p for full, p in model.named_parameters() if full.endswith(name))
        right = vjp.GradientSum.result
        with monkeypatch.context() as patch:
            patch.setattr(vjp.GradientSum, "__init__", _marking(vjp.GradientSum.__init__, parameter))
            patch.setattr(vjp.GradientSum, "result", lambda self, right=right: _scaled(right(self), self.marked))
            report = check(model, bf16=True)
            assert not report.exact
            assert report.worst.parameter.endswith(name)
            assert report.worst.error == pytest.approx(1e-3, rel=1e-2)


def _marking(init: Any, parameter: Tensor) -> Any:
    def marking(self: Any, owner: Tensor, widen: bool) -> None:
        init(self, owner, widen)
        self.marked = owner is parameter

    return marking


def _scaled(total: Tensor | None, marked: bool) -> Tensor | None:
    return total * 1.001 if marked and total is not None else total


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "factor", "overall"), [("llama", 1.1, False), ("llama", 1.02, True), ("mixtral", 1.6, True)]
)
def test_an_engine_that_is_exact_but_rounds_worse_than_torch_is_caught(
    monkeypatch: pytest.MonkeyPatch, family: str, factor: float, overall: bool
) -> None:
    """Wrong in the narrow dtype alone: the truth's dtype cannot see it."""
    right = vjp.GradientSum.result
    monkeypatch.setattr(
        vjp.GradientSum, "result", lambda self: right(self) * (factor if self.dtype == torch.bfloat16 else 1.0)
    )
    report = check(build(family, dtype=torch.bfloat16))
    assert not report.exact
    assert (report.worst.run.dtype, report.worst.overall) == (torch.bfloat16, overall)
    assert all(row.exact_error < 2e-6 for row in report.modules)
    assert report.worst.torch_error > 0


def test_a_gradient_that_never_comes_is_wholly_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vjp.GradientSum, "result", lambda self: None)
    report = check(build("llama"))
    assert not report.exact
    assert report.worst.error == pytest.approx(1.0)


def test_layers_whose_tokens_meet_outside_the_cache_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    mlp = type(model.model.layers[0].mlp)
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: forward(self, x) + x.cumsum(1) / x.shape[1])
    report = check(model)
    assert not report.exact
    assert "layer 0 of 2 (LlamaDecoderLayer)" in report.refusal


# --- limits -----------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_refused_before_anything_runs() -> None:
    model = build("llama")
    model.model.layers[0].forward = model.model.layers[0].forward
    said: list[str] = []
    with pytest.raises(UnsupportedModelError, match="replaced on the instance"):
        check(model, notify=said.append)
    assert said == []


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="no trainable parameter"):
        check(build("llama").requires_grad_(False))


def test_a_plain_gradient_that_is_no_number_ends_it() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    with pytest.raises(NonFiniteError, match="float64"):
        check(model)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool, adapters: bool) -> None:
    model = lora(build("qwen3", dtype=torch.bfloat16)) if adapters else build("mixtral", dtype=torch.bfloat16)
    next(iter(decoder_layers(model))).eval()
    trainable = [p for p in model.parameters() if p.requires_grad]
    trainable[0].grad = torch.full_like(trainable[0], 3.0)
    before = {name: (p, p.dtype, p.detach().clone()) for name, p in model.named_parameters()}
    buffers = [(module, copy.copy(module._buffers)) for module in model.modules()]
    flags = [module.training for module in model.modules()]
    attributes = [set(module.__dict__) for module in model.modules()]
    config, state = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()

    def loss(given: nn.Module, autocast_dtype: str | None) -> Tensor:
        if fails and given.dtype == torch.bfloat16:
            raise MemoryError("here")
        return loss_of(given, autocast_dtype)

    if fails:
        with pytest.raises(MemoryError, match="here"):
            check(model, loss)
    else:
        assert check(model, loss).exact

    for name, p in model.named_parameters():
        was, dtype, value = before[name]
        assert p is was
        assert p.dtype == dtype
        assert torch.equal(p, value)
        assert not p._post_accumulate_grad_hooks
        assert (p.grad is None) == (p is not trainable[0])
    assert torch.equal(trainable[0].grad, torch.full_like(trainable[0], 3.0))
    assert all(module._buffers[name] is value for module, held in buffers for name, value in held.items())
    assert flags == [module.training for module in model.modules()]
    assert attributes == [set(module.__dict__) for module in model.modules()]
    assert config == model.config.to_dict()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.full
def test_no_gradient_outlives_its_comparison() -> None:
    """All that is held of a run's gradients at a time is the one being compared."""
    model = build("llama")
    held: list[int] = []
    for p in model.parameters():
        p.register_hook(lambda grad: held.append(sum(q.grad is not None for q in model.parameters())))
    assert check(model).exact
    assert len(held) >= 8 * len(list(model.parameters()))
    assert max(held) == 0


def test_widening_and_narrowing_loses_no_bit() -> None:
    model = build("gemma2", dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    with prepared_for_comparison(model), widening_weights(model, torch.float64):
        assert model.dtype == torch.float64
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8, 12, 47, 64, 100, 105, 210, 2048, 8191])
@pytest.mark.parametrize("own", [1, 5, 2048])
def test_every_schedule_cuts_the_sequence(length: int, own: int) -> None:
    schedules = verify_schedules(length, Schedule(chunk_size=own, head_chunk_size=own))
    assert all(len(schedule.chunks(length)) >= 2 for schedule in schedules)
    assert len({schedule.chunk_size for schedule in schedules}) == len(schedules)
    assert (Schedule(chunk_size=own, head_chunk_size=own) in schedules) == (own < length)
    if length > 12:
        assert len(schedules) >= 3
        sizes = [{part.stop - part.start for part in schedule.chunks(length)} for schedule in schedules]
        assert any(len(parts) > 1 for parts in sizes)  # ragged
        assert len({schedule.keep_kv for schedule in schedules}) == 2


def test_three_tokens_cannot_be_cut() -> None:
    with pytest.raises(ArgumentError, match="cannot be split into chunks"):
        verify_schedules(3, Schedule())


@pytest.mark.parametrize(
    ("parameter", "module"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "self_attn.q_proj"),
        ("base_model.model.model.layers.3.mlp.down_proj.lora_B.default.weight", "mlp.down_proj"),
        ("model.layers.0.mlp.experts.7.w1.weight", "mlp.experts.*.w1"),
        ("model.layers.0.mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("model.layers.0.self_attn.sinks", "self_attn.sinks"),
        ("transformer.h.1.attn.c_attn.bias", "attn.c_attn"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("weight", "weight"),
    ],
)
def test_parameters_are_told_by_the_module_within_a_layer(parameter: str, module: str) -> None:
    assert module_of(parameter) == module
