"""What ranks save, any other layout of ranks goes on with: one group of ranks runs a table of runs (``state_cases``).

Every checkpoint is read back bit for bit, whoever wrote it and whoever reads it; on the layout that wrote it the run
that goes on ends with the very weights of the run that was never interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from streamtune.train import SliceReader
from tests.sft_kit import FIXED, QWEN3, RECIPE, write_recipe, write_rows

from .rank_group import run_ranks

Cases = list[dict[str, Any]]
ENGINES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]
SHARED = ["zero3", "fsdp"]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": "bfloat16"},
    "dpo": {"sample": {"prompt": "Add 3.", "max_new_tokens": 5}},
    "lora": {"finetuning_type": "lora", "lora_dropout": 0.2, "lora_r": 4},
    "tied": {"model.init.tie_word_embeddings": True},
    "waiting": {"save_async": False},
    "dropout": {"model.init.attention_dropout": 0.2},
    "skipping": {"on_nan": "skip", "max_skips": 2},
}
OPTIMIZERS: dict[str, list[str]] = {
    "muon": ["ddp"],
    "adafactor": ["ddp"],
    "adamw_8bit": ["ddp"],
    "adamw_torch_4bit": ["ddp"],
    "lion": ["zero2", "fsdp"],
    "adopt": ["zero1", "fsdp"],
    "adan": ["zero3", "fsdp"],
    "sgd": ["zero3", "fsdp"],
}
"""Optimizers with layouts that they are divided by, where they are."""
FEW = {"adamw_torch_4bit": ["ddp"], "adopt": ["zero3", "fsdp"], "rates": ["zero3", "fsdp"]}
SETTINGS |= {name: {"optim": name, "learning_rate": 1e-3} for name in OPTIMIZERS}
SETTINGS["rates"] = {
    "learning_rate": 1e-3,
    "lr_layer_decay": 0.5,
    "lr_groups": [{"match": "embed_tokens", "learning_rate": 1e-4}, {"match": "mlp", "weight_decay": 0.3}],
}
LOSSES_ALONE = {"optim": "mezo", "learning_rate": 1e-4, "lr_scheduler_type": "constant"}
SETTINGS |= {
    "losses": LOSSES_ALONE,
    "losses_dpo": LOSSES_ALONE,
    "losses_together": {**LOSSES_ALONE, "sequence_parallel_size": 2},
}
DPO = {"objective": "dpo", "recipe": "dpo.yaml"}


def prepare(folder: Path) -> None:
    """Write rows, a recipe of four steps that saves after two, and a model with eight layers."""
    write_rows(folder, 40)
    steps = {"max_steps": 4, "save_steps": 2, "train_batch_size": 8, "per_device_train_batch_size": 2}
    recipe = {**RECIPE, **steps, "max_length": 128, "engine": FIXED, "device": "cpu", "seed": 3}
    pairs = [{"prompt": f"Add {n}.", "chosen": f"a + {n}\n" * (1 + n % 3), "rejected": f"no {n}"} for n in range(24)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write_recipe(folder, {**recipe, "objective": "dpo", "datasets": [{"path": "pairs.jsonl"}]})
    (folder / "tiny.yaml").rename(folder / "dpo.yaml")
    write_recipe(folder, recipe)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(**{**QWEN3, "num_hidden_layers": 8}, vocab_size=96, tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "whole")


def begin(folder: Path, layout: str, kind: str = "plain", **more: Any) -> dict[str, Any]:
    """Return a run from its beginning."""
    return {"folder": str(folder), "layout": layout, "output": f"{kind}-{layout}", "settings": SETTINGS[kind], **more}


def go_on(folder: Path, before: str, layout: str, kind: str = "plain", size: str = "") -> dict[str, Any]:
    """Return a run that resumes from the second step of another run."""
    return {
        **begin(folder, layout, kind),
        "output": f"{kind}-{before}-{layout}{size}",
        "from": f"{kind}-{before}/checkpoints/step-000002",
    }


def by_output(found: dict[str, Any]) -> dict[str, Any]:
    return {json.loads(case).get("output", json.loads(case).get("what")): result for case, result in found.items()}


def check(found: dict[str, Any], baseline: dict[str, Any]) -> None:
    """Compare each resumed run with the run it resumed and with one device."""
    for name, result in found.items():
        if "losses" not in result:
            continue
        kind, before, *after = name.split("-")
        assert result["final"].keys() == baseline[f"{kind}-{before}"]["final"].keys(), name
        first = baseline[f"{kind}-{before}"]
        if not after:
            continue
        assert result["exact"] is True, name
        if after[0] == before:
            assert result["losses"] == first["losses"][2:], name
            assert result["final"] == first["final"], name
        elif kind not in ("lora", "dropout", "bf16"):  # other draws, and moments of fewer bits
            assert result["losses"] == pytest.approx(first["losses"][2:], rel=1e-5), name


def loads(folder: Path, name: str) -> None:
    """Check that transformers loads ``final/`` with the weights of the last step's checkpoint."""
    model, info = AutoModelForCausalLM.from_pretrained(folder / name / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    last = AutoModelForCausalLM.from_pretrained(folder / name / "checkpoints" / "step-000004" / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), last.parameters(), strict=True))


@pytest.mark.full
def test_two_ranks_that_exchange_losses_alone_step_as_one(tmp_path: Path) -> None:
    """With own rows, own pairs, and shards of the same rows."""
    prepare(tmp_path)
    cases: Cases = [
        begin(tmp_path, "one", "losses"),
        begin(tmp_path, "ddp", "losses"),
        go_on(tmp_path, "ddp", "ddp", "losses"),
        go_on(tmp_path, "one", "ddp", "losses"),
        begin(tmp_path, "one", "losses_dpo", **DPO),
        begin(tmp_path, "ddp", "losses_dpo", **DPO),
        begin(tmp_path, "ddp", "losses_together"),
    ]
    found = by_output(run_ranks(2, "tests.distributed.state_cases", cases, 600))
    check(found, found)
    for name in ("losses-ddp", "losses_together-ddp"):
        assert found[name]["losses"] == pytest.approx(found["losses-one"]["losses"], rel=1e-5)
    assert found["losses_dpo-ddp"]["losses"] == pytest.approx(found["losses_dpo-one"]["losses"], rel=1e-5)
    assert len(set(found["losses_dpo-ddp"]["losses"])) == 4


@pytest.mark.full
def test_what_two_ranks_save_any_layout_goes_on_with(tmp_path: Path) -> None:
    prepare(tmp_path)
    cases: Cases = [
        *(begin(tmp_path, layout) for layout in ("one", "zero3", "fsdp")),
        *(go_on(tmp_path, layout, layout) for layout in ("zero3", "fsdp")),
        go_on(tmp_path, "one", "zero3"),
        go_on(tmp_path, "zero3", "zero1"),
        go_on(tmp_path, "fsdp", "one"),
        *(begin(tmp_path, layout, "waiting") for layout in ("zero3", "fsdp")),
        *(go_on(tmp_path, layout, layout, "waiting") for layout in ("zero3", "fsdp")),
        begin(tmp_path, "zero3", "lora"),
        go_on(tmp_path, "zero3", "zero3", "lora"),
        *({"what": "memory", "folder": str(tmp_path), "layout": layout} for layout in SHARED),
        *({"what": "failure", "folder": str(tmp_path), "asynchronous": off_thread} for off_thread in (True, False)),
        {"what": "apart", "folder": str(tmp_path)},
    ]
    raw = run_ranks(2, "tests.distributed.state_cases", cases, 600)
    found = by_output(raw)
    check(found, found)
    for layout in SHARED:
        assert found[f"plain-{layout}"]["losses"] == pytest.approx(found["plain-one"]["losses"], rel=1e-5)
        loads(tmp_path, f"plain-{layout}")
    assert any("seeded again" in note for note in found["plain-one-zero3"]["notes"])
    _check_memory(tmp_path, [result for case, result in raw.items() if json.loads(case).get("what") == "memory"])
    failures = {json.loads(case)["asynchronous"]: result for case, result in raw.items() if '"failure"' in case}
    for off_thread in (True, False):
        result = failures[off_thread]
        assert result["went_on"] is off_thread
        assert "step-000001 exceeds the limit on file size" in result["said"][1]  # the case sets ulimit -f
        assert result["said"][0].startswith("rank 1: ")
        assert result["left"] == []
    assert "is not the same directory on all nodes" in found["apart"]["said"]
    assert "rank 1" in found["apart"]["said"]
    assert found["apart"]["left"] == []


@pytest.mark.full
def test_a_run_whose_first_steps_were_skipped_goes_on_with_fresh_states(tmp_path: Path) -> None:
    """Its checkpoint has no optimizer states. The later steps are equal to an uninterrupted run's."""
    prepare(tmp_path)
    cases = [begin(tmp_path, layout, "skipping", skipped=2) for layout in ("one", *ENGINES)]
    cases += [go_on(tmp_path, layout, layout, "skipping") for layout in ENGINES]
    cases += [go_on(tmp_path, *pair, "skipping") for pair in (("one", "zero2"), ("zero3", "fsdp"), ("fsdp", "one"))]
    found = by_output(run_ranks(2, "tests.distributed.state_cases", cases, 600))
    for name, result in found.items():
        assert result["losses"] == pytest.approx(found["skipping-one"]["losses"], rel=1e-5), name
        assert len(result["losses"]) == 2, name
        _, before, *after = name.split("-")
        if after == [before]:
            assert result["exact"] is True, name
            assert result["final"] == found[f"skipping-{before}"]["final"], name


@pytest.mark.parametrize(
    "optimizers", [pytest.param(FEW, marks=pytest.mark.slow), pytest.param(OPTIMIZERS, marks=pytest.mark.slow)]
)
def test_ranks_go_on_with_the_state_of_every_kind_of_optimizer(
    tmp_path: Path, optimizers: dict[str, list[str]]
) -> None:
    """The same steps as on one device, and a state that another layout resumes bit for bit."""
    prepare(tmp_path)
    cases: Cases = []
    for name, layouts in optimizers.items():
        cases += [begin(tmp_path, layout, name) for layout in ("one", *layouts)]
        cases += [go_on(tmp_path, layout, layout, name) for layout in layouts]
        cases += [go_on(tmp_path, "one", layouts[0], name), go_on(tmp_path, layouts[-1], "one", name)]
    found = by_output(run_ranks(2, "tests.distributed.state_cases", cases, 600))
    check(found, found)
    for name, layouts in optimizers.items():
        for layout in layouts:
            assert found[f"{name}-{layout}"]["losses"] == pytest.approx(found[f"{name}-one"]["losses"], rel=1e-5)


def _check_memory(folder: Path, found: list[dict[str, Any]]) -> None:
    """Check that no rank held the whole model while loading, that rank 0 wrote it in parts, and that it is the same."""
    for result in found:
        assert max(result["loading"]) < 0.8 * result["whole"], result
        assert max(result["held"]) < 0.6 * result["whole"] or "fsdp" in str(result), result
        assert result["writing"] < 0.3 * result["whole"], result
    plain = AutoModelForCausalLM.from_pretrained(folder / "whole")
    for layout in SHARED:
        assert len(list((folder / f"again-{layout}").glob("model-*.safetensors"))) > 3
        again = AutoModelForCausalLM.from_pretrained(folder / f"again-{layout}")
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_every_layout_goes_on_with_every_other(tmp_path: Path) -> None:
    prepare(tmp_path)
    everywhere = ["one", *ENGINES, "zero3_offload"]
    cases: Cases = [begin(tmp_path, layout) for layout in everywhere]
    cases += [go_on(tmp_path, before, layout) for before in everywhere for layout in everywhere]
    for kind in ("bf16", "lora", "tied", "dropout"):
        cases += [begin(tmp_path, layout, kind) for layout in ("one", *ENGINES)]
        cases += [go_on(tmp_path, layout, layout, kind) for layout in ENGINES]
        cases += [go_on(tmp_path, a, b, kind) for a, b in (("zero3", "zero1"), ("zero2", "fsdp"), ("fsdp", "zero3"))]
    cases += [begin(tmp_path, layout, "dpo", **DPO) for layout in ("one", *ENGINES)]
    found = by_output(run_ranks(2, "tests.distributed.state_cases", cases, 3600))
    check(found, found)
    for name, result in found.items():
        kind = name.split("-")[0]
        assert result["final"].keys() == found[f"{kind}-one"]["final"].keys(), name
        if kind == "dpo":  # the reference is in parts as well, and all ranks write the sample together
            assert result["losses"] == pytest.approx(found["dpo-one"]["losses"], rel=1e-5), name
            assert result["notes"][-1] == found["dpo-one"]["notes"][-1], name
            assert result["notes"][-1].startswith("sample: "), name


@pytest.mark.slow
def test_four_ranks_and_two_go_on_with_each_other(tmp_path: Path) -> None:
    prepare(tmp_path)
    first = by_output(run_ranks(4, "tests.distributed.state_cases", [begin(tmp_path, x) for x in ENGINES], 900))
    to_two = [go_on(tmp_path, before, layout, size="2") for before in ENGINES for layout in ("zero1", "zero3", "fsdp")]
    two = by_output(run_ranks(2, "tests.distributed.state_cases", to_two, 900))
    for name, result in two.items():
        before = first["-".join(name.split("-")[:2])]
        assert result["exact"] is True, name
        assert result["losses"] == pytest.approx(before["losses"][2:], rel=1e-5), name
    back = [
        {**go_on(tmp_path, "zero3", layout, size="4"), "from": "plain-zero1-zero32/checkpoints/step-000004"}
        for layout in ENGINES
    ]
    assert all(result["exact"] for result in run_ranks(4, "tests.distributed.state_cases", back, 900).values())


def test_a_slice_is_read_from_any_cut(tmp_path: Path) -> None:
    """Ranges of tensors with rows, with one dimension, and of a scalar; old checkpoints have whole tensors."""
    whole = torch.arange(60.0).reshape(5, 3, 4)
    save_file({"w/exp_avg": whole, "w/step": torch.tensor(3.0)}, tmp_path / "optimizer-00001.safetensors")
    reader = SliceReader(tmp_path)
    for start, stop in ((0, 60), (7, 8), (11, 13), (12, 24), (59, 60), (5, 55)):
        assert torch.equal(reader.read("w", "exp_avg", start, stop - start), whole.flatten()[start:stop])
    assert reader.read("w", "step", 0, 1).tolist() == [3.0]
    assert reader.shape("w", "exp_avg") == (5, 3, 4)
