"""Rows as the model sees them: texts, worst rows, lengths; each against a plain computation."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from preparing import prepare, prepare_preferences
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from streamtune.data import DataOptions, PreparedData, ResumableSampler, Source, pack_rows
from streamtune.data.inspect_rows import RowInspector, TokenGap, TokenRun, decode_parts, ranges_to_show
from streamtune.data.length_measures import MaxLengthEffect, compare_max_lengths, length_histogram, padding_share

Write = Callable[..., str]
WORDS = ["the", "quick", "brown", "fox", "Grüße", "世界", "👋🏽", "answer", "question", "42", "🙂"]


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


@pytest.fixture
def path(write: Write) -> str:
    """Chats of one to four turns, from a few to some hundred tokens; one row is there twice."""
    draw = random.Random(3)
    rows = []
    for _ in range(24):
        turns = []
        for _ in range(draw.randint(1, 4)):
            question, answer = (words(draw, int(draw.lognormvariate(1.5, 1)) + 1) for _ in range(2))
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns})
    return write("chats.jsonl", [*rows, rows[0]])


@pytest.fixture
def made(path: str, tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreparedData]:
    def make(**options: Any) -> PreparedData:
        return prepare([Source(path)], tokenizer, **{"max_length": 10**6, "seed": 1, **options})

    return make


# --- texts ------------------------------------------------------------------------------------------------------------


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A tokenizer whose blanks are part of words, and whose decoder takes the first one off."""
    bpe = Tokenizer(models.BPE(byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(
        ["the quick brown fox answers a question"] * 3,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_pieces_are_the_text_for_any_bounds(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    used, draw = tokenizer if kind == "byte-level" else sentencepiece_like(), random.Random(1)
    for _ in range(40):
        ids = used(words(draw, 12))["input_ids"]
        if draw.random() < 0.5:  # bytes of characters in any order, as a row that is cut has them
            draw.shuffle(ids)
        bounds = sorted({*draw.choices(range(1, len(ids)), k=6), len(ids)})
        pieces = decode_parts(used, ids, bounds)
        assert len(pieces) == len(bounds)
        assert "".join(pieces) == used.decode(ids, skip_special_tokens=False)


def test_a_piece_is_the_text_of_its_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("The ☃ fox")["input_ids"]
    pieces = decode_parts(tokenizer, ids, range(1, len(ids) + 1))
    assert len(ids) > 4  # the bytes of a character that is not in the vocabulary: its text is with the last of them
    assert pieces[0] == "The"
    assert pieces[-2:] == ["☃", " fox"]
    assert [piece for piece in pieces if piece.strip()] == ["The", "☃", " fox"]


def test_runs_are_the_row_and_its_mask(made: Callable[..., PreparedData], tokenizer: PreTrainedTokenizerFast) -> None:
    data = made(max_length=100, overlength="split", val_size=0.2)
    rows = RowInspector(data, tokenizer)
    assert len(rows) == len(data.training) + len(data.validation)
    assert sum(rows.get_view(number).held_out for number in range(1, len(rows) + 1)) == len(data.validation)
    for number in range(1, len(rows) + 1):
        view = rows.get_view(number)
        (part,) = view.parts
        runs = rows.token_runs(part)
        assert all(isinstance(run, TokenRun) for run in runs)
        assert "".join(run.text for run in runs if isinstance(run, TokenRun)) == tokenizer.decode(part.input_ids)
        marks = [(run.trained, run.special) for run in runs if isinstance(run, TokenRun) for _ in range(run.tokens)]
        special = [token in (1, 2) or token in tokenizer.all_special_ids for token in part.input_ids]
        assert marks == list(zip(part.trained.tolist(), special, strict=True))
        if number % 8 == 0:
            assert "".join(rows.token_texts(part)) == tokenizer.decode(part.input_ids)
    assert sum(rows.get_view(number).num_trained for number in range(1, len(rows) + 1)) == data.report.supervised_tokens


def test_gaps_are_where_nothing_changes() -> None:
    trained = np.zeros(20_000, dtype=np.bool_)
    trained[9_000:9_100] = trained[15_000:15_200] = True
    ranges = ranges_to_show(trained, 320)
    assert (ranges[0][0], ranges[-1][1]) == (0, 20_000)
    assert sum(stop - start for start, stop in ranges) <= 320
    for border in (9_000, 9_100, 15_000, 15_200):
        assert any(start < border < stop - 1 for start, stop in ranges), border
    assert ranges_to_show(trained, None) == [(0, 20_000)]
    assert ranges_to_show(trained[:300], 320) == [(0, 300)]


def test_gaps_say_how_much_they_hold(made: Callable[..., PreparedData], tokenizer: PreTrainedTokenizerFast) -> None:
    rows = RowInspector(made(), tokenizer)
    (part,) = rows.get_view(rows.most_extreme_records(1)[0][1]).parts
    runs = rows.token_runs(part, 150)
    assert any(isinstance(run, TokenGap) for run in runs)
    assert sum(run.tokens for run in runs) == len(part.input_ids)
    trained = sum(run.trained if isinstance(run, TokenGap) else run.tokens * run.trained for run in runs)
    assert trained == part.trained.sum()


# --- rows to look at --------------------------------------------------------------------------------------------------


def test_the_worst_rows(made: Callable[..., PreparedData], tokenizer: PreTrainedTokenizerFast) -> None:
    whole, cut = made(), made(max_length=90, overlength="truncate", val_size=0.1)
    rows = RowInspector(cut, tokenizer)
    views = [rows.get_view(number) for number in range(1, len(rows) + 1)]
    sizes = {example.origin: len(example.input_ids) for example in whole.training}
    worst: dict[str, list[int]] = {}
    for reason, number in rows.most_extreme_records(3):
        for each in reason.split(", "):
            worst.setdefault(each, []).append(number)
    assert {view.number: view.lost for view in views} == {v.number: sizes[v.origin] - v.num_tokens for v in views}
    longest = sorted((sizes[view.origin] for view in views), reverse=True)[:3]
    assert [sizes[rows.get_view(number).origin] for number in worst["longest"]] == longest
    shares = sorted(view.num_trained / view.num_tokens for view in views)[:3]
    found = [rows.get_view(number) for number in worst["least trained"]]
    assert sorted(view.num_trained / view.num_tokens for view in found) == pytest.approx(shares)
    lost = sorted((view.lost for view in views), reverse=True)[:3]
    assert sorted((rows.get_view(number).lost for number in worst["most truncated"]), reverse=True) == lost


def test_a_row_is_found_by_its_origin(
    made: Callable[..., PreparedData], path: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = RowInspector(made(max_length=60, overlength="split", val_size=0.1), tokenizer)
    found = rows.record_numbers(f"{path}:5")
    assert found
    assert {rows.get_view(number).origin for number in found} == {f"{path}:5"}
    assert rows.record_numbers("elsewhere:5") == []
    assert rows.evenly_spaced(4)[0] == 1
    assert len(set(rows.evenly_spaced(10**6))) == len(rows)


def test_trees_have_a_prompt_and_answers(write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    pairs = [{"prompt": "The quick", "chosen": " brown fox", "rejected": " lazy dog jumps"}] * 2
    data = prepare_preferences([Source(write("pairs.jsonl", pairs))], tokenizer, max_length=64)
    view = RowInspector(data, tokenizer).get_view(2)
    assert [part.name for part in view.parts] == ["prompt", "chosen", "rejected"]
    assert [int(part.trained.sum()) > 0 for part in view.parts] == [False, True, True]
    assert view.num_trained * 2 == data.report.supervised_tokens
    assert (data.report.duplicates, data.report.held_out_duplicates) == (1, 0)


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlength", ["truncate", "drop", "split"])
def test_sources_add_up_to_the_report(
    overlength: str, made: Callable[..., PreparedData], path: str, write: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    other = write("texts.jsonl", [{"text": "The answer is 42. " * count} for count in (1, 5, 40)])
    data = prepare([Source(path), Source(other)], tokenizer, max_length=70, overlength=overlength, val_size=0.1)
    alone = prepare([Source(other)], tokenizer, max_length=70, overlength=overlength)
    report = data.report.to_json()
    for name in ("rows", "kept", "truncated", "dropped", "split", "tokens", "supervised_tokens", "tokens_lost"):
        assert sum(source[name] for source in report["sources"]) == report[name], name
        assert report["sources"][1][name] == alone.report.to_json()[name], name
    assert report["sources"][1]["length_percentiles"] == alone.report.length_percentiles
    assert [source["path"] for source in report["sources"]] == [path, other]
    assert report["tokens_lost"] == int(data.measured.lengths.sum()) - report["tokens"]
    assert (f"{report['tokens_lost']:,} tokens lost" in data.report.describe()) is (report["tokens_lost"] > 0)
    assert data.measured.starts[1] == sum(source.kept for source in data.report.sources[:1]) or overlength == "split"


def test_duplicates_are_counted(made: Callable[..., PreparedData]) -> None:
    data = made(val_size=0.3)
    seen = [example.input_ids.tobytes() for part in (data.training, data.validation) for example in part]
    assert data.report.duplicates == len(seen) - len(set(seen)) >= 1
    assert data.report.held_out_duplicates == 0


def test_pieces_that_are_held_out_as_well(write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [{"text": "The answer is 42. " * 30 + "The quick " * count} for count in range(1, 9)]
    data = prepare([Source(write("a.jsonl", texts))], tokenizer, max_length=40, overlength="split", val_size=0.5)
    held_out = {example.input_ids.tobytes() for example in data.validation}
    expected = sum(example.input_ids.tobytes() in held_out for example in data.training)
    assert data.report.held_out_duplicates == expected > 0


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_every_row_is_in_one_bin() -> None:
    draw = np.random.default_rng(0)
    for _ in range(60):
        lengths = np.exp(draw.normal(5, draw.uniform(0, 2), 50)).astype(np.int64) + 1
        limit = int(draw.integers(1, 3000))
        bins = length_histogram(lengths, limit)
        for each in bins:
            assert each.rows == ((lengths >= each.shortest) & (lengths <= each.longest)).sum()
            assert not each.shortest <= limit < each.longest or limit >= lengths.max() or limit < lengths.min()
        assert sum(each.rows for each in bins) == 50
        assert all(after.shortest == before.longest + 1 for before, after in pairwise(bins))
        assert len(bins) <= 18


def test_lengths_are_compared_as_the_rows_would_be_prepared(made: Callable[..., PreparedData]) -> None:
    whole = made()
    choices = compare_max_lengths(whole.measured, 100, DataOptions(overlength="truncate", seed=7), batch_size=4)
    assert 6 <= len(choices) <= 9
    assert 100 in {each.max_length for each in choices}
    for each in choices:
        check_choice(each, made)


def check_choice(found: MaxLengthEffect, made: Callable[..., PreparedData]) -> None:
    cut, dropped = (
        made(max_length=found.max_length, overlength=how) if how == "truncate" or found.max_length > 30 else None
        for how in ("truncate", "drop")
    )
    assert cut is not None
    sizes = [len(example.input_ids) for example in cut.training]
    assert found.rows_over == sum(length > found.max_length for length in cut.measured.lengths)
    assert found.lost_if_truncated == cut.report.tokens_lost
    if dropped is not None:
        assert found.lost_if_dropped == dropped.report.tokens_lost
    order = [sizes[row] for row in ResumableSampler(len(sizes), seed=7).epoch_order(0)]
    batches = [order[start : start + 4] for start in range(0, len(order), 4)]
    positions = sum(max(batch) * len(batch) for batch in batches)
    assert found.padding == pytest.approx(1 - sum(sizes) / positions, abs=1e-4)
    packs = pack_rows(sizes, found.max_length, seed=7)
    assert found.packs == len(packs)
    assert found.pack_fill == pytest.approx(packs.fill_rate(found.max_length), abs=1e-4)


@pytest.mark.parametrize("overlength", ["drop", "split"])
def test_packs_of_other_lengths(overlength: str, made: Callable[..., PreparedData]) -> None:
    whole = made()
    for each in compare_max_lengths(whole.measured, 64, DataOptions(overlength=overlength, seed=1), batch_size=2):
        if overlength == "drop" and each.rows_over == len(whole.training):
            assert each.packs == 0
            continue
        data = made(
            max_length=each.max_length, overlength=overlength, train_on="all", packing=True, seed=1, split_at="token"
        )
        assert each.packs == data.report.packs, each


def test_batches_of_one_have_no_padding() -> None:
    assert padding_share(np.array([5, 9, 2]), 1, seed=1) == 0.0
    assert padding_share(np.array([5, 9, 2]), 3, seed=1) == pytest.approx(1 - 16 / 27, abs=1e-4)
