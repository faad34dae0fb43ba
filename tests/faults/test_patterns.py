"""Patterns of recipes, saved adapters and rewards that take for ever: one error that names the key, in seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune.base.patterns import find_matches, pattern_error, search_within_limit
from streamtune.data.rendering.long_text import LongTextTokenizer
from streamtune.errors import ArgumentError
from streamtune.models import AdapterSpec, load_tokenizer, train_tokenizer
from streamtune.models.adapters.attach import add_adapters
from streamtune.models.adapters.initial_adapters import load_initial_adapters
from streamtune.models.folder import check_adapter_config, check_adapter_config_file
from streamtune.optim.badam import split_blocks
from streamtune.tasks.rewards import load_rewards

NAMES = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(40) for part in "qkvo"]
SLOW = [r"([a-z_.0-9]|[a-z_.0-9])+!", r"(?:.?){60}!", ".*.*.*.*.*.*.*.*.*!"]
NONE = ["(", "x{0,99999999999}", "(?:" * 3000 + ")" * 3000, "[z-a]", r"(?P<a>b)(?P<a>c)"]


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))  # type: ignore[arg-type]


def spec(**more: Any) -> AdapterSpec:
    return AdapterSpec(r=2, **more)


@pytest.mark.parametrize("pattern", [SLOW[0], *(pytest.param(each, marks=pytest.mark.full) for each in SLOW[1:])])
def test_a_pattern_is_given_up_after_seconds_by_its_key(pattern: str) -> None:
    began = time.monotonic()
    with pytest.raises(ArgumentError, match=r"takes more than 3 s on the 160 names") as caught:
        find_matches(
            ["q_proj", pattern], NAMES, where="lora_rank_pattern", match_function="match", template=r"(.*\.)?({})$"
        )
    assert caught.value.where == "lora_rank_pattern"
    assert pattern in caught.value.what
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("pattern", NONE, ids=range(len(NONE)))
def test_what_is_no_pattern_says_so(pattern: str) -> None:
    assert pattern_error(pattern)
    with pytest.raises(ArgumentError, match="is not a regular expression"):
        find_matches([pattern], NAMES, where="k")
    with pytest.raises(ValueError, match="not a regular expression"):
        search_within_limit(pattern, "text")


@pytest.mark.parametrize("how", ["search", "match", "fullmatch"])
def test_matches_are_those_of_re(how: Any) -> None:
    import re

    patterns = ["q_proj", r".*\.q_proj", r"(model\.)?layers\.(1|2)\..*", r"layers\.[0-9]+\.", "nothing", ".*"]
    found = find_matches(patterns, NAMES, where="k", match_function=how)
    wanted = [[n for n, name in enumerate(NAMES) if getattr(re, how)(pattern, name)] for pattern in patterns]
    assert found == wanted


@pytest.mark.full
def test_the_keys_of_a_recipe(tmp_path: Path) -> None:
    for key, changes in {
        "lora_rank_pattern": {"ranks": {SLOW[0]: 4}},
        "lora_alpha_pattern": {"alphas": {SLOW[0]: 4.0}},
    }.items():
        with pytest.raises(ArgumentError, match="takes more than") as caught:
            add_adapters(model(), spec(**changes), seed=0)
        assert caught.value.where == key
    with pytest.raises(ArgumentError, match="takes more than") as caught:
        split_blocks(NAMES, patterns=[SLOW[0]])
    assert caught.value.where == "optim_args.blocks"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": "x"}, "'r' in .* must be a whole number"),
        ({"r": -1}, "'r' in"),
        ({"r": 10**9}, "'r' in"),
        ({"r": True}, "'r' in"),
        ({"lora_alpha": "16"}, "'lora_alpha' in .* must be a number"),
        ({"lora_dropout": [0.1]}, "'lora_dropout' in"),
        ({"rank_pattern": ["q_proj"]}, "'rank_pattern' in .* a mapping of patterns to numbers"),
        ({"rank_pattern": {"q_proj": "8"}}, "'rank_pattern' in"),
        ({"target_modules": 3}, "'target_modules' in"),
        ({"modules_to_save": {"a": 1}}, "'modules_to_save' in"),
        pytest.param({"target_modules": SLOW[0]}, "takes more than", marks=pytest.mark.full),
        pytest.param({"exclude_modules": SLOW[2]}, "takes more than", marks=pytest.mark.full),
        pytest.param({"rank_pattern": {SLOW[0]: 8}}, "takes more than", marks=pytest.mark.full),
        pytest.param({"layers_pattern": SLOW[0]}, "takes more than", marks=pytest.mark.full),
        ([1], "is not a JSON object"),
    ],
)
def test_settings_of_saved_adapters(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_adapter_config(settings, tmp_path / "adapter_config.json", where="adapter_name_or_path")


@pytest.mark.full
def test_a_folder_with_such_adapters_is_refused_before_peft_reads_it(tmp_path: Path) -> None:
    add_adapters(model(), spec(), seed=0).save_pretrained(tmp_path)
    check_adapter_config_file(tmp_path, [], where="k")
    load_initial_adapters(model(), str(tmp_path))
    path = tmp_path / "adapter_config.json"
    good = json.loads(path.read_text())
    for change in ({"r": "x"}, {"target_modules": SLOW[0]}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ArgumentError, match=r"takes more than|must be a whole number") as caught:
            load_initial_adapters(model(), str(tmp_path))
        assert "adapter" in caught.value.where


@pytest.mark.full
@pytest.mark.parametrize("reward", ["regex_match(pattern='(a|a)*$')", "json_schema(schema={'pattern': '(a|a)*$'})"])
def test_a_reward_is_given_up_on_a_completion(reward: str) -> None:
    from streamtune.errors import RunError

    text = json.dumps("a" * 60 + "!")
    began = time.monotonic()
    with pytest.raises(RunError, match="takes more than 2 s"):
        load_rewards([reward])(["p"], [text], {})
    assert time.monotonic() - began < 60


def test_searches_are_those_of_re() -> None:
    import re

    for pattern in [r"^[0-9]+$", r"\bend\b", "(?i)YES", r"(a)\1", "a{,2}b", "a||b", "[ab&]+", "(?s).*"]:
        for text in ["12", "the end", "yes", "aa", "[a]", "a||b", "b", "a&&b", ""]:
            assert search_within_limit(pattern, text) == bool(re.search(pattern, text)), (pattern, text)
            assert search_within_limit(pattern, text, whole=True) == bool(re.fullmatch(pattern, text)), (pattern, text)


def tokenizer_with(pattern: str, folder: Path) -> str:
    tokenizer = train_tokenizer(["hello world"] * 4, vocab_size=270)
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("pattern", [r"(a|a|aa)+$|\s", r"(\w+\s?)+$", r"( +)*$"])
def test_a_tokenizer_whose_pattern_takes_for_ever_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="takes more than 3 s on short texts") as caught:
        load_tokenizer(tokenizer_with(pattern, tmp_path / "t"))
    assert "tokenizer.json" in caught.value.where


@pytest.mark.parametrize(
    "pattern", [r"(?:\r\n)+|\s+(?!\S)|\p{L}+", r"(\p{N}{3})+|[^\s]+", r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+"]
)
def test_a_tokenizer_with_repeated_groups_that_are_quick_is_read(pattern: str, tmp_path: Path) -> None:
    assert load_tokenizer(tokenizer_with(pattern, tmp_path / "t"))("hello world 123")["input_ids"]


def test_a_tokenizer_that_gives_up_on_a_row_is_an_error(tmp_path: Path) -> None:
    """On a text that no trial foresees."""
    pattern = "(?:Q|Q|QQ)+Z|hello"
    pieces = LongTextTokenizer(load_tokenizer(tokenizer_with(pattern, tmp_path / "t")))
    with pytest.raises(ArgumentError, match=r"the tokenizer failed on a text: .*retry-limit") as caught:
        pieces.ids("Q" * 200)
    assert caught.value.where == "tokenizer"
