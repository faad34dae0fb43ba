"""``streamtune teach``, and ``sft`` with its file: content, training, errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamtune.cli import main
from streamtune.errors import ArgumentError, RecipeError, StorageError
from streamtune.plan.simulate.simulate import simulate
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.device import make_schedule
from streamtune.run.model import make_meta_model
from streamtune.run.plan import recipe_workload
from streamtune.tasks.sft import Batches
from streamtune.tasks.teacher_file import TeacherFileWriter, lock_output, row_hash
from tests.engine.test_disk import largest_file
from tests.run.test_sft_losses import COMMON, make_teacher, records, write_weighed
from tests.sft_kit import run, write_recipe

K = 12
RECIPE: dict[str, Any] = {**COMMON, "teacher": "taught.safetensors", "per_device_train_batch_size": 3}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with rows, a teacher in ``taught/final``, and its top-k tokens in ``taught.safetensors``."""
    monkeypatch.chdir(tmp_path)
    write_weighed(tmp_path, lambda number: {})
    make_teacher(tmp_path)
    return tmp_path


def teach(folder: Path, *arguments: str, **keys: Any) -> int:
    write_recipe(folder, {**COMMON, "teacher": "taught/final", **keys})
    with pytest.raises(SystemExit) as left:
        main(["teach", "tiny.yaml", "taught.safetensors", "--top-k", str(K), *arguments])
    return int(left.value.code or 0)


def test_the_file_has_the_likeliest_tokens_of_each_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens equal the top-k of the full logits of each row; equal rows are stored once."""
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text() * 2)
    assert teach(folder, kd_temperature=2.0) == 0
    assert "12 rows" in capsys.readouterr().out
    found = load_file("taught.safetensors")
    built = build_run(load_recipe(write_recipe(folder, {**RECIPE, "kd_temperature": 2.0}), []))
    teacher = AutoModelForCausalLM.from_pretrained("taught/final")
    assert found["starts"].tolist() == sorted(found["starts"].tolist())
    assert len(found["ids"]) == found["starts"][-1] == len(found["logprobs"])
    keys = {key.numpy().tobytes(): number for number, key in enumerate(found["keys"])}
    assert len(keys) == 12
    assert len(built.prepared.training) == 24
    for example in built.prepared.training:
        number = keys[row_hash(example)]
        own = slice(int(found["starts"][number]), int(found["starts"][number + 1]))
        kept = torch.tensor(example.labels)[1:] != -100
        with torch.no_grad():
            logits = teacher(torch.tensor(example.input_ids)[None].long()).logits[0, :-1][kept].double()
        want = (logits[:, : len(built.tokenizer)] / 2.0).log_softmax(-1)
        ids, logprobs = found["ids"][own].long(), found["logprobs"][own]
        torch.testing.assert_close(want.gather(-1, ids), logprobs[:, :-1].double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(want.topk(K).values, logprobs[:, :-1].double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(ids)), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("layout", [{}, {"packing": True}, {"batching": "tokens", "tokens_per_batch": 320}], ids=str)
def test_batches_have_what_was_said_of_their_own_targets(folder: Path, layout: dict[str, Any]) -> None:
    assert teach(folder) == 0
    built = build_run(load_recipe(write_recipe(folder, {**RECIPE, **layout}), []))
    batches = built.batches
    assert isinstance(batches, Batches)
    found, keys = load_file("taught.safetensors"), {}
    for number, key in enumerate(found["keys"]):
        keys[key.numpy().tobytes()] = number
    by_origin = {
        example.origin: found["ids"][found["starts"][number] : found["starts"][number + 1]]
        for example in built.prepared.training
        for number in [keys[row_hash(example)]]
    }
    for unit in range(batches.num_training_units):
        batch = batches.training_batch([unit])
        assert batch.top_k is not None
        want = torch.cat([by_origin[origin] for origin in batch.origins])
        kept = batch.shift_labels != -100
        assert torch.equal(batch.top_k.ids_Kk[batch.top_k.index_BT[kept]], want)


@pytest.mark.full
def test_learns_from_the_file_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert teach(folder) == 0
    keys = {"kd_divergence": "jsd", "kd_hard_share": 0.25, "packing": True, "gradient_accumulation_steps": 2}
    write_recipe(folder, {**RECIPE, **keys, "num_train_epochs": 3, "output_dir": "out"})
    settings = ("--set", "save_steps=1", "--set", "save_total_limit=9", "--output-dir", "split")
    curves = []
    for more in ((), ("--resume", "split/checkpoints/step-000002")):
        assert run(*settings, *more) == 0
        curves.append(
            [tuple(each.get(key) for key in ("step", "loss", "kl", "grad_norm")) for each in records("split")]
        )
    assert len(curves[0]) >= 3
    assert curves[0] == curves[1]
    assert 0 < curves[0][-1][2] < curves[0][0][2]
    capsys.readouterr()
    assert run("--json", "--dtype", "float32", "--length", "48", command="verify") == 0
    assert '"exact": true' in capsys.readouterr().out
    recipe = load_recipe("tiny.yaml", []).recipe
    workload = recipe_workload(recipe, make_meta_model(recipe, torch.device("cpu")), 160, torch.device("cpu"))
    bytes_of_targets = 160 * recipe.per_device_train_batch_size * (4 * K + 4 * (K + 1) + 8)
    assert simulate(workload, make_schedule(recipe.engine)).host_terms["teacher"] == bytes_of_targets
    assert workload.reference_bytes == 0
    Path("taught.safetensors").rename("before.safetensors")
    assert teach(folder, "--top-k", "9") == 0
    write_recipe(folder, {**RECIPE, **keys, "num_train_epochs": 3, "output_dir": "out"})
    assert run(*settings, "--resume", "split/checkpoints/step-000002") == 2
    assert "the files of the reference model, or the file of a teacher changed (reference)" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.full
def test_a_small_file_is_near_the_teacher_itself(folder: Path) -> None:
    """With nearly all tokens the divergence equals the full one; the head has more rows than there are tokens."""
    write_recipe(folder, {**COMMON, "teacher": "taught/final"})
    assert run("--output-dir", "model") == 0
    with pytest.raises(SystemExit) as left:
        main(["teach", "tiny.yaml", "taught.safetensors", "--top-k", "250"])
    assert not left.value.code
    write_recipe(folder, {**COMMON, "teacher": "taught.safetensors"})
    assert run("--output-dir", "file") == 0
    for one, other in zip(records("model"), records("file"), strict=True):
        assert one["kl"] == pytest.approx(other["kl"], rel=0.05)


@pytest.mark.full
def test_another_file_is_refused(folder: Path) -> None:
    assert teach(folder) == 0

    def refusal(**keys: Any) -> str:
        with pytest.raises(ArgumentError) as caught:
            build_run(load_recipe(write_recipe(folder, {**RECIPE, **keys}), []))
        assert "tiny.yaml" in caught.value.where
        return f"{caught.value.what} {caught.value.fix}"

    assert "has no entry for the row" in refusal(train_on="all")
    assert "written with another tokenizer" in refusal(tokenizer={"train": {"vocab_size": 262}})
    assert "was written with kd_temperature 1" in refusal(kd_temperature=2.0)
    assert "there is no file" in refusal(teacher="nowhere.safetensors")
    weights = next(Path("taught/final").glob("*.safetensors"))
    assert "was not written by `streamtune teach`" in refusal(teacher=str(weights))
    Path("broken.safetensors").write_bytes(b"no header")
    assert "cannot be read" in refusal(teacher="broken.safetensors")


def place_of(tensor: str) -> tuple[int, int]:
    """Return start and end byte of a tensor in the file."""
    content = Path("taught.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    start, stop = json.loads(content[8 : 8 + size])[tensor]["data_offsets"]
    return 8 + size + start, 8 + size + stop


@pytest.mark.full
def test_a_file_that_changed_is_refused_at_a_start_and_stops_a_run(folder: Path) -> None:
    assert teach(folder) == 0
    file = Path("taught.safetensors")
    whole = file.read_bytes()
    loaded = load_recipe(write_recipe(folder, RECIPE), [])

    def refusal() -> str:
        with pytest.raises(ArgumentError) as caught:
            build_run(loaded)
        file.write_bytes(whole)
        return f"{caught.value.what} {caught.value.fix}"

    for tensor in ("ids", "logprobs", "starts", "keys"):
        start, stop = place_of(tensor)
        damaged = bytearray(whole)
        damaged[(start + stop) // 2 & ~3] ^= 1
        file.write_bytes(damaged)
        assert "does not match its hash" in refusal(), tensor
    start, stop = place_of("ids")
    file.write_bytes(whole[:start] + bytes(stop - start) + whole[stop:])
    assert "does not match its hash" in refusal()
    file.write_bytes(whole.replace(b'"temperature": "1.0"', b'"temperature": "1.5"'))
    assert "was written with kd_temperature 1.5" in refusal()
    file.write_bytes(whole.replace(b'"tokenizer": "', b'"tokeniser": "'))
    assert "its metadata has no 'tokenizer'" in refusal()
    file.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refusal()

    batches = build_run(loaded).batches
    assert isinstance(batches, Batches)
    batches.training_batch([0])
    with file.open("r+b") as opened:
        opened.seek(place_of("logprobs")[0])
        opened.write(bytes(16))
    with pytest.raises(StorageError, match=r"taught\.safetensors was changed during the run"):
        batches.training_batch([0])
    os.truncate(file, 5000)
    with pytest.raises(StorageError, match=r"taught\.safetensors was truncated from .* to 4\.88 KiB"):
        batches.training_batch([0])


def test_one_process_writes_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_output(folder / "taught.safetensors") as partial:
        partial.write_text("of the first")
        assert teach(folder) == 2
        assert "another process is writing taught.safetensors" in " ".join(capsys.readouterr().err.split())
    assert not list(folder.glob("*taught.safetensors*")), "nothing is left"
    (folder / ".taught.safetensors.writing").mkdir()
    (folder / ".taught.safetensors.writing" / "rows").write_text("of a process that was killed")
    assert teach(folder) == 0
    assert [path.name for path in folder.iterdir() if "taught.safetensors" in path.name] == ["taught.safetensors"]
    before = Path("taught.safetensors").read_bytes()
    assert teach(folder) == 2
    assert "already exists" in " ".join(capsys.readouterr().err.split())
    assert Path("taught.safetensors").read_bytes() == before


def test_a_name_that_another_program_took_meanwhile_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "taught.safetensors"

    def write() -> None:
        with lock_output(out) as partial, TeacherFileWriter(partial, [], {"k": "8"}).renamed_on_success(out):
            out.write_text("another program's")

    with pytest.raises(ArgumentError, match=r"another program has created .* meanwhile"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["taught.safetensors"]
    assert out.read_text() == "another program's"


@pytest.mark.full
def test_a_disk_without_room_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    with largest_file(4096), pytest.raises(StorageError, match="no room for") as caught:
        TeacherFileWriter(tmp_path / "taught.safetensors", [1000] * 4, {"k": "8"})
    assert "--top-k" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_teach_refuses_what_it_cannot_write(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for keys, arguments, what in (
        ({"reasoning": "per_turn"}, (), "'reasoning: per_turn' makes several rows of a conversation"),
        ({"teacher": None}, (), "names no teacher model"),
        ({}, ("--top-k", "5000"), "--top-k must be below the teacher's"),
    ):
        recipe = {
            key: value for key, value in {**COMMON, "teacher": "taught/final", **keys}.items() if value is not None
        }
        write_recipe(folder, recipe)
        with pytest.raises(SystemExit) as left:
            main(["teach", "tiny.yaml", "taught.safetensors", *arguments])
        assert left.value.code == 2
        assert what in " ".join(capsys.readouterr().err.split())
        assert not list(folder.glob("*taught.safetensors*"))


NAMED: dict[str, Any] = {"model": None, "tokenizer": None, "model_name_or_path": "taught/final"}


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ({"batching": "buckets", "tokens_per_batch": 320}, "'batching: buckets' cuts rows into pieces"),
        (
            {"streaming": True, "max_steps": 2, "overlength": "drop", "num_train_epochs": None, **NAMED},
            "'streaming: true' reads rows only during training",
        ),
        ({"reasoning": "per_turn"}, "makes several rows of a conversation"),
        ({"objective": "grpo", "loss_type": "gkd"}, "'teacher' is a file"),
    ],
    ids=str,
)
def test_refused(tmp_path: Path, lines: dict[str, Any], what: str) -> None:
    recipe = {**COMMON, "teacher": "taught.safetensors", **lines}
    path = write_recipe(tmp_path, {key: value for key, value in recipe.items() if value is not None})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [])
    assert what in f"{caught.value.what} {caught.value.fix}"
