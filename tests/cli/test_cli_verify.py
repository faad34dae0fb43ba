"""``streamtune verify`` through the real command line: the screen, the document, the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from streamtune import data
from streamtune.cli import main
from streamtune.data import Example
from streamtune.engine import cache, head, vjp
from streamtune.engine.routers import RouterSums
from streamtune.programs.verify.compared_rows import FreeMemory, choose_windows

RECIPE: dict[str, Any] = {
    "model": {
        "init": {
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_dropout": 0.1,
        }
    },
    "tokenizer": {"train": {"vocab_size": 300}},
    "datasets": [{"path": "rows.jsonl"}],
    "max_length": 4096,
    "val_size": 2,
    "engine": {"chunk_size": 100, "head_chunk_size": 50},
}


def write_rows(*sizes: tuple[int, int]) -> None:
    """Write one row for each (words of the prompt, words of the answer)."""
    rows = [
        [
            {"role": "user", "content": "why " * prompt},
            {"role": "assistant", "content": " ".join(f"{number}+{n}" for n in range(answer))},
        ]
        for number, (prompt, answer) in enumerate(sizes)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``streamtune verify tiny.yaml ...`` in this process, on two rows; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    write_rows((10, 80), (5, 20))

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(["verify", "tiny.yaml", *arguments])
        return int(left.value.code or 0)

    return run


def test_a_screen_that_says_what_was_compared_and_how_it_came_out(
    verify: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--length", "256") == 0
    shown, said = capsys.readouterr()
    lines = shown.splitlines()
    assert lines[0].startswith("StreamTune ")
    assert "Qwen3ForCausalLM" in lines[1]
    assert "all trained; float32 on cpu" in lines[1]
    assert "rows.jsonl:1, tokens 1 to 256 of" in lines[2]
    assert "(--length): 256 tokens" in lines[2]
    assert lines[3] == "  chunks  of 100, 128, 32 tokens; in the LM head of 50, 256, 7"
    for module in ("embed_tokens", "self_attn.q_proj", "self_attn.k_norm", "mlp.down_proj", "norm", "lm_head"):
        assert any(line.startswith(f"{module} ") for line in lines)
    assert "reference  plain autograd in float64, sdpa attention; each error is the largest over 3 chunk sizes" in shown
    assert lines[-1] == "Next: streamtune sft tiny.yaml"
    assert lines[5] == (
        "exact: streamed loss and gradients equal plain autograd's in float64, and are as precise in float32"
    )
    assert "float64, plain autograd (1 of 8)" in said
    assert "float32, streamed in chunks of 32 (8 of 8)" in said
    assert "\x1b" not in shown + said
    assert sorted(path.name for path in Path().iterdir()) == ["rows.jsonl", "tiny.yaml"]


def test_json_is_one_document_with_the_promised_keys(
    verify: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--length", "128", "--json", "--set", "bf16=true") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] is True
    assert isinstance(document["loss_difference"], float)
    assert {"parameter", "error", "torch_error"} <= document["worst"].keys()
    assert document["worst"]["error"] <= document["worst"]["allowed"]
    assert [row["module"] for row in document["modules"]][:2] == ["embed_tokens", "self_attn.q_proj"]
    assert {"module", "parameters", "exact_error", "error", "torch_error"} == document["modules"][0].keys()
    assert (document["dtype"], document["truth"]) == ("bfloat16 autocast", "float32")
    assert (document["rows"], document["length"], document["tokens"]) == (["rows.jsonl:1"], 128, 128)
    assert 0 < document["trained_tokens"] < 128
    sizes = [run["schedule"] and run["schedule"]["chunk_size"] for run in document["runs"]]
    assert sizes == [None, 100, 43, 16] * 2


@pytest.mark.full
def test_adapters_in_bfloat16(verify: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("finetuning_type=lora", "lora_dropout=0.2", "dtype=bfloat16", "bf16=true")
    assert verify("--length", "128", *(part for text in settings for part in ("--set", text))) == 0
    shown = capsys.readouterr().out
    assert "14 all-zero tensors" in shown
    assert (
        "exact: streamed loss and gradients equal plain autograd's in float32, and are as precise in bfloat16" in shown
    )


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(name, marks=pytest.mark.full) for name in ("bfloat16", "float64"))]
)
def test_another_dtype(verify: Callable[..., int], capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    assert verify("--length", "64", "--dtype", dtype, "--set", "dtype=bfloat16", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    expected = {"float32": "float64", "bfloat16": "float32", "float64": None}[dtype]
    assert (document["dtype"].split()[0], document["truth"]) == (dtype, expected)


@pytest.mark.full
def test_without_memory_for_a_truth_the_screen_says_so(
    verify: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FreeMemory, "why_too_large", lambda *given: "needs 9.0 GiB more memory, 2.0 GiB are free")
    assert verify("--length", "64") == 0
    shown = capsys.readouterr().out
    assert "float32, the training dtype (no wider dtype: float64: needs 9.0 GiB more memory, 2.0 GiB are free)" in shown
    assert "\nexact: streamed loss and gradients equal plain autograd's in float32\n" in shown
    assert verify("--length", "64", "--set", "bf16=true") == 0
    shown = capsys.readouterr().out
    assert "in bfloat16 autocast, to within 3e-02: no wider dtype was compared\n" in shown


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_short_rows_stand_beside_each_other(verify: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    write_rows((1, 1), (3, 2), (1, 4), (1, 1), (1, 1), (1, 1))
    assert verify("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"] == [f"rows.jsonl:{line}" for line in (1, 2, 3, 4)]
    assert document["length"] < 100
    assert document["tokens"] < 4 * document["length"]
    assert all(run["schedule"]["chunk_size"] < document["length"] for run in document["runs"] if run["schedule"])
    assert verify() == 0
    assert "the first 4, padded to" in capsys.readouterr().out


@pytest.mark.full
def test_a_long_prompt_is_cut_where_the_answer_begins(
    verify: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows((1500, 40), (5, 5), (5, 5))
    assert verify("--length", "60") == 0
    assert "rows.jsonl:1, tokens 1,4" in capsys.readouterr().out
    assert verify("--length", "60", "--json") == 0
    assert 20 <= json.loads(capsys.readouterr().out)["trained_tokens"] <= 40


def test_the_window_holds_what_is_trained_on() -> None:
    def row(length: int, first: int) -> Example:
        return Example(list(range(length)), [-100] * first + list(range(first, length)), "here:1")

    def cut(length: int, first: int, at_most: int) -> tuple[int, int, int]:
        [window] = choose_windows([row(length, first)], at_most)
        assert list(window.example.input_ids) == list(range(window.start, window.start + window.length))
        return window.start, window.length, int((torch.tensor(window.example.labels) != -100).sum())

    assert cut(10, 4, 20) == (0, 10, 6)
    assert cut(100, 4, 20) == (0, 20, 16)
    assert cut(100, 50, 20) == (40, 20, 10)
    assert cut(100, 97, 20) == (80, 20, 3)
    assert cut(100, 0, 20) == (0, 20, 19)
    rows = [row(3, 5), row(6, 2), row(30, 2), row(4, 2)]
    assert [window.length for window in choose_windows(rows, 60)] == [6, 30]  # the first has nothing to train on
    assert [window.length for window in choose_windows(rows, 120)] == [6, 30, 4]


# --- wrong ------------------------------------------------------------------------------------------------------------


def test_labels_shifted_inside_each_chunk_of_the_head(
    verify: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = head.linear_cross_entropy

    def wrong(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_size: int, **options: Any) -> Tensor:
        last = torch.arange(targets.shape[1]) % chunk_size == chunk_size - 1
        return right(hidden, weight, targets.masked_fill(last, -100), chunk_size=chunk_size, **options)

    monkeypatch.setattr(head, "linear_cross_entropy", wrong)
    assert verify("--length", "128") == 1
    verdict = capsys.readouterr().out.splitlines()[5]
    assert verdict.startswith("NOT exact: ")
    assert "; loss has relative error " in verdict


def test_a_dropped_prefix_gradient(
    verify: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cache.KeysAndValues.grad_views
    monkeypatch.setattr(
        cache.KeysAndValues, "grad_views", lambda *given: tuple(torch.zeros_like(grad) for grad in right(*given))
    )
    assert verify("--length", "128", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] is False
    assert any(name in document["worst"]["parameter"] for name in ("k_proj", "v_proj", "k_norm"))
    assert document["worst"]["error"] > 0.1
    assert "layer 0 of 2" in document["refusal"]
    assert document["loss_difference"] == pytest.approx(0, abs=1e-5)


@pytest.mark.full
def test_the_lost_terms_of_one_chunk(
    verify: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = vjp.GradientSum.add_term

    def wrong(self: Any, part: Tensor | None) -> None:
        self.parts = getattr(self, "parts", 0) + 1
        if self.parts != 2:
            right(self, part)

    monkeypatch.setattr(vjp.GradientSum, "add_term", wrong)
    assert verify("--length", "128", "--set", "bf16=true") == 1
    shown = capsys.readouterr().out
    assert "NOT exact: model.layers." in shown
    assert "would refuse this model: " in shown


def test_a_thousandth_in_one_parameter(
    verify: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = vjp.GradientSum.__init__, vjp.GradientSum.result
    down_proj = (32, 64)  # the one matrix of this shape in a layer

    def init(self: Any, owner: Tensor, widen: bool) -> None:
        right[0](self, owner, widen)
        self.factor = 1.001 if tuple(owner.shape) == down_proj else 1.0

    monkeypatch.setattr(vjp.GradientSum, "__init__", init)
    monkeypatch.setattr(vjp.GradientSum, "result", lambda self: right[1](self) * self.factor)
    for settings in ((), ("--set", "bf16=true")):
        assert verify("--length", "128", *settings) == 1
        verdict = capsys.readouterr().out.splitlines()[5]
        assert "mlp.down_proj.weight has relative error 1.0e-03, allowed 2.0e-0" in verdict


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--length", "1"], "--length must be at least 4 tokens, found 1"),
        (["--dtype", "int8"], "choose from float32, bfloat16, float16, float64"),
        (["--set", "max_length=8"], "more than max_length = 8 tokens"),
        (["--set", "datasets=[{path: nowhere.jsonl}]"], "nowhere.jsonl"),
        (["--set", "model.init.hiden_size=8"], "did you mean 'hidden_size'?"),
        (["--set", "model.init={model_type: openai-gpt, n_embd: 32, n_layer: 2, n_head: 4}"], "nothing to stream"),
    ],
)
def test_wrong_input_exits_2(
    verify: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert verify(*arguments) == 2
    shown, errors = capsys.readouterr()
    assert said in errors
    assert "exact" not in shown


@pytest.mark.full
def test_the_table_fits_eighty_columns(verify: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--length", "64") == 0
    table = capsys.readouterr().out.split("\n\n")[2].splitlines()
    assert len(table) > 10
    assert max(map(len, table)) <= 80


MIXTURE = {
    **{key: value for key, value in RECIPE["model"]["init"].items() if key != "attention_dropout"},
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def verify_mixture(verify: Callable[..., int], *arguments: str, **more: Any) -> int:
    recipe = {**RECIPE, "model": {"init": MIXTURE}, "router_aux_loss_coef": 3.0, **more}
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return verify(*arguments)


@pytest.mark.full
def test_the_balance_loss_is_part_of_the_proof(verify: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    write_rows((10, 20), (5, 12))  # both fit: the second is padded, and its padding is not to count
    assert verify_mixture(verify, "--length", "256", router_z_loss_coef=0.1) == 0
    shown = capsys.readouterr().out
    assert (
        "routers  3 times transformers' load-balancing loss; the z-loss is left out, because transformers has none"
        in shown
    )
    assert "the first 2, padded" in shown
    assert verify_mixture(verify, "--length", "256", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["router_aux_loss_coef"] == 3.0
    with_it = document["loss"]["plain"]
    assert verify_mixture(verify, "--length", "256", "--json", router_aux_loss_coef=0.0) == 0
    assert with_it > json.loads(capsys.readouterr().out)["loss"]["plain"] + 3.0, "a balance loss is 2 at least"


def test_a_wrong_balance_loss_is_caught(
    verify: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong loss is off by a thousandth of the share of each expert."""
    monkeypatch.setattr(
        RouterSums, "counts", property(lambda sums: torch.cat([1.001 * sums.routed, sums.tokens[None]]))
    )
    assert verify_mixture(verify, "--length", "128") == 1
    assert "loss has relative error" in capsys.readouterr().out


def test_a_mixture_that_cannot_be_balanced_is_refused(
    verify: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--set", "router_aux_loss_coef=0.1") == 2
    assert "Qwen3ForCausalLM has no router in its decoder layers" in " ".join(capsys.readouterr().err.split())


def packed(verify: Callable[..., int]) -> Callable[..., int]:
    """Verify four short rows that share a sequence."""
    write_rows((3, 12), (5, 20), (2, 9), (4, 15), (3, 11))
    return lambda *arguments: verify("--set", "packing=true", "--set", "engine.chunk_size=30", *arguments)


@pytest.mark.full
def test_packed_rows_are_compared_with_each_alone(verify: Callable[..., int], capsys) -> None:
    assert packed(verify)("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["packed"]
    assert len(document["rows"]) > 1
    assert packed(verify)() == 0
    assert "packed into one sequence, compared with each row alone" in capsys.readouterr().out


@pytest.mark.full
def test_packed_rows_that_meet_are_found(verify: Callable[..., int], monkeypatch, capsys) -> None:
    made = data.collate_packed

    def one_long_row(*arguments: Any, **more: Any) -> Any:
        batch = made(*arguments, **more)
        return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}

    monkeypatch.setattr(data, "collate_packed", one_long_row)
    assert packed(verify)() == 1
    assert "NOT exact" in capsys.readouterr().out


@pytest.mark.full
def test_packed_rows_of_a_long_first_row_leave_room_for_another(verify: Callable[..., int], capsys) -> None:
    write_rows((10, 300), (5, 300))
    assert verify("--set", "packing=true", "--length", "120", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2
