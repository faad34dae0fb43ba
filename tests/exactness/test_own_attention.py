"""Layers that compute their attention themselves, with the chunk's tile of the mask: exact as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import streamtune
from streamtune import Schedule
from tests.conformance.reducer import build
from tests.engine.test_allocations import Watcher
from tests.precision_kit import EXACT, Float64, in_float64

from .families import VOCAB, batch, evaluation, gradients, reference, worst

SCHEDULES = (
    Schedule(chunk_size=16, head_chunk_size=11),  # ragged: 13 + 12 + 12
    Schedule(chunk_size=5, head_chunk_size=7, keep_kv=True),
)
NO_POSITIONS = ("bloom", "gpt_neo", "mpt", "bart", "falcon-alibi", "mvp", "ctrl")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),  # alibi [B * H, 1, T]; its values depend on the padding of the whole row
    "bloom-3-heads": ("bloom", {"n_head": 3, "hidden_size": 48}),  # slopes of no power of two
    "falcon": ("falcon", {}),  # scaled_dot_product_attention by its own hand, rotary embeddings
    "falcon-eager": ("falcon", {"_attn_implementation": "eager"}),
    "falcon-alibi": ("falcon", {"alibi": True}),  # alibi merged into the mask before the layers
    "falcon-alibi-eager": ("falcon", {"alibi": True, "_attn_implementation": "eager"}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gptj": ("gptj", {}),  # rotations looked up by position inside the layer
    "codegen": ("codegen", {}),
    "gpt_neo": ("gpt_neo", {}),  # a static mask of its own, cut from the end of the keys
    "mpt": ("mpt", {}),  # alibi relative to the last key, and a boolean mask that is True where forbidden
    "mpt-short": ("mpt", {"max_seq_len": 37}),  # its bias is as long as the row
    "xglm": ("xglm", {}),  # checks the shape of the mask
    # A bias with a gradient, a number for each head and key. By sdpa, transformers 5.17 forgets its causal mask.
    "doge": ("doge", {"_attn_implementation": "eager"}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),  # chooses keys; the choice goes to the next layer
    "hy_v4": ("hy_v4", {}),  # the same with several residual streams
    "bart": ("bart", {}),  # its own cross entropy, unshifted
    "mvp": ("mvp", {}),  # both
    "ctrl": ("ctrl", {}),  # layers that do not say they are some
}


def inputs_for(case: str, kind: str) -> dict[str, Any]:
    inputs: dict[str, Any] = batch(kind)
    if case.startswith(NO_POSITIONS):
        inputs.pop("position_ids", None)
    return inputs


@pytest.mark.quick("bloom", "gptj", "glm_moe_dsa")
@pytest.mark.parametrize("case", MODELS)
def test_streamed_gradients_equal_plain_autograd(case: str) -> None:
    name, changes = MODELS[case]
    model = build(name, **changes)
    for kind in ("plain", "multiturn", "right", "left"):
        inputs = inputs_for(case, kind)
        want = reference(model, inputs)
        for schedule in SCHEDULES:
            with streamtune.stream(model, schedule=schedule):
                want.check(gradients(model, inputs), (kind, schedule))


@pytest.mark.quick("bloom", "doge")
@pytest.mark.parametrize("case", ["bloom", "falcon", "falcon-alibi", "gptj", "mpt", "doge", "glm_moe_dsa", "bart"])
def test_the_preflight_agrees_and_the_model_is_restored(case: str) -> None:
    name, changes = MODELS[case]
    model = build(name, **changes)
    implementation = model.config.get_text_config()._attn_implementation
    with streamtune.stream(model, chunk_size=8) as handle:
        handle.check()
        gradients(model, inputs_for(case, "plain"))
    assert model.config.get_text_config()._attn_implementation == implementation
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.quick("bloom", "mpt")
@pytest.mark.parametrize("case", ["bloom", "falcon", "falcon-alibi", "gptj", "mpt", "doge", "xglm"])
def test_generation_and_evaluation_are_the_models_own(case: str) -> None:
    name, changes = MODELS[case]
    model = build(name, **changes).eval()
    inputs = inputs_for(case, "right")
    prompt = inputs["input_ids"][:2, :9]
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    given = {"input_ids": prompt, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        want, tokens = evaluation(model, inputs), model.generate(**given)
        with streamtune.stream(model, chunk_size=6):
            assert torch.equal(model.generate(**given), tokens)
            want.check((model(**inputs).loss, {}))
            assert torch.equal(model.generate(**given), tokens)


@pytest.mark.parametrize("case", ["bloom", "falcon", "bart"])
def test_no_square_is_built(case: str) -> None:
    """Neither scores nor mask of all tokens against all, nor logits of a whole row."""
    name, changes = MODELS[case]
    model = build(name, vocab_size=VOCAB, max_position_embeddings=512, **changes)
    ids = torch.randint(3, VOCAB, (2, 512), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -100:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    with streamtune.stream(model, schedule=Schedule(chunk_size=32, head_chunk_size=32)), Watcher() as watcher:
        model(**inputs).loss.backward()
    assert watcher.large == []
    assert watcher.operations > 100


@pytest.mark.parametrize("case", ["bloom", "falcon", "gptj"])
def test_parameters_are_told_once(case: str) -> None:
    name, changes = MODELS[case]
    model = build(name, **changes)
    fired: list[str] = []
    for key, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: fired.append(key))
    with streamtune.stream(model, chunk_size=5):
        model(**batch("plain")).loss.backward()
    assert sorted(fired) == sorted(key for key, _ in model.named_parameters())


def test_finding_out_draws_no_random_numbers() -> None:
    """The first call finds that the layer computes with its mask; it draws what every later call draws."""
    model = build("doge", attention_dropout=0.3, hidden_dropout=0.2)
    inputs = batch("plain")
    with streamtune.stream(model, chunk_size=8):
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            found.append((*gradients(model, inputs), torch.get_rng_state()))
        torch.manual_seed(4)
        other, _ = gradients(model, inputs)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][2], found[1][2])
    assert all(torch.equal(found[0][1][key], grad) for key, grad in found[1][1].items())
    assert not torch.equal(other, found[0][0])


@pytest.mark.parametrize("how", ["bf16", "autocast"])
@pytest.mark.parametrize("case", ["bloom", "falcon", "gptj", "mpt", "bart"])
def test_as_precise_as_torch(case: str, how: str) -> None:
    name, changes = MODELS[case]
    rounded = build(name, **changes).to(torch.bfloat16)
    truth_model = in_float64(rounded)
    model = rounded if how == "bf16" else rounded.float()
    inputs = inputs_for(case, "right")

    def loss(streamed: torch.nn.Module, given: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            return streamed(**given).loss

    def error(got: dict[str, torch.Tensor]) -> float:
        distance = torch.stack([(got[key].double() - g).norm() for key, g in truth.items()]).norm()
        return float(distance / torch.stack([g.norm() for g in truth.values()]).norm())

    with Float64():
        _, truth = gradients(truth_model, inputs)
    torch_error = error(gradients(model, inputs, loss)[1])
    with streamtune.stream(model, schedule=Schedule(chunk_size=13, head_chunk_size=16)):
        ours = error(gradients(model, inputs, loss)[1])
    assert ours <= 1.1 * torch_error + 1e-6


@pytest.mark.parametrize("settings", [{}, {"router_jitter_noise": 0.3, "input_jitter_noise": 0.1}])
def test_random_routes_of_phimoe(settings: dict[str, float]) -> None:
    """Its routes are drawn and their gradient is an estimate: held against plain autograd through the same chunks.

    With one layer, feeding the chunks to the model one by one draws the numbers in the order in which we draw them. In
    fp64: other dtypes draw other numbers.
    """
    model = in_float64(build("phimoe", num_hidden_layers=1, **settings))
    inputs = batch("plain")
    targets = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    schedule = Schedule(chunk_size=13)

    def chunk_by_chunk(plain: torch.nn.Module, given: dict[str, Any]) -> torch.Tensor:
        cache, logits = DynamicCache(), []
        for chunk in schedule.chunks(targets.shape[1]):
            out = plain(input_ids=given["input_ids"][:, chunk], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
        return torch.nn.functional.cross_entropy(torch.cat(logits, 1).view(-1, VOCAB), targets.flatten())

    with Float64():
        torch.manual_seed(5)
        loss_ref, want = gradients(model, inputs, chunk_by_chunk)
        torch.manual_seed(6)
        other, _ = gradients(model, inputs, chunk_by_chunk)
        with streamtune.stream(model, schedule=schedule):
            torch.manual_seed(5)
            loss, got = gradients(model, inputs)
    torch.testing.assert_close(loss, loss_ref, rtol=EXACT, atol=0)
    assert worst(got, want) <= EXACT
    assert (not settings) == bool(torch.isclose(other, loss_ref, rtol=1e-6))
