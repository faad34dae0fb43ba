"""What a run reads again is not what it was: refused by name, and gone on with where that is allowed by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from streamtune.programs.export.source import find_trained
from streamtune.train.checkpoint import open_checkpoint, read_manifest, write_manifest
from tests.faults.kit import SFT, Zygotes, write_sft
from tests.faults.test_starts import tree

LORA = {"finetuning_type": "lora", "lora_r": 2, "model": None, "tokenizer": None}
SHORT = {"max_steps": 4, "save_steps": 2, "eval_steps": 0, "val_size": 0}


@pytest.fixture(scope="module")
def base(zygotes: Zygotes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a folder."""
    folder = tmp_path_factory.mktemp("base")
    write_sft(folder, **{**SHORT, "max_steps": 1})
    done = zygotes.run(folder)
    assert done.status == 0, done.output
    return folder / "runs/tiny/final"


def change_weights(folder: Path) -> None:
    """One number of one tensor, in a file of the same size."""
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def interrupt(run: Path) -> None:
    """As if it had been stopped after its second step."""
    shutil.rmtree(run / "checkpoints/step-000004")
    shutil.rmtree(run / "final")


def write(folder: Path, **recipe: Any) -> None:
    """A recipe beside rows that are there."""
    kept = {key: value for key, value in {**SFT, **SHORT, **recipe}.items() if value is not None}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))


def refused_then_allowed(zygotes: Zygotes, folder: Path, key: str, command: str = "sft") -> None:
    """A start is refused by ``key`` and changes nothing; with that key allowed the run goes on."""
    run = folder / "runs/tiny"
    before = tree(run)
    for more in ((), ("--dry-run",), ("--allow-change", "data")):
        done = zygotes.run(folder, *more, command=command)
        assert done.status == 2, done.output
        told = " ".join(done.output.split())
        assert f" changed ({key})" in told
        assert f"--allow-change {key}" in told
    after = tree(run)
    assert after.pop(".lock")
    before.pop(".lock")
    assert after == before
    done = zygotes.run(folder, "--allow-change", key, command=command)
    assert done.status == 0, done.output
    assert f" changed ({key})" in " ".join(done.output.split())
    assert (run / "final").is_dir()


@pytest.mark.full
def test_adapters_go_on_over_the_base_they_were_trained_on(zygotes: Zygotes, base: Path, tmp_path: Path) -> None:
    write_sft(tmp_path)
    shutil.copytree(base, tmp_path / "model")
    write(tmp_path, **LORA, model_name_or_path="model")
    assert zygotes.run(tmp_path).status == 0
    interrupt(tmp_path / "runs/tiny")
    kept = shutil.copytree(tmp_path / "runs", tmp_path / "kept")
    (tmp_path / "model/README.md").write_text("no part of the model")
    assert zygotes.run(tmp_path).status == 0
    shutil.rmtree(tmp_path / "runs")
    shutil.copytree(kept, tmp_path / "runs")
    change_weights(tmp_path / "model")
    refused_then_allowed(zygotes, tmp_path, "base")

    # Started before there were fingerprints: goes on, and says what is not known.
    shutil.rmtree(tmp_path / "runs")
    shutil.copytree(kept, tmp_path / "runs")
    forget_files(tmp_path / "runs/tiny")
    done = zygotes.run(tmp_path)
    assert done.status == 0, done.output
    assert "saved no fingerprints; it is unknown whether these files changed: base" in " ".join(done.output.split())


def forget_files(run: Path) -> None:
    """Make it a run of before there were fingerprints."""
    for path in (run / "run.json", *run.glob("checkpoints/*/state.json")):
        found = json.loads(path.read_text())
        identity = found.get("identity", found)
        assert identity.pop("files")
        del identity["tokenizer_files"]
        path.write_text(json.dumps(found))
    for folder in run.glob("checkpoints/*"):
        manifest = read_manifest(folder)
        (folder / "manifest.json").unlink()
        write_manifest(folder, run=manifest.run, step=manifest.step, metric=manifest.metric)
        open_checkpoint(folder)


@pytest.mark.full
def test_a_run_of_all_weights_does_not_read_its_base_again(zygotes: Zygotes, base: Path, tmp_path: Path) -> None:
    """The weights are the checkpoint's: another base, or none, is no reason to stop. Its tokenizer's is a note."""
    write_sft(tmp_path)
    shutil.copytree(base, tmp_path / "model")
    write(tmp_path, model=None, tokenizer=None, model_name_or_path="model")
    assert zygotes.run(tmp_path).status == 0
    interrupt(tmp_path / "runs/tiny")
    before = json.loads((tmp_path / "runs/tiny/run.json").read_text())["files"]
    change_weights(tmp_path / "model")
    with (tmp_path / "model/chat_template.jinja").open("a") as file:
        file.write("{# another #}")
    done = zygotes.run(tmp_path)
    assert done.status == 0, done.output
    assert "the run keeps the tokenizer of its checkpoint" in " ".join(done.output.split())
    assert json.loads((tmp_path / "runs/tiny/run.json").read_text())["files"] == before


@pytest.mark.full
def test_a_reference_is_the_one_it_was(zygotes: Zygotes, base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Add {n}.", "chosen": f"{n}+1", "rejected": f"{n}-1"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(base, tmp_path / "model")
    shutil.copytree(base, tmp_path / "other")
    common = {"model": None, "tokenizer": None, "model_name_or_path": "model", "objective": "dpo"}
    write(tmp_path, **common, ref_model_name_or_path="other")
    done = zygotes.run(tmp_path, command="dpo")
    assert done.status == 0, done.output
    interrupt(tmp_path / "runs/tiny")
    change_weights(tmp_path / "other")
    refused_then_allowed(zygotes, tmp_path, "reference", command="dpo")

    shutil.rmtree(tmp_path / "runs")
    write(tmp_path, **common)  # the base is the reference, and is read again though all weights are trained
    assert zygotes.run(tmp_path, command="dpo").status == 0
    interrupt(tmp_path / "runs/tiny")
    change_weights(tmp_path / "model")
    refused_then_allowed(zygotes, tmp_path, "base", command="dpo")


@pytest.mark.full
def test_rewards_are_those_they_were(zygotes: Zygotes, tmp_path: Path) -> None:
    """The file of a function, or one it imports from beside it."""
    from tests.faults.test_resume import write_grpo

    write_grpo(tmp_path, max_steps=4, save_steps=2, save_total_limit=5)
    source = (tmp_path / "rewards.py").read_text()
    (tmp_path / "scale.py").write_text("SCALE = 1.0\n\n\ndef scaled(x):\n    return SCALE * x\n")
    (tmp_path / "rewards.py").write_text(
        "import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\nfrom scale import scaled\n"
        + source
    )
    done = zygotes.run(tmp_path, command="grpo")
    assert done.status == 0, done.output
    run = tmp_path / "runs/tiny"
    kept = shutil.copytree(run, tmp_path / "kept")
    for changed, text in (("scale.py", "SCALE = 1.0"), ("rewards.py", "1.0 - sum")):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        interrupt(run)
        file = tmp_path / changed
        file.write_text(file.read_text().replace(text, text.replace("1.0", "2.0")))
        refused_then_allowed(zygotes, tmp_path, "rewards", command="grpo")
        file.write_text(file.read_text().replace(text.replace("1.0", "2.0"), text))


def rewritten(checkpoint: Path, change: Callable[[Path], None]) -> None:
    """Change a file of a checkpoint, and write a manifest that fits."""
    change(checkpoint)
    manifest = read_manifest(checkpoint)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, run=manifest.run, step=manifest.step, metric=manifest.metric)


def of_state(**values: Any) -> Callable[[Path], None]:
    """Change entries of ``state.json``; a name with two underscores is of an entry's own."""

    def change(checkpoint: Path) -> None:
        state = json.loads((checkpoint / "state.json").read_text())
        for name, value in values.items():
            entry, _, key = name.partition("__")
            if key:
                state[entry][key] = value
            else:
                state[entry] = value
        (checkpoint / "state.json").write_text(json.dumps(state))

    return change


def of_tensors(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / file)
        change(tensors)
        save_file(tensors, checkpoint / file)

    return rewrite


HOSTILE: dict[str, Callable[[Path], None]] = {
    "before the data": of_state(stream__position=-5),
    "behind the data": of_state(stream__position=10**9),
    "before the first epoch": of_state(stream__epoch=-1),
    "no position": of_state(stream={}),
    "generators of nothing": of_state(rng={}),
    "a generator of floats": of_state(rng__python=[3, [0.5], None]),
    "a progress of another kind": of_state(progressed={"steps": 2}),
    "a short generator": of_tensors("rng.safetensors", lambda x: x.update(cpu=x["cpu"][:5].clone())),
    "a moment less": of_tensors(
        "optimizer-00001.safetensors", lambda x: x.pop(next(name for name in x if name.endswith("/exp_avg")))
    ),
    "a smaller moment": of_tensors(
        "optimizer-00001.safetensors",
        lambda x: x.update({"model.embed_tokens.weight/exp_avg": x["model.embed_tokens.weight/exp_avg"][:1].clone()}),
    ),
    "an index of nothing": lambda path: (path / "slices.json").write_text('{"a/b": {"shape": 3}}') and None,
}


@pytest.mark.slow
def test_a_hostile_checkpoint_is_one_error(zygotes: Zygotes, tmp_path: Path) -> None:
    """Its manifest fits, so it is somebody's work: no crash, and no other training."""
    write_sft(tmp_path, **SHORT)
    assert zygotes.run(tmp_path).status == 0
    interrupt(tmp_path / "runs/tiny")
    kept = shutil.copytree(tmp_path / "runs", tmp_path / "kept")
    for name, change in HOSTILE.items():
        shutil.rmtree(tmp_path / "runs")
        shutil.copytree(kept, tmp_path / "runs")
        rewritten(tmp_path / "runs/tiny/checkpoints/step-000002", change)
        done = zygotes.run(tmp_path)
        told = " ".join(done.output.split())
        assert done.status in (1, 2), (name, told)
        assert "error: " in told, (name, told)
        assert "checkpoint" in told, (name, told)
        assert not any(word in told for word in ("this is a bug", "Traceback", "Fatal")), (name, told)


@pytest.mark.full
def test_a_checkpoint_is_exported_as_it_was_trained(zygotes: Zygotes, base: Path, tmp_path: Path) -> None:
    """The run went on over another base, and with other positions: its first checkpoint is of the first ones."""
    write_sft(tmp_path)
    shutil.copytree(base, tmp_path / "model")
    write(tmp_path, **LORA, model_name_or_path="model", max_steps=2)
    assert zygotes.run(tmp_path).status == 0
    export = [sys.executable, "-m", "streamtune", "export", "runs/tiny"]

    def exported(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*export, *more], cwd=tmp_path, capture_output=True, text=True, check=False)

    change_weights(tmp_path / "model")
    write(tmp_path, **LORA, model_name_or_path="model", rope_theta=777.0)
    allowed = ("--allow-change", "base", "--allow-change", "max_steps", "--allow-change", "rope_theta")
    assert zygotes.run(tmp_path, *allowed).status == 0
    done = exported("two", "--checkpoint", "2")
    assert done.returncode == 2, done.stderr
    assert "have changed since" in " ".join(done.stderr.split())
    assert exported("four", "--checkpoint", "4").returncode == 0
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(base, tmp_path / "model")
    done = exported("two", "--checkpoint", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two/config.json").read_text())["rope_parameters"]["rope_theta"] == 10_000.0
    assert json.loads((tmp_path / "four/config.json").read_text())["rope_parameters"]["rope_theta"] == 777.0


@pytest.mark.full
def test_a_final_model_that_the_run_has_left_behind_is_said_to_be_so(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path, **SHORT)
    assert zygotes.run(tmp_path).status == 0
    run = tmp_path / "runs/tiny"
    found, notes = find_trained(str(run), notify=(notes := list[str]()).append), notes
    assert found.folder == str(run / "final")
    assert not notes
    kept = shutil.copytree(run / "final", tmp_path / "final")
    write(tmp_path, max_steps=8)
    assert zygotes.run(tmp_path, "--allow-change", "max_steps").status == 0
    shutil.rmtree(run / "final")  # as if it had been killed in step 7
    shutil.rmtree(run / "checkpoints/step-000008")
    shutil.move(kept, run / "final")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(line for line in lines if '"step": 8' not in line))
    find_trained(str(run), notify=notes.append)
    final = run / "final"
    assert notes == [
        f"{final} is the model after step 4, but the run has a newer checkpoint; to use it, add --checkpoint 6"
    ]


def test_an_unknown_key_is_answered_with_those_there_are(zygotes: Zygotes, tmp_path: Path) -> None:
    write_sft(tmp_path)
    done = zygotes.run(tmp_path, "--allow-change", "zzz")
    assert done.status == 2
    assert "data, base, adapter, start, reference, rewards" in " ".join(done.output.split())
    done = zygotes.run(tmp_path, "--help")
    assert done.status == 0
    shown = " ".join(done.output.replace("│", " ").split())
    named = (
        "data: the rows. base: files of model_name_or_path, which may be adapters. adapter: files of the base model of "
        "these adapters. start: files of adapter_name_or_path. reference: files of the reference model, or a teacher's "
        "file. rewards: source code of reward functions."
    )
    assert named in shown.replace("`", "")
