"""``streamtune doctor``: every check runs for real; a problem that would stop a run gives exit code 1."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from torch import Tensor

from streamtune import engine
from streamtune.cli import doctor, main

CHECKED = {"device", "attention", "exactness", "host memory", "disk", "temporary files", "hub"}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--json", *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return int(stopped.value.code or 0), found


def test_a_machine_that_can_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = document(capsys, "--dir", str(tmp_path))
    checks = {check["check"]: check for check in found["checks"]}
    assert (code, found["problems"]) == (0, 0)
    assert checks.keys() >= CHECKED
    assert checks["exactness"]["status"] == "ok"
    assert "offline" in checks["hub"]["found"]
    assert str(tmp_path) in checks["disk"]["found"]
    assert not list(tmp_path.iterdir()), "nothing stays"


def test_a_folder_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = document(capsys, "--dir", str(tmp_path / "missing"))
    assert (code, found["problems"]) == (1, 1)
    (problem,) = [check for check in found["checks"] if check["status"] == "problem"]
    assert problem["check"] == "disk"
    assert "--dir" in problem["mend"]


def test_a_gradient_that_is_no_number_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = engine.stream

    def wrong(model: Any, **options: Any) -> Any:
        def spoil(parameter: Tensor) -> None:
            parameter.grad.fill_(float("nan"))

        handle = right(model, **options)
        model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(spoil)
        return handle

    monkeypatch.setattr(engine, "stream", wrong)
    (found,) = doctor._check_exact_gradient({"devices": [{"name": "cpu"}]}, tmp_path)
    assert (found.status, found.found.rpartition(" ")[2]) == ("problem", "model.layers.1.mlp.up_proj.weight")


@pytest.fixture
def asked_of_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths of the requests to a mirror of the hub that has no first page."""
    asked: list[str] = []

    class Mirror(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(405)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Mirror)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("offline", "requests"), [("0", 1), ("1", 0), ("true", 0), ("YES", 0)])
def test_a_hub_is_asked_unless_a_variable_forbids_it(
    offline: str, requests: int, asked_of_mirror: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    (found,) = [check for check in doctor._check_hub({}, tmp_path) if check.check == "hub"]
    assert (found.status, len(asked_of_mirror)) == ("ok", requests)
    assert found.found.endswith(" answers") if requests else "offline" in found.found
