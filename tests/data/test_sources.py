"""Where rows come from, and what is said when they are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from streamtune.data.bad_rows import BadRows
from streamtune.data.reading.data_paths import hub_rows
from streamtune.data.reading.sources import Source, read_rows
from streamtune.errors import DataError

Write = Callable[..., str]


def texts(**options: Any) -> list[str]:
    return [row.columns["text"] for row in read_rows(Source(**options))]


def test_file_folder_and_pattern(write: Write, tmp_path: Path) -> None:
    write("data/b.jsonl", [{"text": "b1"}, {"text": "b2"}])
    write("data/a.txt", "a")
    write("data/deeper/c.csv", "text\nc\n")
    write("data/notes.docx", "ignored")
    assert texts(path=str(tmp_path / "data/b.jsonl")) == ["b1", "b2"]
    assert texts(path=str(tmp_path / "data")) == ["a", "b1", "b2", "c"]
    assert texts(path=str(tmp_path / "data/*.jsonl")) == ["b1", "b2"]
    assert texts(path=str(tmp_path / "data/**/*.csv")) == ["c"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_pattern_matches_hidden_files_only_if_it_names_their_dot(write: Write, tmp_path: Path, scheme: str) -> None:
    write(".above/a.jsonl", [{"text": "a"}])
    write(".above/.b.jsonl", [{"text": "b"}])
    write(".above/.ipynb_checkpoints/a-checkpoint.jsonl", [{"text": "old"}])
    folder, told = f"{scheme}{tmp_path}/.above", list[str]()
    assert texts(path=f"{folder}/*.jsonl") == texts(path=f"{folder}/**/*.jsonl") == ["a"]
    assert texts(path=f"{folder}/.*.jsonl") == ["b"]
    assert texts(path=f"{folder}/.ipynb*/*.jsonl") == ["old"]
    pattern = f"{folder}/*.jsonl"
    list(read_rows(Source(pattern), BadRows(notify=told.append)))
    assert told == [
        f"{pattern}: files that match: {tmp_path}/.above/a.jsonl",
        f"{pattern}: hidden files not read: {tmp_path}/.above/.b.jsonl",
    ]
    with pytest.raises(DataError, match="no visible file matches") as caught:
        texts(path=f"{folder}/*/*.jsonl")
    assert ".ipynb_checkpoints/a-checkpoint.jsonl" in caught.value.fix


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_pattern_that_is_not_valid_names_the_valid_one(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(DataError, match="is not a valid pattern") as caught:
        texts(path=f"{scheme}{tmp_path}/**.jsonl", where="recipe.yaml:7")
    assert caught.value.where == "recipe.yaml:7"
    assert caught.value.fix == f"write '{scheme}{tmp_path}/**/*.jsonl'"


def test_the_home_of_an_unknown_user() -> None:
    with pytest.raises(DataError, match="home folder of a user that does not exist"):
        texts(path="~no-such-user/rows.jsonl")


def test_relative_paths(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("data/b.jsonl", [{"text": "b"}])
    monkeypatch.chdir(tmp_path)
    assert texts(path="data/b.jsonl") == texts(path="data/*.jsonl") == ["b"]


def test_max_rows_stops_before_a_malformed_row(write: Write) -> None:
    assert texts(path=write("a.jsonl", '{"text": "one"}\n{"text": "two"}\nbroken'), max_rows=2) == ["one", "two"]


def test_missing_file_names_the_nearest(write: Write, tmp_path: Path) -> None:
    write("data/train.jsonl", [{"text": "x"}])
    with pytest.raises(DataError, match=r"the file '.*' does not exist") as caught:
        texts(path=str(tmp_path / "data/trian.jsonl"), where="recipe.yaml:7")
    assert caught.value.where == "recipe.yaml:7"
    assert caught.value.fix == "did you mean 'train.jsonl'?"
    with pytest.raises(DataError) as caught:
        texts(path=str(tmp_path / "dta/train.jsonl"))
    assert "has no folder 'dta'" in caught.value.fix
    assert "did you mean 'data'?" in caught.value.fix
    with pytest.raises(DataError) as caught:
        texts(path=str(tmp_path / "data/quite-different.parquet"))
    assert str(tmp_path / "data") in caught.value.fix


def test_nothing_there(write: Write, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, what in [
        (write("empty.jsonl", ""), "has no rows"),
        (write("blank.txt", "\n\n"), "has no rows"),
        (write("header.csv", "text\n"), "has no rows"),
        (write("empty.json", "[]"), "has no rows"),
        (str(tmp_path / "folder"), "has no data file"),
        (str(tmp_path / "*.parquet"), "no file matches"),
    ]:
        with pytest.raises(DataError, match=what) as caught:
            texts(path=path)
        assert caught.value.where == path


def test_local_files_have_no_split(write: Write) -> None:
    path = write("a.jsonl", [{"text": "x"}])
    for options in ({"split": "test"}, {"name": "english"}):
        with pytest.raises(DataError, match="'split' and 'name' cannot be used with a file"):
            texts(path=path, **options)


def test_datasets_library(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library loads a folder as it loads a dataset on the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write("data/train.jsonl", [{"text": "one", "id": 1}, {"text": "two", "id": None}])
    write("data/test.jsonl", [{"text": "three", "id": 3}])
    folder = str(tmp_path / "data")
    rows = list(hub_rows(folder, None, "train", "recipe.yaml:3"))
    assert [row.origin for row in rows] == [f"{folder}[train]:row 1", f"{folder}[train]:row 2"]
    assert rows[1].columns == {"text": "two"}
    assert [row.columns["id"] for row in hub_rows(folder, None, "test", "")] == [3]
    with pytest.raises(DataError, match="has no split 'validation', found train, test"):
        list(hub_rows(folder, None, "validation", ""))


def test_hub_dataset_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="cannot load the dataset 'no-such-owner/no-such-data'") as caught:
        texts(path="no-such-owner/no-such-data", where="recipe.yaml:3")
    assert caught.value.where == "recipe.yaml:3"
    assert "no local file" in caught.value.fix


def test_python_stdlib() -> None:
    rows = list(read_rows(Source("python-stdlib", max_rows=24)))
    assert len(rows) == 24
    assert all(row.origin.startswith("stdlib:") for row in rows)
