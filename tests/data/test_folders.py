"""Folders of data files: the split that is asked for, and nothing that is no data."""

from __future__ import annotations

import bz2
import gzip
import http.server
import json
import lzma
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pytest

from streamtune.data.bad_rows import BadRows
from streamtune.data.reading.folders import choose_files
from streamtune.data.reading.sources import Source, read_rows
from streamtune.errors import DataError
from streamtune.recipe.loader import load_recipe

Write = Callable[..., str]


def texts(path: str | Path, **options: Any) -> list[str]:
    return [row.columns["text"] for row in read_rows(Source(str(path), **options))]


def chosen(*names: str, split: str = "train", config: str | None = None, readme: str = "") -> list[str]:
    found = choose_files(names, lambda name: readme, split=split, config=config, shown="data", where="recipe.yaml:3")
    return found.names


@pytest.mark.parametrize(
    ("train", "others"),
    [
        (["train.jsonl"], ["test.jsonl", "validation.jsonl"]),
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], ["test-00000-of-00001.parquet"]),
        (["data/train-00000-of-00001.parquet"], ["data/test-00000-of-00001.parquet", "extra/train.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl"], ["test/a.jsonl", "dev/a.jsonl"]),
        (["en/train/a.csv"], ["en/eval/a.csv"]),
        (["my_train_2.csv"], ["my_dev_2.csv", "constraint.csv", "latest.csv"]),
        (["training.json"], ["evaluation.json"]),
        (["a.jsonl", "contest.jsonl", "trainer.jsonl"], []),
    ],
)
def test_split_by_name(train: list[str], others: list[str]) -> None:
    assert chosen(*train, *others, "README.md", "LICENSE", "dataset_infos.json") == sorted(train)


def test_our_choice_is_that_of_the_library(tmp_path: Path) -> None:
    """The same names, given to ``datasets``: every split and every file."""
    names = [
        *("train.jsonl", "test-1.jsonl", "dev.csv", "my-valid-set.json", "x_eval.parquet", "other.jsonl"),
        *("sub/train.txt", "a.test.jsonl"),
    ]
    for some in (names, [name for name in names if "/" not in name], ["train/a.jsonl", "test/b.jsonl", "c.jsonl"]):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in some:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("x")
        theirs = datasets.data_files.get_data_patterns(str(root))
        for split, patterns in theirs.items():
            files = datasets.data_files.DataFilesList.from_patterns(patterns, base_path=str(root))
            expected = sorted({str(Path(file).relative_to(root)) for file in files})
            assert chosen(*some, split=str(split)) == expected, split


def test_a_split_that_is_not_there_lists_the_others() -> None:
    with pytest.raises(DataError, match=r"has no split 'validaton', found train, validation, test") as caught:
        chosen("train.jsonl", "test.jsonl", "valid.jsonl", split="validaton")
    assert caught.value.where == "recipe.yaml:3"
    assert caught.value.fix == "did you mean 'validation'?"


def test_documents_are_rows_only_where_there_is_nothing_else(write: Write, tmp_path: Path) -> None:
    for name in ("README.md", "LICENSE.txt", "notes.md", ".git/config.json", ".hidden.jsonl", "__MACOSX/a.jsonl"):
        write(f"data/{name}", "not a row")
    write("data/dataset_infos.json", "{}")
    write("data/a.txt", "first")
    write("data/b.txt", "second")
    assert texts(tmp_path / "data") == ["first", "second"]
    write("notes/one.md", "# One")
    write("notes/README.md", "about the notes")
    assert texts(tmp_path / "notes") == ["# One"]


def test_the_files_are_listed(write: Write, tmp_path: Path) -> None:
    notes: list[str] = []
    write("data/train.jsonl", [{"text": "a"}])
    write("data/test.jsonl", [{"text": "b"}])
    folder = str(tmp_path / "data")
    assert len(list(read_rows(Source(folder), BadRows(notify=notes.append)))) == 1
    assert notes == [f"{folder}: files of split 'train': train.jsonl", f"{folder}: files not read: test.jsonl"]
    assert texts(folder, split="test") == ["b"]


README = """---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/*.jsonl"}
  - {split: test, path: [held/en.jsonl]}
- config_name: de
  data_dir: de
  data_files: "**/*.jsonl"
---
# About
"""


def test_the_header_of_a_readme_says_the_files() -> None:
    names = ("README.md", "en/a.jsonl", "en/deep/b.jsonl", "held/en.jsonl", "de/a.jsonl", "de/x/b.jsonl")
    assert chosen(*names, config="en", readme=README) == ["en/a.jsonl"]
    assert chosen(*names, config="en", split="test", readme=README) == ["held/en.jsonl"]
    assert chosen(*names, config="de", readme=README) == ["de/a.jsonl", "de/x/b.jsonl"]
    with pytest.raises(DataError, match="several configurations: en, de"):
        chosen(*names, readme=README)
    with pytest.raises(DataError, match="no configuration 'fr'"):
        chosen(*names, config="fr", readme=README)
    with pytest.raises(DataError, match="the folder 'data' has no configurations, found name: fr"):
        chosen("train.jsonl", config="fr")


def test_save_to_disk(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": f"row {n}"} for n in range(5)])
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    assert texts(tmp_path / "one") == [f"row {n}" for n in range(5)]
    rows.select([4, 2]).save_to_disk(tmp_path / "chosen")
    assert texts(tmp_path / "chosen") == ["row 4", "row 2"]
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "both")
    assert texts(tmp_path / "both") == [f"row {n}" for n in range(5)]
    assert texts(tmp_path / "both", split="test") == ["row 0"]
    with pytest.raises(DataError, match=r"no split 'dev', found train, test"):
        texts(tmp_path / "both", split="dev")
    arrow = next((tmp_path / "one").glob("*.arrow"))
    assert texts(arrow)[0] == "row 0"
    arrow.unlink()
    with pytest.raises(DataError, match=r"although state.json lists it"):
        texts(tmp_path / "one")


def test_arrow_files_and_streams(tmp_path: Path) -> None:
    table = pa.table({"text": [f"row {n}" for n in range(200)]})
    for name, opened in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink, opened(sink, table.schema) as writer:
            writer.write_table(table)
        rows = list(read_rows(Source(str(tmp_path / f"{name}.arrow"))))
        assert rows[150].origin.endswith(":row 151")
        assert rows[150].columns == {"text": "row 150"}


LINES = b'{"text": "one"}\n{"text": "two"}\n'
PACKED = {
    ".gz": gzip.compress,
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize(("name", "content"), [("a.jsonl", LINES), ("a.csv", b"text\none\ntwo\n")])
def test_compressed_text(suffix: str, name: str, content: bytes, write: Write) -> None:
    packed = PACKED[suffix](content)
    assert texts(write(name + suffix, packed)) == ["one", "two"]
    with pytest.raises(DataError, match="file is damaged"):
        texts(write(f"cut-{name}{suffix}", packed[:-6]))
    with pytest.raises(DataError, match=r"is compressed \(.*\), but its extension names no compression"):
        texts(write(name, packed))


def test_links_between_folders(write: Write, tmp_path: Path) -> None:
    write("elsewhere/a.jsonl", [{"text": "linked"}])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data")
    assert texts(tmp_path / "data") == ["linked"]


@pytest.fixture
def memory() -> Any:
    system = fsspec.filesystem("memory")
    system.pipe("/data/train-0.jsonl", LINES)
    system.pipe("/data/test-0.jsonl", b'{"text": "three"}\n')
    system.pipe("/data/README.md", b"# About")
    system.pipe("/packed/a.jsonl.gz", gzip.compress(LINES))
    yield system
    system.store.clear()


def test_addresses(memory: Any, write: Write) -> None:
    assert texts("memory://data/train-0.jsonl") == texts("memory://data") == ["one", "two"]
    assert texts("memory://data", split="test") == texts("memory://data/test-*.jsonl") == ["three"]
    assert texts("memory://packed/a.jsonl.gz") == ["one", "two"]
    assert texts(f"file://{write('local.csv', 'text' + chr(10) + 'here')}") == ["here"]
    assert next(read_rows(Source("memory://data"))).origin == "memory://data/train-0.jsonl:1"
    with pytest.raises(DataError, match=r"'memory://data/none\.jsonl'"):
        texts("memory://data/none.jsonl")
    with pytest.raises(DataError, match=r"no split 'dev', found train, test"):
        texts("memory://data", split="dev")
    memory.pipe("/data/train-0.jsonl", b'{"text"\n')
    with pytest.raises(DataError, match="malformed JSON") as caught:
        texts("memory://data")
    assert caught.value.where == "memory://data/train-0.jsonl:1"


def test_parquet_behind_an_address(memory: Any) -> None:
    with memory.open("/data/rows.parquet", "wb") as file:
        pa.parquet.write_table(pa.table({"text": ["one", "two"]}), file)
    assert texts("memory://data/rows.parquet") == ["one", "two"]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(DataError, match="reading 's3://' needs a package") as caught:
        texts("s3://bucket/rows.jsonl", where="recipe.yaml:3")
    assert caught.value.fix == "pip install s3fs"
    with pytest.raises(DataError, match="cannot read 'what://x'") as caught:
        texts("what://x", where="recipe.yaml:3")
    assert caught.value.where == "recipe.yaml:3"


def test_addresses_elsewhere_while_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamtune.data.reading.data_paths.is_offline", lambda: True)
    with pytest.raises(DataError, match="--offline forbids network access"):
        texts("s3://bucket/rows.jsonl")


def test_json_about_a_saved_dataset_that_is_malformed(write: Write, tmp_path: Path) -> None:
    write("saved/state.json", "{")
    write("saved/data.arrow", b"")
    with pytest.raises(DataError, match="malformed JSON") as caught:
        texts(tmp_path / "saved")
    assert caught.value.where == f"{tmp_path / 'saved'}/state.json"
    write("saved/state.json", json.dumps([1]))
    with pytest.raises(DataError, match="expected a JSON object"):
        texts(tmp_path / "saved")


class _Handler(http.server.BaseHTTPRequestHandler):
    """Sends rows, with or without their length."""

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(LINES)

    def answer(self, body: bytes) -> None:
        if "none" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        if "streamed" not in self.path:
            self.send_header("Content-Length", str(len(LINES)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_addresses_of_the_web() -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with it, and datasets brings none")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            assert texts(f"{address}/rows.jsonl") == ["one", "two"]
            assert texts(f"{address}/streamed.jsonl?download=true") == ["one", "two"]
            with pytest.raises(DataError, match="does not exist"):
                texts(f"{address}/none.jsonl")
        finally:
            server.shutdown()
    with pytest.raises(DataError, match=r"cannot read|does not exist"):
        texts(f"{address}/rows.jsonl")


def test_a_pattern_and_a_broken_link_beside_the_recipe(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("here/data/a.jsonl", LINES)
    (tmp_path / "here/gone.jsonl").symlink_to("nowhere")
    recipe = tmp_path / "here/r.yaml"
    recipe.write_text("model_name_or_path: x\ndatasets: [data/*.jsonl, gone.jsonl]\n")
    monkeypatch.chdir(tmp_path)
    found = [spec.path for spec in load_recipe(recipe).recipe.datasets]
    assert found == [str(tmp_path / "here/data/*.jsonl"), str(tmp_path / "here/gone.jsonl")]
    assert texts(found[0]) == ["one", "two"]


def test_shards_that_are_not_there_are_named(write: Write, tmp_path: Path) -> None:
    """A download that was broken off would train on a part of the rows without a word."""
    (tmp_path / "rows").mkdir()
    for number in (0, 2):
        write(f"rows/train-{number:05d}-of-00004.jsonl", [{"text": "one"}])
    told: list[str] = []
    assert len(list(read_rows(Source(str(tmp_path / "rows")), BadRows("error", 0, told.append)))) == 2
    assert f"{tmp_path / 'rows'}: files missing, a download may be incomplete: train-00001-of-00004.jsonl, " in told[1]
    for number in (1, 3):
        write(f"rows/train-{number:05d}-of-00004.jsonl", [{"text": "one"}])
    told.clear()
    assert len(list(read_rows(Source(str(tmp_path / "rows")), BadRows("error", 0, told.append)))) == 4
    assert not any("missing" in text for text in told)
