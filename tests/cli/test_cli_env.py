"""``streamtune env``."""

from __future__ import annotations

import json
import platform

import psutil
import pytest
import torch

from streamtune.cli import main


def test_env_json(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["env", "--json"])
    assert not caught.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert found["memory"]["total_bytes"] == psutil.virtual_memory().total
    names = [device["name"] for device in found["devices"]]
    assert names == ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    assert set(found["attention"]) == set(names)
    assert set(found["attention"]["cpu"]["float32"]) == {"unmasked", "masked"}


def test_env_for_people(capsys):
    with pytest.raises(SystemExit):
        main(["env"])
    printed = capsys.readouterr().out
    for title in ("versions", "memory", "devices", "attention kernels"):
        assert f"{title}\n" in printed
    assert "cpu float32" in printed
    assert "GiB" in printed
