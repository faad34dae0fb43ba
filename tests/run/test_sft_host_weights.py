"""``engine.weights: host`` and ``optim_in_backward`` from a recipe to a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamtune.run.samples import make_samples
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

COMMON: dict[str, Any] = {
    **RECIPE,
    "max_length": 160,
    "val_size": 5,
    "engine": FIXED,
    "max_steps": 6,
    "eval_steps": 3,
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "sample": {"prompt": "Add 3.", "max_new_tokens": 4},
}
HOST = {"engine": {**FIXED, "weights": "host"}}
NARROW = {"engine": {**FIXED, "weights": "host", "fetch_dtype": "bfloat16"}, "bf16": True}
KINDS: dict[str, dict[str, Any]] = {
    "host": HOST,
    "host, in the backward": {**HOST, "optim_in_backward": True},
    "device, in the backward": {"optim_in_backward": True},
    "optimizer on host": {"engine": {**FIXED, "optimizer": "host"}},
    "optimizer on host, in the backward": {"engine": {**FIXED, "optimizer": "host"}, "optim_in_backward": True},
    "weights and optimizer on host": {"engine": {**HOST["engine"], "optimizer": "host"}},
    "host, two levels": {"engine": {**HOST["engine"], "levels": 2}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 40)
    return tmp_path


def trained(folder: Path, name: str, *arguments: str, **more: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    write_recipe(folder, {**COMMON, "output_dir": name, **more})
    assert run(*arguments) == 0
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    shown = [[each.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")] for each in records]
    (file,) = (folder / name / "final").glob("*model.safetensors")
    return load_file(file), shown


@pytest.mark.parametrize("weights", ["device", "host"])
def test_the_last_samples_are_of_a_model_that_can_compute(
    folder: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """Without streaming, weights on the host would meet tokens on the accelerator."""
    streamed: list[bool] = []

    def watched(run: Any, *more: Any) -> Any:
        streamed.append(bool(run.handle.layers))
        return make_samples(run, *more)

    monkeypatch.setattr("streamtune.run.train.make_samples", watched)
    trained(folder, "run", engine={**FIXED, "weights": weights}, max_steps=1)
    assert streamed == [weights == "host"]
    assert len((folder / "run/samples.jsonl").read_text().splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_ordinary_one_to_the_same_bits(folder: Path, kind: str) -> None:
    want, shown = trained(folder, "device")
    got, same = trained(folder, "other", **KINDS[kind])
    assert same == shown
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.full
def test_without_clipping_there_is_one_backward_a_step(folder: Path) -> None:
    want, shown = trained(folder, "device", max_grad_norm=0.0)
    got, same = trained(folder, "other", **HOST, max_grad_norm=0.0, optim_in_backward=True)
    assert same == shown
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.full
def test_a_run_goes_on_where_it_stopped_wherever_the_weights_were(folder: Path) -> None:
    want, _ = trained(folder, "whole")
    trained(folder, "parts", **HOST, optim_in_backward=True, max_steps=2, lr_scheduler_type="constant")
    whole, _ = trained(folder, "constant", lr_scheduler_type="constant")
    more = {"lr_scheduler_type": "constant", "output_dir": "parts"}
    write_recipe(folder, {**COMMON, **more})
    assert run("--allow-change", "max_steps") == 0
    (file,) = (folder / "parts" / "final").glob("*model.safetensors")
    assert all(torch.equal(whole[name], x) for name, x in load_file(file).items())
    assert not all(torch.equal(whole[name], want[name]) for name in want)


@pytest.mark.full
def test_a_run_with_its_optimizer_in_the_backward_goes_on_with_it(folder: Path) -> None:
    more: dict[str, Any] = {"optim_in_backward": True, "lr_scheduler_type": "constant"}
    want, _ = trained(folder, "whole", **more)
    trained(folder, "parts", **more, max_steps=4)
    got, _ = trained(folder, "parts", "--allow-change", "max_steps", **more)
    assert all(torch.equal(want[name], got[name]) for name in want)


LAGGED = {"optim_in_backward": True, "clip_norm": "lagged", "max_grad_norm": 0.1, "lr_scheduler_type": "constant"}


@pytest.mark.full
def test_a_run_that_clips_by_the_last_norm_says_so_and_goes_on_to_the_same_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want, shown = trained(folder, "whole", **HOST, **LAGGED)
    assert "adamw, clipped by the previous step's gradient norm" in " ".join(capsys.readouterr().out.split())
    records = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in records if "loss" in each]
    assert steps[0]["clip_norm"] == steps[0]["grad_norm"]
    assert [each["clip_norm"] for each in steps[1:]] == [each["grad_norm"] for each in steps[:-1]]
    trained(folder, "parts", **HOST, **LAGGED, max_steps=4)
    got, same = trained(folder, "parts", "--allow-change", "max_steps", **HOST, **LAGGED)
    assert [each for each in same if each[1]] == [each for each in shown if each[1]]
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.full
def test_tiers_go_together(folder: Path) -> None:
    """Lagged clipping and bfloat16 moments work with every placement of weights, layer inputs and optimizer."""
    common: dict[str, Any] = {**LAGGED, "optim_states": "bfloat16"}
    disk = {**FIXED, "levels": 2, "offload": "disk", "offload_dir": str(folder)}
    want, shown = trained(folder, "device", **common)
    for name, engine in (
        ("optimizer", {**disk, "optimizer": "host"}),
        ("weights", {**disk, "weights": "host"}),
        ("both", {**disk, "weights": "host", "optimizer": "host"}),
    ):
        got, same = trained(folder, name, **common, engine=engine)
        assert same == shown
        assert all(torch.equal(want[key], got[key]) for key in want)


NARROW_STATES = {"optim_states": "bfloat16", "lr_scheduler_type": "constant"}


@pytest.mark.full
def test_states_in_bfloat16_are_the_same_wherever_weights_are_and_after_a_resume(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide, _ = trained(folder, "wide", lr_scheduler_type="constant")
    want, shown = trained(folder, "device", **NARROW_STATES)
    assert "adamw, states in bf16, rounded stochastically" in " ".join(capsys.readouterr().out.split())
    trained(folder, "other", **HOST, **NARROW_STATES, optim_in_backward=True, max_steps=4)
    (state,) = (folder / "other" / "checkpoints" / "step-000004").glob("optimizer-*.safetensors")
    saved = load_file(state)
    assert {x.dtype for name, x in saved.items() if "exp_avg" in name} == {torch.bfloat16}
    got, same = trained(folder, "other", "--allow-change", "max_steps", **HOST, **NARROW_STATES)
    assert [each for each in same if each[1]] == [each for each in shown if each[1]]
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert not all(torch.equal(want[name], wide[name]) for name in want)


@pytest.mark.full
@pytest.mark.parametrize("states", ["param", "bfloat16"])
def test_an_optimizer_on_the_host_goes_on_to_the_same_bits(folder: Path, states: str) -> None:
    more: dict[str, Any] = {"lr_scheduler_type": "constant", "optim_states": states}
    host: dict[str, Any] = {"engine": {**FIXED, "optimizer": "host"}, "optim_in_backward": True}
    want, _ = trained(folder, "whole", **more)
    trained(folder, "parts", **more, **host, max_steps=2)
    trained(folder, "parts", "--allow-change", "max_steps", **more, max_steps=4)  # and by the ordinary one between
    got, _ = trained(folder, "parts", "--allow-change", "max_steps", **more, **host)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.full
def test_a_plan_counts_one_backward_for_the_last_norm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    computed = []
    for more in ({"max_grad_norm": 0.0}, {"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "clip_norm": "lagged"}):
        write_recipe(folder, {**COMMON, **HOST, "optim_in_backward": True, **more})
        capsys.readouterr()
        assert run("--json", command="plan") == 0
        computed.append(json.loads(capsys.readouterr().out)["flops"]["computed"])
    assert computed[1] == 2 * computed[0] == 2 * computed[2]


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["host", "host, in the backward", "optimizer on host", "weights and optimizer on host"]
)
def test_adapters_over_weights_on_the_host(folder: Path, kind: str) -> None:
    lora = {"finetuning_type": "lora", "lora_r": 4}
    want, shown = trained(folder, "device", **lora)
    got, same = trained(folder, "other", **lora, **KINDS[kind])
    assert same == shown
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.full
def test_preferences_with_a_second_model_as_reference(folder: Path) -> None:
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(20):
            row = {"prompt": f"Add {number}.", "chosen": f"a + b + {number}", "rejected": "b"}
            file.write(json.dumps(row) + "\n")
    dpo = {"objective": "dpo", "val_size": 4}
    found = []
    for name, more in (("device", {}), ("other", HOST)):
        recipe = {**COMMON, **dpo, **more, "output_dir": name}
        recipe.pop("sample")
        write_recipe(folder, recipe)
        assert run(command="dpo") == 0
        (file_,) = (folder / name / "final").glob("*model.safetensors")
        found.append(load_file(file_))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.full
def test_weights_in_float32_fetched_in_bfloat16_learn(folder: Path) -> None:
    engine = {**HOST["engine"], "fetch_dtype": "bfloat16"}
    weights, shown = trained(folder, "narrow", engine=engine, optim_in_backward=True, max_steps=20)
    losses = [loss for _, loss, _, _ in shown if loss is not None]
    assert losses[-1] < 0.8 * losses[0]
    assert {x.dtype for x in weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("more", "what", "fix"),
    [
        ({**HOST, "deepspeed": "zero2"}, "'engine.weights: host' needs a single device", "zero3_offload"),
        ({**HOST, "finetuning_type": "qlora"}, "does not move quantised weights", "finetuning_type: lora"),
        (NARROW, "weights on the device are bfloat16 already", "bf16: false"),
        ({"engine": {**FIXED, "optimizer": "host"}, "deepspeed": "zero2"}, "engine.optimizer' is for", "zero3_offload"),
        ({"engine": {**HOST["engine"], "optimizer": "device"}}, "optimizer: device' updates", "optimizer: auto"),
        ({"engine": {"fetch_dtype": "bfloat16"}}, "needs 'weights: host'", "weights: host"),
        (
            {"engine": {**FIXED, "optimizer": "host", "host_memory": "1KiB"}},
            "the host's memory is too small for the optimizer",
            "more memory",
        ),
        ({"optim_states": "bfloat16", "fsdp": True}, "'fsdp' shards them in its own dtype", "delete the line"),
        ({"optim_in_backward": True, "fsdp": True}, "'optim_in_backward' needs a single device", "delete the line"),
        (
            {"optim_in_backward": True, "on_nan": "skip", "max_grad_norm": 0.0},
            "'on_nan: skip' drops a step before the optimizer runs",
            "max_grad_norm: 1.0",
        ),
        ({"optim_in_backward": True, "on_nan": "skip", "clip_norm": "lagged"}, "'on_nan: skip'", "clip_norm: exact"),
        ({"clip_norm": "lagged"}, "'clip_norm: lagged' needs 'optim_in_backward: true'", "optim_in_backward: true"),
        (
            {"optim_in_backward": True, "clip_norm": "lagged", "max_grad_norm": 0.0},
            "'max_grad_norm: 0' disables it",
            "max_grad_norm: 1.0",
        ),
        (
            {"engine": {**HOST["engine"], "host_memory": "1KiB"}},
            "the host's memory is too small for the weights",
            "optim_in_backward: true",
        ),
        ({"engine": {**FIXED, "host_memory": "100TiB"}}, "'host_memory: 100TiB' is more than the", "--host-memory"),
    ],
)  # fmt: skip
def test_what_it_excludes_is_refused_with_its_line(
    folder: Path, more: dict[str, Any], what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(folder, {**COMMON, **more})
    assert run() == 2
    said = " ".join(capsys.readouterr().err.split())
    assert what in said
    assert fix in said
    assert "tiny.yaml:" in said
