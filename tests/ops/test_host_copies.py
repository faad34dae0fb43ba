"""Copies on the host: one for a tensor until it is written to, none where nobody asked."""

from __future__ import annotations

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

import streamtune
from streamtune.engine import masks
from streamtune.ops.devices import _copies, cached_host_copy, host_copy, to_device_with_host_copy
from tests.exactness.families import batch, build
from tests.exactness.test_packing import packed, rows


def test_a_tensor_of_the_host_is_its_own_copy() -> None:
    x = torch.arange(4)
    assert host_copy(x) is x
    assert to_device_with_host_copy(x, x.device) is x
    assert cached_host_copy(x) is None


def test_a_copy_is_kept_until_the_tensor_is_written_to() -> None:
    copy = torch.arange(6)[None]
    x = to_device_with_host_copy(copy, torch.device("meta"))  # its numbers can be read in no other way
    assert cached_host_copy(x) is copy
    assert host_copy(x.expand(1, -1)) is copy, "the same numbers at the same places"
    assert cached_host_copy(x[:, 1:]) is None
    assert cached_host_copy(x.expand(3, -1)) is None
    x[0, 0] = 7
    assert cached_host_copy(x) is None


def test_a_call_of_a_model_reads_anew_what_was_written_past_autograd() -> None:
    x = to_device_with_host_copy(torch.arange(6)[None], torch.device("meta"))
    x.data.zero_()
    assert cached_host_copy(x) is not None, "such a write has no version"
    torch.manual_seed(0)
    model = build("llama")
    with streamtune.stream(model):
        model(**batch("plain"))
    assert cached_host_copy(x) is None


def test_a_copy_goes_with_its_tensor() -> None:
    gc.collect()
    before = len(_copies)
    x = to_device_with_host_copy(torch.arange(6), torch.device("meta"))
    assert len(_copies) == before + 1
    del x
    gc.collect()
    assert len(_copies) == before


def test_transformers_finds_packed_rows_as_before() -> None:
    assert masking_utils.find_packed_sequence_indices is masks._find_packed_on_host
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    want = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    assert torch.equal(masking_utils.find_packed_sequence_indices(positions), want)
    assert masking_utils.find_packed_sequence_indices(positions[1:]) is None
    x = to_device_with_host_copy(positions, torch.device("meta"))
    found = masking_utils.find_packed_sequence_indices(x)
    assert found.device.type == "meta"
    assert torch.equal(host_copy(found), want)


def test_plain_models_run_as_before_on_tensors_without_memory() -> None:
    """``transformers``' own function is replaced for them too, and some tensors have no address or no version."""
    model, inputs = build("qwen3"), {"input_ids": batch("plain")["input_ids"][:1]}
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
    x = to_device_with_host_copy(torch.arange(4), torch.device("meta"))  # some copy is known
    with torch.no_grad():
        want = model(**inputs).logits
    with torch.inference_mode():
        assert torch.equal(model(**{name: each.clone() for name, each in inputs.items()}).logits, want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = model(**{name: mode.from_tensor(each) for name, each in inputs.items()}).logits
    assert fake.shape == want.shape
    assert cached_host_copy(x) is not None


def test_another_default_device_changes_nothing() -> None:
    model, inputs = build("mistral", sliding_window=6), packed(rows())
    with streamtune.stream(model, schedule=streamtune.Schedule(chunk_size=8)):
        want = model(**inputs).loss
        with torch.device("meta"):
            assert torch.equal(model(**inputs).loss, want)
