"""A row for every turn, and rows that begin alike laid out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from preparing import prepare

from streamtune.data import ChatOptions, Example, collate_prefixes
from streamtune.data.batches.collate import PrefixTree, pack_turns
from streamtune.data.reading.sources import Source
from streamtune.errors import DataError

Write = Callable[..., str]
Make = Callable[..., Any]
PER_TURN = ChatOptions(reasoning="per_turn")


def conversation(turns: int, name: str = "x") -> dict[str, Any]:
    """Questions and answers, each with reasoning of its own."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You count {name}."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"And after {turn}?"})
        answer = {"role": "assistant", "content": f"It is {turn + 1}.", "reasoning_content": f"{turn} + 1 = {turn + 1}"}
        messages.append(answer)
    return {"messages": messages}


def examples(*rows: tuple[str, str]) -> list[Example]:
    """Rows of letters; those that are capital in the second text are trained."""
    found = []
    for text, trained in rows:
        ids = np.array([ord(letter) for letter in text], np.int32)
        labels = np.where([letter.isupper() for letter in trained], ids, -100).astype(np.int32)
        found.append(Example(ids, labels, "one"))
    return found


def unfolded(batch: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens and targets of every row from the root to a part that nothing continues."""
    starts = np.cumsum([0, *(tokens for _, tokens in batch["nodes"])])
    parents = [parent for parent, _ in batch["nodes"]]
    rows = []
    for number in range(len(parents)):
        if number in parents:
            continue
        path, at = [], number
        while at >= 0:
            path.append(at)
            at = parents[at]
        places = np.concatenate([np.arange(starts[each], starts[each + 1]) for each in reversed(path)])
        rows.append(tuple(batch[key][0, places].tolist() for key in ("input_ids", "shift_labels")))
    return rows


def test_common_beginnings_are_there_once() -> None:
    rows = examples(("abcdef", "abcDEF"), ("abcxyz", "abcxYZ"), ("abcxuv", "abcxUV"), ("qr", "qR"))
    batch = collate_prefixes(rows)
    assert batch["input_ids"].shape == (1, 14)  # abc def x yz, a second x for its own target, uv, qr
    found = unfolded(batch)
    assert sorted(ids for ids, _ in found) == sorted(list(row.input_ids) for row in rows)
    trained = int((batch["shift_labels"] != -100).sum())
    assert trained == sum(int((np.asarray(row.labels)[1:] != -100).sum()) for row in rows)


def test_a_turn_goes_on_from_the_answer_that_another_row_trains() -> None:
    batch = collate_prefixes(examples(("abcd", "abCD"), ("abcdefgh", "abcdefGH")))
    assert batch["nodes"] == [(-1, 8)]
    assert (batch["shift_labels"][0] != -100).tolist() == [False, True, True, False, False, True, True, False]


def test_a_row_that_is_there_twice_is_trained_twice() -> None:
    batch = collate_prefixes(examples(("abcd", "abCD"), ("abcd", "abCD")))
    assert int((batch["shift_labels"] != -100).sum()) == 4
    assert batch["input_ids"].shape[1] == 1 + 3 + 3


def test_random_rows_keep_their_tokens_and_targets() -> None:
    draw = np.random.RandomState(0)
    for _ in range(200):
        rows = []
        for _ in range(draw.randint(1, 7)):
            ids = draw.randint(0, 2, draw.randint(2, 9)).astype(np.int32)
            labels = np.where(draw.rand(len(ids)) < 0.3, ids, -100).astype(np.int32)
            rows.append(Example(ids, labels, "one"))
        batch, tree = collate_prefixes(rows), PrefixTree()
        before = 0
        for row in rows:
            added = tree.count_new_tokens(row)
            tree.add(row)
            assert tree.tokens == before + added
            before = tree.tokens
        assert batch["input_ids"].shape[1] == tree.tokens <= sum(row.num_tokens for row in rows)
        want = sorted(target for row in rows for target in np.asarray(row.labels)[1:].tolist() if target != -100)
        assert sorted(batch["shift_labels"][batch["shift_labels"] != -100].tolist()) == want
        paths = [tuple(ids) for ids, _ in unfolded(batch)]
        for row in rows:
            ids = tuple(row.input_ids)
            assert any(path[: len(ids)] == ids for path in paths)
        for parent, tokens in batch["nodes"]:
            assert tokens > 0
            assert parent < len(batch["nodes"])


@pytest.mark.parametrize("template", ["qwen3", "deepseek_r1", "gpt_oss", "chatml"])
def test_every_turn_is_what_inference_sees(template: str, make_tokenizer: Make, write: Write) -> None:
    tokenizer = make_tokenizer(template)
    rows = [conversation(4), conversation(2, "y"), {"messages": conversation(1)["messages"]}]
    source = Source(path=write("rows.jsonl", rows))
    notes: list[str] = []
    prepared = prepare([source], tokenizer, max_length=4096, chat=PER_TURN, notify=notes.append)
    assert len(prepared.training) == 7
    turns = [(row, turn) for row in rows for turn in range(2, len(row["messages"]), 2)]
    for example, (row, turn) in zip(prepared.training, turns, strict=True):
        before = tokenizer.apply_chat_template(
            row["messages"][:turn], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids, trained = np.asarray(example.input_ids), np.asarray(example.labels) != -100
        first = int(trained.argmax())
        assert ids[: len(before)].tolist() == before or template == "deepseek_r1"
        assert not trained[: min(len(before), first)].any()
        assert trained[first:-1].all()
        text = tokenizer.decode(ids[trained])
        assert row["messages"][turn]["reasoning_content"] in text
        assert row["messages"][turn]["content"] in text
    assert prepared.packs is not None
    assert len(prepared.packs) == 3
    assert prepared.packs.sizes is not None
    assert int(prepared.packs.sizes.sum()) < int(prepared.training.lengths().sum())
    assert any("reasoning: per_turn: 7 turns in 3 sequences" in note for note in notes)


def test_turns_of_a_conversation_are_held_out_together(make_tokenizer: Make, write: Write) -> None:
    source = Source(path=write("rows.jsonl", [conversation(3, f"n{number}") for number in range(12)]))
    prepared = prepare([source], make_tokenizer("qwen3"), max_length=4096, val_size=0.25, chat=PER_TURN)
    origins = [{example.origin for example in part} for part in (prepared.training, prepared.validation)]
    assert not origins[0] & origins[1]
    assert len(prepared.validation) == 3 * len(origins[1]) > 0
    assert prepared.validation_packs is not None
    assert len(prepared.validation_packs) == len(origins[1])


def test_turns_that_do_not_fit_together_are_several_sequences(make_tokenizer: Make, write: Write) -> None:
    source = Source(path=write("rows.jsonl", [conversation(6)]))
    tokenizer = make_tokenizer("qwen3")
    whole = prepare([source], tokenizer, max_length=4096, chat=PER_TURN)
    longest = int(whole.training.lengths().max())
    notes: list[str] = []
    prepared = prepare([source], tokenizer, max_length=longest, chat=PER_TURN, notify=notes.append)
    assert prepared.packs is not None
    assert prepared.packs.sizes is not None
    assert (further := len(prepared.packs) - 1) > 0
    assert notes[-1].endswith(f"; {further} sequences continue a conversation that exceeds max_length {longest}")
    assert int(prepared.packs.sizes.max()) <= longest
    with pytest.raises(DataError, match="more than max_length"):
        prepare([source], tokenizer, max_length=longest - 1, chat=PER_TURN)


def test_parts_are_packed_by_themselves() -> None:
    rows = examples(("abcd", "abCD"), ("abxy", "abXY"), ("abuv", "abUV"))
    packs, firsts = pack_turns(rows, [0, 2, 3], 100)
    assert [packs[number] for number in range(len(packs))] == [[0, 1], [2]]
    assert firsts == [0, 1, 2]
    assert packs.sizes is not None
    assert packs.sizes.tolist() == [7, 4]  # ab's last token has two targets


def test_attention_of_parts() -> None:
    tree = PrefixTree()
    for row in examples(("abcd", "abCD"), ("abcdefgh", "abcdefGH")):
        tree.add(row)
    assert tree.attention_work == 64
    assert torch.equal(collate_prefixes(examples(("ab", "aB")))["shift_labels"], torch.tensor([[98, -100]]))
