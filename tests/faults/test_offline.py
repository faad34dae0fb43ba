"""Connections: none by a run that names nothing on a hub, and one clear error for any under ``--offline``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.figures import full, tell
from tests.sft_kit import FIXED, RECIPE, write_recipe, write_rows

HOOK = """
import atexit, os, sys

def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        address = arguments[1] if event in ("socket.connect", "socket.sendto") else (arguments[0],)
        if isinstance(address, tuple) and address[0] not in (None, "", "localhost", "127.0.0.1", "::1", b"localhost"):
            with open(os.environ["CONNECTIONS"], "a") as file:
                file.write(f"{event} {address}\\n")

sys.addaudithook(hook)
"""
"""``sitecustomize.py``: notes every connection of every Python process, the children's too."""


def clean(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a user who has set nothing up, with connections noted."""
    ours = ("HF_", "TRANSFORMERS_", "STREAMTUNE_", "DISABLE_", "DO_NOT_TRACK", "USE_HUB")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(folder / "site"), kept.get("PYTHONPATH", "")])
    return {
        **kept,
        "PYTHONPATH": path,
        "CONNECTIONS": str(folder / "connections"),
        "HF_HOME": str(folder / "hf"),
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOOK)
    write_rows(tmp_path, 6)
    write_recipe(tmp_path, {**RECIPE, "engine": FIXED, "max_steps": 2, "val_size": 2})
    return tmp_path


def run(folder: Path, *arguments: str, prefix: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "streamtune", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=clean(folder, **more),
        timeout=300,
    )


@pytest.mark.full
def test_a_run_that_names_nothing_on_a_hub_connects_to_nothing(folder: Path) -> None:
    """From recipe to trained model without ``--offline``, in a network namespace without interfaces if there is one."""
    prefix: tuple[str, ...] = ()
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode == 0:
        prefix = (unshare, "-rn")
    done = run(folder, "sft", "tiny.yaml", prefix=prefix)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs" / "tiny" / "final" / "model.safetensors").is_file()
    noted = (folder / "connections").read_text().splitlines() if (folder / "connections").exists() else []
    tell("connections_of_a_local_run", len(noted), 0, namespace=bool(prefix))
    assert noted == []


@pytest.mark.full
def test_offline_is_one_clear_error(folder: Path) -> None:
    """A model and a dataset of the hub: said at once, and nothing was sent."""
    hub = {key: value for key, value in RECIPE.items() if key not in ("model", "tokenizer")}
    recipes = {
        "model": {**hub, "model_name_or_path": "somebody/a-model"},
        "data": {**RECIPE, "datasets": [{"path": "somebody/some-rows"}]},
    }
    for name, keys in list(recipes.items())[: None if full() else 1]:
        (folder / f"{name}.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
        done = run(folder, "sft", f"{name}.yaml", "--offline")
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("error: ") == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "offline" in done.stderr.lower()
    assert not (folder / "connections").exists()


@pytest.mark.full
def test_a_hub_without_an_address_is_asked_once(folder: Path) -> None:
    """Its libraries would try six times each, a minute in all, and print every attempt."""
    (folder / "model.yaml").write_text("model_name_or_path: somebody/a-model\ndatasets: [{path: rows.jsonl}]\n")
    done = run(folder, "sft", "model.yaml", HF_ENDPOINT="https://hub.invalid", no_proxy="*")
    assert done.returncode == 2, done.stderr
    assert "cannot load the" in done.stderr
    assert "Retrying" not in done.stderr
    noted = (folder / "connections").read_text().splitlines()
    assert len([line for line in noted if "hub.invalid" in line]) == 1, noted


def test_the_guard_holds_in_children_and_lets_this_machine_through(folder: Path) -> None:
    program = """
import socket, subprocess, sys
from streamtune.base.privacy import OfflineError, go_offline, is_offline
go_offline()
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()
socket.getaddrinfo("localhost", 80)
refused = 0
tries = [lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("198.51.100.7", 53))]
for address in ("198.51.100.7", "2001:db8::1", "example.org"):
    tries.append(lambda address=address: socket.create_connection((address, 80), timeout=1))
for attempt in tries:
    try:
        attempt()
    except OfflineError as error:
        assert "--offline" in error.what
        refused += 1
print(refused)
child = "from streamtune.base.privacy import is_offline; print(is_offline())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=clean(folder), timeout=60
    )
    assert done.stdout.split() == ["4", "True"], done.stderr


def test_no_telemetry(folder: Path) -> None:
    """The variables are set before the libraries read them, and one that the user set stays."""
    program = """
import atexit, json, os
from streamtune.cli import main
names = ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "USE_HUB_KERNELS", "DISABLE_SAFETENSORS_CONVERSION")
atexit.register(lambda: print(json.dumps([os.environ[name] for name in names])))
main(["--version"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean(folder, DO_NOT_TRACK="yes")
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["1", "yes", "0", "1"]
