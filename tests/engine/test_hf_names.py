"""The names that transformers gives to its inside, which change between its minor versions."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, masking_utils
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

import streamtune
from streamtune.base import libraries
from streamtune.engine import hf_names
from streamtune.engine.cache import ChunkCache
from streamtune.engine.hf_names import cache_argument, cache_keyword
from streamtune.errors import UnsupportedModelError, VersionError
from streamtune.tasks.rollout import Sampling, TransformersGenerator
from tests.exactness.families import build
from tests.precision_kit import Float64, errors, in_float64

IDS = torch.randint(3, 60, (2, 23), generator=torch.Generator().manual_seed(0))


def gradients(model: Any, **call: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**call).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def filled(model: Any) -> Any:
    """A cache that has read the first seven tokens."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS[:, :7], use_cache=True, **cache_keyword(type(model).forward, cache))
    return cache


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_taken_by_its_old_and_by_its_new_name(family: str, name: str) -> None:
    with Float64():
        model = in_float64(build(family)).train()
        rest = {"input_ids": IDS[:, 7:], "labels": IDS[:, 7:]}
        plain = gradients(model, **rest, **cache_keyword(type(model).forward, filled(model)))
        with streamtune.stream(model, chunk_size=4):
            cache = filled(model)
            streamed = gradients(model, **rest, **{name: cache})
    assert max(errors(streamed, plain).values()) < 1e-9
    assert cache.get_seq_length() == 7, "it was read, and not written to"


def test_the_engine_passes_no_argument_by_a_name_that_is_going_away() -> None:
    model = build("qwen3")
    writer = TransformersGenerator(model, end_token_ids=[2], pad_token_id=0, prefill_chunk_size=4, max_rows=4)
    with warnings.catch_warnings(), streamtune.stream(model, chunk_size=4):
        warnings.simplefilter("error", FutureWarning)
        gradients(model, input_ids=IDS, labels=IDS)
        writer.write([IDS[0].tolist(), IDS[1, :7].tolist()], 2, Sampling(max_completion_length=3, temperature=1.0))
        with torch.no_grad():
            model(input_ids=IDS, use_cache=True)


class OldModel(LlamaModel):
    """A decoder of a repository, written for an older transformers: it hands its layers their cache by that name."""

    name = "past_key_values"

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        x = self.embed_tokens(input_ids)
        cache = DynamicCache(config=self.config)
        places = torch.arange(x.shape[1])[None]
        around = self.rotary_emb(x, places)
        for layer in self.layers:
            x = layer(x, position_embeddings=around, position_ids=places, **{self.name: cache})
        return x


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_layer_takes_either_name_from_a_model_that_calls_it(name: str) -> None:
    """``transformers`` lets its own layers take the old name for the new one; a streamed layer takes both, always."""
    with Float64():
        model: Any = in_float64(build("llama")).model
        model.__class__ = type("Older", (OldModel,), {"name": name})
        with streamtune.stream(model, chunk_size=4), torch.no_grad():
            got = model(IDS)
        model.name = cache_argument(LlamaDecoderLayer.forward)
        with torch.no_grad():
            want = model(IDS)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_a_table_that_is_called_cache_and_is_none_makes_no_layer() -> None:
    """The attention of xlm and flaubert takes one, and another sequence to attend to."""

    class Attention(nn.Module):
        def forward(self, input: Tensor, mask: Tensor, kv: Any = None, cache: Any = None, **kwargs: Any) -> Tensor:
            return input

    assert cache_argument(Attention.forward) is None
    assert cache_argument(LlamaForCausalLM.forward) in ("cache", "past_key_values")


# --- one file ---------------------------------------------------------------------------------------------------------

SOURCE = Path(streamtune.__file__).parent
EVERYDAY = {
    *("cache", "state", "kv", "keys", "values", "labels", "update", "index", "eager", "sdpa", "chunk_size"),
    *("flash_attention", "layer_idx", "safe_open"),
}
"""Words of this package, or of safetensors, too, which a search cannot tell from the names of transformers."""
DOCUMENTED = {
    *("position_ids", "token_type_ids", "mm_token_type_ids", "shift_labels", "num_items_in_batch", "attention_mask"),
    *("mask_function", "num_experts", "sliding_window", "top_k", "model.safetensors", "model.safetensors.index.json"),
    *("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
}
"""Arguments of a model's call, keys of a configuration, values of one, files: its interface, by name everywhere."""


def spelled(file: Path) -> set[str]:
    """Return all words of the code of a file: names, attributes, arguments, strings; no docstrings or comments."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)) | ast.arg(arg=word):
                found.add(word)
            case ast.Constant(value=str(word)):
                found.add(word)
            case ast.alias(name=word):
                found.add(word)
    return found


def names_in(value: Any) -> set[str]:
    if isinstance(value, str):
        in_module = "." in value and ".<locals>." not in value and value in hf_names.FUNCTIONS
        return {value, value.rpartition(".")[2]} if in_module else {value, value.partition(".<locals>.")[0]}
    return {name for each in value for name in names_in(each)} if isinstance(value, dict | tuple | frozenset) else set()


OURS_TOO = ("CACHE_METHODS", "OWN_CACHE_METHODS", "STATE_CALLS", "KEY_CALLS", "LAYER_STATES", "RECORDS_PAST")
"""Tables of what ``engine/cache.py`` defines under the same name, as a cache."""
NAMED = {
    name
    for key, value in vars(hf_names).items()
    if key.lstrip("_").isupper() and key not in OURS_TOO
    for name in names_in(value)
} | {name for held in hf_names.CLOSURE_VARIABLES.values() for name in held}


@pytest.mark.full
def test_nothing_else_spells_a_name_of_transformers_inside() -> None:
    names = NAMED - EVERYDAY - DOCUMENTED - set(hf_names.LAYER_STATES)
    assert {"past_key_values", "layer_past", "_attn_implementation_internal", "find_packed_sequence_indices"} <= names
    found = {
        str(file.relative_to(SOURCE)): wrong
        for file in sorted(SOURCE.rglob("*.py"))
        if file.name != "hf_names.py" and (wrong := spelled(file) & names)
    }
    assert found == {}


def test_nothing_else_imports_from_the_inside_of_transformers() -> None:
    wrong = [
        f"{file.relative_to(SOURCE)}:{node.lineno}"
        for file in SOURCE.rglob("*.py")
        if file.name != "hf_names.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers.")
    ]
    assert wrong == []


# --- what the installed version has -----------------------------------------------------------------------------------


def test_the_installed_version_has_all_of_it() -> None:
    hf_names.check_internal_names.cache_clear()
    hf_names.check_internal_names()
    for name, since in hf_names.FUNCTIONS.items():
        assert hf_names.hf_internal(name) is not None, f"{name} has been there since {since}"


def test_a_chunk_has_all_methods_that_layers_ask_their_cache_for() -> None:
    """Those of the installed version's models, by their code: a new one has to be streamed or listed here."""
    others = {
        *("cache_vision_features", "clear_all", "clone", "copy_", "get_vision_features", "index_select"),  # no cache
        *("lazy_initialization", "move_to_end", "popitem"),  # caches of their own, outside of decoder layers
        *("crop", "get_max_length"),  # of whole models that generate
    }
    asked = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        names = "|".join(hf_names.CACHES)
        asked |= set(re.findall(rf"\b(?:{names})\.([a-z_]+)\(", file.read_text(encoding="utf-8")))
    known = {*hf_names.CACHE_METHODS, *hf_names.OWN_CACHE_METHODS}
    assert {"update", "get_seq_length", "update_conv_state"} <= asked
    assert asked - others <= known
    assert known <= vars(ChunkCache).keys()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (masking_utils, "sliding_window_overlay"),
        (masking_utils, "find_packed_sequence_indices"),
        (Cache, "get_query_offset"),
        (PreTrainedModel, "_can_record_outputs"),
    ],
)
def test_what_is_missing_names_the_version_and_not_the_model(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    hf_names.check_internal_names.cache_clear()
    hf_names._import_internal.cache_clear()
    model = build("llama")
    with pytest.raises(VersionError, match=rf"transformers {transformers.__version__} has no .*{name}") as caught:
        streamtune.stream(model)
    assert "Llama" not in str(caught.value)
    assert caught.value.fix == "pip install 'transformers<5.25'"
    assert "tested: 5.17 to 5.24" in caught.value.where
    monkeypatch.undo()
    hf_names.check_internal_names.cache_clear()
    hf_names._import_internal.cache_clear()
    streamtune.stream(model).remove()


# --- a version that is newer than the tested ones ---------------------------------------------------------------------


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed_version", lambda name: {"transformers": "5.31.0"}.get(name, "2.13.0"))


@pytest.mark.usefixtures("newer")
def test_a_newer_version_is_tried_and_said_to_be_untested() -> None:
    model = build("llama")
    with pytest.warns(UserWarning, match=r"not tested with transformers 5\.31\.0 \(tested: 5\.17 to 5\.24\)") as told:
        handle = streamtune.stream(model, chunk_size=5)
    assert told[0].filename == __file__
    model(input_ids=IDS, labels=IDS).loss.backward()
    handle.check()


@pytest.mark.usefixtures("newer")
def test_refusals_of_a_model_under_a_newer_version_say_that_it_is_the_likely_cause() -> None:
    """All layers of a llama call their cache by a name that this version does not know, as in 5.24 before it did."""
    name = str(cache_argument(LlamaDecoderLayer.forward))

    class Renamed(LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, kept_keys: Any = None, **kwargs: Any) -> Tensor:
            return super().forward(hidden_states, **{name: kept_keys}, **kwargs)

    class RenamedAttention(LlamaAttention):
        def forward(self, hidden_states: Tensor, kept_keys: Any = None, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **{name: kept_keys}, **kwargs)

    model = build("llama")
    for layer in model.model.layers:
        layer.__class__, layer.self_attn.__class__ = Renamed, RenamedAttention
    with (
        pytest.warns(UserWarning, match="not tested with"),
        pytest.raises(UnsupportedModelError, match="no decoder layer with a key/value cache") as caught,
    ):
        streamtune.stream(model)
    assert "not tested with transformers 5.31.0 (tested: 5.17 to 5.24), which is the likely cause" in caught.value.what
    assert caught.value.fix.startswith("pip install 'transformers<5.25'")


@pytest.mark.usefixtures("newer")
def test_the_check_before_training_says_so_too() -> None:
    class Doubled(LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = super().forward(hidden_states, *args, **kwargs)
            return out + out.cumsum(1) * 0.1

    signature = inspect.signature(LlamaDecoderLayer.forward)
    Doubled.forward.__signature__ = signature  # type: ignore[attr-defined]
    model = build("llama")
    model.model.layers[1].__class__ = Doubled
    with (
        pytest.warns(UserWarning, match="not tested with"),
        streamtune.stream(model) as handle,
        pytest.raises(UnsupportedModelError, match="is not streamed exactly") as caught,
    ):
        handle.check()
    assert "which is the likely cause" in caught.value.what
    assert "; or " in caught.value.fix
