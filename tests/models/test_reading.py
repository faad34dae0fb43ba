"""Models whose files are written to while they are read: an error that names the file, and no mapped page is kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from streamtune.errors import ArgumentError
from streamtune.models import add_lora, load_initial_adapters, load_model, load_peft_adapters
from streamtune.models import folder as reading

MOE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
       "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 64, "q_lora_rank": 8,
       "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
LLAMA: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
                         "intermediate_size": 48}  # fmt: skip
CUT = 400
"""Bytes that are left of a file, in the middle of its header."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a model with buffers in its file, and adapters of the base."""
    folder = tmp_path_factory.mktemp("saved")
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))
    base.save_pretrained(folder / "base")
    moe = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **MOE))
    moe.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(4.0))
    moe.save_pretrained(folder / "moe")
    add_lora(base, r=4, alpha=8, dropout=0.0, target="all-linear", seed=1).save_pretrained(str(folder / "adapters"))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that has not changed for a while."""
    shutil.copytree(saved, tmp_path / "copy")
    past = time.time() - 100
    for file in (tmp_path / "copy").rglob("*"):
        os.utime(file, (past, past))
    return tmp_path / "copy"


@contextmanager
def at_opening(name: str, change: Callable[[Path], None]) -> Iterator[None]:
    """Change a file of weights right after a library has opened it, before its tensors are read."""

    class Opened:
        """The real file, changed once its header is read."""

        def __init__(self, path: Any, **options: Any) -> None:
            self.file, self.path = safe_open(path, **options), Path(path)
            if self.path.name == name:
                change(self.path)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.file, attribute)

        def __enter__(self) -> Any:
            return self.file.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_open", safe_open)  # is put back at the end
        patch.setattr(reading, "hf_internal", lambda _: Opened)
        patch.setattr("safetensors.torch.safe_open", Opened)  # by which peft reads
        yield


def rewrite_and_restore(path: Path) -> None:
    """Write other weights into the file, and those that were there back: its size and its time are as before."""
    whole, facts = path.read_bytes(), path.stat()
    with path.open("r+b") as file:
        file.seek(len(whole) // 2)
        file.write(bytes(len(whole) - len(whole) // 2))
        file.seek(0)
        file.write(whole)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, CUT)


@pytest.mark.parametrize("change", [rewrite_and_restore, cut])
def test_weights_that_are_written_to_while_they_are_read_are_refused(
    folder: Path, change: Callable[[Path], None]
) -> None:
    """A mapped file that is cut would end this process with SIGBUS."""
    refused = pytest.raises(ArgumentError, match=r"base/model.safetensors was written to while it was read")
    with at_opening("model.safetensors", change), refused:
        load_model(str(folder / "base"))


@pytest.mark.parametrize("change", [rewrite_and_restore, cut])
@pytest.mark.parametrize("load", [load_peft_adapters, load_initial_adapters])
def test_adapters_that_are_written_to_while_they_are_read_are_refused(
    folder: Path, load: Callable[..., Any], change: Callable[[Path], None]
) -> None:
    model, path = load_model(str(folder / "base")), folder / "adapters"
    refused = pytest.raises(ArgumentError, match=r"adapter_model.safetensors was written to while it was read")
    with at_opening("adapter_model.safetensors", change), refused:
        load(model, path if load is load_peft_adapters else str(path))


def test_a_base_under_adapters_is_watched_as_well(folder: Path) -> None:
    settings = folder / "adapters/adapter_config.json"
    settings.write_text(
        settings.read_text().replace(
            '"base_model_name_or_path": null', f'"base_model_name_or_path": "{folder / "base"}"'
        )
    )
    assert reading.local_adapter_base(str(folder / "adapters")) == str(folder / "base")
    with (
        pytest.raises(ArgumentError, match=r"base/config.json was written to"),
        reading.refuse_file_changes(folder / "adapters"),
    ):
        (folder / "base/config.json").touch()


def test_a_file_that_changed_just_before_is_compared_by_its_content(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On file systems with coarse times a second change has the time of the first."""
    path = folder / "base/model.safetensors"
    path.write_bytes(path.read_bytes())
    facts = path.stat()
    real = Path.stat

    def coarse(self: Path, **options: Any) -> Any:
        return facts if self == path else real(self, **options)

    monkeypatch.setattr(Path, "stat", coarse)
    with pytest.raises(ArgumentError, match="was written to"), reading.refuse_file_changes(folder / "base"):
        path.write_bytes(path.read_bytes()[:-4] + b"abcd")


@pytest.mark.parametrize("name", ["base", "moe"])
def test_no_weight_or_buffer_follows_what_is_written_to_the_file_later(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no room to read the file, and it is mapped."""
    for room in (1 << 40, 0):
        monkeypatch.setattr(reading, "usable_host_bytes", lambda room=room: room)
        model = load_model(str(folder / name))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        assert any("e_score_correction_bias" in key for key in before) == (name == "moe")
        path = folder / name / "model.safetensors"
        whole = path.read_bytes()
        with path.open("r+b") as file:  # as another program would, in place
            file.write(bytes(len(whole)))
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        path.write_bytes(whole)


MAPPED = """
import os, sys
import transformers.modeling_utils as modeling
from streamtune.models import folder, load
folder.usable_host_bytes = lambda: 0
check = load.check_loading_report
def cut(name, model, report):
    os.truncate(name + "/model.safetensors", 0)
    check(name, model, report)
load.check_loading_report = cut
load.load_model(sys.argv[1])
"""


@pytest.mark.full
def test_a_mapped_file_that_is_cut_leaves_a_trace(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MAPPED, str(folder / "base")], capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert "in load_model" in done.stderr


def test_ranks_of_a_machine_share_its_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would read a copy of its own at the same time; the pages of a mapped file are shared."""
    import transformers.modeling_utils as modeling

    size = (folder / "base/model.safetensors").stat().st_size
    monkeypatch.setattr(reading, "usable_host_bytes", lambda: 4 * size)
    for ranks, mapped in (("1", False), ("2", False), ("3", True), ("many", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        before = modeling.safe_open
        with reading.read_without_mmap(folder / "base"):
            assert (modeling.safe_open is before) == mapped


def test_libraries_are_put_back(folder: Path) -> None:
    import peft.utils.save_and_load as saving
    import transformers.modeling_utils as modeling

    before = modeling.safe_open, saving.safe_load_file
    with reading.read_without_mmap(folder / "base"):
        assert modeling.safe_open is not before[0]
        assert saving.safe_load_file is not before[1]
    assert (modeling.safe_open, saving.safe_load_file) == before


@pytest.mark.parametrize("name", ["x.safetensors", "config.json", "x.json"])
def test_a_pipe_in_the_folder_of_a_model_is_not_waited_for(folder: Path, name: str) -> None:
    path = folder / "base" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if name == "config.json":
        with pytest.raises(ArgumentError, match=r"config.json is a pipe"):
            load_model(str(folder / "base"))
    else:
        load_model(str(folder / "base"))
