"""Real trackers: what is read back of their files is what ``metrics.jsonl`` has."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import ArgumentError
from streamtune.programs.trackers.reporter import make_reporters
from streamtune.train import RunFacts
from tests.sft_kit import FIXED, RECIPE, write_recipe, write_rows

Curves = dict[str, list[tuple[int, float]]]
RUN = "0123456789abcdef"


def facts(folder: Path, step: int = 0, seed: int = 1) -> RunFacts:
    folder.mkdir(exist_ok=True)
    recipe = {"seed": seed, "engine": {"chunk_size": 16}, "datasets": [{"path": "rows.jsonl"}],
              "lora_rank_pattern": {r"layers\.0\..*q_proj$": 4}}  # fmt: skip
    plan = {"peak_bytes": 7, "terms": {"weights": 3, "layer inputs": 4}}
    return RunFacts(RUN, folder.name, folder, step, 6, recipe, {"torch": "2.13"}, plan)


def report(
    folder: Path, names: list[str], *, first: int = 0, last: int = 4, seed: int = 1, offline: bool = True
) -> None:
    """Steps ``first + 1 .. last`` of a run, of which each loss is 1 / step + first."""
    notes: list[str] = []
    group = make_reporters(names, offline=offline, notify=notes.append)
    group.seconds = 120.0
    group.started(facts(folder, first, seed))
    for step in range(first + 1, last + 1):
        group.step({"step": step, "loss": 1 / step + first, "rewards/mean": 0.1 * step, "tokens": 7})
        if step % 2 == 0:
            group.evaluated({"step": step, "eval_loss": 2 / step})
    group.sampled([{"step": last, "prompt": "What?", "completion": "That."}])
    picture(folder / "loss.png")
    group.event("finish", {"step": last})
    group.finished({"status": "finished", "step": last})
    assert notes == []


def picture(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 6), "white").save(path)


def expected(first: int, last: int) -> Curves:
    steps = range(first + 1, last + 1)
    return {
        "loss": [(step, 1 / step + first) for step in steps],
        "rewards/mean": [(step, 0.1 * step) for step in steps],
        "tokens": [(step, 7.0) for step in steps],
        "eval_loss": [(step, 2 / step) for step in steps if step % 2 == 0],
    }


def of_tensorboard(folder: Path) -> Curves:
    """The curves as TensorBoard's own page reads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    return {
        tag: [(event.step, make_ndarray(event.tensor_proto).item()) for event in read.Tensors(tag)]
        for tag in read.PluginTagToContent("scalars")
        if not tag.startswith("plan/")
    }


def of_mlflow(folder: Path) -> tuple[Any, Curves]:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    [found] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return found, {name: [(each.step, each.value) for each in history] for name, history in histories.items()}


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the form of LevelDB's logs, behind 7 bytes of W&B's own."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # what is left of a block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def of_wandb(folder: Path) -> tuple[set[tuple[str, str]], Curves, dict[str, Any]]:
    """(project, run id) pairs, curves and configuration of all offline files."""
    from wandb.proto import wandb_internal_pb2

    ids, config, curves = set[tuple[str, str]](), dict[str, Any](), defaultdict[str, list[tuple[int, float]]](list)
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id))
                config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            elif record.HasField("history"):
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                for name, value in row.items():
                    if isinstance(value, (int, float)) and not name.startswith("_") and name != "step":
                        curves[name].append((int(row["step"]), float(value)))
    return ids, dict(curves), config


def test_tensorboard_has_the_numbers_and_a_resumption_replaces_steps(tmp_path: Path) -> None:
    report(tmp_path, ["tensorboard"])
    assert of_tensorboard(tmp_path) == expected(0, 4)
    report(tmp_path, ["tensorboard"], first=2, last=6)
    before, after = expected(0, 2), expected(2, 6)
    assert of_tensorboard(tmp_path) == {name: before[name] + after[name] for name in after}


@pytest.mark.full
def test_tensorboard_has_recipe_samples_and_picture(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(tmp_path, ["tensorboard"])
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert read.Tags()["images"] == ["loss.png"]
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]
             if tag.endswith("/text_summary")}  # fmt: skip
    assert "| engine.chunk_size | 16 |" in texts["recipe/text_summary"]
    assert "| torch | 2.13 |" in texts["versions/text_summary"]
    assert "| terms.layer inputs | 4 |" in texts["plan/text_summary"]
    assert "That." in texts["samples/0/text_summary"]


@pytest.mark.full
def test_mlflow_has_one_run_with_all_of_it(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    report(tmp_path, ["mlflow"])
    found, curves = of_mlflow(tmp_path)
    assert curves == expected(0, 4)
    assert found.data.params["recipe.engine.chunk_size"] == "16"
    assert found.data.params["plan.terms.layer inputs"] == "4"
    assert json.loads(found.data.params["recipe.lora_rank_pattern"]) == {r"layers\.0\..*q_proj$": 4}
    assert found.info.status == "FINISHED"
    artifacts = next((tmp_path / "mlflow").glob("*/*/artifacts"))
    assert {path.name for path in artifacts.iterdir()} == {"run.json", "loss.png", "samples"}
    assert "That." in (artifacts / "samples/step-000004.md").read_text()
    report(tmp_path, ["mlflow"], first=2, last=6, seed=2)
    again, curves = of_mlflow(tmp_path)
    assert again.info.run_id == found.info.run_id
    assert sorted(curves["loss"]) == sorted(expected(0, 4)["loss"] + expected(2, 6)["loss"])
    assert (again.data.params["recipe.seed"], again.data.tags["recipe.seed"]) == ("1", "2")


@pytest.mark.full
def test_a_password_of_mlflows_server_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    info = {"run_id": "1", "experiment_id": "1", "status": "RUNNING", "artifact_uri": (tmp_path / "files").as_uri()}
    made: list[str] = []

    class Server(BaseHTTPRequestHandler):
        """Answers as if it had one experiment and one run."""

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.endswith("/runs/create"):
                made.append(self.path)
            found = {"experiment": {"experiment_id": "1"}, "run": {"info": info, "data": {}}, "run_info": info}
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    (tmp_path / "files").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for password in ("first-pass-word", "other-pass-word"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://alice:{password}@127.0.0.1:{server.server_port}")
        report(tmp_path, ["mlflow"], offline=False)
        assert "pass-word" not in (tmp_path / "trackers.json").read_text() + "".join(capfd.readouterr())
    server.shutdown()
    server.server_close()
    assert len(made) == 1, "the run is resumed"


@pytest.mark.full
def test_wandb_offline_has_one_run_with_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    report(tmp_path, ["wandb"])
    monkeypatch.setenv("WANDB_PROJECT", "another")  # a run has one project
    report(tmp_path, ["wandb"], first=2, last=6)
    ids, curves, config = of_wandb(tmp_path)
    assert ids == {("streamtune", RUN)}
    for name, curve in expected(0, 4).items():
        assert sorted(curves[name]) == sorted(curve + expected(2, 6)[name]), name
    assert config["recipe"]["engine"] == {"chunk_size": 16}
    assert config["plan"]["terms"]["weights"] == 3


ASKS = """
from pathlib import Path
from streamtune.programs.trackers.reporter import make_reporters
from streamtune.train import RunFacts

group = make_reporters(["wandb"], offline=False, notify=print)
group.seconds = 20.0
group.started(RunFacts("0123", "run", Path("run").absolute(), 0, 1, {}, {}, {}))
group.finished({"status": "finished", "step": 1})
"""


@pytest.mark.full
def test_wandb_without_a_key_asks_no_question_in_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "run").mkdir()
    here = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    here |= {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "PYTHONPATH": os.pathsep.join(sys.path)}
    screen, terminal = os.openpty()
    told = subprocess.run([sys.executable, "-c", ASKS], env=here, cwd=tmp_path, stdin=terminal, stderr=terminal,
                          stdout=subprocess.PIPE, text=True, timeout=120)  # fmt: skip
    os.write(terminal, b"end")
    asked = os.read(screen, 1 << 16).decode()
    os.close(screen)
    os.close(terminal)
    assert "Enter your choice" not in asked
    assert "API key" in told.stdout


@pytest.mark.full
def test_wandb_follows_no_address_or_key_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamtune.programs.trackers.services import _check_wandb_settings

    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DIR", "WANDB_BASE_URL", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "wandb").mkdir()
    settings = tmp_path / "wandb" / "settings"
    settings.write_text("[default]\nproject: mine\nentity = team\n")
    _check_wandb_settings()
    for line in ("base_url = http://127.0.0.1:9", "BASE_URL: http://127.0.0.1:9", "api_key = 0123"):
        settings.write_text(f"[default]\n{line}\n")
        with pytest.raises(ArgumentError, match="in the working directory sets"):
            _check_wandb_settings()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    _check_wandb_settings()


def test_trackio_has_one_run_with_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: it reads where its files are when it is imported."""
    pytest.importorskip("trackio")
    code = "import sys; from pathlib import Path; from tests.programs.trackers.test_trackers import report; "
    code += "report(Path(sys.argv[1]), ['trackio'], first=int(sys.argv[2]), last=int(sys.argv[3]))"
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "files"), "PYTHONPATH": os.pathsep.join(sys.path)}
    for first, last in ((0, 4), (2, 6)):
        command = [sys.executable, "-c", code, str(tmp_path / "run"), str(first), str(last)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
    with sqlite3.connect(tmp_path / "files" / "streamtune.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, *_ in rows} == {f"run-{RUN[:6]}"}
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for _, step, metrics in rows:
        for name, value in json.loads(metrics).items():
            if isinstance(value, (int, float)):
                found[name].append((step, value))
    for name, curve in expected(0, 4).items():
        assert sorted(found[name]) == sorted(curve + expected(2, 6)[name])


@pytest.mark.full
def test_a_run_tells_its_trackers_what_it_writes_and_a_killed_one_goes_on(tmp_path: Path) -> None:
    """Through the command line, offline: killed in its sixth step, gone on with, and read back."""
    names = [name for name in ("tensorboard", "mlflow", "wandb") if _is_here(name)]
    write_rows(tmp_path, 12)
    recipe = {**RECIPE, "max_length": 256, "val_size": 2, "eval_steps": 2, "engine": FIXED, "max_steps": 8}
    recipe |= {"save_steps": 2, "save_async": False, "report_to": names, "sample_steps": 3, "output_dir": "run"}
    recipe |= {"sample": {"prompt": "Add 3.", "max_new_tokens": 4}}
    write_recipe(tmp_path, {**recipe, "callbacks": ["end.py:Killing"], "allow_code": True})
    (tmp_path / "end.py").write_text(
        "import os, signal, time\n\nclass Killing:\n    def on_step(self, record):\n"
        "        if record['step'] == 5 and 'KILL' in os.environ:\n"
        "            time.sleep(15)\n            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-m", "streamtune", "--offline", "sft", "tiny.yaml"]
    # wandb leaves a service of this process there for its children.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    killed = subprocess.run(command, cwd=tmp_path, env={**environment, "KILL": "1"}, capture_output=True, check=False)
    assert killed.returncode == -9
    ids = json.loads((tmp_path / "run/trackers.json").read_text())
    assert ids.keys() == set(names)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no more records of this run" not in done.stderr
    assert json.loads((tmp_path / "run/trackers.json").read_text()) == ids
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    curves: Curves = defaultdict(list)
    for record in records:
        for name in record.keys() - {"step"}:
            curves[name].append((record["step"], float(record[name])))
    assert of_tensorboard(tmp_path / "run") == curves
    for name in names[1:]:
        found = of_mlflow(tmp_path / "run")[1] if name == "mlflow" else of_wandb(tmp_path / "run")[1]
        for key, curve in curves.items():
            assert dict(found[key])[8 if key != "tokens" else 1] == dict(curve)[8 if key != "tokens" else 1]
            assert set(curve) <= set(found[key]), (name, key)


def _is_here(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
