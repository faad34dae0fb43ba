"""A model is found by its run, a checkpoint or a folder; what is not there, damaged or changed is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune.errors import StreamTuneError
from streamtune.programs.export.export import ExportOptions, export_model
from streamtune.programs.export.source import find_trained, load_trained

from .cases import adapt, ids, make_base, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path, "llama", "lora")
    return tmp_path


def refused(folder: Path, *texts: str, **options: Any) -> None:
    with pytest.raises(StreamTuneError) as error:
        export_model(str(folder), folder.parent / "out", ExportOptions(**options))
    told = f"{error.value.what} {error.value.where} {error.value.fix}"
    assert error.value.exit_code == 2
    for text in texts:
        assert text in told
    assert not (folder.parent / "out").exists()


def test_by_run_and_by_folder(folder: Path) -> None:
    for given in (folder / "run", folder / "run/final"):
        found = find_trained(str(given))
        assert (found.folder, found.adapters, found.base) == (str(folder / "run/final"), True, str(folder / "base"))
        assert found.run is not None
        assert found.run.path.resolve() == (folder / "run").resolve()
    whole = find_trained(str(folder / "base"))
    assert not whole.adapters
    assert whole.run is None
    assert whole.base is None


def test_adapters_on_the_base_that_is_named(folder: Path) -> None:
    (folder / "base").rename(folder / "moved")
    refused(folder / "run", "this folder does not exist", "--base PATH")
    model, _ = load_trained(find_trained(str(folder / "run")), base=str(folder / "moved"))
    with torch.no_grad():
        want = adapt(make_base("llama"))(ids()).logits
        assert torch.allclose(model(ids()).logits, want, atol=1e-5)


def test_a_base_that_has_changed_is_refused(folder: Path) -> None:
    from streamtune.models import fingerprint_model

    record = json.loads((folder / "run/run.json").read_text())
    record["files"] = {"base": fingerprint_model(str(folder / "base"))}
    (folder / "run/run.json").write_text(json.dumps(record))
    load_trained(find_trained(str(folder / "run")))
    other = make_base("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    other.save_pretrained(folder / "base")
    refused(folder / "run", "have changed since the adapters")


@pytest.mark.full
def test_another_base_that_is_named_is_said_to_be_another(folder: Path) -> None:
    from streamtune.models import fingerprint_model

    record = json.loads((folder / "run/run.json").read_text())
    record["files"] = {"base": fingerprint_model(str(folder / "base"))}
    (folder / "run/run.json").write_text(json.dumps(record))
    shutil.copytree(folder / "base", folder / "moved")
    other = make_base("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    shutil.copytree(folder / "base", folder / "other")
    other.save_pretrained(folder / "other")
    notes: list[str] = []
    report = export_model(
        str(folder / "run"), folder / "a", ExportOptions(base=str(folder / "moved")), notify=notes.append
    )
    assert report.trained_base is True
    assert not any("a different model" in note for note in notes)
    report = export_model(
        str(folder / "run"), folder / "b", ExportOptions(base=str(folder / "other")), notify=notes.append
    )
    assert report.trained_base is False
    assert any("is not the base model that these adapters were trained on" in note for note in notes)


def test_a_damaged_file_of_adapters_is_named(folder: Path) -> None:
    file = folder / "run/final/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    refused(folder / "run", str(file), "is damaged", "--checkpoint")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_on_embeddings_and_heads(tmp_path: Path, target: str) -> None:
    """Peft writes the weights of such modules beside the adapters."""
    from peft import LoraConfig, get_peft_model

    base = make_base("llama")
    base.save_pretrained(tmp_path / "base")
    write_run(tmp_path / "x", "llama", "lora")  # for its tokenizer
    for file in (tmp_path / "x/run/final").glob("*token*"):
        shutil.copy(file, tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", target], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(tmp_path / "adapters", save_embedding_layers=True)
    with torch.no_grad():
        want = adapted.eval()(ids()).logits
    report = export_model(str(tmp_path / "adapters"), tmp_path / "out", ExportOptions(base=str(tmp_path / "base")))
    assert report.check is not None
    assert report.check.passes
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.allclose(merged(ids()).logits, want, atol=1e-5)


def test_adapters_of_another_model_are_refused(folder: Path) -> None:
    make_base("gpt_neox").save_pretrained(folder / "other")
    with pytest.raises((StreamTuneError, ValueError)):
        load_trained(find_trained(str(folder / "run")), base=str(folder / "other"))


def test_what_is_no_model_is_refused(folder: Path) -> None:
    refused(folder / "ran", "there is no folder", "did you mean 'run'?")
    (folder / "empty").mkdir()
    refused(folder / "empty", "is neither a run nor a model")
    refused(folder / "run", "has no checkpoint step-000003", checkpoint="3")
    refused(folder / "base", "is not a run", checkpoint="3")
    shutil.rmtree(folder / "run/final")
    refused(folder / "run", "has no model yet")


def test_options_that_do_not_go_together(folder: Path) -> None:
    refused(folder / "base", "--no-merge needs adapters", merge=False)
    refused(folder / "run", "--dtype: unknown dtype 'int4'", dtype="int4")
    refused(folder / "run", "--no-merge cannot be used with --dtype, --gguf or --onto", merge=False, dtype="bfloat16")


def test_code_that_comes_with_a_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "base/config.json").read_text())
    (folder / "base/config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "m.M"}}))
    refused(folder / "base", "trust_remote_code")


def test_adapters_on_adapters_of_another_program(folder: Path) -> None:
    settings = json.loads((folder / "run/final/adapter_config.json").read_text())
    shutil.copytree(folder / "run/final", folder / "second")
    settings["base_model_name_or_path"] = str(folder / "run/final")
    (folder / "second/adapter_config.json").write_text(json.dumps(settings))
    refused(folder / "second", "is itself a folder of adapters", "streamtune export")


def test_apart_from_their_base(folder: Path) -> None:
    report = export_model(str(folder / "run"), folder / "apart", ExportOptions(merge=False))
    assert report.kind == "adapters"
    assert report.check is not None
    assert report.check.largest == 0
    settings = json.loads((folder / "apart/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder / "base")
    assert not list(folder.glob("apart/model*"))


@pytest.mark.full
def test_onto_the_base_before_it_was_quantised(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    write_run(tmp_path, "llama", "nf4")
    notes: list[str] = []
    report = export_model(str(tmp_path / "run"), tmp_path / "out", ExportOptions(onto="original"), notify=notes.append)
    assert report.onto == "original"
    assert "not the trained model" in report.weights
    assert any("a different model, to which the losses of the run do not apply" in note for note in notes)


def test_damaged_records_are_named(folder: Path) -> None:
    final = folder / "run/final"
    settings = (final / "adapter_config.json").read_text()
    (final / "adapter_config.json").write_text("{")
    refused(folder / "run", "adapter_config.json cannot be read", "--checkpoint")
    (final / "adapter_config.json").write_text(settings)
    make_base("llama", hidden_size=64, head_dim=16).save_pretrained(folder / "wider")
    with pytest.raises(StreamTuneError, match="size mismatch for base_model") as error:
        export_model(str(folder / "run"), folder / "out", ExportOptions(base=str(folder / "wider")))
    assert len(error.value.what.splitlines()) == 1
    (final / "adapter_model.safetensors").unlink()
    refused(folder / "run", "has no adapter_model.safetensors")
    (folder / "run/run.json").write_text("{")
    refused(folder / "run", "run.json cannot be read", "export the copy")


def test_places_that_cannot_be_written(folder: Path) -> None:
    with pytest.raises(StreamTuneError, match="Not a directory") as error:
        export_model(str(folder / "run"), folder / "run/run.json/out", ExportOptions(check=False))
    assert error.value.fix == "give a writable folder"
    (folder / "there").mkdir()
    (folder / "link").symlink_to(folder / "there")
    with pytest.raises(StreamTuneError, match="is a link"):
        export_model(str(folder / "run"), folder / "link", ExportOptions())
