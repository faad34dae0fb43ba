"""``streamtune report``: pages of real runs, of large, torn, young and hostile ones, and in a browser."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.cli import main
from streamtune.programs.report.charts import Curve, axis_ticks, downsample, line_chart, tick_labels
from streamtune.programs.report.page import render_page
from streamtune.programs.report.run_records import read_run
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"),
]


def write_run(folder: Path, steps: int, **recipe: Any) -> Path:
    """Write the files of a run of ``steps`` steps, with an evaluation every hundred."""
    folder.mkdir(parents=True)
    identity = {"run": "0", "recipe": {}, "free": {}, "versions": {"torch": "2.13.0"}}
    (folder / "run.json").write_text(json.dumps(identity))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"objective": "sft", "learning_rate": 1e-4, **recipe}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": 1 + 1 / step, "lr": 1e-4, "grad_norm": 1.5 + 0.1 * (step * 7919 % 13)}
            record |= {"tokens": 4096, "tokens_per_s": 1000.0 + step * 31 % 97, "peak_mem_gib": 4.0}
            file.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"step": step, "eval_loss": 1.1 + 1 / step}) + "\n")
    (folder / "events.jsonl").write_text('{"time": "2026-01-01T00:00:00+00:00", "event": "finish", "step": 9}\n')
    return folder


class Tags(HTMLParser):
    """Collects the tags of a page and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]


def test_a_run_ends_with_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, {**RECIPE, "engine": FIXED, "max_steps": 3, "val_size": 2, "output_dir": "out"})
    assert run() == 0
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    records = read_run(tmp_path / "out")
    assert [step for step, _ in records.metric_points("loss")] == [1, 2, 3]
    assert len(records.metric_points("eval_loss", held_out=True)) == 1
    assert records.data["rows"] == 12
    for title in ("Loss", "Gradient norm", "Time of a step", "Events", "Recipe", "Versions"):
        assert f">{title}" in text
    assert text == render_page([records])  # nothing of it depends on when it is made


def test_the_page_refers_to_nothing(tmp_path: Path) -> None:
    text = render_page([read_run(write_run(tmp_path / "a", 300))])
    page = Tags(text)
    assert page.addresses == ["data:,"]
    assert {"script", "style"} <= set(page.tags)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in text


def test_ten_thousand_steps_stay_small_and_keep_their_spikes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", 10_000)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    spike = json.loads(lines[5000]) | {"loss": 97.25, "step": 4951}
    lines[5000] = json.dumps(spike)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = render_page([read_run(folder)])
    assert len(text.encode()) < 1_500_000
    assert "97.25" in text


def test_a_thinned_curve_keeps_its_ends_and_extremes() -> None:
    points = [(float(x), float((x * 7919) % 1009)) for x in range(5000)]
    points[1234] = (1234.0, 1e6)
    points[4321] = (4321.0, -1e6)
    kept = downsample(points, intervals=50)
    assert len(kept) <= 200
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[1234], points[4321]} <= set(kept)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3.2, 3.3), (-5, 12_000), (1e-7, 2e-7), (2, 2), (0, 0)])
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    found = axis_ticks(low, high, 5)
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
    assert 2 <= len(found) <= 9


def test_values_that_differ_by_rounding_are_drawn() -> None:
    points = [(1, 1.0000000000000009e30), (2, 1.0000000000000007e30)]
    assert "polyline" in line_chart("Loss", [Curve("training", points, 0)])


def test_a_chart_of_one_point_or_none() -> None:
    assert line_chart("Loss", [Curve("a", [], 0)]) == ""
    assert "<circle" in line_chart("Loss", [Curve("a", [(1.0, 2.0)], 0)])


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 50, seed=seed) for name, seed in (("a", 1), ("b", 2))]
    text = render_page([read_run(path) for path in runs])
    differences = text.split("Differences between the recipes")[1].split("<h2>")[0]
    assert "seed" in differences
    assert "learning_rate" not in differences
    again = render_page([read_run(runs[0]), read_run(runs[0])])
    assert "The recipes are equal" in again


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"max_length": 512}, "512 tokens (9,000 in the data)"),
        ({"max_length": 16384}, "9,000 tokens"),
        ({"objective": "grpo", "max_prompt_length": 256, "max_length": 16384}, "256 tokens (9,000 in the data)"),
        ({"max_length": "long"}, "9,000 tokens"),
    ],
    ids=["split", "whole", "prompts", "damaged"],
)
def test_the_longest_row_is_the_one_that_was_trained(recipe: dict[str, Any], said: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 3, **recipe)
    (run / "data.json").write_text(json.dumps({"rows": 4, "length_percentiles": {"max": 9000}}))
    text = render_page([read_run(run)])
    assert f">{said}<" in text.partition("longest row")[2][:200]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"lora_r": 8}, "; lora of rank 8;"),
        ({"lora_r": 16, "adapter_name_or_path": "first/final"}, "; lora from first/final;"),
        ({"lora_r": 16, "adapter_type": "ia3"}, "; lora (ia3);"),
        ({"lora_r": 4, "adapter_type": "dora", "finetuning_type": "qlora"}, "; qlora (dora) of rank 4;"),
    ],
)
def test_adapters_are_named_with_a_rank_that_they_have(recipe: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", 3, **{"finetuning_type": "lora", **recipe})
    assert said in render_page([read_run(path)])


@pytest.mark.parametrize(("event", "said"), [("finish", "finished"), ("start", "running or killed")])
def test_a_run_without_an_end_may_have_been_killed(event: str, said: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 2)
    (folder / "events.jsonl").write_text(json.dumps({"time": "2026-01-01T00:00:00+00:00", "event": event}) + "\n")
    assert f"; {said}</p>" in render_page([read_run(folder)])


def test_torn_young_and_old_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "torn", 5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": NaN}\n[1]\n{"step": 7, "lo')
    (folder / "plan.json").write_text('{"terms": {"weights": "many"}, "limits": 3, "step_seconds": "soon"}')
    (folder / "data.json").write_text("{")
    text = render_page([read_run(folder)])
    assert "metrics.jsonl: 2 unreadable lines" in text
    assert "data.json: unreadable" in text
    young = tmp_path / "young"
    young.mkdir()
    (young / "run.json").write_text("{}")
    assert "no events" in render_page([read_run(young)])


def test_text_of_strangers_stays_text(tmp_path: Path) -> None:
    hostile = "</script></pre><img src=x onerror=alert(1)>'\"${title}$body"
    folder = write_run(tmp_path / "hostile", 3, output_dir=hostile, datasets=[{"path": hostile}])
    sample = {"step": 3, "prompt": hostile, "completion": hostile}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": hostile, "event": "failure", "what": hostile, hostile: 1}) + "\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 1.0, hostile: 2.0}) + "\n")
    text = render_page([read_run(folder)])
    page = Tags(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 1
    assert page.addresses == ["data:,"]


def test_secrets_are_left_out(tmp_path: Path) -> None:
    secret = "hf_" + "a1B2" * 8
    folder = write_run(tmp_path / "secret", 3, model_name_or_path=f"https://user:{secret}@example.org/m")
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": secret, "completion": ""}) + "\n")
    assert secret not in render_page([read_run(folder)])


def left(arguments: list[str]) -> int:
    """Return the exit code of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    return int(ended.value.code or 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", 5)
    write_run(tmp_path / "b", 5)
    assert left(["a"]) == 0
    assert left(["a", "b"]) == 0
    assert left(["a"]) == 0  # its own page is written anew
    assert (tmp_path / "a/report.html").is_file()
    assert (tmp_path / "report.html").is_file()
    (tmp_path / "notes.html").write_text("mine")
    assert left(["a", "--output", "notes.html"]) == 2
    assert (tmp_path / "notes.html").read_text() == "mine"
    capsys.readouterr()
    assert left(["."]) == 2
    assert "such as a" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    assert BROWSER is not None
    folder = write_run(tmp_path / "a", 500)
    page = tmp_path / "page.html"
    # The page says itself, in its title, how wide it became.
    script = "<script>document.title=document.documentElement.scrollWidth+' wide'</script></body>"
    page.write_text(render_page([read_run(folder)]).replace("</body>", script), encoding="utf-8")
    window = [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *FLAGS, *window, "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0
    assert "CONSOLE" not in shown.stderr
    wide = re.search(r"<title>(\d+) wide</title>", shown.stdout)
    assert wide is not None
    assert int(wide[1]) <= max(width, 500)  # Chromium has no narrower window


ODD: list[Any] = [
    *(None, True, [], {}, "x", -1, 0, 1e308, -1e308, 5e-324, 1e99, float("inf"), float("nan"), 10**400, [1], {"a": 1}),
    *([{"path": 1}], "\ud800", "\x1b[2J", "<script>", "a_" * 50_000, [[[[[]]]]]),
]


def changed(value: Any, chance: random.Random) -> Any:
    """Return JSON values of which about a third are others."""
    if chance.random() < 0.3:
        return chance.choice(ODD)
    if isinstance(value, dict):
        more = {chance.choice(["loss", "eval_a_loss", "event", "step", "terms", "x_" * 300]): chance.choice(ODD)}
        return {**{key: changed(inner, chance) for key, inner in value.items()}, **(more if len(value) > 4 else {})}
    return [changed(inner, chance) for inner in value] if isinstance(value, list) else value


@pytest.mark.full
def test_the_run_of_a_stranger_is_a_page_whatever_stands_in_it(tmp_path: Path) -> None:
    recipe = {"objective": "sft", "datasets": [{"path": "x"}], "model": {"init": {"model_type": "q"}}, "lora_r": 8}
    documents = {
        "run.json": {"recipe": recipe, "versions": {"torch": "2"}},
        "recipe.yaml": recipe,
        "plan.json": {"terms": {"a": 9, "b": 5}, "limits": {"device_bytes": 9, "shared": True}, "step_seconds": 1.0},
        "data.json": {"rows": 3, "length_percentiles": {"min": 1, "p50": 2, "max": 9}},
    }
    step = {
        "step": 1,
        "loss": 1.0,
        "lr": 1e-4,
        "tokens": 10,
        "tokens_per_s": 5.0,
        "peak_mem_gib": 1.0,
        "eval_a_loss": 2,
    }
    lines = {
        "metrics.jsonl": step,
        "events.jsonl": {"time": "2026", "event": "stop", "what": "y"},
        "samples.jsonl": {"step": 1, "prompt": "p", "completion": "c", "right": True, "expected": "y"},
    }
    for seed in range(40):
        chance = random.Random(seed)
        run_path = tmp_path / str(seed)
        run_path.mkdir()
        for name, document in documents.items():
            (run_path / name).write_text(json.dumps(changed(document, chance)))
        for name, line in lines.items():
            (run_path / name).write_text(
                "\n".join(json.dumps(changed({**line, "step": n}, chance)) for n in range(1, 8))
            )
        text = render_page([read_run(run_path)] * (1 + seed % 2)).encode("utf-8")
        assert b"\x1b" not in text


@pytest.mark.parametrize(
    "recipe",
    [
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join([f'*{chr(ord(n) - 1)}'] * 9)}]\n" for n in "bcdefghi"),
        "a: !!python/object/apply:os.system [echo]\n",
        "a: 1\na: 2\n",
        "[" * 5000,
    ],
    ids=["anchors", "tag", "twice", "deep"],
)
def test_a_recipe_that_is_none_is_said_on_the_page(recipe: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", 3)
    (path / "recipe.yaml").write_text(recipe)
    records = read_run(path)
    assert len(records.unreadable) == 1
    assert "Unreadable: recipe.yaml" in render_page([records])


@pytest.mark.parametrize(
    ("low", "high"), [(0.99995, 1.0), (6.12341, 6.12349), (1000.1, 1000.9), (0.0, 8.0), (1e-9, 2e-9)]
)
def test_the_labels_of_an_axis_differ(low: float, high: float) -> None:
    ticks = axis_ticks(low, high, 5)
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(ticks) > 2
    assert [float(label.replace(",", "")) for label in labels] == pytest.approx(ticks)
