"""Tokens that a recipe adds: in the tokenizer, in embedding and head, trained, saved, resumed and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from streamtune.cli import main
from streamtune.programs.export.export import ExportOptions, export_model
from streamtune.programs.export.source import find_trained, load_trained
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.model import make_model_without_data
from tests.sft_kit import FIXED, QWEN3, run, write_recipe

NEW = ["<|im_end|>", "<|im_start|>", "<think>", "</think>"]
RECIPE: dict[str, Any] = {
    "model_name_or_path": "base",
    "datasets": ["rows.jsonl"],
    "chat_template": "chatml",
    "special_tokens": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]},
    "added_tokens": ["<think>", "</think>"],
    "max_length": 96,
    "engine": FIXED,
    "per_device_train_batch_size": 4,
    "learning_rate": 1.0e-2,
    "max_steps": 2,
    "save_steps": 1,
}

TEMPLATE = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
PLAIN_LORA: dict[str, Any] = {
    **RECIPE,
    "finetuning_type": "lora",
    "special_tokens": {},
    "chat_template": TEMPLATE,
    "max_steps": 1,
}
"""Adapters with tokens that a template does not need."""


def write_base(folder: Path, *, tied: bool = True, spare: int = 0, eos: bool = True) -> None:
    """Write a base model whose tokenizer lacks chat tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["say hello world"] * 9,
        trainers.BpeTrainer(
            vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **({"eos_token": "<|endoftext|>"} if eos else {}))
    torch.manual_seed(0)
    keys = {key: value for key, value in QWEN3.items() if key != "model_type"}
    ids = {"eos_token_id": 0, "pad_token_id": None, "bos_token_id": None}
    size = len(tokenizer) + spare
    config = AutoConfig.for_model("qwen3", vocab_size=size, tie_word_embeddings=tied, **keys, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with chats as rows."""
    monkeypatch.chdir(tmp_path)
    rows = [
        [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": f"<think>{n}</think>hello world {n}"},
        ]
        for n in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return tmp_path


@pytest.mark.quick("untied")
@pytest.mark.parametrize(("tied", "spare"), [(True, 0), (False, 0), (False, 64)], ids=["tied", "untied", "spare"])
def test_new_rows_are_the_mean_of_the_others_and_old_ones_stay(folder: Path, tied: bool, spare: int) -> None:
    write_base(folder / "base", tied=tied, spare=spare)
    write_recipe(folder, RECIPE)
    notes: list[str] = []
    built = build_run(load_recipe(folder / "tiny.yaml", []), notify=notes.append)
    tokenizer, before = built.tokenizer, load_file("base/model.safetensors")
    new = [tokenizer.encode(token, add_special_tokens=False) for token in NEW]
    old = len(tokenizer) - 4
    assert new == [[old], [old + 1], [old + 2], [old + 3]]
    assert f"added 4 tokens to the tokenizer: {', '.join(NEW)}; it now has {len(tokenizer)}" in notes
    example = built.prepared.training[0]
    assert list(example.input_ids).count(old + 1) == 2, "<|im_start|> is one token in the rows"
    assert old in example.labels, "the end of a turn is trained"
    now = {name: weight.detach() for name, weight in built.model.named_parameters()}
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        assert torch.equal(now[name][:old], before[name][:old])
        mean = before[name][:old].mean(dim=0)
        assert all(torch.allclose(now[name][row], mean, atol=1e-7) for row in range(old, old + 4))
        assert len(now[name]) == max(len(before[name]), old + 4)
    assert built.model.config.eos_token_id == old
    assert built.model.generation_config.eos_token_id == [old, 0]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.full
def test_new_rows_are_trained_saved_resumed_and_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_base(folder / "base", tied=False)
    write_recipe(folder, RECIPE)
    assert run("--output-dir", "run") == 0
    final = load_file("run/final/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = final[name][-4:]
        assert all(not torch.equal(rows[0], row) for row in rows[1:]), "each has its own gradient"
    shutil.rmtree("run/checkpoints/step-000002")
    shutil.rmtree("run/final")
    assert run("--output-dir", "run") == 0
    again = load_file("run/final/model.safetensors")
    assert all(torch.equal(again[name], final[name]) for name in final)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained("run/final"), AutoTokenizer.from_pretrained("run/final")
    assert len(tokenizer) == loaded.get_input_embeddings().weight.shape[0] == loaded.config.vocab_size
    assert tokenizer.decode(tokenizer.encode("<|im_start|><think>"), skip_special_tokens=True) == "<think>"
    capsys.readouterr()
    assert run("--output-dir", "run", "--set", "added_tokens=[]") == 2
    assert "added_tokens was" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["export", "run", "out"])
    assert not left.value.code
    with pytest.raises(SystemExit) as left:
        main(["verify", "tiny.yaml"])
    assert not left.value.code


@pytest.mark.full
@pytest.mark.parametrize("more", [{"finetuning_type": "lora"}, {"finetuning_type": "qlora", "quantization": "int8"}],
                         ids=["lora", "qlora"])  # fmt: skip
@pytest.mark.parametrize(("tied", "spare"), [(True, 0), (False, 0), (False, 64)], ids=["tied", "untied", "spare"])
def test_adapters_train_the_new_rows_and_no_others(
    folder: Path, capsys: pytest.CaptureFixture[str], tied: bool, spare: int, more: dict[str, Any]
) -> None:
    write_base(folder / "base", tied=tied, spare=spare)
    write_recipe(folder, {**RECIPE, **more, "lora_r": 4})
    assert run("--output-dir", "run") == 0
    adapters = load_file("run/final/adapter_model.safetensors")
    deltas = {name: rows for name, rows in adapters.items() if "trainable_tokens" in name}
    assert [len(rows) for rows in deltas.values()] == [4] * (1 if tied else 2)
    assert not any(name.endswith("embed_tokens.weight") for name in adapters)
    for rows in deltas.values():
        assert all(not torch.equal(rows[0], row) for row in rows[1:]), "each has its own gradient"
    whole = Path("run/metrics.jsonl").read_text().splitlines()
    shutil.rmtree("run/checkpoints/step-000002")
    shutil.rmtree("run/final")
    assert run("--output-dir", "run") == 0
    again = load_file("run/final/adapter_model.safetensors")
    assert all(torch.equal(again[name], adapters[name]) for name in adapters)
    losses = [[json.loads(line)["loss"] for line in lines]
              for lines in (whole, Path("run/metrics.jsonl").read_text().splitlines())]  # fmt: skip
    assert losses[0] == losses[1]
    for command in (["export", "run", "out"], ["verify", "tiny.yaml"]):
        with pytest.raises(SystemExit) as left:
            main(command)
        assert not left.value.code, (command, capsys.readouterr().err)
    merged, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    first = len(tokenizer) - 4
    embedded = merged.get_input_embeddings().weight[first : first + 4]
    assert torch.allclose(embedded, next(rows for name, rows in deltas.items() if "embed_tokens" in name))
    before = load_file("base/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(merged.get_input_embeddings().weight[:first], before[:first])


def test_tied_tables_with_new_rows_are_exported_tied(folder: Path) -> None:
    """Adapters change the same rows of both tables by the same values, so the merged model needs one table."""
    write_base(folder / "base")
    write_recipe(folder, {**RECIPE, "finetuning_type": "lora", "lora_r": 4, "max_steps": 1, "output_dir": "run"})
    assert run() == 0
    export_model("run", folder / "out", ExportOptions(check=False))
    weights = load_file("out/model.safetensors")
    assert "lm_head.weight" not in weights
    assert json.loads(Path("out/config.json").read_text())["tie_word_embeddings"] is True
    (rows,) = [x for name, x in load_file("run/final/adapter_model.safetensors").items() if "trainable_tokens" in name]
    assert torch.equal(weights["model.embed_tokens.weight"][-4:], rows)
    model, _ = load_trained(find_trained("run"))
    with torch.no_grad():
        ids = torch.tensor([[1, 5, 9, len(weights["model.embed_tokens.weight"]) - 1]])
        before, after = model(ids).logits, AutoModelForCausalLM.from_pretrained("out").eval()(ids).logits
    assert torch.allclose(before, after, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_matrices_trained_whole_hold_the_new_rows(folder: Path, tied: bool) -> None:
    write_base(folder / "base", tied=tied)
    more = {"finetuning_type": "lora", "lora_r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}
    write_recipe(folder, {**RECIPE, **more})
    assert run("--output-dir", "run") == 0
    adapters = load_file("run/final/adapter_model.safetensors")
    assert not any("trainable_tokens" in name for name in adapters)
    shutil.rmtree("run/checkpoints/step-000002")
    shutil.rmtree("run/final")
    assert run("--output-dir", "run") == 0
    again = load_file("run/final/adapter_model.safetensors")
    assert all(torch.equal(again[name], adapters[name]) for name in adapters)
    with pytest.raises(SystemExit) as left:
        main(["export", "run", "out"])  # which compares logits with those of the model that trained
    assert not left.value.code
    merged = AutoModelForCausalLM.from_pretrained("out")
    embedding = adapters["base_model.model.model.embed_tokens.weight"]
    assert len(embedding) == len(AutoTokenizer.from_pretrained("out"))
    assert torch.equal(merged.get_input_embeddings().weight, embedding)
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) is tied


@pytest.mark.full
@pytest.mark.parametrize("whole", [[], ["embed_tokens", "lm_head"]], ids=["rows", "whole"])
@pytest.mark.parametrize("spare", [0, 64])
def test_adapters_of_other_tokens_are_not_trained_further(
    folder: Path, capsys: pytest.CaptureFixture[str], whole: list[str], spare: int
) -> None:
    write_base(folder / "base", tied=False, spare=spare)
    write_recipe(folder, {**PLAIN_LORA, "lora_r": 4, "modules_to_save": whole})
    assert run("--output-dir", "first") == 0

    def refusal(**keys: Any) -> str:
        write_recipe(folder, {**PLAIN_LORA, "adapter_name_or_path": "first/final", **keys})
        capsys.readouterr()
        assert run("--output-dir", "second") == 2
        return " ".join(capsys.readouterr().err.split())

    right = 'write added_tokens: ["<think>", "</think>"] (or special_tokens) as the run that trained the adapters'
    said = refusal(added_tokens=[])
    assert "there <think> has id" in said
    assert "here the tokenizer lacks it" in said
    assert right in said
    said = refusal(added_tokens=["</think>", "<think>"])
    assert "and here id" in said
    assert right in said
    if not (whole and spare):  # a whole matrix with spare rows has one for <more>
        said = refusal(added_tokens=["<think>", "</think>", "<more>"])
        assert "do not train the rows of new tokens in model.embed_tokens and lm_head" in said
        assert right in said
    if not spare:
        said = refusal(added_tokens=[], tokenizer={"path": "first/final"})
        assert "rows of the embedding, and this base has" in said
        assert f"{right}, and name no other tokenizer" in said
    path = write_recipe(folder, {**PLAIN_LORA, "adapter_name_or_path": "first/final"})
    loaded = load_recipe(path, [])
    saved = load_file("first/final/adapter_model.safetensors")
    for model in (build_run(loaded).model, make_model_without_data(loaded.recipe, torch.device("cpu"))):
        state = get_peft_model_state_dict(model, save_embedding_layers=False)
        assert all(torch.equal(state[name], saved[name]) for name in saved)


@pytest.mark.full
def test_adapters_without_rows_get_no_new_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_base(folder / "base")
    write_recipe(folder, {**PLAIN_LORA, "lora_r": 4, "added_tokens": []})
    assert run("--output-dir", "first") == 0
    write_recipe(folder, {**PLAIN_LORA, "adapter_name_or_path": "first/final"})
    capsys.readouterr()
    assert run("--output-dir", "second") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the recipe adds <think>, </think> to the tokenizer" in said
    assert "add no tokens, or merge the adapters, `streamtune export first/final OUT`" in said


@pytest.mark.full
def test_a_reference_has_the_same_rows(folder: Path) -> None:
    """At the start the model equals its reference, so all margins are 0, also with new tokens."""
    write_base(folder / "base")
    pairs = [{"prompt": f"say {n}", "chosen": f"<think>{n}</think>hello", "rejected": f"no {n}"} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write_recipe(folder, {**RECIPE, "objective": "dpo"})
    assert run("--output-dir", "run", command="dpo") == 0
    whole = Path("run/metrics.jsonl").read_text().splitlines()
    assert abs(json.loads(whole[0])["rewards/margins"]) < 1e-5
    shutil.rmtree("run/checkpoints/step-000002")
    assert run("--output-dir", "run", command="dpo") == 0
    losses = [[json.loads(line)["loss"] for line in lines]
              for lines in (whole, Path("run/metrics.jsonl").read_text().splitlines())]  # fmt: skip
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"added_tokens": ["<a>", "<a>"]}, "the token '<a>' is added twice", "keep one"),
        ({"added_tokens": [""]}, "'added_tokens[0]' must be text", ""),
        (
            {"special_tokens": {"eos": "x"}},
            "unknown key 'eos' in 'special_tokens'",
            "'special_tokens': bos_token, eos_token",
        ),
    ],
    ids=["twice", "empty", "unknown"],
)
def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], what: str,
                         fix: str) -> None:  # fmt: skip
    write_base(folder / "base")
    write_recipe(folder, {**RECIPE, **keys})
    assert run() == 2
    said = " ".join(capsys.readouterr().err.split())
    assert what in said
    assert fix in said
    assert "where: tiny.yaml:" in said


def test_tokens_that_are_there_need_no_rows(folder: Path) -> None:
    """Existing tokens work with adapters, and with a tokenizer without padding or end token."""
    write_base(folder / "base", eos=False)
    keys = {"special_tokens": {"eos_token": "<|endoftext|>"}, "added_tokens": ["a"], "finetuning_type": "lora"}
    write_recipe(folder, {**RECIPE, **keys, "chat_template": TEMPLATE})
    built = build_run(load_recipe(folder / "tiny.yaml", []))
    assert built.tokenizer.pad_token == built.tokenizer.eos_token == "<|endoftext|>"
    assert len(built.tokenizer) == built.model.get_input_embeddings().weight.shape[0]


@pytest.mark.full
def test_chatml_says_what_it_writes_in_several_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_base(folder / "base")
    write_recipe(folder, {**RECIPE, "special_tokens": {}, "added_tokens": []})
    assert run("--dry-run") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "splits <|im_start|> and <|im_end|>, which the chat template chatml writes, into 12 and 10 tokens" in said
