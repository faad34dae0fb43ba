"""Everything that is kept on disk between runs, damaged in thirteen ways and made by two processes at once.

What is kept is a shortcut: with a damaged file a start gives what it gives without one, with one message, and the next
start has a whole file again. A teacher's file is no shortcut: damaged, it is refused.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from streamtune.base.result_cache import MAGIC, CacheFile, cached_result
from streamtune.data import Example, RowCache, Source, Tree
from streamtune.data.reading import contents
from streamtune.errors import ArgumentError, StorageError
from streamtune.models import checkpoint_files, train_tokenizer
from streamtune.plan import calibrate
from streamtune.plan.rates import Rates
from streamtune.plan.simulate.simulate import simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule
from streamtune.tasks.reference import compute_logps, read_logps
from streamtune.tasks.teacher_file import TeacherFile, TeacherFileWriter, num_targets, tokenizer_hash
from tests.data.preparing import prepare
from tests.faults.kit import report

TEXTS = [f"the {n} quick brown foxes jump over {n * n} lazy dogs" for n in range(30)]
RATES = Rates("measured on a device", 1e12, 2e12, 3e12, 4e11, 5e10)
CPU = torch.device("cpu")


# --- what is kept: each gives its result and its messages ------------------------------------------------------------


def use_rows(root: Path, notify: Callable[[str], None], name: str = "rows.jsonl") -> Any:
    source = Source(str(root / name))
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    prepared = prepare([source], tokenizer, max_length=200, cache=RowCache(root / "rows"), notify=notify)
    rows = [[np.asarray(row.input_ids).tolist(), np.asarray(row.labels).tolist()] for row in prepared.training]
    return [prepared.fingerprint, rows, prepared.report.to_json()]


def use_tokenizer(root: Path, notify: Callable[[str], None], size: int = 280) -> Any:
    def make() -> str:
        return str(train_tokenizer(TEXTS, vocab_size=size).backend_tokenizer.to_str())

    return RowCache(root / "rows").cached_text([Source(str(root / "rows.jsonl"))], {"size": size}, make, notify)[0]


def use_file_hashes(root: Path, notify: Callable[[str], None], name: str = "rows.jsonl") -> Any:
    hashes = contents.FileHashes(root / name.replace("rows", "hashes"), notify)
    found = hashes.hash_file(root / name)
    hashes.save()
    return found


def use_weights(root: Path, notify: Callable[[str], None], name: str = "weights") -> Any:
    return checkpoint_files._file_hash(root / name)


def use_simulation(root: Path, notify: Callable[[str], None], length: int = 64) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    step = Workload(lambda: model, length=length, device_type="cpu", keep=True)
    return asdict(simulate(step, Schedule(chunk_size=16, head_chunk_size=16)))


def use_plan(root: Path, notify: Callable[[str], None], key: str = "one") -> Any:
    return cached_result("plans", key, lambda: {"document": {"peak_bytes": 1, "of": key}}, notify)


def use_rates(root: Path, notify: Callable[[str], None], dtype: torch.dtype = torch.float32) -> Any:
    return asdict(calibrate.load_rates(CPU, dtype, notify=notify))


class TokenLogps:
    """Stands for a model, whose log-probs of a tree are its token ids."""

    def logprobs(self, batch: Any) -> torch.Tensor:
        return -torch.tensor([float(token) for completion in batch.completions for token in completion])


@dataclass
class OneTree:
    completions: list[list[int]]

    def to(self, device: torch.device) -> OneTree:
        return self


def use_logps(root: Path, notify: Callable[[str], None], key: str = "a-b-c") -> Any:
    kept = read_logps(key, notify)
    if kept is None:
        trees = [Tree([1], [[2, 3], [4, len(key)]]), Tree([1], [[5]])]
        batches: Any = [OneTree(tree.completions) for tree in trees]
        reference: Any = TokenLogps()
        kept = compute_logps(key, reference, batches, CPU, autocast_dtype=None, notify=lambda text: None)
    return [kept.logps.tolist(), kept.offsets.tolist()]


@dataclass(frozen=True)
class Kind:
    use: Callable[[Path, Callable[[str], None]], Any]
    files: str
    """Pattern of what it keeps, below the root."""
    other: Callable[[Path, Callable[[str], None]], Any]
    """Keeps another entry."""


KINDS: dict[str, Kind] = {
    "entry.json": Kind(use_rows, "rows/*/entry.json", partial(use_rows, name="rows2.jsonl")),
    "fit.json": Kind(use_rows, "rows/*/fit.json", partial(use_rows, name="rows2.jsonl")),
    "fit.npz": Kind(use_rows, "rows/*/fit.npz", partial(use_rows, name="rows2.jsonl")),
    "rows.arrow": Kind(use_rows, "rows/*/rows.arrow", partial(use_rows, name="rows2.jsonl")),
    "a tokenizer": Kind(use_tokenizer, "rows/*.txt", partial(use_tokenizer, size=290)),
    "hashes of rows": Kind(use_file_hashes, "hashes*.jsonl", partial(use_file_hashes, name="rows2.jsonl")),
    "hashes of weights": Kind(use_weights, "streamtune/files/*", partial(use_weights, name="weights2")),
    "simulations": Kind(use_simulation, "streamtune/simulations/*.json", partial(use_simulation, length=80)),
    "plans": Kind(use_plan, "streamtune/plans/*.json", partial(use_plan, key="two")),
    "rates": Kind(use_rates, "streamtune/rates.json", partial(use_rates, dtype=torch.bfloat16)),
    "log-probs": Kind(use_logps, "streamtune/reference/*.logps", partial(use_logps, key="a-b-other")),
}


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) * 2 // 3] ^= 1
    return bytes(changed)


def other_version(content: bytes) -> bytes:
    magic = MAGIC.encode()
    return magic[:-1] + b"9" + content[len(magic) :] if content.startswith(magic) else b"9" + content


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "one bit": flipped,
    "zeroed": lambda content: bytes(len(content)),
    "garbage": lambda content: np.random.default_rng(1).bytes(len(content)),
    "another JSON": lambda content: b'{"sizes": {}, "notes": [], "records": 0, "time": 0, "peak_bytes": 1}',
    "a JSON list": lambda content: b"[1, 2]",
    "another version": other_version,
    "longer": lambda content: content + content,
}
PLACES = ("a folder", "a pipe", "a dangling link", "another entry's")
"""Damages that put something else in the place of the file."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare_root(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(contents, "RACY", -1.0)  # files that were written just now count as settled
    monkeypatch.setattr(checkpoint_files, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(checkpoint_files, "CACHED_HASH_BYTES", 1000)
    monkeypatch.setattr(calibrate, "measure_rates", lambda device, dtype: RATES)
    return tmp_path


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    """Damages that were tried, and those after which all was as it should be."""
    found: Counter[str] = Counter()
    yield found
    report("kept_files", **found)


def prepare_root(root: Path) -> None:
    for name in ("rows.jsonl", "rows2.jsonl"):
        (root / name).write_text("".join(json.dumps({"text": text + name}) + "\n" for text in TEXTS))
    for name in ("weights", "weights2"):
        (root / name).write_bytes(name.encode() * 500)


def damage(file: Path, how: str, other: bytes) -> None:
    if how in DAMAGES:
        file.write_bytes(DAMAGES[how](file.read_bytes()))
        return
    file.unlink()
    if how == "a folder":
        (file / "in it").mkdir(parents=True)
    elif how == "a pipe":
        os.mkfifo(file)
    elif how == "a dangling link":
        file.symlink_to("nowhere")
    else:
        file.write_bytes(other)


@pytest.mark.parametrize("how", [*DAMAGES, *PLACES])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.quick(
    "entry.json-one bit", "fit.json-another JSON", "fit.npz-cut", "rows.arrow-one bit", "a tokenizer-empty",
    "hashes of rows-a JSON list", "hashes of weights-zeroed", "simulations-another entry's", "simulations-a folder",
    "plans-garbage", "rates-another version", "log-probs-one bit", "log-probs-a pipe", "rows.arrow-another entry's",
)  # fmt: skip
def test_a_damaged_file_is_made_again_with_one_message(
    root: Path, name: str, how: str, caplog: pytest.LogCaptureFixture, counts: Counter[str]
) -> None:
    counts["trials"] += 1
    kind, notes = KINDS[name], list[str]()
    want = kind.use(root, notes.append)
    (file,) = root.glob(kind.files)
    whole = file.read_bytes()
    kind.other(root, notes.append)
    others = [path for path in root.glob(kind.files) if path != file]
    damage(file, how, others[0].read_bytes() if others else b"another's")

    def told() -> list[str]:
        found = [*notes, *(record.getMessage() for record in caplog.records)]
        notes.clear()
        caplog.clear()
        return [note for note in found if "damaged" in note.replace(str(root), "")]

    told()
    assert kind.use(root, notes.append) == want
    absent = how == "a dangling link" and not name.startswith(("entry", "fit", "rows"))
    expected = 0 if absent or (name, how) == ("hashes of rows", "another entry's") else 1  # which has no hash of it
    said = told()
    assert len(said) == expected, said
    assert not said or str(file.parent) in said[0]
    assert kind.use(root, notes.append) == want
    assert told() == []
    if name not in ("entry.json", "hashes of rows", "rates"):  # they hold a time, or more than one entry
        assert file.read_bytes() == whole
    assert not [path for path in root.rglob("*") if path.name.endswith(".tmp") or ".unfinished" in path.name]
    counts["made_again"] += 1


# --- a teacher's file ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Example], Any]:
    """A file of four rows and eight tokens of each target."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=280)
    rows = [Example(ids, ids, f"rows:{n}") for n in range(4) for ids in [np.arange(n, n + 9, dtype=np.int32)]]
    path = tmp_path_factory.mktemp("taught") / "whole.safetensors"
    facts = {
        "k": "8",
        "vocabulary": "280",
        "temperature": "1.0",
        "teacher": "t",
        "tokenizer": tokenizer_hash(tokenizer),
    }
    generator = torch.Generator().manual_seed(1)
    writer = TeacherFileWriter(path.with_name("partial"), [num_targets(row) for row in rows], facts)
    with writer.renamed_on_success(path):
        for row in rows:
            size = num_targets(row)
            logprobs = torch.rand(size, 9, generator=generator).log_softmax(-1)
            writer.add_row(row, torch.randint(0, 280, (size, 8), generator=generator), logprobs)
    return path, rows, tokenizer


@pytest.mark.parametrize("how", [*DAMAGES, *PLACES])
def test_a_damaged_file_of_a_teacher_is_refused(
    taught: tuple[Path, list[Example], Any], tmp_path: Path, how: str
) -> None:
    path, rows, tokenizer = taught
    TeacherFile.open(path, 1.0).check_rows(rows, tokenizer)
    file = tmp_path / "taught.safetensors"
    shutil.copy(path, file)
    content = path.read_bytes()
    damage(file, how, content[:-16] + content[-32:-16])
    with pytest.raises(ArgumentError) as caught:
        TeacherFile.open(file, 1.0).check_rows(rows, tokenizer)
    assert str(file) in caught.value.what
    assert "streamtune teach" in caught.value.fix or "name a folder" in caught.value.fix


def test_every_bit_of_a_teachers_file_counts(taught: tuple[Path, list[Example], Any], tmp_path: Path) -> None:
    path, rows, tokenizer = taught
    file, content = tmp_path / "taught.safetensors", path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    random = np.random.default_rng(3)
    for place in (*random.integers(begin, len(content), 40), *random.integers(8, begin, 80)):
        changed = bytearray(content)
        changed[place] ^= 1 << int(place) % 8
        file.write_bytes(changed)
        with pytest.raises((ArgumentError, StorageError)):
            TeacherFile.open(file, 1.0).check_rows(rows, tokenizer)


# --- two processes ---------------------------------------------------------------------------------------------------


def _use_all(root: str, start: Any, out: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = root
    contents.RACY = checkpoint_files.SETTLED_SECONDS = -1.0
    checkpoint_files.CACHED_HASH_BYTES = 1000
    calibrate.measure_rates = lambda device, dtype: RATES
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        start.wait()
        for _ in range(3):
            found[name] = kind.use(Path(root), lambda note: None)
    out.put(found)


@pytest.mark.full
@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_at_once_get_the_same_and_leave_it_whole(root: Path, damaged: bool) -> None:
    want = {name: kind.use(root, lambda note: None) for name, kind in KINDS.items()}
    for kind in KINDS.values():
        for file in root.glob(kind.files):
            if damaged:
                file.write_bytes(flipped(file.read_bytes()))
    if not damaged:
        shutil.rmtree(root / "rows")
        shutil.rmtree(root / "streamtune")
    spawn = multiprocessing.get_context("spawn")
    start, out = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=_use_all, args=(str(root), start, out)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [out.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert found[0] == want
    assert found[1] == want
    notes: list[str] = []
    assert {name: kind.use(root, notes.append) for name, kind in KINDS.items()} == want
    assert not [note for note in notes if "damaged" in note.replace(str(root), "")]


def test_updates_at_once_lose_nothing_and_readers_see_whole_files(tmp_path: Path) -> None:
    kept, torn = CacheFile(tmp_path / "rates.json", "rates"), list[str]()

    def count(name: str) -> None:
        for _ in range(40):
            kept.update_json(lambda values: {**values, name: values.get(name, 0) + 1})

    def read() -> None:
        while any(writer.is_alive() for writer in writers):
            kept.read(torn.append)

    writers = [threading.Thread(target=count, args=(name,)) for name in "abc"]
    reader = threading.Thread(target=read)
    for thread in (*writers, reader):
        thread.start()
    for thread in (*writers, reader):
        thread.join()
    assert kept.read_json(torn.append) == {"a": 40, "b": 40, "c": 40}
    assert torn == []


def test_a_folder_that_cannot_be_written_or_is_a_file_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "streamtune").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure_rates", lambda device, dtype: replace(RATES))
    for use in (use_simulation, use_plan, use_rates, use_logps):
        assert use(tmp_path, lambda note: None) == use(tmp_path, lambda note: None)
