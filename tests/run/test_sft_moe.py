"""Router losses of a mixture of experts, from a recipe to a step: gradient, records, resume, errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.train import Run, train_settings
from streamtune.tasks.sft import Batches
from streamtune.tasks.steps import Steps
from streamtune.train import MicroBatch, StopRequest, SupervisedObjective
from streamtune.train.step import StepContext, accumulate_gradients
from tests.exactness.families import BOUND, worst
from tests.precision_kit import Float64, Reference, in_float64
from tests.run.test_adapters import losses, streamtune
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **{key: value for key, value in MIXTRAL.items() if key not in ("num_local_experts", "head_dim")},
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "moe_intermediate_size": 16,
}
ROUTED: dict[str, Any] = {
    **RECIPE,
    "model": {"init": MIXTRAL},
    "max_length": 160,
    "val_size": 5,
    "engine": FIXED,
    "gradient_accumulation_steps": 3,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "num_train_epochs": 1,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 29)
    return tmp_path


def recipe(folder: Path, **more: Any) -> Path:
    return write_recipe(folder, {**ROUTED, **more})


def built(folder: Path, **more: Any) -> Run:
    return build_run(load_recipe(recipe(folder, **more), []))


def records(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def first_step(run: Run) -> list[MicroBatch]:
    return Steps(Batches(run.prepared, run.tokenizer), run.recipe).next_step()


def gradient_of(run: Run, step: list[MicroBatch]) -> tuple[float, float | None, dict[str, Tensor]]:
    """Return loss, balance loss and gradient of a step, by the function of the training loop."""
    run.model.zero_grad(set_to_none=True)
    settings = train_settings(run.recipe, run.plan, run.handle.schedule)
    context = StepContext(run.backend, SupervisedObjective(run.handle), settings, run.handle)
    score = accumulate_gradients(context, step, step=1, stop=StopRequest())
    assert score is not None
    return score.loss, score.aux_loss, {name: p.grad.clone() for name, p in run.model.named_parameters()}


def counted(model: Any, step: list[MicroBatch]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Run the unstreamed model on each micro-batch; return the sum of ``-log p`` and router logits of all layers."""
    found = []
    for batch in step:
        positions = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        output = model(input_ids=batch.input_ids, **positions, output_router_logits=True, use_cache=False)
        nll = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), batch.shift_labels.flatten(), ignore_index=-100, reduction="sum"
        )
        tokens = batch.attention_mask.flatten().bool()
        logits = torch.cat([layer.flatten(0, -2)[tokens] for layer in output.router_logits])
        chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2, -1).indices, 1.0)
        found.append((nll, logits, chosen, logits.logsumexp(-1).square()))
    return found


def formulas(
    model: Any, step: list[MicroBatch], scope: str, balance: float, z: float
) -> tuple[float, float, dict[str, Tensor]]:
    """Return the losses by their formulas in plain torch on the unstreamed model, without padding."""
    model.zero_grad(set_to_none=True)
    parts = counted(model, step)
    groups = [parts] if scope == "global" else [[part] for part in parts]
    everything = sum(len(part[1]) for part in parts)
    aux, squares = torch.zeros(()), torch.zeros(())
    for group in groups:
        logits, chosen, square = (torch.cat([part[i] for part in group]) for i in (1, 2, 3))
        share = len(logits) / everything
        aux = aux + share * logits.shape[-1] * (chosen.mean(0) * logits.softmax(-1).mean(0)).sum()
        squares = squares + share * square.mean()
    entropy = sum(part[0] for part in parts) / sum(batch.num_targets for batch in step)
    (entropy + balance * aux + z * squares).backward()
    return entropy.item(), aux.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def check(found: tuple[float, float, dict[str, Tensor]], run: Run, compute: Any) -> None:
    """Check that loss, balance loss and gradients are as close to fp64 as the unstreamed model's."""
    run.handle.remove()
    plain = compute(run.model)
    with Float64():
        truth = compute(in_float64(run.model))
    for part in (0, 1):
        Reference((truth[part], truth[2]), (plain[part], plain[2])).check((found[part], found[2]))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("scope", ["micro", "global"])
@pytest.mark.parametrize("init", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_a_step_of_three_micro_batches_has_the_unstreamed_gradient(
    folder: Path, init: dict[str, Any], scope: str, packing: bool
) -> None:
    keys = {"router_aux_loss_coef": 2.0, "router_z_loss_coef": 0.1, "moe_balance": scope, "packing": packing}
    run = built(folder, model={"init": init}, **keys)
    step = first_step(run)
    assert len(step) == 3
    assert any(batch.num_tokens < batch.attention_mask.numel() for batch in step), "padding is to be left out"
    loss, aux, got = gradient_of(run, step)
    assert run.handle.routers.totals is None
    assert run.handle.routers.weight == 1.0
    check((loss, aux, got), run, lambda model: formulas(model, step, scope, 2.0, 0.1))


def test_the_two_scopes_differ(folder: Path) -> None:
    """The two scopes give different losses, so the test above can tell them apart."""
    grads = []
    for scope in ("micro", "global"):
        run = built(folder, router_aux_loss_coef=2.0, moe_balance=scope)
        grads.append(gradient_of(run, first_step(run))[2])
        run.start.release()  # a directory has one run at a time
    assert worst(*grads) > 100 * BOUND


@pytest.mark.parametrize("scope", ["micro", "global"])
def test_one_micro_batch_is_what_transformers_computes(folder: Path, scope: str) -> None:
    run = built(folder, router_aux_loss_coef=0.5, moe_balance=scope)
    [batch, *_] = step = first_step(run)[:1]
    loss, aux, got = gradient_of(run, step)
    labels = batch.shift_labels
    arguments = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}

    def own(model: Any) -> tuple[float, float, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        model.router_aux_loss_coef = 0.5
        output = model(**arguments, labels=labels, shift_labels=labels, output_router_logits=True)
        output.loss.backward()
        balance = output.aux_loss.item()
        return output.loss.item() - 0.5 * balance, balance, {name: p.grad for name, p in model.named_parameters()}

    check((loss, aux, got), run, own)


def test_without_the_keys_the_models_configuration_decides(folder: Path) -> None:
    assert built(folder).handle.routers.loss is None
    asked = {"init": {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.25}}
    loss = built(folder, model=asked).handle.routers.loss
    assert loss is not None
    assert (loss.balance, loss.scope) == (0.25, "micro")
    loss = built(folder, model=asked, router_aux_loss_coef=0.0).handle.routers.loss
    assert loss is not None
    assert loss.balance == 0


@pytest.mark.full
def test_trains_and_resumes_to_the_same_curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The routers have jitter: counting must draw the same random numbers as training, also after a resume."""
    init = {**MIXTRAL, "router_jitter_noise": 0.2, "attention_dropout": 0.1}
    recipe(folder, model={"init": init}, router_aux_loss_coef=0.1, router_z_loss_coef=0.01, moe_balance="global")
    assert run("--output-dir", "whole") == 0
    assert "aux_loss=" in capsys.readouterr().out
    settings = ("--set", "save_steps=1", "--set", "save_total_limit=9", "--output-dir", "split")
    assert run(*settings) == 0
    assert run(*settings, "--resume", "split/checkpoints/step-000002") == 0

    def curve(folder: str) -> list[tuple[Any, ...]]:
        keys = ("step", "loss", "aux_loss", "eval_loss", "tokens", "grad_norm")
        return [tuple(line.get(key) for key in keys) for line in records(folder)]

    assert curve("split") == curve("whole")
    steps = [line for line in records("whole") if "loss" in line]
    assert len(steps) == 4, "the last step has fewer micro-batches"
    assert all(2.0 <= line["aux_loss"] < 4.0 for line in steps), "it is top_k where all experts are chosen alike"


@pytest.mark.full
def test_what_is_recorded_does_not_move_with_the_coefficient(folder: Path) -> None:
    """The learning rate is 0: training and held-out loss are the cross-entropy."""
    asked = {"init": {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 3.0}}
    found = []
    for name, more in {"off": {}, "on": {"router_aux_loss_coef": 9.0}, "own": {"model": asked}}.items():
        recipe(folder, learning_rate=0.0, max_steps=1, **more)
        assert run("--output-dir", name) == 0
        [step, held_out] = records(name)
        assert ("aux_loss" in step) == (name != "off")
        found.append((step["loss"], held_out["eval_loss"], step.get("aux_loss")))
    assert found[0][:2] == found[1][:2] == found[2][:2]
    assert found[1][2] == found[2][2]


@pytest.mark.parametrize("key", ["router_aux_loss_coef", "router_z_loss_coef"])
def test_a_model_without_routers_is_refused_before_training(
    folder: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    init = {name: value for name, value in MIXTRAL.items() if "experts" not in name}
    recipe(folder, model={"init": {**init, "model_type": "llama"}}, **{key: 0.01})
    assert run("--dry-run") == UnsupportedModelError.exit_code
    shown = " ".join(capsys.readouterr().err.split())
    assert "LlamaForCausalLM has no router in its decoder layers" in shown
    line = 1 + next(i for i, text in enumerate(Path("tiny.yaml").read_text().splitlines()) if text.startswith(key))
    assert f"tiny.yaml:{line}" in shown
    assert f"delete {key}" in shown
    assert run("--dry-run", "--set", f"{key}=0") == 0


def test_a_scope_of_nothing_is_a_mistake(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="the router loss is off") as caught:
        built(folder, moe_balance="global")
    assert caught.value.where.endswith(f"tiny.yaml:{len(Path('tiny.yaml').read_text().splitlines())}")


def test_layers_for_multi_token_prediction_are_said_to_be_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    init |= {"model_type": "glm4_moe", "n_routed_experts": 4, "num_nextn_predict_layers": 1}
    recipe(folder, model={"init": init}, max_steps=1)
    assert run("--output-dir", "first") == 0
    assert "multi-token prediction" not in capsys.readouterr().err, "nothing was loaded"
    loaded = {**ROUTED, "model_name_or_path": "first/final", "max_steps": 1}
    del loaded["model"], loaded["tokenizer"]
    Path("tiny.yaml").write_text(yaml.safe_dump(loaded, sort_keys=False))
    assert run("--dry-run") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the checkpoint has layers for multi-token prediction (num_nextn_predict_layers: 1)") == 1


@pytest.mark.full
@pytest.mark.parametrize(("kind", "package"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_adapters_on_experts_in_few_bits(
    folder: Path, kind: str, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters are trained, resumed bit-identically, verified, evaluated and merged."""
    pytest.importorskip(package)
    keys = {"finetuning_type": "qlora", "quantization": kind, "lora_r": 4, "learning_rate": 1e-2}
    write_recipe(folder, {**ROUTED, **keys, "max_steps": 4, "save_steps": 2, "num_train_epochs": 4})
    assert run("--output-dir", "run") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"linear layers and experts in {kind}; CPU" in printed
    assert "merge the adapters first" in printed
    assert "stay in" not in printed
    before, kept = losses("run"), Path("run/final/adapter_model.safetensors").read_bytes()
    assert ".mlp.experts." in json.dumps(list(load_file("run/final/adapter_model.safetensors")))
    for gone in ("run/checkpoints/step-000004", "run/final"):
        shutil.rmtree(gone)
    assert run("--output-dir", "run") == 0
    assert losses("run") == before
    assert Path("run/final/adapter_model.safetensors").read_bytes() == kept
    assert streamtune("verify", "tiny.yaml", "--length", "64") == 0
    assert streamtune("export", "run", "merged") == 0  # which compares logits with those of the model that trained
    capsys.readouterr()
    found = []
    for model in ("run", "merged"):
        assert streamtune("eval", model, "tiny.yaml", "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["splits"])
    ours, theirs = ([split["loss"] for split in each.values()] for each in found)
    assert theirs == pytest.approx(ours, rel=1e-4)
