"""Logits of an evaluation with labels: those of the ordinary call where they are read, else not computed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import streamtune
from streamtune.errors import ArgumentError
from streamtune.models import add_lora
from streamtune.schedule import Schedule
from tests.conformance.reducer import build

IDS = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))
SCHEDULE = Schedule(chunk_size=9, head_chunk_size=5)
READ: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "detach": lambda x: x.detach(),
    "float": lambda x: x.float(),
    "double": lambda x: x.to(torch.float64),
    "argmax": lambda x: x.argmax(dim=-1),
    "argmax, kept": lambda x: x.argmax(-1, keepdim=True),
    "argmax over tokens": lambda x: x.argmax(dim=1),
    "shifted": lambda x: x[:, :-1].contiguous().view(-1, x.size(-1)),
    "softmax": lambda x: torch.softmax(x.float(), -1),
    "cross entropy": lambda x: torch.nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: torch.from_numpy(np.array(x.numpy())),
    "asarray": lambda x: torch.from_numpy(np.array(np.asarray(x.detach()))),
    "list": lambda x: torch.tensor(x.tolist()),
    "concatenated": lambda x: torch.cat([x, x]),
    "copied": copy.deepcopy,
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "in a product": lambda x: 2 * x + torch.ones_like(x),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_what_is_read_is_that_of_the_ordinary_call(family: str, read: str) -> None:
    model = build(family).eval()
    with torch.no_grad():
        want = READ[read](model(input_ids=IDS, labels=IDS).logits)
        with streamtune.stream(model, schedule=SCHEDULE):
            logits = model(input_ids=IDS, labels=IDS).logits
            assert isinstance(logits, Tensor)
            assert (logits.shape, logits.dtype) == (torch.Size([2, 27, model.config.vocab_size]), torch.float32)
            got = READ[read](logits)
    torch.testing.assert_close(torch.as_tensor(got) + 0, torch.as_tensor(want), rtol=1e-4, atol=1e-5)


def test_as_a_tuple_and_under_autocast() -> None:
    model = build("qwen3").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(input_ids=IDS, labels=IDS, return_dict=False)
        with streamtune.stream(model, schedule=SCHEDULE):
            got = model(input_ids=IDS, labels=IDS, return_dict=False)
    assert got[1].dtype == want[1].dtype == torch.bfloat16
    torch.testing.assert_close(got[1] + 0, want[1], rtol=3e-2, atol=3e-2)


def test_nobody_pays_for_what_is_not_read() -> None:
    model, tokens = build("qwen3").eval(), []
    with torch.no_grad(), streamtune.stream(model, schedule=SCHEDULE):
        logits = model(input_ids=IDS, labels=IDS).logits
        head: Any = model.get_output_embeddings()
        head.register_forward_hook(lambda module, args, output: tokens.append(args[0].shape[-2]))
        str(logits)
        logits.detach().float()
        assert set(tokens) <= {1}, "one token tells the dtype"
        tokens.clear()
        logits.argmax(-1)
        assert max(tokens) == 5, "the vocabulary is reduced chunk by chunk"


def test_a_call_that_trains_has_none() -> None:
    model = build("qwen3").train()
    with streamtune.stream(model, schedule=SCHEDULE):
        assert model(input_ids=IDS, labels=IDS).logits is None


def test_an_evaluation_with_gradients_has_them() -> None:
    model = build("qwen3").eval()
    plain = model(input_ids=IDS, labels=IDS).logits
    with streamtune.stream(model, schedule=SCHEDULE):
        logits = model(input_ids=IDS, labels=IDS).logits
        assert logits.requires_grad
        assert torch.allclose(logits, plain, atol=1e-5)


WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "a part": lambda x: x[..., 40:].fill_(-1e4),
    "an item": lambda x: x.__setitem__((..., 7), -1e9),
    "all": lambda x: x.mul_(3),
    "masked": lambda x: x.masked_fill_(x > 0, 0.0),
    "through data": lambda x: x.data.clamp_(max=0.0),
    "through detach": lambda x: x.detach()[:, 0].zero_(),
}


@pytest.mark.parametrize("write", WRITTEN)
def test_what_is_written_is_read(write: str) -> None:
    model = build("qwen3").eval()
    with torch.no_grad():
        want = model(input_ids=IDS, labels=IDS).logits
        WRITTEN[write](want)
        with streamtune.stream(model, schedule=SCHEDULE):
            got = model(input_ids=IDS, labels=IDS).logits
            WRITTEN[write](got)
            torch.testing.assert_close(got.argmax(-1), want.argmax(-1))
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.double() + 0, want.double(), rtol=1e-4, atol=1e-5)


def test_each_dtype_on_the_way_rounds() -> None:
    model = build("qwen3").eval()
    with torch.no_grad(), streamtune.stream(model, schedule=SCHEDULE):
        logits = model(input_ids=IDS, labels=IDS).logits
        assert torch.equal(logits.bfloat16().float() + 0, (logits + 0).bfloat16().float())
        assert torch.equal(torch.from_dlpack(logits), logits + 0)
        assert logits.data_ptr() == logits.untyped_storage().data_ptr() != 0


def test_the_head_is_that_of_the_call() -> None:
    """Adapters on the head are computed with at once; a weight that is changed before its logits are read is named."""
    model: Any = add_lora(build("qwen3"), r=4, target=["lm_head", "q_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model.eval()
    with torch.no_grad():
        with model.disable_adapter():
            want = model(input_ids=IDS, labels=IDS).logits
        with streamtune.stream(model, schedule=SCHEDULE):
            with model.disable_adapter():
                got = model(input_ids=IDS, labels=IDS).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    plain = build("qwen3").eval()
    with torch.no_grad(), streamtune.stream(plain, schedule=SCHEDULE):
        logits = plain(input_ids=IDS, labels=IDS).logits
        plain.lm_head.weight.mul_(2)
        with pytest.raises(ArgumentError, match="changed in place between the model call and the reading"):
            logits.argmax(-1)
        weights = {name: p * 2 for name, p in plain.named_parameters()}
        got = functional_call(plain, weights, (), {"input_ids": IDS, "labels": IDS}).logits
        torch.testing.assert_close(got + 0, functional_call(plain, weights, (), {"input_ids": IDS}).logits)
