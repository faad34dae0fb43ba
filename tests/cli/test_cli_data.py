"""``streamtune data``: screen, JSON document, HTML page, PNG, and errors."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.cli import main

MODEL: dict[str, Any] = {
    "model": {"init": {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "tokenizer": {"train": {"vocab_size": 400}},
    "datasets": [{"path": "chats.jsonl"}, {"path": "qa.jsonl"}],
    "max_length": 120,
    "overlength": "truncate",
    "per_device_train_batch_size": 4,
    "val_size": 0.1,
}
CHAT = "What is <b>{n}</b> & why?", "It is {n}, for the number before it is {m}."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    chats = []
    for n in range(1, 31):
        turns = [text.format(n=n, m=n - 1) for text in CHAT * (n // 6 + 1)]
        roles = ("user", "assistant") * len(turns)
        chats.append({"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]})
    pairs = [{"prompt": f"Say {n}.", "chosen": f" {n}", "rejected": f" not {n}"} for n in range(20)]
    qa = [{"prompt": f"Q: {n}?\nA:", "completion": f" {n}."} for n in range(10)]
    for name, rows in (("chats", chats), ("pairs", pairs), ("qa", qa)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write("rows.yaml")
    return tmp_path


def write(name: str, **changes: Any) -> None:
    Path(name).write_text(yaml.safe_dump({**MODEL, **changes}, sort_keys=False), encoding="utf-8")


def data(*arguments: str) -> int:
    try:
        main(["data", *arguments])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_document(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data("rows.yaml", "--json", "--worst", "--rows", "2") == 0
    found = json.loads(capfd.readouterr().out)
    stable = ("rows", "kept", "truncated", "dropped", "split", "tokens", "supervised_tokens", "length_percentiles")
    assert set(stable) < found.keys()
    assert (found["rows"], [each["rows"] for each in found["sources"]]) == (40, [30, 10])
    assert (found["max_length"], found["batches"]["batch_size"]) == (120, 4)
    assert sum(each["rows"] for each in found["histogram"]) == 40
    assert [each["lost_if_truncated"] for each in found["lengths"] if each["max_length"] == 120] == [
        found["tokens_lost"]
    ]
    first = found["samples"][0]
    assert "longest" in first["reason"]
    assert first["origin"] == "chats.jsonl:30"
    assert first["tokens"] == 120 == sum(each["tokens"] for part in first["parts"] for each in part["shown"])


def test_the_screen_is_plain_in_a_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data("rows.yaml", "--rows", "1") == 0
    out = capfd.readouterr().out
    for text in (
        "data rows.yaml",
        "lost if cut",
        "  total",
        "  problems",
        "max_length 120",
        "other values of max_length: longer rows and lost tokens",
        "> 120",
        "row 1  chats.jsonl:1",
        "⟦It is 1, for the number before it is 0.<|im_end|>⟧",
    ):
        assert text in out
    assert "\x1b" not in out


def test_one_row_with_ids(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data("rows.yaml", "--row", "qa.jsonl:3", "--ids") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].startswith("row 33  qa.jsonl:3")
    kinds = [re.fullmatch(r" +(\d+) +(\d+)  (trained|masked)( special)? +(.*)", line) for line in lines[2:]]
    assert "".join(json.loads(found[5]) for found in kinds if found) == "Q: 2?\nA: 2.<|im_end|>"
    assert [int(found[1]) for found in kinds if found] == list(range(len(kinds)))
    assert data("rows.yaml", "--row", "33") == 0
    assert "⟦ 2.<|im_end|>⟧" in capfd.readouterr().out


class Page(HTMLParser):
    """HTML parser that collects tags, addresses and text of a page; ``open`` has tags that were not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        if (tag, ("class", "tokens")) == (tag, attrs[0] if attrs else None) and tag == "pre":
            self.rows.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.rows[-1] += data


@pytest.mark.full
def test_the_page(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data("rows.yaml", "--html", "rows.html", "--png", "lengths.png", "--rows", "40") == 0
    text = Path("rows.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.addresses == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    assert len(text) < 1_500_000
    assert any("What is <b>1</b> & why?<|im_end|>" in row for row in page.rows)
    assert Path("lengths.png").read_bytes().startswith(b"\x89PNG")
    assert data("rows.yaml", "--html", "chats.jsonl") == 2
    assert "is not a StreamTune page; it is not overwritten" in capfd.readouterr().err
    assert Path("chats.jsonl").read_text().startswith('{"messages"')


def test_pairs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write("pairs.yaml", objective="dpo", datasets=[{"path": "pairs.jsonl"}])
    assert data("pairs.yaml", "--json", "--rows", "1") == 0
    found = json.loads(capfd.readouterr().out)
    assert [part["name"] for part in found["samples"][0]["parts"]] == ["prompt", "chosen", "rejected"]
    assert [part["trained"] > 0 for part in found["samples"][0]["parts"]] == [False, True, True]
    assert found["batches"] is None
    assert found["lengths"][0]["lost_if_truncated"] is None


def test_prompts_of_a_shipped_recipe(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data("quickstart_grpo", "--set", "datasets.0.max_rows=50", "--set", "val_size=5", "--rows", "1") == 0
    out = capfd.readouterr().out
    assert "max_prompt_length 32" in out
    assert "45 train, 5 held out; tokens: prompts " in out


def test_rows_rendered_by_a_named_template(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data("rows.yaml", "--template", "alpaca", "--row", "1") == 0
    assert "### Response:" in capfd.readouterr().out
    assert data("rows.yaml", "--template", "llama3", "--rows", "1", "--set", "overlength=truncate") == 0
    said = capfd.readouterr()
    assert "chat template llama3" in said.out
    assert "splits <|start_header_id|>, <|end_header_id|> and <|eot_id|>" in " ".join(said.err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "overlength=error"], "rows have more than max_length = 120 tokens"),
        (["--set", "datasets.0.path=chat.jsonl"], "the file 'chat.jsonl' does not exist"),
        (["--row", "99"], "row 99 does not exist"),
        (["--row", "qa.jsonl:99"], "no row was prepared from 'qa.jsonl:99'"),
        (["--ids"], "--ids needs --row"),
        (["--png", "none/a.png"], "cannot be written"),
        (["--template", "lama3"], "did you mean 'llama3'? the names are chatml,"),
    ],
    ids=["too long", "no file", "no number", "no row", "no row for ids", "no folder", "no template"],
)
@pytest.mark.quick("too long", "no row for ids")
def test_what_is_refused(arguments: list[str], said: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data("rows.yaml", *arguments) == 2
    assert said in " ".join(capfd.readouterr().err.split())
