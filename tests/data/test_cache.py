"""Prepared rows are found again where everything they are made of is the same, and nowhere else."""

from __future__ import annotations

import copy
import datetime
import gzip
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preparing import prepare, prepare_preferences, prepare_prompts
from transformers import PreTrainedTokenizerFast

from streamtune.base.result_cache import CacheFile
from streamtune.data import ChatOptions, RowCache, Source
from streamtune.data.reading import contents
from streamtune.data.reading.contents import FileHashes
from streamtune.data.templates import fix_template_date
from streamtune.errors import DataError, StorageError
from streamtune.models.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [f"the {n} quick brown foxes jump over {n * n} lazy dogs" for n in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture
def cache(tmp_path: Path) -> RowCache:
    return RowCache(tmp_path / "cache")


def write(path: Path, rows: list[dict[str, Any]]) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(path), where="recipe.yaml:1")


def chats(count: int = 20) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}], "id": number}
        for number, text in enumerate(TEXTS[:count])
    ]


class Notes(list[str]):
    @property
    def hit(self) -> bool:
        return any("using cached rows" in note for note in self)

    def shared(self) -> list[str]:
        return [note for note in self if "cached for the next start" not in note and "using cached rows" not in note]


def same(one: Any, other: Any) -> bool:
    """Return True if two preparations give a run the same rows, counts and packs."""
    assert one.report == other.report
    assert one.fingerprint == other.fingerprint
    for name, value in vars(one.measured).items():
        assert np.array_equal(value, getattr(other.measured, name)), name
    for part in ("training", "validation"):
        left, right = getattr(one, part), getattr(other, part)
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            for name, value in vars(a).items():
                other_value = vars(b)[name]
                assert np.array_equal(value, other_value) if isinstance(value, np.ndarray) else value == other_value, (
                    name
                )
    return True


PREPARERS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[dict[str, Any]]]] = {
    "rows": (prepare, {"max_length": 100, "overlength": "split", "packing": True, "val_size": 3}, chats()),
    "trees": (
        prepare_preferences,
        {"max_length": 500, "val_size": 0.2, "overlength": "drop"},
        [{"prompt": text, "chosen": text[:9], "rejected": text[9:], "score": 1.5} for text in TEXTS],
    ),
    "prompts": (
        prepare_prompts,
        {"max_prompt_length": 500, "val_size": 2},
        [{"prompt": text, "answer": number, "parts": [text, None, True, 0.5]} for number, text in enumerate(TEXTS)],
    ),
}


@pytest.mark.parametrize("kind", PREPARERS)
def test_a_second_start_gives_the_same_and_renders_nothing(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, options, rows = PREPARERS[kind]
    source = write(tmp_path / "rows.jsonl", rows)
    plain = function([source], tokenizer, **options)
    first, second = Notes(), Notes()
    made = function([source], tokenizer, **options, cache=cache, notify=first.append)
    assert not first.hit
    assert same(plain, made)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was tokenised")

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", never)
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", never)
    found = function([source], tokenizer, **options, cache=cache, notify=second.append)
    assert second.hit
    assert same(plain, found)
    assert second.shared() == first.shared(), "what a user was told the first time is told again"


def test_a_checkpoints_tokenizer_finds_the_rows_of_its_run(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    """A tokenizer names the folder that it was loaded from: a resumed run has its checkpoint's, `eval` has `final`."""
    source = write(tmp_path / "rows.jsonl", chats())
    found, loaded = Notes(), tokenizer
    prepare([source], loaded, max_length=100, cache=cache)
    for folder in ("checkpoint", "final"):
        loaded.save_pretrained(tmp_path / folder)
        loaded = load_tokenizer(str(tmp_path / folder), trust_remote_code=False)
        prepare([source], loaded, max_length=100, cache=cache, notify=found.append)
        assert found.hit
        found.clear()


CHANGES: dict[str, dict[str, Any]] = {
    "content": {},
    "max_length": {"max_length": 90},
    "overlength": {"overlength": "truncate"},
    "train_on": {"train_on": "all"},
    "on_bad_row": {"on_bad_row": "skip"},
    "system": {"chat": ChatOptions(default_system="Be brief.")},
    "variables": {"chat": ChatOptions(variables={"enable_thinking": False})},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.quick("content", "variables")
def test_another_input_is_prepared_anew(
    change: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    file = tmp_path / "rows.jsonl"
    options: dict[str, Any] = {"max_length": 104, "overlength": "drop"}
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% if enable_thinking %}{% endif %}" + str(tokenizer.chat_template)
    source = write(file, chats())
    prepare([source], tokenizer, **options, cache=cache)
    if change == "content":
        file.write_text(file.read_text().replace("foxes", "boxes"))
    changed, notes = {**options, **CHANGES[change]}, Notes()
    prepared = prepare([source], tokenizer, **changed, cache=cache, notify=notes.append)
    assert not notes.hit
    assert same(prepared, prepare([source], tokenizer, **changed))


def test_variables_that_json_writes_alike_are_others(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    tokenizer, source = copy.deepcopy(tokenizer), write(tmp_path / "rows.jsonl", chats(4))
    tokenizer.chat_template = "{{ given }}" + str(tokenizer.chat_template)
    found = set()
    for given in ({1: 2}, {"1": 2}, [1], (1,), datetime.date(2026, 1, 31), {1: 2, "a": 3}):
        chat = ChatOptions(variables={"given": given})
        found.add(prepare([source], tokenizer, max_length=400, chat=chat, cache=cache).fingerprint)
    assert len(found) == 6


def test_held_out_rows_packs_and_seed_need_no_new_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    source = write(tmp_path / "rows.jsonl", chats())
    prepare([source], tokenizer, max_length=200, cache=cache)
    choices: list[dict[str, Any]] = [{"val_size": 4}, {"packing": True}, {"val_size": 4, "seed": 7, "packing": True}]
    for options in choices:
        notes = Notes()
        found = prepare([source], tokenizer, max_length=200, cache=cache, notify=notes.append, **options)
        assert notes.hit
        assert same(found, prepare([source], tokenizer, max_length=200, **options))


def test_the_template_and_its_date_belong_to_the_rows(tmp_path: Path, cache: RowCache) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    source = write(tmp_path / "rows.jsonl", chats(4))
    template = str(tokenizer.chat_template)
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}" + template
    notes = Notes()
    try:
        for date, hit in (("2026-01-31", False), ("2026-01-31", True), ("2026-02-01", False)):
            fix_template_date(date)
            notes.clear()
            prepare([source], tokenizer, max_length=400, cache=cache, notify=notes.append)
            assert notes.hit is hit
        tokenizer.chat_template = template.replace("<|im_start|>user", "<|im_start|>human")
        prepare([source], tokenizer, max_length=400, cache=cache, notify=notes.append)
    finally:
        fix_template_date(None)


def test_a_file_that_is_changed_and_keeps_its_time_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "RACY", -1.0)  # as if it was hashed long after it was written
    file, hashes = tmp_path / "rows.jsonl", FileHashes(tmp_path / "files.json")
    file.write_text("one")
    status = file.stat()
    first = hashes.hash_file(file)
    time.sleep(0.02)
    with file.open("r+") as opened:  # as rsync --inplace -t and cp -p do: the same inode, size and time
        opened.write("two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashes.hash_file(file) != first


def test_a_file_is_known_by_its_bytes_wherever_its_clock_stands(tmp_path: Path) -> None:
    file, hashes = tmp_path / "rows.jsonl", FileHashes(tmp_path / "files.json")
    file.write_text("one")
    old = time.time() - 100
    os.utime(file, (old, old))
    first = hashes.hash_file(file)
    hashes.save()
    assert FileHashes(tmp_path / "files.json").hash_file(file) == first
    file.write_text("two")  # the same size and time: another inode or a time of change of now shows it
    assert FileHashes(tmp_path / "files.json").hash_file(file) != first
    file.write_text("six")  # changed within a tick of the clock after it was hashed
    assert FileHashes(tmp_path / "files.json").hash_file(file) == FileHashes(tmp_path / "none.json").hash_file(file)
    (tmp_path / "files.json").write_text("{broken")
    assert FileHashes(tmp_path / "files.json").hash_file(file)


@pytest.mark.parametrize("damage", ["short", "gone", "no json", "other counts", "a byte", "a list"])
@pytest.mark.quick("short", "a byte")
def test_a_damaged_entry_is_made_anew(
    damage: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    source = write(tmp_path / "rows.jsonl", chats())
    whole = prepare([source], tokenizer, max_length=200)
    prepare([source], tokenizer, max_length=200, cache=cache)
    (entry,) = [path for path in cache.root.iterdir() if path.is_dir()]
    table = entry / "rows.arrow"
    if damage == "short":
        table.write_bytes(table.read_bytes()[:-100])
    elif damage == "gone":
        (entry / "fit.npz").unlink()
    elif damage == "a byte":
        counts = bytearray((entry / "fit.npz").read_bytes())
        counts[len(counts) // 2] ^= 255
        (entry / "fit.npz").write_bytes(counts)
    elif damage == "a list":
        size = (entry / "fit.json").stat().st_size
        (entry / "fit.json").write_text("[]".ljust(size))
    elif damage == "no json":
        (entry / "entry.json").write_text("{")
    else:
        kept = CacheFile(entry / "entry.json", f"rows/{entry.name}")
        kept.write(json.dumps({**kept.read_json(), "records": 3}).encode())
    notes = Notes()
    assert same(whole, prepare([source], tokenizer, max_length=200, cache=cache, notify=notes.append))
    assert not notes.hit
    assert sum("they are prepared again" in note for note in notes) == 1
    notes.clear()
    prepare([source], tokenizer, max_length=200, cache=cache, notify=notes.append)
    assert notes.hit
    assert not any("are prepared again" in note for note in notes)


def test_an_error_is_kept_by_nobody(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache) -> None:
    source = write(tmp_path / "rows.jsonl", chats())
    for _ in range(2):
        with pytest.raises(DataError, match="more than max_length"):
            prepare([source], tokenizer, max_length=20, cache=cache)
    assert not [path for path in cache.root.iterdir() if path.is_dir()]


def test_columns_that_are_no_json_are_not_kept(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    day = datetime.date(2026, 1, 31)
    pa.parquet.write_table(pa.table({"prompt": TEXTS[:3], "day": [day] * 3}), tmp_path / "rows.parquet")
    for _ in range(2):
        notes = Notes()
        source = Source(str(tmp_path / "rows.parquet"))
        prepared = prepare_prompts([source], tokenizer, max_prompt_length=99, cache=cache, notify=notes.append)
        assert not notes.hit
        assert prepared.training[0].columns["day"] == day


def test_a_folder_that_cannot_be_written_holds_nothing_up(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "file").write_text("no folder")
    source, notes = write(tmp_path / "rows.jsonl", chats()), Notes()
    found = prepare([source], tokenizer, max_length=200, cache=RowCache(tmp_path / "file"), notify=notes.append)
    assert any("are not cached" in note for note in notes)
    assert same(found, prepare([source], tokenizer, max_length=200))


def test_an_unfinished_folder_that_is_gone_holds_nothing_up(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    """A name that is listed and not there any more: a dangling link, as where two starts remove the same folder."""
    cache.root.mkdir(parents=True)
    old = cache.root / ".unfinished-old"
    old.mkdir()
    os.utime(old, (1, 1))
    (tmp_path / "mine").mkdir()
    os.utime(tmp_path / "mine", (1, 1))
    for name, target in (("z", "nowhere"), ("y", "../mine")):
        link = cache.root / f".unfinished-{name}"
        link.symlink_to(target)
    os.utime(cache.root / ".unfinished-y", (1, 1), follow_symlinks=False)
    source, notes = write(tmp_path / "rows.jsonl", chats()), Notes()
    prepare([source], tokenizer, max_length=200, cache=cache, notify=notes.append)
    assert any("cached for the next start" in note for note in notes)
    assert not old.exists()
    assert (tmp_path / "mine").is_dir()
    assert not (cache.root / ".unfinished-y").is_symlink(), "it is as old as the other"
    assert (cache.root / ".unfinished-z").is_symlink()
    cache.clear()
    assert list(cache.root.iterdir()) == []
    assert (tmp_path / "mine").is_dir()


def _prepare_in_process(file: str, root: str, vocabulary: str, start: Any, out: Any) -> None:
    from streamtune.models.tokenizer import read_trained_tokenizer

    start.wait()
    made = prepare([Source(file)], read_trained_tokenizer(vocabulary), max_length=200, cache=RowCache(Path(root)))
    out.put(made.fingerprint)


@pytest.mark.slow
def test_processes_that_prepare_the_same_rows_at_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    write(tmp_path / "rows.jsonl", chats(40))
    spawn = multiprocessing.get_context("spawn")
    start, out = spawn.Barrier(3), spawn.Queue()
    given = (str(tmp_path / "rows.jsonl"), str(cache.root), tokenizer.backend_tokenizer.to_str(), start, out)
    processes = [spawn.Process(target=_prepare_in_process, args=given) for _ in range(3)]
    for process in processes:
        process.start()
    found = {out.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    assert len([path for path in cache.root.iterdir() if path.is_dir()]) == 1, "no unfinished folder is left"


def test_clearing_frees_everything(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache) -> None:
    source = write(tmp_path / "rows.jsonl", chats())
    prepared = prepare([source], tokenizer, max_length=200, cache=cache)
    texts = [cache.cached_text([source], {}, lambda: "a vocabulary", print) for _ in range(2)]
    assert texts == [("a vocabulary", False), ("a vocabulary", True)]
    size = cache.size_bytes()
    assert size > 1000
    assert cache.clear() == (1, size)
    assert cache.size_bytes() == 0
    assert cache.cached_text([source], {}, lambda: "another", print) == ("another", False)
    assert len(prepared.training[0].input_ids) > 3, "rows in use stay readable"


def test_clearing_while_rows_are_prepared_loses_the_entry_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    source = write(tmp_path / "rows.jsonl", chats())
    unfinished: list[Path] = []

    def clear(note: str) -> None:
        if "detected row type" in note:
            unfinished.extend(cache.root.glob(".unfinished-*"))
            cache.clear()

    found = prepare([source], tokenizer, max_length=200, cache=cache, notify=clear)
    assert same(found, prepare([source], tokenizer, max_length=200))
    assert len(unfinished) == 1
    assert not list(cache.root.iterdir())


def test_compressed_files_and_sources_without_contents(tmp_path: Path, cache: RowCache) -> None:
    hashes = FileHashes(tmp_path / "files.json")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write('{"text": "one"}\n')
    known = contents.fingerprint_source(Source(str(tmp_path / "rows.jsonl.gz")), hashes)
    assert known is not None
    assert contents.fingerprint_source(Source(str(tmp_path / "missing.jsonl")), hashes) is None
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert contents.fingerprint_source(Source(str(tmp_path / "pipe.jsonl")), hashes) is None
    drawn = [Source(str(tmp_path / "rows.jsonl.gz"), shuffle=shuffle, max_rows=1, seed=seed)
             for shuffle, seed in ((False, 1), (False, 2), (True, 1), (True, 2))]  # fmt: skip
    facts = [contents.fingerprint_source(source, hashes) for source in drawn]
    assert facts[0] == facts[1], "a seed counts where rows are drawn"
    assert len({str(each) for each in facts}) == 3


def test_rows_of_a_file_that_is_edited_meanwhile_are_not_kept(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    """Hashed first and read later: the second file is edited while the first is read, and edited back."""
    sources = [write(tmp_path / name, chats(20)) for name in ("one.jsonl", "two.jsonl")]
    text = (tmp_path / "two.jsonl").read_text()
    whole = prepare(sources, tokenizer, max_length=200)
    notes = Notes()

    def edit(note: str) -> None:
        notes.append(note)
        if "one.jsonl: detected row type" in note:
            (tmp_path / "two.jsonl").write_text(text.replace("foxes", "boxes"))
        if "two.jsonl: detected row type" in note:
            (tmp_path / "two.jsonl").write_text(text)

    edited = prepare(sources, tokenizer, max_length=200, cache=cache, notify=edit)
    assert edited.fingerprint != whole.fingerprint, "the rows of the edited file were read"
    assert [note for note in notes if "two.jsonl changed while it was read" in note]
    notes.clear()
    assert same(whole, prepare(sources, tokenizer, max_length=200, cache=cache, notify=notes.append))
    assert not notes.hit

    def train(edits: bool) -> Callable[[], str]:
        def make() -> str:
            if edits:
                (tmp_path / "two.jsonl").write_text(text)
            return "of the edited rows" if edits else "of the rows"

        return make

    assert cache.cached_text(sources, {}, train(True), notes.append) == ("of the edited rows", False)
    assert cache.cached_text(sources, {}, train(False), notes.append) == ("of the rows", False), "a tokenizer likewise"
    assert cache.cached_text(sources, {}, train(False), notes.append) == ("of the rows", True)


@pytest.mark.parametrize("start", ["first", "second"])
def test_kept_rows_that_are_cut_or_changed_while_they_are_mapped(
    start: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    """A page behind the end of a file ends the process by SIGBUS: the error comes before it is read."""
    source = write(tmp_path / "rows.jsonl", chats(40))
    prepared = prepare([source], tokenizer, max_length=400, cache=cache)
    if start == "second":
        prepared = prepare([source], tokenizer, max_length=400, cache=cache)
    (table,) = cache.root.glob("*/rows.arrow")
    content = table.read_bytes()
    assert ".unfinished" not in str(table)
    before = list(prepared.training[5].input_ids)
    os.utime(table, (1, 1))
    assert list(prepared.training[5].input_ids) == before, "only touched"
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    with table.open("r+b") as file:
        file.write(changed)
    with pytest.raises(StorageError, match=r"rows\.arrow was changed during the run"):
        prepared.training[0]
    with table.open("r+b") as file:
        file.write(content)
    assert list(prepared.training[5].input_ids) == before, "as it was"
    os.truncate(table, 4096)
    for read in (
        lambda: prepared.training[30],
        prepared.training.lengths,
        lambda: prepared.training.column_cells("origin"),
    ):
        with pytest.raises(StorageError, match=rf"{table} was truncated from .* to 4.00 KiB during the run"):
            read()
    os.truncate(table, 0)
    table.unlink()
    with pytest.raises(StorageError, match="was truncated from"):
        prepared.training[30]
    again = prepare([source], tokenizer, max_length=400, cache=cache)
    assert list(again.training[5].input_ids) == before


def test_rows_that_are_deleted_or_replaced_are_read_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, cache: RowCache
) -> None:
    source = write(tmp_path / "rows.jsonl", chats(40))
    prepared = prepare([source], tokenizer, max_length=400, cache=cache)
    (table,) = cache.root.glob("*/rows.arrow")
    before = list(prepared.training[30].input_ids)
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "other").replace(table)
    assert list(prepared.training[30].input_ids) == before
    cache.clear()
    assert list(prepared.training[30].input_ids) == before
