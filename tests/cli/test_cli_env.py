"""``streamtune env``: versions, devices and the allocator."""

from __future__ import annotations

import json
import os
import platform
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from streamtune.cli import env, main
from streamtune.cli.machine import ALLOCATOR_VARIABLES, allocator_setting, use_expandable_segments


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
    assert found["head"]["cpu"] == {"candidates": []}
    assert set(found["head"]) == set(names)


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.13.0+cpu", "2.14.1"])
def test_torch_is_shown_with_its_build(monkeypatch, capsys, version):
    """Metadata give 2.13.0 for the CUDA wheel and 2.13.0+cpu for the CPU wheel; torch itself names both builds."""
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(SystemExit):
        main(["env", "--json"])
    assert json.loads(capsys.readouterr().out)["versions"]["torch"] == version


def test_env_for_people(capsys):
    with pytest.raises(SystemExit):
        main(["env"])
    printed = capsys.readouterr().out
    for title in ("versions", "memory", "devices", "attention kernels", "head", "allocator"):
        assert f"{title}\n" in printed
    assert "cpu float32" in printed
    assert "GiB" in printed


@pytest.mark.parametrize(("major", "bf16"), [(7, False), (9, True)])
def test_emulated_bfloat16_is_none(monkeypatch, major, bf16):
    """torch says that a T4 supports bfloat16, since tensors of it exist; each operation is emulated."""
    card = SimpleNamespace(name="a card", major=major, minor=5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 30, 1 << 34))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    assert [device["bf16"] for device in env._list_devices()[1:]] == [bf16]


@pytest.fixture
def environment(monkeypatch):
    """Environment without allocator variables; changes by a command are undone afterwards."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.skipif(sys.platform != "linux", reason="segments grow on Linux alone")
def test_segments_grow_unless_the_user_says_otherwise(environment, capsys):
    with pytest.raises(SystemExit):
        main(["env", "--json"])
    assert json.loads(capsys.readouterr().out)["allocator"] == "expandable_segments:True"
    assert [os.environ[name] for name in ALLOCATOR_VARIABLES] == ["expandable_segments:True"] * 2


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_users_own_setting_stays(environment, capsys, name):
    environment.setenv(name, "max_split_size_mb:128")
    with pytest.raises(SystemExit):
        main(["env", "--json"])
    assert json.loads(capsys.readouterr().out)["allocator"] == "max_split_size_mb:128"
    assert [other in os.environ for other in ALLOCATOR_VARIABLES] == [other == name for other in ALLOCATOR_VARIABLES]


def test_an_empty_setting_is_the_users_too():
    chosen = {"PYTORCH_ALLOC_CONF": ""}
    use_expandable_segments(chosen)
    assert chosen == {"PYTORCH_ALLOC_CONF": ""}
    assert allocator_setting(chosen) == ""
