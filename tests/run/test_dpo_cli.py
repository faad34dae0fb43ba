"""``streamtune dpo`` by the real command line on tiny new models: inputs, outputs, errors."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from streamtune.cli import main
from streamtune.errors import UnsupportedModelError

INIT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_dropout": 0.1,
}
RECIPE: dict[str, Any] = {
    "objective": "dpo",
    "model": {"init": INIT},
    "tokenizer": {"train": {"vocab_size": 264}},
    "datasets": [{"path": "pairs.jsonl"}],
    "max_length": 128,
    "val_size": 4,
    "engine": {"schedule": "fixed", "chunk_size": 16, "head_chunk_size": 8},
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "eval_steps": 2,
    "learning_rate": 1.0e-2,
}
LORA = {"finetuning_type": "lora", "lora_r": 4, "lora_dropout": 0.2}
TIMINGS = ("tokens_per_s", "peak_mem_gib")


def add(path: str, **row: Any) -> None:
    """Append a row to the file."""
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with rows and its own cache, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(18):
        prompt = f"Add {number}." * (1 + number % 3)
        chosen, rejected = f"It is {number + 1}.", "No idea." * (1 + number % 2)
        add("pairs.jsonl", prompt=prompt, chosen=chosen, rejected=rejected)
        completion = chosen if number % 3 else rejected
        add("judged.jsonl", prompt=prompt, completion=completion, label=bool(number % 3))
    return tmp_path


@pytest.fixture
def dpo() -> Callable[..., int]:
    """Run ``streamtune dpo tiny.yaml ...`` with more recipe keys; return the exit code."""

    def run(*arguments: str, command: str = "dpo", **keys: Any) -> int:
        recipe = {key: value for key, value in {**RECIPE, **keys}.items() if value is not None}
        Path("tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        with pytest.raises(SystemExit) as left:
            main([command, "tiny.yaml", *arguments])
        return int(left.value.code or 0)

    return run


def records(run: str) -> list[dict[str, Any]]:
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def losses(run: str) -> list[float]:
    return [record.get("loss", record.get("eval_loss")) for record in records(run)]


def line_of(key: str) -> str:
    lines = Path("tiny.yaml").read_text().splitlines()
    return f"tiny.yaml:{1 + next(index for index, line in enumerate(lines) if line.startswith(key))}"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_trains_from_pairs_to_a_model_that_prefers(dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert dpo("--output-dir", "run", max_steps=12, eval_steps=6, rpo_alpha=0.1) == 0
    steps = [record for record in records("run") if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"}
    assert names | {"logps/rejected", "kl", "nll_loss", "tokens", "supervised_tokens"} <= steps[0].keys()
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=0.1), "at the start the model is its own reference"
    first, last = (record for record in records("run") if "eval_loss" in record)
    assert last["eval_rewards/accuracies"] == 1.0
    assert last["eval_rewards/margins"] > first["eval_rewards/margins"] > 0
    assert AutoModelForCausalLM.from_pretrained("run/final").config.model_type == "qwen3"
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "12 (3 epochs) x 4 pairs" in shown
    assert "accuracy=" in shown
    assert "held out 1.000" in shown


@pytest.mark.full
def test_the_command_implies_the_objective_and_the_resolved_recipe_says_it(dpo: Callable[..., int]) -> None:
    assert dpo("--output-dir", "first", objective=None, max_steps=1) == 0
    shutil.copy("first/recipe.yaml", "again.yaml")
    with pytest.raises(SystemExit) as left:
        main(["dpo", "again.yaml", "--output-dir", "second"])
    assert not left.value.code
    assert records("first") == records("second")


@pytest.mark.full
def test_a_dry_run_says_what_would_run_and_writes_nothing(
    dpo: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpo("--dry-run", precompute_ref_log_probs=True) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["cache", "judged.jsonl", "pairs.jsonl", "tiny.yaml"]
    assert not (folder / "cache/streamtune/reference").exists()
    shown = capsys.readouterr().out
    assert "14 train, 4 held out; tokens: prompts " in shown
    assert "4 (1 epoch) x 4 pairs" in shown
    assert "memory" in shown


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"precompute_ref_log_probs": True},
        {**LORA},
        {**LORA, "precompute_ref_log_probs": True},
        {"loss_type": "kto", "datasets": [{"path": "judged.jsonl"}], "share_prefix": "never"},
        {"loss_type": "simpo", "beta": 2.0},
    ],
    ids=["copy", "kept", "adapters", "adapters-kept", "kto", "without"],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    dpo: Callable[..., int], keys: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference is the model that training began with, not the resumed model."""
    settings = ("--output-dir", "run", "--set", "save_steps=2")
    assert dpo(*settings, **keys) == 0
    whole = records("run")
    shutil.copytree("run/final", "kept")
    shutil.rmtree("run/checkpoints/step-000004")
    shutil.rmtree("run/final")
    assert dpo(*settings, **keys) == 0
    assert "log-probs of the reference are computed again" not in capsys.readouterr().err
    assert records("run") == whole
    [ours, theirs] = (next(Path(where).glob("*.safetensors")).read_bytes() for where in ("run/final", "kept"))
    assert ours == theirs


@pytest.mark.full
def test_every_kind_of_reference_says_the_same(dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """References: a copy, the same model by name, and both with precomputed log-probs."""
    assert dpo("--output-dir", "base", command="sft", objective=None, datasets=[{"path": "texts.jsonl"}]) == 2
    for number in range(12):
        add("texts.jsonl", prompt=f"Add {number}.", completion=f"It is {number}.")
    assert dpo("--output-dir", "base", command="sft", objective=None, datasets=[{"path": "texts.jsonl"}]) == 0
    start = {"model": None, "tokenizer": None, "model_name_or_path": "base/final"}
    capsys.readouterr()
    assert dpo("--output-dir", "copy", **start) == 0
    assert dpo("--output-dir", "named", ref_model_name_or_path="base/final", **start) == 0
    assert losses("named") == losses("copy")
    kept = {"precompute_ref_log_probs": True}
    assert dpo("--output-dir", "kept", **kept, **start) == 0
    assert "the reference's log-probs are cached in" in capsys.readouterr().err
    assert losses("kept") == pytest.approx(losses("copy"), rel=1e-5)
    assert dpo("--output-dir", "again", ref_model_name_or_path="base/final", **kept, **start) == 0
    assert "were read from the cache" in capsys.readouterr().err
    assert losses("again") == losses("kept")
    assert len(list(Path("cache/streamtune/reference").iterdir())) == 1
    assert dpo("--output-dir", "other", datasets=[{"path": "pairs.jsonl", "max_rows": 12}], **kept, **start) == 0
    assert len(list(Path("cache/streamtune/reference").iterdir())) == 2, "other rows, another key"


@pytest.mark.full
def test_log_probs_are_kept_by_the_configuration_too(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Another RoPE gives other log-probs: with stale ones, the loss of step 1 would not be ln 2."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    kept = {"precompute_ref_log_probs": True, "max_steps": 1, "eval_steps": 0}
    model = {"init": {**INIT, "attention_dropout": 0.0, "rope_parameters": rope}}
    assert dpo("--output-dir", "one", **kept, model=model) == 0
    other = {"init": {**model["init"], "rope_parameters": {**rope, "rope_theta": 100.0}}}
    assert dpo("--output-dir", "two", **kept, model=other) == 0
    assert dpo("--output-dir", "three", **kept, model=other) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("log-probs of the reference were read from the cache") == 1
    assert len(list(Path("cache/streamtune/reference").iterdir())) == 2
    for run in ("one", "two", "three"):
        assert losses(run)[0] == pytest.approx(math.log(2), abs=1e-5), run


@pytest.mark.slow
def test_adapters_of_a_reference_count_in_its_key_and_the_base_below_them_in_a_resume(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases: two folders of adapters on one base, the same weights with another ``lora_alpha``, another base."""
    for number in range(6):
        add("texts.jsonl", prompt=f"Add {number}.", completion=f"It is {number}.")
    texts = {"command": "sft", "objective": None, "datasets": [{"path": "texts.jsonl"}], "val_size": 0, "eval_steps": 0}
    few = {"max_steps": 1, "eval_steps": 0}
    assert dpo("--output-dir", "base", **texts, max_steps=1) == 0
    start = {"model": None, "tokenizer": None, "model_name_or_path": "base/final"}
    for name, rate in (("one", 0.1), ("two", 0.3)):
        lora = {**LORA, "finetuning_type": "lora", "learning_rate": rate}
        assert dpo("--output-dir", name, **{**texts, **start, **lora}, max_steps=1) == 0
    shutil.copytree("two/final", "three")
    shutil.copytree("base/final", "policy")
    start["model_name_or_path"] = "policy"
    settings = json.loads(Path("three/adapter_config.json").read_text())
    Path("three/adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 4 * settings["lora_alpha"]}))
    capsys.readouterr()
    found = {}
    for reference in ("one/final", "two/final", "three"):
        for kept in (False, True):
            name = f"{Path(reference).parts[0]}-{kept}"
            more = {"ref_model_name_or_path": reference, "precompute_ref_log_probs": kept}
            assert dpo("--output-dir", name, **start, **few, **more) == 0
            found[name] = losses(name)[0]
        assert found[name] == pytest.approx(found[f"{Path(reference).parts[0]}-False"], rel=1e-5), reference
    assert "were read from the cache" not in capsys.readouterr().err
    assert len({round(loss, 5) for name, loss in found.items() if name.endswith("True")}) == 3, found

    with safe_open("base/final/model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, "base/final/model.safetensors", {"format": "pt"})
    more = {"ref_model_name_or_path": "one/final", "max_steps": 2, "eval_steps": 0}
    assert dpo("--output-dir", "one-False", "--allow-change", "max_steps", **start, **more) == 2
    assert "the files of the reference model" in said(capsys)


@pytest.mark.full
def test_damaged_log_probs_are_computed_again_at_a_start_and_at_a_resume(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"precompute_ref_log_probs": True, "max_steps": 2, "eval_steps": 0}
    settings = ("--output-dir", "run", "--set", "save_steps=1")
    assert dpo(*settings, **kept) == 0
    whole = records("run")
    (file,) = Path("cache/streamtune/reference").iterdir()
    content = file.read_bytes()
    shutil.rmtree("run/checkpoints/step-000002")
    shutil.rmtree("run/final")
    damaged = bytearray(content)
    damaged[-3] ^= 0x40  # a number, finite and wrong
    file.write_bytes(damaged)
    capsys.readouterr()
    assert dpo(*settings, **kept) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("is damaged and will be created again") == 1
    assert "log-probs of the reference are computed again" in told
    assert records("run") == whole
    assert file.read_bytes() == content
    file.write_bytes(content[: len(content) // 2])
    assert dpo("--output-dir", "new", **kept) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("is damaged and will be created again") == 1
    assert losses("new") == losses("run")


@pytest.mark.full
@pytest.mark.parametrize("keys", [{}, LORA], ids=["full", "lora"])
def test_a_run_resumed_with_other_rows_does_not_read_the_log_probs_of_the_old_rows(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str], keys: dict[str, Any]
) -> None:
    """The new rows have as many tokens. The learning rate is 0, so with their own log-probs each loss is ln 2."""
    for number in range(18):
        prompt = f"Add {number}." * (1 + number % 3)
        add("others.jsonl", prompt=prompt, chosen=f"Is it {number + 1}?", rejected="Oh dear!" * (1 + number % 2))
    model = {"init": {**INIT, "attention_dropout": 0.0}}
    still = {**keys, "model": model, "learning_rate": 0.0, "precompute_ref_log_probs": True, "eval_steps": 0}
    if keys:
        still["lora_dropout"] = 0.0
    assert dpo(**still, max_steps=1, output_dir="run") == 0
    more = {"datasets": [{"path": "others.jsonl"}], "max_steps": 3, "output_dir": "run"}
    assert dpo("--allow-change", "data", "--allow-change", "max_steps", **{**still, **more}) == 0
    assert "log-probs of the reference are computed again" in said(capsys)
    assert losses("run") == pytest.approx([math.log(2)] * 5, abs=1e-5)  # with two evaluations


@pytest.mark.full
@pytest.mark.parametrize(
    "keys", [{}, {"loss_type": "kto", "datasets": [{"path": "pairs.jsonl"}], "val_size": 0, "eval_steps": 0}], ids=str
)
def test_a_shared_prompt_changes_nothing(dpo: Callable[..., int], keys: dict[str, Any]) -> None:
    model = {"init": {**INIT, "attention_dropout": 0.0}}
    for layout in ("always", "never"):
        assert dpo("--output-dir", layout, share_prefix=layout, model=model, **keys) == 0
    for shared, separate in zip(records("always"), records("never"), strict=True):
        assert shared.get("tokens", 0) < separate.get("tokens", 1)
        for name in ("loss", "eval_loss", "rewards/margins", "eval_rewards/accuracies", "grad_norm"):
            assert (name in shared) == (name in separate)
            assert shared.get(name, 0) == pytest.approx(separate.get(name, 0), rel=1e-3, abs=1e-5), name


@pytest.mark.full
def test_kept_log_probs_serve_single_completions_too(dpo: Callable[..., int]) -> None:
    keys = {"loss_type": "kto", "datasets": [{"path": "judged.jsonl"}], "desirable_weight": 0.5}
    assert dpo("--output-dir", "asked", **keys) == 0
    assert dpo("--output-dir", "kept", precompute_ref_log_probs=True, **keys) == 0
    assert losses("kept") == pytest.approx(losses("asked"), rel=1e-5)
    assert {"kl", "rewards/chosen", "rewards/rejected", "rewards/accuracies"} <= records("kept")[0].keys()


@pytest.mark.full
def test_routers_are_balanced_beside_preferences(dpo: Callable[..., int]) -> None:
    init = {**INIT, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    keys = {"model": {"init": init}, "router_aux_loss_coef": 0.1, "moe_balance": "global"}
    assert dpo("--output-dir", "run", **keys) == 0
    steps = [record for record in records("run") if "loss" in record]
    assert steps[0]["loss"] == pytest.approx(0.693, abs=0.05), "what balances is not in the loss that is shown"
    assert all(2.0 <= record["aux_loss"] < 4.0 for record in steps)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_reference_with_another_vocabulary_is_refused(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        add("other.jsonl", prompt=f"blue sky over {number} green", chosen=f"{number} birds sing", rejected="rain falls")
    for name, size in (("larger", 280), ("same-size", 264)):
        tokenizer = {"train": {"vocab_size": size}}
        assert dpo("--output-dir", name, datasets=[{"path": "other.jsonl"}], tokenizer=tokenizer, max_steps=1) == 0
    capsys.readouterr()
    for name in ("larger", "same-size"):
        assert dpo("--output-dir", "run", ref_model_name_or_path=f"{name}/final") == 2
        shown = said(capsys)
        assert f"the reference '{name}/final' has another vocabulary" in shown
        assert line_of("ref_model_name_or_path") in shown
    model = AutoModelForCausalLM.from_pretrained("same-size/final")
    model.resize_token_embeddings(100)
    model.save_pretrained("smaller")
    assert dpo("--output-dir", "run", ref_model_name_or_path="smaller") == 2
    assert "an embedding of 100 rows" in said(capsys)
    assert dpo("--output-dir", "run", ref_model_name_or_path="./nowhere") == 2
    assert line_of("ref_model_name_or_path") in said(capsys)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "Add 3.", "chosen": "4", "rejected": "4"}, "the same"),
        ({"prompt": "Add 3.", "chosen": "4", "rejected": ""}, "empty"),
        ({"prompt": "Add 3." * 100, "chosen": "4", "rejected": "5"}, "max_length"),
        ({"prompt": "Add 3.", "completion": "4", "label": True}, "chosen"),
    ],
)
def test_rows_that_teach_nothing_are_refused_by_their_place(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str], row: dict[str, Any], what: str
) -> None:
    add("pairs.jsonl", **row)
    assert dpo() == 2
    shown = said(capsys)
    assert "pairs.jsonl:19" in shown
    assert what in shown
    assert not Path("runs").exists()


@pytest.mark.full
def test_identical_pairs_are_left_out_where_the_recipe_says_so(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    add("pairs.jsonl", prompt="Add 3.", chosen="4", rejected="4")
    assert dpo("--dry-run", identical_pairs="drop") == 0
    assert "1 of 19 pairs dropped: both answers are the same" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("keys", "what", "key"),
    [
        ({"simpo_gamma": 1.0}, "the loss 'sigmoid' does not read simpo_gamma", "simpo_gamma"),
        ({"loss_type": "exo_pair"}, "takes the logarithm of label_smoothing, which is 0", "label_smoothing"),
        ({"loss_type": "apo_zero", "reference_free": True}, "reference_free is undefined for it", "reference_free"),
    ],
    ids=str,
)
def test_numbers_a_loss_does_not_read_are_refused(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str], keys: dict[str, Any], what: str, key: str
) -> None:
    assert dpo(**keys) == 2
    shown = said(capsys)
    assert what in shown
    assert (line_of(key) if key in keys else "tiny.yaml:") in shown


def test_one_prompt_has_no_mismatched_completion(dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        add("same.jsonl", prompt="Add 3.", completion=f"It is {number}.", label=bool(number % 2))
    keys = {"datasets": [{"path": "same.jsonl"}], "val_size": 0, "eval_steps": 0}
    assert dpo(loss_type="kto", **keys) == 2
    assert "all rows to train on have the same prompt" in said(capsys)
    assert dpo(loss_type="apo_zero_unpaired", **keys) == 0


@pytest.mark.full
def test_a_model_that_cannot_share_prompts_gets_copies_of_them(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"init": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}}
    assert dpo("--dry-run", model=model) == 0
    assert "each completion has its own copy of the prompt" in said(capsys)
    assert dpo("--dry-run", model=model, share_prefix="always") == UnsupportedModelError.exit_code
    shown = said(capsys)
    assert line_of("share_prefix") in shown
    assert "share_prefix: never" in shown


@pytest.mark.full
def test_prompts_are_not_shared_where_positions_depend_on_the_length(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "dynamic", "factor": 64.0, "original_max_position_embeddings": 16}
    assert dpo("--dry-run", rope_scaling=rope) == 0
    assert "the model's rotary embeddings change above 16 tokens" in said(capsys)
    assert dpo("--dry-run", rope_scaling=rope, share_prefix="always") == UnsupportedModelError.exit_code
    assert line_of("share_prefix") in said(capsys)


def test_a_recipe_for_pairs_is_not_fine_tuned_on_by_mistake(
    dpo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpo(command="sft") == 2
    assert "the recipe has objective dpo, and the command trains sft" in said(capsys)
